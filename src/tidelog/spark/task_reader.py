"""Read one task: its ranges in order, as batches of the requested columns.

At the end every seq of the task is accounted for: returned, deleted, expired, evicted, filtered, or a hole. If the sum
differs from the plan, the task raises Damaged, because readers would miss records without notice; else the counts are
logged. Records lost since the plan follow `onGap`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from tidelog.engine import Counts
from tidelog.errors import Damaged
from tidelog.formats.rows import Rows
from tidelog.spark import decode
from tidelog.spark.backends.interface import Backend, ColumnSet, ReadChunk, ReadRange, ReadTask, TopicGap
from tidelog.spark.decode import RESCUED, ColumnArrays, json_fields
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import COLUMNS, IS_JSON, Options
from tidelog.spark.plan import raise_on_gap

_log = logging.getLogger("tidelog.spark")
_log.setLevel(logging.INFO)  # Spark collects the logs of workers, if configured


class TaskReader:
    """One pass over a task. `counts` is complete at the end."""

    def __init__(
        self, backend: Backend, options: Options, schema: StructType, record_filter: RecordFilter, task: ReadTask
    ) -> None:
        self._backend, self._options, self._filter, self._task = backend, options, record_filter.without_topic(), task
        self._json_fields = json_fields(schema)
        self._has_rescued = RESCUED in schema.names
        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        own = {name for name in schema.names if name in (*COLUMNS, IS_JSON)}
        self._columns: ColumnSet = frozenset(
            {*own, *self._filter.columns, "seq", *(["data"] if self._json_fields else [])}
        )
        self.counts = task.counts

    def batches(self) -> Iterator[pa.RecordBatch]:
        for gap in self._task.gaps:
            yield from self._emit_gap(gap)
        for read_range in self._task.ranges:
            for chunk in self._read_range(read_range):
                for gap in chunk.gaps:
                    yield from self._emit_gap(gap)
                self.counts += chunk.counts
                if chunk.rows is not None:
                    yield from self._decode_chunk(chunk, read_range.topic)
        self._check_counts()

    def records(self) -> Iterator[Rows | pa.RecordBatch]:
        """Yield the records as the backend has them, for a reader that makes its own columns: no filter applies, and
        no gap has a row. A batch of Arrow has the columns of the schema, as the engine calls them."""
        for gap in self._task.gaps:
            raise_on_gap(self._options, gap)
        for read_range in self._task.ranges:
            for chunk in self._read_range(read_range):
                for gap in chunk.gaps:
                    raise_on_gap(self._options, gap)
                self.counts += chunk.counts
                if chunk.rows is not None:
                    self.counts += Counts(rows=len(chunk.rows))
                    yield chunk.rows
        self._check_counts()

    def _check_counts(self) -> None:
        if sum(self.counts) != self._task.seq_count:
            raise Damaged(
                f"a task was to account for {self._task.seq_count} seqs and found {sum(self.counts)} ({self.counts}); "
                "nothing was written, this is a bug in tidelog or damage that `tidelog check` shows"
            )
        _log.info("%s", self._counts_json())

    def _counts_json(self) -> str:
        """Return the counts of this task as JSON, for the worker's log."""
        ranges = [[read_range.topic, read_range.first, read_range.stop] for read_range in self._task.ranges]
        return msgspec.json.encode({"seqs": self._task.seq_count, **self.counts._asdict(), "ranges": ranges}).decode()

    def _read_range(self, read_range: ReadRange) -> Iterator[ReadChunk]:
        if read_range.inline_records is None:
            return self._backend.read(read_range, self._columns, verify=self._options.verify)
        return _inline_chunks(read_range)

    def _emit_gap(self, gap: TopicGap) -> Iterator[pa.RecordBatch]:
        raise_on_gap(self._options, gap)
        if self._options.emits_gaps:
            last = None if gap.is_unbounded else gap.last
            yield decode.gap_row(gap.first, last, gap.cause, gap.topic, self._schema)

    def _decode_chunk(self, chunk: ReadChunk, topic: str) -> Iterator[pa.RecordBatch]:
        assert chunk.rows is not None, "only for chunks with records"
        cells = decode.decode_columns(
            chunk.rows,
            self._columns,
            has_timestamps=self._backend.has_timestamps,
            has_json_flag=self._backend.has_json_flag,
        )
        count = len(cells["seq"])
        mask = self._filter.row_mask(cells)
        if mask is not None:
            cells = {name: column.filter(mask) for name, column in cells.items()}
        kept = len(cells["seq"])
        self.counts += Counts(rows=kept, filtered=count - kept)
        starts = self._options.field_starts.get(topic)
        if not kept:
            return
        if not starts:
            yield self._to_schema(cells, topic, self._json_fields)
            return
        # One batch for the records of each schema.
        seqs = cells["seq"].to_numpy()
        edges = [0, *sorted({int(at) for at in np.searchsorted(seqs, sorted(starts.values()))}), kept]
        for first, stop in pairwise(edges):
            if stop > first:
                known = [field for field in self._json_fields if starts.get(field.name, 0) <= seqs[first]]
                part = {name: column.slice(first, stop - first) for name, column in cells.items()}
                yield self._to_schema(part, topic, known)

    def _to_schema(self, arrays: ColumnArrays, topic: str, fields: list[StructField]) -> pa.RecordBatch:
        count = len(arrays["seq"])
        if fields:
            arrays |= decode.parse_json_columns(
                arrays["data"], arrays["seq"], topic, fields, self._schema, rescue=self._has_rescued
            )
        columns = []
        for field in self._schema:
            if field.name == "topic":
                columns.append(pa.repeat(topic, count))
            elif field.name == "data" and self._options.payload != "bytes":
                columns.append(decode.data_as_text(arrays["data"], arrays["seq"], topic))
            elif field.name in arrays:
                columns.append(arrays[field.name])
            else:
                columns.append(pa.nulls(count, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _inline_chunks(read_range: ReadRange) -> Iterator[ReadChunk]:
    with pa.ipc.open_stream(read_range.inline_records) as stream:
        for batch in stream:
            yield ReadChunk(batch, Counts())
    assert read_range.inline_counts is not None, "inline records have counts"
    yield ReadChunk(None, read_range.inline_counts)
