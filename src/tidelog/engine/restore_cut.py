"""Point-in-time restore: cut restored files and metadata at a seq of a topic, or at a time.

    segments    those after the cut are removed; the one with the cut is made shorter and sealed, and a batch that the
                cut divides is encoded again without its rest
    WAL         written again with the frames from before the cut: of each topic up to its first frame after the cut
    rows        heads, floors, ranges, queues, producers and keys of the metadata end at the cut

What the log knows decides what is taken back. Records have seqs and times, so they are cut exactly. Changes in the WAL
of the backup (deletes, acks, leases, commits of groups, settings, creations and drops of topics) have times and places,
so those after the cut are left out. Changes that a checkpoint had already merged into deletion vectors and rows before
the backup have neither: those of records before the cut stay. A position of a group after the end of its topic
becomes the end.

The gap log is not cut: it says what was removed from records that are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.engine.blobs import BlobTable
from tidelog.engine.context import WAL_DIR, topic_directory
from tidelog.engine.gap_log import GAP_LOG_TOPIC
from tidelog.engine.manifest import GroupRow, Manifest, QueueRow, RouterRow, SegmentRow, TopicRow, WriterRow
from tidelog.engine.segment import SEGMENT_SUFFIXES, MmapCache, Segment, SegmentFiles, record_sizes
from tidelog.errors import Corrupt
from tidelog.formats import batch, control_frames, frame, scan, sealed_segment, segment_index
from tidelog.formats.backup_manifest import BackupManifest
from tidelog.formats.control_frames import Body
from tidelog.formats.frame import APPEND_BATCH, HEAD_WATERMARK, MORE, TOPIC_CREATE
from tidelog.types import Ints
from tidelog.wal import paths
from tidelog.wal.recovery import FrameWindow, read_frames

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Cut:
    """Where to cut: the last seq of some topics, by id; the last time of all."""

    seqs: dict[int, int] = field(default_factory=dict)
    time_ms: int | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.seqs) or self.time_ms is not None

    def limits(self, topic_id: int, name: str) -> tuple[int, int]:
        """The last seq and the last time of a topic."""
        time_ms = _NO_LIMIT if self.time_ms is None or name == GAP_LOG_TOPIC else self.time_ms
        return self.seqs.get(topic_id, _NO_LIMIT), time_ms


class CutResult(NamedTuple):
    manifest: Manifest
    cut: dict[str, int]  # topics that became shorter, and by how many seqs
    dropped: list[str]  # topics that were created after the cut
    notes: list[str]


def find_created_topics(disk: Disk, root: str, loaded: Manifest, backup: BackupManifest) -> list[TopicRow]:
    """Rows without records for the topics of a backup that only the WAL knows."""
    known, live = {row.id for row in loaded.topics}, {topic.id for topic in backup.topics}
    rows: dict[int, TopicRow] = {}
    if live <= known:
        return []
    for window in _wal_windows(disk, root, loaded, backup):
        for number in np.flatnonzero(window.frames.headers["kind"] == TOPIC_CREATE).tolist():
            topic_id = int(window.frames.headers["topic_id"][number])
            body = _decode(window.frames, number)
            if topic_id in live - known and isinstance(body, control_frames.TopicCreate):
                rows[topic_id] = TopicRow(topic_id, body.name, body.config, 0, 0, 1, 0, 0, 0, ())
    return [rows[topic_id] for topic_id in sorted(rows)]


class _WalWindow(NamedTuple):
    key: str
    frames: FrameWindow


def _wal_windows(disk: Disk, root: str, loaded: Manifest, backup: BackupManifest) -> Iterator[_WalWindow]:
    """The frames of the restored WAL, shard by shard."""
    starts = {row.key: row for row in loaded.groups}
    extents = {
        file.path: (file.offset, file.offset + file.size) for file in backup.files if file.path.startswith("wal/")
    }
    wal = join(root, WAL_DIR)
    for key in sorted({*starts, *paths.list_shard_keys(disk, wal)}):
        directory = paths.shard_directory(wal, key)
        for number in paths.list_file_numbers(disk, directory):
            relative = f"wal/{key}/{paths.file_name(number)}" if key else f"wal/{paths.file_name(number)}"
            lo, hi = extents[relative]
            for window in read_frames(disk, paths.file_path(directory, number), number, lo, hi):
                yield _WalWindow(key, window)


def _decode(window: FrameWindow, number: int) -> Body | None:
    parsed = _parse(window, number)
    if frame.is_record(parsed.kind):
        return None
    return control_frames.decode(parsed.kind, memoryview(window.buf)[parsed.data_pos : parsed.data_end])


def _parse(window: FrameWindow, number: int) -> frame.Frame:
    parsed = frame.read_frame(window.buf, int(window.frame_pos[number]), len(window.buf), check=False)
    assert isinstance(parsed, frame.Frame), "a walk yields valid frames only"
    return parsed


def apply_cut(disk: Disk, root: str, loaded: Manifest, backup: BackupManifest, cut: Cut) -> CutResult:
    """Cut the restored files in `root`, and return the metadata that fits them."""
    rows: list[TopicRow] = []
    live = {topic.id: topic for topic in backup.topics}
    seqs: dict[int, int] = {}  # the last seq of each topic that was cut in its segments
    for row in loaded.topics:
        if row.id not in live:
            rows.append(row)  # its drop is in the WAL
            continue
        cut_row = _cut_topic(disk, root, row, *cut.limits(row.id, row.name))
        if cut_row is not row:
            seqs[row.id] = cut_row.head
        rows.append(cut_row)
    wal = _WalCut(disk, root, loaded, backup, cut, seqs)
    groups = wal.run()
    # Topics that only the WAL knows, whose creation is after the cut.
    missing = {row.id for row in rows if row.id >= loaded.next_topic_id} - wal.created
    heads = {row.id: row.head for row in rows if row.id in live}
    for topic_id, seq in wal.heads.items():
        heads[topic_id] = max(heads.get(topic_id, 0), seq)
    shorter = {
        topic.name: topic.head - heads[topic.id]
        for topic in backup.topics
        if topic.id in heads and topic.id not in missing and heads[topic.id] < topic.head
    }
    rows = [
        msgspec.structs.replace(row, reserved=min(row.reserved, heads[row.id])) if row.id in wal.stopped else row
        for row in rows
    ]
    routers = tuple(_cut_router(router, heads) for router in loaded.routers)
    notes = [
        f"router {router.name}: copies that were cut from its target are not made again"
        for router in loaded.routers
        if router.dest_id in live and live[router.dest_id].name in shorter
    ]
    notes += [
        f"{row.name}: compaction had reached seq {row.compaction[1]}; a key that was written again after the cut has "
        "no record from before it, restore an older backup for these"
        for row in loaded.topics
        if row.compaction is not None and row.compaction[1] > seqs.get(row.id, _NO_LIMIT)
    ]
    if backup.channels and cut.time_ms is not None:
        notes.append("channels are as they were when the backup was made")
    result = Manifest(tuple(row for row in rows if row.id not in missing), groups, loaded.next_topic_id, routers)
    return CutResult(result, shorter, sorted(live[topic_id].name for topic_id in missing), notes)


# ── segments and rows ─────────────────────────────────────────────────────────────────────────────


def _cut_topic(disk: Disk, root: str, row: TopicRow, seq_max: int, ts_max: int) -> TopicRow:
    """Cut the segments of a topic; return its row, the same one if nothing was cut."""
    files = SegmentFiles(disk, topic_directory(root, row.id), row.id, MmapCache(1))
    last = min(row.head, seq_max)
    for segment in row.segments:
        if segment.last_ts > ts_max and segment.base <= last:
            times = Segment.from_row(files, segment).entries()["ts"]
            last = min(last, segment.base + int(np.searchsorted(times, ts_max, "right")) - 1)
            break
    if last == row.head:
        return row
    segments = [segment for segment in row.segments if segment.stop <= last + 1]
    for segment in row.segments[len(segments) :]:
        if segment.base > last:
            _remove_segment(files, segment)
        elif (cut := _cut_segment(files, segment, last)) is not None:
            segments.append(cut)
        else:
            row = msgspec.structs.replace(row, ghosts=(*row.ghosts, (segment.base, last + 1)))
    return _cut_row(row, last, tuple(segments))


def _cut_segment(files: SegmentFiles, segment: SegmentRow, last: int) -> SegmentRow | None:
    """Cut the files of a segment after `last`, which is one of its seqs, and seal it; return its row. None: it has no
    record up to there, a rewrite has removed them, and its files are removed."""
    base, stop, disk = segment.base, last + 1, files.disk
    part = Segment.from_row(files, segment)
    entries = part.entries()[: stop - base].copy()
    is_hole = (entries["flags"] & segment_index.HOLE) != 0
    part.unmap()
    if is_hole.all():
        _remove_segment(files, segment)
        return None
    last_record = int(np.flatnonzero(~is_hole)[-1])
    offset = int(entries["frame_offset"][last_record])
    kept = _first_records(*_read_frame_at(disk, part.path(".data"), offset, segment.size), last)
    entries["frame_offset"][last_record + 1 :] = offset + len(kept)  # holes at the end name the end
    _replace_end(disk, part.path(".data"), offset, kept)
    _replace_end(disk, part.path(".idx"), 0, entries.tobytes())
    remove_if_exists(disk, part.path(".tag"))  # searches read the segment
    content = read_file(disk, part.path(".data")) or b""
    scanned = scan.scan_records(content, above=base - 1)
    if scanned.end != len(content):
        raise Corrupt(part.path(".data"), pos=scanned.end, reason=scanned.reason, next_step="nothing was restored")
    footer = sealed_segment.build_footer(content, entries.tobytes(), first_seq=base)
    replace_file(disk, part.path(".foot"), sealed_segment.encode_footer(footer))
    deletions = part.read_side_file(".del")
    if deletions is not None:
        marked = sealed_segment.decode_deletion_vector(deletions, part.path(".del")).seqs()
        vector = sealed_segment.DeletionVector(base, stop - base)
        vector.mark(marked[marked < stop])
        replace_file(disk, part.path(".del"), sealed_segment.encode_deletion_vector(vector))
    cut = Segment(
        files,
        base,
        stop,
        len(content),
        live=stop - base,
        first_ts=segment.first_ts,
        last_ts=int(entries["ts"][-1]),
        sealed=True,
        generation=segment.generation,
        removed=int(is_hole.sum()) if segment.removed else 0,
    )
    sizes, deleted = record_sizes(cut, 0, stop - base), cut.deleted_mask()
    live = np.ones(stop - base, np.bool_) if deleted is None else ~deleted
    cut.live_records, cut.live_bytes = int(live.sum()), int(sizes[live].sum())
    cut.unmap()
    return cut.to_row()


def _remove_segment(files: SegmentFiles, segment: SegmentRow) -> None:
    for suffix in reversed(SEGMENT_SUFFIXES):
        remove_if_exists(files.disk, files.path(segment.base, segment.generation, suffix))


def _read_frame_at(disk: Disk, path: str, pos: int, end: int) -> tuple[bytes, frame.Frame]:
    """Read and verify the frame at a position of a data file."""
    file = disk.open(path)
    try:
        content = file.read(pos, end - pos)
    finally:
        file.close()
    parsed = frame.read_frame(content, 0, len(content))
    if not isinstance(parsed, frame.Frame):
        raise Corrupt(path, pos=pos, reason=parsed.reason, next_step="nothing was restored")
    return content, parsed


def _first_records(buf: bytes, parsed: frame.Frame, last: int) -> bytes:
    """The frame with its records up to `last`, as the end of its caller's batch."""
    if parsed.kind == APPEND_BATCH:
        count = min(batch.record_count(buf, parsed), last - parsed.seq + 1)
        return batch.take_first(buf, parsed, count)
    node, tag = buf[parsed.node_pos : parsed.tag_pos], buf[parsed.tag_pos : parsed.data_pos]
    flags = parsed.flags & ~(MORE | frame.HAS_NODE | frame.HAS_TAG)
    return frame.encode(
        parsed.kind,
        topic_id=parsed.topic_id,
        seq=parsed.seq,
        ts_ms=parsed.ts_ms,
        data=buf[parsed.data_pos : parsed.data_end],
        node=node,
        tag=tag,
        flags=flags,
    )


