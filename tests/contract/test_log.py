"""Every codec on every disk is the same log, awaited or not: whatever the bytes look like, the answers are these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
from tests.kit.awaited_log import AwaitedLog

from tidelog.commitlog import LogConfig, Page, SegmentedLog
from tidelog.disk.interface import Disk, join
from tidelog.disk.memory import MemoryDisk
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, Closed, Locked, NotFound, OutOfRange, ReadOnly, TooLarge, UnexpectedSeq
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Buffer, Record

Opener: TypeAlias = Callable[..., SegmentedLog]

FIRST = {"tide": 1, "rustlog": 0, "laminar": 0, "narwhal": 1}
COLUMNS = {"tide": {"node", "tag", "meta"}, "rustlog": set(), "laminar": {"meta"}, "narwhal": {"node"}}
RESOLUTION_US = {"tide": 1000, "rustlog": 1, "narwhal": 1000}
DATAS = [b"%d:" % number + b"x" * (number * 13 % 60) for number in range(40)]
BACK_US = 1_600_000_000_000_000  # years before the clock of the tests


@pytest.fixture(params=FIRST)
def codec(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["posix", "memory", "sim", "sim, awaited"])
def disk(request: pytest.FixtureRequest, clock: ManualClock) -> Disk:
    makers: dict[str, Callable[[], Disk]] = {
        "posix": PosixDisk,
        "memory": lambda: MemoryDisk(clock),
        "sim": lambda: SimDisk(clock=clock),
        "sim, awaited": lambda: SimDisk(clock=clock),
    }
    return makers[request.param]()


@pytest.fixture
def path(disk: Disk, tmp_path: Path) -> str:
    return str(tmp_path / "log") if isinstance(disk, PosixDisk) else "some/log"


@pytest.fixture
def open_log(codec: str, clock: ManualClock, disk: Disk, path: str, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Open the log, several times if wanted; a small segment unless told otherwise. Closed when the test is over."""
    opened: list[SegmentedLog] = []
    is_awaited = "awaited" in request.node.callspec.params["disk"]

    def open_it(**settings: Any) -> SegmentedLog:
        # A real sync takes milliseconds; what syncs promise is for other suites, on disks that can lose power.
        sync = "interval" if isinstance(disk, PosixDisk) else "batch"
        defaults: dict[str, Any] = {
            "codec": codec,
            "disk": disk,
            "clock": clock,
            "segment_bytes_max": 600,
            "sync": sync,
        }
        open_one = AwaitedLog.open if is_awaited else SegmentedLog.open
        opened.append(cast(SegmentedLog, open_one(path, **defaults | settings)))
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()
        if is_awaited:
            cast(AwaitedLog, log).end()


def fill(log: SegmentedLog, clock: ManualClock) -> list[Record]:
    """Append all of DATAS, singly and in batches, a millisecond apart; return what the log must hold."""
    written: list[Record] = []
    parts = [[data] for data in DATAS[:20]] + [DATAS[20:33], DATAS[33:]]
    for part in parts:
        now = clock.now_us()
        stamp = now - now % RESOLUTION_US[log.codec] if log.codec in RESOLUTION_US else 0
        written += [Record(seq, stamp, data) for seq, data in zip(log.append_many(part), part, strict=True)]
        clock.tick_us(1_234)
    return written


def contents(disk: Disk, directory: str) -> dict[str, bytes]:
    """Every file below a directory, whole."""
    found: dict[str, bytes] = {}
    for name in disk.list_dir(directory):
        below = join(directory, name)
        stat = disk.stat(below)
        if stat is not None and stat.is_dir:
            found |= contents(disk, below)
        else:
            file = disk.open(below)
            found[below] = file.read(0, file.size())
            file.close()
    return found


def pages(log: SegmentedLog, seq: int, *, limit: int | None = None, bytes_max: int | None = None) -> list[Page]:
    found = []
    while seq < log.highest:
        found.append(log.read_range(seq, limit=limit, bytes_max=bytes_max))
        assert found[-1].next_seq > seq, "a page that brings nothing must not be followed for ever"
        seq = found[-1].next_seq
    return found


