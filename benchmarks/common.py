"""What every benchmark shares: the shape of a result, a room on the disk, fair repeats, the progress bar.

A figure alone says nothing on a machine whose speed drifts, so each is measured beside the
physical limit it runs into: one round times every candidate and the limit in turn, the next
round does so in the opposite order, and the median over the rounds is what is reported.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Kind: TypeAlias = Literal["gate", "information"]
Measurements: TypeAlias = Mapping[str, Sequence[float]]

GB = 1_000_000_000
MB = 1_000_000
SMALLER_IS_BETTER = frozenset(("s", "ms", "µs", "MB"))


@dataclass(frozen=True, slots=True)
class Result:
    """One measured figure. `gate`: our own code decides it, so a change is news. `information`: the disk does."""

    name: str
    value: float
    unit: str
    limit: float | None  # what the machine allows, measured in the same rounds
    limit_name: str
    ratio: float | None  # value / limit
    target: str
    met: bool | None  # None: there is no target
    kind: Kind
    low: float = 0.0  # the worst and the best round: a change inside these is noise
    high: float = 0.0


class NotEnoughSpace(Exception):
    """The disk has too little space for a benchmark; it is left out, which is not a failure."""


# A table in a file or a pipe need not be as narrow as the terminal that rich assumes there.
_console = Console()
if not _console.is_terminal:
    _console.width = 150

# The refresh is by hand: a thread that redraws ten times a second would be measured as well.
PROGRESS = Progress(
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    console=_console,
    transient=True,
    auto_refresh=False,
)

_scratch_root = Path()


def use_scratch_root(directory: Path) -> None:
    """Where `room` makes its directories from now on."""
    global _scratch_root
    _scratch_root = directory


@contextmanager
def scratch_dir(size: int) -> Iterator[Path]:
    """An empty directory on the disk under test, gone afterwards. NoRoom when `size` bytes would fill the disk."""
    free = shutil.disk_usage(_scratch_root).free
    if free < size + GB // 2:
        raise NotEnoughSpace(f"needs {size / GB:.1f} GB and half a gigabyte to spare, the disk has {free / GB:.1f} GB")
    directory = _scratch_root / "room"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A line of the progress bar; call what this gives once per step."""
    task = PROGRESS.add_task(title, total=total)

    def done() -> None:
        PROGRESS.advance(task)
        PROGRESS.refresh()

    PROGRESS.refresh()
    try:
        yield done
    finally:
        PROGRESS.remove_task(task)


def alternate(title: str, rounds: int, candidates: Mapping[str, Callable[[], float]]) -> Measurements:
    """What each candidate measured in each round. A round before the first is thrown away: it pays for
    memory that was never touched and for code that was never run."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    with steps(title, (rounds + 1) * len(candidates)) as done:
        for turn in range(rounds + 1):
            names = list(candidates)
            for name in names if turn % 2 else reversed(names):
                gc.collect()  # garbage of one candidate is not collected in the time of the next
                measured = candidates[name]()
                if turn:
                    found[name].append(measured)
                done()
    return found


def result(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    limit: Sequence[float] | None = None,
    limit_name: str = "",
    min_value: float | None = None,
    max_value: float | None = None,
    min_ratio: float | None = None,
    max_ratio: float | None = None,
    kind: Kind = "information",
) -> Result:
    """The median of the rounds, against the median of the limit and against at most one target."""
    value = median(values)
    bound = None if limit is None else median(limit)
    ratio = value / bound if bound else None
    target, met = "", None
    if min_value is not None:
        target, met = f"≥ {_format_value(min_value)} {unit}", value >= min_value
    elif max_value is not None:
        target, met = f"< {_format_value(max_value)} {unit}", value < max_value
    elif min_ratio is not None and ratio is not None:
        target, met = f"≥ {_format_ratio(min_ratio)} the limit", ratio >= min_ratio
    elif max_ratio is not None and ratio is not None:
        target, met = f"≤ {_format_ratio(max_ratio)} the limit", ratio <= max_ratio
    worst, best = min(values), max(values)
    if unit in SMALLER_IS_BETTER:
        worst, best = best, worst
    return Result(name, value, unit, bound, limit_name, ratio, target, met, kind, worst, best)


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.0%} of" if ratio < 1 else f"{ratio:g} ×"


def time_call(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def payloads(size: int, count: int = 1000) -> list[bytes]:
    """Records that no cache and no compression can take for each other; the same ones in every run."""
    random = Random(size)
    return [random.randbytes(size) for _ in range(count)]


def data_files(log: Path) -> list[Path]:
    """The files of a log that hold records, whatever its codec; empty ones left out."""
    found = (path for path in sorted(log.iterdir()) if path.suffix in (".data", ".log", ".store"))
    return [path for path in found if path.stat().st_size]
