"""[shell] Dropping old segments, and the cleaner's checkpoint that says how far cleaning has come.

[policy] Retention: which sealed segments may go. Decides, never deletes.

Rules, in order of authority:
  1. A segment that reaches past the high watermark, or past what a consumer has committed, is
     kept, whatever the limits say; and so is every segment behind it.
  2. The active segment is never dropped, so at least one segment remains.
  3. Segments leave oldest first and without gaps, so the lowest seq only ever rises.
  4. Age and size are independent; breaking either is enough.

[shell] Compaction: keep the newest record of every key over the whole sealed run.

    pass 1   key → newest seq, over all sealed segments
    pass 2   per segment that holds something superseded: copy the survivors with their seqs and
             times into a new file, swap it in, rebuild its index

Records without a key survive. Seqs never change: what is gone is a hole. The checkpoint says
which segment is being copied or swapped; an interrupted run is safe at every step and starts
again from what it finds, so the segments already done have nothing left to drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tidelog.commitlog import log_state
from tidelog.commitlog.append import roll_segment
from tidelog.commitlog.codec import SegmentContent, concat_buffers, reencode
from tidelog.commitlog.codecs import rustlog_layout
from tidelog.commitlog.codecs.rustlog_layout import CleanerCheckpoint
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.read import corrupt_error
from tidelog.commitlog.recovery import reload_segment
from tidelog.commitlog.segment import (
    REPLACEMENT_SUFFIX,
    MmapReader,
    SealedSegment,
    abandon_replacement,
    commit_replacement,
    created_us,
    prepare_replacement,
)
from tidelog.disk.durability import read_file, replace_file, sync_directory
from tidelog.disk.interface import join
from tidelog.disk.interrupts import defer_signals
from tidelog.errors import BadInput, Corrupt
from tidelog.formats import rows as columns
from tidelog.formats.rows import Rows
from tidelog.types import Ints, Record


@dataclass(frozen=True, slots=True)
class RetentionCandidate:
    """What the policy needs to know of a sealed segment; it never sees the files."""

    base: int
    stop: int
    size_bytes: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    drop_count: int  # how many segments, counted from the oldest
    reason: str


def decide_retention(
    candidates: Sequence[RetentionCandidate],
    *,
    now_us: int,
    keep_ms: int | None,
    keep_bytes: int | None,
    high_watermark: int,
    committed: int | None,
    active_bytes: int = 0,
) -> RetentionDecision:
    """How many of the oldest segments break a limit and are protected by nothing."""
    total = sum(candidate.size_bytes for candidate in candidates) + active_bytes
    horizon_us = None if keep_ms is None else now_us - keep_ms * 1000
    for count, candidate in enumerate(candidates):
        too_old = horizon_us is not None and candidate.newest_us < horizon_us
        too_big = keep_bytes is not None and total > keep_bytes
        if not (too_old or too_big):
            return RetentionDecision(count, "within limits")
        if candidate.stop > high_watermark:
            return RetentionDecision(
                count, f"segment {candidate.base} reaches past the high watermark {high_watermark}"
            )
        if committed is not None and candidate.stop > committed:
            return RetentionDecision(count, f"a consumer has committed only {committed} of segment {candidate.base}")
        total -= candidate.size_bytes
    return RetentionDecision(len(candidates), "every sealed segment was over the limits")


CleanerStep = tuple[int, Literal["copy", "swap"]]

CHECKPOINT_FILE = ".cleaner_checkpoint"


@dataclass(frozen=True, slots=True)
class RetentionResult:
    """What a retention pass did."""

    segments: int
    records: int  # seqs that left; compaction may have emptied some of them before
    bytes: int
    lowest: int
    reason: str  # why it stopped where it did


def load_checkpoint(state: LogState) -> CleanerCheckpoint | None:
    """The cleaner's state; None where there is none or it cannot be read (cleaning then starts anew, safely)."""
    text = read_file(state.disk, join(state.path, CHECKPOINT_FILE))
    if text is None:
        return None
    try:
        return rustlog_layout.decode_cleaner_checkpoint(text)
    except Corrupt:
        return None


