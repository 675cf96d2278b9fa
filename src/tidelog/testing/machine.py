"""The machine around a simulated disk: its clock, its power, the number of each operation, and its faults.

Calls of the Disk protocol that change something are numbered from 1 and are the points where power can fail: before
operation n is after operation n - 1. A write in short pieces is one operation per piece. Once the power is off every
call of the protocol raises PowerOff, so nothing is acknowledged by a dead machine.

A fault counts the calls that match it and fails them from the `at`-th on, `times` times. All faults count every call,
so two of them make a compound fault; when both match the same call, the first one added wins.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from threading import RLock
from typing import Literal, TypeAlias

from tidelog.clock import Clock
from tidelog.testing.crash_images import DirNode, FileNode, walk_tree

START_US = 1_700_000_000_000_000  # a Tuesday in November 2023; any fixed moment would do


class ManualClock:
    """Wall time can be set freely; monotonic time moves only forward, and only by ticks."""

    def __init__(self, start_us: int = START_US) -> None:
        self._wall_us, self._passed_us = start_us, 0

    def now_us(self) -> int:
        return self._wall_us

    def monotonic_ms(self) -> int:
        return self._passed_us // 1_000

    def monotonic_us(self) -> int:
        return self._passed_us

    def tick(self, ms: int) -> None:
        """Advance both clocks."""
        self.tick_us(ms * 1_000)

    def tick_us(self, us: int) -> None:
        """Advance both clocks."""
        if us < 0:
            raise ValueError(f"a tick is forward only, not {us} us; set_us turns the wall clock back")
        self._wall_us += us
        self._passed_us += us

    def set_us(self, us: int) -> None:
        """Set the wall clock, as an administrator can. The monotonic clock does not move."""
        self._wall_us = us


DiskCall: TypeAlias = Literal[
    "open",  # of a file that exists
    "create",
    "read",  # map as well
    "write",
    "cut",
    "reserve",
    "sync",
    "sync_dir",  # also the one inside make_dir
    "rename",
    "link",
    "remove",
    "mkdir",
    "rmdir",
    "lock",
]

SyncMode: TypeAlias = Literal["dropped", "reverted", "kept"]


@dataclass(slots=True)
class Fault:
    call: DiskCall
    at: int
    times: int | None  # None: for ever after
    path: str | None  # strikes only paths that contain this
    error: int = errno.EIO
    partial_bytes: int = 0  # of a failing write, how much still lands
    mode: SyncMode = "kept"  # of a failing sync, what becomes of the pending bytes
    calls_seen: int = 0

    def matches(self, call: DiskCall, path: str) -> bool:
        """Count this call; return whether it fails."""
        if call != self.call or (self.path is not None and self.path not in path):
            return False
        self.calls_seen += 1
        return self.calls_seen >= self.at and (self.times is None or self.calls_seen < self.at + self.times)

    def as_error(self, path: str) -> OSError:
        return OSError(self.error, f"injected: {self.call} failed", path)


class FaultPlan:
    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        if fault.at < 1:
            raise ValueError(f"calls are counted from 1, not from {fault.at}")
        self._faults.append(fault)

    def clear(self) -> None:
        self._faults.clear()

    def next_fault(self, call: DiskCall, path: str) -> Fault | None:
        """Return the fault of this call, if any. Called exactly once per call."""
        if not self._faults:
            return None
        struck = [fault for fault in self._faults if fault.matches(call, path)]
        return struck[0] if struck else None


class PowerOff(BaseException):
    """The power is off. Not an Exception, so that no handler treats it as an error to survive."""


class Machine:
    def __init__(self, *, clock: Clock | None = None, trace: bool = False) -> None:
        self._clock = clock or ManualClock()
        self._lock = RLock()
        self._root = DirNode(self._now_ms())
        self._serials = count(1)
        self._faults = FaultPlan()
        self._short_write_random: Random | None = None
        self._tracing = trace
        self._op_count = 0
        self._cut_at: int | None = None
        self._powered_off = False
        self._open_paths: dict[int, str] = {}  # files that are not closed, by the identity of the handle
        self.trace: list[str] = []
        """A description of each operation so far; empty unless enabled."""
        self.on_op: Callable[[int], None] | None = None
        """Called with its number before an operation takes effect. May look at everything, change nothing."""
        self.capacity_bytes: int | None = None
        """How many bytes all files may have together. May be changed at any time."""
        self.ignores_syncs = False
        """While set, syncs of files and directories succeed and make nothing durable."""

    @property
    def op_count(self) -> int:
        """How many operations were carried out or refused so far."""
        return self._op_count

    def open_files(self) -> list[str]:
        """The paths under which files were opened that are not closed yet, sorted."""
        with self._lock:
            return sorted(self._open_paths.values())

    def cut_power_at(self, number: int) -> None:
        """Let the power fail just before operation `number` takes effect."""
        self._cut_at = number

    def power_off(self) -> None:
        """Let the power fail now."""
        self._powered_off = True

    def fail(
        self,
        op: DiskCall,
        at: int = 1,
        error: int = errno.EIO,
        times: int | None = 1,
        path: str | None = None,
        *,
        partial: int = 0,
    ) -> None:
        """Let the `at`-th such call from now fail, and the next ones until it was `times`; None: for ever.

        Only paths that contain `path` count. A failing write still lands its first `partial` bytes;
        a failing sync keeps all that is pending. Anything else that fails has no effect.
        """
        with self._lock:
            self._faults.add(Fault(op, at, times, path, error, partial))

    def fail_sync(self, mode: SyncMode, at: int = 1, times: int | None = 1, path: str | None = None) -> None:
        """Let a sync fail with EIO and, by `mode`, forget the pending bytes or not.

        dropped    still seen, never durable: a later sync succeeds without them
        reverted   the file shows its durable content again
        kept       still pending: a later sync makes them durable
        """
        with self._lock:
            self._faults.add(Fault("sync", at, times, path, mode=mode))

    def clear_faults(self) -> None:
        """Remove every fault; capacity and ignored syncs are set by hand."""
        with self._lock:
            self._faults.clear()

    def short_writes(self, random: Random | None) -> None:
        """Let each write take only a first part, of random size, of what it is given; None: all again."""
        self._short_write_random = random

    # For the disk and its files; the caller holds `_lock`.

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1_000

    def _check_powered(self) -> None:
        if self._powered_off:
            raise PowerOff(f"the power failed after operation {self._op_count}")

    def _count_operation(self, call: DiskCall, path: str, description: str) -> Fault | None:
        """Number a call that is about to change something; return the fault it meets."""
        number = self._op_count + 1
        if self.on_op is not None:
            self.on_op(number)
        if self._cut_at is not None and number >= self._cut_at:
            self._powered_off = True
        self._check_powered()
        self._op_count = number
        if self._tracing:
            self.trace.append(description)
        return self._faults.next_fault(call, path)

    def _run_fallible(self, call: DiskCall, path: str, description: str) -> None:
        fault = self._count_operation(call, path, description)
        if fault:
            raise fault.as_error(path)

    def _check_read_fault(self, call: DiskCall, path: str) -> None:
        """Let a call that changes nothing meet its fault."""
        fault = self._faults.next_fault(call, path)
        if fault:
            raise fault.as_error(path)

    def _writable_bytes(self, node: FileNode, pos: int) -> int:
        """How many bytes may be written to a file from `pos` on before the disk is full."""
        left = self._free_bytes()
        return 1 << 62 if left is None else node.size + left - pos

    def _free_bytes(self) -> int | None:
        if self.capacity_bytes is None:
            return None
        used = sum(other.size for _, other in walk_tree(self._root) if isinstance(other, FileNode))
        return max(0, self.capacity_bytes - used)

    def _disk_full_error(self, path: str) -> OSError:
        return OSError(errno.ENOSPC, f"the disk has a capacity of {self.capacity_bytes} bytes", path)
