"""Topics that nothing has used since an open: kept as rows, loaded on first use, and the same for every caller."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.unit.engine.harness import TINY, EngineHarness, datas, read_topic

from tidelog.engine import Engine, manifest, recovery
from tidelog.errors import TopicNotFound
from tidelog.testing import SimDisk

COUNT = 12


@pytest.fixture(autouse=True)
def _any_topic_may_be_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "IDLE_TOPICS_MIN", 0)


def idle_names(log: Engine) -> set[str]:
    return set(log._topics._idle)


def filled(**settings: Any) -> EngineHarness:
    world = EngineHarness(**{**TINY, **settings})
    for number in range(COUNT):
        topic = world.log.topic(f"t{number:02d}", durability=("fsync", "disk", "memory")[number % 3])
        topic.append([number, number + 1, number + 2, number + 3], tag="x")
        topic.append([number + 4, number + 5], tag="x")
        if number % 4 == 1:
            topic.delete(seqs=[5])
        if number % 4 == 2:
            topic.delete(before_seq=3)
    return world


def contents(log: Engine) -> dict[str, Any]:
    return {name: read_topic(log.topic(name, create=False)) for name in log.names()}


def test_topics_are_idle_until_they_are_used_and_read_as_before() -> None:
    world = filled()
    before, states = contents(world.log), world.log.topics()
    log = world.restart("reopen")
    assert idle_names(log) == {state.topic for state in states}
    assert [
        (each.topic, each.head_seq, each.earliest_seq, each.evict_floor, each.count, each.bytes, each.config)
        for each in log.topics()
    ] == [
        (each.topic, each.head_seq, each.earliest_seq, each.evict_floor, each.count, each.bytes, each.config)
        for each in states
    ]
    assert len(idle_names(log)) == COUNT, "a listing loads none"
    assert log._context.quota.used == world.log._context.quota.used == sum(each.bytes for each in states)
    assert contents(log) == before
    assert idle_names(log) == set()
    assert log._context.quota.used == sum(each.bytes for each in states)


def test_totals_of_idle_topics_are_what_the_topics_add_up_to() -> None:
    world = filled()
    world.log.queue("jobs").topic.append([1, 2, 3])
    for name in ("t00", "t01"):
        world.log.topic(name).seal()
    log = world.restart("reopen")

    def check() -> None:
        states = {state.topic: state for state in world.log.topics_cached()}
        idle, totals = [states[name] for name in idle_names(world.log)], world.log.idle_totals
        assert (totals.topics, totals.records, totals.bytes) == (
            len(idle),
            sum(each.count for each in idle),
            sum(each.bytes for each in idle),
        )
        assert +totals.by_class == Counter(each.config.durability for each in idle)
        assert totals.queues == sum(each.config.type == "queue" for each in idle)
        assert {each.topic for each in world.log.loaded_topics_cached()} == states.keys() - idle_names(world.log)

    check()
    assert log.idle_totals.queues == 1
    segments = log.idle_totals.hot_segments
    assert segments >= 2
    hot = log.tier_status().hot_segments
    assert hot > segments, "those of topics that are not idle"
    for name in sorted(idle_names(log)):
        log.topic(name)
        check()
        assert log.tier_status().hot_segments == hot, "counted once, wherever the topic is"
    assert (log.idle_totals.topics, log.idle_totals.hot_bytes) == (0, 0)


def test_a_crash_leaves_topics_without_frames_idle() -> None:
    world = filled()
    world.restart("reopen")
    world.log.topic("t03").append(b"later")
    before = contents(world.crash("none"))
    log = world.restart("kill")
    assert "t03" not in idle_names(log)
    assert len(idle_names(log)) >= COUNT - 2
    assert contents(log) == before
    assert log.topic("t03").append(b"again").first_seq > 6


def test_seqs_that_a_close_gave_back_are_used_although_the_row_is_older() -> None:
    """Class `disk` reserves seqs ahead; its row is not written again by the close, nor by later manifests."""
    world = EngineHarness(**TINY)
    world.log.topic("d", durability="disk").append([1, 2])
    world.log.checkpoint()
    world.restart("reopen")
    world.log.topic("other", durability="fsync").append(1)
    world.log.checkpoint()
    log = world.restart("kill")
    assert log.report.padded == {}
    assert log.topic("d").append(3).first_seq == 3


def test_a_checkpoint_and_a_close_load_no_topic() -> None:
    world = filled()
    log = world.restart("reopen")
    log.topic("t01").append(b"x")
    log.checkpoint()
    assert len(idle_names(log)) == COUNT - 1
    log = world.restart("reopen")
    assert len(idle_names(log)) == COUNT
    assert len(manifest.load_newest(world.disk, "data").topics) >= COUNT


@pytest.mark.parametrize("restart", ["reopen", "kill"])
def test_idle_topics_are_dropped_created_again_and_configured(restart: Any) -> None:
    world = filled()
    log = world.restart("reopen")
    assert log.drop("t05")
    assert log.find("t05") is None
    with pytest.raises(TopicNotFound):
        log.topic("t05", create=False)
    assert log.topic("t05").append("new").first_seq == 1
    assert log.topic("t06", cap_records=2).count == 2
    ids = [topic.id for topic in log.topics()]
    assert len(set(ids)) == len(ids)
    log = world.restart(restart)
    assert datas(log.topic("t05")) == ["new"]
    assert log.topic("t06").count == 2
    assert log.names() == [f"t{number:02d}" for number in range(COUNT)]


def test_names_come_in_pages() -> None:
    world = filled()
    log = world.restart("reopen")
    log.topic("t001")
    log.drop("t02")
    names = log.names()
    assert names == sorted(names)
    assert "t001" in names
    assert "t02" not in names
    paged: list[str] = []
    while page := log.topics("t0", after=paged[-1] if paged else "", limit=3):
        assert len(page) <= 3
        paged += [state.topic for state in page]
    assert paged == [name for name in names if name.startswith("t0")]
    assert list(log.iter_names("t1", "t10")) == ["t11"]
    assert log.topics("nothing") == []


@pytest.mark.parametrize("suffix", [".data", ".idx", ".foot"])
def test_a_lost_file_of_an_idle_topic_is_reported_at_open(suffix: str) -> None:
    world = filled()
    world.log.close()
    disk = world.disk.reboot()
    path = next(path for path in disk.tree() if path.endswith(f"topics/00000004/seg-0000000000000001{suffix}"))
    disk.remove(path)
    log = world.open(disk)
    assert bool(log.report.damage) is (suffix == ".data")
    assert ("t03" in idle_names(log)) is (suffix != ".data")
    if suffix == ".idx":
        assert datas(log.topic("t03")) == [3, 4, 5, 6, 7, 8], "it is rebuilt on first use"
        assert disk.stat(path) is not None
    assert len(idle_names(log)) >= COUNT - 1


def test_leftovers_of_an_idle_topic_are_removed_on_its_first_use() -> None:
    world = filled()
    world.log.close()
    disk = world.disk.reboot()
    left = "data/topics/00000004/seg-0000000000000099.data"
    disk.write_file(left, b"left over")
    disk.write_file("data/topics/000000FF/seg-0000000000000001.data", b"of no topic")
    log = world.open(disk)
    assert disk.stat("data/topics/000000FF") is None
    assert disk.stat(left) is not None
    assert datas(log.topic("t03")) == [3, 4, 5, 6, 7, 8]
    assert disk.stat(left) is None
    assert any(path.endswith("0099.data") for path in log.report.swept)


def test_an_idle_topic_is_loaded_when_its_records_expire_or_its_segment_is_old() -> None:
    world = EngineHarness(**TINY, segment_age_ms_max=60_000)
    world.log.topic("ttl", durability="fsync", ttl_ms=1_000).append([1, 2])
    world.log.topic("old", durability="fsync").append([1, 2])
    world.log.topic("queue", type="queue", durability="fsync").append([1])
    log = world.restart("reopen")
    assert idle_names(log) == {"ttl", "old", "queue"}
    world.clock.tick(500)
    log.tick()
    assert idle_names(log) == {"ttl", "old", "queue"}
    world.clock.tick(1_000)
    log.tick()
    assert idle_names(log) == {"old", "queue"}
    assert (log.topic("ttl").count, log.gaps("ttl")[0].cause) == (0, "ttl")
    world.clock.tick(60_000)
    log.tick()
    assert idle_names(log) == set()
    log.checkpoint()
    rows = {row.name: row for row in manifest.load_newest(world.disk, "data").manifest.topics}
    assert rows["old"].segments[0].sealed


def test_topics_with_groups_routers_or_dead_bytes_are_not_idle() -> None:
    world = filled()
    world.log.topic("t02").delete(seqs=[4])  # of a segment that is sealed: it may be rewritten
    world.log.topic("t00").group("g").commit(1)
    world.log.router("r", "t01", "copies")
    world.log.topic("e", durability="ephemeral").append(1)
    log = world.restart("reopen")
    assert idle_names(log) == {f"t{number:02d}" for number in range(3, COUNT)}
    assert [name for name, _ in log.groups_cached(10)] == ["t00"]
    assert log.find_router("r") is not None


@pytest.mark.parametrize("cut", range(6))
def test_a_power_cut_during_first_uses_loses_nothing(cut: int) -> None:
    world = filled()
    world.restart("reopen")
    disk: SimDisk = world.disk
    before = contents(world.open(disk.reboot()))
    images: list[SimDisk] = []
    disk.on_op = lambda number: (
        images.extend(image.disk for image in disk.images(limit=2)) if number % 6 == cut else None
    )
    for number in range(COUNT):
        world.log.topic(f"t{number:02d}").append(b"more", tag="y")
        if number % 5 == 4:
            world.log.checkpoint()
    disk.on_op = None
    assert images
    for image in images[:: max(len(images) // 12, 1)]:
        log = world.open(image)
        assert log.report.damage == []
        found = contents(log)
        for name, was in before.items():
            assert [record for record in found[name].records if record.tag == "x"] == was.records, name


# Read-only ------------------------------------------------------------------------------------------------


def test_a_reader_loads_topics_on_their_first_use() -> None:
    world = filled()
    world.log.topic("t03").delete(seqs=[2])
    before = contents(world.log)
    world.log.close()
    reader = world.reader()
    assert not reader.report.damage
    assert len(idle_names(reader)) == COUNT
    assert {each.topic: each.count for each in reader.topics()} == {
        name: reader.topic(name, create=False).count for name in before
    }
    assert idle_names(reader) == set()
    assert contents(reader) == before


def test_a_reader_finds_what_the_writer_changed_in_a_topic_that_it_has_not_used() -> None:
    """Topics that were dropped, dropped and made again, appended to, and rewritten after the open of the reader."""
    world = filled(rewrite_dead_percent=0)
    log = world.restart("reopen")
    reader = world.reader()
    assert idle_names(reader) >= {"t00", "t03", "t06", "t09"}
    log.drop("t00")
    log.drop("t03")
    log.topic("t03", durability="fsync").append(b"of the new one")
    log.topic("t06").append(b"later")
    log.topic("t09").seal()
    log.topic("t09").delete(seqs=[1, 2])
    for _ in range(3):
        log.checkpoint()
        log.tick()
    log.rewrite("t09", force=True)
    for _ in range(3):
        log.topic("t06").append(b"later still")
        log.checkpoint()
    assert [record.seq for record in reader.topic("t09", create=False).read().records] == [3, 4, 6]
    assert datas(reader.topic("t03", create=False)) == [b"of the new one"]
    with pytest.raises(TopicNotFound):
        reader.topic("t00", create=False).read()
    assert reader.topic("t06", create=False).read().records[0].seq == 3
    assert not reader.report.damage
    assert reader.health().ok
    reader.refresh()
    assert contents(reader) == contents(log)


def test_a_reader_reports_a_lost_file_of_a_topic_on_its_first_use() -> None:
    world = filled()
    world.log.close()
    reader = world.reader()
    (path,) = (path for path in world.disk.tree() if path.endswith("00000004/seg-0000000000000001.data"))
    world.disk.remove(path)
    assert reader.health().ok
    reader.topic("t03", create=False)
    assert not reader.health().ok
    assert any(path in each for each in reader.report.damage)


def test_a_topic_that_is_dropped_while_a_reader_opens_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The WAL is read before the files: the drop is in neither."""
    world = filled()
    log = world.restart("reopen")
    log.topic("t05").append(b"in the WAL")
    find, pending = recovery._find_idle_topics, [True]

    def drop_first(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        if pending and not options["writable"]:
            pending.clear()
            log.drop("t05")
            log.tick()
        return found

    monkeypatch.setattr(recovery, "_find_idle_topics", drop_first)
    reader = world.reader()
    assert not pending
    assert not reader.report.damage
    assert "t05" not in reader.names()


def test_topics_in_the_cold_tier_are_idle() -> None:
    world = EngineHarness(**TINY, cold="cold", hot_retain_segments=0)
    for number in range(4):
        topic = world.log.topic(f"t{number}", durability="fsync")
        topic.append([number] * 9)
        topic.seal()
    world.log.relocate()
    before = contents(world.log)
    for log in (world.restart("reopen"), world.reader()):
        assert len(idle_names(log)) == 4
        status = log.tier_status()
        assert (status.cold_segments, status.hot_segments) == (len(log.segment_places()), 0)
    log = world.restart("reopen")
    log._tiers.run()
    assert len(idle_names(log)) == 4, "nothing is to be moved"
    log.drop("t0")
    log._tiers.relocate([])
    assert not [path for path in world.disk.tree() if path.startswith("cold/topics/00000001")]
    assert contents(log) == {name: rows for name, rows in before.items() if name != "t0"}
