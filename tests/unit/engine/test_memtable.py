"""Large writes are read where the WAL has them: the same records, whatever the size says."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from tests.unit.engine.harness import LOGGED, RESTARTS, TINY, EngineHarness, Restart, datas

from tidelog.engine import Record, Topic, append
from tidelog.engine.memtable import LARGE_WRITE_BYTES, MemTable
from tidelog.errors import Corrupt, Damaged
from tidelog.wal import WalRange
from tidelog.wal.writer import SYNC_MARK_BYTES


def stored(topic: Topic) -> list[WalRange]:
    parts = topic._state.index.parts
    return [
        piece for part in parts if isinstance(part, MemTable) for piece in part._pieces if isinstance(piece, WalRange)
    ]


@pytest.fixture
def small_block_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LARGE_WRITE_BYTES", 20)


@pytest.mark.parametrize("durability", LOGGED)
@pytest.mark.usefixtures("small_block_limit")
def test_small_and_large_writes_are_one_topic(durability: str) -> None:
    """D4, G3: pages, tables and deletes by tag see no difference, in memory, after a checkpoint and a restart."""
    random = Random(1)
    world = EngineHarness(**TINY)
    topic = world.log.topic("t", durability=durability)
    wanted: list[object] = []
    for number in range(40):
        many = [json.dumps([number, at, "x" * random.randrange(30)]) for at in range(random.randrange(1, 5))]
        tag = random.choice([None, "t"])
        topic.append([json.loads(text) for text in many], tag=tag, node=random.choice([None, "n"]))
        wanted += [json.loads(text) for text in many]
        if number % 11 == 10:
            world.log.checkpoint()
        assert datas(topic) == wanted
        assert topic.to_arrow().num_rows == len(wanted)
    assert stored(topic), "none was large"
    before = topic.count
    gone = topic.delete(match="t").deleted
    assert gone
    assert topic.count == before - gone
    left = datas(topic)
    if durability != "memory":
        world.restart("kill")
        assert datas(world.log.topic("t")) == left


@pytest.mark.parametrize("how", RESTARTS)
@pytest.mark.usefixtures("small_block_limit")
def test_what_was_acknowledged_is_there_after_a_restart(how: Restart) -> None:
    world = EngineHarness(wal_file_bytes=512)
    topic = world.log.topic("t", durability="fsync")
    for number in range(9):
        topic.append([b"%d" % number * 30, b"y"])
    wanted = datas(topic)
    world.restart(how)
    assert datas(world.log.topic("t")) == wanted


def test_a_write_of_many_small_records_is_not_held_in_memory() -> None:
    world = EngineHarness(wal_file_bytes=1 << 20)
    topic = world.log.topic("t")
    topic.append([b"x" * 100] * 1000)
    assert sum(map(len, stored(topic))) > LARGE_WRITE_BYTES
    topic.append([b"x" * 100] * 100)
    topic.append(b"x" * LARGE_WRITE_BYTES)
    assert sum(piece.size for piece in stored(topic)) < 200_000
    assert datas(topic) == [b"x" * 100] * 1100 + [b"x" * LARGE_WRITE_BYTES]


@pytest.mark.usefixtures("small_block_limit")
def test_records_that_differ_stay_in_memory() -> None:
    topic = EngineHarness().log.topic("t")
    topic.append([b"x" * 30, {"a": 1}])
    topic.append([b"x" * 30, b"y"], tag=["a", "b"])
    topic.append([b"x" * 30, b"y"], meta={"k": 1})
    assert not stored(topic)
    topic.append([b"x" * 30, b"y"], tag="a", node="b")
    assert len(stored(topic)) == 1
    assert [record.tag for record in topic.read(0).records] == [None, None, "a", "b", None, None, "a", "a"]


@pytest.mark.usefixtures("small_block_limit")
def test_bytes_that_changed_in_the_wal_are_reported_and_stay_unreadable() -> None:
    """G34: what is read again from the disk is verified, by readers and by checkpoints. A checkpoint copies the frame
    as it is, so that all others are saved, and the segment gets no footer."""
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append([b"x" * 30, b"y"])
    piece = stored(topic)[0]
    world.disk.flip_bit(piece.file.path, piece.pos + 60, 1)
    with pytest.raises(Corrupt):
        topic.read(0)
    world.log.checkpoint()
    topic.append(b"z")
    topic.seal()
    world.log.checkpoint()
    assert not world.files(".foot")
    for log in (world.log, world.crash()):
        with pytest.raises(Corrupt):
            log.topic("t").read(0)
        assert [record.data for record in log.topic("t").read(2).records] == [b"z"]
        assert not log.health().ok


@pytest.mark.usefixtures("small_block_limit")
def test_adjacent_writes_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: count the reads of a table. A write of another topic between two, a mark of the synced position and a new
    file begin another one. The first write is synced, because it reserves seqs, so the second begins with a mark."""
    world = EngineHarness(wal_shards=1)
    topic, other = world.log.topic("t"), world.log.topic("u")
    wanted = [[b"%d" % number * 20, b"y"] for number in range(9)]
    for number, many in enumerate(wanted):
        topic.append(many)
        if number == 5:
            other.append(b"z")
    assert len(stored(topic)) == 9
    sizes, read = list[int](), WalRange.read

    def counted(piece: WalRange, lo: int, hi: int) -> bytes:
        sizes.append(hi - lo)
        return read(piece, lo, hi)

    monkeypatch.setattr(WalRange, "read", counted)
    assert topic.to_arrow()["data"].to_pylist() == [data for many in wanted for data in many]
    pieces = stored(topic)
    assert pieces[1].pos - pieces[0].pos - pieces[0].size == SYNC_MARK_BYTES
    assert sizes == [sum(len(piece) for piece in some) for some in (pieces[:1], pieces[1:6], pieces[6:])]


