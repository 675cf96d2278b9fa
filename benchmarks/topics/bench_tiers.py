"""Moving segments to a cold store and reading them there: speed, compression, and what writers and pushes notice.

Sketch. A relocation reads a segment, hashes it, writes it, syncs it, reads it back and hashes it again: three passes
over the bytes and a sync, so a third to a half of a plain copy to the store (`cp`, or pyarrow's copy of files). A read
of the cold tier fetches 8 MiB at a time, verifies and indexes them; the plain copy back writes the same bytes to files.
An append beside a relocation shares the disk and the interpreter with it; hashing, zstd and writing release the
interpreter, and the rate is limited (64 MiB/s unless set), so p99 should hardly move.

S3 is versitygw on this machine, where it is built (`python -m tests.kit.s3`). Appends are of class `fsync`, one record
each. A push is from the append to the listener of the topic.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Thread

from benchmarks.common import GB, MB, Result, alternate, result, scratch_dir, steps, time_call
from pyarrow import fs
from tests.kit.s3 import S3Server, build_server

import tidelog
from tidelog import Database, Topic
from tidelog.database import engine_of
from tidelog.disk.object_store import open_file_system
from tidelog.engine.topic import topic_operations

_RECORD = b'{"customer":"%08d","amount":%d,"note":"delivered to the door, signed"}'


def run(quick: bool) -> list[Result]:
    rounds, records, calls = (1, 100_000, 200) if quick else (5, 1_000_000, 2_000)
    rows: list[Result] = []
    with scratch_dir(GB if quick else 4 * GB) as place, ExitStack() as stack:
        stores = {"a directory": str(place / "cold")}
        if build_server() is not None:
            (place / "s3").mkdir()
            server = S3Server(place / "s3")
            server.start()
            stack.callback(server.stop)
            stores["S3"] = server.url("bench")
        for name, address in stores.items():
            for compression in ("none", "zstd"):
                rows += _measure_store(place, name, address, compression, records, rounds)
        rows += _measure_writers(place, str(place / "beside"), calls, rounds)
    return rows


def _fill(log: Database, records: int) -> int:
    topic = log.topic("orders", durability="disk")
    for first in range(0, records, 5_000):
        topic.append([_RECORD % (n % 10_000, n * 7 % 1000) for n in range(first, first + 5_000)])
    log.checkpoint()
    return sum(place.bytes for place in log.segment_places("orders"))


def _measure_store(place: Path, name: str, address: str, compression: str, records: int, rounds: int) -> list[Result]:
    path = place / f"{name}-{compression}".replace(" ", "-")
    cold = address.replace("/bench", f"/bench-{compression}") if "://" in address else f"{address}-{compression}"
    settings = {"cold_compression": compression, "cold_cache_bytes": 0, "segment_events_max": 50_000}
    with tidelog.open(str(path), cold=cold, hot_retain_segments=0, **settings) as log:  # type: ignore[arg-type]
        with steps(f"writing records for {name}, {compression}", 1) as done:
            size = _fill(log, records)
            done()
        files = sorted(path.glob("topics/*/seg-*.data"))

        def relocate() -> float:
            log.recall("orders")
            started = time.perf_counter()
            moved = log.relocate("orders", keep_segments=0)
            return moved.bytes / MB / (time.perf_counter() - started)

        def copy() -> float:
            log.recall("orders")
            return size / MB / time_call(lambda: _copy_there(files, cold))

        found = alternate(f"relocation to {name}, {compression}", rounds, {"relocate": relocate, "copy": copy})
        log.relocate("orders", keep_segments=0)
        objects = [place.object_bytes for place in log.segment_places("orders")]
        reads = alternate(
            f"cold reads from {name}, {compression}",
            rounds,
            {
                "read": partial(_read, log.topic("orders"), size),
                "copy": lambda: size / MB / time_call(lambda: _copy_back(cold, place / "copied")),
            },
        )
        told, copied_by = f"{name}, {compression}", "cp" if "://" not in address else "pyarrow's copy"
        return [
            result(f"relocation to {told}", found["relocate"], "MB/s", limit=found["copy"], limit_name=copied_by),
            result(
                f"cold read from {told}",
                reads["read"],
                "MB/s",
                limit=reads["copy"],
                limit_name=copied_by,
                min_ratio=0.5,
                kind="gate",
            ),
            result(f"bytes in {told} of those on the disk", [sum(objects) / size * 100], "%"),
        ]


def _copy_there(files: list[Path], address: str) -> None:
    """Copy files to a store without Tidelog: `cp`, or pyarrow's copy, which uses several threads."""
    if "://" not in address:
        Path(address, "plain").mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", *map(str, files), f"{address}/plain"], check=True)
        return
    store, place = open_file_system(address)
    for file in files:
        fs.copy_files(str(file), f"{place}/plain/{file.name}", destination_filesystem=store, use_threads=True)


def _copy_back(address: str, target: Path) -> None:
    """Copy the files back without Tidelog."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    if "://" not in address:
        subprocess.run(["cp", "-r", f"{address}/plain", str(target)], check=True)
        return
    store, place = open_file_system(address)
    fs.copy_files(f"{place}/plain", str(target), source_filesystem=store, use_threads=True)


def _read(topic: Topic, size: int) -> float:
    """Read all records: fetched, verified, and located in columns."""
    started = time.perf_counter()
    for _ in topic_operations(topic).scan()._chunks():
        pass
    return size / MB / (time.perf_counter() - started)


def _measure_writers(place: Path, cold: str, calls: int, rounds: int) -> list[Result]:
    with tidelog.open(
        str(place / "writers"), cold=cold, hot_retain_segments=0, segment_events_max=20_000, threads=True
    ) as log:
        _fill(log, 400_000)
        log.recall("orders")
        live = log.topic("live", durability="fsync")
        candidates: dict[str, Callable[[], float]] = {
            f"{what} {how}": partial(_p99, live, calls, log if how == "beside" else None, pushes=what == "push")
            for what in ("ack", "push")
            for how in ("alone", "beside")
        }
        found = alternate("writers beside a relocation", rounds, candidates)
        return [
            result(
                f"{what} p99 beside a relocation",
                found[f"{what} beside"],
                "µs",
                limit=found[f"{what} alone"],
                limit_name="without one",
                max_ratio=1.2,
            )
            for what in ("ack", "push")
        ]


def _p99(topic: Topic, calls: int, moving: Database | None, *, pushes: bool) -> float:
    """The slowest in a hundred of single appends, or of the notifications of a reader."""
    stopped, pushed = Event(), list[float]()
    mover = Thread(target=_move_until, args=(moving, stopped)) if moving is not None else None

    def listen() -> None:
        pushed.append(time.perf_counter())

    topic.add_listener(listen)
    if mover is not None:
        mover.start()
    times: list[float] = []
    try:
        for _ in range(calls):
            pushed.clear()
            started = time.perf_counter()
            topic.append({"n": 1})
            times.append((pushed[0] if pushes and pushed else time.perf_counter()) - started)
    finally:
        stopped.set()
        topic.remove_listener(listen)
        if mover is not None:
            mover.join()
    return sorted(times)[int(len(times) * 0.99)] * 1e6


def _move_until(log: Database, stopped: Event) -> None:
    """Move segments at the rate of the background, and bring them back."""
    engine = engine_of(log)
    topic = engine._topics.get("orders")
    assert topic is not None
    while not stopped.is_set():
        engine._tiers.relocate([topic], keep_segments=0, throttled=True)
        engine._tiers.recall([topic], throttled=True)
