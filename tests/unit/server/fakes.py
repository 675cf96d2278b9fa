"""A server without sockets for tests of handlers, on a loop whose time jumps.

    ServerHarness ── App ── Service ── Engine, on a disk in memory, with a manual clock
      └── ask("GET", "/v0/…") ──► the response; a stream writes to a FakeSink, an upgrade to a FakeWebSocket

Tests do not wait in real time: when every task waits, the loop's time jumps to the next timer, so an idle minute costs
nothing, and a test that waits for an event that never comes fails at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import selectors
from base64 import urlsafe_b64decode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from io import StringIO
from typing import Any, NamedTuple, Self, TypeVar

import tidelog.engine
from tidelog.database import engine_of
from tidelog.disk.memory import MemoryDisk
from tidelog.engine import Topic
from tidelog.http.interface import AnyResponse, BodyPolicy, ClientDisconnected, Request, Response, Stream, Upgrade
from tidelog.server import lifecycle
from tidelog.server.app import App
from tidelog.server.config import LogFormat, ServerConfig
from tidelog.server.service import Service
from tidelog.testing import ManualClock

T = TypeVar("T")
TIMEOUT_S = 3_600.0  # of the loop's time: an error fails instead of hanging
_HANG_S = 30.0  # of real time, for the same reason


class _Selector(selectors.DefaultSelector):
    loop: JumpingLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or timeout == 0:
            return found
        if timeout is not None and not self.loop.working:
            self.loop.now_s += timeout
            return []
        found = super().select(_HANG_S)  # a thread is working and wakes the loop
        assert found, "no thread will wake this loop"
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop that does not wait for its timers: when idle, its time jumps to the next one."""

    def __init__(self) -> None:
        self.now_s, self.working = 0.0, 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]  # the stub's variadic types cannot be said in a subclass
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        self.working += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._worked)
        return future

    def _worked(self, _: asyncio.Future[Any]) -> None:
        self.working -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Without the time limit of Python 3.12 and newer: the time of this loop would jump to it."""
        await super().shutdown_default_executor()


class _FakePeer:
    """A peer that reads everything at once, or nothing while it is `stuck`."""

    def __init__(self) -> None:
        self.stuck = self.gone = False
        self.pending_bytes = 0
        self.most = 0  # the highest number of pending bytes
        self.held_most = 0  # by the writer
        self._changed = asyncio.Event()

    def take(self, size: int | None = None) -> None:
        """Read the pending bytes, or some of them."""
        self.pending_bytes = 0 if size is None else max(self.pending_bytes - size, 0)
        self._changed.set()

    def leave(self) -> None:
        self.gone = True
        self._changed.set()

    def _put(self, size: int) -> None:
        if self.stuck:
            self.pending_bytes += size
            self.most = max(self.most, self.pending_bytes)
        self._changed.set()

    def reserve(self, size: int) -> None:
        self.held_most = max(self.held_most, size)

    @property
    def is_under_pressure(self) -> bool:
        return False

    async def wait_ready(self) -> None:
        await self.drain()

    async def drain(self) -> None:
        await self._until(lambda: self.gone or not self.pending_bytes)
        if self.gone:
            raise ClientDisconnected

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()


class Event(NamedTuple):
    """One event of a stream of them."""

    id: dict[str, int] | None
    event: str
    data: Any


def parse_event(frame: bytes) -> Event:
    """An event from its bytes; a comment is an event without a name."""
    fields = dict(line.split(": ", 1) for line in frame.decode().rstrip("\n").split("\n"))
    if "" in fields or "retry" in fields:
        return Event(None, "", fields.get("", fields.get("retry")))
    at = json.loads(urlsafe_b64decode(fields["id"] + "=="))
    return Event(at, fields["event"], json.loads(fields["data"]))


class FakeSink(_FakePeer):
    """A sink that records every write of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self._events = 0  # counted on write: parsing all of them at every step is slow

    def write(self, data: bytes) -> None:
        if not self.gone:
            self.writes.append(data)
            self._events += data.count(b"\nevent: ")
            self._put(len(data))

    @property
    def frames(self) -> list[bytes]:
        """The written bytes as complete frames."""
        text = b"".join(self.writes)
        assert not text or text.endswith(b"\n\n")
        return [frame + b"\n\n" for frame in text.split(b"\n\n")[:-1]]

    @property
    def events(self) -> list[Event]:
        return [event for event in map(parse_event, self.frames) if event.event]

    async def until(self, count: int) -> list[Event]:
        """Wait for `count` events and return all of them."""
        await self._until(lambda: self._events >= count)
        return self.events


