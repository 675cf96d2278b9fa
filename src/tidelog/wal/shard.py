"""A shard: one ordered stream of commits into the WAL files of one directory.

    submit ──► queue ──► write all ──► sync once, if any commit is durable ──► on_done, on_done …
                         └───────────── one committer at a time, in submit order ─────────────┘

`group_commit` has the queue and the commit lock. A shard adds the writer thread: it commits what no thread waits for,
and what a committer leaves in the queue. Without `start` there is no writer thread, and callers commit in their order.

An event loop must not block: `begin_commit` writes a batch, the fsync thread syncs it, `finish_commit` publishes it.
`CommitState` has the states of such a batch. The commit lock is held meanwhile.

After a failure that trips the latch, every accepted commit fails and every later one is refused. A thread that holds a
lock that some `on_done` takes must not wait for a future, ask for a position or close the shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from threading import Condition, Lock, Thread, get_ident
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from tidelog.clock import Clock
from tidelog.disk import process
from tidelog.disk.interface import File
from tidelog.disk.posix import FsyncThread
from tidelog.disk.process import DEFER_SIGNALS, defer_signals_in
from tidelog.errors import Busy, Closed, DiskFull, Error, InDoubt, Latched
from tidelog.types import Buffer
from tidelog.wal.group_commit import CommitFuture, GroupCommit
from tidelog.wal.paths import Position
from tidelog.wal.writer import Writer

P = ParamSpec("P")
T = TypeVar("T")


class Commit:
    """One caller's frames, back to back in `pieces`: all of them are written, or none.

    The committer calls `before_write` and `on_done` in submit order with the commit lock held. They must neither raise
    nor wait for a commit. Subclasses override `apply`.
    """

    __slots__ = (
        "_callback",
        "copied_frames",
        "delayed_us",
        "durable",
        "file",
        "frames",
        "future",
        "may_use_reserve",
        "offset",
        "on_applied",
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
        on_done: Callable[[Error | None], object] | None = None,
        future: CommitFuture[Any] | None = None,
    ) -> None:
        self.pieces, self.frames, self.durable = pieces, frames, durable
        self.size = sum(map(len, pieces))
        self.file: File | None = None  # once written: the file, for reading
        self.offset = 0  # and the position of its first byte there
        self.queued_us = 0  # when it was queued
        self.delayed_us = 0  # how long the commit window delayed it
        self.copied_frames = 0  # frames that are copies made by routers: they are counted separately
        # Whether it may use the disk reserve: commits that free space, or record what was removed. Not new records.
        self.may_use_reserve = True
        self.future: CommitFuture[Any] | None = future
        self.on_applied: Callable[[], object] | None = None  # called after `apply`, before the future completes
        self._callback = on_done

    @property
    def needs_sync(self) -> bool:
        """Whether it will need a sync, as far as is known before `before_write`."""
        return self.durable

    def before_write(self) -> None:
        """Called right before the write: the last chance to `prepend` a frame."""

    def on_done(self, error: Error | None) -> None:
        """Apply the outcome and resolve the future. Called exactly once; None: written, and synced if durable."""
        result = self.apply(error)
        if self.on_applied is not None:
            self.on_applied()
        if self.future is not None:
            self.future.set_result(result if error is None else error)

    def apply(self, error: Error | None) -> Any:
        """Apply the outcome to the state in memory. Return the result of the future, or an Error that it raises."""
        return None if self._callback is None else self._callback(error)

    def prepend_durable(self, frame: bytes) -> None:
        """Put a frame in front that must be durable before the commit is acknowledged."""
        self.prepend(frame)
        self.durable = True

    def prepend(self, frame: bytes) -> None:
        """Put a frame in front that has the same outcome."""
        self.pieces = [frame, *self.pieces]
        self.frames, self.size = self.frames + 1, self.size + len(frame)


WINDOW_SLICE_MS: Final = 0.25


def wait_for_more_commits(window_ms: float, arrived: Callable[[], int], pause: Callable[[float], object]) -> int:
    """Wait in slices until a slice brings no commit or the window is over; return the number of slices."""
    for slices in range(int(window_ms / WINDOW_SLICE_MS)):
        before = arrived()
        pause(WINDOW_SLICE_MS / 1000)
        if arrived() == before:
            return slices + 1
    return int(window_ms / WINDOW_SLICE_MS)


SYNC_BUCKETS_US: Final = (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)
"""Upper bounds of the buckets of sync durations; one more bucket takes longer ones."""


@dataclass(slots=True)
class ShardStats:
    """Counters since the shard was created."""

    frames: int = 0  # without copies and seq reservations: one write of one record is one frame
    copied_frames: int = 0  # of copies made by routers: the records and their router frames
    batches: int = 0  # commit batches that were written
    bytes: int = 0
    fsyncs: int = 0  # of commit batches, ticks and the close; a rotation's own sync is not counted
    rotations: int = 0
    queue_depth: int = 0  # commits in the queue now
    queue_peak: int = 0  # the most commits that were ever in the queue
    queue_full_count: int = 0  # submits that were refused because the queue was full
    sync_us: int = 0  # total duration of the fsyncs above
    sync_us_counts: list[int] = field(default_factory=lambda: [0] * (len(SYNC_BUCKETS_US) + 1))

    def record_sync(self, us: int) -> None:
        self.fsyncs += 1
        self.sync_us += us
        self.sync_us_counts[bisect_left(SYNC_BUCKETS_US, us)] += 1

    def copy(self) -> ShardStats:
        return replace(self, sync_us_counts=self.sync_us_counts.copy())


_INTERRUPT_RETRIES: Final = 3


class InterruptGuard:
    """Completes steps that an exception other than a disk error interrupts, and raises the exception afterwards.

    Writes are positional and syncs can be repeated, so repeating a step has the same result. An exception that occurs
    every time is not an interrupt, and is raised at once.
    """

    def __init__(self) -> None:
        self._interrupt: BaseException | None = None

    def run(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_INTERRUPT_RETRIES):
            try:
                return step(*args, **kwargs)
            except (Error, OSError):
                raise
            except BaseException as error:
                self._interrupt = error
        return step(*args, **kwargs)

    def raise_pending(self) -> None:
        """Raise the interrupt, if there was one."""
        if self._interrupt is not None:
            raise self._interrupt


class CommitState(Enum):
    """State of the batch that an event loop began. The commit lock is held in every state but IDLE.

    IDLE        → SYNCING      `begin_commit`: written, the fsync thread syncs it
    IDLE        → HANDED_OVER  `begin_commit`: the write failed, or the fsync thread cannot be used: another sync is
                               running, or the file has no descriptor
    SYNCING     → IDLE         `finish_commit`, by the first thread that reads the result of the sync: the event loop;
                               the writer thread, if the loop does not come within COMPLETION_POLL_S; the thread that
                               began it and now needs the commit lock; `close`
    HANDED_OVER → TAKEN_OVER   the writer thread (without one: any thread that waits) syncs it, or rolls it back
    TAKEN_OVER  → IDLE         its commits have their outcome
    """

    IDLE = auto()
    SYNCING = auto()
    HANDED_OVER = auto()
    TAKEN_OVER = auto()


_TRANSITIONS: Final = {
    CommitState.IDLE: (CommitState.SYNCING, CommitState.HANDED_OVER),
    CommitState.SYNCING: (CommitState.IDLE,),
    CommitState.HANDED_OVER: (CommitState.TAKEN_OVER,),
    CommitState.TAKEN_OVER: (CommitState.IDLE,),
}


class InflightBatch(NamedTuple):
    """A batch that an event loop began."""

    batch: list[Commit]
    write_us: int
    started_us: int
    write_error: OSError | None  # the write failed and must be rolled back
    thread_id: int  # the thread that began it
    number: int  # batches are numbered by `begin_commit`


PREPENDED_BYTES_MAX: Final = 160  # at most, of frames that `before_write` prepends to a commit
COMPLETION_POLL_S: Final = 0.05  # interval at which the writer thread checks the batch in flight
COMMIT_LOCK_TIMEOUT_S: Final = 0.005  # of the writer thread: the holder may hand its batch over meanwhile
_ASYNC_BATCH_BYTES_MAX: Final = 1 << 20  # larger batches are written by the writer thread, not by an event loop


@defer_signals_in("submit", "position", "synced_position", "start", "close")
class Shard:
    """One ordered stream of commits into the WAL files of one directory. Thread-safe."""

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
        self.writer, self.directory, self.queue_max = writer, writer.directory, queue_max
        self.window_ms = window_ms  # how long the writer thread may wait for more commits before it writes
        self.on_tick_needed: Callable[[], None] = lambda: None  # `tick` should be called soon: for a new file or a sync
        self.write_us = self.sync_us = 0  # durations of the last batch, read by the `on_done` of its commits
        self._latch = writer.latch
        self._now_us = clock.monotonic_us
        self.commits: GroupCommit[Commit] = GroupCommit(
            self, batch_frames=batch_frames, batch_bytes=batch_bytes, wake_writer=self.wake_writer
        )
        self.lock, self._queue = self.commits.lock, self.commits.queue
        self._submitted = 0
        self._stats = ShardStats()
        self._is_closed = False  # new commits are refused
        self._acked_position = writer.position  # commits before it were acknowledged
        self._prepare_lock = Lock()  # held while the next file is prepared: any thread may tick
        # The batch in flight.
        self._state = CommitState.IDLE
        self._inflight: InflightBatch | None = None
        self._fsync_thread: FsyncThread | None = None
        self._on_finished_elsewhere: Callable[[], None] = lambda: None
        # The writer thread.
        self._thread: Thread | None = None
        self._wake = Condition(self.lock)
        self._writer_wanted = False  # it should commit the queue
        self._writer_is_asleep = False  # it waits without a timeout
        self._begin_count = 0  # batches that were begun
        self._seen_begin = self._checked_begin = 0  # the last one that the writer thread saw, and checked

    @property
    def is_latched(self) -> bool:
        """Whether an earlier failure stopped writing."""
        return self._latch.is_tripped

    def check_writable(self) -> None:
        """Raise Latched if an earlier failure stopped writing."""
        self._latch.check()

    @property
    def has_writer_thread(self) -> bool:
        """Whether commits are completed without a thread that waits for them."""
        return self._thread is not None

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def commits_without_sync(self) -> bool:
        """Whether the commits in the queue need no sync."""
        with self.lock:
            return not any(commit.needs_sync for commit in self._queue)

    @property
    def may_need_new_file(self) -> bool:
        """Whether the commits in the queue may need a new file: several syncs, after all other work of the disk."""
        with self.lock:
            return self.writer.is_full(sum(commit.size + PREPENDED_BYTES_MAX for commit in self._queue))

    @property
    def stats(self) -> ShardStats:
        """A copy of the counters."""
        with self.lock:
            stats = self._stats.copy()
            stats.queue_depth, stats.rotations = len(self._queue), self.writer.rotations
            return stats

    # ── blocking callers ──────────────────────────────────────────────────────────────────────

    def submit(self, commit: Commit, *, nowait: bool = False) -> None:
        """Queue a commit. If it raises Busy, Latched or Closed, nothing was queued.

        `nowait`: wake the writer thread. Without it the caller waits for the commit's future.
        """
        with self.lock:
            if self._is_closed:
                raise Closed(f"the WAL in {self.directory} was closed; nothing was written, open it again")
            self._latch.check()
            depth = len(self._queue) + 1
            if depth > self.queue_max:
                self._stats.queue_full_count += 1
                raise Busy(
                    f"{self.queue_max} writes wait for the disk of {self.directory} already; nothing was written, "
                    "retry later"
                )
            commit.queued_us = self._now_us()
            self._queue.append(commit)
            self._submitted += 1
            self._stats.queue_peak = max(self._stats.queue_peak, depth)
            if nowait:
                self._wake_writer_locked()

    def commit_pending(self, *, blocking: bool = True, timeout: float = -1, gathered_us: int = 0) -> bool:
        """Commit one batch from the queue; see `GroupCommit.commit_pending`."""
        if self._inflight is not None:
            self._finish_own_batch()
        return self.commits.commit_pending(blocking=blocking, timeout=timeout, gathered_us=gathered_us)

    def commit_for(self, future: CommitFuture[Any], timeout: float | None) -> None:
        """Commit in this thread, unless another thread is committing."""
        lock_timeout = -1 if timeout is None else timeout
        # With a writer thread no caller waits for the commit lock: its holder wakes the thread for what is queued.
        while not future.done and (
            self.commit_pending(blocking=False)
            if self._thread is not None
            else self.commit_pending(timeout=lock_timeout)
        ):
            pass

    def in_doubt(self, timeout: float | None) -> InDoubt:
        """The error of a caller that stops waiting."""
        return InDoubt(
            f"no outcome within {timeout} s in {self.directory}; the write may still be committed, wait longer or "
            "retry with the same key"
        )

    def tick(self) -> None:
        """Commit the queue, sync, record the synced position and prepare the next file. Raises Latched if this sync
        fails; does nothing once latched or closed."""
        if not self.sync():
            return
        with DEFER_SIGNALS:  # as in `commit_pending`
            if self.commits.commit_lock.acquire(blocking=False):  # its holder writes a mark with a batch
                try:
                    self.writer.record_synced_position()
                finally:
                    self.commits.release()
        if self._prepare_lock.acquire(blocking=False):
            try:
                self.writer.prepare_next_file()
            finally:
                self._prepare_lock.release()

    def sync(self) -> bool:
        """Commit one batch from the queue and sync; False once latched or closed."""
        self.commit_pending()
        if self._latch.is_tripped or self._is_closed:
            return False
        self._sync()  # without the commit lock: writes that need no sync need not wait for this one
        return True

    def position(self) -> Position:
        """Where the next batch is written. Every commit before it is done."""
        with self._hold_commit_lock():
            return self.writer.position

    def hold_commits(self) -> AbstractContextManager[None]:
        """Hold the commit lock: `writer.position` is then the end of all commits, each of which is done. For a moment
        only, as every writer of the shard waits."""
        return self._hold_commit_lock()

    def start_new_file(self) -> None:
        """Continue in a new file, so that a checkpoint can remove the one before."""
        with self._hold_commit_lock():
            self._latch.check()
            self.writer.start_new_file()

    def synced_position(self) -> Position:
        """Every byte before it survives a power cut, and every commit before it is done."""
        with self._hold_commit_lock():
            return self.writer.synced

    def is_synced(self, file: File, end: int) -> bool:
        """Whether the bytes of a commit's file before `end` survive a power cut. Called with the commit lock held."""
        return file is not self.writer.reader or self.writer.synced.pos >= end

    def start(self) -> None:
        """Start the writer thread; `close` stops it. It is a daemon: a program that dies of an exception must be able
        to exit, and the owner of the shard closes it at the interpreter's exit."""
        with self.lock:
            if self._thread is None and not self._is_closed:
                thread = Thread(target=self._run_writer, name=f"tidelog wal {self.directory}", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Refuse new commits, commit the queue, sync, stop the writer thread. On return every accepted commit has its
        outcome, and acknowledged ones are durable. Raises Latched if they are not, because the last sync or an earlier
        one failed. Idempotent."""
        with self.lock:
            self._is_closed = True
            self._wake.notify_all()
        while self._thread is not None and self._thread.is_alive():
            self._wait_for_inflight()  # the writer thread may wait for the commit lock
            self._thread.join(COMPLETION_POLL_S)
        while True:
            self._wait_for_inflight()
            # A batch may have been begun meanwhile: then this thread must finish it.
            if self.commits.commit_lock.acquire(timeout=COMPLETION_POLL_S):
                break
        self.commits.release()
        while self.commit_pending():
            pass
        with self._hold_commit_lock():
            acked, self._acked_position = self._acked_position, self.writer.synced
            try:
                if not self._latch.is_tripped:
                    self._sync()
                elif acked > self.writer.synced:
                    raise self._latch.unsynced_error()
            finally:
                self.writer.close()
                fsync_thread, self._fsync_thread = self._fsync_thread, None
                if fsync_thread is not None:
                    fsync_thread.close()

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: the parent commits the queue, and every lock raises Forked here."""
        self._is_closed = True
        process.poison_locks(self.directory, pid, self, self.commits, self.writer)

    # ── event loops ───────────────────────────────────────────────────────────────────────────

    def enable_async(self, on_finished_elsewhere: Callable[[], None]) -> int:
        """Allow `begin_commit`; needs a writer thread. Return the descriptor that is readable when `finish_commit` can
        finish the batch. `on_finished_elsewhere` is called, in any thread, when another thread has finished it."""
        self._on_finished_elsewhere = on_finished_elsewhere
        self._fsync_thread = self._fsync_thread or FsyncThread(f"tidelog sync {self.directory}")
        return self._fsync_thread.descriptor

    def disable_async(self) -> None:
        """Undo `enable_async`, of an event loop that ends before the shard. Finishes the batch in flight."""
        with self._hold_commit_lock():
            fsync_thread, self._fsync_thread = self._fsync_thread, None
            self._on_finished_elsewhere = lambda: None
            self.window_ms = lambda: 0.0
        if fsync_thread is not None:
            fsync_thread.close()

    @property
    def has_inflight_batch(self) -> bool:
        """Whether a batch was begun and is not finished."""
        return self._state is not CommitState.IDLE

    @property
    def inflight_us(self) -> int:
        """The age of the batch in flight; 0 without one."""
        inflight = self._inflight
        return 0 if inflight is None else self._now_us() - inflight.started_us

    def begin_commit(self, *, gathered_us: int = 0) -> bool:
        """Write one batch from the queue without blocking. A batch that needs a sync is finished by `finish_commit`.
        False if nothing was begun: the queue is empty, another thread commits, or the batch is large or needs a new
        file, which is left to the writer thread."""
        if not self.commits.commit_lock.acquire(blocking=False):
            return False
        is_inflight = False  # then the commit lock is released by the thread that finishes the batch
        try:
            batch = [] if self._is_closed else self.commits.take_batch()
            if not batch:
                return False
            size = sum(commit.size + PREPENDED_BYTES_MAX for commit in batch)
            if size > _ASYNC_BATCH_BYTES_MAX or self.writer.is_full(size) or self.writer.is_reserve_file:
                with self.lock:
                    self._queue.extendleft(reversed(batch))
                return False
            write_error: OSError | None = None
            try:
                is_inflight = self._write(batch, gathered_us, self.writer.write_raw)
            except OSError as error:
                is_inflight, write_error = True, error
            except BaseException as error:
                self.commits.finish_batch(batch, error)
                return True
            if is_inflight:
                self._start_sync(batch, write_error)
            else:
                self.commits.finish_batch(batch, None)
            return True
        finally:
            if not is_inflight:
                self.commits.release()

    def _start_sync(self, batch: list[Commit], write_error: OSError | None) -> None:
        """Leave a batch to the fsync thread; to the writer thread if that cannot sync it, or the write failed."""
        fsync_thread = self._fsync_thread if write_error is None else None
        descriptor = None if fsync_thread is None else self.writer.begin_sync()
        with self.lock:
            self._begin_count += 1
            self._inflight = InflightBatch(
                batch, self.write_us, self._now_us(), write_error, get_ident(), self._begin_count
            )
            self._enter(CommitState.HANDED_OVER if descriptor is None else CommitState.SYNCING)
            if descriptor is None or self._writer_is_asleep:
                self._wake.notify()
        if fsync_thread is not None and descriptor is not None:
            fsync_thread.request(descriptor)

    def finish_commit(self, *, by_loop: bool = True) -> bool:
        """Publish the batch in flight if the fsync thread has synced it, and release the commit lock; False otherwise.
        `by_loop`: the caller is the event loop, which also commits the rest of the queue."""
        fsync_thread = self._fsync_thread
        if fsync_thread is None:
            return False
        failure: Error | None = None
        try:
            self.writer.end_sync(fsync_thread.result())
        except BlockingIOError:
            return False
        except Error as error:
            failure = error
        inflight = self._inflight
        assert inflight is not None, "a sync was requested"
        self.write_us, self.sync_us = inflight.write_us, self._now_us() - inflight.started_us
        if failure is None:
            with self.lock:
                self._stats.record_sync(self.sync_us)
        self._end_inflight(inflight.batch, failure, by_loop=by_loop)
        return True

    def _take_over_batch(self) -> bool:
        """Sync or roll back the batch that was handed over, with the commit lock of the thread that began it. False if
        there is none."""
        with self.lock:
            inflight = self._inflight
            if self._state is not CommitState.HANDED_OVER or inflight is None:
                return False
            self._enter(CommitState.TAKEN_OVER)
        outcome: BaseException | None = None
        try:
            if inflight.write_error is not None:
                raise self.writer.rollback(inflight.write_error) from inflight.write_error
            self.write_us, self.sync_us = inflight.write_us, self._sync()
        except BaseException as error:
            outcome = error
        self._end_inflight(inflight.batch, outcome, by_loop=False)
        return True

    def _end_inflight(self, batch: list[Commit], outcome: BaseException | None, *, by_loop: bool) -> None:
        with self.lock:
            self._inflight = None
            self._enter(CommitState.IDLE)
        try:
            self.commits.finish_batch(batch, outcome)
        finally:
            if by_loop:
                self.commits.commit_lock.release()
            else:
                self.commits.release()
                self._on_finished_elsewhere()

    def _enter(self, state: CommitState) -> None:
        assert state in _TRANSITIONS[self._state], f"{self._state} cannot become {state}"
        self._state = state

    def _wait_for_inflight(self) -> None:
        """Wait until no batch is in flight, and finish it here if its event loop does not: the loop may be gone."""
        while self._state is not CommitState.IDLE and (fsync_thread := self._fsync_thread) is not None:
            has_writer = self._thread is not None and self._thread.is_alive()
            if has_writer or not self._take_over_batch():
                fsync_thread.wait(COMPLETION_POLL_S)
                self.finish_commit(by_loop=False)

    # ── one batch, with the commit lock held ──────────────────────────────────────────────────

    def commit_batch(self, batch: list[Commit], gathered_us: int) -> None:
        """Write and sync a batch."""
        guard = InterruptGuard()
        may_use_reserve = all(commit.may_use_reserve for commit in batch)
        outcome = self._write_and_sync(batch, gathered_us, guard, may_use_reserve=may_use_reserve)
        if isinstance(outcome, DiskFull) and not may_use_reserve:
            # New records are refused; commits that free space are tried again without them.
            rest = [commit for commit in batch if commit.may_use_reserve]
            self.commits.finish_batch([commit for commit in batch if not commit.may_use_reserve], outcome)
            if rest:
                self.commits.finish_batch(rest, self._write_and_sync(rest, gathered_us, guard, may_use_reserve=True))
        else:
            self.commits.finish_batch(batch, outcome)
        guard.raise_pending()

    def _write_and_sync(
        self, batch: list[Commit], gathered_us: int, guard: InterruptGuard, *, may_use_reserve: bool
    ) -> BaseException | None:
        """Write a batch, and sync it if a commit is durable; return the error, if any."""
        write = partial(guard.run, partial(self.writer.write, may_use_reserve=may_use_reserve))
        try:
            if self._write(batch, gathered_us, write):
                self.sync_us = guard.run(self._sync)
        except BaseException as error:
            return error
        return None

    def _write(self, batch: list[Commit], gathered_us: int, write: Callable[..., None]) -> bool:
        """Write a batch with `write`; return whether it needs a sync."""
        pieces: list[Buffer] = []
        prepended = copied = frames = size = 0
        durable = False
        for commit in batch:
            prepended -= commit.frames
            commit.before_write()
            prepended += commit.frames
            copied += commit.copied_frames
            pieces += commit.pieces
            frames, size, durable = frames + commit.frames, size + commit.size, durable or commit.durable
        start_us = self._now_us()
        if gathered_us:
            for commit in batch:
                commit.delayed_us = min(start_us - commit.queued_us, gathered_us)
        write(pieces, size=size, frames=frames)
        if self.writer.should_prepare_next or (not durable and self.writer.should_sync):
            self.on_tick_needed()
        self.write_us, self.sync_us = self._now_us() - start_us, 0
        offset, reader = self.writer.position.pos - size, self.writer.reader
        for commit in batch:
            commit.offset, commit.file = offset, reader
            offset += commit.size
        stats = self._stats
        stats.batches += bool(frames)
        stats.frames, stats.copied_frames = stats.frames + frames - prepended - copied, stats.copied_frames + copied
        stats.bytes += size
        return durable

    def _sync(self) -> int:
        start_us = self._now_us()
        if not self.writer.sync():
            return 0
        took_us = self._now_us() - start_us
        with self.lock:
            self._stats.record_sync(took_us)
        return took_us

    def publish(self, batch: list[Commit], error: Error | None) -> None:
        """Give a batch its outcome; once latched, also what is queued."""
        if error is None:
            self._acked_position = self.writer.position
        self._notify_batch(batch, error)
        if self._latch.is_tripped:
            try:
                self._latch.check()
            except Latched as latched:
                self._notify_batch(self.commits.drain(), latched)

    def _notify_batch(self, batch: list[Commit], error: Error | None) -> None:
        notified = 0
        try:
            for commit in batch:
                notified += 1
                commit.on_done(error)
        except BaseException as failure:
            # The state in memory no longer follows the WAL: continuing would make it worse.
            self.commits.fail_all(batch[notified:], failure)
            raise

    def fail(self, cause: BaseException) -> Error:
        """Trip the latch."""
        return self._latch.trip(cause, "committing")

    # ── the commit lock and the writer thread ─────────────────────────────────────────────────

    def _finish_own_batch(self) -> None:
        """Finish the batch in flight if this thread began it: the thread needs the commit lock and holds it itself."""
        with DEFER_SIGNALS:
            inflight = self._inflight
            if inflight is not None and inflight.thread_id == get_ident():
                self._wait_for_inflight()

    def _hold_commit_lock(self) -> AbstractContextManager[None]:
        self._finish_own_batch()
        return self.commits.exclusive()

    def wake_writer(self) -> None:
        """Make the writer thread, if there is one, commit the queue."""
        with self.lock:
            self._wake_writer_locked()

    def _wake_writer_locked(self) -> None:
        if not self._writer_wanted:
            self._writer_wanted = True
            self._wake.notify()

    def _run_writer(self) -> None:
        while self._wait_for_work():
            if self._state is not CommitState.IDLE and (self._check_inflight() or not self._has_work):
                continue
            start_us = self._now_us()
            slices = wait_for_more_commits(self.window_ms(), lambda: self._submitted, self._pause)
            with self.lock:
                self._writer_wanted = False
            gathered_us = self._now_us() - start_us if slices else 0
            if not self.commit_pending(timeout=COMMIT_LOCK_TIMEOUT_S, gathered_us=gathered_us) and self._queue:
                self.wake_writer()

    @property
    def _has_work(self) -> bool:
        """Whether the writer thread should commit the queue."""
        return bool(self._queue) and (self._writer_wanted or self._is_closed)

    def _wait_for_work(self) -> bool:
        """Block the writer thread until there is a queue to commit or a batch in flight to check; False: it ends."""
        with self.lock:
            while self._state is not CommitState.HANDED_OVER and not self._has_work:
                if self._is_closed and self._state is CommitState.IDLE:
                    return False
                self._writer_wanted = False
                # The event loop that should commit the queue may be gone: after one interval this thread commits it.
                is_loops_queue = self._fsync_thread is not None and bool(self._queue)
                is_idle = self._state is CommitState.IDLE and not is_loops_queue
                # While batches are begun it polls: waking it for each one would cost a thread switch a batch.
                self._writer_is_asleep = is_idle and self._begin_count == self._seen_begin
                self._seen_begin = self._begin_count
                woken = self._wake.wait(None if self._writer_is_asleep else COMPLETION_POLL_S)
                self._writer_is_asleep = False
                if self._state is CommitState.IDLE:
                    self._writer_wanted = self._writer_wanted or (is_loops_queue and not woken)
                elif not woken or self.inflight_us >= COMPLETION_POLL_S * 1e6:
                    return True
            return True

    def _check_inflight(self) -> bool:
        """Finish the batch in flight if it was handed over, or if this is the second check of it: then its event loop
        may be gone. Return whether it is finished."""
        inflight = self._inflight
        if self._take_over_batch():
            return True
        if inflight is None:
            return False
        is_second_check, self._checked_begin = inflight.number == self._checked_begin, inflight.number
        return is_second_check and self.finish_commit(by_loop=False)

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if not self._is_closed:
                self._wake.wait(seconds)
