"""Groups of consumers (E7): where they stand, how they move, what they hold."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.harness import (
    CLASSES,
    LOGGED,
    RESTARTS,
    TIMEOUT_S,
    TINY,
    EngineHarness,
    InterposingDisk,
    Restart,
    read_topic,
    running,
)

from tidelog import Group, Topic, timestamp_ms
from tidelog.engine import Lag, Preview
from tidelog.engine.topic import topic_operations
from tidelog.engine.topic_index import GroupCursorState, TopicIndex, limit_eviction
from tidelog.errors import BadInput, Closed, CursorConflict, DiskFull, ReadOnly, Throttled, TopicNotFound


def places(topic: Topic) -> dict[str, int]:
    return {group.name: group.position for group in topic.groups()}


def filled(world: EngineHarness, count: int = 10, **config: Any) -> tuple[Topic, Group]:
    topic = world.log.topic("t", **config)
    if count:
        topic.append([b"%02d" % number for number in range(count)])
    return topic, topic.group("g")


# Where it stands ------------------------------------------------------------------------------------


def test_a_group_that_never_moved_is_not_there_and_reads_from_the_start() -> None:
    topic, group = filled(EngineHarness())
    assert (group.exists, group.position, group.hold_bytes, group.hold_broken) == (False, 0, 0, False)
    assert [record.seq for record in group.fetch(3).records] == [1, 2, 3]
    assert topic.groups() == []
    assert group.state().last_commit_ms is None
    assert repr(group) == "<group 'g' of 't', at 0>"


@pytest.mark.parametrize("durability", CLASSES)
def test_a_commit_moves_it_and_a_fetch_does_not(durability: str) -> None:
    topic, group = filled(EngineHarness(), durability=durability)
    page = group.fetch(4)
    assert group.position == 0
    assert group.commit(page.next_from_seq) == 4
    assert (group.exists, group.position) == (True, 4)
    assert [record.seq for record in group.fetch().records] == [5, 6, 7, 8, 9, 10]
    assert topic.group("g").position == 4, "another handle, the same group"
    assert places(topic) == {"g": 4}


def test_lag_is_of_live_records_and_of_the_oldest_of_them() -> None:
    world = EngineHarness(**TINY)
    topic, group = filled(world, 0, durability="fsync")
    for number in range(12):
        topic.append(b"x" * number, meta={"m": number})
        world.clock.tick(1_000)
        if number == 6:
            world.log.checkpoint()
    group.commit(4)
    topic.delete(seqs=[5, 9])
    live = [record for record in read_topic(topic).records if record.seq > 4]
    size = sum(len(record.data) + len(b'{"m":%d}' % (record.seq - 1)) for record in live)
    assert group.lag() == Lag(6, size, 7.0), "seq 6 was written 7 s ago"
    group.commit(12)
    assert group.lag() == Lag(0, 0, 0.0)
    world.clock.tick(5_000)
    topic.append(b"new")
    world.clock.tick(250)
    assert group.lag() == Lag(1, 3, 0.25)


def test_lag_does_not_count_what_is_too_old() -> None:
    world = EngineHarness()
    _, group = filled(world, 3, ttl_ms=1_000)
    world.clock.tick(2_000)
    assert group.lag() == Lag(0, 0, 0.0)


# Moving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq", "expect", "words"),
    [
        (11, None, "the head is 10"),
        (1 << 62, None, "the head is 10"),
        (3, None, "only a reset moves it back"),
        (6, 4, "it is at 5, not at 4"),
        (6, 6, "it is at 5, not at 6"),
        (5, 0, "it is at 5, not at 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(seq: int, expect: int | None, words: str) -> None:
    world = EngineHarness()
    topic, group = filled(world, durability="fsync")
    group.commit(5)
    ops = world.disk.op_count
    for refused in (group.commit, group.would_commit):
        with pytest.raises(CursorConflict, match=words) as caught:
            refused(seq, expect=expect)
        assert (caught.value.position, caught.value.head_seq, caught.value.seq) == (5, 10, seq)
    assert (places(topic), world.disk.op_count) == ({"g": 5}, ops)


def test_what_is_expected_is_compared_and_set() -> None:
    _, group = filled(EngineHarness())
    assert group.commit(2, expect=0) == 2
    assert group.commit(4, expect=2) == 4
    assert group.commit(4) == 4, "a second time is fine"
    assert group.would_commit(7, expect=4) == Preview(4, 7, 3, 6, None)
    assert group.position == 4


def test_of_many_that_expect_the_same_one_wins() -> None:
    world = EngineHarness()
    _, group = filled(world, durability="fsync")
    won: list[int] = []

    def race(seq: int) -> None:
        with suppress(CursorConflict):
            won.append(group.commit(seq, expect=0))

    with running(*(lambda seq=seq: race(seq) for seq in range(1, 9))):
        pass
    assert won == [group.position]


class Watched(dict[str, Any]):
    """Detects a check for a pending move."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = Event()

    def get(self, name: str, default: Any = None) -> Any:
        self.looked.set()
        return super().get(name, default)


