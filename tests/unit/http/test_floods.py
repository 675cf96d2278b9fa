"""Floods of small frames and requests: a turn of the loop handles a bounded number of them, and floods of frames that
carry nothing end the connection.

Method: turns of the loop are counted by a callback that schedules itself again, and every frame or request is noted
with the turn in which it was handled. Nothing here depends on time.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from tests.unit.http.h2_client import H2Client, H2Response
from tests.unit.http.harness import ListenerHarness
from tests.unit.http.test_websocket import frame, shake, unframe
from websockets.protocol import Protocol

from tidelog.http.exchange import HttpExchange
from tidelog.http.interface import BodyPolicy, Request, Response
from tidelog.http.limits import REQUEST_UNITS, RESERVED_UNITS

UNITS = 64
HEAD = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/hello"), (b":authority", b"t"))
PING = b"\0\0\x08\6\0\0\0\0\0abcdefgh"


class Turns:
    """What was handled in which turn of the loop."""

    def __init__(self) -> None:
        self.number = 0
        self.counts: Counter[int] = Counter()

    def note(self, count: int = 1) -> None:
        self.counts[self.number] += count

    @property
    def most(self) -> int:
        return max(self.counts.values())


@contextmanager
def counted(listener: ListenerHarness) -> Iterator[Turns]:
    turns, on = Turns(), [True]

    def turn() -> None:
        turns.number += 1
        if on:
            listener.loop.call_soon(turn)

    listener.call(turn)
    try:
        yield turns
    finally:
        on.clear()


def noted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, turns: Turns) -> None:
    """Have every call of a library's method noted with the number of what it returned."""
    plain = getattr(owner, name)

    def call(self: Any, *args: Any) -> Any:
        found = plain(self, *args)
        turns.note(len(found))
        return found

    monkeypatch.setattr(owner, name, call)


def take_all(sock: socket.socket, wanted: int) -> bytes:
    held = bytearray()
    while len(held) < wanted and (data := sock.recv(1 << 16)):
        held += data
    return bytes(held)


def test_http2_pings_take_turns(make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch) -> None:
    count = 30_000
    with make_listener(control_frames_max=0, turn_units=UNITS) as listener, H2Client(listener) as connection:
        assert connection.get("/hello").status == 200
        with counted(listener) as turns:
            # The client's own library is the same: only calls on the loop's thread are the server's.
            noted(monkeypatch, H2Connection, "receive_data", turns)
            connection.sock.sendall(PING * count)
            take_all(connection.sock, count * len(PING))
            monkeypatch.undo()
        assert sum(turns.counts.values()) == count, "every one was answered"
        assert turns.most <= UNITS + RESERVED_UNITS


