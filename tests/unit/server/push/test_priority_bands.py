"""Which band a topic is in, and when it leaves it."""

from __future__ import annotations

import pytest
from tests.unit.server.push.reference_scheduler import band

from tidelog.server.push.scheduling import (
    BAND_WEIGHTS,
    TOP_BAND,
    TOP_BAND_AFTER_US,
    aged_band,
    lower_priority,
    next_band_after_us,
)


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(-1000, 0), (-1, 0), (0, 1), (249, 1), (250, 2), (499, 2), (500, 3), (749, 3), (750, 4), (1000, 4)],
)
def test_bands_begin_at_the_documented_priorities(priority: int, expected: int) -> None:
    assert aged_band(priority, 0) == expected


def test_band_weights_are_eight_four_two_one_one() -> None:
    assert tuple(reversed(BAND_WEIGHTS)) == (8, 4, 2, 1, 1)


@pytest.mark.parametrize("priority", [-1000, -251, -250, -249, -1, 0, 1, 249, 250, 499, 500, 749, 750, 1000])
def test_waiting_promotes_a_topic_exactly_when_its_points_suffice(priority: int) -> None:
    """+100 a second; against the formula, at every rise and a microsecond before it."""
    at = aged_band(priority, 0)
    waited_us = 0
    while at < TOP_BAND:
        waited_us = next_band_after_us(priority, at)
        assert aged_band(priority, waited_us - 1) == at == band(priority, waited_us - 1)
        at = aged_band(priority, waited_us)
        assert at == band(priority, waited_us)
    assert waited_us <= TOP_BAND_AFTER_US


@pytest.mark.parametrize("priority", range(-1000, 1001, 50))
def test_every_topic_is_in_the_top_band_after_ten_seconds(priority: int) -> None:
    assert aged_band(priority, 10_000_000) == TOP_BAND


def test_low_priorities_need_ten_seconds_to_the_top_band() -> None:
    assert (
        aged_band(-250, 9_999_999),
        aged_band(-1000, 9_999_999),
        aged_band(0, 7_499_999),
        aged_band(0, 7_500_000),
    ) == (3, 0, 3, 4)


@pytest.mark.parametrize("priority", range(-1000, 1001, 25))
def test_lower_priority_is_one_band_lower_and_never_becomes_negative(priority: int) -> None:
    before, after = aged_band(priority, 0), aged_band(lower_priority(priority), 0)
    assert after == (before - 1 if before >= 2 else before)
