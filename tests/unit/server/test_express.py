"""Writes whose heads are known: what is taken, what is left to the ordinary way, and how each is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.server.fakes import World, play

from tidelog.engine import Appended
from tidelog.errors import Busy
from tidelog.server import gather
from tidelog.server.api.write import saying, told
from tidelog.server.http.seam import Express, Request, Response

BODY = b'{"records":[{"data":1},{"data":"two"}]}'


class Slip:
    """A ticket that remembers its answer."""

    def __init__(self) -> None:
        self.said: list[tuple[int, dict[str, Any]]] = []

    def answer(self, body: bytes, request_id: bytes) -> None:
        assert request_id
        self.said.append((200, json.loads(body)))

    def answer_in(self, pieces: Sequence[bytes], request_id: bytes) -> None:
        self.answer(b"".join(pieces), request_id)

    def respond(self, response: Response) -> None:
        assert b"x-request-id" in dict(response.headers)
        self.said.append((response.status, json.loads(response.body)))


def express(world: World, target: str = "/v0/topics/t", most: int = 1 << 16, **headers: str) -> Express | None:
    path, _, query = target.partition("?")
    lines = [(b"content-type", b"application/json")]
    lines += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return world.app.express(Request("POST", path, query, lines, length=len(BODY)), most)


async def taken(world: World, bodies: list[bytes], most: int = 1 << 16) -> list[bool]:
    """Which of them are; those are answered as well."""
    take = express(world, most=most)
    assert take is not None
    slips = [Slip() for _ in bodies]
    found = [take(body, slip) for body, slip in zip(bodies, slips, strict=True)]
    while [bool(slip.said) for slip in slips] != found:
        await asyncio.sleep(0)
    return found


def frames(world: World) -> int:
    return sum(shard.stats.frames for shard in world.engine.shards)


def test_writes_of_a_turn_are_one_frame_and_each_has_its_seqs() -> None:
    async def scenario(world: World) -> None:
        world.topic("t", durability="fsync")
        take, slips, before = express(world), [Slip() for _ in range(5)], frames(world)
        assert take is not None
        assert all(take(BODY, slip) for slip in slips)
        assert not any(slip.said for slip in slips), "at the end of the turn"
        while not slips[-1].said:
            await asyncio.sleep(0)
        assert [answer["seqs"] for slip in slips for _, answer in slip.said] == [[n, n + 1] for n in (1, 3, 5, 7, 9)]
        assert {answer["head_seq"] for slip in slips for _, answer in slip.said} == {10}
        assert frames(world) == before + 1

    play(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"records":[]}',
        b'{"records":[{"data":1,"tag":"t"}]}',
        b'{"records":[{"data":1}],"node":"n"}',
        b"x",
    ],
)
def test_what_is_not_plain_is_not_taken(body: bytes) -> None:
    async def scenario(world: World) -> None:
        world.topic("t")
        assert await taken(world, [body, BODY]) == [False, True]

    play(scenario)


def test_a_batch_that_is_full_is_followed_by_another_in_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of a topic is held on to when everybody was answered."""

    async def scenario(world: World) -> None:
        monkeypatch.setattr(gather, "_RECORDS_MAX", 3)
        world.topic("t")
        before = frames(world)
        take, slips = express(world), [Slip() for _ in range(5)]
        assert take is not None
        assert all(take(BODY, slip) for slip in slips)
        while not slips[-1].said:
            await asyncio.sleep(0)
        assert [answer["seqs"] for slip in slips for _, answer in slip.said] == [[n, n + 1] for n in (1, 3, 5, 7, 9)]
        assert frames(world) == before + 1 + 3, "and one that reserves seqs"
        assert world.service.inflight.held == 0
        world.engine.drop("t")
        assert not take(BODY, Slip()), "what was found out in one turn is not believed in the next"

    play(scenario)


@pytest.mark.parametrize("config", [{"discard": "reject", "cap_records": 9}, {"ttl_ms": 1000}])
def test_a_topic_where_one_write_may_weigh_on_another_takes_none(config: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        world.topic("t", **config)
        assert await taken(world, [BODY, BODY]) == [False, False]

    play(scenario)


def test_a_topic_that_is_not_there_takes_none() -> None:
    async def scenario(world: World) -> None:
        assert await taken(world, [BODY]) == [False]

    play(scenario)


def test_an_answer_that_would_be_too_large_is_not_given() -> None:
    async def scenario(world: World) -> None:
        world.topic("t")
        many = b'{"records":[%b{"data":1}]}' % (b'{"data":1},' * 40)
        assert await taken(world, [many, BODY], most=1023) == [False, True]
        assert express(world, most=100) is None

    play(scenario)


def test_heads_that_are_not_for_it() -> None:
    async def scenario(world: World) -> None:
        world.topic("t")
        assert express(world) is not None
        assert express(world, "/v0/topics/t?return_seqs=false") is None
        assert express(world, "/v0/topics/t/delete") is None
        assert express(world, "/nothing") is None
        assert express(world, idempotency_key="k") is None
        assert express(world, x_request_id="mine") is None
        plain = Request("POST", "/v0/topics/t", "", [(b"content-type", b"text/plain")], length=5)
        assert world.app.express(plain, 1 << 16) is None

    play(scenario)


def test_a_failure_is_everybodys_and_each_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        topic = world.topic("t")
        take, slips = express(world), [Slip(), Slip()]
        assert take is not None
        assert all(take(BODY, slip) for slip in slips)

        def refuse(*_: object) -> None:
            raise Busy("planted; nothing was written, retry")

        monkeypatch.setattr(type(topic), "stage", refuse)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [status for slip in slips for status, _ in slip.said] == [429, 429]
        assert world.service.inflight.held == 0

    play(scenario)


@given(
    first=st.integers(1, 1 << 50),
    count=st.integers(1, 30),
    offset=st.integers(0, 9),
    took_us=st.integers(0, 10**9),
    cost=st.tuples(*[st.integers(0, 10**7)] * 3),
)
def test_what_many_are_told_at_once_is_what_each_would_be_told(
    first: int, count: int, offset: int, took_us: int, cost: tuple[int, int, int]
) -> None:
    done = Appended(first, first + offset + count + 3, first + 100, False, *cost)
    said = saying('a"topic', done)(offset, count, took_us)
    assert said == told('a"topic', done.part(offset, count), took_us / 1000)
