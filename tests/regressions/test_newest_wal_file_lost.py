"""The newest WAL file is lost, alone or with CURRENT: reported by open and `check`, no acked seq is given again
(docs/bugs.md)."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.disk.durability import WriteLatch
from tidelog.engine.check import check_directory
from tidelog.engine.config import Durability
from tidelog.errors import Damaged, DiskFull, Latched
from tidelog.testing import ManualClock, PowerOff, SimDisk
from tidelog.wal import Writer
from tidelog.wal import paths as names
from tidelog.wal.recovery import replay_shard

PATH = "data"
TINY: dict[str, Any] = {"wal_file_bytes": 2048, "segment_events_max": 4, "segment_bytes_max": 1024, "head_reserve": 4}


def opened(disk: SimDisk, shards: int = 1, **more: Any) -> tidelog.Database:
    return tidelog.open(PATH, disk=disk, clock=ManualClock(), threads=False, wal_shards=shards, **TINY, **more)


def newest(disk: SimDisk, topic: tidelog.Topic) -> str:
    """The newest file of the topic's shard."""
    place = topic._state.shard.directory
    return names.file_path(place, names.list_file_numbers(disk, place)[-1])


def lose(disk: SimDisk, path: str) -> None:
    disk.remove(path)
    disk.sync_dir(path.rpartition("/")[0])


@pytest.mark.parametrize("checkpoint", ["none", "before", "inside"])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("also_lost", ["", "CURRENT", "NEWEST"])
def test_a_lost_newest_file_is_damage_and_its_seqs_stay_used(
    also_lost: str, shards: int, durability: Durability, checkpoint: str
) -> None:
    """Method: records in several files, with no checkpoint, one before the newest file, or one inside it; a kill; the
    newest file of the topic's shard is removed, alone or with one of the two files that prove it."""
    disk = SimDisk()
    log = opened(disk, shards)
    topic = log.topic("t", durability=durability)
    topic.append([b"first"] * 3)
    if checkpoint == "before":
        log.checkpoint()
    rotations = engine_of(log).shards[0].stats.rotations
    while (
        names.list_file_numbers(disk, topic._state.shard.directory)[-1:] == [1]
        or engine_of(log).shards[0].stats.rotations == rotations
    ):
        topic.append(bytes(300))
    if checkpoint == "inside":
        log.checkpoint()
    head = topic.append([b"in the newest file"] * 2).last_seq
    gone = newest(disk, topic)
    killed = disk.reboot()
    lose(killed, gone)
    place = gone.rpartition("/")[0]
    proofs = [name for name in killed.list_dir(place) if also_lost and name.startswith(also_lost)]
    assert len(proofs) == bool(also_lost)
    for name in proofs:
        lose(killed, f"{place}/{name}")

    assert any(found.damage and found.file in gone for found in check_directory(PATH, disk=killed.reboot()))
    with pytest.raises(Damaged, match=gone.rpartition("/")[2]):
        opened(killed.reboot(), shards)
    reader = opened(killed.reboot(), shards, read_only=True)
    assert reader.report.lost
    assert reader.topic("t", create=False).read(0, 100).records

    went_on = opened(accepted := killed.reboot(), shards, accept_loss=True)
    seqs = [went_on.topic("t", create=False).append(b"after").first_seq for _ in range(5)]
    assert seqs[0] > head
    again = opened(accepted.reboot(), shards)
    assert not again.report.damage
    assert [record.seq for record in again.topic("t").read(0, 100).records][-5:] == seqs
    assert not any(found.damage for found in check_directory(PATH, disk=accepted.reboot()))


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_a_crash_while_the_loss_is_accepted_gives_no_seq_again(durability: Durability) -> None:
    """Method: the power is cut at every operation of the start with `accept_loss`; the next start with it goes on above
    every seq that was acked, and one without it is refused or finds nothing any more."""
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("t", durability=durability)
    log.checkpoint()
    while names.list_file_numbers(disk, "data/wal")[-1] < 8:
        head = topic.append(bytes(300)).last_seq
    head = topic.append(b"last").last_seq
    killed = disk.reboot()
    lose(killed, newest(killed, topic))
    states = 0
    for number in range(1, 200):
        cut = killed.reboot()
        cut.cut_power_at(number)
        try:
            opened(cut, accept_loss=True)
        except PowerOff:
            pass
        else:
            break
        for image in cut.images():
            states += 1
            after = opened(image.disk.reboot(), accept_loss=True)
            assert after.topic("t", create=False).append(b"after").first_seq > head, image.label
    assert states > 50


def test_wal_file_that_lost_everything_is_reported_too() -> None:
    disk = SimDisk()
    log = opened(disk, 2)
    for number in range(4):
        log.topic(f"t{number}", durability="fsync").append(b"one")
    killed = disk.reboot()
    lose(killed, "data/wal/shard-00/wal-0000000000000001.log")
    with pytest.raises(Damaged, match="shard-00/wal-0000000000000001"):
        opened(killed.reboot(), 2)
    assert any(found.damage for found in check_directory(PATH, disk=killed))


