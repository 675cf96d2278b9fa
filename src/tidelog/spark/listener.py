"""Move consumer groups to the committed offsets of queries, in the driver's Python process.

    event of Spark     action of the listener
    started            keep the query. Spark delivers this event before it plans the first batch
    progress           move the groups of a query with a trigger interval
    terminated         move the groups of the query and remove it
    exit of Python     move the groups of queries whose last events Spark has not delivered yet

`committedOffsets` of a query has the ends of the batches in Spark's commit log, which Spark writes after the sink has
committed. So a group never passes a batch that is not written. The location of a group and its key are options of the
source in the plan of the query. Both are read from objects of the JVM, because the events have no options
(docs/decisions/0046).

The source moves groups too, when Spark plans the next batch (`source`). Without a trigger interval that is at once, and
the listener ignores progress: events arrive late, and moving a group locks the directory. So after the end of a query
the listener locks it only if the source could not move the group.
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

from tidelog.addresses import Location
from tidelog.spark import backends, groups
from tidelog.spark import options as reading
from tidelog.spark.groups import Positions
from tidelog.spark.options import Options

_SOURCE_NAME = "tidelog"
_PROCESSING_TIME_TRIGGER = "ProcessingTimeTrigger"
_STREAMING_RELATION = "StreamingDataSourceV2ScanRelation"
_log = logging.getLogger("tidelog.spark")
_listeners: WeakKeyDictionary[SparkSession, GroupListener] = WeakKeyDictionary()


def add_group_listener(spark: SparkSession) -> None:
    """Add the listener to a session. A second call has no effect, and neither has a call on Spark Connect, which has no
    JVM objects."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None or spark in _listeners:
        return
    listener = GroupListener(spark._jsparkSession, jvm.java.lang.System.getProperty("user.dir"))
    spark.streams.addListener(listener)
    _listeners[spark] = listener


@atexit.register
def _commit_groups_at_exit() -> None:
    for listener in list(_listeners.values()):
        listener.commit_all_groups()


@dataclass
class _RunningQuery:
    """A running query, and the last committed positions of its groups, by source of the query."""

    execution: Any  # a StreamExecution of the JVM
    committed: dict[int, Positions] = field(default_factory=dict)

    @property
    def has_interval(self) -> bool:
        """Whether Spark waits between a batch and the planning of the next one."""
        trigger = self.execution.trigger()
        return bool(trigger.getClass().getSimpleName() == _PROCESSING_TIME_TRIGGER and trigger.intervalMs() > 0)


class GroupListener(StreamingQueryListener):
    """Moves the groups of queries that read topics. An error is logged and never reaches the query."""

    def __init__(self, session: Any, directory: str) -> None:
        """`session`: of the JVM. `directory`: the working directory of the JVM, for relative paths of sources."""
        self._session, self._directory = session, directory
        self._queries: dict[str, _RunningQuery] = {}
        self._lock = Lock()  # between events and the exit of Python

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        execution = self._session.streams().get(str(event.id)).streamingQuery()
        self._queries[str(event.runId)] = _RunningQuery(execution)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        followed = self._queries.get(str(event.progress.runId))
        if followed is not None and followed.has_interval:
            self._commit_groups(followed)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """No effect: an idle query has committed nothing since its last progress."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        followed = self._queries.get(str(event.runId))
        if followed is not None:
            self._commit_groups(followed)
            del self._queries[str(event.runId)]

    def commit_all_groups(self) -> None:
        for followed in list(self._queries.values()):
            self._commit_groups(followed)

    def _commit_groups(self, query: _RunningQuery) -> None:
        """Move the groups of a query to its committed offsets."""
        with self._lock:
            try:
                for source, (group, options, passed) in enumerate(_committed_sources(query.execution)):
                    if query.committed.get(source) != passed and self._commit_group(group, options, passed):
                        query.committed[source] = passed
            except Exception:
                _log.warning("the groups of a query stay where they are until its next batch", exc_info=True)

    def _commit_group(self, group: str, options: Options, positions: Positions) -> bool:
        location = options.location
        if not location.is_server and not location.is_object_store:
            options = replace(options, location=Location(str(PurePath(self._directory, location.address))))
        with closing(backends.open_backend(options, retry=False)) as backend:
            return groups.group_store(backend, "group", group).commit(group, positions)


def _committed_sources(execution: Any) -> Iterator[tuple[str, Options, Positions]]:
    """Yield the sources of a query with a group, each with the end of the last batch in Spark's commit log."""
    committed = execution.committedOffsets()
    if committed.isEmpty():
        return  # perhaps nothing is planned yet: Spark asserts that its own thread plans
    leaves = execution.logicalPlan().collectLeaves()
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        if leaf.getClass().getSimpleName() != _STREAMING_RELATION or leaf.relation().table().name() != _SOURCE_NAME:
            continue
        found = committed.get(leaf.stream())
        options = reading.parse_options(dict(leaf.relation().options().asCaseSensitiveMap()))
        if options.group is not None and found.isDefined():
            yield options.group, options, groups.decode_offsets(msgspec.json.decode(found.get().json()))
