"""A worker: claims jobs, runs a function for each, and acks, nacks or extends them.

    claim as many as there are free threads ──► function(job) ──► returned: ack
                                                    │    └──────► raised:   nack, with a growing delay
                                                    └ every third of the lease: extend all running jobs

`stop` lets running jobs finish and extends their leases meanwhile; claimed jobs that did not start are nacked at once.
The worker calls four methods of a queue, so a `RemoteQueue` of `tidelog.client` works as well.

A coroutine function is run to its end by its own event loop in the thread of the job. A generator function is refused;
a function that returns another awaitable or a generator fails the job, because nothing has run yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import isasyncgenfunction, isgeneratorfunction
from threading import Condition, Event, Lock, Thread
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable

from tidelog.clock import Clock, SystemClock
from tidelog.disk import process
from tidelog.engine.queues.jobs import Job
from tidelog.errors import BadInput, Error, Refused

_POLL_MS_DEFAULT: Final = 250
_BACKOFF_DOUBLINGS_MAX: Final = 32
_log = logging.getLogger("tidelog.worker")


class HasCount(Protocol):
    @property
    def count(self) -> int: ...


class JobSource(Protocol):
    """A `Queue`, or a `RemoteQueue`, whose jobs have the same fields."""

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Any]: ...
    def ack(self, node: str, seqs: Sequence[Any], /) -> HasCount: ...
    def nack(self, node: str, seqs: Sequence[Any], /, *, delay_ms: int = 0) -> HasCount: ...
    def extend(self, node: str, seqs: Sequence[Any], /, *, lease_ms: int) -> HasCount: ...


@runtime_checkable
class JobNotifier(Protocol):
    """A source that notifies listeners of new jobs; other sources are polled."""

    def add_listener(self, wake: Callable[[], None]) -> None: ...
    def remove_listener(self, wake: Callable[[], None]) -> None: ...


class WorkerStats(NamedTuple):
    done: int  # acked
    failed: int  # the function raised
    lost: int  # finished after the lease ended: another worker may have claimed it


class Worker:
    """Runs `function` for every job, `concurrency` at a time, until `stop` or the end of a `with` block."""

    def __init__(
        self,
        source: JobSource,
        function: Callable[[Job], Any],
        *,
        node: str,
        concurrency: int = 1,
        lease_ms: int = 30_000,
        backoff_ms: int = 1_000,
        backoff_ms_max: int = 60_000,
        poll_ms: int = _POLL_MS_DEFAULT,
        on_error: Callable[[Job, BaseException], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """After the n-th failed delivery a job is delayed by `backoff_ms` times two to the n - 1, at most
        `backoff_ms_max`. `on_error(job, error)` is called for a function that raised, in its thread. A coroutine
        function is run by `asyncio.run`, with a loop for each job; objects shared by jobs must not belong to a loop."""
        for what, value in (("concurrency", concurrency), ("lease_ms", lease_ms), ("poll_ms", poll_ms)):
            if value < 1:
                raise BadInput(f"{what} is {value}, it must be 1 or more; nothing was started")
        if not 0 <= backoff_ms <= backoff_ms_max:
            raise BadInput(f"backoff_ms is {backoff_ms}, it must be from 0 to backoff_ms_max ({backoff_ms_max})")
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise BadInput(
                f"{function!r:.200} is a generator function: calling it runs none of its code; nothing was started, "
                "pass a function or a coroutine function"
            )
        self._source, self._function, self._node = source, function, node
        self._concurrency, self._lease_ms, self._poll_ms = concurrency, lease_ms, poll_ms
        self._backoff_ms, self._backoff_ms_max = backoff_ms, backoff_ms_max
        self._on_error = on_error
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._settled = Condition(self._lock)
        self._running: dict[int, Job] = {}  # by lease id
        self._done = self._failed = self._lost = 0
        self._woken = Event()
        self._stopping = False
        self._thread: Thread | None = None
        self.last_error: Error | None = None  # of the last failed claim or settle
        process.register(self)

    def on_fork(self, pid: int) -> None:
        """Disable this worker in a forked child: the parent keeps its threads and jobs."""
        self._stopping, self._thread, self._woken = True, None, Event()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ── the thread that claims and extends ────────────────────────────────────────────────────

    def _run(self) -> None:
        notifier = self._source if isinstance(self._source, JobNotifier) else None
        if notifier is not None:
            notifier.add_listener(self._woken.set)
        extend_interval_ms = max(self._lease_ms // 3, 1)
        next_extend_ms = self._clock.monotonic_ms() + extend_interval_ms
        try:
            with ThreadPoolExecutor(self._concurrency, f"tidelog worker {self._node}") as pool:
                while not self._stopping or self._running:
                    self._woken.clear()
                    if not self._stopping:
                        self._claim(pool)
                    now_ms = self._clock.monotonic_ms()
                    if now_ms >= next_extend_ms:
                        self._extend()
                        next_extend_ms = now_ms + extend_interval_ms
                    if not self._stopping or self._running:
                        self._woken.wait(min(next_extend_ms - now_ms, self._poll_ms) / 1000)
        finally:
            if notifier is not None:
                notifier.remove_listener(self._woken.set)

    def _claim(self, pool: ThreadPoolExecutor) -> None:
        free = self._concurrency - len(self._running)
        if free < 1:
            return
        jobs = self._call_source(lambda: self._source.claim(self._node, free, self._lease_ms)) or ()
        for job in jobs:
            with self._lock:
                self._running[job.lease_id] = job
            pool.submit(self._work, job)

    def _extend(self) -> None:
        with self._lock:
            jobs = list(self._running.values())
        if jobs:
            self._call_source(lambda: self._source.extend(self._node, jobs, lease_ms=self._lease_ms))

    # ── the threads that run jobs ─────────────────────────────────────────────────────────────

    def _work(self, job: Job) -> None:
        try:
            if self._stopping:
                self._call_source(lambda: self._source.nack(self._node, [job]))
                return
            try:
                _run_to_completion(self._function(job))
            except BaseException as error:  # a cancelled coroutine, too, fails the job and not the worker
                self._fail(job, error)
            else:
                acked = self._call_source(lambda: self._source.ack(self._node, [job]).count)
                with self._lock:
                    if acked:
                        self._done += 1
                    else:
                        self._lost += 1
        finally:
            with self._lock:
                del self._running[job.lease_id]
                self._settled.notify_all()
            self._woken.set()

    def _fail(self, job: Job, error: BaseException) -> None:
        with self._lock:
            self._failed += 1
        doublings = min(max(job.deliveries - 1, 0), _BACKOFF_DOUBLINGS_MAX)
        delay_ms = min(self._backoff_ms << doublings, self._backoff_ms_max)
        self._call_source(lambda: self._source.nack(self._node, [job], delay_ms=delay_ms))
        if self._on_error is not None:
            try:
                self._on_error(job, error)
            except Exception:
                _log.exception("on_error of the worker %s raised; the job %d was nacked", self._node, job.seq)

    def _call_source(self, call: Callable[[], Any]) -> Any:
        """Call the source; return None if it fails: the leases expire and the jobs are claimable again."""
        try:
            return call()
        except Error as error:
            self.last_error = error
        except Exception as error:
            _log.exception("the worker %s cannot claim or settle jobs", self._node)
            self.last_error = Refused(
                f"the source of jobs raised {error!r:.200}; jobs that were not settled are claimable again when their "
                "leases end"
            )
        return None


def _run_to_completion(result: object) -> None:
    """Run a coroutine to its end; raise BadInput for a generator or another awaitable."""
    if isinstance(result, Coroutine):
        asyncio.run(result)
        return
    if isinstance(result, Generator | AsyncGenerator | Awaitable):
        raise BadInput(
            f"the function returned {result!r:.200}, which has not run; the job was nacked, pass a function or a "
            "coroutine function"
        )
