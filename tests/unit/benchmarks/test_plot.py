"""Pictures of measurements: every line is drawn and named, within the picture."""

from __future__ import annotations

import re

import pytest
from benchmarks.topics import bench_topics
from benchmarks.topics.plot import Panel, svg

MEASURED = {
    "open": "ms",
    "open, processor time": "ms",
    "close with one dirty topic": "ms",
    "close with one dirty topic, processor time": "ms",
    "checkpoint with one dirty topic": "ms",
    "first write to a topic": "µs",
    "list 100 topics": "µs",
}


def test_cost_over_topics_has_a_line_for_each_operation() -> None:
    rows = [
        {"name": f"{name}, {size:,} topics", "unit": unit, "value": size / 7}
        for name, unit in MEASURED.items()
        for size in (1, 100, 10_000, 100_000)
    ]
    picture = bench_topics.plot([*rows, {"name": "memory of an idle topic, 100,000 topics", "unit": "B", "value": 1}])
    assert picture.count('stroke-width="1.8"') == 5
    assert picture.count("<circle") == 5 * 4
    # Where both were measured the wall time is left out.
    assert {name for name in MEASURED if f">{name}<" in picture} == MEASURED.keys() - {
        "open",
        "close with one dirty topic",
    }
    size = re.search(r'width="(\d+)" height="(\d+)"', picture)
    assert size is not None
    for x, y, text in re.findall(r'<text x="([\d.]+)" y="([\d.]+)">([^<]+)</text>', picture):
        assert float(x) + 5 * len(text) < int(size[1]), text
        assert float(y) < int(size[2]), text


def test_more_lines_than_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 6 lines, not 7"):
        svg([Panel("p", "x", {f"line {number}": [(1, 1), (10, 2)] for number in range(7)})], "ms")
