"""Any interleaving of append, delete, rewrite, erase, checkpoint, restart and flipped bits, against a model.

The model is a dict of live records and the set of assigned seqs. After every step the topic has exactly the live
records, and every seq of its range is counted as a row or as deleted.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import PATH, EngineHarness

from tidelog.engine.check import check_directory
from tidelog.engine.erase import ErasureIncomplete
from tidelog.engine.segment import Segment

TAGS = ("a", "b", "c", None)


class Model:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = EngineHarness(
            segment_events_max=8,
            segment_bytes_max=2000,
            wal_shards=1 + seed % 2,
            rewrite_dead_percent=self.random.choice((0, 20, 50)),
            rewrite_dead_bytes_min=self.random.choice((0, 100)),
            rewrite_bytes_per_second=0,
        )
        self.topic = self.world.log.topic("t", durability="fsync")
        self.live: dict[int, tuple[Any, str | None]] = {}
        self.head = self.number = 0

    def append(self) -> None:
        datas: list[Any] = []
        for _ in range(self.random.choice((1, 1, 2, 6))):
            self.number += 1
            datas.append(
                self.random.choice((b"%d" % self.number + bytes(self.random.choice((0, 90))), {"n": self.number}))
            )
        tags = [self.random.choice(TAGS) for _ in datas]
        first = self.topic.append(datas, tag=tags).first_seq
        for seq, record in enumerate(zip(datas, tags, strict=True), first):
            self.live[seq] = record
            self.head = seq

    def _some(self) -> list[int]:
        return sorted(self.random.sample(range(1, self.head + 1), min(self.head, self.random.randint(1, 6))))

    def delete(self) -> None:
        if self.random.random() < 0.5 and self.head:
            gone = set(self._some())
            self.topic.delete(seqs=sorted(gone))
        else:
            tag = self.random.choice("abc")
            gone = {seq for seq, record in self.live.items() if record[1] == tag}
            self.topic.delete(match=tag)
        self.live = {seq: record for seq, record in self.live.items() if seq not in gone}

    def rewrite(self) -> None:
        assert self.topic.rewrite(force=self.random.random() < 0.7).skipped == ()

    def erase(self) -> None:
        if self.head:
            gone = set(self._some())
            receipt = self.topic.erase(seqs=sorted(gone))
            assert receipt.records == len(gone & set(self.live))
            self.live = {seq: record for seq, record in self.live.items() if seq not in gone}
            assert self.world.log.verify_erasures(receipt).ok

    def checkpoint(self) -> None:
        if self.random.random() < 0.5:
            self.topic.seal()
        self.world.log.checkpoint()

    def tick(self) -> None:
        self.world.clock.tick(self.random.choice((1, 100_000)))
        self.world.log.tick()

    def restart(self) -> None:
        self.topic = self.world.restart(self.random.choice(("reopen", "kill", "crash"))).topic("t")
        assert self.world.log.report.damage == []

    def flip(self) -> None:
        """A segment with a flipped bit is not rewritten. The bit is flipped back, as from a copy, before a restart."""
        sealed = [part for part in self._segments() if part.is_sealed and part.live_records]
        if not sealed:
            return
        segment = self.random.choice(sealed)
        place, bit = self.random.randrange(segment.size), self.random.randrange(8)
        before = segment.generation
        self.world.disk.flip_bit(segment.path(".data"), place, bit)
        segment.unmap()
        self.topic.rewrite(force=True)
        try:
            self.topic.erase(seqs=[seq for seq in (segment.base,) if seq not in self.live])
        except ErasureIncomplete:
            assert not self.world.log.health().ok
        same = [
            part for part in self.topic._state.index.parts if isinstance(part, Segment) and part.base == segment.base
        ]
        assert [part.generation for part in same] in ([before], [])
        self.world.disk.flip_bit(segment.path(".data"), place, bit)
        self.restart()

    def _segments(self) -> list[Segment]:
        return [part for part in self.topic._state.index.parts if isinstance(part, Segment)]

    def check(self) -> None:
        page = self.topic.read(0, limit=10_000)
        assert {record.seq: (record.data, record.tag) for record in page.records} == self.live
        assert page.counts.rows == len(self.live)
        assert page.counts.rows + page.counts.deleted == self.head, page.counts
        assert (page.counts.evicted, page.counts.expired) == (0, 0)


def run(seed: int, steps: int) -> None:
    model = Model(seed)
    for _ in range(steps):
        name = model.random.choices(
            ("append", "delete", "rewrite", "erase", "checkpoint", "tick", "restart", "flip"), (8, 4, 3, 1, 3, 2, 2, 1)
        )[0]
        getattr(model, name)()
        model.check()
    model.world.log.close()
    assert [finding for finding in check_directory(PATH, disk=model.world.disk) if finding.damage] == []


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_leaves_what_the_model_has(seed: int) -> None:
    run(seed, 30)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 200))
def test_long_interleavings_leave_what_the_model_has(seed: int) -> None:
    run(seed, 120)
