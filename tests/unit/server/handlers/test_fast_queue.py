"""Claims and acks whose heads are known: what is taken, what is left to the ordinary way, and how each is answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, captured_log, parse_log, run_scenario
from tests.unit.server.handlers.test_fast_writes import Slip

from tidelog.engine.queues.queue import QueueOperations
from tidelog.errors import Busy
from tidelog.http.interface import BatchHandler, Request, SingleHandler

CLAIM = b'{"node":"w","max":2}'


def express(world: ServerHarness, verb: str, most: int = 1 << 16, topic: str = "q") -> SingleHandler | None:
    lines = [(b"content-type", b"application/json")]
    found = world.app.fast_handler(Request("POST", f"/v0/topics/{topic}/{verb}", "", lines, content_length=20), most)
    assert not isinstance(found, BatchHandler)
    return found


def way(world: ServerHarness, verb: str, most: int = 1 << 16) -> SingleHandler:
    found = express(world, verb, most)
    assert found is not None
    return found


def body(**said: Any) -> bytes:
    return json.dumps(said).encode()


async def said(slip: Slip) -> dict[str, Any]:
    while not slip.said:
        await asyncio.sleep(0)
    ((status, answer),) = slip.said
    assert status == 200
    answer.pop("performance")
    return answer


async def ordinary(world: ServerHarness, verb: str, **asked: Any) -> dict[str, Any]:
    status, answer = await world.ask("POST", f"/v0/topics/q/{verb}", asked)
    assert status == 200
    answer.pop("performance")
    found: dict[str, Any] = answer
    return found


async def queue(world: ServerHarness, jobs: int = 6, **config: Any) -> None:
    world.topic("q", type="queue", **config)
    if jobs:
        await world.ask("POST", "/v0/topics/q", {"records": [{"data": n} for n in range(jobs)]})
        await world.ask("POST", "/v0/topics/q/claim", {"node": "first"})  # puts lease ids on record


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
def test_both_ways_answer_alike(durability: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world, durability=durability)
        slip = Slip()
        assert way(world, "claim")(CLAIM, slip)
        assert slip.said, "at once"
        mine = await said(slip)
        theirs = await ordinary(world, "claim", node="w", max=2)
        assert list(mine) == list(theirs)
        assert [list(job) for job in mine["claimed"]] == [list(job) for job in theirs["claimed"]]
        assert [job["$seq"] for job in mine["claimed"] + theirs["claimed"]] == [2, 3, 4, 5]
        assert (mine["ready"], theirs["ready"]) == (3, 1)
        tokens = [job["lease_id"] for job in mine["claimed"]]
        slip = Slip()
        assert way(world, "ack")(body(node="w", seqs=[3, 2, 9], lease_ids=[tokens[1], tokens[0], ""]), slip)
        acked = await said(slip)
        assert acked == {"topic": "q", "acked": 2, "skipped": [9], "ready": 1, "in_flight": 3}
        again = await ordinary(world, "ack", node="w", seqs=[4, 5, 9])
        assert list(again) == list(acked)
        assert again == {**acked, "in_flight": 1}
        assert world.service.auth.inflight_limit.count == 0
        assert world.service.metrics.counters("q").claimed == 5
        assert world.service.metrics.counters("q").acked == 4

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("claim", b""),
        ("claim", b"{}"),
        ("claim", b'{"node":""}'),
        ("claim", b'{"node":"w","max":-1}'),
        ("claim", b'{"node":"%b"}' % (b"w" * 200)),
        ("claim", b'{"node":"\xff"}'),
        ("ack", b"{}"),
        ("ack", b'{"node":"w"}'),
        ("ack", b'{"node":"w","seqs":[1],"lease_ids":["x"]}'),
        ("ack", b'{"node":"w","seqs":[1],"lease_ids":["lease_1","lease_2"]}'),
        ("ack", b'{"node":"w","seqs":[18446744073709551616]}'),
        ("ack", body(node="w", seqs=list(range(1_001)))),
    ],
)
def test_what_has_to_be_refused_is_not_taken(verb: str, text: bytes) -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world)
        slip = Slip()
        assert not way(world, verb)(text, slip)
        assert not slip.said
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)


def test_a_log_and_a_topic_that_is_not_there_take_none() -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world)
        claims, acks = way(world, "claim"), way(world, "ack")
        world.engine.drop("q")
        assert not claims(CLAIM, Slip())
        world.topic("q")
        assert not claims(CLAIM, Slip())
        assert not acks(body(node="w", seqs=[1]), Slip())

    run_scenario(scenario)


@pytest.mark.parametrize("config", [{"claim_jitter_ms": 50}, {"leases_durable": True, "durability": "fsync"}])
def test_a_claim_that_has_to_wait_is_not_taken(config: dict[str, Any]) -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world, **config)
        assert not way(world, "claim")(CLAIM, Slip())

    run_scenario(scenario)


def test_the_first_claim_puts_lease_ids_on_record_and_is_not_taken() -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world, jobs=0, durability="fsync")
        assert not way(world, "claim")(CLAIM, Slip())

    run_scenario(scenario)


def test_answers_that_may_be_compressed() -> None:
    """A claim cannot know how long its answer will be, an ack can."""

    async def scenario(world: ServerHarness) -> None:
        await queue(world)
        assert express(world, "claim", 1023) is None
        assert express(world, "nack") is None
        acks = way(world, "ack", 1023)
        assert not acks(body(node="w", seqs=list(range(1, 100))), Slip())
        slip = Slip()
        assert acks(body(node="w", seqs=list(range(1, 30))), slip)
        assert (await said(slip))["acked"] == 0

    run_scenario(scenario)


def test_a_large_answer_is_whole() -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world)
        await world.ask("POST", "/v0/topics/q", {"records": [{"data": "x" * 40_000}] * 3})
        slip = Slip()
        assert way(world, "claim")(b'{"node":"w","max":9}', slip)
        assert [len(str(job["data"])) for job in (await said(slip))["claimed"]] == [1] * 5 + [40_000] * 3

    run_scenario(scenario)


def test_a_claim_is_bounded_by_bytes_both_ways() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("q", type="queue")
        for _ in range(24):
            await world.ask("POST", "/v0/topics/q", {"records": [{"data": "x" * 999_998}]})
        first = await ordinary(world, "claim", node="w", max=100)
        assert ([job["$seq"] for job in first["claimed"]], first["ready"]) == ([*range(1, 9)], 16)
        slip = Slip()
        assert way(world, "claim")(b'{"node":"w","max":100}', slip)
        second = await said(slip)
        assert ([job["$seq"] for job in second["claimed"]], second["ready"]) == ([*range(9, 17)], 8)

    run_scenario(scenario)


def test_error_after_a_claim_is_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(QueueOperations, "claim_for_all", broken)
        slip = Slip()
        with captured_log() as text:
            assert way(world, "claim")(CLAIM, slip)
        assert [status for status, _ in slip.said] == [500]
        (line,) = parse_log(text)
        assert (line["request_id"], line["topic"]) == (slip.id.decode(), "q")
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)


def test_ack_without_space_in_the_wal_takes_the_normal_path(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        await queue(world)

        def busy(*_: object) -> None:
            raise Busy("planted; nothing was written, retry")

        monkeypatch.setattr(QueueOperations, "submit_ack", busy)
        assert not way(world, "ack")(body(node="first", seqs=[1]), Slip())
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)
