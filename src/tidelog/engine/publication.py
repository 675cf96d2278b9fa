"""[shell] Staged chunks become a numbered batch: one commit where it fits into one, else several under one identity.

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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final, NamedTuple

from xxhash import xxh3_128_hexdigest, xxh3_128_intdigest

from tidelog.engine import encode, numbers
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.encode import Parts
from tidelog.engine.engine import Engine
from tidelog.engine.numbered import BYTES_MAX, RECORD_BYTES
from tidelog.engine.numbers import ONCE, Written
from tidelog.engine.results import Appended
from tidelog.engine.staging import Chunk, Plan, Staging
from tidelog.engine.topic import Topic
from tidelog.errors import BadInput, BatchConflict, Error, TooLarge

ONE_MAX_BYTES: Final = BYTES_MAX
PART_MAX_BYTES: Final = 256 << 20  # all of a part is in memory once
_CHUNK_BITS: Final = 20
_CHUNKS_MAX: Final = (1 << _CHUNK_BITS) - 1
_NUMBER_MAX: Final = (1 << 63 - _CHUNK_BITS) - 1


class Batch(NamedTuple):
    writer: str
    number: int
    sum: tuple[int, int]
    query_id: str = ""


class Published(NamedTuple):
    appended: Appended  # from the first seq to the last one; records of others may be between
    created: bool  # the topic was made
    rows: int  # of the batch
    written: int  # of them by this call


def parts_writer(writer: str) -> str:
    """The name under which the parts of a writer's batches are numbered."""
    return f"{ONCE if writer.startswith(ONCE) else ''}parts:{xxh3_128_hexdigest(writer.encode())}"


def publish(engine: Engine, staging: Staging, topic: str, batch: Batch, chunks: Sequence[Chunk]) -> Published:
    """Write a batch of chunks, or what is missing of it, or say where it was written before. Durable on return.

    A second call for the same batch waits for the first one. Its driver may have died and come back while the server
    still reads the chunks of the first: two plans for one batch would publish rows of both.
    """
    with _running.one((staging.directory, topic, batch.writer)):
        return _Publication(engine, staging, topic, batch).run(chunks)


