"""[shell] The files of one group back as frames, with a torn tail told from damage.

    wal-0000000000000001.log                       wal-0000000000000412.log, the newest
    ┌───────┬───────┬───────┬┄┄┄┄┄┄┄┄┐             ┌───────┬───────┬─────┬┄┄┄┄┄┄┄┄┄┄┐
    │ frame │ frame │ frame │ zeros  │             │ frame │ frame │ bad │ whatever │
    └───────┴───────┴───────┴┄┄┄┄┄┄┄┄┘             └───────┴───────┴─────┴┄┄┄┄┄┄┄┄┄┄┘
    lo                      hi                     lo              hi

`read` only looks: it finds, file by file, the frames whose checksums hold and whose batches are
complete, and what the bytes behind them mean. `cut` is for the writer and comes before anything is
written again. Afterwards a new file is begun, so whatever lay behind a cut can never be reached.

Rules of the verdict, in order of authority:
  1. A file that holds every frame up to the number of the next file has lost none, whatever follows.
  2. What is missing below a position that is known to be durable is damage. Known is what the
     caller says (a snapshot's position) and what a CheckpointMark behind the bad bytes says.
  3. What is bad in a file that is not the newest is damage: it was synced before the next was made.
  4. What is bad in the newest file is a torn tail. Good frames behind it prove nothing: pages that
     were not synced reach the disk in any order.
  5. Zeros are the reserved end of a file. With something else behind them they are bad bytes, and so
     they are in front of frames that the number of the next file counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog.disk.atomic import replace
from tidelog.disk.seam import Disk, join
from tidelog.errors import Corrupt, Damaged, NewerFormat, Unavailable
from tidelog.formats import bodies, frame, scan
from tidelog.formats.frame import OVERHEAD_BYTES, Frame
from tidelog.formats.rows import Stop
from tidelog.types import Buffer, Ints
from tidelog.wal import names
from tidelog.wal.names import Position

_CHUNK_BYTES = 1 << 20
_NOWHERE = Position(0, 0)


class Verdict(Enum):
    TORN = "torn"  # an unfinished write: nothing acked is lost with it
    CORRUPT = "corrupt"  # acked frames may be among what is cut


class Cut(NamedTuple):
    """Where a group ends before its bytes do."""

    first: int  # the file's number
    file: str
    pos: int  # what lies before it is kept
    size: int  # bytes behind it, up to the last that is not zero
    verdict: Verdict
    reason: str


class WalFile(NamedTuple):
    """One file with its frames in [lo, hi): checksums hold, callers' batches are complete."""

    first: int
    buf: bytes
    lo: int
    hi: int
    at: Ints  # where its frames start
    heads: NDArray[np.void]  # their headers, as frame.HEADER
    stop: Stop
    reason: str  # why there are no more, for BAD and TORN


class Extent(NamedTuple):
    """The frames of one file, as positions."""

    first: int
    lo: int
    hi: int


class Replay:
    """The files of one group, oldest first, each read when its turn comes. The rest is known after the loop."""

    def __init__(
        self, disk: Disk, directory: str, start: Position | None, durable: Position | None, *, compiled: bool
    ) -> None:
        self._disk, self.directory, self._compiled = disk, directory, compiled
        self._start = start or Position(1, 0)
        self._durable = max(self._start, durable or _NOWHERE)
        self.numbers = _listed(disk, directory)  # of all files that are there
        self.extents: list[Extent] = []  # what was replayed
        self.finished = False
        self.cut: Cut | None = None
        self.later: list[int] = []  # files behind damage, which are not replayed
        self.missing: list[range] = []  # ordinals of frames that are in no file, as the numbers tell
        self.next_first = self._least()
        """The number of the file to begin after this one; larger than any in use, or that of an empty newest file,
        which `cut` removes."""

    def current_fault(self) -> str | None:
        """What is wrong with CURRENT, in words. Nothing hangs on it."""
        said, newest = names.current(self._disk, self.directory), self.numbers[-1] if self.numbers else None
        if said == newest:
            return None
        return f"CURRENT names {said or 'no file'}, the newest is {newest or 'none'}"

    def __iter__(self) -> Iterator[WalFile]:
        numbers = [first for first in self.numbers if first >= self._start.first]
        expected: int | None = self._start.first
        for first, following in zip_longest(numbers, numbers[1:]):
            if expected is not None and first > expected:
                self.missing.append(range(expected, first))
            buf = _bytes_of(self._disk, names.path_of(self.directory, first))
            lo = self._start.pos if first == self._start.first else 0
            file, frames = _found(first, buf, lo, compiled=self._compiled)
            ending = _ending(file, frames, following, self._durable)
            verdict = classify(ending)
            self.extents.append(Extent(first, file.lo, file.hi))
            yield file
            # An empty file at its place gives its number to the next one. Elsewhere it may have held frames once, and
            # where frames cannot be counted there were at most so many.
            least = first + (first != expected) if frames is not None else first + 1 + file.lo // OVERHEAD_BYTES
            expected = None if frames is None else first + frames
            self.next_first = max(self._least(), least, first + len(file.at), expected or 0)
            if verdict is not None:
                size = ending.used - ending.pos
                self.cut = Cut(first, names.file_name(first), ending.pos, size, *verdict)
                if self.cut.verdict is Verdict.CORRUPT:
                    self.later = [number for number in numbers if number > first]
                    # Numbers under which frames were lost are not given again.
                    self.next_first = max(self.next_first, numbers[-1] + 1)
                    break
        self.finished = True

    def _least(self) -> int:
        """The least number for a new file. Behind every position that anybody recorded: what is written there must not
        be taken for something that a snapshot holds already."""
        return self._durable.first + (self._durable.pos > 0)


