"""Power cuts at every operation of an engine's histories (G1–G11, G22–G29, G31–G60, G63, G70–G86).

`make test` judges every history of two letters, each in one arrangement of topics, classes and shards, with a sample of
the images of one instant in SAMPLED; every arrangement occurs. Those marked `sweep` (`make crash`) judge every instant,
run every history in every arrangement, take all images, and add histories of three letters and long ones with kills and
power cuts inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, product
from random import Random

import pytest
from tests.crash.topics.sweep import FAULTS, SYNCS, Depth, Fault, Sweep, Tally, fail_each, sweep
from tests.crash.topics.workloads import (
    ALPHABET,
    RESTARTS,
    Arrangement,
    Bench,
    Letter,
    arrangements,
    batch,
    checkpoint,
    kill,
    one,
    prologue,
    reopen,
    sampled,
    spell,
)

from tidelog.testing import SimDisk

Tell = Callable[[str, int], None]
SAMPLED = 6  # instants for one that `make test` judges
letters = pytest.mark.parametrize("first", ALPHABET, ids=lambda letter: letter.__name__)
faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def told(tally: Tally, tell: Tell) -> None:
    tell("crash states of topics", tally.states)
    assert not tally.failures, tally.failures[0]


@pytest.mark.slow
@letters
def test_every_history_of_two_letters_survives_a_power_cut(first: Letter, tell: Tell) -> None:
    tally = Tally()
    depth = Depth(limit=4, thorough=40, steady=14, step=SAMPLED)
    hows = arranged(first, 0)
    for history, how in zip([(first,), *product([first], ALPHABET)], [hows[0], *hows], strict=True):
        sweep(history, depth, seed=0, tally=tally, how=how)
        if tally.failures:
            break
    tell("histories of two letters in an arrangement", len(ALPHABET))
    told(tally, tell)
    assert tally.states >= 80, f"only {tally.states} states at {tally.instants} instants"


def arranged(first: Letter, seed: object) -> list[Arrangement]:
    """An arrangement for each second letter. Over all first letters every arrangement occurs."""
    began = ALPHABET.index(first) * len(ALPHABET)
    return list(islice(sampled(seed), began, began + len(ALPHABET)))


def test_histories_of_two_letters_have_every_arrangement() -> None:
    assert len(set(arrangements())) == 3 * 3 * 4 * 3
    found = [how for first in ALPHABET for how in arranged(first, 0)]
    assert set(found) == set(arrangements())
    for field in range(len(Arrangement._fields)):  # and no letter is always first on the same topic, class or place
        for first in ALPHABET:
            assert len({how[field] for how in arranged(first, 0)}) > 1


@pytest.mark.sweep
@letters
@pytest.mark.parametrize("second", ALPHABET, ids=lambda letter: letter.__name__)
def test_every_history_of_two_letters_in_every_arrangement(first: Letter, second: Letter, tell: Tell) -> None:
    tally, depth = Tally(), Depth(limit=4, thorough=20, steady=14, kills=True)
    for how in arrangements():
        sweep((first, second), depth, seed="arranged", tally=tally, how=how)
        if tally.failures:
            break
    tell("histories of two letters in an arrangement", len(arrangements()))
    told(tally, tell)


def cut_recovery_short(first: Letter, seconds: Sequence[Letter], tell: Tell, step: int = 1) -> None:
    """The power fails again at each operation of the recovery, for three images of each instant."""
    tally, depth = Tally(), Depth(limit=3, again=3, thorough=40, steady=14, step=step)
    hows = arranged(first, "recovery")
    for number, second in enumerate(seconds):
        sweep((first, second), depth, seed=number, tally=tally, how=hows[ALPHABET.index(second)])
        if tally.failures:
            break
    told(tally, tell)


@pytest.mark.slow
@letters
def test_a_recovery_that_is_cut_short_is_as_good_as_none(first: Letter, tell: Tell) -> None:
    """G48. Another second letter for each first one."""
    cut_recovery_short(first, [ALPHABET[ALPHABET.index(first) * 5 % len(ALPHABET)]], tell, SAMPLED)


@pytest.mark.sweep
@letters
def test_a_recovery_that_is_cut_short_after_any_two_letters(first: Letter, tell: Tell) -> None:
    cut_recovery_short(first, ALPHABET, tell)


@pytest.mark.slow
@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("seed", range(6))
def test_histories_with_kills_and_power_cuts_inside_them(seed: int, step: int, tell: Tell) -> None:
    tally = drawn(seed, steps=10, depth=Depth(limit=4, thorough=6, step=step))
    told(tally, tell)


@pytest.mark.sweep
@faults
def test_a_disk_that_refuses_loses_nothing_that_was_acked(fault: Fault, tell: Tell) -> None:
    tally = Tally()
    for number, first in enumerate(ALPHABET):
        fail_each(fault, (first, one, batch), seed=number, shards=1 + number % 2, limit=5, tally=tally)
        if tally.failures:
            break
    told(tally, tell)


@pytest.mark.slow
def test_an_ephemeral_topic_leaves_nothing_but_its_numbering(tell: Tell) -> None:
    """G11. Method: look for its records in every file of every image, and for its head behind the last checkpoint."""
    bench, tally = Bench(SimDisk(trace=True)), Tally()
    run = Sweep(bench, Depth(limit=6, thorough=3), Random(7), tally)
    run.forbidden = b"never on disk"

    def history() -> None:
        bench.create("e", durability="ephemeral")
        bench.create("f", durability="fsync")
        for letter in (one, checkpoint, one, kill, checkpoint, reopen, one):
            bench.append("e", [b"never on disk", {"text": "never on disk"}], ["x:1", None])
            letter(bench, "f", Random(letter.__name__))
            bench.append("e", [b"never on disk"])
            bench.look()
        bench.close()

    bench.open()
    run.over(history)
    told(tally, tell)


def pairs(most: int) -> list[tuple[int, int]]:
    return list(product(range(1, most + 1), range(1, most + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), pairs(4))
def test_any_count_of_shards_reads_what_any_other_wrote(old: int, new: int) -> None:
    """G49–G51: written with one count and killed, opened and written with another and killed, and back again."""
    change_shards(old, new)


def change_shards(old: int, new: int) -> None:
    random = Random(f"{old}/{new}")
    bench = Bench(SimDisk(), shards=old)
    prologue(bench, random)
    for number in range(5):
        bench.create(f"t{number}", durability="disk" if number % 2 else "fsync")
        bench.append(f"t{number}", [b"%d" % number, {"n": number}], ["x:1", "y"])
    for shards in (new, old, new):
        spell(bench, random.sample(ALPHABET[:8], 4), random)
        bench.kill(shards)
        spell(bench, (one, batch), random)
    bench.close()
    bench.open(old)
    bench.look()
    bench.close()


def drawn(seed: int, *, steps: int, depth: Depth) -> Tally:
    """A long history drawn by chance. The restarts inside it make it another one for every seed."""
    random = Random(f"history {seed}")
    return sweep(random.choices((*ALPHABET, *RESTARTS), k=steps), depth, seed=seed, shards=random.randint(1, 4))


@pytest.mark.sweep
@letters
def test_every_state_of_every_history_of_two_letters(first: Letter, tell: Tell) -> None:
    tally = Tally()
    for second, how in zip(ALPHABET, arranged(first, 1), strict=True):
        sweep((first, second), Depth(again=1, thorough=3), seed=1, tally=tally, how=how)
        if tally.failures:
            break
    told(tally, tell)


@pytest.mark.sweep
@letters
@pytest.mark.parametrize("second", ALPHABET, ids=lambda letter: letter.__name__)
def test_every_history_of_three_letters(first: Letter, second: Letter, tell: Tell) -> None:
    tally = Tally()
    for number, third in enumerate(ALPHABET):
        sweep((first, second, third), Depth(limit=10, thorough=6), seed=2, shards=1 + number % 4, tally=tally)
        if tally.failures:
            break
    told(tally, tell)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1_000, 1_200))
def test_long_histories_drawn_by_chance(seed: int, tell: Tell) -> None:
    told(drawn(seed, steps=25, depth=Depth(limit=8, again=1, thorough=6)), tell)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", SYNCS, ids=lambda fault: fault.name)
@letters
def test_every_sync_of_every_history_of_two_letters_fails(fault: Fault, first: Letter, tell: Tell) -> None:
    tally, hows = Tally(), arranged(first, fault.name)
    for number, (second, how) in enumerate(zip(ALPHABET, hows, strict=True)):
        fail_each(fault, (first, second, one), seed=number, limit=None, tally=tally, how=how)
        if tally.failures:
            break
    told(tally, tell)


@pytest.mark.sweep
@pytest.mark.parametrize(("old", "new"), pairs(16))
def test_all_pairs_of_shard_counts(old: int, new: int) -> None:
    change_shards(old, new)
