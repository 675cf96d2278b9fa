"""The gate of the kernel and its twin do the same with every piece, and the heads of their answers are the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidelog import _native
from tidelog.http import fast_path as gate
from tidelog.http import h1_encoder
from tidelog.http.fast_path import match_body

BEFORE = b"POST /t HTTP/1.1\r\nHost: h\r\nContent-Length: "
AFTER = b"\r\nX: y\r\n\r\n"
ROOM = 4096


class Owner:
    def __init__(self) -> None:
        self.current: object = None
        self.log: list[object] = []

    def next_request(self, turn: object) -> None:
        assert turn is self.current
        self.log.append("next")
        self.current = None


class Lobby:
    def __init__(self, log: list[object]) -> None:
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []
        self.received_us: list[int] = []
        self._log = log

    def now_us(self) -> int:
        return len(self.bodies)

    def schedule_flush(self) -> None:
        self._log.append("begin")

    def check_limits(self) -> None:
        self._log.append("look")

    def flush(self) -> None:
        if not self.requests:
            return
        self._log.append(("flush", self.bodies[:], self.received_us[:]))
        self.requests.clear()
        self.bodies.clear()
        self.received_us.clear()


class Transport:
    def __init__(self, log: list[object]) -> None:
        self._log, self.closing = log, False

    def write(self, data: bytes) -> None:
        self._log.append(data)
        self.wrote()

    def wrote(self) -> None:
        """What comes of it."""

    def is_closing(self) -> bool:
        return self.closing


class Bench:
    """A gate with everything around it."""

    def __init__(self, kind: Any) -> None:
        class Pass(kind):  # type: ignore[misc]
            def send(self, *data: bytes) -> None:
                self.owner.log.append(("send", data))
                self.owner.current = None

        self.owner = Owner()
        self.log = self.owner.log
        self.buffer = memoryview(bytearray(ROOM))
        self.gate: Any = Pass(self.owner, self.buffer, lambda size: self.log.append(("slow", size)))
        self.lobby, self.transport = Lobby(self.log), Transport(self.log)
        self.send = _native.send_responses if kind is _native.FastPathReader else gate.send_responses_py

    def enter(self, body: bytes = b"first") -> None:
        self.gate.submit(BEFORE, AFTER, self.lobby, self.transport, body)

    def answer(self, body: bytes = b"{}") -> None:
        self.lobby.flush()
        self.send([self.gate], [body], b"<", b"|", b">", b"id-", 31)

    def come(self, piece: bytes) -> None:
        assert self.gate.get_buffer(-1) is self.buffer
        self.buffer[: len(piece)] = piece
        self.gate.buffer_updated(len(piece))

    @property
    def state(self) -> tuple[object, ...]:
        gate = self.gate
        return (gate.is_armed, gate.is_undisturbed, gate.disconnected, gate.was_served, self.owner.current is gate)


def both() -> tuple[Bench, Bench]:
    return Bench(_native.FastPathReader), Bench(gate.PyFastPathReader)


def whole(body: bytes, digits: bytes | None = None) -> bytes:
    return b"%b%b%b%b" % (BEFORE, b"%d" % len(body) if digits is None else digits, AFTER, body)


def pieces() -> st.SearchStrategy[bytes]:
    """Requests with the known head, and what is near to one."""
    bodies = st.binary(max_size=40)
    digits = st.sampled_from([b"", b"0", b"00", b"03", b"3", b"10", b"000003", b"99999", b"100000", b"-1", b"3 "])
    right = bodies.map(whole)
    wrong = st.builds(whole, bodies, digits)

    def cut(piece: bytes, at: int, more: bytes) -> bytes:
        at %= len(piece)
        return piece[:at] + more + piece[at + len(more) :]

    broken = st.builds(cut, right, st.integers(0, 200), st.binary(max_size=2))
    short = st.builds(lambda piece, at: piece[: at % (len(piece) + 1)], right, st.integers(0, 200))
    return right | wrong | broken | short | st.binary(min_size=1, max_size=80)


@given(st.lists(st.tuples(pieces(), st.sampled_from(["answer", "pause", "closing", "away", ""])), max_size=8))
@example([(whole(b"abc", b"3"), "answer"), (whole(b"abc", b"03"), ""), (whole(b"abc", b"000003"), "")])
def test_both_do_the_same_with_whatever_comes(steps: list[tuple[bytes, str]]) -> None:
    for bench in (benches := both()):
        bench.enter()
        bench.answer()
        for piece, then in steps:
            if not piece:
                continue
            bench.come(piece)
            if then == "pause":
                bench.gate.is_undisturbed = False
            bench.transport.closing = then == "closing"
            bench.gate.disconnected = then == "away"
            if bench.owner.current is not None and then:
                bench.answer()
    compiled, twin = benches
    assert compiled.log == twin.log
    assert compiled.state == twin.state


@given(pieces())
def test_a_piece_is_taken_only_where_it_is_that_head_and_its_whole_body(piece: bytes) -> None:
    found = match_body(piece, BEFORE, AFTER)
    if found is None:
        for at in range(len(piece) + 1):
            assert piece != whole(piece[at:])
    else:
        assert piece == whole(found)


@pytest.mark.parametrize("kind", [_native.FastPathReader, gate.PyFastPathReader])
def test_from_the_second_request_on_it_is_armed(kind: Any) -> None:
    bench = Bench(kind)
    bench.come(whole(b"abc"))
    assert bench.log == [("slow", len(whole(b"abc")))], "nothing is known yet"
    bench.log.clear()
    bench.enter()
    bench.answer(b"[1]")
    bench.come(whole(b"abc"))
    bench.answer(b"[22]")
    assert bench.log == [
        *("begin", ("flush", [b"first"], [1]), b"<3|id-1f>[1]"),
        *("begin", ("flush", [b"abc"], [1]), b"<4|id-1f>[22]"),
    ]
    assert bench.gate.is_armed


@pytest.mark.parametrize("kind", [_native.FastPathReader, gate.PyFastPathReader])
def test_what_comes_while_one_is_held_empties_the_lobby_first(kind: Any) -> None:
    bench = Bench(kind)
    bench.enter()
    bench.come(b"more")
    assert bench.log == ["begin", ("flush", [b"first"], [1]), ("slow", 4)]
    bench.answer()
    assert bench.log[-1] == ("send", (b"<2|id-1f>{}",)), "by the owner's own way"
    assert not bench.gate.is_armed


@pytest.mark.parametrize("kind", [_native.FastPathReader, gate.PyFastPathReader])
def test_a_peer_that_falls_behind_with_an_answer_is_not_armed(kind: Any) -> None:
    bench = Bench(kind)
    bench.transport.wrote = lambda: setattr(bench.gate, "is_undisturbed", False)  # type: ignore[method-assign]
    bench.enter()
    bench.answer()
    assert bench.log[-2:] == [b"<2|id-1f>{}", "next"]
    assert bench.state == (False, False, False, False, False)


@pytest.mark.parametrize("kind", [_native.FastPathReader, gate.PyFastPathReader])
def test_a_large_body_and_a_long_line_have_the_lobby_looked_at(kind: Any) -> None:
    bench = Bench(kind)
    bench.enter(b"x" * 4097)
    assert bench.log == ["begin", "look"]
    bench = Bench(kind)
    for _ in range(256):
        bench.enter(b"x")
    assert bench.log == ["begin", "look"]


def test_a_piece_that_claims_to_be_longer_than_the_buffer_is_not_read() -> None:
    bench = Bench(_native.FastPathReader)
    bench.enter()
    bench.answer()
    bench.log.clear()
    bench.gate.buffer_updated(ROOM + 1)
    assert bench.log == [("slow", ROOM + 1)]


@given(st.binary(max_size=300), st.integers(0, (1 << 63) - 1))
def test_the_head_of_an_answer_is_that_of_any_other(body: bytes, number: int) -> None:
    date = b"date: now\r\n"
    for bench in both():
        bench.enter()
        bench.lobby.flush()
        bench.send([bench.gate], [body], *h1_encoder.json_response_parts(date), b"a-", number)
        assert bench.log[-1] == h1_encoder.encode_json_response(body, b"a-%x" % number, date, b"")


def test_answers_for_more_or_fewer_than_there_are_is_a_mistake() -> None:
    for bench in both():
        bench.enter()
        with pytest.raises(ValueError, match="zip"):
            bench.send([bench.gate], [], b"", b"", b"", b"", 1)


def test_a_write_without_records_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="has records"):
        _native.encode_write_responses(1, [0], [1], b"", b"", b"", b"")
