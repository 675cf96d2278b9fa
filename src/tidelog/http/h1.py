"""[shell] One request of an HTTP/1.1 connection: how its answer gets onto the wire.

    whole                     content-length, one write where it is small
    stream, to 1.1            chunked; the connection goes on after it
    stream, to 1.0            until the connection closes
    cut off                   the connection is dropped without the last chunk: the peer can tell

When a request is answered before its body was read, the body is thrown away as it comes. Where it would be too much
of it, or where the peer waits to be told to send it, the answer says that the connection closes.

[policy] What the head of an HTTP/1.1 request asks for, and what is wrong with it.

llhttp has refused by then: several Content-Lengths or one that is no number, a Transfer-Encoding beside it, folded
lines, control characters, blanks before a colon. What it lets pass and we do not, in order:

    505   versions other than 1.0 and 1.1
    400   no Host from a 1.1 peer, or more than one: a proxy in front may have meant another
    400   Transfer-Encoding from a 1.0 peer: who reads it and who does not would see different requests
    501   transfer codings other than chunked; CONNECT
    400   a target that is neither a path, nor `*`, nor an address
    414   a target that is too long    431   a head that is too long

[shell] An HTTP/1.1 connection: requests in, answers out, one at a time and in order.

    bytes ──► llhttp ──► head ──► its turn? ──yes──► Turn.start
                 │                   └──no──► it waits: up to a number of them, then nothing more is read
                 └──► body ──► the turn it belongs to

Before all that, on a connection where nothing is under way: is this a request whose head is known (`known.py`)?

llhttp decides what a request is, strictly: one Content-Length, no Transfer-Encoding beside it, no folded lines. What
it leaves open is refused here: other codings than chunked, no or several hosts, versions other than 1.0 and 1.1.
After bytes that are no request nothing more is believed: the answer goes out behind those before it, the rest is
read and thrown away, and the connection closes.

A peer is read from while its request is being answered, so that its leaving is noticed; bytes of later requests wait.
"""

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
from tidelog.http.connection import Connection
from tidelog.http.exchange import BaseExchange, RequestError
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
from tidelog.http.server_state import ServerState


