"""What an engine is given and cannot take: a specific error, nothing written, and it goes on (contract 1.6, 1.12)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engine.harness import PATH, TINY, EngineHarness, datas, read_topic

import tidelog
from tidelog.engine import Topic
from tidelog.errors import BadInput, BatchTooLarge, Damaged, Error, Locked, NewerFormat, NotFound, Refused, TooLarge
from tidelog.testing import ManualClock, SimDisk


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return {"v": value}


# Calls --------------------------------------------------------------------------------------------------

Call = Callable[[Topic], object]
CALLS: dict[str, tuple[type[Error], Call]] = {
    # how many and how large (contract 1.12)
    "no records": (BadInput, lambda topic: topic.append([])),
    "no records in a tuple": (BadInput, lambda topic: topic.append(())),
    "10001 records": (BatchTooLarge, lambda topic: topic.append([b""] * 10_001)),
    "a record of 1 MiB and a byte": (TooLarge, lambda topic: topic.append(b"x" * ((1 << 20) + 1))),
    "a text of 1 MiB": (TooLarge, lambda topic: topic.append("x" * ((1 << 20) - 1))),
    "one large record of many": (TooLarge, lambda topic: topic.append([b"x", b"x" * ((1 << 20) + 1), b"x"])),
    "data and meta together": (TooLarge, lambda topic: topic.append(b"x" * ((1 << 20) - 8), meta={"k": "v"})),
    "a tag of 257 bytes": (BadInput, lambda topic: topic.append(1, tag="é" * 128 + "x")),
    "a node of 129 bytes": (BadInput, lambda topic: topic.append(1, node="é" * 64 + "x")),
    "a meta of 65 keys": (BadInput, lambda topic: topic.append(1, meta={str(number): 1 for number in range(65)})),
    "a meta over 16 KiB": (BadInput, lambda topic: topic.append(1, meta={"k": "x" * 16_380})),
    "a key of 257 bytes": (BadInput, lambda topic: topic.append(1, key="x" * 257)),
    "an empty key": (BadInput, lambda topic: topic.append(1, key="")),
    "nested 200 deep": (BadInput, lambda topic: topic.append(nested(200))),
    "nested 100000 deep": (BadInput, lambda topic: topic.append(nested(100_000))),
    "a number without end": (BadInput, lambda topic: topic.append(10**5_000)),
    # types
    "a tag that is a number": (BadInput, lambda topic: topic.append(1, tag=5)),  # type: ignore[arg-type]
    "a tag that is bytes": (BadInput, lambda topic: topic.append(1, tag=b"x")),  # type: ignore[arg-type]
    "tags of which one is a number": (BadInput, lambda topic: topic.append([1, 2], tag=["a", 5])),  # type: ignore[list-item]
    "a tag with half a character": (BadInput, lambda topic: topic.append(1, tag="\ud800")),
    "fewer tags than records": (BadInput, lambda topic: topic.append([1, 2], tag=["a"])),
    "more nodes than records": (BadInput, lambda topic: topic.append([1, 2], node=["a", "b", "c"])),
    "fewer metas than records": (BadInput, lambda topic: topic.append([1, 2], meta=[{}])),
    "tags for one record": (BadInput, lambda topic: topic.append(1, tag=["a", "b"])),
    "a node that is a number": (BadInput, lambda topic: topic.append(1, node=5)),  # type: ignore[arg-type]
    "a node with half a character": (BadInput, lambda topic: topic.append(1, node="\udfff")),
    "a meta that is text": (BadInput, lambda topic: topic.append(1, meta="{}")),  # type: ignore[arg-type]
    "metas of which one is a list": (BadInput, lambda topic: topic.append([1, 2], meta=[{}, []])),  # type: ignore[list-item]
    "a meta with NaN": (BadInput, lambda topic: topic.append(1, meta={"a": float("nan")})),
    "a key that is a number": (BadInput, lambda topic: topic.append(1, key=5)),  # type: ignore[arg-type]
    "a key that is bytes": (BadInput, lambda topic: topic.append(1, key=b"k")),  # type: ignore[arg-type]
    "a key with half a character": (BadInput, lambda topic: topic.append(1, key="\ud800")),
    "an object": (BadInput, lambda topic: topic.append(object())),
    "a function": (BadInput, lambda topic: topic.append(len)),
    # seqs
    "a cursor below nothing": (BadInput, lambda topic: topic.read(-1)),
    "a cursor that is a float": (BadInput, lambda topic: topic.read(1.0)),  # type: ignore[arg-type]
    "a cursor that is true": (BadInput, lambda topic: topic.read(True)),
    "a cursor that is text": (BadInput, lambda topic: topic.read("1")),  # type: ignore[arg-type]
    "no cursor": (BadInput, lambda topic: topic.read(None)),  # type: ignore[arg-type]
    "a cursor without end": (BadInput, lambda topic: topic.read(1 << 70)),
    "a limit of nothing": (BadInput, lambda topic: topic.read(0, 0)),
    "a limit below nothing": (BadInput, lambda topic: topic.read(0, -5)),
    "a limit that is a float": (BadInput, lambda topic: topic.read(0, 2.0)),  # type: ignore[arg-type]
    "a budget of nothing": (BadInput, lambda topic: topic.read(bytes_max=0)),
    "a reader that is a number": (BadInput, lambda topic: topic.read(node=5)),  # type: ignore[arg-type]
    "readers that are numbers": (BadInput, lambda topic: topic.read(node=[5])),  # type: ignore[list-item]
    "a reader with half a character": (BadInput, lambda topic: topic.read(node="\ud800")),
    "a follower below nothing": (BadInput, lambda topic: list(topic.follow(-1, timeout=0.0))),
    "columns below nothing": (BadInput, lambda topic: topic.to_arrow(-1)),
    "columns up to below nothing": (BadInput, lambda topic: topic.to_arrow(0, -1)),
    "columns up to a text": (BadInput, lambda topic: topic.to_arrow(0, "5")),  # type: ignore[arg-type]
    "a delete below nothing": (BadInput, lambda topic: topic.delete(before_seq=-1)),
    "a delete before a float": (BadInput, lambda topic: topic.delete(before_seq=2.0)),  # type: ignore[arg-type]
    "a delete before true": (BadInput, lambda topic: topic.delete(before_seq=True)),
    "a delete of a seq below nothing": (BadInput, lambda topic: topic.delete(seqs=[1, -1])),
    "a delete of a text": (BadInput, lambda topic: topic.delete(seqs=["1"])),  # type: ignore[list-item]
    "a delete of letters": (BadInput, lambda topic: topic.delete(seqs="12")),  # type: ignore[arg-type]
    "a delete of one seq": (BadInput, lambda topic: topic.delete(seqs=1)),  # type: ignore[arg-type]
    "a delete of seqs without end": (BadInput, lambda topic: topic.delete(seqs=[1 << 70])),
    "a delete by half a character": (BadInput, lambda topic: topic.delete(match="\ud800*")),
}


@pytest.mark.parametrize("durability", ["ephemeral", "fsync"])
@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_be_taken_is_refused_and_changes_nothing(call: str, durability: str) -> None:
    """Contract 1.6, 1.12, 2.5: a specific error that says nothing was written, and the engine goes on."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability=durability)
    topic.append([b"1", "2"], tag="t")
    before, state = world.disk.digest(), read_topic(topic)
    error, use = CALLS[call]
    with pytest.raises(Error) as refused:
        use(topic)
    assert type(refused.value) is error
    assert isinstance(refused.value, Refused)
    assert refused.value.written is False
    assert str(refused.value)
    assert world.disk.digest() == before
    assert read_topic(topic) == state
    assert topic.append("goes on").first_seq == 3
    assert datas(topic) == [b"1", "2", "goes on"]


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
def test_exactly_the_limit_is_taken(durability: str) -> None:
    """Contract 1.12."""
    topic = EngineHarness(wal_file_bytes=1 << 12).log.topic("a", durability=durability)
    topic.append([b""] * 10_000)
    topic.append(b"x" * (1 << 20))
    topic.append("x" * ((1 << 20) - 2))
    topic.append(b"x" * ((1 << 20) - 9), meta={"k": "v"})
    topic.append(1, tag="é" * 128, node="é" * 64, meta={str(number): 1 for number in range(64)}, key="x" * 256)
    topic.append(1, meta={"k": "x" * 16_376})
    topic.append(nested(100))
    last = topic.read(10_003, bytes_max=1 << 23).records
    assert [record.seq for record in last] == [10_004, 10_005, 10_006]
    assert (last[0].tag, last[0].node, len(last[0].meta or {})) == ("é" * 128, "é" * 64, 64)
    assert last[2].data == nested(100)


