"""A topic's segments for outside consumers: found by time, listed, and copied file by file.

    seg 1..10000 sealed │ seg 10001..14200 on disk │ 14201..14950 in memory
    └───────────── listed, with their files ──────┘└ the tail: read as records

A listing is taken under the topic's lock and is exact at that moment. Listed bytes never change: data and index are
append-only, and a copy in progress keeps its mapping when the files are removed. Deletions are the exception: they are
current, encoded as a later checkpoint will write them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
from xxhash import xxh3_64_intdigest

from tidelog.engine import read, retention, topic_index
from tidelog.engine.memtable import MemTable
from tidelog.engine.segment import BoolArray, Segment, Tier, encode_deletions
from tidelog.engine.segment_table import SegmentTable, StoredParts
from tidelog.engine.topic_index import TopicIndex
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, NotFound
from tidelog.formats import segment_index
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.types import Buffer

FileKind: TypeAlias = Literal["data", "idx", "foot", "del"]
FILES: Final[tuple[FileKind, ...]] = get_args(FileKind)

# By segment, then by file: its length and its digest. For a growing file the length decides whether it is current.
_digests: WeakKeyDictionary[Segment, dict[FileKind, tuple[int, int]]] = WeakKeyDictionary()
_digests_lock = Lock()


# ── by time ───────────────────────────────────────────────────────────────────────────────────────


def find_seq_by_time(topic: TopicState, ts_ms: int) -> int:
    """Return the first live record of this time or later; one past the head if there is none."""
    retention.refresh_for_read(topic)
    ts_ms = min(max(ts_ms, 0), TS_MS_MAX)
    from_seq = 0
    while True:
        with topic.lock:
            topic.check_open()
            index = topic.index
            slices = index.slices_since(ts_ms, max(from_seq, index.earliest), index.head + 1)
            found = next((each for each in slices if each.part.live_records), None)
            if found is None:
                return index.head + 1
            part, first, from_seq = found
            times = part.entries()["ts"][found.lo : found.hi]
            mask = found.deleted()
            deleted = None if mask is None else mask.copy()
        # Times do not fall, so of a topic's parts one is searched, and another only where its rest is deleted.
        start = int(np.searchsorted(times, ts_ms))
        live = np.arange(start, len(times)) if deleted is None else start + np.flatnonzero(~deleted[start:])
        if len(live):
            return first + int(live[0])


# ── by file ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment at the time of its listing."""

    base: int
    generation: int  # of its files
    stop: int
    sealed: bool
    size: int  # bytes of data
    live_records: int  # records that are not deleted, without regard to floors
    live_bytes: int
    first_ts: int
    last_ts: int
    _topic: TopicState = field(repr=False, compare=False)
    _segment: Segment = field(repr=False, compare=False)
    _deleted: BoolArray | None = field(repr=False, compare=False)

    @property
    def records(self) -> int:
        return self.stop - self.base

    def content(self, kind: FileKind) -> Buffer | None:
        """Return the bytes of a file, valid as long as they are referenced; None if there is no such file. Raises
        NotFound if the segment was removed since it was listed."""
        segment = self._segment
        if kind == "del":
            return None if self._deleted is None else encode_deletions(self.base, self.records, self._deleted)
        if kind == "foot":
            return segment.read_side_file(".foot") if self.sealed else None
        if kind == "data":
            return self._check_length(kind, segment.shape().data.fetch(0, self.size), self.size)
        data, index = segment.files.open(self.base, self.generation, segment.cold, segment.size)
        size = self.records * segment_index.ENTRY_BYTES
        if (
            segment.rebuilt_index is None
            and len(index) < size
            and data.size >= self.size
            and not segment.rebuild_index()
        ):
            raise Corrupt(segment.path(".idx"), pos=len(index), reason="its index and its data are not whole")
        return self._check_length(kind, memoryview(segment.rebuilt_index or index)[:size], size)

    @property
    def tier(self) -> Tier:
        """Where its data is: on the disk (`hot`), in the cold store (`cold`), or in both."""
        return self._segment.tier()

    def read_range(self, kind: FileKind, lo: int, hi: int) -> Buffer | None:
        """Return bytes [lo, hi) of a file; of data in the cold store, only these are fetched."""
        if kind == "data" and self._segment.is_remote():
            return self._check_length(kind, self._segment.shape().data.fetch(lo, hi), hi - lo)
        content = self.content(kind)
        return None if content is None else memoryview(content)[lo:hi]

    def digest(self, kind: FileKind) -> int | None:
        """Return the XXH3-64 of a file. Data and index are hashed once, which reads all of them; that of data in the
        cold store is known."""
        cold = self._segment.cold
        if kind == "data" and cold is not None and self._segment.has_cold_copy:
            return cold.data_digest
        if (known := self.cached_digest(kind)) is not None:
            return known
        content = self.content(kind)
        if content is None:
            return None
        digest = xxh3_64_intdigest(content)
        if kind in ("data", "idx"):
            with _digests_lock:
                _digests.setdefault(self._segment, {})[kind] = (len(content), digest)
        return digest

    def cached_digest(self, kind: FileKind) -> int | None:
        """Return `digest` if it is cached."""
        with _digests_lock:
            length, digest = _digests.get(self._segment, {}).get(kind, (-1, 0))
        return digest if length == self.length(kind) else None

    def length(self, kind: FileKind) -> int | None:
        """Return the length of data or index without reading them; None for the others."""
        return {"data": self.size, "idx": self.records * segment_index.ENTRY_BYTES}.get(kind)

    def _check_length(self, kind: FileKind, content: Buffer, size: int) -> Buffer:
        if len(content) == size:
            return content
        if find_segment(self._topic, self.base, self.generation) is None:
            raise NotFound(
                f"segment {self.base} of {self._topic.name} was removed; nothing was read, list the segments again"
            )
        where = self._segment.path(f".{kind}")
        raise Corrupt(where, pos=len(content), reason=f"it has {len(content)} bytes, {size} were written")


