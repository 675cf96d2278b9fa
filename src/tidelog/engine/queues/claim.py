"""Claims and acks: one round for several claimers, the window in which they gather, and what lease holders do.

    1  expire old jobs; read schedules of new jobs; reserve lease ids        may block on the disk
    2  with the topic's lock: sweep, take, divide, lease; durable leases in one commit
    3  wait for that commit; if it fails, no claimer gets anything
    4  move jobs that were delivered too often to the dead-letter topic
    5  read the records

A job whose record cannot be read stays leased until its lease ends, so that it does not block the others.

A lease holder acks, nacks, extends or releases. An ack deletes the job with the durability of the topic. The others are
logged only if leases are durable; otherwise they take effect when the call returns. If a step fails, every lease is as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import lt
from threading import Event, Lock
from typing import Final, Generic, NamedTuple, TypeVar

from tidelog.clock import Clock
from tidelog.engine import delete, read, retention
from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.engine.queues import dead_letter, jobs
from tidelog.engine.queues.jobs import TIME_MS_MAX, AckResult, ClaimResult, ExtendResult, JobChunk, JobRead, JobTexts
from tidelog.engine.queues.leases import Lease
from tidelog.engine.queues.queue_state import QueueCommit, QueueState
from tidelog.engine.topic_index import TopicIndex
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, Error
from tidelog.formats import control_frames
from tidelog.formats.control_frames import LeaseEvent
from tidelog.wal import CommitFuture


class ClaimRequest(NamedTuple):
    """The request of one claimer."""

    node: str
    count_max: int
    lease_ms: int | None = None  # None: the queue's setting
    connection: object = None  # its end releases the leases
    bytes_max: int | None = None  # of data, approximately; at least one job is granted


WaiterT = TypeVar("WaiterT")


class ClaimWindow(Generic[WaiterT]):
    """Claimers that arrive within the jitter window share the available jobs. No clock, no I/O.

        join  join      join                close
        ├──────┼─────────┼────────────────────┤
        └─ the first opens the window: due ───┘

    A claimer that leaves does not close the window for the others. The first claimer that finds it due closes it for
    all. Times are those of the caller's clock. A waiter is the object by which the caller wakes a thread or a task.
    """

    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms
        self.due_ms: int | None = None  # None: the window is not open
        self._requests: dict[WaiterT, ClaimRequest] = {}

    def __contains__(self, waiter: WaiterT) -> bool:
        return waiter in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def join(self, now_ms: int, waiter: WaiterT, request: ClaimRequest) -> None:
        """Add a claimer; the first one opens the window."""
        if self.due_ms is None:
            self.due_ms = now_ms + self.window_ms
        self._requests[waiter] = request

    def leave(self, waiter: WaiterT) -> None:
        """Remove a claimer, if it is still in the window."""
        self._requests.pop(waiter, None)
        if not self._requests:
            self.due_ms = None

    def close(self) -> list[tuple[WaiterT, ClaimRequest]]:
        """Return the claimers in the order of arrival; the next one opens another window."""
        members, self._requests, self.due_ms = list(self._requests.items()), {}, None
        return members


def divide_jobs(available: int, counts_max: Sequence[int]) -> list[list[int]]:
    """Divide the available jobs, by index, among claimers: one at a time, in order of arrival, until each has its
    maximum. 9 jobs for maximums (2, 100): 2 and 7."""
    if len(counts_max) == 1:
        return [list(range(min(available, max(counts_max[0], 0))))]
    shares: list[list[int]] = [[] for _ in counts_max]
    unfilled = [(share, count_max) for share, count_max in zip(shares, counts_max, strict=True) if count_max > 0]
    index = 0
    while unfilled and index < available:
        for share, _ in unfilled[: available - index]:
            share.append(index)
            index += 1
        unfilled = [(share, count_max) for share, count_max in unfilled if len(share) < count_max]
    return shares


CLAIM_JOBS_MAX: Final = 1_000


class LeaseGrant(NamedTuple):
    """The leases of one claimer, in claim order."""

    request: ClaimRequest
    seqs: list[int]
    ids: range
    deliveries: list[int]
    deadline_ms: int


class ClaimRound(NamedTuple):
    """The leases of one round and how to read their records."""

    now_ms: int
    grants: list[LeaseGrant]
    dead_letters: list[int]  # delivered too often
    texts: list[JobTexts] | None  # the records of each grant, if all are in memory
    read_plan: list[JobRead]  # how to read them otherwise
    future: CommitFuture[None] | None  # of durable leases
    ready: int  # claimable jobs that were not granted
    has_swept: bool


def clamp_lease(lease_ms: int) -> int:
    return min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)


def can_claim_without_blocking(state: QueueState, count_max: int) -> bool:
    """Whether a round for this many jobs uses memory only."""
    topic = state.topic
    config = topic.config
    if (
        state.has_durable_leases
        or retention.needs_expiry(topic)
        or retention.is_upstream_lagging(topic)
        or not read.is_durable_to_head(topic)
    ):
        return False
    with topic.lock:
        leases = state.leases
        moves_dead_letters = config.max_deliveries and config.dead_letter is not None
        if not topic.is_ephemeral and leases.lease_id + count_max > state.lease_id_ceiling:
            return False
        may_have_dead = moves_dead_letters and (leases.returned_count or leases.leased or leases.delayed)
        return state.is_next_in_memory() and not may_have_dead


def run_claim_round(state: QueueState, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
    """Claim jobs for these claimers; return a result for each."""
    topic = state.topic
    requests = [request._replace(count_max=max(min(request.count_max, CLAIM_JOBS_MAX), 0)) for request in requests]
    retention.pull_from_upstream(topic)
    retention.expire_records(topic)
    state.read_new_schedules()
    if read.needs_durable_records(topic):
        read.make_durable(topic)  # before the round, so that its jobs need no other sync
    claim_round = _lease_jobs(state, requests)
    if claim_round.has_swept:
        state.notify_listeners()
    try:
        if claim_round.future is not None:
            claim_round.future.wait()
        if read.needs_durable_records(topic):
            read.require_durable(topic, _all_seqs(claim_round.grants, claim_round.dead_letters))
        chunks, lost = jobs.read_jobs(claim_round.read_plan)
    except BaseException:
        with topic.lock:
            state.leases.on_settle_failed(claim_round.dead_letters)
        raise
    if claim_round.dead_letters:
        dead_letter.move_to_dead_letter(
            state, claim_round.dead_letters, jobs.select_jobs(chunks, claim_round.dead_letters)
        )
    if claim_round.texts is not None:
        pairs = zip(claim_round.grants, claim_round.texts, strict=True)
        results = [_result_from_texts(grant, texts, claim_round.ready) for grant, texts in pairs]
    else:
        alone = len(requests) == 1 and not claim_round.dead_letters
        results = [
            _result_from_chunks(state.topic, chunks, grant, lost, claim_round.ready, alone=alone)
            for grant in claim_round.grants
        ]
    for grant, result in zip(claim_round.grants, results, strict=True):
        state.history.add_claimed(claim_round.now_ms, grant.request.node, result)
    if lost and not any(result.count for result in results):
        raise Corrupt(
            topic.name,
            pos=0,
            reason=f"jobs {lost[:10]} cannot be read",
            next_step="they stay leased until their leases end, claim again for other jobs",
        )
    return results


def _lease_jobs(state: QueueState, requests: Sequence[ClaimRequest]) -> ClaimRound:
    topic, leases = state.topic, state.leases
    total = sum(request.count_max for request in requests)
    while True:
        if leases.lease_id + total > state.lease_id_ceiling:
            state.reserve_lease_ids(total)
        with topic.lock:
            topic.check_writable()
            topic.context.shard(topic.id)  # raises if the directory is read-only
            if not topic.is_ephemeral and leases.lease_id + total > state.lease_id_ceiling:
                continue
            now_ms = topic.context.now_ms()
            swept = state.refresh(now_ms)
            live, dead = _take_jobs(state, total)
            grants: list[LeaseGrant] = []
            for request, share in zip(requests, _divide_jobs(live, requests), strict=True):
                deadline_ms = now_ms + clamp_lease(
                    topic.config.lease_ms if request.lease_ms is None else request.lease_ms
                )
                seqs = _limit_bytes(state, request, share)
                grants.append(
                    LeaseGrant(
                        request, seqs, *leases.grant(seqs, request.node, deadline_ms, request.connection), deadline_ms
                    )
                )
            leases.reserve_dead(dead)
            if live or dead:
                topic.mark_dirty()  # ids were assigned, which an ephemeral queue does not log
            try:
                texts = None if dead else _read_texts(topic.index, grants)
                plan = jobs.plan_reads(topic.index, _all_seqs(grants, dead), state.read_ahead) if texts is None else []
                future = _log_grants(state, grants) if state.has_durable_leases and live else None
            except BaseException:
                _revoke_grants(state, grants)
                leases.on_settle_failed(dead)
                raise
            return ClaimRound(now_ms, grants, dead, texts, plan, future, state.counts().ready, bool(swept))


def _divide_jobs(live: list[int], requests: Sequence[ClaimRequest]) -> list[list[int]]:
    """Return the seqs of each claimer."""
    if len(requests) == 1:
        return [live]
    shares = divide_jobs(len(live), [request.count_max for request in requests])
    return [[live[index] for index in share] for share in shares]


def _limit_bytes(state: QueueState, request: ClaimRequest, seqs: list[int]) -> list[int]:
    """Return as many of these jobs as fit the claimer's `bytes_max`; the others are claimable before fresh jobs."""
    index, bytes_max = state.topic.index, request.bytes_max
    if bytes_max is None or index.bytes <= bytes_max or len(seqs) < 2:
        return seqs
    fit = jobs.count_fitting(index, seqs, bytes_max)
    state.leases.requeue(seqs[fit:])
    return seqs[:fit]


