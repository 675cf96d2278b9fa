"""Topics and partitions on disk: many logs, one set of offsets, each its own failure domain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidelog.commitlog import PartitionedLog
from tidelog.errors import AlreadyExists, BadInput, Damaged, Error, Locked, NotFound, ReadOnly
from tidelog.testing import ManualClock, PowerOff, SimDisk


@pytest.fixture
def data(disk: SimDisk, clock: ManualClock) -> PartitionedLog:
    return opened(disk, clock)


def opened(disk: SimDisk, clock: ManualClock, *, read_only: bool = False, codec: str = "rustlog") -> PartitionedLog:
    return PartitionedLog.open("data", codec, disk=disk, clock=clock, read_only=read_only)


# Topics.


def test_a_topic_has_the_partitions_it_was_made_with(data: PartitionedLog, disk: SimDisk, clock: ManualClock) -> None:
    data.create_topic("orders", 3)
    data.create_topic("a-b_C9", 1)
    assert data.topics() == {"a-b_C9": 1, "orders": 3}
    assert list(data.topics()) == sorted(data.topics())
    data.close()
    assert opened(disk, clock).topics() == {"a-b_C9": 1, "orders": 3}
    assert opened(disk.crash_image("none"), clock).topics() == {"a-b_C9": 1, "orders": 3}


def test_partitions_lie_where_the_design_says(data: PartitionedLog, disk: SimDisk) -> None:
    data.create_topic("orders", 2)
    data.append("orders", 1, b"a")
    assert "data/topics/orders/partitions/1/00000000000000000000.log" in disk.tree()
    assert disk.list_dir("data/topics/orders/partitions") == ["0", "1"]
    assert disk.stat("data/tmp") is not None


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "a.b", "ä", "a" * 256, "a\n"])
def test_a_name_that_is_no_name_is_refused(data: PartitionedLog, disk: SimDisk, name: str) -> None:
    before = disk.digest()
    with pytest.raises(BadInput, match="letters"):
        data.create_topic(name, 1)
    assert disk.digest() == before


def test_the_longest_name_is_accepted(data: PartitionedLog) -> None:
    data.create_topic("a" * 255, 1)
    assert data.append("a" * 255, 0, b"x") == 0


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_topic_has_one_to_a_thousand_partitions(data: PartitionedLog, disk: SimDisk, count: int) -> None:
    before = disk.digest()
    with pytest.raises(BadInput, match=str(count)):
        data.create_topic("orders", count)
    assert (disk.digest(), data.topics()) == (before, {})


def test_a_topic_that_exists_is_not_made_again(data: PartitionedLog) -> None:
    data.create_topic("orders", 2)
    data.append("orders", 0, b"a")
    for count in (1, 2, 3):
        with pytest.raises(AlreadyExists, match="orders"):
            data.create_topic("orders", count)
    assert data.topics() == {"orders": 2}
    assert [record.data for record in data.partition("orders", 0)] == [b"a"]


def test_a_topic_or_partition_that_is_not_there_is_not_made_by_asking(data: PartitionedLog, disk: SimDisk) -> None:
    data.create_topic("orders", 2)
    before = disk.digest()
    calls: list[Callable[[], object]] = [
        lambda: data.append("other", 0, b"a"),
        lambda: data.partition("orders", 2),
        lambda: data.partition("orders", -1),
        lambda: data.describe("other"),
        lambda: data.lag("group", "other", 0),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            call()
    assert disk.digest() == before


def test_a_crash_while_a_topic_is_made_leaves_it_whole_or_not_there(disk: SimDisk, clock: ManualClock) -> None:
    """Method: the power fails at every operation in turn; making it again with fewer partitions then works."""
    opened(disk, clock).close()
    for ops in range(1, 100):
        machine = disk.reboot()
        data = opened(machine, clock)
        machine.cut_power_at(machine.op_count + ops)
        try:
            data.create_topic("orders", 3)
        except PowerOff:
            pass
        else:
            break
        for image in machine.images():
            again = opened(image.disk, clock)
            assert again.topics() in ({}, {"orders": 3}), image.label
            if not again.topics():
                again.create_topic("orders", 2)
                assert again.topics() == {"orders": 2}, image.label
                again.append("orders", 1, b"a")
    else:
        pytest.fail("the topic was never made")


# Logs.


@pytest.mark.parametrize("codec", ["tide", "rustlog", "laminar", "narwhal"])
def test_every_partition_counts_for_itself(disk: SimDisk, clock: ManualClock, codec: str, first_seq: int) -> None:
    data = opened(disk, clock, codec=codec)
    data.create_topic("orders", 2)
    data.create_topic("bills", 1)
    for number in range(3):
        assert data.append("orders", 0, b"%d" % number) == first_seq + number
    assert data.append("orders", 1, b"other") == first_seq
    assert data.append("bills", 0, b"bill") == first_seq
    data.close()
    again = opened(disk, clock, codec=codec)
    assert [record.data for record in again.partition("orders", 0)] == [b"0", b"1", b"2"]
    assert [record.data for record in again.partition("orders", 1)] == [b"other"]
    assert [record.data for record in again.partition("bills", 0)] == [b"bill"]


def test_a_description_has_range_watermark_segments_and_size(data: PartitionedLog) -> None:
    data.create_topic("orders", 2)
    for number in range(4):
        data.append("orders", 1, b"%d" % number)
    log = data.partition("orders", 1)
    log.seal()
    empty, full = data.describe("orders")
    assert empty == ("orders", 0, 0, 0, 0, 1, 0)
    assert full == ("orders", 1, 0, 4, 4, 2, log.size)
    assert (full.high_watermark, full.segments) == (4, 2)


def test_a_partition_that_cannot_be_opened_leaves_the_others_working(
    data: PartitionedLog, disk: SimDisk, clock: ManualClock
) -> None:
    """G150."""
    data.create_topic("orders", 3)
    for number in range(3):
        data.append("orders", number, b"%d" % number)
    data.close()
    disk.fail("open", path="partitions/1/00000000000000000000.log", times=None)
    again = opened(disk, clock)
    with pytest.raises(Damaged):
        again.append("orders", 1, b"x")
    for number in (0, 2):
        assert again.append("orders", number, b"x") == 1
        assert [record.data for record in again.partition("orders", number)] == [b"%d" % number, b"x"]
    disk.clear_faults()
    assert again.append("orders", 1, b"x") == 1, "and it is tried again when it is asked for again"


def test_a_latched_partition_leaves_the_others_working(data: PartitionedLog, disk: SimDisk) -> None:
    """G150."""
    data.create_topic("orders", 2)
    data.append("orders", 0, b"a")
    disk.fail_sync("dropped", path="partitions/0/", times=None)
    with pytest.raises(Damaged):
        data.append("orders", 0, b"b")
    assert data.append("orders", 1, b"b") == 0


# One writer.


def test_a_second_writer_is_refused_and_readers_are_not(
    data: PartitionedLog, disk: SimDisk, clock: ManualClock
) -> None:
    data.create_topic("orders", 1)
    data.append("orders", 0, b"a")
    data.offsets.commit("group", 1, topic="orders")
    before = disk.digest()
    with pytest.raises(Locked, match="another"):
        opened(disk, clock)
    reader = opened(disk, clock, read_only=True)
    assert [record.data for record in reader.partition("orders", 0)] == [b"a"]
    assert (reader.topics(), reader.lag("group", "orders", 0)) == ({"orders": 1}, 0)
    with pytest.raises(ReadOnly):
        reader.append("orders", 0, b"b")
    reader.close()
    assert disk.digest() == before
    data.close()
    opened(disk, clock).close()


def test_a_reader_cannot_make_a_topic(data: PartitionedLog, disk: SimDisk, clock: ManualClock) -> None:
    data.create_topic("orders", 1)
    before = disk.digest()
    reader = opened(disk, clock, read_only=True)
    with pytest.raises(Error):
        reader.create_topic("bills", 1)
    assert disk.digest() == before


def test_open_for_reading_of_a_missing_root_raises_not_found(disk: SimDisk, clock: ManualClock) -> None:
    with pytest.raises(NotFound):
        opened(disk, clock, read_only=True)
    assert disk.tree() == {}


def test_what_was_left_in_tmp_is_swept_at_start(data: PartitionedLog, disk: SimDisk, clock: ManualClock) -> None:
    data.close()
    disk.write_file("data/tmp/half", b"done")
    with opened(disk, clock):
        assert disk.list_dir("data/tmp") == []


def test_foreign_names_are_no_topics(data: PartitionedLog, disk: SimDisk) -> None:
    data.create_topic("orders", 1)
    disk.write_file("data/topics/notes.txt", b"mine")
    disk.write_file("data/topics/empty/readme", b"mine")
    disk.write_file("data/topics/plain", b"mine")
    disk.write_file("data/topics/orders/partitions/x1/file", b"mine")
    assert data.topics() == {"orders": 1}


# Groups and retention.


def test_the_lag_of_a_group_is_counted_per_partition(data: PartitionedLog, disk: SimDisk, clock: ManualClock) -> None:
    data.create_topic("orders", 2)
    for number in (0, 0, 0, 1):
        data.append("orders", number, b"x")
    assert [data.lag("group", "orders", number) for number in (0, 1)] == [3, 1]
    data.offsets.commit_many("group", {("orders", 0): 2, ("orders", 1): 1})
    assert [data.lag("group", "orders", number) for number in (0, 1)] == [1, 0]
    data.close()
    again = opened(disk, clock)
    assert [again.lag("group", "orders", number) for number in (0, 1)] == [1, 0]


def test_retention_of_a_topic_keeps_what_a_group_has_not_committed_in_that_partition(data: PartitionedLog) -> None:
    """G106."""
    data.create_topic("orders", 3)
    for number in range(3):
        for _ in range(4):
            data.append("orders", number, b"x")
            data.partition("orders", number).seal()
    data.offsets.commit("group", 2, topic="orders", partition=0)
    data.offsets.commit("group", 4, topic="orders", partition=1)
    data.offsets.commit("group", 0, topic="bills", partition=2)
    done = data.retain("orders", keep_bytes=0)
    assert [retained.segments for retained in done] == [2, 4, 4]
    assert [info.lowest for info in data.describe("orders")] == [2, 4, 4]
