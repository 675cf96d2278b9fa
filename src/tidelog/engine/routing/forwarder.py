"""[shell] A lane: everything routers pass on from one topic to one other, and how far that has come.

    source  ──────●──────────────────▶ head        `cursor`: the source's seq up to which all routers have passed on
                  └ cursor
    target  ─ D D C C C ─ D ─ C C ───▶ head        C copies, D records written to it directly

A copy is a record of the target and is logged there as one. In front of its frames, in the same commit, a Forward
frame says which seqs of the source they are copies of; so replay finds records and cursor together or finds neither
(docs/decisions/0028). What the source lost before it could be passed on is a Forward frame alone.

One pass at a time: it reads the source without any lock but the source's own, then gets seqs under the target's lock,
and is published by the committer in its turn, as any write is. Never two topics' locks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from tidelog.disk.interrupts import DEFER_SIGNALS
from tidelog.engine import append
from tidelog.engine.append import PendingReservation
from tidelog.engine.routing import forward_plan as copying
from tidelog.engine.routing import forward_plan as planning
from tidelog.engine.routing.forward_plan import EncodedCopies, ForwardStep, read_source
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.segment import SizeCount
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error, Throttled
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Forward, ForwardEvent
from tidelog.wal import Commit, CommitFuture


class ForwardBatch(NamedTuple):
    """One Forward frame of a pass and the copies that follow it."""

    body: Forward
    copies: EncodedCopies | None  # None: records that were lost at the source

    @property
    def first(self) -> int:
        return self.body.dest_head - self.body.total + 1


class Forwarder:
    """`turn` is held over a pass and over every change of the routers."""

    def __init__(self, source: TopicState, dest: TopicState, cursor: int) -> None:
        self.source, self.dest = source, dest
        self.routers: tuple[Router, ...] = ()
        self.forwarded: dict[str, int] = {}
        self.cursor = cursor
        self.saved_cursor = cursor  # as the newest manifest has it: replay may begin there
        self.lock = Lock()
        self.is_blocked = False  # the target has no room for the next record
        self.is_ended = False

    def run(self) -> bool:
        """Pass on all that the source has now; whether anything was done."""
        target, moved = self.source.index.head, False
        while self.cursor < target and self.step():
            moved = True
        return moved

    def step(self) -> bool:
        """One pass over at most some records; False where there is nothing to pass on, or no room for it."""
        with DEFER_SIGNALS, self.lock:
            return self.begin_pass()()

    def begin_pass(self) -> Callable[[], bool]:
        """Stage a pass; what it returns waits until the pass is committed. The caller holds `turn` over both calls."""
        source, dest, routers = self.source, self.dest, self.routers
        shared = dest.context
        if self.is_ended or not routers or shared.closing or not shared.shards or source.is_dropped:
            return _nothing_done
        found = read_source(source, self.cursor)
        if found is None:
            return _nothing_done
        drafts = planning.plan_steps(routers, source.id, found)
        with dest.lock:
            if dest.is_dropped or shared.closing:
                return _nothing_done
            taken, self.is_blocked = planning.fit_steps(routers, drafts, planning.dest_capacity(dest))
            if not taken:
                return _nothing_done
            if not any(draft.total for draft in taken):
                # Not logged: after a crash the same seqs are looked at again.
                self.cursor = taken[-1].last
                return _pass_done
            try:
                commit = self._submit(taken)
            except Throttled:
                self.is_blocked = True
                return _nothing_done
        if commit is None:
            dest.notify_listeners()
            return _pass_done
        return commit.future.wait

    def _submit(self, taken: Sequence[ForwardStep]) -> ForwardCommit | None:
        """Give seqs to what is taken and put it in the queue; None where it is done already. With the target's lock
        held."""
        dest = self.dest
        weight = sum(int(draft.copies.size.sum()) for draft in taken if draft.copies is not None)
        dest.quota.acquire(weight)
        try:
            ts_ms = dest.next_timestamp_ms()
            steps = list(_plan_batches(self, taken, dest.last_assigned_seq + 1, ts_ms))
            if dest.is_ephemeral:
                apply_batches(self, steps, ts_ms)
                self.cursor = taken[-1].last
                return None
            commit = ForwardCommit(self, steps, taken[-1].last, weight, ts_ms)
            dest.shard.submit(commit)
        except BaseException:
            dest.quota.release(weight)
            raise
        dest.last_assigned_seq = commit.last
        dest.staged_router_frame += len(steps)
        dest.index.last_ts = ts_ms
        dest.staged_records += commit.count
        dest.staged_bytes += weight
        return commit

    def encode_router_frame(self, body: control_frames.Body, number: int) -> bytes:
        """A frame about the routers of the target; its seq is the number."""
        dest = self.dest
        data = control_frames.encode(body)
        return frame.encode(body.KIND, topic_id=dest.id, seq=number, ts_ms=dest.context.now_ms(), data=data)


def _nothing_done() -> bool:
    return False


def _pass_done() -> bool:
    return True


class ForwardCommit(Commit):
    """A pass on its way through the target's shard."""

    __slots__ = (
        "count",
        "cursor_after",
        "data_bytes",
        "forwarder",
        "last",
        "needs_reservation",
        "pending_reservation",
        "reserved_ceiling",
        "shard",
        "steps",
        "ts_ms",
    )
    future: CommitFuture[bool]

    def __init__(self, forwarder: Forwarder, steps: list[ForwardBatch], reach: int, weight: int, ts_ms: int) -> None:
        dest = forwarder.dest
        pieces: list[bytes] = []
        for number, (body, made) in enumerate(steps, dest.staged_router_frame + 1):
            pieces.append(forwarder.encode_router_frame(body, number))
            pieces += () if made is None else made.frames
        trims = any(made is None for _, made in steps)
        # A gap that a reader was shown is shown again after a power cut.
        durable = dest.is_durable or (trims and dest.config.durability == "disk")
        self.shard = dest.shard
        super().__init__(pieces, frames=len(pieces), durable=durable, future=CommitFuture(self.shard))
        self.copied_frames = len(pieces)
        self.may_use_reserve = False  # new records, though of the target
        self.forwarder, self.steps, self.data_bytes, self.ts_ms = forwarder, steps, weight, ts_ms
        self.cursor_after = reach  # the cursor when it is done
        self.count = sum(made.records for _, made in steps if made is not None)
        self.last = steps[-1].body.dest_head
        self.needs_reservation = dest.config.durability == "disk"
        self.reserved_ceiling = 0
        self.pending_reservation: PendingReservation | None = None

    @property
    def needs_sync(self) -> bool:
        return self.durable or (self.needs_reservation and append.needs_reservation(self.forwarder.dest, self.last))

    def before_write(self) -> None:
        """Class `disk`: the seqs of copies are reserved ahead, as those of all writes are."""
        if not self.needs_reservation:
            return
        first = self.steps[0].first
        self.reserved_ceiling, self.pending_reservation = append.reserve_seqs(
            self, self.forwarder.dest, self.shard, first, self.last, self.ts_ms
        )

    def apply(self, error: Error | None) -> bool:
        lane, dest = self.forwarder, self.forwarder.dest
        with dest.lock:
            dest.staged_records -= self.count
            dest.staged_bytes -= self.data_bytes
            append.on_reservation_done(self, dest, self.reserved_ceiling, self.pending_reservation, good=error is None)
            if error is None and not dest.is_dropped:
                apply_batches(lane, self.steps, self.ts_ms)
                lane.cursor = self.cursor_after
            else:
                dest.quota.release(self.data_bytes)
        return True

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        if error is None:
            self.forwarder.dest.notify_listeners()


