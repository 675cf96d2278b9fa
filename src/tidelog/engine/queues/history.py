"""[shell] The life of every job, written down: what happened to it, when, by whom, under which lease.

    enqueued 1 to 500 ── claimed ── extended ── nacked ── claimed ── expired ── claimed ── acked
                                                                              └──────── dead_lettered ── redriven

Steps are noted in memory, one note for a whole call, and appended to a topic of the engine's own
(`_tidelog.history.<queue>`, class `disk`, capped) by every tick, before a read, and by `close`. So a read shows every
step of a call that has returned, and a clean close loses none. A crash loses the steps since the last tick, a power cut
those of one more sync interval; the jobs are not lost. The first row after a restart says that there was one. Where an
append fails the steps are kept, up to 65,536, and the next tick tries again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from tidelog.engine.encode import Batch
from tidelog.engine.queues import steps
from tidelog.engine.queues.doors import HISTORY
from tidelog.engine.queues.steps import Ints, Note
from tidelog.errors import Error

if TYPE_CHECKING:
    from tidelog.engine.core import Core
    from tidelog.engine.queues.jobs import Leased
    from tidelog.engine.queues.leases import Lease
    from tidelog.engine.topic import Topic

_NOTES_MAX: Final = 65_536
_log = logging.getLogger("tidelog.queues")


class Row(msgspec.Struct):
    """One step of one job; of `enqueued`, of jobs `seq` to `last_seq`."""

    ts_ms: int
    event: str
    seq: int | None = None
    last_seq: int | None = None
    node: str | None = None
    lease_id: int | None = None
    deliveries: int | None = None
    waited_ms: int | None = None  # claimed: since it was enqueued
    deadline_ms: int | None = None  # claimed, extended: of the lease; nacked: when it can be had again


SCHEMA: Final = pa.schema(
    [
        pa.field("ts_ms", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("event", pa.string(), nullable=False),
        *(pa.field(name, pa.int64()) for name in ("seq", "last_seq")),
        pa.field("node", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("lease_id", "deliveries", "waited_ms", "deadline_ms")),
    ]
)
_rows = msgspec.json.Decoder(list[Row])


class Journal:
    """What happened and was not written down yet. Noting is cheap and never waits."""

    def __init__(self, core: Core) -> None:
        self._core = core
        limits = core.shared.limits
        self._on = bool(limits.queue_history_records and core.shared.shards)
        self._notes: deque[Note] = deque(maxlen=_NOTES_MAX)
        self._rows: list[bytes] = []  # steps whose append failed, oldest first
        self.lost = 0  # steps that were dropped because too many waited for a disk that fails
        self._restarted = core.found is not None
        self._flushing = Lock()

    def note(
        self,
        ts_ms: int,
        event: str,
        seqs: Sequence[int],
        node: str | None = None,
        ids: Ints = None,
        counts: Ints = None,
        waited: Ints = None,
        deadlines: Ints = None,
    ) -> None:
        if not self._on or not seqs:
            return
        if self._restarted:
            self._restarted = False
            self._notes.append(Note(ts_ms, "restarted"))
        self._notes.append(Note(ts_ms, event, seqs, node, ids, counts, waited, deadlines))
        self._core.shared.journals.add(self)

    def enqueued(self, first: int, last: int) -> None:
        """Note jobs that were put, each once. With the topic's lock held."""
        first = max(first, self._core.told + 1)
        if first <= last:
            self._core.told = last
            self.note(self._core.index.last_ts, "enqueued", (first, last))

    def look(self) -> None:
        """Note the jobs that were put since, also where no claim has come upon them yet."""
        with self._core.lock:
            self.enqueued(self._core.told + 1, self._core.index.head)

    def claimed(self, now_ms: int, node: str, leased: Leased) -> None:
        if self._on and leased.count:
            waited = [now_ms - ts_ms for ts_ms in leased.waiting_since()]
            ids, counts = leased.lease_ids, leased.deliveries
            self.note(now_ms, "claimed", leased.seqs, node, ids, counts, waited, leased.deadlines)

    def leases(
        self, now_ms: int, event: str, leases: Sequence[tuple[int, Lease]], deadline_ms: int | None = None
    ) -> None:
        """The same step of jobs that were held, by whoever held them."""
        if not self._on:
            return
        nodes = dict.fromkeys(lease.node for _, lease in leases)
        for node in nodes:
            mine = leases if len(nodes) == 1 else [each for each in leases if each[1].node == node]
            seqs, ids = [seq for seq, _ in mine], [lease.lease_id for _, lease in mine]
            deadlines = None if deadline_ms is None else [deadline_ms] * len(seqs)
            self.note(now_ms, event, seqs, node, ids, None, None, deadlines)

    def flush(self) -> None:
        """Append what was noted to the topic; on return every step that was noted before is there. Called without any
        lock. Where it fails the steps are kept for the next flush, and the queue goes on."""
        shared, core = self._core.shared, self._core
        if not self._on or shared.doors is None:
            return
        with self._flushing:  # first: another thread may have taken notes and not appended them yet
            self.look()
            rows = self._rows + [row for note in self._drained() for row in steps.texts(note)]
            self._rows = []
            if not rows:
                return
            done = 0
            try:
                topic = shared.doors.own(
                    HISTORY + core.name, durability="disk", cap_records=shared.limits.queue_history_records
                )
                step = shared.limits.batch_records_max
                for at in range(0, len(rows), step):
                    topic.stage(Batch(rows[at : at + step], True)).wait()
                    done = at + step
                if core.dropped:  # while it was made: a queue leaves no history behind
                    shared.doors.disown(topic.name)
            except Error as error:
                self._keep(rows[done:], error)

    def _keep(self, rows: list[bytes], error: Error) -> None:
        """Keep steps that could not be appended, the newest ones."""
        if not self._rows:
            _log.warning("%s: %s steps of its history wait for their topic: %s", self._core.name, len(rows), error)
        self.lost += max(len(rows) - _NOTES_MAX, 0)
        self._rows = rows[-_NOTES_MAX:]
        if not self._core.shared.closing:
            self._core.shared.journals.add(self)

    def _drained(self) -> Iterator[Note]:
        while True:
            try:
                yield self._notes.popleft()
            except IndexError:
                return


class History:
    """What happened to the jobs of a queue, oldest first, as far as it is kept."""

    def __init__(self, core: Core, journal: Journal) -> None:
        self._core, self._journal = core, journal

    def _topic(self) -> Topic | None:
        self._journal.flush()
        doors = self._core.shared.doors
        return None if doors is None else doors.find(HISTORY + self._core.name)

    def read(self, from_seq: int = 0, limit: int = 256) -> list[dict[str, Any]]:
        """Steps behind `from_seq` of the history, each with its own number there as `at`."""
        topic = self._topic()
        records = [] if topic is None else topic.read(from_seq, limit).records
        return [{"at": record.seq, **record.data} for record in records]

    def to_arrow(self) -> pa.Table:
        """All of it, as a table: one row a step, times as times."""
        topic = self._topic()
        datas = [] if topic is None else topic.to_arrow()["data"].to_pylist()
        rows = _rows.decode(b"[" + b",".join(datas) + b"]")
        columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in SCHEMA]
        return pa.table(columns, schema=SCHEMA)
