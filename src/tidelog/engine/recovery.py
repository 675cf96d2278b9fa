"""Recovery: build topics from the manifest, the segments and the WAL.

    1  load the newest manifest that reads
    2  restore its topics with the segments it names: file sizes are checked, contents are not
    3  read every WAL shard on disk, whatever the shard count is now
    4  replay its frames, topic by topic in order; frames that the manifest covers are skipped
    5  pad heads to the reserved seqs, apply caps, link routers to their topics
    6  only for a writer (`startup`): truncate WAL tails and segments, remove files that no manifest names

Each pass may be interrupted by a crash and repeated. Passes 1 to 5 change nothing on disk, so a read-only engine
beside a writer runs them too. A bad frame below the synced position is damage: later frames are replayed, a writer
opens only with `accept_loss`, and the bytes are kept in quarantine. A bad frame above it is an unfinished write, and
its shard ends there.

Pass 4 first scans each shard (`ShardContents`): which topics it has frames of, and which were dropped in the end,
which are not replayed. Then frames are applied in windows, in WAL order. Records between two control frames of a topic
are added as columns, whatever frames they came in. Records stay in memory like live writes up to
`REPLAY_MEMORY_BYTES`; the rest stays in the WAL file, with an index of 20 bytes per record in memory.

After damage (`wal.LostRange`) the remaining frames are applied, with these rules for what the lost ones may have held:

  records           seqs jump over lost ones (`lost_ranges`); seqs that may have been assigned are never reused: a topic
                    without a later record skips as many as there can have been
  rest of a batch   dropped, unless the topic's seqs prove that it is the beginning of another one
  settings          replay does not apply caps until the topic's next settings: lost ones may have raised them
  reserved seqs     a topic of class `disk` without a later reservation skips the maximum of one reservation
  leases            ids skip as many as are reserved at a time
  a batch number    counts only with its records; records that lost their number stay
  a topic           a lost creation loses the name; a later change of its settings restores it
  routers, cursors  the last remaining frame counts: derived state is at most older
  a delete          is not applied, and its records are back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog.disk.interface import Disk, File, join
from tidelog.engine import blobs, compaction, delete, groups, idempotency, manifest
from tidelog.engine import groups as cursors
from tidelog.engine.blobs import BlobTable
from tidelog.engine.config import OWN, TopicConfig
from tidelog.engine.context import TOPICS_DIR, WAL_DIR, EngineContext, Removal, RemovalCause, topic_directory
from tidelog.engine.manifest import LoadedManifest, Manifest, Positions, TopicEntry, TopicRow
from tidelog.engine.queues.leases import QueueSnapshot
from tidelog.engine.queues.queue_state import LEASE_IDS_AHEAD
from tidelog.engine.results import READING_WAL, REPLAYING_TOPICS, Progress, RecoveryReport
from tidelog.engine.routing import manager
from tidelog.engine.segment import Segment, format_file_name
from tidelog.engine.segment_table import SegmentTable, StoredParts, StoredRows
from tidelog.engine.topic_index import GroupCursorState, Watermarks
from tidelog.engine.topic_state import RESERVATION_MAX, CompactionProgress, TopicState
from tidelog.engine.topic_table import IdleTotals
from tidelog.errors import Corrupt, Damaged, Unavailable
from tidelog.formats import control_frames, frame, large_record, scan, segment_index
from tidelog.formats.control_frames import Body
from tidelog.formats.frame import (
    CONFIG_UPDATE,
    HEAD_WATERMARK,
    LEASE,
    MORE,
    TOPIC_CREATE,
    TOPIC_DELETE,
    WRITE_KEY,
)
from tidelog.formats.rows import Rows
from tidelog.types import Ints
from tidelog.wal import (
    FrameWindow,
    GatheredRange,
    LostRange,
    Position,
    Replay,
    WalRange,
    file_path,
    paths,
    replay_shard,
)

REPLAY_MEMORY_BYTES: Final = 32 << 20
IDLE_TOPICS_MIN: Final = 1_000  # in a directory with fewer topics all are loaded, and leftovers of each are removed
_PIECE_BYTES: Final = 1 << 20  # of one piece of a memtable that stays in the WAL
_WAL_RANGE_BYTES_MIN: Final = 2048  # smaller runs stay in memory: a reference would cost as much
_CONFIG_KINDS: Final = (TOPIC_CREATE, CONFIG_UPDATE)


@dataclass(slots=True)
class TopicContents:
    """What a shard has of one topic. Places count the shard's losses before them."""

    created: bool = False
    is_dropped: bool = False
    first: int | None = None  # lowest seq of a record
    last: int = 0  # highest seq of a frame of records
    last_record: int = 0  # losses before the last frame of records
    last_reserved: int = 0  # losses before the last HeadWatermark

    @property
    def rank(self) -> int:
        """Order of shards that have frames of one topic: the one that created it, then by seqs."""
        return -1 if self.created else self.first or 0


@dataclass(slots=True)
class ShardContents:
    """What the frames of a shard are about, without applying them."""

    topics: dict[int, TopicContents] = field(default_factory=dict)
    frames: int = 0  # without checkpoint marks

    def add(self, window: FrameWindow) -> None:
        self.frames += int((window.headers["topic_id"] != 0).sum())
        for topic_id, numbers in _group_by_topic(window):
            if not topic_id:
                continue  # marks, and frames without a topic
            contents = self.topics.setdefault(topic_id, TopicContents())
            headers = window.headers[numbers]
            kinds = headers["kind"]
            contents.created = contents.created or bool((kinds == TOPIC_CREATE).any())
            contents.is_dropped = contents.is_dropped or bool((kinds == TOPIC_DELETE).any())
            if (kinds == HEAD_WATERMARK).any():
                contents.last_reserved = window.losses_before
            seqs = headers["seq"][frame.are_records(headers)]
            if len(seqs):
                first = int(seqs.min())
                contents.first = first if contents.first is None else min(contents.first, first)
                contents.last, contents.last_record = max(contents.last, int(seqs.max())), window.losses_before


class ShardRecovery(NamedTuple):
    key: str
    replay: Replay
    contents: ShardContents


