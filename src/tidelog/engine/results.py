"""Return types of the engine, and the report of an opening. No behaviour beyond arithmetic on their own fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from tidelog.engine.config import TopicConfig
from tidelog.engine.topic_index import Gap


class Record(NamedTuple):
    """One record of a topic, as a reader sees it."""

    seq: int
    ts_ms: int  # when it was committed, milliseconds since the epoch
    data: Any  # bytes if bytes went in, a LargeData if they were streamed and are many, else the JSON value
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None


class Appended(msgspec.Struct, frozen=True):
    """An acknowledged write."""

    first_seq: int
    last_seq: int
    head_seq: int
    deduped: bool = False  # its key was known: these are the seqs of the first write, nothing was written now
    write_us: int = 0  # duration of the write of its commit batch
    sync_us: int = 0  # duration of its sync, if the class needs one
    held_us: int = 0  # delay before that, because the disk did not keep up

    @property
    def seqs(self) -> range:
        return range(self.first_seq, self.last_seq + 1)

    @property
    def count(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a delete, and the state of the topic after it."""

    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Counts(NamedTuple):
    """What happened to every seq of a page's range; they add up to its length."""

    rows: int = 0
    deleted: int = 0
    expired: int = 0
    evicted: int = 0
    filtered: int = 0  # records of a node the reader asked not to see
    holes: int = 0  # seqs without a record

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts), "counts are added to counts"
        return Counts(*map(add, self, other))


class Page(NamedTuple):
    """Records after a cursor, and what the reader must know about missing ones."""

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
class TopicInfo:
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


FindingKind: TypeAlias = (  # what a finding of a check is about
    Literal["snapshot", "wal", "data", "index", "footer", "tags", "keys", "deletions", "counts", "blob"]
    | Literal["cold", "start"]
    | Literal["leftover"]
    | Literal["channel", "messages", "cursor"]  # of channels, checked by `channels/store.py`
)
Progress = Callable[[str, int, int], None]  # what, how much of it is done, of how much
READING_WAL: Final = "reading the WAL"
REPLAYING_TOPICS: Final = "replaying topics"
STARTUP_PASSES: Final = (READING_WAL, REPLAYING_TOPICS)  # the steps of an opening that report progress, in order


@dataclass(slots=True)
class RecoveryReport:
    """What opening a directory found and did. Printed by the command line, asserted by tests.

    WAL bytes that are not replayed are one of two kinds. `cut`: the end of a shard, above the last position that a mark
    or a snapshot proves synced. It is an unfinished write, as far as the bytes show: a record that was synced after the
    last mark and damaged before the next start looks the same. `damage` with `lost`: below that position. Acknowledged
    records were or may have been there; the rest of the WAL is served.
    """

    snapshot: int = 0
    topics: int = 0
    frames: int = 0  # replayed from the WAL
    cut: list[str] = field(default_factory=list)  # ends of WAL shards that no known sync covers
    damage: list[str] = field(default_factory=list)  # something acknowledged may be lost
    lost_seqs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # topic → records lost in the WAL, by seq
    rebuilt: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)  # files with the bytes that were cut or lost
    snapshots_skipped: list[str] = field(default_factory=list)
    lost: bool = False  # part of the damage is in the WAL: a writer opens only with `accept_loss`
    padded: dict[str, int] = field(default_factory=dict)  # topic → reserved seqs that are holes now
    background_errors: list[str] = field(default_factory=list)  # of background work since, the last hundred

    @property
    def clean(self) -> bool:
        """Nothing had to be repaired and nothing is wrong."""
        return not (self.cut or self.damage or self.rebuilt or self.quarantined or self.snapshots_skipped)

    def lines(self) -> list[str]:
        """Return the report as text, one finding per line."""
        return [
            *(f"cut an unfinished write: {what}" for what in self.cut),
            *(f"damage: {what}" for what in self.damage),
            *(f"{topic}: lost seqs {_ranges(found)}" for topic, found in self.lost_seqs.items()),
            *(f"rebuilt {what}" for what in self.rebuilt),
            *(f"swept {what}" for what in self.swept),
            *(f"kept the bytes in {what}" for what in self.quarantined),
            *(f"skipped a snapshot: {what}" for what in self.snapshots_skipped),
            *(f"{topic}: {count} reserved seqs became holes" for topic, count in self.padded.items()),
        ]


def add_background_error(report: RecoveryReport, error: Exception) -> None:
    """Add an error of background work, which is retried, to a report."""
    report.background_errors.append(str(error))
    del report.background_errors[:-100]


def _ranges(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges)
