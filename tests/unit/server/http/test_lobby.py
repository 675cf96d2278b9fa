"""Requests with a known head are taken together, a turn at a time, by the kernel as by its twin; nobody can tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.unit.server.http.stage import LIMIT_S, Stage, Wire

from tidelog.server.http import lobby as lobbies
from tidelog.server.http.h1 import H1


@pytest.fixture(params=[True, False], ids=["kernel", "twin"])
def stage(kind: str, request: pytest.FixtureRequest) -> Iterator[Stage]:
    with Stage(kind, kernel=request.param) as opened:
        yield opened


def request(body: bytes, path: bytes = b"/crowd") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)


def in_one_turn(stage: Stage, sends: list[tuple[Wire, bytes]]) -> None:
    """The loop stands still until all of it lies in its sockets."""
    stage.connections(len(sends))
    go, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert go.wait(LIMIT_S)

    stage.loop.call_soon_threadsafe(stand)
    assert stands.wait(LIMIT_S)
    for wire, data in sends:
        wire.send(data)
    go.set()


def test_the_bytes_of_an_answer_whatever_the_length_of_the_body(wire: Wire) -> None:
    assert wire.post("/crowd", b"one").body == b"ordinary one"
    for body in (b"two", b"", b"x" * 300, b"yes", b"y" * 999):
        wire.send(request(body))
        expected = (
            b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-type: application/json\r\n"
            b'content-length: %d\r\nx-request-id: id-a\r\n\r\n"%b"' % (len(body) + 2, body)
        )
        assert wire.exactly(len(expected)) == expected


def test_those_of_a_turn_are_one_crowd(stage: Stage, wire: Wire) -> None:
    """On every connection, from the second request on as from the third."""
    wire.post("/crowd", b"one")
    with ExitStack() as stack:
        wires = [wire, *(stack.enter_context(stage.connect()) for _ in range(4))]
        for turn in range(3):
            in_one_turn(stage, [(each, request(b"%d-%d" % (turn, at))) for at, each in enumerate(wires)])
            assert [each.reply().body for each in wires] == [b'"%d-%d"' % (turn, at) for at in range(5)]
            assert sorted(stage.app.crowds[-1].bodies) == [b"%d-%d" % (turn, at) for at in range(5)]


def test_each_has_an_id_of_its_own(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    with ExitStack() as stack:
        wires = [wire, *(stack.enter_context(stage.connect()) for _ in range(19))]
        in_one_turn(stage, [(each, request(b"a")) for each in wires])
        found = {each.reply().headers["x-request-id"] for each in wires}
        assert found == {f"id-{number:x}" for number in range(10, 30)}


def test_some_are_left_out_and_come_by_the_parser(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    with stage.connect() as second, stage.connect() as third:
        for _ in range(2):
            in_one_turn(stage, [(wire, request(b"a")), (second, request(b"-no")), (third, request(b"b"))])
            assert [each.reply().body for each in (wire, second, third)] == [b'"a"', b"ordinary -no", b'"b"']
        assert second.post("/crowd", b"yes").body == b'"yes"'


def test_an_answer_other_than_200(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    wire.post("/crowd", b"two")
    found = wire.post("/crowd", b"!no")
    assert (found.status, found.body) == (409, b"no: !no")
    assert wire.post("/crowd", b"two").body == b'"two"'
    assert len(stage.app.requests) == 1


def test_more_than_a_request_or_less_of_it_is_for_the_parser(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    wire.post("/crowd", b"two")
    wire.send(request(b"a") * 3)
    assert [wire.reply().body for _ in range(3)] == [b"ordinary a"] * 3
    stage.dribble(wire, request(b"six"))
    assert wire.reply().body == b"ordinary six"
    assert wire.post("/crowd", b"two").body == b'"two"'
    wire.send(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
    assert wire.reply().body == b'{"hello":""}'
    assert wire.post("/crowd", b"two").body == b'"two"', "also behind another request"


def test_what_comes_behind_one_that_is_under_way_waits_for_its_answer(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd/later", b"one")
    for _ in range(2):
        wire.send(request(b"two", b"/crowd/later"))
        assert stage.app.seen.wait() == "crowd"
        wire.send(request(b"six", b"/crowd/later") + b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n")
        wire.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            wire.more()
        wire.sock.settimeout(LIMIT_S)
        stage.call(lambda: stage.app.answer_crowd(stage.app.crowds[-1]))
        assert [wire.reply().body for _ in range(3)] == [b'"two"', b"ordinary six", b'{"hello":""}']


def test_what_comes_in_the_same_turn_as_one_that_is_left_out_is_behind_it(stage: Stage, wire: Wire) -> None:
    """The lobby is emptied before anything else of the connection is looked at."""
    wire.post("/crowd", b"one")
    wire.post("/crowd", b"two")

    def both() -> None:
        (guest,) = stage.listener._house.guests
        assert isinstance(guest, H1)
        for data in (request(b"-no"), b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"):
            guest.get_buffer(-1)[: len(data)] = data
            guest.buffer_updated(len(data))

    stage.call(both)
    assert [wire.reply().body for _ in range(2)] == [b"ordinary -no", b'{"hello":""}']


def test_a_lobby_that_is_full_does_not_wait_for_the_turns_end(
    stage: Stage, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobbies, "_BYTES_MAX", 15_000)
    stage.app.limit = 1 << 20
    wire.post("/crowd", b"one")
    with ExitStack() as stack:
        wires = [wire, *(stack.enter_context(stage.connect()) for _ in range(5))]
        in_one_turn(stage, [(each, request(b"x" * 8_000)) for each in wires])
        assert {each.reply().body for each in wires} == {b'"%b"' % (b"x" * 8_000)}
    assert [len(crowd) for crowd in stage.app.crowds] == [2, 2, 2]


def test_a_peer_that_left_is_not_answered_and_the_others_are(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd/later", b"one")
    with stage.connect() as leaving:
        in_one_turn(stage, [(wire, request(b"two", b"/crowd/later")), (leaving, request(b"six", b"/crowd/later"))])
        assert stage.app.seen.wait() == "crowd"
    stage.connections(1)
    stage.call(lambda: stage.app.answer_crowd(stage.app.crowds[-1]))
    assert wire.reply().body == b'"two"'


def test_a_mistake_is_told_to_everybody_and_the_connections_go_on(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    with stage.connect() as other:
        in_one_turn(stage, [(wire, request(b"bug")), (other, request(b"six"))])
        for each in (wire, other):
            assert each.reply().status == 500
            assert each.post("/crowd", b"two").body == b'"two"'
    assert stage.planted() == ["planted"]


def test_a_listener_that_drains_says_so_in_the_answer_and_takes_no_more(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd/later", b"one")
    wire.send(request(b"two", b"/crowd/later"))
    assert stage.app.seen.wait() == "crowd"

    def drain() -> None:
        stage.listener._house.draining = True
        stage.app.answer_crowd(stage.app.crowds[-1])

    stage.call(drain)
    found = wire.reply()
    assert (found.body, found.headers["connection"]) == (b'"two"', "close")
    assert not wire.more()


def test_an_idle_connection_that_is_known_closes_when_the_listener_drains(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    wire.post("/crowd", b"two")
    assert stage.do(stage.listener.drain(LIMIT_S))
    assert not wire.more()


def test_requests_that_pass_keep_a_connection_alive(stage: Stage, wire: Wire) -> None:
    wire.post("/crowd", b"one")
    (guest,) = stage.listener._house.guests
    assert isinstance(guest, H1)
    later = stage.listener._house.limits.idle_timeout_s + stage.loop.time() + 10
    for more in (0, 1_000):
        wire.post("/crowd", b"two")
        stage.call(lambda more=more: guest.watch(later + more))  # type: ignore[misc]
        assert not guest.ending
    stage.call(lambda: guest.watch(later + 2_000))
    assert guest.ending
    assert not wire.more()


def test_a_peer_that_does_not_read_is_not_taken_from(stage: Stage, wire: Wire) -> None:
    """What waits to be sent is in order behind what was sent before, however it comes about."""
    wire.post("/crowd", b"one")
    wire.post("/crowd", b"two")
    (guest,) = stage.listener._house.guests
    assert isinstance(guest, H1)
    stage.call(guest.pause_writing)
    wire.send(request(b"six"))
    stage.until(lambda: len(stage.app.requests) == 1 and bool(guest._waiting))
    stage.call(guest.resume_writing)
    assert wire.reply().body == b"ordinary six"
    assert wire.post("/crowd", b"two").body == b'"two"'
