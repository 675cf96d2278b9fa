"""The `narwhal` codec: entries with a CRC each, and a sparse index by bytes, preallocated while the segment grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import numpy as np

from tidelog.commitlog import vectorized
from tidelog.commitlog.codec import Batch, RecoveredSegment, Salvage, SegmentContent, check_columns_supported
from tidelog.commitlog.codecs import narwhal_layout
from tidelog.commitlog.codecs.sparse_index import SparseCodec, SparseIndex, WindowScanner
from tidelog.commitlog.vectorized import RecordLayout
from tidelog.config import LogConfig
from tidelog.errors import UnknownLayout
from tidelog.formats.rows import Rows, ScanResult
from tidelog.types import Buffer, Ints

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
        self.index_prealloc_bytes = narwhal_layout.index_capacity(self._segment_bytes_max)

    @property
    def _layout(self) -> RecordLayout:
        return narwhal_layout.LAYOUT

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        foreign_name = ""
        for name in sorted(names):
            known = self.parse_file_name(name)
            data = read(name) if known is not None and known[1] == "" else None
            if known is None or not data:
                continue
            if not narwhal_layout.looks_foreign(data, known[0]):
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
        buf = narwhal_layout.encode(seq, ts_us // 1000, batch.datas, batch.node)
        return self._build_rows(buf, seq, ts_us // 1000 * 1000, batch)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "tag", "meta")
        node = batch.node if isinstance(batch.node, bytes) else batch.node[0]
        if size < 0:
            return bytes(narwhal_layout.HEADER_BYTES + len(node))  # no record has seq 0
        return narwhal_layout.encode_header(seq, ts_us // 1000, node, size)

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        checksum = crc32(header)
        for piece in data:
            checksum = crc32(piece, checksum)
        return checksum.to_bytes(4, "little")

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        ends = rows.data.pos + rows.data.size + narwhal_layout.CRC_BYTES
        piece, side_state = narwhal_layout.encode_index(
            rows.seq, rows.frame_pos + file_pos, ends + file_pos, base, side_state
        )
        return (piece,), side_state

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        return self._recover(data, base)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        return self._salvage(data, base, stop)

    def _read_index(self, segment: SegmentContent) -> SparseIndex:
        index = narwhal_layout.read_index(segment.index)
        return SparseIndex(index["relative"].astype(np.int64) + segment.base, index["position"].astype(np.int64))

    def _make_scanner(self, segment: SegmentContent) -> WindowScanner:
        return _scan_window

    def _index_fault(self, segment: SegmentContent) -> str | None:
        size = segment.data.size
        if size == 0 and not len(segment.index):
            return None  # compaction removed every record
        capacity = narwhal_layout.index_capacity(max(self._segment_bytes_max, size))
        return narwhal_layout.index_fault(segment.index, size, capacity)

    def _last_entry_mismatch(self, segment: SegmentContent) -> str | None:
        last = narwhal_layout.read_index(segment.index)[-1:]
        return narwhal_layout.index_mismatch(last, segment.data.fetch(0, segment.data.size), segment.base)

    def _lacks_entries(self, tail: Rows, base: int) -> bool:
        sides, _ = self.encode_sides(tail, 0, base, self.initial_side_state(base))
        return len(narwhal_layout.read_index(sides[0])) > 1


def _scan_window(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
    return vectorized.scan_runs(narwhal_layout.LAYOUT, buf, starts)
