"""Files that are lost, from another time or in another's place (G35, G46, G66, G77, G80, G86).

None of this can happen by a crash: a part of a backup was restored, or a device wrote to the
wrong place. What can be detected is reported, and no record is ever served as another.
"""

from __future__ import annotations

import pytest
from tests.unit.engine.fault_harness import FaultHarness, View, scenarios_for, view
from tests.unit.engine.fault_rows import PATH, Act, Scenario, newest_wal, nothing, seal_all
from tests.unit.engine.test_faults_flips import frame_starts, read_each

from tidelog.engine import Engine
from tidelog.errors import Damaged, Error
from tidelog.testing import ManualClock, SimDisk

F, OTHER = f"{PATH}/topics/00000001", f"{PATH}/topics/00000002"


@pytest.fixture(scope="module")
def harness() -> FaultHarness:
    return scenarios_for("T4", "BF")[0]


def before_and_after(harness: FaultHarness) -> tuple[SimDisk, SimDisk, View]:
    """A disk at rest, the same one some deletes, writes and a checkpoint later, and what is on it then."""
    disk, clock, log, _ = harness.ready()
    assert log is not None
    log.checkpoint()
    early = disk.crash_image("all")
    log.topic("f").delete(seqs=[3, 6])
    log.topic("f").append([b"eleven", b"twelve"])
    log.topic("other").append([b"seven", b"eight"])
    log.topic("d").append(b"delta")
    log.checkpoint()
    return early, disk.crash_image("all"), view(log, clock)


def expect_reported_or_whole(
    harness: FaultHarness, image: SimDisk, truth: View, what: str, *, reported: bool | None = None
) -> None:
    """No record reads as another, none that was deleted is back, and missing records are reported. `reported`: whether
    something must be, or must not."""
    try:
        log = harness.open(image, ManualClock())
    except Damaged:
        assert reported is not False, what
        return
    said = bool(log.report.damage)
    for name, expected in truth.items():
        rows, damaged = read_each(log.topic(name, create=False), expected)
        back = sorted(set(read_all(log, name)) - set(expected.rows))
        assert not back, f"{what}: {name} has seqs {back} again; the report says {log.report.lines()}"
        assert all(expected.rows[seq] == row for seq, row in rows.items()), f"{what}: {name} reads other records"
        missing = set(expected.rows) - set(rows) - damaged
        assert not missing, f"{what}: {name} lacks {sorted(missing)} in silence; the report says {log.report.lines()}"
        said = said or bool(damaged)
    assert reported is None or said == reported, f"{what}: {log.report.lines()}"


def read_all(log: Engine, name: str) -> list[int]:
    """The seqs of a topic that can be read, damage passed over."""
    topic, found, cursor = log.topic(name, create=False), [], 0
    while cursor < topic.head_seq:
        try:
            page = topic.read(cursor, 1)
        except Error:
            cursor += 1
            continue
        found += [record.seq for record in page.records]
        cursor = max(page.next_from_seq, cursor + 1)
    return found


def paths(disk: SimDisk, suffix: str) -> list[str]:
    return [path for path in disk.tree() if path.startswith(f"{PATH}/topics/") and path.endswith(suffix)]


@pytest.mark.parametrize("suffix", [".data", ".idx", ".foot", ".del"])
def test_a_file_of_a_segment_is_lost(suffix: str, harness: FaultHarness) -> None:
    """A lost index is made again, a lost footer is harmless; lost data and lost deletions are reported."""
    _, disk, truth = before_and_after(harness)
    for path in paths(disk, suffix):
        image = disk.reboot()
        image.remove(path)
        expect_reported_or_whole(harness, image, truth, path, reported={".data": True, ".del": None}.get(suffix, False))


def test_all_files_of_a_segment_are_lost(harness: FaultHarness) -> None:
    _, disk, truth = before_and_after(harness)
    for path in paths(disk, ".data"):
        image = disk.reboot()
        for suffix in (".data", ".idx", ".foot", ".del"):
            if f"{path.removesuffix('.data')}{suffix}" in image.tree():
                image.remove(f"{path.removesuffix('.data')}{suffix}")
        expect_reported_or_whole(harness, image, truth, path, reported=True)


