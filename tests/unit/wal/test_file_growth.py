"""A file that is extended because a rotation would wait for a lagging disk."""

from __future__ import annotations

import errno

import pytest
from tests.unit.wal.harness import FILE_BYTES, WAL, append, inspect_wal, wal_path

from tidelog.disk.durability import WriteLatch
from tidelog.errors import DiskFull, Latched
from tidelog.testing import SimDisk
from tidelog.wal import Position, Writer, list_file_numbers
from tidelog.wal import writer as file
from tidelog.wal.paths import read_current

STEP = append(b"x" * 454)  # a quarter of a file, except for the rest after the fourth


@pytest.fixture(autouse=True)
def lagging_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is much for a file of two KiB, and as if every sync were a large one."""
    monkeypatch.setattr(file, "EXTEND_UNSYNCED_BYTES_MIN", FILE_BYTES // 2)
    monkeypatch.setattr(file, "LARGE_SYNC_BYTES", 1)


def make(disk: SimDisk) -> Writer:
    return Writer(disk, WAL, file_number=1, file_bytes=FILE_BYTES, latch=WriteLatch(WAL), write_marks=False)


def fill(writer: Writer, count: int) -> None:
    for _ in range(count):
        writer.write([STEP], size=len(STEP), frames=1)


def test_file_is_extended_if_a_rotation_would_wait_for_the_disk() -> None:
    """Method: the exact operations. No sync, no new name: only an allocation."""
    disk = SimDisk(trace=True)
    writer = make(disk)
    fill(writer, 4)
    began = len(disk.trace)
    fill(writer, 1)
    assert disk.trace[began:] == [f"reserve {wal_path(1)} to {2 * FILE_BYTES}", f"write {wal_path(1)}@2000+500"]
    assert (writer.rotations, writer.position, writer.synced) == (0, Position(1, 2500), Position(1, 0))


def test_extended_file_is_rotated_when_the_disk_has_caught_up() -> None:
    disk = SimDisk()
    writer = make(disk)
    fill(writer, 7)
    writer.sync()
    fill(writer, 1)
    assert writer.rotations == 0, "it fits"
    fill(writer, 1)
    assert (writer.rotations, writer.position) == (1, Position(9, 500))
    assert len(disk.read_file(wal_path(9))) == FILE_BYTES, "the next one is as large as any"


def test_extended_file_is_at_most_eight_times_as_large() -> None:
    """Space comes back file by file."""
    disk = SimDisk(trace=True)
    writer = make(disk)
    fill(writer, 70)
    assert [len(disk.read_file(wal_path(first))) for first in list_file_numbers(disk, WAL)] == [8 * FILE_BYTES] * 2 + [
        2 * FILE_BYTES
    ]
    assert inspect_wal(disk).datas == [b"x" * 454] * 70
    reserved = [line.rpartition(" ")[2] for line in disk.trace if line.startswith(f"reserve {wal_path(1)}")]
    assert reserved == [str(times * FILE_BYTES) for times in (1, 2, 4, 8)]


def test_current_announces_the_largest_size_of_the_file() -> None:
    """Where the newest file is lost, that number bounds the seqs that it may have held: none is given again."""
    disk = SimDisk()
    writer = make(disk)
    for _ in range(70):
        fill(writer, 1)
        said = read_current(disk, WAL)
        assert said is not None
        assert said.size_max is not None
        assert said.size_max >= len(disk.read_file(wal_path(said.file_number)))


def test_batch_larger_than_an_extended_file_rotates() -> None:
    disk = SimDisk()
    writer = make(disk)
    fill(writer, 4)
    large = append(b"y" * 2 * FILE_BYTES)
    writer.write([large], size=len(large), frames=1)
    assert (writer.rotations, writer.position) == (1, Position(5, len(large)))


def test_small_syncs_rotate_to_the_preallocated_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "LARGE_SYNC_BYTES", 1 << 40)
    writer = make(SimDisk())
    fill(writer, 5)
    assert writer.rotations == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_file_that_cannot_be_extended_is_rotated(error: int) -> None:
    """G25. Nothing was written there, so nothing has to be taken back."""
    disk = SimDisk()
    writer = make(disk)
    fill(writer, 4)
    disk.fail("reserve", error=error)
    fill(writer, 1)
    assert (writer.rotations, writer.position, writer.latch.is_tripped) == (1, Position(5, 500), False)
    assert inspect_wal(disk).datas == [b"x" * 454] * 5


@pytest.mark.parametrize(("error", "raised"), [(errno.ENOSPC, DiskFull), (errno.EIO, Latched)])
def test_failed_write_after_an_extension_is_rolled_back_or_trips_the_latch(error: int, raised: type[Exception]) -> None:
    """G25, G26: as anywhere else in a file."""
    disk = SimDisk()
    writer = make(disk)
    fill(writer, 4)
    disk.fail("write", error=error, partial=len(STEP) - 1)
    with pytest.raises(raised):
        fill(writer, 1)
    assert writer.position == Position(1, 2000)
    if raised is DiskFull:
        assert disk.read_file(wal_path(1)) == STEP * 4 + bytes(2 * FILE_BYTES - 2000)
        fill(writer, 1)
        assert inspect_wal(disk.crash_image("all")).datas == [b"x" * 454] * 5
