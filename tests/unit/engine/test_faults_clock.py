"""The clock jumps by an hour, by ten years, to nothing: column CJ of the fault matrix (G60)."""

from __future__ import annotations

from typing import Final

import pytest
from tests.unit.engine.fault_harness import FaultHarness, View, expect_state, scenarios_for, view
from tests.unit.engine.fault_matrix import cells
from tests.unit.engine.fault_outcomes import check_restart, check_usable
from tests.unit.engine.fault_rows import TTL_MS

from tidelog.testing import ManualClock, SimDisk

HOUR_US: Final = 3_600_000_000
JUMPS_US: Final = {
    "an hour on": HOUR_US,
    "an hour back": -HOUR_US,
    "ten years on": 87_600 * HOUR_US,
    "ten years back": -87_600 * HOUR_US,
    "to the epoch": None,
}


def jump(clock: ManualClock, words: str) -> None:
    by_us = JUMPS_US[words]
    clock.set_us(0 if by_us is None else clock.now_us() + by_us)


def timeless(seen: View) -> dict[str, tuple[int, int, list[tuple[int, object, str | None]]]]:
    """Topics without what a clock decides: when a record was written."""
    return {
        name: (state.floor, state.head, [(seq, row.data, row.tag) for seq, row in sorted(state.rows.items())])
        for name, state in seen.items()
    }


def expect_times(seen: View, what: str) -> None:
    for name, state in seen.items():
        times = [row.ts_ms for _, row in sorted(state.rows.items())]
        assert times == sorted(times), f"{what}: {name}: {times}"


def run(harness: FaultHarness, words: str, *, first: bool) -> tuple[SimDisk, View, ManualClock]:
    """The act with a jump before the opening or in the middle of the work."""
    disk, clock = harness.new_machine()
    if first:
        jump(clock, words)
    log = harness.open(disk, clock)
    harness.scenario.lead(log, clock)
    if not first:
        jump(clock, words)
    harness.scenario.act(log, clock)
    return disk, view(log, clock), clock


@pytest.mark.parametrize(("row", "outcome"), cells("CJ", without="T11"))
def test_the_clock_jumps(row: str, outcome: str) -> None:
    """G60: no seq, no order, no floor depends on it."""
    assert outcome == "OK"
    for harness in scenarios_for(row, "CJ"):
        for words in JUMPS_US:
            for first in (True, False):
                what = f"{words}, {'before the opening' if first else 'before the act'}"
                disk, seen, clock = run(harness, words, first=first)
                assert timeless(seen) == timeless(harness.after), what
                expect_times(seen, what)
                image = disk.reboot()
                check_restart(harness, image, [seen], f"{what}, opened again when the clock was right")
                log = harness.open(disk.reboot(), clock)
                expect_state(view(log, clock), [seen], f"{what}, opened again when it was not")
                check_usable(harness, image, what)


@pytest.mark.parametrize(("row", "outcome"), cells("CJ", only="T11"))
def test_a_floor_that_a_jump_has_raised_stays(row: str, outcome: str) -> None:
    """G60, G73: what is too old is the clock's word, and what was said once is not taken back by another word."""
    assert (row, outcome) == ("T11", "OK")
    expired = 0
    for harness in scenarios_for(row, "CJ"):
        for words in JUMPS_US:
            disk, seen, clock = run(harness, words, first=False)
            now_ms = clock.now_us() // 1_000
            before, after = harness.before["old"], harness.after["old"]
            kept = {seq: row for seq, row in before.rows.items() if now_ms - row.ts_ms <= TTL_MS}
            new = {seq: seen["old"].rows[seq] for seq in after.rows if seq not in before.rows}
            assert seen["old"].rows == kept | new, words
            assert [(seq, row.data) for seq, row in new.items()] == [(seq, after.rows[seq].data) for seq in new], words
            assert seen["old"].floor == max((seq + 1 for seq in before.rows if seq not in kept), default=before.floor)
            expired += len(before.rows) - len(kept)
            expect_times(seen, words)
            for image in (disk.reboot(), disk.crash_image("none")):
                check_restart(harness, image, [seen], f"{words}, and back")
    assert expired
