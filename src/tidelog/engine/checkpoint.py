"""[shell] Checkpoint: what only the WAL has is copied into segments, and then the WAL may forget it.

    1  where the WAL stands, group by group: everything before has been published
       and every floor is made durable: deletion vectors may be found by a replay that begins before the deletes
    2  frames → segment files, byte for byte: data, sync, index, sync; then, for what is complete, every frame is read
       back and verified, and a footer is written
    3  deletion vectors, each replaced as a whole
       the ledger has rows for every removal that 3 and 5 reflect: replay may not find it again
    4  a CheckpointMark into every shard, synced
    5  the manifest, replaced as a whole: from here on it is true
    6  what neither of the two manifests needs is removed

Any error before 5 leaves the manifest before in force, and it is complete: nothing it names was
changed, only added to. Writers go on throughout; each topic is locked to take stock, never for I/O.

One topic that cannot be written does not stop the others. The new manifest repeats its row of the one before
(`Manifest.lagging`), and replay of its shard still begins where that row needs it; replay of all other topics begins
here (`Manifest.fresh`). A segment whose frames do not all verify is sealed without a footer: every read then checks
frame by frame, and what is intact is served.

Where there is no room for copies, a checkpoint without them (`copy=False`) lets go of the segments of which nothing is
left: rows then say what the files hold, and replay begins where it did.
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
from tidelog.disk.interface import Disk, File, join
from tidelog.engine import groups, idempotency, manifest, retention
from tidelog.engine.manifest import GroupRow, Manifest, QueueRow, RouterRow, SegmentRow, TopicRow
from tidelog.engine.memtable import MemTable
from tidelog.engine.routing import recovery
from tidelog.engine.segment import CODEC, Segment, SegmentFiles
from tidelog.engine.tag_search import write_tag_index
from tidelog.engine.topic_state import WAL_DIR, EngineContext, TopicState
from tidelog.errors import Corrupt, Forked, NewerFormat
from tidelog.formats import control_frames, deletion_vector, footer, frame, scan, segment_index
from tidelog.formats.control_frames import CheckpointMark, TopicMark
from tidelog.types import Buffer
from tidelog.wal import Commit, CommitFuture, paths
from tidelog.wal.paths import remove_old_files

_COPY_CHUNK_BYTES = 1 << 20
SEGMENT_SUFFIXES = (".data", ".idx", ".foot", ".tag", ".del")  # data first: what is half removed is no segment any more


class SegmentWrite(NamedTuple):
    """What one segment file gets: the blocks that belong to it, and whether it is complete then."""

    base: int
    segment: Segment | None  # None: it has no file yet
    memtables: list[tuple[MemTable, bytes]]  # each with its index
    is_complete: bool


@dataclass(slots=True)
class CheckpointState:
    """What checkpoints of one engine must remember of each other."""

    manifest_number: int = 0  # of the newest manifest
    shard_positions: tuple[
        GroupRow, ...
    ] = ()  # its positions: replay from the manifest before it may need less, never more
    files_to_remove_next: list[str] = field(
        default_factory=list
    )  # files that only the newest manifest's predecessor names
    files_to_remove: list[str] = field(default_factory=list)  # files that neither names: to be removed
    old_layout_shards: tuple[GroupRow, ...] = ()  # groups of an earlier shard count, replayed and not written any more
    needs_checkpoint: bool = (
        False  # a checkpoint is needed before anything is written: replay must not begin where it did
    )


FailedTopics: TypeAlias = dict[TopicState, Exception]
"""The topics that a checkpoint could not write, and why."""


def run_checkpoint(
    context: EngineContext,
    registry: Callable[[], tuple[Sequence[TopicState], int]],
    state: CheckpointState,
    *,
    final: bool,
    pause: Callable[[], object] = lambda: None,
    copy: bool = True,
) -> FailedTopics:
    """Make a checkpoint; return the topics that it had to leave out. `final`: nothing is written any more, so no seq
    needs to stay reserved. `rest` is called after each step of the copying, with no lock held. Without `copy` no record
    is copied: topics that have some to copy are left out, but segments that they do not need any more go."""
    positions = [shard.position() for shard in context.shards]
    # Asked after the positions: a topic that is dropped from here on has its frame where replay begins.
    cores, next_topic_id = registry()
    failed = _persist_floors(cores)
    rows: list[TopicRow] = []
    routers: list[RouterRow] = []
    doomed: list[str] = []
    written: list[TopicState] = []
    freed: set[TopicState] = set()  # left out, but for the segments that they do not need any more
    for core in cores:
        if core in failed:
            continue
        try:
            whole = copy or not _has_records_to_copy(core)
            if whole:
                _write_topic(core, pause)
            else:
                failed[core] = OSError(errno.ENOSPC, "there is no room to copy its records")
                if not _can_skip_copy(core):
                    continue
                freed.add(core)
            row = _build_topic_row(core, final=final and whole)
            if not whole:
                row = _with_previous_config(context, state, row)
        except Forked:  # of the process, not of this topic
            raise
        except Exception as error:
            freed.discard(core)
            if not core.is_dropped:
                failed[core] = error
            continue  # a dropped one's files went while they were written: its last frame is where replay begins
        rows.append(row)
        routers += core.forwarder_snapshot.routers if core.forwarder_snapshot else ()
        home = context.segment_files(core.id)
        doomed += [home.path(base, suffix) for base in core.dropped_segments for suffix in SEGMENT_SUFFIXES]
        written.append(core)
    if failed and not written:
        return failed
    left = {core: error for core, error in failed.items() if core not in freed}
    context.gap_log.flush_durably({core.id for core in left})
    if left:
        old, led = _previous_rows(context, state, left)
        rows += old
        routers += led
    rows.sort(key=lambda row: row.id)
    _write_marks(context, rows)
    keys = paths.shard_keys(len(context.shards))
    begin = tuple(GroupRow(key, at.file_number, at.pos) for key, at in zip(keys, positions, strict=True))
    made = Manifest((*rows,), (*begin, *state.old_layout_shards), next_topic_id, (*routers,))
    if failed:
        made = _keep_old_positions(context, state, made, failed)
    manifest.save(context.disk, context.root, state.manifest_number + 1, made)
    for core in written:
        recovery.on_manifest_saved(core)
        core.dropped_segments = []
    before, state.shard_positions = state.shard_positions, made.groups
    state.manifest_number += 1
    state.files_to_remove, state.files_to_remove_next = [*state.files_to_remove, *state.files_to_remove_next], doomed
    _remove_unneeded(context, state, before, complete=not failed)
    return failed


def _persist_floors(topics: Sequence[TopicState]) -> FailedTopics:
    """Make all floors durable; topics whose floors cannot be are left out."""
    try:
        retention.persist_floors(topics)
    except Forked:
        raise
    except Exception:  # whose it was is found out one by one
        failed: FailedTopics = {}
        for core in topics:
            try:
                retention.persist_floors([core])
            except Forked:
                raise
            except Exception as error:
                failed[core] = error
        return failed
    return {}


def _previous_rows(
    context: EngineContext, state: CheckpointState, failed: FailedTopics
) -> tuple[list[TopicRow], list[RouterRow]]:
    """The rows that topics had in the manifest before, and those of the routers that lead to them. A topic that it
    does not know has a row without records: the WAL still has all of them."""
    before = (
        manifest.load_number(context.disk, context.root, state.manifest_number) if state.manifest_number else Manifest()
    )
    known = {row.id: row for row in before.topics}
    ids = {core.id for core in failed if not core.is_dropped}
    rows = [
        known.get(core.id) or TopicRow(core.id, core.name, core.config.to_json(), 0, 0, 1, 0, 0, 0, ())
        for core in failed
        if not core.is_dropped
    ]
    return rows, [router for router in before.routers if router.dest_id in ids]


def _keep_old_positions(
    context: EngineContext, state: CheckpointState, made: Manifest, failed: FailedTopics
) -> Manifest:
    """The manifest with replay of the failed topics' shards beginning where it did. Groups of an earlier shard count
    may hold frames of any of them."""
    wal, strange = join(context.root, WAL_DIR), {row.key for row in state.old_layout_shards}
    shards = {
        key
        for key, shard in zip(paths.shard_keys(len(context.shards)), context.shards, strict=True)
        if any(core.shard is shard for core in failed)
    }
    before = {row.key: row for row in state.shard_positions}

    def start(row: GroupRow) -> GroupRow:
        if row.key not in shards and row.key not in strange:
            return row
        if (known := before.get(row.key)) is not None:
            return known
        files = paths.list_file_numbers(
            context.disk, paths.shard_directory(wal, row.key)
        )  # nothing was let go of without a manifest
        return GroupRow(row.key, files[0], 0) if files else row

    groups = tuple(start(row) for row in made.groups)
    lagging = tuple(sorted(core.id for core in failed if not core.is_dropped))
    return msgspec.structs.replace(made, groups=groups, fresh=made.groups, lagging=lagging)


# ── one topic: frames into files ──────────────────────────────────────────────────────────────────


def _can_skip_copy(topic: TopicState) -> bool:
    """Whether the row of a topic may be newer than the place where its replay begins by any amount: what its frames
    say is absolute. Jobs and routers count; groups that hold records back decide what a cap takes."""
    counts = (
        topic.queue_state is not None
        or topic.queue_snapshot is not None
        or topic.upstream is not None
        or bool(topic.downstream)
    )
    return not (counts or topic.had_retention_hold or topic.persists_floors)


def _with_previous_config(context: EngineContext, state: CheckpointState, row: TopicRow) -> TopicRow:
    """A row with the settings that held where replay begins: later ones would take records, by a cap, which were there
    together only until deletes that replay finds after them."""
    before = (
        manifest.load_number(context.disk, context.root, state.manifest_number) if state.manifest_number else Manifest()
    )
    known = next((old for old in before.topics if old.id == row.id), None)
    return row if known is None else msgspec.structs.replace(row, config=known.config)


def _has_records_to_copy(topic: TopicState) -> bool:
    """Whether a topic has records to copy; it is frozen as it is."""
    with topic.lock:
        topic.forwarder_snapshot = None
        if topic.is_dropped:
            return False
        recovery.snapshot_forwarder(topic)
        return bool(_plan_segment_writes(topic))


def _write_topic(topic: TopicState, pause: Callable[[], object]) -> None:
    """Copy what is in no file into files. Where there is no room for it, what was begun is taken back."""
    broken = _find_broken_segment(topic)
    with topic.lock:
        topic.forwarder_snapshot = None
        if topic.is_dropped:
            return
        recovery.snapshot_forwarder(topic)
        if broken is not None:
            _detach_broken_segment(topic, *broken)
        chapters = _plan_segment_writes(topic)
    home = topic.context.segment_files(topic.id)
    try:
        if chapters:
            topic.context.disk.make_dir(home.directory)
        for chapter in chapters:
            _write_segment(topic, home, chapter, pause)
        if any(chapter.segment is None for chapter in chapters):  # its names may be an earlier attempt's, never synced
            topic.context.disk.sync_dir(home.directory)
        unproven = {
            chapter.base
            for chapter in chapters
            if chapter.is_complete and not _seal_segment(topic, home, chapter, pause)
        }
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            _remove_partial_copies(home, chapters)
        raise
    with topic.lock:
        for chapter in chapters:
            _adopt_segment(topic, home, chapter, unproven=chapter.base in unproven)


def _remove_partial_copies(home: SegmentFiles, chapters: Sequence[SegmentWrite]) -> None:
    """Give back the room of copies that did not all find some: no manifest names them, and what makes room needs it."""
    for chapter in chapters:
        home.unmap(chapter.base)
        segment = chapter.segment
        with suppress(OSError):
            for suffix in (".foot", ".tag"):
                remove_if_exists(home.disk, home.path(chapter.base, suffix))
            if segment is None:
                for suffix in (".idx", ".data"):
                    remove_if_exists(home.disk, home.path(chapter.base, suffix))
                continue
            sizes = {".data": segment.size, ".idx": (segment.stop - segment.base) * segment_index.ENTRY_BYTES}
            for suffix, size in sizes.items():
                file = home.disk.open(home.path(chapter.base, suffix), "write")
                try:
                    if file.size() > size:
                        file.truncate(size)
                finally:
                    file.close()


def _find_broken_segment(topic: TopicState) -> tuple[Segment, str] | None:
    """The unsealed segment of a topic, where its files cannot be continued, and why: they are shorter than what was
    written, or its deletions do not read."""
    with topic.lock:
        segment = next((part for part in topic.index.parts if isinstance(part, Segment) and not part.is_sealed), None)
        if segment is None:
            return None
        try:
            deleted = segment.deleted_mask() is not None
        except Corrupt as error:
            return segment, error.reason
        sizes = {".data": segment.size, ".idx": (segment.stop - segment.base) * segment_index.ENTRY_BYTES}
    for suffix, size in sizes.items():
        found = topic.context.disk.stat(segment.files.path(segment.base, suffix))
        if (found.size if found else 0) < size:
            have = f"it has {found.size} bytes" if found else "the file is missing"
            if suffix == ".idx" and segment.rebuild_index():  # from verified frames
                replace_file(segment.files.disk, segment.files.path(segment.base, ".idx"), segment.rebuilt_index or b"")
                segment.files.unmap(segment.base)
                continue
            return segment, f"{suffix}: {have}, {size} were written"
    if deleted and not segment.has_unsaved_deletions and not _deletions_readable(segment):
        segment.has_unsaved_deletions = True  # what memory knows is written again
    return None


def _deletions_readable(segment: Segment) -> bool:
    """Whether the file of deletions reads. What it names was compared when it was loaded."""
    try:
        content = segment.files.read_side_file(segment.base, ".del")
        return content is not None and deletion_vector.decode(content).base == segment.base
    except (Corrupt, NewerFormat):
        return False


def _detach_broken_segment(topic: TopicState, segment: Segment, reason: str) -> None:
    """Let what comes after a damaged segment start another one: nothing is added to its files, which are the only
    evidence, and the topic goes on. With the lock held."""
    segment.is_sealed = segment.lacks_footer = True
    topic.report_corruption(segment.files.path(segment.base, ".data"), f"{reason}; it was sealed without a footer")
    origin, base = 0, 0
    for part in topic.index.parts:
        if isinstance(part, MemTable) and part.segment == segment.base:
            base = base or part.base
            part.move_to_segment(base, origin)
            origin += part.size


def _plan_segment_writes(topic: TopicState) -> list[SegmentWrite]:
    """What is to be written: frozen now, so that it does not change while it is."""
    index = topic.index
    obsolete = index.obsolete_segments()
    found: dict[int, SegmentWrite] = {}
    for part in index.parts:
        if isinstance(part, MemTable):
            if not part.is_persistent or part.base == part.stop or part.segment in obsolete:
                continue
            part.is_frozen = True
            chapter = found.setdefault(part.segment, SegmentWrite(part.segment, None, [], False))
            chapter.memtables.append((part, bytes(part.index_bytes())))
        elif not part.is_sealed:
            found[part.base] = SegmentWrite(part.base, part, [], False)
    growing = index.active_segment_base()
    chapters = [chapter._replace(is_complete=chapter.base != growing) for chapter in found.values()]
    return [chapter for chapter in chapters if chapter.memtables or chapter.is_complete]


def _write_segment(topic: TopicState, home: SegmentFiles, chapter: SegmentWrite, pause: Callable[[], object]) -> None:
    """Write blocks where they belong. At fixed places: doing it twice changes nothing."""
    if not chapter.memtables:
        return
    data = _open_or_create(home.disk, home.path(chapter.base, ".data"))
    try:
        for block, _ in chapter.memtables:
            _copy_memtable(topic, block, data, pause)
        data.sync()
    finally:
        data.close()
    index = _open_or_create(home.disk, home.path(chapter.base, ".idx"))
    try:
        for block, entries in chapter.memtables:
            index.write((block.base - chapter.base) * segment_index.ENTRY_BYTES, entries)
        index.sync()
    finally:
        index.close()


def _copy_memtable(topic: TopicState, block: MemTable, data: File, pause: Callable[[], object]) -> None:
    """Byte for byte, some at a time: what lies in the WAL is not brought into memory as a whole. A frame that does not
    verify there is copied as it is: reads of it raise Corrupt, and the frames around it are saved."""
    at, size, held = block.origin, 0, list[Buffer]()
    for piece, problem in block.read_pieces():
        if problem is not None:
            topic.report_corruption(*problem)
        held.append(piece)
        size += len(piece)
        if size >= _COPY_CHUNK_BYTES:
            data.writev(at, held)
            at, size, held = at + size, 0, []
            pause()
    if held:
        data.writev(at, held)


def _open_or_create(disk: Disk, path: str) -> File:
    return disk.open(path, "create" if disk.stat(path) is None else "write")


def _seal_segment(topic: TopicState, home: SegmentFiles, chapter: SegmentWrite, pause: Callable[[], object]) -> bool:
    """Cut what an interrupted attempt left after the end, verify every frame, and write the footer. False: a frame does
    not verify, and there is no footer."""
    size, stop = _segment_end(chapter)
    path = home.path(chapter.base, ".data")
    if chapter.segment is not None and chapter.segment.lacks_footer:
        return False
    for suffix, length in ((".data", size), (".idx", (stop - chapter.base) * segment_index.ENTRY_BYTES)):
        file = home.disk.open(home.path(chapter.base, suffix), "write")
        try:
            if file.size() > length:
                file.truncate(length)
                file.sync()
        finally:
            file.close()
    home.unmap(chapter.base)
    data, entries = home.open(chapter.base)
    content = data.fetch(0, size)
    fault = "it is shorter than what was written" if len(content) < size else None
    fault = fault or _find_unverified(topic.id, chapter.base, stop, content, entries, pause)
    if fault is not None:
        made = _rebuild_index(topic.id, chapter.base, stop, content)
        if made is None:
            if remove_if_exists(home.disk, home.path(chapter.base, ".foot")):
                home.disk.sync_dir(home.directory)
            topic.report_corruption(path, f"{fault}; the segment was sealed without a footer")
            return False
        replace_file(home.disk, home.path(chapter.base, ".idx"), made)  # the data is whole: only its index was not
        home.unmap(chapter.base)
        entries = made
    foot = footer.encode(footer.build_footer(content, entries, first_seq=chapter.base))
    _write_tag_index(home, chapter.base, stop, content, entries, foot)
    replace_file(home.disk, home.path(chapter.base, ".foot"), foot)
    pause()
    return True


def _find_unverified(
    topic_id: int, base: int, stop: int, content: Buffer, entries: Buffer, pause: Callable[[], object]
) -> str | None:
    """What is wrong with the first frame that does not verify, is another topic's, or does not follow the one before;
    None: every byte of the data belongs to a frame that does, and the index names exactly these."""
    if len(entries) != (stop - base) * segment_index.ENTRY_BYTES:
        return f"its index has {len(entries)} bytes"
    if (said := segment_index.find_index_fault(segment_index.read_entries(entries), len(content))) is not None:
        return f"its index: {said}"
    shape, seq = SegmentContent(base, stop, MmapReader(memoryview(content)), entries, [entries]), base
    last, end = -1, 0  # of the frame before
    while seq < stop:
        chunk = CODEC.read(shape, seq, stop, _COPY_CHUNK_BYTES)
        if chunk.fault is not None:
            return f"byte {chunk.fault.pos}: {chunk.fault.reason}"
        starts = chunk.rows.frame_pos[np.append(0, np.flatnonzero(np.diff(chunk.rows.frame_pos)) + 1)]
        heads = frame.read_headers(chunk.rows.buf, starts)
        if (heads["topic_id"] != topic_id).any():
            return "its frames are another topic's"
        low = int(segment_index.read_entries(entries)["frame_offset"][seq - base]) - int(starts[0])
        begins, ends = starts + low, starts + low + heads["frame_len"].astype(np.int64) + 4
        # A batch may be read in two chunks: then its frame is met again.
        if begins[0] not in (end, last) or (begins[1:] != ends[:-1]).any():
            return f"byte {end}: bytes that are in no frame"
        seq, last, end = chunk.next_seq, int(begins[-1]), int(ends[-1])
        pause()
    return None if end == len(content) else f"byte {end}: bytes that are in no frame"


def _rebuild_index(topic_id: int, base: int, stop: int, content: Buffer) -> bytes | None:
    """The index of a segment by its data alone; None where the data is not whole."""
    walk = scan.scan_records(content, above=base - 1)
    rows = walk.rows
    if walk.end != len(content) or len(rows) != stop - base or int(rows.seq[-1]) != stop - 1:
        return None
    starts = rows.frame_pos[np.append(0, np.flatnonzero(np.diff(rows.frame_pos)) + 1)]
    if (frame.read_headers(rows.buf, starts)["topic_id"] != topic_id).any():
        return None
    return segment_index.build_entries(rows, base, stop, len(content)).tobytes()


def _write_tag_index(home: SegmentFiles, base: int, stop: int, data: Buffer, entries: Buffer, foot: bytes) -> None:
    """Write the tag index of a segment that is being sealed. Where a frame does not hold its checksum there is none:
    searches then scan the segment and say what is wrong with it."""
    if not (segment_index.read_entries(entries)["flags"] & segment_index.HAS_TAG).any():
        return
    walk = scan.scan_records(data, above=base - 1)
    if walk.end == len(data) and len(walk.rows) == stop - base:
        write_tag_index(home, base, foot, walk.rows)


def _segment_end(chapter: SegmentWrite) -> tuple[int, int]:
    """Bytes of data and one past the last seq of a segment when its blocks are written."""
    if chapter.memtables:
        last = chapter.memtables[-1][0]
        return last.origin + last.size, last.stop
    assert chapter.segment is not None, "a segment without blocks has files"
    return chapter.segment.size, chapter.segment.stop


def _adopt_segment(topic: TopicState, home: SegmentFiles, chapter: SegmentWrite, *, unproven: bool) -> None:
    """The files have it: what was a block is a segment."""
    index, segment = topic.index, chapter.segment
    written = [block for block, _ in chapter.memtables]
    if segment is None:
        first = written[0]
        segment = Segment(
            home, chapter.base, chapter.base, 0, live=0, live_bytes=0, first_ts=first.first_ts, last_ts=0, sealed=False
        )
        segment.set_deleted(None)
        index.parts[index.parts.index(first)] = segment
    for block in written:
        segment.absorb(block)
        if block in index.parts:
            index.parts.remove(block)
    segment.is_sealed = segment.is_sealed or chapter.is_complete
    segment.lacks_footer = segment.lacks_footer or unproven
    home.unmap(chapter.base)


def _build_topic_row(topic: TopicState, *, final: bool) -> TopicRow:
    """The row of a topic, its deletion vectors written. Segments that it no longer needs are in `core.discarded` until
    a manifest without them is saved."""
    home, index = topic.context.segment_files(topic.id), topic.index
    with topic.lock:
        obsolete = index.obsolete_segments()
        gone = [
            part
            for part in index.parts
            if (part.segment if isinstance(part, MemTable) else part.base) in obsolete
            and (isinstance(part, MemTable) or part.is_sealed)
        ]
        index.drop_parts(gone)
        topic.dropped_segments += [part.base for part in gone if isinstance(part, Segment)]
        segments = [part for part in index.parts if isinstance(part, Segment)]
        vectors = [(segment, segment.encode_deletions()) for segment in segments if segment.has_unsaved_deletions]
        for segment, _ in vectors:
            segment.has_unsaved_deletions = False
        # What came while this topic was written is in the WAL only: the row must not claim it, nor anything about it.
        fresh = [
            part.base
            for part in index.parts
            if isinstance(part, MemTable) and part.is_persistent and part.stop > part.base
        ]
        frozen = topic.forwarder_snapshot
        head = min([*(base - 1 for base in fresh), index.head, *([frozen.head] if frozen else [])])
        marks = index.watermarks.clamp_to(head)
        row = TopicRow(
            topic.id,
            topic.name,
            topic.config.to_json(),
            head,
            head if final else max(topic.reserved_ceiling, head),
            min(index.earliest, head + 1),
            marks.cap,
            marks.ttl,
            index.last_ts,
            tuple(_build_segment_row(segment) for segment in segments),
            tuple((lo, min(hi, head + 1)) for lo, hi in index.deleted_ranges if lo <= head),
            marks.source,
            fed=frozen.fed if frozen else None,
            hops=frozen.hops if frozen else (),
            queue=_build_queue_row(topic, final=final),
            consumers=groups.encode_groups(topic),
            guarded=topic.had_retention_hold,
            removals=topic.delete_count,
            writers=idempotency.encode_producers(topic.producer_batches, head),
            wired=frozen.applied_router_frame if frozen else topic.applied_router_frame,
            trims=tuple((lo, min(hi, head + 1)) for lo, hi in index.trimmed_ranges if lo <= head),
        )
        kept = topic.idempotency_window.persistent_keys()
    if kept:
        window_ms = topic.config.idempotency_window_ms
        row = msgspec.structs.replace(row, keys=idempotency.encode_keys(kept, head, topic.context.clock, window_ms))
    try:
        if vectors:  # replay may find them without the deletes that made them
            retention.persist_floors([topic])  # also what caps took while files were written
            topic.shard.sync()  # a floor of class memory does not wait for that
            topic.shard.check_writable()
            topic.context.gap_log.flush_durably()
        for segment, content in vectors:
            replace_file(topic.context.disk, home.path(segment.base, ".del"), content)
    except BaseException:
        with topic.lock:
            for segment, _ in vectors:
                segment.has_unsaved_deletions = True
        raise
    for segment in (part for part in gone if isinstance(part, Segment)):
        home.unmap(segment.base)
        topic.context.tag_cache.drop(topic.id, segment.base)
    return row


def _build_queue_row(topic: TopicState, *, final: bool) -> QueueRow | None:
    if topic.queue_state is not None:
        return topic.queue_state.row(final=final)
    return None if topic.queue_snapshot is None else topic.queue_snapshot.row()


def _build_segment_row(segment: Segment) -> SegmentRow:
    return SegmentRow(
        segment.base,
        segment.stop,
        segment.size,
        segment.live_records,
        segment.live_bytes,
        segment.first_ts,
        segment.last_ts,
        segment.is_sealed,
        segment.lacks_footer,
    )


# ── all topics ────────────────────────────────────────────────────────────────────────────────────


def _write_marks(context: EngineContext, rows: Iterable[TopicRow]) -> None:
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
        for row in rows
    ]
    futures: list[CommitFuture[None]] = []
    for shard in context.shards:
        topics = tuple(mark for mark in marks if context.shard(mark.topic_id) is shard)
        synced = shard.synced_position()
        body = CheckpointMark(wal_first=synced.file_number, wal_pos=synced.pos, topics=topics)
        encoded = frame.encode(body.KIND, ts_ms=context.now_ms(), data=control_frames.encode(body))
        future: CommitFuture[None] = CommitFuture(shard)
        shard.submit(Commit([encoded], frames=1, durable=True, future=future))
        futures.append(future)
    for future in futures:
        future.wait()


def _remove_unneeded(
    context: EngineContext, state: CheckpointState, before: Sequence[GroupRow], *, complete: bool
) -> None:
    """Remove what the manifest before the newest did not need either. Failing here loses nothing: it is tried again,
    by the next checkpoint or by the next start."""
    manifest.prune(context.disk, context.root)
    removed: set[str] = set()
    touched: set[str] = set()
    try:
        for path in state.files_to_remove:
            if remove_if_exists(context.disk, path):
                touched.add(path.rpartition("/")[0])
            removed.add(path)
    finally:
        state.files_to_remove = [path for path in state.files_to_remove if path not in removed]
    for directory in sorted(touched):
        if context.disk.stat(directory) is not None:  # else its topic was dropped
            context.disk.sync_dir(directory)
    for row in before:
        remove_old_files(context.disk, join(context.root, WAL_DIR), row.key, row.first)
    if complete:
        state.old_layout_shards = tuple(row for row in state.old_layout_shards if row not in before)
        state.needs_checkpoint = bool(state.old_layout_shards)
