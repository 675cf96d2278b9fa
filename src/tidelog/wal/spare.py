"""[shell] The next file of a group, made ahead of time and filled with zeros.

A sync of bytes that were written before only has to write them; in room that was merely reserved it also has
to tell the file system that they are there now, each time (docs/decisions/0010-zeros-ahead.md). Filling the
file costs its size in writes, in the background, when the one before is half full.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from tidelog.disk.atomic import remove_if_there
from tidelog.disk.seam import Disk, join
from tidelog.wal.names import SPARE

_ZEROS: Final = bytes(1 << 20)


class Spare:
    """At most one file. Nothing hangs on it: whatever goes wrong with it, there is just none."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._path = disk, join(directory, SPARE)
        self._size = 0  # of the one that is ready

    def make(self, size: int) -> None:
        """Have one ready, of this size unless there is one already. From any one thread, beside the writer."""
        if self._size:
            return
        temporary = f"{self._path}.tmp"
        try:
            remove_if_there(self._disk, temporary)
            file = self._disk.open(temporary, "create")
            try:
                for pos in range(0, size, len(_ZEROS)):
                    file.write(pos, _ZEROS[: size - pos])
                file.sync()
            finally:
                file.close()
            self._disk.rename(temporary, self._path)
            self._size = size
        except OSError:
            self.drop()  # no room for it: the next file is made when it is needed, and tells of it if it cannot be

    def take(self, path: str) -> int:
        """Let it be the file at `path` and say how large it is; 0 where there is none, or where that name is taken. The
        directory is the caller's to sync."""
        size = self._size
        if not size or self._disk.stat(path) is not None:
            return 0
        self._size = 0
        self._disk.rename(self._path, path)
        return size

    def drop(self) -> None:
        self._size = 0
        with suppress(OSError):
            for path in (self._path, f"{self._path}.tmp"):
                remove_if_there(self._disk, path)
