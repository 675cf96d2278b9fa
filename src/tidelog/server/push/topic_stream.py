"""[shell] One loop that follows topics for one peer, whatever carries it.

    bell ──► due ──► a page from its cursor ──► tombstone? ──► records? ──► caught up? ──► wait
      │                ▲                                            │                       │
      │                └──────── there is more ─────────────────────┘                       │
      └── while it waits: is all that is new at hand? then it is told, and the loop waits on ┘

A topic is registered with the bells first, then looked at, then waited for. Nearly every write finds a peer that has
everything before it, and a page that is in memory: telling it where the bell rings spares a turn of the loop and a
change of tasks for each peer. Everything else is the loop's. Topics are visited in the order of their
names, each up to the head it had at the visit, so that one that is written all the time does not hold up the others.

What a peer has not taken yet is bounded (`patience`): past a mark nothing is read for it, and when it is ready again
it gets larger pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tidelog.engine import Gap, Topic
from tidelog.errors import Error, TopicNotFound
from tidelog.http.interface import ClientDisconnected
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.push.page_cache import EncodedPage, ReadOptions
from tidelog.server.push.peers import HIGH_WATER_BYTES, SlowConsumerGuard
from tidelog.server.service import Service


class TopicPeer(Protocol):
    """Who is told. Says it in its transport's words, and never waits except in `drained`."""

    @property
    def pending_bytes(self) -> int: ...
    async def drain(self) -> None: ...
    def send_page(self, page: EncodedPage) -> None:
        """The records of a page, and behind the last ones there are that the peer is caught up."""

    def send_tombstone(self, name: str, gap: Gap, *, first: bool) -> None: ...
    def send_caught_up(self, name: str, head_seq: int) -> None: ...
    def send_topic_deleted(self, name: str) -> None: ...
    def send_shutdown(self) -> None: ...
    def send_slow_warning(self) -> None: ...
    def send_error(self, name: str, code: str, message: str) -> None: ...


class StreamSlot:
    """A place among the streams: given back when the stream is over, or when a stream that never began is let go."""

    def __init__(self, service: Service, principal: Principal, on_release: Callable[[], None] | None = None) -> None:
        self._is_held = self.is_revoked = False
        if not service.auth.keys.contains(principal):
            raise ApiError(
                "unauthorized", "this key was removed or changed in the settings; nothing was done, ask anew"
            )
        service.auth.stream_limit.acquire(principal)
        self._service, self.principal, self._on_release = service, principal, on_release
        self._task: asyncio.Task[Any] | None = None
        self._is_held = True
        service.auth.stream_slots.add(self)

    def start(self) -> None:
        """The stream runs, in this task. Raises Gone where its key was removed meanwhile."""
        if self.is_revoked:
            raise ClientDisconnected
        self._task = asyncio.current_task()

    def revoke(self) -> None:
        """The key was removed, or is for less than before: cut the stream off."""
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

    # Whoever was handed the answer may drop it unread: the peer left meanwhile, or asked for the head alone.
    __del__ = release


class TopicSubscription:
    """One topic, as one peer follows it."""

    __slots__ = ("_on_wake", "caught_up", "is_first_read", "name", "options", "topic")

    def __init__(
        self, name: str, topic: Topic | None, options: ReadOptions, on_wake: Callable[[TopicSubscription], None]
    ) -> None:
        self.name, self.topic, self.options, self._on_wake = name, topic, options, on_wake
        self.is_first_read = True  # nothing was read yet
        self.caught_up = False  # and the peer was told so

    def wake(self) -> None:
        self._on_wake(self)


