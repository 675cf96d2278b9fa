"""Sealing: when a segment is full or old, in which order it is made whole, and that it never changes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.testing import ManualClock, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]
HOUR_US = 3_600_000_000


def test_a_segment_that_has_reached_its_size_is_sealed_before_the_next_append(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G127."""
    log = open_log(segment_bytes_max=1_000, segment_overflow_bytes=500)
    log.append(b"x" * 900)
    if len(disk.read_file(data_path(first_seq))) < 1_000:
        log.append(b"x" * 100)
    held = log.highest - first_seq
    assert len(disk.read_file(data_path(first_seq))) >= 1_000
    assert len(log.segments) == 1, "not after the append that filled it, before the next one"
    log.append(b"y")
    assert [len(segment) for segment in log.segments] == [held, 1]


def test_a_record_that_would_pass_the_overflow_goes_to_the_next_segment(open_log: Opener, first_seq: int) -> None:
    """G127."""
    log = open_log(segment_bytes_max=1_000, segment_overflow_bytes=100)
    log.append(b"x" * 800)
    log.append(b"y" * 600)
    assert log.segments == [range(first_seq, first_seq + 1), range(first_seq + 1, first_seq + 2)]
    assert [record.data[:1] for record in log] == [b"x", b"y"]


@pytest.mark.parametrize(
    ("codec", "entry_bytes"), [("tide", 20), ("rustlog", 16), ("laminar", 16)], ids=["tide", "rustlog", "laminar"]
)
def test_a_segment_whose_index_has_reached_its_size_is_sealed(open_log: Opener, entry_bytes: int) -> None:
    log = open_log(index_bytes_max=entry_bytes * 3, index_every=1)
    for _ in range(8):
        log.append(b"x")
    sizes = [len(segment) for segment in log.segments]
    marker = 1 if log.codec == "laminar" else 0  # a base marker as long as an entry
    assert sizes[0] == 3 - marker
    assert sum(sizes) == 8
    assert max(sizes) == 3 - marker


@pytest.mark.parametrize("codec", ["narwhal"])
def test_a_sparse_index_counts_its_entries_and_not_what_is_reserved_for_it(open_log: Opener) -> None:
    log = open_log(index_bytes_max=24)
    for _ in range(100):
        log.append(b"x" * 100)
    sizes = [len(segment) for segment in log.segments]
    assert sizes[0] == 4_096 // 126 + 2, "sealed once a second entry is there"


def test_the_age_of_a_segment_is_that_of_its_first_record_with_and_without_a_restart(
    open_log: Opener, clock: ManualClock, disk: SimDisk
) -> None:
    """Method: a log stands empty for longer than a segment may live; a twin of it is restarted."""
    log = open_log(segment_age_ms_max=1_000)
    clock.tick(1_500)
    log.append(b"a")
    twin = open_log(disk=disk.reboot(), segment_age_ms_max=1_000)
    clock.tick(1)
    log.append(b"b")
    twin.append(b"b")
    assert log.segments == twin.segments


@pytest.mark.parametrize("jump_us", [-HOUR_US, -10 * 365 * 24 * HOUR_US], ids=["an hour", "ten years"])
def test_a_clock_that_goes_back_seals_nothing_early(open_log: Opener, clock: ManualClock, jump_us: int) -> None:
    log = open_log(segment_age_ms_max=1_000)
    log.append(b"a")
    clock.set_us(clock.now_us() + jump_us)
    for _ in range(3):
        log.append(b"b")
        log.tick()
    assert len(log.segments) == 1


def test_no_age_is_too_old_when_none_is_set(open_log: Opener, clock: ManualClock) -> None:
    log = open_log(segment_age_ms_max=None)
    log.append(b"a")
    clock.tick(10**9)
    log.append(b"b")
    log.tick()
    assert len(log.segments) == 1


def test_a_segment_is_on_disk_before_the_next_one_exists(
    open_log: Opener, disk: SimDisk, data_path: Names, index_path: Names, first_seq: int
) -> None:
    """G62, G114."""
    log = open_log(sync="interval")
    log.append_many([b"a", b"b", b"c"])
    before = len(disk.trace)
    log.seal()
    steps = disk.trace[before:]
    born = steps.index(f"create {data_path(first_seq + 3)}")
    assert steps.index(f"sync {data_path(first_seq)}") < born
    assert steps.index(f"sync {index_path(first_seq)}") < born
    assert "sync_dir log" in steps[born:], "the new names are durable too"
    assert not [step for step in steps if step.startswith(f"write {data_path(first_seq)}")]


def test_the_bytes_of_a_sealed_segment_never_change(
    open_log: Opener, disk: SimDisk, clock: ManualClock, first_seq: int
) -> None:
    """G64."""
    log = open_log()
    log.append_many([b"a", b"b"])
    log.seal()
    live = {log.segments[-1].start}

    def sealed() -> dict[str, bytes]:
        names = tuple(f"{base}." for base in live)
        return {
            path: data
            for path, data in disk.tree().items()
            if not path.rpartition("/")[2].endswith((".lock", ".manifest")) and not any(name in path for name in names)
        }

    before = sealed()
    assert len(before) >= 2
    log.append_many([b"c", b"d"])
    log.offsets.commit("group", first_seq)
    clock.tick(10)
    list(log)
    log.close()
    log = open_log()
    log.append(b"e")
    log.truncate(first_seq + 3)
    log.close()
    open_log().close()
    after = sealed()
    assert {path: after[path] for path in before} == before


def test_a_crash_at_any_step_of_a_roll_loses_nothing_and_leaves_a_log_that_goes_on(
    open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    """G63, G114, G146. Method: restarts from before every operation of a seal and of the append behind it."""
    log = open_log()
    log.append_many([b"a", b"b"])
    seen = 0

    def examine(_: int) -> None:
        nonlocal seen
        for image in disk.images(("none", "all", "prefixes", "directories"), limit=10):
            again = open_log(disk=image.disk)
            assert [record.data for record in again][:2] == [b"a", b"b"], image.label
            assert not again.report.damage, image.label
            assert again.append(b"next") in (first_seq + 2, first_seq + 3), image.label
            seen += 1

    disk.on_op = examine
    log.seal()
    log.append(b"c")
    disk.on_op = None
    assert seen > 10
