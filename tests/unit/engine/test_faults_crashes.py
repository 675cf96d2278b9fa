"""A machine that loses power in the middle: columns TW, C±, LU and RR of the fault matrix (G1–G4, G23, G31–G48, G62,
G63, G73, G77–G86).

Method: the act runs once on a healthy disk; before and after each call that its row is about, what a
restart could find is looked at. Until the act has returned its topics are as before or as after, and
from then on they are as after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from tests.unit.engine.fault_harness import FaultHarness, scenarios_for
from tests.unit.engine.fault_matrix import cells
from tests.unit.engine.fault_outcomes import check_restart, check_usable
from tests.unit.engine.fault_rows import PATH, Step, used

from tidelog.engine import Engine, RecoveryReport
from tidelog.errors import Damaged
from tidelog.formats.frame import CHECKPOINT_MARK, KIND_OFFSET
from tidelog.testing import ManualClock, Policy, SimDisk
from tidelog.wal.writer import SYNC_MARK_BYTES

POLICIES: dict[str, tuple[Policy, ...]] = {
    "TW": ("torn_last",),
    "C±": ("none", "all"),
    "LU": ("prefixes", "all_but_one", "only_one", "random"),
    "RR": ("directories",),
}
CALLS = {"TW": "write", "RR": "create rename remove mkdir rmdir sync_dir"}
LIMIT = 8  # images of an instant
FRAME_BYTES = 46  # around the data of a frame


class Moment(NamedTuple):
    """What a restart could find at one instant of an act."""

    words: str
    image: SimDisk
    acked: bool  # the act has returned
    cut: bool  # the power is gone, not only the process


def moments(harness: FaultHarness, column: str) -> Iterator[Moment]:
    """Before and after each call of a row; for a torn write or lost names, after the calls that can be so."""
    calls = CALLS.get(column, "").split()
    wanted = [number for number in harness.picks if not calls or harness.steps[number].call in calls]
    assert wanted, "this row makes no such call"
    instants = {number + 1 for number in wanted} | ({*wanted} if column == "C±" else set())
    found: list[Moment] = []
    random = Random(f"{column} {harness.steps}")
    disk, clock, log, _ = harness.ready()
    began = disk.op_count

    def take(number: int, acked: bool) -> None:
        if number not in instants:
            return
        last = harness.steps[number - 1] if number else Step("open", PATH, 0)
        words = f"after {last.call} {last.path} (step {number} of {len(harness.steps)})"
        images = disk.images(POLICIES[column], random, limit=LIMIT)
        found.extend(Moment(f"{words}, {image.label}", image.disk, acked, True) for image in images)
        if column == "C±":
            found.append(Moment(f"{words}, killed", disk.reboot(), acked, False))

    disk.on_op = lambda op: take(op - began - 1, False)
    if log is None:
        harness.open(disk, clock)
    else:
        harness.scenario.act(log, clock)
    disk.on_op = None
    assert disk.op_count - began == len(harness.steps), "the act makes other calls than it did"
    take(len(harness.steps), True)
    yield from found


def crash(harness: FaultHarness, column: str) -> Iterator[RecoveryReport]:
    """Judge every moment; for a share of them, go on with what was found."""
    seen: set[tuple[bytes, bool, bool]] = set()
    for moment in moments(harness, column):
        key = moment.image.digest(), moment.acked, moment.cut
        if key in seen:
            continue
        seen.add(key)
        states = [harness.after] if moment.acked else harness.between
        use = moment.image.reboot() if len(seen) % 8 == 1 else None
        yield check_restart(harness, moment.image, states, moment.words, least=harness.base if moment.cut else None)
        if use is not None:
            check_usable(harness, use, moment.words)


SECTOR_BYTES = 512


def to_the_edge(log: Engine, skipped: int) -> None:
    """Let what comes `skipped` bytes after the begin of the next write of each shard begin just before the end of a
    sector, so that power can fail in its middle. The next write begins with a mark: this one was synced."""
    for name, shard in (("f", log._context.shards[0]), ("other", log._context.shards[1])):
        mark = len(shard.writer._next_mark()[1])
        size = mark + FRAME_BYTES + skipped + 20
        log.topic(name).append(bytes(-(shard.position().pos + size) % SECTOR_BYTES))
        assert (shard.position().pos + skipped) % SECTOR_BYTES == SECTOR_BYTES - 20
        assert len(shard.writer._next_mark()[1]) == SYNC_MARK_BYTES


def edged(harness: FaultHarness, skipped: int) -> FaultHarness:
    def lead(log: Engine, clock: ManualClock) -> None:
        harness.scenario.lead(log, clock)
        to_the_edge(log, skipped)

    return FaultHarness(replace(harness.scenario, lead=lead))


@pytest.mark.parametrize(("row", "outcome"), cells("TW", without="T16"))
def test_a_torn_write(row: str, outcome: str) -> None:
    """G4, G52, G62, G63, G81: what is torn is cut, made again or passed over, and nothing acked goes with it."""
    frames = row in ("T1", "T6", "T10", "T11", "T15")
    assert frames or outcome in ("RB", "OLD") or row == "T3"  # it is CURRENT that may be torn there
    for skipped in (0, SYNC_MARK_BYTES) if frames else (0,):  # the mark is torn, then the frame after it
        cut = 0
        for harness in scenarios_for(row, "TW"):
            before = harness.open(*harness.new_machine()).report.snapshot
            for report in crash(edged(harness, skipped) if frames else harness, "TW"):
                cut += len(report.cut)
                if outcome == "OLD":
                    assert report.snapshot == before, "a torn snapshot was taken for one"
        assert bool(cut) == frames, f"{cut} frames were torn, {skipped} bytes after the begin of a write"


@pytest.mark.parametrize(("row", "outcome"), cells("TW", only="T16"))
def test_a_frame_that_ends_anywhere_is_cut(row: str, outcome: str) -> None:
    """G52, G53: of the last write any number of bytes is there, and after them zeros, the file's end or garbage. The
    mark with which it begins is a frame of its own: where all of it is there, it stays."""
    assert (row, outcome) == ("T16", "CUT")
    harness = scenarios_for("T1", "TW")[0]
    disk, clock, log, _ = harness.ready()
    assert log is not None
    path = next(step.path for step in harness.steps if step.call == "write")
    start = used(disk.read_file(path))
    assert start, "there are frames before it"
    harness.scenario.act(log, clock)
    whole = disk.read_file(path)
    stop = used(whole)
    assert whole[start + KIND_OFFSET] == CHECKPOINT_MARK
    assert stop - start - SYNC_MARK_BYTES > 50
    for at in range(start, stop):
        for number, rest in enumerate((bytes(len(whole) - at), b"", b"\xa5" * (at % 7 + 1))):
            if number and at % 4:
                continue
            image = disk.reboot()
            image.write_file(path, whole[:at] + rest)
            what = f"{at - start} of {stop - start} bytes and {('zeros', 'nothing', 'garbage')[number]}"
            report = check_restart(harness, image, [harness.before], what)
            kept = start if at < start + SYNC_MARK_BYTES else start + SYNC_MARK_BYTES
            assert bool(report.cut) == bool((whole[kept:at] + rest).strip(b"\0")), f"{what}: {report.cut}"
            assert image.read_file(path).rstrip(b"\0") == whole[:kept], f"{what}: what was cut is still there (G53)"
            if at % 16 == 0:
                check_usable(harness, image, what)


@pytest.mark.parametrize(("row", "outcome"), cells("C±", without="T18"))
def test_a_crash_before_and_after_each_call(row: str, outcome: str) -> None:
    """G1–G3, G23, G31, G37–G48, G63, G73, G77, G85."""
    del outcome
    assert sum(1 for harness in scenarios_for(row, "C±") for _ in crash(harness, "C±"))


@pytest.mark.parametrize(("row", "outcome"), cells("LU"))
def test_any_part_of_what_was_not_synced_is_lost(row: str, outcome: str) -> None:
    """G1, G3, G4, G8, G9, G31, G37, G44, G45, G62, G77."""
    del outcome
    assert sum(1 for harness in scenarios_for(row, "LU") for _ in crash(harness, "LU"))


@pytest.mark.parametrize(("row", "outcome"), cells("RR"))
def test_names_are_lost_or_come_out_of_order(row: str, outcome: str) -> None:
    """G31, G32, G35, G38, G83, G85."""
    del outcome
    assert sum(1 for harness in scenarios_for(row, "RR") for _ in crash(harness, "RR"))


# The lethal order of T8-RR: a WAL file is gone for good, the snapshot that covers it is not there.


def lethal(harness: FaultHarness, disk: SimDisk, clock: ManualClock) -> Iterator[SimDisk]:
    """Of all that a restart could find during a checkpoint that removes WAL files, what lacks one of them and the
    snapshot that was made before."""
    log = harness.open(disk, clock)
    harness.scenario.lead(log, clock)
    snapshot = max(name for name in disk.list_dir(f"{PATH}/meta") if name.startswith("delta."))
    first = min(name for name in disk.tree() if "/wal-" in name)
    found: list[SimDisk] = []

    def look(op: int) -> None:
        del op
        for _, image in disk.images(["directories"]):
            names = image.tree()
            if first not in names and f"{PATH}/meta/{snapshot}" not in names:
                found.append(image)

    disk.on_op = look
    harness.scenario.act(log, clock)
    assert first not in disk.tree(), "the checkpoint removed no WAL file"
    yield from found


def test_no_wal_file_is_gone_before_the_snapshot_that_covers_it_is_there() -> None:
    """G35, G38, T8-RR."""
    harness = scenarios_for("T8", "RR")[0]
    assert list(lethal(harness, *harness.new_machine())) == []


def test_without_the_sync_of_names_lost_wal_files_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """G35: it is the sync of the snapshots' directory that makes the lethal order impossible, and the test sees it."""
    harness = scenarios_for("T8", "RR")[0]
    disk, clock = harness.new_machine()

    def forgetful(path: str) -> None:
        if path != f"{PATH}/meta":
            SimDisk.sync_dir(disk, path)

    monkeypatch.setattr(disk, "sync_dir", forgetful)
    found = list(lethal(harness, disk, clock))
    assert found
    for image in found:
        with pytest.raises(Damaged, match="may be lost"):
            harness.open(image, clock)
