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

from tidelog.http.interface import ClientDisconnected
from tidelog.http.memory_budget import UnsentAccount
from tidelog.http.server_state import ServerState

_YIELD_EVERY_BYTES = 64 << 10
_CHUNKS_END = b"\r\n\r\n"  # of the last chunk, or of the trailers after it
FLOOD_BYTES_MAX = 1 << 20
"""Bytes that are still read of a peer that was told to stop: it may have sent them before it could know."""


class _YieldToLoop:
    """Awaited: everybody else on the loop has a turn."""

    def __await__(self) -> Generator[None]:
        yield


class Connection(asyncio.BufferedProtocol):
    transport: asyncio.Transport

    def __init__(self, server_state: ServerState) -> None:
        self.server_state = server_state
        self.peer = ""
        self.disconnected = False
        self.write_paused = False  # the peer is behind with reading
        self.is_closing = False  # nothing more will be written
        self._reading = True
        self._eof_pending = False  # once all is written
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._bytes_since_yield = 0
        self._last_unsent_bytes = 0  # what waited to be written at the last tick, and since when that has not changed
        self._last_progress_s = 0.0
        self._closing_since_s = 0.0  # when it began to end, and when the peer was last heard since
        self._opened_s = self._last_received_s = server_state.now_s
        self._discarded_bytes = 0  # bytes that came since
        self._deferred_input: bytes = b""  # input that waits for a later turn
        self._is_deferred = False  # it waits in the ring, or is parked
        self._is_parked = False  # it waits until `unpark`
        self._reserved_bytes = 0  # by the writer of the stream
        self._unsent_account = UnsentAccount(self._evict_for_memory, self._update_unsent)

    # From accept to close.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's own are none by inheritance
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""
        limits = self.server_state.limits
        transport.set_write_buffer_limits(high=limits.write_high_bytes, low=limits.write_low_bytes)
        self.server_state.add_connection(self)
        self._opened_s = self._last_received_s = (
            self.server_state.now_s
        )  # only now: in an empty house the clock had stopped

    def switch_protocol(self, other: Connection) -> None:
        """Have `other` speak on this connection from now on."""
        other.transport, other.peer, other.write_paused = self.transport, self.peer, self.write_paused
        self.server_state.add_connection(other)
        self.server_state.remove_connection(self)
        self.server_state.unsent_budget.release(self._unsent_account)
        self.transport.set_protocol(other)
        other._reading = self._reading
        other.set_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone, whatever the reason
        self._handle_disconnect()
        self.server_state.unsent_budget.release(self._unsent_account)
        self.server_state.remove_connection(self)

    def eof_received(self) -> None:
        self._handle_disconnect()

    def _handle_disconnect(self) -> None:
        if not self.disconnected:
            self.disconnected = self.is_closing = True
            for waiter in self._drain_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self.on_disconnect()

    def on_disconnect(self) -> None:
        """The peer is gone."""

    # Reading.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's idea of a size; ours is larger
        return self.server_state.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._last_received_s = self.server_state.now_s
        if self.is_closing:
            self._discarded_bytes += nbytes
            if self._discarded_bytes > self.server_state.limits.discard_bytes_max:
                self.abort()
        else:
            self.on_data(self.server_state.receive_buffer[:nbytes])

    def on_data(self, data: memoryview) -> None:
        """Take bytes; they are there until this returns."""

    def defer(self, remaining: bytes) -> None:
        """This turn's budget is spent: handle `rest` in a later turn, and read nothing meanwhile."""
        self._deferred_input = remaining
        if not self._is_deferred:
            self._is_deferred = True
            self.set_reading(False)
            self.server_state.turn_scheduler.schedule(self)

    def park(self, remaining: bytes) -> None:
        """Handle `rest` after `unpark`, and read nothing meanwhile: the peer has to read first, or a handler."""
        self._deferred_input = remaining
        self._is_deferred = self._is_parked = True
        self.set_reading(False)
        self._update_unsent()

    def unpark(self) -> None:
        if self._is_parked:
            self._is_parked = False
            self.server_state.turn_scheduler.schedule(self)

    def resume_deferred(self) -> None:
        """Handle the next slice of what waits."""
        self._is_deferred = False
        rest, self._deferred_input = self._deferred_input, b""
        if not self.is_closing and not self.disconnected:
            self._update_unsent()
            self.process_deferred(rest)

    def process_deferred(self, remaining: bytes) -> None:
        """Handle input that was deferred, and read on if nothing is left of it."""

    def set_reading(self, enabled: bool = True) -> None:
        """Read, or read no more until told to. Nothing is read while input waits for its turn."""
        enabled = enabled and not self._is_deferred
        if enabled != self._reading and not self.disconnected:
            self._reading = enabled
            if enabled:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def peer_closed_before(self, missing_bytes: int | None) -> bool:
        """Whether the peer has left without having sent so many bytes more, or, where that is None, without the end of
        a chunked body. Asked while nothing is read: the transport would notice when it reads the end."""
        sock = self.transport.get_extra_info("socket")
        if self.disconnected or sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        if not poll.poll(0):
            return False
        unread = int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
        if missing_bytes is not None:
            return unread + len(self._deferred_input) < missing_bytes
        # Nothing more comes, so what is there now either ends the body or never will.
        return not self._unread_tail(sock.fileno(), unread).endswith(_CHUNKS_END)

    def _unread_tail(self, number: int, unread: int) -> bytes:
        """The last bytes that wait to be parsed, in the kernel or in `_rest`."""
        size = len(_CHUNKS_END)
        if not unread:
            return self._deferred_input[-size:]
        with socket.fromfd(
            number, socket.AF_INET, socket.SOCK_STREAM
        ) as copy:  # the socket object of the loop refuses reads
            try:
                peeked = copy.recv(unread, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:
                return b""
        return (self._deferred_input[-size:] + peeked)[-size:]

    # Writing.

    def write(self, *data: bytes) -> None:
        if (
            self.is_closing or self.transport.is_closing()
        ):  # it may have failed, which we are told at the next turn only
            return
        if len(data) == 1:
            self.transport.write(data[0])
        else:
            self.transport.writelines(data)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer's kernel has not taken yet."""
        return 0 if self.disconnected else self.transport.get_write_buffer_size()

    def _update_unsent(self) -> None:
        """Count what the kernel has not taken against the bound of the process."""
        waiting = self.transport.get_write_buffer_size() + self._reserved_bytes
        self.server_state.unsent_budget.update(
            self._unsent_account, waiting + len(self._deferred_input) if self._is_parked else waiting
        )

    def reserve(self, size: int) -> None:
        """Count bytes that the writer of the stream has ready and did not write yet."""
        self._reserved_bytes = size
        self._update_unsent()

    def _evict_for_memory(self) -> None:
        limit = self.server_state.limits.unsent_bytes_max
        self.server_state.limit_counters.count(
            "unsent_bytes",
            self.peer,
            f"answers of {limit} bytes wait for peers that do not read them; the connection of {self.peer}, which took "
            "nothing for the longest time, was closed",
        )
        self.abort()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._update_unsent()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._update_unsent()
        if self._eof_pending:
            self._write_eof()
        for waiter in self._drain_waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def drain(self, written_bytes: int = 0) -> None:
        """Return when the peer keeps up. A writer whose peer always does lets others run now and then all the same."""
        self._bytes_since_yield += written_bytes
        if self.write_paused and not self.disconnected:
            self._update_unsent()
        while self.write_paused and not self.disconnected:
            waiter: asyncio.Future[None] = self.server_state.loop.create_future()
            self._drain_waiters.append(waiter)
            try:
                await waiter
            finally:
                self._drain_waiters.remove(waiter)
            self._bytes_since_yield = 0
        if self._bytes_since_yield > _YIELD_EVERY_BYTES:
            self._bytes_since_yield = 0
            await _YieldToLoop()
        if self.disconnected:
            raise ClientDisconnected

    # The end.

    def close_after_write(self) -> None:
        if not self.is_closing:
            self._begin_close()
            self.transport.close()

    def lingering_close(self, bytes_max: int | None = None) -> None:
        """Finish, and read what still comes, up to so many bytes; a peer that floods gets few."""
        if not self.is_closing:
            self._begin_close()
            if bytes_max is not None:
                self._discarded_bytes = max(self.server_state.limits.discard_bytes_max - bytes_max, 0)
            self.set_reading()
            if self.transport.get_write_buffer_size():
                self._eof_pending = True
                self.transport.set_write_buffer_limits(high=0)  # so that `resume_writing` means that all is out
            else:
                self._write_eof()

    def _write_eof(self) -> None:
        """Not left to the transport to do when all is out: asyncio's raises into the loop if the peer reset."""
        self._eof_pending = False
        try:
            self.transport.write_eof()
        except OSError:
            self.abort()

    def _begin_close(self) -> None:
        self.is_closing = True
        self._deferred_input, self._is_deferred, self._is_parked = b"", False, False
        self._closing_since_s = self._last_received_s = self.server_state.now_s

    def abort(self) -> None:
        self.is_closing = True
        self.server_state.unsent_budget.release(self._unsent_account)
        self.transport.abort()

    def begin_shutdown(self) -> None:
        self.close_after_write()

    def tick(self, now: float) -> None:
        limits = self.server_state.limits
        unsent = self.transport.get_write_buffer_size()
        self._update_unsent()
        if unsent != self._last_unsent_bytes:
            self._last_unsent_bytes, self._last_progress_s = unsent, now
            self._closing_since_s = self._last_received_s = (
                now  # whoever still takes what we sent need not have said anything
            )
        elif unsent and now - self._last_progress_s > limits.write_timeout_s:
            self.count_stalled(f"{self.peer} took nothing for {limits.write_timeout_s:g} s; its connection was closed")
            self.abort()
        elif self.is_closing and not unsent:
            if now - self._last_received_s > limits.linger_s or now - self._closing_since_s > limits.header_timeout_s:
                self.abort()
        elif not self.is_closing:
            self.check_timeouts(now)

    def count_stalled(self, detail: str) -> None:
        self.server_state.limit_counters.count("stalled", self.peer, detail)

    def check_timeouts(self, now: float) -> None:
        """Look after time-outs of one's own."""
