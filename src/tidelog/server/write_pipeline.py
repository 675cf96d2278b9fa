"""The way of every write from a handler to its outcome. All calls go in one direction:

    handler ──► submit / add_to_batch ──► admission ──► TopicOperations.submit: staged in the WAL queue of its shard
                     turn ──► turn-end calls ──► one batch a topic ──► admission ──► commit of every shard
      commits done ──► readers are notified ──► outcomes are delivered ──► queued writes are admitted

A turn runs at the end of the loop iteration that scheduled it. `PipelineState` says when:

    IDLE ──► SCHEDULED ──► (fast disk, an fsync is running)  WAITING_FSYNC ──► SCHEDULED when it is done, or after 5 ms
                  ├──────► (the last turn had many records)  POSTPONED by one iteration: its clients write again
                  └──────► the turn runs ──► IDLE

Fsyncs run in a thread of their own (mode `beside`) or on the loop (mode `loop`). Writes wait only for the fsyncs of a
fast disk: one batch for all of them costs less than one for each few (docs/decisions/0009-where-syncs-run.md). Long
writes and new WAL files are left to the WAL's writer thread. Under pressure commits that need an fsync are collected
over a window, slice by slice, until a slice brings no write or the governor's delay is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from threading import get_ident
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from tidelog.engine import Appended, Batch, CommitFuture, Shard, Topic
from tidelog.engine.batch_encoder import ArrowBatch
from tidelog.engine.health import HealthMonitor
from tidelog.engine.topic import topic_operations
from tidelog.errors import Busy, Error
from tidelog.server.config import CommitMode
from tidelog.server.push.notifier import NotifyScheduler
from tidelog.server.push.page_cache import RunBlocking

ResultT = TypeVar("ResultT")
WriterT = TypeVar("WriterT")
OnCommitDone = Callable[[CommitFuture[Any]], None]
OnSubmitted = Callable[[CommitFuture[Appended] | Error, int], None]
"""Gets the future of a write, or the error of submitting it, and the microseconds that it was queued for."""
BatchSlice: TypeAlias = tuple[WriterT, int, int]
"""A writer, the index of its first record in the batch, and its number of records."""
OnBatchCommitted: TypeAlias = Callable[[Appended | Error, list[BatchSlice[WriterT]]], None]

_FAST_FSYNC_US: Final = 600  # writes wait for the fsyncs of a disk whose mean is below this
_FSYNC_WAIT_US: Final = 5_000  # an fsync that takes longer makes the disk a slow one
_REEVALUATE_EVERY_WRITES: Final = 256
_REEVALUATE_MIN_FSYNCS: Final = 16  # fewer make no mean
_WINDOW_SLICE_MS: Final = 1.0  # timers of an event loop are no finer
_RECHECK_S: Final = 0.01  # commits of other threads, such as a checkpoint's, free capacity without a call
_FLUSH_BYTES: Final = 1 << 20  # a larger batch is submitted before the turn
_FLUSH_RECORDS: Final = 4_096


class PipelineState(Enum):
    """When the next turn runs; the module docstring has the transitions."""

    IDLE = auto()
    SCHEDULED = auto()
    POSTPONED = auto()
    WAITING_FSYNC = auto()


class _QueuedWrite:
    __slots__ = ("queued_us", "submit")

    def __init__(self, queued_us: int, submit: Callable[[int], None]) -> None:
        self.queued_us, self.submit = queued_us, submit


class WriteAdmission:
    """Decide whether a write is submitted, queued or rejected.

    capacity in the WAL queue of its shard, no queued write ──► submitted at once
    no capacity, and the server is saturated                ──► Busy, nothing was written, unless it asked to wait
    no capacity otherwise                                   ──► queued, submitted in order of arrival as commits end

    At most as many writes are queued as the WAL queue has places; further ones are rejected. No write overtakes a
    queued one of its shard. A queued write has no seq yet.
    """

    def __init__(
        self, monotonic_us: Callable[[], int], notify_scheduler: NotifyScheduler, health: HealthMonitor
    ) -> None:
        self._monotonic_us, self._notify_scheduler, self._health = monotonic_us, notify_scheduler, health
        self._queues: dict[Shard, deque[_QueuedWrite]] = {}
        self.rejected_total = 0

    @property
    def queued_writes(self) -> int:
        return sum(map(len, self._queues.values()))

    def has_capacity(self, topic: Topic) -> bool:
        """Whether a write is submitted at once. Ephemeral topics have no WAL queue."""
        if topic.config.durability == "ephemeral":
            return True
        shard = topic_operations(topic).shard
        return shard not in self._queues and shard.queue_length < shard.queue_max

    def check_not_saturated(self, shard: Shard) -> None:
        """Raise Busy where a write that finds no capacity is rejected."""
        self._notify_scheduler.start_sampling()
        queued = len(self._queues.get(shard, ()))
        if self._notify_scheduler.governor.is_saturated or queued >= shard.queue_max:
            self.rejected_total += 1
            raise Busy(
                f"{shard.queue_length + queued} writes wait for the disk already and the server is saturated; nothing "
                "was written, retry later or set disable_backpressure to wait"
            )

    def enqueue(self, shard: Shard, submit: Callable[[int], None], *, wait_if_full: bool) -> None:
        """Queue a write; `submit` gets the microseconds it was queued for. Raises Busy where it is rejected."""
        if not wait_if_full:
            self.check_not_saturated(shard)
        self._queues.setdefault(shard, deque()).append(_QueuedWrite(self._monotonic_us(), submit))
        self._notify_scheduler.start_sampling()

    def admit_queued(self) -> None:
        """Submit as many queued writes as there is capacity for."""
        if not self._queues:
            return
        now_us = self._monotonic_us()
        for shard, queue in list(self._queues.items()):
            while queue and shard.queue_length < shard.queue_max:
                write = queue.popleft()
                try:
                    write.submit(now_us - write.queued_us)
                    self._health.recovered("admission")
                except Exception as error:  # of this write only: the next ones are submitted
                    self._health.failed("admission", error)
            if not queue and self._queues.get(shard) is queue:
                del self._queues[shard]

    def fill_ratio(self, shards: Sequence[Shard]) -> float:
        """Fill level of the fullest WAL queue, 0 to 1."""
        return 1.0 if self._queues else max((shard.queue_length / shard.queue_max for shard in shards), default=0.0)


class _PendingBatch:
    """Plain writes of one turn to one topic: one batch, one frame, one place in the WAL queue, one outcome."""

    __slots__ = ("callbacks", "data_bytes", "datas", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.datas: list[bytes] = []
        self.callbacks: dict[OnBatchCommitted[Any], list[BatchSlice[Any]]] = {}
        self.data_bytes = 0

    def report(self, outcome: Appended | Error) -> None:
        for on_committed, slices in self.callbacks.items():
            on_committed(outcome, slices)

    def on_done(self, queued_us: int, token: CommitFuture[Appended]) -> None:
        try:
            appended = token.wait()  # does not block: it is done
        except Error as error:
            self.report(error)
            return
        if queued_us:
            appended = msgspec.structs.replace(appended, held_us=appended.held_us + queued_us)
        self.report(appended)


class _FsyncSpeed:
    """Whether the disk syncs so fast that writes wait for a running fsync."""

    def __init__(self, shards: Sequence[Shard], *, is_fast: bool) -> None:
        self._shards, self.is_fast = shards, is_fast
        self._last_fsyncs = self._last_total_us = 0  # when it was last decided

    def update(self) -> None:
        """Decide by the mean of the fsyncs since the last decision."""
        stats = [shard.stats for shard in self._shards]
        fsyncs, total_us = sum(each.fsyncs for each in stats), sum(each.sync_us for each in stats)
        new_fsyncs = fsyncs - self._last_fsyncs
        if new_fsyncs >= _REEVALUATE_MIN_FSYNCS:
            self.is_fast = (total_us - self._last_total_us) / new_fsyncs < _FAST_FSYNC_US
            self._last_fsyncs, self._last_total_us = fsyncs, total_us

    def check_stalled(self) -> None:
        """Call the disk slow where an fsync has been running for too long."""
        if any(shard.inflight_us >= _FSYNC_WAIT_US for shard in self._shards):
            self.is_fast = False


class WritePipeline:
    """On the event loop's thread, except where a method says otherwise."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        shards: Sequence[Shard],
        mode: CommitMode,
        monotonic_us: Callable[[], int],
        notify_scheduler: NotifyScheduler,
        health: HealthMonitor,
    ) -> None:
        self._loop, self._shards, self._thread = loop, shards, get_ident()
        self._notify_scheduler, self._health = notify_scheduler, health
        self.admission = WriteAdmission(monotonic_us, notify_scheduler, health)
        self.state = PipelineState.IDLE
        self.syncs_on_loop = mode == "loop"
        self._disk_speed = _FsyncSpeed(shards, is_fast=not self.syncs_on_loop)
        self._fsync_fds: list[int] = []  # readable when an fsync is done
        self._closed = False
        # Writes of the next turn.
        self._batches: dict[int, _PendingBatch] = {}  # by topic id
        self._turn_end_calls: list[Callable[[], None]] = []
        self._last_turn_records = 0
        self._skip_window = False  # the next turn waits for nothing
        self._fsync_alarm: asyncio.TimerHandle | None = None
        self._recheck_timer: asyncio.TimerHandle | None = None  # while writes are queued
        # The window in which commits are collected.
        self._slice_timer: asyncio.TimerHandle | None = None  # None: no window is open
        self._slices_left = 0
        self._window_start_s = 0.0
        # Outcomes.
        self._callback_count = 0
        self._done_callbacks: deque[tuple[OnCommitDone, CommitFuture[Any]]] = deque()
        self._defer_callbacks = False  # while commits are done and readers are notified
        self._drain_scheduled = False
        if not self.syncs_on_loop:
            try:
                for shard in shards:
                    assert shard.has_writer_thread, "commits that cannot be synced beside the loop need it"
                    self._fsync_fds.append(shard.enable_async(self._on_commit_ended))
                    loop.add_reader(self._fsync_fds[-1], self._on_fsync_done, shard)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Begin no more commits: the WAL's own threads finish what is staged."""
        self._closed = True
        for descriptor in self._fsync_fds:
            self._loop.remove_reader(descriptor)
        self._fsync_fds.clear()
        for timer in (self._fsync_alarm, self._slice_timer):
            if timer is not None:
                timer.cancel()
        self._slice_timer = None

    # ── submit ────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, topic: Topic, batch: Batch, key: str | None, on_submitted: OnSubmitted, *, wait_if_full: bool = False
    ) -> None:
        """Submit a write now, or queue it. Raises what submitting it now raises, and Busy where it is rejected.
        `wait_if_full`: it is queued where it would be rejected."""
        if self.admission.has_capacity(topic):
            on_submitted(topic_operations(topic).submit(batch, key), 0)
            return

        def submit_queued(queued_us: int) -> None:
            try:
                token: CommitFuture[Appended] | Error = topic_operations(topic).submit(batch, key)
            except Error as error:
                token = error
            on_submitted(token, queued_us)

        self._enqueue(topic, submit_queued, wait_if_full=wait_if_full)

    async def submit_async(
        self,
        topic: Topic,
        batch: Batch | ArrowBatch,
        key: str | None,
        *,
        wait_if_full: bool = False,
        run_blocking: RunBlocking | None = None,
    ) -> tuple[CommitFuture[Appended], int]:
        """Submit a write; return its future and the microseconds it was queued for. With `run_blocking` it is
        submitted off the loop. A write that is cancelled while it is queued was not written."""
        queued_us = 0
        while True:
            if not self.admission.has_capacity(topic):
                turn: asyncio.Future[int] = self._loop.create_future()
                self._enqueue(topic, partial(_resolve, turn), wait_if_full=wait_if_full)
                queued_us += await turn
            try:
                if run_blocking is None:
                    return topic_operations(topic).submit(batch, key), queued_us
                return await run_blocking(lambda: topic_operations(topic).submit(batch, key)), queued_us
            except Busy:  # another write took its place after it was admitted: it is not rejected for that
                wait_if_full = True

    def _enqueue(self, topic: Topic, submit: Callable[[int], None], *, wait_if_full: bool) -> None:
        self.admission.enqueue(topic_operations(topic).shard, submit, wait_if_full=wait_if_full)
        self._run_turn_without_window()
        self._schedule_recheck()

    def _schedule_recheck(self) -> None:
        if self._recheck_timer is None and self.admission.queued_writes:
            self._recheck_timer = self._loop.call_later(_RECHECK_S, self._recheck_capacity)

    def _recheck_capacity(self) -> None:
        self._recheck_timer = None
        try:
            self._run_turn_without_window()
            self.admission.admit_queued()
        except Exception as error:
            self._health.failed("admission", error)
        self._schedule_recheck()

    def add_to_batch(
        self, topic: Topic, datas: list[bytes], size: int, on_committed: OnBatchCommitted[WriterT], writer: WriterT
    ) -> None:
        """Write JSON texts with the other plain writes of this turn. Plain: no key, no cap that rejects, no age, no
        quota, so that no other write can change its outcome. `on_committed` is called once a batch with the slices of
        all writers that passed it. Raises Busy where the write is rejected now."""
        if not self.admission.has_capacity(topic):
            self.admission.check_not_saturated(topic_operations(topic).shard)
        if not self._batches:
            self.schedule_turn()
        batch = self._batches.get(topic.id)
        if batch is None:
            batch = self._batches[topic.id] = _PendingBatch(topic)
        batch.callbacks.setdefault(on_committed, []).append((writer, len(batch.datas), len(datas)))
        batch.datas += datas
        batch.data_bytes += size
        if batch.data_bytes > _FLUSH_BYTES or len(batch.datas) > _FLUSH_RECORDS:
            self._submit_batch(self._batches.pop(topic.id))

    def _submit_batch(self, batch: _PendingBatch) -> None:
        try:
            self.submit(batch.topic, Batch(batch.datas, True), None, partial(self._on_batch_submitted, batch))
        except Error as error:
            batch.report(error)

    def _on_batch_submitted(self, batch: _PendingBatch, token: CommitFuture[Appended] | Error, queued_us: int) -> None:
        if isinstance(token, Error):
            batch.report(token)
        else:
            self.add_done_callback(token, partial(batch.on_done, queued_us))

    # ── turns ─────────────────────────────────────────────────────────────────────────────────

    def call_at_turn_end(self, call: Callable[[], None]) -> None:
        """Call it in the next turn, before batches are submitted: it may still add writes to them."""
        self._turn_end_calls.append(call)
        self.schedule_turn()

    def schedule_turn(self) -> None:
        """Run a turn at the end of this iteration of the loop."""
        if self.state is PipelineState.IDLE or self.state is PipelineState.WAITING_FSYNC:
            self.state = PipelineState.SCHEDULED
            self._loop.call_soon(self._run_turn)

    def _run_turn_without_window(self) -> None:
        """A write waits for capacity: collect no longer."""
        self._skip_window = True
        self.schedule_turn()

    def _run_turn(self) -> None:
        if self._disk_speed.is_fast and not self._skip_window:
            if any(shard.has_inflight_batch for shard in self._shards):
                self.state = PipelineState.WAITING_FSYNC  # its end schedules a turn
                if self._fsync_alarm is None:
                    self._fsync_alarm = self._loop.call_later(_FSYNC_WAIT_US / 1e6, self._on_fsync_alarm)
                return
            if self._last_turn_records > 1 and self.state is not PipelineState.POSTPONED:
                self.state = PipelineState.POSTPONED
                self._loop.call_soon(self._run_turn)
                return
        try:
            self._last_turn_records = self._submit_batches()
        finally:
            self.state = PipelineState.IDLE  # only now: what was submitted above needs no turn of its own
        self._commit_shards(in_window=not self._skip_window and self._is_in_window())

    def _submit_batches(self) -> int:
        """Submit the plain writes of this turn; return the number of records."""
        calls, self._turn_end_calls = self._turn_end_calls, []
        for call in calls:
            call()
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            self._submit_batch(batch)
        return sum(len(batch.datas) for batch in batches.values())

    def _on_fsync_alarm(self) -> None:
        self._fsync_alarm = None
        self._disk_speed.check_stalled()
        self.schedule_turn()

    # ── commits ───────────────────────────────────────────────────────────────────────────────

    def _commit_shards(self, *, in_window: bool) -> None:
        """Commit, or begin to commit, what is staged; in a window only what needs no fsync."""
        self._skip_window = False
        gathered_us = 0
        if self._slice_timer is not None and not in_window:  # the window ends
            gathered_us = round(1e6 * (self._loop.time() - self._window_start_s))
            self._slice_timer.cancel()
            self._slice_timer = None
        self._defer_callbacks = True
        try:
            for shard in self._shards:
                if in_window and not shard.commits_without_sync:
                    continue
                # A thread that holds the commit lock wakes the writer thread for what was staged here.
                while shard.queue_length and self._commit_shard(shard, gathered_us):
                    pass
                if shard.queue_length and not shard.has_inflight_batch:
                    shard.wake_writer()
            self._notify_scheduler.notify_now()
        finally:
            self._run_deferred_callbacks()
        self.admission.admit_queued()

    def _commit_shard(self, shard: Shard, gathered_us: int) -> bool:
        """Whether a batch was committed, or begun."""
        if self._closed:
            return False
        if not self.syncs_on_loop:
            return shard.begin_commit(gathered_us=gathered_us)
        # The writer thread creates new files: that takes milliseconds.
        return not (shard.has_writer_thread and shard.may_need_new_file) and shard.commit_pending(
            blocking=False, gathered_us=gathered_us
        )

    def _on_fsync_done(self, shard: Shard) -> None:
        try:
            self._defer_callbacks = True
            try:
                is_over = shard.finish_commit()
                self._notify_scheduler.notify_now()
            finally:
                self._run_deferred_callbacks()
            if is_over:
                self.admission.admit_queued()
        finally:
            self.schedule_turn()

    def _on_commit_ended(self) -> None:
        """From any thread: a commit that was begun is over."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.schedule_turn)

    def _is_in_window(self) -> bool:
        """Whether commits that need an fsync wait for more; the first of them opens a window under pressure."""
        if self._slice_timer is None:
            self._slices_left = int(self._notify_scheduler.governor.commit_delay_ms / _WINDOW_SLICE_MS)
            if self._slices_left and not all(shard.commits_without_sync for shard in self._shards):
                self._window_start_s = self._loop.time()
                self._schedule_slice()
        return self._slice_timer is not None

    def _schedule_slice(self) -> None:
        self._slice_timer = self._loop.call_later(_WINDOW_SLICE_MS / 1000, self._on_slice_end, self._callback_count)

    def _on_slice_end(self, count_before: int) -> None:
        self._slices_left -= 1
        if self._callback_count == count_before or self._slices_left <= 0:
            self._commit_shards(in_window=False)
        else:
            self._schedule_slice()

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────

    def add_done_callback(
        self, token: CommitFuture[ResultT], callback: Callable[[CommitFuture[ResultT]], None]
    ) -> None:
        """Call `callback(token)` on the loop once the commit is done. Callbacks run in the order of outcomes."""
        if token.done:
            self._on_token_done(callback, token)
            return
        self._callback_count += 1
        if not self._callback_count % _REEVALUATE_EVERY_WRITES and not self.syncs_on_loop:
            self._disk_speed.update()
        token.add_done_callback(lambda done: self._on_token_done(callback, done), wake_writer=False)
        self.schedule_turn()

    async def wait(self, token: CommitFuture[ResultT]) -> ResultT:
        """Return the result of a commit, or raise its error."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.add_done_callback(token, lambda _: _resolve(future, None))
        await future
        return token.wait()

    def _on_token_done(self, callback: OnCommitDone, token: CommitFuture[Any]) -> None:
        """From the thread that committed."""
        is_on_loop = get_ident() == self._thread
        if is_on_loop and not self._done_callbacks and not self._defer_callbacks:
            callback(token)
            return
        self._done_callbacks.append((callback, token))
        if not (is_on_loop and self._defer_callbacks):
            self._schedule_drain()

    def _run_deferred_callbacks(self) -> None:
        self._defer_callbacks = False
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        self._drain_scheduled = False  # first: an outcome that is appended from here on schedules another call
        try:
            while self._done_callbacks:
                callback, token = self._done_callbacks.popleft()
                callback(token)
        finally:
            if self._done_callbacks:  # a callback raised: the others run all the same
                self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon_threadsafe(self._drain_callbacks)

    def _drain_callbacks(self) -> None:
        self._run_callbacks()
        self.admission.admit_queued()


def _resolve(future: asyncio.Future[ResultT], result: ResultT) -> None:
    if not future.done():  # its waiter was cancelled
        future.set_result(result)
