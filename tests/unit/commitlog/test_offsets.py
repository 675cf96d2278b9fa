"""Consumer offsets: the last commit wins, survives a power cut, and is never half there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from threading import Thread
from typing import TypeAlias

import pytest

from tidelog.commitlog import ConsumerOffsets, SegmentedLog, verify
from tidelog.errors import BadInput, Corrupt, DiskFull, Error, NewerFormat
from tidelog.formats import small_files
from tidelog.testing import SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
FILE = "d/.consumer_offsets"


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk()
    disk.make_dir("d")
    return disk


def opened(disk: SimDisk) -> ConsumerOffsets:
    return ConsumerOffsets(disk, FILE)


def test_a_group_that_never_committed_has_no_offset(disk: SimDisk) -> None:
    offsets = opened(disk)
    assert (offsets.fetch("group"), offsets.groups(), offsets.committed()) == (None, [], {})
    assert disk.tree() == {}, "asking makes no file"


def test_the_last_commit_wins_also_when_it_goes_back(disk: SimDisk) -> None:
    offsets = opened(disk)
    for seq in (5, 105, 7, 0):
        offsets.commit("group", seq)
        assert offsets.fetch("group") == seq
        assert opened(disk).fetch("group") == seq


def test_groups_topics_and_partitions_do_not_disturb_each_other(disk: SimDisk) -> None:
    offsets = opened(disk)
    places = [(group, topic, number) for group in ("a", "b") for topic in ("", "x", "y") for number in (0, 1)]
    for seq, (group, topic, number) in enumerate(places):
        offsets.commit(group, seq, topic=topic, partition=number)
    for found in (offsets, opened(disk)):
        for seq, (group, topic, number) in enumerate(places):
            assert found.fetch(group, topic=topic, partition=number) == seq
        assert found.groups() == ["a", "b"]
        assert found.committed(topic="x", partition=1) == {"a": 3, "b": 9}
        assert found.committed(topic="z") == {}


@pytest.mark.parametrize(
    ("committed", "lowest", "highest", "lag"),
    [
        (None, 0, 10, 10),
        (None, 4, 10, 6),
        (0, 0, 10, 10),
        (3, 0, 10, 7),
        (10, 0, 10, 0),
        (3, 5, 10, 5),
        (12, 0, 10, 0),
        (None, 0, 0, 0),
    ],
)
def test_the_lag_is_what_is_still_there_to_process(
    disk: SimDisk, committed: int | None, lowest: int, highest: int, lag: int
) -> None:
    offsets = opened(disk)
    if committed is not None:
        offsets.commit("group", committed)
    assert offsets.lag("group", highest, lowest=lowest) == lag


def test_a_commit_survives_a_power_cut(disk: SimDisk) -> None:
    offsets = opened(disk)
    for seq in range(5):
        offsets.commit("group", seq)
        assert opened(disk.crash_image("none")).fetch("group") == seq


def test_a_crash_shows_the_commit_before_or_the_commit_after_and_all_of_it(disk: SimDisk) -> None:
    """Method: restarts from before every operation of a commit of several partitions."""
    offsets = opened(disk)
    before = {("x", number): 1 for number in range(40)}
    after = {("x", number): 2 for number in range(40)}
    offsets.commit_many("group", before)
    found: set[tuple[int | None, ...]] = set()

    def examine(_: int) -> None:
        for image in disk.images():
            again = opened(image.disk)
            found.add(tuple(again.fetch("group", topic="x", partition=number) for number in range(40)))

    disk.on_op = examine
    offsets.commit_many("group", after)
    disk.on_op = None
    examine(0)
    assert found == {(1,) * 40, (2,) * 40}


@pytest.mark.parametrize(
    ("group", "seq", "partition"), [("", 1, 0), ("group", -1, 0), ("group", 1, -1)], ids=["group", "seq", "partition"]
)
def test_what_cannot_be_committed_is_refused(disk: SimDisk, group: str, seq: int, partition: int) -> None:
    offsets = opened(disk)
    offsets.commit("group", 7)
    before = disk.digest()
    with pytest.raises(BadInput):
        offsets.commit(group, seq, partition=partition)
    with pytest.raises(BadInput):
        offsets.commit_many(group, {("x", 0): 1, ("x", partition): seq})
    assert (disk.digest(), offsets.fetch("group")) == (before, 7)


def test_a_full_disk_refuses_the_commit_and_the_old_one_stands(disk: SimDisk) -> None:
    offsets = opened(disk)
    offsets.commit("group", 1)
    disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        offsets.commit("group", 2)
    assert (offsets.fetch("group"), opened(disk.reboot()).fetch("group")) == (1, 1)
    offsets.commit("group", 3)
    assert opened(disk.crash_image("none")).fetch("group") == 3


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_dir"])
def test_a_failed_commit_is_an_error_and_never_half_a_commit(disk: SimDisk, call: str) -> None:
    offsets = opened(disk)
    offsets.commit("group", 1)
    disk.fail(call)  # type: ignore[arg-type]
    with pytest.raises(Error):
        offsets.commit_many("group", {("", 0): 2, ("x", 0): 2})
    seen = (offsets.fetch("group"), offsets.fetch("group", topic="x"))
    assert seen == ((2, 2) if call == "sync_dir" else (1, None)), "what a restart of the process would see"
    for image in (disk.reboot(), disk.crash_image("none")):
        again = opened(image)
        pair = (again.fetch("group"), again.fetch("group", topic="x"))
        assert pair in ((1, None), (2, 2)), "the last step may have told the disk already"
    offsets.commit("group", 3)
    assert opened(disk.crash_image("none")).fetch("group") == 3


def test_a_damaged_file_is_reported_and_left_as_it_is(disk: SimDisk) -> None:
    """Method: every single byte of the file is changed, and every shorter file is tried."""
    opened(disk).commit("group", 12345)
    whole = disk.read_file(FILE)
    for pos in range(len(whole)):
        damaged = bytearray(whole)
        damaged[pos] ^= 0x10
        disk.write_file(FILE, damaged)
        with pytest.raises((Corrupt, NewerFormat)):
            opened(disk).fetch("group")
        assert disk.read_file(FILE) == damaged
    for size in range(len(whole)):
        disk.write_file(FILE, whole[:size])
        with pytest.raises(Corrupt):
            opened(disk).commit("group", 1)
    disk.write_file(FILE, whole)
    assert opened(disk).fetch("group") == 12345


def test_a_newer_file_is_refused_with_both_versions(disk: SimDisk) -> None:
    opened(disk).commit("group", 1)
    magic, body = (
        disk.read_file(FILE)[:4],
        small_files.unwrap_file(disk.read_file(FILE)[:4], 1, disk.read_file(FILE), FILE),
    )
    disk.write_file(FILE, small_files.wrap_file(magic, 2, body))
    with pytest.raises(NewerFormat) as refused:
        opened(disk).groups()
    assert (refused.value.found, refused.value.known) == (2, 1)


def test_commits_of_several_threads_are_all_kept(disk: SimDisk) -> None:
    offsets = opened(disk)

    def commit(group: str) -> None:
        for seq in range(1, 21):
            offsets.commit(group, seq)

    threads = [Thread(target=commit, args=(group,)) for group in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened(disk).committed() == dict.fromkeys("abcd", 20)


@pytest.mark.parametrize("codec", ["rustlog"])
def test_the_offsets_of_a_log_come_back_with_it(open_log: Opener, disk: SimDisk) -> None:
    log = open_log()
    log.append_many([b"a", b"b", b"c"])
    log.offsets.commit("group", 2)
    log.close()
    again = open_log()
    assert again.offsets.fetch("group") == 2
    assert again.offsets.lag("group", again.highest, lowest=again.lowest) == 1
    again.close()
    disk.write_file("log/.consumer_offsets.tmp", b"left behind")
    final = open_log()
    assert (final.report.swept, final.offsets.fetch("group")) == ([".consumer_offsets.tmp"], 2)


@pytest.mark.parametrize("codec", ["rustlog"])
def test_a_log_whose_offsets_are_damaged_is_read_but_not_retained(open_log: Opener, disk: SimDisk) -> None:
    """Retention without the offsets could drop what a consumer still needs; reading needs none of them."""
    log = open_log()
    log.append(b"a")
    log.offsets.commit("group", 1)
    log.close()
    whole = disk.read_file("log/.consumer_offsets")
    disk.write_file("log/.consumer_offsets", whole[:-1])
    hurt = open_log()
    assert [record.data for record in hurt] == [b"a"]
    with pytest.raises(Corrupt, match="consumer_offsets"):
        hurt.retain(keep_bytes=0)
    hurt.close()
    assert not verify("log", disk=disk).ok
    disk.write_file("log/.consumer_offsets", whole)
    assert open_log().offsets.fetch("group") == 1
