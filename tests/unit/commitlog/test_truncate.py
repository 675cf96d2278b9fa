"""Truncate: the end of a log moves back to a mark, in whatever segment, frame or hole the mark lies."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.errors import Corrupt, Error, OutOfRange
from tidelog.testing import ManualClock, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]
ENTRY = Struct("<QII")  # checksum, length, position


def three_segments(log: SegmentedLog) -> list[bytes]:
    """Batches and single records over two sealed segments and an active one, four records each."""
    datas = [b"record %d" % number * (number % 3 + 1) for number in range(12)]
    for start in range(0, 12, 4):
        if start:
            log.seal()
        log.append_many(datas[start : start + 3])
        log.append(datas[start + 3])
    return datas


def test_everything_can_be_forgotten_and_numbers_go_on_from_the_mark(open_log: Opener, first_seq: int) -> None:
    """G123, G124."""
    log = open_log()
    three_segments(log)
    assert log.truncate(first_seq) == 12
    assert (log.lowest, log.highest, list(log), log.segments) == (
        first_seq,
        first_seq,
        [],
        [range(first_seq, first_seq)],
    )
    with pytest.raises(OutOfRange):
        log.truncate(first_seq)
    log.close()
    again = open_log()
    assert (again.report.clean, again.highest) == (True, first_seq)
    assert again.append(b"anew") == first_seq
    assert [record.data for record in again] == [b"anew"]


@pytest.mark.parametrize("mark", range(12))
def test_a_second_truncate_after_new_records_is_as_good_as_the_first(
    open_log: Opener, first_seq: int, mark: int
) -> None:
    log = open_log()
    datas = three_segments(log)
    log.truncate(first_seq + mark)
    log.append_many([b"x", b"y", b"z"])
    log.truncate(first_seq + mark + 1)
    log.append(b"w")
    assert [record.data for record in log] == [*datas[:mark], b"x", b"w"]
    log.close()
    again = open_log()
    assert (again.report.clean, [record.data for record in again]) == (True, [*datas[:mark], b"x", b"w"])


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("mark", range(12))
def test_a_truncated_index_has_one_marker_and_contiguous_positions(open_log: Opener, disk: SimDisk, mark: int) -> None:
    """G118, G119, G124."""
    log = open_log()
    three_segments(log)
    log.truncate(mark)
    log.append(b"after")
    bases = sorted(int(path[4:-6]) for path in disk.tree() if path.endswith(".index"))
    ends = []
    for base in bases:
        index = disk.read_file(f"log/{base}.index")
        assert index[:16] == base.to_bytes(8, "little") + bytes(8)
        pos = 0
        for _, length, position in ENTRY.iter_unpack(index[16:]):
            assert position == pos
            assert length > 0
            pos += length
        assert pos == len(disk.read_file(f"log/{base}.store"))
        ends.append(base + len(index[16:]) // 16)
    assert [*bases[1:], mark + 1] == ends


@pytest.mark.parametrize("mark", range(12))
def test_truncated_segments_leave_no_file(open_log: Opener, disk: SimDisk, first_seq: int, mark: int) -> None:
    """G124."""
    log = open_log()
    three_segments(log)
    log.truncate(first_seq + mark)
    kept = {segment.start for segment in log.segments}
    bases = {first_seq, first_seq + 4, first_seq + 8}
    for base in bases - kept:
        assert not [path for path in disk.tree() if path.endswith(f"/{base}.store") or f"{base:016d}." in path]
    assert all(segment for segment in log.segments[:-1]), "no empty segment in front of another"
    assert {path for path in disk.tree() if path.endswith((".compacted", ".rebuilding", ".tmp"))} == set()


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize("kept", [1, 2, 4_500, 8_999])
def test_a_mark_inside_a_batch_of_several_frames_keeps_the_records_before_it(open_log: Opener, kept: int) -> None:
    log = open_log()
    log.append(b"before")
    datas = [b"%04d" % number * 16 for number in range(9_000)]
    log.append_many(datas, tag=b"t")
    log.truncate(2 + kept)
    assert [record.data for record in log] == [b"before", *datas[:kept]]
    log.close()
    again = open_log()
    assert (again.report.clean, len(again), again.read(1 + kept).data) == (True, 1 + kept, datas[kept - 1])
    assert again.read(1 + kept).tag == b"t"


def test_times_stay_in_order_after_a_truncate(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    """G99."""
    log = open_log()
    three_segments(log)
    clock.tick(1_000)
    log.truncate(first_seq + 6)
    clock.set_us(1_000_000)
    log.append(b"after")
    times = [record.ts_us for record in log]
    assert times == sorted(times)
    log.close()
    assert open_log().report.clean


def test_what_was_read_before_stays_what_it_was(open_log: Opener, first_seq: int) -> None:
    """Method: a table borrows the mapping of a sealed segment, which must therefore never be cut in place."""
    log = open_log()
    datas = three_segments(log)
    table = log.to_arrow()
    log.truncate(first_seq + 2)
    log.append_many([b"!" * 100] * 3)
    assert table.column("data").to_pylist() == datas


def test_a_truncate_inside_a_compacted_segment_counts_on_from_the_mark(open_log: Opener, first_seq: int) -> None:
    """G123. Method: the records just before the mark are holes, so only the numbering can remember it."""
    log = open_log()
    log.append_many([b"a", b"b", b"b", b"b", b"b", b"c"])
    log.seal()
    log.compact(lambda record: record.data)
    assert [record.seq - first_seq for record in log] == [0, 4, 5]
    log.truncate(first_seq + 3)
    assert log.highest == first_seq + 3
    assert log.append(b"x") == first_seq + 3
    assert [(record.seq - first_seq, record.data) for record in log] == [(0, b"a"), (3, b"x")]
    log.close()
    again = open_log()
    assert [(record.seq - first_seq, record.data) for record in again] == [(0, b"a"), (3, b"x")]
    assert not again.report.damage


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "active"])
def test_truncating_over_a_damaged_record_loses_no_good_one(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int, sealed: bool
) -> None:
    """G65, G105. Method: the second of ten records is flipped, the mark lies at the ninth. It may be refused; if it
    is done, what lies between the damage and the mark is still there, or is kept in quarantine and told."""
    log = open_log(index_every=1)
    for number in range(10):
        log.append(b"record %d" % number)
    if sealed:
        log.seal()
        log.append(b"behind")
    where = disk.read_file(data_path(first_seq)).index(b"record 1")
    disk.flip_bit(data_path(first_seq), where + 7, 0)
    try:
        log.truncate(first_seq + 8)
    except Error:
        pass
    else:
        assert log.highest == first_seq + 8
    log.close()
    again = open_log(index_every=1)
    found = {record.seq - first_seq: record.data for record in again.records(skip_damage=True)}
    kept = b"".join(data for path, data in disk.tree().items() if "quarantine" in path)
    for number in (0, *range(2, 8)):
        data = b"record %d" % number
        assert found.get(number) == data or data in kept, f"record {number} is gone without a trace"


def test_a_crash_at_any_step_of_a_truncate_leaves_the_end_between_the_mark_and_where_it_was(
    open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    """G125. Method: restarts from before every operation; the mark lies in a batch of the first segment."""
    log = open_log()
    datas = three_segments(log)
    ends: set[int] = set()

    def examine(_: int) -> None:
        for image in disk.images(("none", "all", "prefixes"), limit=8):
            again = open_log(disk=image.disk)
            ends.add(again.highest - first_seq)
            assert [record.data for record in again] == datas[: again.highest - first_seq], image.label
            assert not again.report.damage, image.label
            again.append(b"next")

    disk.on_op = examine
    log.truncate(first_seq + 2)
    disk.on_op = None
    examine(0)
    assert ends <= {2, 3, 4, 8, 12}
    assert {2, 12} <= ends


def test_a_flipped_record_below_the_mark_is_still_reported_after_it(
    open_log: Opener, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """G65. Method: the damage lies in a segment that the truncate does not touch."""
    log = open_log(index_every=1)
    three_segments(log)
    where = disk.read_file(data_path(first_seq)).index(b"record 1")
    disk.flip_bit(data_path(first_seq), where, 0)
    log.close()
    log = open_log(index_every=1)
    log.truncate(first_seq + 6)
    with pytest.raises(Corrupt):
        log.read(first_seq + 1)
    assert log.read(first_seq + 4).data.startswith(b"record 4")
