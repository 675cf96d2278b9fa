"""The sink: tasks stage, the driver publishes one range a topic and batch. It keeps nothing; every object is made anew.

    Spark says                    we say
    write(rows), on an executor   stage: chunks, whose names are in the message
    commit(messages, batch id)    publish: numbered by (writer, batch id), so that a repetition gets its range
    abort(messages)               clear: what was staged goes

Only the attempt of a task whose message Spark hands over counts; what others staged is waste and is swept. A batch
without rows publishes nothing. The content of a batch is identified by a checksum of its rows, independent of tasks.

Tasks know the id of their query (`sql.streaming.queryId`), the driver's Python worker does not: messages carry it. It
distinguishes a replay from a deleted checkpoint (`engine.numbers`), and is the writer's name where there is no other.

What a writer may ask for, and which columns it may bring. Refused before a row is written.

who writes     query, else queryName, else checkpointLocation where that is absolute, else the query id that Spark
               keeps in the checkpoint: the name under which batches are numbered, the same at every start. A relative
               checkpointLocation names nothing: two jobs in two directories could have the same one.
               A batch (`save`) has none, and is written once because it is run once; with `query` and `batch` (in
               foreachBatch) it has the one they name.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
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

from tidelog.addresses import SERVER_SCHEMES, local_directory, scheme_of
from tidelog.clock import Clock, SystemClock
from tidelog.engine import Appended
from tidelog.engine.config import check_topic_name
from tidelog.engine.idempotency import SINGLE_BATCH_PREFIX
from tidelog.engine.producer_batches import StagedChunk, chunk_name
from tidelog.errors import BadInput, Error
from tidelog.spark import options as reading
from tidelog.spark import row_encoder as making
from tidelog.spark.http_client import RETRY_TIMEOUT_MS
from tidelog.spark.options import IS_JSON
from tidelog.spark.row_encoder import EMPTY_FINGERPRINT, Fingerprint, add_fingerprints
from tidelog.spark.sink_backends import (
    DirectorySinkBackend,
    ServerSinkBackend,
    SinkBackend,
    SinkBatch,
    check_reachable,
)

_MESSAGE_VALUE_CHARS: Final = 80
CHECKPOINT_PREFIX: Final = (
    "checkpoint:"  # what the name of a stream begins with that goes by the place of its checkpoint
)
QUERY_ID_PREFIX: Final = "query:"  # and of one that goes by its query id


@dataclass(frozen=True, slots=True)
class WriteOptions:
    path: str | None
    server: str | None
    key: str | None = field(repr=False)
    topic: str | None
    writer: str | None  # None: a batch without a name, or a stream that goes by its query id
    batch: int | None
    is_json: bool
    retry_ms: int = RETRY_TIMEOUT_MS

    @property
    def location(self) -> str:
        return self.path or self.server or ""

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


def _invalid_option(name: str, value: str, expected: str) -> BadInput:
    return BadInput(f"option {name} is {value[:_MESSAGE_VALUE_CHARS]!r}, it must be {expected}; nothing was written")


def _parse_text(name: str, value: str) -> str:
    if not value.strip():
        raise _invalid_option(name, value, "a text that is not empty")
    return value.strip()


def _parse_path(name: str, value: str) -> str:
    value = _parse_text(name, value)
    if scheme_of(value) in SERVER_SCHEMES:
        raise _invalid_option(name, value, "a directory; a server is named by the option server")
    return local_directory(value, f"option {name}", "nothing was written")


def _parse_topic(_: str, value: str) -> str:
    check_topic_name(value)
    return value


def _parse_query(name: str, value: str) -> str:
    value = _parse_text(name, value)
    if value.startswith((SINGLE_BATCH_PREFIX, CHECKPOINT_PREFIX, QUERY_ID_PREFIX)):
        raise _invalid_option(
            name,
            value,
            f"a name that does not begin with {SINGLE_BATCH_PREFIX}, {CHECKPOINT_PREFIX} or {QUERY_ID_PREFIX}",
        )
    return value


def _parse_batch_number(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise _invalid_option(name, value, "a whole number from 0")
    return int(value)


def _parse_retry_timeout(name: str, value: str) -> int:
    try:
        return reading.parse_duration_ms(name, value)
    except BadInput as error:
        raise BadInput(str(error).replace("nothing was read", "nothing was written")) from None


def _parse_payload(name: str, value: str) -> bool:
    if value.lower() not in ("bytes", "json"):
        raise _invalid_option(name, value, "bytes or json")
    return value.lower() == "json"


_PARSERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "path": _parse_path,
    "server": reading.parse_server_address,
    "key": _parse_text,
    "topic": _parse_topic,
    "query": _parse_query,
    "batch": _parse_batch_number,
    "payload": _parse_payload,
    "queryName": _parse_query,
    "checkpointLocation": _parse_text,
    "retryTimeout": _parse_retry_timeout,
}
SINK_OPTION_NAMES: Final = tuple(_PARSERS)


def parse_sink_options(given: Mapping[str, str]) -> WriteOptions:
    """The options of a writer, or BadInput that names the one that is wrong."""
    known = {name.lower(): name for name in SINK_OPTION_NAMES}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
            raise BadInput(
                f"there is no option {name[:_MESSAGE_VALUE_CHARS]!r}; nothing was written, did you mean {known[near]}?"
            )
        full = known[name.lower()]
        found[full] = _PARSERS[full](full, str(value))
    if ("path" in found) == ("server" in found):
        given_both = "both are given" if "path" in found else "neither is given"
        raise BadInput(f"options path and server: {given_both}; nothing was written, name a directory or a server")
    if "key" in found and "path" in found:
        raise BadInput("option key: it is for a server, and path is given; nothing was written, leave it out")
    if "retryTimeout" in found and "path" in found:
        raise BadInput("option retryTimeout: it is for a server, and path is given; nothing was written, leave it out")
    place = found.get("checkpointLocation", "")
    by_place = f"{CHECKPOINT_PREFIX}{place.rstrip('/')}" if place.startswith("/") or scheme_of(place) else None
    return WriteOptions(
        path=found.get("path"),
        server=found.get("server"),
        key=found.get("key"),
        topic=found.get("topic"),
        writer=found.get("query") or found.get("queryName") or by_place,
        batch=found.get("batch"),
        is_json=found.get("payload", False),
        retry_ms=found.get("retryTimeout", RETRY_TIMEOUT_MS),
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
    """Refuse columns that no record has, and types that do not fit."""
    names = [each.name for each in schema.fields]
    if len(set(names)) < len(names):
        raise BadInput(f"the DataFrame names a column twice: {names}; nothing was written")
    if "data" not in names:
        raise BadInput(
            f"the DataFrame has the columns {', '.join(names)} and no data; nothing was written, make it of them: "
            'select(struct("*").alias("data"))'
        )
    for each in schema.fields:
        if each.name not in SINK_COLUMNS:
            raise BadInput(
                f"the DataFrame has a column {each.name!r}, which no record has; nothing was written. Columns are "
                f"{', '.join(SINK_COLUMNS)}; drop it, or make it part of data with struct(…)"
            )
        wanted = _COLUMN_TYPES.get(each.name)
        if wanted is not None and not _is_accepted_type(each.dataType, wanted):
            said = _TYPE_NAMES.get(each.name, "string")
            raise BadInput(
                f"the DataFrame has {each.name} as {each.dataType.simpleString()}, it must be {said}; nothing was "
                "written, cast it"
            )
    if IS_JSON in names:
        _check_is_json_column(schema["data"].dataType, options)
    if options.topic is None and "topic" not in names:
        raise BadInput("option topic: no topic is named and there is no column topic; nothing was written, name one")


def _check_is_json_column(data: DataType, options: WriteOptions) -> None:
    """Refuse a second word on what the column says row by row."""
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


STAGED_CHUNK_BYTES = 32 << 20  # a chunk is closed at about this
_log = logging.getLogger("tidelog.spark")


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """What one task has staged."""

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
    if options.server is not None:
        return ServerSinkBackend(options.server, options.key, retry_ms=options.retry_ms)
    assert options.path is not None, "options name a path or a server"
    return DirectorySinkBackend(options.path)


class SinkWriter:
    """What a batch and a stream have in common."""

    def __init__(self, options: WriteOptions, schema: StructType, writer: str | None) -> None:
        """`writer`: the name under which batches are numbered; None: the id of the query, which its tasks know."""
        check_sink_schema(schema, options)
        self._options, self._writer = options, writer
        with closing(self.open_backend()) as target:
            target.prepare()

    def open_backend(self) -> SinkBackend:
        return open_sink_backend(self._options)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> StagedTask:
        query_id = current_query_id()
        owner = _staging_owner(self._writer_name(query_id))
        with closing(self.open_backend()) as target:
            return replace(TaskStaging(target, owner, self._options).run(batches), query_id=query_id)

    def _writer_name(self, query_id: str) -> str:
        if self._writer is None and not query_id:
            raise BadInput(
                "option query: Spark names no query id here, so a repeated batch could not be distinguished from a new "
                "one; nothing was written, name the query (option query, or queryName)"
            )
        return self._writer or f"{QUERY_ID_PREFIX}{query_id}"

    def publish(self, messages: Sequence[WriterCommitMessage | None], number: int) -> None:
        staged = [each for each in messages if isinstance(each, StagedTask)]
        chunks: dict[str, list[StagedChunk]] = {}
        total = EMPTY_FINGERPRINT
        for each in staged:
            total = add_fingerprints(total, each.fingerprint)
            for topic, chunk in each.chunks:
                chunks.setdefault(topic, []).append(chunk)
        query_id = next((each.query_id for each in staged if each.query_id), "")
        if not chunks and self._writer is None and not query_id:
            return  # no task ran: there is nothing to publish, and nothing staged
        writer = self._writer_name(query_id)
        with closing(self.open_backend()) as target:
            if chunks:
                batch = SinkBatch(writer, number, total, "" if writer.startswith(SINGLE_BATCH_PREFIX) else query_id)
                done = target.publish(batch, {topic: chunks[topic] for topic in sorted(chunks)})
                ranges = {topic: [made.first_seq, made.last_seq] for topic, made in done.items()}
                _log.info("%s", msgspec.json.encode({"writer": writer, "batch": number, "ranges": ranges}).decode())
                for topic, made in done.items():
                    _warn_changed_replay(writer, number, topic, made, sum(each.rows for each in chunks[topic]))
            target.clear_staging(_staging_owner(writer), self._staged_topics(chunks))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """The batch is given up. What cannot be cleared now is swept later: the reason for the abort counts."""
        staged = [each for each in messages if isinstance(each, StagedTask)]
        named = [topic for each in staged for topic, _ in each.chunks]
        query_id = next((each.query_id for each in staged if each.query_id), "")
        if self._writer is None and not query_id:
            return  # no task returned a message; the next batch of the query removes what they left
        writer = self._writer_name(query_id)
        try:
            with closing(self.open_backend()) as target:
                target.clear_staging(_staging_owner(writer), self._staged_topics(named))
        except (Error, OSError) as error:
            _log.warning("what was staged by %s stays until it is swept: %s", writer, error)

    def _staged_topics(self, topics: Sequence[str] | dict[str, list[StagedChunk]]) -> list[str]:
        return sorted({*topics, *([self._options.topic] if self._options.topic else [])})


def _staging_owner(writer: str) -> str:
    return xxh3_128_hexdigest(writer.encode())


def _warn_changed_replay(writer: str, number: int, topic: str, appended: Appended, rows: int) -> None:
    """Log a replay that brought another number of records than were written the first time."""
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
    """One task."""

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
            for topic, records, about in making.encode_rows(batch, self._options.topic, json=self._options.is_json):
                chunk = self._open_chunks.get(topic) or self._open_chunks.setdefault(
                    topic, _ChunkBuilder(records.schema)
                )
                chunk.write(records)
                total, rows = add_fingerprints(total, about), rows + records.num_rows
                size += records.nbytes
                if sum(each.size for each in self._open_chunks.values()) >= STAGED_CHUNK_BYTES:
                    self._close_chunk(max(self._open_chunks, key=lambda name: self._open_chunks[name].size))
        for topic in list(self._open_chunks):
            self._close_chunk(topic)
        return StagedTask(tuple(self._chunks), rows, size, total)

    def _close_chunk(self, topic: str) -> None:
        chunk = self._open_chunks.pop(topic)
        name = chunk_name(self._owner, self._clock.now_us() // 1000, self._random_bytes(8))
        self._chunks.append((topic, self._backend.stage(topic, name, chunk.rows, chunk.finish())))


class _ChunkBuilder:
    """A chunk that is being filled."""

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
    """A batch. Without a name it is its own and only one: a name by chance lets a lost answer be asked for again."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if options.server is not None and options.batch is None:  # one in foreachBatch waits, as a stream does
            check_reachable(options.server, options.key)
        self._number = options.batch or 0
        self._sink = SinkWriter(options, schema, options.writer or f"{SINGLE_BATCH_PREFIX}{secrets.token_hex(16)}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.publish(messages, self._number)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.abort(messages)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._sink = SinkWriter(options, schema, options.writer)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        self._sink.abort(messages)
