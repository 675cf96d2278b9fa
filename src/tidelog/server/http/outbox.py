"""[shell] What was written and not taken yet: the side of a stream that must not wait, and the side that must.

write, write ──► held ──► next() ──► whoever sends
         └── above the high mark `drained` waits until the low mark is reached
"""

from __future__ import annotations

import asyncio
from collections import deque

from tidelog.server.http.limits import Limits
from tidelog.server.http.seam import Gone


class Outbox:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: deque[bytes] = deque()
        self._sending = 0  # bytes of what `next` gave last
        self._over = self._gone = False
        self._changed, self._taken = asyncio.Event(), asyncio.Event()
        self.waiting = 0
        self.whole = False  # it ended because everything was written

    # The side that writes.

    def write(self, data: bytes) -> None:
        if data and not self._over:
            self._held.append(data)
            self.waiting += len(data)
            self._changed.set()

    def hold(self, size: int) -> None:
        """Nothing: the server that sends has bounds of its own."""

    @property
    def is_pressed(self) -> bool:
        return False

    async def ready(self) -> None:
        await self.drained()

    async def drained(self) -> None:
        mark = self._limits.write_high_bytes
        while self.waiting > mark and not self._gone:
            mark = self._limits.write_low_bytes
            self._taken.clear()
            await self._taken.wait()
        if self._gone:
            raise Gone

    def end(self, whole: bool) -> None:
        """Nothing more will be written."""
        if not self._over:
            self._over, self.whole = True, whole
            self._changed.set()

    # The side that sends.

    async def next(self) -> bytes | None:
        """The next that was written, or None when there is no more. Asking again says that the last one was sent."""
        self.waiting -= self._sending
        self._sending = 0
        self._taken.set()
        while not self._held:
            if self._over:
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._held.popleft()
        self._sending = len(data)
        return data

    def shut(self) -> None:
        """Nobody takes anything any more."""
        self._over = self._gone = True
        self._held.clear()
        self.waiting = self._sending = 0
        self._changed.set()
        self._taken.set()
