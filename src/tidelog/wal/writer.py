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

[shell] The next file of a group, made ahead of time and filled with zeros, step by step.

    SPARE.tmp  │ zeros, synced │ the next step │ … up to its size ──► SPARE ──► wal-….log, at the next rotation

A sync of bytes that were written before only has to write them; in room that was merely reserved it also has
to tell the file system that they are there now, each time (docs/decisions/0010-zeros-ahead.md). Filling the
file costs its size in writes, in the background. It is done in steps while the file before is filled, because whoever
waits for a sync meanwhile waits behind the zeros of one step.

`Reserve` is room of another kind: a file that holds nothing, and is given up where the disk is full.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final

from tidelog.disk.durability import DISK_FULL_ERRNOS, WriteLatch, overwrite_in_place, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, File, free_bytes, join
from tidelog.errors import Damaged, DiskFull, Error
from tidelog.formats import control_frames, frame
from tidelog.types import Buffer
from tidelog.wal.paths import (
    CURRENT,
    PREALLOCATED,
    RESERVE,
    Position,
    current_file_number,
    encode_current,
    file_path,
    newest_name,
    newest_names,
    remove_proofs,
)

_ZEROS: Final = bytes(1 << 20)
PREALLOCATE_STEP_BYTES: Final = 4 << 20


class PreallocatedFile:
    """At most one file. Nothing hangs on it: whatever goes wrong with it, there is just none."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._path = disk, join(directory, PREALLOCATED)
        self._ready_bytes = 0  # of the one that is ready
        self._file: File | None = None  # the one that is being filled
        self.filled_bytes = 0  # bytes of it that are zeros by now

    def fill_step(self, size: int) -> bool:
        """Fill one step more of a file of this size. True: there is one, of this or another size, or the disk refuses.
        From any one thread, beside the writer."""
        if self._ready_bytes:
            return True
        try:
            file = self._file = self._file or self._open_temporary()
            stop = min(size, self.filled_bytes + PREALLOCATE_STEP_BYTES)
            for pos in range(self.filled_bytes, stop, len(_ZEROS)):
                file.write(pos, _ZEROS[: stop - pos])
            file.sync()
            self.filled_bytes = stop
            if stop < size:
                return False
            self._close()
            self._disk.rename(f"{self._path}.tmp", self._path)
            self._ready_bytes = size
        except OSError:
            self.discard()  # no room for it: the next file is made when it is needed, and tells of it if it cannot be
        return True

    def _open_temporary(self) -> File:
        temporary = f"{self._path}.tmp"
        remove_if_exists(self._disk, temporary)
        return self._disk.open(temporary, "create")

    def _close(self) -> None:
        file, self._file, self.filled_bytes = self._file, None, 0
        if file is not None:
            file.close()

    def take_as(self, path: str) -> int:
        """Let it be the file at `path` and say how large it is; 0 where there is none, or where that name is taken. The
        directory is the caller's to sync."""
        size = self._ready_bytes
        if not size or self._disk.stat(path) is not None:
            return 0
        self._ready_bytes = 0
        self._disk.rename(self._path, path)
        return size

    def discard(self) -> None:
        self._ready_bytes = 0
        self._close()
        with suppress(OSError):
            for path in (self._path, f"{self._path}.tmp"):
                remove_if_exists(self._disk, path)


DISK_RESERVE_BYTES: Final = 4 << 20
_RESERVE_FREE_SHARE: Final = 16  # the reserve takes at most this part of what is free
_RESERVE_RELEASE_STEPS: Final = 4  # in which it is given up
_RESERVE_PAGE_BYTES: Final = 1 << 12


