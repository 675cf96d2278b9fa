"""Rewrite of sealed segments of which half of the records are deleted, against a plain copy of their bytes.

Sketch. A rewrite reads every byte twice (checksums of frames and of chunks), copies the half that stays and its
checksums, writes it, reads it back, compares it record by record, and syncs it beside the next segment's work: about
four passes at memory speed, and half of the bytes to the disk. `cp` reads and writes every byte once, to the page cache
alone. So a rewrite should reach 0.3 of it, and be near a copy that is synced as the rewrite is; and free half of
the bytes.

Bytes per second are those of the old data. Each round writes a topic of its own: a rewrite cannot be repeated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common import GB, MB, Result, alternate, result, scratch_dir

import tidelog

_RECORD_BYTES = 1000
_BATCH = 500


def run(quick: bool) -> list[Result]:
    rounds, megabytes = (1, 16) if quick else (5, 128)
    rows: list[Result] = []
    with scratch_dir(4 * GB) as place:
        numbers = iter(range(1 << 30))
        freed: list[float] = []
        for name, batch in (("batches", _BATCH), ("single records", 1)):
            work: dict[str, Callable[[], float]] = {
                "rewrite": lambda batch=batch: _rewrite(place / str(next(numbers)), megabytes, batch, freed),  # type: ignore[misc]
                "cp": partial(_copy, place, megabytes, sync=False),
                "cp and fsync": partial(_copy, place, megabytes, sync=True),
            }
            found = alternate(f"rewrite, {name}", rounds, work)
            title = f"rewrite of half deleted segments, {name}"
            rows.append(result(title, found["rewrite"], "MB/s", limit=found["cp"], limit_name="cp", min_ratio=0.3))
            synced = found["cp and fsync"]
            rows.append(result(f"{title}, synced", found["rewrite"], "MB/s", limit=synced, limit_name="cp and fsync"))
            rows.append(result(f"bytes freed of half deleted segments, {name}", freed[-1:], "%"))
    return rows


def _rewrite(path: Path, megabytes: int, batch: int, freed: list[float]) -> float:
    """The speed of a rewrite in MB of old data per second."""
    with tidelog.open(str(path), wal_shards=1, rewrite_dead_percent=0) as log:
        topic = log.topic("t", durability="memory")
        count = megabytes * MB // _RECORD_BYTES
        for first in range(0, count, max(batch, 100)):
            datas = [b"%08d" % number + b"x" * (_RECORD_BYTES - 8) for number in range(first, first + max(batch, 100))]
            if batch > 1:
                topic.append(datas)
            else:
                for data in datas:
                    topic.append(data)
        topic.seal()
        log.checkpoint()
        for first in range(1, count + 1, 10_000):
            topic.delete(seqs=list(range(first, min(first + 10_000, count + 1), 2)))
        log.checkpoint()
        rewriter, state = topic._state.context.rewriter, topic._state
        assert rewriter is not None, "opened for writing"
        began = time.perf_counter()
        done = rewriter.rewrite(state, force=True)
        took = time.perf_counter() - began
    size = sum(file.bytes_before for file in done.files)
    freed.append(100 * done.bytes_reclaimed / size)
    shutil.rmtree(path)
    return size / MB / took


def _copy(place: Path, megabytes: int, *, sync: bool) -> float:
    """The speed of `cp` of as many bytes in files of 10 MB; `sync`: each is synced after it."""
    sources = []
    for number in range(max(megabytes // 10, 1)):
        source = place / f"source-{number}"
        if not source.exists():
            source.write_bytes(os.urandom(10 * MB))
        sources.append(source)
    target = place / "copies"
    target.mkdir()
    began = time.perf_counter()
    subprocess.run(["cp", *map(str, sources), str(target)], check=True)
    for copied in target.iterdir() if sync else ():
        with open(copied, "rb") as file:
            os.fsync(file.fileno())
    took = time.perf_counter() - began
    shutil.rmtree(target)
    return len(sources) * 10 / took