def _replace_end(disk: Disk, path: str, pos: int, content: bytes) -> None:
    file = disk.open(path, "write")
    try:
        file.write(pos, content)
        file.truncate(pos + len(content))
        file.sync()
    finally:
        file.close()


def _cut_row(row: TopicRow, last: int, segments: tuple[SegmentRow, ...]) -> TopicRow:
    """The row of a topic that ends at `last`."""

    def clip(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((lo, min(hi, last + 1)) for lo, hi in ranges if lo <= last)

    return msgspec.structs.replace(
        row,
        head=last,
        reserved=last,
        earliest=min(row.earliest, last + 1),
        cap_mark=min(row.cap_mark, last),
        ttl_mark=min(row.ttl_mark, last),
        source_mark=min(row.source_mark, last),
        last_ts=segments[-1].last_ts if segments else 0,
        segments=segments,
        ghosts=clip(row.ghosts),
        trims=clip(row.trims),
        hops=tuple((lo, min(hi, last + 1), hops) for lo, hi, hops in row.hops if lo <= last),
        queue=None if row.queue is None else _cut_queue(row.queue, last),
        writers=tuple(_cut_writer(writer, last) for writer in row.writers),
        keys=tuple(key for key in row.keys if key[2] <= last),
        blobs=_cut_blobs(row.blobs, last),
        compaction=_cut_compaction(row.compaction, last),
    )


def _cut_queue(queue: QueueRow, last: int) -> QueueRow:
    return msgspec.structs.replace(
        queue,
        leases=tuple(lease for lease in queue.leases if lease.seq <= last),
        deliveries=tuple(each for each in queue.deliveries if each[0] <= last),
        delayed=tuple(each for each in queue.delayed if each[0] <= last),
    )


def _cut_blobs(blobs: bytes, last: int) -> bytes:
    table = BlobTable.from_row(blobs)
    return table.to_row(last)


def _cut_compaction(progress: tuple[int, int, int] | None, last: int) -> tuple[int, int, int] | None:
    """Progress beyond the end would hold compaction back until new records have passed it."""
    return None if progress is None or not last else (progress[0], min(progress[1], last), progress[2])


def _cut_writer(writer: WriterRow, last: int) -> WriterRow:
    return msgspec.structs.replace(writer, batches=tuple(each for each in writer.batches if each[2] <= last))


def _cut_router(router: RouterRow, heads: dict[int, int]) -> RouterRow:
    return msgspec.structs.replace(router, dest_base=min(router.dest_base, heads.get(router.dest_id, 0)))


# ── the WAL ───────────────────────────────────────────────────────────────────────────────────────


class _WalCut:
    """Writes the WAL of each shard again, as one file, without the frames after the cut and those of checkpoints,
    which name positions."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        loaded: Manifest,
        backup: BackupManifest,
        cut: Cut,
        segment_ends: dict[int, int],
    ) -> None:
        self._disk, self._root, self._loaded, self._backup, self._cut = disk, root, loaded, backup, cut
        self._names = {topic.id: topic.name for topic in backup.topics}
        self._seqs = {**cut.seqs}
        for topic_id, seq in segment_ends.items():
            self._seqs[topic_id] = min(seq, self._seqs.get(topic_id, _NO_LIMIT))
        self._segment_ends = segment_ends
        self.stopped: set[int] = set()  # topics whose later frames are left out
        self.heads: dict[int, int] = {}  # the last seq of each topic in the new WAL
        self.created: set[int] = set()  # topics whose creation is in it

    def run(self) -> tuple[GroupRow, ...]:
        """Write the files and return where replay begins."""
        first_seqs: dict[int, int] = {}
        content: dict[str, list[bytes]] = {row.key: [] for row in self._loaded.groups}
        for window in _wal_windows(self._disk, self._root, self._loaded, self._backup):
            headers = window.frames.headers
            records = np.flatnonzero(frame.are_records(headers))
            for topic_id, seq in zip(*(headers[name][records].tolist() for name in ("topic_id", "seq")), strict=True):
                first_seqs.setdefault(topic_id, seq)
        # Where the first record after the cut is not in the WAL, the WAL begins after the cut.
        self.stopped = {
            topic_id
            for topic_id, last in self._segment_ends.items()
            if topic_id in self._cut.seqs and first_seqs.get(topic_id, _NO_LIMIT) > last + 1
        }
        for window in _wal_windows(self._disk, self._root, self._loaded, self._backup):
            content.setdefault(window.key, []).extend(self._kept_frames(window))
        return tuple(self._write(key, b"".join(pieces)) for key, pieces in content.items())

    def _write(self, key: str, content: bytes) -> GroupRow:
        directory = paths.shard_directory(join(self._root, WAL_DIR), key)
        numbers = paths.list_file_numbers(self._disk, directory)
        starts = [row.first for row in self._loaded.groups if row.key == key]
        number = max([*numbers, *starts, 1]) + 1  # above every position that a snapshot has
        for old in numbers:
            remove_if_exists(self._disk, paths.file_path(directory, old))
        if content:
            self._disk.make_dir(directory)
            path = paths.file_path(directory, number)
            file = self._disk.open(path, "create")
            try:
                file.write(0, content)
                file.sync()
            finally:
                file.close()
            synced = paths.Position(number, len(content))
            replace_file(self._disk, join(directory, paths.CURRENT), paths.encode_current(*synced))
            replace_file(self._disk, join(directory, paths.SYNCED), paths.encode_synced(synced))
        elif self._disk.stat(directory) is not None:
            self._disk.sync_dir(directory)
        return GroupRow(key, number, 0)

    def _kept_frames(self, window: _WalWindow) -> Iterator[bytes]:
        frames = window.frames
        ids, buf = frames.headers["topic_id"], frames.buf
        keep = ids != 0
        keep &= ~self._covered(window)
        replaced: dict[int, bytes] = {}
        for topic_id in np.unique(ids[keep]).tolist():
            numbers = np.flatnonzero(keep & (ids == topic_id))
            kept = self._kept_of_topic(topic_id, frames, numbers, replaced)
            keep[numbers[kept:]] = False
        ends = frames.frame_pos + frames.headers["frame_len"].astype(np.int64) + 4
        kept_numbers = np.flatnonzero(keep)
        breaks = np.flatnonzero(np.diff(kept_numbers) != 1) + 1
        for lo, hi in pairwise([0, *breaks.tolist(), len(kept_numbers)]):
            run = kept_numbers[lo:hi]
            for start, stop in _split_run(run, replaced):
                if stop - start == 1 and int(run[start]) in replaced:
                    yield replaced[int(run[start])]
                elif stop > start:
                    yield buf[int(frames.frame_pos[run[start]]) : int(ends[run[stop - 1]])]

    def _covered(self, window: _WalWindow) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which frames the metadata contains already, although replay starts before them for the sake of others."""
        frames = window.frames
        start = next((row for row in self._loaded.fresh if row.key == window.key), None)
        if start is None or frames.file_number > start.first:
            return np.zeros(len(frames.frame_pos), np.bool_)
        covered = ~np.isin(frames.headers["topic_id"], np.array(self._loaded.lagging, np.uint64))
        if frames.file_number == start.first:
            covered &= frames.frame_pos + frames.file_offset < start.pos
        return covered

    def _kept_of_topic(self, topic_id: int, window: FrameWindow, numbers: Ints, replaced: dict[int, bytes]) -> int:
        """How many frames of a topic come before its cut. The last one may be replaced by a shorter one."""
        if topic_id in self.stopped:
            return 0
        _, ts_max = self._cut.limits(topic_id, self._names.get(topic_id, ""))
        seq_max = self._seqs.get(topic_id, _NO_LIMIT)
        headers = window.headers[numbers]
        late = np.flatnonzero(headers["ts_ms"] > ts_max)
        stop = int(late[0]) if len(late) else len(numbers)
        if (headers["kind"][:stop] == TOPIC_CREATE).any():
            self.created.add(topic_id)
        if seq_max == _NO_LIMIT:
            records = numbers[:stop][frame.are_records(headers[:stop])]
            if len(records):
                self._note_head(topic_id, _last_seq(window.buf, _parse(window, int(records[-1]))))
            kept = stop
        else:
            kept = self._cut_at_seq(topic_id, window, numbers[:stop], seq_max, replaced)
        if kept < len(numbers):
            self.stopped.add(topic_id)
        return kept

    def _cut_at_seq(
        self, topic_id: int, window: FrameWindow, numbers: Ints, seq_max: int, replaced: dict[int, bytes]
    ) -> int:
        """How many of these frames come before the first record after `seq_max`."""
        for place, number in enumerate(numbers.tolist()):
            parsed = _parse(window, number)
            if parsed.kind == HEAD_WATERMARK:
                replaced[number] = b""  # seqs after the cut are assigned again, in a new epoch
            elif not frame.is_record(parsed.kind):
                body = _decode(window, number)
                if _announced_last(body) <= seq_max:
                    continue
                if isinstance(body, control_frames.Forward):
                    return place  # the cursor of a router counts for all copies of a batch: they are made again
                replaced[number] = b""  # the number or key of a batch that is not whole
            elif (last := _last_seq(window.buf, parsed)) <= seq_max:
                self._note_head(topic_id, last)
            elif parsed.seq <= seq_max:
                replaced[number] = _first_records(window.buf, parsed, seq_max)
                self._note_head(topic_id, seq_max)
                return place + 1
            else:
                if place and parsed.seq == seq_max + 1:
                    self._end_batch(window, int(numbers[place - 1]), replaced)
                return place
        return len(numbers)

    def _note_head(self, topic_id: int, seq: int) -> None:
        self.heads[topic_id] = max(self.heads.get(topic_id, 0), seq)

    def _end_batch(self, window: FrameWindow, number: int, replaced: dict[int, bytes]) -> None:
        """Make a frame the last of its caller's batch."""
        parsed = _parse(window, number)
        if frame.is_record(parsed.kind) and parsed.flags & MORE:
            replaced[number] = _first_records(window.buf, parsed, _NO_LIMIT)


def _last_seq(buf: bytes, parsed: frame.Frame) -> int:
    return parsed.seq + (batch.record_count(buf, parsed) if parsed.kind == APPEND_BATCH else 1) - 1


def _split_run(run: Ints, replaced: dict[int, bytes]) -> Iterator[tuple[int, int]]:
    """Positions [start, stop) of adjacent frames; each replaced frame on its own."""
    start = 0
    for place in [place for place, number in enumerate(run.tolist()) if number in replaced] if replaced else ():
        yield start, place
        yield place, place + 1
        start = place + 1
    yield start, len(run)


def _announced_last(body: Body | None) -> int:
    """The last seq of the records that follow a frame and belong to it; 0: none do."""
    match body:
        case control_frames.NumberedBatch() | control_frames.WriteKey():
            return body.last
        case control_frames.Forward(event=control_frames.ForwardEvent.COPIED):
            return body.dest_head
        case _:
            return 0
