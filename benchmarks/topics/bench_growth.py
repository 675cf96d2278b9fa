"""What a topic costs as it grows, and what it costs to have many of them: both should stay flat.

Sketch. An append touches the topic's last block, the shard's queue and the WAL, none of which knows how much lies
behind them; a read at the tail finds its part by bisection, twenty steps instead of ten. So the lines should be flat
from ten thousand to ten million records. From one topic to ten thousand the caches of the processor stop to help,
and the background thread looks at every topic twenty times a second: expected a third more, not a multiple.

Each size is a directory of its own, made once and opened anew in every round; the rounds go by turns over all
sizes, so that a drift of the machine bends all of them alike. The first write to a topic of class disk after a start
puts a reservation of seqs on disk and waits for it, and so do a few more until it lasts: the first is measured by
itself, and what a topic costs when it runs behind them. A figure is the time of many calls divided by their number, so
what the background does meanwhile is part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.common import GB, Measurements, Result, alternate, payloads, result, scratch_dir, steps

import tidelog
from tidelog import Topic

_FILL = 10_000
_PAGE = 100
_HOT = 100  # topics that are written and read in turn, of however many there are
_WARM = 12  # writes to each before the clock starts: by then a topic's reservation lasts for all that are measured


def run(quick: bool) -> list[Result]:
    rounds, each = (1, 400) if quick else (5, 4000)
    records = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
    topics = (1, 10, 100) if quick else (1, 10, 100, 1_000, 10_000)
    with scratch_dir(3 * GB if not quick else GB // 2) as place:
        rows = _grown("records", "records in the topic", records, place, _with_records, each, rounds)
        rows += _grown("topics", "topics", topics, place, _with_topics, each, rounds)
    return rows


def _grown(
    what: str,
    told: str,
    sizes: tuple[int, ...],
    place: Path,
    make: Callable[[Path, int], None],
    each: int,
    rounds: int,
) -> list[Result]:
    paths = {size: place / f"{what}-{size}" for size in sizes}
    with steps(f"making {what}", len(sizes)) as done:
        for size, path in paths.items():
            make(path, size)
            done()
    rows = []
    for name, measure in (
        ("first append", _first),
        ("append 100 B", _single),
        ("append 100 × 100 B", _batch),
        (f"tail read of {_PAGE}", _tail),
        ("close", _close),
    ):
        figures = alternate(
            f"{name}, {what}",
            rounds,
            {str(size): partial(measure, path, each) for size, path in paths.items()},
        )
        flat = name.startswith(("append", "tail"))
        rows += _line(name, told, sizes, figures, flat=flat)
    return rows


def _line(name: str, told: str, sizes: tuple[int, ...], figures: Measurements, *, flat: bool) -> list[Result]:
    """One row a size, each against the smallest."""
    rows = []
    for size in sizes:
        gate = flat and size == sizes[-1]
        rows.append(
            result(
                f"{name}, {size:,} {told}",
                figures[str(size)],
                "µs",
                limit=figures[str(sizes[0])],
                limit_name=f"with {sizes[0]:,}",
                max_ratio=1.5 if gate else None,
                kind="gate" if gate else "information",
            )
        )
    return rows


def _with_records(path: Path, count: int) -> None:
    datas = payloads(100, 1000) * (_FILL // 1000)
    with tidelog.open(str(path)) as log:
        topic = log.topic("bench")
        for _ in range(count // _FILL):
            topic.append(datas)


def _with_topics(path: Path, count: int) -> None:
    datas = payloads(100, _PAGE)
    with tidelog.open(str(path), checkpoint_ms=1 << 40) as log:
        for number in range(count):
            log.topic(f"bench-{number}").append(datas)


# ── one round of a size: microseconds a call ──────────────────────────────────────────────────────


def _some(log: tidelog.Database) -> list[Topic]:
    names = [state.topic for state in log.topics()]
    return [log.topic(name) for name in Random(0).sample(names, min(_HOT, len(names)))]


def _each(work: Callable[[Topic], object], topics: list[Topic], times: int) -> float:
    """This many calls, topic after topic."""
    start = time.perf_counter()
    for number in range(times):
        work(topics[number % len(topics)])
    return (time.perf_counter() - start) / times * 1e6


def _first(path: Path, times: int) -> float:
    data = payloads(100, 1)[0]
    with tidelog.open(str(path)) as log:
        topics = _some(log)
        return _each(lambda topic: topic.append(data), topics, min(times, len(topics)))


def _single(path: Path, times: int) -> float:
    return _written(path, payloads(100, 1)[0], times)


def _batch(path: Path, times: int) -> float:
    return _written(path, payloads(100, 100), times // 4)


def _written(path: Path, records: object, times: int) -> float:
    with tidelog.open(str(path)) as log:
        topics = _some(log)
        _each(lambda topic: topic.append(records), topics, _WARM * len(topics))
        return _each(lambda topic: topic.append(records), topics, times)


def _tail(path: Path, times: int) -> float:
    with tidelog.open(str(path)) as log:
        topics = _some(log)
        return _each(lambda topic: topic.read(topic.head_seq - _PAGE, _PAGE), topics, times // 4)


def _close(path: Path, times: int) -> float:  # noqa: ARG001
    data = payloads(100, 1)[0]
    log = tidelog.open(str(path))
    for topic in _some(log)[:1]:
        topic.append(data)
    start = time.perf_counter()
    log.close()
    return (time.perf_counter() - start) * 1e6
