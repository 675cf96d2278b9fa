"""[shell] Topics take turns on the loop: which one is told of next is the ready set's word, how often the governor's.

    mark ──► left alone? ──► ready set ──► a turn of the loop: told of, in order, until it is full ──► another turn
               │ (rung less than a window ago)     ▲
               └──► held until that is over ───────┘

With nothing else ready and no pressure a topic is told of in the very next turn, as if there were no set, and where but
few wait for it before those who wrote are answered (`first`). A turn is
full when it has woken so many peers or taken so long: those that were woken, and whoever else has something to do,
come before the next turn. Bells that are deferred, or held, keep what they have to tell.

The beat samples the governor every 100 ms while anything is going on, and not at all when nothing is.

[shell] Waking readers: one listener a topic, however many wait for it.

    committer's thread ──► Bell.strike ──► (once until it rang) the loop ──► its turn (`pump`) ──► everybody who waits

Whoever waits registers first, then looks, then waits: a record between the look and the wait rings. A topic that was
dropped is told of out of turn: there is nothing left that could be put off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from threading import get_ident
from typing import Final, Protocol

from tidelog.engine import Topic
from tidelog.engine.health import HealthMonitor
from tidelog.server.push.page_cache import PageCache
from tidelog.server.scheduling.fair_queue import FairQueue
from tidelog.server.scheduling.governor import SAMPLE_US, Governor

TURN_WAITERS_MAX: Final = 128  # peers a turn: about 5 ms of rendering and sending, the ceiling of the latency
TURN_US_MAX: Final = 2_000
NOTIFY_NOW_WAITERS_MAX: Final = 4  # peers that are told before those who wrote are answered


class Notifiable(Hashable, Protocol):
    """What is scheduled: a topic with somebody who waits for it."""

    notified_us: int  # when it was last told of

    @property
    def priority(self) -> int: ...

    @property
    def is_fan_out(self) -> bool: ...

    @property
    def waiter_count(self) -> int:
        """How many wait for it."""
        ...

    def deliver(self) -> int:
        """Tell everybody; return how many that were."""
        ...


class NotifyScheduler:
    """On the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        monotonic_us: Callable[[], int],
        governor: Governor,
        load: Callable[[], tuple[int, float]],
        health: HealthMonitor,
    ) -> None:
        self._health = health  # is told of what breaks; the pump goes on
        """`load`: calls in the pool, and how full the fullest WAL queue is."""
        self._loop, self._monotonic_us, self.governor, self._load = loop, monotonic_us, governor, load
        self.fair_queue: FairQueue[Notifiable] = FairQueue()
        self._delayed_heap: list[tuple[int, int, Notifiable]] = []  # (until when, order, unit)
        self._delayed_orders: dict[
            Notifiable, int
        ] = {}  # unit → its order above; one that is gone from here is passed over
        self._next_order = 0
        self._release_timer: asyncio.TimerHandle | None = None  # for the first that is held
        self._turn_scheduled = False
        self._single: Notifiable | None = (
            None  # the only one there is, and in no set: most are told of before another comes
        )
        self._single_since_us = 0  # when it was marked
        self._sample_timer: asyncio.TimerHandle | None = None

    @property
    def ready_count(self) -> int:
        """Topics that can be told of now."""
        return len(self.fair_queue) + (self._single is not None)

    @property
    def delayed_count(self) -> int:
        """Topics that are left alone until their window is over."""
        return len(self._delayed_orders)

    # ── in ────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, unit: Notifiable) -> None:
        """There is something to tell."""
        now_us, governor = self._monotonic_us(), self.governor
        window_us = governor.notify_delay_us
        if unit is self._single:
            return
        if window_us and unit.notified_us + window_us > now_us and unit not in self.fair_queue:
            self._delay(unit, unit.notified_us + window_us)
        else:
            if self._single is None and not governor.is_deferring and not len(self.fair_queue):
                self._single, self._single_since_us = unit, now_us
            else:
                self._enqueue_single()
                self.fair_queue.add(unit, unit.priority, now_us, fan_out=unit.is_fan_out)
            self._schedule_turn()
        self.start_sampling()

    def _enqueue_single(self) -> None:
        """There is another one, or its turn has come: whose it is, the set says."""
        unit, self._single = self._single, None
        if unit is not None:
            self.fair_queue.add(unit, unit.priority, self._single_since_us, fan_out=unit.is_fan_out)

    def forget(self, unit: Notifiable) -> None:
        """Nobody waits for it any more, or everybody was told."""
        if unit is self._single:
            self._single = None
        self.fair_queue.discard(unit)
        self._delayed_orders.pop(unit, None)

    def _delay(self, unit: Notifiable, until_us: int) -> None:
        if unit in self._delayed_orders:
            return
        self._next_order += 1
        self._delayed_orders[unit] = self._next_order
        heappush(self._delayed_heap, (until_us, self._next_order, unit))
        if self._delayed_heap[0][2] is unit:
            self._set_release_timer()

    def _set_release_timer(self) -> None:
        if self._release_timer is not None:
            self._release_timer.cancel()
        until_us = self._delayed_heap[0][0]
        self._release_timer = self._loop.call_later(
            max(until_us - self._monotonic_us(), 0) / 1e6, self._release_delayed, until_us
        )

    def _release_delayed(self, until_us: int) -> None:
        """What was held until now is ready."""
        self._release_timer = None
        now_us = max(until_us, self._monotonic_us())  # a timer may come a little early
        held = self._delayed_heap
        self._enqueue_single()
        while held and held[0][0] <= now_us:
            _, order, unit = heappop(held)
            if self._delayed_orders.get(unit) == order:
                del self._delayed_orders[unit]
                self.fair_queue.add(unit, unit.priority, now_us, fan_out=unit.is_fan_out)
        if held:
            self._set_release_timer()
        self._schedule_turn()

    # ── out ───────────────────────────────────────────────────────────────────────────────────

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled and self.ready_count:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def notify_now(self) -> None:
        """Something was committed: where it is one topic, and few wait for it, they are told now and not in a turn of
        their own."""
        unit = self._single
        if unit is not None and unit.waiter_count <= NOTIFY_NOW_WAITERS_MAX and not len(self.fair_queue):
            self._single = None
            unit.notified_us = now_us = self._monotonic_us()
            self.governor.record_delay(now_us - self._single_since_us)
            unit.deliver()

    def _run_turn(self) -> None:
        self._turn_scheduled = False
        self._enqueue_single()
        ready, governor, micros = self.fair_queue, self.governor, self._monotonic_us
        now_us = micros()
        until_us, woken, broke = now_us + TURN_US_MAX, 0, False
        while (turn := ready.pop(now_us)) is not None:
            unit = turn.key
            governor.record_delay(turn.scheduler_delay_us)
            unit.notified_us = now_us
            try:
                woken += unit.deliver()
            except Exception as error:  # of one topic's readers: all others are told
                self._health.failed("turns", error)
                broke = True
            ready.done(unit)
            now_us = micros()
            if woken >= TURN_WAITERS_MAX or now_us >= until_us:
                break
        if not broke:
            self._health.recovered("turns")
        self._schedule_turn()

    # ── the beat ──────────────────────────────────────────────────────────────────────────────

    def start_sampling(self) -> None:
        """Something is going on: have it sampled until it is over."""
        if self._sample_timer is None:
            self._sample_timer = self._loop.call_later(SAMPLE_US / 1e6, self._on_sample_timer)

    def _on_sample_timer(self) -> None:
        self._sample_timer = None  # first: a beat that breaks must not be the last one
        try:
            self._sample()
        except Exception as error:
            self._health.failed("pressure", error)
            self.start_sampling()
        else:
            self._health.recovered("pressure")

    def _sample(self) -> None:
        governor, ready = self.governor, self.fair_queue
        busy, ingest = self._load()
        was = governor.is_deferring
        governor.sample(self._monotonic_us(), ready=self.ready_count, busy=busy, ingest=ingest)
        if governor.is_deferring and not was:
            ready.defer()
        elif was and not governor.is_deferring:
            ready.resume_deferred(self._monotonic_us())
            self._schedule_turn()
        if not (governor.is_calm and not self.ready_count and not self._delayed_orders and not busy and not ingest):
            self.start_sampling()

    def stop(self) -> None:
        """Nothing is told any more."""
        for timer in (self._sample_timer, self._release_timer):
            if timer is not None:
                timer.cancel()
        self._sample_timer = self._release_timer = None


