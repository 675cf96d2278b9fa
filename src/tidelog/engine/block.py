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
from tidelog.commitlog.segment import Growing
from tidelog.engine.masks import Bools, Mask
from tidelog.engine.parts import Places, Weight, bury, bury_one
from tidelog.errors import Corrupt
from tidelog.formats import idx, lone, scan
from tidelog.formats.idx import Run
from tidelog.types import Buffer, Ints
from tidelog.wal import Stored

Piece = bytes | Stored


class Problem(NamedTuple):
    """Stored bytes that do not verify."""

    where: str
    reason: str


class Told(NamedTuple):
    """What a writer knows of its records, so that nobody has to read them for the index: they came at one time."""

    counts: Sequence[int]  # how many are in each frame
    lengths: Sequence[int]
    flags: int


LARGE_BYTES: Final = 1 << 16  # a write of at least this is left in the WAL
_BARE_MAX: Final = 16  # pieces that are read one by one
_LOOSE_MAX: Final = 256  # small pieces are laid together when there are this many


class Block:
    """Records of one segment that no segment file has yet. Its owner's lock guards it."""

    def __init__(self, base: int, *, segment: int, origin: int, kept: bool) -> None:
        self.base = self.stop = base
        self.segment = segment  # first seq of the segment it belongs to
        self.origin = origin  # where its first byte will lie in the segment's data
        self.kept = kept  # False: of an ephemeral topic, never written to any file
        self.frozen = False  # a checkpoint is writing it: the next record starts another block
        self.size = 0
        self.live = self.live_bytes = 0
        self.first_ts = self.last_ts = 0
        self._pieces: list[Piece] = []
        self._starts: list[int] = []
        self._loose = 0  # pieces from here on are small and may be laid together
        self._index = Growing(b"")
        self._indexed = 0  # bytes that the index covers
        self._listed = base  # one past the last seq that it covers
        self.bare_from = base  # records from this seq on have no meta
        self._dead: Mask | None = None
        self._newest: tuple[int, bytes] | None = None  # first seq and frames of the last write, where it is in memory

    def add(
        self,
        pieces: list[bytes] | list[Stored],
        count: int,
        weight: int,
        first_ts: int,
        last_ts: int,
        told: Told | None = None,
    ) -> None:
        """Append the frames of `count` records with the next seqs."""
        assert not self.frozen, "a frozen block is what a checkpoint has seen"
        if self.base == self.stop:
            self.first_ts = first_ts
        start, known = self.origin + self.size, told is not None and self._indexed == self.size
        newest = pieces[0] if len(pieces) == 1 else None
        self._newest = (self.stop, newest) if isinstance(newest, bytes) else None
        for piece in pieces:
            self._starts.append(self.origin + self.size)
            self._pieces.append(piece)
            self.size += len(piece)
            if isinstance(piece, Stored) or len(piece) >= LARGE_BYTES:
                self._loose = len(self._pieces)
        if len(self._pieces) - self._loose > _LOOSE_MAX:
            self._pieces[self._loose :] = [b"".join(self._pieces[self._loose :])]  # type: ignore[arg-type]  # bytes all
            del self._starts[self._loose + 1 :]
            self._loose = len(self._pieces) if len(self._pieces[-1]) >= LARGE_BYTES else len(self._pieces) - 1
            self._index.view()
        self.stop += count
        self.live += count
        self.live_bytes += weight
        self.last_ts = last_ts
        if told is None or told.flags & idx.HAS_META:
            self.bare_from = self.stop
        if told is not None and known:
            self._list(pieces, told, start, first_ts)

    def add_stored(self, pieces: list[Stored], told: Told, weight: int, ts_ms: int) -> None:
        """Append frames that stay in the WAL."""
        self._walk()  # the index grows in the order of the records
        self.add(pieces, len(told.lengths), weight, ts_ms, ts_ms, told)

    def add_indexed(
        self, pieces: list[Stored], entries: bytes, count: int, weight: int, first_ts: int, last_ts: int
    ) -> None:
        """Append frames that stay in the WAL, several a piece, with their index."""
        self._walk()
        self.add(pieces, count, weight, first_ts, last_ts)
        self._index.add(entries)
        self._indexed, self._listed = self.size, self.stop

    def _list(self, pieces: Sequence[Piece], told: Told, start: int, ts_ms: int) -> None:
        """Put what the writer told into the index, which has everything before it."""
        counts, lengths, flags = told
        if len(lengths) == 1:
            self._index.add(idx.entry_of(start, lengths[0], ts_ms, flags))
        else:
            starts = [start]
            for piece in pieces[:-1]:
                starts.append(starts[-1] + len(piece))
            self._index.add(Run(starts, counts, np.asarray(lengths, np.uint32), ts_ms, flags))
        self._indexed, self._listed = self.size, self.stop

    def pieces(self) -> Iterator[tuple[Buffer, Problem | None]]:
        """All of its bytes, frame by frame where they come from the WAL, and what does not verify there. Without the
        lock: for a frozen block."""
        for piece in self._pieces:
            yield _loaded(piece) if isinstance(piece, Stored) else (piece, None)

    def move(self, segment: int, origin: int) -> None:
        """Make it part of another segment, at this place. What was handed out before stays as it was."""
        entries = idx.read(bytes(self.index())).copy()
        shift = origin - self.origin
        entries["frame_offset"] = entries["frame_offset"].astype(np.int64) + shift
        self._index = Growing(idx.to_bytes(entries))
        self._starts = [start + shift for start in self._starts]
        self.segment, self.origin = segment, origin

    def _between(self, lo: int, hi: int) -> tuple[list[Piece], int]:
        """The pieces that hold bytes [lo, hi) of the segment's data, and where the first of them starts."""
        at = bisect_right(self._starts, lo) - 1
        end = bisect_right(self._starts, hi - 1)
        return self._pieces[at:end], self._starts[at]

    def _walk(self) -> None:
        """Bring the index up to date with what is in memory."""
        if self._indexed == self.size:
            return
        start = self.origin + self._indexed
        fresh = _window(*self._between(start, self.origin + self.size), start, self.origin + self.size)
        walk = scan.walk(fresh, above=self._listed - 1)
        if walk.end != len(fresh) or len(walk.rows) != self.stop - self._listed:
            raise Corrupt("memory", pos=walk.end, reason=f"frames of this process changed: {walk.reason}")
        made = idx.entries(walk.rows, self._listed, self.stop, self.origin + self.size, origin=start)
        self._index.add(idx.to_bytes(made))
        self._indexed, self._listed = self.size, self.stop

    def index(self) -> memoryview:
        """The index entries of all of it."""
        self._walk()
        return self._index.view()

    def entries(self) -> NDArray[np.void]:
        return idx.read(self.index())

    def dead(self) -> Bools | None:
        return None if self._dead is None else self._dead.view(self.stop - self.base)

    def bury(self, which: Ints, weights: Ints | None = None) -> Weight:
        self._dead = self._dead or Mask()
        gone = bury(self, self._dead, which, weights)
        self.live, self.live_bytes = self.live - gone.records, self.live_bytes - gone.size
        return gone

    def bury_one(self, at: int) -> int | None:
        self._dead = self._dead or Mask()
        size = bury_one(self, self._dead, at)
        if size is not None:
            self.live, self.live_bytes = self.live - 1, self.live_bytes - size
        return size

    def look(self, first: int, stop: int, bytes_max: int, *, compiled: bool = True) -> Callable[[], Chunk]:
        newest = self._newest
        if newest is not None and first >= newest[0]:
            fresh = lone.rows(newest[1])
            if fresh is not None:
                return lambda: Chunk(fresh.between(first, stop), stop)
        entries = self.entries()
        lo, hi = first - self.base, stop - self.base
        at = entries["frame_offset"]
        low = int(at[lo])
        hi = max(min(hi, bisect_right(at, low + bytes_max, lo, hi)), lo + 1)
        later = bisect_right(at, int(at[hi - 1]), hi)
        high = int(at[later]) if later < len(at) else self.origin + self.size
        base, (pieces, start) = self.base, self._between(low, high)
        # What has not left this process since its checksum was made is not verified again.
        check = any(isinstance(piece, Stored) for piece in pieces)

        def read() -> Chunk:
            window = _window(pieces, start, low, high)
            rows = scan.walk_indexed(window, entries, lo, hi, base, check=check, origin=low, compiled=compiled)
            return Chunk(rows, base + hi)

        return read

    def bare(
        self,
        first: int,
        stop: int,
        bytes_max: int,  # noqa: ARG002
        near_us: int | None,  # noqa: ARG002 - in memory or not at all
    ) -> Callable[[], Places | None] | None:
        """Where they are in few pieces."""
        dead = self.dead()
        if dead is not None and dead[first - self.base : stop - self.base].any():
            return None
        index = self.index()
        low, last = idx.frame_at(index, first - self.base), idx.frame_at(index, stop - 1 - self.base)
        at, end = bisect_right(self._starts, low) - 1, bisect_right(self._starts, last)
        found: list[Buffer] = [piece for piece in self._pieces[at:end] if not isinstance(piece, Stored)]
        if not 0 < len(found) == end - at <= _BARE_MAX:
            return None
        places = [low - self._starts[at], *[0] * (len(found) - 1)]
        return lambda: list(zip(found, places, strict=True))

    def newest(self, first: int, stop: int) -> tuple[int, list[bytes]] | None:
        """The time and the data of records [first, stop), where they end the last write, are JSON and nothing else,
        and none was deleted."""
        newest = self._newest
        if newest is None or first < newest[0] or stop != self.stop:
            return None
        dead = self.dead()
        if dead is not None and dead[first - self.base :].any():
            return None
        found = lone.texts(newest[1], 0, first, stop, nodes=False)
        return found if found is not None and len(found[1]) == stop - first else None

    def texts(self, first: int, stop: int) -> tuple[list[int], list[bytes]] | None:
        """The times and the data of these records, where they lie in memory and are JSON without tags and metas: read
        at once and without columns, for those who want a few."""
        index, times, found = self.index(), list[int](), list[bytes]()
        while first < stop:
            at = idx.frame_at(index, first - self.base)
            where = bisect_right(self._starts, at) - 1
            piece = self._pieces[where]
            known = None if isinstance(piece, Stored) else lone.texts(piece, at - self._starts[where], first, stop)
            if known is None:
                return None
            ts_ms, datas = known
            times += [ts_ms] * len(datas)
            found += datas
            first += len(datas)
        return times, found


