"""`tidelog group …`: consumer groups of a topic.

`ls` and `show` work beside a writer, the others lock a directory; `--dry-run` prints the effect of a move before.

`tidelog gaps`: the gap log of a database: which records were removed, and why. Works beside a writer.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from typing import Any

from tidelog import protocols
from tidelog.cli.command import (
    DATABASE,
    Commands,
    Positional,
    add_command,
    add_dry_run,
    add_group,
    parse_count,
    parse_moment_us,
    parse_positive,
    parse_size,
)
from tidelog.cli.render import Screen, format_bytes, format_time, plural
from tidelog.cli.target import open_target
from tidelog.cli.topic import gap_line
from tidelog.engine import GapEntry, GroupState, Preview, timestamp_ms
from tidelog.errors import GroupNotFound

_DESCRIPTION = """\
A group of consumers is a named place in a topic, kept on disk: the last seq that all of them together
have dealt with. It is made by its first commit. A group may hold up retention for what it has not
read yet, up to a number of bytes.
"""

_FIRST_STEPS = """\
start here:
  $ tidelog group commit data orders billing 1000
  $ tidelog group ls data orders
  $ tidelog group reset data orders billing earliest --dry-run
"""


def add(commands: Commands) -> None:
    """Add the `group` group to the command line."""
    verbs = add_group(
        commands,
        "group",
        summary="groups of consumers: where they stand",
        description=_DESCRIPTION,
        first_steps=_FIRST_STEPS,
    )
    parser = add_command(
        verbs,
        "ls",
        ls,
        DATABASE,
        "TOPIC",
        summary="list the groups of a topic",
        description="List the groups of a topic: where each stands, what it has still to read and how old that is.",
        examples="tidelog group ls data orders\ntidelog group ls data orders --json",
    )
    add_command(
        verbs,
        "show",
        show,
        DATABASE,
        "TOPIC",
        "GROUP",
        summary="show one group",
        description="Show where a group stands, what it has still to read, and its hold.",
        examples="tidelog group show data orders billing",
    )
    parser = add_command(
        verbs,
        "commit",
        commit,
        DATABASE,
        "TOPIC",
        "GROUP",
        Positional("SEQ", parse_count),
        summary="say that everything up to a seq was dealt with",
        description="Move a group forward; it is made where there is none. A seq beyond the head and one before the "
        "last\n"
        "are refused.",
        examples="tidelog group commit data orders billing 1000\n"
        "tidelog group commit data orders billing 2000 --expect 1000",
    )
    parser.add_argument("--expect", type=parse_count, metavar="N", help="only if it is at this seq now")
    add_dry_run(parser)
    parser = add_command(
        verbs,
        "reset",
        reset,
        DATABASE,
        "TOPIC",
        "GROUP",
        Positional("TO", parse_position),
        summary="move a group to any position",
        description="Move a group to a seq (which counts as processed), to a time (ISO 8601), before the earliest\n"
        "record, or after the latest.",
        examples="tidelog group reset data orders billing earliest --dry-run\n"
        "tidelog group reset data orders billing 500\n"
        "tidelog group reset data orders billing 2026-01-31T12:00:00Z",
    )
    add_dry_run(parser)
    parser = add_command(
        verbs,
        "hold",
        hold,
        DATABASE,
        "TOPIC",
        "GROUP",
        Positional("BYTES", parse_size),
        summary="let retention spare what a group has not read",
        description="Let caps and age spare what a group has not read yet, as long as no more than so many live bytes "
        "are\n"
        "kept for it. Past that the hold is broken, and they go on. 0: no hold.",
        examples="tidelog group hold data orders billing 64m",
    )
    add_dry_run(parser)
    parser = add_command(
        verbs,
        "drop",
        drop,
        DATABASE,
        "TOPIC",
        "GROUP",
        summary="forget a group",
        description="Forget a group and its hold. Records stay.",
        examples="tidelog group drop data orders billing",
    )
    add_dry_run(parser)


def parse_position(text: str) -> Any:
    """Where a group goes: a word, a seq or a moment."""
    if text in ("earliest", "latest"):
        return text
    if re.fullmatch(r"-?[0-9]+", text):
        return parse_count(text)
    try:
        return timestamp_ms(parse_moment_us(text) // 1000)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{text!r} is no place in a topic; write earliest, latest, a seq, or a moment as 2026-01-31T12:00:00Z"
        ) from None


# ── looking ───────────────────────────────────────────────────────────────────────────────────────


def state_fields(state: GroupState) -> dict[str, Any]:
    return {
        "group": state.group,
        "position": state.position,
        "head_seq": state.head_seq,
        "lag": state.lag._asdict(),
        "hold_bytes": state.hold_bytes,
        "hold_broken": state.hold_broken,
        "last_commit": format_time((state.last_commit_ms or 0) * 1000),
    }


def _format_lag(state: GroupState) -> str:
    lag = state.lag
    if not lag.records:
        return "nothing to read"
    return f"{plural(lag.records, 'record')} ({format_bytes(lag.bytes)}) to read, the first {lag.seconds:,.0f} s old"


def _format_hold(state: GroupState) -> str:
    if not state.hold_bytes:
        return "-"
    return format_bytes(state.hold_bytes) + (" broken" if state.hold_broken else "")


def ls(args: Namespace, screen: Screen) -> int:
    """One line a group."""
    with open_target(args, screen, write=False) as log:
        states = [each.state() for each in log.topic(args.topic, create=False).groups()]
    screen.print_result(
        {"topic": args.topic, "groups": [state_fields(state) for state in states]},
        titles=("group", ">position", "lag", "hold"),
        rows=[(state.group, str(state.position), _format_lag(state), _format_hold(state)) for state in states],
        after=[plural(len(states), "group")],
    )
    return 0


def show(args: Namespace, screen: Screen) -> int:
    """Everything about one group."""
    with open_target(args, screen, write=False) as log:
        state = _existing_group(log, args).state()
    _print_state(args, screen, state)
    return 0


def _existing_group(log: protocols.Database, args: Namespace) -> protocols.Group:
    found = log.topic(args.topic, create=False).group(args.group)
    if not found.exists:
        raise GroupNotFound(args.topic, args.group)
    return found


def _print_state(args: Namespace, screen: Screen, state: GroupState, **more: Any) -> None:
    held = f"; hold {_format_hold(state)}" if state.hold_bytes else ""
    line = f"{state.group} of {args.topic} is at {state.position}: {_format_lag(state)}{held}"
    screen.print_result({"topic": args.topic, **state_fields(state), **more}, line)


# ── moving ────────────────────────────────────────────────────────────────────────────────────────


def commit(args: Namespace, screen: Screen) -> int:
    """Move a group forward."""
    if args.dry_run:
        with open_target(args, screen, write=False) as log:
            look = log.topic(args.topic, create=False).group(args.group).would_commit(args.seq, expect=args.expect)
        _print_preview(args, screen, look)
        return 0
    with open_target(args, screen, write=True) as log:
        moved = log.topic(args.topic, create=False).group(args.group)
        moved.commit(args.seq, expect=args.expect)
        state = moved.state()
    _print_state(args, screen, state, dry_run=False)
    return 0


def reset(args: Namespace, screen: Screen) -> int:
    """Move a group anywhere, and say what that means."""
    if args.dry_run:
        with open_target(args, screen, write=False) as log:
            _print_preview(args, screen, _existing_group(log, args).preview(args.to))
        return 0
    with open_target(args, screen, write=True) as log:
        moved = _existing_group(log, args)
        look = moved.preview(args.to)
        moved.reset(look.to)
    _print_preview(args, screen, look)
    return 0


def _print_preview(args: Namespace, screen: Screen, preview: Preview) -> None:
    verb = "would go" if args.dry_run else "goes"
    what = "passed over" if preview.to > preview.from_ else "read again"
    lines = [f"{args.group} of {args.topic} {verb} from {preview.from_} to {preview.to}"]
    lines[0] += (
        f": {plural(preview.records, 'record')} ({format_bytes(preview.bytes)}) {what}" if preview.records else ""
    )
    if preview.gap is not None:
        lines.append(gap_line(preview.gap, args.topic))
    gap = None if preview.gap is None else preview.gap._asdict()
    fields = {"from": preview.from_, "to": preview.to, "records": preview.records, "bytes": preview.bytes, "gap": gap}
    screen.print_result({"topic": args.topic, "group": args.group, "dry_run": args.dry_run, **fields}, *lines)


def hold(args: Namespace, screen: Screen) -> int:
    """Set how much may be kept for a group."""
    if args.dry_run:
        with open_target(args, screen, write=False) as log:
            state = log.topic(args.topic, create=False).group(args.group).state()
        _print_state(args, screen, state._replace(hold_bytes=args.bytes), dry_run=True)
        return 0
    with open_target(args, screen, write=True) as log:
        held = log.topic(args.topic, create=False).group(args.group)
        held.hold(args.bytes)
        state = held.state()
    _print_state(args, screen, state, dry_run=False)
    return 0


def drop(args: Namespace, screen: Screen) -> int:
    """Forget a group."""
    with open_target(args, screen, write=not args.dry_run) as log:
        gone = _existing_group(log, args)
        position = gone.position
        if not args.dry_run:
            gone.delete()
    verb = "would drop" if args.dry_run else "dropped"
    fields = {"topic": args.topic, "group": args.group, "position": position, "dry_run": args.dry_run}
    screen.print_result(fields, f"{verb} {args.group} of {args.topic}, which was at {position}")
    return 0


_PAGE_ROWS = 10_000


def add_gaps(commands: Commands) -> None:
    """Add `gaps` to the command line."""
    parser = add_command(
        commands,
        "gaps",
        gaps,
        DATABASE,
        "[TOPIC]",
        summary="what was removed, when, by whom and why",
        description="Print the gap log, oldest first: one entry for everything that was removed of a topic,\n"
        "also of one that was dropped since.\n"
        "  cap, ttl        lost to a cap or to age; readers get a gap\n"
        "  hold_exceeded   the same, past the hold of a consumer group\n"
        "  delete, drop    removed by a user\n"
        "  compaction      replaced by a newer record of the same key, or a tombstone whose delay has passed\n"
        "  source_trim     lost at the source of a router\n"
        "  lost            damage that an operator accepted",
        examples="tidelog gaps data\ntidelog gaps data orders --since 2026-01-31T12:00:00Z --json",
    )
    parser.add_argument("--since", type=parse_moment_us, metavar="T", help="only removals at this time or later")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="this many rows at most")


def gaps(args: Namespace, screen: Screen) -> int:
    """Print rows of the gap log; with --json one object a line."""
    since_ms = None if args.since is None else args.since // 1000
    rows: list[GapEntry] = []
    with open_target(args, screen, write=False) as log:
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
