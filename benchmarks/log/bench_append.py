"""Append throughput and rate, against raw writes of the same bytes and against SQLite.

Sketch. A raw buffered write of 1 MB is one copy into the page cache: 3 to 4 GB/s while memory is
not fresh. An append of the same bytes adds a join (one more copy), a hash, an index entry per
record and the interval's syncs: expected half of the raw rate while nothing is synced. With a sync
per batch the disk decides: 1 MB takes about a millisecond to write and sync, the code 0.3 ms of it,
expected 75 %. A single durable append is one small write and one sync of some 200 µs: expected 90 %
of the raw rate with `each`; without a sync, 20 µs of Python, 50 000 a second.

The gate holds like against like: neither side syncs. Copy, hash and write alone would be 65 % of the raw
write; what is left is some 25 µs of Python a frame. With the interval's syncs and a seal every 64 MiB the
disk decides: it takes 1.2 to 1.8 GB/s where the page cache takes 4, so half of a write that never syncs is
out of reach for anything that keeps the promise. Those stand beside a raw write that syncs as often. The
two kinds are measured apart: what one leaves for the disk to write is still being written when the next begins.

Logs and files are made anew in each round and removed after it, so that the page cache does not
grow into memory that the machine has never touched, which is several times slower.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import GB, Measurements, Result, alternate, payloads, result, scratch_dir

from tidelog.commitlog import SegmentedLog

_CODECS: dict[str, dict[str, Any]] = {
    "tide": {"codec": "tide"},
    "rustlog": {"codec": "rustlog"},
    "rustlog without checksums": {"codec": "rustlog", "checksums": False},
    "laminar": {"codec": "laminar"},
    "narwhal": {"codec": "narwhal"},
}
_NEVER_MS = 1_000_000_000
_INTERVAL_S = 0.050
_SEGMENT_BYTES = 64 << 20
_NEEDS_BYTES = 2 * GB


def run(quick: bool) -> list[Result]:
    rounds = 3 if quick else 7
    with scratch_dir(_NEEDS_BYTES if not quick else GB // 2) as place:
        return [
            *_unsynced(place, 64 if quick else 256, rounds),
            *_buffered(place, 64 if quick else 256, rounds),
            *_synced(place, 16 if quick else 64, rounds),
            *_singles(place, 200 if quick else 1000, rounds),
        ]


def _unsynced(place: Path, batches: int, rounds: int) -> list[Result]:
    """What the code costs: nothing is synced, and one segment takes all of it."""
    datas = payloads(1024)
    endless = {"sync_interval_ms": _NEVER_MS, "segment_bytes_max": 1 << 30}
    figures = alternate(
        "append, never synced",
        rounds,
        {
            "code": partial(_append_many, place, datas, batches, codec="tide", sync="interval", **endless),
            "raw": partial(_write, place, b"".join(datas), batches, sync_s=None),
        },
    )
    name = "append 1 KB × 1000, never synced, tide"
    return [_against(name, figures, "code", "raw", "raw buffered write", least_ratio=0.5)]


def _buffered(place: Path, batches: int, rounds: int) -> list[Result]:
    """`sync="interval"`: what the operating system has is acked, the disk follows in the background."""
    datas = payloads(1024)
    blob = b"".join(datas)
    logs = {
        name: partial(_append_many, place, datas, batches, sync="interval", **settings)
        for name, settings in _CODECS.items()
    }
    figures = alternate(
        "append, buffered",
        rounds,
        {
            **logs,
            "raw": partial(_write, place, blob, batches, sync_s=None),
            "raw synced": partial(_write, place, blob, batches, sync_s=_INTERVAL_S),
        },
    )
    name = "append 1 KB × 1000, interval"
    raw = "raw buffered write"
    return [
        _against(f"{name}, tide", figures, "tide", "raw", raw),
        _against(f"{name}, tide, same promise", figures, "tide", "raw synced", "raw write, synced as often"),
        *(_against(f"{name}, {codec}", figures, codec, "raw", raw) for codec in list(_CODECS)[1:]),
    ]


def _synced(place: Path, batches: int, rounds: int) -> list[Result]:
    """`sync="batch"`: an ack means that the disk has it."""
    datas = payloads(1024)
    blob = b"".join(datas)
    logs = {
        name: partial(_append_many, place, datas, batches, sync="batch", **settings)
        for name, settings in _CODECS.items()
    }
    figures = alternate(
        "append, synced",
        rounds,
        {
            **logs,
            "raw": partial(_write, place, blob, batches, sync_s=0.0),
            "sqlite3": partial(_sqlite, place, datas, batches),
        },
    )
    name = "append 1 KB × 1000, batch"
    return [
        *(_against(f"{name}, {codec}", figures, codec, "raw", "raw write + fdatasync") for codec in _CODECS),
        _against(f"{name}, tide, against SQLite", figures, "tide", "sqlite3", "sqlite3 WAL FULL, executemany"),
    ]


def _singles(place: Path, count: int, rounds: int) -> list[Result]:
    """One record a call."""
    datas = payloads(100, count)
    buffered = {
        f"interval {name}": partial(_append_each, place, datas * 10, sync="interval", **settings)
        for name, settings in _CODECS.items()
    }
    durable = {
        f"each {name}": partial(_append_each, place, datas, sync="each", **settings)
        for name, settings in _CODECS.items()
    }
    figures = alternate(
        "append, one by one",
        rounds,
        {
            **buffered,
            **durable,
            "raw": partial(_write_each, place, datas * 10, sync=False),
            "raw synced": partial(_write_each, place, datas, sync=True),
        },
    )
    return [
        *(
            _against(
                f"append 100 B, each, {codec}",
                figures,
                f"each {codec}",
                "raw synced",
                "raw write + fdatasync",
                unit="/s",
            )
            for codec in _CODECS
        ),
        *(
            _against(
                f"append 100 B, interval, {codec}", figures, f"interval {codec}", "raw", "raw buffered write", unit="/s"
            )
            for codec in _CODECS
        ),
    ]


def _against(
    name: str,
    figures: Measurements,
    candidate: str,
    limit: str,
    limit_name: str,
    *,
    unit: str = "GB/s",
    least_ratio: float | None = None,
) -> Result:
    return result(
        name,
        figures[candidate],
        unit,
        limit=figures[limit],
        limit_name=limit_name,
        min_ratio=least_ratio,
        kind="information" if least_ratio is None else "gate",
    )


# ── one round of each candidate: bytes or records a second ────────────────────────────────────────


def _append_many(place: Path, datas: list[bytes], batches: int, **settings: Any) -> float:
    path = place / "log"
    with SegmentedLog.open(str(path), **settings) as log:
        start = time.perf_counter()
        for _ in range(batches):
            log.append_many(datas)
        taken = time.perf_counter() - start
    shutil.rmtree(path)
    return batches * sum(map(len, datas)) / taken / GB


def _append_each(place: Path, datas: list[bytes], **settings: Any) -> float:
    path = place / "log"
    with SegmentedLog.open(str(path), **settings) as log:
        start = time.perf_counter()
        for data in datas:
            log.append(data)
        taken = time.perf_counter() - start
    shutil.rmtree(path)
    return len(datas) / taken


def _write(place: Path, blob: bytes, batches: int, *, sync_s: float | None) -> float:
    """Write the blob again and again to a growing file; sync once this long has passed since the last time, or
    once a segment's worth was written."""

    def work(fd: int) -> None:
        pos, synced_pos, synced_s = 0, 0, time.perf_counter()
        for _ in range(batches):
            pos += _whole(fd, blob, pos)
            if sync_s is None:
                continue
            now_s = time.perf_counter()
            if now_s - synced_s >= sync_s or pos - synced_pos >= _SEGMENT_BYTES:
                os.fdatasync(fd)
                synced_pos, synced_s = pos, now_s

    return batches * len(blob) / _on_file(place, work) / GB


