"""A background checkpoint pauses for writers, until it lags or a caller waits for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

import pytest
from tests.unit.engine.harness import TIMEOUT_S, EngineHarness

import tidelog
from tidelog.engine import background
from tidelog.engine.background import UrgentFlag
from tidelog.engine.topic import topic_operations
from tidelog.testing import ManualClock, SimDisk

MIB = 1 << 20
LONG_US = 3_600_000_000


@pytest.mark.parametrize(
    ("took_us", "written", "uncovered", "rest_us"),
    [
        (1000, MIB, MIB, 3000),
        (1000, 1, 192 * MIB - 1, 3000),
        (1000, 1, 192 * MIB, 0),  # three times checkpoint_bytes: it must not lag further
        (1000, 0, MIB, 0),  # no writes meanwhile
        (50_000, MIB, MIB, 20_000),  # long enough for anybody who waits for a sync
        (0, MIB, MIB, 0),
    ],
)
def test_how_long_it_rests(took_us: int, written: int, uncovered: int, rest_us: int) -> None:
    assert background.pause_us(took_us, written, uncovered, 64 * MIB) == rest_us


def test_pause_depends_on_the_step_and_on_concurrent_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: segments of two records, so that each is a step; a write happens during the first pause."""
    world = EngineHarness(segment_events_max=2, checkpoint_bytes=1)
    topic = world.log.topic("a")
    asked: list[tuple[int, int, int, int]] = []

    def rest_us(took_us: int, written: int, uncovered: int, trigger: int) -> int:
        if not asked:
            world.clock.tick(7)
            topic.append([b"y", b"z"])
        asked.append((took_us, written, uncovered, trigger))
        return 0

    def written() -> int:
        return topic_operations(topic).shard.stats.bytes

    monkeypatch.setattr(background, "pause_us", rest_us)
    for _ in range(3):
        topic.append([b"x", b"y"])
    first = written()
    world.log.tick()
    assert asked[0] == (0, 0, first, 1)
    assert asked[1][0] == 0, "the rest itself is no step"
    assert 0 < asked[1][1] == asked[1][2] - first
    assert asked[2] == (0, 0, asked[1][2], 1)
    del asked[1:]
    topic.append([b"y", b"z"])
    second = written()
    world.log.tick()
    assert len(asked) > 2
    assert {step[2] for step in asked[1:]} == {second - first}, "what the first one covers counts no more"


def test_frames_written_during_a_checkpoint_make_the_next_one_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a write during the first pause, and none after it."""
    world = EngineHarness(segment_events_max=2, checkpoint_bytes=1, checkpoint_ms=1000)
    topic = world.log.topic("a")
    pauses: list[int] = []

    def pause_us(*_: int) -> int:
        pauses.append(world.clock.monotonic_ms())
        if len(pauses) == 1:
            topic.append([b"written during the checkpoint"] * 4)
        return 0

    monkeypatch.setattr(background, "pause_us", pause_us)
    topic.append([b"x"] * 4)
    world.log.tick()
    first = len(pauses)
    assert first
    world.clock.tick(1000)
    world.log.tick()
    assert len(pauses) > first
    second = len(pauses)
    world.clock.tick(1000)
    world.log.tick()
    assert len(pauses) == second, "every frame is covered"


def test_close_covers_frames_written_during_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, topic = SimDisk(), "a"
    with tidelog.open("data", disk=disk, clock=ManualClock(), wal_shards=1, segment_events_max=2, threads=False) as log:
        pending = [b"written during the checkpoint"]

        def pause_us(*_: int) -> int:
            while pending:
                log.topic(topic).append([pending.pop()])
            return 0

        monkeypatch.setattr(background, "pause_us", pause_us)
        log.topic(topic).append([b"x"] * 4)
        log.checkpoint()
        assert not pending
    with tidelog.open("data", disk=disk, clock=ManualClock(), wal_shards=1, segment_events_max=2, threads=False) as log:
        assert log.report.frames == 0
        assert log.topic(topic).head_seq == 5


def test_who_is_in_a_hurry_ends_every_rest_and_there_may_be_two() -> None:
    hurry, rested = UrgentFlag(), list[str]()
    with hurry:
        with hurry:
            hurry.wait(LONG_US)
        hurry.wait(LONG_US)
    hurry.wait(1)

    def sleep() -> None:
        hurry.wait(LONG_US)
        rested.append("long enough")

    sleeper = Thread(target=sleep, daemon=True)
    sleeper.start()
    sleeper.join(0.01)
    assert not rested, "no thread is inside any more"
    with hurry:
        sleeper.join(TIMEOUT_S)
    assert rested == ["long enough"]


@pytest.mark.parametrize("ask", [tidelog.Database.checkpoint, tidelog.Database.close])
def test_checkpoint_and_close_do_not_wait_for_one_that_pauses(
    ask: Callable[[tidelog.Database], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: the thread's own checkpoint rests for an hour."""
    resting = Event()

    def rest_us(*_: int) -> int:
        resting.set()
        return LONG_US

    monkeypatch.setattr(background, "pause_us", rest_us)
    with tidelog.open(
        "data",
        disk=SimDisk(),
        clock=ManualClock(),
        wal_shards=1,
        wal_file_bytes=1 << 14,
        sync_interval_ms=1,
        checkpoint_bytes=1,
        segment_events_max=2,
    ) as log:
        log.topic("a").append([b"x"] * 4)
        assert resting.wait(TIMEOUT_S)
        asking = Thread(target=ask, args=(log,), daemon=True)
        asking.start()
        asking.join(TIMEOUT_S)
        assert not asking.is_alive()
