"""[shell] What a committer does with its turn: the next batch is taken from the queue, written, synced and told of.

All commits of a batch share one fate. After a failure that closes the latch every commit that was
accepted is failed and every later one refused; each gets exactly one outcome.

Whoever commits has the turn; `shard` says who that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Final, Protocol, TypeVar

from tidelog.clock import Clock
from tidelog.errors import DiskFull, Error, Latched
from tidelog.types import Buffer
from tidelog.wal.commit import Commit
from tidelog.wal.file import Writer
from tidelog.wal.stats import Stats

T = TypeVar("T")
_TRIES: Final = 3


class Put(Protocol):
    def __call__(self, pieces: Sequence[Buffer], *, size: int, frames: int) -> None: ...


class Patience:
    """Completes a step that something other than the disk broke off: an interrupt is raised once the commit is done.

    Writes are positional and syncs may be repeated, so a step that is run again comes to the same end. What breaks it
    off again and again is no interrupt, and is raised.
    """

    def __init__(self) -> None:
        self._interrupt: BaseException | None = None

    def run(self, step: Callable[[], T]) -> T:
        for _ in range(_TRIES):
            try:
                return step()
            except (Error, OSError):
                raise
            except BaseException as error:
                self._interrupt = error
        return step()

    def put(self, put: Put) -> Put:
        """`put`, run as a step."""

        def patient(pieces: Sequence[Buffer], *, size: int, frames: int) -> None:
            self.run(lambda: put(pieces, size=size, frames=frames))

        return patient

    def tell(self) -> None:
        """Raise the interrupt, if there was one."""
        if self._interrupt is not None:
            raise self._interrupt


class Committer:
    """A queue of commits and the file that they go to. Its methods are called with the turn."""

    def __init__(self, writer: Writer, *, clock: Clock, batch_frames: int, batch_bytes: int) -> None:
        self.on_want: Callable[[], None] = lambda: None  # somebody should `tick` soon: a file or a sync is wanted
        self._writer, self._latch = writer, writer.latch
        self._batch_frames, self._batch_bytes = batch_frames, batch_bytes
        self._micros = clock.monotonic_us
        self.lock = Lock()  # the queue lock, which its tokens share
        self._queue: deque[Commit] = deque()
        self._stats = Stats()
        self._owed = writer.position  # up to here writes were told of success
        self.failed = 0  # batches of which nothing was written
        self.write_us = self.sync_us = 0  # what the last batch took; a commit's `done` reads that of its own

    def _commit(self, gathered_us: int) -> bool:
        batch = self._take()
        if not batch:
            return False
        patience = Patience()
        vital = all(commit.vital for commit in batch)
        fate = self._written(batch, gathered_us, patience, vital=vital)
        if isinstance(fate, DiskFull) and not vital:
            # New records wait for room. What makes some does not share their fate.
            rest = [commit for commit in batch if commit.vital]
            self._settle([commit for commit in batch if not commit.vital], fate)
            if rest:
                self._settle(rest, self._written(rest, gathered_us, patience, vital=True))
        else:
            self._settle(batch, fate)
        patience.tell()
        return True

    def _written(
        self, batch: list[Commit], gathered_us: int, patience: Patience, *, vital: bool
    ) -> BaseException | None:
        """Write a batch, and sync it where that was asked for; what kept it from that."""
        try:
            if self._write(batch, gathered_us, patience.put(partial(self._writer.write, vital=vital))):
                self.sync_us = patience.run(self._sync)
        except BaseException as error:
            return error
        return None

    def _settle(self, batch: list[Commit], fate: BaseException | None) -> None:
        """Tell a batch what came of it. What is no error of ours is raised behind that."""
        if fate is not None and not isinstance(fate, Error):
            self._abandon(batch, fate)
            raise fate
        if fate is None:
            self._owed = self._writer.position
        else:
            self.failed += 1
        self._tell(batch, fate)
        if self._latch.closed:
            self._fail_queue()

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

    def _write(self, batch: list[Commit], gathered_us: int, put: Put) -> bool:
        """Hand a batch to the operating system; return whether it needs a sync."""
        pieces: list[Buffer] = []
        reserves = copied = frames = size = 0
        durable = False
        for commit in batch:
            reserves -= commit.frames
            commit.prepare()
            reserves += commit.frames
            copied += commit.copied
            pieces += commit.pieces
            frames, size, durable = frames + commit.frames, size + commit.size, durable or commit.durable
        began_us = self._micros()
        if gathered_us:
            for commit in batch:
                commit.held_us = min(began_us - commit.since_us, gathered_us)
        put(pieces, size=size, frames=frames)
        if self._writer.wants_next or (not durable and self._writer.wants_sync):
            self.on_want()
        self.write_us, self.sync_us = self._micros() - began_us, 0
        at, reader = self._writer.position.pos - size, self._writer.reader
        for commit in batch:
            commit.at, commit.file = at, reader
            at += commit.size
        stats = self._stats
        stats.batches += bool(frames)
        stats.frames, stats.copied = stats.frames + frames - reserves - copied, stats.copied + copied
        stats.bytes += size
        return durable

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
