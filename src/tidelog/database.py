"""`tidelog.open` and `Database`: the topics, queues, routers and channels of one directory.

A `Database` has an `Engine` (topics, queues, routers) and, from the first use on, a `ChannelManager`. Its methods that
only call the engine are declared and documented there. The server and the tools of this package use both parts
directly through `engine_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from os import PathLike
from threading import Lock
from typing import Concatenate, ParamSpec, Self, TypeVar, Unpack

from tidelog.addresses import path_text
from tidelog.channels import rules
from tidelog.channels.channel import Channel
from tidelog.channels.manager import ChannelManager, Hook, authenticate
from tidelog.channels.rules import OPERATOR, ChannelLimits, Operator, User
from tidelog.channels.store import CHANNELS_DIR
from tidelog.clock import Clock
from tidelog.disk import process
from tidelog.disk.interface import Disk, join
from tidelog.disk.process import defer_signals_in
from tidelog.disk.segment_store import SegmentStore
from tidelog.engine.background import close_at_exit
from tidelog.engine.backup import SourceFile, create_backup
from tidelog.engine.backup_target import BackupInfo, no_progress
from tidelog.engine.config import EngineConfig, EngineSettings, TopicConfig, TopicFields, check_deliveries
from tidelog.engine.engine import Engine
from tidelog.engine.queues import Queue
from tidelog.engine.results import Progress, RecoveryReport
from tidelog.engine.startup import open_directory
from tidelog.engine.topic import Topic

P = ParamSpec("P")
T = TypeVar("T")


class _Channels:
    """The channel manager of an engine, restored on first use."""

    def __init__(self, engine: Engine, limits: ChannelLimits | None, hook: Hook | None) -> None:
        self._engine, self._limits, self.hook = engine, limits, hook
        self._lock = Lock()
        self._manager: ChannelManager | None = None
        process.register(self)

    def on_fork(self, pid: int) -> None:
        process.poison_locks(self._engine.context.root, pid, self)

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

    def list_files(self) -> Iterator[list[SourceFile]]:
        """The files of all channels, for a backup."""
        context = self._engine.context
        if context.disk.stat(join(context.root, CHANNELS_DIR)) is not None:
            yield from self.manager().list_files()

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


def _of_engine(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Return a method of `Database` that calls this one of its engine: same signature, same docstring."""

    @wraps(method)
    def call(self: Database, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._engine, *args, **kwargs)

    return call


