"""Point in time: a copy of a log as it was, in a new directory, while the source is only read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog, restore, verify
from tidelog.errors import AlreadyExists, BadInput
from tidelog.testing import ManualClock, PowerOff, SimDisk
from tidelog.types import Record

Opener: TypeAlias = Callable[..., SegmentedLog]


@pytest.fixture
def log(open_log: Opener, clock: ManualClock) -> SegmentedLog:
    """Two sealed segments and an active one, records and batches, ten milliseconds apart."""
    log = open_log()
    for number in range(3):
        if number:
            log.seal()
        log.append_many([b"%d %d" % (number, i) for i in range(3)])
        clock.tick(10)
        log.append(b"%d last" % number)
        clock.tick(10)
    return log


def source(disk: SimDisk) -> dict[str, bytes]:
    return {path: data for path, data in disk.tree().items() if path.startswith("log/")}


@pytest.mark.parametrize("count", range(1, 13))
def test_a_copy_up_to_a_seq_holds_exactly_that(
    log: SegmentedLog, open_log: Opener, disk: SimDisk, first_seq: int, count: int
) -> None:
    before, held = source(disk), list(log)
    done = restore(log, "copy", to_seq=first_seq + count - 1)
    assert (done.path, done.lowest, done.highest) == ("copy", first_seq, first_seq + count)
    assert source(disk) == before
    with open_log("copy") as copy:
        assert copy.report.clean
        assert list(copy) == held[:count]
        assert copy.size == done.bytes
        assert copy.append(b"goes its own way") == first_seq + count
    assert verify("copy", disk=disk).ok
    assert log.append(b"so does this") == first_seq + 12


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_a_copy_up_to_a_time_holds_what_was_there_by_then(log: SegmentedLog, open_log: Opener) -> None:
    held = list(log)
    for number, ts_us in enumerate(sorted({record.ts_us for record in held})):
        for moment in (ts_us - 1, ts_us, ts_us + 9_999):
            path = f"copy {number} {moment - ts_us}"
            expected = [record for record in held if record.ts_us <= moment]
            assert restore(log, path, to_time_us=moment).highest == held[0].seq + len(expected)
            assert list(open_log(path)) == expected


@pytest.mark.parametrize("codec", ["laminar"])
def test_a_layout_without_times_is_restored_by_seq_only(log: SegmentedLog, disk: SimDisk, clock: ManualClock) -> None:
    before = disk.digest()
    with pytest.raises(BadInput, match="time"):
        restore(log, "copy", to_time_us=clock.now_us())
    assert disk.digest() == before


def test_whole_segments_are_copied_byte_for_byte(log: SegmentedLog, disk: SimDisk, first_seq: int) -> None:
    restore(log, "copy", to_seq=first_seq + 9)
    stems = [path for path in source(disk) if any(f"{base}." in path for base in (first_seq, first_seq + 4))]
    assert len(stems) >= 4
    for path in stems:
        assert disk.read_file("copy" + path.removeprefix("log")) == disk.read_file(path)


def test_more_than_there_is_gives_all_there_is(log: SegmentedLog, open_log: Opener, first_seq: int) -> None:
    assert restore(log, "copy", to_seq=first_seq + 999).highest == log.highest
    assert list(open_log("copy")) == list(log)


def test_less_than_there_is_gives_an_empty_log_or_is_refused(
    log: SegmentedLog, open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    log.retain(keep_bytes=0)
    assert log.lowest == first_seq + 8
    assert restore(log, "copy", to_seq=first_seq + 7).highest == first_seq + 8
    with open_log("copy") as copy:
        assert (len(copy), copy.append(b"a")) == (0, first_seq + 8)
    before = disk.digest()
    with pytest.raises(BadInput, match=str(first_seq + 8)):
        restore(log, "other", to_seq=first_seq + 6)
    assert disk.digest() == before


@pytest.mark.parametrize("goals", [{}, {"to_seq": 3, "to_time_us": 3}], ids=["neither", "both"])
def test_it_is_up_to_a_seq_or_up_to_a_time(log: SegmentedLog, disk: SimDisk, goals: dict[str, int]) -> None:
    before = disk.digest()
    with pytest.raises(BadInput, match="either"):
        restore(log, "copy", to_seq=goals.get("to_seq"), to_time_us=goals.get("to_time_us"))
    assert disk.digest() == before


@pytest.mark.parametrize("taken", ["copy/notes.txt", "copy"], ids=["directory", "file"])
def test_a_place_that_is_taken_is_refused_and_left_alone(
    log: SegmentedLog, disk: SimDisk, first_seq: int, taken: str
) -> None:
    disk.write_file(taken, b"mine")
    before = disk.digest()
    with pytest.raises(AlreadyExists, match="copy"):
        restore(log, "copy", to_seq=first_seq)
    assert disk.digest() == before


def test_an_empty_directory_is_a_new_place(log: SegmentedLog, open_log: Opener, disk: SimDisk, first_seq: int) -> None:
    disk.make_dir("copy")
    restore(log, "copy", to_seq=first_seq + 1)
    assert len(open_log("copy")) == 2


def test_holes_are_restored_as_holes(log: SegmentedLog, open_log: Opener, first_seq: int) -> None:
    """Method: compaction keeps the last of every segment's words; copies end before, in and behind holes."""
    log.compact(lambda record: record.data[:1])
    held = list(log)
    for count in range(1, 13):
        restore(log, f"copy {count}", to_seq=first_seq + count - 1)
        with open_log(f"copy {count}") as copy:
            assert list(copy) == [record for record in held if record.seq < first_seq + count]
            assert not copy.report.damage


def test_a_reader_can_restore(log: SegmentedLog, open_log: Opener, first_seq: int) -> None:
    reader = open_log(read_only=True)
    restore(reader, "copy", to_seq=first_seq + 5)
    assert list(open_log("copy")) == list(log)[:6]


def test_progress_counts_segments(log: SegmentedLog, first_seq: int) -> None:
    seen: list[tuple[int, int]] = []
    restore(log, "copy", to_seq=first_seq + 9, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (3, 3)]


def test_an_interrupted_restore_is_a_shorter_log_and_never_a_wrong_one(
    log: SegmentedLog, open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    """Method: the power fails at every operation in turn; what is durable then is opened."""
    held = list(log)
    log.close()
    for ops in range(1, 200):
        machine = disk.reboot()
        again = open_log(disk=machine)
        machine.cut_power_at(machine.op_count + ops)
        try:
            restore(again, "copy", to_seq=first_seq + 9)
        except PowerOff:
            pass
        else:
            break
        for keep in ("none", "all"):
            image = machine.crash_image("all" if keep == "all" else "none")
            if image.stat("copy") is not None and image.list_dir("copy"):
                found = _records(open_log, image)
                assert found == held[: len(found)], (ops, keep)
    else:
        pytest.fail("the restore never came to its end")


def _records(open_log: Opener, image: SimDisk) -> list[Record]:
    copy = open_log("copy", disk=image)
    assert not copy.report.damage
    return list(copy)
