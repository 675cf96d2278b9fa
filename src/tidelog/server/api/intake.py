"""[shell] A write without an end: a streamed body, cut into batches that are written as it comes.

    pieces ──► feed: lines or Arrow messages ──► batch ──► staged in order ──► outcome
                                                 └ at most 4 MiB or 10 000 records; a few under way at a time

Each batch is atomic, the stream is not: an error in the middle tells exactly what was written before it. Batches
are cut by what the stream says and never by how it came, so a retry with the same Idempotency-Key cuts it the same:
batch n has the key `<key>:<n>`, and what was written before is not written again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol, TypeVar

from tidelog.engine import Appended, Token, Topic
from tidelog.errors import BadInput, Error, TopicNotFound
from tidelog.server.api import line_feed
from tidelog.server.api import write as writing
from tidelog.server.api.arrow_feed import Messages
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem, of_error, of_status
from tidelog.server.api.records import Cut
from tidelog.server.api.schedule import check_queue
from tidelog.server.http.seam import Broken, Gone, Response

T = TypeVar("T")
_UNDER_WAY: Final = 3  # batches between staged and acknowledged: one at the disk, one waiting, one being made
_INLINE_BYTES: Final = 64 << 10  # less than this is decoded where it is: a change of threads costs more
_INLINE_BYTES_MIN: Final = 1 << 10  # what a call costs at least, however small the message is
_KEY_BYTES_MAX: Final = 240  # room for the batch's number behind it


class Feed(Protocol):
    """Pieces of a body in, batches out. `where` says what of the body is being looked at."""

    @property
    def where(self) -> dict[str, int]: ...

    @property
    def size(self) -> int:
        """Bytes that wait to be cut."""
        ...

    @property
    def due(self) -> bool:
        """Whether `take` has something to do."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the body that are kept."""
        ...

    @property
    def claimed(self) -> int:
        """Bytes that the next `take` decodes and keeps until `is_decoded` is false."""
        ...

    @property
    def is_decoded(self) -> bool:
        """Whether decoded records wait to be taken."""
        ...

    def add(self, piece: bytes) -> None: ...

    def end(self) -> None:
        """There are no more pieces. Raises where what came is not whole."""
        ...

    def take(self) -> Cut | None:
        """The next batch; None for what holds no record."""
        ...


async def write(call: Call, *, arrow: bool) -> Response:
    limits = call.service.engine.limits
    message_bytes_max = call.service.config.max_body_bytes or (1 << 31) - 1
    feed: Feed = (
        Messages(limits, message_bytes_max, call.service.config.allowance.start())
        if arrow
        else line_feed.Lines(limits, call.service.now_ms, raw=call.query.flag("raw", False))
    )
    assert call.request.pieces is not None, "asked for bodies that come in pieces"
    return await Intake(call, feed).run(call.request.pieces)


