"""Writes to the WAL that a power cut tears: inside a mark, a header or data, and across sectors (G4, G52, G53).

Method: one more batch is written, and every image that a power cut could leave before, between and after its operations
is opened; so is every prefix of it. Where the last whole batch ends, and what follows it, is found here without the
code under test. The report counts exactly one cut for each torn file, with its first byte and its size; a torn write is
never damage; topics are as before the batch or have all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest
from tests.crash.topics.workloads import PATH, TINY
from xxhash import xxh3_64_intdigest

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine
from tidelog.testing import ManualClock, SimDisk

Tell = Callable[[str, int], None]
HEADER_BYTES = 38
MORE = 8
RECORDS = (1, 12)


def opened(disk: SimDisk, shards: int) -> Engine:
    settings = TINY | {"wal_file_bytes": 1 << 16}
    return engine_of(tidelog.open(PATH, disk=disk, clock=ManualClock(), threads=False, wal_shards=shards, **settings))


def frames(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Whole frames from the start on: first byte, end, type, flags."""
    pos = 0
    while pos + 46 <= len(content):
        end = pos + int.from_bytes(content[pos : pos + 4], "little") + 4
        if end < pos + 46 or end > len(content):
            return
        if xxh3_64_intdigest(content[pos + 4 : end - 8]) != int.from_bytes(content[end - 8 : end], "little"):
            return
        yield pos, end, content[pos + 4], content[pos + 5]
        pos = end


def torn(content: bytes) -> tuple[int, int] | None:
    """The first byte after the last whole batch and how many follow up to the last that is not zero; None: none do."""
    whole = 0
    for _, end, kind, flags in frames(content):
        if not (kind in RECORDS and flags & MORE):
            whole = end
    used = len(content.rstrip(b"\0"))
    return (whole, used - whole) if used > whole else None


def newest(disk: SimDisk) -> list[str]:
    """The newest WAL file of each shard."""
    files = sorted(path for path in disk.tree() if path.endswith(".log"))
    return list({path.rpartition("/")[0]: path for path in files}.values())


def place_of(content: bytes, before: bytes, pos: int) -> str:
    """What was torn at a byte of the whole content."""
    for start, end, kind, _ in frames(content):
        if pos < end:
            what = "a mark" if kind == 8 else "a header" if pos < start + HEADER_BYTES else "data"
            return what if pos > len(before.rstrip(b"\0")) or start >= len(before.rstrip(b"\0")) else "an older frame"
    return "nothing"


def rows(log: Engine) -> dict[str, list[object]]:
    return {state.topic: [each.data for each in log.topic(state.topic).read(0, 999).records] for state in log.topics()}


def history(durability: str, shards: int) -> tuple[Engine, SimDisk]:
    """Two topics in each class of which something is synced, and a batch of three frames is to come."""
    disk = SimDisk()
    log = opened(disk, shards)
    for name in ("t", "other"):
        log.topic(name, durability=durability).append([b"first", {"n": 1}, b"third"])
    log.tick()
    log.topic("t").append(b"one more")
    return log, disk


def batch() -> list[object]:
    return [b"a" * 700, {"b": "b" * 500}, b"c" * 900]


def judge(image: SimDisk, shards: int, states: list[dict[str, list[object]]], outcomes: Counter[str]) -> None:
    expected = {path: found for path in newest(image) if (found := torn(image.read_file(path))) is not None}
    log = opened(image, shards)
    said = log.report.cut
    assert not log.report.damage, log.report.lines()
    assert not log.report.lost
    assert len(said) == len(expected), f"{said}, {expected}"
    for path, (pos, size) in expected.items():
        assert any(path.endswith(each.partition(" ")[0]) and f"at byte {pos}, {size} bytes" in each for each in said), (
            said
        )
    assert rows(log) in states, rows(log)
    outcomes["torn" if expected else "whole"] += 1


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
def test_every_prefix_of_a_write_is_cut_and_counted(durability: str, shards: int, record_count: Tell) -> None:
    log, disk = history(durability, shards)
    before, old = disk.reboot(), rows(log)
    log.topic("t").append(batch())
    after, new = disk.reboot(), rows(log)
    (path,) = [path for path in newest(after) if after.read_file(path) != before.read_file(path)]
    content, start = after.read_file(path), len(before.read_file(path).rstrip(b"\0"))
    outcomes: Counter[str] = Counter()
    used = len(content.rstrip(b"\0"))
    edges = {edge for pos, end, _, _ in frames(content) for edge in (pos, pos + 4, pos + HEADER_BYTES, end)}
    for stop in sorted({*range(start, used + 1, 29), *(edge for edge in edges if start <= edge <= used)}):
        image = after.reboot()
        image.write_file(path, content[:stop] + bytes(len(content) - stop))
        judge(image, shards, [old, new], outcomes)
        outcomes[f"inside {place_of(content, before.read_file(path), stop)}"] += 1
    for what, count in outcomes.items():
        record_count(f"torn WAL writes: {what}", count)
    assert outcomes["torn"] > 50
    assert outcomes["inside a header"] >= 6
    assert outcomes["inside data"] > 40
    assert PATH in path


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
def test_every_set_of_lost_sectors_is_cut_and_counted(durability: str, shards: int, record_count: Tell) -> None:
    log, disk = history(durability, shards)
    states, images, random = [rows(log)], list[SimDisk](), Random(f"{durability}/{shards}")
    disk.on_op = lambda _: images.extend(image.disk for image in disk.images(random=random, limit=40))
    log.topic("t").append(batch())
    log.tick()
    disk.on_op = None
    states.append(rows(log))
    if durability != "fsync":  # what was not synced before may go with it
        states += [{**states[0], "t": states[0]["t"][:-1]}]
    outcomes: Counter[str] = Counter()
    for image in images:
        judge(image, shards, states, outcomes)
    for what, count in outcomes.items():
        record_count(f"lost sectors of WAL writes: {what}", count)
    assert outcomes["torn"] > 10
