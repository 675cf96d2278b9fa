from __future__ import annotations

import pytest

from tidelog.clock import Clock
from tidelog.testing import ManualClock


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock: Clock = ManualClock()
    assert (clock.now_us(), clock.monotonic_ms()) == (1_700_000_000_000_000, 0)
    assert (clock.now_us(), clock.monotonic_ms()) == (1_700_000_000_000_000, 0)


def test_a_tick_moves_both_clocks_and_small_ticks_add_up() -> None:
    clock = ManualClock(0)
    clock.tick(2)
    clock.tick_us(999)
    assert (clock.now_us(), clock.monotonic_ms()) == (2_999, 2)
    clock.tick_us(1)
    assert (clock.now_us(), clock.monotonic_ms()) == (3_000, 3)


def test_the_wall_clock_may_be_turned_back_and_the_other_never() -> None:
    clock = ManualClock()
    clock.tick(5)
    clock.set_us(42)
    assert (clock.now_us(), clock.monotonic_ms()) == (42, 5)
    with pytest.raises(ValueError, match="forward only"):
        clock.tick(-1)
    assert (clock.now_us(), clock.monotonic_ms()) == (42, 5)
