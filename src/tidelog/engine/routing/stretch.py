"""[hot] What lies behind a lane's cursor in its source: records as columns, or seqs that have none any more.

    cursor │ record │ record │ lost │ deleted │ hole │ record …
           └─── one stretch: seqs of one part, or of no part at all ───┘

What is needed of a part is taken under the source's lock; reading happens without it, and no other
lock is held. A lane that runs asks what there is to see: what was lost or deleted is marked. Recovery
asks what is physically there: a record that was deleted since was, as a rule, passed on before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from tidelog.commitlog.codec import Fault
from tidelog.engine.core import Core
from tidelog.engine.parts import Bools
from tidelog.formats.rows import Rows, none
from tidelog.types import Ints

RECORDS_MAX: Final = 1024
_BYTES_MAX: Final = 4 << 20
Kind: TypeAlias = Literal["records", "lost", "deleted", "hole"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Seqs [first, stop) of a source."""

    first: int
    stop: int
    kind: Kind  # "records": `rows` has one for every seq
    rows: Rows
    lost: int = 0  # so many of the first rows were lost to a cap or to age
    gone: Bools | None = None  # which rows were deleted
    hops: Ints | None = None  # over how many routers each came; None: over none


def look(source: Core, cursor: int, last: int, *, physical: bool = False) -> Stretch | None:
    """The next stretch behind `cursor`, up to `last` at most; None: there is nothing."""
    first = cursor + 1
    with source.lock:
        index = source.index
        stop = min(index.head, last) + 1
        if first >= stop:
            return None
        found = next(index.slices(first, stop), None)
        if found is None or found.first > first:
            return _unfilled(source, first, stop if found is None else found.first)
        part, stop = found.part, min(found.stop, first + RECORDS_MAX)
        read = part.look(first, stop, _BYTES_MAX)
        gone: Bools | None = None
        lost = 0
        if not physical:
            lost = max(min(index.evict_floor, stop) - first, 0)
            dead = part.dead()
            gone = None if dead is None else dead[found.lo : found.lo + stop - first].copy()
            if index.earliest > first:
                gone = np.zeros(stop - first, bool) if gone is None else gone
                gone[: index.earliest - first] = True
        hops = source.hops.between(first, stop) if source.hops else None
    chunk = read()
    stop = min(stop, chunk.next_seq)
    if chunk.fault is not None:
        if not len(chunk.rows):
            return _damaged(source, first, chunk.fault)
        stop = min(stop, chunk.fault.seq)
    count = stop - first
    rows = chunk.rows.between(first, stop)
    if len(rows) != count:
        return _damaged(source, first, Fault(first, stop, 0, "seqs are not all where their index says"))
    return Stretch(
        first,
        stop,
        "records",
        rows,
        min(lost, count),
        None if gone is None else gone[:count],
        None if hops is None else hops[:count],
    )


def _unfilled(source: Core, first: int, stop: int) -> Stretch:
    """Seqs that no part has: there was a record, or never one. With the source's lock held."""
    index = source.index
    for lo, hi in index.ghosts:
        if hi <= first:
            continue
        if lo > first:
            return Stretch(first, min(lo, stop), "hole", none())
        stop = min(hi, stop)
        if first < index.evict_floor:
            return Stretch(first, min(stop, index.evict_floor), "lost", none())
        return Stretch(first, stop, "deleted", none())
    return Stretch(first, stop, "hole", none())


def _damaged(source: Core, first: int, fault: Fault) -> Stretch:
    """Records that do not read are lost to the dest: waiting for them would hold up all behind them for ever."""
    said = f"{source.name}: seqs {first} to {max(fault.resume, first + 1) - 1} could not be passed on: {fault.reason}"
    if said not in source.damage:
        source.damage[:] = [*source.damage, said][-10:]
    return Stretch(first, max(fault.resume, first + 1), "lost", none())
