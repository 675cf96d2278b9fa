"""Group commit, step by step and without a thread (G13–G21, G22–G25, G28)."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from tests.unit.wal.harness import WAL, WalHarness, append, inspect_wal, wal_path

from tidelog.errors import Busy, Closed, DiskFull, Error, InDoubt, Latched
from tidelog.testing import ManualClock, PowerOff, SimDisk, SyncMode
from tidelog.wal import SYNC_BUCKETS_US, Commit, CommitFuture, Position, Shard
from tidelog.wal.group_commit import wait_for_more_commits


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(trace=True)


def calls(disk: SimDisk, began: int = 0) -> list[str]:
    """What was done to WAL files, without their names."""
    return [words.split()[0] for words in disk.trace[began:] if ".log" in words]


# One batch.


def test_a_lone_durable_write_is_one_write_and_one_sync_by_its_caller(disk: SimDisk) -> None:
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
    tokens = [bench.submit([b"%d" % number], durable=each) for number, each in enumerate(durable)]
    assert calls(disk, began) == []
    assert not any(token.done for token in tokens)
    assert bench.shard.commit_pending()
    assert calls(disk, began) == ["write", "sync"] if any(durable) else ["write"]
    assert [token.wait() for token in tokens] == [1] * 5
    assert not bench.shard.commit_pending()
    assert inspect_wal(disk).datas == [b"0", b"1", b"2", b"3", b"4"]


def test_outcomes_are_told_in_submit_order_after_the_sync(disk: SimDisk) -> None:
    """G6, G14, E3: publish order is WAL order. Method: `done` looks at the disk."""
    bench = WalHarness(disk)
    told: list[int] = []

    def done(number: int) -> Callable[[Error | None], None]:
        def record_count(error: Error | None) -> None:
            assert error is None
            assert inspect_wal(disk.crash_image("none")).datas == [b"0", b"1", b"2", b"3"]
            told.append(number)

        return record_count

    for number in range(4):
        frame = append(b"%d" % number)
        bench.shard.submit(Commit([frame], frames=1, durable=number == 2, on_done=done(number)))
    bench.shard.commit_pending()
    assert told == [0, 1, 2, 3]


def test_a_batch_keeps_its_bounds(disk: SimDisk) -> None:
    bench = WalHarness(disk, file_bytes=1 << 16, batch_frames=4, batch_bytes=1000)
    for data in (b"a", b"b", b"c", b"d", b"e", b"x" * 900, b"f", b"y" * 2000, b"g"):
        bench.submit([data], durable=False)
    bench.submit([b"z"] * 9, durable=False)
    began, sizes = bench.writer.position.pos, []
    while bench.shard.commit_pending():
        sizes.append(bench.writer.position.pos - began)
        began = bench.writer.position.pos
    assert sizes == [4 * 47, 47 + 946, 47, 2046, 47, 9 * 47], "and at least one"


def test_a_commit_may_put_a_durable_frame_in_front_at_the_last_moment(disk: SimDisk) -> None:
    """Disk class: the HeadWatermark that a commit needs is known when its turn comes, not before."""
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


def test_a_queue_is_quick_while_nothing_in_it_waits_for_a_sync(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    quick = [bench.shard.commits_without_sync]
    for durable in (False, True):
        bench.submit([b"a"], durable=durable)
        quick.append(bench.shard.commits_without_sync)
    bench.shard.commit_pending()
    assert [*quick, bench.shard.commits_without_sync] == [True, True, False, True]


def test_nothing_is_gathered_unless_a_window_is_given(disk: SimDisk) -> None:
    assert WalHarness(disk).shard.window_ms() == 0


def test_a_full_queue_refuses_and_writes_nothing(disk: SimDisk) -> None:
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


def test_the_turn_of_another_is_not_waited_for(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    bench.submit([b"a"])
    with bench.shard._hold_commit_lock():
        assert not bench.shard.commit_pending(blocking=False)
        assert not bench.shard.commit_pending(timeout=0.001)
    assert bench.shard.commit_pending(blocking=False)
    assert not bench.shard.commit_pending(blocking=False)


# Ticks and positions.


def test_a_tick_syncs_what_is_not_synced(disk: SimDisk) -> None:
    """G18."""
    bench = WalHarness(disk)
    bench.write(b"a", durable=False)
    assert bench.shard.synced_position() == Position(1, 0)
    assert inspect_wal(disk.crash_image("none")).datas == []
    began = len(disk.trace)
    bench.shard.tick()
    bench.shard.tick()
    assert calls(disk, began) == ["sync", "write"], "and a mark says so, for which nothing is synced"
    assert (bench.shard.synced_position(), bench.shard.position()) == (Position(1, 47), Position(1, 47 + 70))
    assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


def test_a_tick_commits_what_nobody_came_back_for(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    token = bench.submit([b"a"], durable=False)
    bench.shard.tick()
    assert token.done
    assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


def test_a_tick_of_a_latched_or_closed_shard_does_nothing(disk: SimDisk) -> None:
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


def test_everything_before_a_position_is_done(disk: SimDisk) -> None:
    """G39: a snapshot that records it holds everything before it."""
    bench = WalHarness(disk)
    bench.submit([b"a"])
    assert bench.shard.position() == Position(1, 0)
    bench.shard.commit_pending()
    assert bench.shard.position() == Position(1, 47)


# Failures.


@pytest.mark.parametrize("mode", ["dropped", "reverted", "kept"])
def test_a_failed_sync_fails_its_whole_batch_and_every_later_one(disk: SimDisk, mode: SyncMode) -> None:
    """G22, G23, G24. Method: also for the commits without a promise that share the sync, and those still queued."""
    bench = WalHarness(disk, batch_frames=2)
    bench.write(b"acked")
    tokens = [bench.submit([b"%d" % number], durable=number == 1) for number in range(5)]
    disk.fail_sync(mode)
    bench.shard.commit_pending()
    assert all(token.done for token in tokens), "at once, whether anybody asks or not"
    for token in tokens:
        with pytest.raises(Latched):
            token.wait()
    assert bench.shard.is_latched
    began = disk.op_count
    with pytest.raises(Latched, match="wrote nothing"):
        bench.submit([b"late"])
    bench.shard.close()
    assert disk.op_count == began
    assert [len(write.outcomes) for write in bench.history] == [1] * 6
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        assert inspect_wal(image).datas in ([b"acked"], [b"acked", b"0", b"1"])


def test_a_batch_without_room_fails_and_the_next_goes_on(disk: SimDisk) -> None:
    """G25."""
    bench = WalHarness(disk)
    bench.write(b"a")
    tokens = [bench.submit([b"x" * 30] * 3), bench.submit([b"y"], durable=False)]
    disk.fail("write", error=errno.ENOSPC, partial=100)
    bench.shard.commit_pending()
    for token in tokens:
        with pytest.raises(DiskFull, match="nothing was written"):
            token.wait()
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


def test_a_done_that_raises_latches_and_fails_what_is_behind_it(disk: SimDisk) -> None:
    """G19: what the caller keeps in memory no longer follows the WAL."""
    bench = WalHarness(disk, batch_frames=4)
    before = bench.submit([b"a"])

    def done(_: Error | None) -> None:
        raise RuntimeError("a mistake")

    bench.shard.submit(Commit([append(b"b")], frames=1, durable=True, on_done=done))
    behind = [bench.submit([b"%d" % number]) for number in range(6)]
    with pytest.raises(RuntimeError, match="a mistake"):
        bench.shard.commit_pending()
    assert before.wait() == 1
    for token in behind:
        with pytest.raises(Latched, match="a mistake"):
            token.wait()
    with pytest.raises(Latched):
        bench.submit([b"late"])
    assert [len(write.outcomes) for write in bench.history] == [1] * 7


def test_a_power_cut_in_the_committer_fails_every_token(disk: SimDisk) -> None:
    """G19, P10. Method: at every disk operation of a batch."""
    for cut_at in range(1, 3):
        disk = SimDisk()
        bench = WalHarness(disk, batch_frames=2)
        tokens = [bench.submit([b"%d" % number]) for number in range(4)]
        disk.cut_power_at(disk.op_count + cut_at)
        with pytest.raises(PowerOff):
            tokens[0].wait()
        for token in tokens:
            with pytest.raises(Latched):
                token.wait()
        with pytest.raises(Latched):
            bench.submit([b"late"])
        assert [len(write.outcomes) for write in bench.history] == [1] * 4


def test_a_done_that_raises_twice_leaves_nobody_without_an_outcome(disk: SimDisk) -> None:
    """G19. Method: the one behind raises as well when it is told of the failure."""
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


def test_a_close_commits_what_is_queued_and_makes_everything_durable(disk: SimDisk) -> None:
    """G19, G20."""
    bench = WalHarness(disk, batch_frames=2)
    tokens = [bench.submit([b"%d" % number], durable=False) for number in range(5)]
    bench.shard.close()
    assert [token.wait() for token in tokens] == [1] * 5
    assert inspect_wal(disk.crash_image("none")).datas == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(Closed, match="nothing was written"):
        bench.submit([b"late"])
    began = disk.op_count
    bench.shard.close()
    assert disk.op_count == began


def test_a_close_whose_sync_fails_says_so(disk: SimDisk) -> None:
    """G20, G22."""
    bench = WalHarness(disk)
    bench.write(b"a", durable=False)
    disk.fail_sync("dropped")
    with pytest.raises(Latched):
        bench.shard.close()
    bench.shard.close()


@pytest.mark.parametrize("waiting", [True, False])
def test_a_close_says_what_an_earlier_failure_kept_from_the_disk(disk: SimDisk, waiting: bool) -> None:
    """G20, G22. Method: the sync that fails is another write's, and whoever wrote that may have kept it to itself."""
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


