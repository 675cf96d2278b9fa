"""[shell] The manifest of a log: which segment files there must be, and which seqs may have been handed out.

    birth, roll       the new segment is durable → the manifest names it → the first record is acked
    drop, truncate    the manifest says what is being removed → it is removed → the manifest forgets it
    swap              the new files are prepared → the manifest has the smaller size → they are renamed
    close             the manifest has the exact end

So a file that the manifest names exists, unless it was lost; and a segment file that it does not name is one that
an interrupted roll left empty, one whose removal was interrupted, or the work of another program. An append never
writes it but for one in a million records: seqs are reserved that far ahead, so that the numbering goes on above
them when the active segment is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.commitlog.segment import Active, Sealed
from tidelog.commitlog.state import State
from tidelog.disk.atomic import SyncFailed, write_temporary
from tidelog.disk.seam import join
from tidelog.formats import log_manifest
from tidelog.formats.log_manifest import NAME, Entry, LogManifest

RESERVED_SEQS = 1 << 20


class Replaced(SyncFailed):
    """The new manifest is in place and may not survive a power cut."""


def save(
    state: State,
    *,
    sealed: Sequence[Sealed] | None = None,
    active: Active | None = None,
    removing: Sequence[int] = (),
    next_seq: int | None = None,
    reserve_to: int = 0,
    clean: bool = False,
) -> None:
    """Write down what there is now, or what there will be after the step that is about to be done. Durable on
    return. Raises OSError, and then the old manifest holds, or, after Replaced, either."""
    before = state.manifest
    active = active or state.active
    growing = entry_of_active(state, active)
    least = active.next_seq if next_seq is None else next_seq
    above = max(active.next_seq, reserve_to, least)
    if clean:
        reserved = above
    elif before is not None and not before.clean and before.reserved - above >= RESERVED_SEQS // 2:
        reserved = before.reserved
    else:
        reserved = above + RESERVED_SEQS
    put(
        state,
        LogManifest(
            codec=state.codec.name,
            generation=before.generation + 1 if before is not None else 1,
            segments=[segment.entry() for segment in (state.sealed if sealed is None else sealed)],
            active=growing,
            next_seq=least,
            reserved=reserved,
            clean=clean,
            removing=list(removing),
            offsets=state.has_offsets,
        ),
    )


def announce_erasure(state: State, bases: Sequence[int]) -> None:
    """Say that the whole log is about to go."""
    before = state.manifest
    gone = LogManifest(
        codec=state.codec.name,
        generation=before.generation + 1 if before is not None else 1,
        segments=[],
        active=None,
        next_seq=0,
        reserved=0,
        clean=False,
        removing=list(bases),
        offsets=False,
    )
    put(state, gone)


def put(state: State, content: LogManifest) -> None:
    """Make this the manifest. On an error the old one holds; after Replaced, which is one, either may."""
    path = join(state.path, NAME)
    write_temporary(state.disk, f"{path}.tmp", log_manifest.encode(content))
    state.disk.rename(f"{path}.tmp", path)
    try:
        state.disk.sync_dir(state.path)
    except OSError as error:
        raise Replaced(error.errno, f"syncing failed: {error.strerror or error}", state.path) from error
    state.manifest = content
    state.reserved = content.reserved


def entry_of_active(state: State, active: Active) -> Entry:
    """What the manifest may say of the segment that grows: no more than what is durable."""
    if active is not state.active or state.durable >= active.next_seq:
        return Entry(active.base, active.size, active.truth_sides)
    before = state.manifest.active if state.manifest is not None else None
    return before if before is not None and before.base == active.base else Entry(active.base, 0, active.truth_sides)


def save_if_new(state: State, *, fresh: bool) -> None:
    """After recovery: write the manifest where it does not say what was found. `fresh`: the log was made just now."""
    before = state.manifest
    if (
        before is not None
        and before.active is not None
        and before.active.base == state.active.base
        and before.segments == [segment.entry() for segment in state.sealed]
        and before.offsets == state.has_offsets
        and not before.removing
        and before.next_seq <= state.highest
    ):
        return
    save(state, clean=not fresh)


def save_closed(state: State) -> None:
    """Before closing: the exact end, unless the manifest has it already."""
    before = state.manifest
    if before is None or not before.clean or before.reserved != state.highest:
        save(state, clean=True)


def reserve(state: State, upto: int) -> None:
    """Make sure that the manifest has every seq below `upto` as possibly handed out, before one of them is."""
    if upto <= state.reserved:
        return
    try:
        save(state, reserve_to=upto)
    except OSError as error:
        raise state.latch.refused(error, "reserving seqs in the manifest") from error
