"""[policy] The jitter window: claimers that come within it share what there is. No clock, no I/O.

    join  join      join                close
    ├──────┼─────────┼────────────────────┤
    └─ the first opens the window: due ───┘

Whoever leaves takes only itself out; the window stays open for the others, and whoever of them
comes first when it is due closes it for all. Times are of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Want(NamedTuple):
    """What one claimer asks for."""

    node: str
    most: int
    lease_ms: int | None = None  # None: the queue's
    conn: object = None  # whose end releases the leases
    bytes_max: int | None = None  # of data, about; one job in any case


class Cohort:
    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms
        self.due_ms: int | None = None  # None: nobody waits
        self._last = 0
        self._members: dict[int, Want] = {}

    def join(self, now_ms: int, want: Want) -> int:
        """Wait with the others, or open a window; the ticket tells one from another."""
        if self.due_ms is None:
            self.due_ms = now_ms + self.window_ms
        self._last += 1
        self._members[self._last] = want
        return self._last

    def leave(self, ticket: int) -> None:
        """Wait no longer. Harmless where the window was closed already."""
        self._members.pop(ticket, None)
        if not self._members:
            self.due_ms = None

    def close(self) -> list[tuple[int, Want]]:
        """Everybody who waits, in the order of their arrival; the next one opens another window."""
        members, self._members, self.due_ms = list(self._members.items()), {}, None
        return members


def divide(available: int, wants: Sequence[int]) -> list[list[int]]:
    """Which of the available jobs, by index, goes to whom: one at a time, in arrival order, passing over who has
    enough. 9 for (2, 100): 2 and 7."""
    if len(wants) == 1:
        return [list(range(min(available, max(wants[0], 0))))]
    shares: list[list[int]] = [[] for _ in wants]
    open_for = [(share, want) for share, want in zip(shares, wants, strict=True) if want > 0]
    at = 0
    while open_for and at < available:
        for share, _ in open_for[: available - at]:
            share.append(at)
            at += 1
        open_for = [(share, want) for share, want in open_for if len(share) < want]
    return shares
