"""A topic's segments for outside consumers: found by time, listed, and copied file by file.

    seg 1..10000 sealed │ seg 10001..14200 on disk │ 14201..14950 in memory
    └───────────── listed, with their files ──────┘└ the tail: read as records

A listing is taken under the topic's lock and is exact at that moment. Listed bytes never change: data and index are
append-only, and a copy in progress keeps its mapping when the files are removed. Deletions are the exception: they are
current, encoded as a later checkpoint will write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
from xxhash import xxh3_64_intdigest

from tidelog.engine import read, retention, topic_index
from tidelog.engine.segment import BoolArray, Segment, Tier, encode_deletions
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
            slices = index.slices(max(from_seq, index.earliest), index.head + 1)
            found = next((each for each in slices if each.part.last_ts >= ts_ms and each.part.live_records), None)
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


def list_segments(topic: TopicState, *, strong: bool = False) -> SegmentList:
    """Return all segments with readable records."""
    retention.refresh_for_read(topic)
    durable = read.make_durable(topic) if read.needs_durable_records(topic, strong) else SEQ_MAX
    with topic.lock:
        topic.check_open()
        index = topic.index
        # A checkpoint adopts files before its manifest is saved: until then their records are durable in the WAL only.
        files = [_to_segment_file(topic, segment) for segment in _file_segments(index) if segment.stop - 1 <= durable]
        tail_seq = files[-1].stop - 1 if files else index.earliest - 1
        head = min(index.head, max(durable, index.earliest - 1))
        floor = index.evict_floor
        gap = topic_index.find_gap(0, index.head, index.earliest, index.watermarks, index.trimmed_ranges)
        floor_seq = floor if gap is None else min(gap.gap_to, head) + 1
        listing = SegmentList(head, index.earliest, max(floor, floor_seq), files, tail_seq)
    retention.persist_floor(topic, floor)
    return listing


def find_segment(topic: TopicState, base: int, generation: int | None = None) -> SegmentFile | None:
    """Return the segment with this first seq; None if it is not listed, or not with files of this generation."""
    with topic.lock:
        topic.check_open()
        return next(
            (
                _to_segment_file(topic, segment)
                for segment in _file_segments(topic.index)
                if segment.base == base and generation in (None, segment.generation)
            ),
            None,
        )


def _file_segments(index: TopicIndex) -> list[Segment]:
    """Return the segments before the first record that is in memory only. A topic that was ephemeral for a while may
    have such records before segments: everything after them is tail as well."""
    segments: list[Segment] = []
    for part in index.parts:
        if part.stop <= index.earliest or part.stop == part.base:
            continue
        if isinstance(part, Segment):
            segments.append(part)
        elif part.live_records:
            break
    return segments


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