class Http1Exchange(BaseExchange):
    is_http11 = True  # the peer speaks 1.1
    keep_alive = True  # the peer wants the connection to go on
    framing_valid = True  # it is HTTP to its end; else nothing behind it can be believed
    expects_continue = False  # the peer waits to be told before it sends the body
    is_chunked = False  # the request
    head_bytes = 0  # bytes of its head, where it had to wait
    _keeps_connection = True  # its answer said that the connection goes on
    _discarded_bytes = 0
    _sink: ChunkedSink | None = None

    def __init__(self, connection: Http1Connection, app: Application, request: Request) -> None:
        self.connection = connection
        self.server_state, self.app, self.request = connection.server_state, app, request

    @property
    def has_body(self) -> bool:
        return self.is_chunked or bool(self.request.content_length)

    def send_continue(self) -> None:
        if self.expects_continue and not self.body_bytes:
            self.expects_continue = False
            self.connection.write(h1_encoder.CONTINUE_RESPONSE)

    def on_body_consumed(self, size: int) -> None:  # noqa: ARG002 - what counts is what is left
        self.connection.update_reading()

    def on_body_discarded(self, size: int) -> None:
        self._discarded_bytes += size
        if self.response_sent and self._discarded_bytes > self.server_state.limits.discard_bytes_max:
            self.connection.finish_connection(self)

    def _connection_header(self, keep_open: bool) -> bytes:
        """Decide whether the connection goes on after this answer; return what is said about it."""
        rest = 0 if self.body_complete else (self.request.content_length or 0) - self.body_bytes
        self._keeps_connection = (
            keep_open
            and self.keep_alive
            and self.framing_valid
            and not self.server_state.draining
            and rest <= self.server_state.limits.discard_bytes_max
            and not (self.expects_continue and not self.body_bytes)
        )
        if self._keeps_connection:
            return b"" if self.is_http11 else h1_encoder.KEEP_ALIVE
        return h1_encoder.CONNECTION_CLOSE

    def send(self, response: Response) -> None:
        says = self._connection_header(not response.close)
        line = self.server_state.date_header.refresh().line
        self.connection.write(*h1_encoder.encode_response(response, line, says, self.request.method == "HEAD"))
        self._on_response_written()

    def start_stream(self, stream: Stream) -> None:
        bodyless = h1_encoder.is_bodyless(stream.status)
        framing = self._connection_header(self.is_http11 or bodyless)
        if self.is_http11 and not bodyless:
            framing += h1_encoder.CHUNKED_ENCODING
        line = self.server_state.date_header.refresh().line
        self.connection.write(h1_encoder.encode_head(stream.status, stream.content_type, stream.headers, line, framing))
        if bodyless or self.request.method == "HEAD":
            self._on_response_written()
        else:
            self._sink = ChunkedSink(self.connection, self.is_http11)
            self.spawn_stream(stream, self._sink)

    def on_stream_end(self, is_complete: bool) -> None:
        if self._sink is not None:
            self._sink.close()
        if not is_complete:
            self.connection.abort()
            return
        if self.is_http11:
            self.connection.write(h1_encoder.LAST_CHUNK)
        self._on_response_written()

    def _on_response_written(self) -> None:
        self.response_sent = True
        if not self._keeps_connection or self.server_state.draining:
            self.connection.finish_connection(self)
        elif self.body_complete:
            self.on_complete()
        else:
            self.connection.update_reading()

    def on_complete(self) -> None:
        if self.framing_valid:
            self.connection.next_request(self)
        else:
            self.connection.finish_connection(self)

    def upgrade(self, answer: Upgrade) -> None:
        if not self.request.upgrade:
            super().upgrade(answer)
        self.connection.upgrade(answer)


class ChunkedSink:
    """Where a stream writes: the connection itself, in chunks where the peer knows them."""

    __slots__ = ("_connection", "_is_http11", "_written_bytes")

    def __init__(self, connection: Http1Connection, is_http11: bool) -> None:
        self._connection: Http1Connection | None = connection
        self._is_http11, self._written_bytes = is_http11, 0

    @property
    def pending_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes

    def write(self, data: bytes) -> None:
        if self._connection is not None and data:
            self._written_bytes += len(data)
            self._connection.write(*(h1_encoder.encode_chunk(data) if self._is_http11 else (data,)))

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
        wrote, self._written_bytes = self._written_bytes, 0
        await self._connection.drain(wrote)

    def close(self) -> None:
        """The stream is over: what it writes from now on goes nowhere."""
        self.reserve(0)
        self._connection = None


# What was seen while the head went by, so that nobody has to search for it.
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
CHECKED_HEADERS: Final = HOST | TRANSFER_ENCODING  # where a second one, or another value, makes a difference
PLAIN_HEADERS: Final = HOST | LENGTH | CONTENT_CODED  # nothing else was seen: no closer look is needed
_HEADER_LINE_OVERHEAD_BYTES: Final = 4  # colon, blank, line end


def header_flag(flag: int, value: bytes, seen_flags: int) -> int:
    """The mark of one of `ONCE`, by its value and what came before it."""
    if flag == HOST and seen_flags & HOST:
        return TWO_HOSTS
    if flag == TRANSFER_ENCODING and value.lower() != b"chunked":
        return TRANSFER_ENCODING | UNKNOWN_TRANSFER_ENCODING
    return flag


