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

from tidelog.engine import delete, read, retention, segments
from tidelog.engine.append import Append
from tidelog.engine.config import OWN
from tidelog.engine.core import Core, Shared
from tidelog.engine.encode import Batch, check_number, is_text
from tidelog.engine.manifest import Manifest
from tidelog.engine.notes import EVICTIONS, Cause, Note, Notes
from tidelog.engine.parts import Weight
from tidelog.engine.report import Report
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, Unavailable
from tidelog.formats.bodies import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.formats.rows import values
from tidelog.wal import Shard, Token

if TYPE_CHECKING:
    from tidelog.engine.topic import Topic

NAME: Final = f"{OWN}gaps"
LIMIT: Final = 1_000
_BATCH: Final = 1_000
_NEAR: Final = 64  # rows of a topic that lie closer than this are read in one go


class _Row(msgspec.Struct):
    """A row as it is stored: JSON, keys in this order."""

    topic: str
    topic_id: int
    cause: Cause
    first: int
    last: int
    records: int
    bytes: int
    ts_ms: int
    actor: str | None = None
    number: int = 0
    about: str = ""


class LedgerRow(NamedTuple):
    """Seqs of a topic that went, and why. Some of the range may have been gone before: `records` counts what went."""

    topic: str
    topic_id: int  # another one after a topic was dropped and made again
    cause: Cause
    first: int
    last: int  # included
    records: int
    bytes: int
    ts_ms: int
    actor: str | None  # who did it: "retention", "recovery", a key's id; None: a program, by its own hand
    about: str  # the groups whose holds broke; what was damaged
    seq: int  # of the row; 0 while it is not written yet


class Gaps(list[LedgerRow]):
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


class Owner(Protocol):
    """The engine: it has the topic of the rows, and makes it for the first of them."""

    def find(self, name: str) -> Topic | None: ...

    def own(self, name: str, **config: object) -> Topic: ...


class Ledger:
    """What an engine does with its notes."""

    def __init__(self, shared: Shared, owner: Owner) -> None:
        self._shared, self._notes, self._owner = shared, shared.notes, owner
        self._flushing = Lock()
        shared.ledger = self

    def _find(self) -> Core | None:
        topic = self._owner.find(NAME)
        return None if topic is None else topic.core

    def _make(self) -> Core:
        return self._owner.own(NAME, cap_records=self._shared.limits.ledger_records).core

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Write what waits, as one batch. What cannot be told yet waits on; raises where rows cannot be written."""
        if self._shared.shards:
            with self._flushing:
                self._flush()

    def _flush(self) -> list[Note]:
        """Returns what cannot be told yet."""
        taken = self._notes.take()
        told = 0
        late: list[Note] = []
        try:
            if taken:
                taken, late = _settled(taken)
            core = self._make() if taken else None
            while core is not None and told < len(taken):
                _stage(core, taken[told : told + _BATCH]).wait()
                told += _BATCH
        finally:
            self._notes.put_back([*late, *taken[told:]])
        return late

    def settle(self, excused: Collection[int] = ()) -> None:
        """Every removal so far has its row, and the rows survive a power cut; but for topics that are excused, whose
        removals no manifest reflects yet."""
        with self._flushing:
            if any(note.topic_id not in excused for note in self._flush()):
                raise Unavailable(f"{self._shared.root}: removals cannot be made durable; nothing was lost, retry")
        core = self._find()
        if core is not None:
            core.shard.sync()

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def rows(
        self, topic: str | None, from_ms: int | None, limit: int, *, behind: int = 0, topic_id: int | None = None
    ) -> Gaps:
        """Rows behind the seq `behind`, oldest first. What could not be written yet comes last, with seq 0."""
        if topic is not None and not is_text(topic):
            raise BadInput("a topic is named by text; nothing was read")
        check_number("limit", limit, 1, SEQ_MAX)
        check_number("from_ms", from_ms or 0, 0, TS_MS_MAX)
        with suppress(Error):  # a disk that fails keeps nobody from reading: what waits is shown from memory
            self.flush()

        def wanted(row: LedgerRow) -> bool:
            mine = topic is None or row.topic == topic
            return mine and (topic_id is None or row.topic_id == topic_id) and row.ts_ms >= (from_ms or 0)

        found = Gaps()
        core = self._find()
        if core is not None:
            start = max(behind, segments.seek(core, from_ms) - 1 if from_ms else 0)
            for row in _stored(core, topic, start):
                if len(found) == limit:
                    return found
                if wanted(row):
                    found.append(row)
        waiting = (_shown(note) for note in self._notes.look())
        found += [row for row in waiting if wanted(row)][: limit - len(found)]
        return found


def _settled(notes: list[Note]) -> tuple[list[Note], list[Note]]:
    """Those whose removals survive a power cut, made so where that is needed, and those that have to wait."""
    cores = {note.core.id: note.core for note in notes if note.core is not None}
    lasting = [core for core in cores.values() if not core.ephemeral and not core.dropped]
    guarded = [core for core in lasting if core.guarding]
    try:
        retention.harden_all(guarded)
    except Error:
        for core in guarded:  # one that cannot does not keep the others
            with suppress(Error):
                retention.harden_all([core])
    failed: set[Shard] = set()
    for shard in {core.shard for core in lasting}:
        with suppress(Error):
            shard.sync()
        if shard.latched:
            failed.add(shard)

    def waits(note: Note) -> bool:
        core = note.core
        if core is None or core.ephemeral or core.dropped:
            return False
        open_floor = core.guarding and note.cause in EVICTIONS and core.hardened <= note.last
        return open_floor or core.shard in failed

    late = [waits(note) for note in notes]
    return (
        [note for note, is_late in zip(notes, late, strict=True) if not is_late],
        [note for note, is_late in zip(notes, late, strict=True) if is_late],
    )


def _stage(core: Core, notes: list[Note]) -> Token[Appended]:
    """`append` of the engine's own: also while it is being closed, and outside of every limit."""
    made = Batch([_encode(_row(note)) for note in notes], True, [note.topic.encode() for note in notes])
    with core.lock:
        core.check()
        commit = Append(core, core.tail + 1, core.stamp(), made, None)
        core.submit(commit)
        core.quota.take(made.weight)
        core.tail, core.index.last_ts = core.tail + len(made), commit.ts_ms
        core.staged_records += len(made)
        core.staged_bytes += made.weight
    return commit.token