def _window(pieces: list[Piece], start: int, lo: int, hi: int) -> Buffer:
    """Bytes [lo, hi) of pieces that start at `start`; without a copy where one piece in memory has them all."""
    pieces = _adjoined(pieces)
    if len(pieces) == 1:
        piece = pieces[0]
        return (
            piece.read(lo - start, hi - start)
            if isinstance(piece, Stored)
            else memoryview(piece)[lo - start : hi - start]
        )
    loaded = [piece.read(0, len(piece)) if isinstance(piece, Stored) else piece for piece in pieces]
    return memoryview(b"".join(loaded))[lo - start : hi - start]


def _adjoined(pieces: list[Piece]) -> list[Piece]:
    """The same bytes in fewer pieces: writes that lie one behind the other in a WAL file are read at once."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else b""
        if isinstance(piece, Stored) and isinstance(last, Stored) and last.is_before(piece):
            found[-1] = Stored(last.file, last.pos, last.size + piece.size)
        else:
            found.append(piece)
    return found


def _loaded(piece: Stored) -> tuple[bytes, Problem | None]:
    """Frames as the WAL has them, and what is wrong with the first that does not verify."""
    content = piece.read(0, len(piece))
    if len(content) != len(piece):
        reason = f"{len(piece)} bytes were written, {len(content)} are there"
        raise Corrupt(piece.file.path, pos=piece.pos, reason=reason)
    found = scan.survey(content)
    if found.end == len(content):
        return content, None
    where, reason = f"{piece.file.path}, byte {piece.pos + found.end}", found.reason or "it ends early"
    return content, Problem(where, f"a frame is not what was written there: {reason}")
