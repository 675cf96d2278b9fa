"""[policy] Caps on what clients hold at once: requests in flight, streams, sessions. Taken and given back in pairs.

All of it happens on the event loop's thread, so a check and what it allows are one step.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem


class Cap:
    """How many of one thing everybody together and each key may hold; 0: as many as they like."""

    def __init__(self, what: str, total: int, each: int = 0) -> None:
        self._what, self._total, self._each = what, total, each
        self.held = 0
        self._changed: asyncio.Event | None = None
        self._by_key: Counter[bytes] = Counter()

    def check(self, principal: Principal, count: int = 1) -> None:
        """Raises where there is no room. Without keys there is nobody to count by key."""
        if self._total and self.held + count > self._total:
            raise Problem("throttled", f"{self._total} {self._what} at once are the limit; nothing was done, retry")
        key = principal.identity
        if self._each and key and self._by_key[key] + count > self._each:
            raise Problem(
                "throttled", f"{self._each} {self._what} of one key at once are the limit; nothing was done, retry"
            )

    def take(self, principal: Principal, count: int = 1) -> None:
        """Take a place, or so many at once. Raises where there are none, and has taken none then."""
        self.check(principal, count)
        self.held += count
        if principal.identity:
            self._by_key[principal.identity] += count

    async def empty(self) -> None:
        """Return when nobody holds any."""
        while self.held:
            self._changed = asyncio.Event()
            await self._changed.wait()

    def give(self, principal: Principal, count: int = 1) -> None:
        self.held -= count
        if not self.held and self._changed is not None:
            self._changed.set()
        key = principal.identity
        if key:
            self._by_key[key] -= count
            if not self._by_key[key]:
                del self._by_key[key]
