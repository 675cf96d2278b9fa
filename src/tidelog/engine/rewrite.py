"""Rewrite: give a sealed segment new files without the bytes of its deleted records.

    1  verify: every frame of the old data, and its footer's checksums. A segment with a fault is reported and left
    2  files of the next generation, beside the old ones: data, read back and compared record by record; index, tag
       index and footer. Their syncs run while the next segment of the group is verified; then one of the directory
    3  swap, under the topic's lock: the index of the topic uses the new files. Deletions that came meanwhile go along
    4  the next checkpoint writes the deletion vector and names the new generation: this is the atomic switch
    5  the old files are removed like those of a dropped segment, when neither of the two manifests names them

A crash before 4 leaves files that no manifest names; the next start removes them. The bytes of a removed record are
gone, its seq stays marked as deleted, so counts of ranges do not change (`formats/segment_rewrite.py`). Readers that
have the old files mapped finish with them.

Segments are found by the checkpoints that write their deletion vectors, so the background task costs what was deleted
and not how many segments there are. A topic whose segment cannot be rewritten does not stop the others, and is tried
again after `RETRY_MS`; a segment that does not verify is not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final, NamedTuple
from weakref import WeakSet

import numpy as np
from xxhash import xxh3_64_intdigest

from tidelog.commitlog.segment import map_file
from tidelog.disk.durability import DISK_FULL_ERRNOS, ParallelSyncs, remove_if_exists, sync_directory
from tidelog.engine.context import EngineContext
from tidelog.engine.key_index import KEY_INDEX_SUFFIX, encode_key_index
from tidelog.engine.segment import SEGMENT_SUFFIXES, BoolArray, Segment
from tidelog.engine.tag_search import TAG_INDEX_SUFFIX, encode_tag_index
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, Damaged, DiskFull, Error, NewerFormat, WriteFailed
from tidelog.formats import frame, scan, sealed_segment, segment_index
from tidelog.formats.rows import Rows
from tidelog.formats.segment_rewrite import count_removable, encode_without, find_difference
from tidelog.types import Buffer, Ints

_log = logging.getLogger("tidelog.engine")
RETRY_MS: Final = 60_000
_WRITE_BYTES: Final = 1 << 20
_GROUP_BYTES: Final = 64 << 20  # of segments that are rewritten together, on request
_WRITE_PIECES_MAX: Final = 64
Progress = Callable[[int, int], object]  # bytes done, bytes in all


def ignore_progress(*_: int) -> None:
    pass


class RewrittenFile(NamedTuple):
    """A data file that was replaced."""

    base: int
    generation: int  # of the new files
    records_removed: int  # by this rewrite
    bytes_before: int
    bytes_after: int
    xxh3_before: int
    xxh3_after: int
    path_before: str
    path_after: str


class SkippedSegment(NamedTuple):
    """A segment with deleted records that was left as it is."""

    base: int
    reason: str


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """What a rewrite of a topic did."""

    topic: str
    files: tuple[RewrittenFile, ...] = ()
    skipped: tuple[SkippedSegment, ...] = ()

    @property
    def segments(self) -> int:
        return len(self.files)

    @property
    def records_removed(self) -> int:
        return sum(file.records_removed for file in self.files)

    @property
    def bytes_reclaimed(self) -> int:
        return sum(file.bytes_before - file.bytes_after for file in self.files)


class RewriteStopped(Error):
    """The engine is being closed: the rewrite was given up, and the segment is as it was."""


class NotVerified(Damaged):
    """A segment that cannot be rewritten, because some of its bytes do not verify."""


@dataclass(slots=True)
class RewriteStats:
    """Rewrites since the directory was opened."""

    segments: int = 0
    records_removed: int = 0
    bytes_reclaimed: int = 0
    failures: int = 0
    refused: int = 0  # segments that do not verify


class Rewriter:
    """Rewrites the segments of an engine, one at a time."""

    def __init__(self, context: EngineContext, wait_us: Callable[[int], None]) -> None:
        """`wait_us` pauses the background task."""
        self.stats = RewriteStats()
        self._context, self._wait_us = context, wait_us
        self._running = Lock()
        self._is_stopping = False
        self._refused: WeakSet[Segment] = WeakSet()
        self._retry: dict[TopicState, int] = {}  # when a failed topic is tried again

    def stop(self) -> None:
        """Give up the segment that is being rewritten."""
        self._is_stopping = True

    # ── in the background ─────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Rewrite the segments that have enough deleted bytes. Raises the first error after all topics were tried."""
        now_ms, waiting = self._context.clock.monotonic_ms(), self._context.topics_to_rewrite
        for topic in [topic for topic, due_ms in self._retry.items() if due_ms <= now_ms]:
            del self._retry[topic]
            waiting.add(topic)
        if not waiting or not self._context.limits.rewrite_dead_percent:
            waiting.clear()
            return
        failed: Exception | None = None
        while waiting and not self._is_stopping:
            topic = waiting.pop()
            try:
                pace = _Pace(self._context, self._wait_us)
                self._rewrite_topic(topic, self._due_segments(topic), pace.on_written, is_paced=True)
            except RewriteStopped:
                return
            except Exception as error:
                failed = failed or error
                self._retry[topic] = now_ms + RETRY_MS
        if failed is not None:
            raise failed

    def _due_segments(self, topic: TopicState) -> list[Segment]:
        """Return the segments of a topic that have enough deleted bytes."""
        limits = self._context.limits
        found = []
        for candidate in self._candidates(topic):
            freed = candidate.removable_bytes()
            if freed >= limits.rewrite_dead_bytes_min and freed * 100 >= limits.rewrite_dead_percent * candidate.size:
                found.append(candidate.segment)
        return found

    # ── on request ────────────────────────────────────────────────────────────────────────────

    def rewrite(
        self,
        topic: TopicState,
        *,
        force: bool = False,
        bases: frozenset[int] | None = None,
        progress: Progress = ignore_progress,
    ) -> RewriteResult:
        """Rewrite the segments of a topic that have enough deleted bytes; with `force` all that have any, of those with
        these bases. Their old files are removed by the next checkpoints."""
        if force:  # what did not verify before may be repaired
            with topic.lock:
                self._refused -= {part for part in topic.index.parts if isinstance(part, Segment)}
        segments = [each.segment for each in self._candidates(topic)] if force else self._due_segments(topic)
        wanted = [segment for segment in segments if bases is None or segment.base in bases]
        result = self._rewrite_topic(topic, wanted, ignore_progress, progress)
        with topic.lock:
            left = [
                SkippedSegment(part.base, "it did not verify, or its deletions do not read")
                for part in topic.index.parts
                if isinstance(part, Segment)
                and (bases is None or part.base in bases)
                and part.base not in {each.base for each in result.skipped}
                and (part in self._refused or not _has_readable_deletions(part))
            ]
        return replace(result, skipped=(*result.skipped, *left)) if force and left else result

    def _candidates(self, topic: TopicState) -> list[_Candidate]:
        """Return the sealed segments of a topic with bytes of dead records."""
        with topic.lock:
            if topic.is_dropped:
                return []
            found = []
            for segment in topic.index.parts:
                if not isinstance(segment, Segment) or not segment.is_sealed or segment in self._refused:
                    continue
                try:
                    dead = dead_records(topic, segment)
                except Damaged:
                    continue  # its deletions do not read: reported where they are used
                if int(dead.sum()) > segment.removed:
                    found.append(_Candidate(segment, dead))
            return found

    def _rewrite_topic(
        self,
        topic: TopicState,
        segments: Sequence[Segment],
        on_written: Callable[[int], object],
        progress: Progress = ignore_progress,
        *,
        is_paced: bool = False,
    ) -> RewriteResult:
        files: list[RewrittenFile] = []
        skipped: list[SkippedSegment] = []
        failed: Exception | None = None
        total, done = sum(segment.size for segment in segments), 0
        for group in _divide(segments, 0 if is_paced else _GROUP_BYTES):
            with self._running:
                jobs = self._rewrite_group(topic, group, on_written)
            for job in jobs:
                if isinstance(job.failure, NotVerified):
                    self._refused.add(job.segment)
                    self.stats.refused += 1
                    topic.report_corruption(job.segment.path(".data"), f"{job.failure}; it was not rewritten")
                    skipped.append(SkippedSegment(job.segment.base, str(job.failure)))
                elif job.failure is not None:
                    self.stats.failures += 1
                    failed = failed or _write_error(topic, job.segment, job.failure)
                elif job.is_used and job.file is not None:
                    files.append(job.file)
                    self._count(topic, job.file)
                done += job.segment.size
            progress(done, total)
        if failed is not None:
            raise failed
        return RewriteResult(topic.name, tuple(files), tuple(skipped))

    def _rewrite_group(
        self, topic: TopicState, group: Sequence[Segment], on_written: Callable[[int], object]
    ) -> list[_SegmentRewrite]:
        """Rewrite these segments. Each has its result or its failure then; one that failed does not stop the others."""
        jobs = []
        try:
            with ParallelSyncs() as syncs:
                for segment in group:
                    jobs.append(_SegmentRewrite(topic, segment, on_written, lambda: self._is_stopping, syncs))
                    jobs[-1].attempt(jobs[-1].write)
                for job in jobs:
                    job.attempt(job.wait_for_syncs)
            written = [job for job in jobs if job.file is not None and job.failure is None]
            for job in written[:1]:
                job.attempt(job.sync_names)
            for job in written:
                job.failure = written[0].failure  # of the directory, which they share
                job.attempt(job.swap)
        finally:
            for job in jobs:
                job.remove_unused()
        return jobs

    def _count(self, topic: TopicState, file: RewrittenFile) -> None:
        freed = file.bytes_before - file.bytes_after
        self.stats.segments += 1
        self.stats.records_removed += file.records_removed
        self.stats.bytes_reclaimed += freed
        _log.info(
            "%s: segment %d was rewritten without %d deleted records, %d bytes less",
            topic.name,
            file.base,
            file.records_removed,
            freed,
        )


