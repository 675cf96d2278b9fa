"""The sink's whole life without a JVM, pickled wherever Spark would pickle it: tasks, then a commit or an abort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema
from tests.unit.spark.world import sent, source

from tidelog.spark.sink import TopicStreamWriter, TopicWriter

Messages = list[WriterCommitMessage | None]


def data(*values: bytes, **columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"data": pa.array(values, pa.binary()), **columns})


def writer(options: Mapping[str, str], schema: pa.Schema) -> TopicWriter:
    return sent(source(options).writer(from_arrow_schema(schema), False))


def stream_writer(options: Mapping[str, str], schema: pa.Schema) -> TopicStreamWriter:
    return sent(source(options).streamWriter(from_arrow_schema(schema), False))


def tasks(made: TopicWriter | TopicStreamWriter, parts: Iterable[Iterable[pa.RecordBatch]]) -> Messages:
    return [sent(sent(made).write(iter(list(part)))) for part in parts]


def save(options: Mapping[str, str], *parts: Iterable[pa.RecordBatch]) -> None:
    """A batch: each part is what one task has."""
    schema = next(batch.schema for part in parts for batch in part)
    made = writer(options, schema)
    sent(made).commit(tasks(made, parts))


def micro(options: Mapping[str, str], number: int, *parts: Iterable[pa.RecordBatch]) -> None:
    """One batch of a stream. Spark makes the writer anew for the commit."""
    schema = next(batch.schema for part in parts for batch in part)
    made = tasks(stream_writer(options, schema), parts)
    stream_writer(options, schema).commit(made, number)
