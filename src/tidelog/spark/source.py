"""The data source "tidelog": small, without state, and picklable, because Spark sends it from process to process.

Spark says       we say
partition        Split: what one task reads
pushFilters      a condition, where it is on topic, seq, ts, node or tag
schema           the columns of `schema`, or the given schema
writer           `sink`

The streaming side of the source. It keeps nothing that a restart would miss: offsets are Spark's to keep.

    Spark says                        we say
    offset                            {"orders": {"epoch": 7, "seq": 42}}, the seq to be read next
    latestOffset(start, limit)        asked of the topics every time, never counted from what was answered before
    commit(end), latestOffset(start)  the named group has passed it, where one is named
    prepareForTriggerAvailableNow     the ends of now are the ends of the query

A topic that was dropped and made again has another epoch: its seqs are other records, so what an offset of the old one
asks for is lost, and `onGap` says what happens then. One that came since by `subscribePattern` is read from its start.

Spark calls `commit(end)` of a batch when it has planned the next one, so never for the last one of a run. It plans from
an offset only when the batch before it is in its commit log: `latestOffset(start)` says that everything before `start`
is written, also at the end of AvailableNow, where it is asked once more and finds nothing. Where Spark plans nothing
for a while, or no more, `listener` moves the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

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
from tidelog.errors import BadInput
from tidelog.spark import backends, decode, groups, offsets, plan, schema
from tidelog.spark import options as reading
from tidelog.spark import sink as writing
from tidelog.spark.backends.interface import Backend, ReadTask, TopicGap, TopicSnapshot
from tidelog.spark.filters import Predicate, RecordFilter, from_spark_filter
from tidelog.spark.offsets import Pending, Position, Positions
from tidelog.spark.options import LATEST, Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.sink import TopicStreamWriter, TopicWriter
from tidelog.spark.task_reader import TaskReader


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType, *, clock: Clock | None = None) -> None:
        self._options, self._schema, self._clock = options, schema, clock or SystemClock()
        self._available_now_end: Positions | None = None  # where AvailableNow ends
        self._opened_backend: Backend | None = None
        self._initial_positions: Positions | None = None  # where the query began: nothing of it was processed
        self._committed_positions: Positions | None = None  # the last position of the group
        self._attempted_positions: Positions | None = None  # and the position it should have

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened_backend": None}  # what is open stays here; an executor opens its own

    @property
    def _backend(self) -> Backend:
        """The place as it is now."""
        if self._opened_backend is None:
            self._opened_backend = backends.open_backend(self._options)
        else:
            self._opened_backend.refresh()
        return self._opened_backend

    def stop(self) -> None:
        if self._opened_backend is not None:
            self._opened_backend.close()
            self._opened_backend = None

    # ── where it stands ───────────────────────────────────────────────────────────────────────

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        place = self._backend
        if self._options.group is not None:
            groups.group_store(place, "group", self._options.group).check_writable()
        names = plan.resolve_topics(place, self._options)
        plan.check_topics_subscribed(self._options.start, "startingOffsets", names)
        plan.check_group_exists(place, self._options.start, "startingOffsets", self._options, names)
        found = {}
        for name in names:
            sight = place.snapshot(name)
            if sight is not None:
                seq = plan.start_seq(place, self._options, sight, default=LATEST)
                found[name] = Position(sight.epoch, seq)
        self._initial_positions = dict(found)
        return offsets.encode_offsets(found)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return offsets.encode_offsets(_end_of_snapshots(self._snapshots(self._backend)))

    def _snapshots(self, backend: Backend) -> dict[str, TopicSnapshot]:
        """Every topic of the stream that is there now, looked at once."""
        names = (
            plan.resolve_topics(backend, self._options) if self._options.pattern else self._subscribed_topics(backend)
        )
        return {name: sight for name in names if (sight := backend.snapshot(name)) is not None}

    def _head_positions(self, snapshots: Mapping[str, TopicSnapshot], start: Positions) -> Positions:
        """Where every topic ends now. One that is gone stays where it was left."""
        found = _end_of_snapshots(snapshots)
        for name, spot in start.items():
            if name not in found:
                here = TopicGap(name, spot.seq, spot.seq, "dropped", spot.seq, spot.seq - 1)
                plan.raise_on_gap(self._options, here)
                found[name] = spot
        return found

    def _subscribed_topics(self, backend: Backend) -> list[str]:
        if self._options.codec != "tide":
            return plan.resolve_topics(backend, self._options)
        there = set(backend.names())
        return [name for name in self._options.subscribe if name in there]

    # ── how much of it ────────────────────────────────────────────────────────────────────────

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.rows_max is not None:
            return ReadMaxRows(options.rows_max)
        return ReadAllAvailable() if options.bytes_max is None else ReadMaxBytes(options.bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available_now_end = _end_of_snapshots(self._snapshots(self._backend))

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends: what is there, or as much of it as the limits allow."""
        place, begun = self._backend, offsets.decode_offsets(start)
        self._commit_group(place, begun)
        seen = self._snapshots(place)
        ends = self._end_positions(self._head_positions(seen, begun), begun)
        pending, spots = [], dict(ends)
        for name in sorted(ends):
            spot, end, sight = begun.get(name), ends[name], seen.get(name)
            if sight is None or sight.epoch != end.epoch:
                continue
            first = self._first_available_seq(place, sight, spot)
            pending.append(Pending(name, min(first, end.seq), end.seq, sight.bytes_before))
        rows_max, bytes_max = self._read_limits(limit)
        if self._should_wait(place, pending):
            return offsets.encode_offsets({name: begun.get(name, spots[name]) for name in spots if name in begun})
        for name, seq in offsets.admit_batch(pending, rows_max, bytes_max).items():
            spots[name] = Position(ends[name].epoch, seq)
        return offsets.encode_offsets(spots)

    def _end_positions(self, heads: Positions, start: Positions) -> Positions:
        """The ends of now, or under AvailableNow those of when the query began; never before a start."""
        if self._available_now_end is None:
            return heads
        found: Positions = {}
        for name, head in heads.items():
            target, spot = self._available_now_end.get(name), start.get(name)
            if target is not None and target.epoch == head.epoch:
                found[name] = min(head, max(target, spot) if spot is not None and spot.epoch == head.epoch else target)
            elif spot is not None:
                found[name] = spot
        return found

    def _first_available_seq(self, backend: Backend, snapshot: TopicSnapshot, position: Position | None) -> int:
        """Return the first seq that a batch from here can contain: lost records do not count toward its limits."""
        if position is None:
            return max(snapshot.first_seq, snapshot.evict_floor)
        if position.epoch != snapshot.epoch:
            plan.raise_on_gap(self._options, _recreated_gap(backend, snapshot, position))
            return max(snapshot.first_seq, snapshot.evict_floor)
        return max(position.seq, snapshot.evict_floor)

    def _read_limits(self, limit: Any) -> tuple[int | None, int | None]:
        """Rows and bytes at most. Spark names one limit; a second one of ours holds beside it, unless it wants all."""
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        if isinstance(limit, ReadAllAvailable):
            return None, None
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        return rows_max, bytes_max

    def _should_wait(self, backend: Backend, pending: Sequence[Pending]) -> bool:
        """Whether too few records are there and none of them has waited for long."""
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
        # The first record that is young enough: where that is the first one, all are.
        return all(backend.seek(each.topic, max(before_ms + 1, 0)) <= each.first for each in waiting)

    # ── a batch ───────────────────────────────────────────────────────────────────────────────

    def partitions(self, start: Any, end: Any) -> Sequence[ReadTask]:
        place, begun = self._backend, offsets.decode_offsets(start)
        ranges = [
            self._topic_range(place, name, begun.get(name), spot) for name, spot in offsets.decode_offsets(end).items()
        ]
        return plan.plan_tasks(place, self._options, [each for each in ranges if each is not None], self._options.where)

    def _topic_range(self, backend: Backend, name: str, start: Position | None, end: Position) -> TopicRange | None:
        if start == end:
            return None
        sight = backend.snapshot(name)
        if sight is None or sight.epoch != end.epoch or end.seq > sight.next_seq:
            first = start.seq if start is not None and start.epoch == end.epoch else 1
            cause = "dropped" if sight is None else "recreated"
            gone = sight or TopicSnapshot(name, end.epoch, 1, end.seq, end.seq, end.seq, (), 0)
            lost = TopicGap(name, first, end.seq - 1, cause, gone.earliest_seq, gone.next_seq - 1)
            return TopicRange(gone, first, end.seq, lost, is_gone=True)
        if start is None:
            return TopicRange(sight, max(sight.first_seq, min(sight.evict_floor, end.seq)), end.seq)
        if start.epoch != end.epoch:
            begin = max(sight.first_seq, min(sight.evict_floor, end.seq))
            return TopicRange(sight, begin, end.seq, _recreated_gap(backend, sight, start))
        return TopicRange(sight, start.seq, end.seq)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor, perhaps twice: the same split gives the same rows."""
        assert isinstance(partition, ReadTask), "planned by this reader"
        with closing(backends.open_backend(self._options)) as place:
            yield from TaskReader(place, self._options, self._schema, self._options.where, partition).batches()

    def commit(self, end: Any) -> None:
        if self._options.group is not None:
            self._attempted_positions = None
            self._commit_group(self._backend, offsets.decode_offsets(end))

    def _commit_group(self, backend: Backend, positions: Positions) -> None:
        """Move the group to what Spark has processed. Where that fails, the next batch tries again: Spark asks for
        offsets many times a second."""
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
    return {name: Position(sight.epoch, sight.next_seq) for name, sight in snapshots.items()}


def _recreated_gap(backend: Backend, snapshot: TopicSnapshot, start: Position) -> TopicGap | None:
    """What a reader lost that stood at `start` of a topic that was dropped and made again: the seqs from there to the
    last one that the old topic had, which the gap log has. None: it had read all of them."""
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


_SAMPLE_RECORDS = 1000  # records at each end of a topic that are looked at for their fields


class TidelogSource(DataSource):
    @property
    def _reader_class(self) -> type[TopicReader]:
        return FilteringReader

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> StructType:
        options = reading.parse_options(self.options)
        if options.payload != "infer":
            return schema.default_schema(options)
        with closing(backends.open_backend(options, retry=False)) as place:
            return schema.default_schema(options, decode.infer_fields(sample_data(place, options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = reading.parse_options(self.options).for_batch()
        return self._reader_class(options, _validate_given_schema(schema, options))

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
        options = reading.parse_options(self.options).for_stream()
        return TopicStreamReader(options, _validate_given_schema(schema, options))


def _validate_given_schema(given: StructType, options: Options) -> StructType:
    return schema.validate_schema(given, options)


def sample_data(backend: Backend, options: Options) -> Iterator[bytes]:
    """The data of some records: the first ones and the last ones of every topic."""
    only = reading.parse_options({"path": ".", "subscribe": "a", "onGap": "skip"})
    shape = StructType([StructField("data", BinaryType())])
    for name in plan.resolve_topics(backend, options):
        sight = backend.snapshot(name)
        if sight is None:
            continue
        begin = max(sight.evict_floor, sight.first_seq, sight.earliest_seq)
        late = max(begin, sight.next_seq - _SAMPLE_RECORDS)
        for each in (
            TopicRange(sight, begin, min(begin + _SAMPLE_RECORDS, late)),
            TopicRange(sight, late, sight.next_seq),
        ):
            for split in plan.plan_tasks(backend, only, [each], RecordFilter()):
                batches = TaskReader(backend, only, shape, RecordFilter(), split).batches()
                yield from (value.as_py() for batch in batches for value in batch.column(0))


class UnfilteredSource(TidelogSource):
    """For a session that does not push filters down: Spark refuses readers that could take them."""

    @property
    def _reader_class(self) -> type[TopicReader]:
        return TopicReader


class TopicReader(DataSourceReader):
    """A batch: a range of seqs that is fixed when it is planned."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._pushed_predicates: tuple[Predicate, ...] = ()

    @property
    def record_filter(self) -> RecordFilter:
        return self._options.where + RecordFilter(self._pushed_predicates)

    def partitions(self) -> Sequence[ReadTask]:
        with closing(backends.open_backend(self._options, retry=False)) as place:
            return plan.plan_tasks(place, self._options, plan.batch_ranges(place, self._options), self.record_filter)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor, perhaps twice: the same split gives the same rows."""
        assert isinstance(partition, ReadTask), "planned by this reader"
        with closing(backends.open_backend(self._options)) as place:
            yield from TaskReader(place, self._options, self._schema, self.record_filter, partition).batches()


class FilteringReader(TopicReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for each in filters:
            term = from_spark_filter(each, self._schema.names)
            if term is None or self._options.emits_gaps:  # a row that stands for a gap is Spark's to filter
                yield each
            else:
                self._pushed_predicates = (*self._pushed_predicates, term)
