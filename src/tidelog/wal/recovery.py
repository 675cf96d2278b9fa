"""[shell] The files of one group back as frames, with an unfinished write told from damage.

    wal-0000000000000001.log                              wal-0000000000000412.log, the newest
    ┌───────┬───────┬─────┬───────┬───────┬┄┄┄┄┄┄┄┐       ┌──────┬───────┬───────┬─────┬┄┄┄┄┄┄┄┄┄┄┐
    │ frame │ frame │ bad │ frame │ frame │ zeros │       │ mark │ frame │ frame │ bad │ whatever │
    └───────┴───────┴─────┴───────┴───────┴┄┄┄┄┄┄┄┘       └──────┴───────┴───────┴─────┴┄┄┄┄┄┄┄┄┄┄┘
    └── extent ─────┘lost └── extent ─────┘               └── extent ────────────┘ cut

`read` only looks: it finds, window by window, the frames whose checksums hold and whose batches are
complete, and what the bytes between and after them mean. `windows` gives the same frames once more, for a caller
that has to know the whole before it begins. `cut` is for the writer and comes before anything is written again.
Memory is a window, or the largest batch of a caller where that is larger, whatever the size of the files.

What is known to be durable, in order of authority:
  1. A file that holds every frame up to the number of the next file, or up to the end that the first mark of the next
     file names, has lost none, whatever follows.
  2. Everything in a file that is not the newest: it was synced before the next one was made.
  3. In the newest file, what the caller says (a snapshot's position) and what a mark of the synced position says. A
     mark names its own byte as well, so that a copy of a WAL inside a record is no mark.
A file that CURRENT or NEWEST names, or the caller's position is in, was made. Where neither it nor a later one is
there, it was lost with all that it can have held (`absent`), and the file before it is not the newest.

A bad frame below that position is damage: `losses` tells how many bytes, what they can have held, and why. Replay goes
on at the next frame whose place is proven (`_Resync`): nothing inside a record is ever taken for a frame, and what
remains of a caller's batch that lost a frame is dropped with it.
A bad frame above it is an unfinished write and ends the group (`cut`): pages that were not synced reach the disk in
any order, so what follows it proves nothing. Where whole frames follow, the bytes are kept in quarantine all the same.
Zeros are the reserved end of a file; with something else after them, or below the durable position, they are bad bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
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
CACHED_WINDOWS_BYTES_MAX: Final = 16 << 20  # of windows that are not read a second time
_CHUNK_BYTES: Final = 1 << 20
_BEFORE_ALL: Final = Position(0, 0)
_NO_LIMIT: Final = 1 << 62
_RECORD_BYTES_MIN: Final = 4  # the least that a record takes in a batch
_BATCH_RECORDS_MAX: Final = 1 << 16  # in one frame, generously
_FILE_BYTES_MAX: Final = 1 << 30  # in one file, generously, where nothing says how large it was
_RECORD_KINDS: Final = (APPEND, APPEND_BATCH)
_ANNOUNCING_KINDS: Final = (FORWARD, NUMBERED_BATCH, WRITE_KEY)  # records of theirs may follow


class TornTail(NamedTuple):
    """An unfinished write at the end of a group: no sync is known to have covered it."""

    file_number: int  # the file's number
    file: str
    pos: int  # what comes before it is kept
    size: int  # bytes from there up to the last that is not zero
    reason: str
    frames: int  # whole frames found among them: not replayed, and kept in quarantine


class LostRange(NamedTuple):
    """Bytes that were durable and do not read any more."""

    file_number: int  # the file's number
    file: str  # empty: a file that is missing
    pos: int
    end: int
    reason: str
    kinds: frozenset[int] | None  # types of the frames that were there; None: they cannot be told
    records: int  # at most so many records were in them
    frames: int  # and so many frames

    def may_contain(self, *kinds: int) -> bool:
        """Whether a frame of one of these types may be among what was lost."""
        return self.kinds is None or not self.kinds.isdisjoint(kinds)


class FrameWindow(NamedTuple):
    """Frames of one file, back to back: checksums hold, callers' batches are complete."""

    file_number: int  # the file's number
    file_offset: int  # where `buf` begins in the file
    buf: bytes
    frame_pos: Ints  # where frames start in `buf`
    headers: NDArray[np.void]  # their headers, as frame.HEADER
    losses_before: int  # how many losses of the group come before it
    doubtful: int = 0  # so many of its first frames may be the rest of a batch that lost its beginning


class ReplayedExtent(NamedTuple):
    """A stretch of one file whose frames were replayed."""

    file_number: int
    lo: int
    hi: int
    losses: int
    doubtful: int


