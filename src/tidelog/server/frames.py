"""[hot] What a watcher is told, as bytes: Server-Sent Events and WebSocket messages.

    retry: 2000                                     first, once
    id: <cursor>␊event: record␊data: {…}␊␊          record, tombstone, caught-up, topic-deleted, error
    : hb 1700000000000␊␊                            when nothing was said for long

    {"op":"record",…}                               record, tombstone, caught_up, topic_deleted, error

`<cursor>` has every topic of the session, so that a client which comes back with it misses nothing. The two say the
same in other words; what is said and when is `delivery`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tidelog.engine import Gap
from tidelog.server.http.seam import Sink, Socket
from tidelog.server.pages import Page
from tidelog.wire import cursor

RETRY: Final = b"retry: 2000\n\n"
STOPPING: Final = "the server is shutting down; nothing more comes on this connection, connect again"
SLOW: Final = "nothing is taken from this connection: it is closed soon, read faster or ask for less"
_EVENT: Final = b"id: %b\nevent: %b\ndata: {%b\n\n"
_quote = msgspec.json.Encoder().encode


def _gap(name: str, gap: Gap, reason: str) -> bytes:
    return b'"topic":%b,"reason":"%b","gap_from":%d,"gap_to":%d,"earliest_seq":%d,"head_seq":%d}' % (
        _quote(name),
        reason.encode(),
        gap.gap_from,
        gap.gap_to,
        gap.earliest_seq,
        gap.head_seq,
    )


def _level(name: str, head_seq: int) -> bytes:
    return b'"topic":%b,"head_seq":%d}' % (_quote(name), head_seq)


def _deleted(name: str) -> bytes:
    return b'"topic":%b,"head_seq":0,"reason":"deleted"}' % _quote(name)


def _record_event(at: bytes, page: Page) -> bytes:
    """Records, and behind the last ones that they are the last: one piece, which costs a peer one write."""
    record = _EVENT % (at, b"record", page.body)
    return record + _EVENT % (at, b"caught-up", _level(page.name, page.head_seq)) if page.caught_up else record


def _record_message(page: Page) -> bytes:
    return b'{"op":"record",' + page.body


class EventPeer:
    """A peer that is sent Server-Sent Events, of whatever kind."""

    def __init__(self, sink: Sink, loop_time: Callable[[], float]) -> None:
        self._sink, self._time = sink, loop_time
        self.sent_s = loop_time()  # when something was last said

    @property
    def waiting(self) -> int:
        return self._sink.waiting

    async def drained(self) -> None:
        await self._sink.drained()

    def heartbeat(self, epoch_ms: int) -> None:
        self._write(b": hb %d\n\n" % epoch_ms)

    def _write(self, frame: bytes) -> None:
        self._sink.write(frame)
        self.sent_s = self._time()


class Events(EventPeer):
    """A peer that watches topics. `cursors` are the session's, as they move."""

    def __init__(self, sink: Sink, cursors: Mapping[str, int], loop_time: Callable[[], float]) -> None:
        super().__init__(sink, loop_time)
        self._cursors = cursors

    def hello(self) -> None:
        self._write(RETRY)

    def record(self, page: Page) -> None:
        at = cursor.positions(self._cursors)
        self._write(page.framed(at, lambda page: _record_event(at, page)))

    def tombstone(self, name: str, gap: Gap, *, first: bool) -> None:
        """On the first read of a connection a loss is one of the cursor it came with; that the topic is another one
        is said in any case."""
        reason = "from_seq_too_old" if first and gap.reason != "recreated" else gap.reason
        self._event(b"tombstone", _gap(name, gap, reason))

    def caught_up(self, name: str, head_seq: int) -> None:
        self._event(b"caught-up", _level(name, head_seq))

    def topic_deleted(self, name: str) -> None:
        self._event(b"topic-deleted", _deleted(name))

    def stopping(self) -> None:
        self._event(b"error", b'"code":"server_shutting_down","message":%b}' % _quote(STOPPING))

    def slow(self) -> None:
        self._event(b"error", b'"code":429,"message":%b}' % _quote(SLOW))

    def failed(self, name: str, code: str, message: str) -> None:
        self._event(b"error", b'"code":%b,"message":%b,"topic":%b}' % (_quote(code), _quote(message), _quote(name)))

    def _event(self, event: bytes, data: bytes) -> None:
        self._write(_EVENT % (cursor.positions(self._cursors), event, data))


class Messages:
    """A peer that is sent WebSocket messages."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    @property
    def waiting(self) -> int:
        return self._socket.waiting

    async def drained(self) -> None:
        await self._socket.drained()

    def record(self, page: Page) -> None:
        self._socket.send(page.framed(b"", _record_message))
        if page.caught_up:
            self.caught_up(page.name, page.head_seq)

    def tombstone(self, name: str, gap: Gap, *, first: bool) -> None:  # noqa: ARG002 - always the real reason
        self._say(b"tombstone", _gap(name, gap, gap.reason))

    def caught_up(self, name: str, head_seq: int) -> None:
        self._say(b"caught_up", _level(name, head_seq))

    def topic_deleted(self, name: str) -> None:
        self._say(b"topic_deleted", _deleted(name))

    def stopping(self) -> None:
        self.error("server_shutting_down", STOPPING)

    def slow(self) -> None:
        self.error("slow_consumer", SLOW)

    def failed(self, name: str, code: str, message: str) -> None:
        self.error(code, message, topic=name)

    def error(self, code: str, message: str, **more: str) -> None:
        """Something that is no answer to a command."""
        self._socket.send(_quote({"op": "error", "code": code, "message": message, **more}))

    def _say(self, op: bytes, rest: bytes) -> None:
        self._socket.send(b'{"op":"%b",%b' % (op, rest))
