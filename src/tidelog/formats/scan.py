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

[hot] Every frame of a stretch of the WAL as columns of headers, and the rules of a batch that spans frames.

    buf     ┌───┬───┬──────┬───────┬───────┬────┬───────┬─────┐
            │ A │ B │ mark │ A     │ A     │ B  │ B     │ bad │      frames of topics A and B
            └───┴───┴──────┴───────┴───────┴────┴───────┴─────┘
                            MORE                 MORE
    at      ^   ^   ^       ^       ^       ^   │       │            with the header of each in `heads`
                                           whole┘    end┘

`whole` is where recovery cuts: behind it lies the beginning of a batch whose end is not there.

A replay has to know of every frame where it lies and what it is, and an object each costs three times as much as
verifying it. So one loop takes an unpack and a hash a frame, and what a header may say is judged of all of them
at once. Measured on 64 MiB of Append frames of 100 bytes: 2.4 M frames/s, 1.9 M with a node and a tag; 0.65 M
and 0.45 M one by one. The compiled kernel, where it was built, says where frames begin, and a hash is left for each.

[hot] The records of one frame, without a walk.

A walk prepares for thousands of frames: arrays of headers, gathered, compared, joined. For the newest write, which
every watcher wants at once, and for a page that lies in one batch, that is all overhead: 160 µs against 4, and 70
against 34. Whatever is out of the ordinary is left to the walk: the answer is None then.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct, error
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog import native
from tidelog.errors import Corrupt
from tidelog.formats import batch, frame, segment_index
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
    CLEAN_END,
    FRAME_LEN_MIN,
    FRAME_NAMES,
    HAS_NODE,
    HAS_TAG,
    HEADER_BYTES,
    KIND_OFFSET,
    KNOWN_FLAGS,
    MORE,
    OVERHEAD_BYTES,
    RECORD_FLAGS,
    SEQ_MAX,
    TS_MS_MAX,
    Fault,
    Frame,
    are_utf8,
    read_frame,
    read_headers,
)
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span, concat_rows, empty_rows
from tidelog.types import Buffer, Ints

_FRAMES_PER_CALL: Final = 1 << 16  # frames that are looked for at once
_SHORT_BYTES: Final = 1024  # a copy of a frame shorter than this costs less than a view of it
_NO_FRAMES: Final = np.zeros(0, np.int64)
_SUM_DTYPE: Final = np.dtype("<u8")
# Type and flags as one number, and which of them go together.
_KIND_AND_FLAGS: Final = np.dtype(
    {"names": ["lead"], "formats": ["<u2"], "offsets": [KIND_OFFSET], "itemsize": HEADER_BYTES}
)
_VALID_KIND_AND_FLAGS: Final = np.zeros(1 << 16, np.bool_)
_VALID_KIND_AND_FLAGS[
    [
        kind | flags << 8
        for kind in FRAME_NAMES
        for flags in range(KNOWN_FLAGS + 1)
        if kind in (APPEND, APPEND_BATCH) or not flags & RECORD_FLAGS
    ]
] = True


class HeaderScan(NamedTuple):
    frame_pos: Ints  # where each frame starts that belongs to a whole batch
    headers: NDArray[np.void]  # its header, a record of `frame.HEADER`
    end: int  # one past the last good frame
    whole_end: int  # one past the last frame that completes its batch: what recovery keeps
    stop: ScanStop
    reason: str  # in words, for BAD and TORN


def scan_headers(buf: Buffer, pos: int = 0, end: int | None = None) -> HeaderScan:
    """Every good frame from `pos` on, every checksum verified: what `scan.frames` says, without an object a frame."""
    view = memoryview(buf)
    limit = len(view) if end is None else end
    runs: list[Ints] = []
    far = _collect_frames(buf, pos, limit, runs)
    while isinstance(found := read_frame(view, far, limit), Frame):
        runs.append(np.array([far], np.int64))
        far = _collect_frames(buf, found.end, limit, runs)
    at = np.concatenate([_NO_FRAMES, *runs])
    heads = read_headers(view, at)
    more = (heads["flags"] & MORE) != 0
    good = _count_uninterrupted(heads[: first_misfit(view, at, heads, limit)], more)
    fault = found if good == len(at) else _explain_refusal(view, int(at[good]), limit, heads["topic_id"][:good])
    ends = at[:good] + heads["frame_len"][:good] + 4
    complete = np.flatnonzero(~more[:good])
    kept = int(complete[-1]) + 1 if len(complete) else 0
    whole = int(ends[kept - 1]) if kept else pos
    stop, reason = fault if kept == good else broken_chain(fault, whole)
    return HeaderScan(at[:kept], heads[:kept], int(ends[-1]) if good else pos, whole, stop, reason)


