"""[policy] How urgent a topic is: what its config says, or how lately somebody read it.

500 ┤█
    │ █▄            round(500 · 2^(−idle / 30 s)), and 0 after five minutes
250 ┤   ▀▄▄
    │       ▀▀▀▄▄▄▄▄▄▄
  0 ┼───────────────────────────────
    0    30   60   90   120 s since it was last read
"""

from __future__ import annotations

from math import exp2
from typing import Final

from tidelog.engine.config import TopicConfig

FRESH: Final = 500
HALF_LIFE_MS: Final = 30_000
FORGOTTEN_MS: Final = 300_000
_BOUND: Final = 1_000


def effective_priority(config: TopicConfig, idle_ms: int | None) -> int:
    """`idle_ms`: how long nobody has read it; None: nobody ever did since the start."""
    if config.priority is not None:
        return max(-_BOUND, min(config.priority, _BOUND))
    if not config.auto_priority or idle_ms is None or idle_ms >= FORGOTTEN_MS:
        return 0
    return round(FRESH * exp2(-idle_ms / HALF_LIFE_MS))
