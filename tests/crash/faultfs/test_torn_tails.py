"""Writes to the WAL that are torn on a real mount, under a process that is killed (G4, G52, G53).

Method: power fails in the middle of one write to a WAL file. All that was written before survives, and of this write
what the test chooses: an end inside a frame's header, an end inside its data, or some of its sectors.
So everything that was acked is there in each class. Where the last whole batch ends is found without the code under
test; the report counts one cut there, with its size, and no damage. Then the next process goes on in what is left.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from tests.crash.faultfs.test_power_cuts import TESTS, WATCHDOG_S, judge_directory
from tests.crash.topics.test_kill import Ledger
from tests.crash.topics.test_torn_tails import HEADER_BYTES, frames, torn
from tests.kit import processes

from tidelog.testing.crash_images import SECTOR_BYTES
from tidelog.testing.fault_fs import MountedFS, TearPlan, TornWrite, unavailable_reason

Tell = Callable[[str, int], None]
Ranges = list[tuple[int, int]]
PLACES = ("header", "data", "sectors")
CLASSES = ("fsync", "disk")
ROUNDS = 5
WRITES_MAX = 60  # to the WAL before one is torn
WAL_FILE = ".log"

pytestmark = [
    pytest.mark.faultfs,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable_reason() is not None, reason=f"no FUSE file system here: {unavailable_reason()}"),
]


def kept_of(write: TornWrite, place: str, random: Random) -> tuple[str, Ranges]:
    """What survives of a write, never all of it, and what is torn: what was asked for, or the data of a frame where the
    kernel has split a frame and no header is in this part."""
    pos, size = write.pos, len(write.data)
    if place == "sectors":
        edges = [0, *range(SECTOR_BYTES - pos % SECTOR_BYTES, size, SECTOR_BYTES), size]
        sectors = list(pairwise(edges))
        return place, sorted(random.sample(sectors, random.randint(1, len(sectors) - 1)))
    starts = [0, *(end for _, end, _, _ in frames(write.before + write.data))]
    header = [at for start in starts for at in range(start + 1, start + HEADER_BYTES) if pos < at < pos + size]
    within = [at for at in range(pos + 1, pos + size) if at not in {*header, *starts}]
    place = place if header else "data"
    return place, [(0, random.choice(header if place == "header" else within) - pos)]


def tear_once(folder: Path, spin: int, place: str, shards: int, durability: str, random: Random) -> tuple[Path, str]:
    """Run a writer on what the last round left until power fails in a write. Return what is left, and what was torn."""
    before, after = folder / f"round-{spin}", folder / f"round-{spin + 1}"
    said = folder / "said"
    tear = TearPlan(WAL_FILE, random.randint(3, WRITES_MAX), SECTOR_BYTES + 1 if place == "sectors" else 1)
    with MountedFS(folder / "mount", before if spin else None, tear=tear) as fs, said.open("wb") as out:
        writer = str(TESTS / "topics/kill_writer.py")
        command = [sys.executable, writer, str(fs.mount / "data"), str(spin), str(shards), durability]
        child = processes.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        try:
            write = fs.torn_write(WATCHDOG_S)
        finally:
            child.kill()
            child.wait()
        assert write is not None, f"the writer made fewer than {tear.number} writes to the WAL"
        torn_place, kept = kept_of(write, place, random)
        fs.tear(after, kept)
    shutil.rmtree(before, ignore_errors=True)
    return after, torn_place


def newest_torn(data: Path) -> dict[str, tuple[int, int]]:
    """Where the newest WAL file of each shard is torn: the first byte, and how many follow."""
    newest = {path.parent: path for path in sorted(data.rglob(f"*{WAL_FILE}"))}
    found = {str(path.relative_to(data / "wal")): torn(path.read_bytes()) for path in newest.values()}
    return {name: place for name, place in found.items() if place is not None}


def tear_rounds(folder: Path, rounds: int, place: str, shards: int, durability: str, outcomes: Counter[str]) -> None:
    random, ledger = Random(f"{place}/{shards}/{durability}"), Ledger()
    for spin in range(rounds):
        left, torn_place = tear_once(folder, spin, place, shards, durability, random)
        for line in (folder / "said").read_bytes().splitlines():
            ledger.hear(line)
        expected = newest_torn(left / "data")
        where = f"round {spin}, a torn {place}, {shards} shards, {durability}: {expected}"
        cut = judge_directory(ledger, left / "data", shards, where, sure=("f", "d"))
        assert len(cut) == len(expected), f"{where}: the report says {cut}"
        for name, (pos, size) in expected.items():
            text = f"{name} at byte {pos}, {size} bytes"
            assert any(text in each for each in cut), f"{where}: the report says {cut}"
        # Bytes of a frame are there and the frame is not. The kernel splits writes at pages, so a write of the other
        # shard may have been cut short as well.
        assert 1 <= len(expected) <= shards, where
        outcomes[f"{torn_place} torn"] += 1
        outcomes["cuts that the report counts"] += len(cut)
        outcomes.update(f"in {Path(name).parent.name or 'the only shard'}" for name in expected)
    assert sum(map(len, ledger.acked.values())), "nothing was acked"


def report_outcomes(outcomes: Counter[str], record_count: Tell) -> None:
    for what, count in outcomes.items():
        record_count(f"torn WAL writes on a FUSE file system: {what}", count)


@pytest.mark.parametrize(
    ("place", "shards", "durability"), [("header", 1, "fsync"), ("data", 2, "disk"), ("sectors", 2, "fsync")]
)
def test_a_torn_write_is_cut_and_counted(
    place: str, shards: int, durability: str, tmp_path: Path, record_count: Tell
) -> None:
    outcomes: Counter[str] = Counter()
    tear_rounds(tmp_path, 1, place, shards, durability, outcomes)
    report_outcomes(outcomes, record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_many_torn_writes_are_cut_and_counted(
    place: str, shards: int, durability: str, tmp_path: Path, record_count: Tell
) -> None:
    outcomes: Counter[str] = Counter()
    tear_rounds(tmp_path, ROUNDS, place, shards, durability, outcomes)
    report_outcomes(outcomes, record_count)
    assert outcomes["cuts that the report counts"] >= ROUNDS
