"""What the connections of one listener share: application, limits, receive buffer, timer, budgets and tasks.

All of it runs on one loop's thread, and input is handled before the next is read, so one receive buffer serves all
connections (a buffer per connection halves the rate for bodies of a megabyte). One timer checks the time-outs of all
connections: a timer per request would cost more than parsing it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Protocol

from tidelog.http.compression import CompressionMiddleware
from tidelog.http.fast_path import HeadCache
from tidelog.http.h1_encoder import DateHeader
from tidelog.http.interface import Application
from tidelog.http.limits import LimitCounters, Limits, TurnScheduler
from tidelog.http.memory_budget import RequestBodyBudget, UnsentBudget
from tidelog.http.waiters import WaiterList

_log = logging.getLogger("tidelog.server")
RECEIVE_BYTES: Final = 256 << 10


class ManagedConnection(Protocol):
    """A connection as `ServerState` uses it."""

    def tick(self, now: float) -> None:
        """Check time-outs. `now` is the loop's time."""

    def begin_shutdown(self) -> None:
        """Close if idle; else finish the requests in progress and accept no more."""

    def abort(self) -> None:
        """Drop the connection with its unsent bytes."""


class ServerState:
    def __init__(
        self,
        app: Application,
        limits: Limits,
        now_us: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        *,
        limit_counters: LimitCounters | None = None,
    ) -> None:
        self.app, self.limits, self.loop = app, limits, loop
        self.limit_counters = limit_counters or LimitCounters(loop.time)
        self.turn_scheduler = TurnScheduler(loop, limits.turn_units)
        self.unsent_budget = UnsentBudget(limits.unsent_bytes_max, loop.call_later, loop.time)
        self.body_budget = RequestBodyBudget(limits.body_bytes_max, loop.call_soon)
        self.compressed_app = CompressionMiddleware(app, loop, self.body_budget)
        self.date_header = DateHeader(now_us)
        self.receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.safe_head_bytes = min(limits.header_bytes_max, limits.target_bytes_max)  # within every limit of a head
        self.head_cache = HeadCache(self)
        self.connections: set[ManagedConnection] = set()
        self.draining = False
        self.now_s = loop.time()  # at the last tick: precise enough for time-outs, and free
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_waiters = WaiterList()

    # Connections.

    def add_connection(self, connection: ManagedConnection) -> None:
        self.connections.add(connection)
        if self._timer is None:
            self.now_s = self.loop.time()
            self._timer = self.loop.call_later(self.limits.tick_s, self._tick)

    def remove_connection(self, connection: ManagedConnection) -> None:
        self.connections.discard(connection)
        self._wake_if_idle()

    def _tick(self) -> None:
        self.now_s = self.loop.time()
        for connection in tuple(self.connections):
            try:
                connection.tick(self.now_s)
            except Exception as error:  # of one connection: the time-outs of the others are still checked
                _log.error("a connection failed in its time-out check and is dropped", exc_info=error)
                with suppress(Exception):
                    connection.abort()
        is_needed = self.connections or self._tasks
        self._timer = self.loop.call_later(self.limits.tick_s, self._tick) if is_needed else None

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Tasks.

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task and keep a reference to it: the loop alone would let it be collected."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def cancel_task(self, task: asyncio.Task[None]) -> None:
        """Cancel a spawned task after its first step, so that its `finally` always runs."""
        self.loop.call_soon(task.cancel)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report_error("a task of the HTTP front end failed", error)
        self._wake_if_idle()

    def report_error(self, message: str, error: BaseException) -> None:
        """Pass an error that no client can receive to the loop's exception handler."""
        self.loop.call_exception_handler({"message": message, "exception": error})

    # Shutdown.

    @property
    def _is_idle(self) -> bool:
        return not self.connections and not self._tasks

    def _wake_if_idle(self) -> None:
        if self._is_idle:
            self._idle_waiters.wake()

    async def wait_closed(self, timeout_s: float) -> bool:
        """Return whether all connections closed and all tasks ended in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_idle:
                    await self._idle_waiters.wait()
        return self._is_idle
