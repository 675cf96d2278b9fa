"""[policy] Which call of a simulated disk fails, and how. Decides, never touches the disk.

Every fault counts the calls that match it and strikes from the `at`-th on, `times` times.
All faults count every call, so two of them make a compound fault; when both want the same
call, the one that was asked for first strikes.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal, TypeAlias

Call: TypeAlias = Literal[
    "open",  # of a file that exists
    "create",
    "read",  # map as well
    "write",
    "cut",
    "reserve",
    "sync",
    "sync_dir",  # also the one inside make_dir
    "rename",
    "remove",
    "mkdir",
    "rmdir",
    "lock",
]

SyncMode: TypeAlias = Literal["dropped", "reverted", "kept"]


@dataclass(slots=True)
class Fault:
    call: Call
    at: int
    times: int | None  # None: for ever after
    path: str | None  # strikes only paths that contain this
    error: int = errno.EIO
    partial_bytes: int = 0  # of a failing write, how much still lands
    mode: SyncMode = "kept"  # of a failing sync, what becomes of the pending bytes
    seen: int = 0

    def strikes(self, call: Call, path: str) -> bool:
        """Count this call, and say whether it fails."""
        if call != self.call or (self.path is not None and self.path not in path):
            return False
        self.seen += 1
        return self.seen >= self.at and (self.times is None or self.seen < self.at + self.times)

    def as_error(self, path: str) -> OSError:
        return OSError(self.error, f"injected: {self.call} failed", path)


class Faults:
    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        if fault.at < 1:
            raise ValueError(f"calls are counted from 1, not from {fault.at}")
        self._faults.append(fault)

    def clear(self) -> None:
        self._faults.clear()

    def strike(self, call: Call, path: str) -> Fault | None:
        """The fault this call meets, if any. Asked exactly once per call."""
        if not self._faults:
            return None
        struck = [fault for fault in self._faults if fault.strikes(call, path)]
        return struck[0] if struck else None
