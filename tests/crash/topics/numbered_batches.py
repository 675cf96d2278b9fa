"""Histories of numbered batches, and what must be true of every crash in the middle of them.

Before each operation of the disk the images that a power cut could leave are put aside. On every one of them the writer
does what Spark does: it repeats the batch that it does not know the end of, and older ones too. Whatever was cut off,
each batch must then be there once, whole and in one piece, and its number must have told the truth before.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa
from tests.crash.topics.workloads import PATH, TINY

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Topic
from tidelog.testing import ManualClock, SimDisk

TOPIC, WRITER = "t", "etl"


@dataclass
class HistoryStats:
    states: int = 0


def tables(number: int, sizes: tuple[int, ...]) -> list[pa.Table]:
    at, made = 0, []
    for size in sizes:
        made.append(pa.table({"data": [b"%d:%d" % (number, at + one) for one in range(size)]}))
        at += size
    return made


def datas(topic: Topic) -> dict[int, bytes]:
    table = topic.to_arrow()
    return dict(zip(table.column("seq").to_pylist(), table.column("data").to_pylist(), strict=True))


class NumberedBatchHistory:
    def __init__(self, random: Random, stats: HistoryStats, *, durability: str, shards: int, images: int) -> None:
        self.random, self.tally, self.shards, self.images = random, stats, shards, images
        self.disk, self.clock = SimDisk(trace=True), ManualClock()
        self.batches: dict[int, tuple[int, ...]] = {}  # that were acknowledged: the sizes of their tables
        self.ranges: dict[int, tuple[int, int]] = {}
        self._aside: list[tuple[str, SimDisk]] = []
        self._known: set[tuple[bytes, int]] = set()  # bytes, and how many batches were acknowledged
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, durability=durability)
        self.log.tick()
        self.disk.on_op = self._on_disk_operation

    def open(self, disk: SimDisk) -> Engine:
        clock = self.clock if disk is self.disk else ManualClock(self.clock.now_us())
        return engine_of(tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=self.shards, **TINY))

    def _on_disk_operation(self, op: int) -> None:
        for image in self.disk.images(random=self.random, limit=self.images):
            if (key := (image.disk.digest(), len(self.batches))) not in self._known:
                self._known.add(key)
                self._aside.append((f"op {op}, {image.label}", image.disk))

    def write(self) -> None:
        """The next batch, and every crash while it is written."""
        number = max(self.batches, default=-1) + self.random.choice((1, 1, 1, 3))
        sizes = tuple(self.random.randint(1, 3) for _ in range(self.random.randint(1, 4)))
        done = self.put(self.topic, number, sizes)
        assert not done.deduped
        self._judge_aside({**self.batches, number: sizes})
        self.batches[number], self.ranges[number] = sizes, (done.first_seq, done.last_seq)
        self._on_disk_operation(self.disk.op_count + 1)
        self._judge_aside(self.batches)

    def _judge_aside(self, batches: dict[int, tuple[int, ...]]) -> None:
        self.disk.on_op = None
        aside, self._aside = self._aside, []
        for where, disk in aside:
            self.tally.states += 1
            self.check_crash_state(where, disk, batches)
        self.disk.on_op = self._on_disk_operation

    def put(self, topic: Topic, number: int, sizes: tuple[int, ...]) -> Any:
        return topic.append_numbered(tables(number, sizes), writer=WRITER, number=number, sum=(number, sum(sizes)))

    def run_unrelated(self) -> None:
        """Somebody else's record, a checkpoint, a tick: crashes within them are judged by the next batch."""
        self.random.choice(
            (
                lambda: self.topic.append(b"other"),
                lambda: self.topic.append([b"other", b"other"]),
                self.log.checkpoint,
                self.log.tick,
                self.kill,
            )
        )()

    def kill(self) -> None:
        self._judge_aside(self.batches)
        self.disk.on_op = None
        self.disk = self.disk.reboot()
        self.log = self.open(self.disk)
        self.topic = self.log.topic(TOPIC, create=False)
        self.disk.on_op = self._on_disk_operation

    def check_crash_state(self, where: str, disk: SimDisk, batches: dict[int, tuple[int, ...]]) -> None:
        log = self.open(disk)
        assert not log.report.damage, (where, log.report.damage)
        topic = log.topic(TOPIC, create=False)
        held, known = datas(topic), topic.producer_batches(WRITER)
        for number, written in known.items():
            there = [held.get(seq) for seq in range(written.first, written.last + 1)]
            assert there == expected_batch(number, batches[number]), (where, number, "is not where its number says")
        for number in self.batches:
            span = (known[number].first, known[number].last) if number in known else None
            assert span == self.ranges[number], (where, number, "was acknowledged")
        for data in held.values():
            named, colon, _ = data.partition(b":")
            assert not colon or int(named) in known, (where, named, "has records and no number")
        for number in sorted(batches)[-3:]:
            done = self.put(topic, number, batches[number])
            assert done.deduped == (number in known), (where, number)
        again = self.open(disk.reboot()).topic(TOPIC, create=False)
        found = [data for data in datas(again).values() if b":" in data]
        wanted = [data for number in sorted(batches) for data in expected_batch(number, batches[number])]
        assert found == wanted, (where, "not exactly once")


def expected_batch(number: int, sizes: tuple[int, ...]) -> list[bytes]:
    return [b"%d:%d" % (number, at) for at in range(sum(sizes))]


def run_history(
    seed: object, stats: HistoryStats, *, steps: int, durability: str = "fsync", shards: int = 1, images: int = 6
) -> NumberedBatchHistory:
    history = NumberedBatchHistory(Random(repr(seed)), stats, durability=durability, shards=shards, images=images)
    for _ in range(steps):
        for _ in range(history.random.randint(0, 2)):
            history.run_unrelated()
        history.write()
    history.disk.on_op = None
    return history
