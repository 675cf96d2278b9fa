"""One request from its head to the end of its response, for every protocol that carries it.

    start ──► begin ──► Response ──────────────────────────────► responded; the rest of the body is discarded
                 └────► BodyPolicy ──► feed_body … end_body ──► handle ──► respond ──► responded
                          │               └── over the limit, or a Content-Length over it: 413
                          └────► streamed: handle at once, feed_body into the BodyStream; the handler reports its errors

Promises to the application: a request for which `begin` returned a BodyPolicy reaches either `handle` or
`on_abandoned`, once. A request is answered once; after the front end had to answer in the handler's place, the
handler's response is dropped. A stream that was accepted is always started, and cancelled when its client disconnects.
A client that disconnects earlier calls the disconnect callbacks. Exactly one of the two happens.

`HttpExchange` is the same for every protocol. It writes through the `ExchangeTransport` it is given: `Http1Request`
and `Http2Stream` of the connections, and the calls of `asgi.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from tidelog.http.connection import ServerState
from tidelog.http.interface import (
    AnyResponse,
    Application,
    BodyError,
    BodyPolicy,
    ClientDisconnected,
    Headers,
    Request,
    Response,
    Sink,
    Stream,
    Upgrade,
)
from tidelog.http.limits import BodyReservation, WaiterList

_JOIN_BELOW_BYTES: Final = 4 << 10
_JOINED_CHUNK_BYTES: Final = 64 << 10
_RESERVE_ABOVE_BYTES: Final = 16 << 10  # smaller bodies are not counted: they cost no more than a head


def append_chunk(chunks: deque[bytes | bytearray], data: bytes) -> None:
    """Append a chunk. Small ones are joined: a body in chunks of one byte would cost 40 times its size."""
    if len(data) >= _JOIN_BELOW_BYTES:
        chunks.append(data)
    elif chunks and type(chunks[-1]) is bytearray and len(chunks[-1]) < _JOINED_CHUNK_BYTES:
        chunks[-1] += data
    else:
        chunks.append(bytearray(data) if chunks else data)


class BodyStream:
    """A request body that its handler reads as it arrives. One reader.

    The connection bounds what is buffered: it checks `buffered_bytes` and is called with the size of what was consumed.
    """

    def __init__(self, on_consumed: Callable[[int], None]) -> None:
        self._on_consumed = on_consumed
        self._chunks: deque[bytes | bytearray] = deque()
        self._end: Exception | type[Exception] | None = None  # raised to the reader after the last chunk
        self._waiters = WaiterList()
        self.buffered_bytes = 0

    # Called by the connection.

    def feed(self, data: bytes) -> None:
        if self._end is None:
            append_chunk(self._chunks, data)
            self.buffered_bytes += len(data)
            self._waiters.wake()

    def end(self) -> None:
        """The body is complete."""
        if self._end is None:
            self._end = StopAsyncIteration
            self._waiters.wake()

    def fail(self, error: Exception | type[Exception]) -> None:
        """Drop what is buffered and raise `error` to the reader. Does nothing after `end`."""
        if self._end is None:
            self._end = error
            self._chunks.clear()
            dropped, self.buffered_bytes = self.buffered_bytes, 0
            self._on_consumed(dropped)
            self._waiters.wake()

    # Called by the handler.

    def __aiter__(self) -> BodyStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._end is not None:
                raise self._end
            await self._waiters.wait()
        data = self._chunks.popleft()
        self.buffered_bytes -= len(data)
        self._on_consumed(len(data))
        return bytes(data)


class RequestError(NamedTuple):
    """The response to an invalid request."""

    status: int
    reason: str
    headers: Headers = ()


class ExchangeTransport(Protocol):
    """How one request is read from its connection and its response is written to it."""

    def send_continue(self) -> None:
        """The body is wanted: send `100 Continue` if the client waits for it."""

    def on_body_consumed(self, size: int) -> None:
        """Bytes of the body have left memory: more may be read."""

    def on_body_discarded(self, size: int) -> None:
        """Bytes of the body arrived and were thrown away."""

    def send(self, response: Response) -> None:
        """Write a whole response. The body of the request may be incomplete."""

    def start_stream(self, stream: Stream) -> None:
        """Write the head of a stream and call `spawn_stream`."""

    def on_stream_end(self, is_complete: bool) -> None:
        """Write the end of the stream, or cut it off."""

    def upgrade(self, answer: Upgrade) -> None:
        """Become a WebSocket: `Request.upgrade` is true."""

    def on_complete(self) -> None:
        """The request was read and its response sent."""


class HttpExchange:
    """The exchange that handlers see. Defaults are class attributes: most requests change few of them, and setting all
    of them would cost as much as parsing the request."""

    head_error: RequestError | None = None  # the head is invalid: the response in place of the application's
    started = False
    body_complete = False  # the whole body has arrived, or no more of it will
    responded = False
    response_sent = False  # the whole response was written
    disconnected = False
    body_bytes = 0  # received so far
    _body_policy: BodyPolicy | None = None
    _body_chunks: deque[bytes | bytearray] | None = None
    _body_stream: BodyStream | None = None
    _handler_called = False
    _overridden = False
    _disconnect_callbacks: list[Callable[[], None]] | None = None
    _stream_task: asyncio.Task[None] | None = None
    _body_reservation: BodyReservation | None = None  # of a body above _RESERVE_ABOVE_BYTES

    def __init__(
        self, server_state: ServerState, app: Application, request: Request, transport: ExchangeTransport
    ) -> None:
        self.server_state, self.app, self.request, self._transport = server_state, app, request, transport

    # Called by the connection.

    def start(self) -> None:
        """Begin to answer, after the responses of earlier requests. Some of the body may have arrived before."""
        self.started = True
        if self.head_error is not None:
            response = self.app.malformed(self.request, self.head_error.status, self.head_error.reason)
            response.headers = (*response.headers, *self.head_error.headers)
            self._respond_whole(response)
            return
        try:
            decision = self.app.begin(self.request)
        except Exception as error:  # an error of the application is this client's 500
            self._respond_whole(self._internal_error("begin", error))
            return
        if isinstance(decision, Response):
            self._respond_whole(decision)
            return
        self._body_policy = decision
        if self.body_bytes > decision.bytes_max or (self.request.content_length or 0) > decision.bytes_max:
            self._reject_too_large(decision)
        elif decision.is_streamed:
            self._start_body_stream()
        elif self.body_complete:
            self._call_handler()
        else:
            self._transport.send_continue()

    def feed_body(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self.body_bytes += len(data)
        if self._body_stream is None and (self.responded or self._handler_called):
            self._transport.on_body_consumed(len(data))
            self._transport.on_body_discarded(len(data))
            return
        policy = self._body_policy
        if policy is not None and self.body_bytes > policy.bytes_max:
            self._transport.on_body_consumed(len(data))
            self._reject_too_large(policy)
        elif self._body_stream is not None:
            self._body_stream.feed(data)
        else:
            if self._body_chunks is None:
                self._body_chunks = deque((data,))
            else:
                append_chunk(self._body_chunks, data)
            if self.body_bytes > _RESERVE_ABOVE_BYTES:
                if self._body_reservation is None:
                    self._body_reservation = BodyReservation(self._reject_over_budget)
                self.server_state.body_budget.update(self._body_reservation, self.body_bytes)
            if self.started:
                self._transport.on_body_consumed(len(data))

    def end_body(self) -> None:
        """The body is complete."""
        self.body_complete = True
        if self.response_sent:
            self._transport.on_complete()
        elif self._body_stream is not None:
            if self._body_reservation is not None:
                self.server_state.body_budget.mark_complete(self._body_reservation)
            self._body_stream.end()
        elif self._body_policy is not None and not self.responded and not self._handler_called:
            self._call_handler()

    def fail_body(self, status: int, reason: str) -> None:
        """The rest of the body will not arrive, or is invalid."""
        self.body_complete = True
        if not self.started:
            self.head_error = RequestError(status, reason)
        elif self.response_sent:
            self._transport.on_complete()
        else:
            self._reject_body(status, reason)

    def on_disconnect(self) -> None:
        self.disconnected = self.body_complete = True
        self._body_chunks = None
        self._release_body()
        self._abort_body_stream(ClientDisconnected)
        if self._stream_task is not None:
            self.server_state.cancel_task(self._stream_task)
        elif self._body_policy is not None and not self.responded:
            if not self._handler_called:
                self._abandon()
            for call in self._disconnect_callbacks or ():
                self._call_safely("a disconnect callback", call)

    def spawn_stream(self, stream: Stream, sink: Sink) -> asyncio.Task[None]:
        """Run an accepted stream that writes to `sink`."""
        self._stream_task = task = self.server_state.spawn(self._run_stream(stream, sink))
        return task

    @property
    def unread_body_bytes(self) -> int:
        """Bytes of a streamed body that its handler has not read."""
        return 0 if self._body_stream is None else self._body_stream.buffered_bytes

    # Called by the handler.

    @property
    def is_disconnected(self) -> bool:
        return self.disconnected

    def add_disconnect_callback(self, callback: Callable[[], None]) -> None:
        if self.responded:
            return
        if self.disconnected:
            self._call_safely("a disconnect callback", callback)
        elif self._disconnect_callbacks is None:
            self._disconnect_callbacks = [callback]
        else:
            self._disconnect_callbacks.append(callback)

    def keep_body(self, size: int) -> None:
        if (
            self.responded
            or self.disconnected
            or self._body_stream is None
            or (self._body_reservation is None and size <= _RESERVE_ABOVE_BYTES)
        ):
            return
        if self._body_reservation is None:
            self._body_reservation = BodyReservation(None if self.body_complete else self._reject_over_budget)
        self.server_state.body_budget.update(self._body_reservation, size)

    def respond(self, answer: AnyResponse) -> None:
        if self._overridden or self.disconnected:
            return
        if self.responded:
            raise RuntimeError(f"{self.request.method} {self.request.path} was answered already")
        if isinstance(answer, Response):
            self._respond_whole(answer)
        else:
            self.responded, self._disconnect_callbacks = True, None
            self._release_body()
            if isinstance(answer, Upgrade):
                if not self.request.upgrade:
                    name = f"{self.request.method} {self.request.path}"
                    raise RuntimeError(f"{name} cannot become a WebSocket for {answer.run}")
                self._transport.upgrade(answer)
                return
            try:
                self._transport.start_stream(answer)
            except (ValueError, TypeError) as error:
                self._transport.send(self._internal_error("the head of the stream", error))

    def _start_body_stream(self) -> None:
        """Pass on what has arrived so far, and the rest as the handler reads it."""
        self._release_body()  # from now on the handler reports what it keeps, by `keep_body`
        self._body_stream = stream = BodyStream(self._transport.on_body_consumed)
        self.request.body_stream = stream
        for data in self._body_chunks or ():
            stream.feed(bytes(data))
        self._body_chunks = None
        if self.body_complete:
            stream.end()
        else:
            self._transport.send_continue()
        self._call_handler()

    def _call_handler(self) -> None:
        chunks = self._body_chunks
        if chunks is not None:
            self.request.body = bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)
            self._body_chunks = None
        if self._body_reservation is not None:
            self.server_state.body_budget.mark_complete(self._body_reservation)
        self._handler_called = True
        try:
            self.app.handle(self.request, self)
        except Exception as error:  # as in `start`
            if self.responded:
                self._report_error("handle", error)
            else:
                self._override_response(self._internal_error("handle", error))

    def _reject_too_large(self, policy: BodyPolicy) -> None:
        self._reject_body(413, f"the body is over {policy.bytes_max} bytes")

    def _reject_body(self, status: int, reason: str) -> None:
        """Answer with an error, or raise it to the handler that reads the body."""
        if self._handler_called:
            self._abort_body_stream(BodyError(status, reason))
        elif not self.responded:
            self._override_response(self.app.malformed(self.request, status, reason))

    def _override_response(self, response: Response) -> None:
        self._overridden = True
        if self._body_policy is not None and not self._handler_called:
            self._abandon()
        self._respond_whole(response)

    def _reject_over_budget(self) -> None:
        """The budget for request bodies is used up, and this is the largest incomplete one."""
        limit = self.server_state.body_budget.bytes_max
        reason = f"request bodies of {limit} bytes are in memory, and this was the largest incomplete one"
        self.server_state.limit_counters.count("body_bytes", self.request.peer, f"{reason}; it was refused")
        self._release_body()
        self._reject_body(429, reason)

    def _release_body(self) -> None:
        """Return the body's bytes to the budget."""
        if self._body_reservation is not None:
            self.server_state.body_budget.release(self._body_reservation)
            self._body_reservation = None

    def _respond_whole(self, response: Response) -> None:
        self.responded, self._disconnect_callbacks = True, None
        self._release_body()
        if not self.body_complete:
            self._body_chunks = None
            self._abort_body_stream(ClientDisconnected)
        if not self.disconnected:
            try:
                self._transport.send(response)
            except (ValueError, TypeError) as error:  # an invalid header; nothing was written
                self._transport.send(self._internal_error("the response", error))

    def _abort_body_stream(self, error: Exception | type[Exception]) -> None:
        """Raise the error to the reader; later bytes are discarded."""
        if self._body_stream is not None:
            self._body_stream.fail(error)
            self._body_stream = None

    def _abandon(self) -> None:
        self._call_safely("on_abandoned", lambda: self.app.on_abandoned(self.request))

    def _call_safely(self, name: str, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # there is no client left to answer
            self._report_error(name, error)

    def _report_error(self, name: str, error: Exception) -> None:
        self.server_state.report_error(f"{name} of {self.request.method} {self.request.path} failed", error)

    def _internal_error(self, name: str, error: Exception) -> Response:
        self._report_error(name, error)
        return self.app.malformed(self.request, 500, "the server made a mistake")

    async def _run_stream(self, stream: Stream, sink: Sink) -> None:
        is_complete = False
        try:
            await stream.run(sink)
            is_complete = True
        except (ClientDisconnected, BodyError):
            pass  # the client disconnected or its body failed: no error of the stream
        except Exception as error:  # as in `start`
            self._report_error("the stream", error)
        finally:
            self._stream_task = None
            self._abort_body_stream(ClientDisconnected)
            if not self.disconnected:
                self._transport.on_stream_end(is_complete)
