"""Records as columns over one buffer: the result of every scan of every layout.

    buf    ┌──────┬──────┬────┬───────┬──────┬──────┬────┐
           │ head │ node │tag │ data  │ head │ data │ …  │      one mapped file or one read
           └──────┴──────┴────┴───────┴──────┴──────┴────┘
frame_pos  ^0                         ^1                        where the frame of record i starts
    data          pos[i], size[i]  ───┘                         where its bytes are

There is no Python object per record until `iter_records` creates one. The columns borrow `buf`: they are valid while
the buffer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog import native
from tidelog.types import Buffer, Ints, Record

Flags: TypeAlias = NDArray[np.uint8]
EMPTY_INTS: Ints = np.zeros(0, np.int64)
_NULLS_CACHED: Final = 1 << 16
_POOLED_BYTES_MIN: Final = 1 << 15  # less is allocated as quickly elsewhere


class Span(NamedTuple):
    """Where the values of a column are in the buffer. `pos` never decreases."""

    pos: Ints
    size: Ints

    def slice(self, lo: int, hi: int) -> Span:
        return Span(self.pos[lo:hi], self.size[lo:hi])

    def take(self, which: Ints) -> Span:
        return Span(self.pos[which], self.size[which])


@dataclass(frozen=True, slots=True)
class Rows:
    buf: Buffer
    seq: Ints  # strictly increasing, not always dense: compaction leaves holes
    ts_us: Ints  # all 0 where the layout keeps no time; decreases only in logs that another program wrote
    frame_pos: Ints  # first byte of the frame that holds the record
    data: Span
    node: Span | None = None
    tag: Span | None = None
    meta: Span | None = None
    flags: Flags | None = field(default=None, kw_only=True)  # index flags of each record, where they were read
    blob_bytes: Ints | None = field(default=None, kw_only=True)  # of data in a blob file; 0: the data is here

    def __len__(self) -> int:
        return len(self.seq)

    def slice(self, lo: int, hi: int) -> Rows:
        """Return records [lo, hi) by position, still borrowing the buffer."""
        return Rows(
            self.buf,
            self.seq[lo:hi],
            self.ts_us[lo:hi],
            self.frame_pos[lo:hi],
            self.data.slice(lo, hi),
            self.node and self.node.slice(lo, hi),
            self.tag and self.tag.slice(lo, hi),
            self.meta and self.meta.slice(lo, hi),
            flags=None if self.flags is None else self.flags[lo:hi],
            blob_bytes=None if self.blob_bytes is None else self.blob_bytes[lo:hi],
        )

    def take(self, which: Ints) -> Rows:
        """Return the records at these positions, in this order."""
        return Rows(
            self.buf,
            self.seq[which],
            self.ts_us[which],
            self.frame_pos[which],
            self.data.take(which),
            self.node and self.node.take(which),
            self.tag and self.tag.take(which),
            self.meta and self.meta.take(which),
            flags=None if self.flags is None else self.flags[which],
            blob_bytes=None if self.blob_bytes is None else self.blob_bytes[which],
        )

    def record_bytes(self) -> Ints:
        """Bytes of data and meta of each record in the buffer: of a large record those of its reference."""
        return self.data.size if self.meta is None else self.data.size + self.meta.size

    def data_lengths(self) -> Ints:
        """Bytes of data of each record, wherever they are stored."""
        if self.blob_bytes is None:
            return self.data.size
        lengths: Ints = np.where(self.blob_bytes > 0, self.blob_bytes, self.data.size)
        return lengths

    def total_bytes(self) -> Ints:
        """Bytes of data and meta of each record, wherever they are stored: what caps, quotas and counts use."""
        lengths = self.data_lengths()
        return lengths if self.meta is None else lengths + self.meta.size

    def frame_starts(self) -> Ints:
        """The position of each frame, once. There must be rows."""
        starts: Ints = self.frame_pos[np.append(0, np.flatnonzero(self.frame_pos[1:] != self.frame_pos[:-1]) + 1)]
        return starts

    def between(self, first: int, stop: int) -> Rows:
        """Return the records with first <= seq < stop."""
        lo, hi = np.searchsorted(self.seq, (first, stop))
        return self if lo == 0 and hi == len(self.seq) else self.slice(int(lo), int(hi))


def empty_rows(buf: Buffer = b"") -> Rows:
    return Rows(buf, EMPTY_INTS, EMPTY_INTS, EMPTY_INTS, Span(EMPTY_INTS, EMPTY_INTS))


def concat_rows(buf: Buffer, parts: Sequence[Rows], shifts: Sequence[int] | None = None) -> Rows:
    """Join rows of several ranges of `buf`. `shifts`: where in it the buffer of each part begins."""
    if not parts:
        return empty_rows(buf)
    moved = list(zip(parts, shifts or [0] * len(parts), strict=True))

    def span(spans: Sequence[Span | None]) -> Span | None:
        if not any(spans):
            return None
        filled = [
            Span(part.frame_pos, np.zeros_like(part.frame_pos)) if it is None else it
            for it, part in zip(spans, parts, strict=True)
        ]
        pos = np.concatenate([it.pos + shift for it, (_, shift) in zip(filled, moved, strict=True)])
        return Span(pos, np.concatenate([it.size for it in filled]))

    return Rows(
        buf,
        np.concatenate([part.seq for part in parts]),
        np.concatenate([part.ts_us for part in parts]),
        np.concatenate([part.frame_pos + shift for part, shift in moved]),
        span([part.data for part in parts]) or Span(EMPTY_INTS, EMPTY_INTS),
        span([part.node for part in parts]),
        span([part.tag for part in parts]),
        span([part.meta for part in parts]),
        blob_bytes=None
        if all(part.blob_bytes is None for part in parts)
        else np.concatenate(
            [np.zeros(len(part), np.int64) if part.blob_bytes is None else part.blob_bytes for part in parts]
        ),
    )


class ScanStop(Enum):
    """Why a scan ended. Recovery decides what that means."""

    END = "end"  # clean: the end of the range, or preallocated zeros
    TORN = "torn"  # the last record runs past the end: nothing can follow it
    BAD = "bad"  # these bytes are not the record they claim to be


class ScanResult(NamedTuple):
    rows: Rows  # the records before the stop
    end: int  # one past the last good record
    stop: ScanStop
    reason: str = ""  # in words, for BAD and TORN


def copy_values(buf: Buffer, span: Span) -> list[bytes]:
    """Copy a column out as bytes objects."""
    return native.slice_values(buf, *span)


def iter_records(rows: Rows) -> Iterator[Record]:
    """Return the rows as records, each owning its bytes."""
    columns = [rows.seq.tolist(), rows.ts_us.tolist(), copy_values(rows.buf, rows.data)]
    if rows.node is None and rows.tag is None and rows.meta is None:
        return map(Record, *columns)
    blank = [b""] * len(rows)
    optional = (rows.node, rows.tag, rows.meta)
    return map(Record, *columns, *(blank if span is None else copy_values(rows.buf, span) for span in optional))


def allocate_column(size: int) -> pa.Buffer:
    """Allocate memory for a column that a table may keep: memory of columns that are gone, where there is some.
    Touching memory for the first time takes as long as filling it four times, and Arrow's own pool gives memory back
    to the system within moments."""
    return pa.py_buffer(native.borrow_buffer(size)) if size >= _POOLED_BYTES_MIN else pa.allocate_buffer(size)


def to_binary_array(buf: Buffer, span: Span) -> pa.Array:
    """Return a column as an Arrow binary array: without a copy where the values are adjacent, else with one."""
    pos, size = span
    count = len(pos)
    if count == 0:
        return pa.array([], pa.binary())
    total, start = int(size.sum()), int(pos[0])
    assert total < 1 << 31, "a batch of rows stays under 2 GiB: segments are sealed before"
    if int(pos[-1] + size[-1]) - start == total and np.array_equal(pos[1:], pos[:-1] + size[:-1]):
        offsets = (np.append(pos, start + total) - start).astype(np.int32)
        window = pa.py_buffer(memoryview(buf)[start : start + total])
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), window])
    edges, values = allocate_column(4 * (count + 1)), allocate_column(total)
    native.copy_values(values, edges, buf, pos, size)
    return pa.Array.from_buffers(pa.binary(), count, [None, edges, values])


_TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("node", pa.binary()),
        pa.field("tag", pa.binary()),
        pa.field("meta", pa.binary()),
        pa.field("data", pa.binary(), nullable=False),
    ]
)


@cache
def _nulls() -> pa.Array:
    return pa.nulls(_NULLS_CACHED, pa.binary())


def _null_column(count: int) -> pa.Array:
    """Return a column of nulls; a slice of a cached one up to a size that is rarely exceeded."""
    return _nulls().slice(0, count) if count <= _NULLS_CACHED else pa.nulls(count, pa.binary())


def to_arrow(rows: Rows) -> pa.RecordBatch:
    """Return the rows as an Arrow batch. `data` borrows the buffer where the values are adjacent."""
    return pa.RecordBatch.from_arrays([to_column(rows, name) for name in SCHEMA.names], schema=SCHEMA)


def to_column(rows: Rows, name: str) -> pa.Array:
    """Return one column of `SCHEMA`."""
    match name:
        case "seq":
            return pa.array(rows.seq)
        case "ts":
            times = pa.py_buffer(np.ascontiguousarray(rows.ts_us))
            return pa.Array.from_buffers(_TIMESTAMP_TYPE, len(rows), [None, times])
        case "data":
            return to_binary_array(rows.buf, rows.data)
    span: Span | None = getattr(rows, name)
    return _null_column(len(rows)) if span is None else to_binary_array(rows.buf, span)
