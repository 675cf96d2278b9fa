"""[shell] Channels on an event loop: what waits for a disk, a lock or a hook does so elsewhere, and comes back at once.

    publish ──► nothing keeps it waiting? ──► delivered in this turn
                 └──► the lane of its channel ──► a thread: accepted, one sync for the batch, delivered ──► answers
                        └── what comes meanwhile is the next batch, once the receivers of this one were told

    delivered ──► wake, from any thread ──► one call to the loop for all who were woken ──► turns of 128 receivers

Threads are the channels' own: a hook that hangs keeps channels waiting and no topic. A user whose last connection is
gone leaves the channels that do not persist, a while later, so that one who comes back at once has missed nothing.

[shell] One member who listens to one channel, over whatever carries it.

    open ──► (catch up from the history) ──► begin ──► push, whenever it is woken ──► over
                                                        │  ▲
                             takes nothing: held ───────┘  └── resume, once it has taken most of it

Subscribed first and caught up then: what is said meanwhile waits in the queue, and what is in both is sent once, by its
seq. A receiver that is held keeps nobody waiting: its queue is bounded, and one that runs full is the end of it, told
as such. The history has the rest, from the last seq that was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol, TypeVar

from tidelog.channels import (
    Ack,
    ChannelEvent,
    ChannelManager,
    Hook,
    Message,
    PublishFuture,
    Subscription,
    SubscriptionEnded,
    membership,
    messaging,
)
from tidelog.channels.rules import check_channel
from tidelog.errors import BadInput, Error, Forbidden, NotPersistent, WrongType
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.push.peers import HIGH_WATER_BYTES, EventEncoder, FrameCache

T = TypeVar("T")
CHANNEL_THREADS: Final = 4  # they wait for syncs and hooks more than they work
TURN_STREAMS_MAX: Final = 128  # receivers in one turn of the loop
BATCH_MESSAGES_MAX: Final = (
    512  # messages, about, before receivers have a turn: with one more publish their queues hold it
)
DEFAULT_DOMAIN: Final = "localhost"  # of users whose key names none
_log = logging.getLogger("tidelog.server")


class PendingPublish(NamedTuple):
    """One publish that waits."""

    user: str
    payloads: list[bytes]
    qos: int
    source: object
    future: asyncio.Future[Ack]


class ChannelService:
    """On the loop's thread, but for what says otherwise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: ServerConfig, *, keys: bool, hook: Hook | None) -> None:
        self._loop, self.hook = loop, hook
        self.auth = keys or hook is not None
        self.domain = config.channel_domain or DEFAULT_DOMAIN
        self._grace_s = config.channel_grace_ms / 1000
        self._manager: ChannelManager | None = None
        self._pool = ThreadPoolExecutor(CHANNEL_THREADS, thread_name_prefix="tidelog channels")
        self._publish_queues: dict[
            str, list[PendingPublish]
        ] = {}  # channel → what waits behind the batch that is under way
        self._woken: deque[ChannelStream] = deque()
        self._turn_scheduled = False  # a turn for them is asked for
        self._served_count = 0  # receivers that had their turn
        self._immediate_messages = 0  # messages that were delivered at once since all of them had
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
        """For whoever only looks."""
        return self._manager

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run what may wait, off the loop."""
        return await self._loop.run_in_executor(self._pool, call)

    def run_in_background(self, call: Callable[[], object]) -> None:
        """The same, for what nobody waits for. At the end the channels are closed as a whole."""
        if not self._stopped:
            self._pool.submit(_run_logged, call)

    def stop(self) -> None:
        """Everybody is told; nobody leaves a channel because the server does."""
        self._stopping = True
        for receiver in list(self.streams):
            receiver.on_shutdown()
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
        """The ack, or the error. Publishes of one channel are accepted in the order of these calls."""
        manager = self.manager
        check_channel(channel)
        if qos not in (0, 1):
            raise BadInput(f"qos is 0 or 1, not {qos!r}; nothing was written")
        future: asyncio.Future[Ack] = self._loop.create_future()
        lane = self._publish_queues.get(channel)
        if lane is not None:
            lane.append(PendingPublish(user, payloads, qos, source, future))
        elif not self._try_publish_now(manager, channel, user, payloads, qos, source, future):
            self._publish_queues[channel] = [PendingPublish(user, payloads, qos, source, future)]
            self._start_next_batch(channel)
        return future

    def _try_publish_now(
        self,
        manager: ChannelManager,
        channel: str,
        user: str,
        payloads: list[bytes],
        qos: int,
        source: object,
        future: asyncio.Future[Ack],
    ) -> bool:
        """Publish to a channel that keeps nothing, unless that would wait for somebody."""
        shard = manager.shard(channel)
        if (
            self.hook is not None
            or self._immediate_messages >= BATCH_MESSAGES_MAX
            or not shard.lock.acquire(blocking=False)
        ):
            return False
        try:
            room = shard.channels.get(channel)
            if room is not None and (room.meta.config.persist or room.committing or room.has_waiting_change()):
                return False
            pending = messaging.submit(manager, channel, user, payloads, qos=qos, source=source)
            pending.deliver()
        finally:
            shard.lock.release()
        self._immediate_messages += len(payloads)
        if pending.done:
            future.set_result(pending.result())
        else:  # a change of the channel has its turn first, and its thread delivers
            ask = PendingPublish(user, payloads, qos, source, future)
            pending.add_done_callback(
                lambda known: self._loop.call_soon_threadsafe(_resolve_publishes, [(ask, _publish_outcome(known))])
            )
        return True

    def _start_next_batch(self, channel: str) -> None:
        """Begin another batch, when those who were woken by the last one were told."""
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
        """A batch, in a thread: all of it accepted, then one commit for it."""
        manager = self._manager
        assert manager is not None, "asked behind `manager`"
        accepted: list[tuple[PendingPublish, PublishFuture]] = []
        told: list[tuple[PendingPublish, Ack | Exception]] = []
        for ask in publishes:
            try:
                pending = messaging.submit(manager, channel, ask.user, ask.payloads, qos=ask.qos, source=ask.source)
            except Exception as error:  # one publisher's, whatever it is
                told.append((ask, error))
            else:
                accepted.append((ask, pending))
        told += [(ask, pending.result()) for ask, pending in accepted if not ask.qos]  # known before it is delivered
        if told:
            self._loop.call_soon_threadsafe(_resolve_publishes, told)
        done: list[tuple[PendingPublish, Ack | Exception]] = []
        for ask, pending in accepted:
            try:
                if ask.qos:
                    done.append((ask, pending.wait()))
                else:
                    pending.deliver()
            except Exception as error:
                done.append((ask, error))
        if done:
            self._loop.call_soon_threadsafe(_resolve_publishes, done)

    # ── delivery ──────────────────────────────────────────────────────────────────────────────

    def wake(self, stream: ChannelStream) -> None:
        """Something waits for a receiver. From any thread."""
        self._woken.append(stream)
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon_threadsafe(self._run_turn)

    def _run_turn(self) -> None:
        self._turn_scheduled = False  # first: who is woken from here on asks for another turn
        for _ in range(min(len(self._woken), TURN_STREAMS_MAX)):
            receiver = self._woken.popleft()
            self._served_count += 1
            try:
                receiver.push(self._frame_cache)
            except Exception as error:  # the rim: what is wrong with one receiver is its own end and nobody else's
                _log.error("a receiver of %s broke", receiver.channel, exc_info=error)
                receiver.end()
        if not self._woken:
            self._frame_cache.clear()
            self._immediate_messages = 0
        elif not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def stream_name(self) -> str:
        """A name that no other stream of this process has."""
        self._stream_count += 1
        return f"st_{self._stream_count:x}"

    # ── who is here ───────────────────────────────────────────────────────────────────────────

    def on_connect(self, user: str) -> None:
        """A connection of a user."""
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
    for ask, outcome in outcomes:
        if ask.future.done():
            continue  # whoever asked has left
        if isinstance(outcome, Exception):
            ask.future.set_exception(outcome)
        else:
            ask.future.set_result(outcome)


def _publish_outcome(future: PublishFuture) -> Ack | Exception:
    try:
        return future.result()
    except Error as error:
        return error


def _run_logged(call: Callable[[], object]) -> None:
    try:
        call()
    except Error as error:
        _log.warning("behind a connection that ended: %s", error)
    except Exception as error:  # the rim of a thread: nobody else would hear of it
        _log.error("behind a connection that ended", exc_info=error)


_EVENTS_PER_STEP: Final = 64  # events between two looks at what the peer has taken


class ChannelPeer(Protocol):
    """Who is told."""

    @property
    def encode(self) -> EventEncoder: ...
    @property
    def pending_bytes(self) -> int: ...
    def send_frames(self, frames: list[bytes]) -> None: ...
    def send_gap(self, channel: str, first: int, last: int) -> None: ...
    def send_error(self, channel: str, code: str, message: str) -> None: ...


class ChannelStream:
    """On the loop's thread. `stirred` is called when it is held or over."""

    def __init__(
        self, channels: ChannelService, channel: str, user: str, on_change: Callable[[], None], source: object
    ) -> None:
        self._channels, self.channel, self.user, self._on_change = channels, channel, user, on_change
        self.source = source
        self.head_seq = 0  # of the channel when it was subscribed to, where it keeps nothing
        self.sent_seq = 0  # the last seq that was handed to the peer
        self.is_ended = False
        self.is_paused = True  # until it begins
        self._closed = False
        self._peer: ChannelPeer | None = None
        self._subscription: Subscription | None = None

    # ── the beginning and the end ─────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Hear of everything from now on. Raises what the channel says."""
        self._channels.streams[self] = None
        try:
            await self._channels.run_blocking(self._subscribe)
        except BaseException:
            self.close()
            raise

    def _subscribe(self) -> None:
        manager = self._channels.manager
        with manager.locked(self.channel):
            made = messaging.subscribe(manager, self.channel, self.user, wake=self._wake, source=self.source)
            room = manager.get_channel(self.channel)
            self.head_seq = 0 if room.meta.config.persist else room.next_seq - 1
        self._subscription = made
        if self._closed:  # by the loop meanwhile: one of the two sees the other
            made.close()

    def close(self) -> None:
        """Hear no more. Membership stays."""
        if not self._closed:
            self._closed = self.is_ended = True
            self._channels.streams.pop(self, None)
            if self._subscription is not None and not self._subscription.closed:
                self._channels.run_in_background(self._subscription.close)

    def _wake(self) -> None:
        self._channels.wake(self)

    def on_shutdown(self) -> None:
        """The server stops."""
        self._on_change()

    # ── what was missed ───────────────────────────────────────────────────────────────────────

    async def catch_up(self, peer: ChannelPeer, after_seq: int, wait_writable: Callable[[], Awaitable[None]]) -> None:
        """Send what the history has behind seq `after`, up to where it was when this began."""
        manager, channel, last = self._channels.manager, self.channel, 0
        self.sent_seq = after_seq
        while not self.is_ended:
            first = self.sent_seq + 1
            try:
                page = await self._channels.run_blocking(
                    lambda: messaging.history(manager, channel, self.user, first=first)  # noqa: B023 - awaited here
                )
            except NotPersistent:
                if self.sent_seq < self.head_seq:
                    peer.send_gap(channel, self.sent_seq + 1, self.head_seq)
                    self.sent_seq = self.head_seq
                return
            except (WrongType, Forbidden):
                return  # there is nothing that this user could have missed
            except Error as error:
                problem = api_error_from(error)
                peer.send_error(channel, problem.code, problem.message)
                self.end()
                return
            last = last or page.last_seq
            if first > page.last_seq + 1:
                self.sent_seq = page.last_seq  # of a channel that ended and was made again
            elif first < page.first_seq:
                peer.send_gap(channel, first, page.first_seq - 1)
                self.sent_seq = page.first_seq - 1
            if page.messages:
                peer.send_frames([peer.encode(message) for message in page.messages])
                self.sent_seq = page.messages[-1].seq
            if self.sent_seq >= last or not page.messages:
                return
            if peer.pending_bytes > HIGH_WATER_BYTES:
                await wait_writable()

    # ── what comes ────────────────────────────────────────────────────────────────────────────

    def start(self, peer: ChannelPeer) -> None:
        """Send what waits, and whatever comes from now on."""
        self._peer = peer
        self.resume()

    def resume(self) -> None:
        """The peer has taken most of what it was sent."""
        self.is_paused = False
        self.push(FrameCache())

    def push(self, frame_cache: FrameCache) -> None:
        """Send what waits, as far as the peer takes it."""
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
        """It is over for a peer that takes nothing: what it has no room for is not sent to it any more."""
        events = subscription.take()
        last = events[-1] if events else None
        if isinstance(last, SubscriptionEnded) and last.reason in ("slow", "broken"):
            events = [last._replace(last_seq=self.sent_seq)]
        self._send(events, peer, FrameCache())
        self.end()

    def _send(self, events: list[ChannelEvent], peer: ChannelPeer, frame_cache: FrameCache) -> None:
        made, render = [], peer.encode
        for event in events:
            if isinstance(event, Message):
                if event.seq <= self.sent_seq:
                    continue  # it was in the history
                self.sent_seq = event.seq
            made.append(frame_cache.get(event, render))
        if made:
            peer.send_frames(made)

    def end(self) -> None:
        """Nothing more is said to it."""
        self.is_ended = True
        self._on_change()


class WakeEvent:
    """Something happened to a receiver that its own task has to look at."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
