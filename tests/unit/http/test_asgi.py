"""The application inside another ASGI server, which is a script: the events that it sends and receives."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import pytest
from tests.unit.http.harness import TIMEOUT_S, App

from tidelog.http.asgi import AsgiAdapter
from tidelog.http.interface import UNREADABLE_REQUEST
from tidelog.http.limits import Limits

Message = MutableMapping[str, Any]


class Server:
    """One call of an ASGI application."""

    def __init__(self, app: App, limits: Limits | None = None) -> None:
        self.app = app
        self.asgi = AsgiAdapter(app, limits)
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.news: asyncio.Queue[Message] = asyncio.Queue()
        self.pace: asyncio.Semaphore | None = None  # how many messages it still takes

    async def send(self, message: Message) -> None:
        if self.pace is not None:
            await self.pace.acquire()
        self.sent.append(message)
        self.news.put_nowait(message)

    def call(self, scope: Message) -> asyncio.Task[None]:
        return asyncio.create_task(self.asgi(scope, self.said.get, self.send))

    async def next(self) -> Message:
        return await asyncio.wait_for(self.news.get(), TIMEOUT_S)

    async def heard(self, what: str) -> None:
        """Wait until the application has said so."""

        async def until() -> None:
            while (said := await asyncio.to_thread(self.app.seen.wait)) != what:
                assert said.startswith("piece"), said

        await asyncio.wait_for(until(), TIMEOUT_S)

    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def http(path: str, method: str = "GET", *headers: tuple[bytes, bytes], **more: Any) -> Message:
    target, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": target, "raw_path": target.encode(), "headers": list(headers)}
    return {**scope, "query_string": query.encode(), "client": ("1.2.3.4", 5), **more}


def play(script: Callable[[Server], Coroutine[Any, Any, None]], limits: Limits | None = None) -> App:
    """Run a script; whatever the loop would log fails it."""
    app = App()
    problems: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        await asyncio.wait_for(script(Server(app, limits)), TIMEOUT_S)

    asyncio.run(main())
    assert [str(problem.get("exception")) for problem in problems] in ([], ["planted"]), problems
    return app


def request(body: bytes = b"", more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_request_and_its_answer() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request())
        await server.call(http("/hello?a=b", "GET", (b"X-One", b"two")))
        assert server.sent == [
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json"), (b"content-length", b"15")],
            },
            {"type": "http.response.body", "body": b'{"hello":"a=b"}'},
        ]

    (seen,) = play(script).requests
    assert (seen.method, seen.path, seen.query, seen.peer) == ("GET", "/hello", "a=b", "1.2.3.4:5")
    assert seen.headers == [(b"x-one", b"two")]


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        ({"path": "/a>b", "raw_path": b"/a%3Eb"}, "/a%3Eb"),
        ({"path": "/a>b/c d", "raw_path": None}, "/a%3Eb/c%20d"),
        ({"path": "/log/hello", "raw_path": b"/log/hello", "root_path": "/log"}, "/hello"),
        ({"path": "/logs/hello", "raw_path": b"/logs/hello", "root_path": "/log"}, "/logs/hello"),
    ],
)
def test_path_is_raw_and_without_the_mount_point(scope: Message, path: str) -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request())
        await server.call({**http("/"), **scope})

    assert play(script).requests[0].path == path


def test_head_and_no_content() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request())
        await server.call(http("/hello", "HEAD"))
        assert (dict(server.sent[0]["headers"])[b"content-length"], server.body()) == (b"12", b"")
        server.sent.clear()
        server.said.put_nowait(request())
        await server.call(http("/empty"))
        assert (server.sent[0]["status"], server.sent[0]["headers"]) == (204, [])

    play(script)


def test_bodies_and_their_limit() -> None:
    async def script(server: Server) -> None:
        for parts in ([b"abc", b"def"], [b"x" * 1000, b""], [b"x" * 1000, b"x", b"x" * 10], [b"x" * 2000]):
            for part in parts:
                server.said.put_nowait(request(part, more=part is not parts[-1]))
            server.sent.clear()
            await server.call(http("/echo", "POST"))
            whole = b"".join(parts)
            expected = (413, b"too large") if len(whole) > 1000 else (200, whole)
            assert (server.sent[0]["status"], server.body()) == expected
        server.sent.clear()
        await server.call(http("/echo", "POST", (b"content-length", b"1001")))
        assert server.sent[0]["status"] == 413, "by what it says, before it is read"
        server.sent.clear()
        await server.call(http("/refuse", "POST"))
        assert server.sent[0]["status"] == 401

    assert play(script).open == 0


def test_codings() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request(gzip.compress(b"x" * 900)))
        headers = ((b"content-encoding", b"gzip"), (b"accept-encoding", b"gzip, identity;q=0"))
        await server.call(http("/echo", "POST", *headers))
        assert gzip.decompress(server.body()) == b"x" * 900
        assert (b"content-encoding", b"gzip") in server.sent[0]["headers"]

    play(script)


def test_a_stream_and_its_end() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request())
        await server.call(http("/stream?n=3"))
        assert [message["body"] for message in server.sent[1:]] == [b"piece 0\n", b"piece 1\n", b"piece 2\n", b""]
        assert not server.sent[-1].get("more_body")

    play(script)


def test_a_stream_that_raises_is_cut_off() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request())
        with pytest.raises(RuntimeError, match="cut off"):
            await server.call(http("/torn"))
        assert server.sent[-1].get("more_body"), "there is no end"

    play(script)


def test_disconnect() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(request())
        call = server.call(http("/events"))
        await server.heard("streaming")
        server.said.put_nowait({"type": "http.disconnect"})
        await call
        await server.heard("stream ended")
        server.said.put_nowait(request())
        call = server.call(http("/later"))
        await server.heard("parked /later")
        server.said.put_nowait({"type": "http.disconnect"})
        await call
        await server.heard("gone /later")
        server.said.put_nowait(request(b"half", more=True))
        server.said.put_nowait({"type": "http.disconnect"})
        await server.call(http("/echo", "POST"))
        await server.heard("abandoned /echo")
        server.said.put_nowait(request(b"half", more=True))
        server.said.put_nowait({"type": "http.disconnect"})
        await server.call(http("/slurp", "POST"))
        await server.heard("slurp gone")

    assert play(script).open == 0


def test_a_slow_server_costs_a_bounded_amount() -> None:
    async def script(server: Server) -> None:
        server.pace = asyncio.Semaphore(5)
        server.said.put_nowait(request())
        call = server.call(http("/flood?size=1000"))
        await server.heard("waiting")
        for _ in range(200):
            server.pace.release()
            await server.next()
        assert 0 < server.app.seen.peak <= 11_000
        server.said.put_nowait({"type": "http.disconnect"})
        pace, server.pace = server.pace, None  # a server drops what it was to send when its peer has left
        pace.release()
        await call

    play(script, Limits(write_high_bytes=10_000, write_low_bytes=2000))


def test_streamed_body_is_received_as_the_handler_reads() -> None:
    async def script(server: Server) -> None:
        server.app.limit = 1 << 20
        for _ in range(100):
            server.said.put_nowait(request(b"x" * 1000, more=True))
        call = server.call(http("/slurp-slowly", "POST"))
        await server.heard("slurping")
        seen, exchange = server.app.parked[0]
        assert seen.body_stream is not None
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.said.qsize() >= 85, "no more than the bound is taken from the server"
        server.said.put_nowait(request())
        total = 0
        async for piece in seen.body_stream:
            total += len(piece)
        exchange.respond(server.app.malformed(UNREADABLE_REQUEST, 200, str(total)))
        await call
        assert server.body() == b"malformed: 100000"

    play(script, Limits(ahead_bytes_max=10_000))


def test_disconnect_is_noticed_while_the_handler_is_slow() -> None:
    """The server was asked for nothing until the handler had taken what was read ahead."""

    async def script(server: Server) -> None:
        server.app.limit = 1 << 20
        for _ in range(11):
            server.said.put_nowait(request(b"x" * 1000, more=True))
        call = server.call(http("/slurp-slowly", "POST"))
        await server.heard("slurping")
        _, exchange = server.app.parked[0]
        while not server.said.empty():
            await asyncio.sleep(0)
        server.said.put_nowait({"type": "http.disconnect"})
        await call
        assert exchange.is_disconnected

    play(script, Limits(ahead_bytes_max=10_000))


def test_lifespan() -> None:
    done: list[str] = []

    async def hook(name: str) -> None:
        done.append(name)
        if name == "bad":
            raise ValueError("no disk")

    async def script(server: Server) -> None:
        server.asgi = AsgiAdapter(server.app, startup=lambda: hook("up"), shutdown=lambda: hook("down"))
        server.said.put_nowait({"type": "lifespan.startup"})
        server.said.put_nowait({"type": "lifespan.shutdown"})
        await server.call({"type": "lifespan"})
        assert [message["type"] for message in server.sent] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]
        assert done == ["up", "down"]
        server.sent.clear()
        server.asgi = AsgiAdapter(server.app, startup=lambda: hook("bad"))
        server.said.put_nowait({"type": "lifespan.startup"})
        await server.call({"type": "lifespan"})
        assert server.sent == [{"type": "lifespan.startup.failed", "message": "no disk"}]

    play(script)


# WebSockets -----------------------------------------------------------------------------------------


def socket(path: str, **more: Any) -> Message:
    return {"type": "websocket", "path": path, "raw_path": path.encode(), "headers": [], **more}


def text(data: str) -> Message:
    return {"type": "websocket.receive", "text": data}


def websocket(script: Callable[[Server], Awaitable[None]], path: str = "/ws", limits: Limits | None = None) -> App:
    async def around(server: Server) -> None:
        server.said.put_nowait({"type": "websocket.connect"})
        call = server.call(socket(path))
        assert (await server.next())["type"] == "websocket.accept"
        await script(server)
        await call

    return play(around, limits)


def test_messages_go_both_ways() -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(text("grüße"))
        assert (await server.next()) == {"type": "websocket.send", "text": "grüße"}
        server.said.put_nowait({"type": "websocket.receive", "bytes": b"123"})
        assert (await server.next())["text"] == "binary 3"
        server.said.put_nowait({"type": "websocket.disconnect", "code": 1000})

    app = websocket(script)
    assert [app.seen.wait() for _ in range(3)] == ["ws open", "ws closed", "ws over"]


@pytest.mark.parametrize(
    ("said", "code"), [("close", 4000), ("return", 1000), ("fail", 1011), ("x" * (1 << 20) + "x", 1009)]
)
def test_the_handler_closes(said: str, code: int) -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait(text("first"))
        assert (await server.next())["text"] == "first"
        server.said.put_nowait(text(said))
        closed = await server.next()
        assert (closed["type"], closed["code"]) == ("websocket.close", code)

    websocket(script)


def test_disconnect_cancels_the_handler() -> None:
    async def slow(server: Server) -> None:
        server.pace = asyncio.Semaphore(3)
        server.said.put_nowait({"type": "websocket.connect"})
        call = server.call(socket("/ws-flood"))
        await server.heard("waiting")
        server.said.put_nowait({"type": "websocket.disconnect", "code": 1006})
        server.pace.release()
        await call
        await server.heard("flood over")

    app = play(slow, Limits(write_high_bytes=50_000, write_low_bytes=1000))
    assert 0 < app.seen.peak <= 50_000 + 16_000


@pytest.mark.parametrize("extension", [True, False])
def test_an_upgrade_that_is_declined(extension: bool) -> None:
    async def script(server: Server) -> None:
        server.said.put_nowait({"type": "websocket.connect"})
        await server.call(socket("/refuse", extensions={"websocket.http.response": {}} if extension else {}))
        if extension:
            assert (server.sent[0]["status"], server.sent[1]["body"]) == (401, b"no")
        else:
            assert server.sent[0]["type"] == "websocket.close"

    play(script)
