"""The objects of `tidelog.aio` with the methods of the blocking ones, so that one suite runs over all of them.

Each call runs its coroutine to the end on an event loop in a thread of its own. An async iterator is read one item a
call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from copy import copy
from threading import Thread, current_thread
from typing import Any, Final, TypeVar

import tidelog.aio

T = TypeVar("T")
_TOPIC_FACTS: Final = ("id", "epoch", "config", "head_seq", "earliest_seq", "evict_floor", "count", "bytes")
_GROUP_FACTS: Final = ("position", "hold_bytes", "hold_broken")
_LIMIT_S: Final = 120


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(_LIMIT_S)

    def finish(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """`run`, but on the loop's own thread, where the garbage collector may call it, without waiting: the loop would
        wait for itself."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        if current_thread() is not self._thread:
            future.result(_LIMIT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Awaited:
    """An async object with plain methods."""

    def __init__(self, thread: LoopThread, target: Any) -> None:
        self._thread, self._target = thread, target

    def __getattr__(self, name: str) -> Any:
        kind = type(self._target).__name__
        if kind.endswith("Topic") and name in _TOPIC_FACTS:
            return getattr(self._await(self._target.state), name)
        if kind.endswith("Group") and name in _GROUP_FACTS:
            return getattr(self._await(self._target.state), name)
        if kind.endswith("Group") and name == "exists":
            return self._await(self._target.exists)
        if kind.endswith("Queue") and name == "lease_ms":
            return self._await(self._target.lease_ms)
        if kind.endswith("Queue") and name == "worker":
            return lambda **options: lambda function: Awaited(self._thread, self._target.worker(**options)(function))
        value = getattr(self._target, name)
        if inspect.ismethod(value) or inspect.isfunction(value):
            return lambda *args, **kwargs: self._call(value, *args, **kwargs)
        return self._wrap(value)

    def _await(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            found = method(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found

        return self._thread.run(call())

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "latest" and args:
            return self._await(self._target.latest(**kwargs).get, *args)
        found = self._await(method, *args, **kwargs)
        return self if found is self._target else self._wrap(found)

    def _wrap(self, found: Any) -> Any:
        if isinstance(found, AsyncGenerator):
            return AwaitedIterator(self._thread, found)
        if isinstance(found, list) and found and _is_async(found[0]):
            wrapped = copy(found)
            wrapped[:] = map(self._wrap, found)
            return wrapped
        if type(found) is tuple:
            return tuple(map(self._wrap, found))
        return Awaited(self._thread, found) if _is_async(found) else found

    def __enter__(self) -> Awaited:
        if hasattr(self._target, "start"):
            self._await(self._target.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._await(self._target.stop if hasattr(self._target, "stop") else self._target.close)

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._target, "__iter__"):
            return iter(self._target)
        return AwaitedIterator(self._thread, aiter(self._target))

    def __len__(self) -> int:
        length: int = self._await(self._target.length) if hasattr(self._target, "length") else len(self._target)
        return length

    def __bool__(self) -> bool:
        return True

    def read(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._target.read, *args, **kwargs)


class AwaitedIterator:
    """An async iterator, read one item a call; closed when it is forgotten, as a generator is."""

    def __init__(self, thread: LoopThread, items: AsyncIterator[Any]) -> None:
        self._thread, self._items = thread, items

    def __iter__(self) -> AwaitedIterator:
        return self

    def __next__(self) -> Any:
        async def following() -> Any:
            return await anext(self._items, None)

        item = self._thread.run(following())
        if item is None:
            raise StopIteration
        return Awaited(self._thread, item) if _is_async(item) else item

    def __del__(self) -> None:
        if isinstance(self._items, AsyncGenerator) and self._thread.loop.is_running():
            self._thread.finish(self._items.aclose())


def _is_async(found: object) -> bool:
    return type(found).__module__.startswith("tidelog.aio.")


def open_awaited(path: str) -> tuple[Awaited, LoopThread]:
    thread = LoopThread()
    return Awaited(thread, thread.run(_started(tidelog.aio.open(path)))), thread


def connect_awaited(url: str, key: str) -> tuple[Awaited, LoopThread]:
    thread = LoopThread()
    return Awaited(thread, thread.run(_started(tidelog.aio.connect(url, key=key)))), thread


async def _started(starting: Any) -> Any:
    return await starting
