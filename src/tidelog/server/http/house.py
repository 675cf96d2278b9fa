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

from tidelog.server.http.bodies import Bodies
from tidelog.server.http.compress import Coded
from tidelog.server.http.known import Known
from tidelog.server.http.limits import Limits
from tidelog.server.http.refusals import Refusals
from tidelog.server.http.reply import Dates
from tidelog.server.http.seam import Application
from tidelog.server.http.turns import Ring
from tidelog.server.http.unsent import Unsent

_log = logging.getLogger("tidelog.server")
RECEIVE_BYTES: Final = 256 << 10


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Guest(Protocol):
    """A connection, as the house sees it."""

    def tick(self, now: float) -> None:
        """Look at the clock, which is the loop's."""

    def wind_down(self) -> None:
        """Close if idle; else finish what was begun and take no more."""

    def abort(self) -> None:
        """Drop the connection with what was not sent."""


class House:
    def __init__(
        self,
        app: Application,
        limits: Limits,
        now_us: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        *,
        kernel: bool = True,
        refusals: Refusals | None = None,
    ) -> None:
        self.app, self.limits, self.loop, self.kernel = app, limits, loop, kernel
        self.refusals = refusals or Refusals(loop.time)
        self.ring = Ring(loop, limits.turn_units)
        self.unsent = Unsent(limits.unsent_bytes_max, loop.call_later, loop.time)
        self.bodies = Bodies(limits.body_bytes_max, loop.call_soon)
        self.coded = Coded(app, loop, self.bodies)
        self.dates = Dates(now_us)
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.head_bytes_sure = min(limits.header_bytes_max, limits.target_bytes_max)  # within every limit of a head
        self.known = Known(self)
        self.guests: set[Guest] = set()
        self.draining = False
        self.now = loop.time()  # as of the last tick: near enough for time-outs, and free
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # Connections.

    def enter(self, guest: Guest) -> None:
        self.guests.add(guest)
        if self._timer is None:
            self.now = self.loop.time()
            self._timer = self.loop.call_later(self.limits.tick_s, self._tick)

    def leave(self, guest: Guest) -> None:
        self.guests.discard(guest)
        self._look_around()

    def _tick(self) -> None:
        self.now = self.loop.time()
        for guest in tuple(self.guests):
            try:
                guest.tick(self.now)
            except Exception as error:  # of one connection: the time-outs of all others are still looked after
                _log.error("a connection broke at its time-out and is dropped", exc_info=error)
                with suppress(Exception):
                    guest.abort()
        again = self.guests or self._tasks
        self._timer = self.loop.call_later(self.limits.tick_s, self._tick) if again else None

    # Tasks.

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it, and hold on to it: the loop alone would let it be collected."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def stop(self, task: asyncio.Task[None]) -> None:
        """Cancel a task that was spawned, after its first step: what it has in `finally` is always reached."""
        self.loop.call_soon(task.cancel)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report("a task of the front end failed", error)
        self._look_around()

    def report(self, message: str, error: BaseException) -> None:
        """Tell whoever runs the loop of a mistake that no peer can be told of."""
        self.loop.call_exception_handler({"message": message, "exception": error})

    # The end.

    def close(self) -> None:
        """Nobody is left: let go of the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_around(self) -> None:
        if not self.guests and not self._tasks:
            for waiter in self._waiters:
                _resolve(waiter)
            self._waiters.clear()

    async def empty(self, within_s: float) -> bool:
        """Whether every connection was gone and every task done in time."""
        if self.guests or self._tasks:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._waiters.append(waiter)
            late = self.loop.call_later(within_s, _resolve, waiter)
            try:
                await waiter
            finally:
                late.cancel()
        return not self.guests and not self._tasks
