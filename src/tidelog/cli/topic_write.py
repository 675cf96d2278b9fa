"""[shell] Commands that change topics: write, delete, drop, config, seal, checkpoint.

Each holds the directory for itself while it runs. Only write makes what is not there. An answer is
printed after the directory is closed, so what it says is on disk, whatever the class.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tidelog.cli.data import reading, wal_bytes, writing
from tidelog.cli.render import Screen, bytes_, several, span
from tidelog.cli.topic_look import segments_of
from tidelog.cli.write import Source, acked_fields, lines, written
from tidelog.disk.posix import PosixDisk
from tidelog.engine import Engine, EngineConfig, Topic, TopicConfig, manifest
from tidelog.engine.config import OWN
from tidelog.errors import BadInput, BatchTooLarge, TopicNotFound
from tidelog.formats import compute as pc

_LIMITS = EngineConfig()
_SCAN_SEQS, _SCAN_BYTES = 100_000, 64 << 20

MEANT = {
    "fsync": "each was on disk, safe from a power cut, before it was acked",
    "disk": "each was safe from kill -9 when it was acked; closing has synced them, so a power cut takes none now",
    "memory": "their acks promised nothing; closing has synced them, so a power cut takes none now",
    "ephemeral": "they were in memory only and are gone with this process",
}


# ── write ─────────────────────────────────────────────────────────────────────────────────────────


def write(args: Namespace, screen: Screen) -> int:
    """Write a record a line of standard input."""
    with writing(args.dir, screen, create=args.create) as log:
        topic = _topic(log, args)
        durability, next_seq = topic.config.durability, topic.head_seq + 1
        acked = screen.acked = range(next_seq, next_seq)
        with screen.bar(f"writing to {args.topic}") as bar:
            for batch in _batches(args):
                done = topic.append(batch, tag=args.tag, node=args.node, key=args.key).seqs
                acked = screen.acked = range(acked.start if acked else done.start, done.stop)
                if args.acks:
                    screen.answer(acked_fields(done), span(done.start, done.stop))
                    screen.flush()
                elif not sys.stdin.isatty():  # a bar would write over what a person types
                    bar(len(acked), None)
    meant = [f"class {durability}: {MEANT[durability]}"] if acked else []
    if args.acks:
        for line in (written(acked), *meant):
            screen.say(line)
    else:
        fields = {"topic": args.topic, **acked_fields(acked), "class": durability, "meant": MEANT[durability]}
        screen.answer(fields, written(acked), *meant)
    return 0


def _topic(log: Engine, args: Namespace) -> Topic:
    """The topic to write to; made where there is none and that is wanted."""
    try:
        topic = log.topic(args.topic, create=False)
    except TopicNotFound:
        if not args.create:
            raise
        return log.topic(args.topic, durability=args.durability or TopicConfig().durability)
    if args.durability not in (None, topic.config.durability):
        raise BadInput(
            f"{args.topic} has class {topic.config.durability}, and --class is for a topic that is made; nothing was "
            f"written, leave it out or first: tidelog topic config {args.dir} {args.topic} durability={args.durability}"
        )
    return topic


def _batches(args: Namespace) -> Iterable[list[Any]]:
    source: Source = sys.stdin.buffer  # type: ignore[assignment]  # a BufferedReader, which typeshed does not say
    found: Iterable[list[Any]] = lines(source, args.batch, _LIMITS.record_bytes_max)
    found = parsed(found) if args.json_lines else found
    return found if args.key is None else together(found)


def parsed(batches: Iterable[list[bytes]]) -> Iterator[list[Any]]:
    """Lines as JSON values; empty ones are passed over. One that is no JSON ends it before its batch is written."""
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
                    "not written, mend it, or write lines as bytes without --json-lines"
                ) from None
        if values:
            yield values


def together(batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """All of it as one batch: a key stands for one write, whatever pieces its lines came in."""
    whole: list[Any] = []
    for batch in batches:
        whole += batch
        if len(whole) > _LIMITS.batch_records_max:
            raise BatchTooLarge("lines under one key", count=len(whole), limit=_LIMITS.batch_records_max)
    if whole:
        yield whole


# ── delete ────────────────────────────────────────────────────────────────────────────────────────


class Gone(NamedTuple):
    """What a delete takes away, and what it leaves."""

    records: int
    size: int
    left: int
    earliest: int
    head: int


def delete(args: Namespace, screen: Screen) -> int:
    """Delete records by tag, by seq, or all before a seq; readers pass over them in silence."""
    if args.match is None and args.before is None and args.seqs is None:
        raise BadInput("nothing says what to delete; nothing was deleted, give --match, --before or --seqs")
    if args.dry_run:
        with reading(args.dir, screen) as log:
            topic = log.topic(args.topic, create=False)
            gone = would_delete(topic, match=args.match, before_seq=args.before, seqs=args.seqs)
    else:
        with writing(args.dir, screen) as log:
            topic = log.topic(args.topic, create=False)
            before = topic.bytes
            done = topic.delete(match=args.match, before_seq=args.before, seqs=args.seqs)
            gone = Gone(done.deleted, before - done.bytes, done.count, done.earliest_seq, done.head_seq)
    verb = "would delete" if args.dry_run else "deleted"
    screen.answer(
        {
            "topic": args.topic,
            "dry_run": args.dry_run,
            "deleted": gone.records,
            "bytes": gone.size,
            "left": gone.left,
            "earliest_seq": gone.earliest,
            "head_seq": gone.head,
        },
        f"{verb} {several(gone.records, 'record')} ({bytes_(gone.size)}); {gone.left:,} left, "
        + (f"{gone.earliest} is the first" if gone.left else f"the next seq is {gone.head + 1}"),
    )
    return 0


def would_delete(topic: Topic, *, match: str | None, before_seq: int | None, seqs: list[int] | None) -> Gone:
    """What `Topic.delete` would do, found by reading all that is there."""
    if seqs is not None and (match is not None or before_seq is not None):
        raise BadInput("--seqs stands by itself, without --match and --before; nothing was deleted")
    state = topic.state()
    step = min(_SCAN_SEQS, max(_SCAN_BYTES * state.count // max(state.bytes, 1), 1))
    records = size = earliest = 0
    for first in range(state.earliest_seq - 1, state.head_seq, step):
        table = topic.to_arrow(first, first + step)
        seq = table["seq"].to_numpy()
        meant = np.isin(seq, seqs) if seqs is not None else seq < (state.next_seq if before_seq is None else before_seq)
        if match is not None:
            tag = table["tag"].cast("string")
            fits = pc.starts_with(tag, match[:-1]) if match.endswith("*") else pc.equal(tag, match)
            tagged = pc.fill_null(pc.and_(fits, pc.not_equal(tag, "")), False)  # what has no tag never matches
            meant &= tagged.to_numpy(zero_copy_only=False).astype(bool)
        weight = sum(pc.fill_null(pc.binary_length(table[name]), 0).to_numpy() for name in ("data", "meta"))
        records, size = records + int(meant.sum()), size + int(weight[meant].sum())
        earliest = earliest or next(iter(seq[~meant].tolist()), 0)
    return Gone(records, size, state.count - records, earliest or state.next_seq, state.head_seq)


# ── drop, config ──────────────────────────────────────────────────────────────────────────────────


def drop(args: Namespace, screen: Screen) -> int:
    """Remove a topic and all its records, once somebody has said that this is meant."""
    if not args.yes and not args.if_empty:
        with reading(args.dir, screen) as log:
            _confirm(args.topic, log.topic(args.topic, create=False).count, screen)
    with writing(args.dir, screen) as log:
        count = log.topic(args.topic, create=False).count
        log.drop(args.topic, if_empty=args.if_empty)
    screen.answer({"topic": args.topic, "records": count}, f"dropped {args.topic} with {several(count, 'record')}")
    return 0


def _confirm(topic: str, count: int, screen: Screen) -> None:
    if not count:
        return
    holds = f"{topic} holds {several(count, 'record')}"
    if not sys.stdin.isatty():
        raise BadInput(f"{holds}; nothing was dropped, say --yes if you mean it")
    screen.complain(f"{holds}; drop it for good? yes or no:")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise BadInput(f"{holds}; nothing was dropped")


def config(args: Namespace, screen: Screen) -> int:
    """Show a topic's settings, or change some of them."""
    fields = dict(args.settings)
    if not fields:
        with reading(args.dir, screen) as log:
            now = _settings(log.topic(args.topic, create=False).config)
        screen.answer(now)
        if not screen.json:
            plain = _settings(TopicConfig())
            rows = [(name, _shown(value), "" if value == plain[name] else "set") for name, value in now.items()]
            screen.table(("setting", "value", ""), rows)
        return 0
    with writing(args.dir, screen) as log:
        topic = log.topic(args.topic, create=False)
        before, count = _settings(topic.config), topic.count
        topic = log.topic(args.topic, create=False, **fields)
        now, evicted = _settings(topic.config), count - topic.count
    changed = {name: (before[name], value) for name, value in now.items() if value != before[name]}
    lines = [f"{name}: {_shown(old)} -> {_shown(new)}" for name, (old, new) in changed.items()]
    if evicted:
        lines.append(f"{several(evicted, 'record')} over the new limits were evicted; readers are told of a gap")
    screen.answer(
        {"topic": args.topic, "changed": sorted(changed), "evicted": evicted, "config": now},
        *(lines or [f"{args.topic} has these settings already"]),
    )
    return 0


