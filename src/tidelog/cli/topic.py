"""`tidelog topic …`: commands on the topics of a directory or of a server.

`ls`, `show`, `read`, `latest`, `cat-record` and `follow` work beside a writer and change nothing. `write`, `delete`,
`drop`, `config`, `compact`, `seal`, `rewrite` and `checkpoint` lock a directory. Only `write` creates a missing
topic. A result is printed after the directory is closed, so it is durable in every class.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, get_args

import msgspec
import numpy as np

from tidelog import protocols
from tidelog.cli.command import (
    DATABASE,
    Commands,
    Positional,
    add_command,
    add_dry_run,
    add_group,
    add_line_options,
    parse_count,
    parse_positive,
    parse_seconds,
    parse_seqs,
    parse_setting,
)
from tidelog.cli.log import acked_fields, describe_written, read_lines, stdin_source
from tidelog.cli.render import (
    Screen,
    bytes_field,
    format_bytes,
    format_seqs,
    format_time,
    format_time_range,
    plural,
    write_new_file,
)
from tidelog.cli.target import open_target, target_place, target_words, wal_bytes
from tidelog.clock import SystemClock
from tidelog.database import Database
from tidelog.disk.posix import PosixDisk
from tidelog.engine import (
    Counts,
    EngineConfig,
    Gap,
    LatestRecord,
    Page,
    Record,
    TopicConfig,
    TopicInfo,
    manifest,
)
from tidelog.engine.config import ADDED, OWN, Durability
from tidelog.engine.large_read import LargeData
from tidelog.errors import BadInput, BatchTooLarge, GapFound, NotFound, TopicNotFound, Unavailable
from tidelog.formats import lazy_compute as pc

_PAGE_RECORDS, _PAGE_BYTES = 10_000, 4 << 20
_STREAM_CHUNK_BYTES = 1 << 20
_POLL_S, _SERVER_POLL_S = 0.2, 20.0  # a reader of a directory has to look; a server answers as soon as it can
_encode = msgspec.json.Encoder().encode

# What happens to an acknowledged record.
DURABILITY_MEANING = {
    "fsync": "survives a power cut",
    "disk": "survives kill -9; of the last moments before a power cut, a first part",
    "memory": "promised nothing",
    "ephemeral": "gone when its process ends",
}


# ── ls, show ──────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """One line a topic."""
    with open_target(args, screen, write=False) as log:
        states = log.topics(args.prefix, after=args.after, limit=args.limit)
    total = sum(state.count for state in states)
    screen.print_result(
        {"path": target_place(args), "topics": [state_fields(state) for state in states]},
        titles=("topic", "class", ">records", ">bytes", ">earliest", ">head", ">lost up to"),
        rows=[_topic_row(state) for state in states],
        after=[f"{plural(len(states), 'topic')}, {plural(total, 'record')}"],
    )
    return 0


def _topic_row(state: TopicInfo) -> list[str]:
    return [
        state.topic,
        state.config.durability,
        f"{state.count:,}",
        format_bytes(state.bytes),
        str(state.earliest_seq) if state.count else "-",
        str(state.head_seq) if state.head_seq else "-",
        str(state.evict_floor - 1) if state.evict_floor > 1 else "-",
    ]


def state_fields(state: TopicInfo) -> dict[str, Any]:
    return {
        "topic": state.topic,
        "id": state.id,
        "class": state.config.durability,
        "count": state.count,
        "bytes": state.bytes,
        "head_seq": state.head_seq,
        "earliest_seq": state.earliest_seq,
        "evict_floor": state.evict_floor,
    }


def show(args: Namespace, screen: Screen) -> int:
    """Show one topic: its records, its segments, and what an ack means."""
    with open_target(args, screen, write=False) as log:
        topic = log.topic(args.topic, create=False)
        state = topic.state()
        newest = topic.read(state.head_seq - 1).records[-1:] if state.count else []
        listed = topic.segments()
        segments = listed.segments
    last = format_time(newest[0].ts_ms * 1000) if newest else None
    waiting, in_wal = listed.head_seq - listed.tail_from_seq, list[str]()
    if waiting > 0 and state.config.durability != "ephemeral":
        in_wal = [
            f"{plural(waiting, 'seq')} from {listed.tail_from_seq + 1} on are in the WAL until the next checkpoint"
        ]
    config = msgspec.json.decode(state.config.to_json())
    screen.print_result(
        {
            **state_fields(state),
            "last_ts": last,
            "config": config,
            "segments": [_segment_fields(row) for row in segments],
        },
        f"{args.topic}: {plural(state.count, 'record')}, {format_bytes(state.bytes)}, next seq {state.next_seq}",
        f"class {state.config.durability}: an acked record {_describe_durability(state)}",
        *([f"newest record: {last}"] if last else []),
        *(_describe_missing(state)),
        titles=(">first", ">last", "state", ">data", ">live", "written (UTC)"),
        rows=[_segment_row(row) for row in segments],
        after=in_wal,
    )
    return 0


def _describe_durability(state: TopicInfo) -> str:
    return DURABILITY_MEANING[state.config.durability].replace("promised", "is promised").replace("gone", "is gone")


def _describe_missing(state: TopicInfo) -> list[str]:
    """Describe the seqs without a record."""
    lines = []
    if state.evict_floor > 1:
        lines.append(f"{format_seqs(1, state.evict_floor)}: lost to a cap or to age; a reader before them gets a gap")
    if state.earliest_seq > state.evict_floor:
        lines.append(f"{format_seqs(state.evict_floor, state.earliest_seq)}: deleted, or never assigned; no gap")
    return lines


def _segment_row(row: protocols.Segment) -> list[str]:
    return [
        str(row.base),
        str(row.stop - 1),
        "sealed" if row.sealed else "growing",
        format_bytes(row.size),
        f"{row.live_records:,}",
        format_time_range(row.first_ts * 1000, row.last_ts * 1000),
    ]


def _segment_fields(row: protocols.Segment) -> dict[str, Any]:
    return {
        "first_seq": row.base,
        "last_seq": row.stop - 1,
        "sealed": row.sealed,
        "generation": row.generation,
        "data_bytes": row.size,
        "live": row.live_records,
        "first_ts": format_time(row.first_ts * 1000),
        "last_ts": format_time(row.last_ts * 1000),
    }


# ── read ──────────────────────────────────────────────────────────────────────────────────────────


def read(args: Namespace, screen: Screen) -> int:
    """Print records, a page at a time, and account for every seq of the range."""
    cursor, left, counts = args.first, args.limit, Counts()
    with open_target(args, screen, write=False) as log:
        topic = log.topic(args.topic, create=False)
        while True:
            page = topic.read(cursor, min(left or _PAGE_RECORDS, _PAGE_RECORDS), **_read_options(args))
            print_page(page, args.topic, screen)
            moved, cursor, counts = page.next_from_seq != cursor, page.next_from_seq, counts + page.counts
            left = None if left is None else left - len(page.records)
            if page.caught_up or left == 0 or not moved:
                break
    if screen.json:
        end = {"counts": counts._asdict(), "next_from_seq": cursor, "head_seq": page.head_seq}
        screen.write_data(_encode(end) + b"\n")
        return 0
    screen.flush()
    ending = "caught up" if page.caught_up else f"go on with --from {cursor}"
    screen.print_note(f"{describe_counts(counts)}; the topic's head is {page.head_seq}, {ending}")
    return 0


def _read_options(args: Namespace) -> dict[str, Any]:
    return {"node": args.node, "bytes_max": _PAGE_BYTES, "strong": args.consistency == "strong"}


def describe_counts(counts: Counts) -> str:
    """`3 records, 2 deleted, 50 evicted`."""
    others = [f"{number:,} {name}" for name, number in counts._asdict().items() if number and name != "rows"]
    return ", ".join([plural(counts.rows, "record"), *others])


def print_page(page: Page, topic: str, screen: Screen) -> None:
    """Print a page, its gap first: on its own line with --json, else as a note."""
    if page.gap is not None:
        print_gap(page.gap, topic, screen)
    if screen.json:
        screen.write_data(b"".join([_encode(record_fields(record)) + b"\n" for record in page.records]))
    else:
        screen.write_data(b"".join([plain_data(record) + b"\n" for record in page.records]))


def print_gap(gap: Gap, topic: str, screen: Screen) -> None:
    if screen.json:
        screen.write_data(_encode({"gap": gap._asdict()}) + b"\n")
        return
    screen.flush()  # the note appears where the gap is
    screen.print_note(gap_line(gap, topic))


_GAP_CAUSES: Final = {
    "cap": "the topic's cap",
    "ttl": "their age",
    "mixed": "the topic's cap and their age",
    "source_trim": "the cap or age limit of the source of its router",
}


def gap_line(gap: Gap, topic: str) -> str:
    if gap.reason == "recreated":
        return f"gap: {topic} was dropped and made again; its seqs are other records now, reading from the first"
    lost = _GAP_CAUSES[gap.reason]
    was, they = ("was", "it was") if gap.gap_from == gap.gap_to else ("were", "they were")
    return f"gap: {format_seqs(gap.gap_from, gap.gap_to + 1)} {was} lost to {lost} before {they} read"


def plain_data(record: Record) -> bytes:
    """The data as it was written: bytes unchanged, other values as JSON text; of a large record its reference."""
    if isinstance(record.data, LargeData):
        return _encode(record.data.to_reference())
    return record.data if isinstance(record.data, bytes) else _encode(record.data)


def record_fields(record: Record) -> dict[str, Any]:
    """The JSON object of a record."""
    is_json = not isinstance(record.data, bytes)
    line: dict[str, Any] = {"seq": record.seq, "ts": format_time(record.ts_ms * 1000), "json": is_json}
    value = record.data.to_reference() if isinstance(record.data, LargeData) else record.data
    line |= {"data": value} if is_json else bytes_field("data", record.data)
    for name in ("tag", "node", "meta"):
        value = getattr(record, name)
        if value is not None:
            line[name] = value
    return line


def cat_record(args: Namespace, screen: Screen) -> int:
    """Print the data of one record, of any size, or write it to a file."""
    with open_target(args, screen, write=False) as log:
        topic = log.topic(args.topic, create=False)
        with topic.open_record(args.seq) as reader:
            size, xxh3 = len(reader), reader.xxh3
            chunks = iter(lambda: reader.read(_STREAM_CHUNK_BYTES) or b"", b"")
            if args.output is None:
                for chunk in chunks:
                    screen.write_data(chunk)
                screen.flush()
                return 0
            with screen.progress_bar(f"reading record {args.seq}", total=size) as bar:
                write_new_file(args.output, chunks, lambda done: bar(done, size))
    screen.print_result(
        {"topic": args.topic, "seq": args.seq, "bytes": size, "xxh3": xxh3, "output": args.output},
        f"wrote {format_bytes(size)} of record {args.seq} to {args.output}, XXH3-64 {xxh3}",
    )
    return 0


# ── follow ────────────────────────────────────────────────────────────────────────────────────────


def follow(args: Namespace, screen: Screen) -> int:
    """Print records as another process writes them, until the keyboard or --timeout ends it."""
    with open_target(args, screen, write=False) as log:
        topic = log.topic(args.topic, create=False)
        if args.dir and topic.config.durability == "ephemeral":
            screen.print_note(f"{args.topic} is ephemeral: its records never leave the process that writes them")
        try:
            _follow_topic(log, topic, args, screen)
        except KeyboardInterrupt:
            screen.flush()
    return 0


def _follow_topic(log: protocols.Database, topic: protocols.Topic, args: Namespace, screen: Screen) -> None:
    clock, cursor, wanted = SystemClock(), args.first, _read_options(args)
    poll_s = _SERVER_POLL_S if args.server else _POLL_S
    since_ms = clock.monotonic_ms()
    while True:
        page = topic.read(cursor, _PAGE_RECORDS, **wanted)
        if page.gap is not None and args.on_gap == "fail":
            raise _gap_error(page.gap, args.topic, screen)
        print_page(page._replace(gap=None) if args.on_gap == "skip" else page, args.topic, screen)
        screen.flush()
        if page.next_from_seq != cursor:
            cursor, since_ms = page.next_from_seq, clock.monotonic_ms()
            continue
        left_s = poll_s if args.timeout is None else args.timeout - (clock.monotonic_ms() - since_ms) / 1000
        if left_s <= 0:
            return
        try:
            topic.read(cursor, 1, timeout=min(poll_s, left_s))
        except TopicNotFound:
            again = _reopen_topic(log, args.topic)  # raises unless it was created again
            if again.epoch != topic.epoch:
                since_ms = clock.monotonic_ms()
                cursor = _restart_recreated(again, args, screen)
            topic = again


def _reopen_topic(log: protocols.Database, name: str) -> protocols.Topic:
    if isinstance(log, Database):
        with suppress(Unavailable):  # the writer was faster; the next poll tries again
            log.refresh()
    return log.topic(name, create=False)


def _restart_recreated(topic: protocols.Topic, args: Namespace, screen: Screen) -> int:
    """Report a topic that was dropped and created again, and start at its beginning."""
    state = topic.state()
    gap = Gap(1, state.head_seq, "recreated", max(state.head_seq, 1), state.earliest_seq, state.head_seq)
    if args.on_gap == "fail":
        raise _gap_error(gap, args.topic, screen)
    if args.on_gap == "emit":
        print_gap(gap, args.topic, screen)
    return 0


def _gap_error(gap: Gap, topic: str, screen: Screen) -> GapFound:
    after = 0 if gap.reason == "recreated" else gap.gap_to
    screen.unfinished_hint = f"--from {after} begins after them, --on-gap emit or skip continues by itself"
    return GapFound(topic, gap)


_ENGINE_LIMITS = EngineConfig()
_SCAN_CHUNK_SEQS, _SCAN_CHUNK_BYTES = 100_000, 64 << 20

ACK_MEANING = {
    "fsync": "each was on disk, safe from a power cut, before it was acked",
    "disk": "each was safe from kill -9 when it was acked; closing has synced them, so a power cut takes none now",
    "memory": "their acks promised nothing; closing has synced them, so a power cut takes none now",
    "ephemeral": "they were in memory only and are gone with this process",
}


# ── write ─────────────────────────────────────────────────────────────────────────────────────────


def write(args: Namespace, screen: Screen) -> int:
    """Write a record a line of standard input, or one record with --stream."""
    if args.stream is not None:
        return _write_stream(args, screen)
    with open_target(args, screen, write=True, create=args.create) as log:
        topic = _topic_to_write(log, args)
        durability, next_seq = topic.config.durability, topic.head_seq + 1
        acked = screen.acked = range(next_seq, next_seq)
        with screen.progress_bar(f"writing to {args.topic}") as bar:
            for batch in _batches(args):
                done = topic.append(batch, tag=args.tag, node=args.node, key=args.key).seqs
                acked = screen.acked = range(acked.start if acked else done.start, done.stop)
                if args.acks:
                    screen.print_result(acked_fields(done), format_seqs(done.start, done.stop))
                    screen.flush()
                elif not sys.stdin.isatty():  # a bar would write over what a person types
                    bar(len(acked), None)
    meaning = _ack_meaning(args, durability)
    meant = [f"class {durability}: {meaning}"] if acked else []
    if args.acks:
        for line in (describe_written(acked), *meant):
            screen.print_note(line)
    else:
        fields = {"topic": args.topic, **acked_fields(acked), "class": durability, "meant": meaning}
        screen.print_result(fields, describe_written(acked), *meant)
    return 0


def _write_stream(args: Namespace, screen: Screen) -> int:
    """Write one record from a file or from standard input."""
    if args.json_lines or args.acks:
        raise BadInput("--stream is one record of bytes, without --json-lines and --acks; nothing was written")
    total: int | None = None
    chunks: Iterable[bytes]
    if args.stream == "-":
        source = stdin_source()
        chunks = iter(lambda: source.read1(_STREAM_CHUNK_BYTES), b"")
    else:
        try:
            file = PosixDisk().open(args.stream)
            total = file.size()
        except OSError as error:
            raise BadInput(f"{args.stream} cannot be read: {error}; nothing was written, check the path") from None
        chunks = (file.read(pos, _STREAM_CHUNK_BYTES) for pos in range(0, total, _STREAM_CHUNK_BYTES))
    with open_target(args, screen, write=True, create=args.create) as log:
        topic = _topic_to_write(log, args)
        durability = topic.config.durability
        with screen.progress_bar(f"writing to {args.topic}", total=total) as bar:

            def counted() -> Iterator[bytes]:
                done = 0
                for chunk in chunks:
                    yield chunk
                    done += len(chunk)
                    bar(done, total)

            acked = screen.acked = topic.append_stream(counted(), tag=args.tag, node=args.node, key=args.key).seqs
    meaning = _ack_meaning(args, durability)
    fields = {"topic": args.topic, **acked_fields(acked), "class": durability, "meant": meaning}
    screen.print_result(fields, describe_written(acked), f"class {durability}: {meaning}")
    return 0


def _ack_meaning(args: Namespace, durability: str) -> str:
    """What the acks of a write mean now. A directory has been closed since, a server goes on."""
    return DURABILITY_MEANING[durability] if args.server else ACK_MEANING[durability]


def _topic_to_write(log: protocols.Database, args: Namespace) -> protocols.Topic:
    """Open the topic to write to, or create it with --create."""
    topic = log.find(args.topic)
    if topic is None:
        if not args.create:
            raise TopicNotFound(args.topic)
        return log.topic(args.topic, durability=args.durability or TopicConfig().durability)
    if args.durability not in (None, topic.config.durability):
        raise BadInput(
            f"{args.topic} has class {topic.config.durability}, and --class is for a topic that is made; nothing was "
            f"written, leave it out or first: tidelog topic config {target_words(args, args.topic)} "
            f"durability={args.durability}"
        )
    return topic


def _batches(args: Namespace) -> Iterable[list[Any]]:
    batches: Iterable[list[Any]] = read_lines(stdin_source(), args.batch, _ENGINE_LIMITS.record_bytes_max)
    batches = parse_json_lines(batches) if args.json_lines else batches
    return batches if args.key is None else join_batches(batches)


def parse_json_lines(batches: Iterable[list[bytes]]) -> Iterator[list[Any]]:
    """Parse lines as JSON values and skip empty ones. Raises before the batch of a bad line is written."""
    number = 0
    for batch in batches:
        values = []
        for line in batch:
            number += 1
            try:
                if line.strip():
                    values.append(msgspec.json.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadInput(
                    f"line {number} of standard input is not JSON: {error}; it and the lines that came with it were "
                    "not written, correct it, or write lines as bytes without --json-lines"
                ) from None
        if values:
            yield values


def join_batches(batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Join all lines into one batch: an idempotency key is for one write."""
    joined: list[Any] = []
    for batch in batches:
        joined += batch
        if len(joined) > _ENGINE_LIMITS.batch_records_max:
            raise BatchTooLarge("lines under one key", count=len(joined), limit=_ENGINE_LIMITS.batch_records_max)
    if joined:
        yield joined


