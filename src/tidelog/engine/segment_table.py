"""Segments of a topic as columns, for readers that plan over many and open few.

    manifest row ── bytes of the segment rows ──► SegmentTable: base, stop, size, … as arrays, 90 bytes a segment
                                                    └── StoredParts: the list `TopicIndex.parts`; an element becomes a
                                                        `Segment` on first use

A topic of 100,000 segments takes 11 MB this way, and more than 100 MB as `Segment` objects. Opening it touches no file
of a segment. A `.del` file may be newer than the manifest, so a segment is counted again when it becomes an object:
deletes that replay of the WAL applies make it one. Segments that stay columns have the deletions of their `.del` files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Self, SupportsIndex, cast, overload

import msgspec
import numpy as np

from tidelog.engine.manifest import Positions, SegmentRow, TopicEntry, TopicRow, decode_row
from tidelog.engine.memtable import MemTable
from tidelog.engine.segment import BoolArray, Segment, SegmentFiles, SizeCount, measure_part
from tidelog.errors import Corrupt
from tidelog.formats import small_files
from tidelog.types import Ints

_encode = msgspec.msgpack.Encoder().encode
_decode_rows = msgspec.msgpack.Decoder(tuple[SegmentRow, ...]).decode
_decode_slices = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...]).decode
_BATCH_ROWS: Final = 2048  # decoded at a time: objects of all rows would take 40 MB per 100,000


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Segments with ascending seqs, by column."""

    base: Ints
    stop: Ints
    size: Ints  # bytes of data
    live: Ints  # records that are not deleted, without regard to floors
    live_bytes: Ints
    last_ts: Ints
    generation: Ints
    sealed: BoolArray
    rows: bytes = field(repr=False)  # each a `SegmentRow`
    row_ends: Ints = field(repr=False)

    def __len__(self) -> int:
        return len(self.base)

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Decode the segments of a topic's row."""
        slices = _decode_slices(encoded)
        count = len(slices)
        ends = np.cumsum(np.fromiter((len(memoryview(each)) for each in slices), np.int64, count))
        del slices
        # After the header of the array, the rows follow each other.
        content = encoded[len(encoded) - int(ends[-1]) :] if count else b""
        columns = np.empty((8, count), np.int64)
        for lo in range(0, count, _BATCH_ROWS):
            hi = min(lo + _BATCH_ROWS, count)
            begin = int(ends[lo - 1]) if lo else 0
            rows = _decode_rows(_array_header(hi - lo) + content[begin : int(ends[hi - 1])])
            columns[:, lo:hi] = _columns_of(rows)
        return cls._from_matrix(columns, content, ends)

    @classmethod
    def of_rows(cls, rows: Sequence[SegmentRow]) -> Self:
        """The table of these rows."""
        encoded = [_encode(row) for row in rows]
        columns = np.array(_columns_of(rows), np.int64).reshape(8, len(rows))
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        return cls._from_matrix(columns, b"".join(encoded), ends)

    @classmethod
    def _from_matrix(cls, columns: Ints, rows: bytes, row_ends: Ints) -> Self:
        base, stop, size, live, live_bytes, last_ts, generation, sealed = columns
        return cls(base, stop, size, live, live_bytes, last_ts, generation, sealed.astype(bool), rows, row_ends)

    @classmethod
    def of_columns(cls, *, base: Ints, stop: Ints, size: Ints, live: Ints, generation: Ints, sealed: BoolArray) -> Self:
        """The table of these columns, without rows and sizes of live records."""
        zeros = np.zeros(len(base), np.int64)
        return cls(base, stop, size, live, zeros, zeros, generation, sealed, b"", zeros)

    @property
    def records(self) -> Ints:
        return self.stop - self.base

    def row(self, at: int) -> SegmentRow:
        return decode_segment_row(self.encoded_row(at))

    def encoded_row(self, at: int) -> bytes:
        return self.rows[int(self.row_ends[at - 1]) if at else 0 : int(self.row_ends[at])]

    def slice(self, lo: int, hi: int) -> SegmentTable:
        """Return the segments [lo, hi) of the table."""
        begin = int(self.row_ends[lo - 1]) if lo else 0
        ends = self.row_ends[lo:hi] - begin
        rows = self.rows[begin : begin + (int(ends[-1]) if len(ends) else 0)]
        return SegmentTable(
            self.base[lo:hi],
            self.stop[lo:hi],
            self.size[lo:hi],
            self.live[lo:hi],
            self.live_bytes[lo:hi],
            self.last_ts[lo:hi],
            self.generation[lo:hi],
            self.sealed[lo:hi],
            rows,
            ends,
        )


def decode_segment_row(encoded: bytes) -> SegmentRow:
    return msgspec.msgpack.decode(encoded, type=SegmentRow)


