"""[shell] The ledger of gaps: one row for every removal, in a topic of the engine's own.

    note (in memory) ──► its cause is synced ──► row in `_tidelog.gaps` ──► synced within a tick

The order makes the ledger true after any crash:
  1. A row is written only once what it tells of survives a power cut: the frames of the topic's shard are synced first,
     and floors that replay cannot work out are made durable. So no row tells of a removal that is then undone.
  2. A manifest is saved, and deletion vectors are written, only when all removals they reflect have their rows
     (`settle`). So what replay does not find out again is in the ledger.
  3. What replay does find out is noted again while it applies it, and what the ledger has of it already is taken out
     (`rebuild`): evictions by the highest seq that a row tells of, deletes by their number, a drop by its topic.

Acks of queues are consumption and no rows. The engine's own topics have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.engine import delete, read, retention, segment_listing
from tidelog.engine.append import Append
from tidelog.engine.batch_encoder import Batch, check_int, is_utf8_text
from tidelog.engine.config import OWN
from tidelog.engine.manifest import Manifest
from tidelog.engine.pending_removals import EVICTION_CAUSES, PendingRemovals, Removal, RemovalCause
from tidelog.engine.results import Appended, RecoveryReport
from tidelog.engine.segment import SizeCount
from tidelog.engine.topic_state import EngineContext, TopicState
from tidelog.errors import BadInput, Error, Unavailable
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.formats.rows import copy_values
from tidelog.wal import CommitFuture, Shard

if TYPE_CHECKING:
    from tidelog.engine.topic import Topic

GAP_LOG_TOPIC: Final = f"{OWN}gaps"
GAPS_LIMIT_DEFAULT: Final = 1_000
_BATCH_ROWS: Final = 1_000
_READ_TOGETHER_SEQS: Final = 64  # rows of a topic that lie closer than this are read in one go


class _Row(msgspec.Struct):
    """A row as it is stored: JSON, keys in this order."""

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
    """Seqs of a topic that went, and why. Some of the range may have been gone before: `records` counts what went."""

    topic: str
    topic_id: int  # another one after a topic was dropped and made again
    cause: RemovalCause
    first: int
    last: int  # included
    records: int
    bytes: int
    ts_ms: int
    actor: str | None  # who did it: "retention", "recovery", a key's id; None: a program, by its own hand
    about: str  # the groups whose holds broke; what was damaged
    seq: int  # of the row; 0 while it is not written yet


class GapEntries(list[GapEntry]):
    """Rows, oldest first."""

    def to_arrow(self) -> pa.Table:
        columns: list[Any] = list(zip(*self, strict=True)) or [()] * len(SCHEMA)
        return pa.table([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA)


SCHEMA: Final = pa.schema(
    {
        "topic": pa.string(),
        "topic_id": pa.int64(),
        "cause": pa.string(),
        "first": pa.int64(),
        "last": pa.int64(),
        "records": pa.int64(),
        "bytes": pa.int64(),
        "ts_ms": pa.int64(),
        "actor": pa.string(),
        "about": pa.string(),
        "seq": pa.int64(),
    }
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Row).decode


class TopicOwner(Protocol):
    """The engine: it has the topic of the rows, and makes it for the first of them."""

    def find(self, name: str) -> Topic | None: ...

    def internal_topic(self, name: str, **config: object) -> Topic: ...


class GapLog:
    """What an engine does with its notes."""

    def __init__(self, context: EngineContext, owner: TopicOwner) -> None:
        self._shared, self._removals, self._topics = context, context.removals, owner
        self._flushing = Lock()
        context.gap_log = self

    def _find_topic(self) -> TopicState | None:
        topic = self._topics.find(GAP_LOG_TOPIC)
        return None if topic is None else topic._topic_state

    def _create_topic(self) -> TopicState:
        return self._topics.internal_topic(GAP_LOG_TOPIC, cap_records=self._shared.limits.ledger_records)._topic_state

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Write what waits, as one batch. What cannot be told yet waits on; raises where rows cannot be written."""
        if self._shared.shards:
            with self._flushing:
                self._flush()

    def _flush(self) -> list[Removal]:
        """Returns what cannot be told yet."""
        taken = self._removals.take_all()
        told = 0
        late: list[Removal] = []
        try:
            if taken:
                taken, late = _split_by_durability(taken)
            core = self._create_topic() if taken else None
            while core is not None and told < len(taken):
                _submit_rows(core, taken[told : told + _BATCH_ROWS]).wait()
                told += _BATCH_ROWS
        finally:
            self._removals.put_back([*late, *taken[told:]])
        return late

    def flush_durably(self, excused: Collection[int] = ()) -> None:
        """Every removal so far has its row, and the rows survive a power cut; but for topics that are excused, whose
        removals no manifest reflects yet."""
        with self._flushing:
            if any(note.topic_id not in excused for note in self._flush()):
                raise Unavailable(f"{self._shared.root}: removals cannot be made durable; nothing was lost, retry")
        core = self._find_topic()
        if core is not None:
            core.shard.sync()

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(
        self, topic: str | None, from_ms: int | None, limit: int, *, after_seq: int = 0, topic_id: int | None = None
    ) -> GapEntries:
        """Rows behind the seq `behind`, oldest first. What could not be written yet comes last, with seq 0."""
        if topic is not None and not is_utf8_text(topic):
            raise BadInput("a topic is named by text; nothing was read")
        check_int("limit", limit, 1, SEQ_MAX)
        check_int("from_ms", from_ms or 0, 0, TS_MS_MAX)
        with suppress(Error):  # a disk that fails keeps nobody from reading: what waits is shown from memory
            self.flush()

        def wanted(row: GapEntry) -> bool:
            mine = topic is None or row.topic == topic
            return mine and (topic_id is None or row.topic_id == topic_id) and row.ts_ms >= (from_ms or 0)

        found = GapEntries()
        core = self._find_topic()
        if core is not None:
            start = max(after_seq, segment_listing.find_seq_by_time(core, from_ms) - 1 if from_ms else 0)
            for row in _read_entries(core, topic, start):
                if len(found) == limit:
                    return found
                if wanted(row):
                    found.append(row)
        waiting = (_to_entry(note) for note in self._removals.snapshot())
        found += [row for row in waiting if wanted(row)][: limit - len(found)]
        return found


