"""The machine around a simulated disk: its power, the number of each operation, and its faults.

Calls of the Disk protocol that change something are numbered from 1, in `ops`, and are the
points where power can fail: before operation n is after operation n - 1. A write that is
taken in short pieces is one operation a piece. Once the power is off every call of the
protocol raises PowerOff, so nothing can be acknowledged by a dead machine.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import count
from random import Random
from threading import RLock

from tidelog.clock import Clock
from tidelog.testing.clock import ManualClock
from tidelog.testing.faults import Call, Fault, Faults, SyncMode
from tidelog.testing.inodes import DirNode, FileNode, walk


class PowerOff(BaseException):
    """The machine is dead. Not an Exception, so that no handler takes it for an error it may survive."""


class Machine:
    def __init__(self, *, clock: Clock | None = None, trace: bool = False) -> None:
        self._clock = clock or ManualClock()
        self._lock = RLock()
        self._root = DirNode(self._now_ms())
        self._serials = count(1)
        self._faults = Faults()
        self._short: Random | None = None
        self._tracing = trace
        self._ops = 0
        self._cut_at: int | None = None
        self._off = False
        self._opened: dict[int, str] = {}  # files that are not closed, by the identity of the handle
        self.trace: list[str] = []
        """The operations so far in words, one each; stays empty unless asked for."""
        self.on_op: Callable[[int], None] | None = None
        """Called with its number before an operation takes effect. May look at everything, change nothing."""
        self.capacity_bytes: int | None = None
        """How many bytes all files may have together. May be changed at any time."""
        self.lying_sync = False
        """While set, syncs of files and directories succeed and make nothing durable."""

    @property
    def ops(self) -> int:
        """How many operations were carried out or refused so far."""
        return self._ops

    def open_files(self) -> list[str]:
        """The paths under which files were opened that are not closed yet, sorted."""
        with self._lock:
            return sorted(self._opened.values())

    def cut_power_at(self, number: int) -> None:
        """Let the power fail just before operation `number` takes effect."""
        self._cut_at = number

    def power_off(self) -> None:
        """Let the power fail now."""
        self._off = True

    def fail(
        self,
        op: Call,
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

    def heal(self) -> None:
        """Take back every fault; capacity and lies are set by hand."""
        with self._lock:
            self._faults.clear()

    def short_writes(self, random: Random | None) -> None:
        """Let each write take only a first part, of random size, of what it is given; None: all again."""
        self._short = random

    # For the disk and its files; the caller holds `_lock`.

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1_000

    def _powered(self) -> None:
        if self._off:
            raise PowerOff(f"the power failed after operation {self._ops}")

    def _operation(self, call: Call, path: str, words: str) -> Fault | None:
        """Number a call that is about to change something; return the fault it meets."""
        number = self._ops + 1
        if self.on_op is not None:
            self.on_op(number)
        if self._cut_at is not None and number >= self._cut_at:
            self._off = True
        self._powered()
        self._ops = number
        if self._tracing:
            self.trace.append(words)
        return self._faults.strike(call, path)

    def _fallible(self, call: Call, path: str, words: str) -> None:
        fault = self._operation(call, path, words)
        if fault:
            raise fault.as_error(path)

    def _look(self, call: Call, path: str) -> None:
        """Let a call that changes nothing meet its fault."""
        fault = self._faults.strike(call, path)
        if fault:
            raise fault.as_error(path)

    def _room(self, node: FileNode, pos: int) -> int:
        """How many bytes may be written to a file from `pos` on before the disk is full."""
        left = self._free()
        return 1 << 62 if left is None else node.size + left - pos

    def _free(self) -> int | None:
        if self.capacity_bytes is None:
            return None
        used = sum(other.size for _, other in walk(self._root) if isinstance(other, FileNode))
        return max(0, self.capacity_bytes - used)

    def _full(self, path: str) -> OSError:
        return OSError(errno.ENOSPC, f"the disk has room for {self.capacity_bytes} bytes", path)
