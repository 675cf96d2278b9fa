"""A WebSocket client that sends commands and receives JSON. Frames are the `websockets` library's."""

from __future__ import annotations

from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.contract_http.client import dumps, loads
from tests.contract_http.server import Server


class Socket:
    """A socket that says commands and hears JSON."""

    def __init__(self, server: Server) -> None:
        host, port = server.address
        self.raw: ClientConnection = connect(
            f"ws://{host}:{port}/v0/ws", open_timeout=10, close_timeout=5, max_size=64 << 20
        )

    def send(self, **command: object) -> None:
        self.raw.send(dumps(command).decode())

    def receive(self, within_s: float = 10) -> dict[str, Any]:
        text = self.raw.recv(within_s)
        assert isinstance(text, str), "text frames only"
        said = loads(text)
        assert isinstance(said, dict)
        assert dumps(said).decode() == text, "compact"
        return said

    def request(self, **command: object) -> dict[str, Any]:
        self.send(**command)
        return self.receive()

    def expect(self, *ops: str) -> list[dict[str, Any]]:
        found = [self.receive() for _ in ops]
        assert [said["op"] for said in found] == list(ops), found
        return found

    def is_quiet(self, for_s: float) -> bool:
        try:
            self.raw.recv(for_s)
        except TimeoutError:
            return True
        return False

    def expect_error(self, code: str, **command: object) -> dict[str, Any]:
        """A command that is refused; the socket lives on."""
        said = self.request(**command)
        assert said.keys() == {"op", "request_id", "code", "message"}, said
        assert (said["op"], said["code"]) == ("error", code), said
        assert isinstance(said["message"], str)
        assert said["message"]
        return said

    def publish(self, topic: str, *datas: object, **more: object) -> dict[str, Any]:
        said = self.request(op="publish", topic=topic, records=[{"data": data} for data in datas], **more)
        assert said["op"] == "ack", said
        return said
