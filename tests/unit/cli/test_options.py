"""Values as people type them."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from tidelog.cli import command


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (command.parse_count, "0", 0),
        (command.parse_count, "007", 7),
        (command.parse_count, "999999999999999999", 999_999_999_999_999_999),
        (command.parse_positive, "1", 1),
        (command.parse_size, "0", 0),
        (command.parse_size, "4096", 4096),
        (command.parse_size, "512k", 512 << 10),
        (command.parse_size, "64M", 64 << 20),
        (command.parse_size, "2g", 2 << 30),
        (command.parse_positive_size, "1t", 1 << 40),
        (command.parse_seconds, "5", 5.0),
        (command.parse_seconds, "0.25", 0.25),
        (command.parse_seconds, "500ms", 0.5),
        (command.parse_seconds, "2m", 120.0),
        (command.parse_seqs, "7", [7]),
        (command.parse_seqs, "3,1,2", [3, 1, 2]),
        (command.parse_setting, "durability=fsync", ("durability", "fsync")),
        (command.parse_setting, "cap_records=100", ("cap_records", 100)),
        (command.parse_setting, "priority=-5", ("priority", -5)),
        (command.parse_setting, "priority=null", ("priority", None)),
        (command.parse_setting, "auto_create=false", ("auto_create", False)),
        (command.parse_setting, "dedupe_node=true", ("dedupe_node", True)),
        (command.parse_setting, "ttl_ms=7d", ("ttl_ms", 604_800_000)),
        (command.parse_setting, "ttl_ms=5", ("ttl_ms", 5)),
        (command.parse_setting, "cap_bytes=64m", ("cap_bytes", 64 << 20)),
        (command.parse_setting, "dead_letter=a=b", ("dead_letter", "a=b")),
        (command.parse_age_ms, "500ms", 500),
        (command.parse_age_ms, "30s", 30_000),
        (command.parse_age_ms, "15m", 900_000),
        (command.parse_age_ms, "12h", 43_200_000),
        (command.parse_age_ms, "7d", 604_800_000),
        (command.parse_age_ms, "2W", 1_209_600_000),
        (command.parse_moment_us, "0", 0),
        (command.parse_moment_us, "1794786366184000", 1_794_786_366_184_000),
        (command.parse_moment_us, "1970-01-01", 0),
        (command.parse_moment_us, "1970-01-01T00:00:01.000002", 1_000_002),
        (command.parse_moment_us, "1970-01-01T00:00:01Z", 1_000_000),
        (command.parse_moment_us, "1970-01-01T02:00:00+02:00", 0),
        (command.parse_moment_us, "2262-04-11T23:47:16.854775Z", 9_223_372_036_854_775),
        (command.parse_columns, "node", frozenset({"node"})),
        (command.parse_columns, "tag,meta", frozenset({"tag", "meta"})),
        (command.parse_bytes, "grün", "grün".encode()),
        (command.parse_bytes, "\udcff", b"\xff"),
    ],
)
def test_a_value_is_read(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


def test_a_moment_without_a_zone_is_utc_wherever_the_machine_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        assert command.parse_moment_us("1970-01-01T00:00:01") == 1_000_000
    time.tzset()


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (command.parse_count, "-1", "-1 is negative, the least is 0"),
        (command.parse_count, "1.5", "not a whole number"),
        (command.parse_count, "", "not a whole number"),
        (command.parse_count, "٣", "not a whole number"),
        (command.parse_count, "1" * 19, "not a whole number"),
        (command.parse_positive, "0", "the least is 1"),
        (command.parse_size, "-5", "not a size"),
        (command.parse_size, "64q", "not a size"),
        (command.parse_positive_size, "0k", "the least is 1"),
        (command.parse_age_ms, "7", "not an age; write"),
        (command.parse_age_ms, "-7d", "not an age"),
        (command.parse_age_ms, "7y", "not an age"),
        (command.parse_moment_us, "yesterday", "not a moment; write 2026"),
        (command.parse_moment_us, "-1", "not a moment"),
        (command.parse_moment_us, "9" * 19, "not a moment"),
        (command.parse_columns, "node,data", "no column 'data'; choose from node, tag, meta"),
        (command.parse_columns, "", "no column ''"),
        (command.parse_seconds, "soon", "no duration; write seconds"),
        (command.parse_seconds, "-1", "no duration"),
        (command.parse_seconds, "1e9", "no duration"),
        (command.parse_seqs, "1,,2", "not a whole number"),
        (command.parse_seqs, "1,-2", "-2 is negative"),
        (command.parse_setting, "ttl_ms", "write name=value"),
        (command.parse_setting, "=5", "write name=value"),
        (command.parse_setting, "ttl_ms=soon", "not an age"),
        (command.parse_setting, "cap_bytes=lots", "not a size"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_what_would_be_right(
    read: Callable[[str], Any], text: str, said: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=said):
        read(text)
