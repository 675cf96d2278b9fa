"""[shell] The routers of an engine: made, changed, dropped, and driven.

What is true on return: a router that was made or dropped survives a power cut. A router that is changed has first
passed on what there was, as it was; one that is dropped too. Its copies stay.

    registry lock (the engine's) → a lane's turn → a topic's lock

One thread, started with the first router, is woken by what sources publish and brings it on, so that a
reader who waits is woken; whoever looks at a dest brings on what it lacks by itself (`lane.catch_up`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread

from tidelog.engine.routing import forwarder as lanes
from tidelog.engine.routing.forwarder import Forwarder
from tidelog.engine.routing.router import Router, RouterState, check_cycle, check_endpoints, router_state
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error, RouterNotFound, Throttled
from tidelog.formats import control_frames
from tidelog.wal import Commit, CommitFuture

_BLOCKED_RETRY_S = 0.05  # how soon a lane without room is tried again
_PASSES_AT_ONCE = 64  # passes that are under way at a time
OnError = Callable[[Exception], None]


class RouterManager:
    def __init__(self, topics: Iterable[TopicState], *, limit: int, threaded: bool, on_error: OnError) -> None:
        self._forwarders: dict[str, Forwarder] = {}  # by the name of a router
        self._limit, self._threaded, self._on_error = limit, threaded, on_error
        self._wake, self._ending = Event(), Event()
        self._listeners: dict[int, Callable[[], None]] = {}  # by the id of a source
        self._published_sources: set[TopicState] = set()  # sources that have published since they were last looked at
        self._thread: Thread | None = None
        for core in topics:
            if core.upstream is not None:
                self._forwarders |= dict.fromkeys((router.name for router in core.upstream.routers), core.upstream)
                self._watch_source(core.upstream)

    @property
    def has_thread(self) -> bool:
        """Whether lanes are driven by themselves."""
        return self._threaded

    # ── what there is ─────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._forwarders)

    def states(self, prefix: str, source: str | None, dest: str | None) -> list[RouterState]:
        """By name, as they are, without bringing on anything."""
        names = [name for name in sorted(self._forwarders.copy(), key=str.encode) if name.startswith(prefix)]
        found = [self.state(name, fresh=False) for name in names]
        return [state for state in found if state and source in (None, state.source) and dest in (None, state.dest)]

    def state(self, name: str, *, created: bool = False, fresh: bool = True) -> RouterState | None:
        """One router; `fresh`: with all that its source has brought on."""
        lane = self._forwarders.get(name)
        if lane is None:
            return None
        if fresh:
            with suppress(Error):
                lanes.pull_from_sources(lane.dest)
        with lane.dest.lock:
            found = next((router for router in lane.routers if router.name == name), None)
            return None if found is None else router_state(found, lane.forwarded[name], created=created)

    def all_routers(self) -> list[Router]:
        return [router for lane in set(self._forwarders.values()) for router in lane.routers]

    # ── making and dropping; the registry's lock is held ──────────────────────────────────────

    def check(self, wanted: Router) -> bool:
        """Whether it is there already. Raises where it may not be made, in the order of the contract."""
        routers = self.all_routers()
        known = check_endpoints(wanted, routers)
        if known is None and self._limit and len(self._forwarders) >= self._limit:
            raise Throttled("routers", max=self._limit, used=len(self._forwarders), asked=1)
        check_cycle(wanted, routers)
        return known is not None

    def create_or_update(self, wanted: Router, source: TopicState, dest: TopicState) -> None:
        """Make a router, or change the one of this name."""
        lane = dest.upstream
        if lane is None:
            lane = Forwarder(source, dest, source.index.head)
            with source.lock:  # from here on the source remembers what the lane may ask for
                source.downstream.append(lane)
        with suppress(Error):  # what cannot be passed on now will be, as the router is then
            lane.run()
        with lane.lock:
            routers = lane.routers
            at = next((at for at, router in enumerate(routers) if router.name == wanted.name), None)
            if at is not None and routers[at].settings == wanted.settings:
                return
            start = source.index.head if at is None else lane.cursor
            made = replace(wanted, start=start, dest_head_at_creation=dest.index.head)
            after = (*routers, made) if at is None else (*routers[:at], made, *routers[at + 1 :])
            try:
                self._log_router_frame(lane, made.to_body(), partial(self._set_routers, lane, after))
            except BaseException:
                if not routers:
                    self._end_forwarder(lane)
                raise
        self._forwarders[wanted.name] = lane
        self._watch_source(lane)

    def drop(self, name: str) -> bool:
        """Drop a router behind all that its source has; False where there is none."""
        lane = self._forwarders.get(name)
        if lane is None:
            return False
        with suppress(Error):
            lanes.pull_from_sources(lane.dest)
        with lane.lock:
            after = tuple(router for router in lane.routers if router.name != name)
            self._log_router_frame(lane, control_frames.RouterDelete(name), partial(self._set_routers, lane, after))
        del self._forwarders[name]
        if not after:
            self._end_forwarder(lane)
        return True

    def _set_routers(self, forwarder: Forwarder, routers: tuple[Router, ...], number: int) -> None:
        """The WAL has a change of routers. A checkpoint sees all of it or nothing."""
        dest = forwarder.dest
        with dest.lock:
            forwarder.routers = routers
            forwarder.forwarded = {router.name: forwarder.forwarded.get(router.name, 0) for router in routers}
            dest.upstream = forwarder if routers else None
            dest.applied_router_frame = number

    def _log_router_frame(self, forwarder: Forwarder, body: control_frames.Body, apply: Callable[[int], None]) -> None:
        """Write a router frame of the target, durably, and apply it under its number."""
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
            source.downstream = [out for out in source.downstream if out is not forwarder]
        if not source.downstream and (bell := self._listeners.pop(source.id, None)):
            source.remove_listener(bell)

    def drop_routers_from(self, topic: TopicState) -> set[str]:
        """Drop the routers that lead from a topic that is about to go; return them, and those that lead to it."""
        away = {name for name, lane in self._forwarders.items() if lane.source is topic}
        for name in sorted(away):
            self.drop(name)
        return away | {name for name, lane in self._forwarders.items() if lane.dest is topic}

    def forget_topic(self, topic: TopicState) -> None:
        """A topic was dropped, and with it the routers that led to it."""
        lane = topic.upstream
        if lane is not None:
            for router in lane.routers:
                del self._forwarders[router.name]
            self._end_forwarder(lane)
            with topic.lock:
                topic.upstream = None

    # ── driving ───────────────────────────────────────────────────────────────────────────────

    def run_pass(self) -> bool:
        """One pass over every lane; whether there was something to pass on."""
        return bool(self._run_passes(list(dict.fromkeys(self._forwarders.copy().values()))))

    def run_until_idle(self) -> None:
        """Bring on all that can be: through chains, and around circles until their records have gone far enough."""
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
        """Bring on what a source has, some at a time; whether a dest has no room for it."""
        moving = out = list(source.downstream)
        while moving and not self._ending.is_set():
            moving = self._run_passes(moving)
        return any(lane.is_blocked for lane in out)

    def _run_passes(self, lanes: list[Forwarder]) -> list[Forwarder]:
        """One pass over each of these lanes; those that moved. Passes are staged first and waited for together, so
        that targets of one shard share a write and a sync."""
        moved = list[Forwarder]()
        while lanes:
            some, lanes = lanes[:_PASSES_AT_ONCE], lanes[_PASSES_AT_ONCE:]
            held = [lane for lane in some if lane.lock.acquire(blocking=False)]
            try:
                begun = [(lane, self._begin_pass(lane)) for lane in held]
                moved += [lane for lane, wait in begun if self._finish_pass(wait)]
            finally:
                for lane in held:
                    lane.lock.release()
            # Another thread is at these: they are waited for one by one, with no other turn held.
            moved += [lane for lane in some if lane not in held and self._finish_pass(lane.step)]
        return moved

    def _begin_pass(self, forwarder: Forwarder) -> Callable[[], bool]:
        try:
            return forwarder.begin_pass()
        except Exception as error:  # of one lane: the others go on, and so does the thread
            self._on_error(error)
            return lambda: False

    def _finish_pass(self, go: Callable[[], bool]) -> bool:
        try:
            return go()
        except Exception as error:  # of one lane: the others go on, and so does the thread
            self._on_error(error)
            return False

    def close(self) -> None:
        """End the thread and bring on what is left."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.run_until_idle()


def require_router(state: RouterState | None, name: str) -> RouterState:
    if state is None:
        raise RouterNotFound(name)
    return state
