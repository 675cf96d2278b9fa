"""Durable changes to files on any disk.

`replace_file` is atomic: a reader sees the whole old content or the whole new content. The order is the guarantee:
write a temporary file, sync it, rename it over the target, sync the directory. A sync after the rename would let a
power cut leave an empty file under the final name.

`WriteLatch` stops all writing after a failed sync until the log is reopened. Linux marks pages clean after a failed
sync, so a later sync can succeed although earlier bytes never reached the device. A record acked after that would
follow a hole.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol, Self

from tidelog.disk.interface import Disk, File, join, parent_dir
from tidelog.errors import DiskFull, Error, Latched, WriteFailed
from tidelog.types import Buffer

_PARALLEL_SYNCS: Final = 4


class SyncFailed(OSError):
    """A sync failed, as opposed to a write: the content of the page cache can no longer be trusted."""


def sync_file(file: File) -> None:
    """Sync a file; a failure raises SyncFailed, so that callers can distinguish it from a failed write."""
    try:
        file.sync()
    except OSError as error:
        raise SyncFailed(error.errno, f"syncing failed: {error.strerror or error}", file.path) from error


def sync_directory(disk: Disk, directory: str) -> None:
    """Sync a directory; a failure raises SyncFailed."""
    try:
        disk.sync_dir(directory)
    except OSError as error:
        raise SyncFailed(error.errno, f"syncing failed: {error.strerror or error}", directory) from error


class ParallelSyncs:
    """Syncs of new files beside each other and beside the caller. A file system with a journal commits once for several
    files, so this takes a third of the time of one sync after the other. A file without a descriptor is synced in the
    calling thread, where it is handed over."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def sync_and_close(self, file: File) -> Future[None]:
        """Take over an open file. Its bytes are durable when the result is there; an error is raised by it."""
        if file.descriptor is None:
            done: Future[None] = Future()
            try:
                _sync_and_close(file)
            except OSError as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            return done
        return self._submit(_sync_and_close, file)

    def sync_directories(self, disk: Disk, directories: Iterable[str]) -> None:
        """Sync directories of a disk that holds real files, beside each other. Raises the first error, after all."""
        synced = [self._submit(disk.sync_dir, directory) for directory in directories]
        failed = [error for each in synced if (error := each.exception()) is not None]
        if failed:
            raise failed[0]

    def _submit(self, sync: Callable[..., None], *arguments: object) -> Future[None]:
        self._pool = self._pool or ThreadPoolExecutor(_PARALLEL_SYNCS, thread_name_prefix="tidelog sync")
        return self._pool.submit(sync, *arguments)


def _sync_and_close(file: File) -> None:
    try:
        sync_file(file)
    finally:
        file.close()


def write_temporary(disk: Disk, temporary: str, data: Buffer) -> None:
    """Write `data` to `temporary`, replacing a stale file. Its bytes are durable on return, its name is not."""
    with suppress(FileNotFoundError):
        disk.remove(temporary)
    file = disk.open(temporary, "create")
    try:
        file.write(0, data)
        sync_file(file)
    except OSError:
        with suppress(OSError):
            disk.remove(temporary)
        raise
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: Buffer, *, temporary: str | None = None) -> None:
    """Replace the content of `path` with `data`. On return it survives a power cut. After an error readers see the old
    content or, if only the final directory sync failed, the new content; a power cut then leaves either."""
    temporary = temporary or f"{path}.tmp"
    write_temporary(disk, temporary, data)
    disk.rename(temporary, path)
    sync_directory(disk, parent_dir(path))


def overwrite_in_place(disk: Disk, path: str, data: Buffer) -> None:
    """Overwrite the content of a file without a temporary file. It needs no new blocks, so it may succeed on a full
    disk. A power cut can leave any mix of old and new bytes, so `data` needs a checksum."""
    file = disk.open(path, "write")
    try:
        file.write(0, data)
        file.truncate(len(memoryview(data)))
        sync_file(file)
    finally:
        file.close()


def read_file(disk: Disk, path: str) -> bytes | None:
    """Read a whole small file; None if it does not exist."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def remove_if_exists(disk: Disk, path: str) -> bool:
    """Remove a file; return whether it existed."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return False
    return True


def remove_tree(disk: Disk, path: str) -> None:
    """Remove a file, or a directory with everything in it. A missing one has no effect."""
    stat = disk.stat(path)
    if stat is None:
        return
    if not stat.is_dir:
        disk.remove(path)
        return
    for name in disk.list_dir(path):
        remove_tree(disk, join(path, name))
    disk.remove_dir(path)


DISK_FULL_ERRNOS = frozenset((errno.ENOSPC, errno.EDQUOT))


class Syncable(Protocol):
    @property
    def path(self) -> str: ...
    def sync(self) -> None: ...


class WriteLatch:
    """Closed by the first failure that leaves the files in doubt; writing stops until the log is reopened."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._cause: BaseException | None = None

    @property
    def is_tripped(self) -> bool:
        return self._cause is not None

    def check(self) -> None:
        """Raise Latched if an earlier failure stopped writing. For a caller that has written nothing yet."""
        if self._cause is not None:
            error = Latched(
                f"{self._log} is read-only since an earlier failure ({self._cause}); this call wrote nothing, "
                "reopen the log on a healthy disk"
            )
            error.written = False  # only the write that failed is in doubt
            raise error from self._cause

    def check_before_sync(self) -> None:
        """Raise Latched for a caller that is about to sync: its own write may be in doubt."""
        if self._cause is not None:
            raise Latched(
                f"{self._log} is read-only since an earlier failure ({self._cause}); whether what was written last "
                "is on disk is unknown, reopen the log on a healthy disk"
            ) from self._cause

    def trip(self, error: BaseException, step: str) -> Latched:
        """Close the latch; return the error to raise."""
        self._cause = self._cause or error
        return Latched(
            f"{self._log}: {step} failed ({error}); whether the last write is on disk is unknown, earlier acked "
            "records are safe; reopen the log on a healthy disk"
        )

    def unsynced_error(self) -> Latched:
        """The error for closing a latched log that holds acked but unsynced records."""
        return Latched(
            f"{self._log}: records that were acked without a sync could not be synced after an earlier failure "
            f"({self._cause}); they may not survive a power cut, reopen the log on a healthy disk"
        )

    def sync_or_trip(self, file: Syncable) -> None:
        """Sync a file; trip the latch and raise Latched on failure."""
        try:
            file.sync()
        except OSError as error:
            self._cause = self._cause or error  # before any call: an interrupt in between must not lose the failure
            raise self.trip(error, f"syncing {file.path}") from error

    def retryable_error(self, error: OSError, step: str) -> Error:
        """The error for a failed step that did not affect acked records and may be retried."""
        if error.errno in DISK_FULL_ERRNOS:
            return self._disk_full_error(step)
        return WriteFailed(f"{self._log}: {step} failed ({error}); no record was changed, repair the disk and retry")

    def write_error(self, error: OSError, step: str) -> Error:
        """The error for a failed step after which writing cannot continue: a full disk is temporary, any other failure
        trips the latch."""
        return self._disk_full_error(step) if error.errno in DISK_FULL_ERRNOS else self.trip(error, step)

    def _disk_full_error(self, step: str) -> DiskFull:
        return DiskFull(
            f"{self._log}: no space left on the device while {step}; nothing was written, free space and retry"
        )
