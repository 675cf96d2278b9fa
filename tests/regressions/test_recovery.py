"""Bugs of recovery, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.errors import BadInput
from tidelog.testing import ManualClock, SimDisk


def written(codec: str, disk: SimDisk, count: int = 6) -> list[bytes]:
    datas = [b"record %d" % number for number in range(count)]
    with SegmentedLog.open("log", codec, disk=disk, clock=ManualClock()) as log:
        for data in datas:
            log.append(data)
    return datas


def kept(disk: SimDisk) -> bytes:
    return b"".join(data for path, data in disk.tree().items() if "quarantine" in path)


def test_no_flip_in_the_index_of_an_active_laminar_segment_takes_a_record_away() -> None:
    """Method: every bit of the index in turn; each record is read as it was, or its bytes are kept in quarantine."""
    disk = SimDisk()
    datas = written("laminar", disk)
    for pos in range(len(disk.read_file("log/0.index"))):
        for bit in range(8):
            machine = disk.reboot()
            machine.flip_bit("log/0.index", pos, bit)
            with SegmentedLog.open("log", "laminar", disk=machine, clock=ManualClock()) as log:
                found = {record.seq: record.data for record in log.records(skip_damage=True)}
                told = not log.report.clean
            for seq, data in enumerate(datas):
                assert found.get(seq, data) == data, f"byte {pos} bit {bit}: seq {seq} reads as something else"
                there = seq in found or data in kept(machine) or data in machine.read_file("log/0.store")
                assert there, f"byte {pos} bit {bit}: seq {seq} is gone without a trace"
            assert told or len(found) == len(datas), f"byte {pos} bit {bit}: nobody was told"


def test_a_rustlog_segment_without_its_side_car_gets_one_before_it_grows() -> None:
    disk = SimDisk()
    written("rustlog", disk)
    side_car = "log/00000000000000000000.crc"
    before = disk.read_file(side_car)
    disk.remove("log/.tidelog.manifest")  # as another program leaves it
    disk.remove(side_car)
    disk.sync_dir("log")
    with SegmentedLog.open("log", "rustlog", disk=disk, clock=ManualClock()) as log:
        assert log.report.rebuilt == ["00000000000000000000.crc"]
        log.append(b"more")
    assert disk.read_file(side_car).startswith(before)
    assert len(disk.read_file(side_car)) == len(before) + 4


def test_rebuilt_footer_is_reported() -> None:
    disk = SimDisk()
    with SegmentedLog.open("log", "tide", disk=disk, clock=ManualClock()) as log:
        log.append(b"a")
        log.seal()
    good = disk.read_file("log/seg-0000000000000001.foot")
    disk.flip_bit("log/seg-0000000000000001.foot", 20, 3)
    with SegmentedLog.open("log", "tide", disk=disk, clock=ManualClock()) as log:
        assert log.report.rebuilt == ["seg-0000000000000001.foot"]
        assert [record.data for record in log] == [b"a"]
    assert disk.read_file("log/seg-0000000000000001.foot") == good


@pytest.mark.parametrize("meta", [b"\x01abcd", b"\x01abcdefgh"])
def test_a_laminar_meta_that_would_read_as_an_index_is_refused(meta: bytes) -> None:
    with SegmentedLog.open("log", "laminar", disk=SimDisk(), clock=ManualClock()) as log:
        with pytest.raises(BadInput, match="nothing was written"):
            log.append(b"a", meta=meta)
        log.append(b"b", meta=meta + b"!")
        assert [(record.data, record.meta) for record in log] == [(b"b", meta + b"!")]


def test_reader_beside_a_writer_that_drops_segments_reports_no_damage(tmp_path: Path) -> None:
    """Method: readers are opened while a writer appends and retains, on the real disk."""
    path = str(tmp_path / "log")
    with SegmentedLog.open(path, "tide", segment_bytes_max=2_000, sync="interval") as writer:
        for number in range(200):
            writer.append_many([b"x" * 100] * 5)
            writer.retain(keep_bytes=6_000)
            if number % 10 == 0:
                with SegmentedLog.open(path, read_only=True) as reader:
                    assert not reader.report.damage
                    assert reader.highest == writer.highest


def test_zeros_in_a_laminar_index_after_a_lost_content_are_no_records() -> None:
    """A power cut under `interval` left an entry whose content did not arrive between two that read as holes."""
    disk = SimDisk()
    written("laminar", disk, 3)
    entries = disk.read_file("log/0.index")[16:]
    for name, content in (("0.store", b""), ("0.index", bytes(32) + entries[16:32] + bytes(16))):
        disk.remove(f"log/{name}")
        file = disk.open(f"log/{name}", "create")
        file.write(0, content)
        file.sync()
        file.close()
    disk.sync_dir("log")
    with SegmentedLog.open("log", "laminar", disk=disk, clock=ManualClock()) as log:
        assert list(log.records(skip_damage=True)) == []
        assert not log.report.clean, "what was lost is reported"
        seq = log.append(b"next")
        assert [(record.seq, record.data) for record in log.records(skip_damage=True)] == [(seq, b"next")]


def test_a_laminar_segment_of_ours_that_is_torn_all_over_is_no_unknown_layout() -> None:
    disk = SimDisk()
    with SegmentedLog.open("log", "laminar", disk=disk, clock=ManualClock()) as log:
        log.append_many([b"x" * 40, b"y" * 40])
    for pos in (20, 70):
        disk.flip_bit("log/0.store", pos, 1)
    with SegmentedLog.open("log", "laminar", disk=disk, clock=ManualClock()) as log:
        assert log.report.cut_suspect or log.report.damage
        assert list(log.records(skip_damage=True)) == []
