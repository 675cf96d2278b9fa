"""Wait for a condition that another thread or process makes true, and run calls at the same time."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.005


def eventually(
    probe: Callable[[], T],
    within_s: float = 30.0,
    *,
    every_s: float = POLL_S,
    process: subprocess.Popen[Any] | None = None,
    why: Callable[[], object] = lambda: "not true in time",
) -> T:
    """Call `probe` until its result is true, and return that. Fails with what `why` returns when the time is over, or
    when the process that should make it true has ended."""
    deadline = time.monotonic() + within_s
    while not (found := probe()):
        assert process is None or process.poll() is None, f"the process has ended: {why()}"
        assert time.monotonic() < deadline, f"not within {within_s} s: {why()}"
        time.sleep(every_s)
    return found


async def until(probe: Callable[[], object], within_s: float = 60.0) -> None:
    """`eventually` for a task: wait until `probe` returns something true, or a coroutine of that."""
    async with asyncio.timeout(within_s):
        while not (await found if asyncio.iscoroutine(found := probe()) else found):
            await asyncio.sleep(POLL_S)


async def turns(count: int = 50) -> None:
    """Let other tasks run, so many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def run_together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Start all calls at the same time and return their results."""
    waiting = list(calls)
    start = Barrier(len(waiting))

    def run(call: Callable[[], T]) -> T:
        start.wait(30)
        return call()

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(run, waiting))
