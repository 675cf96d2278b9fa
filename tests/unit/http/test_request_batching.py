"""Requests with a known head that arrive in one loop turn are handled as a batch; clients see no difference."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from tests.unit.http.harness import TIMEOUT_S, ListenerHarness, RawConnection

from tidelog.http import fast_path as lobbies
from tidelog.http.h1 import Http1Connection


def request(body: bytes, path: bytes = b"/crowd") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)


def in_one_turn(listener: ListenerHarness, sends: list[tuple[RawConnection, bytes]]) -> None:
    """The loop stands still until all of it lies in its sockets."""
    listener.connections(len(sends))
    go, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert go.wait(TIMEOUT_S)

    listener.loop.call_soon_threadsafe(stand)
    assert stands.wait(TIMEOUT_S)
    for connection, data in sends:
        connection.send(data)
    go.set()


def test_the_bytes_of_an_answer_whatever_the_length_of_the_body(connection: RawConnection) -> None:
    assert connection.post("/crowd", b"one").body == b"ordinary one"
    for body in (b"two", b"", b"x" * 300, b"yes", b"y" * 999):
        connection.send(request(body))
        expected = (
            b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-type: application/json\r\n"
            b'content-length: %d\r\nx-request-id: id-a\r\n\r\n"%b"' % (len(body) + 2, body)
        )
        assert connection.read_exactly(len(expected)) == expected


def test_those_of_a_turn_are_one_crowd(listener: ListenerHarness, connection: RawConnection) -> None:
    """On every connection, from the second request on as from the third."""
    connection.post("/crowd", b"one")
    with ExitStack() as stack:
        wires = [connection, *(stack.enter_context(listener.connect()) for _ in range(4))]
        for turn in range(3):
            in_one_turn(listener, [(each, request(b"%d-%d" % (turn, at))) for at, each in enumerate(wires)])
            assert [each.reply().body for each in wires] == [b'"%d-%d"' % (turn, at) for at in range(5)]
            assert sorted(listener.app.crowds[-1].bodies) == [b"%d-%d" % (turn, at) for at in range(5)]


def test_each_has_an_id_of_its_own(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/crowd", b"one")
    with ExitStack() as stack:
        wires = [connection, *(stack.enter_context(listener.connect()) for _ in range(19))]
        in_one_turn(listener, [(each, request(b"a")) for each in wires])
        found = {each.reply().headers["x-request-id"] for each in wires}
        assert found == {f"id-{number:x}" for number in range(10, 30)}


def test_some_are_left_out_and_come_by_the_parser(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/crowd", b"one")
    with listener.connect() as second, listener.connect() as third:
        for _ in range(2):
            in_one_turn(listener, [(connection, request(b"a")), (second, request(b"-no")), (third, request(b"b"))])
            assert [each.reply().body for each in (connection, second, third)] == [b'"a"', b"ordinary -no", b'"b"']
        assert second.post("/crowd", b"yes").body == b'"yes"'


def test_an_answer_other_than_200(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/crowd", b"one")
    connection.post("/crowd", b"two")
    found = connection.post("/crowd", b"!no")
    assert (found.status, found.body) == (409, b"no: !no")
    assert connection.post("/crowd", b"two").body == b'"two"'
    assert len(listener.app.requests) == 1


def test_more_than_a_request_or_less_of_it_is_for_the_parser(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/crowd", b"one")
    connection.post("/crowd", b"two")
    connection.send(request(b"a") * 3)
    assert [connection.reply().body for _ in range(3)] == [b"ordinary a"] * 3
    listener.send_bytewise(connection, request(b"six"))
    assert connection.reply().body == b"ordinary six"
    assert connection.post("/crowd", b"two").body == b'"two"'
    connection.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    assert connection.reply().body == b'{"hello":""}'
    assert connection.post("/crowd", b"two").body == b'"two"', "also behind another request"


def test_what_comes_behind_one_that_is_under_way_waits_for_its_answer(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/crowd/later", b"one")
    for _ in range(2):
        connection.send(request(b"two", b"/crowd/later"))
        assert listener.app.seen.wait() == "crowd"
        connection.send(request(b"six", b"/crowd/later") + b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
        connection.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.receive_more()
        connection.sock.settimeout(TIMEOUT_S)
        listener.call(lambda: listener.app.answer_crowd(listener.app.crowds[-1]))
        assert [connection.reply().body for _ in range(3)] == [b'"two"', b"ordinary six", b'{"hello":""}']


def test_what_comes_in_the_same_turn_as_one_that_is_left_out_is_behind_it(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    """The lobby is emptied before anything else of the connection is looked at."""
    connection.post("/crowd", b"one")
    connection.post("/crowd", b"two")

    def both() -> None:
        (guest,) = listener.listener._server_state.connections
        assert isinstance(guest, Http1Connection)
        for data in (request(b"-no"), b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"):
            guest.get_buffer(-1)[: len(data)] = data
            guest.buffer_updated(len(data))

    listener.call(both)
    assert [connection.reply().body for _ in range(2)] == [b"ordinary -no", b'{"hello":""}']


def test_a_lobby_that_is_full_does_not_wait_for_the_turns_end(
    listener: ListenerHarness, connection: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobbies, "_BATCH_BYTES_MAX", 15_000)
    listener.app.limit = 1 << 20
    connection.post("/crowd", b"one")
    with ExitStack() as stack:
        wires = [connection, *(stack.enter_context(listener.connect()) for _ in range(5))]
        in_one_turn(listener, [(each, request(b"x" * 8_000)) for each in wires])
        assert {each.reply().body for each in wires} == {b'"%b"' % (b"x" * 8_000)}
    assert [len(crowd) for crowd in listener.app.crowds] == [2, 2, 2]


def test_a_peer_that_left_is_not_answered_and_the_others_are(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/crowd/later", b"one")
    with listener.connect() as leaving:
        in_one_turn(
            listener, [(connection, request(b"two", b"/crowd/later")), (leaving, request(b"six", b"/crowd/later"))]
        )
        assert listener.app.seen.wait() == "crowd"
    listener.connections(1)
    listener.call(lambda: listener.app.answer_crowd(listener.app.crowds[-1]))
    assert connection.reply().body == b'"two"'


def test_a_mistake_is_told_to_everybody_and_the_connections_go_on(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/crowd", b"one")
    with listener.connect() as other:
        in_one_turn(listener, [(connection, request(b"bug")), (other, request(b"six"))])
        for each in (connection, other):
            assert each.reply().status == 500
            assert each.post("/crowd", b"two").body == b'"two"'
    assert listener.expected_errors() == ["planted"]


def test_a_listener_that_drains_says_so_in_the_answer_and_takes_no_more(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/crowd/later", b"one")
    connection.send(request(b"two", b"/crowd/later"))
    assert listener.app.seen.wait() == "crowd"

    def drain() -> None:
        listener.listener._server_state.draining = True
        listener.app.answer_crowd(listener.app.crowds[-1])

    listener.call(drain)
    found = connection.reply()
    assert (found.body, found.headers["connection"]) == (b'"two"', "close")
    assert not connection.receive_more()


def test_an_idle_connection_that_is_known_closes_when_the_listener_drains(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/crowd", b"one")
    connection.post("/crowd", b"two")
    assert listener.do(listener.listener.drain(TIMEOUT_S))
    assert not connection.receive_more()


def test_requests_that_pass_keep_a_connection_alive(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/crowd", b"one")
    (guest,) = listener.listener._server_state.connections
    assert isinstance(guest, Http1Connection)
    later = listener.listener._server_state.limits.idle_timeout_s + listener.loop.time() + 10
    for more in (0, 1_000):
        connection.post("/crowd", b"two")
        listener.call(lambda more=more: guest.check_timeouts(later + more))  # type: ignore[misc]
        assert not guest.is_closing
    listener.call(lambda: guest.check_timeouts(later + 2_000))
    assert guest.is_closing
    assert not connection.receive_more()


def test_a_peer_that_does_not_read_is_not_taken_from(listener: ListenerHarness, connection: RawConnection) -> None:
    """What waits to be sent is in order behind what was sent before, however it comes about."""
    connection.post("/crowd", b"one")
    connection.post("/crowd", b"two")
    (guest,) = listener.listener._server_state.connections
    assert isinstance(guest, Http1Connection)
    listener.call(guest.pause_writing)
    connection.send(request(b"six"))
    listener.until(lambda: len(listener.app.requests) == 1 and bool(guest._pipelined))
    listener.call(guest.resume_writing)
    assert connection.reply().body == b"ordinary six"
    assert connection.post("/crowd", b"two").body == b'"two"'
