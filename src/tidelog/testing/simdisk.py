"""A disk in memory that loses power, tears writes, fails syncs and runs full, all on demand and by seed.

It behaves as `disk/seam.py` promises and not a bit better: what was not synced may be lost in
every way that `inodes` allows. A crash is tried in one of two ways.

    1. Cut the power        disk.cut_power_at(n); run the workload until PowerOff; disk.images()
    2. Look while it runs   disk.on_op = examine; run the workload once; examine at every operation

After the power is off every call of the Disk protocol raises PowerOff, while the test bench
(`images`, `crash_image`, `reboot`, `tree`, `read_file`, `digest`) goes on working.

Images and reboots are healthy disks of their own: faults, capacity, numbering and observer
stay behind.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from random import Random
from typing import Literal, NamedTuple

from tidelog.disk.memory import parts, same_kind
from tidelog.disk.seam import Mode, Stat, parent, same_directory
from tidelog.testing.images import ALL, Instant, Policy
from tidelog.testing.inodes import DirNode, FileNode, Link, Move, Node, Unlink, copy_tree, walk
from tidelog.testing.machine import Machine
from tidelog.testing.simfile import SimFile, SimLock
from tidelog.types import Buffer


class Image(NamedTuple):
    label: str  # how the survivors were chosen
    disk: SimDisk  # what a restart would find


class SimDisk(Machine):
    """A simulated disk, empty at first. Safe to use from several threads."""

    # The Disk protocol.

    def open(self, path: str, mode: Mode = "read", /) -> SimFile:
        with self._lock:
            self._powered()
            above, name = self._place(path)
            found = above.live.get(name)
            if mode == "create":
                if found is not None:
                    raise FileExistsError(errno.EEXIST, "the name is taken", path)
                self._fallible("create", path, f"create {path}")
                found = self._link(above, name, FileNode(b"", self._now_ms()))
            else:
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                self._look("open", path)
            return SimFile(self, path, _file(found, path), writable=mode != "read")

    def stat(self, path: str, /) -> Stat | None:
        with self._lock:
            self._powered()
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
            self._powered()
            return self._free()

    def names(self, directory: str, /) -> list[str]:
        with self._lock:
            self._powered()
            return sorted(_directory(self._find(directory), directory).live)

    def absolute(self, path: str, /) -> str:
        return path  # there is no current directory and there are no links

    def make_dir(self, path: str, /) -> None:
        with self._lock:
            self._powered()
            above, walked = self._root, "/" if path.startswith("/") else ""
            names = parts(path)
            for number, name in enumerate(names, 1):
                walked += name
                found = above.live.get(name)
                if isinstance(found, FileNode):
                    raise FileExistsError(errno.EEXIST, f"{walked} is a file, not a directory", path)
                if found is None:
                    self._fallible("mkdir", walked, f"mkdir {walked}")
                    found = DirNode(self._now_ms())
                    self._link(above, name, found)
                    self._sync_names(above, parent(walked))
                elif number == len(names):
                    # Whoever made it may have been killed before the sync.
                    self._sync_names(above, parent(walked))
                above = found
                walked += "/"

    def remove(self, path: str, /) -> None:
        with self._lock:
            self._powered()
            above, name = self._place(path)
            _file(self._find(path), path)
            self._fallible("remove", path, f"remove {path}")
            above.change(Unlink(next(self._serials), name))

    def remove_dir(self, path: str, /) -> None:
        with self._lock:
            self._powered()
            above, name = self._place(path)
            _empty(_directory(self._find(path), path), path)
            self._fallible("rmdir", path, f"rmdir {path}")
            above.change(Unlink(next(self._serials), name))

    def rename(self, old: str, new: str, /) -> None:
        with self._lock:
            self._powered()
            same_directory(old, new)
            above, name = self._place(old)
            _, new_name = self._place(new)
            source, target = self._find(old), above.live.get(new_name)
            if target is source:
                return
            if target is not None:
                same_kind(isinstance(source, DirNode), isinstance(target, DirNode), new)
                if isinstance(target, DirNode):
                    _empty(target, new)
            self._fallible("rename", old, f"rename {old} -> {new}")
            above.change(Move(next(self._serials), name, new_name))

    def sync_dir(self, path: str, /) -> None:
        with self._lock:
            self._powered()
            self._sync_names(_directory(self._find(path), path), path)

    def lock(self, path: str, /) -> SimLock:
        with self._lock:
            self._powered()
            above, name = self._place(path)
            node = above.live.get(name)
            if node is None:
                self._fallible("lock", path, f"create {path}")
                node = self._link(above, name, FileNode(b"", self._now_ms()))
            else:
                self._look("lock", path)
            node = _file(node, path)
            if node.holder is not None:
                raise BlockingIOError(errno.EAGAIN, "somebody holds this lock", path)
            lock = SimLock(self, node)
            node.holder = lock
            return lock

    # What a restart finds.

    def images(
        self, policies: Iterable[Policy] = ALL, random: Random | None = None, *, limit: int | None = None
    ) -> Iterator[Image]:
        """What a restart could find if the power failed now; no two alike, at most `limit` of them.

        Taken when called: the disk may go on while the images are looked at, and notices nothing.
        """
        with self._lock:
            instant = Instant(self._root)
        choices = instant.choices(policies, random or Random(0), limit)
        return (Image(label, self._restart(root)) for label, root in instant.trees(choices))

    def crash_image(self, keep: Literal["none", "all"] | Random = "none") -> SimDisk:
        """One thing a restart could find if the power failed now: none, all or some of what is pending."""
        with self._lock:
            instant = Instant(self._root)
        if isinstance(keep, Random):
            return self._restart(instant.tree(instant.draw(keep)))
        return self._restart(instant.tree(instant.everything if keep == "all" else 0))

    def reboot(self) -> SimDisk:
        """What a new process finds after `kill -9`: all that was live, pending or not, and no lock held.

        The disk it is taken from goes on undisturbed, as with images.
        """
        with self._lock:
            disk = self._restart(copy_tree(self._root))
            disk._serials = self._serials
            return disk

    # The test bench: no faults, no numbers, and the power may be off.

    def read_file(self, path: str) -> bytes:
        """A whole file as the process sees it, or saw it last."""
        with self._lock:
            return _file(self._find(path), path).live

    def write_file(self, path: str, data: Buffer) -> None:
        """Put a file there, durable at once, as is every name in the directories above it."""
        with self._lock:
            above = self._root
            *directories, name = parts(path)
            for part in directories:
                found = above.live.get(part) or self._link(above, part, DirNode(self._now_ms()))
                above.sync()
                above = _directory(found, path)
            file = above.live.get(name) or self._link(above, name, FileNode(b"", self._now_ms()))
            above.sync()
            _file(file, path).become(bytes(data))

    def flip(self, path: str, pos: int, bit: int) -> None:
        """Turn one bit of a file over, at rest and in every cache."""
        with self._lock:
            _file(self._find(path), path).flip(pos, bit)

    def tree(self) -> dict[str, bytes]:
        """Every file as the process sees it, by path from the root, sorted."""
        with self._lock:
            return {path: node.live for path, node in walk(self._root) if isinstance(node, FileNode)}

    def digest(self) -> bytes:
        """A fingerprint of all names, sizes and contents as the process sees them."""
        pieces: list[bytes] = []
        with self._lock:
            _describe(self._root, "", pieces)
        return blake2b(b"".join(pieces), digest_size=16).digest()

    # Inside.

    def _restart(self, root: DirNode) -> SimDisk:
        disk = SimDisk(clock=self._clock)
        disk._root = root
        return disk

    def _sync_names(self, node: DirNode, path: str) -> None:
        self._fallible("sync_dir", path, f"sync_dir {path or '.'}")
        if not self.lying_sync:
            node.sync()

    def _link(self, above: DirNode, name: str, node: Node) -> Node:
        above.change(Link(next(self._serials), name, node))
        return node

    def _find(self, path: str) -> Node:
        return self._walk(parts(path), path)

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

    def _place(self, path: str) -> tuple[DirNode, str]:
        """The directory that holds a name, and the name."""
        names = parts(path)
        if not names:
            raise OSError(errno.EBUSY, "the root has no name", path)
        return _directory(self._walk(names[:-1], path), path), names[-1]


def _file(node: Node, path: str) -> FileNode:
    if isinstance(node, DirNode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
    return node


def _directory(node: Node, path: str) -> DirNode:
    if isinstance(node, FileNode):
        raise NotADirectoryError(errno.ENOTDIR, "a file, not a directory", path)
    return node


def _describe(node: DirNode, path: str, pieces: list[bytes]) -> None:
    """Names, sizes and contents below a directory, in the order of `walk`; a sweep asks for little else."""
    for name in sorted(node.live):
        child = node.live[name]
        full = path + name
        if isinstance(child, FileNode):
            content = child.live
            pieces += (f"{len(full)} {full} {len(content)} ".encode(), content)
        else:
            pieces.append(f"{len(full)} {full} -1 ".encode())
            _describe(child, f"{full}/", pieces)


def _empty(node: DirNode, path: str) -> None:
    if node.live:
        raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
