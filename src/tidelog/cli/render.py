"""Output of the commands: results, notes, progress bars, and their formats.

    standard output   the result: records, a table, a sentence, or JSON with --json
    standard error    progress bars and notes, only without --json; errors always

Bars and colours appear on a terminal only and never with --json, whatever the environment says, so that a script
always reads the same bytes.
"""

from __future__ import annotations

import io
import json
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

from tidelog.commitlog import Damage, RecoveryReport, SegmentInfo
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput

if TYPE_CHECKING:  # rich is imported when a table or a bar is drawn: most commands print one line
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 200  # width of a table that is not on a terminal: enough for every cell

ProgressCallback = Callable[[int, int | None], None]


class Screen:
    """One command's connection to the person or program that started it."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.acked: range | None = None  # seqs that a write has acked, for the report of an early end
        self.unfinished_hint = ""  # what to do about an incomplete result, for the same report
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may have characters that the terminal lacks

    def print_result(
        self,
        fields: Mapping[str, Any],
        *lines: str,
        titles: Sequence[str] = (),
        rows: Sequence[Sequence[str]] = (),
        after: Sequence[str] = (),
    ) -> None:
        """Print the fields with --json; otherwise the lines, a table where there are rows, and the lines `after` it."""
        if self.json:
            print(json.dumps(fields))
            return
        for line in lines:
            print(line)
        if rows:
            self.print_table(titles, rows)
        for line in after:
            print(line)

    def print_table(self, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a small table."""
        make_console(sys.stdout).print(build_table(titles, rows))

    def write_data(self, data: bytes) -> None:
        """Write bytes of records unchanged."""
        sys.stdout.buffer.write(data)

    def print_note(self, text: str) -> None:
        """Print a note on standard error; nothing with --json."""
        if not self.json:
            self.print_error(text)

    def print_error(self, text: str) -> None:
        """Print a line on standard error. A closed standard error is ignored."""
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            _discard(sys.stderr)

    def flush(self) -> None:
        """Write buffered output; raises where the reader has closed it."""
        sys.stdout.flush()

    def flush_or_discard(self) -> None:
        """Write buffered output, or discard it where that fails, so that the interpreter does not try again."""
        try:
            self.flush()
        except OSError:
            _discard(sys.stdout)

    @contextmanager
    def progress_bar(self, label: str, *, total: int | None = None) -> Iterator[ProgressCallback]:
        """Show a progress bar while the block runs; the yielded function takes how much is done, and of how much."""
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
    """Close a stream that cannot be written, and drop its buffer."""
    with suppress(OSError):
        stream.close()


def _no_progress(_done: int, _total: int | None) -> None:
    """Progress without a bar."""


def make_console(stream: TextIO) -> Console:
    """Make a rich console that is a terminal exactly when the stream is, and interprets no markup."""
    from rich.console import Console

    is_terminal = stream.isatty()
    return Console(
        file=stream,
        force_terminal=is_terminal,
        width=None if is_terminal else _PIPE_COLUMNS,
        markup=False,
        highlight=False,
        emoji=False,
    )


def build_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a small table. Columns whose title starts with `>` are right-aligned; on a narrow terminal only the last
    column folds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for title in titles:
        side: Literal["left", "right"] = "right" if title.startswith(">") else "left"
        table.add_column(title.removeprefix(">"), justify=side, overflow="fold", no_wrap=title is not titles[-1])
    for row in rows:
        table.add_row(*row)
    return table


def write_new_file(path: str, chunks: Iterable[bytes], on_written: Callable[[int], object] | None = None) -> None:
    """Write chunks to a file that does not exist yet; remove it after an error. `on_written` is called with the bytes
    written so far."""
    disk = PosixDisk()
    try:
        file = disk.open(path, "create")
    except FileExistsError:
        raise BadInput(f"{path} exists; nothing was written, choose another name") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}; nothing was written, choose another place") from None
    pos = 0
    try:
        for chunk in chunks:
            file.write(pos, chunk)
            pos += len(chunk)
            if on_written is not None:
                on_written(pos)
        file.sync()
    except BaseException:
        disk.remove(path)
        raise
    finally:
        file.close()


# ── formats ───────────────────────────────────────────────────────────────────────────────────────


def bytes_field(name: str, value: bytes) -> dict[str, str]:
    """A JSON field with these bytes as text; bytes that are not UTF-8 as base64 under `<name>_base64`."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value).decode()}


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
    """The seqs of [first, stop) as text."""
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
