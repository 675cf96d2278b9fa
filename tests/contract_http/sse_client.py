"""A client of Server-Sent Events that looks at the bytes (§3.8).

id: <base64url of {"topic":seq,…}>␊event: <name>␊data: <compact JSON>␊␊
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final, NamedTuple, Self

from tests.contract_http.client import Address, Headers, RawConnection, Reply, dumps, loads

RETRY: Final = b"retry: 2000\n\n"
EVENT_LIMIT_S: Final = 120.0
"""Only so that a test fails where its event never comes: heartbeats come for as long as the stream is open."""
_EVENT: Final = re.compile(rb"id: ([A-Za-z0-9_-]+)\nevent: ([a-z-]+)\ndata: (\{[^\n\r]*\})\n\n")
_HEARTBEAT: Final = re.compile(rb": hb ([0-9]{13})\n\n")


def cursor(positions: object) -> str:
    """An event id, made up."""
    return urlsafe_b64encode(dumps(positions)).rstrip(b"=").decode()


class Event(NamedTuple):
    name: str
    data: Any
    id: dict[str, int]
    raw: bytes

    @property
    def seqs(self) -> list[int]:
        return [record["$seq"] for record in self.data["records"]]


def parse_event(raw: bytes) -> Event:
    """A frame as an event; every byte of it is held to the contract."""
    found = _EVENT.fullmatch(raw)
    assert found is not None, raw[:300]
    at, name, data = found.groups()
    value = loads(data)
    assert dumps(value) == data, "compact"
    plain = urlsafe_b64decode(at + b"=" * (-len(at) % 4))
    positions = loads(plain)
    assert list(positions) == sorted(positions), "keys are sorted"
    assert dumps(positions) == plain, "compact"
    return Event(name.decode(), value, positions, raw)


def parse_heartbeat(raw: bytes) -> int:
    """The time in a heartbeat, in ms."""
    found = _HEARTBEAT.fullmatch(raw)
    assert found is not None, raw[:300]
    return int(found[1])


class SseStream:
    """One stream. `head` is looked at first; a stream that is none has a `refusal`."""

    def __init__(
        self, address: Address, target: str, *, headers: Headers = (), timeout_s: float = 10.0, hello: bool = True
    ) -> None:
        self.wire = RawConnection(address, timeout_s)
        self._held = bytearray()
        self._over = False
        self.refusal: Reply | None = None
        lines = [f"GET {target} HTTP/1.1", f"Host: {address.host}:{address.port}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.wire.send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        try:
            self.head = self.wire.head()
            if self.head.status != 200:
                length = int(self.head.header("content-length") or 0)
                self.refusal = self.head._replace(body=self.wire.read_exactly(length))
                self.wire.close()
                return
            if hello:
                assert self.frame() == RETRY, "the first bytes"
        except BaseException:
            self.wire.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def frame(self, within_s: float | None = None) -> bytes:
        """The next frame as it came, or nothing at the clean end of the stream."""
        deadline = time.monotonic() + (self.wire.patience_s if within_s is None else within_s)
        while (at := self._held.find(b"\n\n")) < 0:
            if self._over:
                assert not self._held, "the stream ends behind a whole frame"
                return b""
            part = self.wire.chunk(max(deadline - time.monotonic(), 0.001))
            self._over = not part
            self._held += part
        found = bytes(self._held[: at + 2])
        del self._held[: at + 2]
        return found

    def event_frame(self, within_s: float | None = None) -> bytes:
        """The frame of the next event; heartbeats between are passed over, for two minutes at most."""
        deadline = time.monotonic() + EVENT_LIMIT_S
        while (raw := self.frame(within_s)).startswith(b":"):
            parse_heartbeat(raw)
            assert time.monotonic() < deadline, f"nothing but heartbeats in {EVENT_LIMIT_S:g} s"
        return raw

    def next(self, within_s: float | None = None) -> Event:
        return parse_event(self.event_frame(within_s))

    def expect(self, *names: str) -> list[Event]:
        """The next events, which are these."""
        found = [self.next() for _ in names]
        assert [event.name for event in found] == list(names), [event.raw for event in found]
        return found

    def is_quiet(self, for_s: float) -> bool:
        return not self._held and self.wire.is_quiet(for_s)

    def is_over(self) -> bool:
        """Whether the stream ends cleanly now."""
        return self.frame() == b""
