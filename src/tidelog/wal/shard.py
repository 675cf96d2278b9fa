"""[shell] Group commit: many callers, one write, one sync. There is no timer while the machine keeps up.

    submit ──► queue ──► write all ──► sync once, if any is durable ──► done, done, done …
                         └────────────── one committer at a time, in submit order ──────┘

Whoever waits for a commit tries to be the committer: a lone durable write costs no change of threads.
While one committer syncs, the queue fills, so the batch follows the load by itself. What nobody
waits for is driven by the writer thread, which is also woken for what a committer leaves behind.
Without `start` there is no thread, and what happens is what the callers do, in their order.

An event loop must not wait, so it writes and lets the sync run beside it:

    begin ──► write all ──► (none is durable: done …)
                 └──► synced beside (`beside`) ──► finish ──► done, done, done …
                 └──► or by the writer thread, where another sync is under way or the write found no room

It keeps the turn meanwhile, as a committer that syncs does.

Lock order: commit lock → whatever `done` takes → queue lock. Nobody waits for a token, asks for a
position or closes the shard while holding a lock that some `done` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, Thread, get_ident
from typing import Final, NamedTuple

from tidelog.clock import Clock
from tidelog.disk.beside import Beside
from tidelog.disk.seam import File
from tidelog.errors import Busy, Closed, Error
from tidelog.wal.commit import Commit
from tidelog.wal.committer import Committer
from tidelog.wal.file import Writer
from tidelog.wal.names import Position
from tidelog.wal.stats import Stats
from tidelog.wal.window import gather

_LEAD_BYTES: Final = 128  # at most, of what may still be put in front of a commit
_MUCH_BYTES: Final = 1 << 20  # to write: the writer thread's, not an event loop's
_HEAR_S: Final = 0.05  # between two looks whether somebody else heard of a sync


class Begun(NamedTuple):
    """A batch that was written and waits for its sync, or was not written whole and has to be taken back."""

    batch: list[Commit]
    write_us: int
    since_us: int
    failed: OSError | None
    thread: int


class Shard(Committer):
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
        self._turn = Lock()  # the commit lock
        self._preparing = Lock()  # held by whoever makes the next file ready: anybody may tick
        self._wake = Condition(self.lock)
        self._arrived = 0
        self._wanted = False  # the writer thread has something to do
        self._closing = False
        self._thread: Thread | None = None
        self._beside: Beside | None = None
        self._over: Callable[[], None] = lambda: None
        self._begun: Begun | None = None  # its turn is not over
        self._left = False  # and it is the writer thread that ends it
        self._ended = False  # the writer thread did, or whoever closed took its place

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
        self._yield()
        if not self._turn.acquire(blocking, timeout):
            return False
        try:
            return self._commit(gathered_us)
        finally:
            self._leave()

    def beside(self, over: Callable[[], None], *, compiled: bool = True) -> int:
        """Be ready for `begin`, with a writer thread; return the descriptor that can be read when `finish` has
        something to tell. `over` is called, in any thread, where something else ended what was begun."""
        assert self.threaded, "somebody has to end what cannot be synced beside"
        self._over = over
        self._beside = self._beside or Beside(f"tidelog sync {self.directory}", compiled=compiled)
        return self._beside.descriptor

    @property
    def is_begun(self) -> bool:
        """Whether a batch was begun that nobody has ended."""
        return self._begun is not None

    @property
    def begun_us(self) -> int:
        """For how long."""
        begun = self._begun
        return 0 if begun is None else self._micros() - begun.since_us

    def begin(self, *, gathered_us: int = 0) -> bool:
        """As `pump`, and nothing waits: what needs a sync is told of by `finish`. False where nothing was begun:
        nothing is queued, another thread commits, or it is much, or a new file, for which the writer thread is sent."""
        if not self._turn.acquire(blocking=False):
            return False
        kept = False  # the turn, until it is ended
        try:
            batch = self._take()
            if not batch:
                return False
            size = sum(commit.size + _LEAD_BYTES for commit in batch)
            if size > _MUCH_BYTES or self._writer.is_full(size):
                with self.lock:
                    self._queue.extendleft(reversed(batch))
                return False
            try:
                durable, failed = self._write(batch, gathered_us, self._writer.lay), None
            except OSError as error:
                durable, failed = True, error
            except BaseException as error:
                self._settle(batch, error)
                return True
            if not durable:
                self._settle(batch, None)
                return True
            kept = True
            self._begun = Begun(batch, self.write_us, self._micros(), failed, get_ident())
            beside = self._beside if failed is None else None
            if beside is not None and (descriptor := self._writer.begin_sync()) is not None:
                beside.ask(descriptor)
            else:
                with self.lock:
                    self._left = True
                    self._wake.notify()
            return True
        finally:
            if not kept:
                self._leave()

    def finish(self) -> bool:
        """Tell everybody of the batch that was begun, once it was synced beside; False while it was not. The turn is
        free then, and nobody was sent for what is queued."""
        if self._beside is None:
            return False
        fate: Error | None = None
        try:
            self._writer.end_sync(self._beside.outcome())
        except BlockingIOError:
            return False
        except Error as error:
            fate = error
        begun, self._begun = self._begun, None
        assert begun is not None, "it was asked for"
        self.write_us, self.sync_us = begun.write_us, self._micros() - begun.since_us
        if fate is None:
            with self.lock:
                self._stats.synced(self.sync_us)
        try:
            self._settle(begun.batch, fate)
        finally:
            self._turn.release()
        return True

    def _end(self, begun: Begun) -> None:
        """What was begun and left to the writer thread. It has the turn of who began it."""
        fate: BaseException | None = None
        try:
            if begun.failed is not None:
                raise self._writer.undo(begun.failed) from begun.failed
            self.write_us, self.sync_us = begun.write_us, self._sync()
        except BaseException as error:
            fate = error
        self._begun, self._left = None, False
        try:
            self._settle(begun.batch, fate)
        finally:
            self._leave()
            self._over()

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
        while self._thread is not None and self._thread.is_alive():
            self._hear()  # it may wait for a turn that an event loop has not ended
            self._thread.join(_HEAR_S)
        self._ended = True
        self._hear()
        while self.pump():
            pass
        with self._my_turn():
            try:
                if not self._latch.closed:
                    self._sync()
            finally:
                self._writer.close()
                if self._beside is not None:
                    self._beside.close()
                    self._beside = None

    def _hear(self) -> None:
        """Wait until what was begun is ended: who began it may have no event loop any more."""
        while (begun := self._begun) is not None and self._beside is not None:
            if self._left and self._ended:
                self._end(begun)
            else:
                self._beside.wait(_HEAR_S)
                if self.finish():
                    self._over()

    # Turns and the writer thread.

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        self._yield()
        self._turn.acquire()
        try:
            yield
        finally:
            self._leave()

    def _yield(self) -> None:
        """Who began something and then wants the turn would wait for itself."""
        begun = self._begun
        if begun is not None and begun.thread == get_ident():
            self._hear()

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
            if self._left and self._begun is not None:
                self._end(self._begun)
                continue
            began_us = self._micros()
            slices = gather(self.window_ms(), lambda: self._arrived, self._pause)
            with self.lock:
                self._wanted = False
            self.pump(gathered_us=self._micros() - began_us if slices else 0)

    def _called(self) -> bool:
        """Park until there is something to commit; False once there never will be."""
        with self.lock:
            while not self._left and (not self._queue or not (self._wanted or self._closing)):
                if self._closing:
                    return False
                self._wanted = False
                self._wake.wait()
            return True

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if not self._closing:
                self._wake.wait(seconds)
