"""The next file, made ahead of time: it is used when it is there, and nothing hangs on it."""

from __future__ import annotations

import errno

import pytest
from tests.unit.wal.bench import FILE_BYTES, Bench

from tidelog.testing import Call, SimDisk
from tidelog.wal import files, path_of
from tidelog.wal.spare import Spare

DIRECTORY = "data"
PATH = f"{DIRECTORY}/SPARE"


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk()
    disk.make_dir(DIRECTORY)
    return disk


def test_it_is_made_when_the_file_is_half_full_and_becomes_the_next(disk: SimDisk) -> None:
    bench = Bench(disk)
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
    assert len(files(disk, place)) == 2
    newest = disk.read_file(path_of(place, files(disk, place)[-1]))
    assert len(newest) == FILE_BYTES
    assert newest.rstrip(b"\0").count(b"z") == 900


def test_closing_leaves_none_behind(disk: SimDisk) -> None:
    bench = Bench(disk)
    bench.write(b"x" * (FILE_BYTES // 2))
    bench.shard.tick()
    assert [path for path in disk.tree() if path.endswith("SPARE")]
    bench.shard.close()
    assert not [path for path in disk.tree() if "SPARE" in path]


def test_one_that_an_earlier_process_left_is_not_trusted(disk: SimDisk) -> None:
    for name in ("SPARE", "SPARE.tmp"):
        file = disk.open(f"{DIRECTORY}/{name}", "create")
        file.write(0, b"whatever")
        file.close()
    spare = Spare(disk, DIRECTORY, 10)
    assert not spare.take(f"{DIRECTORY}/file")
    spare.drop()
    assert not [path for path in disk.tree() if "SPARE" in path]
    spare.make()
    assert disk.read_file(PATH) == bytes(10)


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
def test_a_disk_that_refuses_it_just_leaves_none(disk: SimDisk, call: Call) -> None:
    disk.fail(call, error=errno.ENOSPC)
    spare = Spare(disk, DIRECTORY, 10)
    spare.make()
    assert not spare.take(f"{DIRECTORY}/file")
    assert not [path for path in disk.tree() if "SPARE" in path]
    spare.make()
    assert spare.take(f"{DIRECTORY}/file")
    assert disk.read_file(f"{DIRECTORY}/file") == bytes(10)


def test_a_name_that_is_taken_is_not_taken_from_anybody(disk: SimDisk) -> None:
    disk.open(f"{DIRECTORY}/file", "create").close()
    spare = Spare(disk, DIRECTORY, 10)
    spare.make()
    assert not spare.take(f"{DIRECTORY}/file")
    assert disk.read_file(f"{DIRECTORY}/file") == b""
