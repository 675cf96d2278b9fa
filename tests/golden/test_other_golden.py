"""The three other layouts, frozen as bytes, and what becomes of them when any one byte of them changes.

The files marked in SPEC are the vectors of the format specification; the others were written with
`struct` alone. All are read and written here, and none is ever edited: another layout is another
directory.

Method of the sweeps: cut the file at every length, and change every byte into each of the 255 others.
A change is *found* when the walk does not end cleanly or the index is refused. What is not found must
be harmless, or be the one hole the rustlog layout has when it has no side-car, counted to the last byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from struct import Struct, pack

import numpy as np
import pytest

from tidelog.commitlog.codecs import laminar, narwhal, rustlog
from tidelog.commitlog.codecs.rustlog import CleanerCheckpoint
from tidelog.commitlog.vectorized import scan_records
from tidelog.errors import Corrupt
from tidelog.formats.rows import Rows, ScanResult, ScanStop, iter_records
from tidelog.types import Record

SPEC = {
    "rustlog/00000000000000000007.log": "00000005000000000000000700060a24181e400068656c6c6f",
    "rustlog/00000000000000000000.index": "00000000000000000000000000000000000000000000006400000000000009c4",
    "laminar/0.store": "05000000010000000048656c6c6f20576f726c6421",
    "laminar/0.index": "0000000000000000000000000000000021537d2c000000001500000000000000",
    "narwhal/00000000000000000001.log": (
        "010000000000000000f15365000000000f0002000000616c696365406c6f63616c686f737468698eb3735f"
    ),
    "narwhal/00000000000000000100.idx": "0000000000000000000000005d0000000410000000000000",
}
TS_US = 1_700_000_000_000_000
TS_MS = 1_700_000_000_000
TIDE = [Record(40, TS_US, b"tide"), Record(42, TS_US + 5, b""), Record(43, TS_US + 5, b"log")]
NARWHAL_TIDE = [
    Record(40, TS_US, b"tide", b"alice@localhost"),
    Record(42, TS_US + 5_000, b"", b""),
    Record(43, TS_US + 4_000, b"log", b"bob@localhost"),
]


def golden(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()


def cuts(data: bytes) -> Iterator[bytes]:
    return (data[:size] for size in range(len(data)))


def changes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every file that differs from `data` in one byte, and which byte that is."""
    buf = bytearray(data)
    for at, right in enumerate(data):
        for wrong in range(256):
            if wrong != right:
                buf[at] = wrong
                yield at, bytes(buf)
        buf[at] = right


def found(walk: ScanResult) -> bool:
    return walk.stop is not ScanStop.END


def listed(rows: Rows) -> list[Record]:
    return list(iter_records(rows))


# --- the bytes ---------------------------------------------------------------------------------


def test_the_vectors_of_the_specification_are_unchanged() -> None:
    for name, text in SPEC.items():
        assert golden(name).hex() == text, name


def test_a_rustlog_segment_is_written_and_read() -> None:
    hello = golden("rustlog/00000000000000000007.log")
    assert rustlog.encode(7, TS_US, [b"hello"]) == hello
    assert listed(scan_records(rustlog.LAYOUT, hello, above=6).rows) == [Record(7, TS_US, b"hello")]
    tide = golden("rustlog/00000000000000000040.log")
    assert b"".join(rustlog.encode(r.seq, r.ts_us, [r.data]) for r in TIDE) == tide
    walk = scan_records(rustlog.LAYOUT, tide, above=39)
    assert (listed(walk.rows), walk.end, walk.stop) == (TIDE, len(tide), ScanStop.END)
    assert rustlog.encode_index(walk.rows.seq, walk.rows.frame_pos, 0) == golden("rustlog/00000000000000000040.index")
    for base, log in ((7, hello), (40, tide)):
        side_car = golden(f"rustlog/{base:020d}.crc")
        assert rustlog.encode_crcs(log, scan_records(rustlog.LAYOUT, log).rows) == side_car
        assert scan_records(rustlog.LAYOUT, log, crcs=rustlog.read_crcs(side_car)).stop is ScanStop.END


def rustlog_hundred() -> bytes:
    """The log whose index the specification gives: 25 bytes a record, so record 100 is at byte 2500."""
    return rustlog.encode(0, TS_US, [b"hello"] * 101)


def test_a_rustlog_index_is_written_and_read() -> None:
    data = golden("rustlog/00000000000000000000.index")
    log = rustlog_hundred()
    rows = scan_records(rustlog.LAYOUT, log).rows
    assert rustlog.encode_index(rows.seq, rows.frame_pos, 0) == data
    index = rustlog.read_index(data)
    assert index is not None
    assert index.tolist() == [(0, 0), (100, 2500)]
    assert rustlog.index_fault(index, len(log), 0, 101) is None
    assert rustlog.index_mismatch(index, log) is None


