"""[shell] One topic inside the engine: its index, the lock that guards it, and who waits for its records.

A write is staged under the lock (seqs, frames, its place in the shard's queue) and published by the
committer when the WAL has it. Between the two it is counted but not visible. Nobody waits for a
commit while holding the lock: the committer needs it to publish.

[policy] Which topics have something due: records to expire, a segment to seal by its age.

    publish, configure, a move of a group ──► heap of (due_ms, topic) ──► Engine's keeping thread, when it is due

A topic has at most one entry that counts, the earliest; others are passed over when they come up. So a pass costs what
is due, not how many topics there are, and a publish pays for one comparison while its topic has an entry.

[policy] One number that all topics share, and the cap on it.

    take   before a write: counted when there is room, refused as a whole when there is not
    hold   counted without asking: what a restart finds is there already, whatever the cap now says
    give   after a delete, an eviction, a drop, or a write that failed

Asking and counting are one step under one lock, so writers that race for the last byte cannot both
have it. After a restart under a smaller cap more may be in use than is allowed; then every take is
refused until enough has been given back.

[shell] Memory for large writes on their way to the WAL: used again, because fresh memory costs more than filling it.

    take ──► a write lays its frames ──► the WAL has them ──► give ──► take …

What is true when a call returns: after `take` the memory is the caller's alone; after `give` nobody may look at it
through whatever views of it there were. What is not given back is simply gone.

[policy] How urgent a topic is: what its config says, or how lately somebody read it.

500 ┤█
    │ █▄            round(500 · 2^(−idle / 30 s)), and 0 after five minutes
250 ┤   ▀▄▄
    │       ▀▀▀▄▄▄▄▄▄▄
  0 ┼───────────────────────────────
    0    30   60   90   120 s since it was last read

What a queue needs of the engine it is in: other topics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp2
from threading import Lock
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.interface import Disk, join
from tidelog.engine.config import OWN, EngineConfig, TopicConfig
from tidelog.engine.health import BACKGROUND_TASKS, HealthMonitor
from tidelog.engine.idempotency import IdempotencyWindow, ProducerBatches
from tidelog.engine.memtable import BatchStats, MemTable
from tidelog.engine.pending_removals import PendingRemovals, RemovalCause
from tidelog.engine.results import Appended, TopicInfo
from tidelog.engine.routing.router import HopCounts
from tidelog.engine.segment import MmapCache, SegmentFiles
from tidelog.engine.tag_search import TagCache
from tidelog.engine.topic_index import TopicIndex
from tidelog.engine.watermarks import GroupCursorState, Watermarks, find_broken_holds, limit_eviction
from tidelog.errors import Closed, Corrupt, Damaged, Forked, ReadOnly, Throttled, TopicNotFound, Unavailable
from tidelog.wal import CommitFuture, Shard, WalRange, shard_for_topic
from tidelog.wal.writer import DiskReserve

if TYPE_CHECKING:
    from tidelog.engine.append import PendingReservation
    from tidelog.engine.batch_encoder import ArrowBatch, Batch
    from tidelog.engine.gap_log import GapLog
    from tidelog.engine.queues.history import HistoryWriter
    from tidelog.engine.queues.leases import QueueSnapshot
    from tidelog.engine.queues.queue_state import QueueState
    from tidelog.engine.read import WalWatch
    from tidelog.engine.routing.forwarder import Forwarder
    from tidelog.engine.routing.recovery import ForwarderSnapshot, RouterRecovery
    from tidelog.engine.topic import Topic
    from tidelog.wal import Commit

MAINTENANCE_STEP_MS: Final = 1_000  # a topic is looked at no more often: each look may cost a sync
MAINTENANCE_RETRY_MS: Final = 10_000  # where a group holds records back, or a look failed


class MaintenanceSchedule:
    """Safe to call from any thread. `plan` with the topic's lock held."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._heap: list[tuple[int, int, TopicState]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, topic: TopicState, due_ms: int | None) -> None:
        """Have a topic looked at then, or earlier where that was planned before; None: there is nothing to plan."""
        if due_ms is None or (topic.due_ms is not None and topic.due_ms <= due_ms):
            return
        topic.due_ms = due_ms
        with self._guard:
            heappush(self._heap, (due_ms, topic.id, topic))

    def take_due(self, now_ms: int, count_max: int) -> list[TopicState]:
        """The topics that are due, each once; they have no entry any more."""
        found: list[TopicState] = []
        with self._guard:
            while self._heap and self._heap[0][0] <= now_ms and len(found) < count_max:
                due_ms, _, core = heappop(self._heap)
                if core.due_ms == due_ms:  # else it was planned earlier, and looked at
                    core.due_ms = None
                    found.append(core)
        return found