# ── delete ────────────────────────────────────────────────────────────────────────────────────────


class DeleteSummary(NamedTuple):
    """The effect of a delete."""

    records: int
    size: int
    remaining: int
    earliest: int
    head: int


def delete(args: Namespace, screen: Screen) -> int:
    """Delete records by tag, by seq, or all before a seq; readers skip them without a gap."""
    if args.match is None and args.before is None and args.seqs is None:
        raise BadInput("no records are selected; nothing was deleted, give --match, --before or --seqs")
    if args.dry_run:
        with open_target(args, screen, write=False) as log:
            topic = log.topic(args.topic, create=False)
            gone = would_delete(topic, match=args.match, before_seq=args.before, seqs=args.seqs)
    else:
        with open_target(args, screen, write=True) as log:
            topic = log.topic(args.topic, create=False)
            before = topic.bytes
            done = topic.delete(match=args.match, before_seq=args.before, seqs=args.seqs)
            gone = DeleteSummary(done.deleted, before - done.bytes, done.count, done.earliest_seq, done.head_seq)
    verb = "would delete" if args.dry_run else "deleted"
    screen.print_result(
        {
            "topic": args.topic,
            "dry_run": args.dry_run,
            "deleted": gone.records,
            "bytes": gone.size,
            "left": gone.remaining,
            "earliest_seq": gone.earliest,
            "head_seq": gone.head,
        },
        f"{verb} {plural(gone.records, 'record')} ({format_bytes(gone.size)}); {gone.remaining:,} left, "
        + (f"{gone.earliest} is the first" if gone.remaining else f"the next seq is {gone.head + 1}"),
    )
    return 0


