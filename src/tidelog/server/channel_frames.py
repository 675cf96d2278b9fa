"""[hot] What a member of a channel is told, as bytes: Server-Sent Events and WebSocket messages.

    id: 7␊event: message␊data: {"channel","seq","ts","sender","payload"}␊␊     the seq is where to come back to
    event: presence␊data: {"channel","kind","user","owner","ts"}␊␊             no id: it is in no history
    event: gap␊data: {"channel","from_seq","to_seq"}␊␊                         messages that are not kept any more
    event: end␊data: {"channel","reason","last_seq"}␊␊                         then the end

    {"op":"message",…}    {"op":"presence",…}    {"op":"gap",…}    {"op":"channel_end",…}

A payload that is UTF-8 is text (`payload`), any other is `payload_base64`. The frame of an event is made once for all
who are told of it in one turn.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final

import msgspec

from tidelog.channels import Cut, Event, Message, Presence
from tidelog.server.frames import RETRY, SLOW, STOPPING, EventPeer
from tidelog.server.http.seam import Socket

_KEPT_MAX: Final = 1_024  # events whose frames are kept while receivers are told
_quote = msgspec.json.Encoder().encode


def said(payload: bytes) -> bytes:
    """A payload as a field of JSON."""
    try:
        return b'"payload":%b' % _quote(payload.decode())
    except UnicodeDecodeError:
        return b'"payload_base64":"%b"' % b64encode(payload)


def message_body(message: Message) -> bytes:
    """A message as the inside of an object, its brace behind it."""
    return b'"channel":%b,"seq":%d,"ts":%d,"sender":%b,%b}' % (
        _quote(message.channel),
        message.seq,
        message.ts_ms,
        _quote(message.sender),
        said(message.payload),
    )


def _body(event: Event) -> bytes:
    if isinstance(event, Message):
        return message_body(event)
    if isinstance(event, Presence):
        kind, owner = event.kind.encode(), b"true" if event.owner else b"false"
        told = _quote(event.channel), kind, _quote(event.user), owner, event.ts_ms
        return b'"channel":%b,"kind":"%b","user":%b,"owner":%b,"ts":%d}' % told
    return b'"channel":%b,"reason":"%b","last_seq":%d}' % (_quote(event.channel), event.reason.encode(), event.last_seq)


def sse(event: Event) -> bytes:
    if isinstance(event, Message):
        return b"id: %d\nevent: message\ndata: {%b\n\n" % (event.seq, _body(event))
    return b"event: %b\ndata: {%b\n\n" % (b"end" if isinstance(event, Cut) else b"presence", _body(event))


def ws(event: Event) -> bytes:
    op = {Message: b"message", Presence: b"presence", Cut: b"channel_end"}[type(event)]
    return b'{"op":"%b",%b' % (op, _body(event))


Render = Callable[[Event], bytes]


class Kept:
    """Frames of events by what renders them. An event that is kept here is alive, so its id is its own."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, Render], tuple[Event, bytes]] = {}

    def frame(self, event: Event, render: Render) -> bytes:
        key = (id(event), render)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            found = self._kept[key] = (event, render(event))
        return found[1]

    def clear(self) -> None:
        self._kept.clear()


class ChannelEvents(EventPeer):
    """A peer that hears one channel."""

    render = staticmethod(sse)

    def hello(self, **told: Any) -> None:
        self._write(RETRY + b"event: subscribed\ndata: %b\n\n" % _quote(told))

    def frames(self, made: list[bytes]) -> None:
        """Several events are one write."""
        self._write(made[0] if len(made) == 1 else b"".join(made))

    def gap(self, channel: str, first: int, last: int) -> None:
        self._write(b"event: gap\ndata: %b\n\n" % _quote({"channel": channel, "from_seq": first, "to_seq": last}))

    def stopping(self) -> None:
        self._error("server_shutting_down", STOPPING)

    def slow(self) -> None:
        self._error(429, SLOW)

    def failed(self, channel: str, code: str, message: str) -> None:
        self._error(code, message, channel=channel)

    def _error(self, code: str | int, message: str, **more: str) -> None:
        self._write(b"event: error\ndata: %b\n\n" % _quote({"code": code, "message": message, **more}))


class ChannelMessages:
    """A peer that is sent WebSocket messages; of as many channels as it likes."""

    render = staticmethod(ws)

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    @property
    def waiting(self) -> int:
        return self._socket.waiting

    def frames(self, made: list[bytes]) -> None:
        for frame in made:
            self._socket.send(frame)

    def gap(self, channel: str, first: int, last: int) -> None:
        self._socket.send(_quote({"op": "gap", "channel": channel, "from_seq": first, "to_seq": last}))

    def failed(self, channel: str, code: str, message: str) -> None:
        self._socket.send(_quote({"op": "error", "code": code, "message": message, "channel": channel}))
