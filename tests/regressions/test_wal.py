"""Bugs of the WAL that were found once, one test each; docs/bugs.md says when and by what."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine
from tidelog.errors import Damaged
from tidelog.formats import control_frames, frame
from tidelog.testing import ManualClock, SimDisk

PATH = "data"


def opened(disk: SimDisk, *, shards: int = 1, **more: Any) -> Engine:
    return engine_of(tidelog.open(PATH, disk=disk, clock=ManualClock(), threads=False, wal_shards=shards, **more))


def frames_of(disk: SimDisk, path: str) -> list[frame.Frame]:
    """Every frame of a WAL file that is still whole."""
    content, pos, found = disk.read_file(path), 0, []
    while isinstance(each := frame.read_frame(content, pos, len(content)), frame.Frame):
        found.append(each)
        pos = each.end
    return found


def wal_files(disk: SimDisk) -> list[str]:
    return sorted(path for path in disk.tree() if path.endswith(".log"))


def frame_of(disk: SimDisk, path: str, data: bytes) -> frame.Frame:
    content = disk.read_file(path)
    return next(each for each in frames_of(disk, path) if content[each.data_pos : each.data_end] == data)


def data_of(log: Engine, name: str) -> dict[int, object]:
    return {each.seq: each.data for each in log.topic(name, create=False).read(0, 1000).records}


@pytest.mark.parametrize("place", ["header", "length", "body", "checksum"])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
def test_one_bad_frame_takes_only_its_own_record(durability: str, place: str) -> None:
    """A flipped bit among 100 synced records left 10 of them, was reported as harmless, and seq 11 was given again."""
    disk = SimDisk()
    log = opened(disk)
    log.topic("t", durability=durability)
    log.topic("other", durability="fsync")
    for number in range(1, 101):
        log.topic("t").append(b"t%d" % number)
        log.topic("other").append(b"o%d" % number)
        log.tick()
    disk = disk.reboot()
    (path,) = wal_files(disk)
    bad = frame_of(disk, path, b"t11")
    disk.flip_bit(
        path, {"header": bad.pos + 16, "length": bad.pos, "body": bad.data_pos, "checksum": bad.data_end}[place], 2
    )
    with pytest.raises(Damaged, match=r"may be lost"):
        opened(disk)
    reader = opened(disk, read_only=True)
    expected = {number: b"t%d" % number for number in range(1, 101) if number != 11}
    assert data_of(reader, "t") == expected
    log = opened(disk, accept_loss=True)
    assert log.report.lost
    assert log.report.lost_seqs == {"t": [(11, 11)]}
    assert any(f"at byte {bad.pos}, {bad.end - bad.pos} bytes" in said for said in log.report.damage)
    assert [disk.read_file(kept) for kept in log.report.quarantined] == [disk.read_file(path)[bad.pos : bad.end]]
    assert data_of(log, "t") == expected
    assert len(data_of(log, "other")) == 100
    assert log.topic("t").append(b"new").first_seq > 100
    log.close()
    again = opened(disk.reboot())
    assert not again.report.damage
    assert list(data_of(again, "t").values()) == [*expected.values(), b"new"]


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_the_seq_of_a_last_record_that_is_lost_is_not_given_again(durability: str) -> None:
    """The damaged frame is the topic's last, other topics went on: nothing that is left says how far it was."""
    disk = SimDisk()
    log = opened(disk)
    log.topic("t", durability=durability)
    log.topic("other", durability="fsync")
    for number in range(1, 6):
        log.topic("t").append(b"t%d" % number)
    for number in range(1, 6):
        log.topic("other").append(b"o%d" % number)
    disk = disk.reboot()
    (path,) = wal_files(disk)
    disk.flip_bit(path, frame_of(disk, path, b"t5").data_pos, 0)
    log = opened(disk, accept_loss=True)
    assert set(data_of(log, "t")) == {1, 2, 3, 4}
    assert log.topic("t").append(b"new").first_seq > 5
    assert set(data_of(log, "other")) == {1, 2, 3, 4, 5}


def test_a_wal_inside_a_record_is_not_replayed() -> None:
    """A record holds frames of a WAL, and a damaged sector hides where the record's own frame begins."""
    disk = SimDisk()
    log = opened(disk)
    log.topic("t", durability="fsync")
    topic_id = log.topic("t").state().id
    drop = control_frames.encode(control_frames.TopicDelete("t"))
    inside = [frame.encode(frame.TOPIC_DELETE, topic_id=topic_id, ts_ms=1, data=drop)]
    inside += [frame.encode(frame.APPEND, topic_id=topic_id, seq=2, ts_ms=1, data=b"forged %d" % n) for n in range(40)]
    log.topic("t").append(b"first")
    log.topic("t").append(b"".join(inside))
    log.topic("t").append(b"third")
    log.topic("t").append(b"fourth")
    disk = disk.reboot()
    (path,) = wal_files(disk)
    bad = frame_of(disk, path, b"".join(inside))
    content = bytearray(disk.read_file(path))
    content[bad.pos : bad.data_pos] = bytes(bad.data_pos - bad.pos)
    disk.write_file(path, bytes(content))
    log = opened(disk, accept_loss=True)
    assert data_of(log, "t") == {1: b"first", 3: b"third", 4: b"fourth"}


def test_marks_of_another_wal_inside_a_record_do_not_make_a_torn_write_damage() -> None:
    """A record holds a copy of a WAL whose marks name the same file; a write before it did not reach the disk."""
    disk = SimDisk()
    log = opened(disk)
    log.topic("t", durability="disk")
    for number in range(50):
        log.topic("t").append(b"%d" % number)
        log.tick()
    (path,) = wal_files(disk)
    copy = disk.read_file(path).rstrip(b"\0")
    log.topic("t").append(b"torn")
    log.topic("t").append(copy)
    torn = frame_of(disk, path, b"torn")
    disk = disk.crash_image("all")
    disk.flip_bit(path, torn.data_pos, 0)
    log = opened(disk)
    assert not log.report.damage
    assert len(log.report.cut) == 1
    assert f"at byte {torn.pos}, " in log.report.cut[0]
    assert set(data_of(log, "t").values()) == {b"%d" % number for number in range(50)}
    assert [disk.read_file(kept)[: torn.end - torn.pos] for kept in log.report.quarantined] != []


def test_a_bad_sector_at_the_end_of_a_file_that_a_snapshot_covers_is_no_damage() -> None:
    """The sector held the file's last frame, which the snapshot has, and zeros that no frame has used. The engine did
    not open without `accept_loss`: 0 bytes were lost, and with them a change of any topic's settings."""
    disk = SimDisk()
    log = opened(disk, wal_file_bytes=4096)
    log.topic("t", durability="fsync")
    for _ in range(6):
        log.topic("t").append(b"r" * 500)
    log.checkpoint()
    log.topic("t").append(b"after the checkpoint")
    expected = data_of(log, "t")
    disk = disk.reboot()
    older, newest = wal_files(disk)
    end = frames_of(disk, older)[-1].end
    assert 3584 < end < 4096, "the last sector holds a frame and zeros"
    assert frames_of(disk, newest)
    content = disk.read_file(older)
    disk.write_file(older, content[:3584] + Random(1).randbytes(512))
    log = opened(disk)
    assert not log.report.damage
    assert not log.report.lost
    assert data_of(log, "t") == expected
