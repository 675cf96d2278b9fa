"""Dropping topics and making them again: the contract's sections 2.4, 3.1, 3.4, and G83, G85, G86."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, RESTARTS, TINY, EngineHarness, Restart, datas, read_topic

from tidelog.engine import Gap, Topic
from tidelog.errors import DiskFull, NotEmpty, TopicNotFound, WriteFailed

USES: dict[str, Callable[[Topic], object]] = {
    "append": lambda topic: topic.append(1),
    "append_nowait": lambda topic: topic.append_nowait(1),
    "read": lambda topic: topic.read(),
    "follow": lambda topic: list(topic.follow(timeout=0.0)),
    "delete": lambda topic: topic.delete(before_seq=5),
    "to_arrow": lambda topic: topic.to_arrow(),
    "seal": lambda topic: topic.seal(),
}


@pytest.mark.parametrize("durability", CLASSES)
def test_a_drop_takes_the_topic_and_all_its_records(durability: str) -> None:
    """Contract 2.4."""
    log = EngineHarness().log
    topic = log.topic("a", durability=durability)
    topic.append([1, 2])
    log.topic("b").append(3)
    assert log.drop("a")
    assert not log.drop("a")
    assert not log.drop("never")
    assert [state.topic for state in log.topics()] == ["b"]
    with pytest.raises(TopicNotFound):
        log.topic("a", create=False)


@pytest.mark.parametrize("use", USES)
def test_a_handle_of_a_dropped_topic_raises(use: str) -> None:
    """Also where there is another one of its name by now."""
    log = EngineHarness().log
    topic = log.topic("a")
    topic.append(1)
    log.drop("a")
    with pytest.raises(TopicNotFound):
        USES[use](topic)
    again = log.topic("a")
    with pytest.raises(TopicNotFound):
        USES[use](topic)
    assert again.head_seq == 0


def test_only_an_empty_topic_is_dropped_where_that_is_asked_for() -> None:
    """Contract 2.4: live records count; nothing is removed otherwise."""
    world = EngineHarness()
    topic = world.log.topic("a", ttl_ms=10)
    topic.append([1, 2])
    before = world.disk.digest()
    with pytest.raises(NotEmpty) as refused:
        world.log.drop("a", if_empty=True)
    assert refused.value.count == 2
    assert world.disk.digest() == before
    assert datas(topic) == [1, 2]
    topic.delete(before_seq=9)
    assert world.log.drop("a", if_empty=True)
    world.log.topic("a", ttl_ms=10).append(1)
    world.clock.tick(11)
    assert world.log.drop("a", if_empty=True), "expired"
    assert not world.log.drop("a", if_empty=True)


@pytest.mark.parametrize("restart", [None, *RESTARTS])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_topic_made_again_starts_anew(restart: Restart | None, checkpointed: bool) -> None:
    """G86, contract 2.4, 3.1: a new id and epoch, seq 1, the default config, nothing of the old one."""
    world = EngineHarness(**TINY)
    first = world.log.topic("a", durability="fsync", cap_records=5)
    first.append(list(range(20)), tag="old")
    if checkpointed:
        world.log.checkpoint()
    world.log.drop("a")
    second = world.log.topic("a", durability="fsync")
    assert (second.id, second.epoch) != (first.id, first.epoch)
    assert second.config.cap_records == 0
    assert second.append(["new", "newer"], tag="new").first_seq == 1
    if checkpointed:
        world.log.checkpoint()
    topic = second if restart is None else world.restart(restart).topic("a")
    found = read_topic(topic)
    assert (found.datas, found.head_seq, found.gap) == (["new", "newer"], 2, None)
    assert topic.id == second.id
    assert topic.delete(match="old").deleted == 0


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_cursor_of_the_old_topic_gets_a_gap_where_it_can_be_detected(restart: Restart | None) -> None:
    """Contract 3.4: while it exceeds the new head."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync").append([1, 2, 3, 4, 5])
    world.log.drop("a")
    topic = world.log.topic("a", durability="fsync")
    if restart is not None:
        topic = world.restart(restart).topic("a")
    assert topic.read(5).gap == Gap(1, 0, "recreated", 1, 1, 0)
    topic.append(["x", "y", "z"])
    page = topic.read(5)
    assert page.gap == Gap(1, 3, "recreated", 3, 1, 3)
    assert [record.data for record in page.records] == ["x", "y", "z"]
    assert page.next_from_seq == 3
    assert topic.read(3).gap is None