class MissingFile(NamedTuple):
    """A file that was made and is gone."""

    file_number: int
    size: int  # it held at most so many bytes
    reason: str


class Replay:
    """The files of one group, oldest first, read window by window. The rest is known after the loop."""

    def __init__(self, disk: Disk, directory: str, start: Position | None, durable: Position | None) -> None:
        self._disk, self.directory = disk, directory
        self._start = start or Position(1, 0)
        self._durable = max(self._start, durable or _BEFORE_ALL)
        said, self.file_numbers = _list_files(disk, directory)  # the numbers of all files that are there
        self.missing_file = _find_missing_file(said, self.file_numbers, self._durable)
        """The newest file, where it is proven to have been made and is gone."""
        self.extents: list[ReplayedExtent] = []  # what was replayed
        self.is_finished = False
        self.torn_tail: TornTail | None = None
        self.losses: list[LostRange] = []
        self.missing_frames: list[range] = []  # ordinals of frames that are in no file, as the numbers tell
        self.next_file_number = self._next_file_number_min()
        """The number of the file to begin after this one; larger than any in use, or that of an empty newest file,
        which `cut` removes."""
        self._cached_windows: list[FrameWindow] = []
        self._cached_bytes = 0

    def current_file_fault(self) -> str | None:
        """What is wrong with CURRENT, in words. Nothing hangs on it."""
        said, newest = (
            paths.current_file_number(self._disk, self.directory),
            self.file_numbers[-1] if self.file_numbers else None,
        )
        if said == newest or self.missing_file is not None:
            return None
        return f"CURRENT names {said or 'no file'}, the newest is {newest or 'none'}"

    def __iter__(self) -> Iterator[FrameWindow]:
        numbers = [first for first in self.file_numbers if first >= self._start.file_number]
        expected: int | None = self._start.file_number
        if self.missing_file is not None:
            numbers.append(self.missing_file.file_number)
        for first, following in zip_longest(numbers, numbers[1:]):
            if expected is not None and first > expected:
                gap = range(expected, first)
                self.missing_frames.append(gap)
                most = len(gap) * _BATCH_RECORDS_MAX
                self.losses.append(LostRange(expected, "", 0, 0, "it is in no file", None, most, len(gap)))
            if self.missing_file is not None and first == self.missing_file.file_number:
                self._record_missing_file(self.missing_file)
                break
            file = _WalFileReader(self._disk, paths.file_path(self.directory, first))
            try:
                reading = _FileReplay(self, file, first, following, self._durable)
                lo = self._start.pos if first == self._start.file_number else 0
                for window in reading.windows(lo):
                    self._cache_window(window)
                    yield window
            finally:
                file.close()
            if lo and not reading.extents:  # replay begins where this file ends
                reading.extents.append(ReplayedExtent(first, lo, lo, len(self.losses), 0))
            self.extents += reading.extents or [ReplayedExtent(first, 0, 0, len(self.losses), 0)]
            frames = reading.frames
            # An empty file at its place gives its number to the next one. Elsewhere it may have held frames once, and
            # where frames cannot be counted there were at most so many.
            at_most = first + 1 + reading.frames_seen + lo // OVERHEAD_BYTES + reading.lost_frames
            least = first + (first != expected) if frames is not None else at_most
            expected = None if frames is None else first + frames
            self.next_file_number = max(self._next_file_number_min(), least, first + reading.frames_seen, expected or 0)
        self.is_finished = True

    def _record_missing_file(self, absent: MissingFile) -> None:
        """Count what the file that is gone can have held. The next file has a number that leaves room for as many
        frames: should a crash come before a snapshot, the numbers tell of the loss."""
        frames = absent.size // OVERHEAD_BYTES + 1
        lost = LostRange(
            absent.file_number, "", 0, absent.size, absent.reason, None, absent.size // _RECORD_BYTES_MIN, frames
        )
        self.losses.append(lost)
        self.next_file_number = max(self._next_file_number_min(), absent.file_number + frames)

    def windows(self) -> Iterator[FrameWindow]:
        """What the loop gave, once more. Raises Unavailable where the files are not what they were."""
        assert self.is_finished, "what there is to give is known when everything was looked at"
        for extent in self.extents:
            if extent.hi <= extent.lo:
                continue
            if self._cached_bytes <= CACHED_WINDOWS_BYTES_MAX:
                yield from (window for window in self._cached_windows if _is_window_of(window, extent))
                continue
            path = paths.file_path(self.directory, extent.file_number)
            file = _WalFileReader(self._disk, path)
            try:
                walk = _BatchWalk(file, extent.file_number, extent.lo, extent.hi)
                for window in walk:
                    doubtful = extent.doubtful if window.file_offset == extent.lo else 0
                    yield window._replace(losses_before=extent.losses, doubtful=doubtful)
                if walk.whole_end != extent.hi:
                    raise Unavailable(f"{path} changed while it was read; nothing was changed, read it again")
            finally:
                file.close()

    def _cache_window(self, window: FrameWindow) -> None:
        self._cached_bytes += len(window.buf)
        if self._cached_bytes <= CACHED_WINDOWS_BYTES_MAX:
            self._cached_windows.append(window)
        else:
            self._cached_windows.clear()

    def drop_cached_windows(self) -> None:
        """Let go of the windows that were kept for a second look."""
        self._cached_windows.clear()
        self._cached_bytes = CACHED_WINDOWS_BYTES_MAX + 1

    def _next_file_number_min(self) -> int:
        """The least number for a new file. Behind every position that anybody recorded: what is written there must not
        be taken for something that a snapshot holds already."""
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
    """The files of a group from `start` on; iterate, then ask for `losses`, `cut`, `next_first` and the rest.

    `durable` is a position before which everything is known to be durable; `start` is one in any case.
    Changes nothing. Raises Damaged when a file cannot be read: guessing what it holds would lose it.
    """
    return Replay(disk, directory, start, durable)


