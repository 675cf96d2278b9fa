"""Commits of an event loop: a begun batch is finished after its sync, by any thread, and the loop never blocks.

No test waits for time to pass.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from threading import Event, Thread, get_ident
from time import monotonic
from typing import Any

import pytest
from tests.implementations import BOTH, implementation
from tests.unit.wal.harness import TIMEOUT_S, WalHarness, inspect_wal, run_all

from tidelog.disk.posix import PosixDisk
from tidelog.errors import DiskFull, Error, Latched
from tidelog.formats import control_frames, frame
from tidelog.testing import SimDisk
from tidelog.testing.simulated_disk import SimFile
from tidelog.wal import CommitFuture, Writer
from tidelog.wal.shard import COMPLETION_POLL_S, PREPENDED_BYTES_MAX

# ── a shard on a real disk ────────────────────────────────────────────────────────────────────────


@contextmanager
def real(
    tmp_path: Path, *, compiled: bool = True, hear_s: float = COMPLETION_POLL_S
) -> Iterator[tuple[WalHarness, int]]:
    """`hear_s` is TIMEOUT_S where the loop must finish first even on a busy machine."""
    disk = PosixDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr("tidelog.wal.shard.COMPLETION_POLL_S", hear_s)
        disk.make_dir("data")
        bench = WalHarness(disk, file_bytes=1 << 16)
        bench.shard.start()
        try:
            with implementation(compiled=compiled):
                descriptor = bench.shard.enable_async(lambda: None)
            yield bench, descriptor
        finally:
            bench.shard.close()


def begun(bench: WalHarness, data: bytes) -> CommitFuture[int]:
    """Begin a batch. If the writer thread holds the commit lock, it commits the batch: then try another one."""
    while True:
        future = bench.submit([data])
        if bench.shard.begin_commit():
            return future
        future.wait(TIMEOUT_S)


@BOTH
def test_begun_batch_is_finished_when_its_sync_result_is_read(tmp_path: Path, compiled: bool) -> None:
    """E2, G16: commits that are queued meanwhile are the next batch."""
    with real(tmp_path, compiled=compiled, hear_s=TIMEOUT_S) as (bench, descriptor):
        shard = bench.shard
        for number in range(20):
            first = [bench.submit([b"%d/%d" % (number, each)]) for each in range(3)]
            assert shard.begin_commit()
            assert shard.has_inflight_batch
            second = bench.submit([b"%d/later" % number])
            assert not shard.begin_commit(), "one at a time"
            assert not any(future.done for future in first)
            assert select([descriptor], [], [], TIMEOUT_S)[0]
            assert shard.finish_commit()
            assert all(future.done for future in first)
            assert (second.done, shard.queue_length, shard.has_inflight_batch) == (False, 1, False)
            assert not shard.finish_commit(), "the result was read"
            assert second.wait(TIMEOUT_S) == 1
        assert shard.stats.fsyncs == 40
        assert shard.synced_position() == shard.position()
        found = inspect_wal(bench.disk)
    assert len(found.datas) == 80


def test_begun_batch_without_durable_commits_is_done_at_once(tmp_path: Path) -> None:
    with real(tmp_path) as (bench, _):
        future = bench.submit([b"loose"], durable=False)
        assert bench.shard.begin_commit()
        assert future.done
        assert not bench.shard.has_inflight_batch
        assert not bench.shard.begin_commit(), "nothing is queued"
        assert bench.shard.stats.fsyncs == 0


def test_failed_sync_of_the_fsync_thread_trips_the_latch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6. Method: the descriptor to sync is a pipe, which the kernel refuses."""
    ends = os.pipe()
    begin_sync = Writer.begin_sync

    def broken(self: Writer) -> int | None:
        assert begin_sync(self) is not None
        return ends[0]

    with real(tmp_path, hear_s=TIMEOUT_S) as (bench, descriptor):
        assert bench.write(b"before") == 1
        monkeypatch.setattr(Writer, "begin_sync", broken)
        future = bench.submit([b"lost"])
        assert bench.shard.begin_commit()
        later = bench.submit([b"later"])
        assert select([descriptor], [], [], TIMEOUT_S)[0]
        assert bench.shard.finish_commit()
        for each in (future, later):
            with pytest.raises(Latched):
                each.wait(TIMEOUT_S)
        with pytest.raises(Latched):
            bench.submit([b"later"])
        assert bench.shard.is_latched
    for end in ends:
        os.close(end)


