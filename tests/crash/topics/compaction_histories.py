"""Histories of a topic with compaction against dicts, and what must be true of every crash in the middle of them.

The history runs once. Before each operation of the disk the images that a power cut could leave are put aside, and when
the call that was under way is back they are opened and judged by what the dicts say: the newest record of each key is
there, what was removed stays removed, tombstones wait for their delay, a hold keeps what its group has not read, and
the table is the one that follows from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.crash.topics.workloads import PATH, TINY

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Topic
from tidelog.engine.compaction import FoundRecords, FoundRemoved, SearchRange
from tidelog.engine.topic import topic_operations
from tidelog.errors import Refused
from tidelog.testing import ManualClock, SimDisk

TOPIC = "t"
KEYS = ("a", "b", "c", "d")
DELAY_MS = 1_000


class Written(NamedTuple):
    """A record that was written, as the caller gave it."""

    key: str | None
    tombstone: bool
    ts_ms: int


class View(NamedTuple):
    """A topic as an engine shows it."""

    head: int
    floor: int
    live: frozenset[int]
    table: frozenset[tuple[str, int]]
    holds: tuple[tuple[str, int], ...]  # groups with a hold, and their cursors

    @classmethod
    def from_topic(cls, topic: Topic) -> View:
        live = frozenset(record.seq for record in topic if isinstance(record, tidelog.Record))
        rows = list(topic.latest())
        assert len({row.key for row in rows}) == len(rows), f"a key is in the table twice: {rows}"
        holds = tuple((group.name, group.position) for group in topic.groups() if group.hold_bytes)
        table = frozenset((row.key, row.record.seq) for row in rows)
        return cls(topic.head_seq, topic.evict_floor, live, table, holds)


@dataclass
class CompactionStats:
    states: int = 0
    calls: int = 0
    removed: int = 0


class Crash(NamedTuple):
    where: str
    disk: SimDisk
    cut: bool  # power, not only the process


@dataclass
class Model:
    """What was done to the topic, in dicts."""

    written: dict[int, Written] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)  # by calls of `delete`, with what goes with them

    def versions(self, key: str | None, upto: int) -> list[int]:
        return [seq for seq, record in self.written.items() if record.key == key and seq <= upto]

    def delete(self, seqs: Sequence[int], live: frozenset[int]) -> None:
        """The newest record of a key takes the older ones with it."""
        for seq in live.intersection(seqs):
            self.deleted.add(seq)
            key = self.written[seq].key
            if key is not None and seq == max(self.versions(key, 1 << 62)):
                self.deleted |= set(self.versions(key, seq)) & live

    def table(self, live: frozenset[int]) -> frozenset[tuple[str, int]]:
        """The newest record of each key up to the last live one, if it is live and no tombstone."""
        last = max(live, default=0)
        found = set()
        for key in {record.key for record in self.written.values()} - {None}:
            versions = self.versions(key, last)
            if versions and max(versions) in live and not self.written[max(versions)].tombstone:
                found.add((str(key), max(versions)))
        return frozenset(found)

    def must_be_live(self, floor: int, upto: int, now_ms: int) -> set[int]:
        """Records that no call has deleted, no floor covers, and compaction must not have removed by this time."""
        needed = set()
        for seq, record in self.written.items():
            if seq < floor or seq > upto or seq in self.deleted:
                continue
            is_newest = record.key is None or seq == max(self.versions(record.key, upto))
            is_kept = not record.tombstone or record.ts_ms + DELAY_MS > now_ms or record.key is None
            if is_newest and is_kept:
                needed.add(seq)
        return needed


class CompactionHistory:
    """One topic of one class, and everybody who uses it."""

    def __init__(self, random: Random, stats: CompactionStats, *, shards: int, images: int, **config: Any) -> None:
        self.random, self.tally, self.shards, self.images = random, stats, shards, images
        self.disk, self.clock = SimDisk(trace=True), ManualClock()
        self.hard = config["durability"] == "fsync"
        self.step = 1  # one operation of the disk in so many is looked at
        self.by_tag = config["compaction"] == "latest_by_tag"
        self.model = Model()
        self.found: list[FoundRecords] = []  # parts of a search that are not removed yet
        self.progress: FoundRemoved | None = None  # of the part before
        self._aside: list[Crash] = []
        self._known: set[tuple[bytes, bool]] = set()
        self.gone: set[int] = set()  # not live any more when the last call returned
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, tombstone_delay_ms=DELAY_MS, **config)
        self.now = View.from_topic(self.topic)
        self.shown = 1
        self._watch()

    def _watch(self) -> None:
        self.disk.on_op = self._on_disk_operation if self.images else None

    def open(self, disk: SimDisk) -> Engine:
        clock = self.clock if disk is self.disk else ManualClock(self.clock.now_us())
        settings: dict[str, Any] = {"compaction_interval_ms": 1, "key_index_bytes": 1 << 10, **TINY}
        return engine_of(tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=self.shards, **settings))

    def _on_disk_operation(self, op: int) -> None:
        if not self.images or op % self.step:
            return
        for image in self.disk.images(random=self.random, limit=self.images):
            self._put_aside(Crash(f"op {op}, {image.label}", image.disk, cut=True))
        self._put_aside(Crash(f"op {op}, a kill", self.disk.reboot(), cut=False))

    def _put_aside(self, crash: Crash) -> None:
        if (key := (crash.disk.digest(), crash.cut)) not in self._known:
            self._known.add(key)
            self._aside.append(crash)

    # ── what is done ──────────────────────────────────────────────────────────────────────────

    def run_call(self, call: Callable[[], object]) -> None:
        """One call, and a judgement of every crash within it and of what the engine shows after it."""
        before, gone = self.now, self.gone
        call()
        if self.images:
            self._on_disk_operation(self.disk.op_count + 1)
        self.disk.on_op = None
        after = View.from_topic(self.topic)
        self.check_running(after)
        held = min([position for _, position in before.holds], default=1 << 62)
        kept = {seq for seq in before.live - self.model.deleted if seq > held and seq >= after.floor}
        assert kept <= after.live, (f"{sorted(kept - after.live)} were not read by a group with a hold", before, after)
        aside, self._aside = self._aside, []
        for crash in aside:
            self.tally.states += 1
            self.check_crash_state(crash, before, after, gone)
        self._known.clear()
        self.now, self.shown = after, max(self.shown, after.floor)
        self.gone = {*range(1, after.head + 1)} - after.live
        self._watch()
        self.tally.calls += 1

    def kill(self) -> None:
        """The process ends, and another one goes on."""
        self.disk.on_op = None
        self.disk = self.disk.reboot()
        self._reopened()

    def restart(self) -> None:
        self.disk.on_op = None
        self.log.close()
        self._reopened()

    def power_cut(self) -> None:
        """What was not synced is lost, and the history goes on with the rest."""
        self.disk.on_op = None
        self.disk = self.disk.crash_image("none")
        found = self.open(self.disk.reboot()).find(TOPIC)
        assert found is not None, "the topic is gone"
        seen = View.from_topic(found)
        last = max(seen.live, default=0) if not self.hard else seen.head
        self.model.written = {seq: record for seq, record in self.model.written.items() if seq <= last}
        # Deletes that were not synced do not count, and class memory assigns lost seqs again.
        self.model.deleted = {seq for seq in self.model.deleted - seen.live if seq <= seen.head}
        self._reopened()

    def _reopened(self) -> None:
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, create=False)
        self.now = View.from_topic(self.topic)
        self.gone = {*range(1, self.now.head + 1)} - self.now.live
        self._aside.clear()
        self.check_running(self.now)
        self._watch()

    # ── what must be true ─────────────────────────────────────────────────────────────────────

    def check_running(self, seen: View) -> None:
        model = self.model
        assert seen.table == model.table(seen.live), (seen, model.table(seen.live), model)
        needed = model.must_be_live(seen.floor, seen.head, self.now_ms)
        assert needed <= seen.live, (f"{sorted(needed - seen.live)} are gone", seen, model)
        assert not model.deleted & seen.live, (f"{sorted(model.deleted & seen.live)} were deleted", seen)
        for key, seq in seen.table:
            found = self.topic.latest(key)
            assert found is not None, (key, seq)
            assert found.seq == seq, (key, seq, found)

    @property
    def now_ms(self) -> int:
        return self.clock.now_us() // 1000

    def check_crash_state(self, crash: Crash, before: View, after: View, gone: set[int]) -> None:
        where, disk, cut = crash
        keeps = self.hard or not cut
        log = self.open(disk)
        assert not log.report.damage, (where, log.report.damage)
        found = log.find(TOPIC)
        if found is None:
            assert cut, (where, "the topic is gone")
            return
        seen = View.from_topic(found)
        said = (where, seen, before, after, self.model)
        assert seen.floor >= self.shown or not keeps, said
        upto = min(seen.head, before.head) if keeps else max(seen.live, default=0)
        needed = self.model.must_be_live(max(seen.floor, after.floor), upto, self.now_ms)
        # A newer record of the call under way may or may not have replaced one.
        replaced = {seq for seq in needed if seq not in after.live}
        assert needed - replaced <= seen.live, (*said, f"{sorted(needed - replaced - seen.live)} are lost")
        if keeps:
            assert before.live & after.live <= seen.live, (*said, "records are lost")
            assert not gone & seen.live, (*said, f"{sorted(gone & seen.live)} are back")
        for key in KEYS:  # whatever was lost with the power, one record of each key is the newest, and it is there
            versions = [seq for seq in self.model.versions(key, upto) if seq in seen.live]
            others = [seq for seq in self.model.versions(key, upto) if seq not in seen.live]
            if not versions and others and keeps:
                newest = self.model.written[max(others)]
                is_due = newest.tombstone and newest.ts_ms + DELAY_MS <= self.now_ms
                assert is_due or max(others) in self.model.deleted or max(others) < seen.floor, (*said, key)
        assert seen.table == self.model.table(seen.live), (*said, self.model.table(seen.live))
        self.check_gap_log(said, log, seen)
        again = self.open(disk.reboot())
        assert View.from_topic(again.topic(TOPIC, create=False)) == seen, (*said, "the second recovery differs")

    def check_gap_log(self, said: object, log: Engine, seen: View) -> None:
        """Every record that is gone has its row, and none has two."""
        rows = log.topic(TOPIC, create=False).gaps()
        gone = {*range(1, seen.head + 1)} - seen.live
        assert all(row.cause in ("delete", "compaction", "cap", "ttl", "hold_exceeded") for row in rows), (said, rows)
        if self.hard:
            covered = {seq for row in rows for seq in range(row.first, row.last + 1)}
            assert gone <= covered, (said, f"{sorted(gone - covered)} have no row", list(rows))
            assert sum(row.records for row in rows) == len(gone), (said, list(rows))

    # ── the letters of histories ──────────────────────────────────────────────────────────────

    def append(self, key: str | None, *, tombstone: bool = False) -> None:
        topic, tag = self.topic, key if self.by_tag else self.random.choice((None, "x", "y"))
        meta: dict[str, Any] | None = None
        data: Any = {"k": key, "v": topic.head_seq} if key is not None else self.random.choice((b"raw", 5, {"k": None}))
        if tombstone and self.by_tag and self.random.random() < 0.5:
            data = self.random.choice((None, b""))
        elif tombstone:
            meta = {"tombstone": True}

        def call() -> None:
            seq = topic.append(data, tag=tag, meta=meta).first_seq
            self.model.written[seq] = Written(key, tombstone, self.now_ms)

        self.run_call(call)


def append(history: CompactionHistory) -> None:
    history.append(history.random.choice(KEYS))


def append_without_key(history: CompactionHistory) -> None:
    history.append(None)


def append_tombstone(history: CompactionHistory) -> None:
    history.append(history.random.choice(KEYS), tombstone=True)


def append_batch(history: CompactionHistory) -> None:
    """One atomic batch with a key twice."""
    keys = [history.random.choice(KEYS[:2]) for _ in range(3)]

    def call() -> None:
        records = [{"k": key, "v": number} for number, key in enumerate(keys)]
        written = history.topic.append(records, tag=list(keys) if history.by_tag else None)
        for seq, key in zip(written.seqs, keys, strict=True):
            history.model.written[seq] = Written(key, False, history.now_ms)

    history.run_call(call)


def compact(history: CompactionHistory) -> None:
    def call() -> None:
        history.tally.removed += history.topic.compact().records

    history.run_call(call)


def search(history: CompactionHistory) -> None:
    """Find replaced records outside of the engine, as a job on many machines does. What it found waits in parts."""
    sought: list[SearchRange] = []
    history.run_call(lambda: sought.append(topic_operations(history.topic).begin_compaction_search()))
    (span,) = sought
    newest: dict[str, int] = {}
    replaced, marked = list[int](), list[int]()
    for seq in sorted(history.now.live):
        key = history.model.written[seq].key
        if key is not None and span.first <= seq < span.stop:
            replaced += [newest[key]] if key in newest else []
            newest[key] = seq
    marked = [seq for seq in newest.values() if history.model.written[seq].tombstone]
    edges = [0, *sorted(history.random.sample(range(1, span.stop + 1), min(2, span.stop))), span.stop + 1]
    history.found = [
        FoundRecords(
            span,
            np.array([seq for seq in sorted(replaced) if low <= seq < high], np.int64),
            np.array([seq for seq in sorted(marked) if low <= seq < high], np.int64),
            is_last=high == edges[-1],
        )
        for low, high in pairwise(edges)
    ]
    history.progress = None


def remove_part(history: CompactionHistory) -> None:
    """Remove the next part of what was found, whatever happened since."""
    if not history.found:
        return
    part, before = history.found.pop(0), history.progress
    if before is not None:
        span = part.range._replace(horizon=before.horizon)
        part = part._replace(range=span, oldest_tombstone_ms=before.oldest_tombstone_ms)

    def call() -> None:
        if part.range.opening != history.log.context.opening:
            with pytest.raises(Refused, match="since replaced records were searched"):
                topic_operations(history.topic).remove_found(part)
            history.found = []
            return
        history.progress = topic_operations(history.topic).remove_found(part)
        history.tally.removed += history.progress.records

    history.run_call(call)


def delete(history: CompactionHistory) -> None:
    if history.now.live:
        seqs = history.random.sample(sorted(history.now.live), min(2, len(history.now.live)))
        history.model.delete(seqs, history.now.live)
        history.run_call(lambda: history.topic.delete(seqs=seqs))


def delete_newest(history: CompactionHistory) -> None:
    if history.now.table:
        _, seq = history.random.choice(sorted(history.now.table))
        history.model.delete([seq], history.now.live)
        history.run_call(lambda: history.topic.delete(seqs=[seq]))


def hold(history: CompactionHistory) -> None:
    group = history.topic.group("g")
    size = history.random.choice((0, 10_000))
    history.run_call(lambda: group.hold(size))


def commit(history: CompactionHistory) -> None:
    group = history.topic.group("g")
    if group.exists and history.now.head >= group.position:
        seq = history.random.randint(group.position, history.now.head)
        history.run_call(lambda: group.commit(seq))


def later(history: CompactionHistory) -> None:
    history.clock.tick(history.random.choice((1, 600, 1_100)))
    history.run_call(lambda: history.topic.state())


def tick(history: CompactionHistory) -> None:
    """Background work: syncs, expiry, and compaction of what is due."""
    history.clock.tick(2)
    history.run_call(history.log.tick)


def checkpoint(history: CompactionHistory) -> None:
    history.run_call(history.log.checkpoint)


def seal(history: CompactionHistory) -> None:
    history.run_call(history.topic.seal)


def rewrite(history: CompactionHistory) -> None:
    """The bytes of removed records go, and with them what the files knew of their keys."""
    history.run_call(lambda: history.topic.rewrite(force=True))


OPERATIONS: tuple[Callable[[CompactionHistory], None], ...] = (
    *(append,) * 8,
    *(append_batch,) * 2,
    *(append_tombstone,) * 2,
    *(compact,) * 3,
    *(search,) * 2,
    *(remove_part,) * 4,
    *(checkpoint,) * 2,
    *(tick,) * 2,
    *(append_without_key, delete, delete_newest, hold, commit, later, seal, rewrite),
    *(CompactionHistory.kill, CompactionHistory.restart),
)


def run_history(
    seed: object, stats: CompactionStats, *, steps: int, shards: int = 1, images: int = 3, step: int = 1, **config: Any
) -> CompactionHistory:
    random = Random(repr(seed))
    history = CompactionHistory(random, stats, shards=shards, images=images, **config)
    history.step = step
    for _ in range(steps):
        random.choice(OPERATIONS)(history)
    history.disk.on_op = None
    return history
