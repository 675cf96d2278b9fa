"""[shell] Appending a numbered batch: any number of tables as one atomic range, with its number in the same commit.

    ┌───────────────┬─────────────┬─────────────┬─────────────┐
    │ NumberedBatch │ AppendBatch │ AppendBatch │ AppendBatch │     one commit: one write into one file, one sync
    └───────────────┴─────────────┴─────────────┴─────────────┘
                     └────── chained: all or none ───────────┘

The number lies in front. A write that breaks off may leave it alone there, and replay then does not count it, because
no record follows; the other way round the records would be there and nobody would know whose they are. It is synced
whatever the topic's class is: whoever numbers batches forgets them once they are acknowledged.

[shell] Chunks of records on their way into a numbered batch: written by many, published or swept by one.

    <root>/staging/<owner>-<ms>-<chance>          an Arrow stream: data, and where there are such tag, node, meta, json
    <root>/staging/<owner>-<ms>-<chance>.part     one that is being written, or that somebody left behind
    <root>/staging/<owner>-<key>.plan             chunks of a batch that is published in parts (`publication`)

A chunk is named by nobody until its writer has told of it, so the files of tasks that failed, ran twice or were
forgotten are waste, and nothing more. The owner sweeps all it has when its batch is published or given up; what no
owner comes back for is swept by whoever is next, when it is `KEPT_MS` old. Nothing here is synced: a batch whose chunks
a power cut took was not published, and is made again.

[shell] Staged chunks become a numbered batch: one commit where it fits into one, else several under one identity.

    fits into ONE_MAX_BYTES     one commit, all of it or nothing, numbered (writer, number)
    does not                    a plan, then parts of PART_MAX_BYTES, each a commit of its own:

        staging/<owner>-….plan                        which chunks, in which order; synced before the first part
        parts:<hash of the writer>   number, chunks   part 1: after it so many chunks are published
        parts:<hash of the writer>   number, chunks   part 2
        writer                       number           the last part: from here on the batch is known

A batch that is repeated after a crash goes on with the plan: the rows that were staged first are the ones that are
published, whatever a repetition staged, and the newest part says how many chunks are done. So every row is published
once. Readers see the parts as they come, others may append between two of them. The chunks of a plan are not swept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_hexdigest, xxh3_128_intdigest

from tidelog.decompression import DEFAULT_EXPANSION_LIMIT, DecodedTooLarge
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, File, join
from tidelog.engine import append, batch_encoder, idempotency, retention
from tidelog.engine.append import Append
from tidelog.engine.batch_encoder import MultiBatch
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.idempotency import SINGLE_BATCH_PREFIX, BatchRange
from tidelog.engine.results import Appended
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, BatchConflict, Damaged, DiskFull, Error, NotFound, TooLarge, WriteFailed
from tidelog.formats import arrow_ipc, control_frames, frame
from tidelog.formats.control_frames import NumberedBatch
from tidelog.types import Buffer
from tidelog.wal import CommitFuture

if TYPE_CHECKING:
    from tidelog.engine.engine import Engine
    from tidelog.engine.topic import Topic

COMMIT_BYTES_MAX: Final = 1 << 30  # a segment's positions have 32 bits, and the whole of it is in memory once
RECORD_OVERHEAD_BYTES: Final = 8  # that a record takes beside its data: else empty ones would be free


class ProducerAppend(Append):
    """A batch with its number, on its way through the WAL."""

    __slots__ = ("body",)

    def __init__(
        self,
        topic: TopicState,
        first: int,
        ts_ms: int,
        batch: MultiBatch,
        key: str | None,
        *,
        writer: str,
        number: int,
        total: tuple[int, int],
        query_id: str,
    ) -> None:
        super().__init__(topic, first, ts_ms, batch, key)
        last = first + len(batch) - 1
        self.body = NumberedBatch(writer=writer, number=number, first=first, last=last, sum=total, query_id=query_id)
        self.prepend_durable(
            frame.encode(self.body.KIND, topic_id=topic.id, ts_ms=ts_ms, data=control_frames.encode(self.body))
        )

    def _publish(self) -> None:
        """Visible, known and no longer under way, at one moment: whoever repeats it finds one or the other."""
        super()._publish()
        idempotency.record_batch(self.topic.producer_batches, self.body)
        self.topic.pending_producer_batches.pop(self.body.writer, None)

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        with self.topic.lock:
            if self.topic.pending_producer_batches.get(self.body.writer) is self.future:
                del self.topic.pending_producer_batches[self.body.writer]


def prepare_tables(limits: EngineConfig, tables: Iterable[pa.Table | pa.RecordBatch]) -> MultiBatch:
    """The tables as one batch, checked; those without rows are left out."""
    parts, weight = [], 0
    for table in tables:
        if not table.num_rows:
            continue
        part = batch_encoder.batch_from_table(limits, table)
        weight += part.weight + RECORD_OVERHEAD_BYTES * len(part)
        if weight > COMMIT_BYTES_MAX:
            raise TooLarge("a numbered batch", size=weight, limit=COMMIT_BYTES_MAX)
        parts.append(part)
    if not parts:
        raise BadInput("a numbered batch has at least one record; nothing was written")
    return MultiBatch(parts)


def append_producer_batch(
    topic: TopicState, batch: MultiBatch, writer: str, number: int, total: tuple[int, int], query_id: str = ""
) -> Appended:
    """Write a batch, or say where it was written before (`deduped`). Durable on return."""
    retention.expire_records(topic)
    make = partial(ProducerAppend, writer=writer, number=number, total=total, query_id=query_id)
    while True:
        with topic.lock:
            topic.check_writable()
            idempotency.check_producer_batch(topic.producer_batches, writer, number, total, query_id)
            token, mine = topic.pending_producer_batches.get(writer), False
            if token is None:
                before = idempotency.find_written_batch(
                    topic.producer_batches, topic.name, writer, number, total, query_id
                )
                if before is not None:
                    return Appended(before.first, before.last, topic.index.head, True)
                token, mine = append.submit_batch(topic, batch, None, make), True
                if topic.is_ephemeral:
                    done = token.wait()
                    body = NumberedBatch(
                        writer=writer,
                        number=number,
                        first=done.first_seq,
                        last=done.last_seq,
                        sum=total,
                        query_id=query_id,
                    )
                    idempotency.record_batch(topic.producer_batches, body)
                else:
                    topic.pending_producer_batches[writer] = token
        if mine:
            return _wait_and_notify(topic, token)
        with suppress(Error):  # what became of another one is its caller's to hear
            token.wait()


def _wait_and_notify(topic: TopicState, future: CommitFuture[Appended]) -> Appended:
    done = future.wait()
    if topic.is_ephemeral:
        topic.notify_listeners()
    return done


STAGING_DIR: Final = "staging"
CHUNK_BYTES_MAX: Final = 1 << 30
BATCH_BYTES_MAX: Final = (
    128 << 20
)  # of one Arrow batch in a chunk once it is decoded: what can be appended, and offsets
STAGED_CHUNK_TTL_MS: Final = 7 * 86_400_000
_CHUNK_NAME: Final = re.compile(r"([0-9a-f]{16,48})-([0-9a-f]{12})-[0-9a-f]{16}")
_OWNER_NAME: Final = re.compile(r"[0-9a-f]{16,48}")
_TEXT_TYPES: Final = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
_COLUMN_TYPES: Final = {
    "data": _TEXT_TYPES,
    "tag": _TEXT_TYPES,
    "node": _TEXT_TYPES,
    "meta": _TEXT_TYPES,
    "json": (pa.bool_(),),
}
_PART_SUFFIX: Final = ".part"
_PLAN_SUFFIX: Final = ".plan"


class StagedChunk(NamedTuple):
    """What its writer tells of a chunk: whoever publishes it holds it against what is there."""

    name: str
    rows: int
    size: int
    sum: int  # XXH3-64 of its bytes


def chunk_name(owner: str, now_ms: int, chance: bytes) -> str:
    return f"{owner}-{now_ms:012x}-{chance.hex()}"


def check_chunk_name(name: str) -> str:
    if not _CHUNK_NAME.fullmatch(name):
        raise BadInput(f"{name!r:.80} cannot name a chunk; nothing was written")
    return name


class PublicationPlan(NamedTuple):
    """A batch that is published in parts: its chunks in their order, kept until the last part is published."""

    topic: str
    writer: str
    number: int
    sum: tuple[int, int]
    query_id: str
    chunks: tuple[StagedChunk, ...]


class StagedUpload:
    """A chunk that is being written."""

    def __init__(self, disk: Disk, path: str, name: str) -> None:
        self._disk, self._path, self._name = disk, path, name
        remove_if_exists(disk, path + _PART_SUFFIX)
        self._file: File = disk.open(path + _PART_SUFFIX, "create")
        self._hash, self._size = xxh3_64(), 0

    def write(self, pieces: Sequence[Buffer]) -> None:
        size = sum(map(len, pieces))
        if self._size + size > CHUNK_BYTES_MAX:
            raise TooLarge("a chunk", size=self._size + size, limit=CHUNK_BYTES_MAX)
        try:
            self._file.writev(self._size, pieces)
        except OSError as error:
            kind = DiskFull if error.errno in DISK_FULL_ERRNOS else WriteFailed
            raise kind(
                f"{self._path} cannot be written: {error}; nothing was published, free space and retry"
            ) from error
        for piece in pieces:
            self._hash.update(piece)
        self._size += size

    def finish(self, rows: int = 0) -> StagedChunk:
        self._file.close()
        self._disk.rename(self._path + _PART_SUFFIX, self._path)
        return StagedChunk(self._name, rows, self._size, self._hash.intdigest())

    def abandon(self) -> None:
        self._file.close()
        with suppress(OSError):
            remove_if_exists(self._disk, self._path + _PART_SUFFIX)


class StagingArea:
    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self.directory = disk, join(root, STAGING_DIR)

    @property
    def exists(self) -> bool:
        return self._disk.stat(self.directory) is not None

    def create(self) -> None:
        self._disk.make_dir(self.directory)

    def begin(self, name: str) -> StagedUpload:
        return StagedUpload(self._disk, join(self.directory, check_chunk_name(name)), name)

    def read(self, chunk: StagedChunk) -> Iterator[pa.RecordBatch]:
        """The records of a chunk, checked against what was told of it."""
        path = join(self.directory, check_chunk_name(chunk.name))
        try:
            file = self._disk.open(path)
        except FileNotFoundError:
            raise NotFound(
                f"the chunk {chunk.name} is not there: whoever staged it sees another directory, or it was swept; "
                "nothing was written, see that all of them have the same one and run it again"
            ) from None
        try:
            content = file.map() if file.size() else memoryview(b"")
            if len(content) != chunk.size or xxh3_64_intdigest(content) != chunk.sum:
                raise _chunk_error(path, "it is not what its writer wrote")
            yield from _read_chunk_batches(path, content, chunk.rows)
        finally:
            file.close()

    def remove_chunks(self, owner: str) -> int:
        """Forget the chunks of an owner, but for those of a plan; how many there were."""
        if not _OWNER_NAME.fullmatch(owner):
            raise BadInput(f"{owner!r:.80} owns no chunks; nothing was removed")
        planned = self._planned_chunk_paths(owner)
        mine = [path for path, whose, _ in self._list_chunks() if whose == owner and path not in planned]
        return sum(remove_if_exists(self._disk, path) for path in mine)

    def sweep(self, now_ms: int) -> int:
        """Forget what nobody came back for. A plan of a writer that has a name is kept until it is finished; one that
        nobody can repeat goes with its chunks."""
        old = [path for path, _, made_ms in self._list_chunks() if now_ms - made_ms > STAGED_CHUNK_TTL_MS]
        if not old:
            return 0
        plans = [(path, plan) for path in self._plan_paths() if (plan := self._decode_plan(path)) is not None]
        kept = {
            self._chunk_path(chunk.name)
            for _, plan in plans
            if not plan.writer.startswith(SINGLE_BATCH_PREFIX)
            for chunk in plan.chunks
        }
        swept = sum(remove_if_exists(self._disk, path) for path in old if path not in kept)
        for path, plan in plans:
            if plan.writer.startswith(SINGLE_BATCH_PREFIX) and not any(
                self._chunk_exists(chunk.name) for chunk in plan.chunks
            ):
                remove_if_exists(self._disk, path)
        return swept

    # ── plans ─────────────────────────────────────────────────────────────────────────────────

    def read_plan(self, owner: str, key: str) -> PublicationPlan | None:
        """The plan that was kept under a key; None where there is none."""
        return self._decode_plan(self._plan_path(owner, key))

    def save_plan(self, owner: str, key: str, plan: PublicationPlan) -> None:
        """Make a plan and its chunks durable: from here on they outlive a power cut."""
        for chunk in plan.chunks:
            file = self._disk.open(self._chunk_path(check_chunk_name(chunk.name)))
            try:
                file.sync()
            finally:
                file.close()
        self._disk.sync_dir(self.directory)
        path = self._plan_path(owner, key)
        try:
            replace_file(self._disk, path, msgspec.json.encode(plan))
        except OSError as error:
            kind = DiskFull if error.errno in DISK_FULL_ERRNOS else WriteFailed
            raise kind(f"{path} cannot be written: {error}; nothing was published, free space and retry") from error

    def drop_plan(self, owner: str, key: str) -> None:
        remove_if_exists(self._disk, self._plan_path(owner, key))

    def _plan_path(self, owner: str, key: str) -> str:
        return join(self.directory, f"{owner}-{xxh3_128_hexdigest(key.encode())}{_PLAN_SUFFIX}")

    def _decode_plan(self, path: str) -> PublicationPlan | None:
        content = read_file(self._disk, path)
        try:
            return None if content is None else msgspec.json.decode(content, type=PublicationPlan)
        except msgspec.DecodeError as error:
            raise Damaged(f"{path} cannot be read ({error}); nothing was published, put it back from a copy") from None

    def _plan_paths(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [
                join(self.directory, name)
                for name in self._disk.list_dir(self.directory)
                if name.endswith(_PLAN_SUFFIX)
            ]
        return []

    def _planned_chunk_paths(self, owner: str) -> set[str]:
        """Paths of chunks that a plan of an owner needs."""
        mine = (path for path in self._plan_paths() if _base_name(path).startswith(f"{owner}-"))
        found = (self._decode_plan(path) for path in mine)
        return {self._chunk_path(chunk.name) for plan in found if plan is not None for chunk in plan.chunks}

    def _chunk_path(self, name: str) -> str:
        return join(self.directory, name)

    def _chunk_exists(self, name: str) -> bool:
        return self._disk.stat(self._chunk_path(name)) is not None

    def _list_chunks(self) -> Iterator[tuple[str, str, int]]:
        try:
            names = self._disk.list_dir(self.directory)
        except FileNotFoundError:
            return
        for name in names:
            found = _CHUNK_NAME.fullmatch(name.removesuffix(_PART_SUFFIX))
            if found:
                yield join(self.directory, name), found[1], int(found[2], 16)


def _read_chunk_batches(path: str, content: memoryview, rows: int) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream, each bounded before it is decoded: a chunk comes from outside."""
    found = 0
    try:
        for batch in arrow_ipc.read_batches(content, _COLUMN_TYPES, BATCH_BYTES_MAX, DEFAULT_EXPANSION_LIMIT.start()):
            found += batch.num_rows
            yield batch
    except DecodedTooLarge as error:
        raise TooLarge(
            f"the chunk {_base_name(path)}: {error.what}", size=error.size, limit=error.limit, unit=error.unit
        ) from None
    except BadInput as error:
        raise _chunk_error(path, f"it cannot be appended ({_short_reason(error)})") from None
    if found != rows:
        raise _chunk_error(path, f"it has {found} rows and was to have {rows}")


