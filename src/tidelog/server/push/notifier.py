"""Notification of readers after a write: one listener a topic, and turns of the loop for all topics.

    committer's thread ──► TopicNotifier.notify ──► (once until delivered) the loop ──► NotifyScheduler.schedule
    schedule ──► delayed? ──► fair queue ──► a turn of the loop: topics in order, until it is full ──► another turn
                   │ (notified less than the governor's delay ago)  ▲
                   └──► waits until that is over ───────────────────┘

A reader registers first, then reads, then waits: a record between the read and the wait notifies it. With one ready
topic and no pressure its readers are notified in the next turn, and where they are few before the writers get their
responses (`notify_now`). A turn is full when it has notified 128 readers or taken 2 ms; the readers and other work of
the loop come before the next turn. Deferred and delayed topics keep their notification. A dropped topic is notified out
of turn. The governor is sampled every 100 ms while there is work, and not at all when the server is idle.
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
from tidelog.engine.topic import topic_operations
from tidelog.server.push.page_cache import PageCache
from tidelog.server.push.scheduling import SAMPLE_US, FairQueue, Governor

TURN_WAITERS_MAX: Final = 128  # readers in a turn: about 5 ms of encoding and sending, the limit of the latency
TURN_US_MAX: Final = 2_000
NOTIFY_NOW_WAITERS_MAX: Final = 4  # readers that are notified before the writers get their responses


class Notifiable(Hashable, Protocol):
    """A unit of scheduling: a topic with waiting readers."""

    notified_us: int  # when its readers were last notified

    @property
    def priority(self) -> int: ...

    @property
    def is_fan_out(self) -> bool: ...

    @property
    def waiter_count(self) -> int: ...

    def deliver(self) -> int:
        """Notify all readers; return how many there were."""
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
        """`load` returns the calls in the pool and the fill level of the fullest WAL queue."""
        self._health = health
        self._loop, self._monotonic_us, self.governor, self._load = loop, monotonic_us, governor, load
        self.fair_queue: FairQueue[Notifiable] = FairQueue()
        self._delayed_heap: list[tuple[int, int, Notifiable]] = []  # (until when, order, unit)
        self._delayed_orders: dict[Notifiable, int] = {}  # unit → its order; a unit without one is skipped in the heap
        self._next_order = 0
        self._release_timer: asyncio.TimerHandle | None = None  # for the first delayed unit
        self._turn_scheduled = False
        # The only ready unit, outside the queue: most units are notified before another one is ready.
        self._single: Notifiable | None = None
        self._single_since_us = 0
        self._sample_timer: asyncio.TimerHandle | None = None

    @property
    def ready_count(self) -> int:
        """The number of topics whose readers can be notified now."""
        return len(self.fair_queue) + (self._single is not None)

    @property
    def delayed_count(self) -> int:
        """The number of topics that wait for the end of their delay."""
        return len(self._delayed_orders)

    # ── ready ──────────────────────────────────────────────────────────────────────────────────

    def schedule(self, unit: Notifiable) -> None:
        """Notify the readers of a topic in one of the next turns."""
        now_us, governor = self._monotonic_us(), self.governor
        delay_us = governor.notify_delay_us
        if unit is self._single:
            return
        if delay_us and unit.notified_us + delay_us > now_us and unit not in self.fair_queue:
            self._delay(unit, unit.notified_us + delay_us)
        else:
            if self._single is None and not governor.is_deferring and not len(self.fair_queue):
                self._single, self._single_since_us = unit, now_us
            else:
                self._enqueue_single()
                self.fair_queue.add(unit, unit.priority, now_us, fan_out=unit.is_fan_out)
            self._schedule_turn()
        self.start_sampling()

    def _enqueue_single(self) -> None:
        """Move the single unit into the queue: another one is ready, or a turn begins."""
        unit, self._single = self._single, None
        if unit is not None:
            self.fair_queue.add(unit, unit.priority, self._single_since_us, fan_out=unit.is_fan_out)

    def forget(self, unit: Notifiable) -> None:
        """Remove a topic that has no readers any more, or whose readers were notified."""
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
        """Make units ready whose delay is over."""
        self._release_timer = None
        now_us = max(until_us, self._monotonic_us())  # a timer may fire a little early
        delayed = self._delayed_heap
        self._enqueue_single()
        while delayed and delayed[0][0] <= now_us:
            _, order, unit = heappop(delayed)
            if self._delayed_orders.get(unit) == order:
                del self._delayed_orders[unit]
                self.fair_queue.add(unit, unit.priority, now_us, fan_out=unit.is_fan_out)
        if delayed:
            self._set_release_timer()
        self._schedule_turn()

    # ── turns ─────────────────────────────────────────────────────────────────────────────────

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled and self.ready_count:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def notify_now(self) -> None:
        """Called after a commit: notify the readers of a single ready topic now, where they are few, and not in a turn
        of their own."""
        unit = self._single
        if unit is not None and unit.waiter_count <= NOTIFY_NOW_WAITERS_MAX and not len(self.fair_queue):
            self._single = None
            unit.notified_us = now_us = self._monotonic_us()
            self.governor.record_delay(now_us - self._single_since_us)
            unit.deliver()

    def _run_turn(self) -> None:
        self._turn_scheduled = False
        self._enqueue_single()
        queue, governor, monotonic_us = self.fair_queue, self.governor, self._monotonic_us
        now_us = monotonic_us()
        until_us, notified_count, has_failed = now_us + TURN_US_MAX, 0, False
        while (item := queue.pop(now_us)) is not None:
            unit = item.key
            governor.record_delay(item.scheduler_delay_us)
            unit.notified_us = now_us
            try:
                notified_count += unit.deliver()
            except Exception as error:  # of this topic's readers only: the other topics get their turn
                self._health.failed("turns", error)
                has_failed = True
            queue.done(unit)
            now_us = monotonic_us()
            if notified_count >= TURN_WAITERS_MAX or now_us >= until_us:
                break
        if not has_failed:
            self._health.recovered("turns")
        self._schedule_turn()

    # ── samples ───────────────────────────────────────────────────────────────────────────────

    def start_sampling(self) -> None:
        """Sample the governor every 100 ms until the server is idle."""
        if self._sample_timer is None:
            self._sample_timer = self._loop.call_later(SAMPLE_US / 1e6, self._on_sample_timer)

    def _on_sample_timer(self) -> None:
        self._sample_timer = None  # first: a sample that raises must not be the last one
        try:
            self._sample()
        except Exception as error:
            self._health.failed("pressure", error)
            self.start_sampling()
        else:
            self._health.recovered("pressure")

    def _sample(self) -> None:
        governor, queue = self.governor, self.fair_queue
        busy, ingest = self._load()
        was_deferring = governor.is_deferring
        governor.sample(self._monotonic_us(), ready=self.ready_count, busy=busy, ingest=ingest)
        if governor.is_deferring and not was_deferring:
            queue.defer()
        elif was_deferring and not governor.is_deferring:
            queue.resume_deferred(self._monotonic_us())
            self._schedule_turn()
        if not (governor.is_calm and not self.ready_count and not self._delayed_orders and not busy and not ingest):
            self.start_sampling()

    def stop(self) -> None:
        """Cancel the timers."""
        for timer in (self._sample_timer, self._release_timer):
            if timer is not None:
                timer.cancel()
        self._sample_timer = self._release_timer = None


WakeCallback = Callable[[], None]


class TopicNotifier:
    """The waiting readers of one topic, with one listener for all of them."""

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
        return topic_operations(self.topic).has_upstream

    @property
    def waiter_count(self) -> int:
        return len(self.wakers)

    def notify(self) -> None:
        """From any thread."""
        if self._is_pending and not topic_operations(self.topic).is_dropped:
            return
        self._is_pending = True
        self._notifiers.schedule(self)

    def deliver(self) -> int:
        self._is_pending = False  # first: a write during the delivery schedules another one
        wakers = list(self.wakers)
        try:
            for wake in wakers:
                wake()
        finally:
            self._notifiers.page_cache.end_delivery()
        return len(wakers)


class Notifiers:
    """The notifiers of all topics with waiting readers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scheduler: NotifyScheduler, page_cache: PageCache) -> None:
        self._loop, self._thread, self._scheduler, self.page_cache = loop, get_ident(), scheduler, page_cache
        self._by_topic: dict[int, TopicNotifier] = {}
        self._from_threads: deque[TopicNotifier] = deque()  # notified by other threads
        self._drain_scheduled = False

    def __len__(self) -> int:
        return len(self._by_topic)

    def add(self, topic: Topic, wake: WakeCallback) -> None:
        """Call `wake` on the loop after every write to the topic, its drop and the engine's close."""
        notifier = self._by_topic.get(topic.id)
        if notifier is None:
            notifier = self._by_topic[topic.id] = TopicNotifier(topic, self)
            topic.add_listener(notifier.notify)
        notifier.wakers[wake] = None

    def remove(self, topic: Topic, wake: WakeCallback) -> None:
        notifier = self._by_topic.get(topic.id)
        if notifier is None:
            return
        notifier.wakers.pop(wake, None)
        if not notifier.wakers:
            notifier.topic.remove_listener(notifier.notify)
            del self._by_topic[topic.id]
            self._scheduler.forget(notifier)

    def schedule(self, notifier: TopicNotifier) -> None:
        """From any thread: notify its readers in one of the next turns."""
        if get_ident() == self._thread:
            self._schedule_on_loop(notifier)
            return
        self._from_threads.append(notifier)
        if not self._drain_scheduled and not self._loop.is_closed():
            self._drain_scheduled = True
            self._loop.call_soon_threadsafe(self._drain_from_threads)

    def _drain_from_threads(self) -> None:
        self._drain_scheduled = False  # first: a notification from here on schedules another call
        while self._from_threads:
            self._schedule_on_loop(self._from_threads.popleft())

    def _schedule_on_loop(self, notifier: TopicNotifier) -> None:
        if not notifier.wakers:
            return
        if topic_operations(notifier.topic).is_dropped:
            self._scheduler.forget(notifier)
            self._loop.call_soon(notifier.deliver)
        else:
            self._scheduler.schedule(notifier)

    def notify_all(self) -> None:
        """Notify every reader out of turn: the server stops."""
        for notifier in list(self._by_topic.values()):
            self._scheduler.forget(notifier)
            notifier.deliver()
