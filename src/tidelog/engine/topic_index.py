"""The records of a topic: its parts, floors and counts, the gap that a reader below a floor gets, and the retention
holds of consumer groups. Guarded by the topic's lock.

    1        evict floor E    earliest                head      last assigned
    ├────────────┼────────────────┼─────────────────────┼─────────┤
    │ lost       │ deleted        │ live, with holes    │ on its way to the WAL
    └ a gap for  └ skipped        └ readable            └ not visible yet
      readers      silently

E is one past the highest seq lost in any way: to a cap, to age, or at the source of a router. Deletes by callers move
`earliest` and never E. E <= earliest <= head + 1, and none of them ever falls. Counts are of live records, updated with
every change and never derived from seqs: deletes leave holes.

Gap rules, in order of authority:
  1. A cursor above the head belongs to an earlier topic of this name: the gap is all of this one.
  2. A cursor below E - 1 gets one gap up to there. The reason is what reached into it: `cap`, `ttl`, or `mixed` for
     both; `source_trim` where neither did and the records were lost at the source of a router.
  3. Seqs that stand for records which a router's source lost ("trims") are a gap of reason `source_trim`. Live records
     below a trim stay, and a reader meets the gap on its way. Without live records between a cursor and a trim it is
     one gap with the losses before it.
  4. Everything else that is missing was deleted or never existed: no gap.

Hold rules, in order of authority:
  1. A floor never falls. A hold whose cursor is below the floor is broken: unread records are lost. It holds nothing
     until the group moves past the loss, by a commit or a reset.
  2. The slowest group whose quota suffices decides. A group whose quota does not is skipped: its hold breaks.
  3. A topic that rejects writes evicts nothing, so holds have no effect.

Broken holds follow from the floor and the cursor alone, which are durable; so they are the same after any restart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from tidelog.engine.memtable import BatchStats, MemTable
from tidelog.engine.segment import BoolArray, Part, Segment, SizeCount, measure_part, record_sizes
from tidelog.engine.segment_table import StoredParts
from tidelog.errors import Corrupt, Damaged
from tidelog.formats.frame import SEQ_MAX
from tidelog.types import Ints
from tidelog.wal import WalRange

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


def limit_eviction(
    index: TopicIndex, cursors: Iterable[GroupCursorState], floor: int, evict_floor: int | None = None
) -> int:
    """Return how far eviction may go of what caps or age ask for. Raises where records cannot be measured.
    `evict_floor`: as if everything below it were evicted already."""
    evict_floor = index.evict_floor if evict_floor is None else evict_floor
    earliest = max(index.earliest, evict_floor)
    for cursor in sorted((cursor for cursor in cursors if cursor.hold_bytes), key=lambda cursor: cursor.seq):
        first = cursor.seq + 1
        if first >= floor:
            return floor
        if cursor.is_hold_broken(evict_floor):
            continue
        if index.measure(max(first, earliest), floor).bytes <= cursor.hold_bytes:
            return first
    return floor


def find_broken_holds(cursors: Mapping[str, GroupCursorState], before: int, after: int) -> list[str]:
    """Return the groups whose holds break when the evict floor moves from `before` to `after`."""
    return sorted(
        name for name, cursor in cursors.items() if cursor.is_hold_broken(after) and not cursor.is_hold_broken(before)
    )


class Slice(NamedTuple):
    """Seqs [first, stop) of one part."""

    part: Part
    first: int
    stop: int

    @property
    def lo(self) -> int:
        return self.first - self.part.base

    @property
    def hi(self) -> int:
        return self.stop - self.part.base

    def deleted(self) -> BoolArray | None:
        """One flag per seq; None: none is deleted. Valid while the topic's lock is held."""
        mask = self.part.deleted_mask()
        return None if mask is None else mask[self.lo : self.hi]

    def first_live(self) -> int | None:
        """The first seq that is not deleted; None: all are."""
        flags = self.deleted()
        if flags is None:
            return self.first
        live = int(flags.argmin())  # stops at the first live one
        return None if flags[live] else self.first + live

    def last_live(self) -> int | None:
        """The last seq that is not deleted; None: all are, or there is none."""
        if self.stop <= self.first:
            return None
        flags = self.deleted()
        if flags is None:
            return self.stop - 1
        live = int(flags[::-1].argmin())
        return None if flags[::-1][live] else self.stop - 1 - live


