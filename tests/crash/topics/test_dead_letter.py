"""Power cuts while jobs move to a dead-letter topic and back: never in neither, for all pairs of classes and shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.crash.topics.dead_letter_histories import BETWEEN_ACTIONS, CLASSES, TARGETS, Arrangement, arrangements, sweep

from tidelog.engine import append, delete
from tidelog.engine.queues import dead_letter

Patch = pytest.MonkeyPatch
Tell = Callable[[str, int], None]
PLACES = ((1, False), (2, False), (2, True))  # how many shards, and whether the two topics are in different ones


@pytest.fixture(autouse=True)
def no_error_log() -> Iterator[None]:
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
        made = Arrangement(queue, dead, shards, apart, target, BETWEEN_ACTIONS[number * 7 // 2 % len(BETWEEN_ACTIONS)])
        found.append(made._replace(target="log") if target == "auto" and dead != "disk" else made)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "apart"), PLACES)
def test_no_power_cut_loses_a_job_between_two_topics(shards: int, apart: bool, record_count: Tell) -> None:
    states, wrong = sweep(spread(shards, apart), limit=1)
    record_count("crash states of dead letters", states)
    assert not wrong, wrong[0]
    assert states > 100, "there was something to judge"


@pytest.mark.slow
@pytest.mark.parametrize("strikes", ["target", "source"])
def test_no_failed_sync_loses_a_job_between_two_topics(strikes: str, record_count: Tell) -> None:
    hows = [
        Arrangement(queue, dead, *PLACES[number % 3], "log", "nothing", strikes)
        for number, (queue, dead) in enumerate((queue, dead) for queue in CLASSES for dead in CLASSES)
    ]
    states, wrong = sweep(hows, limit=8)
    record_count("crash states of dead letters", states)
    assert not wrong, wrong[0]
    assert states > 50


@pytest.mark.sweep
@pytest.mark.parametrize("between", BETWEEN_ACTIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_power_cut_loses_a_job_between_two_topics_in_any_arrangement(
    target: str, between: str, record_count: Tell
) -> None:
    states, wrong = sweep(arrangements((target,), (between,)), limit=8)
    record_count("crash states of dead letters", states)
    assert not wrong, wrong[0]
    assert states > 300


# Bugs planted on purpose ------------------------------------------------------------------------------------


def the_copy_is_not_synced(patch: Patch) -> None:
    """The fault of issue 17, 1.3: the copy follows the class of its topic."""
    real = append.submit_write
    patch.setattr(append, "submit_write", lambda topic, batch, key=None, **_: real(topic, batch, key))


def a_job_that_is_given_back_is_not_synced(patch: Patch) -> None:
    real = dead_letter._append_redriven
    patch.setattr(dead_letter, "_append_redriven", lambda queue, batch, **_: real(queue, batch, durable=False))


def a_dead_letter_is_not_synced(patch: Patch) -> None:
    real = dead_letter._append_copies

    def copy(state: Any, piece: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            the_copy_is_not_synced(inner)
            real(state, piece)

    patch.setattr(dead_letter, "_append_copies", copy)


def a_job_leaves_the_queue_before_its_copy_is_written(patch: Patch) -> None:
    real = dead_letter._move_chunk

    def moved(state: Any, piece: Any) -> Any:
        dead_letter._delete_moved(state, piece.rows.seq.tolist()).wait()
        real(state, piece)
        return [], None

    patch.setattr(dead_letter, "_move_chunk", moved)


def a_dead_letter_is_deleted_before_its_job_is_back(patch: Patch) -> None:
    real = dead_letter._move_back

    def move(core: Any, queue: Any, chosen: Any, at: list[int]) -> None:
        delete.delete_records(core, None, None, chosen.chunk.rows.seq[at].tolist())
        real(core, queue, chosen, at)

    patch.setattr(dead_letter, "_move_back", move)


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
    _, wrong = sweep(hows, limit=40)
    assert wrong, f"{bug.__name__} was not found"
