"""[shell] The server's application for somebody else's ASGI server, alone or under a path of another application.

    lifespan startup, or `async with` ──► recover ──► requests ──► lifespan shutdown, or its end ──► checkpoint

Requests before the first and after the last are answered with 503: an application whose lifespan nobody runs says so.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import TracebackType
from typing import Self

from tidelog.clock import Clock, SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk
from tidelog.server import life
from tidelog.server.api.app import App
from tidelog.server.api.problem import Problem, of_status
from tidelog.server.config import ServerConfig
from tidelog.server.http.asgi import Asgi, Receive, Scope, Send
from tidelog.server.http.seam import Body, Exchange, Request, Response
from tidelog.server.service import Service

_log = logging.getLogger("tidelog.server")


def asgi(config: ServerConfig, *, clock: Clock | None = None, disk: Disk | None = None) -> Mounted:
    """An ASGI application over the topics of a directory. Nothing is opened before it is started."""
    return Mounted(config, clock or SystemClock(), disk or PosixDisk())


class Mounted:
    """Started and stopped by its server's lifespan, or by `async with` where a framework does not pass that on."""

    def __init__(self, config: ServerConfig, clock: Clock, disk: Disk) -> None:
        self._config, self._clock, self._disk = config, clock, disk
        self._nobody = Asgi(_Nobody(), startup=self._start, shutdown=self._stop)
        self._asgi = self._nobody
        self._service: Service | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._nobody if scope["type"] == "lifespan" else self._asgi)(scope, receive, send)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _start(self) -> None:
        assert self._service is None, "started twice"
        loop = asyncio.get_running_loop()
        service = Service(self._config, self._clock, loop)
        ready = loop.create_task(life.recover(service, self._disk, _log.info))
        try:
            await asyncio.shield(ready)
        except BaseException:
            with suppress(Exception):
                await ready  # a recovery is not left half way: its engine would stay open
            await life.close(service)
            raise
        self._service, self._asgi = service, Asgi(App(service))

    async def _stop(self) -> None:
        """The directory is free when this returns. The server has let its requests end before, or gave them up."""
        service = self._service
        if service is not None:
            self._service, self._asgi = None, self._nobody
            await life.part(service)
            await life.close(service)


class _Nobody:
    """The application while there is none."""

    def begin(self, request: Request) -> Response | Body:  # noqa: ARG002 - whatever is asked
        return Problem(
            "not_ready",
            "the application was not started, or was stopped; nothing was done, have the server run its lifespan",
        ).response()

    def handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        raise AssertionError("nothing gets past `begin`")

    def malformed(self, request: Request, status: int, reason: str) -> Response:  # noqa: ARG002
        return of_status(status, f"{reason}; nothing was done").response()

    def express(self, request: Request, answer_bytes_max: int) -> None:
        """Nobody is let through here, by whatever way."""

    def abandoned(self, request: Request) -> None:
        """Nothing was taken."""