def _settings(config: TopicConfig) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.json.decode(config.to_json())
    return made


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# ── seal, checkpoint ──────────────────────────────────────────────────────────────────────────────


def seal(args: Namespace, screen: Screen) -> int:
    """Complete the segment that grows; the next record starts another."""
    with writing(args.dir, screen) as log:
        topic = log.topic(args.topic, create=False)
        known = {row.base for row in segments_of(args.dir, topic.id) if row.sealed}
        topic.seal()
        log.checkpoint()  # that completes it
    fresh = [row for row in segments_of(args.dir, topic.id) if row.sealed and row.base not in known]
    first, stop = (fresh[0].base, fresh[-1].stop) if fresh else (None, 0)
    screen.answer(
        {"topic": args.topic, "sealed": len(fresh), "first": first, "last": stop - 1 if fresh else None},
        f"sealed {span(first, stop)}" if first is not None else "nothing to seal: no segment of this topic grows",
    )
    return 0


def checkpoint(args: Namespace, screen: Screen) -> int:
    """Copy what only the WAL has into segments."""
    with writing(args.dir, screen, accept_loss=args.accept_loss) as log:
        replayed = log.report.frames
        log.checkpoint()
    loaded = manifest.load(PosixDisk(), args.dir)
    topics = [row for row in loaded.manifest.topics if not row.name.startswith(OWN)]
    segments, left = sum(len(row.segments) for row in topics), wal_bytes(args.dir)
    screen.answer(
        {
            "path": args.dir,
            "snapshot": loaded.number,
            "replayed": replayed,
            "topics": len(topics),
            "segments": segments,
            "wal_bytes": left,
        },
        f"snapshot {loaded.number} names {several(len(topics), 'topic')} in {several(segments, 'segment')}; "
        f"{several(replayed, 'frame')} came from the WAL, {bytes_(left)} of it are left",
    )
    return 0
