"""Logs that the original programs wrote: laminarmq, RustLog and narwhal. Listed in docs/bugs.md.

`tests/golden/foreign` holds directories as these programs left them, and `contents.json` files that say what was
appended. The expectation of every test comes from there, never from the code under test.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tidelog.cli.main import main
from tidelog.commitlog import SegmentedLog, convert, restore, verify
from tidelog.errors import BadInput, Corrupt, Damaged, UnknownLayout
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"
LAMINAR = json.loads((FOREIGN / "laminarmq" / "contents.json").read_text())["stores"]
RUSTLOG = json.loads((FOREIGN / "rustlog" / "contents.json").read_text())["partitions"]
NARWHAL = json.loads((FOREIGN / "narwhal" / "contents.json").read_text())
Value: TypeAlias = tuple[int, str]
Run: TypeAlias = Callable[..., tuple[int, str, str]]


def narwhal_directories() -> dict[str, Any]:
    found = {}
    for kind in ("stopped", "server"):
        for channel in NARWHAL[kind]:
            name = f"{kind}/{channel['directory']}"
            if (FOREIGN / "narwhal" / name).exists() and channel["messages"]:
                found[name] = channel["messages"]
    return found


CASES: dict[str, list[dict[str, Any]]] = {
    # What the program itself reads, where that is less than what it had acknowledged.
    **{f"laminarmq/{name}": s["records"][: s.get("program_reads")] for name, s in LAMINAR.items()},
    **{f"rustlog/{name}": partition["records"] for name, partition in RUSTLOG.items()},
    **{f"narwhal/{name}": messages for name, messages in narwhal_directories().items()},
}
every_directory = pytest.mark.parametrize("name", CASES)


# Metadata of a type, which an append has to give, in bincode: what their program decodes.
METADATA = {
    "laminarmq/u32-number": struct.pack("<I", 77),
    "laminarmq/u64-note": struct.pack("<Q", 3) + b"key" + struct.pack("<Q?", 1_760_000_000_000, True),
}


def fingerprint(seq: int, data: bytes) -> Value:
    return seq, hashlib.sha256(data).hexdigest()


def expected(name: str) -> list[Value]:
    """Seq and hash of each record, from contents.json."""
    found = []
    for record in CASES[name]:
        seq: int = next(record[key] for key in ("index", "offset", "seq") if key in record)
        if "sha256" in record:
            found.append((seq, record["sha256"]))
        else:
            data = record["text"].encode() if "text" in record else bytes.fromhex(record["hex"])
            found.append(fingerprint(seq, data))
    return found


def held(log: SegmentedLog, first: int | None = None) -> list[Value]:
    return [fingerprint(record.seq, record.data) for record in log.records(first)]


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory, but for the lock file, which holds nothing."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".tidelog.lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture
def copy_foreign_log(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of one of the directories."""

    def make(name: str) -> Path:
        target = tmp_path / "log"
        shutil.copytree(FOREIGN / name, target)
        return target

    return make


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `tidelog log …`; exit code, standard output, standard error."""

    def command(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["log", *map(str, words)])
        out, err = capsysbinary.readouterr()
        return code, out.decode("utf-8", "surrogateescape"), err.decode()

    return command


# ── every directory, every verb ───────────────────────────────────────────────────────────────────


@every_directory
def test_every_record_of_the_original_program_is_read(name: str, copy_foreign_log: Callable[[str], Path]) -> None:
    path = copy_foreign_log(name)
    before = tree(path)
    with SegmentedLog.open(str(path), read_only=True) as log:
        assert held(log) == expected(name)
        for seq, digest in expected(name)[:: max(len(CASES[name]) // 7, 1)]:
            assert fingerprint(seq, log.read(seq).data) == (seq, digest)
    assert tree(path) == before


@every_directory
def test_cat_verify_and_inspect_agree_and_change_nothing(
    name: str, copy_foreign_log: Callable[[str], Path], run: Run
) -> None:
    path, wanted = copy_foreign_log(name), expected(name)
    before = tree(path)
    code, out, err = run("cat", path, "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [seq for seq, _ in wanted]
    code, out, err = run("verify", path, "--json")
    assert (code, json.loads(out)["records"], err) == (0, len(wanted), "")
    code, out, err = run("inspect", path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["highest"] == (wanted[-1][0] + 1 if wanted else 0)
    assert tree(path) == before


@every_directory
def test_convert_and_restore_keep_every_record(
    name: str, copy_foreign_log: Callable[[str], Path], tmp_path: Path
) -> None:
    path, wanted = copy_foreign_log(name), expected(name)
    with SegmentedLog.open(str(path), read_only=True) as log:
        settings: dict[str, Any] = {"index_width": 8} if wanted and wanted[-1][0] >= 1 << 32 else {}
        for to in ("tide", "laminar"):
            shift = 1 if to == "tide" and log.lowest == 0 else 0
            drop = frozenset(("node",)) if to == "laminar" else frozenset[str]()
            target = str(tmp_path / to)
            with convert(log, target, to, renumber=bool(shift), drop=drop, clamp_times=True, **settings) as copy:
                assert [(seq - shift, digest) for seq, digest in held(copy)] == wanted
            assert verify(target).ok
        if wanted:
            last = wanted[len(wanted) // 2][0]
            restore(log, str(tmp_path / "restored"), to_seq=last)
            with SegmentedLog.open(str(tmp_path / "restored"), log.codec, read_only=True) as copy:
                assert held(copy) == [value for value in wanted if value[0] <= last]


@every_directory
def test_an_append_goes_on_where_the_original_program_stopped(
    name: str, copy_foreign_log: Callable[[str], Path]
) -> None:
    path, wanted = copy_foreign_log(name), expected(name)
    before = tree(path)
    with SegmentedLog.open(str(path), clock=ManualClock()) as log:
        assert held(log) == wanted
        assert log.report.cut_bytes == 0
        assert (log.report.quarantined, log.report.damage) == ([], [])
        meta = METADATA.get(name, b"")
        first = log.append_many([b"one", b"two"], meta=meta).start
        stream = log.append_stream([b"thr", b"ee"], meta=meta)
        assert (first, stream) == ((wanted[-1][0] + 1 if wanted else log.lowest), first + 2)
        log.seal()
        log.append(b"four", meta=meta)
    more = [fingerprint(first + at, data) for at, data in enumerate((b"one", b"two", b"three", b"four"))]
    with SegmentedLog.open(str(path)) as log:
        assert log.report.damage == []
        assert held(log) == wanted + more
        log.truncate(first + 1)
        assert held(log) == [*wanted, more[0]]
    assert verify(str(path)).ok
    after = tree(path)
    for file, content in before.items():
        if file.endswith((".log", ".store")):
            assert after[file].startswith(content), f"bytes of {file} are gone"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("laminarmq/")])
def test_what_is_appended_to_a_laminar_store_is_what_its_program_would_read(
    name: str, copy_foreign_log: Callable[[str], Path]
) -> None:
    """Method: the new entry is read with `struct` alone: position, length, the width of the seq."""
    path = copy_foreign_log(name)
    store = LAMINAR[name.removeprefix("laminarmq/")]
    # The files are as old as the checkout: by age the segment would be rolled first.
    with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
        base, seq = log.segments[-1].start, log.append(b"new", meta=METADATA.get(name, b""))
    index, data = (path / f"{base}.index").read_bytes(), (path / f"{base}.store").read_bytes()
    checksum, length, position = struct.unpack_from("<QII", index, 16 + 16 * (seq - base))
    assert len(index) == 16 + 16 * (seq - base + 1)
    assert position + length == len(data)
    assert position == len(data) - length
    metadata = METADATA.get(name, b"") + struct.pack("<BI" if store["index"] == "u32" else "<BQ", 1, seq)
    assert data[position:] == struct.pack("<I", len(metadata)) + metadata + b"new"
    assert (checksum >> 32 > 0) == store["hasher"].startswith("SipHash")


def test_the_metadata_of_another_program_is_handed_out_as_it_is_stored() -> None:
    with SegmentedLog.open(str(FOREIGN / "laminarmq" / "u32-number"), read_only=True) as log:
        numbers = [record["metadata"] for record in LAMINAR["u32-number"]["records"]]
        assert [struct.unpack("<IBI", record.meta) for record in log] == [(n, 1, n) for n in numbers]
    with SegmentedLog.open(str(FOREIGN / "laminarmq" / "u64-note"), read_only=True) as log:
        for record, wanted in zip(log, LAMINAR["u64-note"]["records"], strict=True):
            key = wanted["metadata"]["key"].encode()
            note = struct.pack("<Q", len(key)) + key
            note += struct.pack("<Q?", wanted["metadata"]["written_at"], wanted["metadata"]["flag"])
            assert record.meta == note + struct.pack("<BQ", 1, record.seq)


# ── what is not understood ────────────────────────────────────────────────────────────────────────


def refused_everywhere(run: Run, path: Path, to: Path) -> list[str]:
    """What each command says. All of them end with exit code 1 and leave every byte as it was."""
    before, said = tree(path), []
    for words in (
        ("cat", path),
        ("verify", path),
        ("inspect", path),
        ("append", path),
        ("repair", path),
        ("convert", path, to, "--to", "tide"),
    ):
        code, out, err = run(*words, stdin=b"new\n")
        assert (words[0], code, out) == (words[0], 1, "")
        said.append(err)
    assert tree(path) == before
    return said


@pytest.mark.parametrize("records", [2, 20])
def test_a_store_with_an_unknown_hash_function_is_an_error(
    records: int, copy_foreign_log: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    path = copy_foreign_log("laminarmq/u32-siphash")
    index = bytearray((path / "0.index").read_bytes())
    for at in range(20):
        index[16 + 16 * at] ^= 0x55  # as a hash function does that neither reader knows
    (path / "0.index").write_bytes(index[: 16 + 16 * records])
    for said in refused_everywhere(run, path, tmp_path / "copy"):
        assert "another hash function" in said
        assert "nothing was changed" in said
    before = tree(path)
    code, out, err = run("cat", path, "--unverified", "--json")
    wanted = expected("laminarmq/u32-siphash")[:records]
    assert (code, [json.loads(line)["seq"] for line in out.splitlines()], err) == (0, [seq for seq, _ in wanted], "")
    code, out, _ = run("verify", path, "--unverified", "--json")
    assert code == 0
    assert "no checksum was verified" in json.loads(out)["notes"][0]
    assert run("inspect", path, "--unverified")[0] == 0
    assert run("convert", path, tmp_path / "readable", "--to", "laminar", "--unverified")[0] == 0
    with SegmentedLog.open(str(tmp_path / "readable"), read_only=True) as log:
        assert held(log) == wanted
    with pytest.raises(BadInput, match="for reading"):
        SegmentedLog.open(str(path), unverified=True)
    with SegmentedLog.open(str(path), read_only=True, unverified=True) as log, pytest.raises(BadInput, match="convert"):
        restore(log, str(tmp_path / "restored"), to_seq=1)
    assert tree(path) == before


def test_unverified_reads_still_verify_a_known_hash_function(copy_foreign_log: Callable[[str], Path], run: Run) -> None:
    path = copy_foreign_log("laminarmq/u32-unit")
    store = bytearray((path / "121.store").read_bytes())
    store[100] ^= 1
    (path / "121.store").write_bytes(store)
    assert run("cat", path, "--unverified")[0] == 1
    code, _, err = run("cat", FOREIGN / "rustlog" / "server", "--unverified")
    assert (code, "for laminar stores" in err) == (2, True)


def test_an_append_without_metadata_to_a_store_that_has_it_is_refused(
    copy_foreign_log: Callable[[str], Path], run: Run
) -> None:
    path = copy_foreign_log("laminarmq/u32-number")
    before = tree(path)
    # By the age of the files the segment would be rolled first.
    with SegmentedLog.open(str(path), segment_age_ms_max=None) as log:
        for append in (log.append, lambda data: log.append_many([data]), lambda data: log.append_stream([data])):
            with pytest.raises(BadInput, match="metadata"):
                append(b"new")
    data = {name: content for name, content in tree(path).items() if name.endswith((".store", ".index"))}
    assert data == {name: content for name, content in before.items() if name in data}
    assert run("append", path, "--meta-hex", "4d000000", stdin=b"new\n")[0] == 0
    with SegmentedLog.open(str(path), read_only=True) as log:
        record = log.read(log.highest - 1)
        assert (record.data, record.meta) == (b"new", struct.pack("<IBI", 77, 1, record.seq))


@pytest.mark.parametrize(
    ("files", "codec"),
    [
        ({"00000000000000000000.log": b"2024-05-01 12:00:00 INFO started\n" * 40}, "rustlog"),
        ({"00000000000000000000.log": struct.pack("<IQ", 5, 0) + b"hello" * 40}, "rustlog"),
        ({"00000000000000000001.log": b"2024-05-01 12:00:00 INFO started\n" * 40}, "narwhal"),
    ],
    ids=["text", "little-endian", "text as narwhal"],
)
def test_files_of_another_layout_are_an_error(files: dict[str, bytes], codec: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    (path / f"{next(iter(files))[:20]}.{'index' if codec == 'rustlog' else 'idx'}").write_bytes(b"")
    for said in refused_everywhere(run, path, tmp_path / "copy"):
        assert f"of the {codec} layout" in said


def test_names_of_two_lengths_are_no_log(copy_foreign_log: Callable[[str], Path]) -> None:
    path = copy_foreign_log("rustlog/short-names")
    (path / "00000000000000000060.log").write_bytes(b"")
    before = tree(path)
    for read_only in (True, False):
        with pytest.raises(UnknownLayout, match="12 and of 20 digits"):
            SegmentedLog.open(str(path), "rustlog", read_only=read_only)
    assert tree(path) == before


# ── what may be cut, and what may not ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["rustlog/server", "rustlog/topics/orders/partitions/1", "rustlog/short-names"])
@pytest.mark.parametrize("cut", [1, 11, 12, 13])
def test_a_torn_last_record_of_a_foreign_log_is_cut_by_a_writer_only(
    name: str, cut: int, copy_foreign_log: Callable[[str], Path], run: Run
) -> None:
    path, wanted = copy_foreign_log(name), expected(name)
    data = max(path.glob("*.log"))
    data.write_bytes(data.read_bytes() + struct.pack(">IQ", 20, wanted[-1][0] + 1)[:cut] + b"x" * (cut - 12))
    before = tree(path)
    assert run("cat", path)[0] == 0
    assert run("verify", path)[0] == 0
    assert tree(path) == before
    with SegmentedLog.open(str(path)) as log:
        assert (log.report.cut_bytes, log.report.quarantined) == (cut, [])
        assert held(log) == wanted
        assert log.append(b"next") == wanted[-1][0] + 1


@pytest.mark.parametrize("name", ["rustlog/server", "rustlog/topics/orders/partitions/1", "rustlog/short-names"])
@pytest.mark.parametrize("change", ["length past the end", "length over the limit", "offset goes back"])
def test_records_after_a_damaged_one_are_not_cut(
    name: str, change: str, copy_foreign_log: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    """Four records follow a bad one in the active segment. No command takes the bad one for the end."""
    path, wanted = copy_foreign_log(name), expected(name)
    data = max(path.glob("*.log"))
    content, at, count = bytearray(data.read_bytes()), 0, 0
    base = int(data.stem)
    good = wanted[-1][0] - 4 - base
    while count < good:
        at += 12 + struct.unpack_from(">I", content, at)[0]
        count += 1
    size, offset = struct.unpack_from(">IQ", content, at)
    put = {
        "length past the end": (size + (1 << 20), offset),
        "length over the limit": (1 << 31, offset),
        "offset goes back": (size, 0),
    }
    struct.pack_into(">IQ", content, at, *put[change])
    data.write_bytes(content)
    before = tree(path)
    readable = [value for value in wanted if value[0] < base + good]
    code, out, err = run("cat", path, "--json")
    assert (code, [json.loads(line)["seq"] for line in out.splitlines()]) == (1, [seq for seq, _ in readable])
    assert f"seq {base + good}" in err
    assert run("cat", path, "--skip-damage")[0] == 0
    assert run("verify", path)[0] == 1
    code, _, err = run("append", path, stdin=b"new\n")
    assert code == 1
    assert "nothing was changed" in err
    assert run("convert", path, tmp_path / "copy", "--to", "laminar")[0] == 1
    with SegmentedLog.open(str(path), read_only=True) as log, pytest.raises(Corrupt) as told:
        list(log)
    assert told.value.seq == base + good
    assert tree(path) == before
    assert run("repair", path)[0] == 0
    kept = b"".join(data for file, data in tree(path).items() if file.startswith("quarantine/"))
    assert kept == bytes(content[at:])
    with SegmentedLog.open(str(path)) as log:
        assert held(log) == readable


@pytest.mark.parametrize("entries", [1, 2])
def test_last_entries_of_a_foreign_store_that_do_not_match_are_not_cut(
    entries: int, copy_foreign_log: Callable[[str], Path], run: Run
) -> None:
    path, wanted = copy_foreign_log("laminarmq/u32-unit"), expected("laminarmq/u32-unit")
    store, index = bytearray((path / "377.store").read_bytes()), (path / "377.index").read_bytes()
    position = 0
    for entry in range(entries):
        position = struct.unpack_from("<QII", index, len(index) - 16 * (entry + 1))[2]
        store[position + 2] ^= 1
    (path / "377.store").write_bytes(store)
    before = tree(path)
    assert run("verify", path)[0] == 1
    assert run("cat", path)[0] == 1
    code, _, err = run("append", path, stdin=b"new\n")
    assert code == 1
    assert "nothing was changed" in err
    assert tree(path) == before
    assert run("repair", path)[0] == 0
    kept = {file: data for file, data in tree(path).items() if file.startswith("quarantine/")}
    assert {len(data) for data in kept.values()} == {len(store) - position, len(index)}
    with SegmentedLog.open(str(path)) as log:
        assert held(log) == wanted[:-entries]


@pytest.mark.parametrize("cut", [1, 16, 17, 40])
def test_entries_whose_content_the_program_had_not_flushed_are_dropped(
    cut: int, copy_foreign_log: Callable[[str], Path]
) -> None:
    """The store lacks its last bytes, the index does not: an unflushed buffer, which the program loses as well."""
    path, wanted = copy_foreign_log("laminarmq/u32-unit"), expected("laminarmq/u32-unit")
    store = (path / "377.store").read_bytes()
    (path / "377.store").write_bytes(store[:-cut])
    with SegmentedLog.open(str(path)) as log:
        lost = len(wanted) - len(held(log))
        assert 1 <= lost <= 4
        assert held(log) == wanted[:-lost]
        assert log.append(b"next") == wanted[-lost][0]
    assert (path / "377.store").read_bytes().startswith(store[:-cut]), "what was there stays, as a dead range"
    with SegmentedLog.open(str(path)) as log:
        assert held(log)[:-1] == wanted[:-lost]


def test_a_damaged_record_inside_a_foreign_store_is_damage_and_nothing_else_moves(
    copy_foreign_log: Callable[[str], Path], run: Run
) -> None:
    path, wanted = copy_foreign_log("laminarmq/recovered"), expected("laminarmq/recovered")
    store = bytearray((path / "199.store").read_bytes())
    position = struct.unpack_from("<QII", (path / "199.index").read_bytes(), 16 + 16 * 60)[2]
    store[position + 9] ^= 1
    (path / "199.store").write_bytes(store)
    code, _, err = run("cat", path)
    assert code == 1
    assert "seqs 259 to 259" in err
    with SegmentedLog.open(str(path)) as log:
        assert [damage.fault.seq for damage in log.report.damage] == [259]
        values = [fingerprint(record.seq, record.data) for record in log.records(skip_damage=True)]
        assert values == [value for value in wanted if value[0] != 259]
        assert log.append(b"next") == 310


def test_the_width_of_a_laminar_store_cannot_be_changed(copy_foreign_log: Callable[[str], Path]) -> None:
    for name, other in (("u64-low", 4), ("u64-unit", 4), ("u64-note", 4), ("u32-unit", 8), ("u32-number", 8)):
        path = str(FOREIGN / "laminarmq" / name)
        with pytest.raises(BadInput, match=f"seqs of {12 - other} bytes"):
            SegmentedLog.open(path, read_only=True, index_width=other)
    path = str(copy_foreign_log("laminarmq/u64-low"))
    with SegmentedLog.open(path) as log:
        log.truncate(256)
        log.append(b"wide")
        log.seal()
    with SegmentedLog.open(path) as log:
        log.append(b"also wide: the segment before tells")
    assert struct.unpack_from("<IBQ", (Path(path) / "257.store").read_bytes()) == (9, 1, 257)


def test_the_header_size_of_a_rustlog_log_cannot_be_changed(copy_foreign_log: Callable[[str], Path]) -> None:
    path = str(copy_foreign_log("rustlog/server"))
    with pytest.raises(BadInput, match="headers of 12 bytes, not 20"):
        SegmentedLog.open(path, header_bytes=20)
    with SegmentedLog.open(path, header_bytes=12) as log:
        assert len(log) == 300
    disk = SimDisk()
    with SegmentedLog.open("log", "rustlog", disk=disk, clock=ManualClock(), header_bytes=12) as log:
        log.append_many([b"a", b"bc"])
    assert disk.read_file("log/00000000000000000000.log") == (
        struct.pack(">IQ", 1, 0) + b"a" + struct.pack(">IQ", 2, 1) + b"bc"
    )
    with SegmentedLog.open("log", disk=disk, clock=ManualClock()) as log:
        assert [record.data for record in log] == [b"a", b"bc"]
        with pytest.raises(BadInput, match="no time"):
            log.seek_time(5)


# ── times that step back ──────────────────────────────────────────────────────────────────────────

STEP_US = 1_700_000_000_000_000


def stepping(path: Path, *, seal: bool) -> list[Record]:
    """A rustlog log of another program whose clock went back an hour after 500 records; no side-car."""
    records = [Record(seq, STEP_US + seq - (3_600_000_000 if seq >= 500 else 0), b"%d" % seq) for seq in range(1000)]
    path.mkdir()
    bases = (0, 700) if seal else (0,)
    for base, stop in zip(bases, (*bases[1:], 1000), strict=True):
        part = records[base:stop]
        data = [struct.pack(">IQQ", len(r.data), r.seq, r.ts_us) + r.data for r in part]
        (path / f"{base:020d}.log").write_bytes(b"".join(data))
        (path / f"{base:020d}.index").write_bytes(b"")
    return records


@pytest.mark.parametrize("seal", [False, True])
def test_times_that_step_back_in_a_foreign_log_are_a_note(seal: bool, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "log"
    records = stepping(path, seal=seal)
    code, out, _ = run("verify", path, "--json")
    assert (code, json.loads(out)["records"]) == (0, 1000)
    assert any("times step back, 1 times, first at seq 500" in note for note in json.loads(out)["notes"])
    with SegmentedLog.open(str(path)) as log:
        assert log.report.cut_bytes == 0
        assert list(log) == records
        assert log.append(b"new") == 1000
        assert log.read(1000).ts_us > STEP_US + 499
        # The first record that is not older, also where later ones are.
        assert log.seek_time(STEP_US + 400) == 400
        assert log.seek_time(STEP_US - 3_600_000_000 + 600) == 0
    with SegmentedLog.open(str(path)) as log:
        assert list(log)[:1000] == records
        assert not log.report.damage
    assert verify(str(path)).ok


def test_the_newest_record_of_a_stepping_segment_keeps_it_from_retention(tmp_path: Path) -> None:
    clock = ManualClock(STEP_US + 1_000_000)
    stepping(tmp_path / "log", seal=True)
    with SegmentedLog.open(str(tmp_path / "log"), clock=clock) as log:
        assert log.retain(keep_ms=1_800_000).segments == 0, "seq 499 is younger than half an hour"
        assert log.retain(keep_ms=0).segments == 1, "not for ever"


def test_convert_raises_stepping_times_on_request_only(tmp_path: Path, run: Run) -> None:
    records = stepping(tmp_path / "log", seal=True)
    code, _, err = run("convert", tmp_path / "log", tmp_path / "no", "--to", "rustlog")
    assert code == 2
    assert "the time of seq 500" in err
    assert "clamp" in err
    assert run("convert", tmp_path / "log", tmp_path / "yes", "--to", "rustlog", "--clamp-times")[0] == 0
    with SegmentedLog.open(str(tmp_path / "yes"), read_only=True) as log:
        latest, raised = 0, []
        for record in records:
            latest = max(latest, record.ts_us)
            raised.append(Record(record.seq, latest, record.data))
        assert list(log) == raised


def test_a_changed_time_is_still_found_where_there_is_a_checksum() -> None:
    disk = SimDisk()
    with SegmentedLog.open("log", "rustlog", disk=disk, clock=ManualClock()) as log:
        log.append_many([b"a"] * 5)
        log.seal()
        log.append(b"b")
    disk.flip_bit("log/00000000000000000000.log", 2 * 21 + 15, 3)
    assert [damage.fault.seq for damage in verify("log", disk=disk).damage] == [2]
    with SegmentedLog.open("log", disk=disk, clock=ManualClock()) as log, pytest.raises(Damaged):
        log.read(2)
