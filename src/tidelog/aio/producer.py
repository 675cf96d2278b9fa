"""A producer for the tasks of one event loop: `tidelog.engine.producer` with awaits. One task writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from tidelog.client.database import documented_by
from tidelog.clock import SystemClock
from tidelog.engine.config import EngineConfig
from tidelog.engine.producer import Delivery, Producer, as_error, report_failures
from tidelog.engine.producer_queue import (
    RECORD_OVERHEAD_BYTES,
    FailedRecords,
    OnError,
    ProducerBatch,
    ProducerQueue,
    ProducerStats,
)
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, InDoubt, NotAllWritten, Throttled, WriteCancelled
from tidelog.times import Seconds, seconds

_TURN_RECORDS: Final = 1023  # a bit mask: other tasks run after every 1024 records
AsyncWriteBatch = Callable[[ProducerBatch], Coroutine[Any, Any, Appended]]


@documented_by(Delivery)
class AsyncDelivery:
    """One record of a producer on its way, from `AsyncProducer.send`."""

    __slots__ = ("_batch", "_index", "_producer")

    def __init__(self, producer: AsyncProducer, batch: ProducerBatch, index: int) -> None:
        self._producer, self._batch, self._index = producer, batch, index

    @property
    def done(self) -> bool:
        return self._batch.outcome(self._index) is not None

    async def result(self, timeout: Seconds | None = None) -> int:
        outcome = await self._producer._wait_for_outcome(self._batch, self._index, timeout)
        if isinstance(outcome, int):
            return outcome
        raise outcome.with_traceback(None)


@documented_by(Producer)
class AsyncProducer:
    """Writes records of many tasks in batches. `AsyncTopic.producer` returns one; use it in an `async with` block."""

    def __init__(
        self,
        topic: str,
        write: AsyncWriteBatch,
        check: Callable[[], Coroutine[Any, Any, None]],
        limits: EngineConfig,
        *,
        linger_ms: float,
        max_bytes: int,
        on_error: OnError | None,
    ) -> None:
        self._topic, self._write, self._check, self._on_error = topic, write, check, on_error
        self._queue = ProducerQueue(
            topic, limits, SystemClock(), linger_ms=linger_ms, max_bytes=max_bytes, stop_on_error=on_error is None
        )
        self._bytes_max = self._queue.record_bytes_max
        self._work = asyncio.Event()  # for the task that writes
        self._waiters: set[asyncio.Future[None]] = set()  # callers that wait for an outcome
        self._task: asyncio.Task[None] | None = None
        self._is_checked = False
        self._is_turn_over = False  # other tasks are due before the next record: `send` does not wait otherwise

    def __repr__(self) -> str:
        return f"<async producer of {self._topic!r}, {self._queue.stats().waiting} waiting>"

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except NotAllWritten as failure:
            if error is None:
                raise
            if error is not failure and error.__cause__ is None:
                error.__cause__ = failure

    async def _start(self) -> None:
        """Check the topic, and start the task that writes."""
        if not self._is_checked:
            await self._check()
            self._is_checked = True
        if self._task is None and not self._queue.is_closed:
            self._task = asyncio.create_task(self._run(), name=f"tidelog producer {self._topic}")

    # ── sending ───────────────────────────────────────────────────────────────────────────────

    async def send(
        self,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        timeout: Seconds | None = None,
    ) -> AsyncDelivery:
        """`Producer.send`. A call that is cancelled took nothing."""
        queue = self._queue
        if type(data) is bytes and tag is None and node is None and meta is None and len(data) <= self._bytes_max:
            record: Any = data
            size = len(data) + RECORD_OVERHEAD_BYTES
        else:
            record, size = queue.encode(data, tag, node, meta)
        if self._task is None:
            await self._start()
        if self._is_turn_over:
            self._is_turn_over = False
            await asyncio.sleep(0)
        batch = queue.add(record, size)
        if batch is None:
            batch = await self._add_when_possible(record, size, timeout)
        index = len(batch.records) - 1
        if index & _TURN_RECORDS == _TURN_RECORDS:
            self._is_turn_over = True
        delivery = AsyncDelivery(self, batch, index)
        if queue.needs_wake:
            queue.needs_wake = False
            self._work.set()
        return delivery

    async def _add_when_possible(self, record: Any, size: int, timeout: Seconds | None) -> ProducerBatch:
        """`add` once there is space."""
        queue, batch = self._queue, None

        def try_again() -> bool:
            nonlocal batch
            queue.check_open()
            batch = queue.add(record, size)
            return batch is not None

        queue.check_open()
        queue.close_batch()  # no record can join it
        self._work.set()
        if not await self._wait_until(try_again, timeout):
            used, most = queue.used_bytes, queue.max_bytes
            raise Throttled(f"max_bytes of the producer of {self._topic}", max=most, used=used, asked=size)
        assert batch is not None, "the condition above"
        return batch

    async def flush(self, timeout: Seconds | None = None) -> bool:
        self._queue.close_batch()
        self._work.set()
        last = self._queue.last_record()
        is_done = last is None or await self._wait_until(lambda: last[0].outcome(last[1]) is not None, timeout)
        if self._queue.failure is not None:
            raise self._queue.failure.with_traceback(None)
        return is_done

    async def close(self, timeout: Seconds | None = None) -> None:
        """`Producer.close`. A call that is cancelled gives up what was not sent and waits for the batch on its way; the
        CancelledError then has what was not written as its cause."""
        queue = self._queue
        queue.close()
        self._work.set()
        try:
            is_settled = await self._wait_until(lambda: queue.is_settled, timeout)
        except asyncio.CancelledError as cancelled:
            await self._end("close was cancelled")
            raise cancelled from queue.failure
        if not is_settled:
            await self._end(f"it was not done after {timeout} s")
        elif self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait({self._task})
        if queue.failure is not None:
            raise queue.failure.with_traceback(None)

    async def _end(self, reason: str) -> None:
        """Cancel the task that writes, which waits for the outcome of its batch, and give up the rest."""
        task = self._task
        if task is not None:
            task.cancel()
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
        self._queue.give_up(reason)
        self._wake_waiters()

    async def stats(self) -> ProducerStats:
        return self._queue.stats()

    async def _wait_for_outcome(self, batch: ProducerBatch, index: int, timeout: Seconds | None) -> int | Error:
        await self._wait_until(lambda: batch.outcome(index) is not None, timeout)
        outcome = batch.outcome(index)
        if outcome is None:
            raise InDoubt(
                f"a record of the producer of {self._topic} is not written after {timeout} s; the producer goes on, "
                "wait again or close it"
            )
        return outcome

    async def _wait_until(self, is_done: Callable[[], bool], timeout: Seconds | None) -> bool:
        loop = asyncio.get_running_loop()
        timeout_s = seconds("timeout", timeout)
        until = None if timeout_s is None else loop.time() + timeout_s
        while not is_done():
            if self._task is asyncio.current_task():
                raise BadInput("on_error must not wait for its own producer; nothing was done, do it in another task")
            if until is not None and loop.time() >= until:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=None if until is None else until - loop.time())
            finally:
                self._waiters.discard(waiter)
        return True

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # ── the task that writes ──────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        queue = self._queue
        while not (queue.is_closed and queue.is_settled):
            batch = queue.take()
            if batch is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(queue.seconds_until_due()):
                        await self._work.wait()
                self._work.clear()
                continue
            reports: list[FailedRecords] = []
            try:
                appended = await self._write(batch)
            except asyncio.CancelledError as cancelled:
                self._settle_cancelled(batch, cancelled)
                raise
            except Exception as caught:
                reports = queue.failed(batch, as_error(self._topic, caught))
            else:
                queue.written(batch, appended)
            del batch
            self._wake_waiters()
            report_failures(self._topic, self._on_error, reports)

    def _settle_cancelled(self, batch: ProducerBatch, cancelled: asyncio.CancelledError) -> None:
        """Record the outcome of a batch whose write was cancelled, and take no more records."""
        outcome = cancelled.__cause__
        self._queue.close()
        if isinstance(outcome, WriteCancelled) and isinstance(outcome.result, Appended):
            self._queue.written(batch, outcome.result)
        elif isinstance(outcome, Error):
            self._queue.failed(batch, outcome)
        else:
            self._queue.put_back(batch)
        self._queue.give_up("its task was cancelled")
        self._wake_waiters()
