"""[hot] What follows a lane's cursor in its source: records as columns, or seqs that have no record any more.

    cursor │ record │ record │ lost │ deleted │ hole │ record …
           └─── one stretch: seqs of one part, or of no part at all ───┘

What is needed of a part is taken under the source's lock; reading happens without it, and no other lock is held.
Records older than the source's `ttl_ms` count as lost, whether a reader of the source has made them expire or not.
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
SEQS_MAX: Final = 1 << 20  # seqs without a record that are looked at in one go
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


def look(source: Core, cursor: int) -> Stretch | None:
    """The next stretch after `cursor`; None: there is nothing."""
    first = cursor + 1
    with source.lock:
        index = source.index
        stop = index.head + 1
        if first >= stop:
            return None
        floor = max(index.evict_floor, _expiry(source))
        found = next(index.slices(first, stop), None)
        if found is None or found.first > first:
            return _unfilled(source, first, stop if found is None else found.first, floor)
        part, stop = found.part, min(found.stop, first + RECORDS_MAX)
        read = part.look(first, stop, _BYTES_MAX)
        lost = max(min(floor, stop) - first, 0)
        dead = part.dead()
        gone: Bools | None = None if dead is None else dead[found.lo : found.lo + stop - first].copy()
        if index.earliest > first:
            gone = np.zeros(stop - first, bool) if gone is None else gone
            gone[: index.earliest - first] = True
        hops = _hops(source, first, stop)
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


def _expiry(source: Core) -> int:
    """One past the last record that is older than the source's age limit. With the source's lock held."""
    if not source.config.ttl_ms:
        return 0
    expiry = source.index.expired(source.shared.now_ms() - source.config.ttl_ms)
    return source.held(expiry) if expiry > source.index.evict_floor else expiry


def _hops(source: Core, first: int, stop: int) -> Ints | None:
    return source.hops.between(first, stop) if source.hops else None


def _unfilled(source: Core, first: int, stop: int, floor: int) -> Stretch:
    """Seqs that no part has: their records were lost or deleted, or there never was one. With the lock held."""
    index = source.index
    stop = min(stop, first + SEQS_MAX)
    for lo, hi in index.trims:
        if hi > first:
            if lo <= first:
                hi = min(hi, stop)
                return Stretch(first, hi, "lost", none(), hops=_hops(source, first, hi))
            stop = min(stop, lo)
            break
    for lo, hi in index.ghosts:
        if hi <= first:
            continue
        if lo > first:
            return Stretch(first, min(lo, stop), "hole", none())
        stop = min(hi, stop)
        if first < floor:
            stop = min(stop, floor)
            return Stretch(first, stop, "lost", none(), hops=_hops(source, first, stop))
        return Stretch(first, stop, "deleted", none())
    return Stretch(first, stop, "hole", none())


def _damaged(source: Core, first: int, fault: Fault) -> Stretch:
    """Records that do not read are lost to the target: waiting for them would block all that follow."""
    stop = max(fault.resume, first + 1)
    said = f"{source.name}: seqs {first} to {stop - 1} could not be passed on: {fault.reason}"
    if said not in source.damage:
        source.damage[:] = [*source.damage, said][-10:]
    with source.lock:
        return Stretch(first, stop, "lost", none(), hops=_hops(source, first, stop))
