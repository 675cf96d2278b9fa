"""Bugs of routers that were found from outside. Each test failed before its fix; docs/bugs.md has a row for each."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engine.harness import RESTARTS, TINY, EngineHarness, Restart

from tidelog.engine import Engine

restarts = pytest.mark.parametrize("how", RESTARTS)
HOPS_MAX = 8


def rows(log: Engine, name: str, from_seq: int = 0) -> list[tuple[int, Any]]:
    """All records of a topic, page by page."""
    found, topic = [], log.topic(name)
    while True:
        page = topic.read(from_seq)
        found += [(record.seq, record.data) for record in page.records]
        from_seq = page.next_from_seq
        if page.caught_up:
            return found


def datas(log: Engine, name: str) -> list[Any]:
    return [data for _, data in rows(log, name)]


def gaps(log: Engine, name: str, from_seq: int = 0) -> list[tuple[int, int, str]]:
    """The gaps that a reader meets on its way to the head."""
    found, topic = list[tuple[int, int, str]](), log.topic(name)
    while True:
        page = topic.read(from_seq)
        if page.gap is not None:
            found.append((page.gap.gap_from, page.gap.gap_to, page.gap.reason))
        from_seq = page.next_from_seq
        if page.caught_up:
            return found


# ── dropped routers ───────────────────────────────────────────────────────────────────────────


@restarts
@pytest.mark.parametrize("shards", [1, 2])
def test_dropped_router_stays_dropped_after_a_crash(how: Restart, shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    for name in "sd":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append("s1")
    assert datas(world.log, "d") == ["s1"]
    world.log.topic("d").append("direct")
    world.log.checkpoint()
    world.log.drop_router("r")
    world.log.topic("s").append("s2")
    log = world.restart(how)
    assert log.routers() == []
    log.topic("s").append("s3")
    assert datas(log, "d") == ["s1", "direct"]
    assert log.report.damage == []


@restarts
@pytest.mark.parametrize("shards", [1, 3])
def test_new_router_of_a_target_reads_its_own_source_after_a_crash(how: Restart, shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    for name in "std":
        world.log.topic(name, durability="fsync")
    world.log.topic("t").append(["t0"] * 5)
    world.log.router("r", "s", "d")
    world.log.topic("s").append("s1")
    assert datas(world.log, "d") == ["s1"]
    world.log.topic("d").append("direct")
    world.log.checkpoint()
    world.log.drop_router("r")
    world.log.router("r2", "t", "d")
    world.log.topic("t").append("t1")
    world.log.topic("s").append("s2")
    before = rows(world.log, "d")
    assert [data for _, data in before] == ["s1", "direct", "t1"]
    log = world.restart(how)
    assert rows(log, "d") == before
    log.topic("s").append("s3")
    log.topic("t").append("t2")
    assert datas(log, "d") == ["s1", "direct", "t1", "t2"]
    assert [(state.router, state.forwarded_total) for state in log.routers()] == [("r2", 2)]
    assert log.report.damage == []


@restarts
def test_router_made_again_begins_at_the_head_after_a_crash(how: Restart) -> None:
    world = EngineHarness()
    for name in "sd":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append([1, 2])
    assert datas(world.log, "d") == [1, 2]
    world.log.drop_router("r")
    world.log.topic("s").append(3)
    world.log.router("r", "s", "d")
    world.log.topic("s").append(4)
    assert datas(world.log, "d") == [1, 2, 4]
    log = world.restart(how)
    assert datas(log, "d") == [1, 2, 4]
    assert [state.forwarded_total for state in log.routers()] == [1]


@restarts
def test_source_dropped_and_made_again_feeds_nothing_until_it_is_asked_to(how: Restart) -> None:
    world = EngineHarness()
    for name in "sd":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append("old")
    assert world.log.drop("s")
    world.log.topic("s", durability="fsync").append("new 1")
    log = world.restart(how)
    assert (log.routers(), datas(log, "d")) == ([], ["old"])
    log.router("r", "s", "d")
    log.topic("s").append("new 2")
    log = world.restart(how)
    assert datas(log, "d") == ["old", "new 2"]
    assert log.report.damage == []


# ── dropped targets ───────────────────────────────────────────────────────────────────────────


@restarts
@pytest.mark.parametrize("shards", [1, 2])
def test_source_of_a_dropped_target_can_be_dropped_after_a_crash(how: Restart, shards: int) -> None:
    world = EngineHarness(wal_shards=shards, **TINY)
    for name in "sd":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append([1, 2])
    assert datas(world.log, "d") == [1, 2]
    world.log.checkpoint()
    world.log.drop("d")
    log = world.restart(how)
    assert log.report.damage == []
    assert log.topic("s")._state.downstream == []
    log.topic("s", cap_records=2)
    log.topic("s").append(list(range(40)))
    for _ in range(3):
        log.topic("s").append("more")
        log.checkpoint()
    assert len([path for path in world.files(".data") if f"/{log.topic('s').id:08X}/" in path]) <= 3
    assert log.drop("s")
    log = world.restart(how)
    assert log.names() == []


@restarts
def test_both_ends_dropped_is_no_damage(how: Restart) -> None:
    world = EngineHarness(wal_shards=2)
    for name in "sd":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append([1, 2])
    assert datas(world.log, "d") == [1, 2]
    world.log.checkpoint()
    world.log.drop("d")
    world.log.drop("s")
    log = world.restart(how)
    assert (log.report.damage, log.names(), log.routers()) == ([], [], [])


# ── cycles ────────────────────────────────────────────────────────────────────────────────────


@restarts
@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_cycle_over_a_capped_topic_comes_to_rest(how: Restart, durability: str) -> None:
    """Records lost at the cap, and seqs without a record, went around for ever."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability=durability, cap_records=2)
    world.log.topic("b", durability=durability)
    world.log.router("ab", "a", "b")
    world.log.router("ba", "b", "a", allow_cycle=True)
    world.log.topic("a").append(list(range(6)))
    world.log.topic("b").append("b")
    for _ in range(3):
        world.log.tick()
    heads = [world.log.topic(name).head_seq for name in "ab"]
    assert max(heads) <= 7 * 2 * (HOPS_MAX + 1)
    before = {name: rows(world.log, name) for name in "ab"}
    log = world.restart(how)
    log.tick()
    assert [log.topic(name).state().count for name in "ab"] == [len(before[name]) for name in "ab"]
    if how != "crash" or durability == "fsync":
        assert {name: rows(log, name) for name in "ab"} == before
    log.topic("a").append("again")
    for _ in range(3):
        log.tick()
    assert max(log.topic(name).head_seq for name in "ab") <= 20 * 2 * (HOPS_MAX + 1)
    log.close()