class Quota:
    """How much of `cap` is in use; a cap of 0 is none. Safe to call from any thread."""

    def __init__(self, cap: int, *, limit: str = "total_bytes") -> None:
        self._cap, self._limit = cap, limit
        self._used = 0
        self._guard = Lock()

    @property
    def used(self) -> int:
        return self._used

    @property
    def available(self) -> int | None:
        """What a take may ask for; None: there is no cap."""
        return max(self._cap - self._used, 0) if self._cap else None

    def acquire(self, amount: int) -> None:
        """Count this much more, or raise Throttled and count nothing."""
        assert amount >= 0, "use give"
        with self._guard:
            if self._cap and self._used + amount > self._cap:
                raise Throttled(self._limit, max=self._cap, used=self._used, asked=amount)
            self._used += amount

    def acquire_unchecked(self, amount: int) -> None:
        """Count this much more, cap or no cap."""
        assert amount >= 0, "use give"
        with self._guard:
            self._used += amount

    def release(self, amount: int) -> None:
        """Count this much less."""
        assert amount >= 0, "use take"
        with self._guard:
            assert amount <= self._used, f"{amount} of {self._limit} given back, only {self._used} were taken"
            self._used -= amount


_BUFFER_STEP_BYTES: Final = 1 << 18
_POOL_BYTES_MAX: Final = 8 << 20