def _split_by_durability(notes: list[Removal]) -> tuple[list[Removal], list[Removal]]:
    """Those whose removals survive a power cut, made so where that is needed, and those that have to wait."""
    cores = {note.topic_state.id: note.topic_state for note in notes if note.topic_state is not None}
    lasting = [core for core in cores.values() if not core.is_ephemeral and not core.is_dropped]
    guarded = [core for core in lasting if core.persists_floors]
    try:
        retention.persist_floors(guarded)
    except Error:
        for core in guarded:  # one that cannot does not keep the others
            with suppress(Error):
                retention.persist_floors([core])
    failed: set[Shard] = set()
    for shard in {core.shard for core in lasting}:
        with suppress(Error):
            shard.sync()
        if shard.is_latched:
            failed.add(shard)

    def waits(note: Removal) -> bool:
        core = note.topic_state
        if core is None or core.is_ephemeral or core.is_dropped:
            return False
        open_floor = core.persists_floors and note.cause in EVICTION_CAUSES and core.durable_floor <= note.last
        return open_floor or core.shard in failed

    late = [waits(note) for note in notes]
    return (
        [note for note, is_late in zip(notes, late, strict=True) if not is_late],
        [note for note, is_late in zip(notes, late, strict=True) if is_late],
    )


def _submit_rows(topic: TopicState, notes: list[Removal]) -> CommitFuture[Appended]:
    """`append` of the engine's own: also while it is being closed, and outside of every limit."""
    made = Batch([_encode(_to_row(note)) for note in notes], True, [note.topic.encode() for note in notes])
    with topic.lock:
        topic.check_open()
        commit = Append(topic, topic.last_assigned_seq + 1, topic.next_timestamp_ms(), made, None)
        topic.submit(commit)
        topic.quota.acquire(made.weight)
        topic.last_assigned_seq, topic.index.last_ts = topic.last_assigned_seq + len(made), commit.ts_ms
        topic.staged_records += len(made)
        topic.staged_bytes += made.weight
    return commit.future


