"""Ack, nack, extend and release: the operations of a lease holder.

An ack deletes the job with the durability of the topic. The others are logged only if leases are durable; otherwise
they take effect when the call returns. If a step fails, every lease is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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
            data = control_frames.encode(body)
            return [frame.encode(frame.DELETE, topic_id=topic.id, ts_ms=topic.next_timestamp_ms(), data=data)]

        def apply_ack() -> None:
            state.leases.on_acked(selected.seqs)
            state.history.add_lease_steps(now_ms, "acked", selected.leases)
            if selected.leases and not topic.is_dropped:
                state.remove_known(lambda: delete.apply_delete(topic, body))

        future = _settle(state, selected, encode_delete, apply_ack, logged=not topic.is_ephemeral)
    return _notify_if_done(state, future)


def submit_nack(
    state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids, delay_ms: int
) -> CommitFuture[AckResult]:
    with state.topic.lock:
        now_ms = _refresh(state)
        ready_at_ms = min(now_ms + delay_ms, TIME_MS_MAX) if delay_ms else None
        selected = _select_leases(state, node, seqs, lease_ids)

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
            return CommitFuture.completed(topic.shard, finish(None))
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
