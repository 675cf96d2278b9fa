"""What the scheduler costs: microseconds to mark a topic and to decide whose turn it is.

Sketch. A mark is a dictionary entry, a small object and a push onto a heap whose newest element stays at the bottom:
1.5 µs. A decision is a look at five counters and a pop of fourteen levels for ten thousand topics, 3 µs. A tick that
lifts nobody is five comparisons. The same work done plainly, a look through all that are ready, would be a
millisecond at ten thousand.

With one topic the two together are what a write pays in a server that has nothing else to do; with ten thousand what
it pays in one that is late. In the row of those that age the clock runs, so that topics rise while they wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from benchmarks.common import Result, alternate, result

from tidelog.server.push.scheduling import FairQueue

_PRIORITIES = (-100, 0, 100, 300, 500, 600, 800)
_MOST_US = {1: 5.0, 100: 8.0, 10_000: 12.0}


def run(quick: bool) -> list[Result]:
    turns, rounds = (20_000, 2) if quick else (200_000, 5)
    work: dict[str, Callable[[], float]] = {_named(topics): partial(_steady, topics, turns, 0) for topics in _MOST_US}
    work[_aging(10_000)] = partial(_steady, 10_000, turns, 40)
    work["a tick over 10,000 topics that lifts none"] = partial(_ticks, 10_000, turns // 100)
    found = alternate("sched", rounds, work)
    rows = [
        result(_named(topics), found[_named(topics)], "µs", max_value=most, kind="gate")
        for topics, most in _MOST_US.items()
    ]
    rows.append(result(_aging(10_000), found[_aging(10_000)], "µs", max_value=20.0, kind="gate"))
    name = "a tick over 10,000 topics that lifts none"
    rows.append(result(name, found[name], "µs", max_value=10.0, kind="gate"))
    return rows


def _named(topics: int) -> str:
    return f"mark and decide, {topics:,} ready topic{'s' if topics > 1 else ''}"


def _aging(topics: int) -> str:
    return f"mark and decide, {topics:,} ready topics that age"


def _steady(topics: int, turns: int, step_us: int) -> float:
    """Every topic that was served is ready again, so that as many are ready all the time."""
    ready: FairQueue[int] = FairQueue()
    for key in range(topics):
        ready.add(key, _PRIORITIES[key % len(_PRIORITIES)], 0)
    now_us = 0
    began = time.perf_counter()
    for _ in range(turns):
        turn = ready.pop(now_us)
        assert turn is not None
        key = turn.key
        ready.done(key)
        ready.add(key, _PRIORITIES[key % len(_PRIORITIES)], now_us)
        now_us += step_us
    return (time.perf_counter() - began) / turns * 1e6


def _ticks(topics: int, turns: int) -> float:
    """A tick and the decision behind it, with topics that have reached the top band and stay."""
    ready: FairQueue[int] = FairQueue()
    for key in range(topics):
        ready.add(key, 0, 0)
    now_us = 60_000_000
    ready.pop(now_us)
    began = time.perf_counter()
    for _ in range(turns):
        now_us += 50_000
        ready.pop(now_us)
    return (time.perf_counter() - began) / turns * 1e6
