"""Runs the benchmarks, prints them as tables and writes them as JSON.

    python benchmarks/run.py [--quick] [--only NAME] [--dir DIR] [--baseline]
    python benchmarks/run.py [--quick] [--only NAME] [--dir DIR] --compare [FILE | TREE [--rounds N]]

A missed target does not fail a run: it is printed, and the exit code is 0. The exit code is 1 when a benchmark breaks,
and with --compare when a gate fell by more than noise (see compare.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a script is given its own directory, the benchmarks import from the root

from benchmarks import compare  # noqa: E402
from benchmarks.common import PROGRESS, NotEnoughSpace, Result, use_scratch_root  # noqa: E402

RESULTS = HERE / "results"
BASELINE = HERE / "baseline.json"

# Those without a quick and a full size take no argument and answer plain dictionaries.
_PLAIN = ("frame",)
_MODULES = {
    "frame": "micro.bench_frame",
    "scan": "log.bench_scan",
    "append": "log.bench_append",
    "open": "log.bench_open",
    "codecs": "log.bench_codecs",
    "topics-append": "topics.bench_append",
    "topics-writers": "topics.bench_writers",
    "topics-read": "topics.bench_read",
    "topics-recovery": "topics.bench_recovery",
    "topics-growth": "topics.bench_growth",
    "topics-many": "topics.bench_topics",
    "topics-deletes": "topics.bench_deletes",
    "topics-large": "topics.bench_large",
    "topics-backup": "topics.bench_backup",
    "topics-compaction": "topics.bench_compaction",
    "topics-rewrite": "topics.bench_rewrite",
    "topics-tiers": "topics.bench_tiers",
    "channels-restore": "channels.bench_restore",
    "channels-publish": "channels.bench_publish",
    "channels-wire": "channels.bench_wire",
    "server-writes": "server.bench_writes",
    "server-producer": "server.bench_producer",
    "server-reads": "server.bench_reads",
    "server-push": "server.bench_push",
    "server-sustained": "server.bench_sustained",
    "queues-jobs": "queues.bench_jobs",
    "routers-fanout": "queues.bench_fanout",
    "server-sched": "server.bench_sched",
    "server-attacks": "server.bench_attacks",
    "spark": "spark.bench_source",
    "spark-planning": "spark.bench_planning",
    "spark-stream": "spark.bench_stream",
    "spark-export": "spark.bench_export",
    "spark-kafka": "spark.bench_kafka",
}


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    console = PROGRESS.console
    chosen = [name for name in asked.only or _MODULES if _file(name).exists()]
    if asked.compare is not None and asked.compare.is_dir():
        return _compare_trees(console, asked.compare.resolve(), chosen, asked)
    results: list[Result] = []
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-", dir=_place(asked.dir)) as directory:
        use_scratch_root(Path(directory))
        machine = _machine(directory)
        console.print(", ".join(f"{what} {value}" for what, value in machine.items()), style="dim")
        if machine["file system"] in ("tmpfs", "ramfs"):
            console.print("This is memory, not a disk: syncs are free here. Choose another place with --dir.")
        for name in chosen:
            try:
                with PROGRESS:
                    found = _run(name, quick=asked.quick)
            except NotEnoughSpace as reason:
                console.print(f"{name} is left out: it {reason}")
            except Exception:  # one broken benchmark must not hide the figures of the others
                console.print_exception()
                broken.append(name)
            else:
                console.print(_table(name, found))
                results += found
    said = _document(results, machine, quick=asked.quick)
    path = _write(said)
    console.print(f"written to {path.relative_to(HERE.parent)}", style="dim")
    fell = False
    if asked.compare is not None:
        fell = _compare_with_file(console, asked.compare, results, quick=asked.quick)
    if asked.baseline:
        _save_baseline(said)
        console.print(f"baseline written to {BASELINE.relative_to(HERE.parent)}", style="dim")
    if broken:
        console.print(f"broken: {', '.join(broken)}", style="bold red")
    return 1 if broken or fell else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Tidelog against what this machine allows.")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all works, figures are rough")
    parser.add_argument("--only", action="append", choices=list(_MODULES), metavar="NAME", help=", ".join(_MODULES))
    parser.add_argument("--dir", type=Path, help="where to put the files; a directory on the disk to be measured")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="?",
        const=BASELINE,
        metavar="FILE|TREE",
        help="compare the gates with a result file (without one: baseline.json) or with another tree of this"
        " project, which is measured in the same run; exit 1 where a gate fell by more than noise",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each tree with --compare TREE (5)")
    parser.add_argument("--baseline", action="store_true", help="make the gates of this run the new baseline.json")
    asked = parser.parse_args(arguments)
    if asked.baseline and asked.quick:
        parser.error("a baseline is made from full sizes; leave --quick away")
    if asked.compare is not None and not asked.compare.exists():
        parser.error(f"--compare: {asked.compare} is neither a result file nor a tree")
    if asked.rounds < 1:
        parser.error("--rounds is 1 or more")
    return asked


def _place(wanted: Path | None) -> Path:
    """Beside the repository: the same disk, and nothing that watches the repository is woken up."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    beside = HERE.parent.parent
    return beside if os.access(beside, os.W_OK) else HERE


