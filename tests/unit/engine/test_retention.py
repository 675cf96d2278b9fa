"""What caps and age promise: the contract's sections 3.2, 3.3, 3.4, appendix D1, and G12, G59, G60, G70–G76, G84."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
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

from tidelog.engine import Gap, Topic
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, DiskFull, NotEmpty, TooLarge, TopicFull


def reasons(topic: Topic) -> list[str | None]:
    """The gap of a reader, by cursor, from the start to the head."""
    gaps = [topic.read(cursor, 1).gap for cursor in range(topic.head_seq + 1)]
    return [None if gap is None else gap.reason for gap in gaps]


# Caps that take the oldest ------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("batches", [[1] * 6, [6], [2, 4], [5, 1]], ids=str)
def test_the_oldest_give_way_to_a_cap_of_records(durability: str, batches: list[int]) -> None:
    """Contract 3.3: cap 3 after 6 writes leaves head 6, count 3, earliest 4; in batches as well."""
    topic = EngineHarness(**TINY).log.topic("a", durability=durability, cap_records=3)
    for many in batches:
        topic.append([0] * many)
    found = read_topic(topic)
    assert (found.head_seq, found.earliest_seq, found.seqs, found.evict_floor) == (6, 4, [4, 5, 6], 4)
    assert found.gap == Gap(1, 3, "cap", 3, 4, 6)
    assert reasons(topic) == ["cap"] * 3 + [None] * 4


@pytest.mark.parametrize("durability", CLASSES)
def test_a_cap_counts_the_living(durability: str) -> None:
    """Contract, appendix D1: deleted records free space."""
    topic = EngineHarness(**TINY).log.topic("a", durability=durability, cap_records=3)
    topic.append([1, 2, 3])
    topic.delete(seqs=[2])
    topic.append(4)
    assert (seqs(topic), topic.evict_floor) == ([1, 3, 4], 1)
    topic.append(5)
    assert (seqs(topic), topic.evict_floor) == ([3, 4, 5], 2)
    topic.delete(seqs=[4, 5])
    topic.append([6, 7])
    assert (seqs(topic), topic.evict_floor) == ([3, 6, 7], 2)
    topic.append(8)
    assert (seqs(topic), topic.evict_floor) == ([6, 7, 8], 4)


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_cap_counts_live_records_after_a_restart(restart: Restart, checkpointed: bool) -> None:
    """G59, appendix D1."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", cap_records=4)
    for step in ([1, 2, 3], "2", [4, 5], "4", "5", [6], [7, 8]):
        if isinstance(step, str):
            topic.delete(seqs=[int(step)])
        else:
            topic.append(step)
    if checkpointed:
        world.log.checkpoint()
    before = read_topic(topic)
    assert before.seqs == [3, 6, 7, 8]
    topic = world.restart(restart).topic("a")
    assert read_topic(topic) == before
    topic.append(9)
    assert seqs(topic) == [6, 7, 8, 9]


@pytest.mark.parametrize("durability", CLASSES)
def test_a_cap_of_bytes_counts_data_and_meta(durability: str) -> None:
    """Contract 1.12, 3.3: exactly the cap is kept, a byte more is not."""
    topic = EngineHarness(**TINY).log.topic("a", durability=durability, cap_bytes=30)
    topic.append(b"x" * 10)
    topic.append(b"y" * 11, meta={"k": "v"})  # 9 bytes of meta
    assert (seqs(topic), topic.bytes) == ([1, 2], 30)
    topic.append(b"")
    assert (seqs(topic), topic.bytes) == ([1, 2, 3], 30)
    topic.append(b"z")
    assert (seqs(topic), topic.bytes) == ([2, 3, 4], 21)
    topic.append({"ä": 1})  # 8 bytes in UTF-8
    assert (seqs(topic), topic.bytes) == ([2, 3, 4, 5], 29)
    topic.append("é", meta={"k": "v"})  # 4 and 9
    assert (seqs(topic), topic.bytes) == ([3, 4, 5, 6], 22)
    assert read_topic(topic).gap == Gap(1, 2, "cap", 2, 3, 6)


