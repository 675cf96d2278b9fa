"""Writes whose heads are known: what is taken, what is left to the ordinary way, and how each is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.implementations import BOTH, implementation
from tests.unit.server.fakes import ServerHarness, captured_log, parse_log, run_scenario

from tidelog import _native
from tidelog.engine import Appended
from tidelog.engine.topic import TopicOperations
from tidelog.errors import Busy, DiskFull
from tidelog.http.interface import BatchHandler, Request, RequestIds, Response
from tidelog.server import write_pipeline
from tidelog.server.auth import WRITE, ConcurrencyLimit, Principal
from tidelog.server.handlers.fast_handlers import FastWrites
from tidelog.server.handlers.write import encode_write_response, encode_write_responses, slice_appended

BODY = b'{"records":[{"data":1},{"data":"two"}]}'


class Slip:
    """A ticket that remembers its answer."""

    def __init__(self) -> None:
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.id = b""

    def respond_json(self, body: bytes, request_id: bytes) -> None:
        assert request_id
        self.said.append((200, json.loads(body)))

    def respond_json_parts(self, pieces: Sequence[bytes], request_id: bytes) -> None:
        self.respond_json(b"".join(pieces), request_id)

    def respond(self, response: Response) -> None:
        self.id = dict(response.headers)[b"x-request-id"]
        self.said.append((response.status, json.loads(response.body)))


class Few:
    """A crowd of slips: who was left out, and what the others were told."""

    def __init__(self, bodies: list[bytes], slips: list[Slip], left: list[Slip]) -> None:
        self.bodies, self._slips, self.left = bodies, slips, left
        self.received_us = [0] * len(bodies)

    def __len__(self) -> int:
        return len(self.bodies)

    def reparse_and_drop(self, odd: Collection[int]) -> Few:
        self.left += [self._slips[at] for at in odd]
        kept = [at for at in range(len(self)) if at not in odd]
        return Few([self.bodies[at] for at in kept], [self._slips[at] for at in kept], self.left)

    def respond_json(self, bodies: list[bytes], ids: RequestIds) -> None:
        for number, (slip, body) in enumerate(zip(self._slips, bodies, strict=True), ids.first_number):
            slip.respond_json(body, b"%b%x" % (ids.prefix, number))

    def respond(self, responses: list[Response]) -> None:
        for slip, response in zip(self._slips, responses, strict=True):
            slip.respond(response)


def send(way: BatchHandler, bodies: list[bytes]) -> tuple[list[Slip], list[Slip]]:
    """Have them taken at the end of this turn; the slips of all, and of those that will have been left out."""
    slips, left = [Slip() for _ in bodies], list[Slip]()
    way.call_at_turn_end(lambda: way.handle(Few(bodies, slips, left)))
    return slips, left


def express(
    world: ServerHarness, target: str = "/v0/topics/t", most: int = 1 << 16, **headers: str
) -> BatchHandler | None:
    path, _, query = target.partition("?")
    lines = [(b"content-type", b"application/json")]
    lines += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    way = world.app.fast_handler(Request("POST", path, query, lines, content_length=len(BODY)), most)
    assert way is None or isinstance(way, BatchHandler)
    return way


async def taken(world: ServerHarness, bodies: list[bytes], most: int = 1 << 16) -> list[bool]:
    """Which of them are; those are answered as well."""
    way = express(world, most=most)
    assert way is not None
    slips, left = send(way, bodies)
    while not all(slip.said or slip in left for slip in slips):
        await asyncio.sleep(0)
    return [slip not in left for slip in slips]


def frames(world: ServerHarness) -> int:
    return sum(shard.stats.frames for shard in world.engine.shards)


def test_writes_of_a_turn_are_one_frame_and_each_has_its_seqs() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t", durability="fsync")
        way, before = express(world), frames(world)
        assert way is not None
        slips, left = send(way, [BODY] * 5)
        assert not any(slip.said for slip in slips), "at the end of the turn"
        while not slips[-1].said:
            await asyncio.sleep(0)
        assert [answer["seqs"] for slip in slips for _, answer in slip.said] == [[n, n + 1] for n in (1, 3, 5, 7, 9)]
        assert {answer["head_seq"] for slip in slips for _, answer in slip.said} == {10}
        assert frames(world) == before + 1
        assert not left

    run_scenario(scenario)


def test_heads_that_say_the_same_go_the_same_way() -> None:
    """So that those who differ in another header still wait in one lobby."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        assert express(world) is express(world, user_agent="x")
        assert express(world) is not express(world, most=1023)

    run_scenario(scenario)


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
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        assert await taken(world, [body, BODY]) == [False, True]

    run_scenario(scenario)


