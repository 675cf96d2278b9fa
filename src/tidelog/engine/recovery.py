"""[shell] Disk → topics. In numbered passes, each of which may be cut off by a crash and done again.

    1  the newest manifest that reads
    2  its topics, with the segments it names: sizes are looked at, contents are not
    3  every WAL group that is on disk, whatever the number of shards is now
    4  its frames, topic by topic in their order: what the manifest holds already is passed over
    5  heads are padded to what was reserved, caps applied; routers are linked to their topics
    6  only then, and only for a writer: WAL tails are cut, segments cut to the length the manifest names, files that no
       manifest names removed

Passes 1 to 5 change nothing on disk, so a reader beside a live writer takes them too. A bad frame below the position
that was synced is damage: what follows it is replayed, the writer does not open unless it may (`accept_loss`), and the
bytes are kept in quarantine. A bad frame above it is an unfinished write, and its group ends there.

[shell] WAL frames → topics: pass 4 of recovery.

First every group is looked through (`Contents`): which topics it has frames of, and which of them were dropped in the
end. Then its frames are applied, window by window, in the order of the WAL: what is in memory is
one window and what topics keep. Records between two control frames of a topic are taken in as columns, whatever
frames they came in. What the manifest holds already is passed over by its seq. A topic that was dropped in the end gets
nothing replayed.

Records are kept in memory as live writes are, up to `MEMORY_BYTES`; what is beyond stays in the WAL file, which a
block can read, and only its index of 20 bytes a record is kept.

After damage (`wal.Lost`) the frames that are left are applied like any others, and what the lost ones may have said
decides how far they are trusted:

  records           seqs jump over those that were lost (`Core.lost`); seqs that may have been theirs are never given
                    out again: a topic without a later record skips as many as there can have been
  the rest of a     dropped, unless the topic's seqs prove that it is the beginning of another one
  batch
  settings          caps are not applied by replay until the topic's next settings: lost ones may have raised them
  reserved seqs     a topic of class `disk` without a later reservation skips the most that one reserves
  leases            ids skip as many as are put on record at a time
  a number          a frame that announces records counts only with them; records that lost theirs stay
  a topic           what was lost with its creation is its name; a change of its settings tells it again
  routers, cursors  whatever the last frame says that is left: what is derived from it is at most older
  a delete          is not done, and its records are back: nothing else says that they were deleted
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
from tidelog.engine import delete, groups, idempotency, manifest
from tidelog.engine import groups as cursors
from tidelog.engine.append import RESERVATION_MAX
from tidelog.engine.config import TopicConfig
from tidelog.engine.manifest import LoadedManifest, Manifest, TopicRow
from tidelog.engine.pending_removals import Removal, RemovalCause
from tidelog.engine.queues.leases import QueueSnapshot
from tidelog.engine.queues.queue_state import LEASE_IDS_AHEAD
from tidelog.engine.results import READING_WAL, REPLAYING_TOPICS, Progress, RecoveryReport
from tidelog.engine.routing import recovery
from tidelog.engine.segment import Segment
from tidelog.engine.topic_state import TOPICS_DIR, WAL_DIR, EngineContext, TopicState
from tidelog.engine.watermarks import GroupCursorState, Watermarks
from tidelog.errors import Corrupt, Damaged
from tidelog.formats import control_frames, frame, scan, segment_index
from tidelog.formats.control_frames import Body
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
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
_PIECE_BYTES: Final = 1 << 20  # of one piece of a block that stays in the WAL
_WAL_RANGE_BYTES_MIN: Final = 2048  # less is kept in memory in any case: naming it would cost as much
_CONFIG_KINDS: Final = (TOPIC_CREATE, CONFIG_UPDATE)


@dataclass(slots=True)
class TopicContents:
    """What a group has of one topic. Places are counted in losses of the group that come before them."""

    created: bool = False
    is_dropped: bool = False
    first: int | None = None  # the lowest seq of a record
    last: int = 0  # the highest of a frame of records
    last_record: int = 0  # where the last frame of records is
    last_reserved: int = 0  # and the last HeadWatermark

    @property
    def rank(self) -> int:
        """Which group comes first where several have frames of a topic: the one where it was made, then by seqs."""
        return -1 if self.created else self.first or 0


@dataclass(slots=True)
class ShardContents:
    """What the frames of a group are about, without applying any."""

    topics: dict[int, TopicContents] = field(default_factory=dict)
    frames: int = 0  # without marks

    def add(self, window: FrameWindow) -> None:
        self.frames += int((window.headers["topic_id"] != 0).sum())
        for topic_id, which in _group_by_topic(window):
            if not topic_id:
                continue  # marks, and what is not about a topic
            met = self.topics.setdefault(topic_id, TopicContents())
            heads = window.headers[which]
            kinds = heads["kind"]
            met.created = met.created or bool((kinds == TOPIC_CREATE).any())
            met.is_dropped = met.is_dropped or bool((kinds == TOPIC_DELETE).any())
            if (kinds == HEAD_WATERMARK).any():
                met.last_reserved = window.losses_before
            seqs = heads["seq"][(kinds == APPEND) | (kinds == APPEND_BATCH)]
            if len(seqs):
                low = int(seqs.min())
                met.first = low if met.first is None else min(met.first, low)
                met.last, met.last_record = max(met.last, int(seqs.max())), window.losses_before


class ShardRecovery(NamedTuple):
    key: str
    replay: Replay
    contents: ShardContents


@dataclass(slots=True)
class _DroppedTopic:
    """A topic that was dropped in the end: what went with it, as far as that can be told without replaying it."""

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

    def add(self, window: FrameWindow, which: Ints) -> None:
        """And what was written since."""
        kinds = window.headers["kind"][which]
        for at in which[kinds == TOPIC_DELETE].tolist():
            body = _decode_control_frame(window, at)
            assert isinstance(body, control_frames.TopicDelete), "that is its kind"
            self.name, self.ts_ms = body.name, int(window.headers["ts_ms"][at])
        written = which[(kinds == APPEND) | (kinds == APPEND_BATCH)]
        if not len(written):
            return
        rows = scan.decode_records(window.buf, window.frame_pos[written], window.headers[written])
        fresh = rows.seq > self.last
        if fresh.any():
            self.records, self.size = self.records + int(fresh.sum()), self.size + int(_row_weights(rows)[fresh].sum())
            self.last = int(rows.seq.max())

    def to_removal(self) -> Removal:
        size = self.size
        return Removal(
            None, self.name, self.topic_id, "drop", self.first, self.last, self.records, size, self.ts_ms, "recovery"
        )


class _TopicFrames(NamedTuple):
    """Frames of one topic in a window, and where more of that file can be read."""

    window: FrameWindow
    which: Ints
    path: str  # of the file
    losses: Sequence[LostRange]  # of the group


class TopicReplayer:
    def __init__(
        self, context: EngineContext, topics: dict[int, TopicState], loaded: Manifest, report: RecoveryReport
    ) -> None:
        self._shared, self._cores, self._report = context, topics, report
        self.next_id = self._first_new_topic_id = loaded.next_topic_id
        # Topics that a checkpoint left out need more of the WAL than all others.
        self._lagging = set(loaded.lagging)
        self._fresh = {row.key: Position(row.first, row.pos) for row in loaded.fresh}
        self._memory_left = REPLAY_MEMORY_BYTES  # for records
        self._file: File | None = None  # the one that records were last left in
        self._losses_before_record: dict[int, int] = {}  # topic → losses before its last record
        self._losses_before_config: dict[int, int] = {}  # and before its last settings

    def run(self, groups: Sequence[ShardRecovery], progress: Progress) -> None:
        places: dict[int, list[int]] = {}  # topic → the groups that have frames of it, in their order
        for number, group in enumerate(groups):
            self._report.frames += group.contents.frames
            for topic_id in group.contents.topics:
                places.setdefault(topic_id, []).append(number)
        met = {
            topic_id: [groups[number].contents.topics[topic_id] for number in found]
            for topic_id, found in places.items()
        }
        for topic_id, found in places.items():
            # A topic whose shard changed has frames in several groups: seqs tell which came first.
            found.sort(key=lambda number: groups[number].contents.topics[topic_id].rank)
        gone = {
            topic_id: _DroppedTopic.from_state(topic_id, self._cores.get(topic_id))
            for topic_id, each in met.items()
            if any(one.is_dropped for one in each)
        }
        self._mark_dropped(gone)
        turns = [
            (turn, number) for turn in range(max(map(len, places.values()), default=0)) for number in range(len(groups))
        ]
        done, total = 0, sum(group.contents.frames for group in groups)
        for turn, number in turns:
            mine = {topic_id for topic_id, found in places.items() if found[turn : turn + 1] == [number]}
            if mine:
                for frames in self._replay_shard(groups[number], mine, gone):
                    done += frames
                    progress(REPLAYING_TOPICS, done, total)
        self._file = None
        for group in groups:
            group.replay.drop_cached_windows()
        self._reserve_lost_seqs(groups, places)
        for topic_id, each in gone.items():
            if topic_id in self._cores or topic_id >= self._first_new_topic_id:
                self._shared.removals.add_removal(each.to_removal())
        made = sum(lost.frames for group in groups for lost in group.replay.losses if lost.may_contain(TOPIC_CREATE))
        self.next_id = max([self.next_id, *(topic_id + 1 for topic_id in places)]) + made

    def _frames_after_manifest(self, key: str, window: FrameWindow, topic_id: int, which: Ints) -> Ints:
        """Those of a topic's frames that the manifest does not reflect already."""
        fresh = self._fresh.get(key)
        if fresh is None or window.file_number > fresh.file_number or topic_id in self._lagging:
            return which
        return (
            which[window.frame_pos[which] + window.file_offset >= fresh.pos]
            if window.file_number == fresh.file_number
            else which[:0]
        )

    def _mark_dropped(self, gone: dict[int, _DroppedTopic]) -> None:
        """Nothing else is replayed for a topic that was dropped in the end: its files may be gone already."""
        for topic_id in gone:
            core = self._cores.get(topic_id)
            if core is not None:
                core.is_dropped = True
                core.quota.release(core.index.bytes)

    def _replay_shard(self, group: ShardRecovery, mine: set[int], gone: dict[int, _DroppedTopic]) -> Iterator[int]:
        """Apply the frames that a group has of these topics; yields their number for each topic of each window."""
        for window in group.replay.windows():
            path = file_path(group.replay.directory, window.file_number)
            for topic_id, which in _group_by_topic(window):
                if topic_id not in mine:
                    continue
                needed = self._frames_after_manifest(group.key, window, topic_id, which)
                if len(needed) and topic_id in gone:
                    gone[topic_id].add(window, needed)
                elif len(needed):
                    run = _TopicFrames(window, needed, path, group.replay.losses)
                    for do in self._plan_events(topic_id, run):
                        do()
                yield len(which)

    def _reserve_lost_seqs(self, groups: Sequence[ShardRecovery], places: dict[int, list[int]]) -> None:
        """Seqs and ids that lost frames may have given out are not given again."""
        for number, group in enumerate(groups):
            losses = group.replay.losses
            if not losses:
                continue
            for core in self._cores.values():
                if core.is_dropped or number not in places.get(core.id, [number]):
                    continue
                met = group.contents.topics.get(core.id, TopicContents())
                most = sum(lost.records for lost in losses[met.last_record :])
                if core.config.durability == "disk" and any(
                    lost.may_contain(HEAD_WATERMARK) for lost in losses[met.last_reserved :]
                ):
                    most += RESERVATION_MAX
                if most:
                    core.reserved_seq = max(core.reserved_seq, max(core.index.head, met.last) + most)
                if core.queue_snapshot is not None and any(lost.may_contain(LEASE) for lost in losses):
                    core.queue_snapshot.lease_id += LEASE_IDS_AHEAD
                self._note_config_loss(core, losses, len(losses))
                if core.is_config_uncertain:
                    self._report.damage.append(
                        f"{core.name}: a change of its settings may be lost; look at them before the next write"
                    )

    def _note_config_loss(self, topic: TopicState, losses: Sequence[LostRange], before: int) -> None:
        """Whether a change of a topic's settings may be among what was lost since the last one that is there."""
        since = losses[self._losses_before_config.get(topic.id, 0) : before]
        topic.is_config_uncertain = topic.is_config_uncertain or any(lost.may_contain(*_CONFIG_KINDS) for lost in since)

    def _plan_events(self, topic_id: int, run: _TopicFrames) -> Iterator[Callable[[], None]]:
        """What the frames of a topic come to, in order; records between two control frames are one."""
        window, which = run.window, run.which
        core = self._topic_for(topic_id, _decode_control_frame(window, int(which[0])))
        if core is None:
            return
        if window.losses_before:
            self._note_config_loss(core, run.losses, window.losses_before)
        kinds = window.headers["kind"][which]
        keys = kinds == WRITE_KEY
        records = (kinds == APPEND) | (kinds == APPEND_BATCH) | keys  # keyed writes are one run too
        edges = (np.flatnonzero(records[1:] != records[:-1]) + 1).tolist()
        for lo, hi in pairwise([0, *edges, len(kinds)]):
            if records[lo]:
                if keys[lo:hi].any():
                    yield partial(self._restore_keys, core, window, which[lo:hi], keys[lo:hi])
                if not keys[lo:hi].all():
                    yield partial(self._append_records, core, run._replace(which=which[lo:hi][~keys[lo:hi]]))
                continue
            for place, at in enumerate(which[lo:hi].tolist(), lo):
                body = _decode_control_frame(window, at)
                announced = _announced_seq(body)
                if announced and not _records_follow(window, which[place + 1 :], announced):
                    continue  # the write broke off after it
                if isinstance(body, control_frames.TopicCreate | control_frames.ConfigUpdate):
                    self._losses_before_config[core.id], core.is_config_uncertain = window.losses_before, False
                head = window.headers[at]
                seq = int(head["seq"])
                if isinstance(body, control_frames.ConfigUpdate) and not seq:  # as earlier builds wrote them
                    seq = _seq_before_next(window, which[place + 1 :])
                yield partial(_apply_control_frame, core, body, seq, int(head["ts_ms"]))

    def _topic_for(self, topic_id: int, body: control_frames.Body | None) -> TopicState | None:
        """The topic a frame is about; None where it was dropped before the manifest was made."""
        core = self._cores.get(topic_id)
        if core is None and topic_id >= self._first_new_topic_id:
            if isinstance(body, control_frames.TopicCreate):
                core = TopicState(self._shared, topic_id, body.name, TopicConfig.from_json(body.config))
            else:
                name = provisional_name(topic_id)
                core = TopicState(self._shared, topic_id, name, TopicConfig())
                self._report.damage.append(
                    f"topic {topic_id} was never created in what is left; it is served as {name}"
                )
            self._cores[topic_id] = core
        return core

    def _restore_keys(self, topic: TopicState, window: FrameWindow, which: Ints, keys: NDArray[np.bool_]) -> None:
        """Idempotency keys of a run of records: each counts if its records follow it, which are one chain, whole or
        absent, in the same window."""
        places = np.flatnonzero(keys)
        places = places[places + 1 < len(which)]
        seqs, times = window.headers["seq"][which], window.headers["ts_ms"][which]
        found = []
        for place in places[~keys[places + 1]].tolist():
            body = _decode_control_frame(window, int(which[place]))
            assert isinstance(body, control_frames.WriteKey), "that is its kind"
            if int(seqs[place + 1]) == body.first:
                found.append((body.key, body.first, body.last, int(times[place])))
        idempotency.restore_keys(topic.idempotency_window, found, self._shared.clock)

    def _append_records(self, topic: TopicState, run: _TopicFrames) -> None:
        """Records of one topic, frame after frame, that the manifest does not hold yet."""
        if topic.is_dropped:
            return
        index, limits, window = topic.index, topic.context.limits, run.window
        which = self._trusted_frames(topic, run)
        if not len(which):
            return
        at, heads = window.frame_pos[which], window.headers[which]
        rows = scan.decode_records(window.buf, at, heads)
        starts = rows.frame_pos.searchsorted(at)
        counts = np.empty(len(at), np.int64)
        counts[:-1], counts[-1] = starts[1:] - starts[:-1], len(rows) - starts[-1]
        first = heads["seq"].astype(np.int64)
        fresh = np.flatnonzero(first + counts - 1 > index.head)
        if (
            window.losses_before > self._losses_before_record.get(topic.id, 0)
            and len(fresh)
            and int(first[fresh[0]]) > index.head + 1
        ):
            topic.lost_ranges.append((index.head + 1, int(first[fresh[0]]) - 1))
        self._losses_before_record[topic.id] = window.losses_before
        if not len(fresh):
            return
        skip = int(fresh[0])  # seqs rise, so what is known already comes first
        weights = np.zeros(len(rows) + 1, np.int64)
        _row_weights(rows).cumsum(out=weights[1:])
        ends = at + heads["frame_len"].astype(np.int64) + 4
        last = (heads["flags"] & MORE) == 0  # of a caller's batch
        jump = np.ones(len(at), np.bool_)
        jump[:-1] = first[1:] != first[:-1] + counts[:-1]
        records, spent = counts.cumsum(), (ends - at).cumsum()
        jumps, lasts = np.flatnonzero(jump), np.flatnonzero(last)
        lo = skip
        while lo < len(at):
            block = index.open_memtable(int(first[lo]), persistent=True)
            before = int(records[lo] - counts[lo]), int(spent[lo] - (ends[lo] - at[lo]))
            room = limits.segment_events_max - (block.stop - block.segment)
            room_bytes = limits.segment_bytes_max - (block.origin + block.size)
            # Both only rise, so the frame that fills the segment is searched for and not all of them are compared.
            full = min(int(records.searchsorted(before[0] + room)), int(spent.searchsorted(before[1] + room_bytes)))
            stops = (jumps[jumps.searchsorted(lo) :][:1], lasts[lasts.searchsorted(max(full, lo)) :][:1])
            hi = int(np.concatenate(stops).min()) + 1  # the last frame of all jumps
            row_lo, row_hi = int(starts[lo]), int(starts[hi]) if hi < len(at) else len(rows)
            weight = int(weights[row_hi] - weights[row_lo])
            topic.quota.acquire_unchecked(weight)
            times = int(heads["ts_ms"][lo]), int(heads["ts_ms"][hi - 1])
            size = int(spent[hi - 1]) - before[1]
            if size <= self._memory_left or size < _WAL_RANGE_BYTES_MIN:
                self._memory_left -= size
                frames = _copy_frames(window.buf, at[lo:hi], ends[lo:hi])
                count = row_hi - row_lo
                index.publish(int(first[lo]), frames, count, weight, times[0], persistent=True, last_ts=times[1])
            else:
                sizes = ends[lo:hi] - at[lo:hi]
                entries = _build_index(rows.slice(row_lo, row_hi), block.origin + block.size, sizes, counts[lo:hi])
                pieces = _wal_ranges(self._open_file(run.path), at[lo:hi] + window.file_offset, sizes)
                index.publish_indexed(int(first[lo]), pieces, entries, row_hi - row_lo, weight, *times)
            if hi > full:
                index.roll_segment()
            topic.enforce_caps()
            lo = hi

    def _trusted_frames(self, topic: TopicState, run: _TopicFrames) -> Ints:
        """Its frames without those that may be the rest of a batch that lost its beginning. A batch that follows the
        topic's head is none: nothing of this topic was lost before it."""
        window, which = run.window, run.which
        doubtful = which[which < window.doubtful]
        if not len(doubtful) or int(window.headers["seq"][doubtful[0]]) <= topic.index.head + 1:
            return which
        rows = scan.decode_records(window.buf, window.frame_pos[doubtful], window.headers[doubtful])
        first, last = int(rows.seq[0]), int(rows.seq[-1])
        topic.reserved_seq = max(topic.reserved_seq, last)
        topic.damage.append(f"{topic.name}: seqs {first} to {last} may be the rest of a batch that is lost; not served")
        return which[len(doubtful) :]

    def _open_file(self, path: str) -> File:
        if self._file is None or self._file.path != path:
            self._file = self._shared.disk.open(path)
        return self._file


