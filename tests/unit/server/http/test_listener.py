"""The listener (contract 1.1, 1.2): two protocols on one port, time-outs, and an end in good order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.server.http.stage import Stage, Wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


# Telling protocols apart ----------------------------------------------------------------------------


@pytest.mark.parametrize("bytewise", [False, True])
def test_the_preface_means_http_2(stage: Stage, wire: Wire, bytewise: bool) -> None:
    if bytewise:
        stage.dribble(wire, PREFACE)
    else:
        wire.send(PREFACE)
    wire.send(SETTINGS)
    assert wire.exactly(9)[3] == 4, "a SETTINGS frame"
    assert stage.listener.connections == 1


@pytest.mark.parametrize("length", [1, 2, 3, 14, 17, 23])
def test_what_only_begins_like_the_preface_is_http_1(stage: Stage, wire: Wire, length: int) -> None:
    """POST, PUT and PATCH share its first byte; the rest is no request, and is told so in HTTP/1.1."""
    stage.dribble(wire, PREFACE[:length])
    wire.send(b"!" if length > 1 else b"OST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\n\r\nx")
    assert wire.reply().status == (200 if length == 1 else 400)


def test_a_peer_that_says_nothing_and_goes_is_forgotten(stage: Stage) -> None:
    for data in (b"", b"PRI", b"GET"):
        with stage.connect() as wire:
            wire.send(data)
            stage.connections(1)
        stage.connections(0)


def test_small_writes_are_not_held_back(stage: Stage, wire: Wire) -> None:
    """Contract 1.1: TCP_NODELAY."""
    assert wire.get("/hello").status == 200
    (guest,) = stage.listener._house.guests
    sock = guest.transport.get_extra_info("socket")  # type: ignore[attr-defined]
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# Time -----------------------------------------------------------------------------------------------


def test_a_head_that_dribbles_is_cut_off(limited: Callable[..., Stage]) -> None:
    """Contract 1.1: 60 s for a head, here a fifth of one. Method: a byte whenever the server has time, for as long
    as it takes: none of them prolongs it."""
    with limited(header_timeout_s=0.2) as stage, stage.connect() as wire:
        wire.send(b"GET /hello HTTP/1.1\r\n")
        wire.sock.settimeout(0.02)
        reply = b""
        while not reply:
            with suppress(TimeoutError):
                reply = wire.sock.recv(1 << 16)
            if not reply:
                wire.send(b"X: y\r\n")
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert not stage.app.requests


def test_a_silent_peer_is_let_go(limited: Callable[..., Stage]) -> None:
    for said in (b"", PREFACE[:10]):
        with limited(header_timeout_s=0.1, idle_timeout_s=0.1) as stage, stage.connect() as wire:
            wire.send(said)
            assert wire.rest() == b""
            stage.connections(0)


def test_an_idle_connection_is_closed(limited: Callable[..., Stage]) -> None:
    with limited(idle_timeout_s=0.1) as stage, stage.connect() as wire:
        assert wire.get("/hello").status == 200
        assert wire.rest() == b""
        stage.connections(0)


def test_a_request_that_is_being_answered_is_not_idle(limited: Callable[..., Stage]) -> None:
    """Method: another connection that is idle is closed first, so the time-out has passed for both."""
    times = {"idle_timeout_s": 0.1, "header_timeout_s": 0.1, "body_timeout_s": 0.1}
    with limited(**times) as stage, stage.connect() as busy, stage.connect() as idle:
        busy.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
        assert stage.app.seen.wait() == "parked /later"
        assert idle.get("/hello").status == 200
        assert idle.rest() == b""
        stage.call(stage.app.answer_parked)
        assert busy.reply().body == b"at last"


@pytest.mark.parametrize("framing", [b"Content-Length: 10\r\n\r\nxx", b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"])
def test_a_body_that_stops_is_given_up(limited: Callable[..., Stage], framing: bytes) -> None:
    with limited(body_timeout_s=0.1) as stage, stage.connect() as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: t\r\n" + framing)
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert stage.app.seen.wait() == "abandoned /echo"


def test_a_body_that_nobody_wants_is_given_up_too(limited: Callable[..., Stage]) -> None:
    with limited(body_timeout_s=0.1, linger_s=0.1) as stage, stage.connect() as wire:
        wire.send(b"POST /refuse HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\nxx")
        assert wire.reply().status == 401
        assert wire.rest() == b""
        stage.connections(0)


@pytest.mark.parametrize("target", [b"/big?n=50000000", b"/flood"])
def test_a_peer_that_takes_nothing_is_cut_off(limited: Callable[..., Stage], target: bytes) -> None:
    with limited(write_timeout_s=0.2) as stage, stage.connect(1 << 14) as wire:
        wire.send(b"GET %b HTTP/1.1\r\nHost: t\r\n\r\n" % target)
        stage.connections(1)
        stage.connections(0)


# Too many -------------------------------------------------------------------------------------------


def test_too_many_connections_are_told_so(limited: Callable[..., Stage]) -> None:
    with limited(connections_max=2) as stage:
        with stage.connect() as one, stage.connect() as two:
            assert one.get("/hello").status == two.get("/hello").status == 200
            with stage.connect() as three:
                three.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n" * 100)
                reply = three.reply()
                assert (reply.status, reply.headers["connection"]) == (503, "close")
                assert three.rest() == b""
            stage.connections(2)
        stage.connections(0)
        with stage.connect() as again:
            assert again.get("/hello").status == 200


# The end --------------------------------------------------------------------------------------------


def test_draining_ends_idle_connections_and_answers_busy_ones(stage: Stage) -> None:
    with stage.connect() as idle, stage.connect() as busy, stage.connect() as silent:
        assert idle.get("/hello").status == 200
        busy.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
        assert stage.app.seen.wait() == "parked /later"
        stage.connections(3)
        draining = asyncio.run_coroutine_threadsafe(stage.listener.drain(20), stage.loop)
        assert idle.rest() == b""
        assert silent.rest() == b""
        assert not draining.done()
        stage.call(stage.app.answer_parked)
        reply = busy.reply()
        assert (reply.body, reply.headers["connection"]) == (b"at last", "close")
        assert busy.rest() == b"", "the one behind it is not begun"
        busy.sock.close()
        assert draining.result(20) is True
        with pytest.raises(ConnectionError):
            stage.connect()


def test_draining_waits_for_streams_to_be_ended_by_their_handlers(stage: Stage) -> None:
    with stage.connect() as wire:
        wire.send(b"POST /slurp-duplex HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert wire.head().status == 200
        draining = asyncio.run_coroutine_threadsafe(stage.listener.drain(20), stage.loop)
        wire.send(b"0\r\n\r\n")
        assert [wire.chunk(), wire.chunk()] == [b"got 1\n", b""]
        assert wire.rest() == b""
        wire.sock.close()
        assert draining.result(20) is True


def test_draining_has_an_end(stage: Stage) -> None:
    with stage.connect() as wire:
        wire.send(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
        assert stage.app.seen.wait() == "streaming"
        assert stage.do(stage.listener.drain(0.05)) is False
        stage.do(stage.listener.close())
        assert stage.app.seen.wait() == "stream ended", "close returns when handlers have ended"
        assert stage.listener.connections == 0


def test_after_stop_accepting_open_connections_go_on(stage: Stage, wire: Wire) -> None:
    assert wire.get("/hello").status == 200
    stage.call(stage.listener.stop_accepting)
    reply = wire.get("/hello")
    assert reply.status == 200
    assert "connection" not in reply.headers
    with pytest.raises(ConnectionError):
        stage.connect()
