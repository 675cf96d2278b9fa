"""Admission of writes: submitted, queued or rejected; no write is lost and none overtakes another."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.unit.server.fakes import FakeExchange, FakeWebSocket, ServerHarness, let_idle, run_scenario

from tidelog.engine import Shard
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import Response

WRITE = "/v0/topics/t"


def unbatched(data: Any, **more: Any) -> dict[str, Any]:
    """A write that is not batched with others: it has a node."""
    return {"records": [{"data": data}], "node": "n", **more}


def plain(data: Any) -> dict[str, Any]:
    return {"records": [{"data": data}]}


async def read_response(exchange: FakeExchange) -> tuple[int, Any]:
    response = await exchange.answer()
    assert isinstance(response, Response)
    if response.status == 429:
        assert (b"retry-after", b"1") in response.headers
    return response.status, json.loads(response.body)


def shorten_queue(world: ServerHarness, queue_max: int) -> Shard:
    """Make the WAL queue so short that it is full at once."""
    shard = world.engine.shards[0]
    shard.queue_max = queue_max
    return shard


def saturate(world: ServerHarness, pressure: float = 1.0) -> None:
    world.service.push.governor.sample = lambda *_, **__: None  # type: ignore[method-assign]
    world.service.push.governor.pressure = pressure


def test_write_without_capacity_is_queued_and_keeps_its_order() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shorten_queue(world, 2)
        exchanges = [world.begin("POST", WRITE, unbatched(number)) for number in range(4)]
        assert world.service.writes.admission.queued_writes == 2
        responses = [await read_response(each) for each in exchanges]
        assert [status for status, _ in responses] == [200] * 4
        assert [body["seqs"] for _, body in responses] == [[1], [2], [3], [4]]
        assert [record.data for record in topic.read(0).records] == [0, 1, 2, 3]
        assert world.service.writes.admission.queued_writes == 0

    run_scenario(scenario)


def test_write_is_rejected_when_the_admission_queue_is_full() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shorten_queue(world, 2)
        responses = [
            await read_response(each) for each in [world.begin("POST", WRITE, unbatched(number)) for number in range(6)]
        ]
        assert [status for status, _ in responses] == [200] * 4 + [429] * 2
        assert responses[4][1]["error"]["code"] == "throttled"
        assert "detail" not in responses[4][1]["error"]
        assert [record.data for record in topic.read(0).records] == [0, 1, 2, 3]
        assert world.service.writes.admission.rejected_total == 2
        assert world.service.metrics.summary()["throttled_total"] == 2

    run_scenario(scenario)


def test_saturated_server_rejects_writes_without_capacity_unless_they_wait() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shorten_queue(world, 1)
        saturate(world)
        bodies = [
            unbatched(0),
            unbatched(1),
            unbatched(2, disable_backpressure=True),
            unbatched(3),
            unbatched(4, disable_backpressure=True),
        ]
        responses = [await read_response(each) for each in [world.begin("POST", WRITE, body) for body in bodies]]
        assert [status for status, _ in responses] == [200, 429, 200, 429, 200]
        assert [record.data for record in topic.read(0).records] == [0, 2, 4]

    run_scenario(scenario)


def test_saturated_server_accepts_writes_with_capacity() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        saturate(world)
        assert (await read_response(world.begin("POST", WRITE, unbatched(0))))[0] == 200
        assert (await read_response(world.begin("POST", WRITE, plain(0))))[0] == 200

    run_scenario(scenario)


def test_plain_writes_of_a_turn_are_queued_or_rejected_together() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shorten_queue(world, 1)
        first = world.begin("POST", WRITE, unbatched("first"))
        gathered = [world.begin("POST", WRITE, plain(number)) for number in range(3)]
        assert [status for status, _ in [await read_response(each) for each in (first, *gathered)]] == [200] * 4
        assert [record.data for record in topic.read(0).records] == ["first", 0, 1, 2]
        saturate(world)
        first = world.begin("POST", WRITE, unbatched("again"))
        gathered = [world.begin("POST", WRITE, plain(number)) for number in range(3)]
        assert [status for status, _ in [await read_response(each) for each in (first, *gathered)]] == [200] + [429] * 3
        assert topic.count == 5

    run_scenario(scenario)


def test_ephemeral_topic_is_never_queued() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t", durability="ephemeral")
        world.topic("other")
        shorten_queue(world, 1)
        saturate(world)
        blocking = world.begin("POST", "/v0/topics/other", unbatched(0))
        assert (await read_response(world.begin("POST", WRITE, unbatched(1))))[0] == 200
        assert (await read_response(blocking))[0] == 200

    run_scenario(scenario)


def test_queued_time_is_reported() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        shorten_queue(world, 1)
        free, held = world.begin("POST", WRITE, unbatched(0)), world.begin("POST", WRITE, unbatched(1))
        world.clock.tick(7)
        assert "throttle_wait_ms" not in (await read_response(free))[1]["performance"]
        assert (await read_response(held))[1]["performance"]["throttle_wait_ms"] == 7.0

    run_scenario(scenario)


def test_commit_window_is_reported_and_shared() -> None:
    """Method: pressure of 0.5 is a window of 5 ms; a write in every slice keeps it open to its end."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t", durability="fsync")
        saturate(world, 0.5)
        before = world.engine.shards[0].stats.fsyncs
        exchanges = []
        for number in range(4):
            exchanges.append(world.begin("POST", WRITE, unbatched(number)))
            await asyncio.sleep(0.0009)
            world.clock.tick_us(900)
            assert topic.head_seq == 0, "collected, not written"
        responses = [await read_response(each) for each in exchanges]
        waits = [body["performance"]["throttle_wait_ms"] for _, body in responses]
        assert waits == sorted(waits, reverse=True)
        assert waits[0] >= 3.0
        assert world.engine.shards[0].stats.fsyncs == before + 1, "unbatched sync for all of them"

    run_scenario(scenario)


