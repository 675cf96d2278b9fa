"""[shell] What is done without being asked: syncs, ageing, and checkpoints when they are due.

    syncing thread ──every sync_interval_ms, or stirred──► Shard.tick
    keeping thread ──every sync_interval_ms──► the rest of Engine.tick ──when one is due──► Upkeep.checkpoint

Two, because a checkpoint takes as long as what it copies: meanwhile nobody's bytes wait longer for their sync.

A checkpoint is due when the WAL holds something that no checkpoint covers and enough of it was written, or enough time
went by. The thread's own goes gently (`pace`) until somebody asks for one, or for the end. Who owns the engine may call
`tick` instead of the threads: nothing else differs.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import nullcontext
from threading import Event, Lock, Thread
from weakref import WeakMethod

from tidelog.engine import opening, pace
from tidelog.engine.checkpoint import History, checkpoint
from tidelog.engine.core import Core, Shared
from tidelog.engine.report import Report
from tidelog.errors import Error

_AGE_MS = 1000  # how often segments are asked for their age
Listed = Callable[[], tuple[list[Core], int]]  # every topic, and the id that the next one gets


class Upkeep:
    def __init__(self, shared: Shared, history: History, listed: Listed, report: Report) -> None:
        self.history = history
        self._shared, self._listed = shared, listed
        self._turn = Lock()  # one checkpoint at a time
        self.hurry = Hurry()
        self._checked_ms = self._aged_ms = shared.clock.monotonic_ms()
        self._checked_bytes = self._covered_bytes = 0
        # How many frames had been written when a checkpoint last covered them all. What was replayed is not covered.
        self._covered = 0 if history.number and not (report.frames or report.padded) else -1
        while history.moved:
            # Frames of an earlier number of shards: covered before a topic could get frames in two places, and by a
            # second checkpoint let go of.
            self.checkpoint()

    def checkpoint(self, *, final: bool = False, gently: bool = False) -> None:
        """On an error everything is as before. `gently`: nobody waits for it."""
        with nullcontext() if gently else self.hurry, self._turn:
            self._checked_ms = self._shared.clock.monotonic_ms()
            self._checked_bytes = self._bytes()
            try:
                self._shared.rolled = False
                checkpoint(self._shared, self._listed, self.history, final=final, rest=self._resting())
                self._covered, self._covered_bytes = self._written(), self._checked_bytes
            except OSError as error:
                raise opening.refused(self._shared.root, error) from error

    def _resting(self) -> Callable[[], None]:
        """What a checkpoint calls after each step: back at once, or when others had the disk for a while."""
        now_us, began_us, seen = self._shared.clock.monotonic_us, self._shared.clock.monotonic_us(), self._checked_bytes

        def rest() -> None:
            nonlocal began_us, seen
            before, seen = seen, self._bytes()
            behind, trigger = seen - self._covered_bytes, self._shared.limits.checkpoint_bytes
            self.hurry.wait(pace.rest_us(now_us() - began_us, seen - before, behind, trigger))
            began_us = now_us()

        return rest

    def keep(self, settle: Callable[[], object]) -> None:
        """What is due: ageing, and a checkpoint when `settle` is back."""
        self._age()
        if self.is_due:
            settle()
            self.checkpoint(gently=True)

    def _age(self) -> None:
        """Ask segments for their age, where they were not asked lately."""
        now_ms = self._shared.clock.monotonic_ms()
        if now_ms - self._aged_ms >= _AGE_MS:
            self._aged_ms = now_ms
            for core in self._listed()[0]:
                with core.lock:
                    core.age()

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        limits = self._shared.limits
        waited_ms = self._shared.clock.monotonic_ms() - self._checked_ms
        fresh = self._bytes() - self._checked_bytes
        return self._is_uncovered() and (fresh >= limits.checkpoint_bytes or waited_ms >= limits.checkpoint_ms)

    def has_last_words(self) -> bool:
        """Whether a last checkpoint would say something that the manifest does not."""
        shards, cores = self._shared.shards, self._listed()[0]
        if not shards or any(shard.latched for shard in shards):
            return False
        resident = any(core.ephemeral and (core.index.head or core.groups) for core in cores)
        reserved = any(core.ceiling > core.index.head for core in cores)
        return resident or reserved or self._is_uncovered()

    def _is_uncovered(self) -> bool:
        return self._shared.rolled or self._covered != self._written()

    def _bytes(self) -> int:
        return sum(shard.stats.bytes for shard in self._shared.shards)

    def _written(self) -> int:
        return sum(shard.stats.frames for shard in self._shared.shards)


class Hurry:
    """While somebody is inside, nobody rests. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock, self._some, self._count = Lock(), Event(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._some.set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._some.clear()

    def wait(self, rest_us: int) -> None:
        """Rest for so long, or until somebody is in a hurry."""
        if rest_us:
            self._some.wait(rest_us / 1_000_000)


def keepers(
    shared: Shared, sync: Callable[[], None], keep: Callable[[], None], hurry: Hurry, report: Report
) -> list[Keeper]:
    """The two threads of an engine, at work."""
    pause_ms, troubles = shared.limits.sync_interval_ms, report.trouble
    syncing = Keeper(sync, pause_ms, hurry, troubles, f"tidelog syncs {shared.root}")
    for shard in shared.shards:
        shard.on_want = syncing.stir
    return [syncing, Keeper(keep, pause_ms, hurry, troubles, f"tidelog {shared.root}")]


class Keeper:
    """The thread that calls `tick` every so often, and at once when it is stirred."""

    def __init__(
        self, tick: Callable[[], None], pause_ms: int, hurry: Hurry, troubles: Callable[[Error], None], name: str
    ) -> None:
        self._tick, self._pause_s, self._hurry, self._troubles = tick, pause_ms / 1000, hurry, troubles
        self._ending = False
        self._stirred = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stir(self) -> None:
        """There is something to do before its time."""
        self._stirred.set()

    def end(self) -> None:
        """On return the thread is gone."""
        self._ending = True
        self._stirred.set()
        with self._hurry:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._stirred.wait(self._pause_s)
            self._stirred.clear()
            if self._ending:
                return
            try:
                self._tick()
            except Error as error:
                # A latched shard tells its writers; a checkpoint that failed is tried again when it is next due.
                self._troubles(error)


def close_at_exit(close: Callable[[], None]) -> None:
    """An engine that was left open is closed when the interpreter ends, while its threads still run."""
    method = WeakMethod(close)

    def late() -> None:
        found = method()
        if found is not None:
            found()

    atexit.register(late)
