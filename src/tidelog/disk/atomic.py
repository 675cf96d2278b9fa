"""Atomic replacement of a small file: a reader finds the whole old content or the whole new one.

The order is the guarantee: write a sibling, sync its bytes, rename it over the target, sync
the directory. Sync after the rename and a power cut can show an empty file under the final name.
"""

from __future__ import annotations

from contextlib import suppress

from tidelog.disk.seam import Disk, File, parent
from tidelog.types import Buffer


class SyncFailed(OSError):
    """A sync failed, as opposed to a write: what the kernel still holds can no longer be trusted."""


def sync_file(file: File) -> None:
    """`file.sync`, telling its failure from that of a write."""
    try:
        file.sync()
    except OSError as error:
        raise SyncFailed(error.errno, f"syncing failed: {error.strerror or error}", file.path) from error


def sync_names(disk: Disk, directory: str) -> None:
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


def replace(disk: Disk, path: str, data: Buffer, *, temporary: str | None = None) -> None:
    """Make `data` the content of `path`. On return it survives a power cut. On an error a reader finds the old
    content, or, where only the last directory sync failed, the new one; a power cut then shows either."""
    temporary = temporary or f"{path}.tmp"
    write_temporary(disk, temporary, data)
    disk.rename(temporary, path)
    sync_names(disk, parent(path))


def overwrite(disk: Disk, path: str, data: Buffer) -> None:
    """Make `data` the content of a file where it is: no new blocks, so it may work on a full disk. A power cut can
    leave any mix of the old and the new content, so `data` needs a checksum of its own."""
    file = disk.open(path, "write")
    try:
        file.write(0, data)
        file.cut(len(memoryview(data)))
        sync_file(file)
    finally:
        file.close()


def read_all(disk: Disk, path: str) -> bytes | None:
    """A whole small file, or None where there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def remove_if_there(disk: Disk, path: str) -> bool:
    """Remove a file that may be gone already; say whether it was there."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return False
    return True
