"""Topics in a directory, beside their writer or without one; or in a copy of a directory in an object store.

The driver opens it read-only: one consistent snapshot of a manifest, with its segments as columns, and of the WAL after
it. It opens it again only if the manifest or the WAL has changed. Executors open only the
segment files of the plan: mapped from a directory, by byte ranges from an object store. A writer removes a file only
when two manifests no longer name it: none of its records can be read, or a rewrite copied them to another file. So a
missing or shorter file is not damage: the seqs are read from the present state of the directory, and so is a tail that
is too large for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Final, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog import database
from tidelog.clock import SystemClock
from tidelog.commitlog.codec import Chunk
from tidelog.database import Database
from tidelog.disk.interface import Disk, Stat
from tidelog.disk.posix import PosixDisk
from tidelog.engine import BulkScan, Counts, EngineConfig, Topic
from tidelog.engine.cold_reader import ColdReader
from tidelog.engine.context import topic_directory
from tidelog.engine.manifest import ColdRow, SegmentRow, epoch_topic_id, list_manifest_numbers
from tidelog.engine.read import SCHEMA, iter_wal_files
from tidelog.engine.segment import MmapCache, SegmentFiles
from tidelog.engine.segment import Segment as StoredSegment
from tidelog.engine.segment_listing import SegmentTableList
from tidelog.engine.segment_table import SegmentTable, decode_segment_row
from tidelog.engine.startup import open_cold_store
from tidelog.engine.topic import topic_operations
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
    Segments,
    TopicGap,
    TopicSnapshot,
    clip_counts,
    decode_deletions,
    estimate_bytes,
    read_each,
    to_chunk,
)
from tidelog.spark.groups import DirectoryGroups

CHUNK_BYTES: Final = 4 << 20
_OPEN_ATTEMPTS: Final = 5
INLINE_TAIL_BYTES_MAX: Final = 8 << 20  # up to this size the tail is in the plan, and executors do not read the WAL

T = TypeVar("T")


class DirectoryWatch:
    """Detects what a writer did to a directory since the last call, without reading it: by the names of manifests, and
    by names, sizes and times of WAL files."""

    def __init__(self, disk: Disk, path: str, settle_ms: int) -> None:
        """`settle_ms`: file times are coarser than writes, so for so long after a change every call reports one."""
        self._disk, self._path, self._settle_ms = disk, path, settle_ms
        self._clock = SystemClock()
        self._seen: _DirectoryState | None = None
        self._changed_at_ms = 0
        self.changed()

    def changed(self) -> bool:
        try:
            now = list_manifest_numbers(self._disk, self._path), list(iter_wal_files(self._disk, self._path))
        except OSError:  # the open that follows says what is wrong
            self._seen = None
            return True
        if now == self._seen:
            return self._clock.monotonic_ms() - self._changed_at_ms < self._settle_ms
        self._seen, self._changed_at_ms = now, self._clock.monotonic_ms()
        return True

    def report_change_again(self) -> None:
        """Let the next call return True: the change could not be read."""
        self._seen = None


_DirectoryState: TypeAlias = tuple[list[int], list[tuple[str, Stat | None]]]
_SETTLE_MS: Final = 50
_STORE_SETTLE_MS: Final = 2_000  # times of objects are whole seconds


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
        """The directory without its segments: they are columns of the manifest."""
        settle_ms = _STORE_SETTLE_MS if self._is_object_store else _SETTLE_MS
        # Before the open: what is written meanwhile is a change.
        self._watch = DirectoryWatch(self._disk, self._path, settle_ms)
        return _with_retries(lambda: database.open_for_planning(self._path, self._disk))

    def _open_reader(self) -> Database:
        return _with_retries(lambda: database.open(self._path, read_only=True, disk=self._disk))

    def refresh(self) -> None:
        if "_engine" in self.__dict__ and self._watch.changed():
            try:
                _with_retries(self._engine.refresh)
            except BaseException:
                self._watch.report_change_again()
                raise

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
        listing = topic_operations(opened).segment_table(strong=self._is_strong)
        state = opened.state()
        files = SegmentFiles(self._disk, topic_directory(self._path, epoch_topic_id(opened.epoch)), 0, MmapCache(1))
        return TopicSnapshot(
            topic,
            opened.epoch,
            1,
            listing.head_seq + 1,
            listing.earliest_seq,
            listing.evict_floor,
            listing.tail_from_seq + 1,
            estimate_bytes(listing.head_seq - listing.tail_from_seq, state.count, state.bytes),
            lambda first, stop: _list_segments(listing, files, first, stop),
        )

    def _get_topic(self, name: str) -> Topic:
        return self._engine.topic(name, create=False)

    def seek(self, topic: str, ts_ms: int) -> int:
        return self._get_topic(topic).seek(ts_ms)

    def time_of(self, topic: str, seq: int) -> int | None:
        records = self._get_topic(topic).read(seq - 1, 1, bytes_max=1).records
        return records[0].ts_ms if records else None

    def gap_before(self, topic: str, first: int) -> TopicGap | None:
        gap = topic_operations(self._get_topic(topic)).scan(first - 1, first - 1).gap
        return None if gap is None else TopicGap.from_engine(topic, gap)

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        scan = topic_operations(self._get_topic(topic)).scan(first - 1, stop - 1)
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
        scan = topic_operations(self._get_topic(topic)).scan(first - 1, stop - 1)
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
        topic_id, row = epoch_topic_id(read_range.epoch), decode_segment_row(file.row)
        maps = MmapCache(1)  # its own: another task may have mapped files of another directory
        cold = self._cold if row.cold is not None else None
        files = SegmentFiles(self._disk, topic_directory(self._path, topic_id), topic_id, maps, cold)
        try:
            read_range = read_range.with_deletions(lambda: _load_deletions(files, file))
            if self._is_object_store:
                chunks = self._read_ranges(files, read_range, file, row.cold, verify=verify)
            else:
                chunks = _read_segment_file(files, read_range, row, verify=verify)
            for chunk, until in chunks:
                yield chunk
                at = until
        except NotFound:
            yield from self._read_from_engine(read_range, at)

    @cached_property
    def _cold(self) -> ColdReader:
        """The cold tier that the directory names."""
        limits = EngineConfig()
        return ColdReader(open_cold_store(self._disk, self._path, limits), limits.cold_cache_bytes)

    def _read_ranges(
        self, files: SegmentFiles, read_range: ReadRange, file: PlannedFile, cold: ColdRow | None, *, verify: bool
    ) -> Iterator[tuple[ReadChunk, int]]:
        label = files.path(file.base, file.generation, "")

        def fetch(kind: str, lo: int, hi: int) -> bytes:
            try:
                return _fetch_range(self._disk, label, kind, lo, hi)
            except NotFound:
                if kind != "data" or cold is None or not cold.key:
                    raise
                return bytes(self._cold.read(cold, file.size, lo, hi))

        return interface.read_segment_ranges(fetch, label, read_range, file, verify=verify)

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


def _list_segments(listing: SegmentTableList, files: SegmentFiles, first: int, stop: int) -> Segments:
    table = listing.table
    lo, hi = int(np.searchsorted(table.stop, first, "right")), int(np.searchsorted(table.base, stop))
    loaded = {at - lo: segment for at, segment in listing.loaded.items() if lo <= at < hi}
    wanted = table.slice(lo, max(hi, lo))

    def load_deleted(at: int) -> BoolArray | None:
        if at in loaded:
            mask = loaded[at].deleted_mask()
            return None if mask is None else mask.copy()
        return _load_deletions(files, PlannedFile(*_file_fields(wanted, at)))

    @lru_cache(maxsize=4)
    def offsets(at: int) -> NDArray[np.uint32]:
        base, records, generation = int(wanted.base[at]), int(wanted.records[at]), int(wanted.generation[at])
        found = _fetch_range(
            files.disk, files.path(base, generation, ""), "idx", 0, records * segment_index.ENTRY_BYTES
        )
        return np.ascontiguousarray(segment_index.read_entries(found)["frame_offset"])

    def frame_offset(at: int, seq: int) -> int:
        try:
            return int(offsets(at)[seq - int(wanted.base[at])])
        except NotFound:  # the segment was replaced since: about there
            return int(wanted.size[at]) * (seq - int(wanted.base[at])) // int(wanted.records[at])

    must_plan = [at for at, segment in loaded.items() if segment.has_unsaved_deletions]
    return Segments(wanted, must_plan, load_deleted, frame_offset)


def _file_fields(table: SegmentTable, at: int) -> tuple[int, int, int, bool, int]:
    return (
        int(table.base[at]),
        int(table.stop[at]),
        int(table.size[at]),
        bool(table.sealed[at]),
        int(table.generation[at]),
    )


def _load_deletions(files: SegmentFiles, file: PlannedFile) -> BoolArray:
    content = files.read_side_file(file.base, file.generation, ".del")
    if content is None:
        raise NotFound(f"{files.path(file.base, file.generation, '.del')} is gone")
    return decode_deletions(content, file.base, file.stop - file.base)


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


def _read_segment_file(
    files: SegmentFiles, read_range: ReadRange, row: SegmentRow, *, verify: bool
) -> Iterator[tuple[ReadChunk, int]]:
    """Yield records with the seq after them. Raises NotFound if the file is gone."""
    file = read_range.file
    assert file is not None, "only for a range with a file"
    data, index = files.open(file.base, file.generation, row.cold, file.size)
    if data.size < file.size or len(index) < (file.stop - file.base) * segment_index.ENTRY_BYTES:
        raise NotFound(f"{files.path(file.base, file.generation, '.data')} is gone, or shorter than it was")
    segment = StoredSegment.from_row(files, row)
    if not verify:
        segment.skip_verification()
    deleted, at = read_range.deleted_mask(), read_range.first

    def read_chunk(at: int) -> tuple[Chunk, int]:
        chunk = segment.reader(at, read_range.stop, CHUNK_BYTES)()
        return chunk, read_range.stop if chunk.fault is not None else chunk.next_seq

    for chunk in read_each(read_chunk, at, read_range.stop, ahead=data.is_remote):
        if chunk.fault is not None:
            reason = f"seqs {chunk.fault.seq} to {chunk.fault.resume - 1} cannot be read, {chunk.fault.reason}"
            raise Corrupt(segment.path(".data"), pos=chunk.fault.pos, reason=reason)
        until = min(chunk.next_seq, read_range.stop)
        reason = f"seqs {at} to {until - 1} are not all where their index says"
        misplaced = partial(Corrupt, segment.path(".data"), pos=0, reason=reason)
        entries = segment.entries()[at - file.base : until - file.base]
        yield to_chunk(chunk.rows, entries, deleted, read_range.first, misplaced), until
        at = until


def _read_records(topic: Topic, read_range: ReadRange, at: int) -> Iterator[ReadChunk]:
    """Read the range from `at` on through the engine, with the gaps and deletions since the plan."""
    deleted = read_range.deleted_mask()
    while at < read_range.stop:
        scan = topic_operations(topic).scan(at - 1, read_range.stop - 1)
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
