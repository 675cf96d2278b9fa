"""`Connection`: what every connection does, whatever its protocol. `ServerState`: what those of one listener share.

A connection reads into the shared buffer, bounds what waits to be written, and closes in one of three ways:

    close_after_write   no more responses: what was written is still sent, then the connection closes
    lingering_close     the same, but the client may still be sending: its bytes are discarded for a while
    abort               close now, with unsent bytes

A client has disconnected when its side of the connection ended. A half-closed connection counts as closed, because it
looks the same as a client that was killed in the middle of a long poll.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import socket
import sys
import termios
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Final, cast

from tidelog.http.compression import CompressionMiddleware
from tidelog.http.fast_path import HeadCache
from tidelog.http.h1_encoder import DateHeader
from tidelog.http.interface import Application, ClientDisconnected
from tidelog.http.limits import (
    LimitCounters,
    Limits,
    RequestBodyBudget,
    TurnScheduler,
    UnsentAccount,
    UnsentBudget,
    WaiterList,
)

_log = logging.getLogger("tidelog.server")
RECEIVE_BYTES: Final = 256 << 10
_YIELD_EVERY_BYTES = 64 << 10
_CHUNKS_END = b"\r\n\r\n"  # of the last chunk, or of the trailers after it
FLOOD_BYTES_MAX = 1 << 20
"""Bytes that are still read from a client that exceeded a limit: it may have sent them before it received the error."""

# CVE-2024-12254: `writelines` of these versions of asyncio never calls `pause_writing`, so a client that does not read
# lets responses grow without limit.
_WRITELINES_IGNORES_LIMITS = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)


class _YieldToLoop:
    """Awaiting this lets the loop run one turn."""

    def __await__(self) -> Generator[None]:
        yield


class Connection(asyncio.BufferedProtocol):
    transport: asyncio.Transport

    def __init__(self, server_state: ServerState) -> None:
        self.server_state = server_state
        self.peer = ""
        self.disconnected = False
        self.write_paused = False  # the write buffer is above its high mark
        self.is_closing = False  # nothing more will be written
        self._reading = True
        self._eof_pending = False  # to be sent once everything is written
        self._drain_waiters = WaiterList()
        self._bytes_since_yield = 0
        self._joins_writes = False  # where `writelines` does not pause
        self._last_unsent_bytes = 0  # at the last tick, and since when that number has not changed
        self._last_progress_s = 0.0
        self._closing_since_s = 0.0
        self._opened_s = self._last_received_s = server_state.now_s
        self._discarded_bytes = 0  # received since closing began
        self._deferred_input: bytes = b""  # input that waits for a later turn
        self._is_deferred = False  # it waits for the turn scheduler, or is parked
        self._is_parked = False  # it waits for `unpark`
        self._unsent_account = UnsentAccount(server_state.unsent_budget, self._measure_unsent, self._evict_for_memory)

    # Accepting and disconnecting.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""
        limits = self.server_state.limits
        transport.set_write_buffer_limits(high=limits.write_high_bytes, low=limits.write_low_bytes)
        self._joins_writes = _WRITELINES_IGNORES_LIMITS and type(transport).__module__.startswith("asyncio.")
        self.server_state.add_connection(self)
        self._opened_s = self._last_received_s = self.server_state.now_s  # the clock stands still without connections

    def switch_protocol(self, other: Connection) -> None:
        """Hand the transport over to `other`."""
        other.transport, other.peer, other.write_paused = self.transport, self.peer, self.write_paused
        other._joins_writes = self._joins_writes
        self.server_state.add_connection(other)
        self.server_state.remove_connection(self)
        self._unsent_account.release()
        self.transport.set_protocol(other)
        other._reading = self._reading
        other.set_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason does not matter
        self._handle_disconnect()
        self._unsent_account.release()
        self.server_state.remove_connection(self)

    def eof_received(self) -> None:
        self._handle_disconnect()

    def _handle_disconnect(self) -> None:
        if not self.disconnected:
            self.disconnected = self.is_closing = True
            self._drain_waiters.wake()
            self.on_disconnect()

    def on_disconnect(self) -> None:
        """The client has disconnected."""

    # Reading.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the shared buffer is larger
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
        """Handle input. `data` is valid until this returns."""

    def defer(self, remaining: bytes) -> None:
        """Handle `remaining` in a later turn, because the budget of this one is spent, and stop reading until then."""
        self._deferred_input = remaining
        if not self._is_deferred:
            self._is_deferred = True
            self.set_reading(False)
            self.server_state.turn_scheduler.schedule(self)

    def park(self, remaining: bytes) -> None:
        """Handle `remaining` after `unpark` and stop reading until then: the client or a handler has to read first."""
        self._deferred_input = remaining
        self._is_deferred = self._is_parked = True
        self.set_reading(False)
        self._unsent_account.update()

    def unpark(self) -> None:
        if self._is_parked:
            self._is_parked = False
            self.server_state.turn_scheduler.schedule(self)

    def resume_deferred(self) -> None:
        """Handle the next part of the deferred input."""
        self._is_deferred = False
        remaining, self._deferred_input = self._deferred_input, b""
        if not self.is_closing and not self.disconnected:
            self._unsent_account.update()
            self.process_deferred(remaining)

    def process_deferred(self, remaining: bytes) -> None:
        """Handle deferred input, and resume reading if all of it was handled."""

    def set_reading(self, enabled: bool = True) -> None:
        """Resume or pause reading. Nothing is read while input is deferred."""
        enabled = enabled and not self._is_deferred
        if enabled != self._reading and not self.disconnected:
            self._reading = enabled
            if enabled:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def peer_closed_before(self, missing_bytes: int | None) -> bool:
        """Return whether the client disconnected before it sent that many bytes more (None: before the end of a chunked
        body). For connections that are not read: otherwise the transport reports the end."""
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
        # Nothing more will arrive: the bytes that are there end the body, or it never ends.
        return not self._unread_tail(sock.fileno(), unread).endswith(_CHUNKS_END)

    def _unread_tail(self, fd: int, unread: int) -> bytes:
        """Return the last bytes that wait to be parsed, in the kernel or in `_deferred_input`."""
        size = len(_CHUNKS_END)
        if not unread:
            return self._deferred_input[-size:]
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as copy:  # the loop's socket object refuses reads
            try:
                peeked = copy.recv(unread, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:
                return b""
        return (self._deferred_input[-size:] + peeked)[-size:]

    # Writing.

    def write(self, *data: bytes) -> None:
        if self.is_closing or self.transport.is_closing():  # a failed transport reports it in the next turn
            return
        if len(data) == 1:
            self.transport.write(data[0])
        elif self._joins_writes:
            self.transport.write(b"".join(data))
        else:
            self.transport.writelines(data)

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the write buffer."""
        return 0 if self.disconnected else self.transport.get_write_buffer_size()

    def _measure_unsent(self) -> int:
        parked_bytes = len(self._deferred_input) if self._is_parked else 0
        return self.transport.get_write_buffer_size() + parked_bytes

    def reserve(self, size: int) -> None:
        self._unsent_account.reserve(size)

    def _evict_for_memory(self) -> None:
        self.count_unsent_eviction(f"the connection of {self.peer} was closed")
        self.abort()

    def count_unsent_eviction(self, action: str) -> None:
        """Count a client that lost a response because it read nothing for the longest time."""
        limit = self.server_state.limits.unsent_bytes_max
        detail = f"responses of {limit} bytes wait for clients that do not read them; {action}"
        self.server_state.limit_counters.count("unsent_bytes", self.peer, detail)

    def pause_writing(self) -> None:
        self.write_paused = True
        self._unsent_account.update()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._unsent_account.update()
        if self._eof_pending:
            self._write_eof()
        self._drain_waiters.wake()

    async def drain(self, written_bytes: int = 0) -> None:
        """Return when the client keeps up. A writer whose client always does yields to the loop now and then."""
        self._bytes_since_yield += written_bytes
        if self.write_paused and not self.disconnected:
            self._unsent_account.update()
        while self.write_paused and not self.disconnected:
            await self._drain_waiters.wait()
            self._bytes_since_yield = 0
        if self._bytes_since_yield > _YIELD_EVERY_BYTES:
            self._bytes_since_yield = 0
            await _YieldToLoop()
        if self.disconnected:
            raise ClientDisconnected

    # Closing.

    def close_after_write(self) -> None:
        if not self.is_closing:
            self._begin_close()
            self.transport.close()

    def lingering_close(self, bytes_max: int | None = None) -> None:
        """Close after the last write, and discard up to `bytes_max` bytes of input meanwhile."""
        if not self.is_closing:
            self._begin_close()
            if bytes_max is not None:
                self._discarded_bytes = max(self.server_state.limits.discard_bytes_max - bytes_max, 0)
            self.set_reading()
            if self.transport.get_write_buffer_size():
                self._eof_pending = True
                self.transport.set_write_buffer_limits(high=0)  # `resume_writing` is called when everything is sent
            else:
                self._write_eof()

    def _write_eof(self) -> None:
        """Called when the write buffer is empty: asyncio's own waiting for that raises into the loop after a reset."""
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
        self._unsent_account.release()
        self.transport.abort()

    def begin_shutdown(self) -> None:
        """Close if idle; else finish the requests in progress and accept no more."""
        self.close_after_write()

    def tick(self, now: float) -> None:
        """Check time-outs. `now` is the loop's time."""
        limits = self.server_state.limits
        unsent = self.transport.get_write_buffer_size()
        self._unsent_account.update()
        if unsent != self._last_unsent_bytes:
            self._last_unsent_bytes, self._last_progress_s = unsent, now
            self._closing_since_s = self._last_received_s = now  # a client that reads need not send
        elif unsent and now - self._last_progress_s > limits.write_timeout_s:
            self.count_stalled(f"{self.peer} read nothing for {limits.write_timeout_s:g} s; its connection was closed")
            self.abort()
        elif self.is_closing and not unsent:
            if now - self._last_received_s > limits.linger_s or now - self._closing_since_s > limits.header_timeout_s:
                self.abort()
        elif not self.is_closing:
            self.check_timeouts(now)

    def count_stalled(self, detail: str) -> None:
        self.server_state.limit_counters.count("stalled", self.peer, detail)

    def check_timeouts(self, now: float) -> None:
        """Check the time-outs of the protocol."""


