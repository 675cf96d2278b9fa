"""Looking at a log: everything wrong with it is found, nothing is changed, nothing is wrong with a good one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog, inspect, verify
from tidelog.errors import NotFound
from tidelog.testing import ManualClock, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]


@pytest.fixture
def log(open_log: Opener, clock: ManualClock) -> SegmentedLog:
    """Two sealed segments of four records and an active one of three."""
    log = open_log()
    for number in range(3):
        if number:
            log.seal()
        log.append_many([b"segment %d record %d" % (number, i) for i in range(3)])
        clock.tick(5)
        if number < 2:
            log.append(b"segment %d last" % number)
            clock.tick(5)
    return log


def test_a_good_log_is_found_good(log: SegmentedLog, disk: SimDisk, codec: str) -> None:
    log.close()
    before = disk.digest()
    verdict = verify("log", disk=disk)
    assert (verdict.ok, verdict.damage, verdict.notes) == (True, [], [])
    assert (verdict.codec, verdict.segments, verdict.records, verdict.bytes) == (codec, 3, 11, log.size)
    assert disk.digest() == before


def test_a_log_can_be_verified_beside_its_writer(log: SegmentedLog, disk: SimDisk) -> None:
    verdict = verify("log", disk=disk)
    assert (verdict.ok, verdict.records) == (True, 11)
    log.append(b"goes on")
    assert verify("log", disk=disk).records == 12


@pytest.mark.parametrize(("which", "text"), [(0, b"segment 0 record 1"), (1, b"segment 1 last")])
def test_a_flipped_bit_of_a_sealed_record_is_found_with_file_and_seq(
    log: SegmentedLog, disk: SimDisk, data_path: Names, first_seq: int, which: int, text: bytes
) -> None:
    """G65, G105, G121."""
    log.close()
    path = data_path(first_seq + 4 * which)
    disk.flip_bit(path, disk.read_file(path).index(text) + 9, 5)
    before = disk.digest()
    verdict = verify("log", disk=disk)
    assert not verdict.ok
    assert {damage.file for damage in verdict.damage} == {path.removeprefix("log/")}
    seqs = {(damage.fault.seq, damage.fault.resume) for damage in verdict.damage}
    bad = first_seq + 4 * which + (1 if b"record 1" in text else 3)
    assert any(seq <= bad < resume for seq, resume in seqs)
    assert all(damage.fault.reason for damage in verdict.damage)
    assert disk.digest() == before


def test_every_bit_of_sealed_data_is_covered(
    log: SegmentedLog, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G121. Method: one bit of every byte of a sealed data file is flipped in turn."""
    log.close()
    path = data_path(first_seq)
    missed = []
    for pos in range(len(disk.read_file(path))):
        disk.flip_bit(path, pos, pos % 8)
        if verify("log", disk=disk).ok:
            missed.append(pos)
        disk.flip_bit(path, pos, pos % 8)
    assert missed == []
    assert verify("log", disk=disk).ok


@pytest.mark.parametrize("codec", ["rustlog"])
def test_without_checksums_exactly_data_and_times_are_not_covered(
    open_log: Opener, disk: SimDisk, data_path: Names
) -> None:
    """G121 and the hole of the seed's layout: a record carries no checksum, so only its length and its number are
    held to anything. Method: records of twenty bytes; the bits that nobody misses are counted."""
    log = open_log(checksums=False)
    for number in range(4):
        log.append(b"record %d of twenty  " % number)
    log.seal()
    log.close()
    path = data_path(0)
    missed = set()
    for pos in range(len(disk.read_file(path))):
        disk.flip_bit(path, pos, 0)
        verdict = verify("log", disk=disk)
        if verdict.ok:
            missed.add(pos)
        disk.flip_bit(path, pos, 0)
    times = {40 * number + pos for number in range(4) for pos in range(12, 20)}
    datas = {40 * number + pos for number in range(4) for pos in range(20, 40)}
    assert datas <= missed, "the hole of the layout"
    assert missed <= datas | times, "a length or a number that changed was not seen"


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_index_that_can_be_rebuilt_is_a_note_and_no_damage(
    log: SegmentedLog, disk: SimDisk, index_path: Names, first_seq: int
) -> None:
    """G101."""
    log.close()
    good = disk.read_file(index_path(first_seq))
    for content in (good[:-1], good + b"\0", good[:4] + b"\xff\xff\xff\x7f" + good[8:], b""):
        disk.write_file(index_path(first_seq), content)
        before = disk.digest()
        verdict = verify("log", disk=disk)
        assert (verdict.ok, verdict.records) == (True, 11)
        assert any(index_path(first_seq).removeprefix("log/") in note for note in verdict.notes)
        assert disk.digest() == before
    disk.remove(index_path(first_seq))
    assert any(index_path(first_seq).removeprefix("log/") in note for note in verify("log", disk=disk).notes)


