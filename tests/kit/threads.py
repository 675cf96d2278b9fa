"""Run calls on threads beside a test. `waiting.run_together` starts calls at once and returns their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

TIMEOUT_S = 60
"""A thread that has not ended by then waits forever."""


@contextmanager
def running(*works: Callable[[], object]) -> Iterator[None]:
    """Run these beside the body; all of them end, and none of them fails."""
    failed: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread waits forever"
    assert not failed, failed
