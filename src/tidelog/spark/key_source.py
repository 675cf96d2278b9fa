"""The keys of a topic's records as a DataFrame, for a search of what newer records replaced (`pipelines.compact`).

    high, low    the digest of the key, as `engine.record_keys` makes it
    seq          of the record
    kind         NEWEST, TOMBSTONE: the newest record of its key in a piece of a task; OLDER: any other one of its key,
                 whose digest is left out, because it is replaced whatever the other pieces have

Records without a key have no row. Options are those of the source, and `rule`, the topic's rule for keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from tidelog.engine.record_keys import selector_of
from tidelog.formats import segment_index
from tidelog.formats.rows import Rows, Span
from tidelog.spark import backends
from tidelog.spark import options as reading
from tidelog.spark.backends.interface import ReadTask
from tidelog.spark.executors import reduce_object
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import Options
from tidelog.spark.source import TopicReader
from tidelog.spark.task_reader import TaskReader

NEWEST, TOMBSTONE, OLDER = 0, 1, 2
_KEY_SCHEMA: Final = StructType(
    [
        StructField("high", LongType(), False),
        StructField("low", LongType(), False),
        StructField("seq", LongType(), False),
        StructField("kind", ByteType(), False),
    ]
)
_ARROW_KEY_SCHEMA: Final = pa.schema(
    [pa.field(name, pa.int64(), nullable=False) for name in ("high", "low", "seq")]
    + [pa.field("kind", pa.int8(), nullable=False)]
)
_READ_SCHEMA: Final = StructType(
    [
        StructField("seq", LongType()),
        StructField("tag", StringType()),
        StructField("meta", MapType(StringType(), StringType())),
        StructField("data", BinaryType()),
        StructField(reading.IS_JSON, BooleanType()),
    ]
)


class KeySource(DataSource):
    """The keys of the records of a topic, as the rows of a DataFrame. Options are those of the source, and `rule`."""

    @classmethod
    def name(cls) -> str:
        return "tidelog-keys"

    def schema(self) -> StructType:
        return _KEY_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        given = {name: value for name, value in self.options.items() if name.lower() != "rule"}
        return KeyReader(reading.parse_options(given).for_batch(), self.options["rule"])


class KeyReader(DataSourceReader):
    def __init__(self, options: Options, rule: str) -> None:
        self._options, self._rule = options, rule

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    def partitions(self) -> Sequence[ReadTask]:
        return TopicReader(self._options, _READ_SCHEMA).partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReadTask), "planned by this reader"
        with closing(backends.open_backend(self._options)) as backend:
            reader = TaskReader(backend, self._options, _READ_SCHEMA, RecordFilter(), partition)
            for records in reader.records():
                rows = records if isinstance(records, Rows) else rows_of_batch(records)
                yield key_rows(rows, self._rule)


def rows_of_batch(batch: pa.RecordBatch) -> Rows:
    """Return the records of an Arrow batch as rows, with what keys are made of: seq, tag, meta, data and flags."""
    spans: list[Span] = []
    contents: list[memoryview] = []
    at = 0
    for name in ("data", "tag", "meta"):
        column = batch.column(name).cast(pa.binary()).fill_null(b"")
        _, edges, values = column.buffers()
        offsets = np.frombuffer(edges, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
        first, stop = int(offsets[0]), int(offsets[-1])
        if stop > first:
            contents.append(memoryview(values)[first:stop])
        spans.append(Span(offsets[:-1] - first + at, np.diff(offsets)))
        at += stop - first
    data, tag, meta = spans
    is_json = batch.column("json").fill_null(False).to_numpy(zero_copy_only=False)
    seqs = batch.column("seq").to_numpy()
    zeros = np.zeros(len(seqs), np.int64)
    flags = np.where(is_json, np.uint8(segment_index.JSON), np.uint8(0))
    return Rows(b"".join(contents), seqs, zeros, zeros, data, None, tag, meta, flags=flags)


def key_rows(rows: Rows, rule: str) -> pa.RecordBatch:
    """Return the rows of the shuffle: one for each record that has a key."""
    base = int(rows.seq[0])
    keys = selector_of(rule).index(rows, base)
    zeros = np.zeros(len(keys.older_rows), np.int64)  # they are replaced whatever their key is
    kinds = np.where(keys.tombstones, np.int8(TOMBSTONE), np.int8(NEWEST))
    columns = [
        np.concatenate([keys.high.view(np.int64), zeros]),
        np.concatenate([keys.low.view(np.int64), zeros]),
        np.concatenate([keys.rows, keys.older_rows]).astype(np.int64) + base,
        np.concatenate([kinds, np.full(len(zeros), OLDER, np.int8)]),
    ]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=_ARROW_KEY_SCHEMA)
