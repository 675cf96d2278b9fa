"""[policy] What a pass does with a stretch of the source, step by step, and how much of it the dest takes.

    copies   records that a router passes on: they get seqs, one behind the other
    holes    seqs of the source that no record ever had: as many seqs of the dest, in silence
    trim     records that were lost before they could be passed on: as many seqs of the dest, and a gap there
    skip     records that were deleted before they could be passed on: nothing for them

Recovery finds copies and holes again by itself. A trim or a skip it would take for records, so these are put
on record in the dest's WAL before anybody sees what follows from them. Where a dest has no room the pass ends
before that record and is taken up there: order is kept at the price of waiting.

A source that is fed itself may hold copies of records that a power cut can take, and behind them records of its own
that it cannot. How many copies the lost ones were is not found out again; so where a record of its own follows, its
place is pinned: put on record as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from tidelog.engine.core import Core
from tidelog.engine.routing.copies import Copies, choose
from tidelog.engine.routing.router import Router
from tidelog.engine.routing.stretch import Stretch
from tidelog.types import Ints

Act: TypeAlias = Literal["copies", "holes", "trim", "skip"]
_PLENTY = 1 << 62


class Draft(NamedTuple):
    """One step over seqs `first` to `last` of the source."""

    act: Act
    first: int
    last: int
    counts: tuple[int, ...]  # of copies or holes, a router each
    copies: Copies | None = None
    pin: bool = False  # where it begins in the dest is put on record

    @property
    def total(self) -> int:
        return sum(self.counts)


def plan(routers: Sequence[Router], source_id: int, found: Stretch) -> list[Draft]:
    """The steps over a stretch, in order, up to its end."""
    last = found.stop - 1
    if found.kind != "records":
        act: Act = "holes" if found.kind == "hole" else "trim" if found.kind == "lost" else "skip"
        return [Draft(act, found.first, last, _every(routers, found.first, last) if act != "skip" else ())]
    steps: list[Draft] = []
    copies = choose(routers, source_id, found)
    if found.lost:
        end = found.first + found.lost - 1
        steps.append(Draft("trim", found.first, end, _every(routers, found.first, end)))
        copies = copies.pick(copies.which >= found.lost)
    at = found.first + found.lost
    if found.gone is not None:
        gone = found.gone[copies.which]
        for lo, hi in _runs(np.unique(copies.which[gone])):  # rows that would be copies and are deleted
            before = copies.pick((copies.which >= at - found.first) & (copies.which < lo) & ~gone)
            steps.append(_copied(routers, before, at, found.first + lo - 1))
            steps.append(Draft("skip", found.first + lo, found.first + hi - 1, ()))
            at = found.first + hi
        copies = copies.pick((copies.which >= at - found.first) & ~gone)
    if at <= last:
        steps.append(_copied(routers, copies, at, last))
    return [step for step in steps if step.last >= step.first]


def _copied(routers: Sequence[Router], copies: Copies, first: int, last: int) -> Draft:
    counts = np.bincount(copies.who, minlength=len(routers)).tolist()
    return Draft("copies", first, last, tuple(counts), copies)


def _every(routers: Sequence[Router], first: int, last: int) -> tuple[int, ...]:
    """How many seqs of first to last each router was there for."""
    return tuple(max(last - max(first - 1, router.start), 0) for router in routers)


def _runs(rows: Ints) -> list[tuple[int, int]]:
    """Rising numbers as stretches [lo, hi)."""
    if not len(rows):
        return []
    edges = np.flatnonzero(np.diff(rows) != 1)
    starts, ends = rows[np.append(0, edges + 1)], rows[np.append(edges, len(rows) - 1)] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def pinned(routers: Sequence[Router], steps: Sequence[Draft], found: Stretch, loose: bool) -> tuple[list[Draft], bool]:
    """The steps over a source that is fed itself, cut before each record of its own that becomes a copy and lies
    behind seqs that may be lost. `loose`: such seqs were passed since the last pin; returned for the next pass."""
    made: list[Draft] = []
    for step in steps:
        if step.copies is None:
            loose = step.act == "holes"  # a trim and a skip are pins themselves
            made.append(step)
            continue
        hops = np.zeros(found.stop - found.first, np.int64) if found.hops is None else found.hops
        lo, hi = step.first - found.first, step.last - found.first + 1
        lossy = np.cumsum(hops[lo:hi] > 0) + loose  # how many seqs that may be lost lie at or before each
        which = np.unique(step.copies.which)
        own = which[hops[which] == 0]
        behind = lossy[own - lo]
        edges = own[np.flatnonzero(np.diff(behind, prepend=0))].tolist()
        made += _cut(routers, step, [found.first + row for row in edges])
        loose = bool(lossy[-1] > (behind[-1] if len(behind) else 0))
    return made, loose


def _cut(routers: Sequence[Router], step: Draft, edges: Sequence[int]) -> list[Draft]:
    """A step of copies in parts, of which all that begin at an edge are pinned."""
    if not edges:
        return [step]
    copies = step.copies
    assert copies is not None, "asked of copies"
    seqs, parts = copies.rows.seq[copies.which], []
    for first, stop in pairwise([step.first, *(edge for edge in edges if edge > step.first), step.last + 1]):
        part = copies.pick((seqs >= first) & (seqs < stop))
        parts.append(_copied(routers, part, first, stop - 1)._replace(pin=first in edges))
    return parts


class Room(NamedTuple):
    """What a dest takes now."""

    records: int
    size: int


def room_of(dest: Core, *, quota: bool = True) -> Room:
    """How much the dest would take. With its lock held."""
    config, index = dest.config, dest.index
    records = size = _PLENTY
    if config.discard == "reject":
        if config.cap_records:
            records = max(config.cap_records - index.count - dest.staged_records, 0)
        if config.cap_bytes:
            size = max(config.cap_bytes - index.bytes - dest.staged_bytes, 0)
    left = dest.quota.room if quota else None
    return Room(records, size if left is None else min(size, left))


def fitting(routers: Sequence[Router], steps: Sequence[Draft], room: Room) -> tuple[list[Draft], bool]:
    """As many steps as there is room for, the last one cut before the first record that does not fit; whether one
    did not."""
    taken: list[Draft] = []
    records, size = room
    for step in steps:
        copies = step.copies
        if copies is None or not len(copies):
            taken.append(step)
            continue
        fits = min(int(np.searchsorted(np.cumsum(copies.size), size, "right")), records)
        if fits < len(copies):
            row = int(copies.which[fits])  # all copies of a record or none
            fits = int(np.searchsorted(copies.which, row))
            first_left = int(copies.rows.seq[row])
            if first_left > step.first:
                taken.append(_copied(routers, copies.part(0, fits), step.first, first_left - 1)._replace(pin=step.pin))
            return taken, True
        records, size = records - len(copies), size - int(copies.size.sum())
        taken.append(step)
    return taken, False
