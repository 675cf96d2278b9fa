"""[shell] A topic's segments as somebody outside sees them: found by time, listed, and copied file by file.

    seg 1..10000 sealed │ seg 10001..14200 on disk │ 14201..14950 in memory
    └───────────── listed, with their files ──────┘└ the tail: read as records

A listing is taken under the topic's lock and is true at that moment. Bytes that it names never change: data and
index are only added to behind them, and a copy that has begun goes on from its mapping when the files are removed.
Deletions are an exception on purpose: they are those of now, which a later checkpoint writes in these very bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
from xxhash import xxh3_64_intdigest

from tidelog.engine import consistency, retention, watermarks
from tidelog.engine.segment import BoolArray, Segment
from tidelog.engine.topic_index import TopicIndex
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, NotFound
from tidelog.formats import deletion_vector, segment_index
from tidelog.formats.deletion_vector import DeletionVector
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.types import Buffer

FileKind: TypeAlias = Literal["data", "idx", "foot", "del"]
FILES: Final[tuple[FileKind, ...]] = get_args(FileKind)

# By segment, then by file: its length and its sum. Sealed files keep theirs; of a growing one the length tells.
_digests: WeakKeyDictionary[Segment, dict[FileKind, tuple[int, int]]] = WeakKeyDictionary()
_digests_lock = Lock()


# ── by time ───────────────────────────────────────────────────────────────────────────────────────


def find_seq_by_time(topic: TopicState, ts_ms: int) -> int:
    """The first live record of this time or later; one past the head where there is none."""
    retention.refresh_for_read(topic)
    ts_ms = min(max(ts_ms, 0), TS_MS_MAX)
    at = 0
    while True:
        with topic.lock:
            topic.check_open()
            index = topic.index
            ahead = index.slices(max(at, index.earliest), index.head + 1)
            found = next((each for each in ahead if each.part.last_ts >= ts_ms and each.part.live_records), None)
            if found is None:
                return index.head + 1
            part, first, at = found
            times = part.entries()["ts"][found.lo : found.hi]
            dead = part.deleted_mask()
            gone = None if dead is None else dead[found.lo : found.hi].copy()
        # Times do not fall, so of a topic's parts one is searched, and another only where its rest is deleted.
        late = int(np.searchsorted(times, ts_ms))
        living = np.arange(late, len(times)) if gone is None else late + np.flatnonzero(~gone[late:])
        if len(living):
            return first + int(living[0])


# ── by file ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment as it was when it was listed."""

    base: int
    stop: int
    sealed: bool
    size: int  # bytes of data
    live_records: int  # records that are not deleted, floors not looked at
    live_bytes: int
    first_ts: int
    last_ts: int
    _core: TopicState = field(repr=False, compare=False)
    _segment: Segment = field(repr=False, compare=False)
    _deleted: BoolArray | None = field(repr=False, compare=False)

    @property
    def records(self) -> int:
        return self.stop - self.base

    def content(self, kind: FileKind) -> Buffer | None:
        """The bytes of a file, readable for as long as they are held; None where there is no such file. Raises
        NotFound where the segment went away since it was listed."""
        home, segment = self._segment.files, self._segment
        if kind == "del":
            return None if self._deleted is None else self._encode_deletions(self._deleted)
        if kind == "foot":
            return home.read_side_file(self.base, ".foot") if self.sealed else None
        data, index = home.open(self.base)
        if kind == "data":
            return self._check_length(kind, data.fetch(0, self.size), self.size)
        size = self.records * segment_index.ENTRY_BYTES
        if (
            segment.rebuilt_index is None
            and len(index) < size
            and data.size >= self.size
            and not segment.rebuild_index()
        ):
            raise Corrupt(home.path(self.base, ".idx"), pos=len(index), reason="its index and its data are not whole")
        return self._check_length(kind, memoryview(segment.rebuilt_index or index)[:size], size)

    def digest(self, kind: FileKind) -> int | None:
        """XXH3-64 of a file. That of data and index is worked out once, which reads all of it."""
        if (known := self.cached_digest(kind)) is not None:
            return known
        content = self.content(kind)
        if content is None:
            return None
        made = xxh3_64_intdigest(content)
        if kind in ("data", "idx"):
            with _digests_lock:
                _digests.setdefault(self._segment, {})[kind] = (len(content), made)
        return made

    def cached_digest(self, kind: FileKind) -> int | None:
        """`digest` where it was worked out before."""
        with _digests_lock:
            length, made = _digests.get(self._segment, {}).get(kind, (-1, 0))
        return made if length == self.length(kind) else None

    def length(self, kind: FileKind) -> int | None:
        """Bytes of data and index without looking at them; None for the others."""
        return {"data": self.size, "idx": self.records * segment_index.ENTRY_BYTES}.get(kind)

    def _encode_deletions(self, dead: BoolArray) -> bytes:
        made = DeletionVector(self.base, self.records)
        made.mark(np.flatnonzero(dead) + self.base)
        return deletion_vector.encode(made)

    def _check_length(self, kind: FileKind, content: Buffer, size: int) -> Buffer:
        if len(content) == size:
            return content
        if find_segment(self._core, self.base) is None:
            raise NotFound(
                f"segment {self.base} of {self._core.name} went away; nothing was read, list the segments again"
            )
        where = self._segment.files.path(self.base, f".{kind}")
        raise Corrupt(where, pos=len(content), reason=f"it has {len(content)} bytes, {size} were written")


