"""`tidelog gaps`: the gap log of a directory: which records were removed, and why. Works beside a writer."""

from __future__ import annotations

from argparse import Namespace

from tidelog.cli.command import (
    Commands,
    add_command,
    parse_moment_us,
    parse_positive,
)
from tidelog.cli.render import Screen, format_bytes, format_time, plural
from tidelog.cli.target import open_for_reading
from tidelog.engine import GapEntry

_PAGE_ROWS = 10_000


def add(commands: Commands) -> None:
    """Add `gaps` to the command line."""
    parser = add_command(
        commands,
        "gaps",
        gaps,
        "DIR",
        summary="what was removed, when, by whom and why",
        description="Print the gap log, oldest first: one entry for everything that was removed of a topic,\n"
        "also of one that was dropped since.\n"
        "  cap, ttl        lost to a cap or to age; readers get a gap\n"
        "  hold_exceeded   the same, past the hold of a consumer group\n"
        "  delete, drop    removed by a user\n"
        "  source_trim     lost at the source of a router\n"
        "  lost            damage that an operator accepted",
        examples="tidelog gaps data\ntidelog gaps data orders --since 2026-01-31T12:00:00Z --json",
    )
    parser.add_argument("topic", metavar="TOPIC", nargs="?")
    parser.add_argument("--since", type=parse_moment_us, metavar="T", help="only removals at this time or later")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="this many rows at most")


def gaps(args: Namespace, screen: Screen) -> int:
    """Print rows of the gap log; with --json one object a line."""
    since_ms = None if args.since is None else args.since // 1000
    rows: list[GapEntry] = []
    with open_for_reading(args.dir, screen) as log:
        after_seq, left = 0, args.limit or 1 << 62
        while left:
            page = log.gaps(args.topic, since_ms, min(left, _PAGE_ROWS), after_seq=after_seq)
            rows += page
            left -= len(page)
            if len(page) < _PAGE_ROWS or not page[-1].seq:
                break
            after_seq = page[-1].seq
    for row in rows if screen.json else ():
        screen.print_result({**row._asdict(), "ts": format_time(row.ts_ms * 1000)})
    if screen.json:
        return 0
    if rows:
        titles = ("when (UTC)", "topic", "cause", ">first", ">last", ">records", ">bytes", "by", "about")
        screen.print_table(titles, [_table_row(row) for row in rows])
    screen.print_result({}, f"{plural(len(rows), 'row')}, {plural(sum(row.records for row in rows), 'record')} removed")
    return 0


def _table_row(row: GapEntry) -> list[str]:
    when = (format_time(row.ts_ms * 1000) or "-")[:19].replace("T", " ")
    sizes = [str(row.first), str(row.last), f"{row.records:,}", format_bytes(row.bytes)]
    return [when, row.topic or "-", row.cause, *sizes, row.actor or "-", row.about]
