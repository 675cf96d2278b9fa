"""[shell] An HTTP/1.1 connection: requests in, answers out, one at a time and in order.

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
from typing import Final

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
)

from tidelog.server.http import heads, ws
from tidelog.server.http.connection import Connection
from tidelog.server.http.exchange import Fault
from tidelog.server.http.heads import CODED, CODING, HOST, LENGTH, MARKS, ONCE, PLAIN
from tidelog.server.http.house import House
from tidelog.server.http.known import Memo
from tidelog.server.http.passing import Pass, PlainPass, Ticketed
from tidelog.server.http.seam import EXPRESS_BYTES_MAX, UNREAD, Request, Upgrade
from tidelog.server.http.turn import Turn
from tidelog.server.http.turns import FREE_UNITS, REQUEST_UNITS

_SLICE_BYTES: Final = 2 << 10
_CHUNKS_BYTES: Final = 16 << 10  # of a chunked body: 2,700 chunks of one byte
CALLS_PER_UNIT: Final = 16
"""Callbacks for one header, or one chunk of a body, that cost about as much as one frame."""
_METHODS: Final = {name.encode(): name for name in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")}


class H1(Connection):
    def __init__(self, house: House) -> None:
        super().__init__(house)
        self._parser = HttpRequestParser(self)
        self._raw: memoryview | bytes = b""  # the piece that is being parsed
        self._piece = 0  # how long it is
        self._alone = False  # no request began in it yet
        self._idle_since = house.now

        # The head that is being parsed.
        self._in_head = False
        self._head_since = house.now
        self._head_piece = False  # it began in this piece
        self._head_bytes = 0  # of it, in pieces before this one
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._marks = 0
        self._length: int | None = None

        # The requests.
        self.turn: Turn | Ticketed | None = None  # whose answer is the next on the wire
        self._pass = (Pass if house.kernel else PlainPass)(self, house.buffer, super().buffer_updated)
        self.get_buffer, self.buffer_updated = self._pass.get_buffer, self._pass.buffer_updated  # type: ignore[method-assign]
        self._memo: Memo | None = None  # of the request that came last, where its head was known
        self._waiting: deque[Turn] = deque()
        self._arriving: Turn | None = None  # whose body is being parsed
        self._ahead = 0  # bytes of those that wait
        self._advancing = False
        self._deaf = False  # what else comes is not listened to
        self._bodyless_bytes = 0  # since the last byte of a body: chunk extensions and trailers

        # A request that may turn the connection into something else.
        self._feeding = False
        self._detour = False  # llhttp takes it for the last request; it has a body all the same
        self._upgraded: Turn | None = None  # bytes behind it are not HTTP, if its answer says so
        self._held = b""  # those bytes
        self._answer: Upgrade | None = None
        self._socket: ws.WebSocket | None = None  # what it became
        self._calls = 0  # of the parser's callbacks in this turn, each worth as much as it costs

    # Bytes.

    def received(self, data: memoryview) -> None:
        if self._deaf:
            return
        if self._upgraded is None:
            if len(data) <= EXPRESS_BYTES_MAX and self._pass_by(data):
                return  # nothing waits
            if len(data) > _SLICE_BYTES:
                self._take_slices(data)
                return
            self._take(data)
        else:
            self._held += data
        if self.turn is not None or self._waiting:
            self.govern()

    def resume(self, rest: bytes) -> None:
        if self._is_full:
            self.park(rest)
        else:
            self._take_slices(memoryview(rest))

    def _take_slices(self, data: memoryview) -> None:
        """Handle as much as the budget of this turn allows, and as requests may wait.

        llhttp cannot be stopped in the middle of a piece, so it gets small ones: a slice of heads holds 80 requests at
        most. The body of a request whose length is known is one slice, which costs little more than its bytes."""
        ring = self.house.ring
        at, size, left = 0, len(data), ring.left
        while at < size and not self._deaf:
            if self._upgraded is not None:
                self._held += data[at:]
                break
            turn, step = self._arriving, _SLICE_BYTES
            if turn is not None:
                step = max(_CHUNKS_BYTES if turn.chunked else (turn.request.length or 0) - turn.received, step)
            if (left <= FREE_UNITS and (turn is None or turn.chunked)) or (at and self._is_full):
                self.defer(bytes(data[at:]))
                return
            self._calls = 0
            self._take(data[at : at + step])
            at += step
            left -= self._calls // CALLS_PER_UNIT
            ring.spend(self._calls // CALLS_PER_UNIT)
            if self._socket is not None:
                self._socket.received(data[at:])
                return
        self.govern()

    def _pass_by(self, data: memoryview) -> bool:
        """Whether this was a request whose head is known, and is on its way."""
        house, memo = self.house, self._memo
        busy = self.turn is not None or self._in_head or self._arriving is not None or self._waiting or self.blocked
        if busy or house.draining or not house.known:
            return False
        piece = bytes(data)
        if memo is None or (body := memo.body(piece)) is None:
            found = house.known.find(piece)
            if found is None:
                return False
            memo, body = found
            self._memo = memo
        if memo.lobby is not None:
            self._pass.enter(memo.before, memo.after, memo.lobby, self.transport, body)
            return True
        assert memo.take is not None, "one way or the other"
        self.turn = self._pass
        if not memo.take(body, self._pass):
            self.turn = None
            return False
        return True

    def again(self, body: bytes) -> None:
        """The request with this body was not taken together with the others: it comes as any other."""
        self.turn, memo = None, self._memo
        assert memo is not None, "it was known"
        self._take(b"%b%d%b%b" % (memo.before, len(body), memo.after, body))
        self.govern()

    def _take(self, data: memoryview | bytes) -> None:
        self._raw, self._alone = data, True
        self._piece = len(data)
        self._bodyless_bytes += self._piece
        self._feed(data)
        self._raw = b""
        if self._in_head:
            self._check_head()
        elif self._arriving is not None and self._bodyless_bytes > self.house.limits.header_bytes_max:
            self._break(431, "the chunks of the body say more about themselves than there is in them")

    def _feed(self, data: memoryview | bytes) -> None:
        while data:
            self._feeding = True
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as stop:
                data = data[stop.args[0] :]
            except HttpParserCallbackError as error:
                self.house.report("a callback of the HTTP/1.1 parser failed", error.__context__ or error)
                self._break(500, "the server made a mistake")
                return
            except HttpParserError as error:
                if not self._deaf:
                    self._break(400, f"this is not HTTP/1.1: {error}")
                return
            finally:
                self._feeding = False
            if self._deaf:
                return
            if self._detour:
                self._resume_body()
            elif self._upgraded is not None:
                self._held += data
                if self._answer is not None:
                    self._become(self._answer)
                return

    def _check_head(self) -> None:
        limits = self.house.limits
        if self._head_piece:
            self._head_piece = False
        else:
            self._head_bytes += self._piece
        if len(self._url) > limits.target_bytes_max:
            self._break(414, f"the target is longer than {limits.target_bytes_max} bytes")
        elif self._head_bytes > limits.header_bytes_max:
            self._break(431, f"the head is longer than {limits.header_bytes_max} bytes")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._in_head = self._head_piece = True
        self._head_since = self.house.now
        self._head_bytes = self._marks = 0
        self._url, self._headers, self._length = b"", [], None

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._calls += 1
        if not self._in_head:
            return  # a trailer: nobody asked for it, and it must not pass for a header
        name = name.lower()
        value = value.rstrip(b" \t")
        self._headers.append((name, value))
        mark = MARKS.get(name)
        if mark is not None:
            if mark == LENGTH:
                self._length = int(value)
            elif mark & ONCE:
                mark = heads.mark(mark, value, self._marks)
            self._marks |= mark

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._calls += REQUEST_UNITS * CALLS_PER_UNIT
        if self._deaf:
            return
        marks, parser = self._marks, self._parser
        method = parser.get_method()
        path, _, query = self._url.decode("ascii").partition("?")
        length = 0 if self._length is None and not marks & CODING else self._length
        request = Request(
            _METHODS.get(method) or method.decode(), path, query, self._headers, self.peer, b"", None, length
        )
        turn = Turn(self, self.house.coded if marks & CODED else self.house.app, request)
        if not (marks & ~PLAIN or not marks & HOST or path[:1] != "/" or not parser.should_keep_alive()):
            if self._alone and self._head_piece and length and self._piece <= self.house.head_bytes_sure:
                way = turn.app.express(turn.request, EXPRESS_BYTES_MAX)
                if way is not None:
                    self.house.known.learn(bytes(self._raw), way)
        else:
            heads.look(turn, marks, parser.get_http_version(), parser.should_keep_alive(), self._url)
            if turn.fault is None and parser.should_upgrade():
                self._look_at_upgrade(turn)
        if self._piece > self.house.head_bytes_sure or not self._head_piece:
            turn.fault = heads.measure(self._url, self._headers, self.house.limits) or turn.fault
        self._arriving, self._bodyless_bytes = turn, 0
        if turn.fault is not None:
            turn.complete, turn.sound = True, False
            self._arriving, self._deaf = None, True
        if self.turn is None and not self._waiting and not self.blocked:
            self.turn = turn
            turn.start()
        else:
            self._waiting.append(turn)
            turn.cost = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            self._ahead += turn.cost

    def on_body(self, data: bytes) -> None:
        self._bodyless_bytes = 0
        self._calls += 1
        turn = self._arriving
        if turn is not None:
            if not turn.started:
                self._ahead += len(data)
            turn.feed(data)

    def on_message_complete(self) -> None:
        self._alone = False
        turn = self._arriving
        if turn is not None and not self._detour:
            self._arriving = None
            if not turn.keep:
                self._deaf = True  # it said that it is the last one
            turn.end()

    # Requests that are out of the ordinary.

    def _look_at_upgrade(self, turn: Turn) -> None:
        """llhttp stops behind it: what comes next may be another protocol."""
        if not heads.wants_websocket(turn):
            # Some clients offer HTTP/2 with their first request. It is declined by answering, and may have a body.
            self._detour = turn.has_body
        elif (fault := ws.fault(turn.request)) is not None:
            turn.app, turn.sound, self._deaf = ws.Unshaken(turn.app, fault), False, True
        else:
            turn.request.upgrade = True
            self._upgraded = turn

    def _resume_body(self) -> None:
        """Read on behind the head of a request that llhttp takes for the last one.

        A parser of its own is told of a request with the same body and without the upgrade.
        """
        assert self._arriving is not None
        framing = (
            b"transfer-encoding: chunked" if self._arriving.chunked else b"content-length: %d" % (self._length or 0)
        )
        arriving, self._arriving, self._deaf = self._arriving, None, True
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        self._arriving, self._deaf, self._detour = arriving, False, False

    def _break(self, status: int, reason: str) -> None:
        """What came is no request. Say so when it is its turn, and listen no more."""
        self._deaf, self._in_head = True, False
        turn, self._arriving = self._arriving, None
        if turn is not None:
            turn.sound = False
            turn.broken(status, reason)
            return
        turn = Turn(self, self.house.app, UNREAD)
        turn.fault, turn.complete, turn.sound = Fault(status, reason), True, False
        self._waiting.append(turn)
        self._advance()

    # Turns.

    def next(self, turn: Turn | Ticketed) -> None:
        """A request and its answer are done, and the connection goes on."""
        self.turn = None
        self._idle_since = self._head_since = self.house.now
        if turn is self._upgraded:  # and was answered otherwise: what came behind it is HTTP
            held, self._held, self._upgraded = self._held, b"", None
            if held:
                self._take_slices(memoryview(held))
        if self._waiting:
            self._advance()
        if not self._reading:
            self.govern()

    def last(self, turn: Turn | Ticketed) -> None:
        """A request and its answer are done, or its answer is; there will be no other."""
        self._deaf = True
        self.turn = self._arriving = None
        self._waiting.clear()
        if turn.complete and not turn.keep and turn.sound:
            self.finish()  # the peer said so itself: nothing more comes that could cost it the answer
        else:
            self.linger()

    def _advance(self) -> None:
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._waiting and self.turn is None and not self.blocked and not self.ending:
                turn = self.turn = self._waiting.popleft()
                self._ahead -= turn.received + turn.cost
                turn.start()
        finally:
            self._advancing = False

    def govern(self) -> None:
        """Read on, or not: what waits must stay within bounds."""
        if self.ending or not self._is_full:
            self.unpark()
            self.read_on()
        else:
            self.read_on(False)

    @property
    def _is_full(self) -> bool:
        limits, turn = self.house.limits, self.turn
        return (
            len(self._waiting) >= limits.pipelined_max
            or self._ahead + len(self._held) > limits.ahead_bytes_max
            or (turn is not None and turn.held_bytes > limits.ahead_bytes_max)
            or (self.blocked and bool(self._waiting))
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pass.armed = self._pass.clean = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self._advance()
        self.govern()

    # Becoming something else.

    def upgrade(self, answer: Upgrade) -> None:
        self._answer = answer
        if not self._feeding:  # else the bytes behind the request are not known yet
            self._become(answer)

    def _become(self, answer: Upgrade) -> None:
        turn = self._upgraded
        assert turn is not None
        self.turn = self._upgraded = None
        self._socket = socket = ws.WebSocket(self.house, answer)
        self.become(socket)
        socket.open(turn.request, self._held)

    # Time, and the end.

    def refuse(self, status: int, reason: str) -> None:
        """Answer before anything was asked, and close."""
        self._break(status, reason)

    def watch(self, now: float) -> None:
        limits, turn = self.house.limits, self.turn
        if self._pass.passed:  # since the last look
            self._pass.passed, self._idle_since = False, now
        if turn is None:
            if self._in_head:
                if now - self._head_since > limits.header_timeout_s:
                    self._break(408, f"the head did not come within {limits.header_timeout_s:g} s")
            elif not self._waiting and now - self._idle_since > limits.idle_timeout_s:
                self.finish()
        elif not turn.complete and self._reading and now - self._heard > limits.body_timeout_s:
            self._break(408, f"no more of the body came within {limits.body_timeout_s:g} s")
        elif turn is self._arriving and not self._reading and self._breaks_off(turn):
            self.abort()

    def _breaks_off(self, turn: Turn) -> bool:
        """Whether the peer left in the middle of a body, of which nothing is read at the moment."""
        if turn.chunked:
            return self.breaks_off(None)
        return self._length is not None and self.breaks_off(self._length - turn.received)

    def _begin_to_end(self) -> None:
        super()._begin_to_end()
        self._pass.armed = self._pass.clean = False

    def wind_down(self) -> None:
        self._pass.armed = False
        if self.turn is None and not self._waiting and not self._in_head:
            self.finish()

    def left(self) -> None:
        turn, self.turn = self.turn, None
        self._waiting.clear()
        self._deaf = True
        if turn is not None:
            turn.leave()
        self._arriving = None
