"""[shell] A request's body that is handed over as it comes.

    wire ──► feed, feed, … end | fail ──► held ──► __anext__ ──► handler
                                            └── consumed(n): the wire may bring n bytes more

One reader. What is held is bounded by whoever feeds: it looks at `held_bytes` and at what was consumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

_SMALL_BYTES: Final = 4 << 10
_JOINED_BYTES: Final = 64 << 10


def append(held: deque[bytes | bytearray], data: bytes) -> None:
    """Add a piece. Small ones are joined: a body in chunks of one byte would cost 40 times its size."""
    if len(data) >= _SMALL_BYTES:
        held.append(data)
    elif held and type(held[-1]) is bytearray and len(held[-1]) < _JOINED_BYTES:
        held[-1] += data
    else:
        held.append(bytearray(data) if held else data)


class Pieces:
    def __init__(self, loop: asyncio.AbstractEventLoop, consumed: Callable[[int], None]) -> None:
        self._loop, self._consumed = loop, consumed
        self._held: deque[bytes | bytearray] = deque()
        self._over: Exception | type[Exception] | None = None  # what the reader gets once nothing is held
        self._reader: asyncio.Future[None] | None = None
        self.held_bytes = 0

    # The wire's side.

    def feed(self, data: bytes) -> None:
        if self._over is None:
            append(self._held, data)
            self.held_bytes += len(data)
            self._wake()

    def end(self) -> None:
        """There are no more."""
        if self._over is None:
            self._over = StopAsyncIteration
            self._wake()

    def fail(self, error: Exception | type[Exception]) -> None:
        """It will never be whole: what is held is dropped, and the reader gets the error. Nothing after `end`."""
        if self._over is None:
            self._over = error
            self._held.clear()
            dropped, self.held_bytes = self.held_bytes, 0
            self._consumed(dropped)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # The handler's side.

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        while not self._held:
            if self._over is not None:
                raise self._over
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = self._held.popleft()
        self.held_bytes -= len(data)
        self._consumed(len(data))
        return bytes(data)
