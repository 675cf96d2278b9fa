"""The engine: one directory of topics, one process that writes it, any number that read.

This class is the door; what happens behind it is one verb a module (append, read, delete,
checkpoint, recovery). Every method may be called from any thread.

[shell] Frames about a topic rather than its records: made, configured, dropped.

What a caller can do with routers: the part of the engine's door that is about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Protocol, Self

from tidelog.disk import fork
from tidelog.disk.interface import Lock as DirectoryLock
from tidelog.disk.interrupts import defer_signals_in
from tidelog.engine import append, consistency, groups, retention, startup
from tidelog.engine.append import Records
from tidelog.engine.background import BackgroundThread, CheckpointScheduler, start_background_threads
from tidelog.engine.config import OWN, EngineConfig, TopicConfig, check_topic_name
from tidelog.engine.delete import parse_tag_match
from tidelog.engine.gap_log import GAPS_LIMIT_DEFAULT, GapEntries, GapLog
from tidelog.engine.groups import GroupState
from tidelog.engine.health import Corruption, HealthState
from tidelog.engine.producer_batches import StagingArea
from tidelog.engine.queues.queue import Queue
from tidelog.engine.queues.queue_state import get_queue_state
from tidelog.engine.results import RecoveryReport, TopicInfo
from tidelog.engine.routing.manager import RouterManager, require_router
from tidelog.engine.routing.router import GUARANTEES, Guarantee, Router, RouterState, check_router_name
from tidelog.engine.segment import SizeCount
from tidelog.engine.topic import Topic
from tidelog.engine.topic_state import HISTORY_TOPIC_PREFIX, EngineContext, TopicState
from tidelog.errors import BadInput, Error, Latched, NotEmpty, ReadOnly, Throttled, TopicExists, TopicNotFound
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Body
from tidelog.wal import Commit, CommitFuture, Shard


class ControlCommit(Commit):
    """A frame about a topic: on disk before the caller hears of it, in force from then on.

    Made and submitted under the topic's lock. The seq of a ConfigUpdate is the last one assigned before it: replay
    applies the caps to records up to there, because the snapshot may already hold later ones.
    """

    __slots__ = ("_apply",)
    future: CommitFuture[None]

    def __init__(self, topic: TopicState, body: Body, apply: Callable[[], None]) -> None:
        seq, ts_ms = (
            topic.last_assigned_seq if isinstance(body, control_frames.ConfigUpdate) else 0,
            topic.context.now_ms(),
        )
        made = frame.encode(body.KIND, topic_id=topic.id, seq=seq, ts_ms=ts_ms, data=control_frames.encode(body))
        super().__init__([made], frames=1, durable=True, future=CommitFuture(topic.shard))
        # The ledger of gaps is made where the first removal is told of, which a checkpoint waits for.
        self.may_use_reserve = topic.name.startswith(OWN) or not isinstance(body, control_frames.TopicCreate)
        self._apply = apply

    def apply(self, error: Error | None) -> None:
        if error is None:
            self._apply()


class _EngineParts(Protocol):
    """What the engine has: the topics, and the lock over making and dropping them."""

    _router_manager: RouterManager
    _registry_lock: Lock
    _topics: dict[str, TopicState]

    def _check_open(self) -> None: ...

    def _check_writable(self) -> None: ...

    def _find_topic(self, name: object) -> TopicState | None: ...

    def _create_topic(self, name: str, config: TopicConfig) -> TopicState: ...

    def _drop_topic(self, topic: TopicState, actor: str | None = None) -> None: ...


@defer_signals_in("router", "find_router", "drop_router", "drop_with_routers")
class RouterMethods:
    """Mixed into the engine."""

    def router(
        self: _EngineParts,
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
        """Have every record that `source` gets from now on passed on to `dest`; topics that are not there are made.

        `filter` is a tag, a tag's beginning and `*`, or `["tag", "Eq" | "Glob", text]`: records without such a tag
        stay behind. A router of this name that is there is changed: options that are not given take their defaults,
        what it passed on stays. Where nothing can be made of it, nothing is made at all.
        """
        check_router_name(name)
        if guarantee not in GUARANTEES:
            raise BadInput(f"a guarantee is one of {', '.join(GUARANTEES)}, not {guarantee!r}; nothing was made")
        for flag in (preserve_node, preserve_tag, create_dest, allow_cycle):
            if not isinstance(flag, bool):
                raise BadInput(f"an option of a router is true or false, not {flag!r}; nothing was made")
        if source == dest:
            raise BadInput(f"{source!r} cannot be passed on to itself; nothing was made, name another dest")
        check_topic_name(source)
        check_topic_name(dest)
        wanted = Router(
            name=name,
            source=source,
            dest=dest,
            preserve_node=preserve_node,
            preserve_tag=preserve_tag,
            allow_cycle=allow_cycle,
            exactly_once=guarantee == "exactly_once",
            match=parse_tag_match(filter, "nothing was made"),
        )
        with self._registry_lock:
            self._check_writable()
            if not create_dest and self._find_topic(dest) is None:
                raise TopicNotFound(dest)
            known = self._router_manager.check(wanted)
            made: list[TopicState] = []
            try:
                ends = []
                for end in (source, dest):
                    core = self._find_topic(end)
                    if core is None:
                        core = self._create_topic(end, TopicConfig())
                        made.append(core)
                    ends.append(core)
                self._router_manager.create_or_update(wanted, *ends)
            except Error:
                for core in reversed(made):
                    self._drop_topic(core)
                raise
        return require_router(self._router_manager.state(name, created=not known), name)

    def find_router(self: _EngineParts, name: str, *, fresh: bool = True) -> RouterState | None:
        """The router of this name, if there is one; `fresh`: when it has passed on all that its source holds now."""
        self._check_open()
        return self._router_manager.state(name, fresh=fresh)

    def routers(
        self: _EngineParts, prefix: str = "", source: str | None = None, dest: str | None = None
    ) -> list[RouterState]:
        """What routers there are, by name: those that begin with `prefix`, from `source`, to `dest`. As they are."""
        self._check_open()
        return self._router_manager.states(prefix, source, dest)

    @property
    def router_count(self: _EngineParts) -> int:
        return len(self._router_manager)

    def drop_router(self: _EngineParts, name: str) -> bool:
        """Stop passing on; False where there is no such router. Copies stay. On return the drop survives a crash."""
        with self._registry_lock:
            self._check_writable()
            return self._router_manager.drop(name)

    def drop_with_routers(
        self: _EngineParts, name: str, *, if_empty: bool = False, actor: str | None = None
    ) -> list[str] | None:
        """Remove a topic with all its records; return the routers that went with it, None where there is no topic."""
        with self._registry_lock:
            core = self._topics.get(name)
            if core is None or name.startswith(OWN):
                self._check_writable()
                return None
            if if_empty and (count := Topic(core).count):
                raise NotEmpty(name, count=count)
            routers = self._router_manager.drop_routers_from(core)
            self._drop_topic(core, actor)
        return sorted(routers, key=str.encode)


@defer_signals_in(
    "topic",
    "configure",
    "ensure_topic",
    "internal_topic",
    "drop_internal_topic",
    "gaps",
    "tick",
    "checkpoint",
    "refresh",
    "close",
)
class Engine(RouterMethods):
    def __init__(self, opened: startup.OpenedEngine, *, threads: bool) -> None:
        self._context: EngineContext = opened.shared
        self._context.topics = self
        self._lock: DirectoryLock | None = opened.lock
        self._reopen = opened.reopen
        self._topics: dict[str, TopicState] = opened.topics
        self._next_id = opened.next_topic_id
        self.report: RecoveryReport = opened.report
        self._uncertain_topics: dict[str, TopicState] = {}  # whose making was written and not synced
        self._dropped: list[TopicState] = []  # topics whose files are still to be removed
        self._registry_lock = Lock()  # held over the whole of create, configure and drop
        self._context.queue_topics |= {core for core in self._topics.values() if core.config.type == "queue"}
        self._router_manager = self._make_router_manager(threaded=False)
        self._gap_log = GapLog(self._context, self)
        self._checkpoints = CheckpointScheduler(self._context, opened.checkpoint_state, self._list_topics, self.report)
        for core in self._topics.values() if self._context.shards else ():
            with core.lock:
                core.schedule_maintenance()
        self._threads: list[BackgroundThread] = []
        fork.register(self)
        if threads and self._context.shards:
            self._threads = start_background_threads(
                self._context, self._sync, self._run_maintenance, self._checkpoints.urgency, self.report
            )
            for shard in self._context.shards:
                shard.start()
            self._router_manager = self._make_router_manager(threaded=True)

    # ── topics ────────────────────────────────────────────────────────────────────────────────

    def topic(self, name: str, *, create: bool = True, **config: object) -> Topic:
        """The topic of this name, made where there is none. Config fields that are given are set, others stay."""
        with self._registry_lock:
            core = self._find_topic(name)
            if core is None:
                if not create:
                    raise TopicNotFound(name)
                return Topic(self._create_topic(name, TopicConfig.make(config)))
            if config:
                self._configure(core, TopicConfig.make(config, base=core.config))
            return Topic(core)

    def configure(self, name: str, fields: Mapping[str, object]) -> tuple[Topic, bool]:
        """Create or configure as a whole: fields that are not given take their defaults. Says whether it was made."""
        check_topic_name(name)
        with self._registry_lock:
            core = self._find_topic(name)
            if core is None:
                return Topic(self._create_topic(name, TopicConfig.make(fields))), True
            self._configure(core, TopicConfig.make(fields))
            return Topic(core), False

    def ensure_topic(self, name: str, config: TopicConfig, first: Records) -> tuple[Topic, bool]:
        """The topic of this name, made with `config` where there is none; says whether it was. Where the write that
        makes it would be refused, nothing is made and what it would raise is raised."""
        with self._registry_lock:
            core = self._find_topic(name)
            if core is not None:
                return Topic(core), False
            append.check_first_write(self._context, name, config, first)
            return Topic(self._create_topic(name, config)), True

    def queue(self, name: str, *, create: bool = True, **config: object) -> Queue:
        """`topic`, for a topic of jobs. Raises NotAQueue where there is a log of this name."""
        if (found := self.find(name)) is None:
            return self.topic(name, create=create, **{"type": "queue", **config}).queue()
        found.queue()
        return (self.topic(name, create=False, **config) if config else found).queue()

    def internal_topic(self, name: str, **config: object) -> Topic:
        """A topic of the engine's own: read like any other, listed with none, and outside of every limit."""
        assert name.startswith(OWN), "others are made by `topic`"
        with self._registry_lock:
            core = self._topics.get(name)
            if core is None:
                return Topic(self._make_topic(name, TopicConfig.make(config)))
            self._configure(core, TopicConfig.make(config, base=core.config))
            return Topic(core)

    def drop_internal_topic(self, name: str) -> None:
        """Drop a topic of the engine's own, if it is there."""
        assert name.startswith(OWN), "others are dropped by `drop`"
        with self._registry_lock:
            core = self._topics.get(name)
            if core is not None:
                self._drop_topic(core)

    def find(self, name: str) -> Topic | None:
        """The topic of this name, if there is one."""
        self._check_open()
        return None if (core := self._find_topic(name)) is None else Topic(core)

    def names(self) -> list[str]:
        """The names of all topics, sorted."""
        self._check_open()
        return sorted(name for name in list(self._topics) if not name.startswith(OWN))

    def topics(self, prefix: str = "") -> list[TopicInfo]:
        """What there is, by name. The engine's own are shown to whoever asks for their prefix."""
        self._check_open()
        cores = [core for core in self._topics.copy().values() if core.name.startswith(prefix)]
        found = [core for core in cores if prefix.startswith(OWN) or not core.name.startswith(OWN)]
        return [Topic(core).state() for core in sorted(found, key=_name_key)]

    def topics_cached(self) -> list[TopicInfo]:
        """`topics` as they were last left: nothing expires for it and nobody waits for a disk."""
        self._check_open()
        cores = [core for core in self._topics.copy().values() if not core.name.startswith(OWN)]
        return [core.info() for core in sorted(cores, key=_name_key)]

    def gaps(
        self,
        topic: str | None = None,
        from_ms: int | None = None,
        limit: int = GAPS_LIMIT_DEFAULT,
        *,
        after_seq: int = 0,
    ) -> GapEntries:
        """What was removed and why, oldest first: of one topic, also one that is gone, or of all; since a moment;
        behind the row with the seq `behind`."""
        self._check_open()
        return self._gap_log.read(topic, from_ms, limit, after_seq=after_seq)

    def groups_cached(self, count_max: int) -> list[tuple[str, GroupState]]:
        """Groups of consumers with their topics, the first so many by name, as they were last left."""
        self._check_open()
        cores = sorted((core for core in self._topics.copy().values() if core.groups), key=_name_key)
        found: list[tuple[str, GroupState]] = []
        for core in cores:
            with suppress(TopicNotFound):  # dropped meanwhile
                found += [(core.name, state) for state in groups.groups_cached(core, count_max - len(found))]
        return found

    @property
    def holds_broken(self) -> int:
        """How many holds of groups were broken since the directory was opened."""
        return self._context.removals.broken_holds

    @property
    def listener_failures(self) -> int:
        """How often a callback of `Topic.listen` or `Queue.listen` raised since the directory was opened."""
        return self._context.listener_failures

    def drop(self, name: str, *, if_empty: bool = False, actor: str | None = None) -> bool:
        """Remove a topic with all its records; False where there is none. A topic made again under its name starts
        anew."""
        return self.drop_with_routers(name, if_empty=if_empty, actor=actor) is not None

    def _drop_topic(self, topic: TopicState, actor: str | None = None) -> None:
        history = self._topics.get(HISTORY_TOPIC_PREFIX + topic.name)
        if history is not None:
            self._drop_topic(history)

        def gone() -> None:
            with topic.lock:
                topic.is_dropped = True
                index, held = topic.index, SizeCount(topic.index.count, topic.index.bytes)
                topic.quota.release(held.bytes)
                self._context.removals.add(topic, "drop", index.earliest, index.head, held, actor=actor)
            topic.notify_listeners()

        self._submit_control(topic, control_frames.TopicDelete(topic.name), gone)
        del self._topics[topic.name]
        self._context.queue_topics.discard(topic)
        self._router_manager.forget_topic(topic)
        self._context.tag_cache.drop(topic.id)
        self._context.health.forget_topic(topic.id)
        self._dropped.append(topic)  # its files go in the background: unlinking many would hold up every other topic

    def _find_topic(self, name: object) -> TopicState | None:
        return self._topics.get(name) if isinstance(name, str) else None

    def _create_topic(self, name: str, config: TopicConfig) -> TopicState:
        check_topic_name(name)
        config.check_for(name)
        limit = self._context.limits.topics_max
        if limit and len(self._topics) >= limit:  # looked at closely only where it could be reached
            used = len(self.names())
            if used >= limit:
                raise Throttled("topics", max=limit, used=used, asked=1)
        return self._make_topic(name, config)

    def _make_topic(self, name: str, config: TopicConfig) -> TopicState:
        # Where a sync failed, a topic of this name may be on disk: another one beside it would be the second.
        core = self._uncertain_topics.get(name) or TopicState(self._context, self._next_id, name, config)
        self._next_id = max(self._next_id, core.id + 1)
        core.shard.check_writable()
        try:
            self._submit_control(core, control_frames.TopicCreate(name, config.to_json()), lambda: None)
        except Latched:
            self._uncertain_topics[name] = core
            raise
        self._topics[name] = core
        if config.type == "queue":
            self._context.queue_topics.add(core)
        return core

    def _configure(self, topic: TopicState, config: TopicConfig) -> None:
        config.check_for(topic.name)
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
                    topic.index.roll_segment()  # what lies in files and what never does are segments of their own
                topic.config = config
                before = topic.index.evict_floor
                topic.enforce_caps()
                topic.schedule_maintenance()
                floor = topic.index.evict_floor if topic.index.evict_floor > before else 0

        self._submit_control(topic, control_frames.ConfigUpdate(topic.name, config.to_json()), apply)
        # On record before the next config can be: what this one took does not follow from the records alone once
        # later deletes or another config are replayed over them.
        retention.persist_floor(topic, max(floor, topic.index.evict_floor if topic.persists_floors else 0), always=True)

    def _submit_control(self, topic: TopicState, body: Body, apply: Callable[[], None]) -> None:
        self._check_writable()
        if not topic.name.startswith(OWN):  # its own it makes and keeps to the last moment
            topic.check_writable()
        with topic.lock:
            commit = ControlCommit(topic, body, apply)
            topic.submit(commit)
        commit.future.wait()

    @property
    def limits(self) -> EngineConfig:
        return self._context.limits

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards of the WAL: for whoever drives commits, and for their figures."""
        return self._context.shards

    @property
    def generation(self) -> int:
        """The number of the newest checkpoint: it rises with every one; 0 before the first."""
        return self._checkpoints.state.manifest_number

    @property
    def staging(self) -> StagingArea:
        """Chunks that are to become numbered batches."""
        self._check_open()
        return StagingArea(self._context.disk, self._context.root)

    def health(self) -> HealthState:
        """How background work goes, the age of the last checkpoint, and which stored bytes do not verify."""
        self._check_open()
        return self._checkpoints.health()

    @property
    def is_behind(self) -> bool:
        """Whether records are written faster than the engine's own threads move them from memory to segments. A writer
        that can wait should: memory holds what waits."""
        return bool(self._threads) and self._checkpoints.is_behind

    def corruption(self) -> tuple[Corruption, ...]:
        """Stored bytes that did not verify since the directory was opened, each place once."""
        return self._context.health.corrupt_places()

    # ── keeping ───────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Sync what waits, seal what is old, checkpoint when due: what threads do every `sync_interval_ms`."""
        self._check_writable()
        sound = [shard for shard in self._context.shards if not shard.is_latched]
        self._flush_gap_log()
        self._sync()
        for shard in sound:  # the ledger syncs too, and its failure is nobody's but ours
            shard.check_writable()
        if (error := self._run_maintenance()) is not None:
            raise error

    def _sync(self) -> None:
        retention.queue_moved_floors(self._context)
        heads = consistency.heads_before_sync(self._context)
        for shard in self._context.shards:
            shard.tick()
        consistency.on_interval_synced(heads)

    def _run_maintenance(self) -> Exception | None:
        """Every task that is due. One that fails keeps none of the others; returns the first error, where it is not the
        ledger's: what waits there is told later, and records need no ledger."""
        self._flush_gap_log()
        failed = self._run_task("history", self._flush_histories)
        if not self._router_manager.has_thread:
            failed = self._run_task("routers", self._router_manager.run_until_idle) or failed
        failed = self._run_task("expiry", self._expire) or failed
        if self._dropped:
            failed = self._run_task("erase", lambda: self._checkpoints.remove_dropped_topics(self._dropped)) or failed
        if self._checkpoints.is_due:
            failed = self._run_task("routers", self._router_manager.run_until_idle) or failed
            try:
                self._checkpoints.checkpoint(throttled=True)
            except Exception as error:  # counted and logged there
                self.report.add_background_error(error)
                failed = failed or error
        return failed

    def _expire(self) -> None:
        """Expire records and seal segments where that is due. One topic that fails keeps none of the others."""
        for error in retention.run_due_maintenance(self._context).values():
            raise error

    def _run_task(self, task: str, step: Callable[[], object]) -> Exception | None:
        """Do a step of background work. An error is logged, counted and returned."""
        try:
            step()
        except Exception as error:
            self.report.add_background_error(error)
            self._context.health.failed(task, error)
            return error
        self._context.health.succeeded(task)
        return None

    @property
    def context(self) -> EngineContext:
        """Disk, directory, clock and settings, for the parts that are built on the engine."""
        return self._context

    def start_background_task(self, task: str, step: Callable[[], object]) -> None:
        """Run a step every `sync_interval_ms` in a thread of its own, until `close`; no effect without threads."""
        if self._threads and not self._context.closing:
            self._threads.append(
                BackgroundThread(
                    lambda: self._run_task(task, step),
                    self._context.limits.sync_interval_ms,
                    self._checkpoints.urgency,
                    self.report.add_background_error,
                    f"tidelog {task} {self._context.root}",
                )
            )

    def _flush_histories(self) -> None:
        """Write down what happened to jobs. A journal that cannot be written waits, and keeps none of the others."""
        journals = self._context.dirty_histories
        failed: Exception | None = None
        if self._context.limits.queue_history_records:
            for core in self._context.queue_topics.copy():
                try:
                    if core.index.head > core.history_seq:  # jobs were put that no claim has come upon yet
                        get_queue_state(core).history.add_new_jobs()
                except Exception as error:
                    failed = failed or error
        for journal in journals.copy():
            journals.discard(journal)
            try:
                journal.flush()
            except Exception as error:
                failed = failed or error
                journals.add(journal)
        if failed is not None:
            raise failed

    def _flush_gap_log(self) -> None:
        self._run_task("ledger", self._gap_log.flush)

    def checkpoint(self) -> None:
        """Copy what only the WAL has into segments, and let the WAL forget it. On an error everything is as before."""
        self._check_writable()
        self._router_manager.run_until_idle()
        self._checkpoints.checkpoint()

    def _make_router_manager(self, *, threaded: bool) -> RouterManager:
        limit = self._context.limits.routers_max
        health = self._context.health

        def failed(error: Exception) -> None:
            self.report.add_background_error(error)
            health.failed("routers", error)

        return RouterManager(self._topics.values(), limit=limit, threaded=threaded, on_error=failed)

    def _list_topics(self) -> tuple[list[TopicState], int]:
        with self._registry_lock:
            # Its own first: what the ledger tells of up to here, every row behind this one reflects.
            cores = sorted(self._topics.values(), key=lambda core: not core.name.startswith(OWN))
            return cores, self._next_id

    def refresh(self) -> None:
        """Look again at what a writer beside this reader has done since."""
        if self._reopen is None:
            raise BadInput("only an engine that was opened for reading looks again; the writer knows")
        self._check_open()
        opened = self._reopen()
        with self._registry_lock:
            self._context.mmap_cache.clear()
            self._topics, self._next_id, self.report = opened.topics, opened.next_topic_id, opened.report
            self._context = opened.shared
            self._context.topics = self
            self._gap_log = GapLog(self._context, self)
            self._router_manager = self._make_router_manager(threaded=False)

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Make everything acknowledged durable and let go of the directory. Closing twice is harmless."""
        if self._context.closed:
            return
        for keeper in self._threads:
            keeper.stop()
        sound = [shard for shard in self._context.shards if not shard.is_latched]
        self._flush_gap_log()
        try:
            self._router_manager.close()
            self._flush_histories()
            self._context.closing = True
            for core in self._list_topics()[0]:
                with core.lock:  # whoever was staging a write is done; nobody begins another
                    pass
            while any(shard.commit_pending() for shard in self._context.shards):
                pass
            self._flush_histories()  # steps of what was pumped, and jobs that were put meanwhile
            if self._checkpoints.needs_final_checkpoint():
                self._checkpoints.checkpoint(final=True)
            self._run_task("erase", lambda: self._checkpoints.remove_dropped_topics(self._dropped))
        finally:
            self._context.closed = True
            self._close_shards()
        for shard in sound:  # the ledger syncs too, and its failure is nobody's but ours
            shard.check_writable()

    def _close_shards(self) -> None:
        failed: Error | None = None
        try:
            for shard in self._context.shards:
                try:
                    shard.close()
                except Error as error:
                    failed = failed or error
        finally:
            for core in self._topics.values():
                core.notify_listeners()
            self._context.mmap_cache.clear()
            if self._lock is not None:
                self._lock.release()
        if failed is not None:
            raise failed

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: it is closed there, using it raises Forked, and the files stay the parent's."""
        shared = self._context
        shared.opener_pid, shared.closing, shared.closed = pid, True, True
        shared.mmap_cache.clear_without_lock()
        beside = (
            shared.mmap_cache,
            shared.quota,
            shared.tag_cache,
            shared.removals,
            shared.buffer_pool,
            self._gap_log,
            self._router_manager,
        )
        fork.poison_locks(shared.root, pid, self, shared, *beside, self._checkpoints, self._checkpoints.urgency)
        for shard in shared.shards:
            shard.on_fork(pid)
        for core in list(self._topics.values()):
            core.on_fork(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