def test_close_finishes_the_batch_in_flight(tmp_path: Path) -> None:
    with real(tmp_path) as (bench, _):
        futures = [bench.submit([b"begun"])]
        assert bench.shard.begin_commit()
        futures.append(bench.submit([b"queued"]))
    assert [future.wait() for future in futures] == [1, 1]


def test_thread_that_began_a_batch_can_take_the_commit_lock(tmp_path: Path) -> None:
    with real(tmp_path, hear_s=TIMEOUT_S) as (bench, _):
        over = Event()
        bench.shard.enable_async(over.set)
        future = bench.submit([b"begun"])
        assert bench.shard.begin_commit()
        assert bench.shard.position() == bench.shard.synced_position()
        assert future.done
        assert over.is_set(), "it was finished here, so the loop is notified"
        future = bench.submit([b"again"])
        assert bench.shard.begin_commit()
        assert future.wait(TIMEOUT_S) == 1


def test_writer_thread_finishes_the_batch_of_a_dead_event_loop(tmp_path: Path) -> None:
    """Method: `finish_commit` is not called. Other threads wait for the batch in flight, for a queued commit, for the
    commit lock and for a sync."""
    with real(tmp_path) as (bench, _):
        shard, over = bench.shard, Event()
        shard.enable_async(over.set)
        for number in range(3):
            first = begun(bench, b"begun %d" % number)
            later = bench.submit([b"later %d" % number])
            works: list[Callable[[], object]] = [lambda future=first: future.wait(TIMEOUT_S)]  # type: ignore[misc]
            works += [lambda future=later: future.wait(TIMEOUT_S), shard.position, shard.tick]  # type: ignore[misc]
            run_all(works)
            assert over.wait(TIMEOUT_S)
            over.clear()
        assert all(write.acked for write in bench.history)
        assert inspect_wal(bench.disk).datas == [data for write in bench.history for data in write.datas]


def test_queued_commit_of_a_dead_event_loop_needs_no_other_thread(tmp_path: Path) -> None:
    """Method: as above, but one thread waits alone: no tick, and no other thread takes the commit lock."""
    with real(tmp_path) as (bench, _):
        first = bench.submit([b"begun"])
        assert bench.shard.begin_commit()
        later = bench.submit([b"later"])
        later._block(TIMEOUT_S)
        assert first.done