def test_a_move_waits_for_the_one_before_it_and_looks_again() -> None:
    """Method: the second caller comes while the first one's frame is being written."""
    world = EngineHarness()
    topic, group = filled(world, durability="fsync")
    moving = topic._state.pending_cursor_commits = Watched()
    outcome: list[object] = []

    def second() -> None:
        try:
            outcome.append(group.commit(2, expect=0))
        except CursorConflict as error:
            outcome.append(error)

    late = Thread(target=second, daemon=True)

    def meanwhile(_: int) -> None:
        world.disk.on_op = None
        moving.looked.clear()
        late.start()
        assert moving.looked.wait(TIMEOUT_S)

    world.disk.on_op = meanwhile
    group.commit(1, expect=0)
    late.join(TIMEOUT_S)
    assert isinstance(outcome[0], CursorConflict)
    assert group.position == 1


def test_a_reset_goes_anywhere_and_a_preview_nowhere() -> None:
    world = EngineHarness()
    topic, group = filled(world, 0, durability="fsync")
    for _ in range(8):
        world.clock.tick(1_000)
        topic.append(b"12345")
    topic.delete(before_seq=3)
    noon = world.clock.now_us() // 1000
    group.commit(6)
    ops = world.disk.op_count
    assert group.preview("earliest") == Preview(6, 2, 4, 20, None)
    assert group.preview("latest") == Preview(6, 8, 2, 10, None)
    assert group.preview(0) == Preview(6, 0, 4, 20, None)
    assert group.preview(timestamp_ms(noon - 3_000)) == Preview(6, 4, 2, 10, None), "seq 5 was written then"
    assert group.preview(timestamp_ms(noon + 1)) == Preview(6, 8, 2, 10, None)
    assert (group.position, world.disk.op_count) == (6, ops)
    assert group.reset("earliest") == group.position == 2
    assert group.reset("latest") == group.position == 8
    assert group.reset(timestamp_ms(noon - 3_000)) == group.position == 4
    assert group.reset(1) == group.position == 1
    with pytest.raises(CursorConflict, match="the head is 8"):
        group.reset(9)
    assert group.position == 1


def test_a_preview_reports_the_gap() -> None:
    topic, group = filled(EngineHarness(), 10, cap_records=4)
    group.commit(8)
    found = group.preview(2)
    assert (found.records, found.bytes) == (2, 4)
    assert found.gap == topic.read(2).gap


@pytest.mark.parametrize("to", ["first", None, True, 1.5, b"1", -1, timestamp_ms(-1)])
def test_no_place(to: object) -> None:
    _, group = filled(EngineHarness())
    with pytest.raises(BadInput):
        group.reset(to)  # type: ignore[arg-type]
    assert not group.exists


