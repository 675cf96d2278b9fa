"""Power cuts on a file system below the kernel: real processes are killed, and what they had not synced is dropped,
torn or reordered. What was acked under its class is there afterwards; nothing is made up and nothing comes back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from threading import Timer

import pytest
from tests.crash.faultfs.kill_writer import CHANNEL, LIMITS, NEVER_ACKED, USER
from tests.crash.kill_writer import expected_data
from tests.crash.topics import kill_writer as topics_writer
from tests.crash.topics.kill_writer import batch_of, tag_of
from tests.crash.topics.reader import read_engine
from tests.crash.topics.test_kill import Batch, Ledger
from tests.kit import processes

import tidelog
from tidelog import Record
from tidelog.commitlog import SegmentedLog
from tidelog.testing.fault_fs import MountedFS, unavailable_reason

Tell = Callable[[str, int], None]
WATCHDOG_S = 120
TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.faultfs,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable_reason() is not None, reason=f"no FUSE file system here: {unavailable_reason()}"),
]


class Power:
    """One directory whose power is cut again and again."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder, self._random = folder, random
        self.rounds = 0
        self.labels: list[str] = []

    @property
    def data(self) -> Path:
        """What the last power cut has left."""
        return self._folder / f"round-{self.rounds}" / "data"

    def run(self, script: str, *args: object) -> list[bytes]:
        """Run a writer until it has said enough or the power fails in the middle of a call; return what it said."""
        before = self._folder / f"round-{self.rounds}"
        lines: list[bytes] = []
        acks = self._random.randint(1, 150)
        cut_at = self._random.choice((0, self._random.randint(1, 2_000)))
        with MountedFS(self._folder / "mount", before if self.rounds else None, cut_at=cut_at) as fs:
            command = [sys.executable, str(TESTS / script), str(fs.mount / "data"), *map(str, args)]
            child = processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert child.stdout is not None
            watchdog = Timer(WATCHDOG_S, child.kill)
            watchdog.start()
            for line in child.stdout:
                lines.append(line)
                if len(lines) == acks:
                    break
            child.kill()
            rest, _ = child.communicate()
            watchdog.cancel()
            lines += rest.splitlines()
            self.rounds += 1
            cut = fs.cut_power(self.data.parent, self._random.getrandbits(32))
        self.labels.append(cut.label)
        if before.exists():
            shutil.rmtree(before)
        return lines


@pytest.fixture
def power_cut(tmp_path: Path, request: pytest.FixtureRequest, record_count: Tell) -> Iterator[Power]:
    power_cut = Power(tmp_path, Random(request.node.name))
    yield power_cut
    record_count("power cuts on a FUSE file system", power_cut.rounds)


# ── topics ────────────────────────────────────────────────────────────────────────────────────


def cut_topics(power_cut: Power, rounds: int) -> int:
    """Return how many times recovery cut a torn tail."""
    random, ledger, torn = Random(rounds), Ledger(), 0
    for spin in range(rounds):
        for line in power_cut.run("topics/kill_writer.py", spin, random.randint(1, 3)):
            ledger.hear(line)
        torn += judge_topics(ledger, power_cut, random.randint(1, 3))
    assert sum(map(len, ledger.acked.values()))
    return torn


def judge_topics(ledger: Ledger, power_cut: Power, shards: int) -> bool:
    """Return whether recovery cut a torn tail."""
    return bool(judge_directory(ledger, power_cut.data, shards, power_cut.labels[-1], sure=("f",)))


def judge_directory(ledger: Ledger, folder: Path, shards: int, where: str, *, sure: Sequence[str]) -> list[str]:
    """Open what a power cut left and compare it with what was acked; return what the report says was cut. Of the
    topics in `sure` all that was acked is there, of others a prefix."""
    with tidelog.open(str(folder), wal_shards=shards, **topics_writer.LIMITS) as log:
        assert not log.report.damage, (where, log.report)
        assert not log.report.lost, (where, log.report)
        cut = log.report.cut
        seen = read_engine(log, limit=100)
    for name, acked in ledger.acked.items():
        rows = (seen[name].rows if name in seen else None) or {}
        batches: dict[Batch, dict[int, bytes]] = {}
        for seq, kept in rows.items():
            data = kept.data.removeprefix(b"bytes ")
            spin, thread, number = (int(word) for word in data.split(b" ", 3)[:3])
            batches.setdefault((spin, thread, number), {})[seq] = data
            assert kept.tag == tag_of(spin, thread, number)
        for batch, found in batches.items():
            first = min(found)
            assert found == dict(enumerate(batch_of(*batch), first)), (
                f"{where}: {name}: {batch} is not whole at {first}"
            )
            assert acked.get(batch, first) == first, f"{where}: {name}: {batch} was acked at {acked[batch]}"
        lost = {
            batch: first
            for batch, first in acked.items()
            if batch not in batches | dict.fromkeys(ledger.deleting[name])
        }
        back = batches.keys() & ledger.deleted[name]
        if name in sure:
            assert not lost, f"{where}: {list(lost)[:5]} were acked and are lost"
            assert not back, f"{where}: {list(back)[:5]} were deleted and are back"
        elif lost:
            last = max((first for batch, first in acked.items() if batch in batches), default=0)
            assert min(lost.values()) > last, f"{where}: {lost} are lost and later records are there"
        # What was found is durable now, and what was lost never returns.
        ledger.acked[name] = {batch: min(found) for batch, found in batches.items()}
        ledger.deleting[name] -= batches.keys()
        ledger.deleted[name] = {batch for batch in ledger.deleted[name] | lost.keys() if batch not in batches}
    return cut


