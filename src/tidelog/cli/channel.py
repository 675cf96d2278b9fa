"""`tidelog channel …`: commands on the channels of a directory or of a server.

    tidelog channel … DIR CHANNEL               this process is the writer, or a reader beside one
    tidelog channel … CHANNEL --server URL      the server is the writer, and the command a client

Commands that read open a directory beside a writer; commands that write lock it, and print their result after it is
closed. Without a user a command acts as the operator: the owner of the files, or a key with the scope admin; a read
uses the key's own user where the key has no such scope.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar, cast

from tidelog import protocols
from tidelog.channels import (
    OPERATOR,
    ChannelEvent,
    ChannelInfo,
    HistoryPage,
    Message,
    Operator,
    Presence,
)
from tidelog.channels.narwhal_data import export_narwhal, read_channels, write_channels
from tidelog.channels.rules import ACL_KINDS, ChannelLimits, ChannelSettings
from tidelog.cli import target
from tidelog.cli.command import (
    DATABASE,
    CommandFunction,
    CommandParser,
    Commands,
    Positional,
    add_command,
    add_group,
    add_line_options,
    parse_moment_us,
    parse_positive,
    parse_seconds,
    parse_setting,
)
from tidelog.cli.log import acked_fields, describe_written, read_lines, stdin_source
from tidelog.cli.render import Screen, bytes_field, plural
from tidelog.client import KEY_USER, RemoteDatabase
from tidelog.client.database import list_channels
from tidelog.database import Database
from tidelog.errors import BadInput, ChannelNotFound, Error, FifoEmpty, Forbidden, NotPersistent, WrongType

T = TypeVar("T")


def _user(name: str | None) -> str | Operator:
    return OPERATOR if name is None else name


def _read(database: protocols.Database, name: str, read: Callable[[protocols.Channel], T]) -> T:
    """Read a channel as the operator, or as the user of the key where the key has no scope admin."""
    try:
        return read(database.channel(name))
    except Forbidden:
        if isinstance(database, Database):
            raise
        return read(database.channel(name, user=KEY_USER))


def _info_fields(info: ChannelInfo) -> dict[str, Any]:
    config = {name: getattr(info.config, name) for name in info.config.__struct_fields__}
    return {"channel": info.channel, "owner": info.owner, **config, "members": list(info.members)}


def _rows(database: protocols.Database) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row of each channel, and why others cannot be read."""
    user: Any
    if isinstance(database, RemoteDatabase):
        listed, unreadable, user = list_channels(database)
    else:
        assert isinstance(database, Database), "a directory"
        states = [database.channel(name).state() for name in database.channels.channel_names()]
        listed = [
            {"channel": it.channel, "type": it.config.type, "owner": it.owner, "members": len(it.members)}
            for it in states
        ]
        unreadable, user = dict(database.channels.report.skipped), OPERATOR
    names = ("channel", "type", "owner", "members")
    return [
        {name: row[name] for name in names} | _bounds_fields(database.channel(row["channel"], user=user))
        for row in listed
    ], unreadable


def _bounds_fields(channel: protocols.Channel) -> dict[str, Any]:
    """The first and the last seq, or the reason why they cannot be read."""
    try:
        first, last = _bounds(channel)
    except Error as error:
        return {"first_seq": None, "last_seq": None, "trouble": str(error)}
    return {"first_seq": first, "last_seq": last, "trouble": None}


def _bounds(channel: protocols.Channel) -> tuple[int | None, int | None]:
    """The first and the last seq; None for a queue, which has no history, and for members who may not read."""
    with suppress(WrongType, NotPersistent, Forbidden):
        return channel.bounds()
    return None, None


_PAYLOAD_BYTES_MAX = ChannelLimits().payload_bytes_max


# ── look ──────────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """List channels."""
    with target.open_target(args, screen, write=False) as database:
        channels, skipped = _rows(database)
    troubles = [*skipped.values(), *(row["trouble"] for row in channels if row["trouble"])]
    if screen.json:
        screen.print_result({"channels": channels, "unreadable": skipped})
    else:
        titles = ("channel", "type", "owner", ">members", ">first", ">last")
        keys = ("channel", "type", "owner", "members", "first_seq", "last_seq")
        screen.print_table(titles, [["–" if row[key] is None else str(row[key]) for key in keys] for row in channels])
        for trouble in troubles:
            screen.print_error(f"damage: {trouble}")
    return 1 if troubles else 0


