"""[shell] The life of every job, written down: what happened to it, when, by whom, under which lease.

    enqueued 1 to 500 ── claimed ── extended ── nacked ── claimed ── expired ── claimed ── acked
                                                                              └──────── dead_lettered ── redriven

Steps are noted in memory, one note for a whole call, and appended to a topic of the engine's own
(`_tidelog.history.<queue>`, class `disk`, capped) by every tick, before a read, and by `close`. So a read shows every
step of a call that has returned, and a clean close loses none. A crash loses the steps since the last tick, a power cut
those of one more sync interval; the jobs are not lost. The first row after a restart says that there was one. Where an
append fails the steps are kept, up to 65,536, and the next tick tries again.

[hot] Steps of jobs as the JSON texts of a history, a whole call at a time.

    {"ts_ms":1,"event":"claimed","seq":%d,"node":"w","lease_id":%d,"deliveries":%d,…}      one template a call
                                       7               12             1                    a row each

What a step has nothing to say of is left out. A job has two steps at least, so a history of objects would cost
more than all else that is done for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from tidelog.engine.batch_encoder import Batch
from tidelog.engine.topic_state import HISTORY_TOPIC_PREFIX
from tidelog.errors import Error

if TYPE_CHECKING:
    from tidelog.engine.queues.jobs import ClaimResult
    from tidelog.engine.queues.leases import Lease
    from tidelog.engine.topic import Topic
    from tidelog.engine.topic_state import TopicState

_quote = msgspec.json.Encoder().encode
_STEP_COLUMNS: Final = (b"lease_id", b"deliveries", b"waited_ms", b"deadline_ms")
OptionalInts = Sequence[int] | None


class JobStep(NamedTuple):
    """The same step of the jobs of one call; of `enqueued`, of jobs `seqs[0]` to `seqs[1]`."""

    ts_ms: int
    event: str
    seqs: OptionalInts = None
    node: str | None = None
    lease_ids: OptionalInts = None
    deliveries: OptionalInts = None
    waited_ms: OptionalInts = None
    deadlines_ms: OptionalInts = None


def encode_steps(note: JobStep) -> list[bytes]:
    """A text for each step."""
    ts_ms, event, seqs, node, *more = note
    if seqs is None:
        return [b'{"ts_ms":%d,"event":%b}' % (ts_ms, _quote(event))]
    if event == "enqueued":
        return [b'{"ts_ms":%d,"event":"enqueued","seq":%d,"last_seq":%d}' % (ts_ms, *seqs)]
    row = _step_template(event, node, *map(bool, more))
    return [row % each for each in zip([ts_ms] * len(seqs), seqs, *filter(None, more), strict=True)]


@lru_cache(1024)
def _step_template(event: str, node: str | None, *given: bool) -> bytes:
    """The text of a step with a place for its time, its seq and each of the columns that it has."""
    said = b'{"ts_ms":%%d,"event":%b,"seq":%%d' % _quote(event)
    if node is not None:
        said += b',"node":' + _quote(node).replace(b"%", b"%%")
    columns = [b',"%b":%%d' % name for name, there in zip(_STEP_COLUMNS, given, strict=True) if there]
    return said + b"".join(columns) + b"}"


_PENDING_STEPS_MAX: Final = 65_536
_log = logging.getLogger("tidelog.queues")


class HistoryRow(msgspec.Struct):
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


HISTORY_SCHEMA: Final = pa.schema(
    [
        pa.field("ts_ms", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("event", pa.string(), nullable=False),
        *(pa.field(name, pa.int64()) for name in ("seq", "last_seq")),
        pa.field("node", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("lease_id", "deliveries", "waited_ms", "deadline_ms")),
    ]
)
_rows_decoder = msgspec.json.Decoder(list[HistoryRow])


class HistoryWriter:
    """What happened and was not written down yet. Noting is cheap and never waits."""

    def __init__(self, topic: TopicState) -> None:
        self._core = topic
        limits = topic.context.limits
        self._enabled = bool(limits.queue_history_records and topic.context.shards)
        self._steps: deque[JobStep] = deque(maxlen=_PENDING_STEPS_MAX)
        self._unwritten_rows: list[bytes] = []  # steps whose append failed, oldest first
        self.dropped_steps = 0  # steps that were dropped because too many waited for a disk that fails
        self._restarted = topic.head_at_open is not None
        self._flushing = Lock()

    def add_step(
        self,
        ts_ms: int,
        event: str,
        seqs: Sequence[int],
        node: str | None = None,
        ids: OptionalInts = None,
        counts: OptionalInts = None,
        waited: OptionalInts = None,
        deadlines: OptionalInts = None,
    ) -> None:
        if not self._enabled or not seqs:
            return
        if self._restarted:
            self._restarted = False
            self._steps.append(JobStep(ts_ms, "restarted"))
        self._steps.append(JobStep(ts_ms, event, seqs, node, ids, counts, waited, deadlines))
        self._core.context.dirty_histories.add(self)

    def add_enqueued(self, first: int, last: int) -> None:
        """Note jobs that were put, each once. With the topic's lock held."""
        first = max(first, self._core.history_seq + 1)
        if first <= last:
            self._core.history_seq = last
            self.add_step(self._core.index.last_ts, "enqueued", (first, last))

    def add_new_jobs(self) -> None:
        """Note the jobs that were put since, also where no claim has come upon them yet."""
        with self._core.lock:
            self.add_enqueued(self._core.history_seq + 1, self._core.index.head)

    def add_claimed(self, now_ms: int, node: str, leased: ClaimResult) -> None:
        if self._enabled and leased.count:
            waited = [now_ms - ts_ms for ts_ms in leased.enqueued_at_ms()]
            ids, counts = leased.lease_ids, leased.deliveries
            self.add_step(now_ms, "claimed", leased.seqs, node, ids, counts, waited, leased.deadlines)

    def add_lease_steps(
        self, now_ms: int, event: str, leases: Sequence[tuple[int, Lease]], deadline_ms: int | None = None
    ) -> None:
        """The same step of jobs that were held, by whoever held them."""
        if not self._enabled:
            return
        nodes = dict.fromkeys(lease.node for _, lease in leases)
        for node in nodes:
            mine = leases if len(nodes) == 1 else [each for each in leases if each[1].node == node]
            seqs, ids = [seq for seq, _ in mine], [lease.lease_id for _, lease in mine]
            deadlines = None if deadline_ms is None else [deadline_ms] * len(seqs)
            self.add_step(now_ms, event, seqs, node, ids, None, None, deadlines)

    def flush(self) -> None:
        """Append what was noted to the topic; on return every step that was noted before is there. Called without any
        lock. Where it fails the steps are kept for the next flush, and the queue goes on."""
        shared, core = self._core.context, self._core
        if not self._enabled or shared.topics is None:
            return
        with self._flushing:  # first: another thread may have taken notes and not appended them yet
            self.add_new_jobs()
            rows = self._unwritten_rows + [row for note in self._drain_steps() for row in encode_steps(note)]
            self._unwritten_rows = []
            if not rows:
                return
            done = 0
            try:
                topic = shared.topics.internal_topic(
                    HISTORY_TOPIC_PREFIX + core.name, durability="disk", cap_records=shared.limits.queue_history_records
                )
                step = shared.limits.batch_records_max
                for at in range(0, len(rows), step):
                    topic.submit(Batch(rows[at : at + step], True)).wait()
                    done = at + step
                if core.is_dropped:  # while it was made: a queue leaves no history behind
                    shared.topics.drop_internal_topic(topic.name)
            except Error as error:
                self._retain(rows[done:], error)

    def _retain(self, rows: list[bytes], error: Error) -> None:
        """Keep steps that could not be appended, the newest ones."""
        if not self._unwritten_rows:
            _log.warning("%s: %s steps of its history wait for their topic: %s", self._core.name, len(rows), error)
        self.dropped_steps += max(len(rows) - _PENDING_STEPS_MAX, 0)
        self._unwritten_rows = rows[-_PENDING_STEPS_MAX:]
        if not self._core.context.closing:
            self._core.context.dirty_histories.add(self)

    def _drain_steps(self) -> Iterator[JobStep]:
        while True:
            try:
                yield self._steps.popleft()
            except IndexError:
                return


class History:
    """What happened to the jobs of a queue, oldest first, as far as it is kept."""

    def __init__(self, topic: TopicState, journal: HistoryWriter) -> None:
        self._core, self._writer = topic, journal

    def _topic(self) -> Topic | None:
        self._writer.flush()
        doors = self._core.context.topics
        return None if doors is None else doors.find(HISTORY_TOPIC_PREFIX + self._core.name)

    def read(self, from_seq: int = 0, limit: int = 256) -> list[dict[str, Any]]:
        """Steps behind `from_seq` of the history, each with its own number there as `at`."""
        topic = self._topic()
        records = [] if topic is None else topic.read(from_seq, limit).records
        return [{"at": record.seq, **record.data} for record in records]

    def to_arrow(self) -> pa.Table:
        """All of it, as a table: one row a step, times as times."""
        topic = self._topic()
        datas = [] if topic is None else topic.to_arrow()["data"].to_pylist()
        rows = _rows_decoder.decode(b"[" + b",".join(datas) + b"]")
        columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in HISTORY_SCHEMA]
        return pa.table(columns, schema=HISTORY_SCHEMA)