def _file(name: str) -> Path:
    return HERE / f"{_MODULES[name].replace('.', '/')}.py"


def _run(name: str, *, quick: bool) -> list[Result]:
    module = import_module(f"benchmarks.{_MODULES[name]}")
    if name in _PLAIN:
        return [_from_dict(row) for row in module.run()]
    found: list[Result] = module.run(quick)
    return found


def _from_dict(row: Mapping[str, Any]) -> Result:
    blank: dict[str, Any] = {
        "limit": None,
        "limit_name": "",
        "ratio": None,
        "target": "",
        "met": None,
        "kind": "gate",
    }
    known = {field.name for field in fields(Result)}
    return Result(**{**blank, **{key: value for key, value in row.items() if key in known}})


def _table(name: str, found: Iterable[Result]) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold")
    table.add_column("benchmark")
    for heading in ("measured", "worst to best", "of limit"):
        table.add_column(heading, justify="right")
    for heading in ("limit", "target", "met"):
        table.add_column(heading)
    for row in found:
        table.add_row(
            row.name,
            f"{_format_value(row.value)} {row.unit}",
            f"{_format_value(row.low)} – {_format_value(row.high)}" if row.high else "",
            "" if row.ratio is None else _ratio(row.ratio),
            "" if row.limit is None else f"{_format_value(row.limit)} {row.limit_name}",
            row.target,
            {True: "[green]yes", False: "[bold red]no", None: ""}[row.met],
            style="" if row.kind == "gate" else "dim",
        )
    return table


def _format_value(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _ratio(ratio: float) -> str:
    if ratio >= 10:
        return f"{ratio:.0f}×"
    return f"{ratio:.0%}" if ratio >= 0.1 else f"{ratio:.1%}"


def _machine(directory: str) -> dict[str, str]:
    """What the figures depend on. Nothing that names the machine."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "processor": model,
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory) / (1 << 20):.0f} GiB",
        "file system": _file_system(directory),
        "kernel": platform.release().partition("-")[0],
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "pyarrow", "xxhash")},
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _file_system(directory: str) -> str:
    mounts = (line.split() for line in _lines("/proc/mounts"))
    above = [(len(mount[1]), mount[2]) for mount in mounts if directory.startswith(mount[1].rstrip("/") + "/")]
    return max(above, default=(0, "unknown"))[1]


def _document(results: Iterable[Result], machine: Mapping[str, str], *, quick: bool) -> dict[str, Any]:
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": quick,
        "machine": dict(machine),
        "results": [asdict(row) for row in results],
    }


def _write(said: Mapping[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{said['made'].replace(':', '')}.json"
    path.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    return path


def _save_baseline(said: Mapping[str, Any]) -> None:
    """The gates only: what the disk decides is no yardstick for the next change. Gates that were not run stay."""
    before = compare.read_rows(BASELINE) if BASELINE.exists() else []
    rows = {row.name: asdict(row) for row in before}
    rows |= {row["name"]: row for row in said["results"] if row["kind"] == "gate"}
    kept = {**said, "results": list(rows.values())}
    BASELINE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def _compare_with_file(console: Console, path: Path, results: Iterable[Result], *, quick: bool) -> bool:
    """Print how far each gate is from a result file; True where one fell."""
    found = compare.compare_with_rows(compare.read_rows(path), results)
    if found and quick != json.loads(path.read_text())["quick"]:
        console.print("One side was measured with --quick, the other with full sizes: read it with care.", style="dim")
    return _report(console, f"against {path.name}, as shares of the limit", found)


def _compare_trees(console: Console, other: Path, names: Iterable[str], asked: argparse.Namespace) -> int:
    """Measure this tree and another one by turns, a benchmark at a time; 1 where a gate fell or a tree broke."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-", dir=_place(asked.dir)) as directory:
        for name in names:
            before, now = (
                compare.tree_measure(tree, [name], quick=asked.quick, directory=Path(directory))
                for tree in (other, HERE.parent)
            )
            try:
                rounds = compare.measure_alternating(asked.rounds, before, now)
            except RuntimeError as reason:  # one broken benchmark does not hide the others
                console.print(str(reason), markup=False, highlight=False)
                failed = True
            else:
                failed |= _report(console, f"{name}, {asked.rounds} rounds", compare.compare_rounds(*rounds))
    return int(failed)


def _report(console: Console, title: str, found: Sequence[compare.Comparison]) -> bool:
    console.print(compare.comparison_table(title, found) if found else f"{title}: no gate is on both sides")
    fell = [row.name for row in found if row.verdict == "slower"]
    if fell:
        console.print(f"fell by more than noise: {', '.join(fell)}", style="bold red")
    return bool(fell)


if __name__ == "__main__":
    sys.exit(main())
