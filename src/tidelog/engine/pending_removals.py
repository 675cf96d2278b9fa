"""[policy] Removals that no row of the ledger tells of yet. Noted where they happen, under the topic's lock.

    floor moves, delete, drop ──► note ──► merged with the one before it ──► taken by the ledger, written as rows

A cap that is full evicts a few records with every write: ranges of one topic that lie back to back and went for the
same cause are one note. While a directory is being opened nothing is merged, because what the ledger has already is
taken out again (`ledger.rebuild`). Its lock is the last one anybody takes.
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
_PENDING_MAX: Final = 100_000  # where the ledger cannot be written for long, ranges are laid together


@dataclass(slots=True)
class Removal:
    """One removal: seqs first to last, of which some may have been gone before."""

    topic_state: (
        TopicState | None
    )  # None: nobody knows whose records were lost, or the topic was dropped before it was looked at
    topic: str
    topic_id: int
    cause: RemovalCause
    first: int
    last: int
    records: int
    bytes: int
    ts_ms: int
    actor: str | None = None
    number: int = 0  # which of the topic's deletes
    about: str = ""  # the groups whose holds broke; what was damaged


class PendingRemovals:
    """Safe to call from any thread, also with a topic's lock held."""

    def __init__(self, *, wanted: bool) -> None:
        self._enabled = wanted  # False: there is no ledger
        self._guard = Lock()
        self._pending: list[Removal] = []
        self._last: dict[int, Removal] = {}
        self.is_recovering = False
        self.broken_holds = 0  # holds, since the directory was opened

    def __len__(self) -> int:
        return len(self._pending)

    def add_eviction(
        self, topic: TopicState, before: int, cause: RemovalCause, gone: SizeCount, broken: list[str]
    ) -> None:
        """The evict floor of a topic has moved from `before` to where it is."""
        if broken:
            self.broken_holds += 0 if self.is_recovering else len(broken)
            cause = "hold_exceeded"
        self.add(topic, cause, before, topic.index.evict_floor - 1, gone, actor="retention", about=", ".join(broken))

    def add(
        self,
        topic: TopicState,
        cause: RemovalCause,
        first: int,
        last: int,
        gone: SizeCount,
        *,
        actor: str | None,
        ts_ms: int | None = None,
        number: int = 0,
        about: str = "",
    ) -> None:
        if not self._enabled or topic.name.startswith(OWN):
            return
        if ts_ms is None:  # of what replay finds, nobody knows it better than the last record does
            ts_ms = topic.index.last_ts if self.is_recovering else topic.context.now_ms()
        made = Removal(topic, topic.name, topic.id, cause, first, last, *gone, ts_ms, actor, number, about)
        with self._guard:
            self._append(made)

    def add_removal(self, note: Removal) -> None:
        """A note that was made elsewhere: of a topic that is gone, or of no topic at all."""
        if self._enabled and not note.topic.startswith(OWN):
            with self._guard:
                self._append(note)

    def _append(self, note: Removal) -> None:
        before = self._last.get(note.topic_id)
        if before is not None and not self.is_recovering and _is_adjacent(before, note):
            before.last, before.ts_ms = note.last, note.ts_ms
            before.records, before.bytes = before.records + note.records, before.bytes + note.bytes
            return
        self._pending.append(note)
        self._last[note.topic_id] = note
        if len(self._pending) > _PENDING_MAX:
            self._pending = _compact(self._pending)
            self._last.clear()

    def take_all(self) -> list[Removal]:
        """All of them, in their order: from now on whoever took them has to tell."""
        with self._guard:
            taken, self._pending = self._pending, []
            self._last.clear()
            return taken

    def put_back(self, notes: list[Removal]) -> None:
        """They could not be told: before all that came since."""
        with self._guard:
            self._pending[:0] = notes

    def snapshot(self) -> list[Removal]:
        """What waits, without taking it."""
        with self._guard:
            return [replace(note) for note in self._pending]


def _is_adjacent(before: Removal, note: Removal) -> bool:
    same = before.cause == note.cause and before.about == note.about == ""
    return same and note.cause in _MERGED_CAUSES and before.last + 1 == note.first


def _compact(notes: list[Removal]) -> list[Removal]:
    """One note a topic and cause: ranges that cover all of theirs. Numbers of deletes are lost with it, so that one may
    be told twice after a crash."""
    found: dict[tuple[int, RemovalCause], Removal] = {}
    for note in notes:
        whole = found.setdefault((note.topic_id, note.cause), note)
        if whole is not note:
            whole.first, whole.last = min(whole.first, note.first), max(whole.last, note.last)
            whole.records, whole.bytes = whole.records + note.records, whole.bytes + note.bytes
            whole.ts_ms, whole.number = note.ts_ms, max(whole.number, note.number)
    return list(found.values())
