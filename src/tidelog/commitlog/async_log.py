"""The segmented log for asyncio: the event loop never waits for the disk.

    task ── append ──► queue ──► writer thread: SegmentedLog.append_many ──► every task gets its seq
    task ── read ────► pool of reader threads: SegmentedLog.read

`AsyncSegmentedLog` owns a `SegmentedLog`. Everything that changes it runs on one writer thread, in the order of the
calls; reads run in a small pool. While the writer thread syncs, the queue fills, and the single appends in it are
written as one batch with one sync, so many tasks that append share the cost of a sync.

**Cancellation.** A call that is cancelled while it waits in the queue is taken out of it: nothing was done. One that
the writer thread has begun is finished first. Then the CancelledError is raised, and its `__cause__` is the outcome:
`WriteCancelled` with the result, or the error of the write, which has `written` and `acked` as always. A cancelled
stream is rolled back, unless its commit had begun. A cancelled read has no effect. A cancelled `open` leaves no lock.

**Followers** (`follow`) are woken by the writer thread. They never wait on a thread of the pool: a follower without
news costs one object in a set.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial, wraps
from os import PathLike
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar
from weakref import finalize

from tidelog.addresses import path_text
from tidelog.clock import Clock
from tidelog.commitlog.append import FlusherState, StreamAppend
from tidelog.commitlog.codec import Batch
from tidelog.commitlog.log import SegmentedLog, check_bytes
from tidelog.commitlog.metrics import LogMetrics
from tidelog.commitlog.offsets import ConsumerOffsets
from tidelog.commitlog.recovery import RecoveryReport
from tidelog.commitlog.storage import guard_stream_async
from tidelog.commitlog.writer_thread import Follower, Job, QueuedRecord, WriterThread, append_jobs, settle
from tidelog.config import LogConfig
from tidelog.disk import process
from tidelog.disk.interface import Disk
from tidelog.errors import BadInput, Closed, OutOfRange, ReadOnly, Truncated, WriteCancelled
from tidelog.formats import rows as columns
from tidelog.formats.rows import Rows
from tidelog.types import Buffer, Record

P = ParamSpec("P")
T = TypeVar("T")
_CHUNK_BYTES: Final = 1 << 20  # of one read of an iteration: a page of records in memory
_READERS: Final = 4


def writing(
    method: Callable[Concatenate[SegmentedLog, P], T],
) -> Callable[Concatenate[AsyncSegmentedLog, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method that calls this one on the writer thread: same arguments, same result."""

    @wraps(method)
    async def run(self: AsyncSegmentedLog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._write(partial(method, self._log, *args, **kwargs))

    return run


def reading(
    method: Callable[Concatenate[SegmentedLog, P], T],
) -> Callable[Concatenate[AsyncSegmentedLog, P], Coroutine[Any, Any, T]]:
    """`writing`, on a reader thread."""

    @wraps(method)
    async def run(self: AsyncSegmentedLog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._read(partial(method, self._log, *args, **kwargs))

    return run


class AsyncConsumerOffsets:
    """The offsets that consumers of a log have committed, as coroutines."""

    def __init__(self, log: AsyncSegmentedLog, offsets: ConsumerOffsets) -> None:
        self._log, self._offsets = log, offsets

    async def commit(self, group: str, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Record that `group` has processed every seq below `seq`; durable on return."""
        await self.commit_many(group, {(topic, partition): seq})

    async def commit_many(self, group: str, seqs: Mapping[tuple[str, int], int]) -> None:
        """Commit several partitions atomically."""
        await self._log._write(partial(self._offsets.commit_many, group, dict(seqs)))

    async def fetch(self, group: str, *, topic: str = "", partition: int = 0) -> int | None:
        """Return the next seq that `group` has to process; None when it never committed."""
        return await self._log._read(partial(self._offsets.fetch, group, topic=topic, partition=partition))

    async def committed(self, *, topic: str = "", partition: int = 0) -> dict[str, int]:
        """Return the offset of every group."""
        return await self._log._read(partial(self._offsets.committed, topic=topic, partition=partition))


class AsyncSegmentedLog:
    """`SegmentedLog` as coroutines and async iterators. Results and errors are the same.

    Calls may come from tasks of several event loops. `lowest`, `highest`, `durable` and everything that follows from
    them are plain attributes: they take no lock. The functions of `compact` are called on the writer thread.
    """

    def __init__(self, log: SegmentedLog, writer: WriterThread, readers: int) -> None:
        self._log, self._state, self._writer = log, log._log_state, writer
        writer.append_many = partial(append_jobs, log)
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix=f"tidelog read {log.path}")
        self._stop_threads = finalize(self, _stop_threads, writer, self._readers)
        self._stop_threads.atexit = False
        process.register(self)

    def on_fork(self, _pid: int) -> None:
        """In a forked child there are no threads to stop, and a lock of theirs may be held for ever."""
        self._stop_threads.detach()

    # ── open and close ────────────────────────────────────────────────────────────────────────

    @classmethod
    async def open(
        cls,
        path: str | PathLike[str],
        codec: str | None = None,
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
        config: LogConfig | None = None,
        readers: int = _READERS,
        **settings: Any,
    ) -> Self:
        """Open a log, as `SegmentedLog.open` does. `readers`: how many reads run at the same time."""
        if readers < 1:
            raise BadInput(f"readers is {readers}, it must be at least 1; nothing was opened")
        opening = partial(
            SegmentedLog.open,
            path,
            codec,
            read_only=read_only,
            disk=disk,
            clock=clock,
            config=config,
            **settings,
        )
        writer = WriterThread(path_text(path, "the directory of a log"))
        job: Job[SegmentedLog] = Job(opening, asyncio.get_running_loop())
        writer.submit(job)
        try:
            cancelled = await settle(writer, job)
            if job.error is not None:
                raise job.error
            assert job.value is not None, "open returns a log or raises"
            if cancelled is None:
                return cls(job.value, writer, readers)
            closing: Job[None] = Job(job.value.close, asyncio.get_running_loop())
            writer.submit(closing)
            await settle(writer, closing, may_withdraw=False)
            raise cancelled
        except BaseException:
            writer.stop()
            raise

    async def close(self) -> None:
        """Make every acked record durable and unlock the directory, after the writes that were called before. Closing
        twice is harmless. Followers raise Closed."""
        if self._state.closed:
            return
        try:
            await self._write(self._log.close)
        except Closed:
            return  # another task was faster
        finally:
            self._stop_if_closed()

    async def remove(self) -> None:
        """Close the log and erase its segments, checkpoint and offsets. Files of other programs stay."""
        try:
            await self._write(self._log.remove)
        finally:
            self._stop_if_closed()

    def _stop_if_closed(self) -> None:
        if self._state.closed:
            self._stop_threads()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ── threads ───────────────────────────────────────────────────────────────────────────────

    async def _write(self, call: Callable[[], T], record: QueuedRecord | None = None) -> T:
        """Run a call on the writer thread and return its result."""
        self._state.check_open()
        job: Job[T] = Job(call, asyncio.get_running_loop(), record)
        self._writer.submit(job)
        cancelled = await settle(self._writer, job)
        if cancelled is not None:
            raise cancelled from (job.error or WriteCancelled(self.path, result=job.value))
        if job.error is not None:
            raise job.error
        return job.value  # type: ignore[return-value]  # None only where T allows it

    async def _append_one(self, call: Callable[[], int], record: QueuedRecord | None = None) -> int:
        """`_write` of one record."""
        try:
            return await self._write(call, record)
        except asyncio.CancelledError as error:
            if isinstance(error.__cause__, WriteCancelled) and isinstance(seq := error.__cause__.result, int):
                error.__cause__.acked = range(seq, seq + 1)
            raise

    async def _read(self, call: Callable[[], T]) -> T:
        """Run a call on a reader thread and return its result. When it is cancelled, its result is dropped."""
        self._state.check_open()
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._readers, call)
        except RuntimeError:  # the pool was shut down since
            self._state.check_open()
            raise
        return await reading

    # ── write ─────────────────────────────────────────────────────────────────────────────────

    async def append(
        self,
        data: bytes,
        *,
        node: bytes = b"",
        tag: bytes = b"",
        meta: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """Write one record and return its seq; see `SegmentedLog.append`. Appends of several tasks share a sync."""
        check_bytes((data,))
        call = partial(self._log.append, data, node=node, tag=tag, meta=meta, expected=expected)
        return await self._append_one(call, QueuedRecord(data, node, tag, meta) if expected is None else None)

    async def append_many(
        self,
        datas: Sequence[bytes],
        *,
        node: bytes | Sequence[bytes] = b"",
        tag: bytes | Sequence[bytes] = b"",
        meta: bytes | Sequence[bytes] = b"",
        expected: int | None = None,
    ) -> range:
        """Write many records and return their seqs; see `SegmentedLog.append_many`."""
        each = [value if isinstance(value, bytes) else list(value) for value in (node, tag, meta)]
        return await self._write(
            partial(self._log.append_many, list(datas), node=each[0], tag=each[1], meta=each[2], expected=expected)
        )

    async def append_stream(
        self,
        chunks: AsyncIterable[Buffer],
        *,
        node: bytes = b"",
        tag: bytes = b"",
        meta: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """Write one record from chunks of bytes, without keeping it in memory, and return its seq.

        Its largest size is the rest of the active segment plus the overflow. A stream that is longer, breaks off, is
        cancelled or meets a disk error is rolled back and nothing is visible. While it runs, other writes to this log
        raise Busy; reads do not wait for it.
        """
        begun: list[StreamAppend] = []
        batch = Batch((b"",), node, tag, meta)

        def begin() -> None:
            begun.append(StreamAppend(self._state, batch, expected))

        try:
            await self._write_part(begin)
            async for chunk in guard_stream_async(self.path, chunks):
                await self._write_part(partial(begun[0].write, chunk))
            return await self._append_one(begun[0].commit)
        except GeneratorExit:  # the event loop has ended: nothing can be awaited any more
            for stream in begun:
                with suppress(Closed):
                    self._writer.submit(Job(stream.roll_back, None))
            raise
        except BaseException as error:
            for stream in begun:
                await self._roll_back(stream, error)
            raise

    async def _write_part(self, call: Callable[[], None]) -> None:
        """Run one step of a stream. A cancelled step is no outcome, even if it was finished: the stream is rolled
        back."""
        try:
            await self._write(call)
        except asyncio.CancelledError as error:
            error.__cause__ = None
            raise

    async def _roll_back(self, stream: StreamAppend, error: BaseException) -> None:
        """Remove the bytes of a stream that ended with `error`, also where the task is cancelled again."""
        if self._state.active_stream is not stream or self._state.closed:
            return  # it was committed, or rolled back by its last step or by the close
        job: Job[None] = Job(stream.roll_back, asyncio.get_running_loop())
        with suppress(Closed):
            self._writer.submit(job)
            cancelled = await settle(self._writer, job, may_withdraw=False)
            if job.error is not None:
                if isinstance(error, asyncio.CancelledError):
                    raise error from job.error
                raise job.error from error
            if cancelled is not None and not isinstance(error, asyncio.CancelledError):
                raise cancelled from error

    append_rows = writing(SegmentedLog.append_rows)
    sync = writing(SegmentedLog.sync)
    tick = writing(SegmentedLog.tick)
    seal = writing(SegmentedLog.seal)

    async def truncate(self, seq: int) -> int:
        """Remove every record from `seq` on; the next append gets `seq`. Return the number of removed seqs. Followers
        that had read any of them raise Truncated."""

        def truncate() -> int:
            removed = self._log.truncate(seq)
            for follower in self._writer.followers.copy():
                follower.truncations.append(seq)
            return removed

        return await self._write(truncate)

    retain = writing(SegmentedLog.retain)
    remove_expired = writing(SegmentedLog.remove_expired)
    drop_below = writing(SegmentedLog.drop_below)
    compact = writing(SegmentedLog.compact)

    # ── read ──────────────────────────────────────────────────────────────────────────────────

    read = reading(SegmentedLog.read)
    read_range = reading(SegmentedLog.read_range)

    async def records(
        self, first: int | None = None, stop: int | None = None, *, skip_damage: bool = False
    ) -> AsyncIterator[Record]:
        """Iterate over the records of [first, stop) in order, up to the end of the log at the time of the call."""
        batches = self._log.batches(first, stop, bytes_max=_CHUNK_BYTES, skip_damage=skip_damage)

        def read_next() -> list[Record] | None:
            rows = next(batches, None)
            return None if rows is None else list(columns.iter_records(rows))

        while (chunk := await self._read(read_next)) is not None:
            for record in chunk:
                yield record

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.records()

    async def batches(
        self,
        first: int | None = None,
        stop: int | None = None,
        *,
        bytes_max: int = _CHUNK_BYTES,
        skip_damage: bool = False,
    ) -> AsyncIterator[Rows]:
        """Iterate over the records of [first, stop) as columns, without a Python object per record."""
        batches = self._log.batches(first, stop, bytes_max=bytes_max, skip_damage=skip_damage)
        while (rows := await self._read(partial(next, batches, None))) is not None:
            yield rows

    to_arrow = reading(SegmentedLog.to_arrow)
    seek_time = reading(SegmentedLog.seek_time)

    async def follow(self, first: int | None = None, *, timeout: float | None = None) -> AsyncIterator[Record]:
        """Yield the records from `first` on, by default all, and then new ones as they are appended, until none arrived
        for `timeout` seconds; None: without end.

        Only records that are appended by this object arrive; one that was opened with `read_only` raises ReadOnly.
        Raises Closed when the log is closed, OutOfRange where retention removed the next record, and Truncated where a
        truncate removed records that were yielded: its `seq` is where to go on.
        """
        if not self._state.writable:
            raise ReadOnly(
                f"{self.path} was opened read-only and shows the records of that moment; follow it where it is written,"
                " or open it again"
            )
        with self._followed() as follower:
            seq = self.lowest if first is None else first
            while True:
                follower.news.clear()
                try:
                    page = await self.read_range(seq, bytes_max=_CHUNK_BYTES)
                except OutOfRange as error:
                    if first is not None or seq <= error.highest:
                        raise
                    # Without a mark yet, no append came after the truncate: its mark is the end of the log.
                    mark = follower.lowest_truncation()
                    raise Truncated(self.path, asked=seq, seq=error.highest if mark is None else mark) from error
                mark = follower.lowest_truncation()
                if mark is not None and mark < seq:
                    raise Truncated(self.path, asked=seq, seq=mark)
                if mark is not None:
                    continue  # the page may have records from before and from after the truncate
                first, seq = None, page.next_seq
                for record in page.records:
                    yield record
                if not page.records and not await self._wait_for_news(follower, seq, timeout):
                    return

    @contextmanager
    def _followed(self) -> Iterator[Follower]:
        follower = Follower()
        self._writer.followers.add(follower)
        try:
            yield follower
        finally:
            self._writer.followers.discard(follower)

    async def _wait_for_news(self, follower: Follower, seq: int, timeout: float | None) -> bool:
        """Wait until the log has changed after `seq`; False where it did not in time."""
        try:
            async with asyncio.timeout(timeout):
                while self.highest == seq and not follower.truncations:
                    self._state.check_open()
                    await follower.news.wait()
                    follower.news.clear()
        except TimeoutError:
            return False
        return True

    # ── facts ─────────────────────────────────────────────────────────────────────────────────

    @property
    def path(self) -> str:
        return self._log.path

    @property
    def codec(self) -> str:
        return self._log.codec

    @property
    def report(self) -> RecoveryReport:
        """The findings and repairs of the open."""
        return self._log.report

    @property
    def lowest(self) -> int:
        """The first seq of the log. It only rises, except by truncate."""
        return self._log.lowest

    @property
    def highest(self) -> int:
        """One past the last seq: the seq of the next append."""
        return self._log.highest

    @property
    def durable(self) -> int:
        """Every seq below this one survives a power cut."""
        return self._log.durable

    @property
    def high_watermark(self) -> int:
        """One past the last durable record: the same as `durable`."""
        return self._log.durable

    def __len__(self) -> int:
        """Seqs in [lowest, highest), holes included."""
        return len(self._log)

    @property
    def is_empty(self) -> bool:
        """Whether there is no seq in [lowest, highest)."""
        return self._log.is_empty

    def has_index(self, seq: int) -> bool:
        """Whether `lowest <= seq < highest`. The record may still be missing: compacted away, or damaged."""
        return self._log.has_index(seq)

    def normalize_index(self, seq: int) -> int | None:
        """Return the position of `seq` counted from `lowest`, in [0, len); None where it is outside of the log."""
        return self._log.normalize_index(seq)

    async def size(self) -> int:
        """Bytes on disk: data and side files."""
        return await self._read(lambda: self._log.size)

    async def segments(self) -> list[range]:
        """The seq range of every segment, oldest first; the last one is the active one."""
        return await self._read(lambda: self._log.segments)

    @property
    def offsets(self) -> AsyncConsumerOffsets:
        """The offsets that consumers of this log have committed."""
        return AsyncConsumerOffsets(self, self._log.offsets)

    @property
    def metrics(self) -> LogMetrics:
        """Its metrics. A scrape takes no lock and touches no file, so it may run on the event loop."""
        return self._log.metrics

    @property
    def background(self) -> FlusherState:
        """Counts of the background syncs of the `interval` policy, and their last error."""
        return self._log.background

    @property
    def damage_skipped(self) -> int:
        """How many damaged places readers have skipped with `skip_damage`."""
        return self._log.damage_skipped


def _stop_threads(writer: WriterThread, readers: ThreadPoolExecutor) -> None:
    writer.stop()
    readers.shutdown(wait=False)