@pytest.mark.parametrize("restart", RESTARTS)
def test_ids_are_never_given_again(restart: Restart) -> None:
    """G86: neither after a checkpoint that has forgotten the topic nor after a restart."""
    world = EngineHarness(**TINY)
    seen = set()
    for number in range(6):
        topic = world.log.topic("a", durability="fsync")
        assert topic.id not in seen
        seen.add(topic.id)
        topic.append(number)
        world.log.drop("a")
        if number % 2:
            world.log.checkpoint()
            world.log.checkpoint()
        world.restart(restart)
    assert world.log.topics() == []


@pytest.mark.parametrize("shards", [1, 3])
def test_old_frames_never_enter_the_new_topic(shards: int) -> None:
    """G86. Method: a name dropped and made again many times, all of it only in the WAL, then every image."""
    world = EngineHarness(**TINY | {"wal_shards": shards, "wal_file_bytes": 1 << 14})
    for number in range(8):
        topic = world.log.topic("a", durability="fsync")
        topic.append([f"{number} {position}" for position in range(number + 1)], tag="t")
        topic.delete(seqs=[1])
        if number < 7:
            world.log.drop("a")
    expected = [f"7 {position}" for position in range(1, 8)]
    for image in world.disk.images():
        log = world.open(image.disk)
        assert datas(log.topic("a")) == expected, image.label
        assert len(log.topics()) == 1
    assert datas(world.restart("kill").topic("a")) == expected


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_files_of_a_dropped_topic_go(checkpointed: bool) -> None:
    """G83, G85: in the background, and where that fails, at the next start."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(20)))
    if checkpointed:
        world.log.checkpoint()
        assert world.files(under="topics")
        world.disk.fail("remove", times=2)
    world.log.drop("a")
    with suppress(WriteFailed):
        world.log.tick()
    assert not [path for path in world.files(under="topics") if ".deleted" not in path]
    log = world.restart("crash")
    assert (log.topics(), world.files(under="topics")) == ([], [])


def test_no_power_cut_brings_a_dropped_topic_back() -> None:
    """G85. Method: the power fails before each operation of a drop and after the last; from the return on it is gone,
    before it there is all of it or nothing."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(9)))
    world.log.checkpoint()
    topic.append("tail")
    found: list[list[Any] | None] = []

    def look(_: int) -> None:
        for image in world.disk.images(limit=12):
            log = world.open(image.disk)
            found.append(datas(log.topic("a")) if log.topics() else None)

    world.disk.on_op = look
    world.log.drop("a")
    world.disk.on_op = None
    assert {str(state) for state in found} == {str([*range(9), "tail"]), "None"}
    for image in world.disk.images():
        assert world.open(image.disk).topics() == [], image.label


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_drop_that_failed_removed_nothing(restart: Restart | None) -> None:
    """Contract 2.4: durable before the ack."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(9)))
    world.log.checkpoint()
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        world.log.drop("a")
    before = read_topic(topic)
    assert before.datas == list(range(9))
    if restart is not None:
        topic = world.restart(restart).topic("a", create=False)
    assert read_topic(topic) == before
    assert world.log.drop("a")


def test_the_keys_of_a_dropped_topic_are_forgotten() -> None:
    """Contract 1.11: dropped with the topic."""
    log = EngineHarness().log
    log.topic("a").append(1, key="k")
    log.drop("a")
    assert not log.topic("a").append(2, key="k").deduped


def test_a_drop_does_not_disturb_its_neighbours() -> None:
    world = EngineHarness(**TINY)
    topics = [world.log.topic(f"t{number}", durability="fsync") for number in range(6)]
    for topic in topics:
        topic.append([topic.name] * 7)
    world.log.checkpoint()
    for number in (0, 3, 5):
        world.log.drop(f"t{number}")
    for topic in topics:
        if topic.name in ("t1", "t2", "t4"):
            topic.append([topic.name])
    log = world.restart("crash")
    assert {state.topic: datas(log.topic(state.topic)) for state in log.topics()} == {
        name: [name] * 8 for name in ("t1", "t2", "t4")
    }
