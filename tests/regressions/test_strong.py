"""`consistency: "strong"` was accepted and ignored: readers are shown what survives a power cut, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import RESTARTS, TIMEOUT_S, EngineHarness, read_topic, running

from tidelog.engine import Engine, FieldSelection, Record, Topic
from tidelog.engine.config import TopicConfig
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, Error, Latched
from tidelog.testing import SimDisk

STRONG: dict[str, Any] = {"consistency": "strong"}
SMALL: dict[str, Any] = {"wal_file_bytes": 2048, "segment_events_max": 4, "head_reserve": 4}
Read = Callable[[Topic], list[int]]


def _text(topic: Topic) -> list[int]:
    page = topic_operations(topic).read_json(0, 100, 1 << 20, nodes=frozenset(), show=FieldSelection())
    return list(range(1, page.counts.rows + 1))


def _lines(topic: Topic) -> list[int]:
    passed = topic_operations(topic).scan()
    return list(range(1, sum(text.count(b"\n") for text in passed.iter_json_lines(FieldSelection())) + 1))


def _batches(topic: Topic) -> list[int]:
    return [seq for batch in topic.scan().iter_arrow_batches() for seq in batch.column("seq").to_pylist()]


def _listed(topic: Topic) -> list[int]:
    listing = topic.segments()
    return [seq for held in listing.segments for seq in range(held.base, held.stop)]


READS: dict[str, Read] = {
    "read": lambda topic: [record.seq for record in topic.read(0).records],
    "wait": lambda topic: [record.seq for record in topic.read(0, timeout=TIMEOUT_S).records],
    "follow": lambda topic: [item.seq for item in topic.follow(timeout=0.0) if isinstance(item, Record)],
    "iterate": lambda topic: [item.seq for item in topic if isinstance(item, Record)],
    "arrow": lambda topic: topic.to_arrow().column("seq").to_pylist(),
    "json": _text,
    "lines": _lines,
    "batches": _batches,
    "group": lambda topic: [record.seq for record in topic.group("g").fetch().records],
    "segments": _listed,
}


def seen_after_power_cut(world: EngineHarness, name: str = "t") -> set[int]:
    topic = world.crash().topic(name, create=False)
    return {record.seq for record in topic.read(0, 1000).records}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("read", READS)
def test_what_a_strong_reader_has_seen_survives_a_power_cut(read: str, durability: str, shards: int) -> None:
    """By every way to read; an append of class `disk` is acked before its sync, which the read then waits for."""
    world = EngineHarness(wal_shards=shards, **SMALL)
    topic = world.log.topic("t", durability=durability, **STRONG)
    for number in range(1, 8):
        topic.append([number], tag="x")
        if number == 5:
            world.log.checkpoint()
        found = READS[read](topic)
        if read != "segments":
            assert found == list(range(1, number + 1)), "a strong reader is shown all that was acked"
        assert set(found) <= seen_after_power_cut(world)


ASKING: dict[str, Read] = {
    "read": lambda topic: [record.seq for record in topic.read(0, strong=True).records],
    "wait": lambda topic: [record.seq for record in topic.read(0, timeout=TIMEOUT_S, strong=True).records],
    "follow": lambda topic: [item.seq for item in topic.follow(timeout=0.0, strong=True) if isinstance(item, Record)],
    "arrow": lambda topic: topic.to_arrow(strong=True).column("seq").to_pylist(),
    "batches": lambda topic: [
        seq for batch in topic.scan(strong=True).iter_arrow_batches() for seq in batch.column("seq").to_pylist()
    ],
    "listing": lambda topic: list(range(1, topic.segments(strong=True).head_seq + 1)),
}


@pytest.mark.parametrize("beside", [False, True], ids=["writer", "reader beside it"])
@pytest.mark.parametrize("read", ASKING)
def test_a_reader_of_an_eventual_topic_can_ask_for_strong(read: str, beside: bool) -> None:
    world = EngineHarness(wal_shards=2, **SMALL)
    topic = world.log.topic("t", durability="disk")
    for number in range(1, 8):
        topic.append([number])
        if number == 5:
            world.log.checkpoint()
        log = world.open(world.disk, read_only=True) if beside else world.log
        found = ASKING[read](log.topic("t", create=False))
        assert found == list(range(1, number + 1))
        assert set(found) <= seen_after_power_cut(world)


def test_strong_is_refused_for_classes_that_promise_nothing() -> None:
    world = EngineHarness()
    for durability in ("memory", "ephemeral"):
        topic = world.log.topic(durability, durability=durability)
        topic.append(b"x")
        for read in ASKING.values():
            with pytest.raises(BadInput, match="strong readers cannot be served"):
                read(topic)


def test_eventual_reader_of_class_disk_sees_records_that_a_power_cut_takes() -> None:
    """The difference that the setting makes."""
    world = EngineHarness()
    topic = world.log.topic("t", durability="disk")
    topic.append(b"reserves")
    topic.append(b"x")
    assert [record.seq for record in topic.read(0).records] == [1, 2]
    assert seen_after_power_cut(world) == {1}
    before = world.disk.op_count
    topic.read(0)
    assert world.disk.op_count == before, "an eventual read costs no operation of the disk"


def _syncs(disk: SimDisk) -> int:
    return sum(op.startswith("sync ") for op in disk.trace)


def test_strong_read_syncs_once_and_only_what_is_new() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="disk", **STRONG)
    topic.append(b"reserves")
    for _ in range(10):
        topic.append(b"x")
    before = _syncs(world.disk)
    assert len(topic.read(0).records) == 11
    assert _syncs(world.disk) == before + 1
    topic.read(0)
    topic.to_arrow()
    assert _syncs(world.disk) == before + 1, "what is durable is read without a sync"
    topic.append(b"x")
    assert not topic_operations(topic).can_read_without_blocking(11)
    assert topic_operations(topic).read_cached_json(11, 10, 1 << 20) is None, "an event loop is not made to wait"
    world.log.tick()
    synced = _syncs(world.disk)
    assert topic_operations(topic).can_read_without_blocking(11)
    assert len(topic.read(11).records) == 1
    assert _syncs(world.disk) == synced, "the interval sync has made it durable"


def test_fsync_topics_read_as_before() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync", **STRONG)
    topic.append(b"x")
    before = world.disk.op_count
    assert topic_operations(topic).can_read_without_blocking(0)
    assert len(topic.read(0).records) == 1
    assert world.disk.op_count == before


def test_claims_hand_out_durable_jobs_alone() -> None:
    world = EngineHarness(**SMALL)
    topic = world.log.topic("q", type="queue", durability="disk", **STRONG)
    queue = topic.queue()
    for number in range(6):
        topic.append(number)
        assert not operations_of(queue).can_claim_without_blocking(1)
        (job,) = queue.claim("w", 1)
        assert job.data == number
        image = world.disk.crash_image("none")
        found = world.open(image).topic("q", create=False).read(0, 100).records
        assert job.seq in {record.seq for record in found}
        queue.ack("w", [job.seq], [job.lease_id])


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("source_class", ["ephemeral", "memory", "disk", "fsync"])
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_copies_are_shown_when_they_are_durable(durability: str, source_class: str, shards: int) -> None:
    """Whatever their sources promise, and in whichever shards these are."""
    world = EngineHarness(wal_shards=shards, **SMALL)
    first = world.log.topic("a", durability=source_class)
    world.log.topic("b", durability="disk")
    dest = world.log.topic("c", durability=durability, **STRONG)
    world.log.router("r1", "a", "b")
    world.log.router("r2", "b", "c")
    for number in range(1, 6):
        first.append(number)
        seen = {record.seq: record.data for record in dest.read(0).records}
        assert list(seen.values()) == list(range(1, number + 1))
        left = world.crash().topic("c", create=False).read(0, 100).records
        assert seen.items() <= {record.seq: record.data for record in left}.items()


@pytest.mark.parametrize("durability", ["memory", "ephemeral"])
def test_strong_needs_a_class_that_promises_something(durability: str) -> None:
    world = EngineHarness()
    with pytest.raises(BadInput, match="promises nothing"):
        world.log.topic("t", durability=durability, **STRONG)
    assert world.log.topics() == []
    topic = world.log.topic("t", durability=durability)
    topic.append("x")
    with pytest.raises(BadInput, match="promises nothing"):
        topic_operations(topic).read_json(0, 10, 1 << 20, nodes=frozenset(), show=FieldSelection(), strong=True)
    with pytest.raises(BadInput, match="promises nothing"):
        world.log.topic("t", consistency="strong")
    strong = world.log.topic("s", **STRONG)
    with pytest.raises(BadInput, match="promises nothing"):
        world.log.topic("s", durability=durability)
    assert strong.config.consistency == "strong"


@pytest.mark.parametrize("value", ["Strong", "weak", "", 1, None, True])
def test_consistency_is_one_of_two_words(value: object) -> None:
    with pytest.raises(BadInput):
        TopicConfig.make({"consistency": value})


def test_consistency_is_kept_and_shown_only_where_it_is_strong() -> None:
    world = EngineHarness()
    world.log.topic("t", **STRONG)
    world.log.topic("u")
    for how in RESTARTS:
        log = world.restart(how)
        assert log.topic("t", create=False).config.consistency == "strong"
        assert b"consistency" in log.topic("t", create=False).config.to_json()
        assert b"consistency" not in log.topic("u", create=False).config.to_json()
    world.log.topic("t", consistency="eventual")
    assert world.restart("kill").topic("t", create=False).config.consistency == "eventual"


def test_topic_that_becomes_strong_shows_what_was_written_before_once_it_is_durable() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="disk")
    topic.append(["a", "b"])
    topic.append("c")
    world.log.topic("t", consistency="strong")
    assert {record.seq for record in topic.read(0).records} <= seen_after_power_cut(world)


def test_cursor_beyond_the_durable_head_is_not_taken_for_another_topics() -> None:
    """A cursor of an eventual read, when the topic became strong and the disk fails."""
    world = EngineHarness()
    topic = world.log.topic("t", durability="disk")
    topic.append("reserves")
    topic.append("x")
    cursor = topic.read(0).next_from_seq
    world.log.topic("t", consistency="strong")
    topic.append("y")
    world.disk.fail("sync", path="/wal", times=None)
    page = topic.read(cursor)
    assert (page.records, page.gap, page.next_from_seq, page.caught_up) == ([], None, cursor, True)


@pytest.mark.parametrize("shards", [1, 2])
def test_strong_readers_of_a_failing_disk_are_shown_what_was_durable_before(shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    topic = world.log.topic("t", durability="disk", **STRONG)
    topic.append(["a", "b"])
    assert len(topic.read(0).records) == 2
    topic.append("c")
    world.disk.fail_sync("dropped", times=None, path="/wal")
    assert [record.seq for record in topic.read(0).records] == [1, 2]
    assert [record.seq for record in topic.read(0, timeout=0.0).records] == [1, 2]
    with pytest.raises(Latched):
        topic.to_arrow(0, 3)
    assert topic.to_arrow(0, 2).num_rows == 2
    assert seen_after_power_cut(world) == {1, 2}


def test_interval_that_fails_makes_nothing_durable() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="disk", **STRONG)
    topic.append("a")
    assert len(topic.read(0).records) == 1
    topic.append("b")
    world.disk.fail_sync("dropped", times=None, path="/wal")
    with pytest.raises(Error):
        world.log.tick()
    assert [record.data for record in topic.read(0).records] == ["a"]


def test_reader_beside_the_writer_syncs_what_it_shows() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="disk", **STRONG)
    for number in range(6):
        topic.append(number)
    assert len(seen_after_power_cut(world)) < 6
    reader = world.reader().topic("t", create=False)
    found = {record.seq for record in reader.read(0).records}
    assert len(found) == 6
    assert found <= seen_after_power_cut(world)


@pytest.mark.parametrize("restart", ["kill", "reopen"])
def test_what_a_restart_replayed_is_durable_for_strong_readers(restart: Any) -> None:
    world = EngineHarness(**SMALL)
    topic = world.log.topic("t", durability="disk", **STRONG)
    for number in range(6):
        topic.append(number)
    topic = world.restart(restart).topic("t", create=False)
    found = {record.seq for record in topic.read(0).records}
    assert len(found) == 6
    assert found <= seen_after_power_cut(world)


def test_waiting_reader_is_woken_by_an_append_and_syncs_it() -> None:
    world = EngineHarness(threads=True)
    topic = world.log.topic("t", durability="disk", **STRONG)
    topic.append("reserves")
    seen: list[int] = []

    def wait() -> None:
        page = topic.read(1, timeout=TIMEOUT_S)
        seen.extend(record.seq for record in page.records)
        assert set(seen) <= seen_after_power_cut(world)

    with running(wait):
        topic.append("x")
    assert seen == [2]
    world.log.close()


@pytest.mark.parametrize(
    ("durability", "shards", "step"),
    [
        ("disk", 2, 3),
        ("fsync", 1, 3),
        *(pytest.param(name, count, 1, marks=pytest.mark.sweep) for name in ("disk", "fsync") for count in (1, 2)),
    ],
)
def test_at_every_operation_what_strong_readers_have_seen_is_there_after_a_power_cut(
    durability: str, shards: int, step: int
) -> None:
    """A history of writes, copies, caps, deletes, checkpoints and restarts, with strong readers in between; every image
    that a power cut could leave is opened and has all that was seen and was not removed since."""
    world = EngineHarness(wal_shards=shards, **SMALL)
    seen: dict[str, dict[int, object]] = {"t": {}, "copy": {}, "eventual": {}}
    states = 0

    def look(op: int) -> None:
        nonlocal states
        if op % step:
            return
        for image in world.disk.images(random=Random(op), limit=2):
            states += 1
            log = world.open(image.disk)
            for name, records in seen.items():
                left = {r.seq: r.data for r in log.topic(name, create=False).read(0, 1000).records}
                assert records.items() <= left.items(), f"{name} before op {op}, {image.label}"

    def topics(log: Engine) -> tuple[Topic, Topic, Topic]:
        return log.topic("t", create=False), log.topic("copy", create=False), log.topic("eventual", create=False)

    world.log.topic("t", durability=durability, **STRONG)
    world.log.topic("copy", durability="disk", **STRONG)
    world.log.topic("eventual", durability="disk")
    world.log.router("r", "eventual", "copy")
    random = Random(5)
    world.disk.on_op = look
    for number in range(14):
        topic, copy, eventual = topics(world.log)
        topic.append([number] * random.choice([1, 2, 5]), tag=f"n:{number}")
        eventual.append(number)
        if number % 2:
            seen["t"].update({r.seq: r.data for r in topic.read(0, 1000).records})
        if number % 3 == 0:
            seen["copy"].update({r.seq: r.data for r in copy.read(0, 1000).records})
        if number % 5 == 4:
            gone = topic.read(0, 1).records[0]
            seen["t"] = {seq: data for seq, data in seen["t"].items() if data != gone.data}
            topic.delete(match=gone.tag)
        if number % 6 == 5:
            world.log.tick()
        if number % 9 == 8:
            world.log.checkpoint()
        if number == 10:
            world.restart("kill")
            world.disk.on_op = look
    assert states > 50 // step
    assert len(seen["t"]) > 8
    assert len(seen["copy"]) > 5
    read_topic(topics(world.log)[0])
