"""[policy] Limits that peers met: counted by name for the metrics, and logged at most once in a while for each name."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

_log = logging.getLogger("tidelog.server")
LOG_EVERY_S: Final = 10.0
"""One line for each limit in this time. A flood of refusals must not become a flood of log lines."""

LIMITS: Final = (
    "connections",
    "control_frames",
    "frame_size",
    "header_bytes",
    "resets",
    "slow_consumer",
    "stalled",
    "streams",
    "unsent_bytes",
)
"""Every name that is counted, so that a metric is there, as 0, before its limit is met."""


class Refusals:
    """On the loop's thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.counts: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self._logged_s: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def count(self, limit: str, peer: str, what: str) -> None:
        """Count one refusal. `what` says what was done to which peer's connection or stream."""
        self.counts[limit] += 1
        now_s, last_s = self._now_s(), self._logged_s.get(limit)
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            self._unlogged[limit] += 1
            return
        self._logged_s[limit] = now_s
        more = self._unlogged.pop(limit, 0)
        fields = {"limit": limit, "peer": peer, "not_logged": more}
        _log.warning("a limit was met: %s", what, extra={"fields": fields})
