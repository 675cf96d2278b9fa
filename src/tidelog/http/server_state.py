"""[shell] What the connections of one listener share: the application, one receive buffer, one timer, their number.

Everything happens on one loop's thread, and a piece of input is dealt with before the next is read, so one buffer is
enough for all (a buffer per connection costs half of the rate for bodies of a megabyte). Time-outs are looked
after by one timer for all connections: a timer of its own would cost each request more than its parsing.
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

_log = logging.getLogger("tidelog.server")
RECEIVE_BYTES: Final = 256 << 10


def _set_done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class ManagedConnection(Protocol):
    """A connection, as the house sees it."""

    def tick(self, now: float) -> None:
        """Look at the clock, which is the loop's."""

    def begin_shutdown(self) -> None:
        """Close if idle; else finish what was begun and take no more."""

    def abort(self) -> None:
        """Drop the connection with what was not sent."""


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
        self.now_s = loop.time()  # as of the last tick: near enough for time-outs, and free
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # Connections.

    def add_connection(self, connection: ManagedConnection) -> None:
        self.connections.add(connection)
        if self._timer is None:
            self.now_s = self.loop.time()
            self._timer = self.loop.call_later(self.limits.tick_s, self._tick)

    def remove_connection(self, connection: ManagedConnection) -> None:
        self.connections.discard(connection)
        self._notify_if_idle()

    def _tick(self) -> None:
        self.now_s = self.loop.time()
        for guest in tuple(self.connections):
            try:
                guest.tick(self.now_s)
            except Exception as error:  # of one connection: the time-outs of all others are still looked after
                _log.error("a connection broke at its time-out and is dropped", exc_info=error)
                with suppress(Exception):
                    guest.abort()
        again = self.connections or self._tasks
        self._timer = self.loop.call_later(self.limits.tick_s, self._tick) if again else None

    # Tasks.

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it, and hold on to it: the loop alone would let it be collected."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def cancel_task(self, task: asyncio.Task[None]) -> None:
        """Cancel a task that was spawned, after its first step: what it has in `finally` is always reached."""
        self.loop.call_soon(task.cancel)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report_error("a task of the front end failed", error)
        self._notify_if_idle()

    def report_error(self, message: str, error: BaseException) -> None:
        """Tell whoever runs the loop of a mistake that no peer can be told of."""
        self.loop.call_exception_handler({"message": message, "exception": error})

    # The end.

    def stop_timer(self) -> None:
        """Nobody is left: let go of the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notify_if_idle(self) -> None:
        if not self.connections and not self._tasks:
            for waiter in self._waiters:
                _set_done(waiter)
            self._waiters.clear()

    async def wait_closed(self, timeout_s: float) -> bool:
        """Whether every connection was gone and every task done in time."""
        if self.connections or self._tasks:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._waiters.append(waiter)
            late = self.loop.call_later(timeout_s, _set_done, waiter)
            try:
                await waiter
            finally:
                late.cancel()
        return not self.connections and not self._tasks
