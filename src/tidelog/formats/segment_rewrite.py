"""Encode the frames of a segment again without the bytes of removed records.

    before  │ Append │ Append │ Append │ AppendBatch of 4 records │ Append │
              1        2 gone   3 gone   4   5 gone   6   7         8
    after   │ Append │ batch of 2      │ AppendBatch of 4 records │ Append │
              1        2 and 3: empty    4   5: empty  6   7        8

Every seq keeps its record, so seqs stay dense and a position in the index is still computed; a removed one is empty,
without data, tag, node and meta, and the deletion vector of the segment names it. Frames without a removed record are
copied byte for byte. Frames whose records are all removed become one batch of empty records, which has the time of the
first: it is at most `TIME_STEP_MS` early for the others. A removed record between two that stay is an empty Append.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidelog import native
from tidelog.formats import batch, segment_index
from tidelog.formats.frame import DURABLE, HEADER_BYTES, JSON, OVERHEAD_BYTES, encode_empty_appends, read_headers
from tidelog.formats.rows import Rows, Span, copy_values
from tidelog.types import Buffer, Ints

TIME_STEP_MS: Final = 1_000
EMPTY_BATCH_OVERHEAD_BYTES: Final = 54  # of a batch of empty records, which adds 4 bytes a record
_KEPT, _EMPTY, _MIXED = range(3)
_GROUP_BYTES: Final = 8 << 20  # of frames that are encoded at once
_COMPARED_RECORDS: Final = 1 << 16  # records that are compared at once

BoolArray = NDArray[np.bool_]


def encode_without(rows: Rows, removed: BoolArray) -> Iterator[Buffer]:
    """Yield the frames of these rows, which are all records of a segment's data, without the bytes of the removed
    ones. The rows must have been verified."""
    lo = 0
    while lo < len(rows):
        hi = int(np.searchsorted(rows.frame_pos, rows.frame_pos[lo] + _GROUP_BYTES))
        end = int(rows.frame_pos[hi]) if hi < len(rows) else len(rows.buf)
        group, gone = rows.slice(lo, hi), np.ascontiguousarray(removed[lo:hi])
        frame_pos = np.ascontiguousarray(group.frame_pos)
        target = memoryview(native.borrow_buffer(end - int(frame_pos[0])))
        limits = TIME_STEP_MS, batch.FRAME_RECORDS_MAX
        size = native.remove_records(target, rows.buf, frame_pos, gone, end, *limits)
        if size >= 0:
            yield target[:size]
        else:
            yield from _encode_group(group, gone, end)
        lo = hi


def _encode_group(rows: Rows, removed: BoolArray, end: int) -> Iterator[Buffer]:
    """The general implementation, for frames that end at `end`."""
    buf = memoryview(rows.buf)
    first = np.append(0, np.flatnonzero(rows.frame_pos[1:] != rows.frame_pos[:-1]) + 1)
    starts, stops = rows.frame_pos[first], np.append(first[1:], len(rows))
    ends = np.append(starts[1:], end)
    gone = np.add.reduceat(removed, first, dtype=np.int64)
    is_mixed, is_empty = (gone > 0) & (gone < stops - first), gone == stops - first
    kind = np.where(is_mixed, _MIXED, np.where(is_empty, _EMPTY, _KEPT))
    edges = np.append(np.append(0, np.flatnonzero(np.diff(kind)) + 1), len(first))
    # Records that are removed one by one, between others that stay, are encoded together: ten times as fast.
    run_first, run_stops = first[edges[:-1]], stops[edges[1:] - 1]
    is_single = (kind[edges[:-1]] == _EMPTY) & (run_stops - run_first == 1)
    singles = run_first[is_single]
    topic_id = int(read_headers(buf, starts[:1])["topic_id"][0])
    blob = encode_empty_appends(topic_id, rows.seq[singles], rows.ts_us[singles] // 1000)
    pos, first_rows, stop_rows = 0, first.tolist(), stops.tolist()
    begins, frame_ends, kinds = starts.tolist(), ends.tolist(), kind.tolist()
    for (lo, hi), single in zip(pairwise(edges.tolist()), is_single.tolist(), strict=True):
        if kinds[lo] == _KEPT:
            yield buf[begins[lo] : frame_ends[hi - 1]]
        elif single:
            yield blob[pos : pos + OVERHEAD_BYTES]
            pos += OVERHEAD_BYTES
        elif kinds[lo] == _EMPTY:
            yield from _encode_empty(topic_id, rows.slice(first_rows[lo], stop_rows[hi - 1]))
        else:
            for number in range(lo, hi):
                at = slice(first_rows[number], stop_rows[number])
                yield _encode_mixed(rows.slice(at.start, at.stop), removed[at])


def _encode_empty(topic_id: int, rows: Rows) -> Iterator[bytes]:
    """Encode empty records in the place of these."""
    ts_ms, at = rows.ts_us // 1000, 0
    while at < len(rows):
        stop = int(np.searchsorted(ts_ms, ts_ms[at] + TIME_STEP_MS))
        stop = min(stop, at + batch.FRAME_RECORDS_MAX)
        if stop == at + 1:
            yield encode_empty_appends(topic_id, rows.seq[at:stop], ts_ms[at:stop])
        else:
            yield from batch.encode_many(topic_id, int(rows.seq[at]), int(ts_ms[at]), [b""] * (stop - at))
        at = stop


def _encode_mixed(rows: Rows, removed: BoolArray) -> bytes:
    """Encode the records of one batch, of which some are removed."""
    header = read_headers(rows.buf, rows.frame_pos[:1])[0]
    kept, pos = np.flatnonzero(~removed), int(rows.frame_pos[0])
    names = bytes(memoryview(rows.buf)[pos + HEADER_BYTES :][: int(header["node_len"]) + int(header["tag_len"])])
    node, tag = names[: int(header["node_len"])], names[int(header["node_len"]) :]

    def column(span: Span | None, width: str) -> batch.InputColumn | None:
        if span is None:
            return None
        lengths = np.where(removed, 0, span.size).astype(width)
        return batch.InputColumn(lengths, blob=b"".join(copy_values(rows.buf, span.take(kept))))

    kinds = None
    if batch.has_kinds(rows.buf, pos):
        is_json = (segment_index.record_flags(rows) & segment_index.JSON) != 0
        kinds = np.where(is_json & ~removed, batch.KIND_JSON, batch.KIND_BYTES).astype(np.uint8).tobytes()
    data = column(rows.data, "<u4")
    assert data is not None, "every record has data"
    columns = batch.InputColumns(
        data,
        None if tag else column(rows.tag, "<u2"),
        None if node else column(rows.node, "<u2"),
        column(rows.meta, "<u4"),
        kinds,
    )
    # The frame is no part of a chain: the frames around it may be empty ones now.
    flags = int(header["flags"]) & (JSON | DURABLE)
    topic_id, seq, ts_ms = int(header["topic_id"]), int(header["seq"]), int(header["ts_ms"])
    return batch.encode_frame(topic_id, seq, ts_ms, columns, tag=tag, node=node, flags=flags)


def find_difference(before: Rows, after: Rows, removed: BoolArray) -> str | None:
    """Compare the rows of a segment with those of its rewritten data, value by value. Returns what differs that must
    not: a record that was kept, or a removed one that is not empty; None if nothing does."""
    if not np.array_equal(before.seq, after.seq):
        return f"it has {len(after)} records of {len(before)}, or other seqs"
    if after.data.size[removed].any() or (after.meta is not None and after.meta.size[removed].any()):
        return "a removed record is not empty"
    for lo in range(0, len(before), _COMPARED_RECORDS):
        hi = min(lo + _COMPARED_RECORDS, len(before))
        kept: Ints = lo + np.flatnonzero(~removed[lo:hi])
        if len(kept) and (what := _find_changed_column(before.take(kept), after.take(kept))) is not None:
            return f"the {what} of a record between seqs {before.seq[lo]} and {before.seq[hi - 1]} is another"
    return None


def _find_changed_column(before: Rows, after: Rows) -> str | None:
    if not np.array_equal(before.ts_us, after.ts_us):
        return "time"
    pairs = {
        "data": (before.data, after.data),
        "node": (before.node, after.node),
        "tag": (before.tag, after.tag),
        "meta": (before.meta, after.meta),
    }
    for name, (one, other) in pairs.items():
        if one is None or other is None:
            present = other if one is None else one
            if present is not None and present.size.any():
                return name
        elif not np.array_equal(one.size, other.size) or not native.have_equal_values(
            before.buf, one.pos, one.size, after.buf, other.pos
        ):
            return name
    changed = (segment_index.record_flags(before) ^ segment_index.record_flags(after)) & segment_index.JSON
    return "kind" if changed.any() else None


def count_removable(entries: NDArray[np.void], dead: BoolArray, size: int) -> int:
    """Return about how many of `size` bytes of data `encode_without` would save for these dead records, from the index
    alone: frames without a live record, and the data of dead records in other frames."""
    offsets = entries["frame_offset"].astype(np.int64)
    first = np.append(0, np.flatnonzero(offsets[1:] != offsets[:-1]) + 1)
    counts, frame_bytes = np.diff(first, append=len(entries)), np.diff(offsets[first], append=size)
    gone = np.add.reduceat(dead, first, dtype=np.int64)
    in_data = dead & (entries["flags"] & segment_index.LARGE == 0)  # the data of large records is in blobs
    data_bytes = np.add.reduceat(np.where(in_data, entries["data_len"], 0), first, dtype=np.int64)
    empty_bytes = np.where(counts == 1, OVERHEAD_BYTES, EMPTY_BATCH_OVERHEAD_BYTES + 4 * counts)
    whole = np.maximum(frame_bytes - empty_bytes, 0)
    return int(np.where(gone == counts, np.maximum(whole, data_bytes), data_bytes).sum())
