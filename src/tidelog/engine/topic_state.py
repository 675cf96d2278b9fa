"""The state of one topic: its index, its lock, its listeners, its reserved seqs.

A write is staged under the topic's lock (seqs, frames, a place in the shard's queue) and published by the committer
when the WAL has it. Between the two it is counted but not visible. No thread waits for a commit while it holds the
lock: the committer needs the lock to publish.

A topic of class `disk` reserves seqs: a crash may lose a record, never free its seq.

    head      reserving_seq        pending.ceiling
    ├──────────────┼────────────────────────┤
    │ may be used  │ usable once the disk has the HeadWatermark frame that went along with a write; written when a
                     quarter of a large reservation was used quickly; no write waits for its sync

A write with seqs above `reserving_seq` carries a HeadWatermark of its own and waits until it is synced: the first write
does, and one that arrives before the pending reservation is synced. Sizes of reservations: docs/decisions/0008.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import exp2
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.clock import Clock
from tidelog.disk import process
from tidelog.disk.interface import File
from tidelog.engine.blobs import BlobTable
from tidelog.engine.config import OWN, TopicConfig
from tidelog.engine.context import EngineContext, Quota, RemovalCause, topic_directory
from tidelog.engine.idempotency import ProducerState
from tidelog.engine.key_index import KeyIndex
from tidelog.engine.memtable import BatchStats, MemTable
from tidelog.engine.results import Appended, TopicInfo
from tidelog.engine.routing.router import HopCounts
from tidelog.engine.segment import Segment
from tidelog.engine.topic_index import GroupCursorState, TopicIndex, Watermarks, find_broken_holds, limit_eviction
from tidelog.errors import Closed, Corrupt, Damaged, Forked, TopicNotFound, Unavailable
from tidelog.formats import control_frames, frame
from tidelog.wal import Commit, CommitFuture, Shard, WalRange

if TYPE_CHECKING:
    from tidelog.engine.group_leases import GroupLeases
    from tidelog.engine.queues.leases import QueueSnapshot
    from tidelog.engine.queues.queue_state import QueueState
    from tidelog.engine.read import WalWatch
    from tidelog.engine.routing.forwarder import Forwarder
    from tidelog.engine.routing.manager import ForwarderSnapshot, RouterRecovery
    from tidelog.wal import Commit

_SMALL_RESERVATION: Final = 256
RESERVATION_MAX: Final = 1 << 20  # seqs at a time, unless a batch is larger
_FAST_USE_MS: Final = 1000
_RESERVATION_GROWTH: Final = 8


@dataclass(slots=True)
class PendingReservation:
    """A HeadWatermark frame that is not synced yet."""

    ceiling: int
    file: File | None = None  # the WAL file that has it; None: not written yet
    end: int = 0


class SeqReservation:
    """The reserved seqs of one topic. `prepare` and `on_done` are called by the committer."""

    def __init__(self, topic_id: int, lock: Lock, clock: Clock, size_min: int) -> None:
        self._topic_id, self._lock, self._clock, self._size_min = topic_id, lock, clock, size_min
        self.reserved_seq = 0  # seqs up to here are durably reserved
        self.reserving_seq = 0  # plus what the commit that is being written reserves
        self.pending: PendingReservation | None = None  # the next one, valid once its frame is synced
        self._size, self._reserved_ms = 0, 0  # of the last reservation

    @property
    def ceiling(self) -> int:
        """Replay of what is written so far treats seqs up to here as assigned."""
        return max(self.reserved_seq, self.reserving_seq, 0 if self.pending is None else self.pending.ceiling)

    def raise_to(self, seq: int) -> None:
        """Record a reservation found by recovery."""
        self.reserved_seq = max(self.reserved_seq, seq)

    def is_needed(self, last: int) -> bool:
        """Whether a write up to `last` must carry its own reservation and wait for its sync."""
        return last > self.reserving_seq

    def prepare(
        self, commit: Commit, shard: Shard, first: int, last: int, ts_ms: int
    ) -> tuple[int, PendingReservation | None]:
        """Prepend the reservation frame that a write of seqs first to last needs.

        Returns the ceiling that the ack makes durable, and the reservation that a later sync completes.
        """
        self._apply_synced(shard)
        if last > self.reserving_seq:
            self.reserving_seq = last + self._next_size(last - first + 1)
            commit.prepend_durable(self._encode(self.reserving_seq, ts_ms))
            return self.reserving_seq, None
        if self._should_reserve_ahead(last):
            self.pending = PendingReservation(last + self._next_size(last - first + 1))
            commit.prepend(self._encode(self.pending.ceiling, ts_ms))
            shard.on_tick_needed()
            return 0, self.pending
        return 0, None

    def on_done(self, commit: Commit, ceiling: int, pending: PendingReservation | None, *, ok: bool) -> None:
        """Finish what `prepare` began, after the write succeeded or failed. With the topic's lock held."""
        if ok:
            self.reserved_seq = max(self.reserved_seq, ceiling)
            if pending is not None:
                pending.file, pending.end = commit.file, commit.offset + commit.size
            return
        self.reserving_seq = self.reserved_seq
        if pending is not None:
            self.pending = None

    def _encode(self, ceiling: int, ts_ms: int) -> bytes:
        body = control_frames.encode(control_frames.HeadWatermark(ceiling))
        return frame.encode(frame.HEAD_WATERMARK, topic_id=self._topic_id, ts_ms=ts_ms, data=body)

    def _apply_synced(self, shard: Shard) -> None:
        """Make the pending reservation usable if its frame is synced by now."""
        pending = self.pending
        if pending is None or pending.file is None or not shard.is_synced(pending.file, pending.end):
            return
        with self._lock:
            self.reserved_seq = max(self.reserved_seq, pending.ceiling)
            self.reserving_seq, self.pending = max(self.reserving_seq, self.reserved_seq), None

    def _should_reserve_ahead(self, last: int) -> bool:
        """Whether a write up to `last` should carry a reservation for later writes: a quarter was used quickly.

        Small reservations are never renewed ahead: the head of a topic with few writes must not jump by more (contract
        §4).
        """
        if self.pending is not None or self._size <= _SMALL_RESERVATION:
            return False
        return 4 * (self.reserving_seq - last) < 3 * self._size and self._was_used_within(_FAST_USE_MS // 4)

    def _next_size(self, count: int) -> int:
        """Return how many seqs to reserve: more if the last one was used up quickly, since each costs a sync."""
        size_min = max(self._size_min, 4 * count)
        grown = _RESERVATION_GROWTH * self._size if self._size and self._was_used_within(_FAST_USE_MS) else 0
        self._size = min(max(size_min, grown), max(RESERVATION_MAX, size_min))
        self._reserved_ms = self._clock.monotonic_ms()
        return self._size

    def _was_used_within(self, duration_ms: int) -> bool:
        return self._clock.monotonic_ms() - self._reserved_ms < duration_ms


RECENCY_PRIORITY_MAX: Final = 500
RECENCY_HALF_LIFE_MS: Final = 30_000
RECENCY_FORGOTTEN_MS: Final = 300_000
_PRIORITY_BOUND: Final = 1_000


def effective_priority(config: TopicConfig, idle_ms: int | None) -> int:
    """Return the configured priority, or one that decays with the time since the last read.

      500 ┤█
          │ █▄            round(500 · 2^(−idle / 30 s)), and 0 after five minutes
      250 ┤   ▀▄▄
          │       ▀▀▀▄▄▄▄▄▄▄
        0 ┼───────────────────────────────
          0    30   60   90   120 s since the last read

    `idle_ms` is None if the topic was not read since the start.
    """
    if config.priority is not None:
        return max(-_PRIORITY_BOUND, min(config.priority, _PRIORITY_BOUND))
    if not config.auto_priority or idle_ms is None or idle_ms >= RECENCY_FORGOTTEN_MS:
        return 0
    return round(RECENCY_PRIORITY_MAX * exp2(-idle_ms / RECENCY_HALF_LIFE_MS))


@dataclass(slots=True)
class RecoveryFindings:
    """What replay found about one topic."""

    lost_ranges: list[tuple[int, int]] = field(default_factory=list)  # (first, last) seqs lost with damaged frames
    is_config_uncertain: bool = False  # a config change may be lost: replay does not evict by caps
    watermarks: Watermarks = field(default_factory=Watermarks)  # the highest floors among replayed frames
    head: int | None = None  # when the directory was opened; None: the topic was created since


class CompactionProgress(NamedTuple):
    """How far compaction is, under one rule for keys."""

    selector: int  # identifies the rule
    compacted_to: int
    tombstone_ms: int  # the time of the oldest tombstone that is left; 0: none


class TopicState:
    def __init__(self, context: EngineContext, topic_id: int, name: str, config: TopicConfig) -> None:
        self.context, self.id, self.name, self.config = context, topic_id, name, config
        self.lock = Lock()
        self.index = TopicIndex()
        self.quota = Quota(0) if name.startswith(OWN) else context.quota  # internal topics are outside of the quota
        self.groups: dict[str, GroupCursorState] = {}
        self.group_leases: dict[str, GroupLeases] = {}  # of groups with several consumers
        self.pending_cursor_commits: dict[str, CommitFuture[None]] = {}  # cursor moves on their way to the WAL
        self.producers: ProducerState[CommitFuture[Appended]] = ProducerState()
        self.had_retention_hold = False  # a group has had a hold: cap floors do not follow from the records alone
        self.persists_floors = (
            False  # a floor is made durable before a reader sees it; set before `had_retention_hold`, never unset
        )
        self.delete_count = 0  # deletes so far; the count is the number of the last one
        self.last_assigned_seq = 0  # assigned, maybe not published yet
        self.staged_records = self.staged_bytes = 0  # assigned and not published yet
        self.reservation = SeqReservation(topic_id, self.lock, context.clock, context.limits.head_reserve)
        self.durable_floor = 1  # the evict floor that survives a power cut
        self.pending_floor: CommitFuture[int] | None = None
        self.durable_seq = 0  # records up to here survive a power cut, as far as strong reads made sure
        self.sync_lock = Lock()  # one strong reader syncs for all of them
        self.is_dropped = False
        self.due_ms: int | None = None  # its entry in the maintenance schedule
        self._shard: Shard | None = None
        self.last_write_ms: int | None = None
        self.last_read_ms: int | None = None  # wall clock, shown to users
        self.last_access_ms: int | None = None  # monotonic, for priorities
        self.damage: list[str] = []  # damage that replay found
        self.recovery = RecoveryFindings()
        self.queue_snapshot: QueueSnapshot | None = None  # recovered queue state, until the first use
        self.restored_epoch = 0  # of a topic that was restored from a backup
        self.queue_state: QueueState | None = None  # from the first use on
        self.history_seq = 0  # jobs up to here are in the queue's history, or were written before this process started
        self.upstream: Forwarder | None = None  # routers that write to it
        self.downstream: list[Forwarder] = []  # routers that read from it
        self.applied_router_frame = 0  # number of the last applied router frame
        self.staged_router_frame = 0  # number of the last staged router frame
        self.router_recovery: RouterRecovery | None = None  # replayed router frames, until the routers are linked
        self.hops = HopCounts()
        self.forwarder_snapshot: ForwarderSnapshot | None = None  # for the checkpoint in progress
        self.blobs = BlobTable()  # of its large records
        self.dropped_blobs: list[int] = []  # blobs without a record that a manifest or the WAL may still name
        # Base and generation of segment files that the index no longer uses and a manifest may still name.
        self.dropped_segments: list[tuple[int, int]] = []
        self.unnamed_segments: list[tuple[int, int]] = []  # those of them that the row of the running checkpoint omits
        self.compaction: CompactionProgress | None = None
        self._key_index: KeyIndex | None = None
        self.dropped_objects: list[str] = []  # the same for keys of objects in the cold tier
        self.unnamed_objects: list[str] = []  # those of them that the row of the running checkpoint omits
        self.relocated_segments: list[Segment] = []  # copied to the cold tier, not yet in a manifest
        self.saved_relocations: list[Segment] = []  # those of them in the row that is being saved
        self.wal_watch: WalWatch | None = None  # of a read-only engine, once a read waits
        self._listeners: set[Callable[[], None]] = set()

    @property
    def directory(self) -> str:
        """The directory of its files."""
        return topic_directory(self.context.root, self.id)

    @property
    def shard(self) -> Shard:
        """The WAL shard of its frames. Raises where nothing can be written."""
        if self._shard is None or self.context.closed:
            self._shard = self.context.shard(self.id)
        return self._shard

    @property
    def key_index(self) -> KeyIndex:
        """The index of its keys, created with its first use: most topics have no compaction."""
        with self.lock:
            index = self._key_index = self._key_index or KeyIndex(self)
        return index

    # ── what it is ────────────────────────────────────────────────────────────────────────────

    @property
    def is_ephemeral(self) -> bool:
        return self.config.durability == "ephemeral"

    @property
    def is_durable(self) -> bool:
        return self.config.durability == "fsync"

    @property
    def evicts_oldest(self) -> bool:
        """Whether old records give way to new ones. A topic that rejects loses records only when its caps are
        lowered."""
        return self.config.discard == "old"

    @property
    def must_persist_floor(self) -> bool:
        """Whether a floor must be durable before a reader sees it."""
        return self.config.durability == "disk" or (self.persists_floors and not self.is_ephemeral)

    @property
    def epoch(self) -> int:
        """Changes where seqs may stand for other records than before."""
        return self.restored_epoch or self.id

    def info(self) -> TopicInfo:
        with self.lock:
            index = self.index
            return TopicInfo(
                self.name,
                self.id,
                self.epoch,
                index.head,
                index.earliest,
                index.evict_floor,
                index.count,
                index.bytes,
                self.last_write_ms,
                self.last_read_ms,
                self.priority(),
                self.config,
            )

    def version(self) -> tuple[int, int, int, Watermarks]:
        """Unchanged as long as the topic holds the same records."""
        with self.lock:
            index = self.index
            return self.id, index.head, index.count, index.watermarks

    def priority(self) -> int:
        """The rank of its records when readers compete."""
        idle_ms = None if self.last_access_ms is None else self.context.clock.monotonic_ms() - self.last_access_ms
        return effective_priority(self.config, idle_ms)

    def record_access(self, *, read: bool = True) -> None:
        """Record an access: a read of its records, or (`read=False`) of its state only."""
        self.last_access_ms = self.context.clock.monotonic_ms()
        if read:
            self.last_read_ms = self.context.now_ms()

    def check_open(self) -> None:
        if self.context.closed:
            raise self.context.closed_error("nothing was done")
        if self.is_dropped:
            raise TopicNotFound(self.name)

    def check_writable(self) -> None:
        self.check_open()
        if self.context.closing and not self.name.startswith(OWN):  # internal topics are written until the end of close
            raise Closed(f"{self.context.root} is being closed; nothing was written, open it again")

    def next_timestamp_ms(self) -> int:
        """The timestamp of the next record: now, or that of the last record if the clock went back."""
        return max(self.context.now_ms(), self.index.last_ts)

    def encode_control(self, body: control_frames.Body, *, seq: int = 0, ts_ms: int | None = None) -> bytes:
        """Encode a control frame of this topic; without `ts_ms` with the timestamp of the next record."""
        ts_ms = self.next_timestamp_ms() if ts_ms is None else ts_ms
        return frame.encode(body.KIND, topic_id=self.id, seq=seq, ts_ms=ts_ms, data=control_frames.encode(body))

    # ── publishing, by the committer ──────────────────────────────────────────────────────────

    def publish(
        self,
        first: int,
        frames: list[bytes],
        count: int,
        weight: int,
        ts_ms: int,
        *,
        persistent: bool,
        stats: BatchStats | None = None,
    ) -> None:
        """Make a committed batch visible and apply the caps. Call with the lock held, then `notify_listeners` without
        it."""
        self._after_publish(
            self.index.publish(first, frames, count, weight, ts_ms, persistent=persistent, stats=stats),
            persistent=persistent,
        )

    def publish_stored(self, first: int, pieces: list[WalRange], stats: BatchStats, weight: int, ts_ms: int) -> None:
        """`publish` of a large batch, which readers read from the WAL file."""
        self._after_publish(self.index.publish_stored(first, pieces, stats, weight, ts_ms), persistent=True)

    def _after_publish(self, memtable: MemTable, *, persistent: bool) -> None:
        limits = self.context.limits
        is_full = memtable.stop - memtable.segment >= limits.segment_events_max
        if is_full or memtable.origin + memtable.size >= limits.segment_bytes_max:
            self.index.roll_segment()
            if not persistent:
                self.index.drop_empty_memtables()
        self.last_write_ms = self.context.now_ms()
        if not persistent:
            self.mark_dirty()  # no commit does
        self.enforce_caps()
        if self.due_ms is None:
            self.schedule_maintenance()

    def enforce_caps(self, head: int | None = None) -> None:
        """Evict records above the caps. A topic that rejects exceeds them only after its caps were lowered. `head`:
        apply the caps as if this were the last record, for a replay that holds later ones already."""
        try:
            if self.context.is_replaying and (self.had_retention_hold or self.recovery.is_config_uncertain):
                return  # replayed frames carry the floor
            floor = self.index.floor_for_caps(self.config.cap_records, self.config.cap_bytes, head)
            if floor:
                self.evict(self.limit_by_holds(floor), "cap")
        except (Corrupt, Damaged, Unavailable) as error:
            # Records that cannot be counted cannot be evicted. The write itself succeeded.
            self.add_damage(f"{self.name}: its caps are not applied: {error}")
            self.report_corruption("caps", f"they are not applied: {error}")

    def limit_by_holds(self, floor: int) -> int:
        """Return how far below `floor` eviction may go, given the groups that hold records back."""
        return (
            limit_eviction(self.index, self.groups.values(), floor)
            if self.had_retention_hold and self.evicts_oldest
            else floor
        )

    def evict(self, floor: int, cause: RemovalCause) -> None:
        """Evict the records below `floor`. With the lock held."""
        old_floor = self.index.evict_floor
        evicted = self.index.evict(floor, cause)
        self.quota.release(evicted.bytes)
        if self.index.evict_floor > old_floor:
            self.mark_dirty()
            broken = find_broken_holds(self.groups, old_floor, floor) if self.had_retention_hold else []
            self.context.removals.add_eviction(self, old_floor, cause, evicted, broken)
            if self.must_persist_floor:
                self.context.moved_floors.add(self)

    def add_damage(self, text: str) -> None:
        """Remember what is wrong with its records, the last ten findings."""
        self.damage[:] = [*self.damage, text][-10:]

    def report_corruption(self, where: str, reason: str) -> None:
        """Report stored bytes that do not verify to the health monitor."""
        self.context.health.report_corruption(self.name, self.id, where, reason)

    def roll_if_old(self) -> None:
        """Start a new segment if the active one is older than `segment_age_ms_max`. With the lock held."""
        limit = self.context.limits.segment_age_ms_max
        created_ms = self.index.active_segment_created_ms()
        if limit and created_ms is not None and self.context.now_ms() - created_ms >= limit:
            self.index.roll_segment()
            self.mark_dirty()
            self.context.needs_checkpoint = True

    def schedule_maintenance(self, not_before_ms: int = 0) -> None:
        """Schedule the next expiry or seal, not before `not_before_ms`. With the lock held."""
        if self.is_dropped or not self.context.shards:
            return
        limit, ttl_ms, due = self.context.limits.segment_age_ms_max, self.config.ttl_ms, list[int]()
        if limit and (created_ms := self.index.active_segment_created_ms()) is not None:
            due.append(created_ms + limit)
        if ttl_ms and (oldest_ms := self.index.oldest_record_ms()) is not None:
            due.append(oldest_ms + ttl_ms + 1)
        if due:
            self.context.schedule.schedule(self, max(min(due), not_before_ms))

    # ── waiting ───────────────────────────────────────────────────────────────────────────────

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every publish, after a drop and after close, on the thread that did it."""
        with self.lock:
            self._listeners.add(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        with suppress(Forked), self.lock:  # in a forked child there are no notifications
            self._listeners.discard(wake)

    def on_fork(self, pid: int) -> None:
        """Close the topic in a forked child: every lock of the topic raises Forked."""
        state = self.queue_state
        queue_parts = () if state is None else (state, state.history, state.claim_window)
        parts = (self._key_index, *queue_parts, *self.downstream, self.upstream, *self.group_leases.values())
        process.poison_locks(self.context.root, pid, self, *parts)

    def notify_listeners(self) -> None:
        if self._listeners:
            with self.lock:
                listeners = list(self._listeners)
            self.context.notify(self.name, listeners)

    def submit(self, commit: Commit) -> None:
        """Queue a commit of frames of this topic."""
        commit.on_applied = self.mark_dirty
        self.shard.submit(commit)

    def mark_dirty(self) -> None:
        """Make the next checkpoint write the topic's row. Called after a change: a checkpoint takes the set of dirty
        topics first and looks at them then, so it has the change, or the topic is dirty again."""
        self.context.dirty_topics.add(self)