def read(
    disk: Disk,
    directory: str,
    start: Position | None = None,
    *,
    durable: Position | None = None,
    compiled: bool = True,
) -> Replay:
    """The files of a group from `start` on; iterate, then ask for `cut`, `next_first` and the rest.

    `durable` is a position before which everything is known to be durable; `start` is one in any case.
    Changes nothing. Raises Damaged when a file cannot be read: guessing what it holds would lose it.
    """
    return Replay(disk, directory, start, durable, compiled=compiled)


class Ending(NamedTuple):
    """What is known of the end of a file."""

    pos: int  # one past the last whole batch
    bad: bool  # the bytes there are neither a frame nor zeros
    reason: str
    used: int  # one past the last byte that is not zero
    size: int
    durable: int  # bytes that are known to have been synced
    newest: bool
    lacking: int | None  # frames that should be here by the number of the next file; None where nobody can say


def classify(end: Ending) -> tuple[Verdict, str] | None:
    """What the bytes behind the last good frame are; None where the file simply ends."""
    reason = end.reason or "zeros where a frame should start"
    if end.lacking == 0:
        return None
    if end.pos < end.durable:
        return Verdict.CORRUPT, f"{reason}, inside the first {end.durable} bytes, which were synced"
    if end.bad or end.used > end.pos:
        return (Verdict.TORN if end.newest else Verdict.CORRUPT), reason
    # A file that recovery cut ends where its frames do, and the next number may have jumped.
    if end.lacking is not None and end.lacking > 0 and end.size > end.pos:
        return Verdict.CORRUPT, f"{reason}, {end.lacking} frames are missing"
    return None


