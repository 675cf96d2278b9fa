"""Records that no segment file has yet: small writes in memory, large ones read from the WAL.

    pieces   │ bytes │ bytes │ WalRange in wal-…412.log │ bytes │ WalRange … │     in the order of the segment's data
    index    └ built by a scan on demand ┘└ known from the write: an EntryRun ┘     last write: read without an index

A large write is not kept a second time: memory that is touched once and held until a checkpoint costs more than the
write did. Readers get it from the page cache and verify its checksum. The WAL keeps a file while a memtable refers to
it, and a reader with a piece of it keeps it open.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Chunk
from tidelog.commitlog.segment import AppendBuffer
from tidelog.engine.segment import BoolArray, DeletionBitmap, FrameLocations, SizeCount, mark_deleted, mark_deleted_one
from tidelog.errors import Corrupt
from tidelog.formats import scan, segment_index
from tidelog.formats.segment_index import EntryRun
from tidelog.types import Buffer, Ints
from tidelog.wal import WalRange

Piece = bytes | WalRange


class StoredFault(NamedTuple):
    """Stored bytes that do not verify."""

    where: str
    reason: str


class BatchStats(NamedTuple):
    """What a writer knows of its records, so that the index needs no scan. All have the same timestamp."""

    counts: Sequence[int]  # records per frame
    lengths: Sequence[int]
    flags: int


LARGE_WRITE_BYTES: Final = 1 << 16  # a write of at least this many bytes is read from the WAL
_PLAIN_PIECES_MAX: Final = 16  # of a read without an index
_SMALL_PIECES_MAX: Final = 256  # more small pieces are joined


class MemTable:
    """Records of one segment that no segment file has yet. Guarded by the topic's lock."""

    def __init__(self, base: int, *, segment: int, origin: int, persistent: bool) -> None:
        self.base = self.stop = base
        self.segment = segment  # first seq of the segment it belongs to
        self.origin = origin  # offset of its first byte in the segment's data
        self.is_persistent = persistent  # False: of an ephemeral topic, never written to any file
        self.is_frozen = False  # a checkpoint is writing it: the next record starts another memtable
        self.size = 0
        self.live_records = self.live_bytes = 0
        self.first_ts = self.last_ts = 0
        self._pieces: list[Piece] = []
        self._starts: list[int] = []
        self._small_from = 0  # pieces from here on are small and may be joined
        self._index = AppendBuffer(b"")
        self._indexed_bytes = 0  # covered by the index
        self._indexed_stop = base  # one past the last indexed seq
        self.no_meta_from = base  # records from this seq on have no meta
        self._deleted: DeletionBitmap | None = None
        self._last_write: tuple[int, bytes] | None = None  # first seq and frames of the last write, if it is in memory

    def add(
        self,
        pieces: list[bytes] | list[WalRange],
        count: int,
        weight: int,
        first_ts: int,
        last_ts: int,
        stats: BatchStats | None = None,
    ) -> None:
        """Append the frames of `count` records with the next seqs."""
        assert not self.is_frozen, "a checkpoint is writing it"
        if self.base == self.stop:
            self.first_ts = first_ts
        start, is_indexable = self.origin + self.size, stats is not None and self._indexed_bytes == self.size
        only = pieces[0] if len(pieces) == 1 else None
        self._last_write = (self.stop, only) if isinstance(only, bytes) else None
        for piece in pieces:
            self._starts.append(self.origin + self.size)
            self._pieces.append(piece)
            self.size += len(piece)
            if isinstance(piece, WalRange) or len(piece) >= LARGE_WRITE_BYTES:
                self._small_from = len(self._pieces)
        if len(self._pieces) - self._small_from > _SMALL_PIECES_MAX:
            self._pieces[self._small_from :] = [b"".join(self._pieces[self._small_from :])]  # type: ignore[arg-type]  # bytes all
            del self._starts[self._small_from + 1 :]
            self._small_from = (
                len(self._pieces) if len(self._pieces[-1]) >= LARGE_WRITE_BYTES else len(self._pieces) - 1
            )
            self._index.view()
        self.stop += count
        self.live_records += count
        self.live_bytes += weight
        self.last_ts = last_ts
        if stats is None or stats.flags & segment_index.HAS_META:
            self.no_meta_from = self.stop
        if stats is not None and is_indexable:
            self._index_stats(pieces, stats, start, first_ts)

    def add_stored(self, pieces: list[WalRange], stats: BatchStats, weight: int, ts_ms: int) -> None:
        """Append frames that stay in the WAL."""
        self._index_pending()  # the index is built in seq order
        self.add(pieces, len(stats.lengths), weight, ts_ms, ts_ms, stats)

    def add_indexed(
        self, pieces: list[WalRange], entries: bytes, count: int, weight: int, first_ts: int, last_ts: int
    ) -> None:
        """Append frames that stay in the WAL, several per piece, with their index entries."""
        self._index_pending()
        self.add(pieces, count, weight, first_ts, last_ts)
        self._index.append(entries)
        self._indexed_bytes, self._indexed_stop = self.size, self.stop

    def _index_stats(self, pieces: Sequence[Piece], stats: BatchStats, start: int, ts_ms: int) -> None:
        """Index a write from its stats; everything before it must be indexed."""
        counts, lengths, flags = stats
        if len(lengths) == 1:
            self._index.append(segment_index.encode_entry(start, lengths[0], ts_ms, flags))
        else:
            starts = [start]
            for piece in pieces[:-1]:
                starts.append(starts[-1] + len(piece))
            self._index.append(EntryRun(starts, counts, np.asarray(lengths, np.uint32), ts_ms, flags))
        self._indexed_bytes, self._indexed_stop = self.size, self.stop

    def read_pieces(self) -> Iterator[tuple[Buffer, StoredFault | None]]:
        """Yield all of its bytes, those in the WAL frame by frame, with faults found there. Without the lock: for a
        frozen memtable."""
        for piece in self._pieces:
            yield _read_and_verify(piece) if isinstance(piece, WalRange) else (piece, None)

    def move_to_segment(self, segment: int, origin: int) -> None:
        """Make it part of another segment, at this offset. Data handed out before is unchanged."""
        entries = segment_index.read_entries(bytes(self.index_bytes())).copy()
        shift = origin - self.origin
        entries["frame_offset"] = entries["frame_offset"].astype(np.int64) + shift
        self._index = AppendBuffer(entries.tobytes())
        self._starts = [start + shift for start in self._starts]
        self.segment, self.origin = segment, origin

    def _pieces_between(self, lo: int, hi: int) -> tuple[list[Piece], int]:
        """Return the pieces with bytes [lo, hi) of the segment's data, and where the first of them starts."""
        first = bisect_right(self._starts, lo) - 1
        stop = bisect_right(self._starts, hi - 1)
        return self._pieces[first:stop], self._starts[first]

    def _index_pending(self) -> None:
        """Index the records in memory that are not indexed yet."""
        if self._indexed_bytes == self.size:
            return
        start = self.origin + self._indexed_bytes
        window = _read_window(*self._pieces_between(start, self.origin + self.size), start, self.origin + self.size)
        walk = scan.scan_records(window, above=self._indexed_stop - 1)
        if walk.end != len(window) or len(walk.rows) != self.stop - self._indexed_stop:
            raise Corrupt("memory", pos=walk.end, reason=f"frames of this process changed: {walk.reason}")
        entries = segment_index.build_entries(
            walk.rows, self._indexed_stop, self.stop, self.origin + self.size, origin=start
        )
        self._index.append(entries.tobytes())
        self._indexed_bytes, self._indexed_stop = self.size, self.stop

    def index_bytes(self) -> memoryview:
        """The index entries of all its records."""
        self._index_pending()
        return self._index.view()

    def entries(self) -> NDArray[np.void]:
        return segment_index.read_entries(self.index_bytes())

    def deleted_mask(self) -> BoolArray | None:
        return None if self._deleted is None else self._deleted.view(self.stop - self.base)

    def mark_deleted(self, which: Ints, weights: Ints | None = None) -> SizeCount:
        self._deleted = self._deleted or DeletionBitmap()
        removed = mark_deleted(self, self._deleted, which, weights)
        self.live_records, self.live_bytes = self.live_records - removed.records, self.live_bytes - removed.bytes
        return removed

    def mark_deleted_one(self, at: int) -> int | None:
        self._deleted = self._deleted or DeletionBitmap()
        size = mark_deleted_one(self, self._deleted, at)
        if size is not None:
            self.live_records, self.live_bytes = self.live_records - 1, self.live_bytes - size
        return size

    def reader(self, first: int, stop: int, bytes_max: int) -> Callable[[], Chunk]:
        last_write = self._last_write
        if last_write is not None and first >= last_write[0]:
            last_rows = scan.read_single_frame(last_write[1])
            if last_rows is not None:
                return lambda: Chunk(last_rows.between(first, stop), stop)
        entries = self.entries()
        lo, hi = first - self.base, stop - self.base
        offsets = entries["frame_offset"]
        low = int(offsets[lo])
        hi = max(min(hi, bisect_right(offsets, low + bytes_max, lo, hi)), lo + 1)
        next_frame = bisect_right(offsets, int(offsets[hi - 1]), hi)
        high = int(offsets[next_frame]) if next_frame < len(offsets) else self.origin + self.size
        base, (pieces, start) = self.base, self._pieces_between(low, high)
        # Bytes that never left this process are not verified again.
        check = any(isinstance(piece, WalRange) for piece in pieces)

        def read() -> Chunk:
            window = _read_window(pieces, start, low, high)
            rows = scan.scan_indexed(window, entries, lo, hi, base, check=check, origin=low)
            return Chunk(rows, base + hi)

        return read

    def plain_frames(
        self,
        first: int,
        stop: int,
        bytes_max: int,  # noqa: ARG002
        resident_at_us: int | None,  # noqa: ARG002 - in memory in any case
    ) -> Callable[[], FrameLocations | None] | None:
        """Only where the frames are in few pieces, all in memory."""
        dead = self.deleted_mask()
        if dead is not None and dead[first - self.base : stop - self.base].any():
            return None
        index = self.index_bytes()
        low, last = (
            segment_index.frame_offset_at(index, first - self.base),
            segment_index.frame_offset_at(index, stop - 1 - self.base),
        )
        first_piece, stop_piece = bisect_right(self._starts, low) - 1, bisect_right(self._starts, last)
        pieces: list[Buffer] = [
            piece for piece in self._pieces[first_piece:stop_piece] if not isinstance(piece, WalRange)
        ]
        if not 0 < len(pieces) == stop_piece - first_piece <= _PLAIN_PIECES_MAX:
            return None
        offsets = [low - self._starts[first_piece], *[0] * (len(pieces) - 1)]
        return lambda: list(zip(pieces, offsets, strict=True))

    def read_last_write(self, first: int, stop: int) -> tuple[int, list[bytes]] | None:
        """Return time and data of records [first, stop) if they end the last write, are plain JSON, and none was
        deleted."""
        last_write = self._last_write
        if last_write is None or first < last_write[0] or stop != self.stop:
            return None
        dead = self.deleted_mask()
        if dead is not None and dead[first - self.base :].any():
            return None
        texts = scan.read_texts(last_write[1], 0, first, stop, nodes=False)
        return texts if texts is not None and len(texts[1]) == stop - first else None

    def read_texts(self, first: int, stop: int) -> tuple[list[int], list[bytes]] | None:
        """Return times and data of these records if they are in memory and are JSON without tags and metas. Reads a few
        records without columns."""
        index, times, datas = self.index_bytes(), list[int](), list[bytes]()
        while first < stop:
            offset = segment_index.frame_offset_at(index, first - self.base)
            number = bisect_right(self._starts, offset) - 1
            piece = self._pieces[number]
            texts = (
                None
                if isinstance(piece, WalRange)
                else scan.read_texts(piece, offset - self._starts[number], first, stop)
            )
            if texts is None:
                return None
            ts_ms, frame_datas = texts
            times += [ts_ms] * len(frame_datas)
            datas += frame_datas
            first += len(frame_datas)
        return times, datas


