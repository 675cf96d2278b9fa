"""The `rustlog` codec: 20-byte big-endian headers, a sparse index, and a side-car of checksums.

The seed's layout has no checksum, so a power cut can leave a record whose header arrived and
whose data did not, and nobody could tell. The side-car `<base>.crc` tells: it is synced with
the data before an ack, and records behind its end were never acked. Readers of the seed's
layout never need it, and a segment without one is read as the seed says.

Logs of the RustLog program are told from the seed's by their bytes: records with 12-byte headers
and no time, file names of 20 or 12 digits. They are read and continued as they are; what their
records do not say is kept beside them, as in the laminar layout (`<base>.created`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from re import Match

import numpy as np
from numpy.typing import NDArray

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
from tidelog.commitlog.codecs import rustlog_layout, sparse_index
from tidelog.config import LogConfig
from tidelog.errors import BadInput, UnknownLayout
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span
from tidelog.types import Buffer, Ints

_NAME_PATTERN = re.compile(r"(\d{20}|\d{12})(\.log|\.index|\.crc|\.created)")
_TEMPORARY_PATTERN = re.compile(
    r"(?:\d{20}|\d{12})(\.index\.rebuilding|\.crc\.rebuilding|\.log\.compacted|\.crc\.compacted)"
)
_TIMES_CHUNK_BYTES = 8 << 20


class RustlogCodec(Codec):
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
    footer_suffix: str | None = None
    created_suffix: str | None = None
    index_prealloc_bytes = 0

    def __init__(self, config: LogConfig) -> None:
        self._index_every = config.index_every
        self._requested_header_bytes = config.header_bytes
        self._set_header_bytes(config.header_bytes or rustlog_layout.HEADER_BYTES)
        if not config.checksums:
            self.side_suffixes, self.stale_suffixes = (".index",), (".crc",)
            self.authoritative_sides = frozenset()

    def _set_header_bytes(self, size: int) -> None:
        self._header_bytes = size
        # Without times in the records, a file beside the segment says how old it is.
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
        found = self._detect_header_bytes([match for match in matches if match[2] == self.data_suffix], read)
        if found is not None and self._requested_header_bytes not in (None, found):
            raise BadInput(
                f"the records have headers of {found} bytes, not {self._requested_header_bytes}; nothing was changed"
            )
        if found is not None:
            self._set_header_bytes(found)

    def _detect_header_bytes(self, matches: Sequence[Match[str]], read: Callable[[str], Buffer | None]) -> int | None:
        """The header size that the first data file with a telling record has; None where none tells."""
        unknown = ""
        for match in matches:
            data, base = read(match[0]), int(match[1])
            if not data:
                continue
            side = read(f"{match[1]}.crc")
            for header in (rustlog_layout.HEADER_BYTES, rustlog_layout.SHORT_HEADER_BYTES) if side else ():
                if len(
                    rustlog_layout.scan_records(
                        data, count_max=1, crcs=rustlog_layout.read_crcs(side or b""), header=header
                    ).rows
                ):
                    return header
            if (found := rustlog_layout.detect_header_bytes(data, base)) is not None:
                return found
            walk = rustlog_layout.scan_records(data, above=base - 1, count_max=1)
            if side is not None or len(walk.rows) or rustlog_layout.is_unfinished(data, 0, base):
                continue
            unknown = unknown or f"{match[0]} begins with no record of the rustlog layout ({walk.reason})"
        if unknown and self._requested_header_bytes is None:
            raise UnknownLayout(
                f"{unknown}, neither with headers of 20 bytes nor of 12; nothing was changed. If it is a damaged log "
                "of this layout, name the header size (header_bytes)"
            )
        return None

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        # The side-car that this codec keeps is not there: what was acknowledged cannot be told.
        return ".crc" in self.side_suffixes and ".crc" not in suffixes

    def initial_side_state(self, base: int, /) -> int:
        return 0

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        check_columns_supported(batch, self.name, "node", "tag", "meta")
        header = self._header_bytes
        ts_us = ts_us if header == rustlog_layout.HEADER_BYTES else 0
        buf = rustlog_layout.encode(seq, ts_us, batch.datas, header)
        count = len(batch.datas)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        at = np.zeros(count, np.int64)
        np.cumsum(size[:-1] + header, out=at[1:])
        return Rows(
            buf,
            np.arange(seq, seq + count, dtype=np.int64),
            np.full(count, ts_us, np.int64),
            at,
            Span(at + header, size),
        )

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "node", "tag", "meta")
        # No record is this long, so a head that was never completed is not taken for one.
        return rustlog_layout.encode_header(
            seq, ts_us, rustlog_layout.STREAMING if size < 0 else size, self._header_bytes
        )

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        return b""

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        index = rustlog_layout.encode_index(rows.seq, rows.frame_pos + file_pos, side_state, self._index_every)
        if len(self.side_suffixes) == 1:
            return (index,), side_state + len(rows)
        crc = rustlog_layout.encode_crcs(rows.buf, rows) if crcs is None else crcs.astype("<u4").tobytes()
        return (index, crc), side_state + len(rows)

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        return sides

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        crcs = rustlog_layout.read_crcs(sides[1]) if len(sides) > 1 and sides[1] is not None else None
        walk = rustlog_layout.scan_records(data, above=base - 1, crcs=crcs, header=self._header_bytes)
        pieces, mark = self.encode_sides(walk.rows, 0, base, 0)
        found = recovered_from_scan(walk, base, pieces, mark)
        if walk.stop is ScanStop.END or crcs is not None or len(self.side_suffixes) == 1:
            return found
        if rustlog_layout.is_unfinished(data, walk.end, found.next_seq, self._header_bytes):
            return found
        return found._replace(stop=ScanStop.BAD, has_unexplained_tail=True)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        side = sides[1] if len(sides) > 1 else None
        crcs = None if side is None else rustlog_layout.read_crcs(side)
        ordinal = 0  # of the record at the byte that is read next

        def walk(pos: int, above: int) -> ScanResult:
            nonlocal ordinal
            rest = None if crcs is None else crcs[ordinal:]
            found = rustlog_layout.scan_records(data, pos, above=above, crcs=rest, header=self._header_bytes)
            ordinal += len(found.rows)
            return found

        def resync(pos: int, above: int) -> int:
            nonlocal ordinal
            rest = None if crcs is None else crcs[ordinal:]
            after, skipped = rustlog_layout.find_next_record(data, pos, above, stop, rest, self._header_bytes)
            ordinal += skipped
            return after

        return salvage_records(data, base, stop, walk, resync, seqs_are_known=crcs is not None)

    def end_seq(self, segment: SegmentContent, /) -> int:
        seqs = self._read_index(segment).seqs
        return sparse_index.end_seq(self.read, segment, int(seqs[-1]) if len(seqs) else None)

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        if segment.sides[0] is None:
            return "the index is missing", None
        index = rustlog_layout.read_index(segment.index)
        if index is None:
            return "its size is not a multiple of an entry", None
        fault = rustlog_layout.index_fault(index, segment.data.size, segment.base, segment.stop, self._header_bytes)
        if fault is not None:
            return fault, None
        if not len(index):
            return None, None
        side = segment.sides[1] if len(segment.sides) > 1 else None
        if side is not None and len(index) != -(-len(rustlog_layout.read_crcs(side)) // self._index_every):
            return f"it does not have an entry for every {self._index_every} records", None
        # From the last indexed record on: finds a cut-off file without reading the whole of it.
        start, first = int(index["position"][-1]), int(index["offset"][-1])
        tail = self._make_scanner(segment)(
            segment.data.fetch(start, segment.data.size), np.zeros(1, np.int64), (len(index) - 1) * self._index_every
        )
        if tail.stop is not ScanStop.END and self._find_misdirected_entry(index[-1:], segment):
            return "its last entry points at something else", None
        if len(tail.rows) > self._index_every:
            return "its last entries are missing", None
        if tail.stop is ScanStop.END:
            return None, None
        seq = int(tail.rows.seq[-1]) + 1 if len(tail.rows) else first
        return None, Fault(min(seq, segment.stop - 1), segment.stop, start + tail.end, tail.reason)

    def _find_misdirected_entry(self, index: NDArray[np.void], segment: SegmentContent) -> str | None:
        return rustlog_layout.index_mismatch(index, segment.data.fetch(0, segment.data.size), self._header_bytes)

    def is_index_usable(self, segment: SegmentContent, /) -> bool:
        # Entries at another distance. Only a side-car needs to know which record an entry is for.
        index, side = rustlog_layout.read_index(segment.index), segment.sides[1] if len(segment.sides) > 1 else None
        if index is None or side is not None:
            return False
        fault = rustlog_layout.index_fault(index, segment.data.size, segment.base, segment.stop, self._header_bytes)
        return fault is None and self._find_misdirected_entry(index, segment) is None

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        size_at = partial(rustlog_layout.size_at, header=self._header_bytes)
        return sparse_index.read_records(
            segment, self._read_index(segment), self._make_scanner(segment), size_at, first, stop, bytes_max
        )

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        return sparse_index.find_position(segment, self._read_index(segment), self._make_scanner(segment), seq), None

    def _read_index(self, segment: SegmentContent) -> sparse_index.SparseIndex:
        index = rustlog_layout.read_index(segment.index)
        if index is None:
            index = np.zeros(0, rustlog_layout.INDEX)
        return sparse_index.SparseIndex(
            index["offset"].astype(np.int64), index["position"].astype(np.int64), self._index_every
        )

    def _make_scanner(self, segment: SegmentContent) -> sparse_index.WindowScanner:
        side = segment.sides[1] if len(segment.sides) > 1 else None
        crcs = None if side is None else rustlog_layout.read_crcs(side)

        def walk(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
            part = None if crcs is None else crcs[ordinal:]
            return rustlog_layout.scan_records_vectorized(buf, starts, len(buf), crcs=part, header=self._header_bytes)

        return walk

    def build_footer(self, segment: SegmentContent, /) -> bytes | None:
        return None

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        index = rustlog_layout.read_index(segment.index)
        if self.created_suffix is not None or index is None or not len(index):
            return None
        if len(segment.sides) > 1 and segment.sides[1] is not None and self._are_times_increasing(segment, index):
            return sparse_index.time_range(self.read, segment, int(index["offset"][-1]))
        # Another program's clock may have stepped back: the newest record need not be the last.
        first = last = None
        seq = segment.base
        while seq < segment.stop:
            chunk = self.read(segment, seq, segment.stop, _TIMES_CHUNK_BYTES)
            if len(chunk.rows):
                first = int(chunk.rows.ts_us[0]) if first is None else first
                last = max(last or 0, int(chunk.rows.ts_us.max()))
            seq = chunk.next_seq if chunk.fault is None else max(chunk.fault.resume, seq + 1)
        return None if first is None or last is None else (first, last)

    def _are_times_increasing(self, segment: SegmentContent, index: NDArray[np.void]) -> bool:
        """Whether the times of the indexed records rise, as they do in all that this codec writes."""
        times = rustlog_layout.read_times(segment.data.fetch(0, segment.data.size), index["position"].astype(np.int64))
        return times is not None and not bool((np.diff(times) < 0).any())
