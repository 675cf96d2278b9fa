"""[shell] A WebSocket: what an HTTP/1.1 connection becomes when its handler says so.

    peer ──► frames ──► messages ──► receive()       a number and a size of them wait; then nothing more is read
    send() ──► frame ──► peer                        `waiting` and `drained` tell whether it keeps up

    close, ours      close frame ──► theirs, or a while ──► the connection ends
    close, theirs    receive() gives None, the echo goes out, `run` is cancelled if it has not returned by then
    1007 no UTF-8    1009 too long    1002 no frames at all    1011 the handler failed

Frames are the `websockets` library's: it knows the protocol's states and unmasks in C. But for one: a text message of
ours, which is a head and the text, is put together here, because the same one may go to a hundred peers.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections import deque
from typing import Final

from websockets.frames import BINARY, CLOSE, CONT, TEXT, Frame
from websockets.protocol import Protocol, Side, State
from websockets.utils import accept_key

from tidelog.http import h1_encoder
from tidelog.http.connection import FLOOD_BYTES_MAX, Connection
from tidelog.http.exchange import RequestError
from tidelog.http.interface import Application, ClientDisconnected, Exchange, Request, Response, Upgrade
from tidelog.http.limits import REQUEST_UNITS, RateAllowance
from tidelog.http.memory_budget import BodyReservation
from tidelog.http.server_state import ServerState

_WEBSOCKET_VERSION: Final = b"13"
_HANDSHAKE_KEY_BYTES: Final = 16
_JOIN_FRAME_BYTES_MAX: Final = 16 << 10  # below this a copy costs less than a second piece
_FRAGMENT_BYTES_MIN: Final = 1 << 10  # of a piece of a message: a smaller one counts as a control frame


def _text_frame_header(size: int) -> bytes:
    """Of a text message in one frame, not masked (RFC 6455, 5.2)."""
    if size < 126:
        return bytes((0x81, size))
    return b"\x81\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x81\x7f" + size.to_bytes(8, "big")


def handshake_error(request: Request) -> RequestError | None:
    """What is wrong with a request to become a WebSocket."""
    if request.method != "GET" or request.content_length != 0:
        return RequestError(400, "a WebSocket begins with a GET that has no body")
    if request.header(b"sec-websocket-version") != _WEBSOCKET_VERSION:
        offer = ((b"sec-websocket-version", _WEBSOCKET_VERSION), (b"upgrade", b"websocket"))
        return RequestError(426, "the version of WebSocket that is spoken here is 13", offer)
    try:
        key = b64decode(request.header(b"sec-websocket-key") or b"", validate=True)
    except ValueError:
        key = b""
    return (
        None if len(key) == _HANDSHAKE_KEY_BYTES else RequestError(400, "Sec-WebSocket-Key is not 16 bytes in base64")
    )


class BadHandshake:
    """The application for a request with such a fault: it is told to whoever may come in, and others are refused."""

    def __init__(self, app: Application, error: RequestError) -> None:
        self._app, self._error = app, error

    def begin(self, request: Request) -> Response:
        wanted = self._app.begin(request)
        if isinstance(wanted, Response):
            return wanted
        self._app.on_abandoned(request)
        status, reason, headers = self._error
        response = self._app.malformed(request, status, reason)
        response.headers = (*response.headers, *headers)
        return response

    def handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002 - whatever it is
        raise AssertionError("nothing gets past `begin`")

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        return self._app.malformed(request, status, reason)

    def fast_handler(self, request: Request, answer_bytes_max: int) -> None:
        """A GET has no shorter way."""

    def on_abandoned(self, request: Request) -> None:
        """Nothing was kept."""


class WebSocketConnection(Connection):
    def __init__(self, server_state: ServerState, upgrade: Upgrade) -> None:
        super().__init__(server_state)
        self._upgrade = upgrade
        self._protocol = Protocol(Side.SERVER, state=State.OPEN, max_size=upgrade.message_bytes_max)
        self._inbox: deque[str | bytes] = deque()
        self._inbox_bytes = 0
        self._fragments: list[bytes] = []  # of a message whose end has not come
        self._is_text = False  # and whether it is text
        self._receive_closed = False  # no more messages come
        self._close_sent_s: float | None = None  # when we said that we close
        self._reader: asyncio.Future[None] | None = None
        self._handler_task: asyncio.Task[None] | None = None
        self._written_bytes = 0
        self._partial_header = b""  # the head of a frame, where only some of it has come
        self._payload_bytes_left = 0  # of the frame whose head was passed on last
        self._incomplete_bytes = self._handling_bytes = 0  # of a message that is not whole; of the one that is handled
        self._body_reservation = BodyReservation(self._reject_over_budget)
        self._control_allowance = RateAllowance(server_state.limits.control_frames_max)
        self._ticked_s = server_state.now_s

    def open(self, request: Request, early_data: bytes) -> None:
        """Shake hands, and have the handler run. `held` came behind the request."""
        key = request.header(b"sec-websocket-key") or b""
        self.write(h1_encoder.encode_switching_protocols(accept_key(key.decode()).encode()))
        self._handler_task = self.server_state.spawn(self._run_handler())
        if early_data:
            self._process(early_data)

    async def _run_handler(self) -> None:
        code = 1011
        try:
            await self._upgrade.run(self)
            code = 1000
        except ClientDisconnected:
            code = 1000
        except Exception as error:  # the rim: whatever a handler does wrong is one peer's 1011
            self.server_state.report_error("the handler of a WebSocket failed", error)
        finally:
            self._handler_task = None
            self.close(code)

    # What comes in.

    def on_data(self, data: memoryview) -> None:
        self._process(self._partial_header + data if self._partial_header else bytes(data))

    def process_deferred(self, remaining: bytes) -> None:
        if self._is_full:
            self.park(remaining)
        else:
            self._process(remaining)

    def _process(self, data: bytes) -> None:
        """Handle as many frames as the budget of this turn allows, and as messages may wait."""
        end, whole = self._end_of_budget(data)
        self._partial_header = b""
        if end < 0:
            return
        self._feed_protocol(data[:end] if end < len(data) else data)
        if self._receive_closed or self.is_closing:
            self._update_reading()
        elif whole:
            self._partial_header = data[end:]
            self._update_reading()
        else:
            self.defer(data[end:])

    def _end_of_budget(self, data: bytes) -> tuple[int, bool]:
        """Where this turn's frames end, and whether all that came was looked at. -1: the connection is over."""
        ring, limits = self.server_state.turn_scheduler, self.server_state.limits
        left = most = ring.units_left
        messages = max(limits.messages_max - len(self._inbox), 1)
        size = len(data)
        at = min(self._payload_bytes_left, size)
        self._payload_bytes_left -= at
        while size - at >= 2:
            if left <= 0 or not messages:
                ring.spend(most - left)
                return at, False
            first, second = data[at], data[at + 1]
            length, head = second & 0x7F, 2
            if length > 125:
                head += 2 if length == 126 else 8
                if size - at < head:
                    break
                length = int.from_bytes(data[at + 2 : at + head])
            if second & 0x80:
                head += 4
            if size - at < head:
                break
            left -= 1
            is_control, is_last = bool(first & 0x08), bool(first & 0x80)
            if not is_control and is_last:  # a whole message
                messages -= 1
                left -= REQUEST_UNITS - 1
                self._control_allowance.refund(1)
            elif (is_control or length < _FRAGMENT_BYTES_MIN) and not self._control_allowance.take():
                self._reject_control_flood()
                return -1, False
            at += head
            taken = min(length, size - at)
            at += taken
            self._payload_bytes_left = length - taken
        ring.spend(most - left)
        return at, True

    def _reject_control_flood(self) -> None:
        limit = self.server_state.limits.control_frames_max
        said = f"more than {limit} pings, pongs and small fragments"
        self.server_state.limit_counters.count(
            "control_frames", self.peer, f"{self.peer} sent {said}; its WebSocket was closed"
        )
        self._close_receive()
        if self._protocol.state is State.OPEN:
            self._protocol.fail(1008, said)
        for data in filter(None, self._protocol.data_to_send()):
            self.write(data)
        self.lingering_close(FLOOD_BYTES_MAX)

    def _feed_protocol(self, data: bytes) -> None:
        self._incomplete_bytes += len(data)
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
        self._update_reservation()
        self._flush()
        if self._protocol.parser_exc is not None:
            self._close_receive()

    def _on_frame(self, frame: Frame) -> None:
        if self._receive_closed:
            return
        if frame.opcode is CLOSE:
            self._close_receive()
        elif frame.opcode in (TEXT, BINARY, CONT):
            if frame.opcode is not CONT:
                self._is_text = frame.opcode is TEXT
            if frame.data:
                self._fragments.append(bytes(frame.data))
            if frame.fin:
                self._on_message()

    def _on_message(self) -> None:
        message: str | bytes = self._fragments[0] if len(self._fragments) == 1 else b"".join(self._fragments)
        size = len(message)
        self._fragments.clear()
        if self._is_text:
            try:
                message = str(message, "utf-8")  # type: ignore[arg-type] # it is bytes up to here
            except UnicodeDecodeError as error:
                self._protocol.fail(1007, f"{error.reason} at byte {error.start}")
                self._close_receive()
                return
        self._inbox.append(message)
        self._incomplete_bytes = 0
        self._inbox_bytes += size
        self._wake()

    def _close_receive(self) -> None:
        self._receive_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _update_reading(self) -> None:
        """Read on, or not. A peer that takes no pongs sends no pings either."""
        if self._receive_closed or not self._is_full:
            self.unpark()
            self.set_reading()
        else:
            self.set_reading(False)

    @property
    def _is_full(self) -> bool:
        limits = self.server_state.limits
        return (
            self.write_paused or len(self._inbox) >= limits.messages_max or self._inbox_bytes > limits.ahead_bytes_max
        ) and not self._receive_closed

    def _update_reservation(self) -> None:
        """Count what came and is not done with among the bodies of requests."""
        size = self._incomplete_bytes + self._inbox_bytes + self._handling_bytes
        if (
            not self.disconnected
            and not self.is_closing
            and (self._body_reservation.bytes or size > self.server_state.limits.ahead_bytes_max)
        ):
            self.server_state.body_budget.update(self._body_reservation, size)

    def _reject_over_budget(self) -> None:
        limit = self.server_state.body_budget.bytes_max
        said = f"request bodies of {limit} bytes are kept already"
        self.server_state.limit_counters.count(
            "body_bytes", self.peer, f"{said}; a WebSocket was closed in the middle of a message"
        )
        self.server_state.body_budget.release(self._body_reservation)
        self.close(1013, said)
        self.lingering_close(FLOOD_BYTES_MAX)

    async def receive(self) -> str | bytes | None:
        if self._handling_bytes:
            self._handling_bytes = 0
            self._update_reservation()
        while not self._inbox:
            if self._receive_closed:
                return None
            self._reader = self.server_state.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._inbox.popleft()
        self._inbox_bytes = self._inbox_bytes - len(message) if self._inbox else 0
        self._handling_bytes = len(message)
        self._update_reading()
        return message

    # What goes out.

    @property
    def pending_bytes(self) -> int:
        return self.unsent_bytes

    def send(self, text: bytes) -> None:
        if self._protocol.state is State.OPEN and not self.is_closing:
            size = len(text)
            self._written_bytes += size
            if size < _JOIN_FRAME_BYTES_MAX:
                self.write(_text_frame_header(size) + text)
            else:
                self.write(_text_frame_header(size), text)

    async def drain(self, written_bytes: int = 0) -> None:
        written_bytes, self._written_bytes = written_bytes + self._written_bytes, 0
        await super().drain(written_bytes)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_reading()

    def close(self, code: int = 1000, reason: str = "") -> None:
        if self._protocol.state is State.OPEN and not self.is_closing:
            self._close_sent_s = self.server_state.now_s
            self._protocol.send_close(code, reason)
            self._flush()
            self._update_reading()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self.write(data)
            else:  # the library's sign for the end
                self.lingering_close()

    # Time, and the end.

    def check_timeouts(self, now: float) -> None:
        self._control_allowance.refill(now - self._ticked_s)
        self._ticked_s = now
        if self._close_sent_s is not None and now - self._close_sent_s > self.server_state.limits.linger_s:
            self.lingering_close()

    def begin_shutdown(self) -> None:
        """Nothing: its handler knows that the server goes, says so and returns."""

    def on_disconnect(self) -> None:
        self.server_state.body_budget.release(self._body_reservation)
        self._close_receive()
        if self._handler_task is not None:
            self.server_state.cancel_task(self._handler_task)
