"""Queues over HTTP where time matters: windows, workers, slow peers, on a loop whose time jumps and a clock that goes
with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from threading import Event as ThreadEvent
from typing import Any

import pytest
from tests.unit.server import fakes
from tests.unit.server.fakes import FakeExchange, LoopClock, RunningStream, ServerHarness, let_idle

from tidelog.engine.queues import ClaimRequest, ClaimResult, Queue
from tidelog.engine.queues.queue import QueueOperations, operations_of
from tidelog.errors import DiskFull
from tidelog.http.interface import Response, Stream
from tidelog.server.handlers import sse
from tidelog.server.push import claim_queue
from tidelog.server.push.peers import CLOSE_AFTER_S, HIGH_WATER_BYTES, WARN_AFTER_S, SlowConsumer

LONG_MS = 3_000_000


class Tap(fakes.FakeSink):
    """A sink of a worker's stream: an id is a seq there."""

    async def until(self, count: int) -> Any:
        """So many jobs have come."""
        await self._until(lambda: self._events >= count)


def play(scenario: Callable[[ServerHarness], Awaitable[None]], **settings: Any) -> None:
    fakes.run_scenario(scenario, clock=LoopClock(), **settings)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def queue_of(world: ServerHarness, name: str = "q", **config: Any) -> Queue:
    found: Queue = world.engine.queue(name, **{"lease_ms": LONG_MS, **config})
    return found


@asynccontextmanager
async def working(
    world: ServerHarness, tap: Tap, queue: str = "q", node: str = "w", **query: Any
) -> AsyncIterator[RunningStream]:
    more = "".join(f"&{name}={value}" for name, value in query.items())
    answer = await world.begin("GET", f"/v0/topics/{queue}/work?node={node}{more}").answer()
    assert isinstance(answer, Stream), answer
    async with RunningStream(answer.run(tap)) as running:
        await asyncio.sleep(0)
        yield running


def jobs(tap: Tap) -> list[int]:
    """The seqs that came, frame by frame."""
    return [int(frame.split(b"\n")[0][4:]) for frame in tap.frames if frame.startswith(b"id: ")]


async def claim(world: ServerHarness, queue: str = "q", node: str = "n", **body: Any) -> list[int]:
    status, said = await world.ask("POST", f"/v0/topics/{queue}/claim", {"node": node, **body})
    assert status == 200, said
    return [job["$seq"] for job in said["claimed"]]


async def settle(world: ServerHarness, verb: str, *seqs: int, node: str = "w", **body: Any) -> Any:
    status, said = await world.ask("POST", f"/v0/topics/q/{verb}", {"node": node, "seqs": seqs, **body})
    assert status == 200, said
    return said


async def until(true: Callable[[], bool]) -> None:
    """Let everybody go on until it is true; a thread may be part of it, so time does not jump meanwhile."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it never was"
        await asyncio.sleep(0)


class Passes:
    """What claim passes were made: how many claimers each had, and how many jobs they were handed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.given: list[int] = []
        plain = QueueOperations.claim_for_all

        def claim_now(queue: QueueOperations, wants: Sequence[ClaimRequest]) -> list[ClaimResult]:
            got = plain(queue, wants)
            self.sizes.append(len(wants))
            self.given.append(sum(leased.count for leased in got))
            return got

        monkeypatch.setattr(QueueOperations, "claim_for_all", claim_now)


# ── windows ───────────────────────────────────────────────────────────────────────────────────


def test_a_window_is_as_long_as_it_says_from_its_first_claimer_on() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue_of(world, claim_jitter_ms=500).put(list(range(9)))
        loop = asyncio.get_running_loop()
        began = now_s()
        first = loop.create_task(claim(world, node="a", max=2))
        await asyncio.sleep(0.4)
        second = loop.create_task(claim(world, node="b", max=100))
        assert await first == [1, 3]
        assert now_s() - began == pytest.approx(0.5, abs=0.002), "the second does not make it longer"
        assert await second == [2, 4, 5, 6, 7, 8, 9]
        assert await claim(world) == []
        assert now_s() - began == pytest.approx(1.0, abs=0.004), "and the next one opens another"

    play(scenario)


