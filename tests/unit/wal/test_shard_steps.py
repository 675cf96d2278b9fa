"""A shard, decision by decision and without threads: batches, outcomes, counters, the batch in flight, its writer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
from tests.unit.wal.harness import OVERHEAD, WAL, SubmittedWrite, WalHarness, append, inspect_wal

from tidelog.errors import Busy, Closed, DiskFull, Error, Latched
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import Commit, CommitFuture, paths
from tidelog.wal import shard as wal_shard
from tidelog.wal.shard import (
    PREPENDED_BYTES_MAX,
    SYNC_BUCKETS_US,
    CommitState,
    InflightBatch,
    InterruptGuard,
    ShardStats,
    wait_for_more_commits,
)


class Bench(WalHarness):
    """A shard whose clock can be moved, and the outcomes of its commits in order."""

    def __init__(self, disk: SimDisk, **settings: Any) -> None:
        self.order: list[tuple[bytes, str]] = []
        super().__init__(disk, on_write_done=self.note, **settings)
        self.clock = ManualClock()
        self.shard._now_us = self.clock.monotonic_us

    def note(self, write: SubmittedWrite) -> None:
        outcome = write.outcomes[-1]
        self.order.append((write.datas[0][:9], "done" if outcome is None else type(outcome).__name__))

    def queue(self, *datas: bytes, durable: bool = True) -> None:
        for data in datas:
            self.submit([data], durable=durable)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(trace=True)


@pytest.fixture
def bench(disk: SimDisk) -> Bench:
    return Bench(disk)


def steps(disk: SimDisk) -> list[str]:
    found = [step.partition(" ")[0] for step in disk.trace]
    disk.trace.clear()
    return found


# Commits --------------------------------------------------------------------------------------------------


def test_fields_of_a_commit() -> None:
    commit = Commit([b"abc", b"de"], frames=2, durable=False)
    assert (commit.size, commit.frames, commit.durable, commit.needs_sync) == (5, 2, False, False)
    assert (commit.file, commit.offset, commit.queued_us, commit.delayed_us, commit.copied_frames) == (None, 0, 0, 0, 0)
    assert commit.may_use_reserve is True
    commit.prepend(b"xyz")
    assert (list(commit.pieces), commit.frames, commit.size, commit.durable) == ([b"xyz", b"abc", b"de"], 3, 8, False)
    commit.prepend_durable(b"q")
    assert (commit.pieces[0], commit.frames, commit.size, commit.needs_sync) == (b"q", 4, 9, True)
    assert commit.apply(None) is None
    commit.on_done(None)  # without a future and a callback


def test_the_outcome_of_a_commit_reaches_its_future(bench: Bench) -> None:
    error = Busy("no")
    for given, callback, found in ((None, 7, 7), (error, 7, error)):
        future: CommitFuture[int] = CommitFuture(bench.shard)
        seen: list[Error | None] = []

        def on_done(outcome: Error | None, seen: list[Error | None] = seen, callback: int = callback) -> int:
            seen.append(outcome)
            return callback

        Commit([], frames=0, durable=False, on_done=on_done, future=future).on_done(given)
        assert seen == [given]
        if isinstance(found, Error):
            with pytest.raises(Busy):
                future.wait()
        else:
            assert future.wait() == found


@pytest.mark.parametrize(
    ("window_ms", "arrivals", "slices"),
    [(0.0, [], 0), (0.2, [], 0), (0.25, [0, 0], 1), (1.0, [0, 1, 1, 1], 2), (0.5, [0, 1, 1, 2], 2), (0.75, [0, 0], 1)],
)
def test_slices_of_a_commit_window(window_ms: float, arrivals: list[int], slices: int) -> None:
    pauses: list[float] = []
    left = iter(arrivals)
    assert wait_for_more_commits(window_ms, lambda: next(left), pauses.append) == slices
    assert pauses == [0.00025] * slices
    assert list(left) == []


@pytest.mark.parametrize(("us", "bucket"), [(0, 0), (50, 0), (51, 1), (100_000, 8), (100_001, 9)])
def test_counters_of_syncs(us: int, bucket: int) -> None:
    assert SYNC_BUCKETS_US == (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)
    stats = ShardStats()
    stats.record_sync(us)
    copy = stats.copy()
    stats.record_sync(us)
    assert (copy.fsyncs, copy.sync_us, copy.sync_us_counts[bucket], sum(copy.sync_us_counts)) == (1, us, 1, 1)
    assert (stats.fsyncs, stats.sync_us, stats.sync_us_counts[bucket]) == (2, 2 * us, 2)
    assert len(copy.sync_us_counts) == 10


@pytest.mark.parametrize(("interrupts", "calls"), [(0, 1), (1, 2), (3, 4)])
def test_an_interrupted_step_is_repeated(interrupts: int, calls: int) -> None:
    guard, found = InterruptGuard(), list[int]()

    def step(value: int, *, more: int) -> int:
        found.append(value + more)
        if len(found) <= interrupts:
            raise KeyboardInterrupt
        return 9

    assert guard.run(step, 1, more=2) == 9
    assert found == [3] * calls
    if interrupts:
        with pytest.raises(KeyboardInterrupt):
            guard.raise_pending()
    else:
        guard.raise_pending()


@pytest.mark.parametrize(("error", "calls"), [(OSError(5, "no"), 1), (Busy("no"), 1), (KeyboardInterrupt(), 4)])
def test_an_error_is_not_repeated_and_an_interrupt_not_for_ever(error: BaseException, calls: int) -> None:
    found: list[int] = []

    def step() -> None:
        found.append(1)
        raise error

    with pytest.raises(type(error)):
        InterruptGuard().run(step)
    assert len(found) == calls


# The queue ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "size", "batches"),
    [(4, 10_000, [4, 1]), (3, 10_000, [3, 2]), (1, 10_000, [1] * 5), (99, 3 * (OVERHEAD + 10), [3, 2]),
     (99, 3 * (OVERHEAD + 10) - 1, [2, 2, 1]), (99, 1, [1] * 5), (99, 10_000, [5])],
)  # fmt: skip
def test_batches_of_the_queue(disk: SimDisk, frames: int, size: int, batches: list[int]) -> None:
    bench = Bench(disk, batch_frames=frames, batch_bytes=size)
    bench.queue(*[b"x" * 10] * 5)
    found = []
    while batch := bench.shard.commits.take_batch():
        found.append(len(batch))
    assert found == batches
    assert bench.shard.queue_length == 0


def test_the_queue_is_bounded_and_counted(disk: SimDisk) -> None:
    bench = Bench(disk, queue_max=2)
    bench.clock.tick(3)
    bench.queue(b"a", b"b")
    assert [commit.queued_us for commit in bench.shard._queue] == [bench.clock.monotonic_us()] * 2
    with pytest.raises(Busy):
        bench.queue(b"c")
    stats = bench.shard.stats
    assert (stats.queue_depth, stats.queue_peak, stats.queue_full_count) == (2, 2, 1)
    assert bench.shard._submitted == 2
    assert bench.shard.commit_pending()
    assert not bench.shard.commit_pending()
    stats = bench.shard.stats
    assert (stats.queue_depth, stats.queue_peak, stats.frames, stats.batches, stats.fsyncs) == (0, 2, 2, 1, 1)
    assert stats.bytes == 2 * (OVERHEAD + 1)
    bench.shard.close()
    with pytest.raises(Closed):
        bench.queue(b"d")


def test_the_commits_in_the_queue_are_judged_before_they_are_written(bench: Bench) -> None:
    shard = bench.shard
    assert shard.commits_without_sync
    assert not shard.may_need_new_file
    bench.write(b"x" * 500)
    bench.queue(b"y", durable=False)
    assert shard.commits_without_sync
    bench.queue(b"y")
    assert not bench.shard.commits_without_sync
    pos, size = bench.writer.position.pos, 2 * (OVERHEAD + 1 + PREPENDED_BYTES_MAX)
    for capacity, needed in ((pos + size + 70, False), (pos + size + 69, True)):
        bench.writer._capacity_bytes = capacity
        assert shard.may_need_new_file is needed


def test_a_writer_is_woken_for_commits_that_no_caller_waits_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, woken = bench.shard, list[int]()
    monkeypatch.setattr(shard._wake, "notify", lambda *_: woken.append(1))
    bench.submit([b"a"])
    assert (woken, shard._writer_wanted) == ([], False)
    bench.submit([b"b"], nowait=True)
    bench.submit([b"c"], nowait=True)
    assert (woken, shard._writer_wanted) == ([1], True)
    shard._writer_wanted = False
    with shard._hold_commit_lock():
        assert woken == [1]
    assert [len(woken), shard._writer_wanted] == [2, True], "the queue is not empty when the lock is released"
    shard.commit_pending()
    shard._writer_wanted = False
    assert shard.position() == shard.synced_position() == bench.writer.position
    assert [shard._writer_wanted] == [False]


# One batch ------------------------------------------------------------------------------------------------


def test_a_batch_gives_each_commit_its_place(bench: Bench, disk: SimDisk) -> None:
    bench.write(b"before")
    found: list[Commit] = []
    for data, durable, copied in ((b"a", False, 0), (b"bbb", True, 1)):
        commit = Commit([append(data)], frames=1, durable=durable)
        commit.copied_frames = copied
        found.append(commit)
        bench.shard.submit(commit)
    disk.trace.clear()
    start, frames = bench.writer.position.pos, bench.shard.stats.frames
    bench.clock.tick(7)
    assert bench.shard.commit_pending(gathered_us=5_000)
    assert steps(disk) == ["write", "sync"]
    mark = 70
    assert [(commit.offset, commit.file) for commit in found] == [
        (start + mark, bench.writer.reader),
        (start + mark + OVERHEAD + 1, bench.writer.reader),
    ]
    assert [commit.delayed_us for commit in found] == [5_000, 5_000]
    stats = bench.shard.stats
    assert (stats.frames - frames, stats.copied_frames, stats.batches, stats.fsyncs) == (1, 1, 2, 2)
    assert bench.shard.is_synced(bench.writer.reader, bench.writer.position.pos)
    assert not bench.shard.is_synced(bench.writer.reader, bench.writer.position.pos + 1)
    other: Any = object()
    assert bench.shard.is_synced(other, 1 << 40)


@pytest.mark.parametrize(("waited_ms", "gathered_us", "delayed_us"), [(7, 0, 0), (1, 5_000, 1_000), (7, 5_000, 5_000)])
def test_how_long_a_commit_was_delayed(bench: Bench, waited_ms: int, gathered_us: int, delayed_us: int) -> None:
    commit = Commit([append(b"a")], frames=1, durable=False)
    bench.shard.submit(commit)
    bench.clock.tick(waited_ms)
    bench.shard.commit_pending(gathered_us=gathered_us)
    assert commit.delayed_us == delayed_us


def test_frames_that_are_prepended_are_not_counted(bench: Bench) -> None:
    class Prepending(Commit):
        def before_write(self) -> None:
            self.prepend_durable(append(b"first"))

    bench.shard.submit(Prepending([append(b"a")], frames=1, durable=False))
    bench.shard.commit_pending()
    stats = bench.shard.stats
    assert (stats.frames, stats.fsyncs) == (1, 1)
    assert inspect_wal(bench.disk).datas == [b"first", b"a"]


def test_durations_of_a_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write, sync = bench.writer.write, bench.writer.sync

    def slow_write(*arguments: Any, **more: Any) -> None:
        bench.clock.tick(2)
        write(*arguments, **more)

    def slow_sync() -> bool:
        bench.clock.tick(3)
        return sync()

    monkeypatch.setattr(bench.writer, "write", slow_write)
    monkeypatch.setattr(bench.writer, "sync", slow_sync)
    bench.write(b"a")
    assert (bench.shard.write_us, bench.shard.sync_us) == (2_000, 3_000)
    assert bench.shard.stats.sync_us == 3_000
    bench.queue(b"b", durable=False)
    bench.shard.commit_pending()
    assert (bench.shard.write_us, bench.shard.sync_us) == (2_000, 0)
    assert bench.shard.stats.fsyncs == 1
    assert bench.shard._sync() == 3_000
    assert bench.shard._sync() == 0, "there was nothing to sync"
    assert bench.shard.stats.fsyncs == 2


@pytest.mark.parametrize(
    ("prepare", "due", "durable", "ticks"),
    [(True, False, True, 1), (False, True, True, 0), (False, True, False, 1), (False, False, False, 0)],
)
def test_a_tick_is_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, prepare: bool, due: bool, durable: bool, ticks: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(type(bench.writer), "should_prepare_next", prepare)
    monkeypatch.setattr(type(bench.writer), "should_sync", due)
    bench.shard.on_tick_needed = lambda: asked.append(1)
    bench.queue(b"a", durable=durable)
    bench.shard.commit_pending()
    assert len(asked) == ticks


def test_on_a_full_disk_commits_that_free_space_are_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, bool]] = []
    write = bench.writer.write

    def full(pieces: Any, *, size: int, frames: int, may_use_reserve: bool) -> None:
        tried.append((frames, may_use_reserve))
        if not may_use_reserve:
            raise DiskFull("full")
        write(pieces, size=size, frames=frames, may_use_reserve=may_use_reserve)

    monkeypatch.setattr(bench.writer, "write", full)
    for data, frees in ((b"new", False), (b"delete", True), (b"newer", False)):
        bench.may_use_reserve = frees
        bench.queue(data)
    assert bench.shard.commit_pending()
    assert tried == [(3, False), (1, True)]
    assert bench.order == [(b"new", "DiskFull"), (b"newer", "DiskFull"), (b"delete", "done")]
    tried.clear()
    bench.order.clear()
    bench.may_use_reserve = False
    bench.queue(b"new")
    bench.shard.commit_pending()
    assert (tried, bench.order) == ([(1, False)], [(b"new", "DiskFull")])
    tried.clear()
    bench.may_use_reserve = True
    bench.queue(b"a", b"b")
    bench.shard.commit_pending()
    assert tried == [(2, True)]


def test_a_latch_fails_the_batch_and_the_queue(bench: Bench, disk: SimDisk) -> None:
    bench.write(b"acked")
    disk.fail("sync", at=1)
    bench.queue(b"a")
    bench.shard.commits._batch_frames = 1
    bench.queue(b"b", b"c")
    bench.shard.commit_pending()
    assert bench.order[1:] == [(b"a", "Latched"), (b"b", "Latched"), (b"c", "Latched")]
    assert bench.shard.is_latched
    assert (bench.shard.sync(), bench.shard.commit_pending()) == (False, False)
    with pytest.raises(Latched):
        bench.queue(b"d")


def test_an_outcome_that_is_no_error_of_ours_fails_all_and_is_raised(bench: Bench) -> None:
    bench.queue(b"a", b"b")
    batch = bench.shard.commits.take_batch()
    bench.queue(b"c")
    with pytest.raises(ZeroDivisionError):
        bench.shard.commits.finish_batch(batch, ZeroDivisionError())
    assert bench.order == [(b"a", "Latched"), (b"b", "Latched"), (b"c", "Latched")]
    assert bench.shard.queue_length == 0


def test_the_acked_position_rises_with_success_only(bench: Bench) -> None:
    shard, before = bench.shard, bench.writer.position
    bench.queue(b"a", durable=False)
    shard.commit_pending()
    after = bench.writer.position
    assert before < after == shard._acked_position
    shard._acked_position = before
    shard.commits.finish_batch([], Busy("no"))
    assert shard._acked_position == before
    shard.commits.finish_batch([], None)
    assert shard._acked_position == after


# The batch in flight --------------------------------------------------------------------------------------


class FakeFsync:
    """A sync whose result the test sets."""

    def __init__(self) -> None:
        self.requested: list[int] = []
        self.waits: list[float] = []
        self.outcome: list[OSError | None] = []
        self.closed = 0
        self.descriptor = 5

    def request(self, descriptor: int) -> None:
        self.requested.append(descriptor)

    def result(self) -> OSError | None:
        if not self.outcome:
            raise BlockingIOError
        return self.outcome.pop(0)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.outcome.append(None)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fsync(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> FakeFsync:
    made: Any = FakeFsync()
    bench.shard._fsync_thread = made

    def begin_sync() -> int:
        bench.writer._sync_lock.acquire()
        bench.writer._syncing_to = bench.writer._pos
        return 3

    monkeypatch.setattr(bench.writer, "begin_sync", begin_sync)
    found: FakeFsync = made
    return found


def test_a_batch_is_begun_and_finished_by_the_loop(bench: Bench, fsync: FakeFsync) -> None:
    shard = bench.shard
    assert shard.enable_async(lambda: pytest.fail("the loop itself finished it")) == 5
    assert not shard.begin_commit(), "the queue is empty"
    assert not shard.finish_commit()
    assert (shard.has_inflight_batch, shard.inflight_us) == (False, 0)
    bench.queue(b"a", b"b")
    assert shard.begin_commit()
    assert (shard._state, fsync.requested) == (CommitState.SYNCING, [3])
    assert shard.has_inflight_batch
    inflight = shard._inflight
    assert inflight is not None
    assert (len(inflight.batch), inflight.write_error, inflight.thread_id, inflight.number) == (2, None, get_ident(), 1)
    bench.clock.tick(4)
    assert shard.inflight_us == 4_000
    bench.queue(b"later")
    assert not shard.begin_commit(), "the commit lock is held"
    assert not shard.finish_commit(), "it is not synced yet"
    assert bench.order == []
    fsync.outcome.append(None)
    assert shard.finish_commit()
    assert bench.order == [(b"a", "done"), (b"b", "done")]
    assert (shard._state, shard._inflight, shard.sync_us) == (CommitState.IDLE, None, 4_000)
    stats = shard.stats
    assert (stats.fsyncs, stats.sync_us) == (1, 4_000)
    assert bench.writer.synced == bench.writer.position
    assert shard._writer_wanted is False, "the loop commits the rest of the queue"
    assert shard.begin_commit()
    assert shard._begin_count == 2
    fsync.outcome.append(OSError(5, "bad"))
    assert shard.finish_commit()
    assert bench.order[2:] == [(b"later", "Latched")]
    assert shard.stats.fsyncs == 1


def test_a_batch_that_needs_no_sync_is_done_at_once(bench: Bench, fsync: FakeFsync) -> None:
    bench.queue(b"a", durable=False)
    assert bench.shard.begin_commit(gathered_us=7)
    assert bench.order == [(b"a", "done")]
    assert (fsync.requested, bench.shard.has_inflight_batch) == ([], False)
    assert bench.shard.commits.commit_lock.acquire(blocking=False)


@pytest.mark.parametrize("reason", ["large", "full", "reserve", "closed", "held"])
def test_batches_that_a_loop_leaves_to_the_writer_thread(
    bench: Bench, fsync: FakeFsync, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    shard, size = bench.shard, 3 * (OVERHEAD + 1 + PREPENDED_BYTES_MAX)
    bench.queue(b"a", b"b", b"c")
    if reason == "large":
        monkeypatch.setattr(wal_shard, "_ASYNC_BATCH_BYTES_MAX", size - 1)
    elif reason == "full":
        bench.writer._pos, bench.writer._capacity_bytes = 10, 10 + size + 69
    elif reason == "reserve":
        bench.writer.is_reserve_file = True
    elif reason == "closed":
        shard._is_closed = True
    else:
        shard.commits.commit_lock.acquire()
    assert shard.begin_commit() is False
    assert [commit.pieces[0][38:39] for commit in shard._queue] == [b"a", b"b", b"c"], "in their order"
    assert fsync.requested == []
    if reason == "large":
        monkeypatch.setattr(wal_shard, "_ASYNC_BATCH_BYTES_MAX", size)
        assert shard.begin_commit()


def test_a_batch_is_handed_over_where_it_cannot_be_synced(
    bench: Bench, fsync: FakeFsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, over, woken = bench.shard, list[int](), list[int]()
    shard.enable_async(lambda: over.append(1))
    monkeypatch.setattr(bench.writer, "begin_sync", lambda: None)
    monkeypatch.setattr(shard._wake, "notify", lambda *_: woken.append(1))
    assert not shard._take_over_batch()
    bench.queue(b"a")
    assert shard.begin_commit()
    assert (shard._state, fsync.requested, woken) == (CommitState.HANDED_OVER, [], [1])
    assert shard._take_over_batch()
    assert (bench.order, over, shard._state) == ([(b"a", "done")], [1], CommitState.IDLE)
    assert bench.writer.synced == bench.writer.position
    assert not shard._take_over_batch()


def test_a_write_that_failed_is_rolled_back_by_the_thread_that_takes_it_over(
    bench: Bench, fsync: FakeFsync, disk: SimDisk
) -> None:
    disk.fail("write", at=1, error=28)
    bench.queue(b"a")
    assert bench.shard.begin_commit()
    assert (bench.shard._state, fsync.requested) == (CommitState.HANDED_OVER, [])
    inflight = bench.shard._inflight
    assert inflight is not None
    assert isinstance(inflight.write_error, OSError)
    assert bench.shard._take_over_batch()
    assert bench.order == [(b"a", "DiskFull")]
    assert bench.shard.commits.commit_lock.acquire(blocking=False)


def test_a_sleeping_writer_thread_is_woken_for_a_begun_batch(
    bench: Bench, fsync: FakeFsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    monkeypatch.setattr(bench.shard._wake, "notify", lambda *_: woken.append(1))
    for asleep, count in ((False, 0), (True, 1)):
        bench.shard._writer_is_asleep = asleep
        bench.queue(b"a")
        bench.shard.begin_commit()
        assert len(woken) == count
        fsync.outcome.append(None)
        bench.shard.finish_commit()


def test_the_thread_that_began_a_batch_finishes_it_before_it_commits(bench: Bench, fsync: FakeFsync) -> None:
    bench.queue(b"a")
    bench.shard.begin_commit()
    bench.write(b"b")
    assert bench.order == [(b"a", "done"), (b"b", "done")]
    assert fsync.waits == [wal_shard.COMPLETION_POLL_S]


def test_a_close_finishes_the_batch_in_flight_and_the_queue(bench: Bench, fsync: FakeFsync) -> None:
    bench.queue(b"a")
    bench.shard.begin_commit()
    bench.queue(b"b")
    bench.shard.close()
    assert bench.order == [(b"a", "done"), (b"b", "done")]
    assert (fsync.closed, bench.shard._fsync_thread) == (1, None)
    bench.shard.close()
    assert fsync.closed == 1


IDLE, SYNCING, HANDED, TAKEN = CommitState
LEGAL = {(IDLE, SYNCING), (IDLE, HANDED), (SYNCING, IDLE), (HANDED, TAKEN), (TAKEN, IDLE)}


@pytest.mark.parametrize("before", CommitState)
@pytest.mark.parametrize("after", CommitState)
def test_transitions_of_the_batch_in_flight(bench: Bench, before: CommitState, after: CommitState) -> None:
    bench.shard._state = before
    if (before, after) in LEGAL:
        bench.shard._enter(after)
        assert bench.shard._state is after
    else:
        with pytest.raises(AssertionError):
            bench.shard._enter(after)


# The writer thread ----------------------------------------------------------------------------------------


def inflight_of(bench: Bench, number: int) -> InflightBatch:
    return InflightBatch([], 0, bench.clock.monotonic_us(), None, 0, number)


def test_the_second_check_finishes_a_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, finished = bench.shard, list[bool]()

    def finish(*, by_loop: bool) -> bool:
        finished.append(by_loop)
        return True

    monkeypatch.setattr(shard, "finish_commit", finish)
    assert not shard._check_inflight()
    for number, result in ((1, False), (1, True), (2, False), (3, False), (3, True)):
        shard._inflight = inflight_of(bench, number)
        assert shard._check_inflight() is result
    assert finished == [False, False]


class Waits:
    """Stands for the condition of the writer thread: each wait runs the next action."""

    def __init__(self, *actions: Callable[[], bool]) -> None:
        self.actions, self.timeouts = list(actions), list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        return self.actions.pop(0)()

    def notify(self, *_: object) -> None:
        pass


def wait_for_work(bench: Bench, *actions: Callable[[], bool]) -> tuple[bool, list[float | None]]:
    waits: Any = Waits(*actions)
    bench.shard._wake = waits
    return bench.shard._wait_for_work(), waits.timeouts


POLL = wal_shard.COMPLETION_POLL_S


def test_the_writer_thread_sleeps_until_it_is_wanted(bench: Bench) -> None:
    shard = bench.shard
    shard._queue.append(Commit([], frames=0, durable=False))

    def want() -> bool:
        assert shard._writer_is_asleep
        shard._writer_wanted = True
        return True

    assert wait_for_work(bench, want) == (True, [None])
    assert shard._writer_is_asleep is False
    assert wait_for_work(bench) == (True, []), "it is wanted already"
    shard._queue.clear()

    def close() -> bool:
        shard._is_closed = True
        return True

    assert wait_for_work(bench, close) == (False, [None])
    shard._queue.append(Commit([], frames=0, durable=False))
    assert wait_for_work(bench) == (True, []), "the queue is committed before it ends"


def test_the_writer_thread_polls_while_a_loop_begins_batches(bench: Bench, fsync: FakeFsync) -> None:
    assert fsync.requested == []
    shard = bench.shard
    shard._begin_count = 3
    seen: list[int] = []

    def nothing() -> bool:
        seen.append(shard._seen_begin)
        return False

    def close() -> bool:
        shard._is_closed = True
        return True

    assert wait_for_work(bench, nothing, close) == (False, [POLL, None])
    assert seen == [3]


def test_the_writer_thread_takes_the_queue_that_a_loop_left(bench: Bench, fsync: FakeFsync) -> None:
    assert fsync.requested == []
    shard = bench.shard
    shard._queue.append(Commit([], frames=0, durable=False))
    assert wait_for_work(bench, lambda: True, lambda: False) == (True, [POLL, POLL])
    assert shard._writer_wanted is True


def test_the_writer_thread_checks_a_batch_in_flight(bench: Bench, fsync: FakeFsync) -> None:
    assert fsync.requested == []
    shard = bench.shard
    shard._inflight = inflight_of(bench, 1)
    shard._state = CommitState.SYNCING
    assert wait_for_work(bench, lambda: True, lambda: False) == (True, [POLL, POLL])

    def late() -> bool:
        bench.clock.tick(int(POLL * 1000))
        return True

    assert wait_for_work(bench, lambda: True, late) == (True, [POLL, POLL])
    shard._state = CommitState.HANDED_OVER
    assert wait_for_work(bench) == (True, [])


def test_the_writer_thread_commits_and_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, calls = bench.shard, list[Any]()
    works = iter([True, True, True, False])
    outcomes = iter([True, False, False])
    queues = iter([0, 1, 0])

    def commit_pending(*, timeout: float, gathered_us: int) -> bool:
        calls.append((timeout, gathered_us, shard._writer_wanted))
        shard._queue.clear()
        shard._queue.extend([Commit([], frames=0, durable=False)] * next(queues))
        return next(outcomes)

    monkeypatch.setattr(shard, "_wait_for_work", lambda: next(works))
    monkeypatch.setattr(shard, "commit_pending", commit_pending)
    monkeypatch.setattr(shard, "wake_writer", lambda: calls.append("wake"))
    shard._writer_wanted = True
    shard._run_writer()
    assert calls == [(0.005, 0, False), (0.005, 0, False), "wake", (0.005, 0, False)]


def test_the_writer_thread_reports_how_long_it_gathered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, calls = bench.shard, list[int]()
    works = iter([True, False])
    shard.window_ms = lambda: 1.0
    monkeypatch.setattr(shard, "_wait_for_work", lambda: next(works))
    monkeypatch.setattr(shard, "_pause", lambda _: bench.clock.tick(2))

    def commit_pending(*, timeout: float, gathered_us: int) -> bool:
        assert timeout == 0.005
        calls.append(gathered_us)
        return True

    monkeypatch.setattr(shard, "commit_pending", commit_pending)
    shard._run_writer()
    assert calls == [2_000]


def test_the_writer_thread_does_not_commit_while_a_batch_is_in_flight(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, calls = bench.shard, list[str]()
    checks = iter([True, False, False])
    works = iter([True, True, True, False])
    shard._state = CommitState.SYNCING

    def check() -> bool:
        calls.append("check")
        found = next(checks)
        if calls == ["check"] * 3:
            shard._queue.append(Commit([], frames=0, durable=False))
            shard._writer_wanted = True
        return found

    def commit_pending(**_: Any) -> bool:
        calls.append("commit")
        return True

    monkeypatch.setattr(shard, "_wait_for_work", lambda: next(works))
    monkeypatch.setattr(shard, "_check_inflight", check)
    monkeypatch.setattr(shard, "commit_pending", commit_pending)
    shard._run_writer()
    assert calls == ["check", "check", "check", "commit"]


def test_a_pause_ends_with_the_shard(bench: Bench) -> None:
    waits: Any = Waits(lambda: True)
    bench.shard._wake = waits
    bench.shard._pause(0.5)
    assert waits.timeouts == [0.5]
    bench.shard._is_closed = True
    bench.shard._pause(0.5)
    assert waits.timeouts == [0.5]


def test_a_shard_has_one_writer_thread_until_it_is_closed(bench: Bench) -> None:
    shard = bench.shard
    assert not shard.has_writer_thread
    shard.start()
    thread = shard._thread
    assert thread is not None
    assert (thread.daemon, thread.name, shard.has_writer_thread) == (True, f"tidelog wal {WAL}", True)
    shard.start()
    assert shard._thread is thread
    shard.close()
    assert not thread.is_alive()
    bench.shard._thread = None
    shard.start()
    assert not shard.has_writer_thread
    assert thread not in threading.enumerate()


# Ticks ----------------------------------------------------------------------------------------------------


def test_a_tick_commits_syncs_marks_and_prepares(bench: Bench, disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(bench.writer, "prepare_next_file", lambda: prepared.append(1))
    bench.queue(b"a", durable=False)
    disk.trace.clear()
    bench.shard.tick()
    assert steps(disk) == ["write", "sync", "create", "write"]
    assert paths.read_synced(disk, WAL) == bench.writer.synced == bench.writer.position
    assert prepared == [1]
    with bench.shard._prepare_lock:
        bench.shard.tick()
    assert prepared == [1]
    assert steps(disk) == []
    bench.queue(b"b", durable=False)
    sync = bench.shard.sync

    def sync_and_hold() -> bool:
        done = sync()
        bench.shard.commits.commit_lock.acquire()
        return done

    monkeypatch.setattr(bench.shard, "sync", sync_and_hold)
    bench.shard.tick()
    assert steps(disk) == ["write", "sync"], "the holder of the commit lock writes a mark"
    bench.shard.commits.commit_lock.release()
    bench.shard._is_closed = True
    assert sync() is False
