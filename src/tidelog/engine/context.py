"""What all topics of an engine share: disk, clock, limits, quota, caches, WAL shards, maintenance schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import Lock
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.clock import Clock
from tidelog.disk.interface import Disk, join
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.health import BACKGROUND_TASKS, HealthMonitor
from tidelog.engine.pending_removals import PendingRemovals
from tidelog.engine.segment import MmapCache, SegmentFiles
from tidelog.engine.tag_search import TagCache
from tidelog.errors import Closed, Forked, ReadOnly, Throttled
from tidelog.wal import Shard, shard_for_topic
from tidelog.wal.writer import DiskReserve

if TYPE_CHECKING:
    from tidelog.engine.batch_encoder import ArrowBatch, Batch
    from tidelog.engine.gap_log import GapLog
    from tidelog.engine.queues.history import HistoryWriter
    from tidelog.engine.topic_state import TopicState

_log = logging.getLogger("tidelog.engine")
TOPICS_DIR = "topics"
WAL_DIR = "wal"
HISTORY_TOPIC_PREFIX = "_tidelog.history."  # and the name of the queue
MAINTENANCE_STEP_MS: Final = 1_000  # between two maintenance runs of a topic: each may cost a sync
MAINTENANCE_RETRY_MS: Final = 10_000  # after a failure, or while a group holds records back


class MaintenanceSchedule:
    """Heap of (due_ms, topic): topics with records to expire or a segment to seal by age.

    A topic has at most one valid entry, the earliest; stale entries are skipped when they come up. So a pass costs what
    is due, not the number of topics, and a publish costs one comparison while its topic has an entry. Thread-safe. Call
    `schedule` with the topic's lock held.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._heap: list[tuple[int, int, TopicState]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, topic: TopicState, due_ms: int | None) -> None:
        """Schedule a topic for `due_ms`, unless an earlier time is scheduled already. None: nothing to schedule."""
        if due_ms is None or (topic.due_ms is not None and topic.due_ms <= due_ms):
            return
        topic.due_ms = due_ms
        with self._guard:
            heappush(self._heap, (due_ms, topic.id, topic))

    def take_due(self, now_ms: int, count_max: int) -> list[TopicState]:
        """Remove and return the topics that are due, each once."""
        due: list[TopicState] = []
        with self._guard:
            while self._heap and self._heap[0][0] <= now_ms and len(due) < count_max:
                due_ms, _, topic = heappop(self._heap)
                if topic.due_ms == due_ms:  # else the entry is stale: an earlier one was taken
                    topic.due_ms = None
                    due.append(topic)
        return due


class Quota:
    """One counter that all topics share, and its cap; a cap of 0 means no cap. Thread-safe.

    Check and count are one step under one lock, so two writers cannot both take the last byte. After a restart under a
    smaller cap more may be in use than is allowed; every `acquire` is then refused until enough is released.
    """

    def __init__(self, cap: int, *, limit: str = "total_bytes") -> None:
        self._cap, self._limit = cap, limit
        self._used = 0
        self._guard = Lock()

    @property
    def used(self) -> int:
        return self._used

    @property
    def available(self) -> int | None:
        """How much `acquire` may take; None: no cap."""
        return max(self._cap - self._used, 0) if self._cap else None

    def acquire(self, amount: int) -> None:
        """Add `amount`, or raise Throttled and add nothing."""
        assert amount >= 0, "use release"
        with self._guard:
            if self._cap and self._used + amount > self._cap:
                raise Throttled(self._limit, max=self._cap, used=self._used, asked=amount)
            self._used += amount

    def acquire_unchecked(self, amount: int) -> None:
        """Add `amount` even above the cap: records found by a restart exist already."""
        assert amount >= 0, "use release"
        with self._guard:
            self._used += amount

    def release(self, amount: int) -> None:
        """Subtract `amount`."""
        assert amount >= 0, "use acquire"
        with self._guard:
            assert amount <= self._used, f"{amount} of {self._limit} released, only {self._used} in use"
            self._used -= amount


_BUFFER_STEP_BYTES: Final = 1 << 18
_POOL_BYTES_MAX: Final = 8 << 20


