"""What happened in a topic, interval by interval: rates, sizes, and of a queue how long jobs waited.

Records are read with the source, steps of jobs from the queue's history; what is made of them is in `transforms`.

A series of numbers as bars: in a terminal, or as a drawing that any browser shows. Nothing to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidelog import database
from tidelog.client import Client, RemoteQueue
from tidelog.disk.durability import replace_file
from tidelog.disk.interface import Disk
from tidelog.engine.queues.history import HISTORY_SCHEMA
from tidelog.errors import BadInput, NotAQueue
from tidelog.pipelines import transforms

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_PLOT_WIDTH_PX, _PLOT_HEIGHT_PX, _LEFT_PX, _TOP_PX = 900, 160, 70, 34


class Series(NamedTuple):
    title: str
    unit: str
    values: Sequence[float]


def render_bar(value: float, max_value: float, width: int) -> str:
    """A bar to the eighth of a character; something is seen of everything that is not nothing."""
    if max_value <= 0 or value <= 0:
        return ""
    eighths = max(round(value / max_value * width * 8), 1)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def format_number(value: float) -> str:
    """`1.2k`, `340`, `0.05`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def render_svg(labels: Sequence[str], series: Sequence[Series], title: str) -> str:
    """One panel for each series, the same intervals below each other."""
    high = _TOP_PX + len(series) * (_PLOT_HEIGHT_PX + 50)
    step = _PLOT_WIDTH_PX / max(len(labels), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT_PX + _PLOT_WIDTH_PX + 20} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{_LEFT_PX}" y="20" '
        f'font-size="15">{escape(title)}</text>',
    ]
    for number, each in enumerate(series):
        top = _TOP_PX + number * (_PLOT_HEIGHT_PX + 50) + 18
        most = max(each.values, default=0) or 1
        said = f"{escape(each.title)}, {escape(each.unit)}"
        parts.append(f'<text x="{_LEFT_PX}" y="{top - 5}" fill="#333">{said}</text>')
        parts.append(
            f'<text x="{_LEFT_PX - 6}" y="{top + 10}" text-anchor="end" fill="#666">{format_number(most)}</text>'
        )
        parts.append(f'<text x="{_LEFT_PX - 6}" y="{top + _PLOT_HEIGHT_PX}" text-anchor="end" fill="#666">0</text>')
        for at, value in enumerate(each.values):
            size = value / most * _PLOT_HEIGHT_PX
            x, y = _LEFT_PX + at * step, top + _PLOT_HEIGHT_PX - size
            title = f"<title>{escape(labels[at])}: {format_number(value)} {escape(each.unit)}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(step - 1, 0.5):.1f}" height="{size:.1f}" '
                f'fill="#2f6f9f">{title}</rect>'
            )
        base = top + _PLOT_HEIGHT_PX
        parts.append(f'<line x1="{_LEFT_PX}" y1="{base}" x2="{_LEFT_PX + _PLOT_WIDTH_PX}" y2="{base}" stroke="#999"/>')
    if labels:
        foot = high - 8
        parts.append(f'<text x="{_LEFT_PX}" y="{foot}" fill="#666">{escape(labels[0])}</text>')
        parts.append(
            f'<text x="{_LEFT_PX + _PLOT_WIDTH_PX}" y="{foot}" text-anchor="end" '
            f'fill="#666">{escape(labels[-1])}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


_PAGE_SIZE: Final = 10_000
_HISTORY_DDL: Final = "ts_ms timestamp, event string, waited_ms bigint"


class Stats(NamedTuple):
    topic: str
    every_ms: int
    rates: list[dict[str, Any]]  # by interval; see `transforms.rates`
    waits: list[dict[str, Any]]  # of a queue; see `transforms.waits`


def collect_stats(spark: SparkSession, where: dict[str, str], topic: str, every_ms: int) -> Stats:
    if every_ms < 1:
        raise BadInput(f"an interval of {every_ms} ms is no interval; nothing was read")
    options = {**where, "subscribe": topic, "columns": "ts,data", "onGap": "skip"}
    df = spark.read.format("tidelog").options(**options).load()
    rates = [_format_times(row.asDict()) for row in transforms.rates(df, every_ms).collect()]
    steps = _queue_history(spark, where, topic)
    waits = (
        [] if steps is None else [_format_times(row.asDict()) for row in transforms.waits(steps, every_ms).collect()]
    )
    return Stats(topic, every_ms, rates, waits)


def _format_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _iso(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _iso(moment: datetime) -> str:
    """Spark hands times over in the zone of this process and without saying so."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _queue_history(spark: SparkSession, where: dict[str, str], topic: str) -> DataFrame | None:
    """What happened to the jobs of a queue; None where it is a log."""
    try:
        found = _server_history(where, topic) if "server" in where else _directory_history(where["path"], topic)
    except NotAQueue:
        return None
    table = found.select(["ts_ms", "event", "waited_ms"])
    times = table.column("ts_ms").cast(pa.timestamp("us", tz="UTC"))
    return spark.createDataFrame(table.set_column(0, "ts_ms", times), _HISTORY_DDL)


def _directory_history(path: str, topic: str) -> pa.Table:
    with database.open(path, read_only=True) as engine:
        return engine.topic(topic, create=False).queue().history().to_arrow()


def _server_history(where: dict[str, str], topic: str) -> pa.Table:
    with Client(where["server"], key=where.get("key")) as client:
        queue = RemoteQueue(client, topic)
        if queue.state()["config"].get("type") != "queue":
            raise NotAQueue(topic)
        return pa.Table.from_pylist(list(_history_events(queue)), schema=HISTORY_SCHEMA)


def _history_events(queue: RemoteQueue) -> Iterator[dict[str, Any]]:
    at = 0
    while True:
        page: list[dict[str, Any]] = queue.history(at, _PAGE_SIZE)["events"]
        if not page:
            return
        for event in page:
            yield {**event, "ts_ms": datetime.fromtimestamp(event["ts_ms"] / 1000, UTC)}
        at = page[-1]["at"]


def render_stats(stats: Stats) -> str:
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
    return render_svg(labels, series, f"{stats.topic}, every {stats.every_ms / 1000:g} s")


def save_plot(stats: Stats, disk: Disk, path: str) -> None:
    if not path.endswith(".svg"):
        raise BadInput(f"{path}: a plot is an SVG; nothing was written, give a name that ends in .svg")
    replace_file(disk, path, render_stats(stats).encode())
