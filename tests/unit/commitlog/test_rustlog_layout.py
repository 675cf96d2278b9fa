"""The rustlog layout against a reader and a writer that share no code with it."""

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
from tidelog.commitlog.codecs import rustlog
from tidelog.commitlog.vectorized import scan_records, scan_runs
from tidelog.errors import BadInput, TooLarge
from tidelog.formats.rows import ScanResult, ScanStop, iter_records
from tidelog.types import Ints

quick = settings(deadline=None, max_examples=80)
thorough = settings(deadline=None, max_examples=300)

Plain: TypeAlias = tuple[int, int, bytes]  # seq, ts, data
LIMIT = 10 * 1024 * 1024


def written(log: list[Plain]) -> bytes:
    return b"".join(pack(">IQQ", len(data), seq, ts) + data for seq, ts, data in log)


def read_plainly(
    buf: bytes,
    pos: int = 0,
    end: int | None = None,
    *,
    above: int = -1,
    count_max: int = 1 << 63,
    crcs: list[int] | None = None,
) -> tuple[list[Plain], int, ScanStop]:
    """The rules of a walk, one record at a time."""
    out: list[Plain] = []
    last = len(buf) if end is None else min(end, len(buf))
    while pos < last and len(out) < count_max:
        if last - pos < 20:
            return out, pos, ScanStop.TORN
        length = int.from_bytes(buf[pos : pos + 4], "big")
        seq, ts = (
            int.from_bytes(buf[pos + 4 : pos + 12], "big"),
            int.from_bytes(buf[pos + 12 : pos + 20], "big"),
        )
        if length > LIMIT:
            return out, pos, ScanStop.BAD
        if pos + 20 + length > last:
            return out, pos, ScanStop.TORN
        whole = buf[pos : pos + 20 + length]
        if crcs is not None and len(out) < len(crcs) and crc32(whole) != crcs[len(out)]:
            return out, pos, ScanStop.BAD
        if seq <= above or max(seq, ts) >= 1 << 63:
            return out, pos, ScanStop.BAD
        if crcs is not None and len(out) >= len(crcs):
            return out, pos, ScanStop.BAD
        out.append((seq, ts, whole[20:]))
        above, pos = seq, pos + len(whole)
    return out, pos, ScanStop.END


def plain(walk: ScanResult) -> tuple[list[Plain], int, ScanStop]:
    assert bool(walk.reason) == (walk.stop is not ScanStop.END), "a fault is explained, a clean end is not"
    return [(r.seq, r.ts_us, r.data) for r in iter_records(walk.rows)], walk.end, walk.stop


def everything(walk: ScanResult) -> tuple[Any, ...]:
    rows = walk.rows
    columns = [c.tolist() for c in (rows.seq, rows.ts_us, rows.frame_pos, rows.data.pos, rows.data.size)]
    return columns, rows.node, rows.tag, rows.meta, walk.end, walk.stop, walk.reason


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


@st.composite
def logs(draw: st.DrawFn, *, count_max: int = 10) -> list[Plain]:
    """Records with holes between seqs and times that stand still, go on or step back."""
    seq, ts, log = draw(st.integers(-1, 3)), draw(st.integers(0, 1 << 40)), list[Plain]()
    for gap, wait, data in draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(-2, 2), st.binary(max_size=9)), max_size=count_max)
    ):
        seq, ts = seq + gap, max(ts + wait, 0)
        log.append((seq, ts, data))
    return log


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A log with a few bytes changed, cut off or put in, or just bytes."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=120))
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
@given(st.integers(0, 1 << 40), st.integers(0, 1 << 50), st.lists(st.binary(max_size=30)))
def test_what_is_encoded_is_walked_back(first: int, ts_us: int, datas: list[bytes]) -> None:
    buf = rustlog.encode(first, ts_us, datas)
    expected = [(first + i, ts_us, data) for i, data in enumerate(datas)]
    assert buf == written(expected)
    assert plain(scan_records(rustlog.LAYOUT, buf, above=first - 1)) == (expected, len(buf), ScanStop.END)


