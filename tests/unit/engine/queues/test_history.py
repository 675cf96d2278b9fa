"""What happened to every job, as a topic of the engine's own."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.unit.engine.harness import RESTARTS, EngineHarness, Restart

from tidelog.engine import ClaimRequest, Queue
from tidelog.engine.queues.queue import operations_of

HISTORY = "_tidelog.history.jobs"


def queue(world: EngineHarness, **config: Any) -> Queue:
    return world.log.queue("jobs", **{"lease_ms": 1_000, **config})


def steps(jobs: Queue) -> list[tuple[str, int | None]]:
    return [(step["event"], step.get("seq")) for step in jobs.history().read(0, 1_000)]


def test_history_has_every_step_in_order() -> None:
    world = EngineHarness()
    jobs = queue(world, max_deliveries=2, dead_letter="dead")
    jobs.put(["a", "b"])
    world.clock.tick(5)
    first, second = jobs.claim("w", 2)
    jobs.extend("w", first, lease_ms=2_000)
    jobs.ack("w", first)
    jobs.nack("w", second, delay_ms=100)
    world.clock.tick(100)
    operations_of(jobs).claim_for_all([ClaimRequest("v", 1, None, "conn")])
    operations_of(jobs).release_connection("conn")
    jobs.claim("w")
    world.log.topic("dead").redrive()
    jobs.claim("w")
    world.clock.tick(1_001)
    jobs.counts()
    assert steps(jobs) == [
        ("enqueued", 1),
        ("claimed", 1),
        ("claimed", 2),
        ("extended", 1),
        ("acked", 1),
        ("nacked", 2),
        ("claimed", 2),
        ("released", 2),
        ("dead_lettered", 2),
        ("redriven", 3),
        ("enqueued", 3),
        ("claimed", 3),
        ("expired", 3),
    ]


def test_a_step_has_node_time_and_lease() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put(["a", "b"])
    world.clock.tick(7)
    held = jobs.claim("w", 2)
    now_ms = world.clock.now_us() // 1000
    assert jobs.history().read(1, 1) == [
        {
            "at": 2,
            "ts_ms": now_ms,
            "event": "claimed",
            "seq": 1,
            "node": "w",
            "lease_id": held[0].lease_id,
            "deliveries": 1,
            "waited_ms": 7,
            "deadline_ms": held[0].deadline_ms,
        }
    ]
    assert jobs.history().read(0, 1)[0] == {"at": 1, "ts_ms": now_ms - 7, "event": "enqueued", "seq": 1, "last_seq": 2}


def test_history_as_a_table_has_typed_columns() -> None:
    world = EngineHarness()
    jobs = queue(world)
    assert jobs.history().to_arrow().num_rows == 0
    jobs.put(["a"])
    jobs.claim("w")
    table = jobs.history().to_arrow()
    assert table.schema.field("ts_ms").type == pa.timestamp("ms", tz="UTC")
    assert table["event"].to_pylist() == ["enqueued", "claimed"]
    assert table["waited_ms"].to_pylist() == [None, 0]
    assert table["seq"].type == pa.int64()


def test_history_is_written_by_tick_and_close() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put("a")
    jobs.claim("w")
    assert world.log.find(HISTORY) is None
    world.log.tick()
    topic = world.log.find(HISTORY)
    assert topic is not None
    assert topic.config.durability == "disk"
    assert topic.count == 2
    jobs.ack("w", [1])
    world.restart("reopen")
    assert steps(queue(world))[-1] == ("acked", 1)


@pytest.mark.parametrize("how", RESTARTS)
def test_a_restart_is_a_step_before_the_next_one(how: Restart) -> None:
    world = EngineHarness()
    jobs = queue(world, durability="fsync")
    jobs.put(["a", "b"])
    jobs.claim("w")
    world.log.tick()
    world.restart(how)
    jobs = queue(world)
    before = steps(jobs)
    jobs.claim("v")
    jobs.put("c")
    jobs.claim("v", 3)
    assert [event for event, _ in steps(jobs)[len(before) :]][:3] == ["restarted", "claimed", "enqueued"]
    assert [seq for event, seq in steps(jobs) if event == "enqueued"][-1] == 3, "earlier steps are not repeated"


def test_history_is_capped_and_can_be_disabled() -> None:
    world = EngineHarness(queue_history_records=10)
    jobs = queue(world)
    jobs.put(list(range(50)))
    jobs.claim("w", 50)
    assert len(jobs.history().read(0, 1_000)) == 10
    world = EngineHarness(queue_history_records=0)
    jobs = queue(world)
    jobs.put("a")
    jobs.claim("w")
    assert jobs.history().read() == []
    assert world.log.find(HISTORY) is None


def test_history_is_dropped_with_its_queue_and_not_listed() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put("a")
    jobs.claim("w")
    world.log.tick()
    assert world.log.names() == ["jobs"]
    assert not world.log.drop(HISTORY), "it is not to be dropped by itself"
    assert world.log.drop("jobs")
    assert world.log.find(HISTORY) is None
    world.restart("reopen")
    assert world.log.find(HISTORY) is None
    assert steps(queue(world)) == []


def test_a_failing_history_does_not_affect_the_queue() -> None:
    world = EngineHarness(total_bytes_max=100)
    jobs = queue(world)
    jobs.put("x" * 90)
    assert jobs.claim("w")[0].seq == 1
    world.log.tick()
    assert jobs.ack("w", [1]).count == 1
