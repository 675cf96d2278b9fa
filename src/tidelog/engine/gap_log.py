"""The gap log: one row per removal, in an internal topic.

    Removal (in memory) ──► its cause is synced ──► row in `_tidelog.gaps` ──► synced within a tick

The order keeps the log correct after any crash:
  1. A row is written only when its removal survives a power cut: the topic's shard is synced first, and floors that
     replay cannot derive are made durable. So no row reports a removal that is undone later.
  2. A manifest is saved, and deletion vectors are written, only when all removals they reflect have rows
     (`flush_durably`). So a removal that replay does not repeat is in the log.
  3. Removals that replay repeats are recorded again, and those that the log has already are dropped
     (`drop_known_removals`): evictions by the highest seq of a row, deletes by their number, a drop by its topic.

Acks of queues are consumption and get no rows. Internal topics have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from tidelog import frames
from tidelog.engine import delete, read, retention, segment_listing
from tidelog.engine.append import Append
from tidelog.engine.batch_encoder import Batch, check_int, is_utf8_text
from tidelog.engine.config import OWN
from tidelog.engine.context import EVICTION_CAUSES, EngineContext, PendingRemovals, Removal, RemovalCause, TopicRegistry
from tidelog.engine.manifest import LoadedManifest
from tidelog.engine.results import Appended, RecoveryReport
from tidelog.engine.segment import SizeCount
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Error, Unavailable
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.formats.rows import copy_values
from tidelog.wal import CommitFuture, Shard

GAP_LOG_TOPIC: Final = f"{OWN}gaps"
GAPS_LIMIT_DEFAULT: Final = 1_000
_BATCH_ROWS: Final = 1_000
_NUMBERED_CAUSES: Final = frozenset(("delete", "compaction"))  # removals with a number of their own
_READ_TOGETHER_SEQS: Final = 64  # rows of a topic closer than this are read together


class _Row(msgspec.Struct):
    """A stored row: JSON, keys in this order."""

    topic: str
    topic_id: int
    cause: RemovalCause
    first: int
    last: int
    records: int
    bytes: int
    ts_ms: int
    actor: str | None = None
    number: int = 0
    about: str = ""


class GapEntry(NamedTuple):
    """Removed seqs of a topic, and why. Some of the range may have been removed before: `records` counts this removal
    only."""

    topic: str
    topic_id: int  # changes when a topic is dropped and created again
    cause: RemovalCause
    first: int
    last: int  # included
    records: int
    bytes: int
    ts_ms: int
    actor: str | None  # "retention", "recovery", an API key's id; None: the embedding program
    about: str  # the groups whose holds broke; what was damaged
    seq: int  # of the row; 0: not written yet


class GapEntries(list[GapEntry]):
    """Rows, oldest first."""

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table; `ts_ms` is a timestamp."""
        columns: list[Any] = list(zip(*self, strict=True)) or [()] * len(SCHEMA)
        return pa.table([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA)

    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)


SCHEMA: Final = pa.schema(
    {
        "topic": pa.string(),
        "topic_id": pa.int64(),
        "cause": pa.string(),
        "first": pa.int64(),
        "last": pa.int64(),
        "records": pa.int64(),
        "bytes": pa.int64(),
        "ts_ms": pa.timestamp("ms", tz="UTC"),
        "actor": pa.string(),
        "about": pa.string(),
        "seq": pa.int64(),
    }
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Row).decode


