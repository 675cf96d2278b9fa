"""Messages of a channel: publish, subscribe, history, and the operations of a fifo channel.

`PublishFuture.wait`, `history`, `push`, `pop` and `clear` block on the disk and must not run on an event loop.
`submit`, one append to a file, and `subscribe` do not; they take the shard's lock, which a change holds while it is
saved.

    future = submit(manager, channel, user, [payload], qos=1)      on the loop
    future.add_done_callback(on_ack)
    pool.submit(future.wait)                                       one sync for all messages submitted meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidelog.channels import rules
from tidelog.channels.channel_state import ChannelState, PublishFuture
from tidelog.channels.manager import ChannelManager, validate_payload
from tidelog.channels.message_log import Message, MessageLog
from tidelog.channels.rules import User
from tidelog.channels.subscription import Subscription
from tidelog.errors import BadInput, NotFound, NotPersistent, OutOfRange, WrongType

HISTORY_BYTES_MAX = 4 << 20  # of payloads in one page


class HistoryPage(NamedTuple):
    """A page of messages. `next_seq` is where the next page starts; the bounds are those of the whole history."""

    messages: list[Message]
    next_seq: int
    first_seq: int
    last_seq: int


# ── publish ───────────────────────────────────────────────────────────────────────────────────────


def submit(
    manager: ChannelManager,
    channel: str,
    user: str,
    payloads: Sequence[bytes],
    *,
    qos: int = 1,
    source: object = None,
) -> PublishFuture:
    """Accept messages of one user with consecutive seqs and one timestamp. They are not delivered yet."""
    rules.check_channel(channel)
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
        return state.submit(checked, user, qos=qos, source=source)


def _check_payloads(payloads: Sequence[object]) -> None:
    if not payloads:
        raise BadInput("no payloads were given; nothing was written")
    for payload in payloads:
        if not isinstance(payload, bytes):
            raise BadInput(f"a payload is bytes, not {type(payload).__name__}; nothing was written, encode it first")


# ── subscribe ─────────────────────────────────────────────────────────────────────────────────────


def subscribe(
    manager: ChannelManager,
    channel: str,
    user: str,
    *,
    wake: Callable[[], object] | None = None,
    queue_max: int | None = None,
    source: object = None,
) -> Subscription:
    """Receive events from now on; only members may. Messages are delivered only to users whom the read list allows."""
    rules.check_channel(channel)
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
            source=source,
            can_read=rules.is_allowed(state.meta.acl.read, user),
            on_close=on_close,
        )
        state.add_subscription(subscription)
        return subscription


# ── history ───────────────────────────────────────────────────────────────────────────────────────


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


def bounds(manager: ChannelManager, channel: str, user: User) -> tuple[int, int]:
    """Return the first and the last seq of the history; if it is empty, the last is one less than the first."""
    with _PinnedLog(manager, rules.check_channel(channel), user) as reading:
        return (1, 0) if reading.log is None else (reading.log.first_seq, reading.delivered_seq)


def holes(manager: ChannelManager, channel: str, user: User) -> list[tuple[int, int]]:
    """Return the ranges of seqs that power cuts lost before their sync, first and last of each. The program can publish
    or push these messages again."""
    with manager.locked(rules.check_channel(channel), write=False):
        state = manager.get_readable_channel(channel)
        rules.check_may_read(state.meta, user)
        if not state.meta.config.persist:
            return []
        log = _open_log_if_any(manager, state)
        return [] if log is None else log.holes


def history(
    manager: ChannelManager,
    channel: str,
    user: User,
    *,
    first: int | None = None,
    last: int | None = None,
    newest: int | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    limit: int | None = None,
    skip_damage: bool = False,
) -> HistoryPage:
    """Return delivered messages, oldest first: from seq `first`, the `newest` n, or from a time; up to seq `last` or a
    time. A start before the oldest kept message is moved there. At most `history_max`, or `limit`, messages."""
    _check_range(first, last, newest, since_ms, until_ms, limit)
    page_max = manager.limits.history_max
    count = min(limit or page_max, newest or page_max, page_max)
    with _PinnedLog(manager, rules.check_channel(channel), user) as pinned:
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
    kept = [message for message in messages if message.seq <= end and (until_ms is None or message.ts_ms <= until_ms)]
    return HistoryPage(kept, (messages[-1].seq if messages else end) + 1, oldest, delivered_seq)


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


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


def push(manager: ChannelManager, channel: str, user: str, payload: bytes) -> Message:
    """Append one message to a fifo channel; only its owner may."""
    _check_payloads([payload])
    with manager.metrics.counted("fifo_pushes"), manager.locked(rules.check_channel(channel)):
        state = _fifo_channel(manager, channel)
        rules.check_member(state.meta, user)
        rules.check_owner(state.meta, user, "push")
        rules.check_payload(state.meta, len(payload))
        sync = state.meta.config.message_flush_interval == 0
        message = manager.fifo_queue(state).push(payload, user, sync=sync)
        if not sync and state.dirty_since_ms is None:
            state.dirty_since_ms = manager.clock.monotonic_ms()
        return message


def pop(manager: ChannelManager, channel: str, user: str) -> Message:
    """Remove and return the oldest message of a fifo channel. No other pop returns it, also after a crash."""
    with manager.metrics.counted("fifo_pops"), manager.locked(rules.check_channel(channel)):
        state = _fifo_channel(manager, channel)
        rules.check_may_read(state.meta, user)
        queue = manager.fifo_queue(state)
        message = queue.pop()
        state.run_maintenance(queue.trim)
        return message


def length(manager: ChannelManager, channel: str, user: User) -> int:
    """Return the number of waiting messages of a fifo channel; only its owner may."""
    with manager.locked(rules.check_channel(channel)):
        state = _fifo_channel(manager, channel)
        rules.check_owner(state.meta, user, "count its messages")
        return manager.fifo_queue(state).length()


def clear(manager: ChannelManager, channel: str, user: User) -> int:
    """Drop every waiting message of a fifo channel, repair a lost cursor, and return their number; only its owner
    may."""
    with manager.metrics.counted("fifo_clears"), manager.locked(rules.check_channel(channel)):
        state = _fifo_channel(manager, channel)
        rules.check_owner(state.meta, user, "clear it")
        return manager.fifo_queue(state).clear()


def _fifo_channel(manager: ChannelManager, channel: str) -> ChannelState:
    state = manager.get_channel(channel)
    rules.check_type(state.meta, "fifo")
    return state
