"""[hot] Records that no segment file has yet: small writes in memory, large ones where the WAL has them.

    pieces   │ bytes │ bytes │ Stored in wal-…412.log │ bytes │ Stored … │       in the order of the segment's data
    index    └ walked when somebody looks ┘└ known from the write: a run ┘        newest: told without an index

A large write is not kept a second time: memory that is touched once and held until a checkpoint costs
more than writing it did. Whoever reads it has it from the page cache, with its checksum. The WAL keeps the
file while a block names it, and a reader that holds a piece of it keeps it open.
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
    """What a writer knows of its records, so that nobody has to read them for the index: they came at one time."""

    counts: Sequence[int]  # how many are in each frame
    lengths: Sequence[int]
    flags: int


LARGE_WRITE_BYTES: Final = 1 << 16  # a write of at least this is left in the WAL
_PLAIN_PIECES_MAX: Final = 16  # pieces that are read one by one
_SMALL_PIECES_MAX: Final = 256  # small pieces are laid together when there are this many


class MemTable:
    """Records of one segment that no segment file has yet. Its owner's lock guards it."""

    def __init__(self, base: int, *, segment: int, origin: int, persistent: bool) -> None:
        self.base = self.stop = base
        self.segment = segment  # first seq of the segment it belongs to
        self.origin = origin  # where its first byte will lie in the segment's data
        self.is_persistent = persistent  # False: of an ephemeral topic, never written to any file
        self.is_frozen = False  # a checkpoint is writing it: the next record starts another block
        self.size = 0
        self.live_records = self.live_bytes = 0
        self.first_ts = self.last_ts = 0
        self._pieces: list[Piece] = []
        self._starts: list[int] = []
        self._small_from = 0  # pieces from here on are small and may be laid together
        self._index = AppendBuffer(b"")
        self._indexed_bytes = 0  # bytes that the index covers
        self._indexed_stop = base  # one past the last seq that it covers
        self.no_meta_from = base  # records from this seq on have no meta
        self._deleted: DeletionBitmap | None = None
        self._last_write: tuple[int, bytes] | None = (
            None  # first seq and frames of the last write, where it is in memory
        )

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
        assert not self.is_frozen, "a frozen block is what a checkpoint has seen"
        if self.base == self.stop:
            self.first_ts = first_ts
        start, known = self.origin + self.size, stats is not None and self._indexed_bytes == self.size
        newest = pieces[0] if len(pieces) == 1 else None
        self._last_write = (self.stop, newest) if isinstance(newest, bytes) else None
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
        if stats is not None and known:
            self._index_stats(pieces, stats, start, first_ts)

    def add_stored(self, pieces: list[WalRange], stats: BatchStats, weight: int, ts_ms: int) -> None:
        """Append frames that stay in the WAL."""
        self._index_pending()  # the index grows in the order of the records
        self.add(pieces, len(stats.lengths), weight, ts_ms, ts_ms, stats)

    def add_indexed(
        self, pieces: list[WalRange], entries: bytes, count: int, weight: int, first_ts: int, last_ts: int
    ) -> None:
        """Append frames that stay in the WAL, several a piece, with their index."""
        self._index_pending()
        self.add(pieces, count, weight, first_ts, last_ts)
        self._index.append(entries)
        self._indexed_bytes, self._indexed_stop = self.size, self.stop

    def _index_stats(self, pieces: Sequence[Piece], stats: BatchStats, start: int, ts_ms: int) -> None:
        """Put what the writer told into the index, which has everything before it."""
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
        """All of its bytes, frame by frame where they come from the WAL, and what does not verify there. Without the
        lock: for a frozen block."""
        for piece in self._pieces:
            yield _read_and_verify(piece) if isinstance(piece, WalRange) else (piece, None)

    def move_to_segment(self, segment: int, origin: int) -> None:
        """Make it part of another segment, at this place. What was handed out before stays as it was."""
        entries = segment_index.read_entries(bytes(self.index_bytes())).copy()
        shift = origin - self.origin
        entries["frame_offset"] = entries["frame_offset"].astype(np.int64) + shift
        self._index = AppendBuffer(entries.tobytes())
        self._starts = [start + shift for start in self._starts]
        self.segment, self.origin = segment, origin

    def _pieces_between(self, lo: int, hi: int) -> tuple[list[Piece], int]:
        """The pieces that hold bytes [lo, hi) of the segment's data, and where the first of them starts."""
        at = bisect_right(self._starts, lo) - 1
        end = bisect_right(self._starts, hi - 1)
        return self._pieces[at:end], self._starts[at]

    def _index_pending(self) -> None:
        """Bring the index up to date with what is in memory."""
        if self._indexed_bytes == self.size:
            return
        start = self.origin + self._indexed_bytes
        fresh = _read_window(*self._pieces_between(start, self.origin + self.size), start, self.origin + self.size)
        walk = scan.scan_records(fresh, above=self._indexed_stop - 1)
        if walk.end != len(fresh) or len(walk.rows) != self.stop - self._indexed_stop:
            raise Corrupt("memory", pos=walk.end, reason=f"frames of this process changed: {walk.reason}")
        made = segment_index.build_entries(
            walk.rows, self._indexed_stop, self.stop, self.origin + self.size, origin=start
        )
        self._index.append(made.tobytes())
        self._indexed_bytes, self._indexed_stop = self.size, self.stop

    def index_bytes(self) -> memoryview:
        """The index entries of all of it."""
        self._index_pending()
        return self._index.view()

    def entries(self) -> NDArray[np.void]:
        return segment_index.read_entries(self.index_bytes())

    def deleted_mask(self) -> BoolArray | None:
        return None if self._deleted is None else self._deleted.view(self.stop - self.base)

    def mark_deleted(self, which: Ints, weights: Ints | None = None) -> SizeCount:
        self._deleted = self._deleted or DeletionBitmap()
        gone = mark_deleted(self, self._deleted, which, weights)
        self.live_records, self.live_bytes = self.live_records - gone.records, self.live_bytes - gone.bytes
        return gone

    def mark_deleted_one(self, at: int) -> int | None:
        self._deleted = self._deleted or DeletionBitmap()
        size = mark_deleted_one(self, self._deleted, at)
        if size is not None:
            self.live_records, self.live_bytes = self.live_records - 1, self.live_bytes - size
        return size

    def reader(self, first: int, stop: int, bytes_max: int) -> Callable[[], Chunk]:
        newest = self._last_write
        if newest is not None and first >= newest[0]:
            fresh = scan.read_single_frame(newest[1])
            if fresh is not None:
                return lambda: Chunk(fresh.between(first, stop), stop)
        entries = self.entries()
        lo, hi = first - self.base, stop - self.base
        at = entries["frame_offset"]
        low = int(at[lo])
        hi = max(min(hi, bisect_right(at, low + bytes_max, lo, hi)), lo + 1)
        later = bisect_right(at, int(at[hi - 1]), hi)
        high = int(at[later]) if later < len(at) else self.origin + self.size
        base, (pieces, start) = self.base, self._pieces_between(low, high)
        # What has not left this process since its checksum was made is not verified again.
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
        resident_at_us: int | None,  # noqa: ARG002 - in memory or not at all
    ) -> Callable[[], FrameLocations | None] | None:
        """Where they are in few pieces."""
        dead = self.deleted_mask()
        if dead is not None and dead[first - self.base : stop - self.base].any():
            return None
        index = self.index_bytes()
        low, last = (
            segment_index.frame_offset_at(index, first - self.base),
            segment_index.frame_offset_at(index, stop - 1 - self.base),
        )
        at, end = bisect_right(self._starts, low) - 1, bisect_right(self._starts, last)
        found: list[Buffer] = [piece for piece in self._pieces[at:end] if not isinstance(piece, WalRange)]
        if not 0 < len(found) == end - at <= _PLAIN_PIECES_MAX:
            return None
        places = [low - self._starts[at], *[0] * (len(found) - 1)]
        return lambda: list(zip(found, places, strict=True))

    def read_last_write(self, first: int, stop: int) -> tuple[int, list[bytes]] | None:
        """The time and the data of records [first, stop), where they end the last write, are JSON and nothing else,
        and none was deleted."""
        newest = self._last_write
        if newest is None or first < newest[0] or stop != self.stop:
            return None
        dead = self.deleted_mask()
        if dead is not None and dead[first - self.base :].any():
            return None
        found = scan.read_texts(newest[1], 0, first, stop, nodes=False)
        return found if found is not None and len(found[1]) == stop - first else None

    def read_texts(self, first: int, stop: int) -> tuple[list[int], list[bytes]] | None:
        """The times and the data of these records, where they lie in memory and are JSON without tags and metas: read
        at once and without columns, for those who want a few."""
        index, times, found = self.index_bytes(), list[int](), list[bytes]()
        while first < stop:
            at = segment_index.frame_offset_at(index, first - self.base)
            where = bisect_right(self._starts, at) - 1
            piece = self._pieces[where]
            known = (
                None if isinstance(piece, WalRange) else scan.read_texts(piece, at - self._starts[where], first, stop)
            )
            if known is None:
                return None
            ts_ms, datas = known
            times += [ts_ms] * len(datas)
            found += datas
            first += len(datas)
        return times, found


def _read_window(pieces: list[Piece], start: int, lo: int, hi: int) -> Buffer:
    """Bytes [lo, hi) of pieces that start at `start`; without a copy where one piece in memory has them all."""
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
    """The same bytes in fewer pieces: writes that lie one behind the other in a WAL file are read at once."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else b""
        if isinstance(piece, WalRange) and isinstance(last, WalRange) and last.is_followed_by(piece):
            found[-1] = WalRange(last.file, last.pos, last.size + piece.size)
        else:
            found.append(piece)
    return found


def _read_and_verify(piece: WalRange) -> tuple[bytes, StoredFault | None]:
    """Frames as the WAL has them, and what is wrong with the first that does not verify."""
    content = piece.read(0, len(piece))
    if len(content) != len(piece):
        reason = f"{len(piece)} bytes were written, {len(content)} are there"
        raise Corrupt(piece.file.path, pos=piece.pos, reason=reason)
    found = scan.scan_headers(content)
    if found.end == len(content):
        return content, None
    where, reason = f"{piece.file.path}, byte {piece.pos + found.end}", found.reason or "it ends early"
    return content, StoredFault(where, f"a frame is not what was written there: {reason}")