WakeCallback = Callable[[], None]


class TopicNotifier:
    def __init__(self, topic: Topic, notifiers: Notifiers) -> None:
        self.topic, self._notifiers = topic, notifiers
        self._is_pending = False
        self.notified_us = -(1 << 62)
        self.wakers: dict[WakeCallback, None] = {}

    @property
    def priority(self) -> int:
        return self.topic.priority

    @property
    def is_fan_out(self) -> bool:
        return self.topic.has_upstream

    @property
    def waiter_count(self) -> int:
        return len(self.wakers)

    def notify(self) -> None:
        """From any thread."""
        if self._is_pending and not self.topic.is_dropped:
            return
        self._is_pending = True
        self._notifiers.schedule(self)

    def deliver(self) -> int:
        self._is_pending = False  # first: a record that comes while it rings strikes again
        wakers = list(self.wakers)
        try:
            for wake in wakers:
                wake()
        finally:
            self._notifiers.page_cache.end_delivery()
        return len(wakers)


class Notifiers:
    """The bells of all topics that somebody waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scheduler: NotifyScheduler, page_cache: PageCache) -> None:
        self._loop, self._thread, self._scheduler, self.page_cache = loop, get_ident(), scheduler, page_cache
        self._by_topic: dict[int, TopicNotifier] = {}
        self._from_threads: deque[TopicNotifier] = deque()  # struck by other threads
        self._drain_scheduled = False

    def __len__(self) -> int:
        return len(self._by_topic)

    def add(self, topic: Topic, wake: WakeCallback) -> None:
        """Call `wake` on the loop after every write to the topic, its drop and the engine's close."""
        bell = self._by_topic.get(topic.id)
        if bell is None:
            bell = self._by_topic[topic.id] = TopicNotifier(topic, self)
            topic.add_listener(bell.notify)
        bell.wakers[wake] = None

    def remove(self, topic: Topic, wake: WakeCallback) -> None:
        bell = self._by_topic.get(topic.id)
        if bell is None:
            return
        bell.wakers.pop(wake, None)
        if not bell.wakers:
            bell.topic.remove_listener(bell.notify)
            del self._by_topic[topic.id]
            self._scheduler.forget(bell)

    def schedule(self, notifier: TopicNotifier) -> None:
        """From any thread: its turn is to come."""
        if get_ident() == self._thread:
            self._schedule_on_loop(notifier)
            return
        self._from_threads.append(notifier)
        if not self._drain_scheduled and not self._loop.is_closed():
            self._drain_scheduled = True
            self._loop.call_soon_threadsafe(self._drain_from_threads)

    def _drain_from_threads(self) -> None:
        self._drain_scheduled = False  # first: what is struck from here on asks for another call
        while self._from_threads:
            self._schedule_on_loop(self._from_threads.popleft())

    def _schedule_on_loop(self, notifier: TopicNotifier) -> None:
        if not notifier.wakers:
            return
        if notifier.topic.is_dropped:
            self._scheduler.forget(notifier)
            self._loop.call_soon(notifier.deliver)
        else:
            self._scheduler.schedule(notifier)

    def notify_all(self) -> None:
        """Everybody looks again, whoever's turn it is: the server is stopping."""
        for bell in list(self._by_topic.values()):
            self._scheduler.forget(bell)
            bell.deliver()
