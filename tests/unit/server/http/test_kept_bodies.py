"""Bodies of requests are bounded over all connections: nobody fills the memory with what is never finished.

Method: a stage whose bound is small. What is kept is read from the house's own count, and bodies are sent until it
refuses; nothing depends on time.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from contextlib import ExitStack

from tests.unit.server.http.h2_wire import H2Wire
from tests.unit.server.http.stage import Stage
from tests.unit.server.http.test_ws import frame, shake

from tidelog.server.http.bodies import Bodies, Kept

KIB = 1 << 10
BOUND = 1 << 20


def kept(stage: Stage) -> int:
    total: int = stage.call(lambda: stage.listener._house.bodies.total)
    return total


def head(size: int) -> bytes:
    return b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % size


def test_the_largest_that_is_still_coming_is_refused(limited: Callable[..., Stage]) -> None:
    with limited(body_bytes_max=BOUND) as stage, ExitStack() as stack:
        stage.app.limit = 8 * BOUND
        small = stack.enter_context(stage.connect())
        small.send(head(100 * KIB) + b"s" * (99 * KIB))
        large = stack.enter_context(stage.connect())
        large.send(head(2 * BOUND) + b"x" * (BOUND + 64 * KIB))
        assert large.sock.recv(12) == b"HTTP/1.1 429"
        small.send(b"s" * KIB)
        assert small.sock.recv(12) == b"HTTP/1.1 200", "what others send little of is served"
        while small.sock.recv(1 << 16)[-1:] != b"s" or kept(stage):
            pass


def test_many_streams_of_one_connection_share_it(limited: Callable[..., Stage]) -> None:
    with limited(body_bytes_max=BOUND) as stage, H2Wire(stage) as wire:
        stage.app.limit = 8 * BOUND
        numbers = [wire.ask("/echo", method="POST", ends=False) for _ in range(8)]
        for number in numbers:
            wire.send(number, b"x" * (200 * KIB))
        assert wire.get("/hello").status == 200
        assert kept(stage) <= BOUND + 200 * KIB

        def refused() -> list[int]:
            return [number for number in numbers if wire.got[number].headers.get(":status") == "429"]

        while not refused():  # the answer to the stream that was refused may come after that to another one
            assert wire.get("/hello").status == 200
        assert len(refused()) < len(numbers)


def test_a_peer_that_leaves_keeps_nothing(limited: Callable[..., Stage]) -> None:
    with limited(body_bytes_max=BOUND) as stage:
        stage.app.limit = 8 * BOUND
        with stage.connect() as wire:
            wire.send(head(BOUND) + b"x" * (500 * KIB))
            while kept(stage) < 500 * KIB:
                pass
        stage.connections(0)
        assert kept(stage) == 0


def test_messages_of_websockets_count(limited: Callable[..., Stage]) -> None:
    with limited(body_bytes_max=300 * KIB, ahead_bytes_max=64 * KIB) as stage, stage.connect() as wire:
        shake(wire)
        wire.send(frame(1, b"x" * 64 * KIB, fin=False))
        for _ in range(8):
            wire.send(frame(0, b"x" * 64 * KIB, fin=False))
        answer = b""
        while data := wire.sock.recv(1 << 16):
            answer += data
        assert answer[:1] == b"\x88"
        assert int.from_bytes(answer[2:4]) == 1013
        assert kept(stage) == 0


def test_decoded_bodies_count_and_all_are_answered(limited: Callable[..., Stage]) -> None:
    """Each decodes to more than half of the bound: they wait for each other, and for nothing else."""
    with limited(body_bytes_max=BOUND) as stage, H2Wire(stage, window=1 << 30) as wire:
        stage.app.limit = 8 * BOUND
        packed = gzip.compress(b"x" * (BOUND // 2 + KIB))
        numbers = [wire.post("/echo", packed, ("content-encoding", "gzip")) for _ in range(12)]
        assert [wire.reply(number).status for number in numbers] == [200] * 12
        assert kept(stage) == 0


def test_what_has_come_whole_is_not_refused() -> None:
    refused: list[str] = []
    later: list[Callable[[], None]] = []
    bodies = Bodies(100, later.append)

    def made(name: str, size: int) -> Kept:
        def refuse() -> None:
            refused.append(name)
            bodies.end(account)

        account = Kept(refuse)
        bodies.set(account, size)
        return account

    whole, _, _ = made("whole", 90), made("large", 60), made("small", 5)
    bodies.whole(whole)
    while later:
        later.pop()()
    assert refused == ["large"]
    assert bodies.total == 95
