"""[shell] What a checkpoint says of lanes, and what of a source it must keep for them.

    source   ──┬─────────────┬─────────────────────▶      recovery begins at `saved` and makes the copies up to
               │ saved       │ cursor                     the cursor again: the records between are kept, deleted or
               └── is kept ──┘                            evicted as they may be

A dest's row tells of its lane as it was when the records of the row were frozen, not as it is when the row
is written: copies that came between are in no segment yet. An ended lane is remembered by its source until a
manifest has all of its copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.engine.block import Block
from tidelog.engine.manifest import FedRow, RouterRow
from tidelog.engine.routing.router import Router
from tidelog.engine.routing.stretch import RECORDS_MAX
from tidelog.formats.bodies import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX

if TYPE_CHECKING:
    from tidelog.engine.core import Core
    from tidelog.engine.routing.lane import Lane


@dataclass(frozen=True, slots=True)
class Frozen:
    """A topic's part in routing at one moment."""

    head: int  # of the topic itself
    lane: Lane | None
    fed: FedRow | None
    routers: tuple[RouterRow, ...]
    hops: tuple[tuple[int, int, int], ...]
    ended: tuple[Lane, ...]  # of which all copies lie at or below the head


def freeze(core: Core) -> None:
    """Remember how things stand, for the row that is about to be made. With the topic's lock held."""
    lane, head = core.lane, core.index.head
    core.index.passed = min((out.saved for out in core.lanes), default=SEQ_MAX)
    core.hops.forget(core.index.passed + 1)
    if lane is None and not core.ended and not core.hops:
        core.frozen = None
        return
    fed, routers = None, list[RouterRow]()
    if lane is not None and lane.routers:
        fed = FedRow(lane.source.id, lane.place.cursor, not lane.direct)
        routers = [_row(lane, router) for router in lane.routers]
    core.frozen = Frozen(head, lane, fed, tuple(routers), core.hops.rows(head), tuple(core.ended))


def saved(core: Core) -> None:
    """A manifest has what was frozen: less has to be kept from now on."""
    with core.lock:
        frozen, core.frozen = core.frozen, None
    if frozen is None:
        return
    if frozen.lane is not None and frozen.fed is not None:
        frozen.lane.saved = frozen.fed.cursor
    for lane in frozen.ended:
        release(lane)


def release(lane: Lane) -> None:
    """Nothing has to be kept for a lane that ended."""
    with lane.dest.lock:
        lane.dest.ended = [ended for ended in lane.dest.ended if ended is not lane]
    with lane.source.lock:
        lane.source.lanes = [out for out in lane.source.lanes if out is not lane]


def obsolete(core: Core) -> set[int]:
    """Segments of which nothing is left to read and no copy would have to be made again. With the lock held."""
    gone = core.index.obsolete()
    for lane in core.lanes if gone else ():
        lo, hi = lane.saved, lane.place.cursor + RECORDS_MAX  # so far a pass that is under way may have read
        for part in core.index.parts:
            if part.stop - 1 > lo and part.base <= hi:
                gone.discard(part.segment if isinstance(part, Block) else part.base)
    return gone


def _row(lane: Lane, router: Router) -> RouterRow:
    match = router.match
    return RouterRow(
        router.name,
        lane.source.id,
        lane.dest.id,
        router.preserve_node,
        router.preserve_tag,
        router.allow_cycle,
        router.exactly_once,
        None if match is None else (int(match.op), match.value),
        router.start,
        router.base,
        lane.forwarded[router.name],
    )


def router_of(row: RouterRow, source: str, dest: str) -> Router:
    return Router(
        name=row.name,
        source=source,
        dest=dest,
        preserve_node=row.preserve_node,
        preserve_tag=row.preserve_tag,
        allow_cycle=row.allow_cycle,
        exactly_once=row.exactly_once,
        match=None if row.match is None else Match(MatchOp(row.match[0]), row.match[1]),
        start=row.start,
        base=row.dest_base,
    )