def test_client_that_leaves_a_window_leaves_no_other_waiting() -> None:
    """D2: the first of three goes, then the last; the one in between gets all there is, at the window's end."""

    async def scenario(world: ServerHarness) -> None:
        queue_of(world, claim_jitter_ms=500).put(list(range(4)))
        body = {"node": "n", "max": 10}
        asked = [world.begin("POST", "/v0/topics/q/claim", body) for _ in range(3)]
        began = now_s()
        await asyncio.sleep(0.1)
        asked[0].leave()
        await asyncio.sleep(0.1)
        asked[2].leave()
        answer = await asked[1].answer()
        assert isinstance(answer, Response)
        assert json.loads(answer.body)["count"] == 4
        assert now_s() - began == pytest.approx(0.5, abs=0.002)

    play(scenario)


@pytest.mark.parametrize("warm", [True, False])
def test_each_of_a_window_keeps_its_own_lease(*, warm: bool) -> None:
    """D2: also where the pass needs no disk."""

    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world, claim_jitter_ms=500)
        if warm:
            queue.put(["first"])
            assert await claim(world) == [1]
            await settle(world, "ack", 1, node="n")
        assert operations_of(queue).can_claim_without_blocking(2) == warm
        queue.put([1, 2])
        bodies = [{"node": f"n{lease_ms}", "lease_ms": lease_ms} for lease_ms in (1_000, 50_000)]
        asked = [world.begin("POST", "/v0/topics/q/claim", body) for body in bodies]
        answers = [await each.answer() for each in asked]
        now_ms = world.clock.now_us() // 1000
        found = [json.loads(answer.body)["claimed"][0] for answer in answers if isinstance(answer, Response)]
        assert [job["deadline"] - now_ms for job in found] == [1_000, 50_000]

    play(scenario)


def test_a_window_that_everybody_left_claims_nothing() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world, claim_jitter_ms=500)
        queue.put([1, 2])
        asked = world.begin("POST", "/v0/topics/q/claim", {"node": "n", "max": 10})
        await asyncio.sleep(0.1)
        asked.leave()
        await let_idle()
        assert queue.counts()[:2] == (2, 0)
        began = now_s()
        assert await claim(world) == [1]
        assert now_s() - began == pytest.approx(0.5, abs=0.002), "a window of its own"

    play(scenario)


def test_a_stop_ends_a_window_at_once() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue_of(world, claim_jitter_ms=5_000).put([1])
        asked = world.begin("POST", "/v0/topics/q/claim", {"node": "n"})
        await asyncio.sleep(0.1)
        world.service.stop()
        answer = await asked.answer()
        assert isinstance(answer, Response)
        assert json.loads(answer.body)["count"] == 1
        assert now_s() < 0.2

    play(scenario)


# ── workers ───────────────────────────────────────────────────────────────────────────────────


