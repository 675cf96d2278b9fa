"""Truncate: remove every record from a seq on.

The kept part of the segment that contains the seq is written beside it first, so a full disk changes nothing. Then
later segments are removed, newest first, each durably, and the kept part replaces the old file (never cut in place: a
reader may have it mapped) and becomes the active segment. Its name carries the numbering, even when it is empty. A
crash in between leaves the end somewhere between the seq and the old end, with every record before it intact.
"""

from __future__ import annotations

from contextlib import suppress

from tidelog.commitlog import log_state
from tidelog.commitlog.append import roll_segment, sync_active
from tidelog.commitlog.codec import Fault, reencode
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.read import apply_recovered, corrupt_error
from tidelog.commitlog.recovery import RecoveryReport, open_active, recover_log
from tidelog.commitlog.segment import SealedSegment, abandon_replacement, commit_replacement, prepare_replacement
from tidelog.disk.durability import DISK_FULL_ERRNOS, SyncFailed
from tidelog.errors import Corrupt, DiskFull, Error, OutOfRange, WriteFailed
from tidelog.formats.small_files import ManifestEntry


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
    state.sealed.pop()
    state.files.drop_cached(base)


def _open_as_active(state: LogState, base: int) -> None:
    state.active = open_active(state.files, state.latch, base, RecoveryReport(), writable=True)
    state.durable = state.active.next_seq
