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
from tidelog.engine.queues.claims import clamp_lease
from tidelog.engine.queues.jobs import Extended, Settled
from tidelog.engine.queues.leases import Lease
from tidelog.engine.queues.schedule import TIME_MS_MAX
from tidelog.engine.queues.state import State, Step
from tidelog.errors import Error
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import LeaseEvent
from tidelog.wal import Token

Ids = Sequence[int | None] | None
T = TypeVar("T")


class Chosen(NamedTuple):
    leases: list[tuple[int, Lease]]
    skipped: list[int]

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.leases]


def ack(state: State, node: str, seqs: Sequence[int], lease_ids: Ids) -> Token[Settled]:
    core = state.core
    with core.lock:
        now_ms = _ready(state)
        chosen = _settling(state, node, seqs, lease_ids)
        gone = bodies.Delete(seqs=tuple(sorted(chosen.seqs)), bound_head=core.index.head + 1)
        token = _through(
            state,
            chosen,
            partial(_acked, state, chosen, gone, now_ms),
            lambda: [frame.encode(frame.DELETE, topic_id=core.id, ts_ms=core.stamp(), data=bodies.encode(gone))],
            logged=not core.ephemeral,
        )
    return _told(state, token)


def _acked(state: State, chosen: Chosen, gone: bodies.Delete, now_ms: int, error: Error | None) -> Settled:
    if error is not None:
        state.leases.unsettled(chosen.seqs)
    elif chosen.leases:
        state.leases.settled(chosen.seqs)
        state.journal.leases(now_ms, "acked", chosen.leases)
        if not state.core.dropped:
            state.own_removal(lambda: delete.apply(state.core, gone))
    return _outcome(state, chosen)


def nack(state: State, node: str, seqs: Sequence[int], lease_ids: Ids, delay_ms: int) -> Token[Settled]:
    core = state.core
    with core.lock:
        now_ms = _ready(state)
        ready_at = min(now_ms + delay_ms, TIME_MS_MAX) if delay_ms else None
        chosen = _settling(state, node, seqs, lease_ids)
        token = _through(
            state,
            chosen,
            partial(_nacked, state, chosen, ready_at, now_ms),
            lambda: _frames(state, LeaseEvent.RELEASED, chosen, ready_at or 0),
            logged=state.durable,
        )
    return _told(state, token)


def _nacked(state: State, chosen: Chosen, ready_at: int | None, now_ms: int, error: Error | None) -> Settled:
    if error is not None:
        state.leases.unsettled(chosen.seqs)
    else:
        state.leases.released(chosen.seqs, ready_at)
        state.journal.leases(now_ms, "nacked", chosen.leases, ready_at)
    return _outcome(state, chosen)


def extend(state: State, node: str, seqs: Sequence[int], lease_ids: Ids, lease_ms: int) -> Token[Extended]:
    core = state.core
    with core.lock:
        now_ms = _ready(state)
        deadline_ms = now_ms + clamp_lease(lease_ms)
        chosen, seen = Chosen([], []), set[int]()
        for seq, lease_id in zip(seqs, lease_ids or [None] * len(seqs), strict=True):
            lease = None if seq in seen else state.leases.extend(seq, node, lease_id, deadline_ms)
            if lease is None:
                chosen.skipped.append(seq)
            else:
                seen.add(seq)
                chosen.leases.append((seq, lease))
        return _through(
            state,
            chosen,
            partial(_extended, state, chosen, deadline_ms, now_ms),
            lambda: _frames(state, LeaseEvent.EXTENDED, chosen, deadline_ms),
            logged=state.durable,
        )


def _extended(state: State, chosen: Chosen, deadline_ms: int, now_ms: int, error: Error | None) -> Extended:
    if error is not None:
        for seq, before in chosen.leases:
            state.leases.unextend(seq, before, deadline_ms)
    else:
        state.journal.leases(now_ms, "extended", chosen.leases, deadline_ms)
    return Extended(len(chosen.leases), chosen.skipped, dict.fromkeys(chosen.seqs, deadline_ms))


def release(state: State, conn: object) -> int:
    """End every lease of a connection, at once. Where leases are durable this is written, and nobody waits for it: if
    that fails, a restart finds leases that end by themselves."""
    core = state.core
    with core.lock:
        gone = state.leases.release(conn)
        state.journal.leases(core.shared.now_ms(), "released", gone)
        if gone and state.durable:
            frames = _frames(state, LeaseEvent.RELEASED, Chosen(gone, []), 0)
            with suppress(Error):
                core.submit(Step(state, frames, lambda _: None, durable=False))
                core.shard.want()
    if gone:
        state.ring()
    return len(gone)


def _ready(state: State) -> int:
    state.core.check_writable()
    now_ms = state.core.shared.now_ms()
    state.refresh(now_ms)
    return now_ms


def _settling(state: State, node: str, seqs: Sequence[int], lease_ids: Ids) -> Chosen:
    return Chosen(*state.leases.settle(seqs, node, lease_ids or [None] * len(seqs)))


def _through(
    state: State,
    chosen: Chosen,
    finish: Callable[[Error | None], T],
    frames: Callable[[], list[bytes]],
    *,
    logged: bool,
) -> Token[T]:
    """Have a step done: by the WAL and then by the machine, or by the machine alone."""
    core = state.core
    try:
        if not chosen.leases or not logged:
            return Token.ready(core.shard, finish(None))
        commit = Step(state, frames(), finish, durable=core.durable)
        core.submit(commit)
    except Error as error:
        finish(error)
        raise
    return commit.token


def _frames(state: State, event: LeaseEvent, chosen: Chosen, deadline_ms: int) -> list[bytes]:
    counts = state.leases.deliveries
    return [
        state.lease_frame(seq, event, lease.lease_id, deadline_ms, counts.get(seq, 0), lease.node)
        for seq, lease in chosen.leases
    ]


def _told(state: State, token: Token[Settled]) -> Token[Settled]:
    if token.done:
        state.ring()
    return token


def _outcome(state: State, chosen: Chosen) -> Settled:
    state.refresh(state.core.shared.now_ms())
    ready, in_flight, _ = state.counts()
    return Settled(len(chosen.leases), chosen.skipped, ready, in_flight)