# Writing and reading back.


def test_a_new_log_is_empty_and_says_where_it_will_begin(open_log: Opener, codec: str) -> None:
    log = open_log()
    first = FIRST[codec]
    assert (log.lowest, log.highest, len(log), list(log)) == (first, first, 0, [])
    assert (log.segments, log.size, log.codec, log.is_empty) == ([range(first, first)], 0, codec, True)
    assert log.report.clean


def test_what_was_appended_is_read_back_with_its_seq_and_time(open_log: Opener, clock: ManualClock, codec: str) -> None:
    """G122."""
    log = open_log()
    written = fill(log, clock)
    assert [record.seq for record in written] == list(range(FIRST[codec], FIRST[codec] + len(DATAS)))
    assert [log.read(record.seq) for record in written] == written
    assert list(log) == written
    assert (log.lowest, log.highest, len(log)) == (FIRST[codec], FIRST[codec] + len(DATAS), len(DATAS))
    assert len(log.segments) > 2, "the test should cross segments"


def test_a_record_may_be_empty_or_hold_any_byte(open_log: Opener) -> None:
    log = open_log()
    odd = [b"", bytes(range(256)), b"\0" * 30, b"", b"\xff" * 30]
    seqs = log.append_many(odd)
    assert [log.read(seq).data for seq in seqs] == odd
    assert [record.data for record in log] == odd


def test_an_empty_batch_writes_nothing(open_log: Opener, disk: Disk, path: str) -> None:
    log = open_log()
    log.append(b"one")
    before = contents(disk, path)
    assert log.append_many([]) == range(log.highest, log.highest)
    assert contents(disk, path) == before


def test_a_log_may_begin_at_any_seq(open_log: Opener) -> None:
    log = open_log(first_seq=42)
    assert (log.append(b"a"), log.lowest, log.highest) == (42, 42, 43)
    log.close()
    again = open_log(first_seq=7)
    assert (again.lowest, again.highest) == (42, 43), "a log that exists keeps its numbers"


def test_a_seq_outside_the_log_is_refused_with_the_range_it_has(open_log: Opener, clock: ManualClock) -> None:
    """G122."""
    log = open_log(first_seq=10)
    fill(log, clock)
    for asked in (9, -1, log.highest, log.highest + 100):
        with pytest.raises(OutOfRange) as refused:
            log.read(asked)
        error = refused.value
        assert (error.asked, error.lowest, error.highest) == (asked, 10, 10 + len(DATAS))
        assert str(asked) in str(error)


def test_reading_an_empty_log_is_out_of_range(open_log: Opener) -> None:
    log = open_log()
    with pytest.raises(OutOfRange, match="empty"):
        log.read(log.lowest)


def test_bounds_of_an_empty_log(open_log: Opener) -> None:
    log = open_log(first_seq=10)
    assert log.is_empty
    assert [log.has_index(seq) for seq in (9, 10, 11)] == [False] * 3
    assert [log.normalize_index(seq) for seq in (9, 10, 11)] == [None] * 3


def test_an_index_is_inside_from_the_lowest_to_below_the_highest(open_log: Opener, clock: ManualClock) -> None:
    log = open_log(first_seq=10)
    fill(log, clock)
    stop = 10 + len(DATAS)
    assert not log.is_empty
    assert [log.has_index(seq) for seq in (-1, 9, 10, 11, stop - 1, stop)] == [False, False, True, True, True, False]
    assert [log.normalize_index(seq) for seq in (9, 10, 17, stop - 1, stop)] == [None, 0, 7, len(DATAS) - 1, None]
    log.retain(keep_bytes=500)
    lowest = log.lowest
    assert lowest > 10
    assert (log.has_index(lowest - 1), log.normalize_index(lowest - 1)) == (False, None)
    assert (log.normalize_index(lowest), log.normalize_index(stop - 1)) == (0, len(log) - 1)
    log.truncate(lowest)
    assert (log.is_empty, log.has_index(lowest), len(log)) == (True, False, 0)


