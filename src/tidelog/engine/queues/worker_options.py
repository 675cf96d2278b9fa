"""What workers of threads and of asyncio have in common: options, the treatment of failures, and schedules. No I/O."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

from tidelog.disk import process
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.queues.jobs import TIME_MS_MAX, Job
from tidelog.engine.queues.schedule import Schedule
from tidelog.errors import BadInput
from tidelog.times import Duration, Seconds, duration_ms, seconds

POLL_MS_DEFAULT: Final = 250
_EXPONENT_MAX: Final = 64
log: Final = logging.getLogger("tidelog.worker")

JobFunction: TypeAlias = Callable[[Job], Any]
"""A function or a coroutine function that processes one job."""

Middleware: TypeAlias = Callable[[Job, JobFunction], Any]
"""`middleware(job, call_next)` runs around each job and returns `call_next(job)`; a coroutine function awaits it."""


class RejectJob(Exception):
    """Raised by a worker's function: no retry can save this job, it is a dead letter now."""


class RetryJob(Exception):
    """Raised by a worker's function: deliver this job again after `delay_ms`; this is no failure.

    >>> raise RetryJob(delay_ms=60_000)
    Traceback (most recent call last):
    ...
    tidelog.engine.queues.worker_options.RetryJob: again in 60000 ms
    """

    def __init__(self, *, delay_ms: int) -> None:
        super().__init__(f"again in {delay_ms} ms")
        if delay_ms < 0:
            raise BadInput(f"delay_ms is {delay_ms}, it must be 0 or more")
        self.delay_ms = delay_ms


class Backoff(NamedTuple):
    """The delay before the next delivery of a job that failed, and how many deliveries it gets."""

    first_ms: int
    factor: float
    max_ms: int
    jitter: float
    attempts: int | None

    def delay_ms(self, deliveries: int, chance: Callable[[], float] = random.random) -> int:
        """The delay after this many deliveries."""
        delay = min(self.first_ms * self.factor ** min(max(deliveries - 1, 0), _EXPONENT_MAX), self.max_ms)
        return int(delay * (1 - self.jitter * chance()))

    def is_last(self, deliveries: int) -> bool:
        """Whether a job that failed in this delivery is rejected."""
        return self.attempts is not None and deliveries >= self.attempts


def backoff(
    first_ms: int = 1_000,
    *,
    factor: float = 2.0,
    max_ms: int = 60_000,
    jitter: float = 0.0,
    attempts: int | None = None,
) -> Backoff:
    """Delay a failed job by `first_ms`, then `factor` times longer after each failure, up to `max_ms`.

    Args:
        jitter: the part of each delay, 0 to 1, that is random, so that jobs that failed together come apart.
        attempts: a job that failed so often is rejected: it moves to the queue's dead-letter topic. None: as often as
            the queue's `max_deliveries` says.

    >>> [backoff(100, attempts=5).delay_ms(n) for n in (1, 2, 3)]
    [100, 200, 400]
    """
    if not 0 <= first_ms <= max_ms or factor < 1 or not 0 <= jitter <= 1 or (attempts is not None and attempts < 1):
        raise BadInput(
            "backoff takes first_ms from 0 to max_ms, a factor of 1 or more, a jitter from 0 to 1 and attempts of 1 or "
            f"more, not {first_ms=}, {max_ms=}, {factor=}, {jitter=}, {attempts=}; nothing was started"
        )
    return Backoff(first_ms, factor, max_ms, jitter, attempts)


class WorkerOptions(TypedDict, total=False):
    """The options of a `Worker`, which documents them."""

    node: str
    concurrency: int
    lease_ms: Duration
    retries: Backoff
    timeout: Seconds
    middleware: Sequence[Middleware]
    schedule: Schedule
    schedule_data: object
    on_error: Callable[[Job, BaseException], object]
    poll_ms: int


class WorkerStats(NamedTuple):
    done: int  # acked
    failed: int  # the function raised, or took longer than its time limit
    lost: int  # finished after the lease ended: another worker may have claimed it


class ScheduledJob(NamedTuple):
    """The arguments of `put` for a job that is due. All workers of a queue put the same key: the first one wins."""

    data: object
    meta: dict[str, Any]
    key: str


class Settlement(NamedTuple):
    """What happens to a job whose function raised."""

    is_rejected: bool
    delay_ms: int
    error: BaseException | None  # what a dead letter says; None: the function asked for another delivery


