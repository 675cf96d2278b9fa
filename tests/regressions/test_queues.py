"""Bugs of queues, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
from tests.unit.engine.harness import TIMEOUT_S, TINY, EngineHarness, running

import tidelog
from tidelog.engine import Queue, append
from tidelog.engine.config import Durability
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.topic import topic_operations
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Error
from tidelog.wal import shard_for_topic


def place(world: EngineHarness, queue: str, dead: str) -> Queue:
    """A queue and its dead-letter topic in different shards, and one durable job that was delivered too often."""
    jobs = world.log.queue("jobs", durability=queue, max_deliveries=1, dead_letter="dead")
    while shard_for_topic(world.log._next_id, 2) == shard_for_topic(jobs.topic.id, 2):
        world.log.topic(f"filler-{world.log._next_id}")
    world.log.topic("dead", durability=dead)
    jobs.put("job")
    jobs.nack("w", jobs.claim("w"))
    world.log.tick()
    return jobs


def where(log: Any) -> list[str]:
    return [name for name in ("jobs", "dead") if log.topic(name, create=False).count]


@pytest.mark.parametrize("queue", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("dead", ["fsync", "disk", "memory"])
def test_a_dead_letter_is_durable_before_its_job_is_deleted(queue: str, dead: str) -> None:
    world = EngineHarness(wal_shards=2)
    jobs = place(world, queue, dead)
    assert jobs.claim("w") == []
    assert where(world.crash("none")), "the job is in one of the two topics"
    topic_operations(jobs.topic).shard.sync()
    assert where(world.crash("none")) == ["dead"], "also when the delete is durable"


@pytest.mark.parametrize("queue", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("dead", ["fsync", "disk", "memory"])
def test_a_redriven_job_is_durable_before_its_dead_letter_is_deleted(queue: str, dead: str) -> None:
    world = EngineHarness(wal_shards=2)
    jobs = place(world, queue, dead)
    jobs.claim("w")
    world.log.tick()
    letters = world.log.topic("dead")
    letters.redrive()
    assert where(world.crash("none")), "the job is in one of the two topics"
    topic_operations(letters).shard.sync()
    assert where(world.crash("none")) == ["jobs"], "also when the delete is durable"


def test_a_job_is_not_moved_to_a_topic_that_forgets_it() -> None:
    world = EngineHarness(wal_shards=2)
    jobs = place(world, "disk", "ephemeral")
    assert jobs.claim("w") == []
    assert where(world.log) == ["jobs"]
    assert isinstance(jobs.dead_letter_error, BadInput)
    world.log.topic("dead", durability="disk")
    assert jobs.claim("w") == []
    assert where(world.log) == ["dead"]
    assert jobs.dead_letter_error is None


def test_a_dead_letter_topic_that_is_dropped_meanwhile_does_not_take_the_job_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Method: the topic is dropped between the copy and the delete, once."""
    world = EngineHarness(wal_shards=2)
    jobs = place(world, "fsync", "disk")
    stage, drops = append.submit_write, [True]

    def staged(topic: TopicState, *args: Any, **more: Any) -> Any:
        token = stage(topic, *args, **more)
        if topic.name == "dead" and drops:
            drops.clear()
            token.wait()
            world.log.drop("dead")
        return token

    monkeypatch.setattr(append, "submit_write", staged)
    assert jobs.claim("w") == []
    assert (world.log.find("dead"), jobs.topic.count) == (None, 1), "the letter went with its topic, the job did not"
    jobs.claim("w")
    assert where(world.log) == ["dead"], "made again, with the job"


def test_a_job_whose_delete_fails_is_copied_once() -> None:
    world = EngineHarness(wal_shards=2)
    jobs = place(world, "fsync", "disk")
    shard = f"shard-{shard_for_topic(jobs.topic.id, 2):02d}"
    world.disk.fail("write", path=shard, error=28)  # no room for the delete
    assert jobs.claim("w") == []
    assert isinstance(jobs.dead_letter_error, Error)
    assert where(world.log) == ["jobs", "dead"]
    assert jobs.claim("w") == []
    assert where(world.log) == ["dead"]
    assert world.log.topic("dead").count == 1, "the copy that was durable is used"
    assert jobs.counts() == (0, 0, 1)


def test_a_copied_job_that_a_caller_deletes_is_remembered_no_longer() -> None:
    """Else every such job would take memory for as long as the queue is open."""
    world = EngineHarness(wal_shards=2)
    jobs = place(world, "fsync", "disk")
    world.disk.fail("write", path=f"shard-{shard_for_topic(jobs.topic.id, 2):02d}", error=28)  # no room for the delete
    assert jobs.claim("w") == []
    copied = [dict(jobs._state.copied_dead_letters)]
    jobs.topic.delete(seqs=[1])
    assert jobs.claim("w") == []
    copied.append(dict(jobs._state.copied_dead_letters))
    assert copied == [{1: world.log.topic("dead").id}, {}]


# History --------------------------------------------------------------------------------------------------------