def test_a_thousand_idle_workers_cost_one_pass_for_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one look each: only as many take part as there are jobs, and they take turns."""
    passes = Passes(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world)
        queue.put(["warm"])
        assert await claim(world) == [1]  # ids are on record from here on
        taps = [Tap() for _ in range(1_000)]
        streams = [working(world, tap, node=f"w{number}") for number, tap in enumerate(taps)]
        for stream in streams:
            await stream.__aenter__()
        await let_idle(0.01)
        passes.sizes.clear()
        for seq in range(2, 7):
            status, _ = await world.ask("POST", "/v0/topics/q", {"records": [{"data": seq}]})
            assert status == 200
            await let_idle(0.01)
        assert passes.sizes == [1] * 5
        assert [jobs(tap) for tap in taps[:6]] == [[2], [3], [4], [5], [6], []], "in the order they came"
        for stream in streams:
            await stream.__aexit__(None, None, None)
        assert queue.counts()[:2] == (5, 1)

    play(scenario, max_sse_connections=0)


def test_a_worker_waits_for_time_and_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """§3.11: a lease that runs out in ten minutes is handed on one millisecond behind its deadline, and in between
    nobody looks more often than once a minute."""
    passes = Passes(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world)
        queue.put(["job"])
        assert await claim(world, lease_ms=600_000) == [1]
        began, tap = now_s(), Tap()
        looks = 0
        plain = Queue.counts

        def counts(queue: Queue) -> Any:
            nonlocal looks
            looks += 1
            return plain(queue)

        monkeypatch.setattr(Queue, "counts", counts)
        async with working(world, tap):
            await tap.until(1)
            assert now_s() - began == pytest.approx(600.001, abs=0.002)
            assert looks <= 15
            assert passes.sizes == [1, 1]
            assert tap.frames[-1].count(b'"deliveries":2') == 1
        monkeypatch.setattr(Queue, "counts", plain)

    play(scenario)


def test_heartbeats_come_when_nothing_else_did() -> None:
    """§3.11: every 15 seconds; a job puts the next one off."""

    async def scenario(world: ServerHarness) -> None:
        queue, tap = queue_of(world), Tap()
        async with working(world, tap):
            await asyncio.sleep(14.9)
            assert tap.frames == [b"retry: 2000\n\n"]
            await asyncio.sleep(0.2)
            (beat,) = tap.frames[1:]
            assert beat == b": hb %d\n\n" % (world.clock.now_us() // 1000 - 100)
            await asyncio.sleep(10)
            queue.put(["job"])
            await tap.until(1)
            await asyncio.sleep(14.9)
            assert len(tap.frames) == 3
            await asyncio.sleep(0.2)
            assert tap.frames[3].startswith(b": hb ")

    play(scenario)


def test_peer_that_reads_nothing_is_disconnected_and_its_jobs_are_released() -> None:
    """What it has leased and not taken is bounded, however many it may hold."""

    async def scenario(world: ServerHarness) -> None:
        queue, tap = queue_of(world), Tap()
        tap.stuck = True
        queue.put(["x" * 100_000] * 200)
        running: RunningStream
        async with working(world, tap, max=1_000) as running:
            await let_idle(1)
            assert HIGH_WATER_BYTES < tap.pending_bytes < HIGH_WATER_BYTES + 32 * 101_000, (
                "one small pass, and no second"
            )
            held = queue.counts().in_flight
            assert held == 32
            await let_idle(WARN_AFTER_S)
            assert b'"code":429' in tap.frames[-1]
            with pytest.raises(SlowConsumer):
                await running.ended()
        assert now_s() == pytest.approx(CLOSE_AFTER_S, abs=2)
        assert queue.counts()[:2] == (200, 0)

    play(scenario)


def test_a_peer_that_takes_again_gets_the_rest_in_passes_of_about_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        queue, tap = queue_of(world), Tap()
        queue.put(["x" * 100_000] * 100)
        async with working(world, tap, max=100):
            await tap.until(100)
            assert jobs(tap) == list(range(1, 101))
            assert passes.given[0] == 32
            assert set(passes.given[1:-1]) == {10}
            assert queue.counts()[:2] == (0, 100)

    play(scenario)


def test_small_jobs_come_in_large_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        queue, tap = queue_of(world), Tap()
        queue.put([1] * 1_000)
        async with working(world, tap, max=1_000):
            await tap.until(1_000)
            assert passes.given == [32, 968]

    play(scenario)


def test_a_stop_does_not_wait_for_a_peer_that_takes_nothing() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue, tap = queue_of(world), Tap()
        tap.stuck = True
        queue.put(["x" * 100_000] * 10)
        async with working(world, tap, max=1_000) as running:
            await let_idle(1)
            world.service.stop()
            await running.ended()
            assert now_s() < 1.1
            assert b"server_shutting_down" in tap.frames[-1]
        assert queue.counts()[:2] == (10, 0)

    play(scenario)


def test_a_worker_that_comes_while_the_server_stops_is_sent_away() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue_of(world).put([1])
        world.service.stop()
        tap = Tap()
        async with working(world, tap) as running:
            await running.ended()
        assert [frame[:12] for frame in tap.frames] == [b"retry: 2000\n", b"event: error"]

    play(scenario)


def test_a_stream_that_is_asked_for_by_head_holds_nothing() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue_of(world)
        answer = await world.begin("HEAD", "/v0/topics/q/work?node=n").answer()
        assert isinstance(answer, Response)
        assert (answer.status, answer.content_type) == (200, b"text/event-stream")

    play(scenario)


# ── passes that wait for the disk ─────────────────────────────────────────────────────────────


class Barrier:
    """Holds claim passes up, in the thread they run in, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = ThreadEvent(), ThreadEvent()
        self.passes = 0
        plain = QueueOperations.claim_for_all

        def claim_now(queue: QueueOperations, wants: Sequence[ClaimRequest]) -> list[ClaimResult]:
            self.passes += 1
            self.reached.set()
            assert self._open.wait(10)
            return plain(queue, wants)

        monkeypatch.setattr(QueueOperations, "claim_for_all", claim_now)
        monkeypatch.setattr(QueueOperations, "can_claim_without_blocking", lambda queue, most: False)  # noqa: ARG005

    async def until_reached(self) -> None:
        await until(self.reached.is_set)

    def open(self) -> None:
        self._open.set()


