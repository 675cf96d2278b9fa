"""The matrix and its tests are held together: no cell without a test, no test without a cell."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.unit.engine import (
    test_faults_clock,
    test_faults_crashes,
    test_faults_errors,
    test_faults_flips,
    test_faults_startup,
)
from tests.unit.engine.fault_matrix import COLUMNS, MATRIX, SYNCS, TIMES
from tests.unit.engine.fault_rows import ROWS

MODULES = (test_faults_clock, test_faults_crashes, test_faults_errors, test_faults_flips, test_faults_startup)


def ids(module: ModuleType) -> set[str]:
    """The ids of all tests that are for a cell."""
    found = set()
    for name, function in vars(module).items():
        marks = getattr(function, "pytestmark", []) if name.startswith("test_") else []
        for mark in marks:
            if mark.name == "parametrize" and str(mark.args[0][0]) == "row":
                found |= {param.id for param in mark.args[1] if param.id is not None}
    return found


def wanted() -> set[str]:
    found = set()
    for row, outcomes in MATRIX.items():
        for column, outcome in outcomes.items():
            if outcome == "–":
                continue
            cell = f"{row}-{column.replace('±', '')}"
            ways = [f"-{mode}" for mode in SYNCS[row]] if column == "EF" else [""]
            times = [f"-{each}" for each in TIMES] if column in ("NS", "EW", "EF") else [""]
            found |= {f"{cell}{way}{time}" for way in ways for time in times}
    return found


def test_every_cell_has_a_test() -> None:
    """Method: the ids that the tests carry, compared with the table, every error once and for ever."""
    there = {each for module in MODULES for each in ids(module)}
    assert wanted() - there == set()
    assert {each for each in there - wanted() if each.count("-") != 2 or each.split("-")[1] != "BF"} == set()


def test_the_table_is_what_was_agreed() -> None:
    """15 rows of 10 columns; so many of their cells are no dash."""
    assert len(MATRIX) == 15
    assert {outcome for outcomes in MATRIX.values() for outcome in outcomes.values()} == {
        *("OK", "ERR", "RO", "PFX", "O/N", "OLD", "RB", "CUT", "DET", "REF", "–")
    }
    assert sum(outcome != "–" for outcomes in MATRIX.values() for outcome in outcomes.values()) == 118
    assert SYNCS.keys() == {row for row, outcomes in MATRIX.items() if outcomes["EF"] != "–"}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_provoked_in_every_column(row: str) -> None:
    for column in COLUMNS:
        if MATRIX[row][column] != "–":
            assert any(scenario.serves(column) for scenario in ROWS[row]), column
