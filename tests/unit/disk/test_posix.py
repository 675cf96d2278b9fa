"""What the contract suite cannot see of the real disk: short writes, and which syncs reach the kernel."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest

from tidelog.disk.interface import check_same_directory, join, parent_dir, write_all
from tidelog.disk.posix import PosixDisk


def test_write_all_continues_after_a_short_write() -> None:
    random, data = Random(1), bytes(range(256)) * 4
    landed = bytearray(len(data))
    calls: list[int] = []

    def pwrite(piece: memoryview, pos: int) -> int:
        done = random.randint(1, min(100, len(piece)))
        landed[pos - 7 : pos - 7 + done] = piece[:done]
        calls.append(done)
        return done

    write_all(pwrite, 7, data)
    assert landed == data
    assert sum(calls) == len(data), "bytes were written twice"


@pytest.mark.parametrize("stuck", [0, -1])
def test_write_all_raises_if_no_byte_is_accepted(stuck: int) -> None:
    answers = iter([3, stuck])
    with pytest.raises(OSError, match="accepted no bytes") as failed:
        write_all(lambda _piece, _pos: next(answers), 0, b"abcdef")
    assert failed.value.errno == errno.EIO


def test_file_write_continues_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwrite, 0

    def pwrite(fd: int, piece: memoryview, pos: int) -> int:
        nonlocal calls
        calls += 1
        return real(fd, piece[:100], pos)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = bytes(range(256)) * 4
    file = PosixDisk().open(str(tmp_path / "a"), "create")
    file.write(3, data)
    file.close()
    assert (tmp_path / "a").read_bytes() == b"\0\0\0" + data
    assert calls == 11


def test_file_read_continues_after_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    (tmp_path / "a").write_bytes(bytes(range(250)))
    monkeypatch.setattr(os, "pread", lambda fd, size, pos: real(fd, min(size, 100), pos))
    file = PosixDisk().open(str(tmp_path / "a"))
    assert file.read(10, 200) == bytes(range(10, 210))
    assert file.read(10, 1000) == bytes(range(10, 250))
    file.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths handed to fsync and fdatasync, in order."""
    paths: list[str] = []

    def note(kind: str, real: object) -> None:
        def sync(fd: int) -> None:
            paths.append(f"{kind} {os.readlink(f'/proc/self/fd/{fd}')}")
            assert callable(real)
            real(fd)

        monkeypatch.setattr(os, kind, sync)

    note("fsync", os.fsync)
    note("fdatasync", os.fdatasync)
    return paths


def test_make_dir_syncs_the_parent_of_every_new_directory(tmp_path: Path, synced: list[str]) -> None:
    disk, root = PosixDisk(), str(tmp_path)
    disk.make_dir(join(root, "x/y/z"))
    assert synced == [f"fsync {root}", f"fsync {root}/x", f"fsync {root}/x/y"]


def test_sync_dir_syncs_the_directory_and_file_sync_the_file(tmp_path: Path, synced: list[str]) -> None:
    disk, root = PosixDisk(), str(tmp_path)
    file = disk.open(join(root, "a"), "create")
    file.sync()
    disk.sync_dir(root)
    file.close()
    assert synced == [f"fdatasync {root}/a", f"fsync {root}"]


def test_garbage_collection_closes_the_descriptor(tmp_path: Path) -> None:
    disk, path = PosixDisk(), str(tmp_path / "a")
    file = disk.open(path, "create")
    fd = file._fd
    del file
    with pytest.raises(OSError) as failed:
        os.fstat(fd)
    assert failed.value.errno == errno.EBADF


def test_allocate_takes_blocks(tmp_path: Path) -> None:
    file = PosixDisk().open(str(tmp_path / "a"), "create")
    file.allocate(1 << 20)
    file.close()
    assert (tmp_path / "a").stat().st_blocks * 512 >= 1 << 20


def test_a_lock_file_names_its_holder(tmp_path: Path) -> None:
    lock = PosixDisk().lock(str(tmp_path / "LOCK"))
    assert (tmp_path / "LOCK").read_text() == f"pid={os.getpid()}\n"
    lock.release()


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a", "."), ("a/b", "a"), ("a/b/", "a"), ("/a", "/"), ("/a/b", "/a"), ("a//b", "a/")],
)
def test_parent_dir(path: str, expected: str) -> None:
    assert parent_dir(path) == expected


def test_a_rename_across_directories_is_refused_before_it_reaches_the_disk() -> None:
    check_same_directory("x/a", "x/b")
    with pytest.raises(ValueError, match="x/a -> y/a"):
        check_same_directory("x/a", "y/a")
