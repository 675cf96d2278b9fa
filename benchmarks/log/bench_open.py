"""Opening a log: how long it takes and how much memory it needs, in a fresh process.

Sketch. Open reads no sealed record: it lists the directory, and of each sealed segment it reads a
footer of a few hundred bytes and maps two files. A hundred segments are some 300 files and 1500
system calls of about 2 µs, and 0.1 ms of Python each: expected 20 to 40 ms, with a few megabytes.
The active segment is read whole and verified, because a crash may have torn its end: batches at
about 1 GB/s, one frame a record at about a million records a second. That part does not grow with
the log. Found: 15 to 20 ms, 3 MB. The limit is to list and stat the same files, and to read and hash the active one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.common import GB, MB, Kind, Result, data_files, payloads, result, scratch_dir, steps, time_call
from xxhash import xxh3_64_intdigest

from tidelog.commitlog import SegmentedLog

_SEGMENTS = 100
_BATCH = 4096
_ACTIVE_BYTES = 48 << 20
_NEEDS_BYTES = 3 * GB // 2


class _Opened(NamedTuple):
    open_s: float
    grown_mb: float  # resident memory afterwards, over what it was before
    peak_mb: float  # the most it was in between
    list_s: float  # to list and stat all files
    hash_s: float  # to read and hash the active segment


def run(quick: bool) -> list[Result]:
    records = 1_000_000 if quick else 10_000_000
    rounds = 3 if quick else 7
    with scratch_dir(_NEEDS_BYTES if not quick else GB // 2) as place:
        path = place / "many"
        _make(path, records)
        writer = _measure("open", path, rounds, read_only=False)
        reader = _measure("open to read", path, rounds, read_only=True)
        size = _ACTIVE_BYTES // (8 if quick else 1)
        batched, single = place / "batched", place / "single"
        _make_active(batched, size, _append_batches)
        _make_active(single, size // 4, _append_singles)
        tail = _measure("open a full active segment", batched, rounds, read_only=False)
        frames = _measure("open an active segment of single frames", single, rounds, read_only=False)
    name = f"open {_SEGMENTS} segments, {records // 1_000_000} M records"
    full = f"open, {size >> 20} MiB active in batches"
    singles = f"open, {size >> 22} MiB active, one frame a record"
    return [
        _time(name, writer, most=1.0),
        *_memory(name, writer, most=100.0),
        _time(f"{name}, to read", reader),
        *_memory(f"{name}, to read", reader),
        _time(full, tail),
        *_memory(full, tail),
        _time(singles, frames),
        *_memory(singles, frames),
    ]


def _time(name: str, opened: list[_Opened], *, most: float | None = None) -> Result:
    """Sealed segments cost what listing them costs, the active one what reading it costs."""
    return result(
        name,
        [row.open_s for row in opened],
        "s",
        limit=[row.list_s + row.hash_s for row in opened],
        limit_name="list all, read and hash the active",
        max_value=most,
        kind="information" if most is None else "gate",
    )


def _memory(name: str, opened: list[_Opened], *, most: float | None = None) -> list[Result]:
    """What stays, and what comes and goes while opening: on a small machine that counts as well."""
    kind: Kind = "information" if most is None else "gate"
    return [
        result(f"{name}, memory", [row.grown_mb for row in opened], "MB", max_value=most, kind=kind),
        result(f"{name}, memory at its peak", [row.peak_mb for row in opened], "MB"),
    ]


def _make(path: Path, records: int) -> None:
    """A log of this many 100-byte records in sealed segments of equal size, and half a segment more."""
    datas = payloads(100, _BATCH)
    each = records // _SEGMENTS
    with (
        SegmentedLog.open(str(path), "tide", sync="interval", segment_bytes_max=1 << 30) as log,
        steps("writing a log to open", _SEGMENTS) as done,
    ):
        for _ in range(_SEGMENTS):
            _append(log, datas, each)
            log.seal()
            done()
        _append(log, datas, each // 2)


def _append(log: SegmentedLog, datas: list[bytes], count: int) -> None:
    for _ in range(count // len(datas)):
        log.append_many(datas)
    if rest := count % len(datas):
        log.append_many(datas[:rest])


def _make_active(path: Path, size: int, fill: Callable[[SegmentedLog, int], None]) -> None:
    with SegmentedLog.open(str(path), "tide", sync="interval") as log:
        fill(log, size)


def _append_batches(log: SegmentedLog, size: int) -> None:
    _append(log, payloads(100, _BATCH), size // 100)


def _append_singles(log: SegmentedLog, size: int) -> None:
    datas = payloads(100)
    for number in range(size // 146):
        log.append(datas[number % len(datas)])


def _measure(title: str, path: Path, rounds: int, *, read_only: bool) -> list[_Opened]:
    """Open in a process of its own each time: memory that a process has used once it does not ask for again."""
    found = []
    with steps(title, rounds + 1) as done:
        for turn in range(rounds + 1):
            opened = _in_child(path, read_only=read_only)
            if turn:
                found.append(opened)
            done()
    return found


def _in_child(path: Path, *, read_only: bool) -> _Opened:
    said = subprocess.run(
        [sys.executable, "-m", __name__, str(path), "read" if read_only else "write"],
        cwd=Path(__file__).resolve().parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    return _Opened(**json.loads(said.stdout))


def _status_mb(field: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / MB for line in status if line.startswith(field))


def _list(path: str) -> int:
    return sum(os.stat(os.path.join(path, name)).st_size for name in os.listdir(path))


def _hash(path: str) -> int:
    return xxh3_64_intdigest(data_files(Path(path))[-1].read_bytes())


def _child(path: str, *, read_only: bool) -> None:
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # the peak starts again from here
    before = _status_mb("VmRSS")
    start = time.perf_counter()
    log = SegmentedLog.open(path, read_only=read_only)
    taken = time.perf_counter() - start
    grown, peak = _status_mb("VmRSS") - before, _status_mb("VmHWM") - before
    log.close()
    # The limits come last: what they allocate and give back would be at hand for the open that is measured.
    listed = median(time_call(lambda: _list(path)) for _ in range(3))
    hashed = median(time_call(lambda: _hash(path)) for _ in range(3))
    print(json.dumps(_Opened(taken, grown, peak, listed, hashed)._asdict()))


if __name__ == "__main__":
    _child(sys.argv[1], read_only=sys.argv[2] == "read")
