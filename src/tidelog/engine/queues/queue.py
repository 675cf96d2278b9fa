"""A queue, as a program holds it. Every method may be called from any thread.

    claim ──► work ──► ack                     the job is gone
                  ├──► nack                    it comes back, at once or later
                  ├──► extend                  it stays theirs for longer
                  └──► (nothing)               it comes back when the lease ends

At least once: a job is handed out again until somebody has acked it in time. The lease id tells a holder that
came too late from the one that has it now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any

from tidelog.disk.interrupts import defer_signals_in
from tidelog.engine import delete, retention
from tidelog.engine.batch_encoder import check_int, is_utf8_text
from tidelog.engine.queues import ack as settle
from tidelog.engine.queues import claim as claims
from tidelog.engine.queues.claim import BlockingClaimWindow, ClaimRequest
from tidelog.engine.queues.dead_letter import RecordFilter, RedriveResult
from tidelog.engine.queues.history import History
from tidelog.engine.queues.jobs import (
    PRIORITY_MAX,
    TIME_MS_MAX,
    AckResult,
    ClaimResult,
    ExtendResult,
    Job,
    QueueCounts,
    add_schedule,
)
from tidelog.engine.queues.queue_state import QueueState
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, TopicNotFound
from tidelog.formats.frame import SEQ_MAX
from tidelog.wal import CommitFuture

if TYPE_CHECKING:
    from tidelog.engine.batch_encoder import Batch
    from tidelog.engine.topic import Topic

U64_MAX = (1 << 64) - 1
JobsOrSeqs = Job | int | Sequence[Job] | Sequence[int]
Ids = Sequence[int | None] | None


@defer_signals_in(
    "put_redriven",
    "claim_for_all",
    "submit_ack",
    "submit_nack",
    "submit_extend",
    "ack",
    "nack",
    "extend",
    "release_connection",
    "count_leases",
    "counts",
)
class Queue:
    """Jobs of a topic, handed out under leases. `Engine.queue` makes one."""

    def __init__(self, topic: Topic, state: QueueState) -> None:
        self.topic = topic
        self._state, self._topic_state = state, state.topic
        if state.claim_window is None:
            state.claim_window = BlockingClaimWindow(
                self._topic_state.context.clock, self.claim_for_all, self._return_jobs
            )

    def __repr__(self) -> str:
        return f"<queue {self.topic.name!r}, head {self.topic.head_seq}>"

    # ── jobs in ───────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
        run_at_ms: int | None = None,
        delay_ms: int | None = None,
        priority: int = 0,
    ) -> Appended:
        """`Topic.append`, for jobs: not to be claimed before `run_at_ms`, or for `delay_ms` from now; those of a higher
        priority first."""
        if run_at_ms is not None and delay_ms is not None:
            raise BadInput("a job has run_at_ms or delay_ms, not both; nothing was written")
        check_int("a priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        for what, value in (("run_at_ms", run_at_ms), ("delay_ms", delay_ms)):
            if value is not None:
                check_int(what, value, 0, TIME_MS_MAX)
        if delay_ms:
            run_at_ms = min(self._topic_state.context.now_ms() + delay_ms, TIME_MS_MAX)
        count = len(records) if isinstance(records, list | tuple) else 1
        metas: Any = add_schedule(meta, count, run_at_ms=run_at_ms, priority=priority)
        return self.topic.append(records, tag=tag, node=node, meta=metas, key=key)

    def put_redriven(self, batch: Batch, *, durable: bool) -> Appended:
        """Write jobs that come back from a dead-letter topic; `synced`: durable on return, whatever the class is."""
        done = self.topic.submit(batch, durable=durable).wait()
        if self.topic.is_dropped:
            raise TopicNotFound(self.topic.name)
        self._state.history.add_step(self._topic_state.context.now_ms(), "redriven", done.seqs)
        return done

    # ── jobs out ──────────────────────────────────────────────────────────────────────────────

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> list[Job]:
        """Up to `most` jobs, each leased to `node` for `lease_ms`; fewer, or none, where there are no more now. Where
        the queue has a `claim_jitter_ms`, this waits so long for others, to share fairly with them."""
        return self._claim(self._make_request(node, most, lease_ms)).jobs()

    def claim_for_all(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """One pass for all of these claimers, who share what there is; without a window. May wait for the disk."""
        return claims.run_claim_round(self._state, requests)

    def can_claim_without_blocking(self, count_max: int) -> bool:
        """Whether `claim_now` of so many needs memory alone, and may be called where nobody may wait."""
        return claims.can_claim_without_blocking(self._state, count_max)

    def _claim(self, want: ClaimRequest) -> ClaimResult:
        window_ms = self._topic_state.config.claim_jitter_ms
        if not window_ms:
            return self.claim_for_all([want])[0]
        assert self._state.claim_window is not None, "made with the first handle"
        return self._state.claim_window.claim(want, window_ms)

    def _make_request(self, node: str, most: int, lease_ms: int | None, conn: object = None) -> ClaimRequest:
        _check_node(node, self._topic_state.context.limits.node_bytes_max)
        check_int("most", most, 1, SEQ_MAX)
        if lease_ms is not None:
            check_int("lease_ms", lease_ms, 0, TIME_MS_MAX)
        return ClaimRequest(node, most, lease_ms, conn)

    def _return_jobs(self, want: ClaimRequest, leased: ClaimResult) -> None:
        with suppress(Error):
            self.nack(want.node, leased.seqs, leased.lease_ids)

    def work(
        self, node: str, most: int = 1, lease_ms: int | None = None, timeout: float | None = None
    ) -> Iterator[Job]:
        """Jobs as they come, for ever or until none came for `timeout` seconds; at most `most` of them unsettled at a
        time. Those that are unsettled when the iterator is closed can be claimed again at once."""
        return self._work(self._make_request(node, most, lease_ms, conn=object()), timeout)

    def _work(self, want: ClaimRequest, timeout: float | None) -> Iterator[Job]:
        woken = Event()
        clock = self._topic_state.context.clock
        self.add_listener(woken.set)  # before the first look: a job between look and wait must not be missed
        try:
            idle_from = clock.monotonic_ms()
            while True:
                woken.clear()
                room = want.count_max - self.count_leases(want.connection)
                jobs = self._claim(want._replace(count_max=room)).jobs() if room > 0 else []
                for job in jobs:
                    if self._topic_state.context.now_ms() <= job.deadline_ms:
                        yield job
                        idle_from = clock.monotonic_ms()
                if jobs:
                    continue
                left_s = None if timeout is None else timeout - (clock.monotonic_ms() - idle_from) / 1000
                if left_s is not None and left_s <= 0:
                    return
                due_ms = self.next_due_ms()
                if due_ms is not None:
                    due_s = max(due_ms - self._topic_state.context.now_ms(), 1) / 1000
                    left_s = due_s if left_s is None else min(left_s, due_s)
                woken.wait(left_s)
        finally:
            self.remove_listener(woken.set)
            with suppress(Error):
                self.release_connection(want.connection)

    # ── settling ──────────────────────────────────────────────────────────────────────────────

    @property
    def has_routers(self) -> bool:
        """Whether routers take from it or bring to it, and an ack may have to wait for them."""
        return self.topic.has_routers

    def submit_ack(self, node: str, seqs: Sequence[int], lease_ids: Ids = None) -> CommitFuture[AckResult]:
        """`ack` without waiting, except for routers that have yet to pass the jobs on (`is_routed`)."""
        self._check_arguments(node, seqs, lease_ids)
        delete.forward_before_delete(self._state.topic)
        return settle.submit_ack(self._state, node, seqs, lease_ids)

    def submit_nack(
        self, node: str, seqs: Sequence[int], lease_ids: Ids = None, delay_ms: int = 0
    ) -> CommitFuture[AckResult]:
        """`nack` without waiting."""
        self._check_arguments(node, seqs, lease_ids)
        check_int("delay_ms", delay_ms, 0, SEQ_MAX)
        return settle.submit_nack(self._state, node, seqs, lease_ids, delay_ms)

    def submit_extend(
        self, node: str, seqs: Sequence[int], lease_ids: Ids = None, *, lease_ms: int
    ) -> CommitFuture[ExtendResult]:
        """`extend` without waiting."""
        self._check_arguments(node, seqs, lease_ids)
        check_int("lease_ms", lease_ms, 0, SEQ_MAX)
        return settle.submit_extend(self._state, node, seqs, lease_ids, lease_ms)

    def ack(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None) -> AckResult:
        """These jobs are done: they are deleted, under the topic's class. Those that `node` does not hold, or not under
        the lease id that is named, are skipped. Jobs in place of seqs bring their lease ids."""
        return self.submit_ack(node, *_split_jobs(seqs, lease_ids)).wait()

    def nack(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None, delay_ms: int = 0) -> AckResult:
        """These jobs are not done: they can be claimed again, at once or after `delay_ms`."""
        return self.submit_nack(node, *_split_jobs(seqs, lease_ids), delay_ms=delay_ms).wait()

    def extend(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None, *, lease_ms: int) -> ExtendResult:
        """Hold these jobs for `lease_ms` from now."""
        return self.submit_extend(node, *_split_jobs(seqs, lease_ids), lease_ms=lease_ms).wait()

    def _check_arguments(self, node: str, seqs: Sequence[int], lease_ids: Ids) -> None:
        _check_node(node, self._topic_state.context.limits.node_bytes_max)
        if not (seqs and set(map(type, seqs)) == {int} and min(seqs) >= 0 and max(seqs) <= U64_MAX):
            for seq in seqs:
                check_int("a seq", seq, 0, U64_MAX)
        if lease_ids is not None and len(lease_ids) not in (0, len(seqs)):
            raise BadInput(f"{len(seqs)} seqs came with {len(lease_ids)} lease ids; nothing was done")

    def release_connection(self, connection: object) -> int:
        """End every lease of this connection, at once; how many there were."""
        return settle.release_connection(self._state, connection)

    def count_leases(self, connection: object) -> int:
        """How many unexpired leases this connection has."""
        state = self._state
        with self._topic_state.lock:
            swept = state.refresh(self._topic_state.context.now_ms())
            count = state.leases.count_for_connection(connection)
        if swept:
            state.notify_listeners()
        return count

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def counts(self) -> QueueCounts:
        """What can be claimed now, what is held, and what went to the dead-letter topic."""
        retention.refresh_for_read(self._topic_state)
        state = self._state
        state.read_new_schedules()
        with self._topic_state.lock:
            self._topic_state.check_open()
            swept = state.refresh(self._topic_state.context.now_ms())
            counts = state.counts()
        if swept:
            state.notify_listeners()
        return counts

    @property
    def expired_leases(self) -> int:
        """Leases that ran out since the engine was opened, as far as somebody has looked."""
        return self._state.expired_leases

    @property
    def dead_letter_error(self) -> Error | None:
        """What kept jobs from the dead-letter topic when they were last to go there; None: nothing. They stay in the
        queue and are tried again by the next claim."""
        return self._state.dead_letter_error

    def next_due_ms(self) -> int | None:
        """When something may become claimable by itself: a lease ends, a delay or a schedule comes due. None: nothing
        will."""
        self._state.read_new_schedules()
        with self._topic_state.lock:
            return self._state.leases.next_due_ms()

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` when jobs come, are settled, released or found to have expired, from the thread that did it,
        until `unlisten`. It must be short and must not wait."""
        self._state.add_listener(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        self._state.remove_listener(wake)

    def history(self) -> History:
        """What happened to its jobs."""
        return History(self._topic_state, self._state.history)

    def redrive(
        self,
        *,
        to: str | None = None,
        match: object = None,
        where: RecordFilter | None = None,
        rate: float | None = None,
        limit: int | None = None,
    ) -> RedriveResult:
        """`Topic.redrive` of a dead-letter topic that is a queue itself; what somebody holds is left out."""
        return self.topic.redrive(to=to, match=match, where=where, rate=rate, limit=limit)


def _check_node(node: object, limit: int) -> None:
    if not is_utf8_text(node) or not 0 < len(str(node).encode()) <= limit:
        raise BadInput(f"a node is text of 1 to {limit} bytes, not {node!r:.80}; nothing was done")


def _split_jobs(given: JobsOrSeqs, lease_ids: Ids) -> tuple[list[int], Ids]:
    """Seqs and lease ids of what was handed back."""
    many: list[Job | int] = [given] if isinstance(given, Job | int) else list(given)
    seqs = [each.seq if isinstance(each, Job) else each for each in many]
    if lease_ids is None and any(isinstance(each, Job) for each in many):
        return seqs, [each.lease_id if isinstance(each, Job) else None for each in many]
    return seqs, lease_ids
