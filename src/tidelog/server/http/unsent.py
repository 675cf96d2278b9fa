"""[policy] Bytes of answers that peers have not taken yet, bounded over all connections of a process.

    add ──► total ≤ bytes_max ──► kept
       └──► total > bytes_max ──► the accounts that have gone longest without a byte taken are closed, until it fits

One account is one HTTP/2 stream or one connection. A peer that takes bytes moves to the end of the order, so it is
closed only if peers that took nothing for a shorter time hold less than the bound together.
"""

from __future__ import annotations

from collections.abc import Callable

_KEPT = 7 / 8  # of the bound, after accounts were closed: the next byte does not need another search


class Account:
    """What one stream or connection has not taken. `close` ends it and releases what it holds."""

    __slots__ = ("bytes", "close", "closing")

    def __init__(self, close: Callable[[], None]) -> None:
        self.bytes = 0
        self.close = close
        self.closing = False


class Unsent:
    """On the loop's thread. `defer` calls a function in the next turn: accounts are closed there, and not in the
    middle of the write that was one too many."""

    def __init__(self, bytes_max: int, defer: Callable[[Callable[[], None]], object]) -> None:
        self.bytes_max, self._defer = bytes_max, defer
        self.total = 0
        self._order: dict[Account, None] = {}  # accounts with bytes, least recent progress first
        self._shedding = False

    @property
    def is_tight(self) -> bool:
        """More than half of the bound is used: streams then keep less ready for each peer."""
        return bool(self.bytes_max) and self.total > self.bytes_max // 2

    def set(self, account: Account, size: int) -> None:
        """The account holds so many bytes now. Fewer than before is progress."""
        before = account.bytes
        if size == before or account.closing:
            return
        account.bytes = size
        self.total += size - before
        if size < before or not before:
            self._order.pop(account, None)
            if size:
                self._order[account] = None
        if size > before and self.bytes_max and self.total > self.bytes_max and not self._shedding:
            self._shedding = True
            self._defer(self._shed)

    def end(self, account: Account) -> None:
        """The account is over: nothing waits for its peer any more."""
        if not account.closing:
            account.closing = True
            self.total -= account.bytes
            account.bytes = 0
            self._order.pop(account, None)

    def _shed(self) -> None:
        self._shedding = False
        if self.total <= self.bytes_max:
            return
        for account in list(self._order):
            account.close()
            if self.total <= self.bytes_max * _KEPT:
                return
