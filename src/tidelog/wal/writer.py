"""The active file of one shard: append, sync, rotate.

    wal-0000000000000001.log
    0                      synced            position             capacity
    ┌──────────────────────┬─────────────────┬────────────────────┐
    │ survives a power cut │ survives a kill │ zeros, allocated   │
    └──────────────────────┴─────────────────┴────────────────────┘

After `write` the operating system has the whole batch, after `sync` the disk has it. If `write` raises DiskFull, no
byte of the batch is on disk and the next batch starts at the same position. Any other failure trips the latch.

Full disk. If there is no space for the next file, new records are refused (DiskFull) and the old file stays active.
Commits that free space (`Commit.may_use_reserve`) continue in a small file, with space from the `DiskReserve`. New
records are accepted again once the reserve is restored. A new file leaves half of the free space to the checkpoint that
copies its records.

Rotation, in this order: sync the old file; create, allocate and sync the new one (a preallocated file is only renamed);
sync the directory; write CURRENT; then write frames. A power cut leaves no new file, an empty one, or a stale CURRENT:
each is a clean start. A CURRENT that names a missing file therefore proves a loss, so CURRENT is removed before a file
that is rolled back. CURRENT also has the largest size of the file, which bounds the loss. The name of the empty file
NEWEST repeats it, in case CURRENT is lost too; the directory sync of CURRENT makes it durable. One descriptor serves a
file from its first write to its last sync, because the kernel reports a failed write-back once per open file.

File sizes. The first file is small and each next one four times as large, up to `file_bytes`, so that light use costs
little space and frequent small syncs soon go to files filled with zeros ahead (`PreallocatedFile`). With syncs of
256 KiB or more zeros gain nothing, and the next file has the full size at once. If the disk lags far, a rotation would
wait for it: the file is extended instead, up to eight times `file_bytes`.

Marks of the synced position. The first batch after a sync begins with a CheckpointMark that has the synced length of
the file, and its own position in the frame's `seq`; in the first batch of a file it has the end of the previous file.
With it recovery distinguishes a damaged frame from one that was being written
(docs/decisions/0018-marks-of-the-synced-position.md). A mark costs 70 bytes and no sync. If no batch follows,
`record_synced_position` writes the position into the file SYNCED, which is overwritten in place and not synced: it is
true whenever it is readable, and a damaged sector of the WAL file cannot take it along.
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
    SYNCED,
    Position,
    current_file_number,
    encode_current,
    encode_synced,
    file_path,
    newest_name,
    newest_names,
    remove_proofs,
)

_ZEROS: Final = bytes(1 << 20)
PREALLOCATE_STEP_BYTES: Final = 4 << 20


class PreallocatedFile:
    """The next file of a shard, filled with zeros ahead of time. Optional: after any error there is none.

        SPARE.tmp  │ zeros, synced │ the next step │ … up to its size ──► SPARE ──► wal-….log, at the next rotation

    A sync of overwritten bytes only writes them; in space that was merely allocated it also changes the file's metadata
    (docs/decisions/0010-zeros-ahead.md). The file is filled in the background, in steps, because a sync of the
    active file waits for the zeros of one step.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._path = disk, join(directory, PREALLOCATED)
        self._ready_bytes = 0  # size of the complete file
        self._file: File | None = None  # the file that is being filled
        self.filled_bytes = 0  # bytes of it that are filled

    def fill_step(self, size: int) -> bool:
        """Fill one more step of a file of this size. True if a file is ready, of this or another size, or cannot be
        made. May run in one thread beside the writer."""
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
            self.discard()  # the next file is created when it is needed; if that fails, the error is raised there
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
        """Rename it to `path` and return its size; 0 if there is none or `path` exists. The caller syncs the
        directory."""
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
_RESERVE_FREE_SHARE: Final = 16  # the reserve takes at most this fraction of the free space
_RESERVE_RELEASE_STEPS: Final = 4  # in which it is released
_PAGE_BYTES: Final = 1 << 12


