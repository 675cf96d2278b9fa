"""Bodies of requests are bounded over all connections: no client fills the memory with bodies that never end.

Method: a stage whose bound is small. What is kept is read from the budget's own count, and bodies are sent until it
refuses; nothing depends on time.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from contextlib import ExitStack

from tests.unit.http.h2_client import H2Client
from tests.unit.http.harness import ListenerHarness
from tests.unit.http.test_websocket import frame, shake

from tidelog.http.limits import BodyReservation, RequestBodyBudget

KIB = 1 << 10
BOUND = 1 << 20


def kept(listener: ListenerHarness) -> int:
    total: int = listener.call(lambda: listener.listener._server_state.body_budget.total)
    return total


def head(size: int) -> bytes:
    return b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % size


def test_the_largest_that_is_still_coming_is_refused(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(body_bytes_max=BOUND) as listener, ExitStack() as stack:
        listener.app.limit = 8 * BOUND
        small = stack.enter_context(listener.connect())
        small.send(head(100 * KIB) + b"s" * (99 * KIB))
        large = stack.enter_context(listener.connect())
        large.send(head(2 * BOUND) + b"x" * (BOUND + 64 * KIB))
        assert large.sock.recv(12) == b"HTTP/1.1 429"
        small.send(b"s" * KIB)
        assert small.sock.recv(12) == b"HTTP/1.1 200", "what others send little of is served"
        while small.sock.recv(1 << 16)[-1:] != b"s" or kept(listener):
            pass


def test_many_streams_of_one_connection_share_it(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(body_bytes_max=BOUND) as listener, H2Client(listener) as connection:
        listener.app.limit = 8 * BOUND
        numbers = [connection.request("/echo", method="POST", ends=False) for _ in range(8)]
        for number in numbers:
            connection.send(number, b"x" * (200 * KIB))
        assert connection.get("/hello").status == 200
        assert kept(listener) <= BOUND + 200 * KIB

        def refused() -> list[int]:
            return [number for number in numbers if connection.got[number].headers.get(":status") == "429"]

        while not refused():  # the answer to the stream that was refused may come after that to another one
            assert connection.get("/hello").status == 200
        assert len(refused()) < len(numbers)


def test_disconnect_releases_the_body(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(body_bytes_max=BOUND) as listener:
        listener.app.limit = 8 * BOUND
        with listener.connect() as connection:
            connection.send(head(BOUND) + b"x" * (500 * KIB))
            while kept(listener) < 500 * KIB:
                pass
        listener.connections(0)
        assert kept(listener) == 0


def test_messages_of_websockets_count(make_listener: Callable[..., ListenerHarness]) -> None:
    with (
        make_listener(body_bytes_max=300 * KIB, ahead_bytes_max=64 * KIB) as listener,
        listener.connect() as connection,
    ):
        shake(connection)
        connection.send(frame(1, b"x" * 64 * KIB, fin=False))
        for _ in range(8):
            connection.send(frame(0, b"x" * 64 * KIB, fin=False))
        answer = b""
        while data := connection.sock.recv(1 << 16):
            answer += data
        assert answer[:1] == b"\x88"
        assert int.from_bytes(answer[2:4]) == 1013
        assert kept(listener) == 0


def test_decoded_bodies_count_and_all_are_answered(make_listener: Callable[..., ListenerHarness]) -> None:
    """Each decodes to more than half of the bound: they wait for each other, and for nothing else."""
    with make_listener(body_bytes_max=BOUND) as listener, H2Client(listener, window=1 << 30) as connection:
        listener.app.limit = 8 * BOUND
        packed = gzip.compress(b"x" * (BOUND // 2 + KIB))
        numbers = [connection.post("/echo", packed, ("content-encoding", "gzip")) for _ in range(12)]
        assert [connection.reply(number).status for number in numbers] == [200] * 12
        assert kept(listener) == 0


def test_complete_body_is_not_refused() -> None:
    refused: list[str] = []
    later: list[Callable[[], None]] = []
    bodies = RequestBodyBudget(100, later.append)

    def made(name: str, size: int) -> BodyReservation:
        def refuse() -> None:
            refused.append(name)
            bodies.release(account)

        account = BodyReservation(refuse)
        bodies.update(account, size)
        return account

    whole, _, _ = made("whole", 90), made("large", 60), made("small", 5)
    bodies.mark_complete(whole)
    while later:
        later.pop()()
    assert refused == ["large"]
    assert bodies.total == 95
