"""The mutation tool: what it leaves out, what it draws, and that it tells a killed mutant from a survivor."""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.mutation import mutate
from tests.mutation.mutate import (
    Group,
    Review,
    Tree,
    choose_tests,
    files_of,
    groups,
    is_reviewed,
    judge,
    reviews,
    table,
)
from tests.mutation.sites import RULES, Mutant, draw_sample, excluded_spans

SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast
if TYPE_CHECKING:
    X = 1
_log = None
TUNED = 7
Either: TypeAlias = "int | str"

class Door(Protocol):
    def opened(self) -> bool:
        return True

@dataclass(frozen=True)
class Thing:
    __slots__ = ("a",) * 1
    size: "int | None" = 3

    def __repr__(self) -> str:
        return str(1 + 1)

def run(a: "int | None", b: int) -> "int | None":
    _log.warning("%d", a + 1)
    if a < b:
        raise ValueError(f"{a + 1}")
    done(a)
    assert a, 1 + 1
    return cast("int | None", a) + b
'''


def mutants(source: str = SOURCE, *, seed: int = 1, most: int = 100) -> list[Mutant]:
    return draw_sample("g", {"m.py": source}, seed=seed, limit=most, tuning=["TUNED"]).mutants


def test_rules_leave_out_what_no_test_of_behaviour_could_notice() -> None:
    drawn = draw_sample("g", {"m.py": SOURCE}, seed=1, limit=100, tuning=["TUNED"])
    lines = {SOURCE.splitlines()[each.line - 1].strip() for each in drawn.mutants}
    assert lines == {
        "@dataclass(frozen=True)",  # without the decorator
        'size: "int | None" = 3',
        "if a < b:",
        "done(a)",
        "assert a, 1 + 1",
        'return cast("int | None", a) + b',
    }
    assert set(drawn.dropped) == {"annotation", "log", "message", "repr", "layout", "tuning"}
    assert drawn.places == len(drawn.mutants)


def test_every_rule_has_a_description_and_every_description_a_rule() -> None:
    source = SOURCE + "\n@override\ndef f() -> int:\n    return 1\n"
    assert {rule for rule, _ in excluded_spans(ast.parse(source), ["TUNED"])} == set(RULES)


def test_a_call_whose_result_is_not_used_is_removed() -> None:
    found = [each for each in mutants() if each.operator == "RemoveCall"]
    assert [each.changed for each in found] == [SOURCE.replace("    done(a)\n", "    pass\n")]


def test_the_same_seed_draws_the_same_mutants_and_another_seed_others() -> None:
    assert [each.id for each in mutants(most=3)] == [each.id for each in mutants(most=3)]
    assert len({tuple(each.id for each in mutants(seed=seed, most=3)) for seed in range(8)}) > 1


def test_an_edit_elsewhere_keeps_the_sample() -> None:
    edited = SOURCE.replace("_log = None\n", "_log = None\n\n# a comment\ndef other(a, b):\n    return a\n\n")
    assert {each.id for each in mutants(edited, most=4)} == {each.id for each in mutants(most=4)}


def test_a_mutant_names_its_function_and_statement() -> None:
    by_line = {SOURCE.splitlines()[each.line - 1].strip(): each for each in mutants()}
    inside = by_line["if a < b:"]
    assert inside.function == "run"
    assert inside.statement == (inside.line, inside.line)
    assert by_line['size: "int | None" = 3'].key_line is None


def row(seconds: float, *lines: int) -> dict[str, Any]:
    return {"seconds": seconds, "outcome": "passed", "lines": {"m.py": list(lines)}}


def test_tests_that_reach_the_statement_run_before_those_that_reach_the_function() -> None:
    mutant = next(each for each in mutants() if each.operator == "RemoveCall")
    assert mutant.key_line is not None
    tests = {
        "slow": row(5.0, mutant.line, mutant.key_line),
        "fast": row(1.0, mutant.line, mutant.key_line),
        "near": row(0.1, mutant.key_line),
        "elsewhere": row(0.1, 1),
    }
    assert choose_tests(mutant, tests, Counter(), 60.0) == ["fast", "slow", "near"]
    assert choose_tests(mutant, tests, Counter(slow=1), 60.0) == ["slow", "fast", "near"]
    assert choose_tests(mutant, tests, Counter(), 2.0) == ["fast"]
    default = next(each for each in mutants() if each.key_line is None)
    assert (
        choose_tests(default, {"runs nothing of it": row(0.1), "fast": row(1.0, 1)}, Counter(), 60.0)[0]
        == "runs nothing of it"
    )


def test_a_reviewed_survivor_is_matched_by_its_change_and_counted_apart() -> None:
    mutant = next(each for each in mutants() if each.operator == "RemoveCall")
    result = {"group": "g", "module": "m.py", "function": "run", "outcome": "survived", "diff": mutant.diff}
    review = Review("m.py", "run", "done(a)", "pass", "why")
    assert is_reviewed(result, [review]) == review
    assert is_reviewed(result, [review._replace(before="done(b)")]) is None
    killed = {**result, "outcome": "killed"}
    assert "| g | 2 | 1 | 0 | 0 | 1 | 50.0 % | 100.0 % |" in table([result, killed], [review])
    assert "| g | 2 | 1 | 0 | 1 | 0 | 50.0 % | 50.0 % |" in table([result, killed], [])


def test_the_targets_and_the_reviews_name_what_is_there() -> None:
    for group in groups():
        assert all((mutate.ROOT / "src/tidelog" / module).is_file() for module in group.modules), group.name
        assert all((mutate.ROOT / file).is_file() for file in files_of(mutate.ROOT, group.tests)), group.name
    for review in reviews():
        source = (mutate.ROOT / "src/tidelog" / review.module).read_text()
        for line in review.before.splitlines():
            assert line.strip() in source, f"{review.module}: no such line any more: {line}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one module and four tests, one of which notices nothing."""
    root = tmp_path / "p"
    (root / "src/tidelog").mkdir(parents=True)
    (root / "tests/mutation").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("runner.py"), root / "tests/mutation")
    settings = 'addopts = ["--strict-config"]\nfaulthandler_timeout = 300\nmarkers = ["sweep", "cluster", "faultfs"]\n'
    (root / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{settings}")
    (root / "src/tidelog/__init__.py").touch()
    (root / "src/tidelog/m.py").write_text(
        "def larger(a, b):\n    while a < b:\n        a += 1\n    return a > b\n\n\ndef unused():\n    return 1\n"
    )
    (root / "tests/test_m.py").write_text(
        "from tidelog import m\n\n\ndef test_blind():\n    m.larger(1, 2)\n\n\n"
        "def test_larger():\n    assert m.larger(3, 2)\n    assert not m.larger(1, 2)\n"
    )
    monkeypatch.setattr(mutate, "ROOT", root)
    monkeypatch.setattr(mutate, "FLOOR_S", 5.0)
    return root


@pytest.mark.sweep
def test_outcomes_of_a_small_project(project: Path, tmp_path: Path) -> None:
    group = Group("g", ["m.py"], ["tests"], [], [])
    source = (project / "src/tidelog/m.py").read_text()
    tree = Tree(tmp_path / "t" / "0")
    try:
        tests = mutate.Baseline(None).measure(tree, group, Console(quiet=True))
        assert sorted(tests) == ["tests/test_m.py::test_blind", "tests/test_m.py::test_larger"]
        found = {each.line: each for each in draw_sample("g", {"m.py": source}, seed=1, limit=9).mutants}
        found[3] = found[3]._replace(changed=source.replace("a += 1", "a += 0"))
        outcomes = {line: judge(tree, found[line], tests, Counter(), 60.0).outcome for line in (3, 4, 8)}
    finally:
        tree.close()
    assert outcomes == {3: "timed out", 4: "killed", 8: "survived"}
    assert (tree.folder / "src/tidelog/m.py").read_text() == source


@pytest.mark.slow
def test_tests_that_fail_unchanged_end_the_run(project: Path, tmp_path: Path) -> None:
    (project / "tests/test_m.py").write_text("def test_broken():\n    assert False\n")
    tree = Tree(tmp_path / "t" / "0")
    try:
        with pytest.raises(SystemExit, match="test_broken fails without any change"):
            mutate.Baseline(None).measure(tree, Group("g", ["m.py"], ["tests"], [], []), Console(quiet=True))
    finally:
        tree.close()
