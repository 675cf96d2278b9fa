"""The lease table, step by step: after each call its whole state is compared with the expected one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidelog.engine.manifest import LeaseRow, QueueRow
from tidelog.engine.queues import leases as module
from tidelog.engine.queues.leases import Lease, LeaseTable, QueueSnapshot, SweepResult, TimerHeap
from tidelog.formats import control_frames
from tidelog.formats.control_frames import LeaseEvent

EMPTY: dict[str, Any] = {
    "leased": {},
    "pending": {},
    "delayed": {},
    "deliveries": {},
    "priorities": {},
    "cursor": 1,
    "lease_id": 0,
    "claimable": {},
    "known": set(),
    "connections": {},
    "deadlines": {},
    "delays": {},
}


def timers_of(heap: TimerHeap) -> dict[int, list[int]]:
    assert heap.size == sum(map(len, heap._seqs.values()))
    assert sorted(heap._times) == sorted(heap._seqs), "each time is in the heap once"
    return {at_ms: list(seqs) for at_ms, seqs in heap._seqs.items()}


def state_of(leases: LeaseTable) -> dict[str, Any]:
    """Everything that a table holds. `claimable` maps a seq to its priority and whether it is fresh."""
    keys = leases._claimable
    assert all(key in leases._claim_order and key[2] == seq for seq, key in keys.items())
    return {
        "leased": {seq: tuple(lease) for seq, lease in leases.leased.items()},
        "pending": {seq: lease and tuple(lease) for seq, lease in leases.pending.items()},
        "delayed": dict(leases.delayed),
        "deliveries": dict(leases.deliveries),
        "priorities": dict(leases.priorities),
        "cursor": leases.cursor,
        "lease_id": leases.lease_id,
        "claimable": {seq: (-key[0], bool(key[1])) for seq, key in keys.items()},
        "known": set(leases._known_after_cursor),
        "connections": {key: set(seqs) for key, seqs in leases._by_connection.items()},
        "deadlines": timers_of(leases._deadline_timers),
        "delays": timers_of(leases._delay_timers),
    }


class Table:
    """A lease table whose state is compared after each step; only what changes is written down."""

    def __init__(self, cursor: int = 1) -> None:
        self.leases = LeaseTable()
        self.leases.cursor = cursor
        self.expected = {**EMPTY, "cursor": cursor}
        assert state_of(self.leases) == self.expected

    def step(self, result: object, call: Callable[[LeaseTable], object], **changed: Any) -> None:
        assert call(self.leases) == result
        self.expected = {**self.expected, **changed}
        assert state_of(self.leases) == self.expected


RETURNED, FRESH = (0, False), (0, True)


def live(*seqs: int) -> Callable[[int, int], tuple[list[int], int]]:
    """The seqs of a topic, as `take` asks for them."""

    def next_live(cursor: int, count: int) -> tuple[list[int], int]:
        found = [seq for seq in seqs if seq >= cursor][:count]
        return found, found[-1] + 1 if found else cursor

    return next_live


def test_a_lease_from_grant_to_ack() -> None:
    table = Table()
    table.step([1, 2, 3], lambda t: t.take(3, live(1, 2, 3, 4)), cursor=4)
    table.step(
        (range(1, 4), [1, 1, 1]),
        lambda t: t.grant([1, 2, 3], "a", 50, "conn"),
        leased={seq: ("a", seq, 50, "conn") for seq in (1, 2, 3)},
        deliveries={1: 1, 2: 1, 3: 1},
        lease_id=3,
        connections={"conn": {1, 2, 3}},
        deadlines={50: [1, 2, 3]},
    )
    assert table.leases.unavailable_count == 3
    assert table.leases.count_for_connection("conn") == 3
    table.step((range(4, 4), []), lambda t: t.grant([], "a", 70, "other"))
    table.step(
        ([(2, Lease("a", 2, 50, "conn"))], [4, 1, 3]),
        lambda t: t.begin_settle([4, 1, 2, 3], "a", [None, 7, 2, 1]),
        leased={seq: ("a", seq, 50, "conn") for seq in (1, 3)},
        pending={2: ("a", 2, 50, "conn")},
        connections={"conn": {1, 3}},
    )
    assert table.leases.unavailable_count == 3
    table.step(([], [1, 3]), lambda t: t.begin_settle([1, 3], "b", [None, 3]))
    table.step(None, lambda t: t.on_acked([2]), pending={}, deliveries={1: 1, 3: 1})
    assert (table.leases.unavailable_count, table.leases.returned_count) == (2, 0)
    table.step(
        ([(1, Lease("a", 1, 50, "conn")), (3, Lease("a", 3, 50, "conn"))], []),
        lambda t: t.begin_settle([1, 3], "a", [None, None]),
        leased={},
        pending={1: ("a", 1, 50, "conn"), 3: ("a", 3, 50, "conn")},
        connections={},
    )
    table.step(
        None,
        lambda t: t.on_settle_failed([3, 9]),
        leased={3: ("a", 3, 50, "conn")},
        pending={1: ("a", 1, 50, "conn")},
        connections={"conn": {3}},
        deadlines={50: [1, 2, 3, 3]},
    )
    table.step(
        [(3, Lease("a", 3, 50, "conn"))],
        lambda t: t.release_connection("conn"),
        leased={},
        claimable={3: RETURNED},
        connections={},
    )
    table.step([], lambda t: t.release_connection("conn"))
    table.step(None, lambda t: t.on_released([3, 1]), pending={}, claimable={1: RETURNED, 3: RETURNED})
    assert table.leases.returned_count == 2
    assert table.leases.known_seqs() == [1, 3]
    table.step([1, 3, 4], lambda t: t.take(3, live(4)), claimable={}, cursor=5)
    table.step(
        (range(4, 7), [2, 2, 1]),
        lambda t: t.grant([1, 3, 4], "b", 60),
        leased={1: ("b", 4, 60, None), 3: ("b", 5, 60, None), 4: ("b", 6, 60, None)},
        deliveries={1: 2, 3: 2, 4: 1},
        lease_id=6,
        deadlines={50: [1, 2, 3, 3], 60: [1, 3, 4]},
    )


def test_settling_one_connection_of_several() -> None:
    table = Table(cursor=9)
    table.leases.grant([1, 2], "a", 50, "here")
    table.leases.grant([3], "a", 50, "there")
    assert [seq for seq, _ in table.leases.release_connection("here")] == [1, 2]
    assert table.leases._by_connection == {"there": {3}}
    assert table.leases.count_for_connection("here") == 0


def test_delays_and_deadlines_end_in_order() -> None:
    table = Table(cursor=9)
    table.leases.grant([1, 2], "a", 50)
    table.leases.grant([3], "a", 40)
    table.leases.begin_settle([2], "a", [2])
    table.expected |= {
        "leased": {1: ("a", 1, 50, None), 3: ("a", 3, 40, None)},
        "pending": {2: ("a", 2, 50, None)},
        "deliveries": {1: 1, 2: 1, 3: 1},
        "lease_id": 3,
        "deadlines": {50: [1, 2], 40: [3]},
    }
    table.step(
        None,
        lambda t: t.on_released([2, 7], 45),
        pending={},
        delayed={2: 45},
        delays={45: [2]},
    )
    assert table.leases.unavailable_count == 3
    assert table.leases.next_due_ms() == 41
    table.step(SweepResult([], []), lambda t: t.sweep(40))
    table.step(
        SweepResult([(3, Lease("a", 3, 40))], []),
        lambda t: t.sweep(41),
        leased={1: ("a", 1, 50, None)},
        claimable={3: RETURNED},
        deadlines={50: [1, 2]},
    )
    assert table.leases.next_due_ms() == 45
    table.step(SweepResult([], []), lambda t: t.sweep(44))
    table.step(
        SweepResult([], [2]),
        lambda t: t.sweep(45),
        delayed={},
        claimable={3: RETURNED, 2: RETURNED},
        delays={},
    )
    assert table.leases.next_due_ms() == 51
    table.step(
        Lease("a", 1, 50),
        lambda t: t.extend(1, "a", 1, 80),
        leased={1: ("a", 1, 80, None)},
        deadlines={50: [1, 2], 80: [1]},
    )
    table.step(None, lambda t: t.extend(1, "a", 2, 90))
    table.step(None, lambda t: t.extend(1, "b", 1, 90))
    table.step(None, lambda t: t.extend(2, "a", None, 90))
    assert table.leases.next_due_ms() == 81
    table.expected |= {"deadlines": {80: [1]}}  # the stale entries were dropped
    table.step(SweepResult([], []), lambda t: t.sweep(80))
    table.step(
        SweepResult([(1, Lease("a", 1, 80))], []),
        lambda t: t.sweep(1_000),
        leased={},
        claimable={3: RETURNED, 2: RETURNED, 1: RETURNED},
        deadlines={},
    )
    assert table.leases.next_due_ms() is None


@pytest.mark.parametrize(("deadline_ms", "delay_ms", "due_ms"), [(10, 12, 11), (10, 11, 11), (10, 10, 10), (10, 9, 9)])
def test_the_next_due_time_is_the_earlier_of_both(deadline_ms: int, delay_ms: int, due_ms: int) -> None:
    leases = LeaseTable()
    leases.grant([1], "a", deadline_ms)
    leases.schedule(2, delay_ms, 0, 0)
    assert leases.next_due_ms() == due_ms


@pytest.mark.parametrize(
    ("lease_id", "deadline_ms", "undone"), [(1, 80, True), (1, 81, False), (1, 79, False), (2, 80, False)]
)
def test_an_extension_is_undone_unless_the_lease_has_changed(lease_id: int, deadline_ms: int, undone: bool) -> None:
    leases = LeaseTable()
    leases.grant([1], "a", 50, "conn")
    leases.extend(1, "a", None, 80)
    leases.undo_extend(1, Lease("a", lease_id, 50, "conn"), deadline_ms)
    assert leases.leased == {1: Lease("a", 1, 50 if undone else 80, "conn")}
    assert timers_of(leases._deadline_timers) == ({50: [1, 1], 80: [1]} if undone else {50: [1], 80: [1]})
    leases.undo_extend(2, Lease("a", lease_id, 50), deadline_ms)
    assert leases.leased.keys() == {1}


def test_a_grant_that_is_revoked_was_no_delivery() -> None:
    table = Table(cursor=9)
    table.leases.grant([1, 2], "a", 50)
    table.leases.revoke([1], [1])
    table.leases.take(1, live())
    table.leases.grant([1], "a", 50, "conn")  # lease 3
    table.leases.extend(2, "a", None, 60)
    table.expected = state_of(table.leases)
    assert table.expected["deliveries"] == {1: 1, 2: 1}
    table.step(None, lambda t: t.revoke([1, 2, 8], [1, 9, 2]))
    table.step(
        None,
        lambda t: t.revoke([1, 2], [3, 2]),
        leased={},
        deliveries={},
        claimable={1: RETURNED, 2: RETURNED},
        connections={},
    )
    table.leases.take(1, live())
    table.leases.grant([1], "a", 50)  # lease 4
    table.leases.begin_settle([1], "a", [4])
    table.leases.on_released([1])
    table.leases.take(1, live())
    table.leases.grant([1], "a", 50)  # lease 5
    table.leases.revoke([1], [5])
    assert table.leases.deliveries == {1: 1}


def test_jobs_that_were_taken_are_requeued_or_reserved() -> None:
    table = Table()
    table.step([1, 2], lambda t: t.take(2, live(1, 2)), cursor=3)
    table.step(None, lambda t: t.requeue([2, 5]), claimable={2: RETURNED, 5: RETURNED}, known={5})
    table.step(None, lambda t: t.reserve_dead([1]), pending={1: None})
    assert table.leases.unavailable_count == 1
    table.step(None, lambda t: t.on_settle_failed([1]), pending={}, claimable={2: RETURNED, 5: RETURNED, 1: RETURNED})


def test_jobs_that_the_topic_removed_are_forgotten() -> None:
    table = Table(cursor=4)
    table.leases.grant([1], "a", 50, "conn")
    table.leases.grant([2], "a", 50)
    table.leases.begin_settle([2], "a", [None])
    table.leases.schedule(5, 70, 3, 0)
    table.leases.schedule(6, None, 4, 0)
    table.leases.requeue([3])
    assert table.leases.known_seqs() == [1, 2, 3, 5, 6]
    timers = {"deadlines": {50: [1, 2]}, "delays": {70: [5]}}
    table.expected |= {
        **timers,
        "leased": {1: ("a", 1, 50, "conn")},
        "pending": {2: ("a", 2, 50, None)},
        "delayed": {5: 70},
        "deliveries": {1: 1, 2: 1},
        "priorities": {5: 3, 6: 4},
        "claimable": {6: (4, True), 3: RETURNED},
        "known": {5, 6},
        "connections": {"conn": {1}},
        "lease_id": 2,
    }
    table.step(None, lambda t: t.forget([9]))
    table.step(None, lambda t: t.forget([1]), leased={}, connections={}, deliveries={2: 1})
    table.step(None, lambda t: t.forget([2]), pending={}, deliveries={})
    table.step(None, lambda t: t.forget([5, 3]), delayed={}, priorities={6: 4}, claimable={6: (4, True)}, known={6})
    table.step(None, lambda t: t.forget([6]), priorities={}, claimable={}, known=set())
    table.step([7], lambda t: t.take(9, live(7)), cursor=8)


@pytest.mark.parametrize(
    ("cursor", "run_at_ms", "priority", "changed"),
    [
        (1, None, 0, {"claimable": {3: FRESH}, "known": {3}}),
        (3, None, 0, {"claimable": {3: FRESH}, "known": {3}}),
        (4, None, 0, {}),
        (4, None, 5, {"priorities": {3: 5}}),
        (3, None, 5, {"claimable": {3: (5, True)}, "known": {3}, "priorities": {3: 5}}),
        (3, 10, 0, {"claimable": {3: RETURNED}, "known": {3}}),
        (3, 10, -2, {"claimable": {3: (-2, False)}, "known": {3}, "priorities": {3: -2}}),
        (3, 11, 0, {"delayed": {3: 11}, "delays": {11: [3]}, "known": {3}}),
        (3, 11, 1, {"delayed": {3: 11}, "delays": {11: [3]}, "known": {3}, "priorities": {3: 1}}),
        (4, 11, 0, {}),
    ],
)
def test_a_schedule_is_applied_before_the_cursor_passes_the_job(
    cursor: int, run_at_ms: int | None, priority: int, changed: dict[str, Any]
) -> None:
    Table(cursor).step(None, lambda t: t.schedule(3, run_at_ms, priority, 10), **changed)


def test_a_schedule_of_a_job_that_is_known_sets_its_priority_only() -> None:
    leases = LeaseTable()
    leases.restore({1: Lease("a", 1, 50)}, {1: 1, 2: 1, 3: 1}, {3: 90})
    for seq in (1, 2, 3):
        leases.schedule(seq, 500, 7, 10)
    assert (set(leases.leased), leases.delayed) == ({1}, {3: 90})
    assert state_of(leases)["claimable"] == {2: (7, False)}
    assert leases.priorities == dict.fromkeys((1, 2, 3), 7)


def test_the_claim_order() -> None:
    """Priority, then returned before fresh, then the lower seq; jobs below normal priority after all fresh ones."""
    leases = LeaseTable()
    for seq, run_at_ms, priority in ((2, None, 1), (3, 5, 1), (4, None, -1), (5, 5, -1), (6, 5, 0), (7, 99, 0)):
        leases.schedule(seq, run_at_ms, priority, 10)
    topic = live(1, 2, 3, 4, 5, 6, 7, 8)
    assert leases.take(0, topic) == []
    assert leases.take(1, topic) == [3]
    assert leases.take(3, topic) == [2, 6, 1]
    assert leases.cursor == 2
    assert leases.take(2, topic) == [8, 5]
    assert leases.cursor == 9
    assert leases._known_after_cursor == set()
    assert leases.take(9, topic) == [4]
    assert leases.take(9, topic) == []
    leases.requeue([4, 1])
    leases.requeue([4])  # the earlier entry of the heap is stale
    leases.forget([1])
    assert leases.take(9, topic) == [4]


def test_take_asks_for_as_many_fresh_jobs_as_are_missing() -> None:
    asked: list[tuple[int, int]] = []
    leases = LeaseTable()
    leases.schedule(2, 50, 0, 10)
    leases.schedule(3, None, 1, 10)

    def next_live(cursor: int, count: int) -> tuple[list[int], int]:
        asked.append((cursor, count))
        return live(1, 2, 3, 4)(cursor, count)

    assert leases.take(3, next_live) == [3, 1, 4]
    assert asked == [(1, 2), (3, 1), (4, 1)]
    assert leases._known_after_cursor == set()
    asked.clear()
    assert leases.take(2, next_live) == []
    assert asked == [(5, 2)]


def test_a_table_restored_from_durable_leases() -> None:
    table = Table()
    table.step(
        None,
        lambda t: t.restore({1: Lease("a", 4, 50), 2: Lease("b", 5, 50)}, {1: 1, 2: 3, 3: 2, 4: 1}, {4: 70}),
        leased={1: ("a", 4, 50, None), 2: ("b", 5, 50, None)},
        deliveries={1: 1, 2: 3, 3: 2, 4: 1},
        delayed={4: 70},
        claimable={3: RETURNED},
        known={1, 2, 3, 4},
        deadlines={50: [1, 2]},
        delays={70: [4]},
    )
    table.step([3, 5], lambda t: t.take(9, live(1, 2, 3, 4, 5)), claimable={}, known=set(), cursor=6)


def test_acked_jobs_are_forgotten_wherever_they_are() -> None:
    leases = LeaseTable()
    leases.schedule(1, None, 3, 0)
    leases.schedule(2, None, 3, 0)
    leases.take(2, live())
    leases.grant([1, 2], "a", 50)
    leases.begin_settle([1, 2], "a", [None] * 2)
    leases.on_acked([1, 9])
    assert (set(leases.pending), leases.deliveries, leases.priorities) == ({2}, {2: 1}, {2: 3})


# Timers ---------------------------------------------------------------------------------------------------


def test_timers_are_due_before_a_time_earliest_first() -> None:
    heap = TimerHeap()
    for at_ms, seqs in ((30, [1]), (10, [2, 3]), (20, [4]), (10, [5])):
        heap.add(at_ms, seqs)
    assert (heap.size, timers_of(heap)) == (5, {30: [1], 10: [2, 3, 5], 20: [4]})
    assert list(heap.pop_due(10)) == []
    assert list(heap.pop_due(21)) == [(10, [2, 3, 5]), (20, [4])]
    assert (heap.size, timers_of(heap)) == (1, {30: [1]})
    assert list(heap.pop_due(31)) == [(30, [1])]
    assert (heap.size, list(heap.pop_due(99))) == (0, [])


def test_the_first_current_timer_is_found_and_stale_ones_before_it_are_dropped() -> None:
    heap = TimerHeap()
    for at_ms, seqs in ((30, [1]), (10, [2, 3]), (20, [4, 5])):
        heap.add(at_ms, seqs)
    assert heap.peek(lambda seq, at_ms: (seq, at_ms) == (5, 20)) == 20
    assert (heap.size, timers_of(heap)) == (3, {30: [1], 20: [4, 5]})
    assert heap.peek(lambda *_: False) is None
    assert (heap.size, timers_of(heap)) == (0, {})


def test_compact_replaces_all_timers() -> None:
    heap = TimerHeap()
    heap.add(5, [9, 9])
    heap.compact([(30, 1), (10, 2), (20, 3), (10, 4)])
    assert (heap.size, timers_of(heap)) == (4, {30: [1], 10: [2, 4], 20: [3]})
    assert [at_ms for at_ms, _ in heap.pop_due(99)] == [10, 20, 30]


@pytest.mark.parametrize("kind", ["deadline", "delay"])
@pytest.mark.parametrize(
    ("live_jobs", "stale", "compacted"), [(0, 4, False), (0, 5, True), (2, 6, False), (2, 7, True)]
)
def test_timers_are_compacted_above_twice_the_current_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, live_jobs: int, stale: int, compacted: bool
) -> None:
    monkeypatch.setattr(module, "_STALE_TIMERS_MAX", 4)
    leases = LeaseTable()
    heap = leases._deadline_timers if kind == "deadline" else leases._delay_timers
    for seq in range(1, live_jobs + 1):
        if kind == "deadline":
            leases.grant([seq], "a", 500 + seq)
        else:
            leases.schedule(seq, 500 + seq, 0, 0)
    heap.add(900, range(10, 10 + stale))
    leases.sweep(0)
    assert heap.size == live_jobs + (0 if compacted else stale)
    assert set(timers_of(heap)) >= set(range(501, 501 + live_jobs))


# The snapshot of durable leases ---------------------------------------------------------------------------


def event(event: LeaseEvent, lease_id: int, deadline_ms: int = 0, deliveries: int = 0, node: str = "a") -> Any:
    return control_frames.Lease(
        event=event, lease_id=lease_id, deadline_ms=deadline_ms, deliveries=deliveries, node=node
    )


ROW = QueueRow(9, 2, (LeaseRow(1, 5, 50, "a"), LeaseRow(2, 6, 60, "b")), ((1, 1), (2, 4), (3, 2)), ((3, 70),))


@pytest.mark.parametrize(
    ("seq", "body", "changed"),
    [
        (0, event(LeaseEvent.RELEASED, 8, 0, 1), {}),
        (0, event(LeaseEvent.RELEASED, 12, 0, 3), {"lease_id": 12, "dead_lettered": 3}),
        (3, event(LeaseEvent.CLAIMED, 10, 80, 3), {
            "lease_id": 10, "leases": (*ROW.leases, LeaseRow(3, 10, 80, "a")), "delayed": (),
            "deliveries": ((1, 1), (2, 4), (3, 3)),
        }),
        (1, event(LeaseEvent.CLAIMED, 4, 80, 7), {"deliveries": ((1, 7), (2, 4), (3, 2))}),
        (1, event(LeaseEvent.CLAIMED, 5, 80, 1), {"leases": (LeaseRow(1, 5, 80, "a"), ROW.leases[1])}),
        (2, event(LeaseEvent.CLAIMED, 7, 80, 1), {"leases": (ROW.leases[0], LeaseRow(2, 7, 80, "a"))}),
        (1, event(LeaseEvent.EXTENDED, 5, 90, 1), {"leases": (LeaseRow(1, 5, 90, "a"), ROW.leases[1])}),
        (1, event(LeaseEvent.EXTENDED, 6, 90, 1), {}),
        (4, event(LeaseEvent.EXTENDED, 6, 90, 1), {}),
        (1, event(LeaseEvent.RELEASED, 5, 0, 1), {"leases": (ROW.leases[1],)}),
        (1, event(LeaseEvent.RELEASED, 5, 1, 1), {"leases": (ROW.leases[1],), "delayed": ((1, 1), (3, 70))}),
        (1, event(LeaseEvent.RELEASED, 4, 1, 1), {}),
        (2, event(LeaseEvent.ACKED, 6, 33), {"leases": (ROW.leases[0],), "deliveries": ((1, 1), (3, 2))}),
        (2, event(LeaseEvent.ACKED, 7), {}),
    ],
)  # fmt: skip
def test_a_lease_frame_is_applied_to_a_row(seq: int, body: control_frames.Lease, changed: dict[str, Any]) -> None:
    snapshot = QueueSnapshot(ROW)
    assert snapshot.row() == ROW
    snapshot.apply(seq, body)
    row = snapshot.row()
    assert row is not None
    fields = ("lease_id", "dead_lettered", "leases", "deliveries", "delayed")
    before = {name: getattr(ROW, name) for name in fields}
    assert {name: getattr(row, name) for name in fields} == {**before, **changed}


@pytest.mark.parametrize(("ids", "dead"), [(1, 0), (0, 1), (3, 4)])
def test_a_row_is_written_once_ids_or_dead_letters_were_counted(ids: int, dead: int) -> None:
    assert QueueSnapshot(QueueRow(ids, dead)).row() == QueueRow(ids, dead)
    assert QueueSnapshot(QueueRow(0, 0)).row() is None
