"""What a client makes of a server's refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest

from tidelog.client.http import Client
from tidelog.errors import Damaged, DiskFull, Error, InDoubt, Unavailable


@contextmanager
def answering(status: int, content: object) -> Iterator[Client]:
    """A client of a server that says the same to everybody."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody asked."""

    with HTTPServer(("127.0.0.1", 0), Same) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with Client(f"http://127.0.0.1:{server.server_port}") as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "code", "detail", "raised", "written"),
    [
        (500, "internal", {"reason": "latched", "written": False}, Damaged, False),
        (500, "internal", {"reason": "latched", "written": None}, InDoubt, None),
        (500, "internal", None, InDoubt, None),
        (503, "not_ready", {"replay_progress": 0.5}, Unavailable, False),
        (507, "disk_full", None, DiskFull, False),
    ],
)
def test_whether_it_was_written_is_what_the_server_says(
    status: int, code: str, detail: object, raised: type[Error], written: bool | None
) -> None:
    said = {"code": code, "message": "so it is", **({} if detail is None else {"detail": detail})}
    with answering(status, {"error": said}) as client, pytest.raises(raised, match="so it is") as found:
        client.request("GET", "/", retry_safe=True)
    assert type(found.value) is raised
    assert found.value.written is written
