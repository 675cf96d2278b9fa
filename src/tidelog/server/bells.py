"""[shell] Waking readers: one listener a topic, however many wait for it.

    committer's thread ──► Bell.strike ──► (once until it was heard) the loop ──► everybody who waits

Whoever waits registers first, then looks, then waits: a record between the look and the wait rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import get_ident

from tidelog.engine import Topic

Wake = Callable[[], None]


class Bell:
    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self._loop, self._thread = loop, thread
        self._struck = False
        self.waiting: dict[Wake, None] = {}

    def strike(self) -> None:
        """From any thread."""
        if self._struck:
            return
        self._struck = True
        if get_ident() == self._thread:
            self._loop.call_soon(self._ring)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._struck = False  # first: a record that comes while it rings strikes again
        for wake in list(self.waiting):
            wake()


class Bells:
    """The bells of all topics that somebody waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, get_ident()
        self._hung: dict[int, tuple[Topic, Bell]] = {}

    def __len__(self) -> int:
        return len(self._hung)

    def add(self, topic: Topic, wake: Wake) -> None:
        """Call `wake` on the loop after every write to the topic, its drop and the engine's close."""
        found = self._hung.get(topic.id)
        if found is None:
            bell = Bell(self._loop, self._thread)
            found = self._hung[topic.id] = (topic, bell)
            topic.listen(bell.strike)
        found[1].waiting[wake] = None

    def remove(self, topic: Topic, wake: Wake) -> None:
        found = self._hung.get(topic.id)
        if found is None:
            return
        held, bell = found
        bell.waiting.pop(wake, None)
        if not bell.waiting:
            held.unlisten(bell.strike)
            del self._hung[topic.id]

    def ring_all(self) -> None:
        """Everybody looks again: the server is stopping."""
        for _, bell in list(self._hung.values()):
            bell.strike()
