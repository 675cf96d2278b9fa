"""Bugs that backups could have, planted one by one: each is found by the tests of `test_backup` and its neighbours."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from tests.crash.topics.backups import TARGET, back_up, check_restored, fill, step
from tests.crash.topics.reader import RuleViolated
from tests.crash.topics.test_backup_crashes import run_create, run_prune
from tests.crash.topics.workloads import OPERATIONS, EngineHarness, batch, checkpoint, reopen

from tidelog.disk.backup_store import DirectoryStore
from tidelog.engine import backup, backup_target
from tidelog.engine.backup_target import BackupTarget, PruneResult, verify_backup
from tidelog.engine.manifest import SegmentRow, TopicRow
from tidelog.engine.results import Progress
from tidelog.engine.snapshot import EngineSnapshot, FilePins, SegmentFile
from tidelog.errors import Error
from tidelog.formats.backup_manifest import BackupFile, encode_backup, object_key

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