def _array_header(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def _columns_of(rows: Sequence[SegmentRow]) -> list[list[int]]:
    return [
        [row.base for row in rows],
        [row.stop for row in rows],
        [row.size for row in rows],
        [row.live for row in rows],
        [row.live_bytes for row in rows],
        [row.last_ts for row in rows],
        [row.generation for row in rows],
        [row.sealed for row in rows],
    ]


class StoredParts(list["Segment | MemTable"]):
    """The parts of a topic: first segments of a table, which become objects on first use, then what is added."""

    def __init__(
        self, table: SegmentTable, files: SegmentFiles, on_recounted: Callable[[int, SizeCount], None]
    ) -> None:
        """`on_recounted` is called with the stop of a segment and how many live records and bytes it has more than its
        row says."""
        super().__init__(cast("list[Segment | MemTable]", [None] * len(table)))
        self.table, self._files, self._on_recounted = table, files, on_recounted
        self._loaded: dict[int, Segment] = {}

    # ── as a list ─────────────────────────────────────────────────────────────────────────────

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> Segment | MemTable: ...

    @overload
    def __getitem__(self, at: slice, /) -> list[Segment | MemTable]: ...

    def __getitem__(self, at: Any, /) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        found = super().__getitem__(at)
        return found if found is not None else self._load(int(at) % len(self))

    def __iter__(self) -> Iterator[Segment | MemTable]:
        return (self[at] for at in range(len(self)))

    def __reversed__(self) -> Iterator[Segment | MemTable]:
        return (self[at] for at in range(len(self) - 1, -1, -1))

    def copy(self) -> list[Segment | MemTable]:
        return list(self)

    def _load(self, at: int) -> Segment:
        segment = Segment.from_row(self._files, self.table.row(at))
        super().__setitem__(at, segment)
        self._loaded[at] = segment
        before = segment.live_records, segment.live_bytes
        segment.recount_live()
        recounted = SizeCount(segment.live_records - before[0], segment.live_bytes - before[1])
        if any(recounted):
            self._on_recounted(segment.stop, recounted)
        return segment

    # ── without objects ───────────────────────────────────────────────────────────────────────

    def _added(self) -> Iterable[Segment | MemTable]:
        return (self[at] for at in range(len(self.table), len(self)))

    def index_at(self, seq: int) -> int:
        """Return the index of the last part that begins at or before a seq; 0 if none does."""
        found = int(np.searchsorted(self.table.base, seq, "right")) - 1
        if found == len(self.table) - 1:
            found += sum(part.base <= seq for part in self._added())
        return max(found, 0)

    def index_since(self, ts_ms: int) -> int:
        """Return the index of the first part that may have records of this time or later: times never fall."""
        return int(np.searchsorted(self.table.last_ts, ts_ms))

    def measure(self, first: int, stop: int) -> SizeCount:
        """Return the size of live records in [first, stop), without regard to floors."""
        table = self.table
        lo, hi = int(np.searchsorted(table.stop, first, "right")), int(np.searchsorted(table.base, stop))
        whole_lo = lo + (lo < hi and int(table.base[lo]) < first)
        whole_hi = max(hi - (lo < hi and int(table.stop[hi - 1]) > stop), whole_lo)
        records, size = int(table.live[whole_lo:whole_hi].sum()), int(table.live_bytes[whole_lo:whole_hi].sum())
        for at, segment in self._loaded.items():
            if whole_lo <= at < whole_hi:
                records += segment.live_records - int(table.live[at])
                size += segment.live_bytes - int(table.live_bytes[at])
        edges = (self[at] for at in sorted({*range(lo, whole_lo), *range(whole_hi, hi)}))
        for part in chain(edges, self._added()):
            begin, end = max(first, part.base), min(stop, part.stop)
            more = measure_part(part, begin - part.base, end - part.base)
            records, size = records + more.records, size + more.bytes
        return SizeCount(records, size)

    def count_seqs(self, first: int, stop: int) -> int:
        """Return how many seqs of [first, stop) are in a part."""
        stored = np.clip(np.minimum(self.table.stop, stop) - np.maximum(self.table.base, first), 0, None)
        return int(stored.sum()) + sum(max(min(part.stop, stop) - max(part.base, first), 0) for part in self._added())

    def loaded(self) -> dict[int, Segment]:
        """The segments that are objects, by index."""
        return self._loaded


class StoredRows:
    """Rows of topics with their segments as columns, kept from one refresh of a directory to the next."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, TopicRow, SegmentTable]] = {}

    def decode(self, entries: Iterable[TopicEntry], positions: Positions) -> list[tuple[TopicRow, SegmentTable]]:
        """Return the rows without their segments, and the segments."""
        known: dict[int, tuple[bytes, TopicRow, SegmentTable]] = {}
        found: list[tuple[TopicRow, SegmentTable]] = []
        for entry in sorted(entries, key=lambda entry: entry.id):
            cached = self._known.get(entry.id)
            if cached is None or cached[0] != entry.row:
                what = f"the manifest's row of topic {entry.id}"
                fields = small_files.decode_msgpack(_RowWithoutSegments, entry.row, what)
                values = {name: getattr(fields, name) for name in _FIELD_NAMES if name != "segments"}
                try:
                    table = SegmentTable.decode(bytes(fields.segments))
                except msgspec.DecodeError as error:
                    raise Corrupt(what, pos=0, reason=str(error)) from None
                cached = (entry.row, TopicRow(segments=(), **values), table)
            known[entry.id] = cached
            found.append((decode_row(entry, positions, cached[1]), cached[2]))
        self._known = known
        return found


_FIELD_NAMES: Final = tuple(each.name for each in msgspec.structs.fields(TopicRow))
_RowWithoutSegments: Any = msgspec.defstruct(
    "_RowWithoutSegments",
    [
        (each.name, msgspec.Raw if each.name == "segments" else each.type)
        if each.required
        else (each.name, each.type, each.default)
        for each in msgspec.structs.fields(TopicRow)
    ],
    array_like=True,
    frozen=True,
)
