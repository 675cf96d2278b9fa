"""The listener (contract 1.1, 1.2): two protocols on one port, time-outs, and an end in good order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.http.harness import ListenerHarness, RawConnection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


# Detecting the protocol -----------------------------------------------------------------------------


@pytest.mark.parametrize("bytewise", [False, True])
def test_the_preface_means_http_2(listener: ListenerHarness, connection: RawConnection, bytewise: bool) -> None:
    if bytewise:
        listener.send_bytewise(connection, PREFACE)
    else:
        connection.send(PREFACE)
    connection.send(SETTINGS)
    assert connection.read_exactly(9)[3] == 4, "a SETTINGS frame"
    assert listener.listener.connections == 1


@pytest.mark.parametrize("length", [1, 2, 3, 14, 17, 23])
def test_input_that_only_begins_like_the_preface_is_http_1(
    listener: ListenerHarness, connection: RawConnection, length: int
) -> None:
    """POST, PUT and PATCH share its first byte; the rest is no request, and gets an HTTP/1.1 error."""
    listener.send_bytewise(connection, PREFACE[:length])
    connection.send(b"!" if length > 1 else b"OST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\n\r\nx")
    assert connection.reply().status == (200 if length == 1 else 400)


def test_client_that_sends_nothing_and_disconnects_is_removed(listener: ListenerHarness) -> None:
    for data in (b"", b"PRI", b"GET"):
        with listener.connect() as connection:
            connection.send(data)
            listener.connections(1)
        listener.connections(0)


def test_small_writes_are_not_held_back(listener: ListenerHarness, connection: RawConnection) -> None:
    """Contract 1.1: TCP_NODELAY."""
    assert connection.get("/hello").status == 200
    (accepted,) = listener.listener._server_state.connections
    sock = accepted.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# Time -----------------------------------------------------------------------------------------------


def test_a_head_that_dribbles_is_cut_off(make_listener: Callable[..., ListenerHarness]) -> None:
    """Contract 1.1: 60 s for a head, here a fifth of one. Method: a byte whenever the server has time, for as long
    as it takes: none of them prolongs it."""
    with make_listener(header_timeout_s=0.2) as listener, listener.connect() as connection:
        connection.send(b"GET /hello HTTP/1.1\r\n")
        connection.sock.settimeout(0.02)
        reply = b""
        while not reply:
            with suppress(TimeoutError):
                reply = connection.sock.recv(1 << 16)
            if not reply:
                connection.send(b"X: y\r\n")
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert not listener.app.requests


def test_silent_connection_is_closed(make_listener: Callable[..., ListenerHarness]) -> None:
    for said in (b"", PREFACE[:10]):
        with make_listener(header_timeout_s=0.1, idle_timeout_s=0.1) as listener, listener.connect() as connection:
            connection.send(said)
            assert connection.read_rest() == b""
            listener.connections(0)


def test_an_idle_connection_is_closed(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(idle_timeout_s=0.1) as listener, listener.connect() as connection:
        assert connection.get("/hello").status == 200
        assert connection.read_rest() == b""
        listener.connections(0)


def test_a_request_that_is_being_answered_is_not_idle(make_listener: Callable[..., ListenerHarness]) -> None:
    """Method: another connection that is idle is closed first, so the time-out has passed for both."""
    times = {"idle_timeout_s": 0.1, "header_timeout_s": 0.1, "body_timeout_s": 0.1}
    with make_listener(**times) as listener, listener.connect() as busy, listener.connect() as idle:
        busy.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
        assert listener.app.seen.wait() == "parked /later"
        assert idle.get("/hello").status == 200
        assert idle.read_rest() == b""
        listener.call(listener.app.answer_parked)
        assert busy.reply().body == b"at last"


@pytest.mark.parametrize("framing", [b"Content-Length: 10\r\n\r\nxx", b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"])
def test_a_body_that_stops_is_given_up(make_listener: Callable[..., ListenerHarness], framing: bytes) -> None:
    with make_listener(body_timeout_s=0.1) as listener, listener.connect() as connection:
        connection.send(b"POST /echo HTTP/1.1\r\nHost: t\r\n" + framing)
        reply = connection.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert listener.app.seen.wait() == "abandoned /echo"


def test_unwanted_body_is_given_up_too(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(body_timeout_s=0.1, linger_s=0.1) as listener, listener.connect() as connection:
        connection.send(b"POST /refuse HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\nxx")
        assert connection.reply().status == 401
        assert connection.read_rest() == b""
        listener.connections(0)


@pytest.mark.parametrize("target", [b"/big?n=20000000", b"/flood"])
def test_client_that_reads_nothing_is_disconnected(
    make_listener: Callable[..., ListenerHarness], target: bytes
) -> None:
    with make_listener(write_timeout_s=0.2) as listener, listener.connect(1 << 14) as connection:
        connection.send(b"GET %b HTTP/1.1\r\nHost: t\r\n\r\n" % target)
        listener.connections(1)
        listener.connections(0)


# Too many -------------------------------------------------------------------------------------------


def test_connections_above_the_limit_get_503(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(connections_max=2) as listener:
        with listener.connect() as one, listener.connect() as two:
            assert one.get("/hello").status == two.get("/hello").status == 200
            with listener.connect() as three:
                three.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n" * 100)
                reply = three.reply()
                assert (reply.status, reply.headers["connection"]) == (503, "close")
                assert three.read_rest() == b""
            listener.connections(2)
        listener.connections(0)
        with listener.connect() as again:
            assert again.get("/hello").status == 200


# The end --------------------------------------------------------------------------------------------


def test_draining_ends_idle_connections_and_answers_busy_ones(listener: ListenerHarness) -> None:
    with listener.connect() as idle, listener.connect() as busy, listener.connect() as silent:
        assert idle.get("/hello").status == 200
        busy.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
        assert listener.app.seen.wait() == "parked /later"
        listener.connections(3)
        draining = asyncio.run_coroutine_threadsafe(listener.listener.drain(20), listener.loop)
        assert idle.read_rest() == b""
        assert silent.read_rest() == b""
        assert not draining.done()
        listener.call(listener.app.answer_parked)
        reply = busy.reply()
        assert (reply.body, reply.headers["connection"]) == (b"at last", "close")
        assert busy.read_rest() == b"", "the one after it is not started"
        busy.sock.close()
        assert draining.result(20) is True
        with pytest.raises(ConnectionError):
            listener.connect()


def test_draining_waits_for_streams_to_be_ended_by_their_handlers(listener: ListenerHarness) -> None:
    with listener.connect() as connection:
        connection.send(b"POST /slurp-duplex HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert connection.head().status == 200
        draining = asyncio.run_coroutine_threadsafe(listener.listener.drain(20), listener.loop)
        connection.send(b"0\r\n\r\n")
        assert [connection.chunk(), connection.chunk()] == [b"got 1\n", b""]
        assert connection.read_rest() == b""
        connection.sock.close()
        assert draining.result(20) is True


def test_draining_has_an_end(listener: ListenerHarness) -> None:
    with listener.connect() as connection:
        connection.send(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
        assert listener.app.seen.wait() == "streaming"
        assert listener.do(listener.listener.drain(0.05)) is False
        listener.do(listener.listener.close())
        assert listener.app.seen.wait() == "stream ended", "close returns when handlers have ended"
        assert listener.listener.connections == 0


def test_after_stop_accepting_open_connections_go_on(listener: ListenerHarness, connection: RawConnection) -> None:
    assert connection.get("/hello").status == 200
    listener.call(listener.listener.stop_accepting)
    reply = connection.get("/hello")
    assert reply.status == 200
    assert "connection" not in reply.headers
    with pytest.raises(ConnectionError):
        listener.connect()
