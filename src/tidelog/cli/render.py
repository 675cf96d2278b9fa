"""Where a command's words go, and how they look.

    standard output   the answer: records, a table, a sentence, or JSON with --json
    standard error    progress bars and remarks, both only for a person; errors for everybody

Bars and colours appear on a terminal only and never with --json, whatever the environment says,
so that a script reads the same bytes every day.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

from tidelog.commitlog import Damage, RecoveryReport, SegmentInfo

if TYPE_CHECKING:  # what draws is loaded when something is drawn: most commands answer with a line
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 200  # columns of a table that nobody looks at: enough for every cell

ProgressCallback = Callable[[int, int | None], None]


class Screen:
    """One command's connection to the person or program that started it."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.acked: range | None = None  # seqs an append has written, for whoever reports that it ended early
        self.unfinished_hint = ""  # what to do about a half-made result, for the same
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show

    def print_result(self, fields: Mapping[str, Any], *lines: str) -> None:
        """The command's result: the fields with --json, else the lines."""
        for line in [json.dumps(fields)] if self.json else lines:
            print(line)

    def print_table(self, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A small table for a person."""
        make_console(sys.stdout).print(build_table(titles, rows))

    def write_data(self, data: bytes) -> None:
        """Bytes of records, as they are."""
        sys.stdout.buffer.write(data)

    def print_note(self, text: str) -> None:
        """A remark for a person; nothing with --json."""
        if not self.json:
            self.print_error(text)

    def print_error(self, text: str) -> None:
        """A line on standard error. Where nobody reads that, it is not worth a second error."""
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            _discard(sys.stderr)

    def flush(self) -> None:
        """Hand everything to whoever reads it; raises where nobody does any more."""
        sys.stdout.flush()

    def flush_or_discard(self) -> None:
        """Print what is left. Where that cannot be done forget it, so that the interpreter does not try again."""
        try:
            self.flush()
        except OSError:
            _discard(sys.stdout)

    @contextmanager
    def progress_bar(self, label: str, *, total: int | None = None) -> Iterator[ProgressCallback]:
        """A progress bar while the block runs: call it with how much is done, and of how much."""
        if self.json or not sys.stderr.isatty():
            yield _no_progress
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        known = (BarColumn(), MofNCompleteColumn())
        unknown = (SpinnerColumn(), TextColumn("{task.completed:,.0f}", markup=False))
        columns = (TextColumn("{task.description}", markup=False), *(unknown if total is None else known))
        with Progress(*columns, console=make_console(sys.stderr), transient=True) as progress:
            task = progress.add_task(label, total=total)

            def show(done: int, total: int | None) -> None:
                progress.update(task, completed=done, total=total)

            yield show


def _discard(stream: TextIO) -> None:
    """Close a stream that cannot be written, with what it still holds."""
    with suppress(OSError):
        stream.close()


def _no_progress(_done: int, _total: int | None) -> None:
    """The bar that nobody sees."""


def make_console(stream: TextIO) -> Console:
    """A rich console that is a terminal exactly when the stream is, and takes no text for markup."""
    from rich.console import Console

    person = stream.isatty()
    return Console(
        file=stream,
        force_terminal=person,
        width=None if person else _PIPE_COLUMNS,
        markup=False,
        highlight=False,
        emoji=False,
    )


def build_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A small table. Titles that start with `>` stand over right-aligned columns; where the terminal is narrow,
    only the last column folds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for title in titles:
        side: Literal["left", "right"] = "right" if title.startswith(">") else "left"
        made.add_column(title.removeprefix(">"), justify=side, overflow="fold", no_wrap=title is not titles[-1])
    for row in rows:
        made.add_row(*row)
    return made


# ── words ─────────────────────────────────────────────────────────────────────────────────────────


def plural(number: int, noun: str) -> str:
    """`1 record`, `2,000 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(number: int) -> str:
    """A size that a person can compare: `999 B`, `1.5 MB`."""
    if number < 1000:
        return f"{number} B"
    value = float(number)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def format_seqs(first: int, stop: int) -> str:
    """The seqs of [first, stop) in words."""
    if stop <= first:
        return f"no records, next seq {first}"
    return f"seq {first}" if stop == first + 1 else f"seqs {first} to {stop - 1}"


def format_time(ts_us: int | None) -> str | None:
    """ISO 8601 in UTC; None where there is no time."""
    return str(np.datetime_as_string(np.datetime64(ts_us, "us"), timezone="UTC")) if ts_us else None


def format_time_range(first_us: int | None, last_us: int | None) -> str:
    """Two times to the second, for a person: `2026-01-31 12:00:00 to 12:00:05`."""
    if not first_us or not last_us:
        return "-"
    first, last = (
        str(np.datetime64(ts_us, "us").astype("datetime64[s]")).replace("T", " ") for ts_us in (first_us, last_us)
    )
    return f"{first} to {last[11:] if first[:10] == last[:10] else last}"


# ── findings ──────────────────────────────────────────────────────────────────────────────────────


def damage_line(damage: Damage) -> str:
    file, fault = damage
    seqs = f", {format_seqs(fault.seq, fault.resume)}" if fault.resume > fault.seq else ""
    return f"{file} at byte {fault.pos}{seqs}: {fault.reason}"


def damage_fields(damage: Damage) -> dict[str, Any]:
    file, fault = damage
    return {
        "file": file,
        "pos": fault.pos,
        "first_seq": fault.seq,
        "last_seq": fault.resume - 1,
        "reason": fault.reason,
    }


def report_fields(report: RecoveryReport) -> dict[str, Any]:
    return {
        "clean": report.clean,
        "cut_bytes": report.cut_bytes,
        "cut_reason": report.cut_reason,
        "rebuilt": report.rebuilt,
        "swept": report.swept,
        "quarantined": report.quarantined,
        "damage": [damage_fields(damage) for damage in report.damage],
    }


SEGMENT_TITLES = (">first", ">last", "state", ">data", ">index", "index is", "written (UTC)")


def segment_row(info: SegmentInfo) -> list[str]:
    empty = info.stop == info.base
    return [
        str(info.base),
        "-" if empty else str(info.stop - 1),
        "sealed" if info.sealed else "active",
        format_bytes(info.data_bytes),
        format_bytes(info.side_bytes),
        info.index,
        format_time_range(info.first_us, info.last_us),
    ]


def segment_fields(info: SegmentInfo) -> dict[str, Any]:
    return {
        "first_seq": info.base,
        "last_seq": info.stop - 1 if info.stop > info.base else None,
        "sealed": info.sealed,
        "data_bytes": info.data_bytes,
        "side_bytes": info.side_bytes,
        "index": info.index,
        "first_ts": format_time(info.first_us),
        "last_ts": format_time(info.last_us),
    }
