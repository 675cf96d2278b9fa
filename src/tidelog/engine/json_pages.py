"""Pages for the wire: records as JSON text or as Arrow batches, without a Python object per record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

from tidelog import frames
from tidelog.engine import read, retention
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.memtable import MemTable
from tidelog.engine.read import ExcludedNodes, RecordChunk, TopicScan
from tidelog.engine.results import Counts
from tidelog.engine.segment import PAGE_FRAMES_MAX, FrameLocations, Segment
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.formats import json_rows
from tidelog.formats import scan as frame_scan
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.json_rows import FieldSelection
from tidelog.formats.scan import PlainBatch
from tidelog.types import Buffer

_LAST_WRITE_RECORDS_MAX: Final = 64  # records of the newest write that are encoded one by one


class JsonPage(NamedTuple):
    """`Page`, with its records as JSON objects that are ready to be sent."""

    text: bytes  # comma-separated
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
    """Whether a page from here needs no disk access and no sync: its records are in memory, in the page cache because
    they were just written, or in verified segments that are resident.

    A page of segments must follow from `limit` and `bytes_max` alone. A reader that excludes nodes may scan further; it
    passes limit 0, which accepts memtables only.
    """
    if not retention.is_floor_durable(topic, from_seq) or not read.is_durable_to_head(topic, strong):
        return False
    with topic.lock:
        index = topic.index
        if index.parts and isinstance(index.parts[-1], MemTable) and from_seq + 1 >= index.parts[-1].base:
            return True  # the common case of a watcher
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
    to_seq: int | None = None,
    strong: bool = False,
) -> JsonPage:
    """Read the records after `from_seq`, up to `to_seq`, as text: at most `limit` and about `bytes_max` bytes."""
    page = _read_fast(topic, from_seq, limit, bytes_max, strong=strong) if show.data and to_seq is None else None
    if page is not None:
        return page
    scan = TopicScan(topic, from_seq, nodes, to_seq, strong=strong)
    texts = [
        json_rows.encode_rows(chunk.rows, chunk.json, show)
        for chunk in scan.iter_chunks(limit, bytes_max)
        if len(chunk.rows)
    ]
    retention.persist_gap_floor(topic, scan.gap, scan.watermarks.evict_floor)
    return JsonPage(b",".join(texts), scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def read_cached_page(
    topic: TopicState, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False
) -> JsonPage | None:
    """`read_json_page` with data, if the fast path can serve it without blocking. None decides nothing: ask
    `can_read_without_blocking`."""
    return _read_fast(topic, from_seq, limit, bytes_max, resident_only=True, strong=strong)


def _read_fast(
    topic: TopicState, from_seq: int, limit: int, bytes_max: int, *, resident_only: bool = False, strong: bool = False
) -> JsonPage | None:
    """Read the two most frequent kinds of pages without a scan: the newest write alone, which a watcher lacks, and
    records of a few batches with JSON data and nothing else.

    A scan costs 60 µs of preparation and decodes records into columns first. Returns None for any other page.
    """
    # Cheap checks without the lock.
    if topic.index.head <= from_seq or not retention.is_floor_durable(topic, from_seq):
        return None
    newest, ranges = None, list[_PlainRange]()
    now_us = topic.context.clock.monotonic_us() if resident_only else None
    with topic.lock:
        topic.check_open()
        index = topic.index
        if not read.is_durable_to_head(topic, strong):
            return None
        head, earliest = index.head, index.earliest
        count = min(head - from_seq, limit)
        first = pos = from_seq + 1
        stop = first + count
        if first < earliest or not index.parts:
            return None
        last = index.parts[-1]
        if count <= _LAST_WRITE_RECORDS_MAX and isinstance(last, MemTable):
            newest = last.read_last_write(first, stop)
        if newest is None:
            for part, lo, hi in index.slices(first, stop):
                locate = part.plain_frames(lo, hi, bytes_max, now_us)
                if locate is None or lo != pos:
                    return None
                ranges.append(_PlainRange(lo, hi, locate))
                pos = hi
            if pos != stop:
                return None
    if newest is not None:
        text = json_rows.encode_few(first, *newest) if sum(map(len, newest[1])) <= bytes_max else None
    else:
        text = _encode_plain_ranges(topic, ranges, bytes_max)
    return None if text is None else JsonPage(text, None, stop - 1, head, earliest, Counts(rows=count))


class _PlainRange(NamedTuple):
    """Seqs [first, stop), all present, and a function that locates their frames."""

    first: int
    stop: int
    locate: Callable[[], FrameLocations | None]


def _encode_plain_ranges(topic: TopicState, ranges: list[_PlainRange], bytes_max: int) -> bytes | None:
    """Encode the ranges frame by frame. None where a frame is not a plain batch, the text may be too large, or there
    are too many frames: a scan then handles all of them at once."""
    pieces: list[tuple[Buffer, PlainBatch, int, int]] = []
    for seq, stop, locate in ranges:
        for buf, pos in locate() or ():
            while seq < stop and pos < len(buf) and len(pieces) < PAGE_FRAMES_MAX:
                batch = frame_scan.find_plain_batch(buf, pos, topic.id)
                if batch is None or not batch.seq <= seq < batch.seq + batch.records:
                    return None
                hi = min(stop - batch.seq, batch.records)
                pieces.append((buf, batch, seq - batch.seq, hi))
                bytes_max -= batch.data_end - batch.lengths_pos
                seq, pos = batch.seq + hi, batch.end
        if seq != stop or bytes_max < 0:
            return None
    texts = [json_rows.encode_batch(*piece) for piece in pieces]
    return None if None in texts else b",".join(text for text in texts if text is not None)


class BulkScan:
    """One pass over a topic for a server or a Spark task, batch by batch. Gap and counts are complete when it ends."""

    def __init__(
        self,
        topic: TopicState,
        from_seq: int,
        to_seq: int | None,
        nodes: ExcludedNodes,
        limit: int,
        *,
        strong: bool = False,
        bytes_max: int = SEQ_MAX,
        columns: Sequence[str] | None = None,
    ) -> None:
        check_int("limit", limit, 0, SEQ_MAX)
        self._limit, self._bytes_max, self._columns = limit, bytes_max, frames.check_columns(columns)
        self._scan = TopicScan(topic, from_seq, nodes, to_seq, pass_gaps=True, strong=strong)
        retention.persist_gap_floor(topic, self._scan.gap, self._scan.watermarks.evict_floor)

    @property
    def gap(self) -> Gap | None:
        return self._scan.gap

    @property
    def gaps(self) -> list[Gap]:
        """Every gap among the seqs passed so far; `gap` is the first."""
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
        """Limit the frame bytes of the next chunk; it holds at least one record."""
        self._scan.chunk_bytes = size

    def _chunks(self) -> Iterator[RecordChunk]:
        return filter(lambda chunk: len(chunk.rows), self._scan.iter_chunks(self._limit, self._bytes_max))

    # Maps instead of loops: between two steps a loop would keep the records of the last one alive.

    def iter_json_lines(self, show: FieldSelection) -> Iterator[bytes]:
        """Yield chunks of newline-terminated JSON objects."""

        def encode(chunk: RecordChunk) -> bytes:
            return json_rows.encode_rows(chunk.rows, chunk.json, show, b"\n", b"\n")

        return map(encode, self._chunks())

    def iter_arrow_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield batches in the types of the wire and of Spark: `tag`, `node` and `meta` are bytes."""
        return map(partial(read.stored_batch, columns=self._columns), self._chunks())
