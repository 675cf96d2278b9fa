"""[shell] `tidelog check`: every byte of a data directory held against everything that vouches for it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from tidelog.channels.check import ChannelCheck
from tidelog.cli.command import command
from tidelog.cli.data import check_there
from tidelog.cli.render import Screen, bytes_, several, span
from tidelog.engine.check import Finding
from tidelog.engine.check import check as check_directory

if TYPE_CHECKING:
    from tidelog.cli.command import Commands


def add(commands: Commands) -> None:
    """Add `check` to the command line."""
    made = command(
        commands,
        "check",
        check,
        short="verify a directory of topics and channels; exit code 1 on damage",
        about="Read every byte of a directory of topics: snapshots, every frame of the WAL, every segment against its\n"
        "footer and its index, deletions and counts against the snapshot; and of channels: metadata, messages,\n"
        "cursors. Damage is named by file, byte and records, and gives exit code 1. Notes are what a crash\n"
        "leaves and the next start mends; they do not fail. Changes nothing, and works beside a writer.",
        examples="tidelog check data && echo all good\ntidelog check data --json",
    )
    made.add_argument("dir", metavar="DIR")


def check(args: Namespace, screen: Screen) -> int:
    """Find everything that is not as it should be; 1 where something is damaged."""
    check_there(args.dir)
    with screen.bar(f"checking {args.dir}", total=1) as bar:
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
    seen = f"{several(looked.segments, 'segment')} and {several(looked.frames, 'frame')} of the WAL"
    if damage:
        screen.answer(fields, f"{args.dir}: damage in {place(damage[0])}: {damage[0].reason}")
    else:
        held = f"{several(looked.topics, 'topic')} with {several(looked.records, 'record')}"
        if rooms.channels:
            held += f", {several(rooms.channels, 'channel')} with {several(rooms.messages, 'message')}"
        screen.answer(fields, f"{args.dir}: no damage, {held}; {seen}, {bytes_(looked.bytes + rooms.bytes)}")
    if found and not screen.json:
        screen.table(("", "what", "where", "why"), [finding_row(finding) for finding in found])
    if damage:
        screen.say(
            f"{several(len(damage), 'damaged place')} in {seen}; what is whole can be read as before "
            f"(tidelog topic read {args.dir} TOPIC), the rest comes back only from a copy"
        )
    return 1 if damage else 0


def place(finding: Finding) -> str:
    """`topics/00000001/seg-….data at byte 505, seqs 1 to 9 of orders`."""
    at = "" if finding.pos is None else f" at byte {finding.pos}"
    whose = f" of {finding.topic}" if finding.topic is not None else ""
    return finding.file + at + (f", {span(finding.seqs.start, finding.seqs.stop)}{whose}" if finding.seqs else "")


def finding_row(finding: Finding) -> list[str]:
    return ["damage" if finding.damage else "note", finding.kind, place(finding), finding.reason]


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
