"""HTTP/1.1 as contract 1.1 has it: kept connections, pipelining in order, and what is no request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.unit.server.http.stage import LIMIT_S, Stage, Wire

from tidelog.server.http.h1 import H1
from tidelog.server.http.seam import UNREAD

GET = b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"


# The ordinary ---------------------------------------------------------------------------------------


def test_an_answer_is_these_bytes(wire: Wire) -> None:
    wire.send(GET)
    expected = (
        b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
        b"content-type: application/json\r\ncontent-length: 12\r\n\r\n"
        b'{"hello":""}'
    )
    assert wire.exactly(len(expected)) == expected


def test_the_date_follows_the_clock(stage: Stage, wire: Wire) -> None:
    assert wire.get("/hello").headers["date"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    stage.now_us += 999_999
    assert wire.get("/hello").headers["date"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    stage.now_us += 1
    assert wire.get("/hello").headers["date"] == "Sun, 06 Nov 1994 08:49:38 GMT"


def test_a_connection_is_kept(stage: Stage, wire: Wire) -> None:
    for index in range(5):
        reply = wire.get(f"/hello?{index}")
        assert (reply.status, reply.body) == (200, b'{"hello":"%d"}' % index)
        assert "connection" not in reply.headers
    assert stage.listener.connections == 1


def test_a_request_is_told_as_it_came(stage: Stage, wire: Wire) -> None:
    """Contract 1.1: names are decoded by whoever knows what they are. Appendix E: a query may be anything."""
    wire.get("/a%3Eb/%2F?x=%%%not-base64%%%&y", "X-One:  two words \t", "x-one: again", "Empty:")
    (request,) = stage.app.requests
    assert (request.method, request.path, request.query) == ("GET", "/a%3Eb/%2F", "x=%%%not-base64%%%&y")
    assert request.headers == [(b"host", b"t"), (b"x-one", b"two words"), (b"x-one", b"again"), (b"empty", b"")]
    assert request.header(b"x-one") == b"two words"
    assert request.header(b"x-two") is None
    assert request.peer == "{}:{}".format(*wire.sock.getsockname())
    assert (request.length, request.body, request.upgrade) == (0, b"", False)


def test_bytes_may_come_one_at_a_time(stage: Stage, wire: Wire) -> None:
    stage.dribble(wire, b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\nabc")
    assert wire.reply().body == b"abc"
    chunks = b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\nHost: trailer\r\n\r\n"
    stage.dribble(wire, b"POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n%b" % chunks)
    assert wire.reply().body == b"abc"


def test_head_is_get_without_the_body(wire: Wire) -> None:
    reply = wire.get("/hello", method="HEAD")
    assert (reply.status, reply.headers["content-length"]) == (200, "12")
    reply = wire.get("/stream", method="HEAD")
    assert (reply.status, reply.headers["transfer-encoding"]) == (200, "chunked")
    assert wire.get("/hello").body == b'{"hello":""}', "nothing of the bodies is in the way"


def test_no_content_has_neither_length_nor_type(wire: Wire) -> None:
    assert set(wire.get("/empty").headers) == {"date"}
    assert wire.get("/hello").status == 200


def test_a_target_may_be_a_whole_address(stage: Stage, wire: Wire) -> None:
    assert wire.get("http://other:80/hello?a=b").body == b'{"hello":"a=b"}'
    assert wire.get("http://other").status == 404
    assert stage.app.requests[-1].path == "/"
    wire.get("*", method="OPTIONS")
    assert stage.app.requests[-1].path == "*"


# Pipelining -----------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(stage: Stage, wire: Wire) -> None:
    """Method: the first waits for the test, so the others must wait although they could be answered at once."""
    wire.send(b"GET /later?0 HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    wire.send(b"GET /hello?1 HTTP/1.1\r\nHost: t\r\n\r\nPOST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n22")
    wire.send(b"GET /refuse HTTP/1.1\r\nHost: t\r\n\r\nGET /hello?4 HTTP/1.1\r\nHost: t\r\n\r\n")
    assert len(stage.app.requests) == 1, "the others have not begun"
    stage.call(stage.app.answer_parked)
    assert [wire.reply().body for _ in range(5)] == [b"at last0", b'{"hello":"1"}', b"22", b"no", b'{"hello":"4"}']


def test_a_thousand_requests_in_one_piece(wire: Wire) -> None:
    """More than a recursion per request would survive."""
    wire.send(b"".join(b"GET /hello?%d HTTP/1.1\r\nHost: t\r\n\r\n" % index for index in range(3000)))
    for index in range(3000):
        assert wire.reply().body == b'{"hello":"%d"}' % index


def test_a_thousand_requests_behind_one_that_waits(limited: Callable[..., Stage]) -> None:
    """They wait within bounds: what is not read yet is still in the sockets, and all are answered in the end."""
    with limited(pipelined_max=4) as stage, stage.connect() as wire:
        wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
        assert stage.app.seen.wait() == "parked /later"
        wire.send(b"".join(b"GET /hello?%d HTTP/1.1\r\nHost: t\r\n\r\n" % index for index in range(2000)))
        stage.call(stage.app.answer_parked)
        assert wire.reply().body == b"at last"
        for index in range(2000):
            assert wire.reply().body == b'{"hello":"%d"}' % index


def test_no_more_than_a_number_of_requests_waits(limited: Callable[..., Stage]) -> None:
    """Method: once that many wait, more are sent; others on the loop are answered several times, and it has not read
    them."""
    with limited(pipelined_max=4) as stage, stage.connect() as wire, stage.connect() as other:
        wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
        assert stage.app.seen.wait() == "parked /later"
        (guest,) = (guest for guest in stage.listener._house.guests if isinstance(guest, H1))
        wire.send(GET * 4)
        stage.until(lambda: len(guest._waiting) == 4)
        wire.send(GET * 10)
        for _ in range(5):
            assert other.get("/hello").status == 200
        assert stage.call(lambda: len(guest._waiting)) == 4
        stage.call(stage.app.answer_parked)
        assert [wire.reply().status for _ in range(15)] == [200] * 15


def test_a_peer_that_sends_and_never_reads_is_not_read(limited: Callable[..., Stage]) -> None:
    """Method: requests for large answers are sent until the sockets take no more; the server must stop to take them
    instead of making answers without end. Then all are read and none is missing."""
    with limited(write_high_bytes=1 << 16, write_low_bytes=1 << 14) as stage, stage.connect(1 << 16) as wire:
        request = b"GET /big?n=100000 HTTP/1.1\r\nHost: t\r\nX-Pad: %b\r\n\r\n" % (b"p" * 900)
        wire.sock.settimeout(0.5)
        sent, data = 0, request * 50_000
        with suppress(TimeoutError):
            while sent < len(data):
                sent += wire.sock.send(data[sent : sent + 65536])
        assert sent < len(data), "the server takes requests without end"
        begun = len(stage.app.requests)
        assert begun < 300, "answers are made for requests whose peer does not read"
        wire.sock.settimeout(LIMIT_S)
        for _ in range(sent // len(request)):
            assert len(wire.reply().body) == 100_000


# The end of a connection ----------------------------------------------------------------------------


def test_a_peer_may_say_that_it_was_the_last_request(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /hello HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n" + GET)
    reply = wire.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert wire.ended(), "the request behind it is not answered"
    assert len(stage.app.requests) == 1
    stage.connections(0)


def test_the_application_may_say_that_it_was_the_last_answer(stage: Stage, wire: Wire) -> None:
    reply = wire.get("/closing")
    assert (reply.body, reply.headers["connection"]) == (b"bye", "close")
    assert wire.rest() == b""
    wire.sock.close()
    stage.connections(0)


@pytest.mark.parametrize("target", ["/hello", "/stream"])
def test_http_1_0_closes_unless_asked_not_to(stage: Stage, wire: Wire, target: str) -> None:
    wire.send(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    reply = wire.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in reply.headers
    assert reply.body == (b'{"hello":""}' if target == "/hello" else b"piece 0\npiece 1\npiece 2\n")
    assert wire.ended()
    stage.connections(0)


def test_http_1_0_may_ask_for_more(wire: Wire) -> None:
    for _ in range(2):
        wire.send(b"GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert wire.reply().headers["connection"] == "keep-alive"
    wire.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert wire.reply().headers["connection"] == "close", "its end is the only one that a stream can have"


def test_a_large_answer_before_the_end_arrives_whole(wire: Wire) -> None:
    wire.send(b"GET /big?n=20000000 HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
    assert len(wire.reply().body) == 20_000_000
    assert wire.ended()


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
def test_what_is_no_request_is_refused_and_ends_the_connection(
    stage: Stage, wire: Wire, name: str, bytewise: bool
) -> None:
    """What follows is never taken for a request: that is how requests are smuggled past a proxy."""
    status, data = BAD[name]
    if bytewise:
        stage.dribble(wire, data)
    else:
        wire.send(data + SMUGGLED)
    reply = wire.reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert reply.body.startswith(b"malformed: ")
    assert wire.rest() == b""
    assert "/smuggled" not in [request.path for request in stage.app.requests]
    assert stage.app.open == 0, "what began was given back"


def test_what_is_no_request_waits_for_the_answers_before_it(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    wire.send(b"GET /hello?1 HTTP/1.1\r\nHost: t\r\n\r\nnonsense\r\n\r\n")
    stage.call(stage.app.answer_parked)
    assert [wire.reply().status for _ in range(3)] == [200, 200, 400]
    assert wire.rest() == b""


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_has_a_length_limit(limited: Callable[..., Stage], pieces: int) -> None:
    with limited(header_bytes_max=2000, target_bytes_max=500) as stage:
        for line, status in ((b"X: %b" % (b"x" * 1900), 200), (b"X: %b" % (b"x" * 2000), 431)):
            with stage.connect() as wire:
                data = b"GET /hello HTTP/1.1\r\nHost: t\r\n%b\r\n\r\n" % line
                for at in range(0, len(data), len(data) // pieces + 1):
                    wire.send(data[at : at + len(data) // pieces + 1])
                assert wire.reply().status == status
        for length, status in ((400, 404), (600, 414)):
            with stage.connect() as wire:
                assert wire.get("/" + "x" * length).status == status


@pytest.mark.parametrize(("begin", "status"), [(b"GET /", 414), (b"GET / HTTP/1.1\r\nHost: t\r\nX: ", 431)])
def test_a_head_without_end_is_refused_before_its_end(limited: Callable[..., Stage], begin: bytes, status: int) -> None:
    with limited(header_bytes_max=200_000, target_bytes_max=100_000) as stage, stage.connect() as wire:
        wire.send(begin)
        for _ in range(64):
            wire.send(b"x" * 10_000)
        assert wire.reply().status == status


def test_many_requests_in_one_piece_are_not_one_long_head(limited: Callable[..., Stage]) -> None:
    with limited(header_bytes_max=100, target_bytes_max=100) as stage, stage.connect() as wire:
        wire.send(GET * 50 + GET[:-1])
        assert [wire.reply().status for _ in range(50)] == [200] * 50
        wire.send(GET[-1:])
        assert wire.reply().status == 200


# Mistakes of the application ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/bug-begin", "/bug-handle"])
def test_a_handler_that_raises_costs_one_peer_a_500(stage: Stage, wire: Wire, target: str) -> None:
    assert wire.get(target).status == 500
    assert stage.planted() == ["planted"]
    assert wire.get("/hello").status == 200


def test_an_answer_cannot_be_split_by_what_it_quotes(stage: Stage, wire: Wire) -> None:
    reply = wire.get("/split")
    assert reply.status == 500
    assert "set-cookie" not in reply.headers
    assert len(stage.planted()) == 1


def test_answering_twice_is_a_mistake(stage: Stage, wire: Wire) -> None:
    wire.send(b"GET /later HTTP/1.1\r\nHost: t\r\n\r\n")
    assert stage.app.seen.wait() == "parked /later"
    _, exchange = stage.app.parked[0]
    stage.call(stage.app.answer_parked)
    with pytest.raises(RuntimeError, match="/later was answered already"):
        stage.call(lambda: exchange.respond(stage.app.malformed(UNREAD, 400, "again")))
    assert wire.reply().body == b"at last"
    assert wire.get("/hello").status == 200
