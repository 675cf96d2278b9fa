"""The history of a queue: every event of every job, with time, node and lease.

    enqueued 1 to 500 ── claimed ── extended ── nacked ── claimed ── expired ── claimed ── acked
                                                                              └──────── dead_lettered ── redriven

Steps are collected in memory, one `JobStep` for a whole call, and appended to an internal topic
(`_tidelog.history.<queue>`, class `disk`, capped) by every tick, before a read, and by `close`. A read shows every step
of a call that has returned, and a clean close loses none. A crash loses the steps since the last tick, a power cut
those of one more sync interval; no job is lost. The first step after a restart is `restarted`. If an append fails, up
to 65,536 steps are kept and the next tick tries again.
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

from tidelog import frames
from tidelog.disk.process import DEFER_SIGNALS
from tidelog.engine import append, read
from tidelog.engine.batch_encoder import Batch
from tidelog.engine.context import HISTORY_TOPIC_PREFIX
from tidelog.errors import Error

if TYPE_CHECKING:
    from tidelog.engine.queues.jobs import ClaimResult
    from tidelog.engine.queues.leases import Lease
    from tidelog.engine.topic_state import TopicState

_quote = msgspec.json.Encoder().encode
_STEP_COLUMNS: Final = (b"lease_id", b"deliveries", b"waited_ms", b"deadline_ms")
_PAGE_BYTES_MAX: Final = 1 << 20
OptionalInts = Sequence[int] | None


class JobStep(NamedTuple):
    """One event of all jobs of a call, as columns; `enqueued` has the first and the last seq."""

    ts_ms: int
    event: str
    seqs: OptionalInts = None
    node: str | None = None
    lease_ids: OptionalInts = None
    deliveries: OptionalInts = None
    waited_ms: OptionalInts = None
    deadlines_ms: OptionalInts = None


def encode_steps(step: JobStep) -> list[bytes]:
    """Encode a step as JSON, one text per job.

    A call has one template, filled for each job; missing fields are left out. A job has at least two steps, so
    encoding an object for each would cost more than the rest of its processing.
    """
    ts_ms, event, seqs, node, *columns = step
    if seqs is None:
        return [b'{"ts_ms":%d,"event":%b}' % (ts_ms, _quote(event))]
    if event == "enqueued":
        return [b'{"ts_ms":%d,"event":"enqueued","seq":%d,"last_seq":%d}' % (ts_ms, *seqs)]
    template = _step_template(event, node, *map(bool, columns))
    return [template % row for row in zip([ts_ms] * len(seqs), seqs, *filter(None, columns), strict=True)]


@lru_cache(1024)
def _step_template(event: str, node: str | None, *has_column: bool) -> bytes:
    """Return the JSON of a step with placeholders for its time, its seq and its columns."""
    text = b'{"ts_ms":%%d,"event":%b,"seq":%%d' % _quote(event)
    if node is not None:
        text += b',"node":' + _quote(node).replace(b"%", b"%%")
    columns = [b',"%b":%%d' % name for name, is_given in zip(_STEP_COLUMNS, has_column, strict=True) if is_given]
    return text + b"".join(columns) + b"}"


_PENDING_STEPS_MAX: Final = 65_536
_log = logging.getLogger("tidelog.queues")


class HistoryRow(msgspec.Struct):
    """One step of one job; `enqueued` is for jobs `seq` to `last_seq`."""

    ts_ms: int
    event: str
    seq: int | None = None
    last_seq: int | None = None
    node: str | None = None
    lease_id: int | None = None
    deliveries: int | None = None
    waited_ms: int | None = None  # claimed: since it was enqueued
    deadline_ms: int | None = None  # claimed, extended: of the lease; nacked: when it is claimable again


HISTORY_SCHEMA: Final = pa.schema(
    [
        pa.field("ts_ms", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("event", pa.string(), nullable=False),
        *(pa.field(name, pa.int64()) for name in ("seq", "last_seq")),
        pa.field("node", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("lease_id", "deliveries", "waited_ms", "deadline_ms")),
    ]
)
# A table for users: every time is typed. The wire has `deadline_ms` as a number.
TABLE_SCHEMA: Final = HISTORY_SCHEMA.set(
    HISTORY_SCHEMA.get_field_index("deadline_ms"), pa.field("deadline_ms", pa.timestamp("ms", tz="UTC"))
)
_rows_decoder = msgspec.json.Decoder(list[HistoryRow])


class HistoryWriter:
    """Steps that are not appended yet. Adding a step never blocks."""

    def __init__(self, topic: TopicState) -> None:
        self._topic = topic
        limits = topic.context.limits
        self._enabled = bool(limits.queue_history_records and topic.context.shards)
        self._steps: deque[JobStep] = deque(maxlen=_PENDING_STEPS_MAX)
        self._unwritten_rows: list[bytes] = []  # steps whose append failed, oldest first
        self.dropped_steps = 0  # steps that were dropped because too many waited for a failing disk
        self._restarted = topic.recovery.head is not None
        self._flushing = Lock()

    def add_step(self, step: JobStep) -> None:
        if not self._enabled or not step.seqs:
            return
        if self._restarted:
            self._restarted = False
            self._steps.append(JobStep(step.ts_ms, "restarted"))
        self._steps.append(step)
        self._topic.context.dirty_histories.add(self)

    def add_enqueued(self, first: int, last: int) -> None:
        """Add a step for new jobs, each once. With the topic's lock held."""
        first = max(first, self._topic.history_seq + 1)
        if first <= last:
            self._topic.history_seq = last
            self.add_step(JobStep(self._topic.index.last_ts, "enqueued", (first, last)))

    def add_new_jobs(self) -> None:
        """Add a step for all jobs that no claim has reached yet."""
        with self._topic.lock:
            self.add_enqueued(self._topic.history_seq + 1, self._topic.index.head)

    def add_claimed(self, now_ms: int, node: str, leased: ClaimResult) -> None:
        if self._enabled and leased.count:
            waited = [now_ms - ts_ms for ts_ms in leased.enqueued_at_ms()]
            columns = (leased.lease_ids, leased.deliveries, waited, leased.deadlines)
            self.add_step(JobStep(now_ms, "claimed", leased.seqs, node, *columns))

    def add_lease_steps(
        self, now_ms: int, event: str, leases: Sequence[tuple[int, Lease]], deadline_ms: int | None = None
    ) -> None:
        """Add the same step for leased jobs, one for each node."""
        if not self._enabled:
            return
        nodes = dict.fromkeys(lease.node for _, lease in leases)
        for node in nodes:
            held = leases if len(nodes) == 1 else [each for each in leases if each[1].node == node]
            seqs, ids = [seq for seq, _ in held], [lease.lease_id for _, lease in held]
            deadlines = None if deadline_ms is None else [deadline_ms] * len(seqs)
            self.add_step(JobStep(now_ms, event, seqs, node, ids, deadlines_ms=deadlines))

    def flush(self) -> None:
        """Append all collected steps to the history topic. Called without a lock. If that fails, the steps are kept for
        the next flush and the queue is not affected."""
        context, queue_topic = self._topic.context, self._topic
        if not self._enabled or context.topics is None:
            return
        with self._flushing:  # first: another thread may have taken steps and not appended them yet
            self.add_new_jobs()
            rows = self._unwritten_rows + [row for step in self._drain_steps() for row in encode_steps(step)]
            self._unwritten_rows = []
            if not rows:
                return
            written = 0
            try:
                topic = context.topics.internal_topic(
                    HISTORY_TOPIC_PREFIX + queue_topic.name,
                    durability="disk",
                    cap_records=context.limits.queue_history_records,
                )
                batch_records = context.limits.batch_records_max
                for start in range(0, len(rows), batch_records):
                    with DEFER_SIGNALS:
                        future = append.submit_write(topic, Batch(rows[start : start + batch_records], True))
                    future.wait()
                    written = start + batch_records
                if queue_topic.is_dropped:  # meanwhile: a dropped queue has no history
                    context.topics.drop_internal_topic(topic.name)
            except Error as error:
                self._retain(rows[written:], error)

    def _retain(self, rows: list[bytes], error: Error) -> None:
        """Keep the newest steps that could not be appended."""
        if not self._unwritten_rows:
            _log.warning("%s: %s history steps could not be appended yet: %s", self._topic.name, len(rows), error)
        self.dropped_steps += max(len(rows) - _PENDING_STEPS_MAX, 0)
        self._unwritten_rows = rows[-_PENDING_STEPS_MAX:]
        if not self._topic.context.closing:
            self._topic.context.dirty_histories.add(self)

    def _drain_steps(self) -> Iterator[JobStep]:
        while True:
            try:
                yield self._steps.popleft()
            except IndexError:
                return