# Tokens.


def test_a_token_tells_its_outcome_as_often_as_it_is_asked(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    token = bench.submit([b"a"])
    assert not token.done
    assert [token.wait(), token.wait(0), token.wait(5)] == [1, 1, 1]
    assert CommitFuture.completed(bench.shard, "at once").wait() == "at once"
    failed: CommitFuture[int] = CommitFuture(bench.shard)
    failed.set_exception(DiskFull("no room"))
    for _ in range(2):
        with pytest.raises(DiskFull, match="no room"):
            failed.wait()
    with pytest.raises(AssertionError, match="one outcome"):
        failed.set_result(1)


def test_callbacks_are_called_once_before_or_after_the_outcome(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    token = bench.submit([b"a"])
    said: list[object] = []

    def gone(_: CommitFuture[int]) -> None:
        raise RuntimeError("the event loop is closed")

    token.add_done_callback(gone)
    token.add_done_callback(lambda token: said.append(("early", token.wait())))
    bench.shard.commit_pending()
    assert said == [("early", 1)]
    token.add_done_callback(lambda token: said.append(("late", token.wait())))
    assert said == [("early", 1), ("late", 1)]
    assert not bench.shard.is_latched, "a waiter that is gone is not the committer's trouble"


def test_a_wait_that_is_too_short_leaves_the_outcome_open(disk: SimDisk) -> None:
    """P11: unknown, not failed."""
    bench = WalHarness(disk)
    token: CommitFuture[int] = CommitFuture(bench.shard)
    with pytest.raises(InDoubt, match="may still be committed"):
        token.wait(0.001)
    token.set_result(7)
    assert token.wait() == 7


# Figures and the window.


def test_the_figures_add_up(disk: SimDisk) -> None:
    bench = WalHarness(disk, marks=False)
    clock = ManualClock()
    disk.on_op = lambda _: clock.tick_us(200)
    shard = Shard(bench.writer, clock=clock)
    for _ in range(3):
        for size in (10, 500):
            shard.submit(Commit([append(b"x" * size)], frames=1, durable=True))
        shard.commit_pending()
    figures = shard.stats
    assert (figures.frames, figures.batches, figures.fsyncs, figures.rotations) == (6, 3, 3, 0)
    assert figures.bytes == bench.writer.position.pos == 3 * (56 + 546)
    assert figures.sync_us == 3 * 200
    assert dict(zip((*SYNC_BUCKETS_US, None), figures.sync_us_counts, strict=True))[250] == 3
    assert sum(figures.sync_us_counts) == 3
    shard.submit(Commit([append(b"x" * 900)], frames=1, durable=False))
    shard.commit_pending()
    assert (shard.stats.rotations, shard.stats.fsyncs) == (1, 3)
    assert figures.rotations == 0, "a copy stays as it is"


@pytest.mark.parametrize(("us", "bucket"), [(0, 0), (50, 0), (51, 1), (100, 1), (100_000, 8), (100_001, 9), (10**9, 9)])
def test_a_sync_is_counted_in_its_bucket(us: int, bucket: int, disk: SimDisk) -> None:
    bench = WalHarness(disk)
    clock = ManualClock()
    disk.on_op = lambda _: clock.tick_us(us)
    shard = Shard(bench.writer, clock=clock)
    shard.submit(Commit([append(b"x")], frames=1, durable=True))
    shard.commit_pending()
    assert shard.stats.sync_us_counts[bucket] == 1


def test_a_window_ends_with_the_first_slice_that_brings_nothing() -> None:
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


def test_the_shard_says_where_it_is(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    assert bench.shard.directory == WAL
    assert not bench.shard.has_writer_thread
    assert wal_path(1) in disk.tree()
