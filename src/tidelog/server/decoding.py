"""Budget of decoded bytes of streamed bodies, for the whole process.

    reserve ──► used + size ≤ bytes_max, or nothing is used ──► decode, stage every batch ──► release
       └──────► otherwise: wait, first come, first served

The size of an Arrow message is known from its metadata before it is decoded. A stream that has decoded a message needs
no more input to stage it, so a reservation always ends and waiting cannot deadlock. While a stream waits, its
connection is not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import NamedTuple


class _Waiter(NamedTuple):
    size: int
    admitted: asyncio.Future[None]


class DecodeBudget:
    """On the loop's thread. `bytes_max` 0: no limit."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """The number of waiting reservations."""
        return len(self._waiters)

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes may be decoded. A size over the limit waits until nothing else is reserved."""
        if not self._waiters and self._fits(size):
            self.used += size
            return
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.release(size)  # admitted and cancelled in the same turn of the loop
            else:
                with suppress(ValueError):  # a release after the cancel has skipped it already
                    self._waiters.remove(waiter)
                self._admit()
            raise

    def release(self, size: int) -> None:
        """Release a reservation."""
        self.used -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return not self.bytes_max or not self.used or self.used + size <= self.bytes_max

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].size):
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                self.used += waiter.size
                waiter.admitted.set_result(None)
