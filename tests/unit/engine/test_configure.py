"""Creating and configuring topics: the contract's sections 1.7, 1.12, 1.13, 2.1–2.3."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engine.harness import RESTARTS, TINY, EngineHarness, Restart, datas, seqs

import tidelog
from tidelog.database import engine_of
from tidelog.disk.memory import MemoryDisk
from tidelog.engine import TopicConfig
from tidelog.errors import AlreadyExists, BadInput, DiskFull, Throttled, TopicExists, TopicNotFound

BAD: list[dict[str, Any]] = [
    *({"durability": "ram"}, {"durability": "FSYNC"}, {"durability": 1}, {"durability": True}, {"durable": 1}),
    *(
        {"cap_records": -1},
        {"cap_bytes": 1.0},
        {"ttl_ms": "5"},
        {"ttl_ms": True},
        {"ttl_ms": None},
        {"ttl_ms": 1 << 64},
    ),
    *({"discard": "new"}, {"discard": None}, {"type": "stack"}, {"priority": "high"}, {"priority": 1 << 31}),
    *({"dedupe_node": 0}, {"auto_create": "yes"}, {"lease_ms": -1}, {"dead_letter": "/etc"}, {"dead_letter": 5}),
    *({"ttl": 5}, {"cap": 5}, {"Durability": "fsync"}),
]


def test_configuring_replaces_and_asking_for_a_topic_merges() -> None:
    """Contract 2.1: fields missing from a PUT revert to defaults."""
    log = EngineHarness().log
    topic, created = log.configure("a", {"ttl_ms": 5_000, "cap_records": 7})
    assert created
    assert (topic.config.ttl_ms, topic.config.cap_records) == (5_000, 7)
    log.topic("a", cap_records=9)
    assert (topic.config.ttl_ms, topic.config.cap_records) == (5_000, 9)
    _, created = log.configure("a", {"cap_bytes": 1})
    assert not created
    assert topic.config == TopicConfig(cap_bytes=1)
    log.configure("a", {})
    assert topic.config == TopicConfig()


def test_a_topic_that_is_there_is_given_as_it_is() -> None:
    """Contract 1.11: asking again changes nothing, not even the disk."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync", cap_records=3)
    before = world.disk.op_count
    again = world.log.topic("a", cap_records=3)
    assert (again.id, again.epoch, again.config) == (topic.id, topic.epoch, topic.config)
    world.log.configure("a", {"durability": "fsync", "cap_records": 3})
    assert world.disk.op_count == before


def test_a_topic_that_is_not_there_is_made_only_where_that_is_allowed() -> None:
    world = EngineHarness()
    before = world.disk.digest()
    with pytest.raises(TopicNotFound, match="'a'"):
        world.log.topic("a", create=False)
    assert (world.log.topics(), world.disk.digest()) == ([], before)
    assert world.log.topic("a").head_seq == 0


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_a_value_that_no_topic_can_have_is_refused(fields: dict[str, Any]) -> None:
    """Contract 1.6, 1.13: nothing is created, nothing is changed, and the engine goes on."""
    world = EngineHarness()
    topic = world.log.topic("there", cap_records=3)
    topic.append([1, 2])
    before, config = world.disk.digest(), topic.config
    for name in ("there", "new"):
        with pytest.raises(BadInput):
            world.log.topic(name, **fields)
        with pytest.raises(BadInput):
            world.log.configure(name, fields)
    assert [state.topic for state in world.log.topics()] == ["there"]
    assert (world.disk.digest(), topic.config) == (before, config)
    topic.append(3)
    assert datas(topic) == [1, 2, 3]


@pytest.mark.parametrize(
    "name", ["", ".a", "-a", "a/b", "a b", "ä", "a" * 256, "a\n", "../a", "a\0", ":a", 5, None, b"a", True, ["a"], {}]
)
def test_a_name_that_no_topic_can_have_is_refused(name: Any) -> None:
    """Contract 1.7."""
    world = EngineHarness()
    before = world.disk.digest()
    with pytest.raises(BadInput):
        world.log.topic(name)
    with pytest.raises(BadInput):
        world.log.configure(name, {})
    assert (world.log.topics(), world.disk.digest()) == ([], before)
    assert world.log.topic("a").append(1).first_seq == 1


