"""Power cuts at every operation of histories with routers (§3.6, G48, G54): what a reader of a dest saw stays.

`make test` judges every letter behind a few others with a sample of images; those marked `sweep` (`make crash`) draw
long histories with kills and power cuts inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from tests.crash.routers.bench import ALPHABET, RESTARTS, Bench, Letter, Wrong, batch, checkpoint, direct, kill, slow

Tell = Callable[[str, int], None]
CLASSES = (("fsync", "fsync"), ("disk", "disk"), ("fsync", "disk"), ("disk", "fsync"))


def judged(
    classes: tuple[str, str],
    letters: Sequence[Letter],
    seed: object,
    *,
    shards: int = 1,
    images: int = 3,
    every: int = 4,
) -> int:
    """Run a history and judge all its instants; how many states that were."""
    bench = Bench(classes, shards, Random(f"{seed}"), images=images, every=every)
    try:
        bench.spell(letters)
    except Wrong as wrong:
        words = " ".join(letter.__name__ for letter in letters)
        raise AssertionError(f"seed {seed!r}, {classes}, {shards} shards, {words}: {wrong}") from wrong
    return bench.states


@pytest.mark.slow
@pytest.mark.parametrize("letter", ALPHABET, ids=lambda letter: letter.__name__)
def test_every_letter_survives_a_power_cut(letter: Letter, tell: Tell) -> None:
    number = ALPHABET.index(letter)
    before: tuple[Letter, ...] = (batch, direct) if number % 2 else (slow, checkpoint)
    every = 4 if number % 2 else 12  # a checkpoint has many instants
    history = [*before, letter, direct]
    states = judged(CLASSES[number % 2], history, number, shards=1 + number % 3, images=2, every=every)
    tell("crash states of routers", states)
    assert states >= 30, f"only {states} states"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_histories_with_kills_and_power_cuts_inside_them(seed: int, tell: Tell) -> None:
    random = Random(seed)
    letters = [random.choice((*ALPHABET, *RESTARTS)) for _ in range(6)]
    states = judged(CLASSES[seed], [*letters, kill, batch], seed, shards=1 + seed % 3, images=2, every=10)
    tell("crash states of routers", states)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(24))
def test_long_histories(seed: int, tell: Tell) -> None:
    random = Random(f"long {seed}")
    letters = [random.choice((*ALPHABET, *ALPHABET, *RESTARTS)) for _ in range(14)]
    tell("crash states of routers", judged(CLASSES[seed % 4], letters, seed, shards=1 + seed % 3, images=6))