def would_delete(
    topic: protocols.Topic, *, match: str | None, before_seq: int | None, seqs: list[int] | None
) -> DeleteSummary:
    """Compute the effect of `Topic.delete` by reading every record."""
    if seqs is not None and (match is not None or before_seq is not None):
        raise BadInput("--seqs stands by itself, without --match and --before; nothing was deleted")
    state = topic.state()
    step = min(_SCAN_CHUNK_SEQS, max(_SCAN_CHUNK_BYTES * state.count // max(state.bytes, 1), 1))
    records = size = earliest = 0
    for first in range(state.earliest_seq - 1, state.head_seq, step):
        table = topic.to_arrow(first, first + step)
        seq = table["seq"].to_numpy()
        meant = np.isin(seq, seqs) if seqs is not None else seq < (state.next_seq if before_seq is None else before_seq)
        if match is not None:
            tag = table["tag"].cast("string")
            fits = pc.starts_with(tag, match[:-1]) if match.endswith("*") else pc.equal(tag, match)
            tagged = pc.fill_null(pc.and_(fits, pc.not_equal(tag, "")), False)  # a record without a tag never matches
            meant &= tagged.to_numpy(zero_copy_only=False).astype(bool)
        weight = sum(pc.fill_null(pc.binary_length(table[name]), 0).to_numpy() for name in ("data", "meta"))
        records, size = records + int(meant.sum()), size + int(weight[meant].sum())
        earliest = earliest or next(iter(seq[~meant].tolist()), 0)
    return DeleteSummary(records, size, state.count - records, earliest or state.next_seq, state.head_seq)


# ── drop, config ──────────────────────────────────────────────────────────────────────────────────


def drop(args: Namespace, screen: Screen) -> int:
    """Remove a topic and all its records, after a confirmation."""
    if not args.yes and not args.if_empty:
        with open_target(args, screen, write=False) as log:
            _confirm(args.topic, log.topic(args.topic, create=False).count, screen)
    with open_target(args, screen, write=True) as log:
        count = log.topic(args.topic, create=False).count
        log.drop(args.topic, if_empty=args.if_empty)
    screen.print_result({"topic": args.topic, "records": count}, f"dropped {args.topic} with {plural(count, 'record')}")
    return 0


def _confirm(topic: str, count: int, screen: Screen) -> None:
    if not count:
        return
    holds = f"{topic} holds {plural(count, 'record')}"
    if not sys.stdin.isatty():
        raise BadInput(f"{holds}; nothing was dropped, say --yes if you mean it")
    screen.print_error(f"{holds}; drop it for good? yes or no:")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise BadInput(f"{holds}; nothing was dropped")


def config(args: Namespace, screen: Screen) -> int:
    """Show a topic's settings, or change some of them."""
    fields = dict(args.settings)
    if not fields:
        with open_target(args, screen, write=False) as log:
            now = _config_fields(log.topic(args.topic, create=False).config)
        screen.print_result(now)
        if not screen.json:
            plain = _config_fields(TopicConfig())
            rows = [(name, _format_value(value), "" if value == plain[name] else "set") for name, value in now.items()]
            screen.print_table(("setting", "value", ""), rows)
        return 0
    with open_target(args, screen, write=True) as log:
        topic = log.topic(args.topic, create=False)
        before, count = _config_fields(topic.config), topic.count
        topic = log.topic(args.topic, create=False, **fields)
        now, evicted = _config_fields(topic.config), count - topic.count
    changed = {name: (before[name], value) for name, value in now.items() if value != before[name]}
    lines = [f"{name}: {_format_value(old)} -> {_format_value(new)}" for name, (old, new) in changed.items()]
    if evicted:
        lines.append(f"{plural(evicted, 'record')} over the new limits were evicted; readers get a gap")
    screen.print_result(
        {"topic": args.topic, "changed": sorted(changed), "evicted": evicted, "config": now},
        *(lines or [f"{args.topic} has these settings already"]),
    )
    return 0


def _config_fields(config: TopicConfig) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(config.to_json())
    return fields | {name: getattr(config, name) for name in ADDED}


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# ── seal, checkpoint ──────────────────────────────────────────────────────────────────────────────


def seal(args: Namespace, screen: Screen) -> int:
    """Seal the active segment; the next record starts another."""
    with open_target(args, screen, write=True) as log:
        topic = log.topic(args.topic, create=False)
        known = {segment.base for segment in topic.segments().segments if segment.sealed}
        topic.seal()
        log.checkpoint()  # completes the segment
        new = [segment for segment in topic.segments().segments if segment.sealed and segment.base not in known]
    first, stop = (new[0].base, new[-1].stop) if new else (None, 0)
    screen.print_result(
        {"topic": args.topic, "sealed": len(new), "first": first, "last": stop - 1 if new else None},
        f"sealed {format_seqs(first, stop)}"
        if first is not None
        else "nothing to seal: no segment of this topic grows",
    )
    return 0


def compact(args: Namespace, screen: Screen) -> int:
    """Keep only the newest record of each key."""
    with open_target(args, screen, write=True) as log:
        done = log.topic(args.topic, create=False).compact()
    screen.print_result(
        {"topic": args.topic, **done._asdict()},
        f"{args.topic}: {plural(done.records, 'record')}, {format_bytes(done.bytes)} removed, "
        f"{plural(done.tombstones, 'tombstone')} of them; compacted up to seq {done.compacted_to}",
    )
    return 0


def latest(args: Namespace, screen: Screen) -> int:
    """Print the newest record of each key, or of one."""
    count = 0
    with open_target(args, screen, write=False) as log:
        table = log.topic(args.topic, create=False).latest(prefix=args.prefix)
        if args.key is not None:
            record = table.get(args.key)
            if record is None:
                raise NotFound(f"{args.topic} has no record with the key {args.key!r}; nothing was changed")
            _print_latest(LatestRecord(args.key, record), screen)
            return 0
        for row in islice(table, args.limit):
            _print_latest(row, screen)
            count += 1
    if not screen.json:
        screen.flush()
        screen.print_note(plural(count, "key"))
    return 0


def _print_latest(row: LatestRecord, screen: Screen) -> None:
    if screen.json:
        screen.write_data(_encode({"key": row.key, **record_fields(row.record)}) + b"\n")
    else:
        screen.write_data(row.key.encode() + b"\t" + plain_data(row.record) + b"\n")


def checkpoint(args: Namespace, screen: Screen) -> int:
    """Copy records that are only in the WAL into segments."""
    settings = {"accept_loss": True} if args.accept_loss else {}
    replayed = 0
    with open_target(args, screen, write=True, **settings) as log:
        if isinstance(log, Database):
            replayed = log.report.frames
        log.checkpoint()
    if args.server:
        screen.print_result({"path": args.server}, f"{args.server} has copied what only the WAL had into segments")
        return 0
    loaded = manifest.load_newest(PosixDisk(), args.dir)
    topics = [row for row in loaded.manifest.topics if not row.name.startswith(OWN)]
    segments, left = sum(len(row.segments) for row in topics), wal_bytes(args.dir)
    screen.print_result(
        {
            "path": args.dir,
            "snapshot": loaded.number,
            "replayed": replayed,
            "topics": len(topics),
            "segments": segments,
            "wal_bytes": left,
        },
        f"snapshot {loaded.number} names {plural(len(topics), 'topic')} in {plural(segments, 'segment')}; "
        f"{plural(replayed, 'frame')} came from the WAL, {format_bytes(left)} of it are left",
    )
    return 0


def rewrite(args: Namespace, screen: Screen) -> int:
    """Rewrite segments without the bytes of deleted records."""
    with open_target(args, screen, write=True) as log, screen.progress_bar("rewriting"):
        result = log.rewrite(args.topic, force=args.force)
    screen.print_result(
        {
            "topic": args.topic,
            "segments": [
                {
                    "first_seq": file.base,
                    "generation": file.generation,
                    "records_removed": file.records_removed,
                    "bytes_before": file.bytes_before,
                    "bytes_after": file.bytes_after,
                }
                for file in result.files
            ],
            "skipped": [{"first_seq": each.base, "reason": each.reason} for each in result.skipped],
            "bytes_reclaimed": result.bytes_reclaimed,
        },
        f"rewrote {plural(result.segments, 'segment')} without {plural(result.records_removed, 'deleted record')}; "
        f"{format_bytes(result.bytes_reclaimed)} were freed",
        titles=(">first", ">generation", ">removed", ">before", ">after") if result.files else (),
        rows=[
            [
                str(file.base),
                str(file.generation),
                f"{file.records_removed:,}",
                format_bytes(file.bytes_before),
                format_bytes(file.bytes_after),
            ]
            for file in result.files
        ],
        after=[f"segment {each.base} was left: {each.reason}" for each in result.skipped],
    )
    return 1 if result.skipped else 0


_DESCRIPTION = """\
A topic is a named, numbered sequence of records; a database holds as many as you like. Every record
has a seq, assigned once, and is bytes or JSON. DATABASE is a directory, which one process writes and any
number read, or the URL of a server: tidelog topic ls http://127.0.0.1:4000.

what an ack means, by class:
  fsync      the record survives a power cut
  disk       it survives kill -9; a power cut may take the last moments (the default)
  memory     nothing is promised
  ephemeral  it is in memory only and ends with its process

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
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
    verbs = add_group(commands, "topic", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    _add_lists(verbs)
    _add_write(verbs)
    _add_reads(verbs)
    _add_removals(verbs)
    _add_maintenance(verbs)


def _add_lists(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "ls",
        ls,
        DATABASE,
        summary="list topics",
        description="List the topics of a directory: class, records, bytes, the first and the last seq, and up to "
        "which seq\n"
        "records were lost to a cap or to age. Reads only; a writer may be at work.",
        examples="tidelog topic ls data\ntidelog topic ls data --prefix orders. --json",
    )
    parser.add_argument("--prefix", default="", metavar="P", help="only topics whose name begins so")
    parser.add_argument("--after", default="", metavar="NAME", help="only topics whose name comes after this one")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="at most so many topics")
    add_command(
        subcommands,
        "show",
        show,
        DATABASE,
        "TOPIC",
        summary="show one topic: its records and segments",
        description="Show the records of a topic, what its acks mean, why seqs have no record any more, and its\n"
        "segments. Works beside a writer, and only reads.",
        examples="tidelog topic show data orders",
    )


def _add_write(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "write",
        write,
        DATABASE,
        "TOPIC",
        key_option="",
        summary="write records from standard input",
        description="Write each line of standard input as one record, without its newline: as bytes, or with "
        "--json-lines\n"
        "as the JSON value it holds. Directory and topic are made where there are none. Lines that come together\n"
        "are one batch, written as a whole or not at all. The seqs are printed when all is written, and what\n"
        "their acks meant.",
        examples="printf 'hello\\nworld\\n' | tidelog topic write data greetings\n"
        """echo '{"sku": "A", "qty": 1}' | tidelog topic write data orders --json-lines --class fsync --tag order-7\n"""
        "tidelog topic write data videos --stream clip.mp4 --tag clip-1",
    )
    parser.add_argument(
        "--stream",
        metavar="FILE",
        help="write this file (-: all of standard input) as one record of bytes, in constant memory, up to the topic's "
        "max_record_bytes",
    )
    parser.add_argument("--json-lines", action="store_true", help="each line is a JSON value; empty lines are left out")
    add_line_options(parser)
    parser.add_argument("--tag", help="what to delete the records by later")
    parser.add_argument("--node", help="where the records come from; readers may leave out their own")
    parser.add_argument(
        "--key",
        help="all of standard input is one write under this idempotency key. Keys are remembered by the process that "
        "has the directory open: a second command does not know them",
    )
    parser.add_argument(
        "--class",
        dest="durability",
        choices=get_args(Durability),
        help="what acks mean in a topic that is made (disk); see tidelog topic --help",
    )
    parser.add_argument(
        "--create", action=BooleanOptionalAction, default=True, help="make directory and topic where there are none"
    )
    parser.add_argument("--acks", action="store_true", help="print the seqs of every batch as soon as it is acked")


def _add_reads(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "read",
        read,
        DATABASE,
        "TOPIC",
        summary="print records",
        description="Print the data of every record and a newline, or with --json one object a line: seq, ts,\n"
        "json (whether data is JSON), data (data_base64 where bytes are not UTF-8), tag, node, meta. Where records\n"
        "were lost before they were read, a gap says which: on standard error, or as an object. The end\n"
        "accounts for every seq of the range. Reads only; a writer may be at work.",
        examples="tidelog topic read data orders\ntidelog topic read data orders --from 100 --limit 10 --json",
    )
    _add_read_options(parser)
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="this many records at most")
    parser = add_command(
        subcommands,
        "cat-record",
        cat_record,
        DATABASE,
        "TOPIC",
        summary="print the data of one record, of any size",
        description="Print the data of one record as it was written, in constant memory, or write it to a new file.\n"
        "Every chunk of a large record is verified as it is read. Reads only; a writer may be at work.",
        examples="tidelog topic cat-record data videos --seq 7 --output clip.mp4\n"
        "tidelog topic cat-record data orders --seq 3",
    )
    parser.add_argument("--seq", type=parse_positive, required=True, metavar="N", help="the seq of the record")
    parser.add_argument("--output", metavar="FILE", help="a file that does not exist yet, instead of standard output")
    parser = add_command(
        subcommands,
        "latest",
        latest,
        DATABASE,
        "TOPIC",
        key_option="",
        summary="print the newest record of each key",
        description="Print the newest record of each key of a topic with compaction: the key, a tab and the data, or "
        "with\n"
        "--json one object a line. Keys come in a fixed order of their own. Reads only; a writer may be at work.",
        examples="tidelog topic latest data users\ntidelog topic latest data users --key 42 --json",
    )
    parser.add_argument("--key", help="only this key; exit code 2 if it has no record")
    parser.add_argument("--prefix", default="", metavar="P", help="only keys that begin so")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="this many keys at most")
    parser = add_command(
        subcommands,
        "follow",
        follow,
        DATABASE,
        "TOPIC",
        summary="print records as another process writes them",
        description="Print what is there and then what another process writes, as read does. Ctrl-C ends it, with "
        "exit\n"
        "code 0. Where records were lost to a cap or to age before they were read, or the topic was dropped\n"
        "and made again, --on-gap says what to do.",
        examples="tidelog topic follow data orders --json\ntidelog topic follow data orders --from 100 --timeout 30",
    )
    _add_read_options(parser)
    parser.add_argument(
        "--timeout", type=parse_seconds, metavar="S", help="end when no record came for this many seconds"
    )
    parser.add_argument(
        "--on-gap",
        choices=("fail", "emit", "skip"),
        default="fail",
        help="fail: end with exit code 2 (the default). emit: say so and go on. skip: just go on",
    )


def _add_read_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--consistency",
        choices=("eventual", "strong"),
        default="eventual",
        help="eventual: what is acknowledged, or as the topic says (the default). strong: only what survives a power "
        "cut; waits for a sync. Topics of class disk or fsync",
    )
    parser.add_argument(
        "--from",
        type=parse_count,
        dest="first",
        default=0,
        metavar="N",
        help="the last seq you have: later records are printed (0: from the first)",
    )
    parser.add_argument(
        "--node", action="append", help="leave out the records of this node, usually your own; repeatable"
    )


def _add_removals(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "delete",
        delete,
        DATABASE,
        "TOPIC",
        summary="delete records by tag or seq",
        description="Delete existing records. Readers skip them: a delete is no gap. It cannot be undone, and there\n"
        "is no question; --dry-run prints what it would remove.",
        examples="tidelog topic delete data orders --match order-7 --dry-run\n"
        "tidelog topic delete data orders --match 'order-*' --before 1000\n"
        "tidelog topic delete data orders --seqs 3,5,8",
    )
    parser.add_argument(
        "--match", metavar="TAG", help="records with this tag; with a * at its end, with tags that begin so"
    )
    parser.add_argument(
        "--before", type=parse_count, metavar="N", help="records below this seq; of those that match, if both"
    )
    parser.add_argument("--seqs", type=parse_seqs, metavar="A,B", help="the records with these seqs")
    add_dry_run(parser)
    parser = add_command(
        subcommands,
        "drop",
        drop,
        DATABASE,
        "TOPIC",
        summary="remove a topic with all its records",
        description="Remove a topic with all its records. This cannot be undone: on a terminal it asks, elsewhere it "
        "wants\n"
        "--yes. A new topic of the same name starts again, and its readers get a gap.",
        examples="tidelog topic drop data orders --if-empty\ntidelog topic drop data orders --yes",
    )
    parser.add_argument("--if-empty", action="store_true", help="only if it holds no record; then nothing is asked")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _add_maintenance(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "config",
        config,
        DATABASE,
        "TOPIC",
        Positional("name=value...", parse_setting),
        summary="show or change a topic's settings",
        description="Show the settings of a topic, or set those that are given and leave the others. Times take units\n"
        "(500ms, 30s, 15m, 12h, 7d), sizes as well (512k, 64m, 2g).\n"
        "  durability    what an ack means: ephemeral, memory, disk, fsync\n"
        "  ttl_ms        records older than this are lost; 0: none\n"
        "  cap_records, cap_bytes, discard    how much it holds, and whether the old or the write gives way\n"
        "  compaction    keep only the newest record of each key: latest_by_tag, or a JSON pointer as /user/id\n"
        "  tombstone_delay_ms    how long the record stays that marks its key as deleted",
        examples="tidelog topic config data orders\ntidelog topic config data orders durability=fsync ttl_ms=7d",
    )
    add_command(
        subcommands,
        "seal",
        seal,
        DATABASE,
        "TOPIC",
        summary="complete the segment that grows",
        description="Complete the segment file that grows; the next record starts another. Sealed files never change, "
        "so\n"
        "they can be copied away at leisure.",
        examples="tidelog topic seal data orders",
    )
    add_command(
        subcommands,
        "compact",
        compact,
        DATABASE,
        "TOPIC",
        summary="keep only the newest record of each key",
        description="Remove the records of a topic with compaction that newer ones of their key replaced, and "
        "tombstones\n"
        "whose delay has passed. Readers skip them: this is no gap. A running writer does this by itself.",
        examples="tidelog topic compact data users\ntidelog topic compact data users --json",
    )
    parser = add_command(
        subcommands,
        "rewrite",
        rewrite,
        DATABASE,
        "TOPIC",
        summary="free the bytes of deleted records",
        description="Give sealed segments new files without the bytes of deleted records: those of which half is\n"
        "deleted, which also happens in the background. Seqs and times stay. Exits with 1 if one does not verify.",
        examples="tidelog topic rewrite data orders\ntidelog topic rewrite data orders --force",
    )
    parser.add_argument("--force", action="store_true", help="every segment with a deleted record")
    parser = add_command(
        subcommands,
        "checkpoint",
        checkpoint,
        DATABASE,
        summary="move what only the WAL has into segments",
        description="Recover the directory as a writer does, copy what only the WAL has into segments, and let the "
        "WAL go.\n"
        "A running writer does this by itself; after a crash the next start is faster for it.",
        examples="tidelog topic checkpoint data",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on where acknowledged records were lost to damage, which is refused otherwise; what is cut off is "
        "kept in quarantine/",
    )
