"""[shell] The active file of one group: written at its end, synced, rotated.

    wal-0000000000000001.log
    0                      synced            position             room, at most file_bytes
    ┌──────────────────────┬─────────────────┬────────────────────┐
    │ survives a power cut │ survives a kill │ zeros, reserved    │
    └──────────────────────┴─────────────────┴────────────────────┘

What is true when a call returns: after `write` the operating system has the whole commit batch,
after `sync` the disk has it. When `write` raises DiskFull, not a byte of the batch is on disk, and
the next one starts where it did. Any other failure closes the latch: nothing is written any more.

Where there is no room for the next file, new records are refused (DiskFull) and the file before stays the active one.
What makes room (`Commit.vital`) goes on in a small file that is made of the `Reserve`. New records are taken again once
the reserve could be made again. A new file leaves half of what is free to the checkpoint that copies what it holds.

A rotation keeps one order: sync the old file, make the new one and reserve its room, sync it (a spare
has all that behind it and only gets its name), sync the directory, point CURRENT at it, and only then
write. A power cut leaves no new file, an empty one, or a stale CURRENT, and each of them is a clean
start. A CURRENT that names a file which is not there is no crash: the file was lost. So CURRENT goes before a file that
is taken back. It also says how many bytes the file may hold, which bounds what was lost with it. The name of an empty
file, NEWEST, says the same, should CURRENT be lost too; the directory's sync for CURRENT makes it durable. One
descriptor serves a file from its first write to its last sync, because the kernel tells of a failed write-back once per
open file.

The first file is small and each next one four times as large, up to `file_bytes`: whoever writes little
pays for little, and whoever writes much and syncs often soon writes into files that were filled with zeros ahead.
Whoever has 256 KiB or more to sync at a time gains nothing from zeros, and the next file is of full size at once.
Whoever writes faster than the disk takes it would wait, at a rotation, for all that the disk has not yet: where that
is much the file is made longer instead, up to eight times `file_bytes`, and left once the disk has caught up.

Marks of the synced position. The first batch after a sync begins with a CheckpointMark that names how far the file
was synced, and its own byte in the frame's `seq`; the first batch of a file names the end of the file before. Where no
batch comes, `mark_idle` writes the mark alone. So recovery can tell a bad frame that was synced from one that was
being written (docs/decisions/0018-marks-of-the-synced-position.md). A mark costs 70 bytes and no sync.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final

from tidelog.disk.atomic import overwrite, remove_if_there, replace
from tidelog.disk.latch import FULL, Latch
from tidelog.disk.seam import Disk, File, join
from tidelog.errors import Damaged, DiskFull, Error
from tidelog.formats import bodies, frame
from tidelog.types import Buffer
from tidelog.wal.names import (
    CURRENT,
    Position,
    current,
    current_content,
    newest_name,
    newest_names,
    path_of,
    remove_proofs,
)
from tidelog.wal.spare import STEP_BYTES, Reserve, Spare

FIRST_BYTES: Final = 1 << 20
COARSE_BYTES: Final = 1 << 18
WAITING_BYTES: Final = 8 << 20
LAGGING_BYTES: Final = 4 << 20
MARK_BYTES: Final = 70  # of a mark of the synced position
LEAST_BYTES: Final = 1 << 16  # of a file on a disk that is nearly full
LEAN_BYTES: Final = 1 << 18  # of a file that is made of the reserve
_PAGE_BYTES: Final = 1 << 12
_GROWTH: Final = 4  # of each file over the one before it
_STRETCH: Final = 8  # of one file, over what it is meant to be


class Writer:
    """Not thread-safe but for `sync`: the shard that owns it takes turns. One sync runs at a time, because the kernel
    tells only one of two of a failed write-back; writes go on meanwhile."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        first: int,
        file_bytes: int,
        latch: Latch,
        marks: bool = True,
        reserve: Reserve | None = None,
    ) -> None:
        """A new file, whose first frame is number `first` of its group. Raises Damaged where it cannot be made, and
        DiskFull where there is no room for it. Without `marks` the files hold nothing but what callers write."""
        self._disk, self.directory, self._file_bytes = disk, directory, file_bytes
        self.latch = latch
        self.rotations = 0
        self._syncing = Lock()
        self._spare = Spare(disk, directory)
        self._room = 0  # bytes that the file was made for
        self._marks = marks
        self._announced, self._named = 0, False  # bytes of the file by CURRENT; whether CURRENT names it
        self._coming = 0  # bytes of the batch that is being written
        self._before = self._marked = Position(0, 0)  # the end of the file before; what the last mark says
        self._reserve = reserve or Reserve(disk, directory)
        self.allowance: Callable[[], int | None] = lambda: None  # bytes that a new file may take; None: any
        self.is_lean = False  # the file was made of the reserve: no new records go there
        self._lean_bytes = LEAN_BYTES
        self.full = 0  # how often there was no room
        try:
            disk.make_dir(directory)
            self._spare.drop()  # an earlier process's, of whatever size
            self._file = self._first_file(first)
            self.reader = disk.open(path_of(directory, first))
        except OSError as error:
            latch.trip(error, f"creating {path_of(directory, first)}")
            if error.errno in FULL:
                with suppress(OSError):
                    remove_if_there(disk, path_of(directory, first))
                raise DiskFull(
                    f"{path_of(directory, first)} cannot be created, the device has no room; nothing was written and "
                    "what was acked is safe, free space and open again"
                ) from error
            raise Damaged(
                f"{path_of(directory, first)} cannot be created: {error}; nothing was written and what was acked is "
                "safe, mend the disk or free space and open again"
            ) from error
        self._begin(first)

    def _first_file(self, first: int) -> File:
        """The first file, small where there is no room for more, and empty where there is none at all: then it takes
        what makes room as soon as there is a little."""
        while True:
            try:
                return self._create(first)
            except OSError as error:
                if error.errno not in FULL or (self.is_lean and not self._lean_bytes):
                    raise
                remove_if_there(self._disk, path_of(self.directory, first))
                if self.is_lean and not self._shrink():
                    self._lean_bytes = self._least_lean() if self._reserve.release() else 0
                self.is_lean = True

    def _begin(self, first: int) -> None:
        self._first, self._frames = first, 0
        self._pos = self._synced = 0
        self._under_way = 0  # up to where a sync goes that was begun
        self._idle = 0  # up to here everything is synced but the mark that ends there
        self._prepared = False
        self._syncs = 0
        self._open = True

    @property
    def position(self) -> Position:
        """One past the last byte that was written."""
        return Position(self._first, self._pos)

    @property
    def synced(self) -> Position:
        """Every byte before it survives a power cut."""
        return Position(self._first, self._synced)

    @property
    def next_frame(self) -> int:
        """The number that the next frame has in its group."""
        return self._first + self._frames

    def write(self, pieces: Sequence[Buffer], *, size: int, frames: int, vital: bool = False) -> None:
        """Write one commit batch, `size` bytes in `frames` frames: all of it into one file, a new one if need be.
        `vital`: on a full disk the reserve is there for it."""
        while True:
            try:
                return self.lay(pieces, size=size, frames=frames, vital=vital)
            except OSError as error:
                refused = self.undo(error)
                if not (vital and isinstance(refused, DiskFull) and self._reserve.release()):
                    raise refused from error

    def lay(self, pieces: Sequence[Buffer], *, size: int, frames: int, vital: bool = False) -> None:
        """`write`, but whoever gets OSError calls `undo` with it before anything else."""
        self.latch.check()
        if not size:
            return
        if self.is_lean and not vital:
            self._leave_lean()
        self._coming = size + MARK_BYTES * self._marks
        if self.is_full(size) and not self._stretch(size):
            self._rotate(vital=vital)
        elif not self._pos and self._coming > self._announced:
            self._point_at(self._first, self._coming)
        said, mark = self._mark()
        self._file.write_pieces(self._pos, [mark, *pieces] if mark else pieces)
        self._pos += len(mark) + size
        self._frames += bool(mark) + frames
        self._marked = said

    def _mark(self) -> tuple[Position, bytes]:
        """What is known to be synced, and the frame that says so; no frame where the last one did."""
        synced = self._synced
        said = Position(self._first, synced) if synced else self._before
        if said <= self._marked or not self._marks:
            return self._marked, b""
        body = bodies.encode(bodies.CheckpointMark(wal_first=said.first, wal_pos=said.pos))
        return said, frame.encode(frame.CHECKPOINT_MARK, seq=self._pos, ts_ms=0, data=body)

    def mark_idle(self) -> None:
        """Write the mark that no batch came to carry, where everything is synced. Nothing waits for its own sync. And
        CURRENT, where there was no room for it."""
        if self.latch.closed or not self._open:
            return
        if not self._named:
            self._point_again()
        if self._synced != self._pos or self.is_full(0):
            return
        said, mark = self._mark()
        if not mark:
            return
        try:
            self._file.write(self._pos, mark)
        except OSError as error:
            refused = self.undo(error)
            if not isinstance(refused, DiskFull):
                raise refused from error
            return
        self._pos += len(mark)
        self._frames += 1
        self._marked, self._idle = said, self._pos

    def sync(self) -> bool:
        """Make all that was written survive a power cut; False where there was nothing to do. From any thread."""
        with self._syncing:
            return self._sync()

    def _sync(self, *, whole: bool = False) -> bool:
        """`whole`: also where only a mark would be synced."""
        self.latch.check_sync()
        pos = self._pos  # what is written from here on is the next sync's
        if self._synced == pos or not self._open or (pos == self._idle and not whole):
            return False
        self.latch.sync(self._file)
        self._synced = pos
        self._syncs += 1
        return True

    def begin_sync(self) -> int | None:
        """The descriptor that somebody is to sync, who then says so with `end_sync`; None where there is nothing to do,
        another sync is under way or only `sync` can do it."""
        descriptor = self._file.descriptor
        if descriptor is None or not self._syncing.acquire(blocking=False):
            return None
        if self.latch.closed or not self._open or self._pos in (self._synced, self._idle):
            self._syncing.release()
            return None
        self._under_way = self._pos
        return descriptor

    def end_sync(self, error: OSError | None) -> None:
        """What came of it. Raises Latched, as `sync` does."""
        try:
            if error is not None:
                raise self.latch.trip(error, f"syncing {self._file.path}") from error
            self._synced = self._under_way
            self._syncs += 1
        finally:
            self._syncing.release()

    def is_full(self, size: int) -> bool:
        """Whether so many bytes more need a new file, or a longer one."""
        return self._pos > 0 and self._pos + size + MARK_BYTES * self._marks > self._room

    @property
    def wants_next(self) -> bool:
        """Whether it is time to `prepare`: from its half on a file is followed by the zeros of the next one, which are
        all there when five sixths are full, or as many as there are by then."""
        beyond = 2 * self._pos - self._room
        return (
            beyond >= 0
            and not self._prepared
            and not self._is_coarse
            and 2 * self._spare.filled * self._room <= 3 * beyond * self._next_room()
        )

    @property
    def wants_sync(self) -> bool:
        """Whether so much waits for the disk that a rotation would wait for long; less will do where one is near."""
        near = self._pos + WAITING_BYTES > self._room
        return self._pos - self._synced >= (WAITING_BYTES // 8 if near else WAITING_BYTES)

    @property
    def _is_coarse(self) -> bool:
        """Whether a sync has so much to write that zeros ahead would cost more than they spare."""
        return self._pos >= max(1, self._syncs) * COARSE_BYTES

    def prepare(self) -> None:
        """Make the next file ready, one step. From one thread at a time, beside everything else."""
        if not self._open or not self.wants_next or self.latch.closed:
            return
        first, size = self._first, self._next_room()
        allowed = self.allowance()
        if self.is_lean or (allowed is not None and allowed < size):
            return  # what is left is kept for a checkpoint, or too little: the next file is made when it is needed
        if 6 * self._pos >= 5 * self._room:
            size = min(
                size, self._spare.filled + STEP_BYTES
            )  # there is no time for more: a small one is better than none
        if self._spare.make(size):
            # Also where it cannot be made: it is tried once a file.
            self._prepared = self._prepared or self._first == first

    def _next_room(self) -> int:
        if self._room and self._is_coarse:
            return self._file_bytes
        return min(self._room * _GROWTH or FIRST_BYTES, self._file_bytes)

    def close(self) -> None:
        """Give back what was reserved, sync and close. A latched file is only closed: a sync of it would prove
        nothing."""
        if not self._open:
            return
        with self._syncing:
            try:
                if not self.latch.closed:
                    with suppress(OSError):  # room that was reserved and not used: nothing hangs on giving it back
                        self._file.cut(self._pos)
                    self._sync(whole=True)
            finally:
                self._open = False
                self._file.close()
                self._spare.drop()

    def _stretch(self, size: int) -> bool:
        """Make room for a batch in this file, where a rotation would have to wait for much; False: rotate."""
        # Twice as long each time: the system waits for the disk as well before it gives room.
        room = min(self._room + max(self._room, self._file_bytes), _STRETCH * self._file_bytes)
        lagging = self._is_coarse and self._pos - self._synced >= LAGGING_BYTES
        if not lagging or self._pos + size > room:
            return False
        allowed = self.allowance()
        if allowed is not None and allowed < room - self._room:
            return False
        try:
            self._file.reserve(room)
        except OSError:
            return False  # a rotation meets the same trouble, and knows what to make of it
        self._room = room
        return True

    def _leave_lean(self) -> None:
        """Take new records again, where there is room for the reserve; DiskFull otherwise."""
        allowed = self.allowance()
        if not self._reserve.restore() or (allowed is not None and allowed < min(LEAST_BYTES, self._file_bytes)):
            self.full += 1
            raise self.latch.refused(OSError(errno.ENOSPC, "no room for the reserve"), "making room for new records")
        self.is_lean = False

    def _rotate(self, *, vital: bool) -> None:
        with self._syncing:
            # The old file first: from now on a frame that is missing in it is damage and no longer a torn tail.
            self._sync(whole=True)
            first = self.next_frame
            try:
                file, self.reader = self._next(first)
            except OSError as error:
                self._take_away(first, error)
                self.full += 1
                if not vital:
                    raise self.latch.refused(error, f"creating {path_of(self.directory, first)}") from error
                file, self.reader = self._lean(first)
            self._file.close()
            self._file, self._before = file, self.position
            self._begin(first)
            self.rotations += 1

    def _lean(self, first: int) -> tuple[File, File]:
        """A small file for what makes room: of what is free, or of the reserve."""
        self.is_lean, self._lean_bytes = True, self._least_lean()
        while True:
            try:
                return self._next(first)
            except OSError as error:
                self._take_away(first, error)
                if not self._shrink() and not self._reserve.release():
                    raise self.latch.refused(error, f"creating {path_of(self.directory, first)}") from error

    def _least_lean(self) -> int:
        return max(min(LEAN_BYTES, self._reserve.size // 8 or LEAN_BYTES), _PAGE_BYTES)

    def _shrink(self) -> bool:
        """Let the next lean file be smaller; False where it is as small as can be."""
        if self._lean_bytes // 4 < _PAGE_BYTES:
            return False
        self._lean_bytes //= 4
        return True

    def _next(self, first: int) -> tuple[File, File]:
        """The next file, for writing and for reading."""
        if not self.is_lean and not self._reserve.restore():
            raise OSError(errno.ENOSPC, "no room for the reserve", self.directory)
        file = self._create(first)
        try:
            return file, self._disk.open(path_of(self.directory, first))
        except BaseException:
            file.close()
            raise

    def _take_away(self, first: int, error: OSError) -> None:
        """Remove the file that a rotation has left which found no room: the next one makes it anew, under the same
        number or another. Durably, or a power cut could bring back a file that begins inside the one before. Any other
        failure latches."""
        path = path_of(self.directory, first)
        if error.errno not in FULL:
            raise self.latch.trip(error, f"creating {path}") from error
        try:
            proofs = newest_names(self._disk, self.directory).values()
            if first in (current(self._disk, self.directory), *(proof.first for proof in proofs)):
                take_back(self._disk, self.directory, first)
            elif remove_if_there(self._disk, path):
                self._disk.sync_dir(self.directory)
        except OSError as second:
            raise self.latch.trip(second, f"removing {path}, for which there was no room,") from second

    def _fitting(self, room: int) -> int:
        """How large the next file is: as large as it should be, or as there is room for. Half of what is free is left
        for the checkpoint that copies what the file will hold."""
        if self.is_lean:
            return min(room, self._lean_bytes)
        allowed = self.allowance()
        if allowed is None or allowed >= room:
            return room
        if allowed < min(room, LEAST_BYTES):
            raise OSError(errno.ENOSPC, "what is free is kept for a checkpoint", self.directory)
        return allowed

    def _create(self, first: int) -> File:
        path = path_of(self.directory, first)
        spare = self._spare.take(path)
        room = spare or self._fitting(self._next_room())
        # "create" refuses a name that is there: a number is used once, whatever went wrong before.
        file = self._disk.open(path, "write" if spare else "create")
        try:
            if not spare:
                if room:
                    file.reserve(room)
                file.sync()
            self._disk.sync_dir(self.directory)
            # A file with which the disk can fall far behind may be made longer later.
            most = room if room < LAGGING_BYTES else max(room, _STRETCH * self._file_bytes)
            self._point_at(first, max(most, self._coming))
        except OSError:
            file.close()
            raise
        except BaseException:  # an interrupt: the next attempt makes it anew
            file.close()
            take_back(self._disk, self.directory, first)
            raise
        self._room = room
        return file

    def _point_at(self, first: int, size: int) -> None:
        """Have CURRENT say that a file was made that may hold so many bytes. On a full disk in its old place; where
        there is no room for that either, once there is (`mark_idle`)."""
        path, content = join(self.directory, CURRENT), current_content(first, size)
        self._announced, self._named = size, True
        self._name_newest(first, size)
        try:
            replace(self._disk, path, content)
        except OSError as error:
            if error.errno not in FULL:
                raise
            try:
                overwrite(self._disk, path, content)
            except OSError as second:
                if second.errno not in FULL and not isinstance(second, FileNotFoundError):
                    raise
                self._named = False  # it is old or does not read: then it proves nothing, and the listing decides

    def _name_newest(self, first: int, size: int) -> None:
        """Give the empty NEWEST file the name that says what CURRENT will say; it is durable with CURRENT. On a full
        disk the old name stays: it proves less, and nothing that is wrong."""
        name = newest_name(first, size)
        there = set(newest_names(self._disk, self.directory))
        try:
            if name not in there and there:
                self._disk.rename(join(self.directory, there.pop()), join(self.directory, name))
            elif name not in there:
                self._disk.open(join(self.directory, name), "create").close()
            for stale in there - {name}:
                remove_if_there(self._disk, join(self.directory, stale))
        except OSError as error:
            if error.errno not in FULL:
                raise

    def _point_again(self) -> None:
        try:
            self._point_at(self._first, self._announced)
        except OSError as error:
            raise self.latch.trip(error, f"naming {self._file.path}") from error

    def undo(self, error: OSError) -> Error:
        """Take back what a failed write may have left; return the error to raise.

        A shorter batch written over it would leave whole frames of this one behind its end, and they
        would be replayed. Cut, not overwritten with zeros: that needs no room where room is missing.
        Synced before anybody is told, because a power cut could bring the bytes back.
        """
        if error.errno not in FULL:
            return self.latch.trip(error, f"writing {self._file.path}")
        self.full += 1
        with self._syncing:
            try:
                self._file.cut(self._pos)
                self._reserve_again()
                self._file.sync()
            except OSError as second:
                return self.latch.trip(second, f"taking back a write to {self._file.path} that found no room")
            self._synced = self._pos
        return self.latch.refused(error, f"writing {self._file.path}")

    def _reserve_again(self) -> None:
        try:
            self._file.reserve(self._room)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # The file goes on without reserved room: the next write finds its own or is refused.


def take_back(disk: Disk, directory: str, first: int) -> None:
    """Remove a file to which nothing was written, and before it CURRENT and NEWEST, which may name it."""
    remove_proofs(disk, directory)
    if remove_if_there(disk, path_of(directory, first)):
        disk.sync_dir(directory)
