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
from tests.crash.topics.sweep import FAULTS, SYNCS, DiskFault, Sweep, SweepDepth, SweepStats, fail_each, sweep
from tests.crash.topics.workloads import (
    OPERATIONS,
    RESTARTS,
    Arrangement,
    EngineHarness,
    Operation,
    arrangements,
    batch,
    checkpoint,
    kill,
    one,
    prologue,
    reopen,
    run_history,
    sampled,
)
from tests.kit.sampling import one_in

from tidelog.testing import SimDisk

Tell = Callable[[str, int], None]
SAMPLED = 80  # instants for one that `make test` judges
letters = pytest.mark.parametrize("first", OPERATIONS, ids=lambda letter: letter.__name__)
faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def report_counts(tally: SweepStats, record_count: Tell) -> None:
    record_count("crash states of topics", tally.states)
    assert not tally.failures, tally.failures[0]


@pytest.mark.slow
@letters
def test_every_history_of_two_letters_survives_a_power_cut(first: Operation, record_count: Tell) -> None:
    tally = SweepStats()
    depth = SweepDepth(limit=3, thorough=40, steady=14, step=SAMPLED)
    hows = arranged(first, 0)
    for history, how in zip([(first,), *product([first], OPERATIONS)], [hows[0], *hows], strict=True):
        sweep(history, depth, seed=0, stats=tally, how=how)
        if tally.failures:
            break
    record_count("histories of two letters in an arrangement", len(OPERATIONS))
    report_counts(tally, record_count)
    assert tally.states >= 20, f"only {tally.states} states at {tally.instants} instants"


def arranged(first: Operation, seed: object) -> list[Arrangement]:
    """An arrangement for each second letter. Over all first letters every arrangement occurs."""
    began = OPERATIONS.index(first) * len(OPERATIONS)
    return list(islice(sampled(seed), began, began + len(OPERATIONS)))


def test_histories_of_two_letters_have_every_arrangement() -> None:
    assert len(set(arrangements())) == 3 * 3 * 4 * 3
    found = [how for first in OPERATIONS for how in arranged(first, 0)]
    assert set(found) == set(arrangements())
    for field in range(len(Arrangement._fields)):  # and no letter is always first on the same topic, class or place
        for first in OPERATIONS:
            assert len({how[field] for how in arranged(first, 0)}) > 1


@pytest.mark.sweep
@letters
@pytest.mark.parametrize("second", OPERATIONS, ids=lambda letter: letter.__name__)
def test_every_history_of_two_letters_in_every_arrangement(
    first: Operation, second: Operation, record_count: Tell
) -> None:
    tally, depth = SweepStats(), SweepDepth(limit=4, thorough=20, steady=14, kills=True)
    for how in arrangements():
        sweep((first, second), depth, seed="arranged", stats=tally, how=how)
        if tally.failures:
            break
    record_count("histories of two letters in an arrangement", len(arrangements()))
    report_counts(tally, record_count)


def cut_recovery_short(
    first: Operation, seconds: Sequence[Operation], record_count: Tell, *, again: int = 3, step: int = 1
) -> None:
    """The power fails again at each operation of the recovery, for `again` images of each instant."""
    tally, depth = SweepStats(), SweepDepth(limit=3, again=again, thorough=40, steady=14, step=step)
    hows = arranged(first, "recovery")
    for number, second in enumerate(seconds):
        sweep((first, second), depth, seed=number, stats=tally, how=hows[OPERATIONS.index(second)])
        if tally.failures:
            break
    report_counts(tally, record_count)


@pytest.mark.slow
@letters
def test_a_recovery_that_is_cut_short_is_as_good_as_none(first: Operation, record_count: Tell) -> None:
    """G48. Another second letter for each first one."""
    second = OPERATIONS[OPERATIONS.index(first) * 5 % len(OPERATIONS)]
    cut_recovery_short(first, [second], record_count, again=1, step=SAMPLED)


@pytest.mark.sweep
@letters
def test_a_recovery_that_is_cut_short_after_any_two_letters(first: Operation, record_count: Tell) -> None:
    cut_recovery_short(first, OPERATIONS, record_count)


@pytest.mark.slow
@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("seed", range(6))
def test_histories_with_kills_and_power_cuts_inside_them(seed: int, step: int, record_count: Tell) -> None:
    tally = drawn(seed, steps=10, depth=SweepDepth(limit=4, thorough=6, step=step))
    report_counts(tally, record_count)


