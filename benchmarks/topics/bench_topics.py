"""What a directory of many topics costs: open, close, checkpoint with one dirty topic, first write, a page of the
listing, and memory. All but the open should be flat.

    python benchmarks/run.py --only topics-many
    python -m benchmarks.topics.bench_topics RESULT.json FIGURE.svg     the plot of a result

Sketch. A checkpoint and a close look at the topics that changed, and save their rows as a delta. An open reads one row
a topic and the size of its data files, and loads none of them: 10 to 20 µs a topic. A topic is loaded by its first
write. A page of the listing is made from the rows of its topics. An idle topic is its row in memory: its name, its
config as JSON and one entry a segment, about a kilobyte.

Each size is a directory of its own, made once. Rounds go by turns over all sizes. Creation of topics by their first
writes is measured with eight threads against the same number of writes to topics that exist.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread

from benchmarks.common import GB, Result, alternate, payloads, result, scratch_dir, steps
from benchmarks.topics.plot import Panel, svg

import tidelog

_PAGE = 100
_BUILD_TOGETHER = 1_000
_THREADS = 8
_MEMORY_OF_OPEN = """
import gc, sys, tidelog
from pathlib import Path
def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
tidelog.open(sys.argv[2]).close()  # what the first use of any directory takes
before = resident()
log = tidelog.open(sys.argv[1], threads=False)
print(resident() - before)
log.close()
"""


def run(quick: bool) -> list[Result]:
    rounds = 2 if quick else 5
    sizes = (1, 100, 2_000) if quick else (1, 100, 10_000, 100_000)
    rows: list[Result] = []
    with scratch_dir(GB if quick else 8 * GB) as place:
        paths = {size: place / f"topics-{size}" for size in sizes}
        with steps("making topics", len(sizes)) as done:
            for size, path in paths.items():
                _make(path, size)
                done()
        rows += _by_size(paths, rounds)
        largest = sizes[-1]
        memory = [_memory(paths[largest], place / "warm") / largest for _ in range(rounds)]
        rows.append(result(f"memory of an idle topic, {largest:,} topics", memory, "B", max_value=2_048))
        rows += _creations(place, 200 if quick else 2_000, rounds)
    return rows


def _by_size(paths: Mapping[int, Path], rounds: int) -> list[Result]:
    """Measure each operation with every number of topics."""
    sizes, rows = list(paths), list[Result]()
    for name, unit, measure, goal in (
        ("open", "ms", _open, 2_000.0),
        ("open, processor time", "ms", _open_cpu, None),
        ("close with one dirty topic", "ms", _close, 50.0),
        ("close with one dirty topic, processor time", "ms", _close_cpu, None),
        ("checkpoint with one dirty topic", "ms", _checkpoint, None),
        ("first write to a topic", "µs", _first_write, None),
        (f"list {_PAGE} topics", "µs", _list_page, None),
    ):
        figures = alternate(name, rounds, {str(size): partial(measure, path, size) for size, path in paths.items()})
        rows += [
            result(
                f"{name}, {size:,} topics",
                figures[str(size)],
                unit,
                limit=figures[str(sizes[0])],
                limit_name=f"with {sizes[0]:,}",
                max_value=goal if size == sizes[-1] else None,
            )
            for size in sizes
        ]
    return rows


def _make(path: Path, count: int) -> None:
    """Create topics with a few records each, by threads that share commits."""
    datas = payloads(100, 4)
    with tidelog.open(str(path), checkpoint_ms=1 << 40) as log:
        for low in range(0, count, _BUILD_TOGETHER):
            names = [_name(number) for number in range(low, min(low + _BUILD_TOGETHER, count))]
            _in_threads(lambda name: log.topic(name).append(datas), names)


def _name(number: int) -> str:
    return f"bench-{number:06d}"


def _in_threads(work: Callable[[str], object], names: list[str]) -> None:
    threads = [
        Thread(target=lambda part: [work(name) for name in part], args=(names[number::_THREADS],))
        for number in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ── one round of a size ───────────────────────────────────────────────────────────────────────────


def _timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def _open(path: Path, size: int, clock: Callable[[], float] = time.perf_counter) -> float:  # noqa: ARG001
    opened: list[tidelog.Database] = []
    took = _timed(lambda: opened.append(tidelog.open(str(path))), clock)
    opened[0].close()
    return took * 1e3


def _close(path: Path, size: int, clock: Callable[[], float] = time.perf_counter) -> float:
    log = tidelog.open(str(path))
    log.topic(_name(size // 2)).append(b"x")
    return _timed(log.close, clock) * 1e3


_open_cpu = partial(_open, clock=time.process_time)  # says the same on a machine that is busy with other things
_close_cpu = partial(_close, clock=time.process_time)


def _checkpoint(path: Path, size: int) -> float:
    with tidelog.open(str(path)) as log:
        topic = log.topic(_name(size // 2))
        topic.append(b"x")
        log.checkpoint()
        topic.append(b"x")
        return _timed(log.checkpoint) * 1e3


def _first_write(path: Path, size: int) -> float:
    with tidelog.open(str(path)) as log:
        count = min(size, 50)
        names = [_name(number * size // count) for number in range(count)]
        return _timed(lambda: [log.topic(name).append(b"x") for name in names]) / len(names) * 1e6


def _list_page(path: Path, size: int) -> float:
    with tidelog.open(str(path)) as log:
        log.topics(limit=1)  # names are sorted once
        after = _name(size // 2) if size > 2 * _PAGE else ""
        return _timed(lambda: [log.topics(after=after, limit=_PAGE) for _ in range(20)]) / 20 * 1e6


def _memory(path: Path, other: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_OF_OPEN, str(path), str(other)], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


# ── creating ──────────────────────────────────────────────────────────────────────────────────────


def _creations(place: Path, count: int, rounds: int) -> list[Result]:
    rates: dict[str, list[float]] = {"first writes": [], "later writes": []}
    names = [_name(number) for number in range(count)]
    for number in range(rounds):
        with tidelog.open(str(place / f"created-{number}"), checkpoint_ms=1 << 40) as log:
            for found in rates.values():
                found.append(count / _timed(partial(_in_threads, partial(_write, log), names)))
    return [
        result(
            f"{count:,} topics made by their first writes, {_THREADS} threads",
            rates["first writes"],
            "writes/s",
            limit=rates["later writes"],
            limit_name="the same writes later",
        )
    ]


def _write(log: tidelog.Database, name: str) -> None:
    log.topic(name, durability="fsync").append(b"x")


def plot(results: list[dict[str, object]]) -> str:
    """Draw the figures of a run over the number of topics."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {"ms": {}, "µs": {}}
    names = {str(row["name"]).rpartition(", ")[0] for row in results}
    for row in results:
        name, _, told = str(row["name"]).rpartition(", ")
        if told.endswith(" topics") and row["unit"] in lines and f"{name}, processor time" not in names:
            count = int(told.removesuffix(" topics").replace(",", ""))
            lines[str(row["unit"])].setdefault(name, []).append((count, float(str(row["value"]))))
    panels = [Panel(f"Cost over the number of topics, {unit}", "topics", found) for unit, found in lines.items()]
    return svg([panel for panel in panels if panel.lines], "")


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(plot(found["results"] if isinstance(found, dict) else found))
