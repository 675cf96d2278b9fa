"""Channels on the event loop: calls that block run in threads, and their results come back to the loop.

    publish ──► can it be delivered without blocking? ──► delivered in this turn
                 └──► the queue of its channel ──► a thread: accepted, one fsync for the batch, delivered ──► acks
                        └── publishes meanwhile are the next batch, once the streams of this one had their turn

    delivered ──► wake, from any thread ──► one call to the loop for all woken streams ──► turns of 128 streams

The threads belong to the channels: a hook that hangs blocks channels and no topic. A user without a connection leaves
the channels that do not persist after a grace period, so that a user who reconnects at once has missed nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from tidelog.channels import (
    Ack,
    Channel,
    ChannelEvent,
    ChannelManager,
    Hook,
    Message,
    PublishFuture,
    Subscription,
    SubscriptionEnded,
    membership,
)
from tidelog.channels.rules import check_channel
from tidelog.errors import BadInput, Error, Forbidden, NotPersistent, WrongType
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.push.peers import HIGH_WATER_BYTES, EventEncoder, FrameCache

T = TypeVar("T")
CHANNEL_THREADS: Final = 4  # they mostly wait for fsyncs and hooks
TURN_STREAMS_MAX: Final = 128  # streams in one turn of the loop
BATCH_MESSAGES_MAX: Final = 512  # about, before receivers get a turn: their queues hold that and one more publish
DEFAULT_DOMAIN: Final = "localhost"  # of users whose key names none
_log = logging.getLogger("tidelog.server")


class PendingPublish(NamedTuple):
    """A publish that waits for its batch."""

    user: str
    payloads: list[bytes]
    qos: int
    source: object
    future: asyncio.Future[Ack]


class ChannelService:
    """Channels of a server. On the loop's thread, except where a method says otherwise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: ServerConfig, *, keys: bool, hook: Hook | None) -> None:
        self._loop, self.hook = loop, hook
        self.auth = keys or hook is not None
        self.domain = config.channel_domain or DEFAULT_DOMAIN
        self._grace_s = config.channel_grace_ms / 1000
        self._manager: ChannelManager | None = None
        self._pool = ThreadPoolExecutor(CHANNEL_THREADS, thread_name_prefix="tidelog channels")
        self._publish_queues: dict[str, list[PendingPublish]] = {}  # by channel, after its running batch
        self._woken: deque[ChannelStream] = deque()
        self._turn_scheduled = False
        self._served_count = 0  # streams that had their turn
        self._immediate_messages = 0  # messages delivered at once since every woken stream had its turn
        self._frame_cache = FrameCache()
        self._stream_count = 0
        self.streams: dict[ChannelStream, None] = {}
        self.streams_by_name: dict[str, ChannelStream] = {}
        self._connections: Counter[str] = Counter()
        self._leave_timers: dict[str, asyncio.TimerHandle] = {}
        self._stopping = self._stopped = False

    def set_manager(self, manager: ChannelManager) -> None:
        self._manager = manager

    @property
    def manager(self) -> ChannelManager:
        if self._manager is None:
            raise ApiError("not_ready", "the channels are being restored; nothing was done, retry")
        return self._manager

    @property
    def manager_or_none(self) -> ChannelManager | None:
        """The manager for metrics: None before the channels are restored."""
        return self._manager

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread of the channels."""
        return await self._loop.run_in_executor(self._pool, call)

    def run_in_background(self, call: Callable[[], object]) -> None:
        """Run a call in a thread without waiting for it. Does nothing after `close`, which closes all channels."""
        if not self._stopped:
            self._pool.submit(_run_logged, call)

    def stop(self) -> None:
        """Notify every stream. Users stay members when the server stops."""
        self._stopping = True
        for stream in list(self.streams):
            stream.on_shutdown()
        for timer in self._leave_timers.values():
            timer.cancel()
        self._leave_timers.clear()

    def close(self) -> None:
        self._stopped = True
        self._pool.shutdown(wait=True)

    # ── publish ───────────────────────────────────────────────────────────────────────────────

    def publish(
        self, channel: str, user: str, payloads: list[bytes], *, qos: int, source: object
    ) -> asyncio.Future[Ack]:
        """Return a future of the ack. Publishes of one channel are accepted in the order of these calls."""
        manager = self.manager
        check_channel(channel)
        if qos not in (0, 1):
            raise BadInput(f"qos is 0 or 1, not {qos!r}; nothing was written")
        future: asyncio.Future[Ack] = self._loop.create_future()
        publish = PendingPublish(user, payloads, qos, source, future)
        queue = self._publish_queues.get(channel)
        if queue is not None:
            queue.append(publish)
        elif not self._try_publish_now(manager, channel, publish):
            self._publish_queues[channel] = [publish]
            self._start_next_batch(channel)
        return future

    def _try_publish_now(self, manager: ChannelManager, channel: str, publish: PendingPublish) -> bool:
        """Publish to a channel that does not persist, unless that would block."""
        shard = manager.shard(channel)
        if (
            self.hook is not None
            or self._immediate_messages >= BATCH_MESSAGES_MAX
            or not shard.lock.acquire(blocking=False)
        ):
            return False
        try:
            state = shard.channels.get(channel)
            if state is not None and (state.meta.config.persist or not state.commits.is_idle):
                return False
            token = _submit(manager, channel, publish)
            token.deliver()
        finally:
            shard.lock.release()
        self._immediate_messages += len(publish.payloads)
        if token.done:
            publish.future.set_result(token.result())
        else:  # a change of the channel comes first, and its thread delivers
            token.add_done_callback(
                lambda done: self._loop.call_soon_threadsafe(_resolve_publishes, [(publish, _publish_outcome(done))])
            )
        return True

    def _start_next_batch(self, channel: str) -> None:
        """Start the next batch after the streams that the last one woke had their turn."""
        self._start_batch_after(channel, self._served_count + len(self._woken))

    def _start_batch_after(self, channel: str, served_count: int) -> None:
        if self._served_count < served_count:
            self._loop.call_soon(self._start_batch_after, channel, served_count)
            return
        waiting = self._publish_queues[channel]
        if not waiting:
            del self._publish_queues[channel]
            return
        count = messages = 0
        while count < len(waiting) and messages < BATCH_MESSAGES_MAX:
            messages += len(waiting[count].payloads)
            count += 1
        self._publish_queues[channel] = waiting[count:]
        running = self._pool.submit(self._publish_batch, channel, waiting[:count])
        running.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._start_next_batch, channel))

    def _publish_batch(self, channel: str, publishes: list[PendingPublish]) -> None:
        """In a thread: accept all publishes, then commit them together."""
        manager = self._manager
        assert manager is not None, "checked by `publish`"
        accepted: list[tuple[PendingPublish, PublishFuture]] = []
        outcomes: list[tuple[PendingPublish, Ack | Exception]] = []
        for publish in publishes:
            try:
                accepted.append((publish, _submit(manager, channel, publish)))
            except Exception as error:  # of this publisher only, whatever it is
                outcomes.append((publish, error))
        outcomes += [(publish, token.result()) for publish, token in accepted if not publish.qos]  # before the delivery
        if outcomes:
            self._loop.call_soon_threadsafe(_resolve_publishes, outcomes)
        outcomes = []
        for publish, token in accepted:
            try:
                if publish.qos:
                    outcomes.append((publish, token.wait()))
                else:
                    token.deliver()
            except Exception as error:
                outcomes.append((publish, error))
        if outcomes:
            self._loop.call_soon_threadsafe(_resolve_publishes, outcomes)

    # ── delivery ──────────────────────────────────────────────────────────────────────────────

    def wake(self, stream: ChannelStream) -> None:
        """Give a stream a turn: it has events. From any thread."""
        self._woken.append(stream)
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon_threadsafe(self._run_turn)

    def _run_turn(self) -> None:
        self._turn_scheduled = False  # first: a stream that is woken from here on schedules another turn
        for _ in range(min(len(self._woken), TURN_STREAMS_MAX)):
            stream = self._woken.popleft()
            self._served_count += 1
            try:
                stream.push(self._frame_cache)
            except Exception as error:  # of this stream only: the others get their turn
                _log.error("a stream of channel %s failed", stream.channel, exc_info=error)
                stream.end()
        if not self._woken:
            self._frame_cache.clear()
            self._immediate_messages = 0
        elif not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def stream_name(self) -> str:
        """Return a name that is unique in this process."""
        self._stream_count += 1
        return f"st_{self._stream_count:x}"

    # ── presence ──────────────────────────────────────────────────────────────────────────────

    def on_connect(self, user: str) -> None:
        """Count a connection of a user, and cancel its leave."""
        self._connections[user] += 1
        timer = self._leave_timers.pop(user, None)
        if timer is not None:
            timer.cancel()

    def on_disconnect(self, user: str) -> None:
        self._connections[user] -= 1
        if not self._connections[user]:
            del self._connections[user]
            if self._stopping:
                return
            self._leave_timers[user] = self._loop.call_later(self._grace_s, self._on_grace_expired, user)

    def _on_grace_expired(self, user: str) -> None:
        del self._leave_timers[user]
        manager = self._manager
        if manager is not None:
            self.run_in_background(lambda: membership.leave_transient_channels(manager, user))


def _resolve_publishes(outcomes: Iterable[tuple[PendingPublish, Ack | Exception]]) -> None:
    for publish, outcome in outcomes:
        if publish.future.done():
            continue  # the publisher has left
        if isinstance(outcome, Exception):
            publish.future.set_exception(outcome)
        else:
            publish.future.set_result(outcome)


def _submit(manager: ChannelManager, channel: str, publish: PendingPublish) -> PublishFuture:
    return Channel(manager, channel, publish.user, publish.source).submit(publish.payloads, qos=publish.qos)


def _publish_outcome(future: PublishFuture) -> Ack | Exception:
    try:
        return future.result()
    except Error as error:
        return error


def _run_logged(call: Callable[[], object]) -> None:
    try:
        call()
    except Error as error:
        _log.warning("background call of the channels: %s", error)
    except Exception as error:  # in a thread without a waiter: it would be lost
        _log.error("background call of the channels failed", exc_info=error)


_EVENTS_PER_STEP: Final = 64  # events between two checks of the unsent bytes


class ChannelPeer(Protocol):
    """A subscriber over its transport."""

    @property
    def encode(self) -> EventEncoder: ...
    @property
    def pending_bytes(self) -> int: ...
    def send_frames(self, frames: list[bytes]) -> None: ...
    def send_gap(self, channel: str, first: int, last: int) -> None: ...
    def send_error(self, channel: str, code: str, message: str) -> None: ...


class ChannelStream:
    """One subscriber of one channel, over any transport. On the loop's thread.

        open ──► (catch_up from the history) ──► start ──► push, whenever it is woken ──► end
                                                            │  ▲
                              unsent bytes: paused ─────────┘  └── resume, once the peer has read most of them

    The stream subscribes first and then catches up: messages that come meanwhile wait in the queue, and a message in
    both is sent once, by its seq. A paused stream delays no other: its queue is bounded, and a full queue ends the
    stream with an event that says so. The history has the rest, after the last seq that was sent. `on_change` is
    called when the stream is paused or ends.
    """

    def __init__(
        self, channels: ChannelService, channel: str, user: str, on_change: Callable[[], None], source: object
    ) -> None:
        self._channels, self.channel, self.user, self._on_change = channels, channel, user, on_change
        self.source = source
        self.head_seq = 0  # of the channel at the subscription, where it does not persist
        self.sent_seq = 0  # the last seq that was sent
        self.is_ended = False
        self.is_paused = True  # until it starts
        self._closed = False
        self._peer: ChannelPeer | None = None
        self._subscription: Subscription | None = None

    # ── open and close ────────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Subscribe to the channel. Raises its error."""
        self._channels.streams[self] = None
        try:
            await self._channels.run_blocking(self._subscribe)
        except BaseException:
            self.close()
            raise

    def _subscribe(self) -> None:
        manager = self._channels.manager
        with manager.locked(self.channel):
            subscription = Channel(manager, self.channel, self.user, self.source).subscribe(wake=self._wake)
            state = manager.get_channel(self.channel)
            self.head_seq = 0 if state.meta.config.persist else state.next_seq - 1
        self._subscription = subscription
        if self._closed:  # by the loop meanwhile: one of the two closes it
            subscription.close()

    def close(self) -> None:
        """Unsubscribe. Membership stays."""
        if not self._closed:
            self._closed = self.is_ended = True
            self._channels.streams.pop(self, None)
            if self._subscription is not None and not self._subscription.closed:
                self._channels.run_in_background(self._subscription.close)

    def _wake(self) -> None:
        self._channels.wake(self)

    def on_shutdown(self) -> None:
        self._on_change()

    # ── catch up ──────────────────────────────────────────────────────────────────────────────

    async def catch_up(self, peer: ChannelPeer, after_seq: int, wait_writable: Callable[[], Awaitable[None]]) -> None:
        """Send the history after `after_seq`, up to the seq that it had when this began."""
        channel, last_seq = self.channel, 0
        handle = Channel(self._channels.manager, channel, self.user)
        self.sent_seq = after_seq
        while not self.is_ended:
            first = self.sent_seq + 1
            try:
                page = await self._channels.run_blocking(partial(handle.history, first))
            except NotPersistent:
                if self.sent_seq < self.head_seq:
                    peer.send_gap(channel, self.sent_seq + 1, self.head_seq)
                    self.sent_seq = self.head_seq
                return
            except (WrongType, Forbidden):
                return  # this user cannot have missed anything
            except Error as error:
                problem = api_error_from(error)
                peer.send_error(channel, problem.code, problem.message)
                self.end()
                return
            last_seq = last_seq or page.last_seq
            if first > page.last_seq + 1:
                self.sent_seq = page.last_seq  # of a channel that was deleted and created again
            elif first < page.first_seq:
                peer.send_gap(channel, first, page.first_seq - 1)
                self.sent_seq = page.first_seq - 1
            if page.messages:
                peer.send_frames([peer.encode(message) for message in page.messages])
                self.sent_seq = page.messages[-1].seq
            if self.sent_seq >= last_seq or not page.messages:
                return
            if peer.pending_bytes > HIGH_WATER_BYTES:
                await wait_writable()

    # ── push ──────────────────────────────────────────────────────────────────────────────────

    def start(self, peer: ChannelPeer) -> None:
        """Send queued events, and every further one."""
        self._peer = peer
        self.resume()

    def resume(self) -> None:
        """Continue: the peer has read most of its bytes."""
        self.is_paused = False
        self.push(FrameCache())

    def push(self, frame_cache: FrameCache) -> None:
        """Send queued events until too many bytes are unsent."""
        subscription, peer = self._subscription, self._peer
        if subscription is None or peer is None or self.is_ended:
            return
        if self.is_paused:
            if subscription.closed:
                self._send_last_event(subscription, peer)
            return
        while True:
            if peer.pending_bytes > HIGH_WATER_BYTES:
                self.is_paused = True
                self._on_change()
                return
            events = subscription.take(_EVENTS_PER_STEP)
            if not events:
                return
            self._send(events, peer, frame_cache)
            if isinstance(events[-1], SubscriptionEnded):
                self.end()
                return

    def _send_last_event(self, subscription: Subscription, peer: ChannelPeer) -> None:
        """End a paused stream: after `slow` and `broken` the queued events are not sent."""
        events = subscription.take()
        last = events[-1] if events else None
        if isinstance(last, SubscriptionEnded) and last.reason in ("slow", "broken"):
            events = [last._replace(last_seq=self.sent_seq)]
        self._send(events, peer, FrameCache())
        self.end()

    def _send(self, events: list[ChannelEvent], peer: ChannelPeer, frame_cache: FrameCache) -> None:
        frames = []
        for event in events:
            if isinstance(event, Message):
                if event.seq <= self.sent_seq:
                    continue  # it was in the history
                self.sent_seq = event.seq
            frames.append(frame_cache.get(event, peer.encode))
        if frames:
            peer.send_frames(frames)

    def end(self) -> None:
        """Send nothing more."""
        self.is_ended = True
        self._on_change()


class WakeEvent:
    """An event that `wait` clears. Called when a stream is paused or ends."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
