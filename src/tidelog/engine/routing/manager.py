"""The routers of an engine: create, change, drop, the thread that runs passes, checkpoints and recovery.

On return a created or dropped router survives a power cut. Before a router is changed or dropped it forwards all
records that its source has. Its copies stay.

    lock order: registry lock of the engine → lock of a forwarder → lock of a topic

One thread, started with the first router, is woken when a source gets records and forwards them, so that waiting
readers of the dest are woken. A read of a dest forwards missing records itself (`forwarder.pull_from_sources`).

Checkpoints and recovery: manifest rows, changed by the router frames of each dest, linked to topics.

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

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Thread

from tidelog.engine.manifest import FedRow, Manifest, RouterRow
from tidelog.engine.results import RecoveryReport
from tidelog.engine.routing.forwarder import Forwarder, pull_from_sources, record_source_loss
from tidelog.engine.routing.router import HopCounts, Router, RouterState, check_cycle, check_endpoints, router_state
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error, RouterNotFound, Throttled
from tidelog.formats import control_frames
from tidelog.formats.control_frames import ForwardEvent
from tidelog.formats.frame import SEQ_MAX
from tidelog.wal import Commit, CommitFuture

_BLOCKED_RETRY_S = 0.05  # interval of retries while a dest has no capacity
_PASSES_AT_ONCE = 64  # passes in progress at a time
OnError = Callable[[Exception], None]


class RouterManager:
    """All routers of an engine."""

    def __init__(self, topics: Iterable[TopicState], *, limit: int, threaded: bool, on_error: OnError) -> None:
        self._forwarders: dict[str, Forwarder] = {}  # by the name of a router
        self._limit, self._threaded, self._on_error = limit, threaded, on_error
        self._wake, self._ending = Event(), Event()
        self._listeners: dict[int, Callable[[], None]] = {}  # by the id of a source
        self._published_sources: set[TopicState] = set()  # sources with new records for the thread
        self._thread: Thread | None = None
        for topic in topics:
            if topic.upstream is not None:
                self._forwarders |= dict.fromkeys((router.name for router in topic.upstream.routers), topic.upstream)
                self._watch_source(topic.upstream)

    @property
    def has_thread(self) -> bool:
        """Whether a thread runs passes."""
        return self._threaded

    # ── lookup ────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._forwarders)

    def states(self, prefix: str, source: str | None, dest: str | None) -> list[RouterState]:
        """Return the routers by name, without forwarding anything."""
        names = [name for name in sorted(self._forwarders.copy(), key=str.encode) if name.startswith(prefix)]
        states = [self.state(name, fresh=False) for name in names]
        return [state for state in states if state and source in (None, state.source) and dest in (None, state.dest)]

    def state(self, name: str, *, created: bool = False, fresh: bool = True) -> RouterState | None:
        """Return one router; `fresh`: after it has forwarded all records of its source."""
        forwarder = self._forwarders.get(name)
        if forwarder is None:
            return None
        if fresh:
            with suppress(Error):
                pull_from_sources(forwarder.dest)
        with forwarder.dest.lock:
            router = next((router for router in forwarder.routers if router.name == name), None)
            return None if router is None else router_state(router, forwarder.forwarded[name], created=created)

    def all_routers(self) -> list[Router]:
        return [router for forwarder in set(self._forwarders.values()) for router in forwarder.routers]

    # ── create and drop, with the registry lock held ──────────────────────────────────────────

    def check(self, candidate: Router) -> bool:
        """Return whether a router of this name exists. Raise if the candidate is not allowed, in the order of the API
        contract."""
        routers = self.all_routers()
        existing = check_endpoints(candidate, routers)
        if existing is None and self._limit and len(self._forwarders) >= self._limit:
            raise Throttled("routers", max=self._limit, used=len(self._forwarders), asked=1)
        check_cycle(candidate, routers)
        return existing is not None

    def create_or_update(self, candidate: Router, source: TopicState, dest: TopicState) -> None:
        """Create a router, or change the one of this name."""
        forwarder = dest.upstream
        if forwarder is None:
            forwarder = Forwarder(source, dest, source.index.head)
            with source.lock:  # from now on the source keeps lost and deleted ranges for the forwarder
                source.downstream.append(forwarder)
            source.mark_dirty()
        with suppress(Error):  # records that cannot be forwarded now are forwarded later, with the new settings
            forwarder.run()
        with forwarder.lock:
            routers = forwarder.routers
            existing = next((router for router in routers if router.name == candidate.name), None)
            if existing is not None and existing.has_settings_of(candidate):
                return
            start = source.index.head if existing is None else forwarder.cursor
            router = replace(candidate, start=start, dest_head_at_creation=dest.index.head)
            replaced = tuple(router if other is existing else other for other in routers)
            after = (*routers, router) if existing is None else replaced
            try:
                self._log_router_frame(forwarder, router.to_body(), partial(self._set_routers, forwarder, after))
            except BaseException:
                if not routers:
                    self._end_forwarder(forwarder)
                raise
        self._forwarders[candidate.name] = forwarder
        self._watch_source(forwarder)

    def drop(self, name: str) -> bool:
        """Drop a router after it has forwarded all records of its source; return False if there is none."""
        forwarder = self._forwarders.get(name)
        if forwarder is None:
            return False
        with suppress(Error):
            pull_from_sources(forwarder.dest)
        with forwarder.lock:
            after = tuple(router for router in forwarder.routers if router.name != name)
            body = control_frames.RouterDelete(name)
            self._log_router_frame(forwarder, body, partial(self._set_routers, forwarder, after))
        del self._forwarders[name]
        if not after:
            self._end_forwarder(forwarder)
        return True

    def _set_routers(self, forwarder: Forwarder, routers: tuple[Router, ...], number: int) -> None:
        """Apply a logged change of routers atomically: a checkpoint sees all of it or nothing."""
        dest = forwarder.dest
        with dest.lock:
            forwarder.routers = routers
            forwarder.forwarded = {router.name: forwarder.forwarded.get(router.name, 0) for router in routers}
            dest.upstream = forwarder if routers else None
            dest.applied_router_frame = number

    def _log_router_frame(self, forwarder: Forwarder, body: control_frames.Body, apply: Callable[[int], None]) -> None:
        """Log a router frame of the dest durably and apply it with its number."""
        dest = forwarder.dest
        future: CommitFuture[None] = CommitFuture(dest.shard)

        def on_done(error: Error | None) -> None:
            if error is None:
                apply(number)

        with dest.lock:  # numbers are in the order of the WAL
            number = dest.staged_router_frame + 1
            pieces = [forwarder.encode_router_frame(body, number)]
            dest.submit(Commit(pieces, frames=1, durable=True, on_done=on_done, future=future))
            dest.staged_router_frame = number
        future.wait()

    def _end_forwarder(self, forwarder: Forwarder) -> None:
        forwarder.is_ended = True
        source = forwarder.source
        with source.lock:
            source.downstream = [other for other in source.downstream if other is not forwarder]
        source.mark_dirty()
        if not source.downstream and (listener := self._listeners.pop(source.id, None)):
            source.remove_listener(listener)

    def drop_routers_from(self, topic: TopicState) -> set[str]:
        """Drop the routers from a topic that is about to be dropped; return them and the routers to it."""
        from_topic = {name for name, forwarder in self._forwarders.items() if forwarder.source is topic}
        for name in sorted(from_topic):
            self.drop(name)
        return from_topic | {name for name, forwarder in self._forwarders.items() if forwarder.dest is topic}

    def forget_topic(self, topic: TopicState) -> None:
        """Forget the routers to a topic that was dropped."""
        forwarder = topic.upstream
        if forwarder is not None:
            for router in forwarder.routers:
                del self._forwarders[router.name]
            self._end_forwarder(forwarder)
            with topic.lock:
                topic.upstream = None

    # ── passes ────────────────────────────────────────────────────────────────────────────────

    def run_pass(self) -> bool:
        """Run one pass of every forwarder; return whether any of them forwarded something."""
        return bool(self._run_passes(list(dict.fromkeys(self._forwarders.copy().values()))))

    def run_until_idle(self) -> None:
        """Forward everything that can be forwarded, through chains and around cycles up to the hop limit."""
        while self.run_pass():
            pass

    def _watch_source(self, forwarder: Forwarder) -> None:
        if not self._threaded:
            return
        source = forwarder.source
        forwarder.source.add_listener(self._listeners.setdefault(source.id, partial(self._on_published, source)))
        if self._thread is None:
            self._thread = Thread(target=self._run_thread, name="tidelog routers", daemon=True)
            self._thread.start()
        self._on_published(source)

    def _on_published(self, source: TopicState) -> None:
        self._published_sources.add(source)
        self._wake.set()

    def _run_thread(self) -> None:
        blocked: set[TopicState] = set()
        while not self._ending.is_set():
            self._wake.wait(_BLOCKED_RETRY_S if blocked else None)
            self._wake.clear()
            waiting, blocked = blocked, set()
            while self._published_sources:
                waiting.add(self._published_sources.pop())
            for source in waiting:
                if self._forward_source(source):
                    blocked.add(source)

    def _forward_source(self, source: TopicState) -> bool:
        """Forward the records of a source; return whether a dest has no capacity for them."""
        active = forwarders = list(source.downstream)
        while active and not self._ending.is_set():
            active = self._run_passes(active)
        return any(forwarder.is_blocked for forwarder in forwarders)

    def _run_passes(self, forwarders: list[Forwarder]) -> list[Forwarder]:
        """Run one pass of each forwarder; return those that moved. Passes are staged first and waited for together, so
        that dests of one shard share a write and a sync."""
        moved = list[Forwarder]()
        while forwarders:
            some, forwarders = forwarders[:_PASSES_AT_ONCE], forwarders[_PASSES_AT_ONCE:]
            held = [forwarder for forwarder in some if forwarder.lock.acquire(blocking=False)]
            try:
                begun = [(forwarder, self._begin_pass(forwarder)) for forwarder in held]
                moved += [forwarder for forwarder, wait in begun if self._finish_pass(wait)]
            finally:
                for forwarder in held:
                    forwarder.lock.release()
            # Another thread runs a pass of these: wait for one after the other, with no other forwarder's lock.
            moved += [forwarder for forwarder in some if forwarder not in held and self._finish_pass(forwarder.step)]
        return moved

    def _begin_pass(self, forwarder: Forwarder) -> Callable[[], bool]:
        try:
            return forwarder.begin_pass()
        except Exception as error:  # one forwarder's failure must not stop the others or the thread
            self._on_error(error)
            return lambda: False

    def _finish_pass(self, wait: Callable[[], bool]) -> bool:
        try:
            return wait()
        except Exception as error:  # one forwarder's failure must not stop the others or the thread
            self._on_error(error)
            return False

    def close(self) -> None:
        """Stop the thread and forward the rest."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.run_until_idle()


def require_router(state: RouterState | None, name: str) -> RouterState:
    if state is None:
        raise RouterNotFound(name)
    return state


# ── checkpoints and recovery ──────────────────────────────────────────────────────────────────


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
        forwarder = snapshot.forwarder
        if forwarder.saved_cursor != snapshot.fed.cursor:
            forwarder.saved_cursor = snapshot.fed.cursor
            forwarder.source.mark_dirty()  # its row has what it keeps for this cursor


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
