"""[policy] Bytes into tasks. All that is to be read is laid end to end and cut at equal distances.

    topic a                       topic b            tail
    ├────────┬────────┬───┬───────┼──┬──┬──┬──┬──┬───┼────┤        segments: large ones are cut, small ones packed
    ╎            ╎           ╎           ╎           ╎    ╎        cuts, moved to where a frame begins

So one topic with one writer fills every core as evenly as many topics do, and rows stay in order inside a task.
How many tasks: what `splitBytes` asks for, and no fewer than `minPartitions`; where nobody asked, no fewer than
processors either, unless a task would have less than `LEAST_BYTES` to read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

LEAST_BYTES: Final = 1 << 20


class Lane(NamedTuple):
    """A stretch of seqs with the bytes they lie at, rising."""

    first: int
    stop: int
    at: Callable[[int], int]  # of seqs in [first, stop]

    @property
    def size(self) -> int:
        return self.at(self.stop) - self.at(self.first)


class Piece(NamedTuple):
    lane: int  # which of the lanes
    first: int
    stop: int
    size: int


def tasks(total: int, *, split_bytes: int, least: int | None, processors: int) -> int:
    """How many tasks so many bytes are read by."""
    asked = -(-total // split_bytes)
    if least is None:
        least = min(processors, -(-total // LEAST_BYTES))
    return max(asked, least, 1)


def cut(lanes: Sequence[Lane], count: int) -> list[list[Piece]]:
    """The lanes in at most `count` parts of about equal size, none empty."""
    sizes = [lane.size for lane in lanes]
    total = sum(sizes)
    marks = [total * number // count for number in range(1, count)]
    parts: list[list[Piece]] = [[]]
    before = 0
    for number, (lane, size) in enumerate(zip(lanes, sizes, strict=True)):
        first, origin = lane.first, lane.at(lane.first)
        while marks and marks[0] <= before + size:
            stop = _stop(lane, first, origin + marks.pop(0) - before)
            if stop > first:
                parts[-1].append(Piece(number, first, stop, lane.at(stop) - lane.at(first)))
                first = stop
            if parts[-1]:
                parts.append([])
        if first < lane.stop:
            parts[-1].append(Piece(number, first, lane.stop, lane.at(lane.stop) - lane.at(first)))
        before += size
    return [part for part in parts if part]


def _stop(lane: Lane, first: int, byte: int) -> int:
    """Where to cut a lane near a byte: at the beginning of a frame, on whichever side is nearer."""
    later = bisect_left(range(first, lane.stop), byte, key=lane.at) + first
    if later >= lane.stop:
        return lane.stop
    earlier = bisect_left(range(first, later), lane.at(later - 1), key=lane.at) + first if later > first else first
    return later if lane.at(later) - byte <= byte - lane.at(earlier) else earlier
