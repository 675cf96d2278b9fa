"""The embedded door: channels of an engine's directory, one handle per channel and user.

    log = tidelog.open("data")
    room = log.channel("!room@example.org", user="ann@example.org")

A handle owns nothing: making one does nothing, and it may be thrown away. What it does is done by its user;
one that names no user is the operator's, who may look at everything, change what an owner may, and say
nothing. A handle's own subscriptions do not hear what it publishes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

from tidelog.channels import acl as lists
from tidelog.channels import changes, names, rules, talk
from tidelog.channels.delivery import Subscription
from tidelog.channels.hook import Hook, authenticated
from tidelog.channels.limits import ChannelLimits
from tidelog.channels.manager import OPERATOR, ChannelManager, Operator
from tidelog.channels.messages import Message
from tidelog.channels.pending import Ack, Pending
from tidelog.channels.talk import History
from tidelog.clock import Clock
from tidelog.disk.interrupts import deferring
from tidelog.disk.seam import Disk
from tidelog.engine import Engine as Topics
from tidelog.engine import EngineConfig
from tidelog.engine.opening import Opened, opened
from tidelog.engine.report import Progress
from tidelog.engine.upkeep import Keeper
from tidelog.errors import BadInput
from tidelog.formats.channel import Config, Meta


class ChannelState(NamedTuple):
    """What a channel is."""

    channel: str
    owner: str | None
    config: Config
    members: tuple[str, ...]


@deferring(
    *("join", "leave", "invite", "kick", "members", "state", "configure", "acl", "allow", "disallow", "delete"),
    *("publish_many", "submit", "subscribe", "history", "bounds", "holes", "push", "pop", "clear", "__len__"),
)
class Channel:
    """One channel, as one user has it."""

    def __init__(self, manager: ChannelManager, name: str, user: str | Operator) -> None:
        self._manager, self.name, self.user = manager, name, user

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, user={self.user!r})"

    def _me(self, what: str) -> str:
        if isinstance(self.user, Operator):
            raise BadInput(f"{self.name}: to {what} takes a user; nothing was done, name one: channel(name, user=…)")
        return self.user

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, **config: object) -> Channel:
        """Become a member. The first one makes the channel, with the given settings, and owns it."""
        changes.join(self._manager, self.name, self._me("join"), config=config, source=self)
        return self

    def leave(self) -> None:
        """End the membership. With the last member, or a fifo channel's owner, the channel ends."""
        changes.leave(self._manager, self.name, self._me("leave"), source=self)

    def invite(self, user: str) -> None:
        """Make somebody else a member; the owner's."""
        changes.join(self._manager, self.name, user, by=self.user, source=self)

    def kick(self, user: str) -> None:
        """End somebody else's membership; the owner's."""
        changes.leave(self._manager, self.name, user, by=self.user, source=self)

    def members(self, page: int = 1, page_size: int = 100) -> tuple[str, ...]:
        """Members by name, a page at a time, counted from 1."""
        return rules.page(self._seen().members, page, page_size)

    # ── what it is ────────────────────────────────────────────────────────────────────────────

    def _seen(self) -> Meta:
        meta = self._manager.meta(self.name)
        if not isinstance(self.user, Operator):
            rules.check_member(meta, self.user)
        return meta

    def state(self) -> ChannelState:
        """Owner, settings and members; for members."""
        meta = self._seen()
        return ChannelState(meta.handler, meta.owner, meta.config, meta.members)

    def configure(self, **changes_: object) -> Config:
        """Change settings; the owner's. Those that are not named stay."""
        return changes.configure(self._manager, self.name, self.user, changes_, source=self).config

    def acl(self, kind: str) -> tuple[str, ...]:
        """One of the access lists (join, publish, read); the owner's. Empty: everybody may."""
        meta = self._manager.meta(self.name)
        if not isinstance(self.user, Operator):
            rules.check_owner(meta, self.user, "see its lists")
        return lists.listed_for(meta.acl, kind)

    def allow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Put users or domains on a list; the owner's."""
        return changes.set_acl(self._manager, self.name, self.user, kind, add=entries)

    def disallow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Take users or domains from a list; the owner's."""
        return changes.set_acl(self._manager, self.name, self.user, kind, remove=entries)

    def delete(self) -> bool:
        """End the channel, with its messages; the owner's."""
        return changes.delete(self._manager, self.name, self.user, source=self)

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def publish(self, payload: bytes, *, qos: int = 1) -> Ack:
        """Say something. With qos 1 it is in the log, synced as the channel says, and in every receiver's queue when
        this returns; with qos 0 it was accepted."""
        return self.publish_many([payload], qos=qos)

    def publish_many(self, payloads: Sequence[bytes], *, qos: int = 1) -> Ack:
        """Say several things, with consecutive seqs, one time and one sync."""
        pending = self.submit(payloads, qos=qos)
        if qos == 0:
            pending.deliver()
            return pending.result()
        return pending.wait()

    def submit(self, payloads: Sequence[bytes], *, qos: int = 1) -> Pending:
        """`publish_many` for an event loop: accepted on return. `Pending.wait` or, for qos 0, `Pending.deliver`, in
        another thread, commits it; what is left is delivered by the next tick."""
        return talk.submit(self._manager, self.name, self._me("publish"), payloads, qos=qos, source=self)

    def subscribe(self, *, wake: Callable[[], object] | None = None, queue_max: int | None = None) -> Subscription:
        """Hear what is said and what happens from now on; for members."""
        me = self._me("subscribe")
        return talk.subscribe(self._manager, self.name, me, wake=wake, queue_max=queue_max, source=self)

    def history(
        self,
        first: int | None = None,
        *,
        last: int | None = None,
        newest: int | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int | None = None,
        skip_damage: bool = False,
    ) -> History:
        """What was said: from a seq, the newest n, or from a time on. For members who may read."""
        return talk.history(
            self._manager,
            self.name,
            self.user,
            first=first,
            last=last,
            newest=newest,
            since_ms=since_ms,
            until_ms=until_ms,
            limit=limit,
            skip_damage=skip_damage,
        )

    def bounds(self) -> tuple[int, int]:
        """The first and the last seq of the history."""
        return talk.bounds(self._manager, self.name, self.user)

    def holes(self) -> list[tuple[int, int]]:
        """The seqs that power cuts took before their sync, first and last of each range. For members who may read."""
        return talk.holes(self._manager, self.name, self.user)

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> Message:
        """Put one message at the end of a fifo channel; the owner's."""
        return talk.push(self._manager, self.name, self._me("push"), payload)

    def pop(self) -> Message:
        """Take the oldest message of a fifo channel; for members who may read."""
        return talk.pop(self._manager, self.name, self._me("pop"))

    def clear(self) -> int:
        """Pass over all that waits in a fifo channel; the owner's."""
        return talk.clear(self._manager, self.name, self.user)

    def __len__(self) -> int:
        """How many messages of a fifo channel wait; the owner's."""
        return talk.length(self._manager, self.name, self.user)

    def __bool__(self) -> bool:
        return True


