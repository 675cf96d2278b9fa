"""The API of a queue. Every method may be called from any thread.

    claim ──► work ──► ack                     the job is deleted
                  ├──► nack                    it is claimable again, at once or later
                  ├──► extend                  the lease is extended
                  └──► (nothing)               it is claimable again when the lease ends

Delivery is at least once: a job is claimable again until a holder acks it in time. The lease id distinguishes the
current holder from one whose lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any, Unpack

from tidelog.disk.process import defer_signals_in
from tidelog.engine import delete, retention
from tidelog.engine.batch_encoder import check_int, is_utf8_text
from tidelog.engine.queues import claim, dead_letter
from tidelog.engine.queues.claim import BlockingClaimWindow, ClaimRequest, Ids
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
from tidelog.engine.queues.worker import Worker, worker_for
from tidelog.engine.queues.worker_options import JobFunction, WorkerOptions
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error
from tidelog.formats.frame import SEQ_MAX
from tidelog.times import Duration, Seconds, Time, duration_ms, seconds, time_ms
from tidelog.wal import CommitFuture

if TYPE_CHECKING:
    from tidelog.engine.topic import Topic

U64_MAX = (1 << 64) - 1
JobsOrSeqs = Job | int | Sequence[Job] | Sequence[int]


@defer_signals_in(
    "claim_for_all",
    "submit_ack",
    "submit_nack",
    "submit_extend",
    "release_connection",
    "count_leases",
)
class QueueOperations:
    """Operations on a queue that are not part of its public API: for several claimers, for connections, and without
    waiting. `Queue` and the server use them; `operations_of` returns those of a queue."""

    def __init__(self, topic: Topic, state: QueueState) -> None:
        self.topic = topic
        self._state, self._topic_state = state, state.topic

    def make_request(self, node: str, most: int, lease_ms: Duration | None, connection: object = None) -> ClaimRequest:
        """Check the arguments of a claim."""
        _check_node(node, self._topic_state.context.limits.node_bytes_max)
        check_int("most", most, 1, SEQ_MAX)
        if lease_ms is not None:
            lease_ms = duration_ms("lease_ms", lease_ms)
            check_int("lease_ms", lease_ms, 0, TIME_MS_MAX)
        return ClaimRequest(node, most, lease_ms, connection)

    def seconds_until(self, due_ms: int) -> float:
        """Return how long it is to this time of the clock; at least a millisecond."""
        return max(due_ms - self._topic_state.context.now_ms(), 1) / 1000

    def claim_for_all(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """Run one claim round for these claimers, who share the available jobs, without a window. May block on the
        disk."""
        return claim.run_claim_round(self._state, requests)

    def can_claim_without_blocking(self, count_max: int) -> bool:
        """Whether `claim_for_all` of this many jobs uses memory only, so that an event loop may call it."""
        return claim.can_claim_without_blocking(self._state, count_max)

    def submit_ack(self, node: str, seqs: Sequence[int], lease_ids: Ids = None) -> CommitFuture[AckResult]:
        """Submit an `ack` without waiting for it, except for routers that still have to forward the jobs
        (`TopicOperations.has_routers`)."""
        self._check_arguments(node, seqs, lease_ids)
        delete.forward_before_delete(self._state.topic)
        return claim.submit_ack(self._state, node, seqs, lease_ids)

    def submit_nack(
        self, node: str, seqs: Sequence[int], lease_ids: Ids = None, delay_ms: Duration = 0, error: object = None
    ) -> CommitFuture[AckResult]:
        """Submit a `nack` without waiting for it."""
        self._check_arguments(node, seqs, lease_ids)
        delay_ms = duration_ms("delay_ms", delay_ms)
        check_int("delay_ms", delay_ms, 0, SEQ_MAX)
        return claim.submit_nack(self._state, node, seqs, lease_ids, delay_ms, error)

    def reject(self, node: str, seqs: Sequence[int], lease_ids: Ids = None, error: object = None) -> AckResult:
        """`Queue.reject` of seqs. Blocks on the disk."""
        self._check_arguments(node, seqs, lease_ids)
        delete.forward_before_delete(self._state.topic)
        return dead_letter.reject_jobs(self._state, node, seqs, lease_ids, error)

    def submit_extend(
        self, node: str, seqs: Sequence[int], lease_ids: Ids = None, *, lease_ms: Duration
    ) -> CommitFuture[ExtendResult]:
        """Submit an `extend` without waiting for it."""
        self._check_arguments(node, seqs, lease_ids)
        lease_ms = duration_ms("lease_ms", lease_ms)
        check_int("lease_ms", lease_ms, 0, SEQ_MAX)
        return claim.submit_extend(self._state, node, seqs, lease_ids, lease_ms)

    def _check_arguments(self, node: str, seqs: Sequence[int], lease_ids: Ids) -> None:
        _check_node(node, self._topic_state.context.limits.node_bytes_max)
        if not (seqs and set(map(type, seqs)) == {int} and min(seqs) >= 0 and max(seqs) <= U64_MAX):
            for seq in seqs:
                check_int("a seq", seq, 0, U64_MAX)
        if lease_ids is not None and len(lease_ids) not in (0, len(seqs)):
            raise BadInput(f"{len(lease_ids)} lease ids were given for {len(seqs)} seqs; nothing was done")

    def release_connection(self, connection: object) -> int:
        """End every lease of this connection at once; return their number."""
        return claim.release_connection(self._state, connection)

    def count_leases(self, connection: object) -> int:
        """Return the number of unexpired leases of this connection."""
        state = self._state
        with self._topic_state.lock:
            swept = state.refresh(self._topic_state.context.now_ms())
            count = state.leases.count_for_connection(connection)
        if swept:
            state.notify_listeners()
        return count


def operations_of(queue: Queue) -> QueueOperations:
    """Return the internal operations of a queue."""
    return queue._operations


@defer_signals_in("ack", "nack", "reject", "extend", "counts")
class Queue:
    """Jobs of a topic, claimed under leases. `Database.queue` returns one."""

    def __init__(self, topic: Topic, state: QueueState) -> None:
        self.topic = topic
        self._state, self._topic_state = state, state.topic
        self._operations = operations = QueueOperations(topic, state)
        if state.claim_window is None:
            state.claim_window = BlockingClaimWindow(
                state.topic.context.clock, operations.claim_for_all, self._return_jobs
            )

    def __repr__(self) -> str:
        return f"<queue {self.topic.name!r}, head {self.topic.head_seq}>"

    # ── put ───────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
        run_at_ms: Time | None = None,
        delay_ms: Duration | None = None,
        priority: int = 0,
    ) -> Appended:
        """Append jobs, as `Topic.append`. They are not claimable before `run_at_ms`, or for `delay_ms` from now; a
        higher priority is claimed first.

        >>> mails.put("later", delay_ms=timedelta(minutes=5), priority=3).seqs
        range(3, 4)
        """
        check_int("a priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        due_ms, wait_ms = parse_schedule(run_at_ms, delay_ms)
        if wait_ms:
            due_ms = min(self._topic_state.context.now_ms() + wait_ms, TIME_MS_MAX)
        count = len(records) if isinstance(records, list | tuple) else 1
        metas: Any = add_schedule(meta, count, run_at_ms=due_ms, priority=priority)
        return self.topic.append(records, tag=tag, node=node, meta=metas, key=key)

    # ── claim ─────────────────────────────────────────────────────────────────────────────────

    def claim(self, node: str, most: int = 1, lease_ms: Duration | None = None) -> list[Job]:
        """Claim up to `most` jobs, each leased to `node` for `lease_ms`; fewer or none if there are no more now. With
        `claim_jitter_ms` set on the queue, this waits that long for other claimers, to share fairly with them.

        >>> [job.data for job in mails.claim("worker", most=2)]
        ['hello', 'again']
        """
        return self._claim(self._operations.make_request(node, most, lease_ms)).jobs()

    def _claim(self, request: ClaimRequest) -> ClaimResult:
        window_ms = self._topic_state.config.claim_jitter_ms
        if not window_ms:
            return self._operations.claim_for_all([request])[0]
        assert self._state.claim_window is not None, "set by the first handle"
        return self._state.claim_window.claim(request, window_ms)

    def _return_jobs(self, request: ClaimRequest, leased: ClaimResult) -> None:
        with suppress(Error):
            self.nack(request.node, leased.seqs, leased.lease_ids)

    def jobs(
        self, node: str, most: int = 1, lease_ms: Duration | None = None, timeout: Seconds | None = None
    ) -> Iterator[Job]:
        """Yield jobs without end, or until none arrived for `timeout` seconds; at most `most` of them unsettled at a
        time. Jobs that are unsettled when the iterator is closed are claimable again at once.

        >>> for job in mails.jobs("worker", timeout=0):
        ...     print(job.data, mails.ack("worker", job).count)
        hello 1
        again 1
        """
        request = self._operations.make_request(node, most, lease_ms, object())
        return self._jobs(request, seconds("timeout", timeout))

    def _jobs(self, request: ClaimRequest, timeout: float | None) -> Iterator[Job]:
        woken = Event()
        clock = self._topic_state.context.clock
        self.add_listener(woken.set)  # before the first claim: a job between claim and wait must not be missed
        try:
            idle_since_ms = clock.monotonic_ms()
            while True:
                woken.clear()
                capacity = request.count_max - self._operations.count_leases(request.connection)
                jobs = self._claim(request._replace(count_max=capacity)).jobs() if capacity > 0 else []
                for job in jobs:
                    if self._topic_state.context.now_ms() <= job.deadline_ms:
                        yield job
                        idle_since_ms = clock.monotonic_ms()
                if jobs:
                    continue
                left_s = None if timeout is None else timeout - (clock.monotonic_ms() - idle_since_ms) / 1000
                if left_s is not None and left_s <= 0:
                    return
                due_ms = self.next_due_ms()
                if due_ms is not None:
                    due_s = self._operations.seconds_until(due_ms)
                    left_s = due_s if left_s is None else min(left_s, due_s)
                woken.wait(left_s)
        finally:
            self.remove_listener(woken.set)
            with suppress(Error):
                self._operations.release_connection(request.connection)

    def worker(self, **options: Unpack[WorkerOptions]) -> Callable[[JobFunction], Worker]:
        """Make the decorated function the worker of this queue; the options are those of `tidelog.Worker`.

        The worker runs between `start` and `stop`, in a `with` block, by `run`, or by `tidelog worker module:name`.

        >>> @mails.worker(retries=tidelog.backoff(attempts=3))
        ... def send(job):
        ...     print(job.data)
        >>> type(send)
        <class 'tidelog.engine.queues.worker.Worker'>
        """
        return worker_for(self, **options)

    @property
    def name(self) -> str:
        """The name of its topic.

        >>> mails.name
        'mails'
        """
        return self._topic_state.name

    @property
    def lease_ms(self) -> int:
        """How long a claim holds a job, unless it says otherwise.

        >>> mails.lease_ms
        30000
        """
        return self._topic_state.config.lease_ms

    # ── settle ────────────────────────────────────────────────────────────────────────────────

    def ack(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None) -> AckResult:
        """Delete finished jobs, with the durability of the topic. Jobs that `node` does not hold, or not under the
        given lease id, are skipped. `Job` objects in place of seqs carry their lease ids.

        >>> mails.ack("worker", mails.claim("worker")).count
        1
        """
        return self._operations.submit_ack(node, *split_jobs(seqs, lease_ids)).wait()

    def nack(
        self,
        node: str,
        seqs: JobsOrSeqs,
        lease_ids: Ids = None,
        delay_ms: Duration = 0,
        *,
        error: BaseException | str | None = None,
    ) -> AckResult:
        """Make unfinished jobs claimable again, at once or after `delay_ms`. `error`: why they failed; a dead letter
        has the last one in its meta, as `$error`, `$error_type` and `$failed_at`.

        >>> mails.nack("worker", mails.claim("worker"), delay_ms=1000, error="no connection").count
        1
        """
        seqs, lease_ids = split_jobs(seqs, lease_ids)
        return self._operations.submit_nack(node, seqs, lease_ids, delay_ms, error).wait()

    def reject(
        self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None, *, error: BaseException | str | None = None
    ) -> AckResult:
        """Move jobs that no retry can save to the dead-letter topic now. Raises BadInput for a queue without one.

        >>> mails.reject("worker", mails.claim("worker"), error="no such address").count
        1
        >>> log.topic("mails-dead").read().records[0].meta["$error"]
        'no such address'
        """
        return self._operations.reject(node, *split_jobs(seqs, lease_ids), error)

    def extend(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None, *, lease_ms: Duration) -> ExtendResult:
        """Extend the leases of these jobs to `lease_ms` from now.

        >>> mails.extend("worker", mails.claim("worker"), lease_ms=timedelta(minutes=2)).count
        1
        """
        return self._operations.submit_extend(node, *split_jobs(seqs, lease_ids), lease_ms=lease_ms).wait()

    # ── inspect ───────────────────────────────────────────────────────────────────────────────

    def counts(self) -> QueueCounts:
        """Return the number of claimable jobs, leased jobs and dead letters.

        >>> mails.counts()
        QueueCounts(ready=2, in_flight=0, dead_lettered=0)
        """
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
        """Leases that expired since the directory was opened, as of the last operation on the queue.

        >>> mails.expired_leases
        0
        """
        return self._state.expired_leases

    @property
    def dead_letter_error(self) -> Error | None:
        """The error of the last move to the dead-letter topic, None if it succeeded. Jobs that could not be moved stay
        in the queue; the next claim tries again.

        >>> print(mails.dead_letter_error)
        None
        """
        return self._state.dead_letter_error

    def next_due_ms(self) -> int | None:
        """Return the next time at which a job may become claimable because a lease, a delay or a schedule ends; None if
        there is none.

        >>> print(mails.next_due_ms())
        None
        """
        self._state.read_new_schedules()
        with self._topic_state.lock:
            return self._state.leases.next_due_ms()

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` when jobs arrive, are settled, released or expire, in the thread that caused it, until
        `remove_listener`. It must be short and must not block.

        >>> woken = threading.Event()
        >>> mails.add_listener(woken.set)
        >>> mails.put("another").seqs
        range(3, 4)
        >>> woken.is_set()
        True
        """
        self._state.add_listener(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        """Stop calling `wake`.

        >>> woken = threading.Event()
        >>> mails.add_listener(woken.set)
        >>> mails.remove_listener(woken.set)
        """
        self._state.remove_listener(wake)

    def history(self) -> History:
        """Return the events of the jobs of this queue.

        >>> mails.ack("worker", mails.claim("worker")).count
        1
        >>> [row["event"] for row in mails.history().to_dicts()]
        ['enqueued', 'claimed', 'acked']
        """
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
        """`Topic.redrive` for a dead-letter topic that is a queue itself; leased jobs are left out.

        >>> mails.reject("worker", mails.claim("worker")).count
        1
        >>> log.topic("mails-dead").redrive(to="mails").count
        1
        """
        return self.topic.redrive(to=to, match=match, where=where, rate=rate, limit=limit)


def _check_node(node: object, limit: int) -> None:
    if not is_utf8_text(node) or not 0 < len(str(node).encode()) <= limit:
        raise BadInput(f"node must be text of 1 to {limit} bytes, not {node!r:.80}; nothing was done")


def _check_jobs(given: object, lease_ids: object) -> None:
    if not isinstance(given, Job | int | Iterable) or isinstance(given, str | bytes):
        raise BadInput(f"jobs are `Job`s or seqs, not {given!r:.80}; nothing was done")
    if lease_ids is not None and not isinstance(lease_ids, list | tuple | range):
        raise BadInput(f"lease_ids are a list with one for each job, not {lease_ids!r:.80}; nothing was done")


def split_jobs(given: JobsOrSeqs, lease_ids: Ids) -> tuple[list[int], Ids]:
    """Return seqs and lease ids of jobs or seqs."""
    _check_jobs(given, lease_ids)
    items: list[Job | int] = [given] if isinstance(given, Job | int) else list(given)
    seqs = [item.seq if isinstance(item, Job) else item for item in items]
    if lease_ids is None and any(isinstance(item, Job) for item in items):
        return seqs, [item.lease_id if isinstance(item, Job) else None for item in items]
    return seqs, lease_ids


def parse_schedule(run_at_ms: Time | None, delay_ms: Duration | None) -> tuple[int | None, int | None]:
    """When a job that is put is due, or how long it waits, in milliseconds."""
    if run_at_ms is not None and delay_ms is not None:
        raise BadInput("run_at_ms and delay_ms exclude each other; nothing was written")
    due_ms = None if run_at_ms is None else time_ms("run_at_ms", run_at_ms)
    wait_ms = None if delay_ms is None else duration_ms("delay_ms", delay_ms)
    for what, value in (("run_at_ms", due_ms), ("delay_ms", wait_ms)):
        if value is not None:
            check_int(what, value, 0, TIME_MS_MAX)
    return due_ms, wait_ms