# ── one file ──────────────────────────────────────────────────────────────────────────────────────


class _FileReplay:
    """One file: its frames, and what the bytes mean that are none."""

    def __init__(
        self,
        replay: Replay,
        file: _WalFileReader,
        first: int,
        following: int | None,
        durable: Position,
    ) -> None:
        self._replay, self._file, self._file_number, self._next_file_number = replay, file, first, following
        self._is_newest = following is None and durable.file_number <= first
        self._known_durable = durable.pos if durable.file_number == first else 0
        self.extents: list[ReplayedExtent] = []
        self.frames_seen = 0  # frames that were given
        self.lost_frames = 0
        self.frames: int | None = 0  # all that the file holds, from its first byte on; None: they cannot be counted

    def windows(self, lo: int) -> Iterator[FrameWindow]:
        file, pos, doubtful = self._file, lo, 0
        if lo:
            self.frames = self._count_frames_before(lo)
        while True:
            walk = _BatchWalk(file, self._file_number, pos, None)
            for window in walk:
                self.frames_seen += len(window.frame_pos)
                yield window._replace(
                    losses_before=len(self._replay.losses), doubtful=doubtful if window.file_offset == pos else 0
                )
            if walk.whole_end > pos:
                self.extents.append(
                    ReplayedExtent(self._file_number, pos, walk.whole_end, len(self._replay.losses), doubtful)
                )
            found = self._classify_stop(walk)
            if found is None:
                break
            pos, doubtful = found
        if self.frames is not None:
            self.frames += self.frames_seen

    def _count_frames_before(self, lo: int) -> int | None:
        """Frames before `lo`; None where what is there is damaged, which is no matter: a snapshot has it."""
        if lo > self._file.size:
            return None
        walk = _BatchWalk(self._file, self._file_number, 0, lo)
        frames = sum(len(window.frame_pos) for window in walk)
        return frames if walk.whole_end == lo else None

    def _classify_stop(self, walk: _BatchWalk) -> tuple[int, int] | None:
        """Where replay goes on after a walk ended, and how many frames are doubtful there; None: it does not."""
        file, whole = self._file, walk.whole_end
        if self._missing_frames == 0:
            return None  # every frame is there
        end = _file_end_by_mark(self._replay, self._file_number, self._next_file_number)
        if end is not None and whole >= end:
            return None  # no frame was ever written to what follows
        used = max(file.used_end(walk.end), walk.end)
        marks = list(_find_sync_marks(file, walk.end, used)) if used > walk.end else []
        durable = _NO_LIMIT
        if self._is_newest:
            mine = (said.pos for _, said in marks if said.file_number == self._file_number)
            durable = max([self._known_durable, *mine])
        if used <= whole:
            self._classify_end(walk, durable, end)
            return None
        # A writer may be at work: what was not there a moment ago is there now, and the marks after it as well.
        again = _BatchWalk(file, self._file_number, whole, None)
        if any(len(window.frame_pos) for window in again):
            return whole, 0
        anchors = {pos for pos, _ in marks} | {said.pos for _, said in marks if said.file_number == self._file_number}
        resync = _Resync(file, used, anchors | ({end} if end else set()))
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
        if pos is None and resync.end < proven:  # zeros where frames were: nothing says which
            resync.kinds, stop = None, proven
            resync.records += (proven - resync.end) // _RECORD_BYTES_MIN
        begun = {APPEND_BATCH} if whole < walk.end else set()  # the frames of its batch that do read
        kinds = None if resync.kinds is None else frozenset(resync.kinds | begun)
        records = resync.records + (walk.end - whole) // _RECORD_BYTES_MIN
        self._record_loss(whole, max(stop, whole), walk.reason or _ZEROS_REASON, kinds, records)
        return None if pos is None else (pos, doubtful)

    def _classify_end(self, walk: _BatchWalk, durable: int, end: int | None) -> None:
        """Nothing but zeros follows. They are damage where frames were, by position or by number."""
        whole, lacking = walk.whole_end, self._missing_frames
        if self._is_newest:
            if whole < durable:
                reason = f"{walk.reason or _ZEROS_REASON}, inside the first {durable} bytes, which were synced"
                self._record_loss(
                    whole, min(durable, max(self._file.size, whole)), reason, None, (durable - whole) // 4
                )
        elif end is not None and end > whole:
            self._record_loss(
                whole, end, f"{walk.reason or _ZEROS_REASON}, the file had {end} bytes", None, (end - whole) // 4
            )
        # A file that recovery cut ends where its frames do, and the next number may have jumped.
        elif lacking is not None and lacking > 0 and self._file.size > whole:
            reason = f"{walk.reason or _ZEROS_REASON}, {lacking} frames are missing"
            self._record_loss(whole, self._file.size, reason, None, lacking * _BATCH_RECORDS_MAX)

    @property
    def _missing_frames(self) -> int | None:
        """Frames that should be here by the number of the next file; None where it cannot be told."""
        if self._next_file_number is None or self.frames is None:
            return None
        return self._next_file_number - self._file_number - self.frames - self.frames_seen

    def _record_loss(self, pos: int, end: int, reason: str, kinds: frozenset[int] | None, records: int) -> None:
        """Count bytes as lost. Adjacent ones are one loss."""
        frames = (end - pos) // OVERHEAD_BYTES + 1
        lost = LostRange(
            self._file_number, paths.file_name(self._file_number), pos, end, reason, kinds, records, frames
        )
        self._replay.losses.append(lost)
        self.frames, self.lost_frames = None, self.lost_frames + frames

    def _torn_tail(self, walk: _BatchWalk, used: int, frames: int) -> TornTail:
        size = used - walk.whole_end
        return TornTail(
            self._file_number,
            paths.file_name(self._file_number),
            walk.whole_end,
            size,
            walk.reason or _ZEROS_REASON,
            frames,
        )


