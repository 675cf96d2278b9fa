"""A full disk refuses new records, lets room be made from inside, and writing goes on by itself (docs/bugs.md)."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.small_disk import mounted_small_disk, take_all

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.database import engine_of
from tidelog.engine import background
from tidelog.engine.config import Durability
from tidelog.errors import DiskFull
from tidelog.testing import ManualClock, PowerOff, SimDisk
from tidelog.testing.machine import DiskCall

CLASSES = ["fsync", "disk", "memory"]
CODECS = ["tide", "rustlog", "laminar", "narwhal"]
USER, ROOM = "ann@example.org", "!room@example.org"
SMALL: dict[str, Any] = {"wal_file_bytes": 1 << 15, "segment_events_max": 40, "checkpoint_bytes": 1 << 40}


def opened(disk: SimDisk, shards: int = 1, clock: ManualClock | None = None) -> tidelog.Database:
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


def rows(log: tidelog.Database, name: str) -> dict[int, bytes]:
    return {
        record.seq: record.data for record in log.topic(name, create=False).read(0, 1 << 20, bytes_max=1 << 30).records
    }


def settled(disk: SimDisk, log: tidelog.Database, oracles: dict[str, dict[int, bytes]], shards: int) -> None:
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
def test_deletes_and_checkpoints_free_space_on_a_full_disk(durability: Durability, shards: int) -> None:
    """Method: two topics; one fills the disk; half of it is deleted, two checkpoints let go of it, and it goes on."""
    disk = SimDisk()
    disk.capacity_bytes = 600_000
    log = opened(disk, shards)
    topic, other = log.topic("t", durability=durability), log.topic("u", durability=durability)
    oracles: dict[str, dict[int, bytes]] = {"t": {}, "u": {}}
    oracles["u"][other.append(b"before").first_seq] = b"before"
    for _ in range(4):
        fill(topic, oracles["t"])
        assert not any(shard.is_latched for shard in engine_of(log).shards)
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
def test_drop_frees_space_on_a_full_disk(durability: Durability, shards: int) -> None:
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


def test_space_freed_outside_is_used_without_a_restart() -> None:
    disk = SimDisk()
    disk.capacity_bytes = 400_000
    log = opened(disk)
    topic, oracle = log.topic("t", durability="fsync"), dict[int, bytes]()
    for _ in range(5):
        fill(topic, oracle)
        disk.capacity_bytes += 200_000
    assert len(engine_of(log).shards) == 1
    assert not engine_of(log).shards[0].is_latched
    settled(disk, log, {"t": oracle}, 1)


def test_full_disk_is_opened_with_the_reserve_and_space_is_freed() -> None:
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
def test_no_space_at_any_call_latches_nothing(call: DiskCall, error: int, durability: Durability, shards: int) -> None:
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
        disk.clear_faults()
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
        assert not any(shard.is_latched for shard in engine_of(log).shards), f"step {number}"
    disk.clear_faults()
    assert refused or call != "write"
    for name, oracle in oracles.items():
        oracle[log.topic(name).append(b"last").first_seq] = b"last"
    log.checkpoint()
    settled(disk, log, oracles, shards)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sync", ["batch", "interval"])
def test_full_disk_refuses_appends_of_a_segmented_log_until_there_is_space(codec: str, sync: str) -> None:
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


def test_full_disk_refuses_messages_of_a_channel_until_there_is_space() -> None:
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
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_small_disk(tmp_path) as place:
        yield place


def tried(work: Callable[[], object]) -> bool:
    try:
        work()
    except DiskFull:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("segment_events_max", [60, 1 << 20])
def test_a_real_file_system_that_is_full_is_freed_from_inside_and_outside(
    small_disk: Path, durability: Durability, shards: int, segment_events_max: int
) -> None:
    """Method: records until there is no room, then another program takes the rest. Every kind of operation is tried
    with 0 bytes free: what adds is refused, what makes room is done. What was deleted comes free with the filler in
    place, and writing goes on. The second time the filler goes first."""
    path, name = str(small_disk / "data"), "t"
    oracle: dict[int, bytes] = {}
    with tidelog.open(path, wal_shards=shards, segment_events_max=segment_events_max) as log:
        queue = log.queue("q", durability="fsync")
        queue.put([{"n": number} for number in range(20)])
        old = log.topic("old", durability=durability)
        old.append([b"old"] * 100)
        for spin in range(3):
            topic = log.topic(name, durability=durability)
            while True:
                data = [b"%d " % spin + os.urandom(1000) for _ in range(50)]
                try:
                    done = topic.append(data)
                except DiskFull as error:
                    checked(error)
                    break
                oracle.update(zip(range(done.first_seq, done.last_seq + 1), data, strict=True))
            take_all(small_disk)
            with pytest.raises(DiskFull) as found:
                topic.append(bytes(100_000))
            checked(found.value)
            assert queue.ack("me", queue.claim("me", 1)).count == 1
            topic.group("g").commit(max(oracle))
            log.topic("old", cap_records=50 - spin)
            assert old.count == 50 - spin
            assert not any(shard.is_latched for shard in engine_of(log).shards)
            middle = sorted(oracle)[len(oracle) // 2]
            topic.delete(before_seq=middle)
            oracle = {seq: data for seq, data in oracle.items() if seq >= middle}
            assert rows(log, name) == oracle
            tried(log.checkpoint)
            if spin == 1:
                (small_disk / "filler").unlink()
            topic.delete(before_seq=max(oracle) + 1)
            oracle = {}
            for _ in range(4):
                tried(log.checkpoint)
            oracle[topic.append([b"after"]).first_seq] = b"after"
            assert rows(log, name) == oracle
    with tidelog.open(path, wal_shards=shards) as log:
        assert not log.report.damage
        assert rows(log, name) == oracle
        assert log.queue("q").counts().ready == 17


@pytest.mark.slow
def test_a_drop_on_a_real_file_system_without_a_free_byte(small_disk: Path) -> None:
    with tidelog.open(str(small_disk / "data")) as log:
        topic = log.topic("t", durability="fsync")
        kept = {log.topic("keep", durability="fsync").append(b"kept").first_seq: b"kept"}
        while tried(lambda: topic.append([os.urandom(1000)] * 50)):
            pass
        take_all(small_disk)
        assert log.drop("t")
        for _ in range(4):
            tried(log.checkpoint)
            log.tick()
        kept[log.topic("keep").append(b"after").first_seq] = b"after"
        assert rows(log, "keep") == kept


KILLED = """
import os, signal, sys
import tidelog
from tidelog.errors import DiskFull
log = tidelog.open(sys.argv[1], wal_shards=int(sys.argv[2]))
topic = log.topic("t", durability="fsync")
try:
    while True:
        data = [b"%d " % number + bytes(1000) for number in range(50)]
        print(topic.append(data).last_seq, flush=True)