def test_cycle_over_reserved_holes_comes_to_rest() -> None:
    """A restart leaves seqs without a record at the end of a topic of class `disk`: they are nobody's copies."""
    world = EngineHarness(head_reserve=100)
    for name in "ab":
        world.log.topic(name, durability="disk")
    world.log.router("ab", "a", "b")
    world.log.router("ba", "b", "a", allow_cycle=True)
    world.log.topic("a").append("x")
    world.log.tick()
    log = world.restart("kill")
    log.topic("a").append("y")
    for _ in range(5):
        log.tick()
    assert max(log.topic(name).head_seq for name in "ab") < 1000
    assert datas(log, "b").count("y") == 4


# ── seqs of copies ────────────────────────────────────────────────────────────────────────────


@restarts
@pytest.mark.parametrize("source", ["fsync", "disk"])
@pytest.mark.parametrize("target", ["fsync", "disk"])
def test_copy_keeps_its_seq_where_the_router_came_after_reserved_holes(how: Restart, source: str, target: str) -> None:
    """A group that had caught up never got the copy that moved below its cursor."""
    world = EngineHarness(head_reserve=50)
    world.log.topic("s", durability=source)
    world.log.topic("d", durability=target)
    world.log.topic("s").append("before")
    world.log.topic("d").append("before")
    log = world.restart("kill")
    log.router("r", "s", "d")
    log.topic("s").append(["one", "two"])
    before = rows(log, "d")
    group = log.topic("d").group("g")
    group.commit(before[-1][0])
    log.tick()
    log = world.restart(how)
    assert rows(log, "d") == before
    log.topic("s").append("three")
    assert [data for _, data in rows(log, "d", before[-1][0])] == ["three"]
    assert [record.data for record in log.topic("d").group("g").fetch().records] == ["three"]


def test_seq_of_a_copy_that_was_seen_is_never_given_again() -> None:
    """Target of class `disk` that rejects: room was made by a delete that a power cut took back."""
    world = EngineHarness(head_reserve=4)
    world.log.topic("s", durability="fsync")
    world.log.topic("d", durability="disk", cap_records=2, discard="reject")
    world.log.router("r", "s", "d")
    world.log.topic("s").append([1, 2, 3, 4])
    assert datas(world.log, "d") == [1, 2]
    world.log.tick()
    world.log.topic("d").delete(seqs=[999])  # deletes nothing; the next one has nothing new to say of the router
    world.log.topic("d").delete(before_seq=3)
    seen = dict(rows(world.log, "d"))
    assert list(seen.values()) == [3, 4]
    log = world.restart("crash")
    log.topic("d", cap_records=0)
    seq = log.topic("d").append("other").first_seq
    assert seq not in seen
    for at, data in rows(log, "d"):
        assert seen.get(at, data) == data


