"""[shell] Group commit: many callers, one write, one sync. There is no timer while the machine keeps up.

    submit ──► queue ──► write all ──► sync once, if any is durable ──► done, done, done …
                         └────────────── one committer at a time, in submit order ──────┘

Whoever waits for a commit tries to be the committer: a lone durable write costs no change of threads.
While one committer syncs, the queue fills, so the batch follows the load by itself. What nobody
waits for is driven by the writer thread, which is also woken for what a committer leaves behind.
Without `start` there is no thread, and what happens is what the callers do, in their order.

All commits of a batch share one fate. After a failure that closes the latch every commit that was
accepted is failed and every later one refused; each gets exactly one outcome.

Lock order: commit lock → whatever `done` takes → queue lock. Nobody waits for a token, asks for a
position or closes the shard while holding a lock that some `done` takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Lock, Thread
from typing import Final

from tidelog.clock import Clock
from tidelog.disk.seam import File
from tidelog.errors import Busy, Closed, Error, Latched
from tidelog.types import Buffer
from tidelog.wal.commit import Commit
from tidelog.wal.file import Writer
from tidelog.wal.names import Position
from tidelog.wal.stats import Stats
from tidelog.wal.window import gather

_LEAD_BYTES: Final = 128  # at most, of what may still be put in front of a commit


class Shard:
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
        self.on_want: Callable[[], None] = lambda: None  # somebody should `tick` soon: a file or a sync is wanted
        self._writer, self._latch = writer, writer.latch
        self._queue_max, self._batch_frames, self._batch_bytes = queue_max, batch_frames, batch_bytes
        self._micros = clock.monotonic_us
        self._turn = Lock()  # the commit lock
        self._preparing = Lock()  # held by whoever makes the next file ready: anybody may tick
        self.lock = Lock()  # the queue lock, which its tokens share
        self._wake = Condition(self.lock)
        self._queue: deque[Commit] = deque()
        self._arrived = 0
        self._wanted = False  # the writer thread has something to do
        self._closing = False
        self._thread: Thread | None = None
        self._stats = Stats()
        self.failed = 0  # batches of which nothing was written
        self.write_us = self.sync_us = 0  # what the last batch took; a commit's `done` reads that of its own

    @property
    def directory(self) -> str:
        return self._writer.directory

    @property
    def latched(self) -> bool:
        """Whether an earlier failure ended writing."""
        return self._latch.closed

    def check(self) -> None:
        """Raise Latched where an earlier failure ended writing."""
        self._latch.check()

    @property
    def threaded(self) -> bool:
        """Whether commits get done without anybody waiting for them."""
        return self._thread is not None

    @property
    def waiting(self) -> int:
        """Commits in the queue."""
        return len(self._queue)

    @property
    def queue_max(self) -> int:
        """Commits that may be in the queue."""
        return self._queue_max

    @property
    def is_quick(self) -> bool:
        """Whether what is queued now is committed without a sync."""
        with self.lock:
            return not any(commit.waits or commit.ahead is not None for commit in self._queue)

    @property
    def is_full(self) -> bool:
        """Whether what is queued now may need a new file: several syncs, behind all that waits for the disk."""
        with self.lock:
            return self._writer.is_full(sum(commit.size + _LEAD_BYTES for commit in self._queue))

    @property
    def stats(self) -> Stats:
        with self.lock:
            figures = self._stats.copy()
            figures.depth, figures.rotations = len(self._queue), self._writer.rotations
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
                self._stats.refused += 1
                raise Busy(
                    f"{self._queue_max} writes wait for the disk of {self.directory} already; nothing was written, "
                    "retry later"
                )
            commit.since_us = self._micros()
            self._queue.append(commit)
            self._arrived += 1
            self._stats.peak = max(self._stats.peak, depth)
            if nowait:
                self._want()

    def pump(self, *, blocking: bool = True, timeout: float = -1, gathered_us: int = 0) -> bool:
        """Commit what is queued, up to the bounds of one batch. False where nothing was queued, and where another
        thread commits and this one is not to wait for its turn, or not longer. `gathered_us`: for how long the caller
        has let the batch grow."""
        if not self._turn.acquire(blocking, timeout):
            return False
        try:
            return self._commit(gathered_us)
        finally:
            self._leave()

    def tick(self) -> None:
        """Sync what was written and not synced, and first commit what nobody came back for. Raises Latched when it
        is this sync that fails; once latched or closed there is nothing to do."""
        if self.sync() and self._preparing.acquire(blocking=False):
            try:
                self._writer.prepare()
            finally:
                self._preparing.release()

    def sync(self) -> bool:
        """Commit what is queued and sync it, as `tick` does; False once latched or closed: there is nothing to do."""
        self.pump()
        if self._latch.closed or self._closing:
            return False
        self._sync()  # without the turn: writes that do not wait for the disk need not wait for this
        return True

    def position(self) -> Position:
        """Where the next batch is written. Every commit before it is done."""
        with self._my_turn():
            return self._writer.position

    def synced(self) -> Position:
        """Every byte before it survives a power cut, and every commit before it is done."""
        with self._my_turn():
            return self._writer.synced

    def has_synced(self, file: File, end: int) -> bool:
        """Whether what a commit wrote before `end` of its file survives a power cut. For `prepare`: it has the turn."""
        return file is not self._writer.reader or self._writer.synced.pos >= end

    def want(self) -> None:
        """Have the writer thread, where there is one, commit what is queued."""
        with self.lock:
            self._want()

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
        accepted has its outcome, and those that were told of success are durable. Raises Latched when the last sync
        fails. Closing twice is harmless."""
        with self.lock:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self.pump():
            pass
        with self._my_turn():
            try:
                if not self._latch.closed:
                    self._sync()
            finally:
                self._writer.close()

    # The committer's work; the commit lock is held.

    def _commit(self, gathered_us: int) -> bool:
        batch = self._take()
        if not batch:
            return False
        error: Error | None = None
        try:
            self._write(batch, gathered_us)
        except Error as failed:
            self.failed += 1
            error = failed
        except BaseException as broken:
            self._abandon(batch, broken)
            raise
        self._tell(batch, error)
        if self._latch.closed:
            self._fail_queue()
        return True

    def _take(self) -> list[Commit]:
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

    def _write(self, batch: list[Commit], gathered_us: int) -> None:
        pieces: list[Buffer] = []
        frames = size = 0
        durable = False
        for commit in batch:
            commit.prepare()
            if commit.ahead is not None:
                commit.ahead(commit)
            pieces += commit.pieces
            frames, size, durable = frames + commit.frames, size + commit.size, durable or commit.durable
        began_us = self._micros()
        if gathered_us:
            for commit in batch:
                commit.held_us = min(began_us - commit.since_us, gathered_us)
        self._writer.write(pieces, size=size, frames=frames)
        if self._writer.wants_next or (not durable and self._writer.wants_sync):
            self.on_want()
        self.write_us, self.sync_us = self._micros() - began_us, 0
        at, reader = self._writer.position.pos - size, self._writer.reader
        for commit in batch:
            commit.at, commit.file = at, reader
            at += commit.size
        if durable:
            self.sync_us = self._sync()
        stats = self._stats
        stats.batches += bool(frames)
        stats.frames, stats.bytes = stats.frames + frames, stats.bytes + size

    def _sync(self) -> int:
        began = self._micros()
        if not self._writer.sync():
            return 0
        took_us = self._micros() - began
        with self.lock:
            self._stats.synced(took_us)
        return took_us

    def _tell(self, batch: list[Commit], error: Error | None) -> None:
        told = 0
        try:
            for commit in batch:
                told += 1
                commit.done(error)
        except BaseException as broken:
            # What this caller keeps in memory no longer follows the WAL: going on would make it worse.
            self._abandon(batch[told:], broken)
            raise

    def _fail_queue(self) -> None:
        try:
            self._latch.check()
        except Latched as error:
            self._tell(self._drain(), error)

    def _abandon(self, batch: list[Commit], broken: BaseException) -> None:
        """Latch, and fail all that was accepted and not told yet, whatever their `done` thinks of it."""
        error = self._latch.trip(broken, "committing")
        error.__cause__ = broken
        for commit in (*batch, *self._drain()):
            with suppress(BaseException):
                commit.done(error)

    def _drain(self) -> list[Commit]:
        with self.lock:
            left = list(self._queue)
            self._queue.clear()
        return left

    # Turns and the writer thread.

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        self._turn.acquire()
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """Let the next one commit. The queue is looked at behind the release: whoever found the turn taken has
        submitted before it, so its commit is seen here and somebody comes for it."""
        self._turn.release()
        if self._queue:
            self.want()

    def _want(self) -> None:
        if not self._wanted:
            self._wanted = True
            self._wake.notify()

    def _run(self) -> None:
        while self._called():
            began_us = self._micros()
            slices = gather(self.window_ms(), lambda: self._arrived, self._pause)
            with self.lock:
                self._wanted = False
            self.pump(gathered_us=self._micros() - began_us if slices else 0)

    def _called(self) -> bool:
        """Park until there is something to commit; False once there never will be."""
        with self.lock:
            while not self._queue or not (self._wanted or self._closing):
                if self._closing:
                    return False
                self._wanted = False
                self._wake.wait()
            return True

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if not self._closing:
                self._wake.wait(seconds)