def test_finishing_for_the_loop_wakes_the_writer_thread_for_queued_commits(tmp_path: Path) -> None:
    """Method: there is no writer thread, so that its wake-up flag can be observed."""
    disk = PosixDisk()
    disk.make_dir(str(tmp_path / "data"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        bench = WalHarness(disk, file_bytes=1 << 16)
        shard = bench.shard
        heard = shard.enable_async(lambda: None)
        for queued in (True, False):
            first = begun(bench, b"begun")
            later = [bench.submit([b"later"])] if queued else []
            select([heard], [], [], TIMEOUT_S)
            assert shard.finish_commit(by_loop=False)
            assert first.done
            assert shard._writer_wanted is queued
            shard.commit_pending()
            assert all(future.done for future in later)
            shard._writer_wanted = False
        shard.close()


def test_writer_thread_commits_the_queue_that_a_loop_left(tmp_path: Path) -> None:
    """Method: the loop finishes its batch, unless the writer thread was first, and does not return."""
    with real(tmp_path) as (bench, _):
        bench.submit([b"begun"])
        assert bench.shard.begin_commit()
        later = bench.submit([b"later"])
        while bench.shard.has_inflight_batch:
            bench.shard.finish_commit()
        later._block(TIMEOUT_S)


def test_writer_thread_takes_over_the_batch_that_is_in_flight_now(tmp_path: Path) -> None:
    """Method: it checks one batch; before it continues, that one is finished and another one is handed over."""
    with real(tmp_path) as (bench, descriptor):
        shard, looks, go = bench.shard, Event(), Event()
        attend = shard._check_inflight

        def slow() -> bool:
            looks.set()
            assert go.wait(TIMEOUT_S)
            return attend()

        shard._check_inflight = slow  # type: ignore[method-assign]
        first = bench.submit([b"first"])
        assert shard.begin_commit()
        assert looks.wait(TIMEOUT_S)
        assert select([descriptor], [], [], TIMEOUT_S)[0]
        assert shard.finish_commit()
        second = bench.submit([b"second"])
        with bench.writer._sync_lock:
            assert shard.begin_commit()
        go.set()
        second._block(TIMEOUT_S)
        assert first.wait() == second.wait() == 1
        assert [write.outcomes for write in bench.history] == [[None], [None]]


@pytest.mark.parametrize("left", [True, False])
def test_close_waits_for_a_batch_that_is_being_begun(
    tmp_path: Path, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: the write of a batch takes until the writer thread has ended, because the shard is being closed."""
    with real(tmp_path) as (bench, _):
        shard, thread = bench.shard, bench.shard._thread
        assert thread is not None
        lay, writes = Writer.write_raw, Event()

        def slow(self: Writer, *args: Any, **kwargs: Any) -> None:
            writes.set()
            thread.join(TIMEOUT_S)
            lay(self, *args, **kwargs)

        monkeypatch.setattr(Writer, "write_raw", slow)
        if left:
            monkeypatch.setattr(Writer, "begin_sync", lambda _: None)
        future = bench.submit([b"begun"])
        beginner = Thread(target=shard.begin_commit)
        beginner.start()
        assert writes.wait(TIMEOUT_S)
        run_all([shard.close, beginner.join])
        assert future.wait() == 1


def test_loop_is_notified_if_on_done_raises_in_the_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: the loop does not finish a batch, and its on_done raises."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with real(tmp_path) as (bench, _):
        over = Event()
        bench.shard.enable_async(over.set)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        bench.submit([b"begun"])
        monkeypatch.setattr(bench, "_on_done", broken)
        assert bench.shard.begin_commit()
        assert over.wait(TIMEOUT_S)
        assert bench.shard.is_latched


def test_begin_commit_wakes_a_sleeping_writer_thread(tmp_path: Path) -> None:
    """Method: the writer thread has seen no batch for a while and waits without a timeout."""
    with real(tmp_path) as (bench, _):
        shard = bench.shard
        for _ in range(2):
            until = monotonic() + TIMEOUT_S
            while not shard._writer_is_asleep:
                assert monotonic() < until
            future = bench.submit([b"begun"])
            assert shard.begin_commit()
            future._block(TIMEOUT_S)
            assert future.done


def test_loop_ticks_and_nowait_writes_together_make_progress(tmp_path: Path) -> None:
    """G15, G19. Method: all at once on a real disk: the loop meets running syncs of ticks, and the writer thread is
    woken for commits that are queued while the commit lock is held."""
    with real(tmp_path) as (bench, descriptor):
        shard, done = bench.shard, Event()

        def drive() -> None:
            try:
                for number in range(300):
                    future = bench.submit([b"%d" % number])
                    while not future.done:
                        shard.begin_commit()
                        if select([descriptor], [], [], 0.001)[0]:
                            shard.finish_commit()
            finally:
                done.set()

        def tick() -> None:
            while not done.is_set():
                shard.tick()

        def send() -> None:
            while not done.wait(0.0005):
                bench.submit([b"loose"], durable=False, nowait=True)

        run_all([drive, tick, send])
        assert sum(data != b"loose" for data in inspect_wal(bench.disk).datas) == 300


# ── a shard whose writer thread finishes batches ───────────────────────────────────────────────


class Loop:
    """A shard on a simulated disk, which only the writer thread can sync, and the threads that synced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.disk = SimDisk()
        self.disk.make_dir("data")
        self.synced_by: list[int] = []
        self.over = Event()
        sync = SimFile.sync

        def spied(file: SimFile) -> None:
            self.synced_by.append(get_ident())
            sync(file)

        patch.setattr(SimFile, "sync", spied)
        self.bench = WalHarness(self.disk)
        self.shard = self.bench.shard
        self.shard.start()
        self.shard.enable_async(self.over.set)
        self.synced_by.clear()

    def ended(self) -> None:
        assert self.over.wait(TIMEOUT_S), "the loop was not notified"
        self.over.clear()
        assert not self.shard.has_inflight_batch
        assert get_ident() not in self.synced_by

    def outcome_of(self, future: CommitFuture[int]) -> int | Error:
        try:
            return future.wait(TIMEOUT_S)
        except Error as error:
            return error


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(monkeypatch)
    yield made
    made.shard.close()


def test_writer_thread_syncs_a_batch_that_was_handed_over(loop: Loop) -> None:
    for number in range(10):
        future = loop.bench.submit([b"%d" % number])
        assert loop.shard.begin_commit()
        loop.ended()
        assert future.done
    assert len(loop.synced_by) == 10
    assert inspect_wal(loop.disk.crash_image("none")).datas == [b"%d" % number for number in range(10)]


def test_writer_thread_rolls_back_a_write_on_a_full_disk(loop: Loop) -> None:
    """D6: the rollback needs a sync, which must not block the loop."""
    loop.bench.write(b"before")
    loop.synced_by.clear()
    loop.disk.fail("write", error=errno.ENOSPC, partial=60)
    future = loop.bench.submit([b"much" * 20, b"more" * 20])
    assert loop.shard.begin_commit()
    later = loop.bench.submit([b"later"])
    loop.ended()
    assert isinstance(loop.outcome_of(future), DiskFull)
    assert loop.outcome_of(later) == 1
    assert len(loop.synced_by) >= 1
    assert inspect_wal(loop.disk.crash_image("none")).datas == [b"before", b"later"]


@pytest.mark.parametrize("much", [b"x" * 1500, b"y" * (1 << 20)], ids=["a new file", "much to write"])
def test_large_batch_is_left_to_the_writer_thread_in_order(loop: Loop, much: bytes) -> None:
    loop.bench.write(b"z" * 1000)
    loop.synced_by.clear()
    futures = [loop.bench.submit([data]) for data in (b"before", much, b"later")]
    assert not loop.shard.begin_commit()
    assert [future.wait(TIMEOUT_S) for future in futures] == [1, 1, 1]
    assert inspect_wal(loop.disk).datas == [b"z" * 1000, b"before", much, b"later"]


def test_begin_commit_does_not_wait_for_a_running_sync(tmp_path: Path) -> None:
    """Method: holding the sync lock simulates a running sync."""
    with real(tmp_path) as (bench, _):
        over = Event()
        bench.shard.enable_async(over.set)
        with bench.writer._sync_lock:
            future = bench.submit([b"begun"])
            assert bench.shard.begin_commit()
            assert bench.shard.has_inflight_batch
            assert not future.done
        assert over.wait(TIMEOUT_S)
        assert future.done


def test_batch_handed_over_during_a_commit_window_is_finished(loop: Loop) -> None:
    """Method: it was woken and waits for more commits when the loop begins a batch and hands it over."""
    gathers, go = Event(), Event()

    def window_ms() -> float:
        gathers.set()
        assert go.wait(TIMEOUT_S)
        return 1.0

    loop.shard.window_ms = window_ms
    futures = [loop.bench.submit([b"sent for"], nowait=True)]
    assert gathers.wait(TIMEOUT_S)
    assert loop.shard.begin_commit()
    futures.append(loop.bench.submit([b"later it"]))
    go.set()
    assert [future.wait(TIMEOUT_S) for future in futures] == [1, 1]


def test_begin_commit_does_nothing_once_closed(loop: Loop) -> None:
    future = loop.bench.submit([b"queued"])
    with loop.shard.lock:
        loop.shard._is_closed = True
    assert not loop.shard.begin_commit()
    assert future.wait(TIMEOUT_S) == 1


def test_prepended_frames_fit_their_limit() -> None:
    """A disk-class write to a routed topic may have both; a loop that did not count them would rotate."""
    many = (1 << 63) - 1
    forward = control_frames.Forward(
        event=control_frames.ForwardEvent.REACHED, source_id=1 << 31, first=many, last=many, dest_head=many
    )
    outcome_of: list[control_frames.Body] = [control_frames.HeadWatermark(many), forward]
    frames = [frame.encode(body.KIND, topic_id=1, ts_ms=1, data=control_frames.encode(body)) for body in outcome_of]
    assert sum(map(len, frames)) <= PREPENDED_BYTES_MAX


def test_failed_begin_reports_the_error_and_releases_the_commit_lock(loop: Loop) -> None:
    """Method: the latch closes between the queue and the write."""
    future = loop.bench.submit([b"x"])
    loop.bench.latch.trip(OSError(errno.EIO, "the disk"), "testing")
    assert loop.shard.begin_commit()
    assert isinstance(loop.outcome_of(future), Latched)
    assert not loop.shard.has_inflight_batch
    assert loop.shard.position() is not None


def test_unexpected_exception_in_begin_is_raised_and_fails_all_commits(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: the write raises what no disk raises."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    future, later = loop.bench.submit([b"x"]), loop.bench.submit([b"y"])
    monkeypatch.setattr(Writer, "write_raw", broken)
    with pytest.raises(ZeroDivisionError):
        loop.shard.begin_commit()
    assert isinstance(loop.outcome_of(future), Latched)
    assert isinstance(loop.outcome_of(later), Latched)
    assert not loop.shard.has_inflight_batch