def _plan_batches(
    forwarder: Forwarder, drafts: Sequence[ForwardStep], first: int, ts_ms: int
) -> Iterator[ForwardBatch]:
    """The frames of drafts, with the seqs from `first` on. With the target's lock held."""
    dest = forwarder.dest
    for draft in drafts:
        at = draft.first
        if draft.action == "trim" and draft.total:
            hops = (draft.total, draft.hops)
            yield ForwardBatch(
                _forward_body(forwarder, ForwardEvent.LOST, at, draft.last, first, draft.counts, hops), None
            )
            first += draft.total
        if draft.copies is None or not len(draft.copies):
            continue
        for made in copying.encode_copies(
            dest.id, first, draft.copies, forwarder.routers, ts_ms=ts_ms, durable=dest.is_durable
        ):
            yield ForwardBatch(
                _forward_body(forwarder, ForwardEvent.COPIED, at, made.last, first, made.counts, made.hops), made
            )
            first, at = first + made.records, made.last + 1


def _forward_body(
    forwarder: Forwarder,
    event: ForwardEvent,
    first: int,
    last: int,
    dest_first: int,
    counts: tuple[int, ...],
    hops: tuple[int, ...],
) -> Forward:
    return Forward(
        event=event,
        source_id=forwarder.source.id,
        first=first,
        last=last,
        dest_head=dest_first + sum(counts) - 1,
        counts=counts,
        hops=hops,
    )


