"""[hot] The narwhal layout: the message log of a channel. No other module knows what its files look like.

    <base>.log   0        8        16         18         22
                 ┌────────┬────────┬──────────┬──────────┬──────┬──────┬───────┐
                 │  seq   │ ts, ms │ node len │ data len │ node │ data │ crc32 │  then the next record
                 └────────┴────────┴──────────┴──────────┴──────┴──────┴───────┘
    <base>.idx   │ seq - base │ position │      12 bytes, about one for every 4096 of the log

Little-endian. The CRC-32 covers everything before itself, so any one changed byte shows. Seqs
start at 1 and strictly increase; times are kept as they come. The first index entry is always
(0, 0). An active index is preallocated with zeros, and since no second entry can be (0, 0), the
zeros behind the last entry are not mistaken for entries.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from struct import Struct
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.errors import BadInput, TooLarge
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span, empty_rows
from tidelog.types import Buffer, Ints

HEADER = Struct("<QQHI")  # seq, ts, node length, data length
_LEAD = Struct("<Q8xHI")  # seq, node length, data length
_CRC = Struct("<I")
_HEADS = np.dtype([("seq", "<u8"), ("ts", "<u8"), ("node", "<u2"), ("data", "<u4")])
_LENGTHS = np.dtype([("node", "<u2"), ("data", "<u4")])
_LENGTHS_AT = 16
_SUM = np.dtype([("crc", "<u4")])
INDEX = np.dtype([("relative", "<u4"), ("position", "<u8")])
HEADER_BYTES = HEADER.size
CRC_BYTES = _CRC.size
OVERHEAD_BYTES = HEADER_BYTES + CRC_BYTES
INDEX_ENTRY_BYTES = INDEX.itemsize
FROM_BYTES_MAX = 510  # the layout's word for a node is "from"
DATA_BYTES_MAX = (1 << 32) - 1
RELATIVE_MAX = (1 << 32) - 1  # seqs a segment may span and still index
INDEX_BYTES = 4096  # of log between two index entries, at least
SEGMENT_BYTES_MAX = 128 << 20
_SEARCH_BYTES = 1 << 16  # of one look for a header
assert HEADER_BYTES == _HEADS.itemsize == 22, "drawn above, frozen by tests/golden; changing it is a new format"
assert INDEX_ENTRY_BYTES == 12, "drawn above, frozen by tests/golden; changing it is a new format"

_SIGNED_MAX = (1 << 63) - 1  # columns are int64, so the upper half of u64 is refused
_MS_MAX = _SIGNED_MAX // 1000
_NAME = re.compile(r"([0-9]{20})\.log")


def data_name(base: int) -> str:
    return f"{base:020d}.log"


def index_name(base: int) -> str:
    return f"{base:020d}.idx"


def temporary_name(base: int) -> str:
    return f"{base:020d}.tmp"


def base_of(name: str) -> int | None:
    """The base a data file's name carries, or None for any other name."""
    match = _NAME.fullmatch(name)
    base = int(match[1]) if match else 0
    return base if 1 <= base <= _SIGNED_MAX else None