class DiskReserve:
    """Room on the device that is kept for what makes room: deletes, drops, floors and checkpoints.

    A file of allocated, unused blocks, shared by all shards. Where the disk is full it is made shorter, a quarter at a
    time, and a vital commit or a checkpoint that was refused is tried again: what it does not need, no other program
    can take. Until it is whole again no record is written that needs new room. Safe to use from any thread. On a disk
    that does not say how much is free there is none.
    """

    def __init__(self, disk: Disk, wal: str) -> None:
        self._disk, self._wal, self._path = disk, wal, join(wal, RESERVE)
        self._lock = Lock()
        self.size = 0
        self._held_bytes = 0  # bytes that the file has
        self.is_short = False  # some of it was given up, or it could not be made

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        return 0 < self.size <= self._held_bytes

    def adopt(self) -> None:
        """Take over what an earlier process has left."""
        with self._lock:
            self._adopt()

    def _adopt(self) -> None:
        found = None if self._held_bytes else self._disk.stat(self._path)
        if found is not None:
            self._held_bytes, self.size = found.size, max(self.size, found.size)

    def restore(self) -> bool:
        """Make the file where it is missing; False where there is no room for it."""
        with self._lock:
            if self.is_complete and self.size >= DISK_RESERVE_BYTES:
                return True
            free = free_bytes(self._disk, self._wal)
            if free is None:
                return True
            self._adopt()
            whole = self.is_complete
            self.size = max(self.size, min(DISK_RESERVE_BYTES, (free + self._held_bytes) // _RESERVE_FREE_SHARE))
            if self.is_complete:
                self.is_short = False
                return True
            self.is_short = not whole
            if not self.size or free < self.size - self._held_bytes:
                return self._keep_previous_size(whole=whole)
            try:
                there = self._disk.stat(self._path) is not None
                file = self._disk.open(self._path, "write" if there else "create")
                try:
                    file.allocate(self.size)
                finally:
                    file.close()
            except OSError:
                self._truncate(self._held_bytes)
                return self._keep_previous_size(whole=whole)
            self._held_bytes, self.is_short = self.size, False
            return True

    def _keep_previous_size(self, *, whole: bool) -> bool:
        """It could not be made larger: as large as it was it will do, where all of that was there."""
        if whole:
            self.size = self._held_bytes
        return whole

    def release_part(self) -> bool:
        """Give up a part of it; False where nothing is left."""
        with self._lock:
            if not self._held_bytes:
                return False
            before, self.is_short = self._held_bytes, True
            self._held_bytes = (
                max(self._held_bytes - max(self.size // _RESERVE_RELEASE_STEPS, _RESERVE_PAGE_BYTES), 0)
                // _RESERVE_PAGE_BYTES
                * _RESERVE_PAGE_BYTES
            )
            return self._truncate(self._held_bytes) and self._held_bytes < before

    def _truncate(self, size: int) -> bool:
        """Make the file so short; False where the disk refuses."""
        try:
            if not size:
                remove_if_exists(self._disk, self._path)
                return True
            file = self._disk.open(self._path, "write")
            try:
                file.truncate(size)
            finally:
                file.close()
        except OSError:
            return False
        return True


FIRST_FILE_BYTES: Final = 1 << 20
LARGE_SYNC_BYTES: Final = 1 << 18
UNSYNCED_BYTES_MAX: Final = 8 << 20
EXTEND_UNSYNCED_BYTES_MIN: Final = 4 << 20
SYNC_MARK_BYTES: Final = 70  # of a mark of the synced position
FILE_BYTES_MIN: Final = 1 << 16  # of a file on a disk that is nearly full
RESERVE_FILE_BYTES: Final = 1 << 18  # of a file that is made of the reserve
_PAGE_BYTES: Final = 1 << 12
_FILE_GROWTH_FACTOR: Final = 4  # of each file over the one before it
_FILE_EXTEND_FACTOR_MAX: Final = 8  # of one file, over what it is meant to be


class Writer:
    """Not thread-safe but for `sync`: the shard that owns it takes turns. One sync runs at a time, because the kernel
    tells only one of two of a failed write-back; writes go on meanwhile."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        file_number: int,
        file_bytes: int,
        latch: WriteLatch,
        write_marks: bool = True,
        reserve: DiskReserve | None = None,
    ) -> None:
        """A new file, whose first frame is number `first` of its group. Raises Damaged where it cannot be made, and
        DiskFull where there is no room for it. Without `marks` the files hold nothing but what callers write."""
        self._disk, self.directory, self._file_bytes = disk, directory, file_bytes
        self.latch = latch
        self.rotations = 0
        self._sync_lock = Lock()
        self._next_file = PreallocatedFile(disk, directory)
        self._capacity_bytes = 0  # bytes that the file was made for
        self._write_marks = write_marks
        self._announced_bytes, self._current_is_written = (
            0,
            False,
        )  # bytes of the file by CURRENT; whether CURRENT names it
        self._batch_bytes = 0  # bytes of the batch that is being written
        self._previous_end = self._last_marked = Position(0, 0)  # the end of the file before; what the last mark says
        self._reserve = reserve or DiskReserve(disk, directory)
        self.allowance: Callable[[], int | None] = lambda: None  # bytes that a new file may take; None: any
        self.is_reserve_file = False  # the file was made of the reserve: no new records go there
        self._reserve_file_bytes = RESERVE_FILE_BYTES
        self.disk_full_count = 0  # how often there was no room
        try:
            disk.make_dir(directory)
            self._next_file.discard()  # an earlier process's, of whatever size
            self._file = self._first_file(file_number)
            self.reader = disk.open(file_path(directory, file_number))
        except OSError as error:
            latch.trip(error, f"creating {file_path(directory, file_number)}")
            if error.errno in DISK_FULL_ERRNOS:
                with suppress(OSError):
                    remove_if_exists(disk, file_path(directory, file_number))
                raise DiskFull(
                    f"{file_path(directory, file_number)} cannot be created, the device has no room; nothing was "
                    f"written and "
                    "what was acked is safe, free space and open again"
                ) from error
            raise Damaged(
                f"{file_path(directory, file_number)} cannot be created: {error}; nothing was written and what was "
                f"acked is "
                "safe, mend the disk or free space and open again"
            ) from error
        self._reset_file_state(file_number)

    def _first_file(self, first: int) -> File:
        """The first file, small where there is no room for more, and empty where there is none at all: then it takes
        what makes room as soon as there is a little."""
        while True:
            try:
                return self._create(first)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS or (self.is_reserve_file and not self._reserve_file_bytes):
                    raise
                remove_if_exists(self._disk, file_path(self.directory, first))
                if self.is_reserve_file and not self._shrink_reserve_file():
                    self._reserve_file_bytes = self._reserve_file_bytes_min() if self._reserve.release_part() else 0
                self.is_reserve_file = True

    def _reset_file_state(self, first: int) -> None:
        self._file_number, self._frames = first, 0
        self._pos = self._synced = 0
        self._syncing_to = 0  # up to where a sync goes that was begun
        self._idle_end = 0  # up to here everything is synced but the mark that ends there
        self._prepared = False
        self._syncs = 0
        self._open = True

    @property
    def position(self) -> Position:
        """One past the last byte that was written."""
        return Position(self._file_number, self._pos)

    @property
    def synced(self) -> Position:
        """Every byte before it survives a power cut."""
        return Position(self._file_number, self._synced)

    @property
    def next_frame(self) -> int:
        """The number that the next frame has in its group."""
        return self._file_number + self._frames

    def write(self, pieces: Sequence[Buffer], *, size: int, frames: int, vital: bool = False) -> None:
        """Write one commit batch, `size` bytes in `frames` frames: all of it into one file, a new one if need be.
        `vital`: on a full disk the reserve is there for it."""
        while True:
            try:
                return self.write_raw(pieces, size=size, frames=frames, vital=vital)
            except OSError as error:
                refused = self.rollback(error)
                if not (vital and isinstance(refused, DiskFull) and self._reserve.release_part()):
                    raise refused from error

    def write_raw(self, pieces: Sequence[Buffer], *, size: int, frames: int, vital: bool = False) -> None:
        """`write`, but whoever gets OSError calls `undo` with it before anything else."""
        self.latch.check()
        if not size:
            return
        if self.is_reserve_file and not vital:
            self._leave_reserve_file()
        self._batch_bytes = size + SYNC_MARK_BYTES * self._write_marks
        if self.is_full(size) and not self._extend(size):
            self._rotate(vital=vital)
        elif not self._pos and self._batch_bytes > self._announced_bytes:
            self._write_current(self._file_number, self._batch_bytes)
        said, mark = self._next_mark()
        self._file.writev(self._pos, [mark, *pieces] if mark else pieces)
        self._pos += len(mark) + size
        self._frames += bool(mark) + frames
        self._last_marked = said

    def _next_mark(self) -> tuple[Position, bytes]:
        """What is known to be synced, and the frame that says so; no frame where the last one did."""
        synced = self._synced
        said = Position(self._file_number, synced) if synced else self._previous_end
        if said <= self._last_marked or not self._write_marks:
            return self._last_marked, b""
        body = control_frames.encode(control_frames.CheckpointMark(wal_first=said.file_number, wal_pos=said.pos))
        return said, frame.encode(frame.CHECKPOINT_MARK, seq=self._pos, ts_ms=0, data=body)

    def write_idle_mark(self) -> None:
        """Write the mark that no batch came to carry, where everything is synced. Nothing waits for its own sync. And
        CURRENT, where there was no room for it."""
        if self.latch.is_tripped or not self._open:
            return
        if not self._current_is_written:
            self._rewrite_current()
        if self._synced != self._pos or self.is_full(0):
            return
        said, mark = self._next_mark()
        if not mark:
            return
        try:
            self._file.write(self._pos, mark)
        except OSError as error:
            refused = self.rollback(error)
            if not isinstance(refused, DiskFull):
                raise refused from error
            return
        self._pos += len(mark)
        self._frames += 1
        self._last_marked, self._idle_end = said, self._pos

    def sync(self) -> bool:
        """Make all that was written survive a power cut; False where there was nothing to do. From any thread."""
        with self._sync_lock:
            return self._sync()

    def _sync(self, *, whole: bool = False) -> bool:
        """`whole`: also where only a mark would be synced."""
        self.latch.check_before_sync()
        pos = self._pos  # what is written from here on is the next sync's
        if self._synced == pos or not self._open or (pos == self._idle_end and not whole):
            return False
        self.latch.sync_or_trip(self._file)
        self._synced = pos
        self._syncs += 1
        return True

    def begin_sync(self) -> int | None:
        """The descriptor that somebody is to sync, who then says so with `end_sync`; None where there is nothing to do,
        another sync is under way or only `sync` can do it."""
        descriptor = self._file.descriptor
        if descriptor is None or not self._sync_lock.acquire(blocking=False):
            return None
        if self.latch.is_tripped or not self._open or self._pos in (self._synced, self._idle_end):
            self._sync_lock.release()
            return None
        self._syncing_to = self._pos
        return descriptor

    def end_sync(self, error: OSError | None) -> None:
        """What came of it. Raises Latched, as `sync` does."""
        try:
            if error is not None:
                raise self.latch.trip(error, f"syncing {self._file.path}") from error
            self._synced = self._syncing_to
            self._syncs += 1
        finally:
            self._sync_lock.release()

    def is_full(self, size: int) -> bool:
        """Whether so many bytes more need a new file, or a longer one."""
        return self._pos > 0 and self._pos + size + SYNC_MARK_BYTES * self._write_marks > self._capacity_bytes

    @property
    def should_prepare_next(self) -> bool:
        """Whether it is time to `prepare`: from its half on a file is followed by the zeros of the next one, which are
        all there when five sixths are full, or as many as there are by then."""
        beyond = 2 * self._pos - self._capacity_bytes
        return (
            beyond >= 0
            and not self._prepared
            and not self._has_large_syncs
            and 2 * self._next_file.filled_bytes * self._capacity_bytes <= 3 * beyond * self._next_capacity_bytes()
        )

    @property
    def should_sync(self) -> bool:
        """Whether so much waits for the disk that a rotation would wait for long; less will do where one is near."""
        near = self._pos + UNSYNCED_BYTES_MAX > self._capacity_bytes
        return self._pos - self._synced >= (UNSYNCED_BYTES_MAX // 8 if near else UNSYNCED_BYTES_MAX)

    @property
    def _has_large_syncs(self) -> bool:
        """Whether a sync has so much to write that zeros ahead would cost more than they spare."""
        return self._pos >= max(1, self._syncs) * LARGE_SYNC_BYTES

    def prepare_next_file(self) -> None:
        """Make the next file ready, one step. From one thread at a time, beside everything else."""
        if not self._open or not self.should_prepare_next or self.latch.is_tripped:
            return
        first, size = self._file_number, self._next_capacity_bytes()
        allowed = self.allowance()
        if self.is_reserve_file or (allowed is not None and allowed < size):
            return  # what is left is kept for a checkpoint, or too little: the next file is made when it is needed
        if 6 * self._pos >= 5 * self._capacity_bytes:
            size = min(
                size, self._next_file.filled_bytes + PREALLOCATE_STEP_BYTES
            )  # there is no time for more: a small one is better than none
        if self._next_file.fill_step(size):
            # Also where it cannot be made: it is tried once a file.
            self._prepared = self._prepared or self._file_number == first

    def _next_capacity_bytes(self) -> int:
        if self._capacity_bytes and self._has_large_syncs:
            return self._file_bytes
        return min(self._capacity_bytes * _FILE_GROWTH_FACTOR or FIRST_FILE_BYTES, self._file_bytes)

    def close(self) -> None:
        """Give back what was reserved, sync and close. A latched file is only closed: a sync of it would prove
        nothing."""
        if not self._open:
            return
        with self._sync_lock:
            try:
                if not self.latch.is_tripped:
                    with suppress(OSError):  # room that was reserved and not used: nothing hangs on giving it back
                        self._file.truncate(self._pos)
                    self._sync(whole=True)
            finally:
                self._open = False
                self._file.close()
                self._next_file.discard()

    def _extend(self, size: int) -> bool:
        """Make room for a batch in this file, where a rotation would have to wait for much; False: rotate."""
        # Twice as long each time: the system waits for the disk as well before it gives room.
        room = min(
            self._capacity_bytes + max(self._capacity_bytes, self._file_bytes),
            _FILE_EXTEND_FACTOR_MAX * self._file_bytes,
        )
        lagging = self._has_large_syncs and self._pos - self._synced >= EXTEND_UNSYNCED_BYTES_MIN
        if not lagging or self._pos + size > room:
            return False
        allowed = self.allowance()
        if allowed is not None and allowed < room - self._capacity_bytes:
            return False
        try:
            self._file.allocate(room)
        except OSError:
            return False  # a rotation meets the same trouble, and knows what to make of it
        self._capacity_bytes = room
        return True

    def _leave_reserve_file(self) -> None:
        """Take new records again, where there is room for the reserve; DiskFull otherwise."""
        allowed = self.allowance()
        if not self._reserve.restore() or (allowed is not None and allowed < min(FILE_BYTES_MIN, self._file_bytes)):
            self.disk_full_count += 1
            raise self.latch.retryable_error(
                OSError(errno.ENOSPC, "no room for the reserve"), "making room for new records"
            )
        self.is_reserve_file = False

    def _rotate(self, *, vital: bool) -> None:
        with self._sync_lock:
            # The old file first: from now on a frame that is missing in it is damage and no longer a torn tail.
            self._sync(whole=True)
            first = self.next_frame
            try:
                file, self.reader = self._open_next(first)
            except OSError as error:
                self._remove_unfinished(first, error)
                self.disk_full_count += 1
                if not vital:
                    raise self.latch.retryable_error(error, f"creating {file_path(self.directory, first)}") from error
                file, self.reader = self._open_reserve_file(first)
            self._file.close()
            self._file, self._previous_end = file, self.position
            self._reset_file_state(first)
            self.rotations += 1

    def _open_reserve_file(self, first: int) -> tuple[File, File]:
        """A small file for what makes room: of what is free, or of the reserve."""
        self.is_reserve_file, self._reserve_file_bytes = True, self._reserve_file_bytes_min()
        while True:
            try:
                return self._open_next(first)
            except OSError as error:
                self._remove_unfinished(first, error)
                if not self._shrink_reserve_file() and not self._reserve.release_part():
                    raise self.latch.retryable_error(error, f"creating {file_path(self.directory, first)}") from error

    def _reserve_file_bytes_min(self) -> int:
        return max(min(RESERVE_FILE_BYTES, self._reserve.size // 8 or RESERVE_FILE_BYTES), _PAGE_BYTES)

    def _shrink_reserve_file(self) -> bool:
        """Let the next lean file be smaller; False where it is as small as can be."""
        if self._reserve_file_bytes // 4 < _PAGE_BYTES:
            return False
        self._reserve_file_bytes //= 4
        return True

    def _open_next(self, first: int) -> tuple[File, File]:
        """The next file, for writing and for reading."""
        if not self.is_reserve_file and not self._reserve.restore():
            raise OSError(errno.ENOSPC, "no room for the reserve", self.directory)
        file = self._create(first)
        try:
            return file, self._disk.open(file_path(self.directory, first))
        except BaseException:
            file.close()
            raise

    def _remove_unfinished(self, first: int, error: OSError) -> None:
        """Remove the file that a rotation has left which found no room: the next one makes it anew, under the same
        number or another. Durably, or a power cut could bring back a file that begins inside the one before. Any other
        failure latches."""
        path = file_path(self.directory, first)
        if error.errno not in DISK_FULL_ERRNOS:
            raise self.latch.trip(error, f"creating {path}") from error
        try:
            proofs = newest_names(self._disk, self.directory).values()
            if first in (current_file_number(self._disk, self.directory), *(proof.first for proof in proofs)):
                remove_unused_file(self._disk, self.directory, first)
            elif remove_if_exists(self._disk, path):
                self._disk.sync_dir(self.directory)
        except OSError as second:
            raise self.latch.trip(second, f"removing {path}, for which there was no room,") from second

    def _affordable_file_bytes(self, room: int) -> int:
        """How large the next file is: as large as it should be, or as there is room for. Half of what is free is left
        for the checkpoint that copies what the file will hold."""
        if self.is_reserve_file:
            return min(room, self._reserve_file_bytes)
        allowed = self.allowance()
        if allowed is None or allowed >= room:
            return room
        if allowed < min(room, FILE_BYTES_MIN):
            raise OSError(errno.ENOSPC, "what is free is kept for a checkpoint", self.directory)
        return allowed

    def _create(self, first: int) -> File:
        path = file_path(self.directory, first)
        spare = self._next_file.take_as(path)
        room = spare or self._affordable_file_bytes(self._next_capacity_bytes())
        # "create" refuses a name that is there: a number is used once, whatever went wrong before.
        file = self._disk.open(path, "write" if spare else "create")
        try:
            if not spare:
                if room:
                    file.allocate(room)
                file.sync()
            self._disk.sync_dir(self.directory)
            # A file with which the disk can fall far behind may be made longer later.
            most = room if room < EXTEND_UNSYNCED_BYTES_MIN else max(room, _FILE_EXTEND_FACTOR_MAX * self._file_bytes)
            self._write_current(first, max(most, self._batch_bytes))
        except OSError:
            file.close()
            raise
        except BaseException:  # an interrupt: the next attempt makes it anew
            file.close()
            remove_unused_file(self._disk, self.directory, first)
            raise
        self._capacity_bytes = room
        return file

    def _write_current(self, first: int, size: int) -> None:
        """Have CURRENT say that a file was made that may hold so many bytes. On a full disk in its old place; where
        there is no room for that either, once there is (`mark_idle`)."""
        path, content = join(self.directory, CURRENT), encode_current(first, size)
        self._announced_bytes, self._current_is_written = size, True
        self._name_newest(first, size)
        try:
            replace_file(self._disk, path, content)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            try:
                overwrite_in_place(self._disk, path, content)
            except OSError as second:
                if second.errno not in DISK_FULL_ERRNOS and not isinstance(second, FileNotFoundError):
                    raise
                self._current_is_written = (
                    False  # it is old or does not read: then it proves nothing, and the listing decides
                )

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
                remove_if_exists(self._disk, join(self.directory, stale))
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise

    def _rewrite_current(self) -> None:
        try:
            self._write_current(self._file_number, self._announced_bytes)
        except OSError as error:
            raise self.latch.trip(error, f"naming {self._file.path}") from error

    def rollback(self, error: OSError) -> Error:
        """Take back what a failed write may have left; return the error to raise.

        A shorter batch written over it would leave whole frames of this one behind its end, and they
        would be replayed. Cut, not overwritten with zeros: that needs no room where room is missing.
        Synced before anybody is told, because a power cut could bring the bytes back.
        """
        if error.errno not in DISK_FULL_ERRNOS:
            return self.latch.trip(error, f"writing {self._file.path}")
        self.disk_full_count += 1
        with self._sync_lock:
            try:
                self._file.truncate(self._pos)
                self._reallocate()
                self._file.sync()
            except OSError as second:
                return self.latch.trip(second, f"taking back a write to {self._file.path} that found no room")
            self._synced = self._pos
        return self.latch.retryable_error(error, f"writing {self._file.path}")

    def _reallocate(self) -> None:
        try:
            self._file.allocate(self._capacity_bytes)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            # The file goes on without reserved room: the next write finds its own or is refused.


def remove_unused_file(disk: Disk, directory: str, first: int) -> None:
    """Remove a file to which nothing was written, and before it CURRENT and NEWEST, which may name it."""
    remove_proofs(disk, directory)
    if remove_if_exists(disk, file_path(directory, first)):
        disk.sync_dir(directory)
