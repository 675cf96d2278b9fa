"""Time, as something that is passed in. The only module that asks the operating system what time it is.

Wall time stamps records and ages segments; it may step in either direction, so callers never
subtract two of its readings to measure a wait. Monotonic time measures waits and nothing else.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the UNIX epoch. May go backwards when the machine's clock is set."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some fixed moment. Never goes backwards."""
        ...

    def monotonic_us(self) -> int:
        """The same in microseconds, for figures that people look at."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1_000
