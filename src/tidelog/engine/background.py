"""[shell] Background maintenance: fsync, expiry, segment ageing, checkpoints.

    syncing thread ──every sync_interval_ms, or stirred──► Shard.tick
    keeping thread ──every sync_interval_ms──► the rest of Engine.tick ──when one is due──► Upkeep.checkpoint

Two threads, because a checkpoint takes as long as what it copies: meanwhile no write waits longer for its sync.

A checkpoint is due when the WAL holds something that no checkpoint covers and enough of it was written, or enough time
went by. The thread's own goes gently (`pace`) until somebody asks for one, or for the end. Who owns the engine may call
`tick` instead of the threads: nothing else differs.

Neither thread ends before `Keeper.end`: every exception of a task is logged, counted and shown by `Engine.health`, and
the task is tried again when it is next due.

[policy] How long a checkpoint that nobody waits for rests between its steps, so that writers have the disk too.

    in the WAL and covered by none    0                     3 × checkpoint_bytes
                                      ├──────────────────────┼──────────────────►
                                      │ 3 × what a step took │ not at all: the WAL has grown enough

A checkpoint writes every byte a second time. At full speed it takes the disk and the interpreter from whoever
waits for a sync, and those are the ones in a hurry: one of 64 MiB made a write of 1 MB with its sync take twice as
long. Where nobody writes there is nobody to make room for.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import nullcontext, suppress
from threading import Event, Lock, Thread
from typing import Final
from weakref import WeakMethod

from tidelog.disk.durability import DISK_FULL_ERRNOS
from tidelog.disk.interface import free_bytes
from tidelog.engine import startup
from tidelog.engine.checkpoint import CheckpointState, FailedTopics, run_checkpoint
from tidelog.engine.health import HealthState, describe_error
from tidelog.engine.results import RecoveryReport
from tidelog.engine.segment import Segment
from tidelog.engine.topic_state import EngineContext, TopicState, topic_directory
from tidelog.errors import DiskFull, Forked, WriteFailed
from tidelog.wal.writer import FILE_BYTES_MIN

_PAUSE_FACTOR: Final = 3
_BACKLOG_FACTOR: Final = 3
_PAUSE_US_MAX: Final = 20_000


def pause_us(took_us: int, written_bytes: int, uncovered_bytes: int, trigger_bytes: int) -> int:
    """How long to rest after a step that took so long, in which so much was written; so much is covered by none."""
    if not written_bytes or uncovered_bytes >= _BACKLOG_FACTOR * trigger_bytes:
        return 0
    return min(_PAUSE_FACTOR * took_us, _PAUSE_US_MAX)


CHECKPOINT_TASK: Final = "checkpoint"
_BEHIND_TRIGGERS: Final = 3  # times `checkpoint_bytes`, as in `pace`
_DISK_FULL_CHECKPOINT_MS: Final = 1000  # between two checkpoints while the disk is full
ListTopics = Callable[[], tuple[list[TopicState], int]]  # every topic, and the id that the next one gets


class IncompleteCheckpoint(WriteFailed):
    """A checkpoint that could not write all topics. Those that it could are safe in segments, the others in the WAL."""

    def __init__(self, root: str, failed: FailedTopics) -> None:
        first, error = next(iter(failed.items()))
        others = f" and {len(failed) - 1} other topics" if len(failed) > 1 else ""
        super().__init__(
            f"{root}: the checkpoint left out {first.name}{others} ({describe_error(error)}); every record is safe in "
            f"the "
            "WAL, which is kept, and all other topics were written. Repair the disk or the topic and retry"
        )
        self.topics = sorted(core.name for core in failed)


class CheckpointScheduler:
    def __init__(
        self, context: EngineContext, state: CheckpointState, listed: ListTopics, report: RecoveryReport
    ) -> None:
        self.state = state
        self._shared, self._list_topics = context, listed
        self._checkpoint_lock = Lock()  # one checkpoint at a time
        self.urgency = UrgentFlag()
        self._last_attempt_ms = context.clock.monotonic_ms()
        self._last_attempt_bytes = self._covered_bytes = 0
        # How many frames had been written when a checkpoint last covered them all. What was replayed is not covered.
        self._covered_frames = 0 if state.manifest_number and not (report.frames or report.padded) else -1
        self.lagging: tuple[str, ...] = ()  # topics that the last checkpoint could not write
        self.last_complete_ms = self._last_attempt_ms  # when the last one covered all topics
        self._disk_full_seen = 0  # of the shards, when there was room last
        for shard in context.shards:
            shard.writer.allowance = self.wal_file_allowance
        while state.needs_checkpoint:
            # Frames of an earlier number of shards: covered before a topic could get frames in two places, and by a
            # second checkpoint let go of.
            self.checkpoint()

    def checkpoint(self, *, final: bool = False, throttled: bool = False) -> None:
        """On an error everything is as before. `gently`: nobody waits for it."""
        with nullcontext() if throttled else self.urgency, self._checkpoint_lock:
            self._last_attempt_ms = self._shared.clock.monotonic_ms()
            self._last_attempt_bytes = self._wal_bytes()
            self._shared.needs_checkpoint = False
            try:
                self._checkpoint(final=final)
            except DiskFull:
                if not self._free_space_and_retry(final=final):
                    raise
            if not final:
                self._shared.disk_reserve.restore()

    def _free_space_and_retry(self, *, final: bool) -> bool:
        """A checkpoint that found no room: first let go of what was deleted, which takes no copies, then try again with
        as much of the reserve as it takes. Raises DiskFull where that is not enough. False: there is nothing to try."""
        released = self._shared.disk_reserve.release_part()
        if not released and free_bytes(self._shared.disk, self._shared.root) is None:
            return False  # a disk that does not say what is free has no reserve, and is tried again when it is due
        for core in self._list_topics()[0]:
            with core.lock:
                if core.index.count == 0:
                    core.index.roll_segment()  # the segment that grows is copied, also where nothing in it is left
        while True:
            for _ in range(2):  # the files go with the second manifest that does not name them
                if self._has_removable_segments():
                    with suppress(OSError, DiskFull):
                        self._run(final=False, copy=False)
            self._shared.needs_checkpoint = False
            try:
                self._checkpoint(final=final)
            except DiskFull:
                if not released:
                    raise
                released = self._shared.disk_reserve.release_part()
            else:
                return True

    def _has_removable_segments(self) -> bool:
        """Whether there are segments of which nothing is left."""
        history = self.state
        if history.files_to_remove_next or history.files_to_remove:
            return True
        for core in self._list_topics()[0]:
            with core.lock:
                if core.dropped_segments or any(
                    isinstance(part, Segment) and part.base in core.index.obsolete_segments()
                    for part in core.index.parts
                ):
                    return True
        return False

    def _run(self, *, final: bool, copy: bool = True) -> FailedTopics:
        return run_checkpoint(
            self._shared, self._list_topics, self.state, final=final, pause=self._throttle(), copy=copy
        )

    def _checkpoint(self, *, final: bool) -> None:
        try:
            failed = self._run(final=final)
            self.lagging = tuple(sorted(core.name for core in failed))
            full = next((error for error in failed.values() if _is_disk_full_error(error)), None)
            if failed:
                raise full or IncompleteCheckpoint(self._shared.root, failed)
        except Forked:  # a child does no background work: nothing failed that could be tried again here
            raise
        except Exception as error:
            self._shared.needs_checkpoint = True  # there is still something to do
            self._shared.health.failed(CHECKPOINT_TASK, error)
            if isinstance(error, OSError):
                raise startup.checkpoint_error(self._shared.root, error) from error
            raise
        self._covered_frames, self._covered_bytes = self._wal_frames(), self._last_attempt_bytes
        self.last_complete_ms = self._shared.clock.monotonic_ms()
        self._shared.health.succeeded(CHECKPOINT_TASK)

    def wal_file_allowance(self) -> int | None:
        """How many bytes a new WAL file may take: half of what is free beside what a checkpoint has to copy."""
        free = free_bytes(self._shared.disk, self._shared.root)
        if free is None:
            return None
        behind = self._wal_bytes() - self._covered_bytes
        return max(free - behind - behind // 8, 0) // 2  # an index entry of 20 bytes for each record comes with it

    def remove_dropped_topics(self, topics: list[TopicState]) -> None:
        """Remove the files of dropped topics, beside no checkpoint. Those of one that cannot be removed stay in the
        list; the next start sweeps them too."""
        with self._checkpoint_lock:
            while topics:
                place = topic_directory(self._shared.root, topics[0].id)
                try:
                    for each in (place, f"{place}.deleted"):  # the second is what an attempt that failed left
                        startup.remove_topic_files(self._shared.disk, each)
                except OSError as error:
                    raise WriteFailed(
                        f"{place}: files of the dropped topic {topics[0].name} cannot be removed: {error}; the topic "
                        f"is "
                        "gone, its files are tried again later and at the next start"
                    ) from error
                topics.pop(0)

    def _throttle(self) -> Callable[[], None]:
        """What a checkpoint calls after each step: back at once, or when others had the disk for a while."""
        now_us, began_us, seen = (
            self._shared.clock.monotonic_us,
            self._shared.clock.monotonic_us(),
            self._last_attempt_bytes,
        )

        def rest() -> None:
            nonlocal began_us, seen
            before, seen = seen, self._wal_bytes()
            behind, trigger = seen - self._covered_bytes, self._shared.limits.checkpoint_bytes
            self.urgency.wait(pause_us(now_us() - began_us, seen - before, behind, trigger))
            began_us = now_us()

        return rest

    @property
    def is_behind(self) -> bool:
        """Whether memory holds more records than a checkpoint should leave there, and one that works is under way or
        due: it no longer rests (`pace`), so this ends."""
        return (
            self._wal_bytes() - self._covered_bytes > _BEHIND_TRIGGERS * self._shared.limits.checkpoint_bytes
            and not self._shared.health.is_failing(CHECKPOINT_TASK)
            and not any(shard.is_latched for shard in self._shared.shards)
        )

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        limits = self._shared.limits
        waited_ms = self._shared.clock.monotonic_ms() - self._last_attempt_ms
        fresh = self._wal_bytes() - self._last_attempt_bytes
        pending = bool(
            self.state.files_to_remove_next or self.state.files_to_remove
        )  # files to be removed by another checkpoint
        if self._is_disk_full and waited_ms >= _DISK_FULL_CHECKPOINT_MS:
            return self._is_uncovered() or pending
        return (self._is_uncovered() or pending) and (
            fresh >= limits.checkpoint_bytes or waited_ms >= limits.checkpoint_ms
        )

    @property
    def _is_disk_full(self) -> bool:
        """Whether the disk was full and room was not found again: what was deleted is let go of without delay."""
        refusals = sum(shard.writer.disk_full_count for shard in self._shared.shards)
        if not self._shared.disk_reserve.is_short and refusals == self._disk_full_seen:
            return False
        if self._shared.disk_reserve.restore() and not self.state.files_to_remove_next and self._has_allowance():
            self._disk_full_seen = refusals
            return False
        return True

    def _has_allowance(self) -> bool:
        """Whether a new WAL file may be made. Where it may not because of what is to be copied, a checkpoint helps."""
        allowed = self.wal_file_allowance()
        return allowed is None or allowed >= min(FILE_BYTES_MIN, self._shared.limits.wal_file_bytes)

    def needs_final_checkpoint(self) -> bool:
        """Whether a last checkpoint would say something that the manifest does not."""
        shards, cores = self._shared.shards, self._list_topics()[0]
        if not shards or any(shard.is_latched for shard in shards):
            return False
        resident = any(core.is_ephemeral and (core.index.head or core.groups) for core in cores)
        reserved = any(core.reserved_ceiling > core.index.head for core in cores)
        return resident or reserved or self._is_uncovered()

    def _is_uncovered(self) -> bool:
        return self._shared.needs_checkpoint or self._covered_frames != self._wal_frames()

    def health(self) -> HealthState:
        """How background work goes, and what is corrupt."""
        shared = self._shared
        tasks, health = shared.health.tasks(), shared.health
        ok = not self.lagging and not health.corruptions and not any(task.failing for task in tasks)
        age_ms = shared.clock.monotonic_ms() - self.last_complete_ms if shared.shards else 0
        uncovered = self._wal_bytes() - self._covered_bytes if shared.shards else 0
        return HealthState(ok, tasks, age_ms, uncovered, self.lagging, health.corruptions, health.corrupt_places())

    def _wal_bytes(self) -> int:
        return sum(shard.stats.bytes for shard in self._shared.shards)

    def _wal_frames(self) -> int:
        return sum(shard.stats.frames for shard in self._shared.shards)


def _is_disk_full_error(error: BaseException) -> bool:
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS)


class UrgentFlag:
    """While somebody is inside, nobody rests. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock, self._is_urgent, self._count = Lock(), Event(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._is_urgent.set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._is_urgent.clear()

    def wait(self, rest_us: int) -> None:
        """Rest for so long, or until somebody is in a hurry."""
        if rest_us:
            self._is_urgent.wait(rest_us / 1_000_000)


def start_background_threads(
    context: EngineContext,
    sync: Callable[[], None],
    run_maintenance: Callable[[], object],
    urgency: UrgentFlag,
    report: RecoveryReport,
) -> list[BackgroundThread]:
    """The two threads of an engine, at work."""
    pause_ms, health = context.limits.sync_interval_ms, context.health

    def synced() -> None:
        try:
            sync()
        except Exception as error:
            report.add_background_error(error)
            health.failed("sync", error)  # a latched shard also tells its writers
        else:
            health.succeeded("sync")

    def failed(error: Exception) -> None:
        report.add_background_error(error)
        health.failed("upkeep", error)

    syncing = BackgroundThread(synced, pause_ms, urgency, failed, f"tidelog syncs {context.root}")
    for shard in context.shards:
        shard.on_tick_needed = syncing.wake
    return [syncing, BackgroundThread(run_maintenance, pause_ms, urgency, failed, f"tidelog {context.root}")]


class BackgroundThread:
    """The thread that calls `tick` every so often, and at once when it is stirred."""

    def __init__(
        self,
        tick: Callable[[], object],
        pause_ms: int,
        hurry: UrgentFlag,
        failed: Callable[[Exception], None],
        name: str,
    ) -> None:
        self._tick, self._pause_s, self._urgency, self._failed = tick, pause_ms / 1000, hurry, failed
        self._stopping = False
        self._wakeup = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do before its time."""
        self._wakeup.set()

    def stop(self) -> None:
        """On return the thread is gone."""
        self._stopping = True
        self._wakeup.set()
        with self._urgency:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wakeup.wait(self._pause_s)
            self._wakeup.clear()
            if self._stopping:
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