@pytest.mark.sweep
@faults
def test_a_disk_that_refuses_loses_nothing_that_was_acked(fault: DiskFault, record_count: Tell) -> None:
    tally = SweepStats()
    for number, first in enumerate(OPERATIONS):
        fail_each(fault, (first, one, batch), seed=number, shards=1 + number % 2, limit=5, stats=tally)
        if tally.failures:
            break
    report_counts(tally, record_count)


@pytest.mark.slow
def test_an_ephemeral_topic_leaves_nothing_but_its_numbering(record_count: Tell) -> None:
    """G11. Method: look for its records in every file of every image, and for its head behind the last checkpoint."""
    bench, tally = EngineHarness(SimDisk(trace=True)), SweepStats()
    run = Sweep(bench, SweepDepth(limit=6, thorough=3), Random(7), tally)
    run.forbidden = b"never on disk"

    def history() -> None:
        bench.create("e", durability="ephemeral")
        bench.create("f", durability="fsync")
        for letter in (one, checkpoint, one, kill, checkpoint, reopen, one):
            bench.append("e", [b"never on disk", {"text": "never on disk"}], ["x:1", None])
            letter(bench, "f", Random(letter.__name__))
            bench.append("e", [b"never on disk"])
            bench.check_all()
        bench.close()

    bench.open()
    run.run(history)
    report_counts(tally, record_count)


def pairs(most: int) -> list[tuple[int, int]]:
    return list(product(range(1, most + 1), range(1, most + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), one_in(3, pairs(4)))
def test_any_count_of_shards_reads_what_any_other_wrote(old: int, new: int) -> None:
    """G49–G51: written with one count and killed, opened and written with another and killed, and back again."""
    change_shards(old, new)


def change_shards(old: int, new: int) -> None:
    random = Random(f"{old}/{new}")
    bench = EngineHarness(SimDisk(), shards=old)
    prologue(bench, random)
    for number in range(5):
        bench.create(f"t{number}", durability="disk" if number % 2 else "fsync")
        bench.append(f"t{number}", [b"%d" % number, {"n": number}], ["x:1", "y"])
    for shards in (new, old, new):
        run_history(bench, random.sample(OPERATIONS[:8], 4), random)
        bench.kill(shards)
        run_history(bench, (one, batch), random)
    bench.close()
    bench.open(old)
    bench.check_all()
    bench.close()


def drawn(seed: int, *, steps: int, depth: SweepDepth) -> SweepStats:
    """A long history drawn by chance. The restarts inside it make it another one for every seed."""
    random = Random(f"history {seed}")
    return sweep(random.choices((*OPERATIONS, *RESTARTS), k=steps), depth, seed=seed, shards=random.randint(1, 4))


@pytest.mark.sweep
@letters
def test_every_state_of_every_history_of_two_letters(first: Operation, record_count: Tell) -> None:
    tally = SweepStats()
    for second, how in zip(OPERATIONS, arranged(first, 1), strict=True):
        sweep((first, second), SweepDepth(again=1, thorough=3), seed=1, stats=tally, how=how)
        if tally.failures:
            break
    report_counts(tally, record_count)


@pytest.mark.sweep
@letters
@pytest.mark.parametrize("second", OPERATIONS, ids=lambda letter: letter.__name__)
def test_every_history_of_three_letters(first: Operation, second: Operation, record_count: Tell) -> None:
    tally = SweepStats()
    for number, third in enumerate(OPERATIONS):
        sweep((first, second, third), SweepDepth(limit=10, thorough=6), seed=2, shards=1 + number % 4, stats=tally)
        if tally.failures:
            break
    report_counts(tally, record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1_000, 1_200))
def test_long_histories_drawn_by_chance(seed: int, record_count: Tell) -> None:
    report_counts(drawn(seed, steps=25, depth=SweepDepth(limit=8, again=1, thorough=6)), record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", SYNCS, ids=lambda fault: fault.name)
@letters
def test_every_sync_of_every_history_of_two_letters_fails(
    fault: DiskFault, first: Operation, record_count: Tell
) -> None:
    tally, hows = SweepStats(), arranged(first, fault.name)
    for number, (second, how) in enumerate(zip(OPERATIONS, hows, strict=True)):
        fail_each(fault, (first, second, one), seed=number, limit=None, stats=tally, how=how)
        if tally.failures:
            break
    report_counts(tally, record_count)


@pytest.mark.sweep
@pytest.mark.parametrize(("old", "new"), pairs(16))
def test_all_pairs_of_shard_counts(old: int, new: int) -> None:
    change_shards(old, new)
