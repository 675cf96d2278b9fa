"""Values as people type them."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from tidelog.cli import options


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (options.count, "0", 0),
        (options.count, "007", 7),
        (options.count, "999999999999999999", 999_999_999_999_999_999),
        (options.positive, "1", 1),
        (options.size, "0", 0),
        (options.size, "4096", 4096),
        (options.size, "512k", 512 << 10),
        (options.size, "64M", 64 << 20),
        (options.size, "2g", 2 << 30),
        (options.positive_size, "1t", 1 << 40),
        (options.seconds, "5", 5.0),
        (options.seconds, "0.25", 0.25),
        (options.seconds, "500ms", 0.5),
        (options.seconds, "2m", 120.0),
        (options.seqs, "7", [7]),
        (options.seqs, "3,1,2", [3, 1, 2]),
        (options.setting, "durability=fsync", ("durability", "fsync")),
        (options.setting, "cap_records=100", ("cap_records", 100)),
        (options.setting, "priority=-5", ("priority", -5)),
        (options.setting, "priority=null", ("priority", None)),
        (options.setting, "auto_create=false", ("auto_create", False)),
        (options.setting, "dedupe_node=true", ("dedupe_node", True)),
        (options.setting, "ttl_ms=7d", ("ttl_ms", 604_800_000)),
        (options.setting, "ttl_ms=5", ("ttl_ms", 5)),
        (options.setting, "cap_bytes=64m", ("cap_bytes", 64 << 20)),
        (options.setting, "dead_letter=a=b", ("dead_letter", "a=b")),
        (options.age_ms, "500ms", 500),
        (options.age_ms, "30s", 30_000),
        (options.age_ms, "15m", 900_000),
        (options.age_ms, "12h", 43_200_000),
        (options.age_ms, "7d", 604_800_000),
        (options.age_ms, "2W", 1_209_600_000),
        (options.moment_us, "0", 0),
        (options.moment_us, "1794786366184000", 1_794_786_366_184_000),
        (options.moment_us, "1970-01-01", 0),
        (options.moment_us, "1970-01-01T00:00:01.000002", 1_000_002),
        (options.moment_us, "1970-01-01T00:00:01Z", 1_000_000),
        (options.moment_us, "1970-01-01T02:00:00+02:00", 0),
        (options.moment_us, "2262-04-11T23:47:16.854775Z", 9_223_372_036_854_775),
        (options.columns, "node", frozenset({"node"})),
        (options.columns, "tag,meta", frozenset({"tag", "meta"})),
        (options.octets, "grün", "grün".encode()),
        (options.octets, "\udcff", b"\xff"),
    ],
)
def test_a_value_is_read(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


def test_a_moment_without_a_zone_is_utc_wherever_the_machine_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        assert options.moment_us("1970-01-01T00:00:01") == 1_000_000
    time.tzset()


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (options.count, "-1", "-1 is negative, the least is 0"),
        (options.count, "1.5", "not a whole number"),
        (options.count, "", "not a whole number"),
        (options.count, "٣", "not a whole number"),
        (options.count, "1" * 19, "not a whole number"),
        (options.positive, "0", "the least is 1"),
        (options.size, "-5", "not a size"),
        (options.size, "64q", "not a size"),
        (options.positive_size, "0k", "the least is 1"),
        (options.age_ms, "7", "not an age; write"),
        (options.age_ms, "-7d", "not an age"),
        (options.age_ms, "7y", "not an age"),
        (options.moment_us, "yesterday", "not a moment; write 2026"),
        (options.moment_us, "-1", "not a moment"),
        (options.moment_us, "9" * 19, "not a moment"),
        (options.columns, "node,data", "no column 'data'; choose from node, tag, meta"),
        (options.columns, "", "no column ''"),
        (options.seconds, "soon", "no stretch of time; write seconds"),
        (options.seconds, "-1", "no stretch of time"),
        (options.seconds, "1e9", "no stretch of time"),
        (options.seqs, "1,,2", "not a whole number"),
        (options.seqs, "1,-2", "-2 is negative"),
        (options.setting, "ttl_ms", "write name=value"),
        (options.setting, "=5", "write name=value"),
        (options.setting, "ttl_ms=soon", "not an age"),
        (options.setting, "cap_bytes=lots", "not a size"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_what_would_be_right(
    read: Callable[[str], Any], text: str, said: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=said):
        read(text)
