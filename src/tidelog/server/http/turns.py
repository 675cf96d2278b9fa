"""[policy] How much of one peer's input is handled in one turn of the loop.

    received ──► handled up to the budget ──► the rest waits, its connection is not read ──► next turns, in a ring

A piece of input can hold 40,000 frames that cost 20 µs each. Connections that have more than a turn's budget wait in
one ring, and a turn handles one budget of all of them together: requests of other connections are served between two
turns, however many connections flood the server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

REQUEST_UNITS: Final = 4
"""Of the budget, for a request: about what four control frames cost."""

FREE_UNITS: Final = 8
"""That a connection may always spend on what it just sent: a request with a body, and some."""


class Sliced(Protocol):
    """A connection with input that waits."""

    def go_on(self) -> None:
        """Handle the next slice of what waits, and enter the ring again if there is more."""
        ...


class Ring:
    """On the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, units_max: int) -> None:
        self._loop, self.units_max = loop, units_max
        self._waiting: deque[Sliced] = deque()
        self._due = False
        self._spent = 0  # units of this turn, of all connections

    @property
    def left(self) -> int:
        """Units that a connection may spend now. A few are always left: a peer that sends one request at a time is
        served at once, however many others flood the server."""
        return max(self.units_max - self._spent, FREE_UNITS)

    @property
    def is_spent(self) -> bool:
        """Whether this turn has done its share, so that whatever costs much waits for the next one."""
        return self._spent >= self.units_max

    def spend(self, units: int) -> None:
        self._spent += units
        if self._spent >= FREE_UNITS:
            self._want()  # the next turn begins with nothing spent

    def enter(self, connection: Sliced) -> None:
        self._waiting.append(connection)
        self._want()

    def _want(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        self._spent = 0
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft().go_on()
                if self._spent >= self.units_max:
                    break
        finally:
            if self._waiting:
                self._want()


class Allowance:
    """Frames that carry no request and no payload: so many at once, and a sixteenth of them a second."""

    __slots__ = ("_left", "_most")

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._left = float(most)

    def take(self, count: float = 1.0) -> bool:
        """Whether there is still one; 0 allowed means no limit."""
        self._left -= count
        return self._left >= 0 or not self._most

    def give(self, count: float) -> None:
        self._left = min(self._most, self._left + count)

    def passed(self, seconds: float) -> None:
        self.give(seconds * self._most / 16)
