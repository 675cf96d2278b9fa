"""The interface of planning and reading to where topics are stored: a directory, a server, or a log of any codec.

    driver      names, look, seek, lost, settle      from one snapshot, until `refresh`
    executor    read                                 by what the plan says, wherever the bytes are now

A file of a plan may be gone when a task reads it: retention does not wait for readers. `read` then looks for the
seqs again, as records; what was lost meanwhile is a TopicGap, what was deleted is counted; neither is skipped silently.

Sent from the driver to the executors: seqs and the positions of their bytes. Plain data, small, picklable.

    ReadTask    what one task reads: ranges in order, and the counts of seqs without a record
    ReadRange   seqs [first, stop) of one topic: in a segment's file, in the plan itself, or to be requested
    TopicGap    requested seqs that were lost

Deletions are part of the plan, so that a task that runs twice returns the same rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import InputPartition

from tidelog.engine import Counts
from tidelog.errors import GapFound
from tidelog.formats.frame import OVERHEAD_BYTES
from tidelog.formats.rows import Rows

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TopicGap:
    """A gap, by topic."""

    topic: str
    first: int
    last: int  # included
    cause: str  # cap, ttl, mixed, recreated, dropped or retention
    earliest_seq: int
    head_seq: int
    is_unbounded: bool = False  # how far it went is not known: `last` is `first`, and a row says null

    def to_error(self) -> GapFound:
        missed = self.last - self.first + 1
        made = GapFound(self.topic, (self.first, self.last, self.cause, missed, self.earliest_seq, self.head_seq))
        step = 'set onGap to "skip" or "emit" if you can do without them'
        said = f"{self.topic}: it was dropped" if self.cause == "dropped" else str(made).rpartition(";")[0]
        made.args = (f"{said}; nothing was written, {step}, or start after them with startingOffsets",)
        return made


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A segment's file, as the plan saw it. Its first `size` bytes never change."""

    base: int
    stop: int
    size: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class ReadRange:
    topic: str
    epoch: int
    first: int
    stop: int
    size: int  # bytes to read, about
    file: PlannedFile | None = None  # None: they lie in no file of their own yet
    deleted_bits: bytes | None = field(default=None, repr=False)  # one bit a seq
    inline_records: bytes | None = field(default=None, repr=False)  # the records themselves, as an Arrow stream
    inline_counts: Counts | None = None  # of those, where the seqs went that have none

    @property
    def seq_count(self) -> int:
        return self.stop - self.first

    def deleted_mask(self) -> BoolArray | None:
        """For each seq whether it is deleted; None: none is."""
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
    """What one task reads. `seqs` is what rows and counts must come to."""

    ranges: tuple[ReadRange, ...] = ()
    gaps: tuple[TopicGap, ...] = ()
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers
    seq_count: int = 0

    @property
    def size(self) -> int:
        return sum(read_range.size for read_range in self.ranges)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment's file as the driver sees it."""

    base: int
    stop: int
    size: int
    is_sealed: bool
    frame_offset: Callable[[int], int]  # the byte where the frame of a seq begins
    load_deleted: Callable[[], BoolArray | None]


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic at one moment."""

    topic: str
    epoch: int
    first_seq: int  # the lowest seq a record of it can have
    next_seq: int  # one past its last
    earliest_seq: int  # below it nothing can be read
    evict_floor: int  # the first seq that was not lost involuntarily
    segments: Sequence[SegmentInfo]  # ascending; records after the last one are the tail
    tail_bytes: int

    @property
    def tail_first_seq(self) -> int:
        return self.segments[-1].stop if self.segments else self.earliest_seq

    def bytes_before(self, seq: int) -> int:
        """How many bytes lie before a seq, about: exact to the frame in files, by proportion in the tail."""
        before = 0
        for segment in self.segments:
            if seq < segment.stop:
                return before + (segment.frame_offset(seq) if seq > segment.base else 0)
            before += segment.size
        tail = self.next_seq - self.tail_first_seq
        return before + (self.tail_bytes * max(seq - self.tail_first_seq, 0) // tail if tail > 0 else 0)


class ReadChunk(NamedTuple):
    """Records on their way to Spark, and where seqs went that have none. `rows` is not counted here."""

    rows: Rows | pa.RecordBatch | None
    counts: Counts
    gaps: tuple[TopicGap, ...] = ()


class InlineRecords(NamedTuple):
    """Records that travel in the plan, and where the other seqs of their range went."""

    arrow_stream: bytes
    counts: Counts
    gaps: tuple[TopicGap, ...]


ColumnSet: TypeAlias = frozenset[str]  # columns that are looked at


class Backend(Protocol):
    has_timestamps: bool  # whether its records have times
    has_json_flag: bool  # whether they are JSON or bytes; else all of them are bytes

    def names(self) -> list[str]:
        """Every topic there is."""
        ...

    def snapshot(self, topic: str) -> TopicSnapshot | None:
        """What a topic holds; None: there is none."""
        ...

    def seek(self, topic: str, ts_ms: int) -> int:
        """The first record of this time or later; one past the last where there is none."""
        ...

    def gap_before(self, topic: str, first: int) -> TopicGap | None:
        """What a reader has missed that wants to read on at `first`."""
        ...

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        """Where seqs went of which none can be read, and what of them was lost."""
        ...

    def last_seq_before_drop(self, topic: str, epoch: int) -> int | None:
        """The last seq of a topic of this name and epoch when it was dropped; None: the gap log does not know it."""
        ...

    def read_tail_inline(self, topic: str, first: int, stop: int) -> InlineRecords | None:
        """The records of the tail as an Arrow stream, for a plan that carries them itself; None: it need not."""
        ...

    def refresh(self) -> None:
        """Look again."""
        ...

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]: ...

    def close(self) -> None: ...


def estimate_bytes(seqs: int, count: int, size: int) -> int:
    """About how many bytes so many records lie in, going by what a topic holds on the whole."""
    return max(seqs, 0) * (OVERHEAD_BYTES + (size // count if count else 0))


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
