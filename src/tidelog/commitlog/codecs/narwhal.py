"""The `narwhal` codec: entries with a CRC each, a sparse index by bytes, preallocated while the segment grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import numpy as np

from tidelog.commitlog.codec import (
    Batch,
    Chunk,
    Codec,
    Fault,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    check_columns_supported,
    recovered_from_scan,
    salvage_records,
)
from tidelog.commitlog.codecs import narwhal_layout, sparse_index
from tidelog.config import LogConfig
from tidelog.errors import UnknownLayout
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span
from tidelog.types import Buffer, Ints

_NAME_PATTERN = re.compile(r"(\d{20})(\.log|\.idx)")
_TEMPORARY_PATTERN = re.compile(r"\d{20}(\.idx\.rebuilding|\.tmp|\.log\.compacted)")


class NarwhalCodec(Codec):
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
    footer_suffix: str | None = None
    created_suffix: str | None = None

    def __init__(self, config: LogConfig) -> None:
        self._segment_bytes_max = config.segment_bytes_max + config.overflow_bytes
        self.index_prealloc_bytes = narwhal_layout.index_capacity(self._segment_bytes_max)

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        unlike = ""
        for name in sorted(names):
            known = self.parse_file_name(name)
            data = read(name) if known is not None and known[1] == "" else None
            if known is None or not data:
                continue
            if not narwhal_layout.looks_foreign(data, known[0]):
                return
            unlike = unlike or name
        if unlike:
            raise UnknownLayout(
                f"{unlike} begins with no entry of the narwhal layout: its seq is not that of the file's name and its "
                "lengths do not fit the file; nothing was changed, check which program wrote it"
            )

    def initial_side_state(self, base: int, /) -> int:
        return -1

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        check_columns_supported(batch, self.name, "tag", "meta")
        buf = narwhal_layout.encode(seq, ts_us // 1000, batch.datas, batch.node)
        count = len(batch.datas)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        nodes = batch.node
        node_size = (
            np.full(count, len(nodes), np.int64)
            if isinstance(nodes, bytes)
            else np.fromiter(map(len, nodes), np.int64, count)
        )
        at = np.zeros(count, np.int64)
        np.cumsum((size + node_size)[:-1] + narwhal_layout.OVERHEAD_BYTES, out=at[1:])
        head = at + narwhal_layout.HEADER_BYTES
        return Rows(
            buf,
            np.arange(seq, seq + count, dtype=np.int64),
            np.full(count, ts_us // 1000 * 1000, np.int64),
            at,
            Span(head + node_size, size),
            Span(head, node_size) if node_size.any() else None,
        )

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "tag", "meta")
        node = batch.node if isinstance(batch.node, bytes) else batch.node[0]
        if size < 0:
            return bytes(narwhal_layout.HEADER_BYTES + len(node))  # seq 0 is no record
        return narwhal_layout.encode_header(seq, ts_us // 1000, node, size)

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        checksum = crc32(header)
        for piece in data:
            checksum = crc32(piece, checksum)
        return checksum.to_bytes(4, "little")

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        ends = rows.data.pos + rows.data.size + 4
        piece, side_state = narwhal_layout.encode_index(
            rows.seq, rows.frame_pos + file_pos, ends + file_pos, base, side_state
        )
        return (piece,), side_state

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        return sides

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        walk = narwhal_layout.scan_records(data, above=base - 1)
        pieces, mark = self.encode_sides(walk.rows, 0, base, -1)
        return recovered_from_scan(walk, base, pieces, mark)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        def walk(pos: int, above: int) -> ScanResult:
            return narwhal_layout.scan_records(data, pos, above=above)

        def resync(pos: int, above: int) -> int:
            return narwhal_layout.find_next_record(data, pos, above, stop)

        return salvage_records(data, base, stop, walk, resync)

    def end_seq(self, segment: SegmentContent, /) -> int:
        seqs = self._read_index(segment).seqs
        return sparse_index.end_seq(self.read, segment, int(seqs[-1]) if len(seqs) and segment.data.size else None)

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        if segment.sides[0] is None:
            return "the index is missing", None
        if segment.data.size == 0 and not len(segment.index):
            return None, None  # compaction took every record
        fault = narwhal_layout.index_fault(
            segment.index,
            segment.data.size,
            narwhal_layout.index_capacity(max(self._segment_bytes_max, segment.data.size)),
        )
        if fault is not None:
            return fault, None
        index = narwhal_layout.read_index(segment.index)
        start = int(index["position"][-1])
        above = segment.base + int(index["relative"][-1]) - 1
        tail = narwhal_layout.scan_records(segment.data.fetch(start, segment.data.size), above=above)
        if tail.stop is not ScanStop.END and narwhal_layout.index_mismatch(
            index[-1:], segment.data.fetch(0, segment.data.size), segment.base
        ):
            return "its last entry points at something else", None
        again, _ = self.encode_sides(tail.rows, 0, segment.base, -1)
        if len(narwhal_layout.read_index(again[0])) > 1:
            return "its last entries are missing", None
        if tail.stop is ScanStop.END:
            return None, None
        seq = int(tail.rows.seq[-1]) + 1 if len(tail.rows) else above + 1
        return None, Fault(seq, segment.stop, start + tail.end, tail.reason)

    def _read_index(self, segment: SegmentContent) -> sparse_index.SparseIndex:
        index = narwhal_layout.read_index(segment.index)
        return sparse_index.SparseIndex(
            index["relative"].astype(np.int64) + segment.base, index["position"].astype(np.int64)
        )

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        return sparse_index.read_records(
            segment, self._read_index(segment), _scan_window, narwhal_layout.size_at, first, stop, bytes_max
        )

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        return sparse_index.find_position(segment, self._read_index(segment), _scan_window, seq), None

    def build_footer(self, segment: SegmentContent, /) -> bytes | None:
        return None

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        seqs = self._read_index(segment).seqs
        return sparse_index.time_range(self.read, segment, int(seqs[-1])) if len(seqs) else None


def _scan_window(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
    return narwhal_layout.scan_records_vectorized(buf, starts, len(buf))
