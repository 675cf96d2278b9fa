"""Dead letters and redrive: contract section 3.11, Appendix D 9."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, EngineHarness, running

from tidelog.engine import Queue, Record
from tidelog.errors import BadInput, Error, NotAQueue, TopicNotFound


def queue(world: EngineHarness, **config: Any) -> Queue:
    fields = {"lease_ms": 1_000, "max_deliveries": 2, "dead_letter": "dead", **config}
    return world.log.queue("jobs", **fields)


def fail(jobs: Queue, times: int, most: int = 10) -> None:
    for _ in range(times):
        jobs.nack("w", jobs.claim("w", most))


def dead(world: EngineHarness) -> list[Record]:
    topic = world.log.find("dead")
    return [] if topic is None else topic.read().records


@pytest.mark.parametrize("durability", CLASSES)
def test_a_job_delivered_too_often_moves_to_the_dead_letter_topic(durability: str) -> None:
    world = EngineHarness()
    jobs = queue(world, durability=durability)
    jobs.put([{"n": 1}, b"\x00"], tag=["t", None], node=["origin", None], meta=[{"k": 1}, None])
    fail(jobs, 2)
    assert dead(world) == []
    assert jobs.claim("w", 10) == []
    first, second = dead(world)
    assert (first.data, first.tag, first.node) == ({"n": 1}, "t", "origin")
    assert first.meta == {
        "k": 1,
        "$dead_letter_from": "jobs",
        "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "1",
    }, "all of them are text"
    assert (second.data, second.tag, second.node) == (b"\x00", None, None)
    assert jobs.counts() == (0, 0, 2)
    assert jobs.topic.count == 0
    assert world.log.topic("dead").config.type == "log"


def test_a_claim_continues_after_a_dead_letter() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put("bad")
    fail(jobs, 2)
    jobs.put(["good", "good"])
    assert [job.seq for job in jobs.claim("w", 2)] == [2, 3]
    assert len(dead(world)) == 1


def test_dead_letters_do_not_count_against_the_claim() -> None:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put(["bad", "bad"])
    fail(jobs, 2)
    jobs.put(["good"] * 6)
    assert [job.seq for job in jobs.claim("w", 3)] == [3, 4, 5]
    assert [job.seq for job in jobs.claim("w", 9)] == [6, 7, 8]


@pytest.mark.parametrize("config", [{"max_deliveries": 0, "dead_letter": None}, {"max_deliveries": 0}])
def test_without_dead_letter_settings_a_job_is_delivered_without_limit(config: dict[str, Any]) -> None:
    world = EngineHarness()
    jobs = queue(world, **config)
    jobs.put("x")
    fail(jobs, 5)
    assert jobs.claim("w")[0].deliveries == 6
    assert jobs.counts().dead_lettered == 0


def test_a_full_dead_letter_topic_leaves_the_job_claimable_and_uncounted() -> None:
    world = EngineHarness()
    world.log.topic("dead", cap_records=1, discard="reject")
    jobs = queue(world)
    jobs.put(["a", "b", "c"])
    fail(jobs, 2)
    assert jobs.claim("w", 10) == []
    assert [record.data for record in dead(world)] == ["a"]
    assert jobs.counts() == (2, 0, 1)
    world.log.topic("dead").delete(seqs=[1])
    assert jobs.claim("w", 10) == []
    assert jobs.counts() == (1, 0, 2)


def test_dead_letters_count_against_the_quota() -> None:
    world = EngineHarness(total_bytes_max=120, queue_history_records=0)
    jobs = queue(world)
    jobs.put("x" * 60)
    fail(jobs, 2)
    assert jobs.claim("w") == []
    assert jobs.counts() == (1, 0, 0)


def test_a_job_with_a_maximum_meta_can_become_a_dead_letter() -> None:
    world = EngineHarness(meta_bytes_max=40, meta_keys_max=1)
    jobs = queue(world)
    jobs.put("x", meta={"k": "v" * 30})
    fail(jobs, 2)
    jobs.claim("w")
    assert (dead(world)[0].meta or {})["k"] == "v" * 30


def test_a_dead_letter_topic_may_be_a_queue() -> None:
    world = EngineHarness()
    other = world.log.queue("dead")
    jobs = queue(world)
    jobs.put("x")
    fail(jobs, 2)
    jobs.claim("w")
    assert other.claim("v")[0].data == "x"


def test_the_dead_letter_count_survives_a_crash() -> None:
    for how in ("reopen", "kill", "crash"):
        world = EngineHarness()
        jobs = queue(world, durability="fsync")
        world.log.topic("dead", durability="fsync")
        jobs.put(["x", "y"])
        fail(jobs, 2)
        jobs.claim("w", 10)
        world.restart(how)
        assert queue(world).counts() == (0, 0, 2)


# Redrive --------------------------------------------------------------------------------------------------


def dead_lettered(count: int = 4) -> tuple[EngineHarness, Queue]:
    world = EngineHarness()
    jobs = queue(world)
    jobs.put(
        [{"n": number} for number in range(count)], tag=["a" if n % 2 else "b" for n in range(count)], meta={"k": 1}
    )
    fail(jobs, 2)
    jobs.claim("w", 10)
    return world, jobs


def test_redrive_moves_dead_letters_to_their_queues() -> None:
    world, jobs = dead_lettered()
    assert world.log.topic("dead").redrive() == (4, {"jobs": 4}, 0)
    assert dead(world) == []
    back = jobs.claim("w", 10)
    assert [(job.data["n"], job.tag, job.meta, job.deliveries) for job in back] == [
        (0, "b", {"k": 1}, 1),
        (1, "a", {"k": 1}, 1),
        (2, "b", {"k": 1}, 1),
        (3, "a", {"k": 1}, 1),
    ]


def test_redrive_selects_by_tag_filter_and_limit() -> None:
    world, jobs = dead_lettered(6)
    log = world.log.topic("dead")
    assert log.redrive(match="a", where=lambda record: record.data["n"] > 1).count == 2
    assert log.redrive(match="b", limit=1).count == 1
    assert log.redrive(match=["tag", "Glob", "b*"], limit=0).count == 0
    assert [job.data["n"] for job in jobs.claim("w", 10)] == [3, 5, 0]
    assert [record.data["n"] for record in dead(world)] == [1, 2, 4]


def test_redrive_can_move_to_another_queue() -> None:
    world, _ = dead_lettered(2)
    other = world.log.queue("other")
    assert world.log.topic("dead").redrive(to="other") == (2, {"other": 2}, 0)
    assert other.counts().ready == 2


def test_redrive_skips_records_of_unknown_origin() -> None:
    world, _ = dead_lettered(1)
    log = world.log.topic("dead")
    log.append(["x", "y"], meta=[None, {"$dead_letter_from": "never"}])
    assert log.redrive() == (1, {"jobs": 1}, 2)
    assert log.count == 2


def test_invalid_redrives_are_refused() -> None:
    world, jobs = dead_lettered(1)
    log = world.log.topic("dead")
    with pytest.raises(TopicNotFound):
        log.redrive(to="never")
    with pytest.raises(NotAQueue):
        log.redrive(to=world.log.topic("log").name)
    with pytest.raises(BadInput):
        log.redrive(rate=0)
    with pytest.raises(BadInput):
        jobs.redrive(to="jobs")
    assert log.count == 1


def test_redrive_skips_leased_jobs_of_a_dead_letter_queue() -> None:
    world = EngineHarness()
    other, jobs = world.log.queue("dead"), queue(world)
    jobs.put(["x", "y"])
    fail(jobs, 2)
    jobs.claim("w", 10)
    other.claim("v")
    assert other.redrive() == (1, {"jobs": 1}, 1)


def test_redrive_keeps_its_rate() -> None:
    """Method: the clock is moved until the redrive is done; what it took by that clock is what the rate says."""
    world, _ = dead_lettered(6)
    began = world.clock.monotonic_ms()
    moved: list[int] = []

    def drive() -> None:
        moved.append(world.log.topic("dead").redrive(rate=2).count)

    def tick() -> None:
        while not moved:
            world.clock.tick(10)

    with running(drive, tick):
        pass
    assert moved == [6]
    assert world.clock.monotonic_ms() - began >= 2_000, "two at once, then a second for each two"


def test_a_crash_during_redrive_may_duplicate_and_never_loses() -> None:
    world, _ = dead_lettered(2)  # of class disk: a kill keeps what was written
    world.disk.fail("write", at=2)
    with pytest.raises(Error):  # the delete fails, the copies are there
        world.log.topic("dead").redrive()
    world.restart("kill")
    assert queue(world).counts().ready == 2
    assert len(dead(world)) == 2
