"""[shell] Topics in a directory, beside their writer or without one.

The driver opens it read-only: a manifest and the WAL behind it, one consistent moment. Executors open the segment files
that the plan names and nothing else. A writer removes a file only when a second manifest does without it, and only when
nothing in it can be read any more; a file that is gone, or shorter than it was, is therefore not damage: the seqs are
looked for again in the directory as it is now. The same way is taken for a tail that is too large for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from tidelog import engine as topics
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk
from tidelog.engine import Counts, Engine, Topic
from tidelog.engine.core import directory
from tidelog.engine.home import Home, Maps
from tidelog.engine.parts import Segment as StoredSegment
from tidelog.engine.read import SCHEMA
from tidelog.engine.segments import Held
from tidelog.errors import Corrupt, NotFound, Unavailable
from tidelog.formats import deletions, idx
from tidelog.spark.groups import PathGroups
from tidelog.spark.place import Found, Inlined, Segment, Sight, Wanted, share, weight
from tidelog.spark.stretches import Bools, Lost, Stretch

CHUNK_BYTES: Final = 4 << 20
_TRIES: Final = 5
INLINE_BYTES: Final = 8 << 20  # a tail up to this travels in the plan: nobody else has to read the WAL

T = TypeVar("T")


class PathPlace:
    timed = kinded = True

    def __init__(self, path: str, *, disk: Disk | None = None, strong: bool = False) -> None:
        """`strong`: plans end with the last record that survives a power cut."""
        self._strong = strong
        self._path = path.rstrip("/") or "/"
        self._disk = disk or PosixDisk()

    @cached_property
    def _engine(self) -> Engine:
        return self._opened()

    def _opened(self) -> Engine:
        return _tried(lambda: topics.open(self._path, read_only=True, disk=self._disk))

    def refresh(self) -> None:
        if "_engine" in self.__dict__:
            _tried(self._engine.refresh)

    def close(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.close()
            del self.__dict__["_engine"]

    @property
    def groups(self) -> PathGroups:
        return PathGroups(self._path, self._disk, self._engine)

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        return self._engine.names()

    def look(self, topic: str) -> Sight | None:
        found = self._engine.find(topic)
        if found is None:
            return None
        listing = found.segments(strong=self._strong)
        segments = [_segment(held) for held in listing.segments]
        state = found.state()
        return Sight(
            topic,
            found.epoch,
            1,
            listing.head_seq + 1,
            listing.earliest_seq,
            listing.evict_floor,
            segments,
            weight(listing.head_seq - listing.tail_from_seq, state.count, state.bytes),
        )

    def _topic(self, name: str) -> Topic:
        return self._engine.topic(name, create=False)

    def seek(self, topic: str, ts_ms: int) -> int:
        return self._topic(topic).seek(ts_ms)

    def lost(self, topic: str, first: int) -> Lost | None:
        return _lost(topic, self._topic(topic).scan(first - 1, first - 1).gap)

    def settle(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[Lost, ...]]:
        scan = self._topic(topic).scan(first - 1, stop - 1)
        for batch in scan.batches():
            raise Corrupt(self._path, pos=0, reason=f"{topic}: {batch.num_rows} records where none should be")
        lost = _losses(topic, scan)
        return share(scan.counts, lost, first, stop), lost

    def dropped_at(self, topic: str, epoch: int) -> int | None:
        after = 0
        while rows := self._engine.gaps(topic, behind=after):
            for row in rows:
                if row.cause == "drop" and row.topic_id == epoch:
                    return row.last
            if rows[-1].seq <= after:  # the rest is not written yet, and has no seqs
                break
            after = rows[-1].seq
        return None

    def inline(self, topic: str, first: int, stop: int) -> Inlined | None:
        scan = self._topic(topic).scan(first - 1, stop - 1)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            for batch in scan.batches():
                writer.write_batch(batch)
        lost = _losses(topic, scan)
        counts = scan.counts._replace(rows=0) if scan.counts.rows else share(scan.counts, lost, first, stop)
        return Inlined(sink.getvalue().to_pybytes(), counts, lost)

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, stretch: Stretch, wanted: Wanted, *, verify: bool) -> Iterator[Found]:  # noqa: ARG002
        """Records of a stretch, a few megabytes at a time."""
        if stretch.file is None:
            yield from self._again(stretch)
            return
        maps = Maps(1)  # of its own: what another task mapped may be another directory's by now
        home = Home(self._disk, directory(self._path, stretch.epoch), stretch.epoch, maps)
        data, index = home.open(stretch.file.base)
        entries = (stretch.file.stop - stretch.file.base) * idx.ENTRY_BYTES
        if data.size < stretch.file.size or len(index) < entries:
            yield from self._again(stretch)
            return
        yield from _of_file(home, stretch, verify=verify)

    def _again(self, stretch: Stretch, first: int | None = None) -> Iterator[Found]:
        """The same seqs, or those from `first` on, in the directory as it is now."""
        at = stretch.first if first is None else first
        try:
            reader = self._opened()
        except NotFound as error:
            raise Unavailable(
                f"{error}. This is an executor: every one of them has to see the path that the driver sees; mount it "
                "there, or read from a server"
            ) from error
        with reader:
            topic = reader.find(stretch.topic)
            if topic is None or topic.epoch != stretch.epoch:
                last = stretch.stop - 1
                lost = Lost(stretch.topic, at, last, "recreated" if topic else "dropped", 1, 0)
                yield Found(None, Counts(evicted=stretch.stop - at), (lost,))
                return
            yield from _as_records(topic, stretch, at)


def _tried(look: Callable[[], T]) -> T:
    """What a look at the directory finds. A writer that makes one checkpoint after the other can be faster than a busy
    machine looks, and a task that fails for that has read for nothing."""
    for _ in range(_TRIES - 1):
        with suppress(Unavailable):
            return look()
    return look()


def _segment(held: Held) -> Segment:
    entries: list[np.ndarray[tuple[int], np.dtype[np.void]]] = []

    def at(seq: int) -> int:
        if seq >= held.stop:
            return held.size
        if not entries:
            content = held.content("idx")
            assert content is not None, "a segment has an index"
            entries.append(idx.read(content)["frame_offset"])
        return int(entries[0][seq - held.base])

    def dead() -> Bools | None:
        content = held.content("del")
        if content is None:
            return None
        found = np.zeros(held.records, bool)
        found[deletions.decode(content).seqs() - held.base] = True
        return found

    return Segment(held.base, held.stop, held.size, held.sealed, at, dead)


def _lost(topic: str, gap: topics.Gap | None) -> Lost | None:
    if gap is None:
        return None
    return Lost(topic, gap.gap_from, gap.gap_to, gap.reason, gap.earliest_seq, gap.head_seq)


def _losses(topic: str, scan: topics.Pass) -> tuple[Lost, ...]:
    return tuple(lost for gap in scan.gaps if (lost := _lost(topic, gap)) is not None)


def _of_file(home: Home, stretch: Stretch, *, verify: bool) -> Iterator[Found]:
    file = stretch.file
    assert file is not None, "asked of a stretch with a file"
    segment = StoredSegment(
        home,
        file.base,
        file.stop,
        file.size,
        live=file.stop - file.base,
        live_bytes=0,
        first_ts=0,
        last_ts=0,
        sealed=file.sealed,
    )
    if not verify:
        segment.trust()
    dead, at = stretch.dead(), stretch.first
    while at < stretch.stop:
        chunk = segment.look(at, stretch.stop, CHUNK_BYTES)()
        if chunk.fault is not None:
            reason = f"seqs {chunk.fault.seq} to {chunk.fault.resume - 1} cannot be read, {chunk.fault.reason}"
            raise Corrupt(home.path(file.base, ".data"), pos=chunk.fault.pos, reason=reason)
        rows, until = chunk.rows, min(chunk.next_seq, stretch.stop)
        holes = until - at - len(rows)
        if holes and holes != int(
            (segment.entries()["flags"][at - file.base : until - file.base] & idx.HOLE > 0).sum()
        ):
            reason = f"seqs {at} to {until - 1} are not all where their index says"
            raise Corrupt(home.path(file.base, ".data"), pos=0, reason=reason)
        deleted = 0
        if dead is not None:
            gone = dead[rows.seq - stretch.first]
            deleted = int(gone.sum())
            rows = rows.pick(np.flatnonzero(~gone)) if deleted else rows
        yield Found(rows if len(rows) else None, Counts(deleted=deleted, holes=holes))
        at = until


def _as_records(topic: Topic, stretch: Stretch, at: int) -> Iterator[Found]:
    """The stretch from `at` on through the engine, with what was lost or deleted since it was planned."""
    dead = stretch.dead()
    while at < stretch.stop:
        scan = topic.scan(at - 1, stretch.stop - 1)
        if scan.head_seq < stretch.stop - 1:
            raise Unavailable(
                f"{topic.name} ends at seq {scan.head_seq} here and at {stretch.stop - 1} where the query was planned; "
                "nothing was written, run it again when this executor sees the same directory"
            )
        batches = scan.batches()
        first = next(batches, None)
        if first is None and scan.next_from_seq >= stretch.stop - 1:
            lost = _losses(topic.name, scan)
            clipped = tuple(_clipped(each, stretch.stop) for each in lost)
            yield Found(None, share(scan.counts, lost, at, stretch.stop), clipped)
            return
        hidden = 0
        for batch in chain([first] if first is not None else [], batches):
            kept = batch
            if dead is not None:
                kept = batch.filter(pa.array(~dead[batch.column("seq").to_numpy() - stretch.first]))
                hidden += batch.num_rows - kept.num_rows
            yield Found(kept if kept.num_rows else None, Counts())
        counts = scan.counts._replace(rows=0)
        yield Found(None, counts + Counts(deleted=hidden), _losses(topic.name, scan))
        at = scan.next_from_seq + 1


def _clipped(lost: Lost, stop: int) -> Lost:
    return Lost(lost.topic, lost.first, min(lost.last, stop - 1), lost.cause, lost.earliest, lost.head)
