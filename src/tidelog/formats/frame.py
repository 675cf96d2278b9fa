"""The frame of the WAL and of segments. No other module knows its header and its checksum.

    0           4      5       6          14    22   30         32        34         38
    ┌───────────┬──────┬───────┬──────────┬─────┬────┬──────────┬─────────┬──────────┬──────────────┬──────┐
    │ frame_len │ type │ flags │ topic_id │ seq │ ts │ node_len │ tag_len │ data_len │node│tag│data │ xxh3 │
    │    u32    │  u8  │  u8   │   u64    │ u64 │u64 │   u16    │   u16   │   u32    │              │ u64  │
    └───────────┴──────┴───────┴──────────┴─────┴────┴──────────┴─────────┴──────────┴──────────────┴──────┘
                └──────────────────────────── covered by XXH3-64 ───────────────────────────────────┘

Little-endian. `frame_len` counts every byte after itself, so a reader can skip a frame that it does not parse, and
detects a frame that runs past the end of the bytes before it uses any of it. `ts` is the commit time in milliseconds.
Node and tag are UTF-8 and present only with their flag. Type 0 is never written, so preallocated zeros are not data.

MORE: the next frame belongs to the same caller's batch, and a reader applies all of them or none. JSON: every record of
the frame is JSON text; the writer has parsed it, a reader does not verify that. MORE is valid only on frames that hold
records, JSON only on Append and AppendBatch. Encoding refuses what decoding would refuse, so everything that is stored
can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from tidelog import native
from tidelog.errors import BadInput, TooLarge
from tidelog.formats.rows import ScanStop
from tidelog.types import Buffer, Ints

APPEND: Final = 1
TOPIC_CREATE: Final = 2
TOPIC_DELETE: Final = 3
ROUTER_CREATE: Final = 4
ROUTER_DELETE: Final = 5
DELETE: Final = 6
EVICT_WATERMARK: Final = 7
CHECKPOINT_MARK: Final = 8
CONFIG_UPDATE: Final = 9
LEASE: Final = 10
HEAD_WATERMARK: Final = 11
APPEND_BATCH: Final = 12
FORWARD: Final = 13
GROUP_CURSOR: Final = 14
NUMBERED_BATCH: Final = 15
WRITE_KEY: Final = 16
LARGE_RECORD: Final = 17
COMPACTION: Final = 18

FRAME_NAMES: Final = {
    APPEND: "Append",
    TOPIC_CREATE: "TopicCreate",
    TOPIC_DELETE: "TopicDelete",
    ROUTER_CREATE: "RouterCreate",
    ROUTER_DELETE: "RouterDelete",
    DELETE: "Delete",
    EVICT_WATERMARK: "EvictWatermark",
    CHECKPOINT_MARK: "CheckpointMark",
    CONFIG_UPDATE: "ConfigUpdate",
    LEASE: "Lease",
    HEAD_WATERMARK: "HeadWatermark",
    APPEND_BATCH: "AppendBatch",
    FORWARD: "Forward",
    GROUP_CURSOR: "GroupCursor",
    NUMBERED_BATCH: "NumberedBatch",
    WRITE_KEY: "WriteKey",
    LARGE_RECORD: "LargeRecord",
    COMPACTION: "Compaction",
}
_IS_RECORD_KIND: Final = np.zeros(256, np.bool_)
_IS_RECORD_KIND[[APPEND, APPEND_BATCH, LARGE_RECORD]] = True

HAS_TAG: Final = 1
HAS_NODE: Final = 2
DURABLE: Final = 4  # the caller waits for a sync
MORE: Final = 8  # more frames of the same caller's batch follow; frames of records only
JSON: Final = 16  # every record of the frame is JSON text; Append and AppendBatch only
RECORD_FLAGS: Final = MORE | JSON  # of frames that hold records
_CALLER_FLAGS: Final = DURABLE | RECORD_FLAGS
_RECORD_FLAGS_BY_KIND: Final = {APPEND: RECORD_FLAGS, APPEND_BATCH: RECORD_FLAGS, LARGE_RECORD: MORE}
KNOWN_FLAGS: Final = HAS_TAG | HAS_NODE | _CALLER_FLAGS

_LEN = Struct("<I")
_HEADER = Struct("<IBBQQQHHI")
_COVERED = Struct("<BBQQQHHI")  # the header without frame_len, which the checksum does not cover
_SUM = Struct("<Q")
_SUM_DTYPE: Final = np.dtype("<u8")
HEADER_BYTES: Final = 38
KIND_OFFSET: Final = 4
FLAGS_OFFSET: Final = 5
OVERHEAD_BYTES: Final = 46  # header and checksum: the smallest frame
FRAME_LEN_MIN: Final = OVERHEAD_BYTES - 4
HEADER: Final = np.dtype(  # the same header as a NumPy record
    [
        ("frame_len", "<u4"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("topic_id", "<u8"),
        ("seq", "<u8"),
        ("ts_ms", "<u8"),
        ("node_len", "<u2"),
        ("tag_len", "<u2"),
        ("data_len", "<u4"),
    ]
)
assert _HEADER.size == HEADER.itemsize == HEADER_BYTES, (
    "drawn above, frozen by tests/golden; changing it is a new format"
)

U16_MAX: Final = (1 << 16) - 1
U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 2  # all ones is reserved as "no value"
# Columns are signed 64-bit, times in microseconds, and `last + 1` must fit as well.
SEQ_MAX: Final = (1 << 63) - 2
TS_MS_MAX: Final = ((1 << 63) - 1) // 1000


class Frame(NamedTuple):
    """One frame as positions in the buffer it was found in; nothing is copied."""

    kind: int
    flags: int
    topic_id: int
    seq: int  # of its first record
    ts_ms: int
    pos: int
    node_pos: int
    tag_pos: int  # one past the node
    data_pos: int  # one past the tag
    data_end: int
    end: int  # where the next frame starts


class Fault(NamedTuple):
    """Why there is no frame here. Recovery decides what that means."""

    stop: ScanStop
    reason: str  # in words, for BAD and TORN


CLEAN_END: Final = Fault(ScanStop.END, "")


_FAST_PATH_BYTES_MAX: Final = 1 << 20  # for larger data the checks of `encode` cost nothing


def encode(
    kind: int,
    *,
    topic_id: int = 0,
    seq: int = 0,
    ts_ms: int,
    data: Buffer = b"",
    node: bytes = b"",
    tag: bytes = b"",
    flags: int = 0,
) -> bytes:
    """Encode one frame. HAS_NODE and HAS_TAG follow from `node` and `tag`; `flags` takes DURABLE, MORE and JSON."""
    flags = _check_fields(kind, topic_id, seq, seq, ts_ms, len(data), node, tag, flags)
    covered = _COVERED.pack(kind, flags, topic_id, seq, ts_ms, len(node), len(tag), len(data)) + node + tag + data
    return _LEN.pack(len(covered) + 8) + covered + _SUM.pack(xxh3_64_intdigest(covered))


def encode_append(
    topic_id: int, seq: int, ts_ms: int, data: bytes, node: bytes = b"", tag: bytes = b"", flags: int = 0
) -> bytes:
    """Encode one Append frame. A small record without node and tag skips the checks of `encode`, field by field."""
    if node or tag or not (flags & ~_CALLER_FLAGS == 0 < seq <= SEQ_MAX and 0 <= ts_ms <= TS_MS_MAX):
        return encode(APPEND, topic_id=topic_id, seq=seq, ts_ms=ts_ms, data=data, node=node, tag=tag, flags=flags)
    size = len(data)
    if size > _FAST_PATH_BYTES_MAX:
        return encode(APPEND, topic_id=topic_id, seq=seq, ts_ms=ts_ms, data=data, flags=flags)
    covered = _COVERED.pack(APPEND, flags, topic_id, seq, ts_ms, 0, 0, size) + data
    return _LEN.pack(size + FRAME_LEN_MIN) + covered + _SUM.pack(xxh3_64_intdigest(covered))


def encode_header(
    kind: int,
    *,
    topic_id: int = 0,
    seq: int,
    last_seq: int | None = None,
    ts_ms: int,
    data_len: int,
    node: bytes = b"",
    tag: bytes = b"",
    flags: int = 0,
) -> bytes:
    """Encode the part of a frame before its data, for data that is written in pieces; `encode_checksum` ends it."""
    last = seq if last_seq is None else last_seq
    flags = _check_fields(kind, topic_id, seq, last, ts_ms, data_len, node, tag, flags)
    size = FRAME_LEN_MIN + len(node) + len(tag) + data_len
    return _HEADER.pack(size, kind, flags, topic_id, seq, ts_ms, len(node), len(tag), data_len) + node + tag


def encode_checksum(frame: Buffer) -> bytes:
    """Encode the checksum that ends a frame; `frame` is all of it before the checksum."""
    return _SUM.pack(xxh3_64_intdigest(memoryview(frame)[4:]))


def encode_parts(
    kind: int,
    topic_id: int,
    seq: int,
    last_seq: int,
    ts_ms: int,
    parts: Sequence[Buffer],
    *,
    node: bytes = b"",
    tag: bytes = b"",
    flags: int = 0,
) -> bytes:
    """Encode one frame whose data is the concatenation of `parts`, without copying the data twice."""
    size = sum(map(len, parts))
    flags = _check_fields(kind, topic_id, seq, last_seq, ts_ms, size, node, tag, flags)
    head = _COVERED.pack(kind, flags, topic_id, seq, ts_ms, len(node), len(tag), size) + node + tag
    digest = xxh3_64(head)
    for part in parts:
        digest.update(part)
    return b"".join((_LEN.pack(len(head) + size + 8), head, *parts, _SUM.pack(digest.intdigest())))


def read_frame(buf: Buffer, pos: int, end: int, *, check: bool = True) -> Frame | Fault:
    """Read the frame at `pos` of the bytes before `end`, or return why there is none. Bad bytes never raise.

    `end` is not after the end of the buffer; every length is compared with it before it is used. Without `check` the
    checksum is not verified: for bytes that were verified in another way.
    """
    left = end - pos
    if left < 4:
        if any(buf[pos:end]):
            return Fault(ScanStop.TORN, f"{left} bytes are left, too few for a frame length")
        return CLEAN_END
    (frame_len,) = _LEN.unpack_from(buf, pos)
    if frame_len < FRAME_LEN_MIN:
        # A header of zeros is preallocated space, or a frame whose header is written last. One damaged byte can turn
        # a length into zero, but not the type after it, so the whole header is compared.
        if frame_len == 0 and not any(buf[pos : min(end, pos + HEADER_BYTES)]):
            return CLEAN_END
        return Fault(ScanStop.BAD, f"frame length {frame_len} is below the smallest, {FRAME_LEN_MIN}")
    if frame_len > left - 4:
        return Fault(ScanStop.TORN, f"the frame has {frame_len} bytes, {left - 4} are left")
    _, kind, flags, topic_id, seq, ts_ms, node_len, tag_len, data_len = _HEADER.unpack_from(buf, pos)
    node_pos = pos + HEADER_BYTES
    tag_pos = node_pos + node_len
    data_pos = tag_pos + tag_len
    data_end = data_pos + data_len
    if data_end - pos != frame_len - 4:
        return Fault(ScanStop.BAD, f"sections of {data_end - node_pos} bytes do not add up to the frame's length")
    if check:
        (checksum,) = _SUM.unpack_from(buf, data_end)
        if xxh3_64_intdigest(memoryview(buf)[pos + 4 : data_end]) != checksum:
            return Fault(ScanStop.BAD, "checksum mismatch")
    if kind not in FRAME_NAMES:
        return Fault(ScanStop.BAD, f"unknown frame type {kind}")
    if flags & ~KNOWN_FLAGS:
        return Fault(ScanStop.BAD, f"unknown flags {flags:#04x}")
    if flags & RECORD_FLAGS and flags & RECORD_FLAGS & ~_RECORD_FLAGS_BY_KIND.get(kind, 0):
        flag = "MORE" if flags & MORE and kind != LARGE_RECORD else "JSON"
        return Fault(ScanStop.BAD, f"a {FRAME_NAMES[kind]} frame has the flag {flag}")
    if seq > SEQ_MAX or ts_ms > TS_MS_MAX:
        return Fault(ScanStop.BAD, f"seq {seq} or time {ts_ms} ms is larger than a log can store")
    if node_len and not (flags & HAS_NODE and _is_utf8(buf[node_pos:tag_pos])):
        return Fault(ScanStop.BAD, "the node has no flag, or is not UTF-8")
    if tag_len and not (flags & HAS_TAG and _is_utf8(buf[tag_pos:data_pos])):
        return Fault(ScanStop.BAD, "the tag has no flag, or is not UTF-8")
    return Frame(kind, flags, topic_id, seq, ts_ms, pos, node_pos, tag_pos, data_pos, data_end, data_end + 8)


def has_valid_flags(kind: int, flags: int) -> bool:
    """Return whether a frame of this type may have these flags."""
    return not flags & ~KNOWN_FLAGS and not flags & RECORD_FLAGS & ~_RECORD_FLAGS_BY_KIND.get(kind, 0)


def are_records(headers: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which of these headers are of frames that hold records."""
    mask: NDArray[np.bool_] = _IS_RECORD_KIND[headers["kind"]]
    return mask