def show(args: Namespace, screen: Screen) -> int:
    """Show one channel."""
    name = args.channel
    with target.open_target(args, screen, write=False) as database:
        fields = _read(database, name, _describe)
    plain = {name: value for name, value in fields.items() if name not in ("members", "acl", "holes")}
    acl = fields["acl"] or {}
    lines = [f"{name}: {'–' if value is None else value}" for name, value in plain.items()]
    lines += [f"lost to a power cut before their sync: seqs {first} to {last}" for first, last in fields["holes"]]
    lines += [f"may {kind}: {', '.join(acl[kind]) or 'everybody'}" for kind in ACL_KINDS if kind in acl]
    screen.print_result(fields, *lines, f"members: {', '.join(fields['members'])}")
    return 0


def _describe(channel: protocols.Channel) -> dict[str, Any]:
    info = channel.state()
    first, last = _bounds(channel)
    try:
        acl: dict[str, list[str]] | None = {kind: list(channel.acl(kind)) for kind in ACL_KINDS}
    except Forbidden:
        acl = None  # only the owner may read it
    return _info_fields(info) | {"acl": acl, "first_seq": first, "last_seq": last, "holes": channel.holes()}


def history(args: Namespace, screen: Screen) -> int:
    """Print messages."""
    name, left = args.channel, args.limit
    first: int | None = args.first
    since_ms = None if args.since is None else args.since // 1000
    until_ms = None if args.until is None else args.until // 1000
    with target.open_target(args, screen, write=False) as database:
        if args.newest is not None:  # may be more than one page
            oldest, newest = _read(database, name, lambda channel: channel.bounds())
            first = max(newest - args.newest + 1, oldest, 1)
        while left is None or left > 0:
            bounds = (first, args.last, since_ms, until_ms, left)
            page = _read(database, name, partial(_read_page, bounds))
            for message in page.messages:
                _print_message(message, screen)
            if not page.messages or page.next_seq > page.last_seq:
                break
            left = None if left is None else left - len(page.messages)
            first, since_ms = page.next_seq, None
    return 0


def _read_page(bounds: tuple[int | None, ...], channel: protocols.Channel) -> HistoryPage:
    first, last, since_ms, until_ms, limit = bounds
    return channel.history(first, last=last, since_ms=since_ms, until_ms=until_ms, limit=limit)


def _print_message(message: Message, screen: Screen) -> None:
    if not screen.json:
        screen.write_data(message.payload + b"\n")
        return
    fields: dict[str, Any] = {"seq": message.seq, "ts_ms": message.ts_ms, "sender": message.sender}
    fields |= bytes_field("payload", message.payload)
    screen.write_data(json.dumps(fields).encode() + b"\n")


# ── change ────────────────────────────────────────────────────────────────────────────────────────


def create(args: Namespace, screen: Screen) -> int:
    """Create a channel that persists."""
    name = args.channel
    with target.open_target(args, screen, write=True, create=True) as database:
        channel = database.channel(name, user=args.user)
        channel.join(**cast(ChannelSettings, {"persist": True, **dict(args.settings)}))
        fields = _info_fields(channel.state())
    action = "joined" if len(fields["members"]) > 1 else "created"
    screen.print_result(fields, f"{action} {name}, a {fields['type']} channel, owned by {fields['owner']}")
    return 0


def join(args: Namespace, screen: Screen) -> int:
    """Make a user a member."""
    name = args.channel
    with target.open_target(args, screen, write=True) as database:
        with suppress(Forbidden):  # users who may not read a channel learn that it exists
            _read(database, name, lambda channel: channel.state())  # joining must not create a channel
        channel = database.channel(name, user=args.by or args.user)
        if args.by is None:
            channel.join()
        else:
            channel.invite(args.user)
        fields = _info_fields(channel.state())
    screen.print_result(fields, f"{args.user} is in {name}, with {plural(len(fields['members']), 'member')} in all")
    return 0


def leave(args: Namespace, screen: Screen) -> int:
    """End a membership."""
    name = args.channel
    with target.open_target(args, screen, write=True) as database:
        channel = database.channel(name, user=args.by or args.user)
        owner = channel.leave() if args.by is None else channel.kick(args.user)
    line = f"{args.user} left {name}" + (f", which {owner} owns" if owner else ", which ended with that")
    screen.print_result({"channel": name, "user": args.user, "ended": owner is None, "owner": owner}, line)
    return 0


