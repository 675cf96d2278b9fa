"""Jobs that say when and how urgently: found without any work at the write, and again after a restart."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engine.harness import RESTARTS, EngineHarness, Restart

from tidelog.engine import Queue
from tidelog.engine.queues.jobs import JobSchedule, read_schedules
from tidelog.formats.rows import Rows


def queue(world: EngineHarness, **config: Any) -> Queue:
    return world.log.queue("jobs", **{"lease_ms": 1_000, "durability": "fsync", **config})


def seqs(jobs: Queue, most: int = 100) -> list[int]:
    """In the order of handing out: lease ids rise with it."""
    return [job.seq for job in sorted(jobs.claim("w", most), key=lambda job: job.lease_id)]


def test_a_job_is_not_claimable_before_its_time() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put("later", delay_ms=500)
    jobs.put("at", run_at_ms=world.clock.now_us() // 1000 + 300)
    jobs.put("now", delay_ms=0)
    assert jobs.counts() == (1, 0, 0)
    assert seqs(jobs) == [3]
    assert jobs.next_due_ms() == world.clock.now_us() // 1000 + 300
    world.clock.tick(299)
    assert seqs(jobs) == []
    world.clock.tick(1)
    assert seqs(jobs) == [2]
    world.clock.tick(200)
    assert seqs(jobs) == [1]


def test_claim_order_is_priority_then_returned_then_seq() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put(["a", "b"])  # 1, 2
    jobs.put("low", priority=-5)  # 3
    jobs.put(["hot", "hot"], priority=5)  # 4, 5
    jobs.put("hotter", priority=1_000)  # 6
    jobs.put("due", run_at_ms=1)  # 7: past its time, so before what is fresh
    first = jobs.claim("w", 1)
    assert [job.seq for job in first] == [6]
    held = jobs.claim("w", 2)
    jobs.nack("w", held[1])
    assert seqs(jobs) == [5, 7, 1, 2, 3]


def test_a_low_priority_job_is_claimed_after_all_fresh_ones() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put("low", priority=-1)
    jobs.put(["a", "b"])
    assert seqs(jobs, 1) == [2]
    jobs.put("c")
    assert seqs(jobs) == [3, 4, 1]


def test_a_schedule_keeps_the_other_keys_of_the_meta() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put(["x", "y"], meta=[{"k": 1}, None], priority=2)
    assert [job.meta for job in jobs.claim("w", 2)] == [{"k": 1, "$priority": 2}, {"$priority": 2}]


@pytest.mark.parametrize("how", RESTARTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_restart_finds_the_same_schedule(how: Restart, checkpointed: bool) -> None:
    world = EngineHarness(segment_events_max=3)
    jobs = queue(world)
    jobs.put(["a", "b", "c"])
    jobs.put("later", delay_ms=500)
    jobs.put("hot", priority=9)
    if checkpointed:
        world.log.checkpoint()
    world.restart(how)
    jobs = queue(world)
    assert jobs.counts() == (4, 0, 0)
    assert seqs(jobs) == [5, 1, 2, 3]
    world.clock.tick(500)
    assert seqs(jobs) == [4]


def test_schedules_of_deleted_jobs_are_ignored() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put(["hot", "late"], meta=[{"$priority": 3}, {"$run_at_ms": 1 << 62}])
    jobs.put("x")
    jobs.topic.delete(seqs=[1, 2])
    assert jobs.counts() == (1, 0, 0)
    assert seqs(jobs) == [3]
    assert jobs.next_due_ms() == world.clock.now_us() // 1000 + 1_001


@pytest.mark.parametrize(
    ("meta", "schedule"),
    [
        ({"$run_at_ms": 5}, JobSchedule(1, 5, 0)),
        ({"$priority": 7, "$run_at_ms": 5, "k": [1]}, JobSchedule(1, 5, 7)),
        ({"$priority": 5_000}, JobSchedule(1, None, 1_000)),
        ({"$priority": -5_000}, JobSchedule(1, None, -1_000)),
        ({"$run_at_ms": 1 << 70}, JobSchedule(1, (1 << 63) - 1, 0)),
        ({"$priority": 0}, None),
        ({"$priority": True}, None),
        ({"$priority": "7"}, None),
        ({"$run_at_ms": 1.5}, None),
        ({"$run_at_ms": None}, None),
        ({"note": '"$priority"'}, None),
        ({"deeper": {"$priority": 7}}, None),
        ({"k": 1}, None),
    ],
)
def test_schedules_in_metas(meta: dict[str, Any], schedule: JobSchedule | None) -> None:
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append(["x", "y"], meta=[meta, None])
    assert read_schedules(_rows(world)) == ([] if schedule is None else [schedule])


def _rows(world: EngineHarness) -> Rows:
    index = world.log.topic("t")._state.index
    (found,) = index.slices(1, index.head + 1)
    return found.part.reader(1, index.head + 1, 1 << 62)().rows
