"""[shell] Who drives commits, and how their outcome comes back to the event loop.

    beside   requests of one turn of the loop stage their writes, and at its end they are written together; the sync
             runs in a thread of its own, and the loop goes on until it hears of it and answers every one of them.
             What would take longer to write, or a new WAL file, is the WAL's writer thread's.
    loop     the same, with the sync on the loop: everybody waits for it.

While a quick disk syncs, small writes wait in the lobby, and are taken together when it is done and all who were
answered have had a turn to come again: one batch for all of them costs less than one for each few. A disk
that is not quick is not waited for (docs/decisions/0009-where-syncs-run.md).

Under pressure commits that need a sync are gathered over more turns of the loop, as the writer thread does it: slice by
slice, until one brings nothing or the governor's window is over.

[shell] The door of the WAL: a write is staged, waits in line, or is refused.

    room in the queue of its shard, nobody in line ──► staged at once
    no room, saturated                             ──► refused, unless it asked not to be: 429, nothing was written
    no room otherwise                              ──► in line, and staged in the order of arrival as commits get done

A line is as long as the queue it leads to; behind that a write is refused too. Nobody overtakes: while somebody
waits for a shard, whatever comes for it is behind them. What waits has no seq yet and is held by nobody else, so that
it gets its outcome here in any case: a token, or the error of staging it.

[hot] Plain writes of one turn of the loop to one topic become one batch.

    request ─┐
    request ─┼─► (end of the turn) one batch, one frame, one place in the WAL's queue ─► each its own seqs
    request ─┘

Only what no other write can change the outcome of is gathered: no key, no cap that refuses, no age, no quota.
All of a turn's writes share one fate, as all writes of a commit batch do anyway: where there is no room for the batch
it waits in line, or is refused, as a whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from tidelog.engine import Appended, Batch, CommitFuture, Shard, Topic
from tidelog.engine.batch_encoder import ArrowBatch
from tidelog.engine.health import HealthMonitor
from tidelog.errors import Busy, Error
from tidelog.server.config import CommitMode
from tidelog.server.push.page_cache import RunBlocking
from tidelog.server.scheduling.governor import Governor

ResultT = TypeVar("ResultT")
_FAST_FSYNC_US = 600  # a mean sync under this is worth waiting for with what came meanwhile
_FSYNC_WAIT_US = 5_000  # for one that takes longer than they do on average
_REEVALUATE_EVERY_WRITES = 256  # writes between two looks at the figures
_REEVALUATE_MIN_FSYNCS = 16  # syncs that make a mean worth acting on
_WINDOW_SLICE_MS = 1.0  # timers of an event loop are no finer
OnCommitDone = Callable[[CommitFuture[Any]], None]


class CommitDriver:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        shards: Sequence[Shard],
        mode: CommitMode,
        window_ms: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`window_ms`: how long commits that need a sync may be gathered."""
        self._loop, self._shards, self._window_ms = loop, shards, window_ms
        self._thread = get_ident()
        self.on_loop = mode == "loop"
        self._fsync_fds: list[int] = []  # descriptors that tell of syncs
        self._closed = False
        self._is_fast_disk = not self.on_loop  # the disk, as far as is known: whoever waits for it anyway need not know
        self._last_batch_records = 0  # of the last batch
        self._waited_one_turn = False  # another turn was waited for
        self._fsync_alarm: asyncio.TimerHandle | None = None  # while writes wait for a sync
        self._callback_count = 0
        self._last_fsync_stats = (0, 0)  # syncs and what they took, when it was last decided
        self._done_callbacks: deque[tuple[OnCommitDone, CommitFuture[Any]]] = deque()
        self._defer_callbacks = False  # outcomes are kept for a moment
        self._drain_scheduled = False  # outcomes are on their way to the loop
        self._commit_scheduled = False  # a pump at the end of this turn is asked for
        self._arrived_count = 0
        self._skip_window = False  # the next pump gathers nothing
        self._slices_left = 0  # that are left of a window
        self._slice_timer: asyncio.TimerHandle | None = None  # the one that is under way
        self._window_start_s = 0.0  # and its window
        self.on_before_commit: Callable[[], int] = lambda: 0
        """Called before a pump, so that what was kept for the end of the turn is staged; tells how much that is."""
        self.on_committed: Callable[[], None] = lambda: None
        """Called when commits are done, before whoever wrote is told: others may wait for what they wrote."""
        self.on_capacity: Callable[[], None] = lambda: None
        """Called when commits are done, so that there may be room for others."""
        if not self.on_loop:
            try:
                for shard in shards:
                    assert shard.has_writer_thread, "somebody has to end what cannot be synced beside"
                    self._fsync_fds.append(shard.enable_async(self._on_commit_ended))
                    loop.add_reader(self._fsync_fds[-1], self._on_fsync_done, shard)
            except BaseException:
                self.close()
                raise

    def add_done_callback(
        self, token: CommitFuture[ResultT], callback: Callable[[CommitFuture[ResultT]], None]
    ) -> None:
        """Have `tell(token)` called on the loop once the outcome is known. On the loop's thread."""
        if token.done:
            self._on_token_done(callback, token)
            return
        self._callback_count += 1
        if not self._callback_count % _REEVALUATE_EVERY_WRITES and not self.on_loop:
            self._update_disk_speed()
        token.add_done_callback(lambda known: self._on_token_done(callback, known), wake_writer=False)
        self._arrived_count += 1
        self.schedule_commit()

    def flush_now(self) -> None:
        """Somebody waits for room in a queue: gather no longer."""
        self._skip_window = True
        self.schedule_commit()

    def schedule_commit(self) -> None:
        """Have a pump at the end of this turn."""
        if not self._commit_scheduled:
            self._commit_scheduled = True
            self._loop.call_soon(self._run_commit_turn)

    async def wait(self, token: CommitFuture[ResultT]) -> ResultT:
        """The result of a commit, or its error raised."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.add_done_callback(token, lambda _: None if future.done() else future.set_result(None))
        await future
        return token.wait()

    def close(self) -> None:
        """Begin nothing any more and hear of no sync: the WAL's own threads do the rest."""
        self._closed = True
        for descriptor in self._fsync_fds:
            self._loop.remove_reader(descriptor)
        self._fsync_fds.clear()
        for timer in (self._fsync_alarm, self._slice_timer):
            if timer is not None:
                timer.cancel()
        self._slice_timer = None

    def _update_disk_speed(self) -> None:
        """Whether to wait for syncs, by what the last ones took."""
        figures = [shard.stats for shard in self._shards]
        syncs, took_us = sum(it.fsyncs for it in figures), sum(it.sync_us for it in figures)
        fresh = syncs - self._last_fsync_stats[0]
        if fresh >= _REEVALUATE_MIN_FSYNCS:
            self._is_fast_disk = (took_us - self._last_fsync_stats[1]) / fresh < _FAST_FSYNC_US
            self._last_fsync_stats = (syncs, took_us)

    def _check_slow_fsync(self) -> None:
        """Writes waited for a sync a while ago: is it that one still? Then the disk is not what it was."""
        self._fsync_alarm = None
        if any(shard.inflight_us >= _FSYNC_WAIT_US for shard in self._shards):
            self._is_fast_disk = False
        self.schedule_commit()

    def _on_fsync_done(self, shard: Shard) -> None:
        """The sync of what was begun may be over."""
        try:
            self._defer_callbacks = True
            try:
                over = shard.finish_commit()
                self.on_committed()
            finally:
                self._run_deferred_callbacks()
            if over:
                self.on_capacity()
        finally:
            self.schedule_commit()

    def _on_commit_ended(self) -> None:
        """By any thread: what was begun is over."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.schedule_commit)

    def _run_commit_turn(self) -> None:
        if self._is_fast_disk and not self._skip_window:
            if any(shard.has_inflight_batch for shard in self._shards):
                self._commit_scheduled = False  # it is asked for again when that is over
                if self._fsync_alarm is None:
                    self._fsync_alarm = self._loop.call_later(_FSYNC_WAIT_US / 1e6, self._check_slow_fsync)
                return
            if self._last_batch_records > 1 and not self._waited_one_turn:
                self._waited_one_turn = True
                self._loop.call_soon(self._run_commit_turn)
                return
        self._waited_one_turn = False
        try:
            self._last_batch_records = (
                self.on_before_commit()
            )  # what is staged by it goes along and needs no turn of its own
        finally:
            self._commit_scheduled = False
        self._commit_shards(use_window=not self._skip_window and self._is_in_window())

    def _commit_shards(self, *, use_window: bool) -> None:
        self._skip_window = False
        gathered_us = 0
        if self._slice_timer is not None and not use_window:  # the window is over, or is broken off
            gathered_us = round(1e6 * (self._loop.time() - self._window_start_s))
            self._slice_timer.cancel()
            self._slice_timer = None
        self._defer_callbacks = True
        try:
            for shard in self._shards:
                if use_window and not shard.commits_without_sync:
                    continue
                # Where another thread has the turn it sends the writer thread for what was staged here.
                while shard.queue_length and self._commit_shard(shard, gathered_us):
                    pass
                if shard.queue_length and not shard.has_inflight_batch:
                    shard.wake_writer()
            self.on_committed()
        finally:
            self._run_deferred_callbacks()
        self.on_capacity()

    def _commit_shard(self, shard: Shard, gathered_us: int) -> bool:
        """Whether a batch was committed, or begun."""
        if self._closed:
            return False
        if not self.on_loop:
            return shard.begin_commit(gathered_us=gathered_us)
        # A new file is the writer thread's to make: that takes milliseconds.
        return not (shard.has_writer_thread and shard.may_need_new_file) and shard.commit_pending(
            blocking=False, gathered_us=gathered_us
        )

    def _is_in_window(self) -> bool:
        """Whether what needs a sync waits for more of its kind; the first that does begins a window."""
        if self._slice_timer is None:
            self._slices_left = int(self._window_ms() / _WINDOW_SLICE_MS)
            if self._slices_left and not all(shard.commits_without_sync for shard in self._shards):
                self._window_start_s = self._loop.time()
                self._schedule_slice()
        return self._slice_timer is not None

    def _schedule_slice(self) -> None:
        self._slice_timer = self._loop.call_later(_WINDOW_SLICE_MS / 1000, self._on_slice_end, self._arrived_count)

    def _on_slice_end(self, before: int) -> None:
        """A slice of the window is over."""
        self._slices_left -= 1
        if self._arrived_count == before or self._slices_left <= 0:
            self._commit_shards(use_window=False)
        else:
            self._schedule_slice()

    def _run_deferred_callbacks(self) -> None:
        """Tell of what was done while outcomes were kept."""
        self._defer_callbacks = False
        self._run_callbacks()

    def _on_token_done(self, callback: OnCommitDone, token: CommitFuture[Any]) -> None:
        """By the committer, whichever thread that is. Nobody is told before those who were done earlier."""
        near = get_ident() == self._thread
        if near and not self._done_callbacks and not self._defer_callbacks:
            callback(token)
            return
        self._done_callbacks.append((callback, token))
        if not (near and self._defer_callbacks):
            self._schedule_drain()

    def _drain_and_signal_capacity(self) -> None:
        self._run_callbacks()
        self.on_capacity()

    def _run_callbacks(self) -> None:
        self._drain_scheduled = False  # first: what is appended from here on asks for another turn
        try:
            while self._done_callbacks:
                tell, token = self._done_callbacks.popleft()
                tell(token)
        finally:
            if self._done_callbacks:  # telling somebody broke: the others are told all the same
                self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon_threadsafe(self._drain_and_signal_capacity)


OnSubmitted = Callable[[CommitFuture[Appended] | Error, int], None]
"""Gets the token of a write, or why there is none, and for how many microseconds it was held back."""

_RECHECK_S: Final = 0.01  # commits of others, a checkpoint's, make room as well and do not say so


class _QueuedWrite:
    __slots__ = ("queued_us", "submit")

    def __init__(self, since_us: int, go: Callable[[int], None]) -> None:
        self.queued_us, self.submit = since_us, go


class WriteAdmission:
    """On the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        monotonic_us: Callable[[], int],
        commit_driver: CommitDriver,
        governor: Governor,
        start_sampling: Callable[[], None],
        health: HealthMonitor,
    ) -> None:
        """`stir` is called where a write has to wait, or not to; `health` is told of what broke while a line moved."""
        self._health = health
        self._loop, self._monotonic_us, self._commit_driver, self._governor = (
            loop,
            monotonic_us,
            commit_driver,
            governor,
        )
        self._start_sampling = start_sampling
        self._queues: dict[Shard, deque[_QueuedWrite]] = {}
        self._recheck_timer: asyncio.TimerHandle | None = None
        self.rejected_total = 0  # writes that were refused
        commit_driver.on_capacity = self.on_capacity

    @property
    def queued_writes(self) -> int:
        """Writes in line."""
        return sum(map(len, self._queues.values()))

    def submit(
        self, topic: Topic, batch: Batch, key: str | None, on_submitted: OnSubmitted, *, wait_if_full: bool = False
    ) -> None:
        """Stage a write now or later, and tell. Raises what staging it raises, where that is now, and Busy where it
        is refused. `insists`: it would rather wait than be refused."""
        shard = self._shard_of(topic)
        if shard is None or self._has_capacity(shard):
            on_submitted(topic.submit(batch, key), 0)
            return

        def go(held_us: int) -> None:
            try:
                token: CommitFuture[Appended] | Error = topic.submit(batch, key)
            except Error as error:
                token = error
            on_submitted(token, held_us)

        self._enqueue(shard, go, wait_if_full=wait_if_full)

    async def submit_async(
        self,
        topic: Topic,
        batch: Batch | ArrowBatch,
        key: str | None,
        *,
        wait_if_full: bool = False,
        run_blocking: RunBlocking | None = None,
    ) -> tuple[CommitFuture[Appended], int]:
        """`stage`, to be awaited: the token, and how long it was held back. With `work` it is staged off the loop.
        Whoever leaves before their turn has written nothing."""
        held_us = 0
        while True:
            shard = self._shard_of(topic)
            if shard is not None and not self._has_capacity(shard):
                held_us += await self._wait_turn(shard, wait_if_full=wait_if_full)
            try:
                token = (
                    topic.submit(batch, key)
                    if run_blocking is None
                    else await run_blocking(lambda: topic.submit(batch, key))
                )
            except Busy:  # it was let in, and another was quicker: it is not refused for that
                wait_if_full = True
            else:
                return token, held_us

    async def _wait_turn(self, shard: Shard, *, wait_if_full: bool) -> int:
        turn: asyncio.Future[int] = self._loop.create_future()
        self._enqueue(
            shard, lambda held_us: None if turn.done() else turn.set_result(held_us), wait_if_full=wait_if_full
        )
        return await turn

    def check_capacity(self, topic: Topic) -> None:
        """Raise Busy where a write that does not insist would be refused."""
        shard = self._shard_of(topic)
        if shard is not None and not self._has_capacity(shard):
            self._reject_if_saturated(shard)

    # ── lines ─────────────────────────────────────────────────────────────────────────────────

    def _shard_of(self, topic: Topic) -> Shard | None:
        """None: its records lie in no file, so nothing has to wait."""
        return None if topic.config.durability == "ephemeral" else topic.shard

    def _has_capacity(self, shard: Shard) -> bool:
        return shard not in self._queues and shard.queue_length < shard.queue_max

    def _reject_if_saturated(self, shard: Shard) -> None:
        self._start_sampling()
        waits = len(self._queues.get(shard, ()))
        if self._governor.is_saturated or waits >= shard.queue_max:
            self.rejected_total += 1
            raise Busy(
                f"{shard.queue_length + waits} writes wait for the disk already and the server is saturated; nothing "
                f"was "
                "written, retry later or set disable_backpressure to wait"
            )

    def _enqueue(self, shard: Shard, submit: Callable[[int], None], *, wait_if_full: bool) -> None:
        if not wait_if_full:
            self._reject_if_saturated(shard)
        self._queues.setdefault(shard, deque()).append(_QueuedWrite(self._monotonic_us(), submit))
        self._start_sampling()
        self._commit_driver.flush_now()
        self._schedule_recheck()

    def _schedule_recheck(self) -> None:
        if self._recheck_timer is None and self._queues:
            self._recheck_timer = self._loop.call_later(_RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        self._recheck_timer = None
        try:
            self._commit_driver.flush_now()
            self.on_capacity()
        except Exception as error:
            self._health.failed("admission", error)
        self._schedule_recheck()

    def on_capacity(self) -> None:
        """Let in as many as there is room for."""
        if not self._queues:
            return
        now_us = self._monotonic_us()
        for shard, line in list(self._queues.items()):
            while line and shard.queue_length < shard.queue_max:
                waiting = line.popleft()
                try:
                    waiting.submit(now_us - waiting.queued_us)
                    self._health.recovered("admission")
                except Exception as error:  # of one write: those after it go on
                    self._health.failed("admission", error)
            if not line and self._queues.get(shard) is line:
                del self._queues[shard]

    def fill_ratio(self, shards: Sequence[Shard]) -> float:
        """How full the fullest queue is, 0 to 1."""
        return 1.0 if self._queues else max((shard.queue_length / shard.queue_max for shard in shards), default=0.0)


WriterT = TypeVar("WriterT")
BatchSlice: TypeAlias = tuple[WriterT, int, int]
"""Who wrote something, the place of the first of it in the batch, and how many records it is."""
OnBatchCommitted: TypeAlias = Callable[[Appended | Error, list[BatchSlice[WriterT]]], None]
_FLUSH_BYTES: Final = 1 << 20  # more than that is staged without waiting for the turn's end
_FLUSH_RECORDS: Final = 4_096


class _PendingBatch:
    __slots__ = ("callbacks", "data_bytes", "datas", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.datas: list[bytes] = []
        self.callbacks: dict[OnBatchCommitted[Any], list[BatchSlice[Any]]] = {}
        self.data_bytes = 0


class WriteBatcher:
    """On the event loop's thread."""

    def __init__(self, commit_driver: CommitDriver, admission: WriteAdmission) -> None:
        self._commit_driver, self._admission = commit_driver, admission
        self._batches: dict[int, _PendingBatch] = {}
        self._turn_end_calls: list[Callable[[], None]] = []
        commit_driver.on_before_commit = self.flush

    def call_at_turn_end(self, call: Callable[[], None]) -> None:
        """Have it called at the end of this turn, before anything is staged: it may still add writes."""
        self._turn_end_calls.append(call)
        self._commit_driver.schedule_commit()

    def add(
        self, topic: Topic, datas: list[bytes], size: int, on_committed: OnBatchCommitted[WriterT], writer: WriterT
    ) -> None:
        """Write JSON texts. `tell` gets the outcome of the batch, once for all who named the same one, with everybody's
        part in it. Raises Busy where they are refused now."""
        self._admission.check_capacity(topic)
        if not self._batches:
            self._commit_driver.schedule_commit()
        group = self._batches.get(topic.id)
        if group is None:
            group = self._batches[topic.id] = _PendingBatch(topic)
        group.callbacks.setdefault(on_committed, []).append((writer, len(group.datas), len(datas)))
        group.datas += datas
        group.data_bytes += size
        if group.data_bytes > _FLUSH_BYTES or len(group.datas) > _FLUSH_RECORDS:
            self._submit(self._batches.pop(topic.id))

    def flush(self) -> int:
        """Stage all that was added; return how many records that are."""
        late, self._turn_end_calls = self._turn_end_calls, []
        for call in late:
            call()
        groups, self._batches = self._batches, {}
        count = sum(len(group.datas) for group in groups.values())
        for group in groups.values():
            self._submit(group)
        return count

    def _submit(self, batch: _PendingBatch) -> None:
        try:
            self._admission.submit(batch.topic, Batch(batch.datas, True), None, partial(self._on_submitted, batch))
        except Error as error:
            _report_outcome(batch, error)

    def _on_submitted(self, batch: _PendingBatch, token: CommitFuture[Appended] | Error, held_us: int) -> None:
        if isinstance(token, Error):
            _report_outcome(batch, token)
        else:
            self._commit_driver.add_done_callback(token, partial(_on_batch_done, batch, held_us))


def _on_batch_done(batch: _PendingBatch, held_us: int, token: CommitFuture[Appended]) -> None:
    try:
        done = token.wait()  # its outcome is known
    except Error as error:
        _report_outcome(batch, error)
        return
    if held_us:
        done = msgspec.structs.replace(done, held_us=done.held_us + held_us)
    _report_outcome(batch, done)


def _report_outcome(batch: _PendingBatch, done: Appended | Error) -> None:
    for tell, parts in batch.callbacks.items():
        tell(done, parts)
