"""Bars for people: nothing is drawn of nothing, and something of everything else."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tidelog.cli.plot import check_svg_path, format_number, render_bar, render_stats, save_svg
from tidelog.errors import BadInput
from tidelog.pipelines import Stats


@pytest.mark.parametrize(
    ("value", "most", "drawn"),
    [(0, 10, ""), (10, 10, "████"), (5, 10, "██"), (0.001, 10, "▏"), (3, 0, ""), (7.5, 10, "███")],
)
def test_a_bar(value: float, most: float, drawn: str) -> None:
    assert render_bar(value, most, 4) == drawn


@pytest.mark.parametrize(("value", "said"), [(0, "0"), (999, "999"), (1234, "1.23k"), (5e6, "5M"), (2.5e9, "2.5G")])
def test_a_figure(value: float, said: str) -> None:
    assert format_number(value) == said


def test_a_drawing_reads_as_one(tmp_path: Path) -> None:
    rates = [{"from": f"2026-01-01T00:0{at}:00Z", "records_s": at * 1.0, "bytes_s": at * 10.0} for at in range(5)]
    waits = [{"from": "2026-01-01T00:07:00Z", "wait_ms_p99": 12}]
    stats = Stats("a <topic>", 60_000, rates, waits)
    save_svg(str(tmp_path / "a.svg"), render_stats(stats))
    tree = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    bars = [each for each in tree.iter() if each.tag.endswith("title")]
    assert len(bars) == 3 * 6
    assert "a <topic>, every 60 s" in [each.text for each in tree.iter()]
    with pytest.raises(BadInput, match=r"ends in \.svg"):
        check_svg_path(str(tmp_path / "a.png"))
