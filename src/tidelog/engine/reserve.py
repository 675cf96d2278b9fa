"""[shell] Seqs of class `disk`, on record before they are given out: a crash may lose a record, never free its seq.

    head        reserving                booked
    ├──────────────┼────────────────────────┤
    │ may be used  │ once the disk has what says so: a mark that went along with a write
                     when a quarter of more than a few was used in no time, and for whose sync nobody waits

A write whose seqs lie behind `reserving` brings a mark of its own and waits until it is synced: the first one does, and
one that comes before the disk has the mark that was booked. How many are taken at a time: docs/decisions/0008.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidelog.formats import bodies, frame

if TYPE_CHECKING:
    from tidelog.disk.seam import File
    from tidelog.engine.core import Core
    from tidelog.wal import Commit, Shard

_FEW: Final = 256
RESERVE_MAX: Final = 1 << 20  # at a time, but for a larger batch
_WITHIN_MS: Final = 1000
_GROWTH: Final = 8


@dataclass(slots=True)
class Booked:
    """A mark on its way to the disk."""

    ceiling: int
    file: File | None = None  # where it was written; None: it is about to be
    end: int = 0


def is_due(core: Core, last: int) -> bool:
    """Whether a write of class `disk` up to `last` has to bring a mark of its own, and to wait until it is synced."""
    return last > core.reserving


def cover(commit: Commit, core: Core, shard: Shard, first: int, last: int, ts_ms: int) -> tuple[int, Booked | None]:
    """Put the marks in front of a write of seqs first to last that it needs. Returns the ceiling that its ack puts on
    record, and what a later sync does. In the committer's turn, from `prepare`."""
    redeem(core, shard)
    if last > core.reserving:
        core.reserving = last + ahead(core, last - first + 1)
        commit.lead(_mark(core, core.reserving, ts_ms))
        return core.reserving, None
    if wants_booking(core, last):
        core.booked = Booked(last + ahead(core, last - first + 1))
        commit.precede(_mark(core, core.booked.ceiling, ts_ms))
        shard.on_want()
        return 0, core.booked
    return 0, None


def covered(commit: Commit, core: Core, ceiling: int, books: Booked | None, *, good: bool) -> None:
    """The write that `cover` prepared is done. With the topic's lock held."""
    if good:
        core.reserved = max(core.reserved, ceiling)
        if books is not None:
            books.file, books.end = commit.file, commit.at + commit.size
        return
    core.reserving = core.reserved
    if books is not None:
        core.booked = None


def _mark(core: Core, ceiling: int, ts_ms: int) -> bytes:
    body = bodies.encode(bodies.HeadWatermark(ceiling))
    return frame.encode(frame.HEAD_WATERMARK, topic_id=core.id, ts_ms=ts_ms, data=body)


def redeem(core: Core, shard: Shard) -> None:
    """Let what was booked be used, where the disk has the mark by now. In the committer's turn."""
    booked = core.booked
    if booked is None or booked.file is None or not shard.has_synced(booked.file, booked.end):
        return
    with core.lock:
        core.reserved = max(core.reserved, booked.ceiling)
        core.reserving, core.booked = max(core.reserving, core.reserved), None


def wants_booking(core: Core, last: int) -> bool:
    """Whether a write up to `last` should take a mark along for those behind it: a quarter was used in no time. Not
    of a few: the head of who writes little jumps by no more than that (§4 of the contract)."""
    if core.booked is not None or core.ahead <= _FEW:
        return False
    return 4 * (core.reserving - last) < 3 * core.ahead and _is_quick(core, _WITHIN_MS // 4)


def ahead(core: Core, count: int) -> int:
    """How many seqs to reserve: more where the last reservation did not last, since each costs a sync."""
    least, quick = max(core.shared.limits.head_reserve, 4 * count), core.ahead and _is_quick(core, _WITHIN_MS)
    core.ahead = min(max(least, _GROWTH * core.ahead if quick else 0), max(RESERVE_MAX, least))
    core.reserved_ms = core.shared.clock.monotonic_ms()
    return core.ahead


def _is_quick(core: Core, within_ms: int) -> bool:
    return core.shared.clock.monotonic_ms() - core.reserved_ms < within_ms
