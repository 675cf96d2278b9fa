"""Operations on a queue, step by step: the frames that each logs, what it returns, and the state after it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
from tests.unit.engine.harness import TIMEOUT_S, EngineHarness

from tidelog.engine import ClaimRequest, ClaimResult, Queue, divide_jobs
from tidelog.engine.manifest import LeaseRow, QueueRow
from tidelog.engine.queues import claim, queue_state
from tidelog.engine.queues.claim import BlockingClaimWindow, _Waiter
from tidelog.engine.queues.history import HistoryWriter
from tidelog.engine.queues.jobs import TIME_MS_MAX, read_schedules
from tidelog.engine.queues.leases import LeaseTable
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.queues.queue_state import QueueCommit, QueueState
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Damaged, Error, TopicNotFound
from tidelog.formats import control_frames, frame
from tidelog.formats.frame import SEQ_MAX, Frame
from tidelog.testing import ManualClock
from tidelog.wal import Shard

LEASE_MS = 1_000


def queue(harness: EngineHarness, **config: Any) -> Queue:
    return harness.log.queue("jobs", **{"lease_ms": LEASE_MS, "durability": "fsync", **config})


def decode(piece: bytes) -> tuple[Any, ...]:
    parsed = frame.read_frame(piece, 0, len(piece))
    assert isinstance(parsed, Frame)
    body = control_frames.decode(parsed.kind, piece[parsed.data_pos : parsed.data_end])
    if isinstance(body, control_frames.Delete):
        return ("delete", body.seqs, body.bound_head)
    assert isinstance(body, control_frames.Lease)
    return (body.event.name, parsed.seq, body.lease_id, body.deadline_ms, body.deliveries, body.node)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commits of queues, as (durable, frame, frame...)."""
    found: list[Any] = []
    submit = TopicState.submit

    def recording(self: TopicState, commit: Any) -> None:
        if isinstance(commit, QueueCommit):
            assert commit.frames == len(commit.pieces)
            found.append((commit.durable, *(decode(bytes(piece)) for piece in commit.pieces)))
        submit(self, commit)

    monkeypatch.setattr(TopicState, "submit", recording)
    monkeypatch.setattr(queue_state, "LEASE_IDS_AHEAD", 4)
    return found


def taken(logged: list[Any]) -> list[Any]:
    found, logged[:] = list(logged), []
    return found


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_frames_of_durable_leases(logged: list[Any], durability: str) -> None:
    harness = EngineHarness()
    jobs, durable = queue(harness, durability=durability, leases_durable=True), durability == "fsync"
    now_ms = harness.clock.now_us() // 1000
    end_ms = now_ms + LEASE_MS
    jobs.put(list(range(6)))
    jobs.claim("a")
    assert taken(logged) == [
        (True, ("RELEASED", 0, 5, 0, 0, "")),
        (durable, ("CLAIMED", 1, 1, end_ms, 1, "a")),
    ]
    jobs.claim("b", 4)
    claimed = [("CLAIMED", seq, seq, end_ms, 1, "b") for seq in (2, 3, 4, 5)]
    assert taken(logged) == [(durable, *claimed)], "ids up to the mark need no other one"
    jobs.claim("c")
    assert taken(logged) == [
        (True, ("RELEASED", 0, 10, 0, 0, "")),
        (durable, ("CLAIMED", 6, 6, end_ms, 1, "c")),
    ]
    assert jobs.nack("b", [3, 9]) == (1, [9], 1, 5)
    assert taken(logged) == [(durable, ("RELEASED", 3, 3, 0, 1, "b"))]
    assert jobs.nack("b", [2], delay_ms=7) == (1, [], 1, 4)
    assert taken(logged) == [(durable, ("RELEASED", 2, 2, now_ms + 7, 1, "b"))]
    assert jobs.extend("b", [4, 1], lease_ms=5_000) == (1, [1], {4: now_ms + 5_000})
    assert taken(logged) == [(durable, ("EXTENDED", 4, 4, now_ms + 5_000, 1, "b"))]
    assert jobs.claim("d")[0].deliveries == 2
    assert taken(logged) == [(durable, ("CLAIMED", 3, 7, end_ms, 2, "d"))]
    assert jobs.ack("b", [5, 4, 1]) == (2, [1], 0, 3)
    assert taken(logged) == [(durable, ("delete", (4, 5), 7))]
    assert jobs.nack("d", [3], delay_ms=SEQ_MAX) == (1, [], 0, 2)
    assert taken(logged) == [(durable, ("RELEASED", 3, 7, TIME_MS_MAX, 2, "d"))]
    assert jobs.ack("a", [9]) == (0, [9], 0, 2)
    assert jobs.nack("a", [9]) == (0, [9], 0, 2)
    assert jobs.extend("a", [9], lease_ms=5_000) == (0, [9], {})
    assert taken(logged) == [], "nothing to log"
    assert jobs.claim("d", 5) == []
    assert taken(logged) == [(True, ("RELEASED", 0, 16, 0, 0, ""))], "without a job no lease is logged"


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
def test_frames_of_leases_that_are_not_durable(logged: list[Any], durability: str) -> None:
    """An ephemeral queue logs nothing, the others the ids and the deletes."""
    harness = EngineHarness()
    jobs, durable = queue(harness, durability=durability), durability == "fsync"
    logs = durability != "ephemeral"
    jobs.put(list(range(3)))
    held = jobs.claim("a", 3)
    assert taken(logged) == ([(True, ("RELEASED", 0, 7, 0, 0, ""))] if logs else [])
    jobs.nack("a", held[0])
    jobs.extend("a", held[1], lease_ms=5_000)
    assert taken(logged) == []
    assert jobs.ack("a", held[1:]) == (2, [], 1, 0)
    assert taken(logged) == ([(durable, ("delete", (2, 3), 4))] if logs else [])
    assert jobs._state.lease_id_ceiling == (7 if logs else 0)
    assert jobs._state._reserving is None


