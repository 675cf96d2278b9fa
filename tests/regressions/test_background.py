"""The thread of the `interval` policy outlives its errors and shows them (docs/bugs.md)."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest
from tests.unit.engine.harness import TIMEOUT_S

from tidelog.commitlog import SegmentedLog, append
from tidelog.commitlog.log_state import LogState
from tidelog.errors import DiskFull, Latched
from tidelog.testing import SimDisk

Patch = pytest.MonkeyPatch


class Ticks:
    """Runs of the background thread: each raises the next of `errors`; `over` is set when one came after the last."""

    def __init__(self, patch: Patch, errors: list[Exception]) -> None:
        self.over, self._left, self._tick = Event(), list(errors), append.run_due_tasks
        patch.setattr(append, "run_due_tasks", self._run)

    def _run(self, state: LogState) -> None:
        if self._left:
            raise self._left.pop(0)
        self._tick(state)
        if state.durable == state.highest and state.highest > state.lowest:
            self.over.set()


@pytest.mark.parametrize(
    "error",
    [
        lambda: DiskFull("log: no room"),
        lambda: ValueError("a bug"),
        lambda: OSError(5, "Input/output error"),
        lambda: MemoryError(),
    ],
    ids=["disk full", "bug", "os error", "memory"],
)
def test_a_background_sync_goes_on_after_an_error_and_shows_it(
    error: Callable[[], Exception], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = Ticks(monkeypatch, [error(), error(), error()])
    disk = SimDisk()
    with SegmentedLog.open("log", disk=disk, sync="interval", sync_interval_ms=4) as log:
        seq = log.append(b"acked, and not synced")
        assert ticks.over.wait(TIMEOUT_S), "the thread ended"
        assert log.durable == seq + 1
        found = log.background
    assert (found.failures, found.consecutive_failures, found.is_latched) == (3, 0, False)
    assert found.runs >= 4
    assert found.last_error is not None
    logged = [line for line in caplog.messages if "a background sync failed" in line]
    assert len(logged) == 1, "the same error is not logged by each run"
    assert found.last_error in logged[0]
    assert [record.data for record in SegmentedLog.open("log", disk=disk.crash_image("none"))] == [
        b"acked, and not synced"
    ]


def test_a_failed_sync_in_the_background_is_logged_counted_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk()
    log = SegmentedLog.open("log", disk=disk, sync="interval", sync_interval_ms=600_000)
    log.append(b"a")
    log._log_state.synced_ms -= 600_000  # the interval is over
    disk.fail_sync("dropped", path="log/")
    assert log._flusher is not None
    for _ in range(3):
        log._flusher.run_once()  # as its thread does, which waits for the interval
    found = log.background
    assert (found.failures, found.consecutive_failures, found.is_latched) == (1, 1, True)
    assert "sync" in (found.last_error or "")
    assert len([line for line in caplog.messages if "a background sync failed" in line]) == 1
    with pytest.raises(Latched):
        log.append(b"b")
    with pytest.raises(Latched):
        log.close()
    assert log.background.consecutive_failures == 1, "it still says why"


def test_a_log_without_the_thread_has_no_background_work() -> None:
    with SegmentedLog.open("log", disk=SimDisk()) as log:
        assert log.background == append.FlusherState()