@pytest.mark.parametrize("name", ["a", "A", "0", "a" * 255, "a.b_c:d-e", "9..", "CON", "a:"])
def test_a_name_is_kept_as_it_is(name: str) -> None:
    """Contract 1.7, S2: names of topics never reach the file system."""
    world = EngineHarness(**TINY)
    world.log.topic(name, durability="fsync").append(1)
    world.log.checkpoint()
    assert not [path for path in world.files() if name in path.split("/")]
    assert datas(world.restart("crash").topic(name, create=False)) == [1]


def test_names_that_differ_in_case_are_different_topics() -> None:
    log = EngineHarness().log
    assert log.topic("Aa").id != log.topic("aA").id
    assert len(log.topics()) == 2


@pytest.mark.parametrize(("first", "then"), [("log", "queue"), ("queue", "log")])
def test_a_type_never_changes(first: str, then: str) -> None:
    """Contract 1.13, 2.1: so an empty PUT on a queue is refused."""
    world = EngineHarness()
    topic = world.log.topic("a", type=first)
    with pytest.raises(TopicExists) as refused:
        world.log.topic("a", type=then)
    assert isinstance(refused.value, AlreadyExists)
    with pytest.raises(TopicExists):
        world.log.configure("a", {"type": then})
    if first == "queue":
        with pytest.raises(TopicExists):
            world.log.configure("a", {})
    assert topic.config.type == first