def _all_seqs(grants: Sequence[LeaseGrant], dead: Sequence[int]) -> list[int]:
    return sorted([*dead, *(seq for grant in grants for seq in grant.seqs)])


def _read_texts(index: TopicIndex, grants: Sequence[LeaseGrant]) -> list[JobTexts] | None:
    """Return the records of each grant if all of them are in memory, else None."""
    texts_of_grants: list[JobTexts] = []
    for grant in grants:
        texts = jobs.read_job_texts(index, sorted(grant.seqs)) if grant.seqs else JobTexts([], [])
        if texts is None:
            return None
        texts_of_grants.append(texts)
    return texts_of_grants


def _take_jobs(state: QueueState, total: int) -> tuple[list[int], list[int]]:
    """Take the next jobs; return those to lease, and those among them that were delivered too often."""
    leases, config = state.leases, state.topic.config
    if not config.max_deliveries or config.dead_letter is None:
        return leases.take(total, state.next_live_seqs), []
    live: list[int] = []
    dead: list[int] = []
    while len(live) < total:
        taken = leases.take(total - len(live), state.next_live_seqs)
        if not taken:
            break
        for seq in taken:
            (dead if leases.deliveries.get(seq, 0) >= config.max_deliveries else live).append(seq)
    return live, dead


def _log_grants(state: QueueState, grants: Sequence[LeaseGrant]) -> CommitFuture[None]:
    """Log the grants in one commit."""
    frames = [
        state.encode_lease_frame(seq, LeaseEvent.CLAIMED, lease_id, grant.deadline_ms, count, grant.request.node)
        for grant in grants
        for seq, lease_id, count in zip(grant.seqs, grant.ids, grant.deliveries, strict=True)
    ]
    commit = QueueCommit(state, frames, partial(_on_grants_logged, state, grants), durable=state.topic.is_durable)
    state.topic.submit(commit)
    return commit.future


