"""Workers of `tidelog.aio`: on the caller's event loop, over a directory and over a source that is no queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import turns, until

from tidelog import RejectJob, RetryJob, aio, backoff, every
from tidelog.aio.worker import AsyncWorker
from tidelog.engine import Job
from tidelog.engine.queues.jobs import AckResult, ExtendResult
from tidelog.errors import BadInput, Unavailable
from tidelog.testing import ManualClock

LIMIT_S = 60


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, LIMIT_S))


@asynccontextmanager
async def opened_queue(path: Path, **config: Any) -> AsyncIterator[aio.AsyncQueue]:
    async with aio.open(str(path / "data"), sync_interval_ms=5) as database:
        if "dead_letter" in config:
            await database.topic(config["dead_letter"])
        yield await database.queue("jobs", **config)


class Fake:
    """A source that is no queue: what it was asked, and jobs as they are given to it."""

    def __init__(self, *jobs: Job) -> None:
        self.jobs = list(jobs)
        self.calls: list[tuple[Any, ...]] = []
        self.broken = 0

    async def lease_ms(self) -> int:
        return 30_000

    async def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Job]:
        assert (node, lease_ms) != ("", None)
        if self.broken:
            self.broken -= 1
            raise Unavailable("not now")
        given, self.jobs = self.jobs[:most], self.jobs[most:]
        return given

    async def ack(self, node: str, seqs: Sequence[Job], /) -> AckResult:
        self.calls.append(("ack", node, [job.seq for job in seqs]))
        return AckResult(0 if seqs[0].data == "late" else len(seqs), [], 0, 0)

    async def nack(self, node: str, seqs: Sequence[Job], /, *, delay_ms: int = 0, error: object = None) -> AckResult:
        self.calls.append(("nack", node, [job.seq for job in seqs], delay_ms, str(error)))
        return AckResult(len(seqs), [], 0, 0)

    async def reject(self, node: str, seqs: Sequence[Job], /, *, error: object = None) -> AckResult:
        self.calls.append(("reject", node, [job.seq for job in seqs], str(error)))
        if seqs[0].data == "no dead letters":
            raise BadInput("there is no dead_letter")
        return AckResult(len(seqs), [], 0, 0)

    async def put(self, records: Any, /, *, meta: Any, key: str | None) -> None:
        self.calls.append(("put", records, meta, key))

    async def extend(self, node: str, seqs: Sequence[Job], /, *, lease_ms: int) -> ExtendResult:
        self.calls.append(("extend", node, sorted(job.seq for job in seqs), lease_ms))
        return ExtendResult(len(seqs), [], {})


def job(seq: int, data: str = "x", deliveries: int = 1) -> Job:
    return Job(seq, seq, 0, 0, deliveries, data)


def test_coroutine_functions_run_on_the_loop_and_plain_ones_in_threads(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened_queue(tmp_path) as queue:
            seen: list[tuple[str, threading.Thread]] = []

            @queue.worker(concurrency=3)
            async def handle(job: Job) -> None:
                await asyncio.sleep(0)
                seen.append((job.data, threading.current_thread()))

            @queue.worker(concurrency=3)
            def handle_plain(job: Job) -> Coroutine[Any, Any, None] | None:
                seen.append((job.data, threading.current_thread()))
                return asyncio.sleep(0) if job.data == "1" else None

            for worker, is_here in ((handle, True), (handle_plain, False)):
                async with worker:
                    await queue.put([str(number) for number in range(20)])
                    assert await worker.wait(20)
                    assert not await worker.wait(21, 0)
                assert worker.stats == (20, 0, 0)
                assert sorted(data for data, _ in seen) == sorted(str(number) for number in range(20))
                assert {thread is threading.main_thread() for _, thread in seen} == {is_here}
                seen.clear()
            assert (await queue.topic.state()).count == 0
            assert await handle.stop(), "stopping twice has no effect"
            assert (await queue.lease_ms(), handle.__name__) == (30_000, "handle")

    run(main())


def test_a_failed_job_is_delivered_again_and_in_the_end_a_dead_letter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        failures: list[str] = []

        async def note(job: Job, error: BaseException) -> None:
            await asyncio.sleep(0)
            failures.append(f"{job.deliveries} {error}")

        async with opened_queue(tmp_path, dead_letter="dead") as queue:

            @queue.worker(retries=backoff(0, attempts=2), on_error=note)
            async def fail(job: Job) -> None:
                raise ValueError(f"bad {job.data}")

            await queue.put("x")
            async with fail:
                assert await fail.wait(2)
            assert failures == ["1 bad x", "2 bad x"]
            assert await queue.counts() == (0, 0, 1)

    run(main())
    said = [record for record in caplog.records if record.name == "tidelog.worker"]
    assert [record.exc_info is not None for record in said] == [True, True]
    assert "failed and is rejected: bad x" in said[1].getMessage()


def test_functions_ask_for_a_retry_or_a_rejection_and_middleware_is_around_them() -> None:
    async def main() -> None:
        order: list[str] = []

        async def outer(job: Job, call_next: Any) -> None:
            order.append("outer")
            await call_next(job)

        async def inner(job: Job, call_next: Any) -> None:
            order.append("inner")
            await call_next(job)

        async def function(job: Job) -> None:
            if job.data == "retry":
                raise RetryJob(delay_ms=7)
            if job.data != "late":
                raise RejectJob("bad address")

        source = Fake(job(1, "retry"), job(2, "reject"), job(3, "no dead letters"), job(4, "late"))
        source.broken = 2
        async with AsyncWorker(source, function, node="w", middleware=[outer, inner], poll_ms=1) as worker:
            assert await worker.wait(4)
        assert order == ["outer", "inner"] * 4
        assert source.calls == [
            ("nack", "w", [1], 7, "None"),
            ("reject", "w", [2], "bad address"),
            ("reject", "w", [3], "bad address"),
            ("nack", "w", [3], 60_000, "bad address"),
            ("ack", "w", [4]),
        ]
        assert worker.stats == (0, 3, 1)
        assert str(worker.last_error) == "there is no dead_letter"

    run(main())


@pytest.mark.parametrize("is_async", [True, False])
def test_a_job_that_takes_too_long_fails(is_async: bool) -> None:
    async def main() -> None:
        go_on = threading.Event()

        async def later(_: Job) -> None:
            await asyncio.Event().wait()

        def now(_: Job) -> None:
            assert go_on.wait(LIMIT_S)

        source = Fake(job(1))
        async with AsyncWorker(source, later if is_async else now, node="w", timeout=0.01, poll_ms=1) as worker:
            assert await worker.wait(1)
            assert worker.running == 0
            source.jobs.append(job(2, "next"))
            if not is_async:
                await turns()
                assert source.jobs, "its thread is still busy"
            go_on.set()
            await until(lambda: not source.jobs)
        assert worker.stats.failed + worker.stats.done == 2
        assert source.calls[0][:3] == ("nack", "w", [1])

    run(main())


def test_leases_are_extended_and_scheduled_jobs_put_once() -> None:
    async def main() -> None:
        clock, go_on = ManualClock(), asyncio.Event()
        due = (clock.now_us() // 60_000_000 + 1) * 60_000

        async def report(_: Job) -> None:
            await go_on.wait()

        source = Fake(job(1), job(2))
        worker = AsyncWorker(
            source, report, clock=clock, node="w", concurrency=2, lease_ms=3_000, poll_ms=1, schedule=every(60)
        )
        async with worker:
            await until(lambda: worker.running == 2)
            clock.tick(999)
            await turns()
            assert source.calls == []
            clock.tick(1)
            await until(lambda: len(source.calls) == 1)
            assert source.calls == [("extend", "w", [1, 2], 3_000)]
            clock.tick(due - clock.now_us() // 1000)
            await until(lambda: len(source.calls) >= 3)
            go_on.set()
        assert ("put", [None], {"scheduled_ms": due}, f"schedule-report-{due}") in source.calls
        assert len([call for call in source.calls if call[0] == "put"]) == 1

    run(main())


def test_stop_waits_for_running_jobs_and_claims_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        async with opened_queue(tmp_path) as queue:

            @queue.worker()
            async def slow(_: Job) -> None:
                begun.set()
                await go_on.wait()

            await queue.put([1, 2])
            running = asyncio.create_task(slow.run())
            await begun.wait()
            assert not await slow.stop(timeout=0.01), "one still runs"
            assert slow.running == 1
            go_on.set()
            await running
            assert slow.stats == (1, 0, 0)
            assert await queue.counts() == (1, 0, 0)

    run(main())


def test_a_cancelled_worker_finishes_its_jobs_and_cancelled_again_gives_them_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened_queue(tmp_path) as queue:
            for times in (1, 2):
                begun, go_on = asyncio.Event(), asyncio.Event()

                @queue.worker(retries=backoff(0))
                async def slow(_: Job, begun: asyncio.Event = begun, go_on: asyncio.Event = go_on) -> None:
                    begun.set()
                    await go_on.wait()

                await queue.put("job")
                running = asyncio.create_task(slow.run())
                await begun.wait()
                running.cancel()
                await turns()
                assert not running.done()
                if times == 2:
                    running.cancel()
                    await until(running.done)
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert slow.stats == ((1, 0, 0) if times == 1 else (0, 1, 0))
            assert await queue.counts() == (1, 0, 0), "given back"

    run(main())


def generator(_: Job) -> Iterator[None]:
    yield


async def generator_later(_: Job) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [generator, generator_later, None])
def test_what_is_no_function_is_refused(function: Any) -> None:
    with pytest.raises(BadInput, match="nothing was started"):
        AsyncWorker(Fake(), function)
    with pytest.raises(BadInput, match="concurrency is a whole number"):
        AsyncWorker(Fake(), lambda _: None, concurrency=0)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), StopIteration()])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_job_that_cancels_or_exits_fails_and_the_worker_goes_on(error: BaseException, is_async: bool) -> None:
    async def main() -> None:
        async def later(job: Job) -> None:
            if job.seq == 1:
                raise error

        def now(job: Job) -> None:
            if job.seq == 1:
                raise error

        source = Fake(job(1), job(2))
        async with AsyncWorker(source, later if is_async else now, node="w", poll_ms=1) as worker:
            assert await worker.wait(2)
        assert worker.stats == (1, 1, 0)

    run(main())
