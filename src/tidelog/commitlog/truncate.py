"""[shell] Truncate: forget every record from a seq on. A crash in between leaves the end somewhere between
the mark and the old end, with every record before it intact.

What stays of the segment that holds the mark is written beside it first: a full disk changes
nothing. Then later segments go, newest first, each durably, and the prefix is swapped in (never
cut in place: a reader may have the file mapped). That segment becomes the active
one. Its name carries the numbering on, even when nothing is left in it.
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
from tidelog.formats.log_manifest import Entry, LogManifest


def truncate_log(state: LogState, seq: int) -> int:
    """Keep records below `mark`; return how many seqs were forgotten. The next append gets `mark`."""
    with state.writer_lock, state.mutex:
        state.check_writable()
        highest = state.highest
        if not state.lowest <= seq < highest:
            raise OutOfRange(state.path, asked=seq, lowest=state.lowest, highest=highest)
        # Nothing that is kept may hang on bytes that a power cut can still take: a side-car goes before its data.
        sync_active(state)
        base = state.segment_at(seq).base
        try:
            prepared = _prepare_prefix(state, base, seq)
        except SyncFailed as error:
            raise state.latch.trip(error, f"truncating to {seq}") from error
        except OSError as error:
            raise state.latch.retryable_error(error, f"truncating to {seq}") from error
        try:
            _save_intent(state, base, seq)
        except OSError as error:
            abandon_replacement(state.files, base)
            step = state.latch.trip if isinstance(error, SyncFailed) else state.latch.retryable_error
            raise step(error, f"truncating to {seq}") from error
        try:
            _remove_later_segments(state, base)
            if prepared:
                state.active.close()  # closing twice is harmless
                commit_replacement(state.files, base)
                _open_as_active(state, base)
        except OSError as error:
            _reload(state)
            raise state.latch.trip(error, f"truncating to {seq}") from error
        assert state.active.next_seq <= seq, "truncate keeps nothing at or behind the mark"
        if state.active.next_seq < seq:
            # Compaction took the records just below the mark. Only a segment's name can carry the number on.
            roll_segment(state, next_base=seq)
            try:
                log_state.remove_seq_floor(state.disk, state.path)
            except OSError as error:
                raise state.latch.trip(error, f"truncating to {seq}") from error
        try:
            log_state.save_manifest(state)
        except SyncFailed as error:
            raise state.latch.trip(error, f"truncating to {seq}") from error
        except OSError as error:
            what = f"{state.path} was truncated to {seq}, and writing its manifest failed ({error}); "
            kind = DiskFull if error.errno in DISK_FULL_ERRNOS else WriteFailed
            raise kind(f"{what}what it says is still true, the next segment or the close writes it again") from error
        return highest - seq


def _save_intent(state: LogState, base: int, seq: int) -> None:
    """Say in the manifest which segments are about to go: a crash in between loses nothing else."""
    before = state.manifest
    sealed = [segment for segment in state.sealed if segment.base < base]
    later = [segment.base for segment in state.sealed if segment.base > base]
    if base != state.active.base:
        later.append(state.active.base)
    log_state.write_manifest(
        state,
        LogManifest(
            codec=state.codec.name,
            generation=before.generation + 1 if before is not None else 1,
            segments=[segment.manifest_entry() for segment in sealed],
            active=Entry(base, 0, 0),
            next_seq=seq,
            reserved=state.highest,
            clean=False,
            removing=later,
            offsets=state.has_offsets,
        ),
    )


def _reload(state: LogState) -> None:
    """After a failure in the middle: serve what is there now. Nothing is written any more, the latch sees to it."""
    with suppress(OSError, Error):
        apply_recovered(state, recover_log(state.files, state.latch, writable=False, verify=False))


def _prepare_prefix(state: LogState, base: int, seq: int) -> bool:
    """Write what stays of the segment at `base` beside it; False where all of it stays."""
    codec, segment = state.codec, state.segment_at(seq)
    if isinstance(segment, SealedSegment) and (segment.lost_reason or segment.salvage is not None) and seq > base:
        for fault in segment.read_salvage(segment.content()).faults:
            if fault.seq < seq:
                raise corrupt_error(state, segment, fault)
    shape = segment.content()
    try:
        pos, split = codec.find_split(shape, seq) if seq > base else (0, None)
    except Corrupt as error:
        raise corrupt_error(state, state.segment_at(seq), Fault(base, seq, error.pos, error.reason)) from error
    have = codec.truncate_sides([None if side is None else bytes(side) for side in shape.sides], base, seq)
    kept = codec.recover(shape.data.fetch(0, pos), have, base)
    if kept.end != pos:
        # Cutting here would also take the good records between the damage and the mark.
        fault = Fault(kept.next_seq, seq, kept.end, kept.reason)
        raise corrupt_error(state, state.segment_at(seq), fault)
    data, sides = shape.data.fetch(0, kept.end), kept.sides
    if split is not None and len(split):
        # The mark lies inside a frame: its records before the mark are written anew behind the whole frames.
        again = reencode(codec, split)
        more, _ = codec.encode_sides(again, kept.end, base, kept.side_state)
        data = b"".join((bytes(data), bytes(again.buf)))
        sides = tuple(old + new for old, new in zip(sides, more, strict=True))
    if len(data) == shape.data.size and base == state.active.base and len(sides[0]) == len(shape.index):
        return False
    if (int(split.seq[-1]) + 1 if split is not None and len(split) else kept.next_seq) < seq:
        # Only holes lie just below the mark: until a segment bears its number, nothing else remembers it.
        log_state.save_seq_floor(state.disk, state.path, seq)
    prepare_replacement(state.files, base, data, sides, None)
    return True


def _remove_later_segments(state: LogState, base: int) -> None:
    """Remove every segment behind this one, newest first; what was prepared of it is about to become the active one."""
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
