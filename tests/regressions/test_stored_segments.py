"""Bugs where two ways to store topics met: idle topics, backups, the cold tier, rewrites. Listed in docs/bugs.md."""

from __future__ import annotations

from typing import Any

import pytest

import tidelog
from tidelog import backup
from tidelog.database import engine_of
from tidelog.engine import recovery
from tidelog.engine.check import check_directory
from tidelog.engine.erase import ErasureIncomplete
from tidelog.errors import BadInput, Corrupt, StoreUnavailable, WrongStore
from tidelog.testing import ManualClock, SimDisk, SimStore

TINY: dict[str, Any] = {"segment_events_max": 8, "wal_file_bytes": 4096, "head_reserve": 4}


def open_database(disk: SimDisk, path: str = "data", **settings: Any) -> tidelog.Database:
    return tidelog.open(path, disk=disk, clock=ManualClock(), threads=False, **TINY, **settings)


def read_all(topic: tidelog.Topic) -> list[tuple[int, object]]:
    return [(record.seq, record.data) for record in topic.read(0, 1000).records]


def test_backup_has_topics_that_nothing_used_since_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "IDLE_TOPICS_MIN", 0)
    disk = SimDisk()
    with open_database(disk) as db:
        for name in ("used", "idle", "other"):
            db.topic(name, durability="fsync").append([b"%d" % number for number in range(20)])
    for number in range(2):  # the manifest before no longer differs in the others
        with open_database(disk) as db:
            db.topic("used").append(b"%d" % number)
            db.checkpoint()
    with open_database(disk) as db:
        db.topic("used").append(b"last")
        assert set(engine_of(db)._topics._idle) == {"idle", "other"}
        made = db.backup("backups")
        incremental = db.backup("backups", incremental=True)
        expected = {name: read_all(db.topic(name)) for name in db.names()}
    assert made.topics == incremental.topics == {"used": 23, "idle": 20, "other": 20}
    for made_backup, path in ((made, "first"), (incremental, "second")):
        assert not backup.verify("backups", made_backup.id, disk=disk).problems
        backup.restore("backups", path, backup_id=made_backup.id, disk=disk)
        with open_database(disk, path) as restored:
            assert not restored.report.damage
            assert {name: read_all(restored.topic(name)) for name in restored.names()} == expected


def test_erasure_completes_in_a_directory_that_was_backed_up() -> None:
    disk = SimDisk()
    with open_database(disk) as db:
        topic = db.topic("t", durability="fsync")
        topic.append([b"kept", b"secret", b"kept too"])
        made = db.backup("backups")
        receipt = topic.erase(seqs=[2])
        assert receipt.records == 1
        assert db.verify_erasures(receipt).ok
        assert db.backup("backups").database_id == made.database_id, "its id is not erased"


def test_rewrite_reads_a_cold_segment_whose_mapping_was_dropped() -> None:
    disk = SimDisk()
    settings: dict[str, Any] = {"cold": "cold", "hot_retain_segments": 0, "maps_max": 1}
    with open_database(disk, **settings) as db:
        topic = db.topic("t", durability="fsync")
        for _ in range(4):
            topic.append([b"%d" % number * 50 for number in range(8)])
        db.checkpoint()
        assert db.relocate().segments == 4
        topic.delete(seqs=[1, 2, 12])
        expected = read_all(topic)
    with open_database(disk, **settings) as db:
        done = db.topic("t").rewrite(force=True)
        assert ([file.base for file in done.files], done.skipped) == ([1, 9], ())
        assert read_all(db.topic("t")) == expected
        assert not db.health().corrupt


