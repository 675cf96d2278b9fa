"""HTTP/1.1 as contract 1.1 has it: kept connections, pipelining in order, and what is no request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.http.harness import TIMEOUT_S, ListenerHarness, RawConnection

from tidelog.http.h1 import Http1Connection
from tidelog.http.interface import UNREADABLE_REQUEST

GET = b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"


# The ordinary ---------------------------------------------------------------------------------------


def test_an_answer_is_these_bytes(connection: RawConnection) -> None:
    connection.send(GET)
    expected = (
        b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
        b"content-type: application/json\r\ncontent-length: 12\r\n\r\n"
        b'{"hello":""}'
    )
    assert connection.read_exactly(len(expected)) == expected


def test_the_date_follows_the_clock(listener: ListenerHarness, connection: RawConnection) -> None:
    assert connection.get("/hello").headers["date"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    listener.now_us += 999_999
    assert connection.get("/hello").headers["date"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    listener.now_us += 1
    assert connection.get("/hello").headers["date"] == "Sun, 06 Nov 1994 08:49:38 GMT"


def test_a_connection_is_kept(listener: ListenerHarness, connection: RawConnection) -> None:
    for index in range(5):
        reply = connection.get(f"/hello?{index}")
        assert (reply.status, reply.body) == (200, b'{"hello":"%d"}' % index)
        assert "connection" not in reply.headers
    assert listener.listener.connections == 1


def test_request_is_passed_on_unchanged(listener: ListenerHarness, connection: RawConnection) -> None:
    """Contract 1.1: the application decodes names. Appendix E: a query may be anything."""
    connection.get("/a%3Eb/%2F?x=%%%not-base64%%%&y", "X-One:  two words \t", "x-one: again", "Empty:")
    (request,) = listener.app.requests
    assert (request.method, request.path, request.query) == ("GET", "/a%3Eb/%2F", "x=%%%not-base64%%%&y")
    assert request.headers == [(b"host", b"t"), (b"x-one", b"two words"), (b"x-one", b"again"), (b"empty", b"")]
    assert request.header(b"x-one") == b"two words"
    assert request.header(b"x-two") is None
    assert request.peer == "{}:{}".format(*connection.sock.getsockname())
    assert (request.content_length, request.body, request.upgrade) == (0, b"", False)


def test_requests_may_arrive_byte_by_byte(listener: ListenerHarness, connection: RawConnection) -> None:
    listener.send_bytewise(connection, b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\nabc")
    assert connection.reply().body == b"abc"
    chunks = b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\nHost: trailer\r\n\r\n"
    listener.send_bytewise(
        connection, b"POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n%b" % chunks
    )
    assert connection.reply().body == b"abc"


def test_head_is_get_without_the_body(connection: RawConnection) -> None:
    reply = connection.get("/hello", method="HEAD")
    assert (reply.status, reply.headers["content-length"]) == (200, "12")
    reply = connection.get("/stream", method="HEAD")
    assert (reply.status, reply.headers["transfer-encoding"]) == (200, "chunked")
    assert connection.get("/hello").body == b'{"hello":""}', "nothing of the bodies is in the way"


def test_no_content_has_neither_length_nor_type(connection: RawConnection) -> None:
    assert set(connection.get("/empty").headers) == {"date"}
    assert connection.get("/hello").status == 200


def test_target_may_be_a_whole_url(listener: ListenerHarness, connection: RawConnection) -> None:
    assert connection.get("http://other:80/hello?a=b").body == b'{"hello":"a=b"}'
    assert connection.get("http://other").status == 404
    assert listener.app.requests[-1].path == "/"
    connection.get("*", method="OPTIONS")
    assert listener.app.requests[-1].path == "*"


# Pipelining -----------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(listener: ListenerHarness, connection: RawConnection) -> None:
    """Method: the first waits for the test, so the others must wait although they could be answered at once."""
    connection.send(b"GET /later?0 HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    connection.send(
        b"GET /hello?1 HTTP/1.1\r\nHost: t\r\n\r\nPOST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n22"
    )
    connection.send(b"GET /refuse HTTP/1.1\r\nHost: t\r\n\r\nGET /hello?4 HTTP/1.1\r\nHost: t\r\n\r\n")
    assert len(listener.app.requests) == 1, "the others have not begun"
    listener.call(listener.app.answer_parked)
    assert [connection.reply().body for _ in range(5)] == [
        b"at last0",
        b'{"hello":"1"}',
        b"22",
        b"no",
        b'{"hello":"4"}',
    ]


def test_a_thousand_requests_in_one_piece(connection: RawConnection) -> None:
    """More than a recursion per request would survive."""
    connection.send(b"".join(b"GET /hello?%d HTTP/1.1\r\nHost: t\r\n\r\n" % index for index in range(3000)))
    for index in range(3000):
        assert connection.reply().body == b'{"hello":"%d"}' % index


def test_thousand_requests_after_one_that_waits(make_listener: Callable[..., ListenerHarness]) -> None:
    """They wait within bounds: what is not read yet is still in the sockets, and all are answered in the end."""
    with make_listener(pipelined_max=4) as listener, listener.connect() as connection:
        connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
        assert listener.app.seen.wait() == "parked /later"
        connection.send(b"".join(b"GET /hello?%d HTTP/1.1\r\nHost: t\r\n\r\n" % index for index in range(2000)))
        listener.call(listener.app.answer_parked)
        assert connection.reply().body == b"at last"
        for index in range(2000):
            assert connection.reply().body == b'{"hello":"%d"}' % index


def test_no_more_than_a_number_of_requests_waits(make_listener: Callable[..., ListenerHarness]) -> None:
    """Method: once that many wait, more are sent; others on the loop are answered several times, and it has not read
    them."""
    with make_listener(pipelined_max=4) as listener, listener.connect() as connection, listener.connect() as other:
        connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
        assert listener.app.seen.wait() == "parked /later"
        (accepted,) = (
            accepted
            for accepted in listener.listener._server_state.connections
            if isinstance(accepted, Http1Connection)
        )
        connection.send(GET * 4)
        listener.until(lambda: len(accepted._pipelined) == 4)
        connection.send(GET * 10)
        for _ in range(5):
            assert other.get("/hello").status == 200
        assert listener.call(lambda: len(accepted._pipelined)) == 4
        listener.call(listener.app.answer_parked)
        assert [connection.reply().status for _ in range(15)] == [200] * 15


def test_client_that_never_reads_is_not_read(make_listener: Callable[..., ListenerHarness]) -> None:
    """Method: requests for large answers are sent until the sockets take no more; the server must stop to take them
    instead of making answers without end. Then all are read and none is missing."""
    with (
        make_listener(write_high_bytes=1 << 16, write_low_bytes=1 << 14) as listener,
        listener.connect(1 << 16) as connection,
    ):
        request = b"GET /big?n=100000 HTTP/1.1\r\nHost: t\r\nX-Pad: %b\r\n\r\n" % (b"p" * 900)
        connection.sock.settimeout(0.5)
        sent, data = 0, request * 50_000
        with suppress(TimeoutError):
            while sent < len(data):
                sent += connection.sock.send(data[sent : sent + 65536])
        assert sent < len(data), "the server takes requests without end"
        begun = len(listener.app.requests)
        assert begun < 300, "answers are made for requests whose peer does not read"
        connection.sock.settimeout(TIMEOUT_S)
        for _ in range(sent // len(request)):
            assert len(connection.reply().body) == 100_000


# The end of a connection ----------------------------------------------------------------------------


def test_client_may_ask_for_close(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /hello HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n" + GET)
    reply = connection.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert connection.ended(), "the request after it is not answered"
    assert len(listener.app.requests) == 1
    listener.connections(0)


def test_application_may_close_after_a_response(listener: ListenerHarness, connection: RawConnection) -> None:
    reply = connection.get("/closing")
    assert (reply.body, reply.headers["connection"]) == (b"bye", "close")
    assert connection.read_rest() == b""
    connection.sock.close()
    listener.connections(0)


@pytest.mark.parametrize("target", ["/hello", "/stream"])
def test_http_1_0_closes_unless_asked_not_to(listener: ListenerHarness, connection: RawConnection, target: str) -> None:
    connection.send(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    reply = connection.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in reply.headers
    assert reply.body == (b'{"hello":""}' if target == "/hello" else b"piece 0\npiece 1\npiece 2\n")
    assert connection.ended()
    listener.connections(0)


def test_http_1_0_may_ask_for_more(connection: RawConnection) -> None:
    for _ in range(2):
        connection.send(b"GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert connection.reply().headers["connection"] == "keep-alive"
    connection.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert connection.reply().headers["connection"] == "close", "its end is the only one that a stream can have"


def test_a_large_answer_before_the_end_arrives_whole(connection: RawConnection) -> None:
    connection.send(b"GET /big?n=20000000 HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
    assert len(connection.reply().body) == 20_000_000
    assert connection.ended()


# What is no request ---------------------------------------------------------------------------------

POST = b"POST /echo HTTP/1.1\r\nHost: t\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"
BAD = {
    "garbage": (400, b"\x16\x03\x01\x02\x00\x01\x00"),
    "no version": (505, b"GET /hello\r\n\r\n"),
    "unknown method": (400, b"BREW / HTTP/1.1\r\nHost: t\r\n\r\n"),
    "length and coding": (400, POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "coding and length": (400, POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
    "two lengths": (400, POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    "lengths in one": (400, POST + b"Content-Length: 3, 3\r\n\r\nabc"),
    "negative length": (400, POST + b"Content-Length: -3\r\n\r\nabc"),
    "signed length": (400, POST + b"Content-Length: +3\r\n\r\nabc"),
    "length in words": (400, POST + b"Content-Length: three\r\n\r\nabc"),
    "endless length": (400, POST + b"Content-Length: 99999999999999999999\r\n\r\nabc"),
    "no host": (400, b"GET /hello HTTP/1.1\r\n\r\n"),
    "two hosts": (400, b"GET /hello HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    "blank before colon": (400, b"GET /hello HTTP/1.1\r\nHost : a\r\n\r\n"),
    "folded line": (400, b"GET /hello HTTP/1.1\r\nHost: a\r\n b\r\n\r\n"),
    "bare line feeds": (400, b"GET /hello HTTP/1.1\nHost: a\n\n"),
    "no target": (400, b"GET hello HTTP/1.1\r\nHost: a\r\n\r\n"),
    "not ASCII": (400, b"GET /h\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n"),
    "chunks to 1.0": (400, b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "bad chunk": (400, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "chunk too long": (400, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n"),
    "other coding": (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "coding in two": (501, POST + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "unknown coding": (501, POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    "proxy": (501, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n"),
    "version 2.0": (505, b"GET /hello HTTP/2.0\r\nHost: a\r\n\r\n"),
    "version 0.9": (505, b"GET /hello HTTP/0.9\r\nHost: a\r\n\r\n"),
}


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_invalid_input_is_refused_and_closes_the_connection(
    listener: ListenerHarness, connection: RawConnection, name: str, bytewise: bool
) -> None:
    """What follows is never taken for a request: that is how requests are smuggled past a proxy."""
    status, data = BAD[name]
    if bytewise:
        listener.send_bytewise(connection, data)
    else:
        connection.send(data + SMUGGLED)
    reply = connection.reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert reply.body.startswith(b"malformed: ")
    assert connection.read_rest() == b""
    assert "/smuggled" not in [request.path for request in listener.app.requests]
    assert listener.app.open == 0, "what began was given back"


def test_error_of_invalid_input_waits_for_the_responses_before_it(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    connection.send(b"GET /hello?1 HTTP/1.1\r\nHost: t\r\n\r\nnonsense\r\n\r\n")
    listener.call(listener.app.answer_parked)
    assert [connection.reply().status for _ in range(3)] == [200, 200, 400]
    assert connection.read_rest() == b""


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_has_a_length_limit(make_listener: Callable[..., ListenerHarness], pieces: int) -> None:
    with make_listener(header_bytes_max=2000, target_bytes_max=500) as listener:
        for line, status in ((b"X: %b" % (b"x" * 1900), 200), (b"X: %b" % (b"x" * 2000), 431)):
            with listener.connect() as connection:
                data = b"GET /hello HTTP/1.1\r\nHost: t\r\n%b\r\n\r\n" % line
                for at in range(0, len(data), len(data) // pieces + 1):
                    connection.send(data[at : at + len(data) // pieces + 1])
                assert connection.reply().status == status
        for length, status in ((400, 404), (600, 414)):
            with listener.connect() as connection:
                assert connection.get("/" + "x" * length).status == status


@pytest.mark.parametrize(("begin", "status"), [(b"GET /", 414), (b"GET / HTTP/1.1\r\nHost: t\r\nX: ", 431)])
def test_a_head_without_end_is_refused_before_its_end(
    make_listener: Callable[..., ListenerHarness], begin: bytes, status: int
) -> None:
    with (
        make_listener(header_bytes_max=200_000, target_bytes_max=100_000) as listener,
        listener.connect() as connection,
    ):
        connection.send(begin)
        for _ in range(64):
            connection.send(b"x" * 10_000)
        assert connection.reply().status == status


def test_many_requests_in_one_piece_are_not_one_long_head(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(header_bytes_max=100, target_bytes_max=100) as listener, listener.connect() as connection:
        connection.send(GET * 50 + GET[:-1])
        assert [connection.reply().status for _ in range(50)] == [200] * 50
        connection.send(GET[-1:])
        assert connection.reply().status == 200


# Mistakes of the application ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/bug-begin", "/bug-handle"])
def test_handler_that_raises_answers_one_client_with_500(
    listener: ListenerHarness, connection: RawConnection, target: str
) -> None:
    assert connection.get(target).status == 500
    assert listener.expected_errors() == ["planted"]
    assert connection.get("/hello").status == 200


def test_line_break_in_a_header_cannot_split_a_response(listener: ListenerHarness, connection: RawConnection) -> None:
    reply = connection.get("/split")
    assert reply.status == 500
    assert "set-cookie" not in reply.headers
    assert len(listener.expected_errors()) == 1


def test_answering_twice_is_a_mistake(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert listener.app.seen.wait() == "parked /later"
    _, exchange = listener.app.parked[0]
    listener.call(listener.app.answer_parked)
    with pytest.raises(RuntimeError, match="/later was answered already"):
        listener.call(lambda: exchange.respond(listener.app.malformed(UNREADABLE_REQUEST, 400, "again")))
    assert connection.reply().body == b"at last"
    assert connection.get("/hello").status == 200
