"""Streams and long waits over HTTP/1.1 (contract 1.1, 3.8): their end, their peers' end, and slow peers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.http.harness import ListenerHarness, RawConnection


def test_a_stream_is_chunked_and_the_connection_goes_on(connection: RawConnection) -> None:
    for _ in range(2):
        reply = connection.get("/stream?n=5")
        assert reply.headers["transfer-encoding"] == "chunked"
        assert reply.headers["cache-control"] == "no-store"
        assert "content-length" not in reply.headers
        assert reply.body == b"".join(b"piece %d\n" % index for index in range(5))


def test_writes_are_sent_at_once(listener: ListenerHarness, connection: RawConnection) -> None:
    """Method: the stream writes one event and then waits for ever; the event must not wait with it."""
    connection.send(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
    assert connection.head().headers["content-type"] == "text/event-stream"
    assert connection.chunk() == b"data: 1\n\n"
    assert listener.app.seen.wait() == "streaming"


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_disconnect_cancels_the_stream(listener: ListenerHarness, connection: RawConnection, how: str) -> None:
    """Appendix E: promptly, because its slot is waited for."""
    connection.send(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "streaming"
    leave(connection, how)
    assert listener.app.seen.wait() == "stream ended"
    listener.connections(0)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_disconnect_calls_the_disconnect_callbacks(
    listener: ListenerHarness, connection: RawConnection, how: str
) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    _, exchange = listener.app.parked[0]
    assert not exchange.is_disconnected
    leave(connection, how)
    assert listener.app.seen.wait() == "gone /later"
    assert listener.call(lambda: exchange.is_disconnected)
    listener.call(listener.app.answer_parked)
    calls: list[bool] = []
    listener.call(lambda: exchange.add_disconnect_callback(lambda: calls.append(True)))
    assert calls == [True], "a callback that is added later is called at once"
    listener.connections(0)


def test_disconnect_after_the_response_calls_no_callback(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    listener.call(listener.app.answer_parked)
    assert connection.reply().body == b"at last"
    connection.sock.close()
    listener.connections(0)
    assert listener.app.seen.queue.empty()


def test_accepted_stream_is_started_despite_a_disconnect(listener: ListenerHarness, connection: RawConnection) -> None:
    """What a handler gives back in `finally` is given back. Method: the answer and the peer's leaving happen in the
    same turn of the loop, before the stream's first step."""
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    request, exchange = listener.app.parked.pop()

    def answer_and_lose() -> None:
        listener.app.on_events(request, exchange)
        (accepted,) = listener.listener._server_state.connections
        accepted.connection_lost(None)

    listener.call(answer_and_lose)
    assert [listener.app.seen.wait(), listener.app.seen.wait()] == ["streaming", "stream ended"]
    connection.sock.close()


def test_stream_for_a_disconnected_client_is_not_started(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    request, exchange = listener.app.parked.pop()
    connection.sock.close()
    assert listener.app.seen.wait() == "gone /later"
    listener.call(lambda: listener.app.on_events(request, exchange))
    listener.connections(0)
    assert listener.app.seen.queue.empty()


def test_a_stream_that_raises_is_cut_off(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /torn HTTP/1.1\r\nHost: t\r\n\r\n")
    assert connection.head().status == 200
    with suppress(ConnectionError):
        while connection.receive_more():
            pass
    assert connection.buffer in (b"4\r\nhalf\r\n", b""), (
        "there is no last chunk: the client notices that the response is incomplete"
    )
    assert listener.expected_errors() == ["planted"]
    listener.connections(0)


def test_a_slow_reader_costs_a_bounded_amount(make_listener: Callable[..., ListenerHarness]) -> None:
    """Contract S3: a slow peer costs only itself. Method: a stream writes as fast as `drained` lets it; the peer
    reads nothing; another peer is answered meanwhile; then the peer reads and gets what was written."""
    with (
        make_listener(write_high_bytes=100_000, write_low_bytes=20_000) as listener,
        listener.connect(1 << 14) as connection,
    ):
        connection.send(b"GET /flood?size=16000 HTTP/1.1\r\nHost: t\r\n\r\n")
        assert listener.app.seen.wait() == "waiting"
        with listener.connect() as other:
            for _ in range(50):
                assert other.get("/hello").status == 200
        assert connection.head().status == 200
        for _ in range(2000):
            assert connection.chunk() == b"f" * 16_000
        assert 0 < listener.app.seen.peak <= 100_000 + 2 * 16_010
        connection.sock.close()
        assert listener.app.seen.wait() in ("flood gone", "flood cancelled")
        listener.connections(0)


def test_a_fast_reader_does_not_keep_others_from_the_loop(listener: ListenerHarness, connection: RawConnection) -> None:
    """Method: the peer always keeps up, so `drained` never has to wait; others are answered all the same."""
    connection.send(b"GET /flood?size=1000 HTTP/1.1\r\nHost: t\r\n\r\n")
    assert connection.head().status == 200
    with listener.connect() as other:
        for _ in range(20):
            other.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
            for _ in range(20):
                connection.sock.recv(1 << 20)
            assert other.reply().status == 200


def test_requests_after_a_stream_wait_for_its_end(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /stream?n=50 HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    assert len(connection.reply().body) > 400
    assert connection.reply().body == b'{"hello":""}'
    assert listener.listener.connections == 1


def leave(connection: RawConnection, how: str) -> None:
    if how == "half":
        connection.sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.sock.close()
