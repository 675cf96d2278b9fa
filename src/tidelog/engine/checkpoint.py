"""Checkpoint: copy records that only the WAL has into segments, save a manifest, and free WAL files.

    1  take the position of each WAL shard: everything before it is published
       take the topics that changed since their row was built: only these are looked at
       make their floors durable: replay may start before the deletes of a deletion vector it finds
    2  frames → segment files, byte for byte: data, sync, index, sync; for a complete segment every frame is read back
       and verified, and a footer is written
    3  deletion vectors, each replaced as a whole
       the gap log has rows for every removal that 3 and 5 reflect: replay may not find it again
    4  a CheckpointMark into every shard, synced
    5  the rows of these topics as a delta of the manifest, one file: from here on it is valid
    6  files that neither of the two newest manifests needs are removed, blobs of removed records among them

An error before 5 leaves the previous manifest valid and complete: files it names are only appended to. Writers
continue throughout; each topic is locked to plan, never for I/O.

A topic without a frame since its last row is not looked at: replay of it may start at any later position. A topic that
cannot be written does not stop the others, and stays dirty. Its row is not part of the delta (`Positions.lagging`), and
replay of its shard still starts where that row needs it; replay of all other topics starts here (`Positions.fresh`). A
segment with unverifiable frames is sealed without a footer: every read then checks frame by frame.

Without space for copies, a checkpoint with `copy=False` only drops segments without live records: rows then describe
the files, and replay starts where it did.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from tidelog.commitlog.codec import SegmentContent
from tidelog.commitlog.segment import MmapReader
from tidelog.disk.durability import DISK_FULL_ERRNOS, remove_if_exists, replace_file
from tidelog.disk.interface import File, join
from tidelog.engine import blobs, groups, idempotency, retention
from tidelog.engine.context import WAL_DIR, EngineContext
from tidelog.engine.key_index import write_key_index
from tidelog.engine.manifest import ColdRow, GroupRow, ManifestStore, Positions, QueueRow, TopicEntry, TopicRow
from tidelog.engine.memtable import MemTable
from tidelog.engine.routing import manager
from tidelog.engine.segment import CODEC, SEGMENT_SUFFIXES, Segment, SegmentFiles
from tidelog.engine.tag_search import write_tag_index
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, Forked, NewerFormat
from tidelog.formats import control_frames, frame, scan, sealed_segment, segment_index
from tidelog.formats.control_frames import CheckpointMark, TopicMark
from tidelog.types import Buffer
from tidelog.wal import Commit, CommitFuture, Position, paths
from tidelog.wal.paths import remove_old_files

_COPY_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class CheckpointState:
    """What checkpoints of one engine remember of each other."""

    store: ManifestStore  # the newest manifest
    files_to_remove_next: list[str] = field(default_factory=list)  # named by the newest manifest's predecessor only
    files_to_remove: list[str] = field(default_factory=list)  # named by neither
    objects_to_remove_next: list[str] = field(default_factory=list)  # the same for objects in the cold tier
    hot_to_remove_next: list[HotCopy] = field(default_factory=list)  # data files that the predecessor needs
    hot_to_remove: list[HotCopy] = field(default_factory=list)  # data files that neither needs
    old_layout_shards: tuple[GroupRow, ...] = ()  # of an earlier shard count, replayed and not written any more
    needs_checkpoint: bool = False  # before anything is written: replay must not start where it did
    has_saved: bool = False  # this process has saved a manifest, which versions without large records refuse

    @property
    def manifest_number(self) -> int:
        """The number of the newest manifest."""
        return self.store.number

    @property
    def shard_positions(self) -> tuple[GroupRow, ...]:
        """Its replay positions."""
        return self.store.positions.groups


class HotCopy(NamedTuple):
    """The data file of a segment whose object in the cold tier is verified."""

    topic: TopicState
    segment: Segment
    row: ColdRow  # the object; the file stays if the segment names another one, or none


FailedTopics: TypeAlias = dict[TopicState, Exception]
"""Topics that a checkpoint could not write, and why."""


def run_checkpoint(
    context: EngineContext,
    next_topic_id: Callable[[], int],
    state: CheckpointState,
    *,
    final: bool,
    pause: Callable[[], object] = lambda: None,
    copy: bool = True,
    discard_objects: Callable[[list[str]], object] = lambda _: None,
) -> FailedTopics:
    """Run a checkpoint and return the topics it had to leave out.

    `final`: no more writes follow, so no seq stays reserved. `pause` is called after each step of the copying, with no
    lock held. Without `copy` no record is copied: topics with records to copy are left out, but segments without live
    records are dropped. `discard_objects` gets keys of objects in the cold tier that no manifest names any more.
    """
    positions = [shard.position() for shard in context.shards]
    # Topics below this id are complete: each of them has a row or is among those that are taken next.
    next_id = next_topic_id()
    # Taken after the positions: a change from here on has its frame after the start of replay.
    topics = context.take_dirty_topics()
    try:
        failed = _run_checkpoint(
            context,
            topics,
            positions,
            next_id,
            state,
            final=final,
            pause=pause,
            copy=copy,
            discard_objects=discard_objects,
        )
    except BaseException:
        context.dirty_topics.update(topics)
        raise
    context.dirty_topics.update(failed)
    return failed


def _run_checkpoint(
    context: EngineContext,
    changed: Sequence[TopicState],
    positions: Sequence[Position],
    next_topic_id: int,
    state: CheckpointState,
    *,
    final: bool,
    pause: Callable[[], object],
    copy: bool,
    discard_objects: Callable[[list[str]], object],
) -> FailedTopics:
    dropped = {topic.id for topic in changed if _was_dropped(topic)}
    topics = [topic for topic in changed if topic.id not in dropped]
    failed = _persist_floors(topics)
    entries: list[TopicEntry] = []
    files_to_remove: list[str] = []
    objects_to_remove: list[str] = []
    hot_copies: list[HotCopy] = []
    written: list[TopicState] = []
    removed_blobs: dict[TopicState, int] = {}
    freed: set[TopicState] = set()  # left out, except for segments without live records
    for topic in topics:
        if topic in failed:
            continue
        try:
            is_complete = copy or not _has_records_to_copy(topic)
            if is_complete:
                _write_topic(topic, pause)
            else:
                failed[topic] = OSError(errno.ENOSPC, "there is no space to copy its records")
                if not _can_skip_copy(topic):
                    continue
                freed.add(topic)
            entry = _build_entry(topic, state.store, final=final and is_complete, keep_config=not is_complete)
        except Forked:  # an error of the process, not of this topic
            raise
        except Exception as error:
            freed.discard(topic)
            if _was_dropped(topic):  # its files were removed meanwhile
                failed.pop(topic, None)
                dropped.add(topic.id)
            else:
                failed[topic] = error
            continue
        entries.append(entry)
        files = context.segment_files(topic.id)
        files_to_remove += [
            files.path(base, generation, suffix)
            for base, generation in topic.unnamed_segments
            for suffix in SEGMENT_SUFFIXES
        ]
        removed_blobs[topic] = len(topic.dropped_blobs)
        files_to_remove += [blobs.blob_path(topic.directory, blob_id) for blob_id in topic.dropped_blobs]
        objects_to_remove += topic.unnamed_objects
        hot_copies += _hot_copies(topic)
        written.append(topic)
    if failed and not written:
        context.dirty_topics.update(changed)  # dropped ones too: their rows are still there
        return failed
    left_out = {topic: error for topic, error in failed.items() if topic not in freed}
    context.gap_log.flush_durably({topic.id for topic in left_out})
    entries += [_empty_entry(topic) for topic in left_out if topic.id not in state.store.topics]
    _write_marks(context, entries)
    keys = paths.shard_keys(len(context.shards))
    replay_starts = tuple(
        GroupRow(key, position.file_number, position.pos) for key, position in zip(keys, positions, strict=True)
    )
    new_positions = Positions((*replay_starts, *state.old_layout_shards), next_topic_id)
    if failed:
        new_positions = _keep_old_positions(context, state, new_positions, failed)
    old_positions = state.shard_positions
    state.store.save(entries, dropped | context.dropped_ids, new_positions, final=final)
    state.has_saved = True
    context.dropped_ids -= dropped | context.dropped_ids
    for topic in written:
        manager.on_manifest_saved(topic)
        with topic.lock:  # a rewrite may have added files that this manifest still names
            unnamed = topic.unnamed_segments
            topic.dropped_segments = [files for files in topic.dropped_segments if files not in unnamed]
            del topic.dropped_blobs[: removed_blobs[topic]]  # commits that failed meanwhile have added more
            unnamed_objects = set(topic.unnamed_objects)
            topic.dropped_objects = [key for key in topic.dropped_objects if key not in unnamed_objects]
            saved = {id(segment) for segment in topic.saved_relocations}
            topic.relocated_segments = [each for each in topic.relocated_segments if id(each) not in saved]
            topic.saved_relocations = []
    state.files_to_remove, state.files_to_remove_next = (
        [*state.files_to_remove, *state.files_to_remove_next],
        files_to_remove,
    )
    discard_objects(state.objects_to_remove_next)
    state.objects_to_remove_next = objects_to_remove
    state.hot_to_remove, state.hot_to_remove_next = [*state.hot_to_remove, *state.hot_to_remove_next], hot_copies
    _remove_unneeded(context, state, old_positions, complete=not failed)
    return failed


def _was_dropped(topic: TopicState) -> bool:
    with topic.lock:  # a drop and its removal for the gap log are one step
        return topic.is_dropped


def _hot_copies(topic: TopicState) -> list[HotCopy]:
    """Return the data files that the manifest which is being saved does not need: its row names an object."""
    with topic.lock:
        return [
            HotCopy(topic, segment, segment.cold)
            for segment in topic.saved_relocations
            if segment.cold is not None and segment.has_cold_copy
        ]


def _remove_hot_copies(context: EngineContext, state: CheckpointState) -> set[str]:
    """Remove data files of segments in the cold tier; return their directories. A file that was recalled stays."""
    directories: set[str] = set()
    if context.cold.store is None or context.pins.hold_segments:
        return directories  # without a store the file is all that can be read here
    while state.hot_to_remove:
        topic, segment, row = state.hot_to_remove[-1]
        with context.hot_files_lock:
            with topic.lock:
                is_needed = topic.is_dropped or segment not in topic.index.parts or segment.cold is not row
            if not is_needed:
                if remove_if_exists(context.disk, segment.path(".data")):
                    directories.add(segment.files.directory)
                segment.unmap()
        state.hot_to_remove.pop()
    return directories


def _persist_floors(topics: Sequence[TopicState]) -> FailedTopics:
    """Make all floors durable; return the topics that failed."""
    try:
        retention.persist_floors(topics)
    except Forked:
        raise
    except Exception:  # find the failing topics one by one
        failed: FailedTopics = {}
        for topic in topics:
            try:
                retention.persist_floors([topic])
            except Forked:
                raise
            except Exception as error:
                failed[topic] = error
        return failed
    return {}


def _empty_entry(topic: TopicState) -> TopicEntry:
    """Return the row of a topic that could not be written and that no manifest knows: the WAL still has all of its
    records."""
    return TopicEntry.from_row(TopicRow(topic.id, topic.name, topic.config.to_json(), 0, 0, 1, 0, 0, 0, ()))


def _keep_old_positions(
    context: EngineContext, state: CheckpointState, positions: Positions, failed: FailedTopics
) -> Positions:
    """Return the positions with the old replay starts for the failed topics' shards. Shards of an earlier shard count
    may hold frames of any of them."""
    wal, old_keys = join(context.root, WAL_DIR), {row.key for row in state.old_layout_shards}
    shards = {
        key
        for key, shard in zip(paths.shard_keys(len(context.shards)), context.shards, strict=True)
        if any(topic.shard is shard for topic in failed)
    }
    old_rows = {row.key: row for row in state.shard_positions}

    def position(row: GroupRow) -> GroupRow:
        if row.key not in shards and row.key not in old_keys:
            return row
        if (old_row := old_rows.get(row.key)) is not None:
            return old_row
        # Without a manifest no file was removed.
        files = paths.list_file_numbers(context.disk, paths.shard_directory(wal, row.key))
        return GroupRow(row.key, files[0], 0) if files else row

    groups = tuple(position(row) for row in positions.groups)
    lagging = tuple(sorted(topic.id for topic in failed if not topic.is_dropped))
    return msgspec.structs.replace(positions, groups=groups, fresh=positions.groups, lagging=lagging)


# ── one topic: frames into files ──────────────────────────────────────────────────────────────────


def _can_skip_copy(topic: TopicState) -> bool:
    """Whether the row of a topic may be newer than the start of its replay by any amount: its frames are absolute.

    Frames of jobs and routers are increments, and groups that hold records back decide what a cap evicts.
    """
    has_increments = (
        topic.queue_state is not None
        or topic.queue_snapshot is not None
        or topic.upstream is not None
        or bool(topic.downstream)
    )
    return not (has_increments or topic.persists_floors)


def _has_records_to_copy(topic: TopicState) -> bool:
    """Freeze a topic and return whether it has records to copy."""
    with topic.lock:
        topic.forwarder_snapshot = None
        if topic.is_dropped:
            return False
        manager.snapshot_forwarder(topic)
        return bool(_plan_segment_writes(topic, lambda: None))


def _write_topic(topic: TopicState, pause: Callable[[], object]) -> None:
    """Copy the memtables of a topic into segment files. On a full disk, remove partial copies."""
    broken = _find_broken_segment(topic)
    with topic.lock:
        topic.forwarder_snapshot = None
        if topic.is_dropped:
            return
        manager.snapshot_forwarder(topic)
        if broken is not None:
            _detach_broken_segment(topic, *broken)
        writers = _plan_segment_writes(topic, pause)
    disk, directory = topic.context.disk, topic.context.segment_files(topic.id).directory
    try:
        if writers:
            disk.make_dir(directory)
        for writer in writers:
            writer.write()
        if any(writer.segment is None for writer in writers):  # names of an earlier attempt may not be synced
            disk.sync_dir(directory)
        for writer in writers:
            if writer.is_complete:
                writer.seal()
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            for writer in writers:
                writer.undo()
        raise
    with topic.lock:
        for writer in writers:
            writer.adopt()


def _find_broken_segment(topic: TopicState) -> tuple[Segment, str] | None:
    """Return the unsealed segment of a topic if its files cannot be extended, and why: they are shorter than what was
    written, or its deletions do not read."""
    with topic.lock:
        segment = next((part for part in topic.index.parts if isinstance(part, Segment) and not part.is_sealed), None)
        if segment is None:
            return None
        try:
            has_deletions = segment.deleted_mask() is not None
        except Corrupt as error:
            return segment, error.reason
        sizes = {".data": segment.size, ".idx": (segment.stop - segment.base) * segment_index.ENTRY_BYTES}
    for suffix, size in sizes.items():
        stat = topic.context.disk.stat(segment.path(suffix))
        if stat is None or stat.size < size:
            actual = f"it has {stat.size} bytes" if stat else "the file is missing"
            if suffix == ".idx" and segment.rebuild_index():  # from verified frames
                replace_file(segment.files.disk, segment.path(".idx"), segment.rebuilt_index or b"")
                segment.unmap()
                continue
            return segment, f"{suffix}: {actual}, {size} were written"
    if has_deletions and not segment.has_unsaved_deletions and not _deletions_readable(segment):
        segment.has_unsaved_deletions = True  # write them again from memory
    return None


def _deletions_readable(segment: Segment) -> bool:
    """Whether the `.del` file reads. Its content was checked when it was loaded."""
    try:
        content = segment.read_side_file(".del")
        return content is not None and sealed_segment.decode_deletion_vector(content).base == segment.base
    except (Corrupt, NewerFormat):
        return False


def _detach_broken_segment(topic: TopicState, segment: Segment, reason: str) -> None:
    """Start another segment after a damaged one: its files are the only evidence and stay unchanged, and the topic
    continues. With the lock held."""
    segment.is_sealed = segment.lacks_footer = True
    topic.report_corruption(segment.path(".data"), f"{reason}; it was sealed without a footer")
    origin, base = 0, 0
    for part in topic.index.parts:
        if isinstance(part, MemTable) and part.segment == segment.base:
            base = base or part.base
            part.move_to_segment(base, origin)
            origin += part.size


def _plan_segment_writes(topic: TopicState, pause: Callable[[], object]) -> list[SegmentWriter]:
    """Return a writer for each segment with something to write, its memtables frozen. With the lock held."""
    index, files = topic.index, topic.context.segment_files(topic.id)
    obsolete = index.obsolete_segments()
    writers: dict[int, SegmentWriter] = {}
    for part in index.parts:
        if isinstance(part, MemTable):
            if not part.is_persistent or part.base == part.stop or part.segment in obsolete:
                continue
            part.is_frozen = True
            writer = writers.setdefault(part.segment, SegmentWriter(topic, files, part.segment, None, pause))
            writer.memtables.append((part, bytes(part.index_bytes())))
        elif not part.is_sealed:
            writers[part.base] = SegmentWriter(topic, files, part.base, part, pause)
    active = index.active_segment_base()
    for writer in writers.values():
        writer.is_complete = writer.base != active
    return [writer for writer in writers.values() if writer.memtables or writer.is_complete]


class SegmentWriter:
    """Writes the memtables of one segment to its files: `write`, `seal` if it is complete, then `adopt`. A segment that
    still grows was never rewritten, so its files are those of generation 0."""

    def __init__(
        self,
        topic: TopicState,
        files: SegmentFiles,
        base: int,
        segment: Segment | None,
        pause: Callable[[], object],
    ) -> None:
        self.base, self.segment = base, segment  # None: it has no files yet
        self.memtables: list[tuple[MemTable, bytes]] = []  # each with its index
        self.is_complete = False
        self._topic, self._files, self._pause = topic, files, pause
        self._lacks_footer = False  # it was sealed without one

    def write(self) -> None:
        """Write memtables at their offsets; repeating it changes nothing."""
        if not self.memtables:
            return
        data = self._open(".data")
        try:
            for memtable, _ in self.memtables:
                self._copy(memtable, data)
            data.sync()
        finally:
            data.close()
        index = self._open(".idx")
        try:
            for memtable, entries in self.memtables:
                index.write((memtable.base - self.base) * segment_index.ENTRY_BYTES, entries)
            index.sync()
        finally:
            index.close()

    def _open(self, suffix: str) -> File:
        disk, path = self._files.disk, self._files.path(self.base, 0, suffix)
        return disk.open(path, "create" if disk.stat(path) is None else "write")

    def _copy(self, memtable: MemTable, data: File) -> None:
        """Copy in chunks, so that frames in the WAL are not loaded at once. A frame that does not verify there is
        copied unchanged: reads of it raise Corrupt, and the frames around it are saved."""
        pos, size, pieces = memtable.origin, 0, list[Buffer]()
        for piece, fault in memtable.read_pieces():
            if fault is not None:
                self._topic.report_corruption(*fault)
            pieces.append(piece)
            size += len(piece)
            if size >= _COPY_CHUNK_BYTES:
                data.writev(pos, pieces)
                pos, size, pieces = pos + size, 0, []
                self._pause()
        if pieces:
            data.writev(pos, pieces)

    def seal(self) -> None:
        """Truncate leftovers of an interrupted attempt, verify every frame, and write the footer. There is none if a
        frame does not verify."""
        files, base = self._files, self.base
        if self.segment is not None and self.segment.lacks_footer:
            return
        size, stop = self._end()
        files.truncate(base, 0, size, stop - base, sync=True)
        files.unmap(base, 0)
        data, entries = files.open(base, 0)
        content = data.fetch(0, size)
        fault = "it is shorter than what was written" if len(content) < size else None
        fault = fault or self._find_unverified(stop, content, entries)
        if fault is not None:
            rebuilt = self._rebuild_index(stop, content)
            if rebuilt is None:
                if remove_if_exists(files.disk, files.path(base, 0, ".foot")):
                    files.disk.sync_dir(files.directory)
                self._topic.report_corruption(
                    files.path(base, 0, ".data"), f"{fault}; the segment was sealed without a footer"
                )
                self._lacks_footer = True
                return
            replace_file(files.disk, files.path(base, 0, ".idx"), rebuilt)  # only the index was wrong
            files.unmap(base, 0)
            entries = rebuilt
        foot = sealed_segment.encode_footer(sealed_segment.build_footer(content, entries, first_seq=base))
        self._write_search_indexes(stop, content, entries, foot)
        replace_file(files.disk, files.path(base, 0, ".foot"), foot)
        self._pause()

    def _end(self) -> tuple[int, int]:
        """Bytes of data and one past the last seq, once the memtables are written."""
        if self.memtables:
            last = self.memtables[-1][0]
            return last.origin + last.size, last.stop
        assert self.segment is not None, "a segment without memtables has files"
        return self.segment.size, self.segment.stop

    def _find_unverified(self, stop: int, content: Buffer, entries: Buffer) -> str | None:
        """Describe the first frame that does not verify, belongs to another topic, or does not follow the one before;
        None: every byte of the data is in a valid frame, and the index names exactly these."""
        base = self.base
        if len(entries) != (stop - base) * segment_index.ENTRY_BYTES:
            return f"its index has {len(entries)} bytes"
        if (fault := segment_index.find_index_fault(segment_index.read_entries(entries), len(content))) is not None:
            return f"its index: {fault}"
        shape, seq = SegmentContent(base, stop, MmapReader(memoryview(content)), entries, [entries]), base
        last, end = -1, 0  # of the frame before
        while seq < stop:
            chunk = CODEC.read(shape, seq, stop, _COPY_CHUNK_BYTES)
            if chunk.fault is not None:
                return f"byte {chunk.fault.pos}: {chunk.fault.reason}"
            starts = chunk.rows.frame_starts()
            headers = frame.read_headers(chunk.rows.buf, starts)
            if (headers["topic_id"] != self._topic.id).any():
                return "its frames are another topic's"
            low = int(segment_index.read_entries(entries)["frame_offset"][seq - base]) - int(starts[0])
            begins, ends = starts + low, starts + low + headers["frame_len"].astype(np.int64) + 4
            # A batch may be read in two chunks: then its frame comes again.
            if begins[0] not in (end, last) or (begins[1:] != ends[:-1]).any():
                return f"byte {end}: bytes that are in no frame"
            seq, last, end = chunk.next_seq, int(begins[-1]), int(ends[-1])
            self._pause()
        return None if end == len(content) else f"byte {end}: bytes that are in no frame"

    def _rebuild_index(self, stop: int, content: Buffer) -> bytes | None:
        """Build the index from the data alone; None if the data is incomplete."""
        scanned = scan.scan_records(content, above=self.base - 1)
        rows = scanned.rows
        if scanned.end != len(content) or len(rows) != stop - self.base or int(rows.seq[-1]) != stop - 1:
            return None
        if (frame.read_headers(rows.buf, rows.frame_starts())["topic_id"] != self._topic.id).any():
            return None
        return segment_index.build_entries(rows, self.base, stop, len(content)).tobytes()

    def _write_search_indexes(self, stop: int, data: Buffer, entries: Buffer, foot: bytes) -> None:
        """Write the indexes of tags and keys, unless a frame does not verify: searches then scan the segment and report
        the fault."""
        has_tags = (segment_index.read_entries(entries)["flags"] & segment_index.HAS_TAG).any()
        compaction = self._topic.config.compaction
        if not has_tags and compaction is None:
            return
        scanned = scan.scan_records(data, above=self.base - 1)
        if scanned.end != len(data) or len(scanned.rows) != stop - self.base:
            return
        if has_tags:
            write_tag_index(self._files, self.base, 0, foot, scanned.rows)
        if compaction is not None:
            write_key_index(self._files, compaction, self.base, stop, 0, foot, scanned.rows)

    def undo(self) -> None:
        """Free the space of partial copies: no manifest names them."""
        files, segment = self._files, self.segment
        files.unmap(self.base, 0)
        with suppress(OSError):
            derived = (".foot", ".tag", ".key")
            for suffix in derived if segment is not None else (*derived, ".idx", ".data"):
                remove_if_exists(files.disk, files.path(self.base, 0, suffix))
            if segment is not None:
                files.truncate(self.base, 0, segment.size, segment.stop - segment.base, sync=False)

    def adopt(self) -> None:
        """Replace the memtables by the segment that has their records now. With the lock held."""
        index, segment = self._topic.index, self.segment
        memtables = [memtable for memtable, _ in self.memtables]
        if segment is None:
            segment = Segment(self._files, self.base, self.base, 0, first_ts=memtables[0].first_ts)
            segment.set_deleted(None)
            index.parts[index.parts.index(memtables[0])] = segment
        for memtable in memtables:
            segment.absorb(memtable)
            if memtable in index.parts:
                index.parts.remove(memtable)
        segment.is_sealed = segment.is_sealed or self.is_complete
        if segment.is_sealed:
            self._topic.context.sealed_topics.add(self._topic)
        segment.lacks_footer = segment.lacks_footer or self._lacks_footer
        self._files.unmap(self.base, 0)


def _build_entry(topic: TopicState, store: ManifestStore, *, final: bool, keep_config: bool) -> TopicEntry:
    """Return the rows of a topic, its deletion vectors written. `keep_config`: with the config at the start of replay;
    caps of a later one could evict records that only existed together before deletes that replay applies after them."""
    row = _build_topic_row(topic, final=final)
    with topic.lock:
        records, size = topic.index.count, topic.index.bytes
        routers = topic.forwarder_snapshot.routers if topic.forwarder_snapshot else ()
    topic.context.has_reservations |= row.reserved > row.head
    if keep_config and (previous := store.topics.get(topic.id)) is not None:
        row = msgspec.structs.replace(row, config=previous.decode().config)
    return TopicEntry.from_row(row, routers, records=records, size=size)


def _build_topic_row(topic: TopicState, *, final: bool) -> TopicRow:
    """Return the row of a topic, its deletion vectors written. Segment files that it no longer names are in
    `unnamed_segments`, and in `dropped_segments` until a manifest with the row is saved."""
    index = topic.index
    with topic.lock:
        obsolete = index.obsolete_segments()
        dropped = [
            part
            for part in index.parts
            if (part.segment if isinstance(part, MemTable) else part.base) in obsolete
            and (isinstance(part, MemTable) or part.is_sealed)
        ]
        index.drop_parts(dropped)
        topic.dropped_segments += [(part.base, part.generation) for part in dropped if isinstance(part, Segment)]
        topic.unnamed_segments = topic.dropped_segments.copy()
        topic.dropped_objects += [
            part.cold.key for part in dropped if isinstance(part, Segment) and part.cold is not None and part.cold.key
        ]
        topic.unnamed_objects = topic.dropped_objects.copy()
        segments = [part for part in index.parts if isinstance(part, Segment)]
        topic.saved_relocations = list(topic.relocated_segments)
        vectors = [(segment, segment.encode_deletions()) for segment in segments if segment.has_unsaved_deletions]
        for segment, _ in vectors:
            segment.has_unsaved_deletions = False
        # Records that arrived meanwhile are in the WAL only: the row must not cover them.
        unsaved = [
            part.base
            for part in index.parts
            if isinstance(part, MemTable) and part.is_persistent and part.stop > part.base
        ]
        snapshot = topic.forwarder_snapshot
        head = min([*(base - 1 for base in unsaved), index.head, *([snapshot.head] if snapshot else [])])
        marks = index.watermarks.clamp_to(head)
        topic.dropped_blobs += topic.blobs.take_removed(index, head)
        row = TopicRow(
            topic.id,
            topic.name,
            topic.config.to_json(),
            head,
            head if final else max(topic.reservation.ceiling, head),
            min(index.earliest, head + 1),
            marks.cap,
            marks.ttl,
            index.last_ts,
            tuple(segment.to_row() for segment in segments),
            tuple((lo, min(hi, head + 1)) for lo, hi in index.deleted_ranges if lo <= head),
            marks.source,
            fed=snapshot.fed if snapshot else None,
            hops=snapshot.hops if snapshot else (),
            queue=_build_queue_row(topic, final=final),
            consumers=groups.encode_groups(topic),
            guarded=topic.had_retention_hold,
            removals=topic.delete_count,
            writers=idempotency.encode_producers(topic.producers.batches, head),
            wired=snapshot.applied_router_frame if snapshot else topic.applied_router_frame,
            trims=tuple((lo, min(hi, head + 1)) for lo, hi in index.trimmed_ranges if lo <= head),
            blobs=topic.blobs.to_row(head),
            epoch=topic.restored_epoch,
            compaction=topic.compaction,
        )
        keys = topic.producers.keys.persistent_keys()
    if keys:
        window_ms = topic.config.idempotency_window_ms
        row = msgspec.structs.replace(row, keys=idempotency.encode_keys(keys, head, topic.context.clock, window_ms))
    try:
        if vectors:  # replay may find them without their deletes
            retention.persist_floors([topic])  # including evictions while files were written
            topic.shard.sync()  # a floor of class memory is not synced
            topic.shard.check_writable()
            topic.context.gap_log.flush_durably()
        for segment, content in vectors:
            topic.context.pins.before_replace(topic.context.disk, segment.path(".del"))
            replace_file(topic.context.disk, segment.path(".del"), content)
    except BaseException:
        with topic.lock:
            for segment, _ in vectors:
                segment.has_unsaved_deletions = True
        raise
    for segment in (part for part in dropped if isinstance(part, Segment)):
        segment.unmap()
        topic.context.tag_cache.drop(topic.id, segment.base)
    if any(segment.is_sealed for segment, _ in vectors):
        topic.context.topics_to_rewrite.add(topic)
    return row


def _build_queue_row(topic: TopicState, *, final: bool) -> QueueRow | None:
    if topic.queue_state is not None:
        return topic.queue_state.row(final=final)
    return None if topic.queue_snapshot is None else topic.queue_snapshot.row()


# ── marks and cleanup ────────────────────────────────────────────────────────────────────────────────────


def _write_marks(context: EngineContext, entries: Iterable[TopicEntry]) -> None:
    """Write a mark with the topics that changed into every shard. Replay needs only its position of what is synced."""
    marks = [
        TopicMark(
            row.id,
            row.head,
            max(row.cap_mark, row.ttl_mark, row.source_mark) + 1,
            row.earliest,
            row.earliest,
            row.segments[-1].base if row.segments else 0,
            row.segments[-1].size if row.segments else 0,
        )
        for row in sorted((entry.decode() for entry in entries), key=lambda row: row.id)
    ]
    futures: list[CommitFuture[None]] = []
    for shard in context.shards:
        topic_marks = tuple(mark for mark in marks if context.shard(mark.topic_id) is shard)
        synced = shard.synced_position()
        body = CheckpointMark(wal_first=synced.file_number, wal_pos=synced.pos, topics=topic_marks)
        encoded = frame.encode(body.KIND, ts_ms=context.now_ms(), data=control_frames.encode(body))
        future: CommitFuture[None] = CommitFuture(shard)
        shard.submit(Commit([encoded], frames=1, durable=True, future=future))
        futures.append(future)
    for future in futures:
        future.wait()


def _remove_unneeded(
    context: EngineContext, state: CheckpointState, old_positions: Sequence[GroupRow], *, complete: bool
) -> None:
    """Remove files that the previous manifest did not need either. A failure loses nothing: the next checkpoint or
    start retries. Files that a backup reads stay until a checkpoint after it."""
    state.store.prune()
    removed: set[str] = set()
    directories: set[str] = set()
    try:
        for path in state.files_to_remove if not context.pins.hold_segments else ():
            if remove_if_exists(context.disk, path):
                directories.add(path.rpartition("/")[0])
            removed.add(path)
    finally:
        state.files_to_remove = [path for path in state.files_to_remove if path not in removed]
    directories |= _remove_hot_copies(context, state)
    for directory in sorted(directories):
        if context.disk.stat(directory) is not None:  # otherwise its topic was dropped
            context.disk.sync_dir(directory)
    for row in old_positions if not context.pins.hold_wal else ():
        remove_old_files(context.disk, join(context.root, WAL_DIR), row.key, row.first)
    if complete:
        state.old_layout_shards = tuple(row for row in state.old_layout_shards if row not in old_positions)
        state.needs_checkpoint = bool(state.old_layout_shards)
