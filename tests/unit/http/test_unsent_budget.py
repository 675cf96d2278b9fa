"""Peers that do not read: their streams end in time, what waits for them is bounded over all connections, and peers
that read anything are left alone.

Method: time passes where a test says so, by looking at a connection with a later time; nothing waits for a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from h2.errors import ErrorCodes
from tests.unit.http.h2_client import H2Client
from tests.unit.http.harness import App, ListenerHarness

from tidelog.http.interface import Exchange, Request, Sink, Stream
from tidelog.http.limits import GRACE_S, Limits, UnsentAccount, UnsentBudget


class Careful(App):
    """With a stream that makes nothing before its peer takes bytes."""

    made = 0

    def on_careful(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        async def run(sink: Sink) -> None:
            for _ in range(4):
                await sink.wait_ready()
                self.made += 1
                sink.write(b"x" * 1_000)
            self.seen.record("careful ended")

        self.seen.record("careful")
        exchange.respond(Stream(200, run, b"text/plain"))


def refusals(listener: ListenerHarness) -> dict[str, int]:
    return {name: count for name, count in listener.listener._server_state.limit_counters.counts.items() if count}


def later(listener: ListenerHarness, seconds: float) -> None:
    """Have every connection look at a clock that is so much later."""

    def look() -> None:
        state = listener.listener._server_state
        state.now_s += seconds
        for accepted in tuple(state.connections):
            accepted.tick(state.now_s)

    listener.call(look)


def unsent(listener: ListenerHarness) -> int:
    total = listener.call(lambda: listener.listener._server_state.unsent_budget.total)
    assert isinstance(total, int)
    return total


LATE: dict[str, Any] = {"write_timeout_s": 10_000.0, "ping_every_s": 1e9, "idle_timeout_s": 1e9}


def test_stream_whose_window_stays_closed_is_reset_and_others_continue(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    with make_listener(**LATE) as listener, H2Client(listener, window=0) as connection:
        number = connection.request("/big?n=100000")
        assert connection.get("/empty").status == 204
        assert unsent(listener) == 100_000
        later(listener, 9_000)
        assert connection.get("/empty").status == 204
        later(listener, 2_000)
        assert connection.reply(number).reset == ErrorCodes.CANCEL
        assert connection.get("/empty").status == 204, "the connection goes on"
        assert unsent(listener) == 0
        assert refusals(listener) == {"stalled": 1}


def test_one_byte_is_progress(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(**LATE) as listener, H2Client(listener, window=0) as connection:
        number = connection.request("/big?n=100000")
        assert connection.get("/empty").status == 204, "the request has arrived: what has not begun ends sooner"
        for size in range(1, 5):
            later(listener, 9_000)
            connection.h2.increment_flow_control_window(1, number)
            connection.flush()
            while len(connection.got[number].body) < size:
                connection.step()
        assert refusals(listener) == {}


def test_a_connection_whose_window_stays_closed_loses_its_streams(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    """The streams have windows; the connection's 65,535 bytes are used up and never given back."""
    with make_listener(**LATE) as listener, H2Client(listener, window=1 << 20, acknowledge=False) as connection:
        numbers = [connection.request("/big?n=100000") for _ in range(3)]
        assert connection.get("/empty").status == 204
        later(listener, 9_000)
        assert refusals(listener) == {}
        later(listener, 2_000)
        assert [connection.reply(number).reset for number in numbers] == [ErrorCodes.CANCEL] * 3
        assert unsent(listener) == 0


@pytest.mark.parametrize("opens", ["stream", "settings"])
def test_nothing_is_made_for_a_closed_window(kind: str, opens: str) -> None:
    app = Careful()
    with ListenerHarness(kind, app=app) as listener, H2Client(listener, window=0) as connection:
        number = connection.request("/careful")
        assert app.seen.wait() == "careful"
        assert connection.get("/empty").status == 204
        assert (app.made, unsent(listener)) == (0, 0)
        if opens == "stream":
            connection.h2.increment_flow_control_window(100_000, number)
        else:
            connection.h2.update_settings({4: 100_000})
        connection.flush()
        assert len(connection.reply(number).body) == 4_000


def test_a_handler_that_waits_for_a_window_is_given_up_too(kind: str) -> None:
    app = Careful()
    with ListenerHarness(kind, Limits(**LATE), app=app) as listener, H2Client(listener, window=0) as connection:
        number = connection.request("/careful")
        assert app.seen.wait() == "careful"
        later(listener, 11_000)
        assert connection.reply(number).reset == ErrorCodes.CANCEL
        assert app.made == 0


def test_unread_bytes_are_bounded_over_all_streams(
    make_listener: Callable[..., ListenerHarness],
) -> None:
    """The oldest go first, and a peer that reads is served all the while."""
    with (
        make_listener(unsent_bytes_max=1_000_000) as listener,
        H2Client(listener, window=0) as idle,
        H2Client(listener) as busy,
    ):
        numbers = [idle.request("/big?n=300000") for _ in range(10)]
        assert idle.get("/empty").status == 204  # whole responses do not wait: the oldest are closed by now
        for _ in range(10):
            assert len(busy.get("/big?n=100000").body) == 100_000
        assert idle.get("/empty").status == 204
        assert unsent(listener) <= 1_000_000
        reset = [number for number in numbers if idle.got[number].reset is not None]
        assert reset == numbers[: len(reset)], "the oldest first"
        assert len(reset) >= 7
        assert refusals(listener) == {"unsent_bytes": len(reset)}


