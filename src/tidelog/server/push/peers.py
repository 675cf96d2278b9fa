"""Peers: how pages and events are written to a client, and the limits for a slow one.

Topics, as Server-Sent Events and as WebSocket messages:

    retry: 2000                                     first, once
    id: <cursor>␊event: record␊data: {…}␊␊          record, tombstone, caught-up, topic-deleted, error
    : hb 1700000000000␊␊                            heartbeat, when nothing was sent for long

    {"op":"record",…}                               record, tombstone, caught_up, topic_deleted, error

`<cursor>` has every topic of the session, so that a client that reconnects with it misses nothing.

Jobs, as Server-Sent Events:

    retry: 2000                                       first, once
    id: <seq>␊event: job␊data: {"topic",…}␊␊          up to `max` jobs that are not settled
    event: error␊data: {"code","error","topic"}␊␊     then the end
    : idle␊␊                                          on request: there is no job now; `full`: no capacity for one
    : hb 1700000000000␊␊                              after a time without events

Channels:

    id: 7␊event: message␊data: {"channel","seq","ts","sender","payload"}␊␊     the seq is the position to resume from
    event: presence␊data: {"channel","kind","user","owner","ts"}␊␊             no id: it is not in the history
    event: gap␊data: {"channel","from_seq","to_seq"}␊␊                         messages that are not kept any more
    event: end␊data: {"channel","reason","last_seq"}␊␊                         the last event

    {"op":"message",…}    {"op":"presence",…}    {"op":"gap",…}    {"op":"channel_end",…}

A payload that is UTF-8 is text (`payload`), any other is `payload_base64`. The frame of an event is encoded once for
all receivers of one turn.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from tidelog import api_types
from tidelog.channels import ChannelEvent, Message, Presence, SubscriptionEnded
from tidelog.engine import Gap
from tidelog.engine.queues import ClaimResult
from tidelog.errors import Error, NotAQueue, TopicNotFound
from tidelog.http.interface import ClientDisconnected, Sink, Socket
from tidelog.http.limits import LimitCounters
from tidelog.server.errors import api_error_from
from tidelog.server.push.page_cache import EncodedPage

HIGH_WATER_BYTES: Final = 256 << 10  # with more unsent bytes nothing is read for a peer
WARN_AFTER_S: Final = 5.0  # a peer that reads nothing for this long is warned
CLOSE_AFTER_S: Final = 30.0  # and closed after this long, a multiple of the above
RETRY_FRAME: Final = b"retry: 2000\n\n"
IDLE_FRAME: Final = b": %b\n\n" % api_types.JOBS_IDLE
FULL_FRAME: Final = b": %b\n\n" % api_types.JOBS_FULL
SHUTDOWN_MESSAGE: Final = "the server is shutting down; nothing more comes on this connection, connect again"
SLOW_MESSAGE: Final = "this connection is not read: it is closed soon, read faster or request less"
_SSE_EVENT: Final = b"id: %b\nevent: %b\ndata: {%b\n\n"
_CACHED_FRAMES_MAX: Final = 1_024  # events
_encode_json = msgspec.json.Encoder().encode


# ── slow clients ──────────────────────────────────────────────────────────────────────────────


class SlowConsumer(ClientDisconnected):
    """A peer that reads nothing. It counts as disconnected: a last frame would not reach it either."""


class DrainablePeer(Protocol):
    @property
    def pending_bytes(self) -> int: ...
    async def drain(self) -> None: ...
    def send_slow_warning(self) -> None: ...


class SlowConsumerGuard:
    """Wait for a slow peer, and disconnect one that reads nothing.

        unsent ≤ 256 KiB ──► more is sent to it
        unsent > 256 KiB ──► nothing is, until it has read most of it ──► a warning after 5 s ──► closed after 30 s

    A peer that makes progress is never disconnected. Other peers are unaffected. `is_ending`: the stream ends, and no
    peer is waited for any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peer: DrainablePeer,
        is_ending: Callable[[], bool],
        limit_counters: LimitCounters,
    ) -> None:
        self._loop, self._peer, self._is_ending, self._limit_counters = loop, peer, is_ending, limit_counters
        self._drain_lock = asyncio.Lock()
        self._timeout: asyncio.Timeout | None = None

    def on_shutdown(self) -> None:
        """End a wait if the stream ends."""
        if self._is_ending() and self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    async def wait_writable(self) -> None:
        """Wait until the peer has read most of its bytes, or the stream ends. Raises SlowConsumer and
        ClientDisconnected."""
        async with self._drain_lock:
            unsent_bytes, stalled_s = self._peer.pending_bytes, 0.0
            while self._peer.pending_bytes > HIGH_WATER_BYTES and not self._is_ending():
                try:
                    async with asyncio.timeout(WARN_AFTER_S) as self._timeout:
                        await self._peer.drain()
                    return
                except TimeoutError:
                    pass
                finally:
                    self._timeout = None
                if self._is_ending():
                    return
                stalled_s = 0.0 if self._peer.pending_bytes < unsent_bytes else stalled_s + WARN_AFTER_S
                if stalled_s >= CLOSE_AFTER_S:
                    message = f"a consumer read nothing for {CLOSE_AFTER_S:g} s; its stream was closed"
                    self._limit_counters.count("slow_consumer", "", message)
                    raise SlowConsumer
                if stalled_s == WARN_AFTER_S:
                    self._peer.send_slow_warning()
                unsent_bytes = self._peer.pending_bytes