@pytest.mark.parametrize("_part", range(1))
def test_topics_survive_power_cuts(_part: int, power_cut: Power) -> None:
    cut_topics(power_cut, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("_part", range(5))
def test_topics_survive_many_power_cuts(_part: int, power_cut: Power, record_count: Tell) -> None:
    """Torn writes are among them, and the report counts them."""
    torn = cut_topics(power_cut, 10)
    record_count("torn tails that recovery cut", torn)
    assert torn


# ── the segmented log ─────────────────────────────────────────────────────────────────────────

CODECS = ("tide", "rustlog", "laminar", "narwhal")


def cut_log(power_cut: Power, codec: str, sync: str, rounds: int) -> None:
    acked = -1
    for _ in range(rounds):
        said = [int(line) for line in power_cut.run("kill_writer.py", codec, sync) if line.strip().isdigit()]
        acked = max([acked, *said])
        where = power_cut.labels[-1]
        if not power_cut.data.exists():
            assert acked < 0, f"{where}: the log is gone"
            continue
        with SegmentedLog.open(str(power_cut.data), codec, sync=sync, segment_bytes_max=60_000) as log:
            found = list(log)
            assert not log.report.damage, (where, log.report)
            assert [record.seq for record in found] == list(range(log.lowest, log.highest)), where
            assert log.highest > acked, f"{where}: acked {acked}, the log ends before {log.highest}"
            wrong = [record.seq for record in found if record.data != expected_data(record.seq)]
            assert not wrong, f"{where}: seqs {wrong[:5]} hold other bytes than were written"


@pytest.mark.parametrize("codec", CODECS)
def test_a_segmented_log_survives_a_power_cut(codec: str, power_cut: Power) -> None:
    cut_log(power_cut, codec, "each", 1)


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ["each", "batch"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_segmented_log_survives_many_power_cuts(codec: str, sync: str, power_cut: Power) -> None:
    cut_log(power_cut, codec, sync, 6)


# ── queues and channels ───────────────────────────────────────────────────────────────────────


TOPICS = ("jobs", "dead")


def cut_queue(power_cut: Power, durability: str, rounds: int) -> None:
    said: dict[str, set[int]] = {"P": set(), "a": set(), "A": set(), "M": set()}
    random = Random(durability)
    for spin in range(rounds):
        for line in power_cut.run("faultfs/kill_writer.py", spin, random.randint(1, 3), durability):
            what, number = line.decode().split()
            said[what].add(int(number))
        judge_queue(said, power_cut)


def judge_queue(said: dict[str, set[int]], power_cut: Power) -> None:
    where = power_cut.labels[-1]
    with tidelog.open(str(power_cut.data), **LIMITS) as log:
        assert not log.report.damage, (where, log.report)
        assert not log.report.lost, (where, log.report)
        jobs, dead = ([record.data for record in log.find(name) or () if isinstance(record, Record)] for name in TOPICS)
        history = log.channel(CHANNEL, user=USER).history(1, limit=1_000).messages if said["M"] else []
        messages = [int(message.payload) for message in history]
    assert len(jobs) == len(set(jobs)), f"{where}: a job twice"
    assert all(number % NEVER_ACKED == 0 for number in dead), f"{where}: an acked job is a dead letter"
    lost = said["P"] - set(jobs) - set(dead) - said["a"]
    assert not lost, f"{where}: jobs {sorted(lost)[:10]} are neither in the queue nor dead letters"
    back = said["A"] & set(jobs)
    assert not back, f"{where}: jobs {sorted(back)[:10]} were acked and are back"
    assert messages == sorted(set(messages)), f"{where}: messages out of order"
    kept = {number for number in said["M"] if number >= messages[0]} if messages else said["M"]
    assert kept <= set(messages), f"{where}: messages {sorted(kept - set(messages))[:10]} are lost"


@pytest.mark.parametrize("durability", ["auto"])
def test_queues_and_channels_survive_power_cuts(durability: str, power_cut: Power) -> None:
    cut_queue(power_cut, durability, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("durability", ["auto", "fsync", "disk", "memory"])
def test_queues_and_channels_survive_many_power_cuts(durability: str, power_cut: Power) -> None:
    cut_queue(power_cut, durability, 6)