@pytest.mark.parametrize("durability", CLASSES)
def test_the_cap_that_binds_first_wins(durability: str) -> None:
    """Contract 1.13."""
    topic = EngineHarness().log.topic("a", durability=durability, cap_records=3, cap_bytes=100)
    topic.append([b"x"] * 5)
    assert topic.count == 3
    topic.append([b"y" * 60, b"z" * 40])
    assert seqs(topic) == [6, 7]


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_larger_than_the_cap_is_taken_and_lost_at_once(durability: str) -> None:
    """Contract 3.3."""
    topic = EngineHarness().log.topic("a", durability=durability, cap_bytes=10)
    topic.append([b"x", b"y"])
    assert topic.append(b"z" * 11).last_seq == 3
    found = read_topic(topic)
    assert (found.records, found.head_seq, found.earliest_seq) == ([], 3, 4)
    assert found.gap == Gap(1, 3, "cap", 3, 4, 3)
    topic.append(b"w")
    assert seqs(topic) == [4]


def test_a_full_cap_of_many_evicts_exactly_as_many_as_came() -> None:
    """Over segments, blocks and checkpoints."""
    world = EngineHarness(segment_events_max=50)
    topic = world.log.topic("a", cap_records=333)
    written = 0
    for number in range(60):
        written += topic.append([b"x"] * (number % 13 + 1)).count
        if number % 9 == 0:
            world.log.checkpoint()
        assert seqs(topic) == list(range(max(written - 332, 1), written + 1))


# Caps that refuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize(
    ("caps", "write"),
    [
        ({"cap_records": 4}, [b"x"] * 2),
        ({"cap_bytes": 40}, [b"x" * 11]),
        ({"cap_records": 3, "cap_bytes": 500}, [b"x"]),
    ],
    ids=str,
)
def test_a_topic_that_rejects_keeps_what_it_has(durability: str, caps: dict[str, Any], write: list[bytes]) -> None:
    """G12, contract 3.3: nothing appended, no frame, no seq."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability, discard="reject", **caps)
    topic.append([b"x" * 10] * 3)
    before = world.disk.digest()
    with pytest.raises(TopicFull) as full:
        topic.append(write)
    error = full.value
    assert (error.cap_records, error.cap_bytes) == (caps.get("cap_records", 0), caps.get("cap_bytes", 0))
    assert (error.topic, error.head_seq, error.earliest_seq, error.written) == ("a", 3, 1, False)
    assert world.disk.digest() == before
    assert seqs(topic) == [1, 2, 3]
    topic.delete(seqs=[2, 3])
    assert topic.append(write).first_seq == 4
    assert topic.evict_floor == 1


def test_exactly_the_cap_is_let_in() -> None:
    """Contract 1.12."""
    topic = EngineHarness().log.topic("a", discard="reject", cap_records=3, cap_bytes=30)
    topic.append([b"x" * 5, b"y" * 5])
    topic.append(b"z" * 11, meta={"k": "v"})
    assert (topic.count, topic.bytes) == (3, 30)


@pytest.mark.parametrize(("caps", "write"), [({"cap_records": 2}, [0] * 3), ({"cap_bytes": 5}, [b"x" * 6])], ids=str)
def test_a_write_larger_than_the_cap_can_never_go_in(caps: dict[str, Any], write: list[Any]) -> None:
    """Contract 2.5, 3.3: not full but too large, also where the topic is empty."""
    topic = EngineHarness().log.topic("a", discard="reject", **caps)
    with pytest.raises(TooLarge):
        topic.append(write)
    assert topic.head_seq == 0


def test_writes_under_way_count_for_a_cap_that_rejects() -> None:
    """G12: two that fit alone and not together do not both go in."""
    topic = EngineHarness().log.topic("a", discard="reject", cap_records=3)
    first = topic.append_nowait([1, 2])
    with pytest.raises(TopicFull):
        topic.append_nowait([3, 4])
    second = topic.append_nowait(3)
    assert (first.wait().last_seq, second.wait().last_seq) == (2, 3)
    assert seqs(topic) == [1, 2, 3]


def test_a_write_that_failed_gives_its_place_back() -> None:
    world = EngineHarness()
    topic = world.log.topic("a", discard="reject", cap_records=2, cap_bytes=10)
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        topic.append([b"12345", b"67890"])
    topic.append([b"12345", b"67890"])
    assert topic.count == 2


def test_expired_records_free_space() -> None:
    """Contract 3.3: retention is looked at on every write."""
    world = EngineHarness()
    topic = world.log.topic("a", discard="reject", cap_records=2, ttl_ms=100)
    topic.append([1, 2])
    world.clock.tick(101)
    assert topic.append([3, 4]).first_seq == 3
    assert seqs(topic) == [3, 4]


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_topic_that_rejects_evicts_only_when_its_cap_is_lowered(restart: Restart) -> None:
    """Contract, appendix D1."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", discard="reject", cap_records=5)
    topic.append([1, 2, 3, 4, 5])
    topic.delete(seqs=[2, 4])
    topic.append([6, 7])
    assert (seqs(topic), topic.evict_floor) == ([1, 3, 5, 6, 7], 1)
    world.log.topic("a", cap_records=3)
    assert (seqs(topic), topic.evict_floor) == ([5, 6, 7], 4)
    topic = world.restart(restart).topic("a")
    assert (seqs(topic), topic.evict_floor) == ([5, 6, 7], 4)
    with pytest.raises(TopicFull):
        topic.append(8)


