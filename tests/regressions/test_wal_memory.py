"""Recovery reads the WAL in pieces: what it takes does not grow with what there is to read."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, recovery
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import recovery as wal_replay

MIB = 1 << 20


def opened(disk: SimDisk, **more: Any) -> Engine:
    settings = {"wal_shards": 1, "checkpoint_bytes": 1 << 40, "wal_file_bytes": 4 * MIB} | more
    return engine_of(tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, **settings))


def written(size: int, *, topics: int, batch: int) -> SimDisk:
    """So many bytes of records since the last checkpoint, topic after topic in turns."""
    disk = SimDisk()
    log = opened(disk)
    each = [log.topic(f"t{number}", durability="memory") for number in range(topics)]
    data = b"x" * 1000
    for number in range(size // (1000 * batch)):
        each[number % topics].append([data] * batch)
    return disk.reboot()


def peak_of(disk: SimDisk) -> int:
    """Bytes that opening takes at most, beside the disk itself."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        log = opened(disk, read_only=True)
        _, peak = tracemalloc.get_traced_memory()
        assert log.report.frames
    finally:
        tracemalloc.stop()
    return peak - before


@pytest.mark.parametrize(("topics", "batch"), [(1, 1), (7, 1), (1, 500), (3, 100)])
def test_recovery_takes_no_more_memory_for_more_records(
    topics: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept every WAL file and a copy of its records: 545 MB for 150 MB. Method: the bounds made small, and six
    times as much to read; what grows is the index of 20 bytes a record, with the room that it grows into."""
    monkeypatch.setattr(recovery, "REPLAY_MEMORY_BYTES", MIB)
    monkeypatch.setattr(wal_replay, "WINDOW_BYTES", 256 << 10)
    monkeypatch.setattr(wal_replay, "CACHED_WINDOWS_BYTES_MAX", MIB)
    few, many = (peak_of(written(size, topics=topics, batch=batch)) for size in (2 * MIB, 12 * MIB))
    assert many - few < 100 * 10 * MIB // 1000 + MIB, f"{few:,} bytes for 2 MiB, {many:,} for 12 MiB"


@pytest.mark.parametrize(("topics", "batch"), [(1, 1), (7, 1), (3, 300)])
def test_records_that_stay_in_the_wal_are_read_deleted_and_copied_like_others(
    topics: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: nothing is kept in memory; the same reads as with everything in memory, after deletes, a checkpoint and a
    restart."""
    disk = SimDisk()
    log = opened(disk)
    each = [log.topic(f"t{number}", durability="fsync") for number in range(topics)]
    for number in range(300):
        data = [b"%d/%d" % (number, part) + b"y" * (number % 400) for part in range(batch)]
        each[number % topics].append(data, tag=None if number % 3 else "third")
    truth = {state.topic: rows(log, state.topic) for state in log.topics()}
    monkeypatch.setattr(recovery, "REPLAY_MEMORY_BYTES", 0)
    monkeypatch.setattr(recovery, "_WAL_RANGE_BYTES_MIN", 0)
    monkeypatch.setattr(recovery, "_PIECE_BYTES", 4096)
    disk = disk.reboot()
    log = opened(disk)
    assert {name: rows(log, name) for name in truth} == truth
    for name, found in truth.items():
        log.topic(name).delete(match="third")
        truth[name] = {seq: kept for seq, kept in found.items() if kept[1] != "third"}
        log.topic(name).append(b"one more")
        truth[name][max(found) + 1] = (b"one more", None)
    assert {name: rows(log, name) for name in truth} == truth
    log.checkpoint()
    assert {name: rows(log, name) for name in truth} == truth
    log.close()
    again = opened(disk.reboot())
    assert {name: rows(again, name) for name in truth} == truth


def rows(log: Engine, name: str) -> dict[int, tuple[object, str | None]]:
    found: dict[int, tuple[object, str | None]] = {}
    topic, cursor = log.topic(name, create=False), 0
    while True:
        page = topic.read(cursor, 1000)
        found |= {record.seq: (record.data, record.tag) for record in page.records}
        cursor = page.next_from_seq
        if page.caught_up:
            return found


WRITER = """
import os, sys
import tidelog
log = tidelog.open(sys.argv[1], threads=False, wal_shards=1, checkpoint_bytes=1 << 40)
topics = [log.topic(f"t{n}", durability="memory") for n in range(3)]
for number in range(int(sys.argv[2])):
    topics[number % 3].append([b"x" * 1000] * 64)
os._exit(0)
"""
READER = """
import resource, sys
import tidelog
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
log = tidelog.open(sys.argv[1], read_only=True)
count = sum(state.count for state in log.topics())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, count)
"""


@pytest.mark.slow
def test_a_process_recovers_a_large_wal_in_bounded_memory(tmp_path: Path) -> None:
    """Method: 96 MB of records in the WAL of a killed process; the peak of the process that opens them is measured. All
    files at once and a copy of the records took 290 MB."""

    def run(text: str, *args: object) -> str:
        words = [sys.executable, "-c", text, *map(str, args)]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=500).stdout

    run(WRITER, tmp_path / "small", 30)
    run(WRITER, tmp_path / "large", 1500)
    small, _ = map(int, run(READER, tmp_path / "small").split())
    large, count = map(int, run(READER, tmp_path / "large").split())
    assert count == 1500 * 64
    assert large - small < 64 << 10, f"{small:,} KiB for 2 MB, {large:,} KiB for 96 MB"
