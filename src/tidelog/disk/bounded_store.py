"""A segment store with time limits, retries and a bounded number of threads.

    caller ──► queue ──► worker threads (few, daemon) ──► store
       └── waits until the operation made no progress for `timeout_s`, then raises StoreUnavailable

A store may hang for ever: a mounted file system whose server is away blocks in the kernel, and not every library has
time limits. So no caller runs a store's code itself. A worker that hangs stays busy until the store answers; when all
are busy for `timeout_s`, further calls fail as fast as that. An operation that fails with a retryable error is repeated
with growing pauses. A refusal (`StoreDenied`), a missing object and a call that took too long are not repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Event, Thread
from typing import Any, Final, TypeVar, cast

from tidelog.clock import Clock, SystemClock
from tidelog.disk.segment_store import SegmentStore, StoredObject
from tidelog.errors import StoreDenied, StoreUnavailable
from tidelog.types import Buffer

T = TypeVar("T")
RETRY_PAUSES_S: Final = (0.1, 0.4, 1.6)
IDLE_S: Final = 10.0
"""A thread without work for so long ends: not every user of a store closes it."""


class _TimedOut(StoreUnavailable):
    """The store did not answer in time: the caller has waited long enough."""


class _Operation:
    __slots__ = ("error", "is_abandoned", "is_done", "progress", "result", "run")

    def __init__(self, run: Callable[[_Operation], Any]) -> None:
        self.run = run
        self.progress = 0  # grows while the operation advances
        self.is_done = self.is_abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None


class BoundedStore:
    """`store` with time limits and retries. Closing it ends every call at once, also those that hang."""

    def __init__(
        self,
        store: SegmentStore,
        *,
        threads: int = 4,
        timeout_s: float = 30.0,
        pauses_s: tuple[float, ...] = RETRY_PAUSES_S,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._threads_max, self._timeout_s, self._pauses_s = store, threads, timeout_s, pauses_s
        self._clock = clock or SystemClock()
        self._changed = Condition()
        self._waiting: deque[_Operation] = deque()
        self._idle = self._threads = 0
        self._closed = Event()
        self.retries = self.timeouts = 0

    @property
    def address(self) -> str:
        return self._store.address

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        """Store an object; the pieces are taken from `pieces` in a worker thread. Not repeated: they may be read once
        only."""

        def run(operation: _Operation) -> None:
            def counted() -> Iterator[Buffer]:
                for piece in pieces:
                    operation.progress += 1
                    if operation.is_abandoned:
                        raise StoreUnavailable(self.address, "the upload took too long")
                    yield piece

            self._store.put(key, counted())

        self._call(run, pauses_s=())

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        return self._call(lambda _: self._store.read(key, lo, hi))

    def length(self, key: str, /) -> int | None:
        return self._call(lambda _: self._store.length(key))

    def exists(self, key: str, /) -> bool:
        return self._call(lambda _: self._store.exists(key))

    def delete(self, key: str, /) -> bool:
        return self._call(lambda _: self._store.delete(key))

    def list(self, prefix: str = "", /) -> Iterator[StoredObject]:
        def run(operation: _Operation) -> list[StoredObject]:
            found: list[StoredObject] = []
            for each in self._store.list(prefix):
                operation.progress += 1
                found.append(each)
            return found

        return iter(self._call(run))

    def remove_leftovers(self, prefix: str = "", /) -> tuple[StoredObject, ...]:
        return self._call(lambda _: self._store.remove_leftovers(prefix))

    def close(self) -> None:
        """End all calls with StoreUnavailable. Threads that hang end with the process."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def busy_threads(self) -> int:
        return self._threads - self._idle

    def _call(self, run: Callable[[_Operation], T], *, pauses_s: tuple[float, ...] | None = None) -> T:
        pauses = iter(self._pauses_s if pauses_s is None else pauses_s)
        while True:
            try:
                return cast(T, self._run_once(run))
            except (StoreDenied, _TimedOut):
                raise
            except StoreUnavailable:
                pause = next(pauses, None)
                if pause is None or self._closed.wait(pause):
                    raise
                self.retries += 1

    def _run_once(self, run: Callable[[_Operation], object]) -> object:
        operation = _Operation(run)
        with self._changed:
            self._check_open()
            self._waiting.append(operation)
            if self._idle < len(self._waiting) and self._threads < self._threads_max:
                self._threads += 1
                Thread(target=self._work, name=f"tidelog store {self.address}", daemon=True).start()
            self._changed.notify_all()
            self._wait(operation)
        if operation.error is not None:
            raise operation.error
        return operation.result

    def _wait(self, operation: _Operation) -> None:
        """Wait for an operation, with the condition held, as long as it makes progress."""
        seen, since_us = -1, self._clock.monotonic_us()
        while not operation.is_done:
            if operation.progress != seen:
                seen, since_us = operation.progress, self._clock.monotonic_us()
            left_s = self._timeout_s - (self._clock.monotonic_us() - since_us) / 1e6
            if left_s > 0 and not self._closed.is_set():
                self._changed.wait(left_s)
                continue
            operation.is_abandoned = True
            was_waiting = operation in self._waiting
            if was_waiting:
                self._waiting.remove(operation)
            self._check_open()
            self.timeouts += 1
            busy = f", all {self._threads_max} connections are waiting for it" if was_waiting else ""
            raise _TimedOut(self.address, f"it did not answer within {self._timeout_s:g} s{busy}")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreUnavailable(self.address, "it was closed", step="open the database again")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting:
                    woken = not self._closed.is_set() and self._changed.wait(IDLE_S)
                    if not woken and not self._waiting:
                        self._idle, self._threads = self._idle - 1, self._threads - 1
                        return
                operation = self._waiting.popleft()
                self._idle -= 1
            try:
                operation.result = operation.run(operation)
            except BaseException as error:  # raised by the caller that waits
                operation.error = error
            with self._changed:
                operation.is_done = True
                self._changed.notify_all()
            del operation
