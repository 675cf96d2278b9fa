"""Logs of the commitlog library: rustlog, laminar, narwhal, and tide outside of topics. The codec `log` is the one that
the files show.

A log has no topics; the name of its directory is used as one. A root of partitions has `orders/0`, `orders/1`; the name
`orders` means all of them. The epoch is 0: a log is not created again under its name without removing its directory.
Records that retention dropped are a gap; records that compaction removed are holes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from tidelog.commitlog import PartitionedLog, SegmentedLog
from tidelog.commitlog.partitions import root_codec
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.engine import Counts
from tidelog.engine.manifest import SegmentRow
from tidelog.engine.segment_table import SegmentTable
from tidelog.errors import BadInput, NotFound, OutOfRange, Unavailable
from tidelog.spark.backends.interface import (
    ColumnSet,
    InlineRecords,
    ReadChunk,
    ReadRange,
    Segments,
    TopicGap,
    TopicSnapshot,
    no_segments,
)

CHUNK_BYTES: Final = 4 << 20


class CommitLogBackend:
    has_json_flag = False

    def __init__(self, path: str, codec: str, *, disk: Disk | None = None) -> None:
        self._path = path.rstrip("/") or "/"
        self._codec = None if codec == "log" else codec
        self._disk = disk or PosixDisk()
        self._logs: dict[str, SegmentedLog] = {}
        self._has_timestamps: bool | None = None

    @property
    def has_timestamps(self) -> bool:
        """Whether records have times: the files decide, a layout has variants with and without."""
        if self._has_timestamps is None:
            logs = list(self._logs.values()) or [self._open_log(name) for name in self.names()[:1]]
            self._has_timestamps = all(log._log_state.codec.created_suffix is None for log in logs)
        return self._has_timestamps

    def _open_root(self) -> PartitionedLog:
        codec = self._codec or root_codec(self._disk, self._path)
        return PartitionedLog.open(self._path, codec, read_only=True, disk=self._disk)

    def refresh(self) -> None:
        self.close()

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        found = self._disk.stat(self._path)
        if found is None or not found.is_dir:
            raise NotFound(f"there is no log at {self._path}; nothing was changed, check the path")
        if self._disk.stat(join(self._path, "topics")) is None:
            return [self._path.rpartition("/")[2]]
        with self._open_root() as root:
            return [f"{topic}/{number}" for topic, count in root.topics().items() for number in range(count)]

    def _open_log(self, name: str) -> SegmentedLog:
        if name not in self._logs:
            topic, slash, number = name.rpartition("/")
            path = join(self._path, f"topics/{topic}/partitions/{number}") if slash else self._path
            self._logs[name] = SegmentedLog.open(path, self._codec, read_only=True, disk=self._disk)
        return self._logs[name]

    def snapshot(self, topic: str) -> TopicSnapshot | None:
        if topic not in self.names():
            return None
        try:
            log = self._open_log(topic)
        except NotFound:
            if "/" not in topic:
                raise
            name, _, number = topic.rpartition("/")
            with self._open_root() as root:
                root.check_partition(name, int(number))  # raises if it had a log that is gone
            return TopicSnapshot(topic, 0, 0, 0, 0, 0, 0, 0, no_segments)  # a partition without records
        state = log._log_state
        sizes = [*(segment.size for segment in state.sealed), state.active.size]
        rows = [
            SegmentRow(held.start, held.stop, size, len(held), 0, 0, 0, True)
            for held, size in zip(log.segments, sizes, strict=True)
            if len(held)
        ]
        table, first = SegmentTable.of_rows(rows), state.codec.first_seq
        return TopicSnapshot(
            topic, 0, first, log.highest, log.lowest, log.lowest, log.highest, 0, partial(_list_segments, table)
        )

    def seek(self, topic: str, ts_ms: int) -> int:
        return self._open_log(topic).seek_time(ts_ms * 1000)

    def time_of(self, topic: str, seq: int) -> int | None:  # noqa: ARG002
        return None

    def gap_before(self, topic: str, first: int) -> TopicGap | None:
        log = self._open_log(topic)
        if first >= log.lowest:
            return None
        return TopicGap(topic, first, log.lowest - 1, "retention", log.lowest, log.highest - 1)

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        evicted = max(min(stop, self._open_log(topic).lowest) - first, 0)
        lost = self.gap_before(topic, first)
        return Counts(evicted=evicted, holes=stop - first - evicted), () if lost is None else (lost,)

    def last_seq_before_drop(self, topic: str, epoch: int) -> int | None:  # noqa: ARG002
        return None  # a log has no epochs

    def read_tail_inline(self, topic: str, first: int, stop: int) -> InlineRecords | None:  # noqa: ARG002
        return None

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]:  # noqa: ARG002
        """Read the records of a range. These codecs always verify."""
        try:
            log = self._open_log(read_range.topic)
        except (NotFound, BadInput) as error:
            raise Unavailable(
                f"{error}. This is an executor: every one of them has to see the path that the driver sees; mount it "
                "there"
            ) from error
        if log.highest < read_range.stop:
            raise Unavailable(
                f"{read_range.topic} ends before seq {read_range.stop} here, and reached it where the query was "
                "planned; nothing was written, run it again when this executor sees the same directory"
            )
        at = max(read_range.first, log.lowest)
        if at > read_range.first:
            at = min(at, read_range.stop)
            lost = TopicGap(read_range.topic, read_range.first, at - 1, "retention", log.lowest, log.highest - 1)
            yield ReadChunk(None, Counts(evicted=at - read_range.first), (lost,))
        if at == read_range.stop:
            return
        try:
            for rows in log.batches(at, read_range.stop, bytes_max=CHUNK_BYTES):
                until = int(rows.seq[-1]) + 1
                yield ReadChunk(rows, Counts(holes=until - at - len(rows)))
                at = until
        except OutOfRange as error:
            raise Unavailable(f"{error}; retention passed this reader, run the query again") from error
        if at < read_range.stop:
            yield ReadChunk(None, Counts(holes=read_range.stop - at))


def _list_segments(table: SegmentTable, first: int, stop: int) -> Segments:
    lo, hi = int(np.searchsorted(table.stop, first, "right")), int(np.searchsorted(table.base, stop))
    found = table.slice(lo, max(hi, lo))

    def frame_offset(at: int, seq: int) -> int:
        return int(found.size[at]) * (seq - int(found.base[at])) // int(found.records[at])

    return Segments(found, (), lambda _: None, frame_offset)