class BufferPool:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[bytearray] = []
        self._pooled_bytes = 0

    def acquire(self, size: int) -> bytearray:
        """Memory of at least this size, with anything in it."""
        with self._lock:
            if self._free:
                found = self._free.pop()  # the one that was used last: what is in the processor's cache
                self._pooled_bytes -= len(found)
                if len(found) >= size:
                    return found
        return bytearray(-(-size // _BUFFER_STEP_BYTES) * _BUFFER_STEP_BYTES)

    def release(self, memory: bytearray) -> None:
        """Nobody needs it any more."""
        with self._lock:
            if self._pooled_bytes + len(memory) <= _POOL_BYTES_MAX:
                self._free.append(memory)
                self._pooled_bytes += len(memory)


RECENCY_PRIORITY_MAX: Final = 500
RECENCY_HALF_LIFE_MS: Final = 30_000
RECENCY_FORGOTTEN_MS: Final = 300_000
_PRIORITY_BOUND: Final = 1_000


def effective_priority(config: TopicConfig, idle_ms: int | None) -> int:
    """`idle_ms`: how long nobody has read it; None: nobody ever did since the start."""
    if config.priority is not None:
        return max(-_PRIORITY_BOUND, min(config.priority, _PRIORITY_BOUND))
    if not config.auto_priority or idle_ms is None or idle_ms >= RECENCY_FORGOTTEN_MS:
        return 0
    return round(RECENCY_PRIORITY_MAX * exp2(-idle_ms / RECENCY_HALF_LIFE_MS))


_log = logging.getLogger("tidelog.engine")
TOPICS_DIR = "topics"
WAL_DIR = "wal"


@dataclass(slots=True)
class EngineContext:
    """What all topics of an engine have in common."""

    disk: Disk
    clock: Clock
    root: str
    limits: EngineConfig
    quota: Quota
    tag_cache: TagCache
    mmap_cache: MmapCache
    shards: list[Shard]  # none: opened for reading
    closing: bool = False  # no new writes
    closed: bool = False
    listener_failures: int = 0  # how often a listener raised
    opener_pid: int | None = None  # in a forked child: the process that opened it
    needs_checkpoint: bool = False  # a segment was completed, or copies were made, that no checkpoint has seen
    topics: TopicRegistry | None = None  # the engine, for those of its parts that need other topics
    dirty_histories: set[HistoryWriter] = field(default_factory=set)  # those with something to write down
    queue_topics: set[TopicState] = field(default_factory=set)  # topics of type queue
    buffer_pool: BufferPool = field(default_factory=BufferPool)
    strong_topics: set[TopicState] = field(default_factory=set)  # topics with strong readers
    wal_files_synced: bool = False  # a reader beside the writer has synced the WAL for its strong readers
    moved_floors: set[TopicState] = field(
        default_factory=set
    )  # topics whose floor the next interval sync makes durable
    reload_topics: Callable[[], dict[str, TopicState]] | None = None  # of a reader: the topics as they are on disk now
    is_replaying: bool = False  # frames are being applied: what they say is not yet all
    schedule: MaintenanceSchedule = field(default_factory=MaintenanceSchedule)
    disk_reserve: DiskReserve = field(init=False)
    removals: PendingRemovals = field(init=False)
    health: HealthMonitor = field(init=False)
    gap_log: GapLog = field(init=False)  # once it is an engine

    def __post_init__(self) -> None:
        self.removals = PendingRemovals(wanted=self.limits.ledger_records > 0)
        self.health = HealthMonitor(self.root, self.now_ms, BACKGROUND_TASKS)
        self.disk_reserve = DiskReserve(self.disk, join(self.root, WAL_DIR))

    def closed_error(self, undone: str) -> Closed | Forked:
        """The error for a use after `closed` was set: by a close, or in a forked child."""
        if self.opener_pid is not None:
            return Forked(self.root, pid=self.opener_pid)
        return Closed(f"{self.root} was closed; {undone}, open it again")

    def notify(self, topic: str, listeners: Iterable[Callable[[], None]]) -> None:
        """Call the listeners of a topic. What one raises is logged and counted, and is no concern of the write that it
        is told of, nor of the other listeners."""
        for listener in listeners:
            try:
                listener()
            except BaseException:
                self.listener_failures += 1
                _log.exception("a listener of topic %r raised; the write it was told of is done", topic)

    def now_ms(self) -> int:
        return self.clock.now_us() // 1000

    def segment_files(self, topic_id: int) -> SegmentFiles:
        return SegmentFiles(self.disk, topic_directory(self.root, topic_id), topic_id, self.mmap_cache)

    def shard(self, topic_id: int) -> Shard:
        if self.closed:
            raise self.closed_error("nothing was written")
        if not self.shards:
            raise ReadOnly(f"{self.root} was opened for reading; nothing was written")
        return self.shards[shard_for_topic(topic_id, len(self.shards))]


def topic_directory(root: str, topic_id: int) -> str:
    return join(join(root, TOPICS_DIR), f"{topic_id:08X}")


class TopicState:
    def __init__(self, context: EngineContext, topic_id: int, name: str, config: TopicConfig) -> None:
        self.context, self.id, self.name, self.config = context, topic_id, name, config
        self.lock = Lock()
        self.index = TopicIndex()
        self.quota = Quota(0) if name.startswith(OWN) else context.quota  # what is the engine's own costs nobody
        self.groups: dict[str, GroupCursorState] = {}
        self.pending_cursor_commits: dict[str, CommitFuture[None]] = {}  # cursors on their way to the WAL
        self.producer_batches: ProducerBatches = {}  # batches by writer and number
        self.pending_producer_batches: dict[str, CommitFuture[Appended]] = {}  # and those on their way to the WAL
        self.had_retention_hold = (
            False  # a group of it has had a hold: its cap floors do not follow from its records alone
        )
        self.persists_floors = (
            False  # floors that are shown are made durable first; set before `guarded`, and never unset
        )
        self.delete_count = 0  # deletes so far: each has a number
        self.last_assigned_seq = 0  # the last seq that was assigned
        self.staged_records = self.staged_bytes = 0  # assigned and not published yet
        self.reserved_seq = 0  # disk class: seqs up to here are known, durably, to be taken
        self.reserving_seq = 0  # as `reserved`, with what the commit that is being written adds
        self.reserved_ms, self.reservation_size = 0, 0
        self.pending_reservation: PendingReservation | None = None  # those behind them, once the disk has the mark
        self.durable_floor = 1  # the evict floor that a power cut cannot take back
        self.pending_floor: CommitFuture[int] | None = None
        self.durable_seq = 0  # records up to here survive a power cut, as far as a strong reader asked
        self.sync_lock = Lock()  # one strong reader syncs for all
        self.idempotency_window: IdempotencyWindow[CommitFuture[Appended], Appended] = IdempotencyWindow()
        self.is_dropped = False
        self.due_ms: int | None = None  # when the agenda has it looked at
        self._shard: Shard | None = None
        self.last_write_ms: int | None = None
        self.last_read_ms: int | None = None  # wall time, for people
        self.last_access_ms: int | None = None  # monotonic, for priorities
        self.damage: list[str] = []  # what replay found about it
        self.lost_ranges: list[tuple[int, int]] = []  # seqs, both ends, of records that were lost with damaged frames
        self.is_config_uncertain = (
            False  # a change of its settings may be lost: replay evicts nothing on account of its caps
        )
        self.replayed_watermarks = Watermarks()  # the highest that replay was told of
        self.head_at_open: int | None = None  # its head when it was opened; None: it was made since
        self.queue_snapshot: QueueSnapshot | None = None  # what was found of a queue, until its first use
        self.queue_state: QueueState | None = None  # from then on
        self.history_seq = 0  # jobs up to here are in the history of their queue, or were another process's to tell
        self.upstream: Forwarder | None = None  # what routers bring to it
        self.downstream: list[Forwarder] = []  # what routers take from it
        self.applied_router_frame = 0  # the number of the last router frame that was applied
        self.staged_router_frame = 0  # and of the last one that was staged
        self.router_recovery: RouterRecovery | None = None  # what replay found of its routers, until they are linked
        self.hops = HopCounts()
        self.forwarder_snapshot: ForwarderSnapshot | None = None  # for the checkpoint that is being made
        self.dropped_segments: list[int] = []  # segments that the index has forgotten and a manifest may still name
        self.wal_watch: WalWatch | None = None  # of a reader beside a writer, once it waits
        self._listeners: set[Callable[[], None]] = set()

    @property
    def shard(self) -> Shard:
        """Where its frames go. Raises where nothing can be written."""
        if self._shard is None or self.context.closed:
            self._shard = self.context.shard(self.id)
        return self._shard

    # ── what it is ────────────────────────────────────────────────────────────────────────────

    @property
    def is_ephemeral(self) -> bool:
        return self.config.durability == "ephemeral"

    @property
    def is_durable(self) -> bool:
        return self.config.durability == "fsync"

    @property
    def evicts_oldest(self) -> bool:
        """Whether the old gives way to the new. One that rejects loses records only when its caps are lowered."""
        return self.config.discard == "old"

    @property
    def must_persist_floor(self) -> bool:
        """Whether a floor has to be made durable before a reader is told of it."""
        return self.config.durability == "disk" or (self.persists_floors and not self.is_ephemeral)

    @property
    def reserved_ceiling(self) -> int:
        """Seqs up to here may be taken for given out by whoever replays what was written."""
        booked = self.pending_reservation
        return max(self.reserved_seq, self.reserving_seq, 0 if booked is None else booked.ceiling)

    def info(self) -> TopicInfo:
        with self.lock:
            index = self.index
            return TopicInfo(
                self.name,
                self.id,
                self.id,
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
        """While this stands still the same records are there."""
        with self.lock:
            index = self.index
            return self.id, index.head, index.count, index.watermarks

    def priority(self) -> int:
        """How urgent it is to tell of its records."""
        idle_ms = None if self.last_access_ms is None else self.context.clock.monotonic_ms() - self.last_access_ms
        return effective_priority(self.config, idle_ms)

    def record_access(self, *, read: bool = True) -> None:
        """Somebody looked: as a reader of its records, or only at what it is."""
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
        if self.context.closing and not self.name.startswith(OWN):  # its own it keeps to the last moment
            raise Closed(f"{self.context.root} is being closed; nothing was written, open it again")

    def next_timestamp_ms(self) -> int:
        """The time for the next record: now, or the last record's when the clock went back."""
        return max(self.context.now_ms(), self.index.last_ts)

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
        """Make a committed batch visible and keep the caps. With the lock held; `wake` follows without it."""
        self._after_publish(
            self.index.publish(first, frames, count, weight, ts_ms, persistent=persistent, stats=stats),
            persistent=persistent,
        )

    def publish_stored(self, first: int, pieces: list[WalRange], stats: BatchStats, weight: int, ts_ms: int) -> None:
        """`publish` of a large batch, which is read where the WAL has it."""
        self._after_publish(self.index.publish_stored(first, pieces, stats, weight, ts_ms), persistent=True)

    def _after_publish(self, block: MemTable, *, persistent: bool) -> None:
        limits = self.context.limits
        full = block.stop - block.segment >= limits.segment_events_max
        if full or block.origin + block.size >= limits.segment_bytes_max:
            self.index.roll_segment()
            if not persistent:
                self.index.drop_empty_memtables()
        self.last_write_ms = self.context.now_ms()
        self.enforce_caps()
        if self.due_ms is None:
            self.schedule_maintenance()

    def enforce_caps(self, head: int | None = None) -> None:
        """Evict what is over the caps. A topic that rejects is only over them when its caps were lowered. `head`: as if
        this were the last record, for a replay that has later ones already."""
        try:
            if self.context.is_replaying and (self.had_retention_hold or self.is_config_uncertain):
                return  # frames say how far that went, or nothing does
            floor = self.index.floor_for_caps(self.config.cap_records, self.config.cap_bytes, head)
            if floor:
                self.evict(self.limit_by_holds(floor), "cap")
        except (Corrupt, Damaged, Unavailable) as error:
            # Records that cannot be counted cannot be evicted either; the write itself is good.
            self.damage[:] = [*self.damage, f"{self.name}: its caps are not kept: {error}"][-10:]
            self.report_corruption("caps", f"they are not kept: {error}")

    def limit_by_holds(self, floor: int) -> int:
        """How far of what caps or age ask for eviction may go, for the groups that hold it up."""
        return (
            limit_eviction(self.index, self.groups.values(), floor)
            if self.had_retention_hold and self.evicts_oldest
            else floor
        )

    def evict(self, floor: int, cause: RemovalCause) -> None:
        """Records below `floor` are lost. With the lock held."""
        before = self.index.evict_floor
        gone = self.index.evict(floor, cause)
        self.quota.release(gone.bytes)
        if self.index.evict_floor > before:
            broken = find_broken_holds(self.groups, before, floor) if self.had_retention_hold else []
            self.context.removals.add_eviction(self, before, cause, gone, broken)
            if self.must_persist_floor:
                self.context.moved_floors.add(self)

    def report_corruption(self, where: str, reason: str) -> None:
        """Stored bytes of it do not verify."""
        self.context.health.report_corruption(self.name, self.id, where, reason)

    def roll_if_old(self) -> None:
        """Seal what has been open for long. With the lock held."""
        limit = self.context.limits.segment_age_ms_max
        born_ms = self.index.active_segment_created_ms()
        if limit and born_ms is not None and self.context.now_ms() - born_ms >= limit:
            self.index.roll_segment()
            self.context.needs_checkpoint = True

    def schedule_maintenance(self, not_before_ms: int = 0) -> None:
        """Put down when records expire or its segment is to be sealed, not before `least_ms`. With the lock held."""
        if self.is_dropped or not self.context.shards:
            return
        limit, ttl_ms, due = self.context.limits.segment_age_ms_max, self.config.ttl_ms, list[int]()
        if limit and (born_ms := self.index.active_segment_created_ms()) is not None:
            due.append(born_ms + limit)
        if ttl_ms and (oldest_ms := self.index.oldest_record_ms()) is not None:
            due.append(oldest_ms + ttl_ms + 1)
        if due:
            self.context.schedule.schedule(self, max(min(due), not_before_ms))

    # ── waiting ───────────────────────────────────────────────────────────────────────────────

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every publish, delete of the topic and close, from whichever thread did it."""
        with self.lock:
            self._listeners.add(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        with suppress(Forked), self.lock:  # in a forked child nothing is told of anyway
            self._listeners.discard(wake)

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: every lock of the topic raises Forked."""
        state = self.queue_state
        beside = () if state is None else (state, state.history, state.claim_window)
        fork.poison_locks(self.context.root, pid, self, *beside, *self.downstream, self.upstream)

    def notify_listeners(self) -> None:
        if self._listeners:
            with self.lock:
                waiters = list(self._listeners)
            self.context.notify(self.name, waiters)

    def submit(self, commit: Commit) -> None:
        self.shard.submit(commit)


HISTORY_TOPIC_PREFIX = "_tidelog.history."  # and the name of the queue


class TopicRegistry(Protocol):
    def ensure_topic(self, name: str, config: TopicConfig, first: Batch | ArrowBatch) -> tuple[Topic, bool]:
        """The topic of this name, made where there is none, for this write."""
        ...

    def find(self, name: str) -> Topic | None: ...

    def internal_topic(self, name: str, **config: object) -> Topic:
        """A topic of the engine's own, made where there is none."""
        ...

    def drop_internal_topic(self, name: str) -> None:
        """Drop a topic of the engine's own, if it is there."""
        ...
