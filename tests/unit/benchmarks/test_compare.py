"""A comparison of benchmarks finds the one that fell, and does not report noise.

Two trees with a tiny runner take the place of two commits: their measurements are written down, so nothing is timed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks import compare, run
from benchmarks.common import Result

# Takes the arguments of the real runner and writes the next of its measurements, as the real one does.
RUNNER = """
import json, sys
from pathlib import Path

here = Path(__file__).resolve().parent
rounds = json.loads((here / "rounds.json").read_text())
with open(here / "order.log", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
turn = len((here / "order.log").read_text().splitlines()) - 1
if rounds[turn] is None:
    sys.exit("the disk is on fire")
rows = [{"name": "lookups", "value": rounds[turn], "unit": "/s", "limit": None, "limit_name": "", "ratio": None,
         "target": "", "met": None, "kind": "gate", "of a newer runner": 1}]
(here / "results").mkdir(exist_ok=True)
(here / "results" / "now.json").write_text(json.dumps({"quick": False, "results": rows}))
"""


def tree(path: Path, *rounds: float | None) -> Path:
    (path / "benchmarks").mkdir(parents=True)
    (path / "benchmarks" / "run.py").write_text(RUNNER)
    (path / "benchmarks" / "rounds.json").write_text(json.dumps(rounds))
    return path


def row(value: float, unit: str = "/s", *, limit: float | None = None, low: float = 0.0, high: float = 0.0) -> Result:
    return Result("lookups", value, unit, limit, "", value / limit if limit else None, "", None, "gate", low, high)


def rounds_of(*values: float, unit: str = "/s") -> list[list[Result]]:
    return [[row(value, unit)] for value in values]


@pytest.mark.parametrize(
    ("before", "now", "unit", "verdict"),
    [
        ((100, 101, 102), (80, 81, 82), "/s", "slower"),
        ((80, 81, 82), (100, 101, 102), "/s", "faster"),
        ((1.0, 1.1, 1.2), (1.5, 1.6, 1.7), "ms", "slower"),
        ((1.5, 1.6, 1.7), (1.0, 1.1, 1.2), "ms", "faster"),
        ((100, 101, 102), (97, 98, 99), "/s", "noise"),  # apart in every round, and by less than the margin
        ((70, 101, 102), (80, 81, 82), "/s", "noise"),  # the sides overlap
        ((0, 0, 0), (0, 0, 0), "MB", "noise"),
        ((0, 0, 0), (1, 1, 1), "MB", "slower"),
    ],
)
def test_benchmark_fell_when_every_round_is_worse_and_the_median_by_more_than_the_margin(
    before: tuple[float, ...], now: tuple[float, ...], unit: str, verdict: str
) -> None:
    [found] = compare.compare_rounds(rounds_of(*before, unit=unit), rounds_of(*now, unit=unit))
    assert found.verdict == verdict


def test_rows_for_information_or_on_one_side_only_are_not_compared() -> None:
    information, judged = replace(row(1.0), kind="information"), row(1.0)
    assert compare.compare_rounds([[information]], [[information]]) == []
    assert compare.compare_rounds([[]], [[judged]]) == []
    assert compare.compare_rounds([[judged]], [[]]) == []


def test_stored_rows_are_compared_by_their_share_of_the_limit() -> None:
    before = [row(100, limit=200, low=95, high=105)]
    half_as_fast_machine = [row(50, limit=100, low=48, high=52)]
    [found] = compare.compare_with_rows(before, half_as_fast_machine)
    assert (found.ratio, found.verdict) == (1.0, "noise")
    [found] = compare.compare_with_rows(before, [row(50, limit=200, low=48, high=52)])
    assert (found.ratio, found.verdict) == (0.5, "slower")


def test_trees_are_measured_by_turns_with_their_own_runner(tmp_path: Path) -> None:
    order: list[str] = []
    trees = {name: tree(tmp_path / name, 1, 2, 3) for name in ("before", "now")}

    def measure(name: str) -> compare.Measure:
        run_tree = compare.tree_measure(trees[name], ["lookups"], quick=True, directory=tmp_path)

        def measured() -> compare.Rows:
            order.append(name)
            return run_tree()

        return measured

    before, now = compare.measure_alternating(3, measure("before"), measure("now"))
    assert order == ["before", "now", "now", "before", "before", "now"]
    assert (
        [[row.value for row in rows] for rows in before] == [[1.0], [2.0], [3.0]] == [[r.value for r in x] for x in now]
    )
    asked = (trees["now"] / "benchmarks" / "order.log").read_text().splitlines()
    assert asked == [f"--only=lookups --dir={tmp_path} --quick"] * 3
    assert not list((trees["now"] / "benchmarks" / "results").iterdir())  # a round is no result of the tree


@pytest.mark.parametrize(
    ("before", "now", "code"),
    [
        ((100, 101), (100, 99), 0),
        ((100, 101), (50, 51), 1),
        ((50, 51), (100, 101), 0),
        ((100, None), (100, 101), 1),  # a tree that breaks proves nothing
    ],
)
def test_comparison_with_a_tree_exits_1_where_a_benchmark_fell(
    before: tuple[float | None, ...],
    now: tuple[float | None, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tree(tmp_path / "other", *before)
    monkeypatch.setattr(run, "HERE", tree(tmp_path / "own", *now) / "benchmarks")
    monkeypatch.setattr(run, "_MODULES", {"lookups": "run"})
    assert run.main(["--compare", str(other), "--rounds", "2", "--dir", str(tmp_path / "scratch")]) == code


def test_comparison_with_a_file_exits_1_where_a_benchmark_fell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_run", lambda _name, *, quick: [row(100 if quick else 50, low=49, high=101)])
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(run, "_file", lambda _name: tmp_path)
    stored = tmp_path / "stored.json"
    asked = ["--only", "frame", "--compare", str(stored), "--dir", str(tmp_path)]
    for value, code in ((100.0, 0), (400.0, 1)):
        rows = [asdict(row(value, low=value, high=value))]
        stored.write_text(json.dumps({"quick": True, "results": rows}))
        assert run.main(["--quick", *asked]) == code