def _on_grants_logged(state: QueueState, grants: Sequence[LeaseGrant], error: Error | None) -> None:
    if error is not None:
        _revoke_grants(state, grants)


def _revoke_grants(state: QueueState, grants: Sequence[LeaseGrant]) -> None:
    for grant in grants:
        state.leases.revoke(grant.seqs, grant.ids)


def _result_from_texts(grant: LeaseGrant, texts: JobTexts, ready: int) -> ClaimResult:
    seqs, ids, counts = grant.seqs, grant.ids, grant.deliveries
    deadlines = [grant.deadline_ms] * len(seqs)
    if all(map(lt, seqs, seqs[1:])):
        return ClaimResult(seqs, list(ids), deadlines, counts, texts, ready)
    rows = sorted(zip(seqs, ids, counts, strict=True))
    seqs, lease_ids, counts = ([row[column] for row in rows] for column in range(3))
    return ClaimResult(seqs, lease_ids, deadlines, counts, texts, ready)


def _result_from_chunks(
    topic: TopicState, chunks: Sequence[JobChunk], grant: LeaseGrant, lost: Sequence[int], ready: int, *, alone: bool
) -> ClaimResult:
    rows = zip(grant.seqs, grant.ids, grant.deliveries, strict=True)
    unread = set(lost)
    kept = sorted(row for row in rows if row[0] not in unread)
    seqs = [seq for seq, _, _ in kept]
    return ClaimResult(
        seqs,
        [lease_id for _, lease_id, _ in kept],
        [grant.deadline_ms] * len(kept),
        [count for _, _, count in kept],
        list(chunks) if alone else jobs.select_jobs(chunks, seqs),
        ready,
        topic,
    )


