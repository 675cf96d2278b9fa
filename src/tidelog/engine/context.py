"""What all topics of an engine share: disk, clock, limits, quota, caches, WAL shards, maintenance schedule, and the
removals that the gap log has not written yet.

    floor moves, delete, drop ──► Removal ──► merged with the one before ──► taken by the gap log, written as rows

Removals are added where they happen, under the topic's lock. A full cap evicts a few records with every write: adjacent
ranges of one topic with the same cause are merged. While a directory is being opened nothing is merged, because
removals that the gap log has already are dropped again (`gap_log.drop_known_removals`). The lock of `PendingRemovals`
is the last one taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from tidelog.clock import Clock
from tidelog.disk.interface import Disk, join
from tidelog.engine.blobs import BlobIds
from tidelog.engine.cold_reader import ColdReader
from tidelog.engine.config import OWN, EngineConfig, TopicConfig
from tidelog.engine.health import BACKGROUND_TASKS, HealthMonitor
from tidelog.engine.key_index import KeyTables
from tidelog.engine.segment import MmapCache, SegmentFiles, SizeCount
from tidelog.engine.snapshot import FilePins
from tidelog.engine.tag_search import TagCache
from tidelog.errors import Closed, Forked, ReadOnly, Throttled
from tidelog.wal import Shard, shard_for_topic
from tidelog.wal.writer import DiskReserve

if TYPE_CHECKING:
    from tidelog.engine.batch_encoder import ArrowBatch, Batch
    from tidelog.engine.erase import EraseLocation
    from tidelog.engine.gap_log import GapLog
    from tidelog.engine.queues.history import HistoryWriter
    from tidelog.engine.rewrite import Rewriter
    from tidelog.engine.topic_state import TopicState
    from tidelog.engine.topic_table import TopicTable

_log = logging.getLogger("tidelog.engine")
TOPICS_DIR = "topics"
WAL_DIR = "wal"
HISTORY_TOPIC_PREFIX = "_tidelog.history."  # and the name of the queue
MAINTENANCE_STEP_MS: Final = 1_000  # between two maintenance runs of a topic: each may cost a sync
MAINTENANCE_RETRY_MS: Final = 10_000  # after a failure, or while a group holds records back
RemovalCause: TypeAlias = Literal[
    "cap", "ttl", "hold_exceeded", "delete", "compaction", "drop", "source_trim", "lost", "erase"
]
EVICTION_CAUSES: Final = frozenset(("cap", "ttl", "hold_exceeded"))
_MERGED_CAUSES: Final = frozenset((*EVICTION_CAUSES, "source_trim"))
_PENDING_MAX: Final = 100_000  # above it, ranges are merged per topic and cause


@dataclass(slots=True)
class Removal:
    """One removal: seqs first to last, some of which may have been removed before."""

    topic_state: TopicState | None  # None: unknown topic, or dropped before replay
    topic: str
    topic_id: int
    cause: RemovalCause
    first: int
    last: int
    records: int
    bytes: int
    ts_ms: int
    actor: str | None = None
    number: int = 0  # the number of the delete
    about: str = ""  # the groups whose holds broke; what was damaged


class PendingRemovals:
    """Thread-safe, also with a topic's lock held."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled  # False: there is no gap log
        self._guard = Lock()
        self._pending: list[Removal] = []
        self._last: dict[int, Removal] = {}
        self.is_recovering = False
        self.broken_holds = 0  # holds, since the directory was opened

    def __len__(self) -> int:
        return len(self._pending)

    def add_eviction(
        self, topic: TopicState, before: int, cause: RemovalCause, evicted: SizeCount, broken: list[str]
    ) -> None:
        """Add the records between the old evict floor `before` and the current one."""
        if broken:
            self.broken_holds += 0 if self.is_recovering else len(broken)
            cause = "hold_exceeded"
        self.add(topic, cause, before, topic.index.evict_floor - 1, evicted, actor="retention", about=", ".join(broken))

    def add(
        self,
        topic: TopicState,
        cause: RemovalCause,
        first: int,
        last: int,
        removed: SizeCount,
        *,
        actor: str | None,
        ts_ms: int | None = None,
        number: int = 0,
        about: str = "",
    ) -> None:
        if not self._enabled or topic.name.startswith(OWN):
            return
        if ts_ms is None:  # during replay the last record's time is the best estimate
            ts_ms = topic.index.last_ts if self.is_recovering else topic.context.now_ms()
        removal = Removal(topic, topic.name, topic.id, cause, first, last, *removed, ts_ms, actor, number, about)
        with self._guard:
            self._append(removal)

    def add_removal(self, removal: Removal) -> None:
        """Add a removal of a dropped or unknown topic."""
        if self._enabled and not removal.topic.startswith(OWN):
            with self._guard:
                self._append(removal)

    def _append(self, removal: Removal) -> None:
        last = self._last.get(removal.topic_id)
        if last is not None and not self.is_recovering and _is_adjacent(last, removal):
            last.last, last.ts_ms = removal.last, removal.ts_ms
            last.records, last.bytes = last.records + removal.records, last.bytes + removal.bytes
            return
        self._pending.append(removal)
        self._last[removal.topic_id] = removal
        if len(self._pending) > _PENDING_MAX:
            self._pending = _compact(self._pending)
            self._last.clear()

    def take_all(self) -> list[Removal]:
        """Take all removals, in order; the caller has to write them."""
        with self._guard:
            taken, self._pending = self._pending, []
            self._last.clear()
            return taken

    def put_back(self, removals: list[Removal]) -> None:
        """Put removals that could not be written back before newer ones."""
        with self._guard:
            self._pending[:0] = removals

    def snapshot(self) -> list[Removal]:
        """Return copies of the pending removals."""
        with self._guard:
            return [replace(removal) for removal in self._pending]