def test_claims_that_come_while_one_is_at_the_disk_share_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        queue_of(world).put(list(range(9)))
        gate = Barrier(monkeypatch)
        loop = asyncio.get_running_loop()
        first = loop.create_task(claim(world, node="a", max=2))
        await gate.until_reached()
        rest = [loop.create_task(claim(world, node=f"b{number}", max=3)) for number in range(3)]
        await asyncio.sleep(0)
        gate.open()
        assert await first == [1, 2]
        assert [await task for task in rest] == [[3, 6, 9], [4, 7], [5, 8]]
        assert gate.passes == 2

    play(scenario)


def test_what_a_claimer_got_that_left_meanwhile_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would know of these leases, and all would wait for their end."""

    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world)
        queue.put([1, 2, 3])
        gate = Barrier(monkeypatch)
        asked = world.begin("POST", "/v0/topics/q/claim", {"node": "n", "max": 2})
        await gate.until_reached()
        asked.leave()
        gate.open()
        await until(lambda: queue.counts()[:2] == (3, 0) and not len(world.service.push.claim_queues))
        assert gate.passes == 1

    play(scenario)


def test_what_a_worker_got_that_left_meanwhile_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world)
        queue.put([1, 2, 3])
        gate = Barrier(monkeypatch)
        tap = Tap()
        async with working(world, tap, max=2):
            await gate.until_reached()
        gate.open()
        await until(lambda: queue.counts()[:2] == (3, 0) and not len(world.service.push.claim_queues))
        assert jobs(tap) == []

    play(scenario)


def test_events_during_a_claim_round_are_handled_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that comes meanwhile finds the jobs that were there all the time, without another ring."""

    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world)
        queue.put([1, 2, 3])
        gate = Barrier(monkeypatch)
        first = asyncio.get_running_loop().create_task(claim(world, max=2))
        await gate.until_reached()
        tap = Tap()
        async with working(world, tap, max=2):
            gate.open()
            assert await first == [1, 2]
            await until(lambda: jobs(tap) == [3])
        await until(lambda: queue.counts()[:2] == (1, 2) and not len(world.service.push.claim_queues))

    play(scenario)


def test_failed_claim_round_fails_every_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world)
        queue.put([1, 2, 3])
        plain = QueueOperations.claim_for_all

        def claim_now(*_: object) -> list[ClaimResult]:
            raise DiskFull("no room; nothing was written, make room and retry")

        monkeypatch.setattr(QueueOperations, "claim_for_all", claim_now)
        for quick in (True, False):
            monkeypatch.setattr(QueueOperations, "can_claim_without_blocking", lambda queue, most, quick=quick: quick)  # noqa: ARG005
            status, said = await world.ask("POST", "/v0/topics/q/claim", {"node": "n"})
            assert (status, said["error"]["detail"]["reason"]) == (507, "disk_full")
            tap = Tap()
            async with working(world, tap) as running:
                await running.ended()
            assert b'"code":"disk_full"' in tap.frames[-1]
        monkeypatch.undo()
        assert QueueOperations.claim_for_all is plain
        assert queue.counts()[:2] == (3, 0)

    play(scenario)


