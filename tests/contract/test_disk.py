"""Every disk keeps every promise of the seam."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tidelog.disk.memory import MemoryDisk
from tidelog.disk.posix import PosixDisk
from tidelog.testing import SimDisk
from tidelog.testing.disk_contract import DiskAndRoot, DiskContract


class TestPosixDisk(DiskContract):
    def make_disk_and_root(self, tmp_path: Path, /) -> DiskAndRoot:
        return PosixDisk(), str(tmp_path)


class TestMemoryDisk(DiskContract):
    def make_disk_and_root(self, _: Path, /) -> DiskAndRoot:
        disk = MemoryDisk()
        disk.make_dir("some/where")
        return disk, "some/where"


class TestMemoryDiskAtItsRoot(DiskContract):
    def make_disk_and_root(self, _: Path, /) -> DiskAndRoot:
        return MemoryDisk(), "."


class TestSimDisk(DiskContract):
    def make_disk_and_root(self, _: Path, /) -> DiskAndRoot:
        disk = SimDisk()
        disk.make_dir("/some/where")
        return disk, "/some/where"


class TestSimDiskWithShortWrites(DiskContract):
    def make_disk_and_root(self, _: Path, /) -> DiskAndRoot:
        disk = SimDisk()
        disk.short_writes(Random(1))
        return disk, ""
