"""Power cuts while jobs move to a dead-letter topic and back: never in neither, for all pairs of classes and shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.crash.topics.letters import BETWEEN, CLASSES, TARGETS, Arrangement, arrangements, sweep

from tidelog.engine import delete
from tidelog.engine.queues import burial, redrive
from tidelog.engine.queues.door import Queue
from tidelog.engine.topic import Topic

Patch = pytest.MonkeyPatch
Tell = Callable[[str, int], None]
PLACES = ((1, False), (2, False), (2, True))  # how many shards, and whether the two topics are in different ones


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A full dead-letter topic is logged by each of the thousands of engines that are opened here."""
    logger = logging.getLogger("tidelog.queues")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def spread(shards: int, apart: bool) -> list[Arrangement]:
    """Every pair of classes once; what the target is and what comes between the steps take turns."""
    pairs = [(queue, dead) for queue in CLASSES for dead in CLASSES]
    found = []
    for number, (queue, dead) in enumerate(pairs, PLACES.index((shards, apart))):
        target = TARGETS[number % len(TARGETS)]
        made = Arrangement(queue, dead, shards, apart, target, BETWEEN[number * 7 // 2 % len(BETWEEN)])
        found.append(made._replace(target="log") if target == "auto" and dead != "disk" else made)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "apart"), PLACES)
def test_no_power_cut_loses_a_job_between_two_topics(shards: int, apart: bool, tell: Tell) -> None:
    states, wrong = sweep(spread(shards, apart), limit=2)
    tell("crash states of dead letters", states)
    assert not wrong, wrong[0]
    assert states > 100, "there was something to judge"


@pytest.mark.slow
@pytest.mark.parametrize("strikes", ["target", "source"])
def test_no_failed_sync_loses_a_job_between_two_topics(strikes: str, tell: Tell) -> None:
    hows = [
        Arrangement(queue, dead, *PLACES[number % 3], "log", "nothing", strikes)
        for number, (queue, dead) in enumerate((queue, dead) for queue in CLASSES for dead in CLASSES)
    ]
    states, wrong = sweep(hows, limit=8)
    tell("crash states of dead letters", states)
    assert not wrong, wrong[0]
    assert states > 50


@pytest.mark.sweep
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("target", TARGETS)
def test_no_power_cut_loses_a_job_between_two_topics_in_any_arrangement(target: str, between: str, tell: Tell) -> None:
    states, wrong = sweep(arrangements((target,), (between,)), limit=8)
    tell("crash states of dead letters", states)
    assert not wrong, wrong[0]
    assert states > 300


# Bugs planted on purpose ------------------------------------------------------------------------------------


def the_copy_is_not_synced(patch: Patch) -> None:
    """The fault of issue 17, 1.3: the copy follows the class of its topic."""
    real = Topic.stage
    patch.setattr(Topic, "stage", lambda self, batch, key=None, **_: real(self, batch, key))


def a_job_that_is_given_back_is_not_synced(patch: Patch) -> None:
    real = Queue.take_in
    patch.setattr(Queue, "take_in", lambda self, batch, **_: real(self, batch, synced=False))


def a_dead_letter_is_not_synced(patch: Patch) -> None:
    real = burial._copy

    def copy(state: Any, piece: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            the_copy_is_not_synced(inner)
            real(state, piece)

    patch.setattr(burial, "_copy", copy)


def a_job_leaves_the_queue_before_its_copy_is_written(patch: Patch) -> None:
    real = burial._moved

    def moved(state: Any, piece: Any) -> Any:
        burial._delete(state, piece.rows.seq.tolist()).wait()
        real(state, piece)
        return [], None

    patch.setattr(burial, "_moved", moved)


def a_dead_letter_is_deleted_before_its_job_is_back(patch: Patch) -> None:
    real = redrive._move

    def move(core: Any, queue: Any, chosen: Any, at: list[int]) -> None:
        delete.delete(core, None, None, chosen.stretch.rows.seq[at].tolist())
        real(core, queue, chosen, at)

    patch.setattr(redrive, "_move", move)


BUGS = [
    the_copy_is_not_synced,
    a_job_that_is_given_back_is_not_synced,
    a_dead_letter_is_not_synced,
    a_job_leaves_the_queue_before_its_copy_is_written,
    a_dead_letter_is_deleted_before_its_job_is_back,
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_sweep_finds_a_planted_bug(bug: Any, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    hows = [Arrangement(queue, dead, 2, True) for queue, dead in (("fsync", "disk"), ("disk", "fsync"))]
    _, wrong = sweep(hows, limit=6)
    assert wrong, f"{bug.__name__} was not found"
