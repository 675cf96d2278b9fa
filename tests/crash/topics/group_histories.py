"""Histories of groups, holds and removals, and what must be true of every crash in the middle of them.

The history runs once. Before each operation of the disk the images that a power cut could leave are put aside, and
when the call that was under way is back they are opened and judged: by what was there before it and what is there
after, because either may be right, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

from tests.crash.topics.workloads import PATH, TINY

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Topic
from tidelog.testing import ManualClock, SimDisk

GROUPS = ("a", "b")
TOPIC = "t"


class GroupView(NamedTuple):
    """A topic with its groups and its rows of the ledger, as an engine shows them."""

    head: int
    floor: int
    live: frozenset[int]
    groups: tuple[tuple[str, int, int], ...]  # name, position, hold

    @classmethod
    def from_topic(cls, topic: Topic) -> GroupView:
        live: set[int] = set()
        cursor = 0
        while True:
            page = topic.read(cursor, 1000)
            live |= {record.seq for record in page.records}
            cursor = page.next_from_seq
            if page.caught_up:
                break
        return cls(topic.head_seq, topic.evict_floor, frozenset(live), groups_of(topic))


def groups_of(topic: Topic) -> tuple[tuple[str, int, int], ...]:
    return tuple((group.name, group.position, group.hold_bytes) for group in topic.groups())


@dataclass
class HistoryStats:
    states: int = 0
    calls: int = 0


class Crash(NamedTuple):
    where: str
    disk: SimDisk
    cut: bool  # power, not only the process


class GroupHistory:
    """One topic of one class, and everybody who uses it."""

    def __init__(self, random: Random, stats: HistoryStats, *, shards: int, images: int, **config: Any) -> None:
        self.random, self.tally, self.shards, self.images = random, stats, shards, images
        self.disk, self.clock = SimDisk(trace=True), ManualClock()
        self.hard = config["durability"] == "fsync"
        self._aside: list[Crash] = []
        self._known: set[tuple[bytes, bool]] = set()  # crashes of the call under way
        self.shown = 1  # the highest floor that a reader was told of
        self.deleted: set[int] = set()  # by calls that returned
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, **config)
        self.disk.on_op = self._on_disk_operation
        self.now = GroupView.from_topic(self.topic)
        self.earlier = [self.now.groups]  # what the groups were since everything was last synced

    def open(self, disk: SimDisk, **more: Any) -> Engine:
        clock = ManualClock(self.clock.now_us())
        if disk is self.disk:
            clock = self.clock
        return engine_of(
            tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=self.shards, **TINY, **more)
        )

    def _on_disk_operation(self, op: int) -> None:
        for image in self.disk.images(random=self.random, limit=self.images):
            self._put_aside(Crash(f"op {op}, {image.label}", image.disk, cut=True))
        self._put_aside(Crash(f"op {op}, a kill", self.disk.reboot(), cut=False))

    def _put_aside(self, crash: Crash) -> None:
        """A kill that left the bytes of a power cut is another crash: it loses nothing that was acked."""
        if (key := (crash.disk.digest(), crash.cut)) not in self._known:
            self._known.add(key)
            self._aside.append(crash)

    # ── what is done ──────────────────────────────────────────────────────────────────────────

    def run_call(self, call: Callable[[], object], *, syncs: bool = False) -> None:
        """One call, and a judgement of every crash within it. `syncs`: everything is on disk when it is back."""
        before = self.now
        call()
        self._on_disk_operation(self.disk.op_count + 1)
        self.disk.on_op = None
        shown = self.shown
        # Looking shows floors, which are made durable for it: images from before it need not have them.
        after = GroupView.from_topic(self.topic)
        aside, self._aside = self._aside, []
        for crash in aside:
            self.tally.states += 1
            self.check_crash_state(crash, before, after, shown)
        self._known.clear()  # the same state may be wrong after the next call
        self.earlier.append(after.groups)
        if syncs:
            self.log.tick()
            self.earlier = [after.groups]
        self.now, self.shown = after, max(self.shown, after.floor)
        self.deleted = {seq for seq in range(after.floor, after.head + 1) if seq not in after.live}
        self.disk.on_op = self._on_disk_operation
        self.tally.calls += 1

    def kill(self) -> None:
        """A power cut that keeps everything, and the history goes on from there."""
        self.disk.on_op = None
        self.disk = self.disk.reboot()
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, create=False)
        self.now = GroupView.from_topic(self.topic)
        self.earlier.append(self.now.groups)
        self._aside.clear()
        self.disk.on_op = self._on_disk_operation

    # ── what must be true ─────────────────────────────────────────────────────────────────────

    def check_crash_state(self, crash: Crash, before: GroupView, after: GroupView, shown: int) -> None:
        where, disk, cut = crash
        keeps = self.hard or not cut
        log = self.open(disk)
        assert not log.report.damage, (where, log.report.damage)
        found = log.find(TOPIC)
        if found is None:
            assert cut, (where, "the topic is gone")
            return
        seen = GroupView.from_topic(found)
        said = (where, seen, before, after)
        assert seen.floor >= shown, (*said, f"a reader was told that all below {shown} is lost")
        assert all(position <= seen.head for _, position, _ in seen.groups), said
        allowed = [before.groups, after.groups] if keeps else [*self.earlier, after.groups]
        assert seen.groups in allowed, said
        if keeps:
            assert before.live & after.live <= seen.live, (*said, "records are lost")
        back = {seq for seq in seen.live if seq in self.deleted}
        assert not back or not keeps, (*said, f"{back} are back")
        self.check_gap_log(said, log, seen)
        again = self.open(disk.reboot())
        assert GroupView.from_topic(again.topic(TOPIC, create=False)) == seen, (
            *said,
            "the second recovery finds something else",
        )

    def check_gap_log(self, said: object, log: Engine, seen: GroupView) -> None:
        """Every record that is gone has its row, and none has two."""
        rows = log.topic(TOPIC, create=False).gaps()
        covered = {seq for row in rows for seq in range(row.first, row.last + 1)}
        gone = set(range(1, seen.head + 1)) - seen.live
        if self.hard:  # no seq of it is a hole
            assert gone <= covered, (said, f"{sorted(gone - covered)} have no row", list(rows))
            told = sum(row.records for row in rows)
            assert told == len(gone), (said, f"{len(gone)} are gone, rows tell of {told}", list(rows))
        evicted = [row for row in rows if row.cause != "delete"]
        assert {*range(1, seen.floor)} <= {seq for row in evicted for seq in range(row.first, row.last + 1)}, said
        for row in rows:  # nothing that is told of is undone
            assert row.records <= sum(seq not in seen.live for seq in range(row.first, row.last + 1)), (said, row)
            assert row.cause == "delete" or row.last < seen.floor, (said, row)
        for one, other in pairwise(evicted):
            assert one.last < other.first, (said, "evicted twice", list(rows))


# ── the letters of histories ──────────────────────────────────────────────────────────────────────


def append(history: GroupHistory) -> None:
    count = history.random.randint(1, 3)
    history.run_call(lambda: history.topic.append([b"x" * history.random.randint(1, 12)] * count, tag="x"))


def commit(history: GroupHistory) -> None:
    group = history.topic.group(history.random.choice(GROUPS))
    seq = history.random.randint(group.position, max(history.now.head, group.position))
    history.run_call(lambda: group.commit(seq, expect=group.position))


def reset(history: GroupHistory) -> None:
    group = history.topic.group(history.random.choice(GROUPS))
    back = history.random.randint(0, group.position)
    to: Any = history.random.choice(["earliest", "latest", back, back])
    history.run_call(lambda: group.reset(to))


def hold(history: GroupHistory) -> None:
    group = history.topic.group(history.random.choice(GROUPS))
    size = history.random.choice((0, 20, 60, 1000))
    history.run_call(lambda: group.hold(size))


def forget(history: GroupHistory) -> None:
    group = history.topic.group(history.random.choice(GROUPS))
    history.run_call(group.delete)


def delete(history: GroupHistory) -> None:
    if history.now.live:
        seqs = history.random.sample(sorted(history.now.live), min(2, len(history.now.live)))
        history.run_call(lambda: history.topic.delete(seqs=seqs))


def delete_before(history: GroupHistory) -> None:
    seq = history.random.randint(history.now.floor, history.now.head + 1)
    history.run_call(lambda: history.topic.delete(before_seq=seq))


def configure(history: GroupHistory) -> None:
    cap = history.random.choice((2, 4, 6))
    history.run_call(lambda: history.log.topic(TOPIC, cap_records=cap))


def later(history: GroupHistory) -> None:
    """What is old may expire, where there is a limit to age."""
    history.clock.tick(history.random.choice((1, 900, 2_000)))
    history.run_call(lambda: history.topic.state())


def tick(history: GroupHistory) -> None:
    history.run_call(history.log.tick, syncs=True)


def checkpoint(history: GroupHistory) -> None:
    history.run_call(history.log.checkpoint, syncs=True)


def ledger(history: GroupHistory) -> None:
    history.run_call(history.log.gaps)


def kill(history: GroupHistory) -> None:
    history.kill()


OPERATIONS = (
    *(append,) * 5,
    *(commit,) * 3,
    *(hold,) * 2,
    *(delete,) * 2,
    *(reset,) * 2,
    *(checkpoint, tick, forget, delete_before, configure, later, ledger, kill),
)


def run_history(
    seed: object, stats: HistoryStats, *, steps: int, shards: int = 1, images: int = 6, **config: Any
) -> GroupHistory:
    random = Random(repr(seed))
    history = GroupHistory(random, stats, shards=shards, images=images, **config)
    for _ in range(steps):
        random.choice(OPERATIONS)(history)
    history.disk.on_op = None
    return history
