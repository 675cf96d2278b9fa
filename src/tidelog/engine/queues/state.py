"""[shell] One queue beside its topic: the lease machine, how far jobs were looked at, and who wants to be woken.

The topic's lock guards the machine as it guards the index, so what is handed out and what is there are
seen together. A step that goes through the WAL changes the machine when it is staged, in the order of
the frames, and is taken back under the same lock if it fails. Nobody waits while holding the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from tidelog.engine.block import Block
from tidelog.engine.core import Core
from tidelog.engine.manifest import QueueRow
from tidelog.engine.queues import reading
from tidelog.engine.queues.gate import Gate
from tidelog.engine.queues.history import Journal
from tidelog.engine.queues.jobs import QueueCounts
from tidelog.engine.queues.leases import Leases, Swept
from tidelog.engine.queues.projection import Projection, row_of
from tidelog.engine.queues.schedule import wishes
from tidelog.errors import Damaged, Error
from tidelog.formats import bodies, frame, idx
from tidelog.formats.bodies import LeaseEvent
from tidelog.types import Buffer
from tidelog.wal import Commit, Token

T = TypeVar("T")
IDS_AHEAD = 65_536
_CHUNK_BYTES = 8 << 20


class Step(Commit, Generic[T]):
    """Frames of a queue on their way through the WAL. `finish` is told the outcome with the topic's lock held."""

    __slots__ = ("_finish", "_state", "token")

    def __init__(
        self, state: State, pieces: Sequence[Buffer], finish: Callable[[Error | None], T], *, durable: bool
    ) -> None:
        super().__init__(pieces, frames=len(pieces), durable=durable)
        self._state, self._finish = state, finish
        self.token: Token[T] = Token(state.core.shard)

    def done(self, error: Error | None) -> None:
        outcome: T | Error
        with self._state.core.lock:
            try:
                outcome = self._finish(error)
            except Error as damage:
                outcome = damage  # it is logged, and done again when the damage is mended
        self.token.set(error or outcome)
        self._state.ring()