def test_a_lost_connection_logs_its_durable_leases_without_waiting(
    logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = EngineHarness()
    jobs = queue(harness, leases_durable=True)
    jobs.put(list(range(3)))
    operations_of(jobs).claim_for_all([ClaimRequest("a", 2, None, "conn")])
    taken(logged)
    woken: list[Shard] = []
    monkeypatch.setattr(Shard, "wake_writer", lambda shard: woken.append(shard))
    assert operations_of(jobs).release_connection("other") == 0
    assert (taken(logged), woken) == ([], [])
    assert operations_of(jobs).release_connection("conn") == 2
    assert taken(logged) == [(False, ("RELEASED", 1, 1, 0, 1, "a"), ("RELEASED", 2, 2, 0, 1, "a"))]
    assert woken == [jobs.topic._state.shard], "no caller waits: the writer has to be woken"
    jobs.topic._state.shard.sync()
    assert jobs.counts() == (3, 0, 0)


def test_a_lost_connection_logs_no_lease_that_is_not_durable(logged: list[Any]) -> None:
    jobs = queue(EngineHarness())
    jobs.put(list(range(3)))
    operations_of(jobs).claim_for_all([ClaimRequest("a", 2, None, "conn")])
    taken(logged)
    assert operations_of(jobs).release_connection("conn") == 2
    assert taken(logged) == []


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_frames_of_dead_letters(logged: list[Any], durability: str) -> None:
    harness = EngineHarness()
    jobs = queue(harness, durability=durability, max_deliveries=1, dead_letter="dead")
    jobs.put(list(range(3)))
    jobs.nack("a", jobs.claim("a", 2))
    taken(logged)
    assert [job.seq for job in jobs.claim("a", 2)] == [3]
    assert taken(logged) == [(durability == "fsync", ("delete", (1, 2), 4), ("RELEASED", 0, 6, 0, 2, ""))]
    assert jobs._state.leases.dead_lettered == jobs._state.staged_dead_letters == 2
    jobs.nack("a", [3])
    assert jobs.claim("a", 2) == []
    assert taken(logged) == [(durability == "fsync", ("delete", (3,), 4), ("RELEASED", 0, 6, 0, 3, ""))]
    assert jobs._state.copied_dead_letters == {}


# Steps without a frame ------------------------------------------------------------------------------------


def test_each_step_notifies_listeners_once() -> None:
    harness = EngineHarness()
    jobs = queue(harness, durability="ephemeral")
    rung: list[int] = []
    jobs.put(list(range(5)))
    jobs.add_listener(lambda: rung.append(1))

    def rings(call: Callable[[], object]) -> int:
        rung.clear()
        call()
        return len(rung)

    assert rings(lambda: operations_of(jobs).claim_for_all([ClaimRequest("a", 4, None, "conn")])) == 0
    assert rings(lambda: jobs.nack("a", [1])) == 1
    assert rings(lambda: operations_of(jobs).release_connection("never")) == 0
    assert rings(lambda: operations_of(jobs).count_leases("conn")) == 0
    assert rings(jobs.counts) == 0
    harness.clock.tick(LEASE_MS + 1)
    assert rings(lambda: operations_of(jobs).count_leases("conn")) == 1
    assert jobs.expired_leases == 3
    jobs.claim("a")
    harness.clock.tick(LEASE_MS + 1)
    assert rings(lambda: jobs.claim("b")) == 1
    assert jobs.expired_leases == 4
    assert rings(lambda: jobs.claim("b")) == 0


def test_an_ack_needs_no_comparison_with_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are compared with the index only if something else than an ack removed jobs."""
    harness = EngineHarness()
    jobs = queue(harness)
    jobs.put(list(range(6)))
    jobs.claim("a", 4)
    compared: list[list[int]] = []
    known = LeaseTable.known_seqs

    def recording(self: LeaseTable) -> list[int]:
        compared.append(known(self))
        return compared[-1]

    monkeypatch.setattr(LeaseTable, "known_seqs", recording)
    jobs.ack("a", [1])
    jobs.counts()
    assert compared == []
    jobs.topic.delete(seqs=[2])
    jobs.ack("a", [3])
    assert compared == [[2, 3, 4]]
    jobs.topic.delete(seqs=[6])
    jobs._state.remove_known(lambda: None)
    jobs.counts()
    assert compared == [[2, 3, 4], [4]], "the delete was not known before"
    assert jobs.counts() == (1, 1, 0)


def test_an_ack_of_a_queue_that_is_dropped_meanwhile_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    jobs.put([1, 2])
    jobs.claim("a")
    future = operations_of(jobs).submit_ack("a", [1])
    jobs._topic_state.is_dropped = True
    monkeypatch.setattr(queue_state.QueueState, "remove_known", lambda *_: pytest.fail("the topic is gone"))
    assert future.wait().count == 1


# The manifest row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "leases_durable", "final", "row"),
    [
        ("fsync", False, False, QueueRow(7, 0)),
        ("fsync", False, True, QueueRow(3, 0)),
        ("ephemeral", True, False, QueueRow(3, 0)),
        ("ephemeral", False, True, QueueRow(3, 0)),
        (
            "fsync",
            True,
            False,
            QueueRow(
                7, 0, (LeaseRow(1, 1, 1_000, "a"), LeaseRow(2, 2, 1_000, "a")), ((1, 1), (2, 1), (3, 1)), ((3, 9),)
            ),
        ),
    ],
)
@pytest.mark.usefixtures("logged")
def test_the_row_of_a_queue(durability: str, leases_durable: bool, final: bool, row: QueueRow) -> None:
    """Job 1 is leased, the ack of job 2 is pending, job 3 is delayed, job 4 a dead letter in progress."""
    harness = EngineHarness()
    harness.clock.set_us(0)
    jobs = queue(harness, durability=durability, leases_durable=leases_durable)
    assert jobs._state.row(final=final) is None
    jobs.put(list(range(4)))
    jobs.claim("a", 3)
    jobs.nack("a", [3], delay_ms=9)
    jobs._state.leases.begin_settle([2], "a", [None])
    jobs._state.leases.reserve_dead([4])
    assert jobs._state.row(final=final) == row
    jobs._state.leases.lease_id = jobs._state.lease_id_ceiling = 0
    jobs._state.leases.dead_lettered = 1
    found = jobs._state.row(final=final)
    assert found is not None
    assert (found.lease_id, found.dead_lettered) == (0, 1)


# Lease ids ------------------------------------------------------------------------------------------------


def test_ids_that_another_claim_used_meanwhile_are_reserved_again(
    logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    jobs.put(list(range(9)))
    reserve, calls = QueueState.reserve_lease_ids, []

    def late(self: QueueState, ids: int) -> None:
        calls.append(ids)
        reserve(self, ids)
        if len(calls) == 1:
            self.leases.lease_id = self.lease_id_ceiling  # as another claimer

    monkeypatch.setattr(QueueState, "reserve_lease_ids", late)
    assert [job.lease_id for job in jobs.claim("a", 2)] == [7, 8]
    assert calls == [2, 2]
    assert [entry[1][2] for entry in taken(logged)] == [6, 12]


def test_reservations_at_the_same_time_share_one_commit(logged: list[Any]) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    state = jobs._state
    with state.topic.lock:
        first = Thread(target=state.reserve_lease_ids, args=(2,), daemon=True)
        ceiling = state.leases.lease_id + 2 + 4
        commit = QueueCommit(
            state,
            [state.encode_lease_mark(ceiling, 0)],
            lambda error: state._on_ids_reserved(ceiling, error),
            durable=True,
        )
        state.topic.submit(commit)
        state._reserving = commit.future
    first.start()
    first.join(TIMEOUT_S)
    assert len(taken(logged)) == 1
    assert [state.lease_id_ceiling, state._reserving] == [6, None]
    state._on_ids_reserved(3, None)
    assert state.lease_id_ceiling == 6, "it never falls"
    state._on_ids_reserved(9, Error("refused"))
    assert state.lease_id_ceiling == 6


# Schedules ------------------------------------------------------------------------------------------------


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The schedules that are applied and the ranges of jobs that are seen, in order."""
    found: list[Any] = []
    apply, seen = LeaseTable.schedule, HistoryWriter.add_enqueued

    def schedule(self: LeaseTable, seq: int, run_at_ms: int | None, priority: int, now_ms: int) -> None:
        found.append(("schedule", seq, run_at_ms, priority))
        apply(self, seq, run_at_ms, priority, now_ms)

    def add_enqueued(self: HistoryWriter, first: int, last: int) -> None:
        found.append((first, last))
        seen(self, first, last)

    monkeypatch.setattr(LeaseTable, "schedule", schedule)
    monkeypatch.setattr(HistoryWriter, "add_enqueued", add_enqueued)
    return found


def put_scheduled(jobs: Queue) -> None:
    jobs.put(["plain", "plain"])
    jobs.put("hot", priority=5)
    jobs.put("plain")
    jobs.put("later", run_at_ms=77)
    jobs.put(["plain", "plain"])


APPLIED = [("schedule", 3, None, 5), ("schedule", 5, 77, 0)]


@pytest.mark.parametrize(
    ("checkpoint_after", "segment_events_max", "read_bytes", "steps"),
    [
        (0, 100, 1 << 20, [*APPLIED, (1, 7)]),
        (7, 100, 1 << 20, [*APPLIED, (1, 7)]),
        (7, 2, 1 << 20, [(1, 2), APPLIED[0], (3, 4), APPLIED[1], (5, 7)]),
        (7, 100, 1, [APPLIED[0], (1, 3), APPLIED[1], (4, 7)]),
        (0, 2, 1 << 20, [(1, 2), APPLIED[0], (3, 4), APPLIED[1], (5, 7)]),
    ],
)
def test_schedules_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
    schedules: list[Any],
    checkpoint_after: int,
    segment_events_max: int,
    read_bytes: int,
    steps: list[Any],
) -> None:
    monkeypatch.setattr(queue_state, "_SCHEDULE_READ_BYTES", read_bytes)
    harness = EngineHarness(segment_events_max=segment_events_max)
    jobs = queue(harness)
    put_scheduled(jobs)
    if checkpoint_after:
        harness.log.checkpoint()
    schedules.clear()
    jobs._state.read_new_schedules()
    assert schedules == steps
    assert jobs._state.scheduled_to == 7
    jobs._state.read_new_schedules()
    jobs.put("plain")
    jobs._state.read_new_schedules()
    assert schedules == [*steps, (8, 8)]


