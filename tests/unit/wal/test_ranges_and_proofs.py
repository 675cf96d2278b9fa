"""Ranges of WAL files, proofs of the newest file, old files and the reserve: exact values and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.wal.harness import WAL, append, inspect_wal, wal_path

from tidelog.disk.durability import WriteLatch
from tidelog.errors import Damaged, DiskFull, Latched
from tidelog.testing import SimDisk
from tidelog.wal import Position, Writer, paths
from tidelog.wal.paths import GatheredRange, Proof, WalRange, remove_old_files
from tidelog.wal.recovery import MissingFile, _find_missing_file
from tidelog.wal.writer import DiskReserve, PreallocatedFile


@pytest.fixture
def disk() -> SimDisk:
    made = SimDisk(trace=True)
    made.make_dir(WAL)
    made.trace.clear()
    return made


def steps(disk: SimDisk) -> list[str]:
    found = [step.replace(f"{WAL}/", "") for step in disk.trace]
    disk.trace.clear()
    return found


# Ranges ---------------------------------------------------------------------------------------------------


def test_a_range_reads_its_bytes(disk: SimDisk) -> None:
    disk.write_file("f", bytes(range(100)))
    file, other = disk.open("f"), disk.open("f")
    found = WalRange(file, 10, 20)
    assert (len(found), found.read(0, 20), found.read(5, 7)) == (20, bytes(range(10, 30)), bytes([15, 16]))
    assert found.is_followed_by(WalRange(file, 30, 5))
    assert not found.is_followed_by(WalRange(file, 31, 5))
    assert not found.is_followed_by(WalRange(other, 30, 5))
    gathered = GatheredRange.from_frames(file, np.array([30]), np.array([5]))
    assert not found.is_followed_by(gathered)
    assert not gathered.is_followed_by(WalRange(file, 35, 5))
    with pytest.raises(Damaged, match="shorter"):
        WalRange(file, 90, 20).read(0, 11)
    disk.fail("read", at=1)
    with pytest.raises(Damaged, match="cannot be read"):
        found.read(0, 1)


def test_gathered_frames_read_as_if_they_were_back_to_back(disk: SimDisk) -> None:
    disk.write_file("f", bytes(range(100)))
    starts, sizes = [5, 20, 30, 60], [3, 4, 1, 10]
    whole = b"".join(bytes(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    found = GatheredRange.from_frames(disk.open("f"), np.array(starts), np.array(sizes))
    assert (len(found), found.pos, found.ends.tolist()) == (18, 5, [3, 7, 8, 18])
    for lo in range(19):
        for hi in range(19):
            assert found.read(lo, hi) == whole[lo:hi], (lo, hi)


# Proofs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, None),
        (b"", None),
        (paths.encode_synced(Position(7, 512)), Position(7, 512)),
        (paths.encode_synced(Position(7, 512))[:-1], None),
        (paths.encode_synced(Position(7, 512)) + b"x", None),
        (paths.encode_synced(Position(7, 512)).replace(b"512", b"513"), None),
        (paths.encode_current(7, 512), None),
        (paths.encode_synced(Position(0, 512)), None),
    ],
)
def test_the_recorded_synced_position(disk: SimDisk, content: bytes | None, found: Position | None) -> None:
    if content is not None:
        disk.write_file(f"{WAL}/SYNCED", content)
    assert paths.read_synced(disk, WAL) == found
    assert disk.open_files() == []


def test_the_newest_proof_counts(disk: SimDisk) -> None:
    assert paths.proven_current(disk, WAL) is None
    assert paths.newest_names(disk, "elsewhere") == {}
    disk.write_file(f"{WAL}/CURRENT", paths.encode_current(7, 512))
    assert paths.proven_current(disk, WAL) == Proof(7, 512, "CURRENT")
    name = "NEWEST-0000000000000009-100"
    disk.write_file(f"{WAL}/{name}", b"")
    for other in ("NEWEST-9-100", "NEWEST-0000000000000011-0100", "NEWEST-00000000000000012-1", "NEWEST"):
        disk.write_file(f"{WAL}/{other}", b"")
    assert paths.newest_names(disk, WAL) == {name: Proof(9, 100, name)}
    assert paths.proven_current(disk, WAL) == Proof(9, 100, name)
    disk.write_file(f"{WAL}/CURRENT", paths.encode_current(12, 5))
    assert paths.proven_current(disk, WAL) == Proof(12, 5, "CURRENT")
    disk.write_file(f"{WAL}/CURRENT", b"wal-0000000000000099.log\n")
    assert paths.proven_current(disk, WAL) == Proof(9, 100, name), "one of an earlier version proves nothing"
    disk.trace.clear()
    paths.remove_proofs(disk, WAL)
    assert sorted(steps(disk)) == ["remove CURRENT", f"remove {name}", "sync_dir data/wal"]
    paths.remove_proofs(disk, WAL)
    assert steps(disk) == []


@pytest.mark.parametrize(
    ("proof", "numbers", "durable", "missing"),
    [
        (None, [], (0, 0), None),
        (None, [5], (5, 10), None),
        (None, [5], (6, 0), None),
        (None, [5], (6, 10), (6, 1 << 30)),
        ((5, 100), [5], (0, 0), None),
        ((6, 100), [5], (0, 0), (6, 100)),
        ((6, 100), [5], (6, 200), (6, 200)),
        ((6, 100), [5], (7, 0), None),
        ((6, 100), [5], (7, 10), (7, 1 << 30)),
        ((6, 100), [], (6, 0), (6, 100)),
        ((6, 100), [7], (0, 0), None),
    ],
)
def test_whether_the_newest_file_is_missing(
    proof: Any, numbers: list[int], durable: tuple[int, int], missing: tuple[int, int] | None
) -> None:
    given = None if proof is None else Proof(proof[0], proof[1], "CURRENT")
    found = _find_missing_file(given, numbers, Position(*durable))
    assert (found and (found.file_number, found.size)) == missing
    assert found is None or isinstance(found, MissingFile)


# Old files ------------------------------------------------------------------------------------------------


def test_old_files_are_removed_in_order_and_durably(disk: SimDisk) -> None:
    directory = f"{WAL}/shard-00"
    disk.make_dir(directory)
    assert remove_old_files(disk, WAL, "shard-01", 9) == 0
    for number in (3, 1, 5):
        disk.write_file(f"{directory}/wal-{number:016d}.log", b"x")
    for name in ("CURRENT", "CURRENT.tmp", "SPARE", "SPARE.tmp", "SYNCED"):
        disk.write_file(f"{directory}/{name}", b"x")
    disk.trace.clear()
    assert remove_old_files(disk, WAL, "shard-00", 5) == 2
    files = [f"shard-00/wal-{number:016d}.log" for number in (1, 3, 5)]
    assert steps(disk) == [
        f"remove {files[0]}",
        f"remove {files[1]}",
        "sync_dir shard-00",
    ]
    assert remove_old_files(disk, WAL, "shard-00", 5) == 0
    assert steps(disk) == []
    assert remove_old_files(disk, WAL, "shard-00", 6) == 1
    assert steps(disk) == [
        "remove shard-00/CURRENT",
        "sync_dir shard-00",
        f"remove {files[2]}",
        *(f"remove shard-00/{name}" for name in paths.DISPOSABLE_FILES),
        "sync_dir shard-00",
        "rmdir shard-00",
        "sync_dir data/wal",
    ]


# The reserve and the next file ----------------------------------------------------------------------------


def reserve_of(disk: SimDisk, free: int | None, monkeypatch: pytest.MonkeyPatch) -> DiskReserve:
    monkeypatch.setattr("tidelog.wal.writer.DISK_RESERVE_BYTES", 1 << 16)
    monkeypatch.setattr("tidelog.wal.writer.free_bytes", lambda *_: free)
    return DiskReserve(disk, WAL)


@pytest.mark.parametrize(
    ("free", "size", "restored"),
    [(None, 0, True), (0, 0, False), (15, 0, False), (16, 1, True), (1 << 19, 1 << 15, True), (1 << 20, 1 << 16, True),
     (1 << 30, 1 << 16, True)],
)  # fmt: skip
def test_the_reserve_takes_a_share_of_the_free_space(
    disk: SimDisk, monkeypatch: pytest.MonkeyPatch, free: int | None, size: int, restored: bool
) -> None:
    reserve = reserve_of(disk, free, monkeypatch)
    assert reserve.restore() is restored
    assert (reserve.size, reserve._held_bytes, reserve.is_complete) == (size, size, size > 0)
    assert reserve.is_short is (free is not None and not restored)
    assert len(disk.tree().get(f"{WAL}/RESERVE", b"")) == size
    assert disk.open_files() == []


def test_the_reserve_is_released_in_parts_and_restored(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = reserve_of(disk, 1 << 30, monkeypatch)
    assert reserve.release_part() is False
    assert reserve.restore()
    found = []
    while reserve.release_part():
        found.append((reserve._held_bytes, reserve.is_short, reserve.is_complete))
    assert found == [(size, True, False) for size in (49_152, 32_768, 16_384, 0)]
    assert f"{WAL}/RESERVE" not in disk.tree()
    assert reserve.restore()
    assert (reserve._held_bytes, reserve.is_short) == (1 << 16, False)
    reserve.release_part()
    monkeypatch.setattr("tidelog.wal.writer.free_bytes", lambda *_: (1 << 14) - 1)
    assert reserve.restore() is False
    assert (reserve._held_bytes, reserve.is_short, reserve.size) == (49_152, True, 1 << 16)
    monkeypatch.setattr("tidelog.wal.writer.free_bytes", lambda *_: 1 << 14)
    assert reserve.restore() is True
    again = DiskReserve(disk, WAL)
    again.adopt()
    assert (again._held_bytes, again.size, again.is_complete) == (1 << 16, 1 << 16, True)


def test_a_reserve_that_cannot_grow_keeps_its_size(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = reserve_of(disk, 1 << 19, monkeypatch)
    assert reserve.restore()
    monkeypatch.setattr("tidelog.wal.writer.free_bytes", lambda *_: 1 << 30)
    disk.fail("reserve", at=1, error=28)
    assert reserve.restore() is True
    assert (reserve.size, reserve._held_bytes, reserve.is_short) == (1 << 15, 1 << 15, False)
    assert reserve.restore()
    assert (reserve.size, reserve._held_bytes) == (1 << 16, 1 << 16)


def test_the_next_file_is_filled_in_steps(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.wal.writer.PREALLOCATE_STEP_BYTES", 100)
    ahead = PreallocatedFile(disk, WAL)
    assert ahead.take_as(wal_path(1)) == 0
    assert [ahead.fill_step(250), ahead.filled_bytes] == [False, 100]
    assert [ahead.fill_step(250), ahead.filled_bytes] == [False, 200]
    assert [ahead.fill_step(250), ahead.filled_bytes, ahead._ready_bytes] == [True, 0, 250]
    assert steps(disk) == [
        "create SPARE.tmp", "write SPARE.tmp@0+100", "sync SPARE.tmp", "write SPARE.tmp@100+100", "sync SPARE.tmp",
        "write SPARE.tmp@200+50", "sync SPARE.tmp", "rename SPARE.tmp -> SPARE",
    ]  # fmt: skip
    assert ahead.fill_step(900) is True
    assert steps(disk) == []
    disk.write_file(wal_path(1), b"")
    assert ahead.take_as(wal_path(1)) == 0
    assert ahead.take_as(wal_path(2)) == 250
    assert ahead.take_as(wal_path(3)) == 0
    assert disk.read_file(wal_path(2)) == bytes(250)
    assert disk.open_files() == []
    ahead.fill_step(250)
    ahead.discard()
    assert [path for path in disk.tree() if "SPARE" in path] == []
    assert disk.open_files() == []


# The writer -----------------------------------------------------------------------------------------------


def writer_of(disk: SimDisk, **settings: Any) -> Writer:
    return Writer(disk, WAL, file_number=1, file_bytes=2_048, latch=WriteLatch(WAL), **settings)


def put(writer: Writer, data: bytes) -> None:
    piece = append(data)
    writer.write([piece], size=len(piece), frames=1)


def test_the_synced_position_is_recorded_once(disk: SimDisk) -> None:
    writer = writer_of(disk)
    disk.trace.clear()
    writer.record_synced_position()
    put(writer, b"a")
    writer.record_synced_position()
    assert steps(disk) == ["write wal-0000000000000001.log@0+47"], "there is nothing to record"
    writer.sync()
    writer.record_synced_position()
    writer.record_synced_position()
    assert steps(disk) == ["sync wal-0000000000000001.log", "create SYNCED", "write SYNCED@0+75"]
    assert paths.read_synced(disk, WAL) == Position(1, 47)
    put(writer, b"b")
    writer.sync()
    disk.trace.clear()
    disk.fail("write", at=1, error=28)
    writer.record_synced_position()
    writer.record_synced_position()
    assert len(steps(disk)) == 2, "on a full disk it is tried again"
    assert paths.read_synced(disk, WAL) == writer.synced
    put(writer, b"c")
    writer.sync()
    disk.fail("write", at=1, error=5)
    with pytest.raises(Latched):
        writer.record_synced_position()
    disk.trace.clear()
    writer.record_synced_position()
    assert steps(disk) == []
    writer.close()
    assert disk.open_files() == [wal_path(1)], "of its readers"
    without = writer_of(SimDisk(), write_marks=False)
    put(without, b"a")
    without.sync()
    without.record_synced_position()
    assert paths.read_synced(without._disk, WAL) is None


def test_a_sync_by_another_thread(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(disk)
    put(writer, b"a")
    assert writer.begin_sync() is None, "the file has no descriptor"
    monkeypatch.setattr(type(writer._file), "descriptor", 3, raising=False)
    assert writer.begin_sync() == 3
    assert writer.begin_sync() is None, "one at a time"
    end = writer.position
    put(writer, b"b")
    writer.end_sync(None)
    assert (writer.synced, writer._syncs) == (end, 1)
    assert writer.begin_sync() == 3
    writer.end_sync(None)
    assert writer.synced == writer.position
    assert writer.begin_sync() is None, "there is nothing to sync"
    put(writer, b"c")
    assert writer.begin_sync() == 3
    with pytest.raises(Latched):
        writer.end_sync(OSError(5, "bad"))
    assert writer.synced != writer.position
    assert writer.begin_sync() is None
    assert writer._sync_lock.acquire(blocking=False)


def test_a_first_file_without_any_space_takes_no_records(disk: SimDisk) -> None:
    disk.capacity_bytes = 300
    writer = writer_of(disk)
    assert writer.is_reserve_file
    with pytest.raises(DiskFull):
        put(writer, b"a" * 200)
    assert writer.disk_full_count == 1
    disk.capacity_bytes = None
    put(writer, b"a" * 200)
    assert not writer.is_reserve_file


def test_a_rotation_whose_file_can_be_neither_made_nor_removed_trips_the_latch(disk: SimDisk) -> None:
    writer = writer_of(disk)
    put(writer, b"a" * 1_500)
    disk.fail("reserve", at=1, error=28)
    disk.fail("remove", at=1, error=5)
    with pytest.raises(Latched, match="removing the unfinished file"):
        put(writer, b"b" * 1_500)
    assert writer.latch.is_tripped


def test_the_rest_of_a_damaged_batch_ends_at_another_topic(disk: SimDisk) -> None:
    """Method: the batch lost its first frame and its end; the frame after it belongs to another topic."""
    first, second = append(b"lost", more=True), append(b"rest", more=True)
    damaged = bytearray(first)
    damaged[40] ^= 1
    disk.write_file(wal_path(1), bytes(damaged) + second + append(b"other", topic_id=2))
    disk.write_file(wal_path(4), append(b"next"))
    found = inspect_wal(disk)
    assert found.datas == [b"other", b"next"]
    assert [(lost.pos, lost.end) for lost in found.losses] == [(0, len(first) + len(second))]
