"""Rewrite and erasure over HTTP. What they do to files is the engine's to prove."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.server.bulk_fixtures import get, run_scenario_with
from tests.unit.server.fakes import ServerHarness

from tidelog.engine.erase import ErasureReceipt

SMALL: dict[str, Any] = {"segment_events_max": 4}


def fill(world: ServerHarness) -> None:
    topic = world.topic("a")
    for number in range(1, 11):
        topic.append({"n": number, "pad": "x" * 50}, tag=f"t{number % 2}")
    world.engine.checkpoint()


def test_rewrite_names_segments_and_listing_has_their_generation() -> None:
    async def scenario(world: ServerHarness) -> None:
        fill(world)
        assert (await world.ask("POST", "/v0/topics/a/rewrite"))[1]["segments"] == []
        world.engine.topic("a").delete(seqs=[1, 2])
        status, said = await world.ask("POST", "/v0/topics/a/rewrite", {"force": True})
        assert status == 200
        (row,) = said["segments"]
        assert (row["base"], row["generation"], row["records_removed"], said["skipped"]) == (1, 1, 2, [])
        assert said["bytes_reclaimed"] == row["bytes_before"] - row["bytes_after"] > 0
        listed = (await get(world, "/v0/topics/a/segments")).json["segments"]
        assert [row["generation"] for row in listed] == [1, 0, 0]
        assert (await get(world, "/v0/topics/a/segments/1/data?generation=1")).status == 200
        assert (await get(world, "/v0/topics/a/segments/1/data?generation=0")).status == 404
        assert (await get(world, "/v0/topics/a/segments/1/data")).status == 200
        assert (await world.ask("POST", "/v0/topics/none/rewrite"))[0] == 404
        text = (await get(world, "/v0/metrics")).body.decode()
        assert "tidelog_rewrite_segments_total 1" in text

    run_scenario_with(scenario, **SMALL)


def test_erase_returns_the_receipt_of_the_gap_log() -> None:
    async def scenario(world: ServerHarness) -> None:
        fill(world)
        status, said = await world.ask("POST", "/v0/topics/a/erase", {"match": "t1"})
        assert status == 200
        said.pop("performance")
        receipt = msgspec.convert(said, ErasureReceipt)
        assert receipt.records == 5
        assert receipt.computed_hash() == receipt.hash
        assert world.engine.verify_erasures(receipt).ok
        (row,) = [row for row in (await get(world, "/v0/topics/a/gaps")).json["gaps"] if row["cause"] == "erase"]
        assert msgspec.json.decode(row["about"], type=ErasureReceipt) == receipt
        for body in ({}, {"match": "t1", "seqs": [1]}, {"seqs": "x"}, {"match": 5}):
            status, said = await world.ask("POST", "/v0/topics/a/erase", body)
            assert status == 400, body
        assert (await world.ask("POST", "/v0/topics/none/erase", {"match": "t1"}))[0] == 404

    run_scenario_with(scenario, **SMALL)
