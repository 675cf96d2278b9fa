"""`tidelog topic …`: the commands, what each takes, and the help that teaches them. What they do lies beside
this module: topic_look (ls, show, read, follow), topic_write (write … checkpoint)."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction
from typing import TYPE_CHECKING, get_args

from tidelog.cli import topic_look, topic_write
from tidelog.cli.command import Run, command, group
from tidelog.cli.options import count, positive, seconds, seqs, setting
from tidelog.engine.config import Durability

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_ABOUT = """\
A topic is a named, numbered sequence of records; a directory holds as many as you like. Every record
has a seq, assigned once, and is bytes or JSON. One process writes a directory, any number read it.
No server is needed, and none may be writing while a command writes.

what an ack means, by class:
  fsync      the record survives a power cut
  disk       it survives kill -9; a power cut may take the last moments (the default)
  memory     nothing is promised
  ephemeral  it is in memory only and ends with its process

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_START = """\
start here:
  $ printf 'hello\\nworld\\n' | tidelog topic write data greetings
  $ tidelog topic ls data
  $ tidelog topic read data greetings --json
  $ tidelog topic follow data greetings
  $ tidelog check data
"""


def add(commands: Commands) -> None:
    """Add the `topic` group to the command line."""
    short = "topics on disk: write, read, follow, delete, configure"
    verbs = group(commands, "topic", short=short, about=_ABOUT, start=_START)
    _add_lists(verbs)
    _add_write(verbs)
    _add_reads(verbs)
    _add_removals(verbs)
    _add_keeping(verbs)


def _of_topic(verbs: Commands, name: str, run: Run, *, short: str, about: str, examples: str) -> ArgumentParser:
    """A command on one topic."""
    made = command(verbs, name, run, short=short, about=about, examples=examples)
    made.add_argument("dir", metavar="DIR")
    made.add_argument("topic", metavar="TOPIC")
    return made