# ── transports ────────────────────────────────────────────────────────────────────────────────


class SsePeer:
    """A peer that receives Server-Sent Events of any kind."""

    def __init__(self, sink: Sink, loop_time: Callable[[], float]) -> None:
        self._sink, self._time = sink, loop_time
        self.last_sent_s = loop_time()

    @property
    def pending_bytes(self) -> int:
        return self._sink.pending_bytes

    async def drain(self) -> None:
        await self._sink.drain()

    def send_retry(self) -> None:
        self._write(RETRY_FRAME)

    def send_heartbeat(self, epoch_ms: int) -> None:
        self._write(b": hb %d\n\n" % epoch_ms)

    def send_shutdown(self) -> None:
        self._write_error("server_shutting_down", SHUTDOWN_MESSAGE)

    def send_slow_warning(self) -> None:
        self._write_error(429, SLOW_MESSAGE)

    def _write_error(self, code: str | int, message: str, **fields: str) -> None:
        self._write(b"event: error\ndata: %b\n\n" % _encode_json({"code": code, "message": message, **fields}))

    def _write(self, frame: bytes) -> None:
        self._sink.write(frame)
        self.last_sent_s = self._time()


class _WebSocketPeer:
    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    @property
    def pending_bytes(self) -> int:
        return self._socket.pending_bytes

    async def drain(self) -> None:
        await self._socket.drain()

    def send_error_message(self, code: str, message: str, **fields: str) -> None:
        """Send an error that is no response to a command."""
        self._socket.send(_encode_json({"op": "error", "code": code, "message": message, **fields}))


# ── topics ────────────────────────────────────────────────────────────────────────────────────


def _encode_gap_fields(name: str, gap: Gap, reason: str) -> bytes:
    return b'"topic":%b,"reason":"%b","gap_from":%d,"gap_to":%d,"earliest_seq":%d,"head_seq":%d}' % (
        _encode_json(name),
        reason.encode(),
        gap.gap_from,
        gap.gap_to,
        gap.earliest_seq,
        gap.head_seq,
    )


def _encode_head_fields(name: str, head_seq: int) -> bytes:
    return b'"topic":%b,"head_seq":%d}' % (_encode_json(name), head_seq)


def _encode_deleted_fields(name: str) -> bytes:
    return b'"topic":%b,"head_seq":0,"reason":"deleted"}' % _encode_json(name)


def _encode_record_event(cursor_id: bytes, page: EncodedPage) -> bytes:
    """Encode a page, and `caught-up` after the last one, as one frame: it costs a peer one write."""
    record = _SSE_EVENT % (cursor_id, b"record", page.body)
    if not page.caught_up:
        return record
    return record + _SSE_EVENT % (cursor_id, b"caught-up", _encode_head_fields(page.name, page.head_seq))


