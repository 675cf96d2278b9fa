"""Clocks, passed in as arguments. The only module that reads the system time.

Wall time is for timestamps and the age of segments. It may step in either direction, so callers never measure a
duration with it; durations use monotonic time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the UNIX epoch. May go backwards when the system clock is set."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since a fixed, arbitrary moment. Never goes backwards."""
        ...

    def monotonic_us(self) -> int:
        """The same in microseconds, for measured latencies."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1_000
