"""The real disk: raw `os` calls, no buffering, every error where it happens.

Buffered file objects hide short writes and report errors at close, when nobody can act on
them any more. One descriptor serves a file from its first write to its last sync, because
the kernel reports a failed write-back once per open file.

Files, locks and disks belong to the process that made them (`fork`): in a forked child all that could change a file
raises Forked.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat as statmod
from collections.abc import Sequence
from contextlib import suppress
from os import getpid
from typing import Final

from tidelog.disk import fork
from tidelog.disk.interface import Mode, Stat, check_same_directory, parent_dir, write_all, write_all_buffers
from tidelog.errors import BadInput
from tidelog.types import Buffer

_FLAGS = {
    "read": os.O_RDONLY,
    "write": os.O_RDWR,
    "create": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


FILE_MODE: Final = 0o600
FILE_MODE_SETTING: Final = "TIDELOG_FILE_MODE"


def _file_mode_from_environment() -> int:
    text = os.environ.get(FILE_MODE_SETTING, "").strip()
    if not text:
        return FILE_MODE
    if not re.fullmatch("0?[0-7]{3}", text):
        raise BadInput(f"{FILE_MODE_SETTING} is {text!r}, it must be three octal digits, as 640; nothing was opened")
    return _check_mode(int(text, 8))


def _check_mode(mode: int) -> int:
    if mode & ~0o666 or mode & 0o600 != 0o600:
        raise BadInput(
            f"files cannot have the mode {mode:o}: the owner reads and writes them, and nobody executes them; nothing "
            "was opened"
        )
    return mode


class PosixFile:
    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd, self._pid = path, fd, fork.process_id()
        fork.register(self)

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        with suppress(OSError):
            self.close()

    def _owned_fd(self) -> int:
        """The descriptor, for the process that opened the file."""
        fork.check_process(self._path, self._pid)
        return self._fd

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return os.fstat(self._fd if self._fd >= 0 else self._owned_fd()).st_size

    def read(self, pos: int, size: int, /) -> bytes:
        # `pread` into fresh bytes, never `readinto` a bytearray: measured five times faster on
        # machines whose kernel copies alias pages, and it cannot hand out stale buffer contents.
        data = os.pread(self._fd if self._fd >= 0 else self._owned_fd(), size, pos)
        if len(data) == size or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, pos + got)):
            pieces.append(data)
            got += len(data)
        return b"".join(pieces)

    def write(self, pos: int, data: Buffer, /) -> None:
        write_all(self._pwrite, pos, data)

    def _pwrite(self, piece: memoryview, pos: int) -> int:
        return os.pwrite(self._owned_fd(), piece, pos)

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        write_all_buffers(self._pwritev, pos, pieces)

    def _pwritev(self, pieces: Sequence[Buffer], pos: int) -> int:
        if getpid() != self._pid:  # here and not by `_own`: two calls less for each batch
            self._owned_fd()
        return os.pwritev(self._fd, pieces, pos)

    def truncate(self, size: int, /) -> None:
        os.ftruncate(self._owned_fd(), size)

    def allocate(self, size: int, /) -> None:
        if size > self.size():
            os.posix_fallocate(self._owned_fd(), 0, size)

    def sync(self) -> None:
        if getpid() != self._pid:
            self._owned_fd()
        if self._fd < 0:
            raise OSError(errno.EBADF, "the file is closed", self._path)
        os.fdatasync(self._fd)

    @property
    def descriptor(self) -> int | None:
        return self._fd if self._fd >= 0 else None

    def map(self) -> memoryview:
        if self.size() == 0:
            return memoryview(b"")  # mmap refuses an empty file
        return memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        # Descriptors are numbers that are used again, so a forgotten one must not linger.
        with suppress(OSError):
            self.close()


class PosixLock:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        fork.register(self)

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        # The lock stays the parent's, whose descriptor is open. Kept open here, it would outlive the parent.
        with suppress(OSError):
            self.release()

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)  # closing the last descriptor drops the flock

    def __del__(self) -> None:
        with suppress(OSError):
            self.release()


class PosixDisk:
    """A disk of the operating system; paths are as the process sees them. Only the process that made it changes files
    with it.

    `file_mode` is the mode of the files it makes, less the umask; directories can be searched by everybody who may
    read files. None: as TIDELOG_FILE_MODE says (octal, such as 640), else 600, for this user alone. What is there
    already keeps its mode.
    """

    def __init__(self, file_mode: int | None = None) -> None:
        self._pid = fork.process_id()
        self._file_mode = _file_mode_from_environment() if file_mode is None else _check_mode(file_mode)
        self._directory_mode = self._file_mode | 0o700 | (self._file_mode & 0o444) >> 2

    def __reduce__(self) -> tuple[type[PosixDisk], tuple[int]]:
        return PosixDisk, (self._file_mode,)  # the process that unpickles it owns the copy

    def open(self, path: str, mode: Mode = "read", /) -> PosixFile:
        if mode != "read":
            fork.check_process(path, self._pid)
        return PosixFile(path, os.open(path, _FLAGS[mode] | os.O_CLOEXEC, self._file_mode))

    def stat(self, path: str, /) -> Stat | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stat(found.st_size, found.st_mtime_ns // 1_000_000, statmod.S_ISDIR(found.st_mode))

    def free(self, path: str, /) -> int | None:
        """Bytes that this process may still allocate on the device of `path`."""
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def list_dir(self, directory: str, /) -> list[str]:
        return sorted(os.listdir(directory or "."))

    def resolve(self, path: str, /) -> str:
        return os.path.realpath(path)

    def make_dir(self, path: str, /) -> None:
        fork.check_process(path, self._pid)
        path = path.rstrip("/") or "/"
        if not self._make_missing_dirs(path) and path not in ("/", "."):
            # It was there already, but whoever made it may have been killed before its name was synced.
            with suppress(PermissionError):  # a parent we may not open was not made by us
                self.sync_dir(parent_dir(path))

    def _make_missing_dirs(self, path: str) -> bool:
        if os.path.isdir(path):
            return False
        above = parent_dir(path)
        self._make_missing_dirs(above)
        with suppress(FileExistsError):
            os.mkdir(path, self._directory_mode)
        if not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, "there is a file of that name", path)
        # Without this a power cut can lose the directory and, with it, every file synced inside.
        self.sync_dir(above)
        return True

    def remove(self, path: str, /) -> None:
        fork.check_process(path, self._pid)
        os.unlink(path)

    def remove_dir(self, path: str, /) -> None:
        fork.check_process(path, self._pid)
        os.rmdir(path)

    def rename(self, old: str, new: str, /) -> None:
        fork.check_process(old, self._pid)
        check_same_directory(old, new)
        os.replace(old, new)

    def sync_dir(self, path: str, /) -> None:
        fork.check_process(path, self._pid)
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str, /) -> PosixLock:
        fork.check_process(path, self._pid)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._file_mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # for whoever looks; on a full disk there may be no room for it
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"pid={os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return PosixLock(fd)


def processor_count() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))
