"""The server inside somebody else's: what docs/http.md shows, run by uvicorn, alone and under a path.

G20, G129: what was acknowledged is there after the stop, and the directory is free.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from tests.contract_http.api import Api, expect_error, expect_success
from tests.contract_http.client import Address, dumps, loads
from tests.contract_http.sse_client import SseStream
from tests.kit.waiting import eventually
from websockets.sync.client import connect

import tidelog
from tidelog.server import ServerConfig, asgi

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
KEY: Final = "s3cret"
BEARER: Final = ("Authorization", f"Bearer {KEY}")
LIMIT_S: Final = 60

UNDER_A_PATH: Final = """
from shop import app as log


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        async with log:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["path"].startswith("/log/"):
        await log({**scope, "root_path": "/log"}, receive, send)
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"mine"})
"""


def example() -> str:
    """The application of the page."""
    page = (ROOT / "docs/http.md").read_text()
    block = re.search(r"## Inside another application\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    return block[1]


@contextmanager
def uvicorn(folder: Path, app: str = "shop:app") -> Iterator[tuple[Address, subprocess.Popen[str]]]:
    """A server that listens. It is told to stop at the end, unless it is gone by then."""
    log = folder / "log.txt"
    command = [sys.executable, "-W", "error", "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
    with log.open("w") as to:
        process = subprocess.Popen(
            [*command, "--timeout-graceful-shutdown", "2"],
            cwd=folder,
            env=environment | {"PYTHONPATH": f"{folder}{os.pathsep}{Path(tidelog.__file__).parents[1]}"},
            stdout=to,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        listening = re.compile(r"running on http://127\.0\.0\.1:(\d+)")
        said = eventually(lambda: listening.search(log.read_text()), LIMIT_S, process=process, why=log.read_text)
        assert said is not None
        yield Address("127.0.0.1", int(said[1])), process
        stop(process)
        said_last = log.read_text()
        assert "Application shutdown complete" in said_last
        # uvicorn shows where a call was that it cancelled; anything else would be ours.
        assert said_last.count("Traceback") == said_last.count("CancelledError: Task cancelled"), said_last
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) in (0, -signal.SIGTERM), "uvicorn ends by the signal that it was sent"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(example())
    (tmp_path / "around.py").write_text(UNDER_A_PATH)
    return tmp_path


def kept(folder: Path) -> list[object]:
    """What the directory holds; it is opened as soon as nobody has it."""
    with tidelog.open(str(folder / "shop")) as engine:
        return [record.data for record in engine.topic("orders").read().records]


def use(address: Address, at: str = "") -> None:
    """Write, read, follow, and write over a socket."""
    with Api(address, key=KEY) as api:
        assert (
            expect_success(api.post(f"{at}/v0/topics/orders", {"records": [{"data": 1}, {"data": 2}]}), 201)["head_seq"]
            == 2
        )
        page = expect_success(api.post(f"{at}/v0/topics/orders/diff", {"from_seq": 1}))
        assert [record["data"] for record in page["records"]] == [2]
        url = expect_success(api.post(f"{at}/v0/watch", {"topics": {"orders": {}}}))["stream_url"]
        with (
            SseStream(address, at + url, headers=[BEARER], timeout_s=LIMIT_S) as stream,
            connect(
                f"ws://{address.host}:{address.port}{at}/v0/ws",
                additional_headers=[BEARER],
                open_timeout=LIMIT_S,
                close_timeout=LIMIT_S,
            ) as socket,
        ):
            assert stream.next().seqs == [1, 2]
            assert stream.next().name == "caught-up"
            socket.send(dumps({"op": "publish", "topic": "orders", "records": [{"data": 3}], "request_id": 7}).decode())
            ack = loads(socket.recv(timeout=LIMIT_S))
            assert (ack["request_id"], ack["first_seq"]) == (7, 3), ack
            assert stream.next().seqs == [3]


def test_the_example_of_the_page_serves_and_ends_cleanly(folder: Path) -> None:
    with uvicorn(folder) as (address, _):
        use(address)
        with Api(address) as api:
            expect_error(api.get("/v0/topics"), 401, "unauthorized")
    assert kept(folder) == [1, 2, 3]


def test_it_works_under_a_path_of_another_application(folder: Path) -> None:
    """Its lifespan is run by the other one, which has requests of its own."""
    with uvicorn(folder, "around:app") as (address, _):
        with Api(address, key=KEY) as api:
            assert api.get("/else").body == b"mine"
            assert api.get("/log/v0/ready").status == 200
            expect_error(api.get("/log/v0/nothing"), 404, "not_found")
        use(address, "/log")
    assert kept(folder) == [1, 2, 3]


def test_channels_work_there_as_well(folder: Path) -> None:
    """A room over all three: requests, events and a socket; a stop tells those who listen."""
    room, bearer = "/v0/channels/%21room%40example.org", dict([BEARER])
    with uvicorn(folder) as (address, process), Api(address, key=KEY) as api:
        expect_success(api.put(room, {"persist": True}), 201)
        target = f"ws://{address.host}:{address.port}/v0/ws"
        as_bob = {**bearer, "X-Tidelog-User": "bob@example.org"}
        with (
            SseStream(address, f"{room}/events", headers=[BEARER], timeout_s=LIMIT_S) as stream,
            connect(target, additional_headers=as_bob, open_timeout=LIMIT_S, close_timeout=LIMIT_S) as socket,
        ):
            assert b"event: subscribed" in stream.frame()
            for op in ("channel_join", "channel_subscribe"):
                socket.send(dumps({"op": op, "channel": "!room@example.org"}).decode())
                assert loads(socket.recv(LIMIT_S))["op"] in ("channel_joined", "channel_subscribed")
            assert b'"kind":"joined"' in stream.frame()
            socket.send(dumps({"op": "channel_publish", "channel": "!room@example.org", "payload": "hi"}).decode())
            assert b'"payload":"hi"' in stream.frame()
            assert loads(socket.recv(LIMIT_S))["durable"] is True
            assert expect_success(api.post(f"{room}/publish", {"payload": "to all"}))["receivers"] == 2
            assert loads(socket.recv(LIMIT_S))["payload"] == "to all"
        stop(process)
    with tidelog.open(str(folder / "shop")) as engine:
        said = engine.channel("!room@example.org").history().messages
        assert [message.payload for message in said] == [b"hi", b"to all"]


def test_a_stop_with_streams_and_sockets_open_is_clean(folder: Path) -> None:
    """A client that stays does not keep the directory from being closed."""
    with uvicorn(folder) as (address, process), Api(address, key=KEY) as api:
        expect_success(api.post("/v0/topics/orders", {"records": [{"data": 1}]}), 201)
        url = expect_success(api.post("/v0/watch", {"topics": {"orders": {}}}))["stream_url"]
        with (
            SseStream(address, url, headers=[BEARER], timeout_s=LIMIT_S) as stream,
            connect(f"ws://{address.host}:{address.port}/v0/ws", additional_headers=[BEARER], open_timeout=LIMIT_S),
        ):
            assert stream.next().seqs == [1]
            stop(process)
            assert kept(folder) == [1]


def test_a_directory_that_is_in_use_keeps_the_server_from_starting(folder: Path) -> None:
    """The reason is told where the server tells it, and the directory stays with whoever has it."""
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--host", "127.0.0.1", "--port", "0"]
    with tidelog.open(str(folder / "shop")) as engine:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 3, "uvicorn's code for a failed startup"
        assert "ERROR:    shop is being written by another process" in done.stderr, done.stderr
        engine.topic("orders").append(b"mine")


def test_nothing_is_open_before_the_start_and_after_the_end(tmp_path: Path) -> None:
    """Requests outside of the lifespan are refused, and it can be started again. Method: ASGI messages by hand."""
    app = asgi(ServerConfig(data_dir=str(tmp_path / "data")))

    async def get(path: str) -> tuple[int, bytes]:
        sent: list[Any] = []

        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b""})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "root_path": ""}
        await asyncio.wait_for(app(scope, messages.get, send), LIMIT_S)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def main() -> None:
        for _ in range(2):
            status, body = await get("/v0/health")
            assert (status, loads(body)["error"]["code"]) == (503, "not_ready")
            async with app:
                assert (await get("/v0/ready"))[0] == 200
                with pytest.raises(tidelog.Error):
                    tidelog.open(str(tmp_path / "data"))
            tidelog.open(str(tmp_path / "data")).close()

    asyncio.run(main())
