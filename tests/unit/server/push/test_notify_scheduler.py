"""The notification scheduler on a manual clock and a loop whose time is moved by the test."""

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
from tidelog.server.push.scheduling import Governor
from tidelog.testing import ManualClock


class FakeUnit:
    """A unit that records its deliveries."""

    def __init__(self, name: str, log: list[str], *, priority: int = 0, peers: int = 1) -> None:
        self.name, self.priority, self.waiter_count = name, priority, peers
        self.is_fan_out = False
        self.notified_us = -(1 << 62)
        self._log = log

    def deliver(self) -> int:
        self._log.append(self.name)
        return self.waiter_count


class SchedulerHarness:
    """A scheduler on a loop of its own, with a fake load."""

    def __init__(self) -> None:
        self.clock, self.log = ManualClock(), list[str]()
        self.clock.tick(1_000)
        self.busy, self.ingest = 0, 0.0
        self.governor = Governor(workers=1, threads=2)
        self.health = HealthMonitor("server", lambda: 0)
        loop = asyncio.get_running_loop()
        self.scheduler = NotifyScheduler(
            loop, self.clock.monotonic_us, self.governor, lambda: (self.busy, self.ingest), self.health
        )

    def unit(self, name: str, **more: Any) -> FakeUnit:
        return FakeUnit(name, self.log, **more)

    async def samples(self, count: int, ingest: float | None = None) -> None:
        """Let the governor take samples."""
        self.ingest = self.ingest if ingest is None else ingest
        self.scheduler.start_sampling()
        for _ in range(count):
            self.clock.tick(100)
            await asyncio.sleep(0.1)

    async def turns(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


def run_with_scheduler(scenario: Callable[[SchedulerHarness], Awaitable[None]]) -> None:
    async def run() -> None:
        harness = SchedulerHarness()
        try:
            await scenario(harness)
        finally:
            harness.scheduler.stop()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())


def test_single_topic_is_notified_in_the_next_turn() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        a = harness.unit("a")
        harness.scheduler.schedule(a)
        assert harness.log == []
        await harness.turns()
        assert harness.log == ["a"]
        harness.scheduler.schedule(a)
        await harness.turns()
        assert harness.log == ["a", "a"], "again at once: there is no delay without pressure"

    run_with_scheduler(scenario)


def test_few_readers_of_a_single_topic_are_notified_before_its_writers() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        few, many = (
            harness.unit("few", peers=NOTIFY_NOW_WAITERS_MAX),
            harness.unit("many", peers=NOTIFY_NOW_WAITERS_MAX + 1),
        )
        harness.scheduler.notify_now()
        assert harness.log == [], "no topic is ready"
        harness.scheduler.schedule(few)
        harness.scheduler.notify_now()
        assert harness.log == ["few"]
        await harness.turns(2)
        assert harness.log == ["few"], "once"
        harness.scheduler.schedule(many)
        harness.scheduler.notify_now()
        assert harness.log == ["few"], "that would delay the writers"
        await harness.turns()
        assert harness.log == ["few", "many"]
        for unit in (few, many):
            harness.scheduler.schedule(unit)
        harness.scheduler.notify_now()
        assert harness.log == ["few", "many"], "the order is the fair queue's"
        await harness.turns()
        assert harness.log == ["few", "many", "few", "many"]
        harness.scheduler.schedule(few)
        harness.scheduler.forget(few)
        harness.scheduler.notify_now()
        await harness.turns()
        assert len(harness.log) == 4, "it has no readers"

    run_with_scheduler(scenario)


def test_full_turn_yields_and_topics_are_served_by_priority() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        low = [harness.unit(f"low{number}", peers=TURN_WAITERS_MAX) for number in range(3)]
        for unit in low:
            harness.scheduler.schedule(unit)
        await harness.turns()
        assert harness.log == ["low0"], "as many readers as a turn notifies"
        harness.scheduler.schedule(harness.unit("urgent", priority=900, peers=TURN_WAITERS_MAX))
        await harness.turns()
        assert harness.log == ["low0", "urgent"]
        await harness.turns(2)
        assert harness.log == ["low0", "urgent", "low1", "low2"]

    run_with_scheduler(scenario)


def test_turn_ends_when_its_time_is_over() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        for number in range(4):
            unit = harness.unit(str(number))
            deliver = unit.deliver
            unit.deliver = lambda deliver=deliver: harness.clock.tick(1) or deliver()  # type: ignore[method-assign,misc,func-returns-value,redundant-expr]
            harness.scheduler.schedule(unit)
        await harness.turns()
        assert harness.log == ["0", "1"], "2 ms"
        await harness.turns()
        assert harness.log == ["0", "1", "2", "3"]

    run_with_scheduler(scenario)


def test_under_pressure_a_topic_is_delayed_after_a_notification() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        await harness.samples(8, 0.6)
        delay_us = harness.governor.notify_delay_us
        assert delay_us == pytest.approx(10_000, abs=150)
        a, b = harness.unit("a"), harness.unit("b")
        harness.scheduler.schedule(a)
        await harness.turns()
        for _ in range(5):
            harness.scheduler.schedule(a)
        harness.scheduler.schedule(b)
        await harness.turns(3)
        assert harness.log == ["a", "b"], "another topic is not delayed by it"
        assert (harness.scheduler.delayed_count, len(harness.scheduler.fair_queue)) == (1, 0)
        began_s = asyncio.get_running_loop().time()
        while len(harness.log) == 2:
            await asyncio.sleep(0.001)
        assert harness.log == ["a", "b", "a"], "once for all five"
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(delay_us / 1e6, abs=0.002)
        assert harness.scheduler.delayed_count == 0

    run_with_scheduler(scenario)


