"""The next file, made ahead of time: it is used when it is there, and nothing hangs on it."""

from __future__ import annotations

import errno

import pytest
from tests.unit.wal.harness import FILE_BYTES, WalHarness

from tidelog.disk.durability import WriteLatch
from tidelog.testing import DiskCall, SimDisk
from tidelog.wal import Writer, file_path, list_file_numbers
from tidelog.wal import writer as file
from tidelog.wal import writer as spare_module
from tidelog.wal.writer import FIRST_FILE_BYTES, LARGE_SYNC_BYTES, PREALLOCATE_STEP_BYTES, DiskReserve, PreallocatedFile

DIRECTORY = "data"
PATH = f"{DIRECTORY}/SPARE"


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk()
    disk.make_dir(DIRECTORY)
    return disk


@pytest.fixture
def fine_grained_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were many small syncs, which would take long here."""
    monkeypatch.setattr(file, "LARGE_SYNC_BYTES", 1 << 40)


def test_preallocation_starts_at_half_and_becomes_the_next_file(disk: SimDisk) -> None:
    bench = WalHarness(disk, marks=False)
    place = bench.writer.directory
    bench.write(b"x" * (FILE_BYTES // 2 - 100))
    bench.shard.tick()
    assert disk.stat(f"{place}/SPARE") is None, "not half full yet"
    bench.write(b"y" * 100)
    bench.shard.tick()
    assert disk.read_file(f"{place}/SPARE") == bytes(FILE_BYTES)
    bench.shard.tick()
    bench.write(b"z" * 900)
    assert disk.stat(f"{place}/SPARE") is None
    assert len(list_file_numbers(disk, place)) == 2
    newest = disk.read_file(file_path(place, list_file_numbers(disk, place)[-1]))
    assert len(newest) == FILE_BYTES
    assert newest.rstrip(b"\0").count(b"z") == 900


@pytest.mark.usefixtures("fine_grained_syncs")
def test_files_grow_from_a_small_one_to_the_full_size(disk: SimDisk) -> None:
    """Light use costs little space; `should_prepare_next` is set once per file."""
    full = 20 * FIRST_FILE_BYTES
    writer = Writer(disk, DIRECTORY, file_number=1, file_bytes=full, latch=WriteLatch(DIRECTORY), write_marks=False)
    sizes, asked = [FIRST_FILE_BYTES], 0
    while len(sizes) < 4:
        writer.write([bytes(sizes[-1] // 50)], size=sizes[-1] // 50, frames=1)
        if writer.rotations == len(sizes):
            sizes.append(disk.stat(file_path(DIRECTORY, list_file_numbers(disk, DIRECTORY)[-1])).size)  # type: ignore[union-attr]
            assert not writer.should_prepare_next
        asked += writer.should_prepare_next and disk.stat(f"{PATH}.tmp") is None
        while writer.should_prepare_next:
            assert 2 * writer.position.pos >= sizes[-1]
            writer.prepare_next_file()
    assert sizes == [FIRST_FILE_BYTES, 4 * FIRST_FILE_BYTES, 16 * FIRST_FILE_BYTES, full]
    assert asked == 3
    writer.close()


@pytest.mark.usefixtures("fine_grained_syncs")
def test_preallocated_file_is_filled_in_step_with_the_active_file(disk: SimDisk) -> None:
    """No sync waits for a whole file of zeros: at most one step is being written, and each is on the disk before
    the next one begins."""
    full = 4 * PREALLOCATE_STEP_BYTES
    writer = Writer(disk, DIRECTORY, file_number=1, file_bytes=full, latch=WriteLatch(DIRECTORY), write_marks=False)
    grown = 0
    while disk.stat(file_path(DIRECTORY, list_file_numbers(disk, DIRECTORY)[-1])).size < full:  # type: ignore[union-attr]
        writer.write([bytes(PREALLOCATE_STEP_BYTES // 8)], size=PREALLOCATE_STEP_BYTES // 8, frames=1)
        while writer.should_prepare_next:
            writer.prepare_next_file()
    writer.write([bytes(full // 2)], size=full // 2, frames=1)
    steps = []
    while disk.stat(PATH) is None:
        if writer.should_prepare_next:
            writer.prepare_next_file()
            made = disk.stat(f"{PATH}.tmp") or disk.stat(PATH)
            assert made is not None
            steps.append((grown, made.size // PREALLOCATE_STEP_BYTES))
        else:
            writer.write([bytes(full // 48)], size=full // 48, frames=1)
            grown += 1
    assert [size for _, size in steps] == [1, 2, 3, 4]
    assert [at for at, _ in steps] == [0, 3, 7, 11], "a eighth of it with every twelfth of the file"
    writer.write([bytes(full // 2)], size=full // 2, frames=1)
    assert disk.stat(PATH) is None
    assert writer.rotations >= 2
    writer.close()


@pytest.mark.usefixtures("fine_grained_syncs")
def test_nearly_full_file_is_followed_by_a_partly_filled_one(disk: SimDisk) -> None:
    """A writer that is quicker than its zeros would otherwise never write into any."""
    full = 4 * PREALLOCATE_STEP_BYTES
    writer = Writer(disk, DIRECTORY, file_number=1, file_bytes=full, latch=WriteLatch(DIRECTORY), write_marks=False)
    writer.write([bytes(FIRST_FILE_BYTES)], size=FIRST_FILE_BYTES, frames=1)
    writer.write([b"x"], size=1, frames=1)  # a file of 4 MiB, with nothing ahead of it
    writer.write([bytes(3 * FIRST_FILE_BYTES)], size=3 * FIRST_FILE_BYTES, frames=1)
    writer.prepare_next_file()
    assert disk.stat(f"{PATH}.tmp") is not None, "there is time for more"
    writer.write([bytes(FIRST_FILE_BYTES // 2)], size=FIRST_FILE_BYTES // 2, frames=1)
    writer.prepare_next_file()
    assert disk.read_file(PATH) == bytes(2 * PREALLOCATE_STEP_BYTES)
    assert not writer.should_prepare_next
    writer.write([bytes(FIRST_FILE_BYTES)], size=FIRST_FILE_BYTES, frames=1)
    assert (
        len(disk.read_file(file_path(DIRECTORY, list_file_numbers(disk, DIRECTORY)[-1]))) == 2 * PREALLOCATE_STEP_BYTES
    )
    writer.close()


def test_large_syncs_disable_preallocation_and_use_large_files(disk: SimDisk) -> None:
    """Decision 0010: from 256 KiB a sync on, zeros cost as much as they save. Space that is only allocated costs
    nothing, so there is no need to begin small."""
    writer = Writer(
        disk, DIRECTORY, file_number=1, file_bytes=20 * FIRST_FILE_BYTES, latch=WriteLatch(DIRECTORY), write_marks=False
    )
    for _ in range(6):
        writer.write([bytes(LARGE_SYNC_BYTES)], size=LARGE_SYNC_BYTES, frames=1)
        assert not writer.should_prepare_next
        writer.prepare_next_file()
        writer.sync()
    assert disk.stat(f"{PATH}.tmp") is None
    assert disk.stat(PATH) is None
    assert disk.stat(file_path(DIRECTORY, list_file_numbers(disk, DIRECTORY)[-1])).size == 20 * FIRST_FILE_BYTES  # type: ignore[union-attr]
    writer.close()


def test_small_syncs_use_preallocated_files(disk: SimDisk) -> None:
    writer = Writer(
        disk, DIRECTORY, file_number=1, file_bytes=20 * FIRST_FILE_BYTES, latch=WriteLatch(DIRECTORY), write_marks=False
    )
    wanted = []
    for _ in range(6):
        writer.write([bytes(LARGE_SYNC_BYTES // 2)], size=LARGE_SYNC_BYTES // 2, frames=1)
        writer.sync()
        wanted.append(writer.should_prepare_next)
    assert wanted == [False, False, False, True, True, True], "half of a MiB"
    writer.close()


def test_should_sync_when_many_bytes_are_unsynced(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation syncs the old file, and the writing caller waits for it. Near a rotation fewer bytes are enough."""
    monkeypatch.setattr(file, "UNSYNCED_BYTES_MAX", FILE_BYTES // 4)
    writer = Writer(
        disk, DIRECTORY, file_number=1, file_bytes=FILE_BYTES, latch=WriteLatch(DIRECTORY), write_marks=False
    )
    step, wanted = FILE_BYTES // 32, []
    for _ in range(32):
        writer.write([bytes(step)], size=step, frames=1)
        if writer.should_sync:
            wanted.append(writer.position.pos // step)
            writer.sync()
            assert not writer.should_sync
    assert wanted == [8, 16, 24, *range(25, 33)]
    writer.close()


def test_shard_requests_a_tick_when_a_sync_is_due(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "UNSYNCED_BYTES_MAX", 300)
    bench = WalHarness(disk)
    called: list[bool] = []
    bench.shard.on_tick_needed = lambda: called.append(True)
    bench.write(b"x" * 300, durable=True)
    assert not called, "it is synced as it is"
    bench.write(b"x" * 300, durable=False)
    assert called == [True]
    bench.shard.tick()
    bench.write(b"y", durable=False)
    assert called == [True]


def test_partly_filled_file_is_continued_for_the_next_rotation(disk: SimDisk) -> None:
    spare = PreallocatedFile(disk, DIRECTORY)
    assert not spare.fill_step(2 * PREALLOCATE_STEP_BYTES)
    assert not spare.take_as(f"{DIRECTORY}/file"), "it is not whole"
    assert spare.filled_bytes == PREALLOCATE_STEP_BYTES
    assert spare.fill_step(PREALLOCATE_STEP_BYTES + 10)
    assert disk.read_file(PATH) == bytes(PREALLOCATE_STEP_BYTES + 10)
    spare.discard()
    assert not spare.fill_step(2 * PREALLOCATE_STEP_BYTES)
    spare.discard()
    assert not [path for path in disk.tree() if "SPARE" in path]


def test_failed_preallocation_is_tried_once_per_file(disk: SimDisk) -> None:
    writer = Writer(disk, DIRECTORY, file_number=1, file_bytes=1000, latch=WriteLatch(DIRECTORY), write_marks=False)
    writer.write([bytes(600)], size=600, frames=1)
    disk.fail("write", error=errno.ENOSPC)
    halves = [writer.should_prepare_next]
    writer.prepare_next_file()
    halves.append(writer.should_prepare_next)
    assert disk.stat(PATH) is None
    writer.write([bytes(600)], size=600, frames=1)
    halves.append(writer.should_prepare_next)
    assert halves == [True, False, True], "the last is of the next file"
    writer.close()


def test_close_removes_the_preallocated_file(disk: SimDisk) -> None:
    bench = WalHarness(disk)
    bench.write(b"x" * (FILE_BYTES // 2))
    bench.shard.tick()
    assert [path for path in disk.tree() if path.endswith("SPARE")]
    bench.shard.close()
    assert not [path for path in disk.tree() if "SPARE" in path]


def test_preallocated_file_of_an_earlier_process_is_discarded(disk: SimDisk) -> None:
    for name in ("SPARE", "SPARE.tmp"):
        file = disk.open(f"{DIRECTORY}/{name}", "create")
        file.write(0, b"whatever")
        file.close()
    spare = PreallocatedFile(disk, DIRECTORY)
    assert not spare.take_as(f"{DIRECTORY}/file")
    spare.discard()
    assert not [path for path in disk.tree() if "SPARE" in path]
    spare.fill_step(10)
    assert disk.read_file(PATH) == bytes(10)


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
def test_preallocation_error_is_ignored(disk: SimDisk, call: DiskCall) -> None:
    disk.fail(call, error=errno.ENOSPC)
    spare = PreallocatedFile(disk, DIRECTORY)
    spare.fill_step(10)
    assert not spare.take_as(f"{DIRECTORY}/file")
    assert not [path for path in disk.tree() if "SPARE" in path]
    spare.fill_step(10)
    assert spare.take_as(f"{DIRECTORY}/file")
    assert disk.read_file(f"{DIRECTORY}/file") == bytes(10)


def test_preallocated_file_does_not_replace_an_existing_one(disk: SimDisk) -> None:
    disk.open(f"{DIRECTORY}/file", "create").close()
    spare = PreallocatedFile(disk, DIRECTORY)
    spare.fill_step(10)
    assert not spare.take_as(f"{DIRECTORY}/file")
    assert disk.read_file(f"{DIRECTORY}/file") == b""


def reserved(disk: SimDisk) -> int:
    """Bytes of the one file that the reserve has; 0 where there is none."""
    return sum(len(content) for content in disk.tree().values())


def test_released_reserve_is_restored(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_module, "DISK_RESERVE_BYTES", 64 << 10)
    disk.capacity_bytes = 64 << 20
    reserve = DiskReserve(disk, DIRECTORY)
    assert reserve.restore()
    assert reserved(disk) == 64 << 10
    assert reserve.release_part()
    assert reserved(disk) < 64 << 10
    assert reserve.restore()
    assert reserved(disk) == 64 << 10
    assert reserve.is_complete


def test_small_reserve_grows_when_space_is_free(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_module, "DISK_RESERVE_BYTES", 64 << 10)
    disk.capacity_bytes = 256 << 10
    reserve = DiskReserve(disk, DIRECTORY)
    assert reserve.restore()
    small = reserved(disk)
    assert 0 < small < 64 << 10
    disk.capacity_bytes = 64 << 20
    assert reserve.restore()
    assert reserved(disk) == 64 << 10
