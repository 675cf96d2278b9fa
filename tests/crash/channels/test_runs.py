"""Members, lists, owners, seqs and cursors over crashes and restarts (G130-G132, G138, G140, G141, G143, G144)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.crash.channels.runs import run

Tell = Callable[[str, int], None]
RUNS = 1_200


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_channels_are_what_the_model_says_after_every_crash(part: int, tell: Tell) -> None:
    """Method: random operations with the power cut at a random disk operation; any subset of what was not synced
    survives; everything the restart finds is held against a model that shares no code."""
    total = 0
    for seed in range(part * RUNS // 4, (part + 1) * RUNS // 4):
        count, wrong = run(seed)
        assert wrong is None, f"seed {seed}: {wrong}"
        total += count
    tell("channel runs with crashes", RUNS // 4)
    assert total > RUNS // 4 * 10, "most runs must get somewhere before the power fails"


def test_a_few_runs_in_every_check() -> None:
    for seed in range(10_000, 10_025):
        _, wrong = run(seed)
        assert wrong is None, f"seed {seed}: {wrong}"
