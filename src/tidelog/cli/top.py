"""`tidelog top`: what a database does now: rates of topics, lag of groups, queues, fsyncs and the disk.

    sample ──► interval ──► sample ──► difference ──► a table, or a JSON object

A sample of a directory is a read-only open that is refreshed, so it works beside the writer. Counters of fsyncs are in
the memory of the writer: they are shown for a server, from its /metrics.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidelog import protocols
from tidelog.cli.command import DATABASE, Commands, add_command, parse_positive, parse_seconds, stop_event
from tidelog.cli.render import Screen, build_table, format_bytes, make_console, plural
from tidelog.cli.target import open_target, target_place, wal_bytes
from tidelog.client import Client
from tidelog.clock import SystemClock
from tidelog.database import Database
from tidelog.disk.interface import free_bytes
from tidelog.disk.posix import PosixDisk
from tidelog.engine import TopicInfo
from tidelog.errors import BadInput, Forbidden, TopicNotFound, Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

_INTERVAL_S_MIN: Final = 0.05


class Sample(NamedTuple):
    """A database at one moment."""

    at_ms: int  # of a monotonic clock
    topics: dict[str, TopicInfo]
    metrics: dict[str, float]  # of the writer and the disk; those that are not known are left out


class Sampler:
    """Takes samples of one database."""

    def __init__(self, args: Namespace, database: protocols.Database, client: Client | None) -> None:
        self._directory, self._prefix = args.dir, args.prefix
        self._database, self._client, self._clock = database, client, SystemClock()

    def sample(self) -> Sample:
        if isinstance(self._database, Database):
            with suppress(Unavailable):  # the writer was faster; the next sample has it
                self._database.refresh()
        topics = {state.topic: state for state in self._database.topics(self._prefix)}
        return Sample(self._clock.monotonic_ms(), topics, self._metrics())

    def _metrics(self) -> dict[str, float]:
        if self._client is not None:
            with suppress(Forbidden):  # the key may read some topics only
                return parse_metrics(self._client.get_bytes("/metrics").decode())
            return {}
        free = free_bytes(PosixDisk(), self._directory)
        found = {"wal_bytes": float(wal_bytes(self._directory))}
        return found if free is None else {**found, "disk_free_bytes": float(free)}

    def details(self, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the groups and the queues of these topics."""
        groups, queues = [], []
        for name in names:
            with suppress(TopicNotFound):  # dropped since the sample
                topic = self._database.topic(name, create=False)
                for group in topic.groups():
                    state = group.state()
                    lag = state.lag
                    groups.append({"topic": name, "group": state.group, "position": state.position, **lag._asdict()})
                if topic.config.type == "queue":
                    queues.append({"queue": name, **topic.queue().counts()._asdict()})
        return groups, queues


_SERIES: Final = {
    "tidelog_wal_fsync_latency_us_count": "fsyncs",
    "tidelog_wal_fsync_latency_us_sum": "fsync_us",
    "tidelog_disk_free_bytes": "disk_free_bytes",
    "tidelog_pressure": "pressure",
}


