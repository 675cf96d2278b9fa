"""Waiting for what comes by itself, and doing several things at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

T = TypeVar("T")


def eventually(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """Return as soon as it is true."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.005)


def run_together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """What these give when all of them begin at the same time."""
    waiting = list(calls)
    start = Barrier(len(waiting))

    def run(call: Callable[[], T]) -> T:
        start.wait(30)
        return call()

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(run, waiting))
