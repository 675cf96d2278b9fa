"""Records that are read through an index and copied into columns: equal in both implementations.

Without the compiled function `scan.scan_indexed` reads them in its general way, which `test_scan` verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.frames import encode_batch
from tests.implementations import implementation
from tests.unit.formats.test_scan import TOPIC, TS, append, make_log

from tidelog import _native, _pure_python
from tidelog.errors import Corrupt
from tidelog.formats import batch, scan, segment_index
from tidelog.formats.frame import DURABLE, JSON, MORE
from tidelog.formats.rows import Rows, Span, copy_values, to_arrow, to_binary_array

NAMES = [b"", b"", b"n1", b"a-longer-name"]


def ordinary(random: Random, frames: int, *, base: int = 1, named: bool = True) -> tuple[bytes, NDArray[np.void]]:
    """Frames of what nearly every segment holds, one after the other, and their index."""
    pieces: list[bytes] = []
    seq, ts = base, TS
    for left in range(frames, 0, -1):
        ts += random.choice((0, 0, 1, 1000))
        node, tag = (random.choice(NAMES) if named else b"" for _ in range(2))
        flags = random.choice((0, DURABLE, JSON, JSON | DURABLE, MORE if left > 1 else 0))
        if random.random() < 0.5:
            pieces.append(append(seq, ts, random.randbytes(random.randrange(9)), node=node, tag=tag, flags=flags))
            seq += 1
        else:
            datas = [random.randbytes(random.randrange(6)) for _ in range(random.randrange(1, 6))]
            pieces.append(encode_batch(TOPIC, seq, ts, datas, node=node, tag=tag, flags=flags))
            seq += len(datas)
    log = b"".join(pieces)
    rows = scan.scan_records(log).rows
    return log, segment_index.build_entries(rows, base, seq, len(log))


def as_values(rows: Rows) -> tuple[Any, ...]:
    """All that is known of rows, as values that can be compared."""
    fresh = Rows(rows.buf, rows.seq, rows.ts_us, rows.frame_pos, rows.data, rows.node, rows.tag, rows.meta)
    spans = [
        None if span is None else copy_values(rows.buf, span) for span in (rows.data, rows.node, rows.tag, rows.meta)
    ]
    places = [rows.seq.tolist(), rows.ts_us.tolist(), rows.frame_pos.tolist(), rows.data.pos.tolist()]
    return (*places, *spans, segment_index.record_flags(rows).tolist(), segment_index.record_flags(fresh).tolist())


def outcome(
    buf: bytes, entries: NDArray[np.void], lo: int, hi: int, base: int, *, compiled: bool = True, **how: Any
) -> tuple[Any, ...]:
    try:
        with implementation(compiled=compiled):
            return as_values(scan.scan_indexed(buf, entries, lo, hi, base, **how))
    except Corrupt as error:
        return error.pos, error.reason


@pytest.mark.parametrize("seed", range(30))
def test_ordinary_frames_are_read_by_the_compiled_function_and_equally(seed: int) -> None:
    random = Random(seed)
    base = random.choice((1, 7, (1 << 63) - 200))
    log, entries = ordinary(random, random.choice((1, 2, 8, 30)), base=base, named=seed % 2 == 0)
    for _ in range(12):
        lo = random.randrange(len(entries))
        hi = random.randrange(lo, len(entries)) + 1
        low = random.choice((0, int(entries["frame_offset"][lo])))
        for check in (False, True):
            window, how = log[low:], dict[str, Any](check=check, origin=low)
            found = segment_index.read_indexed_rows(window, entries[lo:hi], base + lo, check=check, origin=low)
            assert found is not None, "it is as ordinary as can be"
            assert as_values(found) == outcome(window, entries, lo, hi, base, compiled=False, **how)
            assert as_values(found) == outcome(window, entries, lo, hi, base, **how)


@pytest.mark.parametrize("seed", range(60))
def test_any_log_is_read_equally_in_both_implementations(seed: int) -> None:
    """Holes, metas, kinds, names that are not ASCII: in both implementations the same records and the same columns."""
    random = Random(seed)
    log, _ = make_log(random, control=False)
    rows = scan.scan_records(log).rows
    if not len(rows):
        return
    base, stop = int(rows.seq[0]), int(rows.seq[-1]) + 1
    entries = segment_index.build_entries(rows, base, stop, len(log))
    for _ in range(12):
        lo = random.randrange(stop - base)
        hi = random.randrange(lo, stop - base) + 1
        got, want = (outcome(log, entries, lo, hi, base, check=True, compiled=compiled) for compiled in (True, False))
        assert got == want


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_changed_byte_is_handled_equally(seed: int, check: bool) -> None:
    """G58, G65, method: each byte of the data and of the index once, by one bit and by all of them."""
    random = Random(seed)
    log, entries = ordinary(random, 4)
    stop, index = len(entries), entries.tobytes()
    for at in range(len(log) + len(index)):
        for bits in (1, 1 << random.randrange(8), 255):
            data, names = bytearray(log), bytearray(index)
            if at < len(log):
                data[at] ^= bits
            else:
                names[at - len(log)] ^= bits
            given = (bytes(data), segment_index.read_entries(bytes(names)), 0, stop, 1)
            got, want = (outcome(*given, check=check, compiled=compiled) for compiled in (True, False))
            assert got == want, (at, bits)


@pytest.mark.parametrize("seed", range(4))
def test_every_truncation_is_handled_equally(seed: int) -> None:
    random = Random(seed)
    log, entries = ordinary(random, 4)
    for end in range(len(log) + 1):
        got, want = (
            outcome(log[:end], entries, 0, len(entries), 1, check=False, compiled=both) for both in (True, False)
        )
        assert got == want, end


@pytest.mark.parametrize(
    "bad",
    [
        {"entries": np.zeros(19, np.uint8)},
        {"seq": -1},
        {"at": np.zeros(1, np.int64)},
        {"at": np.zeros(2, np.int32)},
        {"flags": np.zeros(1, np.uint8)},
        {"ts_us": np.zeros(4, np.int64)[::2]},
        {"data": (np.zeros(2, np.int64), np.zeros(1, np.int64))},
    ],
)
def test_columns_of_a_wrong_shape_are_refused(bad: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "buf": b"",
        "entries": np.zeros(2, segment_index.ENTRY),
        "seq": 1,
        "origin": 0,
        "ts_us": np.zeros(2, np.int64),
        "at": np.zeros(2, np.int64),
        "flags": np.zeros(2, np.uint8),
        "data": (np.zeros(2, np.int64), np.zeros(2, np.int64)),
        "node": None,
        "tag": None,
    }
    assert _native.fill_indexed_records(**given) == 0
    with pytest.raises(ValueError):
        _native.fill_indexed_records(**given | bad)


# Columns of values ------------------------------------------------------------------------------------


def span(places: Sequence[tuple[int, int]]) -> Span:
    pos, size = zip(*places, strict=True) if places else ((), ())
    return Span(np.array(pos, np.int64), np.array(size, np.int64))


BUF = bytes(range(256))
places = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 56)), max_size=20)


@given(places | places.map(sorted), st.integers(1, 3))
@example([(5, 3), (8, 0), (8, 4), (20, 0), (20, 1)], 1)
@example([(9, 4)], 3)
@settings(deadline=None, max_examples=300)
def test_values_are_copied_from_any_positions(found: list[tuple[int, int]], repeated: int) -> None:
    """In any order, apart, one after the other, one of them many times."""
    found = [place for place in found for _ in range(repeated)]
    for compiled in (True, False):
        with implementation(compiled=compiled):
            made = to_binary_array(BUF, span(found))
        made.validate(full=True)
        assert made.to_pylist() == [BUF[pos : pos + size] for pos, size in found]


@given(places.map(sorted), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_both_implementations_build_the_same_column(found: list[tuple[int, int]], repeated: int) -> None:
    # Values of frames, one after the other, and the same one for all records of a frame.
    ends = np.cumsum([0, *(size + pos % 3 for pos, size in found)]).tolist()
    placed = [(at, size) for at, (_, size) in zip(ends[:-1], found, strict=True) if at + size <= len(BUF)]
    where = span([place for place in placed for _ in range(repeated)])
    got = to_binary_array(BUF, where)
    with implementation(compiled=False):
        assert got.equals(to_binary_array(BUF, where))
    assert got.to_pylist() == copy_values(BUF, where)


@pytest.mark.parametrize(
    ("place", "size"),
    [((0, 9), 9), ((-1, 2), 2), ((8, 1), 1), ((0, -1), 0), ((1 << 62, 1 << 62), 4), ((0, 4), 3), ((0, 3), 4)],
)
def test_a_value_outside_is_refused_and_none_is_written_outside(place: tuple[int, int], size: int) -> None:
    memory = bytearray(b"." * (size + 8))
    edges = np.zeros(2, np.int32)
    for copy in (_native.copy_values, _pure_python.copy_values):
        with pytest.raises(ValueError, match="outside of the buffer"):
            copy(memoryview(memory)[:size], edges, b"12345678", *span([place]))
        assert memory[size:] == b"." * 8


def test_edges_are_one_more_than_values() -> None:
    for copy in (_native.copy_values, _pure_python.copy_values):
        with pytest.raises(ValueError, match="edges"):
            copy(bytearray(1), np.zeros(1, np.int32), b"1", *span([(0, 1)]))


# Memory that is used again -----------------------------------------------------------------------------

MIB = 1 << 20


def address(view: Any) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def test_borrowed_buffers_do_not_overlap() -> None:
    held = [_native.borrow_buffer(MIB) for _ in range(8)]
    for number, view in enumerate(held):
        np.frombuffer(view, np.uint8)[:] = number
    assert [set(bytes(view)) for view in held] == [{number} for number in range(8)]
    places = {address(view) for view in held}
    assert len(places) == 8


def test_memory_is_given_back_with_the_last_view() -> None:
    """Method: slices of arrays, and arrays of Arrow, each of which may be the last."""
    size = 3 * MIB + 123
    whole = np.frombuffer(_native.borrow_buffer(size), np.uint8)
    place, part = address(whole), whole[5:9].view(np.int32)
    del whole
    other = _native.borrow_buffer(size)
    assert address(other) != place
    del part
    buffer = pa.py_buffer(_native.borrow_buffer(size))
    assert address(buffer) == place, "what came back last is taken first"
    column = pa.Array.from_buffers(pa.uint8(), 100, [None, buffer])[50:]
    del buffer
    assert address(_native.borrow_buffer(size)) != place
    del column
    assert address(_native.borrow_buffer(size)) == place


def test_a_borrowed_buffer_has_its_size_and_uses_memory_that_fits() -> None:
    big = _native.borrow_buffer(5 * MIB)
    place = address(big)
    del big
    assert address(_native.borrow_buffer(MIB)) != place, "a small one does not hold a large one"
    again = _native.borrow_buffer(5 * MIB - 1000)
    assert (address(again), len(memoryview(again))) == (place, 5 * MIB - 1000)
    with pytest.raises(ValueError):
        _native.borrow_buffer(-1)
    assert len(memoryview(_native.borrow_buffer(0))) == 0


def test_kept_memory_is_bounded() -> None:
    """Method: what was kept has its mark in it, what is fresh has not."""
    held = [_native.borrow_buffer(8 * MIB) for _ in range(12)]
    for view in held:
        np.frombuffer(view, np.uint8)[:8] = np.frombuffer(b"my mark!", np.uint8)
    del view
    held.clear()
    again = [_native.borrow_buffer(8 * MIB) for _ in range(12)]
    assert sum(bytes(memoryview(each)[:8]) == b"my mark!" for each in again) <= 8


def test_tables_do_not_change_when_others_are_built() -> None:
    frames = [batch.encode_many(TOPIC, 1 + 5000 * i, TS, [b"%06d" % i] * 5000) for i in range(3)]
    log = b"".join(piece for frame in frames for piece in frame)
    entries = segment_index.build_entries(scan.scan_records(log).rows, 1, 15001, len(log))
    tables = [to_arrow(scan.scan_indexed(log, entries, lo, lo + 9000, 1, check=False)) for lo in (0, 6000)]
    wanted = [table.to_pydict() for table in tables]
    for lo in range(0, 6000, 1000):
        to_arrow(scan.scan_indexed(log, entries, lo, lo + 9000, 1, check=False))
    assert [table.to_pydict() for table in tables] == wanted
    assert wanted[0]["data"] == [b"000000"] * 5000 + [b"000001"] * 4000
    assert wanted[1]["seq"] == list(range(6001, 15001))


def test_a_missing_column_is_null_at_any_length() -> None:
    for count in (0, 1, 1 << 16, (1 << 16) + 1):
        numbers = np.arange(count, dtype=np.int64)
        made = to_arrow(Rows(b"", numbers, numbers, numbers, Span(np.zeros_like(numbers), np.zeros_like(numbers))))
        made.validate(full=True)
        assert made.column("tag").null_count == count
        assert made.column("meta").equals(pa.nulls(count, pa.binary()))
