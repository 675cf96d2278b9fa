"""`tidelog.open` and `Database`: the topics, queues, routers and channels of one directory.

A `Database` has an `Engine` (topics, queues, routers) and, from the first use on, a `ChannelManager`, and delegates to
them. The server and the tools of this package use both parts directly through `engine_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from types import TracebackType
from typing import Any, Self

from tidelog.channels import rules
from tidelog.channels.channel import Channel
from tidelog.channels.manager import ChannelManager, Hook, authenticate
from tidelog.channels.rules import OPERATOR, ChannelLimits, Operator, User
from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.interface import Disk
from tidelog.disk.interrupts import defer_signals_in
from tidelog.engine.background import close_at_exit
from tidelog.engine.config import EngineConfig
from tidelog.engine.engine import Engine
from tidelog.engine.gap_log import GAPS_LIMIT_DEFAULT, GapEntries
from tidelog.engine.health import Corruption, HealthState
from tidelog.engine.queues.queue import Queue
from tidelog.engine.results import Progress, RecoveryReport, TopicInfo
from tidelog.engine.routing.router import Guarantee, RouterState
from tidelog.engine.startup import open_directory
from tidelog.engine.topic import Topic


class _Channels:
    """The channel manager of an engine, restored on first use."""

    def __init__(self, engine: Engine, limits: ChannelLimits | None, hook: Hook | None) -> None:
        self._engine, self._limits, self.hook = engine, limits, hook
        self._lock = Lock()
        self._manager: ChannelManager | None = None
        fork.register(self)

    def on_fork(self, pid: int) -> None:
        fork.poison_locks(self._engine.context.root, pid, self)

    def manager(self) -> ChannelManager:
        self._check_open()
        with self._lock:
            self._check_open()
            if self._manager is None:
                context = self._engine.context
                self._manager = ChannelManager(
                    context.disk,
                    context.root,
                    context.clock,
                    limits=self._limits,
                    hook=self.hook,
                    read_only=not context.shards,
                )
                # A thread of their own: syncs of the WAL, checkpoints and syncs of channels do not wait for each other.
                if self._engine.start_background_task("channels", self.tick):
                    close_at_exit(self.close)  # before the engine, which registered itself first
            return self._manager

    def _check_open(self) -> None:
        if self._engine.context.closed:
            raise self._engine.context.closed_error("nothing was done")

    def tick(self) -> None:
        manager = self._manager
        if manager is not None and not manager.read_only:
            manager.tick()

    def close(self) -> None:
        """Close the manager; the next use restores it. No effect once the engine is closed, as in a forked child."""
        if self._engine.context.closed:
            return
        with self._lock:
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


@defer_signals_in("channel", "tick", "refresh", "close")
class Database:
    """Topics, queues, routers and channels of one directory. Every method may be called from any thread."""

    def __init__(self, engine: Engine, *, limits: ChannelLimits | None, hook: Hook | None) -> None:
        self._engine = engine
        self._channels = _Channels(engine, limits, hook)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── topics and queues ─────────────────────────────────────────────────────────────────────

    def topic(self, name: str, *, create: bool = True, **config: object) -> Topic:
        """Return the topic of this name; create it if there is none. Given config fields are set, others stay."""
        return self._engine.topic(name, create=create, **config)

    def configure(self, name: str, fields: Mapping[str, object]) -> tuple[Topic, bool]:
        """Create or configure a topic as a whole: fields that are not given take their defaults. Return the topic and
        whether it was created."""
        return self._engine.configure(name, fields)

    def queue(self, name: str, *, create: bool = True, **config: object) -> Queue:
        """`topic` for a queue. Raises NotAQueue if there is a topic of another type with this name."""
        return self._engine.queue(name, create=create, **config)

    def find(self, name: str) -> Topic | None:
        """Return the topic of this name, or None."""
        return self._engine.find(name)

    def names(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return self._engine.names()

    def topics(self, prefix: str = "") -> list[TopicInfo]:
        """Return the state of all topics, by name. Internal topics are included if `prefix` starts with theirs."""
        return self._engine.topics(prefix)

    def drop(self, name: str, *, if_empty: bool = False, actor: str | None = None) -> bool:
        """Remove a topic with all its records; return False if there is none."""
        return self._engine.drop(name, if_empty=if_empty, actor=actor)

    def gaps(
        self,
        topic: str | None = None,
        from_ms: int | None = None,
        limit: int = GAPS_LIMIT_DEFAULT,
        *,
        after_seq: int = 0,
    ) -> GapEntries:
        """Return which records were removed and why, oldest first: of one topic, also a dropped one, or of all; since a
        time; after the entry with the seq `after_seq`."""
        return self._engine.gaps(topic, from_ms, limit, after_seq=after_seq)

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
        """
        return self._engine.router(
            name,
            source,
            dest,
            preserve_node=preserve_node,
            preserve_tag=preserve_tag,
            create_dest=create_dest,
            filter=filter,
            allow_cycle=allow_cycle,
            guarantee=guarantee,
        )

    def find_router(self, name: str, *, fresh: bool = True) -> RouterState | None:
        """Return the router of this name, or None; `fresh`: after it has copied all records of its source."""
        return self._engine.find_router(name, fresh=fresh)

    def routers(self, prefix: str = "", source: str | None = None, dest: str | None = None) -> list[RouterState]:
        """Return the routers by name: those that start with `prefix`, from `source`, to `dest`."""
        return self._engine.routers(prefix, source, dest)

    def drop_router(self, name: str) -> bool:
        """Drop a router; return False if there is none. Its copies stay. On return the drop survives a crash."""
        return self._engine.drop_router(name)

    # ── channels ──────────────────────────────────────────────────────────────────────────────

    @property
    def channels(self) -> ChannelManager:
        """All channels; restored on first use."""
        return self._channels.manager()

    def channel(self, name: str, *, user: User = OPERATOR, token: str | None = None) -> Channel:
        """Return a handle of a channel for `user`. With a hook, the hook authenticates the user by `token`."""
        rules.check_channel(name)
        manager, hook = self._channels.manager(), self._channels.hook
        if not isinstance(user, Operator):
            rules.check_user(user)
            if hook is not None and manager.limits.auth:
                user = authenticate(hook, manager.metrics, user, token)
        return Channel(manager, name, user)

    # ── state ─────────────────────────────────────────────────────────────────────────────────

    @property
    def report(self) -> RecoveryReport:
        """What recovery found and did, and errors of background work since."""
        return self._engine.report

    @property
    def limits(self) -> EngineConfig:
        """The settings that the directory was opened with."""
        return self._engine.limits

    def health(self) -> HealthState:
        """Return the state of background work, the age of the last checkpoint, and damage found."""
        return self._engine.health()

    def corruption(self) -> tuple[Corruption, ...]:
        """Return stored bytes that did not verify since the directory was opened, each place once."""
        return self._engine.corruption()

    # ── maintenance ───────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Run the background work that is due; for a database opened without threads."""
        try:
            self._engine.tick()
        finally:
            self._channels.tick()

    def checkpoint(self) -> None:
        """Copy records that only the WAL has into segments, and truncate the WAL. On an error nothing has changed."""
        self._engine.checkpoint()

    def refresh(self) -> None:
        """Of a read-only database: read again what the writer has written since."""
        self._engine.refresh()
        self._channels.close()

    def close(self) -> None:
        """Make everything acknowledged durable and release the directory. Closing twice has no effect."""
        if self._engine.context.closed:
            return
        try:
            self._channels.close()
        finally:
            self._engine.close()