def _encode_record_message(page: EncodedPage) -> bytes:
    return b'{"op":"record",' + page.body


class TopicSsePeer(SsePeer):
    """A peer that watches topics. `cursors` are the session's, which move with every frame."""

    def __init__(self, sink: Sink, cursors: Mapping[str, int], loop_time: Callable[[], float]) -> None:
        super().__init__(sink, loop_time)
        self._cursors = cursors

    def send_page(self, page: EncodedPage) -> None:
        cursor_id = api_types.encode_positions(self._cursors)
        self._write(page.frame(cursor_id, lambda page: _encode_record_event(cursor_id, page)))

    def send_tombstone(self, name: str, gap: Gap, *, first: bool) -> None:
        """In the first read of a connection a gap is due to its old cursor, unless the topic was created again."""
        reason = "from_seq_too_old" if first and gap.reason != "recreated" else gap.reason
        self._write_event(b"tombstone", _encode_gap_fields(name, gap, reason))

    def send_caught_up(self, name: str, head_seq: int) -> None:
        self._write_event(b"caught-up", _encode_head_fields(name, head_seq))

    def send_topic_deleted(self, name: str) -> None:
        self._write_event(b"topic-deleted", _encode_deleted_fields(name))

    def send_error(self, name: str, code: str, message: str) -> None:
        self._write_error(code, message, topic=name)

    def _write_error(self, code: str | int, message: str, **fields: str) -> None:
        self._write_event(b"error", _encode_json({"code": code, "message": message, **fields})[1:])

    def _write_event(self, event: bytes, data: bytes) -> None:
        self._write(_SSE_EVENT % (api_types.encode_positions(self._cursors), event, data))


class TopicWebSocketPeer(_WebSocketPeer):
    def send_page(self, page: EncodedPage) -> None:
        self._socket.send(page.frame(b"", _encode_record_message))
        if page.caught_up:
            self.send_caught_up(page.name, page.head_seq)

    def send_tombstone(self, name: str, gap: Gap, *, first: bool) -> None:  # noqa: ARG002 - always the real reason
        self._send(b"tombstone", _encode_gap_fields(name, gap, gap.reason))

    def send_caught_up(self, name: str, head_seq: int) -> None:
        self._send(b"caught_up", _encode_head_fields(name, head_seq))

    def send_topic_deleted(self, name: str) -> None:
        self._send(b"topic_deleted", _encode_deleted_fields(name))

    def send_shutdown(self) -> None:
        self.send_error_message("server_shutting_down", SHUTDOWN_MESSAGE)

    def send_slow_warning(self) -> None:
        self.send_error_message("slow_consumer", SLOW_MESSAGE)

    def send_error(self, name: str, code: str, message: str) -> None:
        self.send_error_message(code, message, topic=name)

    def _send(self, op: bytes, fields: bytes) -> None:
        self._socket.send(b'{"op":"%b",%b' % (op, fields))


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────


class JobSsePeer(SsePeer):
    """Encodes the events of a job stream."""

    def __init__(self, sink: Sink, topic: str, loop_time: Callable[[], float]) -> None:
        super().__init__(sink, loop_time)
        self._topic = topic

    def send_jobs(self, leased: ClaimResult) -> int:
        """Send each job as a frame, all in one write; return the number of bytes."""
        topic = _encode_json(self._topic)
        text = b"".join(
            b'id: %d\nevent: job\ndata: {"topic":%b,%b\n\n' % (seq, topic, job[1:])
            for seq, job in zip(leased.seqs, leased.to_json_texts(), strict=True)
        )
        self._write(text)
        return len(text)

    def send_idle(self, *, is_full: bool) -> None:
        """Say that there is no job for this worker now: a comment, which parsers of events pass over."""
        self._write(FULL_FRAME if is_full else IDLE_FRAME)

    def send_error(self, error: Error) -> None:
        """Send an error: 409 where the topic was dropped or is no queue any more (by contract), else its code."""
        is_gone = isinstance(error, TopicNotFound | NotAQueue)
        self._write_error(409 if is_gone else api_error_from(error).code, str(error))

    def _write_error(self, code: str | int, message: str, **fields: str) -> None:
        """The contract of job streams calls the message `error`."""
        error = {"code": code, "error": message, "topic": self._topic, **fields}
        self._write(b"event: error\ndata: %b\n\n" % _encode_json(error))


