"""HTTP/1.1 connections: `Http1Connection` parses requests and writes responses in order, `Http1Request` is one request
on it, `validate_head` checks what the parser leaves open."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)

from tidelog.http import fast_path, h1_encoder, websocket
from tidelog.http.connection import Connection, ServerState
from tidelog.http.exchange import HttpExchange, RequestError
from tidelog.http.fast_path import CachedHead, FastRequest
from tidelog.http.interface import (
    FAST_REQUEST_BYTES_MAX,
    UNREADABLE_REQUEST,
    Application,
    ClientDisconnected,
    Request,
    Response,
    Stream,
    Upgrade,
)
from tidelog.http.limits import REQUEST_UNITS, RESERVED_UNITS, Limits


class Http1Request:
    """One request of an HTTP/1.1 connection: how it is framed, and the transport of its exchange.

        whole response            Content-Length, one write if it is small
        stream, HTTP/1.1 client   chunked; the connection stays open after it
        stream, HTTP/1.0 client   until the connection closes
        stream, cut off           the connection is dropped without the last chunk, so the client notices

    When a request is answered before its body was read, the body is discarded as it arrives. If it is too large for
    that, or the client waits for `100 Continue`, the response has `connection: close`.
    """

    is_http11 = True
    keep_alive = True  # the client wants to keep the connection
    framing_valid = True  # the end of the request is known; otherwise no request can follow
    expects_continue = False  # the client waits for `100 Continue` before it sends the body
    is_chunked = False  # the request
    head_bytes = 0  # of its head, if the request had to wait
    _keeps_connection = True  # its response does not close the connection
    _discarded_bytes = 0
    _sink: ChunkedSink | None = None
    _is_chunked_stream = True  # its streamed response

    def __init__(self, connection: Http1Connection, app: Application, request: Request) -> None:
        self.connection = connection
        self.exchange = HttpExchange(connection.server_state, app, request, self)

    @property
    def has_body(self) -> bool:
        return self.is_chunked or bool(self.exchange.request.content_length)

    def send_continue(self) -> None:
        if self.expects_continue and not self.exchange.body_bytes:
            self.expects_continue = False
            self.connection.write(h1_encoder.CONTINUE_RESPONSE)

    def on_body_consumed(self, size: int) -> None:  # noqa: ARG002 - `unread_body_bytes` is what counts
        self.connection.update_reading()

    def on_body_discarded(self, size: int) -> None:
        self._discarded_bytes += size
        limits = self.connection.server_state.limits
        if self.exchange.response_sent and self._discarded_bytes > limits.discard_bytes_max:
            self._finish_connection()

    def _connection_header(self, keep_open: bool) -> bytes:
        """Decide whether the connection stays open after this response; return the header that says so."""
        exchange, state = self.exchange, self.connection.server_state
        unread_bytes = 0 if exchange.body_complete else (exchange.request.content_length or 0) - exchange.body_bytes
        self._keeps_connection = (
            keep_open
            and self.keep_alive
            and self.framing_valid
            and not state.draining
            and unread_bytes <= state.limits.discard_bytes_max
            and not (self.expects_continue and not exchange.body_bytes)
        )
        if self._keeps_connection:
            return b"" if self.is_http11 else h1_encoder.KEEP_ALIVE
        return h1_encoder.CONNECTION_CLOSE

    def send(self, response: Response) -> None:
        header, is_head = self._connection_header(not response.close), self.exchange.request.method == "HEAD"
        date = self.connection.server_state.date_header.refresh().line
        self.connection.write(*h1_encoder.encode_response(response, date, header, is_head))
        self._on_response_written()

    def start_stream(self, stream: Stream) -> None:
        bodyless = h1_encoder.is_bodyless(stream.status)
        framing = self._connection_header(self.is_http11 or bodyless or stream.length is not None)
        self._is_chunked_stream = self.is_http11 and stream.length is None
        if stream.length is not None and not bodyless:
            framing += b"content-length: %d\r\n" % stream.length
        elif self.is_http11 and not bodyless:
            framing += h1_encoder.CHUNKED_ENCODING
        date = self.connection.server_state.date_header.refresh().line
        self.connection.write(h1_encoder.encode_head(stream.status, stream.content_type, stream.headers, date, framing))
        if bodyless or self.exchange.request.method == "HEAD":
            self._on_response_written()
        else:
            self._sink = ChunkedSink(self.connection, self._is_chunked_stream)
            self.exchange.spawn_stream(stream, self._sink)

    def on_stream_end(self, is_complete: bool) -> None:
        if self._sink is not None:
            self._sink.close()
        if not is_complete:
            self.connection.abort()
            return
        if self._is_chunked_stream:
            self.connection.write(h1_encoder.LAST_CHUNK)
        self._on_response_written()

    def _on_response_written(self) -> None:
        self.exchange.response_sent = True
        if not self._keeps_connection or self.connection.server_state.draining:
            self._finish_connection()
        elif self.exchange.body_complete:
            self.on_complete()
        else:
            self.connection.update_reading()

    def on_complete(self) -> None:
        if self.framing_valid:
            self.connection.next_request(self.exchange)
        else:
            self._finish_connection()

    def _finish_connection(self) -> None:
        # A client that sends nothing more cannot lose the response to a reset.
        sends_more = not self.exchange.body_complete or self.keep_alive or not self.framing_valid
        self.connection.finish_connection(linger=sends_more)

    def upgrade(self, answer: Upgrade) -> None:
        self.connection.upgrade(answer)


class ChunkedSink:
    """The sink of a stream: writes to the connection, in chunks for HTTP/1.1 clients unless the length is known."""

    __slots__ = ("_connection", "_is_chunked", "_written_bytes")

    def __init__(self, connection: Http1Connection, is_chunked: bool) -> None:
        self._connection: Http1Connection | None = connection
        self._is_chunked, self._written_bytes = is_chunked, 0

    @property
    def pending_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes

    def write(self, data: bytes) -> None:
        if self._connection is not None and data:
            self._written_bytes += len(data)
            self._connection.write(*(h1_encoder.encode_chunk(data) if self._is_chunked else (data,)))

    def reserve(self, size: int) -> None:
        if self._connection is not None:
            self._connection.reserve(size)

    @property
    def is_under_pressure(self) -> bool:
        return self._connection is not None and self._connection.server_state.unsent_budget.is_above_half

    async def wait_ready(self) -> None:
        await self.drain()
        if self._connection is not None:
            await self._connection.server_state.unsent_budget.wait_below_half()

    async def drain(self) -> None:
        if self._connection is None:
            raise ClientDisconnected
        written_bytes, self._written_bytes = self._written_bytes, 0
        await self._connection.drain(written_bytes)

    def close(self) -> None:
        """The stream is over: later writes are ignored."""
        self.reserve(0)
        self._connection = None


# Flags for headers that were parsed, so that no search is needed.
HOST, LENGTH, TRANSFER_ENCODING, EXPECT, UPGRADE, CONTENT_CODED, CONNECTION, UNKNOWN_TRANSFER_ENCODING, TWO_HOSTS = (
    1 << bit for bit in range(9)
)
HEADER_FLAGS: Final = {
    b"host": HOST,
    b"content-length": LENGTH,
    b"transfer-encoding": TRANSFER_ENCODING,
    b"expect": EXPECT,
    b"upgrade": UPGRADE,
    b"connection": CONNECTION,
    b"accept-encoding": CONTENT_CODED,
    b"content-encoding": CONTENT_CODED,
}
CHECKED_HEADERS: Final = HOST | TRANSFER_ENCODING  # a second one, or another value, matters
PLAIN_HEADERS: Final = HOST | LENGTH | CONTENT_CODED  # with no other flags a head needs no validation
_HEADER_LINE_OVERHEAD_BYTES: Final = 4  # colon, space, line end


def header_flag(flag: int, value: bytes, seen_flags: int) -> int:
    """Return the flag of one of `CHECKED_HEADERS`, by its value and the flags before it."""
    if flag == HOST and seen_flags & HOST:
        return TWO_HOSTS
    if flag == TRANSFER_ENCODING and value.lower() != b"chunked":
        return TRANSFER_ENCODING | UNKNOWN_TRANSFER_ENCODING
    return flag


def validate_head(incoming: Http1Request, flags: int, version: str, keep_alive: bool, target: bytes) -> None:
    """Set the fields of `incoming` that depend on its head, and `head_error` if the head is invalid.

    llhttp has rejected by then: several Content-Lengths or one that is no number, a Transfer-Encoding beside it, folded
    lines, control characters, spaces before a colon. It accepts these, in order of the checks below:

        505   versions other than 1.0 and 1.1
        400   no Host from a 1.1 client, or more than one: a proxy may have used another
        400   Transfer-Encoding from a 1.0 client: servers that read it and servers that do not see different requests
        501   transfer codings other than chunked; CONNECT
        400   a target that is neither a path, nor `*`, nor a URL

    `check_head_size` adds 414 (target too long) and 431 (head too long).
    """
    exchange, request, is_http11 = incoming.exchange, incoming.exchange.request, version == "1.1"
    incoming.is_http11, incoming.keep_alive = is_http11, keep_alive
    incoming.is_chunked = bool(flags & TRANSFER_ENCODING)
    if flags & EXPECT and is_http11:
        incoming.expects_continue = (request.header(b"expect") or b"").lower() == b"100-continue"
    if version not in ("1.0", "1.1"):
        exchange.head_error = RequestError(505, f"HTTP/{version} is not supported, 1.1 is")
    elif flags & TWO_HOSTS or (is_http11 and not flags & HOST):
        exchange.head_error = RequestError(400, "a request has exactly one Host header")
    elif flags & TRANSFER_ENCODING and not is_http11:
        exchange.head_error = RequestError(400, "Transfer-Encoding is not part of HTTP/1.0")
    elif flags & UNKNOWN_TRANSFER_ENCODING:
        exchange.head_error = RequestError(501, "the only supported transfer coding is chunked")
    elif request.method == "CONNECT":
        exchange.head_error = RequestError(501, "this is not a proxy")
    elif request.path[:1] != "/" and request.path != "*":
        exchange.head_error = _use_absolute_target(request, target)


def _use_absolute_target(request: Request, target: bytes) -> RequestError | None:
    """Use the path of a target with scheme and host, the form that is sent to proxies."""
    try:
        url = parse_url(target)
    except HttpParserError:
        url = None
    if url is None or not url.schema:
        return RequestError(400, "the target is neither a path nor a URL")
    request.path, request.query = (url.path or b"/").decode(), (url.query or b"").decode()
    return None


def requests_websocket(incoming: Http1Request) -> bool:
    """Return whether a request to switch protocols asks for WebSocket, the only one supported."""
    return incoming.is_http11 and (incoming.exchange.request.header(b"upgrade") or b"").lower() == b"websocket"


def check_head_size(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> RequestError | None:
    """Return the error of a head that is too large."""
    if len(target) > limits.target_bytes_max:
        return RequestError(414, f"the target is longer than {limits.target_bytes_max} bytes")
    if (
        len(target) + sum(len(name) + len(value) + _HEADER_LINE_OVERHEAD_BYTES for name, value in headers)
        > limits.header_bytes_max
    ):
        return RequestError(431, f"the head is longer than {limits.header_bytes_max} bytes")
    return None


_PARSE_STEP_BYTES: Final = 2 << 10
_CHUNKED_STEP_BYTES: Final = 16 << 10  # of a chunked body: 2,700 chunks of one byte
CALLS_PER_UNIT: Final = 16
"""Parser callbacks (a header, or a chunk of a body) that cost about as much as one HTTP/2 frame."""
_METHODS: Final = {name.encode(): name for name in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")}


class Http1Connection(Connection):
    """Requests in, responses out, one at a time and in order.

        bytes ──► llhttp ──► head ──► is a request in progress? ──no──► HttpExchange.start
                     │                   └──yes──► it waits: up to a number of them, then nothing more is read
                     └──► body ──► its exchange

    Before that, on an idle connection, `fast_path` may recognise a request with a known head.

    llhttp decides what a request is, strictly; `validate_head` rejects what it leaves open. After invalid bytes nothing
    more is parsed: the error is sent after the responses before it, the rest of the input is discarded, and the
    connection closes. The connection is read while a request is in progress, so that a disconnect is noticed.
    """

    def __init__(self, server_state: ServerState) -> None:
        super().__init__(server_state)
        self._parser = HttpRequestParser(self)
        self._parsing: memoryview | bytes = b""  # the input that is being parsed
        self._input_bytes = 0  # its size
        self._is_first_in_input = False  # no request has ended in it yet
        self._idle_since_s = server_state.now_s

        # The head that is being parsed.
        self._in_head = False
        self._head_since_s = server_state.now_s
        self._head_began_in_input = False  # it began in the input that is being parsed
        self._head_bytes = 0  # of it, in earlier input
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_flags = 0
        self._content_length: int | None = None

        # The requests.
        self.current: HttpExchange | FastRequest | None = None  # the request in progress
        self._fast_request: FastRequest | None = None  # reads the socket where the fast path is available
        if fast_path.IS_AVAILABLE:
            self._fast_request = reader = FastRequest(self, server_state.receive_buffer, super().buffer_updated)
            self.get_buffer, self.buffer_updated = reader.get_buffer, reader.buffer_updated  # type: ignore[method-assign]
        self._cached_head: CachedHead | None = None  # of the last request on the fast path
        self._pipelined: deque[Http1Request] = deque()
        self._receiving: Http1Request | None = None  # whose body is being parsed
        self._pipelined_bytes = 0
        self._starting_pipelined = False
        self._ignore_input = False  # no more input is parsed
        self._chunk_overhead_bytes = 0  # since the last byte of a body: chunk extensions and trailers

        # A request to switch protocols.
        self._feeding = False
        self._upgrade_has_body = False  # llhttp stops after it, but it has a body
        self._upgrading: Http1Request | None = None  # bytes after it are not HTTP if its handler accepts
        self._bytes_after_upgrade = b""
        self._upgrade_response: Upgrade | None = None
        self._websocket: websocket.WebSocketConnection | None = None  # after the switch
        self._parser_calls = 0  # callbacks of the parser in this step, weighted by cost

    # Input.

    def on_data(self, data: memoryview) -> None:
        if self._ignore_input:
            return
        if self._upgrading is None:
            if len(data) <= FAST_REQUEST_BYTES_MAX and self._try_fast_path(data):
                return
            if len(data) > _PARSE_STEP_BYTES:
                self._parse_within_budget(data)
                return
            self._parse(data)
        else:
            self._bytes_after_upgrade += data
        if self.current is not None or self._pipelined:
            self.update_reading()

    def process_deferred(self, remaining: bytes) -> None:
        if self._is_full:
            self.park(remaining)
        else:
            self._parse_within_budget(memoryview(remaining))

    def _parse_within_budget(self, data: memoryview) -> None:
        """Parse input within the budget of this turn and the limit of waiting requests.

        llhttp cannot be stopped within its input, so it gets small steps: one of heads has at most 80 requests. The
        body of a request whose length is known is one step, which costs little more than its bytes."""
        scheduler = self.server_state.turn_scheduler
        pos, size, units_left = 0, len(data), scheduler.units_left
        while pos < size and not self._ignore_input:
            if self._upgrading is not None:
                self._bytes_after_upgrade += data[pos:]
                break
            incoming, step = self._receiving, _PARSE_STEP_BYTES
            if incoming is not None:
                missing_bytes = (incoming.exchange.request.content_length or 0) - incoming.exchange.body_bytes
                step = max(_CHUNKED_STEP_BYTES if incoming.is_chunked else missing_bytes, step)
            is_spent = units_left <= RESERVED_UNITS and (incoming is None or incoming.is_chunked)
            if is_spent or (pos and self._is_full):
                self.defer(bytes(data[pos:]))
                return
            self._parser_calls = 0
            self._parse(data[pos : pos + step])
            pos += step
            units = self._parser_calls // CALLS_PER_UNIT
            units_left -= units
            scheduler.spend(units)
            if self._websocket is not None:
                self._websocket.on_data(data[pos:])
                return
        self.update_reading()

    def _try_fast_path(self, data: memoryview) -> bool:
        """Handle `data` if it is a request with a known head and no other is in progress; return whether it was."""
        state, request = self.server_state, self._fast_request
        busy = (
            self.current is not None
            or self._in_head
            or self._receiving is not None
            or self._pipelined
            or self.write_paused
        )
        if request is None or busy or state.draining or not state.head_cache:
            return False
        received, cached = bytes(data), self._cached_head
        if cached is None or (body := cached.match_body(received)) is None:
            match = state.head_cache.lookup(received)
            if match is None:
                return False
            cached, body = match
            self._cached_head = cached
        if cached.batcher is not None:
            request.submit(cached.before_length, cached.after_length, cached.batcher, self.transport, body)
            return True
        assert cached.handler is not None, "a cached head has a handler or a batcher"
        self.current = request
        if not cached.handler(body, request):
            self.current = None
            return False
        return True

    def _disarm_fast_path(self) -> None:
        """Have the parser read the next input."""
        if self._fast_request is not None:
            self._fast_request.is_armed = self._fast_request.is_undisturbed = False

    def reparse(self, body: bytes) -> None:
        """Parse a request that its handler took out of a batch."""
        self.current, cached = None, self._cached_head
        assert cached is not None, "the request was on the fast path"
        self._parse(b"%b%d%b%b" % (cached.before_length, len(body), cached.after_length, body))
        self.update_reading()

    def _parse(self, data: memoryview | bytes) -> None:
        self._parsing, self._is_first_in_input = data, True
        self._input_bytes = len(data)
        self._chunk_overhead_bytes += self._input_bytes
        self._feed_parser(data)
        self._parsing = b""
        if self._in_head:
            self._check_partial_head()
        elif self._receiving is not None and self._chunk_overhead_bytes > self.server_state.limits.header_bytes_max:
            self._fail_connection(431, "chunk extensions and trailers of the body are too long")

    def _feed_parser(self, data: memoryview | bytes) -> None:
        while data:
            self._feeding = True
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as stop:
                data = data[stop.args[0] :]
            except HttpParserCallbackError as error:
                self.server_state.report_error("a callback of the HTTP/1.1 parser failed", error.__context__ or error)
                self._fail_connection(500, "the server made a mistake")
                return
            except HttpParserError as error:
                if not self._ignore_input:
                    self._fail_connection(400, f"this is not HTTP/1.1: {error}")
                return
            finally:
                self._feeding = False
            if self._ignore_input:
                return
            if self._upgrade_has_body:
                self._resume_body()
            elif self._upgrading is not None:
                self._bytes_after_upgrade += data
                if self._upgrade_response is not None:
                    self._switch_to_websocket(self._upgrade_response)
                return

    def _check_partial_head(self) -> None:
        limits = self.server_state.limits
        if self._head_began_in_input:
            self._head_began_in_input = False
        else:
            self._head_bytes += self._input_bytes
        if len(self._url) > limits.target_bytes_max:
            self._fail_connection(414, f"the target is longer than {limits.target_bytes_max} bytes")
        elif self._head_bytes > limits.header_bytes_max:
            self._fail_connection(431, f"the head is longer than {limits.header_bytes_max} bytes")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._in_head = self._head_began_in_input = True
        self._head_since_s = self.server_state.now_s
        self._head_bytes = self._header_flags = 0
        self._url, self._headers, self._content_length = b"", [], None

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parser_calls += 1
        if not self._in_head:
            return  # a trailer, which must not be taken for a header
        name = name.lower()
        value = value.rstrip(b" \t")
        self._headers.append((name, value))
        flag = HEADER_FLAGS.get(name)
        if flag is not None:
            if flag == LENGTH:
                self._content_length = int(value)
            elif flag & CHECKED_HEADERS:
                flag = header_flag(flag, value, self._header_flags)
            self._header_flags |= flag

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._parser_calls += REQUEST_UNITS * CALLS_PER_UNIT
        if self._ignore_input:
            return
        flags, parser, state = self._header_flags, self._parser, self.server_state
        method = parser.get_method()
        path, _, query = self._url.decode("ascii").partition("?")
        length = 0 if self._content_length is None and not flags & TRANSFER_ENCODING else self._content_length
        request = Request(
            _METHODS.get(method) or method.decode(), path, query, self._headers, self.peer, b"", None, length
        )
        incoming = Http1Request(self, state.compressed_app if flags & CONTENT_CODED else state.app, request)
        exchange = incoming.exchange
        is_plain = not flags & ~PLAIN_HEADERS and flags & HOST and path[:1] == "/" and parser.should_keep_alive()
        if not is_plain:
            validate_head(incoming, flags, parser.get_http_version(), parser.should_keep_alive(), self._url)
            if exchange.head_error is None and parser.should_upgrade():
                self._check_upgrade(incoming)
        elif (
            fast_path.IS_AVAILABLE
            and self._is_first_in_input
            and self._head_began_in_input
            and length
            and self._input_bytes <= state.safe_head_bytes
        ):
            handler = exchange.app.fast_handler(request, FAST_REQUEST_BYTES_MAX)
            if handler is not None:
                state.head_cache.remember(bytes(self._parsing), handler)
        if self._input_bytes > state.safe_head_bytes or not self._head_began_in_input:
            exchange.head_error = check_head_size(self._url, self._headers, state.limits) or exchange.head_error
        self._receiving, self._chunk_overhead_bytes = incoming, 0
        if exchange.head_error is not None:
            exchange.body_complete, incoming.framing_valid = True, False
            self._receiving, self._ignore_input = None, True
        if self.current is None and not self._pipelined and not self.write_paused:
            self.current = exchange
            exchange.start()
        else:
            self._pipelined.append(incoming)
            incoming.head_bytes = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            self._pipelined_bytes += incoming.head_bytes

    def on_body(self, data: bytes) -> None:
        self._chunk_overhead_bytes = 0
        self._parser_calls += 1
        if self._receiving is not None:
            exchange = self._receiving.exchange
            if not exchange.started:
                self._pipelined_bytes += len(data)
            exchange.feed_body(data)

    def on_message_complete(self) -> None:
        self._is_first_in_input = False
        incoming = self._receiving
        if incoming is not None and not self._upgrade_has_body:
            self._receiving = None
            if not incoming.keep_alive:
                self._ignore_input = True  # the client sends no other request
            incoming.exchange.end_body()

    # Upgrades and invalid requests.

    def _check_upgrade(self, incoming: Http1Request) -> None:
        """Handle a request after which llhttp stops, because another protocol may follow."""
        exchange = incoming.exchange
        if not requests_websocket(incoming):
            # Some clients offer HTTP/2 with their first request. A response declines it; the request may have a body.
            self._upgrade_has_body = incoming.has_body
        elif (error := websocket.handshake_error(exchange.request)) is not None:
            exchange.app, incoming.framing_valid = websocket.BadHandshake(exchange.app, error), False
            self._ignore_input = True
        else:
            exchange.request.upgrade = True
            self._upgrading = incoming

    def _resume_body(self) -> None:
        """Parse the body of a request after whose head llhttp stopped.

        A new parser gets the head of a request with the same framing and without the upgrade.
        """
        incoming = self._receiving
        assert incoming is not None, "only a request with a body"
        length = self._content_length or 0
        framing = b"transfer-encoding: chunked" if incoming.is_chunked else b"content-length: %d" % length
        self._receiving, self._ignore_input = None, True
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        self._receiving, self._ignore_input, self._upgrade_has_body = incoming, False, False

    def _fail_connection(self, status: int, reason: str) -> None:
        """Answer invalid input after the requests before it, and parse no more."""
        self._ignore_input, self._in_head = True, False
        incoming, self._receiving = self._receiving, None
        if incoming is not None:
            incoming.framing_valid = False
            incoming.exchange.fail_body(status, reason)
            return
        incoming = Http1Request(self, self.server_state.app, UNREADABLE_REQUEST)
        incoming.exchange.head_error = RequestError(status, reason)
        incoming.exchange.body_complete, incoming.framing_valid = True, False
        self._pipelined.append(incoming)
        self._start_pipelined()

    # From one request to the next.

    def next_request(self, exchange: HttpExchange | FastRequest) -> None:
        """Continue after a request and its response are complete."""
        self.current = None
        self._idle_since_s = self._head_since_s = self.server_state.now_s
        if (
            self._upgrading is not None and exchange is self._upgrading.exchange
        ):  # its handler did not accept the upgrade: the bytes after it are HTTP
            data, self._bytes_after_upgrade, self._upgrading = self._bytes_after_upgrade, b"", None
            if data:
                self._parse_within_budget(memoryview(data))
        if self._pipelined:
            self._start_pipelined()
        if not self._reading:
            self.update_reading()

    def finish_connection(self, *, linger: bool = True) -> None:
        """Close after the last response. `linger`: the client may still be sending."""
        self._ignore_input = True
        self.current = self._receiving = None
        self._pipelined.clear()
        if linger:
            self.lingering_close()
        else:
            self.close_after_write()

    def _start_pipelined(self) -> None:
        if self._starting_pipelined:
            return
        self._starting_pipelined = True
        try:
            while self._pipelined and self.current is None and not self.write_paused and not self.is_closing:
                incoming = self._pipelined.popleft()
                exchange = self.current = incoming.exchange
                self._pipelined_bytes -= exchange.body_bytes + incoming.head_bytes
                exchange.start()
        finally:
            self._starting_pipelined = False

    def update_reading(self) -> None:
        """Resume or pause reading, to bound what waits."""
        if self.is_closing or not self._is_full:
            self.unpark()
            self.set_reading()
        else:
            self.set_reading(False)

    @property
    def _is_full(self) -> bool:
        limits, current = self.server_state.limits, self.current
        return (
            len(self._pipelined) >= limits.pipelined_max
            or self._pipelined_bytes + len(self._bytes_after_upgrade) > limits.ahead_bytes_max
            or (current is not None and current.unread_body_bytes > limits.ahead_bytes_max)
            or (self.write_paused and bool(self._pipelined))
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._disarm_fast_path()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._start_pipelined()
        self.update_reading()

    # Becoming a WebSocket.

    def upgrade(self, answer: Upgrade) -> None:
        self._upgrade_response = answer
        if not self._feeding:  # else the bytes after the request are not known yet
            self._switch_to_websocket(answer)

    def _switch_to_websocket(self, answer: Upgrade) -> None:
        incoming = self._upgrading
        assert incoming is not None, "the request that asked for it"
        self.current = self._upgrading = None
        self._websocket = socket = websocket.WebSocketConnection(self.server_state, answer)
        self.switch_protocol(socket)
        socket.open(incoming.exchange.request, self._bytes_after_upgrade)

    # Time-outs and closing.

    def reject(self, status: int, reason: str) -> None:
        """Send an error response before any request, and close."""
        self._fail_connection(status, reason)

    def check_timeouts(self, now: float) -> None:
        limits, current, incoming = self.server_state.limits, self.current, self._receiving
        if self._fast_request is not None and self._fast_request.was_served:  # since the last tick
            self._fast_request.was_served, self._idle_since_s = False, now
        if current is None:
            if self._in_head:
                if now - self._head_since_s > limits.header_timeout_s:
                    self._fail_connection(408, f"the head did not arrive within {limits.header_timeout_s:g} s")
            elif not self._pipelined and now - self._idle_since_s > limits.idle_timeout_s:
                self.close_after_write()
        elif not current.body_complete and self._reading and now - self._last_received_s > limits.body_timeout_s:
            self._fail_connection(408, f"no more of the body arrived within {limits.body_timeout_s:g} s")
        elif (
            incoming is not None
            and current is incoming.exchange
            and not self._reading
            and self._client_left_mid_body(incoming)
        ):
            self.abort()

    def _client_left_mid_body(self, incoming: Http1Request) -> bool:
        """Return whether the client disconnected in the middle of a body that is not being read."""
        if incoming.is_chunked:
            return self.peer_closed_before(None)
        received_bytes = incoming.exchange.body_bytes
        return self._content_length is not None and self.peer_closed_before(self._content_length - received_bytes)

    def _begin_close(self) -> None:
        super()._begin_close()
        self._disarm_fast_path()

    def begin_shutdown(self) -> None:
        if self._fast_request is not None:
            self._fast_request.is_armed = False
        if self.current is None and not self._pipelined and not self._in_head:
            self.close_after_write()

    def on_disconnect(self) -> None:
        current, self.current = self.current, None
        self._pipelined.clear()
        self._ignore_input = True
        if current is not None:
            current.on_disconnect()
        self._receiving = None
