"""An HTTP/2 client for tests: the `h2` library over a plain socket, one event at a time.

It acknowledges received data only when a test calls for it, so that a test can be a slow reader.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from tests.unit.http.harness import TIMEOUT_S, ListenerHarness


@dataclass
class H2Response:
    """What has come for one request."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None
    informed: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.headers[":status"])


class H2Client:
    def __init__(self, listener: ListenerHarness, *, window: int = 65_535, acknowledge: bool = True) -> None:
        self.sock = socket.socket()
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(listener.listener.address)
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.acknowledge = acknowledge
        self.got: dict[int, H2Response] = {}
        self.goaway: int | None = None
        self.settings: dict[int, int] = {}
        self.closed = False
        self.h2.initiate_connection()
        self.flush()

    def __enter__(self) -> H2Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def flush(self) -> None:
        self.sock.sendall(self.h2.data_to_send())

    def request(self, target: str, *headers: tuple[str, str], method: str = "GET", ends: bool = True) -> int:
        number = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", target), (":scheme", "http"), (":authority", "t")]
        self.got[number] = H2Response()
        self.h2.send_headers(number, [*pseudo, *headers], end_stream=ends)
        self.flush()
        return number

    def post(self, target: str, body: bytes, *headers: tuple[str, str]) -> int:
        number = self.request(target, *headers, method="POST", ends=False)
        self.send(number, body, ends=True)
        return number

    def send(self, number: int, body: bytes, ends: bool = False) -> None:
        """As the server's windows allow. An answer that comes before the end does not stop it."""
        while body:
            size = min(len(body), self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if not size:
                self.step()
                continue
            self.h2.send_data(number, body[:size])
            body = body[size:]
            self.flush()
        if ends:
            self.h2.end_stream(number)
        self.flush()

    def step(self) -> None:
        """Take what comes next."""
        data = self.sock.recv(1 << 16)
        if not data:
            self.closed = True
            return
        for event in self.h2.receive_data(data):
            self._on(event)
        self.flush()

    def _on(self, event: events.Event) -> None:
        if isinstance(event, events.ResponseReceived):
            self.got[event.stream_id].headers = {str(name): str(value) for name, value in event.headers}
        elif isinstance(event, events.InformationalResponseReceived):
            self.got[event.stream_id].informed.append(dict(event.headers)[":status"])  # type: ignore[index,arg-type]
        elif isinstance(event, events.DataReceived):
            self.got[event.stream_id].body += event.data
            if self.acknowledge and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, events.StreamEnded):
            self.got[event.stream_id].ended = True
        elif isinstance(event, events.StreamReset):
            self.got[event.stream_id].reset = int(event.error_code)
        elif isinstance(event, events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)
        elif isinstance(event, events.RemoteSettingsChanged):
            self.settings |= {int(code): change.new_value for code, change in event.changed_settings.items()}

    def reply(self, number: int) -> H2Response:
        got = self.got[number]
        while not got.ended and got.reset is None:
            assert not self.closed, "the connection ended"
            self.step()
        return got

    def get(self, target: str, *headers: tuple[str, str], method: str = "GET") -> H2Response:
        return self.reply(self.request(target, *headers, method=method))

    def until_closed(self) -> None:
        while not self.closed:
            try:
                self.step()
            except ConnectionError:
                self.closed = True
