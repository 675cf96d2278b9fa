"""Creating topics: many at a time share a commit, and each is on disk when its call returns."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from tests.unit.engine.harness import TINY, EngineHarness

from tidelog.engine import Engine, TopicConfig
from tidelog.engine.batch_encoder import Batch
from tidelog.errors import BadInput, Error, Latched, Throttled

FIRST = Batch([b"1"], True)


def syncs(world: EngineHarness) -> int:
    return sum(line.startswith("sync ") and "/wal-" in line for line in world.disk.trace)


@pytest.mark.parametrize("shards", [1, 3])
def test_topics_that_are_created_together_share_a_sync(shards: int) -> None:
    world = EngineHarness(**TINY, wal_shards=shards)
    before = syncs(world)
    begun = [world.log.begin_create(f"t{number}", TopicConfig(), FIRST) for number in range(50)]
    assert world.log.names() == [], "none of them exists before its commit"
    for creation in begun:
        assert creation is not None
        topic, future, created = creation
        assert created
        assert future is not None
        future.wait()
        assert world.log.find(topic.name) is not None
    assert syncs(world) - before <= shards
    assert len(world.crash("none").names()) == 50


def test_the_first_write_may_follow_in_the_same_commit() -> None:
    world = EngineHarness(**TINY)
    begun = world.log.begin_create("a", TopicConfig(durability="fsync"), FIRST)
    assert begun is not None
    before = syncs(world)
    world.log.begin_create("b", TopicConfig(), FIRST)
    assert world.log.topic("a").append([1, 2]).last_seq == 2
    assert syncs(world) - before == 2, "both topics, then the write"
    log = world.crash("none")
    assert (log.names(), log.topic("a").head_seq) == (["a", "b"], 2)


def test_a_topic_that_is_being_created_is_joined() -> None:
    world = EngineHarness(**TINY)
    first = world.log.begin_create("a", TopicConfig(), FIRST)
    again = world.log.begin_create("a", TopicConfig(), FIRST)
    assert first is not None
    assert again is not None
    assert (again[0], again[1], again[2]) == (first[0], first[1], False)
    assert world.log.topic("a", cap_records=7).config.cap_records == 7, "it is configured once it exists"
    assert world.log.configure("a", {})[1] is False
    assert world.log.begin_create("a", TopicConfig(), FIRST) == (first[0], None, False)


def test_what_cannot_be_created_is_refused_and_leaves_nothing() -> None:
    world = EngineHarness(**TINY, topics_max=2)
    world.log.begin_create("a", TopicConfig(), FIRST)
    world.log.begin_create("b", TopicConfig(), FIRST)
    with pytest.raises(Throttled):
        world.log.begin_create("c", TopicConfig(), FIRST)
    for name in ("", "_tidelog.x", "a b"):
        with pytest.raises(BadInput):
            world.log.topic(name)
    assert set(world.log._creations) == {"a", "b"}
    world.log.close()
    assert world.open(world.disk.reboot()).names() == ["a", "b"]


def test_a_busy_registry_is_not_waited_for() -> None:
    world = EngineHarness(**TINY)
    with world.log._registry_lock:
        assert world.log.begin_create("a", TopicConfig(), FIRST, wait_for_lock=False) is None


def test_creations_of_a_failed_sync_all_fail_and_keep_their_ids() -> None:
    world = EngineHarness(**TINY)
    begun = [world.log.begin_create(name, TopicConfig(), FIRST) for name in "abc"]
    world.disk.fail("sync", times=1)
    for creation in begun:
        assert creation is not None
        assert creation[1] is not None
        with pytest.raises(Latched):
            creation[1].wait()
    assert world.log.names() == []
    assert {name: topic.id for name, topic in world.log._uncertain_topics.items()} == {"a": 1, "b": 2, "c": 3}
    assert not world.log._creations


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_beside_a_creation_loses_none(when: str) -> None:
    """Whether its commit is before the positions of the checkpoint, or after them and before its end."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync").append(1)
    begun = world.log.begin_create("b", TopicConfig(durability="fsync"), FIRST)
    later = world.log.begin_create("c", TopicConfig(durability="fsync"), FIRST)
    assert begun is not None
    assert later is not None
    if when == "before":
        assert begun[1] is not None
        begun[1].wait()
    next_id = world.log._checkpoints._next_topic_id
    world.log._checkpoints._next_topic_id = lambda: min(next_id(), 2)  # as if they were still on their way
    world.log.checkpoint()
    world.log._checkpoints._next_topic_id = next_id
    world.log.topic("b").append([1, 2])
    restarts: list[Callable[[], Engine]] = [
        lambda: world.crash("none"),
        lambda: world.restart("kill"),
        lambda: world.restart("reopen"),
    ]
    for restart in restarts:
        log = restart()
        assert log.names() == ["a", "b", "c"]
        assert log.topic("b").head_seq == 2
        assert log.topic("new").id > 3, "no id is given twice"
        log.drop("new")


def test_threads_create_topics_at_the_same_time() -> None:
    world = EngineHarness(**TINY)
    failed: list[Any] = []

    def create(thread: int) -> None:
        try:
            for number in range(20):
                world.log.topic(f"shared{number}").append(thread)
                world.log.topic(f"own{thread}-{number}").append(thread)
        except Error as error:
            failed.append(error)

    threads = [Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(world.log.names()) == 20 + 4 * 20
    assert len({topic.id for topic in world.log._list_topics()}) == 100
    assert all(world.log.topic(f"shared{number}").count == 4 for number in range(20))
    assert len(world.restart("kill").names()) == 100
