"""Workers and `work`: jobs that come by themselves, heartbeats, back-off, a stop that loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from threading import Event
from typing import Any

import pytest
from tests.unit.engine.harness import TIMEOUT_S, EngineHarness

import tidelog
from tidelog.engine import Job, Queue, Worker
from tidelog.engine.queues.jobs import AckResult, ExtendResult
from tidelog.errors import BadInput, Unavailable
from tidelog.testing import ManualClock


@pytest.fixture
def jobs(tmp_path: Any) -> Iterator[Queue]:
    with tidelog.open(str(tmp_path), wal_file_bytes=1 << 16, sync_interval_ms=5) as log:
        yield log.queue("jobs", lease_ms=60_000)


def until(condition: Callable[[], bool]) -> None:
    pause = Event()
    for _ in range(TIMEOUT_S * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")


# The iterator ---------------------------------------------------------------------------------------------


def test_work_yields_jobs_and_ends_after_its_timeout() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs")
    jobs.put([1, 2, 3])
    seen = []
    for job in jobs.work("w", timeout=0):
        seen.append(job.data)
        jobs.ack("w", job)
    assert seen == [1, 2, 3]
    assert jobs.topic.count == 0


def test_work_limits_unsettled_jobs_and_returns_them_at_its_end() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs")
    jobs.put(list(range(5)))
    work = jobs.work("w", 2, timeout=0)
    assert [job.seq for job in work] == [1, 2], "two are unsettled, so no third"
    assert jobs.counts() == (5, 0, 0)
    work = jobs.work("w", 2, timeout=0)
    first, second = islice(work, 2)
    assert jobs.counts().in_flight == 2
    jobs.ack("w", first)
    assert next(work).seq == 3
    work.close()  # type: ignore[attr-defined]
    assert jobs.counts() == (4, 0, 0)
    assert jobs.ack("w", second).skipped == [2]


def test_work_waits_for_a_job(jobs: Queue) -> None:
    work = jobs.work("w")
    jobs.put("first")
    assert next(work).data == "first"
    work.close()  # type: ignore[attr-defined]


def test_work_skips_jobs_whose_lease_expired() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs", lease_ms=1_000)
    jobs.put([1, 2])
    work = jobs.work("w", 2, timeout=0)
    assert next(work).seq == 1
    world.clock.tick(1_001)
    assert next(work).lease_id == 3, "claimed anew, not handed out late"


# The worker -----------------------------------------------------------------------------------------------


def test_a_worker_does_every_job_once(jobs: Queue) -> None:
    seen: list[int] = []
    with Worker(jobs, lambda job: seen.append(job.data), node="w", concurrency=3) as worker:
        jobs.put(list(range(40)))
        assert worker.wait(40, TIMEOUT_S)
    assert sorted(seen) == list(range(40))
    assert worker.stats == (40, 0, 0)
    assert not worker.wait(41, 0)
    assert jobs.topic.count == 0


def test_a_failing_job_is_delayed_longer_each_time(jobs: Queue) -> None:
    delays: list[int] = []
    real = jobs.nack

    def nack(node: str, seqs: Any, lease_ids: Any = None, delay_ms: int = 0) -> AckResult:
        delays.append(delay_ms)
        return real(node, seqs, lease_ids)

    jobs.nack = nack  # type: ignore[method-assign]
    errors: list[str] = []

    def fail(job: Job) -> None:
        raise ValueError(job.data)

    worker = Worker(
        jobs,
        fail,
        node="w",
        backoff_ms=10,
        backoff_ms_max=65,
        on_error=lambda job, error: errors.append(f"{job.deliveries} {error}"),
    )
    with worker:
        jobs.put("bad")
        until(lambda: worker.stats.failed >= 5)
    assert delays[:5] == [10, 20, 40, 65, 65]
    assert errors[:2] == ["1 bad", "2 bad"]
    assert worker.stats.done == 0
    assert jobs.topic.count == 1


def test_stop_waits_for_running_jobs_and_claims_no_more(jobs: Queue) -> None:
    begun, go_on = Event(), Event()

    def slow(_: Job) -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)

    worker = Worker(jobs, slow, node="w").start()
    jobs.put([1, 2])
    assert begun.wait(TIMEOUT_S)
    assert worker.running == 1
    assert not worker.stop(timeout=0.01), "one still runs"
    go_on.set()
    assert worker.stop(TIMEOUT_S)
    assert worker.stats == (1, 0, 0)
    assert jobs.counts() == (1, 0, 0)
    assert worker.stop()


class Fake:
    """A source that is no queue: what it was asked, and jobs as they are given to it."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.calls: list[tuple[Any, ...]] = []
        self.broken = 0

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Job]:
        assert (node, lease_ms) != ("", None)
        if self.broken:
            self.broken -= 1
            raise Unavailable("not now")
        given, self.jobs = self.jobs[:most], self.jobs[most:]
        return given

    def ack(self, node: str, seqs: Sequence[Job], /) -> AckResult:
        self.calls.append(("ack", node, [job.seq for job in seqs]))
        return AckResult(0 if seqs[0].data == "late" else len(seqs), [], 0, 0)

    def nack(self, node: str, seqs: Sequence[Job], /, *, delay_ms: int = 0) -> AckResult:
        self.calls.append(("nack", node, [job.seq for job in seqs], delay_ms))
        return AckResult(len(seqs), [], 0, 0)

    def extend(self, node: str, seqs: Sequence[Job], /, *, lease_ms: int) -> ExtendResult:
        self.calls.append(("extend", node, sorted(job.seq for job in seqs), lease_ms))
        return ExtendResult(len(seqs), [], {})


