"""The interface of planning and reading to a backend: a directory, an object store, a server, or a log of any codec.

    driver      names, snapshot, seek, gap_before, account_missing      from one snapshot, until `refresh`
    executor    read                                                    a range of the plan

Retention does not wait for readers, so a planned file may be gone when a task reads it. `read` then reads the seqs as
records; seqs lost since the plan are a TopicGap, deleted ones are counted.

The driver sends small, picklable data to the executors:

    ReadTask    the ranges of one task in order, and the counts of seqs without a record
    ReadRange   seqs [first, stop) of one topic: in a segment file, in the plan itself, or to be requested
    TopicGap    requested seqs that were lost

Deletions are part of the plan, so a task that runs twice returns the same rows.

Read seqs of a segment by byte ranges of its files, from a server or an object store.

It fetches the index entries of the seqs and those up to the next frame, then the data, a few megabytes at a time.
Frames are verified one by one, because the checksums of chunks need whole chunks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import InputPartition

from tidelog.engine import Counts, Gap
from tidelog.engine.manifest import epoch_topic_id
from tidelog.errors import Corrupt, GapFound, NotFound
from tidelog.formats import frame, scan, sealed_segment, segment_index
from tidelog.formats.frame import OVERHEAD_BYTES
from tidelog.formats.rows import Rows
from tidelog.types import Buffer

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TopicGap:
    """A gap of a topic."""

    topic: str
    first: int
    last: int  # included
    cause: str  # cap, ttl, mixed, recreated, dropped or retention
    earliest_seq: int
    head_seq: int
    is_unbounded: bool = False  # its end is unknown: `last` is `first`, and null in rows

    @classmethod
    def from_engine(cls, topic: str, gap: Gap) -> TopicGap:
        return cls(topic, gap.gap_from, gap.gap_to, gap.reason, gap.earliest_seq, gap.head_seq)

    @classmethod
    def from_wire(cls, topic: str, fields: Mapping[str, Any]) -> TopicGap:
        names = ("gap_from", "gap_to", "reason", "earliest_seq", "head_seq")
        return cls(topic, *(fields[name] for name in names))

    def clip(self, stop: int) -> TopicGap:
        """Return the gap without seqs from `stop` on."""
        return replace(self, last=min(self.last, stop - 1))

    def to_error(self) -> GapFound:
        missed = self.last - self.first + 1
        error = GapFound(self.topic, (self.first, self.last, self.cause, missed, self.earliest_seq, self.head_seq))
        step = 'set onGap to "skip" or "emit" if you can do without them'
        reason = f"{self.topic}: it was dropped" if self.cause == "dropped" else str(error).rpartition(";")[0]
        error.args = (f"{reason}; nothing was written, {step}, or start after them with startingOffsets",)
        return error


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A segment file at the time of the plan. Its first `size` bytes never change."""

    base: int
    stop: int
    size: int
    is_sealed: bool
    generation: int = 0  # rises when a writer rewrites the segment without its deleted records


@dataclass(frozen=True, slots=True)
class ReadRange:
    topic: str
    epoch: int
    first: int
    stop: int
    size: int  # bytes to read, about
    file: PlannedFile | None = None  # None: not in a segment file yet
    deleted_bits: bytes | None = field(default=None, repr=False)  # one bit per seq
    inline_records: bytes | None = field(default=None, repr=False)  # the records, as an Arrow stream
    inline_counts: Counts | None = None  # of the seqs without an inline record

    @property
    def seq_count(self) -> int:
        return self.stop - self.first

    def deleted_mask(self) -> BoolArray | None:
        """Return for each seq whether it is deleted; None if none is."""
        if self.deleted_bits is None:
            return None
        bits = np.frombuffer(zlib.decompress(self.deleted_bits), np.uint8)
        return np.unpackbits(bits, count=self.seq_count).astype(bool)


