"""[policy] Bands of urgency, and how waiting lifts a topic from one to the next.

    band   effective priority   weight        a topic of priority 0, while it waits
    B4     750 and more              8                              ┌────────
    B3     500 to 749                4                      ┌───────┘
    B2     250 to 499                2              ┌───────┘
    B1     0 to 249                  1      ────────┘
    B0     below 0                   1      0      2.5 s   5 s     7.5 s

Effective priority is the topic's own and 100 for every second that it has waited. After ten seconds it is in the top
band whatever its own was: the boost alone, which ends at 1000, would leave a topic below −250 short of it, and that
nobody waits longer outranks the sum. It is looked at every 50 ms, on a grid, so that nobody has to be looked at in
between and one who looks late sees the same.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

WEIGHTS: Final = (1, 1, 2, 4, 8)  # of B0 to B4
TOP: Final = len(WEIGHTS) - 1
TICK_US: Final = 50_000
AGE_CAP_US: Final = 10_000_000
POINT_US: Final = 10_000  # of waiting are worth one point of priority
NEVER: Final = 1 << 62
_BOUNDS: Final = (0, 250, 500, 750)  # where B1 to B4 begin
_WIDTH: Final = 250


def band_of(priority: int) -> int:
    """The band of a topic that has not waited."""
    return bisect_right(_BOUNDS, priority)


def aged(priority: int, waited_us: int) -> int:
    """The band of a topic that has waited so long."""
    return TOP if waited_us >= AGE_CAP_US else bisect_right(_BOUNDS, priority + waited_us // POINT_US)


def rises_after_us(priority: int, band: int) -> int:
    """How long a topic of this priority has waited when it leaves this band upwards."""
    if band == TOP:
        return NEVER
    return min((_BOUNDS[band] - priority) * POINT_US, AGE_CAP_US)


def lowered(priority: int) -> int:
    """A priority that is one band lower. What is not negative does not become so: only its owner calls a topic
    worth less than nothing."""
    return min(priority, _BOUNDS[-1] + _WIDTH - 1) - _WIDTH if priority >= _WIDTH else min(priority, 0)


def tick_of(now_us: int) -> int:
    """The last moment at which bands were looked at."""
    return now_us - now_us % TICK_US