class SegmentList(NamedTuple):
    """Segments of a topic, and where the rest begins."""

    head_seq: int
    earliest_seq: int
    evict_floor: int  # the first seq not lost here or at a router's source
    segments: list[SegmentFile]
    tail_from_seq: int  # records after it are read as records
    next_from_seq: int | None = None  # list from there: there are more segments than were asked for


class SegmentTableList(NamedTuple):
    """`SegmentList`, as columns."""

    head_seq: int
    earliest_seq: int
    evict_floor: int
    table: SegmentTable
    loaded: dict[int, Segment]  # those of the table that are objects, by index: their deletions may be newer
    tail_from_seq: int
    next_from_seq: int | None


class _State(NamedTuple):
    head_seq: int
    earliest_seq: int
    evict_floor: int


def list_segments(
    topic: TopicState, *, strong: bool = False, from_seq: int = 0, limit: int | None = None
) -> SegmentList:
    """Return the segments with readable records: those with records from `from_seq` on, at most `limit`."""
    durable = _begin_listing(topic, strong)
    with topic.lock:
        topic.check_open()
        index = topic.index
        segments, tail_seq, more = _file_segments(index, durable, from_seq, limit)
        files = [_to_segment_file(topic, segment) for segment in segments]
        floor, state = index.evict_floor, _listing_state(index, durable)
    retention.persist_floor(topic, floor)
    return SegmentList(*state, files, tail_seq, more)


def list_segment_table(
    topic: TopicState, *, strong: bool = False, from_seq: int = 0, limit: int | None = None
) -> SegmentTableList:
    """`list_segments` as columns. Of a topic with `StoredParts` no segment becomes an object."""
    durable = _begin_listing(topic, strong)
    with topic.lock:
        topic.check_open()
        index = topic.index
        floor, state = index.evict_floor, _listing_state(index, durable)
        if isinstance(index.parts, StoredParts):
            listed = _list_stored(index, index.parts, durable, state, from_seq, limit)
        else:
            segments, tail_seq, more = _file_segments(index, durable, from_seq, limit)
            table = SegmentTable.of_rows([segment.to_row() for segment in segments])
            listed = SegmentTableList(*state, table, dict(enumerate(segments)), tail_seq, more)
    retention.persist_floor(topic, floor)
    return listed