def test_a_laminar_segment_is_written_and_read() -> None:
    store, index = golden("laminar/0.store"), golden("laminar/0.index")
    content, entry = laminar.encode(0, [b"Hello World!"], 0)
    assert (content, laminar.encode_marker(0) + entry) == (store, index)
    base, entries = laminar.read_index(index)
    assert base == 0
    assert listed(laminar.scan_records(store, entries, 0).rows) == [Record(0, 0, b"Hello World!")]


def test_a_laminar_segment_with_a_hole_and_metadata_is_written_and_read() -> None:
    store, index = golden("laminar/5.store"), golden("laminar/5.index")
    base, entries = laminar.read_index(index)
    assert base == 5
    assert laminar.index_fault(index, 5, len(store)) is None
    walk = laminar.scan_records(store, entries, 5)
    assert listed(walk.rows) == [
        Record(5, 0, b"tide"),
        Record(7, 0, b"log", meta=b"key"),
        Record(8, 0, b""),
    ]
    assert (walk.end, walk.stop) == (len(store), ScanStop.END)
    wide, wide_entry = laminar.encode(5, [b"tide"], 0, 8)
    last, last_entry = laminar.encode(8, [b""], len(store) - 9)
    assert (wide, last) == (store[: len(wide)], store[-len(last) :])
    assert (laminar.encode_marker(5) + wide_entry, last_entry) == (index[:32], index[-16:])


