"""[shell] Messages: publishing, following, looking back, and the queue of a fifo channel.

What waits for a disk, and so does not belong on an event loop: `commit` (through `Pending.wait`), `history`,
`push`, `pop`, `clear`. What does not: `submit`, which is one append to a file, and `subscribe`. Both take the
shard's lock, which a change that is being saved holds for the time of its syncs.

    pending = submit(manager, channel, user, [payload], qos=1)      on the loop
    pending.add_callback(answer)
    pool.submit(pending.wait)                                       one sync for all that was submitted meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidelog.channels import rules
from tidelog.channels import rules as lists
from tidelog.channels.channel_state import ChannelState, PublishFuture
from tidelog.channels.manager import ChannelManager, Operator, validate_payload
from tidelog.channels.message_log import Message, MessageLog
from tidelog.channels.subscription import Subscription
from tidelog.errors import BadInput, NotFound, NotPersistent, OutOfRange, WrongType
from tidelog.formats.channel_meta import ChannelMeta

HISTORY_BYTES_MAX = 4 << 20  # of payloads in one answer


class HistoryPage(NamedTuple):
    """A page of what was published. `next_seq` is where the next one begins; bounds are those of all that is kept."""

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
    """Accept messages of one user, in order, with consecutive seqs and one time. Nobody has them yet."""
    rules.check_channel(channel)
    rules.check_user(user)
    if qos not in (0, 1) or isinstance(qos, bool):
        raise BadInput(f"qos is 0 or 1, not {qos!r}; nothing was written")
    _check_payloads(payloads)
    checked = list(payloads)
    if manager.hook is not None:
        with manager.locked(channel):  # whoever may not publish does not keep the hook busy either
            rules.check_may_publish(manager.get_channel(channel).meta, user)
        checked = [validate_payload(manager.hook, manager.metrics, channel, user, payload) for payload in checked]
    with manager.locked(channel):
        room = manager.get_channel(channel)
        rules.check_may_publish(room.meta, user)
        for payload in checked:
            rules.check_payload(room.meta, len(payload))
        return room.submit(checked, user, qos=qos, source=source)


def _check_payloads(payloads: Sequence[object]) -> None:
    if not payloads:
        raise BadInput("there is nothing to publish; nothing was written")
    for payload in payloads:
        if not isinstance(payload, bytes):
            raise BadInput(f"a payload is bytes, not {type(payload).__name__}; nothing was written, encode it first")


# ── follow ────────────────────────────────────────────────────────────────────────────────────────


def subscribe(
    manager: ChannelManager,
    channel: str,
    user: str,
    *,
    wake: Callable[[], object] | None = None,
    queue_max: int | None = None,
    source: object = None,
) -> Subscription:
    """Hear of everything from now on. Only members may; whether they see messages is the read list's word."""
    rules.check_channel(channel)
    rules.check_user(user)
    ceiling = manager.limits.queue_max
    if queue_max is not None and not 1 <= queue_max <= ceiling:
        raise BadInput(f"queue_max is {queue_max}, it must lie between 1 and {ceiling}; nothing was done")
    with manager.locked(channel):
        room = manager.get_channel(channel)
        rules.check_member(room.meta, user)

        def forget(subscription: Subscription) -> None:
            with room.lock:
                room.remove_subscription(subscription)

        made = Subscription(
            channel,
            user,
            queue_max=queue_max or ceiling,
            wake=wake,
            source=source,
            can_read=lists.is_allowed(room.meta.acl.read, user),
            on_close=forget,
        )
        room.add_subscription(made)
        return made


# ── look back ─────────────────────────────────────────────────────────────────────────────────────


class _PinnedLog:
    """A log that is read without the lock, and stays open meanwhile."""

    def __init__(self, manager: ChannelManager, channel: str, check: Callable[[ChannelMeta], None]) -> None:
        self._state: ChannelState
        with manager.locked(channel, write=False):
            room = manager.get_readable_channel(channel)
            check(room.meta)
            if room.meta.config.type == "fifo":
                raise WrongType(channel, type="fifo", wanted="pubsub")
            if not room.meta.config.persist:
                raise NotPersistent(channel)
            self.log: MessageLog | None = _open_log_if_any(manager, room)
            self.delivered_seq, self._state = room.delivered_seq, room
            room.readers += 1

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
            return None  # nothing was ever published, and a reader makes no log
        raise


def _read_check(user: str | Operator) -> Callable[[ChannelMeta], None]:
    return (lambda _: None) if isinstance(user, Operator) else (lambda meta: rules.check_may_read(meta, user))


def bounds(manager: ChannelManager, channel: str, user: str | Operator) -> tuple[int, int]:
    """The first and the last seq that the history holds; the last is one less than the first where it holds none."""
    with _PinnedLog(manager, rules.check_channel(channel), _read_check(user)) as reading:
        return (1, 0) if reading.log is None else (reading.log.first_seq, reading.delivered_seq)


