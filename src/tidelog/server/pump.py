"""[shell] Topics take turns on the loop: which one is told of next is the ready set's word, how often the governor's.

    mark ──► left alone? ──► ready set ──► a turn of the loop: told of, in order, until it is full ──► another turn
               │ (rung less than a window ago)     ▲
               └──► held until that is over ───────┘

With nothing else ready and no pressure a topic is told of in the very next turn, as if there were no set, and where but
few wait for it before those who wrote are answered (`first`). A turn is
full when it has woken so many peers or taken so long: those that were woken, and whoever else has something to do,
come before the next turn. Bells that are deferred, or held, keep what they have to tell.

The beat samples the governor every 100 ms while anything is going on, and not at all when nothing is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Final, Protocol

from tidelog.engine.health import Health
from tidelog.sched.governor import SAMPLE_US, Governor
from tidelog.sched.ready import ReadySet

WAKES_MAX: Final = 128  # peers a turn: about 5 ms of rendering and sending, the ceiling of the latency
TURN_US_MAX: Final = 2_000
FEW: Final = 4  # peers that are told before those who wrote are answered


class Unit(Hashable, Protocol):
    """What is scheduled: a topic with somebody who waits for it."""

    rung_us: int  # when it was last told of

    @property
    def priority(self) -> int: ...

    @property
    def is_fan_out(self) -> bool: ...

    @property
    def peers(self) -> int:
        """How many wait for it."""
        ...

    def ring(self) -> int:
        """Tell everybody; return how many that were."""
        ...


class Pump:
    """On the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        micros: Callable[[], int],
        governor: Governor,
        load: Callable[[], tuple[int, float]],
        health: Health,
    ) -> None:
        self._health = health  # is told of what breaks; the pump goes on
        """`load`: calls in the pool, and how full the fullest WAL queue is."""
        self._loop, self._micros, self.governor, self._load = loop, micros, governor, load
        self.ready: ReadySet[Unit] = ReadySet()
        self._held: list[tuple[int, int, Unit]] = []  # (until when, order, unit)
        self._holds: dict[Unit, int] = {}  # unit → its order above; one that is gone from here is passed over
        self._orders = 0
        self._waking: asyncio.TimerHandle | None = None  # for the first that is held
        self._turning = False
        self._lone: Unit | None = None  # the only one there is, and in no set: most are told of before another comes
        self._lone_us = 0  # when it was marked
        self._beating: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Topics that can be told of now."""
        return len(self.ready) + (self._lone is not None)

    @property
    def held(self) -> int:
        """Topics that are left alone until their window is over."""
        return len(self._holds)

    # ── in ────────────────────────────────────────────────────────────────────────────────────

    def mark(self, unit: Unit) -> None:
        """There is something to tell."""
        now_us, governor = self._micros(), self.governor
        window_us = governor.coalesce_us
        if unit is self._lone:
            return
        if window_us and unit.rung_us + window_us > now_us and unit not in self.ready:
            self._hold(unit, unit.rung_us + window_us)
        else:
            if self._lone is None and not governor.is_deferring and not len(self.ready):
                self._lone, self._lone_us = unit, now_us
            else:
                self._line_up()
                self.ready.mark(unit, unit.priority, now_us, fan_out=unit.is_fan_out)
            self._want_turn()
        self.stir()

    def _line_up(self) -> None:
        """There is another one, or its turn has come: whose it is, the set says."""
        unit, self._lone = self._lone, None
        if unit is not None:
            self.ready.mark(unit, unit.priority, self._lone_us, fan_out=unit.is_fan_out)

    def forget(self, unit: Unit) -> None:
        """Nobody waits for it any more, or everybody was told."""
        if unit is self._lone:
            self._lone = None
        self.ready.forget(unit)
        self._holds.pop(unit, None)

    def _hold(self, unit: Unit, until_us: int) -> None:
        if unit in self._holds:
            return
        self._orders += 1
        self._holds[unit] = self._orders
        heappush(self._held, (until_us, self._orders, unit))
        if self._held[0][2] is unit:
            self._alarm()

    def _alarm(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
        until_us = self._held[0][0]
        self._waking = self._loop.call_later(max(until_us - self._micros(), 0) / 1e6, self._release, until_us)

    def _release(self, until_us: int) -> None:
        """What was held until now is ready."""
        self._waking = None
        now_us = max(until_us, self._micros())  # a timer may come a little early
        held = self._held
        self._line_up()
        while held and held[0][0] <= now_us:
            _, order, unit = heappop(held)
            if self._holds.get(unit) == order:
                del self._holds[unit]
                self.ready.mark(unit, unit.priority, now_us, fan_out=unit.is_fan_out)
        if held:
            self._alarm()
        self._want_turn()

    # ── out ───────────────────────────────────────────────────────────────────────────────────

    def _want_turn(self) -> None:
        if not self._turning and self.waiting:
            self._turning = True
            self._loop.call_soon(self._turn)

    def first(self) -> None:
        """Something was committed: where it is one topic, and few wait for it, they are told now and not in a turn of
        their own."""
        unit = self._lone
        if unit is not None and unit.peers <= FEW and not len(self.ready):
            self._lone = None
            unit.rung_us = now_us = self._micros()
            self.governor.served(now_us - self._lone_us)
            unit.ring()

    def _turn(self) -> None:
        self._turning = False
        self._line_up()
        ready, governor, micros = self.ready, self.governor, self._micros
        now_us = micros()
        until_us, woken, broke = now_us + TURN_US_MAX, 0, False
        while (turn := ready.pop(now_us)) is not None:
            unit = turn.key
            governor.served(turn.delay_us)
            unit.rung_us = now_us
            try:
                woken += unit.ring()
            except Exception as error:  # of one topic's readers: all others are told
                self._health.failed("turns", error)
                broke = True
            ready.done(unit)
            now_us = micros()
            if woken >= WAKES_MAX or now_us >= until_us:
                break
        if not broke:
            self._health.recovered("turns")
        self._want_turn()

    # ── the beat ──────────────────────────────────────────────────────────────────────────────

    def stir(self) -> None:
        """Something is going on: have it sampled until it is over."""
        if self._beating is None:
            self._beating = self._loop.call_later(SAMPLE_US / 1e6, self._beat)

    def _beat(self) -> None:
        self._beating = None  # first: a beat that breaks must not be the last one
        try:
            self._sample()
        except Exception as error:
            self._health.failed("pressure", error)
            self.stir()
        else:
            self._health.recovered("pressure")

    def _sample(self) -> None:
        governor, ready = self.governor, self.ready
        busy, ingest = self._load()
        was = governor.is_deferring
        governor.sample(self._micros(), ready=self.waiting, busy=busy, ingest=ingest)
        if governor.is_deferring and not was:
            ready.defer()
        elif was and not governor.is_deferring:
            ready.release(self._micros())
            self._want_turn()
        if not (governor.is_calm and not self.waiting and not self._holds and not busy and not ingest):
            self.stir()

    def stop(self) -> None:
        """Nothing is told any more."""
        for timer in (self._beating, self._waking):
            if timer is not None:
                timer.cancel()
        self._beating = self._waking = None
