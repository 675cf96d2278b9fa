"""[shell] The first bytes of a connection: HTTP/2 begins with 24 that no other protocol begins with.

    PRI * HTTP/2.0␍␊␍␊SM␍␊␍␊

They may come one at a time; the first that differs means HTTP/1.1, which is then given all of them.

[shell] The socket that peers connect to, and the order in which it all ends.

listen ──► accepting ──► stop_accepting ──► drain: idle connections close, busy ones get their answer,
                                            streams end when their handlers end them ──► close: whoever is left
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidelog.http.connection import Connection
from tidelog.http.h1 import Http1Connection
from tidelog.http.h2 import Http2Connection
from tidelog.http.interface import Application
from tidelog.http.limits import LimitCounters, Limits
from tidelog.http.server_state import ServerState

H2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class ProtocolDetector(Connection):
    _received = b""

    def on_data(self, data: memoryview) -> None:
        self._received += data
        if self._received.startswith(H2_PREFACE):
            h2 = Http2Connection(self.server_state)
            self.switch_protocol(h2)
            h2.open(self._received)
        elif not H2_PREFACE.startswith(self._received):
            h1 = Http1Connection(self.server_state)
            self.switch_protocol(h1)
            h1.on_data(memoryview(self._received))

    def reject(self, status: int, reason: str) -> None:
        """Answer before anything was said. Whatever it speaks, a status line is what it is most likely to show."""
        h1 = Http1Connection(self.server_state)
        self.switch_protocol(h1)
        h1.reject(status, reason)

    def check_timeouts(self, now: float) -> None:
        if now - self._opened_s > self.server_state.limits.header_timeout_s:
            self.close_after_write()


_BACKLOG: Final = 2048
_REJECTIONS_MAX: Final = 256  # connections over the limit that are told so at the same time; more are just dropped
_ABORT_TIMEOUT_S: Final = 5.0  # cancelled handlers get this long to clean up


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
    house = ServerState(app, limits or Limits(), now_us, loop, limit_counters=limit_counters)
    server = await loop.create_server(
        lambda: _AcceptedConnection(house), host, port, backlog=_BACKLOG, reuse_port=reuse_port or None
    )
    return Listener(server, house)


class _AcceptedConnection(ProtocolDetector):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        limit = self.server_state.limits.connections_max
        over = len(self.server_state.connections) - limit
        if self.server_state.draining:
            self.abort()
        elif over > 0:
            self.server_state.limit_counters.count(
                "connections", self.peer, f"{limit} connections are open; one more was refused"
            )
            if over > _REJECTIONS_MAX:
                self.abort()
            else:
                self.reject(503, f"{limit} connections are open already; try again later")


class Listener:
    def __init__(self, server: asyncio.Server, server_state: ServerState) -> None:
        self._server, self._server_state = server, server_state
        name = server.sockets[0].getsockname()
        self.address: tuple[str, int] = (name[0], name[1])

    @property
    def connections(self) -> int:
        return len(self._server_state.connections)

    def stop_accepting(self) -> None:
        """Refuse new connections; those that are open go on as they are."""
        self._server.close()

    async def drain(self, timeout_s: float) -> bool:
        """Whether every connection ended by itself in time. Those that have not are still there."""
        self.stop_accepting()
        self._server_state.draining = True
        for guest in tuple(self._server_state.connections):
            guest.begin_shutdown()
        return await self._server_state.wait_closed(timeout_s)

    async def close(self) -> None:
        """End every connection now, and return when their handlers have ended."""
        self.stop_accepting()
        self._server_state.draining = True
        for guest in tuple(self._server_state.connections):
            guest.abort()
        await self._server_state.wait_closed(_ABORT_TIMEOUT_S)
        self._server_state.stop_timer()
