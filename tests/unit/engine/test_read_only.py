"""Readers beside the one writer: the fourth interface of the design, and what G5, G30, G70 and G86 mean for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engine.harness import LOGGED, PATH, TINY, EngineHarness, TopicContents, datas, read_topic

from tidelog.engine import Engine, Gap
from tidelog.errors import BadInput, Closed, Error, Locked, NotFound, ReadOnly, TopicNotFound
from tidelog.testing import SimDisk


def everything(log: Engine) -> dict[str, TopicContents]:
    return {state.topic: read_topic(log.topic(state.topic)) for state in log.topics()}


def filled(world: EngineHarness) -> None:
    for name in LOGGED:
        topic = world.log.topic(name, durability=name)
        topic.append(list(range(1, 10)), tag="t")
        topic.delete(seqs=[2, 3])
    world.log.checkpoint()
    for name in LOGGED:
        topic = world.log.topic(name)
        topic.append(["tail", b"tail"], node="n", meta={"m": 1})
        topic.delete(seqs=[5])


# Seeing -------------------------------------------------------------------------------------------------


def test_a_reader_sees_what_the_writer_shows() -> None:
    """Segments, deletes, and the tail that only the WAL has."""
    world = EngineHarness(**TINY)
    filled(world)
    assert everything(world.reader()) == everything(world.log)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_reader_sees_every_acked_record_whatever_the_writer_is_doing(shards: int) -> None:
    """G5. Method: a reader opens the directory before each operation of the disk, through appends, rotations, deletes,
    checkpoints and the removal of files, and finds all that was acked, in order, and nothing that was not written."""
    world = EngineHarness(**TINY | {"wal_shards": shards})
    topic = world.log.topic("a", durability="fsync")
    acked: list[int] = []
    deleted: set[int] = set()
    submitted: list[int] = []
    going: set[int] = set()
    looks = 0

    def look(_: int) -> None:
        nonlocal looks
        found = datas(world.reader().topic("a"))
        assert found == sorted(found)
        assert set(acked) - deleted - going <= set(found) <= set(submitted) - deleted
        looks += 1

    world.disk.on_op = look
    for number in range(0, 42, 2):
        submitted += [number, number + 1]
        topic.append([number, number + 1])
        acked += [number, number + 1]
        if number % 10 == 8:
            world.log.checkpoint()
        if number % 14 == 12:
            first, last = topic.read().records[0], topic.read().records[-1]
            going = {first.data, last.data}
            topic.delete(seqs=[first.seq, last.seq])
            deleted |= going
            going = set()
    world.disk.on_op = None
    assert looks > 120


def test_a_reader_sees_one_moment_until_it_looks_again() -> None:
    """`refresh`."""
    world = EngineHarness(**TINY)
    filled(world)
    reader = world.reader()
    before = everything(reader)
    topic = world.log.topic("fsync")
    topic.append("later")
    topic.delete(seqs=[1])
    world.log.topic("new", durability="fsync").append(1)
    world.log.drop("memory")
    assert everything(reader) == before
    reader.refresh()
    assert everything(reader) == everything(world.log)
    assert [state.topic for state in reader.topics()] == ["disk", "fsync", "new"]
    with pytest.raises(TopicNotFound):
        reader.topic("memory", create=False)


def test_a_reader_sees_a_topic_that_was_made_again() -> None:
    """G86."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync").append([1, 2, 3])
    reader = world.reader()
    old = reader.topic("a").id
    world.log.drop("a")
    world.log.topic("a", durability="fsync").append("new")
    reader.refresh()
    topic = reader.topic("a")
    assert topic.id != old
    assert topic.read(3).gap == Gap(1, 1, "recreated", 1, 1, 1)
    assert datas(topic) == ["new"]


