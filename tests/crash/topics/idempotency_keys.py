"""Histories of writes under idempotency keys, and what must be true of every crash in the middle of them.

On every image that a power cut could leave, the client does what a client does that got no answer: it sends its writes
again under their keys. A key is known if and only if all records of its write survived, and then names their seqs.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.crash.topics.workloads import PATH, TINY

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Topic
from tidelog.testing import ManualClock, SimDisk

TOPIC, OTHER = "t", "other"


def records_of_key(key: str, count: int) -> list[str]:
    return [f"{key}:{number}" for number in range(count)]


class KeyHistory:
    """One history, judged before every operation of the disk."""

    def __init__(self, random: Random, *, durability: str, shards: int, images: int) -> None:
        self.random, self.durability, self.shards, self.images = random, durability, shards, images
        # Images draw from their own generator: one more operation of the disk must not change the steps that follow.
        self.image_random = Random(random.random())
        self.clock = ManualClock()
        self.disk = SimDisk(clock=self.clock)
        self.counts: dict[str, int] = {}  # records of each key, also of the write that is under way
        self.ranges: dict[str, tuple[int, int]] = {}  # of those that were acknowledged
        self.states = self.known = self.lost = 0
        self._judged: set[object] = set()  # states with what was promised by then
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, durability=durability)
        self.other = self.log.topic(OTHER, durability="disk")
        self.log.tick()
        self.disk.on_op = self._on_disk_operation

    def open(self, disk: SimDisk) -> Engine:
        return engine_of(tidelog.open(PATH, disk=disk, clock=self.clock, threads=False, wal_shards=self.shards, **TINY))

    def step(self) -> None:
        verbs = (self.write, self.plain, self.elsewhere, self.checkpoint, self.seal, self.tick, self.kill, self.restart)
        self.random.choices(verbs, (8, 2, 2, 1, 1, 1, 1, 1))[0]()

    def write(self) -> None:
        key, count = f"key-{len(self.counts)}", self.random.choice((1, 1, 1, 3, 9))
        self.counts[key] = count
        done = self.topic.append(records_of_key(key, count), tag=self.random.choice((None, "tag")), key=key)
        assert not done.deduped
        self.ranges[key] = (done.first_seq, done.last_seq)
        again = self.topic.append("again", key=self.random.choice(list(self.counts)))
        assert again.deduped

    def plain(self) -> None:
        self.topic.append("plain")

    def elsewhere(self) -> None:
        self.other.append(["x"] * self.random.randint(1, 4))

    def checkpoint(self) -> None:
        self.log.checkpoint()

    def seal(self) -> None:
        self.topic.seal()

    def tick(self) -> None:
        self.log.tick()

    def kill(self) -> None:
        self._reopen(self.disk.reboot())

    def restart(self) -> None:
        self.log.close()
        self._reopen(self.disk.reboot())

    def _reopen(self, disk: SimDisk) -> None:
        self.disk = disk
        self.disk.on_op = self._on_disk_operation
        self.log = self.open(disk)
        self.topic, self.other = self.log.topic(TOPIC, create=False), self.log.topic(OTHER, create=False)
        for key, span in self.ranges.items():
            done = self.topic.append("again", key=key)
            assert (done.deduped, done.first_seq, done.last_seq) == (True, *span), key

    def _on_disk_operation(self, op: int) -> None:
        promises = (*self.counts.items(), *self.ranges)
        for image in self.disk.images(random=self.image_random, limit=self.images):
            if (key := (image.disk.digest(), promises, self.clock.now_us())) in self._judged:
                continue
            self._judged.add(key)
            self.states += 1
            self.check_crash_state(f"op {op}, {image.label}", image.disk)

    def check_crash_state(self, where: str, disk: SimDisk) -> None:
        log = self.open(disk)
        assert not log.report.damage, (where, log.report.damage)
        topic = log.topic(TOPIC, create=False)
        held = self._stored_data(topic)
        for key, count in self.counts.items():
            seqs = held.get(key, [])
            assert len(seqs) in (0, count), (where, key, "is there in part")
            if key in self.ranges and self.durability == "fsync":
                assert seqs, (where, key, "was acknowledged")
            done = topic.append(records_of_key(key, count), key=key)
            assert done.deduped == bool(seqs), (where, key, "is known" if done.deduped else "is not known", seqs)
            if seqs:
                assert (done.first_seq, done.last_seq) == (seqs[0], seqs[-1]), (where, key)
                self.known += 1
            else:
                self.lost += 1
        found = self._stored_data(topic)
        assert {key: len(seqs) for key, seqs in found.items()} == self.counts, (where, "not exactly once")

    @staticmethod
    def _stored_data(topic: Topic) -> dict[str, list[int]]:
        held: dict[str, list[int]] = {}
        for record in topic.read(0, 1000).records:
            data: Any = record.data
            key, colon, _ = data.partition(":")
            if colon:
                held.setdefault(key, []).append(record.seq)
        return held


def run_history(seed: object, *, steps: int, durability: str, shards: int, images: int) -> KeyHistory:
    history = KeyHistory(Random(repr(seed)), durability=durability, shards=shards, images=images)
    history.write()
    for _ in range(steps):
        history.step()
    history.checkpoint()
    history.write()  # every history ends with keys that survive a power cut and one that need not
    history.disk.on_op = None
    return history