def _divide(segments: Sequence[Segment], bytes_max: int) -> Iterator[list[Segment]]:
    """Divide segments into groups of so many bytes of data, or of one segment."""
    group: list[Segment] = []
    for segment in segments:
        if group and sum(each.size for each in group) + segment.size > bytes_max:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _has_readable_deletions(segment: Segment) -> bool:
    try:
        segment.deleted_mask()
    except Damaged:
        return False
    return True


def dead_records(topic: TopicState, segment: Segment) -> BoolArray:
    """Return for each record of a segment whether it is deleted or below the topic's first live record. With the
    topic's lock held. Raises Corrupt where the deletions do not read."""
    mask = segment.deleted_mask()
    dead: BoolArray = np.zeros(segment.stop - segment.base, bool) if mask is None else mask.copy()
    dead[: max(topic.index.earliest - segment.base, 0)] = True
    return dead


class _Candidate(NamedTuple):
    segment: Segment
    dead: BoolArray

    @property
    def size(self) -> int:
        return self.segment.size

    def removable_bytes(self) -> int:
        try:
            return count_removable(self.segment.entries(), self.dead, self.segment.size)
        except Damaged:
            return 0  # reported by reads


def _write_error(topic: TopicState, segment: Segment, error: Exception) -> Exception:
    """Return the error of a rewrite that could not be written."""
    if not isinstance(error, OSError):
        return error
    text = f"{topic.name}: segment {segment.base} cannot be rewritten: {error}; nothing was changed, "
    if error.errno in DISK_FULL_ERRNOS:
        return DiskFull(f"{text}free space, it is tried again")
    return WriteFailed(f"{text}it is tried again")


