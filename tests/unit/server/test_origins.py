"""Hosts and origins: what the settings say, and the application inside another server."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from tidelog.errors import BadInput
from tidelog.http.interface import Request
from tidelog.server.auth import OriginPolicy
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError
from tidelog.server.lifecycle import asgi


def asks(origins: OriginPolicy, host: str | None, **headers: str) -> bool:
    """Whether a write with this host is let in."""
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if host is not None:
        lines.insert(0, (b"host", host.encode()))
    try:
        origins.check(Request("POST", "/", "", lines), changes=True, is_public=False)
    except ApiError as problem:
        return problem.status != 403
    return True


def test_listen_address_is_an_own_host() -> None:
    made = OriginPolicy("tide.internal", "", "", keys=False)
    assert asks(made, "TIDE.internal:4000")
    assert asks(made, "192.0.2.1")
    assert not asks(made, "tide.internal.evil.example")
    assert asks(OriginPolicy("::1", "", "", keys=False), "[::1]:4000")
    assert not asks(OriginPolicy("127.0.0.1", "", "", keys=False), "192.0.2.1")
    assert asks(OriginPolicy("127.0.0.1", "", "", keys=False), None), "HTTP/1.0, which no browser speaks"


BAD_HOSTS = (
    *("", ":4000", ".", "localhost:1@evil.example", "user@localhost", "[::1]evil.example", "[::1", "localhost/x"),
    *("localhost:80:90", "localhost:x", "localhost,evil.example", "localhost..", "[]", "local host"),
)


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_invalid_host_is_rejected(host: str) -> None:
    for listens in ("127.0.0.1", "", "0.0.0.0"):
        assert not asks(OriginPolicy(listens, "", "", keys=False), host)


@pytest.mark.parametrize("host", ["[::1%lo]:4000", "localhost.:4000", "127.0.0.1.", "localhost:"])
def test_loopback_host_may_be_written_in_other_ways(host: str) -> None:
    assert asks(OriginPolicy("127.0.0.1", "", "", keys=False), host)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("host", ["", *BAD_HOSTS, None])
@pytest.mark.parametrize("origin", ["null", "", "http://", "://", "evil", "http://:4000", "file://"])
def test_null_origin_is_never_the_servers_own(host: str | None, origin: str, keys: bool) -> None:
    """`null` is the origin of a sandboxed page: with an empty Host it counted as the same."""
    assert not asks(OriginPolicy("127.0.0.1", "*", "", keys=keys), host, origin=origin)


def test_origin_of_another_scheme_is_not_the_servers_own() -> None:
    made = OriginPolicy("127.0.0.1", "", "", keys=True)
    assert asks(made, "tide.test", origin="https://tide.test")
    assert not asks(made, "tide.test", origin="ftp://tide.test")
    assert not asks(made, "tide.test", origin="chrome-extension://tide.test")


def test_repeated_host_and_origin_headers() -> None:
    made = OriginPolicy("127.0.0.1", "", "", keys=True)

    def status(*lines: tuple[bytes, bytes]) -> int:
        try:
            made.check(Request("POST", "/", "", lines), changes=True, is_public=False)
        except ApiError as problem:
            return problem.status
        return 200

    own, other = (b"origin", b"http://localhost"), (b"origin", b"http://evil.example")
    assert status((b"host", b"localhost"), own) == 200
    assert status((b"host", b"localhost"), (b"host", b"evil.example")) == 400
    assert status((b"host", b"localhost"), own, other) == 403
    assert status(other, own, (b"host", b"localhost")) == 403


def test_all_hosts_and_origins_may_be_allowed() -> None:
    made = OriginPolicy("127.0.0.1", "*", "*", keys=False)
    assert asks(made, "any.example", origin="https://other.example")


@pytest.mark.parametrize("origin", ["ui.example", "https://ui.example/"])
def test_invalid_allowed_origin_keeps_the_server_from_starting(origin: str) -> None:
    with pytest.raises(BadInput, match="without a slash"):
        OriginPolicy("127.0.0.1", "", origin, keys=False)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost", None, 201),
        ("evil.example", None, 403),
        ("localhost", "http://evil.example", 403),
        ("a.test", None, 201),
        ("", "null", 403),
        ("localhost:1@evil.example", None, 403),
    ],
)
def test_asgi_application_checks_hosts_and_origins(tmp_path: Path, host: str, origin: str | None, status: int) -> None:
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