@defer_signals_in("channel", "tick", "refresh", "close")
class Database:
    """Topics, queues, routers and channels of one directory. Every method may be called from any thread."""

    def __init__(self, engine: Engine, *, limits: ChannelLimits | None, hook: Hook | None) -> None:
        self._engine = engine
        self._channels = _Channels(engine, limits, hook)

    def __repr__(self) -> str:
        context, count = self._engine.context, self._engine.topic_count
        state = "closed" if context.closed else f"{count} topic{'s' * (count != 1)}"
        return f"<database {context.root!r}, {state}>"

    def __contains__(self, name: object) -> bool:
        """Whether there is a topic of this name."""
        return isinstance(name, str) and self._engine.find(name) is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── topics, queues, routers, state ────────────────────────────────────────────────────────

    def topic(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> Topic:
        """Return the topic of this name; create it if there is none. Given config fields are set, others stay.
        `max_deliveries` of a queue needs a `dead_letter`.

        >>> log.topic("events", ttl_ms=timedelta(days=7), durability="fsync")
        <topic 'events', head 0>
        """
        return self._engine.topic(name, create=create, **config)

    def configure(self, name: str, fields: Mapping[str, object]) -> tuple[Topic, bool]:
        """Create or configure a topic as a whole: fields that are not given take their defaults. Return the topic and
        whether it was created. `max_deliveries` of a queue needs a `dead_letter`.

        >>> topic, created = log.configure("events", {"cap_records": 1000})
        >>> created, topic.config.cap_records
        (True, 1000)
        """
        check_deliveries(TopicConfig.make(fields))
        return self._engine.configure(name, fields)

    def queue(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> Queue:
        """`topic` for a queue. Raises NotAQueue if there is a topic of another type with this name.

        >>> log.queue("jobs", lease_ms=timedelta(minutes=1)).put("hello").seqs
        range(1, 2)
        """
        return self._engine.queue(name, create=create, **config)

    find = _of_engine(Engine.find)
    names = _of_engine(Engine.names)
    topics = _of_engine(Engine.topics)
    drop = _of_engine(Engine.drop)
    gaps = _of_engine(Engine.gaps)
    router = _of_engine(Engine.router)
    find_router = _of_engine(Engine.find_router)
    routers = _of_engine(Engine.routers)
    drop_router = _of_engine(Engine.drop_router)
    health = _of_engine(Engine.health)
    corruption = _of_engine(Engine.corruption)
    checkpoint = _of_engine(Engine.checkpoint)
    rewrite = _of_engine(Engine.rewrite)
    erase = _of_engine(Engine.erase)
    erasures = _of_engine(Engine.erasures)
    verify_erasures = _of_engine(Engine.verify_erasures)
    tier_status = _of_engine(Engine.tier_status)
    segment_places = _of_engine(Engine.segment_places)
    relocate = _of_engine(Engine.relocate)
    recall = _of_engine(Engine.recall)
    claim_cold_store = _of_engine(Engine.claim_cold_store)

    @property
    def report(self) -> RecoveryReport:
        """What recovery found and did, and errors of background work since.

        >>> log.report.clean
        True
        """
        return self._engine.report

    @property
    def limits(self) -> EngineConfig:
        """The settings that the directory was opened with.

        >>> log.limits.batch_records_max
        10000
        """
        return self._engine.limits

    # ── channels ──────────────────────────────────────────────────────────────────────────────

    @property
    def channels(self) -> ChannelManager:
        """All channels; restored on first use.

        >>> log.channels.channel_names()
        ['!support@example.org', '!tasks@example.org']
        """
        return self._channels.manager()

    def channel(self, name: str, *, user: User = OPERATOR, token: str | None = None) -> Channel:
        """Return a handle of a channel for `user`. With a hook, the hook authenticates the user by `token`.

        >>> log.channel("!support@example.org", user="ann@example.org").members()
        ('ann@example.org',)
        """
        rules.check_channel(name)
        manager, hook = self._channels.manager(), self._channels.hook
        if not isinstance(user, Operator):
            rules.check_user(user)
            if hook is not None and manager.limits.auth:
                user = authenticate(hook, manager.metrics, user, token)
        return Channel(manager, name, user)

    # ── backup ────────────────────────────────────────────────────────────────────────────────

    def backup(
        self,
        target: str | PathLike[str],
        *,
        incremental: bool = False,
        link: bool = True,
        accept_damage: bool = False,
        rate_bytes_per_s: int | None = None,
        progress: Progress = no_progress,
    ) -> BackupInfo:
        """Back up topics, queues, routers, groups, the gap log and channels while they are in use.

        When it raises, the target has no new backup and the database is as before. `tidelog.backup` has the functions
        that list, verify, prune and restore backups.

        Args:
            target: a directory outside of this one, or an address such as `s3://bucket/prefix`.
            incremental: read and store only what changed since the newest backup of the target.
            link: link files that never change, instead of copying them, if the target is on the same file system.
            accept_damage: back up files that do not verify, and name them in the result, instead of raising Corrupt.
            rate_bytes_per_s: read no more than this, so that writers have the rest of the disk.
            progress: called as `progress(name, done, total)`, in bytes.

        >>> made = log.backup("backups")
        >>> made.topics, made.channels
        ({'orders': 3, 'mails-dead': 0, 'mails': 2}, 2)
        """
        return create_backup(
            self._engine,
            path_text(target, "the target of a backup"),
            incremental=incremental,
            link=link,
            accept_damage=accept_damage,
            rate_bytes_per_s=rate_bytes_per_s,
            progress=progress,
            list_channels=self._channels.list_files,
        )

    # ── maintenance ───────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Run the background work that is due; for a database opened without threads.

        >>> log.tick()
        """
        try:
            self._engine.tick()
        finally:
            self._channels.tick()

    def refresh(self) -> None:
        """Of a read-only database: read again what the writer has written since.

        >>> reader = tidelog.open("data", read_only=True, disk=disk, clock=clock)
        >>> reader.refresh()
        >>> reader.topic("orders", create=False).head_seq
        3
        """
        self._engine.refresh()
        self._channels.close()

    def close(self) -> None:
        """Make everything acknowledged durable and release the directory. Closing twice has no effect.

        >>> log.close()
        >>> log
        <database 'data', closed>
        """
        if self._engine.context.closed:
            return
        try:
            self._channels.close()
        finally:
            self._engine.close()


def engine_of(database: Database) -> Engine:
    """Return the engine of a database, for the server and the tools of this package."""
    return database._engine


def open_for_planning(path: str, disk: Disk) -> Database:
    """Open a directory read-only without touching its segments, for a reader that plans over many and opens few: their
    files are not checked, and damage shows where they are read. No background work runs."""
    opened = open_directory(
        path,
        read_only=True,
        disk=disk,
        clock=None,
        config=None,
        accept_loss=False,
        progress=None,
        settings={},
        for_planning=True,
    )
    return Database(Engine(opened, threads=False), limits=None, hook=None)


def open(
    path: str | PathLike[str],
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
    cold_store: SegmentStore | None = None,
    **settings: Unpack[EngineSettings],
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
        cold_store: an open store to use instead of the one that the setting `cold` names.
    """
    opened = open_directory(
        path,
        read_only=read_only,
        disk=disk,
        clock=clock,
        config=config,
        accept_loss=accept_loss,
        progress=progress,
        settings=dict(settings),
        cold_store=cold_store,
    )
    try:
        return Database(Engine(opened, threads=threads), limits=channels, hook=hook)
    except BaseException:
        opened.abandon()
        raise
