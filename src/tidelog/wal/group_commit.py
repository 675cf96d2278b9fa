"""Group commit: many callers, one write, one sync. The WAL and the logs of channels use it.

    submit ──► queue ──► commit_batch of the store: write, sync once ──► publish: every commit gets its outcome
                         └─────────────── one committer at a time, in submit order ───────────────┘

A thread that waits for a commit tries to be the committer, so a single durable write needs no thread switch. While one
committer syncs, the queue fills: batches grow with the load and need no timer. A committer commits one batch. The
commits that it leaves in the queue are committed by the writer thread of a store that has one (`wal.shard`). Without
one, a thread that waits for such a commit takes over; if none waits, the same thread commits again.

`exclusive` gives a control operation the commit lock after at most one batch, however many threads submit.

All commits of a batch have the same outcome, and each commit gets exactly one.

Lock order: commit lock → locks that `publish` takes → queue lock. A thread that holds a lock that `publish` takes must
not wait for a future or for the commit lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from tidelog.disk.process import DEFER_SIGNALS
from tidelog.errors import Error, InDoubt

T = TypeVar("T")


class Committer(Protocol):
    """Commits what futures wait for."""

    @property
    def lock(self) -> Lock:
        """The queue lock, which futures use too."""

    def commit_for(self, future: CommitFuture[Any], timeout: float | None) -> None:
        """Commit in this thread, unless another thread is committing."""

    def wake_writer(self) -> None:
        """Make the writer thread, if there is one, commit the queue."""

    def in_doubt(self, timeout: float | None) -> InDoubt:
        """The error of a caller that stops waiting."""


class CommitFuture(Generic[T]):
    """The caller's handle on the outcome of its commit. Any number of threads may wait for it.

    `wait` first tries to commit in the calling thread. Only if another thread is committing does the caller block, on
    an event that is created when it is needed.
    """

    __slots__ = ("_callbacks", "_committer", "_error", "_event", "_is_done", "_value", "_waiting_threads")

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._is_done = False
        self._value: T | None = None
        self._error: Error | None = None
        self._event: Event | None = None
        self._waiting_threads = 0  # threads in `_block`
        self._callbacks: list[Callable[[Any], object]] = []

    @classmethod
    def completed(cls, committer: Committer, value: T) -> CommitFuture[T]:
        """A future with a known result."""
        future: CommitFuture[T] = CommitFuture(committer)
        future._value, future._is_done = value, True
        return future

    @property
    def done(self) -> bool:
        return self._is_done

    def set_result(self, outcome: T | Error) -> None:
        """Set the outcome, once: the result, or the error that `wait` raises. Called by the committer."""
        assert not self._is_done, "a commit has one outcome"
        with self._committer.lock:
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
        while not self._is_done:
            self._committer.commit_for(self, timeout)
            if not self._is_done:
                self._block(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]  # None only where T allows it

    def try_commit(self) -> None:
        """Commit in this thread, unless another thread is committing."""
        self._committer.commit_for(self, None)

    def add_done_callback(self, callback: Callable[[Self], object], *, wake_writer: bool = True) -> None:
        """Call `callback(future)` once the outcome is known: now, or by the committer. It must be short and must not
        block; exceptions are suppressed. Without `wake_writer` the caller commits the queue itself."""
        committer = self._committer
        with committer.lock:
            pending = not self._is_done
            if pending:
                self._callbacks.append(callback)
        if pending and wake_writer:
            committer.wake_writer()
        elif not pending:
            callback(self)

    def _block(self, timeout: float | None) -> None:
        """Wait for the outcome, or until the committer hands over to this thread."""
        with self._committer.lock:
            if self._is_done:
                return
            event = self._event = self._event or Event()
            self._waiting_threads += 1
        try:
            event.wait(timeout)
        except BaseException:
            if self._end_wait(event):
                self.try_commit()  # the queue was handed over to this thread, which stops waiting
            raise
        if not self.done and not self._end_wait(event):
            raise self._committer.in_doubt(timeout)

    def _end_wait(self, event: Event) -> bool:
        """Return whether this thread was woken, by the outcome or by a committer that hands over."""
        with self._committer.lock:
            self._waiting_threads -= 1
            woken = event.is_set()
            if not self._is_done:
                event.clear()
            return woken

    def take_over_locked(self) -> bool:
        """Wake a thread that waits for this future to commit the queue; False if none waits. Called with the queue
        lock."""
        if self._event is None or not self._waiting_threads:
            return False
        self._event.set()
        return True


class QueuedCommit(Protocol):
    """What one caller submits: all of it is committed, or none."""

    @property
    def frames(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes, for the limit of a batch."""

    @property
    def future(self) -> CommitFuture[Any] | None: ...
    def on_done(self, error: Error | None) -> None:
        """Apply the outcome and resolve the future."""


C = TypeVar("C", bound=QueuedCommit)


