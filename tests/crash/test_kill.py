"""Real processes, real files, SIGKILL: what was acked is there afterwards (G96, G98, G120, G144)."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from tests.crash.kill_writer import expected_data
from tests.kit import processes

from tidelog.commitlog import SegmentedLog, verify


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("sync", ["each", "batch"])
@pytest.mark.parametrize("codec", ["tide", "rustlog", "laminar", "narwhal"])
def test_a_killed_writer_loses_nothing_it_acked(codec: str, sync: str, rounds: int, tmp_path: Path) -> None:
    """Method: let the child ack a number of records drawn by chance, kill it without warning, reopen, compare every
    record with what belongs at its seq; then let it go on in the same directory."""
    path = str(tmp_path / "log")
    random = Random(f"{codec}/{sync}")
    acked = -1
    for _ in range(rounds):
        acked = kill_after(path, codec, sync, acks=random.randint(20, 120)) or acked
        with SegmentedLog.open(path, codec, sync=sync, segment_bytes_max=60_000) as log:
            found = list(log)
            assert not log.report.damage
            # Killed between the data of a batch and its checksums, the rustlog side-car leaves more than one record
            # without any: kept aside, and none of them was acked.
            assert codec == "rustlog" or not log.report.quarantined
            assert [record.seq for record in found] == list(range(log.lowest, log.highest))
            assert log.highest > acked, f"acked {acked}, the log ends before {log.highest}"
            wrong = [record.seq for record in found if record.data != expected_data(record.seq)]
            assert not wrong, f"seqs {wrong[:5]} hold other bytes than were written"
    assert verify(path, codec).ok


def kill_after(path: str, codec: str, sync: str, *, acks: int) -> int | None:
    """Run the writer, kill -9 it once it said so many acks; return the last seq it acked."""
    writer = Path(__file__).with_name("kill_writer.py")
    command = [sys.executable, str(writer), path, codec, sync]
    lines = processes.run_until_killed(command, lambda lines: len(lines) == acks)
    return max((int(line) for line in lines if line.strip().isdigit()), default=None)