def test_a_head_and_its_data_are_a_record_and_a_head_of_no_size_is_none() -> None:
    assert rustlog.encode_header(7, 9, 5) + b"hello" == rustlog.encode(7, 9, [b"hello"])
    walk = scan_records(
        rustlog.LAYOUT,
        rustlog.encode(6, 9, [b"whole"]) + rustlog.encode_header(7, 9, 0xFFFFFFFF) + b"so far",
    )
    assert (len(walk.rows), walk.end, walk.stop) == (1, 25, ScanStop.BAD)


@quick
@given(logs())
def test_a_log_with_holes_and_its_own_times_is_walked(log: list[Plain]) -> None:
    buf = written(log)
    for kind in (bytes, bytearray, memoryview):
        assert plain(scan_records(rustlog.LAYOUT, kind(buf))) == (log, len(buf), ScanStop.END)


@thorough
@given(damaged(), st.data())
def test_a_walk_of_any_bytes_agrees_with_the_plain_reader(buf: bytes, data: st.DataObject) -> None:
    pos = data.draw(st.integers(0, min(len(buf), 40)) if data.draw(st.booleans()) else st.just(0))
    end = data.draw(st.none() | st.integers(pos, len(buf) + 5))
    above, count_max = data.draw(st.integers(-1, 3)), data.draw(st.just((1 << 63) - 1) | st.integers(0, 12))
    expected = read_plainly(buf, pos, end, above=above, count_max=count_max)
    result = scan_records(rustlog.LAYOUT, buf, pos, end, above=above, count_max=count_max)
    assert plain(result) == expected


@thorough
@given(damaged(), st.data())
def test_a_walk_with_checksums_agrees_with_the_plain_reader(buf: bytes, data: st.DataObject) -> None:
    before, _, _ = read_plainly(buf)
    crcs = [crc32(written([record])) for record in before]
    if data.draw(st.booleans()):
        crcs = crcs[: data.draw(st.integers(0, len(crcs)))]
    if data.draw(st.booleans()) and crcs:
        crcs[data.draw(st.integers(0, len(crcs) - 1))] ^= 1 << data.draw(st.integers(0, 31))
    expected = read_plainly(buf, crcs=crcs)
    assert plain(scan_records(rustlog.LAYOUT, buf, crcs=np.array(crcs, np.uint32))) == expected


@quick
@given(logs(), st.integers(0, 12))
def test_scan_with_a_count_limit_is_a_prefix_of_the_full_scan(log: list[Plain], count_max: int) -> None:
    buf = written(log)
    full = scan_records(rustlog.LAYOUT, buf)
    count = min(count_max, len(log))
    end = len(buf) if count == len(log) else int(full.rows.frame_pos[count])
    expected = ScanResult(full.rows.slice(0, count), end, ScanStop.END)
    assert everything(scan_records(rustlog.LAYOUT, buf, count_max=count_max)) == everything(expected)


@pytest.mark.parametrize(
    ("log", "above", "reason"),
    [
        ([(5, 1, b"a")], 5, "seq does not increase"),
        ([(5, 1, b"a"), (5, 1, b"b")], -1, "seq does not increase"),
        ([(1 << 63, 1, b"a")], -1, "seq does not increase"),
        ([((1 << 64) - 1, 1, b"a")], -1, "seq does not increase"),
        ([((1 << 64) - 1, 1, b"a")], -9, "seq does not increase"),
        ([(1, 9, b""), (1 << 63, 9, b"")], -1, "seq does not increase"),
        ([(1, 1 << 63, b"")], -1, "timestamp is out of range"),
    ],
)
def test_a_record_out_of_order_is_bad_and_those_before_it_are_kept(log: list[Plain], above: int, reason: str) -> None:
    walk = scan_records(rustlog.LAYOUT, written(log), above=above)
    assert (walk.stop, walk.reason) == (ScanStop.BAD, reason)
    assert plain(walk)[0] == log[:-1]
    assert walk.end == len(written(log[:-1]))


def test_a_length_over_the_limit_is_bad_even_when_the_bytes_are_there() -> None:
    exact = written([(0, 0, bytes(LIMIT))])
    assert plain(scan_records(rustlog.LAYOUT, exact))[1:] == (len(exact), ScanStop.END)
    over = scan_records(rustlog.LAYOUT, written([(0, 0, b""), (1, 0, bytes(LIMIT + 1))]))
    assert (len(over.rows), over.end, over.stop, over.reason) == (1, 20, ScanStop.BAD, "a length is over its limit")