@pytest.mark.parametrize("name", ["", "_a", ".a", "a b", "a" * 256, "ä", None, 7])
def test_no_name(name: object) -> None:
    topic, _ = filled(EngineHarness())
    with pytest.raises(BadInput, match="cannot name a group"):
        topic.group(name)  # type: ignore[arg-type]


def test_a_group_that_is_deleted_starts_anew() -> None:
    topic, group = filled(EngineHarness())
    assert group.delete() is False
    group.commit(5)
    assert group.delete() is True
    assert (group.exists, group.position, topic.groups()) == (False, 0, [])
    group.commit(1)
    assert group.position == 1


def test_a_topic_has_so_many_groups() -> None:
    world = EngineHarness(groups_max=2)
    topic, _ = filled(world)
    topic.group("a").commit(1)
    topic.group("b").commit(1)
    with pytest.raises(Throttled):
        topic.group("c").commit(1)
    topic.group("a").commit(2)
    topic.group("b").delete()
    topic.group("c").commit(1)
    assert places(topic) == {"a": 2, "c": 1}


# Restarts and errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_commit_of_class_fsync_survives_everything(restart: Restart, checkpoint: bool) -> None:
    world = EngineHarness(**TINY)
    topic, group = filled(world, durability="fsync")
    group.commit(3)
    topic.group("gone").commit(2)
    if checkpoint:
        world.log.checkpoint()
    group.commit(7)
    topic.group("back").commit(9)
    topic.group("back").reset(1)
    topic.group("gone").delete()
    topic.group("held").hold(50)
    before = group.state()
    found = world.restart(restart).topic("t")
    assert places(found) == {"back": 1, "g": 7, "held": 0}
    assert found.group("held").hold_bytes == 50
    assert found.group("g").state() == before


@pytest.mark.parametrize("durability", LOGGED)
def test_a_commit_of_every_logged_class_survives_a_kill(durability: str) -> None:
    world = EngineHarness()
    _, group = filled(world, durability=durability)
    group.commit(6)
    assert places(world.restart("kill").topic("t")) == {"g": 6}


def test_groups_of_an_ephemeral_topic_are_in_the_checkpoint() -> None:
    world = EngineHarness()
    _, group = filled(world, durability="ephemeral")
    group.commit(6)
    assert places(world.restart("reopen").topic("t")) == {"g": 6}
    world.log.topic("t").group("g").commit(8)
    assert places(world.restart("kill").topic("t")) == {"g": 6}


def test_a_group_of_an_empty_ephemeral_topic_is_enough_for_a_last_checkpoint() -> None:
    world = EngineHarness()
    topic, group = filled(world, 0, durability="ephemeral")
    world.log.checkpoint()
    group.commit(0)
    assert places(topic) == {"g": 0}
    assert places(world.restart("reopen").topic("t")) == {"g": 0}


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_topic_that_is_made_again_has_no_groups(restart: Restart) -> None:
    world = EngineHarness()
    topic, group = filled(world, durability="fsync")
    group.commit(5)
    world.log.drop("t")
    with pytest.raises(TopicNotFound):
        group.commit(6)
    with pytest.raises(TopicNotFound):
        topic.groups()
    again, _ = filled(world, 2, durability="fsync")
    assert again.groups() == []
    assert world.restart(restart).topic("t").groups() == []


def test_a_reader_sees_groups_and_moves_none() -> None:
    world = EngineHarness()
    _, group = filled(world)
    group.commit(4)
    reader = world.reader()
    found = reader.topic("t").group("g")
    assert (found.position, found.lag().records) == (4, 6)
    for move in (lambda: found.commit(5), lambda: found.reset("latest"), lambda: found.hold(1), found.delete):
        with pytest.raises(ReadOnly):
            move()
    assert found.preview("latest").records == 6
    world.log.close()
    with pytest.raises(Closed):
        group.commit(5)


