"""The listening socket: accept connections, detect their protocol, and shut down in order.

listen ──► accepting ──► stop_accepting ──► drain: idle connections close, busy ones get their response,
                                            streams end when their handlers end them ──► close: abort the rest
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidelog.http.connection import Connection, ServerState
from tidelog.http.h1 import Http1Connection
from tidelog.http.h2 import Http2Connection
from tidelog.http.interface import Application
from tidelog.http.limits import LimitCounters, Limits

H2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_BACKLOG: Final = 2048
_REJECTIONS_MAX: Final = 256  # connections above the limit that get a 503 at the same time; more are dropped
_ABORT_TIMEOUT_S: Final = 5.0  # for cancelled handlers to clean up


async def listen(
    app: Application,
    host: str,
    port: int,
    limits: Limits | None = None,
    *,
    now_us: Callable[[], int],
    reuse_port: bool = False,
    limit_counters: LimitCounters | None = None,
) -> Listener:
    """Accept connections for `app`. Port 0 chooses a free port. `now_us` returns the time of day."""
    loop = asyncio.get_running_loop()
    state = ServerState(app, limits or Limits(), now_us, loop, limit_counters=limit_counters)
    server = await loop.create_server(
        lambda: _AcceptedConnection(state), host, port, backlog=_BACKLOG, reuse_port=reuse_port or None
    )
    return Listener(server, state)


class _AcceptedConnection(Connection):
    """A connection until its first bytes show the protocol: HTTP/2 begins with `H2_PREFACE`, all else is HTTP/1.1."""

    _received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        limit = self.server_state.limits.connections_max
        excess = len(self.server_state.connections) - limit
        if self.server_state.draining:
            self.abort()
        elif excess > 0:
            self.server_state.limit_counters.count(
                "connections", self.peer, f"{limit} connections are open; one more was refused"
            )
            if excess > _REJECTIONS_MAX:
                self.abort()
            else:  # an HTTP/1.1 response is what any client is most likely to show
                self._switch_to_h1().reject(503, f"{limit} connections are open; try again later")

    def on_data(self, data: memoryview) -> None:
        self._received += data
        if self._received.startswith(H2_PREFACE):
            h2 = Http2Connection(self.server_state)
            self.switch_protocol(h2)
            h2.open(self._received)
        elif not H2_PREFACE.startswith(self._received):
            self._switch_to_h1().on_data(memoryview(self._received))

    def _switch_to_h1(self) -> Http1Connection:
        h1 = Http1Connection(self.server_state)
        self.switch_protocol(h1)
        return h1

    def check_timeouts(self, now: float) -> None:
        if now - self._opened_s > self.server_state.limits.header_timeout_s:
            self.close_after_write()


class Listener:
    def __init__(self, server: asyncio.Server, server_state: ServerState) -> None:
        self._server, self._server_state = server, server_state
        name = server.sockets[0].getsockname()
        self.address: tuple[str, int] = (name[0], name[1])

    @property
    def connections(self) -> int:
        return len(self._server_state.connections)

    def stop_accepting(self) -> None:
        """Refuse new connections; open ones are unaffected."""
        self._server.close()

    async def drain(self, timeout_s: float) -> bool:
        """Return whether every connection ended by itself in time. The others stay open."""
        self.stop_accepting()
        self._server_state.draining = True
        for connection in tuple(self._server_state.connections):
            connection.begin_shutdown()
        return await self._server_state.wait_closed(timeout_s)

    async def close(self) -> None:
        """Abort every connection, and return when their handlers have ended."""
        self.stop_accepting()
        self._server_state.draining = True
        for connection in tuple(self._server_state.connections):
            connection.abort()
        await self._server_state.wait_closed(_ABORT_TIMEOUT_S)
        self._server_state.stop_timer()
