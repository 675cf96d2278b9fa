"""`tidelog.open`: the topics, queues, routers and channels of one directory behind one object."""

from __future__ import annotations

from threading import Lock
from typing import Any

from tidelog.channels import rules
from tidelog.channels.channel import Channel
from tidelog.channels.manager import OPERATOR, ChannelManager, Hook, Operator, authenticate
from tidelog.channels.rules import ChannelLimits
from tidelog.clock import Clock
from tidelog.disk.interface import Disk
from tidelog.disk.interrupts import defer_signals_in
from tidelog.engine import Engine, EngineConfig
from tidelog.engine.background import BackgroundThread
from tidelog.engine.results import Progress
from tidelog.engine.startup import OpenedEngine, open_directory


@defer_signals_in("channel", "tick", "refresh", "close")
class Database(Engine):
    """Topics and channels of one directory."""

    def __init__(self, opened: OpenedEngine, *, threads: bool, limits: ChannelLimits | None, hook: Hook | None) -> None:
        self._channel_limits, self._hook = limits, hook
        self._channels: ChannelManager | None = None
        self._channels_lock = Lock()
        super().__init__(opened, threads=threads)

    @property
    def channels(self) -> ChannelManager:
        """All channels; restored when this is first asked for."""
        self._check_open()
        with self._channels_lock:
            self._check_open()
            if self._channels is None:
                shared = self._context
                self._channels = ChannelManager(
                    shared.disk,
                    shared.root,
                    shared.clock,
                    limits=self._channel_limits,
                    hook=self._hook,
                    read_only=not shared.shards,
                )
                if self._threads and not shared.closing:
                    self._threads.append(self._start_channel_thread())
            return self._channels

    def _start_channel_thread(self) -> BackgroundThread:
        """A thread of its own: neither the WAL's syncs nor a checkpoint wait for those of channels, nor the other way
        round."""
        pause_ms, hurry = self._context.limits.sync_interval_ms, self._checkpoints.urgency
        name = f"tidelog channels {self._context.root}"
        return BackgroundThread(
            lambda: self._run_task("channels", self._tick_channels),
            pause_ms,
            hurry,
            self.report.add_background_error,
            name,
        )

    def _tick_channels(self) -> None:
        channels = self._channels
        if channels is not None and not channels.read_only:
            channels.tick()

    def channel(self, name: str, *, user: str | Operator = OPERATOR, token: str | None = None) -> Channel:
        """The channel of this name as `user` has it. With a hook, that is who the hook says it is."""
        rules.check_channel(name)
        manager = self.channels
        if not isinstance(user, Operator):
            rules.check_user(user)
            if self._hook is not None and manager.limits.auth:
                user = authenticate(self._hook, manager.metrics, user, token)
        return Channel(manager, name, user)

    def tick(self) -> None:
        """What is due in topics and channels. A background thread does this by itself."""
        try:
            super().tick()
        finally:
            self._tick_channels()

    def refresh(self) -> None:
        """Look again at what a writer beside this reader has done since."""
        super().refresh()
        self._close_channels()

    def close(self) -> None:
        """Make everything acknowledged durable and let go of the directory. Closing twice is harmless."""
        if self._context.closed:
            return
        try:
            self._close_channels()
        finally:
            super().close()

    def _close_channels(self) -> None:
        with self._channels_lock:
            channels, self._channels = self._channels, None
        if channels is not None:
            channels.close()


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
    """Open the topics and channels in `path`, making the directory where there is none, and recover what a crash left.

    One process writes: a second one is refused (Locked) and changes nothing. Any number may open it with `read_only`
    beside the writer; they see what was there when they opened it, and `refresh` looks again. Settings are those of
    `EngineConfig`. `accept_loss` goes on where acknowledged records were lost to damage, which is refused otherwise.
    Without `threads` nothing happens by itself: call `tick`. `progress(what, done, total)` is told of long work.
    `channels` are the limits of channels, `hook` a callable that authenticates users and looks at payloads.
    """
    found = open_directory(
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
        return Database(found, threads=threads, limits=channels, hook=hook)
    except BaseException:
        found.abandon()
        raise