def validate_head(exchange: Http1Exchange, flags: int, version: str, keep_alive: bool, target: bytes) -> None:
    """Set what `turn` must know of its head, and its fault if it has one."""
    request = exchange.request
    exchange.is_http11, exchange.keep_alive, exchange.is_chunked = (
        version == "1.1",
        keep_alive,
        bool(flags & TRANSFER_ENCODING),
    )
    if flags & EXPECT and exchange.is_http11:
        exchange.expects_continue = (request.header(b"expect") or b"").lower() == b"100-continue"
    if version not in ("1.0", "1.1"):
        exchange.head_error = RequestError(505, f"HTTP/{version} is not spoken here, 1.1 is")
    elif flags & TWO_HOSTS or (exchange.is_http11 and not flags & HOST):
        exchange.head_error = RequestError(400, "a request has exactly one Host header")
    elif flags & TRANSFER_ENCODING and not exchange.is_http11:
        exchange.head_error = RequestError(400, "Transfer-Encoding is not part of HTTP/1.0")
    elif flags & UNKNOWN_TRANSFER_ENCODING:
        exchange.head_error = RequestError(501, "the only transfer coding that is known here is chunked")
    elif request.method == "CONNECT":
        exchange.head_error = RequestError(501, "this is not a proxy")
    elif request.path[:1] != "/" and request.path != "*":
        exchange.head_error = _use_absolute_target(exchange, target)


def _use_absolute_target(exchange: Http1Exchange, target: bytes) -> RequestError | None:
    """A target with scheme and host, as proxies are sent: only its path matters."""
    try:
        url = parse_url(target)
    except HttpParserError:
        url = None
    if url is None or not url.schema:
        return RequestError(400, "the target is neither a path nor an address")
    exchange.request.path, exchange.request.query = (url.path or b"/").decode(), (url.query or b"").decode()
    return None


def requests_websocket(exchange: Http1Exchange) -> bool:
    """Whether a request to switch protocols is one to the only other that is spoken here."""
    return exchange.is_http11 and (exchange.request.header(b"upgrade") or b"").lower() == b"websocket"


