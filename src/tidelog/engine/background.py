"""Background maintenance: fsync, expiry, segment ageing, checkpoints.

    sync thread         every sync_interval_ms, or when woken ──► Shard.tick
    maintenance thread  every sync_interval_ms ──► the rest of Engine.tick ──when due──► CheckpointScheduler.checkpoint

Two threads, because a checkpoint takes as long as what it copies, and writes must not wait longer for their sync
meanwhile. An owner may call `Engine.tick` instead of running the threads.

A checkpoint is due when the WAL holds frames that no checkpoint covers and enough bytes were written or enough time
passed. The thread's own checkpoints are throttled (`pause_us`) until a caller asks for one or for close.

Neither thread ends before `BackgroundThread.stop`: every exception of a task is logged, counted and shown by
`Engine.health`, and the task is retried when it is next due.
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
from tidelog.engine.context import EngineContext, topic_directory
from tidelog.engine.health import HealthState, describe_error
from tidelog.engine.results import RecoveryReport, add_background_error
from tidelog.engine.segment import Segment
from tidelog.engine.snapshot import EngineSnapshot, take_snapshot
from tidelog.engine.topic_state import TopicState
from tidelog.errors import DiskFull, Forked, WriteFailed
from tidelog.wal.writer import FILE_BYTES_MIN

_PAUSE_FACTOR: Final = 3
_BACKLOG_FACTOR: Final = 3
_PAUSE_US_MAX: Final = 20_000


def pause_us(took_us: int, written_bytes: int, uncovered_bytes: int, trigger_bytes: int) -> int:
    """Return how long a checkpoint pauses after a step of `took_us`, during which writers wrote `written_bytes`.

        uncovered WAL bytes    0                        3 × checkpoint_bytes
                               ├──────────────────────────┼──────────────────►
                               │ 3 × the time of the step │ no pause: the WAL has grown enough

    A checkpoint writes every byte a second time. At full speed it takes disk and interpreter from writers that wait for
    a sync: one of 64 MiB doubled the time of a write of 1 MB with its sync. Without writers there is no pause.
    """
    if not written_bytes or uncovered_bytes >= _BACKLOG_FACTOR * trigger_bytes:
        return 0
    return min(_PAUSE_FACTOR * took_us, _PAUSE_US_MAX)


CHECKPOINT_TASK: Final = "checkpoint"
_LAGGING_FACTOR: Final = 3  # times `checkpoint_bytes`, as in `pause_us`
_DISK_FULL_CHECKPOINT_MS: Final = 1000  # between two checkpoints while the disk is full


class IncompleteCheckpoint(WriteFailed):
    """A checkpoint that could not write all topics. The others are safe in segments, these in the WAL."""

    def __init__(self, root: str, failed: FailedTopics) -> None:
        first, error = next(iter(failed.items()))
        others = f" and {len(failed) - 1} other topics" if len(failed) > 1 else ""
        super().__init__(
            f"{root}: the checkpoint left out {first.name}{others} ({describe_error(error)}); every record is safe in "
            "the WAL, which is kept, and all other topics were written. Repair the disk or the topic and retry"
        )
        self.topics = sorted(topic.name for topic in failed)


class CheckpointScheduler:
    def __init__(
        self,
        context: EngineContext,
        state: CheckpointState,
        list_topics: Callable[[], list[TopicState]],
        next_topic_id: Callable[[], int],
        report: RecoveryReport,
    ) -> None:
        self.state = state
        self._context, self._list_topics, self._next_topic_id = context, list_topics, next_topic_id
        self._checkpoint_lock = Lock()  # one checkpoint at a time
        self.urgency = UrgentFlag()
        self.discard_objects: Callable[[list[str]], object] = lambda _: None  # of the cold tier, unnamed
        self._last_attempt_ms = context.clock.monotonic_ms()
        self._last_attempt_bytes = self._covered_bytes = 0
        # WAL frames at the last complete checkpoint. Replayed frames are not covered.
        self._covered_frames = 0 if state.manifest_number and not (report.frames or report.padded) else -1
        self.lagging: tuple[str, ...] = ()  # topics that the last checkpoint could not write
        self.last_complete_ms = self._last_attempt_ms  # time of the last complete checkpoint
        self._disk_full_seen = 0  # refusals of the shards when the disk last had space
        for shard in context.shards:
            shard.writer.allowance = self.wal_file_allowance
        while state.needs_checkpoint:
            # Frames of an earlier shard count are covered before a topic gets frames in two shards; a second checkpoint
            # removes them.
            self.checkpoint()

    def checkpoint(self, *, final: bool = False, throttled: bool = False) -> None:
        """Run a checkpoint. On an error nothing changes. `throttled`: no caller waits for it."""
        with nullcontext() if throttled else self.urgency, self._checkpoint_lock:
            self._last_attempt_ms = self._context.clock.monotonic_ms()
            self._last_attempt_bytes = self._wal_bytes()
            self._context.needs_checkpoint = False
            try:
                self._checkpoint(final=final)
            except DiskFull:
                if not self._free_space_and_retry(final=final):
                    raise
            if not final:
                self._context.disk_reserve.restore()

    def enable_large_records(self) -> None:
        """Save a manifest, unless this process has: earlier versions, which would take the frame of a large record for
        damage, refuse its format."""
        if self.state.has_saved:
            return
        try:
            self.checkpoint()
        except IncompleteCheckpoint:  # it left out a topic; the manifest was saved
            if not self.state.has_saved:
                raise

    def _free_space_and_retry(self, *, final: bool) -> bool:
        """Retry a checkpoint on a full disk: first remove segments without live records, which needs no copies, then
        use as much of the reserve as it takes. Raises DiskFull where that is not enough. False: nothing to try."""
        released = self._context.disk_reserve.release_part()
        if not released and free_bytes(self._context.disk, self._context.root) is None:
            return False  # a disk without a free-space query has no reserve; retried when due
        for topic in self._list_topics():
            with topic.lock:
                if topic.index.count == 0:
                    topic.index.roll_segment()  # the active segment is copied even if it has no live record
                    topic.mark_dirty()
        while True:
            for _ in range(2):  # the second manifest that does not name files removes them
                if self._has_removable_segments():
                    with suppress(OSError, DiskFull):
                        self._run(final=False, copy=False)
            self._context.needs_checkpoint = False
            try:
                self._checkpoint(final=final)
            except DiskFull:
                if not released:
                    raise
                released = self._context.disk_reserve.release_part()
            else:
                return True

    def _has_removable_segments(self) -> bool:
        """Whether there are segments without live records."""
        state = self.state
        if state.files_to_remove_next or state.files_to_remove:
            return True
        for topic in self._list_topics():
            with topic.lock:
                if topic.dropped_segments or any(
                    isinstance(part, Segment) and part.base in topic.index.obsolete_segments()
                    for part in topic.index.parts
                ):
                    return True
        return False

    def _run(self, *, final: bool, copy: bool = True) -> FailedTopics:
        return run_checkpoint(
            self._context,
            self._next_topic_id,
            self.state,
            final=final,
            pause=self._throttle(),
            copy=copy,
            discard_objects=lambda keys: self.discard_objects(keys),
        )

    def _checkpoint(self, *, final: bool) -> None:
        # Counted before the checkpoint takes its positions: frames that are written meanwhile need another one.
        frames_before = self._wal_frames()
        try:
            failed = self._run(final=final)
            self.lagging = tuple(sorted(topic.name for topic in failed))
            disk_full = next((error for error in failed.values() if _is_disk_full_error(error)), None)
            if failed:
                raise disk_full or IncompleteCheckpoint(self._context.root, failed)
        except Forked:  # a forked child does no background work
            raise
        except Exception as error:
            self._context.needs_checkpoint = True  # retry when due
            self._context.health.failed(CHECKPOINT_TASK, error)
            if isinstance(error, OSError):
                raise startup.checkpoint_error(self._context.root, error) from error
            raise
        own_marks = len(self._context.shards)
        self._covered_frames, self._covered_bytes = frames_before + own_marks, self._last_attempt_bytes
        self.last_complete_ms = self._context.clock.monotonic_ms()
        self._context.health.succeeded(CHECKPOINT_TASK)

    def take_snapshot(self, list_ids: Callable[[], set[int]]) -> EngineSnapshot:
        """Take a snapshot for a backup; the caller releases it. `list_ids` returns the ids of all topics."""
        with self._checkpoint_lock:
            return take_snapshot(self._context, list_ids)

    def wal_file_allowance(self) -> int | None:
        """Return how many bytes a new WAL file may take: half of what is free beside what a checkpoint has to copy."""
        free = free_bytes(self._context.disk, self._context.root)
        if free is None:
            return None
        uncovered = self._wal_bytes() - self._covered_bytes
        return max(free - uncovered - uncovered // 8, 0) // 2  # an index entry of 20 bytes per record is added

    def remove_dropped_topics(self, topics: list[TopicState]) -> None:
        """Remove the files of dropped topics while no checkpoint and no backup runs. Topics that fail stay in the list;
        the next start removes their files too."""
        with self._checkpoint_lock:
            while topics and not self._context.pins.hold_segments:
                directory = topic_directory(self._context.root, topics[0].id)
                try:
                    for path in (directory, f"{directory}.deleted"):  # the second is left by a failed attempt
                        startup.remove_topic_files(self._context.disk, path)
                except OSError as error:
                    raise WriteFailed(
                        f"{directory}: files of the dropped topic {topics[0].name} cannot be removed: {error}; the "
                        "topic is gone, its files are tried again later and at the next start"
                    ) from error
                topics.pop(0)

    def _throttle(self) -> Callable[[], None]:
        """Return the function that a checkpoint calls after each step; it pauses so that writers get the disk."""
        now_us, started_us, seen_bytes = (
            self._context.clock.monotonic_us,
            self._context.clock.monotonic_us(),
            self._last_attempt_bytes,
        )

        def pause() -> None:
            nonlocal started_us, seen_bytes
            before, seen_bytes = seen_bytes, self._wal_bytes()
            uncovered, trigger = seen_bytes - self._covered_bytes, self._context.limits.checkpoint_bytes
            self.urgency.wait(pause_us(now_us() - started_us, seen_bytes - before, uncovered, trigger))
            started_us = now_us()

        return pause

    @property
    def is_lagging(self) -> bool:
        """Whether memory holds more records than a checkpoint should leave there and a working checkpoint is running or
        due, unthrottled: so this ends."""
        return (
            self._wal_bytes() - self._covered_bytes > _LAGGING_FACTOR * self._context.limits.checkpoint_bytes
            and not self._context.health.is_failing(CHECKPOINT_TASK)
            and not any(shard.is_latched for shard in self._context.shards)
        )

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        limits = self._context.limits
        waited_ms = self._context.clock.monotonic_ms() - self._last_attempt_ms
        new_bytes = self._wal_bytes() - self._last_attempt_bytes
        state = self.state
        pending = bool(state.files_to_remove_next or state.files_to_remove)  # by another checkpoint
        pending = pending or bool(state.hot_to_remove_next or state.hot_to_remove or state.objects_to_remove_next)
        if self._is_disk_full and waited_ms >= _DISK_FULL_CHECKPOINT_MS:
            return self._is_uncovered() or pending
        return (self._is_uncovered() or pending) and (
            new_bytes >= limits.checkpoint_bytes or waited_ms >= limits.checkpoint_ms
        )

    @property
    def _is_disk_full(self) -> bool:
        """Whether the disk was full and is still short of space: deleted records are then removed without delay."""
        refusals = sum(shard.writer.disk_full_count for shard in self._context.shards)
        if not self._context.disk_reserve.is_short and refusals == self._disk_full_seen:
            return False
        if self._context.disk_reserve.restore() and not self.state.files_to_remove_next and self._has_allowance():
            self._disk_full_seen = refusals
            return False
        return True

    def _has_allowance(self) -> bool:
        """Whether a new WAL file may be created. If uncopied records prevent it, a checkpoint helps."""
        allowed = self.wal_file_allowance()
        return allowed is None or allowed >= min(FILE_BYTES_MIN, self._context.limits.wal_file_bytes)

    def needs_final_checkpoint(self) -> bool:
        """Whether a last checkpoint would add something to the manifest."""
        context = self._context
        if not context.shards or any(shard.is_latched for shard in context.shards):
            return False
        return bool(context.dirty_topics) or context.has_reservations or self._is_uncovered()

    def _is_uncovered(self) -> bool:
        return self._context.needs_checkpoint or self._covered_frames != self._wal_frames()

    def health(self) -> HealthState:
        """The state of background work, and corruption."""
        context = self._context
        tasks, health = context.health.tasks(), context.health
        ok = not self.lagging and not health.corruptions and not any(task.failing for task in tasks)
        age_ms = context.clock.monotonic_ms() - self.last_complete_ms if context.shards else 0
        uncovered = self._wal_bytes() - self._covered_bytes if context.shards else 0
        return HealthState(ok, tasks, age_ms, uncovered, self.lagging, health.corruptions, health.corrupt_places())

    def _wal_bytes(self) -> int:
        return sum(shard.stats.bytes for shard in self._context.shards)

    def _wal_frames(self) -> int:
        return sum(shard.stats.frames for shard in self._context.shards)


def _is_disk_full_error(error: BaseException) -> bool:
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS)


class UrgentFlag:
    """While a thread is inside, checkpoints do not pause. Thread-safe."""

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
        """Pause for this long, or until a thread enters."""
        if rest_us:
            self._is_urgent.wait(rest_us / 1_000_000)


def start_background_threads(
    context: EngineContext,
    sync: Callable[[], object],
    run_maintenance: Callable[[], object],
    urgency: UrgentFlag,
    report: RecoveryReport,
) -> list[BackgroundThread]:
    """Start the two threads of an engine."""
    pause_ms = context.limits.sync_interval_ms

    def on_error(error: Exception) -> None:
        add_background_error(report, error)
        context.health.failed("upkeep", error)

    sync_thread = BackgroundThread(sync, pause_ms, urgency, on_error, f"tidelog syncs {context.root}")
    for shard in context.shards:
        shard.on_tick_needed = sync_thread.wake
    return [sync_thread, BackgroundThread(run_maintenance, pause_ms, urgency, on_error, f"tidelog {context.root}")]


class BackgroundThread:
    """A thread that calls `tick` at an interval, and at once when woken."""

    def __init__(
        self,
        tick: Callable[[], object],
        pause_ms: int,
        urgency: UrgentFlag,
        on_error: Callable[[Exception], None],
        name: str,
    ) -> None:
        self._tick, self._pause_s, self._urgency, self._on_error = tick, pause_ms / 1000, urgency, on_error
        self._stopping = False
        self._wakeup = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run the next tick now."""
        self._wakeup.set()

    def stop(self) -> None:
        """Stop and join the thread."""
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
                self._on_error(error)


def close_at_exit(close: Callable[[], None]) -> None:
    """Close an engine that was left open when the interpreter exits, while its threads still run."""
    method = WeakMethod(close)

    def close_if_alive() -> None:
        close_engine = method()
        if close_engine is not None:
            close_engine()

    atexit.register(close_if_alive)