def test_current_follows_on_a_full_disk_in_its_place_and_later() -> None:
    """Method: there is no room to replace CURRENT, then none to overwrite it either; a tick makes up for it."""
    disk = SimDisk()
    writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))

    def put() -> None:
        writer.write([bytes(900)], size=900, frames=1)

    put()
    put()
    disk.fail("create", 2, errno.ENOSPC, None)
    put()
    assert names.current_file_number(disk, "wal") == writer.position.file_number > 1, "it was overwritten where it is"
    disk.clear_faults()
    put()
    disk.remove("wal/CURRENT")
    disk.fail("create", 2, errno.ENOSPC, None)
    put()
    assert names.current_file_number(disk, "wal") is None
    writer.record_synced_position()
    assert names.current_file_number(disk, "wal") is None
    disk.clear_faults()
    writer.record_synced_position()
    assert names.current_file_number(disk, "wal") == writer.position.file_number


def test_the_second_proof_is_durable_with_the_first() -> None:
    """Method: two rotations, then every image that a power cut can leave; CURRENT and the newest file are removed."""
    disk = SimDisk()
    writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))
    for _ in range(6):
        writer.write([bytes(900)], size=900, frames=1)
    assert len(names.list_file_numbers(disk, "wal")) > 2
    for image in disk.images():
        newest = names.list_file_numbers(image.disk, "wal")[-1]
        lose(image.disk, "wal/CURRENT")
        lose(image.disk, names.file_path("wal", newest))
        replay = replay_shard(image.disk, "wal")
        list(replay)
        assert replay.missing_file is not None, image.label
        assert (replay.missing_file.file_number, replay.missing_file.size) == (newest, 2048), image.label


def test_a_newest_file_of_another_name_proves_nothing() -> None:
    disk = SimDisk()
    log = opened(disk)
    log.topic("t").append(b"one")
    killed = disk.reboot()
    for name in ("NEWEST", "NEWEST-99-2048", "NEWEST-0000000000000099-02048", "NEWEST-0000000000000099-2048.tmp"):
        killed.write_file(f"data/wal/{name}", b"")
    assert not opened(killed).report.damage


def test_a_full_disk_that_refuses_the_second_proof_takes_the_write() -> None:
    disk = SimDisk()
    writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))
    for _ in range(2):
        writer.write([bytes(900)], size=900, frames=1)
    disk.fail("rename", error=errno.ENOSPC, path="NEWEST")
    writer.write([bytes(900)], size=900, frames=1)
    assert names.current_file_number(disk, "wal") == writer.position.file_number > 1
    assert [proof.first for proof in names.newest_names(disk, "wal").values()] == [1]


def test_a_batch_larger_than_a_file_is_announced() -> None:
    disk = SimDisk()
    writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))
    for size in (5000, 100, 9000):
        writer.write([bytes(size)], size=size, frames=1)
        said = names.proven_current(disk, "wal")
        assert said is not None
        assert said.first == writer.position.file_number
        assert said.size is not None
        assert said.size >= writer.position.pos
    writer.sync()
    lose(disk, names.file_path("wal", writer.position.file_number))
    replay = replay_shard(disk, "wal")
    list(replay)
    assert replay.missing_file is not None
    assert replay.losses[-1].records >= 9000 // 4


