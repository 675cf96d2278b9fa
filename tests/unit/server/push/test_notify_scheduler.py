"""Topics take turns on the loop, by the governor's word; on a clock and a loop whose time is moved by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any

import pytest
from tests.unit.server.fakes import FakeSink, JumpingLoop, ServerHarness, let_idle, run_scenario

from tidelog.engine.health import HealthMonitor
from tidelog.http.interface import Response
from tidelog.server.push.notifier import NOTIFY_NOW_WAITERS_MAX, TURN_WAITERS_MAX, NotifyScheduler
from tidelog.server.scheduling.governor import Governor
from tidelog.testing import ManualClock


class Gong:
    """A unit that notes when it was rung."""

    def __init__(self, name: str, log: list[str], *, priority: int = 0, peers: int = 1) -> None:
        self.name, self.priority, self.waiter_count = name, priority, peers
        self.is_fan_out = False
        self.notified_us = -(1 << 62)
        self._log = log

    def deliver(self) -> int:
        self._log.append(self.name)
        return self.waiter_count


class Stage:
    """A pump on a loop of its own, and what weighs on it."""

    def __init__(self) -> None:
        self.clock, self.log = ManualClock(), list[str]()
        self.clock.tick(1_000)
        self.busy, self.ingest = 0, 0.0
        self.governor = Governor(workers=1, threads=2)
        self.health = HealthMonitor("server", lambda: 0)
        loop = asyncio.get_running_loop()
        self.pump = NotifyScheduler(
            loop, self.clock.monotonic_us, self.governor, lambda: (self.busy, self.ingest), self.health
        )

    def gong(self, name: str, **more: Any) -> Gong:
        return Gong(name, self.log, **more)

    async def beats(self, count: int, ingest: float | None = None) -> None:
        """So many samples of the governor."""
        self.ingest = self.ingest if ingest is None else ingest
        self.pump.start_sampling()
        for _ in range(count):
            self.clock.tick(100)
            await asyncio.sleep(0.1)

    async def turns(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


def act(scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        stage = Stage()
        try:
            await scenario(stage)
        finally:
            stage.pump.stop()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())


def test_a_lone_topic_is_told_of_in_the_next_turn() -> None:
    async def scenario(stage: Stage) -> None:
        a = stage.gong("a")
        stage.pump.schedule(a)
        assert stage.log == []
        await stage.turns()
        assert stage.log == ["a"]
        stage.pump.schedule(a)
        await stage.turns()
        assert stage.log == ["a", "a"], "and at once again: there is no window without pressure"

    act(scenario)


def test_few_who_wait_for_a_lone_topic_are_told_before_its_writers() -> None:
    async def scenario(stage: Stage) -> None:
        few, many = (
            stage.gong("few", peers=NOTIFY_NOW_WAITERS_MAX),
            stage.gong("many", peers=NOTIFY_NOW_WAITERS_MAX + 1),
        )
        stage.pump.notify_now()
        assert stage.log == [], "there is nothing to tell"
        stage.pump.schedule(few)
        stage.pump.notify_now()
        assert stage.log == ["few"]
        await stage.turns(2)
        assert stage.log == ["few"], "once"
        stage.pump.schedule(many)
        stage.pump.notify_now()
        assert stage.log == ["few"], "that would keep the writers waiting"
        await stage.turns()
        assert stage.log == ["few", "many"]
        for gong in (few, many):
            stage.pump.schedule(gong)
        stage.pump.notify_now()
        assert stage.log == ["few", "many"], "whose turn it is, is the ready set's word"
        await stage.turns()
        assert stage.log == ["few", "many", "few", "many"]
        stage.pump.schedule(few)
        stage.pump.forget(few)
        stage.pump.notify_now()
        await stage.turns()
        assert len(stage.log) == 4, "nobody waits any more"

    act(scenario)


def test_a_turn_that_is_full_lets_others_in_and_order_is_by_urgency() -> None:
    async def scenario(stage: Stage) -> None:
        low = [stage.gong(f"low{number}", peers=TURN_WAITERS_MAX) for number in range(3)]
        for gong in low:
            stage.pump.schedule(gong)
        await stage.turns()
        assert stage.log == ["low0"], "as many peers as a turn wakes"
        stage.pump.schedule(stage.gong("urgent", priority=900, peers=TURN_WAITERS_MAX))
        await stage.turns()
        assert stage.log == ["low0", "urgent"]
        await stage.turns(2)
        assert stage.log == ["low0", "urgent", "low1", "low2"]

    act(scenario)


def test_a_turn_ends_when_its_time_is_over() -> None:
    async def scenario(stage: Stage) -> None:
        for number in range(4):
            gong = stage.gong(str(number))
            ring = gong.deliver
            gong.deliver = lambda ring=ring: stage.clock.tick(1) or ring()  # type: ignore[method-assign,misc,func-returns-value,redundant-expr]
            stage.pump.schedule(gong)
        await stage.turns()
        assert stage.log == ["0", "1"], "2 ms"
        await stage.turns()
        assert stage.log == ["0", "1", "2", "3"]

    act(scenario)


def test_under_pressure_a_topic_is_left_alone_until_its_window_is_over() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.beats(8, 0.6)
        window_us = stage.governor.notify_delay_us
        assert window_us == pytest.approx(10_000, abs=150)
        a, b = stage.gong("a"), stage.gong("b")
        stage.pump.schedule(a)
        await stage.turns()
        for _ in range(5):
            stage.pump.schedule(a)
        stage.pump.schedule(b)
        await stage.turns(3)
        assert stage.log == ["a", "b"], "another one is not held up by it"
        assert (stage.pump.delayed_count, len(stage.pump.fair_queue)) == (1, 0)
        began_s = asyncio.get_running_loop().time()
        while len(stage.log) == 2:
            await asyncio.sleep(0.001)
        assert stage.log == ["a", "b", "a"], "once for all five"
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(window_us / 1e6, abs=0.002)
        assert stage.pump.delayed_count == 0

    act(scenario)


def test_what_is_held_for_its_window_is_not_late() -> None:
    """Otherwise the window would be the reason for itself."""

    async def scenario(stage: Stage) -> None:
        await stage.beats(8, 0.6)
        a = stage.gong("a")
        stage.pump.schedule(a)
        await stage.turns()
        stage.pump.schedule(a)
        for _ in range(15):
            stage.clock.tick(1)
            await asyncio.sleep(0.001)
        assert stage.log == ["a", "a"]
        assert stage.governor._delay_sum_us <= 1_000, "the step of this clock"

    act(scenario)


def test_one_that_nobody_waits_for_is_not_told_of() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.beats(8, 0.6)
        a, b = stage.gong("a"), stage.gong("b")
        stage.pump.schedule(a)
        await stage.turns()
        stage.pump.schedule(a)  # held
        stage.pump.schedule(b)  # ready
        stage.pump.forget(a)
        stage.pump.forget(b)
        await asyncio.sleep(1)
        assert stage.log == ["a"]

    act(scenario)


def test_low_work_is_deferred_and_comes_back() -> None:
    async def scenario(stage: Stage) -> None:
        low, plain = stage.gong("low", priority=-5), stage.gong("plain")
        await stage.beats(12, 1.0)
        assert stage.governor.is_deferring
        stage.pump.schedule(low)
        stage.pump.schedule(plain)
        await stage.beats(20)
        assert stage.log == ["plain"]
        assert stage.pump.fair_queue.deferred_count == 1
        await stage.beats(1, 0.0)
        assert stage.governor.pressure < 0.6
        await stage.turns(2)
        assert stage.log == ["plain", "low"]
        await stage.beats(12)
        assert stage.governor.is_calm, "a release is no reason for another deferral"

    act(scenario)


def test_nothing_beats_while_nothing_is_going_on() -> None:
    async def scenario(stage: Stage) -> None:
        beating = [stage.pump._sample_timer is not None]
        stage.pump.schedule(stage.gong("a"))
        await stage.turns()
        beating.append(stage.pump._sample_timer is not None)
        await stage.beats(5)
        beating.append(stage.pump._sample_timer is not None)
        assert beating == [False, True, False]
        stage.busy = 1
        stage.pump.start_sampling()
        await stage.beats(5)
        assert stage.pump._sample_timer is not None, "as long as somebody is at work"

    act(scenario)


# Over topics ------------------------------------------------------------------------------------------------


def press(world: ServerHarness, pressure: float, *, deferring: bool = False) -> None:
    """Have the server be pressed, without anybody sampling it."""
    governor = world.service.push.governor
    governor.sample = lambda *_, **__: None  # type: ignore[method-assign]
    governor.pressure = pressure
    governor.notify_delay_us = 0
    if deferring:
        governor.is_deferring = True
        world.service.push.scheduler.fair_queue.defer()


def test_a_deferred_topic_is_not_pushed_and_answers_all_the_same() -> None:
    async def scenario(world: ServerHarness) -> None:
        low, plain = world.topic("low", priority=-1), world.topic("plain")
        tap = FakeSink()
        async with await world.stream(await world.watch({"low": {}, "plain": {}}), tap):
            await tap.until(2)
            press(world, 0.9, deferring=True)
            low.append([1, 2])
            plain.append([3])
            await let_idle(5)
            assert [event.data["topic"] for event in tap.events[2:]] == ["plain", "plain"]
            _, body = await world.ask("POST", "/v0/topics/low/diff", {"from_seq": 0})
            assert [record["$seq"] for record in body["records"]] == [1, 2]
            _, body = await world.ask("POST", "/v0/topics/low/diff", {"from_seq": 0, "wait_ms": 1000})
            assert body["head_seq"] == 2, "a long poll looks before it waits"
            polled = world.begin("POST", "/v0/topics/low/diff", {"from_seq": 2, "wait_ms": 1000})
            low.append([4])
            answer = await polled.answer()
            assert isinstance(answer, Response)
            assert [record["$seq"] for record in json.loads(answer.body)["records"]] == [3], "and at its end again"
            world.service.push.scheduler.fair_queue.resume_deferred(world.clock.monotonic_us())
            world.service.push.scheduler._schedule_turn()
            events = await tap.until(6)
            assert [record["$seq"] for record in events[4].data["records"]] == [1, 2, 3]

    run_scenario(scenario)


def test_the_drop_of_a_deferred_topic_is_told_at_once() -> None:
    async def scenario(world: ServerHarness) -> None:
        low = world.topic("low", priority=-1)
        tap = FakeSink()
        async with await world.stream(await world.watch({"low": {}}), tap) as stream:
            await tap.until(1)
            press(world, 0.9, deferring=True)
            low.append([1])
            await let_idle(1)
            world.engine.drop("low")
            events = await tap.until(2)
            assert [event.event for event in events] == ["caught-up", "topic-deleted"]
            await stream.ended()

    run_scenario(scenario)


def test_a_stop_is_told_to_those_who_follow_deferred_topics() -> None:
    async def scenario(world: ServerHarness) -> None:
        low = world.topic("low", priority=-1)
        tap = FakeSink()
        async with await world.stream(await world.watch({"low": {}}), tap) as stream:
            await tap.until(1)
            press(world, 0.9, deferring=True)
            low.append([1])
            world.service.stop()
            await stream.ended()
        assert tap.events[-1].data["code"] == "server_shutting_down"

    run_scenario(scenario)


def test_bells_that_other_threads_strike_are_heard_once_each() -> None:
    async def scenario(world: ServerHarness) -> None:
        topics = [world.topic(f"t{number}") for number in range(20)]
        heard = [0] * len(topics)
        wakes = []
        for number, topic in enumerate(topics):

            def wake(number: int = number) -> None:
                heard[number] += 1

            wakes.append(wake)
            world.service.push.notifiers.add(topic, wake)

        def write() -> None:
            for topic in topics:
                topic.append([1])
                topic.append([2])

        for times in (1, 2):
            other = Thread(target=write)
            other.start()
            other.join()
            await let_idle(0.01)
            assert heard == [times] * len(topics), "two writes before anybody listened, one ring"
        for topic, wake in zip(topics, wakes, strict=True):
            world.service.push.notifiers.remove(topic, wake)

    run_scenario(scenario)


def test_a_topic_whose_readers_break_keeps_no_other_from_its_turn() -> None:
    async def scenario(stage: Stage) -> None:
        class Broken(Gong):
            def deliver(self) -> int:
                raise ZeroDivisionError("a bug")

        stage.pump.schedule(Broken("x", stage.log))
        stage.pump.schedule(stage.gong("a"))
        stage.pump.schedule(stage.gong("b"))
        await stage.turns(3)
        assert stage.log == ["a", "b"]
        task = stage.health.tasks()[0]
        assert (task.name, task.failures, task.last_error) == ("turns", 1, "ZeroDivisionError: a bug")
        stage.pump.schedule(stage.gong("c"))
        await stage.turns(3)
        assert stage.health.tasks()[0].failing == 0

    act(scenario)


def test_a_beat_that_breaks_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage) -> None:
        beats = list[int]()

        def sample(*_: object, **__: object) -> None:
            beats.append(1)
            if len(beats) < 3:
                raise ZeroDivisionError("a bug")

        monkeypatch.setattr(stage.governor, "sample", sample)
        stage.busy = 1
        await stage.beats(5)
        assert len(beats) >= 4
        assert [(task.name, task.failures, task.failing) for task in stage.health.tasks()] == [("pressure", 2, 0)]

    act(scenario)
