"""WebSockets over HTTP/1.1, and the parts that the ASGI adapter shares: `WebSocketInbox` and `run_handler`.

    client ──► frames ──► messages ──► receive()     a bounded number and size wait; then nothing more is read
    send() ──► frame ──► client                      `pending_bytes` and `drain` show whether it keeps up

    close by us            close frame ──► the client's close frame, or a time-out ──► the connection ends
    close by the client    receive() returns None, the echo is sent, `run` is cancelled if it has not returned by then
    1007 no UTF-8    1009 too long    1002 no valid frames    1011 the handler failed

The `websockets` library parses and encodes frames (it unmasks in C). Outgoing text messages are encoded here, because
one message may go to a hundred clients.
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
from tidelog.http.connection import FLOOD_BYTES_MAX, Connection, ServerState
from tidelog.http.exchange import RequestError
from tidelog.http.interface import Application, ClientDisconnected, Exchange, Request, Response, Socket, Upgrade
from tidelog.http.limits import REQUEST_UNITS, BodyReservation, RateAllowance, WaiterList

_WEBSOCKET_VERSION: Final = b"13"
_HANDSHAKE_KEY_BYTES: Final = 16
_JOIN_FRAME_BYTES_MAX: Final = 16 << 10  # below this a copy costs less than a second buffer
_FRAGMENT_BYTES_MIN: Final = 1 << 10  # smaller fragments of a message count as control frames


def _text_frame_header(size: int) -> bytes:
    """Return the header of an unmasked text message in one frame (RFC 6455, 5.2)."""
    if size < 126:
        return bytes((0x81, size))
    return b"\x81\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x81\x7f" + size.to_bytes(8, "big")


def handshake_error(request: Request) -> RequestError | None:
    """Return what is invalid about a WebSocket handshake."""
    if request.method != "GET" or request.content_length != 0:
        return RequestError(400, "a WebSocket begins with a GET that has no body")
    if request.header(b"sec-websocket-version") != _WEBSOCKET_VERSION:
        offer = ((b"sec-websocket-version", _WEBSOCKET_VERSION), (b"upgrade", b"websocket"))
        return RequestError(426, "the supported version of WebSocket is 13", offer)
    try:
        key = b64decode(request.header(b"sec-websocket-key") or b"", validate=True)
    except ValueError:
        key = b""
    return (
        None if len(key) == _HANDSHAKE_KEY_BYTES else RequestError(400, "Sec-WebSocket-Key is not 16 bytes in base64")
    )


class BadHandshake:
    """The application for a request with an invalid handshake: authorised clients get the error, others are refused."""

    def __init__(self, app: Application, error: RequestError) -> None:
        self._app, self._error = app, error

    def begin(self, request: Request) -> Response:
        decision = self._app.begin(request)
        if isinstance(decision, Response):
            return decision
        self._app.on_abandoned(request)
        status, reason, headers = self._error
        response = self._app.malformed(request, status, reason)
        response.headers = (*response.headers, *headers)
        return response

    def handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002 - never called
        raise AssertionError("`begin` answers every request")

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        return self._app.malformed(request, status, reason)

    def fast_handler(self, request: Request, answer_bytes_max: int) -> None:
        """A GET has no fast path."""

    def on_abandoned(self, request: Request) -> None:
        """Nothing to release."""


class WebSocketInbox:
    """Messages that were received and wait for the handler."""

    def __init__(self) -> None:
        self._messages: deque[tuple[str | bytes, int]] = deque()  # with their sizes
        self._waiters = WaiterList()
        self.bytes = 0
        self.taken_bytes = 0  # of the last message that `get` returned
        self.is_closed = False  # no more messages arrive

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: str | bytes, size: int) -> None:
        """Add a message of `size` bytes in UTF-8."""
        self._messages.append((message, size))
        self.bytes += size
        self._waiters.wake()

    def close(self) -> None:
        self.is_closed = True
        self._waiters.wake()

    async def get(self) -> str | bytes | None:
        """Return the next message, or None after the last one."""
        while not self._messages:
            if self.is_closed:
                return None
            await self._waiters.wait()
        message, self.taken_bytes = self._messages.popleft()
        self.bytes -= self.taken_bytes
        return message


async def run_handler(upgrade: Upgrade, socket: Socket, server_state: ServerState) -> None:
    """Run the handler of a WebSocket, then close it: with 1000, or with 1011 if the handler failed."""
    code = 1011
    try:
        await upgrade.run(socket)
        code = 1000
    except ClientDisconnected:
        code = 1000
    except Exception as error:  # an error of the handler is this client's 1011
        server_state.report_error("the handler of a WebSocket failed", error)
    finally:
        socket.close(code)


class WebSocketConnection(Connection):
    def __init__(self, server_state: ServerState, upgrade: Upgrade) -> None:
        super().__init__(server_state)
        self._upgrade = upgrade
        self._protocol = Protocol(Side.SERVER, state=State.OPEN, max_size=upgrade.message_bytes_max)
        self._inbox = WebSocketInbox()
        self._fragments: list[bytes] = []  # of an incomplete message
        self._is_text = False  # whether that message is text
        self._close_sent_s: float | None = None  # when our close frame was sent
        self._handler_task: asyncio.Task[None] | None = None
        self._written_bytes = 0
        self._partial_header = b""  # the start of a frame's header
        self._payload_bytes_left = 0  # of the frame whose header was passed on last
        self._incomplete_bytes = 0  # of an incomplete message
        self._handling_bytes = 0  # of the message that the handler works on
        self._body_reservation = BodyReservation(self._reject_over_budget)
        self._control_allowance = RateAllowance(server_state.limits.control_frames_max)
        self._ticked_s = server_state.now_s

    def open(self, request: Request, early_data: bytes) -> None:
        """Complete the handshake and start the handler. `early_data` arrived after the request."""
        key = request.header(b"sec-websocket-key") or b""
        self.write(h1_encoder.encode_switching_protocols(accept_key(key.decode()).encode()))
        self._handler_task = self.server_state.spawn(run_handler(self._upgrade, self, self.server_state))
        if early_data:
            self._process(early_data)

    # Receiving.

    def on_data(self, data: memoryview) -> None:
        self._process(self._partial_header + data if self._partial_header else bytes(data))

    def process_deferred(self, remaining: bytes) -> None:
        if self._is_full:
            self.park(remaining)
        else:
            self._process(remaining)

    def _process(self, data: bytes) -> None:
        """Handle frames within the budget of this turn and the limit of waiting messages."""
        end, is_all_scanned = self._end_of_budget(data)
        self._partial_header = b""
        if end < 0:
            return
        self._feed_protocol(data[:end] if end < len(data) else data)
        if self._inbox.is_closed or self.is_closing:
            self._update_reading()
        elif is_all_scanned:
            self._partial_header = data[end:]
            self._update_reading()
        else:
            self.defer(data[end:])

    def _end_of_budget(self, data: bytes) -> tuple[int, bool]:
        """Return where this turn's frames end and whether all input was scanned; -1 if the connection was closed."""
        scheduler, limits = self.server_state.turn_scheduler, self.server_state.limits
        units_left = units_max = scheduler.units_left
        messages_left = max(limits.messages_max - len(self._inbox), 1)
        size = len(data)
        pos = min(self._payload_bytes_left, size)
        self._payload_bytes_left -= pos
        while size - pos >= 2:
            if units_left <= 0 or not messages_left:
                scheduler.spend(units_max - units_left)
                return pos, False
            first, second = data[pos], data[pos + 1]
            length, header_bytes = second & 0x7F, 2
            if length > 125:
                header_bytes += 2 if length == 126 else 8
                if size - pos < header_bytes:
                    break
                length = int.from_bytes(data[pos + 2 : pos + header_bytes])
            if second & 0x80:
                header_bytes += 4
            if size - pos < header_bytes:
                break
            units_left -= 1
            is_control, is_last = bool(first & 0x08), bool(first & 0x80)
            if not is_control and is_last:  # the end of a message
                messages_left -= 1
                units_left -= REQUEST_UNITS - 1
                self._control_allowance.refund(1)
            elif (is_control or length < _FRAGMENT_BYTES_MIN) and not self._control_allowance.take():
                self._reject_control_flood()
                return -1, False
            pos += header_bytes
            available = min(length, size - pos)
            pos += available
            self._payload_bytes_left = length - available
        scheduler.spend(units_max - units_left)
        return pos, True

    def _reject_control_flood(self) -> None:
        limit = self.server_state.limits.control_frames_max
        reason = f"more than {limit} pings, pongs and small fragments"
        self.server_state.limit_counters.count(
            "control_frames", self.peer, f"{self.peer} sent {reason}; its WebSocket was closed"
        )
        self._inbox.close()
        if self._protocol.state is State.OPEN:
            self._protocol.fail(1008, reason)
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
            self._inbox.close()

    def _on_frame(self, frame: Frame) -> None:
        if self._inbox.is_closed:
            return
        if frame.opcode is CLOSE:
            self._inbox.close()
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
                message = str(message, "utf-8")  # type: ignore[arg-type] # bytes up to here
            except UnicodeDecodeError as error:
                self._protocol.fail(1007, f"{error.reason} at byte {error.start}")
                self._inbox.close()
                return
        self._incomplete_bytes = 0
        self._inbox.put(message, size)

    def _update_reading(self) -> None:
        """Resume or pause reading. A client that reads no pongs may send no pings either."""
        if not self._is_full:
            self.unpark()
            self.set_reading()
        else:
            self.set_reading(False)

    @property
    def _is_full(self) -> bool:
        limits = self.server_state.limits
        return not self._inbox.is_closed and (
            self.write_paused or len(self._inbox) >= limits.messages_max or self._inbox.bytes > limits.ahead_bytes_max
        )

    def _update_reservation(self) -> None:
        """Count messages in memory in the budget for request bodies."""
        size = self._incomplete_bytes + self._inbox.bytes + self._handling_bytes
        if (
            not self.disconnected
            and not self.is_closing
            and (self._body_reservation.bytes or size > self.server_state.limits.ahead_bytes_max)
        ):
            self.server_state.body_budget.update(self._body_reservation, size)

    def _reject_over_budget(self) -> None:
        limit = self.server_state.body_budget.bytes_max
        reason = f"request bodies of {limit} bytes are in memory"
        self.server_state.limit_counters.count(
            "body_bytes", self.peer, f"{reason}; a WebSocket was closed in the middle of a message"
        )
        self.server_state.body_budget.release(self._body_reservation)
        self.close(1013, reason)
        self.lingering_close(FLOOD_BYTES_MAX)

    async def receive(self) -> str | bytes | None:
        if self._handling_bytes:
            self._handling_bytes = 0
            self._update_reservation()
        message = await self._inbox.get()
        if message is not None:
            self._handling_bytes = self._inbox.taken_bytes
            self._update_reading()
        return message

    # Sending.

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
            else:  # how the library marks the end
                self.lingering_close()

    # Time-outs and closing.

    def check_timeouts(self, now: float) -> None:
        self._control_allowance.refill(now - self._ticked_s)
        self._ticked_s = now
        if self._close_sent_s is not None and now - self._close_sent_s > self.server_state.limits.linger_s:
            self.lingering_close()

    def begin_shutdown(self) -> None:
        """Nothing: the handler is notified of the shutdown, sends it to the client and returns."""

    def on_disconnect(self) -> None:
        self.server_state.body_budget.release(self._body_reservation)
        self._inbox.close()
        if self._handler_task is not None:
            self.server_state.cancel_task(self._handler_task)
