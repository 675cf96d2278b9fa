"""The sink: tasks stage, the driver publishes one range a topic and batch. It keeps nothing; every object is made anew.

    Spark says                    we say
    write(rows), on an executor   stage: chunks, whose names only the message tells
    commit(messages, batch id)    publish: numbered by (writer, batch id), so that a repetition is told where it is
    abort(messages)               clear: what was staged goes

Only the attempt of a task whose message Spark hands over counts; what others staged is waste and is swept. A batch
without rows publishes nothing. What is in a batch is told by a sum of its rows, whatever tasks they came in.

Tasks know the id of their query (`sql.streaming.queryId`), the driver's Python worker does not: messages carry it. It
tells a replay from a checkpoint that was deleted (`engine.numbers`), and is the writer's name where there is no other.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from xxhash import xxh3_128_hexdigest

from tidelog.clock import Clock, SystemClock
from tidelog.engine import Appended
from tidelog.engine.numbers import ONCE
from tidelog.engine.staging import Chunk, name_of
from tidelog.errors import BadInput, Error
from tidelog.spark import rows as making
from tidelog.spark.fingerprint import NOTHING, Sum, added
from tidelog.spark.sink_options import OF_QUERY, WriteOptions, check_schema
from tidelog.spark.target import Batch, PathTarget, ServerTarget, Target, check_reachable

STAGED_BYTES = 32 << 20  # a chunk is closed at about this
_log = logging.getLogger("tidelog.spark")


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one task has staged."""

    chunks: tuple[tuple[str, Chunk], ...] = ()  # each with its topic
    rows: int = 0
    size: int = 0
    sum: Sum = NOTHING
    query_id: str = ""


def query_id_here() -> str:
    """Return the id of the streaming query that runs this task, "" outside of one."""
    context = TaskContext.get()
    return (context.getLocalProperty("sql.streaming.queryId") if context is not None else None) or ""


def target_of(options: WriteOptions) -> Target:
    if options.server is not None:
        return ServerTarget(options.server, options.key, retry_ms=options.retry_ms)
    assert options.path is not None, "options name a path or a server"
    return PathTarget(options.path)


class Sink:
    """What a batch and a stream have in common."""

    def __init__(self, options: WriteOptions, schema: StructType, writer: str | None) -> None:
        """`writer`: the name under which batches are numbered; None: the id of the query, which its tasks know."""
        check_schema(schema, options)
        self._options, self._writer = options, writer
        with closing(self.target()) as target:
            target.prepare()

    def target(self) -> Target:
        return target_of(self._options)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        query_id = query_id_here()
        owner = _owner(self._named(query_id))
        with closing(self.target()) as target:
            return replace(Staging(target, owner, self._options).run(batches), query_id=query_id)

    def _named(self, query_id: str) -> str:
        if self._writer is None and not query_id:
            raise BadInput(
                "option query: Spark names no query id here, so a batch that is repeated could not be told from a new "
                "one; nothing was written, name the query (option query, or queryName)"
            )
        return self._writer or f"{OF_QUERY}{query_id}"

    def publish(self, messages: Sequence[WriterCommitMessage | None], number: int) -> None:
        staged = [each for each in messages if isinstance(each, Staged)]
        chunks: dict[str, list[Chunk]] = {}
        total = NOTHING
        for each in staged:
            total = added(total, each.sum)
            for topic, chunk in each.chunks:
                chunks.setdefault(topic, []).append(chunk)
        query_id = next((each.query_id for each in staged if each.query_id), "")
        if not chunks and self._writer is None and not query_id:
            return  # no task ran: there is nothing to publish, and nothing staged
        writer = self._named(query_id)
        with closing(self.target()) as target:
            if chunks:
                batch = Batch(writer, number, total, "" if writer.startswith(ONCE) else query_id)
                done = target.publish(batch, {topic: chunks[topic] for topic in sorted(chunks)})
                ranges = {topic: [made.first_seq, made.last_seq] for topic, made in done.items()}
                _log.info("%s", msgspec.json.encode({"writer": writer, "batch": number, "ranges": ranges}).decode())
                for topic, made in done.items():
                    _warn_of_change(writer, number, topic, made, sum(each.rows for each in chunks[topic]))
            target.clear(_owner(writer), self._topics(chunks))

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """The batch is given up. What cannot be cleared now is swept later: the reason for the abort counts."""
        staged = [each for each in messages if isinstance(each, Staged)]
        named = [topic for each in staged for topic, _ in each.chunks]
        query_id = next((each.query_id for each in staged if each.query_id), "")
        if self._writer is None and not query_id:
            return  # no task has told of anything; the next batch of the query sweeps what they left
        writer = self._named(query_id)
        try:
            with closing(self.target()) as target:
                target.clear(_owner(writer), self._topics(named))
        except (Error, OSError) as error:
            _log.warning("what was staged by %s stays until it is swept: %s", writer, error)

    def _topics(self, named: Sequence[str] | dict[str, list[Chunk]]) -> list[str]:
        return sorted({*named, *([self._options.topic] if self._options.topic else [])})


