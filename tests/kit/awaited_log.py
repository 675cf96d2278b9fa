"""`AsyncSegmentedLog` with the methods of `SegmentedLog`, so that one suite runs over both.

Each call runs its coroutine to the end on an event loop of the log's own. An async iterator is read one record a call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator
from functools import wraps
from typing import Any, Self, TypeVar

from tidelog.commitlog import AsyncSegmentedLog
from tidelog.types import Buffer, Record

T = TypeVar("T")
_AWAITED_FACTS = ("segments", "size")


class _Awaited:
    """The coroutines of `target` as plain methods; everything else as it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: Any) -> None:
        self._loop, self._target = loop, target

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not inspect.iscoroutinefunction(value):
            return value
        if name in _AWAITED_FACTS:
            return self._run(value())

        @wraps(value)
        def call(*args: Any, **settings: Any) -> Any:
            return self._run(value(*args, **settings))

        return call


class AwaitedLog(_Awaited):
    @classmethod
    def open(cls, path: str, **settings: Any) -> Self:
        loop = asyncio.new_event_loop()
        try:
            return cls(loop, loop.run_until_complete(AsyncSegmentedLog.open(path, **settings)))
        except BaseException:
            loop.close()
            raise

    def end(self) -> None:
        """Close the event loop, after the log."""
        self._run(self._loop.shutdown_asyncgens())
        self._loop.close()

    def append_stream(self, chunks: Iterable[Buffer], **settings: Any) -> int:
        seq: int = self._run(self._target.append_stream(_awaited(chunks), **settings))
        return seq

    def append_stream_async(self, chunks: AsyncIterable[Buffer], **settings: Any) -> Coroutine[Any, Any, int]:
        coroutine: Coroutine[Any, Any, int] = self._target.append_stream(chunks, **settings)
        return coroutine

    def records(self, *args: Any, **settings: Any) -> Iterator[Record]:
        return self._iterate(self._target.records(*args, **settings))

    def __iter__(self) -> Iterator[Record]:
        return self._iterate(aiter(self._target))

    def _iterate(self, records: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> list[T]:
            return [record async for record in _first(records)]

        while found := self._run(following()):
            yield from found

    def __len__(self) -> int:
        return len(self._target)

    @property
    def offsets(self) -> _Awaited:
        return _Awaited(self._loop, self._target.offsets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._target.close())


async def _awaited(chunks: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk


async def _first(records: AsyncIterator[T]) -> AsyncIterator[T]:
    try:
        yield await anext(records)
    except StopAsyncIteration:
        return