def publish(args: Namespace, screen: Screen) -> int:
    """Publish a message a line of standard input."""
    name = args.channel
    with target.open_target(args, screen, write=True) as database:
        next_seq = 1 if args.server else database.channel(name).bounds()[1] + 1
        acked = screen.acked = range(next_seq, next_seq)
        channel = database.channel(name, user=args.user)
        for batch in _batches(args):
            ack = channel.publish_many(batch)
            acked = screen.acked = range(acked.start if acked else ack.seq - ack.messages + 1, ack.seq + 1)
    screen.print_result({"channel": name, **acked_fields(acked)}, describe_written(acked))
    return 0


def configure(args: Namespace, screen: Screen) -> int:
    """Show the settings of a channel, or change some of them."""
    changes = dict(args.settings)
    with target.open_target(args, screen, write=bool(changes)) as database:
        channel = database.channel(args.channel, user=_user(args.user))
        before = _info_fields(channel.state())
        if changes:
            channel.configure(**changes)
        fields = _info_fields(channel.state())
    changed = sorted(name for name in fields if fields[name] != before[name])
    lines = [f"{name}: {before[name]} -> {fields[name]}" for name in changed]
    if not changes:
        hidden = ("channel", "owner", "members")
        lines = [f"{name}: {'–' if value is None else value}" for name, value in fields.items() if name not in hidden]
    screen.print_result({**fields, "changed": changed}, *(lines or [f"{args.channel} has these settings already"]))
    return 0


def push(args: Namespace, screen: Screen) -> int:
    """Push a message a line of standard input to a fifo channel."""
    acked = screen.acked = range(0)
    with target.open_target(args, screen, write=True) as database:
        channel = database.channel(args.channel, user=args.user)
        for batch in _batches(args):
            for payload in batch:
                seq = channel.push(payload).seq
                acked = screen.acked = range(acked.start if acked else seq, seq + 1)
    line = describe_written(acked) if acked else "no message: standard input was empty"
    screen.print_result({"channel": args.channel, **acked_fields(acked)}, line)
    return 0


def pop(args: Namespace, screen: Screen) -> int:
    """Remove the oldest messages of a fifo channel and print them."""
    count = 0
    with target.open_target(args, screen, write=True) as database:
        channel = database.channel(args.channel, user=args.user)
        while count < args.max:
            try:
                message = channel.pop()
            except FifoEmpty:
                break
            _print_message(message, screen)
            screen.flush()  # what was removed has been printed, also where the next pop fails
            count += 1
    screen.print_note(plural(count, "message"))
    return 0


def clear(args: Namespace, screen: Screen) -> int:
    """Drop the waiting messages of a fifo channel."""
    with target.open_target(args, screen, write=True) as database:
        count = database.channel(args.channel, user=_user(args.user)).clear()
    screen.print_result({"channel": args.channel, "cleared": count}, f"{plural(count, 'message')} dropped")
    return 0


def listen(args: Namespace, screen: Screen) -> int:
    """Print messages and presence events of a server's channel as they happen."""
    if not args.server:
        raise BadInput(
            f"events are sent by the process that has {args.dir} open; nothing was done, name its server, or read "
            "what was published with tidelog channel history"
        )
    left = args.limit
    with (
        target.open_target(args, screen, write=False) as database,
        closing(database.channel(args.channel, user=args.user or KEY_USER).subscribe()) as subscription,
        suppress(KeyboardInterrupt),
    ):
        while left is None or left > 0:
            events = subscription.wait(args.timeout)[:left]
            for event in events:
                _print_event(event, screen)
            screen.flush()
            if not events or subscription.closed:
                break
            left = None if left is None else left - len(events)
    return 0


def _print_event(event: ChannelEvent, screen: Screen) -> None:
    if isinstance(event, Message):
        _print_message(event, screen)
    elif screen.json:
        kind = event.kind if isinstance(event, Presence) else "ended"
        screen.write_data(json.dumps({"event": kind, **event._asdict()}).encode() + b"\n")
    elif isinstance(event, Presence):
        screen.flush()
        screen.print_note(f"{event.user}: {event.kind}")
    else:
        screen.flush()
        screen.print_note(f"the subscription ended: {event.reason}")


def _batches(args: Namespace) -> Iterator[list[bytes]]:
    yield from (batch for batch in read_lines(stdin_source(), args.batch, _PAYLOAD_BYTES_MAX) if batch)