def pack_mask(deleted: BoolArray | None) -> bytes | None:
    if deleted is None or not deleted.any():
        return None
    return zlib.compress(np.packbits(deleted).tobytes(), 1)


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """The input of one task. `seq_count` is the sum that rows and counts must have."""

    ranges: tuple[ReadRange, ...] = ()
    gaps: tuple[TopicGap, ...] = ()
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers
    seq_count: int = 0

    @property
    def size(self) -> int:
        return sum(read_range.size for read_range in self.ranges)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment file as the driver sees it."""

    base: int
    stop: int
    size: int
    is_sealed: bool
    frame_offset: Callable[[int], int]  # the byte where the frame of a seq begins
    load_deleted: Callable[[], BoolArray | None]
    generation: int = 0  # of its files


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic at one moment."""

    topic: str
    epoch: int
    first_seq: int  # the lowest seq a record of it can have
    next_seq: int  # after the last one
    earliest_seq: int  # no record below it can be read
    evict_floor: int  # the first seq that was not evicted or expired
    segments: Sequence[SegmentInfo]  # ascending; records after the last one are the tail
    tail_bytes: int

    @property
    def tail_first_seq(self) -> int:
        return self.segments[-1].stop if self.segments else self.earliest_seq

    def bytes_before(self, seq: int) -> int:
        """Return about how many bytes are before a seq: exact to the frame in files, proportional in the tail."""
        before = 0
        for segment in self.segments:
            if seq < segment.stop:
                return before + (segment.frame_offset(seq) if seq > segment.base else 0)
            before += segment.size
        tail = self.next_seq - self.tail_first_seq
        return before + (self.tail_bytes * max(seq - self.tail_first_seq, 0) // tail if tail > 0 else 0)


class ReadChunk(NamedTuple):
    """Records on their way to Spark, and the counts of seqs without a record. `counts.rows` is 0."""

    rows: Rows | pa.RecordBatch | None
    counts: Counts
    gaps: tuple[TopicGap, ...] = ()


class InlineRecords(NamedTuple):
    """Records in the plan, and the counts of the other seqs of their range."""

    arrow_stream: bytes
    counts: Counts
    gaps: tuple[TopicGap, ...]


ColumnSet: TypeAlias = frozenset[str]  # columns that are returned or filtered by


class Backend(Protocol):
    @property
    def has_timestamps(self) -> bool: ...

    has_json_flag: bool  # False: all records are bytes

    def names(self) -> list[str]:
        """Return the names of all topics."""
        ...

    def snapshot(self, topic: str) -> TopicSnapshot | None:
        """Return the state of a topic; None if there is none."""
        ...

    def seek(self, topic: str, ts_ms: int) -> int:
        """Return the first seq of this time or later; the next seq if there is none."""
        ...

    def gap_before(self, topic: str, first: int) -> TopicGap | None:
        """Return the gap that a reader at `first` has missed."""
        ...

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        """Return the counts and gaps of a range without readable records."""
        ...

    def last_seq_before_drop(self, topic: str, epoch: int) -> int | None:
        """Return the last seq of a dropped topic of this name and epoch; None if the gap log does not have it."""
        ...

    def read_tail_inline(self, topic: str, first: int, stop: int) -> InlineRecords | None:
        """Return the records of the tail for the plan; None if executors read them."""
        ...

    def refresh(self) -> None:
        """Take a new snapshot."""
        ...

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]: ...

    def close(self) -> None: ...


