"""Statistics of a topic per interval: rates, sizes, and for a queue the waiting times of jobs.

Records are read with the Spark source, steps of jobs from the history of the queue; `transforms` aggregates both.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidelog.addresses import Location
from tidelog.client.database import open_location
from tidelog.errors import BadInput, NotAQueue
from tidelog.pipelines import transforms

_HISTORY_DDL: Final = "ts_ms timestamp, event string, waited_ms bigint"


class Stats(NamedTuple):
    topic: str
    every_ms: int
    rates: list[dict[str, Any]]  # by interval; see `transforms.rates`
    waits: list[dict[str, Any]]  # of a queue; see `transforms.waits`


def collect_stats(spark: SparkSession, location: Location, topic: str, every_ms: int) -> Stats:
    if every_ms < 1:
        raise BadInput(f"an interval of {every_ms} ms is no interval; nothing was read")
    options = {**location.as_options(), "subscribe": topic, "columns": "ts,data", "onGap": "skip"}
    df = spark.read.format("tidelog").options(**options).load()
    rates = [_format_times(row.asDict()) for row in transforms.rates(df, every_ms).collect()]
    steps = _queue_history(spark, location, topic)
    waits = (
        [] if steps is None else [_format_times(row.asDict()) for row in transforms.waits(steps, every_ms).collect()]
    )
    return Stats(topic, every_ms, rates, waits)


def _format_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _iso(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _iso(moment: datetime) -> str:
    """Format a time of Spark, which has the time zone of this process and no tzinfo."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _queue_history(spark: SparkSession, location: Location, topic: str) -> DataFrame | None:
    """Return the events of the jobs of a queue; None for a log."""
    try:
        with open_location(location, read_only=True) as database:
            queue = database.queue(topic, create=False)
            queue.counts()  # raises for a log on a server
            table = queue.history().to_arrow().select(["ts_ms", "event", "waited_ms"])
    except NotAQueue:
        return None
    times = table.column("ts_ms").cast(pa.timestamp("us", tz="UTC"))
    return spark.createDataFrame(table.set_column(0, "ts_ms", times), _HISTORY_DDL)
