"""The steps of retention, one by one: which floor is logged, when, and what is due next."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, EngineHarness
from tests.unit.engine.state_text import describe_wal

from tidelog.engine import Topic, retention
from tidelog.engine.topic_index import (
    Gap,
    GroupCursorState,
    Watermarks,
    find_broken_holds,
    find_gap,
    find_read_start,
    limit_eviction,
    trimmed_ranges_after,
)
from tidelog.engine.topic_state import TopicState
from tidelog.errors import DiskFull, Error, WriteFailed

FIRST = 1_700_000_000_000  # time of the first record
NOW = FIRST + 950


def opened(durability: str = "fsync", **settings: Any) -> tuple[EngineHarness, Topic, TopicState]:
    """A topic with six records, 100 ms apart, the first 950 ms ago."""
    world = EngineHarness(ledger_records=0, segment_age_ms_max=0)
    topic = world.log.topic("a", durability=durability, **settings)
    for number in range(6):
        topic.append(b"%d" % number)
        world.clock.tick(100)
    world.clock.tick(350)
    return world, topic, topic._state


def floors(world: EngineHarness) -> list[str]:
    """The floors that the WAL has, as its frames say."""
    lines = list(describe_wal(world.disk, set()))
    return [line.partition("EvictWatermark")[2] for line in lines if "EvictWatermark" in line]


def logged(evict: int, earliest: int, expiry: int) -> str:
    return f"(evict_floor={evict}, earliest_seq={earliest}, expiry_floor={expiry})"


# ── expiry ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("durability", CLASSES)
def test_expiry_logs_its_floor_and_applies_it(durability: str) -> None:
    """Of a ttl of 650 ms: the first three records are older."""
    world, topic, state = opened(durability, ttl_ms=650)
    assert retention.needs_expiry(state) is (durability != "ephemeral")
    retention.expire_records(state)
    is_logged = durability != "ephemeral"
    world.log.shards[0].sync()
    assert floors(world) == [logged(4, 4, 4)] * is_logged
    assert tuple(state.index.watermarks) == (0, 3, 0)
    assert (state.durable_floor, state.pending_floor) == (4 if is_logged else 1, None)
    assert not retention.needs_expiry(state)
    retention.expire_records(state)
    world.log.shards[0].sync()
    assert len(floors(world)) == is_logged, "the same floor is not logged again"
    assert [record.seq for record in topic.read(0).records] == [4, 5, 6]


@pytest.mark.parametrize("ttl_ms", [0, 950])
def test_a_topic_without_expired_records_logs_nothing(ttl_ms: int) -> None:
    world, _, state = opened(ttl_ms=ttl_ms)
    retention.expire_records(state)
    assert not retention.needs_expiry(state)
    assert (floors(world), state.index.evict_floor) == ([], 1)


def test_a_logged_floor_names_caps_and_age_apart_and_the_first_live_record() -> None:
    """Caps took two, age three; a delete took the fourth; then the source of a router lost the fifth."""
    world, topic, state = opened(cap_records=4, ttl_ms=650)
    topic.delete(seqs=[4])
    assert floors(world) == [logged(4, 4, 4)]
    state.index.watermarks = state.index.watermarks.raise_to("source", 5)
    retention.persist_floors([state])
    assert floors(world)[1:] == [logged(4, 6, 4)]
    state.index.watermarks = Watermarks(2)
    with state.lock:
        future = retention._submit_floor(state, 2)
        assert retention._submit_floor(state, 9) is future, "one at a time"
    future.wait()
    assert floors(world)[2:] == [logged(3, 5, 2)]


def test_a_floor_beyond_the_head_ends_at_the_head() -> None:
    world, _, state = opened(ttl_ms=650)
    commit = retention.WatermarkCommit(state, 20, 20)
    assert commit.apply(None) == 20
    assert (tuple(state.index.watermarks), state.durable_floor) == ((0, 6, 0), 20)
    assert commit.apply(error := WriteFailed("no")) is error
    lower = retention.WatermarkCommit(state, 9, 9)
    assert lower.apply(None) == 9
    assert state.durable_floor == 20, "it never falls"
    assert floors(world) == []


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_only_class_memory_does_not_sync_its_floor(durability: str) -> None:
    world, _, state = opened(durability, ttl_ms=650)
    world.log.shards[0].sync()
    start, frames = len(world.disk.trace), world.log.shards[0].stats.frames
    retention.expire_records(state)
    assert world.log.shards[0].stats.frames == frames + 1
    synced = [line for line in world.disk.trace[start:] if line.startswith("sync ") and "/wal/" in line]
    assert bool(synced) is (durability != "memory")


# ── background work ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ttl_ms", "held", "fails", "due"),
    [
        (650, False, False, NOW + 1_000),  # the fourth record is next, and one run a second is enough
        (650, False, True, NOW + 10_000),
        (650, True, False, NOW + 10_000),
        (5_000, False, False, FIRST + 5_001),
    ],
    ids=str,
)
def test_a_topic_is_due_when_its_oldest_record_expires_and_later_after_a_failure(
    ttl_ms: int, held: bool, fails: bool, due: int
) -> None:
    world, topic, state = opened(ttl_ms=5_000 if held else ttl_ms)
    if held:
        topic.group("g").begin("earliest", hold_bytes=1_000)
        world.log.topic("a", ttl_ms=ttl_ms)
    if fails:
        world.disk.fail("write", error=errno.ENOSPC, times=None, path="/wal")
    state.context.schedule.take_due(NOW + 10**9, 10)
    with state.lock:
        state.context.schedule.schedule(state, FIRST)
    failed = retention.run_due_maintenance(state.context)
    assert (list(failed), [isinstance(error, DiskFull) for error in failed.values()]) == (
        ([state], [True]) if fails else ([], [])
    )
    assert state.due_ms == due
    expected = 1 if fails or held or ttl_ms > 950 else 4
    assert state.index.evict_floor == expected
    assert retention.run_due_maintenance(state.context) == {}
    assert state.index.evict_floor == expected


def test_maintenance_without_due_topics_does_nothing() -> None:
    world, _, state = opened(ttl_ms=650)
    state.context.schedule.take_due(NOW + 10**9, 10)
    assert retention.run_due_maintenance(state.context) == {}
    assert (state.index.evict_floor, floors(world)) == (1, [])


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "fsync"])
@pytest.mark.parametrize("expired", [False, True])
def test_a_segment_of_expired_records_only_is_rolled(durability: str, expired: bool) -> None:
    """Of an ephemeral topic it goes at once; of others with the next checkpoint, which is asked for."""
    world, _, state = opened(durability, ttl_ms=650)
    if expired:
        world.clock.tick(10_000)
    state.context.needs_checkpoint = False
    world.log.tick()
    base = state.index.active_segment_base()
    assert base == (7 if expired else 1)
    held = sum(part.stop - part.base for part in state.index.parts)
    assert held == (0 if expired and durability == "ephemeral" else 6)
    assert state.index.count == (0 if expired else 3)


def test_an_empty_topic_is_not_rolled_and_asks_for_no_checkpoint() -> None:
    world = EngineHarness(ledger_records=0)
    state = world.log.topic("a", durability="fsync", ttl_ms=1)._state
    world.log.topic("b", durability="fsync").append(b"x")
    other = world.log.topic("b")._state
    for each, is_asked in ((state, False), (other, False)):
        each.context.needs_checkpoint = False
        with each.lock:
            retention._roll_if_all_expired(each)
        assert each.context.needs_checkpoint is is_asked
    other.index.count = 0
    with other.lock:
        retention._roll_if_all_expired(other)
    assert (other.context.needs_checkpoint, other.index.active_segment_base()) == (False, 1), "it has no age"


# ── floors that readers wait for ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("cursor", [0, 1, 2, 3])
def test_a_reader_waits_for_the_floor_above_its_cursor(durability: str, cursor: int) -> None:
    _, _, state = opened(durability, cap_records=4)
    assert state.index.evict_floor == 3
    waits = durability == "disk" and state.durable_floor < 3 and cursor < 2
    assert retention.is_floor_durable(state, cursor) is not waits
    retention.persist_floor(state, 3)
    assert retention.is_floor_durable(state, cursor)


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("always", [False, True])
def test_a_floor_is_made_durable_where_replay_would_not_derive_it(durability: str, always: bool) -> None:
    world, _, state = opened(durability, cap_records=4)
    state.durable_floor = 1
    retention.persist_floor(state, 3, always=always)
    is_logged = durability == "disk" or (always and durability != "ephemeral")
    world.log.shards[0].sync()
    assert floors(world)[-1:] == [logged(3, 3, 1)] * is_logged
    assert state.durable_floor == (3 if is_logged else 1)
    before = len(floors(world))
    retention.persist_floor(state, 3, always=always)
    retention.persist_gap_floor(state, None, 4)
    world.log.shards[0].sync()
    assert len(floors(world)) == before


def test_a_page_with_a_gap_makes_its_floor_durable() -> None:
    world, _, state = opened("disk", cap_records=4)
    state.durable_floor = 1
    retention.persist_gap_floor(state, Gap(1, 2, "cap", 2, 3, 6), 3)
    assert (state.durable_floor, floors(world)[-1]) == (3, logged(3, 3, 1))


def test_a_floor_that_cannot_be_logged_leaves_records_readable() -> None:
    world, topic, state = opened("disk", cap_records=4, ttl_ms=650)
    world.disk.fail("write", error=errno.ENOSPC, times=None, path="/wal")
    state.durable_floor = 1
    retention.persist_floor(state, 3)
    retention.refresh_for_read(state)
    assert state.durable_floor == 1
    assert state.index.count == 4
    with pytest.raises(Error):
        retention.expire_records(state)
    state.context.moved_floors.add(state)
    retention.queue_moved_floors(state.context)
    assert state.pending_floor is None or not state.context.moved_floors
    assert topic.head_seq == 6


@pytest.mark.parametrize(
    ("durability", "dropped", "durable", "queued"),
    [("disk", False, 1, True), ("disk", False, 3, False), ("disk", True, 1, False), ("fsync", False, 1, False)],
    ids=str,
)
def test_floors_that_moved_are_queued_once(durability: str, dropped: bool, durable: int, queued: bool) -> None:
    world, _, state = opened(durability, cap_records=4)
    world.log.shards[0].sync()
    before = len(floors(world))
    state.durable_floor, state.is_dropped = durable, dropped
    state.context.moved_floors.clear()
    state.context.moved_floors.add(state)
    retention.queue_moved_floors(state.context)
    assert not state.context.moved_floors
    world.log.shards[0].sync()
    assert floors(world)[before:] == [logged(3, 3, 1)] * queued


@pytest.mark.parametrize("durability", CLASSES)
def test_a_checkpoint_makes_all_floors_durable_with_one_sync(durability: str) -> None:
    world = EngineHarness(ledger_records=0)
    states = [world.log.topic(name, durability=durability, cap_records=2)._state for name in "abc"]
    for number, state in enumerate(states):
        Topic(state).append([b"x"] * (2 + number))
        state.durable_floor = 1
    states[2].is_dropped = True
    world.log.shards[0].sync()
    start = len(world.disk.trace)
    retention.persist_floors(states)
    synced = [line for line in world.disk.trace[start:] if line.startswith("sync ")]
    assert [state.durable_floor for state in states] == [1, 1 if durability == "ephemeral" else 2, 1]
    assert len(synced) == (durability in ("disk", "fsync"))


# ── watermarks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("marks", "floor"), [((0, 0, 0), 1), ((3, 0, 0), 4), ((0, 3, 0), 4), ((0, 0, 3), 4), ((1, 2, 5), 6)], ids=str
)
def test_the_evict_floor_is_one_past_the_highest_mark(marks: tuple[int, int, int], floor: int) -> None:
    assert Watermarks(*marks).evict_floor == floor


def test_marks_rise_one_by_one_and_end_with_the_head() -> None:
    marks = Watermarks().raise_to("cap", 3).raise_to("ttl", 5).raise_to("source", 4).raise_to("cap", 2)
    assert marks == (3, 5, 4)
    assert [marks.clamp_to(head) for head in (2, 4, 9)] == [(2, 2, 2), (3, 4, 4), (3, 5, 4)]


@pytest.mark.parametrize(
    ("cursor", "marks", "gap"),
    [
        (0, (0, 0, 0), None),
        (0, (3, 0, 0), Gap(1, 3, "cap", 3, 4, 9)),
        (2, (3, 0, 0), Gap(3, 3, "cap", 1, 4, 9)),
        (3, (3, 0, 0), None),
        (9, (3, 0, 0), None),
        (10, (3, 0, 0), Gap(1, 9, "recreated", 9, 4, 9)),
        (0, (0, 3, 0), Gap(1, 3, "ttl", 3, 4, 9)),
        (0, (1, 3, 0), Gap(1, 3, "mixed", 3, 4, 9)),
        (1, (1, 3, 0), Gap(2, 3, "ttl", 2, 4, 9)),
        (1, (3, 1, 0), Gap(2, 3, "cap", 2, 4, 9)),
        (0, (0, 0, 3), Gap(1, 3, "source_trim", 3, 4, 9)),
    ],
    ids=str,
)
def test_a_gap_reaches_from_the_cursor_to_the_floor(cursor: int, marks: tuple[int, int, int], gap: Gap | None) -> None:
    found = Watermarks(*marks)
    assert find_gap(cursor, 9, found.evict_floor, found) == gap
    start = cursor if gap is None else 3
    assert find_read_start(cursor, 9, found.evict_floor, found) == (start, gap)


def test_a_topic_that_was_made_again_and_is_empty_misses_one() -> None:
    assert find_gap(5, 0, 1, Watermarks()) == Gap(1, 0, "recreated", 1, 1, 0)
    assert find_read_start(5, 0, 1, Watermarks()) == (0, Gap(1, 0, "recreated", 1, 1, 0))


def test_a_read_after_a_gap_begins_at_the_first_live_record() -> None:
    gap = Gap(1, 3, "cap", 3, 4, 9)
    assert find_read_start(0, 9, 7, Watermarks(3)) == (6, gap)
    assert find_read_start(0, 9, 4, Watermarks(3)) == (3, gap)


@pytest.mark.parametrize(
    ("cursor", "trims", "gap"),
    [
        (0, [(4, 6)], Gap(1, 5, "cap", 5, 6, 20)),  # no live record between the floor and the trim
        (0, [(5, 6)], Gap(1, 3, "cap", 3, 4, 20)),
        (0, [(4, 6), (6, 8)], Gap(1, 7, "cap", 7, 8, 20)),
        (0, [(4, 6), (7, 8)], Gap(1, 5, "cap", 5, 6, 20)),
        (4, [(4, 6)], Gap(5, 5, "source_trim", 1, 6, 20)),
        (5, [(4, 6)], None),
        (3, [(4, 5), (5, 6)], Gap(4, 5, "source_trim", 2, 6, 20)),
        (4, [(4, 5), (5, 6)], Gap(5, 5, "source_trim", 1, 6, 20)),
    ],
    ids=str,
)
def test_a_gap_takes_in_trims_that_it_reaches(cursor: int, trims: list[tuple[int, int]], gap: Gap | None) -> None:
    assert find_gap(cursor, 20, 4, Watermarks(3), trims) == gap


def test_trims_after_a_cursor_are_those_of_which_something_is_ahead() -> None:
    trims = [(3, 5), (7, 9)]
    found = [trimmed_ranges_after(cursor, trims) for cursor in (0, 2, 3, 4, 7, 8)]
    assert found == [trims, trims, trims, trims[1:], trims[1:], []]
    assert trimmed_ranges_after(0, []) == []


@pytest.mark.parametrize(
    ("holds", "limit"),
    [
        ([], 5),
        ([(0, 0)], 5),  # without a hold
        ([(0, 4)], 1),  # four records of one byte each
        ([(0, 3)], 5),  # its quota does not suffice
        ([(2, 2)], 3),
        ([(2, 1)], 5),
        ([(4, 9)], 5),
        ([(3, 9)], 4),
        ([(0, 3), (2, 2)], 3),  # the slowest one that suffices
        ([(2, 2), (0, 4)], 1),
        ([(9, 9), (1, 9)], 2),
    ],
    ids=str,
)
def test_the_slowest_group_whose_quota_suffices_limits_eviction(holds: list[tuple[int, int]], limit: int) -> None:
    _, _, state = opened()
    cursors = [GroupCursorState(seq, 0, hold) for seq, hold in holds]
    assert limit_eviction(state.index, cursors, 5) == limit


def test_a_broken_hold_limits_nothing_and_breaks_once() -> None:
    _, _, state = opened(cap_records=4)
    assert state.index.evict_floor == 3
    broken, whole = GroupCursorState(1, 0, 9), GroupCursorState(2, 0, 9)
    assert [each.is_hold_broken(3) for each in (broken, whole, GroupCursorState(0, 0))] == [True, False, False]
    assert limit_eviction(state.index, [broken], 5) == 5
    assert limit_eviction(state.index, [broken, whole], 5) == 3
    groups = {"b": broken, "a": GroupCursorState(0, 0, 1), "c": whole, "free": GroupCursorState(0, 0)}
    assert find_broken_holds(groups, 1, 3) == ["a", "b"]
    assert find_broken_holds(groups, 2, 3) == ["b"]
    assert find_broken_holds(groups, 3, 4) == ["c"]


def test_an_eviction_that_fails_is_the_result_of_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = EngineHarness()
    topic = harness.log.topic("t")
    topic.append([1, 2, 3])
    state, failure = topic._state, WriteFailed("the index does not read")

    def evict(*_: object) -> None:
        raise failure

    monkeypatch.setattr(TopicState, "evict", evict)
    commit = retention.WatermarkCommit(state, 2, 2)
    assert commit.apply(None) is failure
    assert state.durable_floor == 2
    assert state.pending_floor is None