_ZEROS_REASON: Final = "zeros where a frame should start"


class _BatchWalk:
    """Whole batches from one position on, window by window. After the loop it is known where and why they end."""

    def __init__(self, file: _WalFileReader, first: int, pos: int, limit: int | None) -> None:
        self._file, self._first = file, first
        self._limit = file.size if limit is None else min(limit, file.size)
        self.whole_end = self.end = pos  # one past the last whole batch; one past the last good frame
        self.stop, self.reason = ScanStop.END, ""

    def __iter__(self) -> Iterator[FrameWindow]:
        size = WINDOW_BYTES
        while self.whole_end < self._limit:
            pos = self.whole_end
            buf = self._file.read(pos, min(pos + size, self._limit))
            is_last = pos + len(buf) >= self._limit
            found = scan.scan_headers(buf)
            want = 0 if is_last else self._bytes_needed(buf, found)
            kept, whole = len(found.frame_pos), found.whole_end
            if want and kept and found.headers["kind"][-1] in _ANNOUNCING_KINDS:
                kept, whole = kept - 1, int(found.frame_pos[-1])  # it counts with the records that follow it
            if want and not whole:
                size = max(2 * size, want)
                continue
            self.whole_end, self.end, self.stop, self.reason = pos + whole, pos + found.end, found.stop, found.reason
            if kept:
                yield FrameWindow(self._first, pos, buf, found.frame_pos[:kept], found.headers[:kept], 0)
            if not want:
                return
            size = max(WINDOW_BYTES, want - whole)
        self.stop, self.reason = ScanStop.END, ""

    def _bytes_needed(self, buf: bytes, found: scan.HeaderScan) -> int:
        """How many bytes from the window's start on it takes to go further; 0: it ended for another reason."""
        left = len(buf) - found.end
        if left < HEADER_BYTES:
            return len(buf) + WINDOW_BYTES
        head = _read_raw_header(buf, found.end)
        if found.stop is ScanStop.TORN and head.frame_len > left - 4 and head.is_consistent:
            return found.end + 4 + head.frame_len
        return 0


