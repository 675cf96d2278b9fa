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

from tidelog.disk.seam import Disk, File, join
from tidelog.errors import Corrupt, Damaged, NewerFormat, Unavailable
from tidelog.formats import bodies, frame, scan
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
    CHECKPOINT_MARK,
    FORWARD,
    HEADER,
    HEADER_BYTES,
    KNOWN_FLAGS,
    LEN_MIN,
    MORE,
    NAMES,
    NUMBERED_BATCH,
    OVERHEAD_BYTES,
    WRITE_KEY,
    Frame,
)
from tidelog.formats.rows import Stop
from tidelog.types import Buffer, Ints
from tidelog.wal import names
from tidelog.wal.file import MARK_BYTES, take_back
from tidelog.wal.names import Position, Proof

WINDOW_BYTES: Final = 4 << 20
KEPT_BYTES: Final = 16 << 20  # of windows that are not read a second time
_CHUNK_BYTES: Final = 1 << 20
_NOWHERE: Final = Position(0, 0)
_ALL: Final = 1 << 62
_RECORD_BYTES: Final = 4  # the least that a record takes in a batch
_BATCH_RECORDS_MAX: Final = 1 << 16  # in one frame, generously
_FILE_BYTES: Final = 1 << 30  # in one file, generously, where nothing says how large it was
_RECORDS: Final = (APPEND, APPEND_BATCH)
_ANNOUNCING: Final = (FORWARD, NUMBERED_BATCH, WRITE_KEY)  # records of theirs may follow


class Cut(NamedTuple):
    """An unfinished write at the end of a group: no sync is known to have covered it."""

    first: int  # the file's number
    file: str
    pos: int  # what comes before it is kept
    size: int  # bytes from there up to the last that is not zero
    reason: str
    frames: int  # whole frames found among them: not replayed, and kept in quarantine


class Lost(NamedTuple):
    """Bytes that were durable and do not read any more."""

    first: int  # the file's number
    file: str  # empty: a file that is missing
    pos: int
    end: int
    reason: str
    kinds: frozenset[int] | None  # types of the frames that were there; None: they cannot be told
    records: int  # at most so many records were in them
    frames: int  # and so many frames

    def may_hold(self, *kinds: int) -> bool:
        """Whether a frame of one of these types may be among what was lost."""
        return self.kinds is None or not self.kinds.isdisjoint(kinds)


class Window(NamedTuple):
    """Frames of one file, back to back: checksums hold, callers' batches are complete."""

    first: int  # the file's number
    base: int  # where `buf` begins in the file
    buf: bytes
    at: Ints  # where frames start in `buf`
    heads: NDArray[np.void]  # their headers, as frame.HEADER
    losses: int  # how many losses of the group come before it
    doubtful: int = 0  # so many of its first frames may be the rest of a batch that lost its beginning


class Extent(NamedTuple):
    """A stretch of one file whose frames were replayed."""

    first: int
    lo: int
    hi: int
    losses: int
    doubtful: int


class Absent(NamedTuple):
    """A file that was made and is gone."""

    first: int
    size: int  # it held at most so many bytes
    reason: str


