"""A FUSE file system that loses power: what was not synced is dropped, torn or reordered.

    the program under test ──► kernel ──► FaultFS ──► inodes: what is durable, what is pending
                                                         │
    power cut: every later call fails with EIO           └──► one tree that a restart could find, as a directory

The simulated disk of this package replaces the engine's own interface to the operating system. This file system is
below the kernel instead: a real process with real threads, descriptors, maps and locks runs on it, and is killed. Both
keep files in the same inodes, so the same rules say what may survive (`crash_images`).

`MountedFS` runs it in a process of its own, because a program cannot serve the file system that it blocks on:

    with MountedFS(source=before, mount=folder / "mnt") as fs:
        ...                                # run a process on fs.mount and kill it
        cut = fs.cut_power(after, seed=7)  # unmount; `after` has what a restart finds

A write can be torn at chosen bytes. Power then fails in the middle of it, and the test sees where it would have gone
before it chooses what of it survives:

    with MountedFS(mount=folder / "mnt", tear=Tear(".log", 20)) as fs:
        write = fs.torn_write(60)          # wait for the 20th write to such files; then kill the process
        fs.tear(after, [(0, 17)])          # all earlier writes survive, and the first 17 bytes of this one

It needs Linux, /dev/fuse, root, libfuse 3 and the package mfusepy; `unavailable()` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Self

from tidelog.testing.crash_images import CrashPoint, DirNode, FileNode, Link, Move, Node, Policy, Unlink, walk_tree

MOUNT_TIMEOUT_S: Final = 30.0
CUT_POLICIES: Final[tuple[Policy, ...]] = ("none", "all", "prefixes", "torn_last", "random")


def unavailable_reason() -> str | None:
    """Return why this machine cannot mount the file system, or None."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy or libfuse 3 is missing: {error}"
    return None


class PowerCut(NamedTuple):
    """What a power cut did."""

    label: str  # how the survivors were chosen
    pending: int  # operations that were not synced


class TearPlan(NamedTuple):
    """The write in which power is to fail. Writes of zeros alone are not counted: preallocation makes them."""

    suffix: str  # how the paths of files end whose writes are counted
    number: int  # from 1 on; 0: in none
    bytes_min: int = 1  # smaller writes are not counted


class TornWrite(NamedTuple):
    """The write in which power failed. The kernel may have split what the program wrote, at pages for example."""

    path: str  # from the mount on
    pos: int
    data: bytes
    before: bytes  # what the file held in front of it


NO_TEAR: Final = TearPlan("", 0)