def test_a_stale_reader_sees_nothing_wrong() -> None:
    """Method: the writer evicts, seals, checkpoints and removes files under a reader that holds an old moment. It gets
    the record that was there or an error, never another; when it looks again it sees what is."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(1, 41)))
    world.log.checkpoint()
    readers = [world.reader() for _ in range(4)]
    readers[0].topic("a").read()
    for step in range(6):
        world.log.topic("a", cap_records=30 - 5 * step)
        topic.append([100 + step] * 5)
        topic.delete(seqs=[topic.head_seq - 2])
        world.log.checkpoint()
        for reader in readers:
            for cursor in (0, 7, 20, 39):
                try:
                    page = reader.topic("a").read(cursor, 7)
                except Error:
                    continue
                assert [record.data for record in page.records] == list(range(cursor + 1, min(cursor + 8, 41)))
    for reader in readers:
        reader.refresh()
        assert everything(reader) == everything(world.log)


def test_read_only_readers_get_gaps_too() -> None:
    """G70."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", cap_records=3)
    topic.append(list(range(1, 11)))
    found = read_topic(world.reader().topic("a"))
    assert (found.seqs, found.gap) == ([8, 9, 10], Gap(1, 7, "cap", 7, 8, 10))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_reader_is_not_shown_what_is_expired(checkpointed: bool) -> None:
    """Contract 1.13, 3.3: expired means now − ts > ttl, for every reader; the first promise of the design: every reader
    sees a loss as a gap."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", ttl_ms=100)
    topic.append([1, 2])
    world.clock.tick(50)
    topic.append(3)
    if checkpointed:
        world.log.checkpoint()
    reader = world.reader()
    assert datas(reader.topic("a")) == [1, 2, 3]
    world.clock.tick(51)
    found = read_topic(reader.topic("a"))
    assert (found.seqs, found.gap) == ([3], Gap(1, 2, "ttl", 2, 3, 3))
    assert datas(world.reader().topic("a")) == [3]


def test_a_reader_of_a_topic_of_class_disk_does_not_see_reserved_seqs() -> None:
    """They are the writer's: the head is that of the last record."""
    world = EngineHarness(head_reserve=100)
    topic = world.log.topic("a", durability="disk")
    topic.append([1, 2])
    found = world.reader().topic("a")
    assert (found.head_seq, datas(found)) == (2, [1, 2])
    topic.append(3)
    assert world.reader().topic("a").head_seq == 3


def test_a_reader_may_filter_follow_and_take_columns() -> None:
    world = EngineHarness(**TINY)
    filled(world)
    topic = world.reader().topic("fsync")
    assert len(topic.read(node="n").records) == 6
    assert len(list(topic.follow(timeout=0.0))) == 8
    assert topic.to_arrow().num_rows == 8
    assert topic.read(topic.head_seq, timeout=0.001).caught_up


# Changing nothing ---------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Engine], object]] = {
    "append": lambda log: log.topic("fsync").append(1),
    "append_nowait": lambda log: log.topic("fsync").append_nowait(1),
    "delete": lambda log: log.topic("fsync").delete(seqs=[1]),
    "create": lambda log: log.topic("new"),
    "configure": lambda log: log.topic("fsync", cap_records=1),
    "put": lambda log: log.configure("fsync", {"cap_records": 1}),
    "drop": lambda log: log.drop("fsync"),
    "drop nothing": lambda log: log.drop("nothing"),
    "checkpoint": lambda log: log.checkpoint(),
    "tick": lambda log: log.tick(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_changes_nothing(verb: str) -> None:
    world = EngineHarness(**TINY)
    filled(world)
    before, ops = world.disk.digest(), world.disk.op_count
    reader = world.reader()
    with pytest.raises(ReadOnly):
        VERBS[verb](reader)
    assert everything(reader) == everything(world.log)
    reader.close()
    assert (world.disk.digest(), world.disk.op_count) == (before, ops)


def test_a_reader_repairs_nothing() -> None:
    """What a crash left is looked at and left as it is."""
    world = EngineHarness(**TINY)
    filled(world)
    disk = world.disk.reboot()
    path = world.files(".idx")[0]
    disk.remove(path)
    before = disk.digest()
    reader = world.reader(disk)
    assert everything(reader)["fsync"] == everything(world.log)["fsync"]
    reader.close()
    assert disk.digest() == before


def test_any_number_may_read_and_one_may_write() -> None:
    """G30."""
    world = EngineHarness(**TINY)
    filled(world)
    readers = [world.reader() for _ in range(5)]
    with pytest.raises(Locked):
        world.open(world.disk)
    world.log.topic("fsync").append("still the writer")
    world.log.close()
    late = world.reader()
    assert datas(late.topic("fsync"))[-1] == "still the writer"
    writer = world.open(world.disk)
    writer.topic("fsync").append("another writer")
    for reader in [*readers, late]:
        reader.refresh()
        assert datas(reader.topic("fsync"))[-1] == "another writer"


def test_there_must_be_something_to_read() -> None:
    world = EngineHarness()
    disk = SimDisk()
    with pytest.raises(NotFound):
        world.reader(disk)
    disk.make_dir(PATH)
    with pytest.raises(NotFound):
        world.reader(disk)
    assert disk.tree() == {}


def test_only_a_reader_looks_again() -> None:
    world = EngineHarness()
    with pytest.raises(BadInput):
        world.log.refresh()
    reader = world.reader()
    reader.close()
    with pytest.raises(Closed):
        reader.refresh()
    with pytest.raises(Closed):
        reader.topics()


@pytest.mark.parametrize("restart", ["kill", "crash"])
def test_a_reader_needs_no_writer(restart: Any) -> None:
    """It sees what the next writer will recover."""
    world = EngineHarness(**TINY)
    filled(world)
    disk = world.disk.reboot() if restart == "kill" else world.disk.crash_image("none")
    seen = everything(world.reader(disk))
    found = everything(world.open(disk))
    assert {name: view.records for name, view in seen.items()} == {name: view.records for name, view in found.items()}
