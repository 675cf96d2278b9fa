"""WebSockets (contract 2.10, 3.9): the handshake, messages, both ends of the end, and peers that are slow or wrong.

The client is the `websockets` library's; where bytes matter, a raw connection that was shaken hands with by hand.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.unit.http.harness import TIMEOUT_S, ListenerHarness, RawConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tidelog.http.websocket import WebSocketInbox

KEY = b64encode(b"0123456789abcdef").decode()
SHAKE = (
    "GET %s HTTP/1.1\r\nHost: t\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    f"Sec-WebSocket-Key: {KEY}\r\n"
)
V13 = "Sec-WebSocket-Version: 13\r\n\r\n"


@contextmanager
def dial(listener: ListenerHarness, path: str = "/ws") -> Iterator[ClientConnection]:
    host, port = listener.listener.address
    url = f"ws://{host}:{port}{path}"
    with connect(url, open_timeout=TIMEOUT_S, close_timeout=TIMEOUT_S, proxy=None, max_size=None) as client:
        yield client


def frame(opcode: int, data: bytes, fin: bool = True, mask: bytes = b"abcd") -> bytes:
    """A frame as a client sends it, written down from RFC 6455."""
    key = (mask * (len(data) // 4 + 1))[: len(data)]
    masked = (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(len(data), "big")
    if len(data) < 126:
        length = bytes([0x80 | len(data)])
    elif len(data) < 1 << 16:
        length = bytes([0x80 | 126]) + len(data).to_bytes(2, "big")
    else:
        length = bytes([0x80 | 127]) + len(data).to_bytes(8, "big")
    return bytes([0x80 * fin | opcode]) + length + mask + masked


def unframe(connection: RawConnection) -> tuple[int, bytes]:
    first, second = connection.read_exactly(2)
    assert second < 128, "a server does not mask"
    size = second if second < 126 else int.from_bytes(connection.read_exactly(2 if second == 126 else 8), "big")
    return first, connection.read_exactly(size)


def shake(connection: RawConnection, path: str = "/ws") -> None:
    connection.send((SHAKE % path + V13).encode())
    assert connection.head().status == 101


# The handshake --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytewise", [False, True])
def test_the_handshake(listener: ListenerHarness, connection: RawConnection, bytewise: bool) -> None:
    """RFC 6455, 4.2.2, whose own example is the key. Method: a frame comes in the same piece as the request."""
    example = SHAKE.replace(KEY, "dGhlIHNhbXBsZSBub25jZQ==") % "/ws" + V13
    data = example.encode() + frame(1, b"early")
    if bytewise:
        listener.send_bytewise(connection, data)
    else:
        connection.send(data)
    head = connection.head()
    assert head.status == 101
    assert head.headers == {
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=",
    }
    assert unframe(connection) == (0x81, b"early")
    assert listener.listener.connections == 1


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (SHAKE + "Sec-WebSocket-Version: 8\r\n\r\n", 426),
        (SHAKE + "\r\n", 426),
        (SHAKE.replace(KEY, "c2hvcnQ=") + V13, 400),
        (SHAKE.replace(KEY, "not base64") + V13, 400),
        (SHAKE.replace("Sec-WebSocket-Key", "X") + V13, 400),
        (SHAKE.replace("GET", "POST") + V13, 400),
        (SHAKE + "Content-Length: 3\r\n" + V13 + "abc", 400),
        (SHAKE + "Transfer-Encoding: chunked\r\n" + V13 + "0\r\n\r\n", 400),
    ],
)
def test_authorised_client_gets_the_error_of_its_handshake(
    listener: ListenerHarness, connection: RawConnection, asked: str, status: int
) -> None:
    """Method: after a request that waits for its answer, and then to an application that refuses by the head."""
    more = "GET /hello?after HTTP/1.1\r\nHost: t\r\n\r\n"
    connection.send(f"GET /later HTTP/1.1\r\nHost: t\r\n\r\n{asked % '/ws'}{more}".encode())
    assert listener.app.seen.wait() == "parked /later"
    listener.call(listener.app.answer_parked)
    assert connection.reply().body == b"at last"
    reply = connection.reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert reply.headers.get("sec-websocket-version") == ("13" if status == 426 else None)
    assert connection.read_rest() == b"", "the input after it is ignored"
    assert listener.app.seen.wait() == "abandoned /ws"
    assert listener.app.open == 0
    with listener.connect() as other:
        other.send((asked % "/refuse").encode())
        reply = other.reply()
        assert (reply.status, reply.body, reply.headers["connection"]) == (401, b"no", "close")
    assert listener.app.open == 0


def test_websocket_path_without_upgrade_is_a_normal_request(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    """Contract 2.10: the application's own 400."""
    assert connection.get("/ws").body == b"not a websocket"
    assert connection.get("/ws", "Upgrade: websocket", "Sec-WebSocket-Version: 13").body == b"not a websocket"
    assert connection.get("/hello").status == 200
    assert [request.upgrade for request in listener.app.requests] == [False] * 3


