"""Makes docs/performance.md and its pictures from the results of runs.

    python -m benchmarks.topics.performance_page [FILE.json …]        without files: all of benchmarks/results

The page has two parts, records and storage; one without any results stays as it is. Where several runs have the same
row the newest counts. Quick runs do not. Each part says which machine made its measurements and how busy it was: a
number without that says nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Result
from benchmarks.topics import bench_topics
from benchmarks.topics.plot import Panel, svg

_ROOT = Path(__file__).resolve().parents[2]
_DOCS, _RESULTS = _ROOT / "docs", _ROOT / "benchmarks" / "results"
_APPEND = re.compile(
    r"append (?P<cell>(?:100 B|1 KB) × \d+), (?P<threads>\d) threads?, (?P<ours>\w+)(?: ÷ (?P<peer>.+))?"
)
_OPEN = re.compile(r"(recover|open) [\d,]+ × 100 B (from the WAL|in sealed segments)")
_GROWN = re.compile(
    r"(?P<what>first append|append 100 B|append 100 × 100 B|tail read of 100|close), "
    r"(?P<size>[\d,]+) (?P<axis>records in the topic|topics)"
)
_BETTER = "the better of lmdb and rocksdict"
_CELLS = [f"{size} × {batch}" for size in ("100 B", "1 KB") for batch in (1, 100, 1000)]
_PLOTTED = ("append 100 B", "append 100 × 100 B", "tail read of 100")
_PROMISES = {
    "survives a power cut": (
        "fsync",
        "bare write + fdatasync",
        "lmdb sync",
        "rocksdict sync",
        "sqlite3 FULL",
        "persist-queue",
    ),
    "survives a kill": ("disk", "memory", "bare write", "lmdb", "rocksdict", "sqlite3 NORMAL", "litequeue"),
    "gone with the process": ("ephemeral", "sqlite3 in memory"),
}


_TEXT = """# Performance

What the topics engine does on one machine, beside what that machine allows and beside the stores that a Python
program would otherwise embed. Every figure is the median of several rounds in which all candidates took turns. This
page is generated from the results of runs; the method is described in the [benchmarks](../benchmarks/README.md).

The machine: {machine}.
It is virtual; its load was {loads} when measurements began. **Between two runs a figure moves
by 20 to 40 %, one that waits for the disk by more; differences below 1.25 × are noise.** Trust ratios inside a table,
not numbers across tables.

## Targets

{targets}

## Appending, one thread

Records a second, by size of the record × records of a batch.

{one}

A class stands with the stores that promise the same. `persist-queue` has no batches and `litequeue` always runs SQLite
at NORMAL; both write record by record. `memory` promises nothing, although what it wrote survives a kill.

Appending is not the whole of it: the next rows write more than a WAL holds, and the clock stops when every record
is synced in its final place.

{settled}

## Appending, eight threads

All of them write to one topic, or one table, or one tree.

{eight}

## Many writers

One record of 100 B a call, on disk before the call returns.

{writers}

## Reading

From the first record to the last, records a second; the page cache is warm.

{reads}

## Opening

In a fresh process.

{opens}

## As topics grow

The cost of a call, from ten thousand to ten million records in one topic and from one topic to ten thousand of them.
Class `disk`; of many topics a hundred are written and read in turn.

![Cost of a call over the size of a topic and over the number of topics](performance.svg)

{grown}

