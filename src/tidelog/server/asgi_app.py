"""The server's application for another ASGI server, alone or mounted under a path of another application.

    lifespan startup, or `async with` ──► recover ──► requests ──► lifespan shutdown, or its end ──► checkpoint

Requests before the start and after the stop get 503, also where the lifespan is never run.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import TracebackType
from typing import Self

from tidelog.clock import Clock, SystemClock
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.http.asgi import AsgiAdapter, Receive, Scope, Send
from tidelog.http.interface import BodyPolicy, Exchange, Request, Response
from tidelog.server import lifecycle
from tidelog.server.app import App
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError, api_error_for_status
from tidelog.server.service import Service

_log = logging.getLogger("tidelog.server")


def asgi(config: ServerConfig, *, clock: Clock | None = None, disk: Disk | None = None) -> AsgiApp:
    """Create an ASGI application over the topics of a directory. Nothing is opened before it starts."""
    return AsgiApp(config, clock or SystemClock(), disk or PosixDisk())


class AsgiApp:
    """Started and stopped by its server's lifespan, or by `async with` where a framework does not forward that."""

    def __init__(self, config: ServerConfig, clock: Clock, disk: Disk) -> None:
        self._config, self._clock, self._disk = config, clock, disk
        self._not_started = AsgiAdapter(_NotStartedApp(), startup=self._start, shutdown=self._stop)
        self._asgi = self._not_started
        self._service: Service | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._not_started if scope["type"] == "lifespan" else self._asgi)(scope, receive, send)

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
        ready = loop.create_task(lifecycle.recover(service, self._disk, _log.info))
        try:
            await asyncio.shield(ready)
        except BaseException:
            with suppress(Exception):
                await ready  # recovery is not abandoned: its engine would stay open
            await lifecycle.close_service(service)
            raise
        self._service, self._asgi = service, AsgiAdapter(App(service))

    async def _stop(self) -> None:
        """Close the directory. The server has ended or abandoned its requests before."""
        service = self._service
        if service is not None:
            self._service, self._asgi = None, self._not_started
            await lifecycle.end_streams(service)
            await lifecycle.close_service(service)


class _NotStartedApp:
    """The application before the start and after the stop."""

    def begin(self, request: Request) -> Response | BodyPolicy:  # noqa: ARG002 - the same for every request
        return ApiError(
            "not_ready",
            "the application was not started, or was stopped; nothing was done, have the server run its lifespan",
        ).response()

    def handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        raise AssertionError("`begin` has rejected it")

    def malformed(self, request: Request, status: int, reason: str) -> Response:  # noqa: ARG002
        return api_error_for_status(status, f"{reason}; nothing was done").response()

    def fast_handler(self, request: Request, answer_bytes_max: int) -> None:
        """Return None: `begin` rejects every request."""

    def on_abandoned(self, request: Request) -> None:
        """Nothing was acquired."""