def test_a_queue_is_not_its_own_dead_letter() -> None:
    """Contract 1.13."""
    log = EngineHarness().log
    with pytest.raises(BadInput, match="dead_letter"):
        log.topic("q", type="queue", dead_letter="q")
    assert log.topics() == []
    log.topic("q", type="queue", dead_letter="other")
    with pytest.raises(BadInput):
        log.topic("q", dead_letter="q")
    assert log.topic("q").config.dead_letter == "other"


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_config_outlives_a_restart_in_every_field(restart: Restart, checkpointed: bool) -> None:
    """Contract 4."""
    world = EngineHarness()
    fields: dict[str, Any] = {
        "type": "queue",
        "ttl_ms": 1 << 63,
        "cap_records": 5,
        "cap_bytes": 6,
        "discard": "reject",
        "durability": "memory",
        "priority": -7,
        "auto_priority": False,
        "auto_create": False,
        "idempotency_window_ms": 9,
        "dedupe_node": False,
        "lease_ms": 500,
        "claim_jitter_ms": 20,
        "max_deliveries": 3,
        "dead_letter": "dead",
        "leases_durable": True,
    }
    config = world.log.topic("a", **fields).config
    world.log.topic("b", cap_records=1)
    world.log.configure("b", {"cap_records": 2})
    if checkpointed:
        world.log.checkpoint()
    log = world.restart(restart)
    assert log.topic("a").config == config
    assert {name: getattr(log.topic("a").config, name) for name in fields} == fields
    assert log.topic("b").config.cap_records == 2


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_config_that_could_not_be_logged_is_not_in_force(restart: Restart | None) -> None:
    """Contract 2.1: log first, then apply."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2, 3])
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        world.log.topic("a", cap_records=1)
    assert (topic.config.cap_records, seqs(topic)) == (0, [1, 2, 3])
    if restart is not None:
        topic = world.restart(restart).topic("a")
    assert (topic.config.cap_records, seqs(topic)) == (0, [1, 2, 3])
    world.log.topic("a", cap_records=1)
    assert seqs(topic) == [3]


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_topic_that_could_not_be_logged_is_not_there(restart: Restart | None) -> None:
    """Contract 4: durable before it is acked."""
    world = EngineHarness(**TINY)
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        world.log.topic("a")
    assert world.log.topics() == []
    if restart is not None:
        world.restart(restart)
    assert world.log.topics() == []
    topic = world.log.topic("a")
    topic.append(1)
    assert datas(topic) == [1]
    again = world.restart("reopen")
    assert ([info.topic for info in again.topics()], again.report.damage) == (["a"], [])
    assert datas(again.topic("a")) == [1]


def test_topics_are_listed_by_name() -> None:
    """Contract 1.10, 2.3: by bytes, and with a prefix."""
    log = EngineHarness().log
    for name in ("b", "a", "a.1", "a.10", "a.2", "B", "a-1", "ab"):
        log.topic(name)
    assert [state.topic for state in log.topics()] == ["B", "a", "a-1", "a.1", "a.10", "a.2", "ab", "b"]
    assert [state.topic for state in log.topics("a.")] == ["a.1", "a.10", "a.2"]
    assert log.topics("z") == []


def test_the_list_shows_what_each_topic_holds() -> None:
    """Contract 2.3: retention applied per row."""
    world = EngineHarness()
    topic = world.log.topic("a", ttl_ms=10, cap_records=3)
    topic.append([b"1", b"22", b"333", b"4444"])
    (state,) = world.log.topics()
    assert (state.id, state.epoch, state.head_seq, state.earliest_seq, state.count, state.bytes) == (1, 1, 4, 2, 3, 9)
    assert state.last_write_ms == world.clock.now_us() // 1000
    world.clock.tick(11)
    (state,) = world.log.topics()
    assert (state.earliest_seq, state.count, state.bytes) == (5, 0, 0)


def test_there_are_no_more_topics_than_allowed() -> None:
    """Contract 1.12: any new one is refused, one that is there always passes."""
    world = EngineHarness(topics_max=2)
    world.log.topic("a")
    world.log.topic("b")
    before = world.disk.digest()
    with pytest.raises(Throttled) as refused:
        world.log.topic("c")
    assert (refused.value.limit, refused.value.max) == ("topics", 2)
    with pytest.raises(Throttled):
        world.log.configure("c", {})
    assert world.disk.digest() == before
    world.log.topic("a", cap_records=1)
    world.log.drop("a")
    world.log.topic("c")
    log = world.restart("reopen", topics_max=1)
    assert [state.topic for state in log.topics()] == ["b", "c"], "what is there stays"
    with pytest.raises(Throttled):
        log.topic("d")


def test_a_window_that_is_changed_counts_at_once() -> None:
    """Contract 1.11."""
    world = EngineHarness()
    topic = world.log.topic("a", idempotency_window_ms=100)
    topic.append(1, key="k")
    world.clock.tick(50)
    world.log.topic("a", idempotency_window_ms=10)
    assert not topic.append(2, key="k").deduped


@pytest.mark.parametrize(
    "configure",
    [
        lambda log: log.topic("q", type="queue", max_deliveries=3),
        lambda log: log.queue("q", max_deliveries=3),
        lambda log: log.configure("q", {"type": "queue", "max_deliveries": 3}),
        lambda log: log.queue("with", dead_letter=None),
    ],
    ids=["topic", "queue", "configure", "later"],
)
def test_limit_of_deliveries_needs_a_dead_letter(configure: Callable[[tidelog.Database], object]) -> None:
    """A job that reached the limit would have no place to go."""
    with tidelog.open("data", disk=MemoryDisk(), threads=False, wal_file_bytes=1 << 16) as log:
        log.queue("with", max_deliveries=3, dead_letter="dead")
        with pytest.raises(BadInput, match="max_deliveries is 3 and dead_letter null"):
            configure(log)
        assert log.find("q") is None
        assert log.queue("with").topic.config.dead_letter == "dead"


def test_limit_of_deliveries_of_an_older_directory_stays_valid() -> None:
    """It has no effect, and other fields can be set."""
    with tidelog.open("data", disk=MemoryDisk(), threads=False, wal_file_bytes=1 << 16) as log:
        engine_of(log).configure("q", {"type": "queue", "max_deliveries": 3})
        log.queue("q", ttl_ms=5)
        config = log.queue("q").topic.config
        assert (config.max_deliveries, config.ttl_ms) == (3, 5)
        log.topic("log", max_deliveries=3)  # has no meaning there
