"""Metrics of a log after histories whose numbers are known."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import ENOSPC
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidelog.commitlog import SegmentedLog, metrics
from tidelog.errors import DiskFull, Latched
from tidelog.testing import ManualClock, SimDisk

Opener = Callable[..., SegmentedLog]


def numbers(log: SegmentedLog, *names: str) -> list[Any]:
    snapshot = log.metrics.snapshot()
    return [snapshot[name] for name in names]


def test_a_new_log_has_written_nothing(open_log: Opener) -> None:
    with open_log() as log:
        names = ("appends", "records_appended", "bytes_appended", "reads", "segments_sealed", "sync_failures")
        assert numbers(log, *names) == [0] * len(names)
        assert numbers(log, "segments", "data_bytes", "unsynced_records", "latched", "damage") == [1, 0, 0, 0, 0]
        assert log.metrics.snapshot()["sync_seconds"]["count"] == 0


def test_appends_records_and_bytes_are_those_of_the_data_files(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], first_seq: int
) -> None:
    with open_log() as log:
        log.append(b"one")
        log.append_many([b"two", b"three"])
        log.append_stream([b"fo", b"ur"])
        log.append_many([])
        assert numbers(log, "appends", "records_appended", "highest_seq") == [3, 4, first_seq + 4]
        stat = disk.stat(data_path(first_seq))
        assert stat is not None
        assert numbers(log, "bytes_appended", "data_bytes") == [stat.size] * 2
        log.read(first_seq)
        list(log)
        assert numbers(log, "reads") == [2]


def test_segments_are_counted_by_size_sealed_and_dropped(open_log: Opener) -> None:
    with open_log() as log:
        for size in (10, 70_000, 300_000):
            log.append(bytes(size))
            log.seal()
        log.append(b"x")
        snapshot = log.metrics.snapshot()
        assert (snapshot["segments"], snapshot["segments_sealed"]) == (4, 3)
        sizes = snapshot["segment_bytes"]
        assert (sizes["count"], sizes["sum"]) == (4, snapshot["data_bytes"])
        assert [sizes["at_most"][str(bound)] for bound in ("65536", "262144")] == [2, 3]
        assert list(sizes["at_most"].values())[-1] == 4
        assert snapshot["data_bytes"] + snapshot["side_bytes"] == log.size
        log.read(log.lowest)
        mapped = numbers(log, "mapped_segments", "mapped_bytes")
        assert mapped[0] == 1
        assert mapped[1] >= 10
        log.drop_below(log.segments[1].stop)
        log.truncate(log.highest - 1)
        assert numbers(log, "segments", "segments_dropped", "truncations", "mapped_segments") == [2, 2, 1, 0]


def test_every_sync_of_a_file_is_measured(open_log: Opener, disk: SimDisk) -> None:
    with open_log(sync="batch") as log:
        disk.trace.clear()
        log.append(b"a")
        log.append_stream([b"b"])
        log.seal()
        segment = [line for line in disk.trace if line.startswith("sync ") and "." in line]
        synced = [line for line in segment if not any(part in line for part in (".foot", ".tmp", ".created"))]
        assert numbers(log, "sync_seconds")[0]["count"] == len(synced) > 2, synced


@pytest.mark.parametrize("slow_ms", [0, 3, 99, 101, 6000])
def test_the_duration_of_a_sync_is_in_its_bucket(slow_ms: int) -> None:
    clock = ManualClock()
    counters = metrics.LogCounters(clock)
    with counters.timed_sync():
        clock.tick(slow_ms)
    with suppress(OSError), counters.timed_sync():
        clock.tick(1)
        raise OSError("disk")
    seconds = slow_ms / 1000
    expected = [0] * (len(metrics.DURATION_BOUNDS_S) + 1)
    for value in (seconds, 0.001):
        expected[sum(bound < value for bound in metrics.DURATION_BOUNDS_S)] += 1
    assert counters.syncs.buckets == expected
    assert counters.syncs.sum_s == pytest.approx(seconds + 0.001)
    assert (counters.syncs.count, counters.sync_failures, counters.sync_max_us) == (2, 1, max(slow_ms, 1) * 1000)


def test_unsynced_records_are_those_that_a_power_cut_removes(open_log: Opener, clock: ManualClock) -> None:
    with open_log(sync="interval") as log:
        log.append_many([b"a", b"b", b"c"])
        assert numbers(log, "unsynced_records") == [3]
        assert numbers(log, "sync_seconds")[0]["count"] == 0
        clock.tick(60)
        log.tick()
        assert numbers(log, "unsynced_records") == [0]
        assert numbers(log, "sync_seconds")[0]["count"] >= 1


def test_failures_are_counted(open_log: Opener, disk: SimDisk) -> None:
    log = open_log()
    disk.fail("write", error=ENOSPC)
    with pytest.raises(DiskFull):
        log.append(b"a")
    assert numbers(log, "write_failures", "sync_failures", "latched") == [1, 0, 0]
    disk.fail_sync("kept")
    with pytest.raises(Latched):
        log.append(b"a")
    assert numbers(log, "sync_failures", "latched") == [1, 1]
    log.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_lost_index_is_counted_as_one_rebuild(
    open_log: Opener, disk: SimDisk, codec: str, index_path: Callable[[int], str], first_seq: int, read_only: bool
) -> None:
    if codec == "laminar":
        return  # its index is not derived: without it records are lost, which is damage
    with open_log() as log:
        log.append(b"a")
        log.seal()
        log.append(b"b")
        assert numbers(log, "index_rebuilds") == [0]
    disk.remove(index_path(first_seq))
    with open_log(read_only=read_only) as log:
        assert numbers(log, "index_rebuilds", "damage", "segments") == [1, 0, 2]
        assert [record.data for record in log] == [b"a", b"b"]


def test_damage_is_counted_when_it_is_found_and_when_it_is_skipped(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], first_seq: int
) -> None:
    with open_log() as log:
        log.append(b"a")
        log.seal()
        log.append(b"b")
    disk.remove(data_path(first_seq))
    with open_log() as log:
        assert numbers(log, "damage")[0] >= 1
        assert [record.data for record in log.records(skip_damage=True)] == [b"b"]
        assert numbers(log, "damage_skipped") == [1]


def test_page_faults_are_left_out_where_the_system_does_not_count_them(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log() as log:
        every, major = numbers(log, "process_page_faults", "process_major_page_faults")
        assert 0 <= major <= every
        monkeypatch.setattr(metrics, "page_faults", lambda: None)
        assert "process_page_faults" not in log.metrics.snapshot()
        assert "page_faults" not in log.metrics.prometheus_text()


def test_the_text_has_every_metric_of_the_snapshot(open_log: Opener) -> None:
    log = open_log('log "q"\\\n')
    log.append_many([b"a", b"b"])
    text, snapshot = log.metrics.prometheus_text(), log.metrics.snapshot()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = r'{log="log \"q\"\\\n"}'
    for name, value in snapshot.items():
        kind = re.search(rf"^# TYPE tidelog_log_{name}(_total)? (\w+)$", text, flags=re.M)
        assert kind is not None
        if isinstance(value, dict):
            assert int(samples[f"tidelog_log_{name}_count{label}"]) == value["count"]
            inf = f'tidelog_log_{name}_bucket{label[:-1]},le="+Inf"}}'
            assert int(samples[inf]) == value["count"]
        elif "page_faults" not in name:
            assert float(samples[f"tidelog_log_{name}{kind[1] or ''}{label}"]) == value
    assert "tidelog_log_records_appended_total 2\n" in log.metrics.prometheus_text({})
    log.close()


def test_the_text_is_what_prometheus_parses(open_log: Opener) -> None:
    with open_log() as log:
        log.append(b"a")
        parsed = text_string_to_metric_families(log.metrics.prometheus_text())
        families = {family.name: family for family in parsed}
        assert families["tidelog_log_appends"].samples[0].value == 1
        assert families["tidelog_log_sync_seconds"].type == "histogram"
        assert all(family.documentation for family in families.values())


def test_a_scrape_waits_for_no_lock(open_log: Opener) -> None:
    with open_log() as log, ThreadPoolExecutor(1) as pool, log._log_state.mutex:
        assert pool.submit(log.metrics.snapshot).result(30)["segments"] == 1
