"""[shell] Commands that only look at topics: ls, show, read, follow. They work beside a writer and change nothing."""

from __future__ import annotations

from argparse import Namespace
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from tidelog.cli.data import check_there, reading
from tidelog.cli.render import Screen, between, bytes_, moment, several, span
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.engine import Counts, Engine, Gap, Page, Record, Topic, TopicState, manifest
from tidelog.engine.manifest import SegmentRow
from tidelog.errors import GapFound, TopicNotFound, Unavailable

_PAGE_RECORDS, _PAGE_BYTES = 10_000, 4 << 20
_POLL_S = 0.2
_encode = msgspec.json.Encoder().encode

# What is left of an acknowledged record, in the words of a table.
KEPT = {
    "fsync": "survives a power cut",
    "disk": "survives kill -9; of the last moments before a power cut, a first part",
    "memory": "promised nothing",
    "ephemeral": "gone when its process ends",
}


# ── ls, show ──────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """One line a topic."""
    with reading(args.dir, screen) as log:
        states = log.topics(args.prefix)
    screen.answer({"path": args.dir, "topics": [state_fields(state) for state in states]})
    if screen.json:
        return 0
    if states:
        titles = ("topic", "class", ">records", ">bytes", ">earliest", ">head", ">lost up to")
        screen.table(titles, [_row(state) for state in states])
    total = sum(state.count for state in states)
    print(f"{several(len(states), 'topic')}, {several(total, 'record')}")
    return 0


def _row(state: TopicState) -> list[str]:
    return [
        state.topic,
        state.config.durability,
        f"{state.count:,}",
        bytes_(state.bytes),
        str(state.earliest_seq) if state.count else "-",
        str(state.head_seq) if state.head_seq else "-",
        str(state.evict_floor - 1) if state.evict_floor > 1 else "-",
    ]


def state_fields(state: TopicState) -> dict[str, Any]:
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
    """Everything about one topic: what it holds, where that lies, what an ack means."""
    with reading(args.dir, screen) as log:
        topic = log.topic(args.topic, create=False)
        state = topic.state()
        newest = topic.read(state.head_seq - 1).records[-1:] if state.count else []
        segments = segments_of(args.dir, topic.id)
    last = moment(newest[0].ts_ms * 1000) if newest else None
    filed = segments[-1].stop - 1 if segments else 0
    config = msgspec.json.decode(state.config.to_json())
    screen.answer(
        {**state_fields(state), "last_ts": last, "config": config, "segments": [_fields(row) for row in segments]},
        f"{args.topic}: {several(state.count, 'record')}, {bytes_(state.bytes)}, next seq {state.next_seq}",
        f"class {state.config.durability}: an acked record {_kept(state)}",
        *([f"newest record: {last}"] if last else []),
        *(_story(state)),
    )
    if screen.json:
        return 0
    if segments:
        screen.table((">first", ">last", "state", ">data", ">live", "written (UTC)"), [_line(row) for row in segments])
    waiting = state.head_seq - filed
    if waiting > 0 and state.config.durability != "ephemeral":
        print(f"{several(waiting, 'seq')} from {filed + 1} on lie in the WAL until the next checkpoint")
    return 0


def _kept(state: TopicState) -> str:
    return KEPT[state.config.durability].replace("promised", "is promised").replace("gone", "is gone")


def _story(state: TopicState) -> list[str]:
    """What became of the seqs that have no record any more."""
    lines = []
    if state.evict_floor > 1:
        lines.append(
            f"{span(1, state.evict_floor)}: lost to a cap or to age; a reader that has not passed them is told"
        )
    if state.earliest_seq > state.evict_floor:
        lines.append(f"{span(state.evict_floor, state.earliest_seq)}: deleted, or never given to a record; silent")
    return lines


def segments_of(path: str, topic_id: int) -> Sequence[SegmentRow]:
    """The segments that the newest snapshot names."""
    rows = manifest.load(PosixDisk(), path).manifest.topics
    return next((row.segments for row in rows if row.id == topic_id), ())


def _line(row: SegmentRow) -> list[str]:
    return [
        str(row.base),
        str(row.stop - 1),
        "sealed" if row.sealed else "growing",
        bytes_(row.size),
        f"{row.live:,}",
        between(row.first_ts * 1000, row.last_ts * 1000),
    ]


def _fields(row: SegmentRow) -> dict[str, Any]:
    return {
        "first_seq": row.base,
        "last_seq": row.stop - 1,
        "sealed": row.sealed,
        "data_bytes": row.size,
        "live": row.live,
        "first_ts": moment(row.first_ts * 1000),
        "last_ts": moment(row.last_ts * 1000),
    }


# ── read ──────────────────────────────────────────────────────────────────────────────────────────


def read(args: Namespace, screen: Screen) -> int:
    """Print records, a page at a time, and where every seq of the range went."""
    cursor, left, counts = args.first, args.limit, Counts()
    with reading(args.dir, screen) as log:
        topic = log.topic(args.topic, create=False)
        while True:
            page = topic.read(cursor, min(left or _PAGE_RECORDS, _PAGE_RECORDS), **_wanted(args))
            put(page, args.topic, screen)
            moved, cursor, counts = page.next_from_seq != cursor, page.next_from_seq, counts + page.counts
            left = None if left is None else left - len(page.records)
            if page.caught_up or left == 0 or not moved:
                break
    if screen.json:
        end = {"counts": counts._asdict(), "next_from_seq": cursor, "head_seq": page.head_seq}
        screen.data(_encode(end) + b"\n")
        return 0
    screen.flush()
    ending = "caught up" if page.caught_up else f"go on with --from {cursor}"
    screen.say(f"{accounted(counts)}; the topic's head is {page.head_seq}, {ending}")
    return 0


