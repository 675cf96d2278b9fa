"""The machine of leases alone: what it keeps stays in proportion to the jobs that it knows."""

from __future__ import annotations

import pytest

from tidelog.engine.queues import leases as module
from tidelog.engine.queues.leases import LeaseTable

LATER_MS = 1_000_000


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> LeaseTable:
    monkeypatch.setattr(module, "_STALE_TIMERS_MAX", 8)
    return LeaseTable()


def test_timers_of_removed_jobs_are_compacted(leases: LeaseTable) -> None:
    for seq in range(1, 101):
        leases.schedule(seq, LATER_MS + seq, 0, 0)
        if seq > 3:
            leases.forget([seq])
        leases.sweep(0)
        assert leases._delay_timers.size <= 2 * len(leases.delayed) + 8
    assert leases.next_due_ms() == LATER_MS + 1
    assert leases.sweep(LATER_MS + 3).ready == [1, 2, 3]


def test_timers_of_moved_deadlines_are_compacted(leases: LeaseTable) -> None:
    leases.grant([1, 2], "a", LATER_MS)
    for moved in range(1, 101):
        assert leases.extend(1, "a", None, LATER_MS + moved) is not None
        leases.sweep(0)
        assert leases._deadline_timers.size <= 2 * len(leases.leased) + 8
    assert leases.next_due_ms() == LATER_MS + 1
    assert [seq for seq, _ in leases.sweep(LATER_MS + 1).expired] == [2]
    assert [seq for seq, _ in leases.sweep(LATER_MS + 101).expired] == [1]


def test_current_timers_are_not_compacted_on_every_sweep(leases: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep of every claim would cost as much as all delayed jobs and leases."""
    for seq in range(1, 31):
        leases.schedule(seq, LATER_MS, 0, 0)
    leases.grant(range(31, 61), "a", LATER_MS)
    leases.schedule(61, 5, 0, 0)
    leases.grant([62], "a", 4)
    for alarms in (leases._delay_timers, leases._deadline_timers):
        monkeypatch.setattr(type(alarms), "compact", lambda *_: pytest.fail("rebuilt without need"))
    swept = leases.sweep(5)
    assert (swept.ready, [seq for seq, _ in swept.expired]) == ([61], [62])