@dataclass(slots=True)
class _DroppedTopic:
    """What a topic that was dropped in the end held, as far as known without replaying it."""

    topic_id: int
    first: int
    last: int
    records: int
    size: int
    name: str = ""
    ts_ms: int = 0

    @classmethod
    def from_state(cls, topic_id: int, topic: TopicState | None) -> _DroppedTopic:
        """What the manifest counts. Some of it may have been removed before."""
        if topic is None:
            return cls(topic_id, 1, 0, 0, 0)
        index = topic.index
        return cls(topic_id, index.earliest, index.head, index.count, index.bytes)

    def add(self, window: FrameWindow, numbers: Ints) -> None:
        """Add what was written after the manifest."""
        kinds = window.headers["kind"][numbers]
        for number in numbers[kinds == TOPIC_DELETE].tolist():
            body = _decode_control_frame(window, number)
            assert isinstance(body, control_frames.TopicDelete), "by its kind"
            self.name, self.ts_ms = body.name, int(window.headers["ts_ms"][number])
        written = numbers[frame.are_records(window.headers[numbers])]
        if not len(written):
            return
        rows = scan.decode_records(window.buf, window.frame_pos[written], window.headers[written])
        is_new = rows.seq > self.last
        if is_new.any():
            self.records, self.size = (
                self.records + int(is_new.sum()),
                self.size + int(rows.total_bytes()[is_new].sum()),
            )
            self.last = int(rows.seq.max())

    def to_removal(self) -> Removal:
        size = self.size
        return Removal(
            None, self.name, self.topic_id, "drop", self.first, self.last, self.records, size, self.ts_ms, "recovery"
        )


class _TopicFrames(NamedTuple):
    """Frames of one topic in a window, and the file they are in."""

    window: FrameWindow
    which: Ints
    path: str  # of the WAL file
    losses: Sequence[LostRange]  # of the shard


