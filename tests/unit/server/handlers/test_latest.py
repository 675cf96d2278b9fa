"""The table of a topic, compaction and the preview of retention over HTTP; what they find is proven elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario


def filled(world: ServerHarness, **config: Any) -> None:
    topic = world.topic("a", **{"compaction": "/id", **config})
    for number in range(6):
        topic.append({"id": f"k{number % 3}", "n": number})
    topic.append(b"raw", tag="x")


def test_the_newest_record_of_each_key_in_pages() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        status, said = await world.ask("GET", "/v0/topics/a/latest?limit=2")
        assert (status, said["topic"], len(said["records"])) == (200, "a", 2)
        _, rest = await world.ask("GET", f"/v0/topics/a/latest?limit=2&after={said['next_after']}")
        rows = said["records"] + rest["records"]
        assert "next_after" not in rest
        assert {row["key"]: (row["$seq"], row["data"]["n"]) for row in rows} == {
            "k0": (4, 3),
            "k1": (5, 4),
            "k2": (6, 5),
        }
        _, one = await world.ask("GET", "/v0/topics/a/latest?key=k1")
        assert [(row["key"], row["$seq"]) for row in one["records"]] == [("k1", 5)]
        assert (await world.ask("GET", "/v0/topics/a/latest?key=none"))[1]["records"] == []
        _, some = await world.ask("GET", "/v0/topics/a/latest?prefix=k2")
        assert [row["key"] for row in some["records"]] == ["k2"]

    run_scenario(scenario)


def test_bytes_and_tags_of_a_row() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a", compaction="latest_by_tag").append(b"\xff", tag="t", node="n", meta={"m": 1})
        (row,) = (await world.ask("GET", "/v0/topics/a/latest"))[1]["records"]
        del row["$ts"]
        assert row == {
            "key": "t",
            "$seq": 1,
            "$node": "n",
            "$tag": "t",
            "data": "/w==",
            "meta": {"m": 1},
            "$encoding": "base64",
        }

    run_scenario(scenario)


def test_a_compaction_returns_what_it_removed() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        status, said = await world.ask("POST", "/v0/topics/a/compact")
        del said["performance"]
        assert (status, said) == (
            200,
            {"topic": "a", "removed": 3, "bytes": 51, "tombstones": 0, "compacted_to": 7},
        )
        _, gaps = await world.ask("GET", "/v0/topics/a/gaps")
        assert [(row["cause"], row["records"]) for row in gaps["gaps"]] == [("compaction", 3)]

    run_scenario(scenario)


def test_a_preview_of_retention_changes_nothing() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        world.topic("a").group("g").hold(10)
        status, said = await world.ask("POST", "/v0/topics/a/retention/simulate", {"cap_records": 2})
        assert (status, said["cap"]["records"], said["cap"]["last_seq"], said["remaining"]["records"]) == (200, 5, 5, 2)
        assert [(loss["group"], loss["hold_breaks"]) for loss in said["groups"]] == [("g", True)]
        assert (said["config"]["cap_records"], said["evict_floor"], said["held_by"]) == (2, 6, [])
        _, said = await world.ask("POST", "/v0/topics/a/retention/simulate")
        assert said["cap"]["records"] == said["ttl"]["records"] == 0
        assert (await world.ask("GET", "/v0/topics/a"))[1]["count"] == 7

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v0/topics/nobody/latest", None, 404, "topic_not_found"),
        ("GET", "/v0/topics/plain/latest", None, 400, "invalid_request"),
        ("GET", "/v0/topics/a/latest?after=x", None, 400, "invalid_request"),
        ("GET", "/v0/topics/a/latest?key=", None, 400, "invalid_request"),
        ("POST", "/v0/topics/nobody/compact", None, 404, "topic_not_found"),
        ("POST", "/v0/topics/plain/compact", None, 400, "invalid_request"),
        ("POST", "/v0/topics/nobody/retention/simulate", {}, 404, "topic_not_found"),
        ("POST", "/v0/topics/a/retention/simulate", {"cap_records": -1}, 400, "invalid_request"),
        ("POST", "/v0/topics/a/retention/simulate", {"ttl_ms": "1"}, 400, "invalid_request"),
    ],
)
def test_bad_requests(method: str, path: str, body: Any, status: int, code: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        world.topic("plain")
        found, said = await world.ask(method, path, body)
        assert (found, said["error"]["code"]) == (status, code)

    run_scenario(scenario)