class History:
    """The kept events of the jobs of a queue, oldest first."""

    def __init__(self, topic: TopicState, writer: HistoryWriter) -> None:
        self._topic, self._writer = topic, writer

    def __repr__(self) -> str:
        return f"<history of queue {self._topic.name!r}>"

    def _flushed_topic(self) -> TopicState | None:
        self._writer.flush()
        topics = self._topic.context.topics
        return None if topics is None else topics.find_topic(HISTORY_TOPIC_PREFIX + self._topic.name)

    def read(self, from_seq: int = 0, limit: int = 256) -> list[dict[str, Any]]:
        """Return steps after `from_seq` of the history, each with its seq there as `at`."""
        topic = self._flushed_topic()
        records = [] if topic is None else read.read_page(topic, from_seq, limit, frozenset(), _PAGE_BYTES_MAX).records
        return [{"at": record.seq, **record.data} for record in records]

    def to_arrow(self) -> pa.Table:
        """Return the whole history as a table with one row per step."""
        topic = self._flushed_topic()
        datas = [] if topic is None else read.read_stored_data(topic)
        return rows_to_table(datas)

    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)


def rows_to_table(texts: Sequence[bytes]) -> pa.Table:
    """Return a table of steps that are given as JSON objects."""
    rows = _rows_decoder.decode(b"[" + b",".join(texts) + b"]")
    columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in TABLE_SCHEMA]
    return pa.table(columns, schema=TABLE_SCHEMA)
