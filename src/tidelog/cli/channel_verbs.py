"""[shell] Commands on channels. Those that look open the directory for reading, beside a writer; those that change
something hold it for themselves, and print their answer after it is closed."""

from __future__ import annotations

import base64
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from tidelog.channels import OPERATOR, Channel, ChannelManager, Message
from tidelog.channels.acl import KINDS
from tidelog.channels.limits import ChannelLimits
from tidelog.cli.data import reading, writing
from tidelog.cli.render import Screen, several
from tidelog.cli.write import Source, acked_fields, lines, written
from tidelog.errors import ChannelNotFound, Error
from tidelog.formats.channel import Meta

_PAYLOAD_BYTES_MAX = ChannelLimits().payload_bytes_max


def _fields(meta: Meta) -> dict[str, Any]:
    config = {name: getattr(meta.config, name) for name in meta.config.__struct_fields__}
    return {"channel": meta.handler, "owner": meta.owner, **config, "members": list(meta.members)}


def _bounds(manager: ChannelManager, name: str) -> tuple[int, int] | None:
    """First and last seq; None for a queue, whose messages are nobody's history."""
    return Channel(manager, name, OPERATOR).bounds() if manager.meta(name).config.type == "pubsub" else None


# ── look ──────────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """List channels."""
    with reading(args.dir, screen) as log:
        manager = log.channels
        found: list[dict[str, Any]] = []
        for name in manager.handlers():
            meta = manager.meta(name)
            row: dict[str, Any] = {"channel": name, "type": meta.config.type, "owner": meta.owner}
            row |= {"members": len(meta.members), "first_seq": None, "last_seq": None, "trouble": None}
            try:
                if (bounds := _bounds(manager, name)) is not None:
                    row["first_seq"], row["last_seq"] = bounds
            except Error as error:
                row["trouble"] = str(error)
            found.append(row)
        skipped = dict(manager.report.skipped)
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
    with reading(args.dir, screen) as log:
        meta = log.channels.meta(args.channel)
        bounds = _bounds(log.channels, args.channel)
    fields = _fields(meta) | {"acl": {kind: list(getattr(meta.acl, kind)) for kind in KINDS}}
    fields |= {"first_seq": bounds[0] if bounds else None, "last_seq": bounds[1] if bounds else None}
    kept = {name: value for name, value in fields.items() if name not in ("members", "acl")}
    listed = [f"may {kind}: {', '.join(getattr(meta.acl, kind)) or 'everybody'}" for kind in KINDS]
    told = [f"{name}: {'–' if value is None else value}" for name, value in kept.items()]
    screen.answer(fields, *told, *listed, f"members: {', '.join(meta.members)}")
    return 0


def history(args: Namespace, screen: Screen) -> int:
    """Print messages."""
    with reading(args.dir, screen) as log:
        room, left = log.channel(args.channel), args.limit
        asked: dict[str, Any] = {"first": args.first, "newest": args.newest, "last": args.last}
        asked["since_ms"] = None if args.since is None else args.since // 1000
        asked["until_ms"] = None if args.until is None else args.until // 1000
        if args.newest is not None:  # more than one answer can hold
            first, last = room.bounds()
            asked |= {"newest": None, "first": max(last - args.newest + 1, first, 1)}
        while left is None or left > 0:
            page = room.history(**asked, limit=left)
            for message in page.messages:
                _print(message, screen)
            if not page.messages or page.next_seq > page.last_seq:
                break
            left = None if left is None else left - len(page.messages)
            asked |= {"first": page.next_seq, "since_ms": None}
    return 0


def _print(message: Message, screen: Screen) -> None:
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
    with writing(args.dir, screen, create=True) as log:
        log.channel(args.channel, user=args.user).join(**({"persist": True} | dict(args.settings)))
        meta = log.channels.meta(args.channel)
    made = "joined" if len(meta.members) > 1 else "made"
    screen.answer(_fields(meta), f"{made} {args.channel}, a {meta.config.type} channel, owned by {meta.owner}")
    return 0


def join(args: Namespace, screen: Screen) -> int:
    """Make a user a member."""
    with writing(args.dir, screen) as log:
        log.channels.meta(args.channel)  # a command that joins makes no channel: what it made would not persist
        if args.by is None:
            log.channel(args.channel, user=args.user).join()
        else:
            log.channel(args.channel, user=args.by).invite(args.user)
        meta = log.channels.meta(args.channel)
    screen.answer(
        _fields(meta), f"{args.user} is in {args.channel}, with {several(len(meta.members), 'member')} in all"
    )
    return 0


def leave(args: Namespace, screen: Screen) -> int:
    """End a membership."""
    with writing(args.dir, screen) as log:
        if args.by is None:
            log.channel(args.channel, user=args.user).leave()
        else:
            log.channel(args.channel, user=args.by).kick(args.user)
        there = args.channel in log.channels.handlers()
        owner = log.channels.meta(args.channel).owner if there else None
    said = f"{args.user} left {args.channel}" + (f", which {owner} owns" if there else ", which ended with that")
    screen.answer({"channel": args.channel, "user": args.user, "ended": not there, "owner": owner}, said)
    return 0


def publish(args: Namespace, screen: Screen) -> int:
    """Publish a message a line of standard input."""
    with writing(args.dir, screen) as log:
        room = log.channel(args.channel, user=args.user)
        next_seq = log.channel(args.channel).bounds()[1] + 1
        acked = screen.acked = range(next_seq, next_seq)
        for batch in _batches(args):
            ack = room.publish_many(batch)
            first = ack.seq - ack.messages + 1
            acked = screen.acked = range(acked.start if acked else first, ack.seq + 1)
    screen.answer({"channel": args.channel, **acked_fields(acked)}, written(acked))
    return 0


def _batches(args: Namespace) -> Iterator[list[bytes]]:
    source: Source = sys.stdin.buffer  # type: ignore[assignment]  # a BufferedReader, which typeshed does not say
    yield from (batch for batch in lines(source, args.batch, _PAYLOAD_BYTES_MAX) if batch)


def acl(args: Namespace, screen: Screen) -> int:
    """Show or change an access list."""
    user = OPERATOR if args.user is None else args.user
    if args.add or args.remove:
        with writing(args.dir, screen) as log:
            room = log.channel(args.channel, user=user)
            listed = room.allow(args.kind, *args.add) if args.add else ()
            listed = room.disallow(args.kind, *args.remove) if args.remove else listed
    else:
        with reading(args.dir, screen) as log:
            listed = log.channel(args.channel, user=user).acl(args.kind)
    fields = {"channel": args.channel, "kind": args.kind, "listed": list(listed)}
    screen.answer(fields, *(listed or (f"everybody may {args.kind}",)))
    return 0


def delete(args: Namespace, screen: Screen) -> int:
    """End a channel."""
    with writing(args.dir, screen) as log:
        if not log.channel(args.channel, user=OPERATOR if args.user is None else args.user).delete():
            raise ChannelNotFound(args.channel)
    screen.answer({"channel": args.channel, "deleted": True}, f"deleted {args.channel}, with all its messages")
    return 0
