"""A disk that is slow, full or failing: columns SW, NS, EW and EF of the fault matrix (G22–G29, G43, G74, G79)."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from tests.unit.engine.fault_harness import FaultHarness, InjectedFailure, expect_state, harnesses, scenarios_for, view
from tests.unit.engine.fault_matrix import NAMES, SYNCS, TIMES, cells
from tests.unit.engine.fault_outcomes import EXPECT, check_restarts
from tests.unit.engine.fault_rows import (
    Scenario,
    Step,
    after_snapshot,
    checkpoint,
    delete_some,
    drop,
    expire_segments,
    make_obsolete_files,
    make_old,
    on,
    on_names_after,
)

from tidelog.errors import DiskFull
from tidelog.testing import SimDisk

NEEDS_SPACE = "write create reserve mkdir rename"
WRITES = "write create reserve cut mkdir rename remove rmdir"


sampled = pytest.mark.parametrize("step", [15, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.sweep])])


def thinned(strikes: list[InjectedFailure], times: str, step: int) -> list[InjectedFailure]:
    """One in `step` of all, and the first at each call on each kind of file; of those for ever, at each call."""
    kinds: set[tuple[str, str]] = set()
    chosen = []
    for number, strike in enumerate(strikes):
        file = strike.step.path.rpartition("/")[2]
        kind = strike.step.call, "" if times == "forever" else re.sub("[0-9]+", "", file)
        if number % step == 0 or kind not in kinds:
            chosen.append(strike)
        kinds.add(kind)
    return chosen


@pytest.mark.parametrize(("row", "outcome"), cells("SW"))
def test_short_writes(row: str, outcome: str) -> None:
    """G26: a short write is completed."""
    for harness in scenarios_for(row, "SW"):
        assert any(harness.steps[number].call == "write" for number in harness.picks)
        for seed in range(3):
            EXPECT[outcome](harness, InjectedFailure(f"seed {seed}", Step("write", "", 0), partial(shorten, seed)))


def shorten(seed: int, disk: SimDisk) -> None:
    disk.short_writes(Random(seed))


@sampled
@pytest.mark.parametrize(("row", "outcome", "times"), cells("NS", without="T18"))
def test_no_space(row: str, outcome: str, times: str, step: int) -> None:
    """G25, G27, G29, G74, G79. Delayed allocation lets a sync report a full device: that is T2."""
    for harness in scenarios_for(row, "NS"):
        strikes = list(harness.failures("sync" if row == "T2" else NEEDS_SPACE, times, errno.ENOSPC))
        assert strikes, "no call of this row needs space"
        for strike in thinned(strikes, times, step):
            # CURRENT and NEWEST are hints, and a start without space for its first file creates a smaller one.
            hint = any(name in strike.step.path for name in ("/CURRENT", "/NEWEST")) or (
                row == "T17" and "/wal-" in strike.step.path and strike.step.call in ("create", "reserve")
            )
            if not hint:
                EXPECT[outcome](harness, strike)
            elif times == "once":
                EXPECT["OK"](harness, strike)


@sampled
@pytest.mark.parametrize(("row", "outcome", "times"), cells("EW", without="T18"))
def test_error_on_write(row: str, outcome: str, times: str, step: int) -> None:
    """G22, G27–G29, G43, G74, G79."""
    for harness in scenarios_for(row, "EW"):
        strikes = list(harness.failures(WRITES, times))
        assert strikes, "this row writes nothing"
        for strike in thinned(strikes, times, step):
            EXPECT[outcome](harness, strike)


@sampled
@pytest.mark.parametrize(("row", "outcome", "mode", "times"), cells("EF"))
def test_error_on_sync(row: str, outcome: str, mode: str, times: str, step: int) -> None:
    """G22–G24, G27–G29, G43, G74, G79."""
    for harness in scenarios_for(row, "EF"):
        strikes = list(
            harness.failures("sync_dir", times) if mode == NAMES else harness.failures("sync", times, mode=mode)
        )
        assert strikes, "this row does not sync so"
        for strike in thinned(strikes, times, step):
            EXPECT[outcome](harness, strike)


@pytest.mark.parametrize("row", SYNCS)
def test_a_row_syncs_what_the_table_says(row: str) -> None:
    """So that no way to fail is left out where a row begins to sync something else."""
    found = {harness.steps[number].call for harness in scenarios_for(row, "EF") for number in harness.picks}
    assert ("sync" in found, "sync_dir" in found) == ("kept" in SYNCS[row], NAMES in SYNCS[row])


# Outside the table: its note 3, removals, a device that is really full, and what is never done.

EXTRA = {
    "a deletion vector": (
        Scenario(lead=delete_some, act=checkpoint, picks=on_names_after(".del"), derived=True),
        "write create rename sync sync_dir",
        "ERR",
    ),
    "a stale snapshot or WAL file": (
        Scenario(lead=make_obsolete_files, act=checkpoint, picks=after_snapshot, derived=True),
        "remove",
        "ERR",
    ),
    "a dropped segment": (
        Scenario(prepare=make_old, lead=expire_segments, act=checkpoint, picks=after_snapshot, derived=True),
        "remove sync_dir",
        "ERR",
    ),
    "the files of a dropped topic": (
        Scenario(act=drop, picks=on("/topics")),
        "rename remove rmdir sync_dir",
        "OK",
    ),
}


@sampled
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", EXTRA)
def test_what_a_frame_covers_already_is_done_later(what: str, error: int, times: str, step: int) -> None:
    """G29, G79, G80, G83, G85, note 3: the delete, the eviction, the drop was acked, and stays. Its files follow when
    they can: by the next checkpoint, or by the next start."""
    scenario, calls, outcome = EXTRA[what]
    harness = FaultHarness(scenario)
    strikes = [*harness.failures(calls, times, error), *harness.failures("sync", times, mode="dropped")]
    assert {strike.step.call for strike in strikes} == set(calls.split())
    for strike in thinned(strikes, times, step):
        EXPECT[outcome](harness, strike)


def test_litter_is_gone_in_the_end() -> None:
    """G35, G83: a removal that failed is made up for: by later checkpoints, and at the latest by a restart."""
    harness = harnesses("T8")[0]

    def left(arm: Callable[[SimDisk], None]) -> Counter[str]:
        """How many files of each kind there are after the act, a close and a start."""
        run = harness.run(arm)
        assert run.log is not None
        run.log.close()
        harness.open(run.disk, run.clock).close()
        names = (path.rpartition("/")[2] for path in run.disk.tree())
        return Counter("wal" if name.startswith("wal-") else name.rpartition(".")[2] for name in names)

    healthy = left(lambda _: None)
    for strike in harness.failures("remove sync_dir", "once"):
        assert not left(strike.arm) - healthy, strike.words


def test_a_full_device_refuses_until_there_is_space() -> None:
    """G25, G29. Method: real capacity, not a planned failure. A checkpoint finds no space at any of its bytes, while
    appends have theirs: it was reserved."""
    (harness,) = scenarios_for("T4", "NS")
    disk, clock, log, _ = harness.ready()
    assert log is not None
    used_bytes = sum(map(len, disk.tree().values()))
    refused = 0
    for free_bytes in range(0, 8_000, 421):
        disk, clock, log, _ = harness.ready()
        assert log is not None
        disk.capacity_bytes = used_bytes + free_bytes
        try:
            log.checkpoint()
        except DiskFull:
            refused += 1
            expect_state(view(log, clock), [harness.before], f"{free_bytes} bytes left")
            log.topic("f").append(b"fits in the WAL")
            check_restarts(harness, disk, [view(log, clock)], f"{free_bytes} bytes left", least=harness.base)
            disk.capacity_bytes = None
            log.checkpoint()
        disk.capacity_bytes = None
        log.tick()
        check_restarts(harness, disk, [view(log, clock)], f"{free_bytes} bytes left, then more")
    assert 5 < refused < 19


def test_a_full_wal_refuses_until_there_is_space() -> None:
    """G25, G27: the file is full and no other can be made: the write is refused, and goes on when there is space."""
    (harness,) = scenarios_for("T3", "NS")
    disk, clock, log, _ = harness.ready()
    assert log is not None
    disk.capacity_bytes = sum(map(len, disk.tree().values()))
    with pytest.raises(DiskFull):
        harness.scenario.act(log, clock)
    expect_state(view(log, clock), [harness.before], "no space for another file")
    log.topic("other").append(b"goes on")
    disk.capacity_bytes = None
    harness.scenario.act(log, clock)
    after = view(log, clock)
    log.close()
    again = harness.open(disk.crash_image("none"), clock)
    assert again.report.damage == []
    assert again.topic("other").read().records[-1].data == b"goes on"
    expect_state({"f": view(again, clock)["f"]}, [{"f": after["f"]}], "restarted")


def test_pruning_writes_nothing_and_looking_changes_nothing() -> None:
    """The dashes of T8 and T16: these calls are never made."""
    pruned = {harnesses("T8")[0].steps[number].call for number in harnesses("T8")[0].picks}
    assert pruned == {"remove", "sync_dir"}
    for harness in scenarios_for("T16", "C±"):
        disk, clock = harness.new_machine()
        view(harness.open(disk, clock, read_only=True), clock)
        assert disk.op_count == 0
