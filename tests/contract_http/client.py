"""A small HTTP/1.1 client on a plain socket: keep-alive, and every byte in reach.

It believes nothing: a reply has one length, chunks are whole, and JSON has no key twice and no NaN. Waiting has a
deadline, always, so that a server which says nothing fails a test and does not hang it.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self

Headers = Iterable[tuple[str, str]]
JSON: Final = ("Content-Type", "application/json")
TIMEOUT_S: Final = 15.0


class Address(NamedTuple):
    host: str
    port: int


class ConnectionEnded(Exception):
    """The server closed the connection where something was expected of it."""


def loads(text: bytes | str) -> Any:
    """JSON, and nothing that only Python takes for it."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        assert len(keys) == len(set(keys)), f"a key twice in {text!r:.200}"
        return dict(found)

    def constant(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(
        text.decode() if isinstance(text, bytes) else text, object_pairs_hook=pairs, parse_constant=constant
    )


def dumps(value: object) -> bytes:
    """Compact and in UTF-8, as the contract counts bytes."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


class Reply(NamedTuple):
    version: str
    status: int
    headers: tuple[tuple[str, str], ...]  # names in lower case
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name.lower()]

    def header(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    def json(self) -> Any:
        kind = self.header("content-type") or ""
        assert kind.partition(";")[0] == "application/json", kind
        return loads(self.body)


class RawConnection:
    """Bytes of one connection, read up to a deadline."""

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.patience_s = timeout_s
        self.socket = socket.create_connection(address, timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.held = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def abort(self) -> None:
        """Leave without a word: the server gets a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.settimeout(self.patience_s)
        self.socket.sendall(data)

    def receive_more(self, within_s: float | None = None) -> bool:
        """Some more bytes into `held`; False at the end. Raises TimeoutError where nothing comes."""
        self.socket.settimeout(self.patience_s if within_s is None else max(within_s, 0.001))
        data = self.socket.recv(1 << 16)
        self.held += data
        return bool(data)

    def read_until(self, mark: bytes, within_s: float | None = None) -> bytes:
        """Everything up to and with `mark`."""
        deadline = time.monotonic() + (self.patience_s if within_s is None else within_s)
        start = 0
        while (at := self.held.find(mark, start)) < 0:
            start = max(len(self.held) - len(mark) + 1, 0)
            if not self.receive_more(deadline - time.monotonic()):
                raise ConnectionEnded(f"the connection ended behind {bytes(self.held)!r:.200}")
        found = bytes(self.held[: at + len(mark)])
        del self.held[: at + len(mark)]
        return found

    def read_exactly(self, size: int, within_s: float | None = None) -> bytes:
        deadline = time.monotonic() + (self.patience_s if within_s is None else within_s)
        while len(self.held) < size:
            if not self.receive_more(deadline - time.monotonic()):
                raise ConnectionEnded(f"{size} bytes were announced, {len(self.held)} came")
        found = bytes(self.held[:size])
        del self.held[:size]
        return found

    def drain(self) -> None:
        """Everything until the server closes, into `held`."""
        while self.receive_more():
            pass

    def read_rest(self) -> bytes:
        """Everything until the server closes."""
        self.drain()
        found = bytes(self.held)
        self.held.clear()
        return found

    def is_quiet(self, for_s: float) -> bool:
        """Whether nothing comes for so long."""
        if self.held:
            return False
        try:
            self.receive_more(for_s)
        except TimeoutError:
            return True
        return False

    def head(self) -> Reply:
        """Status line and headers; the body stays where it is."""
        lines = self.read_until(b"\r\n\r\n").decode("latin-1")[:-4].split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        pairs = [line.split(":", 1) for line in lines[1:]]
        return Reply(version, int(status), tuple((name.lower(), value.strip(" \t")) for name, value in pairs), b"")

    def chunk(self, within_s: float | None = None) -> bytes:
        """One chunk of a chunked body; empty: the last one."""
        size = int(self.read_until(b"\r\n", within_s)[:-2].decode("ascii"), 16)
        data = self.read_exactly(size + 2, within_s)
        assert data.endswith(b"\r\n"), "a chunk ends with its line"
        return data[:-2]

    def reply(self, *, bodyless: bool = False) -> Reply:
        """The next reply, whole. `bodyless`: it answers a HEAD."""
        head = self.head()
        while head.status == 100:
            head = self.head()
        length, coding = head.header("content-length"), head.header("transfer-encoding")
        assert length is None or coding is None, "one way to tell the end of a body"
        if bodyless or head.status in (204, 304):
            return head
        if coding is not None:
            assert coding == "chunked", coding
            parts = []
            while part := self.chunk():
                parts.append(part)
            return head._replace(body=b"".join(parts))
        return head._replace(body=self.read_rest() if length is None else self.read_exactly(int(length)))


class Client:
    """Requests over one connection that is kept, and made anew where the server said that it closes it."""

    def __init__(self, address: Address, *, key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.address, self.key, self.patience_s = address, key, timeout_s
        self._wire: RawConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    @property
    def connection(self) -> RawConnection:
        if self._wire is None:
            self._wire = RawConnection(self.address, self.patience_s)
        return self._wire

    def begin(self, method: str, target: str, body: bytes | None = None, headers: Headers = ()) -> None:
        """Send a request and do not wait."""
        self.connection.send(self.encode_request(method, target, body, headers))

    def encode_request(self, method: str, target: str, body: bytes | None = None, headers: Headers = ()) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.address.host}:{self.address.port}"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        lines += [f"{name}: {value}" for name, value in headers]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")

    def end(self, *, bodyless: bool = False) -> Reply:
        """The reply to what was begun."""
        reply = self.connection.reply(bodyless=bodyless)
        if reply.header("connection") == "close":
            self.close()
        return reply

    def request(self, method: str, target: str, body: bytes | None = None, headers: Headers = ()) -> Reply:
        try:
            self.begin(method, target, body, headers)
            return self.end(bodyless=method == "HEAD")
        except BaseException:
            self.close()  # what is left on the wire would be taken for the next reply
            raise

    def get(self, target: str, headers: Headers = ()) -> Reply:
        return self.request("GET", target, headers=headers)

    def send(self, method: str, target: str, value: object, headers: Headers = ()) -> Reply:
        """A request with a JSON body."""
        return self.request(method, target, dumps(value), [JSON, *headers])

    def put(self, target: str, value: object = None) -> Reply:
        """PUT with a JSON body, or with none at all."""
        return self.request("PUT", target) if value is None else self.send("PUT", target, value)

    def post(self, target: str, value: object = None, headers: Headers = ()) -> Reply:
        if value is None:
            return self.request("POST", target, headers=headers)
        return self.send("POST", target, value, headers)

    def delete(self, target: str) -> Reply:
        return self.request("DELETE", target)
