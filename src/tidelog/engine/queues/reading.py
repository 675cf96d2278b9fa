"""[hot] Jobs by their seqs: which of them live, the next that do, and their records. No step of Python per seq.

What needs the topic's lock is `living`, `fresh` and `plan`; `fetch` reads what `plan` has found, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from tidelog.commitlog.codec import Chunk
from tidelog.engine.block import Block
from tidelog.engine.index import TopicIndex
from tidelog.engine.parts import Bools, Part
from tidelog.engine.queues.jobs import Piece, Texts
from tidelog.errors import Corrupt, Damaged, Unavailable
from tidelog.formats import idx
from tidelog.types import Ints

_APART = 32  # seqs that lie closer than this are read in one go
_WINDOW = 256
_FEW = 16  # who claims so few reads ahead
_AHEAD = 256
_AHEAD_BYTES = 1 << 16
_ALL = 1 << 62
_TEXTS_BYTES = 1 << 18  # more than that is not copied while the lock is held


def living(index: TopicIndex, seqs: Sequence[int]) -> Bools:
    """Which of these seqs, rising, have a record that lives."""
    asked: Ints = np.array(seqs, np.int64)
    found: Bools = np.zeros(len(asked), bool)
    if len(asked):
        for part, first, stop in index.slices(max(int(asked[0]), index.earliest), int(asked[-1]) + 1):
            lo, hi = np.searchsorted(asked, (first, stop))
            if lo < hi:
                dead = part.dead()
                found[lo:hi] = True if dead is None else ~dead[asked[lo:hi] - part.base]
    return found


def fresh(index: TopicIndex, cursor: int, stop: int, most: int) -> tuple[list[int], int]:
    """The next live seqs of [cursor, stop), at most so many, and where to look from then on."""
    found: list[int] = []
    for part, lo, end in index.slices(max(cursor, index.earliest), stop):
        dead = part.dead()
        if dead is not None and most == 1:
            flags = dead[lo - part.base : end - part.base]
            first = int(flags.argmin())  # which looks no further than the first
            if not flags[first]:
                return [lo + first], lo + first + 1
            continue
        step = _WINDOW
        while lo < end:
            left = most - len(found)
            if dead is None:
                hi = min(end, lo + left)
                found += range(lo, hi)
            else:
                # A window at a time: what was acked lies in long runs, and the cursor is mostly behind them.
                hi = min(end, lo + step)
                alive = np.flatnonzero(~dead[lo - part.base : hi - part.base])[:left]
                found += (alive + lo).tolist()
                step *= 4
            if len(found) >= most:
                return found, found[-1] + 1
            lo = hi
    return found, max(cursor, stop)


def fitting(index: TopicIndex, seqs: Sequence[int], bytes_max: int) -> int:
    """How many of these jobs, in this order, have no more data than that together; one in any case. One whose index
    does not read counts as none."""
    left = bytes_max
    for count, seq in enumerate(seqs):
        part = index.part_of(seq)
        with suppress(Damaged, Unavailable):
            left -= 0 if part is None else int(part.entries()["data_len"][seq - part.base])
        if left < 0:
            return max(count, 1)
    return len(seqs)


def texts(index: TopicIndex, seqs: Sequence[int]) -> Texts | None:
    """The records of these seqs, rising, where all of them are plain and in memory; else they are read by a `plan`."""
    if not seqs or (index.bytes > _TEXTS_BYTES and index.bytes // index.count * len(seqs) > _TEXTS_BYTES):
        return None
    found = Texts([], [])
    at, last = 0, seqs[-1]
    while at < len(seqs):
        first = seqs[at]
        part = index.part_of(first)
        if not isinstance(part, Block):
            return None
        stop = last + 1 if last - first == len(seqs) - at - 1 else first + 1  # all the rest, or one by one
        stop = min(stop, part.stop)
        some = part.texts(first, stop)
        if some is None:
            return None
        found.times_ms.extend(some[0])
        found.datas.extend(some[1])
        at += stop - first
    return found


class Run(NamedTuple):
    """Seqs of one part that lie close to each other, and what reads them."""

    seqs: Ints
    look: Callable[[], Chunk] | None  # None: its index does not read
    known: Piece | None = None  # they were read already
    ahead: Ahead | None = None  # `look` reads more than them


class Ahead:
    """Records behind the last claim, read with it: who claims one job at a time reads once for many. Records never
    change, so what is here is right as long as it is asked for."""

    def __init__(self) -> None:
        self._piece: Piece | None = None

    def find(self, seqs: Ints) -> Piece | None:
        """The records of these seqs, rising, if all of them are here."""
        piece = self._piece
        if piece is None:
            return None
        first, last = int(piece.rows.seq[0]), int(piece.rows.seq[-1])
        lo, hi = int(seqs[0]), int(seqs[-1])
        if lo < first or hi > last:
            return None
        if hi - lo + 1 == len(seqs):
            return Piece(piece.rows.part(lo - first, hi - first + 1), piece.json[lo - first : hi - first + 1])
        return Piece(piece.rows.pick(seqs - first), piece.json[seqs - first])

    def keep(self, piece: Piece) -> None:
        rows = piece.rows
        if int(rows.seq[-1]) - int(rows.seq[0]) + 1 == len(rows):
            self._piece = piece


def plan(index: TopicIndex, seqs: Sequence[int], ahead: Ahead) -> list[Run]:
    """How to read these seqs, rising, all of which live."""
    asked: Ints = np.array(seqs, np.int64)
    runs: list[Run] = []
    if not len(asked):
        return runs
    few = len(asked) <= _FEW
    known = ahead.find(asked) if few else None
    if known is not None:
        return [Run(asked, None, known)]
    for part, first, stop in index.slices(int(asked[0]), int(asked[-1]) + 1):
        lo, hi = np.searchsorted(asked, (first, stop))
        mine = asked[lo:hi]
        for group in np.split(mine, np.flatnonzero(np.diff(mine) > _APART) + 1) if lo < hi else ():
            try:
                end = _reach(part, group) if few else int(group[-1]) + 1
                runs.append(Run(group, part.look(int(group[0]), end, _ALL), None, ahead if few else None))
            except (Damaged, Unavailable):
                runs.append(Run(group, None))
    return runs


def _reach(part: Part, group: Ints) -> int:
    """How far to read for these seqs: some records further, while they are small."""
    first, least = int(group[0]) - part.base, int(group[-1]) + 1
    sizes = np.cumsum(part.entries()["data_len"][first : first + _AHEAD], dtype=np.int64)
    return max(least, part.base + first + int(np.searchsorted(sizes, _AHEAD_BYTES, "right")))


def fetch(runs: Sequence[Run]) -> tuple[list[Piece], list[int]]:
    """The records of a plan, and the seqs of those that do not read."""
    pieces: list[Piece] = []
    lost: list[int] = []
    for seqs, look, known, ahead in runs:
        if known is not None:
            pieces.append(known)
            continue
        try:
            rows = None if look is None else look().rows
        except (Corrupt, Damaged, Unavailable):
            rows = None
        if rows is None or not len(rows):
            lost += seqs.tolist()
            continue
        json = (idx.flags(rows) & idx.JSON) != 0
        if ahead is not None:
            ahead.keep(Piece(rows, json))
        at = np.minimum(np.searchsorted(rows.seq, seqs), len(rows) - 1)
        there = rows.seq[at] == seqs
        lost += seqs[~there].tolist()
        which = at[there]
        pieces.append(Piece(rows, json) if len(which) == len(rows) else Piece(rows.pick(which), json[which]))
    return pieces, lost


def pick(pieces: Sequence[Piece], seqs: Sequence[int]) -> list[Piece]:
    """The records with these seqs, rising."""
    wanted: Ints = np.array(seqs, np.int64)
    found = []
    for rows, json in pieces:
        which = np.flatnonzero(np.isin(rows.seq, wanted))
        if len(which) == len(rows):
            found.append(Piece(rows, json))
        elif len(which):
            found.append(Piece(rows.pick(which), json[which]))
    return found