# Age ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_is_expired_when_it_is_older_than_its_ttl_and_not_before(durability: str) -> None:
    """Contract 1.13: now − ts > ttl, strictly."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability=durability, ttl_ms=1_000)
    topic.append([1, 2])
    world.clock.tick(1)
    topic.append(3)
    world.clock.tick(999)
    assert (seqs(topic), read_topic(topic).gap) == ([1, 2, 3], None)
    world.clock.tick(1)
    found = read_topic(topic)
    assert (found.seqs, found.gap) == ([3], Gap(1, 2, "ttl", 2, 3, 3))
    world.clock.tick_us(999)
    assert seqs(topic) == [3]
    world.clock.tick(1)
    found = read_topic(topic)
    assert (found.records, found.earliest_seq, found.gap) == ([], 4, Gap(1, 3, "ttl", 3, 4, 3))
    assert topic.append(4).first_seq == 4
    assert reasons(topic) == ["ttl"] * 3 + [None] * 2


LOOKS: dict[str, Callable[[EngineHarness, Topic], object]] = {
    "state": lambda _, topic: topic.state().count,
    "count": lambda _, topic: topic.count,
    "bytes": lambda _, topic: topic.bytes,
    "earliest_seq": lambda _, topic: topic.earliest_seq - 3,
    "evict_floor": lambda _, topic: topic.evict_floor - 3,
    "topics": lambda world, _: world.log.topics()[0].count,
    "read": lambda _, topic: len(topic.read().records),
    "follow": lambda _, topic: len(list(topic.follow(timeout=0.0, on_gap="skip"))),
    "to_arrow": lambda _, topic: topic.to_arrow().num_rows,
    "delete": lambda _, topic: topic.delete(before_seq=9).deleted,
    "drop": lambda world, _: int(not world.log.drop("a", if_empty=True)),
    "append": lambda _, topic: topic.append(b"x").head_seq - 3,
}


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_no_reader_sees_an_expired_record(look: str, durability: str) -> None:
    """Contract 3.3: lazy but exact to observers."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability, ttl_ms=10)
    topic.append([b"x", b"y"])
    world.clock.tick(11)
    assert LOOKS[look](world, topic) == 0


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_deleted_records_are_no_part_of_the_gap(durability: str, checkpointed: bool) -> None:
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability=durability, ttl_ms=100)
    for number in range(4):
        topic.append([number])
    topic.seal()
    topic.append([4])
    if checkpointed:
        world.log.checkpoint()
    topic.delete(seqs=[2, 4, 5])
    world.clock.tick(200)
    assert topic.read(3).gap is None, "what the reader has not seen was deleted"
    page = topic.read(0)
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to, page.earliest_seq) == (1, 3, 6)
    assert (page.counts.expired, page.counts.deleted, page.next_from_seq) == (3, 2, 5)


