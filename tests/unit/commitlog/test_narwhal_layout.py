"""The narwhal layout against a reader and a writer that share no code with it."""

from __future__ import annotations

from itertools import pairwise
from struct import pack
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.commitlog import vectorized
from tidelog.commitlog.codecs import narwhal
from tidelog.commitlog.vectorized import scan_records, scan_runs
from tidelog.errors import BadInput, TooLarge
from tidelog.formats.rows import ScanResult, ScanStop, iter_records
from tidelog.types import Ints

quick = settings(deadline=None, max_examples=80)
thorough = settings(deadline=None, max_examples=300)

Plain: TypeAlias = tuple[int, int, bytes, bytes]  # seq, ts in ms, node, data
MS_MAX = ((1 << 63) - 1) // 1000


def sealed(covered: bytes) -> bytes:
    return covered + crc32(covered).to_bytes(4, "little")


def written(log: list[Plain]) -> bytes:
    return b"".join(sealed(pack("<QQHI", seq, ts, len(node), len(data)) + node + data) for seq, ts, node, data in log)


def read_plainly(
    buf: bytes,
    pos: int = 0,
    end: int | None = None,
    *,
    above: int = 0,
    count_max: int = 1 << 63,
) -> tuple[list[Plain], int, ScanStop]:
    """The rules of a walk, one record at a time."""
    out: list[Plain] = []
    last = len(buf) if end is None else min(end, len(buf))

    def number(start: int, size: int) -> int:
        return int.from_bytes(buf[pos + start : pos + start + size], "little")

    while pos < last and len(out) < count_max:
        if last - pos < 22:
            return out, pos, ScanStop.TORN
        seq, ts, node_size, size = number(0, 8), number(8, 8), number(16, 2), number(18, 4)
        if node_size > 510:
            return out, pos, ScanStop.BAD
        covered = 22 + node_size + size
        if pos + covered + 4 > last:
            return out, pos, ScanStop.TORN
        if crc32(buf[pos : pos + covered]) != number(covered, 4):
            return out, pos, ScanStop.BAD
        if seq <= above or seq == 0 or seq >= 1 << 63 or ts > MS_MAX:
            return out, pos, ScanStop.BAD
        out.append((seq, ts, buf[pos + 22 : pos + 22 + node_size], buf[pos + 22 + node_size : pos + covered]))
        above, pos = seq, pos + covered + 4
    return out, pos, ScanStop.END


def plain(walk: ScanResult) -> tuple[list[Plain], int, ScanStop]:
    assert bool(walk.reason) == (walk.stop is not ScanStop.END), "a fault is explained, a clean end is not"
    return [(r.seq, r.ts_us // 1000, r.node, r.data) for r in iter_records(walk.rows)], walk.end, walk.stop


def everything(walk: ScanResult) -> tuple[Any, ...]:
    rows = walk.rows
    columns = [c.tolist() for c in (rows.seq, rows.ts_us, rows.frame_pos, rows.data.pos, rows.data.size)]
    node = rows.node and (rows.node.pos.tolist(), rows.node.size.tolist())
    return columns, node, rows.tag, rows.meta, walk.end, walk.stop, walk.reason


@st.composite
def logs(draw: st.DrawFn) -> list[Plain]:
    """Records with holes between seqs and times that go anywhere."""
    seq, log = draw(st.integers(0, 3)), list[Plain]()
    for gap, ts, node, data in draw(
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 1 << 40), st.binary(max_size=3), st.binary(max_size=9)),
            max_size=10,
        )
    ):
        seq += gap
        log.append((seq, ts, node, data))
    return log


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A log with a few bytes changed, cut off or put in, a log whose numbers are wild, or just bytes."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.binary(max_size=120))
    if kind == 1:
        wild = st.sampled_from([0, 1, 2, 3, MS_MAX, MS_MAX + 1, 1 << 63, (1 << 64) - 1])
        return written(draw(st.lists(st.tuples(wild, wild, st.just(b"n"), st.just(b"d")), max_size=4)))
    buf = bytearray(written(draw(logs())))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(buf)))
        match draw(st.integers(0, 2)):
            case 0 if at < len(buf):
                buf[at] = draw(st.integers(0, 255))
            case 1:
                del buf[at:]
            case _:
                buf[at:at] = draw(st.binary(max_size=4))
    return bytes(buf)


