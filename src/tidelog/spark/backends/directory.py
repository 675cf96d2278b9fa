"""Topics in a directory, beside their writer or without one; or in a copy of a directory in an object store.

The driver opens it read-only: one consistent snapshot of a manifest and the WAL after it. Executors open only the
segment files of the plan: mapped from a directory, by byte ranges from an object store. A writer removes a file only
when two manifests no longer name it: none of its records can be read, or a rewrite copied them to another file. So a
missing or shorter file is not damage: the seqs are read from the present state of the directory, and so is a tail that
is too large for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from tidelog import database
from tidelog.database import Database
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.engine import BulkScan, Counts, Topic
from tidelog.engine.context import topic_directory
from tidelog.engine.manifest import epoch_topic_id
from tidelog.engine.read import SCHEMA
from tidelog.engine.segment import MmapCache, SegmentFiles
from tidelog.engine.segment import Segment as StoredSegment
from tidelog.engine.segment_listing import SegmentFile
from tidelog.errors import Corrupt, NotFound, Unavailable
from tidelog.formats import segment_index
from tidelog.spark.backends import interface
from tidelog.spark.backends.interface import (
    BoolArray,
    ColumnSet,
    InlineRecords,
    PlannedFile,
    ReadChunk,
    ReadRange,
    SegmentInfo,
    TopicGap,
    TopicSnapshot,
    clip_counts,
    decode_deletions,
    estimate_bytes,
    to_chunk,
)
from tidelog.spark.groups import DirectoryGroups

CHUNK_BYTES: Final = 4 << 20
_OPEN_ATTEMPTS: Final = 5
INLINE_TAIL_BYTES_MAX: Final = 8 << 20  # up to this size the tail is in the plan, and executors do not read the WAL

T = TypeVar("T")


class DirectoryBackend:
    has_timestamps = has_json_flag = True

    def __init__(
        self, path: str, *, disk: Disk | None = None, strong: bool = False, is_object_store: bool = False
    ) -> None:
        """`strong`: plans end with the last record that survives a power cut. `is_object_store`: `disk` is one, which
        is read by byte ranges and never written."""
        self._is_strong, self._is_object_store = strong, is_object_store
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
        return DirectoryGroups(self._path, self._disk, self._engine, read_only=self._is_object_store)

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        return self._engine.names()

    def snapshot(self, topic: str) -> TopicSnapshot | None:
        opened = self._engine.find(topic)
        if opened is None:
            return None
        listing = opened.segments(strong=self._is_strong)
        segments = [_segment_info(file) for file in listing.segments]
        state = opened.state()
        return TopicSnapshot(
            topic,
            opened.epoch,
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
        gap = self._get_topic(topic).scan(first - 1, first - 1).gap
        return None if gap is None else TopicGap.from_engine(topic, gap)

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        scan = self._get_topic(topic).scan(first - 1, stop - 1)
        for batch in scan.iter_arrow_batches():
            raise Corrupt(self._path, pos=0, reason=f"{topic}: {batch.num_rows} records where none should be")
        gaps = _scan_gaps(topic, scan)
        return clip_counts(scan.counts, gaps, first, stop), gaps

    def last_seq_before_drop(self, topic: str, epoch: int) -> int | None:
        after = 0
        while rows := self._engine.gaps(topic, after_seq=after):
            for row in rows:
                if row.cause == "drop" and row.topic_id == epoch_topic_id(epoch):
                    return row.last
            if rows[-1].seq <= after:  # later entries are not written yet and have no seqs
                break
            after = rows[-1].seq
        return None

    def read_tail_inline(self, topic: str, first: int, stop: int) -> InlineRecords | None:
        scan = self._get_topic(topic).scan(first - 1, stop - 1)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            for batch in scan.iter_arrow_batches():
                writer.write_batch(batch)
        gaps = _scan_gaps(topic, scan)
        counts = scan.counts._replace(rows=0) if scan.counts.rows else clip_counts(scan.counts, gaps, first, stop)
        return InlineRecords(sink.getvalue().to_pybytes(), counts, gaps)

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]:  # noqa: ARG002
        """Read the records of a range, a few megabytes at a time."""
        file, at = read_range.file, read_range.first
        if file is None:
            yield from self._read_from_engine(read_range, at)
            return
        maps = MmapCache(1)  # its own: another task may have mapped files of another directory
        topic_id = epoch_topic_id(read_range.epoch)
        files = SegmentFiles(self._disk, topic_directory(self._path, topic_id), topic_id, maps)
        if self._is_object_store:
            yield from self._read_ranges(files, read_range, file, verify=verify)
            return
        data, index = files.open(file.base, file.generation)
        if data.size < file.size or len(index) < (file.stop - file.base) * segment_index.ENTRY_BYTES:
            yield from self._read_from_engine(read_range, at)
            return
        yield from _read_segment_file(files, read_range, verify=verify)

    def _read_ranges(
        self, files: SegmentFiles, read_range: ReadRange, file: PlannedFile, *, verify: bool
    ) -> Iterator[ReadChunk]:
        at, label = read_range.first, files.path(file.base, file.generation, "")
        fetch = partial(_fetch_range, self._disk, label)
        try:
            for chunk, until in interface.read_segment_ranges(fetch, label, read_range, file, verify=verify):
                yield chunk
                at = until
        except NotFound:
            yield from self._read_from_engine(read_range, at)

    def _read_from_engine(self, read_range: ReadRange, at: int) -> Iterator[ReadChunk]:
        """Read the seqs from `at` on from the present state of the directory."""
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
                gap = TopicGap(read_range.topic, at, last, "recreated" if topic else "dropped", 1, 0)
                yield ReadChunk(None, Counts(evicted=read_range.stop - at), (gap,))
                return
            yield from _read_records(topic, read_range, at)


def _with_retries(action: Callable[[], T]) -> T:
    """Open or refresh a directory. A writer that makes many checkpoints can remove files faster than a busy machine
    opens them; without retries the task would fail and lose its work."""
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
            assert content is not None, "every segment has an index"
            entries.append(segment_index.read_entries(content)["frame_offset"])
        return int(entries[0][seq - file.base])

    def load_deleted() -> BoolArray | None:
        content = file.content("del")
        return None if content is None else decode_deletions(content, file.base, file.records)

    return SegmentInfo(file.base, file.stop, file.size, file.sealed, frame_offset, load_deleted, file.generation)


def _scan_gaps(topic: str, scan: BulkScan) -> tuple[TopicGap, ...]:
    return tuple(TopicGap.from_engine(topic, gap) for gap in scan.gaps)


def _fetch_range(disk: Disk, path: str, kind: str, lo: int, hi: int) -> bytes:
    path = f"{path}.{kind}"
    try:
        file = disk.open(path)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is gone") from error
    try:
        content = file.read(lo, hi - lo)
    finally:
        file.close()
    if len(content) < hi - lo:
        raise NotFound(f"{path} is shorter than it was")
    return content


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
        generation=file.generation,
    )
    if not verify:
        segment.skip_verification()
    deleted, at = read_range.deleted_mask(), read_range.first
    while at < read_range.stop:
        chunk = segment.reader(at, read_range.stop, CHUNK_BYTES)()
        if chunk.fault is not None:
            reason = f"seqs {chunk.fault.seq} to {chunk.fault.resume - 1} cannot be read, {chunk.fault.reason}"
            raise Corrupt(segment.path(".data"), pos=chunk.fault.pos, reason=reason)
        until = min(chunk.next_seq, read_range.stop)
        reason = f"seqs {at} to {until - 1} are not all where their index says"
        misplaced = partial(Corrupt, segment.path(".data"), pos=0, reason=reason)
        entries = segment.entries()[at - file.base : until - file.base]
        yield to_chunk(chunk.rows, entries, deleted, read_range.first, misplaced)
        at = until


def _read_records(topic: Topic, read_range: ReadRange, at: int) -> Iterator[ReadChunk]:
    """Read the range from `at` on through the engine, with the gaps and deletions since the plan."""
    deleted = read_range.deleted_mask()
    while at < read_range.stop:
        scan = topic.scan(at - 1, read_range.stop - 1)
        if scan.head_seq < read_range.stop - 1:
            raise Unavailable(
                f"{topic.name} ends at seq {scan.head_seq} here and at {read_range.stop - 1} where the query was "
                "planned; nothing was written, run it again when this executor sees the same directory"
            )
        batches = scan.iter_arrow_batches()
        first = next(batches, None)
        if first is None and scan.next_from_seq >= read_range.stop - 1:
            gaps = _scan_gaps(topic.name, scan)
            clipped = tuple(gap.clip(read_range.stop) for gap in gaps)
            yield ReadChunk(None, clip_counts(scan.counts, gaps, at, read_range.stop), clipped)
            return
        hidden = 0
        for batch in chain([first] if first is not None else [], batches):
            kept = batch
            if deleted is not None:
                kept = batch.filter(pa.array(~deleted[batch.column("seq").to_numpy() - read_range.first]))
                hidden += batch.num_rows - kept.num_rows
            yield ReadChunk(kept if kept.num_rows else None, Counts())
        counts = scan.counts._replace(rows=0)
        yield ReadChunk(None, counts + Counts(deleted=hidden), _scan_gaps(topic.name, scan))
        at = scan.next_from_seq + 1
