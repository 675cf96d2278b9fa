"""`tidelog log …`: the commands, what each takes, and the help that teaches them. What they do lies beside
this module: look (cat, inspect, verify), write (append … compact), copying (convert, restore)."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from tidelog.cli import copying, look, write
from tidelog.cli.command import Run, command, group
from tidelog.cli.keys import rule
from tidelog.cli.options import age_ms, columns, count, moment_us, octets, positive, positive_size, size
from tidelog.commitlog.codecs import NAMES
from tidelog.config import LogConfig

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_ABOUT = """\
A log is a directory of numbered records that only ever grows at its end. Every record has a seq,
assigned once. Four layouts (codecs) are understood: tide, Tidelog's own; rustlog; laminar; narwhal.
The codec of an existing log is recognised by its files.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_START = """\
start here:
  $ printf 'hello\\nworld\\n' | tidelog log append events
  $ tidelog log cat events --json
  $ tidelog log inspect events
"""


def add(commands: Commands) -> None:
    """Add the `log` group to the command line."""
    short = "segmented logs on disk: append, read, check, repair, clean, copy"
    verbs = group(commands, "log", short=short, about=_ABOUT, start=_START)
    _add_append(verbs)
    _add_cat(verbs)
    _add_looks(verbs)
    _add_repairs(verbs)
    _add_cleaners(verbs)
    _add_copies(verbs)


def _command(
    verbs: Commands, name: str, run: Run, *, short: str, about: str, example: str, codec: str = ""
) -> ArgumentParser:
    made = command(verbs, name, run, short=short, about=about, examples=example)
    made.add_argument("--codec", choices=NAMES, help=codec or "the log's layout (recognised by its files)")
    return made


