"""A worker: claims jobs, runs a function for each, and acks, nacks, rejects or extends them.

    claim as many as there are free threads ──► function(job) ──► returned: ack
                                                    │    └──────► raised:   nack with a growing delay; after
                                                    │                       `attempts` failures: reject, a dead letter
                                                    └ every third of the lease: extend all running jobs

`stop` lets running jobs finish and extends their leases meanwhile; claimed jobs that did not start are nacked at once.
The worker calls a few methods of a queue, so a queue of `tidelog.connect` works as well.

Coroutine functions run on one event loop of the worker, in a thread of its own. A generator function is refused; a
function that returns another awaitable or a generator fails the job, because nothing has run yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Event, Lock, Thread
from typing import Any, NamedTuple, Protocol, Self, Unpack, runtime_checkable

from tidelog.clock import Clock, SystemClock
from tidelog.disk import process
from tidelog.engine.queues.jobs import Job
from tidelog.engine.queues.schedule import Schedule
from tidelog.engine.queues.worker_options import (
    POLL_MS_DEFAULT,
    Backoff,
    JobFunction,
    Middleware,
    WorkerOptions,
    WorkerRules,
    WorkerStats,
    check_result,
    log,
)
from tidelog.errors import Error, Refused
from tidelog.times import Duration, Seconds


class HasCount(Protocol):
    @property
    def count(self) -> int: ...


class JobSource(Protocol):
    """A queue of a directory or of a server."""

    @property
    def lease_ms(self) -> int: ...
    def put(self, records: Any, /, *, meta: Any, key: str | None) -> object: ...
    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Any]: ...
    def ack(self, node: str, seqs: Sequence[Any], /) -> HasCount: ...
    def nack(
        self, node: str, seqs: Sequence[Any], /, *, delay_ms: int = 0, error: BaseException | str | None = None
    ) -> HasCount: ...
    def reject(self, node: str, seqs: Sequence[Any], /, *, error: BaseException | str | None = None) -> HasCount: ...
    def extend(self, node: str, seqs: Sequence[Any], /, *, lease_ms: int) -> HasCount: ...


@runtime_checkable
class JobNotifier(Protocol):
    """A source that notifies listeners of new jobs; other sources are polled."""

    def add_listener(self, wake: Callable[[], None]) -> None: ...
    def remove_listener(self, wake: Callable[[], None]) -> None: ...


class _Running(NamedTuple):
    job: Job
    started_ms: int


class Worker:
    """Runs `function` for every job, `concurrency` at a time, until `stop` or the end of a `with` block. Calling the
    worker calls its function, as in a test.

    Args:
        node: the name that holds the leases; by default that of the function with the id of the process.
        lease_ms: how long a job stays leased if the worker dies; by default the queue's own.
        retries: delays after failures; `backoff(attempts=5)` rejects a job that failed five times.
        timeout: seconds that one job may take. A coroutine is cancelled. A plain function cannot be interrupted: its
            job fails and goes back to the queue, and its thread stays busy until it returns.
        middleware: functions around each job, the first one outermost; coroutine functions for a coroutine function.
        schedule: `every(60)` or `cron("0 3 * * *")` puts a job with `schedule_data` when it is due, once for all
            workers of a queue. Times at which no worker ran are skipped.
        on_error: called as `on_error(job, error)` for a function that raised, in its thread.
    """

    def __init__(
        self,
        source: JobSource,
        function: JobFunction,
        *,
        node: str | None = None,
        concurrency: int = 1,
        lease_ms: Duration | None = None,
        retries: Backoff | None = None,
        timeout: Seconds | None = None,
        middleware: Sequence[Middleware] = (),
        schedule: Schedule | None = None,
        schedule_data: object = None,
        on_error: Callable[[Job, BaseException], object] | None = None,
        poll_ms: int = POLL_MS_DEFAULT,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._rules = WorkerRules(
            function,
            node=node,
            concurrency=concurrency,
            lease_ms=lease_ms,
            retries=retries,
            timeout=timeout,
            middleware=middleware,
            schedule=schedule,
            schedule_data=schedule_data,
            on_error=on_error,
            poll_ms=poll_ms,
        )
        self.__name__ = self._rules.name
        self.__doc__ = self._rules.doc or type(self).__doc__
        self._source, self._node = source, self._rules.node
        self._lock = Lock()
        self._settled = Condition(self._lock)
        self._running: dict[int, _Running] = {}  # by lease id; a job that ran out of time is no longer here
        self._busy = 0  # threads
        self._done = self._failed = self._lost = 0
        self._woken = Event()
        self._stopping = False
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.last_error: Error | None = None  # of the last failed claim or settle
        process.register(self)

    def __repr__(self) -> str:
        return f"<worker {self._node!r} of {self._source!r:.200}>"

    def __call__(self, job: Job) -> Any:
        return self._rules.plain_function(job)

    def on_fork(self, pid: int) -> None:
        """Disable this worker in a forked child: the parent keeps its threads and jobs."""
        self._stopping, self._thread, self._woken, self._loop = True, None, Event(), None
        process.poison_locks(f"the worker {self._node}", pid, self)

    @property
    def stats(self) -> WorkerStats:
        with self._lock:
            return WorkerStats(self._done, self._failed, self._lost)

    @property
    def running(self) -> int:
        """The number of jobs that run now."""
        return len(self._running)

    def wait(self, count: int, timeout: float | None = None) -> bool:
        """Wait until `count` jobs were done, failed or lost since the start; return False after `timeout` seconds."""
        with self._settled:
            return self._settled.wait_for(lambda: self._done + self._failed + self._lost >= count, timeout)

    def start(self) -> Self:
        if self._thread is None and not self._stopping:
            self._thread = Thread(target=self._run, name=f"tidelog worker {self._node}", daemon=True)
            self._thread.start()
        return self

    def run(self) -> None:
        """Start, and block until `stop` is called or Ctrl-C is pressed; running jobs finish."""
        self.start()
        try:
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(POLL_MS_DEFAULT / 1000)
        finally:
            self.stop()

    def stop(self, timeout: float | None = None) -> bool:
        """Claim no more jobs and wait for running ones; return whether all finished within `timeout` seconds. Stopping
        twice has no effect."""
        self._stopping = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── the thread that claims and extends ────────────────────────────────────────────────────

    def _run(self) -> None:
        notifier = self._source if isinstance(self._source, JobNotifier) else None
        if notifier is not None:
            notifier.add_listener(self._woken.set)
        loop_thread = self._start_loop() if self._rules.is_async else None
        lease_ms = self._rules.lease_ms
        next_extend_ms: int | None = None
        self._rules.start_schedule(self._now_ms())
        try:
            with ThreadPoolExecutor(self._rules.concurrency, f"tidelog worker {self._node}") as pool:
                while not self._stopping or self._running:
                    self._woken.clear()
                    if lease_ms is None:
                        lease_ms = self._call_source(lambda: self._source.lease_ms)
                    if lease_ms is not None and next_extend_ms is None:
                        next_extend_ms = self._clock.monotonic_ms() + self._rules.extension_pause_ms(lease_ms)
                    if not self._stopping and lease_ms is not None:
                        self._put_scheduled()
                        self._claim(pool, lease_ms)
                    now_ms = self._clock.monotonic_ms()
                    self._fail_overdue(now_ms)
                    if lease_ms is not None and next_extend_ms is not None and now_ms >= next_extend_ms:
                        self._extend(lease_ms)
                        next_extend_ms = now_ms + self._rules.extension_pause_ms(lease_ms)
                    if not self._stopping or self._running:
                        self._woken.wait(self._pause_ms(now_ms, next_extend_ms) / 1000)
        finally:
            if notifier is not None:
                notifier.remove_listener(self._woken.set)
            if loop_thread is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                loop_thread.join()

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

    def _pause_ms(self, now_ms: int, next_extend_ms: int | None) -> int:
        """How long to wait for a listener's call before the next round."""
        rules = self._rules
        pauses = [rules.poll_ms] if next_extend_ms is None else [rules.poll_ms, next_extend_ms - now_ms]
        if rules.due_ms is not None:
            pauses.append(rules.due_ms - self._now_ms())
        if rules.timeout_s is not None:
            with self._lock:
                started = [running.started_ms for running in self._running.values()]
            pauses += [started_ms + int(rules.timeout_s * 1000) - now_ms for started_ms in started]
        return max(min(pauses), 1)

    def _start_loop(self) -> Thread:
        """Start the event loop that runs coroutine functions."""
        loop = self._loop = asyncio.new_event_loop()

        def run() -> None:
            asyncio.set_event_loop(loop)
            try:
                loop.run_forever()
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

        thread = Thread(target=run, name=f"tidelog worker {self._node} loop", daemon=True)
        thread.start()
        return thread

    def _put_scheduled(self) -> None:
        """Put the scheduled job if it is due."""
        due = self._rules.scheduled_job(self._now_ms())
        if due is not None:
            self._call_source(lambda: self._source.put([due.data], meta=due.meta, key=due.key))

    def _claim(self, pool: ThreadPoolExecutor, lease_ms: int) -> None:
        free = self._rules.concurrency - self._busy
        if free < 1:
            return
        jobs = self._call_source(lambda: self._source.claim(self._node, free, lease_ms)) or ()
        for job in jobs:
            with self._lock:
                self._busy += 1
                self._running[job.lease_id] = _Running(job, self._clock.monotonic_ms())
            pool.submit(self._work, job)

    def _extend(self, lease_ms: int) -> None:
        with self._lock:
            jobs = [running.job for running in self._running.values()]
        if jobs:
            self._call_source(lambda: self._source.extend(self._node, jobs, lease_ms=lease_ms))

    def _fail_overdue(self, now_ms: int) -> None:
        """Fail jobs of plain functions that take longer than their time limit."""
        limit_s = self._rules.timeout_s
        if limit_s is None or self._rules.is_async:
            return
        with self._lock:
            overdue = [
                running.job for running in self._running.values() if now_ms - running.started_ms >= limit_s * 1000
            ]
            for job in overdue:
                del self._running[job.lease_id]
        for job in overdue:
            self._fail(job, self._rules.overdue_error())

    # ── the threads that run jobs ─────────────────────────────────────────────────────────────

    def _work(self, job: Job) -> None:
        try:
            if self._stopping:
                with self._lock:
                    self._running.pop(job.lease_id, None)
                self._call_source(lambda: self._source.nack(self._node, [job]))
                return
            failure: BaseException | None = None
            try:
                self._run_to_completion(self._rules.function(job))
            except BaseException as error:  # a cancelled coroutine, too, fails the job and not the worker
                failure = error
            with self._lock:
                if self._running.pop(job.lease_id, None) is None:
                    return  # it ran out of time and has failed already
            if failure is not None:
                self._fail(job, failure)
            else:
                acked = self._call_source(lambda: self._source.ack(self._node, [job]).count)
                with self._lock:
                    if acked:
                        self._done += 1
                    else:
                        self._lost += 1
        finally:
            with self._lock:
                self._busy -= 1
                self._settled.notify_all()
            self._woken.set()

    def _run_to_completion(self, result: object) -> None:
        """Run a coroutine to its end; raise BadInput for a generator or another awaitable."""
        if isinstance(result, Coroutine):
            if self._loop is None:  # a plain function that returned a coroutine
                asyncio.run(result)
                return
            failure = asyncio.run_coroutine_threadsafe(_outcome(result, self._rules.timeout_s), self._loop).result()
            if failure is not None:
                raise failure
        else:
            check_result(result)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Settle a job whose function raised."""
        settlement = self._rules.settle_failure(job, error)
        if not (settlement.is_rejected and self._reject(job, error)):
            delay_ms = settlement.delay_ms
            self._call_source(lambda: self._source.nack(self._node, [job], delay_ms=delay_ms, error=settlement.error))
        with self._lock:
            self._failed += 1
            self._settled.notify_all()
        if self._rules.on_error is not None:
            try:
                self._rules.on_error(job, error)
            except Exception:
                log.exception("on_error of the worker %s raised; the job %d was settled before", self._node, job.seq)

    def _reject(self, job: Job, error: BaseException) -> bool:
        """Move a job to the dead-letter topic; return whether that was possible."""
        try:
            self._source.reject(self._node, [job], error=error)
        except Error as refusal:
            self.last_error = refusal
            log.error("%s: job %d stays in the queue: %s", self._node, job.seq, refusal)
            return False
        return True

    def _call_source(self, call: Callable[[], Any]) -> Any:
        """Call the source; return None if it fails: the leases expire and the jobs are claimable again."""
        try:
            return call()
        except Error as error:
            if str(error) != str(self.last_error):
                log.warning("the worker %s cannot claim or settle jobs: %s", self._node, error)
            self.last_error = error
        except Exception as error:
            log.exception("the worker %s cannot claim or settle jobs", self._node)
            self.last_error = Refused(
                f"the source of jobs raised {error!r:.200}; jobs that were not settled are claimable again when their "
                "leases end"
            )
        return None


async def _outcome(work: Coroutine[Any, Any, object], timeout_s: float | None) -> BaseException | None:
    """Return what a coroutine raised: SystemExit and KeyboardInterrupt would otherwise end the loop."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except BaseException as error:
        return error
    return None


def worker_for(source: JobSource, **options: Unpack[WorkerOptions]) -> Callable[[JobFunction], Worker]:
    """Return a decorator that makes a function the worker of a queue. It is not started."""
    known: Mapping[str, Any] = dict(options)

    def decorate(function: JobFunction) -> Worker:
        return Worker(source, function, **known)

    return decorate