def _count_older(part: Part, first: int, stop: int, before_ms: int) -> int:
    """Return how many of the records [first, stop) are older than `before_ms`."""
    ts = part.entries()["ts"][first - part.base : stop - part.base]
    count = int(np.searchsorted(ts, before_ms))
    if not count or not isinstance(part, Segment) or part.is_index_verified:
        return count
    # One frame decides: reading it verifies its time against the index.
    rebuilt = part.rebuilt_index
    fault = part.reader(first + count - 1, first + count, 1)().fault
    if fault is not None:
        raise Corrupt(part.path(".idx"), pos=fault.pos, reason=fault.reason)
    if part.rebuilt_index is rebuilt:
        return count
    ts = part.entries()["ts"][first - part.base : stop - part.base]  # the index was wrong and was rebuilt
    return int(np.searchsorted(ts, before_ms))


class TopicIndex:
    def __init__(self) -> None:
        self.parts: list[Segment | MemTable] = []
        self.has_ephemeral_parts = False  # whether any part was, since the topic was opened
        self.head = 0
        self.earliest = 1
        self.watermarks = Watermarks()
        self.count = 0
        self.bytes = 0
        self.last_ts = 0
        self.deleted_ranges: list[tuple[int, int]] = []  # seqs [lo, hi) of deleted records that no part has any more
        self.trimmed_ranges: list[tuple[int, int]] = []  # seqs [lo, hi) of records that a router's source lost
        self.removal_count = 0  # removals so far, of any kind
        self.forwarded_seq = SEQ_MAX  # routers have not forwarded later seqs: deletions there are remembered

    @property
    def evict_floor(self) -> int:
        return self.watermarks.evict_floor

    # ── appending ───────────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        first: int,
        frames: list[bytes],
        count: int,
        weight: int,
        ts_ms: int,
        *,
        persistent: bool,
        last_ts: int = 0,
        stats: BatchStats | None = None,
    ) -> MemTable:
        """Make records visible. Their seqs follow the head; a jump leaves holes and starts another segment."""
        memtable = self.open_memtable(first, persistent=persistent)
        memtable.add(frames, count, weight, ts_ms, last_ts or ts_ms, stats)
        self._advance_head(first, count, weight, max(ts_ms, last_ts))
        return memtable

    def publish_stored(
        self, first: int, pieces: list[WalRange], stats: BatchStats, weight: int, ts_ms: int
    ) -> MemTable:
        """`publish` of records that stay in the WAL."""
        memtable = self.open_memtable(first, persistent=True)
        memtable.add_stored(pieces, stats, weight, ts_ms)
        self._advance_head(first, len(stats.lengths), weight, ts_ms)
        return memtable

    def publish_indexed(
        self, first: int, pieces: list[WalRange], entries: bytes, count: int, weight: int, first_ts: int, last_ts: int
    ) -> MemTable:
        """`publish` of replayed records that stay in the WAL, with their index."""
        memtable = self.open_memtable(first, persistent=True)
        memtable.add_indexed(pieces, entries, count, weight, first_ts, last_ts)
        self._advance_head(first, count, weight, last_ts)
        return memtable

    def _advance_head(self, first: int, count: int, weight: int, ts_ms: int) -> None:
        assert first > self.head, "publish order is seq order"
        if self.earliest == self.head + 1:
            self.earliest = first
        self.head = first + count - 1
        self.last_ts = max(self.last_ts, ts_ms)
        self.count += count
        self.bytes += weight

    def open_memtable(self, first: int, *, persistent: bool) -> MemTable:
        """Return the memtable for record `first`: the last one, or a new one if seqs jump or none is open."""
        self.has_ephemeral_parts |= not persistent
        last = self.parts[-1] if self.parts else None
        if (
            isinstance(last, MemTable)
            and last.stop == first
            and last.is_persistent == persistent
            and not last.is_frozen
        ):
            return last
        if isinstance(last, MemTable) and last.stop == first and last.is_persistent and persistent:
            self.parts.append(MemTable(first, segment=last.segment, origin=last.origin + last.size, persistent=True))
            return self.parts[-1]  # type: ignore[return-value]
        if last is not None and last.base == last.stop:
            self.parts.pop()  # an empty segment that does not begin here
            return self._start_segment(first, persistent=persistent)
        if isinstance(last, Segment) and not last.is_sealed and last.stop == first and persistent:
            memtable = MemTable(first, segment=last.base, origin=last.size, persistent=True)
        else:
            return self._start_segment(first, persistent=persistent)
        self.parts.append(memtable)
        return memtable

    def _start_segment(self, first: int, *, persistent: bool) -> MemTable:
        self.parts.append(MemTable(first, segment=first, origin=0, persistent=persistent))
        return self.parts[-1]  # type: ignore[return-value]

    def roll_segment(self) -> None:
        """Start another segment with the next record."""
        last = self.parts[-1] if self.parts else None
        if last is not None and last.stop > last.base and not (isinstance(last, Segment) and last.is_sealed):
            self._start_segment(self.head + 1, persistent=not isinstance(last, MemTable) or last.is_persistent)

    def active_segment_created_ms(self) -> int | None:
        """The time of the first record of the active segment; None if it has none."""
        last = self.parts[-1] if self.parts else None
        if last is None or last.stop == last.base or (isinstance(last, Segment) and last.is_sealed):
            return None
        if isinstance(last, MemTable) and last.segment != last.base:
            return next(part.first_ts for part in reversed(self.parts) if part.base == last.segment)
        return last.first_ts

    def reserve_up_to(self, head: int) -> None:
        """Turn seqs up to `head`, which may have been assigned, into holes that are never assigned again."""
        if self.earliest == self.head + 1:
            self.earliest = max(self.earliest, head + 1)
        self.head = max(self.head, head)

    def add_trimmed_range(self, lo: int, hi: int) -> None:
        """Add seqs [lo, hi), after the head, of records that were lost before they arrived. Readers get a gap there;
        records below stay."""
        assert lo > self.head, "a trim takes the next seqs"
        if self.trimmed_ranges and self.trimmed_ranges[-1][1] == lo:
            lo = self.trimmed_ranges.pop()[0]
        self.trimmed_ranges.append((lo, hi))
        self.reserve_up_to(hi - 1)

    def drop_trimmed_below(self, below: int) -> None:
        """Forget trims below the evict floor: a reader gets one gap up to the floor."""
        below = min(below, self.evict_floor)
        self.trimmed_ranges = [span for span in self.trimmed_ranges if span[1] > below]

    # ── queries ───────────────────────────────────────────────────────────────────────────────

    def slices(self, first: int, stop: int) -> Iterator[Slice]:
        """Yield the slices of [first, stop), in order. Seqs between them are holes."""
        for part in self._parts_from(self._find_index(first)):
            if part.base >= stop:
                return
            lo, hi = max(first, part.base), min(stop, part.stop)
            if lo < hi:
                yield Slice(part, lo, hi)

    def slices_since(self, ts_ms: int, first: int, stop: int) -> Iterator[Slice]:
        """`slices` without parts whose records are all older than a time."""
        if isinstance(self.parts, StoredParts):
            at = self.parts.index_since(ts_ms)
            first = max(first, self.parts[at].base) if at < len(self.parts) else stop
        return (each for each in self.slices(first, stop) if each.part.last_ts >= ts_ms)

    def _find_index(self, seq: int) -> int:
        """Return the index of the last part that begins at or before a seq; 0 if none does."""
        if isinstance(self.parts, StoredParts):
            return self.parts.index_at(seq)
        return max(bisect_right(self.parts, seq, key=lambda part: part.base) - 1, 0)

    def _parts_from(self, start: int) -> Iterator[Segment | MemTable]:
        if isinstance(self.parts, StoredParts):
            return (self.parts[at] for at in range(start, len(self.parts)))
        return iter(self.parts[start:])

    def find_part(self, seq: int) -> Segment | MemTable | None:
        """Return the part with this seq; None: it is a hole."""
        if not self.parts:
            return None
        part = self.parts[-1]  # mostly the last one
        if part.base > seq:
            part = self.parts[self._find_index(seq)]
        return part if part.base <= seq < part.stop else None

    def measure(self, first: int, stop: int) -> SizeCount:
        """Return the size of live records in [first, stop), without regard to floors."""
        if isinstance(self.parts, StoredParts):
            return self.parts.measure(first, stop)
        sizes = [measure_part(part, lo - part.base, hi - part.base) for part, lo, hi in self.slices(first, stop)]
        return SizeCount(sum(size.records for size in sizes), sum(size.bytes for size in sizes))

    def on_recounted(self, stop: int, recounted: SizeCount) -> None:
        """Correct the counts: the segment up to `stop` has so many live records more than the manifest says."""
        if stop > self.earliest:
            self.count += recounted.records
            self.bytes += recounted.bytes

    # ── floors ────────────────────────────────────────────────────────────────────────────────

    def _raise_earliest(self, seq: int, marks: Watermarks | None = None) -> SizeCount:
        """Remove everything below `seq`: earliest moves there and past deleted records after it, and the watermarks are
        replaced. If records cannot be measured, nothing changes."""
        seq = min(seq, self.head + 1)
        removed = self.measure(self.earliest, seq) if seq > self.earliest else SizeCount(0, 0)
        self.watermarks = marks or self.watermarks
        if seq <= self.earliest:
            return removed
        self.count -= removed.records
        self.bytes -= removed.bytes
        self.removal_count += removed.records > 0
        self.earliest = seq
        self.skip_deleted()
        return removed

    def skip_deleted(self) -> None:
        """Move earliest to the first live record."""
        if self.count == 0:
            self.earliest = self.head + 1
            return
        for part in self.slices(self.earliest, self.head + 1):
            if (first := part.first_live()) is not None:
                self.earliest = first
                return

    def evict(self, seq: int, cause: str) -> SizeCount:
        """Lose the records below `seq` to a cap or to age. Readers below it get a gap."""
        if seq <= self.evict_floor:
            return SizeCount(0, 0)
        assert seq <= self.head + 1, "only written records can be lost"
        return self._raise_earliest(seq, self.watermarks.raise_to(cause, seq - 1))

    def delete_before(self, seq: int) -> SizeCount:
        return self._raise_earliest(seq)

    def delete(self, seqs: Ints, weights: Ints | None = None) -> SizeCount:
        """Delete these ascending seqs; missing or deleted ones do not count. `weights`: the bytes of each, if known."""
        exists = (seqs >= self.earliest) & (seqs <= self.head)
        seqs, weights = seqs[exists], None if weights is None else weights[exists]
        count = size = 0
        if len(seqs):
            for part, first, stop in self.slices(int(seqs[0]), int(seqs[-1]) + 1):
                lo, hi = np.searchsorted(seqs, (first, stop))
                if lo < hi:
                    removed = part.mark_deleted(seqs[lo:hi] - part.base, None if weights is None else weights[lo:hi])
                    count, size = count + removed.records, size + removed.bytes
        self.count -= count
        self.bytes -= size
        if count:
            self.removal_count += 1
            self.skip_deleted()
        return SizeCount(count, size)

    def delete_few(self, seqs: Iterable[int]) -> SizeCount:
        """`delete` of a few seqs, where arrays would cost more than the work."""
        count = size = 0
        part: Part | None = None
        try:
            for seq in seqs:
                if not self.earliest <= seq <= self.head:
                    continue
                if part is None or not part.base <= seq < part.stop:
                    part = self.find_part(seq)
                removed = None if part is None else part.mark_deleted_one(seq - part.base)
                if removed is not None:
                    count, size = count + 1, size + removed
        finally:
            self.count -= count
            self.bytes -= size
            if count:
                self.removal_count += 1
                self.skip_deleted()
        return SizeCount(count, size)

    def live_seqs(self, seqs: Ints) -> Ints:
        """Return those of these ascending seqs that have a live record."""
        seqs = seqs[(seqs >= self.earliest) & (seqs <= self.head)]
        live = [seqs[:0]]
        for part, first, stop in self.slices(int(seqs[0]), int(seqs[-1]) + 1) if len(seqs) else ():
            lo, hi = np.searchsorted(seqs, (first, stop))
            candidates, deleted = seqs[lo:hi], part.deleted_mask()
            live.append(candidates if deleted is None else candidates[~deleted[candidates - part.base]])
        return np.concatenate(live)

    def floor_for_caps(self, cap_records: int, cap_bytes: int, head: int | None = None) -> int:
        """Return the floor that brings the topic under its caps; 0 if it is. `head`: count records up to there only."""
        if head is None or head >= self.head:
            head, size = self.head, SizeCount(self.count, self.bytes)
        else:
            size = self.measure(self.earliest, head + 1) if cap_records or cap_bytes else SizeCount(0, 0)
        excess_records = max(size.records - cap_records, 0) if cap_records else 0
        excess_bytes = max(size.bytes - cap_bytes, 0) if cap_bytes else 0
        if not excess_records and not excess_bytes:
            return 0
        for part, first, stop in self.slices(self.earliest, head + 1):
            lo, hi = first - part.base, stop - part.base
            if hi - lo == part.stop - part.base and (
                part.live_records < excess_records or part.live_bytes < excess_bytes
            ):
                excess_records, excess_bytes = (
                    max(excess_records - part.live_records, 0),
                    max(excess_bytes - part.live_bytes, 0),
                )
                continue  # all of it goes, and its totals are known
            step = 64
            while lo < hi:
                # In windows: a full cap evicts a few records with every write.
                end = min(lo + step, hi)
                sizes, deleted = record_sizes(part, lo, end), part.deleted_mask()
                live = np.ones(end - lo, bool) if deleted is None else ~deleted[lo:end]
                counts, weights = np.cumsum(live), np.cumsum(np.where(live, sizes, 0))
                enough = np.flatnonzero((counts >= excess_records) & (weights >= excess_bytes))
                if len(enough):
                    return part.base + lo + int(enough[0]) + 1
                excess_records, excess_bytes = (
                    max(excess_records - int(counts[-1]), 0),
                    max(excess_bytes - int(weights[-1]), 0),
                )
                lo, step = end, step * 4
        return head + 1

    def oldest_record_ms(self) -> int | None:
        """A lower bound of the time of live records; None if there are none."""
        if not self.count:
            return None
        oldest = next(self.slices(self.earliest, self.head + 1), None)
        if oldest is None:
            return None
        try:
            return int(oldest.part.entries()["ts"][oldest.lo]) if oldest.lo else oldest.part.first_ts
        except Damaged:
            return oldest.part.first_ts  # still a lower bound

    def floor_for_age(self, before_ms: int) -> int:
        """Return one past the last live record older than `before_ms`. Times do not fall, so all before it are older
        too; deleted records after it are no part of the gap. Raises Corrupt where this depends on an index that its
        frame contradicts."""
        older: list[Slice] = []
        for each in self.slices(self.earliest, self.head + 1):
            if each.part.last_ts >= before_ms:
                if each.part.first_ts < before_ms:
                    count = _count_older(each.part, each.first, each.stop, before_ms)
                    older.append(each._replace(stop=each.first + count))
                break
            older.append(each)
        return next((last + 1 for each in reversed(older) if (last := each.last_live()) is not None), 0)

    def drop_parts(self, dropped: Sequence[Segment | MemTable]) -> None:
        """Drop parts without live records. Their ranges are remembered as deleted, not as holes."""
        self.parts = [part for part in self.parts if part not in dropped]
        merged: list[tuple[int, int]] = []
        for lo, hi in sorted([*self.deleted_ranges, *((part.base, part.stop) for part in dropped)]):
            lo = max(lo, min(self.evict_floor, self.forwarded_seq + 1))  # the floor accounts for lost records
            if lo >= hi:
                continue
            if merged and merged[-1][1] >= lo:
                merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
            else:
                merged.append((lo, hi))
        self.deleted_ranges = merged

    def drop_empty_memtables(self) -> None:
        """Drop ephemeral memtables without live records."""
        obsolete = self.obsolete_segments()
        self.drop_parts(
            [
                part
                for part in self.parts
                if isinstance(part, MemTable) and not part.is_persistent and part.segment in obsolete
            ]
        )

    def count_assigned(self, first: int, stop: int) -> int:
        """Return how many seqs of [first, stop) ever had an acknowledged record; the others are holes."""
        deleted = sum(max(min(hi, stop) - max(lo, first), 0) for lo, hi in self.deleted_ranges)
        if isinstance(self.parts, StoredParts):
            return deleted + self.parts.count_seqs(first, stop)
        return deleted + sum(max(min(part.stop, stop) - max(part.base, first), 0) for part in self.parts)

    def obsolete_segments(self) -> set[int]:
        """Return the bases of segments without live records: below earliest, or all deleted. The active one is never
        obsolete."""
        stops: dict[int, int] = {}
        live: dict[int, int] = {}
        for part in self.parts:
            base = part.segment if isinstance(part, MemTable) else part.base
            stops[base] = part.stop
            live[base] = live.get(base, 0) + part.live_records
        obsolete = {base for base, stop in stops.items() if stop <= self.earliest or not live[base]}
        return obsolete - {self.active_segment_base()}

    def active_segment_base(self) -> int | None:
        """The base of the segment of the next record; None: a new one."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, MemTable):
            return last.segment
        return None if last is None or last.is_sealed else last.base
