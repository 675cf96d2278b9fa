"""What the tests of the front end stand on: a small application, a listener on a loop of its own, and a raw socket.

The loop runs in a thread, so that clients may be plain blocking sockets: where bytes matter, nothing of ours and no
library is between them and the test. Whatever the loop would log as an exception fails the test, and so does a
connection that is still counted when all clients are gone.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import Queue
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

import uvloop

from tidelog.http.interface import (
    Application,
    BatchHandler,
    BodyError,
    BodyPolicy,
    ClientDisconnected,
    Exchange,
    FastHandler,
    FastResponder,
    Request,
    RequestBatch,
    RequestIds,
    Response,
    Sink,
    Socket,
    Stream,
    Upgrade,
)
from tidelog.http.limits import Limits
from tidelog.http.listener import Listener, listen

TIMEOUT_S = 20.0  # only so that a mistake fails and does not hang
NOON_US = 784_111_777_000_000  # Sun, 06 Nov 1994 08:49:37 GMT, the date of RFC 9110
LOOPS = ("asyncio", "uvloop")
Kind = Literal["asyncio", "uvloop"]

T = TypeVar("T")


@dataclass
class EventLog:
    """What happened to the application, in order; a test waits for it and never for time."""

    queue: Queue[str] = field(default_factory=Queue)
    peak: int = 0  # the most that ever waited in a stream

    def record(self, what: str) -> None:
        self.queue.put(what)

    def record_waiting(self, size: int) -> None:
        if size and not self.peak:
            self.record("waiting")
        self.peak = max(self.peak, size)

    def wait(self) -> str:
        return self.queue.get(timeout=TIMEOUT_S)


class App:
    """Answers by path. `/later` is answered when the test says so."""

    def __init__(self) -> None:
        self.seen = EventLog()
        self.limit = 1000
        self.parked: list[tuple[Request, Exchange]] = []
        self.requests: list[Request] = []
        self.expressed: list[tuple[str, int]] = []
        self.tickets: list[tuple[bytes, FastResponder]] = []
        self.batches: list[RequestBatch] = []
        self.open = 0  # requests between `begin` and the end of their handling: what `abandoned` gives back

    def begin(self, request: Request) -> Response | BodyPolicy:
        self.requests.append(request)
        if request.path == "/refuse":
            return Response(401, b"no")
        if request.path == "/bug-begin":
            raise ValueError("planted")
        self.open += 1
        return BodyPolicy(self.limit, is_streamed=request.path.startswith("/slurp"))

    def handle(self, request: Request, exchange: Exchange) -> None:
        self.open -= 1
        name = request.path.strip("/").replace("-", "_").partition("/")[0]
        act: Callable[[Request, Exchange], None] | None = getattr(self, f"on_{name}", None)
        if act is None:
            exchange.respond(Response(404, b"nothing here", b"text/plain"))
        else:
            act(request, exchange)

    def malformed(self, request: Request, status: int, reason: str) -> Response:  # noqa: ARG002
        said = b"too large" if status == 413 else f"malformed: {reason}".encode()
        return Response(status, said, b"text/plain")

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """`/express` takes bodies that do not begin with `-`; `/express/later` answers when the test says so. `/batch`
        takes those of a turn together."""
        self.expressed.append((request.path, answer_bytes_max))
        if request.path.startswith("/batch"):
            return self._together[request.path]
        if not request.path.startswith("/express"):
            return None

        def take(body: bytes, ticket: FastResponder) -> bool:
            if body.startswith(b"-"):
                return False
            if request.path.endswith("/later"):
                self.tickets.append((body, ticket))
                self.seen.record("ticket")
            elif body.startswith(b"!"):
                ticket.respond(Response(409, b"no: " + body, b"text/plain", ((b"x-why", b"because"),)))
            else:
                ticket.respond_json(b'"' + body + b'"', b"id-%d" % len(body))
            return True

        return take

    @cached_property
    def _together(self) -> dict[str, BatchHandler]:
        loop = asyncio.get_running_loop()

        def soon(call: Callable[[], None]) -> None:
            loop.call_soon(call)

        return {
            path: BatchHandler(partial(self._take, path.endswith("/later")), soon, lambda: 7)
            for path in ("/batch", "/batch/later")
        }

    def _take(self, later: bool, batch: RequestBatch) -> None:
        if b"bug" in batch.bodies:
            raise ValueError("planted")
        assert batch.received_us == [7] * len(batch)
        batch = batch.reparse_and_drop([at for at, body in enumerate(batch.bodies) if body.startswith(b"-")])
        if len(batch):
            self.batches.append(batch)
            self.seen.record("batch")
            if not later:
                self.answer_batch(batch)

    def answer_batch(self, batch: RequestBatch) -> None:
        if b"!no" in batch.bodies:
            batch.respond([Response(409, b"no: " + body, b"text/plain") for body in batch.bodies])
        else:
            batch.respond_json([b'"%b"' % body for body in batch.bodies], RequestIds(b"id-", 10))

    def on_batch(self, request: Request, exchange: Exchange) -> None:
        self.on_express(request, exchange)

    def on_express(self, request: Request, exchange: Exchange) -> None:
        exchange.respond(Response(200, b"ordinary " + request.body, b"text/plain"))

    def on_abandoned(self, request: Request) -> None:
        self.open -= 1
        self.seen.record(f"abandoned {request.path}")

    # Whole answers.

    def on_hello(self, request: Request, exchange: Exchange) -> None:
        exchange.respond(Response(200, b'{"hello":"%b"}' % request.query.encode()))

    def on_echo(self, request: Request, exchange: Exchange) -> None:
        exchange.respond(Response(200, request.body, b"application/octet-stream"))

    def on_big(self, request: Request, exchange: Exchange) -> None:
        exchange.respond(Response(200, b"x" * number(request, "n"), b"text/plain"))

    def on_closing(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        exchange.respond(Response(200, b"bye", close=True))

    def on_empty(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        exchange.respond(Response(204))

    def on_split(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        exchange.respond(Response(200, b"", headers=((b"x-quote", b"a\r\nset-cookie: b"),)))

    def on_bug_handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        raise ValueError("planted")

    def on_later(self, request: Request, exchange: Exchange) -> None:
        exchange.add_disconnect_callback(lambda: self.seen.record(f"gone {request.path}"))
        self.parked.append((request, exchange))
        self.seen.record(f"parked {request.path}")

    def answer_parked(self, body: bytes = b"at last") -> None:
        request, exchange = self.parked.pop(0)
        exchange.respond(Response(200, body + request.query.encode()))

    # Streams.

    def on_stream(self, request: Request, exchange: Exchange) -> None:
        count = number(request, "n", 3)

        async def run(sink: Sink) -> None:
            for index in range(count):
                sink.write(b"piece %d\n" % index)
                sink.write(b"")
                await sink.drain()

        exchange.respond(Stream(200, run, b"text/plain", ((b"cache-control", b"no-store"),)))

    def on_events(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        """One event, and then nothing until the peer goes."""

        async def run(sink: Sink) -> None:
            sink.write(b"data: 1\n\n")
            self.seen.record("streaming")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.seen.record("stream ended")

        exchange.respond(Stream(200, run, b"text/event-stream"))

    def on_flood(self, request: Request, exchange: Exchange) -> None:
        """As much as the peer takes, and a note of how much waited at most."""
        size = number(request, "size", 16 << 10)

        async def run(sink: Sink) -> None:
            try:
                while True:
                    sink.write(b"f" * size)
                    self.seen.record_waiting(sink.pending_bytes)
                    await sink.drain()
            except ClientDisconnected:
                self.seen.record("flood gone")
                raise
            except asyncio.CancelledError:
                self.seen.record("flood cancelled")
                raise

        exchange.respond(Stream(200, run, b"application/octet-stream"))

    def on_torn(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        async def run(sink: Sink) -> None:
            sink.write(b"half")
            raise ValueError("planted")

        exchange.respond(Stream(200, run, b"text/plain"))

    # Streamed bodies.

    def on_slurp(self, request: Request, exchange: Exchange) -> None:
        async def slurp() -> None:
            assert request.body_stream is not None
            size = 0
            try:
                async for piece in request.body_stream:
                    size += len(piece)
                    self.seen.record(f"piece {len(piece)}")
            except BodyError as error:
                self.seen.record(f"broken {error.status}")
                exchange.respond(Response(error.status, f"{size} bytes, then {error.reason}".encode()))
                return
            except ClientDisconnected:
                self.seen.record("slurp gone")
                return
            exchange.respond(Response(200, b"%d" % size))

        self.spawn(slurp())

    def on_slurp_slowly(self, request: Request, exchange: Exchange) -> None:
        """Takes a piece whenever the test says so."""
        self.parked.append((request, exchange))
        self.seen.record("slurping")

    def on_slurp_early(self, request: Request, exchange: Exchange) -> None:
        """Answers by the first piece and leaves the rest."""

        async def slurp() -> None:
            assert request.body_stream is not None
            first = await anext(aiter(request.body_stream))
            exchange.respond(Response(400, first[:10]))

        self.spawn(slurp())

    def on_slurp_duplex(self, request: Request, exchange: Exchange) -> None:
        """A stream that answers each piece of the body while the body goes on."""
        pieces = request.body_stream
        assert pieces is not None

        async def run(sink: Sink) -> None:
            async for piece in pieces:
                sink.write(b"got %d\n" % len(piece))

        exchange.respond(Stream(200, run, b"text/plain"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks = [*getattr(self, "_tasks", []), task]

    # WebSockets.

    def on_ws(self, request: Request, exchange: Exchange) -> None:
        if not request.upgrade:
            exchange.respond(Response(400, b"not a websocket"))
            return

        async def run(ws: Socket) -> None:
            self.seen.record("ws open")
            try:
                while (message := await ws.receive()) is not None:
                    if isinstance(message, bytes):
                        ws.send(b"binary %d" % len(message))
                    elif message == "close":
                        ws.close(4000, "as asked")
                    elif message == "fail":
                        raise ValueError("planted")
                    elif message == "return":
                        return
                    else:
                        ws.send(message.encode())
                self.seen.record("ws closed")
            finally:
                self.seen.record("ws over")

        exchange.respond(Upgrade(run, message_bytes_max=1 << 20))

    def on_ws_flood(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        async def run(ws: Socket) -> None:
            try:
                while True:
                    ws.send(b"f" * 16_000)
                    self.seen.record_waiting(ws.pending_bytes)
                    await ws.drain()
            finally:
                self.seen.record("flood over")

        exchange.respond(Upgrade(run, message_bytes_max=100))

    def on_ws_deaf(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        """A handler that does not listen until the test says so."""

        async def run(ws: Socket) -> None:
            self.resume = asyncio.Event()
            self.seen.record("ws open")
            await self.resume.wait()
            count = 0
            while await ws.receive() is not None:
                count += 1
            self.seen.record(f"ws got {count}")

        exchange.respond(Upgrade(run, message_bytes_max=100))


def number(request: Request, name: str, default: int = 0) -> int:
    given = parse_qs(request.query).get(name, [""])[0]
    return min(int(given), 100_000_000) if given.isdecimal() and given.isascii() else default


class ListenerHarness:
    """A listener on a loop in a thread."""

    def __init__(
        self,
        kind: str = "uvloop",
        limits: Limits | None = None,
        app: Application | None = None,
    ) -> None:
        self.app = App()
        self._application: Application = app or self.app
        self._kind, self._limits = kind, limits
        self.now_us = NOON_US
        self.problems: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop
        self.listener: Listener

    def _run(self) -> None:
        factory = uvloop.new_event_loop if self._kind == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            self.loop = runner.get_loop()
            self.loop.set_exception_handler(lambda _, context: self.problems.append(context))
            runner.run(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self.listener = await listen(self._application, "127.0.0.1", 0, self._limits, now_us=lambda: self.now_us)
        self._ready.set()
        await self._stop.wait()
        await self.listener.close()
        self.left_over = self.listener.connections

    def __enter__(self) -> ListenerHarness:
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        if kind is None:
            assert not self._thread.is_alive(), "the loop did not end"
            assert not self.problems, self.problems
            assert self.left_over == 0, "connections are still counted"

    def expected_errors(self) -> list[str]:
        """What was reported to the loop, which a test expects; the rest still fails it."""
        found = [str(context.get("exception")) for context in self.problems]
        self.problems.clear()
        return found

    def do(self, work: Awaitable[T]) -> T:
        """Await something on the loop."""

        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(TIMEOUT_S)

    def call(self, work: Callable[[], T]) -> T:
        """Call something on the loop's thread."""

        async def wrapped() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(TIMEOUT_S)

    def send_bytewise(self, connection: RawConnection, data: bytes) -> None:
        """Send a byte at a time, each after the loop has read the one before."""
        for byte in data:
            connection.send(bytes([byte]))
            self.call(lambda: None)

    def connections(self, wanted: int) -> None:
        """Return when so many connections are counted."""
        self.until(lambda: self.listener.connections == wanted)

    def until(self, true: Callable[[], bool]) -> None:
        """Return when something is true on the loop's thread. It is asked again and again."""

        async def asked() -> None:
            while not true():
                await asyncio.sleep(0.001)

        self.do(asyncio.wait_for(asked(), TIMEOUT_S))

    def connect(self, receive_bytes: int | None = None) -> RawConnection:
        sock = socket.socket()
        sock.settimeout(TIMEOUT_S)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            sock.connect(self.listener.address)
        except OSError:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return RawConnection(sock)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


