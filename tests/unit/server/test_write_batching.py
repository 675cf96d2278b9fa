"""Plain writes of one turn become one batch; only the speed differs for their writers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.engine.topic import TopicOperations
from tidelog.errors import Busy
from tidelog.http.interface import Response

WRITE = "/v0/topics/t"


def write_body(data: Any, **more: Any) -> dict[str, Any]:
    return {"records": [{"data": data, **more}]}


async def read_responses(exchanges: list[Any]) -> list[tuple[int, Any]]:
    responses = []
    for each in exchanges:
        answer = await each.answer()
        assert isinstance(answer, Response)
        responses.append((answer.status, json.loads(answer.body)))
    return responses


def frames(world: ServerHarness) -> int:
    return sum(shard.stats.frames for shard in world.engine.shards)


def test_writes_of_one_turn_are_one_frame_and_each_has_its_seqs() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t", durability="fsync")
        before = frames(world)
        exchanges = [world.begin("POST", WRITE, {"records": [{"data": [n, at]} for at in range(n)]}) for n in (1, 2, 3)]
        assert topic.head_seq == 0, "at the end of the turn"
        responses = await read_responses(exchanges)
        assert [status for status, _ in responses] == [200] * 3
        assert [body["seqs"] for _, body in responses] == [[1], [2, 3], [4, 5, 6]]
        assert [(body["first_seq"], body["last_seq"], body["count"]) for _, body in responses] == [
            (1, 1, 1),
            (2, 3, 2),
            (4, 6, 3),
        ]
        assert {body["head_seq"] for _, body in responses} == {6}
        assert not any(body["created"] or body["deduped"] for _, body in responses)
        assert frames(world) == before + 1
        assert [record.data for record in topic.read(0).records] == [[1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]

    run_scenario(scenario)


@pytest.mark.parametrize(
    "body",
    [
        write_body(1, tag="a"),
        write_body(1, node="n"),
        write_body(1, meta={"k": 1}),
        {**write_body(1), "node": "n"},
        {**write_body(1), "idempotency_key": "k"},
        {**write_body(1), "config": {"ttl_ms": 5}},
        write_body("eA==", **{"$encoding": "base64"}),
        {"records": [{"data": 1}] * 1001},
        write_body("x" * 270_000),
    ],
)
def test_write_that_is_not_plain_is_not_batched(body: dict[str, Any]) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        first = world.begin("POST", WRITE, body)
        second = world.begin("POST", WRITE, write_body(2))
        (_, alone), (_, plain) = await read_responses([first, second])
        assert alone["count"] == len(body["records"])
        assert sorted([*alone["seqs"], *plain["seqs"]]) == list(range(1, topic.head_seq + 1))

    run_scenario(scenario)


@pytest.mark.parametrize("config", [{"discard": "reject", "cap_records": 2}, {"ttl_ms": 1000}])
def test_topic_that_may_reject_gets_each_write_by_itself(config: dict[str, Any]) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t", **config)
        responses = await read_responses([world.begin("POST", WRITE, write_body(n)) for n in range(3)])
        statuses = [status for status, _ in responses]
        assert statuses == ([200, 200, 422] if "discard" in config else [200] * 3)

    run_scenario(scenario)


def test_batched_texts_are_stored_compact() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        texts = [b'{"records":[{"data":{"a" : "\\u00e9 \\/"}}]}', b'{"records":[{"data":[1,\n2]}]}']
        await read_responses([world.begin("POST", WRITE, text) for text in texts])
        assert topic.to_arrow().column("data").to_pylist() == ['{"a":"é /"}'.encode(), b"[1,2]"]

    run_scenario(scenario)


def test_write_that_is_nested_too_deep_is_rejected_alone() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        deep = b'{"records":[{"data":%b}]}' % (b"[" * 140 + b"]" * 140)
        (bad, _), (good, _) = await read_responses(
            [world.begin("POST", WRITE, deep), world.begin("POST", WRITE, write_body(1))]
        )
        assert (bad, good) == (400, 200)
        assert topic.count == 1

    run_scenario(scenario)


def test_error_of_a_batch_reaches_all_its_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        exchanges = [world.begin("POST", WRITE, write_body(n)) for n in range(3)]

        def busy(*_: object, **__: object) -> None:
            raise Busy("the disk is slow; nothing was written, retry later")

        monkeypatch.setattr(TopicOperations, "submit", busy)
        responses = await read_responses(exchanges)
        assert [(status, body["error"]["code"]) for status, body in responses] == [(429, "throttled")] * 3
        assert topic.head_seq == 0

    run_scenario(scenario)


def test_large_batch_is_submitted_before_the_turn_ends() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        exchanges = [world.begin("POST", WRITE, write_body("x" * 200_000)) for _ in range(40)]
        responses = await read_responses(exchanges)
        assert [body["first_seq"] for _, body in responses] == list(range(1, 41))
        assert topic.count == 40

    run_scenario(scenario)