def _wanted(args: Namespace) -> dict[str, Any]:
    return {"node": args.node, "bytes_max": _PAGE_BYTES, "strong": args.consistency == "strong"}


def accounted(counts: Counts) -> str:
    """`3 records, 2 deleted, 50 evicted`."""
    others = [f"{number:,} {name}" for name, number in counts._asdict().items() if number and name != "rows"]
    return ", ".join([several(counts.rows, "record"), *others])


def put(page: Page, topic: str, screen: Screen) -> None:
    """A page, its gap first: on its own line with --json, else as a remark."""
    if page.gap is not None:
        put_gap(page.gap, topic, screen)
    if screen.json:
        screen.data(b"".join([_encode(record_fields(record)) + b"\n" for record in page.records]))
    else:
        screen.data(b"".join([plain(record) + b"\n" for record in page.records]))


def put_gap(gap: Gap, topic: str, screen: Screen) -> None:
    if screen.json:
        screen.data(_encode({"gap": gap._asdict()}) + b"\n")
        return
    screen.flush()  # the remark stands where the gap is
    screen.say(gap_line(gap, topic))


_LOST_TO: Final = {
    "cap": "the topic's cap",
    "ttl": "their age",
    "mixed": "the topic's cap and their age",
    "source_trim": "the cap or age limit of the source of its router",
}


def gap_line(gap: Gap, topic: str) -> str:
    if gap.reason == "recreated":
        return f"gap: {topic} was dropped and made again; its seqs are other records now, reading from the first"
    lost = _LOST_TO[gap.reason]
    was, they = ("was", "it was") if gap.gap_from == gap.gap_to else ("were", "they were")
    return f"gap: {span(gap.gap_from, gap.gap_to + 1)} {was} lost to {lost} before {they} read"


def plain(record: Record) -> bytes:
    """The data as it went in: bytes as they are, anything else as JSON text."""
    return record.data if isinstance(record.data, bytes) else _encode(record.data)


def record_fields(record: Record) -> dict[str, Any]:
    """One record as a JSON object. Bytes that are not UTF-8 go as base64 under another name, so none are lost."""
    is_json = not isinstance(record.data, bytes)
    line: dict[str, Any] = {"seq": record.seq, "ts": moment(record.ts_ms * 1000), "json": is_json}
    try:
        line["data"] = record.data if is_json else record.data.decode()
    except UnicodeDecodeError:
        line["data_base64"] = b64encode(record.data).decode()
    for name in ("tag", "node", "meta"):
        value = getattr(record, name)
        if value is not None:
            line[name] = value
    return line


# ── follow ────────────────────────────────────────────────────────────────────────────────────────


def follow(args: Namespace, screen: Screen) -> int:
    """Print records as another process writes them, until the keyboard or --timeout ends it."""
    check_there(args.dir)
    with reading(args.dir, screen) as log:
        topic = log.topic(args.topic, create=False)
        if topic.config.durability == "ephemeral":
            screen.say(f"{args.topic} is ephemeral: its records never leave the process that writes them")
        try:
            _follow(log, topic, args, screen)
        except KeyboardInterrupt:
            screen.flush()
    return 0


def _follow(log: Engine, topic: Topic, args: Namespace, screen: Screen) -> None:
    clock, cursor, wanted = SystemClock(), args.first, _wanted(args)
    since_ms = clock.monotonic_ms()
    while True:
        page = topic.read(cursor, _PAGE_RECORDS, **wanted)
        if page.gap is not None and args.on_gap == "fail":
            raise _failed(page.gap, args.topic, screen)
        put(page._replace(gap=None) if args.on_gap == "skip" else page, args.topic, screen)
        screen.flush()
        if page.next_from_seq != cursor:
            cursor, since_ms = page.next_from_seq, clock.monotonic_ms()
            continue
        left_s = _POLL_S if args.timeout is None else args.timeout - (clock.monotonic_ms() - since_ms) / 1000
        if left_s <= 0:
            return
        try:
            topic.read(cursor, 1, timeout=min(_POLL_S, left_s))
        except TopicNotFound:
            again = _refreshed(log, args.topic)  # raises where none was made in its place
            if again.epoch != topic.epoch:
                since_ms = clock.monotonic_ms()
                cursor = _begun_again(again, args, screen)
            topic = again


def _refreshed(log: Engine, name: str) -> Topic:
    with suppress(Unavailable):  # the writer was faster; what is known stays, the next look comes soon
        log.refresh()
    return log.topic(name, create=False)


def _begun_again(topic: Topic, args: Namespace, screen: Screen) -> int:
    """The topic was dropped and made again: nothing that was read counts for it."""
    state = topic.state()
    gap = Gap(1, state.head_seq, "recreated", max(state.head_seq, 1), state.earliest_seq, state.head_seq)
    if args.on_gap == "fail":
        raise _failed(gap, args.topic, screen)
    if args.on_gap == "emit":
        put_gap(gap, args.topic, screen)
    return 0


def _failed(gap: Gap, topic: str, screen: Screen) -> GapFound:
    behind = 0 if gap.reason == "recreated" else gap.gap_to
    screen.unfinished = f"--from {behind} begins behind them, --on-gap emit or skip goes on by itself"
    return GapFound(topic, gap)
