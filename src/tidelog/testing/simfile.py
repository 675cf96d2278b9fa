"""Files and locks of a simulated disk. A file is the way to one inode, whatever becomes of its name."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Literal

from tidelog.disk.memory import not_negative
from tidelog.disk.seam import write_all
from tidelog.testing.inodes import FileNode
from tidelog.testing.machine import Machine
from tidelog.types import Buffer


class SimFile:
    def __init__(self, machine: Machine, path: str, node: FileNode, *, writable: bool) -> None:
        self._machine, self._path, self._node, self._writable = machine, path, node, writable
        self._open = True
        machine._opened[id(self)] = path

    def __del__(self) -> None:
        # Like the system, which closes what the process drops; tests ask before that.
        self._machine._opened.pop(id(self), None)

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        with self._machine._lock:
            self._check()
            return self._node.size

    def read(self, pos: int, size: int, /) -> bytes:
        with self._machine._lock:
            self._check()
            not_negative(pos, size, self._path)
            self._machine._look("read", self._path)
            return self._node.read(pos, size)

    def write_pieces(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        self.write(pos, b"".join(pieces))

    def write(self, pos: int, data: Buffer, /) -> None:
        with self._machine._lock:
            self._check(writing=True)
            not_negative(pos, 0, self._path)
        write_all(self._pwrite, pos, data)

    def _pwrite(self, view: memoryview, pos: int) -> int:
        machine, node = self._machine, self._node
        with machine._lock:
            self._check(writing=True)
            asked = machine._short.randint(1, len(view)) if machine._short else len(view)
            fault = machine._operation("write", self._path, f"write {self._path}@{pos}+{asked}")
            done = min(asked, fault.partial_bytes) if fault else min(asked, machine._room(node, pos))
            if done > 0:
                node.write(machine._serials, pos, bytes(view[:done]))
                node.modified_ms = machine._now_ms()
            if fault:
                raise fault.as_error(self._path)
            if done <= 0:
                raise machine._full(self._path)
            return done

    def cut(self, size: int, /) -> None:
        self._resize("cut", size)

    def reserve(self, size: int, /) -> None:
        with self._machine._lock:
            self._check(writing=True)
            if size > self._node.size:
                self._resize("reserve", size)

    def _resize(self, call: Literal["cut", "reserve"], size: int) -> None:
        machine, node = self._machine, self._node
        with machine._lock:
            self._check(writing=True)
            not_negative(size, 0, self._path)
            machine._fallible(call, self._path, f"{call} {self._path} to {size}")
            # Only blocks take room: a file that is made longer by a cut has none there yet.
            if call == "reserve" and machine._room(node, node.size) < size - node.size:
                raise machine._full(self._path)
            node.resize(machine._serials, size)
            node.modified_ms = machine._now_ms()

    @property
    def descriptor(self) -> int | None:
        return None

    def sync(self) -> None:
        with self._machine._lock:
            self._check()
            fault = self._machine._operation("sync", self._path, f"sync {self._path}")
            if fault:
                if fault.mode == "dropped":
                    self._node.drop()
                elif fault.mode == "reverted":
                    self._node.revert()
                raise fault.as_error(self._path)
            if not self._machine.lying_sync:
                self._node.sync()

    def map(self) -> memoryview:
        with self._machine._lock:
            self._check()
            self._machine._look("read", self._path)
            return memoryview(self._node.live)

    def close(self) -> None:
        with self._machine._lock:
            self._machine._powered()
            self._open = False
            self._machine._opened.pop(id(self), None)

    def _check(self, *, writing: bool = False) -> None:
        self._machine._powered()
        if not self._open or (writing and not self._writable):
            raise OSError(errno.EBADF, "the file is closed or was opened for reading", self._path)


class SimLock:
    def __init__(self, machine: Machine, node: FileNode) -> None:
        self._machine, self._node = machine, node

    def release(self) -> None:
        with self._machine._lock:
            self._machine._powered()
            if self._node.holder is self:
                self._node.holder = None
