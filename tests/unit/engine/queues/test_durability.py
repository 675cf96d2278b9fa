"""What a queue knows after a restart: G93 to G95, fencing, checkpoints, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engine.harness import RESTARTS, EngineHarness, Restart

from tidelog.engine import ClaimRequest, Queue
from tidelog.engine.manifest import QueueRow
from tidelog.engine.queues.leases import Lease, QueueSnapshot
from tidelog.engine.queues.queue import operations_of
from tidelog.errors import Busy, Error
from tidelog.formats import control_frames
from tidelog.formats.control_frames import LeaseEvent

restarts = pytest.mark.parametrize("how", RESTARTS)
checkpoints = pytest.mark.parametrize("checkpoints", [0, 1, 2])


def queue(world: EngineHarness, **config: Any) -> Queue:
    return world.log.queue("jobs", **{"durability": "fsync", "lease_ms": 10_000, **config})


def again(world: EngineHarness, how: Restart) -> Queue:
    world.restart(how)
    return world.log.queue("jobs", create=False)


@restarts
@checkpoints
def test_leases_that_are_not_durable_end_with_a_restart(how: Restart, checkpoints: int) -> None:
    """G93."""
    world = EngineHarness()
    jobs = queue(world)
    jobs.put([1, 2, 3, 4])
    held = jobs.claim("a", 3)
    jobs.ack("a", held[0])
    jobs.nack("a", held[1], delay_ms=60_000)
    for _ in range(checkpoints):
        world.log.checkpoint()
    jobs = again(world, how)
    assert jobs.counts() == (3, 0, 0)
    assert [(job.seq, job.deliveries) for job in jobs.claim("b", 10)] == [(2, 1), (3, 1), (4, 1)]
    assert jobs.ack("a", held[2]).skipped == [3]


@restarts
@checkpoints
@pytest.mark.parametrize("leases_durable", [False, True])
@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_lease_id_is_never_reused(how: Restart, checkpoints: int, durability: str, leases_durable: bool) -> None:
    world = EngineHarness()
    jobs = queue(world, durability=durability, leases_durable=leases_durable)
    seen: set[int] = set()
    for _ in range(3):
        jobs.put(["x", "y"])
        ids = [job.lease_id for job in jobs.claim("a", 10)]
        assert seen.isdisjoint(ids)
        seen.update(ids)
        for _ in range(checkpoints):
            world.log.checkpoint()
        jobs = again(world, how) if durability == "fsync" or how != "crash" else _fresh(world)
    assert 1 in seen


def _fresh(world: EngineHarness) -> Queue:
    world.log.tick()
    return again(world, "crash")


@restarts
@checkpoints
def test_durable_leases_and_counts_survive_a_restart(how: Restart, checkpoints: int) -> None:
    """G94."""
    world = EngineHarness()
    jobs = queue(world, leases_durable=True)
    jobs.put([1, 2, 3, 4, 5])
    first = jobs.claim("a", 4)
    jobs.nack("a", first[3])
    (again_4,) = jobs.claim("b", 1)
    jobs.extend("a", first[0], lease_ms=50_000)
    jobs.nack("a", first[1], delay_ms=30_000)
    for _ in range(checkpoints):
        world.log.checkpoint()
    jobs.ack("a", first[2])
    jobs = again(world, how)
    assert jobs.counts() == (1, 2, 0)
    assert jobs.next_due_ms() == again_4.deadline_ms + 1
    assert [(job.seq, job.deliveries) for job in jobs.claim("c", 10)] == [(5, 1)]
    assert jobs.ack("b", again_4).count == 1, "the holder still is"
    assert jobs.ack("a", first[2]).skipped == [3]
    world.clock.tick(30_000)
    assert [(job.seq, job.deliveries) for job in jobs.claim("c", 10) if job.seq == 2] == [(2, 2)]
    world.clock.tick(20_001)
    assert (1, 2) in [(job.seq, job.deliveries) for job in jobs.claim("c", 10)]


@restarts
def test_a_release_of_durable_leases_survives_a_restart(how: Restart) -> None:
    world = EngineHarness()
    jobs = queue(world, leases_durable=True)
    jobs.put([1, 2])
    operations_of(jobs).claim_for_all([ClaimRequest("a", 2, None, "conn")])
    operations_of(jobs).release_connection("conn")
    jobs.put(3)  # a later write is synced with it
    jobs = again(world, how)
    assert [(job.seq, job.deliveries) for job in jobs.claim("b", 10)] == [(1, 2), (2, 2), (3, 1)]


def test_an_ephemeral_queue_keeps_only_its_ids_across_a_restart() -> None:
    world = EngineHarness()
    jobs = queue(world, durability="ephemeral", leases_durable=True)
    jobs.put([1, 2])
    assert [job.lease_id for job in jobs.claim("a", 2)] == [1, 2]
    jobs = again(world, "reopen")
    assert jobs.counts() == (0, 0, 0)
    jobs.put(3)
    assert jobs.claim("a")[0].lease_id == 3


@pytest.mark.parametrize(
    ("verb", "leases_durable"), [("ack", False), ("ack", True), ("nack", True), ("extend", True), ("claim", True)]
)
def test_a_step_that_fails_leaves_every_lease_as_it_was(verb: str, leases_durable: bool) -> None:
    world = EngineHarness()
    jobs = queue(world, leases_durable=leases_durable)
    jobs.put([1, 2, 3])
    held = jobs.claim("a", 2)
    before = jobs.counts(), jobs.next_due_ms()
    world.disk.fail("write", at=1, error=28)
    calls: dict[str, Callable[[], object]] = {
        "ack": lambda: jobs.ack("a", held),
        "nack": lambda: jobs.nack("a", held, delay_ms=5),
        "extend": lambda: jobs.extend("a", held, lease_ms=77_000),
        "claim": lambda: jobs.claim("b"),
    }
    with pytest.raises(Error):
        calls[verb]()
    assert (jobs.counts(), jobs.next_due_ms()) == before
    assert [(job.seq, job.deliveries) for job in jobs.claim("b", 10)] == [(3, 1)]
    assert jobs.ack("a", held).count == 2


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_a_step_that_the_wal_refuses_leaves_every_lease_as_it_was(verb: str) -> None:
    world = EngineHarness(queue_max=1)
    jobs = queue(world, leases_durable=True)
    jobs.put([1, 2, 3])
    held = jobs.claim("a", 2)
    before = jobs.counts(), jobs.next_due_ms()
    under_way = world.log.topic("other").append_nowait("x")
    calls: dict[str, Callable[[], object]] = {
        "ack": lambda: jobs.ack("a", held),
        "nack": lambda: jobs.nack("a", held, delay_ms=5),
        "extend": lambda: jobs.extend("a", held, lease_ms=77_000),
    }
    with pytest.raises(Busy):
        calls[verb]()
    assert (jobs.counts(), jobs.next_due_ms()) == before
    under_way.wait()
    assert jobs.ack("a", held).count == 2


def test_a_failed_reservation_of_lease_ids_grants_nothing() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put([1])
    world.disk.fail("write", at=1, error=28)
    with pytest.raises(Error):
        jobs.claim("a")
    assert jobs.counts() == (1, 0, 0)
    assert jobs.claim("a")[0].lease_id == 1


def test_a_job_with_a_pending_ack_is_not_claimable() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put([1, 2])
    held = jobs.claim("a")
    token = operations_of(jobs).submit_ack("a", [1])
    assert not token.done
    world.clock.tick(60_000)
    assert jobs._state.leases.pending.keys() == {1}
    assert [job.seq for job in jobs.claim("b", 10)] == [2]
    assert token.wait().count == 1
    assert jobs.ack("a", held).skipped == [1]


# Replay of frames from any position has the same result ---------------------------------------------------------


def _lease(
    event: LeaseEvent, lease_id: int, deadline_ms: int = 0, count: int = 0, node: str = "a"
) -> control_frames.Lease:
    return control_frames.Lease(event=event, lease_id=lease_id, deadline_ms=deadline_ms, deliveries=count, node=node)


CLAIMED, RELEASED, EXTENDED = LeaseEvent.CLAIMED, LeaseEvent.RELEASED, LeaseEvent.EXTENDED
STORY = [
    (0, _lease(RELEASED, 100)),
    (7, _lease(CLAIMED, 1, 50, 1)),
    (7, _lease(EXTENDED, 1, 90)),
    (7, _lease(RELEASED, 1, 200)),
    (8, _lease(CLAIMED, 2, 60, 1, "b")),
    (7, _lease(CLAIMED, 3, 300, 2, "b")),
    (7, _lease(RELEASED, 1, 0)),  # stale
    (7, _lease(EXTENDED, 1, 999)),  # stale
    (0, _lease(RELEASED, 100, 0, 4)),
    (8, _lease(RELEASED, 2, 0)),
    (9, _lease(CLAIMED, 4, 80, 1)),
    (9, _lease(EXTENDED, 4, 120)),
]


def test_stale_frames_change_nothing() -> None:
    """G95."""
    projection = QueueSnapshot()
    for seq, body in STORY:
        projection.apply(seq, body)
    assert projection.leased == {7: Lease("b", 3, 300), 9: Lease("a", 4, 120)}
    assert projection.deliveries == {7: 2, 8: 1, 9: 1}
    assert projection.delayed == {}
    assert (projection.lease_id, projection.dead_lettered) == (100, 4)


@pytest.mark.parametrize("row_at", range(len(STORY) + 1))
def test_replay_from_before_the_row_has_the_same_result(row_at: int) -> None:
    whole = QueueSnapshot()
    for seq, body in STORY:
        whole.apply(seq, body)
    for begin in range(row_at + 1):
        early = QueueSnapshot()
        for seq, body in STORY[:row_at]:
            early.apply(seq, body)
        projection = QueueSnapshot(early.row())
        for seq, body in STORY[begin:]:
            projection.apply(seq, body)
        assert projection.row() == whole.row(), (begin, row_at)


def test_an_unused_queue_has_no_row() -> None:
    assert QueueSnapshot().row() is None
    assert QueueSnapshot(QueueRow(5, 0)).row() == QueueRow(5, 0)
