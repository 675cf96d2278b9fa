"""The loop that follows topics for one peer, over any transport.

    notifier ──► pending ──► a page from its cursor ──► tombstone? ──► records? ──► caught up? ──► wait
      │                         ▲                                          │                         │
      │                         └──────── there is more ───────────────────┘                         │
      └── while it waits: are all new records in memory? then they are sent, and the loop waits on ──┘

A topic is registered with its notifier first, then read, then waited for. Nearly every write finds a peer that has
everything before it, and a page in memory: sending it in the notification saves a turn of the loop and a task switch
for each peer. Every other case is the loop's. Topics are visited in the order of their names, each up to the head it
had at the visit, so that a topic with constant writes does not delay the others.

The unsent bytes of a peer are bounded (`SlowConsumerGuard`): above 256 KiB nothing is read for it, and when it is ready
again it gets larger pages.

A watch session keeps the topics and options of a watch between `POST /v0/watch` and its streams:

    POST watch ──► WatchSession ──► GET stream, as often as its connection breaks ──► idle for five minutes: removed
                      └── every stream has cursors of its own

A server may notice the end of a connection minutes after the client has opened the next one; if both moved one cursor,
the new stream would skip records that only the old one was sent. Without keys a session's id is the secret that opens
it, so it comes from a cryptographic random source. Sessions do not outlive the process.
"""

from __future__ import annotations

import asyncio
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidelog.clock import Clock
from tidelog.engine import SEQ_MAX, Gap, Topic
from tidelog.engine.topic import topic_operations
from tidelog.errors import Error, TopicNotFound
from tidelog.http.interface import ClientDisconnected
from tidelog.server.auth import ConcurrencyLimit, Principal
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.push.page_cache import EncodedPage, ReadOptions
from tidelog.server.push.peers import HIGH_WATER_BYTES, DrainablePeer, SlowConsumerGuard

if TYPE_CHECKING:
    from tidelog.server.service import Service


class TopicPeer(DrainablePeer, Protocol):
    """A client over its transport. Only `drain` waits."""

    def send_page(self, page: EncodedPage) -> None:
        """Send the records of a page, and after the last one that the peer is caught up."""

    def send_tombstone(self, name: str, gap: Gap, *, first: bool) -> None: ...
    def send_caught_up(self, name: str, head_seq: int) -> None: ...
    def send_topic_deleted(self, name: str) -> None: ...
    def send_shutdown(self) -> None: ...
    def send_error(self, name: str, code: str, message: str) -> None: ...


class StreamSlot:
    """A unit of the stream limit, released when its stream ends, or when a stream that never started is dropped."""

    def __init__(self, service: Service, principal: Principal, on_release: Callable[[], None] | None = None) -> None:
        self._is_held = self.is_revoked = False
        if not service.auth.keys.contains(principal):
            raise ApiError(
                "unauthorized", "this key was removed or changed in the settings; nothing was done, use a valid key"
            )
        service.auth.stream_limit.acquire(principal)
        self._service, self.principal, self._on_release = service, principal, on_release
        self._task: asyncio.Task[Any] | None = None
        self._is_held = True
        service.auth.stream_slots.add(self)

    @contextmanager
    def open(self, peer: HeartbeatPeer | None = None, heartbeat_ms: int = 0) -> Iterator[None]:
        """Run a stream in this task: send heartbeats to `peer`, and release the slot at the end. Raises
        ClientDisconnected where its key was removed meanwhile."""
        heartbeat = None if peer is None else Heartbeat(self._service, peer, heartbeat_ms)
        try:
            if self.is_revoked:
                raise ClientDisconnected
            self._task = asyncio.current_task()
            yield
        finally:
            if heartbeat is not None:
                heartbeat.stop()
            self.release()

    def revoke(self) -> None:
        """Cancel the stream: its key was removed or lost scopes."""
        self.is_revoked = True
        if self._task is not None:
            self._task.cancel()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._task = None
            self._service.auth.stream_slots.discard(self)
            self._service.auth.stream_limit.release(self.principal)
            if self._on_release is not None:
                self._on_release()

    # A response may be dropped before its stream starts: the client left, or requested the head only.
    __del__ = release


