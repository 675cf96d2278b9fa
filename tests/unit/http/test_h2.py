"""HTTP/2 by prior knowledge (contract 1.1): the same application, many requests at once, windows in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from h2.errors import ErrorCodes
from tests.unit.http.h2_client import H2Client, H2Response
from tests.unit.http.harness import ListenerHarness, RawConnection

from tidelog.http.interface import UNREADABLE_REQUEST


@pytest.fixture
def connection(listener: ListenerHarness) -> Iterator[H2Client]:
    with H2Client(listener) as opened:
        yield opened


# The ordinary ---------------------------------------------------------------------------------------


def test_a_request_and_its_answer(listener: ListenerHarness, connection: H2Client) -> None:
    got = connection.get("/hello?a=%zz", ("x-one", "two"))
    assert got.headers == {
        ":status": "200",
        "date": "Sun, 06 Nov 1994 08:49:37 GMT",
        "content-type": "application/json",
        "content-length": "17",
    }
    assert got.body == b'{"hello":"a=%zz"}'
    (request,) = listener.app.requests
    assert (request.method, request.path, request.query) == ("GET", "/hello", "a=%zz")
    assert list(request.headers) == [(b"host", b"t"), (b"x-one", b"two")]
    assert (request.content_length, request.upgrade) == (0, False)
    assert request.peer == "{}:{}".format(*connection.sock.getsockname())


def test_the_settings_are_those_of_the_contract(connection: H2Client) -> None:
    """1024 concurrent streams, 1 MiB for a stream, 4 MiB for the connection."""
    connection.get("/hello")
    assert (connection.settings[3], connection.settings[4]) == (1024, 1 << 20)
    assert connection.h2.outbound_flow_control_window == 4 << 20


def test_requests_do_not_wait_for_one_another(listener: ListenerHarness, connection: H2Client) -> None:
    waits = connection.request("/later?first")
    assert listener.app.seen.wait() == "parked /later"
    others = [connection.request(f"/hello?{index}") for index in range(100)]
    for index, number in enumerate(others):
        assert connection.reply(number).body == b'{"hello":"%d"}' % index
    listener.call(listener.app.answer_parked)
    assert connection.reply(waits).body == b"at lastfirst"
    assert listener.listener.connections == 1


def test_requests_may_arrive_byte_by_byte(listener: ListenerHarness) -> None:
    with H2Client(listener) as connection:
        number = connection.h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", "/echo"), (":scheme", "http"), (":authority", "t")]
        connection.got[number] = H2Response()
        connection.h2.send_headers(number, fields)
        connection.h2.send_data(number, b"abc", end_stream=True)
        listener.send_bytewise(RawConnection(connection.sock), connection.h2.data_to_send())
        assert connection.reply(number).body == b"abc"


def test_head_and_no_content_have_no_body(connection: H2Client) -> None:
    got = connection.get("/hello", method="HEAD")
    assert (got.status, got.headers["content-length"], got.body) == (200, "12", b"")
    got = connection.get("/stream", method="HEAD")
    assert (got.status, got.body) == (200, b"")
    got = connection.get("/empty")
    assert set(got.headers) == {":status", "date"}
    assert connection.get("/hello").status == 200


def test_headers_of_the_application_are_sent_except_hop_by_hop(listener: ListenerHarness, connection: H2Client) -> None:
    assert connection.get("/stream").headers["cache-control"] == "no-store"
    got = connection.get("/split")
    assert got.status == 500
    assert len(listener.expected_errors()) == 1


def test_application_may_close_after_a_response(listener: ListenerHarness, connection: H2Client) -> None:
    assert connection.get("/closing").body == b"bye"
    connection.until_closed()
    assert connection.goaway == ErrorCodes.NO_ERROR
    connection.sock.close()
    listener.connections(0)


@pytest.mark.parametrize("target", ["/bug-begin", "/bug-handle"])
def test_handler_that_raises_answers_one_request_with_500(
    listener: ListenerHarness, connection: H2Client, target: str
) -> None:
    waits = connection.request("/later")
    assert listener.app.seen.wait() == "parked /later"
    assert connection.get(target).status == 500
    assert listener.expected_errors() == ["planted"]
    listener.call(listener.app.answer_parked)
    assert connection.reply(waits).body == b"at last"


def test_a_websocket_is_not_offered(listener: ListenerHarness, connection: H2Client) -> None:
    assert connection.get("/ws").body == b"not a websocket"
    assert not listener.app.requests[0].upgrade


# Bodies ---------------------------------------------------------------------------------------------


def test_a_body_larger_than_every_window_arrives_whole(listener: ListenerHarness, connection: H2Client) -> None:
    listener.app.limit = 20_000_000
    body = bytes(range(256)) * 40_000
    assert connection.reply(connection.post("/echo", body)).body == body


def test_bodies_that_interleave_are_kept_apart(connection: H2Client) -> None:
    numbers = [connection.request("/echo", method="POST", ends=False) for _ in range(10)]
    for _ in range(20):
        for number in numbers:
            connection.send(number, b"%d," % number)
    for number in numbers:
        connection.send(number, b"", ends=True)
        assert connection.reply(number).body == b"%d," % number * 20


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_does_not_end_the_connection(
    listener: ListenerHarness, connection: H2Client, declared: bool
) -> None:
    waits = connection.request("/later")
    assert listener.app.seen.wait() == "parked /later"
    for size in (1001, 300_000):
        length = [("content-length", str(size))] if declared else []
        number = connection.post("/echo", b"x" * size, *length)
        got = connection.reply(number)
        assert (got.status, got.body, got.reset) == (413, b"too large", None)
        assert listener.app.seen.wait() == "abandoned /echo"
        assert connection.reply(connection.post("/echo", b"x" * 1000)).status == 200
    assert listener.app.open == 0
    listener.call(listener.app.answer_parked)
    assert connection.reply(waits).body == b"at last"


def test_discarded_bytes_are_bounded(make_listener: Callable[..., ListenerHarness]) -> None:
    """Past the bound the stream is reset with NO_ERROR, after the whole answer; the connection goes on."""
    with make_listener(discard_bytes_max=100_000) as listener, H2Client(listener) as connection:
        number = connection.request("/echo", method="POST", ends=False)
        connection.send(number, b"x" * 200_000)
        got = connection.got[number]
        while got.reset is None:
            connection.step()
        assert (got.status, got.body, got.ended, got.reset) == (413, b"too large", True, ErrorCodes.NO_ERROR)
        assert connection.get("/hello").status == 200


def test_a_refusal_by_the_head_comes_before_the_body(connection: H2Client) -> None:
    number = connection.request("/refuse", method="POST", ends=False)
    assert connection.reply(number).body == b"no"
    connection.send(number, b"x" * 5000, ends=True)
    assert connection.get("/hello").status == 200


@pytest.mark.parametrize("target", ["/echo", "/slurp"])
def test_client_that_expects_continue_gets_100(connection: H2Client, target: str) -> None:
    number = connection.request(target, ("expect", "100-continue"), method="POST", ends=False)
    while not connection.got[number].informed:
        connection.step()
    assert connection.got[number].informed == ["100"]
    connection.send(number, b"abc", ends=True)
    assert connection.reply(number).body in (b"abc", b"3")


def test_streamed_body_is_passed_on_as_it_arrives(listener: ListenerHarness, connection: H2Client) -> None:
    number = connection.request("/slurp", method="POST", ends=False)
    connection.send(number, b"x" * 10)
    assert listener.app.seen.wait() == "piece 10"
    connection.send(number, b"x" * 20)
    assert listener.app.seen.wait() == "piece 20"
    connection.send(number, b"", ends=True)
    assert connection.reply(number).body == b"30"


def test_a_streamed_body_has_the_same_limit(listener: ListenerHarness, connection: H2Client) -> None:
    number = connection.request("/slurp", method="POST", ends=False)
    connection.send(number, b"x" * 1000)
    assert listener.app.seen.wait() == "piece 1000"
    connection.send(number, b"x")
    assert connection.reply(number).body == b"1000 bytes, then the body is over 1000 bytes"
    assert listener.app.seen.wait() == "broken 413"
    connection.send(number, b"x", ends=True)
    assert connection.get("/hello").status == 200


def test_a_streamed_body_whose_handler_is_slow_fills_its_window_and_no_more(
    listener: ListenerHarness, connection: H2Client
) -> None:
    """The window is given back as the handler takes pieces, so the other requests on the connection go on."""
    listener.app.limit = 1 << 30
    connection.get("/hello")  # and with it the settings
    number = connection.request("/slurp-slowly", method="POST", ends=False)
    assert listener.app.seen.wait() == "slurping"
    sent = 0
    while window := connection.h2.local_flow_control_window(number):
        size = min(window, 16_384)
        connection.h2.send_data(number, b"x" * size)
        connection.flush()
        sent += size
    assert sent == 1 << 20
    assert connection.reply(connection.post("/echo", b"x" * 1000)).status == 200
    assert connection.h2.local_flow_control_window(number) == 0

    request, exchange = listener.app.parked[0]
    pieces = request.body_stream
    assert pieces is not None

    async def slurp() -> None:
        total = 0
        async for piece in pieces:
            total += len(piece)
        exchange.respond(listener.app.malformed(UNREADABLE_REQUEST, 200, str(total)))

    listener.call(lambda: listener.app.spawn(slurp()))
    connection.send(number, b"x" * 3_000_000, ends=True)
    assert connection.reply(number).body == b"malformed: %d" % (3_000_000 + (1 << 20))


def test_a_stream_may_answer_a_body_that_goes_on(connection: H2Client) -> None:
    number = connection.request("/slurp-duplex", method="POST", ends=False)
    for size in (1, 2, 3):
        connection.send(number, b"x" * size)
        while not connection.got[number].body.endswith(b"got %d\n" % size):
            connection.step()
    connection.send(number, b"", ends=True)
    assert connection.reply(number).body == b"got 1\ngot 2\ngot 3\n"


# Streams, windows and slow peers --------------------------------------------------------------------


def test_a_stream_arrives_whole(connection: H2Client) -> None:
    got = connection.get("/stream?n=500")
    assert got.body == b"".join(b"piece %d\n" % index for index in range(500))
    assert "content-length" not in got.headers


def test_an_answer_larger_than_every_window_arrives_whole(connection: H2Client) -> None:
    numbers = [connection.request("/big?n=3000000") for _ in range(3)]
    for number in numbers:
        assert connection.reply(number).body == b"x" * 3_000_000


def test_stream_without_window_blocks_only_itself(make_listener: Callable[..., ListenerHarness]) -> None:
    """Method: the peer acknowledges nothing of a flood; others on the same connection are answered; what waits
    stays bounded; then the window opens and the flood goes on."""
    with make_listener(write_high_bytes=100_000, write_low_bytes=20_000) as listener, H2Client(listener) as connection:
        connection.h2.increment_flow_control_window(1 << 24)
        connection.acknowledge = False
        number = connection.request("/flood?size=16000")
        assert listener.app.seen.wait() == "waiting"
        for _ in range(20):
            assert connection.get("/hello").status == 200
        assert len(connection.got[number].body) == 65_535, "its window and no more"
        assert 0 < listener.app.seen.peak <= 100_000 + 16_000
        connection.h2.increment_flow_control_window(1 << 20, number)
        connection.flush()
        while len(connection.got[number].body) < 65_535 + (1 << 20):
            connection.step()
        connection.h2.reset_stream(number)
        connection.flush()
        assert listener.app.seen.wait() in ("flood gone", "flood cancelled")
        assert connection.get("/hello").status == 200


def test_a_window_that_opens_through_settings_is_noticed(listener: ListenerHarness) -> None:
    with H2Client(listener, window=10) as connection:
        number = connection.request("/big?n=1000")
        while len(connection.got[number].body) < 10:
            connection.step()
        connection.h2.update_settings({4: 5000})
        connection.flush()
        assert len(connection.reply(number).body) == 1000


def test_client_that_does_not_read_costs_bounded_memory(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    with make_listener(write_high_bytes=100_000, write_low_bytes=20_000) as listener:
        with H2Client(listener, window=1 << 30) as connection:
            connection.h2.increment_flow_control_window(1 << 30)
            connection.request("/flood?size=16000")
            assert listener.app.seen.wait() == "waiting"
            (accepted,) = listener.listener._server_state.connections
            assert listener.call(lambda: accepted.transport.get_write_buffer_size()) < 400_000
            with H2Client(listener) as other:
                assert other.get("/hello").status == 200
            assert listener.app.seen.peak <= 2 * 100_000 + (64 << 10) + 2 * 16_000, (
                "two high marks, a quantum, two pieces"
            )
        assert listener.app.seen.wait() in ("flood gone", "flood cancelled")
        listener.connections(0)


def test_a_stream_that_raises_is_cut_off_and_the_connection_goes_on(
    listener: ListenerHarness, connection: H2Client
) -> None:
    got = connection.get("/torn")
    assert (got.ended, got.reset) == (False, ErrorCodes.INTERNAL_ERROR)
    assert listener.expected_errors() == ["planted"]
    assert connection.get("/hello").status == 200


# Peers that leave -----------------------------------------------------------------------------------


def test_a_reset_cancels_a_stream(listener: ListenerHarness, connection: H2Client) -> None:
    number = connection.request("/events")
    assert listener.app.seen.wait() == "streaming"
    connection.h2.reset_stream(number, ErrorCodes.CANCEL)
    connection.flush()
    assert listener.app.seen.wait() == "stream ended"
    assert connection.get("/hello").status == 200


def test_reset_calls_the_disconnect_callbacks(listener: ListenerHarness, connection: H2Client) -> None:
    number = connection.request("/later")
    assert listener.app.seen.wait() == "parked /later"
    connection.h2.reset_stream(number, ErrorCodes.CANCEL)
    connection.flush()
    assert listener.app.seen.wait() == "gone /later"
    listener.call(listener.app.answer_parked)
    assert connection.get("/hello").status == 200


def test_reset_in_the_middle_of_a_body_releases_it(listener: ListenerHarness, connection: H2Client) -> None:
    number = connection.request("/echo", method="POST", ends=False)
    connection.send(number, b"abc")
    connection.h2.reset_stream(number, ErrorCodes.CANCEL)
    connection.flush()
    assert listener.app.seen.wait() == "abandoned /echo"
    assert listener.app.open == 0


def test_a_request_that_is_taken_back_at_once(connection: H2Client) -> None:
    """Method: the request and its reset are in one piece, so the answer is made for a stream that is closed."""
    for target in ("/hello", "/stream", "/events", "/refuse", "/big?n=100000"):
        number = connection.h2.get_next_available_stream_id()
        fields = [(":method", "GET"), (":path", target), (":scheme", "http"), (":authority", "t")]
        connection.h2.send_headers(number, fields, end_stream=True)
        connection.h2.reset_stream(number, ErrorCodes.CANCEL)
        connection.flush()
    assert connection.get("/hello").status == 200


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_connection_that_ends_ends_all_of_its_requests(
    listener: ListenerHarness, connection: H2Client, goodbye: bool
) -> None:
    connection.request("/events")
    assert listener.app.seen.wait() == "streaming"
    connection.request("/later")
    assert listener.app.seen.wait() == "parked /later"
    if goodbye:
        connection.h2.close_connection()
        connection.flush()
    else:
        connection.sock.close()
    assert {listener.app.seen.wait(), listener.app.seen.wait()} == {"stream ended", "gone /later"}
    connection.sock.close()
    listener.connections(0)


def test_client_that_only_starts_and_resets_gets_goaway(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(resets_max=50, linger_s=0.1) as listener, H2Client(listener) as connection:
        for _ in range(60):
            number = connection.request("/later")
            connection.h2.reset_stream(number, ErrorCodes.CANCEL)
            connection.sock.sendall(connection.h2.data_to_send())
        connection.until_closed()
        assert connection.goaway == ErrorCodes.ENHANCE_YOUR_CALM
        listener.connections(0)


# What is no HTTP/2 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\1\0\0\0\0\0\0x",  # DATA on the connection itself
        b"\0\0\1\0\0\0\0\0\x63x",  # DATA on a stream that is not there
        b"\0\0\4\3\0\0\0\0\0\0\0\0\0",  # a reset of the connection itself
        b"\0\0\5\1\4\0\0\0\1\xff\xff\xff\xff\xff",  # headers that cannot be decoded
        b"\xff\xff\xff\0\0\0\0\0\1",  # a frame that is larger than allowed
        b"\0\0\4\x08\0\0\0\0\0\0\0\0\0",  # a window that opens by nothing
        b"\0\0\0\x09\4\0\0\0\1",  # more of nothing
    ],
)
def test_client_that_breaks_the_protocol_gets_goaway(
    listener: ListenerHarness, connection: H2Client, data: bytes
) -> None:
    assert connection.get("/hello").status == 200
    waits = connection.request("/later")
    assert listener.app.seen.wait() == "parked /later"
    if data.startswith(b"\xff"):
        data += b"x" * 17_000_000
    connection.sock.sendall(data)
    connection.until_closed()
    assert connection.goaway is not None
    assert connection.goaway != ErrorCodes.NO_ERROR
    assert not connection.got[waits].ended
    assert listener.app.seen.wait() == "gone /later"
    connection.sock.close()
    listener.connections(0)


def test_targets_that_are_none_are_refused(connection: H2Client, listener: ListenerHarness) -> None:
    assert connection.get("nowhere").status == 400
    assert connection.get("/" + "x" * 40_000).status == 414
    assert connection.get("/hello").status == 200
    assert [request.path for request in listener.app.requests] == ["/hello"]


# Time, and the end ----------------------------------------------------------------------------------


def test_client_is_pinged(make_listener: Callable[..., ListenerHarness]) -> None:
    """Contract 1.1: every 20 s, here a tenth of one. Method: the library answers pings by itself, so the connection
    lives; a peer that only listens with its socket does not answer, and is let go."""
    with make_listener(ping_every_s=0.1, ping_timeout_s=0.1) as listener:
        with H2Client(listener) as connection:
            for _ in range(3):
                connection.step()
            assert connection.get("/hello").status == 200
        listener.connections(0)
        with H2Client(listener) as deaf:
            while deaf.sock.recv(1 << 16):
                pass
            listener.connections(0)


def test_a_body_that_stops_is_given_up(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(body_timeout_s=0.1) as listener, H2Client(listener) as connection:
        number = connection.request("/echo", method="POST", ends=False)
        connection.send(number, b"abc")
        assert connection.reply(number).status == 408
        assert listener.app.seen.wait() == "abandoned /echo"
        while connection.got[number].reset is None:
            connection.step()
        refused = connection.request("/refuse", method="POST", ends=False)
        assert connection.reply(refused).status == 401
        while connection.got[refused].reset is None:
            connection.step()
        assert connection.get("/hello").status == 200


def test_a_streamed_body_that_stops_is_answered_by_its_handler_and_its_stream_ends(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    with make_listener(body_timeout_s=0.1) as listener, H2Client(listener) as connection:
        number = connection.request("/slurp", method="POST", ends=False)
        connection.send(number, b"abc")
        got = connection.reply(number)
        assert (got.status, got.body) == (408, b"3 bytes, then no more of the body arrived within 0.1 s")
        while got.reset is None:
            connection.step()
        assert got.reset == ErrorCodes.NO_ERROR
        assert connection.get("/hello").status == 200


def test_an_idle_connection_is_closed(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(idle_timeout_s=0.1) as listener, H2Client(listener) as connection:
        assert connection.get("/hello").status == 200
        connection.until_closed()
        assert connection.goaway == ErrorCodes.NO_ERROR


def test_draining_answers_open_requests_and_accepts_no_more(listener: ListenerHarness, connection: H2Client) -> None:
    waits = connection.request("/later")
    assert listener.app.seen.wait() == "parked /later"
    with H2Client(listener) as idle:
        assert idle.get("/hello").status == 200
        draining = asyncio.run_coroutine_threadsafe(listener.listener.drain(20), listener.loop)
        idle.until_closed()
        assert idle.goaway == ErrorCodes.NO_ERROR
    number = connection.request("/hello")  # it has not heard yet
    while connection.got[number].reset is None:
        data = connection.sock.recv(1 << 16)
        # The library would take the farewell for the end of everything, so it is cut out.
        at = data.find(b"\0\0\x08\x07")
        for event in connection.h2.receive_data(data if at < 0 else data[:at] + data[at + 17 :]):
            connection._on(event)
    assert connection.got[number].reset == ErrorCodes.REFUSED_STREAM
    assert not draining.done()
    listener.call(listener.app.answer_parked)
    assert connection.reply(waits).body == b"at last"
    connection.until_closed()
    connection.sock.close()
    assert draining.result(20) is True
