"""Routers in checkpoints and in recovery: manifest rows, changed by the router frames of each dest, linked to topics.

    frames of the dest  │ RouterCreate 1 │ … │ Forward 2 │ copies │ Forward 3 │ RouterDelete 4 │ RouterCreate 5 │ …
                          └ number, in the frame's seq                            └ a new forwarder

Router frames of a dest are numbered, and its manifest row has the number of the last one it includes: replay skips
frames up to that number and applies later ones in order. Copies are replayed as records of the dest. So no topic
waits for another, and nothing is derived from the records of a source.

Directories of versions that did not log copies have frames without a number: RouterCreate and RouterDelete are
compared by heads, as those versions did. Copies that only such a version had are made again from the manifest's
cursor with new seqs, because no frame holds the old ones.

A manifest row holds the forwarder as of the snapshot of the row's records, not as of the write of the row: later copies
are in the WAL only. A source keeps its lost and deleted ranges and its hop counts from the cursor of the newest
manifest on, because a power cut may take a forwarder back to there.
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
from tidelog.formats.control_frames import ForwardEvent
from tidelog.formats.frame import SEQ_MAX


@dataclass(frozen=True, slots=True)
class ForwarderSnapshot:
    """The routing state of a topic at one moment."""

    head: int  # of the topic itself
    applied_router_frame: int  # the number of its last router frame
    forwarder: Forwarder | None
    fed: FedRow | None
    routers: tuple[RouterRow, ...]
    hops: tuple[tuple[int, int, int], ...]


def snapshot_forwarder(topic: TopicState) -> None:
    """Store the routing state of a topic for its next manifest row. With the topic's lock held."""
    forwarder, index = topic.upstream, topic.index
    index.forwarded_seq = min((out.saved_cursor for out in topic.downstream), default=SEQ_MAX)
    index.drop_trimmed_below(index.forwarded_seq + 1)
    topic.hops.forget_below(index.forwarded_seq + 1)
    fed, routers = None, list[RouterRow]()
    if forwarder is not None:
        fed = FedRow(forwarder.source.id, forwarder.cursor)
        source_id, counts = forwarder.source.id, forwarder.forwarded
        routers = [router.to_row(source_id, topic.id, counts[router.name]) for router in forwarder.routers]
    topic.forwarder_snapshot = ForwarderSnapshot(
        index.head, topic.applied_router_frame, forwarder, fed, tuple(routers), topic.hops.ranges_up_to(index.head)
    )


def on_manifest_saved(topic: TopicState) -> None:
    """Note that the snapshot is in a manifest: sources may drop what only earlier cursors needed."""
    with topic.lock:
        snapshot, topic.forwarder_snapshot = topic.forwarder_snapshot, None
    if snapshot is not None and snapshot.forwarder is not None and snapshot.fed is not None:
        snapshot.forwarder.saved_cursor = snapshot.fed.cursor


@dataclass(slots=True)
class RouterRecovery:
    """The routers to a topic during replay."""

    manifest_head: int = 0  # of the topic
    source_id: int | None = None  # None: the topic that has the name of the routers' source after replay
    cursor: int = 0
    saved_cursor: int = 0  # the cursor of the manifest
    routers: list[Router] = field(default_factory=list)
    forwarded: dict[str, int] = field(default_factory=dict)
    unnumbered_head: int = 0  # the head that the last unnumbered Forward frame named
    is_unnumbered: bool = False  # created by a version that did not log copies

    def clear(self) -> None:
        self.routers, self.forwarded, self.source_id, self.is_unnumbered = [], {}, None, False


def restore_from_manifest(topics: Mapping[int, TopicState], manifest: Manifest) -> None:
    """Restore the routers of a manifest."""
    for row in manifest.topics:
        topic = topics[row.id]
        topic.hops = HopCounts(row.hops)
        topic.applied_router_frame = topic.staged_router_frame = row.wired
        topic.router_recovery = recovery = RouterRecovery(manifest_head=row.head)
        if row.fed is None:
            continue
        source = topics.get(row.fed.source_id)
        name = f"topic {row.fed.source_id}" if source is None else source.name
        recovery.source_id, recovery.cursor, recovery.saved_cursor = row.fed.source_id, row.fed.cursor, row.fed.cursor
        rows = [router_row for router_row in manifest.routers if router_row.dest_id == row.id]
        recovery.routers = [Router.from_row(router_row, name, topic.name) for router_row in rows]
        recovery.forwarded = {router_row.name: router_row.forwarded for router_row in rows}
        recovery.is_unnumbered = not row.wired


