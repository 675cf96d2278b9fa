"""The sink's whole life without a JVM, pickled wherever Spark would pickle it: tasks, then a commit or an abort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema
from tests.unit.spark.helpers import pickled, source

from tidelog.spark.sink import TopicStreamWriter, TopicWriter

Messages = list[WriterCommitMessage | None]


def batch_of(*values: bytes, **columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"data": pa.array(values, pa.binary()), **columns})


def writer(options: Mapping[str, str], schema: pa.Schema) -> TopicWriter:
    return pickled(source(options).writer(from_arrow_schema(schema), False))


def stream_writer(options: Mapping[str, str], schema: pa.Schema) -> TopicStreamWriter:
    return pickled(source(options).streamWriter(from_arrow_schema(schema), False))


def run_tasks(writer: TopicWriter | TopicStreamWriter, parts: Iterable[Iterable[pa.RecordBatch]]) -> Messages:
    return [pickled(pickled(writer).write(iter(list(part)))) for part in parts]


def save(options: Mapping[str, str], *parts: Iterable[pa.RecordBatch]) -> None:
    """A batch: each part is what one task has."""
    schema = next(batch.schema for part in parts for batch in part)
    made = writer(options, schema)
    pickled(made).commit(run_tasks(made, parts))


def save_micro_batch(options: Mapping[str, str], number: int, *parts: Iterable[pa.RecordBatch]) -> None:
    """One batch of a stream. Spark makes the writer anew for the commit."""
    schema = next(batch.schema for part in parts for batch in part)
    made = run_tasks(stream_writer(options, schema), parts)
    stream_writer(options, schema).commit(made, number)
