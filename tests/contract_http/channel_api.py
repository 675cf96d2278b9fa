"""Channels over the wire: the verbs over the small client, a stream of events, and a socket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from websockets.sync.client import ClientConnection, connect

from tests.contract_http.api import expect_error, expect_success
from tests.contract_http.client import Client, Reply, dumps, loads
from tests.contract_http.server import Server
from tests.contract_http.sse_client import SseStream

KEYS = ",".join(
    (
        "ann@example.org=ann:read+write+delete",
        "bob@example.org=bob:read+write+delete",
        "cat@example.net=cat:rw",
        "eve@example.org=eve:read",
        "own@example.org=own::!own",
        "nameless:rw",
        "root",
    )
)
ANN, BOB, CAT, EVE = "ann@example.org", "bob@example.org", "cat@example.net", "eve@example.org"
_FRAME = re.compile(rb"(?:id: (\d+)\n)?event: ([a-z]+)\ndata: (\{[^\n\r]*\})\n\n")


def channel_path(channel: str, rest: str = "") -> str:
    return f"/v0/channels/{quote(channel, safe='')}{rest}"


class ChannelApi(Client):
    """A client that expects success, and gives the body of it."""

    def verb(self, channel: str, verb: str, **body: Any) -> dict[str, Any]:
        return expect_success(self.post(channel_path(channel, f"/{verb}"), body))

    def create(self, channel: str, **config: Any) -> dict[str, Any]:
        return expect_success(self.put(channel_path(channel), config), 201)

    def join(self, channel: str, **body: Any) -> dict[str, Any]:
        return self.verb(channel, "join", **body)

    def leave(self, channel: str, **body: Any) -> dict[str, Any]:
        return self.verb(channel, "leave", **body)

    def publish(self, channel: str, *texts: str, **body: Any) -> dict[str, Any]:
        if len(texts) == 1:
            return self.verb(channel, "publish", payload=texts[0], **body)
        return self.verb(channel, "publish", messages=[{"payload": text} for text in texts], **body)

    def state(self, channel: str, query: str = "") -> dict[str, Any]:
        return expect_success(self.get(channel_path(channel, query)))

    def history(self, channel: str, query: str = "") -> dict[str, Any]:
        return expect_success(self.get(channel_path(channel, f"/history{query}")))

    def texts(self, channel: str, query: str = "") -> list[str]:
        return [message["payload"] for message in self.history(channel, query)["messages"]]

    def metric(self, name: str) -> int:
        found = self.get("/v0/metrics", [("Accept", "application/json")]).json()[name]
        assert isinstance(found, int)
        return found

    def scraped_metric(self, name: str) -> float:
        """One series of the text, as it is written there."""
        for line in self.get("/v0/metrics").body.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"there is no {name}")


def channel_api(server: Server, key: str | None = None, timeout_s: float = 15.0) -> ChannelApi:
    return ChannelApi(server.address, key=key, timeout_s=timeout_s)


class ChannelEvent(NamedTuple):
    name: str
    data: dict[str, Any]
    id: int | None


class ChannelEvents(SseStream):
    """The events of one channel; every byte of each frame is held to the contract."""

    def __init__(
        self,
        server: Server,
        channel: str,
        query: str = "",
        *,
        key: str | None = None,
        timeout_s: float = 10.0,
        **more: str,
    ) -> None:
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        super().__init__(
            server.address, channel_path(channel, f"/events{query}"), headers=headers.items(), timeout_s=timeout_s
        )
        self.hello: dict[str, Any] = {}
        if self.refusal is None:
            self.hello = self.expect_event("subscribed")

    def next_event(self, within_s: float | None = None) -> ChannelEvent:
        raw = self.event_frame(within_s)
        found = _FRAME.fullmatch(raw)
        assert found is not None, raw[:300]
        number, name, data = found.groups()
        value = loads(data)
        assert dumps(value) == data, "compact"
        assert (number is not None) == (name == b"message"), raw
        return ChannelEvent(name.decode(), value, None if number is None else int(number))

    def expect_event(self, name: str) -> dict[str, Any]:
        found = self.next_event()
        assert found.name == name, found
        return found.data

    def texts(self, count: int) -> list[str]:
        """So many messages, and nothing between them."""
        found = [self.next_event() for _ in range(count)]
        assert all(each.name == "message" and each.id == each.data["seq"] for each in found), found
        return [each.data["payload"] for each in found]

    def expect_refused(self, status: int, code: str, detail: object) -> None:
        assert self.refusal is not None
        expect_error(self.refusal, status, code, detail)


class ChannelSocket:
    """A socket that says commands and hears JSON."""

    def __init__(self, server: Server, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        host, port = server.address
        named = dict(headers or {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        made = connect(
            f"ws://{host}:{port}/v0/ws", additional_headers=named, open_timeout=10, close_timeout=5, max_size=64 << 20
        )
        self.raw: ClientConnection = made.__enter__()  # what the library wants; `close` is all that its end does

    def __enter__(self) -> ChannelSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def send(self, **command: object) -> None:
        self.raw.send(dumps(command).decode())

    def receive(self, op: str | None = None, within_s: float = 10) -> dict[str, Any]:
        text = self.raw.recv(within_s)
        assert isinstance(text, str)
        said = loads(text)
        assert dumps(said).decode() == text, "compact"
        assert op is None or said["op"] == op, said
        assert isinstance(said, dict)
        return said

    def request(self, op: str, gives: str, **command: object) -> dict[str, Any]:
        self.send(op=op, request_id="r", **command)
        found = self.receive(gives)
        assert found.pop("request_id") == "r"
        return found

    def expect_error(self, code: str, op: str, **command: object) -> None:
        """A command that is refused; the socket lives on."""
        assert self.request(op, "error", **command)["code"] == code
        self.send(op="ping")
        self.receive("pong")


def request_channel(client: Client, method: str, channel: str, rest: str, body: object = None) -> Reply:
    return (
        client.request(method, channel_path(channel, rest))
        if body is None
        else client.send(method, channel_path(channel, rest), body)
    )
