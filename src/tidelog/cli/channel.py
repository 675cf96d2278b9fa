"""`tidelog channel …`: commands on the channels of a directory or of a server.

    tidelog channel … DIR CHANNEL               this process is the writer, or a reader beside one
    tidelog channel … CHANNEL --server URL      the server is the writer, and the command a client

Commands that read open a directory beside a writer; commands that write lock it, and print their result after it is
closed. Both backends return the same values. A user that is None is the operator: the owner of the files, or a key
with the scope admin; a read uses the key's own user where the key has no such scope.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from tidelog.channels import OPERATOR, Channel, ChannelManager, ChannelMeta, Message
from tidelog.channels.rules import ACL_KINDS, ChannelLimits
from tidelog.cli import target
from tidelog.cli.command import (
    CommandFunction,
    Commands,
    add_command,
    add_group,
    add_line_options,
    add_server_options,
    parse_moment_us,
    parse_positive,
    parse_setting,
)
from tidelog.cli.log import acked_fields, describe_written, read_lines, stdin_source
from tidelog.cli.render import Screen, bytes_field, plural
from tidelog.client import Client, RemoteChannel, RemoteMessage
from tidelog.client.channel import KEY_USER, list_remote_channels
from tidelog.database import Database
from tidelog.errors import ChannelNotFound, Error, Forbidden

T = TypeVar("T")
AnyMessage = Message | RemoteMessage


class ChannelBackend(Protocol):
    def list_rows(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """One row per channel, and the reason for each that cannot be read."""
        ...

    def show(self, name: str) -> dict[str, Any]: ...
    def history(self, name: str, bounds: dict[str, int | None]) -> tuple[Sequence[AnyMessage], int, int]:
        """A page, the start of the next one, and the last seq."""
        ...

    def bounds(self, name: str) -> tuple[int, int]: ...
    def create(self, name: str, user: str, config: Mapping[str, object]) -> dict[str, Any]: ...
    def join(self, name: str, user: str, by: str | None) -> dict[str, Any]: ...
    def leave(self, name: str, user: str, by: str | None) -> str | None:
        """The new owner; None where the channel ended."""
        ...

    def publish(self, name: str, user: str, payloads: list[bytes]) -> range:
        """Their seqs."""
        ...

    def acl(self, name: str, user: str | None, kind: str) -> Sequence[str]: ...
    def set_acl(
        self, name: str, user: str | None, kind: str, add: Sequence[str], remove: Sequence[str]
    ) -> Sequence[str]: ...
    def delete(self, name: str, user: str | None) -> None: ...


def channel_name(args: Namespace) -> str:
    return target.target_name(args, "CHANNEL")


def open_channels(
    args: Namespace, screen: Screen, *, write: bool, create: bool = False
) -> AbstractContextManager[ChannelBackend]:
    """Open the backend that the command line names. Everything is durable when the block ends."""
    return target.open_target(args, screen, LocalChannels, RemoteChannels, write=write, create=create)


def _meta_fields(meta: ChannelMeta) -> dict[str, Any]:
    config = {name: getattr(meta.config, name) for name in meta.config.__struct_fields__}
    return {"channel": meta.handler, "owner": meta.owner, **config, "members": list(meta.members)}


class LocalChannels:
    def __init__(self, database: Database) -> None:
        self._database = database

    def _channel(self, name: str, user: str | None = None) -> Channel:
        return self._database.channel(name, user=OPERATOR if user is None else user)

    @staticmethod
    def _bounds(manager: ChannelManager, name: str) -> tuple[int, int] | None:
        """First and last seq; None for a queue, which has no history."""
        return Channel(manager, name, OPERATOR).bounds() if manager.meta(name).config.type == "pubsub" else None

    def list_rows(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        manager = self._database.channels
        rows: list[dict[str, Any]] = []
        for name in manager.channel_names():
            meta = manager.meta(name)
            row: dict[str, Any] = {"channel": name, "type": meta.config.type, "owner": meta.owner}
            row |= {"members": len(meta.members), "first_seq": None, "last_seq": None, "trouble": None}
            try:
                if (bounds := self._bounds(manager, name)) is not None:
                    row["first_seq"], row["last_seq"] = bounds
            except Error as error:
                row["trouble"] = str(error)
            rows.append(row)
        return rows, dict(manager.report.skipped)

    def show(self, name: str) -> dict[str, Any]:
        manager = self._database.channels
        meta = manager.meta(name)
        bounds = self._bounds(manager, name) or (None, None)
        acl = {kind: list(getattr(meta.acl, kind)) for kind in ACL_KINDS}
        holes = self._channel(name).holes()
        return _meta_fields(meta) | {"acl": acl, "first_seq": bounds[0], "last_seq": bounds[1], "holes": holes}

    def bounds(self, name: str) -> tuple[int, int]:
        return self._channel(name).bounds()

    def history(self, name: str, bounds: dict[str, int | None]) -> tuple[Sequence[AnyMessage], int, int]:
        named = {{"since": "since_ms", "until": "until_ms"}.get(key, key): value for key, value in bounds.items()}
        page = self._channel(name).history(**named)  # type: ignore[arg-type] # skip_damage is not among them
        return page.messages, page.next_seq, page.last_seq

    def create(self, name: str, user: str, config: Mapping[str, object]) -> dict[str, Any]:
        self._channel(name, user).join(**config)
        return _meta_fields(self._database.channels.meta(name))

    def join(self, name: str, user: str, by: str | None) -> dict[str, Any]:
        self._database.channels.meta(name)  # joining must not create a channel: it would not persist
        if by is None:
            self._channel(name, user).join()
        else:
            self._channel(name, by).invite(user)
        return _meta_fields(self._database.channels.meta(name))

    def leave(self, name: str, user: str, by: str | None) -> str | None:
        if by is None:
            self._channel(name, user).leave()
        else:
            self._channel(name, by).kick(user)
        exists = name in self._database.channels.channel_names()
        return self._database.channels.meta(name).owner if exists else None

    def publish(self, name: str, user: str, payloads: list[bytes]) -> range:
        ack = self._channel(name, user).publish_many(payloads)
        return range(ack.seq - ack.messages + 1, ack.seq + 1)

    def acl(self, name: str, user: str | None, kind: str) -> Sequence[str]:
        return self._channel(name, user).acl(kind)

    def set_acl(
        self, name: str, user: str | None, kind: str, add: Sequence[str], remove: Sequence[str]
    ) -> Sequence[str]:
        channel = self._channel(name, user)
        listed = channel.allow(kind, *add) if add else ()
        return channel.disallow(kind, *remove) if remove else listed

    def delete(self, name: str, user: str | None) -> None:
        if not self._channel(name, user).delete():
            raise ChannelNotFound(name)


class RemoteChannels:
    def __init__(self, client: Client) -> None:
        self._client = client

    def _channel(self, name: str, user: object = None) -> RemoteChannel:
        return RemoteChannel(self._client, name, user)

    def _read_as_member(self, name: str, read: Callable[[RemoteChannel], T]) -> T:
        try:
            return read(self._channel(name))
        except Forbidden:
            return read(self._channel(name, KEY_USER))

    def list_rows(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        rows, unreadable, user = list_remote_channels(self._client)
        listed = []
        for row in rows:
            fields = {key: row[key] for key in ("channel", "type", "owner", "members")}
            fields |= {"first_seq": None, "last_seq": None, "trouble": None}
            try:
                state = self._channel(row["channel"], user).state()
                fields |= {"first_seq": state["first_seq"], "last_seq": state["last_seq"]}
            except Error as error:
                fields["trouble"] = str(error)
            listed.append(fields)
        return listed, unreadable

    def show(self, name: str) -> dict[str, Any]:
        def describe(channel: RemoteChannel) -> dict[str, Any]:
            state = channel.state()
            fields = {"channel": name, "owner": state["owner"], **state["config"], "members": channel.members()}
            try:
                acl: dict[str, list[str]] | None = channel.acl()
            except Forbidden:
                acl = None  # only the owner may read it
            seqs = {name: state[name] for name in ("first_seq", "last_seq")}
            return fields | {"acl": acl, **seqs, "holes": state.get("holes", [])}

        return self._read_as_member(name, describe)

    def bounds(self, name: str) -> tuple[int, int]:
        state = self._read_as_member(name, RemoteChannel.state)
        return state["first_seq"] or 1, state["last_seq"] or 0

    def history(self, name: str, bounds: dict[str, int | None]) -> tuple[Sequence[AnyMessage], int, int]:
        return self._read_as_member(name, lambda channel: channel.history(**bounds))

    def create(self, name: str, user: str, config: Mapping[str, object]) -> dict[str, Any]:
        self._channel(name, user).join(config=config)
        return self._describe(name, user)

    def _describe(self, name: str, user: str) -> dict[str, Any]:
        channel = self._channel(name, user)
        state = channel.state()
        return {"channel": name, "owner": state["owner"], **state["config"], "members": channel.members()}

    def join(self, name: str, user: str, by: str | None) -> dict[str, Any]:
        if by is not None:
            self._channel(name, by).join(user)
            return self._describe(name, by)
        self._read_as_member(name, _check_exists)
        self._channel(name, user).join()
        return self._describe(name, user)

    def leave(self, name: str, user: str, by: str | None) -> str | None:
        result = self._channel(name, user).leave() if by is None else self._channel(name, by).leave(user)
        owner: str | None = result["owner"]
        return owner

    def publish(self, name: str, user: str, payloads: list[bytes]) -> range:
        result = self._channel(name, user).publish(payloads)
        return range(result["first_seq"], result["last_seq"] + 1)

    def acl(self, name: str, user: str | None, kind: str) -> Sequence[str]:
        return self._channel(name, user).acl()[kind]

    def set_acl(
        self, name: str, user: str | None, kind: str, add: Sequence[str], remove: Sequence[str]
    ) -> Sequence[str]:
        return self._channel(name, user).set_acl(kind, add=add, remove=remove)

    def delete(self, name: str, user: str | None) -> None:
        if not self._channel(name, user).delete():
            raise ChannelNotFound(name)


def _check_exists(channel: RemoteChannel) -> None:
    """Raise ChannelNotFound for a missing channel, so that a join does not create one. Users who may not read it learn
    that it exists."""
    try:
        channel.state()
    except ChannelNotFound:
        raise
    except Forbidden:
        return


_PAYLOAD_BYTES_MAX = ChannelLimits().payload_bytes_max


# ── look ──────────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """List channels."""
    target.check_one_target(args, "channels")
    with open_channels(args, screen, write=False) as backend:
        channels, skipped = backend.list_rows()
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
    name = channel_name(args)
    with open_channels(args, screen, write=False) as backend:
        fields = backend.show(name)
    plain = {name: value for name, value in fields.items() if name not in ("members", "acl", "holes")}
    acl = fields["acl"] or {}
    lines = [f"{name}: {'–' if value is None else value}" for name, value in plain.items()]
    lines += [f"lost to a power cut before their sync: seqs {first} to {last}" for first, last in fields["holes"]]
    lines += [f"may {kind}: {', '.join(acl[kind]) or 'everybody'}" for kind in ACL_KINDS if kind in acl]
    screen.print_result(fields, *lines, f"members: {', '.join(fields['members'])}")
    return 0


def history(args: Namespace, screen: Screen) -> int:
    """Print messages."""
    name, left = channel_name(args), args.limit
    bounds: dict[str, int | None] = {"first": args.first, "last": args.last}
    bounds["since"] = None if args.since is None else args.since // 1000
    bounds["until"] = None if args.until is None else args.until // 1000
    with open_channels(args, screen, write=False) as backend:
        if args.newest is not None:  # may be more than one page
            first, last = backend.bounds(name)
            bounds["first"] = max(last - args.newest + 1, first, 1)
        while left is None or left > 0:
            messages, next_seq, last_seq = backend.history(name, bounds | {"limit": left})
            for message in messages:
                _print_message(message, screen)
            if not messages or next_seq > last_seq:
                break
            left = None if left is None else left - len(messages)
            bounds |= {"first": next_seq, "since": None}
    return 0


def _print_message(message: AnyMessage, screen: Screen) -> None:
    if not screen.json:
        screen.write_data(message.payload + b"\n")
        return
    fields: dict[str, Any] = {"seq": message.seq, "ts_ms": message.ts_ms, "sender": message.sender}
    fields |= bytes_field("payload", message.payload)
    screen.write_data(json.dumps(fields).encode() + b"\n")


# ── change ────────────────────────────────────────────────────────────────────────────────────────


def create(args: Namespace, screen: Screen) -> int:
    """Create a channel that persists."""
    name = channel_name(args)
    with open_channels(args, screen, write=True, create=True) as backend:
        fields = backend.create(name, args.user, {"persist": True} | dict(args.settings))
    action = "joined" if len(fields["members"]) > 1 else "created"
    screen.print_result(fields, f"{action} {name}, a {fields['type']} channel, owned by {fields['owner']}")
    return 0


def join(args: Namespace, screen: Screen) -> int:
    """Make a user a member."""
    name = channel_name(args)
    with open_channels(args, screen, write=True) as backend:
        fields = backend.join(name, args.user, args.by)
    screen.print_result(fields, f"{args.user} is in {name}, with {plural(len(fields['members']), 'member')} in all")
    return 0


def leave(args: Namespace, screen: Screen) -> int:
    """End a membership."""
    name = channel_name(args)
    with open_channels(args, screen, write=True) as backend:
        owner = backend.leave(name, args.user, args.by)
    line = f"{args.user} left {name}" + (f", which {owner} owns" if owner else ", which ended with that")
    screen.print_result({"channel": name, "user": args.user, "ended": owner is None, "owner": owner}, line)
    return 0


def publish(args: Namespace, screen: Screen) -> int:
    """Publish a message a line of standard input."""
    name = channel_name(args)
    with open_channels(args, screen, write=True) as backend:
        next_seq = 1 if args.server else backend.bounds(name)[1] + 1
        acked = screen.acked = range(next_seq, next_seq)
        for batch in _batches(args):
            seqs = backend.publish(name, args.user, batch)
            acked = screen.acked = range(acked.start if acked else seqs.start, seqs.stop)
    screen.print_result({"channel": name, **acked_fields(acked)}, describe_written(acked))
    return 0


def _batches(args: Namespace) -> Iterator[list[bytes]]:
    yield from (batch for batch in read_lines(stdin_source(), args.batch, _PAYLOAD_BYTES_MAX) if batch)


def acl(args: Namespace, screen: Screen) -> int:
    """Show or change an access list."""
    name, changes = channel_name(args), bool(args.add or args.remove)
    with open_channels(args, screen, write=changes) as backend:
        if changes:
            listed = backend.set_acl(name, args.user, args.kind, args.add, args.remove)
        else:
            listed = backend.acl(name, args.user, args.kind)
    fields = {"channel": name, "kind": args.kind, "listed": list(listed)}
    screen.print_result(fields, *(listed or (f"everybody may {args.kind}",)))
    return 0


def delete(args: Namespace, screen: Screen) -> int:
    """End a channel."""
    name = channel_name(args)
    with open_channels(args, screen, write=True) as backend:
        backend.delete(name, args.user)
    screen.print_result({"channel": name, "deleted": True}, f"deleted {name}, with all its messages")
    return 0


_DESCRIPTION = """\
Members join a channel, the first one owns it, and all others receive what a member publishes. A channel
that persists keeps its members, its access lists and its last messages.

