"""Where a sink writes: a directory, with a writer of its own on the driver, or a server.

    driver      prepare                     the place is there, and is one of ours
    executor    stage                       a chunk, which is not readable yet
    driver      check, publish, clear       one range a topic; what was staged goes

By path the directory is held only while a batch is published, so several queries and `tidelog` commands can take turns;
who finds it held waits for `PATIENCE_MS`. A server holds it for good: then name the server.
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
from tidelog.spark.http_client import ServerHttpClient, quote_name
from tidelog.spark.row_encoder import Fingerprint
from tidelog.types import Buffer

WRITE_LOCK_WAIT_MS: Final = 30_000
_LOCK_RETRY_S: Final = 0.05
PUBLISH_TIMEOUT_S: Final = 300.0  # a batch may be a gigabyte, and is answered when it is synced
ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"


class SinkBatch(NamedTuple):
    """Which batch of whom, and what is in it."""

    writer: str
    number: int
    fingerprint: Fingerprint
    query_id: str = ""  # Spark's, which it keeps in the checkpoint; "": not known


class SinkBackend(Protocol):
    def prepare(self) -> None:
        """Be ready for tasks, or say why not."""
        ...

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> StagedChunk: ...

    def publish(self, batch: SinkBatch, chunks: Mapping[str, Sequence[StagedChunk]]) -> dict[str, Appended]:
        """Make a range of each topic's chunks, or say where it is. Refused for one topic, it is for all."""
        ...

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:
        """Forget what an owner has staged."""
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
                found = log.find(topic)
                if found is not None:
                    find_written_batch(topic, found.producer_batches(batch.writer), batch)
            for topic, mine in chunks.items():
                made = producer_batches.BatchId(batch.writer, batch.number, batch.fingerprint, batch.query_id)
                done[topic] = producer_batches.publish_batch(engine_of(log), self._staging, topic, made, mine).appended
        return done

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:  # noqa: ARG002
        self._staging.remove_chunks(owner)
        self._staging.sweep(self._clock.now_us() // 1000)

    def close(self) -> None:
        """Nothing is held between two calls."""

    @contextmanager
    def _open_for_write(self) -> Iterator[Database]:
        with open_when_unlocked(
            lambda: database.open(self._path, disk=self._disk, threads=False), self._path, self._clock
        ) as log:
            yield log


def open_when_unlocked(
    open_engine: Callable[[], Database], path: str, clock: Clock, wait_ms: int = WRITE_LOCK_WAIT_MS
) -> Database:
    """A directory for writing, when it is its turn."""
    until_ms, pause = clock.monotonic_ms() + wait_ms, Event()
    while True:
        try:
            return open_engine()
        except Locked as error:
            if clock.monotonic_ms() >= until_ms:
                raise Locked(
                    f"{path} is held by another writer; nothing was written. If that is a server, name it (option "
                    "server) in place of path; else end it and run the query again"
                ) from error
        pause.wait(_LOCK_RETRY_S)


def find_written_batch(topic: str, written: Mapping[int, BatchRange], batch: SinkBatch) -> BatchRange | None:
    """Where this batch is in a topic, if it was written before; BatchConflict where it cannot be."""
    held = {batch.writer: dict(written)}
    return idempotency.find_written_batch(held, topic, batch.writer, batch.number, batch.fingerprint, batch.query_id)


class ServerSinkBackend:
    def __init__(
        self, server: str, key: str | None, *, retry_ms: int = 0, http: ServerHttpClient | None = None
    ) -> None:
        self._server = server
        self._http = http or ServerHttpClient(
            server, key, timeout_s=PUBLISH_TIMEOUT_S, for_writes=True, retry_ms=retry_ms
        )

    def prepare(self) -> None:
        """An unreachable server is detected by the first task."""

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> StagedChunk:
        self._http.put(f"/v0/topics/{quote_name(topic)}/staging/{chunk}", content, ARROW_CONTENT_TYPE)
        return StagedChunk(chunk, rows, len(content), xxh3_64_intdigest(content))

    def publish(self, batch: SinkBatch, chunks: Mapping[str, Sequence[StagedChunk]]) -> dict[str, Appended]:
        if len(chunks) > 1:  # one is checked by its own request
            for topic in chunks:
                find_written_batch(topic, self._written_batches(topic, batch.writer), batch)
        return {topic: self._publish_topic(topic, batch, mine) for topic, mine in chunks.items()}

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
            {"chunk": each.name, "rows": each.rows, "bytes": each.size, "sum": f"{each.sum:016x}"} for each in chunks
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
            said = self._http.post(f"/v0/topics/{quote_name(topic)}/batches", body)
        except Unavailable as error:
            raise InDoubt(
                f"{error}. It is not known whether batch {batch.number} reached {topic}: run the query again, what is "
                "there is not written twice"
            ) from error
        return Appended(said["first_seq"], said["last_seq"], said["head_seq"], said["deduped"])

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:
        for topic in topics:
            self._http.delete(f"/v0/topics/{quote_name(topic)}/staging/{owner}")

    def close(self) -> None:
        self._http.close()


def check_reachable(server: str, key: str | None) -> None:
    """Raise Unavailable at once if no server responds, so that a wrong address fails before tasks wait for it."""
    with closing(ServerHttpClient(server, key, for_writes=True)) as wire:
        wire.get_bytes("/healthz")


def _parse_fingerprint(text: str) -> Fingerprint:
    return int(text[:16], 16), int(text[16:], 16)
