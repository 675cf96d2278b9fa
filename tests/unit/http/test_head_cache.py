"""Requests whose heads came before: answered without the parser, and otherwise in no way different."""

from __future__ import annotations

import pytest
from tests.unit.http.harness import ListenerHarness, RawConnection

from tidelog.http import fast_path, h1_encoder
from tidelog.http.interface import FAST_REQUEST_BYTES_MAX, FastResponder, Response


def ordinary(body: bytes) -> bytes:
    return b"ordinary " + body


def test_the_first_request_goes_by_the_parser_and_the_next_by_its_head(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    assert connection.post("/express", b"one").body == ordinary(b"one")
    for body in (b"two", b"six", b"ten"):
        connection.send(b"POST /express HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n" + body)
        expected = (
            b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
            b'content-type: application/json\r\ncontent-length: 5\r\nx-request-id: id-3\r\n\r\n"%b"' % body
        )
        assert connection.read_exactly(len(expected)) == expected
    assert len(listener.app.requests) == 1
    assert connection.get("/hello").status == 200
    assert connection.post("/express", b"two").body == b'"two"', "also after another request"


def test_head_is_known_to_other_connections(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/express", b"one")
    with listener.connect() as other:
        assert other.post("/express", b"two").body == b'"two"'


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/express", ("X-More: 1",)),  # another head
        ("/express", ("Connection: close",)),
        ("/express", ("Content-Encoding: gzip",)),
        ("/express", ("Accept-Encoding: gzip, identity;q=0",)),
        ("/echo", ()),  # not for the application
    ],
)
def test_special_heads_are_not_cached(listener: ListenerHarness, target: str, headers: tuple[str, ...]) -> None:
    if headers != ("X-More: 1",):
        with listener.connect() as connection:
            connection.post(target, b"abc", *headers)
        with listener.connect() as connection:
            connection.post(target, b"abc", *headers)
        assert not listener.listener._server_state.head_cache
    else:
        with listener.connect() as connection:
            connection.post(target, b"abc")
            assert connection.post(target, b"abc", *headers).body == ordinary(b"abc")


def test_client_that_accepts_codings_gets_small_fast_responses_only(
    listener: ListenerHarness, connection: RawConnection
) -> None:
    """They are never compressed, so no check is needed."""
    connection.post("/express", b"one", "Accept-Encoding: gzip")
    assert listener.app.expressed == [("/express", 1023)]
    assert connection.post("/express", b"two", "Accept-Encoding: gzip").body == b'"two"'
    connection.post("/express", b"one")
    assert listener.app.expressed[1:] == [("/express", FAST_REQUEST_BYTES_MAX)]


