"""Clients that attack a server: raw sockets that send more than a server should handle, or read less than it sends.

Each attack is a function that yields bounded slices of bytes for one connection. A test sends a slice, has another
client served, and sends the next; the benchmark sends them back to back. Nothing here uses an HTTP library: an attacker
would not either.
"""

from __future__ import annotations

import resource
import select
import socket
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from tests.contract_http.client import Address
from tests.contract_http.server import Server

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 0x1, 0x4
CALM: Final = 11  # ENHANCE_YOUR_CALM
SLICE_BYTES: Final = 64 << 10
_LIMIT_S: Final = 60.0  # only so that a mistake fails and does not hang


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


def h2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def h2_settings(**values: int) -> bytes:
    known = {"initial_window_size": 4}
    return h2_frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", known[name], value) for name, value in values.items()))


def h2_head(path: str, method: str = "GET", *more: tuple[str, str]) -> bytes:
    """A header block of literals that are not indexed (RFC 7541, 6.2.2): no state on either side."""
    fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost"), *more]
    made = bytearray()
    for name, value in fields:
        made.append(0)
        for text in (name.encode(), value.encode()):
            made += _hpack_length(len(text)) + text
    return bytes(made)


def _hpack_length(size: int) -> bytes:
    if size < 127:
        return bytes((size,))
    size -= 127
    made = bytearray((127,))
    while size >= 128:
        made.append(size & 127 | 128)
        size >>= 7
    return bytes((*made, size))


def h2_get(stream: int, path: str, *more: tuple[str, str]) -> bytes:
    return h2_frame(HEADERS, END_STREAM | END_HEADERS, stream, h2_head(path, "GET", *more))


def ws_frame(opcode: int, data: bytes = b"", *, fin: bool = True) -> bytes:
    """Masked with zeros, which changes nothing of the data. Up to 125 bytes."""
    return bytes((0x80 * fin | opcode, 0x80 | len(data))) + b"\0\0\0\0" + data


# ── one connection ────────────────────────────────────────────────────────────────────────────────