@pytest.mark.usefixtures("small_block_limit")
def test_a_reader_keeps_what_it_looks_at_when_the_wal_forgets_it() -> None:
    world = EngineHarness(wal_file_bytes=256)
    topic = world.log.topic("t")
    topic.append([b"x" * 30, b"y"])
    part = topic._state.index.parts[-1]
    look = part.reader(1, 3, 1 << 20)
    for _ in range(3):
        topic.append([b"z" * 90] * 3)
        world.log.checkpoint()
    assert len(look().rows) == 2


@pytest.mark.usefixtures("small_block_limit")
def test_a_disk_that_returns_nothing_is_reported() -> None:
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append([b"x" * 30, b"y"])
    piece = stored(topic)[0]
    with pytest.raises(Damaged, match="shorter"):
        replace(piece, pos=1 << 30).read(0, 1)


@pytest.mark.parametrize("durability", ["ephemeral", *LOGGED])
def test_the_newest_write_is_read_without_an_index(durability: str) -> None:
    """A watcher reads each write as it comes, and later, from the index, the same again."""
    random = Random(3)
    topic = EngineHarness().log.topic("t", durability=durability)
    seen: list[Record] = []
    for number in range(30):
        value: object = random.choice([b"\x00", {"n": number}, "x"])  # of one kind: else it is several frames
        many = [value] * random.choice((1, 1, 3))
        tag, node = random.choice([None, "t"]), random.choice([None, "n"])
        topic.append(many if len(many) > 1 else many[0], tag=tag, node=node)
        part = topic._state.index.parts[-1]
        assert isinstance(part, MemTable)
        listed = part._indexed_stop
        for from_seq in range(len(seen), topic.head_seq):
            assert [record.seq for record in topic.read(from_seq).records] == list(range(from_seq + 1, part.stop))
        assert part._indexed_stop == listed, "no index was made for it"
        assert topic.read(len(seen), 1).next_from_seq == len(seen) + 1
        seen += topic.read(len(seen)).records
        if number % 7 == 6:
            assert topic.read().records == seen
            assert part._indexed_stop == part.stop
    assert topic.read().records == seen


def test_what_was_deleted_or_is_of_a_node_is_left_out_of_the_newest_write_too() -> None:
    topic = EngineHarness().log.topic("t")
    topic.append([1, 2, 3], node=["a", "b", "a"])
    assert [record.data for record in topic.read(0, node="a").records] == [2]
    topic.delete(seqs=[2])
    assert [record.data for record in topic.read(0).records] == [1, 3]
    assert [record.data for record in topic.read(1).records] == [3]
