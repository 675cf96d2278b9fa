"""Backups in a bucket of a real S3 server: made, verified, damaged, pruned and restored; and a server that is away."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from tests.kit.s3 import S3Server

import tidelog
from tidelog import backup
from tidelog.disk.memory import MemoryDisk
from tidelog.disk.segment_store import open_store
from tidelog.errors import Corrupt, StoreDenied, StoreUnavailable


def test_backups_go_straight_to_a_bucket_and_back(s3_server: S3Server, tmp_path: Path) -> None:
    target = s3_server.url(f"backup/{uuid4().hex}")
    with tidelog.open(str(tmp_path / "data"), segment_events_max=50) as db:
        topic = db.topic("orders", durability="fsync")
        for number in range(10):
            topic.append([b"%d " % number * 200] * 20)
        channel = db.channel("!room@example.com", user="ann@example.com")
        channel.join(persist=True)
        channel.publish(b"hello")
        full = db.backup(target)
        topic.append(b"one more")
        more = db.backup(target, incremental=True)
        assert more.stored_bytes < full.stored_bytes
        with pytest.raises((StoreDenied, StoreUnavailable)):
            db.backup(s3_server.url("backup/denied", secret="wrong"))
    assert [info.id for info in backup.list_backups(target).backups] == [full.id, more.id]
    assert backup.prune(target, keep=1).removed == [full.id]
    assert backup.verify(target).problems == []
    backup.restore(target, str(tmp_path / "new"))
    with tidelog.open(str(tmp_path / "new")) as db:
        assert db.topic("orders").read(200).records[0].data == b"one more"
        assert db.channel("!room@example.com").history().messages[0].payload == b"hello"
    store = open_store(target, disk=MemoryDisk())
    damaged = next(each.key for each in store.list("objects") if ".data." in each.key)
    store.put(damaged, [b"\0" * (store.length(damaged) or 0)])
    assert any(damaged in problem for problem in backup.verify(target).problems)
    with pytest.raises(Corrupt, match="checksum"):
        backup.restore(target, str(tmp_path / "other"))


def test_a_server_that_is_away_is_an_error_and_the_database_goes_on(own_s3_server: S3Server, tmp_path: Path) -> None:
    target = own_s3_server.url("backup")
    with tidelog.open(str(tmp_path / "data")) as db:
        db.topic("orders").append(b"first")
        made = db.backup(target)
        own_s3_server.stop()
        with pytest.raises(StoreUnavailable):
            db.backup(target)
        db.topic("orders").append(b"second")
        own_s3_server.start()
        more = db.backup(target, incremental=True)
        assert [info.id for info in backup.list_backups(target).backups] == [made.id, more.id]
        assert not backup.list_backups(target).unfinished
