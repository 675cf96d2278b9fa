"""[hot] Pages for the wire: records as JSON text or as Arrow batches, without an object per record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from tidelog.engine import retention
from tidelog.engine.block import Block
from tidelog.engine.core import Core
from tidelog.engine.floors import Gap
from tidelog.engine.parts import Segment
from tidelog.engine.read import Nodes, Scan, Stretch
from tidelog.engine.results import Counts
from tidelog.formats import json_rows
from tidelog.formats.json_rows import Show
from tidelog.formats.rows import to_arrow

_FEW: Final = 64  # records of the newest write that are told without columns


class TextPage(NamedTuple):
    """`Page`, with its records as JSON objects that are ready to be sent."""

    text: bytes  # with commas between them
    gap: Gap | None
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    counts: Counts

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq


def is_quick(core: Core, from_seq: int, limit: int, bytes_max: int) -> bool:
    """Whether a page from here is at hand: in memory, or so lately written that the page cache has it, or of segments
    that were read before and are in memory all the same; and no floor has to be synced first.

    A page of segments must be known from `limit` and `bytes_max` alone. Of a reader who leaves records out it is not:
    it may reach far; such a one says 0 and means blocks only.
    """
    if not retention.is_settled(core):
        return False
    with core.lock:
        index = core.index
        for part, first, stop in index.slices(max(from_seq + 1, index.earliest), index.head + 1):
            if not isinstance(part, Segment):
                return True
            if limit <= 0 or not part.is_at_hand(first, min(stop, first + max(limit, 64)), bytes_max):
                return False
            limit -= stop - first
            if limit <= 0:
                return True
    return True


def text_page(core: Core, from_seq: int, limit: int, nodes: Nodes, bytes_max: int, show: Show) -> TextPage:
    """The next records behind `from_seq` as text: at most `limit` and about `bytes_max` bytes."""
    newest = _newest(core, from_seq, min(limit, _FEW), bytes_max) if show.data else None
    if newest is not None:
        return newest
    scan = Scan(core, from_seq, nodes)
    texts = [
        json_rows.joined(stretch.rows, stretch.json, show, compiled=core.shared.limits.kernel)
        for stretch in scan.stretches(limit, bytes_max)
        if len(stretch.rows)
    ]
    retention.harden(core, scan.marks.evict_floor)
    return TextPage(b",".join(texts), scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def _newest(core: Core, from_seq: int, limit: int, bytes_max: int) -> TextPage | None:
    """The page of a reader who lacks the newest write and nothing else, as every watcher does after it: the same as
    by a scan, which would be 60 µs of preparations. None where it is not that simple."""
    count = core.index.head - from_seq  # a first glance, without the lock
    if not 0 < count <= limit or not retention.is_settled(core):
        return None
    with core.lock:
        core.check()
        index = core.index
        head, earliest = index.head, index.earliest
        block = index.parts[-1] if index.parts else None
        if from_seq + 1 < earliest or head - from_seq != count or not isinstance(block, Block):
            return None
        found = block.newest(from_seq + 1, head + 1)
    if found is None or sum(map(len, found[1])) > bytes_max:
        return None
    text = json_rows.few(from_seq + 1, *found)
    return TextPage(text, None, head, head, earliest, Counts(rows=count))


class Pass:
    """One pass over a topic, batch by batch: what a bulk reader is sent. Gap and counts are whole when it ends."""

    def __init__(self, core: Core, from_seq: int, to_seq: int | None, nodes: Nodes, limit: int) -> None:
        self._core, self._limit = core, limit
        self._scan = Scan(core, from_seq, nodes, to_seq)
        retention.harden(core, self._scan.marks.evict_floor)

    @property
    def gap(self) -> Gap | None:
        return self._scan.gap

    @property
    def counts(self) -> Counts:
        return self._scan.counts

    @property
    def next_from_seq(self) -> int:
        return self._scan.cursor

    @property
    def head_seq(self) -> int:
        return self._scan.head

    @property
    def earliest_seq(self) -> int:
        return self._scan.earliest

    def _stretches(self) -> Iterator[Stretch]:
        return (stretch for stretch in self._scan.stretches(self._limit) if len(stretch.rows))

    def lines(self, show: Show) -> Iterator[bytes]:
        """Stretches of newline-terminated JSON objects."""
        compiled = self._core.shared.limits.kernel
        for stretch in self._stretches():
            yield json_rows.joined(stretch.rows, stretch.json, show, b"\n", b"\n", compiled=compiled)

    def batches(self) -> Iterator[pa.RecordBatch]:
        for stretch in self._stretches():
            yield to_arrow(stretch.rows).append_column("json", pa.array(stretch.json))
