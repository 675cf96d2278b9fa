"""Scan frames. Recovery, verification, inspection and readers all use this module.

    pos                                                    end
    ┌────────┬────────┬──────┬───────┬───────┬───────┬─────┬┄┄┄┄┄┄┄┄┐
    │ Append │ Append │ mark │ batch │ batch │ batch │ bad │ unread │
    └────────┴────────┴──────┴───────┴───────┴───────┴─────┴┄┄┄┄┄┄┄┄┘
                              MORE    MORE    the three are one caller's batch

  scan_headers       every frame as columns of headers: for a WAL, where topics and control frames are mixed
  decode_records     the records of frames of one topic that `scan_headers` found
  scan_records       the records of one topic as columns, every checksum verified
  scan_indexed       the records of a sealed segment that its index names, without stepping from frame to frame
  read_single_frame  the records of one frame; also `read_texts`, `find_plain_batch`, `read_single_batch`

A chain of MORE frames is one caller's batch: a chain that breaks off is not part of any result, however good its first
frames are.

Headers are columns because a Python object per frame costs three times as much as its checksum. Measured on 64 MiB of
Append frames of 100 bytes: 2.4 M frames/s, 1.9 M with a node and a tag; 0.65 M and 0.45 M with an object each. A scan
prepares for thousands of frames. For one frame the functions of the last line take 4 µs instead of 160, and 34 instead
of 70 for a page inside one batch; they return None for all but the common case, and the caller scans.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog import native
from tidelog.errors import Corrupt
from tidelog.formats import batch, large_record, segment_index
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
    FRAME_LEN_MIN,
    FRAME_NAMES,
    HAS_NODE,
    HAS_TAG,
    HEADER_BYTES,
    JSON,
    KIND_OFFSET,
    KNOWN_FLAGS,
    LARGE_RECORD,
    MORE,
    OVERHEAD_BYTES,
    SEQ_MAX,
    TS_MS_MAX,
    Fault,
    Frame,
    are_records,
    are_utf8,
    count_valid_checksums,
    has_valid_flags,
    is_record,
    read_frame,
    read_headers,
)
from tidelog.formats.rows import EMPTY_INTS, Rows, ScanResult, ScanStop, Span, concat_rows, empty_rows
from tidelog.types import Buffer, Ints

_FRAMES_PER_CALL: Final = 1 << 16
_SEARCH_BYTES: Final = 1 << 16  # positions that are searched at once for a frame
# Type and flags as one number, and which of them are valid together.
_KIND_AND_FLAGS: Final = np.dtype(
    {"names": ["lead"], "formats": ["<u2"], "offsets": [KIND_OFFSET], "itemsize": HEADER_BYTES}
)
_VALID_KIND_AND_FLAGS: Final = np.zeros(1 << 16, np.bool_)
_VALID_KIND_AND_FLAGS[
    [kind | flags << 8 for kind in FRAME_NAMES for flags in range(KNOWN_FLAGS + 1) if has_valid_flags(kind, flags)]
] = True

# ── all frames ────────────────────────────────────────────────────────────────────────────────────


class HeaderScan(NamedTuple):
    """The frames of a range of a WAL; recovery cuts at `whole_end`.

    buf        ┌───┬───┬──────┬───────┬───────┬────┬───────┬─────┐
               │ A │ B │ mark │ A     │ A     │ B  │ B     │ bad │      frames of topics A and B
               └───┴───┴──────┴───────┴───────┴────┴───────┴─────┘
                               MORE                 MORE
    frame_pos  ^   ^   ^       ^       ^       ^   │       │
                                          whole_end┘    end┘
    """

    frame_pos: Ints  # where each frame starts that belongs to a complete batch
    headers: NDArray[np.void]  # its header, a record of `frame.HEADER`
    end: int  # one past the last good frame
    whole_end: int  # one past the last frame that completes its batch
    stop: ScanStop
    reason: str  # in words, for BAD and TORN


def scan_headers(buf: Buffer, pos: int = 0, end: int | None = None) -> HeaderScan:
    """Find every good frame from `pos` on and verify its checksum."""
    frames = _find_good_frames(buf, pos, end)
    kept = frames.kept
    whole_end = int(frames.frame_pos[kept]) if kept < len(frames.headers) else frames.end
    return HeaderScan(frames.frame_pos[:kept], frames.headers[:kept], frames.end, whole_end, *frames.fault)


class _GoodFrames(NamedTuple):
    frame_pos: Ints
    headers: NDArray[np.void]
    kept: int  # so many belong to complete batches; the others to one that breaks off
    end: int
    fault: Fault  # at `end`


def _find_good_frames(buf: Buffer, pos: int, end: int | None) -> _GoodFrames:
    view = memoryview(buf)
    limit = len(view) if end is None else end
    runs: list[Ints] = []
    run_end = _find_valid_frames(buf, pos, limit, runs)
    while isinstance(fault := read_frame(view, run_end, limit), Frame):
        runs.append(np.array([run_end], np.int64))
        run_end = _find_valid_frames(buf, fault.end, limit, runs)
    frame_pos = np.concatenate([EMPTY_INTS, *runs])
    headers = read_headers(view, frame_pos)
    more = (headers["flags"] & MORE) != 0
    good = _count_uninterrupted(headers[: count_valid_headers(view, frame_pos, headers, limit)], more)
    good_end = run_end
    if good < len(frame_pos):
        good_end = int(frame_pos[good])
        fault = _explain_refusal(view, good_end, limit, headers["topic_id"][:good])
    complete = np.flatnonzero(~more[:good])
    kept = int(complete[-1]) + 1 if len(complete) else 0
    if kept < good:
        fault = broken_chain(fault, int(frame_pos[kept]))
    return _GoodFrames(frame_pos[:good], headers[:good], kept, good_end, fault)


def chain_interruption(frame: Frame, topic_id: int) -> Fault | None:
    """Return why this frame cannot continue a batch of the topic, or None if it can."""
    if is_record(frame.kind) and frame.topic_id == topic_id:
        return None
    name = f"{FRAME_NAMES[frame.kind]} frame of topic {frame.topic_id}"
    return Fault(ScanStop.BAD, f"the batch of topic {topic_id} is interrupted by a {name}")


def broken_chain(fault: Fault, chain_pos: int) -> Fault:
    """Return what a fault means in the middle of a batch: its end is not the end of a log."""
    if fault.stop is ScanStop.BAD:
        return fault
    return Fault(ScanStop.TORN, f"the batch that starts at byte {chain_pos} breaks off before its last frame")


def count_valid_headers(buf: Buffer, frame_pos: Ints, headers: NDArray[np.void], end: int, *, text: bool = True) -> int:
    """Count the frames before the first that `read_frame` would refuse, its checksum aside: the same rules, for all
    frames at once. `read_frame` returns the reason. Without `text` node and tag are not decoded."""
    size = headers["data_len"].astype(np.int64) + OVERHEAD_BYTES
    names_len = headers["node_len"] + headers["tag_len"].astype(np.int64)
    named = np.flatnonzero(names_len)
    if len(named):
        size += names_len
    wrong = size != headers["frame_len"].astype(np.int64) + 4
    wrong |= frame_pos + size > end
    wrong |= ~_VALID_KIND_AND_FLAGS[headers.view(_KIND_AND_FLAGS)["lead"]]
    wrong |= headers["seq"] > SEQ_MAX
    wrong |= headers["ts_ms"] > TS_MS_MAX
    if not len(named):
        return int(wrong.argmax()) if wrong.any() else len(frame_pos)
    node_len, tag_len, flags = headers["node_len"][named], headers["tag_len"][named], headers["flags"][named]
    wrong[named] |= (node_len > 0) & (flags & HAS_NODE == 0) | (tag_len > 0) & (flags & HAS_TAG == 0)
    first = int(wrong.argmax()) if wrong.any() else len(frame_pos)
    count = int(np.searchsorted(named, first)) if text else 0
    if count:
        named = named[:count]
        lengths = np.column_stack((node_len[:count], tag_len[:count])).ravel()
        if not are_utf8(_join_ranges(buf, frame_pos[named] + HEADER_BYTES, names_len[named]), lengths):
            first = next(
                i for i in named.tolist() if isinstance(read_frame(buf, int(frame_pos[i]), end, check=False), Fault)
            )
    return first


def _join_ranges(buf: Buffer, pos: Ints, size: Ints) -> bytes:
    """Copy these ranges of the buffer one after the other."""
    ends = size.cumsum()
    total = int(ends[-1])
    if total > 64 * len(pos):
        view = memoryview(buf)
        return b"".join([view[lo:hi] for lo, hi in zip(pos.tolist(), (pos + size).tolist(), strict=True)])
    # One position per byte: for short ranges a fifth of the time of a slice each.
    indices = np.repeat(pos - ends + size, size)
    indices += np.arange(total)
    octets: NDArray[np.uint8] = np.frombuffer(buf, np.uint8)[indices]
    return octets.tobytes()


def _find_valid_frames(buf: Buffer, pos: int, end: int, runs: list[Ints]) -> int:
    """Append the starts of frames whose checksum holds to `runs`; return where the last of them ends.

    Stops without a verdict at the first frame that is anything else, or that ends too near the end.
    """
    while pos + OVERHEAD_BYTES <= end:
        packed, frames_end = native.find_frames(buf, pos, end, _FRAMES_PER_CALL)
        if not packed:
            break
        starts = np.frombuffer(packed, np.int64)
        good = count_valid_checksums(buf, starts, np.append(starts[1:], frames_end) - 8)
        runs.append(starts[:good])
        pos = frames_end if good == len(starts) else int(starts[good])
        if good < _FRAMES_PER_CALL:
            break
    return pos


def _explain_refusal(view: memoryview, pos: int, end: int, topics_before: NDArray[np.uint64]) -> Fault:
    """Return why a frame whose checksum holds is refused after frames of these topics."""
    refused: Frame | Fault | None = read_frame(view, pos, end)
    if isinstance(refused, Frame):
        refused = chain_interruption(refused, int(topics_before[-1]))
    assert refused is not None, "it breaks a rule of one or the other"
    return refused


def _count_uninterrupted(headers: NDArray[np.void], more: NDArray[np.bool_]) -> int:
    """Count the frames before the first that interrupts a batch: the rules of `chain_interruption` for all."""
    chained = np.flatnonzero(more[: len(headers)][:-1])
    if not len(chained):
        return len(headers)
    topic = headers["topic_id"]
    same = are_records(headers[chained + 1]) & (topic[chained + 1] == topic[chained])
    return len(headers) if same.all() else int(chained[same.argmin()]) + 1


# ── the records of one topic ──────────────────────────────────────────────────────────────────────


def scan_records(buf: Buffer, pos: int = 0, end: int | None = None, *, above: int = -1) -> ScanResult:
    """Read the records of one topic from `pos` to the first fault, every checksum verified.

    Seqs rise from above `above` and times never fall, or the scan ends there as BAD. Control frames are skipped. A
    fault in the middle of a batch of several frames excludes the whole batch.
    """
    view = memoryview(buf)
    frames = _find_good_frames(buf, pos, end)
    has_records = are_records(frames.headers)
    rows, undecoded = _decode_frames(view, frames.frame_pos[has_records], frames.headers[has_records])
    stops = [_StopAt(frames.end, frames.fault), undecoded, _find_disorder(view, rows, above)]
    stop_pos, fault = min((stop for stop in stops if stop is not None), key=lambda stop: stop.pos)
    begins_batch = np.append(True, (frames.headers["flags"] & MORE) == 0)
    batch_pos = np.append(frames.frame_pos, frames.end)[begins_batch]
    stop_pos = int(batch_pos[np.searchsorted(batch_pos, stop_pos, "right") - 1])
    kept = int(np.searchsorted(rows.frame_pos, stop_pos))
    return ScanResult(rows if kept == len(rows) else rows.slice(0, kept), stop_pos, *fault)


def decode_records(buf: Buffer, frame_pos: Ints, headers: NDArray[np.void]) -> Rows:
    """Decode frames of `scan_headers`: frames with records of one topic, in order.

    Checksums and headers are not verified again. Raises Corrupt where the body of a batch does not decode.
    """
    rows, undecoded = _decode_frames(memoryview(buf), frame_pos, headers)
    if undecoded is not None:
        step = "its checksum holds, so it was written like this: keep the file and report it"
        raise Corrupt("WAL", pos=undecoded.pos, reason=undecoded.fault.reason, next_step=step)
    return rows


def scan_single_frame(buf: Buffer, pos: int) -> ScanResult:
    """Read the records of the one frame at `pos`, whatever batch it belongs to; none where it is not a good one."""
    view = memoryview(buf)
    frame = read_frame(view, pos, len(view))
    if isinstance(frame, Fault):
        return ScanResult(empty_rows(view), pos, *frame)
    if is_record(frame.kind):
        frame_pos = np.array([pos], np.int64)
        try:
            return ScanResult(decode_records(view, frame_pos, read_headers(view, frame_pos)), frame.end, ScanStop.END)
        except Corrupt as fault:
            return ScanResult(empty_rows(view), pos, ScanStop.BAD, fault.reason)
    return ScanResult(empty_rows(view), frame.end, ScanStop.END)


def find_next_frame(buf: Buffer, pos: int, above: int, stop: int) -> int:
    """Return where reading may continue after the bad frame at `pos`: after the length it claims if a good frame is
    there, else at the next good frame with records between seqs `above` and `stop`; the end where there is none."""
    view = memoryview(buf)
    size = len(view)

    def is_good(frame_pos: int) -> bool:
        rows = scan_single_frame(view, frame_pos).rows
        return len(rows) > 0 and int(rows.seq[0]) > above and int(rows.seq[-1]) < stop

    if pos + 4 <= size:
        after = pos + 4 + int.from_bytes(view[pos : pos + 4], "little")
        if after == size or (pos < after < size and is_good(after)):
            return after
    last = size - OVERHEAD_BYTES
    for low in range(pos + 1, last + 1, _SEARCH_BYTES):
        positions: Ints = np.arange(low, min(low + _SEARCH_BYTES, last + 1), dtype=np.int64)
        headers = read_headers(view, positions)
        ends = positions + 4 + headers["frame_len"]
        seq = headers["seq"].astype(np.int64)
        likely = (
            are_records(headers)
            & (headers["frame_len"] >= FRAME_LEN_MIN)
            & (ends <= size)
            & (seq > above)
            & (seq < stop)
        )
        for position in positions[likely].tolist():
            if is_good(position):
                return int(position)
    return size


class _StopAt(NamedTuple):
    pos: int
    fault: Fault


def _decode_frames(view: memoryview, frame_pos: Ints, headers: NDArray[np.void]) -> tuple[Rows, _StopAt | None]:
    """Decode these frames with records up to the first that does not decode."""
    single = headers["kind"] == APPEND
    if single.all():
        return _append_rows(view, frame_pos, headers), None
    batched = np.flatnonzero(~single)
    groups: dict[int, list[Frame]] = {}
    for before, pos in zip(np.cumsum(single)[batched].tolist(), frame_pos[batched].tolist(), strict=True):
        groups.setdefault(before, []).append(_read_record_frame(view, pos, check=False))
    batches, undecoded = _decode_batches(view, groups)
    return _merge_rows(view, _append_rows(view, frame_pos[single], headers[single]), batches), undecoded


def _decode_batches(view: memoryview, groups: dict[int, list[Frame]]) -> tuple[list[tuple[int, Rows]], _StopAt | None]:
    """Decode batches and large records, given by the number of Append frames before them, up to the first that does
    not decode.

    A batch of holes only is left out: its columns would turn null values of other frames into empty ones.
    """
    batches: list[tuple[int, Rows]] = []
    for before, group in groups.items():
        for kind, run in groupby(group, lambda frame: frame.kind):
            if kind == LARGE_RECORD:
                large, bad = large_record.decode(view, list(run))
                rows = [large]
            else:
                rows, bad = batch.decode_all(view, list(run))
            batches += [(before, part) for part in rows if len(part)]
            if bad is not None:
                return batches, _StopAt(*bad)
    return batches, None


def _append_rows(view: memoryview, frame_pos: Ints, headers: NDArray[np.void]) -> Rows:
    """Return the records of Append frames with these headers. No length is checked here."""
    node_len, tag_len = headers["node_len"].astype(np.int64), headers["tag_len"].astype(np.int64)
    node_pos = frame_pos + HEADER_BYTES
    tag_pos = node_pos + node_len
    return Rows(
        view,
        headers["seq"].astype(np.int64),
        headers["ts_ms"].astype(np.int64) * 1000,
        frame_pos,
        Span(tag_pos + tag_len, headers["data_len"].astype(np.int64)),
        Span(node_pos, node_len) if node_len.any() else None,
        Span(tag_pos, tag_len) if tag_len.any() else None,
    )


def _merge_rows(view: memoryview, appends: Rows, batches: list[tuple[int, Rows]]) -> Rows:
    """Merge Append records and batches in the order of their bytes; each batch has the number of Appends before it."""
    if not batches:
        return appends
    if len(batches) == 1 and not len(appends):
        return batches[0][1]
    parts: list[Rows] = []
    lo = 0
    for hi, rows in [*batches, (len(appends), empty_rows(view))]:
        parts += [appends.slice(lo, hi), rows] if hi > lo else [rows]
        lo = hi
    return concat_rows(view, parts)


def _find_disorder(view: memoryview, rows: Rows, above: int) -> _StopAt | None:
    """Find the first record that does not follow the one before it. Inside a frame order holds by construction."""
    if not len(rows):
        return None
    first = np.append(np.int64(0), np.flatnonzero(rows.frame_pos[1:] != rows.frame_pos[:-1]) + 1)
    last = first[1:] - 1
    topic = read_headers(view, rows.frame_pos[first])["topic_id"]
    seq, seq_before = rows.seq[first], np.append(np.int64(above), rows.seq[last])
    ts, ts_before = rows.ts_us[first], np.append(rows.ts_us[0], rows.ts_us[last])
    wrong = np.flatnonzero((topic != topic[0]) | (seq <= seq_before) | (ts < ts_before))
    if not len(wrong):
        return None
    i = int(wrong[0])
    if topic[i] != topic[0]:
        reason = f"a frame of topic {topic[i]} in the log of topic {topic[0]}"
    elif seq[i] <= seq_before[i]:
        reason = f"seq {seq[i]} comes after seq {seq_before[i]}"
    else:
        reason = f"time {ts[i] // 1000} ms comes after {ts_before[i] // 1000} ms"
    return _StopAt(int(rows.frame_pos[first[i]]), Fault(ScanStop.BAD, reason))


# ── records that an index names ───────────────────────────────────────────────────────────────────


def scan_indexed(
    buf: Buffer,
    entries: NDArray[np.void],
    first_index: int,
    stop_index: int,
    base: int,
    *,
    check: bool,
    origin: int = 0,
) -> Rows:
    """Read records [first_index, stop_index) of a sealed segment whose entry 0 is seq `base`. `origin` is the position
    of the first byte of `buf` in the segment's data.

    Headers are always compared with the index; checksums only with `check`, for bytes that the segment's footer has
    not verified. A mismatch raises Corrupt with its position.
    """
    view = memoryview(buf)
    part = entries[first_index:stop_index]
    for read in (segment_index.read_indexed_rows, read_single_batch):
        if len(part) and (rows := read(view, part, base + first_index, check=check, origin=origin)) is not None:
            return rows
    # Column by column: picking whole entries moves them field by field.
    flags = np.ascontiguousarray(part["flags"])
    frame_pos: Ints = part["frame_offset"].astype(np.int64) - origin
    size: Ints = part["data_len"].astype(np.int64)
    ts_ms = np.ascontiguousarray(part["ts"])
    seq: Ints = np.arange(base + first_index, base + first_index + len(part), dtype=np.int64)
    hole = (flags & segment_index.HOLE) != 0
    if hole.any():
        live = np.flatnonzero(~hole)
        flags, frame_pos, size, ts_ms, seq = flags[live], frame_pos[live], size[live], ts_ms[live], seq[live]
    if not len(frame_pos):
        return empty_rows(view)
    if int(frame_pos.max()) + OVERHEAD_BYTES > len(view):
        raise Corrupt("segment", pos=int(frame_pos.max()), reason="the index names a frame after the end of the data")
    single = (flags & (segment_index.BATCH | segment_index.LARGE)) == 0
    appends = _read_indexed_appends(view, frame_pos[single], check=check)
    groups: dict[int, list[Frame]] = {}
    if len(appends) < len(frame_pos):
        before = np.cumsum(single)
        for i in np.flatnonzero(~single & np.append(True, frame_pos[1:] != frame_pos[:-1])).tolist():
            expected = LARGE_RECORD if flags[i] & segment_index.LARGE else APPEND_BATCH
            found = _read_record_frame(view, int(frame_pos[i]), check=check, expected=expected)
            groups.setdefault(int(before[i]), []).append(found)
    batches, wrong = _decode_batches(view, groups)
    if wrong is not None:
        raise Corrupt("segment", pos=wrong.pos, reason=wrong.fault.reason)
    # The first and the last batch may reach beyond the range.
    rows = _merge_rows(view, appends, batches).between(base + first_index, base + stop_index)
    same = len(rows) == len(frame_pos) and (
        (rows.seq == seq)
        & (rows.frame_pos == frame_pos)
        & (rows.data_lengths() == size)
        & (rows.ts_us == ts_ms.astype(np.int64) * 1000)
        & (ts_ms <= TS_MS_MAX)  # a larger one would wrap around; dividing the other side costs ten times as much
        & (segment_index.record_flags(rows) == flags)
    )
    if not np.all(same):
        pos = int(frame_pos[np.argmin(same)])
        raise Corrupt("segment", pos=pos, reason="the frame and its index entry describe different records")
    return rows


def _read_indexed_appends(view: memoryview, frame_pos: Ints, *, check: bool) -> Rows:
    """Read Append frames at these positions; raise Corrupt for the first that is not a good one."""
    if not len(frame_pos):
        return empty_rows(view)
    headers = read_headers(view, frame_pos)
    rows = _append_rows(view, frame_pos, headers)
    good = count_valid_headers(view, frame_pos, headers, len(view), text=check)
    others = np.flatnonzero(headers["kind"][:good] != APPEND)
    good = int(others[0]) if len(others) else good
    if good < len(frame_pos):
        refused = read_frame(view, int(frame_pos[good]), len(view), check=False)
        reason = (
            f"{FRAME_NAMES[refused.kind]} frame where an Append frame was expected"
            if isinstance(refused, Frame)
            else refused.reason
        )
        raise Corrupt("segment", pos=int(frame_pos[good]), reason=reason)
    if check and (good := count_valid_checksums(view, frame_pos, rows.data.pos + rows.data.size)) < len(frame_pos):
        raise Corrupt("segment", pos=int(frame_pos[good]), reason="checksum mismatch")
    return rows


def _read_record_frame(view: memoryview, pos: int, *, check: bool, expected: int | None = None) -> Frame:
    """Read the batch or large record at `pos`; of the type that an index says, if `expected` is given."""
    frame = read_frame(view, pos, len(view), check=check)
    if isinstance(frame, Frame) and frame.kind in (APPEND_BATCH, LARGE_RECORD) and expected in (None, frame.kind):
        return frame
    what = "large record" if expected == LARGE_RECORD else "batch"
    reason = frame.reason if isinstance(frame, Fault) else ""
    raise Corrupt("segment", pos=pos, reason=reason or f"not the {what} that the index names")


# ── one frame ─────────────────────────────────────────────────────────────────────────────────────


def read_single_frame(buf: Buffer) -> Rows | None:
    """Read the records of a frame that this process has just encoded: checksum and text are not verified again. None
    where the buffer is not one whole frame of records."""
    frame = read_frame(buf, 0, len(buf), check=False)
    if not isinstance(frame, Frame) or frame.end != len(buf):
        return None
    if frame.kind == APPEND_BATCH:
        decoded = batch.decode(buf, frame)
        return None if isinstance(decoded, Fault) else decoded
    if frame.kind == LARGE_RECORD:
        rows, bad = large_record.decode(buf, [frame])
        return rows if bad is None else None
    return _single_record(buf, frame) if frame.kind == APPEND else None


def _single_record(buf: Buffer, frame: Frame) -> Rows:
    node, tag, data, end = HEADER_BYTES, frame.tag_pos, frame.data_pos, frame.data_end
    numbers = (frame.seq, frame.ts_ms * 1000, 0, data, end - data, node, tag - node, tag, data - tag)
    cells = np.array(numbers, np.int64).reshape(len(numbers), 1)  # one array, cut: each is a column of one value
    return Rows(
        buf,
        cells[0],
        cells[1],
        cells[2],
        Span(cells[3], cells[4]),
        Span(cells[5], cells[6]) if tag > node else None,
        Span(cells[7], cells[8]) if data > tag else None,
    )


def read_texts(buf: bytes, pos: int, seq: int, stop: int, *, nodes: bool = True) -> tuple[int, list[bytes]] | None:
    """Return the time and the data of records [seq, stop), as far as the verified frame at `pos` has them, without
    columns. None where they are not all JSON, or have tags or metas; or nodes, unless `nodes` allows them."""
    frame = read_frame(buf, pos, len(buf), check=False)
    if not isinstance(frame, Frame) or frame.flags & (JSON | HAS_TAG) != JSON:
        return None
    if not nodes and frame.flags & HAS_NODE:
        return None
    if frame.kind == APPEND:
        return frame.ts_ms, [buf[frame.data_pos : frame.data_end]]
    plain = batch.plain_lengths(buf, frame) if frame.kind == APPEND_BATCH else None
    if plain is None:
        return None
    count, lengths_pos = plain
    return frame.ts_ms, batch.slice_values(buf, lengths_pos, count, seq - frame.seq, stop - frame.seq)


class PlainBatch(NamedTuple):
    """Where the records of a batch are stored that have nothing but JSON data, and what they share."""

    seq: int
    ts_ms: int
    records: int
    lengths_pos: int  # the values follow
    data_end: int
    end: int  # of the frame


def find_plain_batch(buf: Buffer, pos: int, topic_id: int) -> PlainBatch | None:
    """Locate the records of the verified batch at `pos`. None where there is no batch of this topic, or its records
    have more than JSON data. Lengths are not checked."""
    frame = read_frame(buf, pos, len(buf), check=False)
    if not isinstance(frame, Frame) or frame.kind != APPEND_BATCH or frame.topic_id != topic_id:
        return None
    if frame.flags & (JSON | HAS_TAG | HAS_NODE) != JSON:
        return None
    plain = batch.plain_lengths(buf, frame)
    return None if plain is None else PlainBatch(frame.seq, frame.ts_ms, *plain, frame.data_end, frame.end)


def read_single_batch(
    buf: Buffer, entries: NDArray[np.void], first_seq: int, *, check: bool, origin: int
) -> Rows | None:
    """Read the records of these index entries, the first of which is of `first_seq`. None unless all are in one batch
    that matches every entry."""
    frame_pos = entries["frame_offset"]
    if frame_pos[0] != frame_pos[-1] or not entries["flags"][0] & segment_index.BATCH:
        return None
    frame = read_frame(buf, int(frame_pos[0]) - origin, len(buf), check=check)
    decoded = batch.decode(buf, frame) if isinstance(frame, Frame) and frame.kind == APPEND_BATCH else frame
    if not isinstance(decoded, Rows) or not isinstance(frame, Frame):
        return None
    rows = decoded.between(first_seq, first_seq + len(entries))
    # Seqs rise, so as many as there are entries are all of them.
    same = (
        len(rows) == len(entries)
        and (frame_pos == frame_pos[0]).all()
        and (entries["data_len"] == rows.data.size).all()
        and (entries["ts"] == frame.ts_ms).all()
        and (entries["flags"] == segment_index.record_flags(rows)).all()
    )
    return rows if same else None
