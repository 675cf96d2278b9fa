"""The state of one queue: leases, schedules that were read, listeners.

The lock of the topic guards the leases as it guards the index, so both are consistent with each other. A step that is
logged in the WAL changes the leases when it is staged, in the order of the frames, and is undone with the same lock
if it fails. No thread blocks while it holds the lock.
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
from tidelog.engine.queues.jobs import JobFailure, QueueCounts, read_schedules
from tidelog.engine.queues.leases import LeaseTable, QueueSnapshot, SweepResult, encode_queue_row
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Damaged, Error
from tidelog.formats import control_frames, segment_index
from tidelog.formats.control_frames import LeaseEvent
from tidelog.types import Buffer
from tidelog.wal import Commit, CommitFuture

if TYPE_CHECKING:
    from tidelog.engine.queues.claim import BlockingClaimWindow

T = TypeVar("T")
LEASE_IDS_AHEAD = 65_536
_SCHEDULE_READ_BYTES = 8 << 20


class QueueCommit(Commit, Generic[T]):
    """A commit of queue frames. `finish` is called with the outcome, with the topic's lock held."""

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
    """The state of one queue, beside the `TopicState` of its topic."""

    def __init__(self, topic: TopicState, projection: QueueSnapshot) -> None:
        self.topic = topic
        self.leases = LeaseTable()
        self.leases.lease_id = self.lease_id_ceiling = projection.lease_id
        self.leases.dead_lettered = self.staged_dead_letters = projection.dead_lettered
        if self.has_durable_leases:
            self.leases.restore(projection.leased, projection.deliveries, projection.delayed)
        self.expired_leases = 0  # since the directory was opened
        self.scheduled_to = 0  # the schedules of jobs up to this seq were read
        # Jobs that were copied to the dead-letter topic (its id) and are not deleted here yet.
        self.copied_dead_letters: dict[int, int] = {}
        self.dead_letter_error: Error | None = None  # of the last move to the dead-letter topic
        self.failures: dict[int, JobFailure] = {}  # why the last delivery of a job failed, by seq; not kept on disk
        self.history = HistoryWriter(topic)
        self.read_ahead = jobs.ReadAhead()
        self.claim_window: BlockingClaimWindow | None = None
        self._seen_removals = -1  # the index's removal count when the leases were last compared with it
        self._reserving: CommitFuture[None] | None = None
        self._listeners_lock = Lock()
        self._listeners: set[Callable[[], None]] = set()

    @property
    def has_durable_leases(self) -> bool:
        """Whether leases survive a restart."""
        return self.topic.config.leases_durable and not self.topic.is_ephemeral

    def row(self, *, final: bool) -> QueueRow | None:
        """Return the manifest row of the queue. With the lock held. `final`: no claim can follow."""
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
        """Expire leases and delays at this time, and forget jobs that the topic removed."""
        index = self.topic.index
        if self._seen_removals != index.removal_count:
            tracked = self.leases.known_seqs()
            is_removed = ~jobs.live_mask(index, tracked)
            removed: list[int] = np.array(tracked, np.int64)[is_removed].tolist()
            self.leases.forget(removed)
            for seq in removed:
                self.copied_dead_letters.pop(seq, None)
                self.failures.pop(seq, None)
            self._seen_removals = index.removal_count
            self.topic.mark_dirty()
        swept = self.leases.sweep(now_ms)
        if swept.expired:
            self.topic.mark_dirty()
            self.expired_leases += len(swept.expired)
            self.history.add_lease_steps(now_ms, "expired", swept.expired)
        return swept

    def remove_known(self, remove: Callable[[], object]) -> None:
        """Delete jobs that the leases already forgot, so that `refresh` need not compare them with the index."""
        index = self.topic.index
        is_current = self._seen_removals == index.removal_count
        remove()
        if is_current:
            self._seen_removals = index.removal_count

    def counts(self) -> QueueCounts:
        """Count jobs; call `refresh` first."""
        leases = self.leases
        ready = max(self.topic.index.count - leases.unavailable_count, 0)
        return QueueCounts(ready, len(leases.leased), leases.dead_lettered)

    def next_live_seqs(self, cursor: int, most: int) -> tuple[list[int], int]:
        return jobs.next_live_seqs(self.topic.index, cursor, self.scheduled_to + 1, most)

    def is_next_in_memory(self) -> bool:
        """Whether the jobs that would be claimed next are in memory."""
        index = self.topic.index
        lowest = index.earliest if self.leases.returned_count else max(self.leases.cursor, index.earliest)
        piece = next(index.slices(lowest, index.head + 1), None)
        return piece is None or isinstance(piece.part, MemTable)

    def encode_lease_frame(
        self, seq: int, event: LeaseEvent, lease_id: int, deadline_ms: int, count: int, node: str
    ) -> bytes:
        body = control_frames.Lease(
            event=event, lease_id=lease_id, deadline_ms=deadline_ms, deliveries=count, node=node
        )
        return self.topic.encode_control(body, seq=seq)

    def encode_lease_mark(self, ceiling: int, dead_lettered: int) -> bytes:
        """Encode the frame that reserves lease ids up to the ceiling and holds the number of dead letters."""
        return self.encode_lease_frame(0, LeaseEvent.RELEASED, ceiling, 0, dead_lettered, "")

    # ── without the lock ──────────────────────────────────────────────────────────────────────

    def reserve_lease_ids(self, ids: int) -> None:
        """Log lease ids before they are used: after a crash no id is assigned again. An ephemeral queue needs none,
        because a restart leaves no job that an old lease could name."""
        topic = self.topic
        if topic.is_ephemeral:
            return
        while True:
            with topic.lock:
                if self.leases.lease_id + ids <= self.lease_id_ceiling:
                    return
                topic.check_writable()
                if self._reserving is None:
                    ceiling = self.leases.lease_id + ids + LEASE_IDS_AHEAD
                    mark = self.encode_lease_mark(ceiling, self.staged_dead_letters)
                    commit = QueueCommit(self, [mark], partial(self._on_ids_reserved, ceiling), durable=True)
                    topic.submit(commit)
                    self._reserving = commit.future
                future = self._reserving
            future.wait()

    def _on_ids_reserved(self, ceiling: int, error: Error | None) -> None:
        self._reserving = None
        if error is None:
            self.lease_id_ceiling = max(self.lease_id_ceiling, ceiling)

    def read_new_schedules(self) -> None:
        """Read the schedules of new jobs, before any of them is claimed."""
        topic, index = self.topic, self.topic.index
        while self.scheduled_to < index.head:
            with topic.lock:
                stop = index.head + 1
                piece = next(index.slices(max(self.scheduled_to + 1, index.earliest), stop), None)
                if piece is None:
                    self._advance_scheduled(stop)
                    return
                part, first, stop = piece
                if isinstance(part, MemTable) and first >= part.no_meta_from:
                    self._advance_scheduled(stop)  # schedules are in the meta
                    continue
                try:
                    flags = part.entries()["flags"][first - part.base : stop - part.base]
                    with_meta = np.flatnonzero(flags & segment_index.HAS_META)
                    if not len(with_meta):
                        self._advance_scheduled(stop)
                        continue
                    lo, hi = first + int(with_meta[0]), first + int(with_meta[-1]) + 1
                    read = part.reader(lo, hi, _SCHEDULE_READ_BYTES)
                except Damaged as damage:
                    topic.add_damage(f"{topic.name}: the schedules of its jobs: {damage}")
                    self._advance_scheduled(stop)  # unreadable jobs are not claimable either
                    continue
            chunk = read()
            if chunk.fault is None and chunk.next_seq < hi:
                stop = chunk.next_seq
            schedules = read_schedules(chunk.rows)
            with topic.lock:
                if self.scheduled_to >= stop - 1:
                    continue  # another thread has read them meanwhile
                now_ms = topic.context.now_ms()
                live = jobs.live_mask(index, [schedule.seq for schedule in schedules])
                for (seq, run_at_ms, priority), is_live in zip(schedules, live.tolist(), strict=True):
                    if self.scheduled_to < seq < stop and is_live:
                        self.leases.schedule(seq, run_at_ms, priority, now_ms)
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
        """Wake listeners: a job became claimable or a holder has capacity again. Called without the topic's lock."""
        if self._listeners:
            with self._listeners_lock:
                listeners = list(self._listeners)
            self.topic.context.notify(self.topic.name, listeners)


def get_queue_state(topic: TopicState) -> QueueState:
    """Return the state of a queue; create it on first use."""
    with topic.lock:
        if topic.queue_state is None:
            topic.queue_state = QueueState(topic, topic.queue_snapshot or QueueSnapshot())
            topic.queue_snapshot = None
        return topic.queue_state
