"""Retention and expiry through the log: what goes, what stays, and what the checkpoint remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.errors import BadInput, OutOfRange
from tidelog.testing import ManualClock, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]
CHECKPOINT = "log/.cleaner_checkpoint"
START_MS = 1_700_000_000_000


def grow(log: SegmentedLog, clock: ManualClock, count: int = 4) -> None:
    """Sealed segments of two records each, a second apart, and an empty active one."""
    for number in range(count):
        log.append_many([b"%d a" % number, b"%d b" % number])
        log.seal()
        clock.tick(1_000)


def checkpoint(disk: SimDisk) -> dict[str, Any]:
    found = json.loads(disk.read_file(CHECKPOINT))
    assert isinstance(found, dict)
    return found


def numbers(log: SegmentedLog) -> list[int]:
    """Which of the segments that `grow` made are left."""
    return sorted({int(record.data.split()[0]) for record in log})


# By age and by size.


def test_segments_past_the_age_are_dropped(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    """G106. Now is 4 s; the newest record of segment n is 4 - n seconds old."""
    log = open_log()
    grow(log, clock)
    done = log.retain(keep_ms=2_500)
    assert (done.segments, done.records, done.lowest, numbers(log)) == (2, 4, first_seq + 4, [2, 3])
    assert (log.lowest, log.highest) == (first_seq + 4, first_seq + 8)


def test_a_record_exactly_at_the_horizon_stays(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    grow(log, clock)
    assert log.retain(keep_ms=4_000).segments == 0
    clock.tick(1)
    assert log.retain(keep_ms=4_000).segments == 1


def test_segments_past_the_size_are_dropped_oldest_first(open_log: Opener, clock: ManualClock) -> None:
    """G106."""
    log = open_log()
    grow(log, clock)
    sizes, limit = log.size, log.size // 2
    done = log.retain(keep_bytes=limit)
    assert (done.segments, numbers(log)) == (2, [2, 3])
    assert (log.size <= limit, done.bytes) == (True, sizes - log.size)
    assert log.retain(keep_bytes=log.size).segments == 0, "exactly the limit is within it"
    assert log.retain(keep_bytes=log.size - 1).segments == 1


def test_no_limit_drops_nothing(open_log: Opener, clock: ManualClock, disk: SimDisk) -> None:
    log = open_log()
    grow(log, clock)
    before = disk.digest()
    assert log.retain().segments == 0
    assert disk.digest() == before


def test_a_dropped_segment_leaves_no_file_and_its_seqs_are_out_of_range(
    open_log: Opener, clock: ManualClock, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G147. The oldest file is named after the first seq that is left."""
    log = open_log()
    grow(log, clock)
    log.retain(keep_ms=2_500)
    stem = data_path(first_seq).rpartition("/")[2].partition(".")[0]
    assert [path for path in disk.tree() if path.startswith(f"log/{stem}.")] == []
    assert data_path(log.lowest) in disk.tree()
    with pytest.raises(OutOfRange) as refused:
        log.read(first_seq)
    assert (refused.value.lowest, refused.value.highest) == (first_seq + 4, first_seq + 8)
    log.close()
    again = open_log()
    assert (again.report.clean, again.lowest, numbers(again)) == (True, first_seq + 4, [2, 3])


@pytest.mark.parametrize("limits", [{"keep_ms": -1}, {"keep_bytes": -1}])
def test_a_negative_limit_is_refused(open_log: Opener, clock: ManualClock, limits: dict[str, int]) -> None:
    log = open_log()
    grow(log, clock)
    with pytest.raises(BadInput, match="-1"):
        log.retain(**limits)
    assert len(log) == 8


# What protects.


