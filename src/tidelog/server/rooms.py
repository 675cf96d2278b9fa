"""[shell] Channels on an event loop: what waits for a disk, a lock or a hook does so elsewhere, and comes back at once.

    publish ──► nothing keeps it waiting? ──► delivered in this turn
                 └──► the lane of its channel ──► a thread: accepted, one sync for the batch, delivered ──► answers
                        └── what comes meanwhile is the next batch, once the receivers of this one were told

    delivered ──► wake, from any thread ──► one call to the loop for all who were woken ──► turns of 128 receivers

Threads are the channels' own: a hook that hangs keeps channels waiting and no topic. A user whose last connection is
gone leaves the channels that do not persist, a while later, so that one who comes back at once has missed nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from tidelog.channels import Ack, ChannelManager, Hook, Pending, changes, talk
from tidelog.channels.names import check_channel
from tidelog.errors import BadInput, Error
from tidelog.server.api.problem import Problem
from tidelog.server.channel_frames import Kept
from tidelog.server.config import ServerConfig

if TYPE_CHECKING:
    from tidelog.server.hearing import Receiver

T = TypeVar("T")
THREADS: Final = 4  # they wait for syncs and hooks more than they work
TURN_MAX: Final = 128  # receivers in one turn of the loop
BATCH_MAX: Final = 512  # messages, about, before receivers have a turn: with one more publish their queues hold it
DOMAIN: Final = "localhost"  # of users whose key names none
_log = logging.getLogger("tidelog.server")


class Ask(NamedTuple):
    """One publish that waits."""

    user: str
    payloads: list[bytes]
    qos: int
    source: object
    future: asyncio.Future[Ack]


class Rooms:
    """On the loop's thread, but for what says otherwise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: ServerConfig, *, keys: bool, hook: Hook | None) -> None:
        self._loop, self.hook = loop, hook
        self.auth = keys or hook is not None
        self.domain = config.channel_domain or DOMAIN
        self._grace_s = config.channel_grace_ms / 1000
        self._manager: ChannelManager | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tidelog channels")
        self._lanes: dict[str, list[Ask]] = {}  # channel → what waits behind the batch that is under way
        self._awake: deque[Receiver] = deque()
        self._coming = False  # a turn for them is asked for
        self._told = 0  # receivers that had their turn
        self._burst = 0  # messages that were delivered at once since all of them had
        self._kept = Kept()
        self._streams = 0
        self.receivers: dict[Receiver, None] = {}
        self.by_stream: dict[str, Receiver] = {}
        self._connections: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._stopping = self._stopped = False

    def ready(self, manager: ChannelManager) -> None:
        self._manager = manager

    @property
    def manager(self) -> ChannelManager:
        if self._manager is None:
            raise Problem("not_ready", "the channels are being restored; nothing was done, retry")
        return self._manager

    @property
    def found(self) -> ChannelManager | None:
        """For whoever only looks."""
        return self._manager

    async def work(self, call: Callable[[], T]) -> T:
        """Run what may wait, off the loop."""
        return await self._loop.run_in_executor(self._pool, call)

    def later(self, call: Callable[[], object]) -> None:
        """The same, for what nobody waits for. At the end the channels are closed as a whole."""
        if not self._stopped:
            self._pool.submit(_quietly, call)

    def stop(self) -> None:
        """Everybody is told; nobody leaves a channel because the server does."""
        self._stopping = True
        for receiver in list(self.receivers):
            receiver.poke()
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()

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
        lane = self._lanes.get(channel)
        if lane is not None:
            lane.append(Ask(user, payloads, qos, source, future))
        elif not self._at_once(manager, channel, user, payloads, qos, source, future):
            self._lanes[channel] = [Ask(user, payloads, qos, source, future)]
            self._next(channel)
        return future

    def _at_once(
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
        if self.hook is not None or self._burst >= BATCH_MAX or not shard.lock.acquire(blocking=False):
            return False
        try:
            room = shard.rooms.get(channel)
            if room is not None and (room.meta.config.persist or room.committing or room.asked()):
                return False
            pending = talk.submit(manager, channel, user, payloads, qos=qos, source=source)
            pending.deliver()
        finally:
            shard.lock.release()
        self._burst += len(payloads)
        if pending.done:
            future.set_result(pending.result())
        else:  # a change of the channel has its turn first, and its thread delivers
            ask = Ask(user, payloads, qos, source, future)
            pending.add_callback(lambda known: self._loop.call_soon_threadsafe(_tell, [(ask, _outcome(known))]))
        return True

    def _next(self, channel: str) -> None:
        """Begin another batch, when those who were woken by the last one were told."""
        self._after(channel, self._told + len(self._awake))

    def _after(self, channel: str, told: int) -> None:
        if self._told < told:
            self._loop.call_soon(self._after, channel, told)
            return
        waiting = self._lanes[channel]
        if not waiting:
            del self._lanes[channel]
            return
        count = messages = 0
        while count < len(waiting) and messages < BATCH_MAX:
            messages += len(waiting[count].payloads)
            count += 1
        self._lanes[channel] = waiting[count:]
        running = self._pool.submit(self._commit, channel, waiting[:count])
        running.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._next, channel))

    def _commit(self, channel: str, asks: list[Ask]) -> None:
        """A batch, in a thread: all of it accepted, then one commit for it."""
        manager = self._manager
        assert manager is not None, "asked behind `manager`"
        accepted: list[tuple[Ask, Pending]] = []
        told: list[tuple[Ask, Ack | Exception]] = []
        for ask in asks:
            try:
                pending = talk.submit(manager, channel, ask.user, ask.payloads, qos=ask.qos, source=ask.source)
            except Exception as error:  # one publisher's, whatever it is
                told.append((ask, error))
            else:
                accepted.append((ask, pending))
        told += [(ask, pending.result()) for ask, pending in accepted if not ask.qos]  # known before it is delivered
        if told:
            self._loop.call_soon_threadsafe(_tell, told)
        done: list[tuple[Ask, Ack | Exception]] = []
        for ask, pending in accepted:
            try:
                if ask.qos:
                    done.append((ask, pending.wait()))
                else:
                    pending.deliver()
            except Exception as error:
                done.append((ask, error))
        if done:
            self._loop.call_soon_threadsafe(_tell, done)

    # ── delivery ──────────────────────────────────────────────────────────────────────────────

    def wake(self, receiver: Receiver) -> None:
        """Something waits for a receiver. From any thread."""
        self._awake.append(receiver)
        if not self._coming:
            self._coming = True
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._coming = False  # first: who is woken from here on asks for another turn
        for _ in range(min(len(self._awake), TURN_MAX)):
            receiver = self._awake.popleft()
            self._told += 1
            try:
                receiver.push(self._kept)
            except Exception as error:  # the rim: what is wrong with one receiver is its own end and nobody else's
                _log.error("a receiver of %s broke", receiver.channel, exc_info=error)
                receiver.end()
        if not self._awake:
            self._kept.clear()
            self._burst = 0
        elif not self._coming:
            self._coming = True
            self._loop.call_soon(self._turn)

    def stream_name(self) -> str:
        """A name that no other stream of this process has."""
        self._streams += 1
        return f"st_{self._streams:x}"

    # ── who is here ───────────────────────────────────────────────────────────────────────────

    def arrived(self, user: str) -> None:
        """A connection of a user."""
        self._connections[user] += 1
        timer = self._leaving.pop(user, None)
        if timer is not None:
            timer.cancel()

    def departed(self, user: str) -> None:
        self._connections[user] -= 1
        if not self._connections[user]:
            del self._connections[user]
            if self._stopping:
                return
            self._leaving[user] = self._loop.call_later(self._grace_s, self._gone, user)

    def _gone(self, user: str) -> None:
        del self._leaving[user]
        manager = self._manager
        if manager is not None:
            self.later(lambda: changes.gone(manager, user))


def _tell(told: Iterable[tuple[Ask, Ack | Exception]]) -> None:
    for ask, outcome in told:
        if ask.future.done():
            continue  # whoever asked has left
        if isinstance(outcome, Exception):
            ask.future.set_exception(outcome)
        else:
            ask.future.set_result(outcome)


def _outcome(pending: Pending) -> Ack | Exception:
    try:
        return pending.result()
    except Error as error:
        return error


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Error as error:
        _log.warning("behind a connection that ended: %s", error)
    except Exception as error:  # the rim of a thread: nobody else would hear of it
        _log.error("behind a connection that ended", exc_info=error)
