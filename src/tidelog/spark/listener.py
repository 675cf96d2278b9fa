"""Move consumer groups from the progress of queries, in the driver's Python.

    event of Spark     what the listener does
    started            keep the query. Spark delivers this event before it plans the first batch
    progress           move the groups of a query with a trigger interval to its committed offsets
    terminated         move the groups of every query, then forget the query
    exit of Python     the same for queries whose last events Spark has not delivered yet

`committedOffsets` of a query has the ends of the batches that are in Spark's commit log, and Spark writes that log
after the sink has committed. So a group never passes a batch that is not written, at whatever moment a query ends. The
directory or server of a group, and its key, are options of the source in the query's plan. Both are read from objects
of the JVM through this process, and nothing is stored; the events name no options (docs/decisions/0046).

The source moves groups too, when Spark plans the next batch (`stream`). Without a trigger interval that is at once, and
progress is left to it: events arrive late, and by path a group is moved by a writer that locks the directory. So the
listener locks it after the end of a query only where the source could not move the group.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from tidelog.spark import backends, groups, offsets
from tidelog.spark import options as reading
from tidelog.spark.offsets import Positions
from tidelog.spark.options import Options

_SOURCE_NAME = "tidelog"
_PROCESSING_TIME_TRIGGER = "ProcessingTimeTrigger"
_STREAMING_RELATION = "StreamingDataSourceV2ScanRelation"
_log = logging.getLogger("tidelog.spark")
_listeners: WeakKeyDictionary[SparkSession, GroupListener] = WeakKeyDictionary()


def add_group_listener(spark: SparkSession) -> None:
    """Move the groups of a session's queries from their progress. A second call for a session changes nothing, and on
    Spark Connect there is nothing to listen with."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None or spark in _listeners:
        return
    made = GroupListener(spark._jsparkSession, jvm.java.lang.System.getProperty("user.dir"))
    spark.streams.addListener(made)
    _listeners[spark] = made


@atexit.register
def _commit_groups_at_exit() -> None:
    for each in list(_listeners.values()):
        each.commit_all_groups()


@dataclass
class _RunningQuery:
    """A query that runs, and where each of its groups was moved last, by source of the query."""

    execution: Any  # a StreamExecution of the JVM
    committed: dict[int, Positions] = field(default_factory=dict)

    @property
    def has_interval(self) -> bool:
        """Whether Spark lets time pass between a batch and the planning of the next one."""
        trigger = self.execution.trigger()
        return bool(trigger.getClass().getSimpleName() == _PROCESSING_TIME_TRIGGER and trigger.intervalMs() > 0)


class GroupListener(StreamingQueryListener):
    """Moves the groups of queries that read topics. An error is logged and never reaches the query."""

    def __init__(self, session: Any, directory: str) -> None:
        """`session` is the JVM's. `directory` is where the JVM runs: relative paths of a source start there."""
        self._session, self._directory = session, directory
        self._queries: dict[str, _RunningQuery] = {}
        self._lock = Lock()  # of events, and of the exit of Python

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        execution = self._session.streams().get(str(event.id)).streamingQuery()
        self._queries[str(event.runId)] = _RunningQuery(execution)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        followed = self._queries.get(str(event.progress.runId))
        if followed is not None and followed.has_interval:
            self._commit_groups(followed)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """A query that waits has committed nothing since its last progress."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        followed = self._queries.get(str(event.runId))
        if followed is not None:
            self._commit_groups(followed)
            del self._queries[str(event.runId)]

    def commit_all_groups(self) -> None:
        for followed in list(self._queries.values()):
            self._commit_groups(followed)

    def _commit_groups(self, query: _RunningQuery) -> None:
        """Move the groups of a query to what it has committed."""
        with self._lock:
            try:
                for source, (group, options, passed) in enumerate(_committed_sources(query.execution)):
                    if query.committed.get(source) != passed and self._commit_group(group, options, passed):
                        query.committed[source] = passed
            except Exception:
                _log.warning("the groups of a query stay where they are until its next batch", exc_info=True)

    def _commit_group(self, group: str, options: Options, positions: Positions) -> bool:
        if options.path is not None and not options.is_object_store:
            options = replace(options, path=str(PurePath(self._directory, options.path)))
        with closing(backends.open_backend(options, retry=False)) as place:
            return groups.group_store(place, "group", group).commit(group, positions)


def _committed_sources(execution: Any) -> Iterator[tuple[str, Options, Positions]]:
    """Sources of a query that have a group, each with the end of the last batch in Spark's commit log."""
    committed = execution.committedOffsets()
    if committed.isEmpty():
        return  # nothing was committed, and perhaps nothing planned: Spark asserts that its own thread plans
    leaves = execution.logicalPlan().collectLeaves()
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        if leaf.getClass().getSimpleName() != _STREAMING_RELATION or leaf.relation().table().name() != _SOURCE_NAME:
            continue
        found = committed.get(leaf.stream())
        options = reading.parse_options(dict(leaf.relation().options().asCaseSensitiveMap()))
        if options.group is not None and found.isDefined():
            yield options.group, options, offsets.decode_offsets(msgspec.json.decode(found.get().json()))
