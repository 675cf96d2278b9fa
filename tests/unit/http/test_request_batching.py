"""Requests with a known head that arrive in one loop turn are handled as a batch; clients see no difference."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from tests.unit.http.harness import TIMEOUT_S, ListenerHarness, RawConnection

from tidelog.http import fast_path
from tidelog.http.h1 import Http1Connection


def request(body: bytes, path: bytes = b"/batch") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)


def in_one_turn(listener: ListenerHarness, sends: list[tuple[RawConnection, bytes]]) -> None:
    """Block the loop until all of the data is in its sockets."""
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


def test_response_bytes_for_bodies_of_any_length(connection: RawConnection) -> None:
    assert connection.post("/batch", b"one").body == b"ordinary one"
    for body in (b"two", b"", b"x" * 300, b"yes", b"y" * 999):
        connection.send(request(body))
        expected = (
            b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-type: application/json\r\n"
            b'content-length: %d\r\nx-request-id: id-a\r\n\r\n"%b"' % (len(body) + 2, body)
        )
        assert connection.read_exactly(len(expected)) == expected


def test_requests_of_one_turn_are_one_batch(listener: ListenerHarness, connection: RawConnection) -> None:
    """On every connection, from the second request on as from the third."""
    connection.post("/batch", b"one")
    with ExitStack() as stack:
        wires = [connection, *(stack.enter_context(listener.connect()) for _ in range(4))]
        for turn in range(3):
            in_one_turn(listener, [(each, request(b"%d-%d" % (turn, at))) for at, each in enumerate(wires)])
            assert [each.reply().body for each in wires] == [b'"%d-%d"' % (turn, at) for at in range(5)]
            assert sorted(listener.app.batches[-1].bodies) == [b"%d-%d" % (turn, at) for at in range(5)]


def test_each_request_has_its_own_id(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/batch", b"one")
    with ExitStack() as stack:
        wires = [connection, *(stack.enter_context(listener.connect()) for _ in range(19))]
        in_one_turn(listener, [(each, request(b"a")) for each in wires])
        found = {each.reply().headers["x-request-id"] for each in wires}
        assert found == {f"id-{number:x}" for number in range(10, 30)}


def test_dropped_requests_are_parsed(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/batch", b"one")
    with listener.connect() as second, listener.connect() as third:
        for _ in range(2):
            in_one_turn(listener, [(connection, request(b"a")), (second, request(b"-no")), (third, request(b"b"))])
            assert [each.reply().body for each in (connection, second, third)] == [b'"a"', b"ordinary -no", b'"b"']
        assert second.post("/batch", b"yes").body == b'"yes"'


def test_an_answer_other_than_200(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/batch", b"one")
    connection.post("/batch", b"two")
    found = connection.post("/batch", b"!no")
    assert (found.status, found.body) == (409, b"no: !no")
    assert connection.post("/batch", b"two").body == b'"two"'
    assert len(listener.app.requests) == 1


def test_partial_and_pipelined_requests_are_parsed(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/batch", b"one")
    connection.post("/batch", b"two")
    connection.send(request(b"a") * 3)
    assert [connection.reply().body for _ in range(3)] == [b"ordinary a"] * 3
    listener.send_bytewise(connection, request(b"six"))
    assert connection.reply().body == b"ordinary six"
    assert connection.post("/batch", b"two").body == b'"two"'
    connection.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    assert connection.reply().body == b'{"hello":""}'
    assert connection.post("/batch", b"two").body == b'"two"', "also after another request"


def test_request_after_one_in_progress_waits_for_its_response(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/batch/later", b"one")
    for _ in range(2):
        connection.send(request(b"two", b"/batch/later"))
        assert listener.app.seen.wait() == "batch"
        connection.send(request(b"six", b"/batch/later") + b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
        connection.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.receive_more()
        connection.sock.settimeout(TIMEOUT_S)
        listener.call(lambda: listener.app.answer_batch(listener.app.batches[-1]))
        assert [connection.reply().body for _ in range(3)] == [b'"two"', b"ordinary six", b'{"hello":""}']


def test_request_in_the_turn_of_a_dropped_one_is_answered_after_it(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    """The batcher is flushed before other input of the connection is parsed."""
    connection.post("/batch", b"one")
    connection.post("/batch", b"two")

    def both() -> None:
        (accepted,) = listener.listener._server_state.connections
        assert isinstance(accepted, Http1Connection)
        for data in (request(b"-no"), b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"):
            accepted.get_buffer(-1)[: len(data)] = data
            accepted.buffer_updated(len(data))

    listener.call(both)
    assert [connection.reply().body for _ in range(2)] == [b"ordinary -no", b'{"hello":""}']


def test_full_batch_does_not_wait_for_the_end_of_the_turn(
    listener: ListenerHarness, connection: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "_BATCH_BYTES_MAX", 15_000)
    listener.app.limit = 1 << 20
    connection.post("/batch", b"one")
    with ExitStack() as stack:
        wires = [connection, *(stack.enter_context(listener.connect()) for _ in range(5))]
        in_one_turn(listener, [(each, request(b"x" * 8_000)) for each in wires])
        assert {each.reply().body for each in wires} == {b'"%b"' % (b"x" * 8_000)}
    assert [len(batch) for batch in listener.app.batches] == [2, 2, 2]


def test_disconnected_client_is_skipped_and_others_are_answered(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/batch/later", b"one")
    with listener.connect() as leaving:
        in_one_turn(
            listener, [(connection, request(b"two", b"/batch/later")), (leaving, request(b"six", b"/batch/later"))]
        )
        assert listener.app.seen.wait() == "batch"
    listener.connections(1)
    listener.call(lambda: listener.app.answer_batch(listener.app.batches[-1]))
    assert connection.reply().body == b'"two"'


def test_failed_batch_answers_500_and_keeps_the_connections(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/batch", b"one")
    with listener.connect() as other:
        in_one_turn(listener, [(connection, request(b"bug")), (other, request(b"six"))])
        for each in (connection, other):
            assert each.reply().status == 500
            assert each.post("/batch", b"two").body == b'"two"'
    assert listener.expected_errors() == ["planted"]


def test_draining_listener_closes_after_the_response(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/batch/later", b"one")
    connection.send(request(b"two", b"/batch/later"))
    assert listener.app.seen.wait() == "batch"

    def drain() -> None:
        listener.listener._server_state.draining = True
        listener.app.answer_batch(listener.app.batches[-1])

    listener.call(drain)
    found = connection.reply()
    assert (found.body, found.headers["connection"]) == (b'"two"', "close")
    assert not connection.receive_more()


def test_idle_armed_connection_closes_when_the_listener_drains(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.post("/batch", b"one")
    connection.post("/batch", b"two")
    assert listener.do(listener.listener.drain(TIMEOUT_S))
    assert not connection.receive_more()


def test_fast_requests_keep_a_connection_alive(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/batch", b"one")
    (accepted,) = listener.listener._server_state.connections
    assert isinstance(accepted, Http1Connection)
    later = listener.listener._server_state.limits.idle_timeout_s + listener.loop.time() + 10
    for more in (0, 1_000):
        connection.post("/batch", b"two")
        listener.call(lambda more=more: accepted.check_timeouts(later + more))  # type: ignore[misc]
        assert not accepted.is_closing
    listener.call(lambda: accepted.check_timeouts(later + 2_000))
    assert accepted.is_closing
    assert not connection.receive_more()


def test_client_that_does_not_read_leaves_the_fast_path(listener: ListenerHarness, connection: RawConnection) -> None:
    """Responses stay in order while the client does not read."""
    connection.post("/batch", b"one")
    connection.post("/batch", b"two")
    (accepted,) = listener.listener._server_state.connections
    assert isinstance(accepted, Http1Connection)
    listener.call(accepted.pause_writing)
    connection.send(request(b"six"))
    listener.until(lambda: len(listener.app.requests) == 1 and bool(accepted._pipelined))
    listener.call(accepted.resume_writing)
    assert connection.reply().body == b"ordinary six"
    assert connection.post("/batch", b"two").body == b'"two"'
