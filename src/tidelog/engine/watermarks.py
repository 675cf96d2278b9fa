"""Floors of a topic, the gap that a reader below them gets, and retention holds of consumer groups.

    1             evict floor E          earliest                 head
    ├──────────────────┼─────────────────────┼──────────────────────┤
    │ lost to a cap,   │ deleted by a caller │ live                 │
    │ to age, or at the│ skipped silently    │                      │
    │ source: a gap    │                     │                      │

Gap rules, in order of authority:
  1. A cursor above the head belongs to an earlier topic of this name: the gap is all of this one.
  2. A cursor below E - 1 gets one gap up to there. The reason is what reached into it: `cap`, `ttl`, or `mixed` for
     both; `source_trim` where neither did and the records were lost at the source of a router.
  3. Seqs that stand for records which a router's source lost ("trims") are a gap of reason `source_trim`. Live records
     below a trim stay, and a reader meets the gap on its way. Without live records between a cursor and a trim it is
     one gap with the losses before it.
  4. Everything else that is missing was deleted or never existed: no gap.

E is one past the highest seq lost in any way. Deletes move `earliest` and never E. E <= earliest <= head + 1, and none
of them ever falls.

Hold rules, in order of authority:
  1. A floor never falls. A hold whose cursor is below the floor is broken: unread records are lost. It holds nothing
     until the group moves past the loss, by a commit or a reset.
  2. The slowest group whose quota suffices decides. A group whose quota does not is skipped: its hold breaks.
  3. A topic that rejects writes evicts nothing, so holds have no effect.

Broken holds follow from the floor and the cursor alone, which are durable; so they are the same after any restart.
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
    """The highest seq lost by each cause, 0 if none. Separate, so that the reason of a gap survives a restart."""

    cap: int = 0
    ttl: int = 0
    source: int = 0

    @property
    def evict_floor(self) -> int:
        """The first seq that was not lost involuntarily. Only losses below it make a gap."""
        return max(self) + 1

    def raise_to(self, cause: str, seq: int) -> Watermarks:
        """Record that everything up to `seq` is lost by this cause as well. A mark never falls."""
        assert cause in LOSS_CAUSES, f"{cause} is not a cause of loss"
        return self._replace(**{cause: max(getattr(self, cause), seq)})

    def clamp_to(self, head: int) -> Watermarks:
        """Limit every mark to the head: records that were never written cannot be lost."""
        return Watermarks(*(min(mark, head) for mark in self))


def clamp_earliest(earliest: int, head: int, marks: Watermarks) -> int:
    """Return `earliest`, clamped to the range between the evict floor and the head.

    While a topic is open its head only rises, and this lowers nothing. A restart may find a shorter log than the floors
    were made for; `marks` are those clamped to the same head.
    """
    return min(max(earliest, marks.evict_floor), head + 1)


class Gap(NamedTuple):
    """Lost seqs that a reader asked for: the tombstone of the wire contract, key by key."""

    gap_from: int
    gap_to: int  # included
    reason: Reason
    missed_estimate: int  # some of them may have been deleted before they were lost
    earliest_seq: int
    head_seq: int


class ReadStart(NamedTuple):
    """Where a read begins: at the first record after `cursor`."""

    cursor: int
    gap: Gap | None


TrimmedRanges: TypeAlias = Sequence[tuple[int, int]]  # seqs [lo, hi), ascending


def find_gap(from_seq: int, head: int, earliest: int, marks: Watermarks, trims: TrimmedRanges = ()) -> Gap | None:
    """Return what a reader with cursor `from_seq` has missed. The cursor is the last seq it has read, 0 before the
    first."""
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
    """Return the first trim that reaches beyond `from_seq`."""
    index = bisect_right(trims, from_seq + 1, key=_range_end) if trims else 0
    return trims[index] if index < len(trims) else None


def trimmed_ranges_after(from_seq: int, trims: TrimmedRanges) -> list[tuple[int, int]]:
    """Return every trim that reaches beyond `from_seq`."""
    return list(trims[bisect_right(trims, from_seq + 1, key=_range_end) :]) if trims else []


def _range_end(trim: tuple[int, int]) -> int:
    return trim[1]


def find_read_start(from_seq: int, head: int, earliest: int, marks: Watermarks, trims: TrimmedRanges = ()) -> ReadStart:
    """Return where a read from this cursor begins, and its gap. From the new cursor there is no gap."""
    gap = find_gap(from_seq, head, earliest, marks, trims)
    if gap is None:
        return ReadStart(from_seq, None)
    if gap.reason == "recreated":
        return ReadStart(earliest - 1, gap)
    return ReadStart(max(earliest - 1, from_seq, gap.gap_to), gap)


@dataclass(frozen=True, slots=True)
class GroupCursorState:
    """The cursor of a consumer group: the last seq it has read."""

    seq: int
    ts_ms: int  # of its last move
    hold_bytes: int = 0  # bytes that retention keeps for it beyond the caps; 0: no hold

    def is_hold_broken(self, evict_floor: int) -> bool:
        return self.hold_bytes > 0 and self.seq + 1 < evict_floor


def limit_eviction(index: TopicIndex, cursors: Iterable[GroupCursorState], floor: int) -> int:
    """Return how far eviction may go of what caps or age ask for. Raises where records cannot be measured."""
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
    """Return the groups whose holds break when the evict floor moves from `before` to `after`."""
    return sorted(
        name for name, cursor in cursors.items() if cursor.is_hold_broken(after) and not cursor.is_hold_broken(before)
    )