def chain_interruption(found: Frame, topic_id: int) -> Fault | None:
    """Why this frame cannot continue a batch of the topic, if it cannot."""
    if found.kind in (APPEND, APPEND_BATCH) and found.topic_id == topic_id:
        return None
    name = f"{FRAME_NAMES[found.kind]} frame of topic {found.topic_id}"
    return Fault(ScanStop.BAD, f"the batch of topic {topic_id} is interrupted by a {name}")


def broken_chain(fault: Fault, chain_at: int) -> Fault:
    """What a fault means in the middle of a batch: its end is not the end of a log."""
    if fault.stop is ScanStop.BAD:
        return fault
    return Fault(ScanStop.TORN, f"the batch that starts at byte {chain_at} breaks off before its last frame")


def first_misfit(buf: Buffer, at: Ints, heads: NDArray[np.void], end: int, *, text: bool = True) -> int:
    """How many of these frames come before the first that `get` would refuse, its checksum aside: the rules
    of `get` for all at once. Why it is refused is for `get` to say. Without `text` no name is looked at."""
    size = heads["data_len"].astype(np.int64) + OVERHEAD_BYTES
    names = heads["node_len"] + heads["tag_len"].astype(np.int64)
    named = np.flatnonzero(names)
    if len(named):
        size += names
    wrong = size != heads["frame_len"].astype(np.int64) + 4
    wrong |= at + size > end
    wrong |= ~_VALID_KIND_AND_FLAGS[heads.view(_KIND_AND_FLAGS)["lead"]]
    wrong |= heads["seq"] > SEQ_MAX
    wrong |= heads["ts_ms"] > TS_MS_MAX
    if not len(named):
        return int(wrong.argmax()) if wrong.any() else len(at)
    node_len, tag_len, flags = heads["node_len"][named], heads["tag_len"][named], heads["flags"][named]
    wrong[named] |= (node_len > 0) & (flags & HAS_NODE == 0) | (tag_len > 0) & (flags & HAS_TAG == 0)
    first = int(wrong.argmax()) if wrong.any() else len(at)
    count = int(np.searchsorted(named, first)) if text else 0
    if count:
        named = named[:count]
        lengths = np.column_stack((node_len[:count], tag_len[:count])).ravel()
        if not are_utf8(_join_ranges(buf, at[named] + HEADER_BYTES, names[named]), lengths):
            first = next(i for i in named.tolist() if isinstance(read_frame(buf, int(at[i]), end, check=False), Fault))
    return first


def _join_ranges(buf: Buffer, at: Ints, size: Ints) -> bytes:
    """These stretches of the buffer, back to back."""
    ends = size.cumsum()
    total = int(ends[-1])
    if total > 64 * len(at):
        view = memoryview(buf)
        return b"".join([view[lo:hi] for lo, hi in zip(at.tolist(), (at + size).tolist(), strict=True)])
    # A position a byte: where they are short, a fifth of the time of slicing each.
    every = np.repeat(at - ends + size, size)
    every += np.arange(total)
    octets: NDArray[np.uint8] = np.frombuffer(buf, np.uint8)[every]
    return octets.tobytes()