class State:
    def __init__(self, core: Core, projection: Projection) -> None:
        self.core = core
        self.leases = Leases()
        self.leases.lease_id = self.ceiling = projection.lease_id
        self.leases.dead_lettered = self.dead_staged = projection.dead_lettered
        if self.durable:
            self.leases.restore(projection.held, projection.deliveries, projection.delayed)
        self.expired = 0  # leases that ran out since it was opened
        self.looked = 0  # what jobs up to here ask for is known
        self.copied: dict[int, int] = {}  # jobs that the topic of this id has as dead letters, and this one still has
        self.dead_letter_error: Error | None = None  # what last kept a job from the dead-letter topic
        self.journal = Journal(core)
        self.ahead = reading.Ahead()
        self.gate: Gate | None = None
        self._removals = -1  # of the index, when what is known here was last held against it
        self._reserving: Token[None] | None = None
        self._bell = Lock()
        self._waiters: set[Callable[[], None]] = set()

    @property
    def durable(self) -> bool:
        """Whether leases outlive a restart."""
        return self.core.config.leases_durable and not self.core.ephemeral

    def row(self, *, final: bool) -> QueueRow | None:
        """What the manifest says of it. With the lock held. `final`: nobody claims any more."""
        leases = self.leases
        lease_id = leases.lease_id if final or self.core.ephemeral else max(self.ceiling, leases.lease_id)
        if not lease_id and not leases.dead_lettered:
            return None
        if not self.durable:
            return QueueRow(lease_id, leases.dead_lettered)
        held = leases.held | {seq: lease for seq, lease in leases.settling.items() if lease is not None}
        return row_of(lease_id, leases.dead_lettered, held, leases.deliveries, leases.delayed)

    # ── with the lock held ────────────────────────────────────────────────────────────────────

    def refresh(self, now_ms: int) -> Swept:
        """Bring the machine to this time, and to what the topic holds."""
        index = self.core.index
        if self._removals != index.removals:
            tracked = self.leases.tracked()
            gone = ~reading.living(index, tracked)
            lost: list[int] = np.array(tracked, np.int64)[gone].tolist()
            self.leases.forget(lost)
            for seq in lost if self.copied else ():
                self.copied.pop(seq, None)
            self._removals = index.removals
        swept = self.leases.sweep(now_ms)
        if swept.expired:
            self.expired += len(swept.expired)
            self.journal.leases(now_ms, "expired", swept.expired)
        return swept

    def own_removal(self, remove: Callable[[], object]) -> None:
        """Delete jobs that the machine knows to be gone: nothing has to be held against the index for that."""
        index = self.core.index
        current = self._removals == index.removals
        remove()
        if current:
            self._removals = index.removals

    def counts(self) -> QueueCounts:
        """Of a machine that was refreshed."""
        leases = self.leases
        ready = max(self.core.index.count - leases.hidden, 0)
        return QueueCounts(ready, len(leases.held), leases.dead_lettered)

    def fresh(self, cursor: int, most: int) -> tuple[list[int], int]:
        return reading.fresh(self.core.index, cursor, self.looked + 1, most)

    def at_hand(self) -> bool:
        """Whether what would be claimed next is in memory."""
        index = self.core.index
        lowest = index.earliest if self.leases.waiting else max(self.leases.cursor, index.earliest)
        found = next(index.slices(lowest, index.head + 1), None)
        return found is None or isinstance(found.part, Block)

    def lease_frame(self, seq: int, event: LeaseEvent, lease_id: int, deadline_ms: int, count: int, node: str) -> bytes:
        body = bodies.Lease(event=event, lease_id=lease_id, deadline_ms=deadline_ms, deliveries=count, node=node)
        data = bodies.encode(body)
        return frame.encode(frame.LEASE, topic_id=self.core.id, seq=seq, ts_ms=self.core.stamp(), data=data)

    def mark_frame(self, ceiling: int, dead_lettered: int) -> bytes:
        """Ids up to the ceiling may be handed out from now on, and so many jobs went to another topic."""
        return self.lease_frame(0, LeaseEvent.RELEASED, ceiling, 0, dead_lettered, "")

    # ── without it ────────────────────────────────────────────────────────────────────────────

    def reserve(self, ids: int) -> None:
        """Put ids on record before they are handed out: after any crash none is given to another lease. An ephemeral
        queue has no jobs left then that an old lease could be about."""
        core = self.core
        if core.ephemeral:
            return
        while True:
            with core.lock:
                if self.leases.lease_id + ids <= self.ceiling:
                    return
                core.check_writable()
                if self._reserving is None:
                    ceiling = self.leases.lease_id + ids + IDS_AHEAD
                    mark = self.mark_frame(ceiling, self.dead_staged)
                    commit = Step(self, [mark], partial(self._reserved, ceiling), durable=True)
                    core.submit(commit)
                    self._reserving = commit.token
                token = self._reserving
            token.wait()

    def _reserved(self, ceiling: int, error: Error | None) -> None:
        self._reserving = None
        if error is None:
            self.ceiling = max(self.ceiling, ceiling)

    def catch_up(self) -> None:
        """Look at the jobs that have come since: what they ask for is known before one of them is handed out."""
        core, index = self.core, self.core.index
        while self.looked < index.head:
            with core.lock:
                stop = index.head + 1
                found = next(index.slices(max(self.looked + 1, index.earliest), stop), None)
                if found is None:
                    self._saw(stop)
                    return
                part, first, stop = found
                if isinstance(part, Block) and first >= part.bare_from:
                    self._saw(stop)  # nobody asks for anything without a meta
                    continue
                try:
                    flags = part.entries()["flags"][first - part.base : stop - part.base]
                    with_meta = np.flatnonzero(flags & idx.HAS_META)
                    if not len(with_meta):
                        self._saw(stop)
                        continue
                    lo, hi = first + int(with_meta[0]), first + int(with_meta[-1]) + 1
                    look = part.look(lo, hi, _CHUNK_BYTES)
                except Damaged as damage:
                    core.damage[:] = [*core.damage, f"{core.name}: what its jobs ask for: {damage}"][-10:]
                    self._saw(stop)  # those that do not read are not handed out either
                    continue
            chunk = look()
            if chunk.fault is None and chunk.next_seq < hi:
                stop = chunk.next_seq
            asked = wishes(chunk.rows)
            with core.lock:
                if self.looked >= stop - 1:
                    continue  # somebody else has looked meanwhile
                now_ms = core.shared.now_ms()
                alive = reading.living(index, [wish.seq for wish in asked])
                for wish, lives in zip(asked, alive.tolist(), strict=True):
                    if self.looked < wish.seq < stop and lives:
                        self.leases.schedule(wish.seq, wish.run_at_ms, wish.priority, now_ms)
                self._saw(stop)

    def _saw(self, stop: int) -> None:
        self.journal.enqueued(self.looked + 1, stop - 1)
        self.looked = max(self.looked, stop - 1)

    def listen(self, wake: Callable[[], None]) -> None:
        with self._bell:
            self._waiters.add(wake)
        self.core.listen(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        self.core.unlisten(wake)
        with self._bell:
            self._waiters.discard(wake)

    def ring(self) -> None:
        """Something became claimable, or somebody has room for more. Called without the topic's lock."""
        if self._waiters:
            with self._bell:
                waiters = list(self._waiters)
            self.core.shared.notify(self.core.name, waiters)


def state_of(core: Core) -> State:
    """The one state of a queue, made when it is first used."""
    with core.lock:
        if core.queue is None:
            core.queue = State(core, core.projection or Projection())
            core.projection = None
        return core.queue
