"""A bit turns over at rest: column BF of the fault matrix (G33, G42, G56, G65, G66, G80).

Method: what an act has left on disk is damaged, one bit of one byte at a time, and opened. No record
ever reads as something that was not written, and a loss is reported: where a frame is damaged, for that
frame; where something can be made again, nothing is lost at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.unit.engine.fault_harness import FaultHarness, Run, TopicView, View, scenarios_for, view
from tests.unit.engine.fault_matrix import cells
from tests.unit.engine.fault_outcomes import check_restart, check_usable
from tests.unit.engine.fault_rows import PATH, TTL_MS, newest_wal, used

from tidelog.engine import Record, Topic
from tidelog.errors import Corrupt, Damaged, Error, NewerFormat, WriteFailed
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.machine import START_US

MARK_BYTES = 70  # of a mark of the synced position, with which a write may begin
_LARGEST = 1600  # bytes of a frame in these scenarios, at most


def flips(
    disk: SimDisk, path: str, start: int = 0, stop: int | None = None, step: int = 1
) -> Iterator[tuple[str, SimDisk]]:
    """A disk for each of these bytes, with one of its bits turned over: another one from byte to byte."""
    for pos in range(start, len(disk.read_file(path)) if stop is None else stop, step):
        image = disk.reboot()
        image.flip_bit(path, pos, pos * 5 % 8)
        yield f"{path} byte {pos} bit {pos * 5 % 8}", image


def done(harness: FaultHarness) -> Run:
    """The act is over, and all of it on disk."""
    run = harness.run(lambda _: None)
    assert run.error is None
    return run


def read_each(topic: Topic, truth: TopicView) -> tuple[dict[int, Record], set[int]]:
    """Record by record: those that can be read, and the seqs at which a read raises."""
    rows: dict[int, Record] = {}
    damaged = set()
    for seq in truth.rows:
        try:
            page = topic.read(seq - 1, 1)
        except (Corrupt, NewerFormat):  # a version is a byte, too
            damaged.add(seq)
            continue
        rows |= {record.seq: record for record in page.records}
    return rows, damaged


# ── frames in the WAL ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T1 T6 T10 T11"))
def test_a_damaged_frame_at_the_end_of_the_wal_is_reported_and_not_applied(row: str, outcome: str) -> None:
    """G52, G56: the record, the mark, the delete, the floor that it was is not there, the rest is."""
    assert outcome == "DET"
    for harness in scenarios_for(row, "BF"):
        disk, clock, log, _ = harness.ready()
        assert log is not None
        paths = {harness.steps[number].path for number in harness.picks if harness.steps[number].call == "write"}
        starts = {path: used(disk.read_file(path)) for path in paths}
        harness.scenario.act(log, clock)
        for path, start in starts.items():
            stop = used(disk.read_file(path))
            if row == "T1" and "/shard-00/" in path and len(harness.before["d"].rows) < len(harness.after["d"].rows):
                stop = min(stop, start + 47)  # of several frames, the first
            step = 1 if stop - start < 60 else 3
            for number, (what, image) in enumerate(flips(disk.crash_image("all"), path, start, stop, step)):
                report = check_restart(harness, image, [harness.before], what)
                assert len(report.cut) == 1, f"{what}: {report.lines()}"
                assert path.rpartition("/")[2] in report.cut[0], report.cut
                assert any(f"at byte {at}, " in report.cut[0] for at in (start, start + MARK_BYTES)), report.cut
                if number % 20 == 0:
                    check_usable(harness, image, what)


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T15"))
def test_a_damaged_drop_is_reported_and_brings_no_record_back(row: str, outcome: str) -> None:
    """G85. Its files are gone by then: the topic may be there again, and all its records are reported as lost."""
    assert (row, outcome) == ("T15", "DET")
    (harness,) = scenarios_for(row, "BF")
    disk, clock, log, _ = harness.ready()
    assert log is not None
    path = newest_wal(disk, 0)
    start = used(disk.read_file(path))
    harness.scenario.act(log, clock)
    for what, image in flips(disk.crash_image("all"), path, start, used(disk.read_file(path))):
        log = harness.open(image, clock)
        assert len(log.report.cut) == 1, f"{what}: {log.report.lines()}"
        assert f"{path.rpartition('/')[2]} at byte {start}" in log.report.cut[0], log.report.cut
        truth = harness.before["f"]
        assert read_each(log.topic("f", create=False), truth) == ({}, set(truth.rows)), what
        assert log.report.damage, what
        for name, seen in harness.after.items():
            assert read_each(log.topic(name, create=False), seen) == (seen.rows, set()), f"{what}: {name}"
        log.drop("f")
        log.close()
        check_restart(harness, image, [harness.after], f"{what}, dropped again")


def rotated() -> tuple[FaultHarness, SimDisk, str, int]:
    """Records in a file that is not the newest: it was synced before the next one was made."""
    (harness,) = scenarios_for("T3", "BF")
    disk = done(harness).disk
    path = harness.steps[0].path
    assert (harness.steps[0].call, path < newest_wal(disk, 0)) == ("sync", True)
    return harness, disk.crash_image("all"), path, used(disk.read_file(path))


def marked() -> tuple[FaultHarness, SimDisk, str, int]:
    """Records in front of a CheckpointMark whose snapshot was not made: it says that they were synced."""
    (harness,) = scenarios_for("T4", "BF")
    disk, _, log, _ = harness.ready()
    assert log is not None
    path = newest_wal(disk, 0)
    marked = used(disk.read_file(path))
    disk.fail("create", path="/meta/")
    with pytest.raises(WriteFailed):
        log.checkpoint()
    return harness, disk.crash_image("all"), path, marked


@pytest.mark.parametrize("make", [rotated, marked])
@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T16"))
def test_a_damaged_frame_among_durable_ones_stops_the_writer(
    row: str, outcome: str, make: Callable[[], tuple[FaultHarness, SimDisk, str, int]]
) -> None:
    """G56, G57, D6: reported with file, offset and size; nothing is changed without consent; readers go on."""
    assert (row, outcome) == ("T16", "DET")
    harness, disk, path, stop = make()
    name = path.rpartition("/")[2]
    for what, image in flips(disk, path, 0, stop, step=stop // 30):
        before = files(image)
        with pytest.raises(Damaged, match="may be lost") as refused:
            harness.open(image, ManualClock())
        assert name in str(refused.value), f"{what}: {refused.value}"
        assert files(image) == before, f"{what}: something was changed"
        clock = ManualClock()
        reader = harness.open(image, clock, read_only=True)
        assert any(f"{name} at byte" in said for said in reader.report.damage), f"{what}: {reader.report.lines()}"
        seen = view(reader, clock)
        expect_part(seen, harness.after, {"other", "far"}, what)
        with harness.open(image, clock, accept_loss=True) as writer:
            (kept,) = [path for path in writer.report.quarantined if name in path]
            start = int(kept.rpartition(".")[2])
            (said,) = [said for said in writer.report.damage if f"{name} at byte {start}, " in said]
            size = int(said.partition(f"at byte {start}, ")[2].partition(" ")[0])
            assert image.read_file(kept) == before[path][start : start + size], f"{what}: what was lost is not kept"
            assert size <= _LARGEST, f"{what}: more than a frame is lost"
            expect_part(view(writer, clock), harness.after, {"other", "far"}, what)
        check_usable(harness, image, what)


def files(disk: SimDisk) -> dict[str, bytes]:
    return {path: content for path, content in disk.tree().items() if not path.endswith(".lock")}


def disk_bytes(tree: dict[str, bytes], path: str) -> bytes:
    return tree[path][: used(tree[path])]


def expect_part(seen: View, truth: View, whole: set[str], what: str) -> None:
    """These topics are whole; the others hold part of what they held, and no other record."""
    assert seen.keys() >= whole, f"{what}: {sorted(seen)}"
    for name, found in seen.items():
        if name in whole:
            assert found.rows == truth[name].rows, f"{what}: {name}"
        elif name in truth:
            assert found.rows == {seq: truth[name].rows[seq] for seq in found.rows}, f"{what}: {name}"
        else:
            assert name.startswith("recovered-"), f"{what}: {name} was made up"


# ── segments ──────────────────────────────────────────────────────────────────────────────────────


def frame_starts(disk: SimDisk, path: str) -> list[int]:
    """Where the frame of each record of a segment begins, as its index says: 20 bytes a record, a u32 first."""
    index = disk.read_file(f"{path.removesuffix('.data')}.idx")
    return [int.from_bytes(index[at : at + 4], "little") for at in range(0, len(index), 20)]


def segments(disk: SimDisk, topic_id: int) -> list[tuple[str, int]]:
    """The data files of a topic with their first seqs."""
    place = f"{PATH}/topics/{topic_id:08X}"
    names = disk.list_dir(place) if disk.stat(place) else []
    return [(f"{place}/{name}", int(name[4:20])) for name in names if name.endswith(".data")]


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T4 T9"))
def test_a_damaged_record_in_a_segment_is_reported_and_its_neighbours_are_read(row: str, outcome: str) -> None:
    """G65. Method: the index maps a byte to its records."""
    assert outcome == "DET"
    (harness,) = scenarios_for(row, "BF")
    disk = done(harness).disk.crash_image("all")
    tried = 0
    for name, truth in harness.after.items():
        for path, base in segments(disk, truth.id):
            sealed = f"{path.removesuffix('.data')}.foot" in disk.tree()
            if sealed != (row == "T9"):
                continue
            starts = frame_starts(disk, path)
            for pos in range(0, len(disk.read_file(path)), 7):
                image = disk.reboot()
                image.flip_bit(path, pos, pos * 5 % 8)
                at = max(start for start in starts if start <= pos)
                hurt = {base + number for number, start in enumerate(starts) if start == at}
                expect_reported(harness, image, name, truth, hurt, f"{path} byte {pos}")
                tried += 1
    assert tried > 20


def expect_reported(
    harness: FaultHarness, image: SimDisk, name: str, truth: TopicView, hurt: set[int], what: str
) -> None:
    """DET: of this topic exactly the records of the damaged frame cannot be read; everything else can."""
    clock = ManualClock(START_US)
    log = harness.open(image, clock)
    rows, damaged = read_each(log.topic(name, create=False), truth)
    assert damaged == hurt & truth.rows.keys(), f"{what}: {damaged} is reported, {hurt} is damaged"
    assert rows == {seq: kept for seq, kept in truth.rows.items() if seq not in hurt}, what


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T5"))
def test_a_damaged_index_hides_nothing(row: str, outcome: str) -> None:
    """G66: every record is read, found by its tag and expires when it should."""
    assert (row, outcome) == ("T5", "RB")
    harness = scenarios_for(row, "BF")[0]
    disk = done(harness).disk.crash_image("all")
    right = _uses_of_an_index(harness, disk.reboot())
    tried = 0
    wrong = []
    for path, _ in segments(disk, 1):
        for what, image in flips(disk, f"{path.removesuffix('.data')}.idx", step=3):
            tried += 1
            if _uses_of_an_index(harness, image) != right:
                wrong.append(what)
    assert tried > 50
    assert wrong == [], f"{len(wrong)} of {tried} flips are not made good, among them {wrong[:5]}"


def _uses_of_an_index(harness: FaultHarness, image: SimDisk) -> object:
    clock = ManualClock(START_US)
    try:
        log = harness.open(image, clock)
        seen = view(log, clock)
        by_tag = log.topic("f").delete(match="x").deleted
        log.topic("f", ttl_ms=TTL_MS)
        clock.tick(TTL_MS + 1)
        return log.report.damage, seen, by_tag, log.topic("f").evict_floor
    except Error as error:
        return error


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T3"))
def test_a_damaged_current_is_nothing(row: str, outcome: str) -> None:
    """G33."""
    assert (row, outcome) == ("T3", "OK")
    (harness,) = scenarios_for(row, "BF")
    disk = done(harness).disk.crash_image("all")
    for number, (what, image) in enumerate(flips(disk, f"{PATH}/wal/shard-00/CURRENT")):
        report = check_restart(harness, image, [harness.after], what)
        assert report.clean, f"{what}: {report.lines()}"
        if number % 8 == 0:
            check_usable(harness, image, what)


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T7"))
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(row: str, outcome: str) -> None:
    """G38, G42."""
    assert (row, outcome) == ("T7", "OLD")
    (harness,) = scenarios_for(row, "BF")
    disk = done(harness).disk.crash_image("all")
    newest = max(name for name in disk.list_dir(f"{PATH}/meta") if name.startswith("delta."))
    path = f"{PATH}/meta/{newest}"
    refused = []
    for number, (what, image) in enumerate((*flips(disk, path, 0, 24), *flips(disk, path, 24, step=17))):
        try:
            report = check_restart(harness, image, [harness.after], what)
        except NewerFormat:
            # The checksum is the body's: a version raised by a flip looks like a newer file.
            refused.append(what)
            continue
        assert len(report.snapshots_skipped) == 1, f"{what}: {report.lines()}"
        assert newest in report.snapshots_skipped[0]
        assert report.snapshot == int(newest.split(".")[1]) - 1
        if number % 10 == 0:
            check_usable(harness, image, what)
    assert refused
    assert all(" byte 4 " in what or " byte 5 " in what or " byte 6 " in what or " byte 7 " in what for what in refused)


# ── side files of segments ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "suffix"), [pytest.param("T10", ".del", id="T10-BF-vector"), pytest.param("T9", ".foot", id="T9-BF-footer")]
)
def test_a_damaged_side_file_is_reported_or_harmless(row: str, suffix: str) -> None:
    """G72, G80: nothing deleted comes back, no record is hidden in silence, and other topics are not touched."""
    harness = scenarios_for("T4", "BF")[0]
    disk = done(harness).disk.crash_image("all")
    path = next(path for path in disk.tree() if path.startswith(f"{PATH}/topics/00000001/") and path.endswith(suffix))
    reported = 0
    for what, image in flips(disk, path):
        log = harness.open(image, ManualClock())
        for name, truth in harness.after.items():
            rows, damaged = read_each(log.topic(name, create=False), truth)
            assert rows == {seq: kept for seq, kept in truth.rows.items() if seq not in damaged}, f"{what}: {name}"
            assert not damaged or name == "f", f"{what}: {name} is damaged too"
            reported += bool(damaged)
            assert not damaged or log.report.damage or row == "T9", f"{what}: not in the report"
        assert log.topic("f").append(b"goes on").first_seq == harness.after["f"].head + 1, what
    assert reported or row == "T9"
