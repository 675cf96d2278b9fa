"""[hot] The walk over frames. Recovery, verification, inspection and readers all come through here.

    pos                                                    end
    ┌────────┬────────┬──────┬───────┬───────┬───────┬─────┬┄┄┄┄┄┄┄┄┐
    │ Append │ Append │ mark │ batch │ batch │ batch │ bad │ unread │
    └────────┴────────┴──────┴───────┴───────┴───────┴─────┴┄┄┄┄┄┄┄┄┘
                              MORE    MORE    the three are one caller's batch

Four ways through the same bytes:
  frames         every frame, one object each: for the WAL, where topics and marks are mixed
  survey         the same as columns of headers, and `decode` the records of those that are one topic's
  walk           the records of one topic as columns, every checksum verified
  walk_indexed   the records of a sealed segment that its index names, without stepping from frame to frame

A chain of MORE frames is one caller's batch and counts as a whole: one that breaks off is not
part of any result, however good its first frames are.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct, error
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog.errors import Corrupt
from tidelog.formats import batch, idx, indexed, lone
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
    ENDED,
    HEADER_BYTES,
    KNOWN_FLAGS,
    LEN_MIN,
    MORE,
    NAMES,
    OVERHEAD_BYTES,
    TS_MS_MAX,
    Fault,
    Frame,
    get,
    headers,
)
from tidelog.formats.rows import Rows, Span, Stop, Walk, none, together
from tidelog.formats.survey import Survey as Survey
from tidelog.formats.survey import broken_off, interruption, misfit
from tidelog.formats.survey import survey as survey
from tidelog.types import Buffer, Ints

_LEAD = Struct("<IH")  # the length that opens a frame, type and flags as one number
_SEAM = Struct("<QIH")  # a frame's checksum and the lead of the one behind it
_PLAIN: Final = frozenset(APPEND | flags << 8 for flags in range(KNOWN_FLAGS + 1) if not flags & MORE)
_SUM: Final = np.dtype("<u8")
_NO_LIMIT: Final = 1 << 62
_SEARCH_BYTES: Final = 1 << 16  # of one look for a frame


class Scanner:
    """The frames of one buffer, each once. After the loop, `stop` and `reason` say why there are no more."""

    def __init__(self, buf: Buffer, pos: int = 0, end: int | None = None) -> None:
        self._buf, self._limit = memoryview(buf), len(buf) if end is None else end
        self.end = pos  # one past the last good frame
        self.whole = pos  # one past the last frame that completes its batch: what recovery keeps
        self.stop = Stop.END
        self.reason = ""

    def __iter__(self) -> Iterator[Frame]:
        chained: int | None = None  # the topic whose batch is not complete yet
        while True:
            found = get(self._buf, self.end, self._limit)
            if isinstance(found, Frame) and chained is not None:
                found = interruption(found, chained) or found
            if isinstance(found, Fault):
                self.stop, self.reason = found if chained is None else broken_off(found, self.whole)
                return
            self.end = found.end
            chained = found.topic_id if found.flags & MORE else None
            if chained is None:
                self.whole = found.end
            yield found


def frames(buf: Buffer, pos: int = 0, end: int | None = None) -> Scanner:
    """Every good frame from `pos` on; iterate, then ask `end`, `whole`, `stop` and `reason`."""
    return Scanner(buf, pos, end)


def walk(
    buf: Buffer,
    pos: int = 0,
    end: int | None = None,
    *,
    above: int = -1,
    count_max: int | None = None,
    bytes_max: int | None = None,
) -> Walk:
    """The records of one topic from `pos` to the first fault, every checksum verified.

    Seqs rise from above `above` and times never fall, or the walk ends there as BAD. Control frames
    are stepped over. The limits are looked at between batches, so the last batch may pass them; a hole
    counts as a record.
    """
    view = memoryview(buf)
    limit = len(view) if end is None else end
    room = _NO_LIMIT if count_max is None else count_max
    far = _NO_LIMIT if bytes_max is None else pos + bytes_max
    seen = _collect(view, pos, limit, far, room)
    at = np.array(seen.singles, np.int64)
    heads = headers(view, at)
    appends = _appends(view, at, heads)
    batches, broken = _batches(view, seen.groups)
    rows = _joined(view, appends, batches)
    stops = [seen.stop, broken, _misfit(view, at, heads, limit), _disorder(view, rows, above)]
    end, fault = min((stop for stop in stops if stop is not None), key=lambda stop: stop.pos)
    # A fault in the middle of a batch takes the whole batch with it.
    end = next((first for first, stop in seen.chains if first <= end < stop), end)
    kept = int(np.searchsorted(rows.at, end))
    return Walk(rows if kept == len(rows) else rows.part(0, kept), end, fault.stop, fault.reason)


def walk_indexed(
    buf: Buffer,
    entries: NDArray[np.void],
    first_index: int,
    stop_index: int,
    base: int,
    *,
    check: bool,
    origin: int = 0,
    compiled: bool = True,
) -> Rows:
    """Records [first_index, stop_index) of a sealed segment whose entry 0 is seq `base`. `origin` is where the first
    byte of `buf` lies in the segment's data.

    Headers are always held against the index; checksums only with `check`, which is for bytes that the
    segment's footer has not vouched for. A disagreement raises Corrupt with its position. `compiled`: the kernel may
    have the first look.
    """
    view = memoryview(buf)
    part = entries[first_index:stop_index]
    for quick in (indexed.rows, lone.named) if compiled else (lone.named,):
        if len(part) and (found := quick(view, part, base + first_index, check=check, origin=origin)) is not None:
            return found
    # Column by column: picking whole entries moves them field by field.
    flags = np.ascontiguousarray(part["flags"])
    at: Ints = part["frame_offset"].astype(np.int64) - origin
    size: Ints = part["data_len"].astype(np.int64)
    ts_ms = np.ascontiguousarray(part["ts"])
    seq: Ints = np.arange(base + first_index, base + first_index + len(part), dtype=np.int64)
    hole = (flags & idx.HOLE) != 0
    if hole.any():
        live = np.flatnonzero(~hole)
        flags, at, size, ts_ms, seq = flags[live], at[live], size[live], ts_ms[live], seq[live]
    if not len(at):
        return none(view)
    if int(at.max()) + OVERHEAD_BYTES > len(view):
        raise Corrupt("segment", pos=int(at.max()), reason="the index names a frame behind the end of the data")
    single = (flags & idx.BATCH) == 0
    alone = at[single]
    appends = none(view)
    if len(alone):
        heads = headers(view, alone)
        appends = _appends(view, alone, heads)
        wrong = _misfit(view, alone, heads, len(view), text=check)
        if check and wrong is None:
            wrong = _mismatch(view, appends)
        if wrong is not None:
            raise Corrupt("segment", pos=wrong.pos, reason=wrong.fault.reason)
    groups: dict[int, list[Frame]] = {}
    if len(alone) < len(at):
        before = np.cumsum(single)
        for i in np.flatnonzero(~single & np.append(True, at[1:] != at[:-1])).tolist():
            groups.setdefault(int(before[i]), []).append(_batch_at(view, int(at[i]), check=check))
    batches, wrong = _batches(view, groups)
    if wrong is not None:
        raise Corrupt("segment", pos=wrong.pos, reason=wrong.fault.reason)
    # The first and the last batch may reach beyond what was asked for.
    found = _joined(view, appends, batches).between(base + first_index, base + stop_index)
    same = len(found) == len(at) and (
        (found.seq == seq)
        & (found.at == at)
        & (found.data.size == size)
        & (found.ts_us == ts_ms.astype(np.int64) * 1000)
        & (ts_ms <= TS_MS_MAX)  # a larger one would wrap around; dividing the other side costs ten times as much
        & (idx.flags(found) == flags)
    )
    if not np.all(same):
        pos = int(at[np.argmin(same)])
        raise Corrupt("segment", pos=pos, reason="the frame and its index entry tell of different records")
    return found


def alone(buf: Buffer, pos: int) -> Walk:
    """The records of the one frame at `pos`, whatever batch it belongs to; none where it is not a good one."""
    view = memoryview(buf)
    found = get(view, pos, len(view))
    if isinstance(found, Fault):
        return Walk(none(view), pos, *found)
    if found.kind in (APPEND, APPEND_BATCH):
        at = np.array([pos], np.int64)
        try:
            return Walk(decode(view, at, headers(view, at)), found.end, Stop.END)
        except Corrupt as fault:
            return Walk(none(view), pos, Stop.BAD, fault.reason)
    return Walk(none(view), found.end, Stop.END)


def resync(buf: Buffer, pos: int, above: int, stop: int) -> int:
    """Where reading may go on after the bad frame at `pos`: behind the length it claims if a good frame is there, else
    at the next place that holds one with records between seqs `above` and `stop`; the end where none does."""
    view = memoryview(buf)
    size = len(view)

    def good(at: int) -> bool:
        rows = alone(view, at).rows
        return len(rows) > 0 and int(rows.seq[0]) > above and int(rows.seq[-1]) < stop

    if pos + 4 <= size:
        after = pos + 4 + int.from_bytes(view[pos : pos + 4], "little")
        if after == size or (pos < after < size and good(after)):
            return after
    last = size - OVERHEAD_BYTES
    for low in range(pos + 1, last + 1, _SEARCH_BYTES):
        at: Ints = np.arange(low, min(low + _SEARCH_BYTES, last + 1), dtype=np.int64)
        heads = headers(view, at)
        kinds = (heads["kind"] == APPEND) | (heads["kind"] == APPEND_BATCH)
        ends = at + 4 + heads["frame_len"]
        seq = heads["seq"].astype(np.int64)
        likely = kinds & (heads["frame_len"] >= LEN_MIN) & (ends <= size) & (seq > above) & (seq < stop)
        for place in at[likely].tolist():
            if good(place):
                return int(place)
    return size


def decode(buf: Buffer, at: Ints, heads: NDArray[np.void]) -> Rows:
    """The records of these frames of a survey: Append and AppendBatch frames of one topic, in their order.

    What the survey verified is not looked at again. Corrupt where the body of a batch is not one.
    """
    view = memoryview(buf)
    single = heads["kind"] == APPEND
    if single.all():
        return _appends(view, at, heads)
    batched = np.flatnonzero(~single)
    alone = at[single]
    groups: dict[int, list[Frame]] = {}
    for before, pos in zip(np.cumsum(single)[batched].tolist(), at[batched].tolist(), strict=True):
        groups.setdefault(before, []).append(_batch_at(view, pos, check=False))
    batches, wrong = _batches(view, groups)
    if wrong is not None:
        step = "its checksum holds, so it was written like this: keep the file and report it"
        raise Corrupt("WAL", pos=wrong.pos, reason=wrong.fault.reason, next_step=step)
    return _joined(view, _appends(view, alone, headers(view, alone)), batches)


class _StopAt(NamedTuple):
    pos: int
    fault: Fault


class _Seen(NamedTuple):
    singles: list[int]  # where Append frames start
    groups: dict[int, list[Frame]]  # batches, by the number of Append frames before them
    chains: list[tuple[int, int]]  # first byte and end of every batch of several frames, the broken one too
    stop: _StopAt


def _collect(view: memoryview, pos: int, limit: int, far: int, room: int) -> _Seen:
    """Step from frame to frame until one is faulty or enough were seen."""
    singles: list[int] = []
    groups: dict[int, list[Frame]] = {}
    chains: list[tuple[int, int]] = []
    chain_at = -1
    chained = batched = 0
    fault = ENDED
    while chain_at >= 0 or (pos < far and len(singles) + batched < room):
        if chain_at < 0:
            before = pos
            pos = _run(view, pos, limit, far, room - batched, singles)
            if pos > before:
                continue
        found: Frame | Fault = get(view, pos, limit)
        if isinstance(found, Frame) and chain_at >= 0:
            found = interruption(found, chained) or found
        if isinstance(found, Fault):
            fault = found
            break
        if found.kind == APPEND:
            singles.append(pos)
        elif found.kind == APPEND_BATCH:
            groups.setdefault(len(singles), []).append(found)
            batched += batch.count(view, found) if room < _NO_LIMIT else 0
        if found.flags & MORE:
            chain_at, chained = pos if chain_at < 0 else chain_at, found.topic_id
        elif chain_at >= 0:
            chains.append((chain_at, found.end))
            chain_at = -1
        pos = found.end
    if chain_at >= 0:
        fault = broken_off(fault, chain_at)
        chains.append((chain_at, pos + 1))
    return _Seen(singles, groups, chains, _StopAt(pos, fault))


def _batches(view: memoryview, groups: dict[int, list[Frame]]) -> tuple[list[tuple[int, Rows]], _StopAt | None]:
    """The records of the batches up to the first that is not one, each behind how many Append frames.

    A batch of holes only is left out: its columns would make null values of other frames into empty ones.
    """
    out: list[tuple[int, Rows]] = []
    for before, group in groups.items():
        rows, bad = batch.decode_all(view, group)
        out += [(before, part) for part in rows if len(part)]
        if bad is not None:
            return out, _StopAt(*bad)
    return out, None


def _run(view: memoryview, pos: int, end: int, far: int, count_max: int, out: list[int]) -> int:
    """Put the starts of Append frames that are a batch of their own on `out`; return where they end.

    Only their checksum is verified. Stops without a verdict at the first frame that is anything else,
    or too near the end to look behind it: `get` has the last word there. One unpack and one hash per
    frame and no object, which is four times the speed of `get`.
    """
    if pos + OVERHEAD_BYTES > end:
        return pos
    view = view[:end]
    plain, seam, digest, put = _PLAIN, _SEAM.unpack_from, xxh3_64_intdigest, out.append
    frame_len, lead = _LEAD.unpack_from(view, pos)
    try:
        for _ in range(count_max - len(out)):
            if lead not in plain or frame_len < LEN_MIN or pos >= far:
                break
            sum_at = pos + frame_len - 4
            checksum, frame_len, lead = seam(view, sum_at)
            if digest(view[pos + 4 : sum_at]) != checksum:
                break
            put(pos)
            pos = sum_at + 8
    except error:
        pass  # The frame ends too near the end, or behind it.
    return pos


def _appends(view: memoryview, at: Ints, heads: NDArray[np.void]) -> Rows:
    """The records of Append frames with these headers. Not one length is checked here."""
    node_len, tag_len = heads["node_len"].astype(np.int64), heads["tag_len"].astype(np.int64)
    node_at = at + HEADER_BYTES
    tag_at = node_at + node_len
    return Rows(
        view,
        heads["seq"].astype(np.int64),
        heads["ts_ms"].astype(np.int64) * 1000,
        at,
        Span(tag_at + tag_len, heads["data_len"].astype(np.int64)),
        Span(node_at, node_len) if node_len.any() else None,
        Span(tag_at, tag_len) if tag_len.any() else None,
    )


def _misfit(view: memoryview, at: Ints, heads: NDArray[np.void], limit: int, *, text: bool = True) -> _StopAt | None:
    """The first frame that is not what it claims to be, or not an Append frame."""
    first = misfit(view, at, heads, limit, text=text)
    others = np.flatnonzero(heads["kind"][:first] != APPEND)
    first = int(others[0]) if len(others) else first
    if first == len(at):
        return None
    pos = int(at[first])
    found = get(view, pos, limit, check=False)
    if isinstance(found, Frame):
        found = Fault(Stop.BAD, f"{NAMES[found.kind]} frame where an Append frame was expected")
    return _StopAt(pos, found)


def _mismatch(view: memoryview, rows: Rows) -> _StopAt | None:
    """The first Append frame whose checksum does not hold."""
    if not len(rows):
        return None
    sum_at = rows.data.pos + rows.data.size
    stored = np.ndarray((len(view) - 7,), _SUM, view, strides=(1,))[sum_at]
    spans = zip((rows.at + 4).tolist(), sum_at.tolist(), strict=True)
    counted = np.array([xxh3_64_intdigest(view[lo:hi]) for lo, hi in spans], _SUM)
    wrong = np.flatnonzero(stored != counted)
    return _StopAt(int(rows.at[wrong[0]]), Fault(Stop.BAD, "checksum mismatch")) if len(wrong) else None


def _disorder(view: memoryview, rows: Rows, above: int) -> _StopAt | None:
    """The first record that does not follow the one before it. Inside a frame order holds by construction."""
    if not len(rows):
        return None
    first = np.append(np.int64(0), np.flatnonzero(rows.at[1:] != rows.at[:-1]) + 1)
    last = first[1:] - 1
    topic = headers(view, rows.at[first])["topic_id"]
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
    return _StopAt(int(rows.at[first[i]]), Fault(Stop.BAD, reason))


def _batch_at(view: memoryview, pos: int, *, check: bool) -> Frame:
    found = get(view, pos, len(view), check=check)
    if isinstance(found, Frame) and found.kind == APPEND_BATCH:
        return found
    reason = found.reason if isinstance(found, Fault) else ""
    raise Corrupt("segment", pos=pos, reason=reason or "not the batch that the index names")


def _joined(view: memoryview, appends: Rows, batches: list[tuple[int, Rows]]) -> Rows:
    """Append records and batches in the order of their bytes; each batch says how many Appends precede it."""
    if not batches:
        return appends
    if len(batches) == 1 and not len(appends):
        return batches[0][1]
    parts: list[Rows] = []
    lo = 0
    for hi, rows in [*batches, (len(appends), none(view))]:
        parts += [appends.part(lo, hi), rows] if hi > lo else [rows]
        lo = hi
    return together(view, parts)
