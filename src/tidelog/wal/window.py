"""[policy] How long commits are gathered before they are written: as long as each slice of time brings some more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SLICE_MS: Final = 0.25


def gather(window_ms: float, arrived: Callable[[], int], pause: Callable[[float], object]) -> int:
    """Wait slice by slice until one brings nothing or the window is over; return how many slices it took."""
    for slices in range(int(window_ms / SLICE_MS)):
        before = arrived()
        pause(SLICE_MS / 1000)
        if arrived() == before:
            return slices + 1
    return int(window_ms / SLICE_MS)