@quick
@given(
    st.integers(1, 1 << 40),
    st.integers(0, 1 << 45),
    st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=30))),
)
def test_what_is_encoded_is_walked_back(first: int, ts_ms: int, parts: list[tuple[bytes, bytes]]) -> None:
    nodes, datas = [node for node, _ in parts], [data for _, data in parts]
    buf = narwhal.encode(first, ts_ms, datas, nodes)
    expected = [(first + i, ts_ms, node, data) for i, (node, data) in enumerate(parts)]
    assert buf == written(expected)
    assert plain(scan_records(narwhal.LAYOUT, buf, above=first - 1)) == (expected, len(buf), ScanStop.END)


@pytest.mark.parametrize("node", [b"", b"alice@localhost"])
def test_one_node_serves_all_records(node: bytes) -> None:
    datas = [b"a", b"", b"ccc"]
    buf = narwhal.encode(1, 5, datas, node)
    assert buf == narwhal.encode(1, 5, datas, [node] * 3)
    rows = scan_records(narwhal.LAYOUT, buf).rows
    assert [(r.ts_us, r.node, r.data) for r in iter_records(rows)] == [(5000, node, data) for data in datas]
    assert (rows.node is None) == (node == b"")


def test_a_head_its_data_and_their_checksum_are_a_record() -> None:
    head = narwhal.encode_header(7, 9, b"alice", 5)
    assert sealed(head + b"hello") == narwhal.encode(7, 9, [b"hello"], b"alice")
    walk = scan_records(narwhal.LAYOUT, narwhal.encode(6, 9, [b"whole"]) + bytes(len(head)) + b"so far")
    assert (len(walk.rows), walk.end, walk.stop) == (1, 31, ScanStop.BAD), "zeros in its place are no record"


@quick
@given(logs())
def test_a_log_with_holes_and_times_that_go_back_is_walked(log: list[Plain]) -> None:
    buf = written(log)
    for kind in (bytes, bytearray, memoryview):
        assert plain(scan_records(narwhal.LAYOUT, kind(buf))) == (log, len(buf), ScanStop.END)


@thorough
@given(damaged(), st.data())
def test_a_walk_of_any_bytes_agrees_with_the_plain_reader(buf: bytes, data: st.DataObject) -> None:
    pos = data.draw(st.integers(0, min(len(buf), 40)) if data.draw(st.booleans()) else st.just(0))
    end = data.draw(st.none() | st.integers(pos, len(buf) + 5))
    above, count_max = data.draw(st.integers(-1, 3)), data.draw(st.just((1 << 63) - 1) | st.integers(0, 12))
    expected = read_plainly(buf, pos, end, above=above, count_max=count_max)
    result = scan_records(narwhal.LAYOUT, buf, pos, end, above=above, count_max=count_max)
    assert plain(result) == expected


@quick
@given(logs(), st.integers(0, 12))
def test_scan_with_a_count_limit_is_a_prefix_of_the_full_scan(log: list[Plain], count_max: int) -> None:
    buf = written(log)
    full = scan_records(narwhal.LAYOUT, buf)
    count = min(count_max, len(log))
    end = len(buf) if count == len(log) else int(full.rows.frame_pos[count])
    limited = scan_records(narwhal.LAYOUT, buf, count_max=count_max)
    assert plain(limited) == (log[:count], end, ScanStop.END)


@pytest.mark.parametrize(
    ("log", "above", "reason"),
    [
        ([(0, 1, b"", b"a")], 0, "seq does not increase"),
        ([(0, 1, b"", b"a")], -1, "seq does not increase"),
        ([(5, 1, b"", b"a")], 5, "seq does not increase"),
        ([(5, 1, b"", b"a"), (5, 1, b"", b"b")], 0, "seq does not increase"),
        ([(5, 1, b"", b"a"), (1 << 63, 1, b"", b"b")], 0, "seq does not increase"),
        ([(5, 1, b"", b"a"), (6, MS_MAX + 1, b"", b"b")], 0, "timestamp is out of range"),
        ([(5, 1, b"", b"a"), (6, (1 << 64) - 1, b"", b"b")], 0, "timestamp is out of range"),
        ([(5, 1, b"", b"a"), (6, 1, b"n" * 511, b"b")], 0, "a length is over its limit"),
    ],
)
def test_a_record_that_breaks_a_rule_is_bad_although_its_checksum_holds(
    log: list[Plain], above: int, reason: str
) -> None:
    walk = scan_records(narwhal.LAYOUT, written(log), above=above)
    assert (walk.stop, walk.reason) == (ScanStop.BAD, reason)
    assert plain(walk)[0] == log[:-1]
    assert walk.end == len(written(log[:-1]))


