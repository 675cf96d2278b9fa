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

from tidelog.server.http import reply
from tidelog.server.http.bodies import Kept
from tidelog.server.http.connection import FLOOD_BYTES_MAX, Connection
from tidelog.server.http.exchange import Fault
from tidelog.server.http.house import House
from tidelog.server.http.seam import Application, Exchange, Gone, Request, Response, Upgrade
from tidelog.server.http.turns import REQUEST_UNITS, Allowance

_VERSION: Final = b"13"
_KEY_BYTES: Final = 16
_JOINED_BYTES_MAX: Final = 16 << 10  # below this a copy costs less than a second piece
_FRAGMENT_BYTES_MIN: Final = 1 << 10  # of a piece of a message: a smaller one counts as a control frame


def _head(size: int) -> bytes:
    """Of a text message in one frame, not masked (RFC 6455, 5.2)."""
    if size < 126:
        return bytes((0x81, size))
    return b"\x81\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x81\x7f" + size.to_bytes(8, "big")


def fault(request: Request) -> Fault | None:
    """What is wrong with a request to become a WebSocket."""
    if request.method != "GET" or request.length != 0:
        return Fault(400, "a WebSocket begins with a GET that has no body")
    if request.header(b"sec-websocket-version") != _VERSION:
        offer = ((b"sec-websocket-version", _VERSION), (b"upgrade", b"websocket"))
        return Fault(426, "the version of WebSocket that is spoken here is 13", offer)
    try:
        key = b64decode(request.header(b"sec-websocket-key") or b"", validate=True)
    except ValueError:
        key = b""
    return None if len(key) == _KEY_BYTES else Fault(400, "Sec-WebSocket-Key is not 16 bytes in base64")


class Unshaken:
    """The application for a request with such a fault: it is told to whoever may come in, and others are refused."""

    def __init__(self, app: Application, fault: Fault) -> None:
        self._app, self._fault = app, fault

    def begin(self, request: Request) -> Response:
        wanted = self._app.begin(request)
        if isinstance(wanted, Response):
            return wanted
        self._app.abandoned(request)
        status, reason, headers = self._fault
        response = self._app.malformed(request, status, reason)
        response.headers = (*response.headers, *headers)
        return response

    def handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002 - whatever it is
        raise AssertionError("nothing gets past `begin`")

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        return self._app.malformed(request, status, reason)

    def express(self, request: Request, answer_bytes_max: int) -> None:
        """A GET has no shorter way."""

    def abandoned(self, request: Request) -> None:
        """Nothing was kept."""