def acl(args: Namespace, screen: Screen) -> int:
    """Show or change an access list."""
    name, changes = args.channel, bool(args.add or args.remove)
    with target.open_target(args, screen, write=changes) as database:
        channel = database.channel(name, user=_user(args.user))
        if changes:
            listed = channel.change_acl(args.kind, add=args.add or (), remove=args.remove or ())
        else:
            listed = channel.acl(args.kind)
    fields = {"channel": name, "kind": args.kind, "listed": list(listed)}
    screen.print_result(fields, *(listed or (f"everybody may {args.kind}",)))
    return 0


def delete(args: Namespace, screen: Screen) -> int:
    """End a channel."""
    name = args.channel
    with target.open_target(args, screen, write=True) as database:
        if not database.channel(name, user=_user(args.user)).delete():
            raise ChannelNotFound(name)
    screen.print_result({"channel": name, "deleted": True}, f"deleted {name}, with all its messages")
    return 0


# ── narwhal ───────────────────────────────────────────────────────────────────────────────────────


def import_(args: Namespace, screen: Screen) -> int:
    """Import the channels of a narwhal data directory."""
    # First read everything: a source that cannot be imported must not leave an empty DIR.
    sources = read_channels(args.source, domain=args.domain, limits=ChannelLimits(), accept_damage=args.accept_damage)
    with target.open_for_writing(args.dir, screen, create=True) as database:
        found = write_channels(database.channels, sources, skip_existing=args.skip_existing)
    new = [each for each in found if each.is_new]
    for each in found:
        for note in each.notes:
            screen.print_note(f"{each.channel}: {note}")
    rows = [(each.channel, _count(each.messages), _count(each.first_seq), _count(each.last_seq)) for each in new]
    messages = sum(each.messages for each in new)
    skipped = len(found) - len(new)
    screen.print_result(
        {"channels": [each._asdict() for each in found], "imported": len(new), "skipped": skipped},
        f"imported {plural(len(new), 'channel')} with {plural(messages, 'message')}"
        + (f"; {plural(skipped, 'channel')} existed" if skipped else ""),
        titles=("channel", ">messages", ">first", ">last"),
        rows=rows,
    )
    return 0


def export(args: Namespace, screen: Screen) -> int:
    """Write channels as a narwhal data directory."""
    with target.open_for_writing(args.dir, screen) as database:
        done = export_narwhal(database.channels, args.target, domain=args.domain, names=args.channels or None)
    for each in done:
        for note in each.notes:
            screen.print_note(f"{each.channel}: {note}")
    messages = sum(each.messages for each in done)
    screen.print_result(
        {"path": args.target, "channels": [each._asdict() for each in done]},
        f"{args.target}: {plural(len(done), 'channel')} with {plural(messages, 'message')}",
        titles=("channel", ">messages", "directory"),
        rows=[(each.channel, _count(each.messages), each.directory) for each in done],
    )
    return 0


def _count(number: int | None) -> str:
    return "–" if number is None else str(number)


_DESCRIPTION = """\
Members join a channel, the first one owns it, and all others receive what a member publishes. A channel
that persists keeps its members, its access lists and its last messages.

DATABASE is a directory that no server has open, or the URL of a server (with --key where it asks for one). There
a user other than the key's own, and the operator, need the scope admin.

names:
  !handler@domain   a channel; quote it, ! is special in the shell
  user@domain       a user

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ tidelog channel create data '!room@example.org' --user ann@example.org
  $ printf 'hello\\nworld\\n' | tidelog channel publish data '!room@example.org' --user ann@example.org
  $ tidelog channel history data '!room@example.org'
"""


