"""Health of an engine: what background work failed at, and which stored bytes do not verify.

    task        checkpoint, sync, ledger, history, routers, expiry, erase: each run is counted, each failure logged,
                counted and kept until the task succeeds again
    corruption  one entry a place: a frame, an index or a footer that did not verify, found by a read, by a
                checkpoint or at the start

Both are shown by `Engine.health`, `/v0/metrics`, `/v0/ready` and `tidelog doctor`. A failing task is logged at its
first failure, when its error changes, and then once a minute: a task that runs 20 times a second must not fill a log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final, NamedTuple

_log = logging.getLogger("tidelog.engine")
BACKGROUND_TASKS: Final = ("checkpoint", "erase", "expiry", "history", "ledger", "routers", "sync")  # of every engine
_REPEAT_LOG_MS: Final = 60_000
_PLACES_MAX: Final = 1_000  # corrupt places that are kept; the count goes on


class TaskState(NamedTuple):
    """One kind of background work since the directory was opened."""

    name: str
    runs: int
    failures: int
    failing: int  # failures since the last success; 0: the last run was good
    last_ok_ms: int | None
    last_error: str | None  # of the last failure, kept after a success
    last_error_ms: int | None


class Corruption(NamedTuple):
    """Stored bytes that do not verify. Reads of what they hold raise Corrupt; everything else is served."""

    topic: str
    topic_id: int
    where: str  # the file, and the byte where it is known
    reason: str
    seen_ms: int


class HealthState(NamedTuple):
    """An engine's background work and stored bytes at one moment."""

    ok: bool  # no task fails, nothing is corrupt, no topic is left out of checkpoints
    tasks: tuple[TaskState, ...]
    checkpoint_age_ms: int  # since the last checkpoint that was complete, or since the start
    uncovered_bytes: int  # written to the WAL since then
    lagging: tuple[str, ...]  # topics that the last checkpoint could not write; the WAL still has their records
    corruptions: int  # places that did not verify since the directory was opened
    corrupt: tuple[Corruption, ...]


class _Task:
    __slots__ = ("error", "error_ms", "failing", "failures", "logged_ms", "ok_ms", "runs")

    def __init__(self) -> None:
        self.runs = self.failures = self.failing = 0
        self.ok_ms: int | None = None
        self.error: str | None = None
        self.error_ms: int | None = None
        self.logged_ms: int | None = None


class HealthMonitor:
    """Safe to call from any thread, also with a topic's lock held."""

    def __init__(self, root: str, now_ms: Callable[[], int], tasks: Iterable[str] = ()) -> None:
        """`tasks` are shown from the start, also before their first run."""
        self._root, self._now_ms = root, now_ms
        self._guard = Lock()
        self._tasks: dict[str, _Task] = {task: _Task() for task in tasks}
        self._corrupt: dict[tuple[int, str], Corruption] = {}
        self.corruptions = 0

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def watch(self, task: str) -> Iterator[None]:
        """Count a run of a background task. An exception is logged and counted, and ends here."""
        try:
            yield
        except Exception as error:
            self.failed(task, error)
        else:
            self.succeeded(task)

    def succeeded(self, task: str) -> None:
        with self._guard:
            found = self._tasks.setdefault(task, _Task())
            found.runs, found.ok_ms = found.runs + 1, self._now_ms()
            recovered, found.failing = found.failing, 0
        if recovered:
            _log.info("%s: %s works again after %d failures", self._root, task, recovered)

    def is_failing(self, task: str) -> bool:
        """Whether the last run failed."""
        found = self._tasks.get(task)
        return found is not None and found.failing > 0

    def recovered(self, task: str) -> None:
        """`succeeded` for what runs too often to be counted: free unless it failed the last time."""
        found = self._tasks.get(task)
        if found is not None and found.failing:
            self.succeeded(task)

    def failed(self, task: str, error: BaseException) -> None:
        """A run failed; it is tried again when it is next due."""
        now_ms, said = self._now_ms(), describe_error(error)
        with self._guard:
            found = self._tasks.setdefault(task, _Task())
            found.runs, found.failures, found.failing = found.runs + 1, found.failures + 1, found.failing + 1
            again = found.error == said and found.failing > 1 and found.logged_ms is not None
            quiet = again and now_ms - (found.logged_ms or 0) < _REPEAT_LOG_MS
            found.error, found.error_ms = said, now_ms
            count = found.failing
            if not quiet:
                found.logged_ms = now_ms
        if not quiet:
            _log.error("%s: %s failed (%d in a row): %s", self._root, task, count, said, exc_info=error)

    # ── stored bytes ──────────────────────────────────────────────────────────────────────────

    def report_corruption(self, topic: str, topic_id: int, where: str, reason: str) -> None:
        """These bytes do not verify. A place that is known already counts once."""
        with self._guard:
            if (topic_id, where) in self._corrupt:
                return
            self.corruptions += 1
            if len(self._corrupt) < _PLACES_MAX:
                self._corrupt[topic_id, where] = Corruption(topic, topic_id, where, reason, self._now_ms())
        _log.error("%s: corrupt data in topic %s, %s: %s", self._root, topic, where, reason)

    def forget_topic(self, topic_id: int) -> None:
        """The topic was dropped, and its bytes with it."""
        with self._guard:
            for key in [key for key in self._corrupt if key[0] == topic_id]:
                del self._corrupt[key]

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def tasks(self) -> tuple[TaskState, ...]:
        with self._guard:
            return tuple(
                TaskState(name, task.runs, task.failures, task.failing, task.ok_ms, task.error, task.error_ms)
                for name, task in sorted(self._tasks.items())
            )

    def corrupt_places(self) -> tuple[Corruption, ...]:
        with self._guard:
            return tuple(self._corrupt.values())


def describe_error(error: BaseException) -> str:
    """An error in one line, with its kind where the text does not tell."""
    said = str(error).partition("\n")[0]
    return said if type(error).__module__.startswith("tidelog") and said else f"{type(error).__name__}: {said}"