The first append to a topic after a start waits for a sync that reserves seqs; the others do not. A close writes a
checkpoint of what changed. Its measurements for many topics are older than that: a manifest then named every segment
and every topic again. [Many topics](#many-topics) has the present ones.
"""


_BENCHMARKS = {
    "topics-append": re.compile("append .* thread|append .* and settle"),
    "topics-writers": re.compile(r"append 100 B × 1, fsync, "),
    "topics-read": re.compile(r"read \d"),
    "topics-recovery": _OPEN,
    "topics-growth": _GROWN,
}


_STORAGE_HEADING = "## Storage\n"
_STORAGE_TEXT = """
What moves, frees and copies the bytes of topics, beside the same bytes copied without Tidelog, and what many topics
cost. Other runs than those above: {machine}.
Its load was {loads} when measurements began, on {cores} cores; the runs before add to it. The
slowest call in a hundred moves most between two runs.

### Tiers

{tiers}

### Rewrite and compaction

`cp` syncs nothing; a rewrite and a compaction are durable when they return.

{freed}

### Backups

{backups}

### Large records

{large}

### Many topics

Processor times are those of the process, with files on tmpfs: neither the disk nor other programs are part of them.

{many}

![Cost over the number of topics](performance-topics.svg)
"""

_STORAGE_BENCHMARKS = {
    "topics-tiers": re.compile("relocation to |cold read from |bytes in .* of those on the disk|.* p99 beside a reloc"),
    "topics-rewrite": re.compile("rewrite of |bytes freed of "),
    "topics-compaction": re.compile("compaction by |latest record of a key|page of 1,000 latest"),
    "topics-backup": re.compile("backup of |write p99 beside a backup"),
    "topics-large": re.compile("append a stream of |read a record of |memory for "),
    "topics-many": re.compile(
        r"(open|close with|checkpoint with|first write to|list \d+ topics).*, [\d,]+ topics|memory of an idle topic|"
        r"[\d,]+ topics made by"
    ),
}


def main(files: Sequence[str]) -> None:
    page, pictures = _DOCS / "performance.md", dict[str, str]()
    records, _, storage = page.read_text().partition(_STORAGE_HEADING)
    if found := _collect(files, _BENCHMARKS):
        rows, machines = found
        pictures["performance.svg"] = svg(list(_panels(rows)), "µs")
        records = _page(rows, machines)
    if found := _collect(files, _STORAGE_BENCHMARKS):
        rows, machines = found
        many = [asdict(row) for row in rows if _STORAGE_BENCHMARKS["topics-many"].match(row.name)]
        pictures["performance-topics.svg"] = bench_topics.plot(many)
        storage = _storage(rows, machines)
    page.write_text("".join((records.rstrip("\n"), "\n\n", _STORAGE_HEADING, storage)))
    for name, picture in pictures.items():
        (_DOCS / name).write_text(picture)


def _collect(
    files: Sequence[str], benchmarks: Mapping[str, re.Pattern[str]]
) -> tuple[list[Result], list[Mapping[str, Any]]] | None:
    """Return the rows of these benchmarks and the machines that made them; None if there are none at all."""
    rows: dict[str, Result] = {}
    machines: list[Mapping[str, Any]] = []
    for said in _runs(files):
        found = [Result(**row) for row in said["results"] if any(map(_of(row["name"]), benchmarks.values()))]
        rows |= {row.name: row for row in found}
        machines += [said["machine"]] * bool(found)
    missing = [name for name, known in benchmarks.items() if not any(known.match(row) for row in rows)]
    if missing and rows:
        sys.exit(f"there are no full results of {', '.join(missing)}; run benchmarks/run.py --only {missing[0]} first")
    return (list(rows.values()), machines) if rows else None


def _storage(rows: Sequence[Result], machines: Sequence[Mapping[str, Any]]) -> str:
    def table(*names: str) -> str:
        return _judged(row for name in names for row in rows if _STORAGE_BENCHMARKS[name].match(row.name))

    return _STORAGE_TEXT.format(
        machine=_machine(machines),
        cores=machines[-1]["cores"],
        loads=_loads(machines),
        tiers=table("topics-tiers"),
        freed=table("topics-rewrite", "topics-compaction"),
        backups=table("topics-backup"),
        large=table("topics-large"),
        many=table("topics-many"),
    )


def _of(name: str) -> Callable[[re.Pattern[str]], object]:
    return lambda pattern: pattern.match(name)


def _runs(files: Sequence[str]) -> list[dict[str, Any]]:
    """What full runs said, the newest last."""
    said = [json.loads(Path(file).read_text()) for file in files or map(str, _RESULTS.glob("*.json"))]
    return sorted((run for run in said if not run["quick"]), key=lambda run: str(run["made"]))


def _machine(machines: Sequence[Mapping[str, Any]]) -> str:
    it = machines[-1]
    file_systems = " and ".join(sorted({str(each["file system"]) for each in machines}))
    return (
        f"{it['processor']}, {it['cores']} cores, {it['memory']} of memory, {file_systems}, Linux {it['kernel']}, "
        f"Python {it['python']}"
    )


def _loads(machines: Sequence[Mapping[str, Any]]) -> str:
    loads = sorted(float(each["load"]) for each in machines)
    return f"{loads[0]:g} to {loads[-1]:g}" if len(loads) > 1 else f"{loads[0]:g}"


def _page(rows: Sequence[Result], machines: Sequence[Mapping[str, Any]]) -> str:
    return _TEXT.format(
        machine=_machine(machines),
        loads=_loads(machines),
        targets=_targets(rows),
        one=_appends(rows, "1"),
        eight=_appends(rows, "8"),
        settled=_listed(row for row in rows if "and settle" in row.name),
        writers=_listed(row for row in rows if row.name.startswith("append 100 B × 1, fsync, ")),
        reads=_listed(row for row in rows if _BENCHMARKS["topics-read"].match(row.name)),
        opens=_listed(row for row in rows if _OPEN.match(row.name)),
        grown=_grown(rows),
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join((*lines, *(f"| {' | '.join(row)} |" for row in rows)))


def _targets(rows: Iterable[Result]) -> str:
    return _table(
        ("", "measured", "of limit", "limit", "target", "met"),
        (
            (
                row.name,
                f"{_said(row.value)} {row.unit}",
                "" if row.ratio is None else f"{row.ratio:.2g} ×",
                "" if row.limit is None else f"{_said(row.limit)} {row.limit_name}",
                row.target,
                "yes" if row.met else "**no**",
            )
            for row in rows
            if row.met is not None and _is_topics(row.name)
        ),
    )


def _is_topics(name: str) -> bool:
    return any(
        (_APPEND.fullmatch(name), _GROWN.fullmatch(name), _OPEN.match(name), _BENCHMARKS["topics-read"].match(name))
    )


def _appends(rows: Iterable[Result], threads: str) -> str:
    found: dict[str, dict[str, float]] = {}
    limits = {"ephemeral": "sqlite3 in memory", "fsync": "bare write + fdatasync"}
    for row in rows:
        known = _APPEND.fullmatch(row.name)
        if known is None or known["threads"] != threads or known["peer"] == _BETTER:
            continue
        found.setdefault(known["ours"], {})[known["cell"]] = row.value
        other = known["peer"] or limits.get(known["ours"], "bare write")
        if row.limit is not None:
            found.setdefault(other, {})[known["cell"]] = row.limit
    return "\n\n".join(
        _table(
            (promise, *_CELLS),
            (
                (
                    f"**{store}**" if store in ("fsync", "disk", "memory", "ephemeral") else store,
                    *(_said(found[store][cell]) if cell in found[store] else "" for cell in _CELLS),
                )
                for store in stores
                if store in found
            ),
        )
        for promise, stores in _PROMISES.items()
    )


def _listed(rows: Iterable[Result]) -> str:
    return _table(
        ("", "measured", "worst to best", "of limit", "limit"),
        (
            (
                row.name,
                f"{_said(row.value)} {row.unit}",
                f"{_said(row.low)} – {_said(row.high)}",
                "" if row.ratio is None else f"{row.ratio:.2g} ×",
                "" if row.limit is None else f"{_said(row.limit)} {row.limit_name}",
            )
            for row in rows
        ),
    )


def _judged(rows: Iterable[Result]) -> str:
    return _table(
        ("", "measured", "worst to best", "of limit", "limit", "target", "met"),
        (
            (
                row.name,
                f"{_said(row.value)} {row.unit}",
                f"{_said(row.low)} – {_said(row.high)}",
                "" if row.ratio is None else f"{row.ratio:.2g} ×",
                "" if row.limit is None else f"{_said(row.limit)} {row.limit_name}",
                row.target,
                "" if row.met is None else "yes" if row.met else "**no**",
            )
            for row in rows
        ),
    )


def _lines(rows: Iterable[Result]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """axis → what is measured → its points."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {"records in the topic": {}, "topics": {}}
    for row in rows:
        known = _GROWN.fullmatch(row.name)
        if known is not None:
            points = found[known["axis"]].setdefault(known["what"], [])
            points.append((float(known["size"].replace(",", "")), row.value))
    return found


def _panels(rows: Iterable[Result]) -> Iterator[Panel]:
    for axis, lines in _lines(rows).items():
        yield Panel(f"Cost of a call by {axis}", axis, {name: lines[name] for name in _PLOTTED if name in lines})


def _grown(rows: Iterable[Result]) -> str:
    return "\n\n".join(
        _table(
            (f"µs, by {axis}", *(f"{size:,.0f}" for size, _ in next(iter(lines.values())))),
            ((name, *(_said(value) for _, value in points)) for name, points in lines.items()),
        )
        for axis, lines in _lines(rows).items()
    )


def _said(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    if value >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main(sys.argv[1:])
