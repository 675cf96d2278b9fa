"""[policy] Bytes of answers that peers have not taken yet, bounded over all connections of a process.

    total > bytes_max / 2 ──► streams make nothing more (`room`), accounts that took no byte for `GRACE_S` are closed
    total > bytes_max     ──► the accounts that have gone longest without a byte taken are closed at once, until it fits

One account is one HTTP/2 stream or one connection. Streams make nothing above the first bound, so a peer that takes
bytes is not closed: it waits until others have read or are closed. Only whole answers can reach the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

GRACE_S: Final = 1.0  # without a byte taken: a reader that is merely late, on a busy machine, takes one in that time
_KEPT: Final = 7 / 8  # of the bound, after accounts were closed: the next byte does not need another search


class Account:
    """What one stream or connection has not taken. `close` ends it and releases what it holds. `measure` calls `set`
    with what it holds at this moment: a connection is measured only when it blocks and once a second."""

    __slots__ = ("bytes", "close", "closing", "measure")

    def __init__(self, close: Callable[[], None], measure: Callable[[], None] = lambda: None) -> None:
        self.bytes = 0
        self.close, self.measure = close, measure
        self.closing = False


class Unsent:
    """On the loop's thread. `after` calls a function when so many seconds have passed; accounts are closed there, and
    not in the middle of the write that was one too many."""

    def __init__(
        self, bytes_max: int, after: Callable[[float, Callable[[], None]], object], now: Callable[[], float]
    ) -> None:
        self.bytes_max, self._after, self._now = bytes_max, after, now
        self.total = 0
        self._order: dict[Account, float] = {}  # accounts with bytes and when they last took some, longest ago first
        self._due = inf  # when accounts are looked at next
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_tight(self) -> bool:
        """More than half of the bound is used: streams make nothing more, and keep less ready for each peer."""
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
                self._order[account] = self._now()
        if size < before:
            self._wake()
        elif self.is_tight:
            self._shed_after(0 if self.total > self.bytes_max else GRACE_S)

    def end(self, account: Account) -> None:
        """The account is over: nothing waits for its peer any more."""
        if not account.closing:
            account.closing = True
            self.total -= account.bytes
            account.bytes = 0
            self._order.pop(account, None)
            self._wake()

    async def room(self) -> None:
        """Return when there is room for more. Called before a stream produces its next bytes, while it holds none."""
        while self.is_tight:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        if self._waiters and not self.is_tight:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _shed_after(self, seconds: float) -> None:
        due = self._now() + seconds
        if due < self._due:
            self._due = due
            self._after(seconds, self._shed)

    def _shed(self) -> None:
        self._due = inf
        if not self.is_tight:
            return
        now, is_full = self._now(), self.total > self.bytes_max
        enough = self.bytes_max * _KEPT / (1 if is_full else 2)
        for account in list(self._order):
            before = account.bytes
            account.measure()
            if account.bytes < before:
                continue  # its peer took bytes meanwhile, and it is the last in the order now
            if not is_full and now - self._order[account] < GRACE_S:
                break
            account.close()
            if self.total <= enough:
                break
        if self.is_tight:
            self._shed_after(GRACE_S)
