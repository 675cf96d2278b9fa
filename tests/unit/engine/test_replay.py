"""Replay of the WAL: what a new process makes of frames is what the process that wrote them had (G41, G49, G69)."""

from __future__ import annotations

import errno
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import (
    LOGGED,
    PATH,
    RESTARTS,
    TINY,
    EngineHarness,
    Restart,
    TopicContents,
    datas,
    read_topic,
    seqs,
)

from tidelog.engine import Engine, manifest, recovery, retention
from tidelog.engine.topic import topic_operations
from tidelog.engine.topic_state import RESERVATION_MAX
from tidelog.errors import Damaged, Error
from tidelog.formats import frame
from tidelog.testing import SimDisk
from tidelog.wal import paths as names


def everything(log: Engine) -> dict[str, TopicContents]:
    return {state.topic: read_topic(log.topic(state.topic)) for state in log.topics()}


def segment_files(disk: SimDisk) -> dict[str, bytes]:
    return {path: content for path, content in disk.tree().items() if path.startswith(f"{PATH}/topics/")}


# ── segments ──────────────────────────────────────────────────────────────────────────────────────

LIMITS: dict[str, dict[str, Any]] = {
    "records": {"segment_events_max": 5, "segment_bytes_max": 1 << 20},
    "bytes": {"segment_events_max": 1 << 20, "segment_bytes_max": 700},
    "both": TINY,
}


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", range(4))
def test_replayed_records_fill_segments_as_written_ones_do(
    seed: int, limit: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: batches of random sizes of two topics in turns; a checkpoint of the engine that wrote them and one of an
    engine that replayed them make the same files and rows, with replayed records in memory or in the WAL."""
    random = Random(seed)
    world = EngineHarness(**{"wal_file_bytes": 1 << 14, **LIMITS[limit]})
    topics = [world.log.topic(name, durability="fsync") for name in "ab"]
    for number in range(40):
        batch = [b"%d" % number * random.randint(1, 30) for _ in range(random.choice((1, 1, 2, 4)))]
        random.choice(topics).append(batch, tag=random.choice((None, "t")))
        world.clock.tick(random.randint(0, 2))
        if number % 13 == 12:
            random.choice(topics).delete(seqs=[1])
    other = world.disk.reboot()
    world.log.checkpoint()
    if where == "file":
        for name, value in (("REPLAY_MEMORY_BYTES", 0), ("_WAL_RANGE_BYTES_MIN", 0), ("_PIECE_BYTES", 256)):
            monkeypatch.setattr(recovery, name, value)
    world.open(other).checkpoint()
    assert len(segment_files(world.disk)) > 20
    assert segment_files(other) == segment_files(world.disk)
    assert manifest.load_newest(other, PATH).manifest.topics == manifest.load_newest(world.disk, PATH).manifest.topics


@pytest.mark.parametrize("sizes", [(10, 500, 10), (500, 10, 500), (10, 10, 500), (500,)], ids=str)
def test_records_that_stay_in_the_wal_are_read_in_pieces_of_any_division(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece ends inside of the first record, after it, or never."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    for size in sizes:
        topic.append(bytes(size))
        world.log.topic("between", durability="fsync").append(0)
    for name, value in (("REPLAY_MEMORY_BYTES", 0), ("_WAL_RANGE_BYTES_MIN", 0), ("_PIECE_BYTES", 256)):
        monkeypatch.setattr(recovery, name, value)
    assert datas(world.restart("kill").topic("a")) == [bytes(size) for size in sizes]


def test_replayed_records_stay_in_memory_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond stays in the WAL. Method: after the start the WAL cannot be read."""
    monkeypatch.setattr(recovery, "REPLAY_MEMORY_BYTES", 20_000)
    world = EngineHarness()
    topics = [world.log.topic(name, durability="fsync") for name in "ab"]
    for topic in topics:
        for _ in range(15):
            topic.append(bytes(1_000))
    log = world.restart("kill")
    world.disk.fail("read", error=errno.EIO, path="/wal", times=None)
    assert len(seqs(log.topic("a"))) == 15
    with pytest.raises(Error):
        log.topic("b").read(0, 100)
    world.disk.clear_faults()
    assert len(seqs(log.topic("b"))) == 15


# ── shards ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("filled", [False, True], ids=["one file", "several files"])
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("shards", [(1, 2), (2, 1), (3, 2)], ids=str)
def test_a_power_cut_while_the_number_of_shards_changes_loses_nothing(
    shards: tuple[int, int], snapshot: bool, filled: bool
) -> None:
    """Method: a directory with or without a snapshot is opened with another number of shards; the power fails before
    each operation of that; the next start, with the first number, the second or a third one, finds everything."""
    world = EngineHarness(**TINY, wal_shards=shards[0])
    for number in range(4):
        world.log.topic(f"t{number}", durability="fsync").append([bytes(300)] * (6 if filled else 1))
        if snapshot:
            world.log.checkpoint()
    before = everything(world.log)
    if filled and not snapshot:
        assert all(len(names.list_file_numbers(world.disk, shard.directory)) > 1 for shard in world.log.shards)
    disk = world.disk.reboot()
    images: list[SimDisk] = []
    disk.on_op = lambda _: images.append(disk.crash_image("all" if len(images) % 2 else "none"))
    assert everything(world.open(disk, wal_shards=shards[1])) == before
    disk.on_op = None
    for number, image in enumerate((*images, disk)):
        log = world.open(image.reboot(), wal_shards=(*shards, 4)[number % 3])
        assert everything(log) == before, f"before operation {number}"
        assert log.report.damage == []


@pytest.mark.parametrize("shards", [(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b], ids=str)
def test_shards_that_were_added_later_are_not_taken_for_the_whole_wal(shards: tuple[int, int]) -> None:
    """No snapshot reads: the start is refused unless the WAL still has everything."""
    world = EngineHarness(wal_shards=shards[0])
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2, 3])
    for _ in range(3):
        world.log.checkpoint()
    log = world.restart("kill", wal_shards=shards[1])
    for number in range(6):
        log.topic(f"t{number}", durability="fsync").append(1)
    log.topic("a").append(4)
    before, disk = everything(log), world.disk.reboot()
    for path in world.files(".bin", "meta"):
        disk.write_file(path, b"no snapshot")
    refused = True
    with suppress(Damaged):
        assert everything(world.open(disk)) == before
        refused = False
    assert refused == (shards != (2, 3)), "with one more shard those before it keep their files"


