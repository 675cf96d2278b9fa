"""[shell] Background maintenance: fsync, expiry, segment ageing, checkpoints.

    syncing thread ──every sync_interval_ms, or stirred──► Shard.tick
    keeping thread ──every sync_interval_ms──► the rest of Engine.tick ──when one is due──► Upkeep.checkpoint

Two threads, because a checkpoint takes as long as what it copies: meanwhile no write waits longer for its sync.

A checkpoint is due when the WAL holds something that no checkpoint covers and enough of it was written, or enough time
went by. The thread's own goes gently (`pace`) until somebody asks for one, or for the end. Who owns the engine may call
`tick` instead of the threads: nothing else differs.

Neither thread ends before `Keeper.end`: every exception of a task is logged, counted and shown by `Engine.health`, and
the task is tried again when it is next due.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import nullcontext, suppress
from threading import Event, Lock, Thread
from typing import Final
from weakref import WeakMethod

from tidelog.disk.latch import FULL
from tidelog.disk.seam import free_bytes
from tidelog.engine import opening, pace
from tidelog.engine.checkpoint import Failed, History, checkpoint
from tidelog.engine.core import Core, Shared, directory
from tidelog.engine.health import HealthState, described
from tidelog.engine.parts import Segment
from tidelog.engine.report import Report
from tidelog.errors import DiskFull, Forked, WriteFailed
from tidelog.wal.file import LEAST_BYTES

CHECKPOINT: Final = "checkpoint"
_BEHIND_TRIGGERS: Final = 3  # times `checkpoint_bytes`, as in `pace`
_FULL_MS: Final = 1000  # between two checkpoints while the disk is full
Listed = Callable[[], tuple[list[Core], int]]  # every topic, and the id that the next one gets


class Incomplete(WriteFailed):
    """A checkpoint that could not write all topics. Those that it could are safe in segments, the others in the WAL."""

    def __init__(self, root: str, failed: Failed) -> None:
        first, error = next(iter(failed.items()))
        others = f" and {len(failed) - 1} other topics" if len(failed) > 1 else ""
        super().__init__(
            f"{root}: the checkpoint left out {first.name}{others} ({described(error)}); every record is safe in the "
            "WAL, which is kept, and all other topics were written. Repair the disk or the topic and retry"
        )
        self.topics = sorted(core.name for core in failed)


class Upkeep:
    def __init__(self, shared: Shared, history: History, listed: Listed, report: Report) -> None:
        self.history = history
        self._shared, self._listed = shared, listed
        self._turn = Lock()  # one checkpoint at a time
        self.hurry = Hurry()
        self._checked_ms = shared.clock.monotonic_ms()
        self._checked_bytes = self._covered_bytes = 0
        # How many frames had been written when a checkpoint last covered them all. What was replayed is not covered.
        self._covered = 0 if history.number and not (report.frames or report.padded) else -1
        self.lagging: tuple[str, ...] = ()  # topics that the last checkpoint could not write
        self.complete_ms = self._checked_ms  # when the last one covered all topics
        self._refusals = 0  # of the shards, when there was room last
        for shard in shared.shards:
            shard.allow(self.allowance)
        while history.moved:
            # Frames of an earlier number of shards: covered before a topic could get frames in two places, and by a
            # second checkpoint let go of.
            self.checkpoint()

    def checkpoint(self, *, final: bool = False, gently: bool = False) -> None:
        """On an error everything is as before. `gently`: nobody waits for it."""
        with nullcontext() if gently else self.hurry, self._turn:
            self._checked_ms = self._shared.clock.monotonic_ms()
            self._checked_bytes = self._bytes()
            self._shared.rolled = False
            try:
                self._checkpoint(final=final)
            except DiskFull:
                if not self._make_room(final=final):
                    raise
            if not final:
                self._shared.reserve.restore()

    def _make_room(self, *, final: bool) -> bool:
        """A checkpoint that found no room: first let go of what was deleted, which takes no copies, then try again with
        as much of the reserve as it takes. Raises DiskFull where that is not enough. False: there is nothing to try."""
        released = self._shared.reserve.release()
        if not released and free_bytes(self._shared.disk, self._shared.root) is None:
            return False  # a disk that does not say what is free has no reserve, and is tried again when it is due
        for core in self._listed()[0]:
            with core.lock:
                if core.index.count == 0:
                    core.index.roll()  # the segment that grows is copied, also where nothing in it is left
        while True:
            for _ in range(2):  # the files go with the second manifest that does not name them
                if self._has_waste():
                    with suppress(OSError, DiskFull):
                        self._save(final=False, copy=False)
            self._shared.rolled = False
            try:
                self._checkpoint(final=final)
            except DiskFull:
                if not released:
                    raise
                released = self._shared.reserve.release()
            else:
                return True

    def _has_waste(self) -> bool:
        """Whether there are segments of which nothing is left."""
        history = self.history
        if history.doomed or history.stale:
            return True
        for core in self._listed()[0]:
            with core.lock:
                if core.discarded or any(
                    isinstance(part, Segment) and part.base in core.index.obsolete() for part in core.index.parts
                ):
                    return True
        return False

    def _save(self, *, final: bool, copy: bool = True) -> Failed:
        return checkpoint(self._shared, self._listed, self.history, final=final, rest=self._resting(), copy=copy)

    def _checkpoint(self, *, final: bool) -> None:
        try:
            failed = self._save(final=final)
            self.lagging = tuple(sorted(core.name for core in failed))
            full = next((error for error in failed.values() if _is_full(error)), None)
            if failed:
                raise full or Incomplete(self._shared.root, failed)
        except Forked:  # a child does no background work: nothing failed that could be tried again here
            raise
        except Exception as error:
            self._shared.rolled = True  # there is still something to do
            self._shared.health.failed(CHECKPOINT, error)
            if isinstance(error, OSError):
                raise opening.refused(self._shared.root, error) from error
            raise
        self._covered, self._covered_bytes = self._written(), self._checked_bytes
        self.complete_ms = self._shared.clock.monotonic_ms()
        self._shared.health.succeeded(CHECKPOINT)

    def allowance(self) -> int | None:
        """How many bytes a new WAL file may take: half of what is free beside what a checkpoint has to copy."""
        free = free_bytes(self._shared.disk, self._shared.root)
        if free is None:
            return None
        behind = self._bytes() - self._covered_bytes
        return max(free - behind - behind // 8, 0) // 2  # an index entry of 20 bytes for each record comes with it

    def erase(self, cores: list[Core]) -> None:
        """Remove the files of dropped topics, beside no checkpoint. Those of one that cannot be removed stay in the
        list; the next start sweeps them too."""
        with self._turn:
            while cores:
                place = directory(self._shared.root, cores[0].id)
                try:
                    for each in (place, f"{place}.deleted"):  # the second is what an attempt that failed left
                        opening.erase(self._shared.disk, each)
                except OSError as error:
                    raise WriteFailed(
                        f"{place}: files of the dropped topic {cores[0].name} cannot be removed: {error}; the topic is "
                        "gone, its files are tried again later and at the next start"
                    ) from error
                cores.pop(0)

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

    @property
    def is_behind(self) -> bool:
        """Whether memory holds more records than a checkpoint should leave there, and one that works is under way or
        due: it no longer rests (`pace`), so this ends."""
        return (
            self._bytes() - self._covered_bytes > _BEHIND_TRIGGERS * self._shared.limits.checkpoint_bytes
            and not self._shared.health.is_failing(CHECKPOINT)
            and not any(shard.latched for shard in self._shared.shards)
        )

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        limits = self._shared.limits
        waited_ms = self._shared.clock.monotonic_ms() - self._checked_ms
        fresh = self._bytes() - self._checked_bytes
        pending = bool(self.history.doomed or self.history.stale)  # files to be removed by another checkpoint
        if self._is_full and waited_ms >= _FULL_MS:
            return self._is_uncovered() or pending
        return (self._is_uncovered() or pending) and (
            fresh >= limits.checkpoint_bytes or waited_ms >= limits.checkpoint_ms
        )

    @property
    def _is_full(self) -> bool:
        """Whether the disk was full and room was not found again: what was deleted is let go of without delay."""
        refusals = sum(shard.refusals for shard in self._shared.shards)
        if not self._shared.reserve.is_wanted and refusals == self._refusals:
            return False
        if self._shared.reserve.restore() and not self.history.doomed and self._has_allowance():
            self._refusals = refusals
            return False
        return True

    def _has_allowance(self) -> bool:
        """Whether a new WAL file may be made. Where it may not because of what is to be copied, a checkpoint helps."""
        allowed = self.allowance()
        return allowed is None or allowed >= min(LEAST_BYTES, self._shared.limits.wal_file_bytes)

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

    def health(self) -> HealthState:
        """How background work goes, and what is corrupt."""
        shared = self._shared
        tasks, health = shared.health.tasks(), shared.health
        ok = not self.lagging and not health.corruptions and not any(task.failing for task in tasks)
        age_ms = shared.clock.monotonic_ms() - self.complete_ms if shared.shards else 0
        uncovered = self._bytes() - self._covered_bytes if shared.shards else 0
        return HealthState(ok, tasks, age_ms, uncovered, self.lagging, health.corruptions, health.places())

    def _bytes(self) -> int:
        return sum(shard.stats.bytes for shard in self._shared.shards)

    def _written(self) -> int:
        return sum(shard.stats.frames for shard in self._shared.shards)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in FULL)


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
    shared: Shared, sync: Callable[[], None], keep: Callable[[], object], hurry: Hurry, report: Report
) -> list[Keeper]:
    """The two threads of an engine, at work."""
    pause_ms, health = shared.limits.sync_interval_ms, shared.health

    def synced() -> None:
        try:
            sync()
        except Exception as error:
            report.trouble(error)
            health.failed("sync", error)  # a latched shard also tells its writers
        else:
            health.succeeded("sync")

    def failed(error: Exception) -> None:
        report.trouble(error)
        health.failed("upkeep", error)

    syncing = Keeper(synced, pause_ms, hurry, failed, f"tidelog syncs {shared.root}")
    for shard in shared.shards:
        shard.on_want = syncing.stir
    return [syncing, Keeper(keep, pause_ms, hurry, failed, f"tidelog {shared.root}")]


class Keeper:
    """The thread that calls `tick` every so often, and at once when it is stirred."""

    def __init__(
        self, tick: Callable[[], object], pause_ms: int, hurry: Hurry, failed: Callable[[Exception], None], name: str
    ) -> None:
        self._tick, self._pause_s, self._hurry, self._failed = tick, pause_ms / 1000, hurry, failed
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
            except Exception as error:
                self._failed(error)


def close_at_exit(close: Callable[[], None]) -> None:
    """An engine that was left open is closed when the interpreter ends, while its threads still run."""
    method = WeakMethod(close)

    def late() -> None:
        found = method()
        if found is not None:
            found()

    atexit.register(late)
