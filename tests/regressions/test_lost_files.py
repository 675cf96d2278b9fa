"""Files that are gone, and bytes that rotted beside a lost index: damage is reported, the rest is served, no seq is
given twice, and nothing that proves the loss is rewritten (issue 17, 2.1 and 2.4)."""

from __future__ import annotations

import pytest

from tidelog.commitlog import SegmentedLog, restore, verify
from tidelog.errors import Corrupt, SeqMissing
from tidelog.testing import ManualClock, SimDisk

CODECS = ("tide", "rustlog", "laminar", "narwhal")
STEM = {"tide": "seg-{:016d}", "rustlog": "{:020d}", "laminar": "{}", "narwhal": "{:020d}"}
INDEX = {"tide": ".idx", "rustlog": ".index", "laminar": ".index", "narwhal": ".idx"}
DATA = {"tide": ".data", "rustlog": ".log", "laminar": ".store", "narwhal": ".log"}


def open_log(codec: str, disk: SimDisk, **settings: object) -> SegmentedLog:
    return SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), **settings)  # type: ignore[arg-type]


def written(codec: str, disk: SimDisk, *, close: bool = True) -> tuple[SegmentedLog, dict[int, bytes], list[int]]:
    """Three sealed segments of ten records and an active one of ten."""
    log = open_log(codec, disk)
    held, bases = {}, []
    for number in range(4):
        bases.append(log.highest)
        for i in range(10):
            data = b"segment %d record %d " % (number, i) * 4
            held[log.append(data)] = data
        if number < 3:
            log.seal()
    if close:
        log.close()
    return log, held, bases


def remove(disk: SimDisk, codec: str, base: int, *, only: str = "") -> None:
    stem = f"log/{STEM[codec].format(base)}."
    for path in disk.tree():
        if path.startswith(stem) and path.endswith(only):
            disk.remove(path)
    disk.sync_dir("log")


