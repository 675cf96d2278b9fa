"""What the contract suite cannot see of the disk in memory."""

from __future__ import annotations

from threading import Thread

import pytest

from tidelog.disk.memory import MemoryDisk
from tidelog.testing import ManualClock


def test_files_are_stamped_by_the_clock_that_was_passed_in() -> None:
    clock = ManualClock(5_000_000)
    disk = MemoryDisk(clock)
    file = disk.open("a", "create")
    clock.tick(7)
    assert disk.stat("a") == (0, 5_000, False)
    file.write(0, b"x")
    assert disk.stat("a") == (1, 5_007, False)
    clock.tick(1)
    file.allocate(1)
    assert disk.stat("a") == (1, 5_007, False)
    file.truncate(0)
    assert disk.stat("a") == (0, 5_008, False)


def test_relative_and_absolute_paths_start_at_the_same_root() -> None:
    disk = MemoryDisk()
    disk.make_dir("/x")
    disk.open("x/a", "create").write(0, b"abc")
    assert disk.open("/x//a").read(0, 10) == disk.open("./x/a").read(0, 10) == b"abc"
    assert disk.list_dir("") == disk.list_dir("/") == disk.list_dir(".") == ["x"]


def test_make_dir_refuses_the_path_of_a_file() -> None:
    disk = MemoryDisk()
    disk.open("a", "create")
    for path in ("a", "a/b"):
        with pytest.raises(FileExistsError):
            disk.make_dir(path)


def test_two_disks_are_independent() -> None:
    disk = MemoryDisk()
    disk.open("a", "create")
    assert MemoryDisk().list_dir("") == []


def test_a_directory_is_not_opened_locked_or_removed_as_a_file() -> None:
    disk = MemoryDisk()
    disk.make_dir("x")
    for refused in (disk.open, disk.lock, disk.remove):
        with pytest.raises(IsADirectoryError):
            refused("x")
    with pytest.raises(OSError):
        disk.remove_dir("/")


def test_writers_in_several_threads_do_not_disturb_each_other() -> None:
    disk = MemoryDisk()
    file = disk.open("a", "create")

    def write(number: int) -> None:
        for turn in range(200):
            file.write((turn * 4 + number) * 8, bytes([number]) * 8)

    threads = [Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read(0, 1 << 20) == b"".join(bytes([number]) * 8 for number in range(4)) * 200
