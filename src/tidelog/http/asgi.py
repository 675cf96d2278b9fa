"""[shell] What was written and not taken yet: the side of a stream that must not wait, and the side that must.

write, write ──► held ──► next() ──► whoever sends
         └── above the high mark `drained` waits until the low mark is reached

[shell] A WebSocket whose frames somebody else's server keeps: three loops, and the handler in the middle.

receive ──► inbox ──► handler ──► outbox ──► send

[shell] The same application inside somebody else's server, by ASGI 3.

    http        receive ──► feed, end, leave ──► handler ──► respond ──► send
    websocket   accepted when the handler says Upgrade; else refused with the status it gave
    lifespan    answered; what should happen at the start and at the end is passed in

The server that calls has limits of its own on heads, time and connections. The limits of bodies are the
application's, and how much is read ahead and waits to be sent is bounded here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

from tidelog.http import h1_encoder
from tidelog.http.exchange import BaseExchange
from tidelog.http.interface import AnyResponse, Application, ClientDisconnected, Request, Response, Stream, Upgrade
from tidelog.http.limits import Limits
from tidelog.http.server_state import ServerState


class WriteBuffer:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._chunks: deque[bytes] = deque()
        self._in_flight_bytes = 0  # bytes of what `next` gave last
        self._closed = self._disconnected = False
        self._changed, self._taken = asyncio.Event(), asyncio.Event()
        self.pending_bytes = 0
        self.is_complete = False  # it ended because everything was written

    # The side that writes.

    def write(self, data: bytes) -> None:
        if data and not self._closed:
            self._chunks.append(data)
            self.pending_bytes += len(data)
            self._changed.set()

    def reserve(self, size: int) -> None:
        """Nothing: the server that sends has bounds of its own."""

    @property
    def is_under_pressure(self) -> bool:
        return False

    async def wait_ready(self) -> None:
        await self.drain()

    async def drain(self) -> None:
        mark = self._limits.write_high_bytes
        while self.pending_bytes > mark and not self._disconnected:
            mark = self._limits.write_low_bytes
            self._taken.clear()
            await self._taken.wait()
        if self._disconnected:
            raise ClientDisconnected

    def close(self, is_complete: bool) -> None:
        """Nothing more will be written."""
        if not self._closed:
            self._closed, self.is_complete = True, is_complete
            self._changed.set()

    # The side that sends.

    async def next_chunk(self) -> bytes | None:
        """The next that was written, or None when there is no more. Asking again says that the last one was sent."""
        self.pending_bytes -= self._in_flight_bytes
        self._in_flight_bytes = 0
        self._taken.set()
        while not self._chunks:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._chunks.popleft()
        self._in_flight_bytes = len(data)
        return data

    def on_disconnect(self) -> None:
        """Nobody takes anything any more."""
        self._closed = self._disconnected = True
        self._chunks.clear()
        self.pending_bytes = self._in_flight_bytes = 0
        self._changed.set()
        self._taken.set()


class AsgiWebSocket:
    def __init__(
        self,
        server_state: ServerState,
        upgrade: Upgrade,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        self._server_state, self._upgrade, self._receive, self._send_message = server_state, upgrade, receive, send
        self._inbox: deque[str | bytes] = deque()
        self._message_received, self._message_taken = asyncio.Event(), asyncio.Event()
        self._write_buffer = WriteBuffer(server_state.limits)
        self._close_reason: tuple[int, str] | None = None  # the first close that was asked for
        self._disconnected = False
        self._receive_closed = False  # no more messages come

    async def serve(self) -> None:
        """Accept, have the handler run, and return when the socket is closed."""
        await self._send_message({"type": "websocket.accept"})
        work = self._server_state.spawn(self._run_handler())
        listening = self._server_state.loop.create_task(self._receive_loop(work))
        try:
            while (text := await self._write_buffer.next_chunk()) is not None:
                await self._send_message({"type": "websocket.send", "text": text.decode()})
            if not self._disconnected:
                code, reason = self._close_reason or (1000, "")
                await self._send_message({"type": "websocket.close", "code": code, "reason": reason})
        finally:
            self._close_receive()
            self._write_buffer.on_disconnect()
            listening.cancel()
            self._server_state.cancel_task(work)
            await asyncio.gather(listening, work, return_exceptions=True)

    async def _run_handler(self) -> None:
        code = 1011
        try:
            await self._upgrade.run(self)
            code = 1000
        except ClientDisconnected:
            code = 1000
        except Exception as error:  # the rim: whatever a handler does wrong is one peer's 1011
            self._server_state.report_error("the handler of a WebSocket failed", error)
        finally:
            self.close(code)

    async def _receive_loop(self, work: asyncio.Task[None]) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                break
            text = message.get("text")
            data: str | bytes = message.get("bytes") or b"" if text is None else text
            size = len(data if isinstance(data, bytes) else data.encode())
            if size > self._upgrade.message_bytes_max:
                self._close_receive()
                self.close(1009, f"more than {self._upgrade.message_bytes_max} bytes")
                continue
            if not self._receive_closed:
                self._inbox.append(data)
                self._message_received.set()
            while len(self._inbox) >= self._server_state.limits.messages_max:
                self._message_taken.clear()
                await self._message_taken.wait()
        self._disconnected = True
        self._close_receive()
        self._write_buffer.on_disconnect()
        self._server_state.cancel_task(work)

    def _close_receive(self) -> None:
        self._receive_closed = True
        self._message_received.set()

    # The handler's side.

    async def receive(self) -> str | bytes | None:
        while not self._inbox:
            if self._receive_closed:
                return None
            self._message_received.clear()
            await self._message_received.wait()
        self._message_taken.set()
        return self._inbox.popleft()

    @property
    def pending_bytes(self) -> int:
        return self._write_buffer.pending_bytes

    def send(self, text: bytes) -> None:
        self._write_buffer.write(text)

    async def drain(self) -> None:
        await self._write_buffer.drain()

    def close(self, code: int = 1000, reason: str = "") -> None:
        if self._close_reason is None:
            self._close_reason = (code, reason)
            self._write_buffer.close(True)


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
LifespanHook: TypeAlias = Callable[[], Awaitable[None]]


async def _noop() -> None:
    """A hook that was not given."""


class AsgiAdapter:
    def __init__(
        self,
        app: Application,
        limits: Limits | None = None,
        *,
        startup: LifespanHook = _noop,
        shutdown: LifespanHook = _noop,
    ) -> None:
        self._app, self._limits = app, limits or Limits()
        self._startup, self._shutdown = startup, shutdown
        self._server_state: ServerState | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        if self._server_state is None or self._server_state.loop is not loop:
            self._server_state = ServerState(self._app, self._limits, lambda: 0, loop)  # dates are the server's to add
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind == "websocket":
            await _AsgiWebSocketExchange(self._server_state, scope, receive, send).serve()
        else:
            await _AsgiExchange(self._server_state, scope, receive, send).serve()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for name, hook in (("startup", self._startup), ("shutdown", self._shutdown)):
            await receive()
            try:
                await hook()
            except Exception as error:  # the rim: the server is told in its own words, and decides
                await send({"type": f"lifespan.{name}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{name}.complete"})


def _build_request(scope: Scope) -> Request:
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
        content_length=0 if websocket else None,
        upgrade=websocket,
    )
    length = request.header(b"content-length")
    if length is not None and length.isdigit():
        request.content_length = int(length)
    return request


def _response_fields(answer: Response | Stream, length: int | None) -> Iterable[tuple[bytes, bytes]]:
    if not h1_encoder.is_bodyless(answer.status):
        yield b"content-type", answer.content_type
        if length is not None:
            yield b"content-length", b"%d" % length
    yield from answer.headers


class _AsgiExchange(BaseExchange):
    """One request, which is one call."""

    def __init__(self, server_state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(server_state, server_state.compressed_app, _build_request(scope))
        self._scope, self._receive, self._send_message = scope, receive, send
        self._response_future: asyncio.Future[AnyResponse | None] = server_state.loop.create_future()
        self._body_consumed = asyncio.Event()  # a handler took some of what was read ahead
        self._write_buffer = WriteBuffer(server_state.limits)
        self._asgi_stream_task: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Return when the answer was sent, or the peer is gone."""
        listening = self.server_state.loop.create_task(self._receive_loop())
        try:
            answer = await self._response_future
            if isinstance(answer, Response):
                await self._write_response(answer)
            elif isinstance(answer, Stream):
                await self._write_stream(answer)
            self.response_sent = True
        finally:
            listening.cancel()
            if not self.response_sent:
                self.on_disconnect()
            await asyncio.gather(
                listening, *([self._asgi_stream_task] if self._asgi_stream_task else ()), return_exceptions=True
            )

    async def _receive_loop(self) -> None:
        self.start()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
            # One message is asked for ahead of what the handler takes: a peer that leaves is noticed meanwhile.
            while self.unread_body_bytes > self.server_state.limits.ahead_bytes_max:
                self._body_consumed.clear()
                await self._body_consumed.wait()
            if data := message.get("body", b""):
                self.feed_body(bytes(data))
            if not message.get("more_body", False) and not self.body_complete:
                self.end_body()
        if not self.response_sent:
            self.on_disconnect()

    def on_body_consumed(self, size: int) -> None:  # noqa: ARG002 - what counts is what is left
        self._body_consumed.set()

    def on_disconnect(self) -> None:
        if not self.disconnected:
            super().on_disconnect()
            self._write_buffer.on_disconnect()
            self._set_response(None)

    def _set_response(self, answer: AnyResponse | None) -> None:
        if not self._response_future.done():
            self._response_future.set_result(answer)

    def send(self, response: Response) -> None:
        h1_encoder.encode_headers(response.headers)  # raises for what must not be sent
        self._set_response(response)

    def start_stream(self, stream: Stream) -> None:
        h1_encoder.encode_headers(stream.headers)
        if self.request.method != "HEAD":
            self.spawn_stream(stream, self._write_buffer)
            self._asgi_stream_task = self._stream_task
        self._set_response(stream)

    def on_stream_end(self, whole: bool) -> None:
        self._write_buffer.close(whole)

    async def _write_head(self, answer: Response | Stream, length: int | None) -> None:
        fields = list(_response_fields(answer, length))
        await self._send_message({"type": "http.response.start", "status": answer.status, "headers": fields})

    async def _write_response(self, response: Response) -> None:
        await self._write_head(response, len(response.body))
        body = b"" if self.request.method == "HEAD" else response.body
        await self._send_message({"type": "http.response.body", "body": body})

    async def _write_stream(self, stream: Stream) -> None:
        await self._write_head(stream, None)
        if self._asgi_stream_task is not None:
            while (data := await self._write_buffer.next_chunk()) is not None:
                await self._send_message({"type": "http.response.body", "body": data, "more_body": True})
            if self.disconnected:
                return
            if not self._write_buffer.is_complete:
                raise RuntimeError("the stream was cut off")  # the server drops the connection: the peer can tell
        await self._send_message({"type": "http.response.body", "body": b""})


class _AsgiWebSocketExchange(_AsgiExchange):
    """A request for a WebSocket; the call is its whole life."""

    async def serve(self) -> None:
        message = await self._receive()
        if message["type"] != "websocket.connect":
            return
        self.body_complete = True
        self.start()
        answer = await self._response_future
        if isinstance(answer, Upgrade):
            await AsgiWebSocket(self.server_state, answer, self._receive, self._send_message).serve()
        elif isinstance(answer, Response):
            await self._reject_handshake(answer)

    async def _reject_handshake(self, response: Response) -> None:
        if "websocket.http.response" not in (self._scope.get("extensions") or {}):
            await self._send_message({"type": "websocket.close", "code": 1008, "reason": f"refused: {response.status}"})
            return
        fields = list(_response_fields(response, len(response.body)))
        await self._send_message(
            {"type": "websocket.http.response.start", "status": response.status, "headers": fields}
        )
        await self._send_message({"type": "websocket.http.response.body", "body": response.body})

    def start_stream(self, stream: Stream) -> None:
        raise RuntimeError(
            f"{self.request.path}: a WebSocket cannot be answered with a stream of status {stream.status}"
        )

    def upgrade(self, answer: Upgrade) -> None:
        self._set_response(answer)
