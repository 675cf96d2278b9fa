"""Power cuts at every operation of every history, for every codec and policy (G96, G97, G112, G118–G126, G144, G146).

The tests here judge one instant in SAMPLED, each history under `batch` and one other policy; those marked
`sweep` (`make crash`) every instant, all policies, and all that the simulated disk can make of every history of three
verbs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from tests.crash.sweep import SweepStats, sweep
from tests.crash.workloads import OPERATIONS, WORKLOADS, history_of, random_history

Tell = Callable[[str, int], None]
CODECS = ("tide", "rustlog", "laminar", "narwhal")
POLICIES = ("batch", "each", "interval")
SAMPLED = 10  # instants for one that `make test` judges


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_nothing_acked_is_lost_and_nothing_is_made_up(codec: str, record_count: Tell) -> None:
    tally = SweepStats()
    for number, workload in enumerate(WORKLOADS.values()):
        for sync in ("batch", ("each", "interval")[number % 2]):
            nested = int(sync == "batch")
            sweep(codec, workload, sync=sync, limit=1 + nested, again=nested, step=SAMPLED, stats=tally)
            assert not tally.failures, tally.failures[0]
    record_count("crash states", tally.states)
    assert tally.states >= 100, f"only {tally.states} states at {tally.instants} instants"


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_histories_drawn_by_chance_survive_a_crash_anywhere(codec: str, record_count: Tell) -> None:
    tally = SweepStats()
    for seed, sync in product(range(2), POLICIES):
        sweep(codec, random_history(seed, 8), sync=sync, limit=6, seed=seed, step=2, stats=tally)
        assert not tally.failures, tally.failures[0]
    record_count("crash states", tally.states)


@pytest.mark.sweep
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sync", POLICIES)
def test_every_state_of_every_history(codec: str, sync: str, record_count: Tell) -> None:
    tally = SweepStats()
    for workload in WORKLOADS.values():
        sweep(codec, workload, sync=sync, limit=None, again=4, stats=tally)
        assert not tally.failures, tally.failures[0]
    record_count("crash states", tally.states)


@pytest.mark.sweep
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("first", OPERATIONS)
def test_every_history_of_three_verbs(codec: str, first: str, record_count: Tell) -> None:
    tally = SweepStats()
    for rest in product(OPERATIONS, OPERATIONS):
        sweep(codec, history_of((first, *rest)), sync="batch", limit=12, stats=tally)
        assert not tally.failures, tally.failures[0]
    record_count("crash states", tally.states)


@pytest.mark.sweep
@pytest.mark.parametrize("codec", CODECS)
def test_long_histories_drawn_by_chance(codec: str, record_count: Tell) -> None:
    tally = SweepStats()
    for seed, sync in product(range(100, 160), POLICIES):
        sweep(codec, random_history(seed, 14), sync=sync, limit=12, seed=seed, again=1, stats=tally)
        assert not tally.failures, f"seed {seed}: {tally.failures[0]}"
    record_count("crash states", tally.states)