def _collect_frames(buf: Buffer, pos: int, end: int, out: list[Ints]) -> int:
    """Append the starts of frames whose checksum holds to `out`; return where the last of them ends.

    Stops without a verdict at the first frame that is anything else, or that ends too near the end.
    """
    view = memoryview(buf)
    while pos + OVERHEAD_BYTES <= end:
        made, far = native.find_frames(view, pos, end, _FRAMES_PER_CALL)
        if not made:
            break
        at = np.frombuffer(made, np.int64)
        piece = buf if isinstance(buf, bytes) and far - pos < len(at) * _SHORT_BYTES else view
        sum_at = np.append(at[1:], far) - 8
        spans = zip((at + 4).tolist(), sum_at.tolist(), strict=True)
        counted = np.array([xxh3_64_intdigest(piece[lo:hi]) for lo, hi in spans], _SUM_DTYPE)
        wrong = np.flatnonzero(counted != np.ndarray((len(view) - 7,), _SUM_DTYPE, view, strides=(1,))[sum_at])
        good = int(wrong[0]) if len(wrong) else len(at)
        out.append(at[:good])
        pos = far if good == len(at) else int(at[good])
        if good < _FRAMES_PER_CALL:
            break
    return pos


def _explain_refusal(view: memoryview, pos: int, end: int, topics: NDArray[np.uint64]) -> Fault:
    """Why a frame is refused whose checksum holds, behind frames of these topics."""
    found: Frame | Fault | None = read_frame(view, pos, end)
    if isinstance(found, Frame):
        found = chain_interruption(found, int(topics[-1]))
    assert found is not None, "it breaks a rule of one or the other"
    return found


def _count_uninterrupted(heads: NDArray[np.void], more: NDArray[np.bool_]) -> int:
    """How many frames there are before the first that interrupts a batch: the rules of `interruption` for all."""
    begun = np.flatnonzero(more[: len(heads)][:-1])
    if not len(begun):
        return len(heads)
    kind, topic = heads["kind"][begun + 1], heads["topic_id"]
    same = ((kind == APPEND) | (kind == APPEND_BATCH)) & (topic[begun + 1] == topic[begun])
    return len(heads) if same.all() else int(begun[same.argmin()]) + 1


def read_single_frame(made: Buffer) -> Rows | None:
    """The records of a frame that this process has just made, checksum and text: neither is looked at again. None where
    it is not one whole frame with records in it."""
    found = frame.read_frame(made, 0, len(made), check=False)
    if not isinstance(found, Frame) or found.end != len(made):
        return None
    if found.kind == APPEND_BATCH:
        decoded = batch.decode(made, found)
        return None if isinstance(decoded, Fault) else decoded
    return _single_record(made, found) if found.kind == APPEND else None


def read_texts(made: bytes, pos: int, seq: int, stop: int, *, nodes: bool = True) -> tuple[int, list[bytes]] | None:
    """The time and the data of records [seq, stop), as far as the frame at `pos` has them, without columns. As in
    `rows` nothing is looked at again. None where they are not all JSON, or have tags or metas; or nodes, where the
    caller would have to tell of these."""
    found = frame.read_frame(made, pos, len(made), check=False)
    if not isinstance(found, Frame) or found.flags & (frame.JSON | frame.HAS_TAG) != frame.JSON:
        return None
    if not nodes and found.flags & frame.HAS_NODE:
        return None
    if found.kind == APPEND:
        return found.ts_ms, [made[found.data_pos : found.data_end]]
    plain = batch.plain_lengths(made, found) if found.kind == APPEND_BATCH else None
    if plain is None:
        return None
    count, lengths_at = plain
    return found.ts_ms, batch.slice_values(made, lengths_at, count, seq - found.seq, stop - found.seq)


class PlainBatch(NamedTuple):
    """Where the records of a batch lie that have nothing but JSON data, and what they share."""

    seq: int
    ts_ms: int
    records: int
    lengths_pos: int  # the values follow
    data_end: int
    end: int  # of the frame


def find_plain_batch(buf: Buffer, pos: int, topic_id: int) -> PlainBatch | None:
    """The batch at `pos` of bytes that are known to be whole, for whoever reads its records where they lie. None where
    there is no such batch of this topic, or its records have more than JSON data. Its lengths are not looked at."""
    found = frame.read_frame(buf, pos, len(buf), check=False)
    if not isinstance(found, Frame) or found.kind != APPEND_BATCH or found.topic_id != topic_id:
        return None
    if found.flags & (frame.JSON | frame.HAS_TAG | frame.HAS_NODE) != frame.JSON:
        return None
    plain = batch.plain_lengths(buf, found)
    return None if plain is None else PlainBatch(found.seq, found.ts_ms, *plain, found.data_end, found.end)


