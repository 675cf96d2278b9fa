"""Streams and long waits over HTTP/1.1 (contract 1.1, 3.8): their end, their peers' end, and slow peers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.server.http.stage import Stage, Wire


def test_a_stream_is_chunked_and_the_connection_goes_on(wire: Wire) -> None:
    for _ in range(2):
        reply = wire.get("/stream?n=5")
        assert reply.headers["transfer-encoding"] == "chunked"
        assert reply.headers["cache-control"] == "no-store"
        assert "content-length" not in reply.headers
        assert reply.body == b"".join(b"piece %d\n" % index for index in range(5))


def test_what_is_written_is_on_its_way_at_once(stage: Stage, wire: Wire) -> None:
    """Method: the stream writes one event and then waits for ever; the event must not wait with it."""
    wire.send(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
    assert wire.head().headers["content-type"] == "text/event-stream"
    assert wire.chunk() == b"data: 1\n\n"
    assert stage.app.seen.wait() == "streaming"


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_peer_that_leaves_cancels_its_stream(stage: Stage, wire: Wire, how: str) -> None:
    """Appendix E: promptly, because its slot is waited for."""
    wire.send(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "streaming"
    leave(wire, how)
    assert stage.app.seen.wait() == "stream ended"
    stage.connections(0)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_peer_that_leaves_is_told_to_who_waits_for_it(stage: Stage, wire: Wire, how: str) -> None:
    wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    _, exchange = stage.app.parked[0]
    assert not exchange.gone
    leave(wire, how)
    assert stage.app.seen.wait() == "gone /later"
    assert stage.call(lambda: exchange.gone)
    stage.call(stage.app.answer_parked)
    told: list[bool] = []
    stage.call(lambda: exchange.on_gone(lambda: told.append(True)))
    assert told == [True], "whoever asks late is told at once"
    stage.connections(0)


def test_nobody_is_told_of_a_peer_that_leaves_with_its_answer(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    stage.call(stage.app.answer_parked)
    assert wire.reply().body == b"at last"
    wire.sock.close()
    stage.connections(0)
    assert stage.app.seen.queue.empty()


def test_a_stream_is_started_even_when_its_peer_leaves_at_once(stage: Stage, wire: Wire) -> None:
    """What a handler gives back in `finally` is given back. Method: the answer and the peer's leaving happen in the
    same turn of the loop, before the stream's first step."""
    wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    request, exchange = stage.app.parked.pop()

    def answer_and_lose() -> None:
        stage.app.on_events(request, exchange)
        (guest,) = stage.listener._house.guests
        guest.connection_lost(None)  # type: ignore[attr-defined]

    stage.call(answer_and_lose)
    assert [stage.app.seen.wait(), stage.app.seen.wait()] == ["streaming", "stream ended"]
    wire.sock.close()


def test_a_stream_for_a_peer_that_left_is_not_started(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    request, exchange = stage.app.parked.pop()
    wire.sock.close()
    assert stage.app.seen.wait() == "gone /later"
    stage.call(lambda: stage.app.on_events(request, exchange))
    stage.connections(0)
    assert stage.app.seen.queue.empty()


def test_a_stream_that_raises_is_cut_off(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /torn HTTP/1.1\r\nHost: t\r\n\r\n")
    assert wire.head().status == 200
    with suppress(ConnectionError):
        while wire.more():
            pass
    assert wire.buffer in (b"4\r\nhalf\r\n", b""), "there is no last chunk: the peer can tell that it is not whole"
    assert stage.planted() == ["planted"]
    stage.connections(0)


def test_a_slow_reader_costs_a_bounded_amount(limited: Callable[..., Stage]) -> None:
    """Contract S3: a slow peer costs only itself. Method: a stream writes as fast as `drained` lets it; the peer
    reads nothing; another peer is answered meanwhile; then the peer reads and gets what was written."""
    with limited(write_high_bytes=100_000, write_low_bytes=20_000) as stage, stage.connect(1 << 14) as wire:
        wire.send(b"GET /flood?size=16000 HTTP/1.1\r\nHost: t\r\n\r\n")
        assert stage.app.seen.wait() == "waiting"
        with stage.connect() as other:
            for _ in range(50):
                assert other.get("/hello").status == 200
        assert wire.head().status == 200
        for _ in range(2000):
            assert wire.chunk() == b"f" * 16_000
        assert 0 < stage.app.seen.peak <= 100_000 + 2 * 16_010
        wire.sock.close()
        assert stage.app.seen.wait() in ("flood gone", "flood cancelled")
        stage.connections(0)


def test_a_fast_reader_does_not_keep_others_from_the_loop(stage: Stage, wire: Wire) -> None:
    """Method: the peer always keeps up, so `drained` never has to wait; others are answered all the same."""
    wire.send(b"GET /flood?size=1000 HTTP/1.1\r\nHost: t\r\n\r\n")
    assert wire.head().status == 200
    with stage.connect() as other:
        for _ in range(20):
            other.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
            for _ in range(20):
                wire.sock.recv(1 << 20)
            assert other.reply().status == 200


def test_requests_behind_a_stream_wait_for_its_end(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /stream?n=50 HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    assert len(wire.reply().body) > 400
    assert wire.reply().body == b'{"hello":""}'
    assert stage.listener.connections == 1


def leave(wire: Wire, how: str) -> None:
    if how == "half":
        wire.sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wire.sock.close()