def _add_lists(verbs: Commands) -> None:
    made = command(
        verbs,
        "ls",
        topic_look.ls,
        short="list topics",
        about="List the topics of a directory: class, records, bytes, the first and the last seq, and up to which seq\n"
        "records were lost to a cap or to age. Reads only; a writer may be at work.",
        examples="tidelog topic ls data\ntidelog topic ls data --prefix orders. --json",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument("--prefix", default="", metavar="P", help="only topics whose name begins so")
    _of_topic(
        verbs,
        "show",
        topic_look.show,
        short="show one topic: what it holds and where that lies",
        about="Show what a topic holds, what its acks mean, what became of seqs that have no record any more, and its\n"
        "segments. Reads only; a writer may be at work.",
        examples="tidelog topic show data orders",
    )


def _add_write(verbs: Commands) -> None:
    made = _of_topic(
        verbs,
        "write",
        topic_write.write,
        short="write records from standard input",
        about="Write each line of standard input as one record, without its newline: as bytes, or with --json-lines\n"
        "as the JSON value it holds. Directory and topic are made where there are none. Lines that come together\n"
        "are one batch, written as a whole or not at all. The seqs are printed when all is written, and what\n"
        "their acks meant.",
        examples="printf 'hello\\nworld\\n' | tidelog topic write data greetings\n"
        """echo '{"sku": "A", "qty": 1}' | tidelog topic write data orders --json-lines --class fsync --tag order-7""",
    )
    made.add_argument("--json-lines", action="store_true", help="each line is a JSON value; empty lines are left out")
    made.add_argument("--batch", type=positive, default=1000, metavar="N", help="lines in one write at most (1000)")
    made.add_argument("--tag", help="what to delete the records by later")
    made.add_argument("--node", help="where the records come from; readers may leave out their own")
    made.add_argument(
        "--key",
        help="all of standard input is one write under this idempotency key. Keys are remembered by the process that "
        "has the directory open: a second command does not know them",
    )
    made.add_argument(
        "--class",
        dest="durability",
        choices=get_args(Durability),
        help="what acks mean in a topic that is made (disk); see tidelog topic --help",
    )
    made.add_argument(
        "--create", action=BooleanOptionalAction, default=True, help="make directory and topic where there are none"
    )
    made.add_argument("--acks", action="store_true", help="print the seqs of every batch as soon as it is acked")


def _add_reads(verbs: Commands) -> None:
    made = _of_topic(
        verbs,
        "read",
        topic_look.read,
        short="print records",
        about="Print the data of every record with a newline behind it, or with --json one object a line: seq, ts,\n"
        "json (whether data is JSON), data (data_base64 where bytes are not UTF-8), tag, node, meta. Where records\n"
        "were lost before they were read, a gap says which: on standard error, or as an object. The end\n"
        "accounts for every seq of the range. Reads only; a writer may be at work.",
        examples="tidelog topic read data orders\ntidelog topic read data orders --from 100 --limit 10 --json",
    )
    _add_cursor(made)
    made.add_argument("--limit", type=positive, metavar="N", help="this many records at most")
    made = _of_topic(
        verbs,
        "follow",
        topic_look.follow,
        short="print records as another process writes them",
        about="Print what is there and then what another process writes, as read does. Ctrl-C ends it, with exit\n"
        "code 0. Where records were lost to a cap or to age before they were read, or the topic was dropped\n"
        "and made again, --on-gap says what to do.",
        examples="tidelog topic follow data orders --json\ntidelog topic follow data orders --from 100 --timeout 30",
    )
    _add_cursor(made)
    made.add_argument("--timeout", type=seconds, metavar="S", help="end when no record came for this many seconds")
    made.add_argument(
        "--on-gap",
        choices=("fail", "emit", "skip"),
        default="fail",
        help="fail: end with exit code 2 (the default). emit: say so and go on. skip: just go on",
    )


def _add_cursor(made: ArgumentParser) -> None:
    made.add_argument(
        "--consistency",
        choices=("eventual", "strong"),
        default="eventual",
        help="eventual: what is acknowledged, or as the topic says (the default). strong: only what survives a power "
        "cut; waits for a sync. Topics of class disk or fsync",
    )
    made.add_argument(
        "--from",
        type=count,
        dest="first",
        default=0,
        metavar="N",
        help="the last seq you have: what comes behind it is printed (0: from the first)",
    )
    made.add_argument(
        "--node", action="append", help="leave out the records of this node, usually your own; repeatable"
    )


def _add_removals(verbs: Commands) -> None:
    made = _of_topic(
        verbs,
        "delete",
        topic_write.delete,
        short="delete records by tag or seq",
        about="Delete records that are there now. Readers pass over them in silence: a delete is no gap. It cannot be\n"
        "undone and asks nothing; --dry-run says what it would remove.",
        examples="tidelog topic delete data orders --match order-7 --dry-run\n"
        "tidelog topic delete data orders --match 'order-*' --before 1000\n"
        "tidelog topic delete data orders --seqs 3,5,8",
    )
    made.add_argument(
        "--match", metavar="TAG", help="records with this tag; with a * at its end, with tags that begin so"
    )
    made.add_argument("--before", type=count, metavar="N", help="records below this seq; of those that match, if both")
    made.add_argument("--seqs", type=seqs, metavar="A,B", help="the records with these seqs")
    made.add_argument("--dry-run", action="store_true", help="only say what would be removed; reads only")
    made = _of_topic(
        verbs,
        "drop",
        topic_write.drop,
        short="remove a topic with all its records",
        about="Remove a topic with all its records. This cannot be undone: on a terminal it asks, elsewhere it wants\n"
        "--yes. A topic made again under the name starts anew, and readers are told.",
        examples="tidelog topic drop data orders --if-empty\ntidelog topic drop data orders --yes",
    )
    made.add_argument("--if-empty", action="store_true", help="only if it holds no record; then nothing is asked")
    made.add_argument("--yes", action="store_true", help="do not ask")


def _add_keeping(verbs: Commands) -> None:
    made = _of_topic(
        verbs,
        "config",
        topic_write.config,
        short="show or change a topic's settings",
        about="Show the settings of a topic, or set those that are given and leave the others. Times take units\n"
        "(500ms, 30s, 15m, 12h, 7d), sizes as well (512k, 64m, 2g).\n"
        "  durability    what an ack means: ephemeral, memory, disk, fsync\n"
        "  ttl_ms        records older than this are lost; 0: none\n"
        "  cap_records, cap_bytes, discard    how much it holds, and whether the old or the write gives way",
        examples="tidelog topic config data orders\ntidelog topic config data orders durability=fsync ttl_ms=7d",
    )
    made.add_argument("settings", nargs="*", type=setting, metavar="name=value")
    _of_topic(
        verbs,
        "seal",
        topic_write.seal,
        short="complete the segment that grows",
        about="Complete the segment file that grows; the next record starts another. Sealed files never change, so\n"
        "they can be copied away at leisure.",
        examples="tidelog topic seal data orders",
    )
    made = command(
        verbs,
        "checkpoint",
        topic_write.checkpoint,
        short="move what only the WAL has into segments",
        about="Recover the directory as a writer does, copy what only the WAL has into segments, and let the WAL go.\n"
        "A running writer does this by itself; after a crash the next start is faster for it.",
        examples="tidelog topic checkpoint data",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on where acknowledged records were lost to damage, which is refused otherwise; what is cut off is "
        "kept in quarantine/",
    )
