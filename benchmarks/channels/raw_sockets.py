"""Rooms that are measured: one publisher and so many receivers on raw sockets, ours and the peers', driven alike.

    say(count)       bytes that publish so many messages
    acked(data)      how many acks these bytes hold
    heard(line)      how many messages a receiver has got with what it just read; Redis Streams are asked for more there

Messages carry a mark that is nowhere else, and are counted by it. Nothing is parsed, whoever sends it.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from os import urandom

from benchmarks.server.load_generator import connect
from benchmarks.server.peers import NAME, _jetstream, resp
from benchmarks.server.processes import Server

MARK = b"~m~"
CHANNEL = "!bench@example.org"
_RECV_BYTES = 256 << 10
_numbers = count(1)


class MarkCounter:
    """How often a mark came, also where it came in two pieces."""

    def __init__(self, mark: bytes) -> None:
        self._mark, self._tail = mark, b""

    def take(self, data: bytes) -> int:
        found = (self._tail + data).count(self._mark)
        rest = len(self._mark) - 1
        self._tail = (self._tail + data)[-rest:] if rest else b""
        if self._mark in self._tail:
            self._tail = b""
        return found


class Receiver:
    """One receiver."""

    def __init__(self, sock: socket.socket, after: Callable[[Receiver, bytes], None] | None = None) -> None:
        self.sock, self._after, self._marks = sock, after, MarkCounter(MARK)

    def read(self) -> int:
        """Messages of what there is to read."""
        data = self.sock.recv(_RECV_BYTES)
        if not data:
            raise ConnectionError("a receiver was cut off")
        found = self._marks.take(data)
        if self._after is not None:
            self._after(self, data)
        return found


@dataclass(frozen=True, slots=True)
class PubSubSession:
    """A publisher and its receivers, all of them there."""

    publisher: socket.socket
    encode_message: Callable[[int], bytes]
    ack: bytes  # the mark of an ack
    lines: list[Receiver]


OpenSession = Callable[[int], Iterator[PubSubSession]]


def payload(size: int = 256) -> bytes:
    return MARK + b"x" * (size - len(MARK))


# ── ours, over WebSocket ──────────────────────────────────────────────────────────────────────────


def frame(text: bytes) -> bytes:
    """A text frame of a client, its mask all zeros."""
    size = len(text)
    head = bytes([0x81, 0x80 | size]) if size < 126 else bytes([0x81, 0xFE]) + size.to_bytes(2, "big")
    return head + bytes(4) + text


def _upgraded(port: int, user: str) -> socket.socket:
    sock = connect(port)
    head = (
        "GET /v0/ws HTTP/1.1",
        "Host: localhost",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
    )
    who = ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Authorization: Bearer root", f"X-Tidelog-User: {user}")
    sock.sendall("\r\n".join((*head, *who, "", "")).encode())
    _until(sock, b"\r\n\r\n")
    return sock


def _until(sock: socket.socket, mark: bytes) -> bytes:
    came = b""
    while mark not in came:
        data = sock.recv(_RECV_BYTES)
        if not data:
            raise ConnectionError(f"closed behind {came[-300:]!r}")
        came += data
    return came


def _command(sock: socket.socket, command: dict[str, object]) -> None:
    sock.sendall(frame(json.dumps(command).encode()))
    came = _until(sock, b"}")
    if b'"op":"error"' in came:
        raise RuntimeError(came)


def tidelog_channel(server: Server, persist: bool, members: int) -> Iterator[PubSubSession]:
    room = f"!bench{next(_numbers)}@example.org"
    config: dict[str, object] = {"persist": persist, "max_clients": 1000}
    publisher = _upgraded(server.port, "sender@example.org")
    _command(publisher, {"op": "channel_join", "channel": room, "config": config})
    lines = []
    for number in range(members):
        sock = _upgraded(server.port, f"u{number}@example.org")
        _command(sock, {"op": "channel_join", "channel": room})
        _command(sock, {"op": "channel_subscribe", "channel": room})
        lines.append(Receiver(sock))
    text = json.dumps({"op": "channel_publish", "channel": room, "payload": payload().decode()}).encode()
    # Whoever came first was told of all who came later; presence has no mark.
    try:
        yield PubSubSession(publisher, partial(_times, frame(text)), b'"channel_ack"', lines)
        _command(publisher, {"op": "channel_delete", "channel": room})
    finally:
        for sock in (publisher, *(line.sock for line in lines)):
            sock.close()


def _times(ask: bytes, number: int) -> bytes:
    return ask * number


# ── Redis ─────────────────────────────────────────────────────────────────────────────────────────


def redis_pubsub(server: Server, members: int) -> Iterator[PubSubSession]:
    name = b"bench%d" % next(_numbers)
    publisher = connect(server.port)
    lines = []
    for _ in range(members):
        sock = connect(server.port)
        sock.sendall(resp(b"SUBSCRIBE", name))
        _until(sock, b":1\r\n")
        lines.append(Receiver(sock))
    try:
        yield PubSubSession(publisher, partial(_times, resp(b"PUBLISH", name, payload())), b":", lines)
    finally:
        for sock in (publisher, *(line.sock for line in lines)):
            sock.close()


_ID = re.compile(rb"\$\d+\r\n(\d+-\d+)\r\n\*2\r\n")


class _Tail:
    """A reader of a stream: it asks again behind the last id when an answer is whole, however many entries that had."""

    def __init__(self, name: bytes) -> None:
        self._name, self._held = name, b""

    def ask(self, sock: socket.socket, after: bytes) -> None:
        sock.sendall(resp(b"XREAD", b"BLOCK", b"0", b"STREAMS", self._name, after))

    def __call__(self, line: Receiver, data: bytes) -> None:
        held = self._held = self._held + data
        head = re.match(rb"\*1\r\n\*2\r\n\$\d+\r\n[^\r]*\r\n\*(\d+)\r\n", held)
        if head is None or held.count(MARK) < int(head[1]) or not held.endswith(b"\r\n"):
            return
        self._held = b""
        self.ask(line.sock, _ID.findall(held)[-1])


def redis_streams(server: Server, members: int) -> Iterator[PubSubSession]:
    name = b"bench%d" % next(_numbers)
    publisher = connect(server.port)
    publisher.sendall(resp(b"XADD", name, b"*", b"d", b"first"))
    _until(publisher, b"\r\n")
    lines = []
    for _ in range(members):
        tail = _Tail(name)
        line = Receiver(connect(server.port), tail)
        tail.ask(line.sock, b"$")
        lines.append(line)
    _wait_idle(server)
    try:
        yield PubSubSession(publisher, partial(_times, resp(b"XADD", name, b"*", b"d", payload())), b"$", lines)
        publisher.sendall(resp(b"DEL", name))
        publisher.recv(_RECV_BYTES)
    finally:
        for sock in (publisher, *(line.sock for line in lines)):
            sock.close()


def _wait_idle(server: Server) -> None:
    """Whatever was asked before has been read."""
    with connect(server.port) as sock:
        sock.sendall(resp(b"PING"))
        _until(sock, b"PONG")


# ── JetStream ─────────────────────────────────────────────────────────────────────────────────────


def jetstream(server: Server, members: int) -> Iterator[PubSubSession]:
    greeting = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
    _jetstream(server.port, "STREAM.PURGE")
    lines = []
    for _ in range(members):
        sock, inbox = connect(server.port), f"_INBOX.{urandom(6).hex()}"
        sock.sendall(greeting + f"SUB {inbox} 1\r\nPING\r\n".encode())
        _until(sock, b"PONG\r\n")
        config = {"deliver_subject": inbox, "deliver_policy": "new", "ack_policy": "none", "replay_policy": "instant"}
        _jetstream(server.port, "CONSUMER.CREATE", {"stream_name": NAME, "config": config})
        lines.append(Receiver(sock))
    publisher = connect(server.port)
    publisher.sendall(greeting + b"SUB _INBOX.acks 1\r\nPING\r\n")
    _until(publisher, b"PONG\r\n")
    said = payload()
    ask = b"PUB %b _INBOX.acks %d\r\n%b\r\n" % (NAME.encode(), len(said), said)
    try:
        yield PubSubSession(publisher, partial(_times, ask), b'"seq"', lines)
    finally:
        for sock in (publisher, *(line.sock for line in lines)):
            sock.close()


@contextmanager
def open_session(opened: OpenSession, members: int) -> Iterator[PubSubSession]:
    with contextmanager(opened)(members) as found:
        yield found
