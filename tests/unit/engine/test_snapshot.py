"""What a snapshot holds, what a checkpoint does to the disk, and which topics it may leave out (G29, G39, G41, G62)."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.engine.harness import RESTARTS, TINY, EngineHarness, Restart, datas, seqs

from tidelog.engine import Engine, checkpoint, manifest, retention
from tidelog.engine.topic_state import TopicState
from tidelog.errors import DiskFull, Forked, WriteFailed
from tidelog.wal import CommitFuture


def known(log: Engine) -> dict[str, object]:
    """Records, settings, floors, groups, writers, leases, routers and removals of the topics below."""
    found: dict[str, object] = {state.topic: replace(state, last_read_ms=None) for state in log.topics()}
    found["pages"] = [
        (page.records, page.gap) for page in (log.topic(name).read(0, 100) for name in ("a", "b", "jobs"))
    ]
    topic, queue = log.topic("a"), log.queue("jobs", create=False)
    found["groups"] = [(group.name, group.position, group.hold_bytes) for group in topic.groups()]
    found["writer"] = topic.producer_batches("etl")
    found["queue"] = queue.counts()
    found["routers"] = log.routers()
    found["gaps"] = [(gap.topic, gap.cause, gap.first, gap.last, gap.records, gap.bytes) for gap in log.gaps()]
    return found


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_snapshot_holds_all_that_topics_know(restart: Restart) -> None:
    """Method: topics with all that a row can hold; a checkpoint before it, so that rows change, and two after it, so
    that the WAL has nothing of it any more."""
    world = EngineHarness(**TINY)
    log = world.log
    topic = log.topic("a", durability="fsync", cap_records=8)
    topic.append([1, 2, 3])
    log.topic("b", durability="fsync")
    log.router("r", "a", "b")
    log.queue("jobs", durability="fsync", leases_durable=True)
    log.checkpoint()
    log.topic("a", cap_bytes=5_000)
    tables = [pa.table({"data": [b"x", b"y"]})]
    topic.append_numbered(tables, writer="etl", number=7, sum=(1, 2))
    topic.append("once", key="a key")
    topic.append(list(range(10)))
    topic.delete(seqs=[14])
    topic.group("g").commit(12)
    topic.group("held").begin("earliest", hold_bytes=1_000)
    jobs = log.queue("jobs", create=False)
    jobs.put(["one", "two", "three"])
    _, second = jobs.claim("node", 2)
    jobs.nack("node", [second.seq], delay_ms=60_000)
    log.tick()
    before = known(log)
    for _ in range(2):
        log.checkpoint()
        assert known(log) == before
    log = world.restart(restart)
    assert known(log) == before
    again = log.topic("a").append("again", key="a key")
    assert (again.deduped, again.first_seq) == (True, 6)
    assert log.topic("a").append_numbered(tables, writer="etl", number=7, sum=(1, 2)).deduped
    assert [job.data for job in log.queue("jobs", create=False).claim("other", 5)] == ["three"]
    assert log.topic("a").append("next").first_seq == 17
    log.tick()
    assert log.topic("b").head_seq == 14, "the router was made after three records"


def test_a_row_claims_nothing_of_records_that_came_after_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are written and deleted between the copying and the row: its floors end with its head."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync", cap_records=5)
    topic.append([1, 2, 3])
    write = checkpoint._write_topic

    def written(core: TopicState, *rest: Any) -> None:
        write(core, *rest)
        if core is topic._state:
            topic.append(list(range(9)))
            topic.delete(before_seq=topic.head_seq + 1)

    monkeypatch.setattr(checkpoint, "_write_topic", written)
    world.log.checkpoint()
    row = next(row for row in manifest.load_newest(world.disk, "data").manifest.topics if row.name == "a")
    assert (row.head, row.earliest, row.cap_mark) == (3, 4, 3)
    log = world.restart("kill")
    assert (log.topic("a").head_seq, log.topic("a").earliest_seq, log.topic("a").evict_floor) == (12, 13, 8)


# ── the disk ──────────────────────────────────────────────────────────────────────────────────────


def test_files_that_a_checkpoint_removed_stay_gone_after_a_power_cut() -> None:
    """The directory is synced: freed space is not taken again."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(4)))
    topic.append(list(range(4)))
    world.log.checkpoint()
    place = f"topics/{topic.id:08X}/"
    before = world.files(under=place)
    topic.delete(before_seq=5)
    world.log.checkpoint()
    world.log.checkpoint()
    left = [path for path in world.disk.crash_image("none").tree() if path.startswith(f"data/{place}")]
    assert left == [path for path in before if f"seg-{5:016d}" in path]