@pytest.mark.parametrize("durable", [False, True])
def test_jobs_that_cannot_be_claimed_are_not_polled(monkeypatch: pytest.MonkeyPatch, *, durable: bool) -> None:
    """Their dead-letter topic is full: a worker that has room tries again, a few times a second."""
    passes = Passes(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        world.topic("d", discard="reject", cap_records=1).append(b"full")
        queue = queue_of(world, max_deliveries=1, dead_letter="d", leases_durable=durable)
        queue.put([1])
        assert await claim(world, node="w") == [1]
        await settle(world, "nack", 1)
        tap = Tap()
        passes.sizes.clear()
        async with working(world, tap):
            await let_idle(10)
            assert queue.counts() == (1, 0, 0)
            assert 2 <= len(passes.sizes) <= 10 / claim_queue._BACKOFF_S + 2
            world.topic("d").delete(before_seq=99)
            await let_idle(1)
            assert queue.counts() == (0, 0, 1)

    play(scenario)


def test_a_durable_queue_is_worked_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes run in the pool; with nothing to do none is made."""
    passes = Passes(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        queue = queue_of(world, leases_durable=True)
        tap = Tap()
        async with working(world, tap, max=2):
            await let_idle(100)
            assert passes.sizes == []
            queue.put([1, 2, 3])
            await tap.until(2)
            await let_idle(100)
            assert (jobs(tap), len(passes.sizes)) == ([1, 2], 1)
            await settle(world, "ack", 2)
            await tap.until(3)
            assert jobs(tap) == [1, 2, 3]
        assert queue.counts()[:2] == (2, 0)

    play(scenario)


def test_an_ack_is_answered_when_it_is_durable_and_not_before() -> None:
    """§3.11: for class fsync; and what is told are the counts behind it."""

    async def scenario(world: ServerHarness) -> None:
        queue_of(world, durability="fsync").put([1, 2])
        assert await claim(world, node="w", max=2) == [1, 2]
        asked = world.begin("POST", "/v0/topics/q/ack", {"node": "w", "seqs": [1]})
        assert not asked.answered, "it waits for the end of this turn of the loop"
        syncs = world.engine.shards[0].stats.fsyncs
        answer = await asked.answer()
        assert world.engine.shards[0].stats.fsyncs == syncs + 1
        assert isinstance(answer, Response)
        said = json.loads(answer.body)
        assert (said["acked"], said["ready"], said["in_flight"]) == (1, 0, 1)

    play(scenario)


def test_immediate_claim_needs_no_claim_queue() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue_of(world).put([1, 2])
        assert await claim(world) == [1]
        asked = FakeExchange()
        world.begin("POST", "/v0/topics/q/claim", {"node": "n"}, asked=asked)
        assert asked.answered, "within the call"

    play(scenario)


def test_a_heartbeat_is_what_the_contract_says() -> None:
    assert sse.WORK_HEARTBEAT_MS == 15_000


def test_an_idle_worker_gets_a_comment_on_request() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue, tap = queue_of(world), Tap()
        async with working(world, tap, notify_idle="true"):
            await let_idle()
            queue.put(["a", "b"])
            await tap.until(1)
            await let_idle()
            queue.ack("w", [1])
            await tap.until(2)
            await let_idle()
            queue.ack("w", [2])
            await let_idle()
            assert [frame[:6] for frame in tap.frames] == [
                *(b"retry:", b": idle", b"id: 1\n", b": full", b"id: 2\n", b": full")
            ], "one comment each time that it begins to wait"

    play(scenario)
