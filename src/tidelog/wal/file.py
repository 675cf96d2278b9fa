"""[shell] The active file of one group: written at its end, synced, rotated.

    wal-0000000000000001.log
    0                      synced            position             room, at most file_bytes
    ┌──────────────────────┬─────────────────┬────────────────────┐
    │ survives a power cut │ survives a kill │ zeros, reserved    │
    └──────────────────────┴─────────────────┴────────────────────┘

What is true when a call returns: after `write` the operating system has the whole commit batch,
after `sync` the disk has it. When `write` raises DiskFull, not a byte of the batch is on disk, and
the next one starts where it did. Any other failure closes the latch: nothing is written any more.

A rotation keeps one order: sync the old file, make the new one and reserve its room, sync it (a spare
has all that behind it and only gets its name), sync the directory, point CURRENT at it, and only then
write. A power cut leaves no new file, an empty one, or a stale CURRENT, and each of them is a clean
start. One descriptor serves a file from its first write to its last sync, because the kernel tells of a
failed write-back once per open file.

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

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Final

from tidelog.disk.atomic import remove_if_there, replace
from tidelog.disk.latch import FULL, Latch
from tidelog.disk.seam import Disk, File, join
from tidelog.errors import Damaged, DiskFull, Error
from tidelog.formats import bodies, frame
from tidelog.types import Buffer
from tidelog.wal.names import CURRENT, Position, file_name, path_of
from tidelog.wal.spare import STEP_BYTES, Spare

FIRST_BYTES: Final = 1 << 20
COARSE_BYTES: Final = 1 << 18
WAITING_BYTES: Final = 8 << 20
LAGGING_BYTES: Final = 4 << 20
MARK_BYTES: Final = 70  # of a mark of the synced position
_GROWTH: Final = 4  # of each file over the one before it
_STRETCH: Final = 8  # of one file, over what it is meant to be


class Writer:
    """Not thread-safe but for `sync`: the shard that owns it takes turns. One sync runs at a time, because the kernel
    tells only one of two of a failed write-back; writes go on meanwhile."""

    def __init__(
        self, disk: Disk, directory: str, *, first: int, file_bytes: int, latch: Latch, marks: bool = True
    ) -> None:
        """A new file, whose first frame is number `first` of its group. Raises Damaged where it cannot be made.
        Without `marks` the files hold nothing but what callers write."""
        self._disk, self.directory, self._file_bytes = disk, directory, file_bytes
        self.latch = latch
        self.rotations = 0
        self._syncing = Lock()
        self._spare = Spare(disk, directory)
        self._room = 0  # bytes that the file was made for
        self._marks = marks
        self._before = self._marked = Position(0, 0)  # the end of the file before; what the last mark says
        try:
            disk.make_dir(directory)
            self._spare.drop()  # an earlier process's, of whatever size
            self._file = self._create(first)
            self.reader = disk.open(path_of(directory, first))
        except OSError as error:
            latch.trip(error, f"creating {path_of(directory, first)}")
            raise Damaged(
                f"{path_of(directory, first)} cannot be created: {error}; nothing was written and what was acked is "
                "safe, mend the disk or free space and open again"
            ) from error
        self._begin(first)

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

    def write(self, pieces: Sequence[Buffer], *, size: int, frames: int) -> None:
        """Write one commit batch, `size` bytes in `frames` frames: all of it into one file, a new one if need be."""
        try:
            self.lay(pieces, size=size, frames=frames)
        except OSError as error:
            raise self.undo(error) from error

    def lay(self, pieces: Sequence[Buffer], *, size: int, frames: int) -> None:
        """`write`, but whoever gets OSError calls `undo` with it before anything else."""
        self.latch.check()
        if not size:
            return
        if self.is_full(size) and not self._stretch(size):
            self._rotate()
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
        """Write the mark that no batch came to carry, where everything is synced. Nothing waits for its own sync."""
        if self.latch.closed or not self._open or self._synced != self._pos or self.is_full(0):
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
        try:
            self._file.reserve(room)
        except OSError:
            return False  # a rotation meets the same trouble, and knows what to make of it
        self._room = room
        return True

    def _rotate(self) -> None:
        with self._syncing:
            # The old file first: from now on a frame that is missing in it is damage and no longer a torn tail.
            self._sync(whole=True)
            first = self.next_frame
            try:
                file = self._create(first)
                self.reader = self._disk.open(path_of(self.directory, first))
            except OSError as error:
                raise self.latch.trip(error, f"creating {path_of(self.directory, first)}") from error
            self._file.close()
            self._file, self._before = file, self.position
            self._begin(first)
            self.rotations += 1

    def _create(self, first: int) -> File:
        path = path_of(self.directory, first)
        spare = self._spare.take(path)
        # "create" refuses a name that is there: a number is used once, whatever went wrong before.
        file = self._disk.open(path, "write" if spare else "create")
        room = spare or self._next_room()
        try:
            if not spare:
                file.reserve(room)
                file.sync()
            self._disk.sync_dir(self.directory)
            replace(self._disk, join(self.directory, CURRENT), f"{file_name(first)}\n".encode())
        except OSError:
            file.close()
            raise
        except BaseException:  # an interrupt: the next attempt makes it anew
            file.close()
            remove_if_there(self._disk, path)
            raise
        self._room = room
        return file

    def undo(self, error: OSError) -> Error:
        """Take back what a failed write may have left; return the error to raise.

        A shorter batch written over it would leave whole frames of this one behind its end, and they
        would be replayed. Cut, not overwritten with zeros: that needs no room where room is missing.
        Synced before anybody is told, because a power cut could bring the bytes back.
        """
        if error.errno not in FULL:
            return self.latch.trip(error, f"writing {self._file.path}")
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
