"""[shell] A caller's handle on the fate of its commit.

`wait` first tries to commit by itself; only where another thread is at it the caller sleeps, on an
event of its own that is made when it is needed and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import Generic, TypeVar

from tidelog.errors import Error, InDoubt
from tidelog.wal.group_commit import Shard

T = TypeVar("T")


class CommitFuture(Generic[T]):
    """What a commit came to, or will come to. Any number of threads may wait for it."""

    __slots__ = ("_callbacks", "_error", "_event", "_is_done", "_shard", "_value")

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._is_done = False
        self._value: T | None = None
        self._error: Error | None = None
        self._event: Event | None = None
        self._callbacks: list[Callable[[CommitFuture[T]], object]] = []

    @classmethod
    def completed(cls, shard: Shard, value: T) -> CommitFuture[T]:
        """A token whose outcome is known already."""
        token = cls(shard)
        token._value, token._is_done = value, True
        return token

    @property
    def done(self) -> bool:
        return self._is_done

    def set_result(self, outcome: T | Error) -> None:
        """Tell the outcome, once: the result, or why there is none. Said by the commit's `done`."""
        assert not self._is_done, "a commit has one outcome"
        with self._shard.lock:
            if isinstance(outcome, Error):
                self._error = outcome
            else:
                self._value = outcome
            self._is_done = True
            event, callbacks, self._callbacks = self._event, self._callbacks, []
        if event is not None:
            event.set()
        for callback in callbacks:
            # Whoever is called may be gone by now, with its event loop; that must not stop the committer.
            with suppress(Exception):
                callback(self)

    def set_exception(self, error: Error) -> None:
        self.set_result(error)

    def wait(self, timeout: float | None = None) -> T:
        """The result, or the commit's error raised. InDoubt when `timeout` seconds were not enough; a caller that
        commits by itself is back when the disk is, however long that takes."""
        if not self._is_done:
            self.try_commit(timeout)
        if not self._is_done:
            self._block(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]  # None only where T allows it

    def try_commit(self, timeout: float | None = None) -> None:
        """Commit by itself, where no other thread is at it."""
        shard = self._shard
        patience = -1 if timeout is None else timeout
        # With a writer thread nobody queues up for the turn: whoever has it sends the thread for what it leaves.
        while not self._is_done and (
            shard.commit_pending(blocking=False) if shard.has_writer_thread else shard.commit_pending(timeout=patience)
        ):
            pass

    def add_done_callback(self, callback: Callable[[CommitFuture[T]], object], *, wake_writer: bool = True) -> None:
        """Have `callback(token)` called once the outcome is known: now if it is, else by the committer. It must be
        short, must not wait, and what it raises is lost. Without `want` the writer thread is not sent for it: the
        caller pumps."""
        shard = self._shard
        with shard.lock:
            pending = not self._is_done
            if pending:
                self._callbacks.append(callback)
        if pending and wake_writer:
            shard.wake_writer()
        elif not pending:
            callback(self)

    def _block(self, timeout: float | None) -> None:
        with self._shard.lock:
            if self._is_done:
                return
            event = self._event = self._event or Event()
        if not event.wait(timeout):
            raise InDoubt(
                f"no outcome within {timeout} s in {self._shard.directory}; the write may still be committed, wait "
                "longer or retry with the same key"
            )
