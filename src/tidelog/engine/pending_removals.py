"""Removals that the gap log has not written yet. Added where they happen, under the topic's lock.

    floor moves, delete, drop ──► Removal ──► merged with the one before ──► taken by the gap log, written as rows

A full cap evicts a few records with every write: adjacent ranges of one topic with the same cause are merged. While a
directory is being opened nothing is merged, because removals that the gap log has already are dropped again
(`gap_log.drop_known_removals`). The lock of this class is the last one taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from tidelog.engine.config import OWN
from tidelog.engine.segment import SizeCount

if TYPE_CHECKING:
    from tidelog.engine.topic_state import TopicState

RemovalCause: TypeAlias = Literal["cap", "ttl", "hold_exceeded", "delete", "drop", "source_trim", "lost"]
EVICTION_CAUSES: Final = frozenset(("cap", "ttl", "hold_exceeded"))
_MERGED_CAUSES: Final = frozenset((*EVICTION_CAUSES, "source_trim"))
_PENDING_MAX: Final = 100_000  # above it, ranges are merged per topic and cause


@dataclass(slots=True)
class Removal:
    """One removal: seqs first to last, some of which may have been removed before."""

    topic_state: TopicState | None  # None: unknown topic, or dropped before replay
    topic: str
    topic_id: int
    cause: RemovalCause
    first: int
    last: int
    records: int
    bytes: int
    ts_ms: int
    actor: str | None = None
    number: int = 0  # the number of the delete
    about: str = ""  # the groups whose holds broke; what was damaged


class PendingRemovals:
    """Thread-safe, also with a topic's lock held."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled  # False: there is no gap log
        self._guard = Lock()
        self._pending: list[Removal] = []
        self._last: dict[int, Removal] = {}
        self.is_recovering = False
        self.broken_holds = 0  # holds, since the directory was opened

    def __len__(self) -> int:
        return len(self._pending)

    def add_eviction(
        self, topic: TopicState, before: int, cause: RemovalCause, evicted: SizeCount, broken: list[str]
    ) -> None:
        """Add the records between the old evict floor `before` and the current one."""
        if broken:
            self.broken_holds += 0 if self.is_recovering else len(broken)
            cause = "hold_exceeded"
        self.add(topic, cause, before, topic.index.evict_floor - 1, evicted, actor="retention", about=", ".join(broken))

    def add(
        self,
        topic: TopicState,
        cause: RemovalCause,
        first: int,
        last: int,
        removed: SizeCount,
        *,
        actor: str | None,
        ts_ms: int | None = None,
        number: int = 0,
        about: str = "",
    ) -> None:
        if not self._enabled or topic.name.startswith(OWN):
            return
        if ts_ms is None:  # during replay the last record's time is the best estimate
            ts_ms = topic.index.last_ts if self.is_recovering else topic.context.now_ms()
        removal = Removal(topic, topic.name, topic.id, cause, first, last, *removed, ts_ms, actor, number, about)
        with self._guard:
            self._append(removal)

    def add_removal(self, removal: Removal) -> None:
        """Add a removal of a dropped or unknown topic."""
        if self._enabled and not removal.topic.startswith(OWN):
            with self._guard:
                self._append(removal)

    def _append(self, removal: Removal) -> None:
        last = self._last.get(removal.topic_id)
        if last is not None and not self.is_recovering and _is_adjacent(last, removal):
            last.last, last.ts_ms = removal.last, removal.ts_ms
            last.records, last.bytes = last.records + removal.records, last.bytes + removal.bytes
            return
        self._pending.append(removal)
        self._last[removal.topic_id] = removal
        if len(self._pending) > _PENDING_MAX:
            self._pending = _compact(self._pending)
            self._last.clear()

    def take_all(self) -> list[Removal]:
        """Take all removals, in order; the caller has to write them."""
        with self._guard:
            taken, self._pending = self._pending, []
            self._last.clear()
            return taken

    def put_back(self, removals: list[Removal]) -> None:
        """Put removals that could not be written back before newer ones."""
        with self._guard:
            self._pending[:0] = removals

    def snapshot(self) -> list[Removal]:
        """Return copies of the pending removals."""
        with self._guard:
            return [replace(removal) for removal in self._pending]


def _is_adjacent(last: Removal, removal: Removal) -> bool:
    same = last.cause == removal.cause and last.about == removal.about == ""
    return same and removal.cause in _MERGED_CAUSES and last.last + 1 == removal.first


def _compact(removals: list[Removal]) -> list[Removal]:
    """Merge to one removal per topic and cause whose range covers all. Numbers of deletes are lost, so after a crash
    one may be written twice."""
    merged: dict[tuple[int, RemovalCause], Removal] = {}
    for removal in removals:
        total = merged.setdefault((removal.topic_id, removal.cause), removal)
        if total is not removal:
            total.first, total.last = min(total.first, removal.first), max(total.last, removal.last)
            total.records, total.bytes = total.records + removal.records, total.bytes + removal.bytes
            total.ts_ms, total.number = removal.ts_ms, max(total.number, removal.number)
    return list(merged.values())
