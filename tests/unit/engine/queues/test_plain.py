"""Fast paths for plain jobs and history steps have the same results as the general ones; claims limited by bytes."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from tests.unit.engine.harness import EngineHarness

from tidelog.engine import ClaimRequest, Queue
from tidelog.engine.queues import history
from tidelog.engine.queues import jobs as reading
from tidelog.engine.queues.history import HistoryRow, JobStep
from tidelog.engine.queues.jobs import ClaimResult
from tidelog.engine.queues.leases import LeaseTable
from tidelog.engine.queues.queue import operations_of

NO_BYTES = 1 << 62


def queue(world: EngineHarness, **config: Any) -> Queue:
    return world.log.queue("jobs", **{"lease_ms": 1_000, **config})


def put(jobs: Queue, random: Random) -> None:
    many: list[Any] = [random.choice([None, 1.5, "ä" * random.randrange(5), {"k": [1]}]) for _ in range(3)]
    for _ in range(random.randrange(1, 9)):
        plain = random.randrange(4) > 0
        tag = None if plain else random.choice([None, "t"])
        meta = None if plain else random.choice([None, {"m": "v"}])
        jobs.put(random.choice([many, many[0], b"raw"]), tag=tag, meta=meta, node=random.choice([None, "n"]))


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
@pytest.mark.parametrize("seed", range(20))
def test_jobs_read_as_texts_and_as_chunks_are_equal(
    seed: int, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claimed(*, plainly: bool) -> list[Any]:
        world, random = EngineHarness(), Random(seed)
        jobs, found = queue(world, durability=durability), []
        for _ in range(12):
            put(jobs, random)
            with monkeypatch.context() as patched:
                if not plainly:
                    patched.setattr(reading, "read_job_texts", lambda *_: None)
                leased = operations_of(jobs).claim_for_all(
                    [ClaimRequest("w", random.randrange(1, 9)), ClaimRequest("v", random.randrange(3))]
                )
            found += [(each.jobs(), each.to_json_texts(), each.enqueued_at_ms(), each.ready) for each in leased]
            held = leased[0]
            jobs.ack("w", held.seqs[: random.randrange(9)])
            jobs.nack("w", held.seqs)
            if random.randrange(5) == 0:
                world.log.checkpoint()
            world.clock.tick(random.randrange(400))
        return found

    assert claimed(plainly=True) == claimed(plainly=False)


def test_plain_jobs_are_read_without_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what they cost would be that of thousands."""
    jobs = queue(EngineHarness())
    monkeypatch.setattr(reading, "plan_reads", lambda *_: pytest.fail("plain jobs in memory need no plan"))
    jobs.put(["a", "b", "c"])
    jobs.put("d")
    assert [job.data for job in jobs.claim("w", 2)] == ["a", "b"]
    assert [job.data for job in jobs.claim("w", 5)] == ["c", "d"]


def test_a_schedule_after_plain_jobs_is_read() -> None:
    jobs = queue(EngineHarness())
    jobs.put([1, 2])
    assert jobs.claim("w")[0].data == 1
    jobs.put("urgent", priority=5)
    jobs.put([3])
    assert [job.data for job in (jobs.claim("w")[0], jobs.claim("w")[0], jobs.claim("w")[0])] == ["urgent", 2, 3]


def test_a_schedule_in_the_next_segment_is_read_before_the_first_claim() -> None:
    """The first segment has plain jobs only, which are not looked at one by one; the search goes on after it."""
    world = EngineHarness(segment_events_max=2)
    jobs = queue(world)
    jobs.put([1, 2])
    jobs.put("later", delay_ms=500)
    jobs.put("urgent", priority=5)
    assert [jobs.claim("w")[0].data for _ in range(3)] == ["urgent", 1, 2]
    assert jobs.claim("w", 10) == []
    world.clock.tick(500)
    assert [job.data for job in jobs.claim("w", 10)] == ["later"]


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


