"""The disk of the operating system: unbuffered system calls, every error raised by the call that failed.

Buffered file objects hide short writes and report errors at close, too late to handle. One descriptor serves a file
from its first write to its last sync, because the kernel reports a failed write-back once per open file.

Files, locks and disks belong to the process that made them (`process`): in a forked child every call that could change
a file raises Forked.

`FsyncThread` runs fdatasync for an event loop. The compiled thread never takes the interpreter lock, so it does not
wait for a busy event loop before or after the sync:

    request ──descriptor──► pipe ──► fdatasync ──► pipe ──errno, or 0──► result
                                                    ▲
                                           watched by the event loop
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat as statmod
import struct
from collections.abc import Sequence
from contextlib import suppress
from os import getpid
from select import POLLIN, poll
from threading import Thread
from typing import Final

from tidelog import native
from tidelog.disk import process
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
_SYNC_MESSAGE: Final = struct.Struct("=i")  # a descriptor, or an errno


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
            f"files cannot have the mode {mode:o}: the owner must be able to read and write them and no execute bit "
            "may be set; nothing was opened"
        )
    return mode


class PosixFile:
    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd, self._pid = path, fd, getpid()
        process.register(self)

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        with suppress(OSError):
            self.close()

    def _owned_fd(self) -> int:
        """The descriptor, for the process that opened the file."""
        process.check_process(self._path, self._pid)
        return self._fd

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return os.fstat(self._fd if self._fd >= 0 else self._owned_fd()).st_size

    def read(self, pos: int, size: int, /) -> bytes:
        # `pread` into new bytes, not `readinto` a bytearray: measured five times faster on machines whose kernel copies
        # alias pages, and it cannot return stale buffer contents.
        data = os.pread(self._fd if self._fd >= 0 else self._owned_fd(), size, pos)
        if len(data) == size or not data:
            return data
        pieces = [data]
        total = len(data)
        while total < size and (data := os.pread(self._fd, size - total, pos + total)):
            pieces.append(data)
            total += len(data)
        return b"".join(pieces)

    def write(self, pos: int, data: Buffer, /) -> None:
        write_all(self._pwrite, pos, data)

    def _pwrite(self, piece: memoryview, pos: int) -> int:
        return os.pwrite(self._owned_fd(), piece, pos)

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        write_all_buffers(self._pwritev, pos, pieces)

    def _pwritev(self, pieces: Sequence[Buffer], pos: int) -> int:
        if getpid() != self._pid:  # not through `_owned_fd`: two calls less per batch
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

    def start_writeback(self, pos: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):  # Linux begins to write dirty pages that are said not to be needed
            os.posix_fadvise(self._owned_fd(), pos, size, os.POSIX_FADV_DONTNEED)

    def map(self) -> memoryview:
        if self.size() == 0:
            return memoryview(b"")  # mmap refuses an empty file
        return memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        # A leaked descriptor would keep a removed file's blocks allocated.
        with suppress(OSError):
            self.close()


class PosixLock:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        process.register(self)

    def describe_holder(self, text: str) -> None:
        if self._fd < 0:
            return
        content = f"pid={os.getpid()}\n{text}".encode()
        with suppress(OSError):  # informational; may fail on a full disk
            os.pwrite(self._fd, content, 0)
            os.ftruncate(self._fd, len(content))

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        # The parent keeps the lock through its own descriptor. Left open here, the lock would outlive the parent.
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
    """The local file system. Only the process that created the object can change files through it.

    `file_mode` is the mode of new files, less the umask; a new directory is searchable by every class of users that can
    read files. None: the value of TIDELOG_FILE_MODE (octal, such as 640), else 600: this user only. Existing files keep
    their mode.
    """

    def __init__(self, file_mode: int | None = None) -> None:
        self._pid = getpid()
        self._file_mode = _file_mode_from_environment() if file_mode is None else _check_mode(file_mode)
        self._directory_mode = self._file_mode | 0o700 | (self._file_mode & 0o444) >> 2

    def __reduce__(self) -> tuple[type[PosixDisk], tuple[int]]:
        return PosixDisk, (self._file_mode,)  # the process that unpickles it owns the copy

    def open(self, path: str, mode: Mode = "read", /) -> PosixFile:
        if mode != "read":
            process.check_process(path, self._pid)
        return PosixFile(path, os.open(path, _FLAGS[mode] | os.O_CLOEXEC, self._file_mode))

    def stat(self, path: str, /) -> Stat | None:
        try:
            info = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stat(info.st_size, info.st_mtime_ns // 1_000_000, statmod.S_ISDIR(info.st_mode))

    def free(self, path: str, /) -> int | None:
        """Bytes that this process can still allocate on the device of `path`; None if unknown."""
        try:
            info = os.statvfs(path)
        except OSError:
            return None
        return info.f_bavail * info.f_frsize

    def list_dir(self, directory: str, /) -> list[str]:
        return sorted(os.listdir(directory or "."))

    def resolve(self, path: str, /) -> str:
        return os.path.realpath(path)

    def make_dir(self, path: str, /, *, durable: bool = True) -> None:
        process.check_process(path, self._pid)
        path = path.rstrip("/") or "/"
        if not self._make_missing_dirs(path, durable) and durable and path not in ("/", "."):
            # It existed, but its creator may have been killed before the name was synced.
            with suppress(PermissionError):  # a parent that this process may not open was created by another user
                self.sync_dir(parent_dir(path))

    def _make_missing_dirs(self, path: str, durable: bool) -> bool:
        if os.path.isdir(path):
            return False
        parent = parent_dir(path)
        self._make_missing_dirs(parent, durable)
        with suppress(FileExistsError):
            os.mkdir(path, self._directory_mode)
        if not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, "a file of that name exists", path)
        if durable:  # otherwise a power cut can lose the directory and every synced file in it
            self.sync_dir(parent)
        return True

    def remove(self, path: str, /) -> None:
        process.check_process(path, self._pid)
        os.unlink(path)

    def remove_dir(self, path: str, /) -> None:
        process.check_process(path, self._pid)
        os.rmdir(path)

    def rename(self, old: str, new: str, /) -> None:
        process.check_process(old, self._pid)
        check_same_directory(old, new)
        os.replace(old, new)

    def link(self, old: str, new: str, /) -> None:
        process.check_process(old, self._pid)
        os.link(old, new, follow_symlinks=False)

    def sync_dir(self, path: str, /) -> None:
        process.check_process(path, self._pid)
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str, /) -> PosixLock:
        process.check_process(path, self._pid)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._file_mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        lock = PosixLock(fd)
        lock.describe_holder("")
        return lock


class FsyncThread:
    """Runs one sync at a time. Only the holder of the commit lock calls `request` and `close`; any thread may call
    `result`."""

    def __init__(self, name: str) -> None:
        request_reader, self._request_fd = os.pipe()
        self.descriptor, result_writer = os.pipe()
        self._thread_fds = (request_reader, result_writer)
        os.set_blocking(self.descriptor, False)
        # A daemon: a sync whose result was not read has acknowledged nothing, so the process may exit.
        self._thread = Thread(target=native.fsync_loop, args=self._thread_fds, name=name, daemon=True)
        self._thread.start()
        process.register(self)

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        # Writing to these pipes could stop the parent's thread, and reading would steal its results.
        self._close_pipes()

    def request(self, descriptor: int) -> None:
        """Start a sync of this descriptor."""
        os.write(self._request_fd, _SYNC_MESSAGE.pack(descriptor))

    def result(self) -> OSError | None:
        """The result of the requested sync: its error, or None. Raises BlockingIOError while it is running, and if
        another thread has read the result."""
        (code,) = _SYNC_MESSAGE.unpack(os.read(self.descriptor, _SYNC_MESSAGE.size))
        return OSError(code, os.strerror(code)) if code else None

    def wait(self, seconds: float) -> None:
        """Return when a result can be read, or after `seconds`."""
        waiter = poll()  # `select` cannot watch descriptors above 1023
        waiter.register(self.descriptor, POLLIN)
        waiter.poll(seconds * 1000)

    def close(self) -> None:
        """Stop the thread after the running sync. By a message, not by end of file: a forked child may hold the pipe
        open."""
        if self._request_fd < 0:
            return
        self.request(-1)
        self._thread.join()
        self._close_pipes()

    def _close_pipes(self) -> None:
        descriptors = (*self._thread_fds, self._request_fd, self.descriptor)
        # Cleared before closing: the numbers are reused as soon as they are closed.
        self._thread_fds, self._request_fd, self.descriptor = (-1, -1), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
