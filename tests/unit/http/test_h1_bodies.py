"""Bodies over HTTP/1.1 (contract 1.6, 1.12, appendix E): their limits, and connections that survive them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.http.harness import ListenerHarness, RawConnection

from tidelog.http.interface import UNREADABLE_REQUEST, BodyError, Response

CHUNKED = b"POST %b HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes, size: int = 100) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def post(target: bytes, body: bytes, coding: str) -> bytes:
    if coding == "chunked":
        return CHUNKED % target + chunked(body)
    return b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (target, len(body), body)


CODINGS = ("length", "chunked")


# Collected ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_arrives_whole(listener: ListenerHarness, connection: RawConnection, coding: str) -> None:
    listener.app.limit = 10_000_000
    body = bytes(range(256)) * 20_000
    connection.send(post(b"/echo", body, coding))
    assert connection.reply().body == body
    request = listener.app.requests[0]
    assert request.content_length == (len(body) if coding == "length" else None)
    assert request.body_stream is None


@pytest.mark.parametrize("coding", CODINGS)
def test_body_of_exactly_the_limit_is_accepted_and_one_byte_more_is_not(
    listener: ListenerHarness, connection: RawConnection, coding: str
) -> None:
    """Contract 1.12: exactly at the limit is accepted. One byte more is 413, and the same connection goes on."""
    connection.send(post(b"/echo", b"x" * 1000, coding))
    assert connection.reply().status == 200
    for _ in range(3):
        connection.send(post(b"/echo", b"x" * 1001, coding))
        reply = connection.reply()
        assert (reply.status, reply.body) == (413, b"too large")
        assert "connection" not in reply.headers
        assert connection.get("/hello").status == 200
    assert listener.app.open == 0
    assert [listener.app.seen.wait() for _ in range(3)] == ["abandoned /echo"] * 3
    assert listener.listener.connections == 1


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_over_the_limit_in_pieces_and_pipelined(
    listener: ListenerHarness, connection: RawConnection, coding: str
) -> None:
    """The answer comes before the rest of the body, and the bytes after the body are the next request."""
    data = post(b"/echo", b"x" * 5000, coding)
    connection.send(data[:2000])
    assert connection.reply().status == 413
    connection.send(data[2000:] + b"GET /hello?next HTTP/1.1\r\nHost: t\r\n\r\n")
    assert connection.reply().body == b'{"hello":"next"}'
    assert listener.listener.connections == 1


@pytest.mark.parametrize("coding", CODINGS)
def test_a_refusal_by_the_head_comes_before_the_body(
    listener: ListenerHarness, connection: RawConnection, coding: str
) -> None:
    data = post(b"/refuse", b"x" * 5000, coding)
    connection.send(data[:100])
    assert connection.reply().body == b"no"
    connection.send(data[100:])
    assert connection.get("/hello").status == 200
    assert listener.app.open == 0


def test_discarded_bytes_are_bounded_by_the_declared_length(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    """Method: the answer says that the connection closes, comes at once, and is not lost although the peer goes on
    sending: a reset would take it from the peer's buffer."""
    with make_listener(discard_bytes_max=100_000) as listener, listener.connect() as connection:
        connection.send(b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 200000\r\n\r\n")
        for _ in range(100):
            connection.send(b"x" * 900)
        reply = connection.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert connection.read_rest() == b""


def test_discarded_chunks_are_bounded(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(discard_bytes_max=100_000) as listener, listener.connect() as connection:
        connection.send(CHUNKED % b"/echo" + b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\nx\r\n")
        assert connection.reply().status == 413
        endless = (b"3e8\r\n" + b"x" * 1000 + b"\r\n") * 100_000
        with pytest.raises(ConnectionError):
            connection.send(endless)
        listener.connections(0)


@pytest.mark.parametrize("coding", CODINGS)
def test_incomplete_body_is_released(listener: ListenerHarness, connection: RawConnection, coding: str) -> None:
    connection.send(post(b"/echo", b"x" * 500, coding)[:200])
    connection.sock.close()
    assert listener.app.seen.wait() == "abandoned /echo"
    assert listener.app.open == 0
    listener.connections(0)


def test_trailers_and_extensions_are_bounded(make_listener: Callable[..., ListenerHarness]) -> None:
    for begin in (b"1;ext=", b"0\r\nTrailer: "):
        with make_listener(header_bytes_max=10_000) as listener, listener.connect() as connection:
            connection.send(CHUNKED % b"/echo" + begin)
            connection.send(b"x" * 400_000)  # the bound, a receive buffer, and more
            assert connection.reply().status == 431
            assert listener.app.seen.wait() == "abandoned /echo"


def test_trailers_are_no_headers(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(CHUNKED % b"/echo" + b"1\r\nx\r\n0\r\nAuthorization: Bearer smuggled\r\n\r\n")
    assert connection.reply().body == b"x"
    assert listener.app.requests[0].header(b"authorization") is None


# Expect ---------------------------------------------------------------------------------------------

EXPECT = b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n"


@pytest.mark.parametrize("target", [b"/echo", b"/slurp"])
def test_client_that_expects_continue_gets_100(connection: RawConnection, target: bytes) -> None:
    connection.send(EXPECT % (target, 3))
    assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
    connection.send(b"abc")
    assert connection.reply().body in (b"abc", b"3")


@pytest.mark.parametrize(("target", "size", "status"), [(b"/refuse", 3, 401), (b"/echo", 1001, 413)])
def test_client_whose_request_is_refused_gets_no_100(
    connection: RawConnection, target: bytes, size: int, status: int
) -> None:
    """The client may send the body or not, and the server cannot know which: the connection closes."""
    connection.send(EXPECT % (target, size))
    reply = connection.reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert connection.read_rest() == b""


def test_100_after_the_client_began_the_body_is_left_out(connection: RawConnection) -> None:
    connection.send(EXPECT % (b"/echo", 3) + b"abc")
    assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
    assert connection.reply().body == b"abc"


def test_100_waits_for_the_responses_before_it(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n" + EXPECT % (b"/echo", 3))
    assert listener.app.seen.wait() == "parked /later"
    listener.call(listener.app.answer_parked)
    assert connection.reply().body == b"at last"
    assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
    connection.send(b"abc")
    assert connection.reply().body == b"abc"


# Streamed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", CODINGS)
def test_streamed_body_is_passed_on_as_it_arrives(
    listener: ListenerHarness, connection: RawConnection, coding: str
) -> None:
    data = post(b"/slurp", b"x" * 300, coding)
    connection.send(data[:-150])
    first = listener.app.seen.wait()
    assert first.startswith("piece"), "before its end was sent"
    connection.send(data[-150:])
    assert connection.reply().body == b"300"
    assert connection.get("/hello").status == 200


@pytest.mark.parametrize("coding", CODINGS)
def test_a_streamed_body_has_the_same_limit(listener: ListenerHarness, connection: RawConnection, coding: str) -> None:
    """The handler answers where it has begun, and the front end where the head says it all."""
    data = post(b"/slurp", b"x" * 1001, coding)
    connection.send(data)
    reply = connection.reply()
    assert reply.status == 413
    if coding == "chunked":
        seen = [listener.app.seen.wait()]
        while seen[-1].startswith("piece"):
            seen.append(listener.app.seen.wait())
        assert seen[-1] == "broken 413"
        assert reply.body.endswith(b"then the body is over 1000 bytes")
    else:
        assert reply.body == b"too large"
    assert connection.get("/hello").status == 200


def test_a_streamed_body_whose_handler_is_slow_is_not_read(make_listener: Callable[..., ListenerHarness]) -> None:
    """Method: what the sockets and the bound take is sent; then the handler takes it all and none is missing."""
    with make_listener(ahead_bytes_max=100_000) as listener, listener.connect() as connection:
        listener.app.limit = 1 << 30
        size = 64_000_000
        connection.send(b"POST /slurp-slowly HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % size)
        assert listener.app.seen.wait() == "slurping"
        request, exchange = listener.app.parked[0]
        pieces = request.body_stream
        assert pieces is not None
        connection.sock.settimeout(0.3)
        sent = 0
        with suppress(TimeoutError):
            while sent < size:
                sent += connection.sock.send(b"x" * min(100_000, size - sent))
        assert sent < size, "the server reads without end"
        held = getattr(pieces, "buffered_bytes", None)
        assert held is not None
        assert held <= 100_000 + (256 << 10), "the bound and one receive buffer"

        async def slurp() -> None:
            total = 0
            async for piece in pieces:
                total += len(piece)
            exchange.respond(listener.app.malformed(UNREADABLE_REQUEST, 200, str(total)))

        connection.sock.settimeout(20)
        listener.call(lambda: listener.app.spawn(slurp()))
        while sent < size:
            sent += connection.sock.send(b"x" * min(1_000_000, size - sent))
        assert connection.reply().body == b"malformed: %d" % size


def test_a_handler_may_answer_before_the_body_has_ended(listener: ListenerHarness, connection: RawConnection) -> None:
    listener.app.limit = 100_000
    data = post(b"/slurp-early", b"0123456789" * 5000, "length")
    connection.send(data[:1000])
    assert connection.reply().body == b"0123456789"
    connection.send(data[1000:])
    assert connection.get("/hello").status == 200


def test_handler_of_an_incomplete_streamed_body_gets_the_error(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.send(post(b"/slurp", b"x" * 500, "length")[:200])
    assert listener.app.seen.wait().startswith("piece")
    connection.sock.close()
    assert listener.app.seen.wait() == "slurp gone"
    listener.connections(0)


def test_handler_of_an_invalid_streamed_body_gets_the_error(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.send(CHUNKED % b"/slurp" + b"1\r\nx\r\n")
    assert listener.app.seen.wait() == "piece 1"
    connection.send(b"nonsense\r\n")
    assert listener.app.seen.wait() == "broken 400"
    reply = connection.reply()
    assert (reply.status, reply.headers["connection"]) == (400, "close")
    assert reply.body.startswith(b"1 bytes, then this is not HTTP/1.1")
    assert connection.read_rest() == b""


def test_streamed_body_with_two_errors_has_one_response(listener: ListenerHarness, connection: RawConnection) -> None:
    """The handler gets the first error; the second closes the connection."""
    connection.send(CHUNKED % b"/slurp-slowly" + b"3e9\r\n" + b"x" * 1001 + b"\r\nnonsense\r\n")
    assert listener.app.seen.wait() == "slurping"
    request, exchange = listener.app.parked[0]
    pieces = request.body_stream
    assert pieces is not None

    async def slurp() -> None:
        with pytest.raises(BodyError, match="over 1000 bytes"):
            await anext(aiter(pieces))
        exchange.respond(Response(413, b"once"))

    listener.do(slurp())
    assert connection.reply().body == b"once"
    assert connection.read_rest() == b""


def test_a_stream_may_answer_a_body_that_goes_on(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(CHUNKED % b"/slurp-duplex" + b"3\r\nabc\r\n")
    assert connection.head().status == 200
    assert connection.chunk() == b"got 3\n"
    connection.send(b"2\r\nde\r\n")
    assert connection.chunk() == b"got 2\n"
    connection.send(b"0\r\n\r\n")
    assert connection.chunk() == b""
    assert connection.get("/hello").status == 200
    assert listener.listener.connections == 1


# Clients that offer HTTP/2 --------------------------------------------------------------------------


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("coding", CODINGS)
def test_an_offer_to_switch_to_http_2_is_declined_and_its_body_read(
    listener: ListenerHarness, connection: RawConnection, coding: str, bytewise: bool
) -> None:
    """Some clients send it with their first request, whatever that is. A parser that stops at such a request would
    take the body for the next one."""
    offer = b"HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    first = post(b"/echo", b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n", coding).replace(b"HTTP/1.1\r\n", offer, 1)
    data = first + b"GET /hello HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    data += b"GET /hello?last HTTP/1.1\r\nHost: t\r\n\r\n"
    if bytewise:
        listener.send_bytewise(connection, data)
    else:
        connection.send(data)
    assert connection.reply().body == b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"
    assert connection.reply().body == b'{"hello":""}'
    assert connection.reply().body == b'{"hello":"last"}'
    assert [request.path for request in listener.app.requests] == ["/echo", "/hello", "/hello"]