class SegmentList(NamedTuple):
    """What of a topic lies in files, and where the rest begins."""

    head_seq: int
    earliest_seq: int
    evict_floor: int  # the first seq that was not lost, of this topic or at the source of its routers
    segments: list[SegmentFile]
    tail_from_seq: int  # what lies behind it is read as records


def list_segments(topic: TopicState, *, strong: bool = False) -> SegmentList:
    """All segments of which something is left to read."""
    retention.refresh_for_read(topic)
    durable = consistency.make_durable(topic) if consistency.needs_durable_records(topic, strong) else SEQ_MAX
    with topic.lock:
        topic.check_open()
        index = topic.index
        # A checkpoint adopts files before its manifest is saved: until then what they have hangs on the WAL alone.
        held = [_to_segment_file(topic, segment) for segment in _file_segments(index) if segment.stop - 1 <= durable]
        behind = held[-1].stop - 1 if held else index.earliest - 1
        head = min(index.head, max(durable, index.earliest - 1))
        floor = index.evict_floor
        lost = watermarks.find_gap(0, index.head, index.earliest, index.watermarks, index.trimmed_ranges)
        begin = floor if lost is None else min(lost.gap_to, head) + 1
        found = SegmentList(head, index.earliest, max(floor, begin), held, behind)
    retention.persist_floor(topic, floor)
    return found


def find_segment(topic: TopicState, base: int) -> SegmentFile | None:
    """The segment with this first seq; None where none is listed."""
    with topic.lock:
        topic.check_open()
        return next(
            (_to_segment_file(topic, segment) for segment in _file_segments(topic.index) if segment.base == base), None
        )


def _file_segments(index: TopicIndex) -> list[Segment]:
    """The segments up to the first record that lies in memory alone. Records of a topic that was ephemeral for a
    while may lie before segments: what is behind them is tail as well."""
    found: list[Segment] = []
    for part in index.parts:
        if part.stop <= index.earliest or part.stop == part.base:
            continue
        if isinstance(part, Segment):
            found.append(part)
        elif part.live_records:
            break
    return found


def _to_segment_file(topic: TopicState, segment: Segment) -> SegmentFile:
    records = segment.stop - segment.base
    # Asked only where something is deleted: the first look at each reads a file.
    dead = segment.deleted_mask() if segment.live_records < records else None
    return SegmentFile(
        segment.base,
        segment.stop,
        segment.is_sealed,
        segment.size,
        segment.live_records,
        segment.live_bytes,
        segment.first_ts,
        segment.last_ts,
        topic,
        segment,
        None if dead is None else dead.copy(),
    )