class RawConnection:
    """A raw connection, and just enough HTTP/1.1 to separate responses."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def get(self, target: str, *headers: str, method: str = "GET") -> Reply:
        lines = "".join(f"{line}\r\n" for line in headers)
        self.send(f"{method} {target} HTTP/1.1\r\nHost: t\r\n{lines}\r\n".encode())
        return self.reply(head_only=method == "HEAD")

    def post(self, target: str, body: bytes, *headers: str) -> Reply:
        lines = "".join(f"{line}\r\n" for line in headers)
        self.send(f"POST {target} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body)
        return self.reply()

    def receive_more(self) -> bool:
        data = self.sock.recv(1 << 16)
        self.buffer += data
        return bool(data)

    def read_until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            assert self.receive_more(), f"the connection ended before {mark!r}: {self.buffer!r}"
        found, _, self.buffer = self.buffer.partition(mark)
        return found

    def read_exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            assert self.receive_more(), f"the connection ended {size - len(self.buffer)} bytes early"
        found, self.buffer = self.buffer[:size], self.buffer[size:]
        return found

    def head(self) -> Reply:
        first, *lines = self.read_until(b"\r\n\r\n").decode().split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines)
        assert len(headers) == len(lines), f"a header came twice: {lines}"
        return Reply(int(status), headers, b"")

    def chunk(self) -> bytes:
        size = int(self.read_until(b"\r\n"), 16)
        data = self.read_exactly(size)
        assert self.read_exactly(2) == b"\r\n"
        return data

    def reply(self, head_only: bool = False) -> Reply:
        reply = self.head()
        if head_only or reply.status in (204, 304):
            return reply
        if reply.headers.get("transfer-encoding") == "chunked":
            while chunk := self.chunk():
                reply.body += chunk
        elif "content-length" in reply.headers:
            reply.body = self.read_exactly(int(reply.headers["content-length"]))
        else:
            reply.body = self.read_rest()
        return reply

    def read_rest(self) -> bytes:
        """Everything until the connection ends in good order."""
        while self.receive_more():
            pass
        found, self.buffer = self.buffer, b""
        return found

    def ended(self) -> bool:
        """Whether the connection is over, by its end or by a reset, with nothing left to read."""
        try:
            return not self.buffer and not self.sock.recv(1 << 16)
        except ConnectionError:
            return True
