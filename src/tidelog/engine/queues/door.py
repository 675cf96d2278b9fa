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

from tidelog.disk.interrupts import deferring
from tidelog.engine import delete, retention
from tidelog.engine.encode import check_number, is_text
from tidelog.engine.queues import claims, settle
from tidelog.engine.queues.cohort import Want
from tidelog.engine.queues.gate import Gate
from tidelog.engine.queues.history import History
from tidelog.engine.queues.jobs import Extended, Job, Leased, QueueCounts, Settled
from tidelog.engine.queues.redrive import Redriven, Where
from tidelog.engine.queues.schedule import PRIORITY_MAX, TIME_MS_MAX, marked
from tidelog.engine.queues.state import State
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, TopicNotFound
from tidelog.formats.frame import SEQ_MAX
from tidelog.wal import Token

if TYPE_CHECKING:
    from tidelog.engine.encode import Batch
    from tidelog.engine.topic import Topic

U64_MAX = (1 << 64) - 1
Given = Job | int | Sequence[Job] | Sequence[int]
Ids = Sequence[int | None] | None


@deferring(
    "take_in",
    "claim_now",
    "stage_ack",
    "stage_nack",
    "stage_extend",
    "ack",
    "nack",
    "extend",
    "release",
    "held",
    "counts",
)
class Queue:
    """Jobs of a topic, handed out under leases. `Engine.queue` makes one."""

    def __init__(self, topic: Topic, state: State) -> None:
        self.topic = topic
        self._state, self._core = state, state.core
        if state.gate is None:
            state.gate = Gate(self._core.shared.clock, self.claim_now, self._give_back)

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
        check_number("a priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        for what, value in (("run_at_ms", run_at_ms), ("delay_ms", delay_ms)):
            if value is not None:
                check_number(what, value, 0, TIME_MS_MAX)
        if delay_ms:
            run_at_ms = min(self._core.shared.now_ms() + delay_ms, TIME_MS_MAX)
        count = len(records) if isinstance(records, list | tuple) else 1
        metas: Any = marked(meta, count, run_at_ms=run_at_ms, priority=priority)
        return self.topic.append(records, tag=tag, node=node, meta=metas, key=key)

    def take_in(self, batch: Batch, *, synced: bool) -> Appended:
        """Write jobs that come back from a dead-letter topic; `synced`: durable on return, whatever the class is."""
        done = self.topic.stage(batch, synced=synced).wait()
        if self.topic.dropped:
            raise TopicNotFound(self.topic.name)
        self._state.journal.note(self._core.shared.now_ms(), "redriven", done.seqs)
        return done

    # ── jobs out ──────────────────────────────────────────────────────────────────────────────

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> list[Job]:
        """Up to `most` jobs, each leased to `node` for `lease_ms`; fewer, or none, where there are no more now. Where
        the queue has a `claim_jitter_ms`, this waits so long for others, to share fairly with them."""
        return self._claim(self._want(node, most, lease_ms)).jobs()

    def claim_now(self, wants: Sequence[Want]) -> list[Leased]:
        """One pass for all of these claimers, who share what there is; without a window. May wait for the disk."""
        return claims.claim_now(self._state, wants)

    def is_quick(self, most: int) -> bool:
        """Whether `claim_now` of so many needs memory alone, and may be called where nobody may wait."""
        return claims.is_quick(self._state, most)

    def _claim(self, want: Want) -> Leased:
        window_ms = self._core.config.claim_jitter_ms
        if not window_ms:
            return self.claim_now([want])[0]
        assert self._state.gate is not None, "made with the first handle"
        return self._state.gate.claim(want, window_ms)

    def _want(self, node: str, most: int, lease_ms: int | None, conn: object = None) -> Want:
        _check_node(node, self._core.shared.limits.node_bytes_max)
        check_number("most", most, 1, SEQ_MAX)
        if lease_ms is not None:
            check_number("lease_ms", lease_ms, 0, TIME_MS_MAX)
        return Want(node, most, lease_ms, conn)

    def _give_back(self, want: Want, leased: Leased) -> None:
        with suppress(Error):
            self.nack(want.node, leased.seqs, leased.lease_ids)

    def work(
        self, node: str, most: int = 1, lease_ms: int | None = None, timeout: float | None = None
    ) -> Iterator[Job]:
        """Jobs as they come, for ever or until none came for `timeout` seconds; at most `most` of them unsettled at a
        time. Those that are unsettled when the iterator is closed can be claimed again at once."""
        return self._work(self._want(node, most, lease_ms, conn=object()), timeout)

    def _work(self, want: Want, timeout: float | None) -> Iterator[Job]:
        woken = Event()
        clock = self._core.shared.clock
        self.listen(woken.set)  # before the first look: a job between look and wait must not be missed
        try:
            idle_from = clock.monotonic_ms()
            while True:
                woken.clear()
                room = want.most - self.held(want.conn)
                jobs = self._claim(want._replace(most=room)).jobs() if room > 0 else []
                for job in jobs:
                    if self._core.shared.now_ms() <= job.deadline_ms:
                        yield job
                        idle_from = clock.monotonic_ms()
                if jobs:
                    continue
                left_s = None if timeout is None else timeout - (clock.monotonic_ms() - idle_from) / 1000
                if left_s is not None and left_s <= 0:
                    return
                due_ms = self.next_due_ms()
                if due_ms is not None:
                    due_s = max(due_ms - self._core.shared.now_ms(), 1) / 1000
                    left_s = due_s if left_s is None else min(left_s, due_s)
                woken.wait(left_s)
        finally:
            self.unlisten(woken.set)
            with suppress(Error):
                self.release(want.conn)

    # ── settling ──────────────────────────────────────────────────────────────────────────────

    @property
    def is_routed(self) -> bool:
        """Whether routers take from it or bring to it, and an ack may have to wait for them."""
        return self.topic.is_routed

    def stage_ack(self, node: str, seqs: Sequence[int], lease_ids: Ids = None) -> Token[Settled]:
        """`ack` without waiting, except for routers that have yet to pass the jobs on (`is_routed`)."""
        self._check(node, seqs, lease_ids)
        delete.settle(self._state.core)
        return settle.ack(self._state, node, seqs, lease_ids)

    def stage_nack(self, node: str, seqs: Sequence[int], lease_ids: Ids = None, delay_ms: int = 0) -> Token[Settled]:
        """`nack` without waiting."""
        self._check(node, seqs, lease_ids)
        check_number("delay_ms", delay_ms, 0, SEQ_MAX)
        return settle.nack(self._state, node, seqs, lease_ids, delay_ms)

    def stage_extend(self, node: str, seqs: Sequence[int], lease_ids: Ids = None, *, lease_ms: int) -> Token[Extended]:
        """`extend` without waiting."""
        self._check(node, seqs, lease_ids)
        check_number("lease_ms", lease_ms, 0, SEQ_MAX)
        return settle.extend(self._state, node, seqs, lease_ids, lease_ms)

    def ack(self, node: str, seqs: Given, lease_ids: Ids = None) -> Settled:
        """These jobs are done: they are deleted, under the topic's class. Those that `node` does not hold, or not under
        the lease id that is named, are skipped. Jobs in place of seqs bring their lease ids."""
        return self.stage_ack(node, *_given(seqs, lease_ids)).wait()

    def nack(self, node: str, seqs: Given, lease_ids: Ids = None, delay_ms: int = 0) -> Settled:
        """These jobs are not done: they can be claimed again, at once or after `delay_ms`."""
        return self.stage_nack(node, *_given(seqs, lease_ids), delay_ms=delay_ms).wait()

    def extend(self, node: str, seqs: Given, lease_ids: Ids = None, *, lease_ms: int) -> Extended:
        """Hold these jobs for `lease_ms` from now."""
        return self.stage_extend(node, *_given(seqs, lease_ids), lease_ms=lease_ms).wait()

    def _check(self, node: str, seqs: Sequence[int], lease_ids: Ids) -> None:
        _check_node(node, self._core.shared.limits.node_bytes_max)
        if not (seqs and set(map(type, seqs)) == {int} and min(seqs) >= 0 and max(seqs) <= U64_MAX):
            for seq in seqs:
                check_number("a seq", seq, 0, U64_MAX)
        if lease_ids is not None and len(lease_ids) not in (0, len(seqs)):
            raise BadInput(f"{len(seqs)} seqs came with {len(lease_ids)} lease ids; nothing was done")

    def release(self, conn: object) -> int:
        """End every lease of this connection, at once; how many there were."""
        return settle.release(self._state, conn)

    def held(self, conn: object) -> int:
        """How many unexpired leases this connection has."""
        state = self._state
        with self._core.lock:
            swept = state.refresh(self._core.shared.now_ms())
            count = state.leases.of(conn)
        if swept:
            state.ring()
        return count

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def counts(self) -> QueueCounts:
        """What can be claimed now, what is held, and what went to the dead-letter topic."""
        retention.observe(self._core)
        state = self._state
        state.catch_up()
        with self._core.lock:
            self._core.check()
            swept = state.refresh(self._core.shared.now_ms())
            counts = state.counts()
        if swept:
            state.ring()
        return counts

    @property
    def expired(self) -> int:
        """Leases that ran out since the engine was opened, as far as somebody has looked."""
        return self._state.expired

    @property
    def dead_letter_error(self) -> Error | None:
        """What kept jobs from the dead-letter topic when they were last to go there; None: nothing. They stay in the
        queue and are tried again by the next claim."""
        return self._state.dead_letter_error

    def next_due_ms(self) -> int | None:
        """When something may become claimable by itself: a lease ends, a delay or a schedule comes due. None: nothing
        will."""
        self._state.catch_up()
        with self._core.lock:
            return self._state.leases.next_due_ms()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` when jobs come, are settled, released or found to have expired, from the thread that did it,
        until `unlisten`. It must be short and must not wait."""
        self._state.listen(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        self._state.unlisten(wake)

    def history(self) -> History:
        """What happened to its jobs."""
        return History(self._core, self._state.journal)

    def redrive(
        self,
        *,
        to: str | None = None,
        match: object = None,
        where: Where | None = None,
        rate: float | None = None,
        limit: int | None = None,
    ) -> Redriven:
        """`Topic.redrive` of a dead-letter topic that is a queue itself; what somebody holds is left out."""
        return self.topic.redrive(to=to, match=match, where=where, rate=rate, limit=limit)


def _check_node(node: object, limit: int) -> None:
    if not is_text(node) or not 0 < len(str(node).encode()) <= limit:
        raise BadInput(f"a node is text of 1 to {limit} bytes, not {node!r:.80}; nothing was done")


def _given(given: Given, lease_ids: Ids) -> tuple[list[int], Ids]:
    """Seqs and lease ids of what was handed back."""
    many: list[Job | int] = [given] if isinstance(given, Job | int) else list(given)
    seqs = [each.seq if isinstance(each, Job) else each for each in many]
    if lease_ids is None and any(isinstance(each, Job) for each in many):
        return seqs, [each.lease_id if isinstance(each, Job) else None for each in many]
    return seqs, lease_ids
