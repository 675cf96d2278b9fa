"""Limits on what a client may cost: their values, the counters of clients that exceeded them, the scheduler that bounds
the work of one loop turn, and two bounds on memory over all connections of a process.

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

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connections_max: int = 20_000
    """Further connections are answered with 503 and closed, before they send anything."""

    header_bytes_max: int = 64 << 10
    """Size of a request's head: target, names and values. 431 above it."""

    target_bytes_max: int = 32 << 10
    """Size of a request's target. 414 above it."""

    header_timeout_s: float = 60.0
    """Time from the first byte of a head to its last; slow sending does not prolong it. 408 after it."""

    body_timeout_s: float = 60.0
    """Time between two reads of a body. 408 after it."""

    idle_timeout_s: float = 120.0
    """Time without a request before a connection is closed. Longer than most clients keep theirs, so that the client
    closes first and no request meets a closing connection."""

    write_timeout_s: float = 30.0
    """Time in which a client reads nothing of what waits for it before its HTTP/2 stream is reset or its connection is
    closed. Any progress starts it again."""

    linger_s: float = 2.0
    """How long a connection is still read after its last response: closing it with unread bytes would make the kernel
    reset it, and the client could lose that response."""

    pipelined_max: int = 64
    """Requests that may wait after the one in progress; then nothing more is read."""

    ahead_bytes_max: int = 256 << 10
    """Bytes that are read ahead: waiting requests, and a streamed body or a WebSocket whose handler is slow. The
    receive buffer is not included."""

    discard_bytes_max: int = 64 << 20
    """Bytes of an unwanted body that are discarded to keep the connection usable; then it is closed. Larger than the
    application's limit on bodies: otherwise a body above that limit would always cost the connection."""

    write_high_bytes: int = 256 << 10
    write_low_bytes: int = 64 << 10
    """Above the first `drain` waits until the second is reached. Together with what a handler writes at once they bound
    the memory that a slow client costs."""

    streams_max: int = 1024
    """HTTP/2: concurrent requests on one connection."""

    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 4 << 20
    """HTTP/2: what a client may send of one body, and of all, before some of it was consumed."""

    connection_streams_max: int = 256
    """HTTP/2: concurrent streamed responses on one connection. 429 above it."""

    connection_header_bytes_max: int = 1 << 20
    """HTTP/2: size of the heads of all open requests of one connection. Further requests are refused with
    REFUSED_STREAM, which allows the client to retry."""

    resets_max: int = 1024
    """HTTP/2: requests that a client may reset in a burst, answered or not; a sixteenth of it is refilled each second.
    Then the connection is closed: resetting streams is cheap for the client and expensive here. 0: no limit."""

    control_frames_max: int = 4096
    """HTTP/2 and WebSocket: frames in a burst that carry neither a request nor a payload worth a frame; a sixteenth of
    it is refilled each second. Then the connection is closed. Sent bytes earn window updates, so that a client that
    reads fast has as many as it needs. 0: no limit."""

    turn_units: int = 256
    """Work of one loop turn on received input: a frame is 1, a request 4. The rest waits for the next turn, and its
    connection is not read meanwhile."""

    unsent_bytes_max: int = 512 << 20
    """Bytes of responses, over all connections, that clients have not read. Above it the streams and connections
    without progress for the longest time are closed. 0: no limit."""

    body_bytes_max: int = 512 << 20
    """Bytes of request bodies, over all connections, that are in memory until they are answered, decoded ones included.
    Above it the largest incomplete ones are refused with 429, and compressed ones wait to be decoded. 0: no limit."""

    ping_every_s: float = 20.0
    ping_timeout_s: float = 20.0
    """HTTP/2: interval of PING frames, and how long the response may take."""

    messages_max: int = 64
    """WebSocket: messages that wait for their handler; then nothing more is read."""

    def __post_init__(self) -> None:
        if self.write_low_bytes > self.write_high_bytes:
            raise ValueError(
                f"write_low_bytes ({self.write_low_bytes}) must not exceed write_high_bytes ({self.write_high_bytes}): "
                "a paused writer would never resume"
            )
        if self.turn_units < 4:
            raise ValueError(f"turn_units ({self.turn_units}) must be at least 4, which is one request")
        if self.connection_window_bytes < 65_535 or self.stream_window_bytes < 1:
            raise ValueError(
                f"connection_window_bytes ({self.connection_window_bytes}) must be at least 65535, as HTTP/2 starts; "
                f"stream_window_bytes ({self.stream_window_bytes}) at least 1"
            )

    @property
    def tick_s(self) -> float:
        """Interval of time-out checks: a time-out is late by at most an eighth, a lingering close by at most half, and
        ten thousand connections cost a hundredth of the loop."""
        shortest = min(
            *(self.header_timeout_s, self.body_timeout_s, self.idle_timeout_s, self.write_timeout_s),
            *(self.ping_every_s, self.ping_timeout_s, self.linger_s * 4),
        )
        return min(max(shortest / 8, 0.005), 1.0)


