"""[shell] What happened in a topic, interval by interval: rates, sizes, and of a queue how long jobs waited.

Records are read with the source, steps of jobs from the queue's history; what is made of them is in `transforms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidelog import engine as topics
from tidelog.client import Client, RemoteQueue
from tidelog.disk.atomic import replace
from tidelog.disk.seam import Disk
from tidelog.engine.queues.history import SCHEMA
from tidelog.errors import BadInput, NotAQueue
from tidelog.pipelines import plot, transforms
from tidelog.pipelines.plot import Series

_PAGE: Final = 10_000
_STEPS: Final = "ts_ms timestamp, event string, waited_ms bigint"


class Stats(NamedTuple):
    topic: str
    every_ms: int
    rates: list[dict[str, Any]]  # by interval; see `transforms.rates`
    waits: list[dict[str, Any]]  # of a queue; see `transforms.waits`


def gathered(spark: SparkSession, where: dict[str, str], topic: str, every_ms: int) -> Stats:
    if every_ms < 1:
        raise BadInput(f"an interval of {every_ms} ms is no interval; nothing was read")
    options = {**where, "subscribe": topic, "columns": "ts,data", "onGap": "skip"}
    df = spark.read.format("tidelog").options(**options).load()
    rates = [_plain(row.asDict()) for row in transforms.rates(df, every_ms).collect()]
    steps = _history(spark, where, topic)
    waits = [] if steps is None else [_plain(row.asDict()) for row in transforms.waits(steps, every_ms).collect()]
    return Stats(topic, every_ms, rates, waits)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _iso(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _iso(moment: datetime) -> str:
    """Spark hands times over in the zone of this process and without saying so."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _history(spark: SparkSession, where: dict[str, str], topic: str) -> DataFrame | None:
    """What happened to the jobs of a queue; None where it is a log."""
    try:
        found = _of_server(where, topic) if "server" in where else _of_path(where["path"], topic)
    except NotAQueue:
        return None
    table = found.select(["ts_ms", "event", "waited_ms"])
    times = table.column("ts_ms").cast(pa.timestamp("us", tz="UTC"))
    return spark.createDataFrame(table.set_column(0, "ts_ms", times), _STEPS)


def _of_path(path: str, topic: str) -> pa.Table:
    with topics.open(path, read_only=True) as engine:
        return engine.topic(topic, create=False).queue().history().to_arrow()


def _of_server(where: dict[str, str], topic: str) -> pa.Table:
    with Client(where["server"], key=where.get("key")) as client:
        queue = RemoteQueue(client, topic)
        if queue.state()["config"].get("type") != "queue":
            raise NotAQueue(topic)
        return pa.Table.from_pylist(list(_pages(queue)), schema=SCHEMA)


def _pages(queue: RemoteQueue) -> Iterator[dict[str, Any]]:
    at = 0
    while True:
        page: list[dict[str, Any]] = queue.history(at, _PAGE)["events"]
        if not page:
            return
        for event in page:
            yield {**event, "ts_ms": datetime.fromtimestamp(event["ts_ms"] / 1000, UTC)}
        at = page[-1]["at"]


def drawn(stats: Stats) -> str:
    """All of it as an SVG."""
    labels = [row["from"] for row in stats.rates]
    series = [
        Series("records", "per second", [row["records_s"] for row in stats.rates]),
        Series("data", "bytes per second", [row["bytes_s"] for row in stats.rates]),
    ]
    if stats.waits:
        known = {row["from"]: row["wait_ms_p99"] or 0 for row in stats.waits}
        labels = sorted({*labels, *known})
        rates = {row["from"]: row for row in stats.rates}
        series = [
            Series("records", "per second", [rates[at]["records_s"] if at in rates else 0 for at in labels]),
            Series("data", "bytes per second", [rates[at]["bytes_s"] if at in rates else 0 for at in labels]),
            Series("wait of a job, 99 of 100 waited less", "ms", [known.get(at, 0) for at in labels]),
        ]
    return plot.svg(labels, series, f"{stats.topic}, every {stats.every_ms / 1000:g} s")


def save(stats: Stats, disk: Disk, path: str) -> None:
    if not path.endswith(".svg"):
        raise BadInput(f"{path}: a plot is an SVG; nothing was written, give a name that ends in .svg")
    replace(disk, path, drawn(stats).encode())
