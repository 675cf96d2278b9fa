"""[shell] Truncate: forget every record from a seq on. A crash in between leaves the end somewhere between
the mark and the old end, with every record before it intact.

Later segments go first, newest first, each durably. The segment that holds the mark is then
replaced by its own prefix (never cut in place: a reader may have it mapped) and becomes the
active one. Its name carries the numbering on, even when nothing is left in it.
"""

from __future__ import annotations

from tidelog.commitlog.append import roll_over, sync
from tidelog.commitlog.codec import rewrite
from tidelog.commitlog.recovery import Report, open_active
from tidelog.commitlog.state import State
from tidelog.commitlog.swap import swap
from tidelog.errors import OutOfRange


def truncate(state: State, mark: int) -> int:
    """Keep records below `mark`; return how many seqs were forgotten. The next append gets `mark`."""
    with state.mutex:
        state.check_writable()
        highest = state.highest
        if not state.lowest <= mark < highest:
            raise OutOfRange(state.path, asked=mark, lowest=state.lowest, highest=highest)
        # Nothing that is kept may hang on bytes that a power cut can still take: a side-car goes before its data.
        sync(state)
        try:
            _forget_later(state, mark)
            _keep_prefix(state, mark)
        except OSError as error:
            raise state.latch.trip(error, f"truncating to {mark}") from error
        return highest - mark


def _forget_later(state: State, mark: int) -> None:
    """Remove every segment that starts behind the mark; the last one left becomes the active one."""
    if mark >= state.active.base:
        return
    state.active.close()
    state.files.remove(state.active.base)
    while state.sealed[-1].base > mark:
        state.files.remove(state.sealed.pop().base)
    last = state.sealed.pop()
    state.files.forget(last.base)
    _activate(state, last.base)


def _activate(state: State, base: int) -> None:
    state.active = open_active(state.files, state.latch, base, Report(), writable=True)
    state.durable = state.active.next_seq


def _keep_prefix(state: State, mark: int) -> None:
    active, codec, files = state.active, state.codec, state.files
    if mark >= active.next_seq:
        if mark > active.next_seq:
            roll_over(state, next_base=mark)
        return
    shape = active.shape()
    pos, split = codec.position(shape, mark)
    have = [None if side is None else bytes(side) for side in shape.sides]
    kept = codec.recover(shape.data.fetch(0, pos), codec.trim(have, active.base, mark), active.base)
    data = shape.data.fetch(0, kept.end)
    sides = kept.sides
    if split is not None and len(split):
        # The mark lies inside a frame: its records before the mark are written anew behind the whole frames.
        again = rewrite(codec, split)
        more, _ = codec.sides(again, kept.end, active.base, kept.mark)
        data = b"".join((bytes(data), bytes(again.buf)))
        sides = tuple(old + new for old, new in zip(sides, more, strict=True))
    active.close()
    swap(files, active.base, data, sides)
    _activate(state, active.base)
    assert state.active.next_seq <= mark, "truncate keeps nothing at or behind the mark"
    if state.active.next_seq < mark:
        # Compaction took the records just below the mark. Only a segment's name can carry the number on.
        roll_over(state, next_base=mark)