def _short_reason(error: BadInput) -> str:
    return str(error).partition("; nothing was written")[0]


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def _chunk_error(path: str, reason: str) -> BadInput:
    return BadInput(f"the chunk {_base_name(path)}: {reason}; nothing was published, stage it again")


SINGLE_COMMIT_BYTES_MAX: Final = COMMIT_BYTES_MAX
PART_BYTES_MAX: Final = 256 << 20  # all of a part is in memory once
_CHUNK_BITS: Final = 20
_CHUNKS_MAX: Final = (1 << _CHUNK_BITS) - 1
_NUMBER_MAX: Final = (1 << 63 - _CHUNK_BITS) - 1


class BatchId(NamedTuple):
    writer: str
    number: int
    sum: tuple[int, int]
    query_id: str = ""


class PublishResult(NamedTuple):
    appended: Appended  # from the first seq to the last one; records of others may be between
    created: bool  # the topic was made
    rows: int  # of the batch
    written: int  # of them by this call


def parts_writer(writer: str) -> str:
    """The name under which the parts of a writer's batches are numbered."""
    prefix = SINGLE_BATCH_PREFIX if writer.startswith(SINGLE_BATCH_PREFIX) else ""
    return f"{prefix}parts:{xxh3_128_hexdigest(writer.encode())}"


