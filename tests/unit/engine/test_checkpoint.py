"""What a checkpoint promises: G29, G35, G37–G46, G62, G63, G68, G69, with writers that go on meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import (
    CLASSES,
    PATH,
    RESTARTS,
    TINY,
    EngineHarness,
    InterposingDisk,
    Restart,
    TopicContents,
    datas,
    read_topic,
    seqs,
)

from tidelog.engine import Engine, Topic, manifest
from tidelog.errors import Closed, DiskFull, TopicNotFound, Unavailable, WriteFailed


def everything(log: Engine) -> dict[str, TopicContents]:
    return {state.topic: read_topic(log.topic(state.topic)) for state in log.topics()}


def filled(world: EngineHarness) -> Topic:
    """A topic in all places: sealed, growing, deleted from, and in memory."""
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(1, 8)), tag=["x", "y"] * 3 + ["x"])
    world.log.checkpoint()
    topic.delete(seqs=[2, 7])
    topic.append([8, 9, 10], tag="z")
    world.log.topic("b", durability="fsync").append(["b1", "b2"])
    return topic


def snapshots(world: EngineHarness) -> list[int]:
    return manifest.list_manifest_numbers(world.disk, PATH)


# Alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_checkpoint_changes_nothing_that_anybody_can_see(restart: Restart | None) -> None:
    """G41: recovery from snapshot and tail equals recovery from the WAL alone."""
    world = EngineHarness(**TINY)
    filled(world)
    before = everything(world.log)
    assert everything(world.open(world.disk.reboot())) == before
    world.log.checkpoint()
    assert everything(world.log) == before
    if restart is not None:
        assert everything(world.restart(restart)) == before
    world.log.checkpoint()
    world.log.checkpoint()
    assert everything(world.log) == before


def test_a_power_cut_anywhere_in_a_checkpoint_changes_nothing() -> None:
    """G37, G44, G45, G63. Method: images before each operation of a checkpoint, and after the last."""
    world = EngineHarness(**TINY)
    filled(world)
    before = everything(world.log)
    looks = 0

    def look(_: int) -> None:
        nonlocal looks
        for image in world.disk.images(("none", "all", "prefixes", "torn_last", "random"), Random(looks), limit=6):
            assert everything(world.open(image.disk)) == before, image.label
        looks += 1

    world.disk.on_op = look
    world.log.checkpoint()
    world.log.checkpoint()
    look(0)
    world.disk.on_op = None
    assert looks > 30


def test_a_checkpoint_leaves_no_file_of_a_segment_open() -> None:
    world = EngineHarness(**TINY)
    filled(world)
    world.log.checkpoint()
    assert {path.split("/")[1] for path in world.disk.open_files()} == {"wal"}


def test_what_a_checkpoint_covers_leaves_the_wal() -> None:
    """G35: with the checkpoint after it, because the snapshot before must stay usable."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(30):
        topic.append(b"%d" % number * 100)
    many = len(world.files(".log", "wal"))
    assert many > 3
    world.log.checkpoint()
    assert len(world.files(".log", "wal")) == many, "the first one: nothing is covered twice"
    world.log.checkpoint()
    world.log.checkpoint()
    assert len(world.files(".log", "wal")) <= 2
    assert len(seqs(world.restart("crash").topic("a"))) == 30


def test_two_bases_and_the_deltas_since_are_kept_and_numbers_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """G38."""
    monkeypatch.setattr(manifest, "DELTAS_MAX", 2)
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    kept = []
    for number in range(8):
        topic.append(number)
        world.log.checkpoint()
        kept.append([path.rpartition("/")[2].removesuffix(".bin") for path in sorted(world.files(".bin", "meta"))])
    assert kept[0] == ["delta.0001", "snapshot.0000"]
    assert kept[1] == ["delta.0001", "delta.0002", "snapshot.0000"]
    assert kept[2] == ["delta.0001", "delta.0002", "delta.0003", "snapshot.0000", "snapshot.0002"]
    assert kept[4] == ["delta.0003", "delta.0004", "delta.0005", "snapshot.0002", "snapshot.0004"]
    assert kept[6] == ["delta.0005", "delta.0006", "delta.0007", "snapshot.0004", "snapshot.0006"]
    world.restart("reopen")
    world.log.checkpoint()
    assert min(snapshots(world)) >= 5