def test_schedules_of_jobs_that_are_removed_while_they_are_read_are_ignored(
    monkeypatch: pytest.MonkeyPatch, schedules: list[Any]
) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    put_scheduled(jobs)
    read = read_schedules

    def reading(rows: Any) -> Any:
        jobs.topic.delete(seqs=[3])
        return read(rows)

    monkeypatch.setattr(queue_state, "read_schedules", reading)
    jobs._state.read_new_schedules()
    assert schedules == [APPLIED[1], (1, 7)]
    harness = EngineHarness()
    jobs = queue(harness)
    put_scheduled(jobs)
    jobs.topic.delete(before_seq=8)
    schedules.clear()
    jobs._state.read_new_schedules()
    assert schedules == [(1, 7)], "nothing is left to read"
    assert jobs._state.scheduled_to == 7


def test_schedules_that_another_thread_read_meanwhile_are_applied_once(
    monkeypatch: pytest.MonkeyPatch, schedules: list[Any]
) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    put_scheduled(jobs)
    read = read_schedules

    def reading(rows: Any) -> Any:
        monkeypatch.setattr(queue_state, "read_schedules", read)
        jobs.put("hotter", priority=6)
        jobs._state.read_new_schedules()
        return read(rows)

    monkeypatch.setattr(queue_state, "read_schedules", reading)
    jobs._state.read_new_schedules()
    assert schedules == [*APPLIED, ("schedule", 8, None, 6), (1, 8)]