def test_leases_of_running_jobs_are_extended_every_third_of_their_length() -> None:
    source, clock, go_on = Fake(), ManualClock(), Event()
    source.jobs = [Job(seq, seq, 0, 0, 1, "x") for seq in (1, 2)]
    worker = Worker(
        source, lambda _: go_on.wait(TIMEOUT_S), node="w", concurrency=2, lease_ms=3_000, poll_ms=1, clock=clock
    )
    with worker:
        until(lambda: worker.running == 2)
        for beats in (1, 2, 3):
            clock.tick(999)
            assert len(source.calls) == beats - 1
            clock.tick(1)
            until(lambda beats=beats: len(source.calls) == beats)  # type: ignore[misc]
        go_on.set()
    assert source.calls[:3] == [("extend", "w", [1, 2], 3_000)] * 3
    assert worker.stats.done == 2


def test_a_failing_source_is_retried() -> None:
    source = Fake()
    source.broken, source.jobs = 3, [Job(1, 1, 0, 0, 1, "x"), Job(2, 2, 0, 0, 1, "late")]
    with Worker(source, lambda _: None, node="w", poll_ms=1) as worker:
        until(lambda: worker.stats == (1, 0, 1))
    assert str(worker.last_error) == "not now"


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"lease_ms": 0}, {"backoff_ms": 5, "backoff_ms_max": 1}])
def test_invalid_worker_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Worker(Fake(), lambda _: None, node="w", **wrong)  # type: ignore[arg-type]


# What a function may be ---------------------------------------------------------------------------------------


class AsyncCallable:
    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    async def __call__(self, job: Job) -> None:
        await asyncio.sleep(0)
        self._seen.append(job.data)


def test_a_coroutine_function_is_run_before_its_job_is_acked(jobs: Queue) -> None:
    """Its jobs were acked without a line of it having run."""
    seen: list[Any] = []

    async def handle(job: Job) -> None:
        await asyncio.sleep(0)
        assert jobs.counts().in_flight
        seen.append(job.data)

    functions: list[Callable[[Job], Any]] = [handle, partial(handle), lambda job: handle(job), AsyncCallable(seen)]
    for function in functions:
        with Worker(jobs, function, node="w", concurrency=2) as worker:
            jobs.put([1, 2, 3])
            assert worker.wait(3, TIMEOUT_S)
        assert worker.stats == (3, 0, 0)
        assert sorted(seen) == [1, 2, 3]
        seen.clear()
    assert jobs.topic.count == 0


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError(), SystemExit(3)])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_cancelled_or_exiting_job_is_nacked(jobs: Queue, error: BaseException, is_async: bool) -> None:
    raised: list[BaseException] = []

    async def later(_: Job) -> None:
        await asyncio.sleep(0)
        raise error

    def now(_: Job) -> None:
        raise error

    worker = Worker(
        jobs, later if is_async else now, node="w", backoff_ms=60_000, on_error=lambda _, e: raised.append(e)
    )
    with worker:
        jobs.put(1)
        assert worker.wait(1, TIMEOUT_S)
    assert worker.stats == (0, 1, 0)
    assert [type(each) for each in raised] == [type(error)]
    assert jobs.topic.count == 1


def test_generators_and_awaitables_are_refused(jobs: Queue) -> None:
    def generator(job: Job) -> Iterator[Job]:
        yield job

    async def generator_later(job: Job) -> AsyncIterator[Job]:
        yield job

    for function in (generator, generator_later):
        with pytest.raises(BadInput, match="generator function"):
            Worker(jobs, function, node="w")
    raised: list[BaseException] = []

    class Later:
        def __await__(self) -> Any:
            raise AssertionError("it is not awaited")

    for returned in (lambda job: generator(job), lambda job: generator_later(job), lambda _: Later()):
        worker = Worker(jobs, returned, node="w", backoff_ms=60_000, on_error=lambda _, error: raised.append(error))
        with worker:
            jobs.put(1)
            assert worker.wait(1, TIMEOUT_S)
        assert worker.stats == (0, 1, 0)
    assert jobs.topic.count == 3
    assert all("which has not run" in str(error) for error in raised)
    assert len(raised) == 3


def test_a_source_that_breaks_its_contract_does_not_stop_the_worker(jobs: Queue) -> None:
    """An answer without `count` ended the thread of the job: it was in no count, and `wait` waited for ever."""
    real = jobs.ack
    jobs.ack = lambda *args: real(*args)._asdict()  # type: ignore[method-assign, assignment]
    with Worker(jobs, lambda _: None, node="w") as worker:
        jobs.put([1, 2])
        assert worker.wait(2, TIMEOUT_S)
    assert worker.stats.lost == 2
    assert "has no attribute 'count'" in str(worker.last_error)