def test_a_ttl_of_nothing_keeps_for_ever() -> None:
    world = EngineHarness()
    topic = world.log.topic("a")
    topic.append(1)
    world.clock.tick(1 << 45)
    assert seqs(topic) == [1]
    with pytest.raises(NotEmpty):
        world.log.drop("a", if_empty=True)


@pytest.mark.parametrize("field", ["ttl_ms", "cap_records", "cap_bytes"])
def test_a_tightened_limit_counts_at_once(field: str) -> None:
    """Contract 2.1: it evicts immediately and reports it."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a")
    for _ in range(6):
        topic.append(b"x" * 10)
        world.clock.tick(10)
    limit: dict[str, Any] = {field: {"ttl_ms": 25, "cap_records": 2, "cap_bytes": 25}[field]}
    world.log.topic("a", **limit)
    found = read_topic(topic)
    assert found.seqs == [5, 6]
    assert found.gap == Gap(1, 4, "ttl" if field == "ttl_ms" else "cap", 4, 5, 6)
    limit[field] = 0
    world.log.topic("a", **limit)
    assert read_topic(topic) == found, "what is lost does not come back"


@pytest.mark.parametrize("restart", [None, *RESTARTS])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_clock_going_back_revives_nothing(restart: Restart | None, checkpointed: bool) -> None:
    """G60."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", ttl_ms=1_000)
    topic.append([1, 2])
    world.clock.tick(1_001)
    topic.append(3)
    assert seqs(topic) == [3]
    if checkpointed:
        world.log.checkpoint()
    world.clock.set_us(world.clock.now_us() - 10_000_000)
    if restart is not None:
        topic = world.restart(restart).topic("a")
    found = read_topic(topic)
    assert (found.seqs, found.gap) == ([3], Gap(1, 2, "ttl", 2, 3, 3))
    assert topic.append(4).first_seq == 4


# Reasons ------------------------------------------------------------------------------------------------


def spaced(world: EngineHarness, durability: str) -> Topic:
    """Six records, ten milliseconds apart, the last one now."""
    topic = world.log.topic("a", durability=durability)
    for number in range(6):
        if number:
            world.clock.tick(10)
        topic.append(number)
    return topic


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("first", ["cap", "ttl"])
def test_a_gap_has_the_cause_that_reached_into_it(durability: str, first: str) -> None:
    """Contract 3.4: both causes are `mixed`, and only as far as both reach."""
    world = EngineHarness(**TINY)
    topic = spaced(world, durability)
    second = "ttl" if first == "cap" else "cap"
    lose_to(world, topic, first, 2)
    assert reasons(topic) == [first] * 2 + [None] * 5
    lose_to(world, topic, second, 4)
    assert reasons(topic) == ["mixed"] * 2 + [second] * 2 + [None] * 3


def lose_to(world: EngineHarness, topic: Topic, how: str, seq: int) -> None:
    """Let everything up to `seq` be lost to a cap or to age, and take the limit away again."""
    now_ms = world.clock.now_us() // 1000
    kept = topic.read(max(seq, topic.earliest_seq - 1), 1).records[0]
    limit: dict[str, Any] = {"ttl_ms": now_ms - kept.ts_ms} if how == "ttl" else {"cap_records": topic.head_seq - seq}
    world.log.topic("a", **limit)
    assert topic.earliest_seq == seq + 1
    limit = dict.fromkeys(limit, 0)
    world.log.topic("a", **limit)