def test_schedules_that_cannot_be_read_are_reported_and_passed(
    monkeypatch: pytest.MonkeyPatch, schedules: list[Any]
) -> None:
    harness = EngineHarness(segment_events_max=2)
    jobs = queue(harness)
    put_scheduled(jobs)
    harness.log.checkpoint()
    part: Any = jobs._topic_state.index.find_part(3)
    entries = type(part).entries

    def fail_one(self: Any) -> Any:
        if self.base == 3:
            raise Damaged("the index does not verify")
        return entries(self)

    monkeypatch.setattr(type(part), "entries", fail_one)
    schedules.clear()
    jobs._state.read_new_schedules()
    assert schedules == [(1, 2), (3, 4), APPLIED[1], (5, 7)]
    assert jobs._state.scheduled_to == 7
    assert jobs._topic_state.damage == ["jobs: the schedules of its jobs: the index does not verify"]


# Claims without blocking ----------------------------------------------------------------------------------


def without_blocking(jobs: Queue, count: int = 1) -> bool:
    return operations_of(jobs).can_claim_without_blocking(count)


@pytest.mark.usefixtures("logged")
def test_a_claim_blocks_for_ids_above_the_reserved_ones() -> None:
    jobs = queue(EngineHarness())
    jobs.put(list(range(9)))
    jobs.claim("a")  # reserves ids up to 5
    assert without_blocking(jobs, 4)
    assert not without_blocking(jobs, 5)
    assert without_blocking(queue_of_class(jobs, "ephemeral"), 5_000), "an ephemeral queue reserves no ids"


