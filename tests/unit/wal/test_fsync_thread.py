"""Syncs beside an event loop: what was begun is told of once it was synced, whoever does that, and nothing waits.

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
from tidelog.wal.group_commit import COMPLETION_POLL_S, PREPENDED_BYTES_MAX

# ── a shard on a real disk ────────────────────────────────────────────────────────────────────────


@contextmanager
def real(
    tmp_path: Path, *, compiled: bool = True, hear_s: float = COMPLETION_POLL_S
) -> Iterator[tuple[WalHarness, int]]:
    """Where the loop is to come first on a busy machine too, `hear_s` is LIMIT_S."""
    disk = PosixDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr("tidelog.wal.group_commit.COMPLETION_POLL_S", hear_s)
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
    """One that was begun. Where the writer thread has the turn just then, it commits it: then it is the next one."""
    while True:
        token = bench.submit([data])
        if bench.shard.begin_commit():
            return token
        token.wait(TIMEOUT_S)


@BOTH
def test_what_was_begun_is_told_of_when_its_sync_is_heard(tmp_path: Path, compiled: bool) -> None:
    """E2, G16: and what is queued meanwhile is the next batch."""
    with real(tmp_path, compiled=compiled, hear_s=TIMEOUT_S) as (bench, descriptor):
        shard = bench.shard
        for number in range(20):
            first = [bench.submit([b"%d/%d" % (number, each)]) for each in range(3)]
            assert shard.begin_commit()
            assert shard.has_inflight_batch
            second = bench.submit([b"%d/later" % number])
            assert not shard.begin_commit(), "one at a time"
            assert not any(token.done for token in first)
            assert select([descriptor], [], [], TIMEOUT_S)[0]
            assert shard.finish_commit()
            assert all(token.done for token in first)
            assert (second.done, shard.queue_length, shard.has_inflight_batch) == (False, 1, False)
            assert not shard.finish_commit(), "it was heard"
            assert second.wait(TIMEOUT_S) == 1
        assert shard.stats.fsyncs == 40
        assert shard.synced_position() == shard.position()
        found = inspect_wal(bench.disk)
    assert len(found.datas) == 80


def test_what_needs_no_sync_is_done_at_once(tmp_path: Path) -> None:
    with real(tmp_path) as (bench, _):
        token = bench.submit([b"loose"], durable=False)
        assert bench.shard.begin_commit()
        assert token.done
        assert not bench.shard.has_inflight_batch
        assert not bench.shard.begin_commit(), "nothing is queued"
        assert bench.shard.stats.fsyncs == 0


def test_a_sync_that_fails_beside_latches_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6. Method: what is handed to be synced is a pipe, which the kernel refuses."""
    ends = os.pipe()
    begin_sync = Writer.begin_sync

    def broken(self: Writer) -> int | None:
        assert begin_sync(self) is not None
        return ends[0]

    with real(tmp_path, hear_s=TIMEOUT_S) as (bench, descriptor):
        assert bench.write(b"before") == 1
        monkeypatch.setattr(Writer, "begin_sync", broken)
        token = bench.submit([b"lost"])
        assert bench.shard.begin_commit()
        behind = bench.submit([b"behind"])
        assert select([descriptor], [], [], TIMEOUT_S)[0]
        assert bench.shard.finish_commit()
        for each in (token, behind):
            with pytest.raises(Latched):
                each.wait(TIMEOUT_S)
        with pytest.raises(Latched):
            bench.submit([b"later"])
        assert bench.shard.is_latched
    for end in ends:
        os.close(end)


def test_close_ends_what_was_begun_where_nobody_listens_any_more(tmp_path: Path) -> None:
    with real(tmp_path) as (bench, _):
        tokens = [bench.submit([b"begun"])]
        assert bench.shard.begin_commit()
        tokens.append(bench.submit([b"queued"]))
    assert [token.wait() for token in tokens] == [1, 1]


def test_who_began_something_and_asks_for_the_turn_does_not_wait_for_itself(tmp_path: Path) -> None:
    with real(tmp_path, hear_s=TIMEOUT_S) as (bench, _):
        over = Event()
        bench.shard.enable_async(over.set)
        token = bench.submit([b"begun"])
        assert bench.shard.begin_commit()
        assert bench.shard.position() == bench.shard.synced_position()
        assert token.done
        assert over.is_set(), "nobody else says so: it was heard here"
        token = bench.submit([b"again"])
        assert bench.shard.begin_commit()
        assert token.wait(TIMEOUT_S) == 1


