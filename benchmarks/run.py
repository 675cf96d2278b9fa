"""Runs the benchmarks, prints them as tables and writes them as JSON.

    python benchmarks/run.py [--quick] [--only NAME] [--dir DIR] [--compare] [--baseline]

No figure makes this fail: a benchmark that is slower than its target is printed as such, and the
exit code is 0. Only a benchmark that breaks makes it 1.
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

from benchmarks.common import PROGRESS, SMALLER_IS_BETTER, NotEnoughSpace, Result, use_scratch_root  # noqa: E402

RESULTS = HERE / "results"
BASELINE = HERE / "baseline.json"
_NOISE = 1.25  # smaller changes are what the machine does by itself

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
    "topics-deletes": "topics.bench_deletes",
    "channels-restore": "channels.bench_restore",
    "channels-publish": "channels.bench_publish",
    "channels-wire": "channels.bench_wire",
    "server-writes": "server.bench_writes",
    "server-reads": "server.bench_reads",
    "server-push": "server.bench_push",
    "server-sustained": "server.bench_sustained",
    "queues-jobs": "queues.bench_jobs",
    "routers-fanout": "queues.bench_fanout",
    "server-sched": "server.bench_sched",
    "server-attacks": "server.bench_attacks",
    "spark": "spark.bench_source",
    "spark-stream": "spark.bench_stream",
    "spark-export": "spark.bench_export",
}


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    console = PROGRESS.console
    chosen = [name for name in asked.only or _MODULES if _file(name).exists()]
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
    if asked.compare:
        _compare(console, results, quick=asked.quick)
    if asked.baseline:
        _save_baseline(said)
        console.print(f"baseline written to {BASELINE.relative_to(HERE.parent)}", style="dim")
    if broken:
        console.print(f"broken: {', '.join(broken)}", style="bold red")
    return 1 if broken else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Tidelog against what this machine allows.")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all works, figures are rough")
    parser.add_argument("--only", action="append", choices=list(_MODULES), metavar="NAME", help=", ".join(_MODULES))
    parser.add_argument("--dir", type=Path, help="where to put the files; a directory on the disk to be measured")
    parser.add_argument("--compare", action="store_true", help="print the change against baseline.json")
    parser.add_argument("--baseline", action="store_true", help="make the gates of this run the new baseline.json")
    asked = parser.parse_args(arguments)
    if asked.baseline and asked.quick:
        parser.error("a baseline is made from full sizes; leave --quick away")
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
    rows = {row["name"]: row for row in _baseline()}
    rows |= {row["name"]: row for row in said["results"] if row["kind"] == "gate"}
    kept = {**said, "results": list(rows.values())}
    BASELINE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def _baseline() -> list[dict[str, Any]]:
    if not BASELINE.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(BASELINE.read_text())["results"]
    return rows


def _compare(console: Console, results: Iterable[Result], *, quick: bool) -> None:
    """Print how far each gate is from the baseline, as a figure and against its limit."""
    before = {row["name"]: Result(**row) for row in _baseline()}
    table = Table(title="against the baseline", title_justify="left", title_style="bold")
    for heading in ("benchmark", "baseline", "now", "change", "change against the limit", ""):
        table.add_column(heading)
    for now in results:
        old = before.get(now.name)
        if old is None:
            continue
        change = _better(old.value, now.value, now.unit)
        relative = _better(old.ratio, now.ratio, now.unit) if old.ratio and now.ratio else change
        table.add_row(
            now.name,
            f"{_format_value(old.value)} {old.unit}",
            f"{_format_value(now.value)} {now.unit}",
            f"{change:.2f}×",
            f"{relative:.2f}×",
            "[bold red]slower" if relative < 1 / _NOISE else "[green]faster" if relative > _NOISE else "noise",
        )
    console.print(table if table.row_count else "there is no baseline for these")
    if quick and table.row_count:
        console.print("The baseline was made from full sizes, this run was quick: read it with care.", style="dim")


def _better(old: float, now: float, unit: str) -> float:
    """By which factor things got better; below 1 they got worse."""
    return old / now if unit in SMALLER_IS_BETTER else now / old


if __name__ == "__main__":
    sys.exit(main())
