"""[shell] One queue beside its topic: the lease machine, how far jobs were looked at, and who wants to be woken.

The topic's lock guards the machine as it guards the index, so what is handed out and what is there are
seen together. A step that goes through the WAL changes the machine when it is staged, in the order of
the frames, and is taken back under the same lock if it fails. Nobody waits while holding the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from tidelog.engine.manifest import QueueRow
from tidelog.engine.memtable import MemTable
from tidelog.engine.queues import jobs
from tidelog.engine.queues.history import HistoryWriter
from tidelog.engine.queues.jobs import QueueCounts, read_schedules
from tidelog.engine.queues.leases import LeaseTable, QueueSnapshot, SweepResult, encode_queue_row
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Damaged, Error
from tidelog.formats import control_frames, frame, segment_index
from tidelog.formats.control_frames import LeaseEvent
from tidelog.types import Buffer
from tidelog.wal import Commit, CommitFuture

if TYPE_CHECKING:
    from tidelog.engine.queues.claim import BlockingClaimWindow

T = TypeVar("T")
LEASE_IDS_AHEAD = 65_536
_SCHEDULE_READ_BYTES = 8 << 20


class QueueCommit(Commit, Generic[T]):
    """Frames of a queue on their way through the WAL. `finish` is told the outcome with the topic's lock held."""

    __slots__ = ("_finish", "_state")
    future: CommitFuture[T]

    def __init__(
        self, state: QueueState, pieces: Sequence[Buffer], finish: Callable[[Error | None], T], *, durable: bool
    ) -> None:
        super().__init__(pieces, frames=len(pieces), durable=durable, future=CommitFuture(state.topic.shard))
        self._state, self._finish = state, finish

    def apply(self, error: Error | None) -> T | Error:
        with self._state.topic.lock:
            try:
                return self._finish(error)
            except Error as damage:
                return damage  # it is logged, and applied again after a repair

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        self._state.notify_listeners()