@pytest.mark.parametrize("restart", ["kill", "crash"])
def test_a_restart_keeps_files_that_only_the_snapshot_before_names(restart: Any) -> None:
    """The newest one may turn out not to read."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(list(range(4)))
    topic.append(list(range(4)))
    world.log.checkpoint()
    topic.delete(before_seq=5)
    world.log.checkpoint()
    first = f"data/topics/{topic.id:08X}/seg-{1:016d}.data"
    log = world.restart(restart)
    assert first in world.files()
    disk = world.disk.reboot()
    disk.write_file(sorted(world.files(".bin", "meta"))[-1], b"no snapshot")
    again = world.open(disk)
    assert seqs(again.topic("a")) == seqs(log.topic("a")) == [5, 6, 7, 8]
    assert again.report.damage == []


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("copied", [1, 100, 1 << 20])
def test_the_index_of_an_intact_segment_is_written_once(
    copied: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment is verified before its footer is written, in one piece or in several; only an index that does not fit
    is made again."""
    monkeypatch.setattr(checkpoint, "_COPY_CHUNK_BYTES", copied)
    world = EngineHarness(segment_events_max=24)
    topic = world.log.topic("a", durability="fsync")
    for number in range(60 // batch):
        topic.append([b"%d" % number * 20] * batch, tag="t")
    world.log.checkpoint()
    assert len(world.files(".foot")) == len(world.files(".tag")) == 2
    assert [words for words in world.disk.trace if "rename" in words and ".idx" in words] == []
    assert world.log.health().ok
    assert len(seqs(world.restart("kill").topic("a"))) == 60 // batch * batch


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_pauses_after_each_piece(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get the disk after each piece that is copied, after each that is verified, and after each footer."""
    world = EngineHarness(segment_events_max=12)
    topic = world.log.topic("a", durability="fsync")
    for _ in range(12):
        topic.append(bytes(100))
    monkeypatch.setattr(checkpoint, "_COPY_CHUNK_BYTES", size * topic.bytes // 12)
    pauses: list[int] = []
    monkeypatch.setattr(world.log._checkpoints, "_throttle", lambda: lambda: pauses.append(world.disk.op_count))
    world.log.checkpoint()
    assert len(world.files(".foot")) == 1
    copied = [words for words in world.disk.trace if words.startswith("write") and words.find(".data") > 0]
    assert len(copied) >= 12 // size
    assert len(pauses) >= 2 * (12 // size) + 1
    assert len({at for at in pauses if at}) >= 12 // size


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_reader_makes_no_checkpoint(snapshot: bool) -> None:
    world = EngineHarness()
    world.log.topic("a", durability="fsync").append([1, 2, 3])
    if snapshot:
        world.log.checkpoint()
    disk = world.disk.reboot()
    before = disk.op_count, disk.digest()
    with world.reader(disk) as reader:
        assert datas(reader.topic("a")) == [1, 2, 3]
    assert (disk.op_count, disk.digest()) == before


@pytest.mark.parametrize("suffix", [".data", ".idx"])
@pytest.mark.parametrize("base", [1, 5])
def test_a_checkpoint_on_a_full_disk_frees_its_partial_copies(base: int, suffix: str) -> None:
    """Files of a growing segment are as long as the snapshot says, also where it is not the first one."""
    world = EngineHarness(segment_events_max=4)
    topic = world.log.topic("a", durability="fsync")
    for number in range(base):
        topic.append(number)
    world.log.checkpoint()
    place = f"topics/{topic.id:08X}/seg-{base:016d}"
    before = {path: world.disk.read_file(path) for path in world.files(under=place)}
    assert len(before) == 2
    topic.append([1, 2])
    world.disk.fail("sync", error=errno.ENOSPC, path=f"{place}{suffix}", times=None)
    with pytest.raises(DiskFull):
        world.log.checkpoint()
    assert {path: world.disk.read_file(path) for path in world.files(under=place)} == before
    world.disk.clear_faults()
    world.log.checkpoint()
    assert len(seqs(world.restart("crash").topic("a"))) == base + 2


def test_deletes_are_synced_before_their_file_is_written() -> None:
    """Replay may find the file without the frame of a delete that was not synced when it was acked."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="memory")
    topic.append([1, 2, 3])
    world.log.checkpoint()
    topic.delete(seqs=[2])
    start = len(world.disk.trace)
    world.log.checkpoint()
    words = world.disk.trace[start:]
    before = words[: next(number for number, said in enumerate(words) if ".del" in said)]
    assert [said for said in before if said.startswith("sync") and "/wal/" in said]


@pytest.mark.parametrize("left", [None, 0, 39, 100])
def test_an_index_that_was_lost_is_made_again_before_it_grows(left: int | None) -> None:
    """The data is whole: no record is hidden by zeros where its entry was."""
    world = EngineHarness()
    world.log.topic("a", durability="fsync").append(list(range(6)))
    world.log.checkpoint()
    log = world.restart("kill")
    path = world.files(".idx")[0]
    if left is None:
        world.disk.remove(path)
    else:
        world.disk.write_file(path, world.disk.read_file(path)[:left])
    log.topic("a").append(6)
    log.checkpoint()
    assert len(world.disk.read_file(path)) == 7 * 20
    assert datas(log.topic("a")) == list(range(7))
    again = world.restart("crash")
    assert datas(again.topic("a")) == list(range(7))
    assert again.report.rebuilt == []


@pytest.mark.parametrize("keep", ["none", "all"])
def test_a_power_cut_after_a_checkpoint_leaves_no_index_to_rebuild(keep: Any) -> None:
    """Indexes are synced before a snapshot names them."""
    world = EngineHarness(**TINY)
    for number in range(7):
        world.log.topic("a", durability="fsync").append(number)
    world.log.checkpoint()
    log = world.crash(keep)
    assert log.report.rebuilt == []
    assert log.report.clean, log.report.lines()


# ── topics that are left out ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["a", "m", "z"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_floor_that_cannot_be_made_durable_leaves_out_its_topic_alone(
    shards: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = EngineHarness(wal_shards=shards)
    log = world.log
    topics = {each: log.topic(each, durability="fsync", cap_records=2) for each in ("a", "m", "z")}
    for topic in topics.values():
        topic.append([b"x"] * 5)
    begin = retention._submit_floor

    def failing(core: TopicState, expiry: int) -> CommitFuture[int]:
        if core.name == name:
            raise RuntimeError("a bug")
        return begin(core, expiry)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_submit_floor", failing)
        with pytest.raises(WriteFailed, match=f"left out {name} "):
            log.checkpoint()
    assert log.health().lagging == (name,)
    assert {each for each, topic in topics.items() if not topic.segments().segments} == {name}
    for image in (world.disk.reboot(), world.disk.crash_image("none")):
        again = world.open(image)
        assert {each: seqs(again.topic(each)) for each in topics} == {each: [4, 5] for each in topics}
    log.checkpoint()
    assert log.health().lagging == ()


def test_a_new_topic_without_records_that_is_left_out_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineHarness()
    before = world.log.topic("a", durability="fsync").state()
    world.log.topic("b", durability="fsync").append(1)
    write = checkpoint._write_topic

    def failing(core: TopicState, *rest: Any) -> None:
        if core.name == "a":
            raise RuntimeError("a bug")
        write(core, *rest)

    monkeypatch.setattr(checkpoint, "_write_topic", failing)
    with pytest.raises(WriteFailed, match="left out a "):
        world.log.checkpoint()
    log = world.restart("kill")
    assert log.topic("a").state() == before
    assert log.topic("a").append(1).first_seq == 1


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_topic_dropped_before_a_checkpoint_that_could_write_none_stays_gone(
    restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint lets replay start after the drop: its manifest must be without the row."""
    world = EngineHarness()
    log = world.log
    for name in ("a", "b"):
        log.topic(name, durability="fsync").append(1)
    log.checkpoint()
    log.drop("a")
    log.topic("b").append(2)

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "a bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_topic", failing)
        with pytest.raises(WriteFailed, match="left out"):
            log.checkpoint()
    log.checkpoint()
    log = world.restart(restart)
    assert [info.topic for info in log.topics()] == ["b"]
    assert datas(log.topic("b")) == [1, 2]
    assert log.topic("a").append(1).first_seq == 1


@pytest.mark.parametrize("place", ["_submit_floor", "_write_topic"])
def test_a_checkpoint_in_a_fork_leaves_out_no_topic_and_writes_no_snapshot(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = EngineHarness()
    log = world.log
    for name in ("a", "m"):
        log.topic(name, durability="fsync", cap_records=2).append([b"x"] * 5)

    def forked(*_: object) -> None:
        raise Forked("data", pid=1)

    monkeypatch.setattr(retention if place == "_submit_floor" else checkpoint, place, forked)
    with pytest.raises(Forked):
        log.checkpoint()
    assert log.health().ok
    assert world.files(under="meta/") == []


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["s", "d"])
def test_routers_of_a_new_topic_that_cannot_be_written_survive_a_restart(name: str, shards: int) -> None:
    """The row that stands for it in the manifest holds no router frame: replay finds all of them."""
    world = EngineHarness(wal_shards=shards)
    log = world.log
    source, target = (log.topic(each, durability="fsync") for each in "sd")
    log.router("r", "s", "d")
    source.append([b"1", b"2"])
    log.tick()
    place = {"s": source.id, "d": target.id}[name]
    world.disk.fail("create", error=errno.EIO, path=f"topics/{place:08X}/", times=None)
    for _ in range(2):
        with pytest.raises(WriteFailed, match=f"left out {name} "):
            log.checkpoint()
    again = world.open(world.disk.reboot())
    assert [each.router for each in again.routers()] == ["r"]
    again.topic("s").append(b"3")
    again.tick()
    found = again.topic("d", create=False).read(0).records
    assert [(record.seq, record.data) for record in found] == [(1, b"1"), (2, b"2"), (3, b"3")]


def test_a_snapshot_does_not_grow_with_what_routers_have_passed_on() -> None:
    """A source remembers deleted, lost and copied seqs for its routers only from the newest snapshot on."""
    world = EngineHarness(segment_events_max=4)
    log = world.log
    source, middle, _ = (log.topic(each, durability="fsync", cap_records=4) for each in "sde")
    log.router("r", "s", "d")
    log.router("q", "d", "e")
    sizes = []
    for number in range(6):
        source.append([number] * 6)
        log.tick()
        middle.append([0] * (number % 2 + 1))
        for topic in (source, middle):
            topic.delete(seqs=[topic.head_seq - 1])
        log.tick()
        log.checkpoint()
        rows = manifest.load_newest(world.disk, "data").manifest.topics
        sizes.append(sum(len(row.ghosts) + len(row.hops) + len(row.trims) for row in rows))
    assert max(sizes[3:]) <= max(sizes[:3])