def test_an_upgrade_that_the_application_declines_leaves_an_http_connection(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    """The input after the request is HTTP then. Method: once answered while it is parsed, once later."""
    more = b"GET /hello?after HTTP/1.1\r\nHost: t\r\n\r\n"
    connection.send((SHAKE % "/hello" + V13).encode() + more)
    assert connection.reply().body == b'{"hello":""}'
    assert connection.reply().body == b'{"hello":"after"}'
    connection.send((SHAKE % "/later" + V13).encode() + more[:10])
    assert listener.app.seen.wait() == "parked /later"
    connection.send(more[10:])
    listener.call(listener.app.answer_parked)
    assert connection.reply().body == b"at last"
    assert connection.reply().body == b'{"hello":"after"}'
    with pytest.raises(InvalidStatus), dial(listener, "/nothing"):
        pass


def test_an_upgrade_waits_for_the_answers_before_it(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n" + (SHAKE % "/ws" + V13).encode() + frame(1, b"hi"))
    assert listener.app.seen.wait() == "parked /later"
    listener.call(listener.app.answer_parked)
    assert connection.reply().body == b"at last"
    assert connection.head().status == 101
    assert unframe(connection) == (0x81, b"hi")


# Messages -------------------------------------------------------------------------------------------


def test_messages_go_both_ways(listener: ListenerHarness) -> None:
    with dial(listener) as client:
        for text in ("", "grüße", "x" * 125, "x" * 126, "x" * 65536, "x" * 1_000_000):
            client.send(text)
            assert client.recv(TIMEOUT_S) == text
        client.send(b"\0\1\2")
        assert client.recv(TIMEOUT_S) == "binary 3"


def test_fragments_are_one_message(connection: RawConnection) -> None:
    shake(connection)
    smile = "☺".encode()
    connection.send(frame(1, b"a" + smile[:1], fin=False) + frame(9, b"ping") + frame(0, b"", fin=False))
    assert unframe(connection) == (0x8A, b"ping"), "between fragments, at once"
    connection.send(frame(0, smile[1:]) + frame(2, b"12", fin=False) + frame(0, b"3"))
    assert unframe(connection) == (0x81, b"a" + smile)
    assert unframe(connection) == (0x81, b"binary 3")


def test_frames_may_arrive_byte_by_byte(listener: ListenerHarness, connection: RawConnection) -> None:
    shake(connection)
    listener.send_bytewise(connection, frame(1, b"x" * 200) + frame(9, b"?"))
    assert {unframe(connection), unframe(connection)} == {(0x81, b"x" * 200), (0x8A, b"?")}


# The end --------------------------------------------------------------------------------------------


def test_close_by_the_client(listener: ListenerHarness, connection: RawConnection) -> None:
    shake(connection)
    connection.send(frame(8, b"\x03\xe8bye"))
    assert unframe(connection) == (0x88, b"\x03\xe8bye")
    assert connection.read_rest() == b""
    connection.sock.close()
    assert [listener.app.seen.wait() for _ in range(3)] == ["ws open", "ws closed", "ws over"]
    listener.connections(0)


@pytest.mark.parametrize(
    ("said", "code", "reason"), [("close", 4000, "as asked"), ("return", 1000, ""), ("fail", 1011, "")]
)
def test_the_handler_closes(listener: ListenerHarness, said: str, code: int, reason: str) -> None:
    with dial(listener) as client:
        client.send(said)
        with pytest.raises(ConnectionClosed):
            client.recv(TIMEOUT_S)
        assert (client.close_code, client.close_reason) == (code, reason)
    assert listener.expected_errors() == (["planted"] if said == "fail" else [])
    listener.connections(0)


def test_client_that_does_not_answer_a_close_is_disconnected(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(linger_s=0.1) as listener, listener.connect() as connection:
        shake(connection)
        connection.send(frame(1, b"return"))
        assert unframe(connection) == (0x88, b"\x03\xe8")
        assert connection.read_rest() == b""
        listener.connections(0)


def test_disconnect_cancels_the_handler(listener: ListenerHarness, connection: RawConnection) -> None:
    shake(connection, "/ws-deaf")
    assert listener.app.seen.wait() == "ws open"
    connection.sock.close()
    listener.connections(0)


WRONG = {
    "text that is no UTF-8": (1007, frame(1, b"a\xff")),
    "no UTF-8 over fragments": (1007, frame(1, b"a\xe2", fin=False) + frame(0, b"a")),
    "too long": (1009, frame(1, b"x" * (1 << 20) + b"x")),
    "too long in fragments": (1009, frame(1, b"x" * 600_000, fin=False) + frame(0, b"x" * 600_000)),
    "not masked": (1002, b"\x81\x01x"),
    "reserved bits": (1002, b"\xf1\x80abcd"),
    "unknown opcode": (1002, frame(3, b"")),
    "nothing to continue": (1002, frame(0, b"x")),
    "a message in a message": (1002, frame(1, b"x", fin=False) + frame(1, b"x")),
    "a long ping": (1002, frame(9, b"x" * 126)),
    "a close of one byte": (1002, frame(8, b"x")),
}


@pytest.mark.parametrize("name", WRONG)
def test_client_that_breaks_the_protocol_gets_the_reason(
    listener: ListenerHarness, connection: RawConnection, name: str
) -> None:
    code, data = WRONG[name]
    shake(connection)
    assert listener.app.seen.wait() == "ws open"
    connection.send(frame(1, b"before"))
    assert unframe(connection) == (0x81, b"before")
    connection.send(data)
    opcode, reason = unframe(connection)
    assert (opcode, int.from_bytes(reason[:2], "big")) == (0x88, code)
    assert connection.read_rest() == b""
    connection.sock.close()
    assert [listener.app.seen.wait() for _ in range(2)] == ["ws closed", "ws over"]
    listener.connections(0)


# Slow ends ------------------------------------------------------------------------------------------


def test_a_slow_reader_costs_a_bounded_amount(make_listener: Callable[..., ListenerHarness]) -> None:
    with (
        make_listener(write_high_bytes=100_000, write_low_bytes=20_000) as listener,
        listener.connect(1 << 14) as connection,
    ):
        shake(connection, "/ws-flood")
        assert listener.app.seen.wait() == "waiting"
        for _ in range(1000):
            assert unframe(connection) == (0x81, b"f" * 16_000)
        assert 0 < listener.app.seen.peak <= 100_000 + 2 * 16_010
        connection.sock.close()
        assert listener.app.seen.wait() == "flood over"
        listener.connections(0)


def test_a_slow_handler_is_not_read_for(make_listener: Callable[..., ListenerHarness]) -> None:
    """Method: the handler does not listen; the peer can send only so much. Then it listens, and none is missing."""
    with make_listener(messages_max=8, ahead_bytes_max=10_000) as listener, listener.connect() as connection:
        shake(connection, "/ws-deaf")
        assert listener.app.seen.wait() == "ws open"
        connection.sock.settimeout(0.3)
        one = frame(1, b"x" * 90)
        data = one * 200_000
        sent = 0
        with suppress(TimeoutError):
            while sent < len(data):
                sent += connection.sock.send(data[sent : sent + 65536])
        assert sent < len(data), "it is read without end"
        listener.call(listener.app.resume.set)
        connection.sock.settimeout(TIMEOUT_S)
        connection.send(data[sent:] + frame(8, b"\x03\xe8"))
        assert unframe(connection)[0] == 0x88
        assert listener.app.seen.wait() == "ws got 200000"


def test_client_that_pings_and_never_reads_is_not_read(make_listener: Callable[..., ListenerHarness]) -> None:
    limits = {"write_high_bytes": 10_000, "write_low_bytes": 1000, "control_frames_max": 0}
    with make_listener(**limits) as listener, listener.connect(1 << 14) as connection:
        shake(connection)
        connection.sock.settimeout(0.3)
        data = frame(9, b"x" * 125) * 400_000
        sent = 0
        with suppress(TimeoutError):
            while sent < len(data):
                sent += connection.sock.send(data[sent : sent + 65536])
        assert sent < len(data), "pongs pile up without end"


def test_draining_leaves_the_end_to_the_handler(listener: ListenerHarness) -> None:
    """Contract 1.2: every WebSocket gets its own farewell."""
    with dial(listener) as client:
        client.send("a")
        assert client.recv(TIMEOUT_S) == "a"
        draining = asyncio.run_coroutine_threadsafe(listener.listener.drain(TIMEOUT_S), listener.loop)
        client.send("b")
        assert client.recv(TIMEOUT_S) == "b"
        assert not draining.done()
        client.send("return")
        with pytest.raises(ConnectionClosed):
            client.recv(TIMEOUT_S)
        assert draining.result(TIMEOUT_S) is True


def test_the_inbox_counts_messages_by_their_bytes_in_utf_8() -> None:
    """Characters were subtracted for bytes that were added."""

    async def run() -> None:
        inbox = WebSocketInbox()
        for message, size in (("häß", 5), (b"\xff\xfe", 2), ("x", 1)):
            inbox.put(message, size)
        sizes = []
        while inbox.bytes:
            await inbox.get()
            sizes.append((inbox.taken_bytes, inbox.bytes))
        assert sizes == [(5, 3), (2, 1), (1, 0)]

    asyncio.run(run())
