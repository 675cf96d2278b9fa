"""[shell] Recovery of routers: the manifest's, changed by the router frames of each target, then linked to topics.

    the target's frames  │ RouterCreate 1 │ … │ Forward 2 │ copies │ Forward 3 │ RouterDelete 4 │ RouterCreate 5 │ …
                           └ number, in the frame's seq                            └ a lane of its own

Router frames of a target are numbered, and its row in the manifest has the number of the last one that is part of it:
up to that one frames are passed over, all later ones are applied in their order. Copies are records of the target and
are replayed as such. So no topic waits for another one, and nothing is derived from what a source has or had.

Directories of versions that logged no copies (frames without a number): RouterCreate and RouterDelete are compared by
heads, as those versions did. Copies that only such a version knew are made again by the running lane from the
manifest's cursor; they get new seqs, because which ones they had is known to no frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidelog.engine.core import Core
from tidelog.engine.manifest import Manifest
from tidelog.engine.report import Report
from tidelog.engine.routing.holding import router_of
from tidelog.engine.routing.hops import Hops
from tidelog.engine.routing.lane import Lane, trim
from tidelog.engine.routing.router import Router
from tidelog.formats import bodies
from tidelog.formats.bodies import ForwardEvent


@dataclass(slots=True)
class Wires:
    """The routers that lead to a topic, as far as replay has come."""

    head: int = 0  # of the topic, as the manifest has it
    source_id: int | None = None  # None: the topic that has the name of the routers' source in the end
    cursor: int = 0
    saved: int = 0  # the cursor of the manifest
    routers: list[Router] = field(default_factory=list)
    forwarded: dict[str, int] = field(default_factory=dict)
    reached: int = 0  # the head that the last unnumbered Forward frame named
    unnumbered: bool = False  # they were made by a version that logged no copies

    def end(self) -> None:
        self.routers, self.forwarded, self.source_id, self.unnumbered = [], {}, None, False


def begin(cores: Mapping[int, Core], manifest: Manifest) -> None:
    """Take over the routers of a manifest."""
    for row in manifest.topics:
        core = cores[row.id]
        core.hops = Hops(row.hops)
        core.wired = core.wiring = row.wired
        core.wires = wires = Wires(head=row.head)
        if row.fed is None:
            continue
        source = cores.get(row.fed.source_id)
        name = f"topic {row.fed.source_id}" if source is None else source.name
        wires.source_id, wires.cursor, wires.saved = row.fed.source_id, row.fed.cursor, row.fed.cursor
        mine = [each for each in manifest.routers if each.dest_id == row.id]
        wires.routers = [router_of(each, name, core.name) for each in mine]
        wires.forwarded = {each.name: each.forwarded for each in mine}
        wires.unnumbered = not row.wired


def replay(core: Core, body: bodies.RouterCreate | bodies.RouterDelete | bodies.Forward, number: int) -> None:
    """A router frame that is found in the WAL of its target."""
    wires = core.wires = core.wires or Wires()
    if number:
        if number <= core.wired:
            return
        core.wired = core.wiring = number
    match body:
        case bodies.RouterCreate():
            if number or body.initial_dest_base >= wires.head:
                _create(wires, Router.of_body(body), unnumbered=not number)
        case bodies.RouterDelete():
            if number or wires.reached >= wires.head:
                _delete(wires, body.name)
        case bodies.Forward() if number:
            _forward(core, wires, body)
        case bodies.Forward():
            # Up to this head copies may have been shown.
            wires.reached = body.dest_head
            core.index.pad(body.dest_head)


def _create(wires: Wires, router: Router, *, unnumbered: bool) -> None:
    if not wires.routers:
        wires.source_id, wires.cursor, wires.saved = None, router.start, router.start
        wires.unnumbered = unnumbered
    names = [known.name for known in wires.routers]
    if router.name in names:
        wires.routers[names.index(router.name)] = router
    else:
        wires.routers.append(router)
    wires.forwarded.setdefault(router.name, 0)


def _delete(wires: Wires, name: str) -> None:
    wires.routers = [router for router in wires.routers if router.name != name]
    wires.forwarded.pop(name, None)
    if not wires.routers:
        wires.end()


def _forward(core: Core, wires: Wires, body: bodies.Forward) -> None:
    first = body.dest_head - body.total + 1
    if body.event is ForwardEvent.LOST:
        trim(core, first, body.dest_head)
    core.hops.add_runs(first, body.hops)
    if not wires.routers:
        return
    wires.source_id, wires.cursor, wires.unnumbered = body.source_id, body.last, False
    for router, count in zip(wires.routers, body.counts, strict=False):
        wires.forwarded[router.name] += count


def link(cores: Mapping[int, Core], report: Report, *, writable: bool) -> bool:
    """Make the lanes, once every topic is as it was left. A dropped target takes its routers along. Returns whether a
    source had lost its end: the next manifest has to say where its routers go on, before the source has new records."""
    shorter = False
    living = {core.name: core for core in sorted(cores.values(), key=lambda core: core.id) if not core.dropped}
    for core in cores.values():
        wires, core.wires = core.wires, None
        if wires is None or not wires.routers or core.dropped:
            continue
        source = living.get(wires.routers[0].source) if wires.source_id is None else cores.get(wires.source_id)
        if source is None or source.dropped:
            names = ", ".join(router.name for router in wires.routers)
            report.damage.append(f"{core.name}: its source is gone, and with it the routers {names}")
            continue
        # A source of class `memory` or `ephemeral` may have lost its end: what it gets from now on is passed on.
        head = source.index.head
        shorter |= max(wires.cursor, *(router.start for router in wires.routers)) > head
        lane = Lane(source, core, min(wires.cursor, head))
        lane.saved = min(wires.saved, lane.cursor)
        lane.routers = tuple(replace(router, start=min(router.start, head)) for router in wires.routers)
        lane.forwarded = wires.forwarded
        core.lane = lane
        source.lanes.append(lane)
        if wires.unnumbered and writable and report.frames:
            pending = (source.index.head - lane.cursor) * len(lane.routers)
            core.index.pad(core.index.head + pending)
            core.tail = max(core.tail, core.index.head)
    for core in cores.values():
        if not core.lanes:
            core.hops = Hops()
    return shorter