def save_checkpoint(
    state: LogState, *, cleaned: int | None = None, horizon_ms: int | None = None, running: CleanerStep | None = None
) -> CleanerCheckpoint:
    """Write the cleaner's state atomically. Progress never goes back."""
    old = load_checkpoint(state) or CleanerCheckpoint(0, 0, None, 0)
    new = CleanerCheckpoint(
        max(old.last_cleaned_seq, cleaned or 0),
        old.retention_horizon_ms if horizon_ms is None else max(horizon_ms, old.retention_horizon_ms),
        running,
        state.clock.now_us(),
    )
    replace_file(state.disk, join(state.path, CHECKPOINT_FILE), rustlog_layout.encode_cleaner_checkpoint(new))
    return new


def retention_candidates(state: LogState) -> list[RetentionCandidate]:
    """The sealed segments as the policy sees them. Where records carry no time, a segment is as young as the
    birth of the one behind it: nothing in it is younger."""
    found = []
    bases = [*(segment.base for segment in state.sealed), state.active.base]
    for segment, behind in zip(state.sealed, bases[1:], strict=True):
        times = segment.time_range()
        if times is not None:
            newest = times[1]
        elif state.codec.created_suffix is not None:
            newest = created_us(state.files, behind) or 0
        elif segment.lost_reason:
            # Its records do not tell: as young as the next segment that has any, so that the loss stays visible.
            newest = state.clock.now_us()
        elif segment.size == 0:
            newest = 0  # compaction left no record in it
        else:
            # Damaged, so its records do not tell: as young as its file, which is never too old.
            stat = state.disk.stat(state.files.data_path(segment.base))
            newest = stat.modified_ms * 1000 if stat else 0
        found.append(RetentionCandidate(segment.base, segment.stop, segment.size + segment.side_bytes, newest))
    return found