def test_any_range_can_be_read(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    written = fill(log, clock)
    low = log.lowest
    for first, stop in ((0, 1), (0, 7), (5, 6), (3, 31), (19, 22), (39, 40), (40, 40), (12, 999)):
        assert list(log.records(low + first, low + stop)) == written[first:stop]
    assert list(log.records(low + 17)) == written[17:]
    assert list(log.records(stop=low + 17)) == written[:17]


def test_range_that_starts_outside_is_refused(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    fill(log, clock)
    for asked in (log.lowest - 1, log.highest + 1):
        with pytest.raises(OutOfRange):
            list(log.records(asked))
        with pytest.raises(OutOfRange):
            log.read_range(asked)


def test_pages_by_count_follow_each_other_without_gap_or_repeat(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    written = fill(log, clock)
    for limit in (1, 2, 7, 40, 1_000):
        found = pages(log, log.lowest, limit=limit)
        assert [record for page in found for record in page.records] == written
        assert all(len(page.records) == limit for page in found[:-1])


def test_a_page_stays_within_its_byte_budget_or_is_one_record(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    written = fill(log, clock)
    for budget in (1, 30, 61, 150, 900, 100_000):
        found = pages(log, log.lowest, bytes_max=budget)
        assert [record for page in found for record in page.records] == written
        for page, following in pairwise(found):
            used = sum(len(record.data) for record in page.records)
            assert used <= budget or len(page.records) == 1
            more = used + len(following.records[0].data)
            assert more > budget, f"a page of {used} bytes left out a record that would have fitted"


def test_a_page_of_nothing_says_where_to_go_on(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    fill(log, clock)
    assert log.read_range(log.highest) == Page([], log.highest)
    assert log.read_range(log.lowest + 3, limit=0) == Page([], log.lowest + 3)
    assert log.read_range(log.lowest + 3, bytes_max=0) == Page([], log.lowest + 3)
    with pytest.raises(BadInput, match="-1"):
        log.read_range(log.lowest, limit=-1)


def test_an_arrow_table_holds_the_same_records(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    written = fill(log, clock)
    low = log.lowest
    for first, stop in ((None, None), (low + 7, low + 29), (low + 40, None)):
        table = log.to_arrow(first, stop)
        expected = list(log.records(first, stop))
        assert table.column("seq").to_pylist() == [record.seq for record in expected]
        assert table.column("data").to_pylist() == [record.data for record in expected]
        assert table.column("ts").cast("int64").to_pylist() == [record.ts_us for record in expected]
    assert log.to_arrow().num_rows == len(written)


# The optimistic check.


def test_an_expected_seq_is_written_when_it_is_the_next(open_log: Opener) -> None:
    log = open_log()
    low = log.lowest
    assert log.append(b"a", expected=low) == low
    assert log.append_many([b"b", b"c"], expected=low + 1) == range(low + 1, low + 3)
    assert log.append_stream([b"d"], expected=low + 3) == low + 3


def test_an_unexpected_seq_is_refused_with_both_numbers_and_nothing_is_written(
    open_log: Opener, disk: Disk, path: str
) -> None:
    log = open_log()
    log.append(b"a")
    before, actual = contents(disk, path), log.highest
    for expected in (actual - 1, actual + 1):
        writes: list[Callable[[], object]] = [
            partial(log.append, b"x", expected=expected),
            partial(log.append_many, [b"x", b"y"], expected=expected),
            partial(log.append_stream, [b"x"], expected=expected),
        ]
        for write in writes:
            with pytest.raises(UnexpectedSeq) as refused:
                write()
            assert (refused.value.expected, refused.value.actual) == (expected, actual)
    assert contents(disk, path) == before
    assert log.append(b"b") == actual


# Streams.


def test_a_record_can_come_in_chunks(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    log.append(b"before")
    clock.tick(3)
    chunks: list[Buffer] = [b"some ", b"", bytearray(b"large "), memoryview(b"record")]
    seq = log.append_stream(iter(chunks))
    plain = log.append(b"some large record")
    assert log.read(seq).data == log.read(plain).data == b"some large record"
    assert log.read(seq).ts_us == log.read(plain).ts_us
    assert [record.data for record in log] == [b"before", b"some large record", b"some large record"]


def test_a_record_can_come_in_chunks_that_are_awaited(open_log: Opener) -> None:
    log = open_log()

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"come ", b"slowly"):
            await asyncio.sleep(0)
            yield chunk

    seq = asyncio.run(log.append_stream_async(chunks(), expected=log.highest))
    assert log.read(seq).data == b"come slowly"
    assert log.append(b"next") == seq + 1


@pytest.mark.parametrize("columns", [(), ("meta",), ("node",), ("node", "tag", "meta")], ids=repr)
def test_a_streamed_record_and_an_appended_one_leave_the_same_bytes(
    open_log: Opener, disk: Disk, path: str, codec: str, columns: tuple[str, ...]
) -> None:
    values: dict[str, Any] = {name: f"its {name}".encode() for name in columns}
    log = open_log()
    if not set(columns) <= COLUMNS[codec]:
        before = contents(disk, path)
        for write in (partial(log.append, b"whole", **values), partial(log.append_stream, [b"whole"], **values)):
            with pytest.raises(BadInput, match="layout"):
                write()
        assert contents(disk, path) == before
        return
    log.append(b"whole", **values)
    log.close()
    plain = contents(disk, path)
    open_log().remove()
    log = open_log()
    seq = log.append_stream([b"wh", b"ole"], **values)
    record = log.read(seq)
    assert (record.data, {name: getattr(record, name) for name in columns}) == (b"whole", values)
    log.close()
    assert contents(disk, path) == plain


def test_a_meta_that_no_segment_can_hold_is_refused(open_log: Opener, disk: Disk, path: str, codec: str) -> None:
    log = open_log()
    if "meta" not in COLUMNS[codec]:
        return
    log.append(b"a")
    before = contents(disk, path)
    with pytest.raises(TooLarge, match="meta"):
        log.append_stream([b"x"], meta=bytes(901))
    assert contents(disk, path) == before
    seq = log.append_stream([b"x"], meta=b"m" * 500)
    assert (log.read(seq).data, log.read(seq).meta) == (b"x", b"m" * 500)


# Segments.


def test_a_full_segment_is_sealed_before_the_next_append_and_numbers_go_on(
    open_log: Opener, clock: ManualClock, disk: Disk, path: str
) -> None:
    """G119, G127."""
    log = open_log(segment_bytes_max=300, segment_overflow_bytes=100)
    fill(log, clock)
    segments = log.segments
    assert len(segments) > 3
    assert [segment.stop for segment in segments[:-1]] == [segment.start for segment in segments[1:]]
    assert all(len(segment) > 0 for segment in segments[:-1])
    log.close()
    datas = [len(data) for name, data in contents(disk, path).items() if name.endswith((".data", ".log", ".store"))]
    assert len(datas) == len(segments)
    assert max(datas) <= 300 + 100


def test_sealing_on_request_starts_a_new_segment_once(open_log: Opener) -> None:
    log = open_log()
    low = log.lowest
    assert not log.seal(), "there is nothing to seal in an empty log"
    log.append(b"a")
    assert log.seal()
    assert not log.seal()
    log.append(b"b")
    assert log.segments == [range(low, low + 1), range(low + 1, low + 2)]
    assert [record.data for record in log] == [b"a", b"b"]


@pytest.mark.parametrize("reopened", [False, True], ids=["open", "reopened"])
def test_a_segment_is_sealed_by_its_age_counted_from_its_creation(
    open_log: Opener, clock: ManualClock, reopened: bool
) -> None:
    log = open_log(segment_age_ms_max=1000)
    low = log.lowest
    log.append(b"a")
    clock.tick(999)
    if reopened:
        log.close()
        log = open_log(segment_age_ms_max=1000)
    log.append(b"b")
    assert len(log.segments) == 1, "one millisecond early"
    clock.tick(1)
    log.append(b"c")
    assert log.segments == [range(low, low + 2), range(low + 2, low + 3)]


def test_tick_seals_an_old_idle_segment(open_log: Opener, clock: ManualClock) -> None:
    log = open_log(segment_age_ms_max=1000)
    log.append(b"a")
    clock.tick(999)
    log.tick()
    assert len(log.segments) == 1
    clock.tick(1)
    log.tick()
    log.tick()
    assert [len(segment) for segment in log.segments] == [1, 0], "and an empty one does not grow old"


# Truncate.


@pytest.mark.parametrize("back", range(1, 13))
def test_truncate_keeps_records_before_the_mark_and_seqs_continue_from_it(open_log: Opener, back: int) -> None:
    """G118, G123, G124. Method: marks fall on segment bases, inside a batch and in the middle of a segment."""
    log = open_log()
    written: list[Record] = []
    for part in (DATAS[:2], DATAS[2:3], DATAS[3:6]):
        log.append_many(part)
        log.seal()
    log.append_many(DATAS[6:11])
    log.append(DATAS[11])
    written = list(log)
    mark = log.highest - back
    assert log.truncate(mark) == back
    assert (log.highest, list(log)) == (mark, written[: 12 - back])
    assert len([segment for segment in log.segments if not segment]) <= 1
    with pytest.raises(OutOfRange):
        log.read(mark)
    assert log.append(b"instead") == mark
    log.close()
    log = open_log()
    assert log.report.clean
    assert [record.data for record in log] == [*DATAS[: 12 - back], b"instead"]
    assert log.append(b"more") == mark + 1


def test_a_mark_outside_the_log_is_refused_and_nothing_is_forgotten(
    open_log: Opener, clock: ManualClock, disk: Disk, path: str
) -> None:
    log = open_log(first_seq=5)
    fill(log, clock)
    before = contents(disk, path)
    for mark in (4, log.highest, log.highest + 1):
        with pytest.raises(OutOfRange):
            log.truncate(mark)
    assert contents(disk, path) == before


# Close, reopen, remove.


def test_close_and_reopen_change_nothing(open_log: Opener, clock: ManualClock, disk: Disk, path: str) -> None:
    """G129."""
    log = open_log()
    written = fill(log, clock)
    log.sync()
    facts = (log.lowest, log.highest, len(log), log.size, log.segments, log.durable, log.high_watermark)
    log.close()
    before = contents(disk, path)
    again = open_log()
    assert again.report.clean, again.report.lines()
    assert facts == (
        *(again.lowest, again.highest, len(again), again.size, again.segments),
        *(again.durable, again.high_watermark),
    )
    assert list(again) == written
    again.close()
    assert contents(disk, path) == before


def test_a_log_is_reopened_with_the_codec_it_was_written_with(open_log: Opener, codec: str) -> None:
    log = open_log()
    log.append(b"a")
    log.close()
    again = open_log(codec=None)
    assert (again.codec, [record.data for record in again]) == (codec, [b"a"])


def test_the_size_is_the_bytes_on_disk(open_log: Opener, clock: ManualClock, disk: Disk, path: str) -> None:
    log = open_log()
    fill(log, clock)
    log.seal()
    counted = (".data", ".log", ".store", ".idx", ".index", ".crc")
    active = log.segments[-1].start
    found = sum(
        len(data) for name, data in contents(disk, path).items() if name.endswith(counted) and f"{active}." not in name
    )
    assert log.size == found
    log.append(b"x" * 100)
    assert log.size > found + 100


def test_a_closed_log_refuses_everything_and_closing_again_is_harmless(open_log: Opener) -> None:
    log = open_log()
    log.append(b"a")
    log.close()
    log.close()
    calls: list[Callable[[], object]] = [
        lambda: log.append(b"b"),
        lambda: log.append_many([b"b"]),
        lambda: log.append_stream([b"b"]),
        lambda: log.read(log.lowest),
        lambda: log.read_range(log.lowest),
        lambda: list(log),
        lambda: log.to_arrow(),
        lambda: log.truncate(log.lowest),
        lambda: log.seal(),
        lambda: log.sync(),
        lambda: log.retain(keep_bytes=0),
        lambda: log.remove_expired(0),
        lambda: log.compact(lambda record: record.data),
        lambda: log.seek_time(0),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()


def test_a_log_closes_itself_at_the_end_of_a_with_block(open_log: Opener) -> None:
    with open_log() as log:
        log.append(b"a")
    with pytest.raises(Closed):
        log.append(b"b")
    assert [record.data for record in open_log()] == [b"a"]


def test_remove_leaves_no_file(open_log: Opener, clock: ManualClock, disk: Disk, path: str) -> None:
    log = open_log()
    fill(log, clock)
    log.offsets.commit("group", log.highest)
    log.retain(keep_bytes=500)
    log.remove()
    assert disk.stat(path) is None
    assert open_log().append(b"a") == FIRST[log.codec], "and a new log begins anew"


def test_remove_leaves_foreign_files_alone(open_log: Opener, disk: Disk, path: str) -> None:
    log = open_log()
    log.append(b"a")
    foreign = disk.open(join(path, "notes.txt"), "create")
    foreign.write(0, b"mine")
    foreign.close()
    log.remove()
    assert contents(disk, path) == {join(path, "notes.txt"): b"mine"}


# Several processes.


def test_a_reader_beside_the_writer_sees_what_was_acked_and_changes_nothing(
    open_log: Opener, clock: ManualClock, disk: Disk, path: str
) -> None:
    log = open_log()
    written = fill(log, clock)
    before = contents(disk, path)
    reader = open_log(read_only=True)
    assert list(reader) == written
    assert (reader.lowest, reader.highest, reader.segments) == (log.lowest, log.highest, log.segments)
    assert contents(disk, path) == before
    log.append(b"later")
    after = contents(disk, path)
    assert list(reader) == written, "a reader sees what was there when it was opened"
    reader.close()
    assert contents(disk, path) == after
    assert [record.data for record in open_log(read_only=True)] == [*DATAS, b"later"]


def test_a_reader_refuses_to_write(open_log: Opener, clock: ManualClock, disk: Disk, path: str) -> None:
    log = open_log()
    fill(log, clock)
    log.close()
    before = contents(disk, path)
    reader = open_log(read_only=True)
    calls: list[Callable[[], object]] = [
        lambda: reader.append(b"b"),
        lambda: reader.append_many([b"b"]),
        lambda: reader.append_stream([b"b"]),
        lambda: reader.truncate(reader.lowest),
        lambda: reader.seal(),
        lambda: reader.sync(),
        lambda: reader.retain(keep_bytes=0),
        lambda: reader.remove_expired(0),
        lambda: reader.compact(lambda record: record.data),
        lambda: reader.remove(),
    ]
    for call in calls:
        with pytest.raises(ReadOnly):
            call()
    reader.tick()
    reader.close()
    assert contents(disk, path) == before


def test_read_only_open_of_nothing_raises_and_creates_nothing(open_log: Opener, disk: Disk, path: str) -> None:
    with pytest.raises(NotFound):
        open_log(read_only=True)
    assert disk.stat(path) is None
    disk.make_dir(path)
    with pytest.raises(NotFound):
        open_log(read_only=True)
    assert disk.list_dir(path) == []


def test_a_second_writer_is_refused_and_changes_nothing(
    open_log: Opener, clock: ManualClock, disk: Disk, path: str
) -> None:
    log = open_log()
    fill(log, clock)
    before = contents(disk, path)
    with pytest.raises(Locked, match="another"):
        open_log()
    assert contents(disk, path) == before
    log.append(b"still mine")
    log.close()
    assert open_log().read(log.highest - 1).data == b"still mine"


# Time.


def test_the_first_record_not_older_than_a_time_is_found(open_log: Opener, clock: ManualClock, codec: str) -> None:
    log = open_log()
    written = fill(log, clock)
    if codec == "laminar":
        with pytest.raises(BadInput, match="time"):
            log.seek_time(clock.now_us())
        return
    times = sorted({record.ts_us for record in written})
    for ts_us in [0, *times, *(ts - 1 for ts in times), *(ts + 1 for ts in times), times[-1] + 10**9]:
        expected = next((record.seq for record in written if record.ts_us >= ts_us), log.highest)
        assert log.seek_time(ts_us) == expected


@pytest.mark.parametrize("reopened", [False, True], ids=["open", "reopened"])
@pytest.mark.parametrize("sealed", [False, True], ids=["active", "sealed"])
def test_times_never_go_back_when_the_clock_does(
    open_log: Opener, clock: ManualClock, sealed: bool, reopened: bool
) -> None:
    """G99."""
    log = open_log()
    seq = log.append(b"a")
    if sealed:
        log.seal()
    if reopened:
        log.close()
        log = open_log()
    clock.set_us(BACK_US)
    log.append(b"b")
    log.append_stream([b"c"])
    times = [record.ts_us for record in log]
    assert times == [log.read(seq).ts_us] * 3
    clock.set_us(0)
    log.append_many([b"d", b"e"])
    log.close()
    again = open_log()
    assert again.report.clean
    assert [record.ts_us for record in again] == times[:1] * 5


# Settings that must not change an answer.


@pytest.mark.parametrize(("index_cache", "maps_max"), [(None, 256), (0, 1), (1, 2)])
def test_the_index_cache_changes_no_answer(
    open_log: Opener, clock: ManualClock, index_cache: int | None, maps_max: int
) -> None:
    log = open_log(index_cache=index_cache, maps_max=maps_max)
    written = fill(log, clock)
    mixed = sorted(written, key=lambda record: record.seq * 7919 % 41)
    assert [log.read(record.seq) for record in mixed] == mixed
    assert list(log) == written
    log.truncate(written[25].seq)
    assert [log.read(record.seq) for record in written[:25]] == written[:25]
    log.retain(keep_bytes=400)
    assert list(log) == written[log.lowest - written[0].seq : 25]
    log.close()
    log = open_log(index_cache=index_cache, maps_max=maps_max)
    assert list(log) == written[log.lowest - written[0].seq : 25]


@pytest.mark.parametrize("sync", ["each", "batch", "interval"])
def test_the_sync_policy_changes_no_answer_and_no_seq(open_log: Opener, clock: ManualClock, sync: str) -> None:
    log = open_log(sync=sync)
    written = fill(log, clock)
    assert list(log) == written
    log.sync()
    assert log.durable == log.highest
    log.close()
    again = open_log(sync=sync)
    assert (again.report.clean, list(again)) == (True, written)


def test_settings_come_one_by_one_or_as_a_config(open_log: Opener) -> None:
    log = open_log(config=LogConfig(segment_bytes_max=10_000, first_seq=9), segment_bytes_max=50)
    log.append_many([b"x" * 40, b"x" * 40, b"x" * 40])
    assert (log.lowest, len(log.segments)) == (9, 3)


def test_a_record_larger_than_a_segment_can_hold_is_refused(open_log: Opener, disk: Disk, path: str) -> None:
    log = open_log(segment_bytes_max=400, segment_overflow_bytes=100)
    log.append(b"a")
    before = contents(disk, path)
    with pytest.raises(TooLarge) as refused:
        log.append_many([b"b", b"x" * 501])
    assert refused.value.size == 501
    assert (contents(disk, path), refused.value.acked) == (before, range(0))
    log.append(b"b")
    assert [record.data for record in log] == [b"a", b"b"]


def test_only_bytes_are_records(open_log: Opener) -> None:
    log = open_log()
    for wrong in ("text", 7, None, bytearray(b"x")):
        with pytest.raises(BadInput, match="bytes"):
            log.append(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="str"):
        log.append_many([b"fine", "text"])  # type: ignore[list-item]
    with pytest.raises(BadInput, match="int"):
        log.append_stream([b"fine", 7])  # type: ignore[list-item]
    assert len(log) == 0