def _to_row(note: Removal) -> _Row:
    return _Row(
        note.topic,
        note.topic_id,
        note.cause,
        note.first,
        note.last,
        note.records,
        note.bytes,
        note.ts_ms,
        note.actor,
        note.number,
        note.about,
    )


def _to_entry(row: _Row | Removal, seq: int = 0) -> GapEntry:
    sizes = row.first, row.last, row.records, row.bytes
    return GapEntry(row.topic, row.topic_id, row.cause, *sizes, row.ts_ms, row.actor, row.about, seq)


def _read_entries(topic_state: TopicState, topic: str | None, after_seq: int) -> Iterable[GapEntry]:
    """Rows of the ledger behind a seq, those of one topic found by their tag."""
    for first, last in _seq_runs(topic_state, topic, after_seq):
        for stretch in read.TopicScan(topic_state, first - 1, frozenset(), last).iter_chunks():
            seqs, datas = stretch.rows.seq.tolist(), copy_values(stretch.rows.buf, stretch.rows.data)
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


# ── after a crash ─────────────────────────────────────────────────────────────────────────────────


class _KnownRemovals(NamedTuple):
    """What the rows tell of that no manifest covers."""

    evicted: dict[int, int]  # topic → the highest seq
    trimmed: dict[int, int]
    deleted: set[tuple[int, int]]
    dropped: set[int]
    lost: set[str]


def drop_known_removals(context: EngineContext, topics: Mapping[str, TopicState], manifest: Manifest) -> None:
    """Of the notes that recovery made, keep those that the ledger has no row of."""
    notes: PendingRemovals = context.removals
    found, notes.is_recovering = notes.take_all(), False
    told = _KnownRemovals({}, {}, set(), set(), set())
    core = topics.get(GAP_LOG_TOPIC)
    if core is not None and found:
        behind = next((row.head for row in manifest.topics if row.id == core.id), 0)
        for stretch in read.TopicScan(core, min(behind, core.index.head), frozenset()).iter_chunks():
            for row in map(_decode, copy_values(stretch.rows.buf, stretch.rows.data)):
                _add_known(told, row)
    for note in found:
        if (kept := _unknown_part(note, told)) is not None:
            notes.add_removal(kept)


def _add_known(told: _KnownRemovals, row: _Row) -> None:
    if row.cause == "delete":
        told.deleted.add((row.topic_id, row.number))
    elif row.cause == "drop":
        told.dropped.add(row.topic_id)
    elif row.cause == "lost":
        told.lost.add(row.about)
    else:
        marks = told.evicted if row.cause in EVICTION_CAUSES else told.trimmed
        marks[row.topic_id] = max(marks.get(row.topic_id, 0), row.last)


def _unknown_part(note: Removal, told: _KnownRemovals) -> Removal | None:
    if note.cause == "delete":
        return None if (note.topic_id, note.number) in told.deleted else note
    if note.cause == "drop":
        return None if note.topic_id in told.dropped else note
    if note.cause == "lost":
        return None if note.about in told.lost else note
    marks = told.evicted if note.cause in EVICTION_CAUSES else told.trimmed
    known = marks.get(note.topic_id, 0)
    if note.last <= known:
        return None
    if note.first <= known and note.topic_state is not None:
        note.first = known + 1
        with suppress(Error):  # what does not read any more is counted as it was noted
            gone = note.topic_state.index.measure(note.first, note.last + 1)
            note.records, note.bytes = min(note.records, gone.records), min(note.bytes, gone.bytes)
    return note


def add_wal_losses(context: EngineContext, report: RecoveryReport, topics: Mapping[str, TopicState]) -> None:
    """Note what damage of the WAL took, for a writer that went on without it: seqs that are known to be lost, and those
    that were reserved or may have been given out."""
    now_ms, about = context.now_ms(), "; ".join(report.damage)
    context.removals.add_removal(Removal(None, "", 0, "lost", 0, 0, 0, 0, now_ms, "recovery", 0, about))
    found = [(topics[name], *each) for name, ranges in report.lost_seqs.items() for each in ranges]
    for name, count in report.padded.items():
        core = topics[name]
        found.append((core, core.index.head - count + 1, core.index.head))
    for core, first, last in found:
        context.removals.add(core, "lost", first, last, SizeCount(0, 0), actor="recovery", ts_ms=now_ms, about=about)
