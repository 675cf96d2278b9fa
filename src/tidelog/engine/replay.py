"""[shell] WAL frames → topics: pass 4 of recovery.

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

from tidelog.disk.seam import File
from tidelog.engine import delete, groups, idempotency, numbers
from tidelog.engine.config import TopicConfig
from tidelog.engine.core import Core, Shared
from tidelog.engine.floors import Marks
from tidelog.engine.manifest import Manifest
from tidelog.engine.notes import Cause, Note
from tidelog.engine.queues.projection import Projection
from tidelog.engine.queues.state import IDS_AHEAD
from tidelog.engine.report import REPLAYING, Progress, Report
from tidelog.engine.reserve import RESERVE_MAX
from tidelog.engine.routing import restore
from tidelog.errors import Corrupt
from tidelog.formats import bodies, frame, idx, scan
from tidelog.formats.bodies import Body
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
from tidelog.wal import Gathered, Lost, Position, Replay, Stored, Window, path_of

MEMORY_BYTES: Final = 32 << 20
_PIECE_BYTES: Final = 1 << 20  # of one piece of a block that stays in the WAL
_WORTH_BYTES: Final = 2048  # less is kept in memory in any case: naming it would cost as much
_SETTINGS: Final = (TOPIC_CREATE, CONFIG_UPDATE)


@dataclass(slots=True)
class Met:
    """What a group has of one topic. Places are counted in losses of the group that come before them."""

    created: bool = False
    dropped: bool = False
    first: int | None = None  # the lowest seq of a record
    last: int = 0  # the highest of a frame of records
    last_record: int = 0  # where the last frame of records is
    last_reserved: int = 0  # and the last HeadWatermark

    @property
    def rank(self) -> int:
        """Which group comes first where several have frames of a topic: the one where it was made, then by seqs."""
        return -1 if self.created else self.first or 0


@dataclass(slots=True)
class Contents:
    """What the frames of a group are about, without applying any."""

    topics: dict[int, Met] = field(default_factory=dict)
    frames: int = 0  # without marks

    def add(self, window: Window) -> None:
        self.frames += int((window.heads["topic_id"] != 0).sum())
        for topic_id, which in _by_topic(window):
            if not topic_id:
                continue  # marks, and what is not about a topic
            met = self.topics.setdefault(topic_id, Met())
            heads = window.heads[which]
            kinds = heads["kind"]
            met.created = met.created or bool((kinds == TOPIC_CREATE).any())
            met.dropped = met.dropped or bool((kinds == TOPIC_DELETE).any())
            if (kinds == HEAD_WATERMARK).any():
                met.last_reserved = window.losses
            seqs = heads["seq"][(kinds == APPEND) | (kinds == APPEND_BATCH)]
            if len(seqs):
                low = int(seqs.min())
                met.first = low if met.first is None else min(met.first, low)
                met.last, met.last_record = max(met.last, int(seqs.max())), window.losses


class Group(NamedTuple):
    key: str
    replay: Replay
    contents: Contents


@dataclass(slots=True)
class _Gone:
    """A topic that was dropped in the end: what went with it, as far as that can be told without replaying it."""

    topic_id: int
    first: int
    last: int
    records: int
    size: int
    name: str = ""
    ts_ms: int = 0

    @classmethod
    def of(cls, topic_id: int, core: Core | None) -> _Gone:
        """What the manifest counts. Some of it may have been removed before."""
        if core is None:
            return cls(topic_id, 1, 0, 0, 0)
        index = core.index
        return cls(topic_id, index.earliest, index.head, index.count, index.bytes)

    def add(self, window: Window, which: Ints) -> None:
        """And what was written since."""
        kinds = window.heads["kind"][which]
        for at in which[kinds == TOPIC_DELETE].tolist():
            body = _body(window, at)
            assert isinstance(body, bodies.TopicDelete), "that is its kind"
            self.name, self.ts_ms = body.name, int(window.heads["ts_ms"][at])
        written = which[(kinds == APPEND) | (kinds == APPEND_BATCH)]
        if not len(written):
            return
        rows = scan.decode(window.buf, window.at[written], window.heads[written])
        fresh = rows.seq > self.last
        if fresh.any():
            self.records, self.size = self.records + int(fresh.sum()), self.size + int(_weights(rows)[fresh].sum())
            self.last = int(rows.seq.max())

    def note(self) -> Note:
        size = self.size
        return Note(
            None, self.name, self.topic_id, "drop", self.first, self.last, self.records, size, self.ts_ms, "recovery"
        )


class _Run(NamedTuple):
    """Frames of one topic in a window, and where more of that file can be read."""

    window: Window
    which: Ints
    path: str  # of the file
    losses: Sequence[Lost]  # of the group


class Replayed:
    def __init__(self, shared: Shared, cores: dict[int, Core], loaded: Manifest, report: Report) -> None:
        self._shared, self._cores, self._report = shared, cores, report
        self.next_id = self._known = loaded.next_topic_id
        # Topics that a checkpoint left out need more of the WAL than all others.
        self._lagging = set(loaded.lagging)
        self._fresh = {row.key: Position(row.first, row.pos) for row in loaded.fresh}
        self._left = MEMORY_BYTES  # for records
        self._file: File | None = None  # the one that records were last left in
        self._recorded: dict[int, int] = {}  # topic → losses before its last record
        self._configured: dict[int, int] = {}  # and before its last settings

    def run(self, groups: Sequence[Group], progress: Progress) -> None:
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
            topic_id: _Gone.of(topic_id, self._cores.get(topic_id))
            for topic_id, each in met.items()
            if any(one.dropped for one in each)
        }
        self._drop(gone)
        turns = [
            (turn, number) for turn in range(max(map(len, places.values()), default=0)) for number in range(len(groups))
        ]
        done, total = 0, sum(group.contents.frames for group in groups)
        for turn, number in turns:
            mine = {topic_id for topic_id, found in places.items() if found[turn : turn + 1] == [number]}
            if mine:
                for frames in self._replay(groups[number], mine, gone):
                    done += frames
                    progress(REPLAYING, done, total)
        self._file = None
        for group in groups:
            group.replay.forget()
        self._reserve(groups, places)
        for topic_id, each in gone.items():
            if topic_id in self._cores or topic_id >= self._known:
                self._shared.notes.tell(each.note())
        made = sum(lost.frames for group in groups for lost in group.replay.losses if lost.may_hold(TOPIC_CREATE))
        self.next_id = max([self.next_id, *(topic_id + 1 for topic_id in places)]) + made

    def _needed(self, key: str, window: Window, topic_id: int, which: Ints) -> Ints:
        """Those of a topic's frames that the manifest does not reflect already."""
        fresh = self._fresh.get(key)
        if fresh is None or window.first > fresh.first or topic_id in self._lagging:
            return which
        return which[window.at[which] + window.base >= fresh.pos] if window.first == fresh.first else which[:0]

    def _drop(self, gone: dict[int, _Gone]) -> None:
        """Nothing else is replayed for a topic that was dropped in the end: its files may be gone already."""
        for topic_id in gone:
            core = self._cores.get(topic_id)
            if core is not None:
                core.dropped = True
                core.quota.give(core.index.bytes)

    def _replay(self, group: Group, mine: set[int], gone: dict[int, _Gone]) -> Iterator[int]:
        """Apply the frames that a group has of these topics; yields their number for each topic of each window."""
        for window in group.replay.windows():
            path = path_of(group.replay.directory, window.first)
            for topic_id, which in _by_topic(window):
                if topic_id not in mine:
                    continue
                needed = self._needed(group.key, window, topic_id, which)
                if len(needed) and topic_id in gone:
                    gone[topic_id].add(window, needed)
                elif len(needed):
                    run = _Run(window, needed, path, group.replay.losses)
                    for do in self._events(topic_id, run):
                        do()
                yield len(which)

    def _reserve(self, groups: Sequence[Group], places: dict[int, list[int]]) -> None:
        """Seqs and ids that lost frames may have given out are not given again."""
        for number, group in enumerate(groups):
            losses = group.replay.losses
            if not losses:
                continue
            for core in self._cores.values():
                if core.dropped or number not in places.get(core.id, [number]):
                    continue
                met = group.contents.topics.get(core.id, Met())
                most = sum(lost.records for lost in losses[met.last_record :])
                if core.config.durability == "disk" and any(
                    lost.may_hold(HEAD_WATERMARK) for lost in losses[met.last_reserved :]
                ):
                    most += RESERVE_MAX
                if most:
                    core.reserved = max(core.reserved, max(core.index.head, met.last) + most)
                if core.projection is not None and any(lost.may_hold(LEASE) for lost in losses):
                    core.projection.lease_id += IDS_AHEAD
                self._doubt(core, losses, len(losses))
                if core.unsure:
                    self._report.damage.append(
                        f"{core.name}: a change of its settings may be lost; look at them before the next write"
                    )

    def _doubt(self, core: Core, losses: Sequence[Lost], before: int) -> None:
        """Whether a change of a topic's settings may be among what was lost since the last one that is there."""
        since = losses[self._configured.get(core.id, 0) : before]
        core.unsure = core.unsure or any(lost.may_hold(*_SETTINGS) for lost in since)

    def _events(self, topic_id: int, run: _Run) -> Iterator[Callable[[], None]]:
        """What the frames of a topic come to, in order; records between two control frames are one."""
        window, which = run.window, run.which
        core = self._core(topic_id, _body(window, int(which[0])))
        if core is None:
            return
        if window.losses:
            self._doubt(core, run.losses, window.losses)
        kinds = window.heads["kind"][which]
        keys = kinds == WRITE_KEY
        records = (kinds == APPEND) | (kinds == APPEND_BATCH) | keys  # keyed writes are one run too
        edges = (np.flatnonzero(records[1:] != records[:-1]) + 1).tolist()
        for lo, hi in pairwise([0, *edges, len(kinds)]):
            if records[lo]:
                if keys[lo:hi].any():
                    yield partial(self._remember, core, window, which[lo:hi], keys[lo:hi])
                if not keys[lo:hi].all():
                    yield partial(self._append, core, run._replace(which=which[lo:hi][~keys[lo:hi]]))
                continue
            for place, at in enumerate(which[lo:hi].tolist(), lo):
                body = _body(window, at)
                announced = _announced(body)
                if announced and not _follows(window, which[place + 1 :], announced):
                    continue  # the write broke off after it
                if isinstance(body, bodies.TopicCreate | bodies.ConfigUpdate):
                    self._configured[core.id], core.unsure = window.losses, False
                head = window.heads[at]
                seq = int(head["seq"])
                if isinstance(body, bodies.ConfigUpdate) and not seq:  # as earlier builds wrote them
                    seq = _before(window, which[place + 1 :])
                yield partial(_control, core, body, seq, int(head["ts_ms"]))

    def _core(self, topic_id: int, body: bodies.Body | None) -> Core | None:
        """The topic a frame is about; None where it was dropped before the manifest was made."""
        core = self._cores.get(topic_id)
        if core is None and topic_id >= self._known:
            if isinstance(body, bodies.TopicCreate):
                core = Core(self._shared, topic_id, body.name, TopicConfig.from_json(body.config))
            else:
                name = provisional(topic_id)
                core = Core(self._shared, topic_id, name, TopicConfig())
                self._report.damage.append(
                    f"topic {topic_id} was never created in what is left; it is served as {name}"
                )
            self._cores[topic_id] = core
        return core

    def _remember(self, core: Core, window: Window, which: Ints, keys: NDArray[np.bool_]) -> None:
        """Idempotency keys of a run of records: each counts if its records follow it, which are one chain, whole or
        absent, in the same window."""
        places = np.flatnonzero(keys)
        places = places[places + 1 < len(which)]
        seqs, times = window.heads["seq"][which], window.heads["ts_ms"][which]
        found = []
        for place in places[~keys[places + 1]].tolist():
            body = _body(window, int(which[place]))
            assert isinstance(body, bodies.WriteKey), "that is its kind"
            if int(seqs[place + 1]) == body.first:
                found.append((body.key, body.first, body.last, int(times[place])))
        idempotency.restore(core.window, found, self._shared.clock)

    def _append(self, core: Core, run: _Run) -> None:
        """Records of one topic, frame after frame, that the manifest does not hold yet."""
        if core.dropped:
            return
        index, limits, window = core.index, core.shared.limits, run.window
        which = self._trusted(core, run)
        if not len(which):
            return
        at, heads = window.at[which], window.heads[which]
        rows = scan.decode(window.buf, at, heads)
        starts = rows.at.searchsorted(at)
        counts = np.empty(len(at), np.int64)
        counts[:-1], counts[-1] = starts[1:] - starts[:-1], len(rows) - starts[-1]
        first = heads["seq"].astype(np.int64)
        fresh = np.flatnonzero(first + counts - 1 > index.head)
        if window.losses > self._recorded.get(core.id, 0) and len(fresh) and int(first[fresh[0]]) > index.head + 1:
            core.lost.append((index.head + 1, int(first[fresh[0]]) - 1))
        self._recorded[core.id] = window.losses
        if not len(fresh):
            return
        skip = int(fresh[0])  # seqs rise, so what is known already comes first
        weights = np.zeros(len(rows) + 1, np.int64)
        _weights(rows).cumsum(out=weights[1:])
        ends = at + heads["frame_len"].astype(np.int64) + 4
        last = (heads["flags"] & MORE) == 0  # of a caller's batch
        jump = np.ones(len(at), np.bool_)
        jump[:-1] = first[1:] != first[:-1] + counts[:-1]
        records, spent = counts.cumsum(), (ends - at).cumsum()
        jumps, lasts = np.flatnonzero(jump), np.flatnonzero(last)
        lo = skip
        while lo < len(at):
            block = index.growing(int(first[lo]), kept=True)
            before = int(records[lo] - counts[lo]), int(spent[lo] - (ends[lo] - at[lo]))
            room = limits.segment_events_max - (block.stop - block.segment)
            room_bytes = limits.segment_bytes_max - (block.origin + block.size)
            # Both only rise, so the frame that fills the segment is searched for and not all of them are compared.
            full = min(int(records.searchsorted(before[0] + room)), int(spent.searchsorted(before[1] + room_bytes)))
            stops = (jumps[jumps.searchsorted(lo) :][:1], lasts[lasts.searchsorted(max(full, lo)) :][:1])
            hi = int(np.concatenate(stops).min()) + 1  # the last frame of all jumps
            row_lo, row_hi = int(starts[lo]), int(starts[hi]) if hi < len(at) else len(rows)
            weight = int(weights[row_hi] - weights[row_lo])
            core.quota.hold(weight)
            times = int(heads["ts_ms"][lo]), int(heads["ts_ms"][hi - 1])
            size = int(spent[hi - 1]) - before[1]
            if size <= self._left or size < _WORTH_BYTES:
                self._left -= size
                frames = _bytes(window.buf, at[lo:hi], ends[lo:hi])
                count = row_hi - row_lo
                index.publish(int(first[lo]), frames, count, weight, times[0], kept=True, last_ts=times[1])
            else:
                sizes = ends[lo:hi] - at[lo:hi]
                entries = _entries(rows.part(row_lo, row_hi), block.origin + block.size, sizes, counts[lo:hi])
                pieces = _stored(self._open(run.path), at[lo:hi] + window.base, sizes)
                index.publish_indexed(int(first[lo]), pieces, entries, row_hi - row_lo, weight, *times)
            if hi > full:
                index.roll()
            core.keep_caps()
            lo = hi

    def _trusted(self, core: Core, run: _Run) -> Ints:
        """Its frames without those that may be the rest of a batch that lost its beginning. A batch that follows the
        topic's head is none: nothing of this topic was lost before it."""
        window, which = run.window, run.which
        doubtful = which[which < window.doubtful]
        if not len(doubtful) or int(window.heads["seq"][doubtful[0]]) <= core.index.head + 1:
            return which
        rows = scan.decode(window.buf, window.at[doubtful], window.heads[doubtful])
        first, last = int(rows.seq[0]), int(rows.seq[-1])
        core.reserved = max(core.reserved, last)
        core.damage.append(f"{core.name}: seqs {first} to {last} may be the rest of a batch that is lost; not served")
        return which[len(doubtful) :]

    def _open(self, path: str) -> File:
        if self._file is None or self._file.path != path:
            self._file = self._shared.disk.open(path)
        return self._file


