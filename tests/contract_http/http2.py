"""HTTP/2 with prior knowledge, over the `h2` library's frames."""

from __future__ import annotations

from collections import defaultdict
from typing import Self

import h2.config
import h2.connection
import h2.errors
import h2.events

from tests.contract_http.client import Address, Headers, RawConnection, Reply

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class H2Client:
    """Several requests at once over one connection."""

    def __init__(self, address: Address) -> None:
        self.authority = f"{address.host}:{address.port}"
        self.wire = RawConnection(address)
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.state.initiate_connection()
        self._heads: dict[int, list[tuple[str, str]]] = {}
        self.data: defaultdict[int, bytearray] = defaultdict(bytearray)
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.settings: dict[int, int] = {}
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def _flush(self) -> None:
        self.wire.send(self.state.data_to_send())

    def step(self, within_s: float | None = None) -> bool:
        """Take in what comes next; False at the end of the connection."""
        if not self.wire.receive_more(within_s):
            return False
        data = bytes(self.wire.held)
        self.wire.held.clear()
        for event in self.state.receive_data(data):
            match event:
                case h2.events.RemoteSettingsChanged():
                    self.settings |= {int(code): change.new_value for code, change in event.changed_settings.items()}
                case h2.events.ResponseReceived():
                    assert event.stream_id is not None
                    self._heads[event.stream_id] = [(str(name), str(value)) for name, value in event.headers or ()]
                case h2.events.DataReceived():
                    assert event.stream_id is not None
                    self.data[event.stream_id] += event.data or b""
                    self.state.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                case h2.events.StreamEnded():
                    assert event.stream_id is not None
                    self.ended.add(event.stream_id)
                case h2.events.StreamReset():
                    assert event.stream_id is not None
                    self.resets[event.stream_id] = int(event.error_code or 0)
        self._flush()
        return True

    def begin(self, method: str, target: str, body: bytes | None = None, headers: Headers = ()) -> int:
        stream = int(self.state.get_next_available_stream_id())
        pairs = [
            (":method", method),
            (":scheme", "http"),
            (":authority", self.authority),
            (":path", target),
            *((name.lower(), value) for name, value in headers),
        ]
        self.state.send_headers(stream, pairs, end_stream=body is None)
        self._flush()
        if body is not None:
            self._send(stream, body)
        return stream

    def _send(self, stream: int, body: bytes) -> None:
        at = 0
        while at < len(body) and stream not in self.ended:
            channel_name = min(self.state.local_flow_control_window(stream), self.state.max_outbound_frame_size, 16_384)
            if not channel_name:
                self.step()
                continue
            self.state.send_data(stream, body[at : at + channel_name])
            self._flush()
            at += channel_name
        if stream not in self.ended:
            self.state.end_stream(stream)
            self._flush()

    def head(self, stream: int) -> Reply:
        while stream not in self._heads:
            assert self.step(), "the connection ended"
        found = dict(self._heads[stream][:1])
        return Reply("HTTP/2", int(found[":status"]), tuple(self._heads[stream][1:]), b"")

    def end(self, stream: int) -> Reply:
        head = self.head(stream)
        while stream not in self.ended:
            assert self.step(), "the connection ended"
        return head._replace(body=bytes(self.data[stream]))

    def request(self, method: str, target: str, body: bytes | None = None, headers: Headers = ()) -> Reply:
        return self.end(self.begin(method, target, body, headers))

    def reset(self, stream: int) -> None:
        self.state.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()