@pytest.mark.parametrize("codec", ["laminar"])
def test_an_index_that_is_the_truth_is_damage_when_it_is_hurt(
    log: SegmentedLog, disk: SimDisk, index_path: Names
) -> None:
    """G121. Method: one bit of every byte of a sealed index is flipped in turn."""
    log.close()
    missed = []
    for pos in range(len(disk.read_file(index_path(0)))):
        disk.flip_bit(index_path(0), pos, pos % 8)
        if verify("log", disk=disk).ok:
            missed.append(pos)
        disk.flip_bit(index_path(0), pos, pos % 8)
    assert missed == []


def test_a_missing_data_file_is_damage(log: SegmentedLog, disk: SimDisk, data_path: Names, first_seq: int) -> None:
    log.close()
    disk.remove(data_path(first_seq + 4))
    verdict = verify("log", disk=disk)
    assert not verdict.ok


def test_unfinished_write_is_a_note_and_no_damage(
    log: SegmentedLog, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    log.close()
    path = data_path(first_seq + 8)
    whole = disk.read_file(path)
    disk.write_file(path, whole + whole[:7])
    verdict = verify("log", disk=disk)
    assert (verdict.ok, verdict.records) == (True, 11)
    assert any("7 bytes" in note for note in verdict.notes)


def test_progress_reaches_the_end(log: SegmentedLog, disk: SimDisk) -> None:
    log.close()
    seen: list[tuple[int, int]] = []
    verify("log", disk=disk, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)
    assert seen == sorted(seen)


def test_what_is_not_there_cannot_be_verified(disk: SimDisk) -> None:
    with pytest.raises(NotFound):
        verify("nowhere", disk=disk)
    assert disk.tree() == {}


def test_an_inspection_has_a_line_per_segment(log: SegmentedLog, codec: str, first_seq: int) -> None:
    lines = inspect(log)
    assert [(line.base, line.stop, line.sealed) for line in lines] == [
        (first_seq, first_seq + 4, True),
        (first_seq + 4, first_seq + 8, True),
        (first_seq + 8, first_seq + 11, False),
    ]
    assert {line.index for line in lines} == {"ok"}
    assert sum(line.data_bytes + line.side_bytes for line in lines) == log.size
    held = list(log)
    for line in lines:
        part = [record for record in held if line.base <= record.seq < line.stop]
        times = (None, None) if codec == "laminar" else (part[0].ts_us, part[-1].ts_us)
        assert (line.first_us, line.last_us) == times


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_inspect_reports_a_rebuilt_index(
    log: SegmentedLog, open_log: Opener, disk: SimDisk, index_path: Names, first_seq: int
) -> None:
    log.close()
    disk.remove(index_path(first_seq))
    reader = open_log(read_only=True)
    assert [line.index for line in inspect(reader)] == ["rebuilt", "ok", "ok"]


def test_an_empty_log_is_inspected_too(open_log: Opener, first_seq: int) -> None:
    (line,) = inspect(open_log())
    assert (line.base, line.stop, line.data_bytes, line.first_us) == (first_seq, first_seq, 0, None)
