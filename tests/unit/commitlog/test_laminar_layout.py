"""The laminar layout against a reader and a writer that share no code with it."""

from __future__ import annotations

from itertools import accumulate
from struct import pack
from typing import TypeAlias
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidelog.commitlog.codecs import laminar
from tidelog.errors import BadInput, TooLarge
from tidelog.formats.rows import ScanResult, ScanStop, iter_records

quick = settings(deadline=None, max_examples=80)
thorough = settings(deadline=None, max_examples=400)

Plain: TypeAlias = tuple[int, bytes, bytes]  # seq, metadata unless it is only the seq, data


def content(seq: int, meta: bytes, data: bytes, width: int = 4) -> bytes:
    meta = meta or b"\x01" + seq.to_bytes(width, "little")
    return pack("<I", len(meta)) + meta + data


def indexed(contents: list[bytes]) -> bytes:
    """Index entries for contents back to back; an empty one is a hole."""
    starts = [0, *accumulate(map(len, contents))]
    return b"".join(pack("<QII", crc32(c), len(c), at) for c, at in zip(contents, starts, strict=False))


def read_plainly(
    store: bytes, index: bytes, base: int, first: int, stop: int, bytes_max: int | None
) -> tuple[list[Plain], int, ScanStop]:
    """The rules of a walk, one entry at a time."""

    def entry(i: int) -> tuple[int, int, int]:
        part = index[16 * i : 16 * i + 16]
        return tuple(int.from_bytes(part[a:b], "little") for a, b in ((0, 8), (8, 12), (12, 16)))  # type: ignore[return-value]

    count = len(index) // 16
    lo = min(max(first - base, 0), count)
    expected = reach = 0  # where the last entry ended; and how far the contents before reach
    if lo:
        _, size, at = entry(lo - 1)
        expected = entry(lo)[2] if lo < count else at + size
    out: list[Plain] = []
    used = 0
    for i in range(lo, min(max(stop - base, lo), count)):
        checksum, size, at = entry(i)
        inside = at + size <= len(store)
        whole = store[at : at + size] if inside else b""
        meta_size = int.from_bytes(whole[:4], "little")
        room = size - 4 - meta_size if size >= 4 and inside else -1
        used += max(room, 0)
        if size and out and bytes_max is not None and used > bytes_max:
            return out, expected, ScanStop.END
        if size and not inside:
            return out, expected, ScanStop.TORN
        if crc32(whole) != checksum:
            return out, expected, ScanStop.BAD
        if size:
            if room < 0:
                return out, expected, ScanStop.BAD
            meta = whole[4 : 4 + meta_size]
            if meta_size in (5, 9) and meta[0] == 1:
                if int.from_bytes(meta[1:], "little") != base + i:
                    return out, expected, ScanStop.BAD
                meta = b""
            if at < reach:
                return out, expected, ScanStop.BAD
            out.append((base + i, meta, whole[4 + meta_size :]))
            reach = at + size
        expected = at + size
    return out, expected, ScanStop.END


def plain(walk: ScanResult) -> tuple[list[Plain], int, ScanStop]:
    assert bool(walk.reason) == (walk.stop is not ScanStop.END), "a fault is explained, a clean end is not"
    assert not walk.rows.ts_us.any()
    return [(r.seq, r.meta, r.data) for r in iter_records(walk.rows)], walk.end, walk.stop


def entries_of(index: bytes) -> NDArray[np.void]:
    return np.frombuffer(index, laminar.INDEX)