@pytest.mark.parametrize("manifest", [True, False], ids=["ours", "foreign"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_lost_middle_segment_is_damage_and_stays_damage_after_a_repair(codec: str, manifest: bool) -> None:
    disk = SimDisk()
    _, held, bases = written(codec, disk)
    if not manifest:
        disk.remove("log/.tidelog.manifest")
    remove(disk, codec, bases[1])
    lost = range(bases[1], bases[2])
    verdict = verify("log", disk=disk)
    assert [damage.fault[:2] for damage in verdict.damage] == [(lost.start, lost.stop)]
    for _ in range(2):
        with open_log(codec, disk, verify_on_open=True) as log:  # repair
            assert [damage.fault[:2] for damage in log.report.damage] == [(lost.start, lost.stop)]
            assert {record.seq: record.data for record in log.records(skip_damage=True)} == {
                seq: data for seq, data in held.items() if seq not in lost
            }
            with pytest.raises(Corrupt) as caught:
                log.read(lost.start + 3)
            assert caught.value.resume == lost.stop
            with pytest.raises(Corrupt):
                list(log)
        assert not verify("log", disk=disk).ok


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("codec", CODECS)
def test_a_lost_first_or_last_sealed_segment_is_damage(codec: str, which: int) -> None:
    disk = SimDisk()
    _, held, bases = written(codec, disk)
    remove(disk, codec, bases[which])
    assert [d.fault[:2] for d in verify("log", disk=disk).damage] == [(bases[which], bases[which + 1])]
    with open_log(codec, disk) as log:
        assert log.append(b"next") == max(held) + 1


@pytest.mark.parametrize("crashed", [False, True], ids=["closed", "crashed"])
@pytest.mark.parametrize("whole", [True, False], ids=["all its files", "its data"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_lost_active_segment_is_damage_and_its_seqs_are_not_given_again(
    codec: str, whole: bool, crashed: bool
) -> None:
    disk = SimDisk()
    _, held, bases = written(codec, disk, close=not crashed)
    disk = disk.reboot()
    remove(disk, codec, bases[3], only="" if whole else DATA[codec])
    verdict = verify("log", disk=disk)
    assert not verdict.ok
    with open_log(codec, disk, read_only=True) as log:
        assert {record.seq for record in log.records(skip_damage=True)} == set(held) - set(
            range(bases[3], max(held) + 1)
        )
    with open_log(codec, disk) as log:
        seq = log.append(b"next")
        assert seq > max(held)
        assert seq == max(held) + 1 or crashed, "a log that was closed knows its end"
    assert not verify("log", disk=disk).ok
    with open_log(codec, disk) as log:
        assert log.read(seq).data == b"next"
        with pytest.raises(Corrupt):
            log.read(max(held))


@pytest.mark.parametrize("crashed", [False, True], ids=["closed", "crashed"])
def test_laminar_with_a_lost_active_index_keeps_the_store_and_the_numbering(crashed: bool) -> None:
    disk = SimDisk()
    _, held, bases = written("laminar", disk, close=not crashed)
    disk = disk.reboot()
    store = disk.read_file(f"log/{bases[3]}.store")
    remove(disk, "laminar", bases[3], only=".index")
    with open_log("laminar", disk) as log:
        assert log.report.damage
        assert not log.report.quarantined
        assert log.append(b"next") > max(held)
    assert disk.read_file(f"log/{bases[3]}.store") == store


@pytest.mark.parametrize("codec", CODECS)
def test_everything_but_the_manifest_is_lost(codec: str) -> None:
    disk = SimDisk()
    _, held, _ = written(codec, disk)
    for path in disk.tree():
        if not path.endswith(".manifest"):
            disk.remove(path)
    assert not verify("log", disk=disk).ok
    with SegmentedLog.open("log", disk=disk, clock=ManualClock()) as log:
        assert log.codec == codec
        assert log.append(b"next") == max(held) + 1


@pytest.mark.parametrize("codec", CODECS)
def test_lost_record_is_distinguished_from_a_compacted_one(codec: str) -> None:
    disk = SimDisk()
    log = open_log(codec, disk)
    for number in range(3):
        for i in range(4):
            log.append(b"%d:%d" % (i % 2, number))
        log.seal()
    log.compact(lambda record: record.data[:1])
    bases = [segment.start for segment in log.segments]
    log.close()
    assert verify("log", disk=disk).ok
    gone = bases[-2] + 1
    with open_log(codec, disk) as log, pytest.raises(SeqMissing):
        log.read(gone)
    remove(disk, codec, bases[-2], only=DATA[codec])
    with open_log(codec, disk) as log, pytest.raises(Corrupt):
        log.read(gone)


@pytest.mark.parametrize("codec", CODECS)
def test_a_log_that_lost_a_segment_is_not_restored_in_silence(codec: str) -> None:
    disk = SimDisk()
    _, held, bases = written(codec, disk)
    remove(disk, codec, bases[0])
    with open_log(codec, disk) as log, pytest.raises(Corrupt):
        restore(log, "copy", to_seq=max(held))
    assert disk.stat("copy") is None


@pytest.mark.parametrize("codec", CODECS)
def test_a_sealed_data_file_that_is_too_short_by_whole_records_is_damage(codec: str) -> None:
    disk = SimDisk()
    _, held, bases = written(codec, disk)
    path = f"log/{STEM[codec].format(bases[1])}{DATA[codec]}"
    content = disk.read_file(path)
    disk.write_file(path, content[: len(content) // 10 * 7])
    lost = range(bases[1] + 7, bases[2])
    assert [damage.fault[:2] for damage in verify("log", disk=disk).damage] == [(lost.start, lost.stop)]
    with open_log(codec, disk) as log:
        found = {record.seq: record.data for record in log.records(skip_damage=True)}
        assert found == {seq: data for seq, data in held.items() if seq not in lost}
        with pytest.raises(Corrupt):
            log.read(lost.start)


@pytest.mark.parametrize("what", ["data", "length", "seq"])
@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_a_lost_index_beside_one_flipped_byte_costs_one_record(codec: str, what: str) -> None:
    """Seen: 950 of 1,000 records unreadable (rustlog), 150 of 200 (tide), 950 reported as damaged (narwhal)."""
    disk = SimDisk()
    log = open_log(codec, disk)
    held = {log.append(b"record %d" % number): b"record %d" % number for number in range(1000)}
    log.seal()
    log.close()
    base, bad = min(held), min(held) + 50
    stem = f"log/{STEM[codec].format(base)}"
    path = f"{stem}{DATA[codec]}"
    at = disk.read_file(path).index(b"record 50")
    back = {"tide": 38, "rustlog": 20, "narwhal": 22}[codec]
    offset = {"tide": (0, 14), "rustlog": (3, 11), "narwhal": (18, 0)}[codec]
    disk.flip_bit(path, {"data": at, "length": at - back + offset[0], "seq": at - back + offset[1]}[what], 3)
    remove(disk, codec, base, only=INDEX[codec])
    evidence = {name: data for name, data in disk.tree().items() if name.startswith(stem)}
    for _ in range(2):
        with open_log(codec, disk) as log:
            assert [damage.fault[:2] for damage in log.report.damage] == [(bad, bad + 1)]
            found = {record.seq: record.data for record in log.records(skip_damage=True)}
            assert found == {seq: data for seq, data in held.items() if seq != bad}
            with pytest.raises(Corrupt):
                log.read(bad)
        assert [damage.fault[:2] for damage in verify("log", disk=disk).damage] == [(bad, bad + 1)]
        assert {name: data for name, data in disk.tree().items() if name.startswith(stem)} == evidence
