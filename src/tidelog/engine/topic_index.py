"""[hot] What a topic holds, in memory: its parts, its floors, its counts. Its owner's lock guards all of it.

    1        evict floor      earliest                head      tail
    ├────────────┼────────────────┼─────────────────────┼─────────┤
    │ lost       │ deleted        │ live, with holes    │ on its way to the WAL
    └ a gap for  └ silent         └ readable            └ assigned, not visible yet
      readers

evict floor ≤ earliest ≤ head + 1, and none of them falls. Counts are of live records, kept up with
every change and never derived from seqs: deletes leave holes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tidelog.engine.memtable import BatchStats, MemTable
from tidelog.engine.segment import Part, Segment, SizeCount, measure_part, record_sizes
from tidelog.engine.watermarks import Watermarks
from tidelog.errors import Corrupt, Damaged
from tidelog.formats.frame import SEQ_MAX
from tidelog.types import Ints
from tidelog.wal import WalRange


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


def _count_older(part: Part, first: int, stop: int, before_ms: int) -> int:
    """How many of the records [first, stop) are older than `before_ms`."""
    ts = part.entries()["ts"][first - part.base : stop - part.base]
    found = int(np.searchsorted(ts, before_ms))
    if not found or not isinstance(part, Segment) or part.is_index_verified:
        return found
    # One frame decides: it is verified, and its time compared with that of the index.
    rebuilt = part.rebuilt_index
    fault = part.reader(first + found - 1, first + found, 1)().fault
    if fault is not None:
        raise Corrupt(part.files.path(part.base, ".idx"), pos=fault.pos, reason=fault.reason)
    if part.rebuilt_index is rebuilt:
        return found
    ts = part.entries()["ts"][first - part.base : stop - part.base]  # the index was wrong, and is made again
    return int(np.searchsorted(ts, before_ms))


class TopicIndex:
    def __init__(self) -> None:
        self.parts: list[Segment | MemTable] = []
        self.head = 0
        self.earliest = 1
        self.watermarks = Watermarks()
        self.count = 0
        self.bytes = 0
        self.last_ts = 0
        self.deleted_ranges: list[tuple[int, int]] = []  # seqs [lo, hi) of records that no part has any more
        self.trimmed_ranges: list[
            tuple[int, int]
        ] = []  # seqs [lo, hi) that stand for records which a router's source lost
        self.removal_count = 0  # how often records have gone, in whatever way
        self.forwarded_seq = SEQ_MAX  # routers have yet to pass on what lies behind it: what was there is remembered

    @property
    def evict_floor(self) -> int:
        return self.watermarks.evict_floor

    # ── growing ───────────────────────────────────────────────────────────────────────────────

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
        """Make records visible. Their seqs are behind the head; a jump leaves holes and starts another segment."""
        block = self.open_memtable(first, persistent=persistent)
        block.add(frames, count, weight, ts_ms, last_ts or ts_ms, stats)
        self._advance_head(first, count, weight, max(ts_ms, last_ts))
        return block

    def publish_stored(
        self, first: int, pieces: list[WalRange], stats: BatchStats, weight: int, ts_ms: int
    ) -> MemTable:
        """`publish` of records that stay where the WAL has them."""
        block = self.open_memtable(first, persistent=True)
        block.add_stored(pieces, stats, weight, ts_ms)
        self._advance_head(first, len(stats.lengths), weight, ts_ms)
        return block

    def publish_indexed(
        self, first: int, pieces: list[WalRange], entries: bytes, count: int, weight: int, first_ts: int, last_ts: int
    ) -> MemTable:
        """`publish` of replayed records that stay where the WAL has them, with their index."""
        block = self.open_memtable(first, persistent=True)
        block.add_indexed(pieces, entries, count, weight, first_ts, last_ts)
        self._advance_head(first, count, weight, last_ts)
        return block

    def _advance_head(self, first: int, count: int, weight: int, ts_ms: int) -> None:
        assert first > self.head, "publish order is seq order"
        if self.earliest == self.head + 1:
            self.earliest = first
        self.head = first + count - 1
        self.last_ts = max(self.last_ts, ts_ms)
        self.count += count
        self.bytes += weight

    def open_memtable(self, first: int, *, persistent: bool) -> MemTable:
        """The block that takes the record `first`: the last one, or a new one where seqs jump or none is open."""
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
            self.parts.pop()  # rolled over to a segment that will not begin here
            return self._start_segment(first, persistent=persistent)
        if isinstance(last, Segment) and not last.is_sealed and last.stop == first and persistent:
            block = MemTable(first, segment=last.base, origin=last.size, persistent=True)
        else:
            return self._start_segment(first, persistent=persistent)
        self.parts.append(block)
        return block

    def _start_segment(self, first: int, *, persistent: bool) -> MemTable:
        self.parts.append(MemTable(first, segment=first, origin=0, persistent=persistent))
        return self.parts[-1]  # type: ignore[return-value]

    def roll_segment(self) -> None:
        """The next record starts another segment."""
        last = self.parts[-1] if self.parts else None
        if last is not None and last.stop > last.base and not (isinstance(last, Segment) and last.is_sealed):
            self._start_segment(self.head + 1, persistent=not isinstance(last, MemTable) or last.is_persistent)

    def active_segment_created_ms(self) -> int | None:
        """When the segment that grows got its first record; None where it has none."""
        last = self.parts[-1] if self.parts else None
        if last is None or last.stop == last.base or (isinstance(last, Segment) and last.is_sealed):
            return None
        if isinstance(last, MemTable) and last.segment != last.base:
            return next(part.first_ts for part in reversed(self.parts) if part.base == last.segment)
        return last.first_ts

    def reserve_up_to(self, head: int) -> None:
        """Seqs up to `head` may have been handed out: they become holes and are never given to anybody else."""
        if self.earliest == self.head + 1:
            self.earliest = max(self.earliest, head + 1)
        self.head = max(self.head, head)

    def add_trimmed_range(self, lo: int, hi: int) -> None:
        """Seqs [lo, hi), after the head, stand for records that were lost before they came here. Readers get a gap
        there; what is below stays."""
        assert lo > self.head, "a trim takes seqs as a record does"
        if self.trimmed_ranges and self.trimmed_ranges[-1][1] == lo:
            lo = self.trimmed_ranges.pop()[0]
        self.trimmed_ranges.append((lo, hi))
        self.reserve_up_to(hi - 1)

    def drop_trimmed_below(self, below: int) -> None:
        """Let go of trims below a seq that the evict floor covers: a reader gets one gap up to the floor."""
        below = min(below, self.evict_floor)
        self.trimmed_ranges = [span for span in self.trimmed_ranges if span[1] > below]

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def slices(self, first: int, stop: int) -> Iterator[Slice]:
        """The parts of [first, stop), in order. Seqs between them are holes."""
        at = max(bisect_right(self.parts, first, key=lambda part: part.base) - 1, 0)
        for part in self.parts[at:]:
            if part.base >= stop:
                return
            lo, hi = max(first, part.base), min(stop, part.stop)
            if lo < hi:
                yield Slice(part, lo, hi)

    def find_part(self, seq: int) -> Segment | MemTable | None:
        """The part that has this seq; None: it is a hole."""
        for part in reversed(self.parts):  # who asks mostly means one of the last
            if part.base <= seq:
                return part if seq < part.stop else None
        return None

    def measure(self, first: int, stop: int) -> SizeCount:
        """What live records in [first, stop) there are, floors not looked at."""
        found = [measure_part(part, lo - part.base, hi - part.base) for part, lo, hi in self.slices(first, stop)]
        return SizeCount(sum(weight.records for weight in found), sum(weight.bytes for weight in found))

    # ── floors ────────────────────────────────────────────────────────────────────────────────

    def _raise_earliest(self, seq: int, marks: Watermarks | None = None) -> SizeCount:
        """Everything below `seq` is gone: earliest moves there, and over what is dead after it; and so do the marks of
        what was lost. Where it cannot be counted nothing moves."""
        seq = min(seq, self.head + 1)
        gone = self.measure(self.earliest, seq) if seq > self.earliest else SizeCount(0, 0)
        self.watermarks = marks or self.watermarks
        if seq <= self.earliest:
            return gone
        self.count -= gone.records
        self.bytes -= gone.bytes
        self.removal_count += gone.records > 0
        self.earliest = seq
        self.skip_deleted()
        return gone

    def skip_deleted(self) -> None:
        """Move earliest to the first record that lives."""
        if self.count == 0:
            self.earliest = self.head + 1
            return
        for part, first, stop in self.slices(self.earliest, self.head + 1):
            dead = part.deleted_mask()
            if dead is None:
                self.earliest = max(self.earliest, first)
                return
            flags = dead[first - part.base : stop - part.base]
            living = int(flags.argmin())  # which looks no further than the first
            if not flags[living]:
                self.earliest = first + living
                return

    def evict(self, seq: int, cause: str) -> SizeCount:
        """Records below `seq` are lost to a cap or to their age. Readers behind will be told."""
        if seq <= self.evict_floor:
            return SizeCount(0, 0)
        assert seq <= self.head + 1, "what was never written is not lost"
        return self._raise_earliest(seq, self.watermarks.raise_to(cause, seq - 1))

    def delete_before(self, seq: int) -> SizeCount:
        return self._raise_earliest(seq)

    def delete(self, seqs: Ints, weights: Ints | None = None) -> SizeCount:
        """Delete these seqs, rising; those that are not there or gone already do not count. `weights`: the bytes of
        each, where they are known."""
        there = (seqs >= self.earliest) & (seqs <= self.head)
        seqs, weights = seqs[there], None if weights is None else weights[there]
        count = size = 0
        if len(seqs):
            for part, first, stop in self.slices(int(seqs[0]), int(seqs[-1]) + 1):
                lo, hi = np.searchsorted(seqs, (first, stop))
                if lo < hi:
                    gone = part.mark_deleted(seqs[lo:hi] - part.base, None if weights is None else weights[lo:hi])
                    count, size = count + gone.records, size + gone.bytes
        self.count -= count
        self.bytes -= size
        if count:
            self.removal_count += 1
            self.skip_deleted()
        return SizeCount(count, size)

    def delete_few(self, seqs: Iterable[int]) -> SizeCount:
        """`delete` of a handful, where arrays would cost more than the work."""
        count = size = 0
        part: Part | None = None
        try:
            for seq in seqs:
                if not self.earliest <= seq <= self.head:
                    continue
                if part is None or not part.base <= seq < part.stop:
                    part = self.find_part(seq)
                gone = None if part is None else part.mark_deleted_one(seq - part.base)
                if gone is not None:
                    count, size = count + 1, size + gone
        finally:
            self.count -= count
            self.bytes -= size
            if count:
                self.removal_count += 1
                self.skip_deleted()
        return SizeCount(count, size)

    def live_seqs(self, seqs: Ints) -> Ints:
        """Those of these seqs, rising, that have a record that is there."""
        seqs = seqs[(seqs >= self.earliest) & (seqs <= self.head)]
        found = [seqs[:0]]
        for part, first, stop in self.slices(int(seqs[0]), int(seqs[-1]) + 1) if len(seqs) else ():
            lo, hi = np.searchsorted(seqs, (first, stop))
            mine, dead = seqs[lo:hi], part.deleted_mask()
            found.append(mine if dead is None else mine[~dead[mine - part.base]])
        return np.concatenate(found)

    def floor_for_caps(self, cap_records: int, cap_bytes: int, head: int | None = None) -> int:
        """The floor that brings the topic back under its caps; evict_floor or less where it is under them. `head`:
        only records up to there count."""
        if head is None or head >= self.head:
            head, held = self.head, SizeCount(self.count, self.bytes)
        else:
            held = self.measure(self.earliest, head + 1) if cap_records or cap_bytes else SizeCount(0, 0)
        excess = max(held.records - cap_records, 0) if cap_records else 0
        heavy = max(held.bytes - cap_bytes, 0) if cap_bytes else 0
        if not excess and not heavy:
            return 0
        for part, first, stop in self.slices(self.earliest, head + 1):
            lo, hi = first - part.base, stop - part.base
            if hi - lo == part.stop - part.base and (part.live_records < excess or part.live_bytes < heavy):
                excess, heavy = max(excess - part.live_records, 0), max(heavy - part.live_bytes, 0)
                continue  # all of it goes, and its figures are known
            step = 64
            while lo < hi:
                # A window at a time: a cap that is full evicts a few records with every write.
                end = min(lo + step, hi)
                size, dead = record_sizes(part, lo, end), part.deleted_mask()
                live = np.ones(end - lo, bool) if dead is None else ~dead[lo:end]
                counts, weights = np.cumsum(live), np.cumsum(np.where(live, size, 0))
                enough = np.flatnonzero((counts >= excess) & (weights >= heavy))
                if len(enough):
                    return part.base + lo + int(enough[0]) + 1
                excess, heavy = max(excess - int(counts[-1]), 0), max(heavy - int(weights[-1]), 0)
                lo, step = end, step * 4
        return head + 1

    def oldest_record_ms(self) -> int | None:
        """A time that no live record is older than; None where there is none."""
        if not self.count:
            return None
        found = next(self.slices(self.earliest, self.head + 1), None)
        if found is None:
            return None
        try:
            return int(found.part.entries()["ts"][found.lo]) if found.lo else found.part.first_ts
        except Damaged:
            return found.part.first_ts  # too early is good too

    def floor_for_age(self, before_ms: int) -> int:
        """One past the last record older than `before_ms`; times do not fall, so all before it are older too. Raises
        Corrupt where that hangs on an index that its frame contradicts."""
        floor = 0
        for part, first, stop in self.slices(self.earliest, self.head + 1):
            if part.last_ts < before_ms:
                floor = stop
                continue
            if part.first_ts < before_ms:
                found = _count_older(part, first, stop, before_ms)
                floor = first + found if found else floor
            break
        return floor

    def drop_parts(self, gone: Sequence[Segment | MemTable]) -> None:
        """Let go of parts of which nothing is left to read. That there were records is remembered: they were deleted,
        not holes."""
        self.parts = [part for part in self.parts if part not in gone]
        merged: list[tuple[int, int]] = []
        for lo, hi in sorted([*self.deleted_ranges, *((part.base, part.stop) for part in gone)]):
            lo = max(lo, min(self.evict_floor, self.forwarded_seq + 1))  # what was lost is accounted for by the floor
            if lo >= hi:
                continue
            if merged and merged[-1][1] >= lo:
                merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
            else:
                merged.append((lo, hi))
        self.deleted_ranges = merged

    def drop_empty_memtables(self) -> None:
        """Forget blocks that lie in no file and of which nothing is left."""
        obsolete = self.obsolete_segments()
        self.drop_parts(
            [
                part
                for part in self.parts
                if isinstance(part, MemTable) and not part.is_persistent and part.segment in obsolete
            ]
        )

    def count_assigned(self, first: int, stop: int) -> int:
        """How many seqs of [first, stop) ever had a record that was acknowledged; the others are holes."""
        spans = [*((part.base, part.stop) for part in self.parts), *self.deleted_ranges]
        return sum(max(min(hi, stop) - max(lo, first), 0) for lo, hi in spans)

    def obsolete_segments(self) -> set[int]:
        """Segments of which nothing is left to read: below earliest, or deleted to the last record. The one that
        grows stays in any case."""
        stops: dict[int, int] = {}
        alive: dict[int, int] = {}
        for part in self.parts:
            base = part.segment if isinstance(part, MemTable) else part.base
            stops[base] = part.stop
            alive[base] = alive.get(base, 0) + part.live_records
        gone = {base for base, stop in stops.items() if stop <= self.earliest or not alive[base]}
        return gone - {self.active_segment_base()}

    def active_segment_base(self) -> int | None:
        """The base of the segment that the next record goes into; None: a new one."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, MemTable):
            return last.segment
        return None if last is None or last.is_sealed else last.base
