"""A disk in memory, for a log that does not outlive its process.

It keeps every promise of `Disk` except those about power cuts and `kill -9`. `sync` and `sync_dir` only check that
their target exists. To inject faults use `tidelog.testing.SimDisk`.
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
    """The bytes of one file. As on POSIX it outlives its name while it is open."""

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
    def __init__(self, disk: MemoryDisk, path: str, inode: _Inode, *, writable: bool) -> None:
        self._disk, self._path, self._writable = disk, path, writable
        self._inode: _Inode | None = inode

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
        # A copy: a view would make every later write that grows the bytearray fail.
        with self._disk._lock:
            return memoryview(bytes(self._checked_inode().content))

    def close(self) -> None:
        self._inode = None

    def _checked_inode(self, *, writing: bool = False) -> _Inode:
        if self._inode is None or (writing and not self._writable):
            raise OSError(errno.EBADF, "the file is closed or was opened for reading", self._path)
        return self._inode


class MemoryLock:
    def __init__(self, inode: _Inode) -> None:
        self._inode = inode

    def describe_holder(self, text: str) -> None:
        if self._inode.lock_holder is self:
            self._inode.content[:] = text.encode()

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
            parent, name = self._parent_and_name(path)
            entry = parent.entries.get(name)
            if mode == "create":
                if entry is not None:
                    raise FileExistsError(errno.EEXIST, "the name is taken", path)
                entry = parent.entries[name] = _Inode(self._now_ms())
            elif entry is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            if isinstance(entry, _Dir):
                raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
            return MemoryFile(self, path, entry, writable=mode != "read")

    def stat(self, path: str, /) -> Stat | None:
        with self._lock:
            try:
                entry = self._find(split_path(path), path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            size = 0 if isinstance(entry, _Dir) else len(entry.content)
            return Stat(size, entry.modified_ms, isinstance(entry, _Dir))

    def list_dir(self, directory: str, /) -> list[str]:
        with self._lock:
            return sorted(self._directory(split_path(directory), directory).entries)

    def resolve(self, path: str, /) -> str:
        return path  # there is no current directory and there are no links

    def make_dir(self, path: str, /, *, durable: bool = True) -> None:  # noqa: ARG002
        with self._lock:
            directory = self._root
            for name in split_path(path):
                entry = directory.entries.setdefault(name, _Dir(self._now_ms()))
                if not isinstance(entry, _Dir):
                    raise FileExistsError(errno.EEXIST, f"{name} is a file, not a directory", path)
                directory = entry

    def remove(self, path: str, /) -> None:
        with self._lock:
            parent, name = self._parent_and_name(path)
            if isinstance(self._find(split_path(path), path), _Dir):
                raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
            del parent.entries[name]

    def remove_dir(self, path: str, /) -> None:
        with self._lock:
            parent, name = self._parent_and_name(path)
            if self._directory(split_path(path), path).entries:
                raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
            del parent.entries[name]

    def rename(self, old: str, new: str, /) -> None:
        check_same_directory(old, new)
        with self._lock:
            parent, name = self._parent_and_name(old)
            source, target = self._find(split_path(old), old), parent.entries.get(split_path(new)[-1])
            if target is source:
                return
            if target is not None:
                check_same_kind(isinstance(source, _Dir), isinstance(target, _Dir), new)
            if isinstance(target, _Dir) and target.entries:
                raise OSError(errno.ENOTEMPTY, "the directory is not empty", new)
            parent.entries[split_path(new)[-1]] = parent.entries.pop(name)

    def link(self, old: str, new: str, /) -> None:
        with self._lock:
            inode = self._find(split_path(old), old)
            if isinstance(inode, _Dir):
                raise PermissionError(errno.EPERM, "a directory has one name", old)
            parent, name = self._parent_and_name(new)
            if name in parent.entries:
                raise FileExistsError(errno.EEXIST, "the name is taken", new)
            parent.entries[name] = inode

    def sync_dir(self, path: str, /) -> None:
        with self._lock:
            self._directory(split_path(path), path)

    def lock(self, path: str, /) -> MemoryLock:
        with self._lock:
            if self.stat(path) is None:
                self.open(path, "create").close()
            inode = self._find(split_path(path), path)
            if isinstance(inode, _Dir):
                raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
            if inode.lock_holder is not None:
                raise BlockingIOError(errno.EAGAIN, "the lock is held", path)
            inode.lock_holder = MemoryLock(inode)
            inode.lock_holder.describe_holder("")
            return inode.lock_holder

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1_000

    def _find(self, names: tuple[str, ...], path: str) -> _Inode | _Dir:
        entry: _Inode | _Dir = self._root
        for name in names:
            if not isinstance(entry, _Dir):
                raise NotADirectoryError(errno.ENOTDIR, "a file, not a directory", path)
            if name not in entry.entries:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            entry = entry.entries[name]
        return entry

    def _directory(self, names: tuple[str, ...], path: str) -> _Dir:
        entry = self._find(names, path)
        if not isinstance(entry, _Dir):
            raise NotADirectoryError(errno.ENOTDIR, "a file, not a directory", path)
        return entry

    def _parent_and_name(self, path: str) -> tuple[_Dir, str]:
        """The directory that contains `path`, and the last part of `path`."""
        names = split_path(path)
        if not names:
            raise OSError(errno.EBUSY, "the root has no name", path)
        return self._directory(names[:-1], path), names[-1]


@lru_cache(4096)
def split_path(path: str) -> tuple[str, ...]:
    """The parts of a path. Relative and absolute paths start at the same root."""
    return tuple(name for name in path.split("/") if name not in ("", "."))


def check_not_negative(pos: int, size: int, path: str) -> None:
    """Raise OSError for a negative position or size, which a slice would count from the end."""
    if pos < 0 or size < 0:
        raise OSError(errno.EINVAL, f"negative position or size: {min(pos, size)}", path)


def check_same_kind(source_is_dir: bool, target_is_dir: bool, path: str) -> None:
    """Raise OSError for a rename of a file over a directory, or of a directory over a file."""
    if target_is_dir and not source_is_dir:
        raise IsADirectoryError(errno.EISDIR, "a file cannot replace a directory", path)
    if source_is_dir and not target_is_dir:
        raise NotADirectoryError(errno.ENOTDIR, "a directory cannot replace a file", path)