def _row(note: Note) -> _Row:
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


def _shown(row: _Row | Note, seq: int = 0) -> LedgerRow:
    sizes = row.first, row.last, row.records, row.bytes
    return LedgerRow(row.topic, row.topic_id, row.cause, *sizes, row.ts_ms, row.actor, row.about, seq)


def _stored(core: Core, topic: str | None, behind: int) -> Iterable[LedgerRow]:
    """Rows of the ledger behind a seq, those of one topic found by their tag."""
    for first, last in _runs(core, topic, behind):
        for stretch in read.Scan(core, first - 1, frozenset(), last).stretches():
            seqs, datas = stretch.rows.seq.tolist(), values(stretch.rows.buf, stretch.rows.data)
            yield from (_shown(_decode(data), seq) for seq, data in zip(seqs, datas, strict=True))


def _runs(core: Core, topic: str | None, behind: int) -> list[tuple[int, int]]:
    with core.lock:
        head = core.index.head
        if topic is None or behind >= head:
            return [(behind + 1, head)] if behind < head else []
    seqs = delete.find(core, Match(MatchOp.EXACT, topic), behind + 1, head + 1)
    if not len(seqs):
        return []
    edges = np.flatnonzero(np.diff(seqs) > _NEAR)
    firsts, lasts = seqs[np.append(0, edges + 1)], seqs[np.append(edges, len(seqs) - 1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


# ── after a crash ─────────────────────────────────────────────────────────────────────────────────


class _Told(NamedTuple):
    """What the rows tell of that no manifest covers."""

    evicted: dict[int, int]  # topic → the highest seq
    trimmed: dict[int, int]
    deleted: set[tuple[int, int]]
    dropped: set[int]
    lost: set[str]


def rebuild(shared: Shared, cores: Mapping[str, Core], manifest: Manifest) -> None:
    """Of the notes that recovery made, keep those that the ledger has no row of."""
    notes: Notes = shared.notes
    found, notes.recovering = notes.take(), False
    told = _Told({}, {}, set(), set(), set())
    core = cores.get(NAME)
    if core is not None and found:
        behind = next((row.head for row in manifest.topics if row.id == core.id), 0)
        for stretch in read.Scan(core, min(behind, core.index.head), frozenset()).stretches():
            for row in map(_decode, values(stretch.rows.buf, stretch.rows.data)):
                _tell(told, row)
    for note in found:
        if (kept := _untold(note, told)) is not None:
            notes.tell(kept)


def _tell(told: _Told, row: _Row) -> None:
    if row.cause == "delete":
        told.deleted.add((row.topic_id, row.number))
    elif row.cause == "drop":
        told.dropped.add(row.topic_id)
    elif row.cause == "lost":
        told.lost.add(row.about)
    else:
        marks = told.evicted if row.cause in EVICTIONS else told.trimmed
        marks[row.topic_id] = max(marks.get(row.topic_id, 0), row.last)


def _untold(note: Note, told: _Told) -> Note | None:
    if note.cause == "delete":
        return None if (note.topic_id, note.number) in told.deleted else note
    if note.cause == "drop":
        return None if note.topic_id in told.dropped else note
    if note.cause == "lost":
        return None if note.about in told.lost else note
    marks = told.evicted if note.cause in EVICTIONS else told.trimmed
    known = marks.get(note.topic_id, 0)
    if note.last <= known:
        return None
    if note.first <= known and note.core is not None:
        note.first = known + 1
        with suppress(Error):  # what does not read any more is counted as it was noted
            gone = note.core.index.weigh(note.first, note.last + 1)
            note.records, note.bytes = min(note.records, gone.records), min(note.bytes, gone.size)
    return note


def lost(shared: Shared, report: Report, cores: Mapping[str, Core]) -> None:
    """Note what damage of the WAL took, for a writer that went on without it: seqs that are known to be lost, and those
    that were reserved or may have been given out."""
    now_ms, about = shared.now_ms(), "; ".join(report.damage)
    shared.notes.tell(Note(None, "", 0, "lost", 0, 0, 0, 0, now_ms, "recovery", 0, about))
    found = [(cores[name], *each) for name, ranges in report.lost_seqs.items() for each in ranges]
    for name, count in report.padded.items():
        core = cores[name]
        found.append((core, core.index.head - count + 1, core.index.head))
    for core, first, last in found:
        shared.notes.add(core, "lost", first, last, Weight(0, 0), actor="recovery", ts_ms=now_ms, about=about)
