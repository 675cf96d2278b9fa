"""The summary of a run: sums of what tests report, and the memory of each test process, also with workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.sampling import one_in

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
import pytest

@pytest.fixture
def at_the_end(record_count):
    yield
    record_count("rounds", 7)

def test_small(record_count, at_the_end):
    record_count("states", 3)

def test_more(record_count):
    record_count("states", 4_000)

def test_large():
    assert len(bytearray(b"x") * (200 << 20))
"""


def run(folder: Path, limit_mib: int, *args: str) -> subprocess.CompletedProcess[str]:
    text, found = re.subn(
        r"MEMORY_LIMIT_MIB: Final = 1_024", f"MEMORY_LIMIT_MIB: Final = {limit_mib}", CONFTEST.read_text()
    )
    assert found == 1
    (folder / "conftest.py").write_text(text)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(CONFTEST.parents[1])  # for the kit
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("workers", one_in(2, [["-n", "2"], []]), ids=["workers", "alone"])
def test_a_test_process_above_the_memory_limit_fails_the_run(tmp_path: Path, workers: list[str]) -> None:
    done = run(tmp_path, 150, *workers)
    assert done.returncode == 1, done.stdout
    assert "3 passed" in done.stdout
    assert "that is more than 150 MiB" in done.stdout
    assert re.search(r"(19|20)\d MiB test_it.py::test_large", done.stdout), done.stdout


@pytest.mark.parametrize("workers", one_in(2, [[], ["-n", "2"]]), ids=["alone", "workers"])
def test_the_summary_shows_sums_and_peaks(tmp_path: Path, workers: list[str]) -> None:
    done = run(tmp_path, 1_024, *workers)
    assert done.returncode == 0, done.stdout
    assert "states: 4,003\n" in done.stdout
    assert "rounds: 7\n" in done.stdout
    processes = re.findall(r"peak memory of (.*): [\d,]+ MiB", done.stdout)
    assert processes == (["worker gw0", "worker gw1"] if workers else ["the tests"])
