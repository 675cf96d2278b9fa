"""[policy] Bytes of request bodies that are kept until they are answered, bounded over all connections of a process.

    set ──► total ≤ bytes_max ──► kept
       └──► total > bytes_max ──► the largest bodies that are still coming are refused, until it fits

A body that has come whole is not refused any more: its handler is at work on it. So the bodies of clients that send
little are the last to be refused, whatever others send.
"""

from __future__ import annotations

from collections.abc import Callable


class Kept:
    """What one request has of its body. `refuse` answers it and ends the account."""

    __slots__ = ("bytes", "refuse")

    def __init__(self, refuse: Callable[[], None] | None = None) -> None:
        self.bytes = 0
        self.refuse = refuse


class Bodies:
    """On the loop's thread. `defer` calls a function in the next turn: bodies are refused there, and not in the middle
    of the piece that was one too many."""

    def __init__(self, bytes_max: int, defer: Callable[[Callable[[], None]], object]) -> None:
        self.bytes_max, self._defer = bytes_max, defer
        self.total = 0
        self.on_space: Callable[[], None] | None = None  # called after an account ended
        self._coming: dict[Kept, Callable[[], None]] = {}
        self._shedding = False

    @property
    def is_full(self) -> bool:
        return bool(self.bytes_max) and self.total > self.bytes_max

    def set(self, kept: Kept, size: int) -> None:
        """So many bytes are kept of it now."""
        self.total += size - kept.bytes
        kept.bytes = size
        if kept.refuse is not None:
            self._coming[kept] = kept.refuse
        if self.is_full and not self._shedding:
            self._shedding = True
            self._defer(self._shed)

    def whole(self, kept: Kept) -> None:
        """Nothing more of it comes."""
        kept.refuse = None
        self._coming.pop(kept, None)

    def end(self, kept: Kept) -> None:
        """It was answered."""
        self.whole(kept)
        self.total -= kept.bytes
        kept.bytes = 0
        if self.on_space is not None:
            self._defer(self.on_space)

    def _shed(self) -> None:
        self._shedding = False
        for kept in sorted(self._coming, key=lambda kept: -kept.bytes):
            if not self.is_full:
                return
            if kept in self._coming:
                self._coming[kept]()