class TopicReplayer:
    """Pass 4: applies the frames of all shards to topics."""

    def __init__(
        self, context: EngineContext, topics: dict[int, TopicState], loaded: Manifest, report: RecoveryReport
    ) -> None:
        self._context, self._topics, self._report = context, topics, report
        self._first_new_topic_id = loaded.next_topic_id
        # A topic that was created during the checkpoint may have a row and a higher id.
        self.next_id = max([loaded.next_topic_id, *(topic_id + 1 for topic_id in topics)])
        # Topics that a checkpoint left out need more of the WAL than the others.
        self._lagging = set(loaded.lagging)
        self._fresh = {row.key: Position(row.first, row.pos) for row in loaded.fresh}
        self._memory_left = REPLAY_MEMORY_BYTES  # bytes for records
        self._file: File | None = None  # last opened for records that stay in it
        self._losses_before_record: dict[int, int] = {}  # topic → losses before its last record
        self._losses_before_config: dict[int, int] = {}  # topic → losses before its last settings

    def run(self, groups: Sequence[ShardRecovery], progress: Progress) -> None:
        shards_of: dict[int, list[int]] = {}  # topic → the shards with frames of it, in order
        for number, group in enumerate(groups):
            self._report.frames += group.contents.frames
            for topic_id in group.contents.topics:
                shards_of.setdefault(topic_id, []).append(number)
        contents = {
            topic_id: [groups[number].contents.topics[topic_id] for number in numbers]
            for topic_id, numbers in shards_of.items()
        }
        for topic_id, numbers in shards_of.items():
            # A topic whose shard changed has frames in several shards: seqs decide which came first.
            numbers.sort(key=lambda number: groups[number].contents.topics[topic_id].rank)
        dropped = {
            topic_id: _DroppedTopic.from_state(topic_id, self._topics.get(topic_id))
            for topic_id, each in contents.items()
            if any(topic_contents.is_dropped for topic_contents in each)
        }
        self._mark_dropped(dropped)
        turns = [
            (turn, number)
            for turn in range(max(map(len, shards_of.values()), default=0))
            for number in range(len(groups))
        ]
        done, total = 0, sum(group.contents.frames for group in groups)
        for turn, number in turns:
            topic_ids = {topic_id for topic_id, numbers in shards_of.items() if numbers[turn : turn + 1] == [number]}
            if topic_ids:
                for frames in self._replay_shard(groups[number], topic_ids, dropped):
                    done += frames
                    progress(REPLAYING_TOPICS, done, total)
        self._file = None
        for group in groups:
            group.replay.drop_cached_windows()
        self._reserve_lost_seqs(groups, shards_of)
        for topic_id, each in dropped.items():
            if topic_id in self._topics or topic_id >= self._first_new_topic_id:
                self._context.removals.add_removal(each.to_removal())
        lost_creations = sum(
            lost.frames for group in groups for lost in group.replay.losses if lost.may_contain(TOPIC_CREATE)
        )
        self.next_id = max([self.next_id, *(topic_id + 1 for topic_id in shards_of)]) + lost_creations

    def _frames_after_manifest(self, key: str, window: FrameWindow, topic_id: int, numbers: Ints) -> Ints:
        """Return the frames of a topic that the manifest does not cover."""
        start = self._fresh.get(key)
        if start is None or window.file_number > start.file_number or topic_id in self._lagging:
            return numbers
        return (
            numbers[window.frame_pos[numbers] + window.file_offset >= start.pos]
            if window.file_number == start.file_number
            else numbers[:0]
        )

    def _mark_dropped(self, dropped: dict[int, _DroppedTopic]) -> None:
        """Mark topics that were dropped in the end, which are not replayed: their files may be gone."""
        for topic_id in dropped:
            topic = self._topics.get(topic_id)
            if topic is not None:
                topic.is_dropped = True
                topic.quota.release(topic.index.bytes)

    def _replay_shard(
        self, group: ShardRecovery, topic_ids: set[int], dropped: dict[int, _DroppedTopic]
    ) -> Iterator[int]:
        """Apply the frames of these topics; yields the number of frames for each topic of each window."""
        for window in group.replay.windows():
            path = file_path(group.replay.directory, window.file_number)
            for topic_id, numbers in _group_by_topic(window):
                if topic_id not in topic_ids:
                    continue
                needed = self._frames_after_manifest(group.key, window, topic_id, numbers)
                if len(needed) and topic_id in dropped:
                    dropped[topic_id].add(window, needed)
                elif len(needed):
                    run = _TopicFrames(window, needed, path, group.replay.losses)
                    for apply in self._plan_events(topic_id, run):
                        apply()
                yield len(numbers)

    def _reserve_lost_seqs(self, groups: Sequence[ShardRecovery], shards_of: dict[int, list[int]]) -> None:
        """Reserve the seqs and lease ids that lost frames may have assigned."""
        for number, group in enumerate(groups):
            losses = group.replay.losses
            if not losses:
                continue
            for topic in self._topics.values():
                if topic.is_dropped or number not in shards_of.get(topic.id, [number]):
                    continue
                contents = group.contents.topics.get(topic.id, TopicContents())
                lost_max = sum(lost.records for lost in losses[contents.last_record :])
                if topic.config.durability == "disk" and any(
                    lost.may_contain(HEAD_WATERMARK) for lost in losses[contents.last_reserved :]
                ):
                    lost_max += RESERVATION_MAX
                if lost_max:
                    topic.reservation.raise_to(max(topic.index.head, contents.last) + lost_max)
                if topic.queue_snapshot is not None and any(lost.may_contain(LEASE) for lost in losses):
                    topic.queue_snapshot.lease_id += LEASE_IDS_AHEAD
                self._note_config_loss(topic, losses, len(losses))
                if topic.recovery.is_config_uncertain:
                    self._report.damage.append(
                        f"{topic.name}: a change of its settings may be lost; look at them before the next write"
                    )

    def _note_config_loss(self, topic: TopicState, losses: Sequence[LostRange], before: int) -> None:
        """Record whether a config change may be lost since the last one that was replayed."""
        later = losses[self._losses_before_config.get(topic.id, 0) : before]
        topic.recovery.is_config_uncertain = topic.recovery.is_config_uncertain or any(
            lost.may_contain(*_CONFIG_KINDS) for lost in later
        )

    def _plan_events(self, topic_id: int, run: _TopicFrames) -> Iterator[Callable[[], None]]:
        """Yield the steps that apply the frames of a topic, in order; records between two control frames are one
        step."""
        window, numbers = run.window, run.which
        topic = self._topic_for(topic_id, _decode_control_frame(window, int(numbers[0])))
        if topic is None:
            return
        if window.losses_before:
            self._note_config_loss(topic, run.losses, window.losses_before)
        kinds = window.headers["kind"][numbers]
        is_key = kinds == WRITE_KEY
        is_record = frame.are_records(window.headers[numbers]) | is_key  # keyed writes are one run
        edges = (np.flatnonzero(is_record[1:] != is_record[:-1]) + 1).tolist()
        for lo, hi in pairwise([0, *edges, len(kinds)]):
            if is_record[lo]:
                if is_key[lo:hi].any():
                    yield partial(self._restore_keys, topic, window, numbers[lo:hi], is_key[lo:hi])
                if not is_key[lo:hi].all():
                    yield partial(self._append_records, topic, run._replace(which=numbers[lo:hi][~is_key[lo:hi]]))
                continue
            for place, number in enumerate(numbers[lo:hi].tolist(), lo):
                body = _decode_control_frame(window, number)
                announced = _announced_seq(body)
                if announced and not _records_follow(window, numbers[place + 1 :], announced):
                    continue  # a torn write: its records are missing
                if isinstance(body, control_frames.TopicCreate | control_frames.ConfigUpdate):
                    self._losses_before_config[topic.id], topic.recovery.is_config_uncertain = (
                        window.losses_before,
                        False,
                    )
                header = window.headers[number]
                seq = int(header["seq"])
                if isinstance(body, control_frames.ConfigUpdate) and not seq:  # format of earlier builds
                    seq = _seq_before_next(window, numbers[place + 1 :])
                yield partial(_apply_control_frame, topic, body, seq, int(header["ts_ms"]))

    def _topic_for(self, topic_id: int, body: control_frames.Body | None) -> TopicState | None:
        """Return the topic of a frame; None if it was dropped before the manifest was saved."""
        topic = self._topics.get(topic_id)
        if topic is None and topic_id >= self._first_new_topic_id:
            if isinstance(body, control_frames.TopicCreate):
                topic = TopicState(self._context, topic_id, body.name, TopicConfig.from_json(body.config))
            else:
                name = provisional_name(topic_id)
                topic = TopicState(self._context, topic_id, name, TopicConfig())
                self._report.damage.append(f"topic {topic_id}: its creation is lost; it is served as {name}")
            self._topics[topic_id] = topic
        return topic

    def _restore_keys(self, topic: TopicState, window: FrameWindow, numbers: Ints, is_key: NDArray[np.bool_]) -> None:
        """Restore idempotency keys of a run of records: a key counts if its records follow it, complete, in the same
        window."""
        places = np.flatnonzero(is_key)
        places = places[places + 1 < len(numbers)]
        seqs, times = window.headers["seq"][numbers], window.headers["ts_ms"][numbers]
        keys = []
        for place in places[~is_key[places + 1]].tolist():
            body = _decode_control_frame(window, int(numbers[place]))
            assert isinstance(body, control_frames.WriteKey), "by its kind"
            if int(seqs[place + 1]) == body.first:
                keys.append((body.key, body.first, body.last, int(times[place])))
        idempotency.restore_keys(topic.producers.keys, keys, self._context.clock)

    def _append_records(self, topic: TopicState, run: _TopicFrames) -> None:
        """Add the records of one topic that the manifest does not hold."""
        if topic.is_dropped:
            return
        index, limits, window = topic.index, topic.context.limits, run.window
        numbers = self._trusted_frames(topic, run)
        if not len(numbers):
            return
        starts_at, headers = window.frame_pos[numbers], window.headers[numbers]
        rows = scan.decode_records(window.buf, starts_at, headers)
        starts = rows.frame_pos.searchsorted(starts_at)
        counts = np.empty(len(starts_at), np.int64)
        counts[:-1], counts[-1] = starts[1:] - starts[:-1], len(rows) - starts[-1]
        first = headers["seq"].astype(np.int64)
        new = np.flatnonzero(first + counts - 1 > index.head)
        if (
            window.losses_before > self._losses_before_record.get(topic.id, 0)
            and len(new)
            and int(first[new[0]]) > index.head + 1
        ):
            topic.recovery.lost_ranges.append((index.head + 1, int(first[new[0]]) - 1))
        self._losses_before_record[topic.id] = window.losses_before
        if not len(new):
            return
        skip = int(new[0])  # seqs ascend, so known records come first
        if rows.blob_bytes is not None:
            _add_blobs(topic, rows.slice(int(starts[skip]), len(rows)))
        weights = np.zeros(len(rows) + 1, np.int64)
        rows.total_bytes().cumsum(out=weights[1:])
        ends = starts_at + headers["frame_len"].astype(np.int64) + 4
        ends_batch = (headers["flags"] & MORE) == 0  # last frame of a batch
        jumps_after = np.ones(len(starts_at), np.bool_)
        jumps_after[:-1] = first[1:] != first[:-1] + counts[:-1]
        records, spent = counts.cumsum(), (ends - starts_at).cumsum()
        jumps, lasts = np.flatnonzero(jumps_after), np.flatnonzero(ends_batch)
        lo = skip
        while lo < len(starts_at):
            memtable = index.open_memtable(int(first[lo]), persistent=True)
            before = int(records[lo] - counts[lo]), int(spent[lo] - (ends[lo] - starts_at[lo]))
            records_left = limits.segment_events_max - (memtable.stop - memtable.segment)
            bytes_left = limits.segment_bytes_max - (memtable.origin + memtable.size)
            # Both ascend, so the frame that fills the segment is found by binary search.
            full_at = min(
                int(records.searchsorted(before[0] + records_left)), int(spent.searchsorted(before[1] + bytes_left))
            )
            stops = (jumps[jumps.searchsorted(lo) :][:1], lasts[lasts.searchsorted(max(full_at, lo)) :][:1])
            hi = int(np.concatenate(stops).min()) + 1  # the last frame counts as a jump
            row_lo, row_hi = int(starts[lo]), int(starts[hi]) if hi < len(starts_at) else len(rows)
            weight = int(weights[row_hi] - weights[row_lo])
            topic.quota.acquire_unchecked(weight)
            times = int(headers["ts_ms"][lo]), int(headers["ts_ms"][hi - 1])
            size = int(spent[hi - 1]) - before[1]
            if size <= self._memory_left or size < _WAL_RANGE_BYTES_MIN:
                self._memory_left -= size
                frames = _copy_frames(window.buf, starts_at[lo:hi], ends[lo:hi])
                count = row_hi - row_lo
                index.publish(int(first[lo]), frames, count, weight, times[0], persistent=True, last_ts=times[1])
            else:
                sizes = ends[lo:hi] - starts_at[lo:hi]
                entries = _build_index(
                    rows.slice(row_lo, row_hi), memtable.origin + memtable.size, sizes, counts[lo:hi]
                )
                pieces = _wal_ranges(self._open_file(run.path), starts_at[lo:hi] + window.file_offset, sizes)
                index.publish_indexed(int(first[lo]), pieces, entries, row_hi - row_lo, weight, *times)
            if hi > full_at:
                index.roll_segment()
            topic.enforce_caps()
            lo = hi

    def _trusted_frames(self, topic: TopicState, run: _TopicFrames) -> Ints:
        """Return its frames without those that may be the rest of a batch that lost its beginning. A batch that follows
        the topic's head is complete: nothing of this topic was lost before it."""
        window, numbers = run.window, run.which
        doubtful = numbers[numbers < window.doubtful]
        if not len(doubtful) or int(window.headers["seq"][doubtful[0]]) <= topic.index.head + 1:
            return numbers
        rows = scan.decode_records(window.buf, window.frame_pos[doubtful], window.headers[doubtful])
        first, last = int(rows.seq[0]), int(rows.seq[-1])
        topic.reservation.raise_to(last)
        topic.damage.append(f"{topic.name}: seqs {first} to {last} may be the rest of a batch that is lost; not served")
        return numbers[len(doubtful) :]

    def _open_file(self, path: str) -> File:
        if self._file is None or self._file.path != path:
            self._file = self._context.disk.open(path)
        return self._file


