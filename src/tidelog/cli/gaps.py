"""[shell] `tidelog gaps`: what was removed of topics, and why, from the ledger. Works beside a writer."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from tidelog.cli.command import add_command, parse_moment_us, parse_positive
from tidelog.cli.render import Screen, format_bytes, format_time, plural
from tidelog.cli.target import open_for_reading
from tidelog.engine import GapEntry

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_PAGE_ROWS = 10_000


def add(commands: Commands) -> None:
    """Add `gaps` to the command line."""
    made = add_command(
        commands,
        "gaps",
        gaps,
        summary="what was removed, when, by whom and why",
        description="Print the ledger of gaps, oldest first: one row for everything that was removed of a topic, also "
        "of\n"
        "one that was dropped since.\n"
        "  cap, ttl        lost to a cap or to age; readers are told\n"
        "  hold_exceeded   the same, past what a group of consumers held\n"
        "  delete, drop    removed by somebody\n"
        "  source_trim     lost at the source of a router\n"
        "  lost            damage that somebody accepted",
        examples="tidelog gaps data\ntidelog gaps data orders --since 2026-01-31T12:00:00Z --json",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument("topic", metavar="TOPIC", nargs="?")
    made.add_argument("--since", type=parse_moment_us, metavar="T", help="only what went at this moment or later")
    made.add_argument("--limit", type=parse_positive, metavar="N", help="this many rows at most")


def gaps(args: Namespace, screen: Screen) -> int:
    """Print rows of the ledger; with --json one object a line."""
    since_ms = None if args.since is None else args.since // 1000
    rows: list[GapEntry] = []
    with open_for_reading(args.dir, screen) as log:
        behind, left = 0, args.limit or 1 << 62
        while left:
            found = log.gaps(args.topic, since_ms, min(left, _PAGE_ROWS), after_seq=behind)
            rows += found
            left -= len(found)
            if len(found) < _PAGE_ROWS or not found[-1].seq:
                break
            behind = found[-1].seq
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
