"""Two bounds on memory over all connections of a process: request bodies, and responses that clients do not read.

    RequestBodyBudget   total > bytes_max ──► the largest bodies that are still incomplete are rejected, until it fits

A complete body is never rejected, because its handler is at work on it. So clients that send little are rejected last.

    UnsentBudget        total > bytes_max / 2 ──► streams produce nothing more (`wait_below_half`), and accounts
                                                  without progress for `GRACE_S` are evicted
                        total > bytes_max     ──► the accounts without progress for the longest time are evicted at
                                                  once, until it fits

An account is one HTTP/2 stream or one connection. Streams produce nothing above the first bound, so a client that
reads is not evicted: its stream waits for others. Only whole responses can reach the second bound.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from tidelog.http.waiters import WaiterList

GRACE_S: Final = 1.0  # without progress; a client that is merely slow, on a busy machine, takes a byte in that time
_SHED_TO_FRACTION: Final = 7 / 8  # of the bound, after evictions: the next byte does not need another search


class BodyReservation:
    """The bytes of one request's body. `reject` answers the request and releases the reservation."""

    __slots__ = ("bytes", "reject")

    def __init__(self, reject: Callable[[], None] | None = None) -> None:
        self.bytes = 0
        self.reject = reject


class RequestBodyBudget:
    """Bodies that are kept until their requests are answered. `call_soon` calls a function in the next loop turn:
    bodies are rejected there, not while the parser handles the input that exceeded the bound."""

    def __init__(self, bytes_max: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self.bytes_max, self._call_soon = bytes_max, call_soon
        self.total = 0
        self.on_released: Callable[[], None] | None = None  # called after a reservation was released
        self._incomplete: dict[BodyReservation, Callable[[], None]] = {}
        self._shed_scheduled = False

    @property
    def is_full(self) -> bool:
        return bool(self.bytes_max) and self.total > self.bytes_max

    def update(self, reservation: BodyReservation, size: int) -> None:
        """Set the size of a reservation."""
        self.total += size - reservation.bytes
        reservation.bytes = size
        if reservation.reject is not None:
            self._incomplete[reservation] = reservation.reject
        if self.is_full and not self._shed_scheduled:
            self._shed_scheduled = True
            self._call_soon(self._reject_largest)

    def mark_complete(self, reservation: BodyReservation) -> None:
        """The whole body has arrived: it can no longer be rejected."""
        reservation.reject = None
        self._incomplete.pop(reservation, None)

    def release(self, reservation: BodyReservation) -> None:
        """The request was answered."""
        self.mark_complete(reservation)
        self.total -= reservation.bytes
        reservation.bytes = 0
        if self.on_released is not None:
            self._call_soon(self.on_released)

    def _reject_largest(self) -> None:
        self._shed_scheduled = False
        for reservation in sorted(self._incomplete, key=lambda reservation: -reservation.bytes):
            if not self.is_full:
                return
            if reservation in self._incomplete:
                self._incomplete[reservation]()


class UnsentAccount:
    """What the client of one stream or connection has not read, with the bytes that the writer of the stream reserved.

    `unsent_bytes` returns the current number: a connection is measured only when it blocks and once a second. `evict`
    ends the stream or connection and releases the account.
    """

    __slots__ = ("_budget", "_unsent_bytes", "bytes", "evict", "is_closed", "reserved_bytes")

    def __init__(self, budget: UnsentBudget, unsent_bytes: Callable[[], int], evict: Callable[[], None]) -> None:
        self._budget, self._unsent_bytes, self.evict = budget, unsent_bytes, evict
        self.bytes = 0  # at the last update
        self.reserved_bytes = 0
        self.is_closed = False

    def update(self) -> None:
        self._budget.update(self, self._unsent_bytes() + self.reserved_bytes)

    def reserve(self, size: int) -> None:
        """Count bytes that the writer of the stream has ready and did not write yet."""
        self.reserved_bytes = size
        self.update()

    def release(self) -> None:
        self._budget.release(self)


class UnsentBudget:
    """Responses that clients have not read. `call_later` calls a function after some seconds: accounts are evicted
    there, not in the middle of the write that exceeded the bound."""

    def __init__(
        self, bytes_max: int, call_later: Callable[[float, Callable[[], None]], object], now: Callable[[], float]
    ) -> None:
        self.bytes_max, self._call_later, self._now = bytes_max, call_later, now
        self.total = 0
        self._last_progress_s: dict[UnsentAccount, float] = {}  # of accounts with bytes, longest ago first
        self._shed_at_s = inf  # time of the next `_shed`
        self._waiters = WaiterList()

    @property
    def is_above_half(self) -> bool:
        """More than half of the bound is used: streams produce nothing more, and keep less ready for each client."""
        return bool(self.bytes_max) and self.total > self.bytes_max // 2

    def update(self, account: UnsentAccount, size: int) -> None:
        """Set the size of an account. Less than before is progress."""
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
        """The stream or connection has ended: its bytes are gone."""
        if not account.is_closed:
            account.is_closed = True
            self.total -= account.bytes
            account.bytes = 0
            self._last_progress_s.pop(account, None)
            self._wake_waiters()

    async def wait_below_half(self) -> None:
        """Return when a stream may produce its next bytes. Called while the stream has none ready."""
        while self.is_above_half:
            await self._waiters.wait()

    def _wake_waiters(self) -> None:
        if self._waiters and not self.is_above_half:
            self._waiters.wake()

    def _shed_after(self, seconds: float) -> None:
        due_s = self._now() + seconds
        if due_s < self._shed_at_s:
            self._shed_at_s = due_s
            self._call_later(seconds, self._shed)

    def _shed(self) -> None:
        """Evict accounts without progress until the bound is met."""
        self._shed_at_s = inf
        if not self.is_above_half:
            return
        now_s, is_full = self._now(), self.total > self.bytes_max
        target_bytes = self.bytes_max * _SHED_TO_FRACTION / (1 if is_full else 2)
        for account in list(self._last_progress_s):
            before = account.bytes
            account.update()
            if account.bytes < before:
                continue  # its client has read bytes since: it is the last in the order now
            if not is_full and now_s - self._last_progress_s[account] < GRACE_S:
                break
            account.evict()
            if self.total <= target_bytes:
                break
        if self.is_above_half:
            self._shed_after(GRACE_S)