@pytest.mark.parametrize("durability", LOGGED)
@pytest.mark.parametrize("checkpoints", ["", "first", "last", "both"])
@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ("cap 2", ["cap"] * 2 + [None] * 5),
        ("ttl 3", ["ttl"] * 3 + [None] * 4),
        ("cap 2, ttl 4", ["mixed"] * 2 + ["ttl"] * 2 + [None] * 3),
        ("ttl 1, cap 5", ["mixed"] + ["cap"] * 4 + [None] * 2),
        ("cap 1, ttl 2, cap 3", ["mixed"] * 2 + ["cap"] + [None] * 4),
        ("delete 2", [None] * 7),
        ("cap 2, delete 4", ["cap"] * 2 + [None] * 5),
        ("delete 3, ttl 4", ["ttl"] * 4 + [None] * 3),
    ],
)
def test_reasons_outlive_a_restart(
    story: str, expected: list[str | None], restart: Restart, checkpoints: str, durability: str
) -> None:
    """Contract 3.2, 4: a cap's gap is still a cap's, a deleted range still silent. Readers saw them, so a power cut
    changes nothing for the classes that promise anything (G59, G73)."""
    if durability == "memory" and restart == "crash":
        restart = "kill"
    world = EngineHarness(**TINY)
    topic = spaced(world, durability)
    if checkpoints in ("first", "both"):
        world.log.checkpoint()
    for step in story.split(", "):
        how, seq = step.split()
        if how == "delete":
            topic.delete(before_seq=int(seq) + 1)
        else:
            lose_to(world, topic, how, int(seq))
        if checkpoints == "both":
            world.log.checkpoint()
    assert reasons(topic) == expected
    before = read_topic(topic)
    world.log.tick()
    if checkpoints == "last":
        world.log.checkpoint()
    topic = world.restart(restart).topic("a")
    assert reasons(topic)[:6] == expected[:6]
    found = read_topic(topic)
    assert (found.records, found.evict_floor) == (before.records, before.evict_floor)
    world.restart(restart)
    assert reasons(world.log.topic("a"))[:6] == expected[:6]


# Floors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("limit", [{"cap_records": 2}, {"cap_bytes": 20}, {"ttl_ms": 8}], ids=str)
@pytest.mark.parametrize("look", ["read", "state", "topics", "to_arrow"])
def test_a_floor_that_a_reader_saw_survives_a_power_cut(durability: str, limit: Any, look: str) -> None:
    """G59, G73: also where the records above it are lost."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability, **limit)
    for _ in range(5):
        topic.append(b"x" * 10)
        world.clock.tick(3)
    if look == "read":
        shown = topic.read().gap
        floor = shown.gap_to + 1 if shown else 1
    elif look == "to_arrow":
        floor = json.loads(topic.to_arrow().schema.metadata[b"gap"])["gap_to"] + 1
    else:
        floor = topic.evict_floor if look == "state" else world.log.topics()[0].evict_floor
    assert floor == 4
    found = world.crash("none").topic("a")
    assert found.evict_floor >= floor
    page = found.read()
    assert page.gap is not None
    assert page.gap.gap_to >= floor - 1


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_floor_of_age_that_cannot_be_made_durable_takes_nothing(durability: str) -> None:
    """G74: the writer hears of it, a reader goes on with what is there."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability, ttl_ms=10)
    topic.append([1, 2])
    world.clock.tick(11)
    world.disk.fail("write", error=errno.ENOSPC, times=None)
    with pytest.raises(DiskFull):
        topic.append(3)
    with pytest.raises(DiskFull):
        topic.delete(before_seq=2)
    page = topic.read()
    assert ([record.data for record in page.records], page.gap) == ([1, 2], None)
    assert topic.evict_floor == 1
    world.disk.clear_faults()
    assert topic.append(4).last_seq > 2
    assert datas(topic) == [4]
    world.log.tick()
    assert datas(world.restart("crash").topic("a")) == [4]


def wal_end(world: EngineHarness) -> object:
    return world.log._context.shards[0].position()


def test_a_reader_waits_for_a_floor_only_where_it_is_shown_a_gap_that_could_be_taken_back() -> None:
    world = EngineHarness(ledger_records=0)
    for durability, hardens in (("disk", True), ("fsync", False), ("memory", False), ("ephemeral", False)):
        topic = world.log.topic(durability, durability=durability, cap_records=3)
        assert topic_operations(topic).is_floor_durable
        topic.append([1, 2, 3, 4, 5, 6])
        assert topic._state.index.evict_floor == 4
        assert topic_operations(topic).is_floor_durable is not hardens
        assert [topic_operations(topic).is_floor_durable_for(cursor) for cursor in (2, 3, 6)] == [
            not hardens,
            True,
            True,
        ]
    world.log.tick()
    assert all(topic_operations(world.log.topic(name)).is_floor_durable for name in CLASSES), (
        "the interval sync made the floors durable"
    )