def test_recall_of_a_segment_that_is_rewritten_meanwhile_removes_no_named_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest does not name the object yet: the data file is all that a start after a crash has."""
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        topic = db.topic("t", durability="fsync")
        topic.append([b"%d" % number * 50 for number in range(8)])
        topic.append(b"active")
        db.checkpoint()
        topic.delete(seqs=[3])
        expected = read_all(topic)
        engine = engine_of(db)
        state = engine.find_topic("t")
        assert state is not None
        assert engine._tiers.relocate([state]).segments == 1
        sync_dir, pending = disk.sync_dir, [True]

        def sync_after_a_rewrite(path: str) -> None:
            if pending and path.endswith("00000001"):
                pending.clear()
                assert engine._rewriter.rewrite(state, force=True).segments == 1
            sync_dir(path)

        monkeypatch.setattr(disk, "sync_dir", sync_after_a_rewrite)
        assert engine._tiers.recall([state]).segments == 0
        assert not pending
        crashed = disk.crash_image("all")
    with open_database(crashed, cold="cold") as db:
        assert not db.report.damage
        assert read_all(db.topic("t")) == expected


def test_compaction_goes_on_after_a_restore_to_a_seq_before_its_progress() -> None:
    disk, clock = SimDisk(), ManualClock()
    with open_database(disk) as db:
        topic = db.topic("t", durability="fsync", compaction="latest_by_tag")
        for number in range(40):
            topic.append(b"%d" % number, tag="once" if number == 3 else f"k{number % 4}")
        assert topic.compact().compacted_to == 40
        db.checkpoint()
        db.backup("backups")
    result = backup.restore("backups", "new", to_seq={"t": 20}, disk=disk)
    assert [note.partition(":")[0] for note in result.notes] == ["t"], "older values of the other keys are gone"
    with tidelog.open("new", disk=disk, clock=clock, threads=False, **TINY) as db:
        topic = db.topic("t")
        assert read_all(topic) == [(4, b"3")]
        for number in range(12):
            topic.append(b"new %d" % number, tag="k0")
        db.checkpoint()
        clock.tick(10_000_000)
        db.tick()
        assert [seq for seq, _ in read_all(topic)] == [4, 32]


def test_rewritten_segments_move_to_the_cold_tier_again_and_recalled_ones_stay() -> None:
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        topic = db.topic("t", durability="fsync")
        for _ in range(3):
            topic.append([b"%d" % number * 50 for number in range(8)])
        db.checkpoint()
        assert db.relocate().segments == 3
        assert db.recall(first_seq=17).segments == 1
        topic.delete(seqs=[1, 9, 17])
        assert topic.rewrite(force=True).segments == 3
        engine_of(db)._tiers._due_ms = 0
        engine_of(db)._tiers.run()
        places = db.segment_places("t")
        assert [(place.tier, place.is_recalled) for place in places] == [
            ("both", False),
            ("both", False),
            ("hot", True),
        ]


@pytest.mark.parametrize("change", ["rewrite", "recall"])
def test_a_read_goes_on_in_the_new_files_if_its_cold_object_is_deleted_meanwhile(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0, cold_cache_bytes=0) as db:
        topic = db.topic("t", durability="fsync")
        topic.append([b"%d" % number * 50 for number in range(8)])
        db.checkpoint()
        assert db.relocate().segments == 1
        topic.delete(seqs=[3])
        cold, pending = engine_of(db).context.cold, [True]
        fetch = cold.read

        def recall() -> object:
            monkeypatch.setattr(cold, "read", fetch)
            return db.recall()

        def change_first(*args: Any) -> memoryview:
            if pending:
                pending.clear()
                _ = topic.rewrite(force=True) if change == "rewrite" else recall()
                engine_of(db)._tiers.relocate([])  # deletes what no manifest names
            return fetch(*args)

        monkeypatch.setattr(cold, "read", change_first)
        assert [seq for seq, _ in read_all(topic)] == [1, 2, 4, 5, 6, 7, 8]
        assert not db.health().corrupt


def test_backup_has_a_topic_that_is_dropped_after_it_was_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its object was deleted between the listing and the pin of the snapshot, and the backup failed."""
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        db.topic("kept").append(b"kept")
        db.topic("t", durability="fsync").append([b"%d" % number * 50 for number in range(8)])
        db.checkpoint()
        assert db.relocate().segments == 1
        engine = engine_of(db)
        list_ids = engine._list_topic_ids

        def drop_after_listing() -> set[int]:
            listed = list_ids()
            db.drop("t")
            engine._tiers.relocate([])  # deletes what no manifest names
            return listed

        monkeypatch.setattr(engine, "_list_topic_ids", drop_after_listing)
        made = db.backup("backups")
    assert set(made.topics) == {"kept"}
    assert not backup.verify("backups", disk=disk).problems
    backup.restore("backups", "new", disk=disk)
    with open_database(disk, "new") as db:
        assert db.names() == ["kept"]
        assert not db.report.damage