def _owner(writer: str) -> str:
    return xxh3_128_hexdigest(writer.encode())


def _warn_of_change(writer: str, number: int, topic: str, done: Appended, rows: int) -> None:
    """Log a replay that brought another number of records than were written the first time."""
    if done.deduped and done.count != rows:
        _log.warning(
            "%s: batch %d of %s was written before with %d records, seqs %d to %d, and is repeated with %d: its source "
            "has changed since; what was written stays",
            topic,
            number,
            writer,
            done.count,
            done.first_seq,
            done.last_seq,
            rows,
        )


class Staging:
    """One task."""

    def __init__(
        self,
        target: Target,
        owner: str,
        options: WriteOptions,
        *,
        clock: Clock | None = None,
        chance: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._target, self._owner, self._options = target, owner, options
        self._clock, self._chance = clock or SystemClock(), chance
        self._open: dict[str, _Open] = {}
        self._chunks: list[tuple[str, Chunk]] = []

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        total, rows, size = NOTHING, 0, 0
        for batch in batches:
            for topic, records, about in making.made(batch, self._options.topic, json=self._options.json):
                chunk = self._open.get(topic) or self._open.setdefault(topic, _Open(records.schema))
                chunk.write(records)
                total, rows = added(total, about), rows + records.num_rows
                size += records.nbytes
                if sum(each.size for each in self._open.values()) >= STAGED_BYTES:
                    self._close(max(self._open, key=lambda name: self._open[name].size))
        for topic in list(self._open):
            self._close(topic)
        return Staged(tuple(self._chunks), rows, size, total)

    def _close(self, topic: str) -> None:
        chunk = self._open.pop(topic)
        name = name_of(self._owner, self._clock.now_us() // 1000, self._chance(8))
        self._chunks.append((topic, self._target.stage(topic, name, chunk.rows, chunk.content())))


class _Open:
    """A chunk that is being filled."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pa.ipc.new_stream(self._sink, schema)
        self.rows = self.size = 0

    def write(self, records: pa.RecordBatch) -> None:
        self._writer.write_batch(records)
        self.rows, self.size = self.rows + records.num_rows, self.size + records.nbytes

    def content(self) -> memoryview:
        self._writer.close()
        return memoryview(self._sink.getvalue())


class TopicWriter(DataSourceArrowWriter):
    """A batch. Without a name it is its own and only one: a name by chance lets a lost answer be asked for again."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if options.server is not None and options.batch is None:  # one in foreachBatch waits, as a stream does
            check_reachable(options.server, options.key)
        self._number = options.batch or 0
        self._sink = Sink(options, schema, options.writer or f"{ONCE}{secrets.token_hex(16)}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.publish(messages, self._number)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.forget(messages)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._sink = Sink(options, schema, options.writer)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        self._sink.forget(messages)
