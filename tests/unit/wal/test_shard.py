"""Group commit, step by step and without a thread (G13–G21, G22–G25, G28)."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from tests.unit.wal.harness import WAL, WalHarness, append, inspect_wal, wal_path

from tidelog.errors import Busy, Closed, DiskFull, Error, InDoubt, Latched
from tidelog.testing import ManualClock, PowerOff, SimDisk, SyncMode
from tidelog.wal import SYNC_BUCKETS_US, Commit, CommitFuture, Position, Shard, paths
from tidelog.wal.shard import wait_for_more_commits


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(trace=True)


def calls(disk: SimDisk, began: int = 0) -> list[str]:
    """What was done to WAL files, without their names."""
    return [words.split()[0] for words in disk.trace[began:] if ".log" in words]


# One batch.


def test_single_durable_write_is_one_write_and_one_sync_by_its_caller(disk: SimDisk) -> None:
    """G15, G16."""
    bench = WalHarness(disk)
    began = len(disk.trace)
    assert bench.write(b"a") == 1
    assert calls(disk, began) == ["write", "sync"]
    assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


@pytest.mark.parametrize("durable", [(True,) * 5, (False, False, True, False, False), (False,) * 5])
def test_a_batch_is_one_write_and_at_most_one_sync(disk: SimDisk, durable: tuple[bool, ...]) -> None:
    """G15."""
    bench = WalHarness(disk)
    began = len(disk.trace)
    futures = [bench.submit([b"%d" % number], durable=each) for number, each in enumerate(durable)]
    assert calls(disk, began) == []
    assert not any(future.done for future in futures)
    assert bench.shard.commit_pending()
    assert calls(disk, began) == ["write", "sync"] if any(durable) else ["write"]
    assert [future.wait() for future in futures] == [1] * 5
    assert not bench.shard.commit_pending()
    assert inspect_wal(disk).datas == [b"0", b"1", b"2", b"3", b"4"]


def test_on_done_is_called_in_submit_order_after_the_sync(disk: SimDisk) -> None:
    """G6, G14, E3: publish order is WAL order. Method: `on_done` reads the disk."""
    bench = WalHarness(disk)
    notified: list[int] = []

    def done(number: int) -> Callable[[Error | None], None]:
        def record_count(error: Error | None) -> None:
            assert error is None
            assert inspect_wal(disk.crash_image("none")).datas == [b"0", b"1", b"2", b"3"]
            notified.append(number)

        return record_count

    for number in range(4):
        frame = append(b"%d" % number)
        bench.shard.submit(Commit([frame], frames=1, durable=number == 2, on_done=done(number)))
    bench.shard.commit_pending()
    assert notified == [0, 1, 2, 3]


def test_batch_respects_its_limits(disk: SimDisk) -> None:
    bench = WalHarness(disk, file_bytes=1 << 16, batch_frames=4, batch_bytes=1000)
    for data in (b"a", b"b", b"c", b"d", b"e", b"x" * 900, b"f", b"y" * 2000, b"g"):
        bench.submit([data], durable=False)
    bench.submit([b"z"] * 9, durable=False)
    began, sizes = bench.writer.position.pos, []
    while bench.shard.commit_pending():
        sizes.append(bench.writer.position.pos - began)
        began = bench.writer.position.pos
    assert sizes == [4 * 47, 47 + 946, 47, 2046, 47, 9 * 47], "and at least one"


def test_before_write_may_prepend_a_durable_frame(disk: SimDisk) -> None:
    """Disk class: the HeadWatermark that a commit needs is known only right before the write."""
    bench = WalHarness(disk)

    class Led(Commit):
        def before_write(self) -> None:
            self.prepend_durable(append(b"first"))

    outcomes: list[Error | None] = []
    bench.submit([b"before"], durable=False)
    bench.shard.submit(Led([append(b"second")], frames=1, durable=False, on_done=outcomes.append))
    bench.shard.commit_pending()
    assert outcomes == [None]
    assert inspect_wal(disk.crash_image("none")).datas == [b"before", b"first", b"second"]
    assert bench.writer.next_frame == 4
    assert bench.shard.stats.bytes == bench.writer.position.pos


# The queue.


def test_commits_without_sync_until_a_durable_commit_is_queued(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    quick = [bench.shard.commits_without_sync]
    for durable in (False, True):
        bench.submit([b"a"], durable=durable)
        quick.append(bench.shard.commits_without_sync)
    bench.shard.commit_pending()
    assert [*quick, bench.shard.commits_without_sync] == [True, True, False, True]


def test_default_commit_window_is_zero(disk: SimDisk) -> None:
    assert WalHarness(disk).shard.window_ms() == 0


def test_full_queue_refuses_a_commit_and_writes_nothing(disk: SimDisk) -> None:
    """G13."""
    bench = WalHarness(disk, queue_max=3)
    for number in range(3):
        bench.submit([b"%d" % number])
    for _ in range(2):
        with pytest.raises(Busy, match="nothing was written"):
            bench.submit([b"refused", b"whole"])
    assert (bench.shard.stats.queue_full_count, bench.shard.stats.queue_depth, bench.shard.stats.queue_peak) == (
        2,
        3,
        3,
    )
    bench.shard.commit_pending()
    bench.write(b"3")
    assert inspect_wal(disk).datas == [b"0", b"1", b"2", b"3"]
    assert (bench.shard.stats.queue_depth, bench.shard.stats.queue_peak) == (0, 3)


def test_commit_pending_does_not_wait_for_the_commit_lock_unless_asked(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    bench.submit([b"a"])
    with bench.shard._hold_commit_lock():
        assert not bench.shard.commit_pending(blocking=False)
        assert not bench.shard.commit_pending(timeout=0.001)
    assert bench.shard.commit_pending(blocking=False)
    assert not bench.shard.commit_pending(blocking=False)


# Ticks and positions.


def test_tick_syncs_unsynced_bytes(disk: SimDisk) -> None:
    """G18."""
    bench = WalHarness(disk)
    bench.write(b"a", durable=False)
    assert bench.shard.synced_position() == Position(1, 0)
    assert inspect_wal(disk.crash_image("none")).datas == []
    began = len(disk.trace)
    bench.shard.tick()
    bench.shard.tick()
    assert [words for words in disk.trace[began:] if "reserve" not in words] == [
        "sync data/wal/wal-0000000000000001.log",
        "create data/wal/SYNCED",
        "write data/wal/SYNCED@0+75",
    ], "and SYNCED says so, for which nothing is synced"
    assert bench.shard.synced_position() == bench.shard.position() == Position(1, 47)
    assert paths.read_synced(disk, "data/wal") == Position(1, 47)
    assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


def test_tick_commits_the_queue(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    future = bench.submit([b"a"], durable=False)
    bench.shard.tick()
    assert future.done
    assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


def test_tick_of_a_latched_or_closed_shard_does_nothing(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    bench.write(b"a", durable=False)
    disk.fail_sync("dropped")
    with pytest.raises(Latched):
        bench.shard.tick()
    began = disk.op_count
    bench.shard.tick()
    with pytest.raises(Latched, match="may not survive a power cut"):
        bench.shard.close()
    bench.shard.tick()
    assert disk.op_count == began


def test_every_commit_before_a_position_is_done(disk: SimDisk) -> None:
    """G39: a snapshot that records it holds everything before it."""
    bench = WalHarness(disk)
    bench.submit([b"a"])
    assert bench.shard.position() == Position(1, 0)
    bench.shard.commit_pending()
    assert bench.shard.position() == Position(1, 47)


# Failures.


@pytest.mark.parametrize("mode", ["dropped", "reverted", "kept"])
def test_failed_sync_fails_its_batch_and_every_later_commit(disk: SimDisk, mode: SyncMode) -> None:
    """G22, G23, G24. Method: also for the commits without a promise that share the sync, and those still queued."""
    bench = WalHarness(disk, batch_frames=2)
    bench.write(b"acked")
    futures = [bench.submit([b"%d" % number], durable=number == 1) for number in range(5)]
    disk.fail_sync(mode)
    bench.shard.commit_pending()
    assert all(future.done for future in futures), "at once, without a wait"
    for future in futures:
        with pytest.raises(Latched):
            future.wait()
    assert bench.shard.is_latched
    began = disk.op_count
    with pytest.raises(Latched, match="wrote nothing"):
        bench.submit([b"late"])
    bench.shard.close()
    assert disk.op_count == began
    assert [len(write.outcomes) for write in bench.history] == [1] * 6
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        assert inspect_wal(image).datas in ([b"acked"], [b"acked", b"0", b"1"])


def test_batch_on_a_full_disk_fails_and_the_next_one_succeeds(disk: SimDisk) -> None:
    """G25."""
    bench = WalHarness(disk)
    bench.write(b"a")
    futures = [bench.submit([b"x" * 30] * 3), bench.submit([b"y"], durable=False)]
    disk.fail("write", error=errno.ENOSPC, partial=100)
    bench.shard.commit_pending()
    for future in futures:
        with pytest.raises(DiskFull, match="nothing was written"):
            future.wait()
    assert not bench.shard.is_latched
    bench.write(b"b")
    assert inspect_wal(disk.crash_image("none")).datas == [b"a", b"b"]
    assert bench.shard.stats.frames == 2


def test_one_latched_shard_does_not_stop_another() -> None:
    """G28."""
    broken, sound = WalHarness(SimDisk()), WalHarness(SimDisk())
    assert isinstance(broken.disk, SimDisk)
    broken.disk.fail("write")
    with pytest.raises(Latched):
        broken.write(b"a")
    assert sound.write(b"a") == 1


def test_on_done_that_raises_trips_the_latch_and_fails_later_commits(disk: SimDisk) -> None:
    """G19: the state in memory no longer follows the WAL."""
    bench = WalHarness(disk, batch_frames=4)
    before = bench.submit([b"a"])

    def done(_: Error | None) -> None:
        raise RuntimeError("a mistake")

    bench.shard.submit(Commit([append(b"b")], frames=1, durable=True, on_done=done))
    later = [bench.submit([b"%d" % number]) for number in range(6)]
    with pytest.raises(RuntimeError, match="a mistake"):
        bench.shard.commit_pending()
    assert before.wait() == 1
    for future in later:
        with pytest.raises(Latched, match="a mistake"):
            future.wait()
    with pytest.raises(Latched):
        bench.submit([b"late"])
    assert [len(write.outcomes) for write in bench.history] == [1] * 7


def test_power_cut_in_the_committer_fails_every_future(disk: SimDisk) -> None:
    """G19, P10. Method: at every disk operation of a batch."""
    for cut_at in range(1, 3):
        disk = SimDisk()
        bench = WalHarness(disk, batch_frames=2)
        futures = [bench.submit([b"%d" % number]) for number in range(4)]
        disk.cut_power_at(disk.op_count + cut_at)
        with pytest.raises(PowerOff):
            futures[0].wait()
        for future in futures:
            with pytest.raises(Latched):
                future.wait()
        with pytest.raises(Latched):
            bench.submit([b"late"])
        assert [len(write.outcomes) for write in bench.history] == [1] * 4


def test_every_commit_has_an_outcome_even_if_on_done_raises_again(disk: SimDisk) -> None:
    """G19. Method: the one later raises as well when it is notified of the failure."""
    bench = WalHarness(disk)
    said: list[Error | None] = []

    def done(error: Error | None) -> None:
        said.append(error)
        raise RuntimeError("a mistake")

    for _ in range(3):
        bench.shard.submit(Commit([append(b"a")], frames=1, durable=True, on_done=done))
    last = bench.submit([b"b"])
    with pytest.raises(RuntimeError):
        bench.shard.commit_pending()
    assert said[0] is None
    assert [type(error) for error in said[1:]] == [Latched, Latched]
    with pytest.raises(Latched):
        last.wait()


# Closing.


def test_close_commits_the_queue_and_syncs(disk: SimDisk) -> None:
    """G19, G20."""
    bench = WalHarness(disk, batch_frames=2)
    futures = [bench.submit([b"%d" % number], durable=False) for number in range(5)]
    bench.shard.close()
    assert [future.wait() for future in futures] == [1] * 5
    assert inspect_wal(disk.crash_image("none")).datas == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(Closed, match="nothing was written"):
        bench.submit([b"late"])
    began = disk.op_count
    bench.shard.close()
    assert disk.op_count == began


def test_close_raises_if_its_sync_fails(disk: SimDisk) -> None:
    """G20, G22."""
    bench = WalHarness(disk)
    bench.write(b"a", durable=False)
    disk.fail_sync("dropped")
    with pytest.raises(Latched):
        bench.shard.close()
    bench.shard.close()


@pytest.mark.parametrize("waiting", [True, False])
def test_close_raises_if_acked_commits_were_never_synced(disk: SimDisk, waiting: bool) -> None:
    """G20, G22. Method: the sync that fails is another write's, whose caller may not have reported it."""
    bench = WalHarness(disk)
    bench.write(b"durable")
    if waiting:
        bench.write(b"acked", durable=False)
    disk.fail_sync("dropped")
    with pytest.raises(Latched):
        bench.write(b"refused")
    if waiting:
        with pytest.raises(Latched, match="may not survive a power cut"):
            bench.shard.close()
    bench.shard.close()
    assert inspect_wal(disk.crash_image("none")).datas == [b"durable"]