class H2Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class RawSocket:
    """A socket that sends what it is given, and reads only when it is asked to."""

    def __init__(self, address: Address, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(_LIMIT_S)
        self.socket.connect(address)
        self.held = bytearray()
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send all of it, and take in what comes meanwhile; False where the server closed the connection."""
        view = memoryview(data)
        self.socket.setblocking(False)
        try:
            while view and not self.closed:
                self._receive()
                try:
                    view = view[self.socket.send(view) :]
                except BlockingIOError:
                    self._wait()
                except OSError:
                    self.closed = True
        finally:
            self.socket.settimeout(_LIMIT_S)
        return not self.closed

    def push(self, data: bytes) -> None:
        """Send all of it and read nothing."""
        self.socket.sendall(data)

    def _wait(self) -> None:
        ready = select.select([self.socket], [self.socket], [], _LIMIT_S)
        assert ready[0] or ready[1], "the server neither reads nor writes"

    def _receive(self) -> None:
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
            return
        self.held += data
        self.closed = not data

    def receive_more(self) -> bool:
        """Wait for some more bytes; False at the end."""
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionError:
            data = b""
        self.held += data
        self.closed = self.closed or not data
        return bool(data)

    def read_rest(self) -> bytes:
        while not self.closed and self.receive_more():
            pass
        return bytes(self.held)

    def frames(self) -> Iterator[H2Frame]:
        """The next frames of HTTP/2, until the connection ends."""
        while True:
            while len(self.held) >= 9 and len(self.held) >= 9 + (size := int.from_bytes(self.held[:3])):
                frame = H2Frame(
                    self.held[3], self.held[4], int.from_bytes(self.held[5:9]), bytes(self.held[9 : 9 + size])
                )
                del self.held[: 9 + size]
                yield frame
            if self.closed or not self.receive_more():
                return

    def goaway(self) -> int | None:
        """The code with which the server ends an HTTP/2 connection; None where it is just closed."""
        for frame in self.frames():
            if frame.kind == GOAWAY:
                return int.from_bytes(frame.payload[4:8])
        return None


# ── floods ────────────────────────────────────────────────────────────────────────────────────────


class Flood(NamedTuple):
    """An attack by input. `opening` begins the connection, `slices` yields so many frames in bounded pieces."""

    name: str
    opening: Callable[[str], bytes]  # by the name of a topic
    slices: Callable[[int], Iterator[bytes]]  # by the number of frames
    frames: int  # frames of the long form, as they were reported
    ends: str  # what ends it: "goaway", "1008", or "" where it is handled to the end


def _cut(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """In slices of SLICE_BYTES at most, or one piece."""
    held = bytearray()
    for piece in pieces:
        if held and len(held) + len(piece) > SLICE_BYTES:
            yield bytes(held)
            held.clear()
        held += piece
    if held:
        yield bytes(held)


def _repeat(piece: bytes) -> Callable[[int], Iterator[bytes]]:
    return lambda count: _cut(piece for _ in range(count))


def _h2_open(topic: str) -> bytes:  # noqa: ARG001 - nothing is asked for: a flood needs no key
    return PREFACE + h2_settings()


def _h2_open_post(topic: str) -> bytes:
    head = h2_head(f"/v0/topics/{topic}", "POST", ("content-type", "application/json"))
    return PREFACE + h2_settings() + h2_frame(HEADERS, END_HEADERS, 1, head)


def _ws_open(topic: str) -> bytes:  # noqa: ARG001
    key = b64encode(b"0123456789abcdef")
    return (
        b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n" % key
    )


def _ws_open_message(topic: str) -> bytes:
    return _ws_open(topic) + ws_frame(1, b'"', fin=False)


def _h1_open(topic: str) -> bytes:  # noqa: ARG001
    return b""


def _h1_open_chunks(topic: str) -> bytes:
    return (
        b"POST /v0/topics/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" % topic.encode()
    )


def _resets(count: int) -> Iterator[bytes]:
    streams = range(1, 2 * count, 2)
    return _cut(h2_get(stream, "/v0/health") + h2_frame(RST_STREAM, 0, stream, b"\0\0\0\x08") for stream in streams)


def _provoked_resets(count: int) -> Iterator[bytes]:
    """The server itself resets a stream whose window overflows."""
    overflow = b"\x7f\xff\xff\xff"
    head = h2_head("/v0/topics/none", "POST", ("content-type", "application/json"))
    streams = range(1, 2 * count, 2)
    return _cut(
        h2_frame(HEADERS, END_HEADERS, stream, head) + h2_frame(WINDOW_UPDATE, 0, stream, overflow)
        for stream in streams
    )


def _windows(count: int) -> Iterator[bytes]:
    return _cut(h2_settings(initial_window_size=number % 2) for number in range(count))


def _continuations(count: int) -> Iterator[bytes]:
    """Header blocks of 60 empty pieces, each of which is whole in the end."""
    head = h2_head("/v0/health")
    blocks = range(1, 2 * (count // 60) + 1, 2)
    return _cut(
        h2_frame(HEADERS, END_STREAM, stream, head)
        + h2_frame(CONTINUATION, 0, stream) * 59
        + h2_frame(CONTINUATION, END_HEADERS, stream)
        for stream in blocks
    )


FLOODS: Final = (
    Flood("HTTP/2 PINGs", _h2_open, _repeat(h2_frame(PING, 0, 0, b"12345678")), 300_000, "goaway"),
    Flood("HTTP/2 SETTINGS", _h2_open, _repeat(h2_settings()), 200_000, "goaway"),
    Flood("HTTP/2 windows by SETTINGS", _h2_open, _windows, 200_000, "goaway"),
    Flood("HTTP/2 PRIORITY", _h2_open, _repeat(h2_frame(PRIORITY, 0, 1, b"\0\0\0\0\x10")), 200_000, "goaway"),
    Flood("HTTP/2 WINDOW_UPDATE", _h2_open, _repeat(h2_frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")), 200_000, "goaway"),
    Flood("HTTP/2 empty DATA", _h2_open_post, _repeat(h2_frame(DATA, 0, 1)), 200_000, "goaway"),
    Flood("HTTP/2 CONTINUATION", _h2_open, _continuations, 100_000, "goaway"),
    Flood("HTTP/2 rapid reset", _h2_open, _resets, 20_000, "goaway"),
    Flood("HTTP/2 provoked resets", _h2_open, _provoked_resets, 20_000, "goaway"),
    Flood("WebSocket pings", _ws_open, _repeat(ws_frame(9)), 200_000, "1008"),
    Flood("WebSocket fragments", _ws_open_message, _repeat(ws_frame(0, b"ab", fin=False)), 500_000, "1008"),
    Flood(
        "HTTP/1.1 pipelined requests",
        _h1_open,
        _repeat(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        20_000,
        "",
    ),
    Flood("HTTP/1.1 chunks of one byte", _h1_open_chunks, _repeat(b"1\r\n \r\n"), 1_000_000, ""),
)


# ── peers that do not read ────────────────────────────────────────────────────────────────────────


def zero_windows(address: Address, topic: str, count: int, window: int = 0) -> RawSocket:
    """A connection with so many bulk reads, each of which may send so many bytes."""
    raw = RawSocket(address)
    raw.send(PREFACE + h2_settings(initial_window_size=window))
    raw.send(b"".join(h2_get(2 * number + 1, f"/v0/topics/{topic}/records") for number in range(count)))
    return raw


def silent_reader(address: Address, target: str) -> RawSocket:
    """An HTTP/1.1 connection that asks and never reads."""
    raw = RawSocket(address, receive_bytes=4096)
    raw.push(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return raw


# ── the server's memory ───────────────────────────────────────────────────────────────────────────


def memory(pid: int) -> dict[str, int]:
    """`VmSize`, `VmRSS` and `VmHWM` (the peak of `VmRSS`) of a process in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0].startswith("Vm")}


def limit_memory(server: Server, more_bytes: int) -> None:
    """Let a running server map so much more memory than it has, and no byte beyond."""
    limit = memory(server.pid)["VmSize"] + more_bytes
    resource.prlimit(server.pid, resource.RLIMIT_AS, (limit, limit))
