"""A disk without files, for a log that lives and dies with its process.

Every promise of the seam holds except the ones about power and `kill -9`: nothing here
outlives the object. `sync` and `sync_dir` therefore only look whether they were asked of
something that exists. No faults are injected here; `tidelog.testing.SimDisk` is for that.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import lru_cache
from threading import RLock

from tidelog.clock import Clock, SystemClock
from tidelog.disk.interface import Mode, Stat, check_same_directory
from tidelog.types import Buffer


class _Inode:
    """The bytes of one file. Outlives its name while somebody holds it open, as an inode does."""

    __slots__ = ("content", "lock_holder", "modified_ms")

    def __init__(self, now_ms: int) -> None:
        self.content = bytearray()
        self.modified_ms = now_ms
        self.lock_holder: MemoryLock | None = None


class _Dir:
    __slots__ = ("entries", "modified_ms")

    def __init__(self, now_ms: int) -> None:
        self.entries: dict[str, _Inode | _Dir] = {}
        self.modified_ms = now_ms


class MemoryFile:
    def __init__(self, disk: MemoryDisk, path: str, data: _Inode, *, writable: bool) -> None:
        self._disk, self._path, self._writable = disk, path, writable
        self._inode: _Inode | None = data

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return len(self._checked_inode().content)

    def read(self, pos: int, size: int, /) -> bytes:
        check_not_negative(pos, size, self._path)
        with self._disk._lock:
            return bytes(self._checked_inode().content[pos : pos + size])

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        self.write(pos, b"".join(pieces))

    def write(self, pos: int, data: Buffer, /) -> None:
        check_not_negative(pos, 0, self._path)
        view = memoryview(data).cast("B")
        with self._disk._lock:
            inode = self._checked_inode(writing=True)
            if not view:
                return
            if pos > len(inode.content):
                inode.content.extend(bytes(pos - len(inode.content)))
            inode.content[pos : pos + len(view)] = view
            inode.modified_ms = self._disk._now_ms()

    def truncate(self, size: int, /) -> None:
        check_not_negative(size, 0, self._path)
        with self._disk._lock:
            inode = self._checked_inode(writing=True)
            del inode.content[size:]
            inode.content.extend(bytes(size - len(inode.content)))
            inode.modified_ms = self._disk._now_ms()

    def allocate(self, size: int, /) -> None:
        with self._disk._lock:
            if size > len(self._checked_inode(writing=True).content):
                self.truncate(size)

    @property
    def descriptor(self) -> int | None:
        return None

    def sync(self) -> None:
        self._checked_inode()

    def map(self) -> memoryview:
        # A copy: a view of the live bytes would make every later write that grows them fail.
        with self._disk._lock:
            return memoryview(bytes(self._checked_inode().content))

    def close(self) -> None:
        self._inode = None

    def _checked_inode(self, *, writing: bool = False) -> _Inode:
        if self._inode is None or (writing and not self._writable):
            raise OSError(errno.EBADF, "the file is closed or was opened for reading", self._path)
        return self._inode


class MemoryLock:
    def __init__(self, data: _Inode) -> None:
        self._inode = data

    def release(self) -> None:
        if self._inode.lock_holder is self:
            self._inode.lock_holder = None


class MemoryDisk:
    """A tree of names in memory, empty at first. Safe to use from several threads."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._root = _Dir(self._now_ms())
        self._lock = RLock()

    def open(self, path: str, mode: Mode = "read", /) -> MemoryFile:
        with self._lock:
            above, name = self._parent_and_name(path)
            found = above.entries.get(name)
            if mode == "create":
                if found is not None:
                    raise FileExistsError(errno.EEXIST, "the name is taken", path)
                found = above.entries[name] = _Inode(self._now_ms())
            elif found is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            if isinstance(found, _Dir):
                raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
            return MemoryFile(self, path, found, writable=mode != "read")

    def stat(self, path: str, /) -> Stat | None:
        with self._lock:
            try:
                found = self._find(split_path(path), path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            size = 0 if isinstance(found, _Dir) else len(found.content)
            return Stat(size, found.modified_ms, isinstance(found, _Dir))

    def list_dir(self, directory: str, /) -> list[str]:
        with self._lock:
            return sorted(self._directory(split_path(directory), directory).entries)

    def resolve(self, path: str, /) -> str:
        return path  # there is no current directory and there are no links

    def make_dir(self, path: str, /) -> None:
        with self._lock:
            at = self._root
            for name in split_path(path):
                found = at.entries.setdefault(name, _Dir(self._now_ms()))
                if not isinstance(found, _Dir):
                    raise FileExistsError(errno.EEXIST, f"{name} is a file, not a directory", path)
                at = found

    def remove(self, path: str, /) -> None:
        with self._lock:
            above, name = self._parent_and_name(path)
            if isinstance(self._find(split_path(path), path), _Dir):
                raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
            del above.entries[name]

    def remove_dir(self, path: str, /) -> None:
        with self._lock:
            above, name = self._parent_and_name(path)
            if self._directory(split_path(path), path).entries:
                raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
            del above.entries[name]

    def rename(self, old: str, new: str, /) -> None:
        check_same_directory(old, new)
        with self._lock:
            above, name = self._parent_and_name(old)
            source, target = self._find(split_path(old), old), above.entries.get(split_path(new)[-1])
            if target is source:
                return
            if target is not None:
                check_same_kind(isinstance(source, _Dir), isinstance(target, _Dir), new)
            if isinstance(target, _Dir) and target.entries:
                raise OSError(errno.ENOTEMPTY, "the directory is not empty", new)
            above.entries[split_path(new)[-1]] = above.entries.pop(name)

    def sync_dir(self, path: str, /) -> None:
        with self._lock:
            self._directory(split_path(path), path)

    def lock(self, path: str, /) -> MemoryLock:
        with self._lock:
            if self.stat(path) is None:
                self.open(path, "create").close()
            data = self._find(split_path(path), path)
            if isinstance(data, _Dir):
                raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
            if data.lock_holder is not None:
                raise BlockingIOError(errno.EAGAIN, "somebody holds this lock", path)
            data.lock_holder = MemoryLock(data)
            return data.lock_holder

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1_000

    def _find(self, names: tuple[str, ...], path: str) -> _Inode | _Dir:
        at: _Inode | _Dir = self._root
        for name in names:
            if not isinstance(at, _Dir):
                raise NotADirectoryError(errno.ENOTDIR, "a file stands where a directory should", path)
            if name not in at.entries:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            at = at.entries[name]
        return at

    def _directory(self, names: tuple[str, ...], path: str) -> _Dir:
        found = self._find(names, path)
        if not isinstance(found, _Dir):
            raise NotADirectoryError(errno.ENOTDIR, "a file, not a directory", path)
        return found

    def _parent_and_name(self, path: str) -> tuple[_Dir, str]:
        """The directory that holds a name, and the name."""
        names = split_path(path)
        if not names:
            raise OSError(errno.EBUSY, "the root has no name", path)
        return self._directory(names[:-1], path), names[-1]


@lru_cache(4096)
def split_path(path: str) -> tuple[str, ...]:
    """The names along a path. Relative and absolute paths start at the same root here."""
    return tuple(name for name in path.split("/") if name not in ("", "."))


def check_not_negative(pos: int, size: int, path: str) -> None:
    """Refuse what a Python slice would take as counted from the end."""
    if pos < 0 or size < 0:
        raise OSError(errno.EINVAL, f"negative position or size: {min(pos, size)}", path)


def check_same_kind(source_is_dir: bool, target_is_dir: bool, path: str) -> None:
    """Refuse to put a file in the place of a directory, or the other way about."""
    if target_is_dir and not source_is_dir:
        raise IsADirectoryError(errno.EISDIR, "a file cannot take a directory's place", path)
    if source_is_dir and not target_is_dir:
        raise NotADirectoryError(errno.ENOTDIR, "a directory cannot take a file's place", path)
