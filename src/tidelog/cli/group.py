"""`tidelog group …`: groups of consumers of a topic on disk. ls and show work beside a writer, the others hold the
directory for themselves; what a move would do is said beforehand by --dry-run."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any

from tidelog.cli.command import Run, command, group
from tidelog.cli.data import reading, writing
from tidelog.cli.options import count, moment_us, size
from tidelog.cli.render import Screen, bytes_, moment, several
from tidelog.cli.topic_look import gap_line
from tidelog.engine import Engine, Group, GroupState, Preview, timestamp_ms
from tidelog.errors import GroupNotFound

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_ABOUT = """\
A group of consumers is a named place in a topic, kept on disk: the last seq that all of them together
have dealt with. It is made by its first commit. A group may hold up retention for what it has not
read yet, up to a number of bytes.
"""

_START = """\
start here:
  $ tidelog group commit data orders billing 1000
  $ tidelog group ls data orders
  $ tidelog group reset data orders billing earliest --dry-run
"""


def add(commands: Commands) -> None:
    """Add the `group` group to the command line."""
    verbs = group(commands, "group", short="groups of consumers: where they stand", about=_ABOUT, start=_START)
    made = command(
        verbs,
        "ls",
        ls,
        short="list the groups of a topic",
        about="List the groups of a topic: where each stands, what it has still to read and how old that is.",
        examples="tidelog group ls data orders\ntidelog group ls data orders --json",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument("topic", metavar="TOPIC")
    _of_group(
        verbs,
        "show",
        show,
        short="show one group",
        about="Show where a group stands, what it has still to read, and its hold.",
        examples="tidelog group show data orders billing",
    )
    made = _of_group(
        verbs,
        "commit",
        commit,
        short="say that everything up to a seq was dealt with",
        about="Move a group forward; it is made where there is none. A seq beyond the head and one before the last\n"
        "are refused.",
        examples="tidelog group commit data orders billing 1000\n"
        "tidelog group commit data orders billing 2000 --expect 1000",
    )
    made.add_argument("seq", metavar="SEQ", type=count)
    made.add_argument("--expect", type=count, metavar="N", help="only if it is at this seq now")
    _add_dry_run(made)
    made = _of_group(
        verbs,
        "reset",
        reset,
        short="let a group go anywhere",
        about="Let a group go to a seq (which counts as dealt with), to a moment, before the earliest record, or\n"
        "behind the latest.",
        examples="tidelog group reset data orders billing earliest --dry-run\n"
        "tidelog group reset data orders billing 500\n"
        "tidelog group reset data orders billing 2026-01-31T12:00:00Z",
    )
    made.add_argument("to", metavar="TO", type=place, help="earliest, latest, a seq, or a moment as ISO 8601")
    _add_dry_run(made)
    made = _of_group(
        verbs,
        "hold",
        hold,
        short="let retention spare what a group has not read",
        about="Let caps and age spare what a group has not read yet, as long as no more than so many live bytes are\n"
        "kept for it. Past that the hold is broken, and they go on. 0: no hold.",
        examples="tidelog group hold data orders billing 64m",
    )
    made.add_argument("bytes", metavar="BYTES", type=size)
    _add_dry_run(made)
    made = _of_group(
        verbs,
        "drop",
        drop,
        short="forget a group",
        about="Forget a group and its hold. Records stay.",
        examples="tidelog group drop data orders billing",
    )
    _add_dry_run(made)


def _of_group(verbs: Commands, name: str, run: Run, *, short: str, about: str, examples: str) -> ArgumentParser:
    made = command(verbs, name, run, short=short, about=about, examples=examples)
    for what in ("dir", "topic", "group"):
        made.add_argument(what, metavar=what.upper())
    return made


def _add_dry_run(made: ArgumentParser) -> None:
    made.add_argument("--dry-run", action="store_true", help="only say what would be done; reads only")


def place(text: str) -> Any:
    """Where a group goes: a word, a seq or a moment."""
    if text in ("earliest", "latest"):
        return text
    if re.fullmatch(r"-?[0-9]+", text):
        return count(text)
    try:
        return timestamp_ms(moment_us(text) // 1000)
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
        "last_commit": moment((state.last_commit_ms or 0) * 1000),
    }


def _behind(state: GroupState) -> str:
    lag = state.lag
    if not lag.records:
        return "nothing to read"
    return f"{several(lag.records, 'record')} ({bytes_(lag.bytes)}) to read, the first {lag.seconds:,.0f} s old"


def _hold(state: GroupState) -> str:
    if not state.hold_bytes:
        return "-"
    return bytes_(state.hold_bytes) + (" broken" if state.hold_broken else "")


def ls(args: Namespace, screen: Screen) -> int:
    """One line a group."""
    with reading(args.dir, screen) as log:
        states = [each.state() for each in log.topic(args.topic, create=False).groups()]
    screen.answer({"topic": args.topic, "groups": [state_fields(state) for state in states]})
    if screen.json:
        return 0
    if states:
        rows = [(state.group, str(state.position), _behind(state), _hold(state)) for state in states]
        screen.table(("group", ">position", "behind", "hold"), rows)
    screen.answer({}, several(len(states), "group"))
    return 0


def show(args: Namespace, screen: Screen) -> int:
    """Everything about one group."""
    with reading(args.dir, screen) as log:
        state = _known(log, args).state()
    _answer(args, screen, state)
    return 0


def _known(log: Engine, args: Namespace) -> Group:
    found = log.topic(args.topic, create=False).group(args.group)
    if not found.exists:
        raise GroupNotFound(args.topic, args.group)
    return found


def _answer(args: Namespace, screen: Screen, state: GroupState, **more: Any) -> None:
    held = f"; hold {_hold(state)}" if state.hold_bytes else ""
    line = f"{state.group} of {args.topic} is at {state.position}: {_behind(state)}{held}"
    screen.answer({"topic": args.topic, **state_fields(state), **more}, line)


# ── moving ────────────────────────────────────────────────────────────────────────────────────────


def commit(args: Namespace, screen: Screen) -> int:
    """Move a group forward."""
    if args.dry_run:
        with reading(args.dir, screen) as log:
            look = log.topic(args.topic, create=False).group(args.group).would_commit(args.seq, expect=args.expect)
        _told(args, screen, look)
        return 0
    with writing(args.dir, screen) as log:
        moved = log.topic(args.topic, create=False).group(args.group)
        moved.commit(args.seq, expect=args.expect)
        state = moved.state()
    _answer(args, screen, state, dry_run=False)
    return 0


def reset(args: Namespace, screen: Screen) -> int:
    """Move a group anywhere, and say what that means."""
    if args.dry_run:
        with reading(args.dir, screen) as log:
            _told(args, screen, _known(log, args).preview(args.to))
        return 0
    with writing(args.dir, screen) as log:
        moved = _known(log, args)
        look = moved.preview(args.to)
        moved.reset(look.to)
    _told(args, screen, look)
    return 0


def _told(args: Namespace, screen: Screen, look: Preview) -> None:
    verb = "would go" if args.dry_run else "goes"
    what = "passed over" if look.to > look.from_ else "read again"
    lines = [f"{args.group} of {args.topic} {verb} from {look.from_} to {look.to}"]
    lines[0] += f": {several(look.records, 'record')} ({bytes_(look.bytes)}) {what}" if look.records else ""
    if look.gap is not None:
        lines.append(gap_line(look.gap, args.topic))
    gap = None if look.gap is None else look.gap._asdict()
    fields = {"from": look.from_, "to": look.to, "records": look.records, "bytes": look.bytes, "gap": gap}
    screen.answer({"topic": args.topic, "group": args.group, "dry_run": args.dry_run, **fields}, *lines)


def hold(args: Namespace, screen: Screen) -> int:
    """Set how much may be kept for a group."""
    if args.dry_run:
        with reading(args.dir, screen) as log:
            state = log.topic(args.topic, create=False).group(args.group).state()
        _answer(args, screen, state._replace(hold_bytes=args.bytes), dry_run=True)
        return 0
    with writing(args.dir, screen) as log:
        held = log.topic(args.topic, create=False).group(args.group)
        held.hold(args.bytes)
        state = held.state()
    _answer(args, screen, state, dry_run=False)
    return 0


def drop(args: Namespace, screen: Screen) -> int:
    """Forget a group."""
    with reading(args.dir, screen) if args.dry_run else writing(args.dir, screen) as log:
        gone = _known(log, args)
        position = gone.position
        if not args.dry_run:
            gone.delete()
    verb = "would drop" if args.dry_run else "dropped"
    fields = {"topic": args.topic, "group": args.group, "position": position, "dry_run": args.dry_run}
    screen.answer(fields, f"{verb} {args.group} of {args.topic}, which was at {position}")
    return 0