def test_without_pressure_there_is_no_commit_window() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t", durability="fsync")
        saturate(world, 0.4)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        status, body = await read_response(world.begin("POST", WRITE, unbatched(0)))
        assert (status, loop.time()) == (200, began_s)
        assert "throttle_wait_ms" not in body["performance"]

    run_scenario(scenario)


def test_queued_write_ends_the_commit_window() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("t", durability="fsync")
        shorten_queue(world, 1)
        saturate(world, 0.9)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first, second = world.begin("POST", WRITE, unbatched(0)), world.begin("POST", WRITE, unbatched(1))
        assert (await read_response(first))[0] == 200
        assert loop.time() == began_s
        assert (await read_response(second))[0] == 200

    run_scenario(scenario)


@pytest.mark.parametrize("insists", [False, True])
def test_admission_applies_to_websocket_publishes(insists: bool) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shorten_queue(world, 1)
        line = FakeWebSocket()
        async with await world.connect(line):
            blocking = world.begin("POST", WRITE, unbatched("first"))
            saturate(world)
            for number in range(3):
                line.receive_from_peer(
                    {
                        "op": "publish",
                        "topic": "t",
                        "records": [{"data": number}],
                        "disable_backpressure": insists,
                        "request_id": number,
                    }
                )
            messages = await line.until(3)
            assert (await read_response(blocking))[0] == 200
            acked = [each["request_id"] for each in messages if each["op"] == "ack"]
            refused = [each["code"] for each in messages if each["op"] == "error"]
            assert [record.data for record in topic.read(0).records] == ["first", *acked]
            assert acked == sorted(acked)
            assert refused == ["throttled"] * (3 - len(acked))
            assert (len(acked) == 3) == insists
            line.disconnect()

    run_scenario(scenario)


def test_no_write_overtakes_a_queued_one_when_capacity_returns() -> None:
    """Method: another thread's commit frees capacity without a call."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        shard = shorten_queue(world, 2)
        exchanges = [world.begin("POST", WRITE, unbatched(number)) for number in range(3)]
        shard.commit_pending()
        exchanges.append(world.begin("POST", WRITE, unbatched(3)))
        assert [(await read_response(each))[1]["seqs"] for each in exchanges] == [[1], [2], [3], [4]]

    run_scenario(scenario)


def test_queued_write_fails_when_its_topic_is_dropped() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shard = shorten_queue(world, 1)
        first, second = world.begin("POST", WRITE, unbatched(0)), world.begin("POST", WRITE, unbatched(1))
        shard.commit_pending()
        shard.queue_max = 10
        world.engine.drop("t")
        assert topic_operations(topic).is_dropped
        assert (await read_response(first))[0] == 200
        status, body = await read_response(second)
        assert (status, body["error"]["code"]) == (404, "topic_not_found")

    run_scenario(scenario)


def test_two_writes_admitted_for_one_place_both_succeed() -> None:
    """Method: a write that awaits its turn is submitted an iteration later, when another may have been faster."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shorten_queue(world, 1)
        lines = [FakeWebSocket(), FakeWebSocket()]
        async with await world.connect(lines[0]), await world.connect(lines[1]):
            await let_idle(0.001)
            blocking = world.begin("POST", WRITE, unbatched("first"))
            saturate(world)
            for line in lines:
                publish = {"op": "publish", "topic": "t", "records": [{"data": 1}], "disable_backpressure": True}
                line.receive_from_peer(publish)
            assert [(await line.until(1))[0]["op"] for line in lines] == ["ack", "ack"]
            assert (await read_response(blocking))[0] == 200
            assert topic.count == 3
            for line in lines:
                line.disconnect()

    run_scenario(scenario)


def test_capacity_freed_by_another_thread_is_noticed() -> None:
    """Method: another thread holds the commit lock during our commit, and then commits its own write."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("t")
        shard = shorten_queue(world, 1)
        foreign = topic.append_nowait([0])
        with shard.commits.commit_lock:
            exchange = world.begin("POST", WRITE, unbatched(1))
            await let_idle(0.001)
        assert world.service.writes.admission.queued_writes == 1
        shard.commit_pending()
        assert foreign.done
        assert (await read_response(exchange))[1]["seqs"] == [2]

    run_scenario(scenario)
