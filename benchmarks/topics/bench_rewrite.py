"""Rewrite of sealed segments of which half of the records are deleted, against a plain copy of their bytes.

Sketch. A rewrite reads every byte twice (checksums of frames and of chunks), encodes the batches that changed, writes
what is left, syncs, and reads that once more to compare it record by record: about five passes at memory speed, and the
sync of half of the bytes. A copy reads and writes every byte once and syncs all of them. So a rewrite should reach
at least 0.3 of a copy, and free half of the bytes.

Bytes per second are those of the old data. Each round writes a topic of its own: a rewrite cannot be repeated.
"""

from __future__ import annotations

import os
import shutil
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
                "copy": partial(_copy, place, megabytes),
            }
            found = alternate(f"rewrite, {name}", rounds, work)
            rows.append(
                result(
                    f"rewrite of half deleted segments, {name}",
                    found["rewrite"],
                    "MB/s",
                    limit=found["copy"],
                    limit_name="cp and fsync",
                    min_ratio=0.3,
                )
            )
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


def _copy(place: Path, megabytes: int) -> float:
    """The speed of a copy of as many bytes in files of 10 MB, each synced."""
    sources = []
    for number in range(max(megabytes // 10, 1)):
        source = place / f"source-{number}"
        if not source.exists():
            source.write_bytes(os.urandom(10 * MB))
        sources.append(source)
    began = time.perf_counter()
    for source in sources:
        copied = source.with_suffix(".copy")
        shutil.copyfile(source, copied)
        with open(copied, "rb") as file:
            os.fsync(file.fileno())
    took = time.perf_counter() - began
    for source in sources:
        source.with_suffix(".copy").unlink()
    return len(sources) * 10 / took
