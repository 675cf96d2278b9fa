"""Consumers that share a group, against sets: any order of claims, acks, ends of leases, writes, deletes, evictions,
commits of others and restarts leases each record to one consumer at a time, and loses none.

The model knows every lease and when it ends. A range may be claimed when no lease that holds covers it and it is not
finished; the position never passes a record that is not finished; in the end one consumer gets all that is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

import pytest

import tidelog
from tidelog.engine.groups import GroupBatch
from tidelog.engine.topic import Topic
from tidelog.testing import ManualClock, SimDisk

LEASE_MS: Final = 1_000
CONSUMERS: Final = ("a", "b", "c")


@dataclass
class Lease:
    batch: GroupBatch
    seqs: range
    deadline_ms: int

    @property
    def key(self) -> tuple[str, int]:
        return self.batch.consumer, self.batch.lease_id


class SharedGroup:
    def __init__(self, random: Random, cap: int) -> None:
        self.random, self.cap = random, cap
        self.clock = ManualClock()
        self.disk = SimDisk(clock=self.clock)
        self.leases: dict[int, Lease] = {}  # that the group knows, also those whose time has ended
        self.void: list[Lease] = []  # settled, returned or forgotten: they change nothing any more
        self.finished: set[int] = set()  # since another caller moved the group
        self.moved_to = 0
        self.open()

    def open(self) -> None:
        self.database = tidelog.open("data", disk=self.disk, clock=self.clock, threads=False)
        self.topic: Topic = self.database.topic("t", durability="fsync", cap_records=self.cap)
        self.group = self.topic.group("g")

    # ── what may happen ───────────────────────────────────────────────────────────────────────

    def append(self) -> None:
        self.topic.append([{"n": 1}] * self.random.randint(1, 6))

    def delete(self) -> None:
        if self.topic.head_seq:
            self.topic.delete(seqs=[self.random.randint(1, self.topic.head_seq) for _ in range(3)])

    def pass_time(self) -> None:
        self.clock.tick(self.random.choice((1, LEASE_MS // 3, LEASE_MS)))

    def claim(self) -> None:
        self.end_leases()
        live = {record.seq for record in self.topic.read(0, 10_000).records}
        batch = self.group.claim(self.random.choice(CONSUMERS), self.random.randint(1, 5), lease_ms=LEASE_MS)
        if batch is None:
            held = {seq for lease in self.leases.values() for seq in lease.seqs}
            assert not {seq for seq in live if seq > self.moved_to} - held - self.finished, "some were free"
            return
        seqs = range(batch.first_seq, batch.last_seq + 1)
        for lease in self.leases.values():
            assert not live & set(lease.seqs) & set(seqs), "a record is leased twice"
        assert not self.finished & set(seqs) & live, "a finished record was leased again"
        assert [record.seq for record in batch] == sorted(live & set(seqs))
        self.leases[batch.lease_id] = Lease(batch, seqs, self.clock.monotonic_ms() + LEASE_MS)

    def ack(self) -> None:
        if lease := self.any_lease():
            assert self.group.ack(*lease.key) is (lease.batch.lease_id in self.leases)
            if self.leases.pop(lease.batch.lease_id, None):
                self.finished |= set(lease.seqs)
                self.void.append(lease)

    def release(self) -> None:
        if lease := self.any_lease():
            assert self.group.release(*lease.key) is (lease.batch.lease_id in self.leases)
            if self.leases.pop(lease.batch.lease_id, None):
                self.void.append(lease)

    def extend(self) -> None:
        if lease := self.any_lease():
            assert self.group.extend(*lease.key, 2 * LEASE_MS) is (lease.batch.lease_id in self.leases)
            lease.deadline_ms = self.clock.monotonic_ms() + 2 * LEASE_MS

    def leave(self) -> None:
        self.end_leases()
        consumer = self.random.choice(CONSUMERS)
        ended = [each for each in self.leases.values() if each.batch.consumer == consumer]
        assert self.group.leave(consumer) == len(ended)
        self.forget(ended)

    def move(self) -> None:
        """Another caller resets the group: all leases are void, and consumption continues there."""
        before, to = self.group.position, self.random.randint(0, self.topic.head_seq)
        if to != before:
            self.group.reset(to)
            self.start_at(to)

    def restart(self) -> None:
        position = self.group.position
        if self.random.random() < 0.5:
            self.database.close()
        self.disk = self.disk.crash_image(self.random)
        self.clock.tick(1)
        self.open()
        assert self.group.position == position, "commits of class fsync are durable"
        self.start_at(position)

    # ── the model ─────────────────────────────────────────────────────────────────────────────

    def any_lease(self) -> Lease | None:
        known = [*self.leases.values(), *self.void[-3:]]
        return self.random.choice(known) if known else None

    def end_leases(self) -> None:
        now_ms = self.clock.monotonic_ms()
        self.forget([lease for lease in self.leases.values() if lease.deadline_ms <= now_ms])

    def forget(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.void.append(self.leases.pop(lease.batch.lease_id))

    def start_at(self, position: int) -> None:
        self.forget(list(self.leases.values()))
        self.finished.clear()
        self.moved_to = position

    def check(self) -> None:
        position = self.group.position
        live = [record.seq for record in self.topic.read(0, 10_000).records]
        assert not [seq for seq in live if self.moved_to < seq <= position and seq not in self.finished]
        ends = [lease.deadline_ms for lease in self.leases.values()]
        if ends:
            assert self.group._leases.next_deadline_ms() == min(ends)

    def drain(self) -> None:
        self.clock.tick(10 * LEASE_MS)
        while batch := self.group.claim("last", 50):
            assert batch.ack()
            self.finished |= set(range(batch.first_seq, batch.last_seq + 1))
        left = {record.seq for record in self.topic.read(self.moved_to, 10_000).records} - self.finished
        assert not left
        assert self.group.lag().records == 0


STEPS = (
    *(SharedGroup.append, SharedGroup.claim, SharedGroup.claim, SharedGroup.claim, SharedGroup.ack, SharedGroup.ack),
    *(SharedGroup.release, SharedGroup.extend, SharedGroup.pass_time, SharedGroup.delete, SharedGroup.leave),
)
RARE = (SharedGroup.move, SharedGroup.restart)


@pytest.mark.parametrize("cap", [0, 4, 12])
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 600), marks=pytest.mark.sweep)], ids=len)
def test_each_record_has_one_consumer_at_a_time_and_none_is_lost(seeds: range, cap: int) -> None:
    for seed in seeds:
        random = Random(seed)
        shared = SharedGroup(random, cap)
        for _ in range(60):
            random.choice(RARE if random.random() < 0.06 else STEPS)(shared)
            shared.check()
        shared.drain()
        shared.database.close()
