"""What a restart finds: G8, G33, G34, G36, G41, G46–G57, G59, G66, and the report that says so."""

from __future__ import annotations

import errno
from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import (
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

from tidelog.engine import Engine, Topic
from tidelog.errors import Closed, Corrupt, Damaged, Error, WriteFailed
from tidelog.testing import SimDisk


def everything(log: Engine) -> dict[str, TopicContents]:
    return {state.topic: read_topic(log.topic(state.topic)) for state in log.topics()}


def busy(world: EngineHarness, seed: int = 0, steps: int = 25) -> None:
    """Any verbs on four topics of class fsync, so that nothing of it may be lost."""
    random = Random(seed)
    for step in range(steps):
        name = random.choice("abcd")
        topic = world.log.topic(name, durability="fsync")
        verb = random.choice(["append", "append", "append", "batch", "delete", "cap", "drop", "checkpoint", "seal"])
        if verb == "append":
            topic.append({"step": step}, tag=f"t{step % 3}", node=random.choice([None, "n"]))
        elif verb == "batch":
            topic.append([b"%d" % step * random.randint(1, 40) for _ in range(random.randint(2, 7))], tag="t0")
        elif verb == "delete":
            topic.delete(match=f"t{random.randint(0, 2)}")
        elif verb == "cap":
            world.log.topic(name, cap_records=random.choice([0, 3, 6]))
        elif verb == "drop" and random.random() < 0.4:
            world.log.drop(name)
        elif verb == "checkpoint":
            world.log.checkpoint()
        elif verb == "seal":
            topic.seal()
        world.clock.tick(1)


# Again and again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("seed", range(6))
def test_a_restart_finds_what_was_there(restart: Restart, seed: int) -> None:
    """G41, G59, G47: and so does another, and another; three more change nothing but the names of empty files."""
    world = EngineHarness(**TINY)
    busy(world, seed)
    before = everything(world.log)
    for _ in range(3):
        assert everything(world.restart(restart)) == before
        assert not world.log.report.damage
    busy(world, seed + 100)
    before = everything(world.log)
    assert everything(world.restart(restart)) == before


@pytest.mark.parametrize("seed", range(4))
def test_recovering_twice_is_recovering_once(seed: int) -> None:
    """G47: same heads, floors, records and file bytes, without writes in between."""
    world = EngineHarness(**TINY)
    busy(world, seed)
    world.restart("crash")
    first = world.disk.tree()
    state = everything(world.log)
    world.restart("kill")
    second = world.disk.tree()
    assert everything(world.log) == state
    world.restart("crash")
    assert world.disk.tree() == second
    assert {path: data for path, data in second.items() if data.strip(b"\0") and "CURRENT" not in path} == {
        path: data for path, data in first.items() if data.strip(b"\0") and "CURRENT" not in path
    }


@pytest.mark.parametrize("restart", RESTARTS)
def test_seqs_go_on_where_they_were(restart: Restart) -> None:
    """G8: for many restarts in a row, without a checkpoint in between."""
    world = EngineHarness(**TINY)
    highest = {"f": 0, "d": 0}
    kept: dict[str, list[int]] = {"f": [], "d": []}
    for number in range(6):
        for name, durability in (("f", "fsync"), ("d", "disk")):
            topic = world.log.topic(name, durability=durability)
            for _ in range(3):
                done = topic.append([number, number])
                assert done.first_seq > highest[name]
                highest[name] = done.last_seq
                kept[name] += done.seqs
        world.restart(restart)
    found = seqs(world.log.topic("f"))
    assert found == kept["f"] == list(range(1, 37))
    survivors = seqs(world.log.topic("d"))
    assert set(survivors) <= set(kept["d"])
    if restart != "crash":
        assert survivors == kept["d"], "two kills in a row lose nothing"


@pytest.mark.parametrize("restart", RESTARTS)
def test_an_engine_that_is_closed_is_not_used_any_more(restart: Restart) -> None:
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append(1)
    old = world.log
    world.restart("reopen")
    for use in (
        lambda: old.topics(),
        lambda: old.topic("b"),
        lambda: old.drop("a"),
        lambda: old.checkpoint(),
        lambda: old.tick(),
        lambda: topic.append(2),
        lambda: topic.read(),
        lambda: topic.delete(seqs=[1]),
        lambda: topic.seal(),
    ):
        with pytest.raises(Closed):
            use()
    old.close()
    assert datas(world.restart(restart).topic("a")) == [1]


def test_an_engine_that_did_nothing_leaves_no_files() -> None:
    """Opening and closing again and again does not make the directory grow."""
    world = EngineHarness(**TINY)
    busy(world)
    world.restart("reopen")
    sizes = []
    for _ in range(6):
        world.restart("reopen")
        sizes.append((len(world.disk.tree()), sum(map(len, world.disk.tree().values()))))
    assert len(set(sizes[1:])) == 1


def test_leaving_the_block_closes_the_engine() -> None:
    world = EngineHarness()
    with world.log as log:
        log.topic("a", durability="memory").append(1)
    with pytest.raises(Closed):
        log.topics()
    assert datas(world.crash("none").topic("a")) == [1]


# Shards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("shards", [(a, b) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4)], ids=str)
def test_the_number_of_shards_may_change_with_every_start(shards: tuple[int, int], restart: Restart) -> None:
    """G49, G50, G51."""
    one, other = shards
    world = EngineHarness(**TINY, wal_shards=one)
    busy(world, one * 10 + other)
    before = everything(world.log)
    assert everything(world.restart(restart, wal_shards=other)) == before
    busy(world, 5, steps=10)
    before = everything(world.log)
    assert everything(world.restart(restart, wal_shards=one)) == before
    assert everything(world.restart(restart, wal_shards=other)) == before


@pytest.mark.parametrize("seed", range(4))
def test_shards_come_and_go_at_random(seed: int) -> None:
    """G49: any number up to sixteen, after any restart."""
    world = EngineHarness(**TINY)
    random = Random(seed)
    for round_ in range(8):
        busy(world, seed * 100 + round_, steps=8)
        before = everything(world.log)
        restart = random.choice(RESTARTS)
        assert everything(world.restart(restart, wal_shards=random.randint(1, 16))) == before


# Leftover files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"\xff" * 100, b"wal-0000000000000001.log\n", b"wal-9\n"])
def test_current_is_only_a_hint(content: bytes | None) -> None:
    """G33: missing, stale or garbage, nothing changes."""
    world = EngineHarness(**TINY)
    busy(world)
    before = everything(world.log)
    disk = world.disk.reboot()
    path = f"{PATH}/wal/CURRENT"
    if content is None:
        disk.remove(path)
    else:
        disk.write_file(path, content)
    log = world.open(disk)
    assert everything(log) == before
    assert not log.report.damage


def test_reserved_space_is_no_damage() -> None:
    """G34."""
    world = EngineHarness(wal_file_bytes=1 << 15)
    world.log.topic("a", durability="fsync").append(1)
    log = world.restart("crash")
    assert (log.report.clean, log.report.lines()) == (True, [])
    assert datas(log.topic("a")) == [1]


def test_wal_files_are_never_used_twice() -> None:
    """G36: a number that was there once is not given to another file."""
    world = EngineHarness(**TINY)
    contents: dict[str, bytes] = {}
    for number in range(12):
        busy(world, number, steps=6)
        for path in world.files(".log"):
            data = world.disk.read_file(path).rstrip(b"\0")
            assert data.startswith(contents.get(path, b"")) or contents[path].startswith(data), path
            contents[path] = data
        world.restart(RESTARTS[number % 3])


@pytest.mark.parametrize("what", ["missing", "short", "empty"])
def test_an_index_that_is_lost_is_made_again(what: str) -> None:
    """G66: byte for byte, and the report says so."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(12):
        topic.append(number, tag="t", meta={"m": number})
    world.log.checkpoint()
    before, disk = everything(world.log), world.disk.reboot()
    path = world.files(".idx")[1]
    content = disk.read_file(path)
    if what == "missing":
        disk.remove(path)
        disk.sync_dir(path.rpartition("/")[0])
    else:
        disk.write_file(path, content[:21] if what == "short" else b"")
    log = world.open(disk)
    assert everything(log) == before
    assert log.report.rebuilt == [path]
    assert disk.read_file(path) == content


def test_foreign_files_are_left_alone() -> None:
    world = EngineHarness(**TINY)
    busy(world)
    world.log.close()
    names = [f"{PATH}/notes.txt", f"{PATH}/topics/notes.txt", f"{PATH}/wal/notes.txt", f"{PATH}/meta/notes.txt"]
    for name in names:
        world.disk.write_file(name, b"mine")
    world.log = world.open(world.disk)
    busy(world, 1)
    world.log.checkpoint()
    world.restart("kill")
    assert all(world.disk.read_file(name) == b"mine" for name in names)


def test_what_no_manifest_names_is_swept() -> None:
    """Decision 0007."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(9)))
    world.log.checkpoint()
    before, disk = everything(world.log), world.disk.reboot()
    directory = world.files(".data")[0].rpartition("/")[0]
    strays = [
        f"{directory}/seg-{99:016d}.data",
        f"{directory}/seg-{99:016d}.idx",
        f"{PATH}/topics/000000FF/seg-{1:016d}.data",
    ]
    for path in strays:
        disk.write_file(path, b"left over")
    log = world.open(disk)
    assert everything(log) == before
    assert not set(strays) & set(disk.tree())
    assert len(log.report.swept) == 3


# Tails --------------------------------------------------------------------------------------------------


def test_a_torn_tail_is_cut_and_frames_before_it_stay() -> None:
    """G52, G53. Method: a WAL of class disk is cut at every byte; whole writes up to there are found, others not."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="memory")
    ends = []
    for number in range(1, 5):
        topic.append([number, number], tag="t")
        ends.append(len(world.disk.read_file(world.files(".log")[0]).rstrip(b"\0")))
    path = world.files(".log")[0]
    content = world.disk.read_file(path)
    start = ends[0] - (ends[1] - ends[0])
    for size in range(start, ends[-1] + 1):
        disk = world.disk.reboot()
        disk.write_file(path, content[:size])
        log = world.open(disk)
        whole_ones = sum(size >= end - 1 for end in ends)  # the last byte of a frame is a flag and may be zero
        found = datas(log.topic("a"))
        assert len(found) in (2 * whole_ones, 2 * sum(size >= end for end in ends)), size
        assert found == [number for number in range(1, 5) for _ in range(2)][: len(found)]
        assert not log.report.damage
        log.topic("a").append("after")
        assert datas(world.open(disk.reboot()).topic("a")) == [*found, "after"]


def test_damage_in_what_was_synced_stops_a_writer_and_not_a_reader() -> None:
    """G56: reported with its place, kept in quarantine, and not written to without consent."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(130):
        topic.append(number)
    files = world.files(".log")
    assert len(files) > 2
    disk = world.disk.reboot()
    disk.flip_bit(files[0], 1_000, 2)
    before = disk.digest()
    with pytest.raises(Damaged, match="accept_loss") as refused:
        world.open(disk)
    assert files[0].rpartition("/")[2] in str(refused.value)
    assert disk.digest() == before
    reader = world.reader(disk)
    left = datas(reader.topic("a"))
    assert left == list(range(len(left)))
    assert reader.report.damage
    log = world.open(disk, accept_loss=True)
    assert log.report.damage
    assert log.report.quarantined
    assert all(disk.read_file(path) for path in log.report.quarantined)
    assert datas(log.topic("a")) == left
    assert log.topic("a").append("goes on").first_seq > len(left)
    log.close()
    again = world.open(disk)
    assert not again.report.damage
    assert datas(again.topic("a"))[-1] == "goes on"


@pytest.mark.parametrize("place", ["wal-", "snapshot"])
def test_a_directory_that_cannot_be_read_is_not_taken_for_a_fresh_one(place: str) -> None:
    """G57."""
    world = EngineHarness(**TINY)
    busy(world)
    world.log.checkpoint()
    before, disk = everything(world.log), world.disk.reboot()
    digest = disk.digest()
    disk.fail("read", error=errno.EIO, path=place, times=None)
    with pytest.raises(Damaged):
        world.open(disk)
    with pytest.raises(Error):
        world.reader(disk)
    disk.clear_faults()
    assert disk.digest() == digest
    assert everything(world.open(disk)) == before


def test_a_directory_without_its_snapshots_is_not_replayed_from_the_middle() -> None:
    """Section 6, step 2; decision 0007."""
    world = EngineHarness(**TINY)
    busy(world, steps=60)
    for _ in range(3):
        world.log.checkpoint()
    disk = world.disk.reboot()
    for path in world.files(".bin", "meta"):
        disk.write_file(path, b"no snapshot")
    before = disk.digest()
    with pytest.raises(Damaged):
        world.open(disk)
    assert disk.digest() == before


def test_one_bad_record_in_a_segment_does_not_hide_its_neighbours() -> None:
    """G65: the error names it and where to go on."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(12):
        topic.append(b"%02d" % number * 20)
    world.log.checkpoint()
    world.log.checkpoint()
    disk = world.disk.reboot()
    path = world.files(".data")[1]  # seqs 5 to 8
    content = disk.read_file(path)
    disk.flip_bit(path, content.index(b"05" * 20) + 3, 1)
    log = world.open(disk)
    found = log.topic("a")
    assert [record.seq for record in found.read(0, 5).records] == [1, 2, 3, 4, 5]
    with pytest.raises(Corrupt) as failed:
        found.read(5)
    assert (failed.value.seq, failed.value.resume) == (6, 7)
    assert [record.data for record in found.read(6).records] == [b"%02d" % number * 20 for number in range(6, 12)]


def test_reserved_seqs_are_in_the_report() -> None:
    world = EngineHarness(head_reserve=10)
    topic = world.log.topic("a", durability="disk")
    topic.append([1, 2])
    log = world.restart("kill")
    padded = log.topic("a").head_seq - 2
    assert padded > 0
    assert log.report.padded == {"a": padded}
    assert any("reserved" in line for line in log.report.lines())
    assert seqs(log.topic("a")) == [1, 2]


def test_progress_is_reported() -> None:
    world = EngineHarness(**TINY)
    busy(world)
    progress: list[tuple[str, int, int]] = []
    world.open(world.disk.reboot(), progress=lambda *said: progress.append(said))
    assert progress
    assert all(0 < done <= total for _, done, total in progress)
    assert progress[-1][1] == progress[-1][2], "every frame was counted once"


def test_ten_thousand_records_come_back_in_order() -> None:
    """G41, from segments and from the WAL, one at a time and in batches."""
    world = EngineHarness(segment_events_max=700, wal_file_bytes=1 << 16)
    topic = world.log.topic("a", durability="fsync")
    expected: list[Any] = []
    for number in range(100):
        batch = [b"%d" % (len(expected) + at) for at in range(1 if number % 3 else 297)]
        topic.append(batch)
        expected += batch
        if number in (30, 60):
            world.log.checkpoint()
    assert len(expected) > 10_000
    assert read_topic(world.restart("crash").topic("a"), 1_000).datas == expected


def test_a_close_that_cannot_checkpoint_loses_nothing() -> None:
    """G20, G29: the WAL is synced all the same, and the directory is free again."""
    world = EngineHarness(**TINY)
    busy(world)
    topic: Topic = world.log.topic("m", durability="memory")
    topic.append([1, 2, 3])
    before = everything(world.log)
    world.disk.fail("create", error=errno.EIO, path="/meta", times=None)
    with pytest.raises(WriteFailed):
        world.log.close()
    disk: SimDisk = world.disk
    disk.clear_faults()
    assert everything(world.open(disk.crash_image("none"))) == before
    assert everything(world.open(disk)) == before
