"""Lines over a logarithmic axis as an SVG file, written by hand: no dependency for one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import NamedTuple

_WIDTH, _HEIGHT = 380, 240  # of a panel, axes included
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 14, 30, 58
_COLOURS = ("#2f6fb0", "#c2571a", "#3a8f4d", "#8a5bb0", "#b03a5b", "#8a7a1a")  # so many lines have room
_LEGEND_ROW = 14
_GREY = "#7a7a7a"  # reads on white and on black


class Panel(NamedTuple):
    title: str
    axis: str
    lines: Mapping[str, Sequence[tuple[float, float]]]  # name → (x, y) with rising x


def svg(panels: Sequence[Panel], unit: str) -> str:
    """The panels side by side, each with its own vertical axis from 0."""
    width = _WIDTH * len(panels)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    if len(names) > len(_COLOURS):
        raise ValueError(f"a plot has at most {len(_COLOURS)} lines, not {len(names)}: {', '.join(names)}")
    colours = dict(zip(names, _COLOURS, strict=False))
    legend, height = _legend(names, colours, width)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="{_GREY}">'
    ]
    for number, panel in enumerate(panels):
        out += _panel(panel, number * _WIDTH, unit, colours)
    return "\n".join((*out, *legend, "</svg>", ""))


def _legend(names: Sequence[str], colours: Mapping[str, str], width: int) -> tuple[list[str], int]:
    """The names below the panels, in as many rows as they take, and the height of the picture with them."""
    out: list[str] = []
    at, height = _LEFT, _HEIGHT
    for name in names:
        needed = 30 + 6 * len(name)
        if at > _LEFT and at + needed > width:
            at, height = _LEFT, height + _LEGEND_ROW
        out.append(f'<rect x="{at}" y="{height - 14}" width="10" height="3" fill="{colours[name]}"/>')
        out.append(f'<text x="{at + 15}" y="{height - 9}">{name}</text>')
        at += needed
    return out, height


def _panel(panel: Panel, left: int, unit: str, colours: Mapping[str, str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    first, last = log10(min(x for x, _ in points)), log10(max(x for x, _ in points))
    top = _round_up(max(y for _, y in points))

    def across(x: float) -> float:
        return left + _LEFT + (log10(x) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    out = [f'<text x="{left + _LEFT}" y="16" font-weight="bold">{panel.title}</text>']
    for step in range(5):
        y = top * step / 4
        out.append(
            f'<path d="M{across(10**first):.1f} {down(y):.1f}H{across(10**last):.1f}" stroke="{_GREY}" '
            'stroke-width="0.4" opacity="0.6"/>'
        )
        out.append(f'<text x="{left + _LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    out.append(f'<text x="{left + 4}" y="{_TOP - 12}">{unit}</text>')
    out += [
        f'<text x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{_short(x)}</text>'
        for x in sorted({x for x, _ in points})
    ]
    middle = left + (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 30}" text-anchor="middle">{panel.axis}</text>')
    for name, line in panel.lines.items():
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in line)
        out.append(f'<path d="M{path}" fill="none" stroke="{colours[name]}" stroke-width="1.8"/>')
        out += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.6" fill="{colours[name]}"/>' for x, y in line]
    return out


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters of it are round."""
    step = 10 ** int(log10(value))
    return next(float(step * times) for times in (1, 2, 4, 8, 10) if step * times >= value)


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"