def test_a_reader_writes_no_floor_that_replay_finds_by_the_records() -> None:
    """A cap's floor follows from the records where none of them can be lost: being shown the gap costs no write."""
    world = EngineHarness(ledger_records=0)
    for durability, writes in (("disk", True), ("fsync", False), ("memory", False), ("ephemeral", False)):
        topic = world.log.topic(durability, durability=durability, cap_records=3)
        topic.append([1, 2, 3, 4, 5, 6])
        before = wal_end(world)
        assert topic.read(0).gap is not None
        assert topic.state().evict_floor == 4
        assert (wal_end(world) != before) == writes, durability


@pytest.mark.parametrize("refused", [0, 1])
def test_a_topic_whose_floor_the_disk_refuses_keeps_none_of_the_others(refused: int) -> None:
    """Background expiry: the shard of one topic has no space, the topic of the other shard expires, and the first one
    does once there is space."""
    world = EngineHarness(wal_shards=2)
    for name in ("a", "b"):
        world.log.topic(name, durability="fsync", ttl_ms=1_000).append([1, 2])
    cores = [world.log.topic(name, create=False)._state for name in ("a", "b")]
    assert cores[0].shard is not cores[1].shard
    world.clock.tick(2_000)
    number = world.log._context.shards.index(cores[refused].shard)
    world.disk.fail("write", error=errno.ENOSPC, times=None, path=f"wal/shard-{number:02d}")
    with pytest.raises(DiskFull):
        world.log.tick()
    assert [core.index.count for core in cores] == ([2, 0] if refused == 0 else [0, 2])
    world.disk.clear_faults()
    world.clock.tick(20_000)
    world.log.tick()
    assert [core.index.count for core in cores] == [0, 0]


@pytest.mark.parametrize("durability", CLASSES)
def test_a_floor_that_a_configure_raised_is_in_the_wal_before_the_next_configure(durability: str) -> None:
    """Also where the records alone would give it: replay must not depend on the limits that a topic had meanwhile."""
    world = EngineHarness(ledger_records=0)
    topic = world.log.topic("a", durability=durability)
    topic.append([1, 2, 3, 4, 5, 6])
    world.log.topic("a", cap_records=10)
    held = [topic._state.durable_floor]
    world.log.topic("a", cap_records=3)
    held.append(topic._state.durable_floor)
    assert topic._state.index.evict_floor == 4
    assert held == [1, 1 if durability == "ephemeral" else 4]


def test_the_interval_sync_writes_a_floor_once() -> None:
    world = EngineHarness(ledger_records=0)
    topic = world.log.topic("a", durability="disk", cap_records=3)
    topic.append([1, 2, 3, 4, 5, 6])
    assert topic.read(0).gap is not None  # which makes the floor durable
    world.log.tick()
    before = wal_end(world)
    topic._state.context.moved_floors.add(topic._state)
    world.log.tick()
    assert wal_end(world) == before


def test_a_topic_that_expires_is_not_settled_until_that_is_durable() -> None:
    world = EngineHarness()
    topic = world.log.topic("a", ttl_ms=1_000)
    topic.append([1, 2])
    settled = [topic_operations(topic).is_floor_durable]
    world.clock.tick(1_001)
    settled.append(topic_operations(topic).is_floor_durable)
    assert topic.state().count == 0
    assert [*settled, topic_operations(topic).is_floor_durable] == [True, False, True]


def test_a_routed_topic_is_settled_when_everything_was_brought() -> None:
    world = EngineHarness()
    source, dest = world.log.topic("source"), world.log.topic("dest")
    world.log.router("r", "source", "dest")
    source.append([1, 2])
    settled = [topic_operations(dest).is_floor_durable]
    assert seqs(dest) == [1, 2]
    assert [*settled, topic_operations(dest).is_floor_durable] == [False, True]