class FaultFS:
    """The operations of the file system. The kernel's calls come on several threads; one lock serialises them."""

    use_ns = True

    def __init__(self, source: Path | None = None, *, cut_at: int = 0, tear: TearPlan = NO_TEAR) -> None:
        """Hold a copy of `source`, all of it durable. `cut_at`: the number of the change before which power fails.
        `tear`: the write in which it fails."""
        self.root = DirNode(_now_ms()) if source is None else _load_tree(source)
        self.changes = 0
        self._cut_at = cut_at
        self._tear_plan, self._writes_until_tear = tear, tear.number
        self._torn_write: tuple[TornWrite, FileNode] | None = None
        self.failed_in_write = threading.Event()
        self._powered_off = False
        self._lock = threading.RLock()
        self._serials = count(1)
        self._handles: dict[int, FileNode] = {}
        self._handle_numbers = count(1)

    def cut_power(self, out: Path, seed: int) -> PowerCut:
        """Fail every later call, and write one tree that a restart could find into the new directory `out`."""
        with self._lock:
            self._powered_off = True
            instant = CrashPoint(self.root)
            random = Random(seed)
            choices = instant.choices((random.choice(CUT_POLICIES),), random)
            mask = random.choice(list(choices))
            _write_tree(instant.tree(mask), out)
            return PowerCut(choices[mask], instant.full_mask.bit_length())

    @property
    def torn_write(self) -> TornWrite | None:
        return self._torn_write and self._torn_write[0]

    def tear(self, out: Path, kept: Sequence[tuple[int, int]]) -> None:
        """Write what a restart finds into the new directory `out` when all that was issued before the torn write
        survives, and of that write these ranges of its bytes. Other bytes are as they were before it."""
        with self._lock:
            if self._torn_write is None:
                raise ValueError("power has not failed in a write: nothing can be torn")
            (_, pos, data, _), node = self._torn_write
            for start, stop in kept:
                if not 0 <= start < stop <= len(data):
                    raise ValueError(f"bytes {start} to {stop} are not in a write of {len(data)} bytes")
                node.write(self._serials, pos + start, data[start:stop])
            instant = CrashPoint(self.root)
            _write_tree(instant.tree(instant.full_mask), out)

    # What the kernel asks.

    def init(self, path: str) -> None: ...

    def destroy(self, path: str) -> None: ...

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self._lock:
            node: Node = self._handles[fh] if fh else self._find(path)
            modified_ns = node.modified_ms * 1_000_000
            if isinstance(node, DirNode):
                mode, size = stat.S_IFDIR | 0o755, 0
            else:
                mode, size = stat.S_IFREG | 0o644, node.size
            times = dict.fromkeys(("st_mtime", "st_ctime", "st_atime"), modified_ns)
            return {"st_mode": mode, "st_size": size, "st_nlink": 1, "st_uid": 0, "st_gid": 0, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        with self._lock:
            return [".", "..", *sorted(self._directory(path).live)]

    def mkdir(self, path: str, mode: int) -> int:
        with self._lock:
            self._count_change()
            above, name = self._parent_and_name(path)
            above.change(Link(next(self._serials), name, DirNode(_now_ms())))
            return 0

    def create(self, path: str, mode: int, fi: int | None = None) -> int:
        with self._lock:
            self._count_change()
            above, name = self._parent_and_name(path)
            node = FileNode(b"", _now_ms())
            above.change(Link(next(self._serials), name, node))
            return self._open_handle(node)

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            self._check_powered()
            node = self._find(path)
            if isinstance(node, DirNode):
                raise OSError(errno.EISDIR, "a directory")
            if flags & os.O_TRUNC:
                self._count_change()
                node.resize(self._serials, 0)
            return self._open_handle(node)

    def release(self, path: str, fh: int) -> int:
        with self._lock:
            self._handles.pop(fh, None)
            return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._lock:
            self._check_powered()
            return self._handles[fh].read(offset, size)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            self._count_change()
            node = self._handles[fh]
            wanted = self._tear_plan
            if self._writes_until_tear and path.endswith(wanted.suffix) and len(data) >= wanted.bytes_min and any(data):
                self._writes_until_tear -= 1
                if not self._writes_until_tear:
                    self._powered_off, self._torn_write = (
                        True,
                        (TornWrite(path.lstrip("/"), offset, bytes(data), node.read(0, offset)), node),
                    )
                    self.failed_in_write.set()
                    self._check_powered()
            node.write(self._serials, offset, data)
            node.modified_ms = _now_ms()
            return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        with self._lock:
            self._count_change()
            node = self._handles[fh] if fh else self._find(path)
            if isinstance(node, DirNode):
                raise OSError(errno.EISDIR, "a directory")
            node.resize(self._serials, length)
            node.modified_ms = _now_ms()
            return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        with self._lock:
            self._count_change()
            self._handles[fh].sync()
            return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        with self._lock:
            self._count_change()
            self._directory(path).sync()
            return 0

    def unlink(self, path: str) -> int:
        with self._lock:
            self._count_change()
            above, name = self._parent_and_name(path)
            above.change(Unlink(next(self._serials), name))
            return 0

    def rmdir(self, path: str) -> int:
        with self._lock:
            if self._directory(path).live:
                raise OSError(errno.ENOTEMPTY, "not empty")
            return self.unlink(path)

    def rename(self, old: str, new: str) -> int:
        with self._lock:
            above, name = self._parent_and_name(old)
            target, new_name = self._parent_and_name(new)
            if above is not target:
                raise OSError(errno.EXDEV, "a rename stays in its directory")
            self._count_change()
            above.change(Move(next(self._serials), name, new_name))
            return 0

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 22, "f_bfree": 1 << 21, "f_bavail": 1 << 21}

    # Inside.

    def _check_powered(self) -> None:
        if self._powered_off:
            raise OSError(errno.EIO, "the power is off")

    def _count_change(self) -> None:
        self._check_powered()
        self.changes += 1
        if self.changes == self._cut_at:
            self._powered_off = True
            self._check_powered()

    def _open_handle(self, node: FileNode) -> int:
        number = next(self._handle_numbers)
        self._handles[number] = node
        return number

    def _find(self, path: str) -> Node:
        at: Node = self.root
        for name in path.strip("/").split("/"):
            if name:
                found = at.live.get(name) if isinstance(at, DirNode) else None
                if found is None:
                    raise OSError(errno.ENOENT, "no such file or directory")
                at = found
        return at

    def _directory(self, path: str) -> DirNode:
        node = self._find(path)
        if isinstance(node, FileNode):
            raise OSError(errno.ENOTDIR, "a file")
        return node

    def _parent_and_name(self, path: str) -> tuple[DirNode, str]:
        above, _, name = path.rpartition("/")
        return self._directory(above), name


