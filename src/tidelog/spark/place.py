"""Where topics lie, as planning and reading see it: a directory, a server, or a log of any codec.

    driver      names, look, seek, lost, settle      from one snapshot, until `refresh`
    executor    read                                 by what the plan says, wherever the bytes are now

What a plan names may be gone when a task comes to it: retention does not wait for readers. `read` then looks for the
seqs again, as records; what was lost meanwhile is a Lost, what was deleted is counted, and neither is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from tidelog.engine import Counts
from tidelog.formats.frame import OVERHEAD_BYTES
from tidelog.formats.rows import Rows
from tidelog.spark.stretches import Bools, Lost, Stretch


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment's file as the driver sees it."""

    base: int
    stop: int
    size: int
    sealed: bool
    at: Callable[[int], int]  # the byte where the frame of a seq begins
    dead: Callable[[], Bools | None]


@dataclass(frozen=True, slots=True)
class Sight:
    """A topic at one moment."""

    topic: str
    epoch: int
    first: int  # the lowest seq a record of it can have
    next: int  # one past its last
    earliest: int  # below it nothing can be read
    floor: int  # the first seq that was not lost involuntarily
    segments: Sequence[Segment]  # rising; what lies behind the last is the tail
    tail_bytes: int

    @property
    def tail_first(self) -> int:
        return self.segments[-1].stop if self.segments else self.earliest

    def bytes_at(self, seq: int) -> int:
        """How many bytes lie before a seq, about: exact to the frame in files, by proportion in the tail."""
        before = 0
        for segment in self.segments:
            if seq < segment.stop:
                return before + (segment.at(seq) if seq > segment.base else 0)
            before += segment.size
        tail = self.next - self.tail_first
        return before + (self.tail_bytes * max(seq - self.tail_first, 0) // tail if tail > 0 else 0)


class Found(NamedTuple):
    """Records on their way to Spark, and where seqs went that have none. `rows` is not counted here."""

    rows: Rows | pa.RecordBatch | None
    counts: Counts
    lost: tuple[Lost, ...] = ()


class Inlined(NamedTuple):
    """Records that travel in the plan, and where the other seqs of their range went."""

    stream: bytes
    counts: Counts
    lost: tuple[Lost, ...]


Wanted: TypeAlias = frozenset[str]  # columns that are looked at


class Place(Protocol):
    timed: bool  # whether its records have times
    kinded: bool  # whether they are JSON or bytes; else all of them are bytes

    def names(self) -> list[str]:
        """Every topic there is."""
        ...

    def look(self, topic: str) -> Sight | None:
        """What a topic holds; None: there is none."""
        ...

    def seek(self, topic: str, ts_ms: int) -> int:
        """The first record of this time or later; one past the last where there is none."""
        ...

    def lost(self, topic: str, first: int) -> Lost | None:
        """What a reader has missed that wants to read on at `first`."""
        ...

    def settle(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[Lost, ...]]:
        """Where seqs went of which none can be read, and what of them was lost."""
        ...

    def dropped_at(self, topic: str, epoch: int) -> int | None:
        """The last seq of a topic of this name and epoch when it was dropped; None: the ledger does not know it."""
        ...

    def inline(self, topic: str, first: int, stop: int) -> Inlined | None:
        """The records of the tail as an Arrow stream, for a plan that carries them itself; None: it need not."""
        ...

    def refresh(self) -> None:
        """Look again."""
        ...

    def read(self, stretch: Stretch, wanted: Wanted, *, verify: bool) -> Iterator[Found]: ...

    def close(self) -> None: ...


def weight(seqs: int, count: int, size: int) -> int:
    """About how many bytes so many records lie in, going by what a topic holds on the whole."""
    return max(seqs, 0) * (OVERHEAD_BYTES + (size // count if count else 0))


def share(counts: Counts, losses: Sequence[Lost], first: int, stop: int) -> Counts:
    """What counts that reach behind `stop` say of [first, stop) alone, where no record of it can be read."""
    seqs = stop - first
    if sum(counts) == seqs:
        return counts
    gone = max(min(losses[0].last + 1, stop) - first, 0) if losses else 0
    evicted = min(counts.evicted, gone)
    expired = gone - evicted
    rest = seqs - gone
    deleted = min(counts.deleted, rest)
    return Counts(evicted=evicted, expired=expired, deleted=deleted, holes=rest - deleted)