class TopicSubscription:
    """One topic that a peer follows."""

    __slots__ = ("_on_wake", "caught_up", "is_first_read", "name", "options", "topic")

    def __init__(
        self, name: str, topic: Topic | None, options: ReadOptions, on_wake: Callable[[TopicSubscription], None]
    ) -> None:
        self.name, self.topic, self.options, self._on_wake = name, topic, options, on_wake
        self.is_first_read = True
        self.caught_up = False  # the peer was sent a caught-up event

    def wake(self) -> None:
        self._on_wake(self)


class TopicStream:
    """The topics that one peer follows. Every frame moves `cursors`."""

    def __init__(self, service: Service, peer: TopicPeer, cursors: dict[str, int], *, persistent: bool = False) -> None:
        self._service, self._peer, self._cursors = service, peer, cursors
        self._page_cache = service.push.page_cache
        self._is_persistent = persistent  # continues without a topic to follow
        self._subscriptions: dict[str, TopicSubscription] = {}
        self._pending: dict[str, TopicSubscription] = {}
        self._woken = asyncio.Event()
        self._is_idle = False  # the loop waits: the peer is up to date
        self._error: Exception | None = None  # of a push outside the loop, for the loop to raise
        self._ended = False
        self._slow_consumer_guard = SlowConsumerGuard(service.loop, peer, self._is_ending, service.limit_counters)

    # ── subscriptions ──────────────────────────────────────────────────────────────────────────

    def follow(self, name: str, topic: Topic | None, options: ReadOptions, from_seq: int) -> None:
        """Follow a topic from a position, instead of its previous subscription. None: the topic was dropped."""
        self.unfollow(name)
        self._cursors[name] = from_seq
        subscription = self._subscriptions[name] = TopicSubscription(name, topic, options, self._on_notified)
        if topic is not None:
            self._service.push.notifiers.add(topic, subscription.wake)  # before the first read
        self._enqueue(subscription)

    def unfollow(self, name: str) -> None:
        """Stop following a topic."""
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None and subscription.topic is not None:
            self._service.push.notifiers.remove(subscription.topic, subscription.wake)
        if self._is_persistent:
            self._cursors.pop(name, None)  # the cursors of a watch session stay: they are in every event id

    def close(self) -> None:
        for name in list(self._subscriptions):
            self.unfollow(name)

    def end(self) -> None:
        """Make `run` return."""
        self._ended = True
        self.wake()

    def wake(self) -> None:
        self._woken.set()
        self._slow_consumer_guard.on_shutdown()

    def _is_ending(self) -> bool:
        return self._ended or self._service.stopping.is_set()

    def _on_notified(self, subscription: TopicSubscription) -> None:
        if not self._is_idle or not self._try_push_now(subscription):
            self._enqueue(subscription)

    def _enqueue(self, subscription: TopicSubscription) -> None:
        self._is_idle = False
        self._pending[subscription.name] = subscription
        self.wake()

    def _try_push_now(self, subscription: TopicSubscription) -> bool:
        """Send all new records now, and return whether that was possible. Every unusual case is left to the loop,
        which reads again."""
        topic = subscription.topic
        if topic is None or self._is_ending() or self._peer.pending_bytes > HIGH_WATER_BYTES:
            return False
        try:
            page = self._page_cache.get_latest(topic, self._cursors[subscription.name], subscription.options)
        except Exception:  # of this peer only: the delivery is shared by all readers
            return False
        if page is None or not page.caught_up:
            return False
        try:
            self._send_page(subscription, page)
        except Exception as error:  # as above, and the loop would not run into it again
            self._error = error
            self.wake()
        return True

    # ── the loop ──────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Deliver until the server stops or no topic is left. Raises ClientDisconnected and SlowConsumer."""
        stopping = self._service.stopping
        while not stopping.is_set():
            due, self._pending = self._pending, {}
            for name in sorted(due):
                await self._catch_up(due[name])
            if self._ended or not (self._subscriptions or self._is_persistent):
                return
            if self._pending:
                await asyncio.sleep(0)
            else:
                self._woken.clear()
                self._is_idle = True
                await self._woken.wait()
                self._is_idle = False
            if self._error is not None:
                raise self._error
        if not self._ended:
            self._peer.send_shutdown()

    def _is_active(self, subscription: TopicSubscription) -> bool:
        """Whether a subscription was neither removed nor replaced during a wait."""
        return self._subscriptions.get(subscription.name) is subscription and not self._is_ending()

    async def _catch_up(self, subscription: TopicSubscription) -> None:
        """Send records up to the head that the topic has now."""
        name, topic, service = subscription.name, subscription.topic, self._service
        head_seq = 0 if topic is None else topic.head_seq
        while self._is_active(subscription):
            if topic is None:
                self.unfollow(name)
                self._peer.send_topic_deleted(name)
                return
            if self._peer.pending_bytes > HIGH_WATER_BYTES:
                await self.wait_writable()
                if not self._is_active(subscription):
                    return
            try:
                from_seq = self._cursors[name]
                run = partial(service.run_read, topic, from_seq)
                page = await self._page_cache.get(topic, from_seq, subscription.options, run)
            except TopicNotFound:
                topic = None
                continue
            except Error as error:
                if self._is_active(subscription):
                    self._fail_subscription(subscription, error)
                return
            if not self._is_active(subscription):
                return
            topic_operations(topic).record_access()
            self._send_page(subscription, page)
            if page.caught_up:
                return
            if page.next_from_seq >= head_seq:
                self._pending[name] = subscription  # written meanwhile: after the other topics
                return
            await asyncio.sleep(0)

    def _send_page(self, subscription: TopicSubscription, page: EncodedPage) -> None:
        name, gap = subscription.name, page.gap
        if gap is not None:
            # Where the topic was created again, this is its beginning and not the end of the gap.
            self._cursors[name] = gap.earliest_seq - 1
            self._peer.send_tombstone(name, gap, first=subscription.is_first_read)
        subscription.is_first_read = False
        self._cursors[name] = page.next_from_seq
        if page.count or gap is not None:
            subscription.caught_up = False
            self._service.metrics.count_read(name, page.count, gap=gap is not None)
        if page.count:
            self._peer.send_page(page)
        elif page.caught_up and not subscription.caught_up:
            self._peer.send_caught_up(name, page.head_seq)
        subscription.caught_up = subscription.caught_up or page.caught_up

    def _fail_subscription(self, subscription: TopicSubscription, error: Error) -> None:
        """End a subscription whose records cannot be read: skipping them would hide the loss."""
        problem = api_error_from(error)
        self.unfollow(subscription.name)
        self._peer.send_error(subscription.name, problem.code, problem.message)
        self._ended = self._ended or not self._is_persistent

    async def wait_writable(self) -> None:
        """Wait until the peer has read most of its bytes, or the stream ends."""
        await self._slow_consumer_guard.wait_writable()


