"""Counts of streaming queries that read topics, from the progress that Spark reports for each batch.

    latestOffset of a source    {"orders": {…, "lag_records", "lag_ms", "freshness_ms"}, "_tidelog": {"batch": {…}}}
                                 └ per topic (`source.TopicStreamReader.reportLatestOffset`) └ what became of the seqs

`QueryLog` is the listener that `register` adds. It logs one line a batch to `tidelog.spark.queries`: INFO, or WARNING
where retention removed records before they were read, and ERROR where the counts do not add up. It keeps the sums until
the program ends.

A client of Spark Connect gets no listener: its thread would keep a program alive that does not stop its session. There
the counts are those of the running queries, from the progress that Spark keeps of each (its last 100 batches).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any, Final, NamedTuple
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

from tidelog.spark.groups import REPORT_KEY
from tidelog.spark.spark_session import is_connect

_QUERIES_MAX: Final = 1000  # that are kept; the oldest are forgotten first
_LOST: Final = ("evicted", "expired")
_FATES: Final = ("rows", "deleted", *_LOST, "holes", "filtered")
_log = logging.getLogger("tidelog.spark.queries")


class QueryCounts(NamedTuple):
    """What a streaming query has read, and how large its lag is. `seqs` is the sum of `rows` to `filtered`.

    `rows`: at most, where `unknown` is not 0: deletions that only the tasks know.
    """

    name: str | None
    query_id: str
    run_id: str
    is_active: bool
    batches: int = 0
    seqs: int = 0
    rows: int = 0
    deleted: int = 0
    evicted: int = 0  # by a cap, before they were read
    expired: int = 0  # by age, before they were read
    holes: int = 0
    filtered: int = 0
    unknown: int = 0
    lag_records: int = 0  # of all topics, after the newest batch
    lag_ms: int = 0  # age of the oldest record that the newest batch left
    freshness_ms: int | None = None  # age of the newest record of the newest batch, when it was planned


class QueryLog(StreamingQueryListener):
    """Logs and counts the batches of all queries of a session that read topics."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, QueryCounts] = OrderedDict()
        self._lock = Lock()

    def counts(self) -> list[QueryCounts]:
        with self._lock:
            return list(self._counts.values())

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """No effect: the first batch says whether the query reads topics."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        reports = [each.latestOffset for each in progress.sources]
        run_id = str(progress.runId)
        with self._lock:
            before = self._counts.get(run_id) or QueryCounts(progress.name, str(progress.id), run_id, True)
            after = add_batch(before, reports)
            if after is None:
                return
            self._counts[run_id] = after
            while len(self._counts) > _QUERIES_MAX:
                self._counts.popitem(last=False)
        if after.seqs != before.seqs:
            _log_batch(progress.batchId, before, after)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """No effect: an idle query reads nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        with self._lock:
            known = self._counts.get(str(event.runId))
            if known is not None:
                self._counts[known.run_id] = known._replace(is_active=False)


def add_batch(before: QueryCounts, reports: Iterable[str | None]) -> QueryCounts | None:
    """Add one batch, as its sources report it; None if no source of the query reads topics."""
    sums = dict.fromkeys((*_FATES, "seqs", "unknown"), 0)
    found, lag, lag_ms = False, 0, 0
    ages: list[int] = []
    for text in reports:
        report = _decode_report(text)
        if report is None:
            continue
        found = True
        batch = report.pop(REPORT_KEY).get("batch", {})
        for name in sums:
            sums[name] += batch.get(name, 0)
        for topic in report.values():
            lag += topic.get("lag_records", 0)
            lag_ms = max(lag_ms, topic.get("lag_ms", 0))
            if "freshness_ms" in topic:
                ages.append(topic["freshness_ms"])
    if not found:
        return None
    added = {name: getattr(before, name) + number for name, number in sums.items()}
    freshness = max(ages) if ages else before.freshness_ms
    batches = before.batches + (sums["seqs"] > 0)
    return before._replace(**added, batches=batches, lag_records=lag, lag_ms=lag_ms, freshness_ms=freshness)


def _decode_report(text: str | None) -> dict[str, Any] | None:
    """Decode the latest offset of a source; None if it is not one of ours."""
    if not text or REPORT_KEY not in text:
        return None
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get(REPORT_KEY), dict) else None


def _log_batch(number: int, before: QueryCounts, after: QueryCounts) -> None:
    made = {name: getattr(after, name) - getattr(before, name) for name in (*_FATES, "seqs", "unknown")}
    said = ", ".join(f"{name} {made[name]:,}" for name in (*_FATES, "unknown") if made[name] or name == "rows")
    query = after.name or after.query_id
    age = "unknown" if after.freshness_ms is None else f"{after.freshness_ms / 1000:.1f} s"
    state = f"lag {after.lag_records:,} records, {after.lag_ms / 1000:.1f} s; newest record {age} old"
    if sum(made[name] for name in _FATES) != made["seqs"]:
        _log.error("query %s, batch %d: %d seqs are not the sum of %s; %s", query, number, made["seqs"], said, state)
    elif any(made[name] for name in _LOST):
        _log.warning("query %s, batch %d: records were lost before they were read: %s; %s", query, number, said, state)
    else:
        _log.info("query %s, batch %d: %s; %s", query, number, said, state)


_logs: WeakKeyDictionary[SparkSession, QueryLog] = WeakKeyDictionary()


def add_query_log(spark: SparkSession) -> None:
    """Add the listener to a session. A second call has no effect, and neither has a call on Spark Connect."""
    if is_connect(spark) or spark in _logs:
        return
    _logs[spark] = listener = QueryLog()
    spark.streams.addListener(listener)


def count_queries(spark: SparkSession) -> list[QueryCounts]:
    """Return the counts of the queries of a session, in the order of their first batches."""
    known = _logs.get(spark)
    if known is not None:
        return known.counts()
    found = []
    for query in spark.streams.active:
        counts: QueryCounts | None = None
        for progress in query.recentProgress:
            start = counts or QueryCounts(query.name, str(query.id), str(query.runId), True)
            counts = add_batch(start, [each.latestOffset for each in progress.sources]) or counts
        if counts is not None:
            found.append(counts)
    return found