@pytest.mark.parametrize("missing", ["used", "idle"])
def test_verify_finds_a_topic_that_the_list_of_a_backup_lacks(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list was taken as it was: files of a topic that is not in it were not looked for."""
    disk = SimDisk()
    with open_database(disk) as db:
        for name in ("used", "idle"):
            db.topic(name, durability="fsync").append([b"x"] * 20)
        db.checkpoint()
        db.topic("used").append(b"in the WAL")
        db.topic("dropped").append(b"x")
        db.drop("dropped")
        assert not backup.verify("backups", db.backup("backups").id, disk=disk).problems
        engine = engine_of(db)
        state = engine.find_topic(missing)
        assert state is not None
        list_ids = engine._list_topic_ids
        monkeypatch.setattr(engine, "_list_topic_ids", lambda: list_ids() - {state.id})
        made = db.backup("backups")
    (problem,) = backup.verify("backups", made.id, disk=disk).problems
    assert problem.startswith(f"topic {missing}: the backup lists no topic")


def test_delete_waits_for_no_store_if_the_segments_moved_after_compaction_was_set() -> None:
    """Segments that were sealed before had no key file, and their objects were read for their keys."""
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        topic = db.topic("t", durability="fsync")
        for _ in range(3):
            topic.append([b"%d" % number * 50 for number in range(8)], tag="a")
        db.checkpoint()
        topic = db.topic("t", compaction="latest_by_tag")
        assert db.relocate().segments == 3
        topic.append(b"new", tag="a")
        topic.delete(seqs=[25])
        assert topic.count == 0, "the older values of its key went with it"
        assert engine_of(db).context.cold.reads == 0


def test_delete_in_segments_that_moved_before_compaction_was_set_needs_the_store_until_the_first_compaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0, cold_cache_bytes=0) as db:
        topic = db.topic("t", durability="fsync")
        for _ in range(3):
            topic.append([b"%d" % number * 50 for number in range(8)], tag="a")
        db.checkpoint()
        assert db.relocate().segments == 3
        topic = db.topic("t", compaction="latest_by_tag")
        topic.append([b"new", b"newest"], tag="a")
        store = engine_of(db).context.cold
        read = store.read

        def fail(*_: object) -> memoryview:
            raise StoreUnavailable("cold", "it is away")

        monkeypatch.setattr(store, "read", fail)
        with pytest.raises(StoreUnavailable, match="nothing was changed"):
            topic.delete(seqs=[26])
        assert topic.count == 26
        assert topic.append(b"goes on", tag="b").first_seq == 27
        monkeypatch.setattr(store, "read", read)
        assert topic.compact().records == 25, "26 replaced them"
        monkeypatch.setattr(store, "read", fail)
        topic.delete(seqs=[26])
        assert [record.seq for record in topic.read(24).records] == [27]


def test_erasure_removes_what_an_interrupted_copy_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that a kill cut short has a temporary name, which no listing of the store shows."""
    disk = SimDisk()

    class Killed(BaseException):
        pass

    def kill(source: str, target: str) -> None:
        if source.startswith("cold/topics/"):
            raise Killed
        rename(source, target)

    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        topic = db.topic("t", durability="fsync")
        topic.append([b"needle %d" % number * 50 for number in range(8)])
        topic.append(b"active")
        db.checkpoint()
        rename = disk.rename
        monkeypatch.setattr(disk, "rename", kill)
        with pytest.raises(Killed):
            db.relocate()
        killed = disk.reboot()
        monkeypatch.undo()
    (left,) = (path for path in killed.tree() if path.startswith("cold/topics/"))
    with open_database(killed, cold="cold", hot_retain_segments=9) as db:
        receipt = db.topic("t").erase(seqs=list(range(1, 9)))
    assert left in {file.path for file in receipt.files}
    assert not [path for path, content in killed.tree().items() if b"needle" in content]


def test_next_start_removes_what_an_interrupted_copy_left_in_the_store() -> None:
    disk = SimDisk()
    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        db.topic("t", durability="fsync").append([b"%d" % number * 50 for number in range(8)])
        db.checkpoint()
        assert db.relocate().segments == 1
    disk.write_file("cold/topics/00000001/seg-0000000000000009.data.abc.tmp", b"cut")
    with open_database(disk, cold="cold") as db:
        engine_of(db)._tiers.run()
        assert [path for path in disk.tree() if path.endswith(".tmp")] == []
        assert len(read_all(db.topic("t"))) == 8


def moved(disk: SimDisk, **settings: Any) -> list[tuple[int, object]]:
    """Two segments of a topic in the store `cold`; return its records."""
    with open_database(disk, cold="cold", hot_retain_segments=0, **settings) as db:
        topic = db.topic("t", durability="fsync")
        for part in (b"a", b"b"):
            topic.append([b"%s%d" % (part, number) * 50 for number in range(8)])
        topic.append(b"active")
        db.checkpoint()
        assert db.relocate().segments == 2
        return read_all(topic)


@pytest.mark.parametrize("other", ["empty", "of another database"])
def test_a_store_that_is_not_the_right_one_is_not_damage(other: str) -> None:
    """An empty mount point and the store of another database were reported as lost objects: `check` found damage, and
    health said corrupt."""
    disk = SimDisk()
    moved(disk)
    if other == "empty":
        disk.make_dir("elsewhere")
    else:
        with open_database(disk, "second", cold="elsewhere", hot_retain_segments=0) as db:
            db.topic("t").append([b"x"] * 8)
    with pytest.raises(WrongStore, match=r"no marker|another database"):
        open_database(disk, cold="elsewhere", read_only=True)
    disk.rename("cold", "kept")
    disk.rename("elsewhere", "cold")
    for task in ("read", "backup"):
        with open_database(disk, cold="cold", read_only=True) as db:
            with pytest.raises(StoreUnavailable, match=r"no marker|another database"):
                _ = db.topic("t").read(0, 1) if task == "read" else db.topic("t").to_arrow()
            assert db.topic("t").read(16).records[0].data == b"active"
            assert db.health().ok
    for full in (False, True):
        report = check_directory("data", disk=disk, cold="cold", full=full)
        found = list(report)
        assert [(each.kind, each.damage) for each in found] == [("cold", False)] * 2
        assert "not verified" in found[0].reason


def files_of(disk: SimDisk, directory: str) -> dict[str, bytes]:
    return {path: content for path, content in disk.tree().items() if path.startswith(f"{directory}/")}


@pytest.mark.parametrize("place", ["other", "other/topics", "backups"])
def test_a_place_that_something_else_uses_is_no_cold_store(place: str) -> None:
    """The writer of another data directory removed the objects at its next start: it knew no topic of their ids."""
    disk = SimDisk()
    with open_database(disk, "other") as db:
        db.topic("theirs").append(b"x")
        db.backup("backups")
    with open_database(disk) as db:
        for name in "tu":
            db.topic(name, durability="fsync").append([b"%d" % number for number in range(20)])
    before = files_of(disk, place)
    with pytest.raises((BadInput, WrongStore), match=r"data directory|backups; nothing was changed") as caught:
        open_database(disk, cold=place, hot_retain_segments=0)
    assert "choose another" in str(caught.value)
    assert files_of(disk, place) == before
    with open_database(disk) as db:
        assert len(read_all(db.topic("u"))) == 20


def test_a_copy_of_a_data_directory_in_a_bucket_is_no_cold_store() -> None:
    disk, store = SimDisk(), SimStore()
    with open_database(disk, "other") as db:
        db.topic("theirs").append(b"x")
    store.objects = {path.removeprefix("other/"): content for path, content in files_of(disk, "other").items()}
    before = dict(store.objects)
    with pytest.raises(WrongStore, match="is a data directory"):
        open_database(disk, cold_store=store)
    assert store.objects == before


@pytest.mark.parametrize("place", ["data", "data/cold", "data/topics"])
def test_a_cold_store_in_the_data_directory_is_refused(place: str) -> None:
    disk = SimDisk()
    with open_database(disk) as db:
        db.topic("t").append(b"x")
    before = disk.tree()
    with pytest.raises(BadInput, match="in the data directory"):
        open_database(disk, cold=place)
    assert disk.tree() == before
    with open_database(disk, cold="data-cold") as db:
        assert read_all(db.topic("t")) == [(1, b"x")]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_backup_that_accepts_damage_goes_on_after_an_object_that_does_not_read(compression: str, damage: str) -> None:
    disk = SimDisk()
    expected = moved(disk, cold_compression=compression)
    first, _ = sorted(path for path in disk.tree() if path.startswith("cold/topics/"))
    if damage == "missing":
        disk.remove(first)
    else:
        disk.flip_bit(first, 40, 1)
    with open_database(disk) as db:
        with pytest.raises(Corrupt):
            db.backup("backups")
        made = db.backup("backups", accept_damage=True)
        assert len(made.damaged) == 1
        assert made.damaged[0].startswith("topics/00000001/seg-0000000000000001.data")
    backup.restore("backups", "new", disk=disk)
    with open_database(disk, "new", accept_loss=True) as db:
        with pytest.raises(Corrupt):
            db.topic("t").read(0, 1)
        assert [(record.seq, record.data) for record in db.topic("t").read(8).records] == expected[-9:]


def test_an_erasure_of_a_lost_object_is_incomplete_until_it_is_back() -> None:
    disk = SimDisk()
    moved(disk)
    first, _ = sorted(path for path in disk.tree() if path.startswith("cold/topics/"))
    content = disk.read_file(first)
    disk.remove(first)
    with open_database(disk, cold="cold") as db:
        topic = db.topic("t")
        for _ in range(2):
            with pytest.raises(ErasureIncomplete, match="no receipt was written"):
                topic.erase(seqs=[2])
        disk.write_file(first, content)
        assert topic.erase(seqs=[2]).records_before == 1
        assert [seq for seq, _ in read_all(topic)] == [1, *range(3, 18)]


def test_an_erasure_beside_a_store_that_is_not_mounted_does_not_say_that_nothing_changed() -> None:
    disk = SimDisk()
    moved(disk)
    with open_database(disk, cold="cold", hot_retain_segments=0) as db:
        topic = db.topic("t")
        disk.rename("cold", "away")
        with pytest.raises(ErasureIncomplete, match="the records are deleted"):
            topic.erase(seqs=[17])
        assert topic.count == 16
        disk.rename("away", "cold")
        assert topic.erase(seqs=[17]).number == 1


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_latest_is_the_same_where_segments_are_in_the_cold_tier(compression: str) -> None:
    disk = SimDisk()
    settings: dict[str, Any] = {"cold": "cold", "hot_retain_segments": 0, "cold_compression": compression}

    def table(db: tidelog.Database) -> dict[str, int]:
        latest = db.topic("t").latest()
        pages = [latest.page(3)]
        while pages[-1].next_after is not None:
            pages.append(latest.page(3, pages[-1].next_after))
        found = {each.key: each.record.seq for page in pages for each in page.records}
        assert found == {each.key: each.record.seq for each in latest}
        assert sorted(found.values()) == latest.to_arrow().column("seq").to_pylist()
        assert all((record := latest.get(key)) is not None and record.seq == seq for key, seq in found.items())
        return found

    with open_database(disk, **settings) as db:
        topic = db.topic("t", durability="fsync", compaction="/id")
        for number in range(41):
            topic.append({"id": number % 11, "n": number})
        db.checkpoint()
        before = table(db)
        assert db.relocate().segments == 5
        assert table(db) == before
    with open_database(disk, **settings) as db:
        assert table(db) == before
        assert db.topic("t").latest("gone") is None
        first = before.pop("8")  # its newest record is in the cold tier
        db.topic("t").delete(seqs=[first])
        assert table(db) == before
        assert db.topic("t").compact().records == 41 - 3 - len(before)  # the older ones of key 8 went with it
        assert table(db) == before
        db.topic("t").rewrite(force=True)
        db.relocate()
        assert table(db) == before
    with open_database(disk, read_only=True, cold="cold") as reader:
        assert table(reader) == before
