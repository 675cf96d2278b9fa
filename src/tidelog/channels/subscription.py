"""[shell] Subscribers: a bounded queue each, filled by whoever publishes, emptied by whoever owns it.

The seam for an event loop. A subscription never calls into a transport and never waits for one:

    publisher                                   the loop
    put(events): queue, then `wake()`           take(): all that waits, in order, without blocking
    at most once per nap, and at the end        an empty answer means: asleep, `wake` will be called

`wake` runs in the publisher's thread under the lock of the channel's shard. It must be short, must not
call back into channels, and usually is `partial(loop.call_soon_threadsafe, ready)`. One that raises
is cut off. A program without a loop calls `wait`.

A queue that is full is cut off: the subscriber finds what it had, then one `Cut` event, then the end.
Nobody else notices. What it missed is in the history, from the last seq it saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Event as Bell
from typing import Literal, NamedTuple, TypeAlias

from tidelog.channels.message_log import Message

PresenceKind: TypeAlias = Literal["joined", "left", "deleted", "reconfigured"]
EndReason: TypeAlias = Literal["slow", "left", "deleted", "broken", "closed"]


class Presence(NamedTuple):
    """Something happened to the channel itself."""

    kind: PresenceKind
    channel: str
    user: str  # who joined, left, deleted or reconfigured
    owner: bool  # whether that user owns, or owned, the channel
    ts_ms: int


class SubscriptionEnded(NamedTuple):
    """The last event of a subscription, and why it is the last."""

    channel: str
    reason: EndReason
    last_seq: int  # the newest message that was delivered before it; 0: none


ChannelEvent: TypeAlias = Message | Presence | SubscriptionEnded


class Subscription:
    """One connection's view of one channel. `take`, `wait` and `close` belong to its owner."""

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
        self.can_read = can_read  # what the read list says of the user; kept up by the channel
        self.closed = False
        self.last_seq = 0
        self._queue: deque[ChannelEvent] = deque()
        self._queue_max, self._wake, self._on_close = queue_max, wake, on_close
        self._needs_wake = True
        self._event: Bell | None = None

    # For the channel, under its lock.

    def enqueue(self, events: Sequence[ChannelEvent]) -> EndReason | None:
        """Queue events; why it must be cut off, where there is no room for all of them or nobody to wake."""
        queue = self._queue
        if len(queue) + len(events) > self._queue_max:
            return "slow"
        queue.extend(events)
        return None if self._wake_owner() else "broken"

    def end(self, reason: EndReason) -> None:
        """Queue the last event. There is always room for that one."""
        if not self.closed:
            self.closed = True
            self._queue.append(SubscriptionEnded(self.channel, reason, self.last_seq))
            self._needs_wake = True  # whoever is awake and takes nothing is told of the end all the same
            self._wake_owner()

    def _wake_owner(self) -> bool:
        # Queued before looked at; `take` says asleep before it looks again: one of the two sees the other.
        if not self._needs_wake:
            return True
        self._needs_wake = False
        if self._event is not None:
            self._event.set()
        if self._wake is not None:
            try:
                self._wake()
            except Exception:
                return False  # a loop that is gone, or a bug of the transport's: its subscriber pays, nobody else
        return True

    # For its owner.

    def take(self, limit: int | None = None) -> list[ChannelEvent]:
        """What waits, oldest first, at most `limit`; empty where nothing does."""
        found: list[ChannelEvent] = []
        queue = self._queue
        while limit is None or len(found) < limit:
            try:
                found.append(queue.popleft())
            except IndexError:
                if found or self._needs_wake:
                    break
                self._needs_wake = True
                if not queue:
                    break
                self._needs_wake = False
        return found

    def wait(self, timeout: float | None = None) -> list[ChannelEvent]:
        """`take`, but wait for something first; empty after `timeout` seconds, and at once when it is over."""
        bell = self._event = self._event or Bell()
        while True:
            bell.clear()
            found = self.take()
            if found or self.closed:
                return found
            if self._queue:
                continue
            if not bell.wait(timeout):
                return self.take()

    @property
    def pending(self) -> int:
        """How many events were not taken yet."""
        return len(self._queue)

    def close(self) -> None:
        """Receive no more. Membership stays."""
        self._on_close(self)

    def __iter__(self) -> Iterator[ChannelEvent]:
        """Events as they come, until the subscription is over."""
        while found := self.wait():
            yield from found