def test_a_narwhal_segment_is_written_and_read() -> None:
    hi = golden("narwhal/00000000000000000001.log")
    assert narwhal.encode(1, 1_700_000_000, [b"hi"], b"alice@localhost") == hi
    assert listed(scan_records(narwhal.LAYOUT, hi).rows) == [Record(1, 1_700_000_000_000, b"hi", b"alice@localhost")]
    tide = golden("narwhal/00000000000000000040.log")
    assert b"".join(narwhal.encode(r.seq, r.ts_us // 1000, [r.data], r.node) for r in NARWHAL_TIDE) == tide
    walk = scan_records(narwhal.LAYOUT, tide, above=39)
    assert (listed(walk.rows), walk.end, walk.stop) == (NARWHAL_TIDE, len(tide), ScanStop.END)
    index, _ = narwhal.encode_index(
        walk.rows.seq, walk.rows.frame_pos, np.append(walk.rows.frame_pos[1:], len(tide)), 40
    )
    assert index == golden("narwhal/00000000000000000040.idx")


def narwhal_ninety() -> bytes:
    """The log whose index the specification gives: 92 records of 44 bytes and one of 52, then byte 4100."""
    return narwhal.encode(100, TS_MS, [b"x" * 18] * 92 + [b"x" * 26] + [b"x"] * 3)


def test_a_narwhal_index_is_written_and_read() -> None:
    data = golden("narwhal/00000000000000000100.idx")
    log = narwhal_ninety()
    rows = scan_records(narwhal.LAYOUT, log).rows
    assert narwhal.encode_index(rows.seq, rows.frame_pos, np.append(rows.frame_pos[1:], len(log)), 100)[0] == data
    index = narwhal.read_index(data)
    assert index.tolist() == [(0, 0), (93, 4100)]
    assert narwhal.index_fault(data, len(log)) is None
    assert narwhal.index_mismatch(index, log, 100) is None


IDLE = CleanerCheckpoint(1000, TS_MS, None, 1_700_000_600_123_456)
RUNNING = replace(IDLE, running=(2000, "copy"))


def test_a_cleaner_checkpoint_is_written_and_read() -> None:
    for name, value in (("idle", IDLE), ("running", RUNNING)):
        text = golden(f"rustlog/{name}.cleaner_checkpoint")
        assert rustlog.encode_cleaner_checkpoint(value) == text
        assert rustlog.decode_cleaner_checkpoint(text) == value
    binary = rustlog.decode_cleaner_checkpoint(golden("rustlog/binary.cleaner_checkpoint"))
    assert binary == CleanerCheckpoint(1000, 0, None, 1_700_000_600_123_000)


# --- rustlog: the hole, and the side-car that closes it ----------------------------------------


def part_of(log: bytes, at: int) -> str:
    """Which field of a sound rustlog segment this byte belongs to."""
    rows = scan_records(rustlog.LAYOUT, log).rows
    inside = at - int(rows.frame_pos[np.searchsorted(rows.frame_pos, at, "right") - 1])
    return "length" if inside < 4 else "offset" if inside < 12 else "timestamp" if inside < 20 else "data"


def not_found(log: bytes, base: int) -> Counter[str]:
    """How many changed files end cleanly although their records are others, by the field that was changed."""
    missed: Counter[str] = Counter()
    right = listed(scan_records(rustlog.LAYOUT, log).rows)
    for at, changed in changes(log):
        walk = scan_records(rustlog.LAYOUT, changed, above=base - 1)
        if not found(walk):
            assert listed(walk.rows) != right
            missed[part_of(log, at)] += 1
    return missed


def within(value: int, low: int, high: int) -> int:
    """How many numbers between low and high, both included, differ from `value` in one byte of eight."""
    right = value.to_bytes(8, "big")
    return sum(low <= int.from_bytes(wrong, "big") <= high for _, wrong in changes(right))


def test_without_a_side_car_only_bounds_and_order_are_held_and_exactly_this_slips_through() -> None:
    """Method: count what is missed, and count by arithmetic what order and bounds cannot tell."""
    top = (1 << 63) - 1
    one = not_found(golden("rustlog/00000000000000000007.log"), 7)
    # A change of length never slips through here: one record has no neighbour to swallow.
    assert one == {"offset": 1905, "timestamp": 1912, "data": 5 * 255}
    assert one == {"offset": within(7, 7, top), "timestamp": within(TS_US, 0, top), "data": 1275}
    ts = [record.ts_us for record in TIDE]
    three = not_found(golden("rustlog/00000000000000000040.log"), 40)
    # Lengths: the first record swallows the second, or both others; the second swallows the third.
    # Times: any, as long as it is no negative number.
    assert three == {"length": 3, "offset": 1871, "timestamp": 3 * 1912, "data": 7 * 255}
    assert three == {
        "length": 3,
        "offset": within(40, 40, 41) + within(42, 41, 42) + within(43, 43, top),
        "timestamp": sum(within(each, 0, top) for each in ts),
        "data": 1785,
    }


@pytest.mark.parametrize("base", [7, 40])
def test_with_the_side_car_every_change_of_a_rustlog_segment_is_found(base: int) -> None:
    log = golden(f"rustlog/{base:020d}.log")
    side_car = golden(f"rustlog/{base:020d}.crc")
    right = listed(scan_records(rustlog.LAYOUT, log).rows)
    for at, changed in changes(log):
        walk = scan_records(rustlog.LAYOUT, changed, above=base - 1, crcs=rustlog.read_crcs(side_car))
        assert found(walk), at
        assert listed(walk.rows) == right[: len(walk.rows)], "nothing wrong is handed out"
    for at, changed in changes(side_car):
        walk = scan_records(rustlog.LAYOUT, log, above=base - 1, crcs=rustlog.read_crcs(changed))
        assert (walk.stop, len(walk.rows)) == (ScanStop.BAD, at // 4)
    for short in cuts(side_car):
        walk = scan_records(rustlog.LAYOUT, log, above=base - 1, crcs=rustlog.read_crcs(short))
        assert (walk.stop, len(walk.rows)) == (ScanStop.BAD, len(short) // 4)


@pytest.mark.parametrize("base", [7, 40])
def test_a_rustlog_segment_cut_anywhere_gives_the_records_that_are_whole(base: int) -> None:
    log = golden(f"rustlog/{base:020d}.log")
    rows = scan_records(rustlog.LAYOUT, log).rows
    crcs = rustlog.read_crcs(golden(f"rustlog/{base:020d}.crc"))
    for short in cuts(log):
        walk = scan_records(rustlog.LAYOUT, short, above=base - 1)
        assert listed(walk.rows) == listed(rows)[: len(walk.rows)]
        # At a boundary nothing in the file tells; the side-car has one checksum too many.
        assert found(walk) or (len(short) in rows.frame_pos and len(walk.rows) < len(crcs))


def test_every_change_of_a_rustlog_index_is_found() -> None:
    log, data = rustlog_hundred(), golden("rustlog/00000000000000000000.index")

    def refused(buf: bytes) -> bool:
        index = rustlog.read_index(buf)
        return (
            index is None
            or rustlog.index_fault(index, len(log), 0, 101) is not None
            or rustlog.index_mismatch(index, log) is not None
        )

    assert not refused(data)
    assert all(refused(changed) for _, changed in changes(data))
    # An index with fewer entries is a sound one: readers walk further. It only may not be empty.
    assert [len(short) for short in cuts(data) if not refused(short)] == [16]


# --- laminar and narwhal: nothing slips through --------------------------------------------------


@pytest.mark.parametrize("base", [0, 5])
def test_every_change_of_a_laminar_segment_is_found(base: int) -> None:
    store, index = golden(f"laminar/{base}.store"), golden(f"laminar/{base}.index")
    right = listed(laminar.scan_records(store, laminar.read_index(index)[1], base).rows)

    def refused(store: bytes, index: bytes) -> bool:
        walk = laminar.scan_records(store, laminar.read_index(index)[1], base)
        assert listed(walk.rows) == right[: len(walk.rows)], "nothing wrong is handed out"
        return found(walk) or laminar.index_fault(index, base, len(store)) is not None

    def leaves_dead_bytes(index: bytes) -> bool:
        return laminar.count_dead_bytes(laminar.read_index(index)[1], len(store)) > 0

    assert not refused(store, index)
    assert all(refused(changed, index) for _, changed in changes(store))
    # Where a hole lies means nothing. Its position is the only part of an index that may change unseen.
    entries = laminar.read_index(index)[1]
    holes = {16 + 16 * int(at) + 12 + byte for at in np.flatnonzero(entries["length"] == 0) for byte in range(4)}
    assert {at for at, changed in changes(index) if not refused(store, changed)} == holes
    assert all(refused(short, index) for short in cuts(store))
    # An index cut between two entries leaves bytes of the store without one, which the number of seqs shows too.
    assert all(refused(store, short) or leaves_dead_bytes(short) for short in cuts(index))


@pytest.mark.parametrize("base", [1, 40])
def test_every_change_of_a_narwhal_segment_is_found(base: int) -> None:
    log = golden(f"narwhal/{base:020d}.log")
    rows = scan_records(narwhal.LAYOUT, log).rows
    right = listed(rows)
    for at, changed in changes(log):
        walk = scan_records(narwhal.LAYOUT, changed, above=base - 1)
        assert found(walk), at
        assert listed(walk.rows) == right[: len(walk.rows)], "nothing wrong is handed out"
    for short in cuts(log):
        walk = scan_records(narwhal.LAYOUT, short, above=base - 1)
        assert listed(walk.rows) == right[: len(walk.rows)]
        assert found(walk) or len(short) in rows.frame_pos


def test_every_change_of_a_narwhal_index_is_found_preallocated_or_not() -> None:
    log, data = narwhal_ninety(), golden("narwhal/00000000000000000100.idx")
    capacity = narwhal.index_capacity(4 * 4096)

    def refused(buf: bytes) -> bool:
        return (
            narwhal.index_fault(buf, len(log), capacity) is not None
            or narwhal.index_mismatch(narwhal.read_index(buf), log, 100) is not None
        )

    for whole in (data, data + bytes(capacity - len(data))):
        assert not refused(whole)
        assert narwhal.read_index(whole).tolist() == [(0, 0), (93, 4100)]
        assert all(refused(changed) for _, changed in changes(whole))
        # An index with fewer entries is a sound one: readers walk further. It only may not be empty.
        sound = [len(short) for short in cuts(whole) if not refused(short)]
        assert sound == list(range(12, len(whole), 12))


# --- the checkpoint: text without a checksum -----------------------------------------------------


def number_fields(value: CleanerCheckpoint) -> list[int]:
    base = [] if value.running is None else [value.running[0]]
    return [value.last_cleaned_seq, value.retention_horizon_ms, *base, value.created_at_us]


@pytest.mark.parametrize(("name", "value", "missed"), [("idle", IDLE, 348), ("running", RUNNING, 396)])
def test_a_changed_checkpoint_is_corrupt_or_says_the_same_or_has_one_other_number(
    name: str, value: CleanerCheckpoint, missed: int
) -> None:
    """A digit in the place of another, of the blank before a number or of the line end behind it, and a
    blank in the place of its first or last digit, make another number: text without a checksum cannot tell."""
    text = golden(f"rustlog/{name}.cleaner_checkpoint")
    other = 0
    for _, changed in changes(text):
        try:
            read = rustlog.decode_cleaner_checkpoint(changed)
        except Corrupt:
            continue
        assert (read.running or [0, ""])[1] == (value.running or [0, ""])[1]
        wrong = sum(a != b for a, b in zip(number_fields(read), number_fields(value), strict=True))
        assert wrong <= 1
        other += wrong
    assert other == missed
    for short in cuts(text):
        with pytest.raises(Corrupt):
            rustlog.decode_cleaner_checkpoint(short)


def test_a_binary_checkpoint_cut_anywhere_is_corrupt() -> None:
    data = golden("rustlog/binary.cleaner_checkpoint")
    for short in cuts(data):
        with pytest.raises(Corrupt):
            rustlog.decode_cleaner_checkpoint(short)
    assert Struct(">QQ").unpack(data) == (1000, 1_700_000_600_123)
    assert pack(">QQ", 1000, 1_700_000_600_123) == data
