"""Power cuts at every operation of a rewrite, and histories that go on after it (D3, D13, D15).

The letter `rewrite` is one of the letters of `test_sweep` as well. Here are histories of a rewrite in its stages, the
recovery cut short once more, and disks that refuse. Planted bugs are in `tests/unit/engine/test_rewrite.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from tests.crash.topics.sweep import FAULTS, DiskFault, SweepDepth, SweepStats, fail_each, sweep
from tests.crash.topics.workloads import operations_named, sampled

Tell = Callable[[str, int], None]
HISTORIES = (
    "batch seqs rewrite checkpoint one",
    "batch batch tag rewrite reopen",
    "batch before rewrite seqs rewrite",
    "batch rewrite prefix checkpoint rewrite",
    "batch rewrite cap rewrite",
    "batch rewrite expire rewrite",
    "batch rewrite drop rewrite",
    "batch rewrite crash rewrite kill",
)


def swept(words: str, depth: SweepDepth, seed: object, number: int) -> SweepStats:
    how = next(islice(sampled(seed), number * 7, None))
    return sweep(operations_named(words), depth, seed=seed, how=how)


@pytest.mark.slow
def test_a_rewrite_survives_power_cuts(record_count: Tell) -> None:
    depth = SweepDepth(limit=2, again=1, again_limit=1, thorough=30, steady=14, step=40)
    for number, words in enumerate(HISTORIES):
        tally = swept(words, depth, "rewrite", number)
        record_count("crash states of rewrites", tally.states)
        assert not tally.failures, tally.failures[0]


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("words", HISTORIES)
def test_a_rewrite_survives_power_cuts_at_every_instant_twice(words: str, seed: int, record_count: Tell) -> None:
    depth = SweepDepth(limit=4, again=3, thorough=10, kills=True)
    tally = swept(words, depth, f"every {seed}", seed)
    record_count("crash states of rewrites", tally.states)
    assert not tally.failures, tally.failures[0]


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_disk_that_refuses_a_rewrite_loses_nothing(fault: DiskFault, record_count: Tell) -> None:
    tally = SweepStats()
    fail_each(fault, operations_named("batch rewrite one"), seed=3, limit=3, stats=tally)
    record_count("crash states of rewrites", tally.states)
    assert not tally.failures, tally.failures[0]
