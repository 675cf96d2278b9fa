"""[hot] Reading through a sparse index: shared by the two layouts that have one.

An index entry says where a record starts, so a window between two entries starts and ends at
record boundaries. A read fetches the smallest such window that covers it, walks the entries
in lock-step, and after damage goes on at the next entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tidelog.commitlog.codec import Chunk, Fault, Shape
from tidelog.errors import Corrupt
from tidelog.formats.rows import Rows, Stop, Walk, none
from tidelog.types import Buffer, Ints

Walker = Callable[[Buffer, Ints, int], Walk]
"""`walk(buf, starts, ordinal)`: the records of a buffer whose first one is number `ordinal` of its segment."""

Sizer = Callable[[Buffer, int], int]
"""`size(buf, pos)`: how long the record at `pos` claims to be, all of it; 0 where there is no whole header."""


class Index(NamedTuple):
    """A sparse index, read: where records of these seqs and ordinals start."""

    seqs: Ints
    positions: Ints
    every: int = 0  # records between two entries; 0 where ordinals do not matter


def read(shape: Shape, index: Index, walk: Walker, size_at: Sizer, first: int, stop: int, bytes_max: int) -> Chunk:
    """Records of [first, stop), as far as the window between two index entries goes."""
    seqs, positions, every = index
    size = shape.data.size
    if size == 0 and len(seqs) == 0:
        return Chunk(none(), stop)  # compaction took every record
    if size == 0 or len(seqs) == 0:
        reason = "the data is empty or missing and the index is not" if size == 0 else "the index is empty"
        return Chunk(none(), first, Fault(first, max(stop, first + 1), 0, reason))
    walk = _inside(walk, shape.stop)
    entry = max(int(np.searchsorted(seqs, first, "right")) - 1, 0)
    low = int(positions[entry])
    last = int(np.searchsorted(seqs, stop, "left"))
    budget = int(np.searchsorted(positions, low + bytes_max, "left"))
    last = max(min(last, budget), entry + 1)
    at_end = last >= len(seqs)
    high = size if at_end else int(positions[last])
    window = memoryview(shape.data.fetch(low, high))
    result = walk(window, positions[entry:last] - low, entry * every)
    if len(window) < high - low:
        rows = result.rows.between(first, stop)
        if len(rows):
            return Chunk(rows, int(rows.seq[-1]) + 1)
        return Chunk(
            none(), first, Fault(first, shape.stop, low + len(window), "the file lost bytes that were written")
        )
    end = stop if at_end else min(int(seqs[last]), stop)
    if _as_indexed(result, seqs, entry):
        return Chunk(result.rows.between(first, stop), end)
    whole = walk(shape.data.fetch(0, size), positions[:0], 0)
    if whole.stop is Stop.END:
        # It is the index that is wrong: what it points at is not what it says, and the data is whole.
        return Chunk(whole.rows.between(first, stop), stop)
    far = int(seqs[entry + 1]) if entry + 1 < len(seqs) else shape.stop
    for rows, fault in _stretches(window, walk, size_at, entry * every, int(seqs[entry]), far):
        wanted = rows.between(first, stop)
        if len(wanted) or fault is None:
            return Chunk(
                wanted, end if fault is None else min(fault.seq, stop)
            )  # the good ones now, the damage next time
        if fault.seq >= stop:
            return Chunk(none(), stop)
        if fault.resume > first:
            return Chunk(none(), first, fault._replace(seq=max(fault.seq, first), pos=low + fault.pos))
    raise AssertionError("the last stretch ends the window")


def _inside(walk: Walker, stop: int) -> Walker:
    """The walk, taking a record whose number lies behind its segment for what it is."""

    def checked(buf: Buffer, starts: Ints, ordinal: int) -> Walk:
        result = walk(buf, starts, ordinal)
        rows = result.rows
        if not len(rows) or int(rows.seq[-1]) < stop:
            return result
        keep = int(np.searchsorted(rows.seq, stop))
        return Walk(rows.part(0, keep), int(rows.at[keep]), Stop.BAD, "its number lies outside its segment")

    return checked


def _stretches(
    window: memoryview, walk: Walker, size_at: Sizer, ordinal: int, expected: int, far: int
) -> Iterator[tuple[Rows, Fault | None]]:
    """The good records of a window and the damage behind each run of them. A record whose length still leads to a good
    one is stepped over alone; otherwise reading goes on at the next index entry (`far`)."""
    start = np.zeros(1, np.int64)
    at, result = 0, walk(window, start, ordinal)
    while result.stop is not Stop.END:
        rows, reason, pos = result.rows, result.reason, at + result.end
        bad = int(rows.seq[-1]) + 1 if len(rows) else expected
        size = size_at(window, pos)
        at, ordinal = pos + size, ordinal + len(rows) + 1
        result = walk(window[at:], start, ordinal) if size and at < len(window) else walk(window[:0], start, 0)
        resume = int(result.rows.seq[0]) if len(result.rows) else far
        stepped = bad < resume < far
        yield rows, Fault(bad, resume if stepped else far, pos, reason)
        if not stepped:
            return
        expected = resume
    yield result.rows, None


def _as_indexed(result: Walk, seqs: Ints, entry: int) -> bool:
    """Whether a window ended cleanly and starts with the record that the index says. The first entry of a segment
    may stand for a record that compaction took away."""
    if result.stop is not Stop.END or not len(result.rows):
        return False
    first = int(result.rows.seq[0])
    return first == int(seqs[entry]) or (entry == 0 and first > int(seqs[0]))


def times(
    read_chunk: Callable[[Shape, int, int, int], Chunk], shape: Shape, last_indexed: int
) -> tuple[int, int] | None:
    """First and last record time of a segment, from its first and its last stretch."""
    head = read_chunk(shape, shape.base, shape.stop, 1).rows
    tail = read_chunk(shape, last_indexed, shape.stop, 1 << 62).rows
    if not len(head) or not len(tail):
        return None
    return int(head.ts_us[0]), int(tail.ts_us[-1])


def reach(read_chunk: Callable[[Shape, int, int, int], Chunk], shape: Shape, last_indexed: int | None) -> int:
    """One past the last record that is there, from the last indexed one on."""
    if last_indexed is None:
        return shape.base
    rows = read_chunk(shape, last_indexed, shape.stop, 1 << 62).rows
    return int(rows.seq[-1]) + 1 if len(rows) else shape.stop


def position(shape: Shape, index: Index, walk: Walker, seq: int) -> int:
    """The byte where records at or behind `seq` begin."""
    seqs, positions, every = index
    if len(seqs) == 0 or shape.data.size == 0:
        return 0
    entry = max(int(np.searchsorted(seqs, seq, "right")) - 1, 0)
    low = int(positions[entry])
    high = int(positions[entry + 1]) if entry + 1 < len(seqs) else shape.data.size
    result = walk(shape.data.fetch(low, high), np.zeros(1, np.int64), entry * every)
    behind = int(np.searchsorted(result.rows.seq, seq))
    if behind == len(result.rows) and result.stop is not Stop.END:
        raise Corrupt("segment", pos=low + result.end, reason=result.reason)
    return low + (int(result.rows.at[behind]) if behind < len(result.rows) else result.end)
