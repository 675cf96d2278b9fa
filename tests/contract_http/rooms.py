"""Channels over the wire: the verbs over the small client, a stream of events, and a socket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from websockets.sync.client import ClientConnection, connect

from tests.contract_http.api import good, refused
from tests.contract_http.client import Client, Reply, dumps, loads
from tests.contract_http.events import Events
from tests.contract_http.server import Server

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


def at(channel: str, rest: str = "") -> str:
    return f"/v0/channels/{quote(channel, safe='')}{rest}"


class Member(Client):
    """A client that expects success, and gives the body of it."""

    def verb(self, channel: str, verb: str, **body: Any) -> dict[str, Any]:
        return good(self.post(at(channel, f"/{verb}"), body))

    def make(self, channel: str, **config: Any) -> dict[str, Any]:
        return good(self.put(at(channel), config), 201)

    def join(self, channel: str, **body: Any) -> dict[str, Any]:
        return self.verb(channel, "join", **body)

    def leave(self, channel: str, **body: Any) -> dict[str, Any]:
        return self.verb(channel, "leave", **body)

    def say(self, channel: str, *texts: str, **body: Any) -> dict[str, Any]:
        if len(texts) == 1:
            return self.verb(channel, "publish", payload=texts[0], **body)
        return self.verb(channel, "publish", messages=[{"payload": text} for text in texts], **body)

    def look(self, channel: str, query: str = "") -> dict[str, Any]:
        return good(self.get(at(channel, query)))

    def history(self, channel: str, query: str = "") -> dict[str, Any]:
        return good(self.get(at(channel, f"/history{query}")))

    def texts(self, channel: str, query: str = "") -> list[str]:
        return [message["payload"] for message in self.history(channel, query)["messages"]]

    def figure(self, name: str) -> int:
        found = self.get("/v0/metrics", [("Accept", "application/json")]).json()[name]
        assert isinstance(found, int)
        return found

    def scraped(self, name: str) -> float:
        """One series of the text, as it is written there."""
        for line in self.get("/v0/metrics").body.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"there is no {name}")


def member(server: Server, key: str | None = None, patience_s: float = 15.0) -> Member:
    return Member(server.address, key=key, patience_s=patience_s)


class Said(NamedTuple):
    name: str
    data: dict[str, Any]
    id: int | None


class Heard(Events):
    """The events of one channel; every byte of each frame is held to the contract."""

    def __init__(
        self,
        server: Server,
        channel: str,
        query: str = "",
        *,
        key: str | None = None,
        patience_s: float = 10.0,
        **more: str,
    ) -> None:
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        super().__init__(server.address, at(channel, f"/events{query}"), headers=headers.items(), patience_s=patience_s)
        self.hello: dict[str, Any] = {}
        if self.refusal is None:
            self.hello = self.said("subscribed")

    def one(self, within_s: float | None = None) -> Said:
        while (raw := self.frame(within_s)).startswith(b":"):
            pass
        found = _FRAME.fullmatch(raw)
        assert found is not None, raw[:300]
        number, name, data = found.groups()
        value = loads(data)
        assert dumps(value) == data, "compact"
        assert (number is not None) == (name == b"message"), raw
        return Said(name.decode(), value, None if number is None else int(number))

    def said(self, name: str) -> dict[str, Any]:
        found = self.one()
        assert found.name == name, found
        return found.data

    def texts(self, count: int) -> list[str]:
        """So many messages, and nothing between them."""
        found = [self.one() for _ in range(count)]
        assert all(each.name == "message" and each.id == each.data["seq"] for each in found), found
        return [each.data["payload"] for each in found]

    def refuses(self, status: int, code: str, detail: object) -> None:
        assert self.refusal is not None
        refused(self.refusal, status, code, detail)


class Line:
    """A socket that says commands and hears JSON."""

    def __init__(self, server: Server, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        host, port = server.address
        named = dict(headers or {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        made = connect(
            f"ws://{host}:{port}/v0/ws", additional_headers=named, open_timeout=10, close_timeout=5, max_size=64 << 20
        )
        self.raw: ClientConnection = made.__enter__()  # what the library wants; `close` is all that its end does

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def send(self, **command: object) -> None:
        self.raw.send(dumps(command).decode())

    def hear(self, op: str | None = None, within_s: float = 10) -> dict[str, Any]:
        text = self.raw.recv(within_s)
        assert isinstance(text, str)
        said = loads(text)
        assert dumps(said).decode() == text, "compact"
        assert op is None or said["op"] == op, said
        assert isinstance(said, dict)
        return said

    def ask(self, op: str, gives: str, **command: object) -> dict[str, Any]:
        self.send(op=op, request_id="r", **command)
        found = self.hear(gives)
        assert found.pop("request_id") == "r"
        return found

    def fails(self, code: str, op: str, **command: object) -> None:
        """A command that is refused; the socket lives on."""
        assert self.ask(op, "error", **command)["code"] == code
        self.send(op="ping")
        self.hear("pong")


def reply_of(client: Client, method: str, channel: str, rest: str, body: object = None) -> Reply:
    return client.request(method, at(channel, rest)) if body is None else client.send(method, at(channel, rest), body)