class TopicStream:
    """What one peer follows. `cursors` are moved with every frame that is handed over."""

    def __init__(self, service: Service, peer: TopicPeer, cursors: dict[str, int], *, persistent: bool = False) -> None:
        self._service, self._peer, self._cursors = service, peer, cursors
        self._page_cache = service.push.page_cache
        self._is_persistent = persistent  # goes on when there is nothing to follow
        self._subscriptions: dict[str, TopicSubscription] = {}
        self._pending: dict[str, TopicSubscription] = {}
        self._woken = asyncio.Event()
        self._is_idle = False  # the loop: everybody was told everything
        self._error: Exception | None = None  # the server's own mistake, for the loop to raise
        self._ended = False
        self._slow_consumer_guard = SlowConsumerGuard(service.loop, peer, self._is_ending, service.limit_counters)

    # ── what to follow ────────────────────────────────────────────────────────────────────────

    def follow(self, name: str, topic: Topic | None, options: ReadOptions, from_seq: int) -> None:
        """Follow a topic from here, in place of how it was followed before. None: it is not there any more."""
        self.unfollow(name)
        self._cursors[name] = from_seq
        follow = self._subscriptions[name] = TopicSubscription(name, topic, options, self._on_notified)
        if topic is not None:
            self._service.push.notifiers.add(topic, follow.wake)  # before the first look
        self._enqueue(follow)

    def unfollow(self, name: str) -> None:
        """Nothing more is said of this topic."""
        follow = self._subscriptions.pop(name, None)
        if follow is not None and follow.topic is not None:
            self._service.push.notifiers.remove(follow.topic, follow.wake)
        if self._is_persistent:
            self._cursors.pop(name, None)  # a session keeps its own: they are in every id

    def close(self) -> None:
        for name in list(self._subscriptions):
            self.unfollow(name)

    def end(self) -> None:
        """Have `run` return."""
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
        """Whether the peer was told all there is, here and now. Whatever is out of the ordinary is left to the loop,
        which looks again and finds the same."""
        topic = subscription.topic
        if topic is None or self._is_ending() or self._peer.pending_bytes > HIGH_WATER_BYTES:
            return False
        try:
            page = self._page_cache.get_latest(topic, self._cursors[subscription.name], subscription.options)
        except Exception:  # whatever it is, it is this peer's: the bell's turn is everybody's
            return False
        if page is None or not page.caught_up:
            return False
        try:
            self._send_page(subscription, page)
        except Exception as error:  # as above, and the loop would not find it again
            self._error = error
            self.wake()
        return True

    # ── the loop ──────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Deliver until the server stops or nothing is left to follow. Raises Gone where the peer is, and TooSlow."""
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
        """Whether this is still wanted: it may have been given up, or replaced, while something was waited for."""
        return self._subscriptions.get(subscription.name) is subscription and not self._is_ending()

    async def _catch_up(self, subscription: TopicSubscription) -> None:
        """Bring a peer up to the head that the topic has now."""
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
                page = await self._page_cache.get(
                    topic, self._cursors[name], subscription.options, service.run_blocking
                )
            except TopicNotFound:
                topic = None
                continue
            except Error as error:
                if self._is_active(subscription):
                    self._fail_subscription(subscription, error)
                return
            if not self._is_active(subscription):
                return
            topic.record_access()
            self._send_page(subscription, page)
            if page.caught_up:
                return
            if page.next_from_seq >= head_seq:
                self._pending[name] = subscription  # written meanwhile: after the others
                return
            await asyncio.sleep(0)

    def _send_page(self, subscription: TopicSubscription, page: EncodedPage) -> None:
        name, gap = subscription.name, page.gap
        if gap is not None:
            # Where the topic is another one now, this is its beginning and not the end of what is missing.
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
        """Records that cannot be read: going on behind them would hide that."""
        problem = api_error_from(error)
        self.unfollow(subscription.name)
        self._peer.send_error(subscription.name, problem.code, problem.message)
        self._ended = self._ended or not self._is_persistent

    async def wait_writable(self) -> None:
        """Wait until the peer has taken most of what it was sent, or all is over."""
        await self._slow_consumer_guard.wait_writable()


class HeartbeatPeer(Protocol):
    """A stream that is kept alive."""

    last_sent_s: float  # when something was last said, by the loop's clock

    @property
    def pending_bytes(self) -> int: ...
    def send_heartbeat(self, epoch_ms: int) -> None: ...


class Heartbeat:
    """Heartbeats of one stream: something is said when nothing was said for so long."""

    def __init__(self, service: Service, peer: HeartbeatPeer, every_ms: int) -> None:
        self._service, self._peer, self._interval_s = service, peer, every_ms / 1000
        self._timer = service.loop.call_later(self._interval_s, self._on_timer)

    def _on_timer(self) -> None:
        loop, events = self._service.loop, self._peer
        due_s = events.last_sent_s + self._interval_s
        if loop.time() >= due_s:
            try:
                if not events.pending_bytes:  # a peer that has not taken the last word needs no other
                    events.send_heartbeat(self._service.clock.now_us() // 1000)
            except Exception as error:
                self._service.health.failed("heartbeats", error)
            else:
                self._service.health.recovered("heartbeats")
            due_s = loop.time() + self._interval_s
        self._timer = loop.call_at(due_s, self._on_timer)

    def stop(self) -> None:
        self._timer.cancel()
