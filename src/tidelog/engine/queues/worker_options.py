"""How a worker treats failures, and what its functions may raise to say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

from tidelog.engine.queues.jobs import Job
from tidelog.engine.queues.schedule import Schedule
from tidelog.errors import BadInput

_EXPONENT_MAX: Final = 64

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
    lease_ms: int
    retries: Backoff
    timeout: float | timedelta
    middleware: Sequence[Middleware]
    schedule: Schedule
    schedule_data: object
    on_error: Callable[[Job, BaseException], object]
    poll_ms: int
