"""Backends of the sink: a directory, which the driver opens as its writer, or a server.

    driver      prepare                      check the target
    executor    stage                        write a chunk that readers do not see
    driver      publish, clear_staging       append one range per topic; remove staged chunks

A directory is locked only while a batch is published, so several queries and `tidelog` commands can take turns; a
publish waits up to `WRITE_LOCK_WAIT_MS` for the lock. A server never releases it: write to the server then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from threading import Event
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from tidelog import database
from tidelog.clock import Clock, SystemClock
from tidelog.database import Database, engine_of
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.engine import Appended, idempotency, producer_batches
from tidelog.engine.idempotency import BatchRange
from tidelog.engine.producer_batches import StagedChunk, StagingArea
from tidelog.engine.startup import check_directory
from tidelog.errors import InDoubt, Locked, TopicNotFound, Unavailable
from tidelog.spark.http_client import Client, open_client, quote_name
from tidelog.spark.row_encoder import Fingerprint
from tidelog.types import Buffer

WRITE_LOCK_WAIT_MS: Final = 30_000
_LOCK_RETRY_S: Final = 0.05
PUBLISH_TIMEOUT_S: Final = 300.0  # a batch may be a gigabyte, and the response follows its sync
ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"


class SinkBatch(NamedTuple):
    """The writer, number and content of a batch."""

    writer: str
    number: int
    fingerprint: Fingerprint
    query_id: str = ""  # of Spark, in its checkpoint; "": not known


class SinkBackend(Protocol):
    def prepare(self) -> None:
        """Prepare for tasks. Raises if the target cannot be written."""
        ...

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> StagedChunk: ...

    def publish(self, batch: SinkBatch, chunks: Mapping[str, Sequence[StagedChunk]]) -> dict[str, Appended]:
        """Append the chunks of each topic as one range, or return the range of an earlier call. If a topic refuses the
        batch, nothing is appended to any topic."""
        ...

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:
        """Remove the staged chunks of an owner."""
        ...

    def close(self) -> None: ...


class DirectorySinkBackend:
    def __init__(self, path: str, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self._path = path.rstrip("/") or "/"
        self._disk, self._clock = disk or PosixDisk(), clock or SystemClock()
        self._staging = StagingArea(self._disk, self._path)

    def prepare(self) -> None:
        check_directory(self._disk, self._path, read_only=False)
        self._staging.create()

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> StagedChunk:  # noqa: ARG002
        if not self._staging.exists:
            raise Unavailable(
                f"there is no {self._staging.directory} here, which the driver has made. This is an executor: every "
                "one of them has to see the path that the driver sees; nothing was written, mount it there or write to "
                "a server"
            )
        upload = self._staging.begin(chunk)
        try:
            upload.write([content])
            return upload.finish(rows)
        except BaseException:
            upload.abandon()
            raise

    def publish(self, batch: SinkBatch, chunks: Mapping[str, Sequence[StagedChunk]]) -> dict[str, Appended]:
        done: dict[str, Appended] = {}
        with self._open_for_write() as log:
            for topic in chunks:
                opened = log.find(topic)
                if opened is not None:
                    find_written_batch(topic, opened.producer_batches(batch.writer), batch)
            batch_id = producer_batches.BatchId(batch.writer, batch.number, batch.fingerprint, batch.query_id)
            for topic, staged in chunks.items():
                result = producer_batches.publish_batch(engine_of(log), self._staging, topic, batch_id, staged)
                done[topic] = result.appended
        return done

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:  # noqa: ARG002
        self._staging.remove_chunks(owner)
        self._staging.sweep(self._clock.now_us() // 1000)

    def close(self) -> None:
        """No effect: nothing is open between two calls."""

    @contextmanager
    def _open_for_write(self) -> Iterator[Database]:
        with open_when_unlocked(
            lambda: database.open(self._path, disk=self._disk, threads=False), self._path, self._clock
        ) as log:
            yield log


def open_when_unlocked(
    open_engine: Callable[[], Database], path: str, clock: Clock, wait_ms: int = WRITE_LOCK_WAIT_MS
) -> Database:
    """Open a directory for writing; wait up to `wait_ms` for its lock."""
    until_ms, pause = clock.monotonic_ms() + wait_ms, Event()
    while True:
        try:
            return open_engine()
        except Locked as error:
            if clock.monotonic_ms() >= until_ms:
                step = "if that is a server, name it (option server) in place of path; else end it and run again"
                if error.server is not None:
                    step = f"give the option server={error.server} in place of path"
                raise Locked(
                    f"{path} is held by another writer; nothing was written, {step}", pid=error.pid, server=error.server
                ) from error
        pause.wait(_LOCK_RETRY_S)


def find_written_batch(topic: str, written: Mapping[int, BatchRange], batch: SinkBatch) -> BatchRange | None:
    """Return the range of a batch that was written before; None if it was not. Raises BatchConflict."""
    known = {batch.writer: dict(written)}
    return idempotency.find_written_batch(known, topic, batch.writer, batch.number, batch.fingerprint, batch.query_id)


class ServerSinkBackend:
    def __init__(self, server: str, key: str | None, *, retry_ms: int = 0, http: Client | None = None) -> None:
        self._server = server
        self._http = http or open_client(server, key, timeout_s=PUBLISH_TIMEOUT_S, for_writes=True, retry_ms=retry_ms)

    def prepare(self) -> None:
        """No effect: the first task detects an unreachable server."""

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> StagedChunk:
        self._http.put_bytes(f"/v0/topics/{quote_name(topic)}/staging/{chunk}", content, ARROW_CONTENT_TYPE)
        return StagedChunk(chunk, rows, len(content), xxh3_64_intdigest(content))

    def publish(self, batch: SinkBatch, chunks: Mapping[str, Sequence[StagedChunk]]) -> dict[str, Appended]:
        if len(chunks) > 1:  # a single topic is checked by its request
            for topic in chunks:
                find_written_batch(topic, self._written_batches(topic, batch.writer), batch)
        return {topic: self._publish_topic(topic, batch, staged) for topic, staged in chunks.items()}

    def _written_batches(self, topic: str, writer: str) -> dict[int, BatchRange]:
        try:
            rows = self._http.get(f"/v0/topics/{quote_name(topic)}/batches", writer=writer)["batches"]
        except TopicNotFound:
            return {}
        return {
            row["number"]: BatchRange(
                row["first_seq"], row["last_seq"], _parse_fingerprint(row["sum"]), row["query_id"]
            )
            for row in rows
        }

    def _publish_topic(self, topic: str, batch: SinkBatch, chunks: Sequence[StagedChunk]) -> Appended:
        staged = [
            {"chunk": chunk.name, "rows": chunk.rows, "bytes": chunk.size, "sum": f"{chunk.sum:016x}"}
            for chunk in chunks
        ]
        high, low = batch.fingerprint
        body = {
            "writer": batch.writer,
            "number": batch.number,
            "sum": f"{high:016x}{low:016x}",
            "query_id": batch.query_id,
            "chunks": staged,
        }
        try:
            done = self._http.post(f"/v0/topics/{quote_name(topic)}/batches", body)
        except Unavailable as error:
            raise InDoubt(
                f"{error}. It is not known whether batch {batch.number} reached {topic}: run the query again, what is "
                "there is not written twice"
            ) from error
        return Appended(done["first_seq"], done["last_seq"], done["head_seq"], done["deduped"])

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:
        for topic in topics:
            self._http.delete(f"/v0/topics/{quote_name(topic)}/staging/{owner}")

    def close(self) -> None:
        self._http.close()


def check_reachable(server: str, key: str | None) -> None:
    """Raise Unavailable at once if no server responds, so that a wrong address fails before tasks wait for it."""
    with closing(open_client(server, key, for_writes=True)) as http:
        http.get_bytes("/healthz")


def _parse_fingerprint(text: str) -> Fingerprint:
    return int(text[:16], 16), int(text[16:], 16)