class _RawHeader(NamedTuple):
    """The header of a frame, of which nothing is verified."""

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
        """What frame_len should be by the other lengths."""
        return FRAME_LEN_MIN + self.node_len + self.tag_len + self.data_len

    @property
    def is_consistent(self) -> bool:
        """Whether the two lengths agree: then neither was damaged."""
        return self.frame_len == self.sections_len


def _read_raw_header(buf: Buffer, pos: int) -> _RawHeader:
    return _RawHeader(*np.frombuffer(buf, HEADER, 1, pos)[0].item())


class _Resync:
    """The next frame after bad bytes.

    The lengths in the header of the bad frame tell where it ends: `frame_len` and the sum of its sections are two
    witnesses, and the checksum does not cover the first. Where both are gone, every byte is tried. What is found then
    may lie inside a record, which can hold a copy of a WAL; such frames end at the checksum of the frame around them.
    So frames count only if they lead, one after the other, to a byte that is proven to be a frame's: one that a mark of
    the synced position names, or the end of the file.
    """

    def __init__(self, file: _WalFileReader, used: int, anchors: set[int]) -> None:
        self._file, self._used, self._anchors = file, used, anchors
        self._durable: dict[int, int] = {}
        self.kinds: set[int] | None = set()  # of the frames that were passed over; None: they cannot be told
        self.records = 0  # at most so many were in them
        self.end = 0  # one past the bytes that `after` passed over

    def synced_by_marks(self, first: int) -> int:
        """How much of a file CheckpointMarks among the frames that `follows` saw say was synced: marks of versions
        that did not write their own byte, which count only as frames."""
        return self._durable.get(first, 0)

    def count_frames_after(self, pos: int) -> int:
        """How many whole frames there are after bad bytes, of whatever origin."""
        found: int | None = pos
        count, is_sure = 0, True
        while found is not None and found < self._used:
            hop = self._end_by_lengths(found)
            is_sure = is_sure and hop is not None
            found = self._search_frame(found + 1, anchored=False) if hop is None else hop[0]
            if found is None:
                break
            walk = _BatchWalk(self._file, 0, found, None)
            for window in walk:
                count += len(window.frame_pos)
                plain = (window.headers["kind"] == CHECKPOINT_MARK) & (window.headers["seq"] == 0) & is_sure
                for at in window.frame_pos[plain].tolist():
                    self._note_mark(window.buf, at)
            found = walk.end
        return count

    def _note_mark(self, buf: bytes, at: int) -> None:
        said = _read_sync_mark(buf, at)
        if said is not None:
            self._durable[said.file_number] = max(self._durable.get(said.file_number, 0), said.pos)

    def find_next_frame(self, pos: int) -> tuple[int | None, bool | None]:
        """Where frames go on after the bad one at `pos`, which is where a frame should start; and whether more of its
        batch follows there, as far as that can be told. None: there are no more frames."""
        more: bool | None = False
        while pos < self._used:
            hop = self._end_by_lengths(pos)
            if hop is None:
                found = self._search_frame(pos + 1, anchored=True)
                stop = self._used if found is None else found
                self.kinds, more = None, None
                self.records += (stop - pos) // _RECORD_BYTES_MIN
                self.end = stop
                return found, more
            end, kind, more = hop
            if self.kinds is not None:
                self.kinds.add(kind)
            size = end - pos - OVERHEAD_BYTES
            self.records += {APPEND: 1, APPEND_BATCH: size // _RECORD_BYTES_MIN}.get(kind, 0)
            pos = self.end = end
            if self._is_frame(pos):
                return pos, more
        return None, more

    def find_batch_end(self, pos: int) -> int:
        """Where the rest of a batch that lost a frame ends."""
        head = _read_raw_header(self._file.read(pos, pos + HEADER_BYTES), 0)
        topic_id = head.topic_id
        while self._is_frame(pos):
            head = _read_raw_header(self._file.read(pos, pos + HEADER_BYTES), 0)
            if head.kind not in _RECORD_KINDS or head.topic_id != topic_id:
                return pos
            pos += 4 + head.frame_len
            self.records += 1 if head.kind == APPEND else head.data_len // _RECORD_BYTES_MIN
            if not head.flags & MORE:
                return pos
        return pos

    def count_batch_frames(self, pos: int) -> int:
        """How many frames from `pos` on are one batch of records."""
        count = 0
        while self._is_frame(pos):
            head = _read_raw_header(self._file.read(pos, pos + HEADER_BYTES), 0)
            if head.kind not in _RECORD_KINDS:
                return count
            count += 1
            if not head.flags & MORE:
                return count
            pos += 4 + head.frame_len
        return count

    def _is_frame(self, pos: int) -> bool:
        return self._frame_at(pos) is not None

    def _frame_at(self, pos: int) -> Frame | None:
        """The frame there, its checksum verified."""
        raw = self._file.read(pos, min(pos + HEADER_BYTES, self._file.size))
        if len(raw) < HEADER_BYTES:
            return None
        head = _read_raw_header(raw, 0)
        end = pos + 4 + head.frame_len
        if not head.is_consistent or end > self._file.size:
            return None
        buf = self._file.read(pos, end)
        found = frame.read_frame(buf, 0, len(buf))
        return found if isinstance(found, Frame) else None

    def _end_by_lengths(self, pos: int) -> tuple[int, int, bool] | None:
        """Where the bad frame at `pos` ends by its own lengths, its type, and whether more of its batch follows."""
        raw = self._file.read(pos, min(pos + HEADER_BYTES, self._file.size))
        if len(raw) < HEADER_BYTES:
            return None
        head = _read_raw_header(raw, 0)
        if not head.is_consistent:
            # One of the lengths is wrong. The checksum covers all but frame_len.
            end = pos + 4 + head.sections_len
            if end <= self._file.size and self._match_checksum(pos, end, {(head.kind, head.flags)}):
                return end, head.kind, bool(head.flags & MORE)
            end = pos + 4 + head.frame_len
            plausible = head.kind in FRAME_NAMES and not head.flags & ~KNOWN_FLAGS and head.frame_len >= FRAME_LEN_MIN
            if plausible and end <= self._file.size and self._is_frame(end):
                return end, head.kind, bool(head.flags & MORE)
            return None
        end = pos + 4 + head.frame_len
        if head.frame_len < FRAME_LEN_MIN or end > self._file.size:
            return None
        # Its type or its flags may be what is damaged: with the right ones the checksum holds.
        leads = {(head.kind, flags) for flags in range(KNOWN_FLAGS + 1)} | {(kind, head.flags) for kind in FRAME_NAMES}
        kind, flags = self._match_checksum(pos, end, leads) or (head.kind, head.flags)
        if kind not in FRAME_NAMES:
            return None
        return end, kind, kind in _RECORD_KINDS and bool(flags & MORE)

    def _match_checksum(self, pos: int, end: int, leads: set[tuple[int, int]]) -> tuple[int, int] | None:
        """The type and flags of these with which the checksum of a frame holds."""
        covered = bytearray(self._file.read(pos + 4, end - 8))
        expected = int.from_bytes(self._file.read(end - 8, end), "little")
        for kind, flags in leads:
            covered[0], covered[1] = kind, flags
            if xxh3_64_intdigest(covered) == expected:
                return kind, flags
        return None

    def _search_frame(self, pos: int, *, anchored: bool) -> int | None:
        """The first frame at or after `pos`, byte by byte; `anchored`: that leads to a proven place."""
        while pos < self._used:
            found = self._next_candidate(pos)
            if found is None:
                return None
            if not self._is_frame(found):
                pos = found + 1
                continue
            failed = self._first_unproven(found) if anchored else None
            if failed is None:
                return found
            pos = max(failed, found + 1)
        return None

    def _next_candidate(self, pos: int) -> int | None:
        """The first byte from `pos` on at which a header may start: its lengths agree and its type is known."""
        while pos < self._used:
            buf = self._file.read(pos, min(pos + _CHUNK_BYTES + HEADER_BYTES - 1, self._used))
            count = len(buf) - HEADER_BYTES + 1
            if count <= 0:
                return None
            kind = np.frombuffer(buf, np.uint8, count, frame.KIND_OFFSET)
            likely = np.flatnonzero((kind > 0) & (kind <= max(FRAME_NAMES)))
            heads = frame.read_headers(buf, likely)
            sections = heads["data_len"].astype(np.int64) + heads["node_len"] + heads["tag_len"] + FRAME_LEN_MIN
            found = np.flatnonzero(sections == heads["frame_len"])
            if len(found):
                return pos + int(likely[found[0]])
            pos += count
        return None

    def _first_unproven(self, pos: int) -> int | None:
        """None where the frames from `pos` on lead to a proven place; else where they end."""
        while True:
            walk = _BatchWalk(self._file, 0, pos, None)
            for window in walk:
                starts = window.frame_pos + window.file_offset
                if pos in self._anchors or np.isin(starts, list(self._anchors)).any():
                    return None
            if walk.end in self._anchors or (walk.stop is ScanStop.END and walk.end >= self._used):
                return None
            hop = self._end_by_lengths(walk.end) if walk.end < self._used else None
            if hop is None or not self._is_frame(hop[0]):
                return walk.end
            pos = hop[0]


def _find_sync_marks(file: _WalFileReader, pos: int, used: int) -> Iterator[tuple[int, Position]]:
    """Marks of the synced position from `pos` on: where each is, and what it says. They name their own byte."""
    leads = [bytes((CHECKPOINT_MARK, flags)) + bytes(8) for flags in (0, frame.DURABLE)]  # topic 0, then the seq
    overlap = SYNC_MARK_BYTES - 1
    while pos < used:
        buf = file.read(pos, min(pos + _CHUNK_BYTES + overlap, file.size))
        for lead in leads:
            at = buf.find(lead, frame.KIND_OFFSET)
            while 0 <= at < _CHUNK_BYTES + frame.KIND_OFFSET:
                start = at - frame.KIND_OFFSET
                if buf[at + 10 : at + 18] == (pos + start).to_bytes(8, "little"):
                    said = _read_sync_mark(buf, start)
                    if said is not None:
                        yield pos + start, said
                at = buf.find(lead, at + 1)
        pos += _CHUNK_BYTES


def _read_sync_mark(buf: bytes, at: int) -> Position | None:
    """What the mark at a place says; None where there is none."""
    found = frame.read_frame(buf, at, len(buf))
    if not isinstance(found, Frame) or found.kind != CHECKPOINT_MARK:
        return None
    try:
        body = control_frames.decode(found.kind, memoryview(buf)[found.data_pos : found.data_end])
    except (Corrupt, NewerFormat):
        return None
    return Position(body.wal_first, body.wal_pos) if isinstance(body, control_frames.CheckpointMark) else None


def _file_end_by_mark(replay: Replay, first: int, following: int | None) -> int | None:
    """How long a file was by the mark with which the next one begins; None where there is none. The mark of a
    checkpoint is none: it has a time, and names where the checkpoint was."""
    if following is None or following not in replay.file_numbers:
        return None
    file = _WalFileReader(replay._disk, paths.file_path(replay.directory, following))
    try:
        buf = file.read(0, min(SYNC_MARK_BYTES, file.size))
    finally:
        file.close()
    said = _read_sync_mark(buf, 0)
    return said.pos if said is not None and said.file_number == first and not _read_raw_header(buf, 0).ts_ms else None


# ── making ready to write ─────────────────────────────────────────────────────────────────────────


def prepare_for_writing(disk: Disk, directory: str, replay: Replay, *, quarantine: str) -> list[str]:
    """Bring the group's files to what was replayed; return the paths of what was put aside in `quarantine`.

    On return no byte behind the cut can be read as a frame by any later recovery, and what was
    replayed survives a power cut. Bytes that were lost are copied; the files that hold them stay as they are, for as
    long as a snapshot may need what else is in them. Raises Damaged when the disk refuses; then it is done again by the
    next one who tries, with the same result.
    """
    try:
        return _prepare_for_writing(disk, directory, replay, quarantine)
    except OSError as error:
        raise Damaged(
            f"the WAL in {directory} cannot be made ready for writing: {error}; nothing acked was dropped, mend the "
            "disk or free space and open again"
        ) from error


def _prepare_for_writing(disk: Disk, directory: str, replay: Replay, quarantine: str) -> list[str]:
    assert replay.is_finished, "what to cut is known when everything was looked at"
    kept: list[str] = []
    found = replay.torn_tail
    aside = [
        (lost.file_number, lost.pos, _end_with_doubtful(disk, directory, replay, lost))
        for lost in replay.losses
        if lost.file
    ]
    if found is not None and found.frames:
        aside.append((found.file_number, found.pos, found.pos + found.size))
    if aside:
        disk.make_dir(quarantine)
    for first, pos, end in aside:
        kept += _quarantine(disk, directory, first, pos, end, quarantine)
    ends = {extent.file_number: extent for extent in replay.extents}  # the last one of each file
    files = [ends[first] for first in sorted(ends)]
    empty = files[-1].file_number if files and replay.next_file_number == files[-1].file_number else None
    newest = None if empty or not files else files[-1]
    if len(files) > 1 and empty:
        newest = files[-2]
    if newest is not None:
        hurt = any(lost.file_number == newest.file_number and lost.end > newest.hi for lost in replay.losses)
        # What is lost at the end of a file stays there: cut, it would no longer be told.
        _rewrite_and_sync(disk, paths.file_path(directory, newest.file_number), newest.lo, None if hurt else newest.hi)
    if empty:
        remove_unused_file(disk, directory, empty)
    # What an earlier recovery cut may wait for the disk as well, if it was killed.
    for older in files:
        if older is not newest and older.file_number != empty:
            _rewrite_and_sync(disk, paths.file_path(directory, older.file_number), None, None)
    return kept


def _end_with_doubtful(disk: Disk, directory: str, replay: Replay, lost: LostRange) -> int:
    """Where a loss ends together with the frames after it that may be the rest of a lost batch."""
    for extent in replay.extents:
        if extent.file_number == lost.file_number and extent.lo == lost.end and extent.doubtful:
            file = _WalFileReader(disk, paths.file_path(directory, lost.file_number))
            try:
                pos = extent.lo
                for _ in range(extent.doubtful):
                    pos += 4 + _read_raw_header(file.read(pos, pos + HEADER_BYTES), 0).frame_len
                return pos
            finally:
                file.close()
    return lost.end


def _rewrite_and_sync(disk: Disk, path: str, lo: int | None, hi: int | None) -> None:
    """Make a file end at `hi`, or where it does, and make it durable, above all the bytes from `lo` on.

    They are written again: after a failed sync the kernel may show bytes that are not on the disk and that it
    thinks are, and from here on they are recovered. The same bytes at the same place, so a crash is no matter.
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


def _quarantine(disk: Disk, directory: str, first: int, pos: int, end: int, quarantine: str) -> list[str]:
    """Copy bytes of a file to the quarantine, without the zeros at their end; nothing where there are only zeros."""
    file = _WalFileReader(disk, paths.file_path(directory, first))
    try:
        end = min(end, file.used_end(pos))
        if end <= pos:
            return []
        kept = join(quarantine, f"{directory.rpartition('/')[2]}.{paths.file_name(first)}.{pos}")
        temporary = f"{kept}.tmp"
        target = disk.open(temporary, "create" if disk.stat(temporary) is None else "write")
        try:
            for at in range(pos, end, _CHUNK_BYTES):
                target.write(at - pos, file.read(at, min(at + _CHUNK_BYTES, end)))
            target.truncate(end - pos)
            target.sync()
        finally:
            target.close()
    finally:
        file.close()
    disk.rename(temporary, kept)
    disk.sync_dir(quarantine)
    return [kept]


# ── bytes of files ────────────────────────────────────────────────────────────────────────────────


class _WalFileReader:
    """A WAL file, read in pieces. Raises Unavailable where it is gone, Damaged where the disk refuses."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._path = path
        self._file: File | None = None
        try:
            self._file = disk.open(path)
            self.size = self._file.size()
        except OSError as error:
            self.close()
            raise self._read_error(error) from error

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi), fewer where the file ends before."""
        assert self._file is not None, "it is open"
        try:
            return self._file.read(lo, max(hi - lo, 0))
        except OSError as error:
            raise self._read_error(error) from error

    def used_end(self, pos: int) -> int:
        """One past the last byte at or after `pos` that is not zero; `pos` where there is none."""
        for stop in range(self.size, pos, -_CHUNK_BYTES):
            start = max(pos, stop - _CHUNK_BYTES)
            chunk = self.read(start, stop).rstrip(b"\0")
            if chunk:
                return start + len(chunk)
        return pos

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read_error(self, error: OSError) -> Damaged | Unavailable:
        if isinstance(error, FileNotFoundError):
            return Unavailable(f"{self._path} was removed while the WAL was read; nothing was changed, read it again")
        return _unreadable_error(self._path, error)


def _list_files(disk: Disk, directory: str) -> tuple[Proof | None, list[int]]:
    """What CURRENT and NEWEST prove, and the numbers of the files. In this order: a writer makes a file before they
    name it. Where they disagree a writer that starts may be at work, and they are read until nothing changes."""
    before: tuple[Proof | None, list[int]] | None = None
    try:
        while True:
            found = paths.proven_current(disk, directory), paths.list_file_numbers(disk, directory)
            if found == before or found[0] is None or found[0].first in found[1]:
                return found
            before = found
    except OSError as error:
        raise _unreadable_error(directory, error) from error


def _find_missing_file(said: Proof | None, numbers: list[int], durable: Position) -> MissingFile | None:
    """The newest file, where CURRENT, NEWEST or a recorded position proves that it was made, and no file of its
    number or a later one is there."""
    newest, there = max(numbers, default=0), f"the newest that is there is {max(numbers, default='none')}"
    if said is not None and said.first > max(newest, durable.file_number - 1):
        return MissingFile(said.first, max(said.size, durable.pos), f"{said.source} names it, {there}")
    if durable.pos and durable.file_number > newest:
        return MissingFile(
            durable.file_number, max(durable.pos, _FILE_BYTES_MAX), f"a snapshot was made when it was in use, {there}"
        )
    return None


def _unreadable_error(path: str, error: OSError) -> Damaged:
    return Damaged(f"{path} cannot be read: {error}; nothing was changed, mend the disk and open again")