class FakeWebSocket(_FakePeer):
    """A WebSocket, from the peer's side."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed: tuple[int, str] | None = None
        self._inbox: list[str | bytes | None] = []

    # The server's side.

    async def receive(self) -> str | bytes | None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            while not self._inbox:
                self._changed.clear()
                await self._changed.wait()
        return self._inbox.pop(0)

    def send(self, text: bytes) -> None:
        if not self.gone and self.closed is None:
            self.sent.append(text)
            self._put(len(text))

    def close(self, code: int = 1000, reason: str = "") -> None:
        self.closed = self.closed or (code, reason)
        self._changed.set()

    # The peer's side.

    @property
    def sent_messages(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.sent]

    def receive_from_peer(self, message: Mapping[str, Any] | str | bytes) -> None:
        self._inbox.append(message if isinstance(message, str | bytes) else json.dumps(message))
        self._changed.set()

    def disconnect(self) -> None:
        self._inbox.append(None)
        self._changed.set()

    async def until(self, count: int) -> list[dict[str, Any]]:
        """Wait for `count` messages and return all of them."""
        await self._until(lambda: len(self.sent) >= count)
        return self.sent_messages


class FakeExchange:
    """An exchange: one request and its response."""

    def __init__(self) -> None:
        self.is_disconnected = self.answered = False
        self.kept = 0  # bytes of the body
        self._answer: AnyResponse | None = None
        self._done = asyncio.Event()
        self._calls: list[Callable[[], None]] = []

    def respond(self, answer: AnyResponse) -> None:
        assert not self.answered, "answered twice"
        self.answered = True
        self._answer = None if self.is_disconnected else answer
        self._done.set()

    def add_disconnect_callback(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def keep_body(self, size: int) -> None:
        self.kept = size

    def leave(self) -> None:
        """Disconnect the client before it has a response."""
        self.is_disconnected = True
        for call in self._calls:
            call()

    async def answer(self) -> AnyResponse:
        """Return the response without keeping it, as the HTTP layer does."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._done.wait()
        answer, self._answer = self._answer, None
        assert answer is not None, "taken before, or its peer had left"
        return answer


