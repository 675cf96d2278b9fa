"""Deletes by a tag beside writers, and how they grow with the number of different tags.

Sketch. A search for one tag reads a block of 4 KiB of each sealed segment, about 50 µs of Python and of the system, 5
ms for a million records in 100 segments, whatever their tags are. It runs without the topic's lock, so an append to
another topic of the same shard beside it should take what it takes alone, and what the interpreter's lock costs:
at most a few times as long in the middle. A push to a live reader of a capped topic should cost what the eviction of a
record costs, and no sync.

All tags differ, and the cache holds indexes of 1 MiB, so that the tags do not fit. One WAL shard: every write meets the
deletes. Figures are medians of single calls; of appends also the slowest in a hundred, which met a delete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread

from benchmarks.common import GB, Result, alternate, result, scratch_dir, steps

import tidelog
from tidelog import Topic

_STEP = 10_000


def run(quick: bool) -> list[Result]:
    rounds, calls = (1, 5) if quick else (5, 20)
    sizes = (20_000, 100_000) if quick else (100_000, 1_000_000)
    rows: list[Result] = []
    with scratch_dir(GB) as place:
        logs = {}
        with steps("making topics", len(sizes)) as done:
            for size in sizes:
                logs[size] = _made(place / str(size), size)
                done()
        for size, log in logs.items():
            topic, other = log.topic("many"), log.topic("other")
            work: dict[str, Callable[[], float]] = {
                "delete": partial(_deletes, topic, size, calls),
                "append": partial(_appends, other, calls * 20, None),
                "beside": partial(_appends, other, calls * 20, partial(_deletes, topic, size, 1)),
                "append p99": partial(_appends, other, calls * 20, None, 0.99),
                "beside p99": partial(_appends, other, calls * 20, partial(_deletes, topic, size, 1), 0.99),
                "capped": partial(_pushes, log.topic("capped", cap_records=64), calls * 20),
                "free": partial(_pushes, log.topic("free"), calls * 20),
            }
            found = alternate(f"{size} tags", rounds, work)
            told = f"of {size:,} different tags"
            rows.append(result(f"delete one record {told}", found["delete"], "ms"))
            for which, most in (("", 5), (" p99", None)):
                rows.append(
                    result(
                        f"append{which} beside deletes {told}",
                        found[f"beside{which}"],
                        "µs",
                        limit=found[f"append{which}"],
                        limit_name="alone",
                        max_ratio=most,
                    )
                )
            rows.append(
                result(
                    "push to a live reader, capped",
                    found["capped"],
                    "µs",
                    limit=found["free"],
                    limit_name="no cap",
                    max_ratio=3,
                )
            )
        for log in logs.values():
            log.close()
    return rows


def _made(path: Path, size: int) -> tidelog.Database:
    log = tidelog.open(str(path), wal_shards=1, tags_cache_bytes=1 << 20)
    topic = log.topic("many", durability="disk")
    for first in range(0, size, _STEP):
        topic.append(
            [b"x" * 100] * _STEP, tag=[f"user:{number * 7_919 % size:010d}" for number in range(first, first + _STEP)]
        )
    log.checkpoint()
    return log


_next = 0


def _deletes(topic: Topic, size: int, calls: int) -> float:
    """The median time of a delete of one record, in ms."""
    global _next
    took = []
    for _ in range(calls):
        _next += 1
        began = time.perf_counter()
        topic.delete(match=f"user:{_next * 104_729 % size:010d}")
        took.append(1e3 * (time.perf_counter() - began))
    return median(took)


def _appends(topic: Topic, calls: int, beside: Callable[[], object] | None, share: float = 0.5) -> float:
    """The time in µs that this share of appends stays below, with something else going on."""
    ended = Event()

    def busy() -> None:
        while beside is not None and not ended.is_set():
            beside()

    thread = Thread(target=busy)
    thread.start()
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        topic.append(b"y" * 100)
        took.append(1e6 * (time.perf_counter() - began))
        time.sleep(0.0005)
    ended.set()
    thread.join()
    return sorted(took)[int(share * (len(took) - 1))]


def _pushes(topic: Topic, calls: int) -> float:
    """The median time of an append and of a read by a reader that has all before it, in µs."""
    cursor, took = topic.head_seq, []
    for _ in range(calls):
        began = time.perf_counter()
        topic.append(b"z" * 100)
        cursor = topic.read(cursor).next_from_seq
        took.append(1e6 * (time.perf_counter() - began))
    return median(took)