def test_many_connections_that_flood_share_one_budget(
    make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, connections = 2_000, 20
    with make_listener(control_frames_max=0, turn_units=UNITS) as listener, ExitStack() as stack:
        wires = [stack.enter_context(H2Client(listener)) for _ in range(connections)]
        for connection in wires:
            assert connection.get("/hello").status == 200
        with counted(listener) as turns:
            noted(monkeypatch, H2Connection, "receive_data", turns)
            for connection in wires:
                connection.sock.sendall(PING * count)
            for connection in wires:
                take_all(connection.sock, count * len(PING))
            monkeypatch.undo()
        assert sum(turns.counts.values()) == count * connections
        assert turns.most <= 2 * UNITS + connections * RESERVED_UNITS


def test_http2_requests_of_many_fields_take_turns(
    make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field of 4 bytes costs as much as a frame: 64 requests of 1,800 fields in one turn were 2.6 s."""
    count, connections = 10, 8
    with make_listener(turn_units=UNITS) as listener, ExitStack() as stack:
        wires = [stack.enter_context(H2Client(listener)) for _ in range(connections)]
        for connection in wires:
            assert connection.get("/hello").status == 200
        with counted(listener) as turns:
            begin = listener.app.begin

            def noting(request: Request) -> Response | BodyPolicy:
                turns.note()
                return begin(request)

            monkeypatch.setattr(listener.app, "begin", noting)
            head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in HEAD)
            block = head + b"\0\1a\1b" * 1_000
            for connection in wires:
                frames = (
                    len(block).to_bytes(3) + b"\1\5" + (2 * number + 3).to_bytes(4) + block for number in range(count)
                )
                connection.sock.sendall(b"".join(frames) + PING)
            for connection in wires:
                answers = b""
                while PING[-8:] not in answers:
                    answers += connection.sock.recv(1 << 16)
        assert sum(turns.counts.values()) == count * connections
        assert turns.most <= 2, "one that came, and one of the ring"


def test_websocket_pings_take_turns(
    make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 30_000
    with make_listener(control_frames_max=0, turn_units=UNITS) as listener, listener.connect() as connection:
        shake(connection)
        with counted(listener) as turns:
            noted(monkeypatch, Protocol, "events_received", turns)
            connection.send(frame(9, b"") * count)
            take_all(connection.sock, count * 2)
        assert sum(turns.counts.values()) == count
        assert turns.most <= UNITS + RESERVED_UNITS


def test_websocket_fragments_take_turns(
    make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 30_000
    with make_listener(control_frames_max=0, turn_units=UNITS) as listener, listener.connect() as connection:
        shake(connection)
        with counted(listener) as turns:
            noted(monkeypatch, Protocol, "events_received", turns)
            connection.send(frame(1, b"ab", fin=False) + frame(0, b"ab", fin=False) * count + frame(0, b"ab"))
            assert unframe(connection)[1] == b"ab" * (count + 2)
        assert sum(turns.counts.values()) == count + 2
        assert turns.most <= UNITS + RESERVED_UNITS


def test_websocket_messages_in_one_piece_wait_as_bytes(make_listener: Callable[..., ListenerHarness]) -> None:
    """A handler that does not listen: no more messages are decoded than may wait, and all arrive in the end."""
    with make_listener(messages_max=8, turn_units=UNITS) as listener, listener.connect() as connection:
        shake(connection, "/ws-deaf")
        assert listener.app.seen.wait() == "ws open"
        connection.send(frame(1, b"m") * 5_000 + frame(8, b"\x03\xe8"))
        connections = listener.listener._server_state.connections
        inboxes = listener.call(lambda: [len(each._inbox) for each in connections])  # type: ignore[attr-defined]
        assert max(inboxes) <= 8
        listener.call(listener.app.resume.set)
        assert listener.app.seen.wait() == "ws got 5000"


def test_pipelined_requests_take_turns(
    make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 5_000
    with make_listener(turn_units=UNITS) as listener, listener.connect() as connection, counted(listener) as turns:
        begin = listener.app.begin

        def noting(request: Request) -> Response | BodyPolicy:
            turns.note()
            return begin(request)

        monkeypatch.setattr(listener.app, "begin", noting)
        connection.send(b"GET /empty HTTP/1.1\r\nhost: t\r\n\r\n" * count)
        answers = b""
        while answers.count(b"HTTP/1.1 204") < count:
            answers += connection.sock.recv(1 << 20)
        assert sum(turns.counts.values()) == count
        slice_of_heads = (2 << 10) // 32 + 1
        assert turns.most <= 2 * (UNITS // REQUEST_UNITS + slice_of_heads), "what waited, and what came after it"


def test_chunks_of_one_byte_take_turns_and_cost_no_more_than_their_bytes(
    make_listener: Callable[..., ListenerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, most_pieces = 60_000, [0]
    with make_listener(turn_units=UNITS) as listener, listener.connect() as connection, counted(listener) as turns:
        listener.app.limit = count
        feed = HttpExchange.feed_body

        def noting(self: HttpExchange, data: bytes) -> None:
            turns.note()
            feed(self, data)
            most_pieces[0] = max(most_pieces[0], len(self._body_chunks or ()))

        monkeypatch.setattr(HttpExchange, "feed_body", noting)
        connection.send(b"POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.send(b"1\r\nx\r\n" * count + b"0\r\n\r\n")
        answer = take_all(connection.sock, count)
        assert b"200 OK" in answer
        assert sum(turns.counts.values()) == count
        assert turns.most <= 2 * (UNITS * 16 + (16 << 10) // 6 + 1)
        assert most_pieces[0] <= count // (64 << 10) + 3


def flooded(listener: ListenerHarness, connection: H2Client, data: bytes) -> None:
    """Have a connection end with ENHANCE_YOUR_CALM for what it sends."""
    with suppress(ConnectionError):
        connection.sock.sendall(data)
    connection.until_closed()
    assert connection.goaway in (ErrorCodes.ENHANCE_YOUR_CALM, None), connection.goaway
    listener.connections(0)


def refusals(listener: ListenerHarness) -> dict[str, int]:
    state = listener.listener._server_state
    return {name: count for name, count in state.limit_counters.counts.items() if count}


def h2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(PING, id="pings"),
        pytest.param(h2_frame(4, 0, 0), id="settings"),
        pytest.param(h2_frame(4, 0, 0, b"\0\4\0\0\0\1") + h2_frame(4, 0, 0, b"\0\4\0\0\0\2"), id="windows by settings"),
        pytest.param(h2_frame(2, 0, 1, b"\0\0\0\0\x10"), id="priorities"),
        pytest.param(h2_frame(8, 0, 0, b"\0\0\0\1"), id="window updates"),
        pytest.param(h2_frame(8, 0, 1, b"\0\0\0\1"), id="window updates of a stream"),
        pytest.param(h2_frame(0, 0, 1), id="empty data"),
        pytest.param(h2_frame(0, 8, 1, b"\3\0\0\0"), id="padding"),
        pytest.param(h2_frame(200, 0, 0), id="frames of no known type"),
    ],
)
def test_a_flood_of_frames_that_carry_nothing_ends_the_connection(
    make_listener: Callable[..., ListenerHarness], data: bytes
) -> None:
    with make_listener(control_frames_max=500, linger_s=0.1) as listener, H2Client(listener) as connection:
        connection.request("/later", method="POST", ends=False)
        flooded(listener, connection, data * 1_000)
        assert refusals(listener) == {"control_frames": 1}


def test_a_flood_before_any_request_ends_the_connection(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(control_frames_max=500, linger_s=0.1) as listener, H2Client(listener) as connection:
        flooded(listener, connection, PING * 1_000)
        assert refusals(listener) == {"control_frames": 1}


def test_a_header_block_without_an_end_ends_the_connection(make_listener: Callable[..., ListenerHarness]) -> None:
    with (
        make_listener(header_bytes_max=10_000, target_bytes_max=1_000, linger_s=0.1) as listener,
        H2Client(listener) as connection,
    ):
        flooded(listener, connection, h2_frame(1, 0, 1, b"\x82" * 5_000) + h2_frame(9, 0, 1, b"\x82" * 5_000) * 10)
        assert refusals(listener) == {"header_bytes": 1}


def test_empty_continuations_end_the_connection(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(control_frames_max=40, linger_s=0.1) as listener, H2Client(listener) as connection:
        flooded(listener, connection, h2_frame(1, 0, 1) + h2_frame(9, 0, 1) * 60)
        assert refusals(listener) == {"control_frames": 1}


@pytest.mark.parametrize("target", ["/empty", "/refuse", "/later", "/stream?n=1"])
def test_every_reset_is_counted_whether_the_request_was_answered_or_not(
    make_listener: Callable[..., ListenerHarness], target: str
) -> None:
    """Rapid reset: requests that are answered at once were not counted."""
    with make_listener(resets_max=100, linger_s=0.1) as listener, H2Client(listener) as connection:
        reset = (8).to_bytes(4)
        connection.flush()
        data = b""
        for _ in range(200):
            number = connection.h2.get_next_available_stream_id()
            pseudo = [(":method", "GET"), (":path", target), (":scheme", "http"), (":authority", "t")]
            connection.got[number] = H2Response()
            connection.h2.send_headers(number, pseudo, end_stream=True)
            data += connection.h2.data_to_send() + h2_frame(3, 0, number, reset)
        flooded(listener, connection, data)
        assert refusals(listener) == {"resets": 1}


def test_resets_that_a_client_provokes_are_counted(make_listener: Callable[..., ListenerHarness]) -> None:
    """A window update that overflows makes the server reset the stream: as cheap for a peer as a reset of its own."""
    with make_listener(resets_max=20, linger_s=0.1) as listener, H2Client(listener) as connection:
        data = b""
        for _ in range(60):
            number = connection.h2.get_next_available_stream_id()
            pseudo = [(":method", "GET"), (":path", "/later"), (":scheme", "http"), (":authority", "t")]
            connection.got[number] = H2Response()
            connection.h2.send_headers(number, pseudo, end_stream=True)
            data += connection.h2.data_to_send() + h2_frame(8, 0, number, b"\x7f\xff\xff\xff")
        flooded(listener, connection, data)
        assert refusals(listener) == {"resets": 1}


def test_client_that_reads_fast_may_update_its_windows_for_every_frame(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    """The client acknowledges each frame of an answer at once, with two updates."""
    with make_listener(control_frames_max=100) as listener, H2Client(listener, window=16_384) as connection:
        number = connection.request("/big?n=2000000")
        got = connection.got[number]
        seen = 0
        while not got.ended:
            connection.step()
            if len(got.body) > seen and not got.ended:
                connection.h2.increment_flow_control_window(1)
                connection.h2.increment_flow_control_window(1, number)
                connection.flush()
                seen = len(got.body)
        assert len(got.body) == 2_000_000
        assert refusals(listener) == {}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(9, b""), id="pings"),
        pytest.param(frame(10, b""), id="pongs"),
        pytest.param(frame(0, b"ab", fin=False), id="fragments"),
        pytest.param(frame(0, b"", fin=False), id="empty fragments"),
    ],
)
def test_a_flood_of_websocket_frames_ends_it_with_1008(
    make_listener: Callable[..., ListenerHarness], data: bytes
) -> None:
    with make_listener(control_frames_max=500, linger_s=0.1) as listener, listener.connect() as connection:
        shake(connection)
        connection.send(frame(1, b"ab", fin=False))
        connection.send(data * 1_000)
        held = b""
        while more := connection.sock.recv(1 << 16):
            held += more
        assert b"\x88" in held
        assert held[held.index(b"\x88") :][2:4] == (1008).to_bytes(2)
        listener.connections(0)
        assert refusals(listener) == {"control_frames": 1}


def test_messages_in_two_fragments_are_no_flood(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(control_frames_max=10) as listener, listener.connect() as connection:
        shake(connection)
        for _ in range(100):
            connection.send(frame(1, b"ab", fin=False) + frame(0, b"cd"))
            assert unframe(connection)[1] == b"abcd"
        assert refusals(listener) == {}
