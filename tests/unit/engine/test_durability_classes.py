"""What an ack means, class by class: the contract's section 4, and G1–G3, G8–G11, G18, G20, G85."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import (
    CLASSES,
    LOGGED,
    RESTARTS,
    TINY,
    EngineHarness,
    Restart,
    datas,
    read_topic,
    seqs,
)

from tidelog.engine import Topic
from tidelog.testing import ALL_POLICIES


def written(world: EngineHarness, durability: str, many: int = 9, name: str = "a") -> Topic:
    """Records of all kinds, one by one and in batches."""
    topic = world.log.topic(name, durability=durability)
    for number in range(1, many + 1, 3):
        topic.append({"n": number}, tag=f"t{number}", node="n", meta={"m": number})
        topic.append([b"%d" % (number + 1), "ä"], tag=["x", None])
        world.clock.tick(1)
    return topic


# What is there after a restart --------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_is_readable_when_its_append_returns(durability: str) -> None:
    """Contract 4: whatever the class."""
    topic = EngineHarness(**TINY).log.topic("a", durability=durability)
    for number in range(10):
        topic.append(number)
        assert datas(topic) == list(range(number + 1))


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_everything_acked_as_fsync_survives_as_it_was(restart: Restart, checkpointed: bool) -> None:
    """G1: seq, ts, node, tag, meta and data; head exact and no gaps."""
    world = EngineHarness(**TINY)
    topic = written(world, "fsync")
    if checkpointed:
        world.log.checkpoint()
        topic.append("after")
    before = read_topic(topic)
    for _ in range(3):
        assert read_topic(world.restart(restart).topic("a")) == before


def test_everything_acked_as_fsync_survives_every_image() -> None:
    """G1, G8. Method: every image of every policy at the end of a history with writes of other classes beside it."""
    world = EngineHarness(**TINY)
    topic = written(world, "fsync")
    written(world, "disk", name="b")
    written(world, "memory", name="c")
    topic.append("last")
    before = read_topic(topic)
    for image in world.disk.images(ALL_POLICIES, Random(1), limit=60):
        found = world.open(image.disk).topic("a")
        assert read_topic(found) == before, image.label
        assert found.append("next").first_seq == 11, image.label


@pytest.mark.parametrize("restart", ["reopen", "kill"])
def test_everything_acked_as_disk_survives_the_end_of_the_process(restart: Restart) -> None:
    """G2."""
    world = EngineHarness(**TINY)
    before = read_topic(written(world, "disk"))
    for _ in range(3):
        found = read_topic(world.restart(restart).topic("a"))
        assert (found.records, found.gap) == (before.records, None)
        assert restart == "kill" or found.head_seq == 9, "a clean close leaves no hole"


def test_of_what_was_acked_as_disk_a_power_cut_leaves_a_prefix() -> None:
    """G3, G8, G9. Method: every image of every policy; what is written then gets seqs that no caller ever got."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="disk")
    for number in range(1, 12):
        topic.append([number, number], tag=f"t{number}")
    before = read_topic(topic)
    lengths = set()
    for image in world.disk.images(ALL_POLICIES, Random(2), limit=80):
        log = world.open(image.disk)
        found = read_topic(log.topic("a"))
        assert found.records == before.records[: len(found.records)], image.label
        assert len(found.records) % 2 == 0, "a batch is whole or absent"
        assert found.gap is None
        assert log.topic("a").append("other").first_seq > 22, image.label
        lengths.add(len(found.records))
    assert min(lengths) < max(lengths) == 22, "the images differ, or this proves nothing"


