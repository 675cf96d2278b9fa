"""Plots: bars of characters for a terminal, and SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.disk.durability import replace_file
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput

if TYPE_CHECKING:
    from tidelog.pipelines import Stats

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_PLOT_WIDTH_PX, _PLOT_HEIGHT_PX, _LEFT_PX, _TOP_PX = 900, 160, 70, 34


def render_bar(value: float, max_value: float, width: int) -> str:
    """Draw a bar in eighths of a character; every value above 0 has at least one."""
    if max_value <= 0 or value <= 0:
        return ""
    eighths = max(round(value / max_value * width * 8), 1)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


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


def check_svg_path(path: str) -> None:
    """Raise unless a path names an SVG."""
    if not path.endswith(".svg"):
        raise BadInput(f"{path}: a plot is an SVG; nothing was done, give a name that ends in .svg")


def save_svg(path: str, svg: str) -> None:
    """Write an SVG, in place of a file that exists."""
    replace_file(PosixDisk(), path, svg.encode())


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
