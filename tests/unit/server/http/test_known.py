"""Requests whose heads came before: answered without the parser, and otherwise in no way different."""

from __future__ import annotations

import pytest
from tests.unit.server.http.stage import Stage, Wire

from tidelog.server.http import known, reply
from tidelog.server.http.seam import EXPRESS_BYTES_MAX, Response, Ticket


def ordinary(body: bytes) -> bytes:
    return b"ordinary " + body


def test_the_first_request_goes_by_the_parser_and_the_next_by_its_head(stage: Stage, wire: Wire) -> None:
    assert wire.post("/express", b"one").body == ordinary(b"one")
    for body in (b"two", b"six", b"ten"):
        wire.send(b"POST /express HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n" + body)
        expected = (
            b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
            b'content-type: application/json\r\ncontent-length: 5\r\nx-request-id: id-3\r\n\r\n"%b"' % body
        )
        assert wire.exactly(len(expected)) == expected
    assert len(stage.app.requests) == 1
    assert wire.get("/hello").status == 200
    assert wire.post("/express", b"two").body == b'"two"', "also behind another request"


def test_another_connection_knows_it_too(stage: Stage, wire: Wire) -> None:
    wire.post("/express", b"one")
    with stage.connect() as other:
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
def test_what_is_out_of_the_ordinary_is_not_learned(stage: Stage, target: str, headers: tuple[str, ...]) -> None:
    if headers != ("X-More: 1",):
        with stage.connect() as wire:
            wire.post(target, b"abc", *headers)
        with stage.connect() as wire:
            wire.post(target, b"abc", *headers)
        assert not stage.listener._house.known
    else:
        with stage.connect() as wire:
            wire.post(target, b"abc")
            assert wire.post(target, b"abc", *headers).body == ordinary(b"abc")


def test_a_peer_that_takes_codings_gets_small_answers_only(stage: Stage, wire: Wire) -> None:
    """They are never coded, so nobody has to look."""
    wire.post("/express", b"one", "Accept-Encoding: gzip")
    assert stage.app.expressed == [("/express", 1023)]
    assert wire.post("/express", b"two", "Accept-Encoding: gzip").body == b'"two"'
    wire.post("/express", b"one")
    assert stage.app.expressed[1:] == [("/express", EXPRESS_BYTES_MAX)]


def test_a_body_that_is_not_taken_comes_by_the_parser(stage: Stage, wire: Wire) -> None:
    wire.post("/express", b"one")
    assert wire.post("/express", b"-no").body == ordinary(b"-no")
    assert wire.post("/express", b"yes").body == b'"yes"'
    assert len(stage.app.requests) == 2


def test_an_answer_other_than_200(wire: Wire) -> None:
    wire.post("/express", b"one")
    found = wire.post("/express", b"!no")
    assert (found.status, found.body, found.headers["x-why"]) == (409, b"no: !no", "because")
    assert wire.post("/express", b"two").body == b'"two"'


def test_more_than_the_request_or_less_of_it_is_for_the_parser(stage: Stage, wire: Wire) -> None:
    """Pipelined requests, a body in two pieces, and a head in two pieces."""
    wire.post("/express", b"one")
    request = b"POST /express HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n"
    wire.send((request + b"two") * 3)
    assert [wire.reply().body for _ in range(3)] == [ordinary(b"two")] * 3
    stage.dribble(wire, request + b"six")
    assert wire.reply().body == ordinary(b"six")
    assert wire.post("/express", b"ten").body == b'"ten"'


def test_the_next_request_waits_for_the_answer(stage: Stage, wire: Wire) -> None:
    wire.post("/express/later", b"one")
    request = b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n"
    wire.send(request + b"two")
    assert stage.app.seen.wait() == "ticket"
    wire.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    wire.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        wire.more()
    wire.sock.settimeout(5)
    ((body, ticket),) = stage.app.tickets
    stage.call(lambda: ticket.answer(body, b"x"))
    assert wire.reply().body == b"two"
    assert wire.reply().body == b'{"hello":""}'


def test_a_known_request_waits_too(stage: Stage, wire: Wire) -> None:
    wire.post("/express/later", b"one")
    request = b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\n"
    wire.send(request + b"two")
    assert stage.app.seen.wait() == "ticket"
    wire.send(request + b"six")
    stage.until(lambda: len(stage.app.requests) + len(stage.app.tickets) > 1)
    for _ in range(20):
        stage.call(lambda: None)
    assert len(stage.app.tickets) == 1
    stage.call(lambda: stage.app.tickets[0][1].answer(b"2", b"x"))
    assert wire.reply().body == b"2"
    assert wire.reply().body == ordinary(b"six")


def test_a_peer_that_left_is_not_answered(stage: Stage) -> None:
    with stage.connect() as wire:
        wire.post("/express/later", b"one")
        wire.send(b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\ntwo")
        assert stage.app.seen.wait() == "ticket"
    stage.until(lambda: stage.listener.connections == 0)
    ((body, ticket),) = stage.app.tickets
    stage.call(lambda: ticket.answer(body, b"x"))
    with stage.connect() as wire:
        assert wire.get("/hello").status == 200


def test_a_listener_that_drains_says_so_in_the_answer(stage: Stage, wire: Wire) -> None:
    wire.post("/express/later", b"one")
    wire.send(b"POST /express/later HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\ntwo")
    assert stage.app.seen.wait() == "ticket"

    def drain(ticket: Ticket) -> None:
        stage.listener._house.draining = True
        ticket.answer(b"{}", b"x")

    stage.call(lambda: drain(stage.app.tickets[0][1]))
    found = wire.reply()
    assert (found.body, found.headers["connection"]) == (b"{}", "close")
    assert not wire.more()


def test_a_body_of_another_length_has_the_same_head(stage: Stage, wire: Wire) -> None:
    wire.post("/express", b"one")
    for body in (b"a", b"x" * 500, b"three"):
        assert wire.post("/express", body).body == b'"%b"' % body
    assert len(stage.app.requests) == 1


@pytest.mark.parametrize("length", [b"03", b"+3", b"3 3", b"4", b"2", b"3,3", b"0x3", b"100000", b""])
def test_a_length_that_is_none_or_not_that_of_the_body_is_for_the_parser(
    stage: Stage, wire: Wire, length: bytes
) -> None:
    """Whatever the parser makes of it: the short way has no say."""
    for path in ("/express", "/crowd"):
        wire.post(path, b"one")
        wire.post(path, b"two")
    known_ways = len(stage.app.crowds)
    for target in (b"/express", b"/crowd"):
        with stage.connect() as other:
            other.send(b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %b\r\n\r\nsix" % (target, length))
            stage.call(lambda: None)
            stage.until(lambda: stage.listener.connections == 2)
    stage.connections(1)
    assert len(stage.app.crowds) == known_ways
    assert b"six" not in [body for body, _ in stage.app.tickets]


def test_only_so_many_are_kept(stage: Stage) -> None:
    def learn() -> int:
        heads = stage.listener._house.known
        for number in range(known._HEADS_MAX + 1):
            heads.learn(b"%d\r\nContent-Length: 1\r\n\r\n" % number, lambda _body, _ticket: True)
        return len(heads)

    assert stage.call(learn) == 1


def test_its_bytes_are_those_of_any_other_answer() -> None:
    response = Response(200, b"{}", headers=((b"x-request-id", b"7"),))
    for says in (b"", reply.CLOSE):
        (expected,) = reply.whole(response, b"date: now\r\n", says, False)
        assert reply.json(b"{}", b"7", b"date: now\r\n", says) == expected
