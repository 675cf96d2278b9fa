"""Readers that come and go at random see every record once and in order, and every gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import SystemRandom

import pytest

from tests.contract_http.random_readers import ReaderScenario
from tests.contract_http.server import Server


def follow(folder: Path, seconds: float, restarts: int, record_count: Callable[[str, int], None]) -> None:
    with Server(folder).start() as server:
        world = ReaderScenario(server, SystemRandom().randrange(1 << 32))
        world.run(seconds, [server.restart] * restarts)
        for what, count in world.counts.items():
            record_count(what, count)
        assert all(world.counts.values()), f"seed {world.seed}: {world.counts}"


@pytest.mark.slow
def test_random_readers_miss_nothing(tmp_path: Path, record_count: Callable[[str, int], None]) -> None:
    follow(tmp_path, 20, 2, record_count)


@pytest.mark.sweep
def test_random_readers_miss_nothing_in_ten_minutes(tmp_path: Path, record_count: Callable[[str, int], None]) -> None:
    follow(tmp_path, 600, 20, record_count)
