"""Group commit with real threads: which thread commits, which is woken, and that none waits for ever (E2, G16–G21).

No test here waits for time to pass: where an order matters the disk blocks a thread until the others
are far enough. `join` and `wait` have timeouts only so that a defect fails and does not hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event, Lock, Thread, current_thread
from threading import enumerate as all_threads
from typing import Any

import pytest
from tests.unit.wal.harness import TIMEOUT_S, WalHarness, append, inspect_wal, run_all

from tidelog.clock import SystemClock
from tidelog.disk.durability import WriteLatch
from tidelog.disk.posix import PosixDisk
from tidelog.errors import Closed, Error, InDoubt, Latched
from tidelog.testing import ManualClock, PowerOff, SimDisk
from tidelog.wal import Commit, CommitFuture, Shard, Writer, replay_shard


@contextmanager
def started(bench: WalHarness) -> Iterator[WalHarness]:
    bench.shard.start()
    try:
        yield bench
    finally:
        bench.shard.close()


class HeldOperation:
    """Blocks the thread that performs the disk operation of this number until it is released."""

    def __init__(self, disk: SimDisk, operation: int) -> None:
        self.reached, self._released, self._operation = Event(), Event(), operation
        disk.on_op = self._hold

    def _hold(self, operation: int) -> None:
        if operation == self._operation:
            self.reached.set()
            assert self._released.wait(TIMEOUT_S)

    def release(self) -> None:
        self._released.set()


def hold_first_sync(disk: SimDisk) -> HeldOperation:
    """The first batch is one write and one sync: the sync is the second operation from now."""
    return HeldOperation(disk, disk.op_count + 2)


def test_single_durable_write_is_committed_by_its_own_thread_without_a_window() -> None:
    """G16, E2. Method: a writer thread and a commit window exist; neither is used."""
    asked: list[float] = []

    def window_ms() -> float:
        asked.append(10.0)
        return 10.0

    disk = SimDisk()
    bench = WalHarness(disk)
    shard = Shard(bench.writer, clock=ManualClock(), window_ms=window_ms)
    shard.start()
    committers: list[Thread] = []
    for number in range(20):
        future: CommitFuture[int] = CommitFuture(shard)

        def done(error: Error | None, future: CommitFuture[int] = future, number: int = number) -> None:
            committers.append(current_thread())
            future.set_result(error or number)

        shard.submit(Commit([append(b"a")], frames=1, durable=True, on_done=done))
        assert future.wait() == number
    assert set(committers) == {current_thread()}
    assert asked == []
    assert shard.stats.fsyncs == shard.stats.batches == 20
    shard.close()


def test_queue_fills_while_a_batch_syncs() -> None:
    """G15, G17, E2. Method: the first sync is held until all others are queued."""
    disk = SimDisk()
    with started(WalHarness(disk)) as bench:
        held = hold_first_sync(disk)
        first = bench.submit([b"first"])
        leader = Thread(target=first.wait)
        leader.start()
        assert held.reached.wait(TIMEOUT_S)
        others = [bench.submit([b"%d" % number]) for number in range(63)]
        held.release()
        assert [future.wait(TIMEOUT_S) for future in others] == [1] * 63
        leader.join(TIMEOUT_S)
        assert not leader.is_alive()
        stats = bench.shard.stats
        assert (stats.batches, stats.fsyncs, stats.frames) == (2, 2, 64)
    assert inspect_wal(disk.crash_image("none")).datas == [b"first", *(b"%d" % number for number in range(63))]


def test_sixty_four_writers_share_syncs() -> None:
    """G17, G19. Method: real threads; the first sync is held until every thread has its first write queued."""
    disk = SimDisk()
    with started(WalHarness(disk, file_bytes=1 << 16)) as bench:
        held = hold_first_sync(disk)
        queued, guard = 0, Lock()

        def write(name: int) -> None:
            nonlocal queued
            for number in range(10):
                future = bench.submit([b"%d/%d" % (name, number)])
                with guard:
                    queued += 1
                    if queued == 64:
                        held.release()
                assert future.wait(TIMEOUT_S) == 1

        run_all([lambda name=name: write(name) for name in range(64)])  # type: ignore[misc]
        stats = bench.shard.stats
        assert stats.frames == 640
        assert stats.fsyncs == stats.batches < 640 - 60
    datas = inspect_wal(disk.crash_image("none")).datas
    for name in range(64):
        assert [data for data in datas if data.startswith(b"%d/" % name)] == [b"%d/%d" % (name, n) for n in range(10)]


def test_writers_on_a_real_disk_lose_nothing(tmp_path: Path) -> None:
    """G14, G17, G19. Method: threads on the machine's own disk, with rotations, durable or not, waited for or not."""
    writer = Writer(PosixDisk(), str(tmp_path / "wal"), file_number=1, file_bytes=1 << 14, latch=WriteLatch("wal"))
    shard = Shard(writer, clock=SystemClock(), queue_max=1 << 16, window_ms=lambda: 5.0)
    shard.start()
    outcomes: list[Error | None] = []

    def write(name: int) -> None:
        futures: list[CommitFuture[None]] = []
        for number in range(100):
            future: CommitFuture[None] = CommitFuture(shard)

            def done(error: Error | None, future: CommitFuture[None] = future) -> None:
                outcomes.append(error)
                future.set_result(error)

            commit = Commit([append(b"%d/%d" % (name, number))], frames=1, durable=number % 3 == 0, on_done=done)
            shard.submit(commit, nowait=number % 2 == 1)
            if number % 2:
                futures.append(future)
            else:
                future.wait(TIMEOUT_S)
        for future in futures:
            future.wait(TIMEOUT_S)

    run_all([lambda name=name: write(name) for name in range(16)])  # type: ignore[misc]
    shard.close()
    assert outcomes == [None] * 1600
    assert shard.stats.frames == 1600
    assert shard.stats.fsyncs <= shard.stats.batches + 1
    replay = replay_shard(PosixDisk(), str(tmp_path / "wal"))
    frames = [
        (int(kind), window.buf[at + 38 : at + 38 + n])
        for window in replay
        for at, n, kind in zip(window.frame_pos, window.headers["data_len"], window.headers["kind"], strict=True)
    ]
    datas = [data for kind, data in frames if kind == 1]
    assert len(datas) == 1600 < len(frames), "and marks"
    assert (replay.torn_tail, replay.losses, replay.next_file_number) == (None, [], len(frames) + 1)
    for name in range(16):
        assert [data for data in datas if data.startswith(b"%d/" % name)] == [b"%d/%d" % (name, n) for n in range(100)]