@st.composite
def segments(draw: st.DrawFn) -> tuple[int, list[bytes]]:
    """A base and contents: plain ones of both widths, some with metadata of their own, some holes."""
    base = draw(st.integers(0, 5))
    contents = []
    for i, (kind, data) in enumerate(draw(st.lists(st.tuples(st.integers(0, 4), st.binary(max_size=8)), max_size=10))):
        own = [b"", b"", b"\x00", b"\x02" * 5, b""][kind]
        contents.append(b"" if kind == 4 else content(base + i, own, data, 8 if kind == 1 else 4))
    return base, contents


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Store, entries and base, with bytes changed, cut off or put in, or contents that were never right."""
    base, contents = draw(segments())
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.booleans()) and contents:
            # Behind a right checksum: metadata lengths and seqs that are wrong from the start.
            contents[draw(st.integers(0, len(contents) - 1))] = draw(
                st.binary(max_size=12) | st.just(content(77, b"", b"x")) | st.just(content(77, b"", b"x", 8))
            )
    parts = [bytearray(b"".join(contents)), bytearray(indexed(contents))]
    for _ in range(draw(st.integers(0, 2))):
        buf = parts[draw(st.integers(0, 1))]
        at = draw(st.integers(0, len(buf)))
        match draw(st.integers(0, 2)):
            case 0 if at < len(buf):
                buf[at] = draw(st.integers(0, 255))
            case 1:
                del buf[at:]
            case _:
                buf[at:at] = draw(st.binary(max_size=3))
    store, index = parts
    return bytes(store), bytes(index[: len(index) // 16 * 16]), base


@quick
@given(
    st.integers(0, 1 << 20),
    st.lists(st.binary(max_size=30)),
    st.sampled_from([4, 8]),
    st.integers(0, 1 << 31),
)
def test_what_is_encoded_is_walked_back(first: int, datas: list[bytes], width: int, position: int) -> None:
    contents = [content(first + i, b"", data, width) for i, data in enumerate(datas)]
    store, index = laminar.encode(first, datas, 0, width)
    assert (store, index) == (b"".join(contents), indexed(contents))
    expected = [(first + i, b"", data) for i, data in enumerate(datas)]
    walk = laminar.scan_records(store, entries_of(index), first)
    assert plain(walk) == (expected, len(store), ScanStop.END)
    assert walk.rows.meta is None
    for i, data in enumerate(datas):
        assert laminar.encode_content_header(first + i, width) + data == contents[i]
    shifted, later = laminar.encode(first, datas, position, width)
    assert shifted == store
    assert (entries_of(later)["position"] - entries_of(index)["position"] == position).all()


@quick
@given(st.integers(0, 9), st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 9))
def test_records_encoded_in_pieces_are_those_encoded_at_once(first: int, datas: list[bytes], cut: int) -> None:
    store, index = laminar.encode(first, datas[:cut], 0)
    more, later = laminar.encode(first + len(datas[:cut]), datas[cut:], len(store))
    assert (store + more, index + later) == laminar.encode(first, datas, 0)


@quick
@given(segments())
def test_a_segment_with_holes_and_metadata_is_walked(segment: tuple[int, list[bytes]]) -> None:
    base, contents = segment
    store, index = b"".join(contents), indexed(contents)
    for kind in (bytes, bytearray, memoryview):
        walk = laminar.scan_records(kind(store), entries_of(index), base)
        assert plain(walk) == read_plainly(store, index, base, 0, 99, None)
        assert (walk.end, walk.stop) == (len(store), ScanStop.END)
        assert walk.rows.seq.tolist() == [base + i for i, c in enumerate(contents) if c]
    assert laminar.find_faults(store, entries_of(index), base) == []
    assert laminar.count_dead_bytes(entries_of(index), len(store)) == 0
    whole = laminar.encode_marker(base) + index if contents else b""
    assert laminar.index_fault(whole, base, len(store)) is None


@thorough
@given(damaged(), st.integers(0, 15), st.integers(0, 15), st.none() | st.integers(0, 20))
def test_a_walk_of_any_bytes_agrees_with_the_plain_reader(
    parts: tuple[bytes, bytes, int], first: int, stop: int, bytes_max: int | None
) -> None:
    store, index, base = parts
    walk = laminar.scan_records(store, entries_of(index), base, first=first, stop=stop, bytes_max=bytes_max)
    assert plain(walk) == read_plainly(store, index, base, first, stop, bytes_max)


@quick
@given(segments(), st.integers(0, 15), st.integers(0, 15), st.integers(0, 40))
def test_a_limited_walk_is_a_slice_of_the_full_one(
    segment: tuple[int, list[bytes]], first: int, stop: int, bytes_max: int
) -> None:
    base, contents = segment
    store, entries = b"".join(contents), entries_of(indexed(contents))
    full = plain(laminar.scan_records(store, entries, base))[0]
    ranged = [record for record in full if first <= record[0] < stop]
    assert plain(laminar.scan_records(store, entries, base, first=first, stop=stop))[0] == ranged
    used = list(accumulate(len(data) for _, _, data in full))
    fitting = max(sum(total <= bytes_max for total in used), 1)
    records_, end, halt = plain(laminar.scan_records(store, entries, base, bytes_max=bytes_max))
    assert (records_, halt) == (full[:fitting], ScanStop.END)
    if fitting < len(full):
        assert end == entries["position"][full[fitting][0] - base], "the walk can go on from there"


def test_metadata_that_is_more_than_the_seq_is_kept() -> None:
    contents = [
        content(0, b"", b"plain"),
        content(1, b"\x05\x00\x00\x00\x00", b"own"),
        content(2, b"key", b""),
    ]
    rows = laminar.scan_records(b"".join(contents), entries_of(indexed(contents)), 0).rows
    assert [(r.meta, r.data) for r in iter_records(rows)] == [
        (b"", b"plain"),
        (b"\x05\0\0\0\0", b"own"),
        (b"key", b""),
    ]
    assert rows.meta is not None
    assert laminar.scan_records(contents[0], entries_of(indexed(contents)), 0, stop=1).rows.meta is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (content(9, b"", b"x"), "another seq is stored with the record"),
        (content(9, b"", b"x", 8), "another seq is stored with the record"),
        (b"\x06\0\0\0\x01\x01\0\0\0", "metadata is longer than the content"),
        (b"\xff\xff\xff\xff\x01\x01\0\0\0", "metadata is longer than the content"),
        (b"\0\0\0", "metadata is longer than the content"),
    ],
)
def test_a_content_that_breaks_a_rule_is_bad_although_its_checksum_holds(bad: bytes, reason: str) -> None:
    contents = [content(0, b"", b"good"), bad, content(2, b"", b"later")]
    walk = laminar.scan_records(b"".join(contents), entries_of(indexed(contents)), 0)
    assert plain(walk) == ([(0, b"", b"good")], len(contents[0]), ScanStop.BAD)
    assert walk.reason == reason


def test_a_store_that_ends_early_is_torn_and_the_records_before_are_kept() -> None:
    contents = [content(i, b"", b"data") for i in range(3)]
    store, entries = b"".join(contents), entries_of(indexed(contents))
    for size in range(len(store)):
        walk = laminar.scan_records(store[:size], entries, 0)
        assert (len(walk.rows), walk.stop, walk.end) == (size // 13, ScanStop.TORN, size // 13 * 13)
        assert [at for at, _ in laminar.find_faults(store[:size], entries, 0)] == list(range(size // 13, 3))


def test_an_entry_that_points_at_another_good_content_is_bad() -> None:
    contents = [content(0, b"key", b"one"), content(1, b"key", b"two")]
    entries = entries_of(indexed(contents)).copy()
    entries[1] = entries[0]
    walk = laminar.scan_records(b"".join(contents), entries, 0)
    assert plain(walk) == ([(0, b"key", b"one")], 10, ScanStop.BAD)
    assert walk.reason == "position is before the end of the record before it"
    alone = laminar.scan_records(b"".join(contents), entries_of(indexed(contents))[1:], 1)
    assert plain(alone)[::2] == ([(1, b"key", b"two")], ScanStop.END), "an entry stands for itself"


def test_a_budget_ends_a_walk_before_a_bad_record_is_looked_at() -> None:
    contents = [content(0, b"", b"abc"), b"\xff\xff\xff\xff\x01\0\0\0\0", content(2, b"", b"x")]
    store, entries = b"".join(contents), entries_of(indexed(contents))
    assert laminar.scan_records(store, entries, 0, bytes_max=2)[1:] == (12, ScanStop.END, "")
    assert laminar.scan_records(store, entries, 0, bytes_max=3)[1:3] == (12, ScanStop.BAD)


def test_a_length_that_rotted_to_nothing_is_not_taken_for_a_hole() -> None:
    entries = entries_of(indexed([content(0, b"", b"x")])).copy()
    entries["length"] = 0
    walk = laminar.scan_records(content(0, b"", b"x"), entries, 0)
    assert (walk.stop, walk.reason) == (ScanStop.BAD, "checksum")


def test_no_checksum_wider_than_its_32_bits_is_accepted() -> None:
    entries = entries_of(indexed([content(0, b"", b"x")])).copy()
    entries["checksum"] += np.uint64(1 << 32)
    assert laminar.scan_records(content(0, b"", b"x"), entries, 0).reason == "checksum"


def test_base_too_large_for_its_records_is_bad() -> None:
    contents = [content(0, b"x", b"")]
    for base in ((1 << 63) - 1, (1 << 64) - 1, -1):
        walk = laminar.scan_records(contents[0], entries_of(indexed(contents)), base)
        assert (len(walk.rows), walk.stop) == (0, ScanStop.BAD)
    assert laminar.scan_records(contents[0], entries_of(indexed(contents)), (1 << 63) - 2).stop is ScanStop.END


def test_every_broken_rule_of_an_index_is_found() -> None:
    def fault(*entries: tuple[int, int], base: int = 5, size: int = 30, tail: bytes = b"", pad: int = 0) -> str:
        index = pack("<QQ", base, pad) + b"".join(pack("<QII", 0, *entry) for entry in entries) + tail
        return laminar.index_fault(index, 5, size) or ""

    assert fault((10, 0), (0, 10), (20, 10)) == ""
    assert fault(size=0) == ""
    assert fault((10, 0), (18, 12)) == "", "dead bytes between two contents"
    assert fault((29, 0)) == fault() == "", "dead bytes at the end"
    assert laminar.index_fault(b"", 5, 0) is None
    for expected, found in [
        ("the base marker ends after 15", laminar.index_fault(bytes(15), 5, 0)),
        ("the base marker is 6", fault((30, 0), base=6)),
        ("the padding", fault((30, 0), pad=1)),
        ("the padding", fault((30, 0), pad=1 << 63)),
        ("the last entry has 15 bytes", fault((30, 0), tail=bytes(15))),
        ("entry 1 is at byte 9", fault((10, 0), (19, 9))),
        ("entry 2 is at byte 9", fault((10, 0), (0, 3), (19, 9))),
        ("entries reach to byte 31", fault((31, 0))),
        ("entries reach to byte 8589934590", fault(((1 << 32) - 1, 0), ((1 << 32) - 1, (1 << 32) - 1))),
    ]:
        assert found is not None
        assert found.startswith(expected)


def test_dead_bytes_are_counted_and_walked_around() -> None:
    contents = [content(i, b"", b"data %d" % i) for i in range(4)]
    entries = entries_of(indexed(contents)).copy()
    store = b"".join((contents[0], b"dead", contents[1], contents[2], b"more dead", contents[3], b"end"))
    entries["position"] += np.array([0, 4, 4, 13], "<u4")
    walk = laminar.scan_records(store, entries, 0)
    assert plain(walk) == ([(i, b"", b"data %d" % i) for i in range(4)], len(store) - 3, ScanStop.END)
    assert laminar.count_dead_bytes(entries, len(store)) == 16
    assert laminar.find_data_end(entries) == len(store) - 3
    assert laminar.find_data_end(entries[:0]) == 0
    assert laminar.find_faults(store, entries, 0) == []
    for at in range(4):
        bad = bytearray(store)
        bad[int(entries["position"][at])] ^= 1
        assert laminar.find_faults(bytes(bad), entries, 0) == [(at, "checksum")], "no other record is touched"


def test_metadata_of_another_width_may_hold_anything_where_the_width_is_known() -> None:
    number = pack("<I", 1) + b"\1" + pack("<I", 1)  # a u32 of one, then seq 1 in four bytes: nine bytes in all
    contents = [content(0, pack("<IBI", 0, 1, 0), b"a"), content(1, number, b"b")]
    store, entries = b"".join(contents), entries_of(indexed(contents))
    assert laminar.scan_records(store, entries, 0).reason == "another seq is stored with the record"
    assert plain(laminar.scan_records(store, entries, 0, width=4))[0] == [
        (0, pack("<IBI", 0, 1, 0), b"a"),
        (1, number, b"b"),
    ]
    assert laminar.count_stored_seqs(store, np.array([0, len(contents[0])]), np.array([0, 1])) == (2, 0)
    wide = [content(i, b"", b"x", 8) for i in range(3)]
    assert laminar.count_stored_seqs(b"".join(wide), np.array([0, 14, 28]), np.arange(3)) == (0, 3)


def test_marker_written_twice_is_distinguished_from_a_hole() -> None:
    for base in (0, 7):
        contents = [content(base, b"", b"first"), content(base + 1, b"", b"second")]
        store, marker = b"".join(contents), laminar.encode_marker(base)
        twice = marker + marker + indexed(contents)
        assert laminar.has_second_marker(twice, store.__getitem__, base)
        assert not laminar.has_second_marker(marker + indexed(contents), store.__getitem__, base)
        hole = marker + indexed([b"", contents[1]])
        assert not laminar.has_second_marker(hole, contents[1].__getitem__, base)


def test_an_index_without_a_whole_marker_has_no_base() -> None:
    for size in range(16):
        base, entries = laminar.read_index(bytes(size))
        assert (base, len(entries)) == (None, 0)
    base, entries = laminar.read_index(laminar.encode_marker(7) + indexed([b"x", b"y"]) + b"part")
    assert (base, entries["length"].tolist()) == (7, [1, 1])


@quick
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_bytes_make_the_index_functions_raise(index: bytes, store: bytes) -> None:
    base, entries = laminar.read_index(index)
    laminar.index_fault(index, base or 0, len(store))
    laminar.find_faults(store, entries, base or 0)
    laminar.scan_records(store, entries, base or 0)


def test_what_the_layout_cannot_hold_is_refused_before_a_byte_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = (1 << 32) - 1
    assert laminar.encode_content_header(top) == b"\x05\0\0\0\x01\xff\xff\xff\xff"
    with pytest.raises(BadInput, match="width=8"):
        laminar.encode_content_header(top + 1)
    with pytest.raises(BadInput, match=f"seq {top + 1} does not fit into 4 bytes; convert the log"):
        laminar.encode(top, [b"", b""], 0)
    assert len(laminar.encode(top, [b"", b""], 0, 8)[1]) == 32
    for first, width in ((-1, 4), ((1 << 63), 8), (0, 5)):
        with pytest.raises(BadInput):
            laminar.encode_content_header(first, width)
    with pytest.raises(BadInput):
        laminar.encode_marker(-1)
    assert laminar.encode(0, [b"x"], top - 10)[1][-4:] == (top - 10).to_bytes(4, "little")
    with pytest.raises(BadInput, match=r"seq 1 would end at byte 4294967296 .* roll to a new segment"):
        laminar.encode(0, [b"", b"x"], top - 18)
    monkeypatch.setattr(laminar, "STORE_BYTES_MAX", 20)
    with pytest.raises(TooLarge, match="record for seq 1 is 21 bytes, the limit is 20"):
        laminar.encode(0, [b"", b"123456789012"], 0)
