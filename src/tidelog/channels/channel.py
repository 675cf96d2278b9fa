"""The embedded API of channels: one handle per channel and user.

    database = tidelog.open("data")
    channel = database.channel("!support@example.org", user="ann@example.org")

A handle owns no resources: creating one performs no I/O. Its methods act as its user. A handle without a user is
the operator's: the operator reads everything and may change what an owner may, but does not publish. Subscriptions
of a handle do not receive the messages that the same handle publishes; the server passes a `source` instead, since
its handles live for one request.

`PublishFuture.wait`, `history`, `push`, `pop` and `clear` block on the disk and must not run on an event loop.
`submit`, one append to a file, and `subscribe` do not; they take the shard's lock, which a change holds while it is
saved.

    future = channel.submit([payload])           on the loop
    future.add_done_callback(on_ack)
    pool.submit(future.wait)                     one sync for all messages submitted meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

from tidelog.channels import membership, rules
from tidelog.channels.channel_state import Ack, ChannelState, PublishFuture, Subscription
from tidelog.channels.manager import ChannelManager, validate_payload
from tidelog.channels.rules import ChannelSettings, Operator, User
from tidelog.channels.store import Message, MessageLog
from tidelog.disk.process import defer_signals_in
from tidelog.errors import BadInput, ChannelNotFound, NotFound, NotPersistent, OutOfRange, WrongType
from tidelog.formats.small_files import ChannelConfig, ChannelMeta
from tidelog.times import Time, fields_in_ms, time_ms

HISTORY_BYTES_MAX = 4 << 20  # of payloads in one page


class HistoryPage(NamedTuple):
    """A page of messages. `next_seq` is where the next page starts; the bounds are those of the whole history."""

    messages: list[Message]
    next_seq: int
    first_seq: int
    last_seq: int


class ChannelInfo(NamedTuple):
    """Owner, settings and members of a channel."""

    channel: str
    owner: str | None
    config: ChannelConfig
    members: tuple[str, ...]


@defer_signals_in(
    *("join", "leave", "invite", "kick", "members", "state", "configure", "acl", "allow", "disallow"),
    *("change_acl", "delete"),
    *("publish_many", "submit", "subscribe", "history", "bounds", "holes", "push", "pop", "clear", "__len__"),
)
class Channel:
    """One channel as one user sees it."""

    def __init__(self, manager: ChannelManager, name: str, user: User, source: object = None) -> None:
        """`source`: gets no event of what this handle does; default: the subscriptions of this handle."""
        self._manager, self.name, self.user = manager, name, user
        self._source = self if source is None else source

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, user={self.user!r})"

    def _require_user(self, action: str) -> str:
        if isinstance(self.user, Operator):
            raise BadInput(f"{self.name}: {action} needs a user; nothing was done, pass one: channel(name, user=…)")
        return self.user

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, **config: Unpack[ChannelSettings]) -> Channel:
        """Become a member. The first member creates the channel with the given settings and owns it.

        >>> bob.join().members()
        ('ann@example.org', 'bob@example.org')
        """
        settings = fields_in_ms(config)
        membership.join(self._manager, self.name, self._require_user("join"), config=settings, source=self._source)
        return self

    def leave(self) -> str | None:
        """End the membership and return the owner afterwards. When the last member leaves, or the owner of a fifo
        channel, the channel is deleted, and this returns None.

        >>> bob.join().leave()
        'ann@example.org'
        """
        membership.leave(self._manager, self.name, self._require_user("leave"), source=self._source)
        return self._current_owner()

    def _current_owner(self) -> str | None:
        try:
            return self._manager.meta(self.name).owner
        except ChannelNotFound:
            return None

    def invite(self, user: str) -> None:
        """Make another user a member; owner only.

        >>> support.invite("bob@example.org")
        >>> support.members()
        ('ann@example.org', 'bob@example.org')
        """
        membership.join(self._manager, self.name, user, by=self.user, source=self._source)

    def kick(self, user: str) -> str | None:
        """End the membership of another user and return the owner afterwards, as `leave`; owner only.

        >>> support.invite("bob@example.org")
        >>> support.kick("bob@example.org")
        'ann@example.org'
        """
        membership.leave(self._manager, self.name, user, by=self.user, source=self._source)
        return self._current_owner()

    def members(self, page: int = 1, page_size: int = 100) -> tuple[str, ...]:
        """Return one page of the members, sorted by name; pages count from 1. Members only.

        >>> support.members()
        ('ann@example.org',)
        """
        return rules.page_of(self._visible_meta().members, page, page_size)

    # ── settings and access lists ─────────────────────────────────────────────────────────────

    def _visible_meta(self) -> ChannelMeta:
        meta = self._manager.meta(self.name)
        rules.check_member(meta, self.user)
        return meta

    def state(self) -> ChannelInfo:
        """Return owner, settings and members. Members only.

        >>> support.state().owner
        'ann@example.org'
        """
        meta = self._visible_meta()
        return ChannelInfo(meta.handler, meta.owner, meta.config, meta.members)

    def configure(self, /, **changes: Unpack[ChannelSettings]) -> ChannelConfig:
        """Change settings and return all of them; owner only. Settings that are not named keep their values.

        >>> support.configure(max_clients=5).max_clients
        5
        """
        settings = fields_in_ms(changes)
        return membership.configure(self._manager, self.name, self.user, settings, source=self._source).config

    def acl(self, kind: str) -> tuple[str, ...]:
        """Return one of the access lists (join, publish, read); owner only. An empty list allows every user.

        >>> support.acl("publish")
        ()
        """
        meta = self._manager.meta(self.name)
        rules.check_owner(meta, self.user, "see its lists")
        return rules.entries_for(meta.acl, kind)

    def allow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Add users or domains to an access list and return it; owner only.

        >>> support.allow("publish", "ann@example.org")
        ('ann@example.org',)
        """
        return self.change_acl(kind, add=entries)

    def disallow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Remove users or domains from an access list and return it; owner only.

        >>> support.allow("publish", "ann@example.org")
        ('ann@example.org',)
        >>> support.disallow("publish", "ann@example.org")
        ()
        """
        return self.change_acl(kind, remove=entries)

    def change_acl(self, kind: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> tuple[str, ...]:
        """Add and remove entries of an access list in one change, and return it; owner only.

        >>> support.change_acl("read", add=["example.org"])
        ('example.org',)
        """
        return membership.set_acl(self._manager, self.name, self.user, kind, add=add, remove=remove)

    def delete(self) -> bool:
        """Delete the channel with its messages; owner only. Return whether there was one.

        >>> support.delete()
        True
        """
        return membership.delete(self._manager, self.name, self.user, source=self._source)

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def publish(self, payload: bytes, *, qos: int = 1) -> Ack:
        """Publish one message. On return with qos 1 it is in the log, synced as the channel is configured, and in the
        queue of every subscriber; with qos 0 it was accepted.

        >>> support.publish(b"hello").seq
        1
        """
        return self.publish_many([payload], qos=qos)

    def publish_many(self, payloads: Sequence[bytes], *, qos: int = 1) -> Ack:
        """Publish several messages with consecutive seqs, one timestamp and one sync.

        >>> support.publish_many([b"hello", b"again"]).seq
        2
        """
        future = self.submit(payloads, qos=qos)
        if qos == 0:
            future.deliver()
            return future.result()
        return future.wait()

    def submit(self, payloads: Sequence[bytes], *, qos: int = 1) -> PublishFuture:
        """`publish_many` for an event loop: accepted on return. `PublishFuture.wait` or, for qos 0, `deliver`, called
        in another thread, commits it; otherwise the next tick delivers it.

        >>> support.submit([b"hello"]).wait().seq
        1
        """
        rules.check_payloads(payloads)
        manager, channel, user = self._manager, rules.check_channel(self.name), self._require_user("publish")
        rules.check_user(user)
        if qos not in (0, 1) or isinstance(qos, bool):
            raise BadInput(f"qos must be 0 or 1, not {qos!r}; nothing was written")
        _check_payloads(payloads)
        checked = list(payloads)
        if manager.hook is not None:
            with manager.locked(channel):  # the hook is not called for users who may not publish
                rules.check_may_publish(manager.get_channel(channel).meta, user)
            checked = [validate_payload(manager.hook, manager.metrics, channel, user, payload) for payload in checked]
        with manager.locked(channel):
            state = manager.get_channel(channel)
            rules.check_may_publish(state.meta, user)
            for payload in checked:
                rules.check_payload(state.meta, len(payload))
            return state.submit(checked, user, qos=qos, source=self._source)

    def subscribe(self, *, wake: Callable[[], object] | None = None, queue_max: int | None = None) -> Subscription:
        """Receive messages and presence events from now on; members only. Messages are delivered only to users whom
        the read list allows.

        >>> with bob.join().subscribe() as events:
        ...     support.publish(b"hello").seq
        ...     [event.payload for event in events.wait(timeout=1)]
        1
        [b'hello']
        """
        manager, channel, user = self._manager, rules.check_channel(self.name), self._require_user("subscribe")
        rules.check_user(user)
        limit = manager.limits.queue_max
        if queue_max is not None and not 1 <= queue_max <= limit:
            raise BadInput(f"queue_max is {queue_max}, it must be between 1 and {limit}; nothing was done")
        with manager.locked(channel):
            state = manager.get_channel(channel)
            rules.check_member(state.meta, user)

            def on_close(subscription: Subscription) -> None:
                with state.lock:
                    state.remove_subscription(subscription)

            subscription = Subscription(
                channel,
                user,
                queue_max=queue_max or limit,
                wake=wake,
                source=self._source,
                can_read=rules.is_allowed(state.meta.acl.read, user),
                on_close=on_close,
            )
            state.add_subscription(subscription)
            return subscription

    # ── history ───────────────────────────────────────────────────────────────────────────────

    def history(
        self,
        first: int | None = None,
        *,
        last: int | None = None,
        newest: int | None = None,
        since_ms: Time | None = None,
        until_ms: Time | None = None,
        limit: int | None = None,
        skip_damage: bool = False,
    ) -> HistoryPage:
        """Return a page of delivered messages, oldest first: from a seq, the newest n, or from a time; up to a seq or a
        time. For members who may read. A start before the oldest kept message is moved there. At most `history_max`,
        or `limit`, messages.

        >>> support.publish_many([b"hello", b"again"]).seq
        2
        >>> [message.payload for message in support.history(newest=1).messages]
        [b'again']
        """
        since_ms = None if since_ms is None else time_ms("since_ms", since_ms)
        until_ms = None if until_ms is None else time_ms("until_ms", until_ms)
        _check_range(first, last, newest, since_ms, until_ms, limit)
        page_max = self._manager.limits.history_max
        count = min(limit or page_max, newest or page_max, page_max)
        with _PinnedLog(self._manager, rules.check_channel(self.name), self.user) as pinned:
            log, delivered_seq = pinned.log, pinned.delivered_seq
            if log is None:
                return HistoryPage([], 1, 1, 0)
            start = log.first_seq
            if newest is not None:
                start = log.newest_start(delivered_seq + 1, count)
            elif since_ms is not None:
                start = _seek_time(log, since_ms)
            elif first is not None:
                start = first
            end = delivered_seq if last is None else min(last, delivered_seq)
            messages: list[Message] | None = None
            while messages is None:
                oldest = log.first_seq
                start = max(start, oldest)
                if start > end:
                    return HistoryPage([], start, oldest, delivered_seq)
                try:
                    wanted = min(count, end - start + 1)
                    messages = log.read(start, limit=wanted, bytes_max=HISTORY_BYTES_MAX, skip_damage=skip_damage)
                except OutOfRange as error:
                    # Retention dropped the start meanwhile: it is moved to the oldest kept message.
                    if error.lowest <= start:
                        raise
                    start = error.lowest
            oldest = log.first_seq
        kept = [each for each in messages if each.seq <= end and (until_ms is None or each.ts_ms <= until_ms)]
        return HistoryPage(kept, (messages[-1].seq if messages else end) + 1, oldest, delivered_seq)

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last seq of the history; if it is empty, the last is one less than the first. For
        members who may read.

        >>> support.publish_many([b"hello", b"again"]).seq
        2
        >>> support.bounds()
        (1, 2)
        """
        with _PinnedLog(self._manager, rules.check_channel(self.name), self.user) as reading:
            return (1, 0) if reading.log is None else (reading.log.first_seq, reading.delivered_seq)

    def holes(self) -> list[tuple[int, int]]:
        """Return the ranges of seqs that a power cut lost before their sync, first and last of each. For members who
        may read. The program can publish or push these messages again.

        >>> support.publish(b"hello").seq
        1
        >>> support.holes()
        []
        """
        manager, channel = self._manager, rules.check_channel(self.name)
        with manager.locked(channel, write=False):
            state = manager.get_readable_channel(channel)
            rules.check_may_read(state.meta, self.user)
            if not state.meta.config.persist:
                return []
            log = _open_log_if_any(manager, state)
            return [] if log is None else log.holes

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> Message:
        """Append one message to a fifo channel; owner only.

        >>> tasks.push(b"first").seq
        1
        """
        manager, user = self._manager, self._require_user("push")
        _check_payloads([payload])
        with manager.metrics.counted("fifo_pushes"), manager.locked(rules.check_channel(self.name)):
            state = self._fifo_state()
            rules.check_member(state.meta, user)
            rules.check_owner(state.meta, user, "push")
            rules.check_payload(state.meta, len(payload))
            sync = state.meta.config.message_flush_interval == 0
            message = manager.fifo_queue(state).push(payload, user, sync=sync)
            if not sync and state.dirty_since_ms is None:
                state.dirty_since_ms = manager.clock.monotonic_ms()
            return message

    def pop(self) -> Message:
        """Remove and return the oldest message of a fifo channel. No other pop returns it, also after a crash. For
        members who may read.

        >>> tasks.push(b"first").seq
        1
        >>> tasks.pop().payload
        b'first'
        """
        manager, user = self._manager, self._require_user("pop")
        with manager.metrics.counted("fifo_pops"), manager.locked(rules.check_channel(self.name)):
            state = self._fifo_state()
            rules.check_may_read(state.meta, user)
            queue = manager.fifo_queue(state)
            message = queue.pop()
            state.run_maintenance(queue.trim)
            return message

    def clear(self) -> int:
        """Drop every waiting message of a fifo channel, repair a lost cursor, and return their number; owner only.

        >>> tasks.push(b"first").seq
        1
        >>> tasks.clear(), len(tasks)
        (1, 0)
        """
        manager = self._manager
        with manager.metrics.counted("fifo_clears"), manager.locked(rules.check_channel(self.name)):
            state = self._fifo_state()
            rules.check_owner(state.meta, self.user, "clear it")
            return manager.fifo_queue(state).clear()

    def __len__(self) -> int:
        """Return the number of waiting messages of a fifo channel; owner only."""
        with self._manager.locked(rules.check_channel(self.name)):
            state = self._fifo_state()
            rules.check_owner(state.meta, self.user, "count its messages")
            return self._manager.fifo_queue(state).length()

    def __bool__(self) -> bool:
        return True

    def _fifo_state(self) -> ChannelState:
        state = self._manager.get_channel(self.name)
        rules.check_type(state.meta, "fifo")
        return state


