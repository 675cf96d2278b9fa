"""Compaction of a topic against a copy of its files, and the newest record of each key against a scan.

Sketch. A first compaction of a topic that was just opened reads the key files of its segments (20 bytes a key), finds
the replaced records by binary search, logs their seqs (8 bytes each), syncs, and sets bits: no record is read. `cp`
reads and writes every byte, to the page cache alone. A compaction costs by records and `cp` by bytes: with records of
1 KB and the key files there it should reach 0.3 of `cp`. Without them (after a loss, or with another rule for keys)
every record is read, verified and parsed, and the files are written. The same limit applies. A copy that is synced, as
a compaction is, is measured beside it.

`latest(key)` is a binary search and one read of a record; a scan reads all records, as Arrow columns. A page of 1,000
keys reads their records and makes objects of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.common import GB, Result, alternate, result, scratch_dir, steps

import tidelog

_STEP = 5_000
_PAD = "x" * 960
_KEYS_SHARE = 4  # records of each key
_numbers = count()


def run(quick: bool) -> list[Result]:
    rounds, records = (2, 40_000) if quick else (5, 100_000)
    rows: list[Result] = []
    with scratch_dir(2 * GB) as place:
        made: dict[str, Path] = {}
        rules = {"by tag": "latest_by_tag", "by pointer": "/id"}
        with steps("making topics", len(rules)) as done:
            for name, rule in rules.items():
                made[name] = _made(place / rule.strip("/"), rule, records)
                done()
        work: dict[str, Callable[[], float]] = {
            "cp": partial(_copy, made["by tag"], place, sync=False),
            "cp and fsync": partial(_copy, made["by tag"], place, sync=True),
        }
        for name, path in made.items():
            work[name] = partial(_compact, path, place, keep_files=True)
        work["rebuilt"] = partial(_compact, made["by pointer"], place, keep_files=False)
        found = alternate("compaction", rounds, work)
        for name in ("by tag", "by pointer", "rebuilt"):
            title = "compaction by pointer without key files" if name == "rebuilt" else f"compaction {name}"
            rows.append(result(title, found[name], "MB/s", limit=found["cp"], limit_name="cp", min_ratio=0.3))
            synced = found["cp and fsync"]
            rows.append(result(f"{title}, synced", found[name], "MB/s", limit=synced, limit_name="cp and fsync"))
        with tidelog.open(str(made["by pointer"]), read_only=True) as log:
            topic = log.topic("t", create=False)
            topic.latest("0")  # the index is built once
            reads: dict[str, Callable[[], float]] = {
                "scan": lambda: _timed_ms(lambda: _scan(topic, "7")),
                "latest": lambda: _timed_ms(lambda: topic.latest("7")),
                "page": lambda: _timed_ms(lambda: topic.latest().page(1_000, bytes_max=1 << 30)),
            }
            seen = alternate("latest", rounds, reads)
        for name, title in (("latest", "latest record of a key"), ("page", "page of 1,000 latest records")):
            rows.append(result(title, seen[name], "ms", limit=seen["scan"], limit_name="scan", max_ratio=0.5))
    return rows


def _made(path: Path, rule: str, records: int) -> Path:
    with tidelog.open(str(path), compaction_interval_ms=1 << 40) as log:
        topic = log.topic("t", compaction=rule)
        keys = records // _KEYS_SHARE
        for first in range(0, records, _STEP):
            numbers = range(first, first + _STEP)
            batch = [{"id": str(number * 7_919 % keys), "pad": _PAD} for number in numbers]
            topic.append(batch, tag=[record["id"] for record in batch])
        topic.seal()
        log.checkpoint()
        log.checkpoint()
    return path


def _copy(source: Path, place: Path, *, sync: bool) -> float:
    """MB/s of `cp` of the segment files; `sync`: each is synced after it."""
    files = sorted((source / "topics").rglob("seg-*.data"))
    target = place / f"copy-{next(_numbers)}"
    target.mkdir()
    began = time.perf_counter()
    subprocess.run(["cp", *map(str, files), str(target)], check=True)
    for path in target.iterdir() if sync else ():
        with path.open("rb") as copy:
            os.fsync(copy.fileno())
    took = time.perf_counter() - began
    size = sum(path.stat().st_size for path in files)
    shutil.rmtree(target)
    return size / took / 1e6


def _compact(source: Path, place: Path, *, keep_files: bool) -> float:
    """MB/s of records that a compaction goes through, the checkpoint that writes its deletions included."""
    target = place / f"compact-{next(_numbers)}"
    shutil.copytree(source, target)
    if not keep_files:
        for path in target.rglob("seg-*.key"):
            path.unlink()
    size = sum(path.stat().st_size for path in target.rglob("seg-*.data"))
    with tidelog.open(str(target), compaction_interval_ms=1 << 40) as log:
        topic = log.topic("t", create=False)
        before = topic.count
        began = time.perf_counter()
        done = topic.compact()
        log.checkpoint()
        took = time.perf_counter() - began
        assert done.records == before - before // _KEYS_SHARE, done
    shutil.rmtree(target)
    return size / took / 1e6


def _scan(topic: tidelog.Topic, key: str) -> object:
    """The newest record of a key, by a scan of the columns."""
    wanted, newest = key.encode(), None
    table = topic.to_arrow()
    for seq, tag in zip(table["seq"].to_pylist(), table["tag"].to_pylist(), strict=True):
        newest = seq if tag == wanted else newest
    return newest


def _timed_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)
