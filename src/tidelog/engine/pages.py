"""[hot] Pages for the wire: records as JSON text or as Arrow batches, without an object per record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from tidelog.engine import retention
from tidelog.engine import strong as consistency
from tidelog.engine.block import Block
from tidelog.engine.core import Core
from tidelog.engine.edges import PAGE_FRAMES_MAX
from tidelog.engine.floors import Gap
from tidelog.engine.parts import Places, Segment
from tidelog.engine.read import Nodes, Scan, Stretch
from tidelog.engine.results import Counts
from tidelog.formats import json_batch, json_rows, lone
from tidelog.formats.json_rows import Show
from tidelog.formats.lone import Bare
from tidelog.formats.rows import to_arrow
from tidelog.types import Buffer

_FEW: Final = 64  # records of the newest write that are told one by one


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


def is_quick(core: Core, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False) -> bool:
    """Whether a page from here is at hand: in memory, or so lately written that the page cache has it, or of segments
    that were read before and are in memory all the same; and no floor has to be synced first.

    A page of segments must be known from `limit` and `bytes_max` alone. Of a reader who leaves records out it is not:
    it may reach far; such a one says 0 and means blocks only.
    """
    if not retention.is_settled(core, from_seq) or not consistency.is_settled(core, strong):
        return False
    with core.lock:
        index = core.index
        if index.parts and isinstance(index.parts[-1], Block) and from_seq + 1 >= index.parts[-1].base:
            return True  # what nearly every watcher asks
        for part, first, stop in index.slices(max(from_seq + 1, index.earliest), index.head + 1):
            if not isinstance(part, Segment):
                return True
            if limit <= 0 or not part.is_at_hand(first, min(stop, first + max(limit, 64)), bytes_max):
                return False
            limit -= stop - first
            if limit <= 0:
                return True
    return True


def text_page(
    core: Core, from_seq: int, limit: int, nodes: Nodes, bytes_max: int, show: Show, *, strong: bool = False
) -> TextPage:
    """The next records behind `from_seq` as text: at most `limit` and about `bytes_max` bytes."""
    short = _short(core, from_seq, limit, bytes_max, strong=strong) if show.data else None
    if short is not None:
        return short
    scan = Scan(core, from_seq, nodes, strong=strong)
    texts = [
        json_rows.joined(stretch.rows, stretch.json, show, compiled=core.shared.limits.kernel)
        for stretch in scan.stretches(limit, bytes_max)
        if len(stretch.rows)
    ]
    retention.harden_gap(core, scan.gap, scan.marks.evict_floor)
    return TextPage(b",".join(texts), scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def at_hand(core: Core, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False) -> TextPage | None:
    """`text_page` with data, where it can be had by the short way and nobody has to wait for it: `is_quick` and the
    page in one look. None says nothing: ask `is_quick`."""
    return _short(core, from_seq, limit, bytes_max, near=True, strong=strong)


def _short(
    core: Core, from_seq: int, limit: int, bytes_max: int, *, near: bool = False, strong: bool = False
) -> TextPage | None:
    """The same as by a scan, for two kinds of pages that most are of: what a watcher lacks, which is the newest write
    and nothing else, and records of a few batches that have JSON data and nothing else. A scan prepares for everything
    else there is, for 60 µs, and reads records into columns first. None where it is not that simple."""
    if core.index.head <= from_seq or not retention.is_settled(core, from_seq):  # a first glance, without the lock
        return None
    newest, bare = None, list[_Bare]()
    near_us = core.shared.clock.monotonic_us() if near else None
    with core.lock:
        core.check()
        index = core.index
        if not consistency.is_settled(core, strong):
            return None
        head, earliest = index.head, index.earliest
        count = min(head - from_seq, limit)
        first = at = from_seq + 1
        stop = first + count
        if first < earliest or not index.parts:
            return None
        last = index.parts[-1]
        if count <= _FEW and isinstance(last, Block):
            newest = last.newest(first, stop)
        if newest is None:
            for part, lo, hi in index.slices(first, stop):
                look = part.bare(lo, hi, bytes_max, near_us)
                if look is None or lo != at:
                    return None
                bare.append(_Bare(lo, hi, look))
                at = hi
            if at != stop:
                return None
    if newest is not None:
        text = json_rows.few(first, *newest) if sum(map(len, newest[1])) <= bytes_max else None
    else:
        text = _joined(core, bare, bytes_max)
    return None if text is None else TextPage(text, None, stop - 1, head, earliest, Counts(rows=count))


class _Bare(NamedTuple):
    """Seqs [first, stop), all of which are there, and how to find out where their frames lie."""

    first: int
    stop: int
    look: Callable[[], Places | None]


def _joined(core: Core, bare: list[_Bare], bytes_max: int) -> bytes | None:
    """Their text, frame by frame; None where one of the frames is not a batch that is told where it lies, or might be
    too much, or where there are many: a scan looks at all of them at once."""
    cuts: list[tuple[Buffer, Bare, int, int]] = []
    for at, stop, look in bare:
        for buf, pos in look() or ():
            while at < stop and pos < len(buf) and len(cuts) < PAGE_FRAMES_MAX:
                batch = lone.bare(buf, pos, core.id)
                if batch is None or not batch.seq <= at < batch.seq + batch.records:
                    return None
                hi = min(stop - batch.seq, batch.records)
                cuts.append((buf, batch, at - batch.seq, hi))
                bytes_max -= batch.data_end - batch.lengths_at
                at, pos = batch.seq + hi, batch.end
        if at != stop or bytes_max < 0:
            return None
    compiled = core.shared.limits.kernel
    texts = [json_batch.text(*cut, compiled=compiled) for cut in cuts]
    return None if None in texts else b",".join(text for text in texts if text is not None)


class Pass:
    """One pass over a topic, batch by batch: what a bulk reader is sent. Gap and counts are whole when it ends."""

    def __init__(
        self, core: Core, from_seq: int, to_seq: int | None, nodes: Nodes, limit: int, *, strong: bool = False
    ) -> None:
        self._core, self._limit = core, limit
        self._scan = Scan(core, from_seq, nodes, to_seq, through=True, strong=strong)
        retention.harden_gap(core, self._scan.gap, self._scan.marks.evict_floor)

    @property
    def gap(self) -> Gap | None:
        return self._scan.gap

    @property
    def gaps(self) -> list[Gap]:
        """Every gap among the seqs that were passed so far; `gap` is the first."""
        return self._scan.gaps

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

    def limit_chunk(self, size: int) -> None:
        """Read no more bytes of frames than this for the next stretch; one record in any case."""
        self._scan.chunk_bytes = size

    def _stretches(self) -> Iterator[Stretch]:
        return filter(lambda stretch: len(stretch.rows), self._scan.stretches(self._limit))

    # Maps, and no loops: between two steps a loop would hold the records of the last one.

    def lines(self, show: Show) -> Iterator[bytes]:
        """Stretches of newline-terminated JSON objects."""
        compiled = self._core.shared.limits.kernel

        def text(stretch: Stretch) -> bytes:
            return json_rows.joined(stretch.rows, stretch.json, show, b"\n", b"\n", compiled=compiled)

        return map(text, self._stretches())

    def batches(self) -> Iterator[pa.RecordBatch]:
        compiled = self._core.shared.limits.kernel

        def batch(stretch: Stretch) -> pa.RecordBatch:
            return to_arrow(stretch.rows, compiled=compiled).append_column("json", pa.array(stretch.json))

        return map(batch, self._stretches())