def test_a_commit_that_fails_leaves_it_where_it_was() -> None:
    world = EngineHarness()
    topic, group = filled(world, durability="fsync")
    group.commit(2)
    world.disk.fail("write", at=1, error=28)
    with pytest.raises(DiskFull):
        group.commit(5, expect=2)
    assert places(topic) == {"g": 2}
    assert group.commit(6, expect=2) == 6
    assert places(world.restart("crash").topic("t")) == {"g": 6}


def test_a_fetch_waits_for_records_and_reports_a_gap() -> None:
    world = EngineHarness()
    topic, group = filled(world, 4, cap_records=2)
    page = group.fetch()
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to, page.next_from_seq) == (1, 2, 4)
    group.commit(4)
    found: list[int] = []
    with running(lambda: found.extend(record.seq for record in group.fetch(timeout=30).records)):
        topic.append(b"woken")
    assert found == [5]
    topic.append(b"mine", node="me")
    assert [record.seq for record in group.fetch(node="me").records] == [5]


def test_a_queue_has_groups_too() -> None:
    _, group = filled(EngineHarness(), type="queue")
    group.commit(3)
    assert group.lag().records == 7


# Holds ----------------------------------------------------------------------------------------------


def test_a_hold_keeps_what_was_not_read_and_lets_go_of_what_was() -> None:
    world = EngineHarness()
    topic, group = filled(world, 0, durability="fsync", cap_records=3)
    group.hold(100)
    topic.append([b"12"] * 10)
    assert (topic.earliest_seq, group.hold_broken) == (1, False)
    assert [record.seq for record in group.fetch().records] == list(range(1, 11))
    group.commit(5)
    assert topic.earliest_seq == 6, "what it has read goes at once"
    group.commit(9)
    assert topic.earliest_seq == 8, "the cap keeps three"
    assert world.log.holds_broken == 0


def test_a_hold_past_its_quota_is_broken_and_says_so() -> None:
    world = EngineHarness()
    topic, group = filled(world, 0, durability="fsync", cap_records=2)
    group.hold(10)
    topic.append([b"12"] * 7)
    assert (topic.earliest_seq, group.hold_broken) == (1, False), "five of two bytes are ten"
    topic.append(b"1")
    assert (topic.earliest_seq, group.hold_broken, world.log.holds_broken) == (7, True, 1)
    (row,) = topic.gaps()
    assert (row.cause, row.first, row.last, row.records, row.about) == ("hold_exceeded", 1, 6, 6, "g")
    topic.append([b"12"] * 4)
    assert topic.earliest_seq == 11, "a broken hold holds nothing"
    assert [each.cause for each in topic.gaps()] == ["hold_exceeded", "cap"]
    group.reset("earliest")
    assert not group.hold_broken
    topic.append([b"12"] * 4)
    assert (topic.earliest_seq, group.hold_broken, world.log.holds_broken) == (11, False, 1)


def test_the_slowest_group_that_can_decides() -> None:
    topic, _ = filled(EngineHarness(), 0, durability="fsync", cap_records=1)
    topic.append([b"12"] * 1)
    poor, rich, idle = (topic.group(name) for name in ("poor", "rich", "idle"))
    poor.hold(4)
    rich.hold(1_000)
    idle.commit(0)
    rich.commit(1)
    topic.append([b"12"] * 4)
    assert (topic.earliest_seq, poor.hold_broken, rich.hold_broken, idle.hold_broken) == (2, True, False, False)
    rich.delete()
    assert topic.earliest_seq == 5, "and with the last one goes what it held"


def test_age_is_held_up_too() -> None:
    world = EngineHarness()
    topic, group = filled(world, 5, durability="fsync", ttl_ms=1_000)
    group.hold(8)
    group.commit(1)
    world.clock.tick(5_000)
    assert topic.earliest_seq == 2
    assert topic_operations(topic).is_floor_durable, "what is held is not due: a look waits for no disk"
    topic.append(b"new")
    world.clock.tick(500)
    assert (topic.earliest_seq, group.hold_broken) == (2, False)
    world.clock.tick(5_000)
    assert (topic.earliest_seq, group.hold_broken) == (7, True), "with the new one it would be eleven bytes"
    assert [row.cause for row in topic.gaps()] == ["ttl", "hold_exceeded"]