def engine_of(database: Database) -> Engine:
    """Return the engine of a database, for the server and the tools of this package."""
    return database._engine


def open(
    path: str,
    *,
    read_only: bool = False,
    disk: Disk | None = None,
    clock: Clock | None = None,
    config: EngineConfig | None = None,
    accept_loss: bool = False,
    threads: bool = True,
    progress: Progress | None = None,
    channels: ChannelLimits | None = None,
    hook: Hook | None = None,
    **settings: Any,
) -> Database:
    """Open the directory `path`, create it if it does not exist, and recover from a crash.

    One process writes: a second one raises Locked and changes nothing. Any number of processes may open it `read_only`
    beside the writer; they see the state at the time of opening, and `refresh` reads it again.

    Args:
        config, settings: the settings of `EngineConfig`, as an object or by name.
        accept_loss: continue if acknowledged records were lost to damage, which raises otherwise.
        threads: without them no background work runs; call `tick`.
        progress: called as `progress(name, done, total)` during long work.
        channels: limits of channels.
        hook: a callable that authenticates users and validates payloads of channels.
    """
    opened = open_directory(
        path,
        read_only=read_only,
        disk=disk,
        clock=clock,
        config=config,
        accept_loss=accept_loss,
        progress=progress,
        settings=settings,
    )
    try:
        return Database(Engine(opened, threads=threads), limits=channels, hook=hook)
    except BaseException:
        opened.abandon()
        raise
