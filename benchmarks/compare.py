"""Compares two sides of benchmark results, gate by gate, and decides which gates fell.

The other side is a tree (a clone or worktree of another commit) or a result file. With a tree, both sides are measured
in one run: each round starts `benchmarks/run.py` once in each tree, with the interpreter of that tree's own
environment, and the next round starts them in the opposite order. So a drift of the machine affects both sides alike,
and a tree whose modules have other names needs nothing but its own runner. With a file, the samples are the worst,
the median and the best round that the file has, divided by the limit that was measured beside them.

A gate fell when its median is worse by more than a margin and every sample of this tree is worse than every sample of
the other one. With five rounds, two sides of the same code differ like that in one comparison of 252, and then
rarely by more than the margin.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.common import SMALLER_IS_BETTER, Result
from rich.table import Table

Rows: TypeAlias = list[Result]
Measure: TypeAlias = Callable[[], Rows]

TREE_MARGIN = 1.05  # both sides in one run: what the order of memory and code does by itself
FILE_MARGIN = 1.25  # another day, perhaps another machine


@dataclass(frozen=True, slots=True)
class Side:
    """The samples of one gate on one side; larger or smaller is better by its unit."""

    samples: tuple[float, ...]
    unit: str

    @property
    def value(self) -> float:
        return median(self.samples)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One gate on both sides."""

    name: str
    before: Side
    now: Side
    margin: float

    @property
    def ratio(self) -> float:
        """By which factor the median improved; below 1 it got worse."""
        return improvement(self.before.value, self.now.value, self.now.unit)

    @property
    def lowest(self) -> float:
        """This tree's worst sample against the other's best."""
        return min(self._pairs())

    @property
    def highest(self) -> float:
        """This tree's best sample against the other's worst."""
        return max(self._pairs())

    @property
    def verdict(self) -> str:
        if self.ratio < 1 / self.margin and self.highest < 1:
            return "slower"
        if self.ratio > self.margin and self.lowest > 1:
            return "faster"
        return "noise"

    def _pairs(self) -> Iterable[float]:
        return (improvement(old, new, self.now.unit) for old in self.before.samples for new in self.now.samples)


def improvement(old: float, now: float, unit: str) -> float:
    """By which factor a measurement improved; below 1 it got worse."""
    worse, better = (old, now) if unit in SMALLER_IS_BETTER else (now, old)
    return worse / better if better else (1.0 if worse == better else math.inf)


def measure_alternating(rounds: int, before: Measure, now: Measure) -> tuple[list[Rows], list[Rows]]:
    """Measure both sides `rounds` times, in an order that changes from round to round."""
    old: list[Rows] = []
    new: list[Rows] = []
    for turn in range(rounds):
        order = [(before, old), (now, new)]
        for measure, found in order if turn % 2 == 0 else reversed(order):
            found.append(measure())
    return old, new


def compare_rounds(before: Iterable[Rows], now: Iterable[Rows]) -> list[Comparison]:
    """Compare the gates that both sides have, one sample a round."""
    old, new = _samples(before), _samples(now)
    return [Comparison(name, old[name], side, TREE_MARGIN) for name, side in new.items() if name in old]


def compare_with_rows(before: Iterable[Result], now: Iterable[Result]) -> list[Comparison]:
    """Compare gates with stored rows: by the share of the limit where both have one, else by the values."""
    old = {row.name: row for row in before}
    found = []
    for row in now:
        other = old.get(row.name)
        if other is not None and row.kind == "gate":
            by_limit = bool(other.limit and row.limit)
            found.append(Comparison(row.name, _spread(other, by_limit), _spread(row, by_limit), FILE_MARGIN))
    return found


def _samples(rounds: Iterable[Rows]) -> dict[str, Side]:
    found: dict[str, Side] = {}
    for row in (row for rows in rounds for row in rows if row.kind == "gate"):
        known = found.get(row.name, Side((), row.unit))
        found[row.name] = Side((*known.samples, row.value), row.unit)
    return found


def _spread(row: Result, by_limit: bool) -> Side:
    limit = row.limit if by_limit and row.limit else 1.0
    return Side(tuple(value / limit for value in (row.low or row.value, row.value, row.high or row.value)), row.unit)


def comparison_table(title: str, comparisons: Iterable[Comparison]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("gate")
    for heading in ("before", "now", "change", "of single samples"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in comparisons:
        table.add_row(
            row.name,
            f"{_format_value(row.before.value)} {row.before.unit}",
            f"{_format_value(row.now.value)} {row.now.unit}",
            f"{row.ratio:.2f}×",
            f"{row.lowest:.2f} – {row.highest:.2f}",
            {"slower": "[bold red]slower", "faster": "[green]faster", "noise": "noise"}[row.verdict],
        )
    return table


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def read_rows(path: Path) -> Rows:
    """The rows of a result file, also of one that an older or newer runner wrote."""
    known = {field.name for field in fields(Result)}
    rows: list[Mapping[str, Any]] = json.loads(path.read_text())["results"]
    return [Result(**{key: value for key, value in row.items() if key in known}) for row in rows]


def tree_measure(tree: Path, names: Sequence[str], *, quick: bool, directory: Path) -> Measure:
    """A function that runs these benchmarks in a tree, in a process of their own, and returns their rows."""
    arguments = [f"--only={name}" for name in names] + [f"--dir={directory}"] + ["--quick"] * quick
    python = tree / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), str(tree / "benchmarks" / "run.py"), *arguments]
    # Without an environment of its own the tree still measures its own code; its compiled modules are beside that.
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}

    def measure() -> Rows:
        earlier = _result_files(tree)
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        written = [path for path, changed in _result_files(tree).items() if earlier.get(path) != changed]
        if done.returncode or len(written) != 1:
            raise RuntimeError(f"benchmarks/run.py of {tree} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        rows = read_rows(written[0])
        written[0].unlink()  # one round of a comparison is no result of the tree
        return rows

    return measure


def _result_files(tree: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (tree / "benchmarks" / "results").glob("*.json")}
