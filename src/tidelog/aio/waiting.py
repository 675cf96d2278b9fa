"""What tasks wait with: listeners that wake them, and the time that is left of a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, Self

from tidelog.times import Seconds, seconds


class Notifier(Protocol):
    """A topic, a queue or the leases of a group."""

    def add_listener(self, wake: Callable[[], None]) -> None: ...
    def remove_listener(self, wake: Callable[[], None]) -> None: ...


class Wakeups:
    """Wakes a task when a source calls its listeners, and on `wake`."""

    def __init__(self, *sources: Notifier) -> None:
        self._sources, self._loop, self._event = sources, asyncio.get_running_loop(), asyncio.Event()

    def __enter__(self) -> Self:
        for source in self._sources:
            source.add_listener(self.wake)
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources:
            source.remove_listener(self.wake)

    def wake(self) -> None:
        """End the wait, from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, limit_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._event.wait()


class Deadline:
    """The time that is left of a timeout."""

    def __init__(self, timeout: Seconds | None) -> None:
        self._loop = asyncio.get_running_loop()
        timeout_s = seconds("timeout", timeout)
        self._until = None if timeout_s is None else self._loop.time() + timeout_s

    def left(self, at_most: float | None = None) -> float | None:
        left = None if self._until is None else max(self._until - self._loop.time(), 0.0)
        return at_most if left is None else left if at_most is None else min(left, at_most)

    @property
    def is_over(self) -> bool:
        return self.left() == 0.0
