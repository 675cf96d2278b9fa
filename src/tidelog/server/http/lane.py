"""[shell] One request of an HTTP/2 connection: its answer, in frames, as far as the peer's windows let it.

    write ──► out ──► a quantum at a time, in turn with the other lanes ──► DATA frames
               └── `waiting`; above the high mark `drained` waits until the low mark

What is not wanted of a body is thrown away as it comes, its window given back; past the bound the lane is reset
with NO_ERROR, after the whole answer, which is how a server says "enough" without losing what it said.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes

from tidelog.server.http import reply
from tidelog.server.http.exchange import Talk
from tidelog.server.http.seam import Gone, Headers, Request, Response, Stream
from tidelog.server.http.unsent import Account

if TYPE_CHECKING:
    from tidelog.server.http.h2 import H2

# What HTTP/2 has other means for; a peer takes a message that carries one for broken.
_HOPWISE = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection"))


class Lane(Talk):
    queued = False  # it waits for its turn to send
    open_ended = False  # its body was given up: the peer may still think that it goes on
    head_bytes = 0  # of its request
    stalled_since: float | None = None  # since when it waits for its window, without a byte taken
    _streaming = False  # it counts among the streams of its connection
    _last = False  # its answer is to be the connection's last
    _thrown_bytes = 0

    def __init__(self, connection: H2, number: int, request: Request) -> None:
        super().__init__(connection.house, connection.house.coded, request)
        self.connection, self.number = connection, number
        self.out: deque[memoryview] = deque()
        self.out_bytes = 0
        self.out_ends = False  # nothing will be added to `out`
        self.heard = connection.house.now
        self._wrote = 0
        self._drained: list[asyncio.Future[None]] = []
        self._held_bytes = 0  # by the writer of the stream
        self._account = Account(self._evict)

    # Its body.

    def invite(self) -> None:
        if (self.request.header(b"expect") or b"").lower() == b"100-continue":
            self.connection.head(self, [(b":status", b"100")])

    def consumed(self, size: int) -> None:
        self.connection.give_back(self.number, size)

    def thrown_away(self, size: int) -> None:
        self._thrown_bytes += size
        if self.finished and self._thrown_bytes > self.house.limits.discard_bytes_max:
            self.connection.reset(self, ErrorCodes.NO_ERROR)

    # Its answer.

    def _head(self, status: int, content_type: bytes, headers: Headers, length: int | None) -> None:
        reply.lines(headers)  # raises for what must not be sent
        fields = [(b":status", b"%d" % status), (b"date", self.house.dates.refresh().value)]
        if not reply.bodyless(status):
            fields.append((b"content-type", content_type))
            if length is not None:
                fields.append((b"content-length", b"%d" % length))
        fields += [(name.lower(), value) for name, value in headers if name.lower() not in _HOPWISE]
        empty = length == 0 or self.request.method == "HEAD" or reply.bodyless(status)
        self.connection.head(self, fields, ends=empty)
        if empty and not self.away:
            self.sent()

    def send(self, response: Response) -> None:
        self._last = response.close
        self._head(response.status, response.content_type, response.headers, len(response.body))
        if not self.finished and not self.away:
            self.add(response.body)
            self.out_ends = True
            self.connection.push(self)

    def stream(self, stream: Stream) -> None:
        limit = self.house.limits.connection_streams_max
        if limit and self.connection.streams >= limit:
            said = f"{limit} streams are open on this connection; another was refused"
            self.house.refusals.count("streams", self.connection.peer, said)
            self.send(self.app.malformed(self.request, 429, said))
            return
        self._head(stream.status, stream.content_type, stream.headers, None)
        if not self.finished and not self.away:
            self._streaming = True
            self.connection.streams += 1
            self.spawn(stream, self)

    def closed(self) -> None:
        """It is over: it counts no more."""
        self.house.unsent.end(self._account)
        self.stalled_since = None
        if self._streaming:
            self._streaming = False
            self.connection.streams -= 1

    def _evict(self) -> None:
        limit, peer = self.house.limits.unsent_bytes_max, self.connection.peer
        self.house.refusals.count(
            "unsent_bytes",
            peer,
            f"answers of {limit} bytes wait for peers that do not read them; a stream of {peer}, which took nothing "
            "for the longest time, was reset",
        )
        self.connection.evict(self)

    def streamed(self, whole: bool) -> None:
        if whole:
            self.out_ends = True
            self.connection.push(self)
        else:
            self.connection.reset(self, ErrorCodes.INTERNAL_ERROR)

    def sent(self) -> None:
        """The last byte of the answer was framed."""
        self.finished = True
        if self._last:
            self.connection.farewell()
        if self.complete:
            self.over()

    def over(self) -> None:
        if self.open_ended:
            self.connection.reset(self, ErrorCodes.NO_ERROR)
        else:
            self.connection.done(self)

    # What its stream writes to.

    @property
    def ends(self) -> bool:
        """Everything was framed, and nothing will follow."""
        return self.out_ends and not self.out

    @property
    def waiting(self) -> int:
        return self.out_bytes + self.connection.unsent

    def write(self, data: bytes) -> None:
        if data and not self.away and not self.out_ends:
            self._wrote += len(data)
            self.add(data)
            self.connection.push(self)

    def add(self, data: bytes) -> None:
        self.out.append(memoryview(data))
        self.out_bytes += len(data)
        self._measure()

    def hold(self, size: int) -> None:
        self._held_bytes = size
        self._measure()

    def _measure(self) -> None:
        self.house.unsent.set(self._account, self.out_bytes + self._held_bytes)

    def took(self) -> None:
        """Some of `out` was framed, or nothing of it."""
        if self.out_bytes + self._held_bytes < self._account.bytes:
            self.stalled_since = None
            self._measure()
        if self._drained and self.out_bytes <= self.house.limits.write_low_bytes:
            self._wake()

    def stall(self) -> None:
        """It waits for its window, and may have done so before."""
        if self.stalled_since is None:
            self.stalled_since = self.house.now

    def opened(self) -> None:
        """The peer takes bytes of it again."""
        self.stalled_since = None
        self._wake()

    @property
    def is_pressed(self) -> bool:
        return self.house.unsent.is_tight

    async def ready(self) -> None:
        while not self.away and not self.out and self.connection.window(self) <= 0:
            self.connection.want_window(self)
            await self._woken()
        await self.drained()
        await self.house.unsent.room()

    def _wake(self) -> None:
        for waiter in self._drained:
            if not waiter.done():
                waiter.set_result(None)

    async def drained(self) -> None:
        limits = self.house.limits
        if self.out_bytes > (limits.write_low_bytes if self.house.unsent.is_tight else limits.write_high_bytes):
            await self._woken()
        if self.away:
            raise Gone
        wrote, self._wrote = self._wrote, 0
        await self.connection.drained(wrote)

    async def _woken(self) -> None:
        if not self.away:
            waiter: asyncio.Future[None] = self.house.loop.create_future()
            self._drained.append(waiter)
            try:
                await waiter
            finally:
                self._drained.remove(waiter)

    def leave(self) -> None:
        self.out.clear()
        self.out_bytes = 0
        super().leave()
        self.house.unsent.end(self._account)
        self._wake()