class _Running:
    """The publications of this process, one for each key at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[tuple[str, str, str], tuple[Lock, int]] = {}  # with how many use it

    @contextmanager
    def one(self, key: tuple[str, str, str]) -> Iterator[None]:
        with self._lock:
            mine, users = self._held.get(key, (Lock(), 0))
            self._held[key] = mine, users + 1
        try:
            with mine:
                yield
        finally:
            with self._lock:
                mine, users = self._held.pop(key)
                if users > 1:
                    self._held[key] = mine, users - 1


_running = _Running()


class _Publication:
    def __init__(self, engine: Engine, staging: Staging, topic: str, batch: Batch) -> None:
        self._engine, self._staging, self._topic, self._batch = engine, staging, topic, batch
        self._parts_writer = parts_writer(batch.writer)
        self._rows = 0
        self._created = False

    def run(self, chunks: Sequence[Chunk]) -> Published:
        batch = self._batch
        held = self._engine.find(self._topic)
        key = f"{self._topic}\0{batch.writer}\0{batch.number}"
        owner = chunks[0].name.partition("-")[0]
        parts = {} if held is None else held.numbered(self._parts_writer)
        if held is not None:
            mine = {batch.writer: held.numbered(batch.writer)}
            done = numbers.known(mine, self._topic, batch.writer, batch.number, batch.sum, batch.query_id)
            if done is not None:
                self._staging.drop_plan(owner, key)
                return self._told(parts, done.first, done.last, held.head_seq, deduped=True)
        plan = self._staging.plan(owner, key)
        at = self._progress(held, parts, plan)
        if plan is None:
            fitting = self._fitting(chunks)
            if fitting is not None:
                appended = self._append(fitting, batch.writer, batch.number, batch.sum, batch.query_id)
                return Published(appended, self._created, appended.count, self._rows)
            plan = self._planned(owner, key, chunks)
        else:
            self._check_plan(plan)
        return self._publish(plan, at, owner, key)

    def _fitting(self, chunks: Sequence[Chunk]) -> Parts | None:
        """All chunks as one batch; None where they are more than one commit takes."""
        found, stop = _filled(self._engine.limits, self._staging, chunks, 0, ONE_MAX_BYTES)
        return found if stop == len(chunks) else None

    def _planned(self, owner: str, key: str, chunks: Sequence[Chunk]) -> Plan:
        batch = self._batch
        if len(chunks) > _CHUNKS_MAX or batch.number > _NUMBER_MAX:
            raise BadInput(
                f"batch {batch.number} of {len(chunks)} chunks is more than {ONE_MAX_BYTES} bytes, and one in parts "
                f"has a number up to {_NUMBER_MAX} and at most {_CHUNKS_MAX} chunks; nothing was written"
            )
        for chunk in chunks:
            if chunk.size > ONE_MAX_BYTES:
                raise TooLarge(f"the chunk {chunk.name}", size=chunk.size, limit=ONE_MAX_BYTES)
        plan = Plan(self._topic, batch.writer, batch.number, batch.sum, batch.query_id, tuple(chunks))
        self._staging.keep_plan(owner, key, plan)
        return plan

    def _publish(self, plan: Plan, at: int, owner: str, key: str) -> Published:
        digest = xxh3_128_intdigest(repr(plan.chunks).encode())
        told = (digest >> 64, digest & ((1 << 64) - 1))
        done: Appended | None = None
        while done is None:
            try:
                found, stop = _filled(self._engine.limits, self._staging, plan.chunks, at, PART_MAX_BYTES)
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
        parts = {} if held is None else held.numbered(self._parts_writer)
        return self._told(parts, done.first_seq, done.last_seq, done.head_seq, deduped=done.deduped)

    def _append(self, found: Parts, writer: str, number: int, total: tuple[int, int], query_id: str) -> Appended:
        held, created = self._engine.ensure(self._topic, TopicConfig(), found)
        self._created |= created
        done = held.append_numbered(found, writer=writer, number=number, sum=total, query_id=query_id)
        self._rows += 0 if done.deduped else done.count
        return done

    def _told(self, parts: dict[int, Written], first: int, last: int, head: int, *, deduped: bool) -> Published:
        mine = [each for number, each in parts.items() if number >> _CHUNK_BITS == self._batch.number]
        rows = last - first + 1 + sum(each.last - each.first + 1 for each in mine)
        start = min([first, *(each.first for each in mine)])
        return Published(Appended(start, last, head, deduped), self._created, rows, self._rows)

    def _progress(self, held: Topic | None, parts: dict[int, Written], plan: Plan | None) -> int:
        """How many chunks of the batch are published. Refuse to go past a batch of which only a part is."""
        if not parts or held is None:
            return 0
        newest = next(reversed(parts))
        number, done = newest >> _CHUNK_BITS, newest & _CHUNKS_MAX
        batch = self._batch
        if number == batch.number and plan is not None:
            return done
        if number in held.numbered(batch.writer) or (number < batch.number and self._is_past(held, number)):
            return 0
        first, last = min(each.first for each in parts.values()), parts[newest].last
        reason = f"cannot be published: of batch {number} a part is, in seqs {first} to {last}, and the rest of it " + (
            "was staged, repeat that batch first" if number != batch.number else "is no longer in the staging area"
        )
        raise BatchConflict(self._topic, batch.writer, number=batch.number, newest=number, reason=reason)

    def _is_past(self, held: Topic, number: int) -> bool:
        """Whether a batch was finished so long ago that it is no longer known."""
        known = held.numbered(self._batch.writer)
        return bool(known) and number < next(iter(known))

    def _check_plan(self, plan: Plan) -> None:
        """Refuse a batch that is not the one whose parts are being published."""
        batch = self._batch
        begun = {batch.writer: {batch.number: Written(0, 0, plan.sum, plan.query_id)}}
        numbers.known(begun, self._topic, batch.writer, batch.number, batch.sum, batch.query_id)


def _filled(limits: EngineConfig, staging: Staging, chunks: Sequence[Chunk], at: int, limit: int) -> tuple[Parts, int]:
    """As many chunks from `at` on as a commit of so many bytes takes, at least one; and the first one that is left."""
    parts: list[encode.Batch | encode.Columns] = []
    weight, stop = 0, at
    for chunk in chunks[at:]:
        made = [encode.from_table(limits, table) for table in staging.read(chunk) if table.num_rows]
        size = sum(part.weight + RECORD_BYTES * len(part) for part in made)
        if parts and weight + size > limit:
            break
        if size > ONE_MAX_BYTES:
            raise TooLarge(f"the chunk {chunk.name}", size=size, limit=ONE_MAX_BYTES)
        parts += made
        weight, stop = weight + size, stop + 1
    if not parts:
        raise BadInput("a numbered batch has at least one record; nothing was written")
    return Parts(parts), stop