except DiskFull:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("reserve", [True, False], ids=["with its reserve", "without a reserve"])
def test_a_data_directory_opens_with_0_bytes_free(small_disk: Path, shards: int, reserve: bool) -> None:
    """Method: a process that met a full disk is killed; another program takes every byte. What is there is read,
    records are refused, deletes are done in the reserve or, where there is none, once a little room is free; writing
    goes on without a restart."""
    path = small_disk / "data"
    done = processes.run(
        [sys.executable, "-c", KILLED, str(path), str(shards)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    last = int(done.stdout.split()[-1])
    if not reserve:
        tried(tidelog.open(str(path), wal_shards=shards).close)  # nothing of the WAL is left that could be cut
        (path / "wal" / "RESERVE").unlink(missing_ok=True)
    take_all(small_disk)
    with tidelog.open(str(path), wal_shards=shards) as log:
        take_all(small_disk)
        topic = log.topic("t")
        assert not log.report.damage
        assert (topic.head_seq, topic.count) == (last, last)
        assert len(rows(log, "t")) == last
        with pytest.raises(DiskFull) as found:
            topic.append([bytes(1 << 20)] * 3)
        checked(found.value)
        if reserve:
            assert topic.delete(before_seq=last + 1).deleted == last
            for _ in range(4):
                tried(log.checkpoint)
        else:
            tried(lambda: topic.delete(before_seq=last + 1))  # in a page that recovery has freed, if there is one
            (small_disk / "filler").unlink()
            topic.delete(before_seq=last + 1)
        assert topic.count == 0
        seq = topic.append(b"after").first_seq
        assert seq > last
        assert rows(log, "t") == {seq: b"after"}
    with tidelog.open(str(path), wal_shards=shards) as log:
        assert not log.report.damage
        assert rows(log, "t") == {seq: b"after"}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_segmented_log_on_a_real_file_system_that_is_full(small_disk: Path, codec: str) -> None:
    oracle: dict[int, bytes] = {}
    with SegmentedLog.open(str(small_disk / "log"), codec, sync="batch", segment_bytes_max=1 << 20) as log:
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
    with SegmentedLog.open(str(small_disk / "log")) as again:
        assert {record.seq: record.data for record in again} == oracle


def test_every_error_of_a_full_disk_says_that_nothing_was_written() -> None:
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("t", durability="fsync")
    disk.capacity_bytes = used(disk)
    error = fill(topic, {}, 3000)
    assert "nothing was written" in str(error)


# ── a checkpoint without copies ───────────────────────────────────────────────────────────────────


def crowded(disk: SimDisk, shards: int) -> tuple[tidelog.Database, dict[str, dict[int, bytes]]]:
    """Topics with sealed segments, more in the WAL than there is room to copy, and a part of it all deleted."""
    log = opened(disk, shards)
    oracles: dict[str, dict[int, bytes]] = {"a": {}, "b": {}}
    for part in range(2):
        for name, oracle in oracles.items():
            topic = log.topic(name, durability="fsync", cap_records=500)
            for number in range(90):
                data = b"%s %d %d " % (name.encode(), part, number) + bytes(200)
                oracle[topic.append(data).first_seq] = data
        if not part:
            log.checkpoint()
    log.queue("q", durability="fsync").put([{"n": 1}])
    disk.capacity_bytes = used(disk) + 8_000  # for three deltas of the manifest, which stay until there are two bases
    for name, oracle in oracles.items():
        log.topic(name).delete(before_seq=60)
        log.topic(name).delete(seqs=[65, 130])
        oracles[name] = {seq: data for seq, data in oracle.items() if seq >= 60 and seq not in (65, 130)}
    log.topic("b", cap_records=100)
    oracles["b"] = dict(sorted(oracles["b"].items())[-100:])
    return log, oracles


@pytest.mark.parametrize("shards", [1, 2])
def test_empty_segments_are_removed_without_space_for_copies(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    real, copied, sizes = background.CheckpointScheduler._run, list[bool](), list[int]()

    def noting(self: background.CheckpointScheduler, *, final: bool, copy: bool = True) -> Any:
        copied.append(copy)
        try:
            return real(self, final=final, copy=copy)
        finally:
            sizes.append(used(disk))

    monkeypatch.setattr(background.CheckpointScheduler, "_run", noting)
    log, oracles = crowded(disk, shards)
    before = used(disk)
    first = [path for path in disk.tree() if path.endswith("seg-0000000000000001.data") and "/0000000" in path]
    assert len(first) >= 2
    copied.clear()
    sizes.clear()
    tried(log.checkpoint)
    assert copied[:3] == [True, False, False]
    assert len([path for path in first if disk.stat(path)]) <= len(first) - 2
    assert sizes[2] < min(before, sizes[0])  # two manifests took less than what they let go of; copies follow
    for name, oracle in oracles.items():
        assert rows(log, name) == oracle
    left = disk.reboot()
    left.capacity_bytes = None
    again = opened(left, shards)
    assert not again.report.damage, again.report.lines()
    for name, oracle in oracles.items():
        assert rows(again, name) == oracle
        assert next(state for state in again.topics() if state.topic == name).count == len(oracle)
    assert again.queue("q").counts().ready == 1
    disk.capacity_bytes = None
    log.checkpoint()
    settled(disk, log, oracles, shards)


@pytest.mark.parametrize(
    ("step", "shards"),
    [(23, 1), (29, 2), pytest.param(1, 1, marks=pytest.mark.sweep), pytest.param(1, 2, marks=pytest.mark.sweep)],
)
@pytest.mark.slow
def test_power_cut_in_a_checkpoint_without_space_loses_nothing(step: int, shards: int) -> None:
    """Method: the power is cut before every operation of a checkpoint that finds no room, takes back its copies and
    goes on without them; what a restart finds, and what it is after its own checkpoint, is as the oracle has it."""
    states = number = 0
    while True:
        number += step
        disk = SimDisk()
        log, oracles = crowded(disk, shards)
        disk.cut_power_at(number)
        try:
            tried(log.checkpoint)
        except PowerOff:
            pass
        else:
            break
        for image in disk.images(limit=3):
            states += 1
            left = image.disk
            left.capacity_bytes = None
            again = opened(left, shards)
            assert not again.report.damage, f"{number}, {image.label}: {again.report.lines()}"
            for name, oracle in oracles.items():
                assert rows(again, name) == oracle, f"{number}, {image.label}: {name}"
            again.checkpoint()
            last = opened(left.reboot(), shards)
            assert {name: rows(last, name) for name in oracles} == oracles, f"{number}, {image.label}"
    assert number > 50
    assert states > 50 // step


def test_a_directory_opens_without_a_free_byte_and_without_a_reserve() -> None:
    """Method: deletes are done as soon as there is room for their frames, records when there is a reserve again."""
    disk = SimDisk()
    disk.capacity_bytes = 2_000_000
    log = opened(disk)
    topic, oracle = log.topic("t", durability="fsync"), dict[int, bytes]()
    fill(topic, oracle)
    log.close()
    disk = disk.reboot()
    disk.remove("data/wal/RESERVE")
    disk.capacity_bytes = used(disk)
    log = opened(disk)
    disk.capacity_bytes = used(disk)
    topic = log.topic("t")
    assert rows(log, "t") == oracle
    for refused in (lambda: topic.append(b"no"), lambda: topic.delete(before_seq=5), lambda: log.drop("t")):
        with pytest.raises(DiskFull) as found:
            refused()
        checked(found.value)
    assert not engine_of(log).shards[0].is_latched
    disk.capacity_bytes += 4096
    topic.delete(before_seq=max(oracle))
    oracle = {max(oracle): oracle[max(oracle)]}
    disk.capacity_bytes += 1_000_000
    oracle[topic.append(b"more").first_seq] = b"more"
    settled(disk, log, {"t": oracle}, 1)
