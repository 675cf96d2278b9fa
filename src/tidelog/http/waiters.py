"""Waiting for a condition on the loop's thread."""

from __future__ import annotations

import asyncio


class WaiterList:
    """Coroutines that wait for one condition. They are woken together and check the condition again."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._futures)

    async def wait(self) -> None:
        """Return after the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        try:
            await future
        finally:
            self._futures.remove(future)

    def wake(self) -> None:
        for future in self._futures:
            if not future.done():
                future.set_result(None)
