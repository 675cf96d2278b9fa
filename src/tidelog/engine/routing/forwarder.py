"""A forwarder: all routers from one topic to another, with a common cursor.

    source  ──────●──────────────────▶ head        `cursor`: the source's seq up to which all routers have forwarded
                  └ cursor
    dest    ─ D D C C C ─ D ─ C C ───▶ head        C copies, D records written to it directly

A copy is a record of the dest and is logged there. A Forward frame before its frames, in the same commit, holds the
seqs of the source that were copied, so replay finds records and cursor together or neither (docs/decisions/0028).
Records that the source lost before they were forwarded are a Forward frame alone.

One pass at a time: it reads the source with the source's lock only, assigns seqs with the dest's lock, and is
published by the committer as any write is. No thread holds the locks of two topics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from tidelog.disk.process import DEFER_SIGNALS
from tidelog.engine.routing.forward_plan import (
    EncodedCopies,
    ForwardStep,
    dest_capacity,
    encode_copies,
    fit_steps,
    plan_steps,
    read_source,
)
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.segment import SizeCount
from tidelog.engine.seq_reservation import PendingReservation
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error, Throttled
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Forward, ForwardEvent
from tidelog.wal import Commit, CommitFuture


class ForwardBatch(NamedTuple):
    """One Forward frame of a pass and the copies that follow it."""

    body: Forward
    copies: EncodedCopies | None  # None: records that the source lost

    @property
    def first(self) -> int:
        return self.body.dest_head - self.body.total + 1


class Forwarder:
    """All routers from `source` to `dest`. `lock` is held during a pass and during a change of the routers."""

    def __init__(self, source: TopicState, dest: TopicState, cursor: int) -> None:
        self.source, self.dest = source, dest
        self.routers: tuple[Router, ...] = ()
        self.forwarded: dict[str, int] = {}
        self.cursor = cursor
        self.saved_cursor = cursor  # as the newest manifest has it: replay may begin there
        self.lock = Lock()
        self.is_blocked = False  # the dest has no capacity for the next record
        self.is_ended = False

    def run(self) -> bool:
        """Forward all records that the source has now; return whether there were any."""
        target, moved = self.source.index.head, False
        while self.cursor < target and self.step():
            moved = True
        return moved

    def step(self) -> bool:
        """Run one pass; return False if there is nothing to forward or no capacity for it."""
        with DEFER_SIGNALS, self.lock:
            return self.begin_pass()()

    def begin_pass(self) -> Callable[[], bool]:
        """Stage a pass; return a function that waits for its commit. The caller holds `lock` over both calls."""
        source, dest, routers = self.source, self.dest, self.routers
        context = dest.context
        if self.is_ended or not routers or context.closing or not context.shards or source.is_dropped:
            return _nothing_done
        chunk = read_source(source, self.cursor)
        if chunk is None:
            return _nothing_done
        steps = plan_steps(routers, source.id, chunk)
        with dest.lock:
            if dest.is_dropped or context.closing:
                return _nothing_done
            taken, self.is_blocked = fit_steps(routers, steps, dest_capacity(dest))
            if not taken:
                return _nothing_done
            if not any(step.total for step in taken):
                # Not logged: after a crash the same seqs are read again.
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
        """Assign seqs to these steps and submit them; return None if they are applied already. With the dest's lock
        held."""
        dest = self.dest
        weight = sum(int(step.copies.size.sum()) for step in taken if step.copies is not None)
        dest.quota.acquire(weight)
        try:
            ts_ms = dest.next_timestamp_ms()
            batches = list(_plan_batches(self, taken, dest.last_assigned_seq + 1, ts_ms))
            if dest.is_ephemeral:
                apply_batches(self, batches, ts_ms)
                self.cursor = taken[-1].last
                return None
            commit = ForwardCommit(self, batches, taken[-1].last, weight, ts_ms)
            dest.shard.submit(commit)
        except BaseException:
            dest.quota.release(weight)
            raise
        dest.last_assigned_seq = commit.last
        dest.staged_router_frame += len(batches)
        dest.index.last_ts = ts_ms
        dest.staged_records += commit.count
        dest.staged_bytes += weight
        return commit

    def encode_router_frame(self, body: control_frames.Body, number: int) -> bytes:
        """Encode a frame about the routers of the dest; its seq is the number."""
        dest = self.dest
        data = control_frames.encode(body)
        return frame.encode(body.KIND, topic_id=dest.id, seq=number, ts_ms=dest.context.now_ms(), data=data)


def _nothing_done() -> bool:
    return False


def _pass_done() -> bool:
    return True


class ForwardCommit(Commit):
    """The commit of a pass in the dest's shard."""

    __slots__ = (
        "batches",
        "count",
        "cursor_after",
        "data_bytes",
        "forwarder",
        "last",
        "needs_reservation",
        "pending_reservation",
        "reserved_ceiling",
        "shard",
        "ts_ms",
    )
    future: CommitFuture[bool]

    def __init__(self, forwarder: Forwarder, batches: list[ForwardBatch], last: int, weight: int, ts_ms: int) -> None:
        dest = forwarder.dest
        pieces: list[bytes] = []
        for number, (body, copies) in enumerate(batches, dest.staged_router_frame + 1):
            pieces.append(forwarder.encode_router_frame(body, number))
            pieces += () if copies is None else copies.frames
        has_losses = any(copies is None for _, copies in batches)
        # A gap that a reader saw must be there after a power cut.
        durable = dest.is_durable or (has_losses and dest.config.durability == "disk")
        self.shard = dest.shard
        super().__init__(pieces, frames=len(pieces), durable=durable, future=CommitFuture(self.shard))
        self.copied_frames = len(pieces)
        self.may_use_reserve = False  # copies are new records of the dest
        self.forwarder, self.batches, self.data_bytes, self.ts_ms = forwarder, batches, weight, ts_ms
        self.cursor_after = last  # the cursor when it is done
        self.count = sum(copies.records for _, copies in batches if copies is not None)
        self.last = batches[-1].body.dest_head
        self.needs_reservation = dest.config.durability == "disk"
        self.reserved_ceiling = 0
        self.pending_reservation: PendingReservation | None = None

    @property
    def needs_sync(self) -> bool:
        return self.durable or (self.needs_reservation and self.forwarder.dest.reservation.is_needed(self.last))

    def before_write(self) -> None:
        """Class `disk`: reserve the seqs of copies, as for every write."""
        if not self.needs_reservation:
            return
        first = self.batches[0].first
        self.reserved_ceiling, self.pending_reservation = self.forwarder.dest.reservation.prepare(
            self, self.shard, first, self.last, self.ts_ms
        )

    def apply(self, error: Error | None) -> bool:
        forwarder, dest = self.forwarder, self.forwarder.dest
        with dest.lock:
            dest.staged_records -= self.count
            dest.staged_bytes -= self.data_bytes
            dest.reservation.on_done(self, self.reserved_ceiling, self.pending_reservation, ok=error is None)
            if error is None and not dest.is_dropped:
                apply_batches(forwarder, self.batches, self.ts_ms)
                forwarder.cursor = self.cursor_after
            else:
                dest.quota.release(self.data_bytes)
        return True

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        if error is None:
            self.forwarder.dest.notify_listeners()


