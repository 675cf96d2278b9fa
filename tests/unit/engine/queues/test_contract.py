"""The rules of queues, one by one: contract sections 2.11 and 3.11, on a clock that stands still."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, EngineHarness

from tidelog.engine import ClaimRequest, Job, Queue, lease_token, parse_lease_token
from tidelog.engine.queues.queue import operations_of
from tidelog.errors import BadInput, Closed, Corrupt, NotAQueue, ReadOnly, TopicExists, TopicNotFound


@pytest.fixture
def harness() -> EngineHarness:
    return EngineHarness()


def queue(harness: EngineHarness, count: int = 0, **config: Any) -> Queue:
    made = harness.log.queue("jobs", **{"lease_ms": 1_000, **config})
    if count:
        made.put([{"n": number} for number in range(1, count + 1)])
    return made


def seqs(jobs: list[Job]) -> list[int]:
    return [job.seq for job in jobs]


# Claims ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_claim_leases_the_first_jobs(harness: EngineHarness, durability: str) -> None:
    jobs = queue(harness, 3, durability=durability).claim("w", 2)
    now_ms = harness.clock.now_us() // 1000
    assert jobs == [
        Job(1, 1, now_ms + 1_000, now_ms, 1, {"n": 1}),
        Job(2, 2, now_ms + 1_000, now_ms, 1, {"n": 2}),
    ]
    assert [job.lease_token for job in jobs] == ["lease_1", "lease_2"]


def test_a_leased_job_is_not_claimable(harness: EngineHarness) -> None:
    jobs = queue(harness, 3)
    assert seqs(jobs.claim("a", 2)) == [1, 2]
    assert seqs(jobs.claim("b", 10)) == [3]
    assert jobs.claim("a", 10) == []
    assert jobs.counts() == (0, 3, 0)


def test_a_lease_ends_after_its_deadline_and_not_at_it(harness: EngineHarness) -> None:
    jobs = queue(harness, 1)
    jobs.claim("a")
    harness.clock.tick(1_000)
    assert jobs.claim("b") == []
    assert jobs.counts() == (0, 1, 0)
    harness.clock.tick(1)
    assert jobs.counts() == (1, 0, 0)
    (again,) = jobs.claim("b")
    assert (again.seq, again.deliveries, again.lease_id) == (1, 2, 2)


def test_returned_jobs_are_claimed_before_fresh_ones_lowest_first(harness: EngineHarness) -> None:
    jobs = queue(harness, 6)
    held = jobs.claim("a", 4)
    jobs.nack("a", [held[3], held[1]])
    assert seqs(jobs.claim("b", 3)) == [2, 4, 5]


@pytest.mark.parametrize(("asked", "given"), [(None, 1_000), (5_000, 5_000), (1, 100), (1 << 60, 86_400_000)])
def test_a_claim_sets_its_lease_time_within_bounds(harness: EngineHarness, asked: int | None, given: int) -> None:
    (job,) = queue(harness, 1).claim("a", lease_ms=asked)
    assert job.deadline_ms == harness.clock.now_us() // 1000 + given


def test_a_round_grants_at_most_a_thousand_jobs_to_a_claimer(harness: EngineHarness) -> None:
    assert len(queue(harness, 1_200).claim("a", 5_000)) == 1_000


def test_claimers_of_one_round_share_in_order_of_arrival(harness: EngineHarness) -> None:
    jobs = queue(harness, 9)
    first, second = operations_of(jobs).claim_for_all([ClaimRequest("a", 2, 500), ClaimRequest("b", 100)])
    assert (first.seqs, second.seqs) == ([1, 3], [2, 4, 5, 6, 7, 8, 9])
    now_ms = harness.clock.now_us() // 1000
    assert first.deadlines == [now_ms + 500] * 2, "each has its own lease length"
    assert second.deadlines == [now_ms + 1_000] * 7
    assert len({*first.lease_ids, *second.lease_ids}) == 9
    assert [job.data["n"] for job in second.jobs()] == second.seqs


def test_jobs_as_json_match_the_api_contract(harness: EngineHarness) -> None:
    jobs = queue(harness)
    jobs.put([{"a": "ä"}, b"\x00\xff"], tag=["t", None], meta=[None, {"k": 1}], node="origin")
    now_ms = harness.clock.now_us() // 1000
    (leased,) = operations_of(jobs).claim_for_all([ClaimRequest("w", 10)])
    assert [json.loads(text) for text in leased.to_json_texts()] == [
        {
            "$seq": 1,
            "lease_id": "lease_1",
            "deadline": now_ms + 1_000,
            "$ts": now_ms,
            "$tag": "t",
            "deliveries": 1,
            "data": {"a": "ä"},
        },
        {
            "$seq": 2,
            "lease_id": "lease_2",
            "deadline": now_ms + 1_000,
            "$ts": now_ms,
            "deliveries": 1,
            "data": "AP8=",
            "$encoding": "base64",
            "meta": {"k": 1},
        },
    ]
    assert leased.to_json_texts()[0].startswith(b'{"$seq":1,"lease_id":"lease_1","deadline":')


def test_a_lease_id_is_shown_in_lower_hex() -> None:
    assert lease_token(0xABC) == "lease_abc"
    assert parse_lease_token("lease_abc") == 0xABC
    assert parse_lease_token("") is None


@pytest.mark.parametrize(
    "text", ["lease_", "lease", "abc", "lease_g", "lease_ 1", "lease_-1", "Lease_1", "lease_" + "f" * 17]
)
def test_invalid_lease_tokens_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_lease_token(text)


# Settling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_an_ack_deletes_the_job(harness: EngineHarness, durability: str) -> None:
    jobs = queue(harness, 3, durability=durability)
    held = jobs.claim("w", 2)
    assert jobs.ack("w", held) == (2, [], 1, 0)
    assert jobs.topic.count == 1
    harness.clock.tick(5_000)
    assert seqs(jobs.claim("w", 10)) == [3], "what was acked never comes back"


def test_jobs_of_other_nodes_are_skipped_in_the_order_given(harness: EngineHarness) -> None:
    jobs = queue(harness, 3)
    jobs.claim("a", 2)
    assert jobs.ack("b", [1, 99]) == (0, [1, 99], 1, 2)
    assert jobs.ack("a", [99, 2, 2, 3, 1]) == (2, [99, 2, 3], 1, 0)


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_a_lease_id_that_is_not_the_current_one_is_skipped(harness: EngineHarness, verb: str) -> None:
    """G95 while the process lives."""
    jobs = queue(harness, 1)
    (old,) = jobs.claim("a")
    harness.clock.tick(1_001)
    (new,) = jobs.claim("a")
    more: dict[str, Any] = {"lease_ms": 500} if verb == "extend" else {}
    late = getattr(jobs, verb)("a", old, **more)
    assert (late.count, late.skipped) == (0, [1])
    assert jobs.counts().in_flight == 1
    assert getattr(jobs, verb)("a", [1], [new.lease_id], **more).count == 1


def test_an_expired_lease_is_skipped_before_the_next_claim(harness: EngineHarness) -> None:
    jobs = queue(harness, 1)
    held = jobs.claim("a")
    harness.clock.tick(1_001)
    assert jobs.ack("a", held) == (0, [1], 1, 0)


def test_a_nacked_job_is_claimable_at_once(harness: EngineHarness) -> None:
    jobs = queue(harness, 1)
    assert jobs.nack("a", jobs.claim("a")) == (1, [], 1, 0)
    assert jobs.claim("b")[0].deliveries == 2


def test_a_delayed_nack_is_in_neither_count_until_it_is_due(harness: EngineHarness) -> None:
    jobs = queue(harness, 1)
    assert jobs.nack("a", jobs.claim("a"), delay_ms=300) == (1, [], 0, 0)
    assert jobs.next_due_ms() == harness.clock.now_us() // 1000 + 300
    harness.clock.tick(299)
    assert jobs.claim("b") == []
    harness.clock.tick(1)
    assert jobs.counts() == (1, 0, 0)
    assert jobs.claim("b")[0].deliveries == 2


def test_an_extension_moves_the_deadline_and_nothing_else(harness: EngineHarness) -> None:
    jobs = queue(harness, 2)
    (job, _) = jobs.claim("a", 2)
    harness.clock.tick(900)
    deadline = harness.clock.now_us() // 1000 + 5_000
    assert jobs.extend("a", [1, 7, 1], lease_ms=5_000) == (1, [7, 1], {1: deadline})
    harness.clock.tick(4_000)
    assert seqs(jobs.claim("b", 10)) == [2]
    assert jobs.ack("a", job).count == 1
    assert jobs.next_due_ms() == harness.clock.now_us() // 1000 + 1_001


def test_an_extension_may_shorten(harness: EngineHarness) -> None:
    jobs = queue(harness, 1)
    jobs.extend("a", jobs.claim("a"), lease_ms=100)
    harness.clock.tick(101)
    assert seqs(jobs.claim("b")) == [1]


def test_release_connection_ends_only_its_own_leases(harness: EngineHarness) -> None:
    jobs = queue(harness, 4)
    here, there = object(), object()
    jobs.claim("w", 1)
    operations_of(jobs).claim_for_all([ClaimRequest("w", 2, None, here), ClaimRequest("w", 1, None, there)])
    assert (operations_of(jobs).count_leases(here), operations_of(jobs).count_leases(there)) == (2, 1)
    jobs.ack("w", [2])
    assert operations_of(jobs).count_leases(here) == 1
    assert operations_of(jobs).release_connection(here) == 1
    assert operations_of(jobs).release_connection(here) == 0
    assert jobs.counts() == (1, 2, 0)
    assert jobs.claim("w")[0].deliveries == 2, "a delivery that was given up is one"
    harness.clock.tick(1_001)
    assert operations_of(jobs).count_leases(there) == 0


# Time -----------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_back_only_prolongs_leases(harness: EngineHarness) -> None:
    jobs = queue(harness, 2)
    jobs.claim("a", 1)
    harness.clock.set_us(harness.clock.now_us() - 3_600_000_000)
    assert seqs(jobs.claim("b", 10)) == [2]
    harness.clock.tick(1_001)
    assert seqs(jobs.claim("c", 10)) == [2]
    harness.clock.tick(3_600_000)
    assert seqs(jobs.claim("d", 10)) == [1, 2]


# What else happens to a topic -----------------------------------------------------------------------------


def test_deleted_jobs_are_not_counted_and_not_claimable(harness: EngineHarness) -> None:
    jobs = queue(harness, 6)
    held = jobs.claim("a", 2)
    jobs.nack("a", held[0], delay_ms=500)
    jobs.topic.delete(seqs=[1, 2, 4])
    assert jobs.counts() == (3, 0, 0)
    assert jobs.ack("a", held[1]).skipped == [2]
    assert seqs(jobs.claim("b", 10)) == [3, 5, 6]
    assert jobs.next_due_ms() == harness.clock.now_us() // 1000 + 1_001


def test_jobs_removed_by_retention_leave_the_queue(harness: EngineHarness) -> None:
    jobs = queue(harness, 4, cap_records=4, ttl_ms=10_000)
    jobs.claim("a", 2, 60_000)
    harness.clock.tick(1)
    jobs.put(["x", "y"])
    assert jobs.counts() == (4, 0, 0)
    harness.clock.tick(10_000)
    assert jobs.counts() == (2, 0, 0)
    assert seqs(jobs.claim("b", 10)) == [5, 6]


def test_a_claim_skips_long_runs_of_deleted_jobs(harness: EngineHarness) -> None:
    jobs = queue(harness, 3_000)
    jobs.topic.delete(seqs=[seq for seq in range(1, 3_001) if seq not in (5, 2_999)])
    assert seqs(jobs.claim("a", 1)) == [5]
    assert seqs(jobs.claim("a", 10)) == [2_999]


def test_jobs_are_read_from_memory_and_segments(harness: EngineHarness) -> None:
    harness = EngineHarness(segment_events_max=4)
    jobs = queue(harness, 10)
    harness.log.checkpoint()
    jobs.put([{"n": 11}])
    held = jobs.claim("a", 11)
    jobs.nack("a", [held[0], held[5], held[10]])
    assert [(job.seq, job.data) for job in jobs.claim("b", 9)] == [(n, {"n": n}) for n in (1, 6, 11)]


def test_reads_and_counts_do_not_touch_leases(harness: EngineHarness) -> None:
    jobs = queue(harness, 2)
    jobs.claim("a", 1)
    assert [record.seq for record in jobs.topic.read().records] == [1, 2]
    assert jobs.counts() == (1, 1, 0)


def test_listeners_are_notified_when_a_job_may_be_claimable(harness: EngineHarness) -> None:
    jobs = queue(harness, 3)
    rung: list[int] = []
    wake = lambda: rung.append(1)  # noqa: E731
    jobs.add_listener(wake)

    def rings(call: Any) -> bool:
        rung.clear()
        call()
        return bool(rung)

    assert rings(lambda: jobs.put("x"))
    held = operations_of(jobs).claim_for_all([ClaimRequest("a", 3, None, "conn")])[0].jobs()
    assert rings(lambda: jobs.ack("a", held[0]))
    assert rings(lambda: jobs.nack("a", held[1]))
    assert rings(lambda: operations_of(jobs).release_connection("conn"))
    jobs.claim("a", 1)
    harness.clock.tick(1_001)
    assert rings(jobs.counts)
    jobs.remove_listener(wake)
    assert not rings(lambda: jobs.put("y"))


def test_a_claim_that_expires_leases_notifies_listeners(harness: EngineHarness) -> None:
    jobs = queue(harness, 3)
    jobs.claim("a", 2)
    rung: list[int] = []
    jobs.add_listener(lambda: rung.append(1))
    harness.clock.tick(1_001)
    assert seqs(jobs.claim("b", 1)) == [1]
    assert rung, "job 2 became claimable, and a waiting worker has to hear of it"


def test_a_claim_skips_unreadable_jobs_and_raises_if_none_is_readable() -> None:
    harness = EngineHarness(segment_events_max=2)
    jobs = queue(harness, 2)
    harness.log.checkpoint()
    jobs.put([{"n": 3}, {"n": 4}])
    harness.log.checkpoint()
    damaged = min(harness.files(".data"))
    for pos in range(len(harness.disk.tree()[damaged])):
        harness.disk.flip_bit(damaged, pos, 0)
    jobs = harness.restart("kill").queue("jobs")
    assert seqs(jobs.claim("a", 4)) == [3, 4]
    harness.clock.tick(1_001)
    with pytest.raises(Corrupt, match=r"jobs \[1, 2\] cannot be read"):
        jobs.claim("b", 2)
    assert seqs(jobs.claim("c", 2)) == [3, 4]


def test_a_claim_does_not_block_while_it_uses_memory_only(harness: EngineHarness) -> None:
    jobs = queue(harness, 3)
    assert not operations_of(jobs).can_claim_without_blocking(1), "lease ids are put on record first"
    jobs.claim("a", 1)
    assert operations_of(jobs).can_claim_without_blocking(1)
    assert not operations_of(jobs).can_claim_without_blocking(1 << 20)
    harness.log.checkpoint()
    assert not operations_of(jobs).can_claim_without_blocking(1), "the next job is in a file"
    durable = harness.log.queue("durable", leases_durable=True)
    durable.put("x")
    assert not operations_of(durable).can_claim_without_blocking(1)


def test_a_claim_that_may_move_dead_letters_can_block(harness: EngineHarness) -> None:
    """Only a job that was delivered before can be moved; fresh ones need memory alone."""
    jobs = harness.log.queue("dying", durability="ephemeral", max_deliveries=2, dead_letter="dead")
    jobs.put([1, 2])
    assert operations_of(jobs).can_claim_without_blocking(1)
    held = jobs.claim("w")
    assert not operations_of(jobs).can_claim_without_blocking(1)
    jobs.nack("w", held)
    assert not operations_of(jobs).can_claim_without_blocking(1)
    jobs.ack("w", jobs.claim("w"))
    assert operations_of(jobs).can_claim_without_blocking(1)


# Handles --------------------------------------------------------------------------------------------------


def test_a_log_is_not_a_queue(harness: EngineHarness) -> None:
    log = harness.log.topic("log")
    for ask in (log.queue, lambda: harness.log.queue("log"), lambda: harness.log.queue("log", lease_ms=5)):
        with pytest.raises(NotAQueue) as caught:
            ask()
        assert caught.value.code == "not_a_queue"
    with pytest.raises(TopicExists):
        harness.log.topic("log", type="queue")


def test_a_queue_is_created_once_and_configured_later(harness: EngineHarness) -> None:
    with pytest.raises(TopicNotFound):
        harness.log.queue("jobs", create=False)
    first = queue(harness, 2)
    first.claim("a")
    second = harness.log.queue("jobs", create=False, lease_ms=7_000)
    assert second.counts() == (1, 1, 0), "handles share one state"
    assert second.topic.config.lease_ms == 7_000


@pytest.mark.parametrize(
    "call",
    [
        lambda jobs: jobs.claim(""),
        lambda jobs: jobs.claim("n" * 129),
        lambda jobs: jobs.claim("a", 0),
        lambda jobs: jobs.claim("a", lease_ms=-1),
        lambda jobs: jobs.ack("", [1]),
        lambda jobs: jobs.ack("a", [-1]),
        lambda jobs: jobs.ack("a", [1, 2], [1]),
        lambda jobs: jobs.nack("a", [1], delay_ms=-1),
        lambda jobs: jobs.extend("a", [1], lease_ms=-1),
        lambda jobs: jobs.put("x", priority=1_001),
        lambda jobs: jobs.put("x", run_at_ms=5, delay_ms=5),
        lambda jobs: jobs.put("x", delay_ms=-1),
        lambda jobs: jobs.put(["x"], meta=[{}, {}], priority=1),
    ],
)
def test_invalid_arguments_are_refused_and_change_nothing(harness: EngineHarness, call: Any) -> None:
    jobs = queue(harness, 2)
    jobs.claim("a", 1)
    with pytest.raises(BadInput):
        call(jobs)
    assert jobs.counts() == (1, 1, 0)
    assert jobs.topic.head_seq == 2


def test_a_reader_can_count_and_not_claim(harness: EngineHarness) -> None:
    queue(harness, 2)
    jobs = harness.reader().queue("jobs", create=False)
    assert jobs.counts() == (2, 0, 0)
    with pytest.raises(ReadOnly):
        jobs.claim("a")


def test_a_dropped_queue_raises(harness: EngineHarness) -> None:
    jobs = queue(harness, 1)
    held = jobs.claim("a")
    harness.log.drop("jobs")
    for call in (lambda: jobs.claim("a"), lambda: jobs.ack("a", held), jobs.counts):
        with pytest.raises(TopicNotFound):
            call()
    assert operations_of(jobs).release_connection("conn") == 0
    again = queue(harness, 1)
    assert again.claim("a")[0].lease_id == 1, "another queue of that name starts anew"
    harness.log.close()
    with pytest.raises(Closed):
        again.claim("a")
