"""Limits on what a client may cost: their values, the counters of clients that exceeded them, and the scheduler that
bounds the work of one loop turn."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
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
