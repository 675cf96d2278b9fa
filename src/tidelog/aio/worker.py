"""A worker of an asyncio queue: claims jobs, runs a function for each, and acks, nacks, rejects or extends them.

    claim as many as may start ──► a task for each job ──► returned: ack
                                          │    └─────────► raised:   nack with a growing delay, or reject
                                          └ every third of the lease: extend all running jobs

Coroutine functions run on the caller's event loop, plain functions in threads. What follows from a failure, time limits
and schedules are those of `tidelog.Worker`: both use `WorkerRules`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Protocol, Self, TypeVar, Unpack

from tidelog.aio.waiting import Notifier, Wakeups
from tidelog.clock import Clock, SystemClock
from tidelog.engine import Job
from tidelog.engine.queues.worker_options import (
    JobFunction,
    WorkerOptions,
    WorkerRules,
    WorkerStats,
    check_result,
    log,
)
from tidelog.errors import Error
from tidelog.times import Seconds, seconds

T = TypeVar("T")


class HasCount(Protocol):
    @property
    def count(self) -> int: ...


class AsyncJobSource(Protocol):
    """A queue of a directory or of a server, as a worker uses it."""

    async def lease_ms(self) -> int: ...
    async def put(self, records: Any, /, *, meta: Any, key: str | None) -> object: ...
    async def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Job]: ...
    async def ack(self, node: str, seqs: Sequence[Job], /) -> HasCount: ...
    async def nack(
        self, node: str, seqs: Sequence[Job], /, *, delay_ms: int = 0, error: BaseException | str | None = None
    ) -> HasCount: ...
    async def reject(
        self, node: str, seqs: Sequence[Job], /, *, error: BaseException | str | None = None
    ) -> HasCount: ...
    async def extend(self, node: str, seqs: Sequence[Job], /, *, lease_ms: int) -> HasCount: ...


class AsyncWorker:
    """Runs a function for every job, `concurrency` at a time, until `stop` or the end of an `async with` block. Calling
    the worker calls its function, as in a test. The options are those of `tidelog.Worker`.

    A coroutine function runs on the event loop, a plain one in a thread. `on_error` may be a coroutine function.

    **Cancellation.** A task that is cancelled in `run`, or at the end of the block, lets running jobs finish. Cancelled
    once more it cancels them: they fail, and are delivered again.
    """

    def __init__(
        self,
        source: AsyncJobSource,
        function: JobFunction,
        *,
        notifiers: Sequence[Notifier] = (),
        clock: Clock | None = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        self._rules = WorkerRules(function, **options)
        self.__name__ = self._rules.name
        self.__doc__ = self._rules.doc or type(self).__doc__
        self._source, self._notifiers, self._clock = source, notifiers, clock or SystemClock()
        self._node = self._rules.node
        self._jobs: dict[asyncio.Task[None], Job] = {}  # a plain function that ran out of time keeps its task
        self._leased: dict[int, Job] = {}  # by lease id: jobs that run and have not failed
        self._done = self._failed = self._lost = 0
        self._progress = asyncio.Condition()
        self._wakeups: Wakeups | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._stopping = False
        self.last_error: Error | None = None  # of the last failed claim or settle

    def __repr__(self) -> str:
        return f"<async worker {self._node!r} of {self._source!r:.200}>"

    def __call__(self, job: Job) -> Any:
        return self._rules.plain_function(job)

    @property
    def stats(self) -> WorkerStats:
        """How many jobs were done, failed or were lost since the start."""
        return WorkerStats(self._done, self._failed, self._lost)

    @property
    def running(self) -> int:
        """The number of jobs that run now."""
        return len(self._leased)

    async def wait(self, count: int, timeout: Seconds | None = None) -> bool:
        """Wait until `count` jobs were done, failed or lost since the start; return False after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds("timeout", timeout)), self._progress:
                await self._progress.wait_for(lambda: sum(self.stats) >= count)
        return sum(self.stats) >= count

    async def start(self) -> Self:
        """Begin to claim jobs, in a task of this event loop."""
        if self._loop_task is None and not self._stopping:
            self._wakeups = Wakeups(*self._notifiers)
            self._loop_task = asyncio.create_task(self._run(self._wakeups), name=f"tidelog worker {self._node}")
        return self

    async def run(self) -> None:
        """Start, and wait until `stop` is called or this task is cancelled; running jobs finish."""
        await self.start()
        try:
            if self._loop_task is not None:
                await asyncio.wait({self._loop_task})
        finally:
            await self.stop()

    async def stop(self, timeout: Seconds | None = None) -> bool:
        """Claim no more jobs and wait for running ones; return whether all finished within `timeout` seconds. Stopping
        twice has no effect."""
        self._stopping = True
        task = self._loop_task
        if task is None:
            return True
        if self._wakeups is not None:
            self._wakeups.wake()
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds("timeout", timeout))
        except asyncio.CancelledError:
            for job in list(self._jobs):
                job.cancel()
            await asyncio.wait({task})
            raise
        if done:
            task.result()  # raises what a bug raised
        return bool(done)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ── the task that claims and extends ──────────────────────────────────────────────────────

    async def _run(self, wakeups: Wakeups) -> None:
        rules = self._rules
        lease_ms, next_extend_ms = rules.lease_ms, 0
        rules.start_schedule(self._now_ms())
        try:
            with wakeups:
                while not self._stopping or self._jobs:
                    wakeups.clear()
                    if lease_ms is None:
                        lease_ms = await self._call_source(self._source.lease_ms())
                    if lease_ms is not None:
                        if not next_extend_ms:
                            next_extend_ms = self._clock.monotonic_ms() + rules.extension_pause_ms(lease_ms)
                        await self._put_scheduled()
                        if not self._stopping:
                            await self._claim(lease_ms)
                        if self._clock.monotonic_ms() >= next_extend_ms:
                            await self._extend(lease_ms)
                            next_extend_ms = self._clock.monotonic_ms() + rules.extension_pause_ms(lease_ms)
                    if not self._stopping or self._jobs:
                        await wakeups.wait(self._pause_s(next_extend_ms))
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

    def _pause_s(self, next_extend_ms: int) -> float:
        """How long to wait for a listener's call before the next round."""
        pauses = [self._rules.poll_ms]
        if next_extend_ms:
            pauses.append(next_extend_ms - self._clock.monotonic_ms())
        if self._rules.due_ms is not None:
            pauses.append(self._rules.due_ms - self._now_ms())
        return max(min(pauses), 1) / 1000

    async def _put_scheduled(self) -> None:
        due = None if self._stopping else self._rules.scheduled_job(self._now_ms())
        if due is not None:
            await self._call_source(self._source.put([due.data], meta=due.meta, key=due.key))

    async def _claim(self, lease_ms: int) -> None:
        free = self._rules.concurrency - len(self._jobs)
        if free < 1:
            return
        jobs = await self._call_source(self._source.claim(self._node, free, lease_ms)) or ()
        if self._stopping and jobs:
            await self._call_source(self._source.nack(self._node, jobs))
            return
        for job in jobs:
            self._leased[job.lease_id] = job
            task = asyncio.create_task(self._work(job), name=f"tidelog worker {self._node}: job {job.seq}")
            self._jobs[task] = job
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._jobs.pop(task, None)
        if self._wakeups is not None:
            self._wakeups.wake()

    async def _extend(self, lease_ms: int) -> None:
        if self._leased:
            await self._call_source(self._source.extend(self._node, list(self._leased.values()), lease_ms=lease_ms))

    # ── the tasks that run jobs ───────────────────────────────────────────────────────────────

    async def _work(self, job: Job) -> None:
        try:
            failure = await self._run_function(job)
            if self._leased.pop(job.lease_id, None) is None:
                return  # it ran out of time and has failed already
            if failure is not None:
                await self._fail(job, failure)
                return
            acked = await self._call_source(self._source.ack(self._node, [job]))
            if acked is not None and acked.count:
                self._done += 1
            else:
                self._lost += 1
        finally:
            self._leased.pop(job.lease_id, None)
            await self._notify()

    async def _run_function(self, job: Job) -> BaseException | None:
        """Run the function to its end; return what it raised. A cancelled job fails, and the worker goes on."""
        try:
            if self._rules.is_async:
                async with asyncio.timeout(self._rules.timeout_s):
                    await self._rules.function(job)
                return None
            result = await self._run_in_thread(job)
            if isinstance(result, Coroutine):  # of a plain function
                await result
            else:
                check_result(result)
        except BaseException as error:
            return error
        return None

    async def _run_in_thread(self, job: Job) -> object:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._rules.concurrency, f"tidelog worker {self._node}")
        running = asyncio.get_running_loop().run_in_executor(self._threads, _call, self._rules.function, job)
        done, _ = await asyncio.wait({running}, timeout=self._rules.timeout_s)
        if not done:
            del self._leased[job.lease_id]
            await self._fail(job, self._rules.overdue_error())
            await asyncio.wait({running})
        result, error = running.result()
        if error is not None:
            raise error
        return result

    async def _fail(self, job: Job, error: BaseException) -> None:
        """Settle a job whose function raised."""
        settlement = self._rules.settle_failure(job, error)
        if not (settlement.is_rejected and await self._reject(job, error)):
            await self._call_source(
                self._source.nack(self._node, [job], delay_ms=settlement.delay_ms, error=settlement.error)
            )
        self._failed += 1
        await self._notify()
        if self._rules.on_error is not None:
            try:
                called = self._rules.on_error(job, error)
                if isawaitable(called):
                    await called
            except Exception:
                log.exception("on_error of the worker %s raised; the job %d was settled before", self._node, job.seq)

    async def _notify(self) -> None:
        """Wake the tasks in `wait`."""
        async with self._progress:
            self._progress.notify_all()

    async def _reject(self, job: Job, error: BaseException) -> bool:
        """Move a job to the dead-letter topic; return whether that was possible."""
        try:
            await self._source.reject(self._node, [job], error=error)
        except Error as refusal:
            self.last_error = refusal
            log.error("%s: job %d stays in the queue: %s", self._node, job.seq, refusal)
            return False
        return True

    async def _call_source(self, call: Awaitable[T]) -> T | None:
        """Call the source; return None if it fails: the leases expire and the jobs are claimable again."""
        try:
            return await call
        except Error as error:
            if str(error) != str(self.last_error):
                log.warning("the worker %s cannot claim or settle jobs: %s", self._node, error)
            self.last_error = error
        return None


def _call(function: JobFunction, job: Job) -> tuple[object, BaseException | None]:
    """Run a plain function in a thread. SystemExit must not end the thread, and StopIteration cannot be in a future."""
    try:
        return function(job), None
    except BaseException as error:
        return None, error


def async_worker_for(
    source: AsyncJobSource, *notifiers: Notifier, **options: Unpack[WorkerOptions]
) -> Callable[[JobFunction], AsyncWorker]:
    """Return a decorator that makes a function the worker of a queue. It is not started."""

    def decorate(function: JobFunction) -> AsyncWorker:
        return AsyncWorker(source, function, notifiers=notifiers, **options)

    return decorate