def test_a_tail_is_torn_at_every_length_that_is_no_boundary() -> None:
    buf = written([(0, 0, b"abc"), (1, 0, b"")])
    for size in range(len(buf) + 1):
        walk = scan_records(rustlog.LAYOUT, buf, 0, size)
        whole = 2 if size == 43 else 1 if size >= 23 else 0
        assert (len(walk.rows), walk.stop) == (whole, ScanStop.END if size in (0, 23, 43) else ScanStop.TORN), size
        assert everything(walk) == everything(scan_records(rustlog.LAYOUT, buf[:size]))


@pytest.mark.parametrize("pos", [-1, 24, 1 << 70])
def test_a_walk_from_a_place_outside_the_bytes_is_bad(pos: int) -> None:
    assert scan_records(rustlog.LAYOUT, written([(0, 0, b"abc")]), pos)[1:3] == (pos, ScanStop.BAD)


def test_each_record_needs_its_checksum_once_there_are_checksums() -> None:
    buf = written([(1, 0, b"a"), (2, 0, b"b"), (3, 0, b"c")])
    rows = scan_records(rustlog.LAYOUT, buf).rows
    crcs = rustlog.read_crcs(rustlog.encode_crcs(buf, rows))
    assert crcs.tolist() == [crc32(buf[i : i + 21]) for i in (0, 21, 42)], "header and data are covered"
    assert scan_records(rustlog.LAYOUT, buf, crcs=crcs).stop is ScanStop.END
    assert scan_records(rustlog.LAYOUT, buf, 21, crcs=crcs[1:]).stop is ScanStop.END
    assert scan_records(rustlog.LAYOUT, buf, crcs=crcs[:2])[1:] == (
        42,
        ScanStop.BAD,
        "no checksum for this record",
    )
    assert scan_records(rustlog.LAYOUT, buf, count_max=2, crcs=crcs[:2]).stop is ScanStop.END
    assert scan_records(rustlog.LAYOUT, buf, crcs=crcs[1:])[1:] == (0, ScanStop.BAD, "checksum")
    changed = bytearray(buf)
    changed[21 + 11] = 0  # seq 2 is 0 now: out of order, because of the damage
    assert scan_records(rustlog.LAYOUT, changed)[1:] == (21, ScanStop.BAD, "seq does not increase")
    assert scan_records(rustlog.LAYOUT, changed, crcs=crcs)[1:] == (21, ScanStop.BAD, "checksum"), (
        "the cause, not its effect"
    )
    assert rustlog.read_crcs(crcs.tobytes()[:-1]).tolist() == crcs.tolist()[:-1]
    assert rustlog.read_crcs(b"").tolist() == []