def events(jobs: Queue) -> list[str]:
    return [step["event"] for step in jobs.history().read(0, 1_000)]


def test_a_history_shows_every_step_of_a_call_that_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: another thread, as a tick does, has taken the notes and not appended them when the history is read."""
    world = EngineHarness()
    jobs = world.log.queue("jobs")
    jobs.put("x")
    jobs.ack("w", jobs.claim("w"))
    taken, go, stage = Event(), Event(), append.submit_write

    def late(topic: TopicState, *args: Any, **more: Any) -> Any:
        if topic.name.startswith("_tidelog.history") and not taken.is_set():
            taken.set()
            assert go.wait(TIMEOUT_S)
        return stage(topic, *args, **more)

    monkeypatch.setattr(append, "submit_write", late)
    found: list[list[str]] = []

    def read() -> None:
        assert taken.wait(TIMEOUT_S)
        reader = Thread(target=lambda: found.append(events(jobs)))
        reader.start()
        reader.join(0.05)  # it is back by now, with nothing, or waits for the other thread
        go.set()
        reader.join(TIMEOUT_S)

    with running(world.log.tick, read):
        pass
    assert found == [["enqueued", "claimed", "acked"]]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
def test_a_clean_close_keeps_every_step(durability: Durability, shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    jobs = world.log.queue("jobs", durability=durability)
    jobs.put(["a", "b"])
    world.log.topic("also", type="queue", durability=durability).append("put as into any topic")
    world.restart("reopen")
    jobs = world.log.queue("jobs")
    assert jobs.history().read() == [
        {"at": 1, "ts_ms": jobs.topic.read().records[0].ts_ms, "event": "enqueued", "seq": 1, "last_seq": 2}
    ]
    assert events(world.log.queue("also")) == ["enqueued"]
    jobs.put("c")
    world.restart("reopen")
    assert events(world.log.queue("jobs")) == ["enqueued", "restarted", "enqueued"]


def test_steps_of_what_is_committed_by_the_close_are_kept() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs", durability="fsync")
    jobs.put("x")
    job = jobs.claim("w")[0]
    operations_of(jobs).submit_ack("w", [job.seq])
    world.restart("reopen")
    assert events(world.log.queue("jobs")) == ["enqueued", "claimed", "acked"]


def test_a_put_is_in_the_history_after_a_tick_and_a_kill() -> None:
    world = EngineHarness()
    world.log.queue("jobs").put("x")
    world.log.tick()
    world.restart("kill")
    assert events(world.log.queue("jobs")) == ["enqueued"]


def test_steps_that_cannot_be_written_are_kept_for_the_next_tick() -> None:
    world = EngineHarness(wal_shards=2)
    jobs = world.log.queue("jobs")
    jobs.put("x")
    world.log.tick()
    jobs.claim("w")
    world.disk.fail("write", error=28)
    world.log.tick()
    assert events(jobs) == ["enqueued", "claimed"]


def test_an_image_of_a_crash_has_a_prefix_of_the_history() -> None:
    """Method: before every disk operation, what a power cut could leave: rows are a prefix, none is invented."""
    world = EngineHarness(wal_shards=2, **TINY)
    jobs = world.log.queue("jobs", durability="fsync")
    told = ["enqueued", "claimed", "acked"] * 3
    wrong: list[str] = []

    def look(op: int) -> None:
        for image in world.disk.images(random=Random(op), limit=4):
            log = world.open(image.disk)
            if (topic := log.find("_tidelog.history.jobs")) is not None:
                found = [record.data["event"] for record in topic.read(0, 100).records]
                wrong.extend([] if found == told[: len(found)] else [f"before op {op}, {image.label}: {found}"])

    world.disk.on_op = look
    for number in range(3):
        jobs.put("x")
        jobs.ack("w", jobs.claim("w"))
        world.log.tick()
        if number == 1:
            world.log.checkpoint()
    assert not wrong, wrong[0]
    assert events(jobs) == told


def test_history_is_complete_right_after_an_ack(tmp_path: Path) -> None:
    """While the background thread writes steps as fast as it can: a read must wait for what the thread has taken."""
    with tidelog.open(str(tmp_path), sync_interval_ms=1, wal_file_bytes=1 << 16) as log:
        queue = log.queue("q")
        for number in range(250):
            queue.put({"n": number})
            queue.ack("w", queue.claim("w"))
            events = [step["event"] for step in queue.history().read(0, 10_000) if step.get("seq") == number + 1]
            assert events == ["enqueued", "claimed", "acked"]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_history_has_a_job_that_was_put_before_a_close(tmp_path: Path, durability: Durability) -> None:
    with tidelog.open(str(tmp_path), wal_file_bytes=1 << 16) as log:
        log.queue("q", durability=durability).put(1)
    for _ in range(2):
        with tidelog.open(str(tmp_path), wal_file_bytes=1 << 16) as log:
            assert [(step["event"], step["seq"]) for step in log.queue("q").history().read()] == [("enqueued", 1)]