def publish_batch(
    engine: Engine, staging: StagingArea, topic: str, batch: BatchId, chunks: Sequence[StagedChunk]
) -> PublishResult:
    """Write a batch of chunks, or what is missing of it, or say where it was written before. Durable on return.

    A second call for the same batch waits for the first one. Its driver may have died and come back while the server
    still reads the chunks of the first: two plans for one batch would publish rows of both.
    """
    with _publication_locks.hold((staging.directory, topic, batch.writer)):
        return _Publication(engine, staging, topic, batch).run(chunks)


class _PublicationLocks:
    """The publications of this process, one for each key at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._locks: dict[tuple[str, str, str], tuple[Lock, int]] = {}  # with how many use it

    @contextmanager
    def hold(self, key: tuple[str, str, str]) -> Iterator[None]:
        with self._lock:
            mine, users = self._locks.get(key, (Lock(), 0))
            self._locks[key] = mine, users + 1
        try:
            with mine:
                yield
        finally:
            with self._lock:
                mine, users = self._locks.pop(key)
                if users > 1:
                    self._locks[key] = mine, users - 1


_publication_locks = _PublicationLocks()


class _Publication:
    def __init__(self, engine: Engine, staging: StagingArea, topic: str, batch: BatchId) -> None:
        self._engine, self._staging, self._topic, self._batch = engine, staging, topic, batch
        self._parts_writer = parts_writer(batch.writer)
        self._rows = 0
        self._created = False

    def run(self, chunks: Sequence[StagedChunk]) -> PublishResult:
        batch = self._batch
        held = self._engine.find(self._topic)
        key = f"{self._topic}\0{batch.writer}\0{batch.number}"
        owner = chunks[0].name.partition("-")[0]
        parts = {} if held is None else held.producer_batches(self._parts_writer)
        if held is not None:
            mine = {batch.writer: held.producer_batches(batch.writer)}
            done = idempotency.find_written_batch(
                mine, self._topic, batch.writer, batch.number, batch.sum, batch.query_id
            )
            if done is not None:
                self._staging.drop_plan(owner, key)
                return self._result(parts, done.first, done.last, held.head_seq, deduped=True)
        plan = self._staging.read_plan(owner, key)
        at = self._published_chunks(held, parts, plan)
        if plan is None:
            fitting = self._read_as_one(chunks)
            if fitting is not None:
                appended = self._append(fitting, batch.writer, batch.number, batch.sum, batch.query_id)
                return PublishResult(appended, self._created, appended.count, self._rows)
            plan = self._make_plan(owner, key, chunks)
        else:
            self._check_plan(plan)
        return self._publish(plan, at, owner, key)

    def _read_as_one(self, chunks: Sequence[StagedChunk]) -> MultiBatch | None:
        """All chunks as one batch; None where they are more than one commit takes."""
        found, stop = _read_chunks(self._engine.limits, self._staging, chunks, 0, SINGLE_COMMIT_BYTES_MAX)
        return found if stop == len(chunks) else None

    def _make_plan(self, owner: str, key: str, chunks: Sequence[StagedChunk]) -> PublicationPlan:
        batch = self._batch
        if len(chunks) > _CHUNKS_MAX or batch.number > _NUMBER_MAX:
            raise BadInput(
                f"batch {batch.number} of {len(chunks)} chunks is more than {SINGLE_COMMIT_BYTES_MAX} bytes, and one "
                f"in parts "
                f"has a number up to {_NUMBER_MAX} and at most {_CHUNKS_MAX} chunks; nothing was written"
            )
        for chunk in chunks:
            if chunk.size > SINGLE_COMMIT_BYTES_MAX:
                raise TooLarge(f"the chunk {chunk.name}", size=chunk.size, limit=SINGLE_COMMIT_BYTES_MAX)
        plan = PublicationPlan(self._topic, batch.writer, batch.number, batch.sum, batch.query_id, tuple(chunks))
        self._staging.save_plan(owner, key, plan)
        return plan

    def _publish(self, plan: PublicationPlan, at: int, owner: str, key: str) -> PublishResult:
        digest = xxh3_128_intdigest(repr(plan.chunks).encode())
        told = (digest >> 64, digest & ((1 << 64) - 1))
        done: Appended | None = None
        while done is None:
            try:
                found, stop = _read_chunks(self._engine.limits, self._staging, plan.chunks, at, PART_BYTES_MAX)
                if stop == len(plan.chunks):
                    done = self._append(found, plan.writer, plan.number, plan.sum, plan.query_id)
                else:
                    self._append(found, self._parts_writer, plan.number << _CHUNK_BITS | stop, told, "")
                    # Records stay in memory until they are in segments (measured: 3.4 GB for a batch of 3 GB).
                    self._engine.checkpoint()
            except Error as error:
                if at:
                    error.args = (
                        f"{error}. Before that {at} of {len(plan.chunks)} chunks of batch {plan.number} were published "
                        f"in {self._topic}; repeat the batch, the rest follows and nothing is written twice",
                        *error.args[1:],
                    )
                raise
            at = stop
        self._staging.drop_plan(owner, key)
        held = self._engine.find(self._topic)
        parts = {} if held is None else held.producer_batches(self._parts_writer)
        return self._result(parts, done.first_seq, done.last_seq, done.head_seq, deduped=done.deduped)

    def _append(self, found: MultiBatch, writer: str, number: int, total: tuple[int, int], query_id: str) -> Appended:
        held, created = self._engine.ensure_topic(self._topic, TopicConfig(), found)
        self._created |= created
        done = held.append_numbered(found, writer=writer, number=number, sum=total, query_id=query_id)
        self._rows += 0 if done.deduped else done.count
        return done

    def _result(
        self, parts: dict[int, BatchRange], first: int, last: int, head: int, *, deduped: bool
    ) -> PublishResult:
        mine = [each for number, each in parts.items() if number >> _CHUNK_BITS == self._batch.number]
        rows = last - first + 1 + sum(each.last - each.first + 1 for each in mine)
        start = min([first, *(each.first for each in mine)])
        return PublishResult(Appended(start, last, head, deduped), self._created, rows, self._rows)

    def _published_chunks(self, held: Topic | None, parts: dict[int, BatchRange], plan: PublicationPlan | None) -> int:
        """How many chunks of the batch are published. Refuse to go past a batch of which only a part is."""
        if not parts or held is None:
            return 0
        newest = next(reversed(parts))
        number, done = newest >> _CHUNK_BITS, newest & _CHUNKS_MAX
        batch = self._batch
        if number == batch.number and plan is not None:
            return done
        if number in held.producer_batches(batch.writer) or (
            number < batch.number and self._is_forgotten(held, number)
        ):
            return 0
        first, last = min(each.first for each in parts.values()), parts[newest].last
        reason = f"cannot be published: of batch {number} a part is, in seqs {first} to {last}, and the rest of it " + (
            "was staged, repeat that batch first" if number != batch.number else "is no longer in the staging area"
        )
        raise BatchConflict(self._topic, batch.writer, number=batch.number, newest=number, reason=reason)

    def _is_forgotten(self, held: Topic, number: int) -> bool:
        """Whether a batch was finished so long ago that it is no longer known."""
        known = held.producer_batches(self._batch.writer)
        return bool(known) and number < next(iter(known))

    def _check_plan(self, plan: PublicationPlan) -> None:
        """Refuse a batch that is not the one whose parts are being published."""
        batch = self._batch
        begun = {batch.writer: {batch.number: BatchRange(0, 0, plan.sum, plan.query_id)}}
        idempotency.find_written_batch(begun, self._topic, batch.writer, batch.number, batch.sum, batch.query_id)


def _read_chunks(
    limits: EngineConfig, staging: StagingArea, chunks: Sequence[StagedChunk], at: int, limit: int
) -> tuple[MultiBatch, int]:
    """As many chunks from `at` on as a commit of so many bytes takes, at least one; and the first one that is left."""
    parts: list[batch_encoder.Batch | batch_encoder.ArrowBatch] = []
    weight, stop = 0, at
    for chunk in chunks[at:]:
        made = [batch_encoder.batch_from_table(limits, table) for table in staging.read(chunk) if table.num_rows]
        size = sum(part.weight + RECORD_OVERHEAD_BYTES * len(part) for part in made)
        if parts and weight + size > limit:
            break
        if size > SINGLE_COMMIT_BYTES_MAX:
            raise TooLarge(f"the chunk {chunk.name}", size=size, limit=SINGLE_COMMIT_BYTES_MAX)
        parts += made
        weight, stop = weight + size, stop + 1
    if not parts:
        raise BadInput("a numbered batch has at least one record; nothing was written")
    return MultiBatch(parts), stop
