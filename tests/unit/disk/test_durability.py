"""Atomic replacement on a disk that loses power at every operation."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from tidelog.disk.durability import (
    ParallelSyncs,
    SyncFailed,
    read_file,
    remove_if_exists,
    replace_file,
    write_temporary,
)
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.testing import DiskCall, SimDisk

OLD, NEW = b"o" * 900, b"n" * 1300


def start(old: bytes | None, *, stale: bool) -> SimDisk:
    disk = SimDisk(trace=True)
    disk.make_dir("d")
    if old is not None:
        disk.write_file("d/a", old)
    if stale:
        disk.write_file("d/a.tmp", b"left over from an earlier crash")
    return disk


def crash_everywhere(disk: SimDisk, change: Callable[[Disk], None]) -> set[bytes | None]:
    """What `d/a` may be if power fails at any instant of `change`, the one after it left out."""
    found: set[bytes | None] = set()

    def look(number: int) -> None:
        found.update(read_file(image.disk, "d/a") for image in disk.images(random=Random(number)))

    disk.on_op = look
    change(disk)
    disk.on_op = None
    return found


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("old", [None, b"", OLD])
def test_replace_leaves_the_old_content_or_the_new_at_every_crash_point(old: bytes | None, stale: bool) -> None:
    disk = start(old, stale=stale)
    assert crash_everywhere(disk, lambda disk: replace_file(disk, "d/a", NEW)) == {old, NEW}
    assert {image.disk.read_file("d/a") for image in disk.images()} == {NEW}, "returned before it was durable"
    assert disk.list_dir("d") == ["a"]


def test_the_order_of_replace_is_write_sync_rename_sync_dir() -> None:
    disk = start(OLD, stale=False)
    before = disk.op_count
    replace_file(disk, "d/a", b"new")
    steps = ["create d/a.tmp", "write d/a.tmp@0+3", "sync d/a.tmp", "rename d/a.tmp -> d/a", "sync_dir d"]
    assert disk.trace[before:] == steps


def replace_syncing_after_the_rename(disk: Disk) -> None:
    file = disk.open("d/a.tmp", "create")
    file.write(0, NEW)
    disk.rename("d/a.tmp", "d/a")
    file.sync()
    disk.sync_dir("d")


def replace_without_sync(disk: Disk) -> None:
    disk.open("d/a.tmp", "create").write(0, NEW)
    disk.rename("d/a.tmp", "d/a")
    disk.sync_dir("d")


def replace_in_place(disk: Disk) -> None:
    file = disk.open("d/a", "write")
    file.write(0, NEW)
    file.sync()


def replace_by_remove_and_rename(disk: Disk) -> None:
    write_temporary(disk, "d/a.tmp", NEW)
    disk.remove("d/a")
    disk.rename("d/a.tmp", "d/a")
    disk.sync_dir("d")


@pytest.mark.parametrize(
    "wrong",
    [replace_syncing_after_the_rename, replace_without_sync, replace_in_place, replace_by_remove_and_rename],
)
def test_a_wrong_replace_is_caught(wrong: Callable[[Disk], None]) -> None:
    found = crash_everywhere(start(OLD, stale=False), wrong)
    assert found - {OLD, NEW}, "the simulated disk is too kind to find a wrong order"
    if wrong is replace_syncing_after_the_rename:
        assert b"" in found


def test_a_replace_without_the_last_sync_is_caught() -> None:
    disk = start(OLD, stale=False)
    write_temporary(disk, "d/a.tmp", NEW)
    disk.rename("d/a.tmp", "d/a")
    assert {image.disk.read_file("d/a") for image in disk.images()} == {OLD, NEW}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", ["create", "write", "sync", "rename"])
def test_replace_keeps_the_old_content_on_an_error(
    op: Literal["create", "write", "sync", "rename"], error: int
) -> None:
    disk = start(OLD, stale=True)
    disk.fail(op, error=error, partial=600)
    with pytest.raises(OSError) as failed:
        replace_file(disk, "d/a", NEW)
    assert failed.value.errno == error
    assert disk.read_file("d/a") == OLD
    assert {image.disk.read_file("d/a") for image in disk.images()} == {OLD}
    replace_file(disk, "d/a", NEW)
    assert disk.read_file("d/a") == NEW


def test_replace_leaves_old_or_new_content_if_only_the_directory_sync_fails() -> None:
    disk = start(OLD, stale=False)
    disk.fail("sync_dir")
    with pytest.raises(OSError):
        replace_file(disk, "d/a", NEW)
    assert disk.read_file("d/a") == NEW
    assert {image.disk.read_file("d/a") for image in disk.images()} == {OLD, NEW}


@pytest.mark.parametrize("op", ["write", "sync"])
def test_a_temporary_file_that_could_not_be_written_is_removed(op: DiskCall) -> None:
    disk = start(OLD, stale=False)
    disk.fail(op)
    with pytest.raises(OSError):
        write_temporary(disk, "d/a.tmp", NEW)
    assert disk.list_dir("d") == ["a"]


def test_replace_accepts_short_writes_and_a_temporary_name() -> None:
    disk = start(OLD, stale=False)
    disk.short_writes(Random(3))
    assert crash_everywhere(disk, lambda disk: replace_file(disk, "d/a", NEW, temporary="d/other")) == {OLD, NEW}
    assert disk.tree() == {"d/a": NEW}


def test_read_file_and_remove_if_exists_accept_a_missing_file() -> None:
    disk = start(OLD, stale=False)
    assert (read_file(disk, "d/a"), read_file(disk, "d/no")) == (OLD, None)
    assert (remove_if_exists(disk, "d/a"), remove_if_exists(disk, "d/a")) == (True, False)


def test_parallel_syncs_close_every_file_and_keep_each_error_apart(tmp_path: Path) -> None:
    disk = PosixDisk()
    files = [disk.open(f"{tmp_path}/{number}", "create") for number in range(6)]
    files[3] = disk.open("/dev/null", "write")  # a device that cannot be synced
    for file in files:
        file.write(0, b"x" * 10_000)
    with ParallelSyncs() as syncs:
        pending = [syncs.sync_and_close(file) for file in files]
    errors = [each.exception() for each in pending]
    assert [type(error) for error in errors] == [type(None)] * 3 + [SyncFailed] + [type(None)] * 2
    assert [file.descriptor for file in files] == [None] * 6


def test_a_file_without_a_descriptor_is_synced_when_it_is_handed_over() -> None:
    disk = SimDisk()
    disk.make_dir("d")
    file = disk.open("d/f", "create")
    file.write(0, b"content")
    disk.sync_dir("d")
    with ParallelSyncs() as syncs:
        pending = syncs.sync_and_close(file)
        assert pending.done()
        disk.fail_sync("dropped")
        failed = syncs.sync_and_close(disk.open("d/f", "write"))
        assert isinstance(failed.exception(), SyncFailed)
    assert read_file(disk.crash_image("none"), "d/f") == b"content"