DIR is a directory that no server has open; --server URL (and --key) is for the channels of a server. There
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
    _add_administration(verbs)


def _add_channel_command(
    subcommands: Commands, name: str, run: CommandFunction, *, summary: str, description: str, examples: str
) -> ArgumentParser:
    """Add a command on one channel."""
    parser = add_command(subcommands, name, run, summary=summary, description=description, examples=examples)
    parser.add_argument("places", nargs="+", metavar="[DIR] CHANNEL")
    add_server_options(parser, "channels")
    return parser


def _add_lists(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "ls",
        ls,
        summary="list channels",
        description="List the channels of a directory: type, owner, members, the first and the last message. One that\n"
        "cannot be read is named, and the exit code is 1. Reads only; a writer may be at work.",
        examples="tidelog channel ls data\ntidelog channel ls --server http://127.0.0.1:4000 --key s3cret",
    )
    parser.add_argument("dir", nargs="?", metavar="DIR")
    add_server_options(parser, "channels")
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


def _add_administration(subcommands: Commands) -> None:
    parser = _add_channel_command(
        subcommands,
        "acl",
        acl,
        summary="show or change who may join, publish or read",
        description="Show an access list, or change it with --add and --remove: users (user@domain) or whole domains. "
        "An\n"
        "empty list lets everybody; where users of a domain are listed, its bare domain counts for nothing.\n"
        "Without --user it is the operator who changes it.",
        examples="tidelog channel acl data '!room@example.org' publish\n"
        "tidelog channel acl data '!room@example.org' publish --add ann@example.org --add example.net",
    )
    parser.add_argument("kind", choices=ACL_KINDS)
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


def _add_user_option(parser: ArgumentParser, help_text: str) -> None:
    parser.add_argument("--user", required=True, metavar="USER", help=help_text)
