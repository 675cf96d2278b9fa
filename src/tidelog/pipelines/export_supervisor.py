"""Exports of many topics in one process. One that fails does not stop the others.

    waiting ──► running ──► waiting            a round made a commit, or found nothing
       ▲           │  └───► done               once: the table has what the topic had at the start
       │           ▼
       └──── failed, with a pause              1 s, doubled up to 5 minutes, until a round succeeds

A round is one commit of one topic (`ExportJob.run_round`), in a thread; Spark runs jobs of several threads together.
A failed export is closed and opened again after its pause. Once, an error that a retry may fix is tried three times and
every other one ends the export of its topic; continuously, all are tried again, for a person may have fixed them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from tidelog.clock import Clock
from tidelog.errors import Error, Locked, Unavailable
from tidelog.pipelines.export_job import ExportJob, ExportRound, ShouldStop

logger = logging.getLogger("tidelog.pipelines")
State: TypeAlias = Literal["done", "stopped", "failed"]
_FIRST_PAUSE_MS: Final = 1_000
_MAX_PAUSE_MS: Final = 300_000
ONCE_ATTEMPTS: Final = 3
_ROUND_WAIT_S: Final = 0.2
_LOOK_MS: Final = 5_000  # idle topics are looked at so often while another one is exported
_SEQ_MAX: Final = (1 << 63) - 1


class TopicExport(NamedTuple):
    """The result of one topic."""

    topic: str
    table: str
    state: State
    rows: int  # of this run
    commits: int
    next_seq: int | None  # where the next export begins; None: it was never opened
    failures: int
    error: str | None  # the last one, if it was not followed by a successful round


@dataclass
class _Entry:
    topic: str
    table: str
    stack: ExitStack = field(default_factory=ExitStack)
    job: ExportJob | None = None
    end: int | None = None  # once: the end of the topic in the first round
    rows: int = 0  # of jobs that are closed
    commits: int = 0
    next_seq: int | None = None
    failures: int = 0
    failures_in_a_row: int = 0
    error: str | None = None
    retry_ms: int = 0
    is_idle: bool = False  # the last round found nothing; it is looked at again after the pause
    is_finished: bool = False

    def counts(self) -> tuple[int, int]:
        """Return rows and commits of this run, with those of a round that failed after its commit."""
        rows, commits = (0, 0) if self.job is None else self.job.count_exported()
        return self.rows + rows, self.commits + commits

    def close(self) -> None:
        self.rows, self.commits = self.counts()
        self.job = None
        self.stack.close()


OpenExport: TypeAlias = Callable[[str, str], AbstractContextManager[ExportJob]]  # topic, table


class ExportSupervisor:
    def __init__(
        self,
        find_topics: Callable[[], Sequence[str]],
        table_of: Callable[[str], str],
        open_export: OpenExport,
        clock: Clock,
        *,
        parallel: int = 4,
    ) -> None:
        self._find_topics, self._table_of, self._open_export = find_topics, table_of, open_export
        self._clock, self._parallel = clock, parallel
        self._entries: dict[str, _Entry] = {}

    def run(self, pause: ShouldStop, *, once: bool) -> list[TopicExport]:
        """Run until every topic is done, or until `pause` returns true. It is called where there is nothing to do, and
        waits there."""
        running: dict[Future[ExportRound], _Entry] = {}
        is_stopping, looked_ms = False, self._clock.monotonic_ms()
        self._look_for_topics()
        with ThreadPoolExecutor(self._parallel, "tidelog-export") as pool:
            while True:
                for entry in () if is_stopping else self._due(running):
                    running[pool.submit(self._run_round, entry, once)] = entry
                finished = wait(running, _ROUND_WAIT_S, FIRST_COMPLETED).done if running else set()
                for future in finished:
                    self._collect(running.pop(future), future, once=once)
                if finished or (is_stopping and running):
                    continue
                if is_stopping or (once and all(entry.is_finished for entry in self._entries.values())):
                    break
                is_stopping = pause(not running)
                if not running or self._clock.monotonic_ms() - looked_ms >= _LOOK_MS:
                    looked_ms = self._clock.monotonic_ms()
                    self._end_pause(once=once)
        for entry in self._entries.values():
            entry.close()
        return [self._result(entry) for entry in self._entries.values()]

    def _look_for_topics(self) -> None:
        for topic in self._find_topics():
            if topic not in self._entries:
                self._entries[topic] = _Entry(topic, self._table_of(topic))

    def _due(self, running: dict[Future[ExportRound], _Entry]) -> list[_Entry]:
        busy, now_ms = {entry.topic for entry in running.values()}, self._clock.monotonic_ms()
        return [
            entry
            for entry in self._entries.values()
            if entry.topic not in busy and not entry.is_idle and not entry.is_finished and entry.retry_ms <= now_ms
        ][: self._parallel - len(running)]

    def _end_pause(self, *, once: bool) -> None:
        for entry in self._entries.values():
            entry.is_idle = False
        if not once:
            try:
                self._look_for_topics()
            except Error as error:  # the server is away: known topics go on, and say so
                logger.warning("topics cannot be listed (%s); they are listed again", error)

    def _run_round(self, entry: _Entry, once: bool) -> ExportRound:
        """Runs in a thread."""
        if entry.job is None:
            entry.job = entry.stack.enter_context(self._open_export(entry.topic, entry.table))
        return entry.job.run_round(once=once, until=_SEQ_MAX if entry.end is None else entry.end)

    def _collect(self, entry: _Entry, future: Future[ExportRound], *, once: bool) -> None:
        try:
            done = future.result()
        except (Error, OSError, PySparkException, Py4JError) as error:
            self._fail(entry, error, once=once)
            return
        entry.failures_in_a_row, entry.error = 0, None
        entry.next_seq = done.next_seq
        entry.is_idle = done.commit is None
        if once:
            entry.end = done.head if entry.end is None else entry.end
            if done.commit is None or done.commit.stop >= entry.end:
                entry.is_finished = True
                entry.close()

    def _fail(self, entry: _Entry, error: Exception, *, once: bool) -> None:
        try:
            entry.close()
        except Error as closing:
            logger.warning("the export of %s did not close: %s", entry.topic, closing)
        entry.failures, entry.failures_in_a_row = entry.failures + 1, entry.failures_in_a_row + 1
        entry.error = f"{type(error).__name__}: {error}"
        may_pass = isinstance(error, (Unavailable, Locked, OSError)) or not isinstance(error, Error)
        if once and (not may_pass or entry.failures_in_a_row >= ONCE_ATTEMPTS):
            entry.is_finished = True
            logger.error("the export of %s into %s failed: %s", entry.topic, entry.table, entry.error)
            return
        pause_ms = min(_FIRST_PAUSE_MS << min(entry.failures_in_a_row - 1, 20), _MAX_PAUSE_MS)
        entry.retry_ms = self._clock.monotonic_ms() + pause_ms
        logger.warning(
            "the export of %s into %s failed and starts again in %d s: %s",
            entry.topic,
            entry.table,
            pause_ms // 1000,
            entry.error,
        )

    def _result(self, entry: _Entry) -> TopicExport:
        state: State = "failed" if entry.error is not None else "done" if entry.is_finished else "stopped"
        return TopicExport(
            entry.topic, entry.table, state, *entry.counts(), entry.next_seq, entry.failures, entry.error
        )
