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

[policy] Retention holds: how far caps and age may go while a group of consumers is behind.

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

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from tidelog.engine.topic_index import TopicIndex


Reason: TypeAlias = Literal["cap", "ttl", "mixed", "source_trim", "recreated"]
LOSS_CAUSES: Final = ("cap", "ttl", "source")


class Watermarks(NamedTuple):
    """The highest seq lost by each cause, 0 where nothing was: kept apart so that the reason outlives a restart."""

    cap: int = 0
    ttl: int = 0
    source: int = 0

    @property
    def evict_floor(self) -> int:
        """The first seq that was not lost involuntarily. Nothing else makes a gap."""
        return max(self) + 1

    def raise_to(self, cause: str, seq: int) -> Watermarks:
        """Everything up to `seq` is lost by this cause as well. A mark never falls."""
        assert cause in LOSS_CAUSES, f"{cause} is not a way to lose records"
        return self._replace(**{cause: max(getattr(self, cause), seq)})

    def clamp_to(self, head: int) -> Watermarks:
        """What was never written was not lost: no mark lies ahead of the head."""
        return Watermarks(*(min(mark, head) for mark in self))


def clamp_earliest(earliest: int, head: int, marks: Watermarks) -> int:
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


class ReadStart(NamedTuple):
    """Where a read begins: it looks for the first record behind `cursor`."""

    cursor: int
    gap: Gap | None


TrimmedRanges: TypeAlias = Sequence[tuple[int, int]]  # seqs [lo, hi), rising


def find_gap(from_seq: int, head: int, earliest: int, marks: Watermarks, trims: TrimmedRanges = ()) -> Gap | None:
    """What a reader has missed whose cursor is `from_seq`: the last seq it has passed, 0 before the first."""
    if from_seq > head:
        return Gap(1, head, "recreated", max(head, 1), earliest, head)
    stop = marks.evict_floor
    live = max(from_seq + 1, earliest)
    for lo, hi in trims[bisect_right(trims, from_seq + 1, key=_range_end) :] if trims else ():
        if lo > live:
            break
        stop, live = max(stop, hi), max(live, hi)
    if from_seq + 1 >= stop:
        return None
    capped, aged = marks.cap > from_seq, marks.ttl > from_seq
    reason: Reason = "mixed" if capped and aged else "cap" if capped else "ttl" if aged else "source_trim"
    return Gap(from_seq + 1, stop - 1, reason, stop - 1 - from_seq, stop, head)


def next_trimmed_range(from_seq: int, trims: TrimmedRanges) -> tuple[int, int] | None:
    """The first trim of which something is after `from_seq`."""
    at = bisect_right(trims, from_seq + 1, key=_range_end) if trims else 0
    return trims[at] if at < len(trims) else None


def trimmed_ranges_after(from_seq: int, trims: TrimmedRanges) -> list[tuple[int, int]]:
    """Every trim of which something is after `from_seq`."""
    return list(trims[bisect_right(trims, from_seq + 1, key=_range_end) :]) if trims else []


def _range_end(trim: tuple[int, int]) -> int:
    return trim[1]


def find_read_start(from_seq: int, head: int, earliest: int, marks: Watermarks, trims: TrimmedRanges = ()) -> ReadStart:
    """Where a read from this cursor begins, and what it has missed. From the new cursor there is no gap."""
    missed = find_gap(from_seq, head, earliest, marks, trims)
    if missed is None:
        return ReadStart(from_seq, None)
    if missed.reason == "recreated":
        return ReadStart(earliest - 1, missed)
    return ReadStart(max(earliest - 1, from_seq, missed.gap_to), missed)


@dataclass(frozen=True, slots=True)
class GroupCursorState:
    """Where a group of consumers stands: the last seq it has passed."""

    seq: int
    ts_ms: int  # of its last move
    hold_bytes: int = 0  # how much retention may be held up for it; 0: not at all

    def is_hold_broken(self, evict_floor: int) -> bool:
        return self.hold_bytes > 0 and self.seq + 1 < evict_floor


def limit_eviction(index: TopicIndex, cursors: Iterable[GroupCursorState], floor: int) -> int:
    """How far eviction may go of what caps or age ask for. Raises where records cannot be weighed."""
    for cursor in sorted((cursor for cursor in cursors if cursor.hold_bytes), key=lambda cursor: cursor.seq):
        first = cursor.seq + 1
        if first >= floor:
            return floor
        if cursor.is_hold_broken(index.evict_floor):
            continue
        if index.measure(max(first, index.earliest), floor).bytes <= cursor.hold_bytes:
            return first
    return floor


def find_broken_holds(cursors: Mapping[str, GroupCursorState], before: int, after: int) -> list[str]:
    """The groups whose holds break when the evict floor goes from `before` to `after`."""
    return sorted(
        name for name, cursor in cursors.items() if cursor.is_hold_broken(after) and not cursor.is_hold_broken(before)
    )
