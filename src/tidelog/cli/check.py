"""[shell] `tidelog check`: every byte of a data directory held against everything that vouches for it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from tidelog.channels.store import ChannelCheck
from tidelog.cli.command import add_command
from tidelog.cli.render import Screen, format_bytes, format_seqs, plural
from tidelog.cli.target import check_holds_topics
from tidelog.engine.check import Finding
from tidelog.engine.check import check_directory as check_directory

if TYPE_CHECKING:
    from tidelog.cli.command import Commands


def add(commands: Commands) -> None:
    """Add `check` to the command line."""
    made = add_command(
        commands,
        "check",
        check,
        summary="verify a directory of topics and channels; exit code 1 on damage",
        description="Read every byte of a directory of topics: snapshots, every frame of the WAL, every segment "
        "against its\n"
        "footer and its index, deletions and counts against the snapshot; and of channels: metadata, messages,\n"
        "cursors. Damage is named by file, byte and records, and gives exit code 1. Notes are what a crash\n"
        "leaves and the next start mends; they do not fail. Changes nothing, and works beside a writer.",
        examples="tidelog check data && echo all good\ntidelog check data --json",
    )
    made.add_argument("dir", metavar="DIR")


def check(args: Namespace, screen: Screen) -> int:
    """Find everything that is not as it should be; 1 where something is damaged."""
    check_holds_topics(args.dir)
    with screen.progress_bar(f"checking {args.dir}", total=1) as bar:
        looked = check_directory(args.dir, progress=lambda _, done, total: bar(done, total))
        rooms = ChannelCheck(args.dir)
        found = [*looked, *rooms]
    damage = [finding for finding in found if finding.damage]
    fields = {
        "ok": not damage,
        "path": args.dir,
        "topics": looked.topics,
        "segments": looked.segments,
        "frames": looked.frames,
        "bytes": looked.bytes,
        "records": None if damage else looked.records,
        "channels": rooms.channels,
        "messages": rooms.messages,
        "findings": [finding_fields(finding) for finding in found],
    }
    seen = f"{plural(looked.segments, 'segment')} and {plural(looked.frames, 'frame')} of the WAL"
    if damage:
        screen.print_result(fields, f"{args.dir}: damage in {describe_location(damage[0])}: {damage[0].reason}")
    else:
        held = f"{plural(looked.topics, 'topic')} with {plural(looked.records, 'record')}"
        if rooms.channels:
            held += f", {plural(rooms.channels, 'channel')} with {plural(rooms.messages, 'message')}"
        screen.print_result(
            fields, f"{args.dir}: no damage, {held}; {seen}, {format_bytes(looked.bytes + rooms.bytes)}"
        )
    if found and not screen.json:
        screen.print_table(("", "what", "where", "why"), [finding_row(finding) for finding in found])
    if damage:
        screen.print_note(
            f"{plural(len(damage), 'damaged place')} in {seen}; what is whole can be read as before "
            f"(tidelog topic read {args.dir} TOPIC), the rest comes back only from a copy"
        )
    return 1 if damage else 0


def describe_location(finding: Finding) -> str:
    """`topics/00000001/seg-….data at byte 505, seqs 1 to 9 of orders`."""
    at = "" if finding.pos is None else f" at byte {finding.pos}"
    whose = f" of {finding.topic}" if finding.topic is not None else ""
    return (
        finding.file + at + (f", {format_seqs(finding.seqs.start, finding.seqs.stop)}{whose}" if finding.seqs else "")
    )


def finding_row(finding: Finding) -> list[str]:
    return ["damage" if finding.damage else "note", finding.kind, describe_location(finding), finding.reason]


def finding_fields(finding: Finding) -> dict[str, Any]:
    lost = finding.seqs
    return {
        "damage": finding.damage,
        "kind": finding.kind,
        "file": finding.file,
        "pos": finding.pos,
        "topic": finding.topic,
        "first_seq": lost.start if lost else None,
        "last_seq": lost.stop - 1 if lost else None,
        "reason": finding.reason,
    }
