"""Power cuts at every operation of histories with groups, holds and removals (E6, E7, G59).

A cursor is where it was committed or where the call under way puts it; a floor that a reader was told of does not
fall; what a hold kept is kept; and the ledger accounts for every record that is gone, once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.crash.topics.group_histories import HistoryStats, run_history
from tests.kit.sampling import one_in

Tell = Callable[[str, int], None]
CONFIGS = (
    {"durability": "fsync", "cap_records": 4},
    {"durability": "fsync", "cap_bytes": 40, "ttl_ms": 1_000},
    {"durability": "disk", "cap_records": 4},
    {"durability": "disk", "cap_records": 5, "ttl_ms": 1_000},
)
PLACES = [(config, 1 + (number + turn) % 2) for number, config in enumerate(CONFIGS) for turn in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "shards"), one_in(2, PLACES))
@pytest.mark.parametrize("histories", [1, pytest.param(4, marks=pytest.mark.sweep)])
def test_groups_holds_and_the_ledger_survive_power_cuts(
    config: dict[str, object], shards: int, histories: int, record_count: Tell
) -> None:
    tally = HistoryStats()
    for seed in range(histories):
        run_history((seed, shards), tally, steps=20, shards=shards, images=4, **config)
    record_count("crash states of groups", tally.states)
    assert tally.states >= 15 * histories, tally.states


@pytest.mark.sweep
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config.values())))
@pytest.mark.parametrize("seed", range(40))
def test_long_histories_of_groups_survive_power_cuts(config: dict[str, object], seed: int, record_count: Tell) -> None:
    tally = HistoryStats()
    run_history(seed, tally, steps=60, shards=1 + seed % 3, images=12, **config)
    record_count("crash states of groups", tally.states)