def _check_payloads(payloads: Sequence[object]) -> None:
    if not payloads:
        raise BadInput("no payloads were given; nothing was written")
    for payload in payloads:
        if not isinstance(payload, bytes):
            raise BadInput(f"a payload is bytes, not {type(payload).__name__}; nothing was written, encode it first")


class _PinnedLog:
    """A log that is read without the lock and stays open meanwhile."""

    def __init__(self, manager: ChannelManager, channel: str, user: User) -> None:
        self._state: ChannelState
        with manager.locked(channel, write=False):
            state = manager.get_readable_channel(channel)
            rules.check_may_read(state.meta, user)
            if state.meta.config.type == "fifo":
                raise WrongType(channel, type="fifo", wanted="pubsub")
            if not state.meta.config.persist:
                raise NotPersistent(channel)
            self.log: MessageLog | None = _open_log_if_any(manager, state)
            self.delivered_seq, self._state = state.delivered_seq, state
            state.readers += 1

    def __enter__(self) -> _PinnedLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._state.lock:
            self._state.readers -= 1
            self._state.lock.notify_all()


def _open_log_if_any(manager: ChannelManager, state: ChannelState) -> MessageLog | None:
    try:
        return state.message_log()
    except NotFound:
        if manager.read_only:
            return None  # nothing was published yet, and a read-only manager creates no log
        raise


def _seek_time(log: MessageLog, since_ms: int) -> int:
    """Return the first seq that is not older; retried while retention drops segments."""
    while True:
        lowest = log.first_seq
        try:
            return log.seek_time(since_ms)
        except OutOfRange:
            if log.first_seq == lowest:
                raise


def _check_range(
    first: object, last: object, newest: object, since_ms: object, until_ms: object, limit: object
) -> None:
    given = {"first": first, "last": last, "newest": newest, "limit": limit, "since_ms": since_ms, "until_ms": until_ms}
    for name, value in given.items():
        minimum = 0 if name.endswith("_ms") else 1
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise BadInput(f"{name} is {value!r}, it must be an integer of at least {minimum}; nothing was read")
    if sum(value is not None for value in (first, newest, since_ms)) > 1:
        raise BadInput("first, newest and since_ms exclude each other; nothing was read, pass one of them")
