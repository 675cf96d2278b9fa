"""Seek by time over HTTP. What it finds is proven by tests/unit/engine/test_segment_listing.py (G5, G72)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.engine import Topic


def filled(world: ServerHarness) -> Topic:
    topic = world.topic("a")
    for number in range(1, 6):
        topic.append({"n": number})
        world.clock.tick(10)
    return topic


def test_a_time_becomes_a_seq_and_the_cursor_before_it() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = filled(world)
        start_ms = topic.read().records[0].ts_ms
        topic.delete(seqs=[1, 4])
        status, said = await world.ask("POST", "/v0/topics/a/seek", {"ts": start_ms + 21})
        assert set(said.pop("performance")) == {"server_total_ms"}
        assert (status, said) == (
            200,
            {"topic": "a", "ts": start_ms + 21, "seq": 5, "from_seq": 4, "head_seq": 5, "earliest_seq": 2},
        )
        _, page = await world.ask("POST", "/v0/topics/a/diff", {"from_seq": said["from_seq"]})
        assert [record["$seq"] for record in page["records"]] == [5]
        _, said = await world.ask("POST", "/v0/topics/a/seek", {"ts": start_ms + 50})
        assert (said["seq"], said["from_seq"], said["head_seq"]) == (6, 5, 5)
        _, said = await world.ask("POST", "/v0/topics/a/seek", {"ts": -5})
        assert (said["seq"], said["from_seq"]) == (2, 1)

    run_scenario(scenario)


def test_seek_does_not_count_as_a_read() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        await world.ask("POST", "/v0/topics/a/seek", {"ts": 0})
        assert (await world.ask("GET", "/v0/topics/a?touch=false"))[1]["last_read_ts"] is None

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("topic", "body", "status", "code"),
    [
        ("nobody", {"ts": 1}, 404, "topic_not_found"),
        ("a", {}, 400, "invalid_request"),
        ("a", {"ts": "1"}, 400, "invalid_request"),
        ("a", {"ts": 1.0}, 400, "invalid_request"),
        ("a", {"ts": True}, 400, "invalid_request"),
        ("a", {"ts": None}, 400, "invalid_request"),
        ("a", b"", 400, "invalid_request"),
        ("a", None, 415, "unsupported_media_type"),
    ],
)
def test_what_is_no_time_is_refused(topic: str, body: Any, status: int, code: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        got, said = await world.ask("POST", f"/v0/topics/{topic}/seek", body)
        assert (got, said["error"]["code"]) == (status, code)

    run_scenario(scenario)
