"""A manual clock, which only a test moves."""

from __future__ import annotations

START_US = 1_700_000_000_000_000  # a Tuesday in November 2023; any fixed moment would do


class ManualClock:
    """Wall time can be set freely; monotonic time moves only forward, and only by ticks."""

    def __init__(self, start_us: int = START_US) -> None:
        self._wall_us, self._passed_us = start_us, 0

    def now_us(self) -> int:
        return self._wall_us

    def monotonic_ms(self) -> int:
        return self._passed_us // 1_000

    def monotonic_us(self) -> int:
        return self._passed_us

    def tick(self, ms: int) -> None:
        """Advance both clocks."""
        self.tick_us(ms * 1_000)

    def tick_us(self, us: int) -> None:
        """Advance both clocks."""
        if us < 0:
            raise ValueError(f"a tick is forward only, not {us} us; set_us turns the wall clock back")
        self._wall_us += us
        self._passed_us += us

    def set_us(self, us: int) -> None:
        """Set the wall clock, as an administrator can. The monotonic clock does not move."""
        self._wall_us = us
