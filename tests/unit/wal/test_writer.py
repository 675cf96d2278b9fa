"""The active file: order of operations, rotation, numbering, full disks (G20, G25, G26, G31, G32, G36)."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest
from tests.unit.wal.harness import FILE_BYTES, OVERHEAD, WAL, append, chain, inspect_wal, recover, wal_path

from tidelog.disk.durability import WriteLatch
from tidelog.disk.posix import PosixDisk
from tidelog.errors import Damaged, DiskFull, Latched
from tidelog.testing import SimDisk
from tidelog.wal import Position, Writer, paths
from tidelog.wal.writer import LARGE_SYNC_BYTES


def make(disk: SimDisk, *, first: int = 1, file_bytes: int = FILE_BYTES) -> Writer:
    return Writer(disk, WAL, file_number=first, file_bytes=file_bytes, latch=WriteLatch(WAL), write_marks=False)


def put(writer: Writer, *datas: bytes) -> None:
    pieces = chain(datas)
    writer.write(pieces, size=sum(map(len, pieces)), frames=len(pieces))


def filled(disk: SimDisk) -> Writer:
    """A writer whose file has no space for another thousand bytes."""
    writer = make(disk)
    put(writer, b"a" * 1000)
    put(writer, b"b" * 500, b"c" * 10)
    return writer


def test_file_is_durable_before_frames_are_written_to_it() -> None:
    """G32. Method: the exact order of the disk's operations."""
    disk = SimDisk(trace=True)
    put(make(disk, first=7), b"x")
    name = "data/wal/wal-0000000000000007.log"
    assert disk.trace == [
        "mkdir data",
        "sync_dir .",
        "mkdir data/wal",
        "sync_dir data",
        f"create {name}",
        f"reserve {name} to 2048",
        f"sync {name}",
        "sync_dir data/wal",
        "create data/wal/NEWEST-0000000000000007-2048",
        "create data/wal/CURRENT.tmp",
        "write data/wal/CURRENT.tmp@0+74",
        "sync data/wal/CURRENT.tmp",
        "rename data/wal/CURRENT.tmp -> data/wal/CURRENT",
        "sync_dir data/wal",
        f"write {name}@0+47",
    ]
    assert disk.read_file(f"{WAL}/CURRENT") == paths.encode_current(7, 2048)
    assert disk.read_file(name) == append(b"x") + bytes(2048 - 47)


def test_a_rotation_keeps_its_order() -> None:
    """G31, G32. Method: the exact order of the disk's operations."""
    disk = SimDisk(trace=True)
    writer = filled(disk)
    began = len(disk.trace)
    put(writer, b"d" * 1000)
    assert disk.trace[began:] == [
        f"sync {wal_path(1)}",
        f"create {wal_path(4)}",
        f"reserve {wal_path(4)} to 2048",
        f"sync {wal_path(4)}",
        "sync_dir data/wal",
        "rename data/wal/NEWEST-0000000000000001-2048 -> data/wal/NEWEST-0000000000000004-2048",
        "create data/wal/CURRENT.tmp",
        "write data/wal/CURRENT.tmp@0+74",
        "sync data/wal/CURRENT.tmp",
        "rename data/wal/CURRENT.tmp -> data/wal/CURRENT",
        "sync_dir data/wal",
        f"write {wal_path(4)}@0+1046",
    ]
    assert (writer.rotations, writer.position, writer.synced) == (1, Position(4, 1046), Position(4, 0))
    assert disk.read_file(f"{WAL}/CURRENT") == paths.encode_current(4, 2048)


