"""[shell] Truncate: forget every record from a seq on. A crash in between leaves the end somewhere between
the mark and the old end, with every record before it intact.

What stays of the segment that holds the mark is written beside it first: a full disk changes
nothing. Then later segments go, newest first, each durably, and the prefix is swapped in (never
cut in place: a reader may have the file mapped). That segment becomes the active
one. Its name carries the numbering on, even when nothing is left in it.
"""

from __future__ import annotations

from contextlib import suppress

from tidelog.commitlog import manifest, numbering
from tidelog.commitlog.append import roll_over, sync
from tidelog.commitlog.codec import Fault, rewrite
from tidelog.commitlog.read import corrupt, take
from tidelog.commitlog.recovery import Report, open_active, recover
from tidelog.commitlog.segment import Sealed
from tidelog.commitlog.state import State
from tidelog.commitlog.swap import abandon, commit, prepare
from tidelog.disk.atomic import SyncFailed
from tidelog.disk.latch import FULL
from tidelog.errors import Corrupt, DiskFull, Error, OutOfRange, WriteFailed
from tidelog.formats.log_manifest import Entry, LogManifest


def truncate(state: State, mark: int) -> int:
    """Keep records below `mark`; return how many seqs were forgotten. The next append gets `mark`."""
    with state.turn, state.mutex:
        state.check_writable()
        highest = state.highest
        if not state.lowest <= mark < highest:
            raise OutOfRange(state.path, asked=mark, lowest=state.lowest, highest=highest)
        # Nothing that is kept may hang on bytes that a power cut can still take: a side-car goes before its data.
        sync(state)
        base = state.segment_at(mark).base
        try:
            prepared = _prepare_prefix(state, base, mark)
        except SyncFailed as error:
            raise state.latch.trip(error, f"truncating to {mark}") from error
        except OSError as error:
            raise state.latch.refused(error, f"truncating to {mark}") from error
        try:
            _announce(state, base, mark)
        except OSError as error:
            abandon(state.files, base)
            step = state.latch.trip if isinstance(error, SyncFailed) else state.latch.refused
            raise step(error, f"truncating to {mark}") from error
        try:
            _forget_later(state, base)
            if prepared:
                state.active.close()  # closing twice is harmless
                commit(state.files, base)
                _activate(state, base)
        except OSError as error:
            _look_again(state)
            raise state.latch.trip(error, f"truncating to {mark}") from error
        assert state.active.next_seq <= mark, "truncate keeps nothing at or behind the mark"
        if state.active.next_seq < mark:
            # Compaction took the records just below the mark. Only a segment's name can carry the number on.
            roll_over(state, next_base=mark)
            try:
                numbering.let_go(state.disk, state.path)
            except OSError as error:
                raise state.latch.trip(error, f"truncating to {mark}") from error
        try:
            manifest.save(state)
        except SyncFailed as error:
            raise state.latch.trip(error, f"truncating to {mark}") from error
        except OSError as error:
            what = f"{state.path} was truncated to {mark}, and writing its manifest failed ({error}); "
            kind = DiskFull if error.errno in FULL else WriteFailed
            raise kind(f"{what}what it says is still true, the next segment or the close writes it again") from error
        return highest - mark


def _announce(state: State, base: int, mark: int) -> None:
    """Say in the manifest which segments are about to go: a crash in between loses nothing else."""
    before = state.manifest
    sealed = [segment for segment in state.sealed if segment.base < base]
    later = [segment.base for segment in state.sealed if segment.base > base]
    if base != state.active.base:
        later.append(state.active.base)
    manifest.put(
        state,
        LogManifest(
            codec=state.codec.name,
            generation=before.generation + 1 if before is not None else 1,
            segments=[segment.entry() for segment in sealed],
            active=Entry(base, 0, 0),
            next_seq=mark,
            reserved=state.highest,
            clean=False,
            removing=later,
            offsets=state.has_offsets,
        ),
    )


def _look_again(state: State) -> None:
    """After a failure in the middle: serve what is there now. Nothing is written any more, the latch sees to it."""
    with suppress(OSError, Error):
        take(state, recover(state.files, state.latch, writable=False, verify=False))


def _prepare_prefix(state: State, base: int, mark: int) -> bool:
    """Write what stays of the segment at `base` beside it; False where all of it stays."""
    codec, segment = state.codec, state.segment_at(mark)
    if isinstance(segment, Sealed) and (segment.lost or segment.salvage is not None) and mark > base:
        for fault in segment.examine(segment.shape()).faults:
            if fault.seq < mark:
                raise corrupt(state, segment, fault)
    shape = segment.shape()
    try:
        pos, split = codec.position(shape, mark) if mark > base else (0, None)
    except Corrupt as error:
        raise corrupt(state, state.segment_at(mark), Fault(base, mark, error.pos, error.reason)) from error
    have = codec.trim([None if side is None else bytes(side) for side in shape.sides], base, mark)
    kept = codec.recover(shape.data.fetch(0, pos), have, base)
    if kept.end != pos:
        # Cutting here would also take the good records between the damage and the mark.
        fault = Fault(kept.next_seq, mark, kept.end, kept.reason)
        raise corrupt(state, state.segment_at(mark), fault)
    data, sides = shape.data.fetch(0, kept.end), kept.sides
    if split is not None and len(split):
        # The mark lies inside a frame: its records before the mark are written anew behind the whole frames.
        again = rewrite(codec, split)
        more, _ = codec.sides(again, kept.end, base, kept.mark)
        data = b"".join((bytes(data), bytes(again.buf)))
        sides = tuple(old + new for old, new in zip(sides, more, strict=True))
    if len(data) == shape.data.size and base == state.active.base and len(sides[0]) == len(shape.index):
        return False
    if (int(split.seq[-1]) + 1 if split is not None and len(split) else kept.next_seq) < mark:
        # Only holes lie just below the mark: until a segment bears its number, nothing else remembers it.
        numbering.hold(state.disk, state.path, mark)
    prepare(state.files, base, data, sides, None)
    return True


def _forget_later(state: State, base: int) -> None:
    """Remove every segment behind this one, newest first; what was prepared of it is about to become the active one."""
    if base == state.active.base:
        return
    state.active.close()
    state.files.remove(state.active.base)
    while state.sealed[-1].base > base:
        state.files.remove(state.sealed.pop().base)
    state.sealed.pop()
    state.files.forget(base)


def _activate(state: State, base: int) -> None:
    state.active = open_active(state.files, state.latch, base, Report(), writable=True)
    state.durable = state.active.next_seq