class ServerState:
    """What the connections of one listener share: application, limits, receive buffer, timer, budgets and tasks.

    All of it runs on one loop's thread, and input is handled before the next is read, so one receive buffer serves all
    connections (a buffer per connection halves the rate for bodies of a megabyte). One timer checks the time-outs of
    all connections: a timer per request would cost more than parsing it.
    """

    def __init__(
        self,
        app: Application,
        limits: Limits,
        now_us: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        *,
        limit_counters: LimitCounters | None = None,
    ) -> None:
        self.app, self.limits, self.loop = app, limits, loop
        self.limit_counters = limit_counters or LimitCounters(loop.time)
        self.turn_scheduler = TurnScheduler(loop, limits.turn_units)
        self.unsent_budget = UnsentBudget(limits.unsent_bytes_max, loop.call_later, loop.time)
        self.body_budget = RequestBodyBudget(limits.body_bytes_max, loop.call_soon)
        self.compressed_app = CompressionMiddleware(app, loop, self.body_budget)
        self.date_header = DateHeader(now_us)
        self.receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.safe_head_bytes = min(limits.header_bytes_max, limits.target_bytes_max)  # within every limit of a head
        self.head_cache = HeadCache(self)
        self.connections: set[Connection] = set()
        self.draining = False
        self.now_s = loop.time()  # at the last tick: precise enough for time-outs, and free
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_waiters = WaiterList()

    # Connections.

    def add_connection(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self._timer is None:
            self.now_s = self.loop.time()
            self._timer = self.loop.call_later(self.limits.tick_s, self._tick)

    def remove_connection(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._wake_if_idle()

    def _tick(self) -> None:
        self.now_s = self.loop.time()
        for connection in tuple(self.connections):
            try:
                connection.tick(self.now_s)
            except Exception as error:  # of one connection: the time-outs of the others are still checked
                _log.error("a connection failed in its time-out check and is dropped", exc_info=error)
                with suppress(Exception):
                    connection.abort()
        is_needed = self.connections or self._tasks
        self._timer = self.loop.call_later(self.limits.tick_s, self._tick) if is_needed else None

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Tasks.

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task and keep a reference to it: the loop alone would let it be collected."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def cancel_task(self, task: asyncio.Task[None]) -> None:
        """Cancel a spawned task after its first step, so that its `finally` always runs."""
        self.loop.call_soon(task.cancel)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report_error("a task of the HTTP front end failed", error)
        self._wake_if_idle()

    def report_error(self, message: str, error: BaseException) -> None:
        """Pass an error that no client can receive to the loop's exception handler."""
        self.loop.call_exception_handler({"message": message, "exception": error})

    # Shutdown.

    @property
    def _is_idle(self) -> bool:
        return not self.connections and not self._tasks

    def _wake_if_idle(self) -> None:
        if self._is_idle:
            self._idle_waiters.wake()

    async def wait_closed(self, timeout_s: float) -> bool:
        """Return whether all connections closed and all tasks ended in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_idle:
                    await self._idle_waiters.wait()
        return self._is_idle