def test_a_loop_that_does_not_come_back_is_not_waited_for(tmp_path: Path) -> None:
    """Method: nobody calls `finish`. Others wait for what was begun, for what is queued behind it, for the turn and for
    a sync."""
    with real(tmp_path) as (bench, _):
        shard, over = bench.shard, Event()
        shard.enable_async(over.set)
        for number in range(3):
            first = begun(bench, b"begun %d" % number)
            behind = bench.submit([b"behind %d" % number])
            works: list[Callable[[], object]] = [lambda token=first: token.wait(TIMEOUT_S)]  # type: ignore[misc]
            works += [lambda token=behind: token.wait(TIMEOUT_S), shard.position, shard.tick]  # type: ignore[misc]
            run_all(works)
            assert over.wait(TIMEOUT_S)
            over.clear()
        assert all(write.acked for write in bench.history)
        assert inspect_wal(bench.disk).datas == [data for write in bench.history for data in write.datas]


def test_what_is_queued_behind_it_needs_nobody_else_either(tmp_path: Path) -> None:
    """Method: as above, but whoever waits is alone: no ticker and nobody who asks for the turn passes by."""
    with real(tmp_path) as (bench, _):
        first = bench.submit([b"begun"])
        assert bench.shard.begin_commit()
        behind = bench.submit([b"behind"])
        behind._block(TIMEOUT_S)
        assert first.done


