"""Mutation testing: change the code in a small way, run the tests that should notice, and count those that do not.

    targets.toml ──► sites of each module ──► a sample by seed ──► a mutant each: its tests ──► killed or survived

Mutations are cosmic-ray's. A site is one place in a module; of the mutations that fit there one is drawn, so that an
operator with many replacements does not fill the sample. Annotations are left out: they do not run. Each worker has a
copy of the tree of its own.

    python -m tests.mutation.mutate --minutes 60 --seed 1 --out mutation.json
    python -m tests.mutation.mutate --only wal --sites 20
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT: Final = Path(__file__).resolve().parents[2]
SLOWER: Final = 5  # times the unchanged tests: then a mutant hangs, which is a way to be noticed
FLOOR_S: Final = 60.0
Outcome: TypeAlias = Literal["killed", "survived", "timed out"]


class Target(NamedTuple):
    """Modules, and the tests that should notice a change of them."""

    name: str
    modules: list[str]
    tests: list[str]


class Mutant(NamedTuple):
    target: Target
    module: str
    line: int
    operator: str
    arguments: dict[str, Any]
    occurrence: int


class Result(NamedTuple):
    mutant: Mutant
    outcome: Outcome
    diff: str


def targets() -> list[Target]:
    table = tomllib.loads((ROOT / "tests/mutation/targets.toml").read_text())
    return [Target(name, row["modules"], row["tests"]) for name, row in table.items()]


def annotation_lines(source: str) -> set[tuple[int, int]]:
    """Every place (line, column) that belongs to an annotation; those are never evaluated."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if isinstance(annotation, ast.AST):
            for part in ast.walk(annotation):
                if isinstance(part, ast.expr):
                    found.add((part.lineno, part.col_offset))
                    for line in range(part.lineno, (part.end_lineno or part.lineno) + 1):
                        first = part.col_offset if line == part.lineno else 0
                        last = part.end_col_offset if line == part.end_lineno else 200
                        found.update((line, column) for column in range(first, last or 200))
    return found


def mutants_of(target: Target, module: str) -> dict[tuple[int, int], list[Mutant]]:
    """Every mutation of a module, by its place."""
    source = (ROOT / "src/tidelog" / module).read_text()
    tree, annotations = get_ast(source), annotation_lines(source)
    found: dict[tuple[int, int], list[Mutant]] = {}
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        places = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(places):
            if start not in annotations:
                found.setdefault(start, []).append(Mutant(target, module, start[0], name, {}, occurrence))
    return found


def sample(seed: int, only: Sequence[str], sites: int) -> list[Mutant]:
    """Draw up to so many places a module, and one mutation of each; the order goes from target to target."""
    random = Random(seed)
    by_module: list[list[Mutant]] = []
    for target in targets():
        if only and target.name not in only:
            continue
        for module in target.modules:
            found = mutants_of(target, module)
            places = random.sample(sorted(found), min(sites, len(found)))
            by_module.append([random.choice(found[place]) for place in places])
    longest = max(map(len, by_module), default=0)
    return [mutants[at] for at in range(longest) for mutants in by_module if at < len(mutants)]


class Tree:
    """A copy of the project that may be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "tests", "docs", "pyproject.toml", "README.md", "Makefile"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)

    def passes(self, tests: Sequence[str], timeout_s: float | None = None) -> bool | None:
        """Whether the tests pass; None where they do not end."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not sweep", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return None

    def judge(self, mutant: Mutant, timeout_s: float) -> Result | None:
        """Run the tests on a mutant; None where the mutation changes nothing."""
        path = self.folder / "src/tidelog" / mutant.module
        source = path.read_text()
        changed = mutate_code(source, get_operator(mutant.operator)(**mutant.arguments), mutant.occurrence)
        if changed is None or changed == source:
            return None
        diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), mutant.module, "mutant", "", "", 1, "")
        path.write_text(changed)
        try:
            passed = self.passes(mutant.target.tests, timeout_s)
        finally:
            path.write_text(source)
        outcome: Outcome = "timed out" if passed is None else "survived" if passed else "killed"
        return Result(mutant, outcome, "\n".join(diff))


def run(mutants: Sequence[Mutant], minutes: float, workers: int) -> Iterator[Result]:
    """Judge mutants until the time is over."""
    with tempfile.TemporaryDirectory(prefix="tidelog-mutants-") as folder:
        trees: Queue[Tree] = Queue()
        for number in range(workers):
            trees.put(Tree(Path(folder) / str(number)))
        limits = _limits(mutants, trees)
        until = time.monotonic() + minutes * 60

        def judge(mutant: Mutant) -> Result | None:
            if time.monotonic() > until:
                return None
            tree = trees.get()
            try:
                return tree.judge(mutant, limits[mutant.target.name])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(workers) as pool:
            yield from (result for result in pool.map(judge, mutants) if result is not None)


def _limits(mutants: Sequence[Mutant], trees: Queue[Tree]) -> dict[str, float]:
    """How long each target's tests may take. They must pass as they are."""
    limits: dict[str, float] = {}
    tree = trees.get()
    for target in {mutant.target.name: mutant.target for mutant in mutants}.values():
        began = time.monotonic()
        assert tree.passes(target.tests), f"the tests of {target.name} fail without any change"
        limits[target.name] = max(FLOOR_S, SLOWER * (time.monotonic() - began))
        print(f"{target.name}: unchanged tests pass in {time.monotonic() - began:.0f} s", file=sys.stderr)
    trees.put(tree)
    return limits


def table(results: Sequence[Result]) -> str:
    """Count by module. A mutant that hangs the tests was noticed."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.mutant.module, Counter())[result.outcome] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = ["| module | mutants | killed | timed out | survived | noticed |", "|---|---:|---:|---:|---:|---:|"]
    for module, row in counts.items():
        total = row.total()
        share = f"{100 * (total - row['survived']) / total:.0f} %" if total else "-"
        numbers = f"{total} | {row['killed']} | {row['timed out']} | {row['survived']} | {share}"
        lines.append(f"| `{module}` | {numbers} |" if module != "all" else f"| **all** | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no mutant after this (60)")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn (1)")
    parser.add_argument("--sites", type=int, default=30, help="places a module, at most (30)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TARGET", help="of targets.toml; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="write every result here, as JSON")
    args = parser.parse_args()
    mutants = sample(args.seed, args.only, args.sites)
    print(f"{len(mutants)} mutants, seed {args.seed}", file=sys.stderr)
    results: list[Result] = []
    for result in run(mutants, args.minutes, args.workers):
        results.append(result)
        mutant = result.mutant
        print(f"{len(results)}/{len(mutants)} {result.outcome}: {mutant.module}:{mutant.line}", file=sys.stderr)
        if result.outcome == "survived":
            print(result.diff, file=sys.stderr)
        if args.out:
            rows = [
                {**r.mutant._asdict(), "target": r.mutant.target.name, "outcome": r.outcome, "diff": r.diff}
                for r in results
            ]
            args.out.write_text(json.dumps(rows, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
