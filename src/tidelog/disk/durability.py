"""Atomic replacement of a small file: a reader finds the whole old content or the whole new one.

The order is the guarantee: write a sibling, sync its bytes, rename it over the target, sync
the directory. Sync after the rename and a power cut can show an empty file under the final name.

The latch: once a sync failed, nothing may be written until the log is reopened.

Linux marks pages clean after a failed sync, so a later sync can succeed while earlier bytes
never reached the device. A record acked after that would sit behind a hole.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Protocol

from tidelog.disk.interface import Disk, File, parent_dir
from tidelog.errors import DiskFull, Error, Latched, WriteFailed
from tidelog.types import Buffer


class SyncFailed(OSError):
    """A sync failed, as opposed to a write: what the kernel still holds can no longer be trusted."""


def sync_file(file: File) -> None:
    """`file.sync`, telling its failure from that of a write."""
    try:
        file.sync()
    except OSError as error:
        raise SyncFailed(error.errno, f"syncing failed: {error.strerror or error}", file.path) from error


def sync_directory(disk: Disk, directory: str) -> None:
    """`disk.sync_dir`, telling its failure from that of a write."""
    try:
        disk.sync_dir(directory)
    except OSError as error:
        raise SyncFailed(error.errno, f"syncing failed: {error.strerror or error}", directory) from error


def write_temporary(disk: Disk, temporary: str, data: Buffer) -> None:
    """Write `data` to `temporary`, replacing a stale one; its bytes are durable on return, its name is not."""
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
    """Make `data` the content of `path`. On return it survives a power cut. On an error a reader finds the old
    content, or, where only the last directory sync failed, the new one; a power cut then shows either."""
    temporary = temporary or f"{path}.tmp"
    write_temporary(disk, temporary, data)
    disk.rename(temporary, path)
    sync_directory(disk, parent_dir(path))


def overwrite_in_place(disk: Disk, path: str, data: Buffer) -> None:
    """Make `data` the content of a file where it is: no new blocks, so it may work on a full disk. A power cut can
    leave any mix of the old and the new content, so `data` needs a checksum of its own."""
    file = disk.open(path, "write")
    try:
        file.write(0, data)
        file.truncate(len(memoryview(data)))
        sync_file(file)
    finally:
        file.close()


def read_file(disk: Disk, path: str) -> bytes | None:
    """A whole small file, or None where there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def remove_if_exists(disk: Disk, path: str) -> bool:
    """Remove a file that may be gone already; say whether it was there."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return False
    return True


DISK_FULL_ERRNOS = frozenset((errno.ENOSPC, errno.EDQUOT))


class Syncable(Protocol):
    @property
    def path(self) -> str: ...
    def sync(self) -> None: ...


class WriteLatch:
    def __init__(self, log: str) -> None:
        self._log = log
        self._cause: BaseException | None = None

    @property
    def is_tripped(self) -> bool:
        return self._cause is not None

    def check(self) -> None:
        """Raise when an earlier failure ended writing. For who has written nothing yet."""
        if self._cause is not None:
            late = Latched(
                f"{self._log} is read-only since an earlier failure ({self._cause}); this call wrote nothing, "
                "reopen the log on a healthy disk"
            )
            late.written = False  # what is in doubt is the write that failed, and no other
            raise late from self._cause

    def check_before_sync(self) -> None:
        """`check`, for who is about to sync: what it has written may be what the earlier failure was about."""
        if self._cause is not None:
            raise Latched(
                f"{self._log} is read-only since an earlier failure ({self._cause}); whether what was written last "
                "is on disk is unknown, reopen the log on a healthy disk"
            ) from self._cause

    def trip(self, error: BaseException, what: str) -> Latched:
        """Close the latch; return the error to raise."""
        self._cause = self._cause or error
        return Latched(
            f"{self._log}: {what} failed ({error}); whether the last write is on disk is unknown, earlier acked "
            "records are safe; reopen the log on a healthy disk"
        )

    def unsynced_error(self) -> Latched:
        """The error for who closes what was latched while acked records waited for a sync."""
        return Latched(
            f"{self._log}: an earlier failure ({self._cause}) kept records from the disk that were acked without a "
            "sync; they are as the system has them and may not survive a power cut, reopen the log on a healthy disk"
        )

    def sync_or_trip(self, file: Syncable) -> None:
        """Sync, or latch."""
        try:
            file.sync()
        except OSError as error:
            self._cause = self._cause or error  # before any call: an interrupt in between must not lose it
            raise self.trip(error, f"syncing {file.path}") from error

    def retryable_error(self, error: OSError, what: str) -> Error:
        """The error for a failed step that changed nothing which acked records hang on: it may be tried again."""
        if error.errno in DISK_FULL_ERRNOS:
            return self._disk_full_error(what)
        return WriteFailed(f"{self._log}: {what} failed ({error}); every record is as before, mend the disk and retry")

    def write_error(self, error: OSError, what: str) -> Error:
        """The error for a failed step behind which writing cannot go on: no room is temporary, the rest latches."""
        return self._disk_full_error(what) if error.errno in DISK_FULL_ERRNOS else self.trip(error, what)

    def _disk_full_error(self, what: str) -> DiskFull:
        return DiskFull(f"{self._log}: no room on the device while {what}; nothing was written, free space and retry")
