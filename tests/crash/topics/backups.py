"""Histories with backups in them: what is done while files are copied, and what a restore must give.

A backup of an engine on a simulated disk is interrupted at operations on its target, where no lock of the engine is
held, by more of the history: appends, deletes, checkpoints, drops. The view of the running engine at the instant of the
snapshot is what the restored directory has to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from tests.crash.topics.oracle import TopicView
from tests.crash.topics.reader import read_engine, require
from tests.crash.topics.workloads import (
    OPERATIONS,
    TINY,
    EngineHarness,
    Operation,
    expire,
    idle,
    prologue,
    reopen,
)

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine
from tidelog.engine.backup import create_backup
from tidelog.engine.backup_target import BackupInfo
from tidelog.engine.restore import RestoreResult, restore_backup
from tidelog.engine.snapshot import EngineSnapshot
from tidelog.testing import ManualClock, SimDisk

TARGET = "backups"
# Not those that close the engine, and not those that set the clock: times decide what a view shows.
MEANWHILE: tuple[Operation, ...] = tuple(each for each in OPERATIONS if each not in (reopen, expire, idle))


class Taken(NamedTuple):
    """A backup, and the engine as its readers saw it at its position."""

    info: BackupInfo
    view: dict[str, TopicView]
    now_ms: int


def fill(seed: object, *, shards: int, letters: int = 12) -> tuple[EngineHarness, Random]:
    """An engine with a history of its own."""
    random = Random(f"backup {seed}")
    harness = EngineHarness(SimDisk(trace=True), shards=shards)
    prologue(harness, random)
    harness.create("m", durability="memory")
    for _ in range(letters):
        step(harness, random, [each for each in OPERATIONS if each is not reopen])
    return harness, random


def step(harness: EngineHarness, random: Random, operations: Sequence[Operation]) -> None:
    """One operation on a topic drawn by chance."""
    name = random.choice([name for name, life in harness.oracle.lives.items() if life.id is not None])
    harness.topic(name)
    random.choice(operations)(harness, name, random)
    harness.check_all()  # what expires now is gone, also if the clock is set back later


def back_up(
    harness: EngineHarness,
    random: Random,
    *,
    meanwhile: float = 0.3,
    operations: Sequence[Operation] = MEANWHILE,
    incremental: bool = False,
    link: bool = True,
    bursts_max: int = 1 << 30,
) -> Taken:
    """Make a backup, with operations between those of the target."""
    engine, views = harness.log, list[dict[str, TopicView]]()
    take, is_inside = engine.take_snapshot, False

    def take_and_look() -> EngineSnapshot:
        snapshot = take()
        views.append(read_engine(engine))
        return snapshot

    def interrupt(_: int) -> None:
        nonlocal is_inside, bursts_max
        last = harness.disk.trace[-1] if harness.disk.trace else ""
        if not views or is_inside or not bursts_max or f" {TARGET}" not in last or random.random() >= meanwhile:
            return
        is_inside, bursts_max = True, bursts_max - 1
        try:
            step(harness, random, operations)
        finally:
            is_inside = False

    engine.take_snapshot = take_and_look  # type: ignore[method-assign]
    harness.disk.on_op = interrupt
    try:
        info = create_backup(engine, TARGET, incremental=incremental, link=link)
    finally:
        harness.disk.on_op = None
        engine.take_snapshot = take  # type: ignore[method-assign]
    return Taken(info, views[0], info.created_ms)


def restored(disk: SimDisk, clock: ManualClock, path: str, shards: int) -> Engine:
    return engine_of(tidelog.open(path, disk=disk, clock=clock, threads=False, wal_shards=shards, **TINY))


def check_restored(
    disk: SimDisk, taken: Taken, shards: int, path: str = "restored", **options: object
) -> RestoreResult:
    """Restore a backup and compare what its readers see."""
    result = restore_backup(TARGET, path, backup_id=taken.info.id, disk=disk, **options)  # type: ignore[arg-type]
    engine = restored(disk, ManualClock(taken.now_ms * 1000), path, shards)
    require(not engine.report.damage, f"a restore is damaged: {engine.report.damage}")
    require(not engine.report.cut, f"a restore has an unfinished write: {engine.report.cut}")
    check_view(read_engine(engine), taken.view)
    for name, seen in taken.view.items():
        topic = engine.topic(name, create=False)
        require(topic.epoch != seen.id, f"{name}: the epoch is the old one")
        seq = topic.append(b"after the restore").first_seq
        require(seq > seen.head, f"{name}: seq {seq} was in the backup, which ends at {seen.head}")
    engine.close()
    return result


def check_view(found: dict[str, TopicView], expected: dict[str, TopicView]) -> None:
    """Records, floors and settings are the same; heads may be higher by reserved seqs."""
    require(found.keys() == expected.keys(), f"topics {sorted(found)}, not {sorted(expected)}")
    for name, view in expected.items():
        seen = found[name]
        require(seen.head >= view.head, f"{name}: the head is {seen.head}, it was {view.head}")
        same_head = replace_head(seen, view)
        require(same_head == view, f"{name}: restored as {same_head}, it was {view}")


def replace_head(seen: TopicView, view: TopicView) -> TopicView:
    earliest = view.earliest if not seen.live else seen.earliest
    return seen._replace(head=view.head, earliest=earliest)
