"""The thread of the `interval` policy: it keeps the promise while nobody appends, and stands in nobody's way."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.append import run_due_tasks
from tidelog.disk.posix import PosixDisk, PosixFile
from tidelog.errors import Latched
from tidelog.testing import ManualClock, SimDisk


def test_what_was_appended_becomes_durable_without_anybody_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = Event()
    real = PosixFile.sync

    def sync(self: PosixFile) -> None:
        real(self)
        if self.path.endswith(".data"):
            synced.set()

    monkeypatch.setattr(PosixFile, "sync", sync)
    with SegmentedLog.open(str(tmp_path / "log"), sync="interval", sync_interval_ms=4) as log:
        synced.clear()
        log.append(b"a")
        assert synced.wait(60)


def test_an_append_does_not_wait_for_a_sync_of_the_background(tmp_path: Path) -> None:
    """Method: a disk whose sync waits until the test lets it go; an append in between must return."""
    begun, go_on = Event(), Event()

    class SlowFile(PosixFile):
        def sync(self) -> None:
            if self.path.endswith(".data") and slow.is_set():
                begun.set()
                assert go_on.wait(60)
            super().sync()

    class SlowDisk(PosixDisk):
        def open(self, path: str, mode: str = "read", /) -> SlowFile:
            plain = super().open(path, mode)  # type: ignore[arg-type]
            fd, plain._fd = plain._fd, -1
            return SlowFile(path, fd)

    slow = Event()
    log = SegmentedLog.open(str(tmp_path / "log"), sync="interval", sync_interval_ms=60_000, disk=SlowDisk())
    log.append(b"before")
    slow.set()
    log._log_state.synced_ms -= 120_000
    ticking = Thread(target=run_due_tasks, args=(log._log_state,))
    ticking.start()
    assert begun.wait(60)
    log._log_state.synced_ms += 120_000
    seq = log.append(b"meanwhile")
    assert log.read(seq).data == b"meanwhile"
    assert log.durable < log.highest
    slow.clear()
    go_on.set()
    ticking.join()
    assert log.durable == seq, "what was written when the sync began, and no more"
    log.close()


def test_a_sync_that_fails_in_the_background_latches_the_log() -> None:
    disk, clock = SimDisk(), ManualClock()
    log = SegmentedLog.open("log", disk=disk, clock=clock, sync="interval")
    log.append(b"a")
    clock.tick(50)
    disk.fail_sync("dropped", path=".data")
    with pytest.raises(Latched):
        log.tick()
    with pytest.raises(Latched):
        log.append(b"b")
    assert log.durable == log.highest - 1


def test_a_tick_after_the_log_is_closed_does_nothing() -> None:
    clock = ManualClock()
    log = SegmentedLog.open("log", disk=SimDisk(), clock=clock, sync="interval")
    log.append(b"a")
    log.close()
    clock.tick(1_000)
    log.tick()
