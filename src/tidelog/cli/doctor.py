"""`tidelog check` and `tidelog doctor`: is the directory undamaged, and does the machine have what Tidelog needs?

`check` verifies every file of a data directory against its checksums and the manifest.

`doctor` prints what this machine has for Tidelog, and what to do about what it lacks.

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
from typing import Any, Final, NamedTuple

from tidelog.addresses import check_path
from tidelog.channels.store import ChannelCheck
from tidelog.cli.command import (
    Commands,
    add_command,
)
from tidelog.cli.render import Screen, format_bytes, format_seqs, plural
from tidelog.cli.target import check_holds_topics
from tidelog.clock import SystemClock
from tidelog.disk.process import measure_sync_us
from tidelog.engine.check import Finding, checkpoint_summary
from tidelog.engine.check import check_directory as check_directory
from tidelog.errors import Error
from tidelog.spark.java import MIN_JAVA_VERSION, Java, find_java
from tidelog.version import __version__


def add_check(commands: Commands) -> None:
    """Add `check` to the command line."""
    parser = add_command(
        commands,
        "check",
        check,
        "DIR",
        summary="verify a directory of topics and channels; exit code 1 on damage",
        description="Read every byte of a directory of topics: snapshots, every frame of the WAL, every segment "
        "against its\n"
        "footer and its index, deletions and counts against the snapshot; and of channels: metadata, messages,\n"
        "cursors. Damage is named by file, byte and records, and gives exit code 1. Notes are leftovers of a\n"
        "crash that the next start repairs; they do not fail. Changes nothing, and works beside a writer.",
        examples="tidelog check data && echo all good\ntidelog check data --json\ntidelog check data --full",
    )
    parser.add_argument("--full", action="store_true", help="read every object of the cold store, not only its length")
    parser.add_argument("--cold", metavar="ADDRESS", help="the cold store, where it needs credentials or has moved")


def check(args: Namespace, screen: Screen) -> int:
    """Print every finding; return 1 where something is damaged."""
    check_holds_topics(args.dir)
    with screen.progress_bar(f"checking {args.dir}", total=1) as bar:
        topics = check_directory(
            args.dir, progress=lambda _, done, total: bar(done, total), full=args.full, cold=args.cold
        )
        channels = ChannelCheck(args.dir)
        findings = [*topics, *channels]
    damage = [finding for finding in findings if finding.damage]
    fields = {
        "ok": not damage,
        "path": args.dir,
        "topics": topics.topics,
        "segments": topics.segments,
        "frames": topics.frames,
        "bytes": topics.bytes,
        "records": None if damage else topics.records,
        "channels": channels.channels,
        "messages": channels.messages,
        "findings": [finding_fields(finding) for finding in findings],
    }
    checked = f"{plural(topics.segments, 'segment')} and {plural(topics.frames, 'frame')} of the WAL"
    if damage:
        screen.print_result(fields, f"{args.dir}: damage in {describe_location(damage[0])}: {damage[0].reason}")
    else:
        contents = f"{plural(topics.topics, 'topic')} with {plural(topics.records, 'record')}"
        if channels.channels:
            contents += f", {plural(channels.channels, 'channel')} with {plural(channels.messages, 'message')}"
        size = format_bytes(topics.bytes + channels.bytes)
        screen.print_result(fields, f"{args.dir}: no damage, {contents}; {checked}, {size}")
    if findings and not screen.json:
        screen.print_table(("", "what", "where", "why"), [finding_row(finding) for finding in findings])
    if damage:
        screen.print_note(
            f"{plural(len(damage), 'damaged place')} in {checked}; all other records can be read as before "
            f"(tidelog topic read {args.dir} TOPIC), damaged ones only from a copy"
        )
    return 1 if damage else 0


def describe_location(finding: Finding) -> str:
    """`topics/00000001/seg-….data at byte 505, seqs 1 to 9 of orders`."""
    at = "" if finding.pos is None else f" at byte {finding.pos}"
    whose = f" of {finding.topic}" if finding.topic is not None else ""
    return (
        finding.file + at + (f", {format_seqs(finding.seqs.start, finding.seqs.stop)}{whose}" if finding.seqs else "")
    )


def finding_row(finding: Finding) -> list[str]:
    return ["damage" if finding.damage else "note", finding.kind, describe_location(finding), finding.reason]


def finding_fields(finding: Finding) -> dict[str, Any]:
    lost = finding.seqs
    return {
        "damage": finding.damage,
        "kind": finding.kind,
        "file": finding.file,
        "pos": finding.pos,
        "topic": finding.topic,
        "first_seq": lost.start if lost else None,
        "last_seq": lost.stop - 1 if lost else None,
        "reason": finding.reason,
    }


SERVER_PACKAGES: Final = ("uvloop", "httptools", "h2", "websockets", "prometheus_client")
_SPARK_VERSION_MIN: Final = (4, 2)
_PYTHON_VERSION_MIN: Final = (3, 11)


class DoctorFinding(NamedTuple):
    what: str
    found: str
    good: bool  # False: it is missing, or cannot be used as it is
    broken: bool = False  # it is there and cannot work
    step: str = ""


def add(commands: Commands) -> None:
    """Add `doctor` to the command line."""
    parser = add_command(
        commands,
        "doctor",
        doctor,
        summary="what this machine has: Python, Java, Spark, server parts, the disk",
        description="Look at what is installed and say what is missing for a server, for Spark and for tables, and "
        "how to\n"
        "get it. Measures how long the disk of DIR takes for a sync, with a temporary file there. Where DIR is a data\n"
        "directory, says how old its last checkpoint is and which topics it could not write or verify.\n"
        "Exit code 2 where something that is there cannot work.",
        examples="tidelog doctor .\ntidelog doctor /tmp --json",
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", default=".", help="a directory on the disk to look at")


def doctor(args: Namespace, screen: Screen) -> int:
    check_path(args.dir)
    found = examine(args.dir)
    fields = {
        "ok": not any(finding.broken for finding in found),
        "tidelog": __version__,
        "findings": [finding._asdict() for finding in found],
    }
    missing = [finding for finding in found if not finding.good]
    said = "everything is there" if not missing else f"{', '.join(each.what for each in missing)}: see below"
    screen.print_result(fields, f"tidelog {__version__}: {said}")
    if not screen.json:
        screen.print_table(
            ("", "what", "found", "what to do"),
            [
                ["ok" if each.good else "broken" if each.broken else "-", each.what, each.found, each.step]
                for each in found
            ],
        )
    return 2 if any(finding.broken for finding in found) else 0


def examine(
    directory: str,
    *,
    installed: Callable[[str], str | None] | None = None,
    java: Callable[[], Java | None] = find_java,
) -> list[DoctorFinding]:
    """Everything that was looked at, in the order in which it is needed."""
    installed = installed or _installed_version
    python = sys.version_info >= _PYTHON_VERSION_MIN
    return [
        DoctorFinding("Python", platform.python_version(), python, not python, "" if python else "install Python 3.11"),
        _check_server(installed),
        _check_spark(installed("pyspark")),
        _check_java(java()),
        _check_package("deltalake", installed("deltalake"), "lake"),
        _check_disk(directory),
        *_check_data(directory),
    ]


def _installed_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # late: only this command needs it

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_package(name: str, installed_version: str | None, extra: str) -> DoctorFinding:
    if installed_version is not None:
        return DoctorFinding(name, installed_version, True)
    return DoctorFinding(name, "not installed", False, step=f"pip install 'tidelog[{extra}]'")


def _check_server(installed: Callable[[str], str | None]) -> DoctorFinding:
    lacking: Sequence[str] = [name for name in SERVER_PACKAGES if installed(name) is None]
    if not lacking:
        return DoctorFinding("server", ", ".join(f"{name} {installed(name)}" for name in SERVER_PACKAGES), True)
    return DoctorFinding("server", f"without {', '.join(lacking)}", False, step="pip install 'tidelog[server]'")


def _check_spark(installed_version: str | None) -> DoctorFinding:
    finding = _check_package("pyspark", installed_version, "spark")
    numbers = tuple(int(part) for part in (installed_version or "").split(".")[:2] if part.isdecimal())
    if installed_version is None or numbers >= _SPARK_VERSION_MIN:
        return finding
    step = "pip install 'pyspark>=4.2': older ones cannot bound a batch"
    return DoctorFinding("pyspark", installed_version, False, broken=True, step=step)


def _check_java(java: Java | None) -> DoctorFinding:
    if java is None:
        return DoctorFinding(
            "Java", "none", False, step="pip install 'tidelog[spark]', which brings one, or set JAVA_HOME"
        )
    found = f"{java.version or 'of an unknown version'}, {java.home or java.origin}"
    if java.is_supported:
        return DoctorFinding("Java", f"{found} ({java.origin})" if java.home else found, True)
    step = f"Spark needs {MIN_JAVA_VERSION} or newer: pip install 'tidelog[spark]', or set JAVA_HOME"
    return DoctorFinding("Java", f"{found} ({java.origin})", False, broken=True, step=step)


def _check_disk(directory: str) -> DoctorFinding:
    try:
        taken = measure_sync_us(directory, SystemClock().monotonic_us)
    except OSError as error:
        return DoctorFinding(
            "disk", f"{directory}: {error}", False, broken=True, step="name a directory that can be written"
        )
    return DoctorFinding("disk", f"{taken / 1000:.2f} ms for a sync of 4 KiB in {directory}", True)


def _check_data(directory: str) -> list[DoctorFinding]:
    """The checkpoints of a data directory; nothing where it is none."""
    try:
        found = checkpoint_summary(directory.rstrip("/") or "/")
    except (Error, OSError) as error:
        step = f"`tidelog check {directory}` shows all of it"
        return [DoctorFinding("checkpoints", f"{directory}: {error}", False, broken=True, step=step)]
    if found is None:
        return []
    now_ms = SystemClock().now_us() // 1000
    age = "none yet" if found.saved_ms is None else f"the last one {max(now_ms - found.saved_ms, 0) / 1000:.0f} s ago"
    said = f"{age}, {found.wal_bytes / (1 << 20):.1f} MiB of WAL"
    if not found.lagging and not found.without_footer and not found.skipped:
        return [DoctorFinding("checkpoints", said, True)]
    if found.lagging:
        said += f"; not written: {', '.join(found.lagging[:10])}"
    if found.without_footer:
        said += f"; sealed with damage: {', '.join(found.without_footer[:10])}"
    if found.skipped:
        said += f"; {len(found.skipped)} snapshots do not read"
    return [DoctorFinding("checkpoints", said, False, broken=True, step=f"`tidelog check {directory}` shows all of it")]
