"""[shell] The next file of a group, made ahead of time and filled with zeros, step by step.

    SPARE.tmp  │ zeros, synced │ the next step │ … up to its size ──► SPARE ──► wal-….log, at the next rotation

A sync of bytes that were written before only has to write them; in room that was merely reserved it also has
to tell the file system that they are there now, each time (docs/decisions/0010-zeros-ahead.md). Filling the
file costs its size in writes, in the background. It is done in steps while the file before is filled, because whoever
waits for a sync meanwhile waits behind the zeros of one step.

`Reserve` is room of another kind: a file that holds nothing, and is given up where the disk is full.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Final

from tidelog.disk.atomic import remove_if_there
from tidelog.disk.seam import Disk, File, free_bytes, join
from tidelog.wal.names import RESERVE, SPARE

_ZEROS: Final = bytes(1 << 20)
STEP_BYTES: Final = 4 << 20


class Spare:
    """At most one file. Nothing hangs on it: whatever goes wrong with it, there is just none."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._path = disk, join(directory, SPARE)
        self._size = 0  # of the one that is ready
        self._file: File | None = None  # the one that is being filled
        self.filled = 0  # bytes of it that are zeros by now

    def make(self, size: int) -> bool:
        """Fill one step more of a file of this size. True: there is one, of this or another size, or the disk refuses.
        From any one thread, beside the writer."""
        if self._size:
            return True
        try:
            file = self._file = self._file or self._begun()
            stop = min(size, self.filled + STEP_BYTES)
            for pos in range(self.filled, stop, len(_ZEROS)):
                file.write(pos, _ZEROS[: stop - pos])
            file.sync()
            self.filled = stop
            if stop < size:
                return False
            self._close()
            self._disk.rename(f"{self._path}.tmp", self._path)
            self._size = size
        except OSError:
            self.drop()  # no room for it: the next file is made when it is needed, and tells of it if it cannot be
        return True

    def _begun(self) -> File:
        temporary = f"{self._path}.tmp"
        remove_if_there(self._disk, temporary)
        return self._disk.open(temporary, "create")

    def _close(self) -> None:
        file, self._file, self.filled = self._file, None, 0
        if file is not None:
            file.close()

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
        self._close()
        with suppress(OSError):
            for path in (self._path, f"{self._path}.tmp"):
                remove_if_there(self._disk, path)


RESERVE_BYTES: Final = 4 << 20
_SHARE: Final = 16  # the reserve takes at most this part of what is free
_STEPS: Final = 4  # in which it is given up
_PAGE_BYTES: Final = 1 << 12


class Reserve:
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
        self._held = 0  # bytes that the file has
        self.is_wanted = False  # some of it was given up, or it could not be made

    @property
    def is_held(self) -> bool:
        """Whether all of it is there."""
        return 0 < self.size <= self._held

    def adopt(self) -> None:
        """Take over what an earlier process has left."""
        with self._lock:
            self._adopt()

    def _adopt(self) -> None:
        found = None if self._held else self._disk.stat(self._path)
        if found is not None:
            self._held, self.size = found.size, max(self.size, found.size)

    def restore(self) -> bool:
        """Make the file where it is missing; False where there is no room for it."""
        with self._lock:
            if self.is_held and self.size >= RESERVE_BYTES:
                return True
            free = free_bytes(self._disk, self._wal)
            if free is None:
                return True
            self._adopt()
            whole = self.is_held
            self.size = max(self.size, min(RESERVE_BYTES, (free + self._held) // _SHARE))
            if self.is_held:
                self.is_wanted = False
                return True
            self.is_wanted = not whole
            if not self.size or free < self.size - self._held:
                return self._as_before(whole=whole)
            try:
                there = self._disk.stat(self._path) is not None
                file = self._disk.open(self._path, "write" if there else "create")
                try:
                    file.reserve(self.size)
                finally:
                    file.close()
            except OSError:
                self._cut(self._held)
                return self._as_before(whole=whole)
            self._held, self.is_wanted = self.size, False
            return True

    def _as_before(self, *, whole: bool) -> bool:
        """It could not be made larger: as large as it was it will do, where all of that was there."""
        if whole:
            self.size = self._held
        return whole

    def release(self) -> bool:
        """Give up a part of it; False where nothing is left."""
        with self._lock:
            if not self._held:
                return False
            before, self.is_wanted = self._held, True
            self._held = max(self._held - max(self.size // _STEPS, _PAGE_BYTES), 0) // _PAGE_BYTES * _PAGE_BYTES
            return self._cut(self._held) and self._held < before

    def _cut(self, size: int) -> bool:
        """Make the file so short; False where the disk refuses."""
        try:
            if not size:
                remove_if_there(self._disk, self._path)
                return True
            file = self._disk.open(self._path, "write")
            try:
                file.cut(size)
            finally:
                file.close()
        except OSError:
            return False
        return True
