"""The embedded door: channels of an engine's directory, one handle per channel and user.

    log = tidelog.open("data")
    room = log.channel("!room@example.org", user="ann@example.org")

A handle owns nothing: making one does nothing, and it may be thrown away. What it does is done by its user;
one that names no user is the operator's, who may look at everything, change what an owner may, and say
nothing. A handle's own subscriptions do not hear what it publishes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidelog.channels import membership, messaging, rules
from tidelog.channels import rules as lists
from tidelog.channels.channel_state import Ack, PublishFuture
from tidelog.channels.manager import ChannelManager, Operator
from tidelog.channels.message_log import Message
from tidelog.channels.messaging import HistoryPage
from tidelog.channels.subscription import Subscription
from tidelog.disk.interrupts import defer_signals_in
from tidelog.errors import BadInput
from tidelog.formats.channel_meta import ChannelConfig, ChannelMeta


class ChannelInfo(NamedTuple):
    """What a channel is."""

    channel: str
    owner: str | None
    config: ChannelConfig
    members: tuple[str, ...]


@defer_signals_in(
    *("join", "leave", "invite", "kick", "members", "state", "configure", "acl", "allow", "disallow", "delete"),
    *("publish_many", "submit", "subscribe", "history", "bounds", "holes", "push", "pop", "clear", "__len__"),
)
class Channel:
    """One channel, as one user has it."""

    def __init__(self, manager: ChannelManager, name: str, user: str | Operator) -> None:
        self._manager, self.name, self.user = manager, name, user

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, user={self.user!r})"

    def _require_user(self, action: str) -> str:
        if isinstance(self.user, Operator):
            raise BadInput(f"{self.name}: to {action} takes a user; nothing was done, name one: channel(name, user=…)")
        return self.user

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, **config: object) -> Channel:
        """Become a member. The first one makes the channel, with the given settings, and owns it."""
        membership.join(self._manager, self.name, self._require_user("join"), config=config, source=self)
        return self

    def leave(self) -> None:
        """End the membership. With the last member, or a fifo channel's owner, the channel ends."""
        membership.leave(self._manager, self.name, self._require_user("leave"), source=self)

    def invite(self, user: str) -> None:
        """Make somebody else a member; the owner's."""
        membership.join(self._manager, self.name, user, by=self.user, source=self)

    def kick(self, user: str) -> None:
        """End somebody else's membership; the owner's."""
        membership.leave(self._manager, self.name, user, by=self.user, source=self)

    def members(self, page: int = 1, page_size: int = 100) -> tuple[str, ...]:
        """Members by name, a page at a time, counted from 1."""
        return rules.page_of(self._visible_meta().members, page, page_size)

    # ── what it is ────────────────────────────────────────────────────────────────────────────

    def _visible_meta(self) -> ChannelMeta:
        meta = self._manager.meta(self.name)
        if not isinstance(self.user, Operator):
            rules.check_member(meta, self.user)
        return meta

    def state(self) -> ChannelInfo:
        """Owner, settings and members; for members."""
        meta = self._visible_meta()
        return ChannelInfo(meta.handler, meta.owner, meta.config, meta.members)

    def configure(self, **changes_: object) -> ChannelConfig:
        """Change settings; the owner's. Those that are not named stay."""
        return membership.configure(self._manager, self.name, self.user, changes_, source=self).config

    def acl(self, kind: str) -> tuple[str, ...]:
        """One of the access lists (join, publish, read); the owner's. Empty: everybody may."""
        meta = self._manager.meta(self.name)
        if not isinstance(self.user, Operator):
            rules.check_owner(meta, self.user, "see its lists")
        return lists.entries_for(meta.acl, kind)

    def allow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Put users or domains on a list; the owner's."""
        return membership.set_acl(self._manager, self.name, self.user, kind, add=entries)

    def disallow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Take users or domains from a list; the owner's."""
        return membership.set_acl(self._manager, self.name, self.user, kind, remove=entries)

    def delete(self) -> bool:
        """End the channel, with its messages; the owner's."""
        return membership.delete(self._manager, self.name, self.user, source=self)

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

    def submit(self, payloads: Sequence[bytes], *, qos: int = 1) -> PublishFuture:
        """`publish_many` for an event loop: accepted on return. `Pending.wait` or, for qos 0, `Pending.deliver`, in
        another thread, commits it; what is left is delivered by the next tick."""
        return messaging.submit(self._manager, self.name, self._require_user("publish"), payloads, qos=qos, source=self)

    def subscribe(self, *, wake: Callable[[], object] | None = None, queue_max: int | None = None) -> Subscription:
        """Hear what is said and what happens from now on; for members."""
        me = self._require_user("subscribe")
        return messaging.subscribe(self._manager, self.name, me, wake=wake, queue_max=queue_max, source=self)

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
    ) -> HistoryPage:
        """What was said: from a seq, the newest n, or from a time on. For members who may read."""
        return messaging.history(
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
        return messaging.bounds(self._manager, self.name, self.user)

    def holes(self) -> list[tuple[int, int]]:
        """The seqs that power cuts took before their sync, first and last of each range. For members who may read."""
        return messaging.holes(self._manager, self.name, self.user)

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> Message:
        """Put one message at the end of a fifo channel; the owner's."""
        return messaging.push(self._manager, self.name, self._require_user("push"), payload)

    def pop(self) -> Message:
        """Take the oldest message of a fifo channel; for members who may read."""
        return messaging.pop(self._manager, self.name, self._require_user("pop"))

    def clear(self) -> int:
        """Pass over all that waits in a fifo channel; the owner's."""
        return messaging.clear(self._manager, self.name, self.user)

    def __len__(self) -> int:
        """How many messages of a fifo channel wait; the owner's."""
        return messaging.length(self._manager, self.name, self.user)

    def __bool__(self) -> bool:
        return True