class GapLog:
    """Writes pending removals of an engine as rows, and reads them."""

    def __init__(self, context: EngineContext, owner: TopicRegistry) -> None:
        self._context, self._removals, self._topics = context, context.removals, owner
        self._flushing = Lock()
        context.gap_log = self

    def _find_topic(self) -> TopicState | None:
        return self._topics.find_topic(GAP_LOG_TOPIC)

    def _create_topic(self) -> TopicState:
        return self._topics.internal_topic(GAP_LOG_TOPIC, cap_records=self._context.limits.ledger_records)

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Write pending removals as one batch. Those whose cause is not durable yet stay pending. Raises where rows
        cannot be written."""
        if self._context.shards:
            with self._flushing:
                self._flush()

    def _flush(self) -> list[Removal]:
        """Write rows and return the removals that have to wait."""
        taken = self._removals.take_all()
        written = 0
        deferred: list[Removal] = []
        try:
            if taken:
                taken, deferred = _split_by_durability(taken)
            topic = self._create_topic() if taken else None
            while topic is not None and written < len(taken):
                _submit_rows(topic, taken[written : written + _BATCH_ROWS]).wait()
                written += _BATCH_ROWS
        finally:
            self._removals.put_back([*deferred, *taken[written:]])
        return deferred

    def flush_durably(self, excused: Collection[int] = ()) -> None:
        """Write every removal so far and sync the rows. Topics in `excused` may stay pending: no manifest reflects
        their removals yet."""
        with self._flushing:
            if any(removal.topic_id not in excused for removal in self._flush()):
                raise Unavailable(f"{self._context.root}: removals cannot be made durable; nothing was lost, retry")
        topic = self._find_topic()
        if topic is not None:
            topic.shard.sync()

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read_erasures(self) -> GapEntries:
        """Return the rows of all erasures, oldest first, each with its receipt."""
        with suppress(Error):
            self.flush()
        entries, topic_state = GapEntries(), self._find_topic()
        for chunk in () if topic_state is None else read.TopicScan(topic_state, 0, frozenset()).iter_chunks():
            seqs, datas = chunk.rows.seq.tolist(), copy_values(chunk.rows.buf, chunk.rows.data)
            entries += [
                _to_entry(_decode(data), seq)
                for seq, data in zip(seqs, datas, strict=True)
                if b'"cause":"erase"' in data
            ]
        return entries

    def read(
        self, topic: str | None, from_ms: int | None, limit: int, *, after_seq: int = 0, topic_id: int | None = None
    ) -> GapEntries:
        """Return rows after `after_seq`, oldest first. Removals that are not written yet come last, with seq 0."""
        if topic is not None and not is_utf8_text(topic):
            raise BadInput("a topic name is text; nothing was read")
        check_int("limit", limit, 1, SEQ_MAX)
        check_int("from_ms", from_ms or 0, 0, TS_MS_MAX)
        with suppress(Error):  # on a failing disk, pending removals are shown from memory
            self.flush()

        def is_wanted(row: GapEntry) -> bool:
            is_topic = topic is None or row.topic == topic
            return is_topic and (topic_id is None or row.topic_id == topic_id) and row.ts_ms >= (from_ms or 0)

        entries = GapEntries()
        topic_state = self._find_topic()
        if topic_state is not None:
            start = max(after_seq, segment_listing.find_seq_by_time(topic_state, from_ms) - 1 if from_ms else 0)
            for row in _read_entries(topic_state, topic, start):
                if len(entries) == limit:
                    return entries
                if is_wanted(row):
                    entries.append(row)
        pending = (_to_entry(removal) for removal in self._removals.snapshot())
        entries += [row for row in pending if is_wanted(row)][: limit - len(entries)]
        return entries


def _split_by_durability(removals: list[Removal]) -> tuple[list[Removal], list[Removal]]:
    """Split removals into those that survive a power cut, made durable where needed, and those that have to wait."""
    topics = {removal.topic_state.id: removal.topic_state for removal in removals if removal.topic_state is not None}
    durable = [topic for topic in topics.values() if not topic.is_ephemeral and not topic.is_dropped]
    with_floors = [topic for topic in durable if topic.persists_floors]
    try:
        retention.persist_floors(with_floors)
    except Error:
        for topic in with_floors:  # one failing topic does not stop the others
            with suppress(Error):
                retention.persist_floors([topic])
    failed: set[Shard] = set()
    for shard in {topic.shard for topic in durable}:
        with suppress(Error):
            shard.sync()
        if shard.is_latched:
            failed.add(shard)

    def must_wait(removal: Removal) -> bool:
        topic = removal.topic_state
        if topic is None or topic.is_ephemeral or topic.is_dropped:
            return False
        floor_pending = (
            topic.persists_floors and removal.cause in EVICTION_CAUSES and topic.durable_floor <= removal.last
        )
        return floor_pending or topic.shard in failed

    deferred = [must_wait(removal) for removal in removals]
    return (
        [removal for removal, is_deferred in zip(removals, deferred, strict=True) if not is_deferred],
        [removal for removal, is_deferred in zip(removals, deferred, strict=True) if is_deferred],
    )


def _submit_rows(topic: TopicState, removals: list[Removal]) -> CommitFuture[Appended]:
    """Append rows to the gap log topic: also while the engine closes, and outside of every limit."""
    batch = Batch(
        [_encode(_to_row(removal)) for removal in removals], True, [removal.topic.encode() for removal in removals]
    )
    with topic.lock:
        topic.check_open()
        commit = Append(topic, topic.last_assigned_seq + 1, topic.next_timestamp_ms(), batch, None)
        topic.submit(commit)
        topic.quota.acquire(batch.weight)
        topic.last_assigned_seq, topic.index.last_ts = topic.last_assigned_seq + len(batch), commit.ts_ms
        topic.staged_records += len(batch)
        topic.staged_bytes += batch.weight
    return commit.future


def _to_row(removal: Removal) -> _Row:
    return _Row(
        removal.topic,
        removal.topic_id,
        removal.cause,
        removal.first,
        removal.last,
        removal.records,
        removal.bytes,
        removal.ts_ms,
        removal.actor,
        removal.number,
        removal.about,
    )


def _to_entry(row: _Row | Removal, seq: int = 0) -> GapEntry:
    sizes = row.first, row.last, row.records, row.bytes
    return GapEntry(row.topic, row.topic_id, row.cause, *sizes, row.ts_ms, row.actor, row.about, seq)


def _read_entries(topic_state: TopicState, topic: str | None, after_seq: int) -> Iterable[GapEntry]:
    """Yield rows after a seq; those of one topic are found by their tag."""
    for first, last in _seq_runs(topic_state, topic, after_seq):
        for chunk in read.TopicScan(topic_state, first - 1, frozenset(), last).iter_chunks():
            seqs, datas = chunk.rows.seq.tolist(), copy_values(chunk.rows.buf, chunk.rows.data)
            yield from (_to_entry(_decode(data), seq) for seq, data in zip(seqs, datas, strict=True))


def _seq_runs(topic_state: TopicState, topic: str | None, after_seq: int) -> list[tuple[int, int]]:
    with topic_state.lock:
        head = topic_state.index.head
        if topic is None or after_seq >= head:
            return [(after_seq + 1, head)] if after_seq < head else []
    seqs = delete.find_by_tag(topic_state, Match(MatchOp.EXACT, topic), after_seq + 1, head + 1)
    if not len(seqs):
        return []
    edges = np.flatnonzero(np.diff(seqs) > _READ_TOGETHER_SEQS)
    firsts, lasts = seqs[np.append(0, edges + 1)], seqs[np.append(edges, len(seqs) - 1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


# ── recovery ─────────────────────────────────────────────────────────────────────────────────


class _KnownRemovals(NamedTuple):
    """Removals that rows report and no manifest covers."""

    evicted: dict[int, int]  # topic → the highest seq
    trimmed: dict[int, int]
    deleted: set[tuple[int, int]]
    dropped: set[int]
    lost: set[str]


def drop_known_removals(context: EngineContext, topics: Mapping[str, TopicState], loaded: LoadedManifest) -> None:
    """Drop the removals found by recovery that the gap log has rows for."""
    pending: PendingRemovals = context.removals
    removals, pending.is_recovering = pending.take_all(), False
    known = _KnownRemovals({}, {}, set(), set(), set())
    topic = topics.get(GAP_LOG_TOPIC)
    if topic is not None and removals:
        saved = loaded.row(topic.id)
        head_seq = 0 if saved is None else saved.head
        for chunk in read.TopicScan(topic, min(head_seq, topic.index.head), frozenset()).iter_chunks():
            for row in map(_decode, copy_values(chunk.rows.buf, chunk.rows.data)):
                _add_known(known, row)
    for removal in removals:
        if (unknown := _unknown_part(removal, known)) is not None:
            pending.add_removal(unknown)


def _add_known(known: _KnownRemovals, row: _Row) -> None:
    if row.cause in _NUMBERED_CAUSES:
        known.deleted.add((row.topic_id, row.number))
    elif row.cause == "drop":
        known.dropped.add(row.topic_id)
    elif row.cause == "lost":
        known.lost.add(row.about)
    elif row.cause == "erase":
        pass  # replay finds none: what it removed has the row of a delete
    else:
        marks = known.evicted if row.cause in EVICTION_CAUSES else known.trimmed
        marks[row.topic_id] = max(marks.get(row.topic_id, 0), row.last)


def _unknown_part(removal: Removal, known: _KnownRemovals) -> Removal | None:
    if removal.cause in _NUMBERED_CAUSES:
        return None if (removal.topic_id, removal.number) in known.deleted else removal
    if removal.cause == "drop":
        return None if removal.topic_id in known.dropped else removal
    if removal.cause == "lost":
        return None if removal.about in known.lost else removal
    marks = known.evicted if removal.cause in EVICTION_CAUSES else known.trimmed
    known_last = marks.get(removal.topic_id, 0)
    if removal.last <= known_last:
        return None
    if removal.first <= known_last and removal.topic_state is not None:
        removal.first = known_last + 1
        with suppress(Error):  # unreadable records keep their recorded size
            remaining = removal.topic_state.index.measure(removal.first, removal.last + 1)
            removal.records, removal.bytes = (
                min(removal.records, remaining.records),
                min(removal.bytes, remaining.bytes),
            )
    return removal


def add_wal_losses(context: EngineContext, report: RecoveryReport, topics: Mapping[str, TopicState]) -> None:
    """Record WAL losses that a writer accepted: lost seqs, and seqs that were reserved or may have been assigned."""
    now_ms, damage = context.now_ms(), "; ".join(report.damage)
    context.removals.add_removal(Removal(None, "", 0, "lost", 0, 0, 0, 0, now_ms, "recovery", 0, damage))
    lost = [(topics[name], *span) for name, ranges in report.lost_seqs.items() for span in ranges]
    for name, count in report.padded.items():
        topic = topics[name]
        lost.append((topic, topic.index.head - count + 1, topic.index.head))
    for topic, first, last in lost:
        context.removals.add(topic, "lost", first, last, SizeCount(0, 0), actor="recovery", ts_ms=now_ms, about=damage)
