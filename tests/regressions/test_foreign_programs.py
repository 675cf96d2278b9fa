"""The original programs go on with logs that were appended to here: independent readers and writers of their layouts.

`RustLog` and `Laminarmq` below read and append as the programs do, from the description of their layouts; they share no
code with the package. Every directory that a program left goes three ways: appended to here, then by the program, then
read here again. The data is `tests/golden/foreign`, and all of `../shared/data/foreign` beside the checkout, or the
directory that TIDELOG_FOREIGN_DATA names, where that exists.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.regressions.test_foreign import METADATA, expected, fingerprint, held, tree

import tidelog
from tidelog.channels import export_narwhal, import_narwhal
from tidelog.cli.main import main
from tidelog.commitlog import SegmentedLog, verify
from tidelog.errors import Damaged
from tidelog.testing import ManualClock, SimDisk

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "foreign"
SHARED = Path(os.environ.get("TIDELOG_FOREIGN_DATA") or ROOT.parent / "shared" / "data" / "foreign")
LAMINAR = json.loads((GOLDEN / "laminarmq" / "contents.json").read_text())["stores"]
RUSTLOG = json.loads((GOLDEN / "rustlog" / "contents.json").read_text())["partitions"]
NEW = [b"from here", b"", b"x" * 3000]
THEIRS = [b"from the program", b"y" * 500]


class Stored(NamedTuple):
    seq: int
    data: bytes
    metadata: bytes = b""


class RustLog:
    """A partition as the program has it: segments of records with 12-byte headers, read from byte 0."""

    def __init__(self, directory: Path) -> None:
        self.paths = sorted(directory.glob("*.log"))

    def read(self) -> Iterator[Stored]:
        for path in self.paths:
            data, pos, last = path.read_bytes(), 0, int(path.stem) - 1
            while pos < len(data):
                size, offset = struct.unpack_from(">IQ", data, pos)
                assert offset > last, "offsets rise within a segment"
                assert pos + 12 + size <= len(data)
                yield Stored(offset, data[pos + 12 : pos + 12 + size])
                pos, last = pos + 12 + size, offset
            self.check_index(path, data)

    @staticmethod
    def check_index(path: Path, data: bytes) -> None:
        index = path.with_suffix(".index").read_bytes()
        assert len(index) % 16 == 0
        for offset, position in struct.iter_unpack(">QQ", index):
            assert struct.unpack_from(">IQ", data, position)[1] == offset

    def append(self, values: list[bytes]) -> None:
        offset = max(record.seq for record in self.read()) + 1
        with self.paths[-1].open("ab") as file:
            for at, value in enumerate(values):
                file.write(struct.pack(">IQ", len(value), offset + at) + value)


class Laminarmq:
    """A segmented log as the program has it: every `.index`, in order; the last one is the write segment."""

    def __init__(self, directory: Path, width: str, hasher: Callable[[bytes], int]) -> None:
        self.directory, self.hasher = directory, hasher
        self.tail = "<BI" if width == "u32" else "<BQ"
        self.bases = sorted(int(path.stem) for path in directory.glob("*.index"))

    def read(self) -> Iterator[Stored]:
        highest = self.bases[0]
        for base in self.bases:
            index = (self.directory / f"{base}.index").read_bytes()
            store = (self.directory / f"{base}.store").read_bytes()
            assert base == highest, "the next segment begins where the one before ends"
            if not index:
                continue
            assert struct.unpack_from("<QQ", index) == (base, 0)
            assert len(index) % 16 == 0, "the next entry would be misaligned"
            entries = list(struct.iter_unpack("<QII", index[16:]))
            if entries and entries[0][1:] == (0, 0) and entries[0][0] == base:
                del entries[0]  # the marker that the program writes twice
            for seq, (checksum, length, position) in enumerate(entries, base):
                content = store[position : position + length]
                assert len(content) == length
                assert self.hasher(content) == checksum
                (size,) = struct.unpack_from("<I", content)
                metadata, value = content[4 : 4 + size], content[4 + size :]
                tail = struct.calcsize(self.tail)
                assert struct.unpack(self.tail, metadata[-tail:]) == (1, seq)
                yield Stored(seq, value, metadata[:-tail])
            highest = base + len(entries)

    def append(self, values: list[bytes], metadata: bytes) -> None:
        """Positions are those of the end of the store, whatever is in it; an entry follows its record."""
        seq = max((record.seq for record in self.read()), default=self.bases[0] - 1) + 1
        base = self.bases[-1]
        index = (self.directory / f"{base}.index").open("ab")
        store = (self.directory / f"{base}.store").open("ab")
        with index, store:
            if not index.tell():
                index.write(struct.pack("<Q8x", base))
            for at, value in enumerate(values):
                whole = metadata + struct.pack(self.tail, 1, seq + at)
                content = struct.pack("<I", len(whole)) + whole + value
                index.write(struct.pack("<QII", self.hasher(content), len(content), store.tell()))
                store.write(content)


def siphash13(data: bytes) -> int:
    """Rust's DefaultHasher: SipHash with one round a word, three at the end, zero keys."""
    mask = 2**64 - 1
    v = [0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573]

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = v[0] + v[1] & mask
            v[2] = v[2] + v[3] & mask
            v[1], v[3] = rotated(v[1], 13) ^ v[0], rotated(v[3], 16) ^ v[2]
            v[0] = rotated(v[0], 32)
            v[2] = v[2] + v[1] & mask
            v[0] = v[0] + v[3] & mask
            v[1], v[3] = rotated(v[1], 17) ^ v[2], rotated(v[3], 21) ^ v[0]
            v[2] = rotated(v[2], 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(1)
        v[0] ^= word
    v[2] ^= 255
    rounds(3)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def laminarmq(directory: Path, name: str) -> Laminarmq:
    store = LAMINAR[name]
    return Laminarmq(directory, store["index"], siphash13 if store["hasher"].startswith("SipHash") else zlib.crc32)


@pytest.mark.parametrize("name", LAMINAR)
def test_laminarmq_goes_on_with_a_log_that_was_appended_to_here(name: str, tmp_path: Path) -> None:
    path, wanted, meta = tmp_path / "log", expected(f"laminarmq/{name}"), METADATA.get(f"laminarmq/{name}", b"")
    shutil.copytree(GOLDEN / "laminarmq" / name, path)
    before = [record.metadata for record in laminarmq(path, name).read()]
    for roll in (False, True):
        with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
            first = log.append_many(NEW, meta=meta).start
            if roll:
                log.seal()
                log.append(NEW[0], meta=meta)
        mine = NEW + [NEW[0]] * roll
        read = list(laminarmq(path, name).read())
        wanted += [fingerprint(first + at, data) for at, data in enumerate(mine)]
        assert [fingerprint(record.seq, record.data) for record in read] == wanted
        assert [record.metadata for record in read[len(before) :]] == [meta] * len(mine)
        laminarmq(path, name).append(THEIRS, meta)
        wanted += [fingerprint(wanted[-1][0] + 1 + at, data) for at, data in enumerate(THEIRS)]
        before = [record.metadata for record in laminarmq(path, name).read()]
        with SegmentedLog.open(str(path), read_only=True) as log:
            assert held(log) == wanted
        assert verify(str(path)).ok
    with SegmentedLog.open(str(path)) as log:
        assert held(log) == wanted
        assert not log.report.damage


@pytest.mark.parametrize("name", RUSTLOG)
def test_rustlog_goes_on_with_a_log_that_was_appended_to_here(name: str, tmp_path: Path) -> None:
    path, wanted = tmp_path / "log", expected(f"rustlog/{name}")
    shutil.copytree(GOLDEN / "rustlog" / name, path)
    digits = len(next(path.glob("*.log")).stem)
    for roll in (False, True):
        with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
            first = log.append_many(NEW).start
            if roll:
                log.seal()
                log.append(NEW[0])
        wanted += [fingerprint(first + at, data) for at, data in enumerate(NEW + [NEW[0]] * roll)]
        assert [fingerprint(record.seq, record.data) for record in RustLog(path).read()] == wanted
        assert {len(file.stem) for file in path.glob("*.log")} == {digits}
        RustLog(path).append(THEIRS)
        wanted += [fingerprint(wanted[-1][0] + 1 + at, data) for at, data in enumerate(THEIRS)]
        with SegmentedLog.open(str(path), read_only=True) as log:
            assert held(log) == wanted
    with SegmentedLog.open(str(path)) as log:
        assert held(log) == wanted
        assert not log.report.damage
    assert verify(str(path)).ok


@pytest.fixture
def continued(tmp_path: Path) -> tuple[Path, int]:
    """A RustLog partition that was appended to here and then by the program; and the byte where the program began."""
    path = tmp_path / "log"
    shutil.copytree(GOLDEN / "rustlog" / "short-names", path)
    with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
        log.append_many(NEW)
    start = RustLog(path).paths[-1].stat().st_size
    RustLog(path).append(THEIRS)
    return path, start


def test_records_that_the_program_appended_are_covered_by_checksums_from_then_on(continued: tuple[Path, int]) -> None:
    path, start = continued
    with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
        assert len(log) == 65
        assert log.append(b"mine again") == 65
    data = RustLog(path).paths[-1]
    content = bytearray(data.read_bytes())
    content[start + 12] ^= 1
    data.write_bytes(content)
    assert [damage.fault.seq for damage in verify(str(path)).damage] == [63]


@pytest.mark.parametrize("cut", [1, 11, 12, 30])
def test_an_unfinished_record_of_the_program_is_cut_by_a_writer_only(continued: tuple[Path, int], cut: int) -> None:
    path, _ = continued
    data = RustLog(path).paths[-1]
    whole = data.read_bytes()
    data.write_bytes(whole + (struct.pack(">IQ", 100, 65) + bytes(range(30)))[:cut])
    before = tree(path)
    assert verify(str(path)).ok
    assert tree(path) == before
    with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
        assert (log.report.cut_bytes, len(log)) == (cut, 65)
    assert data.read_bytes() == whole


def test_damage_in_what_the_program_appended_is_not_cut(continued: tuple[Path, int]) -> None:
    path, start = continued
    RustLog(path).append(THEIRS)
    data = RustLog(path).paths[-1]
    content = bytearray(data.read_bytes())
    content[start : start + 4] = struct.pack(">I", 1 << 30)
    data.write_bytes(content)
    before = tree(path)
    with pytest.raises(Damaged, match="nothing was changed"):
        SegmentedLog.open(str(path))
    assert not verify(str(path)).ok
    assert tree(path) == before
    with SegmentedLog.open(str(path), repair=True) as log:
        assert len(log.report.quarantined) == 1
        assert [record.seq for record in log] == list(range(63))


def test_records_after_the_end_are_still_a_torn_write_where_the_log_was_not_closed() -> None:
    """Bytes that no checksum covers are those of a killed writer, unless the manifest proves a clean end."""
    disk = SimDisk()
    log = SegmentedLog.open("log", "rustlog", disk=disk, clock=ManualClock(), header_bytes=12)
    log.append(b"acked")
    killed = disk.reboot()
    name = "log/00000000000000000000.log"
    killed.write_file(name, killed.read_file(name) + struct.pack(">IQ", 3, 1) + b"not")
    with SegmentedLog.open("log", disk=killed, clock=ManualClock()) as again:
        assert [record.data for record in again] == [b"acked"]
        assert again.report.cut_bytes == 15


def test_the_program_may_start_another_segment_after_ours(continued: tuple[Path, int]) -> None:
    path, _ = continued
    (path / "000000000065.log").write_bytes(struct.pack(">IQ", 4, 65) + b"next")
    (path / "000000000065.index").write_bytes(b"")
    with SegmentedLog.open(str(path), read_only=True) as log:
        assert [record.seq for record in log] == list(range(66))
    assert verify(str(path)).ok
    with SegmentedLog.open(str(path)) as log:
        assert not log.report.damage
        assert [record.seq for record in log] == list(range(66))
    assert verify(str(path)).ok


@pytest.mark.parametrize(
    ("source", "options", "name"),
    [
        ("laminarmq/u32-unit", ("--to", "rustlog", "--header-bytes", "12"), "rustlog"),
        ("rustlog/topics/orders/partitions/0", ("--to", "laminar", "--index-width", "8"), "u64-low"),
        ("rustlog/server", ("--to", "rustlog"), "rustlog"),
        ("laminarmq/u64-unit", ("--to", "laminar"), "u64-unit"),
        ("laminarmq/u64-note", ("--to", "laminar"), "u64-note"),
    ],
)
def test_a_converted_log_is_one_that_the_program_reads(
    source: str, options: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    assert main(["log", "convert", str(GOLDEN / source), str(path), *options]) == 0
    reader = RustLog(path) if name == "rustlog" else laminarmq(path, name)
    assert [fingerprint(record.seq, record.data) for record in reader.read()] == expected(source)


def test_rustlog_reads_what_compaction_and_retention_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    shutil.copytree(GOLDEN / "rustlog" / "topics/orders/partitions/0", path)
    with SegmentedLog.open(str(path)) as log:
        log.compact(lambda record: record.data[:1] or None)
        kept = held(log)
        assert 0 < len(kept) < 1000
    assert [fingerprint(record.seq, record.data) for record in RustLog(path).read()] == kept
    with SegmentedLog.open(str(path)) as log:
        log.retain(keep_bytes=1)
        kept = held(log)
    assert [fingerprint(record.seq, record.data) for record in RustLog(path).read()] == kept


def test_the_data_of_the_original_programs_is_that_of_the_golden_files(tmp_path: Path) -> None:
    """All of it, where it is present: every file here is the program's, and every one that is only there is read."""
    if not SHARED.is_dir():
        pytest.skip(f"there is no {SHARED}: only the directories in tests/golden/foreign were read")
    here, there = tree(GOLDEN), tree(SHARED)
    assert {name for name, content in here.items() if there.get(name) != content} == set()
    contents = json.loads((SHARED / "narwhal" / "contents.json").read_text())
    for kind in ("stopped", "server"):
        for channel in contents[kind]:
            directory = SHARED / "narwhal" / kind / channel["directory"]
            seqs = [message["seq"] for message in channel["messages"]]
            if seqs:
                with SegmentedLog.open(str(directory), read_only=True) as log:
                    assert [record.seq for record in log] == seqs
        with tidelog.open(str(tmp_path / f"{kind}-data"), threads=False) as database:
            imported = import_narwhal(database.channels, str(SHARED / "narwhal" / kind), domain="localhost")
            assert {each.channel: each.messages for each in imported} == {
                f"!{channel['handler']}@localhost": len(channel["messages"]) for channel in contents[kind]
            }
            export_narwhal(database.channels, str(tmp_path / kind))
        assert tree(tmp_path / kind) == tree(SHARED / "narwhal" / kind)
