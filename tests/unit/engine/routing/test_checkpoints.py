"""Copies that come while a checkpoint is at work: rows, segments and what a source keeps must fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.engine.harness import TINY, EngineHarness
from tests.unit.engine.routing.test_forwarder import rows

from tidelog.engine import checkpoint
from tidelog.engine.routing import manager
from tidelog.engine.topic_state import TopicState

Patch = pytest.MonkeyPatch


def interrupted(patch: Patch, *, first: str) -> EngineHarness:
    """A checkpoint of a and b during which a gets records, b their copies, and a lets go of them: between the
    writing and the row of each topic, and between the topics. `first` is the one that was made first."""
    world = EngineHarness(**TINY)
    for name in (first, "b" if first == "a" else "a"):
        world.log.topic(name, durability="fsync", cap_records=3 if name == "a" else 0)
    world.log.router("r", "a", "b")
    world.log.topic("a").append(["begin"])
    rows(world.log, "b")
    real, number = checkpoint._build_topic_row, iter(range(1000))

    def busy() -> None:
        for _ in range(9):
            world.log.topic("a").append(next(number))
            rows(world.log, "b")
        world.log.topic("b").append(f"direct {next(number)}")
        world.log.topic("a").append(next(number))

    def stock(core: TopicState, *, final: bool) -> Any:
        busy()
        found = real(core, final=final)
        busy()
        return found

    with patch.context() as while_it_runs:
        while_it_runs.setattr(checkpoint, "_build_topic_row", stock)
        for _ in range(2):
            world.log.checkpoint()
            busy()
    return world


def check(world: EngineHarness) -> None:
    before = rows(world.log, "b")
    state = world.log.find_router("r")
    assert len(before) > 100
    for keep in ("none", "all"):
        log = world.crash(keep)
        assert not log.report.damage
        assert rows(log, "b") == before
        assert log.find_router("r") == state
    log = world.restart("reopen")
    assert rows(log, "b") == before
    log.topic("a").append("end")
    assert [data for _, data in rows(log, "b")][-1] == "end"


@pytest.mark.parametrize("first", ["a", "b"])
def test_copies_made_during_a_checkpoint_are_recovered(first: str, monkeypatch: Patch) -> None:
    check(interrupted(monkeypatch, first=first))


@pytest.mark.parametrize("first", ["a", "b"])
def test_recovery_works_from_the_previous_manifest(first: str, monkeypatch: Patch) -> None:
    """Where the newest does not read, the one before it and a longer replay come to the same copies."""
    world = interrupted(monkeypatch, first=first)
    before = rows(world.log, "b")
    disk = world.disk.crash_image("none")
    newest = max(name for name in disk.tree() if name.startswith("data/meta/delta."))
    disk.flip_bit(newest, 30, 3)
    log = world.open(disk)
    assert log.report.snapshots_skipped
    assert rows(log, "b") == before


def a_row_has_numbers_of_later_frames(patch: Patch) -> None:
    real = checkpoint._build_topic_row

    def stock(core: TopicState, *, final: bool) -> Any:
        if core.forwarder_snapshot is not None:
            core.forwarder_snapshot = replace(core.forwarder_snapshot, applied_router_frame=core.applied_router_frame)
        return real(core, final=final)

    patch.setattr(checkpoint, "_build_topic_row", stock)


def a_row_has_numbers_of_earlier_frames(patch: Patch) -> None:
    real = manager.snapshot_forwarder

    def freeze(core: TopicState) -> None:
        real(core)
        if core.forwarder_snapshot is not None:
            core.forwarder_snapshot = replace(
                core.forwarder_snapshot, applied_router_frame=max(core.forwarder_snapshot.applied_router_frame - 1, 0)
            )

    patch.setattr(manager, "snapshot_forwarder", freeze)


@pytest.mark.parametrize("bug", [a_row_has_numbers_of_later_frames, a_row_has_numbers_of_earlier_frames])
def test_these_tests_can_fail(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        check(interrupted(monkeypatch, first="b"))