class DiskReserve:
    """Disk space that is reserved for operations that free space: deletes, drops, watermarks and checkpoints.

    A file of allocated, unused blocks, shared by all shards. When the disk is full it is truncated, a quarter at a
    time, and the commit or checkpoint that was refused is retried; other programs cannot take the rest. Until it is
    complete again no record is written that needs new space. Thread-safe. A disk that does not report its free space
    has no reserve.
    """

    def __init__(self, disk: Disk, wal: str) -> None:
        self._disk, self._wal, self._path = disk, wal, join(wal, RESERVE)
        self._lock = Lock()
        self.size = 0  # the intended size
        self._held_bytes = 0  # the size of the file
        self.is_short = False  # a part was released, or it could not be created

    @property
    def is_complete(self) -> bool:
        """Whether the file has its intended size."""
        return 0 < self.size <= self._held_bytes

    def adopt(self) -> None:
        """Take over the file of an earlier process."""
        with self._lock:
            self._adopt()

    def _adopt(self) -> None:
        info = None if self._held_bytes else self._disk.stat(self._path)
        if info is not None:
            self._held_bytes, self.size = info.size, max(self.size, info.size)

    def restore(self) -> bool:
        """Create or extend the file; False if there is not enough space."""
        with self._lock:
            if self.is_complete and self.size >= DISK_RESERVE_BYTES:
                return True
            free = free_bytes(self._disk, self._wal)
            if free is None:
                return True
            self._adopt()
            was_complete = self.is_complete
            self.size = max(self.size, min(DISK_RESERVE_BYTES, (free + self._held_bytes) // _RESERVE_FREE_SHARE))
            if self.is_complete:
                self.is_short = False
                return True
            self.is_short = not was_complete
            if not self.size or free < self.size - self._held_bytes:
                return self._keep_previous_size(was_complete=was_complete)
            try:
                exists = self._disk.stat(self._path) is not None
                file = self._disk.open(self._path, "write" if exists else "create")
                try:
                    file.allocate(self.size)
                finally:
                    file.close()
            except OSError:
                self._truncate(self._held_bytes)
                return self._keep_previous_size(was_complete=was_complete)
            self._held_bytes, self.is_short = self.size, False
            return True

    def _keep_previous_size(self, *, was_complete: bool) -> bool:
        """It could not be extended: keep the size that it had, if it was complete."""
        if was_complete:
            self.size = self._held_bytes
        return was_complete

    def release_part(self) -> bool:
        """Release a part of it; False if nothing is left."""
        with self._lock:
            if not self._held_bytes:
                return False
            before, self.is_short = self._held_bytes, True
            rest = max(before - max(self.size // _RESERVE_RELEASE_STEPS, _PAGE_BYTES), 0)
            self._held_bytes = rest // _PAGE_BYTES * _PAGE_BYTES
            return self._truncate(self._held_bytes) and self._held_bytes < before

    def _truncate(self, size: int) -> bool:
        """Truncate the file; False on a disk error."""
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
SYNC_MARK_BYTES: Final = 70  # size of a mark of the synced position
FILE_BYTES_MIN: Final = 1 << 16  # size of a file on a disk that is nearly full
RESERVE_FILE_BYTES: Final = 1 << 18  # size of a file that uses the reserve
_FILE_GROWTH_FACTOR: Final = 4  # size of a file relative to the previous one
_FILE_EXTEND_FACTOR_MAX: Final = 8  # largest size of an extended file relative to file_bytes


class Writer:
    """Writes the active file. Not thread-safe except for `sync`: the shard serialises calls with its commit lock. One
    sync runs at a time, because the kernel reports a failed write-back only once; writes continue meanwhile."""

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
        """Create a file whose first frame has number `file_number`. Raises Damaged if it cannot be created, DiskFull if
        there is no space. Without `write_marks` the files contain only the callers' frames."""
        self._disk, self.directory, self._file_bytes = disk, directory, file_bytes
        self.latch = latch
        self.rotations = 0
        self._sync_lock = Lock()
        self._next_file = PreallocatedFile(disk, directory)
        self._capacity_bytes = 0  # bytes that are allocated to the file
        self._write_marks = write_marks
        self._announced_bytes = 0  # the file's largest size by CURRENT
        self._current_is_written = False  # CURRENT names the file
        self._batch_bytes = 0  # size of the batch that is being written
        self._previous_end = self._last_marked = Position(0, 0)  # end of the previous file; position in the last mark
        self._synced_file: File | None = None  # SYNCED, open once it was needed
        self._recorded = Position(0, 0)  # the position in SYNCED
        self._reserve = reserve or DiskReserve(disk, directory)
        self.allowance: Callable[[], int | None] = lambda: None  # largest size of a new file in bytes; None: any
        self.is_reserve_file = False  # the file uses the reserve: it takes no new records
        self._reserve_file_bytes = RESERVE_FILE_BYTES
        self.disk_full_count = 0  # writes and files for which there was no space
        path = file_path(directory, file_number)
        try:
            disk.make_dir(directory)
            self._next_file.discard()  # of an earlier process
            self._file = self._first_file(file_number)
            self.reader = disk.open(path)
        except OSError as error:
            latch.trip(error, f"creating {path}")
            if error.errno in DISK_FULL_ERRNOS:
                with suppress(OSError):
                    remove_if_exists(disk, path)
                raise DiskFull(
                    f"{path} cannot be created, no space is left on the device; nothing was written and acked records "
                    "are safe, free space and open again"
                ) from error
            raise Damaged(
                f"{path} cannot be created: {error}; nothing was written and acked records are safe, repair the disk "
                "or free space and open again"
            ) from error
        self._reset_file_state(file_number)

    def _first_file(self, first: int) -> File:
        """Create the first file: a small one if there is no space for more, an empty one if there is none at all, which
        takes commits that free space as soon as a little is free."""
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
        self._syncing_to = 0  # the end of the bytes that a begun sync covers
        self._prepared = False
        self._syncs = 0
        self._open = True

    @property
    def position(self) -> Position:
        """The end of the last byte that was written."""
        return Position(self._file_number, self._pos)

    @property
    def synced(self) -> Position:
        """Every byte before it survives a power cut."""
        return Position(self._file_number, self._synced)

    @property
    def next_frame(self) -> int:
        """The number of the next frame in the shard."""
        return self._file_number + self._frames

    def write(self, pieces: Sequence[Buffer], *, size: int, frames: int, may_use_reserve: bool = False) -> None:
        """Write one batch, `size` bytes in `frames` frames, into one file, a new one if needed. `may_use_reserve`: on a
        full disk it may use the reserve."""
        while True:
            try:
                return self.write_raw(pieces, size=size, frames=frames, may_use_reserve=may_use_reserve)
            except OSError as error:
                failure = self.rollback(error)
                if not (may_use_reserve and isinstance(failure, DiskFull) and self._reserve.release_part()):
                    raise failure from error

    def write_raw(self, pieces: Sequence[Buffer], *, size: int, frames: int, may_use_reserve: bool = False) -> None:
        """As `write`, but after an OSError the caller must call `rollback` with it first."""
        self.latch.check()
        if not size:
            return
        if self.is_reserve_file and not may_use_reserve:
            self._leave_reserve_file()
        self._batch_bytes = size + SYNC_MARK_BYTES * self._write_marks
        if self.is_full(size) and not self._extend(size):
            self._rotate(may_use_reserve=may_use_reserve)
        elif not self._pos and self._batch_bytes > self._announced_bytes:
            self._write_current(self._file_number, self._batch_bytes)
        marked, mark = self._next_mark()
        self._file.writev(self._pos, [mark, *pieces] if mark else pieces)
        self._pos += len(mark) + size
        self._frames += bool(mark) + frames
        self._last_marked = marked

    def _next_mark(self) -> tuple[Position, bytes]:
        """The synced position and a frame with it; no frame if the last mark has the same position."""
        synced = self._synced
        marked = Position(self._file_number, synced) if synced else self._previous_end
        if marked <= self._last_marked or not self._write_marks:
            return self._last_marked, b""
        body = control_frames.encode(control_frames.CheckpointMark(wal_first=marked.file_number, wal_pos=marked.pos))
        return marked, frame.encode(frame.CHECKPOINT_MARK, seq=self._pos, ts_ms=0, data=body)

    def record_synced_position(self) -> None:
        """Write SYNCED if everything is synced. Also write CURRENT if there was no space for it before."""
        if self.latch.is_tripped or not self._open:
            return
        if not self._current_is_written:
            self._rewrite_current()
        synced = self.synced
        if not self._write_marks or not synced.pos or synced != self.position or synced == self._recorded:
            return
        path = join(self.directory, SYNCED)
        try:
            if self._synced_file is None:
                self._synced_file = self._disk.open(path, "create" if self._disk.stat(path) is None else "write")
            self._synced_file.write(0, encode_synced(synced))
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise self.latch.trip(error, f"writing {path}") from error
            return  # on a full disk it is tried again at the next tick
        self._recorded = synced

    def sync(self) -> bool:
        """Sync everything that was written; False if there was nothing to sync. Thread-safe."""
        with self._sync_lock:
            return self._sync()

    def _sync(self) -> bool:
        self.latch.check_before_sync()
        pos = self._pos  # later writes need another sync
        if self._synced == pos or not self._open:
            return False
        self.latch.sync_or_trip(self._file)
        self._synced = pos
        self._syncs += 1
        return True

    def begin_sync(self) -> int | None:
        """Start a sync by another thread: return the descriptor to sync. The caller reports the result to `end_sync`.
        None if there is nothing to sync, another sync is running or only `sync` can be used."""
        descriptor = self._file.descriptor
        if descriptor is None or not self._sync_lock.acquire(blocking=False):
            return None
        if self.latch.is_tripped or not self._open or self._pos == self._synced:
            self._sync_lock.release()
            return None
        self._syncing_to = self._pos
        return descriptor

    def end_sync(self, error: OSError | None) -> None:
        """Record the result of the sync. Raises Latched, as `sync` does."""
        try:
            if error is not None:
                raise self.latch.trip(error, f"syncing {self._file.path}") from error
            self._synced = self._syncing_to
            self._syncs += 1
        finally:
            self._sync_lock.release()

    def is_full(self, size: int) -> bool:
        """Whether `size` more bytes need a new or a longer file."""
        return self._pos > 0 and self._pos + size + SYNC_MARK_BYTES * self._write_marks > self._capacity_bytes

    @property
    def should_prepare_next(self) -> bool:
        """Whether `prepare_next_file` is due. From the middle of a file the next one is filled with zeros step by step,
        so that it is complete when five sixths of this one are used."""
        beyond_half = 2 * self._pos - self._capacity_bytes
        filled_bytes, next_bytes = self._next_file.filled_bytes, self._next_capacity_bytes()
        return (
            beyond_half >= 0
            and not self._prepared
            and not self._has_large_syncs
            and 2 * filled_bytes * self._capacity_bytes <= 3 * beyond_half * next_bytes
        )

    @property
    def should_sync(self) -> bool:
        """Whether so many bytes are unsynced that a rotation would wait long; fewer are enough if one is near."""
        near_rotation = self._pos + UNSYNCED_BYTES_MAX > self._capacity_bytes
        return self._pos - self._synced >= (UNSYNCED_BYTES_MAX // 8 if near_rotation else UNSYNCED_BYTES_MAX)

    @property
    def _has_large_syncs(self) -> bool:
        """Whether syncs write so many bytes that filling with zeros would cost more than it saves."""
        return self._pos >= max(1, self._syncs) * LARGE_SYNC_BYTES

    def prepare_next_file(self) -> None:
        """Fill the next file by one step. May run in one thread beside the writer."""
        if not self._open or not self.should_prepare_next or self.latch.is_tripped:
            return
        first, size = self._file_number, self._next_capacity_bytes()
        allowed = self.allowance()
        if self.is_reserve_file or (allowed is not None and allowed < size):
            return  # the free space is kept for a checkpoint, or is too small: the file is created when needed
        if 6 * self._pos >= 5 * self._capacity_bytes:
            # No time for more: a small file is better than none.
            size = min(size, self._next_file.filled_bytes + PREALLOCATE_STEP_BYTES)
        if self._next_file.fill_step(size):
            # Also if it could not be created: it is tried once per file.
            self._prepared = self._prepared or self._file_number == first

    def _next_capacity_bytes(self) -> int:
        if self._capacity_bytes and self._has_large_syncs:
            return self._file_bytes
        return min(self._capacity_bytes * _FILE_GROWTH_FACTOR or FIRST_FILE_BYTES, self._file_bytes)

    def close(self) -> None:
        """Truncate to the used size, sync and close. A latched file is only closed: a sync would prove nothing."""
        if not self._open:
            return
        with self._sync_lock:
            try:
                if not self.latch.is_tripped:
                    with suppress(OSError):  # optional: it only frees unused space
                        self._file.truncate(self._pos)
                    self._sync()
            finally:
                self._open = False
                self._file.close()
                if self._synced_file is not None:
                    self._synced_file.close()
                self._next_file.discard()

    def _extend(self, size: int) -> bool:
        """Extend this file for a batch if a rotation would wait long for the disk; False: rotate."""
        # Doubled each time: the allocation waits for the disk as well.
        capacity_bytes = min(
            self._capacity_bytes + max(self._capacity_bytes, self._file_bytes),
            _FILE_EXTEND_FACTOR_MAX * self._file_bytes,
        )
        lagging = self._has_large_syncs and self._pos - self._synced >= EXTEND_UNSYNCED_BYTES_MIN
        if not lagging or self._pos + size > capacity_bytes:
            return False
        allowed = self.allowance()
        if allowed is not None and allowed < capacity_bytes - self._capacity_bytes:
            return False
        try:
            self._file.allocate(capacity_bytes)
        except OSError:
            return False  # the rotation will meet the same error and handle it
        self._capacity_bytes = capacity_bytes
        return True

    def _leave_reserve_file(self) -> None:
        """Accept new records again if the reserve can be restored; raise DiskFull otherwise."""
        allowed = self.allowance()
        if not self._reserve.restore() or (allowed is not None and allowed < min(FILE_BYTES_MIN, self._file_bytes)):
            self.disk_full_count += 1
            error = OSError(errno.ENOSPC, "no space for the reserve")
            raise self.latch.retryable_error(error, "restoring the disk reserve for new records")
        self.is_reserve_file = False

    def _rotate(self, *, may_use_reserve: bool) -> None:
        with self._sync_lock:
            # The old file first: from now on a missing frame in it is damage and no longer a torn tail.
            self._sync()
            first = self.next_frame
            try:
                file, self.reader = self._open_next(first)
            except OSError as error:
                self._remove_unfinished(first, error)
                self.disk_full_count += 1
                if not may_use_reserve:
                    raise self.latch.retryable_error(error, f"creating {file_path(self.directory, first)}") from error
                file, self.reader = self._open_reserve_file(first)
            self._file.close()
            self._file, self._previous_end = file, self.position
            self._reset_file_state(first)
            self.rotations += 1

    def start_new_file(self) -> None:
        """Continue in a new file, unless this one has no frame. The old one is complete and synced."""
        if self._frames:
            self._rotate(may_use_reserve=False)

    def _open_reserve_file(self, first: int) -> tuple[File, File]:
        """Open a small file for commits that free space: it uses the free space, then the reserve."""
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
        """Try a smaller reserve file next; False if it has the smallest size."""
        if self._reserve_file_bytes // 4 < _PAGE_BYTES:
            return False
        self._reserve_file_bytes //= 4
        return True

    def _open_next(self, first: int) -> tuple[File, File]:
        """Create the next file; return it opened for writing and for reading."""
        if not self.is_reserve_file and not self._reserve.restore():
            raise OSError(errno.ENOSPC, "no space for the reserve", self.directory)
        file = self._create(first)
        try:
            return file, self._disk.open(file_path(self.directory, first))
        except BaseException:
            file.close()
            raise

    def _remove_unfinished(self, first: int, error: OSError) -> None:
        """Durably remove the new file after a rotation without space: the next rotation creates it again, under this
        number or another, and a power cut must not restore a file that begins inside the previous one. Any other error
        trips the latch."""
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
            raise self.latch.trip(second, f"removing the unfinished file {path}") from second

    def _affordable_file_bytes(self, wanted: int) -> int:
        """The size of the next file: `wanted`, or less if there is less space. Half of the free space is left for the
        checkpoint that copies the file's records."""
        if self.is_reserve_file:
            return min(wanted, self._reserve_file_bytes)
        allowed = self.allowance()
        if allowed is None or allowed >= wanted:
            return wanted
        if allowed < min(wanted, FILE_BYTES_MIN):
            raise OSError(errno.ENOSPC, "the free space is kept for a checkpoint", self.directory)
        return allowed

    def _create(self, first: int) -> File:
        path = file_path(self.directory, first)
        preallocated = self._next_file.take_as(path)
        capacity = preallocated or self._affordable_file_bytes(self._next_capacity_bytes())
        # "create" refuses an existing name: a number is used once, even after errors.
        file = self._disk.open(path, "write" if preallocated else "create")
        try:
            if not preallocated:
                if capacity:
                    file.allocate(capacity)
                file.sync()
            self._disk.sync_dir(self.directory)
            # A file that is large enough for the disk to lag may be extended later.
            may_extend = capacity >= EXTEND_UNSYNCED_BYTES_MIN
            size_max = max(capacity, _FILE_EXTEND_FACTOR_MAX * self._file_bytes) if may_extend else capacity
            self._write_current(first, max(size_max, self._batch_bytes))
        except OSError:
            file.close()
            raise
        except BaseException:  # an interrupt: the next attempt creates it again
            file.close()
            remove_unused_file(self._disk, self.directory, first)
            raise
        self._capacity_bytes = capacity
        return file

    def _write_current(self, first: int, size: int) -> None:
        """Write CURRENT: the file exists and has at most `size` bytes. On a full disk overwrite the old one; if that
        fails too, `record_synced_position` writes it later."""
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
                # It is stale or unreadable: then it proves nothing, and the directory listing decides.
                self._current_is_written = False

    def _name_newest(self, first: int, size: int) -> None:
        """Rename the empty NEWEST file to what CURRENT will contain; it becomes durable with it. On a full disk the
        old name stays: it proves less, but nothing wrong."""
        name = newest_name(first, size)
        existing = set(newest_names(self._disk, self.directory))
        try:
            if name not in existing and existing:
                self._disk.rename(join(self.directory, existing.pop()), join(self.directory, name))
            elif name not in existing:
                self._disk.open(join(self.directory, name), "create").close()
            for stale in existing - {name}:
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
        """Remove the bytes of a failed write; return the error to raise.

        A shorter batch written over them would leave whole frames after its end, which would be replayed. They are
        truncated, not overwritten with zeros: that needs no space. Synced before the batch fails, because a power cut
        could restore the bytes.
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
                return self.latch.trip(second, f"rolling back a write to {self._file.path} on a full disk")
            self._synced = self._pos
        return self.latch.retryable_error(error, f"writing {self._file.path}")

    def _reallocate(self) -> None:
        try:
            self._file.allocate(self._capacity_bytes)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            # The file continues without allocated space: the next write allocates its own, or is refused.


def remove_unused_file(disk: Disk, directory: str, first: int) -> None:
    """Remove a file to which nothing was written; before it CURRENT and NEWEST, which may name it."""
    remove_proofs(disk, directory)
    if remove_if_exists(disk, file_path(directory, first)):
        disk.sync_dir(directory)