def test_nowait_write_is_committed_by_the_writer_thread() -> None:
    disk = SimDisk()
    with started(WalHarness(disk)) as bench:
        completed = Event()
        committer: list[Thread] = []

        def done(_: Error | None) -> None:
            committer.append(current_thread())
            completed.set()

        bench.shard.submit(Commit([append(b"a")], frames=1, durable=False, on_done=done), nowait=True)
        assert completed.wait(TIMEOUT_S)
        assert committer == [bench.shard._thread]


def test_done_callback_wakes_the_writer_thread() -> None:
    disk = SimDisk()
    with started(WalHarness(disk)) as bench:
        completed = Event()
        bench.submit([b"a"]).add_done_callback(lambda _: completed.set())
        assert completed.wait(TIMEOUT_S)


def test_writer_thread_waits_for_more_commits_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """G17. Method: five writes are queued while the thread asks for the window; then it writes one batch."""
    disk = SimDisk()
    bench = WalHarness(disk)
    asked, go_on = Event(), Event()

    def window_ms() -> float:
        asked.set()
        assert go_on.wait(TIMEOUT_S)
        return 10.0

    shard = Shard(bench.writer, clock=ManualClock(), window_ms=window_ms)
    pauses: list[float] = []
    real = shard._pause

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        real(seconds)

    monkeypatch.setattr(shard, "_pause", pause)
    shard.start()
    completed = Event()
    shard.submit(Commit([append(b"0")], frames=1, durable=True), nowait=True)
    assert asked.wait(TIMEOUT_S)
    for number in range(1, 5):
        shard.submit(Commit([append(b"%d" % number)], frames=1, durable=True), nowait=True)
    shard.submit(Commit([append(b"5")], frames=1, durable=True, on_done=lambda _: completed.set()), nowait=True)
    go_on.set()
    assert completed.wait(TIMEOUT_S)
    assert (shard.stats.batches, shard.stats.fsyncs) == (1, 1)
    assert pauses == [0.00025], "one slice, which brought nothing"
    shard.close()


