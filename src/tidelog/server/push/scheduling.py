"""Scheduling policy of the server: pure logic without a loop or a clock of its own. `NotifyScheduler` drives it.

`Governor`: how loaded the server is, and its reactions.

    signal     full at                                     counts
    ready      256 ready topics for each worker            whole     writes outrun notifications
    latency    5 ms from ready to served, on average       whole     the loop is late
    ingest     a WAL queue at its limit                    whole     writes outrun commits, with or without readers
    pool       every thread at work                        half      long reads alone are no reason to reject a write

    pressure    0     0.2                  0.4               0.6       0.8              0.95
                │ calm │ notify less often ─┼─ commit less often ────────┼───────────────────┼─► reject writes that
                │      │ 0 to 20 ms a topic │ 0.5 to 10 ms a batch       │ 0.5 s of it:      │   would wait
                                                                         │ defer low work
                                                               released ◄┘
                                                               below 0.6

Each signal is cut off at full and then smoothed, so that one long stall is one bad sample and no more; the highest of
them is the pressure. It is sampled every 100 ms. Between 0.6 and 0.8 deferral does not change, so that it does not
toggle with every sample. A write is rejected at once; no accepted write is dropped.

`FairQueue`: topics whose readers are to be notified, in priority bands, with ageing between them.

    band   effective priority   weight        a topic of priority 0, while it waits
    B4     750 and more              8                              ┌────────
    B3     500 to 749                4                      ┌───────┘
    B2     250 to 499                2              ┌───────┘
    B1     0 to 249                  1      ────────┘
    B0     below 0                   1      0      2.5 s   5 s     7.5 s

Effective priority is the topic's own plus 100 for every second of waiting. After ten seconds a topic is in the top band
whatever its own priority: the boost alone, which ends at 1000, would not lift a topic below −250 so far. Bands are
updated every 50 ms, on a grid, so a late update gives the same result.

            add                       pop                         done
    idle ─────────► ready, once ─────────────► in service ─────────────────► idle
                      │    ▲                       │ add: once more              ▲
              defer   ▼    │ resume_deferred       └──────────► done ──► ready ──┘
                    deferred (own priority below 0)

  1. A topic is queued at most once, however often it is added. Added while it is served, it is queued again after
     that, once.
  2. A round gives each band its weight: 8, 4, 2, 1, 1. The highest band that has a topic and credit is served; when
     none has, the next round begins. Unspent credit does not outlive its round.
  3. Within a band the topic that has been ready longest comes first.
  4. Waiting lifts a topic through the bands; only being served restarts its wait.
  5. While low work is deferred, topics whose own priority is negative are not served, and copies of a fan-out are
     queued one band lower. Deferral is part of a topic's wait, and not of the scheduler's delay.

Bound: a topic that is not deferred is in the top band after 10 s and one tick. With k topics there that were ready no
later than it, itself counted, it is served within 2k + 8 turns from then: at most the 8 turns that are left to lower
bands in the current round, its place among the k, and 8 turns of lower bands for every further 8 of those. None of the
k can be served twice before it, because a served topic is queued after it.

Every call costs O(log n), and a tick only what it promotes: each band has a heap by wait, and one by the moment of the
next promotion. A stale entry of a heap is skipped when it is popped; they are swept once they are more than half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

BAND_WEIGHTS: Final = (1, 1, 2, 4, 8)  # of B0 to B4
TOP_BAND: Final = len(BAND_WEIGHTS) - 1
AGING_TICK_US: Final = 50_000
TOP_BAND_AFTER_US: Final = 10_000_000
US_PER_PRIORITY_POINT: Final = 10_000  # this much waiting adds one point of priority
NEVER_US: Final = 1 << 62
_BAND_STARTS: Final = (0, 250, 500, 750)  # where B1 to B4 begin
_BAND_WIDTH: Final = 250


def aged_band(priority: int, waited_us: int) -> int:
    """Return the band of a topic that has waited for `waited_us`."""
    return (
        TOP_BAND
        if waited_us >= TOP_BAND_AFTER_US
        else bisect_right(_BAND_STARTS, priority + waited_us // US_PER_PRIORITY_POINT)
    )


def next_band_after_us(priority: int, band: int) -> int:
    """Return the wait after which a topic of this priority leaves this band upwards."""
    if band == TOP_BAND:
        return NEVER_US
    return min((_BAND_STARTS[band] - priority) * US_PER_PRIORITY_POINT, TOP_BAND_AFTER_US)


def lower_priority(priority: int) -> int:
    """Return a priority that is one band lower. A priority that is not negative stays so: only the owner of a topic
    makes it deferrable."""
    return (
        min(priority, _BAND_STARTS[-1] + _BAND_WIDTH - 1) - _BAND_WIDTH if priority >= _BAND_WIDTH else min(priority, 0)
    )


def aging_tick(now_us: int) -> int:
    """Return the last tick at or before `now_us`."""
    return now_us - now_us % AGING_TICK_US


K = TypeVar("K", bound=Hashable)
_GONE: Final = -1
_DEFERRED: Final = -2
_STALE_ENTRIES_ALLOWED: Final = 64  # stale entries of a heap that are not worth a sweep


class ScheduledItem(NamedTuple, Generic[K]):
    """The topic to serve now."""

    key: K
    waited_us: int  # since it was added
    scheduler_delay_us: int  # of that, without the time for which it was deferred


class _Entry(Generic[K]):
    __slots__ = ("band", "eligible_us", "key", "order", "priority", "ready_us")

    def __init__(self, key: K, priority: int, ready_us: int, order: int, band: int) -> None:
        self.key, self.priority, self.ready_us, self.order, self.band = key, priority, ready_us, order, band
        self.eligible_us = ready_us  # since when it could have been served


class _RequeueRequest(NamedTuple):
    """An `add` while its topic was served."""

    priority: int
    ready_us: int
    fan_out: bool


_Heap: TypeAlias = list[tuple[int, int, _Entry[K]]]


class FairQueue(Generic[K]):
    """Not thread-safe: one loop owns it."""

    def __init__(self) -> None:
        self._entries: dict[K, _Entry[K]] = {}  # ready or deferred
        self._serving: dict[K, _RequeueRequest | None] = {}
        self._deferred: dict[K, _Entry[K]] = {}
        self._queues: list[_Heap[K]] = [[] for _ in BAND_WEIGHTS]  # (ready_us, order, entry)
        self._promotions: list[_Heap[K]] = [[] for _ in BAND_WEIGHTS]  # (when it leaves this band, order, entry)
        self._band_sizes = [0] * len(BAND_WEIGHTS)
        self._credits = list(BAND_WEIGHTS)
        self._unaged: list[_Entry[K]] = []  # added since the last tick: most are served before the next one
        self._last_tick_us = 0
        self._next_order = 0
        self._is_deferring = False

    def __len__(self) -> int:
        """The number of topics that can be served now."""
        return len(self._entries) - len(self._deferred)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    @property
    def deferred_count(self) -> int:
        """The number of deferred topics."""
        return len(self._deferred)

    # ── add ───────────────────────────────────────────────────────────────────────────────────

    def add(self, key: K, priority: int, now_us: int, *, fan_out: bool = False) -> bool:
        """Add a topic whose readers are to be notified. Return whether it was new."""
        if key in self._entries:
            return False
        if key in self._serving:
            is_new = self._serving[key] is None
            if is_new:
                self._serving[key] = _RequeueRequest(priority, now_us, fan_out)
            return is_new
        self._insert(key, priority, now_us, fan_out)
        return True

    def _insert(self, key: K, priority: int, ready_us: int, fan_out: bool) -> None:
        if fan_out and self._is_deferring:
            priority = lower_priority(priority)
        self._next_order += 1
        entry = self._entries[key] = _Entry(key, priority, ready_us, self._next_order, _DEFERRED)
        if self._is_deferring and priority < 0:
            self._deferred[key] = entry
            return
        # A topic that was added while it was served may have waited past a tick already.
        self._push_to_band(entry, aged_band(priority, max(self._last_tick_us - ready_us, 0)))
        if entry.band < TOP_BAND:
            self._unaged.append(entry)

    def _push_to_band(self, entry: _Entry[K], band: int) -> None:
        entry.band = band
        self._band_sizes[band] += 1
        heappush(self._queues[band], (entry.ready_us, entry.order, entry))

    # ── serve ─────────────────────────────────────────────────────────────────────────────────

    def pop(self, now_us: int) -> ScheduledItem[K] | None:
        """Return the next topic, in service until `done`; None where none can be served."""
        if len(self._entries) == len(self._deferred):
            return None
        if now_us - self._last_tick_us >= AGING_TICK_US:
            self._promote_aged(aging_tick(now_us))
        entry = self._pop_from_band(self._next_band())
        del self._entries[entry.key]
        self._serving[entry.key] = None
        return ScheduledItem(entry.key, now_us - entry.ready_us, now_us - entry.eligible_us)

    def _next_band(self) -> int:
        """Return the highest band with a topic and credit, in this round or the next."""
        sizes, credits = self._band_sizes, self._credits
        for band in range(TOP_BAND, -1, -1):
            if sizes[band] and credits[band]:
                credits[band] -= 1
                return band
        self._credits[:] = BAND_WEIGHTS
        return self._next_band()

    def _pop_from_band(self, band: int) -> _Entry[K]:
        queue = self._queues[band]
        entry = heappop(queue)[2]
        while entry.band != band:  # it was promoted or discarded
            entry = heappop(queue)[2]
        self._remove_from_band(entry, _GONE)
        return entry

    def _remove_from_band(self, entry: _Entry[K], new_band: int) -> None:
        """Take an entry out of its band; its place in the heap becomes stale."""
        band, entry.band = entry.band, new_band
        self._band_sizes[band] -= 1
        if len(self._queues[band]) > 2 * self._band_sizes[band] + _STALE_ENTRIES_ALLOWED:
            _drop_stale_entries(self._queues[band], band)

    def done(self, key: K) -> bool:
        """End the service of a topic. Return whether it is ready again, because it was added meanwhile."""
        request = self._serving.pop(key)
        if request is None:
            return False
        self._insert(key, *request)
        return True

    def discard(self, key: K) -> None:
        """Remove a topic that has no readers any more."""
        if key in self._serving:
            self._serving[key] = None
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.band == _DEFERRED:
            del self._deferred[key]
            entry.band = _GONE
        else:
            self._remove_from_band(entry, _GONE)

    # ── ageing ────────────────────────────────────────────────────────────────────────────────

    def _promote_aged(self, tick_us: int) -> None:
        self._last_tick_us = tick_us
        unaged, self._unaged = self._unaged, []
        for entry in unaged:
            if entry.band >= 0:
                self._schedule_promotion(entry)
        for band, promotions in enumerate(self._promotions):
            if len(promotions) > 2 * self._band_sizes[band] + _STALE_ENTRIES_ALLOWED:
                _drop_stale_entries(promotions, band)
            while promotions and promotions[0][0] <= tick_us:
                entry = heappop(promotions)[2]
                if entry.band == band:
                    self._remove_from_band(entry, _GONE)
                    self._push_to_band(entry, aged_band(entry.priority, tick_us - entry.ready_us))
                    self._schedule_promotion(entry)

    def _schedule_promotion(self, entry: _Entry[K]) -> None:
        """Schedule the tick at which it leaves its band."""
        if entry.band < TOP_BAND:
            due_us = entry.ready_us + next_band_after_us(entry.priority, entry.band)
            heappush(self._promotions[entry.band], (due_us, entry.order, entry))

    def defer(self) -> None:
        """Defer topics of negative priority from now on. Visits every ready topic."""
        self._is_deferring = True
        for entry in [entry for entry in self._entries.values() if entry.priority < 0 and entry.band >= 0]:
            self._remove_from_band(entry, _DEFERRED)
            self._deferred[entry.key] = entry

    def resume_deferred(self, now_us: int) -> None:
        """Make deferred topics ready again, in the band of their wait."""
        self._is_deferring = False
        deferred, self._deferred = self._deferred, {}
        tick_us = aging_tick(now_us)
        for entry in deferred.values():
            entry.eligible_us = now_us
            self._push_to_band(entry, aged_band(entry.priority, max(tick_us - entry.ready_us, 0)))
            self._schedule_promotion(entry)


def _drop_stale_entries(heap: _Heap[K], band: int) -> None:
    heap[:] = [item for item in heap if item[2].band == band]
    heapify(heap)


SAMPLE_US: Final = 100_000
COALESCE_ABOVE_PRESSURE: Final = 0.2
COALESCE_US_MAX: Final = 20_000
COMMIT_DELAY_ABOVE_PRESSURE: Final = 0.4
COMMIT_DELAY_RANGE_MS: Final = (0.5, 10.0)
DEFER_ABOVE_PRESSURE: Final = 0.8
DEFER_AFTER_US: Final = 500_000
RELEASE_BELOW_PRESSURE: Final = 0.6
SATURATED_PRESSURE: Final = 0.95
LATENCY_US_MAX: Final = 5_000
READY_TOPICS_MAX: Final = 256  # for each worker
_POOL_WEIGHT: Final = 0.5
_SMOOTHING_FACTOR: Final = 0.5  # the weight of a sample against all before it
_NEGLIGIBLE_PRESSURE: Final = 0.01  # less counts as 0


def notify_delay_us(pressure: float) -> int:
    """Return how long a topic is not notified again after a notification, at this pressure."""
    if pressure <= COALESCE_ABOVE_PRESSURE:
        return 0
    return round(COALESCE_US_MAX * (min(pressure, 1.0) - COALESCE_ABOVE_PRESSURE) / (1.0 - COALESCE_ABOVE_PRESSURE))


def commit_delay_ms(pressure: float) -> float:
    """Return how long commits may be collected before they are written, at this pressure."""
    shortest_ms, longest_ms = COMMIT_DELAY_RANGE_MS
    return (
        shortest_ms + (longest_ms - shortest_ms) * min(pressure, 1.0) if pressure > COMMIT_DELAY_ABOVE_PRESSURE else 0.0
    )


class Governor:
    """Decides by the last `sample`. Not thread-safe, but `pressure` may be read from any thread."""

    def __init__(self, *, workers: int, threads: int) -> None:
        self._ready_max, self._threads = READY_TOPICS_MAX * workers, threads
        self.pressure = 0.0
        self.notify_delay_us = 0
        self.is_deferring = False
        self.latency_us = 0.0  # smoothed
        self._latency_signal = self._ready_signal = self._ingest_signal = self._pool_signal = (
            0.0  # the signals, smoothed
        )
        self._served_count = self._delay_sum_us = 0  # since the last sample
        self._above_since_us: int | None = None  # since when the pressure is above DEFER_ABOVE_PRESSURE
        self._sampled_us: int | None = None

    @property
    def is_saturated(self) -> bool:
        return self.pressure >= SATURATED_PRESSURE

    @property
    def is_calm(self) -> bool:
        """Whether further samples would change nothing."""
        return not self.pressure and not self.is_deferring and not self._served_count

    @property
    def commit_delay_ms(self) -> float:
        return commit_delay_ms(self.pressure)

    def record_delay(self, delay_us: int) -> None:
        """Record how long a topic waited after it could have been served."""
        self._served_count += 1
        self._delay_sum_us += delay_us

    def sample(self, now_us: int, *, ready: int, busy: int, ingest: float) -> None:
        """Take a sample, every 100 ms: ready topics, calls in the pool, and the fill level of the fullest WAL queue."""
        delay_us = self._delay_us(now_us, ready)
        self.latency_us = _smooth(self.latency_us, delay_us)
        self._latency_signal = _smooth(self._latency_signal, min(delay_us / LATENCY_US_MAX, 1.0))
        self._ready_signal = _smooth(self._ready_signal, min(ready / self._ready_max, 1.0))
        self._ingest_signal = _smooth(self._ingest_signal, min(ingest, 1.0))
        self._pool_signal = _smooth(self._pool_signal, _POOL_WEIGHT * min(busy / self._threads, 1.0))
        self.pressure = max(self._ready_signal, self._latency_signal, self._ingest_signal, self._pool_signal)
        self.notify_delay_us = notify_delay_us(self.pressure)
        self._sampled_us = now_us
        self._update_deferring(now_us)

    def _delay_us(self, now_us: int, ready: int) -> float:
        served_count, delay_sum_us = self._served_count, self._delay_sum_us
        self._served_count = self._delay_sum_us = 0
        if served_count:
            return delay_sum_us / served_count
        # Topics are ready and none was served: they have waited since the last sample.
        return now_us - self._sampled_us if ready and self._sampled_us is not None else 0.0

    def _update_deferring(self, now_us: int) -> None:
        if self.pressure <= DEFER_ABOVE_PRESSURE:
            self._above_since_us = None
            self.is_deferring = self.is_deferring and self.pressure >= RELEASE_BELOW_PRESSURE
            return
        if self._above_since_us is None:
            self._above_since_us = now_us
        self.is_deferring = self.is_deferring or now_us - self._above_since_us >= DEFER_AFTER_US


def _smooth(previous: float, sample: float) -> float:
    value = previous + _SMOOTHING_FACTOR * (sample - previous)
    return value if value >= _NEGLIGIBLE_PRESSURE else 0.0