def test_the_writer_thread_is_sent_for_what_is_queued_by_who_ends_what_another_began(tmp_path: Path) -> None:
    """Method: there is no writer thread, so that what it is sent for stays to be seen."""
    disk = PosixDisk()
    disk.make_dir(str(tmp_path / "data"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        bench = WalHarness(disk, file_bytes=1 << 16)
        shard = bench.shard
        heard = shard.enable_async(lambda: None)
        for queued in (True, False):
            first = begun(bench, b"begun")
            behind = [bench.submit([b"behind"])] if queued else []
            select([heard], [], [], TIMEOUT_S)
            assert shard.finish_commit(by_loop=False)
            assert first.done
            assert shard._writer_wanted is queued
            shard.commit_pending()
            assert all(token.done for token in behind)
            shard._writer_wanted = False
        shard.close()


def test_nobody_has_to_come_for_what_is_queued_once_a_loop_heard_the_last(tmp_path: Path) -> None:
    """Method: the loop ends what it began, unless the writer thread was before it, and does not come again."""
    with real(tmp_path) as (bench, _):
        bench.submit([b"begun"])
        assert bench.shard.begin_commit()
        behind = bench.submit([b"behind"])
        while bench.shard.has_inflight_batch:
            bench.shard.finish_commit()
        behind._block(TIMEOUT_S)


def test_the_writer_thread_ends_what_was_left_to_it_and_not_what_it_saw_before(tmp_path: Path) -> None:
    """Method: it looks at one batch, and before it goes on that one is ended and another one is left to it."""
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
def test_close_sees_what_is_being_begun(tmp_path: Path, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the write of a batch takes until the writer thread has ended, because somebody closes."""
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
        token = bench.submit([b"begun"])
        beginner = Thread(target=shard.begin_commit)
        beginner.start()
        assert writes.wait(TIMEOUT_S)
        run_all([shard.close, beginner.join])
        assert token.wait() == 1


def test_what_breaks_in_the_writer_thread_is_said_to_be_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: nobody comes for a batch, and telling it raises."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with real(tmp_path) as (bench, _):
        over = Event()
        bench.shard.enable_async(over.set)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        bench.submit([b"begun"])
        monkeypatch.setattr(bench, "_told", broken)
        assert bench.shard.begin_commit()
        assert over.wait(TIMEOUT_S)
        assert bench.shard.is_latched


def test_one_that_sleeps_is_woken_for_what_was_begun(tmp_path: Path) -> None:
    """Method: the writer thread has seen nothing begun for a while, and sleeps until it is woken."""
    with real(tmp_path) as (bench, _):
        shard = bench.shard
        for _ in range(2):
            until = monotonic() + TIMEOUT_S
            while not shard._writer_is_asleep:
                assert monotonic() < until
            token = bench.submit([b"begun"])
            assert shard.begin_commit()
            token._block(TIMEOUT_S)
            assert token.done


def test_a_loop_a_ticker_and_writers_that_do_not_wait_come_to_an_end(tmp_path: Path) -> None:
    """G15, G19. Method: all at once on a real disk: the loop finds syncs of the ticker under way, and the writer thread
    is sent for what others queue while the turn is kept."""
    with real(tmp_path) as (bench, descriptor):
        shard, done = bench.shard, Event()

        def drive() -> None:
            try:
                for number in range(300):
                    token = bench.submit([b"%d" % number])
                    while not token.done:
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


# ── a shard whose writer thread ends what was begun ───────────────────────────────────────────────


class Loop:
    """A shard on a simulated disk, for which only the writer thread can sync, and who synced."""

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
        assert self.over.wait(TIMEOUT_S), "nobody said that it is over"
        self.over.clear()
        assert not self.shard.has_inflight_batch
        assert get_ident() not in self.synced_by

    def told(self, token: CommitFuture[int]) -> int | Error:
        try:
            return token.wait(TIMEOUT_S)
        except Error as error:
            return error


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(monkeypatch)
    yield made
    made.shard.close()


def test_the_writer_thread_syncs_what_nobody_else_can(loop: Loop) -> None:
    for number in range(10):
        token = loop.bench.submit([b"%d" % number])
        assert loop.shard.begin_commit()
        loop.ended()
        assert token.done
    assert len(loop.synced_by) == 10
    assert inspect_wal(loop.disk.crash_image("none")).datas == [b"%d" % number for number in range(10)]


def test_a_write_that_finds_no_room_is_taken_back_by_the_writer_thread(loop: Loop) -> None:
    """D6: that takes a sync, which is not the loop's either."""
    loop.bench.write(b"before")
    loop.synced_by.clear()
    loop.disk.fail("write", error=errno.ENOSPC, partial=60)
    token = loop.bench.submit([b"much" * 20, b"more" * 20])
    assert loop.shard.begin_commit()
    behind = loop.bench.submit([b"behind"])
    loop.ended()
    assert isinstance(loop.told(token), DiskFull)
    assert loop.told(behind) == 1
    assert len(loop.synced_by) >= 1
    assert inspect_wal(loop.disk.crash_image("none")).datas == [b"before", b"behind"]


@pytest.mark.parametrize("much", [b"x" * 1500, b"y" * (1 << 20)], ids=["a new file", "much to write"])
def test_what_takes_long_is_left_to_the_writer_thread_in_its_order(loop: Loop, much: bytes) -> None:
    loop.bench.write(b"z" * 1000)
    loop.synced_by.clear()
    tokens = [loop.bench.submit([data]) for data in (b"before", much, b"behind")]
    assert not loop.shard.begin_commit()
    assert [token.wait(TIMEOUT_S) for token in tokens] == [1, 1, 1]
    assert inspect_wal(loop.disk).datas == [b"z" * 1000, b"before", much, b"behind"]


def test_nothing_waits_for_a_sync_that_another_thread_runs(tmp_path: Path) -> None:
    """Method: a sync is under way for as long as the lock of syncs is held."""
    with real(tmp_path) as (bench, _):
        over = Event()
        bench.shard.enable_async(over.set)
        with bench.writer._sync_lock:
            token = bench.submit([b"begun"])
            assert bench.shard.begin_commit()
            assert bench.shard.has_inflight_batch
            assert not token.done
        assert over.wait(TIMEOUT_S)
        assert token.done


def test_what_is_left_to_a_writer_thread_that_gathers_is_ended_all_the_same(loop: Loop) -> None:
    """Method: it was sent for something and is about to gather when the loop takes the turn and leaves it to it."""
    gathers, go = Event(), Event()

    def window_ms() -> float:
        gathers.set()
        assert go.wait(TIMEOUT_S)
        return 1.0

    loop.shard.window_ms = window_ms
    tokens = [loop.bench.submit([b"sent for"], nowait=True)]
    assert gathers.wait(TIMEOUT_S)
    assert loop.shard.begin_commit()
    tokens.append(loop.bench.submit([b"behind it"]))
    go.set()
    assert [token.wait(TIMEOUT_S) for token in tokens] == [1, 1]


def test_nothing_is_begun_once_it_is_closed(loop: Loop) -> None:
    token = loop.bench.submit([b"queued"])
    with loop.shard.lock:
        loop.shard._is_closed = True
    assert not loop.shard.begin_commit()
    assert token.wait(TIMEOUT_S) == 1


def test_what_may_be_put_in_front_of_a_commit_is_counted() -> None:
    """A disk-class write to a routed topic may carry both; a loop that did not count them would rotate."""
    many = (1 << 63) - 1
    forward = control_frames.Forward(
        event=control_frames.ForwardEvent.REACHED, source_id=1 << 31, first=many, last=many, dest_head=many
    )
    told: list[control_frames.Body] = [control_frames.HeadWatermark(many), forward]
    frames = [frame.encode(body.KIND, topic_id=1, ts_ms=1, data=control_frames.encode(body)) for body in told]
    assert sum(map(len, frames)) <= PREPENDED_BYTES_MAX


def test_an_error_of_the_batch_itself_is_told_and_the_turn_is_free(loop: Loop) -> None:
    """Method: the latch closes between the queue and the write."""
    token = loop.bench.submit([b"x"])
    loop.bench.latch.trip(OSError(errno.EIO, "the disk"), "testing")
    assert loop.shard.begin_commit()
    assert isinstance(loop.told(token), Latched)
    assert not loop.shard.has_inflight_batch
    assert loop.shard.position() is not None


def test_what_breaks_is_raised_and_everybody_is_told(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the write raises what no disk raises."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    token, behind = loop.bench.submit([b"x"]), loop.bench.submit([b"y"])
    monkeypatch.setattr(Writer, "write_raw", broken)
    with pytest.raises(ZeroDivisionError):
        loop.shard.begin_commit()
    assert isinstance(loop.told(token), Latched)
    assert isinstance(loop.told(behind), Latched)
    assert not loop.shard.has_inflight_batch
