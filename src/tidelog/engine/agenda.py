"""[policy] Which topics have something due: records to expire, a segment to seal by its age.

    publish, configure, a move of a group ──► heap of (due_ms, topic) ──► Engine's keeping thread, when it is due

A topic has at most one entry that counts, the earliest; others are passed over when they come up. So a pass costs what
is due, not how many topics there are, and a publish pays for one comparison while its topic has an entry.
"""

from __future__ import annotations

from heapq import heappop, heappush
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidelog.engine.core import Core

STEP_MS: Final = 1_000  # a topic is looked at no more often: each look may cost a sync
HELD_MS: Final = 10_000  # where a group holds records back, or a look failed


class Agenda:
    """Safe to call from any thread. `plan` with the topic's lock held."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._heap: list[tuple[int, int, Core]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def plan(self, core: Core, due_ms: int | None) -> None:
        """Have a topic looked at then, or earlier where that was planned before; None: there is nothing to plan."""
        if due_ms is None or (core.due_ms is not None and core.due_ms <= due_ms):
            return
        core.due_ms = due_ms
        with self._guard:
            heappush(self._heap, (due_ms, core.id, core))

    def take(self, now_ms: int, most: int) -> list[Core]:
        """The topics that are due, each once; they have no entry any more."""
        found: list[Core] = []
        with self._guard:
            while self._heap and self._heap[0][0] <= now_ms and len(found) < most:
                due_ms, _, core = heappop(self._heap)
                if core.due_ms == due_ms:  # else it was planned earlier, and looked at
                    core.due_ms = None
                    found.append(core)
        return found