def queue_of_class(jobs: Queue, durability: str) -> Queue:
    log: Any = jobs._topic_state.context.topics
    made: Queue = log.queue(f"of-class-{durability}", durability=durability)
    made.put(["x"])
    return made


def test_a_claim_blocks_for_expiry_routers_and_syncs() -> None:
    harness = EngineHarness()
    jobs = queue(harness, ttl_ms=50)
    jobs.put(list(range(3)))
    jobs.claim("a")
    assert without_blocking(jobs)
    harness.clock.tick(51)
    assert not without_blocking(jobs), "jobs expire first"
    strong = harness.log.queue("strong", durability="disk", consistency="strong")
    strong.put([1, 2])
    strong.claim("a")
    assert without_blocking(strong)
    strong.put(3)
    assert not without_blocking(strong), "the jobs are synced first"
    fed = harness.log.queue("fed")
    fed.put([1, 2])
    fed.claim("a")
    harness.log.router("r", "source", "fed")
    harness.log.topic("source").append("x")
    assert not without_blocking(fed), "records are forwarded first"


@pytest.mark.parametrize(
    ("config", "returned", "blocks"),
    [
        ({"max_deliveries": 5, "dead_letter": "dead"}, "leased", True),
        ({"max_deliveries": 5, "dead_letter": "dead"}, "delayed", True),
        ({"max_deliveries": 5, "dead_letter": "dead"}, "claimable", True),
        ({"max_deliveries": 5, "dead_letter": "dead"}, "none", False),
        ({"max_deliveries": 0, "dead_letter": "dead"}, "leased", False),
    ],
)
def test_a_claim_blocks_if_a_job_may_be_a_dead_letter(config: dict[str, Any], returned: str, blocks: bool) -> None:
    jobs = queue(EngineHarness(), **config)
    jobs.put(list(range(9)))
    jobs.claim("a")
    if returned == "none":
        jobs.ack("a", [1])
    elif returned != "leased":
        jobs.nack("a", [1], delay_ms=500 if returned == "delayed" else 0)
    assert without_blocking(jobs) is not blocks


