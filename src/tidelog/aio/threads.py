"""Blocking calls of an embedded database on a bounded pool of threads, for an event loop.

**Cancellation.** A call that waits for a thread is taken out of the queue: nothing was done. A read that has begun is
left to itself and its result is dropped. A change that has begun is finished first; then the CancelledError is raised,
and its `__cause__` is the outcome: `WriteCancelled` with the result, or the error of the change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, ParamSpec, TypeVar

from tidelog.errors import Error, WriteCancelled
from tidelog.wal import CommitFuture

THREADS: Final = 8
P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A pool of threads that runs the calls of one database."""

    def __init__(self, name: str, count: int = THREADS) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"tidelog aio {name}")

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that changes nothing."""
        return await asyncio.wrap_future(self._pool.submit(call, *args, **kwargs))

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that changes something; it is not left half done."""
        running = self._pool.submit(call, *args, **kwargs)
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError as cancelled:
            if running.cancel():
                raise
            raise cancelled from await self._outcome(running)

    async def commit(self, submit: Callable[[], CommitFuture[T]]) -> T:
        """Submit a write in a thread and wait for its commit without one: writes that wait share a sync."""
        try:
            return await self._settle(await self.write(submit))
        except asyncio.CancelledError as cancelled:
            outcome = cancelled.__cause__
            if isinstance(outcome, WriteCancelled) and isinstance(outcome.result, CommitFuture):
                await self._settle(outcome.result, cancelled)  # cancelled while it was submitted
            raise

    async def _settle(self, commit: CommitFuture[T], cancelled: asyncio.CancelledError | None = None) -> T:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        commit.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
        if cancelled is None:
            return commit.wait()  # does not block: it is done
        try:
            result = commit.wait()
        except Error as error:
            raise cancelled from error
        raise cancelled from WriteCancelled(self.name, result=result)

    async def _outcome(self, running: Future[T]) -> BaseException:
        waiting = asyncio.wrap_future(running)
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({waiting})
        error = running.exception()
        if error is not None:
            waiting.exception() if waiting.done() and not waiting.cancelled() else None
            return error
        return WriteCancelled(self.name, result=running.result())

    async def stop(self) -> None:
        """End the threads once their calls are done."""
        await asyncio.to_thread(partial(self._pool.shutdown, wait=True))
