"""[policy] Retention holds: how far caps and age may go while a group of consumers is behind.

    evict floor     cursor            what caps and age ask for      head
    ├───────────────┼─────────────────────┼────────────────────────────┤
    │ may go        │ held                │ stays in any case          │
                    └ as long as its live bytes are within the quota of the group

Rules, in order of authority:
  1. A floor never falls. A hold whose cursor lies below the floor is broken: records that the group had still to read
     are lost. It holds nothing until the group goes on from behind them, by a commit or a reset.
  2. The slowest group whose quota is enough decides. One whose quota is not is passed over: its hold breaks.
  3. A topic that rejects evicts nothing, and nothing has to be held.

What is broken follows from the floor and the cursor alone, which are durable; so it is the same after any restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidelog.engine.index import TopicIndex


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a group of consumers stands: the last seq it has passed."""

    seq: int
    ts_ms: int  # of its last move
    hold_bytes: int = 0  # how much retention may be held up for it; 0: not at all

    def is_broken(self, evict_floor: int) -> bool:
        return self.hold_bytes > 0 and self.seq + 1 < evict_floor


def limit(index: TopicIndex, cursors: Iterable[Cursor], floor: int) -> int:
    """How far eviction may go of what caps or age ask for. Raises where records cannot be weighed."""
    for cursor in sorted((cursor for cursor in cursors if cursor.hold_bytes), key=lambda cursor: cursor.seq):
        first = cursor.seq + 1
        if first >= floor:
            return floor
        if cursor.is_broken(index.evict_floor):
            continue
        if index.weigh(max(first, index.earliest), floor).size <= cursor.hold_bytes:
            return first
    return floor


def broken_by(cursors: Mapping[str, Cursor], before: int, after: int) -> list[str]:
    """The groups whose holds break when the evict floor goes from `before` to `after`."""
    return sorted(name for name, cursor in cursors.items() if cursor.is_broken(after) and not cursor.is_broken(before))