def read_single_batch(
    buf: Buffer, entries: NDArray[np.void], first_seq: int, *, check: bool, origin: int
) -> Rows | None:
    """The records of these index entries, the first of which is of `first_seq`, where all lie in one batch that says
    the same of each of them."""
    at = entries["frame_offset"]
    if at[0] != at[-1] or not entries["flags"][0] & segment_index.BATCH:
        return None
    found = frame.read_frame(buf, int(at[0]) - origin, len(buf), check=check)
    decoded = batch.decode(buf, found) if isinstance(found, Frame) and found.kind == APPEND_BATCH else found
    if not isinstance(decoded, Rows) or not isinstance(found, Frame):
        return None
    stop_seq = first_seq + len(entries)
    there = decoded.between(first_seq, stop_seq)
    # Seqs rise, so as many as there are entries are all of them.
    same = (
        len(there) == len(entries)
        and (at == at[0]).all()
        and (entries["data_len"] == there.data.size).all()
        and (entries["ts"] == found.ts_ms).all()
        and (entries["flags"] == segment_index.record_flags(there)).all()
    )
    return there if same else None


def _single_record(made: Buffer, found: Frame) -> Rows:
    node, tag, data, end = HEADER_BYTES, found.tag_pos, found.data_pos, found.data_end
    numbers = (found.seq, found.ts_ms * 1000, 0, data, end - data, node, tag - node, tag, data - tag)
    cells = np.array(numbers, np.int64).reshape(len(numbers), 1)  # one array, cut: each is a column of one value
    return Rows(
        made,
        cells[0],
        cells[1],
        cells[2],
        Span(cells[3], cells[4]),
        Span(cells[5], cells[6]) if tag > node else None,
        Span(cells[7], cells[8]) if data > tag else None,
    )


_LENGTH_AND_LEAD = Struct("<IH")  # the length that opens a frame, type and flags as one number
_CHECKSUM_AND_LEAD = Struct("<QIH")  # a frame's checksum and the lead of the one behind it
_PLAIN_LEADS: Final = frozenset(APPEND | flags << 8 for flags in range(KNOWN_FLAGS + 1) if not flags & MORE)
_CHECKSUM_DTYPE: Final = np.dtype("<u8")
_NO_LIMIT: Final = 1 << 62
_SEARCH_BYTES: Final = 1 << 16  # of one look for a frame


class FrameScanner:
    """The frames of one buffer, each once. After the loop, `stop` and `reason` say why there are no more."""

    def __init__(self, buf: Buffer, pos: int = 0, end: int | None = None) -> None:
        self._buf, self._limit = memoryview(buf), len(buf) if end is None else end
        self.end = pos  # one past the last good frame
        self.whole_end = pos  # one past the last frame that completes its batch: what recovery keeps
        self.stop = ScanStop.END
        self.reason = ""

    def __iter__(self) -> Iterator[Frame]:
        chained: int | None = None  # the topic whose batch is not complete yet
        while True:
            found = read_frame(self._buf, self.end, self._limit)
            if isinstance(found, Frame) and chained is not None:
                found = chain_interruption(found, chained) or found
            if isinstance(found, Fault):
                self.stop, self.reason = found if chained is None else broken_chain(found, self.whole_end)
                return
            self.end = found.end
            chained = found.topic_id if found.flags & MORE else None
            if chained is None:
                self.whole_end = found.end
            yield found


def scan_frames(buf: Buffer, pos: int = 0, end: int | None = None) -> FrameScanner:
    """Every good frame from `pos` on; iterate, then ask `end`, `whole`, `stop` and `reason`."""
    return FrameScanner(buf, pos, end)