def _plan_batches(forwarder: Forwarder, steps: Sequence[ForwardStep], first: int, ts_ms: int) -> Iterator[ForwardBatch]:
    """Encode steps with the seqs from `first` on. With the dest's lock held."""
    dest = forwarder.dest
    for step in steps:
        source_first = step.first
        if step.action == "trim" and step.total:
            hops = (step.total, step.hops)
            yield ForwardBatch(
                _forward_body(forwarder, ForwardEvent.LOST, source_first, step.last, first, step.counts, hops), None
            )
            first += step.total
        if step.copies is None or not len(step.copies):
            continue
        for copies in encode_copies(
            dest.id, first, step.copies, forwarder.routers, ts_ms=ts_ms, durable=dest.is_durable
        ):
            body = _forward_body(
                forwarder, ForwardEvent.COPIED, source_first, copies.last, first, copies.counts, copies.hops
            )
            yield ForwardBatch(body, copies)
            first, source_first = first + copies.records, copies.last + 1


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


def apply_batches(forwarder: Forwarder, batches: Sequence[ForwardBatch], ts_ms: int) -> None:
    """Make a pass visible. With the dest's lock held."""
    dest = forwarder.dest
    for batch in batches:
        body, copies = batch
        if copies is not None:
            dest.publish(
                batch.first, copies.frames, copies.records, copies.data_bytes, ts_ms, persistent=not dest.is_ephemeral
            )
        else:
            record_source_loss(dest, batch.first, body.dest_head)
        if dest.downstream:
            dest.hops.add_runs(batch.first, body.hops)
        for router, count in zip(forwarder.routers, body.counts, strict=True):
            forwarder.forwarded[router.name] += count
        dest.applied_router_frame += 1
        forwarder.cursor = body.last
    dest.staged_router_frame = max(dest.staged_router_frame, dest.applied_router_frame)
    dest.last_assigned_seq = max(dest.last_assigned_seq, dest.index.head)
    dest.context.needs_checkpoint = True


def record_source_loss(dest: TopicState, first: int, last: int) -> None:
    """Record that seqs first to last stand for records that the source lost; no record of the dest is removed. With
    the lock held, or in replay."""
    dest.index.add_trimmed_range(first, last + 1)
    dest.context.removals.add(dest, "source_trim", first, last, SizeCount(0, 0), actor="retention")


# ── all forwarders that lead to a topic ───────────────────────────────────────────────────────────


def upstream_forwarders(topic: TopicState) -> tuple[list[Forwarder], bool]:
    """Return the forwarders that lead to a topic, farthest first, and whether they form a cycle."""
    path: list[Forwarder] = []
    seen: set[int] = set()
    is_cycle = False
    current: TopicState | None = topic
    while current is not None and current.upstream is not None:  # a topic has one source, so this is a path
        if current.id in seen:
            is_cycle = True
            break
        seen.add(current.id)
        path.append(current.upstream)
        current = current.upstream.source
    return path[::-1], is_cycle


def pull_from_sources(topic: TopicState) -> None:
    """Forward to a topic all records that its sources have. Raises what a write to it would raise."""
    forwarders, is_cycle = upstream_forwarders(topic)
    for _ in range(HOPS_MAX + 2 if is_cycle else 1):
        if not sum([forwarder.run() for forwarder in forwarders]):
            return


def push_downstream(topic: TopicState) -> None:
    """Forward the records of a topic before some of them are deleted."""
    for forwarder in list(topic.downstream):
        forwarder.run()


def is_lagging(topic: TopicState) -> bool:
    """Whether `pull_from_sources` has something to do."""
    return bool(topic.context.shards) and any(
        forwarder.cursor < forwarder.source.index.head for forwarder in upstream_forwarders(topic)[0]
    )
