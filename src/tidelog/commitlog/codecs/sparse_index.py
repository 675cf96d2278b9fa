"""Codecs with a sparse index: reads through the index, shared by rustlog and narwhal.

An index entry is the position of a record, so the bytes between two entries are complete records. A read fetches the
smallest such window that covers it, scans its runs in parallel, and after damage continues at the next entry.
`SparseCodec` has everything the two codecs do alike; each of them knows its index entries and its checksums.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.commitlog.codec import (
    Batch,
    Chunk,
    Codec,
    Fault,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    recovered_from_scan,
    salvage_records,
)
from tidelog.commitlog.vectorized import RecordLayout
from tidelog.errors import Corrupt
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span, empty_rows
from tidelog.types import Buffer, Ints

Checksums: TypeAlias = NDArray[np.uint32]
WindowScanner: TypeAlias = Callable[[Buffer, Ints, int], ScanResult]
"""`scan(buf, starts, ordinal)`: the records of a buffer whose first one is number `ordinal` of its segment."""


class SparseIndex(NamedTuple):
    """A sparse index: seqs and positions of the indexed records."""

    seqs: Ints
    positions: Ints
    records_per_entry: int = 0  # records between two entries; 0 where ordinals do not matter


class SparseCodec(Codec):
    """A codec whose records carry their length, with a sparse index that can be derived from them."""

    @property
    @abstractmethod
    def _layout(self) -> RecordLayout: ...

    @abstractmethod
    def _read_index(self, segment: SegmentContent) -> SparseIndex:
        """Read the index of a segment; empty where it is damaged."""

    @abstractmethod
    def _make_scanner(self, segment: SegmentContent) -> WindowScanner: ...

    @abstractmethod
    def _index_fault(self, segment: SegmentContent) -> str | None:
        """Return what is wrong with the index of a sealed segment by itself."""

    @abstractmethod
    def _last_entry_mismatch(self, segment: SegmentContent) -> str | None:
        """Describe the record that the last index entry points at, if it is not the right one."""

    @abstractmethod
    def _lacks_entries(self, tail: Rows, base: int) -> bool:
        """Whether the records from the last indexed one on should have more than one entry."""

    def _build_rows(self, buf: bytes, seq: int, ts_us: int, batch: Batch) -> Rows:
        """Describe the encoded records of a batch."""
        count, header = len(batch.datas), self._layout.header.itemsize
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        nodes = batch.node
        node_size = (
            np.full(count, len(nodes), np.int64)
            if isinstance(nodes, bytes)
            else np.fromiter(map(len, nodes), np.int64, count)
        )
        pos = np.zeros(count, np.int64)
        np.cumsum((size + node_size)[:-1] + self._layout.overhead_bytes, out=pos[1:])
        return Rows(
            buf,
            np.arange(seq, seq + count, dtype=np.int64),
            np.full(count, ts_us, np.int64),
            pos,
            Span(pos + header + node_size, size),
            Span(pos + header, node_size) if node_size.any() else None,
        )

    def _recover(self, data: Buffer, base: int, crcs: Checksums | None = None) -> RecoveredSegment:
        result = vectorized.scan_records(self._layout, data, above=base - 1, crcs=crcs)
        sides, side_state = self.encode_sides(result.rows, 0, base, self.initial_side_state(base))
        return recovered_from_scan(result, base, sides, side_state)

    def _salvage(self, data: Buffer, base: int, stop: int, crcs: Checksums | None = None) -> Salvage:
        layout, ordinal = self._layout, 0  # ordinal: of the record at the byte that is read next

        def scan_from(pos: int, above: int) -> ScanResult:
            nonlocal ordinal
            rest = None if crcs is None else crcs[ordinal:]
            result = vectorized.scan_records(layout, data, pos, above=above, crcs=rest)
            ordinal += len(result.rows)
            return result

        def find_next(pos: int, above: int) -> int:
            nonlocal ordinal
            rest = None if crcs is None else crcs[ordinal:]
            after, skipped = vectorized.find_next_record(layout, data, pos, above, stop, rest)
            ordinal += skipped
            return after

        seqs_are_known = layout.has_checksum or crcs is not None
        return salvage_records(data, base, stop, scan_from, find_next, seqs_are_known=seqs_are_known)

    def end_seq(self, segment: SegmentContent, /) -> int:
        seqs = self._read_index(segment).seqs
        if not len(seqs) or not segment.data.size:
            return segment.base
        rows = self.read(segment, int(seqs[-1]), segment.stop, 1 << 62).rows
        return int(rows.seq[-1]) + 1 if len(rows) else segment.stop

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        if segment.sides[0] is None:
            return "the index is missing", None
        fault = self._index_fault(segment)
        if fault is not None or not len(segment.index):
            return fault, None  # without entries: compaction removed every record
        # From the last indexed record on: finds a cut file without reading all of it.
        seqs, positions, records_per_entry = self._read_index(segment)
        start, first = int(positions[-1]), int(seqs[-1])
        ordinal = (len(seqs) - 1) * records_per_entry
        window = segment.data.fetch(start, segment.data.size)
        tail = self._make_scanner(segment)(window, np.zeros(1, np.int64), ordinal)
        is_misplaced = len(tail.rows) and int(tail.rows.seq[0]) < first
        if is_misplaced or (tail.stop is not ScanStop.END and self._last_entry_mismatch(segment)):
            return "its last entry points at another record", None
        if self._lacks_entries(tail.rows, segment.base):
            return "its last entries are missing", None
        if tail.stop is ScanStop.END:
            return None, None
        seq = int(tail.rows.seq[-1]) + 1 if len(tail.rows) else first
        return None, Fault(min(seq, segment.stop - 1), segment.stop, start + tail.end, tail.reason)

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        seqs, positions, records_per_entry = self._read_index(segment)
        size = segment.data.size
        if size == 0 and len(seqs) == 0:
            return Chunk(empty_rows(), stop)  # compaction removed every record
        if size == 0 or len(seqs) == 0:
            reason = "the data is empty or missing and the index is not" if size == 0 else "the index is empty"
            return Chunk(empty_rows(), first, Fault(first, max(stop, first + 1), 0, reason))
        scan = _stop_at_segment_end(self._make_scanner(segment), segment.stop)
        entry = max(int(np.searchsorted(seqs, first, "right")) - 1, 0)
        low = int(positions[entry])
        last = int(np.searchsorted(seqs, stop, "left"))
        budget = int(np.searchsorted(positions, low + bytes_max, "left"))
        last = max(min(last, budget), entry + 1)
        at_end = last >= len(seqs)
        high = size if at_end else int(positions[last])
        window = memoryview(segment.data.fetch(low, high))
        result = scan(window, positions[entry:last] - low, entry * records_per_entry)
        if len(window) < high - low:
            rows = result.rows.between(first, stop)
            if len(rows):
                return Chunk(rows, int(rows.seq[-1]) + 1)
            reason = "the file lost bytes that were written"
            return Chunk(empty_rows(), first, Fault(first, segment.stop, low + len(window), reason))
        end = stop if at_end else min(int(seqs[last]), stop)
        if _matches_index(result, seqs, entry):
            return Chunk(result.rows.between(first, stop), end)
        complete = scan(segment.data.fetch(0, size), positions[:0], 0)
        if complete.stop is ScanStop.END:
            # The index is wrong: it does not match the data, and the data is complete.
            return Chunk(complete.rows.between(first, stop), stop)
        end_seq = int(seqs[entry + 1]) if entry + 1 < len(seqs) else segment.stop
        ordinal, expected = entry * records_per_entry, int(seqs[entry])
        for rows, fault in _split_at_damage(window, scan, self._layout, ordinal, expected, end_seq):
            wanted = rows.between(first, stop)
            if len(wanted) or fault is None:
                # The good records now, the damage with the next read.
                return Chunk(wanted, end if fault is None else min(fault.seq, stop))
            if fault.seq >= stop:
                return Chunk(empty_rows(), stop)
            if fault.resume > first:
                return Chunk(empty_rows(), first, fault._replace(seq=max(fault.seq, first), pos=low + fault.pos))
        raise AssertionError("the last part ends the window")

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        seqs, positions, records_per_entry = self._read_index(segment)
        if len(seqs) == 0 or segment.data.size == 0:
            return 0, None
        entry = max(int(np.searchsorted(seqs, seq, "right")) - 1, 0)
        low = int(positions[entry])
        high = int(positions[entry + 1]) if entry + 1 < len(seqs) else segment.data.size
        scan = self._make_scanner(segment)
        result = scan(segment.data.fetch(low, high), np.zeros(1, np.int64), entry * records_per_entry)
        before = int(np.searchsorted(result.rows.seq, seq))
        if before == len(result.rows) and result.stop is not ScanStop.END:
            raise Corrupt("segment", pos=low + result.end, reason=result.reason)
        return low + (int(result.rows.frame_pos[before]) if before < len(result.rows) else result.end), None

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        seqs = self._read_index(segment).seqs
        if not len(seqs):
            return None
        head = self.read(segment, segment.base, segment.stop, 1).rows
        tail = self.read(segment, int(seqs[-1]), segment.stop, 1 << 62).rows
        return (int(head.ts_us[0]), int(tail.ts_us[-1])) if len(head) and len(tail) else None


def _stop_at_segment_end(scan: WindowScanner, stop: int) -> WindowScanner:
    """Let a scan end as bad at a record whose seq is past its segment."""

    def checked(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
        result = scan(buf, starts, ordinal)
        rows = result.rows
        if not len(rows) or int(rows.seq[-1]) < stop:
            return result
        keep = int(np.searchsorted(rows.seq, stop))
        return ScanResult(
            rows.slice(0, keep), int(rows.frame_pos[keep]), ScanStop.BAD, "its seq is outside its segment"
        )

    return checked


def _split_at_damage(
    window: memoryview, scan: WindowScanner, layout: RecordLayout, ordinal: int, expected: int, end_seq: int
) -> Iterator[tuple[Rows, Fault | None]]:
    """Yield the good records of a window and the damage after each part of them. A record whose length leads to a good
    one is skipped alone; otherwise reading continues at the next index entry (`end_seq`)."""
    start = np.zeros(1, np.int64)
    at, result = 0, scan(window, start, ordinal)
    while result.stop is not ScanStop.END:
        rows, reason, pos = result.rows, result.reason, at + result.end
        bad = int(rows.seq[-1]) + 1 if len(rows) else expected
        size = layout.size_at(window, pos)
        at, ordinal = pos + size, ordinal + len(rows) + 1
        result = scan(window[at:], start, ordinal) if size and at < len(window) else scan(window[:0], start, 0)
        resume = int(result.rows.seq[0]) if len(result.rows) else end_seq
        is_skipped = bad < resume < end_seq
        yield rows, Fault(bad, resume if is_skipped else end_seq, pos, reason)
        if not is_skipped:
            return
        expected = resume
    yield result.rows, None


def _matches_index(result: ScanResult, seqs: Ints, entry: int) -> bool:
    """Whether a window ended cleanly and starts with the indexed record. The first entry of a segment may be for a
    record that was compacted."""
    if result.stop is not ScanStop.END or not len(result.rows):
        return False
    first = int(result.rows.seq[0])
    return first == int(seqs[entry]) or (entry == 0 and first > int(seqs[0]))