class MountedFS:
    """A mounted `FaultFS` in a process of its own."""

    def __init__(self, mount: Path, source: Path | None = None, *, cut_at: int = 0, tear: TearPlan = NO_TEAR) -> None:
        self.mount = mount
        mount.mkdir(parents=True, exist_ok=True)
        options = (mount, source or "", cut_at, *tear)
        command = [sys.executable, "-m", "tidelog.testing.fault_fs", *map(str, options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not os.path.ismount(mount):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the file system was not mounted; the server ended with {self._process.poll()}")
            time.sleep(0.01)

    def cut_power(self, out: Path, seed: int) -> PowerCut:
        """Cut the power, unmount, and write what a restart finds to `out`. Kill the processes on it first."""
        label, pending = self._request("cut", str(out), seed)
        self.close()
        return PowerCut(label, pending)

    def torn_write(self, timeout_s: float) -> TornWrite | None:
        """Wait until power fails in the write that was chosen; return that write, or None if none came in time."""
        found = self._request("torn_write", timeout_s)
        return found and TornWrite(*found[:2], *map(bytes.fromhex, found[2:]))

    def tear(self, out: Path, kept: Sequence[tuple[int, int]]) -> None:
        """Unmount, and write to `out` what a restart finds when these ranges of bytes of the torn write survive, and
        all that was issued before it. Kill the processes on it first."""
        self._request("tear", str(out), kept)
        self.close()

    def _request(self, *request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the file system's server ended while it was asked to {request[0]}")
        return json.loads(answer)

    def close(self) -> None:
        if os.path.ismount(self.mount):
            _unmount(self.mount)
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unmount(mount: Path) -> None:
    detach = 2  # MNT_DETACH: a file may still be open
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mount), detach):
        raise OSError(ctypes.get_errno(), "unmounting failed", str(mount))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _load_tree(folder: Path) -> DirNode:
    """Copy a directory into inodes, all of it durable."""
    node = DirNode(_now_ms())
    for path in folder.iterdir():
        node.live[path.name] = _load_tree(path) if path.is_dir() else FileNode(path.read_bytes(), _modified_ms(path))
    node.durable = node.live.copy()
    return node


def _modified_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def _write_tree(root: DirNode, out: Path) -> None:
    """Write a tree of inodes into a new directory."""
    out.mkdir(parents=True)
    for name, node in walk_tree(root):
        path = out / name
        if isinstance(node, DirNode):
            path.mkdir()
        else:
            path.write_bytes(node.live)
            os.utime(path, ns=(node.modified_ms * 1_000_000,) * 2)


def _serve(mount: str, source: str, cut_at: str, suffix: str, number: str, bytes_min: str) -> None:
    """Serve the file system until it is unmounted; lines of standard input ask for what `MountedFS` offers."""
    import mfusepy

    fs = FaultFS(
        Path(source) if source else None, cut_at=int(cut_at), tear=TearPlan(suffix, int(number), int(bytes_min))
    )

    def torn_write(timeout_s: float) -> tuple[str, int, str, str] | None:
        fs.failed_in_write.wait(timeout_s)
        write = fs.torn_write
        return write and (write.path, write.pos, write.data.hex(), write.before.hex())

    answers: dict[str, Callable[..., object]] = {
        "cut": lambda out, seed: fs.cut_power(Path(out), seed),
        "torn_write": torn_write,
        "tear": lambda out, kept: fs.tear(Path(out), kept),
    }

    def listen() -> None:
        try:
            for line in sys.stdin:
                what, *values = json.loads(line)
                sys.stdout.write(json.dumps(answers[what](*values)) + "\n")
                sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # a client that waits for the response must not wait for ever

    threading.Thread(target=listen, daemon=True).start()

    mfusepy.FUSE(fs, mount, foreground=True, hard_remove=True, max_threads=10)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