@pytest.mark.parametrize("broken", ["flipped", "cut", "empty", "garbage"])
@pytest.mark.parametrize("later", ["nothing", "writes"])
def test_a_snapshot_that_does_not_read_is_passed_over_and_nothing_is_lost(broken: str, later: str) -> None:
    """G38, G42: the one before it and the WAL have everything."""
    world = EngineHarness(**TINY)
    topic = filled(world)
    world.log.checkpoint()
    topic.append("between")
    topic.delete(seqs=[8])
    world.log.checkpoint()
    if later == "writes":
        topic.append("later")
        topic.delete(seqs=[9])
    before = everything(world.log)
    disk = world.disk.reboot()
    path = manifest.manifest_path(PATH, snapshots(world)[0], "delta")
    content = disk.read_file(path)
    if broken == "flipped":
        disk.flip_bit(path, len(content) // 2, 3)
    else:
        disk.write_file(path, {"cut": content[:-3], "empty": b"", "garbage": b"x" * 200}[broken])
    log = world.open(disk)
    assert everything(log) == before
    assert len(log.report.snapshots_skipped) == 1
    assert path.rpartition("/")[2] in log.report.snapshots_skipped[0]
    assert not log.report.clean
    log.checkpoint()
    assert everything(world.open(disk.reboot())) == before


# When ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_due_after_so_many_bytes() -> None:
    world = EngineHarness(checkpoint_bytes=1_000, checkpoint_ms=1 << 40)
    topic = world.log.topic("a")
    topic.append(b"x" * 500)
    world.log.tick()
    assert snapshots(world) == []
    topic.append(b"x" * 500)
    world.log.tick()
    assert snapshots(world) == [1]


def test_a_checkpoint_is_due_after_some_time_where_there_is_something_to_move() -> None:
    world = EngineHarness(checkpoint_ms=1_000)
    world.log.topic("a").append(1)
    world.clock.tick(999)
    world.log.tick()
    assert snapshots(world) == []
    world.clock.tick(1)
    world.log.tick()
    assert snapshots(world) == [1]


def test_an_engine_with_nothing_to_do_does_nothing() -> None:
    """`checkpoint_ms`: only while there is something to move. The first tick records how far the WAL was
    synced: one small file and no sync."""
    world = EngineHarness(checkpoint_ms=1_000)
    world.log.topic("a").append(1)
    world.log.checkpoint()
    before, end = world.disk.op_count, sum(shard.position().pos for shard in world.log._context.shards)
    for _ in range(5):
        world.clock.tick(10_000)
        world.log.tick()
        assert sum(shard.position().pos for shard in world.log._context.shards) == end
        assert world.disk.op_count == before + 2, "it is created and written"


@pytest.mark.parametrize("trigger", ["count", "bytes", "age", "asked", "jump"])
def test_a_segment_is_sealed_no_later_than_the_next_append(trigger: str) -> None:
    """G68. Method: the footers that a checkpoint writes show which segments are complete."""
    limits: dict[str, dict[str, Any]] = {
        "count": {"segment_events_max": 3},
        "bytes": {"segment_bytes_max": 400},
        "age": {"segment_age_ms_max": 50},
    }
    world = EngineHarness(**limits.get(trigger, {}))
    topic = world.log.topic("a", durability="fsync")
    for number in range(3):
        topic.append(b"%d" % number * 90)
    if trigger == "age":
        world.clock.tick(2_000)
        world.log.tick()
    elif trigger == "asked":
        topic.seal()
        topic.seal()
    elif trigger == "jump":
        world.disk.fail("write", error=errno.ENOSPC)
        with pytest.raises(DiskFull):
            topic.append("lost")
    topic.append(b"after")
    world.log.checkpoint()
    sealed = [path.rpartition("/")[2] for path in world.files(".foot")]
    assert sealed == [f"seg-{1:016d}.foot"]
    assert len(world.files(".data")) == 2
    assert len(seqs(topic)) == 4
    assert datas(world.restart("crash").topic("a"))[-1] == b"after"


def test_an_idle_segment_is_sealed_by_its_age() -> None:
    """G68: at the next pass of the timer, without another append."""
    world = EngineHarness(segment_age_ms_max=5_000, checkpoint_ms=1_000)
    world.log.topic("a").append(1)
    for _ in range(10):
        world.clock.tick(1_000)
        world.log.tick()
    assert world.files(".foot")


def test_sealing_again_changes_no_stored_byte() -> None:
    """G69. Method: a checkpoint is interrupted before each of its operations, then done by the next process: the
    files of complete segments are those of an engine that was never interrupted."""

    def grown() -> EngineHarness:
        world = EngineHarness(**TINY)
        topic = world.log.topic("a", durability="fsync")
        for number in range(10):
            topic.append(number, tag="t")
        return world

    def sealed(world: EngineHarness) -> dict[str, bytes]:
        stems = [path.removesuffix(".foot") for path in world.files(".foot")]
        return {path: world.disk.read_file(path) for path in world.files(under="topics") if path.split(".")[0] in stems}

    whole_one = grown()
    start = whole_one.disk.op_count
    whole_one.log.checkpoint()
    stop = whole_one.disk.op_count
    expected = sealed(whole_one)
    assert len(expected) == 8, "two segments of data, index, footer and tags"
    for number in range(start + 1, stop + 1):
        world = grown()
        broken: list[Any] = []
        world.disk.on_op = lambda at, number=number, world=world, broken=broken: (
            broken.append(world.disk.crash_image("all")) if at == number else None
        )
        world.log.checkpoint()
        world.disk = broken[0]
        world.log = world.open(world.disk)
        world.log.checkpoint()
        assert sealed(world) == expected, f"interrupted before operation {number}"


# Failing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("place", ["topics", "meta"])
@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_dir", "rename"])
def test_a_checkpoint_that_fails_fails_no_write_and_loses_nothing(error: int, place: str, call: Any) -> None:
    """G29: abandoned, reported, and retried."""
    world = EngineHarness(**TINY)
    topic = filled(world)
    before = everything(world.log)
    world.disk.fail(call, error=error, path=f"/{place}", times=None)
    with pytest.raises(Unavailable) as failed:
        world.log.checkpoint()
    assert isinstance(failed.value, DiskFull if error == errno.ENOSPC else WriteFailed)
    assert everything(world.log) == before
    topic.append("goes on")
    topic.delete(seqs=[1])
    before = everything(world.log)
    assert everything(world.open(world.disk.crash_image("none"))) == before
    assert everything(world.open(world.disk.crash_image("all"))) == before
    world.disk.clear_faults()
    world.log.checkpoint()
    assert everything(world.log) == before
    assert everything(world.restart("crash")) == before


@pytest.mark.parametrize("mode", ["dropped", "reverted", "kept"])
@pytest.mark.parametrize("place", [".data", ".idx", ".foot", ".del", "/meta"])
def test_a_sync_that_fails_in_a_checkpoint_is_not_believed_the_second_time(mode: Any, place: str) -> None:
    """G29, G62: the next checkpoint writes again what the first one could not make durable."""
    world = EngineHarness(**TINY)
    topic = filled(world)
    topic.delete(seqs=[1])
    topic.append(["completes", "a", "segment"])
    world.disk.fail_sync(mode, path=place)
    with pytest.raises(Unavailable):
        world.log.checkpoint()
    before = everything(world.log)
    world.log.checkpoint()
    for _ in range(2):
        world.log.topic("b").append("more")
        world.log.checkpoint()
    found = everything(world.restart("crash"))
    assert found["a"] == before["a"]


def test_no_snapshot_appears_where_a_mark_could_not_be_synced() -> None:
    """G43."""
    world = EngineHarness(**TINY | {"wal_shards": 3})
    for number in range(6):
        world.log.topic(f"t{number}", durability="fsync").append(number)
    before = everything(world.log)
    world.disk.fail_sync("kept", path="shard-02")
    with pytest.raises(Exception, match="shard-02"):
        world.log.checkpoint()
    assert snapshots(world) == []
    assert everything(world.restart("crash")) == before


# While others write -------------------------------------------------------------------------------------


def grow(log: Engine) -> None:
    log.topic("a").append(["meanwhile", "meanwhile too"], tag="x")


def erase(log: Engine) -> None:
    log.topic("a").delete(match="x")
    log.topic("a").delete(before_seq=4)


def erase_and_grow(log: Engine) -> None:
    log.topic("a").delete(match="*")
    log.topic("a").append(list(range(6)), tag="x")
    log.topic("a").delete(seqs=[9, 12])


def cap(log: Engine) -> None:
    log.topic("a", cap_records=2)
    log.topic("a").append(["capped", "capped", "capped"])


def cap_and_uncap(log: Engine) -> None:
    log.topic("a", cap_records=3)
    log.topic("a", cap_records=0)
    log.topic("a").append(list(range(10)))


def create(log: Engine) -> None:
    log.topic("c", durability="fsync", cap_records=7).append(["c1", "c2"])


def create_capped_and_uncap(log: Engine) -> None:
    log.topic("c", durability="fsync", cap_records=2)
    log.topic("c", cap_records=0)
    log.topic("c").append([1, 2, 3, 4, 5])


def drop(log: Engine) -> None:
    log.drop("a")


def drop_another(log: Engine) -> None:
    log.drop("b")


def make_again(log: Engine) -> None:
    log.drop("a")
    log.topic("a", durability="fsync").append(["new"], tag="x")


def seal(log: Engine) -> None:
    log.topic("a").seal()
    log.topic("a").append("in another segment")


def change_class(log: Engine) -> None:
    log.topic("a", durability="ephemeral")
    log.topic("a", durability="fsync")
    log.topic("a").append("durable again")


ACTS = (
    *(grow, erase, erase_and_grow, cap, cap_and_uncap, create, create_capped_and_uncap),
    *(drop, drop_another, make_again, seal, change_class),
)


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("final", [False, True], ids=["checkpoint", "close"])
def test_what_happens_during_a_checkpoint_is_not_undone_by_it(
    act: Callable[[Engine], None], final: bool, stride: int
) -> None:
    """G39, G40: everything acked before, during or after the capture is there after a kill and after a power cut.
    Method: an action runs before the nth step of a checkpoint, for every n (in `make test` for every second one, the
    odd ones of a checkpoint and the even ones of a close, or the other way round); what the living engine shows then is
    what every later one shows."""
    steps = number = 1 + (final + ACTS.index(act)) % stride
    while number <= steps:
        disk = InterposingDisk()
        world = EngineHarness(disk, **TINY)
        filled(world)
        shown: dict[str, TopicContents] = {}

        def meddle(world: EngineHarness = world, shown: dict[str, TopicContents] = shown) -> None:
            if final:
                with suppress(Closed):  # G21: what races with a close is done or refused
                    act(world.log)
            else:
                act(world.log)
            shown.update(everything(world.log))

        disk.arm(number, meddle)
        if final:
            world.log.close()
        else:
            world.log.checkpoint()
        steps = max(steps, disk.steps)
        if shown:
            if not final:
                assert everything(world.log) == shown
            for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
                log = world.open(image)
                assert everything(log) == shown, f"before step {number} of {steps}"
                log.checkpoint()
                assert everything(world.open(image.reboot())) == shown, f"before step {number} of {steps}, once more"
        number += stride
    assert steps > 10, "there were steps to come between"


def test_a_seq_acked_while_the_engine_closes_is_not_given_again() -> None:
    """G9, G21. Method: a record of class `disk` is acked before the nth step of a close, and the power fails at once:
    the record may be lost, its seq is taken."""
    steps = number = 1
    while number <= steps:
        disk = InterposingDisk()
        world = EngineHarness(disk, **TINY)
        topic = world.log.topic("a", durability="disk")
        for _ in range(3):
            topic.append([1, 2])
            world.log.checkpoint()
        topic.append(3)
        acked: list[int] = []
        images: list[Any] = []

        def meddle(
            topic: Topic = topic, disk: InterposingDisk = disk, acked: list[int] = acked, images: list[Any] = images
        ) -> None:
            with suppress(Closed):
                acked.append(topic.append("late").last_seq)
            images.extend((disk.crash_image("none"), disk.crash_image("all")))

        disk.arm(number, meddle)
        world.log.close()
        steps = max(steps, disk.steps)
        for image in images:
            found = world.open(image).topic("a")
            if acked:
                late = [record.data for record in found.read().records if record.seq == acked[0]]
                assert late in ([], ["late"])
            assert found.append("other").first_seq > max([7, *acked]), f"before step {number} of {steps}"
        number += 1
    assert steps > 5


@pytest.mark.parametrize("durability", CLASSES)
def test_writing_goes_on_between_checkpoints(durability: str) -> None:
    """G39, with every class, many checkpoints and a kill at the end."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability=durability)
    for number in range(100):
        topic.append(number)
        if number % 3 == 0:
            world.log.checkpoint()
        if number % 10 == 0:
            topic.delete(seqs=[number])
    expected = [number for number in range(100) if (number + 1) % 10 or number == 99]
    assert datas(topic) == expected
    if durability != "ephemeral":
        assert datas(world.restart("kill").topic("a")) == expected


def test_a_topic_dropped_elsewhere_is_not_found_after_a_checkpoint() -> None:
    """G85."""
    world = EngineHarness(**TINY)
    topic = filled(world)
    world.log.drop("a")
    for _ in range(3):
        world.log.checkpoint()
    with pytest.raises(TopicNotFound):
        topic.read()
    assert [state.topic for state in world.restart("crash").topics()] == ["b"]