def test_connections_of_http1_count_among_them(make_listener: Callable[..., ListenerHarness]) -> None:
    limits = {"unsent_bytes_max": 10_000_000, "write_high_bytes": 100_000, "write_low_bytes": 50_000}
    with make_listener(**limits) as listener:
        wires = [listener.connect(1 << 14) for _ in range(4)]
        try:
            for connection in wires:
                connection.send(b"GET /big?n=9000000 HTTP/1.1\r\nhost: t\r\n\r\n")
            with listener.connect() as other:
                other.send(b"GET /hello HTTP/1.1\r\nhost: t\r\n\r\n")
                assert other.head().status == 200
            later(listener, 0)
            with listener.connect() as other:
                other.send(b"GET /hello HTTP/1.1\r\nhost: t\r\n\r\n")
                assert other.head().status == 200
            assert unsent(listener) <= 10_000_000
            assert set(refusals(listener)) == {"unsent_bytes"}
        finally:
            for connection in wires:
                connection.sock.close()
        listener.connections(0)
        assert unsent(listener) == 0


def test_streams_of_one_connection_are_limited(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(connection_streams_max=3) as listener, H2Client(listener, window=0) as connection:
        held = [connection.request("/flood?size=1000") for _ in range(3)]
        connection.h2.update_settings({4: 1_000})
        connection.flush()
        assert connection.get("/stream?n=1").status == 429
        connection.h2.reset_stream(held[0])
        connection.flush()
        assert connection.get("/stream?n=1").status == 200
        assert connection.get("/stream?n=1").status == 200, "one that ended gives its place back"
        assert refusals(listener) == {"streams": 1}


def test_heads_of_open_requests_are_limited(make_listener: Callable[..., ListenerHarness]) -> None:
    with make_listener(connection_header_bytes_max=20_000) as listener, H2Client(listener) as connection:
        big = ("x-big", "y" * 9_000)
        held = [connection.request("/later", big) for _ in range(2)]
        assert connection.reply(connection.request("/empty", big)).reset == ErrorCodes.REFUSED_STREAM
        connection.h2.reset_stream(held[0])
        connection.flush()
        assert connection.reply(connection.request("/empty", big)).status == 204
        assert refusals(listener) == {"header_bytes": 1}


def test_the_account_that_went_longest_without_progress_is_closed_first() -> None:
    closed: list[str] = []
    later_calls: list[tuple[float, Callable[[], None]]] = []
    budget = UnsentBudget(100, lambda seconds, call: later_calls.append((seconds, call)), lambda: 0.0)
    accounts: dict[str, UnsentAccount] = {}
    sizes = dict.fromkeys("abc", 30)

    def evict(name: str) -> None:
        closed.append(name)
        accounts[name].release()

    def set_size(name: str, size: int) -> None:
        sizes[name] = size
        accounts[name].update()

    for name in "abc":
        accounts[name] = UnsentAccount(budget, partial(sizes.__getitem__, name), partial(evict, name))
        accounts[name].update()
    set_size("a", 29)  # its client read one byte
    set_size("c", 50)
    assert (closed, budget.total) == ([], 109)
    assert [seconds for seconds, _ in later_calls] == [GRACE_S, 0], "above the bound there is no grace"
    later_calls[-1][1]()
    assert (closed, budget.total) == (["b"], 79)
    set_size("b", 1_000)
    assert budget.total == 79, "a closed account no longer counts"


def test_below_the_bound_only_accounts_that_took_nothing_for_a_while_are_closed() -> None:
    """A connection is measured when it blocks and once a second: its peer may have read since."""
    closed: list[str] = []
    later_calls: list[Callable[[], None]] = []
    now = 0.0
    budget = UnsentBudget(100, lambda _, call: later_calls.append(call), lambda: now)
    sizes = {"reading": 30, "silent": 60}
    reading = UnsentAccount(budget, lambda: sizes["reading"], lambda: closed.append("reading"))

    def evict_silent() -> None:
        closed.append("silent")
        silent.release()

    silent = UnsentAccount(budget, lambda: sizes["silent"], evict_silent)
    reading.update()
    silent.update()
    now, sizes["reading"] = GRACE_S / 2, 10
    later_calls.pop()()
    assert closed == []
    now, sizes["reading"] = GRACE_S, 5
    reading.update()
    later_calls.pop()()
    assert (closed, budget.total) == (["silent"], 5)


def test_streams_produce_nothing_while_the_bound_is_met() -> None:
    budget = UnsentBudget(100, lambda _, __: None, lambda: 0.0)
    account = UnsentAccount(budget, lambda: 0, lambda: None)
    account.reserve(51)

    async def wait() -> bool:
        waiting = asyncio.ensure_future(budget.wait_below_half())
        for _ in range(3):
            await asyncio.sleep(0)
        waited = not waiting.done()
        account.reserve(50)
        await waiting
        return waited

    assert asyncio.run(wait())
