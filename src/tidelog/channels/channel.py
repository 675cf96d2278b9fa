"""The embedded API of channels: one handle per channel and user.

    database = tidelog.open("data")
    channel = database.channel("!support@example.org", user="ann@example.org")

A handle owns no resources: creating one performs no I/O. Its methods act as its user. A handle without a user is
the operator's: the operator reads everything and may change what an owner may, but does not publish. Subscriptions
of a handle do not receive the messages that the same handle publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidelog.channels import membership, messaging, rules
from tidelog.channels.channel_state import Ack, PublishFuture
from tidelog.channels.manager import ChannelManager
from tidelog.channels.message_log import Message
from tidelog.channels.messaging import HistoryPage
from tidelog.channels.rules import Operator, User
from tidelog.channels.subscription import Subscription
from tidelog.disk.interrupts import defer_signals_in
from tidelog.errors import BadInput
from tidelog.formats.channel_meta import ChannelConfig, ChannelMeta


class ChannelInfo(NamedTuple):
    """Owner, settings and members of a channel."""

    channel: str
    owner: str | None
    config: ChannelConfig
    members: tuple[str, ...]


@defer_signals_in(
    *("join", "leave", "invite", "kick", "members", "state", "configure", "acl", "allow", "disallow", "delete"),
    *("publish_many", "submit", "subscribe", "history", "bounds", "holes", "push", "pop", "clear", "__len__"),
)
class Channel:
    """One channel as one user sees it."""

    def __init__(self, manager: ChannelManager, name: str, user: User) -> None:
        self._manager, self.name, self.user = manager, name, user

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, user={self.user!r})"

    def _require_user(self, action: str) -> str:
        if isinstance(self.user, Operator):
            raise BadInput(f"{self.name}: {action} needs a user; nothing was done, pass one: channel(name, user=…)")
        return self.user

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, **config: object) -> Channel:
        """Become a member. The first member creates the channel with the given settings and owns it."""
        membership.join(self._manager, self.name, self._require_user("join"), config=config, source=self)
        return self

    def leave(self) -> None:
        """End the membership. When the last member leaves, or the owner of a fifo channel, the channel is deleted."""
        membership.leave(self._manager, self.name, self._require_user("leave"), source=self)

    def invite(self, user: str) -> None:
        """Make another user a member; owner only."""
        membership.join(self._manager, self.name, user, by=self.user, source=self)

    def kick(self, user: str) -> None:
        """End the membership of another user; owner only."""
        membership.leave(self._manager, self.name, user, by=self.user, source=self)

    def members(self, page: int = 1, page_size: int = 100) -> tuple[str, ...]:
        """Return one page of the members, sorted by name; pages count from 1. Members only."""
        return rules.page_of(self._visible_meta().members, page, page_size)

    # ── settings and access lists ─────────────────────────────────────────────────────────────

    def _visible_meta(self) -> ChannelMeta:
        meta = self._manager.meta(self.name)
        rules.check_member(meta, self.user)
        return meta

    def state(self) -> ChannelInfo:
        """Return owner, settings and members. Members only."""
        meta = self._visible_meta()
        return ChannelInfo(meta.handler, meta.owner, meta.config, meta.members)

    def configure(self, **changes: object) -> ChannelConfig:
        """Change settings and return all of them; owner only. Settings that are not named keep their values."""
        return membership.configure(self._manager, self.name, self.user, changes, source=self).config

    def acl(self, kind: str) -> tuple[str, ...]:
        """Return one of the access lists (join, publish, read); owner only. An empty list allows every user."""
        meta = self._manager.meta(self.name)
        rules.check_owner(meta, self.user, "see its lists")
        return rules.entries_for(meta.acl, kind)

    def allow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Add users or domains to an access list and return it; owner only."""
        return membership.set_acl(self._manager, self.name, self.user, kind, add=entries)

    def disallow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Remove users or domains from an access list and return it; owner only."""
        return membership.set_acl(self._manager, self.name, self.user, kind, remove=entries)

    def delete(self) -> bool:
        """Delete the channel with its messages; owner only. Return whether there was one."""
        return membership.delete(self._manager, self.name, self.user, source=self)

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def publish(self, payload: bytes, *, qos: int = 1) -> Ack:
        """Publish one message. On return with qos 1 it is in the log, synced as the channel is configured, and in the
        queue of every subscriber; with qos 0 it was accepted."""
        return self.publish_many([payload], qos=qos)

    def publish_many(self, payloads: Sequence[bytes], *, qos: int = 1) -> Ack:
        """Publish several messages with consecutive seqs, one timestamp and one sync."""
        future = self.submit(payloads, qos=qos)
        if qos == 0:
            future.deliver()
            return future.result()
        return future.wait()

    def submit(self, payloads: Sequence[bytes], *, qos: int = 1) -> PublishFuture:
        """`publish_many` for an event loop: accepted on return. `PublishFuture.wait` or, for qos 0, `deliver`, called
        in another thread, commits it; otherwise the next tick delivers it."""
        return messaging.submit(self._manager, self.name, self._require_user("publish"), payloads, qos=qos, source=self)

    def subscribe(self, *, wake: Callable[[], object] | None = None, queue_max: int | None = None) -> Subscription:
        """Receive messages and presence events from now on. Members only."""
        user = self._require_user("subscribe")
        return messaging.subscribe(self._manager, self.name, user, wake=wake, queue_max=queue_max, source=self)

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
        """Return a page of delivered messages: from a seq, the newest n, or from a time. For members who may read."""
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
        """Return the first and the last seq of the history. For members who may read."""
        return messaging.bounds(self._manager, self.name, self.user)

    def holes(self) -> list[tuple[int, int]]:
        """Return the ranges of seqs that a power cut lost before their sync, first and last of each. For members who
        may read."""
        return messaging.holes(self._manager, self.name, self.user)

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> Message:
        """Append one message to a fifo channel; owner only."""
        return messaging.push(self._manager, self.name, self._require_user("push"), payload)

    def pop(self) -> Message:
        """Remove and return the oldest message of a fifo channel. For members who may read."""
        return messaging.pop(self._manager, self.name, self._require_user("pop"))

    def clear(self) -> int:
        """Drop every waiting message of a fifo channel and return their number; owner only."""
        return messaging.clear(self._manager, self.name, self.user)

    def __len__(self) -> int:
        """Return the number of waiting messages of a fifo channel; owner only."""
        return messaging.length(self._manager, self.name, self.user)

    def __bool__(self) -> bool:
        return True
