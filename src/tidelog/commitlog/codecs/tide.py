"""The `tide` codec, Tidelog's own: frames in `.data`, 20 bytes a record in `.idx`, a footer once sealed.

A single record is an Append frame; several are AppendBatch frames chained into one caller's batch, which recovery keeps
completely or not at all. Sealed data is checked against the footer's chunk checksums, once per chunk and process; where
a chunk does not match, frame by frame, so that only damaged records are lost.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from tidelog.commitlog.codec import (
    Batch,
    Chunk,
    Codec,
    EncodedAppend,
    Fault,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    iter_chunks,
    recovered_from_scan,
    salvage_records,
)
from tidelog.config import LogConfig
from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import batch as batches
from tidelog.formats import frame, scan, sealed_segment, segment_index
from tidelog.formats.rows import Rows, ScanResult, Span, concat_rows, empty_rows
from tidelog.formats.sealed_segment import Footer
from tidelog.types import Buffer, Ints

_log = logging.getLogger("tidelog.commitlog")
_NAME_PATTERN = re.compile(r"seg-([0-9]{16,20})(\.data|\.idx|\.foot)")
_TEMPORARY_PATTERN = re.compile(r"seg-[0-9]{16,20}(\.idx\.rebuilding|\.foot\.tmp|\.data\.compacted)")
_SEQ_BITS = 64
_REUSED_BUFFER_BYTES_MAX = 1 << 20
_VERIFY_CHUNK_BYTES = 4 << 20


_decode_footer_cached = lru_cache(maxsize=256)(
    sealed_segment.decode_footer
)  # needed by every read; a footer never changes


class TideCodec(Codec):
    name = "tide"
    name_format = "seg-{:016d}"
    data_suffix = ".data"
    name_pattern, temporary_pattern = _NAME_PATTERN, _TEMPORARY_PATTERN
    first_seq = 1
    segment_bytes_limit = 1 << 31
    record_bytes_max = segment_bytes_limit - (1 << 20)
    side_suffixes: tuple[str, ...] = (".idx",)
    authoritative_sides: frozenset[int] = frozenset()
    syncs_data_first = False
    latches_on_write_error = True
    verifies_on_open = False
    supported_columns: frozenset[str] = frozenset(("node", "tag", "meta"))
    footer_suffix: str | None = ".foot"
    writes_index_on_seal = True
    INDEX_VERIFIED = -1  # in SegmentContent.verified_chunks, beside the numbers of data chunks: the index was checked

    def __init__(self, config: LogConfig) -> None:
        self._buffer = bytearray()  # of the current frame

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def initial_side_state(self, base: int, /) -> int:
        return base

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        ts_ms, count = ts_us // 1000, len(batch.datas)
        if count == 1:
            node, tag, meta = (c if isinstance(c, bytes) else c[0] for c in (batch.node, batch.tag, batch.meta))
            if not meta:
                return self._encode_single(seq, ts_ms, batch.datas[0], node, tag)
        metas = [batch.meta] * count if isinstance(batch.meta, bytes) else batch.meta
        frames = batches.encode_many(
            0,
            seq,
            ts_ms,
            batch.datas,
            metas=metas if any(metas) else None,
            nodes=None if isinstance(batch.node, bytes) else batch.node,
            tags=None if isinstance(batch.tag, bytes) else batch.tag,
            node=batch.node if isinstance(batch.node, bytes) else b"",
            tag=batch.tag if isinstance(batch.tag, bytes) else b"",
        )
        buf = frames[0] if len(frames) == 1 else b"".join(frames)
        return scan.scan_records(buf).rows

    def encode_append(
        self, seq: int, ts_us: int, batch: Batch, file_pos: int, base: int, side_state: int, /
    ) -> EncodedAppend:
        ts_ms = ts_us // 1000
        is_uniform = isinstance(batch.node, bytes) and isinstance(batch.tag, bytes) and batch.meta == b""
        if not is_uniform or len(batch.datas) == 1 or side_state % (1 << _SEQ_BITS) != seq:
            return super().encode_append(seq, ts_us, batch, file_pos, base, side_state)
        node, tag = bytes(batch.node), bytes(batch.tag)  # type: ignore[arg-type]
        plan = batches.plan_frames(
            0,
            seq,
            ts_ms,
            batch.datas,
            batch.data_lengths,
            node=node,
            tag=tag,
            start=file_pos,
            allocate=self._allocate,
        )
        flags = segment_index.BATCH | (segment_index.HAS_NODE if node else 0) | (segment_index.HAS_TAG if tag else 0)
        run = segment_index.EntryRun(plan.starts, plan.counts, batch.data_lengths, ts_ms, flags)
        stop = seq + len(batch.datas)
        return EncodedAppend(plan.frames, (run,), ts_ms << _SEQ_BITS | stop, stop, ts_ms * 1000, ts_ms * 1000)

    def _allocate(self, size: int) -> bytearray:
        """Return memory for a frame; small frames reuse one buffer, because a log writes one frame at a time."""
        if size > _REUSED_BUFFER_BYTES_MAX:
            return bytearray(size)
        if size > len(self._buffer):
            self._buffer = bytearray(min(2 * size, _REUSED_BUFFER_BYTES_MAX))
        return self._buffer

    def _encode_single(self, seq: int, ts_ms: int, data: bytes, node: bytes, tag: bytes) -> Rows:
        buf = frame.encode(frame.APPEND, seq=seq, ts_ms=ts_ms, data=data, node=node, tag=tag)
        node_at, node_end = frame.HEADER_BYTES, frame.HEADER_BYTES + len(node)
        start = node_end + len(tag)
        cells = np.array([seq, ts_ms * 1000, 0, start, len(data), node_at, len(node), node_end, len(tag)], np.int64)
        return Rows(
            buf,
            cells[0:1],
            cells[1:2],
            cells[2:3],
            Span(cells[3:4], cells[4:5]),
            Span(cells[5:6], cells[6:7]) if node else None,
            Span(cells[7:8], cells[8:9]) if tag else None,
        )

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        node, tag, meta = (c if isinstance(c, bytes) else c[0] for c in (batch.node, batch.tag, batch.meta))
        body = batches.encode_single_body(max(size, 0), meta) if meta else b""
        kind, data_len = (frame.APPEND_BATCH if meta else frame.APPEND), len(body) + max(size, 0)
        header = frame.encode_header(kind, seq=seq, ts_ms=ts_us // 1000, data_len=data_len, node=node, tag=tag) + body
        return bytes(len(header)) if size < 0 else header  # a scan ends at zeros

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        digest = xxh3_64(header[4:])
        for piece in data:
            digest.update(piece)
        return digest.intdigest().to_bytes(8, "little")

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        if not len(rows):
            return (b"",), side_state
        # side_state is the next seq, with the time of the last entry in the upper bits: holes repeat that time.
        ts_before, first = divmod(side_state, 1 << _SEQ_BITS)
        stop = int(rows.seq[-1]) + 1
        size = file_pos + max(len(rows.buf), int(rows.data.pos[-1] + rows.data.size[-1]) + 8)
        if len(rows) == 1 and stop == first + 1:
            entries = segment_index.build_entry(rows, file_pos)
        else:
            entries = segment_index.build_entries(
                rows, first, stop, size, origin=file_pos, ts_before_ms=ts_before
            ).tobytes()
        return (entries,), int(rows.ts_us[-1]) // 1000 << _SEQ_BITS | stop

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        entries = segment_index.read_entries(sides[0])
        holes = np.zeros(max(stop - base - len(entries), 0), segment_index.ENTRY)
        holes["frame_offset"], holes["flags"] = size, segment_index.HOLE
        holes["ts"] = entries["ts"][-1] if len(entries) else 0
        return (sides[0] + holes.tobytes(),)

    def build_footer(self, segment: SegmentContent, /) -> bytes | None:
        """Build the footer. Every frame is verified first: a chunk with a bad frame gets a wrong checksum, so that
        reads check it frame by frame."""
        built = sealed_segment.build_footer(
            segment.data.fetch(0, segment.data.size), segment.index, first_seq=segment.base
        )
        faults = self.find_faults(segment)
        for span, reason in faults:
            where = f"bytes {span.start} to {span.stop - 1} of {self.data_name(segment.base)}"
            _log.error("%s do not verify and are sealed as damaged: %s", where, reason)
        return sealed_segment.encode_footer(sealed_segment.exclude_ranges(built, (span for span, _ in faults)))

    def find_faults(self, segment: SegmentContent, /) -> list[tuple[range, str]]:
        """Return the byte range of every bad or missing frame, and the reason. Trusts the index, but neither the footer
        nor earlier checks."""
        base, starts = segment.base, segment_index.read_entries(segment.index)["frame_offset"]
        unverified = SegmentContent(base, segment.stop, segment.data, segment.index, segment.sides)
        faults: list[tuple[range, str]] = []
        for _, _, fault in iter_chunks(partial(self.read, unverified), base, segment.stop, _VERIFY_CHUNK_BYTES):
            if fault is not None:
                start, after = int(starts[fault.seq - base]), max(fault.resume, fault.seq + 1)
                end = int(starts[after - base]) if after < segment.stop else int(segment.data.size)
                faults.append((range(start, max(end, start + 1)), fault.reason))
        return faults

    # ── recovering ────────────────────────────────────────────────────────────────────────────

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        result = scan.scan_records(data, above=base - 1)
        sides_, side_state = self.encode_sides(result.rows, 0, base, self.initial_side_state(base))
        return recovered_from_scan(result, base, sides_, side_state)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        view = memoryview(data)

        def scan_from(pos: int, above: int) -> ScanResult:
            parts: list[Rows] = []
            while True:
                result = scan.scan_records(view, pos, above=above)
                parts.append(result.rows)
                above = int(result.rows.seq[-1]) if len(result.rows) else above
                # A good frame of a batch with another bad frame: its records were acked and are readable.
                one = (
                    scan.scan_single_frame(view, result.end)
                    if result.end < len(view)
                    else result._replace(rows=empty_rows(view))
                )
                if not len(one.rows) or int(one.rows.seq[0]) <= above:
                    return result._replace(rows=concat_rows(view, parts))
                parts.append(one.rows)
                pos, above = one.end, int(one.rows.seq[-1])

        return salvage_records(
            view, base, stop, scan_from, lambda pos, above: scan.find_next_frame(view, pos, above, stop)
        )

    def end_seq(self, segment: SegmentContent, /) -> int:
        return segment.base + len(segment.index) // segment_index.ENTRY_BYTES

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        # Sizes only: hashing every index would read all of it at each start. The first read of a segment checks its
        # index, and each chunk of data when it is read.
        if segment.sides[0] is None:
            return "the index is missing", None
        foot = self._read_footer(segment)
        if foot is None:
            return "the footer is missing or damaged", None
        if len(segment.index) != foot.idx_bytes:
            return f"the index has {len(segment.index)} bytes, {foot.idx_bytes} were sealed", None
        if segment.data.size == foot.data_bytes:
            return None, None
        at = segment_index.read_entries(segment.index)["frame_offset"]
        seq = segment.base + int(np.searchsorted(at, min(segment.data.size, foot.data_bytes)))
        reason = f"the data has {segment.data.size} bytes, {foot.data_bytes} were sealed"
        return None, Fault(max(seq - 1, segment.base), segment.stop, segment.data.size, reason)

    def _read_footer(self, segment: SegmentContent) -> Footer | None:
        if segment.footer is None:
            return None
        try:
            return _decode_footer_cached(segment.footer)
        except NewerFormat:
            raise
        except Corrupt:
            return None

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read_index(self, segment: SegmentContent) -> NDArray[np.void]:
        """Return the entries of a segment; those of a sealed one are verified against its footer."""
        foot = self._read_footer(segment)
        return segment_index.read_entries(segment.index) if foot is None else self._verified_index(segment, foot)

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        foot, entries = self._read_footer(segment), self.read_index(segment)
        lo, hi = first - segment.base, min(stop - segment.base, len(entries))
        if lo >= hi:
            return Chunk(empty_rows(), stop)
        hi, low, high = self._byte_range(entries["frame_offset"], lo, hi, bytes_max, segment.data.size)
        if foot is None:
            return self._decode_rows(segment.data.fetch(low, high), entries[lo:hi], first, low, check=True)
        # Fetched once, with what the checksums cover: the data may be in a store.
        start = low - low % foot.chunk_bytes
        end = max(min(high + -high % foot.chunk_bytes, foot.data_bytes), high)
        whole = memoryview(segment.data.fetch(start, end))
        trusted = self._verify_chunks(segment, foot, start, whole)
        return self._decode_rows(whole[low - start : high - start], entries[lo:hi], first, low, check=not trusted)

    def verified_range(
        self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /
    ) -> tuple[int, int] | None:
        """Return the bytes of the data that `read` would use, if all of them are verified already; else None."""
        foot = self._read_footer(segment)
        if foot is None or self.INDEX_VERIFIED not in segment.verified_chunks:
            return None
        at = segment_index.read_entries(segment.index)["frame_offset"]
        low, high = self._byte_range(at, first - segment.base, stop - segment.base, bytes_max, segment.data.size)[1:]
        return (low, high) if self.is_verified(segment, low, high) else None

    def is_verified(self, segment: SegmentContent, low: int, high: int, /) -> bool:
        """Whether these bytes of a sealed segment were checked against its footer before."""
        foot = self._read_footer(segment)
        if foot is None or self.INDEX_VERIFIED not in segment.verified_chunks or high > segment.data.size:
            return False
        return segment.verified_chunks.issuperset(range(low // foot.chunk_bytes, -(-high // foot.chunk_bytes)))

    def _byte_range(self, at: NDArray[np.uint32], lo: int, hi: int, bytes_max: int, size: int) -> tuple[int, int, int]:
        """Return the entry where a read of [lo, hi) has to stop, and the byte range of its frames."""
        low = int(at[lo])
        # Bisection by hand: searchsorted would copy the whole strided column first.
        hi = max(bisect_left(at, low + bytes_max, lo, hi), lo + 1)
        return hi, low, self._frame_end(at, hi, size)

    def _verified_index(self, segment: SegmentContent, foot: Footer) -> NDArray[np.void]:
        """Return the sealed index; rebuilt from the data in memory where the file does not match the footer."""
        if self.INDEX_VERIFIED not in segment.verified_chunks:
            if sealed_segment.find_index_fault(foot, segment.index) is not None:
                recovered = self.recover(segment.data.fetch(0, segment.data.size), [], segment.base)
                return segment_index.read_entries(
                    self.fill_holes(recovered.sides, segment.base, foot.stop_seq, recovered.end)[0]
                )
            segment.verified_chunks.add(self.INDEX_VERIFIED)
        return segment_index.read_entries(segment.index)

    def _frame_end(self, at: NDArray[np.uint32], hi: int, size: int) -> int:
        """Return the end of the frame of the record before `hi`: the start of the next one."""
        later = bisect_right(at, int(at[hi - 1]), hi)
        return int(at[later]) if later < len(at) else size

    def _verify_chunks(self, segment: SegmentContent, foot: Footer, start: int, content: memoryview) -> bool:
        """Whether these bytes, which begin with a chunk, match the footer's checksums; each chunk is hashed once per
        open log."""
        step = foot.chunk_bytes
        for chunk in range(start // step, -(-(start + len(content)) // step)):
            if chunk not in segment.verified_chunks:
                pos = chunk * step - start
                stop = min(pos + step, foot.data_bytes - start)
                if not sealed_segment.is_chunk_valid(foot, chunk, content[pos:stop]):
                    return False
                segment.verified_chunks.add(chunk)
        return True

    def _decode_rows(self, buf: Buffer, entries: NDArray[np.void], first: int, low: int, *, check: bool) -> Chunk:
        stop = len(entries)
        fault = None
        while stop:
            try:
                rows = scan.scan_indexed(buf, entries, 0, stop, first, check=check, origin=low)
            except Corrupt as error:
                # The frames before the damaged one are still good: decode only those.
                at, bad = entries["frame_offset"], low + error.pos
                stop = min(int(np.searchsorted(at, bad)), stop - 1)
                resume = first + max(int(np.searchsorted(at, bad, "right")), stop + 1)
                fault = Fault(first + stop, resume, low + error.pos, error.reason)
            else:
                return Chunk(rows, first + stop)
        return Chunk(empty_rows(), first, fault)

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        entries = segment_index.read_entries(segment.index)
        at, index = entries["frame_offset"], seq - segment.base
        pos = int(at[index]) if index < len(at) else segment.data.size
        start = self._chain_start(segment, at, index, pos)
        low = int(np.searchsorted(at, start))
        if low >= index:
            return pos, None
        window = segment.data.fetch(start, self._frame_end(at, index, segment.data.size))
        return start, scan.scan_indexed(window, entries, low, index, segment.base, check=True, origin=start)

    def _chain_start(self, segment: SegmentContent, at: NDArray[np.uint32], index: int, pos: int) -> int:
        """Return the first byte of the caller's batch that `pos` would cut, or `pos` where it cuts none."""
        start = pos
        while index > 0:
            index = int(np.searchsorted(at[:index], at[index - 1]))  # first record of the frame before
            before = int(at[index])
            if before == start:
                continue  # holes have the position of the frame after them
            if not segment.data.fetch(before + 5, before + 6)[0] & frame.MORE:
                break
            start = before
        return start

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        foot = self._read_footer(segment)
        if foot is not None:
            return (foot.ts_first_ms * 1000, foot.ts_last_ms * 1000) if foot.records else None
        entries = segment_index.read_entries(segment.index)
        live = np.flatnonzero(entries["flags"] != segment_index.HOLE)
        if not len(live):
            return None
        return int(entries["ts"][live[0]]) * 1000, int(entries["ts"][live[-1]]) * 1000
