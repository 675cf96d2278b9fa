"""Mutation testing: change the code in a small way, run the tests that should notice, and count those that do not.

    targets.toml ──► sites.py: a sample by seed ──► each mutant in a copy of the tree ──► its tests ──► killed, survived
                         the unchanged tree: all tests pass, and the lines that each runs ──┘

First every test of a group runs on the unchanged tree, with the lines that it runs noted. A failure ends the run: the
figure would mean nothing. For each mutant those tests run that reach the changed statement, then those that reach its
function, until one fails; tests that killed mutants of the same module come first, then the fastest. A mutant is

    killed      a test fails that passes without the change
    timed out   a test does not end, and does end within the same time without the change; counts as killed
    survived    all of its tests pass, up to `--budget` seconds of tests; or no test reaches it

A survivor that reviewed.toml lists, with a reason, changes nothing that a user or a disk could see; it is counted
apart.

Results are written after each mutant. A run with the same `--out` goes on from there: what was killed stays so while
the lines around it are the same, what survived is judged again when the tests of its group have changed.

    python -m tests.mutation.mutate --seed 1 --sample 35 --jobs 2 --out mutation.json
    python -m tests.mutation.mutate --group wal --group queues --sample 20
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.mutation.sites import RULES, Mutant, draw_sample

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path("tests/mutation")
COPIED: Final = ("src", "tests", "docs", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
FIRST_TESTS: Final = 20  # run at first, since most mutants are killed by one of them
SLOWER: Final = 6  # times the unchanged test: then a mutant hangs
FLOOR_S: Final = 15.0
IMPORT_S: Final = 60.0
Outcome: TypeAlias = Literal["killed", "timed out", "survived", "unclear"]
Row: TypeAlias = dict[str, Any]


class Group(NamedTuple):
    """Modules, and the tests that should notice a change of them."""

    name: str
    modules: list[str]
    tests: list[str]
    tuning: list[str]
    texts: list[str]


class Review(NamedTuple):
    """A survivor that is equivalent, with the reason."""

    module: str
    function: str
    before: str
    after: str
    reason: str


def groups(only: Sequence[str] = ()) -> list[Group]:
    table = tomllib.loads((ROOT / HERE / "targets.toml").read_text())
    unknown = set(only) - set(table)
    if unknown:
        raise SystemExit(f"no such group: {', '.join(sorted(unknown))}; targets.toml has {', '.join(table)}")
    return [
        Group(name, row["modules"], row["tests"], row.get("tuning", []), row.get("texts", []))
        for name, row in ((name, table[name]) for name in only or table)
    ]


def reviews() -> list[Review]:
    path = ROOT / HERE / "reviewed.toml"
    rows = tomllib.loads(path.read_text()).get("survivor", []) if path.exists() else []
    return [Review(row["module"], row["function"], row["before"], row["after"], row["reason"]) for row in rows]


class Tree:
    """A copy of the project that may be changed, with a process that runs its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
            elif source.exists():
                shutil.copy2(source, folder / name)
        environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "TMPDIR": str(folder.parent)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._runner = subprocess.Popen(
            [sys.executable, str(folder / HERE / "runner.py"), str(folder)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._runner.communicate()

    def ask(self, **request: Any) -> Row:
        assert self._runner.stdin is not None
        assert self._runner.stdout is not None
        self._runner.stdin.write(json.dumps({"log": str(self._log), **request}) + "\n")
        self._runner.stdin.flush()
        line = self._runner.stdout.readline()
        if not line:
            raise SystemExit("the process that runs the tests has ended")
        answer: Row = json.loads(line)
        return answer

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def run(self, mutant: Mutant | None, limits: dict[str, float]) -> Row:
        """Run tests, each up to its limit in seconds, on a mutant or on the unchanged tree."""
        timeout_s = IMPORT_S + sum(limits.values())
        if mutant is None:
            return self.ask(tests=limits, timeout_s=timeout_s)
        path = self.folder / "src/tidelog" / mutant.module
        source, times = path.read_text(), path.stat()
        path.write_text(mutant.changed)
        # What Python compiled before is told apart by the seconds of this time, and must be neither used nor replaced.
        os.utime(path, (times.st_atime, times.st_mtime + 100_000))
        try:
            return self.ask(tests=limits, timeout_s=timeout_s)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()


class Baseline:
    """Which lines each test runs, by test file. Kept between runs for files and modules that have not changed."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._kept: dict[str, Row] = json.loads(cache.read_text()) if cache and cache.exists() else {}

    def measure(self, tree: Tree, group: Group, console: Console) -> dict[str, Row]:
        """The tests of a group that pass, each with its time and its lines."""
        files = files_of(tree.folder, group.tests)
        keys = {file: self._key(tree.folder, group, file) for file in files}
        missing = [file for file in files if keys[file] not in self._kept]
        if missing:
            paths = {str(tree.folder / "src/tidelog" / module): module for module in group.modules}
            answer = tree.ask(files=missing, modules=paths, timeout_s=3600.0)
            if "rows" not in answer or answer["status"] not in (0, 1, 5):
                raise SystemExit(f"{group.name}: the tests could not be run unchanged\n{tree.output()[-4000:]}")
            failed = [test for test, row in answer["rows"].items() if row["outcome"] == "failed"]
            if failed:  # some tests bear no tracing; the others are failures of the unchanged tree
                again = tree.ask(tests=dict.fromkeys(failed, 600.0), timeout_s=3600.0)
                if again["status"] != 0:
                    raise SystemExit(
                        f"{group.name}: {again.get('failed')} fails without any change; no mutant was judged\n"
                        f"{tree.output()[-4000:]}"
                    )
                console.print(f"{group.name}: not used, since they fail while lines are noted: {', '.join(failed)}")
            for file in missing:
                rows = {test: row for test, row in answer["rows"].items() if test.partition("::")[0] == file}
                self._kept[keys[file]] = rows
            if self._cache:
                self._cache.write_text(json.dumps(self._kept))
        found = {test: row for file in files for test, row in self._kept[keys[file]].items()}
        return {test: row for test, row in found.items() if row["outcome"] == "passed"}

    def _key(self, root: Path, group: Group, file: str) -> str:
        contents = [(root / file).read_bytes(), *((root / "src/tidelog" / each).read_bytes() for each in group.modules)]
        return f"{file} {hashlib.sha256(bytes(1).join(contents)).hexdigest()[:16]}"


def files_of(root: Path, named: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in named:
        path = root / name
        paths = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found.update(dict.fromkeys(each.relative_to(root).as_posix() for each in paths))
    return list(found)


def hash_of(root: Path, files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.encode() + bytes(1) + (root / file).read_bytes())
    return digest.hexdigest()[:16]


def choose_tests(mutant: Mutant, tests: dict[str, Row], kills: Counter[str], budget_s: float) -> list[str]:
    """The tests for a mutant, in order: killers of the module first, then the fastest; up to so many seconds."""

    def order(test: str) -> tuple[int, float]:
        return -kills[test], tests[test]["seconds"]

    lines = {test: row["lines"].get(mutant.module, []) for test, row in tests.items()}
    first, last = mutant.statement
    if mutant.key_line is None:  # it runs at import: also for a test that runs no other line of the module
        near, far = list(tests), []
    else:
        near = [test for test, found in lines.items() if any(first <= line <= last for line in found)]
        reached = set(near)
        far = [test for test, found in lines.items() if mutant.key_line in found and test not in reached]
    picked: list[str] = []
    total = 0.0
    for test in (*sorted(near, key=order), *sorted(far, key=order)):
        total += tests[test]["seconds"]
        if picked and total > budget_s:
            break
        picked.append(test)
    return picked


class Verdict(NamedTuple):
    outcome: Outcome
    by: str | None  # the test
    tests: int  # that were to run
    seconds: float


def judge(tree: Tree, mutant: Mutant, tests: dict[str, Row], kills: Counter[str], budget_s: float) -> Verdict:
    picked, began = choose_tests(mutant, tests, kills, budget_s), time.monotonic()
    outcome: Outcome = "survived"
    by = None
    for part in (picked[:FIRST_TESTS], picked[FIRST_TESTS:]):
        if not part:
            break
        limits = {test: FLOOR_S + SLOWER * tests[test]["seconds"] for test in part}
        answer = tree.run(mutant, limits)
        if answer["status"] == 0:
            continue
        # A test that fails now and then must not count: it has to pass on the unchanged tree at this moment.
        by = answer.get("failed") or answer.get("ended_in")
        unchanged = tree.run(None, {by: limits[by]} if by in limits else limits)
        hangs = answer["status"] is None or "ended_in" in answer
        outcome = "unclear" if unchanged["status"] != 0 else "timed out" if hangs else "killed"
        break
    return Verdict(outcome, by, len(picked), round(time.monotonic() - began, 1))


def is_reviewed(row: Row, reviewed: Iterable[Review]) -> Review | None:
    changed = [line for line in row["diff"].splitlines()[2:] if line[:1] in "+-"]
    before = "\n".join(line[1:].strip() for line in changed if line[0] == "-")
    after = "\n".join(line[1:].strip() for line in changed if line[0] == "+")
    for each in reviewed:
        where = (each.module, each.function) == (row["module"], row["function"])
        if where and (each.before.strip(), each.after.strip()) == (before, after):
            return each
    return None


class Results:
    """What was found, written after each mutant."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, Lock()
        known: Row = json.loads(path.read_text()) if path and path.exists() else {}
        rows = (*known.get("not in this run", []), *known.get("results", []))
        self._known: dict[str, Row] = {row["id"]: row for row in rows}
        self.rows: dict[str, Row] = {}
        self.about: Row = {"groups": {}}

    def kept(self, mutant: Mutant, tests: str) -> bool:
        """Take over an earlier result if it still holds."""
        row = self._known.get(mutant.id)
        if row is None or row["outcome"] == "unclear" or (row["outcome"] == "survived" and row["tests_hash"] != tests):
            return False
        self.rows[mutant.id] = {**row, "group": mutant.group, "line": mutant.line}
        return True

    def add(self, mutant: Mutant, verdict: Verdict, tests: str) -> Row:
        row = {
            **{name: getattr(mutant, name) for name in ("id", "group", "module", "function", "line", "operator")},
            **{name: getattr(verdict, name) for name in ("outcome", "by", "tests", "seconds")},
            "tests_hash": tests,
            "diff": mutant.diff,
        }
        with self._lock:
            self.rows[mutant.id] = row
            self.write()
        return row

    def write(self) -> None:
        """Also what this run did not come to, so that a later one can go on."""
        if self._path:
            later = [row for key, row in self._known.items() if key not in self.rows]
            text = json.dumps({**self.about, "results": list(self.rows.values()), "not in this run": later}, indent=1)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(self._path)


def table(rows: Sequence[Row], reviewed: Sequence[Review]) -> str:
    """Count by group. A mutant that hangs the tests was noticed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        equivalent = row["outcome"] == "survived" and is_reviewed(row, reviewed) is not None
        counts[row["group"]]["equivalent" if equivalent else row["outcome"]] += 1
    counts["**all**"] = sum(counts.values(), Counter())
    lines = [
        "| group | mutants | killed | timed out | survived | equivalent | noticed | noticed, without equivalent |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group, row in counts.items():
        judged = row.total() - row["unclear"]
        noticed = row["killed"] + row["timed out"]
        numbers = f"{row['killed']} | {row['timed out']} | {row['survived']} | {row['equivalent']}"
        shares = f"{percent(noticed, judged)} | {percent(noticed, judged - row['equivalent'])}"
        lines.append(f"| {group} | {judged} | {numbers} | {shares} |")
    unclear = counts["**all**"]["unclear"]
    return "\n".join(lines) + (f"\n\n{unclear} unclear: their tests failed unchanged; run again" if unclear else "")


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


class Work(NamedTuple):
    mutant: Mutant
    tests: dict[str, Row]
    tests_hash: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn (1)")
    parser.add_argument("--sample", type=int, default=35, metavar="N", help="mutants a group (35)")
    parser.add_argument("--group", action="append", default=[], help="of targets.toml; may be repeated (all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each in a tree of its own (2)")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds of tests a mutant (60)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no mutant after this (60)")
    parser.add_argument("--out", type=Path, help="results as JSON; an earlier file is gone on with")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies are removed
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    began, results, reviewed = time.monotonic(), Results(args.out), reviews()
    results.about |= {"seed": args.seed, "sample": args.sample, "budget_s": args.budget, "rules": RULES}
    drawn: dict[str, list[Mutant]] = {}
    for group in groups(args.group):
        sources = {module: (ROOT / "src/tidelog" / module).read_text() for module in group.modules}
        found = draw_sample(
            group.name, sources, seed=args.seed, limit=args.sample, tuning=group.tuning, texts=group.texts
        )
        drawn[group.name] = found.mutants
        results.about["groups"][group.name] = {"places": found.places, "left out": dict(found.dropped)}
        console.print(f"{group.name}: {len(found.mutants)} of {found.places} places, left out: {dict(found.dropped)}")
    if args.list:
        for mutant in (each for found in drawn.values() for each in found):
            console.print(mutant.diff + "\n")
        return
    with tempfile.TemporaryDirectory(prefix="tidelog-mutants-") as folder:
        trees = [Tree(Path(folder) / str(number)) for number in range(args.jobs)]
        try:
            _judge_all(args, drawn, trees, results, console, began + args.minutes * 60)
        finally:
            for tree in trees:
                tree.close()
    results.write()
    print(table(list(results.rows.values()), reviewed))


def _judge_all(
    args: argparse.Namespace,
    drawn: dict[str, list[Mutant]],
    trees: Sequence[Tree],
    results: Results,
    console: Console,
    until: float,
) -> None:
    free: Queue[Tree] = Queue()
    for tree in trees:
        free.put(tree)
    baseline = Baseline(args.out.with_suffix(".baseline.json") if args.out else None)
    kills: dict[str, Counter[str]] = defaultdict(Counter)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(args.jobs) as pool:
        for group in groups(args.group):
            mutants = drawn[group.name]
            task = progress.add_task(group.name, total=len(mutants))
            began = time.monotonic()
            tests = baseline.measure(trees[0], group, console)
            digest = hash_of(trees[0].folder, files_of(trees[0].folder, group.tests))
            took = f"{time.monotonic() - began:.0f} s"
            console.print(f"{group.name}: {len(tests)} tests pass unchanged, {took} for their lines")

            def one(mutant: Mutant, tests: dict[str, Row] = tests, digest: str = digest) -> Row | None:
                if results.kept(mutant, digest):
                    return None
                if time.monotonic() > until:
                    return None
                tree = free.get()
                try:
                    verdict = judge(tree, mutant, tests, kills[mutant.module], args.budget)
                finally:
                    free.put(tree)
                if verdict.by:
                    kills[mutant.module][verdict.by] += 1
                return results.add(mutant, verdict, digest)

            for row in pool.map(one, mutants):
                progress.advance(task)
                if row is not None:
                    where = f"{row['module']}:{row['line']} {row['operator']}"
                    console.print(f"{row['outcome']:9} {row['seconds']:6.1f} s  {where}  {row['by'] or ''}")
                    if row["outcome"] == "survived":
                        console.print(row["diff"] + "\n")
            results.write()


if __name__ == "__main__":
    main()
