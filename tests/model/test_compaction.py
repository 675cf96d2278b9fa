"""A topic with compaction against dicts: any order of writes, deletes, compactions, evictions, restarts and power cuts
shows the table that the dicts give."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.crash.topics.compaction_histories import OPERATIONS, CompactionHistory, CompactionStats

STEPS = (*OPERATIONS, CompactionHistory.power_cut)
CONFIGS: tuple[dict[str, Any], ...] = (
    {"durability": "fsync"},
    {"durability": "disk", "cap_records": 6},
    {"durability": "fsync", "ttl_ms": 1_500},
    {"durability": "memory", "cap_bytes": 120},
)


def run_steps(steps: list[int], config: dict[str, Any], rule: str, seed: int) -> None:
    stats = CompactionStats()
    history = CompactionHistory(Random(seed), stats, shards=1, images=0, compaction=rule, **config)
    for step in steps:
        STEPS[step % len(STEPS)](history)


@pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.sweep)])
def test_the_table_is_the_one_that_the_dicts_give(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        st.lists(st.integers(0, len(STEPS) - 1), min_size=10, max_size=30),
        st.sampled_from(CONFIGS),
        st.sampled_from(("latest_by_tag", "/k")),
        st.integers(0, 1_000),
    )
    def check(steps: list[int], config: dict[str, Any], rule: str, seed: int) -> None:
        run_steps(steps, config, rule, seed)

    check()