class Intake:
    """One stream on its way in."""

    def __init__(self, call: Call, feed: Feed) -> None:
        self._call, self._feed, self._service = call, feed, call.service
        self._create = None if call.query.text("create") is None else call.query.flag("create", True)
        self._topic: Topic | None = None
        self._created = False
        self._key = _key_of(call)
        self._staged = 0
        self._held_us = 0  # waiting to be let in
        self._reserved = 0  # bytes of the decode budget
        self._inline = 0  # bytes that were decoded on the loop since others had their turn
        self._under_way: deque[tuple[asyncio.Task[Appended], dict[str, int]]] = deque()
        self._done: list[Appended] = []

    async def run(self, pieces: AsyncIterator[bytes]) -> Response:
        self._topic = self._service.engine.find(self._call.topic)
        if self._topic is None and self._create is False:
            raise TopicNotFound(self._call.topic)
        try:
            await self._pass_on(pieces)
        except (Problem, Error) as error:
            raise await self._failure(error, self._feed.where) from error
        except (Gone, Broken) as error:
            broken = error if isinstance(error, Broken) else Broken(400, "the body broke off")
            problem = of_status(broken.status, f"{broken.reason}; nothing was written")
            raise await self._failure(problem, {}) from error  # nothing in the body is to blame
        finally:
            self._release()
            for task, _ in self._under_way:
                task.cancel()  # nobody waits for the answer any more; what was staged is written all the same
        return self._answer()

    async def _pass_on(self, pieces: AsyncIterator[bytes]) -> None:
        feed = self._feed
        async for piece in pieces:
            feed.add(piece)
            while feed.due:
                await self._put()
            self._keep()
        feed.end()
        while feed.due:
            await self._put()
        if not self._staged:
            raise BadInput("a write has at least one record; nothing was written")
        while self._under_way:
            await self._outcome()

    async def _put(self) -> None:
        """Cut the next batch and stage it after the one before."""
        await self._service.caught_up()
        self._call.check_key()
        if claimed := self._feed.claimed:
            self._keep()
            await self._service.decoding.reserve(claimed)
            self._reserved = claimed
        try:
            await self._stage_next()
        finally:
            if not self._feed.is_decoded:
                self._release()

    def _keep(self) -> None:
        """Count what is kept of the body against the bound of the process."""
        assert self._call.exchange is not None, "a call that reached its handler has one"
        self._call.exchange.keep_body(self._feed.held_bytes)

    def _release(self) -> None:
        reserved, self._reserved = self._reserved, 0
        if reserved:
            self._service.decoding.release(reserved)

    async def _stage_next(self) -> None:
        cut = await self._work(self._feed.size, self._feed.take)
        if cut is None:
            return
        if cut.scheduled:
            check_queue(self._call.topic, "log" if self._topic is None else self._topic.config.type)
        if self._topic is None:
            self._topic, self._created = await writing.ensure(
                self._service, self._call.topic, self._create, None, cut.batch, self._call.principal
            )
        self._staged += 1
        self._call.durability = self._topic.config.durability
        topic, key = self._topic, None if self._key is None else f"{self._key}:{self._staged}"
        far = topic.is_due or cut.batch.weight > _INLINE_BYTES
        # A stream waits rather than break off: it takes in no more meanwhile, which its sender feels.
        token, held_us = await self._service.admission.staged(
            topic, cut.batch, key, insists=True, work=self._service.work if far else None
        )
        self._held_us += held_us
        self._under_way.append((asyncio.ensure_future(self._committed(token)), cut.where))
        while len(self._under_way) >= _UNDER_WAY:
            await self._outcome()

    async def _work(self, size: int, call: Callable[[], T]) -> T:
        """Run a call on the loop where it is small, and give way to others after every `_INLINE_BYTES` of such work:
        what holds no records is never staged, so that nothing else would wait."""
        self._inline += max(size, _INLINE_BYTES_MIN)
        if self._inline > _INLINE_BYTES:
            self._inline = 0
            await asyncio.sleep(0)
        return call() if size <= _INLINE_BYTES else await self._service.work(call)

    async def _committed(self, token: Token[Appended]) -> Appended:
        """Not on the loop, even where small writes are committed there: this one is megabytes."""
        commits = self._service.commits
        return await (self._service.work(token.wait) if commits.on_loop else commits.outcome(token))

    async def _outcome(self) -> None:
        """Wait for the oldest batch under way."""
        task, where = self._under_way[0]
        try:
            done = await task
        except Error as error:
            self._under_way.popleft()
            raise await self._failure(error, where) from error
        self._under_way.popleft()
        self._note(done)

    def _note(self, done: Appended) -> None:
        self._done.append(done)
        self._service.metrics.wrote(self._call.topic, 0 if done.deduped else done.count)

    # ── telling ───────────────────────────────────────────────────────────────────────────────

    def _answer(self) -> Response:
        done = self._done
        took = self._call.performance(
            wal_append_ms=sum(each.write_us for each in done) / 1000, fsync_ms=sum(each.sync_us for each in done) / 1000
        )
        held_us = self._held_us + sum(each.held_us for each in done)
        if held_us:
            took["throttle_wait_ms"] = held_us / 1000
        said = {
            "topic": self._call.topic,
            "first_seq": done[0].first_seq,
            "last_seq": done[-1].last_seq,
            "head_seq": max(each.head_seq for each in done),
            "count": sum(each.count for each in done),
            "batches": len(done),
            "created": self._created,
            "deduped": sum(each.deduped for each in done),
            "durability": self._call.durability,
            "performance": took,
        }
        return ok(said, status=201 if self._created else 200)

    async def _failure(self, error: Problem | Error, where: dict[str, int]) -> Problem:
        """The error, with what was written all the same: batches behind the one that failed may have been."""
        if isinstance(error, _Told):
            return error
        problem = error if isinstance(error, Problem) else of_error(error)
        detail = dict(problem.detail or {})
        in_doubt = "written" in detail and detail["written"] is None  # nobody knows of the batch that failed
        while self._under_way:
            task, _ = self._under_way.popleft()
            try:
                self._note(await task)
            except Error as another:  # the first one is what is told
                in_doubt = in_doubt or another.written is None
        if in_doubt:
            detail["in_doubt"] = True
        return _Told(problem, {**detail, "written": self._written(), **where}, sum(each.count for each in self._done))

    def _written(self) -> dict[str, Any]:
        ranges: list[list[int]] = []
        for done in sorted(self._done, key=lambda each: each.first_seq):
            if ranges and ranges[-1][1] + 1 == done.first_seq:
                ranges[-1][1] = done.last_seq
            else:
                ranges.append([done.first_seq, done.last_seq])
        return {
            "count": sum(each.count for each in self._done),
            "first_seq": ranges[0][0] if ranges else None,
            "last_seq": ranges[-1][1] if ranges else None,
            "ranges": ranges,
        }


class _Told(Problem):
    """An error that says what was written before it."""

    def __init__(self, problem: Problem, detail: dict[str, Any], count: int) -> None:
        message = problem.message
        if count:
            message = message.replace("nothing was written", "nothing of this batch was written")
            message += (
                f"; {count} records of this stream were, and a retry with its Idempotency-Key does not repeat them"
            )
        super().__init__(problem.code, message, detail, status=problem.status)


def _key_of(call: Call) -> str | None:
    key = writing.key_of(call, None)
    if key is not None and not 0 < len(key.encode()) <= _KEY_BYTES_MAX:
        raise BadInput(
            f"the idempotency key of a stream is text of 1 to {_KEY_BYTES_MAX} bytes; nothing was written, shorten it"
        )
    return key
