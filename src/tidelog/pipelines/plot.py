"""[policy] A series of figures as bars: in a terminal, or as a drawing that any browser shows. Nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_WIDE, _HIGH, _LEFT, _TOP = 900, 160, 70, 34


class Series(NamedTuple):
    title: str
    unit: str
    values: Sequence[float]


def bar(value: float, most: float, width: int) -> str:
    """A bar to the eighth of a character; something is seen of everything that is not nothing."""
    if most <= 0 or value <= 0:
        return ""
    eighths = max(round(value / most * width * 8), 1)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def figure(value: float) -> str:
    """`1.2k`, `340`, `0.05`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def svg(labels: Sequence[str], series: Sequence[Series], title: str) -> str:
    """One panel for each series, the same intervals below each other."""
    high = _TOP + len(series) * (_HIGH + 50)
    step = _WIDE / max(len(labels), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE + 20} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for number, each in enumerate(series):
        top = _TOP + number * (_HIGH + 50) + 18
        most = max(each.values, default=0) or 1
        said = f"{escape(each.title)}, {escape(each.unit)}"
        parts.append(f'<text x="{_LEFT}" y="{top - 5}" fill="#333">{said}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end" fill="#666">{figure(most)}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + _HIGH}" text-anchor="end" fill="#666">0</text>')
        for at, value in enumerate(each.values):
            size = value / most * _HIGH
            x, y = _LEFT + at * step, top + _HIGH - size
            told = f"<title>{escape(labels[at])}: {figure(value)} {escape(each.unit)}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(step - 1, 0.5):.1f}" height="{size:.1f}" '
                f'fill="#2f6f9f">{told}</rect>'
            )
        base = top + _HIGH
        parts.append(f'<line x1="{_LEFT}" y1="{base}" x2="{_LEFT + _WIDE}" y2="{base}" stroke="#999"/>')
    if labels:
        foot = high - 8
        parts.append(f'<text x="{_LEFT}" y="{foot}" fill="#666">{escape(labels[0])}</text>')
        parts.append(f'<text x="{_LEFT + _WIDE}" y="{foot}" text-anchor="end" fill="#666">{escape(labels[-1])}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
