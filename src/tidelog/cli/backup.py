"""`tidelog backup …` and `tidelog restore`: copies of a whole directory of topics and channels.

A directory that a server has open is backed up by the server: only its writer knows a consistent state.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidelog import backup
from tidelog.cli.command import (
    DATABASE,
    Commands,
    add_command,
    add_group,
    parse_age_ms,
    parse_count,
    parse_moment_us,
    parse_positive,
    parse_positive_size,
)
from tidelog.cli.render import Screen, format_bytes, format_time, plural
from tidelog.cli.target import open_target
from tidelog.clock import SystemClock
from tidelog.database import Database
from tidelog.errors import BadInput, Locked

_DESCRIPTION = """\
A backup is a consistent copy of all topics, queues, routers, groups and channels at one moment, made while they are
in use. TARGET is a directory, or an address such as s3://bucket/prefix; it holds the backups of one database.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ tidelog backup create data /mnt/backups
  $ tidelog backup create data /mnt/backups --incremental
  $ tidelog backup list /mnt/backups
  $ tidelog backup verify /mnt/backups
  $ tidelog restore /mnt/backups restored
  $ tidelog backup prune /mnt/backups --keep 7
"""


def add(commands: Commands) -> None:
    """Add the `backup` group to the command line."""
    short = "backups of a whole directory, made while it is in use"
    verbs = add_group(commands, "backup", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    parser = add_command(
        verbs,
        "create",
        create,
        DATABASE,
        "TARGET",
        summary="make a backup",
        description="Back up a directory that no other process writes, or with --server the database of a server,\n"
        "which writes to a TARGET in its TIDELOG_BACKUP_TARGETS. On the same file system, files that never change\n"
        "are linked.",
        examples="tidelog backup create data /mnt/backups\n"
        "tidelog backup create data s3://bucket/backups --incremental\n"
        "tidelog backup create /mnt/backups --server http://127.0.0.1:4000",
    )
    parser.add_argument("--incremental", action="store_true", help="store only what changed since the newest backup")
    parser.add_argument("--copy", action="store_true", help="copy every file, also where it could be linked")
    parser.add_argument("--accept-damage", action="store_true", help="also back up files that do not verify")
    parser.add_argument(
        "--rate",
        type=parse_positive_size,
        metavar="SIZE",
        help="bytes a second, as 50m; not with --server",
    )
    parser = add_command(
        verbs,
        "list",
        list_target,
        "TARGET",
        summary="list backups",
        description="List the backups of a target, oldest first. Reads only.",
        examples="tidelog backup list /mnt/backups\ntidelog backup list s3://bucket/backups --json",
    )
    parser = add_command(
        verbs,
        "verify",
        verify,
        "TARGET",
        summary="read a backup and compare all checksums",
        description="Read every file of a backup, of the newest by default, compare lengths and checksums, and check\n"
        "that its metadata opens and finds all its files. Reads only; exit code 1 if something is wrong.",
        examples="tidelog backup verify /mnt/backups\ntidelog backup verify /mnt/backups 20261118T145959123Z-a1b2c3",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="of `tidelog backup list`; by default the newest")
    parser = add_command(
        verbs,
        "prune",
        prune,
        "TARGET",
        summary="remove old backups",
        description="Remove old backups, and what no other backup needs. The newest backup always stays.",
        examples="tidelog backup prune /mnt/backups --keep 7\ntidelog backup prune /mnt/backups --older-than 30d",
    )
    parser.add_argument("--keep", type=parse_positive, metavar="N", help="keep the N newest")
    parser.add_argument(
        "--older-than", type=parse_age_ms, metavar="AGE", help="remove only backups of this age, as 30d"
    )


def add_restore(commands: Commands) -> None:
    """Add `restore` to the command line."""
    parser = add_command(
        commands,
        "restore",
        restore,
        "TARGET",
        summary="restore a backup into a new directory",
        description="Restore a backup, the newest by default, into a directory that does not exist or is empty. With\n"
        "--to-seq or --to-time, records after it are left out (docs/backup.md: what that means for deletes and acks).\n"
        "Topics get a new epoch, so that readers with old offsets notice.",
        examples="tidelog restore /mnt/backups restored\n"
        "tidelog restore /mnt/backups 20261118T145959123Z-a1b2c3 restored\n"
        "tidelog restore /mnt/backups restored --to-seq orders=1200\n"
        "tidelog restore /mnt/backups restored --to-time 2026-11-18T14:00:00Z",
    )
    parser.add_argument("places", nargs="+", metavar="[ID] DIR", help="the backup, and the new directory")
    parser.add_argument(
        "--to-seq",
        type=parse_topic_seq,
        action="append",
        default=[],
        metavar="TOPIC=N",
        help="the last seq of a topic",
    )
    parser.add_argument("--to-time", type=parse_moment_us, metavar="T", help="the last time, as 2026-01-31T12:00:00Z")


def parse_topic_seq(text: str) -> tuple[str, int]:
    """`topic=seq`."""
    topic, equals, seq = text.rpartition("=")
    if not equals or not topic or not re.fullmatch("[0-9]{1,18}", seq):
        raise ArgumentTypeError(f"{text!r} is not TOPIC=N; write orders=1200")
    return topic, parse_count(seq)


@contextmanager
def _progress(screen: Screen, label: str) -> Iterator[Callable[[str, int, int], None]]:
    with screen.progress_bar(label, total=1) as bar:
        yield lambda _, done, total: bar(done, total)


def _moment(ms: int) -> str:
    return format_time(ms * 1000) or "-"


def create(args: Namespace, screen: Screen) -> int:
    """Make a backup of a directory, or on a server."""
    options = {"incremental": args.incremental, "link": not args.copy, "accept_damage": args.accept_damage}
    if args.server and args.rate:
        raise BadInput("--rate is for a directory; nothing was done, leave it out")
    try:
        with open_target(args, screen, write=True) as database, _progress(screen, "backing up") as bar:
            if isinstance(database, Database):
                info = database.backup(args.target, progress=bar, rate_bytes_per_s=args.rate, **options)
            else:
                info = database.backup(args.target, **options)
    except Locked as error:
        raise Locked(
            f"{args.dir} is open in another process; no backup was made, ask its server: "
            f"tidelog backup create {args.target} --server {error.server or 'URL'}",
            pid=error.pid,
            server=error.server,
        ) from None
    target, fields = args.target, info._asdict()
    screen.print_result({"target": target, **fields})
    if not screen.json:
        print(
            f"{fields['id']}: {plural(len(fields['topics']), 'topic')}, {plural(fields['channels'], 'channel')}, "
            f"{format_bytes(fields['bytes'])}, {format_bytes(fields['stored_bytes'])} of them new in {target}"
        )
        for line in fields["damaged"]:
            screen.print_note(f"damaged: {line}")
    return 1 if fields["damaged"] else 0


def list_target(args: Namespace, screen: Screen) -> int:
    """One line a backup."""
    listing = backup.list_backups(args.target)
    rows = [info._asdict() for info in listing.backups]
    screen.print_result(
        {"target": args.target, "backups": rows, "unfinished": listing.unfinished, "unreadable": listing.unreadable}
    )
    if screen.json:
        return 1 if listing.unreadable else 0
    if listing.backups:
        table = [
            [
                info.id,
                _moment(info.created_ms),
                "incremental" if info.parent else "full",
                f"{len(info.topics):,}",
                format_bytes(info.bytes),
                format_bytes(info.stored_bytes),
            ]
            for info in listing.backups
        ]
        screen.print_table(("id", "time", "kind", ">topics", ">bytes", ">stored"), table)
    for backup_id in listing.unfinished:
        print(f"{backup_id} is not whole: it is being made, or was interrupted")
    for backup_id, reason in listing.unreadable.items():
        print(f"{backup_id} does not read: {reason}")
    print(plural(len(listing.backups), "backup"))
    return 1 if listing.unreadable else 0


def verify(args: Namespace, screen: Screen) -> int:
    """Read a backup; 1 if something is wrong."""
    with _progress(screen, f"verifying {args.target}") as bar:
        result = backup.verify(args.target, args.id, progress=bar)
    screen.print_result({"target": args.target, **result._asdict()})
    if not screen.json:
        for problem in result.problems:
            print(f"damaged: {problem}")
        print(f"{result.id}: {plural(result.files, 'file')}, {format_bytes(result.bytes)}, {_judgement(result)}")
    return 1 if result.problems else 0


def _judgement(result: backup.VerifyResult) -> str:
    return f"{plural(len(result.problems), 'problem')}" if result.problems else "whole"


def prune(args: Namespace, screen: Screen) -> int:
    """Remove old backups."""
    if args.keep is None and args.older_than is None:
        raise BadInput("a prune takes --keep N or --older-than AGE; nothing was removed")
    older = None if args.older_than is None else SystemClock().now_us() // 1000 - args.older_than
    with _progress(screen, f"pruning {args.target}") as bar:
        result = backup.prune(args.target, keep=args.keep, older_than_ms=older, progress=bar)
    screen.print_result({"target": args.target, **result._asdict()})
    if not screen.json:
        print(
            f"removed {plural(len(result.removed), 'backup')} and {plural(result.objects, 'object')}, "
            f"{format_bytes(result.bytes)}; kept {plural(len(result.kept), 'backup')}"
        )
    return 0


def restore(args: Namespace, screen: Screen) -> int:
    """Restore a backup into a new directory."""
    if len(args.places) > 2:
        raise BadInput(f"this takes TARGET [ID] DIR, not {len(args.places) + 1} names; nothing was restored")
    *ids, directory = args.places
    to_time = None if args.to_time is None else args.to_time // 1000
    with _progress(screen, f"restoring {directory}") as bar:
        result = backup.restore(
            args.target,
            directory,
            backup_id=ids[0] if ids else None,
            to_seq=dict(args.to_seq),
            to_time_ms=to_time,
            progress=bar,
        )
    screen.print_result(result._asdict())
    if not screen.json:
        print(
            f"{result.path}: backup {result.id}, {plural(len(result.topics), 'topic')}, "
            f"{plural(result.channels, 'channel')}, {format_bytes(result.bytes)}"
        )
        for name, seqs in result.cut.items():
            print(f"  {name} ends at seq {result.topics[name]}, {plural(seqs, 'seq')} after it were left out")
        for name in result.dropped:
            print(f"  {name} was created later and left out")
        for note in result.notes:
            screen.print_note(note)
    return 0
