"""Limits that contradict themselves are refused where they are made; time-outs are looked after often enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidelog
from tidelog.http.limits import LIMIT_NAMES, Limits


def test_the_limits_of_the_contract_are_the_defaults() -> None:
    """Contract 1.1: header-read time-out 60 s; h2: 1024 streams, 1 MiB and 4 MiB of window, ping 20 s / 20 s."""
    limits = Limits()
    assert limits.header_timeout_s == limits.body_timeout_s == 60
    assert limits.header_bytes_max == 64 << 10
    assert (limits.streams_max, limits.stream_window_bytes, limits.connection_window_bytes) == (1024, 1 << 20, 4 << 20)
    assert (limits.ping_every_s, limits.ping_timeout_s) == (20, 20)


def test_contradictory_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="would never resume"):
        Limits(write_high_bytes=10, write_low_bytes=11)
    with pytest.raises(ValueError, match="at least 65535"):
        Limits(connection_window_bytes=1000)


def test_no_time_out_is_late_by_more_than_an_eighth() -> None:
    assert Limits(idle_timeout_s=0.8).tick_s == pytest.approx(0.1)
    assert Limits().tick_s <= 1
    assert Limits(linger_s=0).tick_s > 0, "and the loop is never kept busy by it"


def test_every_limit_that_is_counted_has_a_metric_from_the_start() -> None:
    sources = "".join(path.read_text() for path in (Path(tidelog.__file__).parent / "http").glob("*.py"))
    counted = set(re.findall(r'limit_counters\.count\(\s*"(\w+)"', sources))
    assert len(counted) >= 6
    assert counted <= set(LIMIT_NAMES)
