"""Bugs that backups and restores could have, planted one by one: each is found by the tests of `test_backup` and its
neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import msgspec
import pytest
from tests.crash.topics.backups import TARGET, back_up, check_restored, fill, step
from tests.crash.topics.reader import RuleViolated
from tests.crash.topics.test_backup import run_cut
from tests.crash.topics.test_backup_crashes import run_create, run_prune, run_restore
from tests.crash.topics.workloads import OPERATIONS, EngineHarness, batch, checkpoint, reopen

import tidelog
from tidelog.disk.backup_store import DirectoryStore
from tidelog.disk.durability import replace_file
from tidelog.disk.interface import Disk, parent_dir
from tidelog.engine import backup, backup_target, restore
from tidelog.engine.backup_target import BackupTarget, PruneResult, verify_backup
from tidelog.engine.manifest import SegmentRow, TopicRow
from tidelog.engine.restore import restore_backup
from tidelog.engine.results import Progress
from tidelog.engine.snapshot import EngineSnapshot, FilePins, SegmentFile
from tidelog.engine.startup import RESTORING_FILE
from tidelog.errors import Corrupt, Error
from tidelog.formats.backup_manifest import BackupFile, BackupManifest, encode_backup, object_key
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.simulated_disk import SimFile

FAILURES = (AssertionError, RuleViolated, Error)


def test_link_of_a_file_that_is_written_in_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files = EngineSnapshot.segment_files

    def all_final(self: EngineSnapshot, row: TopicRow, segment: SegmentRow) -> list[SegmentFile]:
        return [file._replace(is_final=True) for file in files(self, row, segment)]

    monkeypatch.setattr(EngineSnapshot, "segment_files", all_final)
    harness, random = fill("planted link", shards=1)
    for _ in range(2):
        step(harness, random, [batch])
    back_up(harness, random, meanwhile=0)
    assert not verify_backup(TARGET, disk=harness.disk).problems
    for _ in range(4):
        step(harness, random, [batch])
        harness.checkpoint()
    assert verify_backup(TARGET, disk=harness.disk).problems


def test_manifest_that_is_written_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = backup._Creation._announce

    def announce_with_manifest(self: backup._Creation, backup_id: str) -> None:
        announce(self, backup_id)
        newest = self._target.newest()
        assert newest is not None
        missing = BackupFile("topics/00000001/later", 1, "0" * 32)
        listed = msgspec.structs.replace(newest, id=backup_id, files=(*newest.files, missing))
        self._store.put(backup_target.manifest_key(backup_id), [encode_backup(listed)])

    monkeypatch.setattr(backup._Creation, "_announce", announce_with_manifest)
    with pytest.raises(FAILURES):
        run_create(0, True, every=5)


def test_manifest_that_is_not_ordered_after_its_objects_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectoryStore, "flush", lambda _: None)
    with pytest.raises(FAILURES):
        run_create(0, False, every=2)


def test_new_directories_that_are_not_synced_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = DirectoryStore._prepare

    def prepare_without_directories_above(self: DirectoryStore, key: str) -> str:
        path = prepare(self, key)
        self._unsynced.discard(parent_dir(parent_dir(path)))
        return path

    monkeypatch.setattr(DirectoryStore, "_prepare", prepare_without_directories_above)
    with pytest.raises(FAILURES):
        run_create(0, False, every=2)


def burst(harness: EngineHarness, name: str, random: Random) -> None:
    """Deletes in sealed segments, more than a WAL file of records, and checkpoints that make files obsolete."""
    names = [each for each, life in harness.oracle.lives.items() if life.id is not None]
    for each in names:
        harness.topic(each)
        now = harness.oracle.lives[each].now
        if each == names[0]:
            harness.delete(each, before_seq=now.head)
        else:
            harness.delete(each, seqs=sorted({random.randint(1, now.head + 1) for _ in range(6)}))
        for _ in range(6):
            batch(harness, each, random)
    for _ in range(3):
        checkpoint(harness, name, random)


def back_up_and_restore(seed: int) -> None:
    harness, random = fill(f"planted pin {seed}", shards=2, letters=4)
    for _ in range(2):
        burst(harness, "", random)
    taken = back_up(harness, random, meanwhile=1, operations=[burst], link=False, bursts_max=2)
    check_restored(harness.disk, taken, 2)


def test_files_stay_while_a_busy_engine_is_backed_up() -> None:
    back_up_and_restore(0)


@pytest.mark.parametrize("pin", ["hold_segments", "hold_wal", "before_replace"])
def test_missing_pin_is_found(pin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = (lambda *_: None) if pin == "before_replace" else property(lambda _: False)
    monkeypatch.setattr(FilePins, pin, fake)
    with pytest.raises(FAILURES):
        back_up_and_restore(0)


def test_prune_that_removes_objects_of_newer_backups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prune = backup_target._prune

    def greedy(target: BackupTarget, keep: int | None, older: int | None, progress: Progress) -> PruneResult:
        manifests = [target.load(backup_id) for backup_id in target.ids()[:-1]]
        result = prune(target, keep, older, progress)
        for manifest in manifests:
            for file in manifest.files:
                target.store.delete(object_key(file))
        return result

    monkeypatch.setattr(backup_target, "_prune", greedy)
    with pytest.raises(FAILURES):
        run_prune(0, every=3)


def test_snapshot_without_a_common_instant_of_all_shards_is_not_used() -> None:
    """The positions of all shards are taken while no commit runs: each is the end of a commit."""
    harness, random = fill("instant", shards=2)
    for _ in range(6):
        step(harness, random, [each for each in OPERATIONS if each is not reopen])
    snapshot = harness.log.take_snapshot()
    try:
        ends = {shard.writer.position for shard in harness.log.shards}
        assert set(snapshot.positions.values()) == ends
        assert all(not shard.commits.commit_lock.locked() for shard in harness.log.shards)
    finally:
        snapshot.release()


# ── restore ───────────────────────────────────────────────────────────────────────────────────────


def an_unfinished_restore_has_no_marker(patch: pytest.MonkeyPatch) -> None:
    def replace_others(disk: Disk, path: str, data: bytes) -> None:
        if not path.endswith(RESTORING_FILE):
            replace_file(disk, path, data)

    patch.setattr(restore, "replace_file", replace_others)


def restored_files_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    sync = SimFile.sync
    patch.setattr(SimFile, "sync", lambda self: None if self.path.startswith("restored/topics/") else sync(self))


def names_of_restored_files_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    sync = SimDisk.sync_dir
    patch.setattr(
        SimDisk, "sync_dir", lambda self, path: None if path.startswith("restored/topics/") else sync(self, path)
    )


@pytest.mark.parametrize(
    "bug",
    [an_unfinished_restore_has_no_marker, restored_files_are_not_synced, names_of_restored_files_are_not_synced],
)
def test_restore_that_a_crash_leaves_in_parts_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((*FAILURES, pytest.fail.Exception)):
        run_restore(0, False, every=3)


def test_cut_that_keeps_a_record_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = restore._check_cut

    def one_more(manifest: BackupManifest, to_seq: Mapping[str, int]) -> dict[int, int]:
        heads = {topic.id: topic.head for topic in manifest.topics}
        return {topic: min(seq + 1, heads[topic]) for topic, seq in check(manifest, to_seq).items()}

    monkeypatch.setattr(restore, "_check_cut", one_more)
    with pytest.raises(FAILURES):
        run_cut(0, 1)


def restore_again(disk: SimDisk) -> None:
    """Two restores of one backup, each with topics that no reader takes for those of another directory."""
    epochs = [set[int]()]
    for path in ("first", "second"):
        restore_backup(TARGET, path, disk=disk)
        with tidelog.open(path, disk=disk, clock=ManualClock(), threads=False, read_only=True) as db:
            epochs.append({db.topic(name).epoch for name in db.names()})
    assert not epochs[1] & epochs[2]


def test_restored_topics_with_the_epochs_of_the_original_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, random = fill("epochs", shards=1, letters=3)
    back_up(harness, random, meanwhile=0)
    restore_again(harness.disk.reboot())
    monkeypatch.setattr(restore._Restore, "_with_epochs", lambda _, loaded: loaded)
    with pytest.raises(FAILURES):
        restore_again(harness.disk.reboot())


def restore_damaged(disk: SimDisk) -> None:
    objects = {path: content for path, content in disk.tree().items() if path.startswith(f"{TARGET}/objects/")}
    disk.flip_bit(max(objects, key=lambda path: len(objects[path])), 10, 0)
    with pytest.raises(Corrupt, match="checksum"):
        restore_backup(TARGET, "damaged", disk=disk)


def test_restore_that_does_not_compare_checksums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, random = fill("checksums", shards=1, letters=6)
    back_up(harness, random, meanwhile=0)
    restore_damaged(harness.disk.reboot())
    monkeypatch.setattr(restore, "object_problem", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        restore_damaged(harness.disk.reboot())
