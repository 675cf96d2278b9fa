"""Opening what a crash, a bad disk or somebody else left behind: what is cut, rebuilt, swept, kept and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from tidelog.commitlog import RecoveryReport, SegmentedLog, verify
from tidelog.errors import Corrupt, Damaged, NewerFormat
from tidelog.formats import small_files
from tidelog.testing import ManualClock, PowerOff, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]

DERIVED = ["tide", "rustlog", "narwhal"]  # layouts whose index can be made again from the data
STEM = {"tide": "seg-{:016d}", "rustlog": "{:020d}", "laminar": "{}", "narwhal": "{:020d}"}
TEMPORARIES = {
    "tide": (".idx.rebuilding", ".foot.tmp", ".data.compacted"),
    "rustlog": (".index.rebuilding", ".crc.rebuilding", ".log.compacted"),
    "laminar": (".index.rebuilding", ".store.compacted"),
    "narwhal": (".idx.rebuilding", ".tmp", ".log.compacted"),
}


def written(log: SegmentedLog, sealed: int = 5, active: int = 5) -> list[bytes]:
    """So many records in a sealed segment and so many in the active one; then the log is closed."""
    datas = [b"record %d" % number for number in range(sealed + active)]
    for number, data in enumerate(datas):
        if number == sealed and sealed:
            log.seal()
        log.append(data)
    log.close()
    return datas


def without_manifest(disk: SimDisk) -> None:
    """As an older version leaves a log, or a crash before its first close: nothing says where the log ended."""
    disk.remove("log/.tidelog.manifest")
    disk.sync_dir("log")


def flip(disk: SimDisk, path: str, text: bytes) -> None:
    """Change one letter of the record that holds `text`."""
    disk.flip_bit(path, disk.read_file(path).index(text) + len(text) - 1, 1)


def settled(open_log: Opener, disk: SimDisk) -> bool:
    """Whether opening and closing the log once more changes nothing and finds nothing."""
    before = disk.digest()
    again = open_log()
    clean = not (again.report.cut_bytes or again.report.rebuilt or again.report.swept or again.report.quarantined)
    again.close()
    return clean and disk.digest() == before


# A torn tail.


@pytest.mark.parametrize("codec", ["tide", "rustlog"])  # the others reserve room in their indexes
def test_zeros_after_a_side_file_are_cut(
    open_log: Opener, disk: SimDisk, codec: str, data_path: Names, first_seq: int
) -> None:
    """As a crash leaves it where a file was made longer and its bytes did not reach the disk."""
    datas = written(open_log(), sealed=0)
    stem = "log/" + STEM[codec].format(first_seq)
    beside = {path: content for path, content in disk.tree().items() if path.startswith(stem + ".")}
    del beside[data_path(first_seq)]
    assert beside
    without_manifest(disk)
    for path, content in beside.items():
        disk.write_file(path, content + bytes(64))
    with open_log() as log:
        assert [record.data for record in log] == datas
    assert {path: disk.read_file(path) for path in beside} == beside
    assert settled(open_log, disk)


@pytest.mark.parametrize("sealed", [0, 3], ids=["only", "behind a sealed one"])
def test_a_last_record_that_is_torn_anywhere_is_cut_and_nothing_else(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, sealed: int
) -> None:
    """G97, G144. Method: the data file ends at every byte of its last record, its index still names it."""
    log = open_log()
    for number in range(sealed):
        log.append(b"sealed %d" % number)
    log.seal()
    log.append(b"first")
    log.append(b"second")
    whole = len(disk.read_file(data_path(first_seq + sealed)))
    log.append(b"the last record, which is torn")
    log.close()
    without_manifest(disk)
    path = data_path(first_seq + sealed)
    content = disk.read_file(path)
    keep = [b"sealed %d" % number for number in range(sealed)] + [b"first", b"second"]
    for size in range(whole, len(content)):
        image = disk.reboot()
        image.write_file(path, content[:size])
        again = open_log(disk=image)
        assert [record.data for record in again] == keep, size
        assert again.report.cut_bytes == size - whole, size
        assert not again.report.damage, size
        assert len(image.read_file(path)) == whole
        assert again.append(b"instead") == first_seq + sealed + 2
        again.close()
        final = open_log(disk=image)
        assert (final.report.clean, [record.data for record in final]) == (True, [*keep, b"instead"]), size


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 600, b"\xff" * 9, b"garbage that is no record at all " * 4])
def test_bytes_after_the_last_record_are_cut(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, tail: bytes
) -> None:
    """G97, G126. Method: what a crash in the middle of a write may leave; only what is not zeros is worth keeping."""
    datas = written(open_log())
    path = data_path(first_seq + 5)
    content = disk.read_file(path)
    disk.write_file(path, content + tail)
    log = open_log()
    assert [record.data for record in log] == datas
    assert (log.report.cut_bytes, disk.read_file(path)) == (len(tail), content)
    assert log.report.cut_reason
    assert not (log.report.quarantined and not any(tail)), "zeros are no loss"
    assert log.append(b"next") == first_seq + 10
    log.close()
    assert settled(open_log, disk)


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("extra", range(1, 16))
def test_a_partial_index_entry_is_cut(open_log: Opener, disk: SimDisk, index_path: Names, extra: int) -> None:
    """G126. Method: later entries must not land beside the grid of sixteen bytes."""
    datas = written(open_log())
    content = disk.read_file(index_path(5))
    disk.write_file(index_path(5), content + b"\x07" * extra)
    log = open_log()
    assert disk.read_file(index_path(5)) == content
    log.append(b"next")
    log.close()
    final = open_log()
    assert (final.report.clean, [record.data for record in final]) == (True, [*datas, b"next"])


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("gone", range(1, 17))
def test_a_record_without_its_index_entry_was_never_there(
    open_log: Opener, disk: SimDisk, index_path: Names, data_path: Names, gone: int
) -> None:
    """G120, G126. Method: the index ends at every byte of its last entry; the store holds the record in full."""
    datas = written(open_log())
    without_manifest(disk)
    content, store = disk.read_file(index_path(5)), disk.read_file(data_path(5))
    disk.write_file(index_path(5), content[:-gone])
    log = open_log()
    assert [record.data for record in log] == datas[:-1]
    assert disk.read_file(index_path(5)) == content[:-16]
    assert len(disk.read_file(data_path(5))) == len(store) - len(store) // 5, "no orphan bytes stay behind"
    assert log.append(b"instead") == 9


@pytest.mark.parametrize("codec", ["rustlog"])
@pytest.mark.parametrize("gone", range(1, 5))
def test_a_record_without_its_checksum_was_never_acked(open_log: Opener, disk: SimDisk, gone: int) -> None:
    """G97. Method: the side-car is synced before an ack, so a record behind its end is unfinished."""
    datas = written(open_log())
    without_manifest(disk)
    path = "log/00000000000000000005.crc"
    disk.write_file(path, disk.read_file(path)[:-gone])
    log = open_log()
    assert [record.data for record in log] == datas[:-1]
    log.close()
    assert settled(open_log, disk)


# The index.


def wrong_indexes(good: bytes, width: int) -> dict[str, bytes]:
    """What may stand in the place of an index whose entries have `width` bytes."""
    return {
        "empty": b"",
        "one byte short": good[:-1],
        "one entry short": good[:-width],
        "one byte more": good + b"\1",
        "one entry more": good + b"\xff" * width,
        "garbage": (b"garbage!" * len(good))[: len(good)],
        "zeros": bytes(len(good)),
        "ones": b"\xff" * len(good),
        "backwards": b"".join(good[at : at + width] for at in range(len(good) - width, -1, -width)),
        "doubled": good + good,
        "first entry gone": good[width:],
    }


WIDTH = {"tide": 20, "rustlog": 16, "narwhal": 12}


@pytest.fixture
def indexed(open_log: Opener) -> list[bytes]:
    """A sealed segment and an active one, each with several index entries in every layout; closed."""
    log = open_log(index_every=2)
    datas = [b"%04d" % number * 300 for number in range(24)]
    for number, data in enumerate(datas):
        if number == 12:
            log.seal()
        log.append(data)
    log.close()
    return datas


@pytest.mark.parametrize("where", ["sealed", "active"])
@pytest.mark.parametrize("name", ["missing", *wrong_indexes(b"", 1)])
@pytest.mark.parametrize("codec", DERIVED)
def test_an_index_that_is_no_index_is_made_again_byte_for_byte(
    open_log: Opener,
    disk: SimDisk,
    data_path: Names,
    index_path: Names,
    indexed: list[bytes],
    codec: str,
    first_seq: int,
    where: str,
    name: str,
) -> None:
    """G66, G101, G102, G149. Method: twice, from the same start: bytes and answers are those of before."""
    base = first_seq if where == "sealed" else first_seq + 12
    good, data_bytes = disk.read_file(index_path(base)), disk.read_file(data_path(base))
    width = WIDTH[codec]
    used = -(-len(good.rstrip(b"\0")) // width) * width  # narwhal reserves zeros behind its entries
    for _ in range(2):
        image = disk.reboot()
        if name == "missing":
            image.remove(index_path(base))
        else:
            image.write_file(index_path(base), wrong_indexes(good[:used], width)[name])
        log = open_log(disk=image, index_every=2)
        assert [log.read(first_seq + number).data for number in range(24)] == indexed
        assert [record.data for record in log] == indexed
        assert not log.report.damage
        log.append(b"goes on")
        log.close()
        assert image.read_file(data_path(base)).startswith(data_bytes)
        found = image.read_file(index_path(base))
        # A sealed index of the right size is held against its checksum when it is first read, not at every start.
        if not (codec == "tide" and where == "sealed" and name in ("garbage", "zeros", "ones", "backwards")):
            assert found.startswith(good.rstrip(b"\0"))
            assert where == "active" or found == good
            final = open_log(disk=image, index_every=2)
            assert (final.report.clean, final.read(first_seq + 24).data) == (True, b"goes on")


@pytest.mark.parametrize("codec", DERIVED)
def test_a_crash_at_any_step_of_a_rebuild_leaves_an_index_that_is_made_again_or_whole(
    open_log: Opener, disk: SimDisk, data_path: Names, index_path: Names, first_seq: int
) -> None:
    """G103. Method: the index of a sealed segment is gone; restarts from before every operation of the recovery."""
    datas = written(open_log())
    good, data_bytes = disk.read_file(index_path(first_seq)), disk.read_file(data_path(first_seq))
    disk.remove(index_path(first_seq))
    disk.sync_dir("log")
    labels = []

    def examine(_: int) -> None:
        for image in disk.images(limit=12):
            tree = image.disk.tree()
            assert tree.get(index_path(first_seq), good) == good, image.label
            assert tree[data_path(first_seq)] == data_bytes, image.label
            log = open_log(disk=image.disk)
            assert [record.data for record in log] == datas, image.label
            assert image.disk.read_file(index_path(first_seq)) == good, image.label
            assert not [path for path in image.disk.tree() if path.endswith((".rebuilding", ".tmp"))], image.label
            labels.append(image.label)

    disk.on_op = examine
    open_log()
    disk.on_op = None
    assert len(labels) > 5


@pytest.mark.parametrize("codec", DERIVED)
def test_a_reader_rebuilds_in_memory_and_changes_nothing(
    open_log: Opener, disk: SimDisk, data_path: Names, index_path: Names, first_seq: int
) -> None:
    """G30, G101."""
    datas = written(open_log())
    without_manifest(disk)
    disk.remove(index_path(first_seq))
    path = data_path(first_seq + 5)
    disk.write_file(path, disk.read_file(path)[:-3])
    before = disk.digest()
    reader = open_log(read_only=True)
    assert [record.data for record in reader] == datas[:-1]
    assert [reader.read(first_seq + number).data for number in range(9)] == datas[:-1]
    assert (bool(reader.report.rebuilt), reader.report.cut_bytes > 0) == (True, True)
    reader.close()
    assert disk.digest() == before


@pytest.mark.parametrize("codec", ["laminar"])
def test_an_index_that_is_the_truth_is_not_made_up(open_log: Opener, disk: SimDisk, index_path: Names) -> None:
    """G105, G121. Method: the sealed index loses its last entry, then its marker is changed."""
    datas = written(open_log())
    good = disk.read_file(index_path(0))
    disk.write_file(index_path(0), good[:-16])
    log = open_log()
    assert [log.read(number).data for number in (0, 1, 2, 3, 5, 9)] == [datas[n] for n in (0, 1, 2, 3, 5, 9)]
    with pytest.raises(Corrupt):
        log.read(4)
    log.close()
    disk.write_file(index_path(0), b"\1" + good[1:])
    log = open_log()
    assert log.report.damage
    assert [record.data for record in log.records(5)] == datas[5:], "others are served"


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("manifest", [True, False], ids=["with a manifest", "without"])
def test_a_store_without_an_index_is_damage_and_stays_where_it_is(
    open_log: Opener, disk: SimDisk, index_path: Names, data_path: Names, manifest: bool
) -> None:
    """Method: nothing can read it back, but it is evidence, and its seqs are not given again."""
    written(open_log())
    if not manifest:
        without_manifest(disk)
    store = disk.read_file(data_path(5))
    disk.remove(index_path(5))
    log = open_log()
    assert [damage.file for damage in log.report.damage] == ["5.index"]
    assert disk.read_file(data_path(5)) == store
    assert log.append(b"next") >= 10
    with pytest.raises(Corrupt):
        log.read(7)
    log.close()
    assert settled(open_log, disk)


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize("content", [None, b"", b"TLSF", b"garbage" * 20], ids=["missing", "empty", "short", "garbage"])
def test_a_footer_that_is_no_footer_is_made_again(open_log: Opener, disk: SimDisk, content: bytes | None) -> None:
    datas = written(open_log())
    path = "log/seg-0000000000000001.foot"
    good = disk.read_file(path)
    if content is None:
        disk.remove(path)
    else:
        disk.write_file(path, content)
    log = open_log()
    assert disk.read_file(path) == good
    assert [record.data for record in log] == datas
    log.close()
    assert settled(open_log, disk)


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
def test_a_footer_of_a_newer_version_is_refused_and_nothing_is_changed(
    open_log: Opener, disk: SimDisk, read_only: bool
) -> None:
    written(open_log())
    path = "log/seg-0000000000000001.foot"
    good = disk.read_file(path)
    disk.write_file(path, small_files.wrap_file(good[:4], 2, small_files.unwrap_file(good[:4], 1, good, path)))
    before = disk.digest()
    with pytest.raises(NewerFormat) as refused:
        open_log(read_only=read_only)
    assert (refused.value.found, refused.value.known) == (2, 1)
    assert disk.digest() == before
    disk.write_file(path, good)
    assert open_log().report.clean, "and it is not locked"


# Damage in a sealed segment.


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_flipped_byte_of_a_sealed_record_is_damage_for_exactly_that_record(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, bad: int
) -> None:
    """G65, G105, G121. Method: the data of one record is changed; its length and its neighbours are as they were."""
    datas = written(open_log())
    flip(disk, data_path(first_seq), datas[bad])
    log = open_log()
    for number, data in enumerate(datas):
        if number != bad:
            assert log.read(first_seq + number).data == data
    with pytest.raises(Corrupt) as damage:
        log.read(first_seq + bad)
    assert damage.value.seq == first_seq + bad
    assert data_path(first_seq) in str(damage.value)


def test_a_reader_stops_at_damage_unless_it_asks_to_pass_over_it(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G65, G105. Method: an index with an entry for every record, so that every layout can go on behind the damage."""
    datas = written(open_log(index_every=1))
    flip(disk, data_path(first_seq), datas[2])
    log = open_log(index_every=1)
    reading = iter(log)
    assert [next(reading).data, next(reading).data] == datas[:2]
    with pytest.raises(Corrupt) as damage:
        next(reading)
    assert damage.value.seq == first_seq + 2
    assert damage.value.resume is not None
    assert log.damage_skipped == 0
    passed = [record.data for record in log.records(skip_damage=True)]
    lost = damage.value.resume - first_seq - 2
    assert passed == datas[:2] + datas[2 + lost :]
    assert log.damage_skipped == 1
    page = log.read_range(first_seq, skip_damage=True)
    assert ([record.data for record in page.records], log.damage_skipped) == (passed, 2)
    assert log.to_arrow(skip_damage=True).column("data").to_pylist() == passed
    with pytest.raises(Corrupt):
        log.to_arrow()
    assert [record.data for record in log.records(damage.value.resume)] == passed[2:], "from there on all is well"


