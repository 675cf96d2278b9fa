"""A disk in memory that loses power, tears writes, fails syncs and runs full, on demand and by seed.

It keeps the promises of `disk/interface.py` and no more: unsynced changes may be lost in every way that
`crash_images` allows. A crash is tested in one of two ways.

    1. Cut the power        disk.cut_power_at(n); run the workload until PowerOff; disk.images()
    2. Observe              disk.on_op = examine; run the workload once; examine at every operation

After the power is off every call of the Disk protocol raises PowerOff, while the calls for tests (`images`,
`crash_image`, `reboot`, `tree`, `read_file`, `digest`) still work. Images and reboots are new, healthy disks without
the faults, capacity, numbering and observer of this one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from random import Random
from typing import Literal, NamedTuple

from tidelog.disk.interface import Mode, Stat, check_same_directory, parent_dir, write_all
from tidelog.disk.memory import check_not_negative, check_same_kind, split_path
from tidelog.testing.crash_images import (
    ALL_POLICIES,
    CrashPoint,
    DirNode,
    FileNode,
    Link,
    Move,
    Node,
    Policy,
    Unlink,
    copy_tree,
    walk_tree,
)
from tidelog.testing.machine import Machine
from tidelog.types import Buffer


class SimFile:
    def __init__(self, machine: Machine, path: str, node: FileNode, *, writable: bool) -> None:
        self._machine, self._path, self._node, self._writable = machine, path, node, writable
        self._open = True
        machine._open_paths[id(self)] = path

    def __del__(self) -> None:
        # Like the system, which closes what the process drops; tests ask before that.
        self._machine._open_paths.pop(id(self), None)

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        with self._machine._lock:
            self._check_usable()
            return self._node.size

    def read(self, pos: int, size: int, /) -> bytes:
        with self._machine._lock:
            self._check_usable()
            check_not_negative(pos, size, self._path)
            self._machine._check_read_fault("read", self._path)
            return self._node.read(pos, size)

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        self.write(pos, b"".join(pieces))

    def write(self, pos: int, data: Buffer, /) -> None:
        with self._machine._lock:
            self._check_usable(writing=True)
            check_not_negative(pos, 0, self._path)
        write_all(self._pwrite, pos, data)

    def _pwrite(self, view: memoryview, pos: int) -> int:
        machine, node = self._machine, self._node
        with machine._lock:
            self._check_usable(writing=True)
            asked = machine._short_write_random.randint(1, len(view)) if machine._short_write_random else len(view)
            fault = machine._count_operation("write", self._path, f"write {self._path}@{pos}+{asked}")
            done = min(asked, fault.partial_bytes) if fault else min(asked, machine._writable_bytes(node, pos))
            if done > 0:
                node.write(machine._serials, pos, bytes(view[:done]))
                node.modified_ms = machine._now_ms()
            if fault:
                raise fault.as_error(self._path)
            if done <= 0:
                raise machine._disk_full_error(self._path)
            return done

    def truncate(self, size: int, /) -> None:
        self._resize("cut", size)

    def allocate(self, size: int, /) -> None:
        with self._machine._lock:
            self._check_usable(writing=True)
            if size > self._node.size:
                self._resize("reserve", size)

    def _resize(self, call: Literal["cut", "reserve"], size: int) -> None:
        machine, node = self._machine, self._node
        with machine._lock:
            self._check_usable(writing=True)
            check_not_negative(size, 0, self._path)
            machine._run_fallible(call, self._path, f"{call} {self._path} to {size}")
            # Only blocks use capacity: a file that truncate makes longer has none there yet.
            if call == "reserve" and machine._writable_bytes(node, node.size) < size - node.size:
                raise machine._disk_full_error(self._path)
            node.resize(machine._serials, size)
            node.modified_ms = machine._now_ms()

    @property
    def descriptor(self) -> int | None:
        return None

    def sync(self) -> None:
        with self._machine._lock:
            self._check_usable()
            fault = self._machine._count_operation("sync", self._path, f"sync {self._path}")
            if fault:
                if fault.mode == "dropped":
                    self._node.drop_pending()
                elif fault.mode == "reverted":
                    self._node.revert()
                raise fault.as_error(self._path)
            if not self._machine.ignores_syncs:
                self._node.sync()

    def map(self) -> memoryview:
        with self._machine._lock:
            self._check_usable()
            self._machine._check_read_fault("read", self._path)
            return memoryview(self._node.live)

    def close(self) -> None:
        with self._machine._lock:
            self._machine._check_powered()
            self._open = False
            self._machine._open_paths.pop(id(self), None)

    def _check_usable(self, *, writing: bool = False) -> None:
        self._machine._check_powered()
        if not self._open or (writing and not self._writable):
            raise OSError(errno.EBADF, "the file is closed or was opened for reading", self._path)


class SimLock:
    def __init__(self, machine: Machine, node: FileNode) -> None:
        self._machine, self._node = machine, node

    def describe_holder(self, text: str) -> None:
        """No effect: the text is informational, and part of no image."""

    def release(self) -> None:
        with self._machine._lock:
            self._machine._check_powered()
            if self._node.lock_holder is self:
                self._node.lock_holder = None


class CrashImage(NamedTuple):
    label: str  # how the survivors were chosen
    disk: SimDisk  # what a restart would find


class SimDisk(Machine):
    """A simulated disk, empty at first. Safe to use from several threads."""

    advisory_files: frozenset[str] = frozenset({"SYNCED"})
    """Names of files that prove what others contain and that are never synced: images that differ only in their bytes
    are one image. Empty: each is an image of its own, which doubles the states of most histories."""

    # The Disk protocol.

    def open(self, path: str, mode: Mode = "read", /) -> SimFile:
        with self._lock:
            self._check_powered()
            above, name = self._parent_and_name(path)
            found = above.live.get(name)
            if mode == "create":
                if found is not None:
                    raise FileExistsError(errno.EEXIST, "the name is taken", path)
                self._run_fallible("create", path, f"create {path}")
                found = self._link(above, name, FileNode(b"", self._now_ms()))
            else:
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                self._check_read_fault("open", path)
            return SimFile(self, path, _require_file(found, path), writable=mode != "read")

    def stat(self, path: str, /) -> Stat | None:
        with self._lock:
            self._check_powered()
            try:
                found = self._find(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if isinstance(found, DirNode):
                return Stat(0, found.modified_ms, True)
            return Stat(found.size, found.modified_ms, False)

    def free(self, path: str, /) -> int | None:  # noqa: ARG002
        """Bytes that may still be written; None without a capacity."""
        with self._lock:
            self._check_powered()
            return self._free_bytes()

    def list_dir(self, directory: str, /) -> list[str]:
        with self._lock:
            self._check_powered()
            return sorted(_require_directory(self._find(directory), directory).live)

    def resolve(self, path: str, /) -> str:
        return path  # there is no current directory and there are no links

    def make_dir(self, path: str, /, *, durable: bool = True) -> None:
        with self._lock:
            self._check_powered()
            above, walked = self._root, "/" if path.startswith("/") else ""
            names = split_path(path)
            for number, name in enumerate(names, 1):
                walked += name
                found = above.live.get(name)
                if isinstance(found, FileNode):
                    raise FileExistsError(errno.EEXIST, f"{walked} is a file, not a directory", path)
                if found is None:
                    self._run_fallible("mkdir", walked, f"mkdir {walked}")
                    found = DirNode(self._now_ms())
                    self._link(above, name, found)
                    if durable:
                        self._sync_directory(above, parent_dir(walked))
                elif number == len(names) and durable:
                    # The process that created it may have been killed before the sync.
                    self._sync_directory(above, parent_dir(walked))
                above = found
                walked += "/"

    def remove(self, path: str, /) -> None:
        with self._lock:
            self._check_powered()
            above, name = self._parent_and_name(path)
            _require_file(self._find(path), path)
            self._run_fallible("remove", path, f"remove {path}")
            above.change(Unlink(next(self._serials), name))

    def remove_dir(self, path: str, /) -> None:
        with self._lock:
            self._check_powered()
            above, name = self._parent_and_name(path)
            _require_empty(_require_directory(self._find(path), path), path)
            self._run_fallible("rmdir", path, f"rmdir {path}")
            above.change(Unlink(next(self._serials), name))

    def rename(self, old: str, new: str, /) -> None:
        with self._lock:
            self._check_powered()
            check_same_directory(old, new)
            above, name = self._parent_and_name(old)
            _, new_name = self._parent_and_name(new)
            source, target = self._find(old), above.live.get(new_name)
            if target is source:
                return
            if target is not None:
                check_same_kind(isinstance(source, DirNode), isinstance(target, DirNode), new)
                if isinstance(target, DirNode):
                    _require_empty(target, new)
            self._run_fallible("rename", old, f"rename {old} -> {new}")
            above.change(Move(next(self._serials), name, new_name))

    def link(self, old: str, new: str, /) -> None:
        with self._lock:
            self._check_powered()
            node = self._find(old)
            if isinstance(node, DirNode):
                raise PermissionError(errno.EPERM, "a directory has one name", old)
            above, name = self._parent_and_name(new)
            if name in above.live:
                raise FileExistsError(errno.EEXIST, "the name is taken", new)
            self._run_fallible("link", new, f"link {old} -> {new}")
            self._link(above, name, node)

    def sync_dir(self, path: str, /) -> None:
        with self._lock:
            self._check_powered()
            self._sync_directory(_require_directory(self._find(path), path), path)

    def lock(self, path: str, /) -> SimLock:
        with self._lock:
            self._check_powered()
            above, name = self._parent_and_name(path)
            node = above.live.get(name)
            if node is None:
                self._run_fallible("lock", path, f"create {path}")
                node = self._link(above, name, FileNode(b"", self._now_ms()))
            else:
                self._check_read_fault("lock", path)
            node = _require_file(node, path)
            if node.lock_holder is not None:
                raise BlockingIOError(errno.EAGAIN, "the lock is held", path)
            lock = SimLock(self, node)
            node.lock_holder = lock
            return lock

    # What a restart finds.

    def images(
        self, policies: Iterable[Policy] = ALL_POLICIES, random: Random | None = None, *, limit: int | None = None
    ) -> Iterator[CrashImage]:
        """Return the trees that a restart could find if the power failed now; no two alike, at most `limit`.

        They are taken when called: later operations of the disk do not change them.
        """
        with self._lock:
            instant = CrashPoint(self._root, self.advisory_files)
        choices = instant.choices(policies, random or Random(0), limit)
        return (CrashImage(label, self._from_tree(root)) for label, root in instant.trees(choices))

    def crash_image(self, keep: Literal["none", "all"] | Random = "none") -> SimDisk:
        """Return one tree that a restart could find if the power failed now: with none, all or some pending changes."""
        with self._lock:
            instant = CrashPoint(self._root)
        if isinstance(keep, Random):
            return self._from_tree(instant.tree(instant.random_mask(keep)))
        return self._from_tree(instant.tree(instant.full_mask if keep == "all" else 0))

    def reboot(self) -> SimDisk:
        """Return the disk that a new process finds after `kill -9`: all live bytes, pending or not, and no lock held.

        The original disk is not changed, as with images.
        """
        with self._lock:
            disk = self._from_tree(copy_tree(self._root))
            disk._serials = self._serials
            return disk

    # The test bench: no faults, no numbers, and the power may be off.

    def read_file(self, path: str) -> bytes:
        """A whole file as the process sees it, or saw it last."""
        with self._lock:
            return _require_file(self._find(path), path).live

    def write_file(self, path: str, data: Buffer) -> None:
        """Create a file, durable at once, with every directory above it."""
        with self._lock:
            above = self._root
            *directories, name = split_path(path)
            for part in directories:
                found = above.live.get(part) or self._link(above, part, DirNode(self._now_ms()))
                above.sync()
                above = _require_directory(found, path)
            file = above.live.get(name) or self._link(above, name, FileNode(b"", self._now_ms()))
            above.sync()
            _require_file(file, path).set_content(bytes(data))

    def flip_bit(self, path: str, pos: int, bit: int) -> None:
        """Flip one bit of a file, on disk and in every cache."""
        with self._lock:
            _require_file(self._find(path), path).flip_bit(pos, bit)

    def tree(self) -> dict[str, bytes]:
        """Every file as the process sees it, by path from the root, sorted."""
        with self._lock:
            return {path: node.live for path, node in walk_tree(self._root) if isinstance(node, FileNode)}

    def digest(self) -> bytes:
        """A fingerprint of all names, sizes and contents as the process sees them."""
        pieces: list[bytes] = []
        with self._lock:
            _digest_parts(self._root, "", pieces)
        return blake2b(b"".join(pieces), digest_size=16).digest()

    # Inside.

    def _from_tree(self, root: DirNode) -> SimDisk:
        disk = SimDisk(clock=self._clock)
        disk._root = root
        return disk

    def _sync_directory(self, node: DirNode, path: str) -> None:
        self._run_fallible("sync_dir", path, f"sync_dir {path or '.'}")
        if not self.ignores_syncs:
            node.sync()

    def _link(self, above: DirNode, name: str, node: Node) -> Node:
        above.change(Link(next(self._serials), name, node))
        return node

    def _find(self, path: str) -> Node:
        return self._walk(split_path(path), path)

    def _walk(self, names: tuple[str, ...], path: str) -> Node:
        at: Node = self._root
        for name in names:
            if not isinstance(at, DirNode):
                raise NotADirectoryError(errno.ENOTDIR, "a file, not a directory", path)
            found = at.live.get(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            at = found
        return at

    def _parent_and_name(self, path: str) -> tuple[DirNode, str]:
        """The directory that holds a name, and the name."""
        names = split_path(path)
        if not names:
            raise OSError(errno.EBUSY, "the root has no name", path)
        return _require_directory(self._walk(names[:-1], path), path), names[-1]


def _require_file(node: Node, path: str) -> FileNode:
    if isinstance(node, DirNode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
    return node


def _require_directory(node: Node, path: str) -> DirNode:
    if isinstance(node, FileNode):
        raise NotADirectoryError(errno.ENOTDIR, "a file, not a directory", path)
    return node


def _digest_parts(node: DirNode, path: str, pieces: list[bytes]) -> None:
    """Names, sizes and contents below a directory, in the order of `walk`; a sweep asks for little else."""
    for name in sorted(node.live):
        child = node.live[name]
        full = path + name
        if isinstance(child, FileNode):
            content = child.live
            pieces += (f"{len(full)} {full} {len(content)} ".encode(), content)
        else:
            pieces.append(f"{len(full)} {full} -1 ".encode())
            _digest_parts(child, f"{full}/", pieces)


def _require_empty(node: DirNode, path: str) -> None:
    if node.live:
        raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
