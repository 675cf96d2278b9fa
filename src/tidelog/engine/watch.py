"""[shell] Notice that a writer beside a reader has done something, without reading what it was.

Everything a writer does is a frame in the WAL, so names, sizes and times of the WAL's files tell. Opening a directory
for reading replays the WAL; a reader that follows a topic does so only after this says that something changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.disk.seam import Disk, Stat, join
from tidelog.engine.core import WAL
from tidelog.wal import names


def wal_files(disk: Disk, root: str) -> Iterator[tuple[str, Stat | None]]:
    """Every WAL file of a data directory with what the disk says of it; None: it is gone again."""
    wal = join(root, WAL)
    for place in (names.directory(wal, key) for key in names.groups(disk, wal)):
        for file in (names.path_of(place, first) for first in names.files(disk, place)):
            yield file, disk.stat(file)


class WalWatch:
    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root
        self._seen = self._look()
        self._settled = False

    def changed(self) -> bool:
        """Return whether the writer did something since the last call.

        True at the first call, and once more after the last change: times of files are coarser than writes.
        """
        now = self._look()
        moved = now != self._seen
        changed = moved or not self._settled
        self._seen, self._settled = now, not moved
        return changed

    def look_once_more(self) -> None:
        """Let the next call return True: what changed could not be read."""
        self._settled = False

    def _look(self) -> list[tuple[str, Stat | None]]:
        return list(wal_files(self._disk, self._root))