def test_a_topic_that_rejects_is_not_held() -> None:
    world = EngineHarness()
    topic, group = filled(world, 4, durability="fsync", cap_records=4, discard="reject")
    group.hold(1_000)
    world.log.topic("t", cap_records=2)
    assert topic.earliest_seq == 3, "its caps were lowered"


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_what_was_held_and_what_was_lost_is_the_same_after_a_restart(durability: str, restart: Restart) -> None:
    """Method: a hold that breaks, deletes that would bring the topic back under its cap, a reader that saw the gap."""
    world = EngineHarness(**TINY)
    topic, group = filled(world, 0, durability=durability, cap_records=3)
    group.hold(12)
    topic.append([b"12"] * 8)
    assert topic.earliest_seq == 1
    topic.append([b"12"] * 4)
    floor = topic.evict_floor
    assert (floor, group.hold_broken) == (10, True)
    topic.delete(seqs=[10, 11])
    found = world.restart(restart).topic("t")
    assert found.evict_floor >= floor
    assert found.group("g").hold_broken


def test_a_floor_that_a_restart_works_out_is_durable_before_it_is_shown() -> None:
    """Method: no read happens while the hold breaks; the restart finds the floor; deletes then free space under the
    cap, so that the next one would find another."""
    world = EngineHarness(**TINY)
    topic, group = filled(world, 0, durability="fsync", cap_records=3)
    group.hold(12)
    topic.append([b"12"] * 8)
    topic.append([b"12"] * 4)
    topic = world.restart("kill").topic("t")
    assert topic.evict_floor == 10
    topic.delete(seqs=[10, 11])
    assert world.restart("crash").topic("t").evict_floor == 10


def test_a_floor_from_before_the_first_hold_stays() -> None:
    """Method: the checkpoint's row knows the hold, and replay begins before it; then deletes free space. There is no
    ledger, whose rows would have the floor made durable as well."""
    disk = InterposingDisk()
    world = EngineHarness(disk, **TINY, ledger_records=0)
    topic, group = filled(world, 3, durability="fsync", cap_records=3)

    def meddle() -> None:
        topic.append([b"12"] * 6)
        assert topic.evict_floor == 7
        group.hold(1_000)
        topic.delete(seqs=[7, 8])

    for at in range(1, 8):
        disk.arm(at, meddle)
        world.log.checkpoint()
        if disk.action is None:
            break
    assert world.crash().topic("t").evict_floor == 7


class _Weighed(TopicIndex):
    """An index of records of one byte each."""

    def __init__(self, head: int, floor: int) -> None:
        super().__init__()
        self.publish(1, [], head, head, 1, persistent=False)
        self.watermarks = self.watermarks.raise_to("cap", floor - 1)
        self.earliest = floor

    def measure(self, first: int, stop: int):  # type: ignore[no-untyped-def]
        return type(super().measure(1, 1))(max(stop - first, 0), max(stop - first, 0))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 12)), max_size=4),
    st.integers(1, 26),
)
def test_a_limit_is_what_the_rules_say(floor: int, groups: list[tuple[int, int]], asked: int) -> None:
    """The rules of `holds`, said once more: the least cursor of those that are whole and can pay for what is asked."""
    index = _Weighed(25, floor)
    whole_ones = [seq for seq, size in groups if size and seq + 1 >= floor and asked - max(seq + 1, floor) <= size]
    expected = min([asked, *(seq + 1 for seq in whole_ones)])
    assert limit_eviction(index, [GroupCursorState(seq, 0, size) for seq, size in groups], asked) == expected