def check_head_size(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> RequestError | None:
    """What is wrong with the size of a head."""
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
"""Callbacks for one header, or one chunk of a body, that cost about as much as one frame."""
_METHODS: Final = {name.encode(): name for name in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")}


class Http1Connection(Connection):
    def __init__(self, server_state: ServerState) -> None:
        super().__init__(server_state)
        self._parser = HttpRequestParser(self)
        self._parsing: memoryview | bytes = b""  # the piece that is being parsed
        self._piece_bytes = 0  # how long it is
        self._is_first_in_piece = False  # no request began in it yet
        self._idle_since_s = server_state.now_s

        # The head that is being parsed.
        self._in_head = False
        self._head_since_s = server_state.now_s
        self._head_began_in_piece = False  # it began in this piece
        self._head_bytes = 0  # of it, in pieces before this one
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_flags = 0
        self._content_length: int | None = None

        # The requests.
        self.current: Http1Exchange | FastRequest | None = None  # whose answer is the next on the wire
        self._fast_request: FastRequest | None = None  # reads the socket where the fast path is available
        if fast_path.IS_AVAILABLE:
            self._fast_request = reader = FastRequest(self, server_state.receive_buffer, super().buffer_updated)
            self.get_buffer, self.buffer_updated = reader.get_buffer, reader.buffer_updated  # type: ignore[method-assign]
        self._cached_head: CachedHead | None = None  # of the request that came last, where its head was known
        self._pipelined: deque[Http1Exchange] = deque()
        self._receiving: Http1Exchange | None = None  # whose body is being parsed
        self._pipelined_bytes = 0  # bytes of those that wait
        self._starting_pipelined = False
        self._ignore_input = False  # what else comes is not listened to
        self._chunk_overhead_bytes = 0  # since the last byte of a body: chunk extensions and trailers

        # A request that may turn the connection into something else.
        self._feeding = False
        self._upgrade_has_body = False  # llhttp takes it for the last request; it has a body all the same
        self._upgrading: Http1Exchange | None = None  # bytes behind it are not HTTP, if its answer says so
        self._bytes_after_upgrade = b""  # those bytes
        self._upgrade_response: Upgrade | None = None
        self._websocket: websocket.WebSocketConnection | None = None  # what it became
        self._parser_calls = 0  # of the parser's callbacks in this turn, each worth as much as it costs

    # Bytes.

    def on_data(self, data: memoryview) -> None:
        if self._ignore_input:
            return
        if self._upgrading is None:
            if len(data) <= FAST_REQUEST_BYTES_MAX and self._try_fast_path(data):
                return  # nothing waits
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
        """Handle as much as the budget of this turn allows, and as requests may wait.

        llhttp cannot be stopped in the middle of a piece, so it gets small ones: a slice of heads holds 80 requests at
        most. The body of a request whose length is known is one slice, which costs little more than its bytes."""
        ring = self.server_state.turn_scheduler
        at, size, left = 0, len(data), ring.units_left
        while at < size and not self._ignore_input:
            if self._upgrading is not None:
                self._bytes_after_upgrade += data[at:]
                break
            turn, step = self._receiving, _PARSE_STEP_BYTES
            if turn is not None:
                step = max(
                    _CHUNKED_STEP_BYTES if turn.is_chunked else (turn.request.content_length or 0) - turn.body_bytes,
                    step,
                )
            if (left <= RESERVED_UNITS and (turn is None or turn.is_chunked)) or (at and self._is_full):
                self.defer(bytes(data[at:]))
                return
            self._parser_calls = 0
            self._parse(data[at : at + step])
            at += step
            left -= self._parser_calls // CALLS_PER_UNIT
            ring.spend(self._parser_calls // CALLS_PER_UNIT)
            if self._websocket is not None:
                self._websocket.on_data(data[at:])
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
        self._parsing, self._is_first_in_piece = data, True
        self._piece_bytes = len(data)
        self._chunk_overhead_bytes += self._piece_bytes
        self._feed_parser(data)
        self._parsing = b""
        if self._in_head:
            self._check_partial_head()
        elif self._receiving is not None and self._chunk_overhead_bytes > self.server_state.limits.header_bytes_max:
            self._fail_connection(431, "the chunks of the body say more about themselves than there is in them")

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
        if self._head_began_in_piece:
            self._head_began_in_piece = False
        else:
            self._head_bytes += self._piece_bytes
        if len(self._url) > limits.target_bytes_max:
            self._fail_connection(414, f"the target is longer than {limits.target_bytes_max} bytes")
        elif self._head_bytes > limits.header_bytes_max:
            self._fail_connection(431, f"the head is longer than {limits.header_bytes_max} bytes")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._in_head = self._head_began_in_piece = True
        self._head_since_s = self.server_state.now_s
        self._head_bytes = self._header_flags = 0
        self._url, self._headers, self._content_length = b"", [], None

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parser_calls += 1
        if not self._in_head:
            return  # a trailer: nobody asked for it, and it must not pass for a header
        name = name.lower()
        value = value.rstrip(b" \t")
        self._headers.append((name, value))
        mark = HEADER_FLAGS.get(name)
        if mark is not None:
            if mark == LENGTH:
                self._content_length = int(value)
            elif mark & CHECKED_HEADERS:
                mark = header_flag(mark, value, self._header_flags)
            self._header_flags |= mark

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._parser_calls += REQUEST_UNITS * CALLS_PER_UNIT
        if self._ignore_input:
            return
        marks, parser = self._header_flags, self._parser
        method = parser.get_method()
        path, _, query = self._url.decode("ascii").partition("?")
        length = 0 if self._content_length is None and not marks & TRANSFER_ENCODING else self._content_length
        request = Request(
            _METHODS.get(method) or method.decode(), path, query, self._headers, self.peer, b"", None, length
        )
        turn = Http1Exchange(
            self, self.server_state.compressed_app if marks & CONTENT_CODED else self.server_state.app, request
        )
        if not (marks & ~PLAIN_HEADERS or not marks & HOST or path[:1] != "/" or not parser.should_keep_alive()):
            if (
                fast_path.IS_AVAILABLE
                and self._is_first_in_piece
                and self._head_began_in_piece
                and length
                and self._piece_bytes <= self.server_state.safe_head_bytes
            ):
                way = turn.app.fast_handler(turn.request, FAST_REQUEST_BYTES_MAX)
                if way is not None:
                    self.server_state.head_cache.remember(bytes(self._parsing), way)
        else:
            validate_head(turn, marks, parser.get_http_version(), parser.should_keep_alive(), self._url)
            if turn.head_error is None and parser.should_upgrade():
                self._check_upgrade(turn)
        if self._piece_bytes > self.server_state.safe_head_bytes or not self._head_began_in_piece:
            turn.head_error = check_head_size(self._url, self._headers, self.server_state.limits) or turn.head_error
        self._receiving, self._chunk_overhead_bytes = turn, 0
        if turn.head_error is not None:
            turn.body_complete, turn.framing_valid = True, False
            self._receiving, self._ignore_input = None, True
        if self.current is None and not self._pipelined and not self.write_paused:
            self.current = turn
            turn.start()
        else:
            self._pipelined.append(turn)
            turn.head_bytes = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            self._pipelined_bytes += turn.head_bytes

    def on_body(self, data: bytes) -> None:
        self._chunk_overhead_bytes = 0
        self._parser_calls += 1
        turn = self._receiving
        if turn is not None:
            if not turn.started:
                self._pipelined_bytes += len(data)
            turn.feed_body(data)

    def on_message_complete(self) -> None:
        self._is_first_in_piece = False
        turn = self._receiving
        if turn is not None and not self._upgrade_has_body:
            self._receiving = None
            if not turn.keep_alive:
                self._ignore_input = True  # it said that it is the last one
            turn.end_body()

    # Requests that are out of the ordinary.

    def _check_upgrade(self, exchange: Http1Exchange) -> None:
        """llhttp stops behind it: what comes next may be another protocol."""
        if not requests_websocket(exchange):
            # Some clients offer HTTP/2 with their first request. It is declined by answering, and may have a body.
            self._upgrade_has_body = exchange.has_body
        elif (fault := websocket.handshake_error(exchange.request)) is not None:
            exchange.app, exchange.framing_valid, self._ignore_input = (
                websocket.BadHandshake(exchange.app, fault),
                False,
                True,
            )
        else:
            exchange.request.upgrade = True
            self._upgrading = exchange

    def _resume_body(self) -> None:
        """Read on behind the head of a request that llhttp takes for the last one.

        A parser of its own is told of a request with the same body and without the upgrade.
        """
        assert self._receiving is not None
        framing = (
            b"transfer-encoding: chunked"
            if self._receiving.is_chunked
            else b"content-length: %d" % (self._content_length or 0)
        )
        arriving, self._receiving, self._ignore_input = self._receiving, None, True
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        self._receiving, self._ignore_input, self._upgrade_has_body = arriving, False, False

    def _fail_connection(self, status: int, reason: str) -> None:
        """What came is no request. Say so when it is its turn, and listen no more."""
        self._ignore_input, self._in_head = True, False
        turn, self._receiving = self._receiving, None
        if turn is not None:
            turn.framing_valid = False
            turn.fail_body(status, reason)
            return
        turn = Http1Exchange(self, self.server_state.app, UNREADABLE_REQUEST)
        turn.head_error, turn.body_complete, turn.framing_valid = RequestError(status, reason), True, False
        self._pipelined.append(turn)
        self._start_pipelined()

    # Turns.

    def next_request(self, exchange: Http1Exchange | FastRequest) -> None:
        """A request and its answer are done, and the connection goes on."""
        self.current = None
        self._idle_since_s = self._head_since_s = self.server_state.now_s
        if exchange is self._upgrading:  # and was answered otherwise: what came behind it is HTTP
            held, self._bytes_after_upgrade, self._upgrading = self._bytes_after_upgrade, b"", None
            if held:
                self._parse_within_budget(memoryview(held))
        if self._pipelined:
            self._start_pipelined()
        if not self._reading:
            self.update_reading()

    def finish_connection(self, exchange: Http1Exchange | FastRequest) -> None:
        """A request and its answer are done, or its answer is; there will be no other."""
        self._ignore_input = True
        self.current = self._receiving = None
        self._pipelined.clear()
        if exchange.body_complete and not exchange.keep_alive and exchange.framing_valid:
            self.close_after_write()  # the peer said so itself: nothing more comes that could cost it the answer
        else:
            self.lingering_close()

    def _start_pipelined(self) -> None:
        if self._starting_pipelined:
            return
        self._starting_pipelined = True
        try:
            while self._pipelined and self.current is None and not self.write_paused and not self.is_closing:
                turn = self.current = self._pipelined.popleft()
                self._pipelined_bytes -= turn.body_bytes + turn.head_bytes
                turn.start()
        finally:
            self._starting_pipelined = False

    def update_reading(self) -> None:
        """Read on, or not: what waits must stay within bounds."""
        if self.is_closing or not self._is_full:
            self.unpark()
            self.set_reading()
        else:
            self.set_reading(False)

    @property
    def _is_full(self) -> bool:
        limits, turn = self.server_state.limits, self.current
        return (
            len(self._pipelined) >= limits.pipelined_max
            or self._pipelined_bytes + len(self._bytes_after_upgrade) > limits.ahead_bytes_max
            or (turn is not None and turn.unread_body_bytes > limits.ahead_bytes_max)
            or (self.write_paused and bool(self._pipelined))
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._disarm_fast_path()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._start_pipelined()
        self.update_reading()

    # Becoming something else.

    def upgrade(self, answer: Upgrade) -> None:
        self._upgrade_response = answer
        if not self._feeding:  # else the bytes behind the request are not known yet
            self._switch_to_websocket(answer)

    def _switch_to_websocket(self, answer: Upgrade) -> None:
        turn = self._upgrading
        assert turn is not None
        self.current = self._upgrading = None
        self._websocket = socket = websocket.WebSocketConnection(self.server_state, answer)
        self.switch_protocol(socket)
        socket.open(turn.request, self._bytes_after_upgrade)

    # Time, and the end.

    def reject(self, status: int, reason: str) -> None:
        """Answer before anything was asked, and close."""
        self._fail_connection(status, reason)

    def check_timeouts(self, now: float) -> None:
        limits, turn = self.server_state.limits, self.current
        if self._fast_request is not None and self._fast_request.was_served:  # since the last tick
            self._fast_request.was_served, self._idle_since_s = False, now
        if turn is None:
            if self._in_head:
                if now - self._head_since_s > limits.header_timeout_s:
                    self._fail_connection(408, f"the head did not come within {limits.header_timeout_s:g} s")
            elif not self._pipelined and now - self._idle_since_s > limits.idle_timeout_s:
                self.close_after_write()
        elif not turn.body_complete and self._reading and now - self._last_received_s > limits.body_timeout_s:
            self._fail_connection(408, f"no more of the body came within {limits.body_timeout_s:g} s")
        elif turn is self._receiving and not self._reading and self._client_left_mid_body(turn):
            self.abort()

    def _client_left_mid_body(self, exchange: Http1Exchange) -> bool:
        """Whether the peer left in the middle of a body, of which nothing is read at the moment."""
        if exchange.is_chunked:
            return self.peer_closed_before(None)
        return self._content_length is not None and self.peer_closed_before(self._content_length - exchange.body_bytes)

    def _begin_close(self) -> None:
        super()._begin_close()
        self._disarm_fast_path()

    def begin_shutdown(self) -> None:
        if self._fast_request is not None:
            self._fast_request.is_armed = False
        if self.current is None and not self._pipelined and not self._in_head:
            self.close_after_write()

    def on_disconnect(self) -> None:
        turn, self.current = self.current, None
        self._pipelined.clear()
        self._ignore_input = True
        if turn is not None:
            turn.on_disconnect()
        self._receiving = None
