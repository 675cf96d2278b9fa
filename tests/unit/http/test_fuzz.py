"""Bytes that no client should send (G58 in spirit): no exception in the loop, no hang, and the listener serves on.

Method: chance is seeded and its seed is the test's parameter. Each round sends garbage of some kind over its own
connection, in pieces of any size, and then ends its side; the server must end the connection too. Whatever reaches
the loop's exception handler fails the test, and so does a connection that is still counted, or a request that began
and was neither handled nor given back.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from tests.unit.http.harness import LOOPS, ListenerHarness

from tidelog.http.limits import Limits

ROUNDS = 50
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LIMITS = Limits(
    header_timeout_s=0.5,
    body_timeout_s=0.5,
    idle_timeout_s=0.5,
    linger_s=0.2,
    header_bytes_max=4000,
    target_bytes_max=2000,
    discard_bytes_max=20_000,
    ahead_bytes_max=5000,
    pipelined_max=5,
    write_high_bytes=20_000,
    write_low_bytes=5000,
    messages_max=3,
    resets_max=5,
)

WORDS = [
    *(
        b"GET",
        b"POST",
        b"HEAD",
        b"PRI",
        b"CONNECT",
        b"OPTIONS",
        b" ",
        b"/",
        b"*",
        b"/hello",
        b"/echo",
        b"/slurp",
        b"/ws",
    ),
    *(b"/stream", b"/refuse", b"/empty", b"http://a/", b"?x=%zz", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/2.0\r\n"),
    *(
        b"Host: t\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 99999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"\r\n",
    ),
    *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n"),
    *(b"Upgrade: h2c\r\n", b"Sec-WebSocket-Version: 13\r\n", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"),
    *(
        b"Accept-Encoding: gzip\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Content-Encoding: zstd\r\n",
        b"\r\n\r\n",
        b"hello",
    ),
    *(
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"fffffff\r\n",
        b"\x81\x85abcd",
        b"\x88\x80abcd",
        b"\0",
        b"\xff",
        b"\n",
        b":",
        b"x: y\r\n",
    ),
]

WHOLE = [
    b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /stream?n=20 HTTP/1.1\r\nHost: t\r\nAccept-Encoding: zstd\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /slurp HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000,
    b"GET /ws HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\x81\x85abcd\x09\x07\x0f\x08\x0e\x88\x80abcd",
    b"GET /big?n=50000 HTTP/1.1\r\nHost: t\r\nAccept-Encoding: gzip\r\n\r\n",
]


def noise(random: Random) -> bytes:
    return random.randbytes(random.randrange(1, 2000))


def words(random: Random) -> bytes:
    return b"".join(random.choice(WORDS) for _ in range(random.randrange(1, 60)))


def damaged(random: Random) -> bytes:
    """Requests of which some bytes are not what they were."""
    data = bytearray(b"".join(random.choice(WHOLE) for _ in range(random.randrange(1, 8))))
    for _ in range(random.randrange(0, 4)):
        at = random.randrange(len(data))
        what = random.randrange(3)
        if what == 0:
            data[at] = random.randrange(256)
        elif what == 1:
            del data[at : at + random.randrange(1, 20)]
        else:
            data[at:at] = random.choice(WORDS)
        if not data:
            break
    return bytes(data)


def frames(random: Random) -> bytes:
    """HTTP/2 whose frames have any type, flags, stream and length; now and then the length is true."""
    data = bytearray(PREFACE + b"\0\0\0\4\0\0\0\0\0")
    for _ in range(random.randrange(1, 30)):
        payload = random.randbytes(random.randrange(0, 40))
        length = len(payload) if random.random() < 0.9 else random.randrange(1 << 14)
        kind, flags = random.randrange(12), random.choice((0, 1, 4, 5, 8, random.randrange(256)))
        data += length.to_bytes(3, "big") + bytes([kind, flags])
        data += random.choice((0, 1, 3, 5, random.randrange(1 << 31))).to_bytes(4, "big") + payload
    return bytes(data)


def damaged_frames(random: Random) -> bytes:
    """A real HTTP/2 client's bytes, some of them changed."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    for _ in range(random.randrange(1, 10)):
        number = client.get_next_available_stream_id()
        target = random.choice(("/hello", "/echo", "/slurp", "/stream", "/refuse", "/later", "/big?n=200000"))
        fields = [(":method", "POST"), (":path", target), (":scheme", "http"), (":authority", "t")]
        client.send_headers(number, fields)
        client.send_data(number, b"x" * random.randrange(0, 2000), end_stream=random.random() < 0.7)
        if random.random() < 0.3:
            client.reset_stream(number)
        if random.random() < 0.2:
            client.ping(b"12345678")
    data = bytearray(client.data_to_send())
    for _ in range(random.randrange(0, 4)):
        at = random.randrange(len(PREFACE), len(data))
        data[at] = random.randrange(256)
    return bytes(data)


def websocket(random: Random) -> bytes:
    """A handshake, and then frames with any first byte and length."""
    data = bytearray(WHOLE[5].partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    for _ in range(random.randrange(1, 20)):
        payload = random.randbytes(random.randrange(0, 126))
        first = random.choice((0x81, 0x82, 0x01, 0x80, 0x89, 0x8A, 0x88, random.randrange(256)))
        data += (
            bytes([first, 0x80 | len(payload) if random.random() < 0.95 else random.randrange(256)]) + b"abcd" + payload
        )
    return bytes(data)


KINDS: dict[str, Callable[[Random], bytes]] = {
    "noise": noise,
    "words": words,
    "damaged": damaged,
    "frames": frames,
    "damaged frames": damaged_frames,
    "websocket": websocket,
}


def one(listener: ListenerHarness, data: bytes, random: Random) -> None:
    """Send it all, read whatever comes, leave in one of three ways."""
    with listener.connect() as connection, suppress(ConnectionError):
        while data:
            size = random.choice((1, 7, 100, 1000, len(data)))
            connection.send(data[:size])
            data = data[size:]
        how = random.randrange(3)
        if how == 0:
            connection.sock.shutdown(socket.SHUT_WR)
            while connection.sock.recv(1 << 16):  # the server ends its side too: a hang would time out here
                pass
        elif how == 1:
            connection.sock.settimeout(0.02)
            with suppress(TimeoutError):
                while connection.sock.recv(1 << 16):
                    pass


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_garbage_costs_its_own_connection_only(
    loop: str, name: str, seed: int, record_count: Callable[[str, int], None]
) -> None:
    random = Random(f"{name} {seed}")
    with ListenerHarness(loop, LIMITS) as listener:
        for _ in range(ROUNDS):
            one(listener, KINDS[name](random), random)
        listener.connections(0)
        assert listener.call(lambda: listener.app.open) == 0, f"seed {seed}"
        with listener.connect() as connection:
            assert connection.get("/hello").status == 200
    record_count("rounds of garbage", ROUNDS)
