"""`tidelog retention simulate`: what other limits would evict, and which consumer groups have not read it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import msgspec

from tidelog.cli.command import (
    DATABASE,
    Commands,
    add_command,
    add_group,
    parse_age_ms,
    parse_count,
    parse_size,
)
from tidelog.cli.render import Screen, format_bytes, format_time, plural
from tidelog.cli.target import open_target
from tidelog.engine import EvictedRange, RetentionPreview

_DESCRIPTION = """\
Retention evicts the oldest records of a topic: by age (ttl_ms), by number (cap_records), by size (cap_bytes).
A consumer group may hold back what it has not read, up to a quota. tidelog topic config sets the limits.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ tidelog retention simulate data orders --ttl 7d
  $ tidelog retention simulate data --cap-bytes 1g --json
"""


def add(commands: Commands) -> None:
    """Add the `retention` group to the command line."""
    short = "retention of topics: what limits would evict"
    verbs = add_group(commands, "retention", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    parser = add_command(
        verbs,
        "simulate",
        simulate,
        DATABASE,
        "[TOPIC]",
        summary="what other limits would evict, and who has not read it",
        description="Say which records of a topic, or of all topics, would go if these limits were set now, which\n"
        "consumer groups have not read them, and whose hold would break. A limit that is not given is the topic's\n"
        "own. Nothing changes; a writer may be at work.",
        examples="tidelog retention simulate data orders --cap-records 1000000\n"
        "tidelog retention simulate data --ttl 7d --json\n"
        "tidelog retention simulate --server http://127.0.0.1:4000 orders --cap-bytes 10g",
    )
    parser.add_argument("--cap-records", type=parse_count, metavar="N", help="at most so many records; 0: no cap")
    parser.add_argument("--cap-bytes", type=parse_size, metavar="SIZE", help="at most so many bytes; 0: no cap")
    parser.add_argument("--ttl", type=parse_age_ms, metavar="TIME", help="none older than 30s, 12h, 7d; 0s: any age")


def simulate(args: Namespace, screen: Screen) -> int:
    """Print what would go, topic by topic."""
    limits = {"cap_records": args.cap_records, "cap_bytes": args.cap_bytes, "ttl_ms": args.ttl}
    with open_target(args, screen, write=False) as log:
        names = [args.topic] if args.topic else [state.topic for state in log.topics()]
        found = [log.topic(name, create=False).simulate_retention(**limits) for name in names]
    if screen.json:
        for preview in found:
            screen.print_result(preview_fields(preview))
        return 0
    for preview in found:
        if preview.records or preview.groups or args.topic:
            _print_preview(preview, screen)
    records, size = sum(preview.records for preview in found), sum(preview.bytes for preview in found)
    total = f"{plural(records, 'record')}, {format_bytes(size)} of {plural(len(found), 'topic')}"
    screen.print_result({}, f"{total} would go; nothing changed")
    return 0


def preview_fields(preview: RetentionPreview) -> dict[str, Any]:
    """The JSON object of a preview."""
    return {
        "topic": preview.topic,
        "config": msgspec.json.decode(preview.config.to_json()),
        "records": preview.records,
        "bytes": preview.bytes,
        "cap": _range_fields(preview.cap),
        "ttl": _range_fields(preview.ttl),
        "evict_floor": preview.evict_floor,
        "remaining": preview.remaining._asdict(),
        "groups": [loss._asdict() for loss in preview.groups],
        "held_by": list(preview.held_by),
    }


def _range_fields(evicted: EvictedRange) -> dict[str, Any]:
    times = {
        name: None if value is None else format_time(value * 1000)
        for name, value in (("first_ts", evicted.first_ms), ("last_ts", evicted.last_ms))
    }
    sizes = {"records": evicted.records, "bytes": evicted.bytes}
    return {**sizes, "first_seq": evicted.first_seq, "last_seq": evicted.last_seq, **times}


def _print_preview(preview: RetentionPreview, screen: Screen) -> None:
    lines = [
        f"{preview.topic}: {plural(evicted.records, 'record')}, {format_bytes(evicted.bytes)} would go to {cause}: "
        f"seqs {evicted.first_seq} to {evicted.last_seq}, {_times(evicted)}"
        for evicted, cause in ((preview.cap, "the caps"), (preview.ttl, "age"))
        if evicted.records
    ]
    left = preview.remaining
    lines.append(f"{preview.topic}: {plural(left.records, 'record')}, {format_bytes(left.bytes)} would stay")
    for loss in preview.groups:
        broken = f", and its hold of {format_bytes(loss.hold_bytes)} would break" if loss.hold_breaks else ""
        unread = f"{plural(loss.records, 'record')}, {format_bytes(loss.bytes)}"
        lines.append(f"  group {loss.group}, at {loss.position}, has not read {unread} of it{broken}")
    lines += [f"  group {name} holds records that would go without it" for name in preview.held_by]
    screen.print_result({}, *lines)


def _times(evicted: EvictedRange) -> str:
    first, last = (format_time((value or 0) * 1000) for value in (evicted.first_ms, evicted.last_ms))
    return f"written {first} to {last}"
