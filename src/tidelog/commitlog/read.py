"""Read: find the segment, read through its codec, continue in the next one. Damage raises unless it is skipped.

A reader works on a snapshot of the segment list. When retention removes the next records of a reader, the reader gets
OutOfRange and is not moved forward silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tidelog.commitlog.codec import Chunk, Fault
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.recovery import RecoveredLog, read_directory, recover_for_reading
from tidelog.commitlog.segment import ActiveSegment, SealedSegment, missing_active_segment
from tidelog.commitlog.vectorized import count_leading_true
from tidelog.errors import BadInput, Corrupt, OutOfRange, SeqMissing
from tidelog.formats import rows as columns
from tidelog.formats.rows import Rows
from tidelog.types import Record

READ_CHUNK_BYTES = 4 << 20


class Page(NamedTuple):
    """One bounded read. `next_seq` is the start of the next one, also when the page is empty."""

    records: list[Record]
    next_seq: int


def read_one(state: LogState, seq: int) -> Record:
    """Return the record at `seq`; raise OutOfRange, SeqMissing or Corrupt where there is none."""
    segment, chunk = _read_chunk(state, seq, seq + 1, 1)
    if chunk.fault is not None:
        raise corrupt_error(state, segment, chunk.fault)
    if not len(chunk.rows):
        raise SeqMissing(state.path, asked=seq, next_seq=seq + 1)
    return next(columns.iter_records(chunk.rows))


def corrupt_error(state: LogState, segment: SealedSegment | ActiveSegment, fault: Fault) -> Corrupt:
    error = Corrupt(
        state.files.data_path(segment.base),
        pos=fault.pos,
        reason=f"seqs {fault.seq} to {fault.resume - 1} cannot be read, {fault.reason}",
        next_step=f"the log goes on at seq {fault.resume}; run `tidelog log verify`, or read with skip_damage",
    )
    error.seq, error.resume = fault.seq, fault.resume
    return error


def read_batches(
    state: LogState,
    first: int | None,
    stop: int | None,
    *,
    bytes_max: int = READ_CHUNK_BYTES,
    skip_damage: bool = False,
) -> Iterator[Rows]:
    """Iterate over the records of [first, stop) as columns, up to the end of the log at the time of the call."""
    seq, end = _bounds(state, first, stop)
    while seq < end:
        segment, chunk = _read_chunk(state, seq, end, bytes_max)
        if len(chunk.rows):
            yield chunk.rows
        if chunk.fault is None:
            assert chunk.next_seq > seq, "a read makes progress"
            seq = chunk.next_seq
        elif skip_damage:
            state.damage_skipped += 1
            seq = max(chunk.fault.resume, seq + 1)
        else:
            raise corrupt_error(state, segment, chunk.fault)
    if stop is None and state.report.has_unexplained_tail and not state.writable:
        _raise_unexplained_tail(state, skip_damage=skip_damage)


def _raise_unexplained_tail(state: LogState, *, skip_damage: bool) -> None:
    """Raise at the end of a log whose last bytes may be records of another program: the log may continue there."""
    if skip_damage:
        state.damage_skipped += 1
        return
    report, active = state.report, state.active
    error = Corrupt(
        state.files.data_path(active.base),
        pos=active.size,
        reason=f"{report.cut_bytes} bytes from seq {active.next_seq} on cannot be read, {report.cut_reason}",
        next_step="all records before them were read; run `tidelog log verify`, or read with skip_damage",
    )
    error.seq = error.resume = active.next_seq
    raise error


def _read_chunk(state: LogState, seq: int, end: int, bytes_max: int) -> tuple[SealedSegment | ActiveSegment, Chunk]:
    """Read once from the segment of `seq`. A sealed one does not change, so it is read without the lock."""
    segment: SealedSegment | ActiveSegment
    with state.mutex:
        state.check_open()
        state.files.counters.reads += 1
        segment = state.segment_at(seq)
        content = segment.content()
        chunk: Chunk | None = None
        if isinstance(segment, ActiveSegment):
            chunk = state.codec.read(content, seq, min(end, segment.next_seq), bytes_max)
    if chunk is None:
        assert isinstance(segment, SealedSegment), "the active one was read under the lock"
        chunk = segment.read(content, seq, min(end, segment.stop), bytes_max)
    if (chunk.fault is not None or not len(chunk.rows)) and not state.writable and _reload_if_changed(state):
        # The writer replaced, dropped or truncated the segment since it was opened: this is neither damage nor a hole.
        return _read_chunk(state, seq, end, bytes_max)
    return segment, chunk


def _reload_if_changed(state: LogState) -> bool:
    """Recover again where a writer has changed the directory; False where it is unchanged."""
    with state.mutex:
        state.check_open()
        if state.directory_snapshot is None or read_directory(state.files) == state.directory_snapshot:
            return False
        for segment in state.sealed:
            segment.reset()
        recovered, state.directory_snapshot = recover_for_reading(state.files, state.latch, verify=False)
        apply_recovered(state, recovered)
        return True


def apply_recovered(state: LogState, recovered: RecoveredLog) -> None:
    """Replace the segments of an open log by newly recovered ones."""
    state.active.close()
    state.sealed, state.report = recovered.sealed, recovered.report
    state.count_rebuilds()
    state.active = recovered.active or missing_active_segment(state.files, state.latch, recovered.next_base or 0)
    state.durable = state.active.next_seq


def _bounds(state: LogState, first: int | None, stop: int | None) -> tuple[int, int]:
    with state.mutex:
        state.check_open()
        lowest, highest = state.lowest, state.highest
    seq = lowest if first is None else first
    if not lowest <= seq <= highest:
        raise OutOfRange(state.path, asked=seq, lowest=lowest, highest=highest)
    return seq, highest if stop is None else min(stop, highest)


def read_page(state: LogState, first: int, *, limit: int | None, bytes_max: int | None, skip_damage: bool) -> Page:
    """Return records from `first` on: at most `limit`, about `bytes_max` of data but at least one record."""
    if limit is not None and limit < 0:
        raise BadInput(f"limit is {limit}, it must not be negative")
    bytes_max = READ_CHUNK_BYTES if bytes_max is None else bytes_max
    records: list[Record] = []
    seq, end = _bounds(state, first, None)
    if limit == 0 or bytes_max <= 0:
        return Page(records, seq)
    used = 0
    for rows in read_batches(state, seq, end, bytes_max=bytes_max, skip_damage=skip_damage):
        sizes = used + np.cumsum(rows.data.size)
        take = len(rows) if limit is None else min(len(rows), limit - len(records))
        take = min(take, max(int(np.searchsorted(sizes, bytes_max, "right")), 0 if records else 1))
        records += columns.iter_records(rows.slice(0, take))
        if take < len(rows) or (limit is not None and len(records) >= limit):
            return Page(records, records[-1].seq + 1 if records else seq)
        used = int(sizes[-1])
        if used >= bytes_max:
            return Page(records, records[-1].seq + 1)
    return Page(records, end)


def seek_time(state: LogState, ts_us: int) -> int:
    """Return the first seq whose record is not older than `ts_us`; the next seq where all are older."""
    state.check_open()
    if state.codec.created_suffix is not None:
        raise BadInput(f"the {state.codec.name} layout stores no time per record; read by seq instead")
    with state.mutex:
        state.check_open()
        highest, first = state.highest, state.active.base
        # Segments that compaction emptied have no times and no record to find.
        timed = [(segment.base, times[1]) for segment in state.sealed if (times := segment.time_range()) is not None]
    # Not by bisection: the times in a log of another program may step back.
    first = next((base for base, newest in timed if newest >= ts_us), first)
    for rows in read_batches(state, first, None, skip_damage=True):
        older = count_leading_true(rows.ts_us < ts_us)
        if older < len(rows):
            return int(rows.seq[older])
    return highest
