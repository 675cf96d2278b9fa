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
from tidelog.wal.shard import Shard

T = TypeVar("T")


class Token(Generic[T]):
    """What a commit came to, or will come to. Any number of threads may wait for it."""

    __slots__ = ("_callbacks", "_error", "_event", "_set", "_shard", "_value")

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._set = False
        self._value: T | None = None
        self._error: Error | None = None
        self._event: Event | None = None
        self._callbacks: list[Callable[[Token[T]], object]] = []

    @classmethod
    def ready(cls, shard: Shard, value: T) -> Token[T]:
        """A token whose outcome is known already."""
        token = cls(shard)
        token._value, token._set = value, True
        return token

    @property
    def done(self) -> bool:
        return self._set

    def set(self, outcome: T | Error) -> None:
        """Tell the outcome, once: the result, or why there is none. Said by the commit's `done`."""
        assert not self._set, "a commit has one outcome"
        with self._shard.lock:
            if isinstance(outcome, Error):
                self._error = outcome
            else:
                self._value = outcome
            self._set = True
            event, callbacks, self._callbacks = self._event, self._callbacks, []
        if event is not None:
            event.set()
        for callback in callbacks:
            # Whoever is called may be gone by now, with its event loop; that must not stop the committer.
            with suppress(Exception):
                callback(self)

    def fail(self, error: Error) -> None:
        self.set(error)

    def wait(self, timeout: float | None = None) -> T:
        """The result, or the commit's error raised. InDoubt when `timeout` seconds were not enough; a caller that
        commits by itself is back when the disk is, however long that takes."""
        if not self._set:
            self.push(timeout)
        if not self._set:
            self._park(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]  # None only where T allows it

    def push(self, timeout: float | None = None) -> None:
        """Commit by itself, where no other thread is at it."""
        shard = self._shard
        patience = -1 if timeout is None else timeout
        # With a writer thread nobody queues up for the turn: whoever has it sends the thread for what it leaves.
        while not self._set and (shard.pump(blocking=False) if shard.threaded else shard.pump(timeout=patience)):
            pass

    def add_callback(self, callback: Callable[[Token[T]], object], *, want: bool = True) -> None:
        """Have `callback(token)` called once the outcome is known: now if it is, else by the committer. It must be
        short, must not wait, and what it raises is lost. Without `want` the writer thread is not sent for it: the
        caller pumps."""
        shard = self._shard
        with shard.lock:
            pending = not self._set
            if pending:
                self._callbacks.append(callback)
        if pending and want:
            shard.want()
        elif not pending:
            callback(self)

    def _park(self, timeout: float | None) -> None:
        with self._shard.lock:
            if self._set:
                return
            event = self._event = self._event or Event()
        if not event.wait(timeout):
            raise InDoubt(
                f"no outcome within {timeout} s in {self._shard.directory}; the write may still be committed, wait "
                "longer or retry with the same key"
            )
