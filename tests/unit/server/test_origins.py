"""Hosts and origins: what the settings say, and the application inside another server."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from tidelog.errors import BadInput
from tidelog.server.api.origins import Origins
from tidelog.server.api.problem import Problem
from tidelog.server.config import ServerConfig
from tidelog.server.http.seam import Request
from tidelog.server.mount import asgi


def asks(origins: Origins, host: str | None, **headers: str) -> bool:
    """Whether a write with this host is let in."""
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if host is not None:
        lines.insert(0, (b"host", host.encode()))
    try:
        origins.check(Request("POST", "/", "", lines), changes=True, is_public=False)
    except Problem as problem:
        return problem.status != 403
    return True


def test_the_address_it_listens_on_is_its_own() -> None:
    made = Origins("tide.internal", "", "", keys=False)
    assert asks(made, "TIDE.internal:4000")
    assert asks(made, "192.0.2.1")
    assert not asks(made, "tide.internal.evil.example")
    assert asks(Origins("::1", "", "", keys=False), "[::1]:4000")
    assert not asks(Origins("127.0.0.1", "", "", keys=False), "192.0.2.1")
    assert asks(Origins("127.0.0.1", "", "", keys=False), None), "HTTP/1.0, which no browser speaks"


def test_everything_may_be_allowed() -> None:
    made = Origins("127.0.0.1", "*", "*", keys=False)
    assert asks(made, "any.example", origin="https://other.example")


@pytest.mark.parametrize("origin", ["ui.example", "https://ui.example/"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(BadInput, match="without a slash"):
        Origins("127.0.0.1", "", origin, keys=False)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost", None, 201),
        ("evil.example", None, 403),
        ("localhost", "http://evil.example", 403),
        ("a.test", None, 201),
    ],
)
def test_the_application_inside_another_server_checks_them_too(
    tmp_path: Path, host: str, origin: str | None, status: int
) -> None:
    async def run() -> int:
        sent: list[MutableMapping[str, Any]] = []
        headers = [(b"host", host.encode()), (b"content-type", b"application/json")]
        if origin is not None:
            headers.append((b"origin", origin.encode()))
        scope = {"type": "http", "method": "PUT", "path": "/v0/topics/t", "headers": headers, "query_string": b""}
        forever = asyncio.Event()
        body = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if not body:
                await forever.wait()
            return body.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        async with asgi(ServerConfig(data_dir=str(tmp_path / "data"), allowed_hosts="a.test")) as app:
            await app(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(run()) == status