class RunningStream:
    """A running stream or socket. It is cancelled at exit, as when the client disconnects: after its first step at the
    earliest, which the HTTP layer promises."""

    def __init__(self, running: Awaitable[None]) -> None:
        self.task = asyncio.ensure_future(running)

    async def ended(self) -> None:
        """Wait until it ends by itself."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)
        self.task.cancel()
        await asyncio.wait([self.task])


class LoopClock(ManualClock):
    """A clock that follows the time of the loop."""

    loop: JumpingLoop | None = None

    def now_us(self) -> int:
        return super().now_us() + self._passed()

    def monotonic_us(self) -> int:
        return super().monotonic_us() + self._passed()

    def monotonic_ms(self) -> int:
        return self.monotonic_us() // 1_000

    def _passed(self) -> int:
        return 0 if self.loop is None else round(self.loop.now_s * 1_000_000)


class ServerHarness:
    """A server over an engine without threads, called as the HTTP layer would."""

    def __init__(self, database: tidelog.Database, clock: ManualClock, config: ServerConfig) -> None:
        self.engine, self.clock = engine_of(database), clock
        self.service = Service(config, clock, asyncio.get_running_loop())
        self.service.on_recovered(database)
        self.app = App(self.service)

    def topic(self, name: str, **config: Any) -> Topic:
        return self.engine.topic(name, **config)

    def begin(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        upgrade: bool = False,
        asked: FakeExchange | None = None,
    ) -> FakeExchange:
        """Send a request; the exchange has its response."""
        path, _, query = target.partition("?")
        sent = {"content-type": "application/json"} if body is not None else {}
        if key is not None:
            sent["authorization"] = f"Bearer {key}"
        sent |= dict(headers or {})
        request = Request(
            method, path, query, [(name.encode(), value.encode()) for name, value in sent.items()], upgrade=upgrade
        )
        asked = asked or FakeExchange()
        wanted = self.app.begin(request)
        if isinstance(wanted, BodyPolicy):
            request.body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            self.app.handle(request, asked)
        else:
            asked.respond(wanted)
        return asked

    async def ask(self, method: str, target: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """Return the status and the body of a response that is no stream."""
        answer = await self.begin(method, target, body, **more).answer()
        assert isinstance(answer, Response), f"{answer} is no complete response"
        return answer.status, json.loads(answer.body) if answer.body else None

    async def watch(self, topics: Mapping[str, Any], *, key: str | None = None, **options: Any) -> str:
        """Create a watch session and return its wid."""
        status, body = await self.ask("POST", "/v0/watch", {"topics": topics, **options}, key=key)
        assert status == 200, body
        wid: str = body["wid"]
        return wid

    async def stream(self, wid: str, tap: FakeSink, **more: Any) -> RunningStream:
        answer = await self.begin("GET", f"/v0/watch/{wid}", **more).answer()
        assert isinstance(answer, Stream), answer
        return RunningStream(answer.run(tap))

    async def connect(self, line: FakeWebSocket, **more: Any) -> RunningStream:
        answer = await self.begin("GET", "/v0/ws", upgrade=True, **more).answer()
        assert isinstance(answer, Upgrade), answer
        return RunningStream(answer.run(line))

    def is_quiet(self) -> bool:
        """Whether no slot, request or waiter is held."""
        service = self.service
        return not (
            service.auth.stream_limit.count
            or service.auth.inflight_limit.count
            or len(service.push.notifiers)
            or len(service.push.claim_queues)
        )


def run_scenario(
    scenario: Callable[[ServerHarness], Awaitable[None]],
    *,
    clock: ManualClock | None = None,
    disk: MemoryDisk | None = None,
    **settings: Any,
) -> None:
    """Run a scenario on a server of its own with these settings, on the disk of an earlier one if it is given. Nothing
    may be held at its end."""
    clock = clock or ManualClock()
    config = ServerConfig(**{"commit": "loop", **settings})
    # A disk in memory keeps reserved space as zeros: the default file of 64 MiB would cost a second each.
    limits: dict[str, Any] = {"wal_shards": 1, "wal_file_bytes": 1 << 16, "topics_max": config.max_topics}
    with tidelog.open("data", disk=disk or MemoryDisk(clock), clock=clock, threads=False, **limits) as database:

        async def act() -> None:
            loop = asyncio.get_running_loop()
            if isinstance(clock, LoopClock) and isinstance(loop, JumpingLoop):
                clock.loop = loop
            world = ServerHarness(database, clock, config)
            try:
                await scenario(world)
                await asyncio.sleep(0)
                assert world.is_quiet(), "a slot, a request or a notifier is still held"
            finally:
                world.service.close()

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(act())


@contextmanager
def captured_log(how: LogFormat = "json") -> Iterator[StringIO]:
    """Capture the log of the server."""
    logger = logging.getLogger("tidelog")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    text = StringIO()
    lifecycle.configure_logging(how, text)
    try:
        yield text
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def parse_log(text: StringIO) -> list[dict[str, Any]]:
    """Return the lines of a JSON log without their time."""
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    return [{name: value for name, value in line.items() if name != "ts_ms"} for line in lines]


async def let_idle(seconds: float = 1.0) -> None:
    """Let pending work finish, and then some time of the loop pass."""
    await asyncio.sleep(seconds)
