"""Bugs of queues, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engine.world import World

from tidelog.engine import Queue, Topic
from tidelog.errors import BadInput, Error
from tidelog.wal import shard_of


def place(world: World, queue: str, dead: str) -> Queue:
    """A queue and its dead-letter topic in different shards, and one durable job that was delivered too often."""
    jobs = world.log.queue("jobs", durability=queue, max_deliveries=1, dead_letter="dead")
    while shard_of(world.log._next_id, 2) == shard_of(jobs.topic.id, 2):
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
    world = World(wal_shards=2)
    jobs = place(world, queue, dead)
    assert jobs.claim("w") == []
    assert where(world.crash("none")), "the job is in one of the two topics"
    jobs.topic.shard.sync()
    assert where(world.crash("none")) == ["dead"], "also when the delete is durable"


@pytest.mark.parametrize("queue", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("dead", ["fsync", "disk", "memory"])
def test_a_redriven_job_is_durable_before_its_dead_letter_is_deleted(queue: str, dead: str) -> None:
    world = World(wal_shards=2)
    jobs = place(world, queue, dead)
    jobs.claim("w")
    world.log.tick()
    letters = world.log.topic("dead")
    letters.redrive()
    assert where(world.crash("none")), "the job is in one of the two topics"
    letters.shard.sync()
    assert where(world.crash("none")) == ["jobs"], "also when the delete is durable"


def test_a_job_is_not_moved_to_a_topic_that_forgets_it() -> None:
    world = World(wal_shards=2)
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
    world = World(wal_shards=2)
    jobs = place(world, "fsync", "disk")
    stage, drops = Topic.stage, [True]

    def staged(self: Topic, *args: Any, **more: Any) -> Any:
        token = stage(self, *args, **more)
        if self.name == "dead" and drops:
            drops.clear()
            token.wait()
            world.log.drop("dead")
        return token

    monkeypatch.setattr(Topic, "stage", staged)
    assert jobs.claim("w") == []
    assert (world.log.find("dead"), jobs.topic.count) == (None, 1), "the letter went with its topic, the job did not"
    jobs.claim("w")
    assert where(world.log) == ["dead"], "made again, with the job"


def test_a_job_whose_delete_fails_is_copied_once() -> None:
    world = World(wal_shards=2)
    jobs = place(world, "fsync", "disk")
    shard = f"shard-{shard_of(jobs.topic.id, 2):02d}"
    world.disk.fail("write", path=shard, error=28)  # no room for the delete
    assert jobs.claim("w") == []
    assert isinstance(jobs.dead_letter_error, Error)
    assert where(world.log) == ["jobs", "dead"]
    assert jobs.claim("w") == []
    assert where(world.log) == ["dead"]
    assert world.log.topic("dead").count == 1, "the copy that was durable is used"
    assert jobs.counts() == (0, 0, 1)
