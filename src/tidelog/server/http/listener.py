"""[shell] The socket that peers connect to, and the order in which it all ends.

listen ──► accepting ──► stop_accepting ──► drain: idle connections close, busy ones get their answer,
                                            streams end when their handlers end them ──► close: whoever is left
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidelog.server.http.house import House
from tidelog.server.http.limits import Limits
from tidelog.server.http.refusals import Refusals
from tidelog.server.http.seam import Application
from tidelog.server.http.sniff import Sniff

_BACKLOG: Final = 2048
_REFUSED_MAX: Final = 256  # connections over the limit that are told so at the same time; more are just dropped
_ABORT_S: Final = 5.0  # cancelled handlers get this long to clean up


async def listen(
    app: Application,
    host: str,
    port: int,
    limits: Limits | None = None,
    *,
    now_us: Callable[[], int],
    reuse_port: bool = False,
    kernel: bool = True,
    refusals: Refusals | None = None,
) -> Listener:
    """Accept connections for `app` from now on. Port 0 is any that is free. `now_us` is the time of day. `kernel`: use
    compiled code where it was built. `refusals` counts the limits that peers meet."""
    loop = asyncio.get_running_loop()
    house = House(app, limits or Limits(), now_us, loop, kernel=kernel, refusals=refusals)
    server = await loop.create_server(
        lambda: _Accepted(house), host, port, backlog=_BACKLOG, reuse_port=reuse_port or None
    )
    return Listener(server, house)


class _Accepted(Sniff):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        limit = self.house.limits.connections_max
        over = len(self.house.guests) - limit
        if self.house.draining:
            self.abort()
        elif over > 0:
            self.house.refusals.count("connections", self.peer, f"{limit} connections are open; one more was refused")
            if over > _REFUSED_MAX:
                self.abort()
            else:
                self.refuse(503, f"{limit} connections are open already; try again later")


class Listener:
    def __init__(self, server: asyncio.Server, house: House) -> None:
        self._server, self._house = server, house
        name = server.sockets[0].getsockname()
        self.address: tuple[str, int] = (name[0], name[1])

    @property
    def connections(self) -> int:
        return len(self._house.guests)

    def stop_accepting(self) -> None:
        """Refuse new connections; those that are open go on as they are."""
        self._server.close()

    async def drain(self, within_s: float) -> bool:
        """Whether every connection ended by itself in time. Those that have not are still there."""
        self.stop_accepting()
        self._house.draining = True
        for guest in tuple(self._house.guests):
            guest.wind_down()
        return await self._house.empty(within_s)

    async def close(self) -> None:
        """End every connection now, and return when their handlers have ended."""
        self.stop_accepting()
        self._house.draining = True
        for guest in tuple(self._house.guests):
            guest.abort()
        await self._house.empty(_ABORT_S)
        self._house.close()