def test_sealed_damage_changes_no_byte_and_is_found_again(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G105."""
    datas = written(open_log())
    flip(disk, data_path(first_seq), datas[1])
    before = disk.digest()
    for _ in range(2):
        log = open_log(verify_on_open=True)
        (damage,) = log.report.damage
        assert damage.file == data_path(first_seq).removeprefix("log/")
        assert damage.fault.seq == first_seq + 1
        assert any(damage.file in line for line in log.report.lines())
        log.close()
        assert disk.digest() == before


@pytest.mark.parametrize("codec", ["narwhal"])
def test_sealed_segment_that_ends_early_is_reported_with_file_byte_and_seqs(
    open_log: Opener, disk: SimDisk, data_path: Names
) -> None:
    """G148. Method: this design reads every sealed record when it opens."""
    datas = written(open_log())
    flip(disk, data_path(1), datas[3])
    (damage,) = open_log().report.damage
    assert damage.file == "00000000000000000001.log"
    assert damage.fault.seq == 4, "one past the last good one"
    assert damage.fault.pos == 3 * (26 + 8)


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_a_sealed_segment_that_lost_its_end_serves_what_is_left(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, cut: int
) -> None:
    """G105, G148."""
    datas = written(open_log())
    path = data_path(first_seq)
    disk.write_file(path, disk.read_file(path)[:-cut])
    before = disk.read_file(path)
    log = open_log()
    assert log.report.damage
    assert [log.read(first_seq + number).data for number in range(3)] == datas[:3]
    assert [record.data for record in log.records(first_seq + 5)] == datas[5:]
    with pytest.raises(Corrupt):
        log.read(first_seq + 4)
    assert log.append(b"goes on") == first_seq + 10
    assert disk.read_file(path) == before, "a sealed segment is never changed"


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize("left", [0, 3])
def test_footer_shows_complete_records_that_the_data_lost(
    open_log: Opener, disk: SimDisk, data_path: Names, left: int
) -> None:
    """Nothing else does where there is no manifest: what is left of the data reads to its end."""
    datas = written(open_log())
    without_manifest(disk)
    content = disk.read_file(data_path(1))
    disk.write_file(data_path(1), content[: len(content) // 5 * left])
    log = open_log()
    (damage,) = log.report.damage
    assert (damage.fault.seq, damage.fault.resume) == (left + 1, 6)
    assert [log.read(1 + number).data for number in range(left)] == datas[:left]
    with pytest.raises(Corrupt):
        log.read(left + 1)
    assert [record.data for record in log.records(6)] == datas[5:]


def test_damage_in_one_segment_leaves_retention_and_appends_working(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G105."""
    datas = written(open_log())
    flip(disk, data_path(first_seq), datas[1])
    log = open_log()
    assert log.append(b"next") == first_seq + 10
    assert log.retain(keep_bytes=0).segments == 1
    assert [record.data for record in log] == [*datas[5:], b"next"]


@pytest.mark.parametrize("codec", ["rustlog"])
@pytest.mark.parametrize("base", [0, 5], ids=["sealed", "active"])
def test_lost_checksums_are_reported_and_the_records_are_served(open_log: Opener, disk: SimDisk, base: int) -> None:
    """Nothing can derive them: every open reports the file, and no record is lost with it."""
    datas = written(open_log())
    name = f"{base:020d}.crc"
    disk.remove(f"log/{name}")
    disk.sync_dir("log")
    for _ in range(2):
        with open_log(read_only=True) as log:
            assert [damage.file for damage in log.report.damage] == [name]
            (fault,) = (damage.fault for damage in log.report.damage)
            assert fault.seq == fault.resume == base, "no seq is lost"
            assert [record.data for record in log.records(stop=10)] == datas
    assert not verify("log", disk=disk).ok


# Damage in the active segment.


@pytest.mark.parametrize("codec", DERIVED)
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_bad_record_in_the_middle_of_the_active_segment_is_cut_and_kept_in_quarantine(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, bad: int
) -> None:
    """G97, G105. Method: good records follow it, so it is no torn write and may have been acked."""
    datas = written(open_log())
    without_manifest(disk)
    path = data_path(first_seq + 5)
    flip(disk, path, datas[5 + bad])
    content = disk.read_file(path)
    log = open_log()
    assert [record.data for record in log] == datas[: 5 + bad]
    assert log.append(b"next") == first_seq + 10, "the seqs of the good records that were cut are not given again"
    (name,) = log.report.quarantined
    kept = disk.read_file(f"log/{name}")
    assert name.startswith("quarantine/")
    assert disk.read_file(path) + kept == content, "not a byte is lost"
    assert log.report.cut_bytes == len(kept)
    assert any(name in line for line in log.report.lines())
    assert not log.report.clean
    log.close()
    assert settled(open_log, disk)


@pytest.mark.parametrize("bad", [0, 2, 3, 4])
def test_a_bad_record_of_an_active_segment_that_was_durable_is_damage_and_the_others_are_served(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, bad: int
) -> None:
    """D13, D14. Method: the manifest has where the log ended when it was closed."""
    datas = written(open_log())
    path = data_path(first_seq + 5)
    flip(disk, path, datas[5 + bad])
    content = disk.read_file(path)
    for turn in range(2):
        log = open_log()
        others = [data for number, data in enumerate(datas) if number != 5 + bad]
        assert [record.data for record in log.records(stop=first_seq + 10, skip_damage=True)] == others
        if not turn:
            assert [damage.fault[:2] for damage in log.report.damage] == [(first_seq + 5 + bad, first_seq + 6 + bad)]
        assert not log.report.quarantined
        assert disk.read_file(path).startswith(content), "not a byte of the evidence changes"
        with pytest.raises(Corrupt):
            log.read(first_seq + 5 + bad)
        assert log.append(b"next") >= first_seq + 10
        log.close()


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_bad_record_in_the_middle_of_the_active_segment_stays_where_its_index_can_pass_it(
    open_log: Opener, disk: SimDisk, data_path: Names, bad: int
) -> None:
    """G105, G121."""
    datas = written(open_log())
    flip(disk, data_path(5), datas[5 + bad])
    log = open_log()
    assert [damage.fault.seq for damage in log.report.damage] == [5 + bad]
    with pytest.raises(Corrupt):
        log.read(5 + bad)
    for number in (*range(5 + bad), *range(6 + bad, 10)):
        assert log.read(number).data == datas[number]
    assert log.append(b"next") == 10


def test_a_flipped_byte_under_an_open_log_is_never_served(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G121."""
    log = open_log()
    for number in range(5):
        log.append(b"record %d" % number)
    flip(disk, data_path(first_seq), b"record 2")
    with pytest.raises(Corrupt):
        log.read(first_seq + 2)
    assert log.read(first_seq + 1).data == b"record 1"
    assert b"record 2" not in [record.data for record in log.records(skip_damage=True)]


# Sweeping.


@pytest.mark.parametrize("base", ["sealed", "active"])
def test_leftovers_of_an_interrupted_step_are_swept(
    open_log: Opener, disk: SimDisk, codec: str, first_seq: int, base: str
) -> None:
    """G103, G112."""
    datas = written(open_log())
    stem = STEM[codec].format(first_seq if base == "sealed" else first_seq + 5)
    stale = [f"{stem}{suffix}" for suffix in TEMPORARIES[codec]]
    stale += [".cleaner_checkpoint.tmp", ".consumer_offsets.tmp"]
    before = disk.tree()
    for name in stale:
        disk.write_file(f"log/{name}", b"half done")
    log = open_log()
    assert [record.data for record in log] == datas
    assert sorted(log.report.swept) == sorted(stale)
    log.close()
    assert disk.tree() == before
    assert disk.crash_image("none").tree().keys() == before.keys(), "and they stay away"


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("committed", [True, False])
def test_an_interrupted_swap_of_store_and_index_is_finished_or_forgotten(
    open_log: Opener, disk: SimDisk, committed: bool
) -> None:
    """G112. Method: an index waiting alone says that its store is in place already."""
    datas = written(open_log())
    store, index = disk.read_file("log/0.store"), disk.read_file("log/0.index")
    disk.write_file("log/0.index.compacted", index)
    if committed:
        disk.write_file("log/0.index", b"the index of the store that was replaced")
    else:
        disk.write_file("log/0.store.compacted", store[:10])
    log = open_log()
    assert [record.data for record in log] == datas
    assert (disk.read_file("log/0.store"), disk.read_file("log/0.index")) == (store, index)
    assert not [path for path in disk.tree() if path.endswith(".compacted")]


@pytest.mark.parametrize("codec", DERIVED)
@pytest.mark.parametrize("manifest", [True, False], ids=["with a manifest", "without"])
def test_a_lone_index_is_evidence_of_lost_data(
    open_log: Opener, disk: SimDisk, data_path: Names, index_path: Names, first_seq: int, codec: str, manifest: bool
) -> None:
    """D13. Method: retention announces in the manifest what it removes, so a lone index is no half-done removal."""
    if codec == "narwhal" and not manifest:
        return  # an index of one entry is all zeros, as a preallocated one is: it proves nothing by itself
    datas = written(open_log())
    if not manifest:
        without_manifest(disk)
    disk.remove(data_path(first_seq))
    index = disk.read_file(index_path(first_seq))
    log = open_log()
    assert [damage.fault[:2] for damage in log.report.damage] == [(first_seq, first_seq + 5)]
    assert disk.read_file(index_path(first_seq)) == index
    with pytest.raises(Corrupt):
        log.read(first_seq + 2)
    assert [record.data for record in log.records(skip_damage=True)] == datas[5:]


def test_foreign_files_are_neither_read_nor_touched(open_log: Opener, disk: SimDisk, codec: str) -> None:
    datas = written(open_log())
    names = [
        "notes.txt",
        "seg-1.data",
        "seg-0000000000000001.data.bak",
        "0000.log",
        "00000000000000000000.log~",
        "x00000000000000000000.index",
        "007.store",
        "-1.index",
        ".hidden",
        "sub/00000000000000000009.log",
    ]
    for name in names:
        disk.write_file(f"log/{name}", b"not yours")
    log = open_log(codec=None)
    assert log.codec == codec
    assert [record.data for record in log] == datas
    log.append(b"next")
    log.retain(keep_bytes=0)
    log.close()
    assert {path for path, data in disk.tree().items() if data == b"not yours"} == {f"log/{name}" for name in names}


# Numbers and watermarks.


def test_the_high_watermark_is_one_past_the_last_record_after_an_open(
    open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    """G113."""
    log = open_log(sync="interval")
    assert log.high_watermark == first_seq
    log.append_many([b"a", b"b", b"c"])
    assert log.high_watermark == first_seq
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        again = open_log(disk=image)
        assert again.high_watermark == again.durable == again.highest
        final = open_log(disk=image.crash_image("none"))
        assert final.highest == again.highest, "what counts as recovered is durable"


def test_a_number_is_never_given_twice(open_log: Opener, disk: SimDisk, clock: ManualClock, first_seq: int) -> None:
    """G98. Method: restarts between everything that removes records from the front, the middle or altogether."""
    given: list[int] = []
    machine = disk
    for number in range(30):
        log = open_log(disk=machine, segment_bytes_max=200)
        given += log.append_many([b"key %d" % (number % 3)] * 2)
        if number % 5 == 1:
            log.seal()
        if number % 5 == 2:
            log.retain(keep_bytes=0)
        if number % 5 == 3:
            log.compact(lambda record: record.data)
        if number % 5 == 4:
            clock.tick(10)
            log.remove_expired(5)
        machine = machine.crash_image("none")
    assert given == list(range(first_seq, first_seq + 60))


def test_a_log_of_one_empty_segment_keeps_its_place(
    open_log: Opener, disk: SimDisk, clock: ManualClock, first_seq: int
) -> None:
    """G98."""
    log = open_log()
    log.append_many([b"a", b"b"])
    clock.tick(10)
    log.remove_expired(5)
    for _ in range(3):
        disk = disk.crash_image("none")
        log = open_log(disk=disk)
        assert (len(log), log.highest) == (0, first_seq + 2)
    assert log.append(b"c") == first_seq + 2


def test_a_reopened_log_is_byte_for_byte_what_it_was(
    open_log: Opener, disk: SimDisk, data_path: Names, index_path: Names, first_seq: int
) -> None:
    """G47. Method: every kind of damage at once; the first open mends what it can, later ones change nothing."""
    datas = written(open_log(), sealed=6, active=6)
    flip(disk, data_path(first_seq), datas[2])
    path = data_path(first_seq + 6)
    disk.write_file(path, disk.read_file(path)[:-2])
    disk.write_file(f"{index_path(first_seq)}.rebuilding", b"stale")
    disk.write_file("log/notes.txt", b"mine")
    open_log().close()
    assert settled(open_log, disk)
    assert settled(open_log, disk)


def test_a_crash_at_any_step_of_recovery_is_recovered_from(
    open_log: Opener, disk: SimDisk, data_path: Names, index_path: Names, codec: str, first_seq: int
) -> None:
    """G48. Method: restarts from before every operation of a recovery that cuts, keeps, rebuilds and sweeps; each of
    them ends with the records of the one that was not disturbed."""
    datas = written(open_log())
    without_manifest(disk)
    path = data_path(first_seq + 5)
    flip(disk, path, datas[9])
    disk.write_file(path, disk.read_file(path) + b"torn")
    disk.write_file(f"{index_path(first_seq)}.rebuilding", b"stale")
    if codec != "laminar":
        disk.remove(index_path(first_seq))
        disk.sync_dir("log")
    expected = [record.data for record in open_log(disk=disk.reboot())]
    assert expected == datas[:9]

    def examine(_: int) -> None:
        for image in disk.images(("none", "all", "prefixes", "only_one"), limit=10):
            log = open_log(disk=image.disk)
            assert [record.data for record in log] == expected, image.label
            log.close()
            before = image.disk.digest()
            open_log(disk=image.disk).close()
            assert image.disk.digest() == before, image.label

    disk.on_op = examine
    open_log()
    disk.on_op = None
    examine(0)


def test_what_is_acked_after_a_kill_survives_the_next_power_cut(open_log: Opener) -> None:
    """G32, G96. Method: the process dies before every operation of an open, a seal and an append, its files stay as
    they are; the next process appends, and then the power fails. What it found and what it wrote must both be there."""
    for ops in range(1, 200):
        machine = SimDisk()
        machine.cut_power_at(ops)
        try:
            log = open_log(disk=machine)
            log.append(b"a")
            log.seal()
            log.append(b"b")
        except PowerOff:
            pass
        else:
            break
        machine = machine.reboot()
        log = open_log(disk=machine)
        found = [record.data for record in log]
        log.append(b"acked")
        again = open_log(disk=machine.crash_image("none"))
        assert [record.data for record in again] == [*found, b"acked"], f"killed before operation {ops}"
    else:
        pytest.fail("the scenario never came to its end")


def test_names_that_a_killed_process_left_are_durable_once_the_log_is_open(open_log: Opener) -> None:
    """Method: the process dies before every operation of a commit of consumer offsets, which renames a file; the next
    process finds the old offset or the new one, and the same is there after a power cut."""
    seen = set()
    for ops in range(1, 50):
        machine = SimDisk()
        log = open_log(disk=machine)
        log.append_many([b"a", b"b", b"c"])
        log.offsets.commit("group", 1)
        machine.cut_power_at(machine.op_count + ops)
        try:
            log.offsets.commit("group", 2)
        except PowerOff:
            pass
        else:
            break
        machine = machine.reboot()
        found = open_log(disk=machine).offsets.fetch("group")
        again = open_log(disk=machine.crash_image("none"))
        assert again.offsets.fetch("group") == found, f"killed before operation {ops}"
        seen.add(found)
    else:
        pytest.fail("the scenario never came to its end")
    assert seen == {1, 2}


# Logs from elsewhere.


@pytest.mark.parametrize("codec", ["rustlog"])
def test_a_log_without_checksums_is_read_and_gets_them_from_the_active_segment_on(
    open_log: Opener, disk: SimDisk
) -> None:
    log = open_log(checksums=False)
    datas = written(log)
    assert not [path for path in disk.tree() if path.endswith(".crc")]
    log = open_log()
    assert (log.report.damage, [record.data for record in log]) == ([], datas)
    log.append(b"into the old segment")
    log.seal()
    log.append(b"into a new one")
    log.close()
    kept = [path for path in disk.tree() if path.endswith(".crc")]
    assert kept == ["log/00000000000000000005.crc", "log/00000000000000000011.crc"]
    log = open_log()
    assert (log.report.clean, [record.data for record in log][-2:]) == (
        True,
        [b"into the old segment", b"into a new one"],
    )
    log.close()
    plain = open_log(checksums=False)
    assert [record.data for record in plain] == [*datas, b"into the old segment", b"into a new one"]


@pytest.mark.parametrize("codec", ["rustlog"])
def test_a_log_with_checksums_that_was_written_to_without_them_loses_nothing(open_log: Opener) -> None:
    """Method: the side-car is optional; a writer that does not keep it must not make records look unfinished."""
    datas = written(open_log())
    log = open_log(checksums=False)
    log.append(b"without")
    log.close()
    log = open_log()
    assert [record.data for record in log] == [*datas, b"without"]


@pytest.mark.parametrize("codec", ["laminar"])
def test_a_log_without_birth_files_is_read_and_ages_by_its_index(
    open_log: Opener, disk: SimDisk, clock: ManualClock
) -> None:
    datas = written(open_log())
    for path in disk.tree():
        if path.endswith(".created"):
            disk.remove(path)
    clock.tick(5_000)
    log = open_log(segment_age_ms_max=4_000)
    assert [record.data for record in log] == datas
    log.append(b"next")
    assert [len(segment) for segment in log.segments] == [5, 5, 1], "the last write is older than a segment may be"


def test_a_data_file_that_cannot_be_read_stops_the_opening_and_nothing_is_changed(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G57."""
    datas = written(open_log())
    before = disk.digest()
    disk.fail("read", path=data_path(first_seq + 5), times=None)
    for read_only in (False, True):
        with pytest.raises(Damaged):
            open_log(read_only=read_only)
    assert disk.digest() == before
    disk.clear_faults()
    assert [record.data for record in open_log()] == datas


def test_report_of_a_good_log_is_empty(open_log: Opener) -> None:
    written(open_log())
    report = open_log().report
    assert (report.clean, report.lines()) == (True, [])
    assert report == RecoveryReport(segments=2), "also what is not shown because nothing was cut"