def handed(leased: list[ClaimResult]) -> list[list[int]]:
    return [each.seqs for each in leased]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_claim_is_limited_by_bytes(checkpointed: bool) -> None:
    """Jobs above the limit are claimable in their old order and were not delivered."""
    world = EngineHarness()
    jobs = queue(world)
    jobs.put([b"x" * 100 for _ in range(6)])
    if checkpointed:
        world.log.checkpoint()
    first = operations_of(jobs).claim_for_all([ClaimRequest("w", 6, bytes_max=250)])
    assert handed(first) == [[1, 2]]
    assert first[0].ready == 4 == jobs.counts().ready
    assert handed(operations_of(jobs).claim_for_all([ClaimRequest("w", 6, bytes_max=300)])) == [[3, 4, 5]]
    assert handed(operations_of(jobs).claim_for_all([ClaimRequest("w", 6, bytes_max=10)])) == [[6]], "one in any case"
    world.clock.tick(1_001)
    again = operations_of(jobs).claim_for_all([ClaimRequest("w", 6, bytes_max=NO_BYTES)])[0]
    assert again.deliveries == [2] * 6, "those that were left were delivered once before"


def test_each_claimer_of_a_round_has_its_own_byte_limit() -> None:
    jobs = queue(EngineHarness())
    jobs.put([b"x" * 100 for _ in range(8)])
    assert handed(operations_of(jobs).claim_for_all([ClaimRequest("w", 4, bytes_max=150), ClaimRequest("v", 4)])) == [
        [1],
        [2, 4, 6, 8],
    ]
    assert handed(operations_of(jobs).claim_for_all([ClaimRequest("w", 8)])) == [[3, 5, 7]]


def test_urgent_jobs_are_claimed_before_requeued_ones() -> None:
    jobs = queue(EngineHarness())
    jobs.put([b"x" * 100 for _ in range(4)])
    assert handed(operations_of(jobs).claim_for_all([ClaimRequest("w", 4, bytes_max=100)])) == [[1]]
    jobs.put(b"y", priority=1)
    assert handed(
        [
            operations_of(jobs).claim_for_all([ClaimRequest("w", 1)])[0],
            operations_of(jobs).claim_for_all([ClaimRequest("w", 1)])[0],
        ]
    ) == [
        [5],
        [2],
    ]


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


NOTES = [
    JobStep(5, "restarted"),
    JobStep(5, "enqueued", (3, 9)),
    JobStep(5, "claimed", [3, 4], "w", [7, 8], [1, 2], [0, 5], [99, 99]),
    JobStep(5, "acked", [3], 'quote" % \\ ä %d', [7]),
    JobStep(5, "dead_lettered", [3, 4], None, None, [2, 2]),
    JobStep(5, "redriven", range(3, 6)),
    JobStep(5, "nacked", [3], "w", [7], None, None, [100]),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.event)
def test_a_step_is_encoded_as_its_row(note: JobStep) -> None:
    def rows() -> list[dict[str, Any]]:
        if note.seqs is None:
            return [{}]
        if note.event == "enqueued":
            return [{"seq": note.seqs[0], "last_seq": note.seqs[1]}]
        names = ("lease_id", "deliveries", "waited_ms", "deadline_ms")
        columns = [(name, column) for name, column in zip(names, note[4:], strict=True) if column]
        node = {} if note.node is None else {"node": note.node}
        return [{"seq": seq, **node, **{n: c[at] for n, c in columns}} for at, seq in enumerate(note.seqs)]

    wanted = [{"ts_ms": 5, "event": note.event, **row} for row in rows()]
    assert history.encode_steps(note) == [msgspec.json.encode(row) for row in wanted]
    assert [msgspec.json.decode(text, type=HistoryRow).ts_ms for text in history.encode_steps(note)] == [5] * len(
        wanted
    )


# ── the machine, a batch at a time ────────────────────────────────────────────────────────────────


def test_settling_returns_jobs_of_other_holders() -> None:
    leases = LeaseTable()
    leases.cursor = 10
    leases.grant([1, 2, 3], "w", 100)
    leases.grant([4], "v", 100, "conn")
    ended, skipped = leases.begin_settle([1, 1, 2, 4, 9], "w", [1, None, 99, None, None])
    assert ([seq for seq, _ in ended], skipped) == ([1], [1, 2, 4, 9])
    assert leases.begin_settle([4], "v", [4])[0][0][0] == 4
    assert leases.count_for_connection("conn") == 0
    assert (sorted(leases.leased), sorted(leases.pending)) == ([2, 3], [1, 4])


def test_a_sweep_returns_expired_leases_and_due_delays() -> None:
    leases = LeaseTable()
    leases.cursor = 10
    leases.grant([1], "w", 100)
    leases.schedule(11, 200, 0, 50)
    assert not leases.sweep(100), "a lease ends past its deadline"
    assert [seq for seq, _ in leases.sweep(101).expired] == [1]
    assert not leases.sweep(199)
    assert leases.sweep(200).ready == [11], "a delay ends at its time"