@deferring("channel", "tick", "refresh", "close")
class Engine(Topics):
    """Topics and channels of one directory."""

    def __init__(self, found: Opened, *, threads: bool, limits: ChannelLimits | None, hook: Hook | None) -> None:
        self._channel_limits, self._hook = limits, hook
        self._channels: ChannelManager | None = None
        self._channels_lock = Lock()
        super().__init__(found, threads=threads)

    @property
    def channels(self) -> ChannelManager:
        """All channels; restored when this is first asked for."""
        self._check()
        with self._channels_lock:
            self._check()
            if self._channels is None:
                shared = self._shared
                self._channels = ChannelManager(
                    shared.disk,
                    shared.root,
                    shared.clock,
                    limits=self._channel_limits,
                    hook=self._hook,
                    read_only=not shared.shards,
                )
                if self._keepers and not shared.closing:
                    self._keepers.append(self._ticking())
            return self._channels

    def _ticking(self) -> Keeper:
        """A thread of its own: neither the WAL's syncs nor a checkpoint wait for those of channels, nor the other way
        round."""
        pause_ms, hurry = self._shared.limits.sync_interval_ms, self._upkeep.hurry
        name = f"tidelog channels {self._shared.root}"
        return Keeper(
            lambda: self._attempt("channels", self._tick_channels), pause_ms, hurry, self.report.trouble, name
        )

    def _tick_channels(self) -> None:
        channels = self._channels
        if channels is not None and not channels.read_only:
            channels.tick()

    def channel(self, name: str, *, user: str | Operator = OPERATOR, token: str | None = None) -> Channel:
        """The channel of this name as `user` has it. With a hook, that is who the hook says it is."""
        names.check_channel(name)
        manager = self.channels
        if not isinstance(user, Operator):
            names.check_user(user)
            if self._hook is not None and manager.limits.auth:
                user = authenticated(self._hook, manager.metrics, user, token)
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
        self._end_channels()

    def close(self) -> None:
        """Make everything acknowledged durable and let go of the directory. Closing twice is harmless."""
        if self._shared.closed:
            return
        try:
            self._end_channels()
        finally:
            super().close()

    def _end_channels(self) -> None:
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
) -> Engine:
    """Open the topics and channels in `path`, making the directory where there is none, and recover what a crash left.

    One process writes: a second one is refused (Locked) and changes nothing. Any number may open it with `read_only`
    beside the writer; they see what was there when they opened it, and `refresh` looks again. Settings are those of
    `EngineConfig`. `accept_loss` goes on where acknowledged records were lost to damage, which is refused otherwise.
    Without `threads` nothing happens by itself: call `tick`. `progress(what, done, total)` is told of long work.
    `channels` are the limits of channels, `hook` a callable that authenticates users and looks at payloads.
    """
    found = opened(
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
        return Engine(found, threads=threads, limits=channels, hook=hook)
    except BaseException:
        found.abandon()
        raise
