"""Offsets in Spark's checkpoint: {"orders": {"epoch": 7, "seq": 42}}, the next seq to read; and the size of a batch.

The start of a batch is included, its end is not. The epoch distinguishes a topic that was dropped and created again
from the old one. A topic that an end has and a start has not is new: it is read from its first record. Names are
sorted, because Spark compares offsets as text. `admit_batch` has no state: offsets in, offsets out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tidelog.errors import BadInput


class Position(NamedTuple):
    epoch: int
    seq: int


Positions: TypeAlias = dict[str, Position]


def encode_offsets(positions: Mapping[str, Position]) -> dict[str, dict[str, int]]:
    return {topic: {"epoch": positions[topic].epoch, "seq": positions[topic].seq} for topic in sorted(positions)}


def decode_offsets(offsets: Any) -> Positions:
    """Decode the offsets of a checkpoint; None and {} are the beginning."""
    try:
        return {str(topic): Position(int(at["epoch"]), int(at["seq"])) for topic, at in (offsets or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadInput(
            f"{str(offsets)[:200]} is not an offset of a tidelog stream; nothing was read, is the checkpoint another "
            "query's?"
        ) from None


class Pending(NamedTuple):
    """Pending seqs [first, stop) of one topic."""

    topic: str
    first: int
    stop: int
    bytes_before: Callable[[int], int]

    @property
    def seq_count(self) -> int:
        return self.stop - self.first


def admit_batch(pending: list[Pending], rows_max: int | None, bytes_max: int | None) -> dict[str, int]:
    """Return where one batch ends, by topic. Each topic gets a share of the limits in proportion to its pending seqs or
    bytes. If anything is pending, the batch has at least one seq."""
    ends = {each.topic: each.stop for each in pending}
    if rows_max is not None:
        for each, share in _split_limit(pending, [each.seq_count for each in pending], rows_max):
            ends[each.topic] = min(ends[each.topic], each.first + share)
    if bytes_max is not None:
        sizes = [each.bytes_before(ends[each.topic]) - each.bytes_before(each.first) for each in pending]
        for each, share in _split_limit(pending, sizes, bytes_max):
            ends[each.topic] = _last_seq_within(each, ends[each.topic], share)
    waiting = [each for each in pending if each.seq_count]
    if waiting and all(ends[each.topic] == each.first for each in waiting):
        ends[waiting[0].topic] += 1  # a limit that is smaller than one record must not stop the stream
    return ends


def _split_limit(pending: list[Pending], sizes: list[int], limit: int) -> list[tuple[Pending, int]]:
    """Split a limit in proportion to sizes; the first topics get the rest of the rounding."""
    total = sum(sizes)
    if total <= limit:
        return list(zip(pending, sizes, strict=True))
    shares = [size * limit // total for size in sizes]
    left = limit - sum(shares)
    for number, size in enumerate(sizes):
        more = min(left, size - shares[number])
        shares[number] += more
        left -= more
    return list(zip(pending, shares, strict=True))


def _last_seq_within(pending: Pending, stop: int, budget: int) -> int:
    """Return the last seq up to `stop` whose bytes fit, by bisection."""
    low, high, origin = pending.first, stop, pending.bytes_before(pending.first)
    while low < high:
        middle = (low + high + 1) // 2
        if pending.bytes_before(middle) - origin <= budget:
            low = middle
        else:
            high = middle - 1
    return low
