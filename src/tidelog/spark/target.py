"""[shell] Where a sink writes: a directory, with a writer of its own on the driver, or a server.

    driver      prepare                     the place is there, and is one of ours
    executor    stage                       a chunk, which nobody reads yet
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

from tidelog import engine as topics
from tidelog.clock import Clock, SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk
from tidelog.engine import Appended, Engine, numbers, publication
from tidelog.engine.numbers import Written
from tidelog.engine.opening import check_directory
from tidelog.engine.staging import Chunk, Staging
from tidelog.errors import InDoubt, Locked, TopicNotFound, Unavailable
from tidelog.spark.fingerprint import Sum
from tidelog.spark.wire import Wire, name
from tidelog.types import Buffer

PATIENCE_MS: Final = 30_000
_PAUSE_S: Final = 0.05
TIMEOUT_S: Final = 300.0  # a batch may be a gigabyte, and is answered when it is synced
ARROW: Final = "application/vnd.apache.arrow.stream"


class Batch(NamedTuple):
    """Which batch of whom, and what is in it."""

    writer: str
    number: int
    sum: Sum
    query_id: str = ""  # Spark's, which it keeps in the checkpoint; "": not known


class Target(Protocol):
    def prepare(self) -> None:
        """Be ready for tasks, or say why not."""
        ...

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> Chunk: ...

    def publish(self, batch: Batch, chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, Appended]:
        """Make a range of each topic's chunks, or say where it is. Refused for one topic, it is for all."""
        ...

    def clear(self, owner: str, topics: Sequence[str]) -> None:
        """Forget what an owner has staged."""
        ...

    def close(self) -> None: ...


class PathTarget:
    def __init__(self, path: str, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self._path = path.rstrip("/") or "/"
        self._disk, self._clock = disk or PosixDisk(), clock or SystemClock()
        self._staging = Staging(self._disk, self._path)

    def prepare(self) -> None:
        check_directory(self._disk, self._path, read_only=False)
        self._staging.make()

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> Chunk:  # noqa: ARG002
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

    def publish(self, batch: Batch, chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, Appended]:
        done: dict[str, Appended] = {}
        with self._opened() as log:
            for topic in chunks:
                found = log.find(topic)
                if found is not None:
                    known(topic, found.numbered(batch.writer), batch)
            for topic, mine in chunks.items():
                made = publication.Batch(batch.writer, batch.number, batch.sum, batch.query_id)
                done[topic] = publication.publish(log, self._staging, topic, made, mine).appended
        return done

    def clear(self, owner: str, topics: Sequence[str]) -> None:  # noqa: ARG002
        self._staging.remove(owner)
        self._staging.sweep(self._clock.now_us() // 1000)

    def close(self) -> None:
        """Nothing is held between two calls."""

    @contextmanager
    def _opened(self) -> Iterator[Engine]:
        with waiting(lambda: topics.open(self._path, disk=self._disk, threads=False), self._path, self._clock) as log:
            yield log


def waiting(opened: Callable[[], Engine], path: str, clock: Clock, patience_ms: int = PATIENCE_MS) -> Engine:
    """A directory for writing, when it is its turn."""
    until_ms, pause = clock.monotonic_ms() + patience_ms, Event()
    while True:
        try:
            return opened()
        except Locked as error:
            if clock.monotonic_ms() >= until_ms:
                raise Locked(
                    f"{path} is held by another writer; nothing was written. If that is a server, name it (option "
                    "server) in place of path; else end it and run the query again"
                ) from error
        pause.wait(_PAUSE_S)


def known(topic: str, written: Mapping[int, Written], batch: Batch) -> Written | None:
    """Where this batch is in a topic, if it was written before; BatchConflict where it cannot be."""
    held = {batch.writer: dict(written)}
    return numbers.known(held, topic, batch.writer, batch.number, batch.sum, batch.query_id)


class ServerTarget:
    def __init__(self, server: str, key: str | None, *, retry_ms: int = 0, wire: Wire | None = None) -> None:
        self._server = server
        self._wire = wire or Wire(server, key, timeout_s=TIMEOUT_S, writes=True, retry_ms=retry_ms)

    def prepare(self) -> None:
        """Whoever cannot be reached is found out by the first task."""

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> Chunk:
        self._wire.put(f"/v0/topics/{name(topic)}/staging/{chunk}", content, ARROW)
        return Chunk(chunk, rows, len(content), xxh3_64_intdigest(content))

    def publish(self, batch: Batch, chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, Appended]:
        if len(chunks) > 1:  # one is checked by its own request
            for topic in chunks:
                known(topic, self._known(topic, batch.writer), batch)
        return {topic: self._put(topic, batch, mine) for topic, mine in chunks.items()}

    def _known(self, topic: str, writer: str) -> dict[int, Written]:
        try:
            rows = self._wire.get(f"/v0/topics/{name(topic)}/batches", writer=writer)["batches"]
        except TopicNotFound:
            return {}
        return {
            row["number"]: Written(row["first_seq"], row["last_seq"], _words(row["sum"]), row["query_id"])
            for row in rows
        }

    def _put(self, topic: str, batch: Batch, chunks: Sequence[Chunk]) -> Appended:
        told = [
            {"chunk": each.name, "rows": each.rows, "bytes": each.size, "sum": f"{each.sum:016x}"} for each in chunks
        ]
        high, low = batch.sum
        body = {
            "writer": batch.writer,
            "number": batch.number,
            "sum": f"{high:016x}{low:016x}",
            "query_id": batch.query_id,
            "chunks": told,
        }
        try:
            said = self._wire.post(f"/v0/topics/{name(topic)}/batches", body)
        except Unavailable as error:
            raise InDoubt(
                f"{error}. It is not known whether batch {batch.number} reached {topic}: run the query again, what is "
                "there is not written twice"
            ) from error
        return Appended(said["first_seq"], said["last_seq"], said["head_seq"], said["deduped"])

    def clear(self, owner: str, topics: Sequence[str]) -> None:
        for topic in topics:
            self._wire.delete(f"/v0/topics/{name(topic)}/staging/{owner}")

    def close(self) -> None:
        self._wire.close()


def check_reachable(server: str, key: str | None) -> None:
    """Raise Unavailable at once where no server answers: a wrong address is told before tasks wait for it."""
    with closing(Wire(server, key, writes=True)) as wire:
        wire.content("/healthz")


def _words(text: str) -> Sum:
    return int(text[:16], 16), int(text[16:], 16)
