"""[shell] Recovery of routers: the manifest's, changed by the router frames of each target, then linked to topics.

    the target's frames  │ RouterCreate 1 │ … │ Forward 2 │ copies │ Forward 3 │ RouterDelete 4 │ RouterCreate 5 │ …
                           └ number, in the frame's seq                            └ a lane of its own

Router frames of a target are numbered, and its row in the manifest has the number of the last one that is part of it:
up to that one frames are passed over, all later ones are applied in their order. Copies are records of the target and
are replayed as such. So no topic waits for another one, and nothing is derived from what a source has or had.

Directories of versions that logged no copies (frames without a number): RouterCreate and RouterDelete are compared by
heads, as those versions did. Copies that only such a version knew are made again by the running lane from the
manifest's cursor; they get new seqs, because which ones they had is known to no frame.

[shell] What a checkpoint says of routers, and what a source remembers for them.

A target's row tells of its lane as it was when the records of the row were frozen, not as it is when the row is
written: copies that came between are in the WAL only. A source remembers which seqs were lost or deleted, and over how
many routers its records came, from the cursor of the newest manifest on: a power cut may take a lane back to there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidelog.engine.manifest import FedRow, Manifest, RouterRow
from tidelog.engine.results import RecoveryReport
from tidelog.engine.routing.forwarder import Forwarder, record_source_loss
from tidelog.engine.routing.router import HopCounts, Router
from tidelog.engine.topic_state import TopicState
from tidelog.formats import control_frames
from tidelog.formats.control_frames import ForwardEvent, Match, MatchOp
from tidelog.formats.frame import SEQ_MAX


@dataclass(frozen=True, slots=True)
class ForwarderSnapshot:
    """A topic's part in routing at one moment."""

    head: int  # of the topic itself
    applied_router_frame: int  # the number of its last router frame
    forwarder: Forwarder | None
    fed: FedRow | None
    routers: tuple[RouterRow, ...]
    hops: tuple[tuple[int, int, int], ...]


def snapshot_forwarder(topic: TopicState) -> None:
    """Remember how things stand, for the row that is about to be made. With the topic's lock held."""
    lane, index = topic.upstream, topic.index
    index.forwarded_seq = min((out.saved_cursor for out in topic.downstream), default=SEQ_MAX)
    index.drop_trimmed_below(index.forwarded_seq + 1)
    topic.hops.forget_below(index.forwarded_seq + 1)
    fed, routers = None, list[RouterRow]()
    if lane is not None:
        fed = FedRow(lane.source.id, lane.cursor)
        routers = [_encode_router(lane, router) for router in lane.routers]
    topic.forwarder_snapshot = ForwarderSnapshot(
        index.head, topic.applied_router_frame, lane, fed, tuple(routers), topic.hops.ranges_up_to(index.head)
    )


def on_manifest_saved(topic: TopicState) -> None:
    """A manifest has what was frozen: less has to be remembered from now on."""
    with topic.lock:
        frozen, topic.forwarder_snapshot = topic.forwarder_snapshot, None
    if frozen is not None and frozen.forwarder is not None and frozen.fed is not None:
        frozen.forwarder.saved_cursor = frozen.fed.cursor


def _encode_router(forwarder: Forwarder, router: Router) -> RouterRow:
    match = router.match
    return RouterRow(
        router.name,
        forwarder.source.id,
        forwarder.dest.id,
        router.preserve_node,
        router.preserve_tag,
        router.allow_cycle,
        router.exactly_once,
        None if match is None else (int(match.op), match.value),
        router.start,
        router.dest_head_at_creation,
        forwarder.forwarded[router.name],
    )


def decode_router(row: RouterRow, source: str, dest: str) -> Router:
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
        dest_head_at_creation=row.dest_base,
    )


@dataclass(slots=True)
class RouterRecovery:
    """The routers that lead to a topic, as far as replay has come."""

    manifest_head: int = 0  # of the topic, as the manifest has it
    source_id: int | None = None  # None: the topic that has the name of the routers' source in the end
    cursor: int = 0
    saved_cursor: int = 0  # the cursor of the manifest
    routers: list[Router] = field(default_factory=list)
    forwarded: dict[str, int] = field(default_factory=dict)
    unnumbered_head: int = 0  # the head that the last unnumbered Forward frame named
    is_unnumbered: bool = False  # they were made by a version that logged no copies

    def clear(self) -> None:
        self.routers, self.forwarded, self.source_id, self.is_unnumbered = [], {}, None, False


