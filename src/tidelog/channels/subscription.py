"""Subscriptions: a bounded event queue, filled by publishers and drained by one subscriber.

A subscription is the interface to an event loop. It never calls a transport and never waits for one:

    publisher                                   event loop
    enqueue(events), then `wake()` if the       take(): all queued events in order, without blocking
    subscriber is idle                          an empty list means idle: `wake` will be called

`wake` runs in the publisher's thread with the lock of the channel's shard. It must be short, must not call channels,
and usually is `partial(loop.call_soon_threadsafe, callback)`. If it raises, the subscription ends. A program without
an event loop calls `wait`.

A subscription whose queue is full ends: the subscriber still gets the queued events, then one `SubscriptionEnded`.
Other subscribers are unaffected. The missed messages are in the history, after the last seq it saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Event as Event
from typing import Literal, NamedTuple, TypeAlias

from tidelog.channels.message_log import Message

PresenceKind: TypeAlias = Literal["joined", "left", "deleted", "reconfigured"]
EndReason: TypeAlias = Literal["slow", "left", "deleted", "broken", "closed"]


class Presence(NamedTuple):
    """A change of the channel itself."""

    kind: PresenceKind
    channel: str
    user: str  # who joined, left, deleted or reconfigured
    owner: bool  # whether that user owns, or owned, the channel
    ts_ms: int


class SubscriptionEnded(NamedTuple):
    """The last event of a subscription, with the reason."""

    channel: str
    reason: EndReason
    last_seq: int  # the newest message delivered before it; 0: none


ChannelEvent: TypeAlias = Message | Presence | SubscriptionEnded


class Subscription:
    """The events of one channel for one subscriber, which calls `take`, `wait` and `close`."""

    __slots__ = (
        "_event",
        "_needs_wake",
        "_on_close",
        "_queue",
        "_queue_max",
        "_wake",
        "can_read",
        "channel",
        "closed",
        "last_seq",
        "source",
        "user",
    )  # fmt: skip

    def __init__(
        self,
        channel: str,
        user: str,
        *,
        queue_max: int,
        wake: Callable[[], object] | None,
        source: object,
        can_read: bool,
        on_close: Callable[[Subscription], None],
    ) -> None:
        self.channel, self.user, self.source = channel, user, source
        self.can_read = can_read  # whether the read list allows the user; updated by the channel
        self.closed = False
        self.last_seq = 0
        self._queue: deque[ChannelEvent] = deque()
        self._queue_max, self._wake, self._on_close = queue_max, wake, on_close
        self._needs_wake = True
        self._event: Event | None = None

    # ── called by the channel with its lock ───────────────────────────────────────────────────

    def enqueue(self, events: Sequence[ChannelEvent]) -> EndReason | None:
        """Queue events; return why the subscription must end if the queue is full or `wake` raises."""
        queue = self._queue
        if len(queue) + len(events) > self._queue_max:
            return "slow"
        queue.extend(events)
        return None if self._wake_owner() else "broken"

    def end(self, reason: EndReason) -> None:
        """Queue the last event, also if the queue is full."""
        if not self.closed:
            self.closed = True
            self._queue.append(SubscriptionEnded(self.channel, reason, self.last_seq))
            self._needs_wake = True  # also wake a subscriber that was woken and has not called `take`
            self._wake_owner()

    def _wake_owner(self) -> bool:
        # The event is queued before the flag is read; `take` sets the flag before it looks at the queue again. So
        # either this thread sees the flag or `take` sees the event.
        if not self._needs_wake:
            return True
        self._needs_wake = False
        if self._event is not None:
            self._event.set()
        if self._wake is not None:
            try:
                self._wake()
            except Exception:
                return False  # a closed event loop or a bug of the transport: only its own subscription ends
        return True

    # ── called by the subscriber ──────────────────────────────────────────────────────────────

    def take(self, limit: int | None = None) -> list[ChannelEvent]:
        """Return queued events, oldest first, at most `limit`, without blocking."""
        events: list[ChannelEvent] = []
        queue = self._queue
        while limit is None or len(events) < limit:
            try:
                events.append(queue.popleft())
            except IndexError:
                if events or self._needs_wake:
                    break
                self._needs_wake = True
                if not queue:
                    break
                self._needs_wake = False
        return events

    def wait(self, timeout: float | None = None) -> list[ChannelEvent]:
        """Wait for events and return them; return an empty list after `timeout` seconds, or at once after the end."""
        event = self._event = self._event or Event()
        while True:
            event.clear()
            events = self.take()
            if events or self.closed:
                return events
            if self._queue:
                continue
            if not event.wait(timeout):
                return self.take()

    @property
    def pending(self) -> int:
        """The number of events that were not taken yet."""
        return len(self._queue)

    def close(self) -> None:
        """End the subscription. The membership stays."""
        self._on_close(self)

    def __iter__(self) -> Iterator[ChannelEvent]:
        """Yield events until the subscription ends."""
        while events := self.wait():
            yield from events