@st.composite
def many(draw: st.DrawFn) -> tuple[bytes, Ints]:
    """A log long enough for lanes, and where some of its records start, the first included."""
    sizes = (draw(st.lists(st.integers(0, 40), min_size=1, max_size=12)) * 250)[: draw(st.integers(100, 250))]
    buf = written([(2 * i, i // 3, bytes([i % 251]) * size) for i, size in enumerate(sizes)])
    ats = np.concatenate(([0], np.cumsum(np.array(sizes) + 20)[:-1]))
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
    above = data.draw(st.sampled_from([-1, 0]))
    expected = scan_records(rustlog.LAYOUT, buf, int(starts[0]), end, above=above)
    assert everything(scan_runs(rustlog.LAYOUT, buf, starts, end, above=above)) == everything(expected)


def test_runs_are_used_where_they_are_worth_it() -> None:
    """Method: offer the starts of a sound log and count how often its lengths are asked for."""
    log = [(i, 0, b"x" * (i % 7)) for i in range(100 * vectorized.RUNS_PER_STEP_MIN)]
    buf = written(log)
    full = scan_records(rustlog.LAYOUT, buf)
    starts = full.rows.frame_pos[::100]
    steps = list[int]()

    def sizes(at: Ints) -> Ints:
        steps.append(len(at))
        return full.rows.data.size[np.searchsorted(full.rows.frame_pos, at)] + 20

    found = vectorized.locate_records(starts, len(buf), 20, sizes)
    assert found is not None
    assert found.tolist() == full.rows.frame_pos.tolist()
    assert steps == [vectorized.RUNS_PER_STEP_MIN] * 100, "one gather for each record of a lane"
    assert vectorized.locate_records(starts[1:], len(buf), 20, sizes) is None, "one lane fewer is not worth it"
    assert everything(scan_runs(rustlog.LAYOUT, buf, starts)) == everything(full)


def test_more_runs_than_are_followed_at_once_are_found_in_order() -> None:
    buf = written([(i, 0, bytes(i % 5)) for i in range(5000)])
    full = scan_records(rustlog.LAYOUT, buf)
    crcs = rustlog.read_crcs(rustlog.encode_crcs(buf, full.rows))
    assert everything(scan_runs(rustlog.LAYOUT, buf, full.rows.frame_pos[::2], crcs=crcs)) == everything(full)
    wrong = crcs.copy()
    wrong[4321] ^= 1
    walk = scan_runs(rustlog.LAYOUT, buf, full.rows.frame_pos[::2], crcs=wrong)
    assert (walk.end, walk.reason) == (full.rows.frame_pos[4321], "checksum")


def test_one_long_run_does_not_make_the_scan_slow() -> None:
    """Method: count the steps until the lanes are given up."""
    count = 20_000
    steps = 0

    def sizes(at: Ints) -> Ints:
        nonlocal steps
        steps += 1
        return np.full(len(at), 20, np.int64)

    starts = np.arange(64, dtype=np.int64) * 20
    assert vectorized.locate_records(starts, count * 20, 20, sizes) is None
    assert steps <= 3


@pytest.mark.parametrize("starts", [[], [-5], [-5, 3], [1 << 40], [20, 10], [0, 0]])
def test_starts_that_cannot_be_runs_are_harmless(starts: list[int]) -> None:
    buf = written([(0, 0, b"abc")])
    expected = scan_records(rustlog.LAYOUT, buf, starts[0] if starts else 0)
    assert everything(scan_runs(rustlog.LAYOUT, buf, ints(starts))) == everything(expected)
    assert everything(scan_runs(rustlog.LAYOUT, b"", ints(starts))) == everything(
        scan_records(rustlog.LAYOUT, b"", starts[0] if starts else 0)
    )


def test_many_starts_of_which_one_is_wrong_are_harmless() -> None:
    buf = written([(i, 0, b"") for i in range(100)]) + b"end"
    ats = np.arange(100, dtype=np.int64) * 20
    for wrong in (
        np.append(-20, ats),
        np.append(ats, 2000),
        np.append(ats, 2002),
        np.append(ats, 2003),
        np.append(ats, 1 << 40),
        np.append(ats, 0),
        np.append(ats, ats),
        np.sort(np.append(ats, 50)),
        ats[::-1],
    ):
        for log in (buf, buf[:-3]):
            expected = scan_records(rustlog.LAYOUT, log, int(wrong[0]))
            assert everything(scan_runs(rustlog.LAYOUT, log, wrong)) == everything(expected), wrong[[0, -1]]


def test_length_over_the_limit_is_bad_in_a_run_too() -> None:
    log = [(i, 0, bytes(LIMIT + 1) if i == 50 else b"") for i in range(100)]
    buf = written(log)
    starts = np.arange(100, dtype=np.int64) * 20
    starts[51:] += LIMIT + 1
    walk = scan_runs(rustlog.LAYOUT, buf, starts)
    assert (len(walk.rows), walk.end, walk.reason) == (50, 1000, "a length is over its limit")


@quick
@given(st.integers(1, 300), st.integers(1, 9), st.lists(st.integers(0, 300), max_size=5))
def test_an_index_written_in_pieces_is_the_index_written_at_once(count: int, every: int, cuts: list[int]) -> None:
    seqs, ats = np.arange(count) * 3 + 7, np.arange(count) * 21
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    pieces = b"".join(rustlog.encode_index(seqs[a:b], ats[a:b], a, every) for a, b in pairwise(edges))
    expected = b"".join(pack(">QQ", seqs[i], ats[i]) for i in range(0, count, every))
    assert pieces == rustlog.encode_index(seqs, ats, 0, every) == expected


def test_the_index_of_a_walked_log_has_no_fault() -> None:
    buf = written([(i + 4, 0, b"hello") for i in range(1000)])
    rows = scan_records(rustlog.LAYOUT, buf).rows
    index = rustlog.read_index(rustlog.encode_index(rows.seq, rows.frame_pos, 0))
    assert index is not None
    assert index.tolist() == [(i + 4, i * 25) for i in range(0, 1000, 100)]
    assert rustlog.index_fault(index, len(buf), 4, 1004) is None
    assert rustlog.index_mismatch(index, buf) is None


def test_every_broken_rule_of_an_index_is_found() -> None:
    def fault(*entries: tuple[int, int], size: int = 1000, base: int = 5, stop: int = 50) -> str | None:
        index = rustlog.read_index(b"".join(pack(">QQ", *entry) for entry in entries))
        assert index is not None
        return rustlog.index_fault(index, size, base, stop)

    assert fault((5, 0), (7, 100), (49, 980)) is None
    assert fault(size=0) is None
    for expected, found in [
        ("the log has records", fault()),
        ("seqs do not increase", fault((5, 0), (5, 100))),
        ("positions do not increase", fault((5, 0), (6, 0))),
        ("the first entry", fault((5, 20), (6, 100))),
        ("position 981 holds no record", fault((5, 0), (6, 981))),
        (f"position {(1 << 64) - 1}", fault((5, 0), (6, (1 << 64) - 1))),
        ("position 0 holds no record", fault((5, 0), size=0)),
        ("not all in", fault((4, 0))),
        ("not all in", fault((5, 0), (50, 100))),
        ("not all in", fault((5, 0), ((1 << 64) - 1, 100))),
    ]:
        assert found is not None
        assert found.startswith(expected) or expected in found
    assert rustlog.read_index(bytes(17)) is None


def test_an_entry_for_another_record_is_a_mismatch() -> None:
    buf = written([(i, 0, b"hello") for i in range(10)])

    def mismatch(*entries: tuple[int, int]) -> str | None:
        return rustlog.index_mismatch(np.array(list(entries), rustlog.INDEX), buf)

    assert mismatch((0, 0), (4, 100), (9, 225)) is None
    assert mismatch() is None
    assert mismatch((0, 0), (5, 100)) == "the entry for seq 5 points at byte 100, where seq 4 is"
    assert mismatch((0, 0), (4, 231), (5, 100)) == "byte 231 holds no whole record header"
    assert mismatch((0, 0), (4, (1 << 64) - 1)) == f"byte {(1 << 64) - 1} holds no whole record header"
    assert rustlog.index_mismatch(np.array([(0, 0)], rustlog.INDEX), b"") is not None


@quick
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_bytes_make_the_index_functions_raise(index_bytes: bytes, buf: bytes) -> None:
    index = rustlog.read_index(index_bytes)
    if index is not None:
        rustlog.index_fault(index, len(buf), 0, 100)
        rustlog.index_mismatch(index, buf)
        scan_runs(rustlog.LAYOUT, buf, index["position"].astype(np.int64))
    scan_records(rustlog.LAYOUT, buf, crcs=rustlog.read_crcs(index_bytes))


def test_what_the_layout_cannot_hold_is_refused_before_a_byte_is_made() -> None:
    top = (1 << 63) - 1
    assert scan_records(rustlog.LAYOUT, rustlog.encode(top, top, [b""])).rows.seq.tolist() == [top]
    assert rustlog.encode(0, 0, []) == b""
    for first, ts_us, datas in [(-1, 0, [b""]), (top, 0, [b"", b""]), (0, -1, [b""]), (0, top + 1, [b""])]:
        with pytest.raises(BadInput):
            rustlog.encode(first, ts_us, datas)
    for seq, ts_us in [(-1, 0), (top + 1, 0), (0, -1), (0, top + 1)]:
        with pytest.raises(BadInput):
            rustlog.encode_header(seq, ts_us, 0)
    with pytest.raises(TooLarge) as caught:
        rustlog.encode(3, 0, [b"", bytes(LIMIT + 1)])
    assert (caught.value.size, caught.value.limit) == (LIMIT + 1, LIMIT)
