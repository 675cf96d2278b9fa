"""Bugs of the open log, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidelog.commitlog import SegmentedLog, restore, verify
from tidelog.commitlog.append import StreamAppend
from tidelog.commitlog.codec import Batch
from tidelog.errors import BadInput, Closed, Corrupt, Latched, OutOfRange, ReadOnly, Refused, WriteFailed
from tidelog.formats import frame
from tidelog.formats.rows import Rows, Span
from tidelog.testing import ManualClock, SimDisk

CODECS = ["tide", "rustlog", "laminar", "narwhal"]


def opened(disk: SimDisk, codec: str | None = None, **settings: Any) -> SegmentedLog:
    return SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), **settings)


@pytest.mark.parametrize("call", ["rename", "sync_dir"])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_laminar_compaction_that_fails_anywhere_keeps_every_newest_record(call: str, at: int) -> None:
    disk = SimDisk()
    log = opened(disk, "laminar")
    log.append_many([b"a1", b"b1", b"a2", b"c1"])
    log.seal()
    disk.fail(call, at)  # type: ignore[arg-type]
    with suppress(Latched, WriteFailed):  # whichever it is, nothing newest may be gone
        log.compact(lambda record: record.data[:1])
    disk.clear_faults()
    for reader in (log, opened(disk.reboot()), opened(disk.crash_image("none"))):
        assert {b"b1", b"a2", b"c1"} <= {record.data for record in reader}


@pytest.mark.parametrize("codec", CODECS)
def test_a_stream_that_ended_does_not_end_another(codec: str) -> None:
    log = opened(SimDisk(), codec)
    first = StreamAppend(log._log_state, Batch((b"",)), None)
    first.write(b"aa")
    first.roll_back()
    second = StreamAppend(log._log_state, Batch((b"",)), None)
    second.write(b"bb")
    first.roll_back()
    with pytest.raises(Closed):
        first.write(b"cc")
    assert log.read(second.commit()).data == b"bb"


def test_a_sync_that_comes_second_hears_of_the_failure_of_the_first() -> None:
    disk = SimDisk()
    log = opened(disk, "tide", sync="interval")
    log.append(b"a")
    disk.fail_sync("dropped", path=".data")
    with pytest.raises(Latched):
        log._log_state.active.sync_concurrently()
    with pytest.raises(Latched):
        log._log_state.active.sync()
    with pytest.raises(Latched):
        log.sync()
    assert log.durable < log.highest


def test_only_the_writer_commits_offsets() -> None:
    disk = SimDisk()
    writer = opened(disk, "tide")
    writer.append(b"a")
    reader = opened(disk, read_only=True)
    with pytest.raises(ReadOnly):
        reader.offsets.commit("group", 1)
    writer.close()
    with pytest.raises(Closed):
        writer.offsets.commit("group", 1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("other", CODECS)
def test_a_directory_is_opened_by_the_codec_that_wrote_it_and_no_other(codec: str, other: str) -> None:
    disk = SimDisk()
    with opened(disk, codec) as log:
        log.append(b"a")
    before = disk.tree()
    if other != codec:
        with pytest.raises(BadInput, match=f"holds a {codec} log"):
            opened(disk, other)
        assert disk.tree() == before
    with opened(disk) as log:
        assert (log.codec, [record.data for record in log]) == (codec, [b"a"])


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_a_segment_that_compaction_emptied_does_not_hide_the_records_before_it_from_a_time(codec: str) -> None:
    disk, clock = SimDisk(), ManualClock()
    log = SegmentedLog.open("log", codec, disk=disk, clock=clock)
    for key in (b"a", b"b", b"b", b"c"):
        log.append(key)
        log.seal()
        clock.tick(10)
    log.compact(lambda record: record.data)
    kept = list(log)
    assert [log.seek_time(record.ts_us) for record in kept] == [record.seq for record in kept]
    restore(log, "copy", to_time_us=kept[0].ts_us)
    copy = SegmentedLog.open("copy", disk=disk, clock=clock)
    assert [record.data for record in copy] == [b"a"]


@pytest.mark.parametrize("codec", CODECS)
def test_rows_whose_seqs_do_not_rise_are_refused(codec: str) -> None:
    log = opened(SimDisk(), codec)
    zero = np.zeros(3, np.int64)
    rows = Rows(b"abc", np.array([7, 5, 5]), zero, zero, Span(np.arange(3), zero + 1))
    with pytest.raises(BadInput, match="nothing was written"):
        log.append_rows(rows)
    assert len(log) == 0


def test_erasing_a_log_of_the_interval_policy_does_not_wait(tmp_path: object) -> None:
    """Method: the thread that keeps the interval wants the lock all the time; it must be stopped before."""
    for _ in range(20):
        log = SegmentedLog.open(f"{tmp_path}/log", sync="interval", sync_interval_ms=1)
        log.append(b"a")
        log.remove()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("settings", [{"maps_max": 1}, {"index_cache": 0}])
def test_reader_reports_no_damage_while_the_writer_compacts(codec: str, settings: dict[str, Any]) -> None:
    disk = SimDisk()
    writer = opened(disk, codec, segment_bytes_max=200)
    for number in range(20):
        writer.append(b"%d:%050d" % (number % 2, number))
    reader = opened(disk, read_only=True, **settings)
    list(reader)
    writer.seal()
    writer.compact(lambda record: record.data[:1])
    newest = {b"%d:%050d" % (number % 2, number) for number in (18, 19)}
    found: set[bytes] = set()
    first: int | None = None
    while not newest <= found:
        try:
            found |= {record.data for record in reader.records(first)}
        except OutOfRange as gone:  # compaction dropped whole segments at the front: told, not passed over
            first = max(gone.lowest, (first or 0) + 1)


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("size", [3, 400_000])
def test_sealing_never_makes_a_rotten_record_a_good_one(size: int, reopened: bool) -> None:
    """A bit flips in the active segment, which is then sealed: the record is damaged before and after, those around it
    are served, and `verify` finds it, also after a restart."""
    for pos in (10, 40, 60):
        disk = SimDisk()
        log = opened(disk, "tide", segment_bytes_max=5 * size + 1000)
        truth = {log.append(b"%d" % number * size): b"%d" % number * size for number in range(1, 5)}
        if reopened:
            log.close()
            log = opened(disk := disk.reboot(), "tide", segment_bytes_max=5 * size + 1000)
        at = 2 * (size + frame.OVERHEAD_BYTES) + pos % (size + frame.OVERHEAD_BYTES)
        disk.flip_bit(next(path for path in disk.tree() if path.endswith(".data")), at, 5)
        log.seal()
        truth |= {log.append(b"after"): b"after"}
        for _ in range(3):
            found: dict[int, bytes] = {}
            for seq in truth:
                with suppress(Corrupt):
                    found |= {record.seq: record.data for record in log.records(seq, seq + 1)}
            assert found == {seq: data for seq, data in truth.items() if seq != 3}
            found_wrong = verify("log", disk=disk).damage
            assert [damage.fault.seq for damage in found_wrong] == [3]
            log.close()
            log = opened(disk := disk.reboot(), "tide")


@pytest.mark.parametrize(
    ("codec", "columns"),
    [
        ("rustlog", {"tag": [b"", b"t"]}),
        ("narwhal", {"meta": [b"", b"m"]}),
        ("laminar", {"node": b"n"}),
        ("laminar", {"meta": b"\x01" + (3).to_bytes(4, "little")}),
        ("narwhal", {"node": b"n" * 600}),
    ],
)
def test_a_refused_append_leaves_every_file_as_it_was(tmp_path: Path, codec: str, columns: dict[str, Any]) -> None:
    """Before, seqs were reserved in the manifest first, a full segment was rolled, and under `each` the records before
    the refused one were written, although the error said that nothing was."""
    path = tmp_path / "log"

    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".tidelog.lock"}

    with SegmentedLog.open(str(path), codec, sync="each") as log:
        log.append_many([b"a", b"b", b"c"])
    SegmentedLog.open(str(path), codec, sync="each").close()  # cuts what the index has preallocated
    before = files()
    with SegmentedLog.open(str(path), codec, sync="each") as log, pytest.raises(Refused):
        log.append_many([b"d", b"e"], **columns)
    assert files() == before


def test_a_refused_stream_leaves_every_file_as_it_was() -> None:
    disk = SimDisk()
    with opened(disk, "rustlog", segment_bytes_max=64) as log:
        log.append(b"a" * 64)  # the next append rolls
    before = disk.tree()
    with opened(disk, "rustlog", segment_bytes_max=64) as log, pytest.raises(BadInput, match="tag"):
        log.append_stream([b"b"], tag=b"t")
    assert disk.tree() == before