def estimate_bytes(seqs: int, count: int, size: int) -> int:
    """Estimate the stored bytes of `seqs` records from the average record of the topic."""
    return max(seqs, 0) * (OVERHEAD_BYTES + (size // count if count else 0))


def to_chunk(
    rows: Rows, entries: NDArray[np.void], deleted: BoolArray | None, first: int, misplaced: Callable[[], Exception]
) -> ReadChunk:
    """Return a chunk of the rows of a segment file without the deleted ones.

    Args:
        entries: the index entries of all seqs of the chunk.
        deleted: for each seq from `first` on whether it is deleted.
        misplaced: the error to raise if the seqs without a row are not the holes of the index.
    """
    holes = len(entries) - len(rows)
    if holes != int((entries["flags"] & segment_index.HOLE > 0).sum()):
        raise misplaced()
    removed = 0
    if deleted is not None:
        gone = deleted[rows.seq - first]
        removed = int(gone.sum())
        rows = rows.take(np.flatnonzero(~gone)) if removed else rows
    return ReadChunk(rows if len(rows) else None, Counts(deleted=removed, holes=holes))


def decode_deletions(content: Buffer, base: int, count: int) -> BoolArray:
    """Return for each of `count` seqs from `base` on whether a deletion vector has it."""
    deleted = np.zeros(count, bool)
    seqs = sealed_segment.decode_deletion_vector(content).seqs() - base
    deleted[seqs[seqs < count]] = True
    return deleted


def clip_counts(counts: Counts, gaps: Sequence[TopicGap], first: int, stop: int) -> Counts:
    """Clip counts that reach beyond `stop` to [first, stop), where no record of it can be read."""
    seqs = stop - first
    if sum(counts) == seqs:
        return counts
    gone = max(min(gaps[0].last + 1, stop) - first, 0) if gaps else 0
    evicted = min(counts.evicted, gone)
    expired = gone - evicted
    rest = seqs - gone
    deleted = min(counts.deleted, rest)
    return Counts(evicted=evicted, expired=expired, deleted=deleted, holes=rest - deleted)


CHUNK_BYTES: Final = 4 << 20
INDEX_BLOCK_ENTRIES: Final = 4096  # index entries per request
FetchRange: TypeAlias = Callable[[str, int, int], bytes]  # bytes [lo, hi) of "idx" or "data"; raises NotFound


def read_segment_ranges(
    fetch: FetchRange, label: str, read_range: ReadRange, file: PlannedFile, *, verify: bool
) -> Iterator[tuple[ReadChunk, int]]:
    """Yield records with the seq after them. Raises NotFound if the file is gone or belongs to another topic."""
    entries, ends = _index_entries(fetch, read_range, file)
    positions = entries["frame_offset"].astype(np.int64)
    deleted, at = read_range.deleted_mask(), 0
    while at < read_range.seq_count:
        low = int(positions[at])
        until = max(int(np.searchsorted(positions, low + CHUNK_BYTES)), at + 1)
        until = int(np.searchsorted(positions, positions[until - 1], "right"))  # a frame is read once
        buf = fetch("data", low, ends if until == read_range.seq_count else int(positions[until]))
        some = entries[at:until]
        rows = scan.scan_indexed(buf, some, 0, until - at, read_range.first + at, check=verify, origin=low)
        if not _belongs_to_topic(rows, epoch_topic_id(read_range.epoch)):
            raise NotFound(f"segment {file.base} of {read_range.topic} is another topic's now")
        reason = f"seqs {read_range.first + at} and later are not all where their index says"
        misplaced = partial(Corrupt, f"{label}/data", pos=low, reason=reason)
        yield to_chunk(rows, some, deleted, read_range.first, misplaced), read_range.first + until
        at = until


def _index_entries(fetch: FetchRange, read_range: ReadRange, file: PlannedFile) -> tuple[NDArray[np.void], int]:
    """Return the index entries of a range and the end of its last frame, which is where the next one starts."""
    lo, hi = read_range.first - file.base, read_range.stop - file.base
    found = segment_index.read_entries(fetch("idx", lo * segment_index.ENTRY_BYTES, hi * segment_index.ENTRY_BYTES))
    last = int(found["frame_offset"][-1])
    while hi < file.stop - file.base:
        more = min(hi + INDEX_BLOCK_ENTRIES, file.stop - file.base)
        some = segment_index.read_entries(
            fetch("idx", hi * segment_index.ENTRY_BYTES, more * segment_index.ENTRY_BYTES)
        )
        later = some["frame_offset"][some["frame_offset"] != last]
        if len(later):
            return found, int(later[0])
        hi = more
    return found, file.size


def _belongs_to_topic(rows: Rows, topic_id: int) -> bool:
    """Whether the frames of these rows belong to the planned topic."""
    return not len(rows) or bool(
        (frame.read_headers(rows.buf, np.unique(rows.frame_pos))["topic_id"] == topic_id).all()
    )
