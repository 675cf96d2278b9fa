"""[shell] Compaction: keep the newest record of every key over the whole sealed run.

    pass 1   key → newest seq, over all sealed segments
    pass 2   per segment that holds something superseded: copy the survivors with their seqs and
             times into a new file, swap it in, rebuild its index

Records without a key survive. Seqs never change: what is gone is a hole. The checkpoint says
which segment is being copied or swapped; an interrupted run is safe at every step and starts
again from what it finds, so the segments already done have nothing left to drop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tidelog.commitlog import manifest
from tidelog.commitlog.clean import Running, candidates, drop_oldest, load_checkpoint, save_checkpoint
from tidelog.commitlog.codec import Shape, glue, rewrite
from tidelog.commitlog.read import corrupt
from tidelog.commitlog.recovery import reload
from tidelog.commitlog.segment import SWAPPED, Mapped, Sealed
from tidelog.commitlog.state import State
from tidelog.commitlog.swap import abandon, commit, prepare
from tidelog.disk.interrupts import deferred
from tidelog.formats import rows as columns
from tidelog.formats.rows import Rows
from tidelog.types import Ints, Record

Key = Callable[[Record], bytes | None]
_CHUNK_BYTES = 8 << 20


@dataclass(slots=True)
class Compacted:
    """What a compaction did."""

    segments: int = 0  # rewritten
    dropped: int = 0  # records superseded, or tombstones past their time
    kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    resumed_at: int | None = None  # the segment that an interrupted run was working on


def compact(
    state: State,
    key: Key,
    *,
    is_tombstone: Callable[[Record], bool] | None,
    keep_tombstones_ms: int,
    progress: Callable[[int, int], None] | None,
) -> Compacted:
    """Drop superseded records of the sealed segments. A damaged segment stops it: nothing is dropped on a guess."""
    with state.turn:
        with state.mutex:
            state.check_writable()
        done = Compacted()
        before = load_checkpoint(state)
        if before is not None and before.running is not None:
            done.resumed_at = before.running[0]
        horizon_us = state.clock.now_us() - keep_tombstones_ms * 1000
        newest, dead = _survey(state, key, is_tombstone, horizon_us)
        segments = list(state.sealed)
        for number, segment in enumerate(segments):
            if progress is not None:
                progress(number, len(segments))
            _compact_one(state, segment, key, newest, dead, done)
        with state.mutex:
            _drop_empty_front(state)
        if segments:
            _checkpoint(state, cleaned=segments[-1].stop, running=None)
        if progress is not None:
            progress(len(segments), len(segments))
        return done


def _chunks(state: State, segment: Sealed) -> list[Rows]:
    found, seq = [], segment.base
    with state.mutex:
        shape = segment.shape()
    while seq < segment.stop:
        chunk = segment.read(shape, seq, segment.stop, _CHUNK_BYTES)
        if chunk.fault is not None:
            raise corrupt(state, segment, chunk.fault)
        found.append(chunk.rows)
        seq = chunk.next_seq
    return found


def _survey(
    state: State, key: Key, is_tombstone: Callable[[Record], bool] | None, horizon_us: int
) -> tuple[dict[bytes, int], set[int]]:
    newest: dict[bytes, int] = {}
    tombstones: dict[bytes, int] = {}
    with state.mutex:
        youngest = {candidate.base: candidate.newest_us for candidate in candidates(state)}
    for segment in state.sealed:
        for rows in _chunks(state, segment):
            for record in columns.records(rows):
                name = key(record)
                if name is None:
                    continue
                newest[name] = record.seq
                # Only the newest word on a key counts: a tombstone that was written over is an ordinary old record.
                written_us = record.ts_us or youngest[segment.base]
                if is_tombstone is not None and written_us < horizon_us and is_tombstone(record):
                    tombstones[name] = record.seq
                else:
                    tombstones.pop(name, None)
    return newest, set(tombstones.values())


@deferred
def _compact_one(
    state: State, segment: Sealed, key: Key, newest: dict[bytes, int], dead: set[int], done: Compacted
) -> None:
    survivors: list[Rows] = []
    total = kept = 0
    for rows in _chunks(state, segment):
        which = [
            number
            for number, record in enumerate(columns.records(rows))
            if (name := key(record)) is None or (newest[name] == record.seq and record.seq not in dead)
        ]
        total += len(rows)
        kept += len(which)
        picked: Ints = np.array(which, np.int64)
        survivors.append(rows.pick(picked))
    done.bytes_before += segment.size
    done.kept += kept
    if kept == total:
        done.bytes_after += segment.size
        return
    codec, base = state.codec, segment.base
    _checkpoint(state, running=(base, "copy"))
    fresh = glue([rewrite(codec, rows) for rows in survivors])
    sides, _ = codec.sides(fresh, 0, base, codec.first_mark(base))
    sides = codec.fill(sides, base, segment.stop, len(fresh.buf))
    whole = Mapped(memoryview(fresh.buf))
    extra = codec.seal(Shape(base, segment.stop, whole, sides[0], sides))
    try:
        prepare(state.files, base, fresh.buf, sides, extra)
    except OSError as error:
        raise state.latch.refused(error, f"copying what stays of segment {base}") from error
    _checkpoint(state, running=(base, "swap"))
    with state.mutex:  # a reader sees the old files or the new ones
        segment.sealed_bytes = min(segment.sealed_bytes, len(fresh.buf))
        try:
            manifest.save(state)
        except OSError as error:
            abandon(state.files, base)
            raise state.latch.refused(error, f"swapping in the compacted segment {base}") from error
        try:
            commit(state.files, base)
        except OSError as error:
            what = f"swapping in the compacted segment {base}"
            if codec.truths and state.disk.stat(state.files.data(base) + SWAPPED) is None:
                # The new data is in place and a side that cannot be derived may not be: the next open finishes it, and
                # until then the sides that belong to the data are the ones in memory.
                segment.forget()
                segment.override, segment.size = sides, len(fresh.buf)
                step = state.latch.trip if 0 in codec.truths else state.latch.refused
                raise step(error, what) from error
            if 0 in codec.truths:
                raise state.latch.trip(error, what) from error
            reload(segment)
            abandon(state.files, base)
            raise state.latch.refused(error, what) from error
        segment.size, segment.side_bytes, segment.extra = len(fresh.buf), sum(map(len, sides)), extra
        segment.override = None
        segment.forget()  # a reader that still holds the old bytes must not say that these were checked
    done.segments += 1
    done.dropped += total - kept
    done.bytes_after += segment.size


def _drop_empty_front(state: State) -> None:
    """Segments at the front that hold nothing any more go whole; the ones behind keep their names and holes."""
    count = 0
    for segment in state.sealed:
        if segment.size or segment.lost:
            break
        count += 1
    drop_oldest(state, count, "compaction left nothing in them")


def _checkpoint(state: State, *, cleaned: int | None = None, running: Running | None) -> None:
    try:
        save_checkpoint(state, cleaned=cleaned, running=running)
    except OSError as error:
        raise state.latch.refused(error, "writing the cleaner's checkpoint") from error
