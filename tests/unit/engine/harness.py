"""What the behaviour tests of the engine stand on: one engine on a disk that can fail, and what every page must keep.

File names and the size of a record are written down here once more, from their descriptions: a test
must not ask the code under test what is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, Literal, NamedTuple

from tests.kit.threads import TIMEOUT_S as TIMEOUT_S
from tests.kit.threads import running as running

import tidelog
from tidelog.database import engine_of
from tidelog.disk.interface import Mode
from tidelog.engine import Engine, Gap, Page, Record, Topic
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.simulated_disk import SimFile

PATH = "data"
TINY: dict[str, Any] = {"wal_file_bytes": 2048, "segment_events_max": 4, "segment_bytes_max": 1024, "head_reserve": 4}
CLASSES = ("ephemeral", "memory", "disk", "fsync")
LOGGED = ("memory", "disk", "fsync")

Restart = Literal["reopen", "kill", "crash"]
RESTARTS: tuple[Restart, ...] = ("reopen", "kill", "crash")


class EngineHarness:
    """An engine without threads on a simulated disk, under a clock that stands still."""

    def __init__(self, disk: SimDisk | None = None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.disk = disk or SimDisk(clock=self.clock, trace=True)
        # A simulated disk keeps reserved space as zeros in memory: the default file of 64 MiB would cost a second each.
        self.settings: dict[str, Any] = {"wal_shards": 1, "threads": False, "wal_file_bytes": 1 << 14, **settings}
        self.log = self.open(self.disk)

    def open(self, disk: SimDisk, **settings: Any) -> Engine:
        return engine_of(tidelog.open(PATH, disk=disk, clock=self.clock, **self.settings | settings))

    def reader(self, disk: SimDisk | None = None) -> Engine:
        return self.open(disk or self.disk, read_only=True)

    def restart(self, how: Restart, **settings: Any) -> Engine:
        """Close and open; or open what a new process finds after kill -9; or after a power cut that kept nothing."""
        self.settings |= settings
        if how == "reopen":
            self.log.close()
        else:
            self.disk = self.disk.reboot() if how == "kill" else self.disk.crash_image("none")
        self.log = self.open(self.disk)
        return self.log

    def crash(self, keep: Literal["none", "all"] | Random = "none") -> Engine:
        """Open what a power cut leaves. The engine that runs goes on undisturbed."""
        return self.open(self.disk.crash_image(keep))

    def files(self, ending: str = "", under: str = "") -> list[str]:
        return [path for path in self.disk.tree() if path.endswith(ending) and path.startswith(f"{PATH}/{under}")]


class InterposingDisk(SimDisk):
    """A disk that runs an action between two steps of a checkpoint: before the `at`-th use of a name outside of the
    WAL. Those of the WAL are left out because the shard's turn is taken there."""

    action: Callable[[], object] | None = None
    at = 0
    steps = 0

    def arm(self, at: int, meddle: Callable[[], object]) -> None:
        self.steps, self.at, self.action = 0, at, meddle

    def _step(self, path: str) -> None:
        if "/wal" in path:
            return
        self.steps += 1
        if self.steps == self.at and self.action is not None:
            meddle, self.action, steps = self.action, None, self.steps
            meddle()
            self.steps = steps  # what it did itself does not count

    def open(self, path: str, mode: Mode = "read", /) -> SimFile:
        self._step(path)
        return super().open(path, mode)

    def rename(self, old: str, new: str, /) -> None:
        self._step(new)
        super().rename(old, new)

    def sync_dir(self, path: str, /) -> None:
        self._step(path)
        super().sync_dir(path)

    def make_dir(self, path: str, /, *, durable: bool = True) -> None:
        self._step(path)
        super().make_dir(path, durable=durable)

    def remove(self, path: str, /) -> None:
        self._step(path)
        super().remove(path)


# Reading ------------------------------------------------------------------------------------------------


def size_of(record: Record) -> int:
    """Bytes of a record as caps and budgets count them: compact JSON or the bytes themselves, and its meta."""
    data = record.data if isinstance(record.data, bytes) else _compact(record.data)
    return len(data) + (0 if record.meta is None else len(_compact(record.meta)))


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def check_page(page: Page, from_seq: int) -> None:
    """What holds of every page, whatever happened before (contract section 3.4, E8, G70)."""
    seqs = [record.seq for record in page.records]
    again = page.gap is not None and page.gap.reason == "recreated"
    begin = 0 if again else from_seq
    assert seqs == sorted(set(seqs))
    assert not seqs or begin < seqs[0] <= seqs[-1] <= page.next_from_seq
    assert begin <= page.next_from_seq <= page.head_seq
    assert page.counts.rows == len(seqs)
    assert min(page.counts) >= 0
    assert sum(page.counts) == page.next_from_seq - begin, f"{page.counts} over ({begin}, {page.next_from_seq}]"
    assert page.caught_up == (page.next_from_seq == page.head_seq)
    assert page.lag == page.head_seq - page.next_from_seq
    times = [record.ts_ms for record in page.records]
    assert times == sorted(times)
    if page.gap is None:
        assert (page.counts.evicted, page.counts.expired) == (0, 0)
    elif not again:
        gap = page.gap
        assert (gap.gap_from, gap.head_seq) == (from_seq + 1, page.head_seq)
        assert gap.gap_from <= gap.gap_to < gap.earliest_seq <= page.earliest_seq
        assert gap.missed_estimate == gap.gap_to - from_seq == page.counts.evicted + page.counts.expired


class TopicContents(NamedTuple):
    """A topic from its first seq to its head, read page by page."""

    records: list[Record]
    gap: Gap | None
    head_seq: int
    earliest_seq: int
    evict_floor: int
    bytes: int

    @property
    def seqs(self) -> list[int]:
        return [record.seq for record in self.records]

    @property
    def datas(self) -> list[Any]:
        return [record.data for record in self.records]


def read_topic(topic: Topic, limit: int = 256, *, weighed: bool = True) -> TopicContents:
    """Everything a reader can learn of a topic. Every page is checked, and so are counts and floors (E5). Not
    `weighed`: there are numbers among the records that JSON can say in more than one way."""
    records: list[Record] = []
    first: Gap | None = None
    cursor = 0
    while True:
        page = topic.read(cursor, limit)
        check_page(page, cursor)
        assert len(page.records) <= limit
        assert page.next_from_seq > cursor or page.caught_up, "a reader gets on"
        if cursor == 0:
            first = page.gap
        else:
            assert page.gap is None, "a gap is reported once"
        records += page.records
        cursor = page.next_from_seq
        if page.caught_up:
            break
    state = topic.state()
    assert 1 <= state.evict_floor <= state.earliest_seq <= state.head_seq + 1
    assert state.next_seq == state.head_seq + 1
    assert state.count == len(records)
    assert not weighed or state.bytes == sum(map(size_of, records))
    assert state.earliest_seq == (records[0].seq if records else state.head_seq + 1)
    assert (first is not None) == (state.evict_floor > 1)
    return TopicContents(records, first, state.head_seq, state.earliest_seq, state.evict_floor, state.bytes)


def seqs(topic: Topic) -> list[int]:
    return read_topic(topic).seqs


def datas(topic: Topic, *, weighed: bool = True) -> list[Any]:
    return read_topic(topic, weighed=weighed).datas
