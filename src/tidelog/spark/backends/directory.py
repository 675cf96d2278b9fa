"""Topics in a directory, beside their writer or without one.

The driver opens it read-only: a manifest and the WAL after it, one consistent snapshot. Executors open the segment
files that the plan names and nothing else. A writer removes a file only when a second manifest does without it, and
only when nothing in it can be read any more; a file that is gone, or shorter than it was, is therefore not damage: the
seqs are looked for again in the directory as it is now. The same way is taken for a tail that is too large for the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from tidelog import database
from tidelog.database import Database
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.engine import BulkScan, Counts, Gap, Topic
from tidelog.engine.context import topic_directory
from tidelog.engine.read import SCHEMA
from tidelog.engine.segment import MmapCache, SegmentFiles
from tidelog.engine.segment import Segment as StoredSegment
from tidelog.engine.segment_listing import SegmentFile
from tidelog.errors import Corrupt, NotFound, Unavailable
from tidelog.formats import deletion_vector, segment_index
from tidelog.spark.backends.interface import (
    BoolArray,
    ColumnSet,
    InlineRecords,
    ReadChunk,
    ReadRange,
    SegmentInfo,
    TopicGap,
    TopicSnapshot,
    clip_counts,
    estimate_bytes,
)
from tidelog.spark.groups import DirectoryGroups

CHUNK_BYTES: Final = 4 << 20
_OPEN_ATTEMPTS: Final = 5
INLINE_TAIL_BYTES_MAX: Final = (
    8 << 20
)  # a tail up to this size is part of the plan, so that executors need not read the WAL

T = TypeVar("T")


class DirectoryBackend:
    has_timestamps = has_json_flag = True

    def __init__(self, path: str, *, disk: Disk | None = None, strong: bool = False) -> None:
        """`strong`: plans end with the last record that survives a power cut."""
        self._is_strong = strong
        self._path = path.rstrip("/") or "/"
        self._disk = disk or PosixDisk()

    @cached_property
    def _engine(self) -> Database:
        return self._open_reader()

    def _open_reader(self) -> Database:
        return _with_retries(lambda: database.open(self._path, read_only=True, disk=self._disk))

    def refresh(self) -> None:
        if "_engine" in self.__dict__:
            _with_retries(self._engine.refresh)

    def close(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.close()
            del self.__dict__["_engine"]

    @property
    def groups(self) -> DirectoryGroups:
        return DirectoryGroups(self._path, self._disk, self._engine)

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        return self._engine.names()

    def snapshot(self, topic: str) -> TopicSnapshot | None:
        found = self._engine.find(topic)
        if found is None:
            return None
        listing = found.segments(strong=self._is_strong)
        segments = [_segment_info(held) for held in listing.segments]
        state = found.state()
        return TopicSnapshot(
            topic,
            found.epoch,
            1,
            listing.head_seq + 1,
            listing.earliest_seq,
            listing.evict_floor,
            segments,
            estimate_bytes(listing.head_seq - listing.tail_from_seq, state.count, state.bytes),
        )

    def _get_topic(self, name: str) -> Topic:
        return self._engine.topic(name, create=False)

    def seek(self, topic: str, ts_ms: int) -> int:
        return self._get_topic(topic).seek(ts_ms)

    def gap_before(self, topic: str, first: int) -> TopicGap | None:
        return _to_gap(topic, self._get_topic(topic).scan(first - 1, first - 1).gap)

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        scan = self._get_topic(topic).scan(first - 1, stop - 1)
        for batch in scan.iter_arrow_batches():
            raise Corrupt(self._path, pos=0, reason=f"{topic}: {batch.num_rows} records where none should be")
        lost = _scan_gaps(topic, scan)
        return clip_counts(scan.counts, lost, first, stop), lost

    def last_seq_before_drop(self, topic: str, epoch: int) -> int | None:
        after = 0
        while rows := self._engine.gaps(topic, after_seq=after):
            for row in rows:
                if row.cause == "drop" and row.topic_id == epoch:
                    return row.last
            if rows[-1].seq <= after:  # the rest is not written yet, and has no seqs
                break
            after = rows[-1].seq
        return None

    def read_tail_inline(self, topic: str, first: int, stop: int) -> InlineRecords | None:
        scan = self._get_topic(topic).scan(first - 1, stop - 1)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            for batch in scan.iter_arrow_batches():
                writer.write_batch(batch)
        lost = _scan_gaps(topic, scan)
        counts = scan.counts._replace(rows=0) if scan.counts.rows else clip_counts(scan.counts, lost, first, stop)
        return InlineRecords(sink.getvalue().to_pybytes(), counts, lost)

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]:  # noqa: ARG002
        """Read the records of a range, a few megabytes at a time."""
        if read_range.file is None:
            yield from self._read_from_engine(read_range)
            return
        maps = MmapCache(1)  # of its own: what another task mapped may be another directory's by now
        home = SegmentFiles(self._disk, topic_directory(self._path, read_range.epoch), read_range.epoch, maps)
        data, index = home.open(read_range.file.base)
        entries = (read_range.file.stop - read_range.file.base) * segment_index.ENTRY_BYTES
        if data.size < read_range.file.size or len(index) < entries:
            yield from self._read_from_engine(read_range)
            return
        yield from _read_segment_file(home, read_range, verify=verify)

    def _read_from_engine(self, read_range: ReadRange, first: int | None = None) -> Iterator[ReadChunk]:
        """The same seqs, or those from `first` on, in the directory as it is now."""
        at = read_range.first if first is None else first
        try:
            reader = self._open_reader()
        except NotFound as error:
            raise Unavailable(
                f"{error}. This is an executor: every one of them has to see the path that the driver sees; mount it "
                "there, or read from a server"
            ) from error
        with reader:
            topic = reader.find(read_range.topic)
            if topic is None or topic.epoch != read_range.epoch:
                last = read_range.stop - 1
                lost = TopicGap(read_range.topic, at, last, "recreated" if topic else "dropped", 1, 0)
                yield ReadChunk(None, Counts(evicted=read_range.stop - at), (lost,))
                return
            yield from _read_records(topic, read_range, at)


def _with_retries(action: Callable[[], T]) -> T:
    """What a look at the directory finds. A writer that makes one checkpoint after the other can be faster than a busy
    machine looks, and a task that fails for that has read for nothing."""
    for _ in range(_OPEN_ATTEMPTS - 1):
        with suppress(Unavailable):
            return action()
    return action()


def _segment_info(file: SegmentFile) -> SegmentInfo:
    entries: list[np.ndarray[tuple[int], np.dtype[np.void]]] = []

    def frame_offset(seq: int) -> int:
        if seq >= file.stop:
            return file.size
        if not entries:
            content = file.content("idx")
            assert content is not None, "a segment has an index"
            entries.append(segment_index.read_entries(content)["frame_offset"])
        return int(entries[0][seq - file.base])

    def load_deleted() -> BoolArray | None:
        content = file.content("del")
        if content is None:
            return None
        found = np.zeros(file.records, bool)
        found[deletion_vector.decode(content).seqs() - file.base] = True
        return found

    return SegmentInfo(file.base, file.stop, file.size, file.sealed, frame_offset, load_deleted)


def _to_gap(topic: str, gap: Gap | None) -> TopicGap | None:
    if gap is None:
        return None
    return TopicGap(topic, gap.gap_from, gap.gap_to, gap.reason, gap.earliest_seq, gap.head_seq)


def _scan_gaps(topic: str, scan: BulkScan) -> tuple[TopicGap, ...]:
    return tuple(lost for gap in scan.gaps if (lost := _to_gap(topic, gap)) is not None)


def _read_segment_file(files: SegmentFiles, read_range: ReadRange, *, verify: bool) -> Iterator[ReadChunk]:
    file = read_range.file
    assert file is not None, "only for a range with a file"
    segment = StoredSegment(
        files,
        file.base,
        file.stop,
        file.size,
        live=file.stop - file.base,
        live_bytes=0,
        first_ts=0,
        last_ts=0,
        sealed=file.is_sealed,
    )
    if not verify:
        segment.skip_verification()
    dead, at = read_range.deleted_mask(), read_range.first
    while at < read_range.stop:
        chunk = segment.reader(at, read_range.stop, CHUNK_BYTES)()
        if chunk.fault is not None:
            reason = f"seqs {chunk.fault.seq} to {chunk.fault.resume - 1} cannot be read, {chunk.fault.reason}"
            raise Corrupt(files.path(file.base, ".data"), pos=chunk.fault.pos, reason=reason)
        rows, until = chunk.rows, min(chunk.next_seq, read_range.stop)
        holes = until - at - len(rows)
        if holes and holes != int(
            (segment.entries()["flags"][at - file.base : until - file.base] & segment_index.HOLE > 0).sum()
        ):
            reason = f"seqs {at} to {until - 1} are not all where their index says"
            raise Corrupt(files.path(file.base, ".data"), pos=0, reason=reason)
        deleted = 0
        if dead is not None:
            gone = dead[rows.seq - read_range.first]
            deleted = int(gone.sum())
            rows = rows.take(np.flatnonzero(~gone)) if deleted else rows
        yield ReadChunk(rows if len(rows) else None, Counts(deleted=deleted, holes=holes))
        at = until


def _read_records(topic: Topic, read_range: ReadRange, at: int) -> Iterator[ReadChunk]:
    """Read the range from `at` on through the engine, with what was lost or deleted since it was planned."""
    dead = read_range.deleted_mask()
    while at < read_range.stop:
        scan = topic.scan(at - 1, read_range.stop - 1)
        if scan.head_seq < read_range.stop - 1:
            raise Unavailable(
                f"{topic.name} ends at seq {scan.head_seq} here and at {read_range.stop - 1} where the query was "
                f"planned; "
                "nothing was written, run it again when this executor sees the same directory"
            )
        batches = scan.iter_arrow_batches()
        first = next(batches, None)
        if first is None and scan.next_from_seq >= read_range.stop - 1:
            lost = _scan_gaps(topic.name, scan)
            clipped = tuple(_clip_gap(each, read_range.stop) for each in lost)
            yield ReadChunk(None, clip_counts(scan.counts, lost, at, read_range.stop), clipped)
            return
        hidden = 0
        for batch in chain([first] if first is not None else [], batches):
            kept = batch
            if dead is not None:
                kept = batch.filter(pa.array(~dead[batch.column("seq").to_numpy() - read_range.first]))
                hidden += batch.num_rows - kept.num_rows
            yield ReadChunk(kept if kept.num_rows else None, Counts())
        counts = scan.counts._replace(rows=0)
        yield ReadChunk(None, counts + Counts(deleted=hidden), _scan_gaps(topic.name, scan))
        at = scan.next_from_seq + 1


def _clip_gap(gap: TopicGap, stop: int) -> TopicGap:
    return TopicGap(gap.topic, gap.first, min(gap.last, stop - 1), gap.cause, gap.earliest_seq, gap.head_seq)