def _add_append(verbs: Commands) -> None:
    made = _command(
        verbs,
        "append",
        write.append,
        short="write records from standard input",
        about="Write each line of standard input as one record, without its newline, or all of it as one record\n"
        "with --stream. The log is made where there is none. The seqs are printed once the records are\n"
        "written; what that promises is the sync policy's word.",
        example="printf 'hello\\nworld\\n' | tidelog log append events --codec tide --sync each",
        codec="layout of a new log (tide); an existing log has its own",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument(
        "--sync",
        choices=("each", "batch", "interval"),
        default="batch",
        help="each: a record is on disk before the next is written. batch: a batch is, with one sync (the default). "
        "interval: the operating system has it, the disk follows within 50 ms",
    )
    made.add_argument("--batch", type=positive, default=1000, metavar="N", help="lines in one write at most (1000)")
    made.add_argument(
        "--segment-bytes",
        type=positive_size,
        default=LogConfig().segment_bytes_max,
        metavar="N",
        help="start a new segment file past this size (64m)",
    )
    made.add_argument("--stream", action="store_true", help="one record from all of standard input, chunk by chunk")
    made.add_argument("--acks", action="store_true", help="print the seqs of every batch as soon as it is written")
    made.add_argument("--node", type=octets, default=b"", help="where the records come from (tide, narwhal)")
    made.add_argument("--tag", type=octets, default=b"", help="the records' delete key (tide)")
    made.add_argument(
        "--expect", type=count, metavar="N", help="write only if the first record gets this seq; else refuse"
    )


def _add_cat(verbs: Commands) -> None:
    made = _command(
        verbs,
        "cat",
        look.cat,
        short="print records",
        about="Print the data of every record with a newline behind it, or with --json one object a line: seq, ts\n"
        "(null where the layout keeps no time), data (data_base64 where it is not UTF-8), node, tag, meta.\n"
        "Reads only; a writer may be at work. A damaged record ends it with exit code 1.",
        example="tidelog log cat events --from 100 --limit 10 --json",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument("--from", type=count, dest="first", metavar="N", help="the first seq (the log's first)")
    made.add_argument("--limit", type=count, metavar="N", help="this many records at most")
    made.add_argument("--skip-damage", action="store_true", help="pass over records that cannot be read")


def _add_looks(verbs: Commands) -> None:
    made = _command(
        verbs,
        "inspect",
        look.inspect,
        short="show segments, ranges, sizes and index health",
        about="Show what lies in a directory: segments, seq ranges, sizes, times, the state of every index, and what\n"
        "recovery would do. Changes nothing.",
        example="tidelog log inspect events",
    )
    made.add_argument("dir", metavar="DIR")
    made = _command(
        verbs,
        "verify",
        look.verify,
        short="check every checksum; exit code 1 on damage",
        about="Read every byte and hold it against every checksum and rule. Damage is named by file, byte and seqs,\n"
        "the first place first, and gives exit code 1. Notes are what a writer mends by itself when it opens\n"
        "the log; they do not fail. Changes nothing.",
        example="tidelog log verify events && echo all good",
    )
    made.add_argument("dir", metavar="DIR")


def _add_repairs(verbs: Commands) -> None:
    made = _command(
        verbs,
        "repair",
        write.repair,
        short="recover after a crash and say what was done",
        about="Open the log as a writer would: cut an unfinished last record, rebuild indexes, sweep temporaries.\n"
        "Bytes that may be more than an unfinished write go to quarantine/ first. Damage in sealed segments\n"
        "cannot be mended; it is listed and gives exit code 1, and the other records are served as before.",
        example="tidelog log repair events",
    )
    made.add_argument("dir", metavar="DIR")
    made = _command(
        verbs,
        "seal",
        write.seal,
        short="close the active segment and start another",
        about="Make the active segment immutable. Retention and compaction work on sealed segments only.",
        example="tidelog log seal events",
    )
    made.add_argument("dir", metavar="DIR")
    made = _command(
        verbs,
        "truncate",
        write.truncate,
        short="forget every record from a seq on",
        about="Forget every record from seq N on; the next record gets seq N. This cannot be undone and asks nothing:\n"
        "`tidelog log restore` makes a shorter copy instead.",
        example="tidelog log truncate events --to 100",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument("--to", type=count, required=True, metavar="N", help="the first seq to forget")


def _add_cleaners(verbs: Commands) -> None:
    made = _command(
        verbs,
        "compact",
        write.compact,
        short="keep the newest record of every key",
        about="Drop every record of the sealed segments that a later one with the same key supersedes. Seqs and times\n"
        "stay; records without a key stay. Keys:\n"
        "  tag          the record's tag\n"
        "  json:FIELD   that field of the JSON object in the data\n"
        "  prefix:SEP   the bytes before the first SEP",
        example="tidelog log compact carts --key json:cart_id",
    )
    made.add_argument("dir", metavar="DIR")
    made.add_argument("--key", type=rule, required=True, metavar="KEY", help="tag, json:FIELD or prefix:SEP")
    made.add_argument(
        "--tombstones",
        action="store_true",
        help="also drop a key whose newest record is empty: no data (tag), nothing behind SEP (prefix), no other "
        "field or only null ones (json)",
    )
    made = _command(
        verbs,
        "retain",
        write.retain,
        short="drop old segments by age or size",
        about="Drop the oldest sealed segments that break a limit; breaking either is enough. Never the active one,\n"
        "never what a consumer has not committed, never past the high watermark.",
        example="tidelog log retain events --keep 7d --keep-bytes 10g",
    )
    made.add_argument("dir", metavar="DIR")
    age = made.add_mutually_exclusive_group()
    age.add_argument("--keep", type=age_ms, dest="keep_ms", metavar="AGE", help="30s, 15m, 12h, 7d, 2w")
    age.add_argument("--keep-ms", type=count, metavar="N", help="the same in milliseconds")
    made.add_argument("--keep-bytes", type=size, metavar="N", help="bytes of the whole log: 4096, 64m, 10g")
    made.add_argument("--high-watermark", type=count, metavar="N", help="keep every segment that reaches past this seq")


def _add_copies(verbs: Commands) -> None:
    made = _command(
        verbs,
        "convert",
        copying.convert,
        short="write a log again in another layout",
        about="Write every record of SRC to a new log DST in another codec's layout, seqs and times kept. Nothing is\n"
        "dropped in silence: a column the target has no room for is refused unless --drop names it, a seq it\n"
        "cannot hold unless --renumber shifts all of them, times that step back unless --clamp-times raises them.",
        example="tidelog log convert events events-laminar --to laminar",
        codec="layout of SRC (recognised by its files)",
    )
    made.add_argument("source", metavar="SRC")
    made.add_argument("destination", metavar="DST")
    made.add_argument("--to", choices=NAMES, required=True, help="layout of DST")
    made.add_argument("--renumber", action="store_true", help="start at the target's own first seq")
    made.add_argument(
        "--drop", type=columns, default=frozenset(), metavar="COLUMNS", help="leave out node, tag, meta (node,tag)"
    )
    made.add_argument(
        "--clamp-times", action="store_true", help="raise a time that steps back to the latest one before it"
    )
    made = _command(
        verbs,
        "restore",
        copying.restore,
        short="copy a log as it was at a seq or a time",
        about="Copy SRC into the new directory DST as it was at a point in time: every record up to and including a\n"
        "seq, or not younger than a moment. SRC is only read.",
        example="tidelog log restore events events-monday --to-time 2026-01-31T12:00:00Z",
        codec="layout of SRC (recognised by its files)",
    )
    made.add_argument("source", metavar="SRC")
    made.add_argument("destination", metavar="DST")
    end = made.add_mutually_exclusive_group(required=True)
    end.add_argument("--to-offset", type=count, metavar="N", help="the last seq to keep")
    end.add_argument(
        "--to-time",
        type=moment_us,
        metavar="T",
        help="ISO 8601, UTC unless it names a zone; or microseconds since 1970",
    )
