"""The engine: one directory of topics, one process that writes it, any number that read.

`Engine` creates, configures and drops topics and routers, runs background work, and closes the directory. Operations
on records are in their own modules (append, read, delete, checkpoint, recovery). Every method may be called from any
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from threading import Lock
from typing import NamedTuple, Self

import msgspec

from tidelog.commitlog.log import announce_server
from tidelog.disk import process
from tidelog.disk.interface import Lock as DirectoryLock
from tidelog.disk.process import defer_signals_in
from tidelog.engine import append, groups, read, retention, startup, tiers
from tidelog.engine.append import Records
from tidelog.engine.background import BackgroundThread, CheckpointScheduler, close_at_exit, start_background_threads
from tidelog.engine.batch_encoder import check_int, check_text
from tidelog.engine.compaction import COMPACTION_TASK, Compactor
from tidelog.engine.config import (
    DELIVERY_FIELDS,
    OWN,
    EngineConfig,
    TopicConfig,
    check_dead_letter,
    check_deliveries,
    check_topic_name,
)
from tidelog.engine.context import HISTORY_TOPIC_PREFIX, CompactionStats, EngineContext
from tidelog.engine.delete import parse_tag_match
from tidelog.engine.erase import ChainCheck, Eraser, ErasureReceipt, verify_chain
from tidelog.engine.erase import Progress as EraseProgress
from tidelog.engine.gap_log import GAPS_LIMIT_DEFAULT, GapEntries, GapLog
from tidelog.engine.groups import GroupState
from tidelog.engine.health import Corruption, HealthState
from tidelog.engine.producer_batches import StagingArea
from tidelog.engine.queues.queue import Queue
from tidelog.engine.queues.queue_state import get_queue_state
from tidelog.engine.results import RecoveryReport, TopicInfo, add_background_error
from tidelog.engine.rewrite import Progress as RewriteProgress
from tidelog.engine.rewrite import Rewriter, RewriteResult, RewriteStats, ignore_progress
from tidelog.engine.routing.manager import RouterManager, require_router
from tidelog.engine.routing.router import GUARANTEES, Guarantee, Router, RouterState, check_router_name
from tidelog.engine.segment import SizeCount
from tidelog.engine.snapshot import EngineSnapshot
from tidelog.engine.tiers import Moved, SegmentPlace, Tiers, TierStatus
from tidelog.engine.topic import Topic
from tidelog.engine.topic_state import TopicState
from tidelog.engine.topic_table import IdleTotals, TopicTable
from tidelog.errors import (
    BadInput,
    Busy,
    DiskFull,
    Error,
    Latched,
    NotEmpty,
    ReadOnly,
    Throttled,
    TopicExists,
    TopicNotFound,
    WriteFailed,
)
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Body
from tidelog.times import Time, time_ms
from tidelog.wal import Commit, CommitFuture, Shard


class ControlCommit(Commit):
    """A frame about a topic, not its records: created, configured, dropped. Durable before the caller continues.

    Created and submitted under the topic's lock. The seq of a ConfigUpdate is the last one assigned before it: replay
    applies the caps to records up to there, because the snapshot may already hold later ones.
    """

    __slots__ = ("_apply", "_on_error")
    future: CommitFuture[None]

    def __init__(
        self, topic: TopicState, body: Body, apply: Callable[[], None], on_error: Callable[[Error], None] | None = None
    ) -> None:
        seq, ts_ms = (
            topic.last_assigned_seq if isinstance(body, control_frames.ConfigUpdate) else 0,
            topic.context.now_ms(),
        )
        encoded = topic.encode_control(body, seq=seq, ts_ms=ts_ms)
        super().__init__([encoded], frames=1, durable=True, future=CommitFuture(topic.shard))
        # The gap log topic is created for the first removal, which a checkpoint waits for.
        self.may_use_reserve = topic.name.startswith(OWN) or not isinstance(body, control_frames.TopicCreate)
        self._apply, self._on_error = apply, on_error

    def apply(self, error: Error | None) -> None:
        if error is None:
            self._apply()
        elif self._on_error is not None:
            self._on_error(error)


class TopicCreation(NamedTuple):
    """A topic on its way into the WAL. It exists once the future is done."""

    topic: TopicState
    future: CommitFuture[None]


@defer_signals_in(
    "topic",
    "configure",
    "router",
    "find_router",
    "drop_router",
    "drop_with_routers",
    "begin_create",
    "ensure_topic",
    "internal_topic",
    "drop_internal_topic",
    "gaps",
    "tick",
    "checkpoint",
    "relocate",
    "recall",
    "claim_cold_store",
    "refresh",
    "close",
)
class Engine:
    """One open data directory."""

    def __init__(self, opened: startup.OpenedEngine, *, threads: bool) -> None:
        self._context: EngineContext = opened.context
        self._context.topics = self
        self._lock: DirectoryLock | None = opened.lock
        self._reopen = opened.reopen
        self._topics: TopicTable = opened.topics
        self._next_id = opened.next_topic_id
        self.report: RecoveryReport = opened.report
        self._uncertain_topics: dict[str, TopicState] = {}  # their TopicCreate was written and not synced
        # Topics that are being created: many threads and requests share one commit. Filled with the registry lock held;
        # the committer moves them to `_topics` without it.
        self._creations: dict[str, TopicCreation] = {}
        self._dropped: list[TopicState] = []  # topics whose files are not removed yet
        self._registry_lock = Lock()  # held during configure and drop, and while a topic is staged, not for its commit
        self._backup_lock = Lock()  # held during a backup
        self._context.queue_topics |= {topic for topic in self._topics.resident() if topic.config.type == "queue"}
        self._context.compacted_topics |= {topic for topic in self._topics.resident() if topic.config.compaction}
        self._compactor = Compactor(self._context)
        self._router_manager = self._make_router_manager(threaded=False)
        self._gap_log = GapLog(self._context, self)
        self._checkpoints = CheckpointScheduler(
            self._context, opened.checkpoint_state, self._list_topics, self._get_next_id, self.report
        )
        self._rewriter = Rewriter(self._context, self._checkpoints.urgency.wait)
        if self._context.shards:
            self._context.rewriter = self._rewriter
        self._context.enable_large_records = self._checkpoints.enable_large_records
        self._eraser = Eraser(
            self._context, self._rewriter, self.checkpoint, self._checkpoints.state.store.request_base, Lock()
        )
        self._tiers = Tiers(
            self._context,
            opened.claim,
            self._list_topics,
            lambda: self._topics,
            opened.named_objects,
        )
        self._checkpoints.discard_objects = self._tiers.discard
        self._context.erase_locations.append(self._tiers)
        for topic in self._topics.resident() if self._context.shards else ():
            with topic.lock:
                topic.schedule_maintenance()
        self._threads: list[BackgroundThread] = []
        process.register(self)
        if threads and self._context.shards:
            self._threads = start_background_threads(
                self._context, self._run_sync, self._run_maintenance, self._checkpoints.urgency, self.report
            )
            for shard in self._context.shards:
                shard.start()
            self._router_manager = self._make_router_manager(threaded=True)
            self.start_background_task("rewrite", self._rewriter.run)
            self._compactor = Compactor(self._context, self._wait_unless_urgent)
            self.start_background_task(COMPACTION_TASK, self._compactor.run_due)
            if self._tiers.is_enabled:
                self.start_background_task(tiers.TASK, self._tiers.run)
            close_at_exit(self.close)

    # ── topics ────────────────────────────────────────────────────────────────────────────────

    def topic(self, /, name: str, *, create: bool = True, **config: object) -> Topic:
        """Return the topic of this name; create it if there is none. Given config fields are set, others stay.
        `max_deliveries` of a queue needs a `dead_letter`."""
        if not DELIVERY_FIELDS.isdisjoint(config):  # not what is stored: the config of an older directory stays valid
            known = self.find(name)
            check_deliveries(TopicConfig.make(config, base=None if known is None else known.config))
        return self._create_or_configure(name, config, create=create, as_a_whole=False)[0]

    def configure(self, name: str, fields: Mapping[str, object]) -> tuple[Topic, bool]:
        """Create or configure a topic as a whole: fields that are not given take their defaults. Return the topic and
        whether it was created."""
        check_topic_name(name)
        return self._create_or_configure(name, fields, create=True, as_a_whole=True)

    def _create_or_configure(
        self, name: str, fields: Mapping[str, object], *, create: bool, as_a_whole: bool
    ) -> tuple[Topic, bool]:
        while True:
            with self._registry_lock:
                topic = self._find_topic(name)
                if topic is not None:
                    if fields or as_a_whole:
                        base = None if as_a_whole else topic.config
                        self._configure(topic, TopicConfig.make(fields, base=base))
                    return Topic(topic), False
                if not create:
                    raise TopicNotFound(name)
                check_topic_name(name)
                pending = self._creations.get(name)
                creation = pending or self._stage_topic(name, TopicConfig.make(fields))
            creation.future.wait()
            if pending is None:
                return Topic(creation.topic), True

    def begin_create(
        self, name: str, config: TopicConfig, first: Records, *, wait_for_lock: bool = True
    ) -> tuple[TopicState, CommitFuture[None] | None, bool] | None:
        """`ensure_topic` that does not wait for the commit: return the topic, the future after which it exists (None:
        it exists), and whether this call creates it. Creations that wait for one commit share its sync. None, where
        `wait_for_lock` is false: another thread configures or drops a topic."""
        if not self._registry_lock.acquire(blocking=wait_for_lock):
            return None
        try:
            topic = self._find_topic(name)
            if topic is not None:
                return topic, None, False
            if (pending := self._creations.get(name)) is not None:
                return pending.topic, pending.future, False
            append.check_first_write(self._context, name, config, first)
            creation = self._stage_topic(name, config)
            return creation.topic, creation.future, True
        finally:
            self._registry_lock.release()

    def ensure_topic(self, name: str, config: TopicConfig, first: Records) -> tuple[TopicState, bool]:
        """Return the topic of this name, created with `config` if it does not exist, and whether it was created. If the
        write that creates it would be refused, nothing is created and its error is raised."""
        begun = self.begin_create(name, config, first)
        assert begun is not None, "it waits for the lock"
        topic, future, created = begun
        if future is not None:
            future.wait()
        return topic, created

    def queue(self, /, name: str, *, create: bool = True, **config: object) -> Queue:
        """`topic` for a queue. Raises NotAQueue if there is a topic of another type with this name."""
        if (topic := self.find(name)) is None:
            return self.topic(name, create=create, **{"type": "queue", **config}).queue()
        topic.queue()
        return (self.topic(name, create=False, **config) if config else topic).queue()

    def internal_topic(self, name: str, **config: object) -> TopicState:
        """An internal topic of the engine: readable like any other, not listed, outside of every limit."""
        assert name.startswith(OWN), "other topics are created by `topic`"
        with self._registry_lock:
            topic = self._topics.get(name)
            if topic is None:
                creation = self._creations.get(name) or self._submit_creation(name, TopicConfig.make(config))
                creation.future.wait()
                return creation.topic
            self._configure(topic, TopicConfig.make(config, base=topic.config))
            return topic

    def drop_internal_topic(self, name: str) -> None:
        """Drop an internal topic, if it exists."""
        assert name.startswith(OWN), "other topics are dropped by `drop`"
        with self._registry_lock:
            topic = self._topics.get(name)
            if topic is not None:
                self._drop_topic(topic)

    def find(self, name: str) -> Topic | None:
        """Return the topic of this name, or None.

        >>> log.find("orders"), log.find("none")
        (<topic 'orders', head 3>, None)
        """
        self._check_open()
        return None if (topic := self._find_topic(name)) is None else Topic(topic)

    def find_topic(self, name: str) -> TopicState | None:
        """Return the state of the topic of this name, if it exists."""
        self._check_open()
        return self._find_topic(name)

    def names(self) -> list[str]:
        """Return the names of all topics, sorted.

        >>> log.names()
        ['mails', 'mails-dead', 'orders']
        """
        self._check_open()
        return list(self.iter_names())

    def iter_names(self, prefix: str = "", after: str = "") -> Iterator[str]:
        """Yield the names of topics that begin with `prefix` and come after `after`, sorted; the first few cost little,
        however many topics there are."""
        self._check_open()
        return (name for name in self._topics.names(prefix, after) if not name.startswith(OWN))

    @property
    def topic_count(self) -> int:
        """How many topics there are, internal ones included."""
        return len(self._topics)

    def topics(self, prefix: str = "", *, after: str = "", limit: int | None = None) -> list[TopicInfo]:
        """Return the state of topics, by name: those that begin with `prefix` and come after `after`, at most `limit`.
        Internal topics are included if `prefix` starts with theirs.

        >>> [(state.topic, state.count) for state in log.topics("mails")]
        [('mails', 2), ('mails-dead', 0)]
        """
        self._check_open()
        check_text("prefix", prefix)
        check_text("after", after)
        if limit is not None:
            check_int("limit", limit, 1, frame.SEQ_MAX)
        names = self._topics.names(prefix, after) if prefix.startswith(OWN) else self.iter_names(prefix, after)
        states: list[TopicInfo] = []
        while (limit is None or len(states) < limit) and (name := next(names, None)) is not None:
            if (state := self.topic_info(name)) is not None:
                states.append(state)
        return states

    def topic_info(self, name: str) -> TopicInfo | None:
        """Return the state of one topic; None if there is none. A topic that nothing has used yet is not loaded for
        it."""
        info = self._topics.idle_info(name)
        if info is not None and not info.config.ttl_ms:
            return info
        topic = self._topics.get(name)
        return None if topic is None else Topic(topic).state()

    def topics_cached(self, count_max: int | None = None) -> list[TopicInfo]:
        """`topics` as last known, at most `count_max`: nothing expires first, and nothing blocks on the disk."""
        states = []
        for name in islice(self.iter_names(), count_max):
            info = self._topics.idle_info(name)
            if info is None and (topic := self._topics.get(name)) is not None:
                info = topic.info()
            if info is not None:
                states.append(info)
        return states

    def loaded_topics_cached(self) -> list[TopicInfo]:
        """Return the state of the topics that something has used since the open, in any order, as last known."""
        self._check_open()
        return [topic.info() for topic in self._topics.resident() if not topic.name.startswith(OWN)]

    @property
    def idle_totals(self) -> IdleTotals:
        """What the other topics have together, as last known."""
        return self._topics.idle_totals

    def gaps(
        self,
        topic: str | None = None,
        from_ms: Time | None = None,
        limit: int = GAPS_LIMIT_DEFAULT,
        *,
        after_seq: int = 0,
    ) -> GapEntries:
        """Return which records were removed and why, oldest first: of one topic, also a dropped one, or of all; since a
        time; after the entry with the seq `after_seq`.

        >>> orders.delete(seqs=[2]).deleted
        1
        >>> [(gap.topic, gap.cause, gap.first) for gap in log.gaps()]
        [('orders', 'delete', 2)]
        """
        self._check_open()
        since_ms = None if from_ms is None else time_ms("from_ms", from_ms)
        check_int("after_seq", after_seq, 0, frame.SEQ_MAX)
        return self._gap_log.read(topic, since_ms, limit, after_seq=after_seq)

    def groups_cached(self, count_max: int) -> list[tuple[str, GroupState]]:
        """Return the first `count_max` consumer groups with their topics, by name, as last known."""
        self._check_open()
        topics = sorted((topic for topic in self._topics.resident() if topic.groups), key=_name_key)
        found: list[tuple[str, GroupState]] = []
        for topic in topics:
            with suppress(TopicNotFound):  # dropped meanwhile
                found += [(topic.name, state) for state in groups.groups_cached(topic, count_max - len(found))]
        return found

    @property
    def holds_broken(self) -> int:
        """Holds of groups that broke since the directory was opened."""
        return self._context.removals.broken_holds

    @property
    def compaction_stats(self) -> CompactionStats:
        """Work of compaction since the directory was opened."""
        return self._context.compaction_stats

    @property
    def listener_failures(self) -> int:
        """Exceptions raised by listeners of topics and queues since the directory was opened."""
        return self._context.listener_failures

    def drop(self, name: str, *, if_empty: bool = False, actor: str | None = None) -> bool:
        """Remove a topic with all its records; return False if there is none. A new topic of its name starts at seq
        1.

        >>> log.drop("orders"), log.drop("orders")
        (True, False)
        """
        check_text("the name of a topic", name)
        return self.drop_with_routers(name, if_empty=if_empty, actor=actor) is not None

    def _drop_topic(self, topic: TopicState, actor: str | None = None) -> None:
        history = self._topics.get(HISTORY_TOPIC_PREFIX + topic.name)
        if history is not None:
            self._drop_topic(history)

        def on_dropped() -> None:
            with topic.lock:
                topic.is_dropped = True
                index, held = topic.index, SizeCount(topic.index.count, topic.index.bytes)
                topic.quota.release(held.bytes)
                self._context.removals.add(topic, "drop", index.earliest, index.head, held, actor=actor)
            topic.notify_listeners()

        self._submit_control(topic, control_frames.TopicDelete(topic.name), on_dropped)
        self._topics.remove(topic)
        self._context.queue_topics.discard(topic)
        self._router_manager.forget_topic(topic)
        self._context.tag_cache.drop(topic.id)
        self._context.compacted_topics.discard(topic)
        self._context.key_tables.drop(topic.id)
        self._context.health.forget_topic(topic.id)
        self._tiers.discard_topic(topic)
        self._dropped.append(topic)  # files are removed in the background: unlinking many would block every other topic

    def _find_topic(self, name: object) -> TopicState | None:
        return self._topics.get(name) if isinstance(name, str) else None

    def _create_topic(self, name: str, config: TopicConfig) -> TopicState:
        """Create a topic with the registry lock held, for operations on several topics."""
        creation = self._creations.get(name) or self._stage_topic(name, config)
        creation.future.wait()
        return creation.topic

    def _stage_topic(self, name: str, config: TopicConfig) -> TopicCreation:
        """Check a new topic and submit its creation. With the registry lock held."""
        check_topic_name(name)
        check_dead_letter(name, config)
        limit = self._context.limits.topics_max
        if limit and len(self._topics) + len(self._creations) >= limit:  # counted exactly only near the limit
            used = len(self.names()) + len(self._creations)
            if used >= limit:
                raise Throttled("topics", max=limit, used=used, asked=1)
        return self._submit_creation(name, config)

    def _submit_creation(self, name: str, config: TopicConfig) -> TopicCreation:
        # After a failed sync the topic may be on disk: a retry must reuse its id.
        topic = self._uncertain_topics.get(name) or TopicState(self._context, self._next_id, name, config)

        def on_created() -> None:
            topic.mark_dirty()  # before it is no longer pending: a checkpoint counts on one of the two
            if config.type == "queue":
                self._context.queue_topics.add(topic)
            if config.compaction is not None:
                self._context.compacted_topics.add(topic)
            self._topics.add(topic)
            self._creations.pop(name, None)

        def on_failed(error: Error) -> None:
            if isinstance(error, Latched):
                self._uncertain_topics[name] = topic
            self._creations.pop(name, None)

        topic.shard.check_writable()
        self._check_control_allowed(topic)
        self._next_id = max(self._next_id, topic.id + 1)
        body = control_frames.TopicCreate(name, config.to_json())
        with topic.lock:
            commit = ControlCommit(topic, body, on_created, on_failed)
            creation = self._creations[name] = TopicCreation(topic, commit.future)
            try:
                topic.shard.submit(commit)  # a failed one must not leave the topic dirty: its row would create it
            except BaseException as error:
                self._creations.pop(name, None)
                if isinstance(error, Latched):
                    self._uncertain_topics[name] = topic
                raise
        return creation

    def _configure(self, topic: TopicState, config: TopicConfig) -> None:
        check_dead_letter(topic.name, config)
        if config.type != topic.config.type:
            raise TopicExists(
                topic.name,
                reason=f"it is a {topic.config.type}, not a {config.type}, and a type never changes",
                detail={"existing_type": topic.config.type, "requested_type": config.type},
            )
        if config == topic.config:
            return

        floor = 0

        def apply() -> None:
            nonlocal floor
            with topic.lock:
                if (config.durability == "ephemeral") != topic.is_ephemeral:
                    topic.index.roll_segment()  # persistent and ephemeral records are in separate segments
                topic.config = config
                before = topic.index.evict_floor
                topic.enforce_caps()
                topic.schedule_maintenance()
                floor = topic.index.evict_floor if topic.index.evict_floor > before else 0

        self._submit_control(topic, control_frames.ConfigUpdate(topic.name, config.to_json()), apply)
        if config.compaction is not None:
            self._context.compacted_topics.add(topic)
        else:
            self._context.compacted_topics.discard(topic)
            self._context.key_tables.drop(topic.id)
        # Logged before the next config: what this one evicted does not follow from the records alone once
        # later deletes or another config are replayed over them.
        retention.persist_floor(topic, max(floor, topic.index.evict_floor if topic.persists_floors else 0), always=True)

    def _check_control_allowed(self, topic: TopicState) -> None:
        self._check_writable()
        if not topic.name.startswith(OWN):  # internal topics are written until the end of close
            topic.check_writable()

    def _submit_control(self, topic: TopicState, body: Body, apply: Callable[[], None]) -> None:
        self._check_control_allowed(topic)
        with topic.lock:
            commit = ControlCommit(topic, body, apply)
            topic.submit(commit)
        commit.future.wait()

    @property
    def limits(self) -> EngineConfig:
        return self._context.limits

    @property
    def shards(self) -> Sequence[Shard]:
        """The WAL shards, for metrics and for a server that drives the commits."""
        return self._context.shards

    @property
    def generation(self) -> int:
        """The number of the newest checkpoint; 0 before the first."""
        return self._checkpoints.state.manifest_number

    @property
    def staging(self) -> StagingArea:
        """Staged chunks of numbered batches."""
        self._check_open()
        return StagingArea(self._context.disk, self._context.root)

    def health(self) -> HealthState:
        """Return the state of background work, the age of the last checkpoint, and damage found.

        >>> log.health().ok
        True
        """
        self._check_open()
        return self._checkpoints.health()

    @property
    def is_lagging(self) -> bool:
        """Whether records are written faster than checkpoints move them from memory to segments. A writer that can wait
        should: memory holds the backlog."""
        return bool(self._threads) and self._checkpoints.is_lagging

    def corruption(self) -> tuple[Corruption, ...]:
        """Return stored bytes that did not verify since the directory was opened, each place once.

        >>> log.corruption()
        ()
        """
        return self._context.health.corrupt_places()

    # ── tiers ─────────────────────────────────────────────────────────────────────────────────

    def tier_status(self) -> TierStatus:
        """Return where segments are, and what was moved and read since the directory was opened.

        >>> print(log.tier_status().store)
        None
        """
        self._check_open()
        return self._tiers.status()

    @property
    def cold_address(self) -> str | None:
        """The address of the cold store, without credentials; None: there is none."""
        store = self._tiers.store
        return None if store is None else store.address

    def segment_places(self, topic: str | None = None) -> list[SegmentPlace]:
        """Return where each sealed segment of a topic, or of all topics, is.

        >>> orders.seal()
        >>> log.checkpoint()
        >>> [(place.first_seq, place.tier) for place in log.segment_places("orders")]
        [(1, 'hot')]
        """
        self._check_open()
        return list(self._tiers.places(self._named_topics(topic)))

    def relocate(self, topic: str | None = None, *, keep_segments: int | None = None) -> Moved:
        """Move old segments of a topic, or of all topics, to the cold store now; also recalled ones.

        Args:
            keep_segments: so many of the newest sealed segments stay on the disk, instead of what the settings say.

        Raises:
            StoreUnavailable: there is no store, or it does not answer. What was moved before stays moved.

        >>> with tidelog.open("other", disk=disk, threads=False, cold="cold") as tiered:
        ...     tiered.relocate().segments
        0
        """
        self._check_writable()
        self.checkpoint()
        topics = self._named_topics(topic)
        return self._move(lambda: self._tiers.relocate(topics, keep_segments=keep_segments))

    def recall(self, topic: str | None = None, *, first_seq: int = 0, last_seq: int | None = None) -> Moved:
        """Bring segments of a topic, or of all topics, back from the cold store. They stay on the disk until they are
        relocated by hand.

        Args:
            first_seq, last_seq: only segments with one of these seqs.

        Raises:
            StoreUnavailable: there is no store, or it does not answer. What was recalled before stays on the disk.

        >>> with tidelog.open("other", disk=disk, threads=False, cold="cold") as tiered:
        ...     tiered.recall("events" if "events" in tiered else None).segments
        0
        """
        self._check_writable()
        topics = self._named_topics(topic)
        return self._move(lambda: self._tiers.recall(topics, first_seq, last_seq))

    def claim_cold_store(self) -> None:
        """Take the cold store from another copy of this database, which may no longer write there.

        >>> with tidelog.open("other", disk=disk, threads=False, cold="cold") as tiered:
        ...     tiered.claim_cold_store()
        """
        self._check_writable()
        self._tiers.claim()

    def _move(self, move: Callable[[], Moved]) -> Moved:
        """Move segments, then save two manifests, so that neither needs the copies that are not needed any more; also
        where the store fails in the middle, for what was moved before."""
        before = self._tiers.relocated + self._tiers.recalled
        try:
            moved = move()
        except Error:
            with suppress(Error):  # that of the store says more; the checkpoint is retried when due
                self._finish_moves(before)
            raise
        self._finish_moves(before)
        return moved

    def _finish_moves(self, moved_before: int) -> None:
        state = self._checkpoints.state
        has_moved = self._tiers.relocated + self._tiers.recalled > moved_before
        if has_moved or state.hot_to_remove or state.hot_to_remove_next:
            for _ in range(2):
                self.checkpoint()

    def _named_topics(self, name: str | None) -> list[TopicState]:
        if name is None:
            found = (self._find_topic(each) for each in list(self._topics.names()))  # idle ones are loaded
            return [topic for topic in found if topic is not None]
        topic = self._find_topic(name)
        if topic is None:
            raise TopicNotFound(name)
        return [topic]

    # ── routers ───────────────────────────────────────────────────────────────────────────────

    def router(
        self,
        name: str,
        source: str,
        dest: str,
        *,
        preserve_node: bool = True,
        preserve_tag: bool = True,
        create_dest: bool = True,
        filter: object = None,
        allow_cycle: bool = False,
        guarantee: Guarantee = "at_least_once",
    ) -> RouterState:
        """Create a router that copies every new record of `source` to `dest`; missing topics are created.

        `filter` is a tag, the start of a tag and `*`, or `["tag", "Eq" | "Glob", text]`: records without such a tag are
        not copied. An existing router of this name is changed: options that are not given take their defaults, and its
        copies stay. If this raises, nothing was created.

        >>> log.router("audit", "orders", "copies", filter="order-*").created
        True
        >>> orders.append({"sku": "D"}, tag="order-8").seqs
        range(4, 5)
        >>> log.find_router("audit").forwarded_total
        1
        """
        check_router_name(name)
        if guarantee not in GUARANTEES:
            raise BadInput(f"a guarantee is one of {', '.join(GUARANTEES)}, not {guarantee!r}; nothing was created")
        for flag in (preserve_node, preserve_tag, create_dest, allow_cycle):
            if not isinstance(flag, bool):
                raise BadInput(f"an option of a router is true or false, not {flag!r}; nothing was created")
        if source == dest:
            raise BadInput(f"{source!r} cannot be copied to itself; nothing was created, name another dest")
        check_topic_name(source)
        check_topic_name(dest)
        router = Router(
            name=name,
            source=source,
            dest=dest,
            preserve_node=preserve_node,
            preserve_tag=preserve_tag,
            allow_cycle=allow_cycle,
            exactly_once=guarantee == "exactly_once",
            match=parse_tag_match(filter, "nothing was created"),
        )
        with self._registry_lock:
            self._check_writable()
            if not create_dest and self._find_topic(dest) is None:
                raise TopicNotFound(dest)
            exists = self._router_manager.check(router)
            created: list[TopicState] = []
            try:
                ends = []
                for end in (source, dest):
                    topic = self._find_topic(end)
                    if topic is None:
                        topic = self._create_topic(end, TopicConfig())
                        created.append(topic)
                    ends.append(topic)
                self._router_manager.create_or_update(router, *ends)
            except Error:
                for topic in reversed(created):
                    self._drop_topic(topic)
                raise
        return require_router(self._router_manager.state(name, created=not exists), name)

    def find_router(self, name: str, *, fresh: bool = True) -> RouterState | None:
        """Return the router of this name, or None; `fresh`: after it has copied all records of its source.

        >>> log.router("audit", "orders", "copies").source
        'orders'
        >>> log.find_router("audit").dest, log.find_router("none")
        ('copies', None)
        """
        self._check_open()
        check_text("the name of a router", name)
        return self._router_manager.state(name, fresh=fresh)

    def routers(self, prefix: str = "", source: str | None = None, dest: str | None = None) -> list[RouterState]:
        """Return the routers by name: those that start with `prefix`, from `source`, to `dest`. Pending copies are not
        waited for.

        >>> log.router("audit", "orders", "copies").router
        'audit'
        >>> [router.router for router in log.routers(source="orders")]
        ['audit']
        """
        self._check_open()
        return self._router_manager.states(prefix, source, dest)

    @property
    def router_count(self) -> int:
        return len(self._router_manager)

    def drop_router(self, name: str) -> bool:
        """Drop a router; return False if there is none. Its copies stay. On return the drop survives a crash.

        >>> log.router("audit", "orders", "copies").created
        True
        >>> log.drop_router("audit"), log.drop_router("audit")
        (True, False)
        """
        check_text("the name of a router", name)
        with self._registry_lock:
            self._check_writable()
            return self._router_manager.drop(name)

    def drop_with_routers(self, name: str, *, if_empty: bool = False, actor: str | None = None) -> list[str] | None:
        """Remove a topic with all its records; return the routers dropped with it, None if there is no topic."""
        with self._registry_lock:
            topic = self._topics.get(name)
            if topic is None or name.startswith(OWN):
                self._check_writable()
                return None
            if if_empty and (count := Topic(topic).count):
                raise NotEmpty(name, count=count)
            routers = self._router_manager.drop_routers_from(topic)
            self._drop_topic(topic, actor)
        return sorted(routers, key=str.encode)

    # ── background work ───────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Sync pending writes, seal old segments, checkpoint when due: what the threads do every `sync_interval_ms`."""
        self._check_writable()
        writable = [shard for shard in self._context.shards if not shard.is_latched]
        self._flush_gap_log()
        self._sync()
        for shard in writable:  # a sync of the gap log may have latched it
            shard.check_writable()
        if (error := self._run_maintenance()) is not None:
            raise error

    def _run_sync(self) -> None:
        self._run_task("sync", self._sync)

    def _sync(self) -> None:
        retention.queue_moved_floors(self._context)
        heads = read.heads_before_sync(self._context)
        for shard in self._context.shards:
            shard.tick()
        read.on_interval_synced(heads)

    def _run_maintenance(self) -> Exception | None:
        """Run every task that is due; a failing task does not stop the others. Returns the first error, except that of
        the gap log, whose removals stay pending."""
        self._flush_gap_log()
        failed = self._run_task("history", self._flush_histories)
        if not self._router_manager.has_thread:
            failed = self._run_task("routers", self._router_manager.run_until_idle) or failed
        failed = self._run_task("expiry", self._expire) or failed
        if not self._threads:
            failed = self._run_task(COMPACTION_TASK, self._compactor.run_due) or failed
        if self._dropped:
            failed = self._run_task("erase", lambda: self._checkpoints.remove_dropped_topics(self._dropped)) or failed
        if not self._threads:
            failed = self._run_task("rewrite", self._rewriter.run) or failed
        if self._checkpoints.is_due:
            failed = self._run_task("routers", self._router_manager.run_until_idle) or failed
            try:
                self._checkpoints.checkpoint(throttled=True)
            except Exception as error:  # counted and logged there
                add_background_error(self.report, error)
                failed = failed or error
        return failed

    def _expire(self) -> None:
        """Expire records and seal segments that are due; raise the first error."""
        for error in retention.run_due_maintenance(self._context).values():
            raise error

    def _run_task(self, task: str, step: Callable[[], object]) -> Exception | None:
        """Run one step of background work. An error is logged, counted and returned."""
        try:
            step()
        except Exception as error:
            add_background_error(self.report, error)
            self._context.health.failed(task, error)
            return error
        self._context.health.succeeded(task)
        return None

    @property
    def context(self) -> EngineContext:
        """Disk, directory, clock and settings, for the parts that are built on the engine."""
        return self._context

    def start_background_task(self, task: str, step: Callable[[], object]) -> bool:
        """Run a step every `sync_interval_ms` in a thread of its own, until `close`; return False without threads."""
        if not self._threads or self._context.closing:
            return False
        self._threads.append(
            BackgroundThread(
                lambda: self._run_task(task, step),
                self._context.limits.sync_interval_ms,
                self._checkpoints.urgency,
                partial(add_background_error, self.report),
                f"tidelog {task} {self._context.root}",
            )
        )
        return True

    def _wait_unless_urgent(self, seconds: float) -> None:
        """Wait for the pace of background work; not while a caller waits for a checkpoint or for close."""
        self._checkpoints.urgency.wait(int(seconds * 1_000_000))

    def _flush_histories(self) -> None:
        """Write pending history steps of queues. A history that cannot be written waits and does not stop the
        others."""
        histories = self._context.dirty_histories
        failed: Exception | None = None
        if self._context.limits.queue_history_records:
            for topic in self._context.queue_topics.copy():
                try:
                    if topic.index.head > topic.history_seq:  # new jobs that no claim has reached yet
                        get_queue_state(topic).history.add_new_jobs()
                except Exception as error:
                    failed = failed or error
        for history in histories.copy():
            histories.discard(history)
            try:
                history.flush()
            except Exception as error:
                failed = failed or error
                histories.add(history)
        if failed is not None:
            raise failed

    def _flush_gap_log(self) -> None:
        self._run_task("ledger", self._gap_log.flush)

    def rewrite(self, name: str, *, force: bool = False, progress: RewriteProgress | None = None) -> RewriteResult:
        """Give the sealed segments of a topic new files without the bytes of deleted records: those with enough of
        them, or with `force` all that have any. On return the old files are removed.

        >>> orders.seal()
        >>> log.checkpoint()
        >>> orders.delete(seqs=[1]).deleted
        1
        >>> log.rewrite("orders", force=True).records_removed
        1
        """
        self._check_writable()
        topic = self._find_topic(name)
        if topic is None:
            raise TopicNotFound(name)
        result = self._rewriter.rewrite(topic, force=force, progress=progress or ignore_progress)
        if result.files:
            self.checkpoint()  # names the new files
            self.checkpoint()  # removes the old ones
        return result

    def erase(
        self,
        name: str,
        *,
        match: object = None,
        seqs: Sequence[int] | None = None,
        actor: str | None = None,
        progress: EraseProgress = lambda *_: None,
    ) -> ErasureReceipt:
        """Delete records of a topic by tag (as in `Topic.delete`) or by seq, and remove their bytes from every file of
        the directory. The receipt names all files, and what cannot be reached.

        >>> receipt = log.erase("orders", match="order-7")
        >>> receipt.records, receipt.hash == receipt.computed_hash()
        (3, True)
        """
        self._check_writable()
        topic = self._find_topic(name)
        if topic is None:
            raise TopicNotFound(name)
        return self._eraser.erase(topic, match=match, seqs=seqs, actor=actor, progress=progress)

    def erasures(self) -> list[ErasureReceipt]:
        """Return the receipts of all erasures in the gap log, oldest first.

        >>> log.erase("orders", match="order-7").number
        1
        >>> [receipt.topic for receipt in log.erasures()]
        ['orders']
        """
        self._check_open()
        return [msgspec.json.decode(row.about.encode(), type=ErasureReceipt) for row in self._gap_log.read_erasures()]

    def verify_erasures(self, receipt: ErasureReceipt | None = None) -> ChainCheck:
        """Verify the chain of receipts in the gap log; `receipt`, which a caller kept, must be part of it.

        >>> receipt = log.erase("orders", match="order-7")
        >>> log.verify_erasures(receipt).ok
        True
        """
        self._check_open()
        return verify_chain(self._gap_log.read_erasures(), receipt)

    @property
    def rewrites(self) -> RewriteStats:
        """Rewrites since the directory was opened."""
        return self._rewriter.stats

    def checkpoint(self) -> None:
        """Copy records that only the WAL has into segments, and truncate the WAL. On an error nothing has changed.

        >>> log.checkpoint()
        >>> len(orders.segments().segments)
        1
        """
        self._check_writable()
        self._router_manager.run_until_idle()
        self._checkpoints.checkpoint()

    def take_snapshot(self) -> EngineSnapshot:
        """Take a consistent snapshot for a backup, after a checkpoint that yields to writers; release it."""
        self._check_writable()
        with suppress(DiskFull, WriteFailed):  # more of the WAL is copied then
            self._checkpoints.checkpoint(throttled=True)
        return self._checkpoints.take_snapshot(self._list_topic_ids)

    @contextmanager
    def exclusive_backup(self) -> Iterator[None]:
        """Make the only backup of this engine while the block runs; raise Busy if there is another."""
        self._check_writable()
        if not self._backup_lock.acquire(blocking=False):
            raise Busy(f"a backup of {self._context.root} is being made already; nothing was done, retry later")
        try:
            yield
        finally:
            self._backup_lock.release()

    def _make_router_manager(self, *, threaded: bool) -> RouterManager:
        limit = self._context.limits.routers_max
        health = self._context.health

        def on_error(error: Exception) -> None:
            add_background_error(self.report, error)
            health.failed("routers", error)

        return RouterManager(self._topics.resident(), limit=limit, threaded=threaded, on_error=on_error)

    def _list_topics(self) -> list[TopicState]:
        """Return the topics that are loaded: background work has nothing to do for others."""
        with self._registry_lock:
            return self._topics.resident()

    def _list_topic_ids(self) -> set[int]:
        with self._registry_lock:
            return self._topics.ids()

    def _get_next_id(self) -> int:
        """Return an id so that every topic with a lower one is created and dirty, or has a row in the manifest."""
        with self._registry_lock:
            return min([self._next_id, *(creation.topic.id for creation in list(self._creations.values()))])

    def refresh(self) -> None:
        """Reload what the writer beside this read-only engine has done since."""
        if self._reopen is None:
            raise BadInput("only a read-only engine reloads; the writer is always current")
        self._check_open()
        opened = self._reopen()
        with self._registry_lock:
            self._context.mmap_cache.clear()
            self._topics, self._next_id, self.report = opened.topics, opened.next_topic_id, opened.report
            self._context = opened.context
            self._context.topics = self
            self._gap_log = GapLog(self._context, self)
            self._router_manager = self._make_router_manager(threaded=False)

    # ── close ───────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Make everything acknowledged durable and release the directory. Closing twice is harmless."""
        if self._context.closed:
            return
        self._rewriter.stop()
        self._compactor.stop()
        self._tiers.stop()
        for thread in self._threads:
            thread.stop()
        writable = [shard for shard in self._context.shards if not shard.is_latched]
        self._flush_gap_log()
        try:
            self._router_manager.close()
            self._flush_histories()
            self._context.closing = True
            for topic in self._list_topics():
                with topic.lock:  # writes being staged are done, new ones are refused
                    pass
            while any(shard.commit_pending() for shard in self._context.shards):
                pass
            self._flush_histories()  # steps of the commits above, and new jobs
            if self._checkpoints.needs_final_checkpoint():
                self._checkpoints.checkpoint(final=True)
            self._run_task("erase", lambda: self._checkpoints.remove_dropped_topics(self._dropped))
        finally:
            self._context.closed = True
            self._close_shards()
        for shard in writable:  # a sync of the gap log may have latched it
            shard.check_writable()

    def announce_server(self, url: str) -> None:
        """Name the address of a server in the lock file, for programs that try to open the directory meanwhile."""
        if self._lock is not None:
            announce_server(self._lock, url)

    def _close_shards(self) -> None:
        failed: Error | None = None
        try:
            for shard in self._context.shards:
                try:
                    shard.close()
                except Error as error:
                    failed = failed or error
        finally:
            for topic in self._topics.resident():
                topic.notify_listeners()
            self._context.mmap_cache.clear()
            if self._lock is not None:
                self._lock.release()
        if failed is not None:
            raise failed

    def on_fork(self, pid: int) -> None:
        """Close the engine in a forked child: using it raises Forked, and the files stay the parent's."""
        context = self._context
        context.opener_pid, context.closing, context.closed = pid, True, True
        context.mmap_cache.clear_without_lock()
        parts = (
            context.mmap_cache,
            context.quota,
            context.tag_cache,
            context.removals,
            context.buffer_pool,
            context.pins,
            context.cold,
            context.cold.cache,
            self._tiers,
            self._gap_log,
            self._router_manager,
            self._rewriter,
            self._topics,
            self._eraser,
        )
        process.poison_locks(context.root, pid, self, context, *parts, self._checkpoints, self._checkpoints.urgency)
        for shard in context.shards:
            shard.on_fork(pid)
        for topic in self._topics.resident():
            topic.on_fork(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._context.closed:
            raise self._context.closed_error("nothing was done")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._context.shards:
            raise ReadOnly(f"{self._context.root} was opened for reading; nothing was written")


def _name_key(topic: TopicState) -> bytes:
    return topic.name.encode()
