"""The sink: tasks stage chunks, the driver publishes one range per topic and batch. It has no state between calls.

    call of Spark                 effect
    write(rows), on an executor   stage chunks; the message has their names
    commit(messages, batch id)    publish under the number (writer, batch id); a repetition returns the first range
    abort(messages)               remove the staged chunks

Only the attempt whose message Spark passes to `commit` counts; chunks of other attempts are swept. A batch without rows
publishes nothing. A batch is identified by a checksum of its rows, which does not depend on tasks.

Tasks know the id of their query (`sql.streaming.queryId`), the driver's Python worker does not, so messages have it. It
distinguishes a replay from a deleted checkpoint (`engine.idempotency`), and is the default name of the writer.

The writer is the name under which batches are numbered, the same at every start of a query: `query`, else `queryName`,
else an absolute `checkpointLocation`, else the query id in the checkpoint. A relative checkpointLocation is not used:
two jobs in two directories could have the same one. A batch (`save`) has a writer only with `query` and `batch`, as in
foreachBatch; otherwise it is written once because it runs once.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from xxhash import xxh3_128_hexdigest

from tidelog.addresses import Location, scheme_of
from tidelog.clock import Clock, SystemClock
from tidelog.engine import Appended
from tidelog.engine.config import check_topic_name
from tidelog.engine.idempotency import SINGLE_BATCH_PREFIX
from tidelog.engine.producer_batches import StagedChunk, chunk_name
from tidelog.errors import BadInput, Error
from tidelog.spark import row_encoder
from tidelog.spark.executors import reduce_object
from tidelog.spark.http_client import RETRY_TIMEOUT_MS
from tidelog.spark.options import IS_JSON, OptionParser, OptionValue, parse_directory, parse_text
from tidelog.spark.row_encoder import EMPTY_FINGERPRINT, Fingerprint, add_fingerprints
from tidelog.spark.sink_backends import (
    DirectorySinkBackend,
    ServerSinkBackend,
    SinkBackend,
    SinkBatch,
    check_reachable,
)

CHECKPOINT_PREFIX: Final = "checkpoint:"  # of a writer that is named by its checkpointLocation
QUERY_ID_PREFIX: Final = "query:"  # of a writer that is named by its query id


@dataclass(frozen=True, slots=True)
class WriteOptions:
    location: Location
    topic: str | None
    writer: str | None  # None: a batch without a name, or a stream that is named by its query id
    batch: int | None
    is_json: bool
    retry_ms: int = RETRY_TIMEOUT_MS

    def for_batch(self) -> WriteOptions:
        if (self.writer is None) != (self.batch is None):
            raise BadInput(
                "options query and batch: a batch that may be repeated has both; nothing was written, give both or "
                "neither"
            )
        return self

    def for_stream(self) -> WriteOptions:
        if self.batch is not None:
            raise BadInput("option batch: Spark numbers the batches of a stream; nothing was written, leave it out")
        return self


def _parse_topic(value: OptionValue) -> str:
    check_topic_name(value.text)
    return value.text


def _parse_query(value: OptionValue) -> str:
    text = parse_text(value)
    if text.startswith((SINGLE_BATCH_PREFIX, CHECKPOINT_PREFIX, QUERY_ID_PREFIX)):
        raise value.invalid(
            f"a name that does not begin with {SINGLE_BATCH_PREFIX}, {CHECKPOINT_PREFIX} or {QUERY_ID_PREFIX}"
        )
    return text


def _parse_batch_number(value: OptionValue) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value.text):
        raise value.invalid("a whole number from 0")
    return int(value.text)


def _parse_payload(value: OptionValue) -> bool:
    if value.text.lower() not in ("bytes", "json"):
        raise value.invalid("bytes or json")
    return value.text.lower() == "json"


_OPTIONS: Final = OptionParser(
    {
        "topic": _parse_topic,
        "query": _parse_query,
        "batch": _parse_batch_number,
        "payload": _parse_payload,
        "queryName": _parse_query,
        "checkpointLocation": parse_text,
    },
    "written",
    parse_directory,
)
SINK_OPTION_NAMES: Final = _OPTIONS.names


def parse_sink_options(given: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a writer. Raises BadInput that names the wrong one."""
    values = _OPTIONS.parse(given)
    checkpoint = values.get("checkpointLocation", "")
    is_absolute = checkpoint.startswith("/") or scheme_of(checkpoint)
    by_checkpoint = f"{CHECKPOINT_PREFIX}{checkpoint.rstrip('/')}" if is_absolute else None
    return WriteOptions(
        location=values["location"],
        topic=values.get("topic"),
        writer=values.get("query") or values.get("queryName") or by_checkpoint,
        batch=values.get("batch"),
        is_json=values.get("payload", False),
        retry_ms=values["retryTimeout"],
    )