@pytest.mark.parametrize("suffix", [".data", ".idx", ".del"])
def test_a_file_of_a_segment_comes_from_an_earlier_time(suffix: str, harness: FaultHarness) -> None:
    """An index that is too short is made again; data and deletions that lack something are reported."""
    early, disk, truth = before_and_after(harness)
    tried = 0
    for path in paths(disk, suffix):
        old = early.tree().get(path)
        if old is None or old == disk.read_file(path):
            continue
        image = disk.reboot()
        image.write_file(path, old)
        expect_reported_or_whole(harness, image, truth, path, reported={".data": True, ".del": None}.get(suffix, False))
        tried += 1
    assert tried, f"no {suffix} was written twice"


def newest_delta(disk: SimDisk) -> str:
    return max(name for name in disk.list_dir(f"{PATH}/meta") if name.startswith("delta."))


def test_a_snapshot_comes_from_an_earlier_time(harness: FaultHarness) -> None:
    """What the one before needs is kept as long as it is, so its content under the newest name loses nothing."""
    early, disk, truth = before_and_after(harness)
    newest, before = newest_delta(disk), newest_delta(early)
    assert newest > before
    disk.write_file(f"{PATH}/meta/{newest}", early.read_file(f"{PATH}/meta/{before}"))
    expect_reported_or_whole(harness, disk, truth, newest, reported=False)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_wal_file_comes_from_an_earlier_time(shard: int, harness: FaultHarness) -> None:
    """G46: it ends before the snapshot's position; what the snapshot holds is there."""
    early, disk, truth = before_and_after(harness)
    path = newest_wal(disk, shard)
    disk.write_file(path, early.read_file(path))
    expect_reported_or_whole(harness, disk, truth, path)


def test_wal_files_are_in_each_others_place(harness: FaultHarness) -> None:
    """Frames know their topics; positions are of another file then, which is reported."""
    disk, clock, log, _ = harness.ready()
    assert log is not None
    truth = view(log, clock)
    image = disk.crash_image("all")
    one, other = newest_wal(image, 0), newest_wal(image, 1)
    content = image.read_file(one), image.read_file(other)
    image.write_file(one, content[1])
    image.write_file(other, content[0])
    expect_reported_or_whole(harness, image, truth, "two WAL files")


@pytest.mark.parametrize("prepare", [nothing, seal_all])
def test_segments_of_two_topics_are_in_each_others_place(prepare: Act) -> None:
    """G86. Method: the first segments of `f` and `other` have the same size and the same seqs."""
    harness = FaultHarness(Scenario(prepare=prepare))
    disk, _ = harness.new_machine()
    suffixes = [suffix for suffix in (".data", ".idx", ".foot") if f"{F}/seg-{1:016d}{suffix}" in disk.tree()]
    assert len(suffixes) == 2 + (prepare is seal_all)
    for number in range(len(suffixes)):
        image = disk.reboot()
        for suffix in suffixes[: number + 1]:
            one, other = (f"{place}/seg-{1:016d}{suffix}" for place in (F, OTHER))
            content = disk.read_file(one), disk.read_file(other)
            assert len(content[0]) == len(content[1])
            image.write_file(one, content[1])
            image.write_file(other, content[0])
        what = f"{suffixes[: number + 1]} of two topics"
        expect_reported_or_whole(harness, image, harness.after, what, reported=True)


def test_a_frame_is_at_the_wrong_place(harness: FaultHarness) -> None:
    """A write that went astray: a good frame where another one should be."""
    _, disk, truth = before_and_after(harness)
    path = f"{F}/seg-{1:016d}.data"
    starts = sorted(set(frame_starts(disk, path)))
    content = disk.read_file(path)
    tried = 0
    for one, end in zip(starts, [*starts[1:], len(content)], strict=True):
        for other in starts:
            if one == other or other + end - one > len(content):
                continue
            image = disk.reboot()
            image.write_file(path, content[:other] + content[one:end] + content[other + end - one :])
            expect_reported_or_whole(harness, image, truth, f"the frame at {one} is at {other}", reported=None)
            tried += 1
    assert tried
