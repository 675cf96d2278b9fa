"""Reads whose heads are known: what is taken, what is left to the ordinary way, and that both say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario
from tests.unit.server.handlers.test_fast_writes import Slip

from tidelog.engine import Topic
from tidelog.engine.topic import TopicOperations
from tidelog.errors import Corrupt
from tidelog.http.interface import BatchHandler, Request, SingleHandler
from tidelog.server.auth import ANONYMOUS, ConcurrencyLimit

PATH = "/v0/topics/t/diff"


def express(world: ServerHarness, most: int = 1 << 16, target: str = PATH, **headers: str) -> SingleHandler | None:
    path, _, query = target.partition("?")
    lines = [(b"content-type", b"application/json")]
    lines += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    found = world.app.fast_handler(Request("POST", path, query, lines, content_length=20), most)
    assert not isinstance(found, BatchHandler)
    return found


def taken(world: ServerHarness, **asked: Any) -> dict[str, Any] | None:
    """The answer, where the read was taken: it comes at once."""
    way, slip = express(world), Slip()
    assert way is not None
    if not way(json.dumps(asked).encode(), slip):
        assert not slip.said
        return None
    ((status, answer),) = slip.said
    assert status == 200
    return answer


def filled(world: ServerHarness) -> Topic:
    topic = world.topic("t", cap_records=40)
    topic.append(list(range(30)))
    topic.append(["one", b"\x00"], tag="a", node="n", meta={"m": 1})
    topic.append(list(range(20)))
    topic.delete(seqs=[15])
    topic.state()  # makes the floor durable: who is told of it need not wait
    return topic


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"from_seq": 0},
        {"from_seq": 12, "limit": 1},
        {"from_seq": 12, "limit": 1000},
        {"from_seq": 20, "limit": 12, "include_tags": True},
        {"from_seq": 20, "include_meta": False},
        {"from_seq": 28, "node": "n"},
        {"from_seq": 28, "max_batch_bytes": 3},
        {"from_seq": 52},
        {"from_seq": 99},
        {"from_seq": (1 << 64) - 1},
    ],
)
def test_both_ways_answer_alike(asked: dict[str, Any]) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        status, theirs = await world.ask("POST", PATH, asked)
        mine = taken(world, **asked)
        assert status == 200
        assert mine is not None
        assert list(mine) == list(theirs)
        assert list(mine["performance"]) == list(theirs["performance"])
        assert mine.pop("performance")["records_scanned"] == theirs.pop("performance")["records_scanned"]
        assert mine == theirs
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"from_seq":-1}',
        b'{"from_seq":"1"}',
        b'{"limit":18446744073709551616}',
        b'{"node":"\xff"}',
        b'{"wait_ms":1}',
        b'{"from_seq":0,"wait_ms":1}',
    ],
)
def test_what_has_to_wait_or_to_be_refused_is_not_taken(body: bytes) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        way, slip = express(world), Slip()
        assert way is not None
        assert not way(body, slip)
        assert not slip.said
        assert world.service.auth.inflight_limit.count == 0

    run_scenario(scenario)


def test_what_is_in_files_is_taken_once_it_is_at_hand() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        topic.append(list(range(10)))
        topic.seal()
        world.engine.checkpoint()
        assert taken(world) is None
        await world.ask("POST", PATH, {})
        answer = taken(world)
        assert answer is not None
        assert [record["data"] for record in answer["records"]] == list(range(10))

    run_scenario(scenario)


@pytest.mark.parametrize("error", [Corrupt("a segment", pos=7, reason="planted"), ZeroDivisionError()])
def test_missing_topic_and_unreadable_records_take_the_normal_path(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: ServerHarness) -> None:
        assert taken(world) is None
        filled(world)
        assert taken(world) is not None

        def broken(*_: object, **__: object) -> None:
            raise error

        for way in ("read_json", "read_cached_json"):
            monkeypatch.setattr(TopicOperations, way, broken)
        assert taken(world) is None
        assert world.service.auth.inflight_limit.count == 0
        status, answer = await world.ask("POST", PATH, {})
        assert (status, answer["error"]["code"]) == (500, "internal")
        world.engine.drop("t")
        assert taken(world) is None

    run_scenario(scenario)


def test_reads_are_counted_and_count_as_reading() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = filled(world)
        before = topic.state().last_read_ms
        assert before is None
        assert taken(world, from_seq=20, limit=5) is not None
        assert taken(world) is not None
        assert topic.state().last_read_ms is not None
        answers = world.service.metrics._responses["/v0/topics/{topic}/diff", "POST", 200]
        assert sum(answers.counts) == 2
        traffic = world.service.metrics._topics["t"]
        assert (traffic.read, traffic.gaps) == (44, 1)

    run_scenario(scenario)


def test_client_at_its_inflight_limit_takes_the_normal_path() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        world.service.auth.inflight_limit = ConcurrencyLimit("requests in flight", 1, 0)
        assert taken(world) is not None
        world.service.auth.inflight_limit.acquire(ANONYMOUS)
        assert taken(world) is None
        world.service.auth.inflight_limit.release(ANONYMOUS)
        assert taken(world) is not None

    run_scenario(scenario)


def test_heads_that_are_not_for_it() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        assert express(world) is not None
        assert express(world, target=f"{PATH}?x=1") is None
        assert express(world, x_request_id="mine") is None
        assert express(world, 1023) is None, "a long answer would be compressed"

    run_scenario(scenario)
