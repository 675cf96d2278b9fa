"""[shell] What a checkpoint says of routers, and what a source remembers for them.

A target's row tells of its lane as it was when the records of the row were frozen, not as it is when the row is
written: copies that came between are in the WAL only. A source remembers which seqs were lost or deleted, and over how
many routers its records came, from the cursor of the newest manifest on: a power cut may take a lane back to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.engine.manifest import FedRow, RouterRow
from tidelog.engine.routing.router import Router
from tidelog.formats.bodies import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX

if TYPE_CHECKING:
    from tidelog.engine.core import Core
    from tidelog.engine.routing.lane import Lane


@dataclass(frozen=True, slots=True)
class Frozen:
    """A topic's part in routing at one moment."""

    head: int  # of the topic itself
    wired: int  # the number of its last router frame
    lane: Lane | None
    fed: FedRow | None
    routers: tuple[RouterRow, ...]
    hops: tuple[tuple[int, int, int], ...]


def freeze(core: Core) -> None:
    """Remember how things stand, for the row that is about to be made. With the topic's lock held."""
    lane, index = core.lane, core.index
    index.passed = min((out.saved for out in core.lanes), default=SEQ_MAX)
    index.untrim(index.passed + 1)
    core.hops.forget(index.passed + 1)
    fed, routers = None, list[RouterRow]()
    if lane is not None:
        fed = FedRow(lane.source.id, lane.cursor)
        routers = [_row(lane, router) for router in lane.routers]
    core.frozen = Frozen(index.head, core.wired, lane, fed, tuple(routers), core.hops.rows(index.head))


def saved(core: Core) -> None:
    """A manifest has what was frozen: less has to be remembered from now on."""
    with core.lock:
        frozen, core.frozen = core.frozen, None
    if frozen is not None and frozen.lane is not None and frozen.fed is not None:
        frozen.lane.saved = frozen.fed.cursor


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