def test_body_that_the_handler_declines_is_parsed(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/express", b"one")
    assert connection.post("/express", b"-no").body == ordinary(b"-no")
    assert connection.post("/express", b"yes").body == b'"yes"'
    assert len(listener.app.requests) == 2


def test_an_answer_other_than_200(connection: RawConnection) -> None:
    connection.post("/express", b"one")
    found = connection.post("/express", b"!no")
    assert (found.status, found.body, found.headers["x-why"]) == (409, b"no: !no", "because")
    assert connection.post("/express", b"two").body == b'"two"'


def test_partial_and_pipelined_requests_are_parsed(listener: ListenerHarness, connection: RawConnection) -> None:
    """Pipelined requests, a body in two pieces, and a head in two pieces."""
    connection.post("/express", b"one")
    request = b"POST /express HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n"
    connection.send((request + b"two") * 3)
    assert [connection.reply().body for _ in range(3)] == [ordinary(b"two")] * 3
    listener.send_bytewise(connection, request + b"six")
    assert connection.reply().body == ordinary(b"six")
    assert connection.post("/express", b"ten").body == b'"ten"'


def test_the_next_request_waits_for_the_answer(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/express/later", b"one")
    request = b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n"
    connection.send(request + b"two")
    assert listener.app.seen.wait() == "ticket"
    connection.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    connection.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        connection.receive_more()
    connection.sock.settimeout(5)
    ((body, ticket),) = listener.app.tickets
    listener.call(lambda: ticket.respond_json(body, b"x"))
    assert connection.reply().body == b"two"
    assert connection.reply().body == b'{"hello":""}'


def test_second_fast_request_waits_too(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/express/later", b"one")
    request = b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n"
    connection.send(request + b"two")
    assert listener.app.seen.wait() == "ticket"
    connection.send(request + b"six")
    listener.until(lambda: len(listener.app.requests) + len(listener.app.tickets) > 1)
    for _ in range(20):
        listener.call(lambda: None)
    assert len(listener.app.tickets) == 1
    listener.call(lambda: listener.app.tickets[0][1].respond_json(b"2", b"x"))
    assert connection.reply().body == b"2"
    assert connection.reply().body == ordinary(b"six")


def test_disconnected_client_is_not_answered(listener: ListenerHarness) -> None:
    with listener.connect() as connection:
        connection.post("/express/later", b"one")
        connection.send(b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\ntwo")
        assert listener.app.seen.wait() == "ticket"
    listener.until(lambda: listener.listener.connections == 0)
    ((body, ticket),) = listener.app.tickets
    listener.call(lambda: ticket.respond_json(body, b"x"))
    with listener.connect() as connection:
        assert connection.get("/hello").status == 200


def test_draining_listener_closes_after_the_response(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/express/later", b"one")
    connection.send(b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\ntwo")
    assert listener.app.seen.wait() == "ticket"

    def drain(ticket: FastResponder) -> None:
        listener.listener._server_state.draining = True
        ticket.respond_json(b"{}", b"x")

    listener.call(lambda: drain(listener.app.tickets[0][1]))
    found = connection.reply()
    assert (found.body, found.headers["connection"]) == (b"{}", "close")
    assert not connection.receive_more()


def test_a_body_of_another_length_has_the_same_head(listener: ListenerHarness, connection: RawConnection) -> None:
    connection.post("/express", b"one")
    for body in (b"a", b"x" * 500, b"three"):
        assert connection.post("/express", body).body == b'"%b"' % body
    assert len(listener.app.requests) == 1


@pytest.mark.parametrize("length", [b"03", b"+3", b"3 3", b"4", b"2", b"3,3", b"0x3", b"100000", b""])
def test_a_length_that_is_none_or_not_that_of_the_body_is_for_the_parser(
    listener: ListenerHarness, connection: RawConnection, length: bytes
) -> None:
    """Whatever the parser makes of it: the short way has no say."""
    for path in ("/express", "/batch"):
        connection.post(path, b"one")
        connection.post(path, b"two")
    known_ways = len(listener.app.batches)
    for target in (b"/express", b"/batch"):
        with listener.connect() as other:
            other.send(b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %b\r\n\r\nsix" % (target, length))
            listener.call(lambda: None)
            listener.until(lambda: listener.listener.connections == 2)
    listener.connections(1)
    assert len(listener.app.batches) == known_ways
    assert b"six" not in [body for body, _ in listener.app.tickets]


def test_without_the_compiled_module_the_parser_serves_every_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "IS_AVAILABLE", False)
    with ListenerHarness(kind) as listener, listener.connect() as connection:
        for path in ("/express", "/batch"):
            for body in (b"one", b"two", b"three"):
                assert connection.post(path, body).body == ordinary(body)
        assert not listener.app.expressed
        assert not listener.listener._server_state.head_cache


def test_head_cache_is_bounded(listener: ListenerHarness) -> None:
    def learn() -> int:
        heads = listener.listener._server_state.head_cache
        for number in range(fast_path._CACHED_HEADS_MAX + 1):
            heads.remember(b"%d\r\nContent-Length: 1\r\n\r\n" % number, lambda _body, _ticket: True)
        return len(heads)

    assert listener.call(learn) == 1


def test_json_head_has_the_bytes_of_any_other_response() -> None:
    response = Response(200, b"{}", headers=((b"x-request-id", b"7"),))
    for says in (b"", h1_encoder.CONNECTION_CLOSE):
        (expected,) = h1_encoder.encode_response(response, b"date: now\r\n", says, False)
        assert h1_encoder.encode_json_head(2, b"7", b"date: now\r\n", says) + b"{}" == expected