def test_a_claim_blocks_if_the_next_job_is_in_a_file() -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    jobs.put([1, 2])
    jobs.claim("a", 2)
    harness.log.checkpoint()
    assert without_blocking(jobs), "there is no next job"
    jobs.put([3])
    assert without_blocking(jobs), "the next one is in memory"
    jobs.nack("a", [2])
    assert not without_blocking(jobs), "a returned job may be in any file"


# Rounds ---------------------------------------------------------------------------------------------------


def test_counts_of_a_request_are_bounded() -> None:
    jobs = queue(EngineHarness())
    jobs.put(list(range(1_003)))
    none, negative, most = operations_of(jobs).claim_for_all(
        [ClaimRequest("a", 0), ClaimRequest("b", -3), ClaimRequest("c", 1_001)]
    )
    assert (none.seqs, negative.seqs, most.seqs) == ([], [], list(range(1, 1_001)))
    assert [none.ready, negative.ready, most.ready] == [3] * 3
    assert operations_of(jobs).claim_for_all([ClaimRequest("a", -1)])[0].seqs == []
    assert operations_of(jobs).claim_for_all([ClaimRequest("a", 1)])[0].seqs == [1_001]


def test_defaults_of_a_request() -> None:
    assert ClaimRequest("a", 1) == ("a", 1, None, None, None)
    assert claim.CLAIM_JOBS_MAX == 1_000
    assert [claim.clamp_lease(ms) for ms in (0, 99, 100, 101, 86_400_000, 86_400_001)] == [
        100,
        100,
        100,
        101,
        86_400_000,
        86_400_000,
    ]


@pytest.mark.parametrize(
    ("available", "counts", "shares"),
    [
        (5, [-1], [[]]),
        (5, [0], [[]]),
        (2, [5], [[0, 1]]),
        (5, [-1, 2], [[], [0, 1]]),
        (3, [1, 1, 5], [[0], [1], [2]]),
        (4, [1, 2, 2], [[0], [1, 3], [2]]),
    ],
)
def test_shares_by_index(available: int, counts: list[int], shares: list[list[int]]) -> None:
    assert divide_jobs(available, counts) == shares


def test_expired_jobs_and_new_schedules_are_applied_before_a_claim() -> None:
    harness = EngineHarness()
    jobs = queue(harness, ttl_ms=50)
    jobs.put([1, 2])
    harness.clock.tick(40)
    jobs.put(3)
    jobs.put("hot", priority=1)
    harness.clock.tick(11)
    (found,) = operations_of(jobs).claim_for_all([ClaimRequest("a", 9)])
    assert found.seqs == [3, 4]
    assert sorted(zip(found.lease_ids, found.seqs, strict=True)) == [(1, 4), (2, 3)], "the urgent one was taken first"
    assert found.deliveries == [1, 1]
    assert jobs.topic.count == 2


def test_a_strong_queue_makes_jobs_durable_before_they_are_claimed() -> None:
    harness = EngineHarness()
    jobs = queue(harness, durability="disk", consistency="strong")
    jobs.put([1, 2])
    jobs.claim("a")
    assert jobs._topic_state.durable_seq == 2
    jobs.put(3)
    harness.disk.fail("sync", at=1)
    with pytest.raises(Error):
        jobs.claim("b", 9)


def test_results_are_ascending_and_keep_their_leases() -> None:
    """As texts from memory and as chunks of files, for one claimer and for several."""
    for checkpointed in (False, True):
        harness = EngineHarness()
        jobs = queue(harness)
        jobs.put(["a", "b"])
        jobs.put("c", priority=1)
        jobs.put(["d", "e", "f"])
        if checkpointed:
            harness.log.checkpoint()
        jobs.nack("w", jobs.claim("w", 1))  # 3: its next delivery is the second one
        first, second = operations_of(jobs).claim_for_all([ClaimRequest("w", 3, 500), ClaimRequest("v", 2)])
        now_ms = harness.clock.now_us() // 1000
        assert (first.seqs, first.lease_ids, first.deliveries) == ([2, 3, 5], [3, 2, 4], [1, 2, 1])
        assert (second.seqs, second.lease_ids, second.deliveries) == ([1, 4], [5, 6], [1, 1])
        assert (first.deadlines, second.deadlines) == ([now_ms + 500] * 3, [now_ms + LEASE_MS] * 2)
        assert [job.data for job in first.jobs()] == ["b", "c", "e"]
        assert [job.data for job in second.jobs()] == ["a", "d"]
        assert (first.ready, second.ready) == (1, 1)


