"""[shell] The same application inside somebody else's server, by ASGI 3.

    http        receive ──► feed, end, leave ──► handler ──► respond ──► send
    websocket   accepted when the handler says Upgrade; else refused with the status it gave
    lifespan    answered; what should happen at the start and at the end is passed in

The server that calls has limits of its own on heads, time and connections. The limits of bodies are the
application's, and how much is read ahead and waits to be sent is bounded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

from tidelog.server.http import reply
from tidelog.server.http.asgi_socket import AsgiSocket
from tidelog.server.http.exchange import Talk
from tidelog.server.http.house import House
from tidelog.server.http.limits import Limits
from tidelog.server.http.outbox import Outbox
from tidelog.server.http.seam import Answer, Application, Request, Response, Stream, Upgrade

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Hook: TypeAlias = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """A hook that was not given."""


class Asgi:
    def __init__(
        self,
        app: Application,
        limits: Limits | None = None,
        *,
        startup: Hook = _nothing,
        shutdown: Hook = _nothing,
    ) -> None:
        self._app, self._limits = app, limits or Limits()
        self._startup, self._shutdown = startup, shutdown
        self._house: House | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        if self._house is None or self._house.loop is not loop:
            self._house = House(self._app, self._limits, lambda: 0, loop)  # dates are the server's to add
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind == "websocket":
            await _SocketCall(self._house, scope, receive, send).serve()
        else:
            await _Call(self._house, scope, receive, send).serve()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for name, hook in (("startup", self._startup), ("shutdown", self._shutdown)):
            await receive()
            try:
                await hook()
            except Exception as error:  # the rim: the server is told in its own words, and decides
                await send({"type": f"lifespan.{name}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{name}.complete"})


def _request(scope: Scope) -> Request:
    """The path is as it came where the server says so, without what the application is mounted under."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(scope["path"], safe="/:@!$&'()*+,;=~")
    root = scope.get("root_path", "").rstrip("/")
    if root and path.startswith(f"{root}/"):
        path = path[len(root) :]
    headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
    client = scope.get("client")
    websocket = scope["type"] == "websocket"
    request = Request(
        "GET" if websocket else scope["method"],
        path,
        scope.get("query_string", b"").decode("latin-1"),
        headers,
        f"{client[0]}:{client[1]}" if client else "",
        length=0 if websocket else None,
        upgrade=websocket,
    )
    length = request.header(b"content-length")
    if length is not None and length.isdigit():
        request.length = int(length)
    return request


def _fields(answer: Response | Stream, length: int | None) -> Iterable[tuple[bytes, bytes]]:
    if not reply.bodyless(answer.status):
        yield b"content-type", answer.content_type
        if length is not None:
            yield b"content-length", b"%d" % length
    yield from answer.headers


class _Call(Talk):
    """One request, which is one call."""

    def __init__(self, house: House, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(house, house.coded, _request(scope))
        self._scope, self._receive, self._tell = scope, receive, send
        self._answer: asyncio.Future[Answer | None] = house.loop.create_future()
        self._room = asyncio.Event()  # a handler took some of what was read ahead
        self._outbox = Outbox(house.limits)
        self._work: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Return when the answer was sent, or the peer is gone."""
        listening = self.house.loop.create_task(self._listen())
        try:
            answer = await self._answer
            if isinstance(answer, Response):
                await self._send_whole(answer)
            elif isinstance(answer, Stream):
                await self._send_stream(answer)
            self.finished = True
        finally:
            listening.cancel()
            if not self.finished:
                self.leave()
            await asyncio.gather(listening, *([self._work] if self._work else ()), return_exceptions=True)

    async def _listen(self) -> None:
        self.start()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
            # One message is asked for ahead of what the handler takes: a peer that leaves is noticed meanwhile.
            while self.held_bytes > self.house.limits.ahead_bytes_max:
                self._room.clear()
                await self._room.wait()
            if data := message.get("body", b""):
                self.feed(bytes(data))
            if not message.get("more_body", False) and not self.complete:
                self.end()
        if not self.finished:
            self.leave()

    def consumed(self, size: int) -> None:  # noqa: ARG002 - what counts is what is left
        self._room.set()

    def leave(self) -> None:
        if not self.away:
            super().leave()
            self._outbox.shut()
            self._say(None)

    def _say(self, answer: Answer | None) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def send(self, response: Response) -> None:
        reply.lines(response.headers)  # raises for what must not be sent
        self._say(response)

    def stream(self, stream: Stream) -> None:
        reply.lines(stream.headers)
        if self.request.method != "HEAD":
            self.spawn(stream, self._outbox)
            self._work = self._task
        self._say(stream)

    def streamed(self, whole: bool) -> None:
        self._outbox.end(whole)

    async def _start(self, answer: Response | Stream, length: int | None) -> None:
        fields = list(_fields(answer, length))
        await self._tell({"type": "http.response.start", "status": answer.status, "headers": fields})

    async def _send_whole(self, response: Response) -> None:
        await self._start(response, len(response.body))
        body = b"" if self.request.method == "HEAD" else response.body
        await self._tell({"type": "http.response.body", "body": body})

    async def _send_stream(self, stream: Stream) -> None:
        await self._start(stream, None)
        if self._work is not None:
            while (data := await self._outbox.next()) is not None:
                await self._tell({"type": "http.response.body", "body": data, "more_body": True})
            if self.away:
                return
            if not self._outbox.whole:
                raise RuntimeError("the stream was cut off")  # the server drops the connection: the peer can tell
        await self._tell({"type": "http.response.body", "body": b""})


class _SocketCall(_Call):
    """A request for a WebSocket; the call is its whole life."""

    async def serve(self) -> None:
        message = await self._receive()
        if message["type"] != "websocket.connect":
            return
        self.complete = True
        self.start()
        answer = await self._answer
        if isinstance(answer, Upgrade):
            await AsgiSocket(self.house, answer, self._receive, self._tell).serve()
        elif isinstance(answer, Response):
            await self._refuse(answer)

    async def _refuse(self, response: Response) -> None:
        if "websocket.http.response" not in (self._scope.get("extensions") or {}):
            await self._tell({"type": "websocket.close", "code": 1008, "reason": f"refused: {response.status}"})
            return
        fields = list(_fields(response, len(response.body)))
        await self._tell({"type": "websocket.http.response.start", "status": response.status, "headers": fields})
        await self._tell({"type": "websocket.http.response.body", "body": response.body})

    def stream(self, stream: Stream) -> None:
        raise RuntimeError(
            f"{self.request.path}: a WebSocket cannot be answered with a stream of status {stream.status}"
        )

    def upgrade(self, answer: Upgrade) -> None:
        self._say(answer)
