"""[shell] Commands on channels of a directory or of a server. Those that look open a directory for reading, beside a
writer; those that change something hold it for themselves, and print their answer after it is closed."""

from __future__ import annotations

import base64
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from tidelog.channels.acl import KINDS
from tidelog.channels.limits import ChannelLimits
from tidelog.cli.channel_door import Said, channel_named, opened
from tidelog.cli.render import Screen, several
from tidelog.cli.write import Source, acked_fields, lines, written
from tidelog.errors import BadInput

_PAYLOAD_BYTES_MAX = ChannelLimits().payload_bytes_max


# ── look ──────────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """List channels."""
    if bool(args.dir) == bool(args.server):
        raise BadInput("channels are in a DIR or behind a --server, one of the two; nothing was done")
    with opened(args, screen, write=False) as door:
        found, skipped = door.rows()
    troubles = [*skipped.values(), *(row["trouble"] for row in found if row["trouble"])]
    if screen.json:
        screen.answer({"channels": found, "unreadable": skipped})
    else:
        titles = ("channel", "type", "owner", ">members", ">first", ">last")
        keys = ("channel", "type", "owner", "members", "first_seq", "last_seq")
        screen.table(titles, [["–" if row[key] is None else str(row[key]) for key in keys] for row in found])
        for trouble in troubles:
            screen.complain(f"damage: {trouble}")
    return 1 if troubles else 0


def show(args: Namespace, screen: Screen) -> int:
    """Show one channel."""
    name = channel_named(args)
    with opened(args, screen, write=False) as door:
        fields = door.show(name)
    kept = {name: value for name, value in fields.items() if name not in ("members", "acl", "holes")}
    acl = fields["acl"] or {}
    listed = [f"may {kind}: {', '.join(acl[kind]) or 'everybody'}" for kind in KINDS if kind in acl]
    told = [f"{name}: {'–' if value is None else value}" for name, value in kept.items()]
    told += [f"lost to a power cut before their sync: seqs {first} to {last}" for first, last in fields["holes"]]
    screen.answer(fields, *told, *listed, f"members: {', '.join(fields['members'])}")
    return 0


def history(args: Namespace, screen: Screen) -> int:
    """Print messages."""
    name, left = channel_named(args), args.limit
    asked: dict[str, int | None] = {"first": args.first, "last": args.last}
    asked["since"] = None if args.since is None else args.since // 1000
    asked["until"] = None if args.until is None else args.until // 1000
    with opened(args, screen, write=False) as door:
        if args.newest is not None:  # more than one answer can hold
            first, last = door.bounds(name)
            asked["first"] = max(last - args.newest + 1, first, 1)
        while left is None or left > 0:
            messages, next_seq, last_seq = door.history(name, asked | {"limit": left})
            for message in messages:
                _print(message, screen)
            if not messages or next_seq > last_seq:
                break
            left = None if left is None else left - len(messages)
            asked |= {"first": next_seq, "since": None}
    return 0


def _print(message: Said, screen: Screen) -> None:
    if not screen.json:
        screen.data(message.payload + b"\n")
        return
    fields: dict[str, Any] = {"seq": message.seq, "ts_ms": message.ts_ms, "sender": message.sender}
    try:
        fields["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        fields["payload_base64"] = base64.b64encode(message.payload).decode()
    screen.data(json.dumps(fields).encode() + b"\n")


# ── change ────────────────────────────────────────────────────────────────────────────────────────


def create(args: Namespace, screen: Screen) -> int:
    """Make a channel that persists."""
    name = channel_named(args)
    with opened(args, screen, write=True, create=True) as door:
        fields = door.create(name, args.user, {"persist": True} | dict(args.settings))
    made = "joined" if len(fields["members"]) > 1 else "made"
    screen.answer(fields, f"{made} {name}, a {fields['type']} channel, owned by {fields['owner']}")
    return 0


def join(args: Namespace, screen: Screen) -> int:
    """Make a user a member."""
    name = channel_named(args)
    with opened(args, screen, write=True) as door:
        fields = door.join(name, args.user, args.by)
    screen.answer(fields, f"{args.user} is in {name}, with {several(len(fields['members']), 'member')} in all")
    return 0


def leave(args: Namespace, screen: Screen) -> int:
    """End a membership."""
    name = channel_named(args)
    with opened(args, screen, write=True) as door:
        owner = door.leave(name, args.user, args.by)
    said = f"{args.user} left {name}" + (f", which {owner} owns" if owner else ", which ended with that")
    screen.answer({"channel": name, "user": args.user, "ended": owner is None, "owner": owner}, said)
    return 0


def publish(args: Namespace, screen: Screen) -> int:
    """Publish a message a line of standard input."""
    name = channel_named(args)
    with opened(args, screen, write=True) as door:
        next_seq = 1 if args.server else door.bounds(name)[1] + 1
        acked = screen.acked = range(next_seq, next_seq)
        for batch in _batches(args):
            made = door.publish(name, args.user, batch)
            acked = screen.acked = range(acked.start if acked else made.start, made.stop)
    screen.answer({"channel": name, **acked_fields(acked)}, written(acked))
    return 0


def _batches(args: Namespace) -> Iterator[list[bytes]]:
    source: Source = sys.stdin.buffer  # type: ignore[assignment]  # a BufferedReader, which typeshed does not say
    yield from (batch for batch in lines(source, args.batch, _PAYLOAD_BYTES_MAX) if batch)


def acl(args: Namespace, screen: Screen) -> int:
    """Show or change an access list."""
    name, changes = channel_named(args), bool(args.add or args.remove)
    with opened(args, screen, write=changes) as door:
        if changes:
            listed = door.set_acl(name, args.user, args.kind, args.add, args.remove)
        else:
            listed = door.acl(name, args.user, args.kind)
    fields = {"channel": name, "kind": args.kind, "listed": list(listed)}
    screen.answer(fields, *(listed or (f"everybody may {args.kind}",)))
    return 0


def delete(args: Namespace, screen: Screen) -> int:
    """End a channel."""
    name = channel_named(args)
    with opened(args, screen, write=True) as door:
        door.delete(name, args.user)
    screen.answer({"channel": name, "deleted": True}, f"deleted {name}, with all its messages")
    return 0