def test_delay_of_a_topic_does_not_count_as_latency() -> None:
    """Otherwise the delay would be the reason for itself."""

    async def scenario(harness: SchedulerHarness) -> None:
        await harness.samples(8, 0.6)
        a = harness.unit("a")
        harness.scheduler.schedule(a)
        await harness.turns()
        harness.scheduler.schedule(a)
        for _ in range(15):
            harness.clock.tick(1)
            await asyncio.sleep(0.001)
        assert harness.log == ["a", "a"]
        assert harness.governor._delay_sum_us <= 1_000, "the step of this clock"

    run_with_scheduler(scenario)


def test_forgotten_topic_is_not_notified() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        await harness.samples(8, 0.6)
        a, b = harness.unit("a"), harness.unit("b")
        harness.scheduler.schedule(a)
        await harness.turns()
        harness.scheduler.schedule(a)  # delayed
        harness.scheduler.schedule(b)  # ready
        harness.scheduler.forget(a)
        harness.scheduler.forget(b)
        await asyncio.sleep(1)
        assert harness.log == ["a"]

    run_with_scheduler(scenario)


def test_low_priority_topics_are_deferred_and_resumed() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        low, plain = harness.unit("low", priority=-5), harness.unit("plain")
        await harness.samples(12, 1.0)
        assert harness.governor.is_deferring
        harness.scheduler.schedule(low)
        harness.scheduler.schedule(plain)
        await harness.samples(20)
        assert harness.log == ["plain"]
        assert harness.scheduler.fair_queue.deferred_count == 1
        await harness.samples(1, 0.0)
        assert harness.governor.pressure < 0.6
        await harness.turns(2)
        assert harness.log == ["plain", "low"]
        await harness.samples(12)
        assert harness.governor.is_calm, "resuming is no reason for another deferral"

    run_with_scheduler(scenario)


def test_idle_scheduler_takes_no_samples() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        has_timer = [harness.scheduler._sample_timer is not None]
        harness.scheduler.schedule(harness.unit("a"))
        await harness.turns()
        has_timer.append(harness.scheduler._sample_timer is not None)
        await harness.samples(5)
        has_timer.append(harness.scheduler._sample_timer is not None)
        assert has_timer == [False, True, False]
        harness.busy = 1
        harness.scheduler.start_sampling()
        await harness.samples(5)
        assert harness.scheduler._sample_timer is not None, "while a call is in the pool"

    run_with_scheduler(scenario)


# Over topics ------------------------------------------------------------------------------------------------


def press(world: ServerHarness, pressure: float, *, deferring: bool = False) -> None:
    """Set the pressure of the server and stop its samples."""
    governor = world.service.push.governor
    governor.sample = lambda *_, **__: None  # type: ignore[method-assign]
    governor.pressure = pressure
    governor.notify_delay_us = 0
    if deferring:
        governor.is_deferring = True
        world.service.push.scheduler.fair_queue.defer()


def test_deferred_topic_is_not_pushed_but_can_be_read() -> None:
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
            assert body["head_seq"] == 2, "a long poll reads before it waits"
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


def test_drop_of_a_deferred_topic_is_delivered_at_once() -> None:
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


def test_stop_reaches_followers_of_deferred_topics() -> None:
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


def test_notifications_from_other_threads_are_delivered_once_each() -> None:
    async def scenario(world: ServerHarness) -> None:
        topics = [world.topic(f"t{number}") for number in range(20)]
        notified_counts = [0] * len(topics)
        wakes = []
        for number, topic in enumerate(topics):

            def wake(number: int = number) -> None:
                notified_counts[number] += 1

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
            assert notified_counts == [times] * len(topics), "two writes before the turn, one notification"
        for topic, wake in zip(topics, wakes, strict=True):
            world.service.push.notifiers.remove(topic, wake)

    run_scenario(scenario)


def test_error_of_one_topics_readers_does_not_stop_the_turn() -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        class Broken(FakeUnit):
            def deliver(self) -> int:
                raise ZeroDivisionError("a bug")

        harness.scheduler.schedule(Broken("x", harness.log))
        harness.scheduler.schedule(harness.unit("a"))
        harness.scheduler.schedule(harness.unit("b"))
        await harness.turns(3)
        assert harness.log == ["a", "b"]
        task = harness.health.tasks()[0]
        assert (task.name, task.failures, task.last_error) == ("turns", 1, "ZeroDivisionError: a bug")
        harness.scheduler.schedule(harness.unit("c"))
        await harness.turns(3)
        assert harness.health.tasks()[0].failing == 0

    run_with_scheduler(scenario)


def test_sampling_continues_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(harness: SchedulerHarness) -> None:
        samples = list[int]()

        def sample(*_: object, **__: object) -> None:
            samples.append(1)
            if len(samples) < 3:
                raise ZeroDivisionError("a bug")

        monkeypatch.setattr(harness.governor, "sample", sample)
        harness.busy = 1
        await harness.samples(5)
        assert len(samples) >= 4
        assert [(task.name, task.failures, task.failing) for task in harness.health.tasks()] == [("pressure", 2, 0)]

    run_with_scheduler(scenario)
