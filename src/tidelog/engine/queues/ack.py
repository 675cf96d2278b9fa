"""[shell] Ack, nack, extend, release: what the holder of a lease can do with it.

An ack is a delete of the job under the topic's class. The others are frames only where leases are durable; else they
are done when the call returns. Where a step fails, every lease is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from tidelog.engine import delete
from tidelog.engine.queues.claim import clamp_lease
from tidelog.engine.queues.jobs import TIME_MS_MAX, AckResult, ExtendResult
from tidelog.engine.queues.leases import Lease
from tidelog.engine.queues.queue_state import QueueCommit, QueueState
from tidelog.errors import Error
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import LeaseEvent
from tidelog.wal import CommitFuture

Ids = Sequence[int | None] | None
T = TypeVar("T")


class SelectedLeases(NamedTuple):
    leases: list[tuple[int, Lease]]
    skipped: list[int]

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.leases]


def submit_ack(state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids) -> CommitFuture[AckResult]:
    core = state.topic
    with core.lock:
        now_ms = _refresh(state)
        chosen = _select_leases(state, node, seqs, lease_ids)
        gone = control_frames.Delete(seqs=tuple(sorted(chosen.seqs)), bound_head=core.index.head + 1)
        token = _commit_or_apply(
            state,
            chosen,
            partial(_on_acked, state, chosen, gone, now_ms),
            lambda: [
                frame.encode(
                    frame.DELETE, topic_id=core.id, ts_ms=core.next_timestamp_ms(), data=control_frames.encode(gone)
                )
            ],
            logged=not core.is_ephemeral,
        )
    return _notify_if_done(state, token)


def _on_acked(
    state: QueueState, chosen: SelectedLeases, gone: control_frames.Delete, now_ms: int, error: Error | None
) -> AckResult:
    if error is not None:
        state.leases.on_settle_failed(chosen.seqs)
    elif chosen.leases:
        state.leases.on_acked(chosen.seqs)
        state.history.add_lease_steps(now_ms, "acked", chosen.leases)
        if not state.topic.is_dropped:
            state.remove_known(lambda: delete.apply_delete(state.topic, gone))
    return _ack_result(state, chosen)


def submit_nack(
    state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids, delay_ms: int
) -> CommitFuture[AckResult]:
    core = state.topic
    with core.lock:
        now_ms = _refresh(state)
        ready_at = min(now_ms + delay_ms, TIME_MS_MAX) if delay_ms else None
        chosen = _select_leases(state, node, seqs, lease_ids)
        token = _commit_or_apply(
            state,
            chosen,
            partial(_on_nacked, state, chosen, ready_at, now_ms),
            lambda: _lease_frames(state, LeaseEvent.RELEASED, chosen, ready_at or 0),
            logged=state.has_durable_leases,
        )
    return _notify_if_done(state, token)


def _on_nacked(
    state: QueueState, chosen: SelectedLeases, ready_at: int | None, now_ms: int, error: Error | None
) -> AckResult:
    if error is not None:
        state.leases.on_settle_failed(chosen.seqs)
    else:
        state.leases.on_released(chosen.seqs, ready_at)
        state.history.add_lease_steps(now_ms, "nacked", chosen.leases, ready_at)
    return _ack_result(state, chosen)


def submit_extend(
    state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids, lease_ms: int
) -> CommitFuture[ExtendResult]:
    core = state.topic
    with core.lock:
        now_ms = _refresh(state)
        deadline_ms = now_ms + clamp_lease(lease_ms)
        chosen, seen = SelectedLeases([], []), set[int]()
        for seq, lease_id in zip(seqs, lease_ids or [None] * len(seqs), strict=True):
            lease = None if seq in seen else state.leases.extend(seq, node, lease_id, deadline_ms)
            if lease is None:
                chosen.skipped.append(seq)
            else:
                seen.add(seq)
                chosen.leases.append((seq, lease))
        return _commit_or_apply(
            state,
            chosen,
            partial(_on_extended, state, chosen, deadline_ms, now_ms),
            lambda: _lease_frames(state, LeaseEvent.EXTENDED, chosen, deadline_ms),
            logged=state.has_durable_leases,
        )


def _on_extended(
    state: QueueState, chosen: SelectedLeases, deadline_ms: int, now_ms: int, error: Error | None
) -> ExtendResult:
    if error is not None:
        for seq, before in chosen.leases:
            state.leases.undo_extend(seq, before, deadline_ms)
    else:
        state.history.add_lease_steps(now_ms, "extended", chosen.leases, deadline_ms)
    return ExtendResult(len(chosen.leases), chosen.skipped, dict.fromkeys(chosen.seqs, deadline_ms))


def release_connection(state: QueueState, conn: object) -> int:
    """End every lease of a connection, at once. Where leases are durable this is written, and nobody waits for it: if
    that fails, a restart finds leases that end by themselves."""
    core = state.topic
    with core.lock:
        gone = state.leases.release_connection(conn)
        state.history.add_lease_steps(core.context.now_ms(), "released", gone)
        if gone and state.has_durable_leases:
            frames = _lease_frames(state, LeaseEvent.RELEASED, SelectedLeases(gone, []), 0)
            with suppress(Error):
                core.submit(QueueCommit(state, frames, lambda _: None, durable=False))
                core.shard.wake_writer()
    if gone:
        state.notify_listeners()
    return len(gone)


def _refresh(state: QueueState) -> int:
    state.topic.check_writable()
    now_ms = state.topic.context.now_ms()
    state.refresh(now_ms)
    return now_ms


def _select_leases(state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids) -> SelectedLeases:
    return SelectedLeases(*state.leases.begin_settle(seqs, node, lease_ids or [None] * len(seqs)))


def _commit_or_apply(
    state: QueueState,
    chosen: SelectedLeases,
    finish: Callable[[Error | None], T],
    frames: Callable[[], list[bytes]],
    *,
    logged: bool,
) -> CommitFuture[T]:
    """Have a step done: by the WAL and then by the machine, or by the machine alone."""
    core = state.topic
    try:
        if not chosen.leases or not logged:
            return CommitFuture.completed(core.shard, finish(None))
        commit = QueueCommit(state, frames(), finish, durable=core.is_durable)
        core.submit(commit)
    except Error as error:
        finish(error)
        raise
    return commit.future


def _lease_frames(state: QueueState, event: LeaseEvent, chosen: SelectedLeases, deadline_ms: int) -> list[bytes]:
    counts = state.leases.deliveries
    return [
        state.encode_lease_frame(seq, event, lease.lease_id, deadline_ms, counts.get(seq, 0), lease.node)
        for seq, lease in chosen.leases
    ]


def _notify_if_done(state: QueueState, future: CommitFuture[AckResult]) -> CommitFuture[AckResult]:
    if future.done:
        state.notify_listeners()
    return future


def _ack_result(state: QueueState, chosen: SelectedLeases) -> AckResult:
    state.refresh(state.topic.context.now_ms())
    ready, in_flight, _ = state.counts()
    return AckResult(len(chosen.leases), chosen.skipped, ready, in_flight)