def test_every_cursor_below_the_floor_gets_a_gap_once() -> None:
    """G70."""
    topic = EngineHarness(**TINY).log.topic("a", cap_records=4)
    topic.append([0] * 20)
    for cursor in range(21):
        page = topic.read(cursor, 3)
        assert page.gap == (Gap(cursor + 1, 16, "cap", 16 - cursor, 17, 20) if cursor < 16 else None)
        assert topic.read(page.next_from_seq, 3).gap is None
        assert [record.seq for record in page.records] == list(range(max(cursor, 16) + 1, 21))[:3]


@pytest.mark.parametrize("restart", RESTARTS)
def test_segments_below_the_floor_are_dropped_and_no_other(restart: Restart) -> None:
    """G75, G76, G84: what is kept on disk is the cap and one segment; the one that grows stays."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", cap_records=6)
    for number in range(40):
        topic.append(number)
        if number % 7 == 0:
            world.log.checkpoint()
    for _ in range(2):
        world.log.checkpoint()
    before = read_topic(topic)
    assert before.seqs == list(range(35, 41))
    files = world.files(under="topics/00000001")
    bases = sorted({int(path.rpartition("seg-")[2].split(".")[0]) for path in files})
    assert bases == [33, 37], "seqs 33 to 36 are needed for 35 and 36"
    assert read_topic(world.restart(restart).topic("a")) == before


@pytest.mark.parametrize("durability", CLASSES)
def test_memory_holds_the_cap_and_one_segment(durability: str) -> None:
    """G75: also where nothing is ever written to a file. Method: the parts that the index holds are counted, while
    time passes and the background work is done."""
    world = EngineHarness(segment_events_max=10, checkpoint_bytes=1 << 11, checkpoint_ms=1_000)
    topic = world.log.topic("a", durability=durability, cap_records=10)
    world.log.checkpoint()
    for number in range(300):
        topic.append(number)
        world.clock.tick(1)
        world.log.tick()
    held = sum(part.stop - part.base for part in topic._state.index.parts)
    assert held <= 10 + 10 + 40, "the cap, one segment, and what came since the last checkpoint"


def test_memory_of_an_ephemeral_topic_is_freed_when_all_of_it_expired() -> None:
    """Background work does it: nothing reads or writes the topic."""
    world = EngineHarness(segment_events_max=10)
    topic = world.log.topic("a", durability="ephemeral", ttl_ms=1_000)
    topic.append([b"x"] * 4)
    held = [sum(part.stop - part.base for part in topic._state.index.parts)]
    world.clock.tick(2_000)
    world.log.tick()
    held.append(sum(part.stop - part.base for part in topic._state.index.parts))
    assert held == [4, 0]
    assert topic.append(b"y").first_seq == 5
    assert read_topic(topic).gap == Gap(1, 4, "ttl", 4, 5, 5)


def test_a_record_whose_age_cannot_be_read_stays_and_is_reported() -> None:
    """The record that decides how far age goes is damaged: nothing expires, writes go on, and the damage is reported
    although nothing read the record."""
    world = EngineHarness(segment_events_max=100)
    topic = world.log.topic("a", durability="fsync", ttl_ms=60_000)
    for number in range(6):
        topic.append(b"record %d" % number)
        world.clock.tick(10_000)
    world.log.checkpoint()
    world.restart("kill")
    topic = world.log.topic("a", create=False)
    path = next(path for path in world.files(".data"))
    world.disk.flip_bit(path, world.disk.read_file(path).index(b"record 2"), 1)
    world.clock.tick(25_000)  # three records are older than a minute
    assert world.log.corruption() == ()
    assert topic.append(b"new").first_seq > 6
    assert topic._state.index.evict_floor == 1
    assert [found.topic for found in world.log.corruption()] == ["a"]
    assert not world.log.health().ok


@pytest.mark.parametrize("field", ["cap_records", "cap_bytes", "ttl_ms"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "5", None, 1 << 64])
def test_limits_are_whole_numbers(field: str, value: Any) -> None:
    """Contract 1.6."""
    world = EngineHarness()
    topic = world.log.topic("a")
    topic.append([1, 2])
    with pytest.raises(BadInput, match=field):
        world.log.topic("a", **{field: value})
    assert seqs(topic) == [1, 2]
