"""Requests whose clients leave: what they held is given back, whenever that is."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.server.fakes import World, play


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turns", [0, 1, 5])
def test_a_client_that_leaves_gives_back_what_it_held(turns: int) -> None:
    """§1.12: also one that leaves before its handler took its first step, whose work is then never begun."""

    async def scenario(world: World) -> None:
        world.topic("t")
        for target, body in (
            ("/v0/topics/t/diff", {"wait_ms": 20_000}),
            ("/v0/topics/new", {"records": [{"data": 1}]}),
            ("/v0/watch", {"topics": {"t": {}}}),
            ("/v0/topics/t/delete", {"before_seq": 1}),
        ):
            asked = world.begin("POST", target, body, key="k")
            assert world.service.inflight.held == 1
            for _ in range(turns):
                await asyncio.sleep(0)
            asked.leave()
            for _ in range(5):
                await asyncio.sleep(0)
            assert world.service.inflight.held == 0
        assert not len(world.service.bells)

    play(scenario, api_keys="k")
