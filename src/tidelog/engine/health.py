"""Health of an engine: failures of background tasks, and stored bytes that do not verify.

    task        checkpoint, compaction, sync, ledger, history, routers, expiry, erase, rewrite: each run is counted,
                each failure is logged, counted and kept until the task succeeds again
    corruption  one entry per place: a frame, an index or a footer that did not verify, found by a read, by a
                checkpoint or at the start

Both are shown by `Engine.health`, `/v0/metrics`, `/v0/ready` and `tidelog doctor`. A failing task is logged at its
first failure, when its error changes, and then once a minute: a task that runs 20 times a second must not fill a log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Final, NamedTuple

from tidelog.errors import StoreUnavailable

_log = logging.getLogger("tidelog.engine")
BACKGROUND_TASKS: Final = (  # of every engine
    *("checkpoint", "compaction", "erase", "expiry", "history", "ledger", "rewrite", "routers", "sync"),
)
_REPEAT_LOG_MS: Final = 60_000
_PLACES_MAX: Final = 1_000  # corrupt places that are kept; the count goes on


class TaskState(NamedTuple):
    """One kind of background work since the directory was opened."""

    name: str
    runs: int
    failures: int
    failing: int  # failures since the last success; 0: the last run succeeded
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

    def succeeded(self, task: str) -> None:
        with self._guard:
            state = self._tasks.setdefault(task, _Task())
            state.runs, state.ok_ms = state.runs + 1, self._now_ms()
            recovered, state.failing = state.failing, 0
        if recovered:
            _log.info("%s: %s works again after %d failures", self._root, task, recovered)

    def is_failing(self, task: str) -> bool:
        """Whether the last run failed."""
        state = self._tasks.get(task)
        return state is not None and state.failing > 0

    def recovered(self, task: str) -> None:
        """`succeeded` for a task that runs too often to be counted: does nothing unless its last run failed."""
        state = self._tasks.get(task)
        if state is not None and state.failing:
            self.succeeded(task)

    def failed(self, task: str, error: BaseException) -> None:
        """Count and log a failed run; the task is retried when it is next due."""
        now_ms, text = self._now_ms(), describe_error(error)
        with self._guard:
            state = self._tasks.setdefault(task, _Task())
            state.runs, state.failures, state.failing = state.runs + 1, state.failures + 1, state.failing + 1
            is_repeated = state.error == text and state.failing > 1 and state.logged_ms is not None
            is_silent = is_repeated and now_ms - (state.logged_ms or 0) < _REPEAT_LOG_MS
            state.error, state.error_ms = text, now_ms
            count = state.failing
            if not is_silent:
                state.logged_ms = now_ms
        if not is_silent:
            # A store that is away is no bug: where the error was raised says nothing.
            trace = None if isinstance(error, StoreUnavailable) else error
            _log.error("%s: %s failed (%d in a row): %s", self._root, task, count, text, exc_info=trace)

    # ── stored bytes ──────────────────────────────────────────────────────────────────────────

    def report_corruption(self, topic: str, topic_id: int, where: str, reason: str) -> None:
        """Record bytes that do not verify. Each place counts once."""
        with self._guard:
            if (topic_id, where) in self._corrupt:
                return
            self.corruptions += 1
            if len(self._corrupt) < _PLACES_MAX:
                self._corrupt[topic_id, where] = Corruption(topic, topic_id, where, reason, self._now_ms())
        _log.error("%s: corrupt data in topic %s, %s: %s", self._root, topic, where, reason)

    def forget_topic(self, topic_id: int) -> None:
        """Forget the corruption of a dropped topic."""
        with self._guard:
            for key in [key for key in self._corrupt if key[0] == topic_id]:
                del self._corrupt[key]

    # ── queries ───────────────────────────────────────────────────────────────────────────────

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
    """Return an error as one line, with its type unless it is one of Tidelog's."""
    text = str(error).partition("\n")[0]
    return text if type(error).__module__.startswith("tidelog") and text else f"{type(error).__name__}: {text}"
