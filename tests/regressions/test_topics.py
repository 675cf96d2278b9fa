"""Bugs of topics, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest

import tidelog
from tidelog.engine import Engine, checkpoint
from tidelog.engine.config import Durability
from tidelog.engine.core import Core
from tidelog.errors import Latched
from tidelog.testing import ManualClock, SimDisk, SyncMode

DURABLE = [durability for durability in get_args(Durability) if durability != "ephemeral"]


def opened(disk: SimDisk, shards: int = 1) -> Engine:
    return tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, wal_shards=shards)


def seqs(log: Engine) -> list[int]:
    return [record.seq for record in log.topic("capped", create=False).read(0).records]


def capped(disk: SimDisk, durability: str, shards: int = 1) -> Engine:
    """Records 1 to 3 are in a segment, and there may be three."""
    log = opened(disk, shards)
    topic = log.topic("capped", durability=durability, cap_records=3)
    for _ in range(3):
        topic.append(b"x")
    log.checkpoint()
    return log


def evict_and_delete(log: Engine) -> None:
    """Record 4 pushes out the first; without the third there would have been room for it."""
    topic = log.topic("capped", create=False)
    topic.append(b"y")
    topic.delete(seqs=[3])
    assert seqs(log) == [2, 4]


class Watch:
    """What a power cut would leave of the topic at each operation from now on."""

    def __init__(self, disk: SimDisk, shards: int = 1) -> None:
        self.disk, self.shards, self.states = disk, shards, 0
        disk.on_op = self._look

    def _look(self, op: int) -> None:
        for image in self.disk.images(random=Random(op), limit=40):
            self.states += 1
            assert seqs(opened(image.disk, self.shards)) == [2, 4], f"before op {op}, {image.label}"


@pytest.mark.parametrize("durability", DURABLE)
def test_what_a_cap_took_stays_gone_when_a_checkpoint_after_a_restart_is_cut_short(durability: str) -> None:
    """The deletion vector is there before the snapshot: replay must not find room for the first record again."""
    disk = SimDisk()
    evict_and_delete(capped(disk, durability))
    log = opened(disk := disk.reboot())
    watch = Watch(disk)
    log.checkpoint()
    assert watch.states > 20


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_what_a_cap_took_of_class_memory_stays_gone_in_every_shard(shards: int) -> None:
    disk = SimDisk()
    log = capped(disk, "memory", shards)
    evict_and_delete(log)
    log.gaps()
    log.tick()
    watch = Watch(disk, shards)
    log.checkpoint()
    assert watch.states > 20


@pytest.mark.parametrize("durability", DURABLE)
def test_what_a_cap_took_during_a_checkpoint_stays_gone(durability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: it comes between the floors and the deletion vectors of that checkpoint."""
    disk = SimDisk()
    log = capped(disk, durability)
    log.topic("other", durability="fsync").append(b"so that there is something to do")
    write = checkpoint._write
    watches: list[Watch] = []

    def written(core: Core, *rest: object) -> None:
        write(core, *rest)  # type: ignore[arg-type]
        if core.name == "capped" and not watches:
            evict_and_delete(log)
            log.tick()
            watches.append(Watch(disk))

    monkeypatch.setattr(checkpoint, "_write", written)
    log.checkpoint()
    assert watches[0].states > 20


@pytest.mark.parametrize("mode", get_args(SyncMode))
def test_a_close_whose_first_sync_fails_says_so(mode: SyncMode) -> None:
    """Method: the ledger has a row to write about a delete, and it is its sync that fails."""
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("orders", durability="disk")
    topic.append([b"1", b"2", b"3"])
    log.tick()
    topic.append(b"4")
    topic.delete(seqs=[1])
    disk.fail_sync(mode)
    with pytest.raises(Latched):
        log.close()
    with opened(disk.reboot()) as again:  # the directory was let go of all the same
        assert again.topic("orders", create=False).head_seq >= 3
