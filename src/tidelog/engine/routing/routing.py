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

from tidelog.engine.core import Core
from tidelog.engine.routing import lane as lanes
from tidelog.engine.routing.lane import Lane
from tidelog.engine.routing.router import Router, RouterState, check_circle, check_fits, shown
from tidelog.errors import Error, RouterNotFound, Throttled
from tidelog.formats import bodies
from tidelog.wal import Commit, Token

_AGAIN_S = 0.05  # how soon a lane without room is tried again
_TOGETHER = 64  # passes that are under way at a time
Troubles = Callable[[Exception], None]


class Routing:
    def __init__(self, cores: Iterable[Core], *, limit: int, threaded: bool, troubles: Troubles) -> None:
        self._lanes: dict[str, Lane] = {}  # by the name of a router
        self._limit, self._threaded, self._troubles = limit, threaded, troubles
        self._wake, self._ending = Event(), Event()
        self._bells: dict[int, Callable[[], None]] = {}  # by the id of a source
        self._fresh: set[Core] = set()  # sources that have published since they were last looked at
        self._thread: Thread | None = None
        for core in cores:
            if core.lane is not None:
                self._lanes |= dict.fromkeys((router.name for router in core.lane.routers), core.lane)
                self._listen(core.lane)

    @property
    def threaded(self) -> bool:
        """Whether lanes are driven by themselves."""
        return self._threaded

    # ── what there is ─────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._lanes)

    def states(self, prefix: str, source: str | None, dest: str | None) -> list[RouterState]:
        """By name, as they are, without bringing on anything."""
        names = [name for name in sorted(self._lanes.copy(), key=str.encode) if name.startswith(prefix)]
        found = [self.state(name, fresh=False) for name in names]
        return [state for state in found if state and source in (None, state.source) and dest in (None, state.dest)]

    def state(self, name: str, *, created: bool = False, fresh: bool = True) -> RouterState | None:
        """One router; `fresh`: with all that its source has brought on."""
        lane = self._lanes.get(name)
        if lane is None:
            return None
        if fresh:
            with suppress(Error):
                lanes.catch_up(lane.dest)
        with lane.dest.lock:
            found = next((router for router in lane.routers if router.name == name), None)
            return None if found is None else shown(found, lane.forwarded[name], created=created)

    def all(self) -> list[Router]:
        return [router for lane in set(self._lanes.values()) for router in lane.routers]

    # ── making and dropping; the registry's lock is held ──────────────────────────────────────

    def check(self, wanted: Router) -> bool:
        """Whether it is there already. Raises where it may not be made, in the order of the contract."""
        routers = self.all()
        known = check_fits(wanted, routers)
        if known is None and self._limit and len(self._lanes) >= self._limit:
            raise Throttled("routers", max=self._limit, used=len(self._lanes), asked=1)
        check_circle(wanted, routers)
        return known is not None

    def put(self, wanted: Router, source: Core, dest: Core) -> None:
        """Make a router, or change the one of this name."""
        lane = dest.lane
        if lane is None:
            lane = Lane(source, dest, source.index.head)
            with source.lock:  # from here on the source remembers what the lane may ask for
                source.lanes.append(lane)
        with suppress(Error):  # what cannot be passed on now will be, as the router is then
            lane.run()
        with lane.turn:
            routers = lane.routers
            at = next((at for at, router in enumerate(routers) if router.name == wanted.name), None)
            if at is not None and routers[at].wish == wanted.wish:
                return
            start = source.index.head if at is None else lane.cursor
            made = replace(wanted, start=start, base=dest.index.head)
            after = (*routers, made) if at is None else (*routers[:at], made, *routers[at + 1 :])
            try:
                self._log(lane, made.as_body(), partial(self._set, lane, after))
            except BaseException:
                if not routers:
                    self._end(lane)
                raise
        self._lanes[wanted.name] = lane
        self._listen(lane)

    def drop(self, name: str) -> bool:
        """Drop a router behind all that its source has; False where there is none."""
        lane = self._lanes.get(name)
        if lane is None:
            return False
        with suppress(Error):
            lanes.catch_up(lane.dest)
        with lane.turn:
            after = tuple(router for router in lane.routers if router.name != name)
            self._log(lane, bodies.RouterDelete(name), partial(self._set, lane, after))
        del self._lanes[name]
        if not after:
            self._end(lane)
        return True

    def _set(self, lane: Lane, routers: tuple[Router, ...], number: int) -> None:
        """The WAL has a change of routers. A checkpoint sees all of it or nothing."""
        dest = lane.dest
        with dest.lock:
            lane.routers = routers
            lane.forwarded = {router.name: lane.forwarded.get(router.name, 0) for router in routers}
            dest.lane = lane if routers else None
            dest.wired = number

    def _log(self, lane: Lane, body: bodies.Body, apply: Callable[[int], None]) -> None:
        """Write a router frame of the target, durably, and apply it under its number."""
        dest = lane.dest
        token: Token[None] = Token(dest.shard)

        def done(error: Error | None) -> None:
            if error is None:
                apply(number)
                token.set(None)
            else:
                token.fail(error)

        with dest.lock:  # numbers are in the order of the WAL
            number = dest.wiring + 1
            dest.submit(Commit([lane.framed(body, number)], frames=1, durable=True, done=done))
            dest.wiring = number
        token.wait()

    def _end(self, lane: Lane) -> None:
        lane.ended = True
        source = lane.source
        with source.lock:
            source.lanes = [out for out in source.lanes if out is not lane]
        if not source.lanes and (bell := self._bells.pop(source.id, None)):
            source.unlisten(bell)

    def leave(self, core: Core) -> set[str]:
        """Drop the routers that lead from a topic that is about to go; return them, and those that lead to it."""
        away = {name for name, lane in self._lanes.items() if lane.source is core}
        for name in sorted(away):
            self.drop(name)
        return away | {name for name, lane in self._lanes.items() if lane.dest is core}

    def forget(self, core: Core) -> None:
        """A topic was dropped, and with it the routers that led to it."""
        lane = core.lane
        if lane is not None:
            for router in lane.routers:
                del self._lanes[router.name]
            self._end(lane)
            with core.lock:
                core.lane = None

    # ── driving ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> bool:
        """One pass over every lane; whether there was something to pass on."""
        return bool(self._stepped(list(dict.fromkeys(self._lanes.copy().values()))))

    def settle(self) -> None:
        """Bring on all that can be: through chains, and around circles until their records have gone far enough."""
        while self.run():
            pass

    def _listen(self, lane: Lane) -> None:
        if not self._threaded:
            return
        source = lane.source
        lane.source.listen(self._bells.setdefault(source.id, partial(self._rung, source)))
        if self._thread is None:
            self._thread = Thread(target=self._drive, name="tidelog routers", daemon=True)
            self._thread.start()
        self._rung(source)

    def _rung(self, source: Core) -> None:
        self._fresh.add(source)
        self._wake.set()

    def _drive(self) -> None:
        blocked: set[Core] = set()
        while not self._ending.is_set():
            self._wake.wait(_AGAIN_S if blocked else None)
            self._wake.clear()
            waiting, blocked = blocked, set()
            while self._fresh:
                waiting.add(self._fresh.pop())
            for source in waiting:
                if self._pass_on(source):
                    blocked.add(source)

    def _pass_on(self, source: Core) -> bool:
        """Bring on what a source has, some at a time; whether a dest has no room for it."""
        moving = out = list(source.lanes)
        while moving and not self._ending.is_set():
            moving = self._stepped(moving)
        return any(lane.blocked for lane in out)

    def _stepped(self, lanes: list[Lane]) -> list[Lane]:
        """One pass over each of these lanes; those that moved. Passes are staged first and waited for together, so
        that targets of one shard share a write and a sync."""
        moved = list[Lane]()
        while lanes:
            some, lanes = lanes[:_TOGETHER], lanes[_TOGETHER:]
            held = [lane for lane in some if lane.turn.acquire(blocking=False)]
            try:
                begun = [(lane, self._begun(lane)) for lane in held]
                moved += [lane for lane, wait in begun if self._moved(wait)]
            finally:
                for lane in held:
                    lane.turn.release()
            # Another thread is at these: they are waited for one by one, with no other turn held.
            moved += [lane for lane in some if lane not in held and self._moved(lane.step)]
        return moved

    def _begun(self, lane: Lane) -> Callable[[], bool]:
        try:
            return lane.begin()
        except Exception as error:  # of one lane: the others go on, and so does the thread
            self._troubles(error)
            return lambda: False

    def _moved(self, go: Callable[[], bool]) -> bool:
        try:
            return go()
        except Exception as error:  # of one lane: the others go on, and so does the thread
            self._troubles(error)
            return False

    def close(self) -> None:
        """End the thread and bring on what is left."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.settle()


def found(state: RouterState | None, name: str) -> RouterState:
    if state is None:
        raise RouterNotFound(name)
    return state
