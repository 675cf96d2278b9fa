"""Letting go of WAL files: oldest first, and nothing else's."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from tidelog.disk.interface import join
from tidelog.testing import PowerOff, SimDisk
from tidelog.wal import file_path, list_file_numbers, replay_shard
from tidelog.wal.paths import CURRENT, RESERVE, SINGLE_SHARD_KEY, encode_current, remove_old_files, shard_directory

WAL = "wal"
KEY = "shard-01"


def group(key: str, *numbers: int) -> SimDisk:
    """A group with these files, all of it durable."""
    disk = SimDisk()
    place = shard_directory(WAL, key)
    disk.make_dir(place)
    for name in [*(file_path(place, number) for number in numbers), join(place, CURRENT)]:
        file = disk.open(name, "create")
        file.write(0, b"frames")
        file.sync()
        file.close()
    disk.sync_dir(place)
    return disk


def test_only_files_below_the_number_are_removed() -> None:
    disk = group(KEY, 1, 5, 9)
    assert remove_old_files(disk, WAL, KEY, 9) == 2
    assert list_file_numbers(disk, shard_directory(WAL, KEY)) == [9]
    assert disk.stat(join(shard_directory(WAL, KEY), CURRENT)) is not None
    assert remove_old_files(disk, WAL, KEY, 9) == 0


def test_directory_of_an_empty_shard_is_removed() -> None:
    disk = group(KEY, 1, 5)
    assert remove_old_files(disk, WAL, KEY, 6) == 2
    assert disk.stat(shard_directory(WAL, KEY)) is None
    assert remove_old_files(disk, WAL, KEY, 6) == 0, "once more is harmless"


def test_directory_of_a_single_shard_is_kept() -> None:
    disk = group(SINGLE_SHARD_KEY, 1, 5)
    assert remove_old_files(disk, WAL, SINGLE_SHARD_KEY, 6) == 2
    assert disk.list_dir(WAL) == []


def test_directory_with_other_files_is_kept() -> None:
    disk = group(KEY, 1)
    disk.open(join(shard_directory(WAL, KEY), "notes.txt"), "create").close()
    assert remove_old_files(disk, WAL, KEY, 2) == 1
    assert disk.list_dir(shard_directory(WAL, KEY)) == ["notes.txt"]


def test_removal_stops_at_a_file_that_cannot_be_removed() -> None:
    disk = group(KEY, 1, 5, 9)
    disk.fail("remove", error=errno.EIO)
    with pytest.raises(OSError, match="5"):
        remove_old_files(disk, WAL, KEY, 9)
    assert list_file_numbers(disk, shard_directory(WAL, KEY)) == [1, 5, 9]


def test_power_cut_during_removal_leaves_no_hole() -> None:
    disk = group(KEY, 1, 5, 9, 12)
    found = 0
    for number in range(1, 8):
        cut = disk.reboot()
        cut.cut_power_at(number)
        with suppress(PowerOff):
            remove_old_files(cut, WAL, KEY, 9)
        for image in cut.images():
            found += 1
            assert list_file_numbers(image.disk, shard_directory(WAL, KEY))[-2:] == [9, 12], image.label
    assert found >= 10


def test_disk_reserve_is_kept() -> None:
    disk = group(SINGLE_SHARD_KEY, 1, 5)
    disk.write_file(join(WAL, RESERVE), bytes(4096))
    assert remove_old_files(disk, WAL, SINGLE_SHARD_KEY, 6) == 2
    assert disk.list_dir(WAL) == [RESERVE]


def test_empty_shard_never_claims_removed_files() -> None:
    """Method: the power is cut at every operation; where CURRENT is left, so is the file that it names."""
    disk = group(KEY, 1, 5)
    disk.write_file(join(shard_directory(WAL, KEY), CURRENT), encode_current(5, 6))
    found = 0
    for number in range(1, 12):
        cut = disk.reboot()
        cut.cut_power_at(number)
        with suppress(PowerOff):
            remove_old_files(cut, WAL, KEY, 6)
        for image in cut.images():
            found += 1
            assert replay_shard(image.disk, shard_directory(WAL, KEY)).missing_file is None, image.label
    assert found >= 10
