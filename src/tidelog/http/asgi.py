"""The application as an ASGI 3 application, inside another server.

    http        receive ──► feed_body, end_body, on_disconnect ──► handler ──► respond ──► send
    websocket   accepted when the handler responds with Upgrade; else refused with its status
                receive ──► inbox ──► handler ──► write buffer ──► send
    lifespan    answered; the start and shutdown hooks are parameters

The surrounding server has its own limits on heads, time and connections. The limits on bodies are the application's;
this module bounds how much is read ahead and how much waits to be sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

from tidelog.http import h1_encoder
from tidelog.http.connection import ServerState
from tidelog.http.exchange import HttpExchange
from tidelog.http.interface import AnyResponse, Application, ClientDisconnected, Request, Response, Stream, Upgrade
from tidelog.http.limits import Limits, WaiterList
from tidelog.http.websocket import WebSocketInbox, run_handler


class WriteBuffer:
    """What a stream or WebSocket has written and the server has not sent. `write` never waits; above the high mark
    `drain` waits for the low mark."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._chunks: deque[bytes] = deque()
        self._in_flight_bytes = 0  # of the last `next_chunk`
        self._closed = self._disconnected = False
        self._senders, self._writers = WaiterList(), WaiterList()
        self.pending_bytes = 0
        self.is_complete = False  # it was closed because everything was written

    # Called by the writer.

    def write(self, data: bytes) -> None:
        if data and not self._closed:
            self._chunks.append(data)
            self.pending_bytes += len(data)
            self._senders.wake()

    def reserve(self, size: int) -> None:
        """Nothing: the surrounding server has its own bounds."""

    @property
    def is_under_pressure(self) -> bool:
        return False

    async def wait_ready(self) -> None:
        await self.drain()

    async def drain(self) -> None:
        mark = self._limits.write_high_bytes
        while self.pending_bytes > mark and not self._disconnected:
            mark = self._limits.write_low_bytes
            await self._writers.wait()
        if self._disconnected:
            raise ClientDisconnected

    def close(self, is_complete: bool) -> None:
        """Nothing more will be written."""
        if not self._closed:
            self._closed, self.is_complete = True, is_complete
            self._senders.wake()

    # Called by the sender.

    async def next_chunk(self) -> bytes | None:
        """Return the next chunk to send, or None after the last one. The chunk before it counts as sent."""
        self.pending_bytes -= self._in_flight_bytes
        self._in_flight_bytes = 0
        self._writers.wake()
        while not self._chunks:
            if self._closed:
                return None
            await self._senders.wait()
        data = self._chunks.popleft()
        self._in_flight_bytes = len(data)
        return data

    def on_disconnect(self) -> None:
        self._closed = self._disconnected = True
        self._chunks.clear()
        self.pending_bytes = self._in_flight_bytes = 0
        self._senders.wake()
        self._writers.wake()


