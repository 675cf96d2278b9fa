"""Recovery of one shard: replay its files as frames, and distinguish an unfinished write from damage.

    wal-0000000000000001.log                              wal-0000000000000412.log, the newest
    ┌───────┬───────┬─────┬───────┬───────┬┄┄┄┄┄┄┄┐       ┌──────┬───────┬───────┬─────┬┄┄┄┄┄┄┄┄┄┄┐
    │ frame │ frame │ bad │ frame │ frame │ zeros │       │ mark │ frame │ frame │ bad │ whatever │
    └───────┴───────┴─────┴───────┴───────┴┄┄┄┄┄┄┄┘       └──────┴───────┴───────┴─────┴┄┄┄┄┄┄┄┄┄┄┘
    └── extent ─────┘lost └── extent ─────┘               └── extent ────────────┘ torn tail

`replay_shard` only reads: it returns, window by window, the frames with valid checksums whose batches are complete, and
classifies the bytes between and after them. `Replay.windows` returns the same frames again, for a caller that needs
all results before it starts. `prepare_for_writing` brings the files to what was replayed, before anything is written.
Memory use is one window, or the largest batch if that is larger, whatever the size of the files.

Known to be durable, in order of authority:
  1. A file with every frame up to the number of the next file, or up to the end that the first mark of the next file
     names, has lost none, whatever follows.
  2. Everything in a file that is not the newest: it was synced before the next one was created.
  3. In the newest file, everything before the position that the caller passes (of a snapshot), that SYNCED has or that
     a mark of the synced position names. A mark names its own byte as well, so that a copy of a WAL inside a record
     is not a mark.
A file that CURRENT, NEWEST or the caller's position names did exist. If neither it nor a later one exists now, it was
lost with all its content (`missing_file`), and the file before it is not the newest.

A bad frame in the durable part is damage: a `LostRange`. Replay continues at the next frame whose position is proven
(`_Resync`): bytes inside a record are never taken for a frame, and the rest of a batch that lost a frame is dropped.
A bad frame after the durable part is an unfinished write and ends the shard (`TornTail`): unsynced pages reach the disk
in any order, so the bytes after it prove nothing. If they contain whole frames, they are kept in quarantine.
Zeros are the preallocated end of a file. Followed by other bytes, or in the durable part, they are bad bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog.disk.interface import Disk, File, join
from tidelog.errors import Corrupt, Damaged, NewerFormat, Unavailable
from tidelog.formats import control_frames, frame, scan
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
    CHECKPOINT_MARK,
    FORWARD,
    FRAME_LEN_MIN,
    FRAME_NAMES,
    HEADER,
    HEADER_BYTES,
    KNOWN_FLAGS,
    LARGE_RECORD,
    MORE,
    NUMBERED_BATCH,
    OVERHEAD_BYTES,
    WRITE_KEY,
    Frame,
)
from tidelog.formats.rows import ScanStop
from tidelog.types import Buffer, Ints
from tidelog.wal import paths
from tidelog.wal.paths import Position, Proof
from tidelog.wal.writer import SYNC_MARK_BYTES, remove_unused_file

WINDOW_BYTES: Final = 4 << 20
CACHED_WINDOWS_BYTES_MAX: Final = 16 << 20  # of windows that `windows` need not read again
_CHUNK_BYTES: Final = 1 << 20
_BEFORE_ALL: Final = Position(0, 0)
_NO_LIMIT: Final = 1 << 62
_RECORD_BYTES_MIN: Final = 4  # the smallest size of a record in a batch
_BATCH_RECORDS_MAX: Final = 1 << 16  # upper bound of the records in one frame
_FILE_BYTES_MAX: Final = 1 << 30  # upper bound of a file's size, if nothing records it
_RECORD_KINDS: Final = (APPEND, APPEND_BATCH, LARGE_RECORD)
_ANNOUNCING_KINDS: Final = (FORWARD, NUMBERED_BATCH, WRITE_KEY)  # frames that belong to the records after them


class TornTail(NamedTuple):
    """An unfinished write at the end of a shard: no sync is known to have covered it."""

    file_number: int
    file: str
    pos: int  # bytes before it are kept
    size: int  # bytes from there up to the last that is not zero
    reason: str
    frames: int  # whole frames in it: not replayed, but kept in quarantine


class LostRange(NamedTuple):
    """Bytes that were durable and can no longer be read."""

    file_number: int
    file: str  # empty: the file is missing
    pos: int
    end: int
    reason: str
    kinds: frozenset[int] | None  # types of the lost frames; None: unknown
    records: int  # upper bound of the lost records
    frames: int  # upper bound of the lost frames

    def may_contain(self, *kinds: int) -> bool:
        """Whether a frame of one of these types may have been lost."""
        return self.kinds is None or not self.kinds.isdisjoint(kinds)


class FrameWindow(NamedTuple):
    """Frames of one file, back to back, with valid checksums and complete batches."""

    file_number: int
    file_offset: int  # position of `buf` in the file
    buf: bytes
    frame_pos: Ints  # positions of the frames in `buf`
    headers: NDArray[np.void]  # their headers, as frame.HEADER
    losses_before: int  # number of losses of the shard before this window
    doubtful: int = 0  # number of first frames that may be the rest of a batch that lost its beginning


class ReplayedExtent(NamedTuple):
    """A range of one file whose frames were replayed."""

    file_number: int
    lo: int
    hi: int
    losses: int
    doubtful: int


class MissingFile(NamedTuple):
    """A file that existed and is gone."""

    file_number: int
    size: int  # upper bound of its bytes
    reason: str


class Replay:
    """Iterates over the frames of one shard, oldest file first. Its other attributes are valid after the iteration."""

    def __init__(self, disk: Disk, directory: str, start: Position | None, durable: Position | None) -> None:
        self._disk, self.directory = disk, directory
        self._start = start or Position(1, 0)
        self._durable = max(self._start, durable or _BEFORE_ALL)
        self._synced = paths.read_synced(disk, directory) or _BEFORE_ALL  # before the files, which a writer may extend
        proof, self.file_numbers = _list_files(disk, directory)
        self.missing_file = _find_missing_file(proof, self.file_numbers, self._durable)
        """The newest file, if it is proven to have existed and is gone."""
        self.extents: list[ReplayedExtent] = []
        self.is_finished = False
        self.torn_tail: TornTail | None = None
        self.losses: list[LostRange] = []
        self.missing_frames: list[range] = []  # ordinals of frames that are in no file, by the files' numbers
        self.next_file_number = self._next_file_number_min()
        """The number for a new file: larger than any in use, or that of an empty newest file, which
        `prepare_for_writing` removes."""
        self._cached_windows: list[FrameWindow] = []
        self._cached_bytes = 0

    def current_file_fault(self) -> str | None:
        """Describe what is wrong with CURRENT, if anything. Recovery does not depend on it."""
        named = paths.current_file_number(self._disk, self.directory)
        newest = self.file_numbers[-1] if self.file_numbers else None
        if named == newest or self.missing_file is not None:
            return None
        return f"CURRENT names {named or 'no file'}, the newest is {newest or 'none'}"

    def _open(self, file_number: int) -> _WalFileReader:
        path = paths.file_path(self.directory, file_number)
        return _WalFileReader(path, lambda: self._disk.open(path))

    def __iter__(self) -> Iterator[FrameWindow]:
        numbers = [first for first in self.file_numbers if first >= self._start.file_number]
        expected: int | None = self._start.file_number
        if self.missing_file is not None:
            numbers.append(self.missing_file.file_number)
        for first, following in zip_longest(numbers, numbers[1:]):
            if expected is not None and first > expected:
                gap = range(expected, first)
                self.missing_frames.append(gap)
                records_max = len(gap) * _BATCH_RECORDS_MAX
                self.losses.append(LostRange(expected, "", 0, 0, "it is in no file", None, records_max, len(gap)))
            if self.missing_file is not None and first == self.missing_file.file_number:
                self._record_missing_file(self.missing_file)
                break
            with self._open(first) as file:
                reading = _FileReplay(self, file, first, following, self._durable)
                lo = self._start.pos if first == self._start.file_number else 0
                for window in reading.windows(lo):
                    self._cache_window(window)
                    yield window
            if lo and not reading.extents:  # replay begins where this file ends
                reading.extents.append(ReplayedExtent(first, lo, lo, len(self.losses), 0))
            self.extents += reading.extents or [ReplayedExtent(first, 0, 0, len(self.losses), 0)]
            frames = reading.frames
            # The next file reuses the number of an empty file that has the expected number. An empty file with another
            # number may have held frames once. If frames cannot be counted, the number is above their upper bound.
            number_max = first + 1 + reading.frames_seen + lo // OVERHEAD_BYTES + reading.lost_frames
            number_min = first + (first != expected) if frames is not None else number_max
            # After a crash between the two, an empty file with another number and its successor are both there.
            expected = None if frames is None else max(first + frames, number_min)
            self.next_file_number = max(
                self._next_file_number_min(), number_min, first + reading.frames_seen, expected or 0
            )
        self.is_finished = True

    def _record_missing_file(self, missing: MissingFile) -> None:
        """Record the largest possible content of a missing file as lost. The next number leaves a gap for as many
        frames: after a crash before the next snapshot the numbers still show the loss."""
        frames, records = missing.size // OVERHEAD_BYTES + 1, missing.size // _RECORD_BYTES_MIN
        self.losses.append(LostRange(missing.file_number, "", 0, missing.size, missing.reason, None, records, frames))
        self.next_file_number = max(self._next_file_number_min(), missing.file_number + frames)

    def windows(self) -> Iterator[FrameWindow]:
        """Return the same windows again. Raises Unavailable if the files have changed."""
        assert self.is_finished, "the iteration has classified all bytes"
        for extent in self.extents:
            if extent.hi <= extent.lo:
                continue
            if self._cached_bytes <= CACHED_WINDOWS_BYTES_MAX:
                yield from (window for window in self._cached_windows if _is_window_of(window, extent))
                continue
            with self._open(extent.file_number) as file:
                walk = _BatchWalk(file, extent.file_number, extent.lo, extent.hi)
                for window in walk:
                    doubtful = extent.doubtful if window.file_offset == extent.lo else 0
                    yield window._replace(losses_before=extent.losses, doubtful=doubtful)
                if walk.whole_end != extent.hi:
                    raise Unavailable(f"{file.path} changed while it was read; nothing was changed, read it again")

    def _cache_window(self, window: FrameWindow) -> None:
        self._cached_bytes += len(window.buf)
        if self._cached_bytes <= CACHED_WINDOWS_BYTES_MAX:
            self._cached_windows.append(window)
        else:
            self._cached_windows.clear()

    def drop_cached_windows(self) -> None:
        """Drop the windows that were kept for `windows`."""
        self._cached_windows.clear()
        self._cached_bytes = CACHED_WINDOWS_BYTES_MAX + 1

    def _next_file_number_min(self) -> int:
        """The smallest number for a new file: above every recorded position. Otherwise a later recovery could take new
        frames for frames that a snapshot contains."""
        return self._durable.file_number + (self._durable.pos > 0)


def _is_window_of(window: FrameWindow, extent: ReplayedExtent) -> bool:
    return window.file_number == extent.file_number and extent.lo <= window.file_offset < extent.hi


def replay_shard(
    disk: Disk,
    directory: str,
    start: Position | None = None,
    *,
    durable: Position | None = None,
) -> Replay:
    """Replay the files of a shard from `start`: iterate, then read `losses`, `torn_tail` and `next_file_number`.

    Everything before `durable`, and before `start`, is known to be durable. Changes no file. Raises Damaged if a file
    cannot be read: guessing its content would lose it.
    """
    return Replay(disk, directory, start, durable)


def read_frames(disk: Disk, path: str, file_number: int, lo: int, hi: int) -> Iterator[FrameWindow]:
    """The frames of bytes [lo, hi) of a file, up to the first that is not valid. A writer may append meanwhile."""
    yield from read_frames_of(path, lambda: disk.open(path), file_number, lo, hi)


def read_frames_of(
    path: str, open_file: Callable[[], File], file_number: int, lo: int, hi: int
) -> Iterator[FrameWindow]:
    """`read_frames` of a file that may be anywhere."""
    with _WalFileReader(path, open_file) as file:
        yield from _BatchWalk(file, file_number, lo, hi)


# ── one file ──────────────────────────────────────────────────────────────────────────────────────


class _FileReplay:
    """Replays one file: returns its frames and classifies the other bytes."""

    def __init__(
        self, replay: Replay, file: _WalFileReader, first: int, following: int | None, durable: Position
    ) -> None:
        self._replay, self._file, self._file_number, self._next_file_number = replay, file, first, following
        self._is_newest = following is None and durable.file_number <= first
        known = (durable, replay._synced)
        self._known_durable = max((position.pos for position in known if position.file_number == first), default=0)
        self.extents: list[ReplayedExtent] = []
        self.frames_seen = 0  # frames that were returned
        self.lost_frames = 0
        self.frames: int | None = 0  # all frames of the file, from its first byte; None: they cannot be counted

    def windows(self, lo: int) -> Iterator[FrameWindow]:
        file, pos, doubtful = self._file, lo, 0
        if lo:
            self.frames = self._count_frames_before(lo)
        while True:
            walk = _BatchWalk(file, self._file_number, pos)
            for window in walk:
                self.frames_seen += len(window.frame_pos)
                yield window._replace(
                    losses_before=len(self._replay.losses), doubtful=doubtful if window.file_offset == pos else 0
                )
            if walk.whole_end > pos:
                self.extents.append(
                    ReplayedExtent(self._file_number, pos, walk.whole_end, len(self._replay.losses), doubtful)
                )
            resume = self._classify_stop(walk)
            if resume is None:
                break
            pos, doubtful = resume
        if self.frames is not None:
            self.frames += self.frames_seen

    def _count_frames_before(self, lo: int) -> int | None:
        """Number of frames before `lo`; None if they are damaged, which is harmless: a snapshot has them."""
        if lo > self._file.size:
            return None
        walk = _BatchWalk(self._file, self._file_number, 0, lo)
        frames = sum(len(window.frame_pos) for window in walk)
        return frames if walk.whole_end == lo else None

    def _classify_stop(self, walk: _BatchWalk) -> tuple[int, int] | None:
        """Classify the bytes after a walk. Return where replay resumes and how many frames are doubtful there; None:
        nothing more can be replayed from this file."""
        file, whole = self._file, walk.whole_end
        if self._missing_frames == 0:
            return None  # no frame is missing
        end = self._end_by_next_file()
        if end is not None and whole >= end:
            return None  # no frame was ever written after it
        used = max(file.used_end(walk.end), walk.end)
        marks = list(_find_sync_marks(file, walk.end, used)) if used > walk.end else []
        synced = [position.pos for _, position in marks if position.file_number == self._file_number]
        durable = max([self._known_durable, *synced]) if self._is_newest else _NO_LIMIT
        if used <= whole:
            self._classify_end(walk, durable, end)
            return None
        # A live writer may have written frames and marks since the walk.
        if any(len(window.frame_pos) for window in _BatchWalk(file, self._file_number, whole)):
            return whole, 0
        anchors = {pos for pos, _ in marks} | {*synced, self._known_durable, end or 0}
        resync = _Resync(file, used, anchors - {0})
        if whole >= durable:
            frames = resync.count_frames_after(walk.end)
            if resync.synced_by_marks(self._file_number) <= whole:
                self._replay.torn_tail = self._torn_tail(walk, used, frames)
                return None
        pos, more = resync.find_next_frame(walk.end)
        doubtful = 0
        if pos is not None and more:
            pos = resync.find_batch_end(pos)
        if pos is not None and more is None:
            doubtful = resync.count_batch_frames(pos)
        stop = min(used, end or used) if pos is None else pos
        proven = durable if self._is_newest else end or 0
        if pos is None and resync.end < proven:  # zeros where frames were: their types are unknown
            resync.kinds, stop = None, proven
            resync.records += (proven - resync.end) // _RECORD_BYTES_MIN
        readable = {APPEND_BATCH} if whole < walk.end else set()  # readable frames of the damaged batch
        kinds = None if resync.kinds is None else frozenset(resync.kinds | readable)
        records = resync.records + (walk.end - whole) // _RECORD_BYTES_MIN
        self._record_loss(whole, max(stop, whole), walk.reason or _ZEROS_REASON, kinds, records)
        return None if pos is None else (pos, doubtful)

    def _classify_end(self, walk: _BatchWalk, durable: int, end: int | None) -> None:
        """Only zeros follow. They are damage if frames were there, by position or by number."""
        whole, missing, reason = walk.whole_end, self._missing_frames, walk.reason or _ZEROS_REASON
        if self._is_newest:
            if whole < durable:
                reason = f"{reason}, inside the first {durable} bytes, which were synced"
                stop = min(durable, max(self._file.size, whole))
                self._record_loss(whole, stop, reason, None, (durable - whole) // _RECORD_BYTES_MIN)
        elif end is not None and end > whole:
            reason = f"{reason}, the file had {end} bytes"
            self._record_loss(whole, end, reason, None, (end - whole) // _RECORD_BYTES_MIN)
        # A file that recovery truncated ends with its last frame, and the next number may be larger than its frames.
        elif missing is not None and missing > 0 and self._file.size > whole:
            reason = f"{reason}, {missing} frames are missing"
            self._record_loss(whole, self._file.size, reason, None, missing * _BATCH_RECORDS_MAX)

    @property
    def _missing_frames(self) -> int | None:
        """Number of frames that are missing by the number of the next file; None if unknown."""
        if self._next_file_number is None or self.frames is None:
            return None
        return self._next_file_number - self._file_number - self.frames - self.frames_seen

    def _end_by_next_file(self) -> int | None:
        """The length of this file by the first mark of the next file; None if that has none. The mark of a checkpoint
        is not meant: it has a time, and names the position of the checkpoint."""
        if self._next_file_number is None or self._next_file_number not in self._replay.file_numbers:
            return None
        with self._replay._open(self._next_file_number) as file:
            buf = file.read(0, min(SYNC_MARK_BYTES, file.size))
        mark = _read_sync_mark(buf, 0)
        is_meant = mark is not None and mark.file_number == self._file_number and not _parse_header(buf).ts_ms
        return mark.pos if mark is not None and is_meant else None

    def _record_loss(self, pos: int, end: int, reason: str, kinds: frozenset[int] | None, records: int) -> None:
        """Record a range as lost."""
        frames = (end - pos) // OVERHEAD_BYTES + 1
        name = paths.file_name(self._file_number)
        self._replay.losses.append(LostRange(self._file_number, name, pos, end, reason, kinds, records, frames))
        self.frames, self.lost_frames = None, self.lost_frames + frames

    def _torn_tail(self, walk: _BatchWalk, used: int, frames: int) -> TornTail:
        name, reason = paths.file_name(self._file_number), walk.reason or _ZEROS_REASON
        return TornTail(self._file_number, name, walk.whole_end, used - walk.whole_end, reason, frames)


_ZEROS_REASON: Final = "zeros where a frame should start"


class _BatchWalk:
    """Iterates over complete batches from a position. After the iteration it has where and why they end."""

    def __init__(self, file: _WalFileReader, first: int, pos: int, limit: int | None = None) -> None:
        self._file, self._first = file, first
        self._limit = file.size if limit is None else min(limit, file.size)
        self.whole_end = self.end = pos  # end of the last complete batch; end of the last valid frame
        self.stop, self.reason = ScanStop.END, ""

    def __iter__(self) -> Iterator[FrameWindow]:
        size = WINDOW_BYTES
        while self.whole_end < self._limit:
            pos = self.whole_end
            buf = self._file.read(pos, min(pos + size, self._limit))
            is_last = pos + len(buf) >= self._limit
            scanned = scan.scan_headers(buf)
            needed = 0 if is_last else self._bytes_needed(buf, scanned)
            kept, whole = len(scanned.frame_pos), scanned.whole_end
            if needed and kept and scanned.headers["kind"][-1] in _ANNOUNCING_KINDS:
                kept, whole = kept - 1, int(scanned.frame_pos[-1])  # it is returned with the records after it
            if needed and not whole:
                size = max(2 * size, needed)
                continue
            self.whole_end, self.end = pos + whole, pos + scanned.end
            self.stop, self.reason = scanned.stop, scanned.reason
            if kept:
                yield FrameWindow(self._first, pos, buf, scanned.frame_pos[:kept], scanned.headers[:kept], 0)
            if not needed:
                return
            size = max(WINDOW_BYTES, needed - whole)
        self.stop, self.reason = ScanStop.END, ""

    def _bytes_needed(self, buf: bytes, scanned: scan.HeaderScan) -> int:
        """How many bytes from the window's start are needed to continue; 0 if it ended for another reason."""
        left = len(buf) - scanned.end
        if left < HEADER_BYTES:
            return len(buf) + WINDOW_BYTES
        head = _parse_header(buf, scanned.end)
        if scanned.stop is ScanStop.TORN and head.frame_len > left - 4 and head.is_consistent:
            return scanned.end + head.size
        return 0