@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("later", [("reopen",), ("reopen", "reopen"), ("kill", "reopen"), ("crash", "reopen", "crash")])
def test_a_seq_that_a_power_cut_took_stays_taken(many: int, later: tuple[Restart, ...]) -> None:
    """G9: also after a clean close after the crash, whether a segment was full or not."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="disk")
    topic.append([0] * many)
    acked = [topic.append("acked").last_seq for _ in range(3)][-1]
    world.restart("crash")
    assert seqs(world.log.topic("a")) == list(range(1, many + 1)), "the tail is lost, or this proves nothing"
    for restart in later:
        assert world.restart(restart).topic("a").head_seq >= acked
    assert world.log.topic("a").append("other").first_seq > acked


def test_what_a_disk_topic_wrote_is_safe_after_a_tick() -> None:
    """G18."""
    world = EngineHarness(**TINY)
    topic = written(world, "disk")
    before = read_topic(topic)
    assert read_topic(world.crash("none").topic("a")).records != before.records, "not synced yet"
    world.log.tick()
    assert read_topic(world.crash("none").topic("a")).records == before.records


@pytest.mark.parametrize("durability", LOGGED)
def test_everything_accepted_is_durable_when_close_returns(durability: str) -> None:
    """G20."""
    world = EngineHarness(**TINY)
    topic = written(world, durability)
    before = read_topic(topic)
    token = topic.append_nowait("no wait")
    world.log.close()
    assert token.done
    found = read_topic(world.crash("none").topic("a"))
    assert found.records[:-1] == before.records
    assert (found.datas[-1], found.head_seq) == ("no wait", 10)


def test_memory_promises_nothing_and_invents_nothing() -> None:
    """G10, contract 4: anything from none to all, in order, and no head ahead of what was acked."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="memory")
    for number in range(1, 12):
        topic.append([number, number])
    before = read_topic(topic)
    lengths = set()
    for image in world.disk.images(ALL_POLICIES, Random(3), limit=80):
        found = read_topic(world.open(image.disk).topic("a"))
        assert found.records == before.records[: len(found.records)], image.label
        assert found.head_seq <= 22
        lengths.add(len(found.records))
    assert min(lengths) == 0
    assert max(lengths) == 22
    assert read_topic(world.restart("reopen").topic("a")).records == before.records


# Ephemeral ----------------------------------------------------------------------------------------------


def test_an_ephemeral_record_is_never_in_a_file() -> None:
    """G11. Method: the disk is not touched by the write, and no byte of it is found after checkpoint and close."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="ephemeral")
    written(world, "fsync", name="b")
    before = world.disk.op_count
    topic.append([b"needle %d" % number for number in range(20)], tag="needle", node="needle", meta={"needle": 1})
    topic.delete(seqs=[3])
    topic.append(b"needle")
    assert world.disk.op_count == before
    world.log.checkpoint()
    topic.append(b"needle again")
    world.log.close()
    assert not [path for path, content in world.disk.tree().items() if b"needle" in content]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_ephemeral_topic_is_empty_after_a_clean_restart_and_goes_on_counting(checkpointed: bool) -> None:
    """G11, contract 4: records gone, config kept, head kept."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="ephemeral", cap_records=50)
    topic.append(list(range(7)))
    if checkpointed:
        world.log.checkpoint()
        topic.append(7)
    topic_id, head = topic.id, topic.head_seq
    topic = world.restart("reopen").topic("a")
    found = read_topic(topic)
    assert (found.records, found.gap, found.head_seq) == ([], None, head)
    assert (topic.id, topic.config.durability, topic.config.cap_records) == (topic_id, "ephemeral", 50)
    assert topic.append("next").first_seq == head + 1
    assert datas(topic) == ["next"]
    assert topic.read(head - 1).gap is None


@pytest.mark.parametrize("restart", ["kill", "crash"])
def test_an_ephemeral_topic_gives_no_seq_again_that_a_checkpoint_has_seen(restart: Restart) -> None:
    """G11."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="ephemeral")
    topic.append(list(range(7)))
    world.log.checkpoint()
    topic.append([7, 8])
    topic = world.restart(restart).topic("a")
    found = read_topic(topic)
    assert (found.records, found.head_seq) == ([], 7)
    assert topic.append("next").first_seq == 8


def test_evictions_of_an_ephemeral_topic_are_reported_until_it_ends() -> None:
    """Contract 3.4: a gap is a gap, also where nothing is kept."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="ephemeral", cap_records=2)
    topic.append([1, 2, 3])
    found = read_topic(topic)
    assert (found.seqs, found.evict_floor) == ([2, 3], 2)
    topic = world.restart("reopen").topic("a")
    assert topic.evict_floor == 2, "the floor was kept with the head"
    assert read_topic(topic).head_seq == 3


