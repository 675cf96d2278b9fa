"""Backups of a whole database: what they hold, what they refuse, and how damage is found."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

import tidelog
from tidelog import backup
from tidelog.database import engine_of
from tidelog.disk import backup_store, segment_store
from tidelog.engine import manifest
from tidelog.engine.backup import create_backup
from tidelog.engine.backup_target import PRUNE_KEY, BackupTarget, manifest_key, running_key
from tidelog.errors import (
    AlreadyExists,
    BackupIncomplete,
    BackupNotFound,
    BadInput,
    Busy,
    Corrupt,
    Damaged,
    NewerFormat,
    ReadOnly,
    WriteFailed,
)
from tidelog.formats import backup_manifest, batch, frame, small_files
from tidelog.formats.rows import iter_records
from tidelog.testing import ManualClock, SimDisk

TINY: dict[str, Any] = {"segment_events_max": 8, "wal_file_bytes": 4096, "head_reserve": 4}
TARGET = "backups"


def open_database(disk: SimDisk, path: str = "data", **settings: Any) -> tidelog.Database:
    return tidelog.open(path, disk=disk, clock=ManualClock(), threads=False, **TINY, **settings)


def fill(db: tidelog.Database) -> None:
    orders = db.topic("orders", durability="fsync")
    for number in range(5):
        orders.append([b"%d %d" % (number, place) for place in range(7)], tag=f"t{number}")
    orders.delete(match="t1")
    orders.group("billing").commit(12)
    db.topic("capped", cap_records=5).append([b"%d" % number for number in range(9)])
    jobs = db.queue("jobs")
    db.topic("jobs", create=False).append([b"one", b"two", b"three"])
    first, *_ = jobs.claim("worker-1", 2)
    jobs.ack("worker-1", first)
    db.router("audit", "orders", "copies")
    orders.append(b"routed")
    channel = db.channel("!room@example.com", user="ann@example.com")
    channel.join(persist=True)
    channel.publish(b"hello")
    channel.publish(b"again")
    db.checkpoint()
    orders.append([b"in the WAL", b"only"])


def view(db: tidelog.Database) -> dict[str, Any]:
    topics = {
        info.topic: (
            info.config,
            info.evict_floor,
            [
                (record.seq, record.ts_ms, record.data, record.tag)
                for record in db.topic(info.topic).read(0, 500).records
            ],
        )
        for info in db.topics()
    }
    channel = db.channel("!room@example.com")
    return {
        "topics": topics,
        "groups": db.topic("orders").group("billing").state()._replace(head_seq=0),
        "jobs": db.queue("jobs").counts(),
        "routers": [state._replace(created=False) for state in db.routers()],
        "gaps": [(row.topic, row.cause, row.first, row.last, row.records) for row in db.gaps()],
        "messages": channel.history(),
        "members": channel.members(),
    }


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def db(disk: SimDisk) -> tidelog.Database:
    db = open_database(disk)
    fill(db)
    return db


def test_a_restored_database_has_topics_queues_routers_groups_gaps_and_channels(
    db: tidelog.Database, disk: SimDisk
) -> None:
    db.tick()
    expected = view(db)
    made = db.backup(TARGET)
    db.topic("orders").append(b"later")
    db.channel("!room@example.com", user="ann@example.com").publish(b"later")
    db.drop("capped")
    result = backup.restore(TARGET, "new", disk=disk)
    assert (result.id, result.channels, result.topics["orders"]) == (made.id, 1, 38)
    restored = open_database(disk, "new")
    assert not restored.report.damage
    found = view(restored)
    for part in ("topics", "groups", "routers", "gaps", "messages", "members"):
        assert found[part] == expected[part], part
    assert found["jobs"].ready + found["jobs"].in_flight == expected["jobs"].ready + expected["jobs"].in_flight == 2
    restored.topic("orders").append(b"routed too")
    restored.tick()
    assert restored.topic("copies").read(0, 100).records[-1].data == b"routed too"


def test_restored_topics_have_a_new_epoch_that_survives_a_restart(db: tidelog.Database, disk: SimDisk) -> None:
    db.backup(TARGET)
    backup.restore(TARGET, "new", disk=disk)
    backup.restore(TARGET, "other", disk=disk)
    epochs = set()
    for path in ("data", "new", "other"):
        epoch = db.topic("orders").epoch if path == "data" else 0
        for _ in range(2 if not epoch else 0):
            restored = open_database(disk, path)
            assert epoch in (0, restored.topic("orders").epoch)
            epoch = restored.topic("orders").epoch
            assert restored.topic("new", durability="fsync").epoch == restored.topic("new").id
            restored.close()
        epochs.add(epoch)
    assert len(epochs) == 3
    assert all(epoch < 1 << 53 for epoch in epochs)


def test_an_incremental_backup_stores_only_what_changed(db: tidelog.Database, disk: SimDisk) -> None:
    db.checkpoint()
    full = db.backup(TARGET)
    db.topic("orders").append(b"one more")
    changed = db.backup(TARGET, incremental=True)
    assert (full.parent, changed.parent) == (None, full.id)
    assert changed.stored_bytes < full.stored_bytes
    assert changed.bytes > changed.stored_bytes
    backup.prune(TARGET, keep=1, disk=disk)
    assert backup.verify(TARGET, disk=disk).problems == []
    backup.restore(TARGET, "new", disk=disk)
    assert open_database(disk, "new").topic("orders").read(0, 100).records[-1].data == b"one more"


def test_a_chain_survives_the_prune_of_its_middle(db: tidelog.Database, disk: SimDisk) -> None:
    clock_ms = []
    for number in range(4):
        db.topic("orders").append(b"backup %d" % number)
        db.checkpoint()
        clock_ms.append(db.backup(TARGET, incremental=True).id)
    target = BackupTarget.open(TARGET, disk)
    for middle in clock_ms[1:3]:
        target.store.delete(manifest_key(middle))
    assert backup.prune(TARGET, keep=2, disk=disk).kept == [clock_ms[0], clock_ms[3]]
    for each in (clock_ms[0], clock_ms[3]):
        assert backup.verify(TARGET, each, disk=disk).problems == []


def test_every_flipped_bit_and_every_lost_file_of_a_backup_is_found(db: tidelog.Database, disk: SimDisk) -> None:
    db.backup(TARGET, link=False)
    random = Random(0)
    keys = [path for path in disk.tree() if path.startswith(f"{TARGET}/objects/")]
    assert len(keys) > 10
    restored = random.sample(keys, 6)
    for path in keys:
        name = path.removeprefix(f"{TARGET}/")
        content = disk.read_file(path)
        damaged = disk.reboot()
        if content:
            damaged.flip_bit(path, random.randrange(len(content)), random.randrange(8))
            (problem,) = backup.verify(TARGET, disk=damaged).problems
            assert name in problem
            if path in restored:
                with pytest.raises(Corrupt, match="checksum"):
                    backup.restore(TARGET, "new", disk=damaged)
                assert set(damaged.list_dir("new")) <= {".tidelog.lock"}, "a failed restore left files"
        lost = disk.reboot()
        lost.remove(path)
        (problem,) = backup.verify(TARGET, disk=lost).problems
        assert name in problem
        with pytest.raises(Corrupt, match="missing"):
            backup.restore(TARGET, "new", disk=lost)
        assert lost.stat("new") is None
    manifest = next(path for path in disk.tree() if path.endswith(".manifest"))
    for pos in random.sample(range(len(disk.read_file(manifest))), 20):
        damaged = disk.reboot()
        damaged.flip_bit(manifest, pos, random.randrange(8))
        with pytest.raises((Corrupt, NewerFormat)):
            backup.verify(TARGET, disk=damaged)
        assert backup.list_backups(TARGET, disk=damaged).unreadable


def test_damage_of_the_source_is_found_and_can_be_accepted(db: tidelog.Database, disk: SimDisk) -> None:
    db.topic("orders").seal()
    db.checkpoint()
    path = next(path for path in disk.tree() if path.startswith("data/topics/") and path.endswith(".data"))
    disk.flip_bit(path, 20, 1)
    with pytest.raises(Corrupt, match=path):
        db.backup(TARGET)
    assert backup.list_backups(TARGET, disk=disk).backups == []
    made = db.backup(TARGET, accept_damage=True)
    assert any(path.removeprefix("data/") in line for line in made.damaged)
    assert backup.restore(TARGET, "new", disk=disk).notes


# What is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("data", "data directory"),
        ("data/backups", "data directory"),
        ("http://127.0.0.1:4000", "server"),
        ("nowhere://bucket/x", "no segment store"),
    ],
)
def test_a_target_that_cannot_be_is_refused(db: tidelog.Database, disk: SimDisk, target: str, words: str) -> None:
    before = disk.digest()
    with pytest.raises(BadInput, match=words):
        db.backup(target)
    assert disk.digest() == before


def test_a_target_with_other_files_or_of_another_database_is_refused(db: tidelog.Database, disk: SimDisk) -> None:
    disk.write_file("full/letter.txt", b"dear")
    with pytest.raises(BadInput, match=r"letter\.txt"):
        db.backup("full")
    other = open_database(disk, "other")
    other.topic("x").append(b"1")
    other.backup(TARGET)
    with pytest.raises(BadInput, match="another database"):
        db.backup(TARGET)
    assert len(backup.list_backups(TARGET, disk=disk).backups) == 1


def test_a_target_that_cannot_be_written_is_an_error_and_the_next_backup_succeeds(
    db: tidelog.Database, disk: SimDisk
) -> None:
    disk.fail("create", at=3, path=TARGET)
    with pytest.raises(WriteFailed, match=TARGET):
        db.backup(TARGET)
    assert backup.list_backups(TARGET, disk=disk).backups == []
    assert db.backup(TARGET).id in {info.id for info in backup.list_backups(TARGET, disk=disk).backups}
    assert backup.verify(TARGET, disk=disk).problems == []


def test_a_read_only_database_makes_no_backup(db: tidelog.Database, disk: SimDisk) -> None:
    del db
    with pytest.raises(ReadOnly):
        open_database(disk.reboot(), read_only=True).backup(TARGET)


def test_one_backup_is_made_at_a_time(db: tidelog.Database) -> None:
    with engine_of(db).exclusive_backup(), pytest.raises(Busy, match="already"):
        db.backup(TARGET)


def test_a_directory_that_holds_something_is_not_restored_to(db: tidelog.Database, disk: SimDisk) -> None:
    db.backup(TARGET)
    disk.write_file("full/letter.txt", b"dear")
    for place in ("full", "data"):
        before = disk.digest()
        with pytest.raises(AlreadyExists, match="nothing was restored"):
            backup.restore(TARGET, place, disk=disk)
        assert disk.digest() == before
    with pytest.raises(BadInput, match="inside the backups"):
        backup.restore(TARGET, f"{TARGET}/new", disk=disk)


def test_a_backup_that_is_not_whole_or_not_there_is_not_restored(db: tidelog.Database, disk: SimDisk) -> None:
    with pytest.raises(BackupNotFound):
        backup.restore(TARGET, "new", disk=disk)
    made = db.backup(TARGET)
    for wrong in ("20200101T000000000Z-000000", "../etc", "x"):
        with pytest.raises(BackupNotFound):
            backup.restore(TARGET, "new", backup_id=wrong, disk=disk)
    target = BackupTarget.open(TARGET, disk)
    target.store.delete(manifest_key(made.id))
    target.store.put(running_key(made.id), [b""])
    for wanted in (made.id, None):
        with pytest.raises(BackupIncomplete, match=made.id):
            backup.restore(TARGET, "new", backup_id=wanted, disk=disk)
    assert backup.list_backups(TARGET, disk=disk).unfinished == [made.id]
    assert disk.stat("new") is None


def test_a_backup_of_a_newer_format_is_refused(db: tidelog.Database, disk: SimDisk) -> None:
    made = db.backup(TARGET)
    path = f"{TARGET}/{manifest_key(made.id)}"
    body = small_files.unwrap_file(b"TLBM", 1, disk.read_file(path), "it")
    disk.write_file(path, small_files.wrap_file(b"TLBM", 2, body))
    with pytest.raises(NewerFormat, match="upgrade"):
        backup.restore(TARGET, "new", disk=disk)
    manifest = backup_manifest.decode_backup(small_files.wrap_file(b"TLBM", 1, body), "it")
    inner = small_files.wrap_snapshot(msgspec.msgpack.encode([]), version=small_files.CHAIN_VERSION + 1)
    newer = msgspec.structs.replace(manifest, engine_manifest=inner)
    disk.write_file(path, backup_manifest.encode_backup(newer))
    with pytest.raises(NewerFormat, match="upgrade"):
        backup.restore(TARGET, "new", disk=disk)
    assert disk.stat("new") is None


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "topics/../../x", "topics//x", "a\0b", ""])
def test_a_manifest_cannot_lead_out_of_the_directory(db: tidelog.Database, disk: SimDisk, path: str) -> None:
    made = db.backup(TARGET)
    name = f"{TARGET}/{manifest_key(made.id)}"
    manifest = backup_manifest.decode_backup(disk.read_file(name), "it")
    bad = msgspec.structs.replace(manifest, files=(backup_manifest.BackupFile(path, 0, "0" * 32),))
    disk.write_file(name, backup_manifest.encode_backup(bad))
    with pytest.raises(Corrupt, match="no path of a backup"):
        backup.restore(TARGET, "new", disk=disk)


def test_create_and_prune_exclude_each_other(db: tidelog.Database, disk: SimDisk) -> None:
    made = db.backup(TARGET)
    target = BackupTarget.open(TARGET, disk)
    target.store.put(PRUNE_KEY, [b""])
    with pytest.raises(Busy, match="prune"):
        db.backup(TARGET)
    assert backup.prune(TARGET, keep=1, disk=disk).kept == [made.id]
    target.store.put(running_key("29990101T000000000Z-000000"), [b""])
    with pytest.raises(Busy, match="being made"):
        backup.prune(TARGET, keep=1, disk=disk)
    db.backup(TARGET)  # removes the stale marker
    assert backup.prune(TARGET, keep=1, disk=disk).removed == [made.id]


def test_a_prune_that_finds_a_damaged_manifest_keeps_no_backup_out(db: tidelog.Database, disk: SimDisk) -> None:
    """It left its marker, and could never remove it: no further backup was made."""
    made = db.backup(TARGET)
    path = f"{TARGET}/{manifest_key(made.id)}"
    content = disk.read_file(path)
    disk.flip_bit(path, len(content) // 2, 1)
    with pytest.raises(Corrupt, match="give the backup up"):
        backup.prune(TARGET, keep=1, disk=disk)
    newer = db.backup(TARGET)
    disk.remove(path)
    assert backup.prune(TARGET, keep=1, disk=disk).kept == [newer.id]
    assert not backup.verify(TARGET, disk=disk).problems


def test_a_prune_without_a_rule_and_cuts_that_cannot_be_are_refused(db: tidelog.Database, disk: SimDisk) -> None:
    made = db.backup(TARGET)
    for keep in (None, 0):
        with pytest.raises(BadInput, match="nothing was removed"):
            backup.prune(TARGET, keep=keep, disk=disk)
    wrong_cuts: list[dict[str, Any]] = [
        {"to_seq": {"nothing": 1}},
        {"to_seq": {"orders": 10_000}},
        {"to_seq": {"orders": -1}},
        {"to_time_ms": made.created_ms + 1},
    ]
    for cut in wrong_cuts:
        with pytest.raises(BadInput, match="nothing was restored"):
            backup.restore(TARGET, "new", disk=disk, **cut)
    assert disk.stat("new") is None


def test_an_unfinished_restore_is_not_opened_and_can_be_repeated(db: tidelog.Database, disk: SimDisk) -> None:
    db.backup(TARGET)
    disk.write_file("new/RESTORING", b"x\n")
    disk.write_file("new/topics/00000001/seg-0000000000000001.data", b"part")
    for read_only in (True, False):
        with pytest.raises(Damaged, match="unfinished restore"):
            open_database(disk, "new", read_only=read_only)
    backup.restore(TARGET, "new", disk=disk)
    assert open_database(disk, "new").topic("orders").head_seq >= 38


# On a file system -----------------------------------------------------------------------------------------


def test_sealed_files_are_linked_and_files_that_change_are_copied(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data"), segment_events_max=8) as db:
        topic = db.topic("orders", durability="fsync")
        for number in range(20):
            topic.append([b"%d" % number] * 4)
        db.checkpoint()
        db.checkpoint()
        db.backup(str(tmp_path / "linked"))
        links = {path.name: path.stat().st_nlink for path in (tmp_path / "linked").rglob("*") if path.is_file()}
    sealed = [name for name in links if ".foot." not in name and name.startswith("seg-") and links[name] > 1]
    assert len(sealed) >= 10
    assert all(count == 1 for name, count in links.items() if name.startswith("wal-") or ".del." in name)
    assert backup.verify(str(tmp_path / "linked")).problems == []


def test_spark_reads_a_restored_log_in_place(tmp_path: Path) -> None:
    from contextlib import closing

    from tidelog.spark.backends.directory import DirectoryBackend

    with tidelog.open(str(tmp_path / "data"), segment_events_max=8) as db:
        db.topic("orders", durability="fsync").append([b"%d" % number for number in range(30)])
        db.backup(str(tmp_path / TARGET))
    backup.restore(str(tmp_path / TARGET), str(tmp_path / "new"))
    with closing(DirectoryBackend(str(tmp_path / "new"))) as place:
        snapshot = place.snapshot("orders")
        assert snapshot is not None
        assert snapshot.epoch > 1 << 32
        assert snapshot.next_seq == 31


def test_a_bucket_is_a_target(db: tidelog.Database, disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment stores have tests of their own, against a real server; here one of them stands for a bucket."""
    bucket = segment_store.DirectoryStore(SimDisk(), "bucket")
    monkeypatch.setattr(backup_store, "open_store", lambda *_, **__: bucket)
    made = db.backup("s3://bucket/backups")
    db.topic("orders").append(b"one more")
    more = db.backup("s3://bucket/backups", incremental=True)
    assert backup.verify("s3://bucket/backups", disk=disk).problems == []
    assert backup.prune("s3://bucket/backups", keep=1, disk=disk).removed == [made.id]
    assert backup.restore("s3://bucket/backups", "new", disk=disk).id == more.id
    assert open_database(disk, "new").topic("orders").read(0, 100).records[-1].data == b"one more"


