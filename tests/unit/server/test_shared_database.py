"""An application that serves a database which the program around it uses too: one engine, opened and closed once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.errors import BadInput, Closed
from tidelog.server import AsgiApp, ServerConfig, asgi


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tidelog.Database]:
    with tidelog.open(str(tmp_path / "shop"), wal_file_bytes=1 << 16, wal_shards=1) as opened:
        yield opened


async def call(app: AsgiApp, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One request over ASGI."""
    sent: list[Any] = []
    content = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    received = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> Any:
        message = next(received, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": headers, "http_version": "1.1", "root_path": ""}, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@asynccontextmanager
async def events(app: AsgiApp, path: str) -> AsyncIterator[asyncio.Queue[bytes]]:
    """A stream of events over ASGI: its frames."""
    frames: asyncio.Queue[bytes] = asyncio.Queue()
    gone = asyncio.Event()

    received = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        message = next(received, None)
        if message is None:
            await gone.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            for frame in message.get("body", b"").split(b"\n\n"):
                if frame:
                    frames.put_nowait(frame)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "http_version": "1.1", "root_path": ""}
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        yield frames
    finally:
        gone.set()
        await asyncio.wait([task], timeout=30)


async def next_record(frames: asyncio.Queue[bytes]) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            frame = await frames.get()
            if b"event: record" in frame:
                found: dict[str, Any] = json.loads(frame.rpartition(b"data: ")[2])
                return found


def test_program_and_application_share_records(log: tidelog.Database) -> None:
    """A record of the program reaches a stream, a record of a request reaches the program."""
    app = asgi(log=log)

    async def scenario() -> None:
        async with app:
            assert app.database is log
            log.topic("orders", durability="fsync")
            async with events(app, "/v0/topics/orders/events") as frames:
                await asyncio.to_thread(log.topic("orders").append, {"from": "program"})
                assert (await next_record(frames))["records"][0]["data"] == {"from": "program"}
                status, body = await call(app, "POST", "/v0/topics/orders", {"records": [{"data": {"from": "http"}}]})
                assert (status, body["first_seq"]) == (200, 2)
                assert (await next_record(frames))["records"][0]["data"] == {"from": "http"}
            page = await asyncio.to_thread(log.topic("orders").read)
            assert [record.data["from"] for record in page.records] == ["program", "http"]

    asyncio.run(scenario())


@pytest.mark.parametrize("commit", ["beside", "loop"])
def test_database_is_open_after_the_application_has_stopped(log: tidelog.Database, commit: str) -> None:
    """It can be served again, by another loop too, and no commit waits for the loop that is gone."""
    app = asgi(ServerConfig(commit=commit), log=log)  # type: ignore[arg-type]

    async def write(data: int) -> None:
        async with app:
            status, _ = await call(app, "POST", "/v0/topics/t", {"records": [{"data": data}]})
            assert status in (200, 201)

    for number in range(3):
        asyncio.run(write(2 * number))
        log.topic("t").append(2 * number + 1)
        log.topic("t", create=False).append_nowait(100).wait()
    data = [record.data for record in log.topic("t").read().records]
    assert data == [0, 1, 100, 2, 3, 100, 4, 5, 100]


def test_program_writes_from_many_threads_beside_requests(log: tidelog.Database) -> None:
    app = asgi(log=log)
    log.topic("t", durability="fsync")

    def append(node: int) -> None:
        for number in range(20):
            log.topic("t").append({"node": node, "number": number})

    async def scenario() -> None:
        threads = [threading.Thread(target=append, args=(node,)) for node in range(4)]
        async with app:
            for thread in threads:
                thread.start()
            for number in range(20):
                status, _ = await call(
                    app, "POST", "/v0/topics/t", {"records": [{"data": {"node": 4, "number": number}}]}
                )
                assert status == 200
            for thread in threads:
                await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    rows = [(record.data["node"], record.data["number"]) for record in log.topic("t").read(limit=1000).records]
    assert sorted(rows) == [(node, number) for node in range(5) for number in range(20)]


def test_application_that_opens_its_own_directory_has_a_database_while_it_runs(tmp_path: Path) -> None:
    app = asgi(ServerConfig(data_dir=str(tmp_path / "own")))

    async def scenario() -> None:
        async with app:
            await asyncio.to_thread(lambda: app.database.topic("t").append(1))
            status, body = await call(app, "GET", "/v0/topics/t")
            assert (status, body["head_seq"]) == (200, 1)

    with pytest.raises(Closed, match="was not started"):
        _ = app.database
    asyncio.run(scenario())
    with pytest.raises(Closed, match="was not started"):
        _ = app.database


def test_database_that_cannot_be_served_is_refused(log: tidelog.Database, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="leave data_dir out"):
        asgi(ServerConfig(data_dir=str(tmp_path / "other")), log=log)
    log.topic("t").append(1)
    log.checkpoint()
    with tidelog.open(str(tmp_path / "shop"), read_only=True) as reader, pytest.raises(BadInput, match="read_only"):
        asgi(log=reader)
    with tidelog.open(str(tmp_path / "plain"), threads=False) as plain, pytest.raises(BadInput, match="threads"):
        asgi(log=plain)


def test_application_starts_once(log: tidelog.Database) -> None:
    app = asgi(log=log)

    async def scenario() -> None:
        async with app:
            with pytest.raises(BadInput, match="start it once"):
                await app.__aenter__()

    asyncio.run(scenario())
