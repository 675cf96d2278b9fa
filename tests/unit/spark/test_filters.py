"""Conditions, held against a plain Python reading of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from tidelog.spark.filters import Bounds, RecordFilter, parse_filter

SEQS = [1, 2, 3, 4, 5]
TAGS = ["a", None, "ab", "b", "it's"]
TIMES = [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)]
CELLS = {
    "seq": pa.array(SEQS, pa.int64()),
    "tag": pa.array(TAGS, pa.string()),
    "ts": pa.array(TIMES, pa.timestamp("us", tz="UTC")),
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("seq = 3", [3]),
        ("seq != 3", [1, 2, 4, 5]),
        ("seq <> 3 and seq <= 4", [1, 2, 4]),
        ("seq > 1 AND seq < 4", [2, 3]),
        ("seq in (1, 5, 9)", [1, 5]),
        ("seq not in (1, 5, 9)", [2, 3, 4]),
        ("tag = 'a'", [1]),
        ("tag != 'a'", [3, 4, 5]),
        ("tag in ('a', 'b')", [1, 4]),
        ("tag not in ('a', 'b')", [3, 5]),
        ("tag is null", [2]),
        ("tag is not null", [1, 3, 4, 5]),
        ("tag like 'a%'", [1, 3]),
        ("tag like '%b'", [3, 4]),
        ("tag like '%a%'", [1, 3]),
        ("tag not like 'a%'", [4, 5]),
        ("tag like 'a'", [1]),
        ("tag = 'it''s'", [5]),
        ("ts >= '2026-01-02T00:00:00Z' and ts < '2026-01-04T00:00:00+00:00'", [2, 3]),
        ("ts = '2026-01-02T01:00:00+01:00'", [2]),
    ],
)
def test_a_missing_value_meets_no_comparison(text: str, wanted: list[int]) -> None:
    mask = parse_filter("where", text).row_mask(CELLS)
    assert mask is not None
    assert CELLS["seq"].filter(mask).to_pylist() == wanted


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("seq > 5", 6, None),
        ("seq >= 5 and seq < 9", 5, 8),
        ("seq in (4, 2, 7) and seq <= 6", 2, 6),
        ("seq = 4", 4, 4),
        ("seq != 4", None, None),
        ("tag = 'a'", None, None),
    ],
)
def test_bounds_hold_for_every_row_that_is_wanted(text: str, low: int | None, high: int | None) -> None:
    bounds, none = parse_filter("where", text).bounds("seq"), Bounds()
    assert bounds == Bounds(none.low if low is None else low, none.high if high is None else high)


def test_no_condition_wants_everything() -> None:
    assert RecordFilter().row_mask(CELLS) is None
    assert RecordFilter().accepts_topic("any")


def test_a_condition_on_the_topic_is_asked_of_its_name() -> None:
    where = parse_filter("where", "topic like 'order%' and topic != 'orders-2' and seq > 1")
    assert [where.accepts_topic(name) for name in ("orders", "orders-2", "users")] == [True, False, False]
    assert where.without_topic() == parse_filter("where", "seq > 1")