# The window of claimers -----------------------------------------------------------------------------------


def window_of(result: ClaimResult) -> tuple[BlockingClaimWindow, ManualClock, list[list[str]], list[Any]]:
    clock, served, returned = ManualClock(), [], list[Any]()

    def run_round(requests: Any) -> list[ClaimResult]:
        served.append([request.node for request in requests])
        return [result] * len(requests)

    window = BlockingClaimWindow(clock, run_round, lambda request, found: returned.append((request.node, found)))
    return window, clock, served, returned


SOME, NONE = ClaimResult([1], [1], [0], [1], []), ClaimResult([], [], [], [], [])


def test_a_window_is_served_when_it_is_due_and_not_before() -> None:
    window, clock, served, _ = window_of(SOME)
    first, second, outside = _Waiter(), _Waiter(), _Waiter()
    window._window.window_ms = 10
    window._window.join(clock.monotonic_ms(), first, ClaimRequest("a", 1))
    clock.tick(4)
    window._window.join(clock.monotonic_ms(), second, ClaimRequest("b", 1))
    assert (len(window._window), first in window._window, outside in window._window) == (2, True, False)
    assert (window._left_s(first), window._left_s(second), window._left_s(outside)) == (0.006, 0.006, None)
    clock.tick(5)
    window._serve_if_due(first)
    assert served == []
    clock.tick(1)
    window._serve_if_due(outside)
    assert served == []
    assert window._left_s(first) == 0
    clock.tick(5)
    assert window._left_s(first) == 0
    window._serve_if_due(second)
    assert served == [["a", "b"]]
    assert (first.result, second.result) == (SOME, SOME)
    assert first.is_served.is_set()
    assert second.is_served.is_set()
    assert (window._left_s(first), len(window._window)) == (None, 0)
    window._serve_if_due(first)
    assert served == [["a", "b"]]


@pytest.mark.parametrize(("result", "returned"), [(SOME, [("a", SOME)]), (NONE, []), (None, [])])
def test_the_jobs_of_a_claimer_that_left_during_its_round_are_returned(result: Any, returned: list[Any]) -> None:
    window, clock, _, found = window_of(SOME)
    waiter = _Waiter()
    waiter.result = result
    waiter.is_served.set()
    window._leave(waiter, ClaimRequest("a", 1))
    assert found == returned
    window._window.join(clock.monotonic_ms(), waiter, ClaimRequest("a", 1))
    window._leave(waiter, ClaimRequest("a", 1))
    assert (found, len(window._window)) == (returned, 0)


def test_an_error_of_a_round_is_kept_for_each_claimer() -> None:
    window, clock, _, _ = window_of(SOME)
    waiter, error = _Waiter(), Damaged("gone")

    def fail(_: object) -> list[ClaimResult]:
        raise error

    window._run_round = fail
    window._window.join(clock.monotonic_ms(), waiter, ClaimRequest("a", 1))
    window._serve_if_due(waiter)
    assert (waiter.error, waiter.result, waiter.is_served.is_set()) == (error, None, True)


def test_a_claimer_that_leaves_during_its_round_waits_for_its_jobs() -> None:
    window, _, _, found = window_of(SOME)
    waiter = _Waiter()

    class Round(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiter.result = SOME
            return super().wait(timeout)

    waiter.is_served = Round()
    waiter.is_served.set()
    window._leave(waiter, ClaimRequest("a", 1))
    assert found == [("a", SOME)]


def test_no_ids_are_reserved_for_a_queue_that_was_dropped(logged: list[Any]) -> None:
    harness = EngineHarness()
    jobs = queue(harness)
    harness.log.drop("jobs")
    with pytest.raises(TopicNotFound):
        jobs._state.reserve_lease_ids(1)
    assert logged == []
