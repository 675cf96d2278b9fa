"""Injected faults strike where they were asked to and do what they say, nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random

import pytest

from tidelog.testing import DiskCall, SimDisk, SyncMode


def prepared() -> SimDisk:
    disk = SimDisk(trace=True)
    disk.write_file("d/a", b"old")
    disk.write_file("LOCK", b"")
    return disk


ACTIONS: dict[DiskCall, Callable[[SimDisk], object]] = {
    "open": lambda disk: disk.open("d/a"),
    "create": lambda disk: disk.open("d/new", "create"),
    "read": lambda disk: disk.open("d/a").read(0, 1),
    "write": lambda disk: disk.open("d/a", "write").write(0, b"new"),
    "cut": lambda disk: disk.open("d/a", "write").truncate(1),
    "reserve": lambda disk: disk.open("d/a", "write").allocate(10),
    "sync": lambda disk: disk.open("d/a").sync(),
    "sync_dir": lambda disk: disk.sync_dir("d"),
    "rename": lambda disk: disk.rename("d/a", "d/b"),
    "remove": lambda disk: disk.remove("d/a"),
    "mkdir": lambda disk: disk.make_dir("e"),
    "rmdir": lambda disk: disk.remove_dir("d"),
    "lock": lambda disk: disk.lock("LOCK"),
}


@pytest.mark.parametrize("op", ACTIONS)
def test_a_failing_call_raises_what_was_asked_and_has_no_effect(op: DiskCall) -> None:
    disk = prepared()
    if op == "rmdir":
        disk.remove("d/a")
    before, traced = disk.digest(), len(disk.trace)
    disk.fail(op, error=errno.EROFS)
    with pytest.raises(OSError, match="injected") as failed:
        ACTIONS[op](disk)
    assert failed.value.errno == errno.EROFS
    assert disk.digest() == before
    assert len(disk.trace) == traced + (op not in ("open", "read", "lock")), "a failed operation has its number"
    ACTIONS[op](disk)


@pytest.mark.parametrize("op", ACTIONS)
def test_a_fault_strikes_no_other_kind_of_call(op: DiskCall) -> None:
    for other, act in ACTIONS.items():
        involved = {other, "open"} if other in ("read", "write", "cut", "reserve", "sync") else {other}
        involved |= {"sync_dir"} if other == "mkdir" else set()
        if op not in involved:
            disk = prepared()
            if other == "rmdir":
                disk.remove("d/a")
            disk.fail(op, times=None)
            act(disk)


def struck(disk: SimDisk, path: str, count: int) -> list[int]:
    """Which of `count` writes fail, from 1."""
    file = disk.open(path, "write")
    failed = []
    for number in range(1, count + 1):
        try:
            file.write(0, b"x")
        except OSError:
            failed.append(number)
    return failed


@pytest.mark.parametrize(
    ("at", "times", "expected"),
    [(1, 1, [1]), (3, 1, [3]), (2, 3, [2, 3, 4]), (4, None, [4, 5, 6]), (9, 1, [])],
)
def test_a_fault_strikes_at_its_number_and_as_often_as_asked(at: int, times: int | None, expected: list[int]) -> None:
    disk = prepared()
    disk.fail("write", at, times=times)
    assert struck(disk, "d/a", 6) == expected


def test_a_fault_counts_from_the_moment_it_was_asked_for_and_only_its_paths() -> None:
    disk = prepared()
    disk.write_file("d/b.log", b"")
    assert struck(disk, "d/b.log", 3) == []
    disk.fail("write", 2, path=".log")
    assert struck(disk, "d/a", 5) == []
    assert struck(disk, "d/b.log", 3) == [2]


def test_two_faults_each_count_every_call() -> None:
    disk = prepared()
    disk.fail("write", 2, times=2)
    disk.fail("write", 3, times=3, error=errno.ENOSPC)
    assert struck(disk, "d/a", 7) == [2, 3, 4, 5]
    disk.fail("write", times=None)
    disk.clear_faults()
    assert struck(disk, "d/a", 3) == []


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        SimDisk().fail("write", 0)


def test_a_failing_write_may_land_its_first_bytes() -> None:
    disk = prepared()
    disk.fail("write", partial=2)
    with pytest.raises(OSError, match="injected"):
        disk.open("d/a", "write").write(1, b"NEW")
    assert disk.read_file("d/a") == b"oNE"
    assert disk.crash_image("none").read_file("d/a") == b"old"


def test_a_file_is_made_when_only_the_sync_inside_make_dir_fails() -> None:
    disk = prepared()
    disk.fail("sync_dir")
    with pytest.raises(OSError, match="injected"):
        disk.make_dir("e")
    assert {image.disk.stat("e") is not None for image in disk.images()} == {True, False}


# Short writes.


def test_short_writes_still_arrive_whole_in_several_operations() -> None:
    disk = prepared()
    disk.short_writes(Random(5))
    data = bytes(range(256)) * 8
    disk.open("d/a", "write").write(7, data)
    assert disk.read_file("d/a") == b"old\0\0\0\0" + data
    sizes = [int(words.partition("+")[2]) for words in disk.trace]
    assert len(sizes) > 2
    assert sum(sizes) == len(data)
    disk.short_writes(None)
    disk.open("d/a", "write").write(0, data)
    assert disk.trace[-1] == "write d/a@0+2048"


# A full disk.


def test_full_disk_takes_what_fits_and_works_again_when_space_is_free() -> None:
    disk = prepared()
    disk.capacity_bytes = 10
    file = disk.open("d/a", "write")
    with pytest.raises(OSError, match="capacity of 10") as failed:
        file.write(3, b"0123456789")
    assert failed.value.errno == errno.ENOSPC
    assert disk.read_file("d/a") == b"old0123456"
    with pytest.raises(OSError):
        disk.open("d/b", "create").write(0, b"x")
    file.write(0, b"new overwr")  # bytes that are there already take no room
    disk.capacity_bytes = 13
    file.write(10, b"xyz")
    assert disk.read_file("d/a") == b"new overwrxyz"


def test_remove_and_truncate_free_space() -> None:
    disk = prepared()
    disk.capacity_bytes = 3
    file = disk.open("d/b", "create")
    with pytest.raises(OSError):
        file.write(0, b"x")
    disk.open("d/a", "write").truncate(2)
    file.write(0, b"x")
    disk.remove("d/a")
    file.write(0, b"xyz")
    with pytest.raises(OSError):
        file.write(10, b"far beyond")
    assert disk.tree() == {"LOCK": b"", "d/b": b"xyz"}


def test_a_full_disk_refuses_a_reservation_whole() -> None:
    disk = prepared()
    disk.capacity_bytes = 10
    file = disk.open("d/a", "write")
    with pytest.raises(OSError) as failed:
        file.allocate(11)
    assert failed.value.errno == errno.ENOSPC
    assert file.size() == 3
    file.allocate(10)
    assert file.size() == 10
    file.truncate(1000)
    assert file.size() == 1000, "a cut allocates nothing, so it needs no room"


# Failing and lying syncs.


@pytest.mark.parametrize(
    ("mode", "seen", "durable"),
    [("dropped", b"new!", b"old"), ("reverted", b"old", b"old"), ("kept", b"new!", b"new!")],
)
def test_the_three_ways_a_sync_fails(mode: SyncMode, seen: bytes, durable: bytes) -> None:
    disk = prepared()
    disk.fail_sync(mode)
    file = disk.open("d/a", "write")
    file.write(0, b"new!")
    with pytest.raises(OSError) as failed:
        file.sync()
    assert failed.value.errno == errno.EIO
    assert file.read(0, 10) == seen
    assert disk.open("d/a").read(0, 10) == seen
    file.sync()
    assert file.read(0, 10) == seen
    assert [image.disk.read_file("d/a") for image in disk.images()] == [durable]


def test_bytes_written_after_a_dropped_sync_become_durable_beside_the_hole() -> None:
    disk = prepared()
    disk.fail_sync("dropped")
    file = disk.open("d/a", "write")
    file.write(3, b"lost")
    with pytest.raises(OSError):
        file.sync()
    file.write(7, b"kept")
    file.sync()
    assert file.read(0, 20) == b"oldlostkept"
    assert disk.crash_image("all").read_file("d/a") == b"old\0\0\0\0kept"
    assert disk.reboot().read_file("d/a") == b"oldlostkept", "the page cache outlives the process"


def test_bytes_written_into_dropped_ones_become_durable_with_the_size_they_need() -> None:
    disk = prepared()
    disk.fail_sync("dropped")
    file = disk.open("d/a", "write")
    file.write(3, b"lost lost")
    with pytest.raises(OSError):
        file.sync()
    file.write(5, b"XY")
    file.sync()
    assert disk.crash_image("none").read_file("d/a") == b"old\0\0XY"


def test_a_reverted_file_goes_on_from_its_durable_end() -> None:
    disk = prepared()
    disk.fail_sync("reverted", path="d/a")
    file = disk.open("d/a", "write")
    file.write(3, b"lost")
    with pytest.raises(OSError):
        file.sync()
    assert file.size() == 3
    file.write(3, b"!")
    file.sync()
    assert disk.crash_image("none").read_file("d/a") == b"old!"


def test_a_sync_can_fail_for_ever_and_on_one_path_only() -> None:
    disk = prepared()
    disk.write_file("d/b", b"")
    disk.fail_sync("kept", at=2, times=None, path="d/a")
    one, other = disk.open("d/a", "write"), disk.open("d/b", "write")
    one.sync()
    for _ in range(3):
        other.sync()
        with pytest.raises(OSError):
            one.sync()


def test_a_lying_sync_says_yes_and_keeps_nothing() -> None:
    disk = prepared()
    disk.ignores_syncs = True
    file = disk.open("d/b", "create")
    file.write(0, b"abc")
    file.sync()
    named = disk.open("d/a", "write")
    named.write(0, b"new")
    named.sync()
    disk.sync_dir("d")
    assert disk.crash_image("none").tree() == prepared().tree()
    disk.ignores_syncs = False
    file.sync()
    disk.sync_dir("d")
    assert disk.crash_image("none").read_file("d/b") == b"abc"


# Bits.


def test_a_flipped_bit_is_seen_at_once_and_survives() -> None:
    disk = prepared()
    disk.flip_bit("d/a", 1, 5)
    assert disk.read_file("d/a") == b"oLd"
    assert disk.crash_image("none").read_file("d/a") == b"oLd"
    disk.flip_bit("d/a", 1, 5)
    assert [image.disk.read_file("d/a") for image in disk.images()] == [b"old"]


def test_no_later_sync_repairs_a_flipped_bit() -> None:
    disk = prepared()
    file = disk.open("d/a", "write")
    file.write(2, b"DE")
    disk.flip_bit("d/a", 2, 5)
    disk.flip_bit("d/a", 3, 5)
    assert file.read(0, 10) == b"olde"
    file.sync()
    assert disk.crash_image("none").read_file("d/a") == b"olde"
    with pytest.raises(ValueError, match="outside"):
        disk.flip_bit("d/a", 4, 0)
