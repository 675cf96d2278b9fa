"""[shell] What every connection does alike: one shared buffer to read into, marks on what waits to be written, and
three ways to end.

    finish    no more answers: what was written still goes out, then the connection closes
    linger    the same, but the peer may still be sending: its bytes are read and thrown away for a while
    abort     now, with what was not sent

The peer has left (`gone`) when its side of the connection ended: half a connection is none here, because that is
all that can be seen of a client that was killed in the middle of a long poll.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import sys
import termios
from collections.abc import Generator
from typing import cast

from tidelog.server.http.house import House
from tidelog.server.http.seam import Gone
from tidelog.server.http.unsent import Account

_UNYIELDED_BYTES_MAX = 64 << 10
_CHUNKS_END = b"\r\n\r\n"  # of the last chunk, or of the trailers after it
FLOOD_BYTES_MAX = 1 << 20
"""Bytes that are still read of a peer that was told to stop: it may have sent them before it could know."""


class _Yield:
    """Awaited: everybody else on the loop has a turn."""

    def __await__(self) -> Generator[None]:
        yield


class Connection(asyncio.BufferedProtocol):
    transport: asyncio.Transport

    def __init__(self, house: House) -> None:
        self.house = house
        self.peer = ""
        self.gone = False
        self.blocked = False  # the peer is behind with reading
        self.ending = False  # nothing more will be written
        self._reading = True
        self._eof_due = False  # once all is written
        self._drained: list[asyncio.Future[None]] = []
        self._unyielded = 0
        self._unsent = 0  # what waited to be written at the last tick, and since when that has not changed
        self._moved = 0.0
        self._ended = 0.0  # when it began to end, and when the peer was last heard since
        self._opened = self._heard = house.now
        self._leftover = 0  # bytes that came since
        self._rest: bytes = b""  # input that waits for a later turn
        self._deferred = False  # it waits in the ring, or is parked
        self._parked = False  # it waits until `unpark`
        self._held_bytes = 0  # by the writer of the stream
        self._account = Account(self._evict, self._measure)

    # From accept to close.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's own are none by inheritance
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""
        limits = self.house.limits
        transport.set_write_buffer_limits(high=limits.write_high_bytes, low=limits.write_low_bytes)
        self.house.enter(self)
        self._opened = self._heard = self.house.now  # only now: in an empty house the clock had stopped

    def become(self, other: Connection) -> None:
        """Have `other` speak on this connection from now on."""
        other.transport, other.peer, other.blocked = self.transport, self.peer, self.blocked
        self.house.enter(other)
        self.house.leave(self)
        self.house.unsent.end(self._account)
        self.transport.set_protocol(other)
        other._reading = self._reading
        other.read_on()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone, whatever the reason
        self._leave()
        self.house.unsent.end(self._account)
        self.house.leave(self)

    def eof_received(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self.gone:
            self.gone = self.ending = True
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self.left()

    def left(self) -> None:
        """The peer is gone."""

    # Reading.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's idea of a size; ours is larger
        return self.house.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self.house.now
        if self.ending:
            self._leftover += nbytes
            if self._leftover > self.house.limits.discard_bytes_max:
                self.abort()
        else:
            self.received(self.house.buffer[:nbytes])

    def received(self, data: memoryview) -> None:
        """Take bytes; they are there until this returns."""

    def defer(self, rest: bytes) -> None:
        """This turn's budget is spent: handle `rest` in a later turn, and read nothing meanwhile."""
        self._rest = rest
        if not self._deferred:
            self._deferred = True
            self.read_on(False)
            self.house.ring.enter(self)

    def park(self, rest: bytes) -> None:
        """Handle `rest` after `unpark`, and read nothing meanwhile: the peer has to read first, or a handler."""
        self._rest = rest
        self._deferred = self._parked = True
        self.read_on(False)
        self._measure()

    def unpark(self) -> None:
        if self._parked:
            self._parked = False
            self.house.ring.enter(self)

    def go_on(self) -> None:
        """Handle the next slice of what waits."""
        self._deferred = False
        rest, self._rest = self._rest, b""
        if not self.ending and not self.gone:
            self._measure()
            self.resume(rest)

    def resume(self, rest: bytes) -> None:
        """Handle input that was deferred, and read on if nothing is left of it."""

    def read_on(self, on: bool = True) -> None:
        """Read, or read no more until told to. Nothing is read while input waits for its turn."""
        on = on and not self._deferred
        if on != self._reading and not self.gone:
            self._reading = on
            if on:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def breaks_off(self, missing: int | None) -> bool:
        """Whether the peer has left without having sent so many bytes more, or, where that is None, without the end of
        a chunked body. Asked while nothing is read: the transport would notice when it reads the end."""
        sock = self.transport.get_extra_info("socket")
        if self.gone or sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        if not poll.poll(0):
            return False
        unread = int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
        if missing is not None:
            return unread + len(self._rest) < missing
        # Nothing more comes, so what is there now either ends the body or never will.
        return not self._unread_tail(sock.fileno(), unread).endswith(_CHUNKS_END)

    def _unread_tail(self, number: int, unread: int) -> bytes:
        """The last bytes that wait to be parsed, in the kernel or in `_rest`."""
        size = len(_CHUNKS_END)
        if not unread:
            return self._rest[-size:]
        with socket.fromfd(
            number, socket.AF_INET, socket.SOCK_STREAM
        ) as copy:  # the socket object of the loop refuses reads
            try:
                peeked = copy.recv(unread, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:
                return b""
        return (self._rest[-size:] + peeked)[-size:]

    # Writing.

    def write(self, *data: bytes) -> None:
        if self.ending or self.transport.is_closing():  # it may have failed, which we are told at the next turn only
            return
        if len(data) == 1:
            self.transport.write(data[0])
        else:
            self.transport.writelines(data)

    @property
    def unsent(self) -> int:
        """Bytes that the peer's kernel has not taken yet."""
        return 0 if self.gone else self.transport.get_write_buffer_size()

    def _measure(self) -> None:
        """Count what the kernel has not taken against the bound of the process."""
        waiting = self.transport.get_write_buffer_size() + self._held_bytes
        self.house.unsent.set(self._account, waiting + len(self._rest) if self._parked else waiting)

    def hold(self, size: int) -> None:
        """Count bytes that the writer of the stream has ready and did not write yet."""
        self._held_bytes = size
        self._measure()

    def _evict(self) -> None:
        limit = self.house.limits.unsent_bytes_max
        self.house.refusals.count(
            "unsent_bytes",
            self.peer,
            f"answers of {limit} bytes wait for peers that do not read them; the connection of {self.peer}, which took "
            "nothing for the longest time, was closed",
        )
        self.abort()

    def pause_writing(self) -> None:
        self.blocked = True
        self._measure()

    def resume_writing(self) -> None:
        self.blocked = False
        self._measure()
        if self._eof_due:
            self._say_eof()
        for waiter in self._drained:
            if not waiter.done():
                waiter.set_result(None)

    async def drained(self, wrote: int = 0) -> None:
        """Return when the peer keeps up. A writer whose peer always does lets others run now and then all the same."""
        self._unyielded += wrote
        if self.blocked and not self.gone:
            self._measure()
        while self.blocked and not self.gone:
            waiter: asyncio.Future[None] = self.house.loop.create_future()
            self._drained.append(waiter)
            try:
                await waiter
            finally:
                self._drained.remove(waiter)
            self._unyielded = 0
        if self._unyielded > _UNYIELDED_BYTES_MAX:
            self._unyielded = 0
            await _Yield()
        if self.gone:
            raise Gone

    # The end.

    def finish(self) -> None:
        if not self.ending:
            self._begin_to_end()
            self.transport.close()

    def linger(self, bytes_max: int | None = None) -> None:
        """Finish, and read what still comes, up to so many bytes; a peer that floods gets few."""
        if not self.ending:
            self._begin_to_end()
            if bytes_max is not None:
                self._leftover = max(self.house.limits.discard_bytes_max - bytes_max, 0)
            self.read_on()
            if self.transport.get_write_buffer_size():
                self._eof_due = True
                self.transport.set_write_buffer_limits(high=0)  # so that `resume_writing` means that all is out
            else:
                self._say_eof()

    def _say_eof(self) -> None:
        """Not left to the transport to do when all is out: asyncio's raises into the loop if the peer reset."""
        self._eof_due = False
        try:
            self.transport.write_eof()
        except OSError:
            self.abort()

    def _begin_to_end(self) -> None:
        self.ending = True
        self._rest, self._deferred, self._parked = b"", False, False
        self._ended = self._heard = self.house.now

    def abort(self) -> None:
        self.ending = True
        self.house.unsent.end(self._account)
        self.transport.abort()

    def wind_down(self) -> None:
        self.finish()

    def tick(self, now: float) -> None:
        limits = self.house.limits
        unsent = self.transport.get_write_buffer_size()
        self._measure()
        if unsent != self._unsent:
            self._unsent, self._moved = unsent, now
            self._ended = self._heard = now  # whoever still takes what we sent need not have said anything
        elif unsent and now - self._moved > limits.write_timeout_s:
            self.stalled(f"{self.peer} took nothing for {limits.write_timeout_s:g} s; its connection was closed")
            self.abort()
        elif self.ending and not unsent:
            if now - self._heard > limits.linger_s or now - self._ended > limits.header_timeout_s:
                self.abort()
        elif not self.ending:
            self.watch(now)

    def stalled(self, what: str) -> None:
        self.house.refusals.count("stalled", self.peer, what)

    def watch(self, now: float) -> None:
        """Look after time-outs of one's own."""