def replay_router_frame(
    topic: TopicState,
    body: control_frames.RouterCreate | control_frames.RouterDelete | control_frames.Forward,
    number: int,
) -> None:
    """Apply a router frame from the WAL of its dest."""
    recovery = topic.router_recovery = topic.router_recovery or RouterRecovery()
    if number:
        if number <= topic.applied_router_frame:
            return
        topic.applied_router_frame = topic.staged_router_frame = number
    match body:
        case control_frames.RouterCreate():
            if number or body.initial_dest_base >= recovery.manifest_head:
                _apply_create(recovery, Router.from_body(body), unnumbered=not number)
        case control_frames.RouterDelete():
            if number or recovery.unnumbered_head >= recovery.manifest_head:
                _apply_delete(recovery, body.name)
        case control_frames.Forward() if number:
            _apply_forward(topic, recovery, body)
        case control_frames.Forward():
            # Readers may have seen copies up to this head.
            recovery.unnumbered_head = body.dest_head
            topic.index.reserve_up_to(body.dest_head)


def _apply_create(recovery: RouterRecovery, router: Router, *, unnumbered: bool) -> None:
    if not recovery.routers:
        recovery.source_id, recovery.cursor, recovery.saved_cursor = None, router.start, router.start
        recovery.is_unnumbered = unnumbered
    names = [other.name for other in recovery.routers]
    if router.name in names:
        recovery.routers[names.index(router.name)] = router
    else:
        recovery.routers.append(router)
    recovery.forwarded.setdefault(router.name, 0)


def _apply_delete(recovery: RouterRecovery, name: str) -> None:
    recovery.routers = [router for router in recovery.routers if router.name != name]
    recovery.forwarded.pop(name, None)
    if not recovery.routers:
        recovery.clear()


def _apply_forward(topic: TopicState, recovery: RouterRecovery, body: control_frames.Forward) -> None:
    first = body.dest_head - body.total + 1
    if body.event is ForwardEvent.LOST:
        record_source_loss(topic, first, body.dest_head)
    topic.hops.add_runs(first, body.hops)
    if not recovery.routers:
        return
    recovery.source_id, recovery.cursor, recovery.is_unnumbered = body.source_id, body.last, False
    for router, count in zip(recovery.routers, body.counts, strict=False):
        recovery.forwarded[router.name] += count


def link_forwarders(topics: Mapping[int, TopicState], report: RecoveryReport, *, writable: bool) -> bool:
    """Create the forwarders after replay. A dropped dest takes its routers along. Return whether a source lost its
    newest records: then a manifest must hold the cursors before the source gets new ones."""
    is_shorter = False
    live = {topic.name: topic for topic in sorted(topics.values(), key=lambda topic: topic.id) if not topic.is_dropped}
    for topic in topics.values():
        recovery, topic.router_recovery = topic.router_recovery, None
        if recovery is None or not recovery.routers or topic.is_dropped:
            continue
        source_id = recovery.source_id
        source = live.get(recovery.routers[0].source) if source_id is None else topics.get(source_id)
        if source is None or source.is_dropped:
            names = ", ".join(router.name for router in recovery.routers)
            report.damage.append(f"{topic.name}: the source of its routers {names} is missing; they were dropped")
            continue
        # A source of class `memory` or `ephemeral` may have lost its newest records: new ones are forwarded.
        head = source.index.head
        is_shorter |= max(recovery.cursor, *(router.start for router in recovery.routers)) > head
        forwarder = Forwarder(source, topic, min(recovery.cursor, head))
        forwarder.saved_cursor = min(recovery.saved_cursor, forwarder.cursor)
        forwarder.routers = tuple(replace(router, start=min(router.start, head)) for router in recovery.routers)
        forwarder.forwarded = recovery.forwarded
        topic.upstream = forwarder
        source.downstream.append(forwarder)
        if recovery.is_unnumbered and writable and report.frames:
            pending = (source.index.head - forwarder.cursor) * len(forwarder.routers)
            topic.index.reserve_up_to(topic.index.head + pending)
            topic.last_assigned_seq = max(topic.last_assigned_seq, topic.index.head)
    for topic in topics.values():
        if not topic.downstream:
            topic.hops = HopCounts()
    return is_shorter