def add(commands: Commands) -> None:
    """Add the `channel` group to the command line."""
    short = "channels: messages between members, with access lists and history"
    verbs = add_group(commands, "channel", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    _add_lists(verbs)
    _add_members(verbs)
    _add_messages(verbs)
    _add_queue(verbs)
    _add_administration(verbs)
    _add_narwhal(verbs)


def _add_channel_command(
    subcommands: Commands,
    name: str,
    run: CommandFunction,
    *positionals: Positional,
    summary: str,
    description: str,
    examples: str,
) -> CommandParser:
    """Add a command on one channel."""
    return add_command(
        subcommands,
        name,
        run,
        DATABASE,
        "CHANNEL",
        *positionals,
        summary=summary,
        description=description,
        examples=examples,
    )


def _add_lists(subcommands: Commands) -> None:
    add_command(
        subcommands,
        "ls",
        ls,
        DATABASE,
        summary="list channels",
        description="List the channels of a directory: type, owner, members, the first and the last message. One that\n"
        "cannot be read is named, and the exit code is 1. Reads only; a writer may be at work.",
        examples="tidelog channel ls data\ntidelog channel ls --server http://127.0.0.1:4000 --key s3cret",
    )
    _add_channel_command(
        subcommands,
        "show",
        show,
        summary="show one channel: settings, members, access lists",
        description="Show what a channel is. Reads only; a writer may be at work.",
        examples="tidelog channel show data '!room@example.org'",
    )
    parser = _add_channel_command(
        subcommands,
        "history",
        history,
        summary="print messages",
        description="Print messages, oldest first: the payload of each and a newline, or with --json one object\n"
        "a line: seq, ts_ms, sender, payload (payload_base64 where bytes are not UTF-8). Reads only; a writer may\n"
        "be at work.",
        examples="tidelog channel history data '!room@example.org'\n"
        "tidelog channel history data '!room@example.org' --newest 10 --json",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--from", type=parse_positive, dest="first", metavar="N", help="begin with this seq")
    start.add_argument("--newest", type=parse_positive, metavar="N", help="only so many, from the end")
    start.add_argument("--since", type=parse_moment_us, metavar="T", help="begin at this time: 2026-01-31T12:00:00Z")
    parser.add_argument("--to", type=parse_positive, dest="last", metavar="N", help="end with this seq")
    parser.add_argument("--until", type=parse_moment_us, metavar="T", help="end at this time")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="this many at most")


def _add_members(subcommands: Commands) -> None:
    parser = _add_channel_command(
        subcommands,
        "create",
        create,
        summary="create a channel that persists",
        description="Create a channel with its first member, who owns it; and the directory, where there is none. It\n"
        "persists and is of type pubsub unless --set changes it: max_clients, max_payload_size,\n"
        "max_persist_messages, message_flush_interval (ms), type=fifo.",
        examples="tidelog channel create data '!room@example.org' --user ann@example.org\n"
        "tidelog channel create data '!jobs@example.org' --user ann@example.org --set type=fifo",
    )
    _add_user_option(parser, "the user who creates and owns it")
    parser.add_argument("--set", action="append", default=[], type=parse_setting, dest="settings", metavar="name=value")
    for name, run, short, about in (
        ("join", join, "make a user a member", "Make a user a member, as that user, or with --by as the owner."),
        (
            *("leave", leave, "end a membership"),
            "End a user's membership, as that user, or with --by as the owner. An owner's place goes to the next by\n"
            "name; with its last member, or a fifo channel's owner, the channel ends with all its messages.",
        ),
    ):
        examples = f"tidelog channel {name} data '!room@example.org' --user bob@example.org"
        parser = _add_channel_command(subcommands, name, run, summary=short, description=about, examples=examples)
        _add_user_option(parser, "whose membership it is")
        parser.add_argument("--by", metavar="OWNER", help="the owner, who does it for the user")


def _add_messages(subcommands: Commands) -> None:
    parser = _add_channel_command(
        subcommands,
        "publish",
        publish,
        summary="publish messages from standard input",
        description="Publish each line of standard input, without its newline, as one message of a member. The seqs "
        "are\n"
        "printed when all is written; everything is on disk then, whatever the channel's interval is.",
        examples="printf 'hello\\n' | tidelog channel publish data '!room@example.org' --user ann@example.org",
    )
    _add_user_option(parser, "the member who publishes")
    add_line_options(parser, 100, "lines that share a sync")
    parser = _add_channel_command(
        subcommands,
        "listen",
        listen,
        summary="print messages and events of a server's channel as they happen",
        description="Print what is published from now on, as history prints it, and who joins, leaves or changes the\n"
        "channel: as notes on standard error, or with --json as objects with a field event. Ctrl-C ends it. It\n"
        "needs a server: only the process that has a directory open knows its members.",
        examples="tidelog channel listen '!room@example.org' --server http://127.0.0.1:4000 --key s3cret",
    )
    parser.add_argument("--user", metavar="USER", help="a member; the user of the API key where it is left out")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="end after so many messages and events")
    parser.add_argument(
        "--timeout", type=parse_seconds, metavar="S", help="end when nothing happened for this many seconds"
    )


