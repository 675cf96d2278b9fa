"""Real processes and SIGKILL: a batch that is published in parts and killed between two of them is whole in the end.

Method: a child saves rows of more than one commit takes and kills itself before or after a commit that chance names, or
with the plan written and nothing published; others append; it is run again, killed again, and at last let live. After
every kill the topic holds a prefix of the batch in its order and no row twice; in the end all of it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.crash.pipelines.kill_saver import rows
from tests.kit import processes

import tidelog

Tell = Callable[[str, int], None]


def run(data: Path, number: int, last: int, when: str) -> int:
    """Save in a child; how many commits it made."""
    command = [sys.executable, str(Path(__file__).with_name("kill_saver.py")), str(data), str(number), str(last), when]
    done = processes.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode in ((0, -signal.SIGKILL) if last else (0,)), done.stderr
    output: str = done.stdout
    return output.count("a commit")


def datas(data: Path) -> list[bytes]:
    with tidelog.open(str(data), read_only=True) as engine:
        found: list[bytes] = engine.topic("copy", create=False).to_arrow()["data"].to_pylist()
        return [each for each in found if each != b"other"]


def kill_and_judge(root: Path, random: Random, *, batches: int) -> int:
    data, expected, kills = root / "data", list[bytes](), 0
    with tidelog.open(str(data), threads=False) as engine:
        engine.topic("copy").append([b"other"])
    for number in range(batches):
        for _ in range(random.randint(1, 3)):
            when = random.choice(["before", "after", "after", "plan"])
            run(data, number, random.randint(1, 6), when)
            kills += 1
            found = datas(data)
            assert found == (expected + rows(number))[: len(found)], f"batch {number}, killed {when} a commit"
            with tidelog.open(str(data), threads=False) as engine:
                engine.topic("copy").append([b"other"])
        run(data, number, 0, "never")
        expected += rows(number)
        assert datas(data) == expected
        assert not list((data / "staging").iterdir()), "nothing is left behind"
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_a_killed_save_in_parts_loses_and_doubles_nothing(batches: int, tmp_path: Path, record_count: Tell) -> None:
    record_count("kills of a save in parts", kill_and_judge(tmp_path, Random("suite"), batches=batches))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_kills_of_a_save_in_parts(part: int, tmp_path: Path, record_count: Tell) -> None:
    record_count("kills of a save in parts", kill_and_judge(tmp_path, Random(f"sweep {part}"), batches=5))
