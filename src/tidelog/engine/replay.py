"""[shell] WAL frames → topics: pass 4 of recovery.

Topic by topic, because one topic's order is all that counts, and run by run: records between two
control frames are taken in as columns, whatever frames they came in. What the manifest holds already
is passed over by its seq. A topic that was dropped in the end gets nothing replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tidelog.engine import delete, groups, numbers
from tidelog.engine.config import TopicConfig
from tidelog.engine.core import Core, Shared
from tidelog.engine.floors import Marks
from tidelog.engine.manifest import Manifest
from tidelog.engine.notes import Cause, Note
from tidelog.engine.queues.projection import Projection
from tidelog.engine.report import REPLAYING, Group, Progress, Report
from tidelog.engine.routing import restore
from tidelog.errors import Corrupt
from tidelog.formats import bodies, frame, scan
from tidelog.formats.bodies import Body
from tidelog.formats.frame import (
    APPEND,
    APPEND_BATCH,
    MORE,
    TOPIC_CREATE,
    TOPIC_DELETE,
)
from tidelog.types import Ints
from tidelog.wal import WalFile


class _Piece(NamedTuple):
    """The frames of one topic in one file, in order."""

    file: WalFile
    which: Ints


class Replayed:
    def __init__(self, shared: Shared, cores: dict[int, Core], loaded: Manifest, report: Report) -> None:
        self._shared, self._cores, self._report = shared, cores, report
        self.next_id = self._known = loaded.next_topic_id

    def run(self, groups: Sequence[Group], progress: Progress) -> None:
        streams: dict[int, list[list[_Piece]]] = {}
        for group in groups:
            mine: dict[int, list[_Piece]] = {}
            for file in group.files:
                self._report.frames += int((file.heads["topic_id"] != 0).sum())
                for topic_id, which in _by_topic(file):
                    mine.setdefault(topic_id, []).append(_Piece(file, which))
            for topic_id, pieces in mine.items():
                streams.setdefault(topic_id, []).append(pieces)
        streams.pop(0, None)  # marks, and what is not about a topic
        for number, (topic_id, found) in enumerate(sorted(streams.items())):
            if any(TOPIC_DELETE in file.heads["kind"][which] for pieces in found for file, which in pieces):
                self._drop(topic_id, found)
                continue
            # A topic whose shard changed has frames in several groups: seqs tell which came first.
            ordered = sorted(found, key=_first_seq) if len(found) > 1 else found
            events = self._events(topic_id, [piece for pieces in ordered for piece in pieces])
            for do in events:
                do()
            progress(REPLAYING, number + 1, len(streams))
        self.next_id = max([self.next_id, *(topic_id + 1 for topic_id in streams)])

    def _drop(self, topic_id: int, found: Sequence[Sequence[_Piece]]) -> None:
        """Nothing else is replayed for a topic that was dropped in the end: its files may be gone already."""
        core = self._cores.get(topic_id)
        if core is not None:
            core.dropped = True
            core.quota.give(core.index.bytes)
        if core is not None or topic_id >= self._known:
            self._shared.notes.tell(_dropped(core, topic_id, [piece for pieces in found for piece in pieces]))

    def _events(self, topic_id: int, pieces: Sequence[_Piece]) -> Iterator[Callable[[], None]]:
        """What the frames of a topic come to, in order; records between two control frames are one."""
        core = self._core(topic_id, self._body(pieces[0].file, int(pieces[0].which[0])))
        return iter(()) if core is None else self._played(core, pieces)

    def _played(self, core: Core, pieces: Sequence[_Piece]) -> Iterator[Callable[[], None]]:
        for file, which in pieces:
            kinds = file.heads["kind"][which]
            records = (kinds == APPEND) | (kinds == APPEND_BATCH)
            edges = (np.flatnonzero(records[1:] != records[:-1]) + 1).tolist()
            for lo, hi in pairwise([0, *edges, len(kinds)]):
                if records[lo]:
                    yield partial(_append, core, file, which[lo:hi])
                    continue
                for place, at in enumerate(which[lo:hi].tolist(), lo):
                    body = self._body(file, at)
                    announced = _announced(body)
                    if announced and not _follows(file, which[place + 1 :], announced):
                        continue  # the write broke off after it
                    head = file.heads[at]
                    yield partial(_control, core, body, int(head["seq"]), int(head["ts_ms"]))

    def _body(self, file: WalFile, number: int) -> Body | None:
        """What a control frame says; None for records."""
        found = frame.get(file.buf, int(file.at[number]), file.hi, check=False)
        assert isinstance(found, frame.Frame), "a survey passes only frames"
        if found.kind in (APPEND, APPEND_BATCH):
            return None
        return bodies.decode(found.kind, memoryview(file.buf)[found.data_at : found.data_end])

    def _core(self, topic_id: int, body: bodies.Body | None) -> Core | None:
        """The topic a frame is about; None where it was dropped before the manifest was made."""
        core = self._cores.get(topic_id)
        if core is None and topic_id >= self._known:
            if isinstance(body, bodies.TopicCreate):
                core = Core(self._shared, topic_id, body.name, TopicConfig.from_json(body.config))
            else:
                name = f"recovered-{topic_id:08X}"
                core = Core(self._shared, topic_id, name, TopicConfig())
                self._report.damage.append(
                    f"topic {topic_id} was never created in what is left; it is served as {name}"
                )
            self._cores[topic_id] = core
        return core


def _dropped(core: Core | None, topic_id: int, pieces: Sequence[_Piece]) -> Note:
    """What went with a topic, as far as that can be told without replaying it: what the manifest counts and all that
    was written since. Some of it may have been removed before."""
    first, last, records, size = (1, 0, 0, 0) if core is None else (core.index.earliest, core.index.head, 0, 0)
    if core is not None:
        records, size = core.index.count, core.index.bytes
    name, ts_ms = "", 0
    for file, which in pieces:
        kinds = file.heads["kind"][which]
        for at in which[kinds == TOPIC_DELETE].tolist():
            frame_at = frame.get(file.buf, int(file.at[at]), file.hi, check=False)
            assert isinstance(frame_at, frame.Frame), "a survey passes only frames"
            body = bodies.decode(frame_at.kind, memoryview(file.buf)[frame_at.data_at : frame_at.data_end])
            assert isinstance(body, bodies.TopicDelete), "that is its kind"
            name, ts_ms = body.name, frame_at.ts_ms
        written = which[(kinds == APPEND) | (kinds == APPEND_BATCH)]
        if not len(written):
            continue
        rows = scan.decode(file.buf, file.at[written], file.heads[written])
        fresh = rows.seq > last
        if fresh.any():
            weights = rows.data.size if rows.meta is None else rows.data.size + rows.meta.size
            records, size, last = records + int(fresh.sum()), size + int(weights[fresh].sum()), int(rows.seq.max())
    return Note(None, name, topic_id, "drop", first, last, records, size, ts_ms, "recovery")


def _control(core: Core, body: Body | None, seq: int, ts_ms: int) -> None:
    if core.dropped:
        return
    match body:
        case bodies.TopicCreate() | bodies.ConfigUpdate():
            config = TopicConfig.from_json(body.config)
            if (config.durability == "ephemeral") != core.ephemeral:
                core.index.roll()
            core.config = config
            core.keep_caps()
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


def _follows(file: WalFile, rest: Ints, first: int) -> bool:
    """Whether the records from `first` on are there. They are one chain, whole or absent, in the same file."""
    head = file.heads[rest[0]] if len(rest) else None
    return head is not None and int(head["kind"]) in (APPEND, APPEND_BATCH) and int(head["seq"]) == first


def _by_topic(file: WalFile) -> Iterator[tuple[int, Ints]]:
    ids = file.heads["topic_id"]
    if not len(ids):
        return
    order = np.argsort(ids, kind="stable")
    edges = (np.flatnonzero(np.diff(ids[order])) + 1).tolist()
    for lo, hi in pairwise([0, *edges, len(order)]):
        yield int(ids[order[lo]]), order[lo:hi]


def _first_seq(pieces: Sequence[_Piece]) -> int:
    """The lowest seq of a record that a group has of a topic. Where it was made comes before all others."""
    if any(TOPIC_CREATE in file.heads["kind"][which] for file, which in pieces):
        return -1
    found = [
        int(seqs.min())
        for file, which in pieces
        if len(seqs := file.heads["seq"][which][np.isin(file.heads["kind"][which], (APPEND, APPEND_BATCH))])
    ]
    return min(found, default=0)


def _floor(core: Core, body: bodies.EvictWatermark) -> None:
    """A floor that somebody was shown. Records that were lost with the tail are padded in later: see `_finish`."""
    index, floors = core.index, core.floors
    ttl, cap = body.expiry_floor - 1, body.evict_floor - 1 if body.evict_floor > body.expiry_floor else 0
    core.floors = Marks(max(floors.cap, cap), max(floors.ttl, ttl), floors.source)
    marks: tuple[tuple[Cause, int], ...] = (("ttl", ttl), ("cap", cap))
    for cause, mark in marks:
        core.evict(min(mark + 1, index.head + 1), cause)


def _append(core: Core, file: WalFile, which: Ints) -> None:
    """Records of one topic, frame after frame, that the manifest does not hold yet."""
    if core.dropped:
        return
    index, limits = core.index, core.shared.limits
    at, heads = file.at[which], file.heads[which]
    rows = scan.decode(file.buf, at, heads)
    starts = rows.at.searchsorted(at)
    counts = np.empty(len(at), np.int64)
    counts[:-1], counts[-1] = starts[1:] - starts[:-1], len(rows) - starts[-1]
    first = heads["seq"].astype(np.int64)
    fresh = np.flatnonzero(first + counts - 1 > index.head)
    if not len(fresh):
        return
    skip = int(fresh[0])  # seqs rise, so what is known already comes first
    size = rows.data.size if rows.meta is None else rows.data.size + rows.meta.size
    weights = np.zeros(len(rows) + 1, np.int64)
    size.cumsum(out=weights[1:])
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
        index.publish(
            int(first[lo]),
            _bytes(file.buf, at[lo:hi], ends[lo:hi]),
            row_hi - row_lo,
            weight,
            int(heads["ts_ms"][lo]),
            kept=True,
            last_ts=int(heads["ts_ms"][hi - 1]),
        )
        if hi > full:
            index.roll()
        core.keep_caps()
        lo = hi


def _bytes(buf: bytes, at: Ints, ends: Ints) -> list[bytes]:
    """The bytes of these frames: one piece for each stretch in which they lie back to back."""
    apart = at[1:] != ends[:-1]
    if not apart.any():
        return [buf[int(at[0]) : int(ends[-1])]]
    starts, stops = [int(at[0]), *at[1:][apart].tolist()], [*ends[:-1][apart].tolist(), int(ends[-1])]
    return [buf[lo:hi] for lo, hi in zip(starts, stops, strict=True)]