def test_large_records_are_in_a_backup_with_their_blobs(disk: SimDisk) -> None:
    db = open_database(disk)
    topic = db.topic("files", durability="fsync", max_record_bytes=1 << 22)
    content = bytes(range(256)) * 2000
    topic.append_stream([content[:1000], content[1000:]])
    topic.append(b"small")
    topic.append_stream([content[::-1]])
    db.backup(TARGET)
    backup.restore(TARGET, "new", disk=disk)
    backup.restore(TARGET, "cut", disk=disk, to_seq={"files": 2})
    for path, expected in (("new", [content, b"small", content[::-1]]), ("cut", [content, b"small"])):
        restored = open_database(disk, path)
        assert not restored.report.damage
        found = [
            each.data if isinstance(each.data, bytes) else each.data.read()
            for each in restored.topic("files").read().records
        ]
        assert found == expected


# Frames that a cut divides --------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [{}, {"tags": True}, {"tags": True, "nodes": True, "metas": True, "kinds": True}])
def test_the_first_records_of_a_batch_are_encoded_as_they_were(columns: dict[str, bool]) -> None:
    datas = [b"", b"one", b"two two", b"3" * 40]
    given: dict[str, Any] = {
        "tags": [b"t%d" % number for number in range(4)],
        "nodes": [b"", b"n", b"", b"node"],
        "metas": [b"{}", b"", b'{"k":1}', b""],
        "kinds": bytes((0, 1, 0, 1)),
    }
    (encoded,) = batch.encode_many(
        7, 10, 99, datas, **{name: given[name] for name in columns}, tag=b"" if columns else b"all"
    )
    parsed = frame.read_frame(encoded, 0, len(encoded))
    assert isinstance(parsed, frame.Frame)
    whole = batch.decode(encoded, parsed)
    assert batch.take_first(encoded, parsed, 4) == encoded
    for count in range(1, 4):
        cut = batch.take_first(encoded, parsed, count)
        read = frame.read_frame(cut, 0, len(cut))
        assert isinstance(read, frame.Frame)
        assert read.end == len(cut)
        rows = batch.decode(cut, read)
        assert not isinstance(rows, frame.Fault)
        assert not isinstance(whole, frame.Fault)
        assert list(iter_records(rows)) == list(iter_records(whole))[:count]


