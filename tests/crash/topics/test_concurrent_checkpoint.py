"""Power cuts where something is done while a checkpoint runs, to every topic and at every place of the checkpoint.

A checkpoint notes where the WAL stands, then writes topic by topic. What happens in between is in the WAL after that
position, and, for topics that are written later, in the snapshot as well: replay meets it twice. `make test` draws
arrangements by seed; those marked `sweep` (`make crash`) take all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest
from tests.crash.topics.reader import RuleViolated
from tests.crash.topics.sweep import Sweep, SweepDepth, SweepStats
from tests.crash.topics.workloads import (
    EngineHarness,
    Operation,
    batch,
    before,
    cap,
    drop,
    expire,
    one,
    prefix,
    prologue,
    reclass,
    seal,
    seqs,
    tag,
)

from tidelog.engine import checkpoint as checkpoints
from tidelog.engine.topic_state import TopicState
from tidelog.testing import SimDisk

Tell = Callable[[str, int], None]
TOPICS = ("f", "d", "m")  # in the order in which a checkpoint writes them


def lift(bench: EngineHarness, name: str, random: Random) -> None:
    """A low cap for a moment, then many records."""
    bench.configure(name, **random.choice([{"cap_records": 2}, {"cap_bytes": 60}]))
    bench.configure(name, cap_records=1000, cap_bytes=0)
    batch(bench, name, random)
    batch(bench, name, random)


def made(bench: EngineHarness, name: str, random: Random) -> None:
    """A topic that is new: its first frame comes after the position that the checkpoint has noted."""
    del name
    bench.create("new", durability=random.choice(["fsync", "disk"]), cap_records=2)
    batch(bench, "new", random)
    bench.configure("new", cap_records=1000)
    batch(bench, "new", random)


LETTERS: tuple[Operation, ...] = (
    *(one, batch, before, tag, prefix, seqs, cap, lift, made, expire, seal, drop, reclass),
)


class Arrangement(NamedTuple):
    """What is done, to which topic, and where in the checkpoint: before or after which topic is written."""

    letter: Operation
    topic: str
    after: bool
    place: str
    shards: int

    def __str__(self) -> str:
        where = f"{'after' if self.after else 'before'} {self.place}"
        return f"{self.letter.__name__} of {self.topic} {where}, {self.shards} shards"


ALL = [Arrangement(*each) for each in product(LETTERS, TOPICS, (False, True), TOPICS, (1, 2, 3))]


@contextmanager
def meddling(bench: EngineHarness, after: bool, place: str, act: Callable[[], None]) -> Iterator[list[bool]]:
    """While a checkpoint runs: `act` once, before or after a topic is written. Engines on crash images have their own
    checkpoints, and are left alone."""
    real, acted = checkpoints._write_topic, list[bool]()

    def write(core: TopicState, *rest: Any) -> None:
        mine = core.name == place and core.context is bench.log._context
        if mine and not after and not acted:
            acted.append(True)
            act()
        real(core, *rest)
        if mine and after and not acted:
            acted.append(True)
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "_write_topic", write)
        yield acted


def swept(each: Arrangement, depth: SweepDepth, *, seed: int, tally: SweepStats) -> None:
    random = Random(f"{seed}/{each}")
    bench = EngineHarness(SimDisk(trace=True), shards=each.shards)

    def history() -> None:
        with meddling(bench, each.after, each.place, lambda: each.letter(bench, each.topic, random)) as acted:
            bench.checkpoint()
        assert acted, f"{each}: the checkpoint has not come there"
        bench.check_all()
        if random.random() < 0.5:
            one(bench, each.topic, random)
        if random.random() < 0.5:
            bench.kill(random.choice((each.shards, each.shards, 1, 2)))
            bench.check_all()
            bench.checkpoint()
        bench.close()

    try:
        prologue(bench, random)
        bench.create("m", durability=random.choice(["fsync", "disk", "memory"]))
        bench.append("m", [b"a", b"b", b"c"], ["x:1", "y", "x:2"])
        bench.tick()
        bench.check_all()
        Sweep(bench, depth, Random(random.random()), tally).run(history)
    except RuleViolated as wrong:
        tally.failures.append(str(wrong))
    if tally.failures:
        tally.failures[-1] = f"seed {seed}, {each}: {tally.failures[-1]}"


def judged(chosen: list[Arrangement], depth: SweepDepth, seed: int) -> SweepStats:
    tally = SweepStats()
    for each in chosen:
        swept(each, depth, seed=seed, tally=tally)
        if tally.failures:
            break
    return tally


def report_counts(tally: SweepStats, record_count: Tell) -> None:
    record_count("crash states beside a checkpoint", tally.states)
    assert not tally.failures, tally.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("letter", LETTERS, ids=lambda letter: letter.__name__)
def test_what_is_done_while_a_checkpoint_runs_survives(letter: Operation, record_count: Tell) -> None:
    """Method: of each letter, an arrangement drawn by chance, with a few images of one instant in six."""
    mine = [each for each in ALL if each.letter is letter]
    tally = judged(Random(letter.__name__).sample(mine, 1), SweepDepth(limit=3, thorough=40, steady=14, step=6), seed=0)
    report_counts(tally, record_count)
    assert tally.states >= 5, f"only {tally.states} states"


@pytest.mark.sweep
@pytest.mark.parametrize("each", ALL, ids=str)
def test_every_arrangement_of_what_is_done_while_a_checkpoint_runs(each: Arrangement, record_count: Tell) -> None:
    report_counts(judged([each], SweepDepth(limit=10, again=1, thorough=6), seed=1), record_count)


@pytest.mark.sweep
def test_a_config_frame_that_takes_later_records_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: replay keeps the caps of a config frame against all that the snapshot holds."""
    real = TopicState.enforce_caps
    monkeypatch.setattr(TopicState, "enforce_caps", lambda core, head=None: real(core))  # noqa: ARG005
    chosen = [each for each in ALL if each.letter is lift and each.topic != each.place and not each.after]
    assert any(
        judged([each], SweepDepth(limit=4, thorough=12), seed=seed).failures for seed in range(3) for each in chosen
    )
