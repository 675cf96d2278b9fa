"""The caller's handle on the outcome of its commit.

`wait` first tries to commit in the calling thread. Only if another thread is committing does the caller block, on an
event that is created when it is needed.
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
    """The future outcome of a commit. Any number of threads may wait for it."""

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
        """A future with a known result."""
        future = cls(shard)
        future._value, future._is_done = value, True
        return future

    @property
    def done(self) -> bool:
        return self._is_done

    def set_result(self, outcome: T | Error) -> None:
        """Set the outcome, once: the result, or the error that `wait` raises. Called by the commit's `on_done`."""
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
            # A callback may belong to an event loop that is closed; that must not stop the committer.
            with suppress(Exception):
                callback(self)

    def set_exception(self, error: Error) -> None:
        self.set_result(error)

    def wait(self, timeout: float | None = None) -> T:
        """Return the result or raise the commit's error. Raises InDoubt after `timeout` seconds; a caller that commits
        in its own thread returns when the disk does, however long that takes."""
        if not self._is_done:
            self.try_commit(timeout)
        if not self._is_done:
            self._block(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]  # None only where T allows it

    def try_commit(self, timeout: float | None = None) -> None:
        """Commit in this thread, unless another thread is committing."""
        shard = self._shard
        lock_timeout = -1 if timeout is None else timeout
        # With a writer thread no caller waits for the commit lock: its holder wakes the thread for what is queued.
        while not self._is_done and (
            shard.commit_pending(blocking=False)
            if shard.has_writer_thread
            else shard.commit_pending(timeout=lock_timeout)
        ):
            pass

    def add_done_callback(self, callback: Callable[[CommitFuture[T]], object], *, wake_writer: bool = True) -> None:
        """Call `callback(future)` once the outcome is known: now, or by the committer. It must be short and must not
        block; exceptions are suppressed. Without `wake_writer` the caller commits the queue itself."""
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
