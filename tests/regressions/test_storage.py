"""Parts of the storage that were right alone and wrong together: erasures, rewrites and restarts beside backups,
restores and the cold tier. Found by `tests/model/test_storage.py`."""

from __future__ import annotations

from contextlib import suppress

import pytest
from tests.unit.engine.harness import PATH, EngineHarness, datas

import tidelog
from tidelog.engine.backup import create_backup
from tidelog.engine.check import check_directory
from tidelog.engine.restore import restore_backup
from tidelog.testing import PowerOff, SimDisk, SimStore

TARGET, RESTORED = "backups", "restored"


def damage(disk: SimDisk, path: str) -> list[str]:
    return [finding.reason for finding in check_directory(path, disk=disk) if finding.damage]


def restored(shards: int = 1) -> EngineHarness:
    """A database with records that only the WAL of its backup has, restored."""
    world = EngineHarness(wal_shards=shards)
    topic = world.log.topic("t", durability="fsync")
    topic.append(["one", "two"])
    world.log.checkpoint()
    topic.append("three")
    checkpoints = world.log._checkpoints
    checkpoint = checkpoints.checkpoint

    def write_after(**how: bool) -> None:  # records after the checkpoint of the snapshot, and a topic
        checkpoint(**how)
        topic.append("four")
        world.log.topic("late", durability="fsync").append("five")

    checkpoints.checkpoint = write_after  # type: ignore[method-assign]
    create_backup(world.log, TARGET)
    checkpoints.checkpoint = checkpoint  # type: ignore[method-assign]
    world.log.close()
    restore_backup(TARGET, RESTORED, disk=world.disk)
    return world


@pytest.mark.parametrize("left", ["", "meta/COLD.tmp", "meta/database.id.tmp"])
def test_erase_works_after_a_backup(left: str) -> None:
    """The id of the database, beside the manifests, was taken for a manifest that could not be removed; so were files
    that a crash left of it and of the state of the cold store."""
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    topic.append([b"needle", b"other"])
    create_backup(world.log, TARGET)
    if left:
        world.disk.write_file(f"{PATH}/{left}", b"unfinished")
    assert topic.erase(seqs=[1]).records == 1
    assert not [path for path in world.files() if b"needle" in world.disk.read_file(path)]


@pytest.mark.parametrize("shards", [1, 2])
def test_check_of_a_restored_directory_finds_no_damage(shards: int) -> None:
    """A backup has the WAL from its snapshot on: the zeros before it, and topics that only the WAL knew, counted as
    damage."""
    world = restored(shards)
    assert damage(world.disk.reboot(), RESTORED) == []
    world.settings["wal_shards"] = shards

    with tidelog.open(RESTORED, disk=world.disk, clock=world.clock, **world.settings) as log:
        assert datas(log.topic("t")) == ["one", "two", "three", "four"]
        assert datas(log.topic("late")) == ["five"]
        assert damage(world.disk.reboot(), RESTORED) == []
    assert damage(world.disk, RESTORED) == []


def test_zeros_in_the_wal_of_a_restored_directory_are_still_damage() -> None:
    world = restored()
    (path,) = (path for path in world.disk.tree() if path.startswith(f"{RESTORED}/wal/wal-"))
    content = world.disk.read_file(path)
    start = len(content) - len(content.lstrip(b"\0"))
    world.disk.write_file(path, bytes(start + 40) + content[start + 40 :])
    assert damage(world.disk, RESTORED)


def test_restored_directory_opens_after_two_power_cuts() -> None:
    """The first start takes the number of its WAL file from an upper bound of the frames. If the second one was cut off
    after it made another file, the third took the difference of the two numbers for lost frames and refused."""

    world = restored()
    base = world.disk
    tidelog.open(RESTORED, disk=base, clock=world.clock, **world.settings)
    first = base.reboot()
    for number in range(1, 40):
        second = first.reboot()
        second.cut_power_at(number)
        with suppress(PowerOff):
            tidelog.open(RESTORED, disk=second, clock=world.clock, **world.settings)
        for image in second.images():
            log = tidelog.open(RESTORED, disk=image.disk, clock=world.clock, **world.settings)
            assert not log.report.damage
            assert datas(log.topic("t")) == ["one", "two", "three", "four"]


def cold_world() -> tuple[EngineHarness, SimStore]:
    store = SimStore()
    world = EngineHarness(cold_store=store, segment_events_max=4, hot_retain_segments=0)
    topic = world.log.topic("t", durability="fsync")
    topic.append([b"needle-%d" % number for number in range(4)], key="key of the needles")
    topic.append(b"other")
    world.log.relocate(keep_segments=0)
    assert any(b"needle" in content for content in store.objects.values())
    return world, store


def test_cold_segment_whose_file_is_not_mapped_is_rewritten() -> None:
    """The rewrite read the missing file as an empty one, reported damage and left the empty one in the cache."""
    world, store = cold_world()
    topic = world.log.topic("t")
    topic.delete(seqs=[2])
    for segment in topic._state.index.parts:
        if hasattr(segment, "unmap"):
            segment.unmap()
    assert topic.rewrite(force=True).skipped == ()
    assert world.log.health().ok
    assert datas(topic) == [b"needle-0", b"needle-2", b"needle-3", b"other"]
    assert store.objects


def test_erase_reaches_objects_and_keys_of_segments_that_were_dropped() -> None:
    """Records whose segment had been dropped were selected in no segment: their object in the store, which waits for
    its deletion, and their idempotency key stayed."""
    world, store = cold_world()
    topic = world.log.topic("t")
    topic.delete(seqs=[1, 2, 3, 4])
    world.log.checkpoint()
    topic.erase(seqs=[1, 2, 3, 4])
    assert not [key for key, content in store.objects.items() if b"needle" in content]
    assert not [path for path in world.files() if b"key of the needles" in world.disk.read_file(path)]
