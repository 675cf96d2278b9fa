"""Every cut and every changed byte of small logs as the original programs write them.

Each variant is a handful of records, encoded here from the layout's description. A damaged copy is opened, read and
verified. Every outcome is one of these, and nothing on disk changes:

    detected   an error of `tidelog.errors`, or damage in the report of `verify`
    harmless   all records are there, or the last ones are missing like those of a killed program
    hole       rustlog has no checksum: a changed length, offset or data byte may read as another record
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from tests.regressions.test_foreign_programs import siphash13

from tidelog.commitlog import SegmentedLog, convert, verify
from tidelog.errors import BadInput, Error
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

Files = dict[str, bytes]
DATAS = [b"ebb", b"", b"flood" * 3, b"\0\0\0\0\0\0\0\0\0"]


def rustlog_files(digits: int, *, index: bool) -> Files:
    files: Files = {}
    for base, datas in ((0, DATAS), (4, DATAS[:2])):
        name, data, entries = f"{base:0{digits}d}", b"", b""
        for seq, value in enumerate(datas, base):
            entries += struct.pack(">QQ", seq, len(data)) if seq == base else b""
            data += struct.pack(">IQ", len(value), seq) + value
        files |= {f"{name}.log": data, f"{name}.index": entries if index else b""}
    return files


def laminar_files(
    tail: str, metadata: bytes, hasher: Callable[[bytes], int], *, dead: bytes = b"", markers: int = 1
) -> Files:
    files: Files = {}
    for base, datas in ((7, DATAS), (11, DATAS[:2])):
        store, index = b"", struct.pack("<Q8x", base) * (markers if base == 11 else 1)
        for seq, value in enumerate(datas, base):
            whole = metadata + struct.pack(tail, 1, seq)
            content = struct.pack("<I", len(whole)) + whole + value
            index += struct.pack("<QII", hasher(content), len(content), len(store))
            store += content + (dead if seq in (8, 12) else b"")
        files |= {f"{base}.store": store, f"{base}.index": index}
    return files


def narwhal_files() -> Files:
    files: Files = {}
    for base, seqs in ((1, (1, 2, 4)), (5, (7, 8))):
        data = b""
        for seq in seqs:
            entry = struct.pack("<QQHI", seq, 1_760_000_000_000, 3, 3) + b"a@b" + b"ebb"
            data += entry + struct.pack("<I", zlib.crc32(entry))
        index = struct.pack("<IQ", seqs[0] - base, 0)
        files |= {f"{base:020d}.log": data, f"{base:020d}.idx": index + bytes(24 if base == 5 else 0)}
    return files


VARIANTS: dict[str, tuple[str, Files]] = {
    "rustlog, 12 digits": ("rustlog", rustlog_files(12, index=True)),
    "rustlog, empty index": ("rustlog", rustlog_files(20, index=False)),
    "laminar u32": ("laminar", laminar_files("<BI", b"", zlib.crc32)),
    "laminar u64 with metadata": ("laminar", laminar_files("<BQ", b"\x03\0\0\0key", zlib.crc32)),
    "laminar, SipHash": ("laminar", laminar_files("<BI", b"", siphash13)),
    "laminar, dead bytes": ("laminar", laminar_files("<BI", b"", zlib.crc32, dead=b"dead bytes")),
    "laminar, marker twice": ("laminar", laminar_files("<BI", b"", zlib.crc32, markers=2)),
    "narwhal": ("narwhal", narwhal_files()),
}


def damaged(files: Files) -> Iterator[tuple[str, Files]]:
    for name, content in files.items():
        for size in range(len(content)):
            yield f"{name} cut to {size} bytes", files | {name: content[:size]}
        for at, byte in enumerate(content):
            for mask in (0x01, 0x80, 0xFF):
                changed = content[:at] + bytes([byte ^ mask]) + content[at + 1 :]
                yield f"{name}, byte {at} ^ {mask:#x}", files | {name: changed}


def read(disk: SimDisk, codec: str) -> list[Record] | Error:
    try:
        with SegmentedLog.open("log", codec, read_only=True, disk=disk, clock=ManualClock()) as log:
            return list(log.records())
    except Error as error:
        return error


def on_disk(files: Files) -> SimDisk:
    disk = SimDisk()
    for name, content in files.items():
        disk.write_file(f"log/{name}", content)
    return disk


def check_variant(variant: str, stride: int) -> None:
    codec, files = VARIANTS[variant]
    whole = read(on_disk(files), codec)
    assert isinstance(whole, list)
    assert len(whole) in (5, 6)
    outcomes = {"detected": 0, "harmless": 0, "hole": 0}
    for label, changed in islice(damaged(files), 0, None, stride):
        disk = on_disk(changed)
        before = disk.digest()
        found = read(disk, codec)
        try:
            ok = verify("log", codec, disk=disk).ok
        except Error:
            ok = False
        assert disk.digest() == before, label
        if isinstance(found, Error) or not ok:
            outcomes["detected"] += 1
        elif found == whole[: len(found)]:
            outcomes["harmless"] += 1
        else:
            outcomes["hole"] += 1
            assert codec == "rustlog", f"{label}: {found}"
            assert len(found) <= len(whole), label
    assert outcomes["detected"] > 5
    assert (outcomes["hole"] > 0) == (codec == "rustlog")


@pytest.mark.parametrize("variant", VARIANTS)
def test_some_cuts_and_changed_bytes_are_detected_harmless_or_a_known_hole(variant: str) -> None:
    check_variant(variant, 17)


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_and_every_changed_byte_is_detected_harmless_or_a_known_hole(variant: str) -> None:
    check_variant(variant, 1)


def test_a_seq_that_jumps_is_not_turned_into_an_index_of_terabytes() -> None:
    """A flipped bit in an offset of a log without checksums reads as a jump. A dense index would have an entry for
    every seq between."""
    codec, files = VARIANTS["rustlog, empty index"]
    name = f"{4:020d}.log"
    data = bytearray(files[name])
    data[19] ^= 0x40  # the offset of the second record, which has 2**54 more now
    disk = on_disk(files | {name: bytes(data)})
    with SegmentedLog.open("log", codec, read_only=True, disk=disk, clock=ManualClock()) as log:
        assert [record.seq for record in log.records()][-1] >> 32
        with pytest.raises(BadInput, match="an entry for each"):
            convert(log, "copy", "laminar", index_width=8)
