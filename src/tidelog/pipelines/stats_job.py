"""Statistics of a topic per interval: rates, sizes, and for a queue the waiting times of jobs; and their plot as SVG.

Records are read with the Spark source, steps of jobs from the history of the queue; `transforms` aggregates both.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidelog.addresses import Location
from tidelog.client.database import open_location
from tidelog.disk.durability import replace_file
from tidelog.disk.interface import Disk
from tidelog.errors import BadInput, NotAQueue
from tidelog.pipelines import transforms

_PLOT_WIDTH_PX, _PLOT_HEIGHT_PX, _LEFT_PX, _TOP_PX = 900, 160, 70, 34


class Series(NamedTuple):
    title: str
    unit: str
    values: Sequence[float]


def format_number(value: float) -> str:
    """`1.2k`, `340`, `0.05`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def render_svg(labels: Sequence[str], series: Sequence[Series], title: str) -> str:
    """Draw one panel per series over the same intervals."""
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
        caption = f"{escape(each.title)}, {escape(each.unit)}"
        parts.append(f'<text x="{_LEFT_PX}" y="{top - 5}" fill="#333">{caption}</text>')
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


def render_stats(stats: Stats) -> str:
    """Draw the statistics as SVG."""
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
