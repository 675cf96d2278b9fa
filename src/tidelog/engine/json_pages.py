"""[hot] Pages for the wire: records as JSON text or as Arrow batches, without an object per record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from tidelog.engine import consistency, retention
from tidelog.engine.memtable import MemTable
from tidelog.engine.read import ExcludedNodes, RecordChunk, TopicScan
from tidelog.engine.results import Counts
from tidelog.engine.segment import PAGE_FRAMES_MAX, FrameLocations, Segment
from tidelog.engine.topic_state import TopicState
from tidelog.engine.watermarks import Gap
from tidelog.formats import json_rows
from tidelog.formats import scan as lone
from tidelog.formats.json_rows import FieldSelection
from tidelog.formats.rows import to_arrow
from tidelog.formats.scan import PlainBatch
from tidelog.types import Buffer

_LAST_WRITE_RECORDS_MAX: Final = 64  # records of the newest write that are told one by one


class JsonPage(NamedTuple):
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


def can_read_without_blocking(
    topic: TopicState, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False
) -> bool:
    """Whether a page from here is at hand: in memory, or so lately written that the page cache has it, or of segments
    that were read before and are in memory all the same; and no floor has to be synced first.

    A page of segments must be known from `limit` and `bytes_max` alone. Of a reader who leaves records out it is not:
    it may reach far; such a one says 0 and means blocks only.
    """
    if not retention.is_floor_durable(topic, from_seq) or not consistency.is_durable_to_head(topic, strong):
        return False
    with topic.lock:
        index = topic.index
        if index.parts and isinstance(index.parts[-1], MemTable) and from_seq + 1 >= index.parts[-1].base:
            return True  # what nearly every watcher asks
        for part, first, stop in index.slices(max(from_seq + 1, index.earliest), index.head + 1):
            if not isinstance(part, Segment):
                return True
            if limit <= 0 or not part.is_resident(first, min(stop, first + max(limit, 64)), bytes_max):
                return False
            limit -= stop - first
            if limit <= 0:
                return True
    return True


def read_json_page(
    topic: TopicState,
    from_seq: int,
    limit: int,
    nodes: ExcludedNodes,
    bytes_max: int,
    show: FieldSelection,
    *,
    strong: bool = False,
) -> JsonPage:
    """The next records behind `from_seq` as text: at most `limit` and about `bytes_max` bytes."""
    short = _read_fast(topic, from_seq, limit, bytes_max, strong=strong) if show.data else None
    if short is not None:
        return short
    scan = TopicScan(topic, from_seq, nodes, strong=strong)
    texts = [
        json_rows.encode_rows(stretch.rows, stretch.json, show)
        for stretch in scan.iter_chunks(limit, bytes_max)
        if len(stretch.rows)
    ]
    retention.persist_gap_floor(topic, scan.gap, scan.watermarks.evict_floor)
    return JsonPage(b",".join(texts), scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def read_cached_page(
    topic: TopicState, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False
) -> JsonPage | None:
    """`text_page` with data, where it can be had by the short way and nobody has to wait for it: `is_quick` and the
    page in one look. None says nothing: ask `is_quick`."""
    return _read_fast(topic, from_seq, limit, bytes_max, resident_only=True, strong=strong)


def _read_fast(
    topic: TopicState, from_seq: int, limit: int, bytes_max: int, *, resident_only: bool = False, strong: bool = False
) -> JsonPage | None:
    """The same as by a scan, for two kinds of pages that most are of: what a watcher lacks, which is the newest write
    and nothing else, and records of a few batches that have JSON data and nothing else. A scan prepares for everything
    else there is, for 60 µs, and reads records into columns first. None where it is not that simple."""
    if topic.index.head <= from_seq or not retention.is_floor_durable(
        topic, from_seq
    ):  # a first glance, without the lock
        return None
    newest, bare = None, list[_PlainRange]()
    near_us = topic.context.clock.monotonic_us() if resident_only else None
    with topic.lock:
        topic.check_open()
        index = topic.index
        if not consistency.is_durable_to_head(topic, strong):
            return None
        head, earliest = index.head, index.earliest
        count = min(head - from_seq, limit)
        first = at = from_seq + 1
        stop = first + count
        if first < earliest or not index.parts:
            return None
        last = index.parts[-1]
        if count <= _LAST_WRITE_RECORDS_MAX and isinstance(last, MemTable):
            newest = last.read_last_write(first, stop)
        if newest is None:
            for part, lo, hi in index.slices(first, stop):
                look = part.plain_frames(lo, hi, bytes_max, near_us)
                if look is None or lo != at:
                    return None
                bare.append(_PlainRange(lo, hi, look))
                at = hi
            if at != stop:
                return None
    if newest is not None:
        text = json_rows.encode_few(first, *newest) if sum(map(len, newest[1])) <= bytes_max else None
    else:
        text = _encode_plain_ranges(topic, bare, bytes_max)
    return None if text is None else JsonPage(text, None, stop - 1, head, earliest, Counts(rows=count))


class _PlainRange(NamedTuple):
    """Seqs [first, stop), all of which are there, and how to find out where their frames lie."""

    first: int
    stop: int
    locate: Callable[[], FrameLocations | None]


def _encode_plain_ranges(topic: TopicState, bare: list[_PlainRange], bytes_max: int) -> bytes | None:
    """Their text, frame by frame; None where one of the frames is not a batch that is told where it lies, or might be
    too much, or where there are many: a scan looks at all of them at once."""
    cuts: list[tuple[Buffer, PlainBatch, int, int]] = []
    for at, stop, look in bare:
        for buf, pos in look() or ():
            while at < stop and pos < len(buf) and len(cuts) < PAGE_FRAMES_MAX:
                batch = lone.find_plain_batch(buf, pos, topic.id)
                if batch is None or not batch.seq <= at < batch.seq + batch.records:
                    return None
                hi = min(stop - batch.seq, batch.records)
                cuts.append((buf, batch, at - batch.seq, hi))
                bytes_max -= batch.data_end - batch.lengths_pos
                at, pos = batch.seq + hi, batch.end
        if at != stop or bytes_max < 0:
            return None
    texts = [json_rows.encode_batch(*cut) for cut in cuts]
    return None if None in texts else b",".join(text for text in texts if text is not None)


class BulkScan:
    """One pass over a topic, batch by batch: what a bulk reader is sent. Gap and counts are whole when it ends."""

    def __init__(
        self,
        topic: TopicState,
        from_seq: int,
        to_seq: int | None,
        nodes: ExcludedNodes,
        limit: int,
        *,
        strong: bool = False,
    ) -> None:
        self._core, self._limit = topic, limit
        self._scan = TopicScan(topic, from_seq, nodes, to_seq, pass_gaps=True, strong=strong)
        retention.persist_gap_floor(topic, self._scan.gap, self._scan.watermarks.evict_floor)

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

    def set_chunk_bytes(self, size: int) -> None:
        """Read no more bytes of frames than this for the next stretch; one record in any case."""
        self._scan.chunk_bytes = size

    def _chunks(self) -> Iterator[RecordChunk]:
        return filter(lambda stretch: len(stretch.rows), self._scan.iter_chunks(self._limit))

    # Maps, and no loops: between two steps a loop would hold the records of the last one.

    def iter_json_lines(self, show: FieldSelection) -> Iterator[bytes]:
        """Stretches of newline-terminated JSON objects."""

        def text(stretch: RecordChunk) -> bytes:
            return json_rows.encode_rows(stretch.rows, stretch.json, show, b"\n", b"\n")

        return map(text, self._chunks())

    def iter_arrow_batches(self) -> Iterator[pa.RecordBatch]:
        def batch(stretch: RecordChunk) -> pa.RecordBatch:
            return to_arrow(stretch.rows).append_column("json", pa.array(stretch.json))

        return map(batch, self._chunks())