def test_a_tail_is_torn_at_every_length_that_is_no_boundary() -> None:
    buf = written([(1, 0, b"n", b"abc"), (2, 0, b"", b"")])
    for size in range(len(buf) + 1):
        walk = scan_records(narwhal.LAYOUT, buf, 0, size)
        whole = 2 if size == 56 else 1 if size >= 30 else 0
        assert (len(walk.rows), walk.stop) == (whole, ScanStop.END if size in (0, 30, 56) else ScanStop.TORN), size
        assert everything(walk) == everything(scan_records(narwhal.LAYOUT, buf[:size]))


@pytest.mark.parametrize("pos", [-1, 31, 1 << 70])
def test_a_walk_from_a_place_outside_the_bytes_is_bad(pos: int) -> None:
    assert scan_records(narwhal.LAYOUT, written([(1, 0, b"n", b"abc")]), pos)[1:3] == (pos, ScanStop.BAD)


@st.composite
def many(draw: st.DrawFn) -> tuple[bytes, Ints]:
    """A log long enough for lanes, and where some of its records start, the first included."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=12))
    sizes = (pairs * 250)[: draw(st.integers(100, 250))]
    buf = written([(2 * i + 1, i, b"n" * n, bytes([i % 251]) * size) for i, (n, size) in enumerate(sizes)])
    ats = np.concatenate(([0], np.cumsum(np.array([n + size + 26 for n, size in sizes]))[:-1]))
    every = draw(st.integers(1, 3))
    return buf, ats[::every].astype(np.int64)


@thorough
@given(many(), st.data())
def test_scan_of_runs_equals_the_plain_scan(log: tuple[bytes, Ints], data: st.DataObject) -> None:
    buf, starts = bytearray(log[0]), log[1]
    match data.draw(st.sampled_from(["whole", "changed", "cut", "wrong start", "missing starts", "partly"])):
        case "changed":
            lane = data.draw(st.integers(0, len(starts) - 1))
            at = min(int(starts[lane]) + data.draw(st.integers(0, 60)), len(buf) - 1)
            buf[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del buf[data.draw(st.integers(0, len(buf))) :]
        case "wrong start":
            starts = starts.copy()
            starts[data.draw(st.integers(1, len(starts) - 1))] += data.draw(st.integers(-30, 30))
        case "missing starts":
            starts = starts[np.array(data.draw(st.permutations([True, False, True])) * 90)[: len(starts)]]
        case "partly":
            starts = starts[data.draw(st.integers(0, len(starts) - 1)) :]
    end = data.draw(st.integers(0, len(buf))) if data.draw(st.integers(0, 3)) == 0 else None
    above = data.draw(st.sampled_from([0, 1]))
    expected = scan_records(narwhal.LAYOUT, buf, int(starts[0]), end, above=above)
    assert everything(scan_runs(narwhal.LAYOUT, buf, starts, end, above=above)) == everything(expected)


def test_index_of_a_long_log_gives_runs_that_are_used() -> None:
    buf = narwhal.encode(1, 5, [b"x" * (i % 200) for i in range(5000)], b"n")
    rows = scan_records(narwhal.LAYOUT, buf).rows
    index = narwhal.read_index(narwhal.encode_index(rows.seq, rows.frame_pos, rows.data.pos + rows.data.size + 4, 1)[0])
    starts = index["position"].astype(np.int64)
    sizes = np.diff(rows.frame_pos, append=len(buf))
    found = vectorized.locate_records(starts, len(buf), 22, lambda at: sizes[np.searchsorted(rows.frame_pos, at)])
    assert found is not None, "a healthy index is worth it"
    assert found.tolist() == rows.frame_pos.tolist()
    assert everything(scan_runs(narwhal.LAYOUT, buf, starts)) == everything(scan_records(narwhal.LAYOUT, buf))


@pytest.mark.parametrize("starts", [[], [-5], [-5, 3], [1 << 40], [20, 10], [0, 0]])
def test_starts_that_cannot_be_runs_are_harmless(starts: list[int]) -> None:
    for buf in (written([(1, 0, b"", b"abc")]), b""):
        expected = scan_records(narwhal.LAYOUT, buf, starts[0] if starts else 0)
        assert everything(scan_runs(narwhal.LAYOUT, buf, np.array(starts, np.int64))) == everything(expected)


def test_many_starts_of_which_one_is_wrong_are_harmless() -> None:
    buf = written([(i + 1, 0, b"", b"") for i in range(100)]) + b"end"
    ats = np.arange(100, dtype=np.int64) * 26
    for wrong in (np.append(-26, ats), np.append(ats, 2600), np.append(ats, 2602), np.append(ats, ats), ats[::-1]):
        expected = scan_records(narwhal.LAYOUT, buf, int(wrong[0]))
        assert everything(scan_runs(narwhal.LAYOUT, buf, wrong)) == everything(expected), wrong[[0, -1]]


def test_node_over_the_limit_is_bad_in_a_run_too() -> None:
    log = [(i + 1, 0, b"n" * 511 if i == 50 else b"", b"") for i in range(100)]
    buf = written(log)
    starts = np.array([len(written(log[:i])) for i in range(100)], np.int64)
    walk = scan_runs(narwhal.LAYOUT, buf, starts)
    assert (len(walk.rows), walk.end, walk.reason) == (50, 50 * 26, "a length is over its limit")


def test_damage_that_also_breaks_the_order_is_called_damage() -> None:
    buf = bytearray(written([(1, 0, b"", b"a"), (2, 0, b"", b"b")]))
    buf[27] = 0
    assert scan_records(narwhal.LAYOUT, buf)[1:] == (27, ScanStop.BAD, "checksum"), "the cause, not its effect"


def plain_index(ats: list[int], seqs: list[int], base: int) -> bytes:
    out, since = b"", 0
    for at, seq in zip(ats, seqs, strict=True):
        if not out:
            out, since = pack("<IQ", 0, 0), at
        elif at - since >= 4096:
            out += pack("<IQ", seq - base, at)
            since = at
    return out


@quick
@given(
    st.lists(st.integers(26, 3000) | st.just(4096) | st.just(9000), max_size=60),
    st.lists(st.integers(1, 60), max_size=6),
    st.integers(0, 3),
)
def test_an_index_written_in_pieces_is_the_index_written_at_once(
    sizes: list[int], cuts: list[int], first_hole: int
) -> None:
    ends = np.cumsum(np.array(sizes, np.int64))
    ats, seqs = ends - np.array(sizes, np.int64), np.arange(len(sizes)) * 2 + 7 + first_hole
    edges = sorted({0, len(sizes), *(cut for cut in cuts if cut < len(sizes))})
    pieces, since = b"", -1
    for a, b in pairwise(edges):
        piece, since = narwhal.encode_index(seqs[a:b], ats[a:b], ends[a:b], 7, since)
        pieces += piece
    at_once, last = narwhal.encode_index(seqs, ats, ends, 7)
    assert pieces == at_once == plain_index(ats.tolist(), seqs.tolist(), 7)
    assert last == (since if sizes else -1)
    if sizes:
        assert narwhal.index_fault(at_once, int(ends[-1])) is None


def test_a_record_too_far_above_the_base_gets_no_entry() -> None:
    ends = np.array([5000, 10000, 15000, 20000])
    seqs = np.array([1, 1 + narwhal.RELATIVE_MAX, 2 + narwhal.RELATIVE_MAX, 3 + narwhal.RELATIVE_MAX])
    index, since = narwhal.encode_index(seqs, ends - 5000, ends, 1)
    assert narwhal.read_index(index).tolist() == [(0, 0), (narwhal.RELATIVE_MAX, 5000)]
    assert narwhal.encode_index(seqs[3:], ends[3:] - 5000, ends[3:], 1, since) == (b"", since)


def test_preallocated_zeros_are_not_entries() -> None:
    used = pack("<IQIQ", 0, 0, 93, 4100)
    assert narwhal.index_capacity(128 << 20) == narwhal.index_capacity() == 393_228
    whole = used + bytes(393_228 - len(used))
    assert narwhal.read_index(whole).tolist() == narwhal.read_index(used).tolist() == [(0, 0), (93, 4100)]
    assert narwhal.index_fault(whole, 4122) is None
    assert narwhal.read_index(bytes(120)).tolist() == [(0, 0)]
    assert narwhal.read_index(bytes(11)).tolist() == []
    assert narwhal.read_index(used + bytes(7)).tolist() == [(0, 0), (93, 4100)]


def test_every_broken_rule_of_an_index_is_found() -> None:
    def fault(*entries: tuple[int, int], size: int = 10_000, more: bytes = b"", room: int | None = None) -> str:
        buf = b"".join(pack("<IQ", *entry) for entry in entries) + more
        return narwhal.index_fault(buf, size, room) or ""

    assert fault((0, 0), (1, 5000), (9, 9978)) == ""
    assert fault((2, 0), (5, 5000)) == "", "as narwhal writes it after a gap"
    for expected, found in [
        ("0 bytes are not", fault()),
        ("13 bytes are not", fault((0, 0), more=b"x")),
        ("24 bytes are more than the 12", fault((0, 0), (1, 30), room=12)),
        ("393240 bytes are more", fault((0, 0), more=bytes(393_228))),
        ("the first entry is for byte 9", fault((0, 9), (1, 10))),
        ("seqs do not increase", fault((0, 0), (5, 100), (5, 200))),
        ("seqs do not increase", fault((0, 0), (0, 0), (5, 200))),
        ("positions do not increase", fault((0, 0), (5, 100), (6, 100))),
        ("position 9979 holds no record", fault((0, 0), (1, 9979))),
        (f"position {(1 << 64) - 1} holds", fault((0, 0), (1, (1 << 64) - 1))),
        ("position 0 holds no record", fault((0, 0), size=21)),
    ]:
        assert found.startswith(expected)


def test_an_entry_for_another_record_is_a_mismatch() -> None:
    buf = written([(i, 0, b"", b"hell") for i in range(7, 17)])

    def mismatch(*entries: tuple[int, int], base: int = 7) -> str | None:
        return narwhal.index_mismatch(np.array(list(entries), narwhal.INDEX), buf, base)

    assert mismatch((0, 0), (4, 120), (9, 270)) is None
    assert mismatch() is None
    assert mismatch((0, 0), (5, 120)) == "the entry for seq 12 points at byte 120, where seq 11 is"
    assert mismatch((0, 0), (4, 279), (5, 120)) == "byte 279 holds no whole record header"
    assert mismatch((0, 0), (4, (1 << 64) - 1)) == f"byte {(1 << 64) - 1} holds no whole record header"
    assert mismatch((0, 0), (6, 120), base=5) is None, "the first record may be above the base"
    assert mismatch((0, 0), base=8) is not None, "but not below it"
    assert narwhal.index_mismatch(np.array([(0, 0)], narwhal.INDEX), b"", 1) is not None


@quick
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_bytes_make_the_index_functions_raise(index_bytes: bytes, buf: bytes) -> None:
    index = narwhal.read_index(index_bytes)
    narwhal.index_fault(index_bytes, len(buf))
    narwhal.index_mismatch(index, buf, 1)
    scan_runs(narwhal.LAYOUT, buf, index["position"].astype(np.int64))


def test_what_the_layout_cannot_hold_is_refused_before_a_byte_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = (1 << 63) - 1
    highest = scan_records(narwhal.LAYOUT, narwhal.encode(top, MS_MAX, [b""], b"n" * 510))
    assert (highest.rows.seq.tolist(), highest.rows.ts_us.tolist()) == ([top], [MS_MAX * 1000])
    assert narwhal.encode(1, 0, []) == b""
    for first, ts_ms, datas in [(0, 0, [b""]), (top, 0, [b"", b""]), (1, -1, [b""]), (1, MS_MAX + 1, [b""])]:
        with pytest.raises(BadInput):
            narwhal.encode(first, ts_ms, datas)
    for seq, ts_ms in [(0, 0), (top + 1, 0), (1, -1), (1, MS_MAX + 1)]:
        with pytest.raises(BadInput):
            narwhal.encode_header(seq, ts_ms, b"", 0)
    with pytest.raises(TooLarge, match="node of seq 2 is 511"):
        narwhal.encode_header(2, 0, b"n" * 511, 0)
    with pytest.raises(TooLarge, match="limit is 4294967295"):
        narwhal.encode_header(1, 0, b"", 1 << 32)
    with pytest.raises(TooLarge, match="node of seq 2 is 511 bytes, the limit is 510"):
        narwhal.encode(1, 0, [b"", b""], [b"", b"n" * 511])
    with pytest.raises(ValueError, match="shorter"):
        narwhal.encode(1, 0, [b"", b""], [b""])
    assert narwhal.DATA_BYTES_MAX == (1 << 32) - 1
    monkeypatch.setattr(narwhal, "DATA_BYTES_MAX", 3)
    with pytest.raises(TooLarge, match="record for seq 2 is 4 bytes, the limit is 3"):
        narwhal.encode(1, 0, [b"123", b"1234"])