def cut(disk: Disk, directory: str, replay: Replay, *, quarantine: str) -> list[str]:
    """Bring the group's files to what was replayed; return the paths of what was put aside in `quarantine`.

    On return no byte behind the cut can be read as a frame by any later recovery, and what was
    replayed survives a power cut. Raises Damaged when the disk refuses; then it is done again by the
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
    found, extents = replay.cut, replay.extents
    if found is not None and found.verdict is Verdict.CORRUPT:
        disk.make_dir(quarantine)
        # The damaged file last of all: as long as it is not cut, the later files make it damage and not a torn tail,
        # so whoever finds this half done comes to the same verdict.
        for first, pos in [*((later, 0) for later in replay.later), (found.first, found.pos)]:
            kept += _put_aside(disk, directory, first, pos, quarantine)
            _settle(disk, names.path_of(directory, first), pos, pos)
        extents = extents[:-1]
    else:
        empty = extents[-1].first if extents and replay.next_first == extents[-1].first else None
        extents = extents[:-1] if empty else extents
        if extents:
            _settle(disk, names.path_of(directory, extents[-1].first), extents[-1].lo, extents[-1].hi)
        if empty:
            disk.remove(names.path_of(directory, empty))
            disk.sync_dir(directory)
        extents = extents[:-1]
    # What an earlier recovery cut may wait for the disk as well, if it was killed.
    for older in extents:
        _settle(disk, names.path_of(directory, older.first), None, None)
    return kept


def _settle(disk: Disk, path: str, lo: int | None, hi: int | None) -> None:
    """Make a file end at `hi`, or where it does, and make it durable, above all the bytes from `lo` on.

    They are written again: after a failed sync the kernel may show bytes that are not on the disk and that it
    thinks are, and from here on they are recovered. The same bytes at the same place, so a crash is no matter.
    """
    file = disk.open(path, "write")
    try:
        size = file.size()
        end = size if hi is None else min(hi, size)
        if lo is not None and lo < end:
            file.write(lo, file.read(lo, end - lo))
        file.cut(end)
        file.sync()
    finally:
        file.close()


def _put_aside(disk: Disk, directory: str, first: int, pos: int, quarantine: str) -> list[str]:
    path = names.path_of(directory, first)
    buf = _bytes_of(disk, path)
    content = memoryview(buf)[pos : _used(buf, pos)]
    if not content:
        return []
    kept = join(quarantine, f"{directory.rpartition('/')[2]}.{names.file_name(first)}.{pos}")
    replace(disk, kept, content)
    return [kept]


def _listed(disk: Disk, directory: str) -> list[int]:
    try:
        return names.files(disk, directory)
    except OSError as error:
        raise _unreadable(directory, error) from error


def _bytes_of(disk: Disk, path: str) -> bytes:
    try:
        file = disk.open(path)
        try:
            return file.read(0, file.size())
        finally:
            file.close()
    except FileNotFoundError as error:
        raise Unavailable(f"{path} was removed while the WAL was read; nothing was changed, read it again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> Damaged:
    return Damaged(f"{path} cannot be read: {error}; nothing was changed, mend the disk and open again")


def _found(first: int, buf: bytes, lo: int, *, compiled: bool) -> tuple[WalFile, int | None]:
    """The frames of a file from `lo` on, and how many it holds in all; None where what lies before `lo` is damaged,
    which is no matter: a snapshot has it."""
    if lo > len(buf):
        none = np.zeros(0, np.int64)
        return WalFile(first, buf, lo, lo, none, frame.headers(buf, none), Stop.END, ""), None
    found = scan.survey(buf, compiled=compiled)
    frames: int | None = len(found.at)
    before = int(np.searchsorted(found.at, lo))
    if found.whole < lo or (found.whole > lo and found.at[before] != lo):
        found, frames, before = scan.survey(buf, lo, compiled=compiled), None, 0
    at, heads = found.at[before:], found.heads[before:]
    return WalFile(first, buf, lo, found.whole, at, heads, found.stop, found.reason), frames


def _ending(file: WalFile, frames: int | None, following: int | None, durable: Position) -> Ending:
    used = _used(file.buf, file.hi)
    known = durable.pos if durable.first == file.first else 0
    if used > file.hi:
        known = max(known, _marked(file.buf, file.hi, file.first))
    return Ending(
        pos=file.hi,
        bad=file.stop is not Stop.END,
        reason=file.reason,
        used=used,
        size=len(file.buf),
        durable=known,
        newest=following is None and durable.first <= file.first,
        lacking=following - file.first - frames if following is not None and frames is not None else None,
    )


def _used(buf: Buffer, pos: int) -> int:
    """One past the last byte at or behind `pos` that is not zero; `pos` where there is none."""
    tail = np.frombuffer(buf, np.uint8)[pos:]
    for stop in range(len(tail), 0, -_CHUNK_BYTES):
        start = max(0, stop - _CHUNK_BYTES)
        chunk = tail[start:stop]
        if chunk.any():
            return pos + start + int(np.flatnonzero(chunk)[-1]) + 1
    return pos


def _marked(buf: bytes, pos: int, first: int) -> int:
    """How much of this file the CheckpointMarks behind `pos` say was synced before they were written."""
    most = 0
    for flags in (0, frame.DURABLE):
        lead = bytes((frame.CHECKPOINT_MARK, flags)) + bytes(16)  # topic and seq are 0
        at = buf.find(lead, pos + frame.KIND_AT)
        while at >= 0:
            found = frame.get(buf, at - frame.KIND_AT, len(buf))
            if isinstance(found, Frame):
                most = max(most, _mark(buf, found, first))
            at = buf.find(lead, at + 1)
    return most


def _mark(buf: bytes, found: Frame, first: int) -> int:
    try:
        body = bodies.decode(found.kind, memoryview(buf)[found.data_at : found.data_end])
    except (Corrupt, NewerFormat):
        return 0
    return body.wal_pos if isinstance(body, bodies.CheckpointMark) and body.wal_first == first else 0
