"""Reading: how much is fetched for an answer, what a reader sees of a log that moves on under it."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, iter_unpack
from threading import Thread
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.errors import OutOfRange
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.simulated_disk import SimFile

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every read of a file since the start of the test: path, pos and size."""
    seen: list[tuple[str, int, int]] = []
    real = SimFile.read

    def read(self: SimFile, pos: int, size: int, /) -> bytes:
        seen.append((self.path, pos, size))
        return real(self, pos, size)

    monkeypatch.setattr(SimFile, "read", read)
    return seen


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of every file that was mapped since the start of the test."""
    seen: list[str] = []
    real = SimFile.map

    def map_(self: SimFile) -> memoryview:
        seen.append(self.path)
        return real(self)

    monkeypatch.setattr(SimFile, "map", map_)
    return seen


# The sparse index.


@pytest.mark.parametrize("codec", ["rustlog"])
@pytest.mark.parametrize("every", [1, 7, 100])
def test_the_index_names_every_nth_record_from_the_first_on(
    open_log: Opener, disk: SimDisk, index_path: Names, every: int
) -> None:
    """G104. Method: positions are counted here, from 20 bytes of header and the data of each record."""
    log = open_log(index_every=every)
    datas = [b"x" * (number % 11) for number in range(250)]
    expected: list[tuple[int, int]] = []
    pos = 0
    for number, data in enumerate(datas):
        if number % every == 0:
            expected.append((number, pos))
        pos += 20 + len(data)
    log.append_many(datas[:120])
    for data in datas[120:200]:
        log.append(data)
    log.append_many(datas[200:])
    assert list(iter_unpack(">QQ", disk.read_file(index_path(0)))) == expected


@pytest.mark.parametrize("codec", ["rustlog"])
def test_a_lookup_walks_at_most_as_many_records_as_lie_between_two_entries(
    open_log: Opener, fetched: list[tuple[str, int, int]]
) -> None:
    """G104."""
    log = open_log(index_every=100)
    log.append_many([b"x" * 12] * 1_000)  # 32 bytes a record
    for seq in (0, 99, 100, 150, 199, 200, 950, 999):
        fetched.clear()
        assert log.read(seq).seq == seq
        ((_, pos, size),) = [read for read in fetched if read[0].endswith(".log")]
        assert pos == seq // 100 * 3_200, "from the largest indexed offset that is not above it"
        assert size <= 3_200


@pytest.mark.parametrize("codec", ["rustlog"])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_log_may_be_reopened_with_another_distance_between_index_entries(open_log: Opener, checksums: bool) -> None:
    log = open_log(index_every=10, checksums=checksums)
    datas = [b"%d" % number * 3 for number in range(65)]
    log.append_many(datas[:50])
    log.seal()
    log.append_many(datas[50:])
    log.close()
    for every in (3, 100, 10):
        again = open_log(index_every=every, checksums=checksums)
        assert again.report.damage == []
        assert [again.read(seq).data for seq in range(65)] == datas
        assert [record.data for record in again] == datas
        again.close()


@pytest.mark.parametrize("codec", ["narwhal"])
def test_the_index_of_narwhal_names_a_record_every_four_kibibytes(
    open_log: Opener, disk: SimDisk, index_path: Names, fetched: list[tuple[str, int, int]]
) -> None:
    """G149. Method: positions are counted here, from 26 bytes around the data of each record."""
    log = open_log()
    sizes = [number * 37 % 600 for number in range(200)]
    expected: list[tuple[int, int]] = []
    pos = 0
    for number, size in enumerate(sizes):
        if number == 0 or pos - expected[-1][1] >= 4_096:
            expected.append((number, pos))
        pos += 26 + size
    log.append_many([bytes(size) for size in sizes[:90]])
    for size in sizes[90:]:
        log.append(bytes(size))
    found = list(Struct("<IQ").iter_unpack(disk.read_file(index_path(1))[: len(expected) * 12]))
    assert found == expected
    for seq in (1, 50, 137, 200):
        fetched.clear()
        assert len(log.read(seq).data) == sizes[seq - 1]
        assert sum(size for path, _, size in fetched if path.endswith(".log")) <= 4_096 + 2 * 626


# Where bytes come from.


def test_sealed_data_is_mapped_and_the_active_segment_is_read(
    open_log: Opener, first_seq: int, data_path: Names, mapped: list[str], fetched: list[tuple[str, int, int]]
) -> None:
    log = open_log()
    log.append_many([b"a", b"b"])
    log.seal()
    log.append(b"c")
    fetched.clear()
    mapped.clear()
    assert [record.data for record in log] == [b"a", b"b", b"c"]
    assert mapped.count(data_path(first_seq)) == 1
    assert data_path(first_seq + 2) not in mapped
    assert data_path(first_seq) not in {path for path, _, _ in fetched}
    assert [record.data for record in log] == [b"a", b"b", b"c"]
    assert mapped.count(data_path(first_seq)) == 1, "a mapping is kept"


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "active"])
def test_batches_of_any_size_hold_the_same_records(open_log: Opener, sealed: bool) -> None:
    log = open_log()
    datas = [b"%d" % number * (number % 40) for number in range(300)]
    for start in range(0, 300, 100):
        log.append_many(datas[start : start + 50])
        for data in datas[start + 50 : start + 100]:
            log.append(data)
    if sealed:
        log.seal()
    for bytes_max in (1, 100, 5_000, 1 << 20):
        found = list(log.batches(bytes_max=bytes_max))
        seqs = [seq for rows in found for seq in rows.seq.tolist()]
        assert seqs == list(range(log.lowest, log.highest))
        assert sum(int(rows.data.size.sum()) for rows in found) == sum(map(len, datas))


# A log that moves on.


def test_an_iteration_ends_with_what_was_there_when_it_began(open_log: Opener) -> None:
    log = open_log(segment_bytes_max=200)
    log.append_many([b"a", b"b"])
    reading = iter(log)
    found = [next(reading).data]
    log.append(b"c")
    log.seal()
    log.append(b"d")
    found += [record.data for record in reading]
    assert found in ([b"a", b"b"], [b"a", b"b", b"c"], [b"a", b"b", b"c", b"d"]), "in order, whatever it sees"
    assert [record.data for record in log] == [b"a", b"b", b"c", b"d"]


def test_reader_of_dropped_records_gets_out_of_range(open_log: Opener) -> None:
    log = open_log()
    for data in (b"a", b"b", b"c"):
        log.append(data)
        log.seal()
    reading = log.batches()
    assert len(next(reading)) == 1
    log.retain(keep_bytes=0)
    with pytest.raises(OutOfRange) as told:
        list(reading)
    assert (told.value.lowest, told.value.highest) == (log.lowest, log.highest)


def test_a_record_outlives_the_log_it_came_from(open_log: Opener) -> None:
    log = open_log()
    log.append_many([b"kept", b"also"])
    log.seal()
    held = list(log)
    table = log.to_arrow()
    log.retain(keep_bytes=0)
    log.close()
    assert [record.data for record in held] == table.column("data").to_pylist() == [b"kept", b"also"]


def test_readers_of_several_threads_see_whole_records_while_a_writer_goes_on(open_log: Opener) -> None:
    log = open_log(segment_bytes_max=500)
    log.append(b"0")
    wrong: list[object] = []

    def read() -> None:
        for _ in range(15):
            found = [record.data for record in log]
            if found != [b"%d" % number for number in range(len(found))]:
                wrong.append(found)

    readers = [Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 60):
        log.append(b"%d" % number)
    for reader in readers:
        reader.join()
    assert not wrong


# By time.


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_a_time_is_found_in_a_log_of_one_empty_segment_too(
    open_log: Opener, clock: ManualClock, first_seq: int
) -> None:
    log = open_log()
    assert log.seek_time(0) == first_seq
    log.append(b"a")
    log.seal()
    assert (log.seek_time(0), log.seek_time(clock.now_us()), log.seek_time(clock.now_us() + 1)) == (
        first_seq,
        first_seq,
        first_seq + 1,
    )


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_seek_time_finds_a_record_after_compacted_ones(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    log = open_log()
    times = []
    for data in (b"k", b"k", b"x", b"k"):
        times.append(clock.now_us())
        log.append(data)
        log.seal()
        clock.tick(10)
    log.compact(lambda record: record.data)
    assert [record.seq - first_seq for record in log] == [2, 3]
    assert log.seek_time(0) == log.seek_time(times[1]) == log.seek_time(times[2]) == first_seq + 2
    assert log.seek_time(times[2] + 1) == first_seq + 3
