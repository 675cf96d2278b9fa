"""Append: batches, columns, numbers, and what an ack is worth when the power fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, TypeAlias

import numpy as np
import pytest

from tidelog.commitlog import SegmentedLog, convert
from tidelog.errors import BadInput, DiskFull, Refused, TooLarge, UnexpectedSeq
from tidelog.formats.rows import Rows, Span
from tidelog.testing import ManualClock, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
ROOM = {"tide": {"node", "tag", "meta"}, "rustlog": set(), "laminar": {"meta"}, "narwhal": {"node"}}


def rows_of(seqs: list[int], datas: list[bytes], times_us: list[int]) -> Rows:
    """Records as columns, made without a codec."""
    size = np.array([len(data) for data in datas], np.int64)
    pos = np.cumsum(size) - size
    seq, ts = np.array(seqs, np.int64), np.array(times_us, np.int64)
    return Rows(b"".join(datas), seq, ts, pos, Span(pos, size))


# Columns.


@pytest.mark.parametrize("column", ["node", "tag", "meta"])
def test_a_column_is_kept_or_refused_and_never_dropped(open_log: Opener, codec: str, column: str) -> None:
    log = open_log()
    one: dict[str, Any] = {column: b"value"}
    each: dict[str, Any] = {column: [b"", b"x" * 9, b"other"]}
    if column not in ROOM[codec]:
        for call in (lambda: log.append(b"a", **one), lambda: log.append_many([b"a", b"b", b"c"], **each)):
            with pytest.raises(BadInput, match=column):
                call()
        assert (len(log), log.size) == (0, 0)
        return
    log.append(b"a", **one)
    log.append_many([b"b", b"c", b"d"], **each)
    log.append_many([b"e", b"f"], **one)
    log.append(b"g")
    expected = [b"value", b"", b"x" * 9, b"other", b"value", b"value", b""]
    assert [getattr(record, column) for record in log] == expected
    assert [record.data for record in log] == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    log.seal()
    log.close()
    again = open_log()
    assert [getattr(record, column) for record in again] == expected
    assert again.to_arrow().column(column).to_pylist()[2] == b"x" * 9


@pytest.mark.parametrize("codec", ["tide"])
def test_the_native_layout_keeps_all_columns_at_once(open_log: Opener) -> None:
    log = open_log()
    log.append(b"a", node=b"n", tag=b"t", meta=b"m")
    log.append_many([b"b", b"c"], node=[b"n1", b"n2"], tag=b"t", meta=[b"", b"m2"])
    found = [(record.data, record.node, record.tag, record.meta) for record in log]
    assert found == [(b"a", b"n", b"t", b"m"), (b"b", b"n1", b"t", b""), (b"c", b"n2", b"t", b"m2")]


@pytest.mark.parametrize("codec", ["tide", "narwhal"])
def test_a_column_of_the_wrong_length_is_refused(open_log: Opener) -> None:
    log = open_log()
    with pytest.raises(BadInput, match="3 records came with 2 values of node"):
        log.append_many([b"a", b"b", b"c"], node=[b"x", b"y"])
    assert len(log) == 0


# Limits.


@pytest.mark.parametrize("codec", ["narwhal"])
def test_an_over_long_node_is_refused_without_changing_the_log(open_log: Opener, disk: SimDisk) -> None:
    """G145."""
    log = open_log()
    log.append(b"a", node=b"n" * 510)
    before = disk.digest()
    with pytest.raises(TooLarge, match="511"):
        log.append(b"b", node=b"n" * 511)
    with pytest.raises(TooLarge, match="511"):
        log.append_many([b"b", b"c"], node=[b"fine", b"n" * 511])
    assert (disk.digest(), log.append(b"b")) == (before, 2)


@pytest.mark.parametrize("codec", ["narwhal"])
def test_an_over_long_record_is_refused_without_changing_the_log(open_log: Opener, disk: SimDisk) -> None:
    """G145."""
    log = open_log(segment_bytes_max=100, segment_overflow_bytes=20)
    log.append(b"a")
    before = disk.digest()
    with pytest.raises(TooLarge, match="121"):
        log.append(b"x" * 121)
    assert (disk.digest(), log.append(b"b")) == (before, 2)


@pytest.mark.parametrize("codec", ["narwhal"])
def test_seq_zero_is_no_record_of_this_layout(open_log: Opener) -> None:
    """G145."""
    with pytest.raises(BadInput, match="0"):
        open_log(first_seq=0).append(b"a")


@pytest.mark.parametrize("codec", ["rustlog"])
def test_a_record_has_at_most_ten_mebibytes(open_log: Opener) -> None:
    log = open_log()
    assert log.append(bytes(10 << 20)) == 0
    with pytest.raises(TooLarge) as refused:
        log.append(bytes((10 << 20) + 1))
    assert (refused.value.size, refused.value.limit, len(log)) == ((10 << 20) + 1, 10 << 20, 1)


@pytest.mark.parametrize("codec", ["laminar"])
def test_a_seq_that_does_not_fit_its_width_is_refused(open_log: Opener) -> None:
    log = open_log(first_seq=(1 << 32) - 1)
    assert log.append(b"a") == (1 << 32) - 1
    with pytest.raises(BadInput, match=str(1 << 32)):
        log.append(b"b")
    with pytest.raises(BadInput, match=str(1 << 32)):
        log.append_stream([b"b"])
    assert [record.data for record in log] == [b"a"]
    log.close()
    with pytest.raises(BadInput, match="seqs of 4 bytes"):
        open_log(index_width=8)
    with open_log(read_only=True) as log, convert(log, "wide", "laminar", index_width=8) as wide:
        assert wide.append(b"b") == 1 << 32
        assert [record.data for record in wide] == [b"a", b"b"]


# Numbers.


def test_records_keep_their_own_seqs_and_times_when_they_bring_them(
    open_log: Opener, codec: str, first_seq: int
) -> None:
    log = open_log()
    log.append_rows(rows_of([first_seq, first_seq + 3, first_seq + 4], [b"a", b"b", b"c"], [1_000, 5_000, 5_000]))
    assert [(record.seq - first_seq, record.data) for record in log] == [(0, b"a"), (3, b"b"), (4, b"c")]
    if codec != "laminar":
        assert [record.ts_us for record in log] == [1_000, 5_000, 5_000]
    assert log.append(b"d") == first_seq + 5
    log.close()
    again = open_log()
    assert again.report.clean
    assert [(record.seq - first_seq, record.data) for record in again] == [(0, b"a"), (3, b"b"), (4, b"c"), (5, b"d")]


def test_a_seq_that_does_not_rise_is_refused_without_changing_the_log(
    open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    """G145."""
    log = open_log()
    log.append_many([b"a", b"b", b"c"])
    before = disk.digest()
    for seq in (first_seq, first_seq + 2):
        with pytest.raises(UnexpectedSeq) as refused:
            log.append_rows(rows_of([seq], [b"x"], [2_000_000_000_000_000]))
        assert (refused.value.expected, refused.value.actual) == (seq, first_seq + 3)
    assert disk.digest() == before


@pytest.mark.parametrize("codec", ["tide", "rustlog"])
def test_a_record_that_brings_an_older_time_is_refused_or_readable(open_log: Opener, first_seq: int) -> None:
    """G99. Method: these layouts take a time that falls for damage, so a log must never write one."""
    log = open_log()
    log.append(b"now")
    with suppress(Refused):
        log.append_rows(rows_of([first_seq + 1], [b"long ago"], [1_000_000]))
    log.append(b"after")
    held = list(log)
    log.close()
    again = open_log()
    assert (again.report.clean, list(again)) == (True, held)


def test_writers_of_several_threads_take_turns(open_log: Opener, first_seq: int) -> None:
    log = open_log(segment_bytes_max=1_000)
    seqs: dict[str, list[int]] = {name: [] for name in "abcd"}

    def write(name: str) -> None:
        for number in range(25):
            seqs[name].append(log.append(b"%s %d" % (name.encode(), number)))

    threads = [Thread(target=write, args=(name,)) for name in seqs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seq for found in seqs.values() for seq in found) == list(range(first_seq, first_seq + 100))
    for name, found in seqs.items():
        expected = [b"%s %d" % (name.encode(), number) for number in range(25)]
        assert [log.read(seq).data for seq in found] == expected


# Batches and segments.


def test_a_batch_larger_than_a_segment_is_spread_over_several(open_log: Opener, first_seq: int) -> None:
    log = open_log(segment_bytes_max=500, segment_overflow_bytes=100)
    datas = [b"%03d" % number * 20 for number in range(50)]
    assert log.append_many(datas) == range(first_seq, first_seq + 50)
    assert len(log.segments) > 4
    assert [record.data for record in log] == datas


def test_an_error_says_which_records_of_the_call_were_written_before_it(
    open_log: Opener, disk: SimDisk, first_seq: int, data_path: Callable[[int], str]
) -> None:
    log = open_log(segment_bytes_max=500, segment_overflow_bytes=100)
    datas = [b"%03d" % number * 20 for number in range(50)]
    disk.fail("write", 3, error=28, path="." + data_path(0).rpartition(".")[2])
    with pytest.raises(DiskFull) as failed:
        log.append_many(datas)
    acked = failed.value.acked
    assert acked.start == first_seq
    assert 0 < len(acked) < 50
    assert [record.data for record in log] == datas[: len(acked)]
    assert log.append_many(datas[len(acked) :]).stop == first_seq + 50
    assert [record.data for record in log] == datas


# What an ack is worth.


@pytest.mark.parametrize("sync", ["each", "batch"])
def test_what_was_acked_survives_a_power_cut(open_log: Opener, disk: SimDisk, sync: str) -> None:
    """G96, G120, G143. Method: after every call, what a restart finds when nothing unsynced survives."""
    log = open_log(sync=sync, segment_bytes_max=300)
    held: list[bytes] = []
    for number in range(12):
        part = [b"%d %d" % (number, i) * 10 for i in range(number % 3 + 1)]
        if number % 4 == 3:
            log.append_stream([part[0][:7], part[0][7:]])
            held += part[:1]
        else:
            log.append_many(part)
            held += part
        assert log.durable == log.high_watermark == log.highest
        image = disk.crash_image("none")
        assert [record.data for record in open_log(disk=image, sync=sync)] == held


def test_under_the_interval_policy_an_ack_survives_a_kill_and_a_sync_a_power_cut(
    open_log: Opener, disk: SimDisk, first_seq: int
) -> None:
    log = open_log(sync="interval")
    log.append_many([b"a", b"b"])
    assert (log.durable, log.highest) == (first_seq, first_seq + 2)
    assert [record.data for record in open_log(disk=disk.reboot())] == [b"a", b"b"]
    assert [record.data for record in open_log(disk=disk.crash_image("none"))] == []
    log.sync()
    assert log.durable == first_seq + 2
    assert [record.data for record in open_log(disk=disk.crash_image("none"))] == [b"a", b"b"]


def test_under_the_interval_policy_a_record_waits_no_longer_than_the_interval(
    open_log: Opener, disk: SimDisk, clock: ManualClock, first_seq: int
) -> None:
    log = open_log(sync="interval", sync_interval_ms=50)
    log.append(b"a")
    clock.tick(49)
    log.append(b"b")
    log.tick()
    assert log.durable == first_seq, "one millisecond early"
    clock.tick(1)
    log.tick()
    assert log.durable == first_seq + 2
    assert len(open_log(disk=disk.crash_image("none"))) == 2
    log.append(b"c")
    clock.tick(50)
    log.append(b"d")
    assert log.durable == first_seq + 4, "an append after the interval syncs what waited"


def test_closing_makes_everything_durable_whatever_the_policy(open_log: Opener, disk: SimDisk) -> None:
    log = open_log(sync="interval")
    log.append_many([b"a", b"b"])
    log.close()
    assert [record.data for record in open_log(disk=disk.crash_image("none"))] == [b"a", b"b"]


def test_sealing_makes_the_segment_durable_whatever_the_policy(open_log: Opener, disk: SimDisk, first_seq: int) -> None:
    """G114."""
    log = open_log(sync="interval")
    log.append_many([b"a", b"b"])
    log.seal()
    log.append(b"c")
    assert log.durable == first_seq + 2
    assert [record.data for record in open_log(disk=disk.crash_image("none"))] == [b"a", b"b"]


@pytest.mark.parametrize("count", [1, 2, 500])
def test_a_batch_costs_one_sync_whatever_its_size(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], first_seq: int, count: int
) -> None:
    log = open_log(sync="batch")
    log.append(b"the segment is there")
    before = len(disk.trace)
    log.append_many([b"x" * 50] * count)
    assert disk.trace[before:].count(f"sync {data_path(first_seq)}") == 1


@pytest.mark.parametrize("codec", ["laminar"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_the_store_is_on_disk_before_the_index_names_it(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], index_path: Callable[[int], str], streamed: bool
) -> None:
    """G62, G120."""
    log = open_log()
    log.append(b"before")
    before = len(disk.trace)
    if streamed:
        log.append_stream([b"some", b"thing"])
    else:
        log.append(b"something")
    steps = disk.trace[before:]
    written = max(at for at, step in enumerate(steps) if step.startswith(f"write {data_path(0)}"))
    named = min(at for at, step in enumerate(steps) if step.startswith(f"write {index_path(0)}"))
    assert f"sync {data_path(0)}" in steps[written:named]
    assert f"sync {index_path(0)}" in steps[named:]


def test_every_record_has_its_own_sync_when_that_is_asked_for(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], first_seq: int
) -> None:
    log = open_log(sync="each")
    log.append_many([b"x"] * 5)
    assert disk.trace.count(f"sync {data_path(first_seq)}") == 5


@pytest.mark.parametrize("codec", ["tide"])
def test_a_batch_of_the_native_layout_survives_whole_or_not_at_all(open_log: Opener, disk: SimDisk) -> None:
    """Method: cut the power inside a batch of several frames; look at every restart a sector apart."""
    log = open_log(sync="interval")
    log.append(b"before")
    log.sync()
    log.append_many([b"%04d" % number * 16 for number in range(9_000)], tag=b"t")
    sizes = {len(open_log(disk=image.disk)) for image in disk.images(("none", "all", "random"))}
    sizes |= {len(open_log(disk=image.disk)) for image in disk.images(("prefixes",), limit=40)}
    assert sizes == {1, 9_001}


# Frames that are laid into memory which is used again.


class Text(bytes):
    """Bytes of a class that the compiled kernel does not know."""


@pytest.mark.parametrize("kind", [bytes, Text])
def test_one_batch_does_not_lie_where_another_did(open_log: Opener, kind: type[bytes]) -> None:
    """Method: batches of one frame, of several, of a frame larger than what is kept, and small ones after them."""
    log = open_log()
    sizes = [[10] * 5, [1000] * 900, [3 << 20, 7], [0, 1, 0], [1 << 18] * 3, [5, 5]]
    batches = [[kind(bytes([number + 1]) * size) for size in batch] for number, batch in enumerate(sizes)]
    for batch in batches:
        log.append_many(batch)
    assert [record.data for record in log.records()] == [bytes(data) for batch in batches for data in batch]