def test_limits_are_settings() -> None:
    log = EngineHarness(
        record_bytes_max=10, batch_records_max=2, meta_bytes_max=7, meta_keys_max=1, tag_bytes_max=1, node_bytes_max=1
    ).log
    topic = log.topic("a")
    topic.append([b"0123456789", b"x"], tag="t", node="n")
    topic.append(b"012", meta={"k": 1})
    refused: list[tuple[type[Error], Call]] = [
        (TooLarge, lambda topic: topic.append(b"0123456789x")),
        (TooLarge, lambda topic: topic.append(b"0123", meta={"k": 1})),
        (BatchTooLarge, lambda topic: topic.append([1, 2, 3])),
        (BadInput, lambda topic: topic.append(b"", meta={"k": 10})),
        (BadInput, lambda topic: topic.append(b"", meta={"": 1, "k": 2})),
        (BadInput, lambda topic: topic.append(b"", tag="ab")),
        (BadInput, lambda topic: topic.append(b"", node="ab")),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call(topic)
    assert topic.head_seq == 3


@pytest.mark.parametrize("value", [nested(128), {"v": nested(100), "n": None}])
def test_accepted_values_can_be_read_deep_in_a_stack(value: Any) -> None:
    """Contract, appendix E: nesting beyond about 128 is refused, so that no reader stumbles over it."""
    topic = EngineHarness().log.topic("a")
    topic.append(value)

    def down(levels: int) -> Any:
        return down(levels - 1) if levels else topic.read().records[0].data

    assert down(600) == value


# Opening ------------------------------------------------------------------------------------------------


def opened(disk: SimDisk, **settings: Any) -> object:
    return tidelog.open(PATH, disk=disk, clock=ManualClock(), threads=False, wal_file_bytes=4096, **settings)


def test_a_second_writer_is_refused_and_changes_nothing() -> None:
    """G30."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync").append([1, 2])
    before, ops = world.disk.digest(), world.disk.op_count
    for shards in (1, 3):
        with pytest.raises(Locked, match="another process") as refused:
            world.open(world.disk, wal_shards=shards)
        assert refused.value.retryable
    assert world.disk.digest() == before
    assert world.disk.op_count <= ops + 2, "no more than making sure that the directory's own name is durable"
    world.log.topic("a").append(3)
    assert datas(world.log.topic("a")) == [1, 2, 3]
    world.log.close()
    assert datas(world.open(world.disk).topic("a")) == [1, 2, 3]


def test_an_engine_that_failed_to_open_lets_go_of_the_directory() -> None:
    """A second try is not refused as a second writer."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync").append(1)
    disk = world.disk.reboot()
    disk.fail("create", path="/wal", times=1)
    with pytest.raises(Error) as failed:
        world.open(disk)
    assert not isinstance(failed.value, Locked)
    assert datas(world.open(disk).topic("a")) == [1]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_of_something_else_is_not_touched(read_only: bool) -> None:
    disk = SimDisk()
    disk.write_file(f"{PATH}/holiday.jpg", b"sand")
    before = disk.digest()
    with pytest.raises(BadInput, match=r"holiday\.jpg"):
        opened(disk, read_only=read_only)
    assert disk.digest() == before


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_is_not_a_directory(read_only: bool) -> None:
    disk = SimDisk()
    disk.write_file(PATH, b"a file")
    with pytest.raises(BadInput, match="is a file"):
        opened(disk, read_only=read_only)
    disk = SimDisk()
    disk.write_file("above", b"a file")
    with pytest.raises((BadInput, NotFound)):
        tidelog.open("above/data", disk=disk, threads=False, read_only=read_only)
    assert disk.tree() == {"above": b"a file"}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_snapshot_is_refused_and_not_passed_over(read_only: bool) -> None:
    """D8: a reader meeting a newer version says so and refuses."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(3):
        topic.append(number)
        world.log.checkpoint()
    disk = world.disk.reboot()
    path = sorted(world.files(".bin", "meta"))[-1]
    content = bytearray(disk.read_file(path))
    content[4] += 1  # the version, after the magic
    disk.write_file(path, content)
    before = disk.digest()
    with pytest.raises(NewerFormat) as refused:
        world.open(disk, read_only=read_only)
    assert refused.value.found > refused.value.known
    assert "upgrade" in str(refused.value)
    assert disk.digest() == before


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["mkdir", "lock", "create", "write", "sync_dir"])
def test_a_directory_that_cannot_be_written_is_refused(call: Any, error: int) -> None:
    """A new one: a tidelog error that says what to do, and the place works once it may be written."""
    disk = SimDisk()
    disk.fail(call, error=error, times=None)
    with pytest.raises((BadInput, Damaged)) as refused:
        opened(disk)
    assert "nothing" in str(refused.value)
    disk.clear_faults()
    log = opened(disk)
    assert isinstance(log, tidelog.Database)
    log.topic("a").append(1)
    assert datas(log.topic("a")) == [1]


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["lock", "create", "write", "sync_dir"])
def test_data_that_may_not_be_written_is_refused_and_can_be_read(call: Any, error: int) -> None:
    """An existing one: nothing is lost, and a reader needs no right to write."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2])
    world.log.checkpoint()
    topic.append(3)
    disk = world.disk.reboot()
    disk.fail(call, error=error, times=None)
    with pytest.raises((BadInput, Damaged)):
        world.open(disk)
    assert datas(world.reader(disk).topic("a")) == [1, 2, 3]
    disk.clear_faults()
    assert datas(world.open(disk).topic("a")) == [1, 2, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"wal_shards": 0},
        {"wal_shards": 101},
        {"wal_shards": 1.0},
        {"wal_file_bytes": -1},
        {"segment_events_max": True},
        {"segment_bytes_max": 1 << 31},
        {"topics_max": "many"},
        {"no_such_setting": 1},
    ],
    ids=str,
)
def test_a_setting_that_no_engine_can_have_is_refused(settings: dict[str, Any]) -> None:
    disk = SimDisk()
    with pytest.raises(BadInput):
        tidelog.open(PATH, disk=disk, threads=False, **settings)
    assert disk.tree() == {}
