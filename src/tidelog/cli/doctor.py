"""[shell] `tidelog doctor`: what this machine has for Tidelog, and what to do about what it lacks.

    needed       Python
    for a server uvloop, httptools, h2, websockets, prometheus_client
    for Spark    pyspark 4.2 or newer, Java 17 or newer
    for tables   deltalake
    the disk     how long it takes for a sync: nothing durable with one writer is faster
    the data     where DIR is a data directory: how old its last checkpoint is, and what it could not write or verify

Something that an extra brings and that is not installed is not an error: the exit code is 2 only where something that
is there cannot work.
"""

from __future__ import annotations

import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.addresses import check_path
from tidelog.cli.command import command
from tidelog.cli.render import Screen
from tidelog.clock import SystemClock
from tidelog.disk.machine import sync_us
from tidelog.engine.check import standing
from tidelog.errors import Error
from tidelog.spark.java import LEAST, Java, find_java
from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

SERVER: Final = ("uvloop", "httptools", "h2", "websockets", "prometheus_client")
_SPARK: Final = (4, 2)
_PYTHON: Final = (3, 11)


class Finding(NamedTuple):
    what: str
    found: str
    good: bool  # False: it is missing, or cannot be used as it is
    broken: bool = False  # it is there and cannot work
    step: str = ""


def add(commands: Commands) -> None:
    """Add `doctor` to the command line."""
    made = command(
        commands,
        "doctor",
        doctor,
        short="what this machine has: Python, Java, Spark, server parts, the disk",
        about="Look at what is installed and say what is missing for a server, for Spark and for tables, and how to\n"
        "get it. Measures how long the disk of DIR takes for a sync, with a temporary file there. Where DIR is a data\n"
        "directory, says how old its last checkpoint is and which topics it could not write or verify.\n"
        "Exit code 2 where something that is there cannot work.",
        examples="tidelog doctor .\ntidelog doctor /tmp --json",
    )
    made.add_argument("dir", metavar="DIR", nargs="?", default=".", help="a directory on the disk to look at")


def doctor(args: Namespace, screen: Screen) -> int:
    check_path(args.dir)
    found = examined(args.dir)
    fields = {
        "ok": not any(finding.broken for finding in found),
        "tidelog": __version__,
        "findings": [finding._asdict() for finding in found],
    }
    missing = [finding for finding in found if not finding.good]
    said = "everything is there" if not missing else f"{', '.join(each.what for each in missing)}: see below"
    screen.answer(fields, f"tidelog {__version__}: {said}")
    if not screen.json:
        screen.table(
            ("", "what", "found", "what to do"),
            [
                ["ok" if each.good else "broken" if each.broken else "-", each.what, each.found, each.step]
                for each in found
            ],
        )
    return 2 if any(finding.broken for finding in found) else 0


def examined(
    directory: str,
    *,
    installed: Callable[[str], str | None] | None = None,
    java: Callable[[], Java | None] = find_java,
) -> list[Finding]:
    """Everything that was looked at, in the order in which it is needed."""
    installed = installed or _installed
    python = sys.version_info >= _PYTHON
    return [
        Finding("Python", platform.python_version(), python, not python, "" if python else "install Python 3.11"),
        _server(installed),
        _spark(installed("pyspark")),
        _java(java()),
        _package("deltalake", installed("deltalake"), "lake"),
        _disk(directory),
        *_data(directory),
    ]


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # late: only this command needs it

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _package(name: str, found: str | None, extra: str) -> Finding:
    if found is not None:
        return Finding(name, found, True)
    return Finding(name, "not installed", False, step=f"pip install 'tidelog[{extra}]'")


def _server(installed: Callable[[str], str | None]) -> Finding:
    lacking: Sequence[str] = [name for name in SERVER if installed(name) is None]
    if not lacking:
        return Finding("server", ", ".join(f"{name} {installed(name)}" for name in SERVER), True)
    return Finding("server", f"without {', '.join(lacking)}", False, step="pip install 'tidelog[server]'")


def _spark(found: str | None) -> Finding:
    finding = _package("pyspark", found, "spark")
    numbers = tuple(int(part) for part in (found or "").split(".")[:2] if part.isdecimal())
    if found is None or numbers >= _SPARK:
        return finding
    step = "pip install 'pyspark>=4.2': older ones cannot bound a batch"
    return Finding("pyspark", found, False, broken=True, step=step)


def _java(java: Java | None) -> Finding:
    if java is None:
        return Finding("Java", "none", False, step="pip install 'tidelog[spark]', which brings one, or set JAVA_HOME")
    found = f"{java.version or 'of an unknown version'}, {java.home or java.origin}"
    if java.good:
        return Finding("Java", f"{found} ({java.origin})" if java.home else found, True)
    step = f"Spark needs {LEAST} or newer: pip install 'tidelog[spark]', or set JAVA_HOME"
    return Finding("Java", f"{found} ({java.origin})", False, broken=True, step=step)


def _disk(directory: str) -> Finding:
    try:
        taken = sync_us(directory, SystemClock().monotonic_us)
    except OSError as error:
        return Finding("disk", f"{directory}: {error}", False, broken=True, step="name a directory that can be written")
    return Finding("disk", f"{taken / 1000:.2f} ms for a sync of 4 KiB in {directory}", True)


def _data(directory: str) -> list[Finding]:
    """The checkpoints of a data directory; nothing where it is none."""
    try:
        found = standing(directory.rstrip("/") or "/")
    except (Error, OSError) as error:
        step = f"`tidelog check {directory}` shows all of it"
        return [Finding("checkpoints", f"{directory}: {error}", False, broken=True, step=step)]
    if found is None:
        return []
    now_ms = SystemClock().now_us() // 1000
    age = "none yet" if found.saved_ms is None else f"the last one {max(now_ms - found.saved_ms, 0) / 1000:.0f} s ago"
    said = f"{age}, {found.wal_bytes / (1 << 20):.1f} MiB of WAL"
    if not found.lagging and not found.unproven and not found.skipped:
        return [Finding("checkpoints", said, True)]
    if found.lagging:
        said += f"; not written: {', '.join(found.lagging[:10])}"
    if found.unproven:
        said += f"; sealed with damage: {', '.join(found.unproven[:10])}"
    if found.skipped:
        said += f"; {len(found.skipped)} snapshots do not read"
    return [Finding("checkpoints", said, False, broken=True, step=f"`tidelog check {directory}` shows all of it")]