@pytest.mark.parametrize(("read", "of_writer"), [("position", "position"), ("synced_position", "synced")])
def test_release_of_the_commit_lock_wakes_the_writer_thread_for_queued_commits(
    read: str, of_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G19. Method: a caller finds the commit lock held by a thread that does not commit, and blocks."""
    disk = SimDisk()
    parking = Event()
    real = CommitFuture._block

    def park(self: CommitFuture[Any], timeout: float | None) -> None:
        parking.set()
        real(self, timeout)

    monkeypatch.setattr(CommitFuture, "_block", park)
    with started(WalHarness(disk)) as bench:
        bench.write(b"before", durable=False)
        shard = bench.shard
        waiter = Thread(target=lambda: bench.write(b"a"), daemon=True)

        def meanwhile(*_: object) -> object:
            if not waiter.ident:
                waiter.start()
                assert parking.wait(TIMEOUT_S)
            return None

        monkeypatch.setattr(type(bench.writer), of_writer, property(meanwhile))
        getattr(shard, read)()
        monkeypatch.undo()
        waiter.join(TIMEOUT_S)
        assert not waiter.is_alive(), "the blocked caller was not woken"


def test_background_sync_does_not_block_writes_that_need_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """G22. Method: while a tick syncs, a write of the disk class comes through; and a durable one, whose own sync has
    to wait, is not acknowledged when the tick's fails: the kernel reports the error only once."""
    disk = SimDisk()
    entered, go_on, asked = Event(), Event(), Event()
    with started(WalHarness(disk)) as bench:
        bench.write(b"before", durable=False)

        def broken(*_: object) -> None:
            entered.set()
            assert go_on.wait(TIMEOUT_S)
            raise bench.writer.latch.trip(OSError(5, "a write-back failed"), "syncing")

        monkeypatch.setattr(bench.writer.latch, "sync_or_trip", broken)
        ticker = Thread(target=lambda: _swallow(bench.shard.tick), daemon=True)
        ticker.start()
        assert entered.wait(TIMEOUT_S)
        bench.write(b"meanwhile", durable=False)
        real = bench.writer.sync

        def sync() -> bool:
            asked.set()
            return real()

        monkeypatch.setattr(bench.writer, "sync", sync)
        completed: list[Error | None] = []
        waiter = Thread(target=lambda: completed.append(_swallow(lambda: bench.write(b"durable"))), daemon=True)
        waiter.start()
        assert asked.wait(TIMEOUT_S)
        go_on.set()
        waiter.join(TIMEOUT_S)
        ticker.join(TIMEOUT_S)
        assert [type(error) for error in completed] == [Latched]
        with pytest.raises(Latched, match="may not survive a power cut"):
            bench.shard.close()


def _swallow(work: Callable[[], object]) -> Error | None:
    try:
        work()
    except Error as error:
        return error
    return None


def test_writer_thread_commits_for_a_caller_that_timed_out() -> None:
    """P11. Method: it gives up while another's sync is held; its write is committed all the same."""
    disk = SimDisk()
    with started(WalHarness(disk)) as bench:
        held = hold_first_sync(disk)
        first = bench.submit([b"first"])
        leader = Thread(target=first.wait)
        leader.start()
        assert held.reached.wait(TIMEOUT_S)
        future = bench.submit([b"second"])
        with pytest.raises(InDoubt):
            future.wait(0.001)
        held.release()
        leader.join(TIMEOUT_S)
        assert future.wait(TIMEOUT_S) == 1


def test_without_a_writer_thread_a_caller_waits_for_the_commit_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G19. Method: the second caller finds the commit lock held by a thread that does not check the queue again."""
    disk = SimDisk()
    bench = WalHarness(disk)
    taken = Event()

    class Turn:
        def __init__(self) -> None:
            self._lock = Lock()
            self.release = self._lock.release

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if self._lock.acquire(False):
                return True
            taken.set()
            return blocking and self._lock.acquire(True, timeout)

    def park(self: CommitFuture[Any], timeout: float | None) -> None:
        raise AssertionError(f"{self} blocks for {timeout} and no thread will wake it")

    monkeypatch.setattr(bench.shard.commits, "commit_lock", Turn())
    monkeypatch.setattr(CommitFuture, "_block", park)
    held = hold_first_sync(disk)
    first = bench.submit([b"first"])
    leader = Thread(target=first.wait)
    leader.start()
    assert held.reached.wait(TIMEOUT_S)

    def let_go() -> None:
        assert taken.wait(TIMEOUT_S)
        held.release()

    run_all([lambda: bench.write(b"second"), let_go])
    leader.join(TIMEOUT_S)
    assert inspect_wal(disk.crash_image("none")).datas == [b"first", b"second"]


def test_threads_without_a_writer_thread_commit_for_each_other() -> None:
    """Method: no writer thread; the second caller waits for the commit lock, not for a wake-up."""
    disk = SimDisk()
    bench = WalHarness(disk, file_bytes=1 << 16)
    held = hold_first_sync(disk)
    queued, guard = 0, Lock()

    def write(name: int) -> None:
        nonlocal queued
        for number in range(20):
            future = bench.submit([b"%d/%d" % (name, number)])
            with guard:
                queued += 1
                if queued == 8:
                    held.release()
            assert future.wait(TIMEOUT_S) == 1

    run_all([lambda name=name: write(name) for name in range(8)])  # type: ignore[misc]
    assert bench.shard.stats.frames == 160
    assert bench.shard.stats.fsyncs < 160
    bench.shard.close()


@pytest.mark.parametrize("accepted_first", range(20))
def test_a_submit_that_races_with_close_is_refused_or_committed(accepted_first: int) -> None:
    """G19, G20, G21."""
    disk = SimDisk()
    bench = WalHarness(disk, file_bytes=1 << 16)
    bench.shard.start()
    ready, enough = Barrier(5), Event()
    accepted: list[bytes] = []
    futures: list[CommitFuture[int]] = []

    def write(name: int) -> None:
        ready.wait(TIMEOUT_S)
        number = 0
        while True:
            data = b"%d/%d" % (name, number)
            if len(accepted) >= accepted_first:
                enough.set()
            try:
                future = bench.submit([data], durable=number % 2 == 0, nowait=number % 3 == 0)
            except Closed:
                return
            accepted.append(data)
            futures.append(future)
            if number % 3 == 1:
                future.wait(TIMEOUT_S)
            number += 1

    def close() -> None:
        ready.wait(TIMEOUT_S)
        assert enough.wait(TIMEOUT_S)
        bench.shard.close()

    run_all([*(lambda name=name: write(name) for name in range(4)), close])
    assert [future.wait(0) for future in futures] == [1] * len(futures)
    assert sorted(inspect_wal(disk.crash_image("none")).datas) == sorted(accepted)
    assert [len(one.outcomes) for one in bench.history] == [1] * len(bench.history)


def test_a_failed_sync_wakes_every_waiter() -> None:
    """G19, G22. Method: threads sleep on futures of the batch that fails and of the next one."""
    disk = SimDisk()
    with started(WalHarness(disk, batch_frames=4)) as bench:
        held = hold_first_sync(disk)
        disk.fail_sync("dropped")
        futures = [bench.submit([b"%d" % number]) for number in range(4)]
        errors: list[Error] = []

        def wait(future: CommitFuture[int]) -> None:
            with pytest.raises(Latched) as caught:
                future.wait(TIMEOUT_S)
            errors.append(caught.value)

        threads = [Thread(target=wait, args=(future,)) for future in futures]
        for thread in threads:
            thread.start()
        assert held.reached.wait(TIMEOUT_S)
        late = [bench.submit([b"late %d" % number]) for number in range(3)]
        threads += [Thread(target=wait, args=(future,)) for future in late]
        for thread in threads[4:]:
            thread.start()
        held.release()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert len(errors) == 7
        with pytest.raises(Latched):
            bench.submit([b"later still"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_future_has_an_outcome_after_the_writer_thread_died() -> None:
    """G19, P10. Method: the power fails under the writer thread; the thread ends, and every future has its outcome."""
    disk = SimDisk()
    bench = WalHarness(disk, batch_frames=2)
    bench.shard.start()
    with bench.shard._hold_commit_lock():
        futures = [bench.submit([b"%d" % number], nowait=True) for number in range(5)]
        completed = Event()
        futures[-1].add_done_callback(lambda _: completed.set())
        disk.cut_power_at(disk.op_count + 2)
    assert completed.wait(TIMEOUT_S)
    for future in futures:
        with pytest.raises(Latched, match="the power failed"):
            future.wait(TIMEOUT_S)
    with pytest.raises(Latched):
        bench.submit([b"late"])
    with pytest.raises(PowerOff):
        bench.shard.close()
    thread = bench.shard._thread
    assert thread is not None
    assert not thread.is_alive()


def test_close_stops_the_writer_thread() -> None:
    before = set(all_threads())
    bench = WalHarness(SimDisk())
    bench.shard.start()
    bench.shard.start()
    assert bench.shard.has_writer_thread
    assert len(set(all_threads()) - before) == 1
    thread = bench.shard._thread
    assert thread is not None
    assert thread.daemon, "a program that dies without closing must be able to; the engine closes at exit"
    run_all([bench.shard.close] * 4)
    assert set(all_threads()) == before
    bench.shard.start()
    assert set(all_threads()) == before, "a closed shard has no thread"
