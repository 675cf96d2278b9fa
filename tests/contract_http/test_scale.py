"""Many watchers of one process: each is told everything, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import pytest

from tests.contract_http.client import Address
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

WATCHERS = 1_000
SOCKETS = 200
WRITES = 20
PATIENCE_S = 90
GROWTH_BYTES = 48 << 20  # what the server may keep of 1,200 peers that are gone, mostly of its allocator

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    soft, hard = getrlimit(RLIMIT_NOFILE)
    needed = 2 * (WATCHERS + SOCKETS)
    if soft < needed:
        setrlimit(RLIMIT_NOFILE, (min(needed, hard), hard))  # for the server as well: it inherits it
    with Server(tmp_path).start() as running:
        yield running


async def watcher(address: Address, target: str, level: asyncio.Event, ready: Callable[[], None]) -> list[int]:
    """The seqs that one stream was sent, up to the last write."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        seqs: list[int] = []
        held = b""
        greeted = False
        while len(seqs) < WRITES:
            size = int(await reader.readline(), 16)
            held += (await reader.readexactly(size + 2))[:-2]
            *frames, held = held.split(b"\n\n")
            for frame in frames:
                if b"event: caught-up" in frame and not greeted:
                    greeted = True
                    ready()
                if b"event: record" in frame:
                    data = json.loads(frame.split(b"\ndata: ", 1)[1])
                    seqs += [record["$seq"] for record in data["records"]]
        await level.wait()  # everybody stays until all have everything
        return seqs
    finally:
        writer.close()


async def socket(address: Address, topic: str, level: asyncio.Event, ready: Callable[[], None]) -> list[int]:
    """The same over a WebSocket; its frames are small enough to be read by hand."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(
            b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        command = json.dumps({"op": "subscribe", "topic": topic}).encode()
        writer.write(bytes([0x81, 0x80 | len(command), 0, 0, 0, 0]) + command)
        seqs: list[int] = []
        greeted = False
        while len(seqs) < WRITES:
            first, length = await reader.readexactly(2)
            assert first == 0x81
            if length == 126:
                length = int.from_bytes(await reader.readexactly(2), "big")
            said = json.loads(await reader.readexactly(length))
            if said["op"] == "caught_up" and not greeted:
                greeted = True
                ready()
            if said["op"] == "record":
                seqs += [record["$seq"] for record in said["records"]]
        await level.wait()
        return seqs
    finally:
        writer.close()


async def follow(server: Server, targets: list[str], write: Callable[[], None], during: Callable[[], None]) -> None:
    """Everybody connects; then the records are written; then everybody leaves."""
    connected, everybody, level = 0, asyncio.Event(), asyncio.Event()

    def ready() -> None:
        nonlocal connected
        connected += 1
        if connected == len(targets) + SOCKETS:
            everybody.set()

    jobs: list[Awaitable[list[int]]] = [watcher(server.address, target, level, ready) for target in targets]
    jobs += [socket(server.address, "t", level, ready) for _ in range(SOCKETS)]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await everybody.wait()
            await asyncio.to_thread(during)
            await asyncio.to_thread(write)
            level.set()
            found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert len(found) == WATCHERS + SOCKETS
    assert all(seqs == list(range(1, WRITES + 1)) for seqs in found)


def test_1000_watchers_and_200_sockets_on_one_process(server: Server) -> None:
    """§1.12, §2.12: each is told every record once and in order; slots return to zero, and so does the memory."""
    with server.client() as api:
        api.create_topic("t")

        def write() -> None:
            for number in range(WRITES):
                api.write("t", f"record {number} " + "x" * 200)

        def during() -> None:
            assert api.metrics()["sse_connections"] == WATCHERS + SOCKETS

        def sessions() -> list[str]:
            return [api.watch({"t": {}}, include_tags=bool(number % 2))["stream_url"] for number in range(WATCHERS)]

        before = server.resident_bytes
        asyncio.run(follow(server, sessions(), write, during))
        gc.collect()
        eventually(lambda: api.metrics()["sse_connections"] == 0, 10)
        figures = api.metrics()
        assert figures["watch_sessions"] == WATCHERS, "they wait for their watchers to come back"
        assert figures["wal"]["queue_depth"] == 0
        once = server.resident_bytes
        assert once - before < GROWTH_BYTES, f"{(once - before) >> 20} MiB more than before"
        api.drop("t")
        api.create_topic("t")
        asyncio.run(follow(server, sessions(), write, during))
        eventually(lambda: api.metrics()["sse_connections"] == 0, 10)
        assert server.resident_bytes - once < GROWTH_BYTES / 4, "the second thousand finds the room of the first"