def index_capacity(segment_bytes_max: int = SEGMENT_BYTES_MAX) -> int:
    """The bytes to preallocate for the index of a segment that rolls past `segment_bytes_max`."""
    return (segment_bytes_max // INDEX_BYTES + 1) * INDEX_ENTRY_BYTES


def _check(first_seq: int, count: int, ts_ms: int) -> None:
    if first_seq < 1 or first_seq + count - 1 > _SIGNED_MAX:
        raise BadInput(f"seqs run from 1 to 2**63 - 1, not from {first_seq} for {count} records")
    if not 0 <= ts_ms <= _MS_MAX:
        raise BadInput(f"a time lies between 0 and {_MS_MAX} milliseconds, not at {ts_ms}")


def _check_sizes(seq: int, node_size: int, size: int) -> None:
    if node_size > FROM_BYTES_MAX:
        raise TooLarge(f"the node of seq {seq}", size=node_size, limit=FROM_BYTES_MAX)
    if size > DATA_BYTES_MAX:
        raise TooLarge(f"the record for seq {seq}", size=size, limit=DATA_BYTES_MAX)


def encode_header(seq: int, ts_ms: int, node: bytes, size: int) -> bytes:
    """What stands before `size` bytes of data, the node included. The CRC-32 behind them begins with this."""
    _check(seq, 1, ts_ms)
    _check_sizes(seq, len(node), size)
    return HEADER.pack(seq, ts_ms, len(node), size) + node


def encode(first_seq: int, ts_ms: int, datas: Sequence[bytes], nodes: Sequence[bytes] | bytes = b"") -> bytes:
    """The records one after another, numbered from `first_seq`, all with the same time.

    `nodes` is one node for all of them, or one for each.
    """
    _check(first_seq, len(datas), ts_ms)
    pack, pack_crc, parts, seq = HEADER.pack, _CRC.pack, list[bytes](), first_seq
    put = parts.append
    each = repeat(nodes, len(datas)) if isinstance(nodes, bytes) else nodes
    for data, node in zip(datas, each, strict=True):
        size, node_size = len(data), len(node)
        if node_size > FROM_BYTES_MAX or size > DATA_BYTES_MAX:
            _check_sizes(seq, node_size, size)
        # Joined first and summed in one call: a quarter cheaper at 100 bytes than two calls without the copy.
        covered = pack(seq, ts_ms, node_size, size) + node + data
        put(covered)
        put(pack_crc(crc32(covered)))
        seq += 1
    return b"".join(parts)


def size_at(buf: Buffer, pos: int) -> int:
    """How long the record at `pos` claims to be, header included; 0 where there is no whole header."""
    return 0 if pos + HEADER_BYTES > len(buf) else int(sum(_LEAD.unpack_from(buf, pos)[1:]) + OVERHEAD_BYTES)


def looks_foreign(buf: Buffer, base: int) -> bool:
    """Whether a data file does not even begin like one of this layout: it has bytes, and neither the seq nor the
    lengths of its first entry can be right. A damaged or unfinished entry has one of them."""
    if len(buf) < HEADER_BYTES or not any(memoryview(buf)[:HEADER_BYTES]):
        return False
    seq, _, node, _ = HEADER.unpack_from(buf)
    return not base <= seq <= base + RELATIVE_MAX and (node > FROM_BYTES_MAX or size_at(buf, 0) > len(buf))


def scan_records(
    buf: Buffer,
    pos: int = 0,
    end: int | None = None,
    *,
    above: int = 0,
    count_max: int | None = None,
    bytes_max: int | None = None,
    stop_seq: int | None = None,
) -> ScanResult:
    """The records of [pos, end), the first of them above seq `above`. Bad bytes never raise.

    The walk ends early, and cleanly, before the record that would be one more than `count_max`,
    before the one that would bring the data over `bytes_max` (never before the first), and before
    the first with a seq of `stop_seq` or more. That last one is checked like the others before
    it is believed.
    """
    last = len(buf) if end is None else min(end, len(buf))
    if not 0 <= pos <= last:
        return ScanResult(empty_rows(buf), pos, ScanStop.BAD, f"byte {pos} is outside the {last} bytes there are")
    room = _SIGNED_MAX if bytes_max is None else bytes_max
    limit = 1 << 64 if stop_seq is None else stop_seq
    stop, reason, peeked = ScanStop.END, "", False
    lead, at, header_last = _LEAD.unpack_from, list[int](), last - HEADER_BYTES
    put = at.append
    # The loop only follows lengths; every check that needs no chain is vectorised after it.
    for _ in repeat(None, _SIGNED_MAX if count_max is None else count_max):
        if pos > header_last:
            if pos < last:
                stop, reason = ScanStop.TORN, "the header runs past the end"
            break
        seq, node_size, size = lead(buf, pos)
        after = pos + OVERHEAD_BYTES + node_size + size
        if node_size > FROM_BYTES_MAX:
            stop, reason = ScanStop.BAD, "node length is over the limit"
            break
        if after > last:
            stop, reason = ScanStop.TORN, "the record runs past the end"
            break
        room -= size
        if room < 0 and at:
            break
        put(pos)
        if seq >= limit:
            peeked = True
            break
        pos = after
    return _check_records(ScanResult(empty_rows(buf), pos, stop, reason), np.array(at, np.int64), above, peeked)


def scan_records_vectorized(buf: Buffer, starts: Ints, end: int | None = None, *, above: int = 0) -> ScanResult:
    """What `walk` answers from the first of `starts`, found quicker when they are where records start."""
    last = len(buf) if end is None else min(end, len(buf))
    lengths = vectorized.view_at_every_byte(buf, _LENGTHS)

    def sizes(at: Ints) -> Ints | None:
        pair = lengths[at + _LENGTHS_AT].view(_LENGTHS)
        node: Ints = pair["node"].astype(np.int64)
        return None if bool((node > FROM_BYTES_MAX).any()) else node + pair["data"] + OVERHEAD_BYTES

    at = vectorized.locate_records(starts, last, HEADER_BYTES, sizes)
    if at is None:
        return scan_records(buf, int(starts[0]) if len(starts) else 0, last, above=above)
    return _check_records(ScanResult(empty_rows(buf), last, ScanStop.END), at, above, False)


def _check_records(found: ScanResult, at: Ints, above: int, peeked: bool) -> ScanResult:
    """Check the records at these positions, all whole, and keep those before the first fault.

    `found` says how the chain of lengths ended; a `peeked` last record is checked, not kept.
    """
    buf, count = found.rows.buf, len(at)
    if not count:
        return found
    heads = vectorized.read_at(buf, at, _HEADS)
    # The upper half of u64 turns negative here, so it breaks the order like any other step back.
    seq, ts = heads["seq"].astype(np.int64), heads["ts"].astype(np.int64)
    node_pos, node_size = at + HEADER_BYTES, heads["node"].astype(np.int64)
    pos, size = node_pos + node_size, heads["data"].astype(np.int64)
    rising = vectorized.is_increasing(seq, max(above, 0))
    good, keep, reason = vectorized.count_leading_true(rising & (ts >= 0) & (ts <= _MS_MAX)), count - peeked, ""
    # One further than the order holds: where both fail, the checksum is the better explanation.
    seen = min(good + 1, count)
    ends = (pos + size)[:seen]
    same = vectorized.count_leading_true(
        vectorized.crc32_checksums(buf, at[:seen], ends) == vectorized.read_at(buf, ends, _SUM)["crc"]
    )
    if same < seen:
        good, reason = same, "checksum"
    elif good < count:
        reason = "timestamp is out of range" if rising[good] else "seq does not increase"
    if reason:
        keep, found = good, ScanResult(found.rows, int(at[good]), ScanStop.BAD, reason)
    node = Span(node_pos[:keep], node_size[:keep]) if node_size[:keep].any() else None
    data = Span(pos[:keep], size[:keep])
    return found._replace(rows=Rows(buf, seq[:keep], ts[:keep] * 1000, at[:keep], data, node))


def find_next_record(buf: Buffer, pos: int, above: int, stop: int) -> int:
    """Where reading may go on after the bad record at `pos`: behind the length it claims if a good record is there,
    else at the next place that holds one with a seq between `above` and `stop`; the end of `buf` where none does."""
    size = size_at(buf, pos)
    if size and pos + size <= len(buf):
        after = scan_records(buf, pos + size, above=above, count_max=1)
        if pos + size == len(buf) or (len(after.rows) and int(after.rows.seq[0]) < stop):
            return pos + size
    every = vectorized.view_at_every_byte(buf, _HEADS)
    for low in range(pos + 1, len(every), _SEARCH_BYTES):
        heads = every[low : low + _SEARCH_BYTES].copy().view(_HEADS)
        seq, node = heads["seq"].astype(np.int64), heads["node"].astype(np.int64)
        ends = np.arange(low, low + len(heads)) + OVERHEAD_BYTES + node + heads["data"]
        likely = (node <= FROM_BYTES_MAX) & (ends <= len(buf)) & (seq > above) & (seq < stop)
        for at in (low + np.flatnonzero(likely)).tolist():
            if len(scan_records(buf, at, above=above, count_max=1).rows):
                return at
    return len(buf)


def encode_index(seqs: Ints, ats: Ints, ends: Ints, base: int, since: int = -1) -> tuple[bytes, int]:
    """The index entries of records that lie back to back, and where the last indexed one begins.

    Give that position back as `since` with the records that follow (-1: none is indexed yet):
    written in pieces or at once, the bytes are the same. A record too far above `base` for the
    four bytes of an entry gets none; readers walk to it from the last one that has.
    """
    assert np.array_equal(ats[1:], ends[:-1]), "what was written since is measured by where records start"
    starts, picked, first = ats.tolist(), list[int](), since < 0
    if first and starts:
        picked.append(0)
        since = starts[0]
    while (i := bisect_left(starts, since + INDEX_BYTES)) < len(starts) and seqs[i] - base <= RELATIVE_MAX:
        picked.append(i)
        since = starts[i]
    out = np.empty(len(picked), INDEX)
    out["relative"], out["position"] = seqs[picked] - base, ats[picked]
    if first:
        # Readers demand it, also of a segment that lost its first records to compaction.
        out[:1] = (0, 0)
    return out.tobytes(), since


def read_index(buf: Buffer) -> NDArray[np.void]:
    """The whole entries, borrowing `buf`, without the preallocated zeros behind the last one."""
    entries = np.frombuffer(buf, INDEX, len(buf) // INDEX_ENTRY_BYTES)
    used = np.flatnonzero((entries["relative"] != 0) | (entries["position"] != 0))
    return entries[: int(used[-1]) + 1 if len(used) else 1]


def index_fault(buf: Buffer, data_size: int, capacity: int | None = None) -> str | None:
    """Why these bytes are no index of a segment with `data_size` bytes, or None."""
    if not len(buf) or len(buf) % INDEX_ENTRY_BYTES:
        return f"{len(buf)} bytes are not a whole number of entries"
    capacity = index_capacity() if capacity is None else capacity
    if len(buf) > capacity:
        return f"{len(buf)} bytes are more than the {capacity} a segment can need"
    entries = read_index(buf)
    relatives, positions = entries["relative"], entries["position"]
    if relatives[0] or positions[0]:
        return f"the first entry is ({relatives[0]}, {positions[0]}), not (0, 0)"
    if bool((relatives[1:] <= relatives[:-1]).any()):
        return "seqs do not increase"
    if bool((positions[1:] <= positions[:-1]).any()):
        return "positions do not increase"
    if int(positions[-1]) + HEADER_BYTES > data_size:
        return f"position {positions[-1]} holds no record in a log of {data_size} bytes"
    return None


def index_mismatch(index: NDArray[np.void], buf: Buffer, base: int) -> str | None:
    """Which entry points at a record of another seq, or None. Also answers for positions outside `buf`."""
    # As int64 the upper half of u64 turns negative: one comparison at each end covers all of it.
    at = index["position"].astype(np.int64)
    good = vectorized.count_leading_true((at >= 0) & (at <= len(buf) - HEADER_BYTES))
    held = vectorized.read_at(buf, at[:good], _HEADS)["seq"].astype(np.int64)
    said = index["relative"][:good].astype(np.int64) + base
    agrees = held == said
    agrees[:1] |= held[:1] > base  # the first entry is (0, 0) whatever the first record is
    same = vectorized.count_leading_true(agrees)
    if same < good:
        return f"seq {said[same]} is said to be at byte {at[same]}, where seq {held[same]} is"
    return None if good == len(at) else f"byte {index['position'][good]} holds no whole record header"