def apply_retention(
    state: LogState,
    *,
    keep_ms: int | None,
    keep_bytes: int | None,
    high_watermark: int | None,
    committed: Iterable[int],
) -> RetentionResult:
    """Drop what the policy says, oldest first, each durably before the next; then write the checkpoint."""
    for name, value in (("keep_ms", keep_ms), ("keep_bytes", keep_bytes)):
        if value is not None and value < 0:
            raise BadInput(f"{name} is {value}, it must not be negative; nothing was dropped")
    with state.writer_lock, state.mutex:
        state.check_writable()
        now_us = state.clock.now_us()
        mark = state.durable if high_watermark is None else min(high_watermark, state.durable)
        decision = decide_retention(
            retention_candidates(state),
            now_us=now_us,
            keep_ms=keep_ms,
            keep_bytes=keep_bytes,
            high_watermark=mark,
            committed=min(committed, default=None),
            active_bytes=state.active.size + state.active.side_bytes,
        )
        done = drop_segments(state, decision.drop_count, decision.reason)
        if done.segments:
            horizon_ms = max(now_us // 1000 - keep_ms, 0) if keep_ms is not None else None
            _save_progress(state, cleaned=mark, horizon_ms=horizon_ms)
        return done


def remove_expired(state: LogState, age_ms: int) -> RetentionResult:
    """Drop every leading segment whose records are all older than this, the active one too: numbering goes on. By age
    alone, as the laminar design has it: what consumers have committed does not hold it back, `retain` does that."""
    if age_ms < 0:
        raise BadInput(f"the age is {age_ms} ms, it must not be negative; nothing was dropped")
    with state.writer_lock, state.mutex:
        state.check_writable()
        horizon_us = state.clock.now_us() - age_ms * 1000
        expired = 0
        for candidate in retention_candidates(state):
            if candidate.newest_us >= horizon_us:
                break
            expired += 1
        active = state.active
        if expired == len(state.sealed) and active.size and active.last_write_us < horizon_us:
            roll_segment(state, lenient=True)  # the next seq lives on in the name of the new, empty segment
            expired += 1
        done = drop_segments(state, expired, "segments past the given age were dropped")
        if done.segments:
            _save_progress(state, cleaned=state.lowest, horizon_ms=max(horizon_us // 1000, 0))
        return done


def drop_below(state: LogState, seq: int) -> RetentionResult:
    """Drop every leading sealed segment that ends at or before `seq`."""
    with state.writer_lock, state.mutex:
        state.check_writable()
        mark = min(seq, state.durable)
        over = next((number for number, segment in enumerate(state.sealed) if segment.stop > mark), len(state.sealed))
        return drop_segments(state, over, f"what lies below seq {mark} was dropped")


def drop_segments(state: LogState, count: int, reason: str) -> RetentionResult:
    records = size = 0
    if state.directory_unsynced:
        try:
            sync_directory(state.disk, state.path)
        except OSError as error:
            raise state.latch.retryable_error(error, "syncing an earlier removal") from error
        state.directory_unsynced = False
    if count:
        going = [segment.base for segment in state.sealed[:count]]
        try:
            log_state.save_manifest(state, sealed=state.sealed[count:], removing=going)
        except OSError as error:
            raise state.latch.retryable_error(error, f"dropping segment {going[0]}") from error
    for _ in range(count):
        segment = state.sealed[0]
        try:
            state.files.remove_segment(segment.base)
        except OSError as error:
            if state.disk.stat(state.files.segment_paths(segment.base)[0]) is None:
                del state.sealed[0]  # it does not count as a segment any more
                state.directory_unsynced = True  # but a power cut could bring it back
            raise state.latch.retryable_error(error, f"dropping segment {segment.base}") from error
        # After the files: a reader that still sees the segment finds it, one that does not is told the new range.
        del state.sealed[0]
        records += segment.stop - segment.base
        size += segment.size + segment.side_bytes
    return RetentionResult(count, records, size, state.lowest, reason)


def _save_progress(state: LogState, *, cleaned: int, horizon_ms: int | None) -> None:
    try:
        save_checkpoint(state, cleaned=cleaned, horizon_ms=horizon_ms)
    except OSError as error:
        raise state.latch.retryable_error(error, "writing the cleaner's checkpoint") from error


KeyFunction = Callable[[Record], bytes | None]
_COMPACTION_CHUNK_BYTES = 8 << 20


@dataclass(slots=True)
class CompactionResult:
    """What a compaction did."""

    segments: int = 0  # rewritten
    dropped: int = 0  # records superseded, or tombstones past their time
    kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    resumed_at: int | None = None  # the segment that an interrupted run was working on


def compact_segments(
    state: LogState,
    key: KeyFunction,
    *,
    is_tombstone: Callable[[Record], bool] | None,
    keep_tombstones_ms: int,
    progress: Callable[[int, int], None] | None,
) -> CompactionResult:
    """Drop superseded records of the sealed segments. A damaged segment stops it: nothing is dropped on a guess."""
    with state.writer_lock:
        with state.mutex:
            state.check_writable()
        done = CompactionResult()
        before = load_checkpoint(state)
        if before is not None and before.running is not None:
            done.resumed_at = before.running[0]
        horizon_us = state.clock.now_us() - keep_tombstones_ms * 1000
        newest, dead = _newest_by_key(state, key, is_tombstone, horizon_us)
        segments = list(state.sealed)
        for number, segment in enumerate(segments):
            if progress is not None:
                progress(number, len(segments))
            _compact_segment(state, segment, key, newest, dead, done)
        with state.mutex:
            _drop_empty_segments(state)
        if segments:
            _save_step(state, cleaned=segments[-1].stop, running=None)
        if progress is not None:
            progress(len(segments), len(segments))
        return done


def _read_rows(state: LogState, segment: SealedSegment) -> list[Rows]:
    found, seq = [], segment.base
    with state.mutex:
        shape = segment.content()
    while seq < segment.stop:
        chunk = segment.read(shape, seq, segment.stop, _COMPACTION_CHUNK_BYTES)
        if chunk.fault is not None:
            raise corrupt_error(state, segment, chunk.fault)
        found.append(chunk.rows)
        seq = chunk.next_seq
    return found


def _newest_by_key(
    state: LogState, key: KeyFunction, is_tombstone: Callable[[Record], bool] | None, horizon_us: int
) -> tuple[dict[bytes, int], set[int]]:
    newest: dict[bytes, int] = {}
    tombstones: dict[bytes, int] = {}
    with state.mutex:
        youngest = {candidate.base: candidate.newest_us for candidate in retention_candidates(state)}
    for segment in state.sealed:
        for rows in _read_rows(state, segment):
            for record in columns.iter_records(rows):
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


@defer_signals
def _compact_segment(
    state: LogState,
    segment: SealedSegment,
    key: KeyFunction,
    newest: dict[bytes, int],
    expired_tombstones: set[int],
    result: CompactionResult,
) -> None:
    survivors: list[Rows] = []
    total = kept = 0
    for rows in _read_rows(state, segment):
        which = [
            number
            for number, record in enumerate(columns.iter_records(rows))
            if (name := key(record)) is None or (newest[name] == record.seq and record.seq not in expired_tombstones)
        ]
        total += len(rows)
        kept += len(which)
        picked: Ints = np.array(which, np.int64)
        survivors.append(rows.take(picked))
    result.bytes_before += segment.size
    result.kept += kept
    if kept == total:
        result.bytes_after += segment.size
        return
    codec, base = state.codec, segment.base
    _save_step(state, running=(base, "copy"))
    fresh = concat_buffers([reencode(codec, rows) for rows in survivors])
    sides, _ = codec.encode_sides(fresh, 0, base, codec.initial_side_state(base))
    sides = codec.fill_holes(sides, base, segment.stop, len(fresh.buf))
    whole = MmapReader(memoryview(fresh.buf))
    extra = codec.build_footer(SegmentContent(base, segment.stop, whole, sides[0], sides))
    try:
        prepare_replacement(state.files, base, fresh.buf, sides, extra)
    except OSError as error:
        raise state.latch.retryable_error(error, f"copying what stays of segment {base}") from error
    _save_step(state, running=(base, "swap"))
    with state.mutex:  # a reader sees the old files or the new ones
        segment.complete_bytes = min(segment.complete_bytes, len(fresh.buf))
        try:
            log_state.save_manifest(state)
        except OSError as error:
            abandon_replacement(state.files, base)
            raise state.latch.retryable_error(error, f"swapping in the compacted segment {base}") from error
        try:
            commit_replacement(state.files, base)
        except OSError as error:
            what = f"swapping in the compacted segment {base}"
            if codec.authoritative_sides and state.disk.stat(state.files.data_path(base) + REPLACEMENT_SUFFIX) is None:
                # The new data is in place and a side that cannot be derived may not be: the next open finishes it, and
                # until then the sides that belong to the data are the ones in memory.
                segment.reset()
                segment.rebuilt_sides, segment.size = sides, len(fresh.buf)
                step = state.latch.trip if 0 in codec.authoritative_sides else state.latch.retryable_error
                raise step(error, what) from error
            if 0 in codec.authoritative_sides:
                raise state.latch.trip(error, what) from error
            reload_segment(segment)
            abandon_replacement(state.files, base)
            raise state.latch.retryable_error(error, what) from error
        segment.size, segment.side_bytes, segment.footer = len(fresh.buf), sum(map(len, sides)), extra
        segment.rebuilt_sides = None
        segment.reset()  # a reader that still holds the old bytes must not say that these were checked
    result.segments += 1
    result.dropped += total - kept
    result.bytes_after += segment.size


def _drop_empty_segments(state: LogState) -> None:
    """Segments at the front that hold nothing any more go whole; the ones behind keep their names and holes."""
    count = 0
    for segment in state.sealed:
        if segment.size or segment.lost_reason:
            break
        count += 1
    drop_segments(state, count, "compaction left nothing in them")


def _save_step(state: LogState, *, cleaned: int | None = None, running: CleanerStep | None) -> None:
    try:
        save_checkpoint(state, cleaned=cleaned, running=running)
    except OSError as error:
        raise state.latch.retryable_error(error, "writing the cleaner's checkpoint") from error