def scan_records(
    buf: Buffer,
    pos: int = 0,
    end: int | None = None,
    *,
    above: int = -1,
    count_max: int | None = None,
    bytes_max: int | None = None,
) -> ScanResult:
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
    heads = read_headers(view, at)
    appends = _append_rows(view, at, heads)
    batches, broken = _decode_batches(view, seen.groups)
    rows = _merge_rows(view, appends, batches)
    stops = [seen.stop, broken, _find_misfit(view, at, heads, limit), _find_disorder(view, rows, above)]
    end, fault = min((stop for stop in stops if stop is not None), key=lambda stop: stop.pos)
    # A fault in the middle of a batch takes the whole batch with it.
    end = next((first for first, stop in seen.chains if first <= end < stop), end)
    kept = int(np.searchsorted(rows.frame_pos, end))
    return ScanResult(rows if kept == len(rows) else rows.slice(0, kept), end, fault.stop, fault.reason)


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
    """Records [first_index, stop_index) of a sealed segment whose entry 0 is seq `base`. `origin` is where the first
    byte of `buf` lies in the segment's data.

    Headers are always held against the index; checksums only with `check`, which is for bytes that the
    segment's footer has not vouched for. A disagreement raises Corrupt with its position.
    """
    view = memoryview(buf)
    part = entries[first_index:stop_index]
    for quick in (segment_index.read_indexed_rows, read_single_batch):
        if len(part) and (found := quick(view, part, base + first_index, check=check, origin=origin)) is not None:
            return found
    # Column by column: picking whole entries moves them field by field.
    flags = np.ascontiguousarray(part["flags"])
    at: Ints = part["frame_offset"].astype(np.int64) - origin
    size: Ints = part["data_len"].astype(np.int64)
    ts_ms = np.ascontiguousarray(part["ts"])
    seq: Ints = np.arange(base + first_index, base + first_index + len(part), dtype=np.int64)
    hole = (flags & segment_index.HOLE) != 0
    if hole.any():
        live = np.flatnonzero(~hole)
        flags, at, size, ts_ms, seq = flags[live], at[live], size[live], ts_ms[live], seq[live]
    if not len(at):
        return empty_rows(view)
    if int(at.max()) + OVERHEAD_BYTES > len(view):
        raise Corrupt("segment", pos=int(at.max()), reason="the index names a frame behind the end of the data")
    single = (flags & segment_index.BATCH) == 0
    alone = at[single]
    appends = empty_rows(view)
    if len(alone):
        heads = read_headers(view, alone)
        appends = _append_rows(view, alone, heads)
        wrong = _find_misfit(view, alone, heads, len(view), text=check)
        if check and wrong is None:
            wrong = _find_bad_checksum(view, appends)
        if wrong is not None:
            raise Corrupt("segment", pos=wrong.pos, reason=wrong.fault.reason)
    groups: dict[int, list[Frame]] = {}
    if len(alone) < len(at):
        before = np.cumsum(single)
        for i in np.flatnonzero(~single & np.append(True, at[1:] != at[:-1])).tolist():
            groups.setdefault(int(before[i]), []).append(_read_batch_frame(view, int(at[i]), check=check))
    batches, wrong = _decode_batches(view, groups)
    if wrong is not None:
        raise Corrupt("segment", pos=wrong.pos, reason=wrong.fault.reason)
    # The first and the last batch may reach beyond what was asked for.
    found = _merge_rows(view, appends, batches).between(base + first_index, base + stop_index)
    same = len(found) == len(at) and (
        (found.seq == seq)
        & (found.frame_pos == at)
        & (found.data.size == size)
        & (found.ts_us == ts_ms.astype(np.int64) * 1000)
        & (ts_ms <= TS_MS_MAX)  # a larger one would wrap around; dividing the other side costs ten times as much
        & (segment_index.record_flags(found) == flags)
    )
    if not np.all(same):
        pos = int(at[np.argmin(same)])
        raise Corrupt("segment", pos=pos, reason="the frame and its index entry tell of different records")
    return found