_COLUMN_TYPES: Final[dict[str, tuple[type[DataType], ...]]] = {
    "data": (BinaryType, StringType, StructType),
    "topic": (StringType,),
    "tag": (StringType,),
    "node": (StringType,),
    "ts": (TimestampType,),
    "meta": (MapType,),
    IS_JSON: (BooleanType,),
}
_TYPE_NAMES: Final = {
    "data": "binary, string or struct",
    "meta": "map<string,string>",
    "ts": "timestamp",
    IS_JSON: "boolean",
}
SINK_COLUMNS: Final = (*_COLUMN_TYPES, "seq")


def check_sink_schema(schema: StructType, options: WriteOptions) -> None:
    """Raise BadInput for columns that no record has, and for types that do not fit."""
    names = schema.names
    if len(set(names)) < len(names):
        raise BadInput(f"the DataFrame names a column twice: {names}; nothing was written")
    if "data" not in names:
        raise BadInput(
            f"the DataFrame has the columns {', '.join(names)} and no data; nothing was written, make it of them: "
            'select(struct("*").alias("data"))'
        )
    for field in schema.fields:
        if field.name not in SINK_COLUMNS:
            raise BadInput(
                f"the DataFrame has a column {field.name!r}, which no record has; nothing was written. Columns are "
                f"{', '.join(SINK_COLUMNS)}; drop it, or make it part of data with struct(…)"
            )
        wanted = _COLUMN_TYPES.get(field.name)
        if wanted is not None and not _is_accepted_type(field.dataType, wanted):
            expected = _TYPE_NAMES.get(field.name, "string")
            raise BadInput(
                f"the DataFrame has {field.name} as {field.dataType.simpleString()}, it must be {expected}; nothing "
                "was written, cast it"
            )
    if IS_JSON in names:
        _check_is_json_column(schema["data"].dataType, options)
    if options.topic is None and "topic" not in names:
        raise BadInput("option topic: no topic is named and there is no column topic; nothing was written, name one")


def _check_is_json_column(data: DataType, options: WriteOptions) -> None:
    """Raise BadInput if an option or the type of `data` contradicts the column is_json."""
    if options.is_json:
        raise BadInput(
            "option payload is 'json', and the DataFrame has a column is_json that says it row by row; nothing was "
            "written, leave the option out, or drop the column and all rows are JSON"
        )
    if isinstance(data, StructType):
        raise BadInput(
            "the DataFrame has data as struct, which is always written as JSON, and a column is_json; nothing was "
            "written, drop the column"
        )


def _is_accepted_type(kind: DataType, wanted: tuple[type[DataType], ...]) -> bool:
    if isinstance(kind, MapType):
        return MapType in wanted and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return isinstance(kind, wanted) and not isinstance(kind, TimestampNTZType)


STAGED_CHUNK_BYTES = 32 << 20  # a chunk is closed at about this size
_log = logging.getLogger("tidelog.spark")


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """The staged chunks of one task."""

    chunks: tuple[tuple[str, StagedChunk], ...] = ()  # each with its topic
    rows: int = 0
    size: int = 0
    fingerprint: Fingerprint = EMPTY_FINGERPRINT
    query_id: str = ""


def current_query_id() -> str:
    """Return the id of the streaming query that runs this task, "" outside of one."""
    context = TaskContext.get()
    return (context.getLocalProperty("sql.streaming.queryId") if context is not None else None) or ""


def open_sink_backend(options: WriteOptions) -> SinkBackend:
    location = options.location
    if location.is_server:
        return ServerSinkBackend(location.address, location.key, retry_ms=options.retry_ms)
    return DirectorySinkBackend(location.address)


