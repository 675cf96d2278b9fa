"""[shell] Commits of an event loop, which must not wait: it writes, and the sync runs beside it.

    begin ──► write all ──► (none is durable: done …)
                 └──► synced beside (`beside`) ──► finish ──► done, done, done …
                 └──► or by the writer thread, where another sync is under way or the write found no room

It keeps the turn meanwhile, as a committer that syncs does. A loop that does not come back, because it is gone or
waits for somebody who waits for the turn, is not waited for: the writer thread looks at what was begun every 50 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Lock, get_ident
from typing import Final, NamedTuple

from tidelog.clock import Clock
from tidelog.disk.beside import Beside
from tidelog.errors import Error
from tidelog.wal.commit import Commit
from tidelog.wal.committer import Committer
from tidelog.wal.file import Writer

LEAD_BYTES: Final = 160  # at most, of what may still be put in front of a commit
HEAR_S: Final = 0.05  # between two looks at what was begun
TURN_S: Final = 0.005  # for which the writer thread waits for a turn that may be left to it meanwhile
_MUCH_BYTES: Final = 1 << 20  # to write: the writer thread's, not an event loop's


class Begun(NamedTuple):
    """A batch that was written and waits for its sync, or was not written whole and has to be taken back."""

    batch: list[Commit]
    write_us: int
    since_us: int
    failed: OSError | None
    thread: int


class Aside(Committer):
    """A committer whose turn can be kept while somebody else syncs."""

    def __init__(self, writer: Writer, *, clock: Clock, batch_frames: int, batch_bytes: int) -> None:
        super().__init__(writer, clock=clock, batch_frames=batch_frames, batch_bytes=batch_bytes)
        self._turn = Lock()  # the commit lock
        self._wake = Condition(self.lock)
        self._wanted = False  # the writer thread has something to do
        self._closing = False
        self._beside: Beside | None = None
        self._over: Callable[[], None] = lambda: None
        self._begun: Begun | None = None  # its turn is not over
        self._left = False  # and it is the writer thread that ends it
        self._ended = False  # the writer thread did, or whoever closed took its place
        self._begins = 0
        self._looked: tuple[int, Begun | None] = (0, None)  # what the writer thread saw of that
        self._dozing = False  # it sleeps until it is woken

    def beside(self, over: Callable[[], None], *, compiled: bool = True) -> int:
        """Be ready for `begin`, with a writer thread; return the descriptor that can be read when `finish` has
        something to tell. `over` is called, in any thread, where something else ended what was begun."""
        self._over = over
        self._beside = self._beside or Beside(f"tidelog sync {self._writer.directory}", compiled=compiled)
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
            batch = [] if self._closing else self._take()
            if not batch:
                return False
            size = sum(commit.size + LEAD_BYTES for commit in batch)
            if size > _MUCH_BYTES or self._writer.is_full(size) or self._writer.is_lean:
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
            descriptor = None if beside is None else self._writer.begin_sync()
            with self.lock:
                self._begins += 1
                self._left = descriptor is None
                if self._left or self._dozing:
                    self._wake.notify()
            if beside is not None and descriptor is not None:
                beside.ask(descriptor)
            return True
        finally:
            if not kept:
                self._leave()

    def finish(self) -> bool:
        """Tell everybody of the batch that was begun, once it was synced beside; False while it was not. The turn is
        free then, and nobody was sent for what is queued."""
        beside = self._beside
        if beside is None:
            return False
        fate: Error | None = None
        try:
            self._writer.end_sync(beside.outcome())
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

    def _finish_for(self) -> bool:
        """`finish` in the place of who began it, who may never hear of anything again."""
        over = True  # also where telling somebody breaks
        try:
            over = self.finish()
        finally:
            if over:
                if self._queue:
                    self.want()
                self._over()
        return over

    def _end(self) -> bool:
        """End what was begun and left to the writer thread, which has the turn of who began it. False: nothing was."""
        with self.lock:
            begun = self._begun
            if not self._left or begun is None:
                return False
            self._left = False  # whoever sees it first ends it
        fate: BaseException | None = None
        try:
            if begun.failed is not None:
                raise self._writer.undo(begun.failed) from begun.failed
            self.write_us, self.sync_us = begun.write_us, self._sync()
        except BaseException as error:
            fate = error
        self._begun = None
        try:
            self._settle(begun.batch, fate)
        finally:
            self._leave()
            self._over()
        return True

    def _attend(self) -> bool:
        """Whether what was begun is ended now. What is seen a second time, nobody else may have come for."""
        begun = self._begun
        if self._end() or (begun is not None and self._looked[1] is begun and self._finish_for()):
            return True
        self._looked = (self._looked[0], begun)
        return False

    def _hear(self) -> None:
        """Wait until what was begun is ended: who began it may have no event loop any more."""
        while self._begun is not None and (beside := self._beside) is not None:
            if not (self._ended and self._end()):
                beside.wait(HEAR_S)
                self._finish_for()

    def _yield(self) -> None:
        """Who began something and then wants the turn would wait for itself."""
        begun = self._begun
        if begun is not None and begun.thread == get_ident():
            self._hear()

    # The turn.

    def _leave(self) -> None:
        """Let the next one commit. The queue is looked at behind the release: whoever found the turn taken has
        submitted before it, so its commit is seen here and somebody comes for it."""
        self._turn.release()
        if self._queue:
            self.want()

    def want(self) -> None:
        """Have the writer thread, where there is one, commit what is queued."""
        with self.lock:
            self._want()

    def _want(self) -> None:
        if not self._wanted:
            self._wanted = True
            self._wake.notify()