def holes(manager: ChannelManager, channel: str, user: str | Operator) -> list[tuple[int, int]]:
    """The seqs that power cuts took from a channel before their sync, first and last of each range. Publish or push
    these messages again where they are still wanted."""
    with manager.locked(rules.check_channel(channel), write=False):
        room = manager.get_readable_channel(channel)
        _read_check(user)(room.meta)
        if not room.meta.config.persist:
            return []
        log = _open_log_if_any(manager, room)
        return [] if log is None else log.holes


def history(
    manager: ChannelManager,
    channel: str,
    user: str | Operator,
    *,
    first: int | None = None,
    last: int | None = None,
    newest: int | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    limit: int | None = None,
    skip_damage: bool = False,
) -> HistoryPage:
    """Messages that were delivered, oldest first: from seq `first`, the `newest` n, or from a time on; up to seq `last`
    or a time. A start before the oldest that is kept is moved there. At most `history_max`, or `limit`, of them."""
    _check_range(first, last, newest, since_ms, until_ms, limit)
    ceiling = manager.limits.history_max
    count = min(limit or ceiling, newest or ceiling, ceiling)
    with _PinnedLog(manager, rules.check_channel(channel), _read_check(user)) as reading:
        log, shown = reading.log, reading.delivered_seq
        if log is None:
            return HistoryPage([], 1, 1, 0)
        begin = log.first_seq
        if newest is not None:
            begin = log.newest_start(shown + 1, count)
        elif since_ms is not None:
            begin = _seek_time(log, since_ms)
        elif first is not None:
            begin = first
        stop = shown if last is None else min(last, shown)
        found: list[Message] | None = None
        while found is None:
            oldest = log.first_seq
            begin = max(begin, oldest)
            if begin > stop:
                return HistoryPage([], begin, oldest, shown)
            try:
                some = min(count, stop - begin + 1)
                found = log.read(begin, limit=some, bytes_max=HISTORY_BYTES_MAX, skip_damage=skip_damage)
            except OutOfRange as gone:
                # Retention dropped where it was to begin: a start before the oldest that is kept is moved there.
                if gone.lowest <= begin:
                    raise
                begin = gone.lowest
        oldest = log.first_seq
    kept = [message for message in found if message.seq <= stop and (until_ms is None or message.ts_ms <= until_ms)]
    return HistoryPage(kept, (found[-1].seq if found else stop) + 1, oldest, shown)


def _seek_time(log: MessageLog, since_ms: int) -> int:
    """The first seq that is not older, of what is kept when it is found."""
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
    told = {"first": first, "last": last, "newest": newest, "limit": limit, "since_ms": since_ms, "until_ms": until_ms}
    for name, value in told.items():
        least = 0 if name.endswith("_ms") else 1
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise BadInput(f"{name} is {value!r}, it must be a number from {least} on; nothing was read")
    if sum(value is not None for value in (first, newest, since_ms)) > 1:
        raise BadInput("a history begins at a seq, at a time, or with the newest: name one of them; nothing was read")


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


def push(manager: ChannelManager, channel: str, user: str, payload: bytes) -> Message:
    """Put one message at the end of a fifo channel; only its owner may."""
    _check_payloads([payload])
    with manager.metrics.counted("fifo_pushes"), manager.locked(rules.check_channel(channel)):
        room = _fifo_channel(manager, channel)
        rules.check_member(room.meta, user)
        rules.check_owner(room.meta, user, "push")
        rules.check_payload(room.meta, len(payload))
        sync = room.meta.config.message_flush_interval == 0
        made = manager.fifo_queue(room).push(payload, user, sync=sync)
        if not sync and room.dirty_since_ms is None:
            room.dirty_since_ms = manager.clock.monotonic_ms()
        return made


def pop(manager: ChannelManager, channel: str, user: str) -> Message:
    """Take the oldest message of a fifo channel: it is nobody else's, and a crash never gives it again."""
    with manager.metrics.counted("fifo_pops"), manager.locked(rules.check_channel(channel)):
        room = _fifo_channel(manager, channel)
        rules.check_may_read(room.meta, user)
        queue = manager.fifo_queue(room)
        found = queue.pop()
        room.run_maintenance(queue.trim)
        return found


def length(manager: ChannelManager, channel: str, user: str | Operator) -> int:
    """How many messages of a fifo channel wait; for its owner."""
    with manager.locked(rules.check_channel(channel)):
        room = _fifo_channel(manager, channel)
        if not isinstance(user, Operator):
            rules.check_owner(room.meta, user, "count what waits")
        return manager.fifo_queue(room).length()


def clear(manager: ChannelManager, channel: str, user: str | Operator) -> int:
    """Pass over all that waits in a fifo channel, and mend a lost cursor; for its owner. Return how many that were."""
    with manager.metrics.counted("fifo_clears"), manager.locked(rules.check_channel(channel)):
        room = _fifo_channel(manager, channel)
        if not isinstance(user, Operator):
            rules.check_owner(room.meta, user, "clear it")
        return manager.fifo_queue(room).clear()


def _fifo_channel(manager: ChannelManager, channel: str) -> ChannelState:
    room = manager.get_channel(channel)
    rules.check_type(room.meta, "fifo")
    return room
