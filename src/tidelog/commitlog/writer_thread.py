"""The thread that writes for tasks of asyncio: a queue of jobs, their cancellation, and the followers that it wakes.

A job is withdrawn while it waits in the queue, or it runs to its end: `settle` waits for that and returns the
cancellation that came meanwhile. Single appends that wait together are written as one batch (`append_jobs`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from threading import Condition, Thread
from typing import Any, Final, Generic, TypeVar

from tidelog.commitlog.log import SegmentedLog
from tidelog.errors import Closed, Error, Latched

T = TypeVar("T")
_GATHERED_RECORDS_MAX: Final = 1024  # of single appends that are written as one batch
_GATHERED_BYTES_MAX: Final = 4 << 20


class JobState(Enum):
    QUEUED = "queued"  # may be withdrawn
    BEGUN = "begun"  # runs to its end
    WITHDRAWN = "withdrawn"  # cancelled in the queue: never runs
    DONE = "done"


class QueuedRecord:
    """The one record of an append that may be written together with others."""

    __slots__ = ("data", "meta", "node", "tag")

    def __init__(self, data: bytes, node: bytes, tag: bytes, meta: bytes) -> None:
        self.data, self.node, self.tag, self.meta = data, node, tag, meta


class Job(Generic[T]):
    """One call for the writer thread. Its outcome is set on the event loop that waits for it."""

    __slots__ = ("call", "error", "loop", "record", "state", "value", "waiter")

    def __init__(
        self, call: Callable[[], T], loop: asyncio.AbstractEventLoop | None, record: QueuedRecord | None = None
    ) -> None:
        self.call, self.loop, self.record = call, loop, record
        self.state = JobState.QUEUED
        self.value: T | None = None
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:  # of the call: it is raised where the call was made
            self.error = error

    def finish(self) -> None:
        """Wake the task that waits for the outcome. Called on its event loop."""
        self.state = JobState.DONE
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Follower:
    """A task that follows the log. `truncations` are the marks of truncates that it has not seen yet: added by the
    writer thread before the seqs are given again, taken by the task."""

    __slots__ = ("loop", "news", "truncations")

    def __init__(self) -> None:
        self.loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self.truncations: deque[int] = deque()

    def lowest_truncation(self) -> int | None:
        """Return the smallest mark since the last call; None where there is none."""
        return min([self.truncations.popleft() for _ in range(len(self.truncations))], default=None)


class WriterThread:
    """Runs jobs one after the other. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._changed = Condition()
        self._jobs: deque[Job[Any]] = deque()
        self._stopping = False
        self.append_many: Callable[[list[Job[Any]]], None] | None = None  # writes single appends as one batch
        self.followers: set[Follower] = set()
        self._thread = Thread(target=self._run, name=f"tidelog write {path}", daemon=True)
        self._thread.start()

    def submit(self, job: Job[Any]) -> None:
        with self._changed:
            if self._stopping:
                raise Closed(f"{self._path} is closed; nothing was done, open it again")
            self._jobs.append(job)
            self._changed.notify()

    def withdraw(self, job: Job[Any]) -> bool:
        """Take a job out of the queue; False where it has begun."""
        with self._changed:
            if job.state is not JobState.QUEUED:
                return False
            job.state = JobState.WITHDRAWN
            return True

    def stop(self) -> None:
        """End the thread once the queue is empty. Does not wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _run(self) -> None:
        while jobs := self._take():
            if len(jobs) > 1 and self.append_many is not None:
                self.append_many(jobs)
            else:
                jobs[0].run()
            self._deliver(jobs)

    def _take(self) -> list[Job[Any]]:
        """Begin the next job, or the next run of single appends; empty when the thread is to end."""
        with self._changed:
            while True:
                while self._jobs and self._jobs[0].state is JobState.WITHDRAWN:
                    self._jobs.popleft()
                if self._jobs:
                    break
                if self._stopping:
                    return []
                self._changed.wait()
            taken, size = [self._jobs.popleft()], 0
            while taken[-1].record is not None and len(taken) < _GATHERED_RECORDS_MAX:
                size += len(taken[-1].record.data)
                while self._jobs and self._jobs[0].state is JobState.WITHDRAWN:
                    self._jobs.popleft()
                if size > _GATHERED_BYTES_MAX or not self._jobs or self._jobs[0].record is None:
                    break
                taken.append(self._jobs.popleft())
            for job in taken:
                job.state = JobState.BEGUN
            return taken

    def _deliver(self, jobs: list[Job[Any]]) -> None:
        """Hand every outcome to its event loop, with one call for each loop, and wake the followers."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Job[Any]]] = {}
        for job in jobs:
            if job.loop is not None:
                by_loop.setdefault(job.loop, []).append(job)
        for loop, mine in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed: its tasks are gone
                loop.call_soon_threadsafe(_finish_all, mine)
        for follower in self.followers.copy():
            try:
                follower.loop.call_soon_threadsafe(follower.news.set)
            except RuntimeError:
                self.followers.discard(follower)


def _finish_all(jobs: list[Job[Any]]) -> None:
    for job in jobs:
        job.finish()


def _same_or_each(values: list[bytes]) -> bytes | list[bytes]:
    return values[0] if values.count(values[0]) == len(values) else values


def append_jobs(log: SegmentedLog, jobs: list[Job[Any]]) -> None:
    """Write single appends as one batch. Where it is refused or rolled back, those of its records that were not written
    are appended one by one, so that each call has the outcome that it would have had alone."""
    records = [job.record for job in jobs if job.record is not None]
    try:
        seqs = log.append_many(
            [record.data for record in records],
            node=_same_or_each([record.node for record in records]),
            tag=_same_or_each([record.tag for record in records]),
            meta=_same_or_each([record.meta for record in records]),
        )
    except Latched as error:
        seqs = error.acked
        for number, job in enumerate(jobs):
            is_written = number < len(seqs)
            if is_written and len(seqs) < len(jobs):
                continue  # it was synced before the failure
            # With `interval` all were written, and the sync that was due failed.
            job.error = own = Latched(*error.args)
            own.__cause__, own.written = error, error.written
            own.acked = seqs[number : number + 1]
    except Error as error:
        seqs = error.acked
        for job in jobs[len(seqs) :]:
            job.run()
    except BaseException as error:
        seqs = range(0)
        for job in jobs:
            job.error = error
    for job, seq in zip(jobs, seqs, strict=False):
        job.value = seq


async def settle(writer: WriterThread, job: Job[Any], *, may_withdraw: bool = True) -> asyncio.CancelledError | None:
    """Wait until a job is done; return the cancellation that arrived meanwhile. Raise it at once where the job could
    be taken out of the queue."""
    assert job.loop is not None, "a job that is waited for has a loop"
    cancelled: asyncio.CancelledError | None = None
    while job.state is not JobState.DONE:
        job.waiter = job.loop.create_future()
        try:
            await job.waiter
        except asyncio.CancelledError as error:
            if may_withdraw and writer.withdraw(job):
                raise
            cancelled = error
    return cancelled