def test_a_files_number_counts_the_frames_before_it() -> None:
    """G31, G36."""
    disk = SimDisk()
    writer = make(disk, first=41)
    numbers = []
    for frames in (1, 2, 5, 1, 3):
        put(writer, *[b"x" * (1500 // frames)] * frames)
        numbers.append((writer.position.file_number, writer.next_frame))
    assert numbers == [(41, 42), (42, 44), (44, 49), (49, 50), (50, 53)]
    assert [name for name in disk.tree() if name.endswith(".log")] == [
        wal_path(first) for first in (41, 42, 44, 49, 50)
    ]


@pytest.mark.parametrize(("size", "rotations"), [(FILE_BYTES - 146, 0), (FILE_BYTES - 145, 1)])
def test_a_batch_that_just_fits_stays(size: int, rotations: int) -> None:
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"a" * (100 - OVERHEAD))
    put(writer, b"b" * size)
    assert writer.rotations == rotations


def test_a_batch_larger_than_a_file_is_in_one_file() -> None:
    """Method: after other frames it needs a new file, in an empty one it stays; the next one rotates."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"a")
    put(writer, b"b" * 5000)
    assert writer.position == Position(2, 5000 + OVERHEAD)
    put(writer, b"c")
    assert writer.position == Position(3, 1 + OVERHEAD)
    writer.sync()
    assert inspect_wal(disk.crash_image("none")).datas == [b"a", b"b" * 5000, b"c"]
    big = SimDisk()
    put(make(big), b"b" * 5000)
    assert [name for name in big.tree() if name.endswith(".log")] == [wal_path(1)]


def test_a_number_is_never_used_twice() -> None:
    """G36: a file that is there is not overwritten, at the start nor in a rotation."""
    disk = SimDisk()
    writer = filled(disk)
    before = disk.read_file(wal_path(1))
    with pytest.raises(Damaged, match="cannot be created"):
        make(disk)
    assert disk.read_file(wal_path(1)) == before
    disk.write_file(wal_path(4), b"another process's")
    with pytest.raises(Latched):
        put(writer, b"d" * 1000)
    assert disk.read_file(wal_path(4)) == b"another process's"


def test_short_writes_are_completed() -> None:
    """G26."""
    whole = SimDisk()
    filled(whole)
    for seed in range(20):
        disk = SimDisk()
        writer = make(disk)
        disk.short_writes(Random(seed))
        put(writer, b"a" * 1000)
        put(writer, b"b" * 500, b"c" * 10)
        assert disk.read_file(wal_path(1)) == whole.read_file(wal_path(1))


def test_many_pieces_are_one_write() -> None:
    disk = SimDisk(trace=True)
    writer = make(disk, file_bytes=1 << 20)
    began = len(disk.trace)
    pieces = [append(b"%d" % number) for number in range(3000)]
    writer.write(pieces, size=sum(map(len, pieces)), frames=3000)
    assert len(disk.trace) == began + 1
    assert inspect_wal(disk).datas == [b"%d" % number for number in range(3000)]


def test_sync_without_new_bytes_does_nothing() -> None:
    """Method: where nothing was written since the last one there is nothing to do."""
    disk = SimDisk(trace=True)
    writer = make(disk)
    assert not writer.sync()
    put(writer, b"a")
    assert writer.synced == Position(1, 0)
    assert writer.sync()
    assert writer.synced == writer.position == Position(1, 47)
    assert not writer.sync()
    assert disk.trace.count(f"sync {wal_path(1)}") == 2, "one when it was made, one for the frame"


def test_nothing_to_write_is_no_write() -> None:
    disk = SimDisk()
    writer = make(disk)
    began = disk.op_count
    writer.write([], size=0, frames=0)
    assert disk.op_count == began


@pytest.mark.parametrize("aside", [True, False])
def test_large_syncs_are_recognised(tmp_path: Path, aside: bool) -> None:
    disk = PosixDisk()
    writer = Writer(disk, str(tmp_path), file_number=1, file_bytes=8 << 20, latch=WriteLatch(WAL), write_marks=False)

    def sync() -> None:
        if aside:
            assert writer.begin_sync() is not None
            writer.end_sync(None)
        else:
            assert writer.sync()

    coarse = []
    for _ in range(3):
        put(writer, b"x" * (LARGE_SYNC_BYTES - 1_000))
        sync()
        coarse.append(writer._has_large_syncs)
    put(writer, b"x" * LARGE_SYNC_BYTES)
    coarse.append(writer._has_large_syncs)
    sync()
    assert [*coarse, writer._has_large_syncs] == [False, False, False, True, False]
    writer.close()


def test_close_syncs() -> None:
    """G20."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"a")
    assert inspect_wal(disk.crash_image("none")).datas == []
    writer.close()
    writer.close()
    assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


def test_close_leaves_only_the_shared_read_handle_open() -> None:
    disk = SimDisk()
    writer = filled(disk)
    put(writer, b"d" * 1000)
    assert writer.position.file_number == 4
    writer.close()
    assert disk.open_files() == [wal_path(4)], "records that are still in the WAL are read through it"


def test_latch_is_tripped_if_the_first_file_cannot_be_created() -> None:
    disk, latch = SimDisk(), WriteLatch(WAL)
    disk.fail("create", path="wal-")
    with pytest.raises(Damaged, match="cannot be created"):
        Writer(disk, WAL, file_number=1, file_bytes=FILE_BYTES, latch=latch, write_marks=False)
    assert latch.is_tripped


def test_close_raises_if_its_last_sync_fails_and_only_closes_a_latched_file() -> None:
    """G22."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"a")
    disk.fail_sync("dropped")
    with pytest.raises(Latched):
        writer.close()
    writer.close()
    other = SimDisk()
    latched = make(other)
    put(latched, b"a")
    other.fail("write")
    with pytest.raises(Latched):
        put(latched, b"b")
    began = other.op_count
    latched.close()
    assert other.op_count == began


def test_waiting_sync_is_in_doubt_after_another_failed_and_later_writes_are_refused() -> None:
    """G7, G22: two syncs may be under way, and the second one hears of the first from the latch."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"a")
    writer.latch.trip(OSError(errno.EIO, "gone"), "syncing")
    with pytest.raises(Latched, match="is unknown") as waited:
        writer.sync()
    with pytest.raises(Latched, match="wrote nothing") as late:
        put(writer, b"b")
    assert (waited.value.written, late.value.written) == (None, False)


# Full disk.


def frames_of(disk: SimDisk) -> list[bytes]:
    return inspect_wal(disk).datas


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("landed", [0, 1, 45, 47, 200, 400])
def test_write_on_a_full_disk_leaves_no_bytes(error: int, landed: int) -> None:
    """G25. Method: so much of the failed batch lands before the disk is full; the next batch is shorter, so that whole
    frames of the failed one would follow it."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"before")
    disk.fail("write", error=error, partial=landed)
    with pytest.raises(DiskFull, match="nothing was written"):
        put(writer, *[b"failed"] * 10)
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        assert frames_of(image) == [b"before"]
    assert disk.read_file(wal_path(1)) == append(b"before") + bytes(FILE_BYTES - 52)
    put(writer, b"after")
    writer.sync()
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        assert frames_of(image) == [b"before", b"after"]
    assert writer.next_frame == 3


def test_full_device_refuses_writes_until_space_is_free() -> None:
    """G25. Method: real capacity; what was reserved is still there, a batch larger than the file needs more."""
    disk = SimDisk()
    writer = make(disk)
    disk.capacity_bytes = sum(map(len, disk.tree().values())) + 700
    for _ in range(3):
        with pytest.raises(DiskFull):
            put(writer, b"y" * 3000)
        assert frames_of(disk.crash_image("all")) == []
    put(writer, b"x" * 1500)
    disk.capacity_bytes = None
    put(writer, b"y" * 3000)
    assert frames_of(disk) == [b"x" * 1500, b"y" * 3000]


def test_rotation_on_a_full_disk_refuses_the_write_and_succeeds_later() -> None:
    """G27. Method: real capacity; what fits the file still goes there; a power cut brings back no file."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"x" * 1500)
    disk.capacity_bytes = sum(map(len, disk.tree().values())) + 700
    for _ in range(3):
        with pytest.raises(DiskFull, match="nothing was written"):
            put(writer, b"y" * 1500)
        assert not writer.latch.is_tripped
    put(writer, b"small")
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        found = recover(image)
        assert (found.datas[:1], found.cut) == ([b"x" * 1500], None)
        assert found.missing == []
    disk.capacity_bytes = None
    put(writer, b"y" * 1500)
    assert frames_of(disk) == [b"x" * 1500, b"small", b"y" * 1500]
    assert recover(disk).next_first == 4


def test_failed_reallocation_does_not_stop_writing() -> None:
    """G25. Method: the write finds the disk full, and so does the allocation after the truncation."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"before")
    disk.fail("write", error=errno.ENOSPC, partial=100)
    disk.fail("reserve", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        put(writer, b"failed" * 50)
    assert len(disk.read_file(wal_path(1))) == 52
    put(writer, b"after")
    assert frames_of(disk) == [b"before", b"after"]


@pytest.mark.parametrize("call", ["cut", "reserve", "sync"])
def test_failed_rollback_trips_the_latch(call: str) -> None:
    """G25: what would be replayed later must not be followed by anything."""
    disk = SimDisk()
    writer = make(disk)
    put(writer, b"before")
    writer.sync()
    disk.fail("write", error=errno.ENOSPC, partial=100)
    disk.fail(call)  # type: ignore[arg-type]
    with pytest.raises(Latched):
        put(writer, b"failed" * 50)
    disk.clear_faults()
    began = disk.op_count
    with pytest.raises(Latched):
        put(writer, b"after")
    assert disk.op_count == began
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        assert frames_of(image) == [b"before"]


def test_file_is_allocated(tmp_path: Path) -> None:
    """Method: on a real disk its blocks are there before the first frame is, so that a frame needs no new ones."""
    writer = Writer(PosixDisk(), str(tmp_path / "wal"), file_number=1, file_bytes=1 << 16, latch=WriteLatch("wal"))
    found = (tmp_path / "wal" / "wal-0000000000000001.log").stat()
    assert found.st_size == 1 << 16
    assert found.st_blocks * 512 >= 1 << 16
    writer.close()
