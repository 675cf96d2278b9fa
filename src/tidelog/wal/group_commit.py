"""[shell] Group commit: many callers, one write, one sync. There is no timer while the machine keeps up.

    submit ──► queue ──► write all ──► sync once, if any is durable ──► done, done, done …
                         └────────────── one committer at a time, in submit order ──────┘

Whoever waits for a commit tries to be the committer: a lone durable write costs no change of threads.
While one committer syncs, the queue fills, so the batch follows the load by itself. What nobody
waits for is driven by the writer thread, which is also woken for what a committer leaves behind.
Without `start` there is no thread, and what happens is what the callers do, in their order.

Lock order: commit lock → whatever `done` takes → queue lock. Nobody waits for a token, asks for a
position or closes the shard while holding a lock that some `done` takes.

[shell] What a committer does with its turn: the next batch is taken from the queue, written, synced and told of.

All commits of a batch share one fate. After a failure that closes the latch every commit that was
accepted is failed and every later one refused; each gets exactly one outcome.

Whoever commits has the turn; `shard` says who that is.

[shell] Commits of an event loop, which must not wait: it writes, and the sync runs beside it.

    begin ──► write all ──► (none is durable: done …)
                 └──► synced beside (`beside`) ──► finish ──► done, done, done …
                 └──► or by the writer thread, where another sync is under way or the write found no room

It keeps the turn meanwhile, as a committer that syncs does. A loop that does not come back, because it is gone or
waits for somebody who waits for the turn, is not waited for: the writer thread looks at what was begun every 50 ms.

What one caller wants in the WAL.

[policy] How long commits are gathered before they are written: as long as each slice of time brings some more.

The figures of one shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition, Lock, Thread, get_ident
from typing import Final, NamedTuple, Protocol, TypeVar

from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.fsync_thread import FsyncThread
from tidelog.disk.interface import File
from tidelog.disk.interrupts import DEFER_SIGNALS, defer_signals_in
from tidelog.errors import Busy, Closed, DiskFull, Error, Latched
from tidelog.types import Buffer
from tidelog.wal.paths import Position
from tidelog.wal.writer import Writer


class Commit:
    """What one caller wants in the WAL: frames, back to back in `pieces`, of which all are written or none.

    Subclasses say what follows. Both calls come from the committer, in submit order, with the commit
    lock held, and must neither raise nor wait for a commit.
    """

    __slots__ = (
        "_callback",
        "copied_frames",
        "delayed_us",
        "durable",
        "file",
        "frames",
        "may_use_reserve",
        "offset",
        "pieces",
        "queued_us",
        "size",
    )

    def __init__(
        self,
        pieces: Sequence[Buffer],
        *,
        frames: int,
        durable: bool,
        on_done: Callable[[Error | None], None] | None = None,
    ) -> None:
        self.pieces, self.frames, self.durable = pieces, frames, durable
        self.size = sum(map(len, pieces))
        self.file: File | None = None  # where it was written, from then on, for reading
        self.offset = 0  # and its first byte there
        self.queued_us = 0  # when it was queued
        self.delayed_us = 0  # what gathering for its batch cost it
        self.copied_frames = 0  # how many of its frames are copies that routers made: they are counted apart
        # Whether it may use the reserve of a full disk: what makes room, or says what happened. Not new records.
        self.may_use_reserve = True
        self._callback = on_done

    @property
    def needs_sync(self) -> bool:
        """Whether committing it waits for the disk, as far as can be told before."""
        return self.durable

    def before_write(self) -> None:
        """The last look before it is written: here `lead` may still put a frame in front."""

    def on_done(self, error: Error | None) -> None:
        """The outcome, told exactly once. None: written, and durable where that was asked for."""
        if self._callback is not None:
            self._callback(error)

    def prepend_durable(self, frame: bytes) -> None:
        """Put a frame in front that must be durable before the commit is acknowledged."""
        self.prepend(frame)
        self.durable = True

    def prepend(self, frame: bytes) -> None:
        """Put a frame in front that shares its fate."""
        self.pieces = [frame, *self.pieces]
        self.frames, self.size = self.frames + 1, self.size + len(frame)


WINDOW_SLICE_MS: Final = 0.25


def wait_for_more_commits(window_ms: float, arrived: Callable[[], int], pause: Callable[[float], object]) -> int:
    """Wait slice by slice until one brings nothing or the window is over; return how many slices it took."""
    for slices in range(int(window_ms / WINDOW_SLICE_MS)):
        before = arrived()
        pause(WINDOW_SLICE_MS / 1000)
        if arrived() == before:
            return slices + 1
    return int(window_ms / WINDOW_SLICE_MS)


SYNC_BUCKETS_US: Final = (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)
"""Upper bounds of the buckets in which durations of syncs are counted; one more bucket takes the rest."""


@dataclass(slots=True)
class ShardStats:
    """Counted since the shard was made; the shard hands out copies."""

    frames: int = 0  # without copies and those that put seqs on record: one write of one record is one frame
    copied_frames: int = 0  # of copies that routers made: the records, and the frame in front of them
    batches: int = 0  # commit batches that were written
    bytes: int = 0
    fsyncs: int = 0  # for commit batches, ticks and the close; a rotation's own sync is part of the rotation
    rotations: int = 0
    queue_depth: int = 0  # commits that wait in the queue now
    queue_peak: int = 0  # the most that ever waited there
    queue_full_count: int = 0  # submits that found the queue full
    sync_us: int = 0  # spent in the fsyncs above
    sync_us_counts: list[int] = field(default_factory=lambda: [0] * (len(SYNC_BUCKETS_US) + 1))

    def record_sync(self, us: int) -> None:
        self.fsyncs += 1
        self.sync_us += us
        self.sync_us_counts[bisect_left(SYNC_BUCKETS_US, us)] += 1

    def copy(self) -> ShardStats:
        return replace(self, sync_us_counts=self.sync_us_counts.copy())


T = TypeVar("T")
_INTERRUPT_RETRIES: Final = 3


class WriteFunction(Protocol):
    def __call__(self, pieces: Sequence[Buffer], *, size: int, frames: int) -> None: ...


class InterruptGuard:
    """Completes a step that something other than the disk broke off: an interrupt is raised once the commit is done.

    Writes are positional and syncs may be repeated, so a step that is run again comes to the same end. What breaks it
    off again and again is no interrupt, and is raised.
    """

    def __init__(self) -> None:
        self._interrupt: BaseException | None = None

    def run(self, step: Callable[[], T]) -> T:
        for _ in range(_INTERRUPT_RETRIES):
            try:
                return step()
            except (Error, OSError):
                raise
            except BaseException as error:
                self._interrupt = error
        return step()

    def guard_write(self, put: WriteFunction) -> WriteFunction:
        """`put`, run as a step."""

        def patient(pieces: Sequence[Buffer], *, size: int, frames: int) -> None:
            self.run(lambda: put(pieces, size=size, frames=frames))

        return patient

    def raise_pending(self) -> None:
        """Raise the interrupt, if there was one."""
        if self._interrupt is not None:
            raise self._interrupt


class BatchCommitter:
    """A queue of commits and the file that they go to. Its methods are called with the turn."""

    def __init__(self, writer: Writer, *, clock: Clock, batch_frames: int, batch_bytes: int) -> None:
        self.on_tick_needed: Callable[[], None] = lambda: (
            None
        )  # somebody should `tick` soon: a file or a sync is wanted
        self._writer, self._latch = writer, writer.latch
        self._batch_frames, self._batch_bytes = batch_frames, batch_bytes
        self._now_us = clock.monotonic_us
        self.lock = Lock()  # the queue lock, which its tokens share
        self._queue: deque[Commit] = deque()
        self._stats = ShardStats()
        self._acked_position = writer.position  # up to here writes were told of success
        self.failed_batches = 0  # batches of which nothing was written
        self.write_us = self.sync_us = 0  # what the last batch took; a commit's `done` reads that of its own

    def _commit(self, gathered_us: int) -> bool:
        batch = self._take_batch()
        if not batch:
            return False
        patience = InterruptGuard()
        vital = all(commit.may_use_reserve for commit in batch)
        fate = self._write_and_sync(batch, gathered_us, patience, vital=vital)
        if isinstance(fate, DiskFull) and not vital:
            # New records wait for room. What makes some does not share their fate.
            rest = [commit for commit in batch if commit.may_use_reserve]
            self._finish_batch([commit for commit in batch if not commit.may_use_reserve], fate)
            if rest:
                self._finish_batch(rest, self._write_and_sync(rest, gathered_us, patience, vital=True))
        else:
            self._finish_batch(batch, fate)
        patience.raise_pending()
        return True

    def _write_and_sync(
        self, batch: list[Commit], gathered_us: int, patience: InterruptGuard, *, vital: bool
    ) -> BaseException | None:
        """Write a batch, and sync it where that was asked for; what kept it from that."""
        try:
            if self._write(batch, gathered_us, patience.guard_write(partial(self._writer.write, vital=vital))):
                self.sync_us = patience.run(self._sync)
        except BaseException as error:
            return error
        return None

    def _finish_batch(self, batch: list[Commit], outcome: BaseException | None) -> None:
        """Tell a batch what came of it. What is no error of ours is raised behind that."""
        if outcome is not None and not isinstance(outcome, Error):
            self._fail_all(batch, outcome)
            raise outcome
        if outcome is None:
            self._acked_position = self._writer.position
        else:
            self.failed_batches += 1
        self._notify_batch(batch, outcome)
        if self._latch.is_tripped:
            self._fail_queue()

    def _take_batch(self) -> list[Commit]:
        """The next batch: as many commits as the bounds allow, and one in any case."""
        frames = size = 0
        batch: list[Commit] = []
        with self.lock:
            while self._queue:
                commit = self._queue[0]
                frames, size = frames + commit.frames, size + commit.size
                if batch and (frames > self._batch_frames or size > self._batch_bytes):
                    break
                batch.append(self._queue.popleft())
        return batch

    def _write(self, batch: list[Commit], gathered_us: int, write: WriteFunction) -> bool:
        """Hand a batch to the operating system; return whether it needs a sync."""
        pieces: list[Buffer] = []
        reserves = copied = frames = size = 0
        durable = False
        for commit in batch:
            reserves -= commit.frames
            commit.before_write()
            reserves += commit.frames
            copied += commit.copied_frames
            pieces += commit.pieces
            frames, size, durable = frames + commit.frames, size + commit.size, durable or commit.durable
        began_us = self._now_us()
        if gathered_us:
            for commit in batch:
                commit.delayed_us = min(began_us - commit.queued_us, gathered_us)
        write(pieces, size=size, frames=frames)
        if self._writer.should_prepare_next or (not durable and self._writer.should_sync):
            self.on_tick_needed()
        self.write_us, self.sync_us = self._now_us() - began_us, 0
        at, reader = self._writer.position.pos - size, self._writer.reader
        for commit in batch:
            commit.offset, commit.file = at, reader
            at += commit.size
        stats = self._stats
        stats.batches += bool(frames)
        stats.frames, stats.copied_frames = stats.frames + frames - reserves - copied, stats.copied_frames + copied
        stats.bytes += size
        return durable

    def _sync(self) -> int:
        began = self._now_us()
        if not self._writer.sync():
            return 0
        took_us = self._now_us() - began
        with self.lock:
            self._stats.record_sync(took_us)
        return took_us

    def _notify_batch(self, batch: list[Commit], error: Error | None) -> None:
        told = 0
        try:
            for commit in batch:
                told += 1
                commit.on_done(error)
        except BaseException as broken:
            # What this caller keeps in memory no longer follows the WAL: going on would make it worse.
            self._fail_all(batch[told:], broken)
            raise

    def _fail_queue(self) -> None:
        try:
            self._latch.check()
        except Latched as error:
            self._notify_batch(self._drain_queue(), error)

    def _fail_all(self, batch: list[Commit], cause: BaseException) -> None:
        """Latch, and fail all that was accepted and not told yet, whatever their `done` thinks of it."""
        error = self._latch.trip(cause, "committing")
        error.__cause__ = cause
        for commit in (*batch, *self._drain_queue()):
            with suppress(BaseException):
                commit.on_done(error)

    def _drain_queue(self) -> list[Commit]:
        with self.lock:
            left = list(self._queue)
            self._queue.clear()
        return left


PREPENDED_BYTES_MAX: Final = 160  # at most, of what may still be put in front of a commit
COMPLETION_POLL_S: Final = 0.05  # between two looks at what was begun
COMMIT_LOCK_TIMEOUT_S: Final = 0.005  # for which the writer thread waits for a turn that may be left to it meanwhile
_ASYNC_BATCH_BYTES_MAX: Final = 1 << 20  # to write: the writer thread's, not an event loop's


class InflightBatch(NamedTuple):
    """A batch that was written and waits for its sync, or was not written whole and has to be taken back."""

    batch: list[Commit]
    write_us: int
    started_us: int
    write_error: OSError | None
    thread_id: int


class AsyncCommitter(BatchCommitter):
    """A committer whose turn can be kept while somebody else syncs."""

    def __init__(self, writer: Writer, *, clock: Clock, batch_frames: int, batch_bytes: int) -> None:
        super().__init__(writer, clock=clock, batch_frames=batch_frames, batch_bytes=batch_bytes)
        self._commit_lock = Lock()  # the commit lock
        self._wake = Condition(self.lock)
        self._writer_wanted = False  # the writer thread has something to do
        self._closing = False
        self._fsync_thread: FsyncThread | None = None
        self._on_finished_elsewhere: Callable[[], None] = lambda: None
        self._inflight: InflightBatch | None = None  # its turn is not over
        self._handed_to_writer = False  # and it is the writer thread that ends it
        self._writer_stopped = False  # the writer thread did, or whoever closed took its place
        self._begin_count = 0
        self._last_seen: tuple[int, InflightBatch | None] = (0, None)  # what the writer thread saw of that
        self._is_sleeping = False  # it sleeps until it is woken

    def enable_async(self, on_finished_elsewhere: Callable[[], None]) -> int:
        """Be ready for `begin`, with a writer thread; return the descriptor that can be read when `finish` has
        something to tell. `over` is called, in any thread, where something else ended what was begun."""
        self._on_finished_elsewhere = on_finished_elsewhere
        self._fsync_thread = self._fsync_thread or FsyncThread(f"tidelog sync {self._writer.directory}")
        return self._fsync_thread.descriptor

    @property
    def has_inflight_batch(self) -> bool:
        """Whether a batch was begun that nobody has ended."""
        return self._inflight is not None

    @property
    def inflight_us(self) -> int:
        """For how long."""
        begun = self._inflight
        return 0 if begun is None else self._now_us() - begun.started_us

    def begin_commit(self, *, gathered_us: int = 0) -> bool:
        """As `pump`, and nothing waits: what needs a sync is told of by `finish`. False where nothing was begun:
        nothing is queued, another thread commits, or it is much, or a new file, for which the writer thread is sent."""
        if not self._commit_lock.acquire(blocking=False):
            return False
        kept = False  # the turn, until it is ended
        try:
            batch = [] if self._closing else self._take_batch()
            if not batch:
                return False
            size = sum(commit.size + PREPENDED_BYTES_MAX for commit in batch)
            if size > _ASYNC_BATCH_BYTES_MAX or self._writer.is_full(size) or self._writer.is_reserve_file:
                with self.lock:
                    self._queue.extendleft(reversed(batch))
                return False
            try:
                durable, failed = self._write(batch, gathered_us, self._writer.write_raw), None
            except OSError as error:
                durable, failed = True, error
            except BaseException as error:
                self._finish_batch(batch, error)
                return True
            if not durable:
                self._finish_batch(batch, None)
                return True
            kept = True
            self._inflight = InflightBatch(batch, self.write_us, self._now_us(), failed, get_ident())
            beside = self._fsync_thread if failed is None else None
            descriptor = None if beside is None else self._writer.begin_sync()
            with self.lock:
                self._begin_count += 1
                self._handed_to_writer = descriptor is None
                if self._handed_to_writer or self._is_sleeping:
                    self._wake.notify()
            if beside is not None and descriptor is not None:
                beside.request(descriptor)
            return True
        finally:
            if not kept:
                self._release_commit_lock()

    def finish_commit(self) -> bool:
        """Tell everybody of the batch that was begun, once it was synced beside; False while it was not. The turn is
        free then, and nobody was sent for what is queued."""
        beside = self._fsync_thread
        if beside is None:
            return False
        fate: Error | None = None
        try:
            self._writer.end_sync(beside.result())
        except BlockingIOError:
            return False
        except Error as error:
            fate = error
        begun, self._inflight = self._inflight, None
        assert begun is not None, "it was asked for"
        self.write_us, self.sync_us = begun.write_us, self._now_us() - begun.started_us
        if fate is None:
            with self.lock:
                self._stats.record_sync(self.sync_us)
        try:
            self._finish_batch(begun.batch, fate)
        finally:
            self._commit_lock.release()
        return True

    def _finish_abandoned(self) -> bool:
        """`finish` in the place of who began it, who may never hear of anything again."""
        over = True  # also where telling somebody breaks
        try:
            over = self.finish_commit()
        finally:
            if over:
                if self._queue:
                    self.wake_writer()
                self._on_finished_elsewhere()
        return over

    def _finish_handed_over(self) -> bool:
        """End what was begun and left to the writer thread, which has the turn of who began it. False: nothing was."""
        with self.lock:
            begun = self._inflight
            if not self._handed_to_writer or begun is None:
                return False
            self._handed_to_writer = False  # whoever sees it first ends it
        fate: BaseException | None = None
        try:
            if begun.write_error is not None:
                raise self._writer.rollback(begun.write_error) from begun.write_error
            self.write_us, self.sync_us = begun.write_us, self._sync()
        except BaseException as error:
            fate = error
        self._inflight = None
        try:
            self._finish_batch(begun.batch, fate)
        finally:
            self._release_commit_lock()
            self._on_finished_elsewhere()
        return True

    def _check_inflight(self) -> bool:
        """Whether what was begun is ended now. What is seen a second time, nobody else may have come for."""
        begun = self._inflight
        if self._finish_handed_over() or (
            begun is not None and self._last_seen[1] is begun and self._finish_abandoned()
        ):
            return True
        self._last_seen = (self._last_seen[0], begun)
        return False

    def _wait_for_inflight(self) -> None:
        """Wait until what was begun is ended: who began it may have no event loop any more."""
        while self._inflight is not None and (beside := self._fsync_thread) is not None:
            if not (self._writer_stopped and self._finish_handed_over()):
                beside.wait(COMPLETION_POLL_S)
                self._finish_abandoned()

    def _finish_own_inflight(self) -> None:
        """Who began something and then wants the turn would wait for itself."""
        begun = self._inflight
        if begun is not None and begun.thread_id == get_ident():
            self._wait_for_inflight()

    # The turn.

    def _release_commit_lock(self) -> None:
        """Let the next one commit. The queue is looked at behind the release: whoever found the turn taken has
        submitted before it, so its commit is seen here and somebody comes for it."""
        self._commit_lock.release()
        if self._queue:
            self.wake_writer()

    def wake_writer(self) -> None:
        """Have the writer thread, where there is one, commit what is queued."""
        with self.lock:
            self._wake_writer_locked()

    def _wake_writer_locked(self) -> None:
        if not self._writer_wanted:
            self._writer_wanted = True
            self._wake.notify()


@defer_signals_in("submit", "position", "synced_position", "start", "close")
class Shard(AsyncCommitter):
    """One ordered stream of commits into the files of one group. Safe to use from any thread."""

    def __init__(
        self,
        writer: Writer,
        *,
        clock: Clock,
        queue_max: int = 4096,
        batch_frames: int = 4096,
        batch_bytes: int = 8 << 20,
        window_ms: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.window_ms = window_ms  # asked by the writer thread: how long it may gather before it writes
        super().__init__(writer, clock=clock, batch_frames=batch_frames, batch_bytes=batch_bytes)
        self._queue_max = queue_max
        self._prepare_lock = Lock()  # held by whoever makes the next file ready: anybody may tick
        self._submitted = 0
        self._thread: Thread | None = None

    @property
    def disk_full_count(self) -> int:
        """How often the device had no room for a write."""
        return self._writer.disk_full_count

    def set_allowance(self, allowance: Callable[[], int | None]) -> None:
        """Have `allowance` asked how many bytes a new file may take; None: any number."""
        self._writer.allowance = allowance

    @property
    def directory(self) -> str:
        return self._writer.directory

    @property
    def is_latched(self) -> bool:
        """Whether an earlier failure ended writing."""
        return self._latch.is_tripped

    def check_writable(self) -> None:
        """Raise Latched where an earlier failure ended writing."""
        self._latch.check()

    @property
    def has_writer_thread(self) -> bool:
        """Whether commits get done without anybody waiting for them."""
        return self._thread is not None

    @property
    def queue_length(self) -> int:
        """Commits in the queue."""
        return len(self._queue)

    @property
    def queue_max(self) -> int:
        """Commits that may be in the queue."""
        return self._queue_max

    @property
    def commits_without_sync(self) -> bool:
        """Whether what is queued now is committed without a sync."""
        with self.lock:
            return not any(commit.needs_sync for commit in self._queue)

    @property
    def may_need_new_file(self) -> bool:
        """Whether what is queued now may need a new file: several syncs, behind all that waits for the disk."""
        with self.lock:
            return self._writer.is_full(sum(commit.size + PREPENDED_BYTES_MAX for commit in self._queue))

    @property
    def stats(self) -> ShardStats:
        with self.lock:
            figures = self._stats.copy()
            figures.queue_depth, figures.rotations = len(self._queue), self._writer.rotations
            return figures

    # What callers do.

    def submit(self, commit: Commit, *, nowait: bool = False) -> None:
        """Put a commit at the end of the queue. On Busy, Latched or Closed it is as if it had never been tried.

        Without `nowait` somebody is about to wait for its token; with it the writer thread is woken.
        """
        with self.lock:
            if self._closing:
                raise Closed(f"the WAL in {self.directory} was closed; nothing was written, open it again")
            self._latch.check()
            depth = len(self._queue) + 1
            if depth > self._queue_max:
                self._stats.queue_full_count += 1
                raise Busy(
                    f"{self._queue_max} writes wait for the disk of {self.directory} already; nothing was written, "
                    "retry later"
                )
            commit.queued_us = self._now_us()
            self._queue.append(commit)
            self._submitted += 1
            self._stats.queue_peak = max(self._stats.queue_peak, depth)
            if nowait:
                self._wake_writer_locked()

    def commit_pending(self, *, blocking: bool = True, timeout: float = -1, gathered_us: int = 0) -> bool:
        """Commit what is queued, up to the bounds of one batch. False where nothing was queued, and where another
        thread commits and this one is not to wait for its turn, or not longer. `gathered_us`: for how long the caller
        has let the batch grow."""
        with DEFER_SIGNALS:  # before the turn is taken: an interrupt after that would keep it for ever
            self._finish_own_inflight()
            if not self._commit_lock.acquire(blocking, timeout):
                return False
            try:
                return self._commit(gathered_us)
            finally:
                self._release_commit_lock()

    def tick(self) -> None:
        """Sync what was written and not synced, and first commit what nobody came back for. Raises Latched when it
        is this sync that fails; once latched or closed there is nothing to do."""
        if not self.sync():
            return
        with DEFER_SIGNALS:  # as in `pump`
            if self._commit_lock.acquire(blocking=False):  # who has it writes the mark along with a batch
                try:
                    self._writer.write_idle_mark()
                finally:
                    self._release_commit_lock()
        if self._prepare_lock.acquire(blocking=False):
            try:
                self._writer.prepare_next_file()
            finally:
                self._prepare_lock.release()

    def sync(self) -> bool:
        """Commit what is queued and sync it, as `tick` does; False once latched or closed: there is nothing to do."""
        self.commit_pending()
        if self._latch.is_tripped or self._closing:
            return False
        self._sync()  # without the turn: writes that do not wait for the disk need not wait for this
        return True

    def position(self) -> Position:
        """Where the next batch is written. Every commit before it is done."""
        with self._hold_commit_lock():
            return self._writer.position

    def synced_position(self) -> Position:
        """Every byte before it survives a power cut, and every commit before it is done."""
        with self._hold_commit_lock():
            return self._writer.synced

    def is_synced(self, file: File, end: int) -> bool:
        """Whether what a commit wrote before `end` of its file survives a power cut. For `prepare`: it has the turn."""
        return file is not self._writer.reader or self._writer.synced.pos >= end

    def start(self) -> None:
        """Start the writer thread; `close` ends it. It does not keep a process alive that forgot to: a program that
        dies of an exception must be able to, and whoever owns the shard closes it at the interpreter's exit."""
        with self.lock:
            if self._thread is None and not self._closing:
                thread = Thread(target=self._run, name=f"tidelog wal {self.directory}", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Refuse new commits, do those that are queued, sync, end the thread. On return every commit that was
        accepted has its outcome, and those that were told of success are durable. Raises Latched where they are not:
        the last sync fails, or an earlier one did. Closing twice is harmless."""
        with self.lock:
            self._closing = True
            self._wake.notify_all()
        while self._thread is not None and self._thread.is_alive():
            self._wait_for_inflight()  # it may wait for a turn that an event loop has not ended
            self._thread.join(COMPLETION_POLL_S)
        self._writer_stopped = True
        while True:
            self._wait_for_inflight()
            if self._commit_lock.acquire(timeout=COMPLETION_POLL_S):  # what is being begun now is seen the next time
                break
        self._release_commit_lock()
        while self.commit_pending():
            pass
        with self._hold_commit_lock():
            owed, self._acked_position = self._acked_position, self._writer.synced
            try:
                if not self._latch.is_tripped:
                    self._sync()
                elif owed > self._writer.synced:
                    raise self._latch.unsynced_error()
            finally:
                self._writer.close()
                beside, self._fsync_thread = self._fsync_thread, None
                if beside is not None:
                    beside.close()

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: what is queued is the parent's to commit, and every lock raises Forked."""
        self._closing = True
        fork.poison_locks(self.directory, pid, self, self._writer)

    # Turns and the writer thread.

    @contextmanager
    def _hold_commit_lock(self) -> Iterator[None]:
        self._finish_own_inflight()
        self._commit_lock.acquire()
        try:
            yield
        finally:
            self._release_commit_lock()

    def _run(self) -> None:
        while self._wait_for_work():
            if self._inflight is not None and (self._check_inflight() or not self._has_work):
                continue
            began_us = self._now_us()
            slices = wait_for_more_commits(self.window_ms(), lambda: self._submitted, self._pause)
            with self.lock:
                self._writer_wanted = False
            # Not for ever: whoever has the turn may have left it to this thread.
            if (
                not self.commit_pending(
                    timeout=COMMIT_LOCK_TIMEOUT_S, gathered_us=self._now_us() - began_us if slices else 0
                )
                and self._queue
            ):
                self.wake_writer()

    @property
    def _has_work(self) -> bool:
        """Whether the writer thread is to commit what is queued."""
        return bool(self._queue) and (self._writer_wanted or self._closing)

    def _wait_for_work(self) -> bool:
        """Park until there is something to commit, or to look at; False once there never will be."""
        with self.lock:
            while not self._handed_to_writer and not self._has_work:
                if self._closing and self._inflight is None:
                    return False
                self._writer_wanted = False
                # A loop that was to come for what is queued may not come any more either.
                left = self._fsync_thread is not None and bool(self._queue)
                self._is_sleeping = self._inflight is None and self._begin_count == self._last_seen[0] and not left
                self._last_seen = (self._begin_count, self._last_seen[1])
                woken = self._wake.wait(None if self._is_sleeping else COMPLETION_POLL_S)
                self._is_sleeping = False
                if self._inflight is None:
                    self._writer_wanted = self._writer_wanted or (left and not woken)
                elif not woken or self.inflight_us >= COMPLETION_POLL_S * 1e6:
                    return True
            return True

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if not self._closing:
                self._wake.wait(seconds)
