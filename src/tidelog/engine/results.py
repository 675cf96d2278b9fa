"""What the engine answers. No behaviour beyond arithmetic on their own fields."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import msgspec

from tidelog.engine.config import TopicConfig
from tidelog.engine.floors import Gap


class Record(NamedTuple):
    """One record of a topic, as a reader sees it."""

    seq: int
    ts_ms: int  # when it was committed, milliseconds since the epoch
    data: Any  # bytes if bytes went in, else the JSON value
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None


class Appended(msgspec.Struct, frozen=True):
    """A write that was acknowledged under its topic's class."""

    first_seq: int
    last_seq: int
    head_seq: int
    deduped: bool = False  # its key was seen before: these are the seqs of that write, nothing was written now
    write_us: int = 0  # what its commit batch took to be written
    sync_us: int = 0  # and to be synced, where its class asks for that
    held_us: int = 0  # how long it was held back before that, because the machine did not keep up

    @property
    def seqs(self) -> range:
        return range(self.first_seq, self.last_seq + 1)

    @property
    def count(self) -> int:
        return self.last_seq - self.first_seq + 1

    def part(self, offset: int, count: int) -> Appended:
        """Some of it, for whoever wrote these."""
        first = self.first_seq + offset
        last = first + count - 1
        return Appended(first, last, self.head_seq, self.deduped, self.write_us, self.sync_us, self.held_us)


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete removed, and the topic behind it."""

    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Counts(NamedTuple):
    """Where every seq of a page's range went: they add up to it."""

    rows: int = 0
    deleted: int = 0
    expired: int = 0
    evicted: int = 0
    filtered: int = 0  # records of a node the reader asked not to see
    holes: int = 0  # seqs that no record ever had

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts), "counts are added to counts"
        return Counts(*map(add, self, other))


class Page(NamedTuple):
    """Records behind a cursor, and what the reader must know about those that are not among them."""

    records: list[Record]
    gap: Gap | None  # records that were lost between the cursor and the first record
    next_from_seq: int  # the cursor for the next page
    head_seq: int
    earliest_seq: int
    counts: Counts

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    @property
    def lag(self) -> int:
        return self.head_seq - self.next_from_seq


@dataclass(frozen=True, slots=True)
class TopicState:
    topic: str
    id: int
    epoch: int
    head_seq: int
    earliest_seq: int
    evict_floor: int
    count: int
    bytes: int
    last_write_ms: int | None
    last_read_ms: int | None  # since this process opened it
    effective_priority: int
    config: TopicConfig

    @property
    def next_seq(self) -> int:
        return self.head_seq + 1
