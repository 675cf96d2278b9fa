"""A producer for threads: `send` from any of them, one thread that writes.

The state is `producer_queue`; this module waits and wakes. The thread is a daemon: a producer that is not closed loses
what it has not written when the process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Lock, Thread, current_thread
from types import TracebackType
from typing import Any, Self

from tidelog.clock import Clock, SystemClock
from tidelog.disk import process
from tidelog.engine.config import EngineConfig
from tidelog.engine.producer_queue import (
    RECORD_OVERHEAD_BYTES,
    FailedRecords,
    OnError,
    ProducerBatch,
    ProducerQueue,
    ProducerStats,
)
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, InDoubt, NotAllWritten, Throttled
from tidelog.times import Seconds, seconds

_log = logging.getLogger(__name__)
WriteBatch = Callable[[ProducerBatch], Appended]


class Delivery:
    """One record of a producer on its way, from `Producer.send`."""

    __slots__ = ("_batch", "_index", "_producer")

    def __init__(self, producer: Producer, batch: ProducerBatch, index: int) -> None:
        self._producer, self._batch, self._index = producer, batch, index

    def __repr__(self) -> str:
        outcome = self._batch.outcome(self._index)
        return (
            f"<delivery, {'waiting' if outcome is None else f'seq {outcome}' if isinstance(outcome, int) else outcome}>"
        )

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._batch.outcome(self._index) is not None

    def result(self, timeout: Seconds | None = None) -> int:
        """Wait until the record is written and return its seq. Raises the error where it was not, and InDoubt after
        `timeout` seconds: the producer goes on."""
        outcome = self._producer._wait_for_outcome(self._batch, self._index, timeout)
        if isinstance(outcome, int):
            return outcome
        raise outcome.with_traceback(None)


class Producer:
    """Writes records of many threads in batches. `Topic.producer` returns one; use it in a `with` block.

    `send` returns at once while there is space. A thread writes the records in the order in which they were sent: a
    batch when it is full (10,000 records or 2 MiB) or `linger_ms` after its first record, the next one when the outcome
    of that one is known.
    """

    def __init__(
        self,
        topic: str,
        write: WriteBatch,
        limits: EngineConfig,
        *,
        linger_ms: float,
        max_bytes: int,
        on_error: OnError | None,
        clock: Clock | None = None,
    ) -> None:
        self._topic, self._write, self._on_error = topic, write, on_error
        clock = clock or SystemClock()
        self._queue = ProducerQueue(
            topic, limits, clock, linger_ms=linger_ms, max_bytes=max_bytes, stop_on_error=on_error is None
        )
        self._bytes_max = self._queue.record_bytes_max
        self._lock = Lock()
        self._work = Condition(self._lock)  # for the thread that writes
        self._settled = Condition(self._lock)  # for callers: an outcome is known, so there is space
        self._pid = process.process_id()
        self._fork_guard = _ForkGuard(self)
        process.register(self._fork_guard)
        self._thread = Thread(target=self._run, name=f"tidelog producer {topic}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<producer of {self._topic!r}, {self._queue.stats().waiting} waiting>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. An error of the block is raised itself, with what was not written as its cause."""
        try:
            self.close()
        except NotAllWritten as failure:
            if error is None:
                raise
            if error is not failure and error.__cause__ is None:
                error.__cause__ = failure

    # ── sending ───────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        timeout: Seconds | None = None,
    ) -> Delivery:
        """Take one record to be written soon; bytes, or a value that is stored as JSON (a list is one record).

        Waits while `max_bytes` of records have no outcome. Raises Throttled after `timeout` seconds of that, and
        NotAllWritten once the producer has stopped: then this record was not taken. An interrupt while it waits takes
        nothing either.
        """
        queue = self._queue
        if type(data) is bytes and tag is None and node is None and meta is None and len(data) <= self._bytes_max:
            record: Any = data
            size = len(data) + RECORD_OVERHEAD_BYTES
        else:
            record, size = queue.encode(data, tag, node, meta)
        with self._lock:
            batch = queue.add(record, size)
            if batch is None:
                batch = self._add_when_possible(record, size, timeout)
            if queue.needs_wake:
                queue.needs_wake = False
                self._work.notify()
            return Delivery(self, batch, len(batch.records) - 1)

    def _add_when_possible(self, record: Any, size: int, timeout: Seconds | None) -> ProducerBatch:
        """`add` once there is space. With the lock held."""
        queue, batch = self._queue, None

        def try_again() -> bool:
            nonlocal batch
            queue.check_open()
            batch = queue.add(record, size)
            return batch is not None

        queue.check_open()
        queue.close_batch()  # no record can join it
        self._work.notify()
        if not self._wait_until(try_again, timeout):
            used, most = queue.used_bytes, queue.max_bytes
            raise Throttled(f"max_bytes of the producer of {self._topic}", max=most, used=used, asked=size)
        assert batch is not None, "the condition above"
        return batch

    def flush(self, timeout: Seconds | None = None) -> bool:
        """Wait until every record that was sent before has an outcome; return False after `timeout` seconds. Raises
        NotAllWritten where the producer stopped."""
        with self._lock:
            self._queue.close_batch()
            self._work.notify()
            last = self._queue.last_record()
            is_done = last is None or self._wait_until(lambda: last[0].outcome(last[1]) is not None, timeout)
            if self._queue.failure is not None:
                raise self._queue.failure.with_traceback(None)
            return is_done

    def close(self, timeout: Seconds | None = None) -> None:
        """Write what was sent and end the thread; give up after `timeout` seconds. Raises NotAllWritten where a record
        was not written: `records` were not, `in_doubt` may have been. An interrupt ends the wait and has that error as
        its cause."""
        if self._pid != process.process_id():
            return  # of the parent
        queue = self._queue
        try:
            with self._lock:
                queue.close()
                self._work.notify()
                is_settled = self._wait_until(lambda: queue.is_settled, timeout)
        except BadInput:
            raise
        except BaseException as interrupt:
            self._give_up("it was interrupted")
            raise interrupt from (queue.failure or interrupt.__cause__)
        if not is_settled:
            self._give_up(f"it was not done after {timeout} s")
        elif current_thread() is not self._thread:
            self._thread.join()
        if queue.failure is not None:
            raise queue.failure.with_traceback(None)

    def _give_up(self, reason: str) -> None:
        with process.DEFER_SIGNALS, self._lock:
            self._queue.give_up(reason)
            self._work.notify()
            self._settled.notify_all()

    def _wait_until(self, is_done: Callable[[], bool], timeout: Seconds | None) -> bool:
        """Wait for outcomes. With the lock held."""
        if current_thread() is self._thread and not is_done():
            raise BadInput("on_error must not wait for its own producer; nothing was done, do it in another thread")
        return self._settled.wait_for(is_done, seconds("timeout", timeout))

    def stats(self) -> ProducerStats:
        """Count what was sent, written, refused and in doubt, and what waits."""
        with self._lock:
            return self._queue.stats()

    def _wait_for_outcome(self, batch: ProducerBatch, index: int, timeout: Seconds | None) -> int | Error:
        with self._lock:
            self._wait_until(lambda: batch.outcome(index) is not None, timeout)
            outcome = batch.outcome(index)
        if outcome is None:
            raise InDoubt(
                f"a record of the producer of {self._topic} is not written after {timeout} s; the producer goes on, "
                "wait again or close it"
            )
        return outcome

    # ── the thread that writes ────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while (batch := self._wait_for_batch()) is not None:
            reports: list[FailedRecords] = []
            try:
                appended = self._write(batch)
            except Exception as caught:
                with self._lock:
                    reports = self._queue.failed(batch, as_error(self._topic, caught))
                    self._settled.notify_all()
            else:
                with self._lock:
                    self._queue.written(batch, appended)
                    self._settled.notify_all()
            del batch
            report_failures(self._topic, self._on_error, reports)

    def _wait_for_batch(self) -> ProducerBatch | None:
        """Return the next batch; None at the end."""
        queue = self._queue
        with self._lock:
            while (batch := queue.take()) is None:
                if queue.is_closed and queue.is_settled:
                    return None
                self._work.wait(queue.seconds_until_due())
            return batch


class _ForkGuard:
    """Disables a producer in a forked child: the parent keeps its thread and its records."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def on_fork(self, pid: int) -> None:
        process.poison_locks(f"the producer of {self._producer._topic}", pid, self._producer)


def as_error(topic: str, caught: BaseException) -> Error:
    """The error of a write; InDoubt for one that is not ours."""
    if isinstance(caught, Error):
        return caught
    _log.error("the producer of %s: a batch failed", topic, exc_info=caught)
    error = InDoubt(f"a batch for {topic} failed ({caught!r:.200}); it is unknown whether it was written, check it")
    error.__cause__ = caught
    return error


def report_failures(topic: str, on_error: OnError | None, reports: list[FailedRecords]) -> None:
    """Call `on_error`; an exception of it is logged."""
    if on_error is None:
        return
    for report in reports:
        try:
            on_error(report)
        except Exception:
            _log.exception("on_error of the producer of %s raised", topic)
