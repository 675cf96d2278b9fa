"""Bugs of topics and partitions on disk, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from tidelog.cli.main import main
from tidelog.commitlog import PartitionedLog, SegmentedLog
from tidelog.errors import AlreadyExists, Corrupt, Damaged, Error, Latched, Locked, NotFound, OutOfRange
from tidelog.testing import ManualClock, PowerOff, SimDisk
from tidelog.testing.machine import DiskCall

IMAGES: tuple[Literal["none", "all"], ...] = ("none", "all")
SMALL: dict[str, Any] = {"segment_bytes_max": 200}


def opened(disk: SimDisk, *, read_only: bool = False) -> PartitionedLog:
    return PartitionedLog.open("data", disk=disk, clock=ManualClock(), read_only=read_only, **SMALL)


def filled(disk: SimDisk, *, partitions: int = 3, count: int = 40) -> None:
    """Several sealed segments in every partition; a group has read 12 records of partition 1."""
    with opened(disk) as root:
        root.create_topic("orders", partitions)
        for number in range(partitions):
            for at in range(count):
                root.append("orders", number, b"record %d" % at)
        root.offsets.commit("billing", 12, topic="orders", partition=1)


# ── retention ─────────────────────────────────────────────────────────────────────────────────────


def retained_by_handle(disk: SimDisk) -> int:
    with opened(disk) as root:
        log = root.partition("orders", 1)
        log.retain(keep_bytes=0)
        return log.lowest


def retained_by_root(disk: SimDisk) -> int:
    with opened(disk) as root:
        root.retain("orders", keep_bytes=0)
        return root.partition("orders", 1).lowest


def retained_alone(disk: SimDisk) -> int:
    with SegmentedLog.open("data/topics/orders/partitions/1", disk=disk, clock=ManualClock()) as log:
        log.retain(keep_bytes=0)
        return log.lowest


@pytest.mark.parametrize("retain", [retained_by_handle, retained_by_root, retained_alone])
def test_retention_of_a_partition_keeps_what_a_group_of_the_root_has_not_read(
    retain: Callable[[SimDisk], int],
) -> None:
    disk = SimDisk()
    filled(disk)
    lowest = retain(disk)
    assert 0 < lowest <= 12, "something was dropped, and nothing that is still to be read"
    with opened(disk, read_only=True) as root:
        assert root.partition("orders", 1).read(12).data == b"record 12"


def test_retention_keeps_what_a_group_of_the_partition_itself_has_not_read() -> None:
    disk = SimDisk()
    filled(disk)
    with opened(disk) as root:
        root.partition("orders", 1).offsets.commit("local", 7)
        root.retain("orders", keep_bytes=0)
        assert root.partition("orders", 1).lowest <= 7


def test_retention_of_a_partition_is_refused_where_the_offsets_of_its_root_are_damaged() -> None:
    disk = SimDisk()
    filled(disk)
    disk.flip_bit("data/.consumer_offsets", 25, 1)
    with SegmentedLog.open("data/topics/orders/partitions/1", disk=disk, clock=ManualClock()) as log:
        before = log.lowest
        with pytest.raises(Corrupt):
            log.retain(keep_bytes=0)
        assert log.lowest == before


@pytest.mark.parametrize("where", ["absolute", "relative", "inside", "linked"])
def test_the_command_line_retains_a_partition_as_its_help_says(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PartitionedLog.open(str(tmp_path / "data"), **SMALL) as root:
        root.create_topic("orders", 2)
        for at in range(40):
            root.append("orders", 1, b"record %d" % at)
        root.offsets.commit("billing", 12, topic="orders", partition=1)
    partition = tmp_path / "data" / "topics" / "orders" / "partitions" / "1"
    (tmp_path / "link").symlink_to(partition)
    start, given = {
        "absolute": (tmp_path, str(partition)),
        "relative": (tmp_path / "data", "topics/orders/partitions/1"),
        "inside": (partition, "."),
        "linked": (tmp_path, "link"),
    }[where]
    monkeypatch.chdir(start)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["log", "retain", given, "--keep-bytes", "0"]) == 0
    with SegmentedLog.open(str(partition), read_only=True) as log:
        assert 0 < log.lowest <= 12


# ── truncate ──────────────────────────────────────────────────────────────────────────────────────


def test_truncate_brings_groups_that_had_read_further_back_to_its_mark() -> None:
    disk = SimDisk()
    with SegmentedLog.open("log", "tide", disk=disk, clock=ManualClock()) as log:
        log.append_many([b"a"] * 20)
        log.offsets.commit("far", 15)
        log.offsets.commit("near", 4)
        with pytest.raises(OutOfRange):
            log.truncate(99)
        assert (log.offsets.fetch("far"), log.offsets.fetch("near")) == (15, 4)
        log.truncate(10)
        assert (log.offsets.fetch("far"), log.offsets.fetch("near")) == (10, 4)
        seq = log.append(b"new")
        assert log.offsets.lag("far", log.highest) == 1
        assert seq == 10
    with SegmentedLog.open("log", disk=disk, clock=ManualClock()) as log:
        assert log.offsets.fetch("far") == 10


def test_truncate_of_a_partition_brings_groups_of_the_root_back() -> None:
    for alone in (False, True):
        disk = SimDisk()
        filled(disk)
        with opened(disk) as root:
            root.offsets.commit("billing", 30, topic="orders", partition=1)
            root.offsets.commit("billing", 30, topic="orders", partition=2)
            if not alone:
                root.partition("orders", 1).truncate(20)
                assert root.lag("billing", "orders", 1) == 0
            else:
                log = SegmentedLog.open("data/topics/orders/partitions/1", disk=disk, clock=ManualClock())
                with log, pytest.raises(Locked):
                    log.truncate(20)
                assert log.highest == 40, "the root is open elsewhere: nothing was forgotten"
        if alone:
            with SegmentedLog.open("data/topics/orders/partitions/1", disk=disk, clock=ManualClock()) as log:
                log.truncate(20)
        with opened(disk) as root:
            assert root.offsets.fetch("billing", topic="orders", partition=1) == 20
            assert root.offsets.fetch("billing", topic="orders", partition=2) == 30


def test_a_crash_in_a_truncate_never_leaves_a_group_past_the_end() -> None:
    disk = SimDisk()
    with SegmentedLog.open("log", "rustlog", disk=disk, clock=ManualClock(), **SMALL) as log:
        log.append_many([b"record"] * 20)
        log.offsets.commit("group", 19)
    states = 0
    for operation in range(1000):
        machine = disk.reboot()
        log = SegmentedLog.open("log", disk=machine, clock=ManualClock(), **SMALL)
        machine.cut_power_at(machine.op_count + 1 + operation)
        try:
            log.truncate(5)
        except PowerOff:
            pass
        else:
            break
        for image in IMAGES:
            states += 1
            with SegmentedLog.open("log", disk=machine.crash_image(image), clock=ManualClock()) as again:
                done = again.offsets.fetch("group")
                assert done is not None
                assert done <= again.highest
    assert states > 10


# ── vanished partitions ───────────────────────────────────────────────────────────────────────────


def lose(disk: SimDisk, directory: str, *, whole: bool) -> None:
    for name in disk.list_dir(directory):
        disk.remove(f"{directory}/{name}")
    if whole:
        disk.remove_dir(directory)
        disk.sync_dir("data/topics/orders/partitions")
    else:
        disk.sync_dir(directory)


@pytest.mark.parametrize("whole", [False, True], ids=["files", "directory"])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("record", [True, False], ids=["recorded", "not recorded"])
def test_a_vanished_partition_is_damage_and_not_a_new_log(number: int, whole: bool, record: bool) -> None:
    disk = SimDisk()
    filled(disk)
    if not record:  # then only what consumers have read proves that there was a log
        with opened(disk) as root:
            root.offsets.commit("billing", 12, topic="orders", partition=number)
    lose(disk, f"data/topics/orders/partitions/{number}", whole=whole)
    if not record:  # a topic of an earlier version
        disk.remove("data/topics/orders/.partitions")
        disk.sync_dir("data/topics/orders")
    at_an_end = not record and whole and number in (0, 2)  # then the others do not prove that it was there
    before = disk.tree()
    for read_only in (True, False):
        with opened(disk, read_only=read_only) as root:
            with pytest.raises(NotFound if at_an_end else Damaged) as told:
                root.partition("orders", number)
            assert told.value.written is False
            with pytest.raises(Error):
                root.append("orders", number, b"new")
            if not (at_an_end and number == 0):
                assert root.partition("orders", 1 if number != 1 else 2).highest == 40, "the others are as before"
    assert {path: data for path, data in disk.tree().items() if path in before} == before


def test_a_topic_whose_first_partition_vanished_is_not_made_again_over_the_others() -> None:
    disk = SimDisk()
    filled(disk)
    lose(disk, "data/topics/orders/partitions/0", whole=True)
    disk.remove("data/topics/orders/.partitions")
    with opened(disk) as root, pytest.raises(Damaged, match="partition 0 is missing"):
        root.create_topic("orders", 3)


def test_a_partition_that_was_never_used_is_made_at_its_first_use() -> None:
    disk = SimDisk()
    with opened(disk) as root:
        root.create_topic("orders", 3)
        root.append("orders", 2, b"a")
    for image in IMAGES:
        with opened(disk.crash_image(image)) as root:
            assert root.append("orders", 1, b"b") == 0
            assert [record.data for record in root.partition("orders", 2)] == [b"a"]


def test_a_vanished_partition_can_be_made_on_purpose() -> None:
    disk = SimDisk()
    filled(disk)
    lose(disk, "data/topics/orders/partitions/1", whole=True)
    with opened(disk) as root:
        with pytest.raises(NotFound):
            root.create_partition("orders", 7, first_seq=0)
        with pytest.raises(AlreadyExists):
            root.create_partition("orders", 0, first_seq=100)
        root.create_partition("orders", 1, first_seq=100)
        assert root.append("orders", 1, b"again") == 100
    with opened(disk) as root:
        assert root.partition("orders", 1).lowest == 100


def test_a_crash_at_the_first_use_of_a_partition_leaves_it_usable() -> None:
    disk = SimDisk()
    with opened(disk) as root:
        root.create_topic("orders", 2)
    states = 0
    for operation in range(1000):
        machine = disk.reboot()
        root = opened(machine)
        machine.cut_power_at(machine.op_count + 1 + operation)
        acked = False
        try:
            root.append("orders", 1, b"a")
            acked = True
            root.close()
        except PowerOff:
            pass
        else:
            break
        for image in IMAGES:
            states += 1
            with opened(machine.crash_image(image)) as again:
                found = [record.data for record in again.partition("orders", 1)]
                assert found == [b"a"] if acked else found in ([], [b"a"])
    assert states > 10


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


def calls(root: PartitionedLog) -> Iterator[Callable[[], object]]:
    yield lambda: root.create_topic("more", 2)
    yield root.topics
    yield lambda: root.partition("orders", 1)
    yield lambda: root.describe("orders")
    yield lambda: root.lag("billing", "orders", 1)
    yield lambda: root.retain("orders", keep_bytes=0)
    yield lambda: root.create_partition("orders", 0, first_seq=1)


KINDS: list[DiskCall] = ["write", "create", "rename", "sync", "sync_dir", "mkdir", "remove", "open", "read", "lock"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("kind", KINDS)
def test_every_failure_of_the_disk_is_an_error_of_ours(kind: DiskCall, code: int) -> None:
    """Method: each call of a root meets a failure of each kind of operation, at its first, second and third."""
    disk = SimDisk()
    filled(disk)
    for at in (1, 2, 3):
        machine = disk.reboot()
        machine.write_file("data/tmp/left", b"over")
        machine.fail(kind, at=at, error=code)
        with suppress(Error):
            opened(machine).close()
    failures = 0
    for which in range(7):
        for at in (1, 2, 3):
            machine = disk.reboot()
            root = opened(machine)
            call = list(calls(root))[which]
            machine.fail(kind, at=at, error=code)
            try:
                call()
            except Error:
                failures += 1
            machine.clear_faults()
            with suppress(Latched):
                root.close()
            with opened(machine.reboot()) as again:
                assert again.partition("orders", 2).highest == 40
    assert failures or kind == "remove" or (kind, code) == ("mkdir", errno.EEXIST)