# ── floors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("durability", LOGGED)
def test_a_floor_that_replay_found_is_not_written_again(durability: str, kept: int) -> None:
    """All records but a few expired and a reader was shown that: after a kill the floor is known to be durable."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability, ttl_ms=1_000)
    topic.append([1, 2, 3])
    world.clock.tick(900)
    if kept:
        topic.append([4] * kept)
    world.clock.tick(200)
    assert len(seqs(topic)) == kept
    world.log.shards[0].sync()
    log = world.restart("kill")
    position = log.shards[0].position()
    assert len(seqs(log.topic("a"))) == kept
    assert log.topic("a").evict_floor == 4
    retention.persist_floors([log.topic("a")._state])  # as a checkpoint does
    assert log.shards[0].position() == position, "nothing was written"


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("restart", RESTARTS)
def test_idempotency_keys_are_replayed(restart: Restart) -> None:
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append("plain")
    written = {key: topic.append([key] * count, key=key) for count, key in enumerate(("one", "two", "three"), 1)}
    topic.append("plain")
    log = world.restart(restart)
    for key, done in written.items():
        again = log.topic("a").append("again", key=key)
        assert (again.deduped, again.first_seq, again.last_seq) == (True, done.first_seq, done.last_seq)
    assert not log.topic("a").append("other", key="four").deduped


# ── losses ────────────────────────────────────────────────────────────────────────────────────────


def flip(disk: SimDisk, content: bytes) -> None:
    """Turn one bit over in the one WAL frame that has these bytes."""
    path = next(path for path, data in disk.tree().items() if path.endswith(".log") and content in data)
    disk.flip_bit(path, disk.read_file(path).index(content), 1)


@pytest.mark.parametrize("lost", [("a", 2), ("a", 3), ("b", 2)], ids=str)
def test_only_seqs_that_were_lost_are_reported(lost: tuple[str, int]) -> None:
    """A frame of one topic is damaged; frames of both follow it."""
    world = EngineHarness()
    for number in range(1, 7):
        for name in "ab":
            world.log.topic(name, durability="fsync").append(b"record %s %d" % (name.encode(), number))
    name, seq = lost
    disk = world.disk.reboot()
    flip(disk, b"record %s %d" % (name.encode(), seq))
    log = world.open(disk, accept_loss=True)
    assert log.report.lost_seqs == {name: [(seq, seq)]}
    for each in "ab":
        assert seqs(log.topic(each)) == [number for number in range(1, 7) if (each, number) != lost]
        assert log.topic(each).append(b"next").first_seq == 7, "records after the loss prove which seqs were given"


def test_a_lost_reservation_of_seqs_counts_whatever_is_lost_after_it() -> None:
    """The frame that reserves seqs of class `disk` is damaged, and one of another topic after it."""
    world = EngineHarness(head_reserve=4)
    other = world.log.topic("other", durability="fsync")
    world.log.topic("a", durability="disk").append(1)
    other.append(b"to be lost")
    other.append(b"kept")
    disk = world.disk.reboot()
    path = world.files(".log", "wal")[0]
    content, at, reservations = disk.read_file(path), 0, list[int]()
    while (size := int.from_bytes(content[at : at + 4], "little")) > 0:
        if content[at + 4] == frame.HEAD_WATERMARK:
            reservations.append(at + size - 8)
        at += size + 4
    disk.flip_bit(path, reservations[-1], 1)
    flip(disk, b"to be lost")
    assert world.open(disk, accept_loss=True).topic("a").append(2).first_seq > RESERVATION_MAX


def test_seqs_that_a_restart_skipped_are_not_lost() -> None:
    """A kill leaves reserved seqs of class `disk` unused; the records after them do not follow those before."""
    world = EngineHarness(head_reserve=4)
    world.log.topic("a", durability="disk").append([1, 2])
    for _ in range(3):
        log = world.restart("kill")
        assert log.report.lost_seqs == {}
        assert log.report.damage == []
        log.topic("a").append([3, 4])
    found = seqs(world.log.topic("a"))
    assert found[-1] > len(found)


@pytest.mark.parametrize("restart", ["kill", "crash"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_dropped_topic_is_in_the_ledger_with_all_that_it_had(restart: Any, checkpointed: bool) -> None:
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append([b"one", b"two", b"three"])
    if checkpointed:
        world.log.checkpoint()
    topic.append([b"four", b"fifth"])
    topic.append(b"6")
    size = topic.bytes
    world.log.drop("a")
    rows = [
        (row.topic, row.cause, row.first, row.last, row.records, row.bytes) for row in world.restart(restart).gaps()
    ]
    assert rows == [("a", "drop", 1, 6, 6, size)]


# ── files that are missing ────────────────────────────────────────────────────────────────────────


def lose(disk: SimDisk, paths: list[str]) -> None:
    for path in paths:
        disk.remove(path)
        disk.sync_dir(path.rpartition("/")[0])


def test_lost_data_of_a_segment_is_in_health() -> None:
    world = EngineHarness()
    for name in "ab":
        world.log.topic(name, durability="fsync").append([1, 2, 3])
    world.log.checkpoint()
    disk, place = world.disk.reboot(), f"topics/{world.log.topic('b').id:08X}/"
    lose(disk, world.files(".data", place))
    log = world.open(disk)
    assert [found.topic for found in log.health().corrupt] == ["b"]
    assert place in log.report.damage[0]


def test_files_that_a_drop_removed_are_not_missing() -> None:
    """The newest snapshot still names them."""
    world = EngineHarness()
    for name in "ab":
        world.log.topic(name, durability="fsync").append([1, 2, 3])
    world.log.checkpoint()
    world.log.drop("b")
    world.log.tick()
    assert len(world.files(".data")) == 1
    log = world.restart("kill")
    assert log.health().ok
    assert log.report.damage == []


@pytest.mark.parametrize("shards", [1, 2])
def test_a_wal_without_files_is_damage_and_its_numbers_are_not_used_again(shards: int) -> None:
    """All files of a shard are gone, also what says which there were; the snapshot names the first one."""
    world = EngineHarness(wal_shards=shards)
    for number in range(4):
        world.log.topic(f"t{number}", durability="fsync").append(number)
    for _ in range(2):
        world.log.checkpoint()
    disk, place = world.disk.reboot(), world.log.shards[0].directory
    gone = names.list_file_numbers(disk, place)
    lose(disk, [path for path in disk.tree() if path.rpartition("/")[0] == place])
    reader = world.open(disk.reboot(), read_only=True)
    assert reader.report.lost
    assert any(names.file_name(gone[-1]) in said for said in reader.report.damage), reader.report.damage
    log = world.open(disk, accept_loss=True)
    log.topic("more", durability="fsync").append(1)
    assert min(names.list_file_numbers(disk, place)) > max(gone)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_file_that_replay_begins_in_is_named_where_it_is_missing(shards: int) -> None:
    """Later files are there: what they hold is replayed."""
    world = EngineHarness(**TINY, wal_shards=shards)
    topic = world.log.topic("a", durability="fsync")
    topic.append([bytes(100)] * 4)
    world.log.checkpoint()
    place = topic_operations(topic).shard.directory
    first = names.list_file_numbers(world.disk, place)[-1]
    while names.list_file_numbers(world.disk, place)[-1] < first + 3:
        topic.append(bytes(300))
    disk = world.disk.reboot()
    lose(disk, [names.file_path(place, first)])
    log = world.open(disk, read_only=True)
    assert log.report.lost
    expected = f"{place.rpartition('/')[2]}/{names.file_name(first)} is missing, replay begins in it"
    assert expected in log.report.damage
    found = seqs(log.topic("a"))
    assert found[:4] == [1, 2, 3, 4]
    assert found[-1] == topic.head_seq