class _RawHeader(NamedTuple):
    """An unverified frame header."""

    frame_len: int
    kind: int
    flags: int
    topic_id: int
    seq: int
    ts_ms: int
    node_len: int
    tag_len: int
    data_len: int

    @property
    def sections_len(self) -> int:
        """The value of frame_len by the other lengths."""
        return FRAME_LEN_MIN + self.node_len + self.tag_len + self.data_len

    @property
    def is_consistent(self) -> bool:
        """Whether the two lengths agree: then neither was damaged."""
        return self.frame_len == self.sections_len

    @property
    def size(self) -> int:
        """Bytes of the whole frame by frame_len."""
        return 4 + self.frame_len


def _parse_header(buf: Buffer, pos: int = 0) -> _RawHeader:
    return _RawHeader(*np.frombuffer(buf, HEADER, 1, pos)[0].item())


class _Resync:
    """Finds the next frame after bad bytes.

    The header of the bad frame has its end twice: `frame_len`, which the checksum does not cover, and the sum of the
    section lengths. If both are damaged, every byte is tried. A frame that is found this way may be inside a record,
    which can contain a copy of a WAL; such frames end at the checksum of the frame around them. So frames count only if
    they lead, one after the other, to a proven frame position: one that a mark of the synced position names, or the end
    of the file.
    """

    def __init__(self, file: _WalFileReader, used: int, anchors: set[int]) -> None:
        self._file, self._used, self._anchors = file, used, anchors
        self._durable: dict[int, int] = {}
        self.kinds: set[int] | None = set()  # of the skipped frames; None: unknown
        self.records = 0  # upper bound of the records in them
        self.end = 0  # end of the bytes that `find_next_frame` skipped

    def synced_by_marks(self, first: int) -> int:
        """The synced length of a file by the CheckpointMarks that `count_frames_after` saw: marks of versions that did
        not record their own position, which count only as frames."""
        return self._durable.get(first, 0)

    def count_frames_after(self, pos: int) -> int:
        """Count the whole frames after bad bytes, of any origin."""
        next_pos: int | None = pos
        count, is_certain = 0, True
        while next_pos is not None and next_pos < self._used:
            skipped = self._end_by_lengths(next_pos)
            is_certain = is_certain and skipped is not None
            next_pos = self._search_frame(next_pos + 1, anchored=False) if skipped is None else skipped[0]
            if next_pos is None:
                break
            walk = _BatchWalk(self._file, 0, next_pos)
            for window in walk:
                count += len(window.frame_pos)
                is_old_mark = (window.headers["kind"] == CHECKPOINT_MARK) & (window.headers["seq"] == 0) & is_certain
                for mark_pos in window.frame_pos[is_old_mark].tolist():
                    mark = _read_sync_mark(window.buf, mark_pos)
                    if mark is not None:
                        self._durable[mark.file_number] = max(self._durable.get(mark.file_number, 0), mark.pos)
            next_pos = walk.end
        return count

    def find_next_frame(self, pos: int) -> tuple[int | None, bool | None]:
        """Find where frames continue after the bad frame at `pos`. Return the position, None if there are no more
        frames, and whether the rest of the bad frame's batch follows there, None if unknown."""
        more: bool | None = False
        while pos < self._used:
            skipped = self._end_by_lengths(pos)
            if skipped is None:
                next_pos = self._search_frame(pos + 1, anchored=True)
                self.end = self._used if next_pos is None else next_pos
                self.kinds = None
                self.records += (self.end - pos) // _RECORD_BYTES_MIN
                return next_pos, None
            end, kind, more = skipped
            if self.kinds is not None:
                self.kinds.add(kind)
            size = end - pos - OVERHEAD_BYTES
            self.records += {APPEND: 1, LARGE_RECORD: 1, APPEND_BATCH: size // _RECORD_BYTES_MIN}.get(kind, 0)
            pos = self.end = end
            if self._file.frame(pos) is not None:
                return pos, more
        return None, more

    def find_batch_end(self, pos: int) -> int:
        """The end of the rest of a batch that lost a frame."""
        for head in self._batch_headers(pos):
            pos += head.size
            self.records += head.data_len // _RECORD_BYTES_MIN if head.kind == APPEND_BATCH else 1
        return pos

    def count_batch_frames(self, pos: int) -> int:
        """The number of frames from `pos` that may be the rest of one batch."""
        return sum(1 for _ in self._batch_headers(pos, any_topic=True))

    def _batch_headers(self, pos: int, *, any_topic: bool = False) -> Iterator[_RawHeader]:
        """Headers of the valid record frames from `pos` up to the end of their batch."""
        topic_id: int | None = None
        while (head := self._file.frame(pos)) is not None and head.kind in _RECORD_KINDS:
            if topic_id not in (None, head.topic_id) and not any_topic:
                return
            yield head
            if not head.flags & MORE:
                return
            topic_id, pos = head.topic_id, pos + head.size

    def _end_by_lengths(self, pos: int) -> tuple[int, int, bool] | None:
        """The end of the bad frame at `pos` by its own lengths, its type, and whether more of its batch follows."""
        head = self._file.header(pos)
        if head is None:
            return None
        if not head.is_consistent:
            # One of the lengths is wrong. The checksum covers all but frame_len.
            end = pos + 4 + head.sections_len
            if end <= self._file.size and self._match_checksum(pos, end, {(head.kind, head.flags)}):
                return end, head.kind, bool(head.flags & MORE)
            end = pos + head.size
            plausible = head.kind in FRAME_NAMES and not head.flags & ~KNOWN_FLAGS and head.frame_len >= FRAME_LEN_MIN
            if plausible and end <= self._file.size and self._file.frame(end) is not None:
                return end, head.kind, bool(head.flags & MORE)
            return None
        end = pos + head.size
        if head.frame_len < FRAME_LEN_MIN or end > self._file.size:
            return None
        # Its type or its flags may be damaged: with the right ones the checksum is valid.
        leads = {(head.kind, flags) for flags in range(KNOWN_FLAGS + 1)} | {(kind, head.flags) for kind in FRAME_NAMES}
        kind, flags = self._match_checksum(pos, end, leads) or (head.kind, head.flags)
        if kind not in FRAME_NAMES:
            return None
        return end, kind, kind in _RECORD_KINDS and bool(flags & MORE)

    def _match_checksum(self, pos: int, end: int, leads: set[tuple[int, int]]) -> tuple[int, int] | None:
        """The type and flags, of those given, with which the checksum of a frame is valid."""
        covered = bytearray(self._file.read(pos + 4, end - 8))
        expected = int.from_bytes(self._file.read(end - 8, end), "little")
        for kind, flags in leads:
            covered[0], covered[1] = kind, flags
            if xxh3_64_intdigest(covered) == expected:
                return kind, flags
        return None

    def _search_frame(self, pos: int, *, anchored: bool) -> int | None:
        """The first valid frame at or after `pos`, byte by byte; `anchored`: one that leads to a proven position."""
        while pos < self._used:
            candidate = self._next_candidate(pos)
            if candidate is None:
                return None
            if self._file.frame(candidate) is None:
                pos = candidate + 1
                continue
            unproven_end = self._first_unproven(candidate) if anchored else None
            if unproven_end is None:
                return candidate
            pos = max(unproven_end, candidate + 1)
        return None

    def _next_candidate(self, pos: int) -> int | None:
        """The first position from `pos` at which a header may start: its lengths agree and its type is known."""
        while pos < self._used:
            buf = self._file.read(pos, min(pos + _CHUNK_BYTES + HEADER_BYTES - 1, self._used))
            count = len(buf) - HEADER_BYTES + 1
            if count <= 0:
                return None
            kind = np.frombuffer(buf, np.uint8, count, frame.KIND_OFFSET)
            likely = np.flatnonzero((kind > 0) & (kind <= max(FRAME_NAMES)))
            heads = frame.read_headers(buf, likely)
            sections = heads["data_len"].astype(np.int64) + heads["node_len"] + heads["tag_len"] + FRAME_LEN_MIN
            consistent = np.flatnonzero(sections == heads["frame_len"])
            if len(consistent):
                return pos + int(likely[consistent[0]])
            pos += count
        return None

    def _first_unproven(self, pos: int) -> int | None:
        """None if the frames from `pos` lead to a proven position; else where they end."""
        while True:
            walk = _BatchWalk(self._file, 0, pos)
            for window in walk:
                starts = window.frame_pos + window.file_offset
                if pos in self._anchors or np.isin(starts, list(self._anchors)).any():
                    return None
            if walk.end in self._anchors or (walk.stop is ScanStop.END and walk.end >= self._used):
                return None
            skipped = self._end_by_lengths(walk.end) if walk.end < self._used else None
            if skipped is None or self._file.frame(skipped[0]) is None:
                return walk.end
            pos = skipped[0]


def _find_sync_marks(file: _WalFileReader, pos: int, used: int) -> Iterator[tuple[int, Position]]:
    """Marks of the synced position from `pos`: the position of each, and the position that it names."""
    leads = [bytes((CHECKPOINT_MARK, flags)) + bytes(8) for flags in (0, frame.DURABLE)]  # topic 0, then the seq
    overlap = SYNC_MARK_BYTES - 1
    while pos < used:
        buf = file.read(pos, min(pos + _CHUNK_BYTES + overlap, file.size))
        for lead in leads:
            match = buf.find(lead, frame.KIND_OFFSET)
            while 0 <= match < _CHUNK_BYTES + frame.KIND_OFFSET:
                start = match - frame.KIND_OFFSET
                if buf[match + 10 : match + 18] == (pos + start).to_bytes(8, "little"):
                    mark = _read_sync_mark(buf, start)
                    if mark is not None:
                        yield pos + start, mark
                match = buf.find(lead, match + 1)
        pos += _CHUNK_BYTES


def _read_sync_mark(buf: bytes, pos: int) -> Position | None:
    """The position that the mark at `pos` names; None if there is no mark."""
    mark = frame.read_frame(buf, pos, len(buf))
    if not isinstance(mark, Frame) or mark.kind != CHECKPOINT_MARK:
        return None
    try:
        body = control_frames.decode(mark.kind, memoryview(buf)[mark.data_pos : mark.data_end])
    except (Corrupt, NewerFormat):
        return None
    return Position(body.wal_first, body.wal_pos) if isinstance(body, control_frames.CheckpointMark) else None


# ── preparing to write ────────────────────────────────────────────────────────────────────────────


def prepare_for_writing(disk: Disk, directory: str, replay: Replay, *, quarantine: str) -> list[str]:
    """Bring the shard's files to what was replayed; return the paths of the files created in `quarantine`.

    On return no byte after the torn tail's start can be read as a frame by a later recovery, and all replayed frames
    survive a power cut. Lost bytes are copied; the files that contain them stay as they are, as long as a snapshot may
    need their other frames. Raises Damaged on a disk error; the next attempt repeats it with the same result.
    """
    try:
        return _prepare_for_writing(disk, directory, replay, quarantine)
    except OSError as error:
        raise Damaged(
            f"the WAL in {directory} cannot be prepared for writing: {error}; nothing acked was dropped, repair the "
            "disk or free space and open again"
        ) from error


def _prepare_for_writing(disk: Disk, directory: str, replay: Replay, quarantine: str) -> list[str]:
    assert replay.is_finished, "the iteration has classified all bytes"
    copies: list[str] = []
    tail = replay.torn_tail
    ranges = [(lost.file_number, lost.pos, _end_with_doubtful(replay, lost)) for lost in replay.losses if lost.file]
    if tail is not None and tail.frames:
        ranges.append((tail.file_number, tail.pos, tail.pos + tail.size))
    if ranges:
        disk.make_dir(quarantine)
    for first, pos, end in ranges:
        copies += _quarantine(disk, replay, first, pos, end, quarantine)
    last_extents = {extent.file_number: extent for extent in replay.extents}
    files = [last_extents[first] for first in sorted(last_extents)]
    empty = files[-1].file_number if files and replay.next_file_number == files[-1].file_number else None
    newest = None if empty or not files else files[-1]
    if len(files) > 1 and empty:
        newest = files[-2]
    if newest is not None:
        is_damaged = any(lost.file_number == newest.file_number and lost.end > newest.hi for lost in replay.losses)
        # Lost bytes at the end of a file stay there: after a truncation the next recovery would not report them.
        path = paths.file_path(directory, newest.file_number)
        _rewrite_and_sync(disk, path, newest.lo, None if is_damaged else newest.hi)
    if empty:
        remove_unused_file(disk, directory, empty)
    # An earlier recovery may have been killed after it truncated these and before it synced them.
    for older in files:
        if older is not newest and older.file_number != empty:
            _rewrite_and_sync(disk, paths.file_path(directory, older.file_number), None, None)
    return copies


def _end_with_doubtful(replay: Replay, lost: LostRange) -> int:
    """The end of a loss together with the frames after it that may be the rest of a lost batch."""
    for extent in replay.extents:
        if extent.file_number == lost.file_number and extent.lo == lost.end and extent.doubtful:
            with replay._open(lost.file_number) as file:
                pos = extent.lo
                for _ in range(extent.doubtful):
                    head = file.header(pos)
                    pos += 0 if head is None else head.size
                return pos
    return lost.end


def _rewrite_and_sync(disk: Disk, path: str, lo: int | None, hi: int | None) -> None:
    """Truncate a file to `hi`, if given, rewrite its bytes from `lo`, if given, and sync it.

    After a failed sync the page cache may contain bytes that are not on the disk but are marked clean, and recovery has
    just read them. Rewriting makes them dirty again. It writes the same bytes, so a crash is harmless.
    """
    file = disk.open(path, "write")
    try:
        size = file.size()
        end = size if hi is None else min(hi, size)
        for pos in range(end if lo is None else lo, end, _CHUNK_BYTES):
            file.write(pos, file.read(pos, min(_CHUNK_BYTES, end - pos)))
        file.truncate(end)
        file.sync()
    finally:
        file.close()


def _quarantine(disk: Disk, replay: Replay, first: int, pos: int, end: int, quarantine: str) -> list[str]:
    """Copy bytes of a file to the quarantine, without zeros at their end; nothing if there are only zeros."""
    with replay._open(first) as file:
        end = min(end, file.used_end(pos))
        if end <= pos:
            return []
        copy = join(quarantine, f"{replay.directory.rpartition('/')[2]}.{paths.file_name(first)}.{pos}")
        temporary = f"{copy}.tmp"
        target = disk.open(temporary, "create" if disk.stat(temporary) is None else "write")
        try:
            for chunk_pos in range(pos, end, _CHUNK_BYTES):
                target.write(chunk_pos - pos, file.read(chunk_pos, min(chunk_pos + _CHUNK_BYTES, end)))
            target.truncate(end - pos)
            target.sync()
        finally:
            target.close()
    disk.rename(temporary, copy)
    disk.sync_dir(quarantine)
    return [copy]


# ── reading files ─────────────────────────────────────────────────────────────────────────────────


class _WalFileReader:
    """A WAL file, read in pieces. Raises Unavailable if it was removed, Damaged on a disk error."""

    def __init__(self, path: str, open_file: Callable[[], File]) -> None:
        self.path = path
        self._file: File | None = None
        try:
            self._file = open_file()
            self.size = self._file.size()
        except OSError as error:
            self.close()
            raise self._read_error(error) from error

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi), fewer at the end of the file."""
        assert self._file is not None, "it is open"
        try:
            return self._file.read(lo, max(hi - lo, 0))
        except OSError as error:
            raise self._read_error(error) from error

    def header(self, pos: int) -> _RawHeader | None:
        """The unverified header at `pos`; None if the file ends before it does."""
        raw = self.read(pos, min(pos + HEADER_BYTES, self.size))
        return _parse_header(raw) if len(raw) == HEADER_BYTES else None

    def frame(self, pos: int) -> _RawHeader | None:
        """The header of the frame at `pos`; None if there is no frame with a valid checksum."""
        head = self.header(pos)
        if head is None or not head.is_consistent or pos + head.size > self.size:
            return None
        buf = self.read(pos, pos + head.size)
        return head if isinstance(frame.read_frame(buf, 0, len(buf)), Frame) else None

    def used_end(self, pos: int) -> int:
        """The end of the last byte at or after `pos` that is not zero; `pos` if there is none."""
        for stop in range(self.size, pos, -_CHUNK_BYTES):
            start = max(pos, stop - _CHUNK_BYTES)
            chunk = self.read(start, stop).rstrip(b"\0")
            if chunk:
                return start + len(chunk)
        return pos

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> _WalFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_error(self, error: OSError) -> Damaged | Unavailable:
        if isinstance(error, FileNotFoundError):
            return Unavailable(f"{self.path} was removed while the WAL was read; nothing was changed, read it again")
        return _unreadable_error(self.path, error)


def _list_files(disk: Disk, directory: str) -> tuple[Proof | None, list[int]]:
    """The newest proven file and the numbers of all files. In this order: a writer creates a file before CURRENT and
    NEWEST name it. If they disagree a writer may be starting, and both are read until nothing changes."""
    previous: tuple[Proof | None, list[int]] | None = None
    try:
        while True:
            listing = paths.proven_current(disk, directory), paths.list_file_numbers(disk, directory)
            if listing == previous or listing[0] is None or listing[0].first in listing[1]:
                return listing
            previous = listing
    except OSError as error:
        raise _unreadable_error(directory, error) from error


def _find_missing_file(proof: Proof | None, numbers: list[int], durable: Position) -> MissingFile | None:
    """The newest file, if CURRENT, NEWEST or a recorded position proves that it existed, and neither it nor a later
    file exists now."""
    newest, existing = max(numbers, default=0), f"the newest existing file is {max(numbers, default='none')}"
    if proof is not None and proof.first > max(newest, durable.file_number - 1):
        return MissingFile(proof.first, max(proof.size, durable.pos), f"{proof.source} names it, {existing}")
    if durable.pos and durable.file_number > newest:
        reason = f"a snapshot was made when it was in use, {existing}"
        return MissingFile(durable.file_number, max(durable.pos, _FILE_BYTES_MAX), reason)
    return None


def _unreadable_error(path: str, error: OSError) -> Damaged:
    return Damaged(f"{path} cannot be read: {error}; nothing was changed, repair the disk and open again")
