"""Power cuts and kills during create, prune and restore: before every operation of the disk, and again in what follows.

The source is never harmed; the target has whole backups and reports the others; a restored directory is complete or
refused; the same call again succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
from tests.crash.topics.backups import TARGET, Taken, back_up, check_view, fill, restored, step
from tests.crash.topics.reader import read_engine
from tests.crash.topics.sweep import check_crash_state
from tests.crash.topics.workloads import EngineHarness, checkpoint, one, seal, seqs

from tidelog.engine.backup import create_backup
from tidelog.engine.backup_target import list_backups, prune_backups, verify_backup
from tidelog.engine.restore import restore_backup
from tidelog.errors import BackupIncomplete, BackupNotFound, Busy, Damaged
from tidelog.testing import ManualClock, PowerOff, SimDisk

RESTORED = "restored"


class Scene:
    """An engine with two backups, and changes since."""

    def __init__(self, seed: object, shards: int) -> None:
        self.harness, self.random = fill(f"crash {seed}", shards=shards, letters=5)
        self.taken = [back_up(self.harness, self.random, meanwhile=0.1)]
        self._change()
        self.taken.append(back_up(self.harness, self.random, meanwhile=0.1, incremental=True))
        self._change()

    def _change(self) -> None:
        for operation in (one, checkpoint, seqs, seal, checkpoint):
            step(self.harness, self.random, [operation])


def watch(
    disk: SimDisk, act: Callable[[], object], judge: Callable[[SimDisk, str], None], depth: Random, every: int
) -> int:
    """Judge what a power cut or a kill leaves before operations of an act, drawn by chance, and at its end."""
    seen: set[bytes] = set()

    def examine(_: int, *, last: bool = False) -> None:
        if not last and depth.randrange(every):
            return
        disk.on_op = None
        states = [(image.label, image.disk) for image in disk.images(("none", "all", "random"), depth, limit=4)]
        where = disk.trace[-1] if disk.trace else "the start"
        for label, state in [*states, ("kill", disk.reboot())]:
            digest = state.digest()
            if digest not in seen:
                seen.add(digest)
                judge(state, f"after {where}, {label}")
        disk.on_op = examine

    disk.on_op = examine
    try:
        act()
    finally:
        disk.on_op = None
    examine(0, last=True)
    disk.on_op = None
    return len(seen)


def check_source(harness: EngineHarness, state: SimDisk, where: str) -> None:
    wrong = check_crash_state(state.reboot(), harness.oracle, harness.now_ms, harness.shards, thorough=False)
    assert wrong is None, f"{where}: the source: {wrong}"


def check_target(state: SimDisk, present: list[Taken], where: str) -> list[str]:
    """Every listed backup is whole; return the ids."""
    listing = list_backups(TARGET, disk=state)
    assert not listing.unreadable, f"{where}: {listing.unreadable}"
    ids = [info.id for info in listing.backups]
    for taken in present:
        assert taken.info.id in ids, f"{where}: backup {taken.info.id} is gone"
    for backup_id in ids:
        problems = verify_backup(TARGET, backup_id, disk=state).problems
        assert not problems, f"{where}: {backup_id}: {problems}"
    for backup_id in listing.unfinished:
        with pytest.raises((BackupIncomplete, BackupNotFound)):
            restore_backup(TARGET, RESTORED, backup_id=backup_id, disk=state)
    return ids


def cut_then_repeat(state: SimDisk, random: Random, act: Callable[[SimDisk], object]) -> SimDisk:
    """Run an act that the power ends somewhere, then run it again."""
    trial = state.reboot()
    trial.cut_power_at(random.randint(1, 40))
    with suppress(PowerOff, Busy):
        act(trial)
        return trial
    found = trial.crash_image(random)
    act(found)
    return found


@pytest.mark.parametrize("incremental", [False, True])
def test_crash_during_create(incremental: bool) -> None:
    run_create(0, incremental, every=7)


def run_create(seed: int, incremental: bool, every: int) -> None:
    scene = Scene(seed, 1 + seed % 2)
    harness, depth = scene.harness, Random(seed)

    def judge(state: SimDisk, where: str) -> None:
        check_source(harness, state, where)
        check_target(state, scene.taken, where)
        if depth.random() < 0.3:

            def repeat(disk: SimDisk) -> None:
                engine = restored(disk, ManualClock(harness.now_ms * 1000), "data", harness.shards)
                view = read_engine(engine)
                info = create_backup(engine, TARGET, incremental=incremental)
                assert check_target(disk, scene.taken, where)[-1] == info.id
                assert not list_backups(TARGET, disk=disk).unfinished
                restore_backup(TARGET, RESTORED, disk=disk)
                found = read_engine(restored(disk, ManualClock(harness.now_ms * 1000), RESTORED, harness.shards))
                check_view(found, view)

            cut_then_repeat(state, depth, repeat)

    count = watch(
        harness.disk, lambda: create_backup(harness.log, TARGET, incremental=incremental), judge, depth, every
    )
    assert count > 5


def test_crash_during_prune() -> None:
    run_prune(0, every=3)


def run_prune(seed: int, every: int) -> None:
    scene = Scene(f"prune {seed}", 1 + seed % 2)
    newest, depth = scene.taken[-1], Random(seed)

    def prune(disk: SimDisk) -> object:
        return prune_backups(TARGET, keep=1, disk=disk)

    def judge(state: SimDisk, where: str) -> None:
        check_target(state, [newest], where)
        found = cut_then_repeat(state, depth, prune)
        assert check_target(found, [newest], where) == [newest.info.id]
        assert set(found.tree()) == set(clean.tree()), f"{where}: files are left over"

    clean = scene.harness.disk.reboot()
    prune(clean)
    assert watch(scene.harness.disk, lambda: prune(scene.harness.disk), judge, depth, every) > 3


@pytest.mark.parametrize("cut", [False, True])
def test_crash_during_restore(cut: bool) -> None:
    run_restore(0, cut, every=9)


def run_restore(seed: int, cut: bool, every: int) -> None:
    scene = Scene(f"restore {seed}", 1 + seed % 2)
    taken, depth, harness = scene.taken[-1], Random(seed), scene.harness
    to_seq = {name: view.head // 2 for name, view in taken.view.items()} if cut else None

    def restore(disk: SimDisk) -> object:
        return restore_backup(TARGET, RESTORED, backup_id=taken.info.id, disk=disk, to_seq=to_seq)

    def look(disk: SimDisk) -> None:
        found = read_engine(restored(disk, ManualClock(taken.now_ms * 1000), RESTORED, harness.shards))
        if cut:
            assert {name: view.rows for name, view in found.items()} == expected
        else:
            check_view(found, taken.view)

    def judge(state: SimDisk, _: str) -> None:
        names = set(state.list_dir(RESTORED)) - EMPTY if state.stat(RESTORED) is not None else set()
        if names and "RESTORING" not in names:
            look(state.reboot())
            return
        if names:
            with pytest.raises(Damaged, match="unfinished restore"):
                look(state.reboot())
        found = cut_then_repeat(state, depth, restore)
        look(found)

    whole = harness.disk.reboot()
    restore(whole)
    expected = {
        name: view.rows
        for name, view in read_engine(
            restored(whole, ManualClock(taken.now_ms * 1000), RESTORED, harness.shards)
        ).items()
    }
    assert watch(harness.disk, lambda: restore(harness.disk), judge, depth, every) > 5


EMPTY = {".tidelog.lock", "RESTORING.tmp"}


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 13))
def test_crashes_at_every_operation(seed: int) -> None:
    run_create(seed, bool(seed % 2), every=1)
    run_prune(seed, every=1)
    run_restore(seed, bool(seed % 2), every=1)