class HeartbeatPeer(Protocol):
    """A stream with heartbeats."""

    last_sent_s: float  # by the loop's clock

    @property
    def pending_bytes(self) -> int: ...
    def send_heartbeat(self, epoch_ms: int) -> None: ...


class Heartbeat:
    """Send a heartbeat on a stream when nothing was sent for an interval."""

    def __init__(self, service: Service, peer: HeartbeatPeer, every_ms: int) -> None:
        self._service, self._peer, self._interval_s = service, peer, every_ms / 1000
        self._timer = service.loop.call_later(self._interval_s, self._on_timer)

    def _on_timer(self) -> None:
        loop, peer = self._service.loop, self._peer
        due_s = peer.last_sent_s + self._interval_s
        if loop.time() >= due_s:
            try:
                if not peer.pending_bytes:  # a peer with unsent bytes needs no heartbeat
                    peer.send_heartbeat(self._service.clock.now_us() // 1000)
            except Exception as error:
                self._service.health.failed("heartbeats", error)
            else:
                self._service.health.recovered("heartbeats")
            due_s = loop.time() + self._interval_s
        self._timer = loop.call_at(due_s, self._on_timer)

    def stop(self) -> None:
        self._timer.cancel()


# ── watch sessions ────────────────────────────────────────────────────────────────────────────────

TTL_MS: Final = 300_000
_SESSION_ID_BYTES: Final = 16
EPOCH_PREFIX: Final = "\0"  # before a topic's name, in cursors; no name has it


@dataclass(slots=True, eq=False)
class WatchSession:
    wid: str
    principal: Principal  # its creator: only that key may open it, and its streams count for that key
    options: ReadOptions
    heartbeat_ms: int
    cursors: dict[str, int]  # by topic: the last seq that the newest stream was sent
    epochs: dict[str, int]  # by topic: of the topics that existed when the session was created
    stream_count: int = field(default=0, init=False)
    last_used_ms: int = field(default=0, init=False)  # when it was created, or its last stream ended
    _open_cursors: list[dict[str, int]] = field(default_factory=list, init=False)  # the cursors of the open streams
    _highest_sent: dict[str, int] = field(
        default_factory=dict, init=False
    )  # by topic: the highest seq of an ended stream

    def stream_cursors(self, last_event_id: Mapping[str, int], epochs: Mapping[str, int]) -> dict[str, int]:
        """Return the cursors of a new stream. `epochs` are those of the topics that exist now.

        A topic that the client's last event id names continues there, but never after the highest seq that any
        stream of this session was sent. The others continue where the newest stream is.

        Where a topic was dropped and created again, a position of the old one is meaningless. Cursors of the new one
        carry its epoch, in an entry of its own; without that entry the stream begins after every seq, which reads as a
        `recreated` gap and then the first record.
        """
        cursors = dict(self.cursors)
        for name, seq in last_event_id.items():
            if name in self.epochs and seq >= 0:
                sent = (stream.get(name, 0) for stream in (*self._open_cursors, self._highest_sent, self.cursors))
                cursors[name] = min(seq, max(sent))
        for name, epoch in epochs.items():
            if epoch != self.epochs[name]:
                known = last_event_id if name in last_event_id else self.cursors
                if known.get(EPOCH_PREFIX + name) != epoch or known[name] == SEQ_MAX:
                    cursors[name] = SEQ_MAX
                cursors[EPOCH_PREFIX + name] = epoch
        return cursors

    def on_stream_opened(self, cursors: dict[str, int]) -> None:
        """Register a stream, which moves these cursors; the session continues from the newest stream's."""
        self.stream_count += 1
        self._open_cursors.append(cursors)
        self.cursors = cursors

    def on_stream_closed(self, cursors: dict[str, int]) -> None:
        self.stream_count -= 1
        self._open_cursors = [stream for stream in self._open_cursors if stream is not cursors]
        for name, seq in cursors.items():
            self._highest_sent[name] = max(seq, self._highest_sent.get(name, 0))


class WatchSessions:
    """The watch sessions of a server. On the event loop's thread."""

    def __init__(
        self,
        limit: int,
        clock: Clock,
        limit_per_key: int = 0,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._limit = ConcurrencyLimit("watch sessions", limit, limit_per_key, "watch_sessions")
        self._clock, self._random_bytes = clock, random_bytes
        self._by_id: dict[str, WatchSession] = {}
        self._idle: dict[str, WatchSession] = {}  # without a stream; the least recently used comes first

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        principal: Principal,
        options: ReadOptions,
        heartbeat_ms: int,
        cursors: dict[str, int],
        epochs: dict[str, int],
    ) -> WatchSession:
        """Create a session. Raises ApiError where a limit is reached."""
        self._limit.acquire(principal)
        wid = "wid_" + urlsafe_b64encode(self._random_bytes(_SESSION_ID_BYTES)).rstrip(b"=").decode()
        session = self._by_id[wid] = WatchSession(wid, principal, options, heartbeat_ms, cursors, epochs)
        self._mark_idle(session)
        return session

    def find(self, wid: str) -> WatchSession | None:
        return self._by_id.get(wid)

    def on_stream_opened(self, session: WatchSession, cursors: dict[str, int]) -> None:
        """Register a stream. A session that was not removed yet is kept, however long it was idle."""
        session.on_stream_opened(cursors)
        self._idle.pop(session.wid, None)
        self.remove_expired()

    def on_stream_closed(self, session: WatchSession, cursors: dict[str, int]) -> None:
        session.on_stream_closed(cursors)
        if not session.stream_count:
            self._mark_idle(session)

    def remove_expired(self) -> None:
        """Remove the sessions that have had no stream for `TTL_MS`."""
        oldest_ms = self._clock.monotonic_ms() - TTL_MS
        while self._idle:
            wid, session = next(iter(self._idle.items()))
            if session.last_used_ms >= oldest_ms:
                return
            del self._idle[wid], self._by_id[wid]
            self._limit.release(session.principal)

    def _mark_idle(self, session: WatchSession) -> None:
        session.last_used_ms = self._clock.monotonic_ms()
        self._idle[session.wid] = session