class SinkWriter:
    """The common part of a batch and a stream."""

    def __init__(self, options: WriteOptions, schema: StructType, writer: str | None) -> None:
        """`writer`: the name under which batches are numbered; None: the id of the query."""
        check_sink_schema(schema, options)
        self._options, self._writer = options, writer
        with closing(self.open_backend()) as backend:
            backend.prepare()

    def open_backend(self) -> SinkBackend:
        return open_sink_backend(self._options)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> StagedTask:
        query_id = current_query_id()
        owner = _staging_owner(self._writer_name(query_id))
        with closing(self.open_backend()) as backend:
            return replace(TaskStaging(backend, owner, self._options).run(batches), query_id=query_id)

    def _writer_name(self, query_id: str) -> str:
        if self._writer is None and not query_id:
            raise BadInput(
                "option query: Spark names no query id here, so a repeated batch could not be distinguished from a new "
                "one; nothing was written, name the query (option query, or queryName)"
            )
        return self._writer or f"{QUERY_ID_PREFIX}{query_id}"

    def publish(self, messages: Sequence[WriterCommitMessage | None], number: int) -> None:
        tasks = [message for message in messages if isinstance(message, StagedTask)]
        chunks: dict[str, list[StagedChunk]] = {}
        total = EMPTY_FINGERPRINT
        for task in tasks:
            total = add_fingerprints(total, task.fingerprint)
            for topic, chunk in task.chunks:
                chunks.setdefault(topic, []).append(chunk)
        query_id = _query_id_of(tasks)
        if not chunks and self._writer is None and not query_id:
            return  # no task ran, so nothing is staged
        writer = self._writer_name(query_id)
        with closing(self.open_backend()) as backend:
            if chunks:
                batch = SinkBatch(writer, number, total, "" if writer.startswith(SINGLE_BATCH_PREFIX) else query_id)
                done = backend.publish(batch, {topic: chunks[topic] for topic in sorted(chunks)})
                ranges = {topic: [appended.first_seq, appended.last_seq] for topic, appended in done.items()}
                _log.info("%s", msgspec.json.encode({"writer": writer, "batch": number, "ranges": ranges}).decode())
                for topic, appended in done.items():
                    _warn_changed_replay(writer, number, topic, appended, sum(chunk.rows for chunk in chunks[topic]))
            backend.clear_staging(_staging_owner(writer), self._staged_topics(chunks))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove the staged chunks. An error here is logged only, so that Spark reports the reason of the abort; the
        chunks are swept later."""
        tasks = [message for message in messages if isinstance(message, StagedTask)]
        topics = [topic for task in tasks for topic, _ in task.chunks]
        query_id = _query_id_of(tasks)
        if self._writer is None and not query_id:
            return  # no task returned a message; the next batch of the query removes their chunks
        writer = self._writer_name(query_id)
        try:
            with closing(self.open_backend()) as backend:
                backend.clear_staging(_staging_owner(writer), self._staged_topics(topics))
        except (Error, OSError) as error:
            _log.warning("what was staged by %s stays until it is swept: %s", writer, error)

    def _staged_topics(self, topics: Sequence[str] | dict[str, list[StagedChunk]]) -> list[str]:
        return sorted({*topics, *([self._options.topic] if self._options.topic else [])})


def _query_id_of(tasks: Sequence[StagedTask]) -> str:
    return next((task.query_id for task in tasks if task.query_id), "")


def _staging_owner(writer: str) -> str:
    return xxh3_128_hexdigest(writer.encode())


def _warn_changed_replay(writer: str, number: int, topic: str, appended: Appended, rows: int) -> None:
    """Log a replay with another number of records than the first write."""
    if appended.deduped and appended.count != rows:
        _log.warning(
            "%s: batch %d of %s was written before with %d records, seqs %d to %d, and is repeated with %d: its source "
            "has changed since; what was written stays",
            topic,
            number,
            writer,
            appended.count,
            appended.first_seq,
            appended.last_seq,
            rows,
        )


class TaskStaging:
    """Stages the rows of one task."""

    def __init__(
        self,
        backend: SinkBackend,
        owner: str,
        options: WriteOptions,
        *,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._backend, self._owner, self._options = backend, owner, options
        self._clock, self._random_bytes = clock or SystemClock(), random_bytes
        self._open_chunks: dict[str, _ChunkBuilder] = {}
        self._chunks: list[tuple[str, StagedChunk]] = []

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedTask:
        total, rows, size = EMPTY_FINGERPRINT, 0, 0
        for batch in batches:
            for topic, records, about in row_encoder.encode_rows(
                batch, self._options.topic, json=self._options.is_json
            ):
                chunk = self._open_chunks.get(topic) or self._open_chunks.setdefault(
                    topic, _ChunkBuilder(records.schema)
                )
                chunk.write(records)
                total, rows = add_fingerprints(total, about), rows + records.num_rows
                size += records.nbytes
                if sum(builder.size for builder in self._open_chunks.values()) >= STAGED_CHUNK_BYTES:
                    self._close_chunk(max(self._open_chunks, key=lambda name: self._open_chunks[name].size))
        for topic in list(self._open_chunks):
            self._close_chunk(topic)
        return StagedTask(tuple(self._chunks), rows, size, total)

    def _close_chunk(self, topic: str) -> None:
        chunk = self._open_chunks.pop(topic)
        name = chunk_name(self._owner, self._clock.now_us() // 1000, self._random_bytes(8))
        self._chunks.append((topic, self._backend.stage(topic, name, chunk.rows, chunk.finish())))


class _ChunkBuilder:
    """A chunk in memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pa.ipc.new_stream(self._sink, schema)
        self.rows = self.size = 0

    def write(self, records: pa.RecordBatch) -> None:
        self._writer.write_batch(records)
        self.rows, self.size = self.rows + records.num_rows, self.size + records.nbytes

    def finish(self) -> memoryview:
        self._writer.close()
        return memoryview(self._sink.getvalue())


class TopicWriter(DataSourceArrowWriter):
    """The writer of a batch. A batch without a name gets a random one, so that a commit whose response was lost can be
    repeated."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if options.location.is_server and options.batch is None:  # one in foreachBatch waits, as a stream does
            check_reachable(options.location.address, options.location.key)
        self._number = options.batch or 0
        self._sink = SinkWriter(options, schema, options.writer or f"{SINGLE_BATCH_PREFIX}{secrets.token_hex(16)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.publish(messages, self._number)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.abort(messages)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._sink = SinkWriter(options, schema, options.writer)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        self._sink.abort(messages)
