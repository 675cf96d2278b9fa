"""Atomic replacement of a small file: a reader finds the whole old content or the whole new one.

The order is the guarantee: write a sibling, sync its bytes, rename it over the target, sync
the directory. Sync after the rename and a power cut can show an empty file under the final name.
"""

from __future__ import annotations

from contextlib import suppress

from tidelog.disk.seam import Disk, parent
from tidelog.types import Buffer


def write_temporary(disk: Disk, temporary: str, data: Buffer) -> None:
    """Write `data` to `temporary`, replacing a stale one; its bytes are durable on return, its name is not."""
    with suppress(FileNotFoundError):
        disk.remove(temporary)
    file = disk.open(temporary, "create")
    try:
        file.write(0, data)
        file.sync()
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
    disk.sync_dir(parent(path))


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