def provisional(topic_id: int) -> str:
    """The name of a topic whose own is lost."""
    return f"recovered-{topic_id:08X}"


def _body(window: Window, number: int) -> Body | None:
    """What a control frame says; None for records."""
    found = frame.get(window.buf, int(window.at[number]), len(window.buf), check=False)
    assert isinstance(found, frame.Frame), "a survey passes only frames"
    if found.kind in (APPEND, APPEND_BATCH):
        return None
    return bodies.decode(found.kind, memoryview(window.buf)[found.data_at : found.data_end])


def _weights(rows: Rows) -> Ints:
    return rows.data.size if rows.meta is None else rows.data.size + rows.meta.size


def _entries(rows: Rows, origin: int, sizes: Ints, counts: Ints) -> bytes:
    """The index of records whose frames, of these sizes, are back to back from `origin` on."""
    entries = idx.entries(rows, int(rows.seq[0]), int(rows.seq[-1]) + 1, frame.U32_MAX)
    entries["frame_offset"] = np.repeat(origin + sizes.cumsum() - sizes, counts)
    return idx.to_bytes(entries)


def _stored(file: File, starts: Ints, sizes: Ints) -> list[Stored]:
    """Frames of a file as pieces of about `_PIECE_BYTES`."""
    pieces: list[Stored] = []
    edges = np.flatnonzero(np.diff(sizes.cumsum() // _PIECE_BYTES)) + 1
    for lo, hi in pairwise([0, *edges.tolist(), len(starts)]):
        at, size = starts[lo:hi], sizes[lo:hi]
        total = int(size.sum())
        if int(at[-1] + size[-1] - at[0]) == total:
            pieces.append(Stored(file, int(at[0]), total))
        else:
            pieces.append(Gathered.of(file, at.copy(), size))
    return pieces


def _control(core: Core, body: Body | None, seq: int, ts_ms: int) -> None:
    if core.dropped:
        return
    match body:
        case bodies.TopicCreate() | bodies.ConfigUpdate():
            config = TopicConfig.from_json(body.config)
            if core.name == provisional(core.id):
                core.name = body.name
            if (config.durability == "ephemeral") != core.ephemeral:
                core.index.roll()
            core.config = config
            core.keep_caps(seq)  # of the records that were there then: the snapshot may hold later ones
        case bodies.Delete():
            try:
                delete.replay(core, body, seq, ts_ms)
            except Corrupt as error:
                core.damage.append(f"{core.name}: a delete could not be replayed: {error}")
        case bodies.EvictWatermark():
            _floor(core, body)
        case bodies.Lease():
            core.projection = core.projection or Projection()
            core.projection.apply(seq, body)
        case bodies.HeadWatermark():
            core.reserved = max(core.reserved, body.head_seq)
        case bodies.GroupCursor():
            groups.apply(core, body, ts_ms)
        case bodies.NumberedBatch():
            numbers.apply(core.numbered, body)
        case bodies.RouterCreate() | bodies.RouterDelete() | bodies.Forward():
            restore.replay(core, body, seq)
        case _:
            pass  # of parts of the engine that are not about records


def _announced(body: Body | None) -> int:
    """The first seq of the records that have to follow a frame for it to count; 0 where none have to."""
    match body:
        case bodies.NumberedBatch():
            return body.first
        case bodies.Forward(event=bodies.ForwardEvent.COPIED):
            return body.dest_head - body.total + 1
        case _:
            return 0


def _follows(window: Window, rest: Ints, first: int) -> bool:
    """Whether the records from `first` on are there. They are one chain, whole or absent, in the same window."""
    head = window.heads[rest[0]] if len(rest) else None
    return head is not None and int(head["kind"]) in (APPEND, APPEND_BATCH) and int(head["seq"]) == first


def _before(window: Window, rest: Ints) -> int:
    """The seq before the next record of a topic; 0 where the window has none: then nothing is known."""
    kinds = window.heads["kind"][rest]
    found = rest[(kinds == APPEND) | (kinds == APPEND_BATCH)][:1]
    return int(window.heads["seq"][found[0]]) - 1 if len(found) else 0


def _by_topic(window: Window) -> Iterator[tuple[int, Ints]]:
    ids = window.heads["topic_id"]
    if not len(ids):
        return
    order = np.argsort(ids, kind="stable")
    edges = (np.flatnonzero(np.diff(ids[order])) + 1).tolist()
    for lo, hi in pairwise([0, *edges, len(order)]):
        yield int(ids[order[lo]]), order[lo:hi]


def _floor(core: Core, body: bodies.EvictWatermark) -> None:
    """A floor that somebody was shown. Records that were lost with the tail are padded in later: see `_finish`."""
    index, floors = core.index, core.floors
    ttl, cap = body.expiry_floor - 1, body.evict_floor - 1 if body.evict_floor > body.expiry_floor else 0
    core.floors = Marks(max(floors.cap, cap), max(floors.ttl, ttl), floors.source)
    marks: tuple[tuple[Cause, int], ...] = (("ttl", ttl), ("cap", cap))
    for cause, mark in marks:
        core.evict(min(mark + 1, index.head + 1), cause)


def _bytes(buf: bytes, at: Ints, ends: Ints) -> list[bytes]:
    """The bytes of these frames: one piece for each stretch in which they lie back to back."""
    apart = at[1:] != ends[:-1]
    if not apart.any():
        return [buf[int(at[0]) : int(ends[-1])]]
    starts, stops = [int(at[0]), *at[1:][apart].tolist()], [*ends[:-1][apart].tolist(), int(ends[-1])]
    return [buf[lo:hi] for lo, hi in zip(starts, stops, strict=True)]