# ── channels ──────────────────────────────────────────────────────────────────────────────────


def payload_field(payload: bytes) -> bytes:
    """Encode a payload as a field of JSON."""
    try:
        return b'"payload":%b' % _encode_json(payload.decode())
    except UnicodeDecodeError:
        return b'"payload_base64":"%b"' % b64encode(payload)


def encode_message_fields(message: Message) -> bytes:
    """Encode a message as a JSON object without its opening brace."""
    return b'"channel":%b,"seq":%d,"ts":%d,"sender":%b,%b}' % (
        _encode_json(message.channel),
        message.seq,
        message.ts_ms,
        _encode_json(message.sender),
        payload_field(message.payload),
    )


def _encode_event_fields(event: ChannelEvent) -> bytes:
    if isinstance(event, Message):
        return encode_message_fields(event)
    if isinstance(event, Presence):
        return b'"channel":%b,"kind":"%b","user":%b,"owner":%b,"ts":%d}' % (
            _encode_json(event.channel),
            event.kind.encode(),
            _encode_json(event.user),
            b"true" if event.owner else b"false",
            event.ts_ms,
        )
    return b'"channel":%b,"reason":"%b","last_seq":%d}' % (
        _encode_json(event.channel),
        event.reason.encode(),
        event.last_seq,
    )


def encode_sse_event(event: ChannelEvent) -> bytes:
    fields = _encode_event_fields(event)
    if isinstance(event, Message):
        return b"id: %d\nevent: message\ndata: {%b\n\n" % (event.seq, fields)
    return b"event: %b\ndata: {%b\n\n" % (b"end" if isinstance(event, SubscriptionEnded) else b"presence", fields)


def encode_ws_event(event: ChannelEvent) -> bytes:
    op = {Message: b"message", Presence: b"presence", SubscriptionEnded: b"channel_end"}[type(event)]
    return b'{"op":"%b",%b' % (op, _encode_event_fields(event))


EventEncoder = Callable[[ChannelEvent], bytes]


class FrameCache:
    """Frames of the events of one turn, by event and encoder. A cached event is alive, so its id is unique."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, EventEncoder], tuple[ChannelEvent, bytes]] = {}

    def get(self, event: ChannelEvent, encode: EventEncoder) -> bytes:
        key = (id(event), encode)
        cached = self._frames.get(key)
        if cached is None:
            if len(self._frames) >= _CACHED_FRAMES_MAX:
                self._frames.clear()
            cached = self._frames[key] = (event, encode(event))
        return cached[1]

    def clear(self) -> None:
        self._frames.clear()


class ChannelSsePeer(SsePeer):
    """A peer that is subscribed to one channel."""

    encode = staticmethod(encode_sse_event)

    def send_subscribed(self, **fields: Any) -> None:
        self._write(RETRY_FRAME + b"event: subscribed\ndata: %b\n\n" % _encode_json(fields))

    def send_frames(self, frames: list[bytes]) -> None:
        """Send several events in one write."""
        self._write(frames[0] if len(frames) == 1 else b"".join(frames))

    def send_gap(self, channel: str, first: int, last: int) -> None:
        self._write(b"event: gap\ndata: %b\n\n" % _encode_json({"channel": channel, "from_seq": first, "to_seq": last}))

    def send_error(self, channel: str, code: str, message: str) -> None:
        self._write_error(code, message, channel=channel)


class ChannelWebSocketPeer(_WebSocketPeer):
    """A peer that is subscribed to any number of channels."""

    encode = staticmethod(encode_ws_event)

    def send_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._socket.send(frame)

    def send_gap(self, channel: str, first: int, last: int) -> None:
        self._socket.send(_encode_json({"op": "gap", "channel": channel, "from_seq": first, "to_seq": last}))

    def send_error(self, channel: str, code: str, message: str) -> None:
        self.send_error_message(code, message, channel=channel)