_log = logging.getLogger("tidelog.server")
LOG_EVERY_S: Final = 10.0
"""At most one log line per limit in this time, however many clients exceed it."""

LIMIT_NAMES: Final = (
    "body_bytes",
    "connections",
    "control_frames",
    "frame_size",
    "header_bytes",
    "resets",
    "slow_consumer",
    "stalled",
    "streams",
    "unsent_bytes",
)
"""Every name that is counted: its metric exists, as 0, before the limit is exceeded."""


class LimitCounters:
    """How often clients exceeded each limit: counted for the metrics, and logged at a bounded rate."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.counts: Counter[str] = Counter(dict.fromkeys(LIMIT_NAMES, 0))
        self._logged_s: dict[str, float] = {}
        self._suppressed: Counter[str] = Counter()

    def count(self, limit: str, peer: str, detail: str) -> None:
        """Count one client that exceeded `limit`. `detail`: what was done to its connection or stream."""
        self.counts[limit] += 1
        now_s, last_s = self._now_s(), self._logged_s.get(limit)
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            self._suppressed[limit] += 1
            return
        self._logged_s[limit] = now_s
        more = self._suppressed.pop(limit, 0)
        fields = {"limit": limit, "peer": peer, "not_logged": more}
        _log.warning("a limit was exceeded: %s", detail, extra={"fields": fields})


REQUEST_UNITS: Final = 4
"""Cost of a request: about that of four control frames."""

RESERVED_UNITS: Final = 8
"""Units that a connection may always spend on new input: enough for a request with a body."""


class DeferredConnection(Protocol):
    """A connection with deferred input."""

    def resume_deferred(self) -> None:
        """Handle the next part of the deferred input, and call `schedule` again if there is more."""
        ...


class TurnScheduler:
    """Bounds the work of one loop turn on received input.

    received ──► handled within the budget ──► the rest is deferred, its connection is not read ──► next turns, in order

    One read can hold 40,000 frames that cost 20 µs each. Connections with more input than a turn's budget wait in one
    queue, and a turn spends one budget on all of them together. Other connections are served between two turns, however
    many clients flood the server.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, units_max: int) -> None:
        self._loop, self.units_max = loop, units_max
        self._waiting: deque[DeferredConnection] = deque()
        self._turn_scheduled = False
        self._spent = 0  # units of this turn, of all connections

    @property
    def units_left(self) -> int:
        """Units that a connection may spend now. A few are always left: a client that sends one request at a time is
        served at once, however many others flood the server."""
        return max(self.units_max - self._spent, RESERVED_UNITS)

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget of this turn is spent, so that expensive input waits for the next one."""
        return self._spent >= self.units_max

    def spend(self, units: int) -> None:
        self._spent += units
        if self._spent >= RESERVED_UNITS:
            self._schedule_turn()  # which resets `_spent`

    def schedule(self, connection: DeferredConnection) -> None:
        self._waiting.append(connection)
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._turn_scheduled = False
        self._spent = 0
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft().resume_deferred()
                if self._spent >= self.units_max:
                    break
        finally:
            if self._waiting:
                self._schedule_turn()


class RateAllowance:
    """A token bucket: `tokens_max` at once, refilled by a sixteenth of that each second. 0: no limit."""

    __slots__ = ("_tokens", "_tokens_max")

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = float(tokens_max)
        self._tokens = float(tokens_max)

    def take(self, count: float = 1.0) -> bool:
        """Take tokens and return whether there were enough."""
        self._tokens -= count
        return self._tokens >= 0 or not self._tokens_max

    def refund(self, count: float) -> None:
        self._tokens = min(self._tokens_max, self._tokens + count)

    def refill(self, seconds: float) -> None:
        self.refund(seconds * self._tokens_max / 16)


class WaiterList:
    """Coroutines that wait for one condition. They are woken together and check the condition again."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._futures)

    async def wait(self) -> None:
        """Return after the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        try:
            await future
        finally:
            self._futures.remove(future)

    def wake(self) -> None:
        for future in self._futures:
            if not future.done():
                future.set_result(None)


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
