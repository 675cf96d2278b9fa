"""Peers that do not read: their streams end in time, what waits for them is bounded over all connections, and peers
that read anything are left alone.

Method: time passes where a test says so, by looking at a connection with a later time; nothing waits for a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from h2.errors import ErrorCodes
from tests.unit.server.http.h2_wire import H2Wire
from tests.unit.server.http.stage import App, Stage

from tidelog.server.http.limits import Limits
from tidelog.server.http.seam import Exchange, Request, Sink, Stream
from tidelog.server.http.unsent import GRACE_S, Account, Unsent


class Careful(App):
    """With a stream that makes nothing before its peer takes bytes."""

    made = 0

    def on_careful(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        async def run(sink: Sink) -> None:
            for _ in range(4):
                await sink.ready()
                self.made += 1
                sink.write(b"x" * 1_000)
            self.seen.say("careful ended")

        self.seen.say("careful")
        exchange.respond(Stream(200, run, b"text/plain"))


def refusals(stage: Stage) -> dict[str, int]:
    return {name: count for name, count in stage.listener._house.refusals.counts.items() if count}


def later(stage: Stage, seconds: float) -> None:
    """Have every connection look at a clock that is so much later."""

    def look() -> None:
        house = stage.listener._house
        house.now += seconds
        for guest in tuple(house.guests):
            guest.tick(house.now)

    stage.call(look)


def unsent(stage: Stage) -> int:
    total = stage.call(lambda: stage.listener._house.unsent.total)
    assert isinstance(total, int)
    return total


LATE: dict[str, Any] = {"write_timeout_s": 10_000.0, "ping_every_s": 1e9, "idle_timeout_s": 1e9}


def test_a_stream_whose_window_stays_closed_is_reset_and_others_go_on(limited: Callable[..., Stage]) -> None:
    with limited(**LATE) as stage, H2Wire(stage, window=0) as wire:
        number = wire.ask("/big?n=100000")
        assert wire.get("/empty").status == 204
        assert unsent(stage) == 100_000
        later(stage, 9_000)
        assert wire.get("/empty").status == 204
        later(stage, 2_000)
        assert wire.reply(number).reset == ErrorCodes.CANCEL
        assert wire.get("/empty").status == 204, "the connection goes on"
        assert unsent(stage) == 0
        assert refusals(stage) == {"stalled": 1}


def test_one_byte_is_progress(limited: Callable[..., Stage]) -> None:
    with limited(**LATE) as stage, H2Wire(stage, window=0) as wire:
        number = wire.ask("/big?n=100000")
        assert wire.get("/empty").status == 204, "the request has arrived: what has not begun ends sooner"
        for size in range(1, 5):
            later(stage, 9_000)
            wire.h2.increment_flow_control_window(1, number)
            wire.flush()
            while len(wire.got[number].body) < size:
                wire.step()
        assert refusals(stage) == {}


def test_a_connection_whose_window_stays_closed_loses_its_streams(limited: Callable[..., Stage]) -> None:
    """The streams have windows; the connection's 65,535 bytes are used up and never given back."""
    with limited(**LATE) as stage, H2Wire(stage, window=1 << 20, acknowledge=False) as wire:
        numbers = [wire.ask("/big?n=100000") for _ in range(3)]
        assert wire.get("/empty").status == 204
        later(stage, 9_000)
        assert refusals(stage) == {}
        later(stage, 2_000)
        assert [wire.reply(number).reset for number in numbers] == [ErrorCodes.CANCEL] * 3
        assert unsent(stage) == 0


@pytest.mark.parametrize("opens", ["stream", "settings"])
def test_nothing_is_made_for_a_closed_window(kind: str, opens: str) -> None:
    app = Careful()
    with Stage(kind, app=app) as stage, H2Wire(stage, window=0) as wire:
        number = wire.ask("/careful")
        assert app.seen.wait() == "careful"
        assert wire.get("/empty").status == 204
        assert (app.made, unsent(stage)) == (0, 0)
        if opens == "stream":
            wire.h2.increment_flow_control_window(100_000, number)
        else:
            wire.h2.update_settings({4: 100_000})
        wire.flush()
        assert len(wire.reply(number).body) == 4_000


def test_a_handler_that_waits_for_a_window_is_given_up_too(kind: str) -> None:
    app = Careful()
    with Stage(kind, Limits(**LATE), app=app) as stage, H2Wire(stage, window=0) as wire:
        number = wire.ask("/careful")
        assert app.seen.wait() == "careful"
        later(stage, 11_000)
        assert wire.reply(number).reset == ErrorCodes.CANCEL
        assert app.made == 0


def test_bytes_for_peers_that_do_not_read_are_bounded_over_all_streams(limited: Callable[..., Stage]) -> None:
    """The oldest go first, and a peer that reads is served all the while."""
    with limited(unsent_bytes_max=1_000_000) as stage, H2Wire(stage, window=0) as idle, H2Wire(stage) as busy:
        numbers = [idle.ask("/big?n=300000") for _ in range(10)]
        assert idle.get("/empty").status == 204  # whole answers do not wait for room: the oldest are closed by now
        for _ in range(10):
            assert len(busy.get("/big?n=100000").body) == 100_000
        assert idle.get("/empty").status == 204
        assert unsent(stage) <= 1_000_000
        reset = [number for number in numbers if idle.got[number].reset is not None]
        assert reset == numbers[: len(reset)], "the oldest first"
        assert len(reset) >= 7
        assert refusals(stage) == {"unsent_bytes": len(reset)}


