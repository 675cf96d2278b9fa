"""`tidelog erase …`: remove records and their bytes from a database, and verify the receipts.

`tidelog erase DIR TOPIC` is short for `tidelog erase run DIR TOPIC`. `run` locks a directory; `ls` and `verify` work
beside a writer and change nothing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import msgspec

from tidelog.cli.command import DATABASE, Commands, add_command, add_group, parse_seqs
from tidelog.cli.render import Screen, format_bytes, format_seqs, format_time, plural
from tidelog.cli.target import open_target, target_place
from tidelog.database import Database
from tidelog.disk.durability import read_file
from tidelog.disk.posix import PosixDisk
from tidelog.engine.erase import ErasureReceipt
from tidelog.errors import BadInput, Damaged, NotFound

_SUBCOMMANDS = ("run", "ls", "verify")


def complete_command(argv: Sequence[str]) -> list[str]:
    """Return the command line with `run` where `erase` has no other command."""
    words = list(argv)
    if words[:1] == ["erase"] and len(words) > 1 and words[1] not in (*_SUBCOMMANDS, "-h", "--help"):
        words.insert(1, "run")
    return words


def run(args: Namespace, screen: Screen) -> int:
    """Erase records and print the receipt."""
    if (args.match is None) == (args.seqs is None):
        raise BadInput("no records are selected, or twice; nothing was erased, give --match or --seqs")
    if args.server and args.actor:
        raise BadInput("a server records the API key as the actor; nothing was erased, leave --actor out")
    with open_target(args, screen, write=True) as log, screen.progress_bar("erasing"):
        if isinstance(log, Database):
            receipt = log.erase(args.topic, match=args.match, seqs=args.seqs, actor=args.actor)
        else:
            receipt = log.erase(args.topic, match=args.match, seqs=args.seqs)
    selected = receipt.records + receipt.records_before
    screen.print_result(
        _receipt_fields(receipt),
        f"erased {plural(selected, 'record')} of {args.topic}"
        + (f", {format_seqs(receipt.first, receipt.last + 1)}" if selected else "")
        + (f"; {plural(receipt.records_before, 'record')} had been deleted before" if receipt.records_before else ""),
        f"receipt {receipt.number}, SHA-256 {receipt.hash}",
        titles=("file", "what", ">before", ">after", "xxh3 before", "xxh3 after"),
        rows=[
            [
                file.path,
                file.action,
                format_bytes(file.bytes),
                "-" if file.new_bytes is None else format_bytes(file.new_bytes),
                file.xxh3,
                file.new_xxh3 or "-",
            ]
            for file in receipt.files
        ],
        after=[f"not reached: {text}" for text in receipt.not_reached],
    )
    return 0


def _receipt_fields(receipt: ErasureReceipt) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(receipt.to_json())
    return fields


def ls(args: Namespace, screen: Screen) -> int:
    """List the receipts."""
    with open_target(args, screen, write=False) as log:
        receipts = log.erasures()
    screen.print_result(
        {"path": target_place(args), "receipts": [_receipt_fields(each) for each in receipts]},
        titles=(">receipt", "time (UTC)", "topic", ">records", ">files", "actor", "SHA-256"),
        rows=[
            [
                str(each.number),
                format_time(each.ts_ms * 1000) or "-",
                each.topic,
                f"{each.records + each.records_before:,}",
                str(len(each.files)),
                each.actor or "-",
                each.hash[:16],
            ]
            for each in receipts
        ],
        after=[plural(len(receipts), "receipt")],
    )
    return 0


def verify(args: Namespace, screen: Screen) -> int:
    """Walk the chain of receipts and say which row was changed."""
    kept = None if args.receipt is None else _read_receipt(args.receipt)
    with open_target(args, screen, write=False) as log:
        found = log.verify_erasures(kept)
    if not found.ok and not screen.json:
        raise Damaged(
            f"{target_place(args)}: " + "; ".join(found.problems) + "; nothing was changed, restore the gap log"
        )
    screen.print_result(
        {"path": target_place(args), "receipts": found.receipts, "ok": found.ok, "problems": list(found.problems)},
        f"{plural(found.receipts, 'receipt')}, every one as it was written",
    )
    return 0 if found.ok else 1


def _read_receipt(path: str) -> ErasureReceipt:
    content = read_file(PosixDisk(), path)
    if content is None:
        raise NotFound(f"there is no file {path}; nothing was verified")
    try:
        return msgspec.json.decode(content, type=ErasureReceipt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{path} is no receipt: {error}; nothing was verified") from None


def add(commands: Commands) -> None:
    subcommands = add_group(
        commands,
        "erase",
        summary="remove records and every byte of them, with a receipt",
        description="Delete records and remove their bytes from WAL, segments, indexes and snapshots. The receipt\n"
        "names every file; receipts form a chain in the gap log, so a changed one is found.",
        first_steps="start here:\n  $ tidelog erase data orders --match 'customer-7*' --json\n"
        "  $ tidelog erase verify data\n",
    )
    parser = add_command(
        subcommands,
        "run",
        run,
        DATABASE,
        "TOPIC",
        summary="erase records by tag or seq",
        description="Erase the records with a tag, or of some seqs, and print the receipt. Records that were deleted\n"
        "earlier are erased as well. Copies in other topics, backups and what readers have are listed.",
        examples="tidelog erase run data orders --match 'customer-7*'\ntidelog erase run data orders --seqs 4,5 --json",
    )
    parser.add_argument("--match", metavar="TAG", help="a tag, or the beginning of a tag and *")
    parser.add_argument("--seqs", type=parse_seqs, metavar="N,N…", help="these seqs")
    parser.add_argument("--actor", help="who erases, for the receipt; on a server that is the API key")
    add_command(
        subcommands,
        "ls",
        ls,
        DATABASE,
        summary="list the receipts",
        description="List the receipts of the gap log, oldest first. Works beside a writer, and only reads.",
        examples="tidelog erase ls data",
    )
    parser = add_command(
        subcommands,
        "verify",
        verify,
        DATABASE,
        summary="verify the chain of receipts",
        description="Walk the chain of receipts in the gap log and say which row was changed, removed or inserted.\n"
        "Exits with 1 if one was.",
        examples="tidelog erase verify data\ntidelog erase verify data --receipt kept.json",
    )
    parser.add_argument("--receipt", metavar="FILE", help="a receipt that was kept; it must be part of the chain")
