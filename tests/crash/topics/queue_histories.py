"""Queues when the power goes: histories of claims and acks, and before every disk operation what a restart would find.

The oracle keeps what callers were told, and what is being done: each fact about a job is as it was told, or as the
step that is under way makes it. It shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from tests.crash.topics.reader import RuleViolated, require
from tests.crash.topics.workloads import PATH, TINY

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Queue
from tidelog.testing import ManualClock, SimDisk

LEASE_MS = 60_000
MAX_DELIVERIES = 2


class Holder(NamedTuple):
    node: str
    lease_id: int


@dataclass
class QueueExpectation:
    """What callers know of a queue, and what one of them is waiting for."""

    durable: bool
    live: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    holders: dict[int, Holder] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)  # nacked with a long delay
    ids: set[int] = field(default_factory=set)
    dead: int = 0
    going: set[int] = field(default_factory=set)  # being acked, or moved to another topic
    coming: int = 0  # being put
    moving: set[int] = field(default_factory=set)  # whose lease is being made, moved or ended


class StopHistory(BaseException):
    """Enough: leave the history at once."""


class QueueHarness:
    def __init__(self, *, durable: bool, random: Random, limit: int) -> None:
        self.clock, self.random, self.limit = ManualClock(), random, limit
        self.disk = SimDisk(clock=self.clock)
        self.told = QueueExpectation(durable)
        self.states, self.wrong = 0, ""
        self.log = self.open(self.disk)
        self.log.topic("dead", durability="fsync")
        self.log.queue("jobs", **self.config)
        self._judged: set[object] = set()  # states with what was told by then

    @property
    def config(self) -> dict[str, Any]:
        limits = {"lease_ms": LEASE_MS, "max_deliveries": MAX_DELIVERIES, "dead_letter": "dead"}
        return {"durability": "fsync", "leases_durable": self.told.durable, **limits}

    def open(self, disk: SimDisk) -> Engine:
        more: dict[str, Any] = {"queue_history_records": 0}
        return engine_of(tidelog.open(PATH, disk=disk, clock=self.clock, threads=False, wal_shards=1, **TINY, **more))

    @property
    def queue(self) -> Queue:
        return self.log.queue("jobs", create=False)

    def run(self, steps: int) -> None:
        """A history, judged at every instant of it up to the first that is wrong."""
        self.disk.on_op = self.examine
        verbs = (self.put, self.claim, self.ack, self.nack, self.extend, self.checkpoint, self.kill)
        letters = self.random.choices(verbs, (3, 5, 1, 4, 1, 1, 1), k=steps)
        with suppress(StopHistory):
            for letter in letters:
                letter()
            self.examine(0)

    # What callers do.

    def put(self) -> None:
        count = self.random.randint(1, 3)
        self.told.coming = count
        self.told.live |= set(self.queue.put(["x" * self.random.choice((1, 60))] * count).seqs)
        self.told.coming = 0

    def claim(self) -> None:
        told, node = self.told, self.random.choice("ab")
        ready = told.live - told.holders.keys() - told.resting
        told.moving = ready
        told.going = {seq for seq in ready if told.counts.get(seq, 0) >= MAX_DELIVERIES}
        for job in self.queue.claim(node, self.random.randint(1, 3)):
            self._check(job.seq in ready, f"{job.seq} was handed out and cannot be")
            self._check(job.lease_id not in told.ids, f"lease id {job.lease_id} was given twice")
            told.ids.add(job.lease_id)
            told.holders[job.seq] = Holder(node, job.lease_id)
            told.counts[job.seq] = job.deliveries
        gone = told.live - {record.seq for record in self.queue.topic.read(0, 1000).records}
        self._check(gone <= told.going, f"{gone} are gone, {told.going} were to be")
        told.live -= gone
        told.acked |= gone
        told.dead += len(gone)
        told.moving, told.going = set(), set()

    def _some(self) -> list[int]:
        held = sorted(self.told.holders)
        return self.random.sample(held, min(len(held), self.random.randint(1, 3)))

    def _by_node(self, seqs: list[int]) -> list[tuple[str, list[int]]]:
        nodes = {self.told.holders[seq].node for seq in seqs}
        return [(node, [seq for seq in seqs if self.told.holders[seq].node == node]) for node in sorted(nodes)]

    def ack(self) -> None:
        for node, seqs in self._by_node(self._some()):
            self.told.going = set(seqs)
            done = self.queue.ack(node, seqs)
            self._check(done.count == len(seqs), f"{done.skipped} are not held any more")
            for seq in seqs:
                self._end(seq)
                self.told.counts.pop(seq, None)
            self.told.live -= set(seqs)
            self.told.acked |= set(seqs)
            self.told.going = set()

    def nack(self) -> None:
        rests = self.random.random() < 0.2
        for node, seqs in self._by_node(self._some()):
            self.told.moving = set(seqs)
            self.queue.nack(node, seqs, delay_ms=3_600_000 if rests else 0)
            for seq in seqs:
                self._end(seq)
                if rests:
                    self.told.resting.add(seq)
            self.told.moving = set()

    def extend(self) -> None:
        for node, seqs in self._by_node(self._some()):
            self.told.moving = set(seqs)
            done = self.queue.extend(node, seqs, lease_ms=LEASE_MS + self.random.randint(0, 9))
            self._check(done.count == len(seqs), f"{done.skipped} are not held any more")
            self.told.moving = set()

    def checkpoint(self) -> None:
        self.log.checkpoint()

    def kill(self) -> None:
        """Another process goes on with what the last one left."""
        self.disk = self.disk.reboot()
        self.disk.on_op = self.examine
        self.log = self.open(self.disk)
        if not self.told.durable:
            self.told.holders.clear()
            self.told.resting.clear()
            self.told.counts.clear()

    def _end(self, seq: int) -> None:
        del self.told.holders[seq]

    # What a restart would find.

    def examine(self, op: int) -> None:
        told = repr((self.told, self.clock.now_us()))
        for image in self.disk.images(random=self.random, limit=self.limit):
            if (key := (image.disk.digest(), told)) in self._judged:
                continue
            self._judged.add(key)
            self.states += 1
            try:
                self.check_crash_state(image.disk)
            except RuleViolated as wrong:
                self._fail(f"before op {op}, {image.label}: {wrong}")

    def _check(self, condition: bool, words: str) -> None:
        if not condition:
            self._fail(words)

    def _fail(self, words: str) -> None:
        self.wrong = words
        self.disk.on_op = None
        raise StopHistory

    def check_crash_state(self, disk: SimDisk) -> None:
        told = self.told
        log = self.open(disk)
        require(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        queue = log.queue("jobs", create=False)
        live = {record.seq for record in queue.topic.read(0, 1000).records}
        letters = {(letter.meta or {})["$dead_letter_src_seq"] for letter in log.topic("dead").read(0, 1000).records}
        require(live.isdisjoint(told.acked), f"{live & told.acked} were acked and are back")
        lost = told.live - live - told.going
        require(not lost, f"{lost} are lost")
        missing = {
            seq for seq in told.live - live if told.counts.get(seq, 0) >= MAX_DELIVERIES and str(seq) not in letters
        }
        require(missing <= told.going & told.holders.keys(), f"{missing} are in neither topic")
        require(len(live - told.live) in (0, told.coming), f"{live - told.live} were never written as a whole")
        dead = queue.counts().dead_lettered
        require(told.dead <= dead <= told.dead + len(told.going), f"{dead} are counted as dead, {told.dead} were told")
        self._check_leases(queue, live)

    def _check_leases(self, queue: Queue, live: set[int]) -> None:
        told = self.told
        holders = {seq: holder for seq, holder in told.holders.items() if seq in live and seq not in told.moving}
        if told.durable:
            in_flight = queue.counts().in_flight
            require(in_flight >= len(holders.keys() - told.going), f"{in_flight} are held, {len(holders)} were told so")
            for node in "ab":
                mine = [seq for seq, holder in holders.items() if holder.node == node and seq not in told.going]
                ids = [holders[seq].lease_id for seq in mine]
                done = queue.extend(node, mine, ids, lease_ms=LEASE_MS)
                require(not done.skipped, f"{done.skipped} are held by {node} and are not theirs")
                stale = queue.nack(node, mine, [lease_id + 1_000_000 for lease_id in ids])
                require(not stale.count, "a stale nack was taken")
        got = {job.seq: job for job in queue.claim("z", 1000)}
        require(told.ids.isdisjoint(job.lease_id for job in got.values()), "a lease id was given twice")
        if not told.durable:
            require(got.keys() == live, f"{live - got.keys()} are not to be had after a restart")
            require(all(job.deliveries == 1 for job in got.values()), "a count outlived a restart")
            return
        taken = got.keys() & holders.keys() - told.going
        require(not taken, f"{taken} are held by two")
        resting = got.keys() & told.resting - told.moving
        require(not resting, f"{resting} came back before their time")
        for seq, job in got.items():
            least = told.counts.get(seq, 0) + 1
            require(job.deliveries >= least, f"{seq}: delivery {job.deliveries}, {least - 1} were told")


def sweep(seeds: int, steps: int, *, limit: int, durable: Callable[[int], bool]) -> tuple[int, list[str]]:
    """Histories of these seeds; how many states were judged, and what was wrong with the first that was."""
    states = 0
    for seed in range(seeds):
        bench = QueueHarness(durable=durable(seed), random=Random(f"queues/{seed}"), limit=limit)
        bench.run(steps)
        states += bench.states
        if bench.wrong:
            return states, [f"seed {seed}: {bench.wrong}"]
    return states, []
