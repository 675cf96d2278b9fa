"""[policy] The ready set: topics with something to tell, and whose turn it is.

            mark                      pop                         done
    idle ─────────► ready, once ─────────────► in service ─────────────────► idle
                      │    ▲                       │ mark: once more             ▲
              defer   ▼    │ release               └──────────► done ──► ready ──┘
                    aside (own priority below 0)

  1. A topic is in the set at most once, however often it is marked. Marked while it is served, it is queued again
     behind that, once.
  2. A round gives each band its weight: 8, 4, 2, 1, 1. The highest band that has a topic and credit is served; when
     none has, the next round begins. Unspent credit does not outlive its round.
  3. Within a band the one that has been ready longest comes first.
  4. Waiting lifts a topic through the bands (`bands`); being served is the only thing that starts its wait anew.
  5. While low work is deferred, topics whose own priority is negative stand aside, and copies that a fan-out made are
     queued one band lower. Standing aside is part of a topic's wait, and none of the scheduler's delay.

Bound: a topic that does not stand aside is in the top band after 10 s and one tick, and with k topics there that were
ready no later than it, itself counted, it is served within 2k + 8 turns from then: at most the 8 turns that are left
to lower bands in the current round, its place among the k, and 8 turns of lower bands for every further 8 of those.
None of the k can be served twice before it, because being served puts a topic behind it.

Every call costs O(log n), and a tick only what it lifts: heaps by wait in each band, and by the moment of the next
rise for those that have waited a tick. What is out of place in a heap is passed over when it comes up, and swept
once it is more than half; an entry that came back beside its own trace counts once, because the first one out is gone.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from tidelog.sched import bands
from tidelog.sched.bands import TOP, WEIGHTS

K = TypeVar("K", bound=Hashable)
_GONE: Final = -1
_ASIDE: Final = -2
_SLACK: Final = 64  # entries out of place that are not worth a sweep


class Turn(NamedTuple, Generic[K]):
    """Whose turn it is."""

    key: K
    waited_us: int  # since it was marked
    delay_us: int  # of that, what the scheduler is to blame for


class _Entry(Generic[K]):
    __slots__ = ("at_us", "band", "free_us", "key", "order", "priority")

    def __init__(self, key: K, priority: int, at_us: int, order: int, band: int) -> None:
        self.key, self.priority, self.at_us, self.order, self.band = key, priority, at_us, order, band
        self.free_us = at_us  # since when it could have been served


class _Again(NamedTuple):
    """A mark that came while its topic was served."""

    priority: int
    at_us: int
    fan_out: bool


_Heap: TypeAlias = list[tuple[int, int, _Entry[K]]]


class ReadySet(Generic[K]):
    """Not safe for threads: one loop owns it."""

    def __init__(self) -> None:
        self._known: dict[K, _Entry[K]] = {}  # ready or aside
        self._serving: dict[K, _Again | None] = {}
        self._aside: dict[K, _Entry[K]] = {}
        self._queues: list[_Heap[K]] = [[] for _ in WEIGHTS]  # (at_us, order, entry)
        self._rises: list[_Heap[K]] = [[] for _ in WEIGHTS]  # (when it leaves this band, order, entry)
        self._live = [0] * len(WEIGHTS)
        self._credit = list(WEIGHTS)
        self._fresh: list[_Entry[K]] = []  # not waited a tick yet: most are served before they have
        self._ticked_us = 0
        self._orders = 0
        self._deferring = False

    def __len__(self) -> int:
        """Topics that can be served now."""
        return len(self._known) - len(self._aside)

    def __contains__(self, key: K) -> bool:
        return key in self._known

    @property
    def deferred(self) -> int:
        """Topics that stand aside."""
        return len(self._aside)

    # ── in ────────────────────────────────────────────────────────────────────────────────────

    def mark(self, key: K, priority: int, now_us: int, *, fan_out: bool = False) -> bool:
        """A topic has something to tell. Says whether that was news."""
        if key in self._known:
            return False
        if key in self._serving:
            news = self._serving[key] is None
            if news:
                self._serving[key] = _Again(priority, now_us, fan_out)
            return news
        self._add(key, priority, now_us, fan_out)
        return True

    def _add(self, key: K, priority: int, at_us: int, fan_out: bool) -> None:
        if fan_out and self._deferring:
            priority = bands.lowered(priority)
        self._orders += 1
        entry = self._known[key] = _Entry(key, priority, at_us, self._orders, _ASIDE)
        if self._deferring and priority < 0:
            self._aside[key] = entry
            return
        # One that was marked while it was served may have waited past a tick already.
        self._put(entry, bands.aged(priority, max(self._ticked_us - at_us, 0)))
        if entry.band < TOP:
            self._fresh.append(entry)

    def _put(self, entry: _Entry[K], band: int) -> None:
        entry.band = band
        self._live[band] += 1
        heappush(self._queues[band], (entry.at_us, entry.order, entry))

    # ── out ───────────────────────────────────────────────────────────────────────────────────

    def pop(self, now_us: int) -> Turn[K] | None:
        """The topic whose turn it is, in service from now on until `done`; None where none can be served."""
        if len(self._known) == len(self._aside):
            return None
        if now_us - self._ticked_us >= bands.TICK_US:
            self._tick(bands.tick_of(now_us))
        entry = self._first(self._band())
        del self._known[entry.key]
        self._serving[entry.key] = None
        return Turn(entry.key, now_us - entry.at_us, now_us - entry.free_us)

    def _band(self) -> int:
        """The highest band with a topic and credit, in this round or the next."""
        live, credit = self._live, self._credit
        for band in range(TOP, -1, -1):
            if live[band] and credit[band]:
                credit[band] -= 1
                return band
        self._credit[:] = WEIGHTS
        return self._band()

    def _first(self, band: int) -> _Entry[K]:
        queue = self._queues[band]
        entry = heappop(queue)[2]
        while entry.band != band:  # it rose, or was forgotten
            entry = heappop(queue)[2]
        self._leave(entry, _GONE)
        return entry

    def _leave(self, entry: _Entry[K], to: int) -> None:
        """Take an entry out of its band; where it lies in the queue it is passed over from now on."""
        band, entry.band = entry.band, to
        self._live[band] -= 1
        if len(self._queues[band]) > 2 * self._live[band] + _SLACK:
            _sweep(self._queues[band], band)

    def done(self, key: K) -> bool:
        """A topic was served. Says whether it is ready again, because it was marked meanwhile."""
        again = self._serving.pop(key)
        if again is None:
            return False
        self._add(key, *again)
        return True

    def forget(self, key: K) -> None:
        """Nobody wants to hear of this topic any more."""
        if key in self._serving:
            self._serving[key] = None
        entry = self._known.pop(key, None)
        if entry is None:
            return
        if entry.band == _ASIDE:
            del self._aside[key]
            entry.band = _GONE
        else:
            self._leave(entry, _GONE)

    # ── over time ─────────────────────────────────────────────────────────────────────────────

    def _tick(self, at_us: int) -> None:
        self._ticked_us = at_us
        fresh, self._fresh = self._fresh, []
        for entry in fresh:
            if entry.band >= 0:
                self._expect(entry)
        for band, rises in enumerate(self._rises):
            if len(rises) > 2 * self._live[band] + _SLACK:
                _sweep(rises, band)
            while rises and rises[0][0] <= at_us:
                entry = heappop(rises)[2]
                if entry.band == band:
                    self._leave(entry, _GONE)
                    self._put(entry, bands.aged(entry.priority, at_us - entry.at_us))
                    self._expect(entry)

    def _expect(self, entry: _Entry[K]) -> None:
        """Have it looked at when it leaves its band."""
        if entry.band < TOP:
            due_us = entry.at_us + bands.rises_after_us(entry.priority, entry.band)
            heappush(self._rises[entry.band], (due_us, entry.order, entry))

    def defer(self) -> None:
        """From now on what is worth less than nothing stands aside. Costs a look at every topic that is ready."""
        self._deferring = True
        for entry in [entry for entry in self._known.values() if entry.priority < 0 and entry.band >= 0]:
            self._leave(entry, _ASIDE)
            self._aside[entry.key] = entry

    def release(self, now_us: int) -> None:
        """What stood aside takes its place again, by how long it has waited."""
        self._deferring = False
        aside, self._aside = self._aside, {}
        tick_us = bands.tick_of(now_us)
        for entry in aside.values():
            entry.free_us = now_us
            self._put(entry, bands.aged(entry.priority, max(tick_us - entry.at_us, 0)))
            self._expect(entry)


def _sweep(heap: _Heap[K], band: int) -> None:
    heap[:] = [item for item in heap if item[2].band == band]
    heapify(heap)
