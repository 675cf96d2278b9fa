"""[hot] Reading through a sparse index: shared by the two layouts that have one.

An index entry says where a record starts, so a window between two entries starts and ends at
record boundaries. A read fetches the smallest such window that covers it, walks the entries
in lock-step, and after damage goes on at the next entry.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidelog.commitlog.codec import Chunk, Fault, Shape
from tidelog.formats.rows import Stop, Walk, none
from tidelog.types import Buffer, Ints

Walker = Callable[[Buffer, Ints, int], Walk]


def read(shape: Shape, seqs: Ints, positions: Ints, walk: Walker, first: int, stop: int, bytes_max: int) -> Chunk:
    """Records of [first, stop) through the index entries (seqs, positions). `walk(buf, starts, entry)` walks a
    window whose first record is that of index entry number `entry`."""
    size = shape.data.size
    if size == 0:
        return Chunk(none(), stop)  # compaction took every record
    if len(seqs) == 0:
        return Chunk(none(), first, Fault(first, max(stop, first + 1), 0, "the index is empty and the data is not"))
    entry = max(int(np.searchsorted(seqs, first, "right")) - 1, 0)
    low = int(positions[entry])
    last = int(np.searchsorted(seqs, stop, "left"))
    budget = int(np.searchsorted(positions, low + bytes_max, "left"))
    last = max(min(last, budget), entry + 1)
    at_end = last >= len(seqs)
    high = size if at_end else int(positions[last])
    starts = positions[entry:last] - low
    result = walk(shape.data.fetch(low, high), starts, entry)
    if not _as_indexed(result, seqs, entry):
        whole = walk(shape.data.fetch(0, size), positions[:0], 0)
        if whole.stop is Stop.END:
            # It is the index that is wrong: what it points at is not what it says, and the data is whole.
            return Chunk(whole.rows.between(first, stop), stop)
    rows = result.rows.between(first, stop)
    if result.stop is Stop.END:
        return Chunk(rows, stop if at_end else min(int(seqs[last]), stop))
    bad = int(result.rows.seq[-1]) + 1 if len(result.rows) else int(seqs[entry])
    resume = shape.stop
    later = int(np.searchsorted(positions, low + result.end, "right"))
    if later < len(seqs):
        resume = int(seqs[later])
    if bad >= stop:
        return Chunk(rows, stop)
    if len(rows) and bad > first:
        return Chunk(rows, bad)  # the good ones now, the damage with the next read
    return Chunk(none(), first, Fault(max(bad, first), max(resume, first + 1), low + result.end, result.reason))


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


def position(shape: Shape, seqs: Ints, positions: Ints, walk: Walker, seq: int) -> int:
    """The byte where records at or behind `seq` begin."""
    if len(seqs) == 0 or shape.data.size == 0:
        return 0
    entry = max(int(np.searchsorted(seqs, seq, "right")) - 1, 0)
    low = int(positions[entry])
    last = entry + 1
    high = int(positions[last]) if last < len(seqs) else shape.data.size
    result = walk(shape.data.fetch(low, high), positions[entry:last] - low, entry)
    behind = int(np.searchsorted(result.rows.seq, seq))
    return low + (int(result.rows.at[behind]) if behind < len(result.rows) else result.end)