def _is_adjacent(last: Removal, removal: Removal) -> bool:
    same = last.cause == removal.cause and last.about == removal.about == ""
    return same and removal.cause in _MERGED_CAUSES and last.last + 1 == removal.first


def _compact(removals: list[Removal]) -> list[Removal]:
    """Merge to one removal per topic and cause whose range covers all. Numbers of deletes are lost, so after a crash
    one may be written twice."""
    merged: dict[tuple[int, RemovalCause], Removal] = {}
    for removal in removals:
        total = merged.setdefault((removal.topic_id, removal.cause), removal)
        if total is not removal:
            total.first, total.last = min(total.first, removal.first), max(total.last, removal.last)
            total.records, total.bytes = total.records + removal.records, total.bytes + removal.bytes
            total.ts_ms, total.number = removal.ts_ms, max(total.number, removal.number)
    return list(merged.values())


class MaintenanceSchedule:
    """Heap of (due_ms, topic): topics with records to expire or a segment to seal by age.

    A topic has at most one valid entry, the earliest; stale entries are skipped when they come up. So a pass costs what
    is due, not the number of topics, and a publish costs one comparison while its topic has an entry. Thread-safe. Call
    `schedule` with the topic's lock held.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._heap: list[tuple[int, int, bool, TopicState | str]] = []  # false and a name: the topic is not loaded
        self.load_topic: Callable[[str], TopicState | None] = lambda _: None  # loads a topic and schedules it

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, topic: TopicState, due_ms: int | None) -> None:
        """Schedule a topic for `due_ms`, unless an earlier time is scheduled already. None: nothing to schedule."""
        if due_ms is None or (topic.due_ms is not None and topic.due_ms <= due_ms):
            return
        topic.due_ms = due_ms
        with self._guard:
            heappush(self._heap, (due_ms, topic.id, True, topic))

    def schedule_idle(self, due: list[tuple[int, int, str]]) -> None:
        """Schedule topics that are not loaded: time, id and name of each."""
        with self._guard:
            self._heap += [(due_ms, topic_id, False, name) for due_ms, topic_id, name in due]
            heapify(self._heap)

    def take_due(self, now_ms: int, count_max: int) -> list[TopicState]:
        """Remove and return the topics that are due, each once."""
        due: list[TopicState] = []
        while len(due) < count_max:
            with self._guard:
                if not self._heap or self._heap[0][0] > now_ms:
                    break
                due_ms, _, _, topic = heappop(self._heap)
            if isinstance(topic, str):
                self.load_topic(topic)  # it has an entry of its own from now on
            elif topic.due_ms == due_ms:  # else the entry is stale: an earlier one was taken
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


@dataclass(slots=True)
class CompactionStats:
    """Compaction since the directory was opened."""

    runs: int = 0
    records: int = 0  # removed
    bytes: int = 0
    tombstones: int = 0  # of the removed records
    read_bytes: int = 0  # of records and key files


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

    def rewrite(self, name: str, *, force: bool = False, progress: Callable[[int, int], object] | None = None) -> Any:
        """Rewrite the segments of a topic; return a `RewriteResult`."""
        ...

    def erase(
        self, name: str, *, match: object = None, seqs: Sequence[int] | None = None, actor: str | None = None
    ) -> Any:
        """Erase records of a topic; return an `ErasureReceipt`."""
        ...


_openings = count()  # of this process: two at the same time by the clock differ


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
    reload_topics: Callable[[], TopicTable] | None = None  # of a read-only engine: load the topics from disk again
    erase_locations: list[EraseLocation] = field(default_factory=list)  # places beside the directory
    rewriter: Rewriter | None = None  # set by the engine where it writes
    topics_to_rewrite: set[TopicState] = field(default_factory=set)  # with new deletions in sealed segments
    is_replaying: bool = False  # WAL frames are being applied; the state is incomplete
    schedule: MaintenanceSchedule = field(default_factory=MaintenanceSchedule)
    dirty_topics: set[TopicState] = field(default_factory=set)  # changed since their row of the manifest was built
    has_reservations: bool = False  # rows of the manifest reserve seqs, which a close gives back
    dropped_ids: set[int] = field(default_factory=set)  # of topics that recovery did not find again
    enable_large_records: Callable[[], None] = lambda: None  # set by the engine; called before the first large record
    blob_ids: BlobIds = field(init=False)
    pins: FilePins = field(default_factory=FilePins)  # files that running backups read
    compacted_topics: set[TopicState] = field(default_factory=set)  # topics with compaction
    compaction_stats: CompactionStats = field(default_factory=CompactionStats)
    key_tables: KeyTables = field(init=False)
    cold: ColdReader = field(default_factory=lambda: ColdReader(None, 0))  # reads segments of the cold tier
    sealed_topics: set[TopicState] = field(default_factory=set)  # topics that may have segments to move to it
    idle_sealed: list[str] = field(default_factory=list)  # idle topics with sealed segments, if there is a cold store
    hot_files_lock: Lock = field(default_factory=Lock)  # held while a data file is removed or recalled
    disk_reserve: DiskReserve = field(init=False)
    opening: int = field(init=False)  # identifies this opening: records may be lost between two
    removals: PendingRemovals = field(init=False)
    health: HealthMonitor = field(init=False)
    gap_log: GapLog = field(init=False)  # set by the engine

    def __post_init__(self) -> None:
        self.opening = self.clock.now_us() + next(_openings)
        self.removals = PendingRemovals(enabled=self.limits.ledger_records > 0)
        self.health = HealthMonitor(self.root, self.now_ms, BACKGROUND_TASKS)
        self.blob_ids = BlobIds(self.now_ms)
        self.key_tables = KeyTables(self.limits.key_index_bytes)
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

    def take_dirty_topics(self) -> list[TopicState]:
        """Take the topics whose rows a checkpoint has to build; those of the engine first."""
        taken = self.dirty_topics.copy()
        self.dirty_topics.difference_update(taken)
        return sorted(taken, key=lambda topic: (not topic.name.startswith(OWN), topic.id))

    def now_ms(self) -> int:
        return self.clock.now_us() // 1000

    def segment_files(self, topic_id: int) -> SegmentFiles:
        return SegmentFiles(self.disk, topic_directory(self.root, topic_id), topic_id, self.mmap_cache, self.cold)

    def shard(self, topic_id: int) -> Shard:
        if self.closed:
            raise self.closed_error("nothing was written")
        if not self.shards:
            raise ReadOnly(f"{self.root} was opened for reading; nothing was written")
        return self.shards[shard_for_topic(topic_id, len(self.shards))]


def topic_directory(root: str, topic_id: int) -> str:
    return join(join(root, TOPICS_DIR), f"{topic_id:08X}")
