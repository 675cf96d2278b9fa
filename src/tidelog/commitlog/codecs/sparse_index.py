"""[hot] Reading through a sparse index: shared by the two layouts that have one.

An index entry says where a record starts, so a window between two entries starts and ends at
record boundaries. A read fetches the smallest such window that covers it, walks the entries
in lock-step, and after damage goes on at the next entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tidelog.commitlog.codec import Chunk, Fault, SegmentContent
from tidelog.errors import Corrupt
from tidelog.formats.rows import Rows, ScanResult, ScanStop, empty_rows
from tidelog.types import Buffer, Ints

WindowScanner = Callable[[Buffer, Ints, int], ScanResult]
"""`walk(buf, starts, ordinal)`: the records of a buffer whose first one is number `ordinal` of its segment."""

RecordSizer = Callable[[Buffer, int], int]
"""`size(buf, pos)`: how long the record at `pos` claims to be, all of it; 0 where there is no whole header."""


class SparseIndex(NamedTuple):
    """A sparse index, read: where records of these seqs and ordinals start."""

    seqs: Ints
    positions: Ints
    records_per_entry: int = 0  # records between two entries; 0 where ordinals do not matter


def read_records(
    segment: SegmentContent,
    index: SparseIndex,
    scan: WindowScanner,
    size_at: RecordSizer,
    first: int,
    stop: int,
    bytes_max: int,
) -> Chunk:
    """Records of [first, stop), as far as the window between two index entries goes."""
    seqs, positions, every = index
    size = segment.data.size
    if size == 0 and len(seqs) == 0:
        return Chunk(empty_rows(), stop)  # compaction took every record
    if size == 0 or len(seqs) == 0:
        reason = "the data is empty or missing and the index is not" if size == 0 else "the index is empty"
        return Chunk(empty_rows(), first, Fault(first, max(stop, first + 1), 0, reason))
    scan = _stop_at_segment_end(scan, segment.stop)
    entry = max(int(np.searchsorted(seqs, first, "right")) - 1, 0)
    low = int(positions[entry])
    last = int(np.searchsorted(seqs, stop, "left"))
    budget = int(np.searchsorted(positions, low + bytes_max, "left"))
    last = max(min(last, budget), entry + 1)
    at_end = last >= len(seqs)
    high = size if at_end else int(positions[last])
    window = memoryview(segment.data.fetch(low, high))
    result = scan(window, positions[entry:last] - low, entry * every)
    if len(window) < high - low:
        rows = result.rows.between(first, stop)
        if len(rows):
            return Chunk(rows, int(rows.seq[-1]) + 1)
        return Chunk(
            empty_rows(), first, Fault(first, segment.stop, low + len(window), "the file lost bytes that were written")
        )
    end = stop if at_end else min(int(seqs[last]), stop)
    if _matches_index(result, seqs, entry):
        return Chunk(result.rows.between(first, stop), end)
    whole = scan(segment.data.fetch(0, size), positions[:0], 0)
    if whole.stop is ScanStop.END:
        # It is the index that is wrong: what it points at is not what it says, and the data is whole.
        return Chunk(whole.rows.between(first, stop), stop)
    far = int(seqs[entry + 1]) if entry + 1 < len(seqs) else segment.stop
    for rows, fault in _split_at_damage(window, scan, size_at, entry * every, int(seqs[entry]), far):
        wanted = rows.between(first, stop)
        if len(wanted) or fault is None:
            return Chunk(
                wanted, end if fault is None else min(fault.seq, stop)
            )  # the good ones now, the damage next time
        if fault.seq >= stop:
            return Chunk(empty_rows(), stop)
        if fault.resume > first:
            return Chunk(empty_rows(), first, fault._replace(seq=max(fault.seq, first), pos=low + fault.pos))
    raise AssertionError("the last stretch ends the window")


def _stop_at_segment_end(scan: WindowScanner, stop: int) -> WindowScanner:
    """The walk, taking a record whose number lies behind its segment for what it is."""

    def checked(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
        result = scan(buf, starts, ordinal)
        rows = result.rows
        if not len(rows) or int(rows.seq[-1]) < stop:
            return result
        keep = int(np.searchsorted(rows.seq, stop))
        return ScanResult(
            rows.slice(0, keep), int(rows.frame_pos[keep]), ScanStop.BAD, "its number lies outside its segment"
        )

    return checked


def _split_at_damage(
    window: memoryview, scan: WindowScanner, size_at: RecordSizer, ordinal: int, expected: int, end_seq: int
) -> Iterator[tuple[Rows, Fault | None]]:
    """The good records of a window and the damage behind each run of them. A record whose length still leads to a good
    one is stepped over alone; otherwise reading goes on at the next index entry (`far`)."""
    start = np.zeros(1, np.int64)
    at, result = 0, scan(window, start, ordinal)
    while result.stop is not ScanStop.END:
        rows, reason, pos = result.rows, result.reason, at + result.end
        bad = int(rows.seq[-1]) + 1 if len(rows) else expected
        size = size_at(window, pos)
        at, ordinal = pos + size, ordinal + len(rows) + 1
        result = scan(window[at:], start, ordinal) if size and at < len(window) else scan(window[:0], start, 0)
        resume = int(result.rows.seq[0]) if len(result.rows) else end_seq
        stepped = bad < resume < end_seq
        yield rows, Fault(bad, resume if stepped else end_seq, pos, reason)
        if not stepped:
            return
        expected = resume
    yield result.rows, None


def _matches_index(result: ScanResult, seqs: Ints, entry: int) -> bool:
    """Whether a window ended cleanly and starts with the record that the index says. The first entry of a segment
    may stand for a record that compaction took away."""
    if result.stop is not ScanStop.END or not len(result.rows):
        return False
    first = int(result.rows.seq[0])
    return first == int(seqs[entry]) or (entry == 0 and first > int(seqs[0]))


def time_range(
    read_chunk: Callable[[SegmentContent, int, int, int], Chunk], segment: SegmentContent, last_indexed: int
) -> tuple[int, int] | None:
    """First and last record time of a segment, from its first and its last stretch."""
    head = read_chunk(segment, segment.base, segment.stop, 1).rows
    tail = read_chunk(segment, last_indexed, segment.stop, 1 << 62).rows
    if not len(head) or not len(tail):
        return None
    return int(head.ts_us[0]), int(tail.ts_us[-1])


def end_seq(
    read_chunk: Callable[[SegmentContent, int, int, int], Chunk], segment: SegmentContent, last_indexed: int | None
) -> int:
    """One past the last record that is there, from the last indexed one on."""
    if last_indexed is None:
        return segment.base
    rows = read_chunk(segment, last_indexed, segment.stop, 1 << 62).rows
    return int(rows.seq[-1]) + 1 if len(rows) else segment.stop


def find_position(segment: SegmentContent, index: SparseIndex, scan: WindowScanner, seq: int) -> int:
    """The byte where records at or behind `seq` begin."""
    seqs, positions, every = index
    if len(seqs) == 0 or segment.data.size == 0:
        return 0
    entry = max(int(np.searchsorted(seqs, seq, "right")) - 1, 0)
    low = int(positions[entry])
    high = int(positions[entry + 1]) if entry + 1 < len(seqs) else segment.data.size
    result = scan(segment.data.fetch(low, high), np.zeros(1, np.int64), entry * every)
    behind = int(np.searchsorted(result.rows.seq, seq))
    if behind == len(result.rows) and result.stop is not ScanStop.END:
        raise Corrupt("segment", pos=low + result.end, reason=result.reason)
    return low + (int(result.rows.frame_pos[behind]) if behind < len(result.rows) else result.end)
