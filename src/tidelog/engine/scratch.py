"""[shell] Memory for large writes on their way to the WAL: used again, because fresh memory costs more than filling it.

    take ──► a write lays its frames ──► the WAL has them ──► give ──► take …

What is true when a call returns: after `take` the memory is the caller's alone; after `give` nobody may look at it
through whatever views of it there were. What is not given back is simply gone.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

_STEP_BYTES: Final = 1 << 18
_KEPT_BYTES_MAX: Final = 8 << 20


class Scratch:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[bytearray] = []
        self._kept_bytes = 0

    def take(self, size: int) -> bytearray:
        """Memory of at least this size, with anything in it."""
        with self._lock:
            if self._free:
                found = self._free.pop()  # the one that was used last: what is in the processor's cache
                self._kept_bytes -= len(found)
                if len(found) >= size:
                    return found
        return bytearray(-(-size // _STEP_BYTES) * _STEP_BYTES)

    def give(self, memory: bytearray) -> None:
        """Nobody needs it any more."""
        with self._lock:
            if self._kept_bytes + len(memory) <= _KEPT_BYTES_MAX:
                self._free.append(memory)
                self._kept_bytes += len(memory)
