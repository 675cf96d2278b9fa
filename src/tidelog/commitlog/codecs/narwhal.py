"""The `narwhal` codec: entries with a CRC each, and a sparse index by bytes, preallocated while the segment grows.

The layout of the message log of a channel; the only module that knows its bytes:

    <base>.log   0        8        16         18         22
                 ┌────────┬────────┬──────────┬──────────┬──────┬──────┬───────┐
                 │  seq   │ ts, ms │ node len │ data len │ node │ data │ crc32 │  then the next record
                 └────────┴────────┴──────────┴──────────┴──────┴──────┴───────┘
    <base>.idx   │ seq - base │ position │      12 bytes, about one for every 4096 of the log

Little-endian. The CRC-32 covers everything before itself, so a changed byte is a mismatch. Seqs start at 1 and strictly
increase; times may be in any order. The first index entry is always (0, 0); the narwhal program writes the distance of
the first record instead, where its seq is above the base. An active index is preallocated with zeros: no second entry
can be (0, 0), so zeros after the last entry are not mistaken for entries.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from struct import Struct
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.commitlog.codec import Batch, RecoveredSegment, Salvage, SegmentContent, check_columns_supported
from tidelog.commitlog.codecs.sparse_index import SparseCodec, SparseIndex, WindowScanner
from tidelog.commitlog.vectorized import SIGNED_MAX, RecordLayout
from tidelog.config import LogConfig
from tidelog.errors import BadInput, TooLarge, UnknownLayout
from tidelog.formats.rows import Rows, ScanResult
from tidelog.types import Buffer, Ints

HEADER = Struct("<QQHI")  # seq, ts, node length, data length
_LENGTHS_AT = 16
_LENGTHS = Struct(f"<{_LENGTHS_AT}xHI")  # node length, data length
_CRC = Struct("<I")
_HEADS = np.dtype([("seq", "<u8"), ("ts", "<u8"), ("node", "<u2"), ("data", "<u4")])
_LENGTH_FIELDS = np.dtype([("node", "<u2"), ("data", "<u4")])
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
assert HEADER_BYTES == _HEADS.itemsize == 22, "drawn above, frozen by tests/golden; changing it is a new format"
assert INDEX_ENTRY_BYTES == 12, "drawn above, frozen by tests/golden; changing it is a new format"

_MS_MAX = SIGNED_MAX // 1000


def _measure(buf: Buffer, pos: int) -> int:
    node_size, size = _LENGTHS.unpack_from(buf, pos)
    total: int = OVERHEAD_BYTES + node_size + size
    return total if node_size <= FROM_BYTES_MAX else -total


LAYOUT = RecordLayout(
    _HEADS,
    _LENGTH_FIELDS,
    _LENGTHS_AT,
    first_seq=1,
    ts_unit_us=1000,
    limits={"node": FROM_BYTES_MAX, "data": DATA_BYTES_MAX},
    has_checksum=True,
    measure=_measure,
)


def index_capacity(segment_bytes_max: int = SEGMENT_BYTES_MAX) -> int:
    """Return the bytes to preallocate for the index of a segment that rolls past `segment_bytes_max`."""
    return (segment_bytes_max // INDEX_BYTES + 1) * INDEX_ENTRY_BYTES


def _check(first_seq: int, count: int, ts_ms: int) -> None:
    if first_seq < 1 or first_seq + count - 1 > SIGNED_MAX:
        raise BadInput(f"seqs run from 1 to 2**63 - 1, not from {first_seq} for {count} records")
    if not 0 <= ts_ms <= _MS_MAX:
        raise BadInput(f"a time is between 0 and {_MS_MAX} milliseconds, not {ts_ms}")


def _check_sizes(seq: int, node_size: int, size: int) -> None:
    if node_size > FROM_BYTES_MAX:
        raise TooLarge(f"the node of seq {seq}", size=node_size, limit=FROM_BYTES_MAX)
    if size > DATA_BYTES_MAX:
        raise TooLarge(f"the record for seq {seq}", size=size, limit=DATA_BYTES_MAX)


def encode_header(seq: int, ts_ms: int, node: bytes, size: int) -> bytes:
    """Encode the header and the node of `size` bytes of data. The CRC-32 after the data begins with this."""
    _check(seq, 1, ts_ms)
    _check_sizes(seq, len(node), size)
    return HEADER.pack(seq, ts_ms, len(node), size) + node


def encode(first_seq: int, ts_ms: int, datas: Sequence[bytes], nodes: Sequence[bytes] | bytes = b"") -> bytes:
    """Encode consecutive records, numbered from `first_seq`, all with the same time.

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
        # Joined first and hashed in one call: a quarter cheaper at 100 bytes than two calls without the copy.
        covered = pack(seq, ts_ms, node_size, size) + node + data
        put(covered)
        put(pack_crc(crc32(covered)))
        seq += 1
    return b"".join(parts)


def looks_foreign(buf: Buffer, base: int) -> bool:
    """Whether a data file does not begin like one of this layout: neither the seq nor the lengths of its first entry
    can be right. A damaged or unfinished entry has one of them right."""
    if len(buf) < HEADER_BYTES or not any(memoryview(buf)[:HEADER_BYTES]):
        return False
    seq, _, node, _ = HEADER.unpack_from(buf)
    return not base <= seq <= base + RELATIVE_MAX and (node > FROM_BYTES_MAX or LAYOUT.size_at(buf, 0) > len(buf))