def restore_from_manifest(topics: Mapping[int, TopicState], manifest: Manifest) -> None:
    """Take over the routers of a manifest."""
    for row in manifest.topics:
        core = topics[row.id]
        core.hops = HopCounts(row.hops)
        core.applied_router_frame = core.staged_router_frame = row.wired
        core.router_recovery = wires = RouterRecovery(manifest_head=row.head)
        if row.fed is None:
            continue
        source = topics.get(row.fed.source_id)
        name = f"topic {row.fed.source_id}" if source is None else source.name
        wires.source_id, wires.cursor, wires.saved_cursor = row.fed.source_id, row.fed.cursor, row.fed.cursor
        mine = [each for each in manifest.routers if each.dest_id == row.id]
        wires.routers = [decode_router(each, name, core.name) for each in mine]
        wires.forwarded = {each.name: each.forwarded for each in mine}
        wires.is_unnumbered = not row.wired


def replay_router_frame(
    topic: TopicState,
    body: control_frames.RouterCreate | control_frames.RouterDelete | control_frames.Forward,
    number: int,
) -> None:
    """A router frame that is found in the WAL of its target."""
    wires = topic.router_recovery = topic.router_recovery or RouterRecovery()
    if number:
        if number <= topic.applied_router_frame:
            return
        topic.applied_router_frame = topic.staged_router_frame = number
    match body:
        case control_frames.RouterCreate():
            if number or body.initial_dest_base >= wires.manifest_head:
                _apply_create(wires, Router.from_body(body), unnumbered=not number)
        case control_frames.RouterDelete():
            if number or wires.unnumbered_head >= wires.manifest_head:
                _apply_delete(wires, body.name)
        case control_frames.Forward() if number:
            _apply_forward(topic, wires, body)
        case control_frames.Forward():
            # Up to this head copies may have been shown.
            wires.unnumbered_head = body.dest_head
            topic.index.reserve_up_to(body.dest_head)


def _apply_create(wires: RouterRecovery, router: Router, *, unnumbered: bool) -> None:
    if not wires.routers:
        wires.source_id, wires.cursor, wires.saved_cursor = None, router.start, router.start
        wires.is_unnumbered = unnumbered
    names = [known.name for known in wires.routers]
    if router.name in names:
        wires.routers[names.index(router.name)] = router
    else:
        wires.routers.append(router)
    wires.forwarded.setdefault(router.name, 0)


def _apply_delete(wires: RouterRecovery, name: str) -> None:
    wires.routers = [router for router in wires.routers if router.name != name]
    wires.forwarded.pop(name, None)
    if not wires.routers:
        wires.clear()


def _apply_forward(topic: TopicState, wires: RouterRecovery, body: control_frames.Forward) -> None:
    first = body.dest_head - body.total + 1
    if body.event is ForwardEvent.LOST:
        record_source_loss(topic, first, body.dest_head)
    topic.hops.add_runs(first, body.hops)
    if not wires.routers:
        return
    wires.source_id, wires.cursor, wires.is_unnumbered = body.source_id, body.last, False
    for router, count in zip(wires.routers, body.counts, strict=False):
        wires.forwarded[router.name] += count


def link_forwarders(topics: Mapping[int, TopicState], report: RecoveryReport, *, writable: bool) -> bool:
    """Make the lanes, once every topic is as it was left. A dropped target takes its routers along. Returns whether a
    source had lost its end: the next manifest has to say where its routers go on, before the source has new records."""
    shorter = False
    living = {core.name: core for core in sorted(topics.values(), key=lambda core: core.id) if not core.is_dropped}
    for core in topics.values():
        wires, core.router_recovery = core.router_recovery, None
        if wires is None or not wires.routers or core.is_dropped:
            continue
        source = living.get(wires.routers[0].source) if wires.source_id is None else topics.get(wires.source_id)
        if source is None or source.is_dropped:
            names = ", ".join(router.name for router in wires.routers)
            report.damage.append(f"{core.name}: its source is gone, and with it the routers {names}")
            continue
        # A source of class `memory` or `ephemeral` may have lost its end: what it gets from now on is passed on.
        head = source.index.head
        shorter |= max(wires.cursor, *(router.start for router in wires.routers)) > head
        lane = Forwarder(source, core, min(wires.cursor, head))
        lane.saved_cursor = min(wires.saved_cursor, lane.cursor)
        lane.routers = tuple(replace(router, start=min(router.start, head)) for router in wires.routers)
        lane.forwarded = wires.forwarded
        core.upstream = lane
        source.downstream.append(lane)
        if wires.is_unnumbered and writable and report.frames:
            pending = (source.index.head - lane.cursor) * len(lane.routers)
            core.index.reserve_up_to(core.index.head + pending)
            core.last_assigned_seq = max(core.last_assigned_seq, core.index.head)
    for core in topics.values():
        if not core.downstream:
            core.hops = HopCounts()
    return shorter