def scan_single_frame(buf: Buffer, pos: int) -> ScanResult:
    """The records of the one frame at `pos`, whatever batch it belongs to; none where it is not a good one."""
    view = memoryview(buf)
    found = read_frame(view, pos, len(view))
    if isinstance(found, Fault):
        return ScanResult(empty_rows(view), pos, *found)
    if found.kind in (APPEND, APPEND_BATCH):
        at = np.array([pos], np.int64)
        try:
            return ScanResult(decode_records(view, at, read_headers(view, at)), found.end, ScanStop.END)
        except Corrupt as fault:
            return ScanResult(empty_rows(view), pos, ScanStop.BAD, fault.reason)
    return ScanResult(empty_rows(view), found.end, ScanStop.END)


def find_next_frame(buf: Buffer, pos: int, above: int, stop: int) -> int:
    """Where reading may go on after the bad frame at `pos`: behind the length it claims if a good frame is there, else
    at the next place that holds one with records between seqs `above` and `stop`; the end where none does."""
    view = memoryview(buf)
    size = len(view)

    def good(at: int) -> bool:
        rows = scan_single_frame(view, at).rows
        return len(rows) > 0 and int(rows.seq[0]) > above and int(rows.seq[-1]) < stop

    if pos + 4 <= size:
        after = pos + 4 + int.from_bytes(view[pos : pos + 4], "little")
        if after == size or (pos < after < size and good(after)):
            return after
    last = size - OVERHEAD_BYTES
    for low in range(pos + 1, last + 1, _SEARCH_BYTES):
        at: Ints = np.arange(low, min(low + _SEARCH_BYTES, last + 1), dtype=np.int64)
        heads = read_headers(view, at)
        kinds = (heads["kind"] == APPEND) | (heads["kind"] == APPEND_BATCH)
        ends = at + 4 + heads["frame_len"]
        seq = heads["seq"].astype(np.int64)
        likely = kinds & (heads["frame_len"] >= FRAME_LEN_MIN) & (ends <= size) & (seq > above) & (seq < stop)
        for place in at[likely].tolist():
            if good(place):
                return int(place)
    return size


def decode_records(buf: Buffer, at: Ints, heads: NDArray[np.void]) -> Rows:
    """The records of these frames of a survey: Append and AppendBatch frames of one topic, in their order.

    What the survey verified is not looked at again. Corrupt where the body of a batch is not one.
    """
    view = memoryview(buf)
    single = heads["kind"] == APPEND
    if single.all():
        return _append_rows(view, at, heads)
    batched = np.flatnonzero(~single)
    alone = at[single]
    groups: dict[int, list[Frame]] = {}
    for before, pos in zip(np.cumsum(single)[batched].tolist(), at[batched].tolist(), strict=True):
        groups.setdefault(before, []).append(_read_batch_frame(view, pos, check=False))
    batches, wrong = _decode_batches(view, groups)
    if wrong is not None:
        step = "its checksum holds, so it was written like this: keep the file and report it"
        raise Corrupt("WAL", pos=wrong.pos, reason=wrong.fault.reason, next_step=step)
    return _merge_rows(view, _append_rows(view, alone, read_headers(view, alone)), batches)


class _StopAt(NamedTuple):
    pos: int
    fault: Fault


class _CollectedFrames(NamedTuple):
    singles: list[int]  # where Append frames start
    groups: dict[int, list[Frame]]  # batches, by the number of Append frames before them
    chains: list[tuple[int, int]]  # first byte and end of every batch of several frames, the broken one too
    stop: _StopAt


def _collect(view: memoryview, pos: int, limit: int, far: int, room: int) -> _CollectedFrames:
    """Step from frame to frame until one is faulty or enough were seen."""
    singles: list[int] = []
    groups: dict[int, list[Frame]] = {}
    chains: list[tuple[int, int]] = []
    chain_at = -1
    chained = batched = 0
    fault = CLEAN_END
    while chain_at >= 0 or (pos < far and len(singles) + batched < room):
        if chain_at < 0:
            before = pos
            pos = _run_appends(view, pos, limit, far, room - batched, singles)
            if pos > before:
                continue
        found: Frame | Fault = read_frame(view, pos, limit)
        if isinstance(found, Frame) and chain_at >= 0:
            found = chain_interruption(found, chained) or found
        if isinstance(found, Fault):
            fault = found
            break
        if found.kind == APPEND:
            singles.append(pos)
        elif found.kind == APPEND_BATCH:
            groups.setdefault(len(singles), []).append(found)
            batched += batch.record_count(view, found) if room < _NO_LIMIT else 0
        if found.flags & MORE:
            chain_at, chained = pos if chain_at < 0 else chain_at, found.topic_id
        elif chain_at >= 0:
            chains.append((chain_at, found.end))
            chain_at = -1
        pos = found.end
    if chain_at >= 0:
        fault = broken_chain(fault, chain_at)
        chains.append((chain_at, pos + 1))
    return _CollectedFrames(singles, groups, chains, _StopAt(pos, fault))