class QueueState:
    def __init__(self, topic: TopicState, projection: QueueSnapshot) -> None:
        self.topic = topic
        self.leases = LeaseTable()
        self.leases.lease_id = self.lease_id_ceiling = projection.lease_id
        self.leases.dead_lettered = self.staged_dead_letters = projection.dead_lettered
        if self.has_durable_leases:
            self.leases.restore(projection.leased, projection.deliveries, projection.delayed)
        self.expired_leases = 0  # leases that ran out since it was opened
        self.scheduled_to = 0  # what jobs up to here ask for is known
        self.copied_dead_letters: dict[
            int, int
        ] = {}  # jobs that the topic of this id has as dead letters, and this one still has
        self.dead_letter_error: Error | None = None  # what last kept a job from the dead-letter topic
        self.history = HistoryWriter(topic)
        self.read_ahead = jobs.ReadAhead()
        self.claim_window: BlockingClaimWindow | None = None
        self._seen_removals = -1  # of the index, when what is known here was last held against it
        self._reserving: CommitFuture[None] | None = None
        self._listeners_lock = Lock()
        self._listeners: set[Callable[[], None]] = set()

    @property
    def has_durable_leases(self) -> bool:
        """Whether leases outlive a restart."""
        return self.topic.config.leases_durable and not self.topic.is_ephemeral

    def row(self, *, final: bool) -> QueueRow | None:
        """What the manifest says of it. With the lock held. `final`: nobody claims any more."""
        leases = self.leases
        lease_id = leases.lease_id if final or self.topic.is_ephemeral else max(self.lease_id_ceiling, leases.lease_id)
        if not lease_id and not leases.dead_lettered:
            return None
        if not self.has_durable_leases:
            return QueueRow(lease_id, leases.dead_lettered)
        held = leases.leased | {seq: lease for seq, lease in leases.pending.items() if lease is not None}
        return encode_queue_row(lease_id, leases.dead_lettered, held, leases.deliveries, leases.delayed)

    # ── with the lock held ────────────────────────────────────────────────────────────────────

    def refresh(self, now_ms: int) -> SweepResult:
        """Bring the machine to this time, and to what the topic holds."""
        index = self.topic.index
        if self._seen_removals != index.removal_count:
            tracked = self.leases.known_seqs()
            gone = ~jobs.live_mask(index, tracked)
            lost: list[int] = np.array(tracked, np.int64)[gone].tolist()
            self.leases.forget(lost)
            for seq in lost if self.copied_dead_letters else ():
                self.copied_dead_letters.pop(seq, None)
            self._seen_removals = index.removal_count
        swept = self.leases.sweep(now_ms)
        if swept.expired:
            self.expired_leases += len(swept.expired)
            self.history.add_lease_steps(now_ms, "expired", swept.expired)
        return swept

    def remove_known(self, remove: Callable[[], object]) -> None:
        """Delete jobs that the machine knows to be gone: nothing has to be held against the index for that."""
        index = self.topic.index
        current = self._seen_removals == index.removal_count
        remove()
        if current:
            self._seen_removals = index.removal_count

    def counts(self) -> QueueCounts:
        """Of a machine that was refreshed."""
        leases = self.leases
        ready = max(self.topic.index.count - leases.unavailable_count, 0)
        return QueueCounts(ready, len(leases.leased), leases.dead_lettered)

    def next_live_seqs(self, cursor: int, most: int) -> tuple[list[int], int]:
        return jobs.next_live_seqs(self.topic.index, cursor, self.scheduled_to + 1, most)

    def is_next_in_memory(self) -> bool:
        """Whether what would be claimed next is in memory."""
        index = self.topic.index
        lowest = index.earliest if self.leases.returned_count else max(self.leases.cursor, index.earliest)
        found = next(index.slices(lowest, index.head + 1), None)
        return found is None or isinstance(found.part, MemTable)

    def encode_lease_frame(
        self, seq: int, event: LeaseEvent, lease_id: int, deadline_ms: int, count: int, node: str
    ) -> bytes:
        body = control_frames.Lease(
            event=event, lease_id=lease_id, deadline_ms=deadline_ms, deliveries=count, node=node
        )
        data = control_frames.encode(body)
        return frame.encode(
            frame.LEASE, topic_id=self.topic.id, seq=seq, ts_ms=self.topic.next_timestamp_ms(), data=data
        )

    def encode_lease_mark(self, ceiling: int, dead_lettered: int) -> bytes:
        """Ids up to the ceiling may be handed out from now on, and so many jobs went to another topic."""
        return self.encode_lease_frame(0, LeaseEvent.RELEASED, ceiling, 0, dead_lettered, "")

    # ── without it ────────────────────────────────────────────────────────────────────────────

    def reserve_lease_ids(self, ids: int) -> None:
        """Put ids on record before they are handed out: after any crash none is given to another lease. An ephemeral
        queue has no jobs left then that an old lease could be about."""
        core = self.topic
        if core.is_ephemeral:
            return
        while True:
            with core.lock:
                if self.leases.lease_id + ids <= self.lease_id_ceiling:
                    return
                core.check_writable()
                if self._reserving is None:
                    ceiling = self.leases.lease_id + ids + LEASE_IDS_AHEAD
                    mark = self.encode_lease_mark(ceiling, self.staged_dead_letters)
                    commit = QueueCommit(self, [mark], partial(self._on_ids_reserved, ceiling), durable=True)
                    core.submit(commit)
                    self._reserving = commit.future
                token = self._reserving
            token.wait()

    def _on_ids_reserved(self, ceiling: int, error: Error | None) -> None:
        self._reserving = None
        if error is None:
            self.lease_id_ceiling = max(self.lease_id_ceiling, ceiling)

    def read_new_schedules(self) -> None:
        """Look at the jobs that have come since: what they ask for is known before one of them is handed out."""
        core, index = self.topic, self.topic.index
        while self.scheduled_to < index.head:
            with core.lock:
                stop = index.head + 1
                found = next(index.slices(max(self.scheduled_to + 1, index.earliest), stop), None)
                if found is None:
                    self._advance_scheduled(stop)
                    return
                part, first, stop = found
                if isinstance(part, MemTable) and first >= part.no_meta_from:
                    self._advance_scheduled(stop)  # nobody asks for anything without a meta
                    continue
                try:
                    flags = part.entries()["flags"][first - part.base : stop - part.base]
                    with_meta = np.flatnonzero(flags & segment_index.HAS_META)
                    if not len(with_meta):
                        self._advance_scheduled(stop)
                        continue
                    lo, hi = first + int(with_meta[0]), first + int(with_meta[-1]) + 1
                    look = part.reader(lo, hi, _SCHEDULE_READ_BYTES)
                except Damaged as damage:
                    core.damage[:] = [*core.damage, f"{core.name}: what its jobs ask for: {damage}"][-10:]
                    self._advance_scheduled(stop)  # those that do not read are not handed out either
                    continue
            chunk = look()
            if chunk.fault is None and chunk.next_seq < hi:
                stop = chunk.next_seq
            asked = read_schedules(chunk.rows)
            with core.lock:
                if self.scheduled_to >= stop - 1:
                    continue  # somebody else has looked meanwhile
                now_ms = core.context.now_ms()
                alive = jobs.live_mask(index, [wish.seq for wish in asked])
                for wish, lives in zip(asked, alive.tolist(), strict=True):
                    if self.scheduled_to < wish.seq < stop and lives:
                        self.leases.schedule(wish.seq, wish.run_at_ms, wish.priority, now_ms)
                self._advance_scheduled(stop)

    def _advance_scheduled(self, stop: int) -> None:
        self.history.add_enqueued(self.scheduled_to + 1, stop - 1)
        self.scheduled_to = max(self.scheduled_to, stop - 1)

    def add_listener(self, wake: Callable[[], None]) -> None:
        with self._listeners_lock:
            self._listeners.add(wake)
        self.topic.add_listener(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        self.topic.remove_listener(wake)
        with self._listeners_lock:
            self._listeners.discard(wake)

    def notify_listeners(self) -> None:
        """Something became claimable, or somebody has room for more. Called without the topic's lock."""
        if self._listeners:
            with self._listeners_lock:
                waiters = list(self._listeners)
            self.topic.context.notify(self.topic.name, waiters)


def get_queue_state(topic: TopicState) -> QueueState:
    """The one state of a queue, made when it is first used."""
    with topic.lock:
        if topic.queue_state is None:
            topic.queue_state = QueueState(topic, topic.queue_snapshot or QueueSnapshot())
            topic.queue_snapshot = None
        return topic.queue_state