def _read_window(pieces: list[Piece], start: int, lo: int, hi: int) -> Buffer:
    """Return bytes [lo, hi) of pieces that start at `start`; without a copy if one piece in memory has all of them."""
    pieces = _join_adjacent(pieces)
    if len(pieces) == 1:
        piece = pieces[0]
        return (
            piece.read(lo - start, hi - start)
            if isinstance(piece, WalRange)
            else memoryview(piece)[lo - start : hi - start]
        )
    loaded = [piece.read(0, len(piece)) if isinstance(piece, WalRange) else piece for piece in pieces]
    return memoryview(b"".join(loaded))[lo - start : hi - start]


def _join_adjacent(pieces: list[Piece]) -> list[Piece]:
    """Join WAL ranges that are adjacent in one file, so that they are read at once."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else b""
        if isinstance(piece, WalRange) and isinstance(last, WalRange) and last.is_followed_by(piece):
            joined[-1] = WalRange(last.file, last.pos, last.size + piece.size)
        else:
            joined.append(piece)
    return joined


def _read_and_verify(piece: WalRange) -> tuple[bytes, StoredFault | None]:
    """Read frames from the WAL, and describe the first that does not verify."""
    content = piece.read(0, len(piece))
    if len(content) != len(piece):
        reason = f"{len(piece)} bytes were written, {len(content)} are there"
        raise Corrupt(piece.file.path, pos=piece.pos, reason=reason)
    scanned = scan.scan_headers(content)
    if scanned.end == len(content):
        return content, None
    where, reason = f"{piece.file.path}, byte {piece.pos + scanned.end}", scanned.reason or "it ends early"
    return content, StoredFault(where, f"a frame is not what was written there: {reason}")
