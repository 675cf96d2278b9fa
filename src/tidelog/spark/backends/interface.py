"""The interface of planning and reading to a backend: a directory, an object store, a server, or a log of any codec.

    driver      names, snapshot, seek, gap_before, account_missing      from one snapshot, until `refresh`
    executor    read                                                    a range of the plan

Retention does not wait for readers, so a planned file may be gone when a task reads it. `read` then reads the seqs as
records; seqs lost since the plan are a TopicGap, deleted ones are counted.

The driver sends small, picklable data to the executors:

    ReadTask    the ranges of one task in order, and the counts of seqs without a record
    ReadRange   seqs [first, stop) of one topic: in a segment file, in the plan itself, or to be requested
    SegmentRun  ranges in adjacent segment files, packed
    TopicGap    requested seqs that were lost

A plan reads no segment: sizes and seqs come from the manifest, as columns (`SegmentTable`). Deletions of up to
`plan.PLANNED_DELETIONS_MAX` segments are part of the plan, so a task that runs twice returns the same rows; in a larger
plan tasks read the deletions of their segments.

Read seqs of a segment by byte ranges of its files, from a server or an object store.

It fetches the index entries of the seqs and those up to the next frame, then the data, a few megabytes at a time.
Frames are verified one by one, because the checksums of chunks need whole chunks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import InputPartition

from tidelog.engine import Counts, Gap
from tidelog.engine.manifest import epoch_topic_id
from tidelog.engine.segment_table import SegmentTable
from tidelog.errors import Corrupt, GapFound, NotFound
from tidelog.formats import frame, scan, sealed_segment, segment_index
from tidelog.formats.frame import OVERHEAD_BYTES
from tidelog.formats.rows import Rows
from tidelog.types import Buffer, Ints

BoolArray = NDArray[np.bool_]
T = TypeVar("T")


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
    row: bytes = field(default=b"", repr=False)  # of the manifest, for a reader of the directory


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
    unread_deletions: int = 0  # deleted records of the segment that the plan does not have: the task reads them

    @property
    def seq_count(self) -> int:
        return self.stop - self.first

    def deleted_mask(self) -> BoolArray | None:
        """Return for each seq whether it is deleted, as far as the plan has it; None if none is."""
        if self.deleted_bits is None:
            return None
        bits = _unpack_bytes(self.deleted_bits)
        return np.unpackbits(bits, count=self.seq_count).astype(bool)

    def with_deletions(self, load: Callable[[], BoolArray]) -> ReadRange:
        """Return the range with its deletions. `load` returns those of the whole segment, and raises NotFound if its
        files are gone."""
        if not self.unread_deletions:
            return self
        assert self.file is not None, "only segments have deletions of their own"
        deleted = load()
        if int(deleted.sum()) < self.unread_deletions:
            raise Corrupt(
                f"segment {self.file.base} of {self.topic}",
                pos=0,
                reason=f"{self.unread_deletions} of its records were deleted, its file names {int(deleted.sum())}",
            )
        wanted = deleted[self.first - self.file.base : self.stop - self.file.base]
        return replace(self, deleted_bits=pack_mask(wanted), unread_deletions=0)


def pack_mask(deleted: BoolArray | None) -> bytes | None:
    if deleted is None or not deleted.any():
        return None
    return zlib.compress(np.packbits(deleted).tobytes(), 1)


def _unpack_bytes(bits: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(bits), np.uint8)


_COLUMN_COUNT: Final = 6


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Adjacent segments of one topic, packed: a plan has as many as there are segments."""

    topic: str
    epoch: int
    first: int
    stop: int
    size: int
    columns: bytes = field(repr=False)  # of int64: base, stop, size, sealed, generation, unread deletions
    rows: bytes = field(default=b"", repr=False)  # of the manifest
    row_ends: bytes = field(default=b"", repr=False)
    deleted_bits: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)  # by index

    @classmethod
    def pack(
        cls, snapshot: TopicSnapshot, table: SegmentTable, unread: Ints, first: int, stop: int, size: int
    ) -> SegmentRun:
        """Pack seqs [first, stop) of these segments. `unread`: their deletions that tasks have to read."""
        columns = (table.base, table.stop, table.size, table.sealed, table.generation, unread)
        packed = b"".join(np.ascontiguousarray(column, np.int64).tobytes() for column in columns)
        ends = table.row_ends.tobytes() if table.rows else b""
        return cls(snapshot.topic, snapshot.epoch, first, stop, size, packed, table.rows, ends)

    @property
    def seq_count(self) -> int:
        return self.stop - self.first

    def unread_count(self) -> int:
        """How many deletions of these segments the plan does not have."""
        return int(np.frombuffer(self.columns, np.int64).reshape(_COLUMN_COUNT, -1)[-1].sum())

    def deleted_count(self) -> int:
        """How many of the seqs the plan has as deleted."""
        return sum(int(np.bitwise_count(_unpack_bytes(bits)).sum()) for _, bits in self.deleted_bits)

    def __iter__(self) -> Iterator[ReadRange]:
        columns = np.frombuffer(self.columns, np.int64).reshape(_COLUMN_COUNT, -1)
        ends = [0, *np.frombuffer(self.row_ends, np.int64).tolist()]
        bits = dict(self.deleted_bits)
        for at, (base, stop, size, sealed, generation, unread) in enumerate(columns.T.tolist()):
            row = self.rows[ends[at] : ends[at + 1]] if self.rows else b""
            first, until = max(base, self.first), min(stop, self.stop)
            yield ReadRange(
                self.topic,
                self.epoch,
                first,
                until,
                size * (until - first) // (stop - base),
                PlannedFile(base, stop, size, bool(sealed), generation, row),
                bits.get(at),
                unread_deletions=unread,
            )


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """The input of one task. `seq_count` is the sum that rows and counts must have."""

    parts: tuple[ReadRange | SegmentRun, ...] = ()
    gaps: tuple[TopicGap, ...] = ()
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers
    seq_count: int = 0

    @property
    def ranges(self) -> tuple[ReadRange, ...]:
        return tuple(chain.from_iterable(part if isinstance(part, SegmentRun) else (part,) for part in self.parts))

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Segments(NamedTuple):
    """Segment files as the driver sees them."""

    table: SegmentTable  # ascending
    must_plan: Collection[int]  # indexes of segments whose files do not have all of their deletions yet
    load_deleted: Callable[[int], BoolArray | None]  # by index; raises NotFound if the file is gone
    frame_offset: Callable[[int, int], int]  # by index: the byte where the frame of a seq begins


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic at one moment. Its segments are listed when they are needed, and from the first seq that is: they may be
    those of a later moment."""

    topic: str
    epoch: int
    first_seq: int  # the lowest seq a record of it can have
    next_seq: int  # after the last one
    earliest_seq: int  # no record below it can be read
    evict_floor: int  # the first seq that was not evicted or expired
    tail_first_seq: int  # records from here on are the tail
    tail_bytes: int
    list_segments: Callable[[int, int], Segments]  # those with seqs of [first, stop)

    def bytes_before(self, first: int) -> Callable[[int], int]:
        """Return a function for the bytes between `first` and a seq after it, about: exact to the frame in files,
        proportional in the tail."""
        listed: list[tuple[Segments, Ints]] = []

        def measure(seq: int) -> int:
            if seq <= first:
                return 0
            if not listed:
                found = self.list_segments(first, self.next_seq)
                listed.append((found, np.append(0, np.cumsum(found.table.size))))
            segments, sizes = listed[0]
            return before(segments, sizes, seq) - before(segments, sizes, first)

        def before(segments: Segments, sizes: Ints, seq: int) -> int:
            at = int(np.searchsorted(segments.table.stop, seq, "right"))
            if at < len(segments.table):
                inside = segments.frame_offset(at, seq) if seq > int(segments.table.base[at]) else 0
                return int(sizes[at]) + inside
            tail = self.next_seq - self.tail_first_seq
            in_tail = self.tail_bytes * max(seq - self.tail_first_seq, 0) // tail if tail > 0 else 0
            return int(sizes[-1]) + in_tail

        return measure


def no_segments(first: int, stop: int) -> Segments:  # noqa: ARG001
    """The segments of a topic without any."""
    return Segments(SegmentTable.of_rows([]), (), lambda _: None, lambda _at, _seq: 0)


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

    def time_of(self, topic: str, seq: int) -> int | None:
        """Return the time of the first record from a seq on, in milliseconds; None if there is none, or no times."""
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
    deleted = read_range.deleted_mask()

    def read_chunk(at: int) -> tuple[tuple[bytes, int, int], int]:
        low = int(positions[at])
        until = max(int(np.searchsorted(positions, low + CHUNK_BYTES)), at + 1)
        until = int(np.searchsorted(positions, positions[until - 1], "right"))  # a frame is read once
        high = ends if until == read_range.seq_count else int(positions[until])
        return (fetch("data", low, high), at, until), until

    for buf, at, until in read_each(read_chunk, 0, read_range.seq_count, ahead=True):
        low, some = int(positions[at]), entries[at:until]
        rows = scan.scan_indexed(buf, some, 0, until - at, read_range.first + at, check=verify, origin=low)
        if not _belongs_to_topic(rows, epoch_topic_id(read_range.epoch)):
            raise NotFound(f"segment {file.base} of {read_range.topic} is another topic's now")
        reason = f"seqs {read_range.first + at} and later are not all where their index says"
        misplaced = partial(Corrupt, f"{label}/data", pos=low, reason=reason)
        yield to_chunk(rows, some, deleted, read_range.first, misplaced), read_range.first + until


def read_each(step: Callable[[int], tuple[T, int]], first: int, stop: int, *, ahead: bool) -> Iterator[T]:
    """Yield the results of `step`, which returns one and where the next one begins. `ahead`: run the next step while
    the caller works on a result."""
    if not ahead:
        while first < stop:
            result, first = step(first)
            yield result
        return
    with ThreadPoolExecutor(1, "tidelog-read-ahead") as pool:
        pending = pool.submit(step, first)
        while first < stop:
            result, first = pending.result()
            if first < stop:
                pending = pool.submit(step, first)
            yield result


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
