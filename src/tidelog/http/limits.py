"""What a peer may cost. Built once at the edge and passed down; a test makes them small.

[policy] Limits that peers met: counted by name for the metrics, and logged at most once in a while for each name.

[policy] How much of one peer's input is handled in one turn of the loop.

    received ──► handled up to the budget ──► the rest waits, its connection is not read ──► next turns, in a ring

A piece of input can hold 40,000 frames that cost 20 µs each. Connections that have more than a turn's budget wait in
one ring, and a turn handles one budget of all of them together: requests of other connections are served between two
turns, however many connections flood the server.
"""

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
    """Past this a connection is answered 503 and closed, before it says anything."""

    header_bytes_max: int = 64 << 10
    """Of a request's head: target, names and values. 431 past it."""

    target_bytes_max: int = 32 << 10
    """Of a request's target. 414 past it."""

    header_timeout_s: float = 60.0
    """From the first byte of a head to its last: dribbling does not prolong it. 408 after it."""

    body_timeout_s: float = 60.0
    """Between two pieces of a body. 408 after it."""

    idle_timeout_s: float = 120.0
    """Without a request, before a kept connection is closed. Longer than most clients keep theirs, so that it is
    they who close and no request crosses our farewell."""

    write_timeout_s: float = 30.0
    """Without the peer taking a byte of what waits for it, before its HTTP/2 stream is reset or its connection is
    closed. A peer that takes anything at all starts it again."""

    linger_s: float = 2.0
    """How long a connection that we end is still read: closing it on unread bytes would make the kernel reset it,
    and the peer could lose the answer that says why."""

    pipelined_max: int = 64
    """Requests that may wait behind the one that is being answered; past it nothing more is read."""

    ahead_bytes_max: int = 256 << 10
    """Bytes that are read ahead: of requests that wait, and of a streamed body or a WebSocket whose handler is slow.
    The receive buffer comes on top of it."""

    discard_bytes_max: int = 64 << 20
    """Bytes of a body nobody wants that are read and thrown away to keep the connection usable. Past it, it ends.
    Larger than the application's limit of a body: else one that is over it would always cost the connection."""

    write_high_bytes: int = 256 << 10
    write_low_bytes: int = 64 << 10
    """`drained` waits above the first until the second is reached. Together with what a handler writes at once they
    bound the memory that a slow peer costs."""

    streams_max: int = 1024
    """HTTP/2: requests at the same time on one connection."""

    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 4 << 20
    """HTTP/2: what a peer may send of one body, and of all, before some of it was consumed."""

    connection_streams_max: int = 256
    """HTTP/2: streamed answers at the same time on one connection. 429 past it."""

    connection_header_bytes_max: int = 1 << 20
    """HTTP/2: heads of all requests that one connection has open. Past it a request is refused with REFUSED_STREAM,
    which a client may send again."""

    resets_max: int = 1024
    """HTTP/2: requests a peer may reset in a burst, answered or not; a sixteenth of it is forgiven each second. Past it
    the connection ends: starting and resetting streams is cheap for a peer and dear for us. 0: no limit."""

    control_frames_max: int = 4096
    """HTTP/2 and WebSocket: frames in a burst that carry neither a request nor a payload worth a frame; a sixteenth of
    it is forgiven each second. Past it the connection ends. Updates of windows are paid for by the bytes that were
    sent, so that a peer that reads fast has as many as it needs. 0: no limit."""

    turn_units: int = 256
    """Work of one turn of the loop for input that came in one piece: a frame is 1, a request 4. What is left waits for
    the next turn, and its connection is not read meanwhile."""

    unsent_bytes_max: int = 512 << 20
    """Bytes of answers, of all connections, that peers have not taken. Past it the streams and connections that have
    gone longest without taking a byte are closed. 0: no limit."""

    body_bytes_max: int = 512 << 20
    """Bytes of request bodies, of all connections, that are kept until they are answered, decoded ones too. Past it the
    largest that are still coming are refused with 429, and compressed ones wait to be decoded. 0: no limit."""

    ping_every_s: float = 20.0
    ping_timeout_s: float = 20.0
    """HTTP/2: how often a peer is asked whether it is still there, and how long its answer may take."""

    messages_max: int = 64
    """WebSocket: messages that wait for their handler; past it nothing more is read."""

    def __post_init__(self) -> None:
        if self.write_low_bytes > self.write_high_bytes:
            raise ValueError(
                f"write_low_bytes ({self.write_low_bytes}) must not exceed write_high_bytes ({self.write_high_bytes}): "
                "a writer that was stopped would never be started again"
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
        """How often connections are looked at: no time-out is late by more than an eighth, no lingering by more than
        half, and ten thousand connections cost a hundredth of the loop."""
        shortest = min(
            *(self.header_timeout_s, self.body_timeout_s, self.idle_timeout_s, self.write_timeout_s),
            *(self.ping_every_s, self.ping_timeout_s, self.linger_s * 4),
        )
        return min(max(shortest / 8, 0.005), 1.0)


_log = logging.getLogger("tidelog.server")
LOG_EVERY_S: Final = 10.0
"""One line for each limit in this time. A flood of refusals must not become a flood of log lines."""

LIMIT_NAMES: Final = (
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
"""Every name that is counted, so that a metric is there, as 0, before its limit is met."""


class LimitCounters:
    """On the loop's thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.counts: Counter[str] = Counter(dict.fromkeys(LIMIT_NAMES, 0))
        self._logged_s: dict[str, float] = {}
        self._suppressed: Counter[str] = Counter()

    def count(self, limit: str, peer: str, detail: str) -> None:
        """Count one refusal. `what` says what was done to which peer's connection or stream."""
        self.counts[limit] += 1
        now_s, last_s = self._now_s(), self._logged_s.get(limit)
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            self._suppressed[limit] += 1
            return
        self._logged_s[limit] = now_s
        more = self._suppressed.pop(limit, 0)
        fields = {"limit": limit, "peer": peer, "not_logged": more}
        _log.warning("a limit was met: %s", detail, extra={"fields": fields})


REQUEST_UNITS: Final = 4
"""Of the budget, for a request: about what four control frames cost."""

RESERVED_UNITS: Final = 8
"""That a connection may always spend on what it just sent: a request with a body, and some."""


class DeferredConnection(Protocol):
    """A connection with input that waits."""

    def resume_deferred(self) -> None:
        """Handle the next slice of what waits, and enter the ring again if there is more."""
        ...


class TurnScheduler:
    """On the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, units_max: int) -> None:
        self._loop, self.units_max = loop, units_max
        self._waiting: deque[DeferredConnection] = deque()
        self._turn_scheduled = False
        self._spent = 0  # units of this turn, of all connections

    @property
    def units_left(self) -> int:
        """Units that a connection may spend now. A few are always left: a peer that sends one request at a time is
        served at once, however many others flood the server."""
        return max(self.units_max - self._spent, RESERVED_UNITS)

    @property
    def is_exhausted(self) -> bool:
        """Whether this turn has done its share, so that whatever costs much waits for the next one."""
        return self._spent >= self.units_max

    def spend(self, units: int) -> None:
        self._spent += units
        if self._spent >= RESERVED_UNITS:
            self._schedule_turn()  # the next turn begins with nothing spent

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
    """Frames that carry no request and no payload: so many at once, and a sixteenth of them a second."""

    __slots__ = ("_tokens", "_tokens_max")

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = float(tokens_max)
        self._tokens = float(tokens_max)

    def take(self, count: float = 1.0) -> bool:
        """Whether there is still one; 0 allowed means no limit."""
        self._tokens -= count
        return self._tokens >= 0 or not self._tokens_max

    def refund(self, count: float) -> None:
        self._tokens = min(self._tokens_max, self._tokens + count)

    def refill(self, seconds: float) -> None:
        self.refund(seconds * self._tokens_max / 16)
