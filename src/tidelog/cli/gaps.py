"""[shell] `tidelog gaps`: what was removed of topics, and why, from the ledger. Works beside a writer."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from tidelog.cli.command import command
from tidelog.cli.data import reading
from tidelog.cli.options import moment_us, positive
from tidelog.cli.render import Screen, bytes_, moment, several
from tidelog.engine import LedgerRow

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_PAGE = 10_000


def add(commands: Commands) -> None:
    """Add `gaps` to the command line."""
    made = command(
        commands,
        "gaps",
        gaps,
        short="what was removed, when, by whom and why",
        about="Print the ledger of gaps, oldest first: one row for everything that was removed of a topic, also of\n"
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
    made.add_argument("--since", type=moment_us, metavar="T", help="only what went at this moment or later")
    made.add_argument("--limit", type=positive, metavar="N", help="this many rows at most")


def gaps(args: Namespace, screen: Screen) -> int:
    """Print rows of the ledger; with --json one object a line."""
    since_ms = None if args.since is None else args.since // 1000
    rows: list[LedgerRow] = []
    with reading(args.dir, screen) as log:
        behind, left = 0, args.limit or 1 << 62
        while left:
            found = log.gaps(args.topic, since_ms, min(left, _PAGE), behind=behind)
            rows += found
            left -= len(found)
            if len(found) < _PAGE or not found[-1].seq:
                break
            behind = found[-1].seq
    for row in rows if screen.json else ():
        screen.answer({**row._asdict(), "ts": moment(row.ts_ms * 1000)})
    if screen.json:
        return 0
    if rows:
        titles = ("when (UTC)", "topic", "cause", ">first", ">last", ">records", ">bytes", "by", "about")
        screen.table(titles, [_line(row) for row in rows])
    screen.answer({}, f"{several(len(rows), 'row')}, {several(sum(row.records for row in rows), 'record')} removed")
    return 0


def _line(row: LedgerRow) -> list[str]:
    when = (moment(row.ts_ms * 1000) or "-")[:19].replace("T", " ")
    sizes = [str(row.first), str(row.last), f"{row.records:,}", bytes_(row.bytes)]
    return [when, row.topic or "-", row.cause, *sizes, row.actor or "-", row.about]