def is_record(kind: int) -> bool:
    """Return whether a frame of this type holds records."""
    return bool(_IS_RECORD_KIND[kind])


def encode_empty_appends(topic_id: int, seqs: Ints, ts_ms: Ints) -> bytes:
    """Encode an Append frame without data for each of these seqs and times, one after the other."""
    frames = np.zeros(len(seqs), np.dtype([("header", HEADER), ("checksum", _SUM_DTYPE)]))
    header = frames["header"]
    header["frame_len"], header["kind"], header["topic_id"] = FRAME_LEN_MIN, APPEND, topic_id
    header["seq"], header["ts_ms"] = seqs, ts_ms
    view = memoryview(frames.tobytes())
    starts = range(4, len(view), OVERHEAD_BYTES)
    frames["checksum"] = [xxh3_64_intdigest(view[start : start + HEADER_BYTES - 4]) for start in starts]
    return frames.tobytes()


def read_headers(buf: Buffer, frame_pos: Ints) -> NDArray[np.void]:
    """Copy the headers at these positions, all of which are inside the buffer. Nothing is checked.

    They are taken through a view in which an opaque header starts at every byte: one copy in C, no loop.
    """
    if not len(frame_pos):
        return np.zeros(0, HEADER)
    headers = np.ndarray((len(buf) - HEADER_BYTES + 1,), np.dtype((np.void, HEADER_BYTES)), buf, 0, (1,))
    return headers[frame_pos].view(HEADER)


