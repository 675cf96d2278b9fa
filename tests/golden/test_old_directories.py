"""Data directories that earlier versions wrote, as they were left. Each must open, with nothing lost in silence.

`derived-copies-*` were written while copies of routers were in no WAL (docs/decisions/0011): s (keeps four records)
feeds d; 1 and 2, a checkpoint, 3, "direct" written to d, then 4 to 9, of which 4 and 5 were lost at s. A reader had
seen 3 at seq 3, "direct" at 4, a gap up to 6, and 6 to 9 at seqs 7 to 10. `closed` was closed, `crashed` was killed.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.database import Database

FOLDER = Path(__file__).parent / "directories"


def unpacked(name: str, where: Path) -> str:
    with tarfile.open(FOLDER / f"derived-copies-{name}.tar.gz") as packed:
        packed.extractall(where, filter="data")
    return str(where / name)


def found(log: Database, name: str) -> list[Any]:
    rows, at = list[Any](), 0
    while True:
        page = log.topic(name).read(at)
        rows += [] if page.gap is None else [("gap", page.gap.gap_from, page.gap.gap_to, page.gap.reason)]
        rows += [(record.seq, record.data) for record in page.records]
        at = page.next_from_seq
        if page.caught_up:
            return rows


def test_directory_that_was_closed_is_as_it_was(tmp_path: Path) -> None:
    path = unpacked("closed", tmp_path)
    expected = [("gap", 1, 6, "source_trim"), (7, 6), (8, 7), (9, 8), (10, 9)]
    for total in (9, 10):
        with tidelog.open(path, threads=False) as log:
            assert log.report.damage == []
            assert found(log, "d") == expected
            assert [state.forwarded_total for state in log.routers()] == [total]
            seq = log.topic("s").append("next").first_seq
            expected.append((seq + 1, "next"))
            assert found(log, "d") == expected


def test_directory_that_was_killed_has_its_copies_again_under_new_seqs(tmp_path: Path) -> None:
    path = unpacked("crashed", tmp_path)
    shown = {3: 3, 4: "direct", 7: 6, 8: 7, 9: 8, 10: 9}
    with tidelog.open(path, threads=False) as log:
        assert log.report.damage == []
        rows = found(log, "d")
        assert rows[:3] == [(1, 1), (2, 2), (4, "direct")]
        (gap,) = (row for row in rows if row[0] == "gap")
        assert (gap[2] - gap[1] + 1, gap[3]) == (3, "source_trim"), "3, 4 and 5 are gone from their source"
        assert [row[1] for row in rows if row[0] != "gap"][3:] == [6, 7, 8, 9]
        assert all(shown[row[0]] == row[1] for row in rows if row[0] in shown), "no seq is another record's"
    with tidelog.open(path, threads=False) as log:
        assert found(log, "d") == rows


@pytest.mark.parametrize("name", ["closed", "crashed"])
def test_they_open_for_reading_as_well(name: str, tmp_path: Path) -> None:
    with tidelog.open(unpacked(name, tmp_path), read_only=True) as log:
        assert log.report.damage == []
        assert [state.router for state in log.routers()] == ["r"]