def _list_stored(
    index: TopicIndex, parts: StoredParts, durable: int, state: _State, from_seq: int, limit: int | None
) -> SegmentTableList:
    stored = parts.table
    lo = int(np.searchsorted(stored.stop, index.earliest, "right"))
    hi = max(int(np.searchsorted(stored.stop, min(durable, SEQ_MAX - 1) + 1, "right")), lo)
    while hi > lo and stored.stop[hi - 1] == stored.base[hi - 1]:
        hi -= 1  # an active segment without records
    tail_seq = int(stored.stop[hi - 1]) - 1 if hi > lo else index.earliest - 1
    first = max(lo, min(int(np.searchsorted(stored.stop, from_seq, "right")), hi))
    stop = hi if limit is None else min(first + limit, hi)
    more = int(stored.base[stop]) if stop < hi else None
    loaded = {at - first: segment for at, segment in parts.loaded().items() if first <= at < stop}
    return SegmentTableList(*state, stored.slice(first, stop), loaded, tail_seq, more)


def _begin_listing(topic: TopicState, strong: bool) -> int:
    """Return the last seq that the listing may show."""
    retention.refresh_for_read(topic)
    return read.make_durable(topic) if read.needs_durable_records(topic, strong) else SEQ_MAX


def _listing_state(index: TopicIndex, durable: int) -> _State:
    head = min(index.head, max(durable, index.earliest - 1))
    gap = topic_index.find_gap(0, index.head, index.earliest, index.watermarks, index.trimmed_ranges)
    floor_seq = index.evict_floor if gap is None else min(gap.gap_to, head) + 1
    return _State(head, index.earliest, max(index.evict_floor, floor_seq))


def find_segment(topic: TopicState, base: int, generation: int | None = None) -> SegmentFile | None:
    """Return the segment with this first seq; None if it is not listed, or not with files of this generation."""
    with topic.lock:
        topic.check_open()
        return next(
            (
                _to_segment_file(topic, segment)
                for segment in (topic.index.find_part(base),)
                if isinstance(segment, Segment)
                and segment.base == base
                and segment.stop > max(topic.index.earliest, base)
                and generation in (None, segment.generation)
            ),
            None,
        )


def _file_segments(
    index: TopicIndex, durable: int, from_seq: int, limit: int | None
) -> tuple[list[Segment], int, int | None]:
    """Return the listed segments with records from `from_seq` on, the last seq of all listed ones, and the base of the
    first that the limit leaves out.

    Listed are segments before the first record that is in memory only: a topic that was ephemeral for a while may have
    such records before segments, and everything after them is tail as well. A checkpoint adopts files before its
    manifest is saved: until then their records are durable in the WAL only.
    """
    parts = index.parts
    low = bisect_right(parts, index.earliest, key=_stop_of)
    high = len(parts)
    if index.has_ephemeral_parts:  # else records in memory are after all segments
        in_memory = (at for at in range(low, high) if isinstance(parts[at], MemTable) and parts[at].live_records)
        high = next(in_memory, high)
    while high > low and (
        isinstance(parts[high - 1], MemTable)
        or parts[high - 1].stop == parts[high - 1].base
        or parts[high - 1].stop - 1 > durable
    ):
        high -= 1
    tail_seq = parts[high - 1].stop - 1 if high > low else index.earliest - 1
    first = min(max(bisect_right(parts, from_seq, key=_stop_of), low), high)
    found: list[Segment] = []
    for part in islice(parts, first, high):
        if isinstance(part, Segment) and part.stop > part.base:
            if limit is not None and len(found) == limit:
                return found, tail_seq, part.base
            found.append(part)
    return found, tail_seq, None


def _stop_of(part: Segment | MemTable) -> int:
    return part.stop


def _to_segment_file(topic: TopicState, segment: Segment) -> SegmentFile:
    records = segment.stop - segment.base
    # Loaded only if something is deleted: the first access reads a file.
    deleted = segment.deleted_mask() if segment.live_records < records else None
    return SegmentFile(
        segment.base,
        segment.generation,
        segment.stop,
        segment.is_sealed,
        segment.size,
        segment.live_records,
        segment.live_bytes,
        segment.first_ts,
        segment.last_ts,
        topic,
        segment,
        None if deleted is None else deleted.copy(),
    )