def encode_index(seqs: Ints, ats: Ints, ends: Ints, base: int, since: int = -1) -> tuple[bytes, int]:
    """Encode the index entries of contiguous records; return them and the position of the last indexed record.

    Pass that position as `since` with the records that follow (-1: none is indexed yet): encoded in pieces or at once,
    the bytes are the same. A record too far above `base` for the four bytes of an entry gets none; readers scan to it
    from the last one that has.
    """
    assert np.array_equal(ats[1:], ends[:-1]), "the distance between entries is measured by the starts of records"
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
        # Readers require it, also in a segment whose first records were compacted.
        out[:1] = (0, 0)
    return out.tobytes(), since


def read_index(buf: Buffer) -> NDArray[np.void]:
    """Return the complete entries as a view of `buf`, without the preallocated zeros after the last one."""
    entries = np.frombuffer(buf, INDEX, len(buf) // INDEX_ENTRY_BYTES)
    used = np.flatnonzero((entries["relative"] != 0) | (entries["position"] != 0))
    return entries[: int(used[-1]) + 1 if len(used) else 1]


def index_fault(buf: Buffer, data_size: int, capacity: int | None = None) -> str | None:
    """Return why these bytes are no index of a segment with `data_size` bytes, or None."""
    if not len(buf) or len(buf) % INDEX_ENTRY_BYTES:
        return f"{len(buf)} bytes are not a whole number of entries"
    capacity = index_capacity() if capacity is None else capacity
    if len(buf) > capacity:
        return f"{len(buf)} bytes are more than the {capacity} a segment can need"
    entries = read_index(buf)
    relatives, positions = entries["relative"], entries["position"]
    if positions[0]:
        return f"the first entry is for byte {positions[0]}, not for the first record"
    return vectorized.find_entry_fault(LAYOUT, relatives, positions, data_size)


def index_mismatch(index: NDArray[np.void], buf: Buffer, base: int) -> str | None:
    """Describe the first entry that points at a record of another seq or outside `buf`; None where all are right. The
    first entry is (0, 0) for any first record."""
    seqs = index["relative"].astype(np.int64) + base
    return vectorized.find_entry_mismatch(LAYOUT, seqs, index["position"], buf, base=base)


_NAME_PATTERN = re.compile(r"([0-9]{20})(\.log|\.idx)")
_TEMPORARY_PATTERN = re.compile(r"[0-9]{20}(\.idx\.rebuilding|\.tmp|\.log\.compacted)")


class NarwhalCodec(SparseCodec):
    name = "narwhal"
    name_format = "{:020d}"
    data_suffix = ".log"
    name_pattern, temporary_pattern = _NAME_PATTERN, _TEMPORARY_PATTERN
    first_seq = 1
    record_bytes_max = (1 << 32) - 1
    segment_bytes_limit = 1 << 62
    side_suffixes: tuple[str, ...] = (".idx",)
    authoritative_sides: frozenset[int] = frozenset()
    syncs_data_first = False
    latches_on_write_error = True
    verifies_on_open = True
    supported_columns: frozenset[str] = frozenset(("node",))

    def __init__(self, config: LogConfig) -> None:
        self._segment_bytes_max = config.segment_bytes_max + config.overflow_bytes
        self.index_prealloc_bytes = index_capacity(self._segment_bytes_max)

    @property
    def _layout(self) -> RecordLayout:
        return LAYOUT

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        foreign_name = ""
        for name in sorted(names):
            known = self.parse_file_name(name)
            data = read(name) if known is not None and known[1] == "" else None
            if known is None or not data:
                continue
            if not looks_foreign(data, known[0]):
                return
            foreign_name = foreign_name or name
        if foreign_name:
            raise UnknownLayout(
                f"{foreign_name} begins with no entry of the narwhal layout: its seq is not that of the file's name "
                "and its lengths do not fit the file; nothing was changed, check which program wrote it"
            )

    def initial_side_state(self, base: int, /) -> int:
        return -1

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        check_columns_supported(batch, self.name, "tag", "meta")
        buf = encode(seq, ts_us // 1000, batch.datas, batch.node)
        return self._build_rows(buf, seq, ts_us // 1000 * 1000, batch)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "tag", "meta")
        node = batch.node if isinstance(batch.node, bytes) else batch.node[0]
        if size < 0:
            return bytes(HEADER_BYTES + len(node))  # no record has seq 0
        return encode_header(seq, ts_us // 1000, node, size)

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        checksum = crc32(header)
        for piece in data:
            checksum = crc32(piece, checksum)
        return checksum.to_bytes(4, "little")

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        ends = rows.data.pos + rows.data.size + CRC_BYTES
        piece, side_state = encode_index(rows.seq, rows.frame_pos + file_pos, ends + file_pos, base, side_state)
        return (piece,), side_state

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        return self._recover(data, base)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        return self._salvage(data, base, stop)

    def _read_index(self, segment: SegmentContent) -> SparseIndex:
        index = read_index(segment.index)
        seqs = index["relative"].astype(np.int64) + segment.base
        seqs[:1] = segment.base  # whatever the first record is, reads of the segment's first seqs begin there
        return SparseIndex(seqs, index["position"].astype(np.int64))

    def _make_scanner(self, segment: SegmentContent) -> WindowScanner:
        return _scan_window

    def _index_fault(self, segment: SegmentContent) -> str | None:
        size = segment.data.size
        if size == 0 and not len(segment.index):
            return None  # compaction removed every record
        capacity = index_capacity(max(self._segment_bytes_max, size))
        return index_fault(segment.index, size, capacity)

    def _last_entry_mismatch(self, segment: SegmentContent) -> str | None:
        last = read_index(segment.index)[-1:]
        return index_mismatch(last, segment.data.fetch(0, segment.data.size), segment.base)

    def _lacks_entries(self, tail: Rows, base: int) -> bool:
        sides, _ = self.encode_sides(tail, 0, base, self.initial_side_state(base))
        return len(read_index(sides[0])) > 1


def _scan_window(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
    return vectorized.scan_runs(LAYOUT, buf, starts)