def apply_batches(forwarder: Forwarder, steps: Sequence[ForwardBatch], ts_ms: int) -> None:
    """Make steps visible. With the target's lock held."""
    dest = forwarder.dest
    for step in steps:
        body, made = step
        if made is not None:
            dest.publish(
                step.first, made.frames, made.records, made.data_bytes, ts_ms, persistent=not dest.is_ephemeral
            )
        else:
            record_source_loss(dest, step.first, body.dest_head)
        if dest.downstream:
            dest.hops.add_runs(step.first, body.hops)
        for router, count in zip(forwarder.routers, body.counts, strict=True):
            forwarder.forwarded[router.name] += count
        dest.applied_router_frame += 1
        forwarder.cursor = body.last
    dest.staged_router_frame = max(dest.staged_router_frame, dest.applied_router_frame)
    dest.last_assigned_seq = max(dest.last_assigned_seq, dest.index.head)
    dest.context.needs_checkpoint = True


def record_source_loss(dest: TopicState, first: int, last: int) -> None:
    """Seqs first to last stand for records that the source lost. Nothing that is there goes. With the lock held, or
    by replay."""
    dest.index.add_trimmed_range(first, last + 1)
    dest.context.removals.add(dest, "source_trim", first, last, SizeCount(0, 0), actor="retention")


# ── all lanes that lead to a topic ────────────────────────────────────────────────────────────────


def upstream_forwarders(topic: TopicState) -> tuple[list[Forwarder], bool]:
    """The lanes that lead to a topic, farthest first, and whether they form a cycle."""
    order: list[Forwarder] = []
    seen: set[int] = set()
    circular = False
    here: TopicState | None = topic
    while here is not None and here.upstream is not None:  # a topic has one source, so this is a path
        if here.id in seen:
            circular = True
            break
        seen.add(here.id)
        order.append(here.upstream)
        here = here.upstream.source
    return order[::-1], circular


def pull_from_sources(topic: TopicState) -> None:
    """Bring to a topic all that its sources have. Raises what a write to it would raise."""
    lanes, circular = upstream_forwarders(topic)
    for _ in range(HOPS_MAX + 2 if circular else 1):
        if not sum([lane.run() for lane in lanes]):
            return


def push_downstream(topic: TopicState) -> None:
    """Have what a topic holds passed on, before some of it is deleted."""
    for lane in list(topic.downstream):
        lane.run()


def is_lagging(topic: TopicState) -> bool:
    """Whether `catch_up` has something to do."""
    return bool(topic.context.shards) and any(
        lane.cursor < lane.source.index.head for lane in upstream_forwarders(topic)[0]
    )