class WebSocket(Connection):
    def __init__(self, house: House, upgrade: Upgrade) -> None:
        super().__init__(house)
        self._upgrade = upgrade
        self._frames = Protocol(Side.SERVER, state=State.OPEN, max_size=upgrade.message_bytes_max)
        self._inbox: deque[str | bytes] = deque()
        self._inbox_bytes = 0
        self._parts: list[bytes] = []  # of a message whose end has not come
        self._text = False  # and whether it is text
        self._shut = False  # no more messages come
        self._closed_since: float | None = None  # when we said that we close
        self._reader: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._wrote = 0
        self._partial = b""  # the head of a frame, where only some of it has come
        self._payload_left = 0  # of the frame whose head was passed on last
        self._coming_bytes = self._taken_bytes = 0  # of a message that is not whole; of the one that is handled
        self._kept = Kept(self._refuse)
        self._controls = Allowance(house.limits.control_frames_max)
        self._ticked = house.now

    def open(self, request: Request, held: bytes) -> None:
        """Shake hands, and have the handler run. `held` came behind the request."""
        key = request.header(b"sec-websocket-key") or b""
        self.write(reply.switching(accept_key(key.decode()).encode()))
        self._task = self.house.spawn(self._run())
        if held:
            self._take(held)

    async def _run(self) -> None:
        code = 1011
        try:
            await self._upgrade.run(self)
            code = 1000
        except Gone:
            code = 1000
        except Exception as error:  # the rim: whatever a handler does wrong is one peer's 1011
            self.house.report("the handler of a WebSocket failed", error)
        finally:
            self._task = None
            self.close(code)

    # What comes in.

    def received(self, data: memoryview) -> None:
        self._take(self._partial + data if self._partial else bytes(data))

    def resume(self, rest: bytes) -> None:
        if self._is_full:
            self.park(rest)
        else:
            self._take(rest)

    def _take(self, data: bytes) -> None:
        """Handle as many frames as the budget of this turn allows, and as messages may wait."""
        end, whole = self._cut(data)
        self._partial = b""
        if end < 0:
            return
        self._feed(data[:end] if end < len(data) else data)
        if self._shut or self.ending:
            self._govern()
        elif whole:
            self._partial = data[end:]
            self._govern()
        else:
            self.defer(data[end:])

    def _cut(self, data: bytes) -> tuple[int, bool]:
        """Where this turn's frames end, and whether all that came was looked at. -1: the connection is over."""
        ring, limits = self.house.ring, self.house.limits
        left = most = ring.left
        messages = max(limits.messages_max - len(self._inbox), 1)
        size = len(data)
        at = min(self._payload_left, size)
        self._payload_left -= at
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
                self._controls.give(1)
            elif (is_control or length < _FRAGMENT_BYTES_MIN) and not self._controls.take():
                self._flooded()
                return -1, False
            at += head
            taken = min(length, size - at)
            at += taken
            self._payload_left = length - taken
        ring.spend(most - left)
        return at, True

    def _flooded(self) -> None:
        limit = self.house.limits.control_frames_max
        said = f"more than {limit} pings, pongs and small fragments"
        self.house.refusals.count("control_frames", self.peer, f"{self.peer} sent {said}; its WebSocket was closed")
        self._no_more()
        if self._frames.state is State.OPEN:
            self._frames.fail(1008, said)
        for data in filter(None, self._frames.data_to_send()):
            self.write(data)
        self.linger(FLOOD_BYTES_MAX)

    def _feed(self, data: bytes) -> None:
        self._coming_bytes += len(data)
        self._frames.receive_data(data)
        for event in self._frames.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
        self._count()
        self._flush()
        if self._frames.parser_exc is not None:
            self._no_more()

    def _on_frame(self, frame: Frame) -> None:
        if self._shut:
            return
        if frame.opcode is CLOSE:
            self._no_more()
        elif frame.opcode in (TEXT, BINARY, CONT):
            if frame.opcode is not CONT:
                self._text = frame.opcode is TEXT
            if frame.data:
                self._parts.append(bytes(frame.data))
            if frame.fin:
                self._on_message()

    def _on_message(self) -> None:
        message: str | bytes = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        size = len(message)
        self._parts.clear()
        if self._text:
            try:
                message = str(message, "utf-8")  # type: ignore[arg-type] # it is bytes up to here
            except UnicodeDecodeError as error:
                self._frames.fail(1007, f"{error.reason} at byte {error.start}")
                self._no_more()
                return
        self._inbox.append(message)
        self._coming_bytes = 0
        self._inbox_bytes += size
        self._wake()

    def _no_more(self) -> None:
        self._shut = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _govern(self) -> None:
        """Read on, or not. A peer that takes no pongs sends no pings either."""
        if self._shut or not self._is_full:
            self.unpark()
            self.read_on()
        else:
            self.read_on(False)

    @property
    def _is_full(self) -> bool:
        limits = self.house.limits
        return (
            self.blocked or len(self._inbox) >= limits.messages_max or self._inbox_bytes > limits.ahead_bytes_max
        ) and not self._shut

    def _count(self) -> None:
        """Count what came and is not done with among the bodies of requests."""
        size = self._coming_bytes + self._inbox_bytes + self._taken_bytes
        if not self.gone and not self.ending and (self._kept.bytes or size > self.house.limits.ahead_bytes_max):
            self.house.bodies.set(self._kept, size)

    def _refuse(self) -> None:
        limit = self.house.bodies.bytes_max
        said = f"request bodies of {limit} bytes are kept already"
        self.house.refusals.count("body_bytes", self.peer, f"{said}; a WebSocket was closed in the middle of a message")
        self.house.bodies.end(self._kept)
        self.close(1013, said)
        self.linger(FLOOD_BYTES_MAX)

    async def receive(self) -> str | bytes | None:
        if self._taken_bytes:
            self._taken_bytes = 0
            self._count()
        while not self._inbox:
            if self._shut:
                return None
            self._reader = self.house.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._inbox.popleft()
        self._inbox_bytes = self._inbox_bytes - len(message) if self._inbox else 0
        self._taken_bytes = len(message)
        self._govern()
        return message

    # What goes out.

    @property
    def waiting(self) -> int:
        return self.unsent

    def send(self, text: bytes) -> None:
        if self._frames.state is State.OPEN and not self.ending:
            size = len(text)
            self._wrote += size
            if size < _JOINED_BYTES_MAX:
                self.write(_head(size) + text)
            else:
                self.write(_head(size), text)

    async def drained(self, wrote: int = 0) -> None:
        wrote, self._wrote = wrote + self._wrote, 0
        await super().drained(wrote)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._govern()

    def close(self, code: int = 1000, reason: str = "") -> None:
        if self._frames.state is State.OPEN and not self.ending:
            self._closed_since = self.house.now
            self._frames.send_close(code, reason)
            self._flush()
            self._govern()

    def _flush(self) -> None:
        for data in self._frames.data_to_send():
            if data:
                self.write(data)
            else:  # the library's sign for the end
                self.linger()

    # Time, and the end.

    def watch(self, now: float) -> None:
        self._controls.passed(now - self._ticked)
        self._ticked = now
        if self._closed_since is not None and now - self._closed_since > self.house.limits.linger_s:
            self.linger()

    def wind_down(self) -> None:
        """Nothing: its handler knows that the server goes, says so and returns."""

    def left(self) -> None:
        self.house.bodies.end(self._kept)
        self._no_more()
        if self._task is not None:
            self.house.stop(self._task)