class _Waiter:
    __slots__ = ("error", "is_served", "result")

    def __init__(self) -> None:
        self.is_served = Event()
        self.result: ClaimResult | None = None
        self.error: BaseException | None = None


class BlockingClaimWindow:
    """A `ClaimWindow` for threads: they wait until it is due, and the first one to wake runs the round for all.

    `run_round` serves the gathered requests. `return_jobs` gets the jobs of a claimer that left during the round.
    """

    def __init__(
        self,
        clock: Clock,
        run_round: Callable[[Sequence[ClaimRequest]], list[ClaimResult]],
        return_jobs: Callable[[ClaimRequest, ClaimResult], object],
    ) -> None:
        self._clock, self._run_round, self._return_jobs = clock, run_round, return_jobs
        self._lock = Lock()
        self._window: ClaimWindow[_Waiter] = ClaimWindow(0)

    def claim(self, request: ClaimRequest, window_ms: int) -> ClaimResult:
        waiter = _Waiter()
        with self._lock:
            self._window.window_ms = window_ms
            self._window.join(self._clock.monotonic_ms(), waiter, request)
        try:
            while not waiter.is_served.is_set():
                waiter.is_served.wait(self._left_s(waiter))
                self._serve_if_due(waiter)
        except BaseException:
            self._leave(waiter, request)
            raise
        if waiter.error is not None:
            raise waiter.error
        assert waiter.result is not None, "a served waiter has a result or an error"
        return waiter.result

    def _left_s(self, waiter: _Waiter) -> float | None:
        """Return how long the window is still open; None where another thread runs the round of this waiter."""
        with self._lock:
            due_ms = self._window.due_ms
            if waiter not in self._window or due_ms is None:
                return None
            return max(due_ms - self._clock.monotonic_ms(), 0) / 1000

    def _serve_if_due(self, waiter: _Waiter) -> None:
        with self._lock:
            due_ms = self._window.due_ms
            if waiter not in self._window or due_ms is None or self._clock.monotonic_ms() < due_ms:
                return
            members = self._window.close()
        try:
            results = self._run_round([request for _, request in members])
        except BaseException as error:
            for member, _ in members:
                member.error = error
                member.is_served.set()
            return
        for (member, _), result in zip(members, results, strict=True):
            member.result = result
            member.is_served.set()

    def _leave(self, waiter: _Waiter, request: ClaimRequest) -> None:
        with self._lock:
            if waiter in self._window:
                self._window.leave(waiter)
                return
        waiter.is_served.wait()  # its round runs: its jobs are returned
        if waiter.result is not None and waiter.result.count:
            self._return_jobs(request, waiter.result)


# ── ack, nack, extend, release ────────────────────────────────────────────────────────────────

Ids = Sequence[int | None] | None
T = TypeVar("T")


class SelectedLeases(NamedTuple):
    """The leases that a call named, and the seqs that its node does not hold."""

    leases: list[tuple[int, Lease]]
    skipped: list[int]

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.leases]


def submit_ack(state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids) -> CommitFuture[AckResult]:
    topic = state.topic
    with topic.lock:
        now_ms = _refresh(state)
        selected = _select_leases(state, node, seqs, lease_ids)
        body = control_frames.Delete(seqs=tuple(sorted(selected.seqs)), bound_head=topic.index.head + 1)

        def encode_delete() -> list[bytes]:
            return [topic.encode_control(body)]

        def apply_ack() -> None:
            state.leases.on_acked(selected.seqs)
            for seq in selected.seqs if state.failures else ():
                state.failures.pop(seq, None)
            state.history.add_lease_steps(now_ms, "acked", selected.leases)
            if selected.leases and not topic.is_dropped:
                state.remove_known(lambda: delete.apply_delete(topic, body))

        future = _settle(state, selected, encode_delete, apply_ack, logged=not topic.is_ephemeral)
    return _notify_if_done(state, future)


def submit_nack(
    state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids, delay_ms: int, error: object = None
) -> CommitFuture[AckResult]:
    with state.topic.lock:
        now_ms = _refresh(state)
        ready_at_ms = min(now_ms + delay_ms, TIME_MS_MAX) if delay_ms else None
        selected = _select_leases(state, node, seqs, lease_ids)

        if error is not None:
            state.failures.update(dict.fromkeys(selected.seqs, dead_letter.describe_failure(error, now_ms)))

        def apply_nack() -> None:
            state.leases.on_released(selected.seqs, ready_at_ms)
            state.history.add_lease_steps(now_ms, "nacked", selected.leases, ready_at_ms)

        def encode_releases() -> list[bytes]:
            return _lease_frames(state, LeaseEvent.RELEASED, selected, ready_at_ms or 0)

        future = _settle(state, selected, encode_releases, apply_nack, logged=state.has_durable_leases)
    return _notify_if_done(state, future)


