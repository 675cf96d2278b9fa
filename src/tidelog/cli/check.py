"""`tidelog check`: verify every file of a data directory against its checksums and the manifest."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from tidelog.channels.store import ChannelCheck
from tidelog.cli.command import (
    Commands,
    add_command,
)
from tidelog.cli.render import Screen, format_bytes, format_seqs, plural
from tidelog.cli.target import check_holds_topics
from tidelog.engine.check import Finding
from tidelog.engine.check import check_directory as check_directory


def add(commands: Commands) -> None:
    """Add `check` to the command line."""
    add_command(
        commands,
        "check",
        check,
        "DIR",
        summary="verify a directory of topics and channels; exit code 1 on damage",
        description="Read every byte of a directory of topics: snapshots, every frame of the WAL, every segment "
        "against its\n"
        "footer and its index, deletions and counts against the snapshot; and of channels: metadata, messages,\n"
        "cursors. Damage is named by file, byte and records, and gives exit code 1. Notes are leftovers of a\n"
        "crash that the next start repairs; they do not fail. Changes nothing, and works beside a writer.",
        examples="tidelog check data && echo all good\ntidelog check data --json",
    )


def check(args: Namespace, screen: Screen) -> int:
    """Print every finding; return 1 where something is damaged."""
    check_holds_topics(args.dir)
    with screen.progress_bar(f"checking {args.dir}", total=1) as bar:
        topics = check_directory(args.dir, progress=lambda _, done, total: bar(done, total))
        channels = ChannelCheck(args.dir)
        findings = [*topics, *channels]
    damage = [finding for finding in findings if finding.damage]
    fields = {
        "ok": not damage,
        "path": args.dir,
        "topics": topics.topics,
        "segments": topics.segments,
        "frames": topics.frames,
        "bytes": topics.bytes,
        "records": None if damage else topics.records,
        "channels": channels.channels,
        "messages": channels.messages,
        "findings": [finding_fields(finding) for finding in findings],
    }
    checked = f"{plural(topics.segments, 'segment')} and {plural(topics.frames, 'frame')} of the WAL"
    if damage:
        screen.print_result(fields, f"{args.dir}: damage in {describe_location(damage[0])}: {damage[0].reason}")
    else:
        contents = f"{plural(topics.topics, 'topic')} with {plural(topics.records, 'record')}"
        if channels.channels:
            contents += f", {plural(channels.channels, 'channel')} with {plural(channels.messages, 'message')}"
        size = format_bytes(topics.bytes + channels.bytes)
        screen.print_result(fields, f"{args.dir}: no damage, {contents}; {checked}, {size}")
    if findings and not screen.json:
        screen.print_table(("", "what", "where", "why"), [finding_row(finding) for finding in findings])
    if damage:
        screen.print_note(
            f"{plural(len(damage), 'damaged place')} in {checked}; all other records can be read as before "
            f"(tidelog topic read {args.dir} TOPIC), damaged ones only from a copy"
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