def _add_queue(subcommands: Commands) -> None:
    parser = _add_channel_command(
        subcommands,
        "push",
        push,
        summary="push messages from standard input to a fifo channel",
        description="Push each line of standard input, without its newline, as one message, as the owner. The seqs\n"
        "are printed when all is written.",
        examples="printf 'one\\ntwo\\n' | tidelog channel push data '!jobs@example.org' --user ann@example.org",
    )
    _add_user_option(parser, "the owner, who pushes")
    add_line_options(parser, 100, "lines read at a time")
    parser = _add_channel_command(
        subcommands,
        "pop",
        pop,
        summary="remove the oldest messages of a fifo channel and print them",
        description="Remove messages and print them, oldest first, as history does. No other pop returns them. Fewer "
        "are\n"
        "printed where the channel has fewer.",
        examples="tidelog channel pop data '!jobs@example.org' --user ann@example.org --max 10",
    )
    _add_user_option(parser, "the member who pops")
    parser.add_argument("--max", type=parse_positive, default=1, metavar="N", help="this many at most (1)")
    parser = _add_channel_command(
        subcommands,
        "clear",
        clear,
        summary="drop the waiting messages of a fifo channel",
        description="Drop every message that waits in a fifo channel, for good. Without --user it is the operator who "
        "does.",
        examples="tidelog channel clear data '!jobs@example.org'",
    )
    parser.add_argument("--user", metavar="USER", help="the owner who does it; the operator where it is left out")


def _add_administration(subcommands: Commands) -> None:
    parser = _add_channel_command(
        subcommands,
        "configure",
        configure,
        Positional("name=value...", parse_setting),
        summary="show or change the settings of a channel",
        description="Show the settings of a channel, or set those that are given and leave the others:\n"
        "max_clients, max_payload_size, max_persist_messages, message_flush_interval (ms), persist.\n"
        "Without --user it is the operator who changes them.",
        examples="tidelog channel configure data '!room@example.org'\n"
        "tidelog channel configure data '!room@example.org' max_clients=50 message_flush_interval=0",
    )
    parser.add_argument("--user", metavar="USER", help="the owner who does it; the operator where it is left out")
    parser = _add_channel_command(
        subcommands,
        "acl",
        acl,
        Positional("KIND", choices=ACL_KINDS),
        summary="show or change who may join, publish or read",
        description="Show an access list, or change it with --add and --remove: users (user@domain) or whole domains. "
        "An\n"
        "empty list lets everybody; where users of a domain are listed, its bare domain counts for nothing.\n"
        "Without --user it is the operator who changes it.",
        examples="tidelog channel acl data '!room@example.org' publish\n"
        "tidelog channel acl data '!room@example.org' publish --add ann@example.org --add example.net",
    )
    for option, text in (("--add", "let this user or domain; repeatable"), ("--remove", "take it off; repeatable")):
        parser.add_argument(option, action="append", default=[], metavar="NAME", help=text)
    parser.add_argument("--user", metavar="USER", help="the owner who does it; the operator where it is left out")
    parser = _add_channel_command(
        subcommands,
        "delete",
        delete,
        summary="end a channel, with all its messages",
        description="End a channel, with its members, lists and messages, for good; also one that cannot be read any "
        "more.\n"
        "Without --user it is the operator who does.",
        examples="tidelog channel delete data '!room@example.org'",
    )
    parser.add_argument("--user", metavar="USER", help="the owner who does it; the operator where it is left out")


def _add_narwhal(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "import",
        import_,
        "DIR",
        "SOURCE",
        summary="import the channels of a narwhal data directory",
        description="Import every channel of SOURCE, a data directory of narwhal 0.7, as !handler@DOMAIN: owner,\n"
        "members, access lists, settings, messages with their seqs and times, and the position of a queue.\n"
        "SOURCE is only read; stop narwhal first. Everything is checked before the first channel is written.",
        examples="tidelog channel import data /var/lib/narwhal/data --domain example.org",
    )
    parser.add_argument("--domain", required=True, help="the domain of the narwhal server; its files do not have it")
    parser.add_argument("--skip-existing", action="store_true", help="leave out channels that DIR has already")
    parser.add_argument("--accept-damage", action="store_true", help="import damaged message logs, damage included")
    parser = add_command(
        subcommands,
        "export",
        export,
        "DIR",
        "TARGET",
        summary="write channels as a narwhal data directory",
        description="Write the channels of DIR into TARGET, a new or empty directory, so that narwhal 0.7 opens it.\n"
        "What was imported from narwhal and not changed since gets the same bytes. DIR is not changed.",
        examples="tidelog channel export data narwhal-data --domain example.org",
    )
    parser.add_argument("--domain", help="only channels of this domain: narwhal serves one")
    parser.add_argument(
        "--channel", action="append", default=[], dest="channels", metavar="NAME", help="only this one; repeatable"
    )


def _add_user_option(parser: ArgumentParser, help_text: str) -> None:
    parser.add_argument("--user", required=True, metavar="USER", help=help_text)
