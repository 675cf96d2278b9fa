"""A full disk refuses new records, lets room be made from inside, and writing goes on by itself (docs/bugs.md)."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.errors import DiskFull
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.faults import Call

CLASSES = ["fsync", "disk", "memory"]
CODECS = ["tide", "rustlog", "laminar", "narwhal"]
USER, ROOM = "ann@example.org", "!room@example.org"
SMALL: dict[str, Any] = {"wal_file_bytes": 1 << 15, "segment_events_max": 40, "checkpoint_bytes": 1 << 40}


def opened(disk: SimDisk, shards: int = 1, clock: ManualClock | None = None) -> tidelog.Engine:
    return tidelog.open("data", disk=disk, clock=clock or ManualClock(), threads=False, wal_shards=shards, **SMALL)


def used(disk: SimDisk) -> int:
    return sum(map(len, disk.tree().values()))


def checked(error: DiskFull) -> DiskFull:
    assert error.written is False
    assert error.retryable
    return error


def fill(topic: tidelog.Topic, oracle: dict[int, bytes], size: int = 700, most: int = 2000) -> DiskFull:
    """Append until there is no room; every ack goes into the oracle."""
    for number in range(most):
        data = b"%d " % number + bytes(size)
        try:
            oracle[topic.append(data).first_seq] = data
        except DiskFull as error:
            return checked(error)
    raise AssertionError("the disk was never full")


def rows(log: tidelog.Engine, name: str) -> dict[int, bytes]:
    return {
        record.seq: record.data for record in log.topic(name, create=False).read(0, 1 << 20, bytes_max=1 << 30).records
    }


def settled(disk: SimDisk, log: tidelog.Engine, oracles: dict[str, dict[int, bytes]], shards: int) -> None:
    """The live engine, one that a kill leaves and one after a clean close show what was acked, and nothing else."""
    for name, oracle in oracles.items():
        assert rows(log, name) == oracle
    left = disk.reboot()
    left.capacity_bytes = None
    again = opened(left, shards)
    assert not again.report.damage
    for name, oracle in oracles.items():
        assert rows(again, name) == oracle
    log.close()
    for name, oracle in oracles.items():
        assert rows(opened(disk.reboot(), shards), name) == oracle


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2])
def test_deletes_and_checkpoints_make_room_on_a_full_disk(durability: str, shards: int) -> None:
    """Method: two topics; one fills the disk; half of it is deleted, two checkpoints let go of it, and it goes on."""
    disk = SimDisk()
    disk.capacity_bytes = 600_000
    log = opened(disk, shards)
    topic, other = log.topic("t", durability=durability), log.topic("u", durability=durability)
    oracles: dict[str, dict[int, bytes]] = {"t": {}, "u": {}}
    oracles["u"][other.append(b"before").first_seq] = b"before"
    for _ in range(4):
        fill(topic, oracles["t"])
        assert not any(shard.latched for shard in log.shards)
        middle = sorted(oracles["t"])[len(oracles["t"]) * 3 // 4]
        topic.delete(before_seq=middle)
        oracles["t"] = {seq: data for seq, data in oracles["t"].items() if seq >= middle}
        log.checkpoint()
        log.checkpoint()
        oracles["u"][other.append(b"again").first_seq] = b"again"
        for _ in range(5):
            seq = topic.append(b"more").first_seq
            oracles["t"][seq] = b"more"
    settled(disk, log, oracles, shards)


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_drop_makes_room_on_a_full_disk(durability: str, shards: int) -> None:
    disk = SimDisk()
    disk.capacity_bytes = 600_000
    log = opened(disk, shards)
    oracles: dict[str, dict[int, bytes]] = {"keep": {}, "drop": {}}
    for name in ("drop", "keep"):
        topic = log.topic(name, durability=durability)
        for _ in range(100):
            oracles[name][topic.append(bytes(700)).first_seq] = bytes(700)
        log.checkpoint()
    fill(log.topic("keep"), oracles["keep"])
    assert log.drop("drop")
    del oracles["drop"]
    log.checkpoint()
    log.checkpoint()
    oracles["keep"][log.topic("keep").append(b"more").first_seq] = b"more"
    settled(disk, log, oracles, shards)


def test_acks_claims_groups_and_floors_go_on_while_records_are_refused() -> None:
    disk, clock = SimDisk(), ManualClock()
    disk.capacity_bytes = 500_000
    log = opened(disk, clock=clock)
    queue = log.queue("q", durability="fsync", leases_durable=True)
    queue.put([{"n": number} for number in range(50)])
    old = log.topic("old", durability="fsync", ttl_ms=1000)
    old.append(b"soon gone")
    oracle: dict[int, bytes] = {}
    topic = log.topic("t", durability="fsync")
    fill(topic, oracle)
    for _ in range(20):
        with pytest.raises(DiskFull):
            topic.append(bytes(9000))
        job = queue.claim("me", 1)
        assert queue.ack("me", job).count == 1
        topic.group("g").commit(min(oracle))
    clock.tick(10_000)
    assert old.count == 0
    assert topic.group("g").position == min(oracle)
    assert queue.counts().ready == 30
    disk.capacity_bytes = None
    oracle[topic.append(b"more").first_seq] = b"more"
    settled(disk, log, {"t": oracle, "old": {}}, 1)


def test_room_that_is_made_outside_is_used_without_a_restart() -> None:
    disk = SimDisk()
    disk.capacity_bytes = 400_000
    log = opened(disk)
    topic, oracle = log.topic("t", durability="fsync"), dict[int, bytes]()
    for _ in range(5):
        fill(topic, oracle)
        disk.capacity_bytes += 200_000
    assert len(log.shards) == 1
    assert not log.shards[0].latched
    settled(disk, log, {"t": oracle}, 1)


def test_a_full_disk_is_opened_with_the_reserve_and_room_is_made() -> None:
    disk = SimDisk()
    disk.capacity_bytes = 2_000_000
    log = opened(disk)
    topic, oracle = log.topic("t", durability="fsync"), dict[int, bytes]()
    fill(topic, oracle)
    disk = disk.reboot()
    disk.capacity_bytes = used(disk)  # another program took the rest
    log = opened(disk)
    assert rows(log, "t") == oracle
    disk.capacity_bytes = used(disk) + 60_000  # and most of what recovery gave back
    with pytest.raises(DiskFull):
        log.topic("t").append(bytes(100_000))
    log.topic("t").delete(before_seq=max(oracle))
    oracle = {max(oracle): oracle[max(oracle)]}
    for _ in range(2):
        log.checkpoint()
    oracle[log.topic("t").append(b"more").first_seq] = b"more"
    settled(disk, log, {"t": oracle}, 1)


@pytest.mark.parametrize("call", ["write", "create", "reserve", "rename", "mkdir"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("durability", "shards"), [("fsync", 1), ("disk", 2), ("memory", 1)])
def test_no_room_at_any_call_latches_nothing(call: Call, error: int, durability: str, shards: int) -> None:
    """Method: a history of appends, deletes, configures, drops, seals and checkpoints by chance; every so many calls of
    one kind fail; what raised is DiskFull and was not done; at the end all is as the oracle has it."""
    random = Random(f"{call} {error} {durability} {shards}")
    disk = SimDisk()
    log = opened(disk, shards)
    oracles: dict[str, dict[int, bytes]] = {"a": {}, "b": {}}
    for name in oracles:
        log.topic(name, durability=durability)
    refused = 0
    for number in range(250):
        name = random.choice(sorted(oracles))
        topic, oracle = log.topic(name), oracles[name]
        disk.heal()
        if random.random() < 0.4:
            disk.fail(call, random.randint(1, 3), error, random.choice((1, None)), partial=random.choice((0, 30)))
        try:
            match random.randint(0, 9):
                case 0:
                    if oracle:
                        seq = random.choice(sorted(oracle))
                        topic.delete(seqs=[seq])
                        del oracle[seq]
                case 1:
                    log.checkpoint()
                case 2:
                    topic.seal()
                case 3:
                    log.topic(name, idempotency_window_ms=number + 1)
                case 4:
                    log.drop("c") or log.topic("c", durability=durability)
                case 5:
                    log.tick()
                case _:
                    data = b"%d " % number + bytes(random.choice((10, 900, 9000)))
                    oracle[topic.append(data).first_seq] = data
        except DiskFull as full:
            checked(full)
            refused += 1
        assert not any(shard.latched for shard in log.shards), f"step {number}"
    disk.heal()
    assert refused or call != "write"
    for name, oracle in oracles.items():
        oracle[log.topic(name).append(b"last").first_seq] = b"last"
    log.checkpoint()
    settled(disk, log, oracles, shards)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sync", ["batch", "interval"])
def test_a_full_disk_refuses_appends_of_a_segmented_log_until_there_is_room(codec: str, sync: str) -> None:
    disk = SimDisk()
    disk.capacity_bytes = 40_000
    log = SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), sync=sync, segment_bytes_max=1 << 13)
    oracle: dict[int, bytes] = {}
    for _ in range(4):
        refused = 0
        for number in range(400):
            data = b"%d " % number + bytes(number % 500)
            try:
                oracle[log.append(data)] = data
            except DiskFull as error:
                checked(error)
                refused += 1
        assert refused
        disk.capacity_bytes += 10_000  # a drop saves the manifest first, which takes a few KiB
        log.drop_below(max(oracle))
        oracle = {seq: data for seq, data in oracle.items() if seq >= log.lowest}
    assert {record.seq: record.data for record in log} == oracle
    log.close()
    with SegmentedLog.open("log", disk=disk.reboot(), clock=ManualClock()) as again:
        assert {record.seq: record.data for record in again} == oracle


def test_a_full_disk_refuses_messages_of_a_channel_until_there_is_room() -> None:
    disk = SimDisk()
    log = opened(disk)
    room = log.channel(ROOM, user=USER).join(persist=True, message_flush_interval=0, max_persist_messages=1000)
    published: dict[int, bytes] = {}
    for _ in range(3):
        disk.capacity_bytes = used(disk) + 20_000
        refused = 0
        for number in range(200):
            payload = b"%d " % number + bytes(400)
            try:
                published[room.publish(payload).seq] = payload
            except DiskFull as error:
                checked(error)
                refused += 1
        assert refused
        disk.capacity_bytes = used(disk)
        bob = log.channel(ROOM, user="bob@example.org")
        with pytest.raises(DiskFull):
            bob.join()
        disk.capacity_bytes = None
        published[room.publish(b"room").seq] = b"room"
    messages = room.history(newest=1000).messages
    assert {m.seq: m.payload for m in messages} == {seq: published[seq] for seq in sorted(published)[-len(messages) :]}
    log.close()


# ── a real file system ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 32 MiB; None without the right to mount one: the simulated disk above stands in for it."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    yield None if done.returncode else place
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def tried(work: Callable[[], object]) -> bool:
    try:
        work()
    except DiskFull:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_real_file_system_that_is_full_and_is_freed_from_inside_and_outside(
    small: Path | None, durability: str, shards: int
) -> None:
    if small is None:
        return
    path = str(small / "data")
    filler = small / "filler"
    oracle: dict[int, bytes] = {}
    with tidelog.open(path, wal_shards=shards) as log:
        topic = log.topic("t", durability=durability)
        for spin in range(3):
            while True:
                data = [b"%d " % spin + os.urandom(1000) for _ in range(50)]
                try:
                    done = topic.append(data)
                except DiskFull as error:
                    checked(error)
                    break
                oracle.update(zip(range(done.first_seq, done.last_seq + 1), data, strict=True))
            with filler.open("wb") as file:
                while tried_write(file.fileno()):
                    pass
            assert not any(shard.latched for shard in log.shards)
            middle = sorted(oracle)[len(oracle) // 2]
            topic.delete(before_seq=middle)
            oracle = {seq: data for seq, data in oracle.items() if seq >= middle}
            filler.unlink()
            topic.delete(before_seq=max(oracle))
            oracle = {max(oracle): oracle[max(oracle)]}
            for _ in range(4):
                tried(log.checkpoint)
            oracle[topic.append([b"after"]).first_seq] = b"after"
        assert rows(log, "t") == oracle
    with tidelog.open(path, wal_shards=shards) as log:
        assert not log.report.damage
        assert rows(log, "t") == oracle


def tried_write(descriptor: int) -> bool:
    try:
        return os.write(descriptor, bytes(1 << 16)) > 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_segmented_log_on_a_real_file_system_that_is_full(small: Path | None, codec: str) -> None:
    if small is None:
        return
    oracle: dict[int, bytes] = {}
    with SegmentedLog.open(str(small / "log"), codec, sync="batch", segment_bytes_max=1 << 20) as log:
        for _ in range(2):
            try:
                while True:
                    data = os.urandom(60_000)
                    oracle[log.append(data)] = data
            except DiskFull as error:
                checked(error)
            log.drop_below(max(oracle) - 50)
            oracle = {seq: data for seq, data in oracle.items() if seq >= log.lowest}
            oracle[log.append(b"after")] = b"after"
        assert {record.seq: record.data for record in log} == oracle
    with SegmentedLog.open(str(small / "log")) as again:
        assert {record.seq: record.data for record in again} == oracle


def test_every_error_of_a_full_disk_says_that_nothing_was_written() -> None:
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("t", durability="fsync")
    disk.capacity_bytes = used(disk)
    error = fill(topic, {}, 3000)
    assert "nothing was written" in str(error)