def test_create_backup_reports_progress(db: tidelog.Database) -> None:
    seen: list[tuple[str, int, int]] = []
    create_backup(engine_of(db), TARGET, progress=lambda *step: seen.append(step))
    assert seen
    assert seen[-1][1] == seen[-1][2]


def test_a_backup_keeps_to_its_rate(disk: SimDisk) -> None:
    clock, pauses = ManualClock(), list[float]()
    db = tidelog.open("data", disk=disk, clock=clock, threads=False, **TINY)
    db.topic("orders", durability="fsync").append([b"x" * 500] * 20)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.tick(round(seconds * 1000) + 1)

    made = create_backup(engine_of(db), TARGET, rate_bytes_per_s=1000, pause=pause)
    assert made.bytes / 1000 * 0.9 <= sum(pauses) <= made.bytes / 1000 * 1.1 + 1
    with pytest.raises(BadInput, match="rate"):
        db.backup(TARGET, rate_bytes_per_s=0)


# Topics that are dropped meanwhile ------------------------------------------------------------------------


def test_a_topic_that_is_dropped_while_its_files_are_copied_is_in_the_backup() -> None:
    disk = SimDisk()
    with open_database(disk) as db:
        fill(db)
        dropped = False

        def drop(*_: object) -> None:
            nonlocal dropped
            if not dropped:
                dropped = db.drop("capped")
                engine_of(db).tick()
                db.checkpoint()
                db.checkpoint()
                engine_of(db).tick()

        info = create_backup(engine_of(db), TARGET, progress=drop)
        assert dropped
        assert "capped" in info.topics
        assert "capped" not in db
    backup.restore(TARGET, "new", disk=disk)
    with open_database(disk, "new") as db:
        assert [record.data for record in db.topic("capped").read().records] == [
            b"%d" % number for number in range(4, 9)
        ]


def test_a_topic_that_is_dropped_after_the_manifest_was_read_is_not_in_the_backup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, load = SimDisk(), manifest.load_newest
    with open_database(disk) as db:
        fill(db)

        def load_and_drop(*args: Any) -> Any:
            loaded = load(*args)
            monkeypatch.setattr(manifest, "load_newest", load)
            assert db.drop("capped")
            return loaded

        monkeypatch.setattr(manifest, "load_newest", load_and_drop)
        info = create_backup(engine_of(db), TARGET)
        assert "capped" not in info.topics
        assert "orders" in info.topics
    backup.restore(TARGET, "new", disk=disk)
    with open_database(disk, "new") as db:
        assert "capped" not in db
        assert db.topic("orders", create=False).head_seq > 0
