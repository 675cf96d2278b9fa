"""[shell] A request's body that is handed over as it comes.

    wire ──► feed, feed, … end | fail ──► held ──► __anext__ ──► handler
                                            └── consumed(n): the wire may bring n bytes more

One reader. What is held is bounded by whoever feeds: it looks at `held_bytes` and at what was consumed.

[shell] One request, from its head to the end of its answer, whatever carries it.

    start ──► begin ──► Response ──────────────────────────► answered; the rest of the body is thrown away
                 └────► Body ──► feed, feed … end ──► handle ──► respond ──► answered
                          │           └── one byte too many: 413, and so for a length that says as much
                          └────► streamed: handle at once, feed into pieces; what is wrong with them the handler tells

Held for the application: each request for which `begin` gave a Body reaches either `handle` or `abandoned`, once.
An answer is given once; after the front end had to answer in a handler's place, what the handler says is dropped.
A stream that was accepted is always started, and cancelled when its peer leaves; a peer that leaves before is told
through `on_gone`. Which of the two happens depends on whether `respond` came first, and one of them does.

A connection adds how bytes get out: it overrides what stands under "What carries it".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

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
from tidelog.http.memory_budget import BodyReservation
from tidelog.http.server_state import ServerState

_JOIN_BELOW_BYTES: Final = 4 << 10
_JOINED_CHUNK_BYTES: Final = 64 << 10


def append_chunk(chunks: deque[bytes | bytearray], data: bytes) -> None:
    """Add a piece. Small ones are joined: a body in chunks of one byte would cost 40 times its size."""
    if len(data) >= _JOIN_BELOW_BYTES:
        chunks.append(data)
    elif chunks and type(chunks[-1]) is bytearray and len(chunks[-1]) < _JOINED_CHUNK_BYTES:
        chunks[-1] += data
    else:
        chunks.append(bytearray(data) if chunks else data)


class BodyStream:
    def __init__(self, loop: asyncio.AbstractEventLoop, on_consumed: Callable[[int], None]) -> None:
        self._loop, self._on_consumed = loop, on_consumed
        self._chunks: deque[bytes | bytearray] = deque()
        self._end: Exception | type[Exception] | None = None  # what the reader gets once nothing is held
        self._reader: asyncio.Future[None] | None = None
        self.buffered_bytes = 0

    # The wire's side.

    def feed(self, data: bytes) -> None:
        if self._end is None:
            append_chunk(self._chunks, data)
            self.buffered_bytes += len(data)
            self._wake()

    def end(self) -> None:
        """There are no more."""
        if self._end is None:
            self._end = StopAsyncIteration
            self._wake()

    def fail(self, error: Exception | type[Exception]) -> None:
        """It will never be whole: what is held is dropped, and the reader gets the error. Nothing after `end`."""
        if self._end is None:
            self._end = error
            self._chunks.clear()
            dropped, self.buffered_bytes = self.buffered_bytes, 0
            self._on_consumed(dropped)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # The handler's side.

    def __aiter__(self) -> BodyStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._end is not None:
                raise self._end
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = self._chunks.popleft()
        self.buffered_bytes -= len(data)
        self._on_consumed(len(data))
        return bytes(data)


_RESERVE_ABOVE_BYTES: Final = (
    16 << 10
)  # of a body that counts among those that are kept: small ones cost what a head does


class RequestError(NamedTuple):
    """What is wrong with a request, in the terms of its answer."""

    status: int
    reason: str
    headers: Headers = ()


class BaseExchange:
    """The exchange that handlers see. Plain class attributes are its defaults: most requests never change most of
    them, and setting all of them would cost as much as parsing the request."""

    head_error: RequestError | None = None  # the head is wrong: answered in place of asking the application
    started = False
    body_complete = False  # the whole body is here, or nothing more of it will come
    responded = False
    response_sent = False  # the whole answer was written
    disconnected = False  # its peer has left
    body_bytes = 0  # bytes of the body so far
    _body_policy: BodyPolicy | None = None
    _body_chunks: deque[bytes | bytearray] | None = None
    _body_stream: BodyStream | None = None
    _handler_called = False
    _overridden = False
    _disconnect_callbacks: list[Callable[[], None]] | None = None
    _stream_task: asyncio.Task[None] | None = None
    _body_reservation: BodyReservation | None = None  # its body, where it is not small

    def __init__(self, server_state: ServerState, app: Application, request: Request) -> None:
        self.server_state, self.app, self.request = server_state, app, request

    # The wire's side.

    def start(self) -> None:
        """It is this request's turn. Bytes of its body may have come before."""
        self.started = True
        if self.head_error is not None:
            response = self.app.malformed(self.request, self.head_error.status, self.head_error.reason)
            response.headers = (*response.headers, *self.head_error.headers)
            self._respond_whole(response)
            return
        try:
            wanted = self.app.begin(self.request)
        except Exception as error:  # the rim: whatever a handler does wrong is one peer's 500
            self._respond_whole(self._internal_error("begin", error))
            return
        if isinstance(wanted, Response):
            self._respond_whole(wanted)
            return
        self._body_policy = wanted
        if self.body_bytes > wanted.bytes_max or (self.request.content_length or 0) > wanted.bytes_max:
            self._reject_too_large(wanted)
        elif wanted.is_streamed:
            self._start_body_stream()
        elif self.body_complete:
            self._call_handler()
        else:
            self.send_continue()

    def feed_body(self, data: bytes) -> None:
        """Some more of the body."""
        self.body_bytes += len(data)
        if self._body_stream is None and (self.responded or self._handler_called):
            self.on_body_consumed(len(data))
            self.on_body_discarded(len(data))
            return
        body = self._body_policy
        if body is not None and self.body_bytes > body.bytes_max:
            self.on_body_consumed(len(data))
            self._reject_too_large(body)
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
                self.on_body_consumed(len(data))

    def end_body(self) -> None:
        """That was the whole body."""
        self.body_complete = True
        if self.response_sent:
            self.on_complete()
        elif self._body_stream is not None:
            if self._body_reservation is not None:
                self.server_state.body_budget.mark_complete(self._body_reservation)
            self._body_stream.end()
        elif self._body_policy is not None and not self.responded and not self._handler_called:
            self._call_handler()

    def fail_body(self, status: int, reason: str) -> None:
        """The rest of the body will never come, or cannot be understood."""
        self.body_complete = True
        if not self.started:
            self.head_error = RequestError(status, reason)
        elif self.response_sent:
            self.on_complete()
        else:
            self._reject_body(status, reason)

    def on_disconnect(self) -> None:
        """The peer has left."""
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
                self._call_safely("on_gone", call)

    @property
    def unread_body_bytes(self) -> int:
        """Of a streamed body: what its handler has not taken."""
        return 0 if self._body_stream is None else self._body_stream.buffered_bytes

    # The handler's side.

    @property
    def is_disconnected(self) -> bool:
        return self.disconnected

    def add_disconnect_callback(self, callback: Callable[[], None]) -> None:
        if self.responded:
            return
        if self.disconnected:
            self._call_safely("on_gone", callback)
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
                self.upgrade(answer)
                return
            try:
                self.start_stream(answer)
            except (ValueError, TypeError) as error:
                self.send(self._internal_error("the head of the stream", error))

    # Between the two.

    def _start_body_stream(self) -> None:
        """Hand over what came so far, and have the rest come as it is taken."""
        self._release_body()  # from now on the handler says what it keeps
        self._body_stream = pieces = BodyStream(self.server_state.loop, self.on_body_consumed)
        self.request.body_stream = pieces
        for data in self._body_chunks or ():
            pieces.feed(bytes(data))
        self._body_chunks = None
        if self.body_complete:
            pieces.end()
        else:
            self.send_continue()
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
        except Exception as error:  # the rim, as above
            if self.responded:
                self._report_error("handle", error)
            else:
                self._override_response(self._internal_error("handle", error))

    def _reject_too_large(self, body: BodyPolicy) -> None:
        self._reject_body(413, f"the body is over {body.bytes_max} bytes")

    def _reject_body(self, status: int, reason: str) -> None:
        """Answer what is wrong with the body, or have the handler do it that has begun to read it."""
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
        """There is no memory for the rest of the body."""
        limit = self.server_state.body_budget.bytes_max
        said = f"request bodies of {limit} bytes are kept already and this was the largest that was still coming"
        self.server_state.limit_counters.count("body_bytes", self.request.peer, f"{said}; it was refused")
        self._release_body()
        self._reject_body(429, said)

    def _release_body(self) -> None:
        """Its body is not needed any more."""
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
                self.send(response)
            except (ValueError, TypeError) as error:  # a header that cannot be sent; nothing was written
                self.send(self._internal_error("the answer", error))

    def _abort_body_stream(self, error: Exception | type[Exception]) -> None:
        """Whoever reads them gets the error; what else comes is thrown away."""
        if self._body_stream is not None:
            self._body_stream.fail(error)
            self._body_stream = None

    def _abandon(self) -> None:
        self._call_safely("abandoned", lambda: self.app.on_abandoned(self.request))

    def _call_safely(self, name: str, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # the rim, as above; here there is nobody left to tell
            self._report_error(name, error)

    def _report_error(self, name: str, error: Exception) -> None:
        self.server_state.report_error(f"{name} of {self.request.method} {self.request.path} failed", error)

    def _internal_error(self, name: str, error: Exception) -> Response:
        self._report_error(name, error)
        return self.app.malformed(self.request, 500, "the server made a mistake")

    def spawn_stream(self, stream: Stream, sink: Sink) -> None:
        """Run a stream that was accepted, into `sink`."""
        self._stream_task = self.server_state.spawn(self._run_stream(stream, sink))

    async def _run_stream(self, stream: Stream, sink: Sink) -> None:
        whole = False
        try:
            await stream.run(sink)
            whole = True
        except (ClientDisconnected, BodyError):
            pass  # the peer left, or its body did, and the stream noticed: nothing to tell anybody
        except Exception as error:  # the rim, as above
            self._report_error("the stream", error)
        finally:
            self._stream_task = None
            self._abort_body_stream(ClientDisconnected)
            if not self.disconnected:
                self.on_stream_end(whole)

    # What carries it.

    def send_continue(self) -> None:
        """The body is wanted: tell a peer that waits for it."""

    def on_body_consumed(self, size: int) -> None:
        """So many bytes of the body need no room any more."""

    def on_body_discarded(self, size: int) -> None:
        """So many bytes of the body came that nobody wants."""

    def send(self, response: Response) -> None:
        """Write a whole answer. The body may not be complete."""

    def start_stream(self, stream: Stream) -> None:
        """Write the head of a stream, and `spawn` it."""

    def on_stream_end(self, is_complete: bool) -> None:
        """A stream is over: end it, or cut it off."""

    def upgrade(self, answer: Upgrade) -> None:
        """Become a WebSocket."""
        raise RuntimeError(f"{self.request.method} {self.request.path} cannot become a WebSocket for {answer.run}")

    def on_complete(self) -> None:
        """Both the request and its answer are done."""
