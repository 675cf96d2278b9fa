"""Power cuts at every operation of histories with routers (§3.6, G48, G54): what a reader of a target saw stays.

`make test` judges every letter after a few others, every pair of classes and a history with restarts on each layout,
at one instant in SAMPLED, drawn by seed. Those marked `sweep` (`make crash`) judge every instant of the same histories
and of more, every pair of classes on every layout, and long histories with kills and power cuts inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import pytest
from tests.crash.routers.harness import (
    OPERATIONS,
    RESTARTS,
    Operation,
    RouterHarness,
    RuleViolated,
    around,
    batch,
    checkpoint,
    direct,
    exchange,
    expire,
    feed,
    flood,
    group,
    kill,
    late,
    new_source,
    power,
    slow,
    trim_jobs,
    trim_wired,
    work,
)

Tell = Callable[[str, int], None]
CLASSES = (("fsync", "fsync"), ("disk", "disk"), ("fsync", "disk"), ("disk", "fsync"))
_NAMES = ("ephemeral", "memory", "disk", "fsync")
PAIRS = tuple(product(_NAMES, _NAMES))
SAMPLED = 60  # instants for one that `make test` judges
CASES = [(layout, letter) for layout, letters in OPERATIONS.items() for letter in letters]


def judged(
    classes: tuple[str, str],
    letters: Sequence[Operation],
    seed: object,
    *,
    layout: str = "main",
    shards: int = 1,
    images: int = 3,
    every: int = 4,
    step: int = 1,
) -> int:
    """Run a history and judge all its instants; how many states that were."""
    bench = RouterHarness(classes, shards, Random(f"{seed}"), layout=layout, images=images, every=every, step=step)
    try:
        bench.run_history(letters)
    except RuleViolated as wrong:
        words = " ".join(letter.__name__ for letter in letters)
        raise AssertionError(f"seed {seed!r}, {layout}, {classes}, {shards} shards, {words}: {wrong}") from wrong
    return bench.states


BEFORE: dict[str, tuple[tuple[Operation, ...], tuple[Operation, ...]]] = {
    "main": ((batch, direct), (slow, checkpoint)),
    "wires": ((feed, exchange), (late, checkpoint)),
    "jobs": ((work, group), (group, checkpoint)),
    "cycle": ((flood, around), (around, checkpoint)),
}


each_letter = pytest.mark.parametrize(("layout", "letter"), CASES, ids=lambda each: getattr(each, "__name__", each))


@pytest.mark.slow
@each_letter
def test_every_letter_survives_a_power_cut(layout: str, letter: Operation, record_count: Tell) -> None:
    states = judge_letter(layout, letter, SAMPLED)
    record_count("crash states of routers", states)
    assert states >= 2, f"only {states} states"


@pytest.mark.sweep
@each_letter
def test_every_letter_survives_a_power_cut_at_every_instant(layout: str, letter: Operation, record_count: Tell) -> None:
    states = judge_letter(layout, letter, 1)
    record_count("crash states of routers", states)
    assert states >= 20, f"only {states} states"


def judge_letter(layout: str, letter: Operation, step: int) -> int:
    number = CASES.index((layout, letter))
    every = 4 if number % 2 else 12  # a checkpoint has many instants
    history = [*BEFORE[layout][not number % 2], letter, OPERATIONS[layout][number % 3]]
    classes = CLASSES[number % 4]
    shards = 1 + number % 3
    return judged(classes, history, number, layout=layout, shards=shards, images=2, every=every, step=step)


PAIRED: dict[str, tuple[Operation, ...]] = {
    "main": (batch, direct, kill, slow, power, batch),
    "wires": (feed, exchange, kill, trim_wired, new_source, power, feed),
    "jobs": (trim_jobs, expire, group, kill, work, power, trim_jobs),
    "cycle": (flood, kill, around, power, flood),
}


@pytest.mark.slow
@pytest.mark.parametrize("classes", PAIRS, ids="-".join)
def test_every_pair_of_classes(classes: tuple[str, str], record_count: Tell) -> None:
    """Each pair on one layout, each class of a source on all of them. The sweep below has every pair on every one."""
    number = PAIRS.index(classes)
    layout = list(PAIRED)[(number + number // 4) % 4]
    history, shards = PAIRED[layout], 1 + number % 3
    states = judged(classes, history, number, layout=layout, shards=shards, images=1, every=9, step=SAMPLED)
    record_count("crash states of routers", states)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_histories_with_kills_and_power_cuts_inside_them(seed: int, record_count: Tell) -> None:
    record_count("crash states of routers", judge_restarts(seed, SAMPLED))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(8))
def test_every_instant_of_histories_with_kills_and_power_cuts(seed: int, record_count: Tell) -> None:
    record_count("crash states of routers", judge_restarts(seed, 1))


def judge_restarts(seed: int, step: int) -> int:
    random, layout = Random(seed), list(OPERATIONS)[seed % 4]
    letters = [random.choice((*OPERATIONS[layout], *RESTARTS)) for _ in range(6)]
    history = [*letters, kill, OPERATIONS[layout][0]]
    classes, shards = CLASSES[(seed + seed // 4) % 4], 1 + seed % 3
    return judged(classes, history, seed, layout=layout, shards=shards, images=2, every=10, step=step)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(48))
def test_long_histories(seed: int, record_count: Tell) -> None:
    random, layout = Random(f"long {seed}"), list(OPERATIONS)[seed % 4]
    alphabet = OPERATIONS[layout]
    letters = [random.choice((*alphabet, *alphabet, *RESTARTS)) for _ in range(14)]
    classes = CLASSES[seed // 4 % 4] if seed % 3 else PAIRS[seed // 3 % len(PAIRS)]
    record_count(
        "crash states of routers", judged(classes, letters, seed, layout=layout, shards=1 + seed % 3, images=6)
    )


@pytest.mark.sweep
@pytest.mark.parametrize("classes", PAIRS, ids="-".join)
@pytest.mark.parametrize("layout", list(PAIRED))
def test_every_pair_of_classes_on_every_layout(layout: str, classes: tuple[str, str], record_count: Tell) -> None:
    for shards in (1, 2, 3):
        record_count("crash states of routers", judged(classes, PAIRED[layout], shards, layout=layout, shards=shards))
