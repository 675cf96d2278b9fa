"""How the asyncio objects of a directory and of a server are opened and closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Self, TypeVar

D = TypeVar("D", bound="Closable")


class Closable(ABC):
    """An object that `async with` closes."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Opening(Generic[D]):
    """What `open` and `connect` return: `async with` it, or `await` it and close the database."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, D]]) -> None:
        self._start = start
        self._database: D | None = None

    def __await__(self) -> Generator[Any, Any, D]:
        return self._start().__await__()

    async def __aenter__(self) -> D:
        self._database = await self._start()
        return self._database

    async def __aexit__(self, *_: object) -> None:
        if self._database is not None:
            await self._database.close()