class Replay:
    """The files of one group, oldest first, read window by window. The rest is known after the loop."""

    def __init__(
        self, disk: Disk, directory: str, start: Position | None, durable: Position | None, *, compiled: bool
    ) -> None:
        self._disk, self.directory, self._compiled = disk, directory, compiled
        self._start = start or Position(1, 0)
        self._durable = max(self._start, durable or _NOWHERE)
        said, self.numbers = _listed(disk, directory)  # the numbers of all files that are there
        self.absent = _absent(said, self.numbers, self._durable)
        """The newest file, where it is proven to have been made and is gone."""
        self.extents: list[Extent] = []  # what was replayed
        self.finished = False
        self.cut: Cut | None = None
        self.losses: list[Lost] = []
        self.missing: list[range] = []  # ordinals of frames that are in no file, as the numbers tell
        self.next_first = self._least()
        """The number of the file to begin after this one; larger than any in use, or that of an empty newest file,
        which `cut` removes."""
        self._kept: list[Window] = []
        self._kept_bytes = 0

    def current_fault(self) -> str | None:
        """What is wrong with CURRENT, in words. Nothing hangs on it."""
        said, newest = names.current(self._disk, self.directory), self.numbers[-1] if self.numbers else None
        if said == newest or self.absent is not None:
            return None
        return f"CURRENT names {said or 'no file'}, the newest is {newest or 'none'}"

    def __iter__(self) -> Iterator[Window]:
        numbers = [first for first in self.numbers if first >= self._start.first]
        expected: int | None = self._start.first
        if self.absent is not None:
            numbers.append(self.absent.first)
        for first, following in zip_longest(numbers, numbers[1:]):
            if expected is not None and first > expected:
                gap = range(expected, first)
                self.missing.append(gap)
                most = len(gap) * _BATCH_RECORDS_MAX
                self.losses.append(Lost(expected, "", 0, 0, "it is in no file", None, most, len(gap)))
            if self.absent is not None and first == self.absent.first:
                self._lose(self.absent)
                break
            file = _Bytes(self._disk, names.path_of(self.directory, first))
            try:
                reading = _Reading(self, file, first, following, self._durable, compiled=self._compiled)
                lo = self._start.pos if first == self._start.first else 0
                for window in reading.windows(lo):
                    self._keep(window)
                    yield window
            finally:
                file.close()
            if lo and not reading.extents:  # replay begins where this file ends
                reading.extents.append(Extent(first, lo, lo, len(self.losses), 0))
            self.extents += reading.extents or [Extent(first, 0, 0, len(self.losses), 0)]
            frames = reading.frames
            # An empty file at its place gives its number to the next one. Elsewhere it may have held frames once, and
            # where frames cannot be counted there were at most so many.
            at_most = first + 1 + reading.seen + lo // OVERHEAD_BYTES + reading.lost_frames
            least = first + (first != expected) if frames is not None else at_most
            expected = None if frames is None else first + frames
            self.next_first = max(self._least(), least, first + reading.seen, expected or 0)
        self.finished = True

    def _lose(self, absent: Absent) -> None:
        """Count what the file that is gone can have held. The next file has a number that leaves room for as many
        frames: should a crash come before a snapshot, the numbers tell of the loss."""
        frames = absent.size // OVERHEAD_BYTES + 1
        lost = Lost(absent.first, "", 0, absent.size, absent.reason, None, absent.size // _RECORD_BYTES, frames)
        self.losses.append(lost)
        self.next_first = max(self._least(), absent.first + frames)

    def windows(self) -> Iterator[Window]:
        """What the loop gave, once more. Raises Unavailable where the files are not what they were."""
        assert self.finished, "what there is to give is known when everything was looked at"
        for extent in self.extents:
            if extent.hi <= extent.lo:
                continue
            if self._kept_bytes <= KEPT_BYTES:
                yield from (window for window in self._kept if _is_of(window, extent))
                continue
            path = names.path_of(self.directory, extent.first)
            file = _Bytes(self._disk, path)
            try:
                walk = _Walk(file, extent.first, extent.lo, extent.hi, compiled=self._compiled)
                for window in walk:
                    doubtful = extent.doubtful if window.base == extent.lo else 0
                    yield window._replace(losses=extent.losses, doubtful=doubtful)
                if walk.whole != extent.hi:
                    raise Unavailable(f"{path} changed while it was read; nothing was changed, read it again")
            finally:
                file.close()

    def _keep(self, window: Window) -> None:
        self._kept_bytes += len(window.buf)
        if self._kept_bytes <= KEPT_BYTES:
            self._kept.append(window)
        else:
            self._kept.clear()

    def forget(self) -> None:
        """Let go of the windows that were kept for a second look."""
        self._kept.clear()
        self._kept_bytes = KEPT_BYTES + 1

    def _least(self) -> int:
        """The least number for a new file. Behind every position that anybody recorded: what is written there must not
        be taken for something that a snapshot holds already."""
        return self._durable.first + (self._durable.pos > 0)


def _is_of(window: Window, extent: Extent) -> bool:
    return window.first == extent.first and extent.lo <= window.base < extent.hi


def read(
    disk: Disk,
    directory: str,
    start: Position | None = None,
    *,
    durable: Position | None = None,
    compiled: bool = True,
) -> Replay:
    """The files of a group from `start` on; iterate, then ask for `losses`, `cut`, `next_first` and the rest.

    `durable` is a position before which everything is known to be durable; `start` is one in any case.
    Changes nothing. Raises Damaged when a file cannot be read: guessing what it holds would lose it.
    """
    return Replay(disk, directory, start, durable, compiled=compiled)


# ── one file ──────────────────────────────────────────────────────────────────────────────────────


class _Reading:
    """One file: its frames, and what the bytes mean that are none."""

    def __init__(
        self, replay: Replay, file: _Bytes, first: int, following: int | None, durable: Position, *, compiled: bool
    ) -> None:
        self._replay, self._file, self._first, self._following = replay, file, first, following
        self._compiled = compiled
        self._is_newest = following is None and durable.first <= first
        self._known = durable.pos if durable.first == first else 0
        self.extents: list[Extent] = []
        self.seen = 0  # frames that were given
        self.lost_frames = 0
        self.frames: int | None = 0  # all that the file holds, from its first byte on; None: they cannot be counted

    def windows(self, lo: int) -> Iterator[Window]:
        file, pos, doubtful = self._file, lo, 0
        if lo:
            self.frames = self._count(lo)
        while True:
            walk = _Walk(file, self._first, pos, None, compiled=self._compiled)
            for window in walk:
                self.seen += len(window.at)
                yield window._replace(losses=len(self._replay.losses), doubtful=doubtful if window.base == pos else 0)
            if walk.whole > pos:
                self.extents.append(Extent(self._first, pos, walk.whole, len(self._replay.losses), doubtful))
            found = self._judge(walk)
            if found is None:
                break
            pos, doubtful = found
        if self.frames is not None:
            self.frames += self.seen

    def _count(self, lo: int) -> int | None:
        """Frames before `lo`; None where what is there is damaged, which is no matter: a snapshot has it."""
        if lo > self._file.size:
            return None
        walk = _Walk(self._file, self._first, 0, lo, compiled=self._compiled)
        frames = sum(len(window.at) for window in walk)
        return frames if walk.whole == lo else None

    def _judge(self, walk: _Walk) -> tuple[int, int] | None:
        """Where replay goes on after a walk ended, and how many frames are doubtful there; None: it does not."""
        file, whole = self._file, walk.whole
        if self._lacking == 0:
            return None  # every frame is there
        end = _said_end(self._replay, self._first, self._following)
        if end is not None and whole >= end:
            return None  # no frame was ever written to what follows
        used = max(file.used(walk.end), walk.end)
        marks = list(_marks(file, walk.end, used)) if used > walk.end else []
        durable = _ALL
        if self._is_newest:
            mine = (said.pos for _, said in marks if said.first == self._first)
            durable = max([self._known, *mine])
        if used <= whole:
            self._ended(walk, durable, end)
            return None
        # A writer may be at work: what was not there a moment ago is there now, and the marks after it as well.
        again = _Walk(file, self._first, whole, None, compiled=self._compiled)
        if any(len(window.at) for window in again):
            return whole, 0
        anchors = {pos for pos, _ in marks} | {said.pos for _, said in marks if said.first == self._first}
        resync = _Resync(file, used, anchors | ({end} if end else set()), compiled=self._compiled)
        if whole >= durable:
            frames = resync.follows(walk.end)
            if resync.said(self._first) <= whole:
                self._replay.cut = self._torn(walk, used, frames)
                return None
        pos, more = resync.after(walk.end)
        doubtful = 0
        if pos is not None and more:
            pos = resync.past_batch(pos)
        if pos is not None and more is None:
            doubtful = resync.batch_frames(pos)
        stop = min(used, end or used) if pos is None else pos
        proven = durable if self._is_newest else end or 0
        if pos is None and resync.end < proven:  # zeros where frames were: nothing says which
            resync.kinds, stop = None, proven
            resync.records += (proven - resync.end) // _RECORD_BYTES
        begun = {APPEND_BATCH} if whole < walk.end else set()  # the frames of its batch that do read
        kinds = None if resync.kinds is None else frozenset(resync.kinds | begun)
        records = resync.records + (walk.end - whole) // _RECORD_BYTES
        self._lose(whole, max(stop, whole), walk.reason or _ZEROS, kinds, records)
        return None if pos is None else (pos, doubtful)

    def _ended(self, walk: _Walk, durable: int, end: int | None) -> None:
        """Nothing but zeros follows. They are damage where frames were, by position or by number."""
        whole, lacking = walk.whole, self._lacking
        if self._is_newest:
            if whole < durable:
                reason = f"{walk.reason or _ZEROS}, inside the first {durable} bytes, which were synced"
                self._lose(whole, min(durable, max(self._file.size, whole)), reason, None, (durable - whole) // 4)
        elif end is not None and end > whole:
            self._lose(whole, end, f"{walk.reason or _ZEROS}, the file had {end} bytes", None, (end - whole) // 4)
        # A file that recovery cut ends where its frames do, and the next number may have jumped.
        elif lacking is not None and lacking > 0 and self._file.size > whole:
            reason = f"{walk.reason or _ZEROS}, {lacking} frames are missing"
            self._lose(whole, self._file.size, reason, None, lacking * _BATCH_RECORDS_MAX)

    @property
    def _lacking(self) -> int | None:
        """Frames that should be here by the number of the next file; None where it cannot be told."""
        if self._following is None or self.frames is None:
            return None
        return self._following - self._first - self.frames - self.seen

    def _lose(self, pos: int, end: int, reason: str, kinds: frozenset[int] | None, records: int) -> None:
        """Count bytes as lost. Adjacent ones are one loss."""
        frames = (end - pos) // OVERHEAD_BYTES + 1
        lost = Lost(self._first, names.file_name(self._first), pos, end, reason, kinds, records, frames)
        self._replay.losses.append(lost)
        self.frames, self.lost_frames = None, self.lost_frames + frames

    def _torn(self, walk: _Walk, used: int, frames: int) -> Cut:
        size = used - walk.whole
        return Cut(self._first, names.file_name(self._first), walk.whole, size, walk.reason or _ZEROS, frames)


_ZEROS: Final = "zeros where a frame should start"


class _Walk:
    """Whole batches from one position on, window by window. After the loop it is known where and why they end."""

    def __init__(self, file: _Bytes, first: int, pos: int, limit: int | None, *, compiled: bool) -> None:
        self._file, self._first, self._compiled = file, first, compiled
        self._limit = file.size if limit is None else min(limit, file.size)
        self.whole = self.end = pos  # one past the last whole batch; one past the last good frame
        self.stop, self.reason = Stop.END, ""

    def __iter__(self) -> Iterator[Window]:
        size = WINDOW_BYTES
        while self.whole < self._limit:
            pos = self.whole
            buf = self._file.read(pos, min(pos + size, self._limit))
            is_last = pos + len(buf) >= self._limit
            found = scan.survey(buf, compiled=self._compiled)
            want = 0 if is_last else self._wanted(buf, found)
            kept, whole = len(found.at), found.whole
            if want and kept and found.heads["kind"][-1] in _ANNOUNCING:
                kept, whole = kept - 1, int(found.at[-1])  # it counts with the records that follow it
            if want and not whole:
                size = max(2 * size, want)
                continue
            self.whole, self.end, self.stop, self.reason = pos + whole, pos + found.end, found.stop, found.reason
            if kept:
                yield Window(self._first, pos, buf, found.at[:kept], found.heads[:kept], 0)
            if not want:
                return
            size = max(WINDOW_BYTES, want - whole)
        self.stop, self.reason = Stop.END, ""

    def _wanted(self, buf: bytes, found: scan.Survey) -> int:
        """How many bytes from the window's start on it takes to go further; 0: it ended for another reason."""
        left = len(buf) - found.end
        if left < HEADER_BYTES:
            return len(buf) + WINDOW_BYTES
        head = _head(buf, found.end)
        if found.stop is Stop.TORN and head.frame_len > left - 4 and head.is_consistent:
            return found.end + 4 + head.frame_len
        return 0


class _Head(NamedTuple):
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
        return LEN_MIN + self.node_len + self.tag_len + self.data_len

    @property
    def is_consistent(self) -> bool:
        """Whether the two lengths agree: then neither was damaged."""
        return self.frame_len == self.sections_len


def _head(buf: Buffer, pos: int) -> _Head:
    return _Head(*np.frombuffer(buf, HEADER, 1, pos)[0].item())


class _Resync:
    """The next frame after bad bytes.

    The lengths in the header of the bad frame tell where it ends: `frame_len` and the sum of its sections are two
    witnesses, and the checksum does not cover the first. Where both are gone, every byte is tried. What is found then
    may lie inside a record, which can hold a copy of a WAL; such frames end at the checksum of the frame around them.
    So frames count only if they lead, one after the other, to a byte that is proven to be a frame's: one that a mark of
    the synced position names, or the end of the file.
    """

    def __init__(self, file: _Bytes, used: int, anchors: set[int], *, compiled: bool) -> None:
        self._file, self._used, self._anchors, self._compiled = file, used, anchors, compiled
        self._durable: dict[int, int] = {}
        self.kinds: set[int] | None = set()  # of the frames that were passed over; None: they cannot be told
        self.records = 0  # at most so many were in them
        self.end = 0  # one past the bytes that `after` passed over

    def said(self, first: int) -> int:
        """How much of a file CheckpointMarks among the frames that `follows` saw say was synced: marks of versions
        that did not write their own byte, which count only as frames."""
        return self._durable.get(first, 0)

    def follows(self, pos: int) -> int:
        """How many whole frames there are after bad bytes, of whatever origin."""
        found: int | None = pos
        count, is_sure = 0, True
        while found is not None and found < self._used:
            hop = self._hop(found)
            is_sure = is_sure and hop is not None
            found = self._searched(found + 1, anchored=False) if hop is None else hop[0]
            if found is None:
                break
            walk = _Walk(self._file, 0, found, None, compiled=self._compiled)
            for window in walk:
                count += len(window.at)
                plain = (window.heads["kind"] == CHECKPOINT_MARK) & (window.heads["seq"] == 0) & is_sure
                for at in window.at[plain].tolist():
                    self._note(window.buf, at)
            found = walk.end
        return count

    def _note(self, buf: bytes, at: int) -> None:
        said = _mark_at(buf, at)
        if said is not None:
            self._durable[said.first] = max(self._durable.get(said.first, 0), said.pos)

    def after(self, pos: int) -> tuple[int | None, bool | None]:
        """Where frames go on after the bad one at `pos`, which is where a frame should start; and whether more of its
        batch follows there, as far as that can be told. None: there are no more frames."""
        more: bool | None = False
        while pos < self._used:
            hop = self._hop(pos)
            if hop is None:
                found = self._searched(pos + 1, anchored=True)
                stop = self._used if found is None else found
                self.kinds, more = None, None
                self.records += (stop - pos) // _RECORD_BYTES
                self.end = stop
                return found, more
            end, kind, more = hop
            if self.kinds is not None:
                self.kinds.add(kind)
            size = end - pos - OVERHEAD_BYTES
            self.records += {APPEND: 1, APPEND_BATCH: size // _RECORD_BYTES}.get(kind, 0)
            pos = self.end = end
            if self._is_frame(pos):
                return pos, more
        return None, more

    def past_batch(self, pos: int) -> int:
        """Where the rest of a batch that lost a frame ends."""
        head = _head(self._file.read(pos, pos + HEADER_BYTES), 0)
        topic_id = head.topic_id
        while self._is_frame(pos):
            head = _head(self._file.read(pos, pos + HEADER_BYTES), 0)
            if head.kind not in _RECORDS or head.topic_id != topic_id:
                return pos
            pos += 4 + head.frame_len
            self.records += 1 if head.kind == APPEND else head.data_len // _RECORD_BYTES
            if not head.flags & MORE:
                return pos
        return pos

    def batch_frames(self, pos: int) -> int:
        """How many frames from `pos` on are one batch of records."""
        count = 0
        while self._is_frame(pos):
            head = _head(self._file.read(pos, pos + HEADER_BYTES), 0)
            if head.kind not in _RECORDS:
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
        head = _head(raw, 0)
        end = pos + 4 + head.frame_len
        if not head.is_consistent or end > self._file.size:
            return None
        buf = self._file.read(pos, end)
        found = frame.get(buf, 0, len(buf))
        return found if isinstance(found, Frame) else None

    def _hop(self, pos: int) -> tuple[int, int, bool] | None:
        """Where the bad frame at `pos` ends by its own lengths, its type, and whether more of its batch follows."""
        raw = self._file.read(pos, min(pos + HEADER_BYTES, self._file.size))
        if len(raw) < HEADER_BYTES:
            return None
        head = _head(raw, 0)
        if not head.is_consistent:
            # One of the lengths is wrong. The checksum covers all but frame_len.
            end = pos + 4 + head.sections_len
            if end <= self._file.size and self._sums(pos, end, {(head.kind, head.flags)}):
                return end, head.kind, bool(head.flags & MORE)
            end = pos + 4 + head.frame_len
            plausible = head.kind in NAMES and not head.flags & ~KNOWN_FLAGS and head.frame_len >= LEN_MIN
            if plausible and end <= self._file.size and self._is_frame(end):
                return end, head.kind, bool(head.flags & MORE)
            return None
        end = pos + 4 + head.frame_len
        if head.frame_len < LEN_MIN or end > self._file.size:
            return None
        # Its type or its flags may be what is damaged: with the right ones the checksum holds.
        leads = {(head.kind, flags) for flags in range(KNOWN_FLAGS + 1)} | {(kind, head.flags) for kind in NAMES}
        kind, flags = self._sums(pos, end, leads) or (head.kind, head.flags)
        if kind not in NAMES:
            return None
        return end, kind, kind in _RECORDS and bool(flags & MORE)

    def _sums(self, pos: int, end: int, leads: set[tuple[int, int]]) -> tuple[int, int] | None:
        """The type and flags of these with which the checksum of a frame holds."""
        covered = bytearray(self._file.read(pos + 4, end - 8))
        expected = int.from_bytes(self._file.read(end - 8, end), "little")
        for kind, flags in leads:
            covered[0], covered[1] = kind, flags
            if xxh3_64_intdigest(covered) == expected:
                return kind, flags
        return None

    def _searched(self, pos: int, *, anchored: bool) -> int | None:
        """The first frame at or after `pos`, byte by byte; `anchored`: that leads to a proven place."""
        while pos < self._used:
            found = self._candidate(pos)
            if found is None:
                return None
            if not self._is_frame(found):
                pos = found + 1
                continue
            failed = self._leads(found) if anchored else None
            if failed is None:
                return found
            pos = max(failed, found + 1)
        return None

    def _candidate(self, pos: int) -> int | None:
        """The first byte from `pos` on at which a header may start: its lengths agree and its type is known."""
        while pos < self._used:
            buf = self._file.read(pos, min(pos + _CHUNK_BYTES + HEADER_BYTES - 1, self._used))
            count = len(buf) - HEADER_BYTES + 1
            if count <= 0:
                return None
            kind = np.frombuffer(buf, np.uint8, count, frame.KIND_AT)
            likely = np.flatnonzero((kind > 0) & (kind <= max(NAMES)))
            heads = frame.headers(buf, likely)
            sections = heads["data_len"].astype(np.int64) + heads["node_len"] + heads["tag_len"] + LEN_MIN
            found = np.flatnonzero(sections == heads["frame_len"])
            if len(found):
                return pos + int(likely[found[0]])
            pos += count
        return None

    def _leads(self, pos: int) -> int | None:
        """None where the frames from `pos` on lead to a proven place; else where they end."""
        while True:
            walk = _Walk(self._file, 0, pos, None, compiled=self._compiled)
            for window in walk:
                starts = window.at + window.base
                if pos in self._anchors or np.isin(starts, list(self._anchors)).any():
                    return None
            if walk.end in self._anchors or (walk.stop is Stop.END and walk.end >= self._used):
                return None
            hop = self._hop(walk.end) if walk.end < self._used else None
            if hop is None or not self._is_frame(hop[0]):
                return walk.end
            pos = hop[0]


def _marks(file: _Bytes, pos: int, used: int) -> Iterator[tuple[int, Position]]:
    """Marks of the synced position from `pos` on: where each is, and what it says. They name their own byte."""
    leads = [bytes((CHECKPOINT_MARK, flags)) + bytes(8) for flags in (0, frame.DURABLE)]  # topic 0, then the seq
    overlap = MARK_BYTES - 1
    while pos < used:
        buf = file.read(pos, min(pos + _CHUNK_BYTES + overlap, file.size))
        for lead in leads:
            at = buf.find(lead, frame.KIND_AT)
            while 0 <= at < _CHUNK_BYTES + frame.KIND_AT:
                start = at - frame.KIND_AT
                if buf[at + 10 : at + 18] == (pos + start).to_bytes(8, "little"):
                    said = _mark_at(buf, start)
                    if said is not None:
                        yield pos + start, said
                at = buf.find(lead, at + 1)
        pos += _CHUNK_BYTES


def _mark_at(buf: bytes, at: int) -> Position | None:
    """What the mark at a place says; None where there is none."""
    found = frame.get(buf, at, len(buf))
    if not isinstance(found, Frame) or found.kind != CHECKPOINT_MARK:
        return None
    try:
        body = bodies.decode(found.kind, memoryview(buf)[found.data_at : found.data_end])
    except (Corrupt, NewerFormat):
        return None
    return Position(body.wal_first, body.wal_pos) if isinstance(body, bodies.CheckpointMark) else None


def _said_end(replay: Replay, first: int, following: int | None) -> int | None:
    """How long a file was by the mark with which the next one begins; None where there is none. The mark of a
    checkpoint is none: it has a time, and names where the checkpoint was."""
    if following is None or following not in replay.numbers:
        return None
    file = _Bytes(replay._disk, names.path_of(replay.directory, following))
    try:
        buf = file.read(0, min(MARK_BYTES, file.size))
    finally:
        file.close()
    said = _mark_at(buf, 0)
    return said.pos if said is not None and said.first == first and not _head(buf, 0).ts_ms else None


# ── making ready to write ─────────────────────────────────────────────────────────────────────────


def cut(disk: Disk, directory: str, replay: Replay, *, quarantine: str) -> list[str]:
    """Bring the group's files to what was replayed; return the paths of what was put aside in `quarantine`.

    On return no byte behind the cut can be read as a frame by any later recovery, and what was
    replayed survives a power cut. Bytes that were lost are copied; the files that hold them stay as they are, for as
    long as a snapshot may need what else is in them. Raises Damaged when the disk refuses; then it is done again by the
    next one who tries, with the same result.
    """
    try:
        return _cut(disk, directory, replay, quarantine)
    except OSError as error:
        raise Damaged(
            f"the WAL in {directory} cannot be made ready for writing: {error}; nothing acked was dropped, mend the "
            "disk or free space and open again"
        ) from error


def _cut(disk: Disk, directory: str, replay: Replay, quarantine: str) -> list[str]:
    assert replay.finished, "what to cut is known when everything was looked at"
    kept: list[str] = []
    found = replay.cut
    aside = [
        (lost.first, lost.pos, _with_doubtful(disk, directory, replay, lost)) for lost in replay.losses if lost.file
    ]
    if found is not None and found.frames:
        aside.append((found.first, found.pos, found.pos + found.size))
    if aside:
        disk.make_dir(quarantine)
    for first, pos, end in aside:
        kept += _put_aside(disk, directory, first, pos, end, quarantine)
    ends = {extent.first: extent for extent in replay.extents}  # the last one of each file
    files = [ends[first] for first in sorted(ends)]
    empty = files[-1].first if files and replay.next_first == files[-1].first else None
    newest = None if empty or not files else files[-1]
    if len(files) > 1 and empty:
        newest = files[-2]
    if newest is not None:
        hurt = any(lost.first == newest.first and lost.end > newest.hi for lost in replay.losses)
        # What is lost at the end of a file stays there: cut, it would no longer be told.
        _settle(disk, names.path_of(directory, newest.first), newest.lo, None if hurt else newest.hi)
    if empty:
        take_back(disk, directory, empty)
    # What an earlier recovery cut may wait for the disk as well, if it was killed.
    for older in files:
        if older is not newest and older.first != empty:
            _settle(disk, names.path_of(directory, older.first), None, None)
    return kept


def _with_doubtful(disk: Disk, directory: str, replay: Replay, lost: Lost) -> int:
    """Where a loss ends together with the frames after it that may be the rest of a lost batch."""
    for extent in replay.extents:
        if extent.first == lost.first and extent.lo == lost.end and extent.doubtful:
            file = _Bytes(disk, names.path_of(directory, lost.first))
            try:
                pos = extent.lo
                for _ in range(extent.doubtful):
                    pos += 4 + _head(file.read(pos, pos + HEADER_BYTES), 0).frame_len
                return pos
            finally:
                file.close()
    return lost.end


def _settle(disk: Disk, path: str, lo: int | None, hi: int | None) -> None:
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
        file.cut(end)
        file.sync()
    finally:
        file.close()


def _put_aside(disk: Disk, directory: str, first: int, pos: int, end: int, quarantine: str) -> list[str]:
    """Copy bytes of a file to the quarantine, without the zeros at their end; nothing where there are only zeros."""
    file = _Bytes(disk, names.path_of(directory, first))
    try:
        end = min(end, file.used(pos))
        if end <= pos:
            return []
        kept = join(quarantine, f"{directory.rpartition('/')[2]}.{names.file_name(first)}.{pos}")
        temporary = f"{kept}.tmp"
        target = disk.open(temporary, "create" if disk.stat(temporary) is None else "write")
        try:
            for at in range(pos, end, _CHUNK_BYTES):
                target.write(at - pos, file.read(at, min(at + _CHUNK_BYTES, end)))
            target.cut(end - pos)
            target.sync()
        finally:
            target.close()
    finally:
        file.close()
    disk.rename(temporary, kept)
    disk.sync_dir(quarantine)
    return [kept]


# ── bytes of files ────────────────────────────────────────────────────────────────────────────────


class _Bytes:
    """A WAL file, read in pieces. Raises Unavailable where it is gone, Damaged where the disk refuses."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._path = path
        self._file: File | None = None
        try:
            self._file = disk.open(path)
            self.size = self._file.size()
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi), fewer where the file ends before."""
        assert self._file is not None, "it is open"
        try:
            return self._file.read(lo, max(hi - lo, 0))
        except OSError as error:
            raise self._unreadable(error) from error

    def used(self, pos: int) -> int:
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

    def _unreadable(self, error: OSError) -> Damaged | Unavailable:
        if isinstance(error, FileNotFoundError):
            return Unavailable(f"{self._path} was removed while the WAL was read; nothing was changed, read it again")
        return _unreadable(self._path, error)


def _listed(disk: Disk, directory: str) -> tuple[Proof | None, list[int]]:
    """What CURRENT and NEWEST prove, and the numbers of the files. In this order: a writer makes a file before they
    name it. Where they disagree a writer that starts may be at work, and they are read until nothing changes."""
    before: tuple[Proof | None, list[int]] | None = None
    try:
        while True:
            found = names.proven(disk, directory), names.files(disk, directory)
            if found == before or found[0] is None or found[0].first in found[1]:
                return found
            before = found
    except OSError as error:
        raise _unreadable(directory, error) from error


def _absent(said: Proof | None, numbers: list[int], durable: Position) -> Absent | None:
    """The newest file, where CURRENT, NEWEST or a recorded position proves that it was made, and no file of its
    number or a later one is there."""
    newest, there = max(numbers, default=0), f"the newest that is there is {max(numbers, default='none')}"
    if said is not None and said.first > max(newest, durable.first - 1):
        return Absent(said.first, max(said.size, durable.pos), f"{said.source} names it, {there}")
    if durable.pos and durable.first > newest:
        return Absent(durable.first, max(durable.pos, _FILE_BYTES), f"a snapshot was made when it was in use, {there}")
    return None


def _unreadable(path: str, error: OSError) -> Damaged:
    return Damaged(f"{path} cannot be read: {error}; nothing was changed, mend the disk and open again")