def _write_each(place: Path, datas: list[bytes], *, sync: bool) -> float:
    def work(fd: int) -> None:
        pos = 0
        for data in datas:
            pos += _whole(fd, data, pos)
            if sync:
                os.fdatasync(fd)

    return len(datas) / _on_file(place, work)


def _whole(fd: int, data: bytes, pos: int) -> int:
    done = os.pwrite(fd, data, pos)
    if done != len(data):
        raise RuntimeError(f"the disk took {done} of {len(data)} bytes")
    return done


def _on_file(place: Path, work: Callable[[int], None]) -> float:
    path = place / "raw"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        start = time.perf_counter()
        work(fd)
        return time.perf_counter() - start
    finally:
        os.close(fd)
        path.unlink()


def _sqlite(place: Path, datas: list[bytes], batches: int) -> float:
    path = place / "sqlite"
    path.mkdir()
    base = sqlite3.connect(path / "log.db", isolation_level=None)
    try:
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=FULL")
        base.execute("CREATE TABLE log (seq INTEGER PRIMARY KEY, ts INTEGER, data BLOB)")
        start = time.perf_counter()
        for _ in range(batches):
            now = time.time_ns() // 1000
            base.execute("BEGIN")
            base.executemany("INSERT INTO log (ts, data) VALUES (?, ?)", [(now, data) for data in datas])
            base.execute("COMMIT")
        taken = time.perf_counter() - start
    finally:
        base.close()
        shutil.rmtree(path)
    return batches * sum(map(len, datas)) / taken / GB