def test_the_active_segment_is_never_dropped(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    """G106, G107."""
    log = open_log(segment_age_ms_max=None)
    log.append_many([b"0 a", b"0 b"])
    clock.tick(10**9)
    assert log.retain(keep_ms=0, keep_bytes=0).segments == 0
    assert len(log) == 2
    grow(log, clock, 2)
    clock.tick(1)
    assert log.retain(keep_ms=0, keep_bytes=0).segments == 2
    assert (len(log.segments), log.lowest, log.highest) == (1, first_seq + 6, first_seq + 6)
    assert log.append(b"next") == first_seq + 6


@pytest.mark.parametrize("mark", range(10))
def test_nothing_at_or_above_the_high_watermark_is_dropped(
    open_log: Opener, clock: ManualClock, first_seq: int, mark: int
) -> None:
    """G106."""
    log = open_log()
    grow(log, clock)
    done = log.retain(keep_bytes=0, high_watermark=first_seq + mark)
    assert done.segments == min(mark // 2, 4)
    assert log.lowest <= first_seq + mark


def test_what_is_not_durable_yet_is_not_dropped_whatever_watermark_is_given(
    open_log: Opener, clock: ManualClock, first_seq: int
) -> None:
    """G106. A sealed segment is always durable; a watermark beyond that claims nothing."""
    log = open_log(sync="interval")
    grow(log, clock)
    log.append(b"4 a")
    log.append(b"4 b")
    assert (log.durable, log.highest) == (first_seq + 9, first_seq + 10)
    log.retain(keep_bytes=0, high_watermark=first_seq + 999)
    assert (log.lowest, [record.data for record in log]) == (first_seq + 8, [b"4 a", b"4 b"])


@pytest.mark.parametrize("committed", range(10))
def test_what_a_consumer_still_needs_is_not_dropped(
    open_log: Opener, clock: ManualClock, first_seq: int, committed: int
) -> None:
    """G106. Method: a committed seq is the next to process, so everything below it is done."""
    log = open_log()
    grow(log, clock)
    log.offsets.commit("slow", first_seq + committed)
    log.offsets.commit("fast", first_seq + 8)
    done = log.retain(keep_ms=0, keep_bytes=0)
    assert done.segments == min(committed // 2, 4)
    assert ("consumer" in done.reason) == (committed < 8)
    if committed < 8:
        assert log.read(first_seq + committed).seq == first_seq + committed


def test_a_consumer_of_another_log_protects_nothing(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    log = open_log()
    grow(log, clock)
    log.offsets.commit("group", first_seq, topic="another")
    assert log.retain(keep_bytes=0).segments == 4


# Doing it again.


@pytest.mark.parametrize("limits", [{"keep_ms": 2_500}, {"keep_bytes": 150}, {"keep_ms": 0, "keep_bytes": 0}])
def test_a_second_pass_drops_nothing_and_writes_nothing(
    open_log: Opener, clock: ManualClock, disk: SimDisk, limits: dict[str, int]
) -> None:
    log = open_log()
    grow(log, clock)
    assert log.retain(**limits).segments > 0
    before = disk.digest()
    for _ in range(2):
        assert log.retain(**limits).segments == 0
    assert disk.digest() == before
    log.close()
    before = disk.digest()
    again = open_log()
    assert again.retain(**limits).segments == 0
    assert disk.digest() == before


# The checkpoint.


def test_the_checkpoint_says_how_far_and_when(
    open_log: Opener, clock: ManualClock, disk: SimDisk, first_seq: int
) -> None:
    log = open_log()
    grow(log, clock)
    clock.tick_us(7)
    assert CHECKPOINT not in disk.tree()
    log.retain(keep_ms=2_500)
    assert checkpoint(disk) == {
        "last_cleaned_offset": first_seq + 8,
        "retention_horizon_ms": START_MS + 4_000 - 2_500,
        "compaction_state": "Idle",
        "created_at": {"secs_since_epoch": 1_700_000_004, "nanos_since_epoch": 7_000},
    }


def test_the_checkpoint_never_goes_back(open_log: Opener, clock: ManualClock, disk: SimDisk, first_seq: int) -> None:
    """G110. Method: a later pass with a lower watermark, a clock set back and a larger horizon."""
    log = open_log()
    grow(log, clock, 6)
    log.retain(keep_ms=4_500, high_watermark=first_seq + 10)
    before = checkpoint(disk)
    assert before["last_cleaned_offset"] == first_seq + 10
    assert log.retain(keep_bytes=0, high_watermark=first_seq + 6).segments == 1
    assert checkpoint(disk)["last_cleaned_offset"] == first_seq + 10
    clock.set_us(1_000_000_000)
    assert log.retain(keep_ms=0, keep_bytes=0).segments > 0
    after = checkpoint(disk)
    assert after["last_cleaned_offset"] >= before["last_cleaned_offset"]
    assert after["retention_horizon_ms"] >= before["retention_horizon_ms"]


def test_a_checkpoint_that_cannot_be_read_is_made_anew(
    open_log: Opener, clock: ManualClock, disk: SimDisk, first_seq: int
) -> None:
    log = open_log()
    grow(log, clock)
    disk.write_file(CHECKPOINT, b'{"last_cleaned_offset": ')
    assert log.retain(keep_ms=2_500).segments == 2
    assert checkpoint(disk)["last_cleaned_offset"] == first_seq + 8


@pytest.mark.parametrize("codec", ["rustlog"])
def test_the_older_form_of_the_checkpoint_is_understood(open_log: Opener, clock: ManualClock, disk: SimDisk) -> None:
    """G110. Method: the 16-byte form says 500; a pass that reached 8 must not take that back."""
    log = open_log()
    grow(log, clock)
    disk.write_file(CHECKPOINT, (500).to_bytes(8, "big") + START_MS.to_bytes(8, "big"))
    log.retain(keep_ms=2_500)
    assert checkpoint(disk)["last_cleaned_offset"] == 500


def test_a_crash_at_any_step_of_retention_leaves_each_segment_whole_or_gone(
    open_log: Opener, clock: ManualClock, disk: SimDisk
) -> None:
    """G107, G108, G109. Method: restarts from before every operation; the same pass then reaches the same end."""
    log = open_log()
    grow(log, clock)
    log.retain(keep_ms=3_500)
    ends: set[tuple[int, ...]] = set()

    def examine(_: int) -> None:
        for image in disk.images(("none", "all", "prefixes", "directories"), limit=10):
            checkpoint(image.disk)
            again = open_log(disk=image.disk)
            assert not again.report.damage, image.label
            left = numbers(again)
            assert left == list(range(left[0], 4)), image.label
            assert [record.data for record in again] == [b"%d %s" % (n, x) for n in left for x in (b"a", b"b")]
            ends.add(tuple(left))
            again.retain(keep_ms=1_500)
            assert numbers(again) == [3], image.label
            assert len(again.segments) >= 1

    disk.on_op = examine
    log.retain(keep_ms=1_500)
    disk.on_op = None
    examine(0)
    assert ends == {(1, 2, 3), (3,)}, "the removal is announced as a whole"


# Expiry.


def test_expired_segments_leave_as_a_whole_prefix_and_numbers_go_on(
    open_log: Opener, clock: ManualClock, first_seq: int
) -> None:
    """G128."""
    log = open_log()
    grow(log, clock)
    assert log.remove_expired(2_500) == 4
    assert (log.lowest, log.highest, numbers(log)) == (first_seq + 4, first_seq + 8, [2, 3])
    assert log.remove_expired(2_500) == 0


def test_expiry_takes_the_active_segment_too_and_keeps_the_numbering(
    open_log: Opener, clock: ManualClock, disk: SimDisk, first_seq: int
) -> None:
    """G128."""
    log = open_log()
    grow(log, clock, 2)
    log.append(b"2 a")
    clock.tick(1_000)
    assert log.remove_expired(1_000) == 4, "the last record is exactly as old as that: it stays"
    assert [record.data for record in log] == [b"2 a"]
    clock.tick(1)
    assert log.remove_expired(1_000) == 1
    assert (log.lowest, log.highest, list(log), len(log.segments)) == (first_seq + 5, first_seq + 5, [], 1)
    assert log.remove_expired(0) == 0
    assert checkpoint(disk)["last_cleaned_offset"] == first_seq + 5
    log.close()
    again = open_log()
    assert (again.lowest, again.highest) == (first_seq + 5, first_seq + 5)
    assert again.append(b"next") == first_seq + 5


def test_young_segment_protects_all_later_ones(open_log: Opener, clock: ManualClock) -> None:
    """G128. Method: the clock stands still for the first segment and the active one is old: a prefix, no more."""
    log = open_log()
    grow(log, clock, 3)
    assert log.remove_expired(10_000) == 0
    clock.tick(100_000)
    assert log.remove_expired(102_500) == 2


@pytest.mark.parametrize("codec", ["laminar"])
def test_the_age_of_a_segment_without_times_survives_a_restart(open_log: Opener, clock: ManualClock) -> None:
    """G128. Method: the layout keeps no time per record, so the birth of each segment is kept beside it."""
    log = open_log()
    grow(log, clock)
    log.close()
    clock.tick(500)
    log = open_log()
    assert log.remove_expired(3_000) == 4
    assert numbers(log) == [2, 3]


def test_the_active_segment_does_not_expire_by_a_restart(open_log: Opener, clock: ManualClock) -> None:
    """G128. Method: the last write came long after the segment was born; a restart must not forget that."""
    log = open_log()
    log.append(b"0 a")
    clock.tick(10_000)
    log.append(b"0 b")
    log.close()
    clock.tick(100)
    log = open_log()
    assert log.remove_expired(5_000) == 0
    assert len(log) == 2


def test_a_negative_age_is_refused(open_log: Opener) -> None:
    log = open_log()
    log.append(b"0 a")
    with pytest.raises(BadInput, match="-1"):
        log.remove_expired(-1)
    assert len(log) == 1


def test_expiry_of_an_empty_log_is_nothing(open_log: Opener, clock: ManualClock, disk: SimDisk) -> None:
    log = open_log()
    clock.tick(10**6)
    before = disk.digest()
    assert log.remove_expired(0) == 0
    assert disk.digest() == before


# By seq.


def test_drop_below_drops_only_complete_segments(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    log = open_log()
    grow(log, clock)
    assert log.drop_below(first_seq + 3).segments == 1, "the second one still holds something"
    assert numbers(log) == [1, 2, 3]
    assert log.drop_below(first_seq + 3).segments == 0
    log.append(b"9 active")
    assert log.drop_below(1 << 40).segments == 3
    assert numbers(log) == [9], "never the active one"


def test_a_sync_beside_appends_makes_them_durable(open_log: Opener) -> None:
    log = open_log(sync="interval")
    log.append(b"0 a")
    assert log.durable < log.highest
    log.sync_concurrently()
    assert log.durable == log.highest
    log.sync_concurrently()
