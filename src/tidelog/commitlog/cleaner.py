"""Removal of records: retention, compaction with the checkpoint that stores their progress, and truncate.

Rules of retention (`decide_retention` decides, `drop_segments` removes), in order of authority:
  1. A segment that reaches past the high watermark or past a committed offset is kept, with every segment after it.
  2. The active segment is never dropped.
  3. Segments are dropped oldest first and without gaps, so the lowest seq only rises.
  4. Age and size are independent; passing either limit is enough.

Compaction keeps the newest record of every key in the sealed segments:

    pass 1   key → newest seq, over all sealed segments
    pass 2   for each segment with superseded records: copy the others with their seqs and times into a new file,
             replace the old one, rebuild its index

Records without a key stay. Seqs never change: a removed record leaves a hole. The checkpoint names the segment that is
being copied or replaced; an interrupted run is safe at every step, and the next run starts again from the files.

Truncate removes every record from a seq on. The kept part of the segment that contains the seq is written beside it
first, so a full disk changes nothing. Then later segments are removed, newest first, each durably, and the kept part
replaces the old file (never cut in place: a reader may have it mapped) and becomes the active segment. Its name carries
the numbering, even when it is empty. A crash in between leaves the end somewhere between the seq and the old end, with
every record before it intact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tidelog.commitlog import log_state
from tidelog.commitlog.append import roll_segment, sync_active
from tidelog.commitlog.codec import Fault, SegmentContent, concat_buffers, reencode
from tidelog.commitlog.codecs import rustlog
from tidelog.commitlog.codecs.rustlog import CleanerCheckpoint
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.read import apply_recovered, corrupt_error
from tidelog.commitlog.recovery import RecoveryReport, open_active, recover_log, reload_segment
from tidelog.commitlog.segment import (
    REPLACEMENT_SUFFIX,
    MmapReader,
    SealedSegment,
    abandon_replacement,
    commit_replacement,
    created_us,
    prepare_replacement,
)
from tidelog.disk.durability import DISK_FULL_ERRNOS, SyncFailed, read_file, replace_file, sync_directory
from tidelog.disk.interface import join
from tidelog.disk.process import defer_signals
from tidelog.errors import BadInput, Corrupt, DiskFull, Error, OutOfRange, WriteFailed
from tidelog.formats import rows as columns
from tidelog.formats.rows import Rows
from tidelog.formats.small_files import ManifestEntry
from tidelog.types import Ints, Record


@dataclass(frozen=True, slots=True)
class RetentionCandidate:
    """The facts about a sealed segment that the retention decision needs."""

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
    """Decide how many of the oldest segments are past a limit and unprotected. Removes nothing."""
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
    """The result of a retention pass."""

    segments: int
    records: int  # dropped seqs, including holes of an earlier compaction
    bytes: int
    lowest: int
    reason: str  # why it stopped where it did


def load_checkpoint(state: LogState) -> CleanerCheckpoint | None:
    """Load the cleaner's progress; None where it is missing or unreadable (cleaning then starts again, safely)."""
    text = read_file(state.disk, join(state.path, CHECKPOINT_FILE))
    if text is None:
        return None
    try:
        return rustlog.decode_cleaner_checkpoint(text)
    except Corrupt:
        return None


def save_checkpoint(
    state: LogState, *, cleaned: int | None = None, horizon_ms: int | None = None, running: CleanerStep | None = None
) -> None:
    """Save the cleaner's progress atomically. It never goes back."""
    old = load_checkpoint(state) or CleanerCheckpoint(0, 0, None, 0)
    new = CleanerCheckpoint(
        max(old.last_cleaned_seq, cleaned or 0),
        old.retention_horizon_ms if horizon_ms is None else max(horizon_ms, old.retention_horizon_ms),
        running,
        state.clock.now_us(),
    )
    with state.step("writing the cleaner's checkpoint"):
        replace_file(state.disk, join(state.path, CHECKPOINT_FILE), rustlog.encode_cleaner_checkpoint(new))