def _decode_batches(view: memoryview, groups: dict[int, list[Frame]]) -> tuple[list[tuple[int, Rows]], _StopAt | None]:
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


def _run_appends(view: memoryview, pos: int, end: int, far: int, count_max: int, out: list[int]) -> int:
    """Put the starts of Append frames that are a batch of their own on `out`; return where they end.

    Only their checksum is verified. Stops without a verdict at the first frame that is anything else,
    or too near the end to look behind it: `get` has the last word there. One unpack and one hash per
    frame and no object, which is four times the speed of `get`.
    """
    if pos + OVERHEAD_BYTES > end:
        return pos
    view = view[:end]
    plain, seam, digest, put = _PLAIN_LEADS, _CHECKSUM_AND_LEAD.unpack_from, xxh3_64_intdigest, out.append
    frame_len, lead = _LENGTH_AND_LEAD.unpack_from(view, pos)
    try:
        for _ in range(count_max - len(out)):
            if lead not in plain or frame_len < FRAME_LEN_MIN or pos >= far:
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


def _append_rows(view: memoryview, at: Ints, heads: NDArray[np.void]) -> Rows:
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


def _find_misfit(
    view: memoryview, at: Ints, heads: NDArray[np.void], limit: int, *, text: bool = True
) -> _StopAt | None:
    """The first frame that is not what it claims to be, or not an Append frame."""
    first = first_misfit(view, at, heads, limit, text=text)
    others = np.flatnonzero(heads["kind"][:first] != APPEND)
    first = int(others[0]) if len(others) else first
    if first == len(at):
        return None
    pos = int(at[first])
    found = read_frame(view, pos, limit, check=False)
    if isinstance(found, Frame):
        found = Fault(ScanStop.BAD, f"{FRAME_NAMES[found.kind]} frame where an Append frame was expected")
    return _StopAt(pos, found)


def _find_bad_checksum(view: memoryview, rows: Rows) -> _StopAt | None:
    """The first Append frame whose checksum does not hold."""
    if not len(rows):
        return None
    sum_at = rows.data.pos + rows.data.size
    stored = np.ndarray((len(view) - 7,), _CHECKSUM_DTYPE, view, strides=(1,))[sum_at]
    spans = zip((rows.frame_pos + 4).tolist(), sum_at.tolist(), strict=True)
    counted = np.array([xxh3_64_intdigest(view[lo:hi]) for lo, hi in spans], _CHECKSUM_DTYPE)
    wrong = np.flatnonzero(stored != counted)
    return _StopAt(int(rows.frame_pos[wrong[0]]), Fault(ScanStop.BAD, "checksum mismatch")) if len(wrong) else None


def _find_disorder(view: memoryview, rows: Rows, above: int) -> _StopAt | None:
    """The first record that does not follow the one before it. Inside a frame order holds by construction."""
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


def _read_batch_frame(view: memoryview, pos: int, *, check: bool) -> Frame:
    found = read_frame(view, pos, len(view), check=check)
    if isinstance(found, Frame) and found.kind == APPEND_BATCH:
        return found
    reason = found.reason if isinstance(found, Fault) else ""
    raise Corrupt("segment", pos=pos, reason=reason or "not the batch that the index names")


def _merge_rows(view: memoryview, appends: Rows, batches: list[tuple[int, Rows]]) -> Rows:
    """Append records and batches in the order of their bytes; each batch says how many Appends precede it."""
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
