"""[shell] The claim pass: one look at the queue for a whole cohort.

    1  old jobs expire; what has come is looked at; lease ids are on record        may wait for the disk
    2  under the topic's lock: sweep, take, divide, lease; durable leases go into one commit
    3  that commit is waited for; where it fails, nobody has had anything
    4  jobs that were delivered too often go to the dead-letter topic
    5  the records are read

A job whose record does not read stays leased, out of the way of the others, until its lease ends.

[policy] The jitter window: claimers that come within it share what there is. No clock, no I/O.

    join  join      join                close
    ├──────┼─────────┼────────────────────┤
    └─ the first opens the window: due ───┘

Whoever leaves takes only itself out; the window stays open for the others, and whoever of them
comes first when it is due closes it for all. Times are of the caller's clock.

[shell] Threads that claim together: they wait out the jitter window, and the first to wake runs the pass for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import lt
from threading import Event, Lock
from typing import Final, Generic, NamedTuple, TypeVar

from tidelog.clock import Clock
from tidelog.engine import consistency, retention
from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.engine.queues import dead_letter, jobs
from tidelog.engine.queues.jobs import ClaimResult, JobChunk, JobRead, JobTexts
from tidelog.engine.queues.queue_state import QueueCommit, QueueState
from tidelog.engine.topic_index import TopicIndex
from tidelog.errors import Corrupt, Error
from tidelog.formats.control_frames import LeaseEvent
from tidelog.wal import CommitFuture


class ClaimRequest(NamedTuple):
    """What one claimer asks for."""

    node: str
    count_max: int
    lease_ms: int | None = None  # None: the queue's
    connection: object = None  # whose end releases the leases
    bytes_max: int | None = None  # of data, about; one job in any case


WaiterT = TypeVar("WaiterT")


class ClaimWindow(Generic[WaiterT]):
    """The claimers of one open window. A waiter is a thread's or a task's: whatever the caller wakes it with."""

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


def divide_jobs(available: int, wants: Sequence[int]) -> list[list[int]]:
    """Which of the available jobs, by index, goes to whom: one at a time, in arrival order, passing over who has
    enough. 9 for (2, 100): 2 and 7."""
    if len(wants) == 1:
        return [list(range(min(available, max(wants[0], 0))))]
    shares: list[list[int]] = [[] for _ in wants]
    open_for = [(share, want) for share, want in zip(shares, wants, strict=True) if want > 0]
    at = 0
    while open_for and at < available:
        for share, _ in open_for[: available - at]:
            share.append(at)
            at += 1
        open_for = [(share, want) for share, want in open_for if len(share) < want]
    return shares


CLAIM_JOBS_MAX: Final = 1_000


class LeaseGrant(NamedTuple):
    """What one claimer is given, in the order of handing out."""

    request: ClaimRequest
    seqs: list[int]
    ids: range
    deliveries: list[int]
    deadline_ms: int


class ClaimRound(NamedTuple):
    now_ms: int
    grants: list[LeaseGrant]
    dead_letters: list[int]  # delivered too often
    texts: list[JobTexts] | None  # what each is given, where that was at hand
    read_plan: list[JobRead]  # how to read it where it was not
    future: CommitFuture[None] | None  # of durable leases
    ready: int  # jobs that nobody was given
    has_swept: bool


def clamp_lease(lease_ms: int) -> int:
    return min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)


def can_claim_without_blocking(state: QueueState, count_max: int) -> bool:
    """Whether a pass for so many needs memory alone."""
    core = state.topic
    config = core.config
    if (
        state.has_durable_leases
        or retention.needs_expiry(core)
        or retention.is_upstream_lagging(core)
        or not consistency.is_durable_to_head(core)
    ):
        return False
    with core.lock:
        leases = state.leases
        buries = config.max_deliveries and config.dead_letter is not None
        if not core.is_ephemeral and leases.lease_id + count_max > state.lease_id_ceiling:
            return False
        return state.is_next_in_memory() and not (buries and (leases.returned_count or leases.leased or leases.delayed))


def run_claim_round(state: QueueState, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
    core = state.topic
    requests = [want._replace(count_max=max(min(want.count_max, CLAIM_JOBS_MAX), 0)) for want in requests]
    retention.pull_from_upstream(core)
    retention.expire_records(core)
    state.read_new_schedules()
    if consistency.needs_durable_records(core):
        consistency.make_durable(core)  # before the pass, so that what it takes needs no other sync
    found = _lease_jobs(state, requests)
    if found.has_swept:
        state.notify_listeners()
    try:
        if found.future is not None:
            found.future.wait()
        if consistency.needs_durable_records(core):
            consistency.require_durable(core, _all_seqs(found.grants, found.dead_letters))
        pieces, lost = jobs.read_jobs(found.read_plan)
    except BaseException:
        with core.lock:
            state.leases.on_settle_failed(found.dead_letters)
        raise
    if found.dead_letters:
        dead_letter.move_to_dead_letter(state, found.dead_letters, jobs.select_jobs(pieces, found.dead_letters))
    if found.texts is not None:
        pairs = zip(found.grants, found.texts, strict=True)
        answers = [_result_from_texts(grant, texts, found.ready) for grant, texts in pairs]
    else:
        alone = len(requests) == 1 and not found.dead_letters
        answers = [_result_from_chunks(pieces, grant, lost, found.ready, alone=alone) for grant in found.grants]
    for grant, answer in zip(found.grants, answers, strict=True):
        state.history.add_claimed(found.now_ms, grant.request.node, answer)
    if lost and not any(answer.count for answer in answers):
        raise Corrupt(
            core.name,
            pos=0,
            reason=f"jobs {lost[:10]} do not read",
            next_step="they stay leased until their leases end, claim again for the others",
        )
    return answers


def _lease_jobs(state: QueueState, wants: Sequence[ClaimRequest]) -> ClaimRound:
    core, leases = state.topic, state.leases
    total = sum(want.count_max for want in wants)
    while True:
        if leases.lease_id + total > state.lease_id_ceiling:
            state.reserve_lease_ids(total)
        with core.lock:
            core.check_writable()
            core.context.shard(core.id)  # refuses where nothing can be written
            if not core.is_ephemeral and leases.lease_id + total > state.lease_id_ceiling:
                continue
            now_ms = core.context.now_ms()
            swept = state.refresh(now_ms)
            live, dead = _take_jobs(state, total)
            grants: list[LeaseGrant] = []
            for want, share in zip(wants, _divide_jobs(live, wants), strict=True):
                deadline_ms = now_ms + clamp_lease(core.config.lease_ms if want.lease_ms is None else want.lease_ms)
                seqs = _limit_bytes(state, want, share)
                grants.append(
                    LeaseGrant(want, seqs, *leases.grant(seqs, want.node, deadline_ms, want.connection), deadline_ms)
                )
            leases.reserve_dead(dead)
            try:
                texts = None if dead else _read_texts(core.index, grants)
                plan = jobs.plan_reads(core.index, _all_seqs(grants, dead), state.read_ahead) if texts is None else []
                token = _log_grants(state, grants) if state.has_durable_leases and live else None
            except BaseException:
                _revoke_grants(state, grants)
                leases.on_settle_failed(dead)
                raise
            return ClaimRound(now_ms, grants, dead, texts, plan, token, state.counts().ready, bool(swept))


def _divide_jobs(live: list[int], wants: Sequence[ClaimRequest]) -> list[list[int]]:
    """Which jobs each of them is given."""
    if len(wants) == 1:
        return [live]
    return [[live[at] for at in share] for share in divide_jobs(len(live), [want.count_max for want in wants])]


def _limit_bytes(state: QueueState, want: ClaimRequest, seqs: list[int]) -> list[int]:
    """As many of these jobs as their claimer can take; the others can be claimed again, before all that is fresh."""
    index, most = state.topic.index, want.bytes_max
    if most is None or index.bytes <= most or len(seqs) < 2:
        return seqs
    fit = jobs.count_fitting(index, seqs, most)
    state.leases.requeue(seqs[fit:])
    return seqs[:fit]


def _all_seqs(grants: Sequence[LeaseGrant], dead: Sequence[int]) -> list[int]:
    return sorted([*dead, *(seq for grant in grants for seq in grant.seqs)])


def _read_texts(index: TopicIndex, grants: Sequence[LeaseGrant]) -> list[JobTexts] | None:
    """What each of them is given, where all of it is at hand."""
    found: list[JobTexts] = []
    for grant in grants:
        texts = jobs.read_job_texts(index, sorted(grant.seqs)) if grant.seqs else JobTexts([], [])
        if texts is None:
            return None
        found.append(texts)
    return found


def _take_jobs(state: QueueState, total: int) -> tuple[list[int], list[int]]:
    """The next jobs to hand out, and those that came up before them and were handed out too often."""
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
    """The grants as frames, in one commit."""
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
    first, second, third = ([row[at] for row in rows] for at in range(3))
    return ClaimResult(first, second, deadlines, third, texts, ready)


def _result_from_chunks(
    pieces: Sequence[JobChunk], grant: LeaseGrant, lost: Sequence[int], ready: int, *, alone: bool
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
        list(pieces) if alone else jobs.select_jobs(pieces, seqs),
        ready,
    )


class _Waiter:
    __slots__ = ("error", "is_served", "result")

    def __init__(self) -> None:
        self.is_served = Event()
        self.result: ClaimResult | None = None
        self.error: BaseException | None = None


class BlockingClaimWindow:
    """`serve` is a pass for a cohort; `give_back` is told of what somebody was given who has left meanwhile."""

    def __init__(
        self,
        clock: Clock,
        run_round: Callable[[Sequence[ClaimRequest]], list[ClaimResult]],
        return_jobs: Callable[[ClaimRequest, ClaimResult], object],
    ) -> None:
        self._clock, self._run_round, self._return_jobs = clock, run_round, return_jobs
        self._lock = Lock()
        self._window: ClaimWindow[_Waiter] = ClaimWindow(0)

    def claim(self, want: ClaimRequest, window_ms: int) -> ClaimResult:
        waiter = _Waiter()
        with self._lock:
            self._window.window_ms = window_ms
            self._window.join(self._clock.monotonic_ms(), waiter, want)
        try:
            while not waiter.is_served.is_set():
                waiter.is_served.wait(self._left_s(waiter))
                self._serve_if_due(waiter)
        except BaseException:
            self._leave(waiter, want)
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
            answers = self._run_round([want for _, want in members])
        except BaseException as error:
            for member, _ in members:
                member.error = error
                member.is_served.set()
            return
        for (member, _), answer in zip(members, answers, strict=True):
            member.result = answer
            member.is_served.set()

    def _leave(self, waiter: _Waiter, want: ClaimRequest) -> None:
        with self._lock:
            if waiter in self._window:
                self._window.leave(waiter)
                return
        waiter.is_served.wait()  # its round runs: its jobs are returned
        if waiter.result is not None and waiter.result.count:
            self._return_jobs(want, waiter.result)
