"""The engine: one directory of topics, one process that writes it, any number that read.

This class is the door; what happens behind it is one verb a module (append, read, delete,
checkpoint, recovery). Every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Self

from tidelog.disk import fork
from tidelog.disk.interrupts import deferring
from tidelog.disk.seam import Lock as DirectoryLock
from tidelog.engine import append, groups, opening, retention, strong
from tidelog.engine.append import Records
from tidelog.engine.config import OWN, EngineConfig, TopicConfig, check_topic_name
from tidelog.engine.control import Control
from tidelog.engine.core import Core, Shared
from tidelog.engine.groups import GroupState
from tidelog.engine.health import Corruption, HealthState
from tidelog.engine.ledger import LIMIT, Gaps, Ledger
from tidelog.engine.parts import Weight
from tidelog.engine.queues.door import Queue
from tidelog.engine.queues.doors import HISTORY
from tidelog.engine.queues.state import state_of
from tidelog.engine.report import Report
from tidelog.engine.results import TopicState
from tidelog.engine.routing.door import Routers
from tidelog.engine.routing.routing import Routing
from tidelog.engine.staging import Staging
from tidelog.engine.topic import Topic
from tidelog.engine.upkeep import Keeper, Upkeep, close_at_exit, keepers
from tidelog.errors import BadInput, Error, Latched, ReadOnly, Throttled, TopicExists, TopicNotFound
from tidelog.formats import bodies
from tidelog.formats.bodies import Body
from tidelog.wal import Shard


@deferring("topic", "configure", "ensure", "own", "disown", "gaps", "tick", "checkpoint", "refresh", "close")
class Engine(Routers):
    def __init__(self, opened: opening.Opened, *, threads: bool) -> None:
        self._shared: Shared = opened.shared
        self._shared.doors = self
        self._lock: DirectoryLock | None = opened.lock
        self._reopen = opened.again
        self._topics: dict[str, Core] = opened.topics
        self._next_id = opened.next_topic_id
        self.report: Report = opened.report
        self._unsure: dict[str, Core] = {}  # whose making was written and not synced
        self._dropped: list[Core] = []  # topics whose files are still to be removed
        self._registry = Lock()  # held over the whole of create, configure and drop
        self._shared.queues |= {core for core in self._topics.values() if core.config.type == "queue"}
        self._routing = self._routed(threaded=False)
        self._ledger = Ledger(self._shared, self)
        self._upkeep = Upkeep(self._shared, opened.history, self._listed, self.report)
        for core in self._topics.values() if self._shared.shards else ():
            with core.lock:
                core.plan()
        self._keepers: list[Keeper] = []
        fork.guard(self)
        if threads and self._shared.shards:
            self._keepers = keepers(self._shared, self._sync, self._keep, self._upkeep.hurry, self.report)
            for shard in self._shared.shards:
                shard.start()
            self._routing = self._routed(threaded=True)
            close_at_exit(self.close)

    # ── topics ────────────────────────────────────────────────────────────────────────────────

    def topic(self, name: str, *, create: bool = True, **config: object) -> Topic:
        """The topic of this name, made where there is none. Config fields that are given are set, others stay."""
        with self._registry:
            core = self._find(name)
            if core is None:
                if not create:
                    raise TopicNotFound(name)
                return Topic(self._create(name, TopicConfig.make(config)))
            if config:
                self._configure(core, TopicConfig.make(config, base=core.config))
            return Topic(core)

    def configure(self, name: str, fields: Mapping[str, object]) -> tuple[Topic, bool]:
        """Create or configure as a whole: fields that are not given take their defaults. Says whether it was made."""
        check_topic_name(name)
        with self._registry:
            core = self._find(name)
            if core is None:
                return Topic(self._create(name, TopicConfig.make(fields))), True
            self._configure(core, TopicConfig.make(fields))
            return Topic(core), False

    def ensure(self, name: str, config: TopicConfig, first: Records) -> tuple[Topic, bool]:
        """The topic of this name, made with `config` where there is none; says whether it was. Where the write that
        makes it would be refused, nothing is made and what it would raise is raised."""
        with self._registry:
            core = self._find(name)
            if core is not None:
                return Topic(core), False
            append.admit_first(self._shared, name, config, first)
            return Topic(self._create(name, config)), True

    def queue(self, name: str, *, create: bool = True, **config: object) -> Queue:
        """`topic`, for a topic of jobs. Raises NotAQueue where there is a log of this name."""
        if (found := self.find(name)) is None:
            return self.topic(name, create=create, **{"type": "queue", **config}).queue()
        found.queue()
        return (self.topic(name, create=False, **config) if config else found).queue()

    def own(self, name: str, **config: object) -> Topic:
        """A topic of the engine's own: read like any other, listed with none, and outside of every limit."""
        assert name.startswith(OWN), "others are made by `topic`"
        with self._registry:
            core = self._topics.get(name)
            if core is None:
                return Topic(self._make(name, TopicConfig.make(config)))
            self._configure(core, TopicConfig.make(config, base=core.config))
            return Topic(core)

    def disown(self, name: str) -> None:
        """Drop a topic of the engine's own, if it is there."""
        assert name.startswith(OWN), "others are dropped by `drop`"
        with self._registry:
            core = self._topics.get(name)
            if core is not None:
                self._drop(core)

    def find(self, name: str) -> Topic | None:
        """The topic of this name, if there is one."""
        self._check()
        return None if (core := self._find(name)) is None else Topic(core)

    def names(self) -> list[str]:
        """The names of all topics, sorted."""
        self._check()
        return sorted(name for name in list(self._topics) if not name.startswith(OWN))

    def topics(self, prefix: str = "") -> list[TopicState]:
        """What there is, by name. The engine's own are shown to whoever asks for their prefix."""
        self._check()
        cores = [core for core in self._topics.copy().values() if core.name.startswith(prefix)]
        found = [core for core in cores if prefix.startswith(OWN) or not core.name.startswith(OWN)]
        return [Topic(core).state() for core in sorted(found, key=_by_name)]

    def glance(self) -> list[TopicState]:
        """`topics` as they were last left: nothing expires for it and nobody waits for a disk."""
        self._check()
        cores = [core for core in self._topics.copy().values() if not core.name.startswith(OWN)]
        return [core.state() for core in sorted(cores, key=_by_name)]

    def gaps(
        self, topic: str | None = None, from_ms: int | None = None, limit: int = LIMIT, *, behind: int = 0
    ) -> Gaps:
        """What was removed and why, oldest first: of one topic, also one that is gone, or of all; since a moment;
        behind the row with the seq `behind`."""
        self._check()
        return self._ledger.rows(topic, from_ms, limit, behind=behind)

    def glance_groups(self, most: int) -> list[tuple[str, GroupState]]:
        """Groups of consumers with their topics, the first so many by name, as they were last left."""
        self._check()
        cores = sorted((core for core in self._topics.copy().values() if core.groups), key=_by_name)
        found: list[tuple[str, GroupState]] = []
        for core in cores:
            with suppress(TopicNotFound):  # dropped meanwhile
                found += [(core.name, state) for state in groups.glance(core, most - len(found))]
        return found

    @property
    def holds_broken(self) -> int:
        """How many holds of groups were broken since the directory was opened."""
        return self._shared.notes.broken

    @property
    def listener_failures(self) -> int:
        """How often a callback of `Topic.listen` or `Queue.listen` raised since the directory was opened."""
        return self._shared.listener_failures

    def drop(self, name: str, *, if_empty: bool = False, actor: str | None = None) -> bool:
        """Remove a topic with all its records; False where there is none. A topic made again under its name starts
        anew."""
        return self.remove(name, if_empty=if_empty, actor=actor) is not None

    def _drop(self, core: Core, actor: str | None = None) -> None:
        history = self._topics.get(HISTORY + core.name)
        if history is not None:
            self._drop(history)

        def gone() -> None:
            with core.lock:
                core.dropped = True
                index, held = core.index, Weight(core.index.count, core.index.bytes)
                core.quota.give(held.size)
                self._shared.notes.add(core, "drop", index.earliest, index.head, held, actor=actor)
            core.wake()

        self._control(core, bodies.TopicDelete(core.name), gone)
        del self._topics[core.name]
        self._shared.queues.discard(core)
        self._routing.forget(core)
        self._shared.tags.drop(core.id)
        self._shared.health.forget(core.id)
        self._dropped.append(core)  # its files go in the background: unlinking many would hold up every other topic

    def _find(self, name: object) -> Core | None:
        return self._topics.get(name) if isinstance(name, str) else None

    def _create(self, name: str, config: TopicConfig) -> Core:
        check_topic_name(name)
        config.check_for(name)
        limit = self._shared.limits.topics_max
        if limit and len(self._topics) >= limit:  # looked at closely only where it could be reached
            used = len(self.names())
            if used >= limit:
                raise Throttled("topics", max=limit, used=used, asked=1)
        return self._make(name, config)

    def _make(self, name: str, config: TopicConfig) -> Core:
        # Where a sync failed, a topic of this name may be on disk: another one beside it would be the second.
        core = self._unsure.get(name) or Core(self._shared, self._next_id, name, config)
        self._next_id = max(self._next_id, core.id + 1)
        core.shard.check()
        try:
            self._control(core, bodies.TopicCreate(name, config.to_json()), lambda: None)
        except Latched:
            self._unsure[name] = core
            raise
        self._topics[name] = core
        if config.type == "queue":
            self._shared.queues.add(core)
        return core

    def _configure(self, core: Core, config: TopicConfig) -> None:
        config.check_for(core.name)
        if config.type != core.config.type:
            raise TopicExists(
                core.name,
                reason=f"it is a {core.config.type}, not a {config.type}, and a type never changes",
                detail={"existing_type": core.config.type, "requested_type": config.type},
            )
        if config == core.config:
            return

        floor = 0

        def apply() -> None:
            nonlocal floor
            with core.lock:
                if (config.durability == "ephemeral") != core.ephemeral:
                    core.index.roll()  # what lies in files and what never does are segments of their own
                core.config = config
                before = core.index.evict_floor
                core.keep_caps()
                core.plan()
                floor = core.index.evict_floor if core.index.evict_floor > before else 0

        self._control(core, bodies.ConfigUpdate(core.name, config.to_json()), apply)
        # On record before the next config can be: what this one took does not follow from the records alone once
        # later deletes or another config are replayed over them.
        retention.harden(core, max(floor, core.index.evict_floor if core.guarding else 0), always=True)

    def _control(self, core: Core, body: Body, apply: Callable[[], None]) -> None:
        self._check_writable()
        if not core.name.startswith(OWN):  # its own it makes and keeps to the last moment
            core.check_writable()
        with core.lock:
            commit = Control(core, body, apply)
            core.submit(commit)
        commit.token.wait()

    @property
    def limits(self) -> EngineConfig:
        return self._shared.limits

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards of the WAL: for whoever drives commits, and for their figures."""
        return self._shared.shards

    @property
    def generation(self) -> int:
        """The number of the newest checkpoint: it rises with every one; 0 before the first."""
        return self._upkeep.history.number

    @property
    def staging(self) -> Staging:
        """Chunks that are to become numbered batches."""
        self._check()
        return Staging(self._shared.disk, self._shared.root)

    def health(self) -> HealthState:
        """How background work goes, the age of the last checkpoint, and which stored bytes do not verify."""
        self._check()
        return self._upkeep.health()

    @property
    def is_behind(self) -> bool:
        """Whether records are written faster than the engine's own threads move them from memory to segments. A writer
        that can wait should: memory holds what waits."""
        return bool(self._keepers) and self._upkeep.is_behind

    def corruption(self) -> tuple[Corruption, ...]:
        """Stored bytes that did not verify since the directory was opened, each place once."""
        return self._shared.health.places()

    # ── keeping ───────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Sync what waits, seal what is old, checkpoint when due: what threads do every `sync_interval_ms`."""
        self._check_writable()
        sound = [shard for shard in self._shared.shards if not shard.latched]
        self._tell()
        self._sync()
        for shard in sound:  # the ledger syncs too, and its failure is nobody's but ours
            shard.check()
        if (error := self._keep()) is not None:
            raise error

    def _sync(self) -> None:
        retention.write_floors(self._shared)
        heads = strong.before_interval(self._shared)
        for shard in self._shared.shards:
            shard.tick()
        strong.after_interval(heads)

    def _keep(self) -> Exception | None:
        """Every task that is due. One that fails keeps none of the others; returns the first error, where it is not the
        ledger's: what waits there is told later, and records need no ledger."""
        self._tell()
        failed = self._attempt("history", self._note)
        if not self._routing.threaded:
            failed = self._attempt("routers", self._routing.settle) or failed
        failed = self._attempt("expiry", self._expire) or failed
        if self._dropped:
            failed = self._attempt("erase", lambda: self._upkeep.erase(self._dropped)) or failed
        if self._upkeep.is_due:
            failed = self._attempt("routers", self._routing.settle) or failed
            try:
                self._upkeep.checkpoint(gently=True)
            except Exception as error:  # counted and logged there
                self.report.trouble(error)
                failed = failed or error
        return failed

    def _expire(self) -> None:
        """Expire records and seal segments where that is due. One topic that fails keeps none of the others."""
        for error in retention.keep(self._shared).values():
            raise error

    def _attempt(self, task: str, step: Callable[[], object]) -> Exception | None:
        """Do a step of background work. An error is logged, counted and returned."""
        try:
            step()
        except Exception as error:
            self.report.trouble(error)
            self._shared.health.failed(task, error)
            return error
        self._shared.health.succeeded(task)
        return None

    def _note(self) -> None:
        """Write down what happened to jobs. A journal that cannot be written waits, and keeps none of the others."""
        journals = self._shared.journals
        failed: Exception | None = None
        if self._shared.limits.queue_history_records:
            for core in self._shared.queues.copy():
                try:
                    if core.index.head > core.told:  # jobs were put that no claim has come upon yet
                        state_of(core).journal.look()
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

    def _tell(self) -> None:
        self._attempt("ledger", self._ledger.flush)

    def checkpoint(self) -> None:
        """Copy what only the WAL has into segments, and let the WAL forget it. On an error everything is as before."""
        self._check_writable()
        self._routing.settle()
        self._upkeep.checkpoint()

    def _routed(self, *, threaded: bool) -> Routing:
        limit = self._shared.limits.routers_max
        health = self._shared.health

        def failed(error: Exception) -> None:
            self.report.trouble(error)
            health.failed("routers", error)

        return Routing(self._topics.values(), limit=limit, threaded=threaded, troubles=failed)

    def _listed(self) -> tuple[list[Core], int]:
        with self._registry:
            # Its own first: what the ledger tells of up to here, every row behind this one reflects.
            cores = sorted(self._topics.values(), key=lambda core: not core.name.startswith(OWN))
            return cores, self._next_id

    def refresh(self) -> None:
        """Look again at what a writer beside this reader has done since."""
        if self._reopen is None:
            raise BadInput("only an engine that was opened for reading looks again; the writer knows")
        self._check()
        opened = self._reopen()
        with self._registry:
            self._shared.maps.clear()
            self._topics, self._next_id, self.report = opened.topics, opened.next_topic_id, opened.report
            self._shared = opened.shared
            self._shared.doors = self
            self._ledger = Ledger(self._shared, self)
            self._routing = self._routed(threaded=False)

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Make everything acknowledged durable and let go of the directory. Closing twice is harmless."""
        if self._shared.closed:
            return
        for keeper in self._keepers:
            keeper.end()
        sound = [shard for shard in self._shared.shards if not shard.latched]
        self._tell()
        try:
            self._routing.close()
            self._note()
            self._shared.closing = True
            for core in self._listed()[0]:
                with core.lock:  # whoever was staging a write is done; nobody begins another
                    pass
            while any(shard.pump() for shard in self._shared.shards):
                pass
            self._note()  # steps of what was pumped, and jobs that were put meanwhile
            if self._upkeep.has_last_words():
                self._upkeep.checkpoint(final=True)
            self._attempt("erase", lambda: self._upkeep.erase(self._dropped))
        finally:
            self._shared.closed = True
            self._shut()
        for shard in sound:  # the ledger syncs too, and its failure is nobody's but ours
            shard.check()

    def _shut(self) -> None:
        failed: Error | None = None
        try:
            for shard in self._shared.shards:
                try:
                    shard.close()
                except Error as error:
                    failed = failed or error
        finally:
            for core in self._topics.values():
                core.wake()
            self._shared.maps.clear()
            if self._lock is not None:
                self._lock.release()
        if failed is not None:
            raise failed

    def forked(self, pid: int) -> None:
        """Give up in a forked child: it is closed there, using it raises Forked, and the files stay the parent's."""
        shared = self._shared
        shared.opener, shared.closing, shared.closed = pid, True, True
        shared.maps.forget()
        beside = (shared.maps, shared.quota, shared.tags, shared.notes, shared.scratch, self._ledger, self._routing)
        fork.poison(shared.root, pid, self, shared, *beside, self._upkeep, self._upkeep.hurry)
        for shard in shared.shards:
            shard.forked(pid)
        for core in list(self._topics.values()):
            core.forked(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._shared.closed:
            raise self._shared.gone("nothing was done")

    def _check_writable(self) -> None:
        self._check()
        if not self._shared.shards:
            raise ReadOnly(f"{self._shared.root} was opened for reading; nothing was written")


def _by_name(core: Core) -> bytes:
    return core.name.encode()
