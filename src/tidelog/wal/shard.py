"""[shell] Group commit: many callers, one write, one sync. There is no timer while the machine keeps up.

    submit ──► queue ──► write all ──► sync once, if any is durable ──► done, done, done …
                         └────────────── one committer at a time, in submit order ──────┘

Whoever waits for a commit tries to be the committer: a lone durable write costs no change of threads.
While one committer syncs, the queue fills, so the batch follows the load by itself. What nobody
waits for is driven by the writer thread, which is also woken for what a committer leaves behind.
Without `start` there is no thread, and what happens is what the callers do, in their order.

Lock order: commit lock → whatever `done` takes → queue lock. Nobody waits for a token, asks for a
position or closes the shard while holding a lock that some `done` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread

from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.interrupts import DEFERRED, deferring
from tidelog.disk.seam import File
from tidelog.errors import Busy, Closed
from tidelog.wal.aside import HEAR_S, LEAD_BYTES, TURN_S, Aside
from tidelog.wal.commit import Commit
from tidelog.wal.file import Writer
from tidelog.wal.names import Position
from tidelog.wal.stats import Stats
from tidelog.wal.window import gather


@deferring("submit", "position", "synced", "start", "close")
class Shard(Aside):
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
        self._preparing = Lock()  # held by whoever makes the next file ready: anybody may tick
        self._arrived = 0
        self._thread: Thread | None = None

    @property
    def refusals(self) -> int:
        """How often the device had no room for a write."""
        return self._writer.full

    def allow(self, allowance: Callable[[], int | None]) -> None:
        """Have `allowance` asked how many bytes a new file may take; None: any number."""
        self._writer.allowance = allowance

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
            return not any(commit.waits for commit in self._queue)

    @property
    def is_full(self) -> bool:
        """Whether what is queued now may need a new file: several syncs, behind all that waits for the disk."""
        with self.lock:
            return self._writer.is_full(sum(commit.size + LEAD_BYTES for commit in self._queue))

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
        with DEFERRED:  # before the turn is taken: an interrupt after that would keep it for ever
            self._yield()
            if not self._turn.acquire(blocking, timeout):
                return False
            try:
                return self._commit(gathered_us)
            finally:
                self._leave()

    def tick(self) -> None:
        """Sync what was written and not synced, and first commit what nobody came back for. Raises Latched when it
        is this sync that fails; once latched or closed there is nothing to do."""
        if not self.sync():
            return
        with DEFERRED:  # as in `pump`
            if self._turn.acquire(blocking=False):  # who has it writes the mark along with a batch
                try:
                    self._writer.mark_idle()
                finally:
                    self._leave()
        if self._preparing.acquire(blocking=False):
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
            self._hear()  # it may wait for a turn that an event loop has not ended
            self._thread.join(HEAR_S)
        self._ended = True
        while True:
            self._hear()
            if self._turn.acquire(timeout=HEAR_S):  # what is being begun now is seen the next time
                break
        self._leave()
        while self.pump():
            pass
        with self._my_turn():
            owed, self._owed = self._owed, self._writer.synced
            try:
                if not self._latch.closed:
                    self._sync()
                elif owed > self._writer.synced:
                    raise self._latch.owing()
            finally:
                self._writer.close()
                beside, self._beside = self._beside, None
                if beside is not None:
                    beside.close()

    def forked(self, pid: int) -> None:
        """Give up in a forked child: what is queued is the parent's to commit, and every lock raises Forked."""
        self._closing = True
        fork.poison(self.directory, pid, self, self._writer)

    # Turns and the writer thread.

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        self._yield()
        self._turn.acquire()
        try:
            yield
        finally:
            self._leave()

    def _run(self) -> None:
        while self._called():
            if self._begun is not None and (self._attend() or not self._is_sent):
                continue
            began_us = self._micros()
            slices = gather(self.window_ms(), lambda: self._arrived, self._pause)
            with self.lock:
                self._wanted = False
            # Not for ever: whoever has the turn may have left it to this thread.
            if not self.pump(timeout=TURN_S, gathered_us=self._micros() - began_us if slices else 0) and self._queue:
                self.want()

    @property
    def _is_sent(self) -> bool:
        """Whether the writer thread is to commit what is queued."""
        return bool(self._queue) and (self._wanted or self._closing)

    def _called(self) -> bool:
        """Park until there is something to commit, or to look at; False once there never will be."""
        with self.lock:
            while not self._left and not self._is_sent:
                if self._closing and self._begun is None:
                    return False
                self._wanted = False
                # A loop that was to come for what is queued may not come any more either.
                left = self._beside is not None and bool(self._queue)
                self._dozing = self._begun is None and self._begins == self._looked[0] and not left
                self._looked = (self._begins, self._looked[1])
                woken = self._wake.wait(None if self._dozing else HEAR_S)
                self._dozing = False
                if self._begun is None:
                    self._wanted = self._wanted or (left and not woken)
                elif not woken or self.begun_us >= HEAR_S * 1e6:
                    return True
            return True

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if not self._closing:
                self._wake.wait(seconds)