def parse_metrics(text: str) -> dict[str, float]:
    """Return the series of a server's metrics that `top` shows."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name in _SERIES:
            with suppress(ValueError):
                found[_SERIES[name]] = float(value)
    return found


def compare(place: str, before: Sample, now: Sample, sampler: Sampler, limit: int) -> dict[str, Any]:
    """Return what happened between two samples: the JSON object of `top`."""
    elapsed_s = max((now.at_ms - before.at_ms) / 1000, 0.001)
    rows: list[dict[str, Any]] = []
    for name, state in now.topics.items():
        old = before.topics.get(name)
        written = state.head_seq - (old.head_seq if old is not None and old.epoch == state.epoch else 0)
        removed = max((0 if old is None or old.epoch != state.epoch else old.count) + written - state.count, 0)
        rows.append(
            {
                "topic": name,
                "class": state.config.durability,
                "count": state.count,
                "bytes": state.bytes,
                "head_seq": state.head_seq,
                "written_per_s": round(max(written, 0) / elapsed_s, 1),
                "removed_per_s": round(removed / elapsed_s, 1),
            }
        )
    rows.sort(key=lambda row: (-row["written_per_s"] - row["removed_per_s"], -row["bytes"], row["topic"]))
    groups, queues = sampler.details([row["topic"] for row in rows[:limit]])
    fsyncs = now.metrics.get("fsyncs", 0.0) - before.metrics.get("fsyncs", 0.0)
    fsync_us = now.metrics.get("fsync_us", 0.0) - before.metrics.get("fsync_us", 0.0)
    is_known = "fsyncs" in now.metrics
    return {
        "database": place,
        "ts": datetime.fromtimestamp(SystemClock().now_us() / 1e6, UTC).isoformat(timespec="milliseconds"),
        "interval_s": round(elapsed_s, 3),
        "topics_total": len(rows),
        "records": sum(row["count"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "written_per_s": round(sum(row["written_per_s"] for row in rows), 1),
        "removed_per_s": round(sum(row["removed_per_s"] for row in rows), 1),
        "fsyncs_per_s": round(fsyncs / elapsed_s, 1) if is_known else None,
        "fsync_mean_us": round(fsync_us / fsyncs) if fsyncs > 0 else None,
        "pressure": now.metrics.get("pressure"),
        "wal_bytes": _whole(now.metrics.get("wal_bytes")),
        "disk_free_bytes": _whole(now.metrics.get("disk_free_bytes")),
        "topics": rows[:limit],
        "groups": groups,
        "queues": queues,
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def top(args: Namespace, screen: Screen) -> int:
    """Show what a database does, until the keyboard ends it."""
    if args.interval < _INTERVAL_S_MIN:
        raise BadInput(f"--interval is {args.interval:g} s, the least is {_INTERVAL_S_MIN}; nothing was done")
    with ExitStack() as stack:
        database = stack.enter_context(open_target(args, screen, write=False))
        client = stack.enter_context(Client(args.server, key=args.api_key)) if args.server else None
        stopping = stack.enter_context(stop_event())
        show = stack.enter_context(_view(screen, live=not args.once))
        sampler = Sampler(args, database, client)
        before = sampler.sample()
        while not stopping.wait(args.interval):
            now = sampler.sample()
            show(compare(target_place(args), before, now, sampler, args.limit))
            before = now
            if args.once:
                break
    return 0


@contextmanager
def _view(screen: Screen, *, live: bool) -> Iterator[Any]:
    """Yield a function that shows one state: on a terminal in place of the last one, elsewhere below it."""
    console = make_console(sys.stdout)
    if screen.json or not live or not console.is_terminal:

        def show(fields: dict[str, Any]) -> None:
            if screen.json:
                screen.print_result(fields)
            else:
                console.print(render(fields))
            screen.flush()

        yield show
        return
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as view:
        yield lambda fields: view.update(render(fields), refresh=True)


def render(fields: dict[str, Any]) -> RenderableType:
    """Return one state as tables."""
    from rich.console import Group
    from rich.text import Text

    fsyncs = "fsyncs: not known here"
    if fields["fsyncs_per_s"] is not None:
        mean = "" if fields["fsync_mean_us"] is None else f" of {fields['fsync_mean_us']:,} µs"
        fsyncs = f"{fields['fsyncs_per_s']:,.1f} fsyncs/s{mean}"
    disk = [
        f"{name} {format_bytes(fields[key])}"
        for name, key in (("WAL", "wal_bytes"), ("disk free", "disk_free_bytes"))
        if fields[key] is not None
    ]
    parts: list[RenderableType] = [
        Text(f"{fields['database']}   {fields['ts'][:19].replace('T', ' ')}   over {fields['interval_s']:g} s"),
        Text(
            f"{plural(fields['topics_total'], 'topic')}, {plural(fields['records'], 'record')}, "
            f"{format_bytes(fields['bytes'])}; {fields['written_per_s']:,.1f} written/s, "
            f"{fields['removed_per_s']:,.1f} removed/s"
        ),
        Text("; ".join([fsyncs, *disk])),
        Text(),
        build_table(
            ("topic", "class", ">records", ">bytes", ">head", ">written/s", ">removed/s"),
            [
                (
                    row["topic"],
                    row["class"],
                    f"{row['count']:,}",
                    format_bytes(row["bytes"]),
                    f"{row['head_seq']:,}",
                    f"{row['written_per_s']:,.1f}",
                    f"{row['removed_per_s']:,.1f}",
                )
                for row in fields["topics"]
            ],
        ),
    ]
    if fields["groups"]:
        rows = [
            (
                row["topic"],
                row["group"],
                f"{row['position']:,}",
                f"{row['records']:,}",
                format_bytes(row["bytes"]),
                f"{row['seconds']:,.0f} s",
            )
            for row in fields["groups"]
        ]
        parts += [Text(), build_table(("topic", "group", ">position", ">lag", ">bytes", ">oldest"), rows)]
    if fields["queues"]:
        rows_of_queues = [
            (row["queue"], *(f"{row[name]:,}" for name in ("ready", "in_flight", "dead_lettered")))
            for row in fields["queues"]
        ]
        parts += [Text(), build_table(("queue", ">ready", ">in flight", ">dead letters"), rows_of_queues)]
    return Group(*parts)


def add(commands: Commands) -> None:
    """Add `top` to the command line."""
    parser = add_command(
        commands,
        "top",
        top,
        DATABASE,
        summary="what a database does now: rates, lag, queues, fsyncs, disk",
        description="Show the busiest topics with their rates, the lag of their groups, their queues, and of a server "
        "also\n"
        "fsyncs, again every --interval, until Ctrl-C. It only reads, beside the writer of a directory. With --json\n"
        "one object for each interval. --once: one interval, for scripts.",
        examples="tidelog top data\ntidelog top http://127.0.0.1:4000 --once --json",
    )
    parser.add_argument("--once", action="store_true", help="end after the first interval")
    parser.add_argument("--interval", type=parse_seconds, default=1.0, metavar="S", help="seconds between samples (1)")
    parser.add_argument("--limit", type=parse_positive, default=20, metavar="N", help="this many topics (20)")
    parser.add_argument("--prefix", default="", metavar="P", help="only topics whose name begins so")
