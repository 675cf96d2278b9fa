"""[shell] Waking readers: one listener a topic, however many wait for it.

    committer's thread ──► Bell.strike ──► (once until it rang) the loop ──► its turn (`pump`) ──► everybody who waits

Whoever waits registers first, then looks, then waits: a record between the look and the wait rings. A topic that was
dropped is told of out of turn: there is nothing left that could be put off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from threading import get_ident

from tidelog.engine import Topic
from tidelog.server.pages import Page, View
from tidelog.server.pump import Pump

Wake = Callable[[], None]


class Bell:
    def __init__(self, topic: Topic, bells: Bells) -> None:
        self.topic, self._bells = topic, bells
        self._struck = False
        self.rung_us = -(1 << 62)
        self.waiting: dict[Wake, None] = {}

    @property
    def priority(self) -> int:
        return self.topic.priority

    @property
    def is_fan_out(self) -> bool:
        return self.topic.is_fed

    @property
    def peers(self) -> int:
        return len(self.waiting)

    def strike(self) -> None:
        """From any thread."""
        if self._struck and not self.topic.dropped:
            return
        self._struck = True
        self._bells.heard(self)

    def ring(self) -> int:
        self._struck = False  # first: a record that comes while it rings strikes again
        woken, found = list(self.waiting), self._bells.found
        try:
            for wake in woken:
                wake()
        finally:
            found.clear()
        return len(woken)


class Bells:
    """The bells of all topics that somebody waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pump: Pump) -> None:
        self._loop, self._thread, self._pump = loop, get_ident(), pump
        self._hung: dict[int, Bell] = {}
        self.found: dict[tuple[int, View], Page | None] = {}
        """What those for whom the bell rings right now are told, by where they are: most are in one place, and nothing
        that the loop has acknowledged comes between them."""
        self._far: deque[Bell] = deque()  # struck by other threads
        self._coming = False

    def __len__(self) -> int:
        return len(self._hung)

    def add(self, topic: Topic, wake: Wake) -> None:
        """Call `wake` on the loop after every write to the topic, its drop and the engine's close."""
        bell = self._hung.get(topic.id)
        if bell is None:
            bell = self._hung[topic.id] = Bell(topic, self)
            topic.listen(bell.strike)
        bell.waiting[wake] = None

    def remove(self, topic: Topic, wake: Wake) -> None:
        bell = self._hung.get(topic.id)
        if bell is None:
            return
        bell.waiting.pop(wake, None)
        if not bell.waiting:
            bell.topic.unlisten(bell.strike)
            del self._hung[topic.id]
            self._pump.forget(bell)

    def heard(self, bell: Bell) -> None:
        """From any thread: its turn is to come."""
        if get_ident() == self._thread:
            self._mark(bell)
            return
        self._far.append(bell)
        if not self._coming and not self._loop.is_closed():
            self._coming = True
            self._loop.call_soon_threadsafe(self._came)

    def _came(self) -> None:
        self._coming = False  # first: what is struck from here on asks for another call
        while self._far:
            self._mark(self._far.popleft())

    def _mark(self, bell: Bell) -> None:
        if not bell.waiting:
            return
        if bell.topic.dropped:
            self._pump.forget(bell)
            self._loop.call_soon(bell.ring)
        else:
            self._pump.mark(bell)

    def ring_all(self) -> None:
        """Everybody looks again, whoever's turn it is: the server is stopping."""
        for bell in list(self._hung.values()):
            self._pump.forget(bell)
            bell.ring()
