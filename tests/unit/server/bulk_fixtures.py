"""Fixtures of the bulk endpoints beside `fakes`: bodies in pieces, streams read to their end, an engine with threads
in a real directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.unit.server.fakes import FakeExchange, FakeSink, JumpingLoop, ServerHarness

import tidelog.engine
from tidelog.disk.interface import Disk
from tidelog.disk.memory import MemoryDisk
from tidelog.http.interface import BodyPolicy, Request, Response, Stream
from tidelog.http.limits import Limits
from tidelog.http.listener import listen
from tidelog.server.config import ServerConfig
from tidelog.testing import ManualClock

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
TIMEOUT_S = 60  # only so that a mistake fails and does not hang


class ReceivedResponse(NamedTuple):
    """An answer, whole."""

    status: int
    body: bytes
    headers: dict[str, str]
    content_type: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        assert self.body.endswith(b"\n")
        return [json.loads(line) for line in self.body.split(b"\n")[:-1]]


async def get(
    world: ServerHarness, target: str, tap: FakeSink | None = None, *, method: str = "GET", **headers: str
) -> ReceivedResponse:
    """An answer as a client gets it, a stream to its end."""
    answer = await world.begin(method, target, headers={k.replace("_", "-"): v for k, v in headers.items()}).answer()
    body = b""
    if isinstance(answer, Stream):
        tap = tap or FakeSink()
        await answer.run(tap)
        body = b"".join(tap.writes)
    else:
        assert isinstance(answer, Response), answer
        body = answer.body
    shown = {name.decode(): value.decode() for name, value in answer.headers}
    return ReceivedResponse(answer.status, body, shown, answer.content_type.decode())


async def _iterate(pieces: Iterable[bytes] | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(pieces, AsyncIterator):
        async for piece in pieces:
            yield piece
        return
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


def send(
    world: ServerHarness,
    target: str,
    pieces: Iterable[bytes] | AsyncIterator[bytes],
    kind: str = NDJSON,
    *,
    idempotency_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> FakeExchange:
    """POST a body that comes in pieces."""
    path, _, query = target.partition("?")
    sent = {"content-type": kind, **(headers or {})}
    if idempotency_key is not None:
        sent["idempotency-key"] = idempotency_key
    request = Request("POST", path, query, [(name.encode(), value.encode()) for name, value in sent.items()])
    asked = FakeExchange()
    wanted = world.app.begin(request)
    if not isinstance(wanted, BodyPolicy):
        asked.respond(wanted)
        return asked
    assert wanted.is_streamed, "this kind of body is to come in pieces"
    request.body_stream = _iterate(pieces)
    world.app.handle(request, asked)
    return asked


async def post(
    world: ServerHarness, target: str, pieces: Iterable[bytes] | AsyncIterator[bytes], kind: str = NDJSON, **more: Any
) -> tuple[int, Any]:
    answer = await send(world, target, pieces, kind, **more).answer()
    assert isinstance(answer, Response), answer
    return answer.status, json.loads(answer.body)


class Client(NamedTuple):
    """A connection to a world that listens, of HTTP/1.1."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> ReceivedResponse:
        first, *heads = (await self.reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in heads)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return ReceivedResponse(int(first.split()[1]), body, headers, headers["content-type"])


@asynccontextmanager
async def listening(world: ServerHarness, **limits: Any) -> AsyncIterator[Client]:
    """Have a world listen, in `act`, and connect to it."""
    listener = await listen(world.app, "127.0.0.1", 0, Limits(**limits), now_us=world.clock.now_us)
    client = Client(*await asyncio.open_connection(*listener.address))
    try:
        yield client
    finally:
        client.writer.close()
        await client.writer.wait_closed()
        await listener.close()


def run_with_engine(
    scenario: Callable[[ServerHarness], Awaitable[None]],
    path: Path,
    *,
    clock: ManualClock | None = None,
    server: Mapping[str, Any] | None = None,
    **limits: Any,
) -> None:
    """Run a scenario against an engine with threads in a real directory."""
    clock = clock or ManualClock()
    config = ServerConfig(**(server or {}))
    settings: dict[str, Any] = {"wal_shards": 1, "wal_file_bytes": 1 << 20, "sync_interval_ms": 60_000, **limits}
    with tidelog.open(str(path), clock=clock, **settings) as engine:

        async def run() -> None:
            world = ServerHarness(engine, clock, config)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await scenario(world)
            finally:
                world.service.writes.close()
                world.service.close()

        asyncio.run(run())


def run_scenario_with(
    scenario: Callable[[ServerHarness], Awaitable[None]],
    server: Mapping[str, Any] | None = None,
    disk: Disk | None = None,
    **limits: Any,
) -> None:
    """`play` with these limits of the engine, on this disk."""
    clock = ManualClock()
    settings: dict[str, Any] = {"wal_shards": 1, "wal_file_bytes": 1 << 16, **limits}
    disk = disk or MemoryDisk(clock)
    with tidelog.open("data", disk=disk, clock=clock, threads=False, **settings) as engine:

        async def run() -> None:
            world = ServerHarness(engine, clock, ServerConfig(**{"commit": "loop", **(server or {})}))
            try:
                await scenario(world)
                await asyncio.sleep(0)
                assert world.is_quiet(), "a slot, a request or a notifier is still held"
            finally:
                world.service.close()

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(run())