def provisional_name(topic_id: int) -> str:
    """The name of a topic whose own is lost."""
    return f"recovered-{topic_id:08X}"


def _decode_control_frame(window: FrameWindow, number: int) -> Body | None:
    """What a control frame says; None for records."""
    found = frame.read_frame(window.buf, int(window.frame_pos[number]), len(window.buf), check=False)
    assert isinstance(found, frame.Frame), "a survey passes only frames"
    if found.kind in (APPEND, APPEND_BATCH):
        return None
    return control_frames.decode(found.kind, memoryview(window.buf)[found.data_pos : found.data_end])


def _row_weights(rows: Rows) -> Ints:
    return rows.data.size if rows.meta is None else rows.data.size + rows.meta.size


def _build_index(rows: Rows, origin: int, sizes: Ints, counts: Ints) -> bytes:
    """The index of records whose frames, of these sizes, are back to back from `origin` on."""
    entries = segment_index.build_entries(rows, int(rows.seq[0]), int(rows.seq[-1]) + 1, frame.U32_MAX)
    entries["frame_offset"] = np.repeat(origin + sizes.cumsum() - sizes, counts)
    return entries.tobytes()


def _wal_ranges(file: File, starts: Ints, sizes: Ints) -> list[WalRange]:
    """Frames of a file as pieces of about `_PIECE_BYTES`."""
    pieces: list[WalRange] = []
    edges = np.flatnonzero(np.diff(sizes.cumsum() // _PIECE_BYTES)) + 1
    for lo, hi in pairwise([0, *edges.tolist(), len(starts)]):
        at, size = starts[lo:hi], sizes[lo:hi]
        total = int(size.sum())
        if int(at[-1] + size[-1] - at[0]) == total:
            pieces.append(WalRange(file, int(at[0]), total))
        else:
            pieces.append(GatheredRange.from_frames(file, at.copy(), size))
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
            topic.enforce_caps(seq)  # of the records that were there then: the snapshot may hold later ones
        case control_frames.Delete():
            try:
                delete.replay_delete(topic, body, seq, ts_ms)
            except Corrupt as error:
                topic.damage.append(f"{topic.name}: a delete could not be replayed: {error}")
        case control_frames.EvictWatermark():
            _apply_floor(topic, body)
        case control_frames.Lease():
            topic.queue_snapshot = topic.queue_snapshot or QueueSnapshot()
            topic.queue_snapshot.apply(seq, body)
        case control_frames.HeadWatermark():
            topic.reserved_seq = max(topic.reserved_seq, body.head_seq)
        case control_frames.GroupCursor():
            groups.apply_cursor(topic, body, ts_ms)
        case control_frames.NumberedBatch():
            idempotency.record_batch(topic.producer_batches, body)
        case control_frames.RouterCreate() | control_frames.RouterDelete() | control_frames.Forward():
            recovery.replay_router_frame(topic, body, seq)
        case _:
            pass  # of parts of the engine that are not about records


def _announced_seq(body: Body | None) -> int:
    """The first seq of the records that have to follow a frame for it to count; 0 where none have to."""
    match body:
        case control_frames.NumberedBatch():
            return body.first
        case control_frames.Forward(event=control_frames.ForwardEvent.COPIED):
            return body.dest_head - body.total + 1
        case _:
            return 0


def _records_follow(window: FrameWindow, rest: Ints, first: int) -> bool:
    """Whether the records from `first` on are there. They are one chain, whole or absent, in the same window."""
    head = window.headers[rest[0]] if len(rest) else None
    return head is not None and int(head["kind"]) in (APPEND, APPEND_BATCH) and int(head["seq"]) == first


def _seq_before_next(window: FrameWindow, rest: Ints) -> int:
    """The seq before the next record of a topic; 0 where the window has none: then nothing is known."""
    kinds = window.headers["kind"][rest]
    found = rest[(kinds == APPEND) | (kinds == APPEND_BATCH)][:1]
    return int(window.headers["seq"][found[0]]) - 1 if len(found) else 0


def _group_by_topic(window: FrameWindow) -> Iterator[tuple[int, Ints]]:
    ids = window.headers["topic_id"]
    if not len(ids):
        return
    order = np.argsort(ids, kind="stable")
    edges = (np.flatnonzero(np.diff(ids[order])) + 1).tolist()
    for lo, hi in pairwise([0, *edges, len(order)]):
        yield int(ids[order[lo]]), order[lo:hi]


def _apply_floor(topic: TopicState, body: control_frames.EvictWatermark) -> None:
    """A floor that somebody was shown. Records that were lost with the tail are padded in later: see `_finish`."""
    index, floors = topic.index, topic.replayed_watermarks
    ttl, cap = body.expiry_floor - 1, body.evict_floor - 1 if body.evict_floor > body.expiry_floor else 0
    topic.replayed_watermarks = Watermarks(max(floors.cap, cap), max(floors.ttl, ttl), floors.source)
    marks: tuple[tuple[RemovalCause, int], ...] = (("ttl", ttl), ("cap", cap))
    for cause, mark in marks:
        topic.evict(min(mark + 1, index.head + 1), cause)


def _copy_frames(buf: bytes, at: Ints, ends: Ints) -> list[bytes]:
    """The bytes of these frames: one piece for each stretch in which they lie back to back."""
    apart = at[1:] != ends[:-1]
    if not apart.any():
        return [buf[int(at[0]) : int(ends[-1])]]
    starts, stops = [int(at[0]), *at[1:][apart].tolist()], [*ends[:-1][apart].tolist(), int(ends[-1])]
    return [buf[lo:hi] for lo, hi in zip(starts, stops, strict=True)]


class MissingBytes(NamedTuple):
    """Bytes of a segment that the manifest names and the disk does not have."""

    core: TopicState
    where: str
    reason: str


class RecoveredTopics(NamedTuple):
    topics: dict[str, TopicState]
    next_topic_id: int
    groups: list[ShardRecovery]
    loaded: LoadedManifest
    has_truncated_source: bool  # a source of routers ends before their cursors


def recover(context: EngineContext, report: RecoveryReport, progress: Progress, *, writable: bool) -> RecoveredTopics:
    """Passes 1 to 5."""
    loaded = manifest.load_newest(context.disk, context.root)
    report.snapshot, report.snapshots_skipped = loaded.number, loaded.skipped
    missing: list[MissingBytes] = []
    cores = {row.id: _restore_topic(context, row, missing) for row in loaded.manifest.topics}
    groups = _read_shards(context, loaded, report, progress)
    recovery.restore_from_manifest(cores, loaded.manifest)
    replayed = TopicReplayer(context, cores, loaded.manifest, report)
    context.is_replaying = context.removals.is_recovering = True
    replayed.run(groups, progress)
    context.is_replaying = False
    topics: dict[str, TopicState] = {}
    for core in sorted(cores.values(), key=lambda core: core.id):
        if core.is_dropped:
            context.health.forget_topic(core.id)
            continue
        if core.name in topics:
            report.damage.append(f"two topics are called {core.name!r}: the older one is not served")
        topics[core.name] = core
        report.damage += core.damage
        if core.lost_ranges:
            report.lost_seqs[core.name] = core.lost_ranges
        _finish_topic(core, report, writable=writable)
    for each in missing:
        if not each.core.is_dropped:  # a drop removes files that the manifest still names
            each.core.report_corruption(each.where, each.reason)
    shorter = recovery.link_forwarders(cores, report, writable=writable)
    report.topics = len(topics)
    return RecoveredTopics(topics, replayed.next_id, groups, loaded, shorter)


# ── 2  topics and their segments ──────────────────────────────────────────────────────────────────


def _restore_topic(context: EngineContext, row: TopicRow, missing: list[MissingBytes]) -> TopicState:
    core = TopicState(context, row.id, row.name, TopicConfig.from_json(row.config))
    index, home = core.index, context.segment_files(row.id)
    for segment in row.segments:
        part = Segment(
            home,
            segment.base,
            segment.stop,
            segment.size,
            live=segment.live,
            live_bytes=segment.live_bytes,
            first_ts=segment.first_ts,
            last_ts=segment.last_ts,
            sealed=segment.sealed,
            unproven=segment.unproven,
        )
        index.parts.append(part)
        found = _check_segment_files(context.disk, part)
        if segment.unproven and not found:
            found = [f"{home.path(part.base, '.data')} was sealed without a footer: not all of its frames verify"]
        missing += [MissingBytes(core, home.path(part.base, ".data"), said) for said in found]
        core.damage += found
    index.head, index.earliest, index.last_ts = row.head, row.earliest, row.last_ts
    index.watermarks = Watermarks(row.cap_mark, row.ttl_mark, row.source_mark)
    core.durable_floor = index.evict_floor
    core.durable_seq = row.head
    index.deleted_ranges, index.trimmed_ranges = list(row.ghosts), list(row.trims)
    core.reserved_seq, core.delete_count = row.reserved, row.removals
    core.groups = {each.group: GroupCursorState(each.seq, each.ts_ms, each.hold_bytes) for each in row.consumers}
    core.had_retention_hold = core.persists_floors = row.guarded
    core.producer_batches = idempotency.decode_producers(row.writers)
    idempotency.restore_keys(core.idempotency_window, row.keys, context.clock)
    core.queue_snapshot = None if row.queue is None else QueueSnapshot(row.queue)
    try:
        for each in index.parts:
            if isinstance(each, Segment):
                each.recount_live()
        index.count, index.bytes = index.measure(index.earliest, index.head + 1)
        index.skip_deleted()  # an ephemeral topic has lost its records and keeps its head
    except Corrupt as error:
        core.damage.append(f"{row.name}: {error}; its counts are those of the parts that read")
        live = [part for part in index.parts if part.stop > index.earliest]
        index.count, index.bytes = sum(part.live_records for part in live), sum(part.live_bytes for part in live)
    core.quota.acquire_unchecked(index.bytes)
    return core


def _check_segment_files(disk: Disk, part: Segment) -> list[str]:
    """A cheap look at the files of a segment: what is missing. A lost index is made again from the data."""
    data, index = (disk.stat(part.files.path(part.base, suffix)) for suffix in (".data", ".idx"))
    path = part.files.path(part.base, ".data")
    if data is None or data.size < part.size:
        return [f"{path} has {data.size if data else 0} bytes, the manifest says {part.size}"]
    if index is None or index.size < (part.stop - part.base) * segment_index.ENTRY_BYTES:
        part.rebuild_index()
    return []


def _finish_topic(topic: TopicState, report: RecoveryReport, *, writable: bool) -> None:
    """5. What was reserved is taken, what was lost stays lost."""
    index = topic.index
    if writable and topic.reserved_seq > index.head:
        report.padded[topic.name] = topic.reserved_seq - index.head
        index.reserve_up_to(topic.reserved_seq)
    told: tuple[tuple[RemovalCause, int], ...] = (
        ("ttl", topic.replayed_watermarks.ttl),
        ("cap", topic.replayed_watermarks.cap),
    )
    for cause, floor in told:
        topic.evict(min(floor + 1, index.head + 1), cause)
    # What the manifest and frames say, and not what was worked out from records: the next replay may find another one,
    # by the cursors of a group or by deletion vectors that are newer than what it begins with.
    topic.durable_floor = max(topic.durable_floor, min(topic.replayed_watermarks.evict_floor, index.head + 1))
    if not topic.is_config_uncertain:
        topic.enforce_caps()
    topic.last_assigned_seq = topic.head_at_open = topic.history_seq = index.head
    topic.last_write_ms = index.last_ts or None
    topic.reserving_seq = topic.reserved_seq
    cursors.clamp_cursors(topic)


# ── 3  the groups of the WAL ──────────────────────────────────────────────────────────────────────


def replay_start(loaded: LoadedManifest, key: str) -> Position | None:
    """Where the manifest says that replay of a group begins; None: it does not know the group."""
    return next((Position(row.first, row.pos) for row in loaded.manifest.groups if row.key == key), None)


def first_file_number(loaded: LoadedManifest, groups: Sequence[ShardRecovery], key: str) -> int:
    """The number of the first file of a group that has none. Groups of the first number of shards start at 1 and no
    others do: without a manifest that tells whether something is missing that only a manifest knew. As long as no
    group has had a frame this is the beginning: their files were empty, and `cut` has removed them."""
    begin = replay_start(loaded, key)
    if begin is not None:
        return begin.file_number  # nothing was written to it: a file that held frames would be known to be absent
    if loaded.number:
        return 2
    if all(group.replay.next_file_number == 1 for group in groups):
        return 1
    ones = {group.key for group in groups if group.replay.file_numbers[:1] == [1]}
    return 1 if key in _first_shard_layout(ones) else 2


def _first_shard_layout(ones: set[str]) -> list[str]:
    """The groups of the first number of shards, of which these are some; the others had no frame when they were let
    go of, which is done lowest first."""
    if paths.SINGLE_SHARD_KEY in ones:
        return [paths.SINGLE_SHARD_KEY]
    return paths.shard_keys(100)[: max(int(key.removeprefix("shard-")) for key in ones) + 1]


def _has_whole_wal(keys: Sequence[str], begun: dict[str, int]) -> bool:
    """Whether the groups, by the numbers of their first files, are all there ever were, from the first frame on: those
    of the first number of shards start at 1, and they are let go of lowest first. One without files has no frame."""
    ones = {key for key, number in begun.items() if number == 1}
    if max(begun.values(), default=1) > 2 or not ones:
        return False
    first_layout = _first_shard_layout(ones)
    return ones <= {*first_layout} and all(key in ones or (key in keys and key not in begun) for key in first_layout)


def _read_shards(
    context: EngineContext, loaded: LoadedManifest, report: RecoveryReport, progress: Progress
) -> list[ShardRecovery]:
    wal = join(context.root, WAL_DIR)
    keys = paths.list_shard_keys(context.disk, wal)
    begun = {
        key: number for key in keys if (number := _oldest_file_number(context.disk, paths.shard_directory(wal, key)))
    }
    keys += [row.key for row in loaded.manifest.groups if row.pos and row.key not in keys]  # all of it is gone
    topics = join(context.root, TOPICS_DIR)
    used = begun or loaded.skipped or (context.disk.stat(topics) is not None and context.disk.list_dir(topics))
    if not loaded.number and used and not _has_whole_wal(keys, begun):
        raise Damaged(
            f"{context.root}: no snapshot reads and the WAL does not go back to the beginning; nothing was changed, "
            f"restore {manifest.MANIFEST_DIR}/ from a copy"
        )
    groups = []
    for number, key in enumerate(keys):
        directory = paths.shard_directory(wal, key)
        unknown = Position(2 if begun.get(key) == 2 else 1, 0)  # none of its files can have been let go of
        start = replay_start(loaded, key) or unknown
        replay, contents = replay_shard(context.disk, directory, start), ShardContents()
        for window in replay:
            contents.add(window)
        progress(READING_WAL, number + 1, len(keys))
        _report_shard(report, key or WAL_DIR, replay)
        groups.append(ShardRecovery(key, replay, contents))
    for group in groups:
        at, absent = replay_start(loaded, group.key), group.replay.missing_file
        told = absent is not None and at is not None and absent.file_number == at.file_number
        if at is None or not at.pos or at.file_number in group.replay.file_numbers or told:
            continue
        report.damage.append(
            f"{group.key or WAL_DIR}/{paths.file_name(at.file_number)} is missing, replay begins in it"
        )
        report.lost = True
    return groups


def _oldest_file_number(disk: Disk, directory: str) -> int | None:
    """The number of the oldest file of a group, there or lost."""
    found = paths.list_file_numbers(disk, directory)
    said = paths.proven_current(disk, directory)
    return found[0] if found else said and said.first


def _report_shard(report: RecoveryReport, key: str, replay: Replay) -> None:
    """What of a group was not replayed, byte for byte."""
    cut = replay.torn_tail
    if cut is not None:
        said = f"{key}/{cut.file} at byte {cut.pos}, {cut.size} bytes: {cut.reason}"
        follow = f"; {cut.frames} frames that read follow it, of which no sync is known: kept in quarantine"
        report.cut.append(said + follow * bool(cut.frames))
    for lost in replay.losses:
        if lost.file:
            said = f"{key}/{lost.file} at byte {lost.pos}, {lost.end - lost.pos} bytes that were synced: {lost.reason}"
            report.damage.append(said)
    if (absent := replay.missing_file) is not None:
        said = f"{key}/{paths.file_name(absent.file_number)} is missing: {absent.reason}; all that was in it is lost"
        report.damage.append(said)
    report.damage += [f"{key}: frames {gap.start} to {gap.stop - 1} are in no file" for gap in replay.missing_frames]
    report.lost |= bool(replay.losses)
