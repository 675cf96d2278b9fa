"""Real processes, threads and files, and SIGKILL: what was acked is there afterwards (G2, G4, G8, G9, G40, G77)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from tests.crash.topics.kill_writer import LIMITS, batch_of, tag_of
from tests.crash.topics.reader import read_engine
from tests.kit import processes
from tests.kit.sampling import one_in

import tidelog

Batch = tuple[int, int, int]  # round, thread, number
Tell = Callable[[str, int], None]


@dataclass(slots=True)
class Ledger:
    """What all the killed processes said."""

    acked: dict[str, dict[Batch, int]] = field(default_factory=lambda: {"f": {}, "d": {}})
    deleting: dict[str, set[Batch]] = field(default_factory=lambda: {"f": set(), "d": set()})
    deleted: dict[str, set[Batch]] = field(default_factory=lambda: {"f": set(), "d": set()})

    def hear(self, line: bytes) -> None:
        what, name, *words = line.decode().split()
        numbers = [int(word) for word in words]
        spin, thread, number = numbers[-3:]
        if what == "A":
            self.acked[name][spin, thread, number] = numbers[0]
        else:
            (self.deleting if what == "d" else self.deleted)[name].add((spin, thread, number))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, pytest.param(5, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("part", one_in(2, range(2)))
def test_a_killed_engine_loses_nothing_it_acked(part: int, rounds: int, tmp_path: Path, record_count: Tell) -> None:
    """Method: let four threads of a child ack a number of writes drawn by chance, kill it without warning, open with
    another count of shards, hold every record against what was said; then let the next child go on there."""
    kill_and_judge(tmp_path, Random(f"part {part}"), rounds=rounds)
    record_count("kills of a topics process", rounds)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_two_hundred_kills(part: int, tmp_path: Path, record_count: Tell) -> None:
    kill_and_judge(tmp_path, Random(f"sweep {part}"), rounds=10)
    record_count("kills of a topics process", 10)


def kill_and_judge(tmp_path: Path, random: Random, *, rounds: int) -> None:
    path, ledger = str(tmp_path / "data"), Ledger()
    for spin in range(rounds):
        kill_after(ledger, path, spin, random.randint(1, 4), acks=random.randint(1, 250))
        judge(ledger, path, random.randint(1, 4))
    assert sum(map(len, ledger.acked.values())) > rounds


def kill_after(ledger: Ledger, path: str, spin: int, shards: int, *, acks: int) -> None:
    """Run the writer, and kill -9 it once it said so much."""
    writer = Path(__file__).with_name("kill_writer.py")
    command = [sys.executable, str(writer), path, str(spin), str(shards)]
    for line in processes.run_until_killed(command, lambda lines: len(lines) == acks):
        ledger.hear(line)


def judge(ledger: Ledger, path: str, shards: int) -> None:
    with tidelog.open(path, wal_shards=shards, **LIMITS) as log:
        assert not log.report.damage
        seen = read_engine(log, limit=100)
    for name, acked in ledger.acked.items():
        if name not in seen:
            assert not acked, f"topic {name} is gone"
            continue
        rows = seen[name].rows
        assert rows is not None
        batches: dict[Batch, dict[int, bytes]] = {}
        for seq, kept in rows.items():
            data = kept.data.removeprefix(b"bytes ")
            spin, thread, number = (int(word) for word in data.split(b" ", 3)[:3])
            batches.setdefault((spin, thread, number), {})[seq] = data
            assert kept.tag == tag_of(spin, thread, number)
        for batch, found in batches.items():
            first = min(found)
            assert found == dict(enumerate(batch_of(*batch), first)), f"{name}: batch {batch} is not whole at {first}"
            assert acked.get(batch, first) == first, f"{name}: batch {batch} was acked at {acked[batch]}, not {first}"
            assert batch not in ledger.deleted[name], f"{name}: batch {batch} was deleted and is back"
        lost = [batch for batch in acked if batch not in batches and batch not in ledger.deleting[name]]
        assert not lost, f"{name}: batches {lost[:5]} were acked and are lost"
        in_order = sorted(batches, key=lambda batch: min(batches[batch]))
        for thread in {batch[1] for batch in batches}:
            mine = [batch for batch in in_order if batch[1] == thread]
            assert mine == sorted(mine), f"{name}: thread {thread} is out of order"
        assert seen[name].head >= max((first + len(batch_of(*batch)) - 1 for batch, first in acked.items()), default=0)
