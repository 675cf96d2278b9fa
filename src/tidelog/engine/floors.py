"""[policy] The two floors of a topic, and what a reader is told who comes from below them.

    1             evict floor E          earliest                 head
    ├──────────────────┼─────────────────────┼──────────────────────┤
    │ lost to a cap,   │ deleted by a caller │ live                 │
    │ to age, or at the│ read over in silence│                      │
    │ source: a gap    │                     │                      │

Rules, in order of authority:
  1. A cursor ahead of the head belongs to an earlier topic of this name: the gap is all of this one.
  2. A cursor that has not passed E - 1 gets one gap up to there, however much of it was lost in which
     way. The reason is what reached into it: `cap`, `ttl`, or `mixed` for both; `source_trim` where neither did
     and the records were lost at the topic that routers should have brought them from.
  3. Seqs that stand for records which a router's source lost before they came here ("trims") are a gap as well, of
     reason `source_trim`. It is a range: what is live below it stays, and a reader meets the gap on its way. Where
     nothing live is between a cursor and a trim it is one gap with what was lost before it.
  4. Whatever else is missing was deleted or never there: no gap.

E is one past the highest seq lost in any way. Deletes move `earliest` and never E, so they are never
alarming; E <= earliest <= head + 1; and neither ever falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Reason: TypeAlias = Literal["cap", "ttl", "mixed", "source_trim", "recreated"]
CAUSES: Final = ("cap", "ttl", "source")


class Marks(NamedTuple):
    """The highest seq lost by each cause, 0 where nothing was: kept apart so that the reason outlives a restart."""

    cap: int = 0
    ttl: int = 0
    source: int = 0

    @property
    def evict_floor(self) -> int:
        """The first seq that was not lost involuntarily. Nothing else makes a gap."""
        return max(self) + 1

    def raised(self, cause: str, seq: int) -> Marks:
        """Everything up to `seq` is lost by this cause as well. A mark never falls."""
        assert cause in CAUSES, f"{cause} is not a way to lose records"
        return self._replace(**{cause: max(getattr(self, cause), seq)})

    def clamped(self, head: int) -> Marks:
        """What was never written was not lost: no mark lies ahead of the head."""
        return Marks(*(min(mark, head) for mark in self))


def clamp(earliest: int, head: int, marks: Marks) -> int:
    """The first seq that may be live, held between what was lost and what was written.

    While a topic lives its head only rises, and this lowers nothing. A restart may find a shorter
    log than the floors were made for; `marks` are those that were clamped to the same head.
    """
    return min(max(earliest, marks.evict_floor), head + 1)


class Gap(NamedTuple):
    """Seqs that a reader asked for and that were lost: the tombstone of the wire contract, key by key."""

    gap_from: int
    gap_to: int  # included
    reason: Reason
    missed_estimate: int  # some of them may have been deleted before they were lost
    earliest_seq: int
    head_seq: int


class Start(NamedTuple):
    """Where a read begins: it looks for the first record behind `cursor`."""

    cursor: int
    gap: Gap | None


Trims: TypeAlias = Sequence[tuple[int, int]]  # seqs [lo, hi), rising


def gap(from_seq: int, head: int, earliest: int, marks: Marks, trims: Trims = ()) -> Gap | None:
    """What a reader has missed whose cursor is `from_seq`: the last seq it has passed, 0 before the first."""
    if from_seq > head:
        return Gap(1, head, "recreated", max(head, 1), earliest, head)
    stop = marks.evict_floor
    live = max(from_seq + 1, earliest)
    for lo, hi in trims[bisect_right(trims, from_seq + 1, key=_end) :] if trims else ():
        if lo > live:
            break
        stop, live = max(stop, hi), max(live, hi)
    if from_seq + 1 >= stop:
        return None
    capped, aged = marks.cap > from_seq, marks.ttl > from_seq
    reason: Reason = "mixed" if capped and aged else "cap" if capped else "ttl" if aged else "source_trim"
    return Gap(from_seq + 1, stop - 1, reason, stop - 1 - from_seq, stop, head)


def next_trim(from_seq: int, trims: Trims) -> tuple[int, int] | None:
    """The first trim of which something is after `from_seq`."""
    at = bisect_right(trims, from_seq + 1, key=_end) if trims else 0
    return trims[at] if at < len(trims) else None


def trims_after(from_seq: int, trims: Trims) -> list[tuple[int, int]]:
    """Every trim of which something is after `from_seq`."""
    return list(trims[bisect_right(trims, from_seq + 1, key=_end) :]) if trims else []


def _end(trim: tuple[int, int]) -> int:
    return trim[1]


def start(from_seq: int, head: int, earliest: int, marks: Marks, trims: Trims = ()) -> Start:
    """Where a read from this cursor begins, and what it has missed. From the new cursor there is no gap."""
    missed = gap(from_seq, head, earliest, marks, trims)
    if missed is None:
        return Start(from_seq, None)
    if missed.reason == "recreated":
        return Start(earliest - 1, missed)
    return Start(max(earliest - 1, from_seq, missed.gap_to), missed)
