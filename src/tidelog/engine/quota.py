"""[policy] One number that all topics share, and the cap on it.

    take   before a write: counted when there is room, refused as a whole when there is not
    hold   counted without asking: what a restart finds is there already, whatever the cap now says
    give   after a delete, an eviction, a drop, or a write that failed

Asking and counting are one step under one lock, so writers that race for the last byte cannot both
have it. After a restart under a smaller cap more may be in use than is allowed; then every take is
refused until enough has been given back.
"""

from __future__ import annotations

from threading import Lock

from tidelog.errors import Throttled


class Quota:
    """How much of `cap` is in use; a cap of 0 is none. Safe to call from any thread."""

    def __init__(self, cap: int, *, limit: str = "total_bytes") -> None:
        self._cap, self._limit = cap, limit
        self._used = 0
        self._guard = Lock()

    @property
    def used(self) -> int:
        return self._used

    @property
    def room(self) -> int | None:
        """What a take may ask for; None: there is no cap."""
        return max(self._cap - self._used, 0) if self._cap else None

    def take(self, amount: int) -> None:
        """Count this much more, or raise Throttled and count nothing."""
        assert amount >= 0, "use give"
        with self._guard:
            if self._cap and self._used + amount > self._cap:
                raise Throttled(self._limit, max=self._cap, used=self._used, asked=amount)
            self._used += amount

    def hold(self, amount: int) -> None:
        """Count this much more, cap or no cap."""
        assert amount >= 0, "use give"
        with self._guard:
            self._used += amount

    def give(self, amount: int) -> None:
        """Count this much less."""
        assert amount >= 0, "use take"
        with self._guard:
            assert amount <= self._used, f"{amount} of {self._limit} given back, only {self._used} were taken"
            self._used -= amount