def count_valid_checksums(buf: Buffer, frame_pos: Ints, checksum_pos: Ints) -> int:
    """Count the frames before the first whose checksum does not hold. All of them are inside the buffer."""
    return native.count_valid_checksums(buf, np.ascontiguousarray(frame_pos), np.ascontiguousarray(checksum_pos))


def _check_fields(
    kind: int,
    topic_id: int,
    seq: int,
    last_seq: int,
    ts_ms: int,
    data_bytes: int,
    node: bytes,
    tag: bytes,
    flags: int,
) -> int:
    """Return the flags to write. Raise for a value that would not be read back unchanged."""
    if kind not in FRAME_NAMES:
        raise BadInput(f"frame type {kind} does not exist; the types are 1 to {max(FRAME_NAMES)}")
    if flags & ~_CALLER_FLAGS:
        raise BadInput(f"flags {flags:#x}: callers may set only DURABLE, MORE and JSON")
    if flags & RECORD_FLAGS & ~_RECORD_FLAGS_BY_KIND.get(kind, 0):
        raise BadInput(f"a {FRAME_NAMES[kind]} frame has no records; MORE and JSON are for Append and AppendBatch")
    if not 0 <= topic_id <= U64_MAX:
        raise BadInput(f"topic id {topic_id} is outside [0, {U64_MAX}]")
    if not 0 <= seq <= last_seq <= SEQ_MAX:
        raise BadInput(f"seqs {seq} to {last_seq} are outside [0, {SEQ_MAX}]")
    if not 0 <= ts_ms <= TS_MS_MAX:
        raise BadInput(f"time {ts_ms} ms is outside [0, {TS_MS_MAX}]")
    for what, name, flag in (("node", node, HAS_NODE), ("tag", tag, HAS_TAG)):
        if not name:
            continue
        if len(name) > U16_MAX:
            raise TooLarge(f"the {what}", size=len(name), limit=U16_MAX)
        if not name.isascii() and not _is_utf8(name):
            raise BadInput(f"the {what} is not UTF-8: {name[:40]!r}")
        flags |= flag
    limit = U32_MAX - FRAME_LEN_MIN - len(node) - len(tag)
    if data_bytes > limit:
        raise TooLarge("the data of a frame", size=data_bytes, limit=limit)
    return flags


def _is_utf8(name: Buffer) -> bool:
    try:
        str(name, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def are_utf8(blob: bytes, lengths: NDArray[np.integer]) -> bool:
    """Return whether adjacent values of these lengths are all UTF-8: the whole is, and no value starts inside a
    character."""
    if blob.isascii():
        return True
    if not _is_utf8(blob):
        return False
    filled = lengths[lengths > 0].astype(np.int64)
    first = np.frombuffer(blob, np.uint8)[filled.cumsum() - filled]
    return not bool(((first & 0xC0) == 0x80).any())