@pytest.mark.parametrize("before", ["memory", "disk", "fsync", "ephemeral"])
@pytest.mark.parametrize("after", ["memory", "disk", "fsync"])
def test_class_change_of_the_source_moves_no_copy(before: str, after: str) -> None:
    world = EngineHarness()
    world.log.topic("s", durability=before)
    world.log.topic("d", durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append([1, 2, 3])
    seen = rows(world.log, "d")
    world.log.topic("s", durability=after)
    world.log.topic("s").append(4)
    seen = rows(world.log, "d")
    assert [data for _, data in seen] == [1, 2, 3, 4]
    log = world.restart("crash")
    assert rows(log, "d") == seen
    assert log.report.damage == []


@pytest.mark.parametrize("how", ["kill", "crash"])
@pytest.mark.parametrize("upstream", ["memory", "ephemeral"])
def test_source_without_a_promise_is_no_damage_downstream(how: Restart, upstream: str) -> None:
    world = EngineHarness(wal_shards=2)
    world.log.topic("s", durability=upstream)
    for name in "de":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "s", "d")
    world.log.router("q", "d", "e")
    world.log.topic("s").append([1, 2, 3])
    before = {name: rows(world.log, name) for name in "de"}
    world.log.topic("e").append("direct")
    before["e"] = rows(world.log, "e")
    log = world.restart(how)
    assert log.report.damage == []
    assert {name: rows(log, name) for name in "de"} == before
    log.topic("s").append("again")
    assert datas(log, "e") == [1, 2, 3, "direct", "again"]


# ── what the source lost ──────────────────────────────────────────────────────────────────────


@restarts
def test_source_trim_leaves_direct_writes_of_the_target(how: Restart) -> None:
    world = EngineHarness()
    world.log.topic("s", durability="fsync", cap_records=2)
    world.log.topic("d", durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("d").append(["keep 1", "keep 2"])
    world.log.topic("s").append([1, 2, 3, 4, 5])
    assert datas(world.log, "d") == ["keep 1", "keep 2", 4, 5]
    world.log.topic("d").append("keep 3")
    expected = [(1, "keep 1"), (2, "keep 2"), (6, 4), (7, 5), (8, "keep 3")]
    for _ in range(2):
        assert rows(world.log, "d") == expected
        assert gaps(world.log, "d") == [(3, 5, "source_trim")]
        assert gaps(world.log, "d", 3) == [(4, 5, "source_trim")]
        assert gaps(world.log, "d", 5) == []
        table = world.log.topic("d").to_arrow()
        assert table.num_rows == 5
        assert b'"evicted":3' in table.schema.metadata[b"counts"]
        assert b"source_trim" in table.schema.metadata[b"gap"]
        assert [row.cause for row in world.log.topic("d").gaps()] == ["source_trim"]
        assert world.log.find_router("r").forwarded_total == 5  # type: ignore[union-attr]
        world.restart(how)


@restarts
def test_source_trim_leaves_jobs_and_held_records(how: Restart) -> None:
    world = EngineHarness()
    world.log.topic("s", durability="fsync", cap_records=1)
    jobs = world.log.queue("jobs", durability="fsync")
    world.log.topic("held", durability="fsync", cap_records=3)
    world.log.router("r", "s", "jobs")
    world.log.router("q", "s", "held")
    jobs.put(["job 1", "job 2"])
    world.log.topic("held").append("h1")
    world.log.topic("held").group("g").begin("earliest", hold_bytes=1 << 20)
    (job,) = jobs.claim("n", 1)
    world.log.topic("s").append([1, 2, 3])
    assert datas(world.log, "held") == ["h1", 3]
    assert jobs.counts()[:2] == (2, 1)
    log = world.restart(how)
    assert datas(log, "held") == ["h1", 3]
    assert not log.topic("held").group("g").hold_broken
    assert sum(log.queue("jobs").counts()[:2]) == 3
    assert job.data == "job 1"


@restarts
@pytest.mark.parametrize("shards", [1, 2])
def test_deleted_before_it_was_forwarded_stays_deleted_after_a_kill(how: Restart, shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    world.log.topic("s", durability="fsync")
    world.log.topic("d", durability="fsync", cap_records=1, discard="reject")
    world.log.router("r", "s", "d")
    world.log.topic("s").append(["one", "two", "three"], tag=["a", "b", "c"])
    assert datas(world.log, "d") == ["one"]
    world.log.topic("s").delete(match="b")
    world.log.topic("d", cap_records=9)
    log = world.restart(how)
    assert datas(log, "d") == ["one", "three"]
    assert gaps(log, "d") == []


@restarts
def test_expired_before_it_was_forwarded_is_a_gap(how: Restart) -> None:
    world = EngineHarness()
    world.log.topic("s", durability="fsync", ttl_ms=1000)
    world.log.topic("d", durability="fsync")
    world.log.router("r", "s", "d")
    world.log.topic("s").append(["old 1", "old 2"])
    world.clock.tick(5_000)
    assert datas(world.log, "d") == []
    assert gaps(world.log, "d") == [(1, 2, "source_trim")]
    world.log.topic("s").append("new")
    assert rows(world.log, "d") == [(3, "new")]
    log = world.restart(how)
    assert rows(log, "d") == [(3, "new")]
    assert gaps(log, "d") == [(1, 2, "source_trim")]
