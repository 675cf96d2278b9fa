"""[policy] Bytes of request bodies that are kept until they are answered, bounded over all connections of a process.

    set ──► total ≤ bytes_max ──► kept
       └──► total > bytes_max ──► the largest bodies that are still coming are refused, until it fits

A body that has come whole is not refused any more: its handler is at work on it. So the bodies of clients that send
little are the last to be refused, whatever others send.

[policy] Bytes of answers that peers have not taken yet, bounded over all connections of a process.

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


class BodyReservation:
    """What one request has of its body. `refuse` answers it and ends the account."""

    __slots__ = ("bytes", "reject")

    def __init__(self, refuse: Callable[[], None] | None = None) -> None:
        self.bytes = 0
        self.reject = refuse


class RequestBodyBudget:
    """On the loop's thread. `defer` calls a function in the next turn: bodies are refused there, and not in the middle
    of the piece that was one too many."""

    def __init__(self, bytes_max: int, defer: Callable[[Callable[[], None]], object]) -> None:
        self.bytes_max, self._defer = bytes_max, defer
        self.total = 0
        self.on_released: Callable[[], None] | None = None  # called after an account ended
        self._incomplete: dict[BodyReservation, Callable[[], None]] = {}
        self._shed_scheduled = False

    @property
    def is_full(self) -> bool:
        return bool(self.bytes_max) and self.total > self.bytes_max

    def update(self, reservation: BodyReservation, size: int) -> None:
        """So many bytes are kept of it now."""
        self.total += size - reservation.bytes
        reservation.bytes = size
        if reservation.reject is not None:
            self._incomplete[reservation] = reservation.reject
        if self.is_full and not self._shed_scheduled:
            self._shed_scheduled = True
            self._defer(self._reject_largest)

    def mark_complete(self, reservation: BodyReservation) -> None:
        """Nothing more of it comes."""
        reservation.reject = None
        self._incomplete.pop(reservation, None)

    def release(self, reservation: BodyReservation) -> None:
        """It was answered."""
        self.mark_complete(reservation)
        self.total -= reservation.bytes
        reservation.bytes = 0
        if self.on_released is not None:
            self._defer(self.on_released)

    def _reject_largest(self) -> None:
        self._shed_scheduled = False
        for kept in sorted(self._incomplete, key=lambda kept: -kept.bytes):
            if not self.is_full:
                return
            if kept in self._incomplete:
                self._incomplete[kept]()


GRACE_S: Final = 1.0  # without a byte taken: a reader that is merely late, on a busy machine, takes one in that time
_SHED_TO_FRACTION: Final = 7 / 8  # of the bound, after accounts were closed: the next byte does not need another search


class UnsentAccount:
    """What one stream or connection has not taken. `close` ends it and releases what it holds. `measure` calls `set`
    with what it holds at this moment: a connection is measured only when it blocks and once a second."""

    __slots__ = ("bytes", "close", "is_closed", "measure")

    def __init__(self, close: Callable[[], None], measure: Callable[[], None] = lambda: None) -> None:
        self.bytes = 0
        self.close, self.measure = close, measure
        self.is_closed = False


class UnsentBudget:
    """On the loop's thread. `after` calls a function when so many seconds have passed; accounts are closed there, and
    not in the middle of the write that was one too many."""

    def __init__(
        self, bytes_max: int, call_later: Callable[[float, Callable[[], None]], object], now: Callable[[], float]
    ) -> None:
        self.bytes_max, self._call_later, self._now = bytes_max, call_later, now
        self.total = 0
        self._last_progress_s: dict[
            UnsentAccount, float
        ] = {}  # accounts with bytes and when they last took some, longest ago first
        self._shed_at_s = inf  # when accounts are looked at next
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_above_half(self) -> bool:
        """More than half of the bound is used: streams make nothing more, and keep less ready for each peer."""
        return bool(self.bytes_max) and self.total > self.bytes_max // 2

    def update(self, account: UnsentAccount, size: int) -> None:
        """The account holds so many bytes now. Fewer than before is progress."""
        before = account.bytes
        if size == before or account.is_closed:
            return
        account.bytes = size
        self.total += size - before
        if size < before or not before:
            self._last_progress_s.pop(account, None)
            if size:
                self._last_progress_s[account] = self._now()
        if size < before:
            self._wake_waiters()
        elif self.is_above_half:
            self._shed_after(0 if self.total > self.bytes_max else GRACE_S)

    def release(self, account: UnsentAccount) -> None:
        """The account is over: nothing waits for its peer any more."""
        if not account.is_closed:
            account.is_closed = True
            self.total -= account.bytes
            account.bytes = 0
            self._last_progress_s.pop(account, None)
            self._wake_waiters()

    async def wait_below_half(self) -> None:
        """Return when there is room for more. Called before a stream produces its next bytes, while it holds none."""
        while self.is_above_half:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def _wake_waiters(self) -> None:
        if self._waiters and not self.is_above_half:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _shed_after(self, seconds: float) -> None:
        due = self._now() + seconds
        if due < self._shed_at_s:
            self._shed_at_s = due
            self._call_later(seconds, self._shed)

    def _shed(self) -> None:
        self._shed_at_s = inf
        if not self.is_above_half:
            return
        now, is_full = self._now(), self.total > self.bytes_max
        enough = self.bytes_max * _SHED_TO_FRACTION / (1 if is_full else 2)
        for account in list(self._last_progress_s):
            before = account.bytes
            account.measure()
            if account.bytes < before:
                continue  # its peer took bytes meanwhile, and it is the last in the order now
            if not is_full and now - self._last_progress_s[account] < GRACE_S:
                break
            account.close()
            if self.total <= enough:
                break
        if self.is_above_half:
            self._shed_after(GRACE_S)