def test_a_batch_that_is_full_is_followed_by_another_in_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of a topic is held on to when everybody was answered."""

    async def scenario(world: ServerHarness) -> None:
        monkeypatch.setattr(write_pipeline, "_FLUSH_RECORDS", 3)
        world.topic("t")
        before = frames(world)
        way = express(world)
        assert way is not None
        slips = [slip for _ in range(5) for slip in send(way, [BODY])[0]]
        while not slips[-1].said:
            await asyncio.sleep(0)
        assert [answer["seqs"] for slip in slips for _, answer in slip.said] == [[n, n + 1] for n in (1, 3, 5, 7, 9)]
        assert frames(world) == before + 3, "the one that reserves seqs is not counted"
        assert world.service.auth.inflight_limit.count == 0
        world.engine.drop("t")
        assert await taken(world, [BODY]) == [False], "what was found out in one turn is not believed in the next"

    run_scenario(scenario)


@pytest.mark.parametrize("config", [{"discard": "reject", "cap_records": 9}, {"ttl_ms": 1000}])
def test_a_topic_where_one_write_may_weigh_on_another_takes_none(config: dict[str, Any]) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t", **config)
        assert await taken(world, [BODY, BODY]) == [False, False]

    run_scenario(scenario)


def test_a_topic_that_is_not_there_takes_none() -> None:
    async def scenario(world: ServerHarness) -> None:
        assert await taken(world, [BODY]) == [False]

    run_scenario(scenario)


def test_an_answer_that_would_be_too_large_is_not_given() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        many = b'{"records":[%b{"data":1}]}' % (b'{"data":1},' * 40)
        assert await taken(world, [many, BODY], most=1023) == [False, True]
        assert express(world, most=100) is None

    run_scenario(scenario)


def test_heads_that_are_not_for_it() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        assert express(world) is not None
        assert express(world, "/v0/topics/t?return_seqs=false") is None
        assert express(world, "/v0/topics/t/delete") is None
        assert express(world, "/nothing") is None
        assert express(world, idempotency_key="k") is None
        assert express(world, x_request_id="mine") is None
        plain = Request("POST", "/v0/topics/t", "", [(b"content-type", b"text/plain")], content_length=5)
        assert world.app.fast_handler(plain, 1 << 16) is None

    run_scenario(scenario)


def test_failed_batch_fails_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        way = express(world)
        assert way is not None
        slips, left = send(way, [BODY, BODY])

        def refuse(*_: object) -> None:
            raise Busy("planted; nothing was written, retry")

        monkeypatch.setattr(TopicOperations, "submit", refuse)
        with captured_log() as text:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [status for slip in slips for status, _ in slip.said] == [429, 429]
        assert not left
        assert not text.getvalue(), "a client that has to wait is no news"
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)


def test_a_batch_that_fails_is_logged_once_with_the_first_id_of_those_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        way = express(world)
        assert way is not None
        slips = [slip for count in (2, 3) for slip in send(way, [BODY] * count)[0]]

        def fail(*_: object) -> None:
            raise DiskFull("planted")

        monkeypatch.setattr(TopicOperations, "submit", fail)
        with captured_log() as text:
            while not slips[-1].said:
                await asyncio.sleep(0)
        assert [status for slip in slips for status, _ in slip.said] == [507] * 5
        assert len({slip.id for slip in slips}) == 5
        (line,) = parse_log(text)
        assert line == {
            "level": "error",
            "logger": "tidelog.server",
            "message": "POST /v0/topics/{topic}, 5 written together: planted",
            "request_id": slips[0].id.decode(),
            "requests": 5,
            "topic": "t",
        }
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)


def test_no_more_are_taken_than_one_key_may_have_under_way() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        principal = Principal(b"somebody", frozenset((WRITE,)), ())
        way = FastWrites(world.service, world.app._allocate_ids).handler_for("t", principal, 1 << 16)
        assert way is not None
        world.service.auth.inflight_limit = ConcurrencyLimit("requests", 0, 2)
        slips, left = send(way, [BODY] * 3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert left == slips, "each comes as any other, and the first two find room"
        assert world.service.auth.inflight_limit.count == 0
        slips, left = send(way, [BODY] * 2)
        while not slips[-1].said:
            await asyncio.sleep(0)
        assert (left, world.service.auth.inflight_limit.count) == ([], 0)

    run_scenario(scenario)


@BOTH
@given(
    first=st.integers(1, 1 << 50),
    writes=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10**9)), min_size=1, max_size=5),
    offset=st.integers(0, 9),
    cost=st.tuples(*[st.integers(0, 10**7)] * 3),
)
@example(1, [(1, 0), (1, 1), (1, 10), (1, 100), (1, 1000), (1, 1010), (1, 10**15)], 0, (0, 0, 0))
@example((1 << 63) - 2000, [(1000, 5)], 0, (1, 1, 0))
def test_responses_of_a_batch_equal_single_responses(
    compiled: bool, first: int, writes: list[tuple[int, int]], offset: int, cost: tuple[int, int, int]
) -> None:
    counts, took_us = [count for count, _ in writes], [us for _, us in writes]
    done = Appended(first, first + offset + sum(counts) + 3, first + 100, False, *cost)
    with implementation(compiled=compiled):
        said = encode_write_responses('a"topic', "disk", done, offset, counts, took_us)
    for text, (count, us) in zip(said, writes, strict=True):
        assert text == encode_write_response('a"topic', "disk", slice_appended(done, offset, count), us / 1000)
        offset += count


def test_write_response_without_records_is_refused() -> None:
    with pytest.raises(ValueError, match="has records"):
        _native.encode_write_responses(1, [0], [1], b"", b"", b"", b"")