class BufferPool:
    """Reused memory for large writes on their way to the WAL: fresh memory costs more than filling it. Thread-safe.

    After `acquire` the buffer belongs to the caller alone; after `release` no view of it may be used. A buffer that is
    not released is garbage-collected.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[bytearray] = []
        self._pooled_bytes = 0

    def acquire(self, size: int) -> bytearray:
        """Return a buffer of at least this size with arbitrary content."""
        with self._lock:
            if self._free:
                buffer = self._free.pop()  # last in, first out: it is still in the processor's cache
                self._pooled_bytes -= len(buffer)
                if len(buffer) >= size:
                    return buffer
        return bytearray(-(-size // _BUFFER_STEP_BYTES) * _BUFFER_STEP_BYTES)

    def release(self, memory: bytearray) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            if self._pooled_bytes + len(memory) <= _POOL_BYTES_MAX:
                self._free.append(memory)
                self._pooled_bytes += len(memory)


class TopicRegistry(Protocol):
    """What queues, routers and the gap log need of the engine: other topics."""

    def ensure_topic(self, name: str, config: TopicConfig, first: Batch | ArrowBatch) -> tuple[TopicState, bool]:
        """Return the topic and whether it was created for this write."""
        ...

    def find_topic(self, name: str) -> TopicState | None: ...

    def internal_topic(self, name: str, **config: object) -> TopicState:
        """Return an internal topic, created if it does not exist."""
        ...

    def drop_internal_topic(self, name: str) -> None:
        """Drop an internal topic, if it exists."""
        ...


@dataclass(slots=True)
class EngineContext:
    """What all topics of an engine share."""

    disk: Disk
    clock: Clock
    root: str
    limits: EngineConfig
    quota: Quota
    tag_cache: TagCache
    mmap_cache: MmapCache
    shards: list[Shard]  # empty: opened read-only
    closing: bool = False  # no new writes
    closed: bool = False
    listener_failures: int = 0  # listener calls that raised
    opener_pid: int | None = None  # in a forked child: the process that opened the engine
    needs_checkpoint: bool = False  # a segment was completed or copies were made since the last checkpoint
    topics: TopicRegistry | None = None  # the engine, for queues and routers that need other topics
    dirty_histories: set[HistoryWriter] = field(default_factory=set)  # with steps that are not written yet
    queue_topics: set[TopicState] = field(default_factory=set)  # topics of type queue
    buffer_pool: BufferPool = field(default_factory=BufferPool)
    strong_topics: set[TopicState] = field(default_factory=set)  # topics with strong readers
    wal_files_synced: bool = False  # a read-only engine has synced the WAL for its strong readers
    moved_floors: set[TopicState] = field(
        default_factory=set
    )  # topics whose floor the next interval sync makes durable
    reload_topics: Callable[[], dict[str, TopicState]] | None = (
        None  # of a read-only engine: load the topics from disk again
    )
    is_replaying: bool = False  # WAL frames are being applied; the state is incomplete
    schedule: MaintenanceSchedule = field(default_factory=MaintenanceSchedule)
    disk_reserve: DiskReserve = field(init=False)
    removals: PendingRemovals = field(init=False)
    health: HealthMonitor = field(init=False)
    gap_log: GapLog = field(init=False)  # set by the engine

    def __post_init__(self) -> None:
        self.removals = PendingRemovals(enabled=self.limits.ledger_records > 0)
        self.health = HealthMonitor(self.root, self.now_ms, BACKGROUND_TASKS)
        self.disk_reserve = DiskReserve(self.disk, join(self.root, WAL_DIR))

    def closed_error(self, undone: str) -> Closed | Forked:
        """The error for a use after `closed` was set: by a close, or in a forked child."""
        if self.opener_pid is not None:
            return Forked(self.root, pid=self.opener_pid)
        return Closed(f"{self.root} was closed; {undone}, open it again")

    def notify(self, topic: str, listeners: Iterable[Callable[[], None]]) -> None:
        """Call the listeners of a topic. An exception is logged and counted; it affects neither the write nor other
        listeners."""
        for listener in listeners:
            try:
                listener()
            except BaseException:
                self.listener_failures += 1
                _log.exception("a listener of topic %r raised; the write is committed", topic)

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
