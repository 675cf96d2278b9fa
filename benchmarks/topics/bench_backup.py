"""Backups of a database in use: their time against `cp -r` of the same bytes, and writes beside them.

Sketch. A backup with links reads every file once for its checksum and writes nothing but the WAL's end, so it should
take less than a copy, which reads and writes. A backup by copies reads, verifies and writes: about a copy with an
fsync of each file. An incremental backup reads footers. A write takes a commit lock that the snapshot holds for
microseconds, and shares the disk and the interpreter with the copying: its slowest in a hundred should stay within
1.2 times of what it is alone.

`python -m benchmarks.topics.bench_backup --gb 10` measures a larger database.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread

from benchmarks.common import GB, MB, Result, alternate, payloads, result, scratch_dir, use_scratch_root

import tidelog
from tidelog import Topic

_RECORD_BYTES = 1000


def run(quick: bool) -> list[Result]:
    return measure(32 * MB if quick else 512 * MB, 1 if quick else 5)


def measure(size: int, rounds: int) -> list[Result]:
    with scratch_dir(3 * size + GB // 4) as place:
        log = _make_database(place / "data", size)
        topic = log.topic("other", durability="fsync")
        work: dict[str, Callable[[], float]] = {
            "cp": partial(_time_copy, place, sync=False),
            "cp with fsync": partial(_time_copy, place, sync=True),
            "links": partial(_time_backup, log, place, link=True),
            "copies": partial(_time_backup, log, place, link=False),
            "incremental": partial(_time_incremental, log, place),
            "write p99": partial(_slowest_writes, topic, None),
            "write p99 beside": partial(_slowest_writes, topic, partial(_time_backup, log, place, link=True)),
            "write p99 beside copies": partial(_slowest_writes, topic, partial(_time_backup, log, place, link=False)),
        }
        found = alternate(f"backup of {size // MB} MB", rounds, work)
        log.close()
    told = f"of {size // MB:,} MB"
    return [
        result(f"backup {told}, links", found["links"], "s", limit=found["cp"], limit_name="cp -r", max_ratio=1),
        result(
            f"backup {told}, copies",
            found["copies"],
            "s",
            limit=found["cp with fsync"],
            limit_name="cp -r and fsync",
            max_ratio=1.5,
        ),
        result(f"backup {told}, incremental", found["incremental"], "s", limit=found["cp"], limit_name="cp -r"),
        result(
            f"write p99 beside a backup {told}, links",
            found["write p99 beside"],
            "ms",
            limit=found["write p99"],
            limit_name="alone",
            max_ratio=1.2,
        ),
        result(
            f"write p99 beside a backup {told}, copies",
            found["write p99 beside copies"],
            "ms",
            limit=found["write p99"],
            limit_name="alone",
        ),
    ]


def _make_database(path: Path, size: int) -> tidelog.Database:
    log = tidelog.open(str(path))
    topic = log.topic("many", durability="disk")
    records = payloads(_RECORD_BYTES)
    for _ in range(max(size // (_RECORD_BYTES * len(records)), 1)):
        topic.append(records)
    log.checkpoint()
    log.checkpoint()
    return log


def _time_copy(place: Path, *, sync: bool) -> float:
    target = place / "copy"
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(place / "data"), str(target)], check=True)
    if sync:
        for path in target.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fdatasync(descriptor)
                os.close(descriptor)
    took = time.perf_counter() - started
    shutil.rmtree(target)
    return took


def _time_backup(log: tidelog.Database, place: Path, *, link: bool) -> float:
    target = place / "backup"
    started = time.perf_counter()
    log.backup(str(target), link=link)
    took = time.perf_counter() - started
    shutil.rmtree(target)
    return took


def _time_incremental(log: tidelog.Database, place: Path) -> float:
    target = place / "backup"
    log.backup(str(target))
    log.topic("other").append(b"one more")
    started = time.perf_counter()
    log.backup(str(target), incremental=True)
    took = time.perf_counter() - started
    shutil.rmtree(target)
    return took


def _slowest_writes(topic: Topic, beside: Callable[[], float] | None) -> float:
    """The time, in milliseconds, that one write in a hundred exceeds; while a backup is made, again and again."""
    stop, started = Event(), Event()

    def back_up() -> None:
        while beside is not None and not stop.is_set():
            started.set()
            beside()

    thread = Thread(target=back_up)
    thread.start()
    if beside is not None:
        started.wait()
    took: list[float] = []
    data = b"x" * _RECORD_BYTES
    for _ in range(1000):
        begun = time.perf_counter()
        topic.append(data)
        took.append(time.perf_counter() - begun)
    stop.set()
    thread.join()
    return sorted(took)[int(len(took) * 0.99)] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure backups of a database of a given size.")
    parser.add_argument("--gb", type=float, default=0.5, help="size of the database (0.5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where the database is made")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-", dir=asked.dir) as directory:
        use_scratch_root(Path(directory))
        for row in measure(int(asked.gb * GB), asked.rounds):
            against = "" if row.ratio is None else f", {row.ratio:.2f} × {row.limit:.3f} {row.limit_name}"
            met = "" if row.met is None else f", target {row.target}: {'met' if row.met else 'not met'}"
            print(f"{row.name}: {row.value:.3f} {row.unit}{against}{met}")


if __name__ == "__main__":
    main()
