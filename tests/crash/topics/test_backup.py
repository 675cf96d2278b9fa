"""Backups while the engine is in use: what is restored is what readers saw at the position of the backup."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from tests.crash.topics.backups import TARGET, Taken, back_up, check_restored, fill, restored, step
from tests.crash.topics.kill_writer import LIMITS
from tests.crash.topics.oracle import TopicView
from tests.crash.topics.reader import read_engine, read_topic, require
from tests.crash.topics.workloads import OPERATIONS, reopen
from tests.kit import processes

import tidelog
from tidelog import backup
from tidelog.engine.backup_target import list_backups, prune_backups, verify_backup
from tidelog.engine.restore import restore_backup
from tidelog.testing import ManualClock, SimDisk


def run_history(seed: int, shards: int, backups: int = 3) -> None:
    """Several backups, full and incremental; each is restored after all that came later, and after a prune."""
    harness, random = fill(seed, shards=shards)
    taken = []
    for number in range(backups):
        incremental, link = number > 0 and random.random() < 0.7, random.random() < 0.7
        taken.append(back_up(harness, random, incremental=incremental, link=link))
        for _ in range(random.randint(0, 6)):
            step(harness, random, [each for each in OPERATIONS if each is not reopen])
        if random.random() < 0.3:
            reopen(harness, "", random)
    if len(taken) > 2 and random.random() < 0.5:
        gone = taken.pop(0)
        assert gone.info.id in prune_backups(TARGET, keep=len(taken), disk=harness.disk).removed
    assert [info.id for info in list_backups(TARGET, disk=harness.disk).backups] == [each.info.id for each in taken]
    for each in taken:
        assert verify_backup(TARGET, each.info.id, disk=harness.disk).problems == []
        check_restored(harness.disk.reboot(), each, random.randint(1, 3))
    harness.check_all()


@pytest.mark.parametrize("seed", range(4))
def test_restore_shows_what_readers_saw_at_the_position_of_the_backup(seed: int) -> None:
    run_history(seed, 1 + seed % 2, backups=2)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_restores_of_many_histories(seed: int) -> None:
    run_history(seed, 1 + seed % 3, backups=4)


# Point in time ------------------------------------------------------------------------------------------


def restore_at(disk: SimDisk, taken: Taken, shards: int, **cut: object) -> tuple[dict[str, TopicView], dict[str, int]]:
    """What is restored, and the next seq of each topic."""
    result = restore_backup(TARGET, "cut", backup_id=taken.info.id, disk=disk, **cut)  # type: ignore[arg-type]
    engine = restored(disk, ManualClock(taken.now_ms * 1000), "cut", shards)
    require(not engine.report.damage, f"a restore is damaged: {engine.report.damage}")
    view = read_engine(engine)
    for name, head in result.topics.items():
        if not name.startswith("_"):
            require(view[name].head >= head, f"{name}: the result says {head}, the head is {view[name].head}")
    following = {name: engine.topic(name, create=False).append(b"next").first_seq for name in view}
    engine.close()
    again = restored(disk.reboot(), ManualClock(taken.now_ms * 1000), "cut", shards)
    require(not again.report.damage, f"after a restart: {again.report.damage}")
    require(
        all(read_engine(again)[name].head == seq for name, seq in following.items()), "another head after a restart"
    )
    return view, following


def check_cut(found: TopicView, taken: TopicView, kept: set[int], where: str) -> None:
    """Records before the cut are there, and none after it. One that was deleted after the cut may be back."""
    assert found.rows is not None
    assert taken.rows is not None
    expected = {seq: each for seq, each in taken.rows.items() if seq in kept}
    assert expected.items() <= found.rows.items(), f"{where}: {sorted(found.rows)}, not {sorted(expected)}"
    late = [seq for seq in found.rows if seq in taken.rows and seq not in kept]
    assert not late, f"{where}: {late} are after the cut"


def run_cut(seed: int, shards: int) -> None:
    harness, random = fill(f"cut {seed}", shards=shards)
    taken = back_up(harness, random)
    for name in [name for name, view in taken.view.items() if view.head]:
        view = taken.view[name]
        assert view.rows is not None
        seq = random.randint(max(0, view.head - 12), view.head)
        found, following = restore_at(harness.disk.reboot(), taken, random.randint(1, 3), to_seq={name: seq})
        assert following[name] == seq + 1 or seq == view.head, f"{name} up to {seq} goes on with {following[name]}"
        check_cut(found[name], view, {each for each in view.rows if each <= seq}, f"{name} up to {seq}")
        for other in taken.view.keys() - {name}:
            assert found[other].rows == taken.view[other].rows, f"{other} was changed by a cut of {name}"
    times = sorted({each.ts_ms for view in taken.view.values() for each in (view.rows or {}).values()})
    for ts_ms in random.sample(times, min(3, len(times))):
        found, _ = restore_at(harness.disk.reboot(), taken, random.randint(1, 3), to_time_ms=ts_ms)
        for name, view in taken.view.items():
            assert view.rows is not None
            kept = {seq for seq, each in view.rows.items() if each.ts_ms <= ts_ms}
            assert name in found or not kept, f"{name} is missing at {ts_ms}"
            if name in found:
                check_cut(found[name], view, kept, f"{name} at {ts_ms}")


@pytest.mark.parametrize("seed", range(4))
def test_restore_up_to_a_seq_or_a_time_has_exactly_the_records_before_it(seed: int) -> None:
    run_cut(seed, 1 + seed % 2)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_cuts_of_many_histories(seed: int) -> None:
    run_cut(seed, 1 + seed % 3)


# Real processes -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.sweep)])
def test_a_process_that_is_killed_during_a_backup_harms_neither_source_nor_target(rounds: int, tmp_path: Path) -> None:
    """Method: a child writes and makes one backup after the other; kill it after a number of lines drawn by chance.
    Every backup that it said is whole, every acked record is in the source, and the next child goes on."""
    path, target, random = str(tmp_path / "data"), str(tmp_path / "target"), Random(rounds)
    made: dict[str, int] = {}
    for spin in range(rounds):
        last, said = kill_backups(path, target, spin, lines=random.randint(30, 200))
        made |= said
        with tidelog.open(path, **LIMITS) as db:
            assert not db.report.damage
            assert db.topic("f").head_seq >= last
        listing = backup.list_backups(target)
        assert not listing.unreadable
        assert made.keys() <= {info.id for info in listing.backups}
    for info in backup.list_backups(target).backups[-3:]:
        assert backup.verify(target, info.id).problems == []
    chosen = max(made)
    backup.restore(target, str(tmp_path / "restored"), backup_id=chosen)
    with tidelog.open(path, **LIMITS) as db, tidelog.open(str(tmp_path / "restored"), **LIMITS) as copy:
        assert not copy.report.damage
        kept, found = read_topic(db.topic("f")).rows, read_topic(copy.topic("f")).rows
        assert kept is not None
        assert found is not None
        assert {seq: each for seq, each in kept.items() if seq <= made[chosen]}.items() <= found.items()
        db.backup(target, incremental=True)
        assert not backup.list_backups(target).unfinished


def kill_backups(path: str, target: str, spin: int, *, lines: int) -> tuple[int, dict[str, int]]:
    """Run the child and kill it after so many lines; the last acked seq, and the backups that it said."""
    command = [sys.executable, "-m", "tests.crash.topics.backup_process", path, target, str(spin)]
    heard = processes.run_until_killed(
        command, lambda heard: len(heard) >= lines and any(each.startswith(b"B") for each in heard)
    )
    words = [line.decode().split() for line in heard]
    acked = [int(word[2]) for word in words if word[0] == "A"]
    return max(acked, default=0), {word[1]: int(word[2]) for word in words if word[0] == "B"}
