"""Bugs where two ways to store topics met: idle topics, backups, the cold tier, rewrites. Listed in docs/bugs.md."""

from __future__ import annotations

from typing import Any

import pytest

import tidelog
from tidelog import backup
from tidelog.database import engine_of
from tidelog.engine import recovery
from tidelog.testing import ManualClock, SimDisk

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
