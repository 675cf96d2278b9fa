"""Moves to the dead-letter topic and back, decision by decision."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.engine.harness import EngineHarness

from tidelog.engine import Queue, Topic, append
from tidelog.engine.queues import dead_letter
from tidelog.engine.queues.dead_letter import RedriveResult, _RateLimiter
from tidelog.errors import BadInput, Damaged, Error, Refused, TopicNotFound, Unavailable
from tidelog.testing import ManualClock


def queue(harness: EngineHarness, name: str = "jobs", **config: Any) -> Queue:
    return harness.log.queue(name, **{"lease_ms": 1_000, "max_deliveries": 1, "dead_letter": "dead", **config})


def chunk_of(*seqs: int) -> Any:
    return SimpleNamespace(rows=SimpleNamespace(seq=np.array(seqs, np.int64)))


def chunks_of(selected: list[Any]) -> list[Any]:
    return [chunk.rows.seq.tolist() for chunk in selected]


@pytest.fixture
def jobs() -> Queue:
    """Ten jobs, all of which are dead letters in progress."""
    made = queue(EngineHarness())
    made.put(list(range(10)))
    made._state.leases.reserve_dead(made._state.leases.take(10, lambda *_: (list(range(1, 11)), 11)))
    return made


# The copies of one chunk ----------------------------------------------------------------------------------


REFUSED, UNAVAILABLE, DAMAGED = Refused("full"), Unavailable("busy"), Damaged("latched")


@pytest.mark.parametrize(
    ("copied", "failures", "asked", "moved", "failure"),
    [
        ([], {}, [[1, 2, 3]], [1, 2, 3], None),
        ([1, 2, 3], {}, [], [1, 2, 3], None),
        ([2], {}, [[1, 3]], [1, 2, 3], None),
        ([1, 2], {"3": REFUSED}, [[3]], [1, 2], REFUSED),
        ([], {"1,2,3": REFUSED}, [[1, 2, 3], [1], [2], [3]], [1, 2, 3], None),
        ([], {"1,2,3": UNAVAILABLE, "3": REFUSED}, [[1, 2, 3], [1], [2], [3]], [1, 2], REFUSED),
        ([], {"1,2,3": REFUSED, "2": DAMAGED}, [[1, 2, 3], [1], [2]], [1], DAMAGED),
        ([3], {"1,2": REFUSED, "1": REFUSED}, [[1, 2], [1]], [3], REFUSED),
        ([2], {"1,3": DAMAGED}, [[1, 3]], [2], DAMAGED),
        ([], {"1,2,3": DAMAGED}, [[1, 2, 3]], [], DAMAGED),
    ],
)
def test_jobs_of_a_chunk_are_copied_together_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
    jobs: Queue,
    copied: list[int],
    failures: dict[str, Error],
    asked: list[list[int]],
    moved: list[int],
    failure: Error | None,
) -> None:
    calls: list[list[int]] = []

    def append_copies(_: object, chunk: Any) -> None:
        calls.append(chunk.rows.seq.tolist())
        error = failures.get(",".join(map(str, calls[-1])))
        if error is not None:
            raise error

    def select(chunks: Any, seqs: list[int]) -> list[Any]:
        return [chunk_of(*(seq for seq in chunks[0].rows.seq.tolist() if seq in seqs))]

    monkeypatch.setattr(dead_letter, "_append_copies", append_copies)
    monkeypatch.setattr(dead_letter, "select_jobs", select)
    monkeypatch.setattr(dead_letter, "_already_copied", lambda *_: set(copied))
    assert dead_letter._move_chunk(jobs._state, chunk_of(1, 2, 3)) == (moved, failure)
    assert calls == asked


def test_copies_are_known_by_the_id_of_their_topic(jobs: Queue) -> None:
    state = jobs._state
    assert dead_letter._already_copied(state, [1, 2]) == set()
    state.copied_dead_letters = {1: 77, 3: 77}
    assert dead_letter._already_copied(state, [1, 2]) == set()
    assert state.copied_dead_letters == {}, "there is no such topic"
    topic_id = _engine(jobs).topic("dead").id
    state.copied_dead_letters = {1: topic_id, 2: topic_id + 1, 3: topic_id}
    assert dead_letter._already_copied(state, [1, 2]) == {1}
    assert len(state.copied_dead_letters) == 3


def _engine(jobs: Queue) -> Any:
    return jobs._topic_state.context.topics


# All chunks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "asked", "moved", "error"),
    [
        ([([1, 2], None), ([3], None), ([4], None)], 3, [1, 2, 3, 4], None),
        ([([1], REFUSED), ([3], None), ([], UNAVAILABLE)], 3, [1, 3], UNAVAILABLE),
        ([([1], REFUSED), ([3], None), ([4], None)], 3, [1, 3, 4], REFUSED),
        ([([1], None), ([3], DAMAGED), ([4], None)], 2, [1, 3], DAMAGED),
        ([([], REFUSED), ([], REFUSED), ([], REFUSED)], 3, [], REFUSED),
    ],
)
def test_moved_jobs_are_deleted_and_the_others_are_claimable(
    monkeypatch: pytest.MonkeyPatch, jobs: Queue, outcomes: list[Any], asked: int, moved: list[int], error: Error | None
) -> None:
    state, calls = jobs._state, []
    left: Iterator[Any] = iter(outcomes)

    def move_chunk(_: object, chunk: Any) -> Any:
        calls.append(chunk)
        return next(left)

    monkeypatch.setattr(dead_letter, "_move_chunk", move_chunk)
    chunks: list[Any] = [chunk_of(1, 2), chunk_of(3), chunk_of(4)]
    dead_letter.move_to_dead_letter(state, range(1, 5), chunks)
    assert calls == chunks[:asked]
    assert jobs.dead_letter_error is error
    assert sorted(set(range(1, 11)) - set(moved)) == [record.seq for record in jobs.topic.read().records]
    assert sorted(state.leases.pending) == [5, 6, 7, 8, 9, 10], "of another round"
    assert sorted(state.leases._claimable) == [seq for seq in range(1, 5) if seq not in moved]
    assert jobs.counts() == (4 - len(moved), 0, len(moved))


def test_jobs_whose_delete_fails_are_claimable_and_the_error_is_kept(
    monkeypatch: pytest.MonkeyPatch, jobs: Queue
) -> None:
    def fail(*_: object) -> Any:
        raise UNAVAILABLE

    monkeypatch.setattr(dead_letter, "_move_chunk", lambda *_: ([1, 2], None))
    monkeypatch.setattr(dead_letter, "_delete_moved", fail)
    dead_letter.move_to_dead_letter(jobs._state, [1, 2], [chunk_of(1, 2)])
    assert jobs.dead_letter_error is UNAVAILABLE
    assert sorted(jobs._state.leases._claimable) == [1, 2]


def test_each_cause_is_logged_once_in_a_row(jobs: Queue, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tidelog.queues"):
        for failure, count in ((REFUSED, 1), (Refused("full"), 1), (UNAVAILABLE, 2), (None, 2), (REFUSED, 3)):
            dead_letter._report_failure(jobs._state, failure)
            assert jobs.dead_letter_error is failure
            assert len(caplog.records) == count


def test_a_delete_that_fails_counts_nothing(jobs: Queue) -> None:
    state = jobs._state
    state.staged_dead_letters, state.leases.dead_lettered = 7, 3
    state.copied_dead_letters = {1: 5}
    body: Any = None
    dead_letter._on_moved_deleted(state, [1], body, REFUSED)
    assert (state.staged_dead_letters, state.leases.dead_lettered, state.copied_dead_letters) == (3, 3, {1: 5})
    assert 1 in state.leases.pending


@pytest.mark.parametrize(("staged", "after"), [(7, 7), (4, 5), (5, 5)])
def test_a_delete_that_succeeds_counts_its_jobs(jobs: Queue, staged: int, after: int) -> None:
    state = jobs._state
    state.topic.is_dropped = True  # nothing is left to delete
    state.staged_dead_letters, state.leases.dead_lettered = staged, 3
    state.copied_dead_letters = {1: 5, 2: 5, 3: 5}
    state.leases.deliveries = {1: 4}
    state.leases.pending.pop(2)
    body: Any = None
    dead_letter._on_moved_deleted(state, [1, 2], body, None)
    assert (state.staged_dead_letters, state.leases.dead_lettered) == (after, 5)
    assert state.copied_dead_letters == {3: 5}
    step = state.history._steps[-1]
    assert (step.event, step.seqs, step.deliveries) == ("dead_lettered", [1], [4])
    assert (sorted(state.leases.pending), state.leases.deliveries) == (list(range(3, 11)), {})


# Limits ---------------------------------------------------------------------------------------------------


def kill_all(jobs: Queue) -> None:
    jobs.nack("w", jobs.claim("w", 100))
    assert jobs.claim("w", 100) == []


def test_a_record_of_the_maximum_size_can_become_a_dead_letter() -> None:
    harness = EngineHarness(record_bytes_max=64, meta_bytes_max=64)
    jobs = queue(harness)
    jobs.put("x" * 62)
    kill_all(jobs)
    assert harness.log.topic("dead").read().records[0].data == "x" * 62
    assert jobs.dead_letter_error is None


def test_more_jobs_than_a_batch_may_have_move_at_once() -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    jobs.put(list(range(5)))
    context = jobs._topic_state.context
    context.limits = replace(context.limits, batch_records_max=2)
    kill_all(jobs)
    assert jobs.dead_letter_error is None
    assert [record.data for record in harness.log.topic("dead").read().records] == list(range(5))


def dropped_while_written(monkeypatch: pytest.MonkeyPatch, topic: Topic) -> None:
    """Let a caller drop the topic between a write to it and its acknowledgement."""
    real = append.submit_write

    def submit(state: Any, *args: Any, **more: Any) -> Any:
        future = real(state, *args, **more)
        if state is topic._state:
            state.is_dropped = True
        return future

    monkeypatch.setattr(append, "submit_write", submit)


def test_a_dead_letter_topic_that_a_caller_drops_refuses_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = EngineHarness()
    jobs, dead = queue(harness), harness.log.topic("dead")
    jobs.put("x")
    jobs.nack("w", jobs.claim("w"))
    dropped_while_written(monkeypatch, dead)
    assert jobs.claim("w") == []
    assert isinstance(jobs.dead_letter_error, TopicNotFound)
    assert jobs._state.copied_dead_letters == {}


# Redrive --------------------------------------------------------------------------------------------------


def dead_topic(harness: EngineHarness, count: int, **config: Any) -> Any:
    dead = harness.log.topic("dead", **config)
    dead.append(list(range(count)), meta={"$dead_letter_from": "jobs"})
    return dead


@pytest.mark.parametrize(
    ("rate", "batches"),
    [(None, [3, 3, 1]), (100.0, [3, 3, 1]), (2.9, [2, 2, 2, 1]), (1, [1] * 7), (0.5, [1] * 7)],
)
def test_a_redrive_moves_in_batches(monkeypatch: pytest.MonkeyPatch, rate: float | None, batches: list[int]) -> None:
    monkeypatch.setattr(dead_letter, "_REDRIVE_BATCH_RECORDS", 3)
    harness = EngineHarness()
    queue(harness)
    dead = dead_topic(harness, 7)
    waited: list[int] = []
    moved: list[int] = []
    move_back = dead_letter._move_back
    monkeypatch.setattr(_RateLimiter, "wait", lambda _, count: waited.append(count))

    def recording(topic: Any, target: Any, selected: Any, positions: list[int]) -> None:
        moved.append(len(positions))
        move_back(topic, target, selected, positions)

    monkeypatch.setattr(dead_letter, "_move_back", recording)
    assert dead.redrive(rate=rate) == RedriveResult(7, {"jobs": 7}, 0)
    assert moved == batches
    assert waited == ([] if rate is None else batches)


@pytest.mark.parametrize(
    ("limit", "moved"), [(0, []), (1, [0]), (4, [0, 1, 2, 3]), (7, list(range(7))), (8, list(range(7)))]
)
def test_a_limit_counts_over_all_batches(monkeypatch: pytest.MonkeyPatch, limit: int, moved: list[int]) -> None:
    monkeypatch.setattr(dead_letter, "_REDRIVE_BATCH_RECORDS", 3)
    harness = EngineHarness()
    jobs, dead = queue(harness), dead_topic(harness, 7)
    assert dead.redrive(limit=limit).count == len(moved)
    assert [job.data for job in jobs.claim("w", 10)] == moved
    assert [record.data for record in dead.read().records] == [n for n in range(7) if n not in moved]


def test_invalid_limits_and_rates_are_refused() -> None:
    harness = EngineHarness()
    queue(harness)
    dead = dead_topic(harness, 1)
    for arguments in ({"limit": -1}, {"limit": 1.5}, {"rate": -1}, {"rate": 0}, {"rate": float("nan")}):
        with pytest.raises(BadInput):
            dead.redrive(**arguments)
    assert dead.count == 1


@pytest.mark.parametrize(
    ("match", "moved"), [(None, [0, 1, 2, 3]), ("a", [0]), ("ab", [1]), ("a*", [0, 1]), ("*", [0, 1, 2]), ("c", [])]
)
def test_a_redrive_selects_by_tag(match: str | None, moved: list[int]) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    dead = harness.log.topic("dead")
    dead.append(list(range(4)), tag=["a", "ab", "b", None], meta={"$dead_letter_from": "jobs"})
    assert dead.redrive(match=match).count == len(moved)
    assert [job.data for job in jobs.claim("w", 10)] == moved


def test_records_without_a_queue_and_leased_ones_are_skipped() -> None:
    harness = EngineHarness()
    jobs, other, dead = queue(harness), queue(harness, "other"), harness.log.queue("dead", lease_ms=1_000)
    harness.log.topic("log")
    sources: list[Any] = ["jobs", "log", "dead", "never", 7, None, "other", "jobs", "jobs"]
    dead.put(list(range(9)), meta=[{} if name is None else {"$dead_letter_from": name} for name in sources])
    dead.claim("v", 1)
    dead._state.leases.reserve_dead([8])
    assert dead.redrive() == RedriveResult(2, {"other": 1, "jobs": 1}, 7)
    assert ([job.data for job in jobs.claim("w", 9)], [job.data for job in other.claim("w", 9)]) == ([8], [6])
    harness.clock.tick(1_001)
    assert dead.redrive(to="jobs") == RedriveResult(6, {"jobs": 6}, 1), "the lease has ended, one is still pending"
    assert dead.topic.count == 1


def test_redriven_jobs_keep_their_fields() -> None:
    harness = EngineHarness()
    jobs, dead = queue(harness), harness.log.topic("dead")
    marks = dict.fromkeys(dead_letter.DEAD_LETTER_META_KEYS, "jobs")
    dead.append([b"\x00", {"n": 1}], tag=["t", None], node=[None, "origin"], meta=[marks, {**marks, "k": 1}])
    assert dead.redrive() == RedriveResult(2, {"jobs": 2}, 0)
    assert [(each.data, each.tag, each.node, each.meta) for each in jobs.topic.read().records] == [
        (b"\x00", "t", None, None),
        ({"n": 1}, None, "origin", {"k": 1}),
    ]
    step = jobs._state.history._steps
    assert [list(each.seqs or ()) for each in step if each.event == "redriven"] == [[1, 2]]


def test_a_queue_that_is_dropped_during_a_redrive_takes_no_job_along(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = EngineHarness()
    jobs, dead = queue(harness), dead_topic(harness, 1)
    dropped_while_written(monkeypatch, jobs.topic)
    with pytest.raises(TopicNotFound):
        dead.redrive()
    assert dead.count == 1


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
def test_redriven_jobs_are_synced_unless_the_dead_letters_are_ephemeral(
    monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    harness = EngineHarness()
    queue(harness, durability="disk")
    dead = dead_topic(harness, 1, durability=durability)
    synced: list[bool] = []
    append = dead_letter._append_redriven

    def recording(target: Any, batch: Any, *, durable: bool, copy: Any) -> None:
        synced.append(durable)
        append(target, batch, durable=durable, copy=copy)

    monkeypatch.setattr(dead_letter, "_append_redriven", recording)
    dead.redrive()
    assert synced == [durability == "disk"]


def test_a_rate_limiter_spaces_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are those of the clock; a pause never exceeds the polling interval."""
    clock, pauses = ManualClock(), list[float]()
    limiter = _RateLimiter(clock, 4)

    class Pause:
        def wait(self, seconds: float) -> None:
            pauses.append(seconds)
            clock.tick(20)

    monkeypatch.setattr(dead_letter, "Event", Pause)
    limiter.wait(1)
    assert pauses == [], "the first jobs are moved at once"
    limiter.wait(2)
    assert pauses == [0.05] * 10 + [0.05, 0.03, 0.01]
    pauses.clear()
    clock.tick(5_000)
    limiter.wait(1)
    assert pauses == []
    limiter.wait(1)
    assert len(pauses) == 13, "time without jobs is not saved up"
