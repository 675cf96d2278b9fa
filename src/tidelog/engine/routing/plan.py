"""[policy] What a pass does with a stretch of the source, step by step, and how much of it the target takes.

    copies   records that a router passes on: they get seqs, one after the other
    trim     records that were lost before they could be passed on: as many seqs of the target, and a gap there
    skip     records that were deleted before they could be passed on, and seqs that never had one: nothing for them

A record, and the loss of one, is passed on HOPS_MAX times at most: what came over so many routers is skipped. Where
a target has no room the pass ends before that record and continues there later: order is kept at the price of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from tidelog.engine.core import Core
from tidelog.engine.routing.copies import Copies, choose
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.routing.stretch import Stretch

Act: TypeAlias = Literal["copies", "trim", "skip"]
_PLENTY = 1 << 62


class Draft(NamedTuple):
    """One step over seqs `first` to `last` of the source."""

    act: Act
    first: int
    last: int
    counts: tuple[int, ...]  # of copies or of lost ones, a router each
    copies: Copies | None = None
    hops: int = 1  # trim: over how many routers the lost records came, with this one

    @property
    def total(self) -> int:
        return sum(self.counts)


def plan(routers: Sequence[Router], source_id: int, found: Stretch) -> list[Draft]:
    """The steps over a stretch, in order, up to its end."""
    last = found.stop - 1
    if found.kind == "lost":
        return _lost(routers, found, found.stop - found.first)
    if found.kind != "records":
        return [Draft("skip", found.first, last, ())]
    steps = _lost(routers, found, found.lost) if found.lost else []
    copies = choose(routers, source_id, found)
    keep = copies.which >= found.lost
    if found.gone is not None:
        keep &= ~found.gone[copies.which]
    first = found.first + found.lost
    if first <= last:
        steps.append(_copied(routers, copies if keep.all() else copies.pick(keep), first, last))
    return steps


def _copied(routers: Sequence[Router], copies: Copies, first: int, last: int) -> Draft:
    counts = np.bincount(copies.who, minlength=len(routers)).tolist()
    return Draft("copies", first, last, tuple(counts), copies)


def _lost(routers: Sequence[Router], found: Stretch, count: int) -> list[Draft]:
    """Steps over the first `count` seqs of a stretch, which were lost: one for each run of equal hops."""
    if found.hops is None:
        return [_trim(routers, found.first, found.first + count - 1, 0)]
    hops = found.hops[:count]
    edges = (np.flatnonzero(hops[1:] != hops[:-1]) + 1).tolist()
    runs = pairwise([0, *edges, count])
    return [_trim(routers, found.first + lo, found.first + hi - 1, int(hops[lo])) for lo, hi in runs]


def _trim(routers: Sequence[Router], first: int, last: int, hops: int) -> Draft:
    if hops >= HOPS_MAX:
        return Draft("skip", first, last, ())
    counts = tuple(max(last - max(first - 1, router.start), 0) for router in routers)
    return Draft("trim", first, last, counts, hops=hops + 1)


class Room(NamedTuple):
    """What a target takes now."""

    records: int
    size: int


def room_of(dest: Core) -> Room:
    """How much the target would take. With its lock held."""
    config, index = dest.config, dest.index
    records = size = _PLENTY
    if config.discard == "reject":
        if config.cap_records:
            records = max(config.cap_records - index.count - dest.staged_records, 0)
        if config.cap_bytes:
            size = max(config.cap_bytes - index.bytes - dest.staged_bytes, 0)
    left = dest.quota.room
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
                taken.append(_copied(routers, copies.part(0, fits), step.first, first_left - 1))
            return taken, True
        records, size = records - len(copies), size - int(copies.size.sum())
        taken.append(step)
    return taken, False