def test_an_interrupt_inside_a_rotation_leaves_no_claim() -> None:
    """Method: the renames of NEWEST and of CURRENT, and the sync after them, are interrupted; what is left claims no
    file that is not there, and the next write makes it anew."""
    for call, nth in (("rename", 1), ("rename", 2), ("sync_dir", 2)):
        disk = SimDisk()
        writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))
        for _ in range(2):
            writer.write([bytes(900)], size=900, frames=1)
        real, seen = getattr(disk, call), list[str]()

        def interrupted(*paths: str, real: Any = real, seen: list[str] = seen, nth: int = nth) -> None:
            real(*paths)
            seen.append(paths[0])
            if len(seen) == nth:
                raise KeyboardInterrupt

        setattr(disk, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write([bytes(900)], size=900, frames=1)
        setattr(disk, call, real)
        for image in disk.images():
            replay = replay_shard(image.disk, "wal")
            list(replay)
            assert replay.missing_file is None, image.label
        writer.write([bytes(900)], size=900, frames=1)
        assert names.current_file_number(disk, "wal") == writer.position.file_number


def test_a_current_of_an_earlier_version_proves_nothing() -> None:
    """Earlier versions removed an empty file before they made it anew, so a crash could leave this."""
    disk = SimDisk()
    log = opened(disk)
    log.topic("t").append(b"one")
    killed = disk.reboot()
    killed.write_file("data/wal/CURRENT", b"wal-0000000000000099.log\n")
    assert not opened(killed).report.damage


def test_no_space_for_a_new_file_leaves_no_reservation() -> None:
    disk = SimDisk()
    writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))
    for _ in range(2):
        writer.write([bytes(900)], size=900, frames=1)
    disk.fail("reserve", 1, errno.ENOSPC, None)
    with pytest.raises(DiskFull):
        writer.write([bytes(900)], size=900, frames=1)
    for image in disk.images():
        replay = replay_shard(image.disk, "wal")
        list(replay)
        assert replay.missing_file is None, image.label


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("lost_bytes", [512, 2048], ids=["first sector", "all"])
def test_zeros_in_place_of_all_frames_of_the_newest_file_are_damage(
    lost_bytes: int, durability: Durability, shards: int
) -> None:
    """Method: the newest file has one record, in its first sector; a sync interval passes; zeros replace the sector, or
    the whole content. Nothing in the file proves that frames were there."""
    disk = SimDisk()
    log = opened(disk, shards)
    topic = log.topic("t", durability=durability)
    first = names.list_file_numbers(disk, topic._state.shard.directory)[-1]
    acked = 0
    while names.list_file_numbers(disk, topic._state.shard.directory)[-1] == first:
        acked = topic.append(bytes(250)).last_seq
    engine_of(log).tick()
    path, image = newest(disk, topic), disk.reboot()
    content = image.read_file(path)
    assert 0 < len(content.rstrip(b"\0")) <= 512
    image.write_file(path, bytes(lost_bytes) + content[lost_bytes:])
    found = [finding for finding in check_directory(PATH, disk=image) if finding.damage]
    assert [finding.kind for finding in found] == ["wal"]
    with pytest.raises(Damaged, match="which were synced"):
        opened(image.reboot(), shards)
    again = opened(image, shards, accept_loss=True)
    assert again.report.lost
    assert again.topic("t").append(b"next").first_seq > acked


@pytest.mark.parametrize("damage", ["lost", "torn", "of another file", "with a wrong checksum"])
def test_without_a_valid_synced_file_a_directory_opens_as_it_is(damage: str) -> None:
    """SYNCED is evidence and nothing more: every record is there without it."""
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("t", durability="fsync")
    topic.append([b"a", b"b"])
    engine_of(log).tick()
    image, path = disk.reboot(), "data/wal/SYNCED"
    content = image.read_file(path)
    assert content.startswith(b"wal-0000000000000001.log\nsynced=000")
    match damage:
        case "lost":
            lose(image, path)
        case "torn":
            image.write_file(path, content[:40])
        case "of another file":
            image.write_file(path, names.encode_synced(names.Position(99, 4096)))
        case _:
            image.write_file(path, content.replace(b"synced=0", b"synced=9"))
    again = opened(image)
    assert not again.report.damage
    assert [record.data for record in again.topic("t").read().records] == [b"a", b"b"]


def test_a_full_disk_delays_the_synced_file_and_another_error_latches() -> None:
    disk = SimDisk()
    writer = Writer(disk, "wal", file_number=1, file_bytes=2048, latch=WriteLatch("wal"))
    writer.write([bytes(100)], size=100, frames=1)
    writer.record_synced_position()
    assert names.read_synced(disk, "wal") is None, "nothing is synced"
    writer.sync()
    disk.fail("create", 1, errno.ENOSPC, None)
    writer.record_synced_position()
    assert names.read_synced(disk, "wal") is None
    disk.clear_faults()
    writer.record_synced_position()
    assert names.read_synced(disk, "wal") == writer.synced == (1, 100)
    writer.write([bytes(50)], size=50, frames=1)
    writer.record_synced_position()
    assert names.read_synced(disk, "wal") == (1, 100), "bytes are unsynced: the next batch has a mark"
    writer.sync()
    disk.fail("write", 1, errno.EIO, None)
    with pytest.raises(Latched, match="SYNCED"):
        writer.record_synced_position()
    assert writer.latch.is_tripped


@pytest.mark.parametrize("shards", [1, 2])
def test_no_state_of_the_synced_file_is_a_false_alarm(shards: int) -> None:
    """Method: writes, ticks and rotations; after each, every image that a power cut can leave, whatever is left of
    SYNCED: nothing is damaged and every acked record is there."""
    disk = SimDisk()
    disk.advisory_files = frozenset()
    log = opened(disk, shards)
    topic = log.topic("t", durability="fsync")
    images = 0
    for number in range(12):
        topic.append(b"%d" % number * 150)
        if number % 3:
            engine_of(log).tick()
        for image in disk.images(limit=24):
            images += 1
            again = opened(image.disk, shards)
            assert not again.report.damage, image.label
            assert again.topic("t").head_seq == number + 1, image.label
    assert images > 80