class WorkerRules:
    """The function of a worker in its middleware, its options, what follows from a failure, and when the scheduled job
    is due. `Worker` documents the options."""

    def __init__(
        self,
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
    ) -> None:
        lease_ms = None if lease_ms is None else duration_ms("lease_ms", lease_ms)
        for what, value in (("concurrency", concurrency), ("lease_ms", lease_ms), ("poll_ms", poll_ms)):
            if value is not None:
                check_int(what, value, 1, TIME_MS_MAX)
        timeout_s = seconds("timeout", timeout)
        if timeout_s is not None and not timeout_s > 0:
            raise BadInput(f"timeout is {timeout}, it must be above 0; nothing was started")
        given: tuple[tuple[str, object, bool, str], ...] = (
            ("node", node, isinstance(node, str), "a text"),
            ("retries", retries, isinstance(retries, Backoff), "made by backoff(...)"),
            ("schedule", schedule, hasattr(schedule, "next_after"), "made by every(...) or cron(...)"),
            ("on_error", on_error, callable(on_error), "a function"),
            ("middleware", middleware, isinstance(middleware, Sequence), "a list of functions"),
        )
        for what, option, is_right, expected in given:
            if option is not None and not is_right:
                raise BadInput(f"{what} is {option!r:.80}, it must be {expected}; nothing was started")
        self.is_async = _is_async(function)
        for each in (function, *middleware):
            _check_function(each, is_async=self.is_async)
        self.name: str = getattr(function, "__name__", "jobs")
        self.doc: str | None = getattr(function, "__doc__", None)
        self.plain_function = self.function = function
        for wrap in reversed(middleware):
            self.function = partial(_call_middleware, wrap, self.function)
        self.node = node if node is not None else f"{self.name[:64]}-{process.process_id()}"
        self.concurrency, self.lease_ms, self.poll_ms = concurrency, lease_ms, poll_ms
        self.retries, self.timeout_s, self.on_error = retries or backoff(), timeout_s, on_error
        self._schedule, self._schedule_data = schedule, schedule_data
        self.due_ms: int | None = None  # when a scheduled job is next due, after the start

    def start_schedule(self, now_ms: int) -> None:
        """Skip the times at which no worker ran."""
        if self._schedule is not None:
            self.due_ms = self._schedule.next_after(now_ms)

    def scheduled_job(self, now_ms: int) -> ScheduledJob | None:
        """Return the job of the schedule if it is due, and note when the next one is."""
        due_ms = self.due_ms
        if self._schedule is None or due_ms is None or now_ms < due_ms:
            return None
        self.due_ms = self._schedule.next_after(now_ms)
        return ScheduledJob(self._schedule_data, {"scheduled_ms": due_ms}, f"schedule-{self.name[:128]}-{due_ms}")

    def extension_pause_ms(self, lease_ms: int) -> int:
        """How long running jobs keep their leases before they are extended."""
        return max(lease_ms // 3, 1)

    def settle_failure(self, job: Job, error: BaseException) -> Settlement:
        """Decide what happens to a job whose function raised, and log it with its traceback."""
        where = f"{self.node}: job {job.seq} (delivery {job.deliveries})"
        if isinstance(error, RetryJob):
            log.info("%s asks to be delivered again in %d ms", where, error.delay_ms)
            return Settlement(is_rejected=False, delay_ms=error.delay_ms, error=None)
        if isinstance(error, RejectJob) or self.retries.is_last(job.deliveries):
            log.error("%s failed and is rejected: %s", where, error, exc_info=error)
            return Settlement(is_rejected=True, delay_ms=self.retries.max_ms, error=error)
        delay_ms = self.retries.delay_ms(job.deliveries)
        log.error("%s failed, again in %d ms: %s", where, delay_ms, error, exc_info=error)
        return Settlement(is_rejected=False, delay_ms=delay_ms, error=error)

    def overdue_error(self) -> TimeoutError:
        """The failure of a plain function that takes longer than its time limit."""
        return TimeoutError(f"the job took longer than {self.timeout_s:g} s; its thread is still busy")


def check_result(result: object) -> None:
    """Raise BadInput for a result that is code which has not run."""
    if isinstance(result, Generator | AsyncGenerator | Awaitable):
        raise BadInput(
            f"the function returned {result!r:.200}, which has not run; the job was nacked, pass a function or a "
            "coroutine function"
        )


def _is_async(function: object) -> bool:
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _check_function(function: object, *, is_async: bool) -> None:
    if isgeneratorfunction(function) or isasyncgenfunction(function):
        raise BadInput(
            f"{function!r:.200} is a generator function: calling it runs none of its code; nothing was started, "
            "pass a function or a coroutine function"
        )
    if not callable(function):
        raise BadInput(f"{function!r:.200} is no function; nothing was started")
    if _is_async(function) != is_async:
        raise BadInput(
            f"{function!r:.200}: a coroutine function needs middleware that are coroutine functions, and a plain "
            "function plain ones; nothing was started"
        )


def _call_middleware(middleware: Middleware, call_next: JobFunction, job: Job) -> Any:
    return middleware(job, call_next)