class _Pace:
    """Pauses so that a rewrite writes no more than the limit."""

    def __init__(self, context: EngineContext, wait_us: Callable[[int], None]) -> None:
        self._limit, self._now_us, self._wait_us = (
            context.limits.rewrite_bytes_per_second,
            context.clock.monotonic_us,
            wait_us,
        )
        self._started_us, self._written = self._now_us(), 0

    def on_written(self, size: int) -> None:
        if self._limit:
            self._written += size
            due_us = self._started_us + self._written * 1_000_000 // self._limit
            self._wait_us(max(due_us - self._now_us(), 0))


@dataclass(slots=True)
class _SegmentRewrite:
    """The rewrite of one segment: `write`, `wait_for_syncs`, `sync_names` for all of a group, `swap`."""

    topic: TopicState
    segment: Segment
    on_written: Callable[[int], object]
    is_stopping: Callable[[], bool]
    syncs: ParallelSyncs
    failure: Exception | None = None
    file: RewrittenFile | None = None  # None: it was removed or rewritten meanwhile, or has nothing to remove
    is_used: bool = False
    generation: int = field(init=False)
    _pending: list[Future[None]] = field(default_factory=list)
    _dead: BoolArray = field(init=False)
    _sizes: Ints = field(init=False)  # of the records before
    _times_ms: tuple[int, int] = (0, 0)  # of the first and the last record of the new files

    def __post_init__(self) -> None:
        self.generation = self.segment.generation + 1

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step and keep its error, unless an earlier one failed. Raises RewriteStopped."""
        if self.failure is None:
            try:
                step()
            except RewriteStopped:
                raise
            except Exception as error:
                self.failure = error

    def write(self) -> None:
        """Verify the segment, write and verify its new files, and start their syncs."""
        topic, segment = self.topic, self.segment
        with topic.lock:
            if not self._is_current():
                return
            self._dead = dead = dead_records(topic, segment)
        if int(dead.sum()) <= segment.removed or dead.all():  # a segment without a live record is dropped as a whole
            return
        before = self._read_verified()
        self._sizes = before.total_bytes()
        self.file = self._write(before, dead)

    def wait_for_syncs(self) -> None:
        for pending in self._pending:
            pending.result()

    def sync_names(self) -> None:
        if self.file is not None:
            sync_directory(self.segment.files.disk, self.segment.files.directory)

    def swap(self) -> None:
        """Let the topic use the new files, unless the segment was removed meanwhile."""
        with self.topic.lock:
            if self.file is not None and self._is_current():
                self._swap(self.file)
                self.is_used = True

    def remove_unused(self) -> None:
        """Remove what was written and is not used, after all syncs. The next start removes what stays."""
        if not self.is_used and (self.file is not None or self.failure is not None or self._pending):
            self._remove_files()

    def _is_current(self) -> bool:
        return not self.topic.is_dropped and self.segment in self.topic.index.parts

    def _read_verified(self) -> Rows:
        """Return the records of the segment, every frame verified. Raises NotVerified."""
        segment = self.segment
        if segment.lacks_footer:
            raise NotVerified("it was sealed without a footer: not all of its frames verified")
        try:
            content = segment.shape().data.fetch(0, segment.size)  # of the cold tier, where its file is gone
        except Corrupt as error:
            raise NotVerified(f"its data does not read: {error}") from error
        foot_bytes = segment.read_side_file(".foot")
        if foot_bytes is None:
            raise NotVerified("its footer is missing")
        try:
            foot = sealed_segment.decode_footer(foot_bytes, segment.path(".foot"))
        except (Corrupt, NewerFormat) as error:
            raise NotVerified(f"its footer does not read: {error}") from error
        if (foot.first_seq, foot.stop_seq, foot.data_bytes) != (segment.base, segment.stop, segment.size):
            raise NotVerified("its footer is that of another segment")
        if bad := sealed_segment.find_bad_ranges(foot, content):
            raise NotVerified(f"bytes {bad[0][0]} to {bad[0][1] - 1} are not those that were sealed")
        return _scan_dense(content, segment.base, segment.stop, self.topic.id)

    def _path(self, suffix: str) -> str:
        return self.segment.files.path(self.segment.base, self.generation, suffix)

    def _write(self, before: Rows, dead: BoolArray) -> RewrittenFile:
        """Write and verify all files of the new generation except the deletion vector."""
        segment, disk = self.segment, self.segment.files.disk
        self._remove_files()  # of a failed attempt
        size = self._write_data(encode_without(before, dead))
        content = map_file(disk, self._path(".data")) or memoryview(b"")
        if len(content) != size:
            raise WriteFailed(f"{self._path('.data')} has {len(content)} bytes, {size} were written")
        after = _scan_dense(content, segment.base, segment.stop, self.topic.id)
        if (difference := find_difference(before, after, dead)) is not None:
            raise WriteFailed(f"{self._path('.data')} is not what was to be written: {difference}; it is not used")
        self._times_ms = int(after.ts_us[0]) // 1000, int(after.ts_us[-1]) // 1000
        entries = segment_index.build_entries(after, segment.base, segment.stop, size).tobytes()
        foot = sealed_segment.encode_footer(sealed_segment.build_footer(content, entries, first_seq=segment.base))
        tags = encode_tag_index(segment.base, foot, after)
        compaction = self.topic.config.compaction
        keys = compaction and encode_key_index(compaction, segment.base, segment.stop, foot, after)
        for suffix, part in ((".idx", entries), (TAG_INDEX_SUFFIX, tags), (KEY_INDEX_SUFFIX, keys), (".foot", foot)):
            if part:
                self._write_file(suffix, part)
        self.on_written(len(entries) + len(foot))
        self._check_stop()
        return RewrittenFile(
            segment.base,
            self.generation,
            int(dead.sum()) - segment.removed,
            segment.size,
            size,
            xxh3_64_intdigest(before.buf),
            xxh3_64_intdigest(content),
            segment.path(".data"),
            self._path(".data"),
        )

    def _write_file(self, suffix: str, content: Buffer) -> None:
        """Write a file beside the data and start its sync."""
        file = self.segment.files.disk.open(self._path(suffix), "create")
        try:
            file.write(0, content)
        except BaseException:
            file.close()
            raise
        self._pending.append(self.syncs.sync_and_close(file))

    def _write_data(self, pieces: Iterable[Buffer]) -> int:
        """Write the data file and start its sync; return its size."""
        data = self.segment.files.disk.open(self._path(".data"), "create")
        pos, size, group = 0, 0, list[Buffer]()
        try:
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(view), _WRITE_BYTES):
                    group.append(view[start : start + _WRITE_BYTES])
                    size += len(group[-1])
                    if size >= _WRITE_BYTES:
                        data.writev(pos, _join_if_many(group))
                        self.on_written(size)
                        self._check_stop()
                        pos, size, group = pos + size, 0, []
            if group:
                data.writev(pos, _join_if_many(group))
        except BaseException:
            data.close()
            raise
        self._pending.append(self.syncs.sync_and_close(data))
        return pos + size

    def _check_stop(self) -> None:
        if self.is_stopping():
            raise RewriteStopped(f"{self.topic.name}: the directory is being closed; nothing was changed")

    def _swap(self, file: RewrittenFile) -> None:
        """Let the topic use the new files. With the lock held."""
        topic, old, parts = self.topic, self.segment, self.topic.index.parts
        deleted = self._dead | dead_records(topic, old)  # with deletions that came meanwhile
        new = Segment(
            old.files,
            old.base,
            old.stop,
            file.bytes_after,
            live=int((~deleted).sum()),
            live_bytes=int(self._sizes[~deleted].sum()),
            first_ts=self._times_ms[0],
            last_ts=self._times_ms[1],
            sealed=True,
            generation=self.generation,
            removed=int(self._dead.sum()),
            cold=None if old.has_cold_copy else old.cold,  # a recalled segment stays on the disk
        )
        new.set_deleted(deleted)
        parts[parts.index(old)] = new
        topic.dropped_segments.append((old.base, old.generation))
        if old.cold is not None and old.has_cold_copy:
            topic.dropped_objects.append(old.cold.key)
        topic.context.needs_checkpoint = True
        topic.context.sealed_topics.add(topic)  # the relocator looks whether the new files move
        topic.mark_dirty()
        old.unmap()
        topic.context.tag_cache.drop(topic.id, old.base)

    def _remove_files(self) -> None:
        """Remove the files of this generation."""
        files = self.segment.files
        files.unmap(self.segment.base, self.generation)
        with suppress(OSError):
            for suffix in SEGMENT_SUFFIXES:
                for path in (self._path(suffix), f"{self._path(suffix)}.tmp"):
                    remove_if_exists(files.disk, path)


def _join_if_many(pieces: list[Buffer]) -> list[Buffer]:
    """Return pieces of a write; a join costs less than a thousand pieces of one."""
    return pieces if len(pieces) <= _WRITE_PIECES_MAX else [b"".join(pieces)]


def _scan_dense(content: Buffer, base: int, stop: int, topic_id: int) -> Rows:
    """Return the records of the seqs [base, stop) of a topic, every frame verified. Raises NotVerified if the data has
    other bytes."""
    scanned = scan.scan_records(content, above=base - 1)
    rows = scanned.rows
    if scanned.end != len(content) or len(rows) != stop - base or int(rows.seq[-1]) != stop - 1:
        raise NotVerified(f"byte {scanned.end}: {scanned.reason or 'it ends there'}")
    if (frame.read_headers(rows.buf, rows.frame_starts())["topic_id"] != topic_id).any():
        raise NotVerified("its frames are another topic's")
    return rows