class CommitStore(Protocol[C]):
    """Where a batch is written, and what follows from it. Called with the commit lock held."""

    def commit_batch(self, batch: list[C], gathered_us: int) -> None:
        """Write and sync a batch, and pass the outcome to `GroupCommit.finish_batch`."""

    def publish(self, batch: list[C], error: Error | None) -> None:
        """Give every commit of a batch its outcome; None: it is as durable as its caller asked."""

    def fail(self, cause: BaseException) -> Error:
        """Stop, where the store must: the outcome of commits whose batch raised an exception that is no Error."""

    def in_doubt(self, timeout: float | None) -> InDoubt:
        """The error of a caller that stops waiting. Called without the commit lock."""


_NO_LIMIT: Final = 1 << 62


class GroupCommit(Generic[C]):
    """The queue of one store and the right to commit it. Thread-safe."""

    def __init__(
        self,
        store: CommitStore[C],
        *,
        batch_frames: int = _NO_LIMIT,
        batch_bytes: int = _NO_LIMIT,
        wake_writer: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self.wake_writer, self.in_doubt = store, wake_writer, store.in_doubt
        self._batch_frames, self._batch_bytes = batch_frames, batch_bytes
        self.lock = Lock()  # the queue lock
        self.queue: deque[C] = deque()
        self.commit_lock = Lock()
        self._waiting_changes = 0  # threads that wait in `exclusive`, or are inside

    @property
    def has_waiting_change(self) -> bool:
        """Whether a thread waits in `exclusive`, or is inside."""
        return self._waiting_changes > 0

    @property
    def is_idle(self) -> bool:
        """Whether no commit is queued, no thread has the commit lock and none waits for it to make a change."""
        # In this order: a committer takes the lock first, then the batch.
        return not self.queue and not self.commit_lock.locked() and not self._waiting_changes

    def submit(self, commit: C) -> None:
        with self.lock:
            self.queue.append(commit)

    def commit_pending(self, *, blocking: bool = True, timeout: float = -1, gathered_us: int = 0) -> bool:
        """Commit one batch from the queue. False if the queue was empty, or if another thread held the commit lock and
        `blocking` or `timeout` said not to wait longer; a caller that does not block also lets changes go first.
        `gathered_us`: for how long the caller let the batch grow."""
        with DEFER_SIGNALS:  # before the lock is taken: an interrupt after that would never release it
            if self._waiting_changes and not blocking:
                return False
            if not self.commit_lock.acquire(blocking, timeout):
                return False
            try:
                batch = self.take_batch()
                if batch:
                    self._store.commit_batch(batch, gathered_us)
                return bool(batch)
            finally:
                self.release()

    def commit_all(self) -> None:
        """Commit the queue, unless another thread does or a change waits. After each batch a thread that waits for a
        commit takes over. For stores without a writer thread."""
        try:
            while self.commit_pending(blocking=False) and self.queue and not self._hand_over():
                pass
        except BaseException:
            self._hand_over()
            raise

    def commit_for(self, _future: CommitFuture[Any], _timeout: float | None) -> None:
        """`Committer`, for futures of a store without a writer thread."""
        self.commit_all()

    def _hand_over(self) -> bool:
        with self.lock:
            return any(commit.future is not None and commit.future.take_over_locked() for commit in self.queue)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the commit lock for a change. Only the batch that is being committed comes before it."""
        with self.lock:
            self._waiting_changes += 1
        try:
            with self.commit_lock:
                yield
        finally:
            with self.lock:
                self._waiting_changes -= 1
            if self.queue:
                self.wake_writer()

    def release(self) -> None:
        """Release the commit lock, then check the queue: a thread that found the lock taken had submitted before, so
        its commit is seen here and the writer thread commits it."""
        self.commit_lock.release()
        if self.queue:
            self.wake_writer()

    # ── one batch, with the commit lock held ──────────────────────────────────────────────────

    def take_batch(self) -> list[C]:
        """Take the next batch from the queue: as many commits as the limits allow, and at least one."""
        frames = size = 0
        batch: list[C] = []
        with self.lock:
            while self.queue:
                commit = self.queue[0]
                frames, size = frames + commit.frames, size + commit.size
                if batch and (frames > self._batch_frames or size > self._batch_bytes):
                    break
                batch.append(self.queue.popleft())
        return batch

    def finish_batch(self, batch: list[C], outcome: BaseException | None) -> None:
        """Give a batch its outcome. One that is not an Error fails every commit and is raised afterwards."""
        if outcome is None or isinstance(outcome, Error):
            self._store.publish(batch, outcome)
        else:
            self.fail_all(batch, outcome)
            raise outcome

    def fail_all(self, batch: list[C], cause: BaseException) -> None:
        """Fail every commit without an outcome, even if their `on_done` raises."""
        error = self._store.fail(cause)
        error.__cause__ = cause
        for commit in (*batch, *self.drain()):
            with suppress(BaseException):
                commit.on_done(error)

    def drain(self) -> list[C]:
        """Take every commit from the queue."""
        with self.lock:
            commits = list(self.queue)
            self.queue.clear()
        return commits
