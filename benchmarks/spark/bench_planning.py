"""Planning: what a driver pays for a topic of 1,000, 10,000 and 100,000 segments, by path and by server.

    plan             from opening the directory, or the first request, to the list of tasks for the whole topic
    requests         of that plan to the server
    memory           by which the process of the driver grew in it
    idle micro-batch `latestOffset` of a stream with nothing new

Segments have 10,000 records of 120 bytes each, so the largest topic has a billion. Their rows are written by the real
encoder of manifests, and their files are sparse: a plan reads none of them. Each measurement runs in a process of its
own, which has planned a topic with one segment before, so imports do not count.

Sketch. A row of the manifest is 40 bytes: 4 MB for 100,000, read, verified and decoded once at some 100 MB/s, then held
as columns of 90 bytes. The plan is 3,600 tasks of 32 MB and 28 segments each. That is some 0.3 s, 40 MB. A listing of
the server is 41 bytes a segment, in four requests.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
from benchmarks.common import Result, result, scratch_dir

import tidelog
from tidelog.disk.posix import PosixDisk
from tidelog.engine import manifest
from tidelog.engine.context import topic_directory
from tidelog.engine.manifest import ManifestStore, SegmentRow, TopicEntry
from tidelog.engine.segment import format_file_name

RECORDS, DATA_BYTES, STORED_BYTES = 10_000, 1_000_000, 1_200_000  # of one segment
PLAN_S, REQUESTS, MEMORY_MB, IDLE_MS = 1.0, 10, 64.0, 10.0
_IDLE_ROUNDS = 20


def run(quick: bool) -> list[Result]:
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    found: list[Result] = []
    with scratch_dir(0) as place:
        for segments in sizes:
            path = place / f"topic-{segments}"
            make_topic(str(path), segments)
            is_largest = segments == sizes[-1]
            found += _results("path", segments, _measure(str(path), rounds=3), gate=is_largest)
            with _Server(path) as address:
                found += _results("server", segments, _measure(address, rounds=3), gate=is_largest)
    return found


def make_topic(path: str, segments: int) -> None:
    """Make a topic "history" of so many segments, and one of a single segment, "small"."""
    with tidelog.open(path, threads=False) as log:
        log.topic("small", durability="memory").append([b"x"] * 100)
        topic_id = log.topic("history", durability="memory").epoch
        log.topic("small").seal()
    disk, start_ms = PosixDisk(), int(time.time() * 1000) - segments * 1000
    loaded = manifest.load_newest(disk, path)
    row = loaded.row(topic_id)
    assert row is not None, "created above"
    rows = tuple(
        SegmentRow(
            number * RECORDS + 1,
            (number + 1) * RECORDS + 1,
            STORED_BYTES,
            RECORDS,
            DATA_BYTES,
            start_ms + number * 1000,
            start_ms + number * 1000 + 999,
            True,
        )
        for number in range(segments)
    )
    head = segments * RECORDS
    row = msgspec.structs.replace(row, head=head, reserved=head, last_ts=rows[-1].last_ts, segments=rows)
    entry = TopicEntry.from_row(row, records=head, size=segments * DATA_BYTES)
    ManifestStore(disk, path, loaded).save([entry], (), loaded.positions, final=True)
    directory = topic_directory(path, topic_id)
    os.makedirs(directory, exist_ok=True)
    for segment in rows:
        for suffix, size in ((".data", STORED_BYTES), (".idx", RECORDS * 20)):
            with open(f"{directory}/{format_file_name(segment.base, 0, suffix)}", "wb") as file:
                file.truncate(size)


def _results(where: str, segments: int, figures: dict[str, float], *, gate: bool) -> list[Result]:
    name = f"{segments:,} segments by {where}"
    goals = (
        ("plan", figures["plan_s"], "s", PLAN_S),
        ("requests", figures["requests"], "", float(REQUESTS)),
        ("memory", figures["memory_mb"], "MB", MEMORY_MB),
        ("idle micro-batch", figures["idle_ms"], "ms", IDLE_MS),
    )
    return [
        result(f"{name}, {what}", [value], unit, max_value=limit if gate else None, kind="gate")
        for what, value, unit, limit in goals
        if not (what == "requests" and where == "path")
    ]


def _measure(address: str, *, rounds: int) -> dict[str, float]:
    """The best of some rounds, each in a process of its own."""
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.spark.bench_planning", address],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parents[2],
        )
        found.append(json.loads(done.stdout))
    return {name: min(each[name] for each in found) for name in found[0]}


class _Server:
    """A server of a directory, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        command = [str(Path(sys.executable).with_name("tidelog")), "serve", "--data", str(self._path), "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None, "a pipe was asked for"
        for line in self._process.stdout:
            found = next((word for word in line.split() if word.startswith("http://")), None)
            if found is not None:
                address = found.rstrip(".,")
                break
        else:
            raise RuntimeError("the server did not start")
        while True:  # 503 until the segments are checked
            try:
                with urlopen(f"{address}/v0/ready"):
                    return address
            except HTTPError:
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


# ── in a process of its own ───────────────────────────────────────────────────────────────────────


def main(address: str) -> None:
    from pyspark.sql.datasource import CaseInsensitiveDict

    from tidelog.spark.http_client import Client
    from tidelog.spark.source import TidelogSource

    requests = 0

    def count(name: str) -> None:
        real = getattr(Client, name)

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal requests
            requests += 1
            return real(*args, **kwargs)

        setattr(Client, name, counted)

    for name in ("get", "get_bytes", "post", "stream"):  # `get_range` calls `get_bytes`
        count(name)
    where = {"server": address} if address.startswith("http") else {"path": address}

    def source(topic: str) -> TidelogSource:
        return TidelogSource(CaseInsensitiveDict({**where, "subscribe": topic, "startingOffsets": "earliest"}))

    def plan(topic: str) -> int:
        made = source(topic)
        return len(made.reader(made.schema()).partitions())

    plan("small")
    requests, before_kb, started = 0, _peak_kb(), time.perf_counter()
    tasks = plan("history")
    plan_s, memory_mb, planned_requests = time.perf_counter() - started, (_peak_kb() - before_kb) / 1000, requests
    made = source("history")
    reader = made.streamReader(made.schema())
    end = reader.latestOffset(reader.initialOffset())
    time.sleep(0.2)
    reader.latestOffset(end)
    waits: list[float] = []
    for _ in range(_IDLE_ROUNDS):
        started = time.perf_counter()
        assert reader.latestOffset(end) == end
        waits.append(time.perf_counter() - started)
    idle_ms = sorted(waits)[_IDLE_ROUNDS // 2] * 1000
    reader.stop()
    found = {"plan_s": plan_s, "tasks": tasks, "memory_mb": memory_mb, "requests": planned_requests, "idle_ms": idle_ms}
    print(json.dumps(found))


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(sys.argv[1])
