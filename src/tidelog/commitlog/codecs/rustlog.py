"""The `rustlog` codec: 20-byte big-endian headers, a sparse index, and a file of checksums.

RustLog's layout has no checksum, so after a power cut a record can have its header and not its data, unnoticed. Our
`<base>.crc` closes this: it is synced with the data before an ack, and records without a checksum in it were never
acked. Readers of RustLog's layout do not need it, and a segment without one is read as RustLog does.

Logs of the RustLog program are detected by their bytes: records with 12-byte headers and no time, file names of 20 or
12 digits. They are read and continued in their variant; the creation time of a segment is then stored beside it, as in
the laminar layout (`<base>.created`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from re import Match

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import (
    Batch,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    check_columns_supported,
    iter_chunks,
)
from tidelog.commitlog.codecs import rustlog_layout
from tidelog.commitlog.codecs.sparse_index import Checksums, SparseCodec, SparseIndex, WindowScanner
from tidelog.commitlog.vectorized import RecordLayout, scan_records, scan_runs
from tidelog.config import LogConfig
from tidelog.errors import BadInput, UnknownLayout
from tidelog.formats.rows import Rows, ScanResult, ScanStop
from tidelog.types import Buffer, Ints

_NAME_PATTERN = re.compile(r"([0-9]{20}|[0-9]{12})(\.log|\.index|\.crc|\.created)")
_TEMPORARY_PATTERN = re.compile(
    r"(?:[0-9]{20}|[0-9]{12})(\.index\.rebuilding|\.crc\.rebuilding|\.log\.compacted|\.crc\.compacted)"
)
_TIMES_CHUNK_BYTES = 8 << 20


class RustlogCodec(SparseCodec):
    name = "rustlog"
    name_format = "{:020d}"
    data_suffix = ".log"
    name_pattern, temporary_pattern = _NAME_PATTERN, _TEMPORARY_PATTERN
    first_seq = 0
    record_bytes_max = rustlog_layout.RECORD_BYTES_MAX
    segment_bytes_limit = 1 << 62
    side_suffixes: tuple[str, ...] = (".index", ".crc")
    authoritative_sides: frozenset[int] = frozenset((1,))
    syncs_data_first = False
    latches_on_write_error = True
    verifies_on_open = False
    supported_columns: frozenset[str] = frozenset()

    def __init__(self, config: LogConfig) -> None:
        self._index_every = config.index_every
        self._requested_header_bytes = config.header_bytes
        self._set_header_bytes(config.header_bytes or rustlog_layout.HEADER_BYTES)
        if not config.checksums:
            self.side_suffixes, self.stale_suffixes = (".index",), (".crc",)
            self.authoritative_sides = frozenset()

    @property
    def _layout(self) -> RecordLayout:
        return rustlog_layout.LAYOUTS[self._header_bytes]

    def _set_header_bytes(self, size: int) -> None:
        self._header_bytes = size
        # Without times in the records, a file beside the segment stores its creation time.
        self.created_suffix = None if size == rustlog_layout.HEADER_BYTES else ".created"

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        matches = [match for name in sorted(names) if (match := self.name_pattern.fullmatch(name)) is not None]
        digits = {len(match[1]) for match in matches}
        if len(digits) > 1:
            raise UnknownLayout(
                "segment files have names of 12 and of 20 digits, which one program does not write; nothing was "
                "changed, keep the segments of one log in a directory"
            )
        if digits:
            self.name_format = f"{{:0{digits.pop()}d}}"
        detected = self._detect_header_bytes([match for match in matches if match[2] == self.data_suffix], read)
        if detected is not None and self._requested_header_bytes not in (None, detected):
            raise BadInput(
                f"the records have headers of {detected} bytes, not {self._requested_header_bytes}; nothing was changed"
            )
        if detected is not None:
            self._set_header_bytes(detected)

    def _detect_header_bytes(self, matches: Sequence[Match[str]], read: Callable[[str], Buffer | None]) -> int | None:
        """Return the header size of the first data file that shows it; None where none does."""
        unknown = ""
        for match in matches:
            data, base = read(match[0]), int(match[1])
            if not data:
                continue
            side = read(f"{match[1]}.crc")
            crcs = rustlog_layout.read_crcs(side) if side else None
            for header, layout in rustlog_layout.LAYOUTS.items():
                if crcs is not None and len(scan_records(layout, data, count_max=1, crcs=crcs).rows):
                    return header
            if (header_bytes := rustlog_layout.detect_header_bytes(data, base)) is not None:
                return header_bytes
            result = scan_records(rustlog_layout.LAYOUT, data, above=base - 1, count_max=1)
            if side is not None or len(result.rows) or rustlog_layout.is_unfinished(data, 0, base):
                continue
            unknown = unknown or f"{match[0]} begins with no record of the rustlog layout ({result.reason})"
        if unknown and self._requested_header_bytes is None:
            raise UnknownLayout(
                f"{unknown}, neither with headers of 20 bytes nor of 12; nothing was changed. If it is a damaged log "
                "of this layout, name the header size (header_bytes)"
            )
        return None

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        # Without the checksums that this codec writes, the acked records are unknown.
        return ".crc" in self.side_suffixes and ".crc" not in suffixes

    def initial_side_state(self, base: int, /) -> int:
        return 0

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        check_columns_supported(batch, self.name, "node", "tag", "meta")
        ts_us = ts_us if self._header_bytes == rustlog_layout.HEADER_BYTES else 0
        return self._build_rows(rustlog_layout.encode(seq, ts_us, batch.datas, self._header_bytes), seq, ts_us, batch)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "node", "tag", "meta")
        # No record is this long, so no reader takes an incomplete header for one.
        return rustlog_layout.encode_header(
            seq, ts_us, rustlog_layout.STREAMING if size < 0 else size, self._header_bytes
        )

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        index = rustlog_layout.encode_index(rows.seq, rows.frame_pos + file_pos, side_state, self._index_every)
        if len(self.side_suffixes) == 1:
            return (index,), side_state + len(rows)
        crc = rustlog_layout.encode_crcs(rows.buf, rows) if crcs is None else crcs.astype("<u4").tobytes()
        return (index, crc), side_state + len(rows)

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        crcs = _read_crcs(sides)
        recovered = self._recover(data, base, crcs)
        if recovered.stop is ScanStop.END or crcs is not None or len(self.side_suffixes) == 1:
            return recovered
        if rustlog_layout.is_unfinished(data, recovered.end, recovered.next_seq, self._header_bytes):
            return recovered
        return recovered._replace(stop=ScanStop.BAD, has_unexplained_tail=True)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        return self._salvage(data, base, stop, _read_crcs(sides))

    def _index_fault(self, segment: SegmentContent) -> str | None:
        index = rustlog_layout.read_index(segment.index)
        if index is None:
            return "its size is not a multiple of an entry"
        fault = rustlog_layout.index_fault(index, segment.data.size, segment.base, segment.stop, self._header_bytes)
        crcs = _read_crcs(segment.sides)
        if fault is None and len(index) and crcs is not None and len(index) != -(-len(crcs) // self._index_every):
            return f"it does not have an entry for every {self._index_every} records"
        return fault

    def _last_entry_mismatch(self, segment: SegmentContent) -> str | None:
        index = rustlog_layout.read_index(segment.index)
        return None if index is None else self._find_misdirected_entry(index[-1:], segment)

    def _lacks_entries(self, tail: Rows, base: int) -> bool:
        return len(tail) > self._index_every

    def _find_misdirected_entry(self, index: NDArray[np.void], segment: SegmentContent) -> str | None:
        return rustlog_layout.index_mismatch(index, segment.data.fetch(0, segment.data.size), self._header_bytes)

    def is_index_usable(self, segment: SegmentContent, /) -> bool:
        # Entries may have another distance. Only checksums need the number of an indexed record.
        index = rustlog_layout.read_index(segment.index)
        if index is None or _read_crcs(segment.sides) is not None:
            return False
        fault = rustlog_layout.index_fault(index, segment.data.size, segment.base, segment.stop, self._header_bytes)
        return fault is None and self._find_misdirected_entry(index, segment) is None

    def _read_index(self, segment: SegmentContent) -> SparseIndex:
        index = rustlog_layout.read_index(segment.index)
        if index is None:
            index = np.zeros(0, rustlog_layout.INDEX)
        return SparseIndex(index["offset"].astype(np.int64), index["position"].astype(np.int64), self._index_every)

    def _make_scanner(self, segment: SegmentContent) -> WindowScanner:
        crcs, layout = _read_crcs(segment.sides), self._layout

        def scan(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
            return scan_runs(layout, buf, starts, crcs=None if crcs is None else crcs[ordinal:])

        return scan

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        index = rustlog_layout.read_index(segment.index)
        if self.created_suffix is not None or index is None or not len(index):
            return None
        if _read_crcs(segment.sides) is not None and self._are_times_increasing(segment, index):
            return super().time_range(segment)
        # Another program's clock may have stepped back: the newest record need not be the last.
        first = last = None
        for chunk in iter_chunks(partial(self.read, segment), segment.base, segment.stop, _TIMES_CHUNK_BYTES):
            if len(chunk.rows):
                first = int(chunk.rows.ts_us[0]) if first is None else first
                last = max(last or 0, int(chunk.rows.ts_us.max()))
        return None if first is None or last is None else (first, last)

    def _are_times_increasing(self, segment: SegmentContent, index: NDArray[np.void]) -> bool:
        """Whether the times of the indexed records rise, as those of our writer do."""
        times = rustlog_layout.read_times(segment.data.fetch(0, segment.data.size), index["position"].astype(np.int64))
        return times is not None and not bool((np.diff(times) < 0).any())


def _read_crcs(sides: Sequence[Buffer | None]) -> Checksums | None:
    """Return the checksums of a segment's records; None where they are missing or not written."""
    side = sides[1] if len(sides) > 1 else None
    return None if side is None else rustlog_layout.read_crcs(side)