def _settle(
    state: QueueState,
    selected: SelectedLeases,
    encode_frames: Callable[[], list[bytes]],
    apply: Callable[[], None],
    *,
    logged: bool,
) -> CommitFuture[AckResult]:
    """End the selected leases. With the topic's lock held."""

    def finish(error: Error | None) -> AckResult:
        if error is None:
            apply()
        else:
            state.leases.on_settle_failed(selected.seqs)
        state.refresh(state.topic.context.now_ms())
        ready, in_flight, _ = state.counts()
        return AckResult(len(selected.leases), selected.skipped, ready, in_flight)

    return _commit_or_apply(state, selected, finish, encode_frames, logged=logged)


def _notify_if_done(state: QueueState, future: CommitFuture[AckResult]) -> CommitFuture[AckResult]:
    """Wake listeners for a step that was not logged; called without the lock. `QueueCommit` does it for the others."""
    if future.done:
        state.notify_listeners()
    return future


def submit_extend(
    state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids, lease_ms: int
) -> CommitFuture[ExtendResult]:
    with state.topic.lock:
        now_ms = _refresh(state)
        deadline_ms = now_ms + clamp_lease(lease_ms)
        selected, seen = SelectedLeases([], []), set[int]()
        for seq, lease_id in zip(seqs, lease_ids or [None] * len(seqs), strict=True):
            lease = None if seq in seen else state.leases.extend(seq, node, lease_id, deadline_ms)
            if lease is None:
                selected.skipped.append(seq)
            else:
                seen.add(seq)
                selected.leases.append((seq, lease))

        def finish(error: Error | None) -> ExtendResult:
            if error is None:
                state.history.add_lease_steps(now_ms, "extended", selected.leases, deadline_ms)
            else:
                for seq, before in selected.leases:
                    state.leases.undo_extend(seq, before, deadline_ms)
            return ExtendResult(len(selected.leases), selected.skipped, dict.fromkeys(selected.seqs, deadline_ms))

        def encode_extensions() -> list[bytes]:
            return _lease_frames(state, LeaseEvent.EXTENDED, selected, deadline_ms)

        return _commit_or_apply(state, selected, finish, encode_extensions, logged=state.has_durable_leases)


def release_connection(state: QueueState, connection: object) -> int:
    """End every lease of a connection at once; return their number. Durable leases are logged without waiting: if that
    fails, a restart finds leases that expire at their deadlines."""
    topic = state.topic
    with topic.lock:
        released = state.leases.release_connection(connection)
        state.history.add_lease_steps(topic.context.now_ms(), "released", released)
        if released and state.has_durable_leases:
            frames = _lease_frames(state, LeaseEvent.RELEASED, SelectedLeases(released, []), 0)
            with suppress(Error):
                topic.submit(QueueCommit(state, frames, lambda _: None, durable=False))
                topic.shard.wake_writer()
    if released:
        state.notify_listeners()
    return len(released)


def _refresh(state: QueueState) -> int:
    state.topic.check_writable()
    now_ms = state.topic.context.now_ms()
    state.refresh(now_ms)
    return now_ms


def _select_leases(state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids) -> SelectedLeases:
    return SelectedLeases(*state.leases.begin_settle(seqs, node, lease_ids or [None] * len(seqs)))


def _commit_or_apply(
    state: QueueState,
    selected: SelectedLeases,
    finish: Callable[[Error | None], T],
    encode_frames: Callable[[], list[bytes]],
    *,
    logged: bool,
) -> CommitFuture[T]:
    """Apply a step after the WAL has it, or at once if it is not logged."""
    topic = state.topic
    try:
        if not selected.leases or not logged:
            result = finish(None)
            topic.mark_dirty()
            return CommitFuture.completed(topic.shard, result)
        commit = QueueCommit(state, encode_frames(), finish, durable=topic.is_durable)
        topic.submit(commit)
    except Error as error:
        finish(error)
        raise
    return commit.future


def _lease_frames(state: QueueState, event: LeaseEvent, selected: SelectedLeases, deadline_ms: int) -> list[bytes]:
    counts = state.leases.deliveries
    return [
        state.encode_lease_frame(seq, event, lease.lease_id, deadline_ms, counts.get(seq, 0), lease.node)
        for seq, lease in selected.leases
    ]
