"""The routers of an engine: create, change, drop, and the thread that runs passes.

On return a created or dropped router survives a power cut. Before a router is changed or dropped it forwards all
records that its source has. Its copies stay.

    lock order: registry lock of the engine → lock of a forwarder → lock of a topic

One thread, started with the first router, is woken when a source gets records and forwards them, so that waiting
readers of the dest are woken. A read of a dest forwards missing records itself (`forwarder.pull_from_sources`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread

from tidelog.engine.routing.forwarder import Forwarder, pull_from_sources
from tidelog.engine.routing.router import Router, RouterState, check_cycle, check_endpoints, router_state
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error, RouterNotFound, Throttled
from tidelog.formats import control_frames
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