# Always durable -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("restart", ["kill", "crash"])
def test_creating_configuring_and_dropping_are_durable_whatever_the_class(durability: str, restart: Restart) -> None:
    """Contract 4, G85."""
    world = EngineHarness(**TINY)
    made = world.log.topic("a", durability=durability)
    world.log.topic("b", durability=durability)
    topic = world.restart(restart).topic("a", create=False)
    assert (topic.id, topic.config.durability) == (made.id, durability)
    world.log.topic("a", ttl_ms=77)
    assert world.restart(restart).topic("a", create=False).config.ttl_ms == 77
    world.log.drop("a")
    assert [state.topic for state in world.restart(restart).topics()] == ["b"]


def test_only_fsync_pays_for_a_sync() -> None:
    """G15, contract 1.9: `fsync_ms` is 0 for the other classes. A disk topic syncs when it reserves seqs, and then
    not for a long while."""
    world = EngineHarness(head_reserve=1_000)
    syncs = {}
    for durability in CLASSES:
        topic = world.log.topic(durability, durability=durability)
        topic.append("the first one reserves")
        world.disk.trace.clear()
        for number in range(20):
            topic.append(number)
        syncs[durability] = sum(line.startswith("sync ") for line in world.disk.trace)
    assert syncs == {"ephemeral": 0, "memory": 0, "disk": 0, "fsync": 20}


# Changing the class -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", CLASSES)
@pytest.mark.parametrize("before", CLASSES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_class_may_change_at_any_time(before: str, after: str, checkpointed: bool) -> None:
    """Contract 1.13: mutable. Records stay readable, seqs go on, and the later ones get what their class promises."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability=before)
    topic.append([1, 2, 3])
    if checkpointed:
        world.log.checkpoint()
    world.log.topic("a", durability=after)
    assert topic.append([4, 5]).first_seq == 4
    assert datas(topic) == [1, 2, 3, 4, 5]
    topic.append(6)
    if checkpointed:
        world.log.checkpoint()
        assert datas(topic) == [1, 2, 3, 4, 5, 6]
    if after == "fsync":
        topic = world.restart("crash").topic("a")
        early = [] if before == "ephemeral" else [1, 2, 3]
        assert datas(topic) == [*early, 4, 5, 6], "the change itself was synced, and with it what came before"
        assert seqs(topic)[-3:] == [4, 5, 6]
    elif after == "ephemeral":
        topic = world.restart("reopen").topic("a")
        assert not {4, 5, 6} & set(datas(topic))
    else:
        topic = world.restart("kill").topic("a")
        assert datas(topic)[-3:] == [4, 5, 6]
    assert topic.append("next").first_seq > 6
    assert read_topic(topic).gap is None


def test_a_class_may_change_again_and_again() -> None:
    """G8. Method: all pairs of classes in one walk, a checkpoint and a kill in between."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    random = Random(5)
    kept: list[Any] = []
    highest = 0
    for step in range(60):
        durability = random.choice(CLASSES)
        topic = world.log.topic("a", durability=durability)
        done = topic.append([step, step])
        assert done.first_seq > highest
        highest = done.last_seq
        if durability == "fsync":
            kept.append(step)
        if step % 7 == 0:
            world.log.checkpoint()
        if step % 11 == 0:
            topic = world.log.topic("a", durability="fsync")
            highest = topic.append("end").last_seq
            topic = world.restart("kill").topic("a")
    topic = world.log.topic("a", durability="fsync")
    topic.append("end")
    found = read_topic(world.restart("crash").topic("a"))
    assert [data for data in found.datas if data in kept] == [step for step in kept for _ in range(2)]
    assert found.gap is None


@pytest.mark.parametrize(("durable", "durability"), [(True, "fsync"), (False, "disk")])
def test_durable_is_a_shorter_word(durable: bool, durability: str) -> None:
    """Contract 1.13: listened to only where `durability` is absent."""
    log = EngineHarness().log
    topic = log.topic("a", durable=durable)
    assert (topic.config.durability, topic.config.durable) == (durability, durable)
    assert log.topic("b", durable=durable, durability="memory").config.durability == "memory"
