"""Opening topics after a kill and after a clean end: how long it takes and what memory it needs, in a fresh process.

Sketch. What only the WAL has is read, hashed and put into memory again. Batches of 1000 are a thousand frames for
a million records, so the disk cache and the hash decide: 110 MB at 1 GB/s, 0.1 to 0.2 s. With one frame a record
each is hashed and looked at by Python: 0.5 µs, half a second and more for a million. Sealed segments are not
read at all: each is two `stat`s and an object, a thousand of them some 20 ms and a few megabytes. The limit is to
read and hash the WAL, or to list and stat the segments.

A killed process is one that ends without a word: everything lies in the WAL as the system call left it. Every
round opens its own copy, because opening mends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.common import GB, MB, Result, payloads, result, scratch_dir, steps, time_call
from xxhash import xxh3_64_intdigest

import tidelog

_NEVER = 1 << 40
_BATCH = 1000


class _Opened(NamedTuple):
    open_s: float
    grown_mb: float  # resident memory afterwards, over what it was before
    peak_mb: float  # the most it was in between
    records: int
    limit_s: float  # to read and hash the WAL, or to list and stat the segments


def run(quick: bool) -> list[Result]:
    fresh, sealed, rounds = (100_000, 500_000, 1) if quick else (1_000_000, 10_000_000, 5)
    rows: list[Result] = []
    with scratch_dir(3 * GB if not quick else GB // 2) as place:
        for how, told in (("batches", "batches of 1000"), ("singles", "one frame a record")):
            path = place / how
            _child(path, "make", how, fresh)
            name = f"recover {fresh:,} × 100 B from the WAL, {told}"
            rows += _rows(name, _measure(path, fresh, rounds), "read and hash the WAL")
            shutil.rmtree(path)
        path = place / "sealed"
        with steps("writing segments to open", 1) as done:
            _child(path, "make", "sealed", sealed)
            done()
        name = f"open {sealed:,} × 100 B in sealed segments"
        rows += _rows(name, _measure(path, sealed, rounds), "list and stat the segments", memory_mb=150.0)
    return rows


def _rows(name: str, opened: list[_Opened], limit_name: str, *, memory_mb: float | None = None) -> list[Result]:
    return [
        result(
            name,
            [row.open_s for row in opened],
            "s",
            limit=[row.limit_s for row in opened],
            limit_name=limit_name,
            max_value=1.0,
            kind="gate",
        ),
        result(
            f"{name}, memory",
            [row.grown_mb for row in opened],
            "MB",
            max_value=memory_mb,
            kind="information" if memory_mb is None else "gate",
        ),
        result(f"{name}, memory at its peak", [row.peak_mb for row in opened], "MB"),
    ]


def _measure(path: Path, records: int, rounds: int) -> list[_Opened]:
    """Open in a process of its own each time: memory that a process has used once it does not ask for again."""
    found = []
    copy = path.with_name("copy")
    with steps(f"open {path.name}", rounds + 1) as done:
        for turn in range(rounds + 1):
            shutil.copytree(path, copy)
            opened = _Opened(**json.loads(_child(copy, "open", path.name)))
            shutil.rmtree(copy)
            if opened.records != records:
                raise RuntimeError(f"{opened.records} of {records} records were recovered")
            if turn:
                found.append(opened)
            done()
    return found


def _child(path: Path, *command: object) -> str:
    return subprocess.run(
        [sys.executable, "-m", __name__, str(path), *map(str, command)],
        cwd=Path(__file__).resolve().parents[2],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


# ── what the child does ───────────────────────────────────────────────────────────────────────────


def _make(path: str, how: str, records: int) -> None:
    datas = payloads(100, _BATCH)
    if how == "sealed":
        with tidelog.open(path) as log:
            topic = log.topic("bench")
            for _ in range(records // _BATCH):
                topic.append(datas)
            topic.seal()
        return
    topic = tidelog.open(path, checkpoint_bytes=_NEVER, checkpoint_ms=_NEVER).topic("bench")
    for _ in range(records // _BATCH):
        if how == "batches":
            topic.append(datas)
        else:
            for token in [topic.append_nowait(data) for data in datas]:
                token.wait()
    os._exit(0)  # and not a line more: this is the kill


def _open(path: str, how: str) -> None:
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # the peak starts again from here
    before = _status_mb("VmRSS")
    start = time.perf_counter()
    log = tidelog.open(path)
    taken = time.perf_counter() - start
    grown, peak = _status_mb("VmRSS") - before, _status_mb("VmHWM") - before
    records = log.topic("bench").count
    # The limit comes last: what it allocates and gives back would be at hand for the open that is measured.
    look = _stat if how == "sealed" else _hash
    limit = median(time_call(lambda: look(Path(path))) for _ in range(3))
    print(json.dumps(_Opened(taken, grown, peak, records, limit)._asdict()), flush=True)
    os._exit(0)


def _hash(path: Path) -> int:
    return sum(xxh3_64_intdigest(file.read_bytes()) for file in path.glob("wal/**/*.log"))


def _stat(path: Path) -> int:
    return sum(os.stat(file).st_size for file in path.glob("topics/*/*"))


def _status_mb(field: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / MB for line in status if line.startswith(field))


if __name__ == "__main__":
    if sys.argv[2] == "make":
        _make(sys.argv[1], sys.argv[3], int(sys.argv[4]))
    else:
        _open(sys.argv[1], sys.argv[3])