def test_connections_of_http1_count_among_them(limited: Callable[..., Stage]) -> None:
    limits = {"unsent_bytes_max": 10_000_000, "write_high_bytes": 100_000, "write_low_bytes": 50_000}
    with limited(**limits) as stage:
        wires = [stage.connect(1 << 14) for _ in range(4)]
        try:
            for wire in wires:
                wire.send(b"GET /big?n=9000000 HTTP/1.1\r\nhost: t\r\n\r\n")
            with stage.connect() as other:
                other.send(b"GET /hello HTTP/1.1\r\nhost: t\r\n\r\n")
                assert other.head().status == 200
            later(stage, 0)
            with stage.connect() as other:
                other.send(b"GET /hello HTTP/1.1\r\nhost: t\r\n\r\n")
                assert other.head().status == 200
            assert unsent(stage) <= 10_000_000
            assert set(refusals(stage)) == {"unsent_bytes"}
        finally:
            for wire in wires:
                wire.sock.close()
        stage.connections(0)
        assert unsent(stage) == 0


def test_streams_of_one_connection_are_limited(limited: Callable[..., Stage]) -> None:
    with limited(connection_streams_max=3) as stage, H2Wire(stage, window=0) as wire:
        held = [wire.ask("/flood?size=1000") for _ in range(3)]
        wire.h2.update_settings({4: 1_000})
        wire.flush()
        assert wire.get("/stream?n=1").status == 429
        wire.h2.reset_stream(held[0])
        wire.flush()
        assert wire.get("/stream?n=1").status == 200
        assert wire.get("/stream?n=1").status == 200, "one that ended gives its place back"
        assert refusals(stage) == {"streams": 1}


def test_heads_of_open_requests_are_limited(limited: Callable[..., Stage]) -> None:
    with limited(connection_header_bytes_max=20_000) as stage, H2Wire(stage) as wire:
        big = ("x-big", "y" * 9_000)
        held = [wire.ask("/later", big) for _ in range(2)]
        assert wire.reply(wire.ask("/empty", big)).reset == ErrorCodes.REFUSED_STREAM
        wire.h2.reset_stream(held[0])
        wire.flush()
        assert wire.reply(wire.ask("/empty", big)).status == 204
        assert refusals(stage) == {"header_bytes": 1}


def test_the_account_that_went_longest_without_progress_is_closed_first() -> None:
    closed: list[str] = []
    later_calls: list[tuple[float, Callable[[], None]]] = []
    budget = Unsent(100, lambda seconds, call: later_calls.append((seconds, call)), lambda: 0.0)
    accounts: dict[str, Account] = {}

    def close(name: str) -> None:
        closed.append(name)
        budget.end(accounts[name])

    for name in "abc":
        accounts[name] = Account(lambda name=name: close(name))  # type: ignore[misc]
        budget.set(accounts[name], 30)
    budget.set(accounts["a"], 29)  # it takes one
    budget.set(accounts["c"], 50)
    assert (closed, budget.total) == ([], 109)
    assert [seconds for seconds, _ in later_calls] == [GRACE_S, 0], "above the bound there is no grace"
    later_calls[-1][1]()
    assert (closed, budget.total) == (["b"], 79)
    budget.set(accounts["b"], 1_000)
    assert budget.total == 79, "what is closed counts no more"


def test_below_the_bound_only_accounts_that_took_nothing_for_a_while_are_closed() -> None:
    """A connection is measured when it blocks and once a second: its peer may have read since."""
    closed: list[str] = []
    later_calls: list[Callable[[], None]] = []
    now = 0.0
    budget = Unsent(100, lambda _, call: later_calls.append(call), lambda: now)
    reading = Account(lambda: closed.append("reading"), lambda: budget.set(reading, 10))

    def close_silent() -> None:
        closed.append("silent")
        budget.end(silent)

    silent = Account(close_silent)
    budget.set(reading, 30)
    budget.set(silent, 60)
    now = GRACE_S / 2
    later_calls.pop()()
    assert closed == []
    now = GRACE_S
    budget.set(reading, 5)
    later_calls.pop()()
    assert (closed, budget.total) == (["silent"], 5)


def test_streams_produce_nothing_while_the_bound_is_met() -> None:
    budget = Unsent(100, lambda _, __: None, lambda: 0.0)
    account = Account(lambda: None)
    budget.set(account, 51)

    async def wait() -> bool:
        waiting = asyncio.ensure_future(budget.room())
        for _ in range(3):
            await asyncio.sleep(0)
        waited = not waiting.done()
        budget.set(account, 50)
        await waiting
        return waited

    assert asyncio.run(wait())
