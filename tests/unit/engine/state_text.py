"""The whole state of an engine as text: its topics field by field, its manifest, its report, and its disk operations.

A test that compares such a text with an expected one notices every decision of a checkpoint or a recovery that leaves a
trace, also those that no reader sees: which file is synced before which, where replay begins, which floor is durable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Final
from zlib import crc32

import msgspec
from tests.unit.engine.harness import PATH, EngineHarness, Restart

from tidelog.engine import Engine, manifest
from tidelog.engine.config import TopicConfig
from tidelog.engine.memtable import MemTable
from tidelog.engine.queues.leases import QueueSnapshot
from tidelog.engine.segment import Segment
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, Error
from tidelog.formats import control_frames, frame
from tidelog.testing import SimDisk
from tidelog.wal import Position, WalRange, paths, replay_shard

EPOCH_MS: Final = 1_700_000_000_000  # where a manual clock begins
_SHORTER: Final[tuple[tuple[re.Pattern[str], Any], ...]] = (
    (re.compile(rf"\b{PATH}/"), ""),
    (re.compile(r"topics/0{7}"), "topics/"),
    (re.compile(r"(seg|wal)-0+(?=\d)"), r"\1-"),
    (re.compile(r"snapshot\.0+(?=\d)"), "snapshot."),
    (re.compile(r"NEWEST-0+(?=\d)"), "NEWEST-"),
    (re.compile(r"\b17000\d{8}\b"), lambda match: f"T+{int(match[0]) - EPOCH_MS}"),
)
_QUIET = ("reserve ", "lock ")  # how much space a WAL file has is tuning


def shorten(text: str) -> str:
    for pattern, replacement in _SHORTER:
        text = pattern.sub(replacement, text)
    return text


def _pairs(pairs: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in pairs)


def _changed(one: object, names: Iterable[str], **initial: object) -> str:
    """Those attributes that are not as they are at first."""
    found = ((name, getattr(one, name)) for name in names)
    return _pairs((name, value) for name, value in found if value != initial.get(name, type(value)()))


# ── topics ────────────────────────────────────────────────────────────────────────────────────────

_TOPIC = (
    "is_dropped", "delete_count", "last_assigned_seq", "staged_records", "staged_bytes", "durable_floor", "durable_seq",
    "had_retention_hold", "persists_floors", "history_seq", "applied_router_frame", "staged_router_frame",
    "dropped_segments", "damage", "due_ms", "last_write_ms",
)  # fmt: skip
_INDEX = ("head", "earliest", "count", "bytes", "last_ts", "deleted_ranges", "trimmed_ranges")
_PART = ("stop", "size", "live_records", "live_bytes", "first_ts", "last_ts")
_SEGMENT = ("is_sealed", "lacks_footer", "has_unsaved_deletions")
_MEMTABLE = ("segment", "origin", "is_persistent", "is_frozen")


def describe_topic(topic: TopicState) -> Iterator[str]:
    index, reservation = topic.index, topic.reservation
    yield f"topic {topic.id:X} {topic.name} {topic.config.durability}"
    yield "  " + _pairs((name, getattr(index, name)) for name in _INDEX)
    state = _changed(topic, _TOPIC)
    reserved = reservation.reserved_seq, reservation.reserving_seq, reservation.ceiling
    yield f"  marks={tuple(index.watermarks)} reserved={reserved} {state}"
    yield f"  config={_settings(topic.config.to_json())}"
    found = topic.recovery
    if found.lost_ranges or found.is_config_uncertain or any(found.watermarks) or found.head:
        marks = tuple(found.watermarks)
        yield f"  recovery: lost={found.lost_ranges} uncertain={found.is_config_uncertain} {marks=} head={found.head}"
    for part in index.parts:
        yield f"  {describe_part(part)}"
    for name, group in sorted(topic.groups.items()):
        yield f"  group {name} {_pairs((each.name, getattr(group, each.name)) for each in fields(group))}"
    for key, value in sorted(topic.producers.batches.items()):
        yield f"  producer {key} {value}"
    if keys := topic.producers.keys.persistent_keys():
        yield f"  keys {keys}"
    if isinstance(queue := topic.queue_snapshot, QueueSnapshot):
        yield f"  queue {vars(queue)}"
    if (upstream := topic.upstream) is not None:
        moved = upstream.cursor, upstream.saved_cursor, upstream.forwarded
        yield f"  fed from {upstream.source.name} by {[router.name for router in upstream.routers]} {moved}"
    if topic.hops or topic.forwarder_snapshot:
        yield f"  hops={topic.hops._ranges} snapshot={topic.forwarder_snapshot is not None}"


def _settings(encoded: bytes) -> dict[str, object]:
    """Those settings that are not the defaults."""
    default = msgspec.json.decode(TopicConfig().to_json())
    return {name: value for name, value in msgspec.json.decode(encoded).items() if value != default[name]}


def describe_part(part: Segment | MemTable) -> str:
    try:
        mask = part.deleted_mask()
        deleted: object = [] if mask is None else [part.base + at for at, flag in enumerate(mask.tolist()) if flag]
    except Corrupt as error:
        deleted = error.reason
    try:
        index = f"{crc32(part.entries().tobytes()):08x}"
    except Corrupt as error:
        index = error.reason
    head = f"{part.base}: {_changed(part, _PART)} {index=}" + (f" {deleted=}" if deleted else "")
    if isinstance(part, Segment):
        rebuilt = "" if part.rebuilt_index is None else f" index rebuilt: {crc32(part.rebuilt_index):08x}"
        return f"segment {head} {_changed(part, _SEGMENT)}".rstrip() + rebuilt
    pieces = [
        f"{piece.file.path}@{piece.pos}+{piece.size}" if isinstance(piece, WalRange) else len(piece)
        for piece in part._pieces
    ]
    return f"memtable {head} {_changed(part, _MEMTABLE)} {pieces=}"


def describe_engine(log: Engine) -> Iterator[str]:
    """Topics, report, health, and what the engine remembers for its next checkpoint."""
    report = log.report
    found = ((each.name, getattr(report, each.name)) for each in fields(report))
    yield "report: " + _pairs((name, value) for name, value in found if value)
    context = log._context
    yield f"engine: next_id={log._next_id} quota={context.quota.used} shards={len(context.shards)}"
    state = log._checkpoints.state
    starts, old = (
        [tuple(row_values(row)) for row in rows] for rows in (state.shard_positions, state.old_layout_shards)
    )
    yield (
        f"checkpoint: number={state.manifest_number} {starts=} {old=} needed={state.needs_checkpoint} "
        f"next={state.files_to_remove_next} now={state.files_to_remove}"
    )
    if not (health := log.health()).ok:
        yield f"health: {health}"
    for topic in sorted(log._topics.resident(), key=lambda topic: topic.id):
        yield from describe_topic(topic)


# ── manifest and disk ─────────────────────────────────────────────────────────────────────────────


def row_values(row: msgspec.Struct) -> Iterator[object]:
    return (getattr(row, name) for name in row.__struct_fields__)


def describe_manifest(disk: SimDisk) -> Iterator[str]:
    loaded = manifest.load_newest(disk, PATH)
    found = loaded.manifest
    rows = _pairs((name, [tuple(row_values(row)) for row in getattr(found, name)]) for name in ("groups", "fresh"))
    yield f"manifest {loaded.number}: next={found.next_topic_id} lagging={found.lagging} {rows}"
    for topic in found.topics:
        values = {name: getattr(topic, name) for name in topic.__struct_fields__}
        segments, values["config"] = values.pop("segments"), _settings(topic.config)
        initial = dict(
            zip(topic.__struct_fields__[-len(topic.__struct_defaults__) :], topic.__struct_defaults__, strict=True)
        )
        yield "  row " + _pairs((name, value) for name, value in values.items() if value != initial.get(name, ""))
        for segment in segments:
            yield "    " + _pairs((name, getattr(segment, name)) for name in segment.__struct_fields__)
    for router in found.routers:
        yield f"  {router!r}"


def describe_wal(disk: SimDisk, seen: set[tuple[str, int, int]]) -> Iterator[str]:
    """Frames of all shards that were not seen before: control frames with their bodies, records by their seqs."""
    wal = f"{PATH}/wal"
    for key in paths.list_shard_keys(disk, wal):
        directory = paths.shard_directory(wal, key)
        first = next(iter(paths.list_file_numbers(disk, directory)), 1)
        for window in replay_shard(disk, directory, Position(first, 0)):
            for pos in window.frame_pos.tolist():
                place = key, window.file_number, window.file_offset + pos
                if place in seen:
                    continue
                seen.add(place)
                parsed = frame.read_frame(window.buf, pos, len(window.buf), check=True)
                assert isinstance(parsed, frame.Frame)
                what: object = "records"
                if parsed.kind not in (frame.APPEND, frame.APPEND_BATCH):
                    what = control_frames.decode(parsed.kind, memoryview(window.buf)[parsed.data_pos : parsed.data_end])
                if isinstance(what, control_frames.CheckpointMark) and not what.topics:
                    continue  # the WAL's own
                if isinstance(what, control_frames.TopicCreate | control_frames.ConfigUpdate):
                    what = f"{type(what).__name__}({what.name!r}, {_settings(what.config)})"
                about = f"topic={parsed.topic_id} seq={parsed.seq} {parsed.ts_ms}"
                yield f"  wal {key} {place[1]}@{place[2]}: {about} {what}"


class Recorder:
    """Runs a history on one engine and writes down what each step does."""

    def __init__(self, **settings: Any) -> None:
        self.world = EngineHarness(**settings)
        self.text: list[str] = []
        self._seen = 0
        self._number = 0
        self._frames: set[tuple[str, int, int]] = set()

    @property
    def log(self) -> Engine:
        return self.world.log

    @property
    def disk(self) -> SimDisk:
        return self.world.disk

    def step(self, name: str, act: Callable[[], object] = lambda: None) -> None:
        """Run an action; write down its error, its disk operations, and the manifest if there is a new one."""
        self._seen = len(self.disk.trace)
        self.text.append(f"── {name}")
        try:
            act()
        except Error as error:
            self.text.append(shorten(f"{type(error).__name__}: {error}"))
        self._operations(self.disk.trace[self._seen :])
        self.text += map(shorten, describe_wal(self.disk, self._frames))
        newest = manifest.list_manifest_numbers(self.disk, PATH)[:1]
        if newest and newest[0] != self._number:
            self._number = newest[0]
            self.text += map(shorten, describe_manifest(self.disk))

    def _operations(self, trace: list[str]) -> None:
        for line in trace:
            if not line.startswith(_QUIET):
                self.text.append("    " + shorten(line))

    def state(self, log: Engine | None = None) -> None:
        self.text += map(shorten, describe_engine(log or self.log))
        if log is None:
            content = {path: content for path, content in self.disk.tree().items() if "/topics/" in path}
            self.text += [shorten(f"  {path} {len(each)} bytes {crc32(each):08x}") for path, each in content.items()]

    def restart(self, how: Restart, **settings: Any) -> None:
        """Open again and write down the operations of it and the whole state."""
        world = self.world
        world.settings |= settings
        if how == "reopen":
            self.step("close", self.log.close)
        else:
            world.disk = self.disk.reboot() if how == "kill" else self.disk.crash_image("none")
            world.disk._tracing = True
            self.text.append("disk: " + " ".join(shorten(path) for path in self.disk.tree()))

        def reopen() -> None:
            world.log = world.open(self.disk)

        self.step(f"restart: {how} {settings or ''}".rstrip(), reopen)
        self.state()

    def look(self, name: str, disk: SimDisk, **settings: Any) -> None:
        """Open another disk and write down what is found there; the engine that runs goes on."""
        self.text.append(f"── {name}")
        try:
            log = self.world.open(disk, **settings)
        except Error as error:
            self.text.append(shorten(f"{type(error).__name__}: {error}"))
        else:
            self.state(log)
