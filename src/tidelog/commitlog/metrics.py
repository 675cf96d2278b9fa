"""Metrics of one log: what to watch, as a dict and in the text format of Prometheus.

`LogCounters` are plain integers that writing, reading and recovery add to, once a call and never once a record. Most
are changed under the log's mutex; those of syncs, which also run beside it, have a lock of their own. `LogMetrics` is
what `SegmentedLog.metrics` returns: it reads the counters and the segments at the moment of a scrape, without a lock,
so a scrape never waits for a write. Values of one scrape may therefore be of slightly different moments.

A row of `_METRICS` is a metric: name, kind, help text, and how its value is read. The thresholds to alert on are in
`docs/operations.md`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tidelog.clock import Clock, SystemClock
from tidelog.disk.process import page_faults

if TYPE_CHECKING:
    from tidelog.commitlog.log_state import LogState
    from tidelog.commitlog.segment import MmapReader

DURATION_BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
SEGMENT_BOUNDS_BYTES: Final = tuple(1 << power for power in range(16, 33, 2))  # 64 KiB to 4 GiB


class DurationHistogram:
    """Durations: the count in each bucket, the total count and the sum."""

    __slots__ = ("buckets", "count", "sum_s")

    def __init__(self) -> None:
        self.buckets, self.count, self.sum_s = [0] * (len(DURATION_BOUNDS_S) + 1), 0, 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.count += 1
        self.sum_s += seconds


class LogCounters:
    """Counts of one log since it was opened."""

    __slots__ = (
        *("_lock", "append_bytes", "append_calls", "append_records", "clock", "index_rebuild_us", "index_rebuilds"),
        *("reads", "recovery_us", "segments_dropped", "segments_sealed", "sync_failures", "sync_max_us", "syncs"),
        *("truncations", "write_failures"),
    )

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._lock = Lock()
        self.append_calls = self.append_records = self.append_bytes = self.write_failures = 0
        self.reads = self.segments_sealed = self.segments_dropped = self.truncations = 0
        self.index_rebuilds = self.index_rebuild_us = self.recovery_us = 0
        self.syncs, self.sync_failures, self.sync_max_us = DurationHistogram(), 0, 0

    @contextmanager
    def timed_sync(self) -> Iterator[None]:
        """Measure one sync of one file; count it as failed where it raises."""
        start_us, failed = self.clock.monotonic_us(), True
        try:
            yield
            failed = False
        finally:
            elapsed_us = self.clock.monotonic_us() - start_us
            with self._lock:
                self.syncs.add(elapsed_us / 1e6)
                self.sync_failures += failed
                self.sync_max_us = max(self.sync_max_us, elapsed_us)


class _Histogram(NamedTuple):
    """A histogram as a scrape shows it."""

    bounds: tuple[float, ...]
    buckets: list[int]  # the count in each bucket; one more than bounds, for what is above the last
    sum: float

    def as_dict(self) -> dict[str, Any]:
        cumulative = list(accumulate(self.buckets))
        within = {f"{bound:g}": count for bound, count in zip(self.bounds, cumulative[:-1], strict=True)}
        return {"count": cumulative[-1], "sum": self.sum, "at_most": within}

    def lines(self, name: str, labels: dict[str, str]) -> Iterator[str]:
        cumulative = list(accumulate(self.buckets))
        for bound, count in zip((*(f"{bound:g}" for bound in self.bounds), "+Inf"), cumulative, strict=True):
            yield f"{name}_bucket{_label_text(labels | {'le': bound})} {count}"
        yield f"{name}_sum{_label_text(labels)} {self.sum}"
        yield f"{name}_count{_label_text(labels)} {cumulative[-1]}"


class _Metric(NamedTuple):
    name: str  # in Prometheus after `tidelog_log_`; a counter gets `_total`
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[LogState, LogCounters], int | float | _Histogram | None]  # None: the system does not say


def _data_bytes(state: LogState) -> list[int]:
    return [*(segment.size for segment in list(state.sealed)), state.active.size]


def _segment_histogram(state: LogState, _: LogCounters) -> _Histogram:
    sizes = _data_bytes(state)
    buckets = [0] * (len(SEGMENT_BOUNDS_BYTES) + 1)
    for size in sizes:
        buckets[bisect_left(SEGMENT_BOUNDS_BYTES, size)] += 1
    return _Histogram(SEGMENT_BOUNDS_BYTES, buckets, sum(sizes))


def _sync_histogram(_: LogState, counters: LogCounters) -> _Histogram:
    return _Histogram(DURATION_BOUNDS_S, list(counters.syncs.buckets), counters.syncs.sum_s)


def _side_bytes(state: LogState, _: LogCounters) -> int:
    return sum(segment.side_bytes for segment in list(state.sealed)) + state.active.side_bytes


def _mapped_bytes(state: LogState, _: LogCounters) -> int:
    readers: list[MmapReader] = state.files.mapped_data.values()
    return sum(reader.size for reader in readers)


def _cached_index_bytes(state: LogState, _: LogCounters) -> int:
    return sum(len(side) for sides in state.files.cached_sides.values() for side in sides if side is not None)


def _faults(number: int) -> Callable[[LogState, LogCounters], int | None]:
    def read(_: LogState, __: LogCounters) -> int | None:
        faults = page_faults()
        return None if faults is None else faults[number]

    return read


_METRICS: Final = (
    _Metric("appends", "counter", "Calls that wrote records.", lambda _, c: c.append_calls),
    _Metric("records_appended", "counter", "Records written.", lambda _, c: c.append_records),
    _Metric("bytes_appended", "counter", "Bytes written to data files, framing included.", lambda _, c: c.append_bytes),
    _Metric(
        "write_failures", "counter", "Writes that the disk refused, rolled back or not.", lambda _, c: c.write_failures
    ),
    _Metric("reads", "counter", "Reads of a record, or of a chunk of records, from a segment.", lambda _, c: c.reads),
    _Metric("damage_skipped", "counter", "Damaged places that readers skipped.", lambda s, _: s.damage_skipped),
    _Metric("sync_seconds", "histogram", "Duration of each sync of a file of the active segment.", _sync_histogram),
    _Metric(
        "sync_seconds_max", "gauge", "The longest of them since the log was opened.", lambda _, c: c.sync_max_us / 1e6
    ),
    _Metric(
        "sync_failures", "counter", "Syncs that failed; the log refuses writes after one.", lambda _, c: c.sync_failures
    ),
    _Metric("segments_sealed", "counter", "Segments that became immutable.", lambda _, c: c.segments_sealed),
    _Metric(
        "segments_dropped", "counter", "Segments dropped by retention or compaction.", lambda _, c: c.segments_dropped
    ),
    _Metric("truncations", "counter", "Calls of truncate that removed records.", lambda _, c: c.truncations),
    _Metric("index_rebuilds", "counter", "Index files built again from their data.", lambda _, c: c.index_rebuilds),
    _Metric("index_rebuild_seconds", "counter", "Time spent on that.", lambda _, c: c.index_rebuild_us / 1e6),
    _Metric(
        "recovery_seconds", "gauge", "How long recovery took when the log was opened.", lambda _, c: c.recovery_us / 1e6
    ),
    _Metric("damage", "gauge", "Damaged places that recovery found.", lambda s, _: len(s.report.damage)),
    _Metric("latched", "gauge", "1 after a failure that stopped all writing.", lambda s, _: int(s.latch.is_tripped)),
    _Metric("segments", "gauge", "Segments, the active one included.", lambda s, _: len(s.sealed) + 1),
    _Metric("segment_bytes", "histogram", "Data bytes of each segment.", _segment_histogram),
    _Metric("data_bytes", "gauge", "Bytes of all data files.", lambda s, _: sum(_data_bytes(s))),
    _Metric("side_bytes", "gauge", "Bytes of all index and checksum files.", _side_bytes),
    _Metric("lowest_seq", "gauge", "The first seq of the log.", lambda s, _: s.lowest),
    _Metric("highest_seq", "gauge", "The seq of the next record.", lambda s, _: s.highest),
    _Metric(
        "unsynced_records",
        "gauge",
        "Records that a power cut would remove.",
        lambda s, _: max(s.highest - s.durable, 0),
    ),
    _Metric("mapped_segments", "gauge", "Data files that are mapped.", lambda s, _: len(s.files.mapped_data)),
    _Metric(
        "mapped_bytes",
        "gauge",
        "Bytes of the mapped data files.",
        _mapped_bytes,
    ),
    _Metric("cached_index_bytes", "gauge", "Bytes of the index files that are mapped.", _cached_index_bytes),
    _Metric("process_page_faults", "counter", "Page faults of the whole process, with and without a read.", _faults(0)),
    _Metric("process_major_page_faults", "counter", "Those that waited for the device.", _faults(1)),
)


class LogMetrics:
    """The metrics of one log. A scrape takes no lock and touches no file."""

    __slots__ = ("_state",)

    def __init__(self, state: LogState) -> None:
        self._state = state

    def _values(self) -> Iterable[tuple[_Metric, int | float | _Histogram]]:
        state, counters = self._state, self._state.files.counters
        return ((row, value) for row in _METRICS if (value := row.read(state, counters)) is not None)

    def snapshot(self) -> dict[str, Any]:
        """Return every metric by name. A histogram is a dict: `count`, `sum`, and `at_most`, the count up to each
        bound. Metrics that this system does not have are left out."""
        return {row.name: value.as_dict() if isinstance(value, _Histogram) else value for row, value in self._values()}

    def prometheus_text(self, labels: dict[str, str] | None = None) -> str:
        """Return every metric in the text format of Prometheus, with these labels; by default `log`, its path."""
        labels = {"log": self._state.path} if labels is None else labels
        lines: list[str] = []
        for row, value in self._values():
            name = f"tidelog_log_{row.name}{'_total' if row.kind == 'counter' else ''}"
            lines += [f"# HELP {name} {row.help}", f"# TYPE {name} {row.kind}"]
            if isinstance(value, _Histogram):
                lines += value.lines(name, labels)
            else:
                lines.append(f"{name}{_label_text(labels)} {value}")
        return "\n".join(lines) + "\n"


def _label_text(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