# Futures.


def test_future_returns_its_outcome_every_time(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    future = bench.submit([b"a"])
    assert not future.done
    assert [future.wait(), future.wait(0), future.wait(5)] == [1, 1, 1]
    assert CommitFuture.completed(bench.shard, "at once").wait() == "at once"
    failed: CommitFuture[int] = CommitFuture(bench.shard)
    failed.set_exception(DiskFull("no space"))
    for _ in range(2):
        with pytest.raises(DiskFull, match="no space"):
            failed.wait()
    with pytest.raises(AssertionError, match="one outcome"):
        failed.set_result(1)


def test_done_callbacks_are_called_once(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    future = bench.submit([b"a"])
    said: list[object] = []

    def gone(_: CommitFuture[int]) -> None:
        raise RuntimeError("the event loop is closed")

    future.add_done_callback(gone)
    future.add_done_callback(lambda future: said.append(("early", future.wait())))
    bench.shard.commit_pending()
    assert said == [("early", 1)]
    future.add_done_callback(lambda future: said.append(("late", future.wait())))
    assert said == [("early", 1), ("late", 1)]
    assert not bench.shard.is_latched, "a failing callback does not affect the committer"


def test_wait_with_a_short_timeout_raises_in_doubt(disk: SimDisk) -> None:
    """P11: unknown, not failed."""
    bench = WalHarness(disk)
    future: CommitFuture[int] = CommitFuture(bench.shard)
    with pytest.raises(InDoubt, match="may still be committed"):
        future.wait(0.001)
    future.set_result(7)
    assert future.wait() == 7


# Stats and the commit window.


def test_stats_add_up(disk: SimDisk) -> None:
    bench = WalHarness(disk, marks=False)
    clock = ManualClock()
    disk.on_op = lambda _: clock.tick_us(200)
    shard = Shard(bench.writer, clock=clock)
    for _ in range(3):
        for size in (10, 500):
            shard.submit(Commit([append(b"x" * size)], frames=1, durable=True))
        shard.commit_pending()
    stats = shard.stats
    assert (stats.frames, stats.batches, stats.fsyncs, stats.rotations) == (6, 3, 3, 0)
    assert stats.bytes == bench.writer.position.pos == 3 * (56 + 546)
    assert stats.sync_us == 3 * 200
    assert dict(zip((*SYNC_BUCKETS_US, None), stats.sync_us_counts, strict=True))[250] == 3
    assert sum(stats.sync_us_counts) == 3
    shard.submit(Commit([append(b"x" * 900)], frames=1, durable=False))
    shard.commit_pending()
    assert (shard.stats.rotations, shard.stats.fsyncs) == (1, 3)
    assert stats.rotations == 0, "a copy stays as it is"


@pytest.mark.parametrize(("us", "bucket"), [(0, 0), (50, 0), (51, 1), (100, 1), (100_000, 8), (100_001, 9), (10**9, 9)])
def test_a_sync_is_counted_in_its_bucket(us: int, bucket: int, disk: SimDisk) -> None:
    bench = WalHarness(disk)
    clock = ManualClock()
    disk.on_op = lambda _: clock.tick_us(us)
    shard = Shard(bench.writer, clock=clock)
    shard.submit(Commit([append(b"x")], frames=1, durable=True))
    shard.commit_pending()
    assert shard.stats.sync_us_counts[bucket] == 1


def test_commit_window_ends_with_the_first_slice_without_a_commit() -> None:
    """G17: and never later than its ceiling."""

    def waited(window: float, brings: list[int]) -> float:
        arrived, paused = 0, [0.0]

        def pause(seconds: float) -> None:
            nonlocal arrived
            paused[0] += seconds
            arrived += brings.pop(0)

        wait_for_more_commits(window, lambda: arrived, pause)
        return paused[0] * 1000

    assert waited(0.0, []) == 0
    assert waited(10.0, [0]) == 0.25
    assert waited(10.0, [1, 5, 0]) == 0.75
    assert waited(4.4, [1] * 100) == pytest.approx(4.25)
    assert waited(10.0, [1] * 100) == pytest.approx(10.0)


def test_shard_has_its_directory(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    assert bench.shard.directory == WAL
    assert not bench.shard.has_writer_thread
    assert wal_path(1) in disk.tree()
