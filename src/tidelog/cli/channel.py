"""`tidelog channel …`: the commands, what each takes, and the help that teaches them. What they do lies in
channel_verbs."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from tidelog.channels.acl import KINDS
from tidelog.cli import channel_verbs as verbs_
from tidelog.cli.command import Run, command, group
from tidelog.cli.options import moment_us, positive, setting

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_ABOUT = """\
A channel is a room: members join it, the first one owns it, and what one member publishes all others
receive. One that persists keeps its members, its access lists and its last messages.

DIR is a directory that no server has open; with --server URL (and --key) the channels of a server are
meant. There, to be somebody else than the key's own user, or the operator, takes the scope admin.

names:
  !handler@domain   a channel; quote it, the shell knows ! too
  user@domain       a user

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_START = """\
start here:
  $ tidelog channel create data '!room@example.org' --user ann@example.org
  $ printf 'hello\\nworld\\n' | tidelog channel publish data '!room@example.org' --user ann@example.org
  $ tidelog channel history data '!room@example.org'
"""


def add(commands: Commands) -> None:
    """Add the `channel` group to the command line."""
    short = "channels: rooms with members, access lists and history"
    verbs = group(commands, "channel", short=short, about=_ABOUT, start=_START)
    _add_looks(verbs)
    _add_members(verbs)
    _add_messages(verbs)
    _add_rule(verbs)


def _of(verbs: Commands, name: str, run: Run, *, short: str, about: str, examples: str) -> ArgumentParser:
    """A command on one channel."""
    made = command(verbs, name, run, short=short, about=about, examples=examples)
    made.add_argument("places", nargs="+", metavar="[DIR] CHANNEL")
    _server(made)
    return made


def _server(made: ArgumentParser) -> None:
    made.add_argument("--server", metavar="URL", help="the channels of a server, as http://127.0.0.1:4000; no DIR then")
    made.add_argument("--key", help="a key of that server, where it asks for one")


def _add_looks(verbs: Commands) -> None:
    made = command(
        verbs,
        "ls",
        verbs_.ls,
        short="list channels",
        about="List the channels of a directory: type, owner, members, the first and the last message. One that\n"
        "cannot be read is named, and the exit code is 1. Reads only; a writer may be at work.",
        examples="tidelog channel ls data\ntidelog channel ls --server http://127.0.0.1:4000 --key s3cret",
    )
    made.add_argument("dir", nargs="?", metavar="DIR")
    _server(made)
    _of(
        verbs,
        "show",
        verbs_.show,
        short="show one channel: settings, members, access lists",
        about="Show what a channel is. Reads only; a writer may be at work.",
        examples="tidelog channel show data '!room@example.org'",
    )
    made = _of(
        verbs,
        "history",
        verbs_.history,
        short="print messages",
        about="Print messages, oldest first: the payload of each with a newline behind it, or with --json one object\n"
        "a line: seq, ts_ms, sender, payload (payload_base64 where bytes are not UTF-8). Reads only; a writer may\n"
        "be at work.",
        examples="tidelog channel history data '!room@example.org'\n"
        "tidelog channel history data '!room@example.org' --newest 10 --json",
    )
    start = made.add_mutually_exclusive_group()
    start.add_argument("--from", type=positive, dest="first", metavar="N", help="begin with this seq")
    start.add_argument("--newest", type=positive, metavar="N", help="only so many, from the end")
    start.add_argument("--since", type=moment_us, metavar="T", help="begin at this time: 2026-01-31T12:00:00Z")
    made.add_argument("--to", type=positive, dest="last", metavar="N", help="end with this seq")
    made.add_argument("--until", type=moment_us, metavar="T", help="end at this time")
    made.add_argument("--limit", type=positive, metavar="N", help="this many at most")


def _add_members(verbs: Commands) -> None:
    made = _of(
        verbs,
        "create",
        verbs_.create,
        short="make a channel that persists",
        about="Make a channel with its first member, who owns it; the directory too, where there is none. It persists\n"
        "and is of type pubsub unless --set says otherwise: max_clients, max_payload_size,\n"
        "max_persist_messages, message_flush_interval (ms), type=fifo.",
        examples="tidelog channel create data '!room@example.org' --user ann@example.org\n"
        "tidelog channel create data '!jobs@example.org' --user ann@example.org --set type=fifo",
    )
    _user(made, "who makes and owns it")
    made.add_argument("--set", action="append", default=[], type=setting, dest="settings", metavar="name=value")
    for name, run, short, about in (
        ("join", verbs_.join, "make a user a member", "Make a user a member, as that user, or with --by as the owner."),
        (
            *("leave", verbs_.leave, "end a membership"),
            "End a user's membership, as that user, or with --by as the owner. An owner's place goes to the next by\n"
            "name; with its last member, or a fifo channel's owner, the channel ends with all its messages.",
        ),
    ):
        examples = f"tidelog channel {name} data '!room@example.org' --user bob@example.org"
        made = _of(verbs, name, run, short=short, about=about, examples=examples)
        _user(made, "whose membership it is")
        made.add_argument("--by", metavar="OWNER", help="the owner, who does it for the user")


def _add_messages(verbs: Commands) -> None:
    made = _of(
        verbs,
        "publish",
        verbs_.publish,
        short="publish messages from standard input",
        about="Publish each line of standard input, without its newline, as one message of a member. The seqs are\n"
        "printed when all is written; everything is on disk then, whatever the channel's interval is.",
        examples="printf 'hello\\n' | tidelog channel publish data '!room@example.org' --user ann@example.org",
    )
    _user(made, "who says it")
    made.add_argument("--batch", type=positive, default=100, metavar="N", help="lines that share a sync (100)")


def _add_rule(verbs: Commands) -> None:
    made = _of(
        verbs,
        "acl",
        verbs_.acl,
        short="show or change who may join, publish or read",
        about="Show an access list, or change it with --add and --remove: users (user@domain) or whole domains. An\n"
        "empty list lets everybody; where users of a domain are listed, its bare domain counts for nothing.\n"
        "Without --user it is the operator who changes it.",
        examples="tidelog channel acl data '!room@example.org' publish\n"
        "tidelog channel acl data '!room@example.org' publish --add ann@example.org --add example.net",
    )
    made.add_argument("kind", choices=KINDS)
    made.add_argument("--add", action="append", default=[], metavar="NAME", help="let this user or domain; repeatable")
    made.add_argument("--remove", action="append", default=[], metavar="NAME", help="take it from the list; repeatable")
    made.add_argument("--user", metavar="USER", help="the owner who does it; the operator where it is left out")
    made = _of(
        verbs,
        "delete",
        verbs_.delete,
        short="end a channel, with all its messages",
        about="End a channel, with its members, lists and messages, for good; also one that cannot be read any more.\n"
        "Without --user it is the operator who does.",
        examples="tidelog channel delete data '!room@example.org'",
    )
    made.add_argument("--user", metavar="USER", help="the owner who does it; the operator where it is left out")


def _user(made: ArgumentParser, what: str) -> None:
    made.add_argument("--user", required=True, metavar="USER", help=what)
