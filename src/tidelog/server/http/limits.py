"""What a peer may cost. Built once at the edge and passed down; a test makes them small."""

from __future__ import annotations

from dataclasses import dataclass


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