def _add_blobs(topic: TopicState, rows: Rows) -> None:
    """Add the blobs of replayed records to the table of their topic."""
    assert rows.blob_bytes is not None, "there are large records"
    for place in np.flatnonzero(rows.blob_bytes).tolist():
        topic.blobs.add(int(rows.seq[place]), large_record.read_ref(rows.buf, int(rows.frame_pos[place])).blob_id)


def _report_missing_blobs(topic: TopicState, report: RecoveryReport) -> None:
    for blob in blobs.find_missing(topic):
        reason = f"the data of record {blob.seq} is missing; other records are served"
        topic.add_damage(f"{blob.path}: {reason}")
        report.damage.append(f"{topic.name}: {blob.path}: {reason}")
        topic.report_corruption(blob.path, reason)


def provisional_name(topic_id: int) -> str:
    """The name of a topic whose own is lost."""
    return f"recovered-{topic_id:08X}"


def _decode_control_frame(window: FrameWindow, number: int) -> Body | None:
    """Decode a control frame; None for records."""
    parsed = frame.read_frame(window.buf, int(window.frame_pos[number]), len(window.buf), check=False)
    assert isinstance(parsed, frame.Frame), "replay yields valid frames only"
    if frame.is_record(parsed.kind):
        return None
    return control_frames.decode(parsed.kind, memoryview(window.buf)[parsed.data_pos : parsed.data_end])


def _build_index(rows: Rows, origin: int, sizes: Ints, counts: Ints) -> bytes:
    """Build the index of records whose frames, of these sizes, are adjacent from `origin` on."""
    entries = segment_index.build_entries(rows, int(rows.seq[0]), int(rows.seq[-1]) + 1, frame.U32_MAX)
    entries["frame_offset"] = np.repeat(origin + sizes.cumsum() - sizes, counts)
    return entries.tobytes()


