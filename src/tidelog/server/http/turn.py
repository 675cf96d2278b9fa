"""[shell] One request of an HTTP/1.1 connection: how its answer gets onto the wire.

    whole                     content-length, one write where it is small
    stream, to 1.1            chunked; the connection goes on after it
    stream, to 1.0            until the connection closes
    cut off                   the connection is dropped without the last chunk: the peer can tell

When a request is answered before its body was read, the body is thrown away as it comes. Where it would be too much
of it, or where the peer waits to be told to send it, the answer says that the connection closes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.server.http import reply
from tidelog.server.http.exchange import Talk
from tidelog.server.http.seam import Application, Gone, Request, Response, Stream, Upgrade

if TYPE_CHECKING:
    from tidelog.server.http.h1 import H1


class Turn(Talk):
    modern = True  # the peer speaks 1.1
    keep = True  # the peer wants the connection to go on
    sound = True  # it is HTTP to its end; else nothing behind it can be believed
    expects = False  # the peer waits to be told before it sends the body
    chunked = False  # the request
    cost = 0  # bytes of its head, where it had to wait
    _lasts = True  # its answer said that the connection goes on
    _thrown_bytes = 0
    _sink: ChunkSink | None = None

    def __init__(self, connection: H1, app: Application, request: Request) -> None:
        self.connection = connection
        self.house, self.app, self.request = connection.house, app, request

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.request.length)

    def invite(self) -> None:
        if self.expects and not self.received:
            self.expects = False
            self.connection.write(reply.CONTINUE)

    def consumed(self, size: int) -> None:  # noqa: ARG002 - what counts is what is left
        self.connection.govern()

    def thrown_away(self, size: int) -> None:
        self._thrown_bytes += size
        if self.finished and self._thrown_bytes > self.house.limits.discard_bytes_max:
            self.connection.last(self)

    def _decide(self, goes_on: bool) -> bytes:
        """Decide whether the connection goes on after this answer; return what is said about it."""
        rest = 0 if self.complete else (self.request.length or 0) - self.received
        self._lasts = (
            goes_on
            and self.keep
            and self.sound
            and not self.house.draining
            and rest <= self.house.limits.discard_bytes_max
            and not (self.expects and not self.received)
        )
        if self._lasts:
            return b"" if self.modern else reply.KEEP
        return reply.CLOSE

    def send(self, response: Response) -> None:
        says = self._decide(not response.close)
        line = self.house.dates.refresh().line
        self.connection.write(*reply.whole(response, line, says, self.request.method == "HEAD"))
        self._written()

    def stream(self, stream: Stream) -> None:
        bodyless = reply.bodyless(stream.status)
        framing = self._decide(self.modern or bodyless)
        if self.modern and not bodyless:
            framing += reply.CHUNKED
        line = self.house.dates.refresh().line
        self.connection.write(reply.head(stream.status, stream.content_type, stream.headers, line, framing))
        if bodyless or self.request.method == "HEAD":
            self._written()
        else:
            self._sink = ChunkSink(self.connection, self.modern)
            self.spawn(stream, self._sink)

    def streamed(self, whole: bool) -> None:
        if self._sink is not None:
            self._sink.shut()
        if not whole:
            self.connection.abort()
            return
        if self.modern:
            self.connection.write(reply.LAST_CHUNK)
        self._written()

    def _written(self) -> None:
        self.finished = True
        if not self._lasts or self.house.draining:
            self.connection.last(self)
        elif self.complete:
            self.over()
        else:
            self.connection.govern()

    def over(self) -> None:
        if self.sound:
            self.connection.next(self)
        else:
            self.connection.last(self)

    def upgrade(self, answer: Upgrade) -> None:
        if not self.request.upgrade:
            super().upgrade(answer)
        self.connection.upgrade(answer)


class ChunkSink:
    """Where a stream writes: the connection itself, in chunks where the peer knows them."""

    __slots__ = ("_connection", "_modern", "_wrote")

    def __init__(self, connection: H1, modern: bool) -> None:
        self._connection: H1 | None = connection
        self._modern, self._wrote = modern, 0

    @property
    def waiting(self) -> int:
        return 0 if self._connection is None else self._connection.unsent

    def write(self, data: bytes) -> None:
        if self._connection is not None and data:
            self._wrote += len(data)
            self._connection.write(*(reply.chunk(data) if self._modern else (data,)))

    def hold(self, size: int) -> None:
        if self._connection is not None:
            self._connection.hold(size)

    @property
    def is_pressed(self) -> bool:
        return self._connection is not None and self._connection.house.unsent.is_tight

    async def ready(self) -> None:
        await self.drained()
        if self._connection is not None:
            await self._connection.house.unsent.room()

    async def drained(self) -> None:
        if self._connection is None:
            raise Gone
        wrote, self._wrote = self._wrote, 0
        await self._connection.drained(wrote)

    def shut(self) -> None:
        """The stream is over: what it writes from now on goes nowhere."""
        self.hold(0)
        self._connection = None