class AsgiWebSocket:
    """A WebSocket whose frames the surrounding server reads and writes."""

    def __init__(
        self,
        server_state: ServerState,
        upgrade: Upgrade,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        self._server_state, self._upgrade, self._receive, self._send_message = server_state, upgrade, receive, send
        self._inbox = WebSocketInbox()
        self._inbox_taken = WaiterList()  # the receive loop, while the inbox is full
        self._write_buffer = WriteBuffer(server_state.limits)
        self._close_reason: tuple[int, str] | None = None  # of the first `close`
        self._disconnected = False

    async def serve(self) -> None:
        """Accept, run the handler, and return when the socket is closed."""
        await self._send_message({"type": "websocket.accept"})
        handler = self._server_state.spawn(run_handler(self._upgrade, self, self._server_state))
        receiver = self._server_state.loop.create_task(self._receive_loop(handler))
        try:
            while (text := await self._write_buffer.next_chunk()) is not None:
                await self._send_message({"type": "websocket.send", "text": text.decode()})
            if not self._disconnected:
                code, reason = self._close_reason or (1000, "")
                await self._send_message({"type": "websocket.close", "code": code, "reason": reason})
        finally:
            self._inbox.close()
            self._write_buffer.on_disconnect()
            receiver.cancel()
            self._server_state.cancel_task(handler)
            await asyncio.gather(receiver, handler, return_exceptions=True)

    async def _receive_loop(self, handler: asyncio.Task[None]) -> None:
        while True:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                break
            text = event.get("text")
            message: str | bytes = event.get("bytes") or b"" if text is None else text
            size = len(message if isinstance(message, bytes) else message.encode())
            if size > self._upgrade.message_bytes_max:
                self._inbox.close()
                self.close(1009, f"more than {self._upgrade.message_bytes_max} bytes")
                continue
            if not self._inbox.is_closed:
                self._inbox.put(message, size)
            while len(self._inbox) >= self._server_state.limits.messages_max:
                await self._inbox_taken.wait()
        self._disconnected = True
        self._inbox.close()
        self._write_buffer.on_disconnect()
        self._server_state.cancel_task(handler)

    # Called by the handler.

    async def receive(self) -> str | bytes | None:
        message = await self._inbox.get()
        self._inbox_taken.wake()
        return message

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
    """The default hook."""


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
            self._server_state = ServerState(self._app, self._limits, lambda: 0, loop)  # the server adds dates
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind == "websocket":
            await _AsgiWebSocketCall(self._server_state, scope, receive, send).serve()
        else:
            await _AsgiCall(self._server_state, scope, receive, send).serve()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for name, hook in (("startup", self._startup), ("shutdown", self._shutdown)):
            await receive()
            try:
                await hook()
            except Exception as error:  # reported to the server, which decides
                await send({"type": f"lifespan.{name}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{name}.complete"})


def _build_request(scope: Scope) -> Request:
    """Build the request. Its path is the raw one where the server passes it, without the mount point."""
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


class _AsgiCall:
    """One request, which is one ASGI call: the transport of its exchange."""

    def __init__(self, server_state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._server_state = server_state
        self.exchange = HttpExchange(server_state, server_state.compressed_app, _build_request(scope), self)
        self._scope, self._receive, self._send_message = scope, receive, send
        self._response_future: asyncio.Future[AnyResponse | None] = server_state.loop.create_future()
        self._body_consumed = WaiterList()  # the receive loop, while too much is read ahead
        self._write_buffer = WriteBuffer(server_state.limits)
        self._stream_task: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Return when the response was sent or the client disconnected."""
        receiver = self._server_state.loop.create_task(self._receive_loop())
        try:
            answer = await self._response_future
            if isinstance(answer, Response):
                await self._write_response(answer)
            elif isinstance(answer, Stream):
                await self._write_stream(answer)
            self.exchange.response_sent = True
        finally:
            receiver.cancel()
            if not self.exchange.response_sent:
                self.on_disconnect()
            await asyncio.gather(receiver, *([self._stream_task] if self._stream_task else ()), return_exceptions=True)

    async def _receive_loop(self) -> None:
        self.exchange.start()
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                break
            # One event is received ahead of what the handler reads, so that a disconnect is noticed meanwhile.
            while self.exchange.unread_body_bytes > self._server_state.limits.ahead_bytes_max:
                await self._body_consumed.wait()
            if data := event.get("body", b""):
                self.exchange.feed_body(bytes(data))
            if not event.get("more_body", False) and not self.exchange.body_complete:
                self.exchange.end_body()
        if not self.exchange.response_sent:
            self.on_disconnect()

    def send_continue(self) -> None:
        """The surrounding server sends it."""

    def on_body_consumed(self, size: int) -> None:  # noqa: ARG002 - `unread_body_bytes` is what counts
        self._body_consumed.wake()

    def on_body_discarded(self, size: int) -> None:
        """The surrounding server bounds what it reads."""

    def on_complete(self) -> None:
        """`serve` returns after the response."""

    def upgrade(self, answer: Upgrade) -> None:
        self._set_response(answer)

    def on_disconnect(self) -> None:
        if not self.exchange.disconnected:
            self.exchange.on_disconnect()
            self._write_buffer.on_disconnect()
            self._set_response(None)

    def _set_response(self, answer: AnyResponse | None) -> None:
        if not self._response_future.done():
            self._response_future.set_result(answer)

    def send(self, response: Response) -> None:
        h1_encoder.encode_headers(response.headers)  # raises for invalid headers
        self._set_response(response)

    def start_stream(self, stream: Stream) -> None:
        h1_encoder.encode_headers(stream.headers)
        if self.exchange.request.method != "HEAD":
            self._stream_task = self.exchange.spawn_stream(stream, self._write_buffer)
        self._set_response(stream)

    def on_stream_end(self, is_complete: bool) -> None:
        self._write_buffer.close(is_complete)

    async def _write_head(self, answer: Response | Stream, length: int | None) -> None:
        fields = list(_response_fields(answer, length))
        await self._send_message({"type": "http.response.start", "status": answer.status, "headers": fields})

    async def _write_response(self, response: Response) -> None:
        await self._write_head(response, len(response.body))
        body = b"" if self.exchange.request.method == "HEAD" else response.body
        await self._send_message({"type": "http.response.body", "body": body})

    async def _write_stream(self, stream: Stream) -> None:
        await self._write_head(stream, stream.length)
        if self._stream_task is not None:
            while (data := await self._write_buffer.next_chunk()) is not None:
                await self._send_message({"type": "http.response.body", "body": data, "more_body": True})
            if self.exchange.disconnected:
                return
            if not self._write_buffer.is_complete:
                raise RuntimeError("the stream was cut off")  # the server drops the connection, so the client notices
        await self._send_message({"type": "http.response.body", "body": b""})


class _AsgiWebSocketCall(_AsgiCall):
    """A WebSocket handshake; the ASGI call lasts as long as the socket."""

    async def serve(self) -> None:
        event = await self._receive()
        if event["type"] != "websocket.connect":
            return
        self.exchange.body_complete = True
        self.exchange.start()
        answer = await self._response_future
        if isinstance(answer, Upgrade):
            await AsgiWebSocket(self._server_state, answer, self._receive, self._send_message).serve()
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
            f"{self.exchange.request.path}: a WebSocket cannot be answered with a stream of status {stream.status}"
        )
