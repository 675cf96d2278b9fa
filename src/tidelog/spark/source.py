"""The data source "tidelog": batch and streaming readers, and the entry to the sink. It is small, picklable and without
state, because Spark sends it from process to process.

    call of Spark                     effect
    schema                            the columns of `schema`, or the given schema
    pushFilters                       predicates on topic, seq, ts, node and tag
    partitions                        ReadTask, the input of one task
    latestOffset(start, limit)        read from the topics at every call, never computed from earlier results
    commit(end), latestOffset(start)  move the group, if one is named
    prepareForTriggerAvailableNow     the present ends become the ends of the query
    writer, streamWriter              `sink`

A stream keeps no state that a restart would lose: Spark keeps the offsets. A topic that was dropped and created again
has another epoch: its seqs are other records, so the records of an old offset are lost, and `onGap` decides. A topic
that a `subscribePattern` finds later is read from its start.

Spark calls `commit(end)` of a batch when it has planned the next one, so never for the last batch of a run. It plans
from an offset only when the batch before it is in its commit log: `latestOffset(start)` means that everything before
`start` is written, also at the end of AvailableNow, where Spark calls it once more and finds nothing. While Spark plans
nothing, `listener` moves the group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, StructField, StructType

from tidelog.clock import Clock, SystemClock
from tidelog.errors import BadInput, Error
from tidelog.spark import backends, decode, groups, log_tables, plan, topic_schemas
from tidelog.spark import options as reading
from tidelog.spark import sink as writing
from tidelog.spark.backends.interface import Backend, ReadTask, TopicGap, TopicSnapshot, no_segments
from tidelog.spark.executors import reduce_object
from tidelog.spark.filters import Predicate, RecordFilter, from_spark_filter
from tidelog.spark.groups import REPORT_KEY, Pending, Position, Positions
from tidelog.spark.options import LATEST, Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.sink import TopicStreamWriter, TopicWriter
from tidelog.spark.task_reader import TaskReader


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._clock: Clock = SystemClock()
        self._available_now_end: Positions | None = None
        self._opened_backend: Backend | None = None
        self._initial_positions: Positions | None = None  # at the start of the query: nothing was processed
        self._committed_positions: Positions | None = None  # of the group
        self._attempted_positions: Positions | None = None  # that the group should have
        self._next_batch: tuple[Positions, Positions] | None = None  # start and end, as last returned to Spark
        self._planned_batch: tuple[tuple[Positions, Positions], list[ReadTask]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # An executor opens its own.
        return reduce_object(self, {**self.__dict__, "_opened_backend": None, "_planned_batch": None})

    @property
    def _backend(self) -> Backend:
        """The backend, with a new snapshot."""
        if self._opened_backend is None:
            self._opened_backend = backends.open_backend(self._options)
        else:
            self._opened_backend.refresh()
        return self._opened_backend

    def stop(self) -> None:
        if self._opened_backend is not None:
            self._opened_backend.close()
            self._opened_backend = None

    # ── offsets ───────────────────────────────────────────────────────────────────────────────

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        backend = self._backend
        if self._options.group is not None:
            groups.group_store(backend, "group", self._options.group).check_writable()
        names = plan.resolve_topics(backend, self._options)
        plan.check_topics_subscribed(self._options.start, "startingOffsets", names)
        plan.check_group_exists(backend, self._options.start, "startingOffsets", self._options, names)
        found = {}
        for name in names:
            snapshot = backend.snapshot(name)
            if snapshot is not None:
                seq = plan.start_seq(backend, self._options, snapshot, default=LATEST)
                found[name] = Position(snapshot.epoch, seq)
        self._initial_positions = dict(found)
        return groups.encode_offsets(found)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ends of the topics, which Spark shows in the progress of a query, and beside them for each topic
        the lag after the planned batch and the age of its newest record, and what becomes of the seqs of that batch."""
        backend = self._backend
        found: dict[str, Any] = groups.encode_offsets(_end_of_snapshots(self._snapshots(backend)))
        if self._next_batch is None:
            return found
        start, end = self._next_batch
        now_ms = self._clock.now_us() // 1000
        for name, at in found.items():
            position = end.get(name)
            seq = position.seq if position is not None and position.epoch == at["epoch"] else 1
            at["lag_records"] = at["seq"] - seq
            waiting_ms = backend.time_of(name, seq) if at["lag_records"] else None
            at["lag_ms"] = 0 if waiting_ms is None else max(now_ms - waiting_ms, 0)
            if position is not None and position != start.get(name) and seq > 1:
                newest_ms = backend.time_of(name, seq - 1)
                if newest_ms is not None:
                    at["freshness_ms"] = max(now_ms - newest_ms, 0)
        with suppress(Error):  # the batch raises it
            found[REPORT_KEY] = {"batch": plan.count_planned(self._plan_batch(backend, start, end))._asdict()}
        return found

    def _snapshots(self, backend: Backend) -> dict[str, TopicSnapshot]:
        """Return a snapshot of every existing topic of the stream."""
        names = (
            plan.resolve_topics(backend, self._options) if self._options.pattern else self._subscribed_topics(backend)
        )
        return {name: snapshot for name in names if (snapshot := backend.snapshot(name)) is not None}

    def _head_positions(self, snapshots: Mapping[str, TopicSnapshot], start: Positions) -> Positions:
        """Return the end of every topic. A dropped topic keeps its position."""
        found = _end_of_snapshots(snapshots)
        for name, position in start.items():
            if name not in found:
                here = TopicGap(name, position.seq, position.seq, "dropped", position.seq, position.seq - 1)
                plan.raise_on_gap(self._options, here)
                found[name] = position
        return found

    def _subscribed_topics(self, backend: Backend) -> list[str]:
        if self._options.codec != "tide":
            return plan.resolve_topics(backend, self._options)
        return list(self._options.subscribe)

    # ── limits ────────────────────────────────────────────────────────────────────────────────

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.rows_max is not None:
            return ReadMaxRows(options.rows_max)
        return ReadAllAvailable() if options.bytes_max is None else ReadMaxBytes(options.bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available_now_end = _end_of_snapshots(self._snapshots(self._backend))

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch: the end of the topics, or as far as the limits allow."""
        backend, started = self._backend, groups.decode_offsets(start)
        self._commit_group(backend, started)
        seen = self._snapshots(backend)
        ends = self._end_positions(self._head_positions(seen, started), started)
        pending, positions = [], dict(ends)
        for name in sorted(ends):
            position, end, snapshot = started.get(name), ends[name], seen.get(name)
            if snapshot is None or snapshot.epoch != end.epoch:
                continue
            first = self._first_available_seq(backend, snapshot, position)
            first = min(first, end.seq)
            pending.append(Pending(name, first, end.seq, snapshot.bytes_before(first)))
        rows_max, bytes_max = self._read_limits(limit)
        if self._should_wait(backend, pending):
            return groups.encode_offsets(
                {name: started.get(name, positions[name]) for name in positions if name in started}
            )
        for name, seq in groups.admit_batch(pending, rows_max, bytes_max).items():
            positions[name] = Position(ends[name].epoch, seq)
        self._next_batch = started, positions
        return groups.encode_offsets(positions)

    def _end_positions(self, heads: Positions, start: Positions) -> Positions:
        """Return the present ends, or with AvailableNow those at the start of the query; never before `start`."""
        if self._available_now_end is None:
            return heads
        found: Positions = {}
        for name, head in heads.items():
            target, position = self._available_now_end.get(name), start.get(name)
            if target is not None and target.epoch == head.epoch:
                found[name] = min(
                    head, max(target, position) if position is not None and position.epoch == head.epoch else target
                )
            elif position is not None:
                found[name] = position
        return found

    def _first_available_seq(self, backend: Backend, snapshot: TopicSnapshot, position: Position | None) -> int:
        """Return the first seq that a batch can have: lost records do not count toward its limits."""
        if position is None:
            return max(snapshot.first_seq, snapshot.evict_floor)
        if position.epoch != snapshot.epoch:
            plan.raise_on_gap(self._options, _recreated_gap(backend, snapshot, position))
            return max(snapshot.first_seq, snapshot.evict_floor)
        return max(position.seq, snapshot.evict_floor)

    def _read_limits(self, limit: Any) -> tuple[int | None, int | None]:
        """Return the maximum of rows and of bytes. Spark passes one limit; the other option applies as well, unless
        Spark reads all."""
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        if isinstance(limit, ReadAllAvailable):
            return None, None
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        return rows_max, bytes_max

    def _should_wait(self, backend: Backend, pending: Sequence[Pending]) -> bool:
        """Whether there are fewer than minOffsetsPerTrigger records and none is older than maxTriggerDelay."""
        least = self._options.rows_min
        waiting = [each for each in pending if each.seq_count]
        if (
            least is None
            or self._available_now_end is not None
            or not waiting
            or sum(each.seq_count for each in waiting) >= least
        ):
            return False
        before_ms = self._clock.now_us() // 1000 - self._options.max_trigger_delay_ms
        # If the first record that is young enough is the first pending one, all are.
        return all(backend.seek(each.topic, max(before_ms + 1, 0)) <= each.first for each in waiting)

    # ── a batch ───────────────────────────────────────────────────────────────────────────────

    def partitions(self, start: Any, end: Any) -> Sequence[ReadTask]:
        return self._plan_batch(self._backend, groups.decode_offsets(start), groups.decode_offsets(end))

    def _plan_batch(self, backend: Backend, start: Positions, end: Positions) -> list[ReadTask]:
        """Return the tasks of a batch. It is planned once, although its counts are reported first."""
        if self._planned_batch is not None and self._planned_batch[0] == (start, end):
            tasks, self._planned_batch = self._planned_batch[1], None
            return tasks
        ranges = [self._topic_range(backend, name, start.get(name), position) for name, position in end.items()]
        tasks = plan.plan_tasks(
            backend, self._options, [each for each in ranges if each is not None], self._options.where
        )
        self._planned_batch = (start, end), tasks
        return tasks

    def _topic_range(self, backend: Backend, name: str, start: Position | None, end: Position) -> TopicRange | None:
        if start == end:
            return None
        snapshot = backend.snapshot(name)
        if snapshot is None or snapshot.epoch != end.epoch or end.seq > snapshot.next_seq:
            first = start.seq if start is not None and start.epoch == end.epoch else 1
            cause = "dropped" if snapshot is None else "recreated"
            gone = snapshot or TopicSnapshot(name, end.epoch, 1, end.seq, end.seq, end.seq, end.seq, 0, no_segments)
            lost = TopicGap(name, first, end.seq - 1, cause, gone.earliest_seq, gone.next_seq - 1)
            return TopicRange(gone, first, end.seq, lost, is_gone=True)
        if start is None:
            return TopicRange(snapshot, max(snapshot.first_seq, min(snapshot.evict_floor, end.seq)), end.seq)
        if start.epoch != end.epoch:
            begin = max(snapshot.first_seq, min(snapshot.evict_floor, end.seq))
            return TopicRange(snapshot, begin, end.seq, _recreated_gap(backend, snapshot, start))
        return TopicRange(snapshot, start.seq, end.seq)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor, perhaps twice: the same task returns the same rows."""
        assert isinstance(partition, ReadTask), "planned by this reader"
        with closing(backends.open_backend(self._options)) as backend:
            yield from TaskReader(backend, self._options, self._schema, self._options.where, partition).batches()

    def commit(self, end: Any) -> None:
        if self._options.group is not None:
            self._attempted_positions = None
            self._commit_group(self._backend, groups.decode_offsets(end))

    def _commit_group(self, backend: Backend, positions: Positions) -> None:
        """Move the group to the processed offsets. If that fails, the next batch tries again, and not the next call:
        Spark calls latestOffset many times per second."""
        group = self._options.group
        if (
            group is None
            or not positions
            or positions in (self._initial_positions, self._committed_positions, self._attempted_positions)
        ):
            return
        self._attempted_positions = positions
        if groups.group_store(backend, "group", group).commit(group, positions):
            self._committed_positions = positions


def _end_of_snapshots(snapshots: Mapping[str, TopicSnapshot]) -> Positions:
    return {name: Position(snapshot.epoch, snapshot.next_seq) for name, snapshot in snapshots.items()}


def _recreated_gap(backend: Backend, snapshot: TopicSnapshot, start: Position) -> TopicGap | None:
    """Return the gap of a reader at `start` of a topic that was dropped and created again: up to the last seq of the
    old topic, which the gap log has. None if it had read all of them."""
    last = backend.last_seq_before_drop(snapshot.topic, start.epoch)
    if last is not None and last < start.seq:
        return None
    end = start.seq if last is None else last
    return TopicGap(
        snapshot.topic,
        start.seq,
        end,
        "recreated",
        snapshot.earliest_seq,
        snapshot.next_seq - 1,
        is_unbounded=last is None,
    )


_SAMPLE_RECORDS = 1000  # at each end of a topic, to infer fields from


# Spark plans a read with filters that it pushes down in a Python worker of its own, and any other read in the second.
# It refuses a reader that supports filters where its setting is off, also for a query without filters, and sends the
# setting to neither.
_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_PLAN_WORKER: Final = "pyspark.sql.worker.plan_data_source_read"


def _may_push_filters() -> bool:
    """Whether this process may return a reader that supports filters."""
    main = getattr(sys.modules["__main__"].__spec__, "name", None)
    imported = {name for name in (_PUSHDOWN_WORKER, _PLAN_WORKER) if name in sys.modules or name == main}
    return imported != {_PLAN_WORKER}  # the first imports the second


class TidelogSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> StructType:
        options = reading.parse_options(self.options)
        if options.history or options.gaps:
            return log_tables.table_schema(options)
        if options.payload == "registered":
            return decode.default_schema(options, _registered_fields(options)[0])
        if options.payload != "infer":
            return decode.default_schema(options)
        with closing(backends.open_backend(options, retry=False)) as backend:
            return decode.default_schema(options, decode.infer_fields(sample_data(backend, options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = _with_field_starts(reading.parse_options(self.options).for_batch())
        if options.history or options.gaps:
            return log_tables.LogTableReader(options)
        kind = FilteringReader if _may_push_filters() else TopicReader
        return kind(options, _validate_given_schema(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        options = writing.parse_sink_options(self.options).for_batch()
        if overwrite:
            raise BadInput("a log is only appended to; nothing was written, use mode append, or drop the topic first")
        return TopicWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:  # noqa: N802
        options = writing.parse_sink_options(self.options).for_stream()
        if overwrite:
            raise BadInput("a log is only appended to; nothing was written, use outputMode append")
        return TopicStreamWriter(options, schema)

    def streamReader(self, schema: StructType) -> TopicStreamReader:  # noqa: N802
        options = _with_field_starts(reading.parse_options(self.options).for_stream())
        return TopicStreamReader(options, _validate_given_schema(schema, options))


def _registered_fields(options: Options) -> tuple[StructType, topic_schemas.FieldStarts]:
    with closing(backends.open_backend(options, retry=False)) as backend:
        topics = plan.resolve_topics(backend, options)
    named = [topic for topic in topics if options.subscribe or topic != topic_schemas.SCHEMAS_TOPIC]
    return topic_schemas.registered_fields(options.location, named)


def _with_field_starts(options: Options) -> Options:
    return replace(options, field_starts=_registered_fields(options)[1]) if options.payload == "registered" else options


def _validate_given_schema(given: StructType, options: Options) -> StructType:
    return decode.validate_schema(given, options)


def sample_data(backend: Backend, options: Options) -> Iterator[bytes]:
    """Yield the data of the first and the last records of every topic."""
    only = reading.parse_options({"path": ".", "subscribe": "a", "onGap": "skip"})
    shape = StructType([StructField("data", BinaryType())])
    for name in plan.resolve_topics(backend, options):
        snapshot = backend.snapshot(name)
        if snapshot is None:
            continue
        begin = max(snapshot.evict_floor, snapshot.first_seq, snapshot.earliest_seq)
        late = max(begin, snapshot.next_seq - _SAMPLE_RECORDS)
        for each in (
            TopicRange(snapshot, begin, min(begin + _SAMPLE_RECORDS, late)),
            TopicRange(snapshot, late, snapshot.next_seq),
        ):
            for task in plan.plan_tasks(backend, only, [each], RecordFilter()):
                batches = TaskReader(backend, only, shape, RecordFilter(), task).batches()
                yield from (value.as_py() for batch in batches for value in batch.column(0))


class TopicReader(DataSourceReader):
    """Reads a batch: a range of seqs that is fixed by the plan."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._pushed_predicates: tuple[Predicate, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    @property
    def record_filter(self) -> RecordFilter:
        return self._options.where + RecordFilter(self._pushed_predicates)

    def partitions(self) -> Sequence[ReadTask]:
        with closing(backends.open_backend(self._options, retry=False)) as backend:
            return plan.plan_tasks(
                backend, self._options, plan.batch_ranges(backend, self._options), self.record_filter
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor, perhaps twice: the same task returns the same rows."""
        assert isinstance(partition, ReadTask), "planned by this reader"
        with closing(backends.open_backend(self._options)) as backend:
            yield from TaskReader(backend, self._options, self._schema, self.record_filter, partition).batches()


class FilteringReader(TopicReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for each in filters:
            term = from_spark_filter(each, self._schema.names)
            if term is None or self._options.emits_gaps:  # Spark filters rows of gaps
                yield each
            else:
                self._pushed_predicates = (*self._pushed_predicates, term)
