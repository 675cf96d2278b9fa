"""HTTP/2 by prior knowledge (contract 1.1): the same application, many requests at once, windows in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from h2.errors import ErrorCodes
from tests.unit.server.http.h2_wire import Got, H2Wire
from tests.unit.server.http.stage import Stage, Wire

from tidelog.server.http.seam import UNREAD


@pytest.fixture
def wire(stage: Stage) -> Iterator[H2Wire]:
    with H2Wire(stage) as opened:
        yield opened


# The ordinary ---------------------------------------------------------------------------------------


def test_a_request_and_its_answer(stage: Stage, wire: H2Wire) -> None:
    got = wire.get("/hello?a=%zz", ("x-one", "two"))
    assert got.headers == {
        ":status": "200",
        "date": "Sun, 06 Nov 1994 08:49:37 GMT",
        "content-type": "application/json",
        "content-length": "17",
    }
    assert got.body == b'{"hello":"a=%zz"}'
    (request,) = stage.app.requests
    assert (request.method, request.path, request.query) == ("GET", "/hello", "a=%zz")
    assert list(request.headers) == [(b"host", b"t"), (b"x-one", b"two")]
    assert (request.length, request.upgrade) == (0, False)
    assert request.peer == "{}:{}".format(*wire.sock.getsockname())


def test_the_settings_are_those_of_the_contract(wire: H2Wire) -> None:
    """1024 concurrent streams, 1 MiB for a stream, 4 MiB for the connection."""
    wire.get("/hello")
    assert (wire.settings[3], wire.settings[4]) == (1024, 1 << 20)
    assert wire.h2.outbound_flow_control_window == 4 << 20


def test_requests_do_not_wait_for_one_another(stage: Stage, wire: H2Wire) -> None:
    waits = wire.ask("/later?first")
    assert stage.app.seen.wait() == "parked /later"
    others = [wire.ask(f"/hello?{index}") for index in range(100)]
    for index, number in enumerate(others):
        assert wire.reply(number).body == b'{"hello":"%d"}' % index
    stage.call(stage.app.answer_parked)
    assert wire.reply(waits).body == b"at lastfirst"
    assert stage.listener.connections == 1


def test_bytes_may_come_one_at_a_time(stage: Stage) -> None:
    with H2Wire(stage) as wire:
        number = wire.h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", "/echo"), (":scheme", "http"), (":authority", "t")]
        wire.got[number] = Got()
        wire.h2.send_headers(number, fields)
        wire.h2.send_data(number, b"abc", end_stream=True)
        stage.dribble(Wire(wire.sock), wire.h2.data_to_send())
        assert wire.reply(number).body == b"abc"


def test_head_and_no_content_have_no_body(wire: H2Wire) -> None:
    got = wire.get("/hello", method="HEAD")
    assert (got.status, got.headers["content-length"], got.body) == (200, "12", b"")
    got = wire.get("/stream", method="HEAD")
    assert (got.status, got.body) == (200, b"")
    got = wire.get("/empty")
    assert set(got.headers) == {":status", "date"}
    assert wire.get("/hello").status == 200


def test_what_the_application_adds_is_sent_but_for_what_is_of_one_hop(stage: Stage, wire: H2Wire) -> None:
    assert wire.get("/stream").headers["cache-control"] == "no-store"
    got = wire.get("/split")
    assert got.status == 500
    assert len(stage.planted()) == 1


def test_the_application_may_say_that_it_was_the_last_answer(stage: Stage, wire: H2Wire) -> None:
    assert wire.get("/closing").body == b"bye"
    wire.until_closed()
    assert wire.goaway == ErrorCodes.NO_ERROR
    wire.sock.close()
    stage.connections(0)


@pytest.mark.parametrize("target", ["/bug-begin", "/bug-handle"])
def test_a_handler_that_raises_costs_one_request_a_500(stage: Stage, wire: H2Wire, target: str) -> None:
    waits = wire.ask("/later")
    assert stage.app.seen.wait() == "parked /later"
    assert wire.get(target).status == 500
    assert stage.planted() == ["planted"]
    stage.call(stage.app.answer_parked)
    assert wire.reply(waits).body == b"at last"


def test_a_websocket_is_not_offered(stage: Stage, wire: H2Wire) -> None:
    assert wire.get("/ws").body == b"not a websocket"
    assert not stage.app.requests[0].upgrade


# Bodies ---------------------------------------------------------------------------------------------


def test_a_body_larger_than_every_window_arrives_whole(stage: Stage, wire: H2Wire) -> None:
    stage.app.limit = 20_000_000
    body = bytes(range(256)) * 40_000
    assert wire.reply(wire.post("/echo", body)).body == body


def test_bodies_that_interleave_are_kept_apart(wire: H2Wire) -> None:
    numbers = [wire.ask("/echo", method="POST", ends=False) for _ in range(10)]
    for _ in range(20):
        for number in numbers:
            wire.send(number, b"%d," % number)
    for number in numbers:
        wire.send(number, b"", ends=True)
        assert wire.reply(number).body == b"%d," % number * 20


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_does_not_end_the_connection(stage: Stage, wire: H2Wire, declared: bool) -> None:
    waits = wire.ask("/later")
    assert stage.app.seen.wait() == "parked /later"
    for size in (1001, 300_000):
        length = [("content-length", str(size))] if declared else []
        number = wire.post("/echo", b"x" * size, *length)
        got = wire.reply(number)
        assert (got.status, got.body, got.reset) == (413, b"too large", None)
        assert stage.app.seen.wait() == "abandoned /echo"
        assert wire.reply(wire.post("/echo", b"x" * 1000)).status == 200
    assert stage.app.open == 0
    stage.call(stage.app.answer_parked)
    assert wire.reply(waits).body == b"at last"


def test_what_is_thrown_away_is_bounded(limited: Callable[..., Stage]) -> None:
    """Past the bound the stream is reset with NO_ERROR, after the whole answer; the connection goes on."""
    with limited(discard_bytes_max=100_000) as stage, H2Wire(stage) as wire:
        number = wire.ask("/echo", method="POST", ends=False)
        wire.send(number, b"x" * 200_000)
        got = wire.got[number]
        while got.reset is None:
            wire.step()
        assert (got.status, got.body, got.ended, got.reset) == (413, b"too large", True, ErrorCodes.NO_ERROR)
        assert wire.get("/hello").status == 200


def test_a_refusal_by_the_head_comes_before_the_body(wire: H2Wire) -> None:
    number = wire.ask("/refuse", method="POST", ends=False)
    assert wire.reply(number).body == b"no"
    wire.send(number, b"x" * 5000, ends=True)
    assert wire.get("/hello").status == 200


@pytest.mark.parametrize("target", ["/echo", "/slurp"])
def test_a_peer_that_waits_is_told_to_go_on(wire: H2Wire, target: str) -> None:
    number = wire.ask(target, ("expect", "100-continue"), method="POST", ends=False)
    while not wire.got[number].informed:
        wire.step()
    assert wire.got[number].informed == ["100"]
    wire.send(number, b"abc", ends=True)
    assert wire.reply(number).body in (b"abc", b"3")


def test_a_streamed_body_is_handed_over_as_it_comes(stage: Stage, wire: H2Wire) -> None:
    number = wire.ask("/slurp", method="POST", ends=False)
    wire.send(number, b"x" * 10)
    assert stage.app.seen.wait() == "piece 10"
    wire.send(number, b"x" * 20)
    assert stage.app.seen.wait() == "piece 20"
    wire.send(number, b"", ends=True)
    assert wire.reply(number).body == b"30"


def test_a_streamed_body_has_the_same_limit(stage: Stage, wire: H2Wire) -> None:
    number = wire.ask("/slurp", method="POST", ends=False)
    wire.send(number, b"x" * 1000)
    assert stage.app.seen.wait() == "piece 1000"
    wire.send(number, b"x")
    assert wire.reply(number).body == b"1000 bytes, then the body is over 1000 bytes"
    assert stage.app.seen.wait() == "broken 413"
    wire.send(number, b"x", ends=True)
    assert wire.get("/hello").status == 200


def test_a_streamed_body_whose_handler_is_slow_fills_its_window_and_no_more(stage: Stage, wire: H2Wire) -> None:
    """The window is given back as the handler takes pieces, so the other requests on the connection go on."""
    stage.app.limit = 1 << 30
    wire.get("/hello")  # and with it the settings
    number = wire.ask("/slurp-slowly", method="POST", ends=False)
    assert stage.app.seen.wait() == "slurping"
    sent = 0
    while window := wire.h2.local_flow_control_window(number):
        size = min(window, 16_384)
        wire.h2.send_data(number, b"x" * size)
        wire.flush()
        sent += size
    assert sent == 1 << 20
    assert wire.reply(wire.post("/echo", b"x" * 1000)).status == 200
    assert wire.h2.local_flow_control_window(number) == 0

    request, exchange = stage.app.parked[0]
    pieces = request.pieces
    assert pieces is not None

    async def slurp() -> None:
        total = 0
        async for piece in pieces:
            total += len(piece)
        exchange.respond(stage.app.malformed(UNREAD, 200, str(total)))

    stage.call(lambda: stage.app.spawn(slurp()))
    wire.send(number, b"x" * 3_000_000, ends=True)
    assert wire.reply(number).body == b"malformed: %d" % (3_000_000 + (1 << 20))


def test_a_stream_may_answer_a_body_that_goes_on(wire: H2Wire) -> None:
    number = wire.ask("/slurp-duplex", method="POST", ends=False)
    for size in (1, 2, 3):
        wire.send(number, b"x" * size)
        while not wire.got[number].body.endswith(b"got %d\n" % size):
            wire.step()
    wire.send(number, b"", ends=True)
    assert wire.reply(number).body == b"got 1\ngot 2\ngot 3\n"


# Streams, windows and slow peers --------------------------------------------------------------------


def test_a_stream_arrives_whole(wire: H2Wire) -> None:
    got = wire.get("/stream?n=500")
    assert got.body == b"".join(b"piece %d\n" % index for index in range(500))
    assert "content-length" not in got.headers


def test_an_answer_larger_than_every_window_arrives_whole(wire: H2Wire) -> None:
    numbers = [wire.ask("/big?n=3000000") for _ in range(3)]
    for number in numbers:
        assert wire.reply(number).body == b"x" * 3_000_000


def test_a_stream_whose_peer_gives_no_window_costs_itself_only(limited: Callable[..., Stage]) -> None:
    """Method: the peer acknowledges nothing of a flood; others on the same connection are answered; what waits
    stays bounded; then the window opens and the flood goes on."""
    with limited(write_high_bytes=100_000, write_low_bytes=20_000) as stage, H2Wire(stage) as wire:
        wire.h2.increment_flow_control_window(1 << 24)
        wire.acknowledge = False
        number = wire.ask("/flood?size=16000")
        assert stage.app.seen.wait() == "waiting"
        for _ in range(20):
            assert wire.get("/hello").status == 200
        assert len(wire.got[number].body) == 65_535, "its window and no more"
        assert 0 < stage.app.seen.peak <= 100_000 + 16_000
        wire.h2.increment_flow_control_window(1 << 20, number)
        wire.flush()
        while len(wire.got[number].body) < 65_535 + (1 << 20):
            wire.step()
        wire.h2.reset_stream(number)
        wire.flush()
        assert stage.app.seen.wait() in ("flood gone", "flood cancelled")
        assert wire.get("/hello").status == 200


def test_a_window_that_opens_through_settings_is_noticed(stage: Stage) -> None:
    with H2Wire(stage, window=10) as wire:
        number = wire.ask("/big?n=1000")
        while len(wire.got[number].body) < 10:
            wire.step()
        wire.h2.update_settings({4: 5000})
        wire.flush()
        assert len(wire.reply(number).body) == 1000


def test_a_peer_that_does_not_read_its_socket_costs_a_bounded_amount(limited: Callable[..., Stage]) -> None:
    with limited(write_high_bytes=100_000, write_low_bytes=20_000) as stage:
        with H2Wire(stage, window=1 << 30) as wire:
            wire.h2.increment_flow_control_window(1 << 30)
            wire.ask("/flood?size=16000")
            assert stage.app.seen.wait() == "waiting"
            (guest,) = stage.listener._house.guests
            assert stage.call(lambda: guest.transport.get_write_buffer_size()) < 400_000  # type: ignore[attr-defined]
            with H2Wire(stage) as other:
                assert other.get("/hello").status == 200
            assert stage.app.seen.peak <= 2 * 100_000 + (64 << 10) + 2 * 16_000, "two high marks, a quantum, two pieces"
        assert stage.app.seen.wait() in ("flood gone", "flood cancelled")
        stage.connections(0)


def test_a_stream_that_raises_is_cut_off_and_the_connection_goes_on(stage: Stage, wire: H2Wire) -> None:
    got = wire.get("/torn")
    assert (got.ended, got.reset) == (False, ErrorCodes.INTERNAL_ERROR)
    assert stage.planted() == ["planted"]
    assert wire.get("/hello").status == 200


# Peers that leave -----------------------------------------------------------------------------------


def test_a_reset_cancels_a_stream(stage: Stage, wire: H2Wire) -> None:
    number = wire.ask("/events")
    assert stage.app.seen.wait() == "streaming"
    wire.h2.reset_stream(number, ErrorCodes.CANCEL)
    wire.flush()
    assert stage.app.seen.wait() == "stream ended"
    assert wire.get("/hello").status == 200


def test_a_reset_is_told_to_who_waits_for_it(stage: Stage, wire: H2Wire) -> None:
    number = wire.ask("/later")
    assert stage.app.seen.wait() == "parked /later"
    wire.h2.reset_stream(number, ErrorCodes.CANCEL)
    wire.flush()
    assert stage.app.seen.wait() == "gone /later"
    stage.call(stage.app.answer_parked)
    assert wire.get("/hello").status == 200


def test_a_reset_in_the_middle_of_a_body_gives_back_what_it_took(stage: Stage, wire: H2Wire) -> None:
    number = wire.ask("/echo", method="POST", ends=False)
    wire.send(number, b"abc")
    wire.h2.reset_stream(number, ErrorCodes.CANCEL)
    wire.flush()
    assert stage.app.seen.wait() == "abandoned /echo"
    assert stage.app.open == 0


def test_a_request_that_is_taken_back_at_once(wire: H2Wire) -> None:
    """Method: the request and its reset are in one piece, so the answer is made for a stream that is closed."""
    for target in ("/hello", "/stream", "/events", "/refuse", "/big?n=100000"):
        number = wire.h2.get_next_available_stream_id()
        fields = [(":method", "GET"), (":path", target), (":scheme", "http"), (":authority", "t")]
        wire.h2.send_headers(number, fields, end_stream=True)
        wire.h2.reset_stream(number, ErrorCodes.CANCEL)
        wire.flush()
    assert wire.get("/hello").status == 200


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_connection_that_ends_ends_all_of_its_requests(stage: Stage, wire: H2Wire, goodbye: bool) -> None:
    wire.ask("/events")
    assert stage.app.seen.wait() == "streaming"
    wire.ask("/later")
    assert stage.app.seen.wait() == "parked /later"
    if goodbye:
        wire.h2.close_connection()
        wire.flush()
    else:
        wire.sock.close()
    assert {stage.app.seen.wait(), stage.app.seen.wait()} == {"stream ended", "gone /later"}
    wire.sock.close()
    stage.connections(0)


def test_a_peer_that_only_starts_and_resets_is_sent_away(limited: Callable[..., Stage]) -> None:
    with limited(resets_max=50, linger_s=0.1) as stage, H2Wire(stage) as wire:
        for _ in range(60):
            number = wire.ask("/later")
            wire.h2.reset_stream(number, ErrorCodes.CANCEL)
            wire.sock.sendall(wire.h2.data_to_send())
        wire.until_closed()
        assert wire.goaway == ErrorCodes.ENHANCE_YOUR_CALM
        stage.connections(0)


# What is no HTTP/2 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\1\0\0\0\0\0\0x",  # DATA on the connection itself
        b"\0\0\1\0\0\0\0\0\x63x",  # DATA on a stream that is not there
        b"\0\0\4\3\0\0\0\0\0\0\0\0\0",  # a reset of the connection itself
        b"\0\0\5\1\4\0\0\0\1\xff\xff\xff\xff\xff",  # headers that cannot be decoded
        b"\xff\xff\xff\0\0\0\0\0\1" + b"x" * 17_000_000,  # a frame that is larger than allowed
        b"\0\0\4\x08\0\0\0\0\0\0\0\0\0",  # a window that opens by nothing
        b"\0\0\0\x09\4\0\0\0\1",  # more of nothing
    ],
)
def test_a_peer_that_breaks_the_rules_is_sent_away(stage: Stage, wire: H2Wire, data: bytes) -> None:
    assert wire.get("/hello").status == 200
    waits = wire.ask("/later")
    assert stage.app.seen.wait() == "parked /later"
    wire.sock.sendall(data)
    wire.until_closed()
    assert wire.goaway is not None
    assert wire.goaway != ErrorCodes.NO_ERROR
    assert not wire.got[waits].ended
    assert stage.app.seen.wait() == "gone /later"
    wire.sock.close()
    stage.connections(0)


def test_targets_that_are_none_are_refused(wire: H2Wire, stage: Stage) -> None:
    assert wire.get("nowhere").status == 400
    assert wire.get("/" + "x" * 40_000).status == 414
    assert wire.get("/hello").status == 200
    assert [request.path for request in stage.app.requests] == ["/hello"]


# Time, and the end ----------------------------------------------------------------------------------


def test_a_peer_is_asked_whether_it_is_there(limited: Callable[..., Stage]) -> None:
    """Contract 1.1: every 20 s, here a tenth of one. Method: the library answers pings by itself, so the connection
    lives; a peer that only listens with its socket does not answer, and is let go."""
    with limited(ping_every_s=0.1, ping_timeout_s=0.1) as stage:
        with H2Wire(stage) as wire:
            for _ in range(3):
                wire.step()
            assert wire.get("/hello").status == 200
        stage.connections(0)
        with H2Wire(stage) as deaf:
            while deaf.sock.recv(1 << 16):
                pass
            stage.connections(0)


def test_a_body_that_stops_is_given_up(limited: Callable[..., Stage]) -> None:
    with limited(body_timeout_s=0.1) as stage, H2Wire(stage) as wire:
        number = wire.ask("/echo", method="POST", ends=False)
        wire.send(number, b"abc")
        assert wire.reply(number).status == 408
        assert stage.app.seen.wait() == "abandoned /echo"
        while wire.got[number].reset is None:
            wire.step()
        refused = wire.ask("/refuse", method="POST", ends=False)
        assert wire.reply(refused).status == 401
        while wire.got[refused].reset is None:
            wire.step()
        assert wire.get("/hello").status == 200


def test_a_streamed_body_that_stops_is_answered_by_its_handler_and_its_stream_ends(
    limited: Callable[..., Stage],
) -> None:
    with limited(body_timeout_s=0.1) as stage, H2Wire(stage) as wire:
        number = wire.ask("/slurp", method="POST", ends=False)
        wire.send(number, b"abc")
        got = wire.reply(number)
        assert (got.status, got.body) == (408, b"3 bytes, then no more of the body came within 0.1 s")
        while got.reset is None:
            wire.step()
        assert got.reset == ErrorCodes.NO_ERROR
        assert wire.get("/hello").status == 200


def test_an_idle_connection_is_closed(limited: Callable[..., Stage]) -> None:
    with limited(idle_timeout_s=0.1) as stage, H2Wire(stage) as wire:
        assert wire.get("/hello").status == 200
        wire.until_closed()
        assert wire.goaway == ErrorCodes.NO_ERROR


def test_draining_answers_what_was_asked_and_takes_no_more(stage: Stage, wire: H2Wire) -> None:
    waits = wire.ask("/later")
    assert stage.app.seen.wait() == "parked /later"
    with H2Wire(stage) as idle:
        assert idle.get("/hello").status == 200
        draining = asyncio.run_coroutine_threadsafe(stage.listener.drain(20), stage.loop)
        idle.until_closed()
        assert idle.goaway == ErrorCodes.NO_ERROR
    number = wire.ask("/hello")  # it has not heard yet
    while wire.got[number].reset is None:
        data = wire.sock.recv(1 << 16)
        # The library would take the farewell for the end of everything, so it is cut out.
        at = data.find(b"\0\0\x08\x07")
        for event in wire.h2.receive_data(data if at < 0 else data[:at] + data[at + 17 :]):
            wire._on(event)
    assert wire.got[number].reset == ErrorCodes.REFUSED_STREAM
    assert not draining.done()
    stage.call(stage.app.answer_parked)
    assert wire.reply(waits).body == b"at last"
    wire.until_closed()
    wire.sock.close()
    assert draining.result(20) is True