def _wal_ranges(file: File, starts: Ints, sizes: Ints) -> list[WalRange]:
    """Return frames of a file as pieces of about `_PIECE_BYTES`."""
    pieces: list[WalRange] = []
    edges = np.flatnonzero(np.diff(sizes.cumsum() // _PIECE_BYTES)) + 1
    for lo, hi in pairwise([0, *edges.tolist(), len(starts)]):
        piece_starts, piece_sizes = starts[lo:hi], sizes[lo:hi]
        total = int(piece_sizes.sum())
        if int(piece_starts[-1] + piece_sizes[-1] - piece_starts[0]) == total:
            pieces.append(WalRange(file, int(piece_starts[0]), total))
        else:
            pieces.append(GatheredRange.from_frames(file, piece_starts.copy(), piece_sizes))
    return pieces


def _apply_control_frame(topic: TopicState, body: Body | None, seq: int, ts_ms: int) -> None:
    if topic.is_dropped:
        return
    match body:
        case control_frames.TopicCreate() | control_frames.ConfigUpdate():
            config = TopicConfig.from_json(body.config)
            if topic.name == provisional_name(topic.id):
                topic.name = body.name
            if (config.durability == "ephemeral") != topic.is_ephemeral:
                topic.index.roll_segment()
            topic.config = config
            topic.enforce_caps(seq)  # for the records up to then: the snapshot may hold later ones
        case control_frames.Delete():
            try:
                delete.replay_delete(topic, body, seq, ts_ms)
            except Corrupt as error:
                topic.damage.append(f"{topic.name}: a delete could not be replayed: {error}")
        case control_frames.Compaction():
            try:
                compaction.replay_compaction(topic, body, seq, ts_ms)
            except Corrupt as error:
                topic.damage.append(f"{topic.name}: a compaction could not be replayed: {error}")
        case control_frames.EvictWatermark():
            _apply_floor(topic, body)
        case control_frames.Lease():
            topic.queue_snapshot = topic.queue_snapshot or QueueSnapshot()
            topic.queue_snapshot.apply(seq, body)
        case control_frames.HeadWatermark():
            topic.reservation.raise_to(body.head_seq)
        case control_frames.GroupCursor():
            groups.apply_cursor(topic, body, ts_ms)
        case control_frames.NumberedBatch():
            idempotency.record_batch(topic.producers.batches, body)
        case control_frames.RouterCreate() | control_frames.RouterDelete() | control_frames.Forward():
            manager.replay_router_frame(topic, body, seq)
        case _:
            pass  # frames without effect on topics


def _announced_seq(body: Body | None) -> int:
    """Return the first seq of the records that must follow a frame for it to count; 0 if none must."""
    match body:
        case control_frames.NumberedBatch():
            return body.first
        case control_frames.Forward(event=control_frames.ForwardEvent.COPIED):
            return body.dest_head - body.total + 1
        case _:
            return 0


def _records_follow(window: FrameWindow, rest: Ints, first: int) -> bool:
    """Whether the records from `first` on are there. They are one chain, complete or absent, in the same window."""
    header = window.headers[rest[0]] if len(rest) else None
    return header is not None and frame.is_record(int(header["kind"])) and int(header["seq"]) == first


def _seq_before_next(window: FrameWindow, rest: Ints) -> int:
    """Return the seq before the next record of a topic; 0 if the window has none."""
    next_record = rest[frame.are_records(window.headers[rest])][:1]
    return int(window.headers["seq"][next_record[0]]) - 1 if len(next_record) else 0


def _group_by_topic(window: FrameWindow) -> Iterator[tuple[int, Ints]]:
    """Yield each topic id with the numbers of its frames."""
    ids = window.headers["topic_id"]
    if not len(ids):
        return
    order = np.argsort(ids, kind="stable")
    edges = (np.flatnonzero(np.diff(ids[order])) + 1).tolist()
    for lo, hi in pairwise([0, *edges, len(order)]):
        yield int(ids[order[lo]]), order[lo:hi]


def _apply_floor(topic: TopicState, body: control_frames.EvictWatermark) -> None:
    """Apply a logged floor. Records lost with the tail are padded later (`_finish_topic`)."""
    index, known = topic.index, topic.recovery.watermarks
    ttl, cap = body.expiry_floor - 1, body.evict_floor - 1 if body.evict_floor > body.expiry_floor else 0
    topic.recovery.watermarks = Watermarks(max(known.cap, cap), max(known.ttl, ttl), known.source)
    marks: tuple[tuple[RemovalCause, int], ...] = (("ttl", ttl), ("cap", cap))
    for cause, mark in marks:
        topic.evict(min(mark + 1, index.head + 1), cause)


def _copy_frames(buf: bytes, begins: Ints, ends: Ints) -> list[bytes]:
    """Copy the bytes of these frames: one piece for each run of adjacent frames."""
    is_apart = begins[1:] != ends[:-1]
    if not is_apart.any():
        return [buf[int(begins[0]) : int(ends[-1])]]
    starts, stops = [int(begins[0]), *begins[1:][is_apart].tolist()], [*ends[:-1][is_apart].tolist(), int(ends[-1])]
    return [buf[lo:hi] for lo, hi in zip(starts, stops, strict=True)]


class MissingBytes(NamedTuple):
    """Bytes of a segment that the manifest names and the disk does not have."""

    topic: TopicState
    where: str
    reason: str


class RecoveredTopics(NamedTuple):
    topics: dict[str, TopicState]
    idle: dict[str, TopicEntry]  # by name: not loaded, because there is nothing to recover
    idle_totals: IdleTotals
    next_topic_id: int
    groups: list[ShardRecovery]
    loaded: LoadedManifest
    has_truncated_source: bool  # a router's source ends before its cursor


def recover(
    context: EngineContext,
    report: RecoveryReport,
    progress: Progress,
    *,
    writable: bool,
    stored: StoredRows | None = None,
) -> RecoveredTopics:
    """Run passes 1 to 5. With `stored`, segments stay columns until they are used, and their files are not checked."""
    loaded = manifest.load_newest(context.disk, context.root)
    report.snapshot, report.snapshots_skipped = loaded.number, loaded.skipped
    missing: list[MissingBytes] = []
    tables: dict[int, SegmentTable] = {}
    groups: list[ShardRecovery] | None = None
    idle: dict[str, TopicEntry] = {}
    totals = IdleTotals()
    has_idle = stored is None and len(loaded.topics) >= IDLE_TOPICS_MIN and not loaded.faults
    if stored is not None:
        rows = stored.decode(loaded.topics.values(), loaded.positions)
        tables = {row.id: table for row, table in rows}
        entries = (loaded.topics[row.id] for row, _ in rows)
        used = manifest.join_manifest((row for row, _ in rows), entries, loaded.positions)
    elif has_idle:
        groups = _read_shards(context, loaded, report, progress)
        idle, totals, used = _find_idle_topics(context, loaded, groups, writable=writable)
    else:
        # Before the WAL is read: a writer beside this engine may drop a topic and remove its files meanwhile.
        used = loaded.manifest
    topics_by_id = {row.id: _restore_topic(context, row, missing, tables.get(row.id)) for row in used.topics}
    if has_idle and missing and not writable:
        _check_not_dropped(context, loaded, _dropped_topics(groups or ()), missing)
    groups = groups or _read_shards(context, loaded, report, progress)
    manager.restore_from_manifest(topics_by_id, used)
    replayed = TopicReplayer(context, topics_by_id, used, report)
    context.is_replaying = context.removals.is_recovering = True
    replayed.run(groups, progress)
    context.is_replaying = False
    topics: dict[str, TopicState] = {}
    for topic in sorted(topics_by_id.values(), key=lambda topic: topic.id):
        if topic.is_dropped:
            context.health.forget_topic(topic.id)
            continue
        if topic.name in topics:
            report.damage.append(f"two topics are called {topic.name!r}: the older one is not served")
        topics[topic.name] = topic
        report.damage += topic.damage
        if topic.recovery.lost_ranges:
            report.lost_seqs[topic.name] = topic.recovery.lost_ranges
        _finish_topic(topic, report, writable=writable)
        context.blob_ids.skip(topic.blobs.last_id, topic.index.last_ts)
        _report_missing_blobs(topic, report)
    for place in missing:
        if not place.topic.is_dropped:  # a drop removes files before the next manifest
            place.topic.report_corruption(place.where, place.reason)
    has_truncated_source = manager.link_forwarders(topics_by_id, report, writable=writable)
    report.topics = len(topics) + len(idle)
    context.dirty_topics |= _find_changed(topics, groups, loaded, report)
    next_id = max([replayed.next_id, *(entry.id + 1 for entry in idle.values())])
    return RecoveredTopics(topics, idle, totals, next_id, groups, loaded, has_truncated_source)


def _find_changed(
    topics: dict[str, TopicState], groups: Sequence[ShardRecovery], loaded: LoadedManifest, report: RecoveryReport
) -> set[TopicState]:
    """Return the topics whose rows may not be what the manifest has, besides those that lost records to a cap or to
    age."""
    if loaded.faults or report.damage or any(group.replay.losses for group in groups):
        return set(topics.values())
    replayed = {topic_id for group in groups for topic_id in group.contents.topics}
    return {
        topic
        for topic in topics.values()
        if topic.id in replayed
        or topic.name in report.padded
        or topic.id not in loaded.topics
        or (topic.is_ephemeral and topic.index.head)  # its records are gone
        or (report.frames and (topic.upstream is not None or topic.downstream))
    }


# ── topics that nothing was written to ─────────────────────────────────────────────────────────────


def _find_idle_topics(
    context: EngineContext, loaded: LoadedManifest, groups: Sequence[ShardRecovery], *, writable: bool
) -> tuple[dict[str, TopicEntry], IdleTotals, Manifest]:
    """Return the topics that need no recovery, by name, their totals, and the manifest of the others. A writer checks
    the files of both; a reader finds what a writer beside it has changed when it loads a topic."""
    entries = loaded.topics
    if any(group.replay.losses or group.replay.missing_file for group in groups):
        return {}, IdleTotals(), loaded.manifest  # any topic may have lost something
    needed = {topic_id for group in groups for topic_id in group.contents.topics}
    needed |= {*loaded.positions.lagging}
    # Files of the manifest before must not be removed on first use.
    needed |= {topic_id for topic_id, before in loaded.replaced.items() if before is not None}
    needed |= {router.source_id for entry in entries.values() for router in entry.routers}
    names: dict[str, int] = {}
    idle: dict[str, TopicEntry] = {}
    totals = IdleTotals()
    due: list[tuple[int, int, str]] = []
    for entry in entries.values():
        if names.setdefault(entry.name, entry.id) != entry.id:
            return {}, IdleTotals(), loaded.manifest  # two topics of one name: reported by the ordinary way
        if entry.id in needed or entry.records < 0 or entry.routers or entry.name.startswith(OWN):
            continue
        row = entry.decode()
        config = TopicConfig.from_json(row.config)
        is_reserved = row.reserved > row.head and entry.number > loaded.positions.closed
        is_leased = row.queue is not None and bool(row.queue.leases or row.queue.delayed)
        has_work = is_reserved or is_leased or bool(row.consumers) or bool(row.blobs) or config.compaction is not None
        is_plain = not has_work and config.durability != "ephemeral"
        if is_plain and not (writable and (_has_dead_bytes(row) or not _has_exact_files(context, row))):
            idle[entry.name] = entry
            totals.add(entry, row, config)
            due_ms = _idle_due_ms(context.limits.segment_age_ms_max, config.ttl_ms, row)
            due += [] if due_ms is None else [(due_ms, row.id, row.name)]
    if writable:
        context.schedule.schedule_idle(due)
    context.quota.acquire_unchecked(sum(entry.size for entry in idle.values()))
    used = (entry for entry in entries.values() if entry.name not in idle)
    return idle, totals, manifest.build_manifest(used, loaded.positions)


def _has_exact_files(context: EngineContext, row: TopicRow) -> bool:
    """Whether the data files of a topic are as long as the manifest says, and there are none of segments in the cold
    tier, for those are removed. A lost index is rebuilt on first use."""
    directory, stat_file = topic_directory(context.root, row.id), context.disk.stat
    for segment in row.segments:
        stat = stat_file(join(directory, format_file_name(segment.base, segment.generation, ".data")))
        if segment.cold is not None and segment.cold.key:
            is_exact = stat is None
        else:
            is_exact = stat is not None and stat.size == segment.size
        if not is_exact or segment.unproven:
            return False
    return True


def _idle_due_ms(segment_age_ms: int, ttl_ms: int, row: TopicRow) -> int | None:
    """Return when an idle topic has records to expire or a segment to seal, at the earliest; None: never."""
    due: list[int] = []
    if row.segments and segment_age_ms and not row.segments[-1].sealed:
        due.append(row.segments[-1].first_ts + segment_age_ms)
    if row.segments and ttl_ms:
        due.append(row.segments[0].first_ts + ttl_ms + 1)
    return min(due, default=None)


def load_idle_topic(
    context: EngineContext, entry: TopicEntry, positions: Positions, report: RecoveryReport, *, writable: bool
) -> tuple[TopicState, list[MissingBytes]]:
    """Load a topic that an open left idle; `report_missing` what its files lack."""
    row = manifest.decode_row(entry, positions)
    missing: list[MissingBytes] = []
    context.quota.release(entry.size)
    topic = _restore_topic(context, row, missing)
    topic.applied_router_frame = topic.staged_router_frame = row.wired
    _finish_topic(topic, report, writable=writable)
    return topic, missing


def report_missing(topic: TopicState, missing: Sequence[MissingBytes], report: RecoveryReport) -> None:
    """Report the damage of a topic that was loaded on its first use."""
    report.damage += topic.damage
    for place in missing:
        topic.report_corruption(place.where, place.reason)


def _dropped_topics(groups: Sequence[ShardRecovery]) -> set[int]:
    return {topic_id for group in groups for topic_id, each in group.contents.topics.items() if each.is_dropped}


def _check_not_dropped(
    context: EngineContext, loaded: LoadedManifest, known: set[int], missing: Sequence[MissingBytes]
) -> None:
    """For a reader that has read the WAL before the files: raise Unavailable if a writer has dropped a topic with files
    that are missing, besides the known ones, so that the open starts over."""
    unexplained = {place.topic.id for place in missing} - known
    if unexplained & _dropped_topics(_read_shards(context, loaded, RecoveryReport(), lambda *_: None)):
        raise Unavailable(f"{context.root}: a topic was dropped while it was read; nothing was changed, try again")


# ── 2  topics and their segments ──────────────────────────────────────────────────────────────────


def _restore_topic(
    context: EngineContext, row: TopicRow, missing: list[MissingBytes], table: SegmentTable | None = None
) -> TopicState:
    """Restore a topic from its manifest row. `table` has its segments if the row does not."""
    topic = TopicState(context, row.id, row.name, TopicConfig.from_json(row.config))
    index, files = topic.index, context.segment_files(row.id)
    if table is not None:
        index.parts = StoredParts(table, files, index.on_recounted)
    for segment in row.segments:
        part = Segment.from_row(files, segment)
        index.parts.append(part)
        problems = _check_segment_files(context.disk, part)
        if segment.unproven and not problems:
            problems = [f"{part.path('.data')} was sealed without a footer: not all of its frames verify"]
        missing += [MissingBytes(topic, part.path(".data"), problem) for problem in problems]
        topic.damage += problems
    index.head, index.earliest, index.last_ts = row.head, row.earliest, row.last_ts
    index.watermarks = Watermarks(row.cap_mark, row.ttl_mark, row.source_mark)
    topic.durable_floor = index.evict_floor
    topic.durable_seq = row.head
    index.deleted_ranges, index.trimmed_ranges = list(row.ghosts), list(row.trims)
    topic.reservation.reserved_seq, topic.delete_count = row.reserved, row.removals
    topic.groups = {group.group: GroupCursorState(group.seq, group.ts_ms, group.hold_bytes) for group in row.consumers}
    topic.had_retention_hold = topic.persists_floors = row.guarded
    topic.compaction = None if row.compaction is None else CompactionProgress(*row.compaction)
    topic.producers.batches = idempotency.decode_producers(row.writers)
    topic.blobs = BlobTable.from_row(row.blobs)
    idempotency.restore_keys(topic.producers.keys, row.keys, context.clock)
    topic.queue_snapshot = None if row.queue is None else QueueSnapshot(row.queue)
    topic.restored_epoch = row.epoch
    try:
        for each in index.parts if table is None else ():
            if isinstance(each, Segment):
                each.recount_live()
        index.count, index.bytes = index.measure(index.earliest, index.head + 1)
        index.skip_deleted()  # an ephemeral topic lost its records and keeps its head
    except Corrupt as error:
        topic.damage.append(f"{row.name}: {error}; its counts are those of the parts that read")
        if table is not None:
            raise
        live = [part for part in index.parts if part.stop > index.earliest]
        index.count, index.bytes = sum(part.live_records for part in live), sum(part.live_bytes for part in live)
    topic.quota.acquire_unchecked(index.bytes)
    if _has_dead_bytes(row):
        context.topics_to_rewrite.add(topic)
    return topic


def _has_dead_bytes(row: TopicRow) -> bool:
    """Whether sealed segments hold deleted records that no rewrite has removed."""
    return any(
        segment.sealed and segment.stop - segment.base - segment.live > segment.removed for segment in row.segments
    )


def _check_segment_files(disk: Disk, part: Segment) -> list[str]:
    """Check the file sizes of a segment and return what is missing. A lost index is rebuilt from the data."""
    data, index = (disk.stat(part.path(suffix)) for suffix in (".data", ".idx"))
    if part.has_cold_copy and (data is None or data.size < part.size):
        return []  # it is in the cold tier, for which a start does not wait; an index that is lost shows in the counts
    path = part.path(".data")
    if data is None or data.size < part.size:
        return [f"{path} has {data.size if data else 0} bytes, the manifest says {part.size}"]
    if index is None or index.size < (part.stop - part.base) * segment_index.ENTRY_BYTES:
        part.rebuild_index()
    return []


def _finish_topic(topic: TopicState, report: RecoveryReport, *, writable: bool) -> None:
    """Pass 5: reserved seqs become holes, logged floors are applied."""
    index, reservation = topic.index, topic.reservation
    if writable and reservation.reserved_seq > index.head:
        report.padded[topic.name] = reservation.reserved_seq - index.head
        index.reserve_up_to(reservation.reserved_seq)
    floors: tuple[tuple[RemovalCause, int], ...] = (
        ("ttl", topic.recovery.watermarks.ttl),
        ("cap", topic.recovery.watermarks.cap),
    )
    for cause, floor in floors:
        topic.evict(min(floor + 1, index.head + 1), cause)
    # The floor from the manifest and frames, not the one derived from records: the next replay may derive another one,
    # from the cursors of a group or from deletion vectors that are newer than its start.
    topic.durable_floor = max(topic.durable_floor, min(topic.recovery.watermarks.evict_floor, index.head + 1))
    if not topic.recovery.is_config_uncertain:
        topic.enforce_caps()
    topic.last_assigned_seq = topic.recovery.head = topic.history_seq = index.head
    topic.last_write_ms = index.last_ts or None
    reservation.reserving_seq = reservation.reserved_seq
    cursors.clamp_cursors(topic)


# ── 3  WAL shards ──────────────────────────────────────────────────────────────────────


def replay_start(loaded: LoadedManifest, key: str) -> Position | None:
    """Return where the manifest starts replay of a shard; None: it does not know the shard."""
    return next((Position(row.first, row.pos) for row in loaded.positions.groups if row.key == key), None)


def first_file_number(loaded: LoadedManifest, groups: Sequence[ShardRecovery], key: str) -> int:
    """Return the number of the first file of a shard without files.

    Shards of the first shard count start at 1 and no others do: without a manifest, this shows whether something is
    missing that only a manifest knew. As long as no shard had a frame this is the beginning: their empty files were
    removed.
    """
    start = replay_start(loaded, key)
    if start is not None:
        return start.file_number  # a file with frames would be known as missing
    if loaded.number:
        return 2
    if all(group.replay.next_file_number == 1 for group in groups):
        return 1
    first_keys = {group.key for group in groups if group.replay.file_numbers[:1] == [1]}
    return 1 if key in _first_shard_layout(first_keys) else 2


def _first_shard_layout(first_keys: set[str]) -> list[str]:
    """Return the shards of the first shard count, of which these are some; the others were removed without frames,
    lowest first."""
    if paths.SINGLE_SHARD_KEY in first_keys:
        return [paths.SINGLE_SHARD_KEY]
    return paths.shard_keys(100)[: max(int(key.removeprefix("shard-")) for key in first_keys) + 1]


def _has_whole_wal(keys: Sequence[str], first_numbers: dict[str, int]) -> bool:
    """Whether the shards, by the numbers of their first files, are complete from the first frame on: those of the first
    shard count start at 1 and are removed lowest first. A shard without files has no frame."""
    first_keys = {key for key, number in first_numbers.items() if number == 1}
    if max(first_numbers.values(), default=1) > 2 or not first_keys:
        return False
    first_layout = _first_shard_layout(first_keys)
    return first_keys <= {*first_layout} and all(
        key in first_keys or (key in keys and key not in first_numbers) for key in first_layout
    )


def _read_shards(
    context: EngineContext, loaded: LoadedManifest, report: RecoveryReport, progress: Progress
) -> list[ShardRecovery]:
    wal = join(context.root, WAL_DIR)
    keys = paths.list_shard_keys(context.disk, wal)
    first_numbers = {
        key: number for key in keys if (number := _oldest_file_number(context.disk, paths.shard_directory(wal, key)))
    }
    keys += [row.key for row in loaded.positions.groups if row.pos and row.key not in keys]  # all its files are gone
    topics = join(context.root, TOPICS_DIR)
    is_used = (
        first_numbers or loaded.skipped or (context.disk.stat(topics) is not None and context.disk.list_dir(topics))
    )
    if not loaded.number and is_used and not _has_whole_wal(keys, first_numbers):
        raise Damaged(
            f"{context.root}: no snapshot reads and the WAL does not go back to the beginning; nothing was changed, "
            f"restore {manifest.MANIFEST_DIR}/ from a copy"
        )
    groups = []
    for number, key in enumerate(keys):
        directory = paths.shard_directory(wal, key)
        unknown = Position(2 if first_numbers.get(key) == 2 else 1, 0)  # none of its files can have been removed
        start = replay_start(loaded, key) or unknown
        replay, contents = replay_shard(context.disk, directory, start), ShardContents()
        for window in replay:
            contents.add(window)
        progress(READING_WAL, number + 1, len(keys))
        _report_shard(report, key or WAL_DIR, replay)
        groups.append(ShardRecovery(key, replay, contents))
    for group in groups:
        begin, missing = replay_start(loaded, group.key), group.replay.missing_file
        is_reported = missing is not None and begin is not None and missing.file_number == begin.file_number
        if begin is None or not begin.pos or begin.file_number in group.replay.file_numbers or is_reported:
            continue
        report.damage.append(
            f"{group.key or WAL_DIR}/{paths.file_name(begin.file_number)} is missing, replay begins in it"
        )
        report.lost = True
    return groups


def _oldest_file_number(disk: Disk, directory: str) -> int | None:
    """Return the number of the oldest file of a shard, present or lost."""
    numbers = paths.list_file_numbers(disk, directory)
    proven = paths.proven_current(disk, directory)
    return numbers[0] if numbers else proven and proven.first


def _report_shard(report: RecoveryReport, key: str, replay: Replay) -> None:
    """Report what of a shard was not replayed, byte for byte."""
    torn = replay.torn_tail
    if torn is not None:
        text = f"{key}/{torn.file} at byte {torn.pos}, {torn.size} bytes: {torn.reason}"
        note = f"; {torn.frames} frames that read follow it, of which no sync is known: kept in quarantine"
        report.cut.append(text + note * bool(torn.frames))
    for lost in replay.losses:
        if lost.file:
            text = f"{key}/{lost.file} at byte {lost.pos}, {lost.end - lost.pos} bytes that were synced: {lost.reason}"
            report.damage.append(text)
    if (missing := replay.missing_file) is not None:
        text = f"{key}/{paths.file_name(missing.file_number)} is missing: {missing.reason}; all that was in it is lost"
        report.damage.append(text)
    report.damage += [f"{key}: frames {gap.start} to {gap.stop - 1} are in no file" for gap in replay.missing_frames]
    report.lost |= bool(replay.losses)