def retention_candidates(state: LogState) -> list[RetentionCandidate]:
    """Describe the sealed segments for the decision. Where records have no time, the creation of the next segment is
    the newest time that a record can have."""
    candidates = []
    bases = [*(segment.base for segment in state.sealed), state.active.base]
    for segment, next_base in zip(state.sealed, bases[1:], strict=True):
        times = segment.time_range()
        if times is not None:
            newest = times[1]
        elif state.codec.created_suffix is not None:
            newest = created_us(state.files, next_base) or 0
        elif segment.lost_reason:
            newest = state.clock.now_us()  # unknown: never too old by itself, so that the loss stays visible
        elif segment.size == 0:
            newest = 0  # compaction left no record in it
        else:
            # Damaged, so its record times are unknown: the time of its file is never too old.
            stat = state.disk.stat(state.files.data_path(segment.base))
            newest = stat.modified_ms * 1000 if stat else 0
        candidates.append(RetentionCandidate(segment.base, segment.stop, segment.size + segment.side_bytes, newest))
    return candidates


def apply_retention(
    state: LogState,
    *,
    keep_ms: int | None,
    keep_bytes: int | None,
    high_watermark: int | None,
    committed: Iterable[int],
) -> RetentionResult:
    """Drop the segments that the decision names, oldest first, each durably before the next; save the checkpoint."""
    for name, value in (("keep_ms", keep_ms), ("keep_bytes", keep_bytes)):
        if value is not None and value < 0:
            raise BadInput(f"{name} is {value}, it must not be negative; nothing was dropped")
    with state.writer_lock, state.mutex:
        state.check_writable()
        now_us = state.clock.now_us()
        watermark = state.durable if high_watermark is None else min(high_watermark, state.durable)
        decision = decide_retention(
            retention_candidates(state),
            now_us=now_us,
            keep_ms=keep_ms,
            keep_bytes=keep_bytes,
            high_watermark=watermark,
            committed=min(committed, default=None),
            active_bytes=state.active.size + state.active.side_bytes,
        )
        result = drop_segments(state, decision.drop_count, decision.reason)
        if result.segments:
            horizon_ms = max(now_us // 1000 - keep_ms, 0) if keep_ms is not None else None
            save_checkpoint(state, cleaned=watermark, horizon_ms=horizon_ms)
        return result


def remove_expired(state: LogState, age_ms: int) -> RetentionResult:
    """Drop every leading segment whose records are all older than `age_ms`, the active one too; numbering continues.
    As in laminarmq only age counts: committed offsets protect a segment from `apply_retention`, not from this."""
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
            roll_segment(state, lenient=True)  # the name of the new, empty segment stores the next seq
            expired += 1
        result = drop_segments(state, expired, "segments past the given age were dropped")
        if result.segments:
            save_checkpoint(state, cleaned=state.lowest, horizon_ms=max(horizon_us // 1000, 0))
        return result


def drop_below(state: LogState, seq: int) -> RetentionResult:
    """Drop every leading sealed segment that ends at or before `seq`."""
    with state.writer_lock, state.mutex:
        state.check_writable()
        seq = min(seq, state.durable)
        count = next((number for number, segment in enumerate(state.sealed) if segment.stop > seq), len(state.sealed))
        return drop_segments(state, count, f"segments below seq {seq} were dropped")


def drop_segments(state: LogState, count: int, reason: str) -> RetentionResult:
    """Drop the `count` oldest sealed segments, each durably before the next."""
    records = size = 0
    if state.directory_unsynced:
        with state.step("syncing an earlier removal"):
            sync_directory(state.disk, state.path)
        state.directory_unsynced = False
    if count:
        bases = [segment.base for segment in state.sealed[:count]]
        with state.step(f"dropping segment {bases[0]}"):
            log_state.save_manifest(state, sealed=state.sealed[count:], removing=bases)
    for _ in range(count):
        segment = state.sealed[0]
        with state.step(f"dropping segment {segment.base}"):
            try:
                state.files.remove_segment(segment.base)
            except OSError:
                if state.disk.stat(state.files.segment_paths(segment.base)[0]) is None:
                    del state.sealed[0]  # it does not count as a segment any more
                    state.directory_unsynced = True  # but a power cut could restore it
                raise
        # After the files: a reader that finds no segment gets OutOfRange with the new range.
        del state.sealed[0]
        state.files.counters.segments_dropped += 1
        records += segment.stop - segment.base
        size += segment.size + segment.side_bytes
    return RetentionResult(count, records, size, state.lowest, reason)


KeyFunction = Callable[[Record], bytes | None]
_COMPACTION_CHUNK_BYTES = 8 << 20


@dataclass(slots=True)
class CompactionResult:
    """The result of a compaction."""

    segments: int = 0  # rewritten
    dropped: int = 0  # records superseded, or tombstones past their time
    kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    resumed_at: int | None = None  # the segment that an interrupted run was rewriting


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
        result = CompactionResult()
        before = load_checkpoint(state)
        if before is not None and before.running is not None:
            result.resumed_at = before.running[0]
        horizon_us = state.clock.now_us() - keep_tombstones_ms * 1000
        newest, expired_tombstones = _newest_by_key(state, key, is_tombstone, horizon_us)
        segments = list(state.sealed)
        for number, segment in enumerate(segments):
            if progress is not None:
                progress(number, len(segments))
            _compact_segment(state, segment, key, newest, expired_tombstones, result)
        with state.mutex:
            _drop_empty_segments(state)
        if segments:
            save_checkpoint(state, cleaned=segments[-1].stop)
        if progress is not None:
            progress(len(segments), len(segments))
        return result


def _read_rows(state: LogState, segment: SealedSegment) -> list[Rows]:
    with state.mutex:
        content = segment.content()
    parts: list[Rows] = []
    for chunk in segment.chunks(content, _COMPACTION_CHUNK_BYTES):
        if chunk.fault is not None:
            raise corrupt_error(state, segment, chunk.fault)
        parts.append(chunk.rows)
    return parts


def _newest_by_key(
    state: LogState, key: KeyFunction, is_tombstone: Callable[[Record], bool] | None, horizon_us: int
) -> tuple[dict[bytes, int], set[int]]:
    """Return the newest seq of each key, and the seqs of tombstones past their time. One that is not the newest record
    of its key is dropped as any superseded record is."""
    newest: dict[bytes, int] = {}
    tombstones: set[int] = set()
    with state.mutex:
        youngest = {candidate.base: candidate.newest_us for candidate in retention_candidates(state)}
    for segment in state.sealed:
        for rows in _read_rows(state, segment):
            for record in columns.iter_records(rows):
                name = key(record)
                if name is None:
                    continue
                newest[name] = record.seq
                written_us = record.ts_us or youngest[segment.base]
                if is_tombstone is not None and written_us < horizon_us and is_tombstone(record):
                    tombstones.add(record.seq)
    return newest, tombstones


@defer_signals
def _compact_segment(
    state: LogState,
    segment: SealedSegment,
    key: KeyFunction,
    newest: dict[bytes, int],
    expired_tombstones: set[int],
    result: CompactionResult,
) -> None:
    kept_rows: list[Rows] = []
    total = kept = 0
    for rows in _read_rows(state, segment):
        numbers = [
            number
            for number, record in enumerate(columns.iter_records(rows))
            if (name := key(record)) is None or (newest[name] == record.seq and record.seq not in expired_tombstones)
        ]
        total += len(rows)
        kept += len(numbers)
        picked: Ints = np.array(numbers, np.int64)
        kept_rows.append(rows.take(picked))
    result.bytes_before += segment.size
    result.kept += kept
    if kept == total:
        result.bytes_after += segment.size
        return
    codec, base = state.codec, segment.base
    save_checkpoint(state, running=(base, "copy"))
    new = concat_buffers([reencode(codec, rows) for rows in kept_rows])
    sides, _ = codec.encode_sides(new, 0, base, codec.initial_side_state(base))
    sides = codec.fill_holes(sides, base, segment.stop, len(new.buf))
    data = MmapReader(memoryview(new.buf))
    footer = codec.build_footer(SegmentContent(base, segment.stop, data, sides[0], sides))
    with state.step(f"copying the kept records of segment {base}"):
        prepare_replacement(state.files, base, new.buf, sides, footer)
    save_checkpoint(state, running=(base, "swap"))
    is_index_authoritative = 0 in codec.authoritative_sides
    action = f"replacing the compacted segment {base}"
    with state.mutex:  # a reader sees the old files or the new ones
        segment.complete_bytes = min(segment.complete_bytes, len(new.buf))
        with state.step(action):
            try:
                log_state.save_manifest(state)
            except OSError:
                abandon_replacement(state.files, base)
                raise
        with state.step(action, latch_on=OSError if is_index_authoritative else None):
            try:
                commit_replacement(state.files, base)
            except OSError:
                data_path = state.files.data_path(base)
                if codec.authoritative_sides and state.disk.stat(data_path + REPLACEMENT_SUFFIX) is None:
                    # The new data is in place and an authoritative side may not be. The next open finishes it; until
                    # then the sides in memory are the ones that belong to the data.
                    segment.reset()
                    segment.rebuilt_sides, segment.size = sides, len(new.buf)
                elif not is_index_authoritative:
                    reload_segment(segment)
                    abandon_replacement(state.files, base)
                raise
        segment.size, segment.side_bytes, segment.footer = len(new.buf), sum(map(len, sides)), footer
        segment.rebuilt_sides = None
        segment.reset()  # a reader with the old bytes must not mark chunks of the new ones as verified
    result.segments += 1
    result.dropped += total - kept
    result.bytes_after += segment.size


def _drop_empty_segments(state: LogState) -> None:
    """Drop empty segments at the front; empty ones after a segment with records stay as holes."""
    count = 0
    for segment in state.sealed:
        if segment.size or segment.lost_reason:
            break
        count += 1
    drop_segments(state, count, "compaction left no record in them")


def truncate_log(state: LogState, seq: int) -> int:
    """Keep the records below `seq`; return the number of removed seqs. The next append gets `seq`."""
    action = f"truncating to {seq}"
    with state.writer_lock, state.mutex:
        state.check_writable()
        highest = state.highest
        if not state.lowest <= seq < highest:
            raise OutOfRange(state.path, asked=seq, lowest=state.lowest, highest=highest)
        # Kept records must not depend on bytes that a power cut can remove: a side file is replaced before its data.
        sync_active(state)
        base = state.segment_at(seq).base
        with state.step(action, latch_on=SyncFailed):
            prepared = _prepare_prefix(state, base, seq)
        with state.step(action, latch_on=SyncFailed):
            try:
                _save_intent(state, base, seq)
            except OSError:
                abandon_replacement(state.files, base)
                raise
        try:
            _remove_later_segments(state, base)
            if prepared:
                state.active.close()  # closing twice is harmless
                commit_replacement(state.files, base)
                _open_as_active(state, base)
        except OSError as error:
            _reload(state)
            raise state.latch.trip(error, action) from error
        state.files.counters.truncations += 1
        assert state.active.next_seq <= seq, "truncate keeps nothing at or above seq"
        if state.active.next_seq < seq:
            # Compaction removed the records just below seq. Only a segment's name can carry the numbering.
            roll_segment(state, next_base=seq)
            with state.step(action, latch_on=OSError):
                log_state.remove_seq_floor(state.disk, state.path)
        try:
            log_state.save_manifest(state)
        except SyncFailed as error:
            raise state.latch.trip(error, action) from error
        except OSError as error:
            kind = DiskFull if error.errno in DISK_FULL_ERRNOS else WriteFailed
            raise kind(
                f"{state.path} was truncated to {seq}, and writing its manifest failed ({error}); the old manifest is "
                "still valid, the next segment or the close writes it again"
            ) from error
        return highest - seq


def _save_intent(state: LogState, base: int, seq: int) -> None:
    """List in the manifest the segments that will be removed: a crash in between loses no others."""
    later = [segment.base for segment in state.sealed if segment.base > base]
    if base != state.active.base:
        later.append(state.active.base)
    log_state.write_manifest(
        state,
        sealed=[segment for segment in state.sealed if segment.base < base],
        active=ManifestEntry(base, 0, 0),
        next_seq=seq,
        reserved=state.highest,
        removing=later,
        has_offsets=state.has_offsets,
    )


def _reload(state: LogState) -> None:
    """Serve the current files after a failure in the middle. The latch refuses further writes."""
    with suppress(OSError, Error):
        apply_recovered(state, recover_log(state.files, state.latch, writable=False, verify=False))


def _prepare_prefix(state: LogState, base: int, seq: int) -> bool:
    """Write the kept part of the segment at `base` beside it; False where all of it is kept."""
    codec, segment = state.codec, state.segment_at(seq)
    if isinstance(segment, SealedSegment) and (segment.lost_reason or segment.salvage is not None) and seq > base:
        for fault in segment.read_salvage(segment.content()).faults:
            if fault.seq < seq:
                raise corrupt_error(state, segment, fault)
    content = segment.content()
    try:
        pos, split = codec.find_split(content, seq) if seq > base else (0, None)
    except Corrupt as error:
        raise corrupt_error(state, segment, Fault(base, seq, error.pos, error.reason)) from error
    old_sides = codec.truncate_sides([None if side is None else bytes(side) for side in content.sides], base, seq)
    kept = codec.recover(content.data.fetch(0, pos), old_sides, base)
    if kept.end != pos:
        # Cutting here would also remove the good records between the damage and seq.
        raise corrupt_error(state, segment, Fault(kept.next_seq, seq, kept.end, kept.reason))
    data, sides, next_seq = content.data.fetch(0, kept.end), kept.sides, kept.next_seq
    if split is not None and len(split):
        # seq is inside a frame: its records before seq are encoded again after the whole frames.
        reencoded = reencode(codec, split)
        more, _ = codec.encode_sides(reencoded, kept.end, base, kept.side_state)
        data = b"".join((bytes(data), bytes(reencoded.buf)))
        sides = tuple(old + new for old, new in zip(sides, more, strict=True))
        next_seq = int(split.seq[-1]) + 1
    if len(data) == content.data.size and base == state.active.base and len(sides[0]) == len(content.index):
        return False
    if next_seq < seq:
        # Only holes are just below seq: until a segment has its number, no other file stores it.
        log_state.save_seq_floor(state.disk, state.path, seq)
    prepare_replacement(state.files, base, data, sides, None)
    return True


def _remove_later_segments(state: LogState, base: int) -> None:
    """Remove every segment after this one, newest first; its kept part is about to become the active one."""
    if base == state.active.base:
        return
    state.active.close()
    state.files.remove_segment(state.active.base)
    while state.sealed[-1].base > base:
        state.files.remove_segment(state.sealed.pop().base)
    state.files.drop_cached(base)


def _open_as_active(state: LogState, base: int) -> None:
    state.active = open_active(state.files, state.latch, base, RecoveryReport(), writable=True)
    if state.sealed and state.sealed[-1].base == base:
        state.sealed.pop()  # after: `lowest`, which is read without a lock, never shows a seq above the first record
    state.durable = state.active.next_seq
