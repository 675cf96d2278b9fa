"""Workers and `jobs`: jobs that come by themselves, heartbeats, back-off, a stop that loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from threading import Event
from typing import Any

import pytest
from tests.unit.engine.harness import TIMEOUT_S, EngineHarness

import tidelog
from tidelog import RejectJob, RetryJob, backoff, cron, every
from tidelog.aio import AsyncWorker
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


def test_iterator_ends_after_its_timeout() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs")
    jobs.put([1, 2, 3])
    seen = []
    for job in jobs.jobs("w", timeout=0):
        seen.append(job.data)
        jobs.ack("w", job)
    assert seen == [1, 2, 3]
    assert jobs.topic.count == 0


def test_iterator_limits_unsettled_jobs_and_returns_them_at_its_end() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs")
    jobs.put(list(range(5)))
    work = jobs.jobs("w", 2, timeout=0)
    assert [job.seq for job in work] == [1, 2], "two are unsettled, so no third"
    assert jobs.counts() == (5, 0, 0)
    work = jobs.jobs("w", 2, timeout=0)
    first, second = islice(work, 2)
    assert jobs.counts().in_flight == 2
    jobs.ack("w", first)
    assert next(work).seq == 3
    work.close()  # type: ignore[attr-defined]
    assert jobs.counts() == (4, 0, 0)
    assert jobs.ack("w", second).skipped == [2]


def test_iterator_waits_for_a_job(jobs: Queue) -> None:
    work = jobs.jobs("w")
    jobs.put("first")
    assert next(work).data == "first"
    work.close()  # type: ignore[attr-defined]


def test_iterator_skips_jobs_whose_lease_expired() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs", lease_ms=1_000)
    jobs.put([1, 2])
    work = jobs.jobs("w", 2, timeout=0)
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

    def nack(node: str, seqs: Any, lease_ids: Any = None, delay_ms: Any = 0, *, error: Any = None) -> AckResult:
        delays.append(delay_ms)
        return real(node, seqs, lease_ids, error=error)

    jobs.nack = nack  # type: ignore[method-assign]
    errors: list[str] = []

    def fail(job: Job) -> None:
        raise ValueError(job.data)

    worker = Worker(
        jobs,
        fail,
        node="w",
        retries=backoff(10, max_ms=65),
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

    lease_ms = 30_000

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.calls: list[tuple[Any, ...]] = []
        self.broken = 0
        self.errors: list[str] = []

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

    def nack(self, node: str, seqs: Sequence[Job], /, *, delay_ms: int = 0, error: object = None) -> AckResult:
        self.calls.append(("nack", node, [job.seq for job in seqs], delay_ms))
        self.errors.append(str(error))
        return AckResult(len(seqs), [], 0, 0)

    def reject(self, node: str, seqs: Sequence[Job], /, *, error: object = None) -> AckResult:
        self.calls.append(("reject", node, [job.seq for job in seqs], str(error)))
        return AckResult(len(seqs), [], 0, 0)

    def put(self, records: Any, /, *, meta: Any, key: str | None) -> None:
        self.calls.append(("put", records, meta, key))

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


@pytest.mark.parametrize(
    "wrong",
    [
        *({"concurrency": 0}, {"lease_ms": 0}, {"timeout": 0}, {"concurrency": "5"}, {"concurrency": 2.5}),
        *({"lease_ms": "5"}, {"timeout": "5"}, {"node": 5}, {"retries": 3}, {"schedule": "* * * * *"}),
        *({"on_error": 5}, {"middleware": len}, {"middleware": [5]}, {"poll_ms": "1"}),
    ],
)
def test_invalid_worker_settings_are_refused(wrong: dict[str, Any]) -> None:
    kinds: tuple[Any, ...] = (Worker, AsyncWorker)
    for kind in kinds:
        with pytest.raises(BadInput):
            kind(Fake(), lambda _: None, **wrong)


def test_times_of_a_worker_are_durations() -> None:
    source = Fake()
    source.jobs = [Job(1, 1, 0, 0, 1, "x")]
    with Worker(source, lambda _: None, lease_ms=timedelta(seconds=3), timeout=timedelta(seconds=9)) as worker:
        assert worker.wait(1, TIMEOUT_S)
    for wrong in ("5", None, float("nan")):
        with pytest.raises(BadInput):
            every(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="a cron line is text"):
        cron(5)  # type: ignore[arg-type]


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
        jobs, later if is_async else now, node="w", retries=backoff(60_000), on_error=lambda _, e: raised.append(e)
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
        worker = Worker(
            jobs, returned, node="w", retries=backoff(60_000), on_error=lambda _, error: raised.append(error)
        )
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


# Retries, rejects, time limits ----------------------------------------------------------------------------------


def test_a_job_that_failed_often_enough_is_a_dead_letter_that_says_why(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with tidelog.open(str(tmp_path)) as log:
        jobs, dead = log.queue("jobs", dead_letter="dead"), log.topic("dead")

        @jobs.worker(node="w", retries=backoff(0, attempts=2))
        def send(job: Job) -> None:
            raise ValueError(f"cannot send {job.data}")

        jobs.put({"to": "x"}, meta={"mine": "1"})
        with send:
            assert send.wait(2, TIMEOUT_S)
        (letter,) = dead.read().records
        assert letter.data == {"to": "x"}
        assert letter.meta is not None
        assert (letter.meta["$error"], letter.meta["$error_type"]) == ("cannot send {'to': 'x'}", "ValueError")
        assert int(letter.meta["$failed_at"]) >= letter.ts_ms - 60_000
        assert (letter.meta["mine"], letter.meta["$dead_letter_deliveries"]) == ("1", "2")
        assert jobs.counts() == (0, 0, 1)
        dead.redrive()
        assert [job.meta for job in jobs.claim("w")] == [{"mine": "1"}]
    failures = [record for record in caplog.records if record.name == "tidelog.worker"]
    assert [record.exc_info is not None for record in failures] == [True, True]
    assert "failed, again in 0 ms: cannot send" in failures[0].getMessage()
    assert "failed and is rejected" in failures[1].getMessage()


def test_a_dead_letter_by_max_deliveries_has_the_last_error(tmp_path: Any) -> None:
    with tidelog.open(str(tmp_path)) as log:
        jobs, dead = log.queue("jobs", dead_letter="dead", max_deliveries=2), log.topic("dead")
        jobs.put("x")
        for text in ("first", "second"):
            jobs.nack("w", jobs.claim("w"), error=text)
        assert jobs.claim("w") == []
        (letter,) = dead.read().records
        assert letter.meta is not None
        assert (letter.meta["$error"], letter.meta["$error_type"]) == ("second", "")


def test_reject_needs_a_dead_letter_topic_and_the_lease(jobs: Queue, tmp_path: Any) -> None:
    jobs.put("x")
    (job,) = jobs.claim("w")
    with pytest.raises(BadInput, match="has no dead_letter"):
        jobs.reject("w", job)
    assert jobs.counts().in_flight == 1
    with tidelog.open(str(tmp_path / "other")) as log:
        other = log.queue("other", dead_letter="dead")
        other.put(["a", "b"])
        first, second = other.claim("w", 2)
        assert other.reject("w", [first], error=KeyError("k")) == AckResult(1, [], 0, 1)
        assert other.reject("stranger", [second]).skipped == [second.seq]
        assert [record.data for record in log.topic("dead").read().records] == ["a"]
        assert log.topic("dead").read().records[0].meta == {
            "$dead_letter_from": "other",
            "$dead_letter_deliveries": "1",
            "$dead_letter_src_seq": "1",
            "$error": "'k'",
            "$error_type": "KeyError",
            "$failed_at": log.topic("dead").read().records[0].meta["$failed_at"],  # type: ignore[index]
        }


def test_a_rejected_job_without_a_dead_letter_topic_stays_with_a_warning(
    jobs: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Job) -> None:
        raise RejectJob("never")

    with Worker(jobs, fail, node="w") as worker:
        jobs.put(1)
        assert worker.wait(1, TIMEOUT_S)
    assert jobs.topic.count == 1
    assert "stays in the queue" in caplog.text


def test_functions_say_that_a_job_is_to_be_retried_or_rejected() -> None:
    source = Fake()
    source.jobs = [Job(1, 1, 0, 0, 9, "retry"), Job(2, 2, 0, 0, 1, "reject")]

    def function(job: Job) -> None:
        raise RetryJob(delay_ms=7) if job.data == "retry" else RejectJob("bad address")

    with Worker(source, function, node="w", poll_ms=1) as worker:
        assert worker.wait(2, TIMEOUT_S)
    assert ("nack", "w", [1], 7) in source.calls
    assert ("reject", "w", [2], "bad address") in source.calls


def test_a_coroutine_that_takes_too_long_is_cancelled_and_its_job_fails() -> None:
    source, ended = Fake(), Event()
    source.jobs = [Job(1, 1, 0, 0, 1, "x")]

    async def slow(_: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with Worker(source, slow, node="w", timeout=0.01, poll_ms=1, retries=backoff(5)) as worker:
        assert worker.wait(1, TIMEOUT_S)
    assert ended.is_set()
    assert worker.stats == (0, 1, 0)
    assert source.calls == [("nack", "w", [1], 5)]


def test_a_plain_function_that_takes_too_long_fails_its_job_and_keeps_its_thread() -> None:
    source, clock, go_on = Fake(), ManualClock(), Event()
    source.jobs = [Job(1, 1, 0, 0, 1, "x")]
    options: Any = {"timeout": 2, "poll_ms": 1, "clock": clock, "retries": backoff(5)}
    with Worker(source, lambda _: go_on.wait(TIMEOUT_S), node="w", **options) as worker:
        until(lambda: worker.running == 1)
        source.jobs = [Job(2, 2, 0, 0, 1, "y")]
        clock.tick(2_000)
        assert worker.wait(1, TIMEOUT_S)
        assert source.calls == [("nack", "w", [1], 5)]
        assert len(source.jobs) == 1, "its only thread is busy"
        go_on.set()
        assert worker.wait(2, TIMEOUT_S)
    assert worker.stats == (1, 1, 0), "what the late function returned does not count"


def test_middleware_runs_around_each_job_the_first_outermost() -> None:
    source, seen = Fake(), list[str]()
    source.jobs = [Job(1, 1, 0, 0, 1, "x")]

    def outer(job: Job, call_next: Callable[[Job], Any]) -> Any:
        seen.append("outer")
        return call_next(job)

    def inner(job: Job, call_next: Callable[[Job], Any]) -> Any:
        seen.append("inner")
        return call_next(job._replace(data="changed"))

    with Worker(source, lambda job: seen.append(job.data), node="w", middleware=[outer, inner], poll_ms=1) as worker:
        assert worker.wait(1, TIMEOUT_S)
    assert seen == ["outer", "inner", "changed"]

    async def later(job: Job, call_next: Callable[[Job], Any]) -> Any:
        seen.append("later")
        return await call_next(job)

    async def work(_: Job) -> None:
        seen.append("work")

    source.jobs = [Job(2, 2, 0, 0, 1, "x")]
    with Worker(source, work, node="w", middleware=[later], poll_ms=1) as worker:
        assert worker.wait(1, TIMEOUT_S)
    assert seen[3:] == ["later", "work"]
    with pytest.raises(BadInput, match="needs middleware that are coroutine functions"):
        Worker(source, work, middleware=[outer])


def test_coroutine_functions_share_one_loop(jobs: Queue) -> None:
    loops: set[int] = set()

    async def handle(_: Job) -> None:
        loops.add(id(asyncio.get_running_loop()))

    with Worker(jobs, handle, concurrency=3) as worker:
        jobs.put(list(range(10)))
        assert worker.wait(10, TIMEOUT_S)
    assert len(loops) == 1


def test_a_decorated_function_can_still_be_called(jobs: Queue) -> None:
    @jobs.worker(concurrency=2)
    def double(job: Job) -> int:
        """Twice the data."""
        return int(job.data) * 2

    assert double(Job(1, 1, 0, 0, 1, 21)) == 42
    assert (double.__name__, double.__doc__) == ("double", "Twice the data.")
    assert repr(double).startswith("<worker 'double-")


def test_the_lease_is_that_of_the_queue_unless_given(tmp_path: Any) -> None:
    with tidelog.open(str(tmp_path)) as log:
        jobs = log.queue("jobs", lease_ms=5_000)
        leases: list[int] = []
        for lease_ms in (None, 7_000):
            worker = Worker(jobs, lambda job: leases.append(job.deadline_ms), lease_ms=lease_ms)
            jobs.put(1)
            before = jobs.topic.state().last_write_ms
            assert before is not None
            with worker:
                assert worker.wait(1, TIMEOUT_S)
            leases[-1] -= before
    assert 5_000 <= leases[0] < 7_000 <= leases[1]


# Schedules --------------------------------------------------------------------------------------------------


def test_a_scheduled_job_is_put_once_for_all_workers_when_it_is_due() -> None:
    clock, sources = ManualClock(), [Fake(), Fake()]
    due = (clock.now_us() // 60_000_000 + 1) * 60_000

    def report(_: Job) -> None:
        pass

    workers = [
        Worker(source, report, schedule=every(60), schedule_data={"kind": "daily"}, poll_ms=1, clock=clock)
        for source in sources
    ]
    with workers[0], workers[1]:
        clock.tick(due - clock.now_us() // 1000 - 1)
        assert [source.calls for source in sources] == [[], []]
        clock.tick(1)
        until(lambda: all(source.calls for source in sources))
        put = ("put", [{"kind": "daily"}], {"scheduled_ms": due}, f"schedule-report-{due}")
        assert [source.calls for source in sources] == [[put], [put]], "the same key: the queue writes one"
        clock.tick(60_000)
        until(lambda: all(len(source.calls) == 2 for source in sources))


@pytest.mark.parametrize(
    ("line", "after", "due"),
    [
        ("*/15 * * * *", "2026-01-01 00:00", "2026-01-01 00:15"),
        ("0 3 * * *", "2026-02-28 03:00", "2026-03-01 03:00"),
        ("30 8 * * mon-fri", "2026-01-02 09:00", "2026-01-05 08:30"),
        ("0 0 29 2 *", "2026-01-01 00:00", "2028-02-29 00:00"),
        ("0 12 1 * sun", "2026-01-01 12:00", "2026-01-04 12:00"),
        ("5-7,50 22 * jan,dec *", "2026-01-31 22:50", "2026-12-01 22:05"),
        ("10/20 0 * * 7", "2026-01-04 00:10", "2026-01-04 00:30"),
    ],
)
def test_cron_finds_the_next_time(line: str, after: str, due: str) -> None:
    def ms(text: str) -> int:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)

    assert cron(line).next_after(ms(after)) == ms(due)
    assert cron(line).next_after(ms(due) - 1) == ms(due)


_BAD_LINES = """
* * * *
60 * * * *
* 24 * * *
* * 0 * *
* * * 13 *
* * * * 8
5-1 * * * *
*/0 * * * *
x * * * *
0 0 31 2 *
1,,2 * * * *
* * * * mon*""".splitlines()


@pytest.mark.parametrize("line", _BAD_LINES)
def test_a_bad_cron_line_is_refused(line: str) -> None:
    with pytest.raises(BadInput, match="cron line"):
        cron(line)


def test_every_refuses_less_than_a_second() -> None:
    with pytest.raises(BadInput, match="one second"):
        every(0.5)
    assert every(timedelta(minutes=1)).next_after(60_000) == 120_000


def test_backoff_grows_to_its_maximum_and_refuses_nonsense() -> None:
    assert [backoff(10, factor=3, max_ms=50).delay_ms(n) for n in (1, 2, 3, 500)] == [10, 30, 50, 50]
    assert backoff(100, jitter=0.5).delay_ms(1, lambda: 1.0) == 50
    for wrong in ({"first_ms": 5, "max_ms": 1}, {"factor": 0.5}, {"jitter": 2}, {"attempts": 0}):
        with pytest.raises(BadInput):
            backoff(**wrong)
